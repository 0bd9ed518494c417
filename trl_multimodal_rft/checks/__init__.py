# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a policy promises, measured on the user's own model and data: functions of a policy and prompts."""
