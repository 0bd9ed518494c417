# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Preference optimization (DPO and KTO) and reward models, from completions that people compared or labelled."""
