# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Models and their parts: critics, encoders, modes, quantization, loading by name."""

from packaging.version import Version as _Version
from transformers.integrations import peft as _peft
from transformers.modeling_outputs import MoeCausalLMOutputWithPast as _MoeOutput

from .critic import Critic, ValueHead


# In transformers 5.24, Llama 4 reads this attribute of its decoder's output, which lacks the attribute, so that each
# forward fails
if not hasattr(_MoeOutput, "image_outputs"):
    _MoeOutput.image_outputs = None

# To switch Granite Speech's adapter, transformers 5.24 requires an unreleased version of PEFT, although 0.19.1 works,
# which transformers 5.16 requires
if hasattr(_peft, "MIN_PEFT_VERSION"):
    _peft.MIN_PEFT_VERSION = min(_peft.MIN_PEFT_VERSION, "0.19.1", key=_Version)  # pyrefly: ignore[bad-assignment]
