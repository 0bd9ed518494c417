# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
from .generation import as_generation_config, generate_completions, generate_in_parts, trim_after_eos
