# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
What an optimizer step of each method computes, as its paper writes it: to read first, and for tests to compare with.

Every completion has a forward pass of its own, in float64. `forward` is what the methods share.
"""
