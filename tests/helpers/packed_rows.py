# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Models that run packed rows, and gradients and results of padded rows to compare with."""

import inspect
from itertools import product

import pytest
import torch
from transformers.masking_utils import create_chunked_causal_mask

from helpers.completions import G
from helpers.encoding import build_encoded
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.head import add_fused_head
from trl_multimodal_rft.forward.logprobs import completion_scores
from trl_multimodal_rft.forward.masks import sharing_obstacle
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.models.modes import checkpoint_activations


# In older versions of transformers, `create_masks_for_generate` fails for layers with chunked attention
LLAMA4_PACKS = "block_sequence_ids" in inspect.signature(create_chunked_causal_mask).parameters


def skip_linear_attention(model):
    """Skips tests of packed rows if transformers can't pack rows; see `test_obstacles.py` for the fallback."""
    if "before transformers 5.21" in (sharing_obstacle(model) or ""):
        pytest.skip(sharing_obstacle(model))


def build(name, attention="sdpa", device="cpu", dtype=torch.float32):
    """Returns a model that runs packed rows, and the prompt of each completion."""
    model, _, prompts = build_encoded(name)
    if attention != "sdpa":
        model.get_decoder().set_attn_implementation(attention)
    add_fused_head(model, outputs=("log_probs", "entropy"))
    skip_linear_attention(model)
    assert sharing_obstacle(model) is None
    install_prefix_attention(model)
    return model.to(device, dtype), [prompt for prompt, _ in product(prompts, range(G))]


def backward(model, logps, entropies=0, mask=1):
    """Returns gradients, by parameter, of an objective that weights every token differently."""
    weights = torch.randn(logps.shape, generator=torch.Generator().manual_seed(1)).to(logps.device)
    model.zero_grad(set_to_none=True)
    ((logps * weights) * mask + 0.1 * entropies * mask).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def padded_reference(model, prompts, ids, mask):
    """Returns log-probabilities, entropies and gradients, from one padded batch for the completions of each prompt."""
    parts = [
        completion_scores(
            model, model, ScoreRequest(prompts[i : i + G], ids[i : i + G], mask[i : i + G], packed=False)
        )
        for i in range(0, len(prompts), G)
    ]
    logps, entropies = (torch.cat(values) for values in zip(*((p.logps, p.entropies) for p in parts), strict=True))
    return logps, entropies, backward(model, logps, entropies, mask)


def enable_checkpointing(model):
    """Enables training mode without its randomness."""
    checkpoint_activations(model, {"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, (torch.nn.Dropout, torch.nn.modules.batchnorm._BatchNorm)):
            module.eval()
