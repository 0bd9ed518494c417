# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
from .columns import MEDIA_COLUMNS, MediaError, MediaRef, rows_to_messages, strip_media
from .encoding import EncodedPrompt, encode_prompt, join_media
from .loading import load_audio, load_image, load_video
