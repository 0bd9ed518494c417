# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What `trl-multimodal-rft grpo` and its like launch: one module per command, with `ARGUMENTS` and `main`."""
