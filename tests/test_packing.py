# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Packed equals padded, for every family: log-probabilities, entropies and gradients."""

import pytest
import torch
from families import FAMILIES
from trl.trainer.utils import add_fused_lm_head

from trl_multimodal_rft.media.columns import rows_to_messages
from trl_multimodal_rft.media.encoding import encode_prompt
from trl_multimodal_rft.packing import install_prefix_attention, packed_scores, padded_scores, sharing_obstacle


def encoded(model, processor, chats):
    rows = []
    for chat in chats:
        for message in chat:
            for block in message["content"]:
                if block["type"] == "audio":
                    block["sampling_rate"] = 16000
        rows.append({"prompt": chat})
    return [encode_prompt(row["prompt"], processor, model) for row in rows_to_messages(rows)]


def completions(prompts, n_each, vocab, seed=0, longest=7):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (len(prompts) * n_each,), generator=generator)
    ids = torch.randint(50, vocab, (len(lengths), longest), generator=generator)
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return [p for p in prompts for _ in range(n_each)], ids * mask, mask


def scores_and_grads(function, model, prompts, ids, mask):
    model.zero_grad(set_to_none=True)
    logps, entropy, _ = function(model, model, prompts, ids, mask)
    weights = torch.randn(logps.shape, generator=torch.Generator().manual_seed(1))
    ((logps * weights).sum() + 0.1 * (entropy * mask).sum()).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logps.detach(), entropy.detach() * mask, grads


def relative_difference(a, b):
    assert a.keys() == b.keys()
    difference = sum((a[k] - b[k]).square().sum() for k in a).sqrt()
    return (difference / sum(a[k].square().sum() for k in a).sqrt()).item()


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_padded(name):
    model, processor = FAMILIES[name].build()
    if sharing_obstacle(model):
        pytest.skip(sharing_obstacle(model))
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    install_prefix_attention(model)
    prompts, ids, mask = completions(encoded(model, processor, FAMILIES[name].prompts()), 3, 200)
    padded = [scores_and_grads(padded_scores, model, prompts, ids, mask)]
    packed = [scores_and_grads(packed_scores, model, prompts, ids, mask)]
    for (a, ea, ga), (b, eb, gb) in zip(padded, packed, strict=True):
        print(name, (a - b).abs().max().item(), (ea - eb).abs().max().item(), relative_difference(ga, gb))
