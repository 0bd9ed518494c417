# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The path from rows of a dataset to completions with advantages: each stage is a function that fills a rollout."""
