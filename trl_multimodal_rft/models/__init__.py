# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Models and their parts: critics, encoders, modes, quantization, loading by name."""

from .critic import Critic, ValueHead
