# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rules by which prompts join in one forward; that they are right is measured in test_obstacles.py."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers.by_hand import FAMILIES, gradients, molmo2, own_logps
from helpers.completions import random_completions
from helpers.encoding import encode_chats
from helpers.families import FAMILIES as MATRIX
from helpers.families import encode
from transformers import DynamicCache, GenerationConfig

from trl_multimodal_rft import ActorVL
from trl_multimodal_rft.encoding import prompts as encoding
from trl_multimodal_rft.encoding.prompts import join_media
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.head import add_fused_head
from trl_multimodal_rft.forward.masks import linear_masks, sharing_obstacle
from trl_multimodal_rft.forward.scoring import completion_scores
from trl_multimodal_rft.policy import PolicyForward, Remedies


@pytest.mark.parametrize("name", ["fun_asr_nano", "glmasr", "minimax_m3_vl", "molmo2", "molmo2 video"])
def test_without_the_row_of_the_family_it_would_be_wrong(name, monkeypatch):
    monkeypatch.setattr(encoding, "indexed_media", lambda name: None)
    model, prompts = FAMILIES[name]()
    repeated = [prompt for prompt in prompts for _ in range(2)]
    ids, mask = random_completions(len(repeated), vocab=(50, 100))
    assert add_fused_head(model, outputs=("log_probs", "entropy"))
    packed = sharing_obstacle(model) is None
    if packed:
        install_prefix_attention(model)
    with torch.no_grad():
        expected = own_logps(model, repeated, ids, mask)
        logps = completion_scores(model, model, repeated, ids, mask, packed=packed).logps
    assert (logps - expected).abs().max() > 1e-2


def test_places_in_another_tensor_go_on():
    model, (first, second, _) = molmo2()
    joined = join_media([first, second, first])
    places = [each.media["image_token_pooling"] for each in (first, second)]
    patches = [0, 2 * 16, 7 * 16]  # of the images before
    shifted = [torch.where(own < 0, -1, own + n) for own, n in zip([*places, places[0]], patches, strict=True)]
    assert joined["image_token_pooling"].equal(torch.cat(shifted)) and (joined["image_token_pooling"] == -1).sum() == 3
    with pytest.raises(ValueError, match="molmo2 .* hold places in others"):
        ActorVL(model, bf16=False)


def test_a_window_that_only_the_config_knows():
    """Qwen3-Omni's forward attends to everything, whatever the window of its config; rules that read it don't."""
    model, processor = MATRIX["qwen3_omni_moe"].build()
    chats = MATRIX["qwen3_omni_moe"].prompts()[:2]
    model.config.get_text_config().sliding_window = 6
    prompts = encode_chats(model, processor, chats)
    assert set(linear_masks(model, prompts[0], 4).values()) == {None}
    repeated = [prompt for prompt in prompts for _ in range(2)]
    ids, mask = random_completions(len(repeated))
    expected = own_logps(model, repeated, ids, mask)
    own = gradients(model, expected)
    scale = max(gradient.abs().max() for gradient in own.values())
    assert add_fused_head(model, outputs=("log_probs", "entropy"))
    install_prefix_attention(model)
    for packed in (False, True):
        logps = completion_scores(model, model, repeated, ids, mask, packed=packed, apart="media").logps
        assert (logps - expected).abs().max() <= 1e-5
        for key, gradient in gradients(model, logps).items():
            assert (gradient - own[key]).abs().max() <= 1e-5 * scale, key

    config = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    plain = []
    for chat in chats:
        inputs = encode(processor, chat)
        output = model.generate(**inputs, past_key_values=DynamicCache(), generation_config=config)
        plain.append(output[0, inputs["input_ids"].size(1) :].tolist())
    for share_prefill in (True, False):
        sampled = PolicyForward(remedies=Remedies(apart="media")).sample(
            model, prompts, config, 0, share_prefill=share_prefill, generating=partial(nullcontext, model)
        )
        assert sampled.tolist() == plain
