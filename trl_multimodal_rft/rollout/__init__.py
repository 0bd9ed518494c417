# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The way from a dataset's rows to completions with advantages: one object, which one function per stage fills."""
