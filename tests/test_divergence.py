# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Hidden states of completions, and divergences of two models' distributions from them."""

import pytest
import torch
from helpers.completions import random_completions
from helpers.packed_rows import build, relative_difference

from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.policy import Fallbacks, PolicyForward


FAMILIES = ["qwen2_5_vl", "qwen2_audio", "gemma3", "qwen2_5_omni", "llava"]


def plain_states(model, prompts, ids, mask):
    """Returns the states that the head gets, in a forward of the model's own for each completion."""
    taken = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: taken.append(args[0]))
    rows = []
    for prompt, completion, own in zip(prompts, ids, mask.bool(), strict=True):
        completion = completion[own]
        inputs = {name: value for name, value in prompt.media.items()}
        fields = {
            name: torch.cat([value, value.new_zeros(len(completion))])[None]
            for name, value in prompt.token_fields.items()
        }
        whole = torch.cat([prompt.input_ids, completion])[None]
        model(input_ids=whole, attention_mask=torch.ones_like(whole), **inputs, **fields)
        row = taken.pop()[0, len(prompt) - 1 : -1] if len(completion) else taken.pop()[0, :0]
        rows.append(torch.nn.functional.pad(row, (0, 0, 0, len(own) - len(row))))
    handle.remove()
    return torch.stack(rows)


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_are_those_of_a_plain_forward(name):
    model, prompts = build(name)
    ids, mask = random_completions(len(prompts))
    expected = plain_states(model, prompts, ids, mask)
    expected.square().sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for packed in (True, False):
        model.zero_grad()
        policy = PolicyForward(fallbacks=Fallbacks(isolate=family_of(model).isolate))
        found = policy.score(model, prompts, ids, mask, packed=packed, hidden=True).hidden
        assert found.shape == (*ids.shape, model.config.get_text_config().hidden_size)
        assert (found - expected).abs().max() <= 1e-5
        found.square().sum().backward()
        ours = {n: p.grad for n, p in model.named_parameters() if n in gradients}
        assert relative_difference(gradients, ours) <= 1e-5
