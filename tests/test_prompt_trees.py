# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prompts that start alike share what they start with: scores, gradients and updates equal those of separate rows."""

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from helpers.chats import chat, text
from helpers.completions import G, random_completions
from helpers.cuda_path import cuda_path
from helpers.encoding import encode_chats
from helpers.families import ALL_FAMILIES, every_family
from helpers.packed_rows import backward, relative_difference, skip_linear_attention

from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward import trees
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.head import add_fused_head
from trl_multimodal_rft.forward.masks import _is_causal, linear_masks, trees_of
from trl_multimodal_rft.forward.scoring import completion_scores


QUESTIONS = ["Is there a bird?", "Is there a cat? Yes", "Is there a bird? No", "Describe the image."]
# Sliding windows, chunked and latent attention, states
OTHERS = ["kimi_k25", "llama4", "qwen3_5_deep", "lfm2_vl", "mistral3", "cohere2_vision", "llava_gpt_oss"]
LONG = "What is in the image? " * 6


def built(name, chats, attention="sdpa"):
    """Returns a model that runs packed rows, and the prompt of each completion of chats."""
    model, processor = ALL_FAMILIES[name].build()
    prompts = encode_chats(model, processor, copy.deepcopy(chats))
    if attention != "sdpa":
        model.get_decoder().set_attn_implementation(attention)
    add_fused_head(model, outputs=("log_probs", "entropy"))
    skip_linear_attention(model)
    install_prefix_attention(model)
    return model.eval(), [prompt for prompt in prompts for _ in range(G)]


def several_questions(name):
    """Chats about the same media, about others, and about none."""
    of_family = ALL_FAMILIES[name].prompts()
    shared, other = of_family[0][0]["content"], of_family[1]
    chats = [chat(*shared, text(LONG + question)) for question in QUESTIONS]
    texts = [chat(text(LONG + question)) for question in QUESTIONS[:2] if name != "paligemma"]  # it requires an image
    return [chats[0], other, *chats[1:], *texts]


def shared_nodes(model, prompts):
    return [node for node, _ in trees.walk(trees_of(model, prompts, [1] * len(prompts))) if node.children]


def alone(model, prompts, ids, mask):
    """Scores and gradients of the model's own forward of each completion, without padding."""
    logps, entropies = torch.zeros(ids.shape), torch.zeros(ids.shape)
    for i, length in enumerate(mask.sum(1).tolist()):
        if length:
            row = prompts[i : i + 1], ids[i : i + 1, :length], mask[i : i + 1, :length]
            scores = completion_scores(model, model, *row, packed=False)
            logps[i, :length], entropies[i, :length] = scores.logps[0], scores.entropies[0]
    return logps, entropies, backward(model, logps, entropies, mask)


def differences(scores, expected, model, mask):
    """The largest differences of log-probabilities, entropies and gradients from what is expected."""
    logps, entropies, grads = expected
    own = backward(model, scores.logps, scores.entropies, mask)
    return (
        float((scores.logps - logps * mask).abs().max()),
        float((scores.entropies - entropies * mask).abs().max()),
        relative_difference(grads, own),
    )


@pytest.fixture
def separate(monkeypatch):
    """A context in which prompts share nothing."""

    @contextmanager
    def within():
        with monkeypatch.context() as patch:
            patch.setattr(trees, "_WORTH_SHARING", float("inf"))
            yield

    return within


@pytest.mark.parametrize("mode", ["sdpa", "eager", "cuda"])
@pytest.mark.parametrize("name", [*every_family(), *every_family(OTHERS)])
def test_trees_equal_separate_rows(name, mode, monkeypatch, separate):
    if (name, mode) == ("phi4_multimodal", "eager"):
        pytest.skip("its vision tower has no working eager attention in transformers 5.23")
    model, prompts = built(name, several_questions(name), "eager" if mode == "eager" else "sdpa")
    ids, mask = random_completions(len(prompts))
    mask[1] = mask[6:9] = 0
    expected = alone(model, prompts, ids, mask)
    isolate = family_of(model).isolate
    with cuda_path(monkeypatch) if mode == "cuda" else nullcontext():
        found = differences(
            completion_scores(model, model, prompts, ids, mask, isolate=isolate), expected, model, mask
        )
        with separate():
            scores = completion_scores(model, model, prompts, ids, mask, isolate=isolate)
        before = differences(scores, expected, model, mask)
    # Chunked kernels of states round by where a chunk starts
    assert all(now <= max(1e-5, 2 * then) for now, then in zip(found, before, strict=True)), (found, before)
    shared = {bool(node.prompt.media) for node in shared_nodes(model, prompts)}
    sees_media_both_ways = any(not _is_causal(linear_masks(model, prompt, 1)) for prompt in prompts if prompt.media)
    assert shared == ({False} if sees_media_both_ways else {False, True}) - ({False} if name == "paligemma" else set())
