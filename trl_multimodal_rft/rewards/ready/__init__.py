# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Ready reward functions, such as of choices, boxes and transcripts. No trainer needs them."""
