# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prompts in one forward give what each gives alone, where a family needs a rule for it."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers.encoding import encode_chats
from helpers.families import FAMILIES, encode
from helpers.handmade import HANDMADE, encoded, molmo2
from transformers import DynamicCache, GenerationConfig

from trl_multimodal_rft import ActorVL
from trl_multimodal_rft.encoding import prompts as encoding
from trl_multimodal_rft.encoding.prompts import join_media
from trl_multimodal_rft.families import TOKEN_FIELDS, family_of
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.head import add_fused_head
from trl_multimodal_rft.forward.masks import linear_masks, sharing_obstacle
from trl_multimodal_rft.policy import PolicyForward, Remedies


SAMPLING = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)


def random_completions(n):
    ids = torch.randint(20, 90, (n, 4), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 2:] = 0
    return ids, mask, torch.randn(n, 4, generator=torch.Generator().manual_seed(1)) * mask


def alone(model, inputs, row):
    """Log-probabilities of a completion by the model's own forward of nothing else."""
    own = {**inputs, "input_ids": torch.cat([inputs["input_ids"], row[None]], dim=1)}
    own["attention_mask"] = torch.ones_like(own["input_ids"])
    own.update({name: torch.cat([inputs[name], 0 * row[None]], dim=1) for name in TOKEN_FIELDS if name in inputs})
    logits = model(**own).logits[0, -len(row) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, row[:, None])[:, 0]


def gradient(model, logps, weights):
    model.zero_grad()
    (logps * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def measure(model, inputs, prompts, remedies=None):
    """Largest differences of log-probabilities and, relative, of gradients, over packed and padded rows."""
    ids, mask, weights = random_completions(2 * len(inputs))
    lengths = mask.sum(1).tolist()
    rows = [alone(model, inputs[i // 2], ids[i, :length]) for i, length in enumerate(lengths)]
    truth = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    gradients = gradient(model, truth, weights)
    policy = PolicyForward(remedies=remedies or Remedies(apart=family_of(model).apart))
    worst = [0.0, 0.0]
    for packed in {False, sharing_obstacle(model) is None}:
        logps = policy.score(model, [prompts[i // 2] for i in range(len(ids))], ids, mask, packed=packed).logps
        off = (gradient(model, logps, weights) - gradients).norm() / gradients.norm()
        worst = [max(worst[0], (logps - truth).abs().max().item()), max(worst[1], off.item())]
    return worst


def prepared(model):
    assert add_fused_head(model, outputs=("log_probs", "entropy"))
    if sharing_obstacle(model) is None:
        install_prefix_attention(model)
    return model


def assert_samples(model, prompts, expected):
    policy = PolicyForward(remedies=Remedies(apart=family_of(model).apart))
    for share_prefill in (True, False):
        sampled = policy.sample(
            model, prompts, SAMPLING, 0, share_prefill=share_prefill, generating=partial(nullcontext, model)
        )
        assert sampled.tolist() == expected


@pytest.mark.parametrize("name", [*HANDMADE, "molmo2 video"])
def test_joined_prompts_give_what_each_gives_alone(name, monkeypatch):
    model, inputs = molmo2("video") if name == "molmo2 video" else HANDMADE[name]()
    expected = []
    for own in inputs:
        plain = {**own, "attention_mask": torch.ones_like(own["input_ids"])}
        ids = model.generate(**plain, generation_config=SAMPLING)[0, own["input_ids"].size(1) :].tolist()
        expected += [ids, ids]
    prompts = [encoded(model, own) for own in inputs]
    prepared(model)
    logps, gradients = measure(model, inputs, prompts)
    assert logps < 1e-5 and gradients < 1e-5
    assert_samples(model, [prompts[0], prompts[0], prompts[1], prompts[1]], expected)
    if name == "mistral_large4":
        return
    # Without the family's row it would be wrong
    monkeypatch.setattr(encoding, "indexed_media", lambda name: None)
    assert measure(model, inputs, prompts, Remedies())[0] > 1e-2


def test_places_in_another_tensor_go_on():
    model, inputs = molmo2()
    first, second = (encoded(model, own) for own in inputs)
    joined = join_media([first, second, first])
    places = [each.media["image_token_pooling"] for each in (first, second)]
    patches = [0, 2 * 16, 7 * 16]  # of the images before
    shifted = [torch.where(own < 0, -1, own + n) for own, n in zip([*places, places[0]], patches, strict=True)]
    assert joined["image_token_pooling"].equal(torch.cat(shifted)) and (joined["image_token_pooling"] == -1).sum() == 3
    with pytest.raises(ValueError, match="molmo2 .* hold places in others"):
        ActorVL(model, bf16=False)


def test_a_window_that_only_the_config_knows():
    """Qwen3-Omni's forward attends to everything, whatever the window of its config; rules that read it don't."""
    model, processor = FAMILIES["qwen3_omni_moe"].build()
    chats = FAMILIES["qwen3_omni_moe"].prompts()[:2]
    inputs = [{k: v for k, v in encode(processor, chat).items() if k != "attention_mask"} for chat in chats]
    model.config.get_text_config().sliding_window = 6
    prompts = encode_chats(model, processor, chats)
    assert set(linear_masks(model, prompts[0], 4).values()) == {None}
    prepared(model)
    logps, gradients = measure(model, inputs, prompts)
    assert logps < 1e-5 and gradients < 1e-5
    ids = []
    for own in inputs:
        plain = {**own, "attention_mask": torch.ones_like(own["input_ids"]), "past_key_values": DynamicCache()}
        ids.append(model.generate(**plain, generation_config=SAMPLING)[0, own["input_ids"].size(1) :].tolist())
    assert_samples(model, prompts, ids)
