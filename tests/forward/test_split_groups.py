# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A group that doesn't fit is split: its prompt is forwarded once, and scores and gradients are those of the whole."""

import itertools
from contextlib import contextmanager

import pytest
import torch
from accelerate import Accelerator
from helpers.completions import G, random_completions
from helpers.cuda_path import cuda_path
from helpers.families import every_family
from helpers.marks import slow_but
from helpers.packed_rows import backward, build, enable_checkpointing, padded_reference
from helpers.trainer_utils import relative_difference

from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward import kernels, layout, split_groups
from trl_multimodal_rft.forward.partition import split_by_tokens
from trl_multimodal_rft.forward.prompt_groups import group_by_prompt
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.forward.split_groups import chunk_ends
from trl_multimodal_rft.forward.token_budget import backward_by_parts
from trl_multimodal_rft.models.modes import checkpoint_activations
from trl_multimodal_rft.policy import Fallbacks, PolicyForward


pytestmark = pytest.mark.gate


def split_policy(model, max_tokens=1, **fallbacks):
    return PolicyForward(
        fallbacks=Fallbacks(isolate=family_of(model).isolate, **fallbacks), temperature=1.0, max_tokens=max_tokens
    )


def gradients(model, scores, mask):
    """As [`backward`], in parts."""
    weights = torch.randn(scores.logps.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad(set_to_none=True)
    loss = ((scores.logps * weights) * mask + 0.1 * scores.entropies * mask).sum()
    backward_by_parts(Accelerator(cpu=True), model, loss, scores.deferred).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def counted(model):
    """Counts tokens that the text decoder forwards, in the rows of each prompt and in others."""
    lengths = []

    def hook(module, args, kwargs):
        given = kwargs.get("inputs_embeds", kwargs.get("input_ids"))
        lengths.append((given if given is not None else args[0]).shape[:2].numel())

    handle = model.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield lengths
    finally:
        handle.remove()


# Scores and gradients of models


@pytest.mark.parametrize("name", every_family())
def test_scores_and_gradients(name):
    """Also without a gradient; one completion at a time, against the model's own forward of each."""
    model, prompts = build(name)
    ids, mask = random_completions(len(prompts))
    logps, entropies, expected = padded_reference(model, prompts, ids, mask)
    policy = split_policy(model)
    with counted(model) as lengths:
        scores = policy.score(model, ScoreRequest(prompts, ids, mask, packed=True))
        assert len(scores.deferred.parts) == len(prompts)
        found = gradients(model, scores, mask)
    with torch.no_grad():
        again = policy.score(model, ScoreRequest(prompts, ids, mask, packed=True))
    for each in (scores, again):
        assert (each.logps - logps * mask).abs().max() <= 1e-5
        assert (each.entropies - entropies * mask).abs().max() <= 1e-5
    tolerance = 2e-5 if name.startswith("qwen3_5") else 1e-5
    assert relative_difference(expected, found) <= tolerance
    sizes = [len(prompt) for prompt in group_by_prompt(prompts)]
    if split_groups.keeps_states(model):
        # A pass with and one without a gradient: each prompt once, and of each completion what predicts it
        assert sum(lengths) == 2 * (sum(sizes) + int(mask.sum()))


@pytest.mark.parametrize(
    ("name", "attention"),
    slow_but(
        itertools.product(["qwen2_5_vl", "qwen2_audio", "gemma3"], ["sdpa", "eager"]),
        ("qwen2_5_vl", "sdpa"),
        ("gemma3", "eager"),
    ),
)
def test_in_double_precision(name, attention):
    """Against the whole row, under gradient checkpointing, too. The head computes in float32."""
    model, prompts = build(name, attention, dtype=torch.float64)
    ids, mask = random_completions(len(prompts))
    policies = [split_policy(model, None), split_policy(model, max(map(len, prompts)) + 12)]
    for _ in range(2):
        whole, parts = (policy.score(model, ScoreRequest(prompts, ids, mask, packed=True)) for policy in policies)
        expected = backward(model, whole.logps, whole.entropies, mask)
        assert 1 < len(parts.deferred.parts) < len(prompts)
        assert (parts.logps - whole.logps).abs().max() <= 1e-6
        assert relative_difference(expected, gradients(model, parts, mask)) <= 1e-6
        enable_checkpointing(model)


def test_a_frozen_tower_and_frozen_first_layers():
    model, prompts = build("qwen2_5_vl")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name and "visual" not in name)
    ids, mask = random_completions(len(prompts))
    whole = split_policy(model, None).score(model, ScoreRequest(prompts, ids, mask, packed=True))
    expected = backward(model, whole.logps, whole.entropies, mask)
    found = gradients(model, split_policy(model).score(model, ScoreRequest(prompts, ids, mask, packed=True)), mask)
    assert relative_difference(expected, found) <= 1e-5


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # without a gradient
@pytest.mark.parametrize("reentrant", [False, True])
def test_reentrant_checkpointing_repeats_the_prompt(reentrant):
    """It hides the graph of the prompt's keys and values."""
    model, prompts = build("qwen2_5_vl")
    model.model.visual.requires_grad_(False)  # whose inputs have no gradient
    ids, mask = random_completions(len(prompts))
    whole = split_policy(model, None).score(model, ScoreRequest(prompts, ids, mask, packed=True))
    expected = backward(model, whole.logps, whole.entropies, mask)
    checkpoint_activations(model, {"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    assert split_groups.keeps_states(model) != reentrant
    scores = split_policy(model).score(model, ScoreRequest(prompts, ids, mask, packed=True))
    assert relative_difference(expected, gradients(model, scores, mask)) <= 1e-5


def test_dropout_draws_the_same_for_scores_and_gradients():
    """The prompt that chunks attend to is the same in both passes."""
    model, prompts = build("qwen2_5_vl")
    model.config.get_text_config().attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    model.train()
    ids, mask = random_completions(len(prompts))
    scores = split_policy(model).score(model, ScoreRequest(prompts, ids, mask, packed=True))
    torch.rand(1)  # as a loss may draw
    state = torch.get_rng_state()
    for index, outputs in enumerate(scores.deferred.outputs):
        assert torch.equal(scores.deferred.recompute(index).logps, outputs.logps)
    assert torch.equal(torch.get_rng_state(), state)


def test_completions_without_tokens():
    model, prompts = build("qwen2_5_vl")
    ids, mask = random_completions(len(prompts))
    mask[1:G] = 0
    mask[G : G + 2] = 0
    whole = split_policy(model, None).score(model, ScoreRequest(prompts, ids, mask, packed=True))
    expected = backward(model, whole.logps, whole.entropies, mask)
    parts = split_policy(model).score(model, ScoreRequest(prompts, ids, mask, packed=True))
    assert (parts.logps - whole.logps).abs().max() <= 1e-5
    assert relative_difference(expected, gradients(model, parts, mask)) <= 1e-5


# How groups are split


def test_chunks():
    model, prompts = build("qwen2_5_vl")
    unique = list(group_by_prompt(prompts))[:3]
    groups = [[unique[0]] * 4, [unique[1]], [unique[2]] * 3]
    prompts = sum(groups, [])
    lengths = [5, 9, 0, 3, 4, 2, 2, 2]
    budget = len(unique[0]) + 9
    parts = split_by_tokens(prompts, lengths, budget)
    assert sorted(sum(parts, [])) == list(range(8))
    ends = chunk_ends(prompts, parts)
    chunks = [parts[i] for i in ends if prompts[parts[i][0]] is unique[0]]
    assert chunks == [[1, 2], [0, 3]]  # the longest first, with the one without tokens
    of_first = [each for i, each in ends.items() if prompts[parts[i][0]] is unique[0]]
    assert of_first == [(True, False), (False, True)]
    assert all(len({prompts[i] for i in parts[index]}) == 1 for index in ends)
    assert not chunk_ends(prompts, split_by_tokens(prompts, lengths, 10**6))


# Attention that merges two calls


def dense(query, key, value, shared_key, shared_value, sequences, index_of, scaling):
    """Each sequence attends to the shared keys of its owner, if it has any, and causally to itself."""
    groups = query.size(1) // key.size(1)
    outputs = []
    for (a, b), owner in zip(itertools.pairwise(sequences), index_of, strict=True):
        n_shared = 0 if owner is None else owner.stop - owner.start
        own = [key[a:b], value[a:b]]
        if owner is not None:
            own = [torch.cat([x[owner], y]) for x, y in zip((shared_key, shared_value), own, strict=True)]
        k, v = (each.repeat_interleave(groups, 1).transpose(0, 1) for each in own)
        seen = torch.ones(b - a, n_shared + b - a, dtype=torch.bool).tril(n_shared)
        scores = (query[a:b].transpose(0, 1) @ k.mT * scaling).masked_fill(~seen, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("with_prompt", [False, True])
@pytest.mark.parametrize("sizes", [(16, 16), (12, 8)], ids=["equal", "latent"])
def test_merged_attention_is_that_of_all_keys(with_prompt, sizes, monkeypatch):
    """In double precision, with grouped heads; also of heads of unequal sizes."""
    torch.manual_seed(0)
    lengths = [6] * with_prompt + [4, 3, 5]
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    of_shared = [slice(0, 7), slice(7, 9)]
    owners = [None] * with_prompt + [of_shared[0], of_shared[0], of_shared[1]]
    n = int(starts[-1])
    size = sizes[0]
    shapes = [(n, 4, size), (n, 2, size), (n, 2, sizes[1]), (9, 2, size), (9, 2, sizes[1])]
    states = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    index = torch.arange(6, n) if with_prompt else None
    own = starts.int(), starts.int(), max(lengths), max(lengths)
    shared = torch.tensor([0, 7, 12]).int(), torch.tensor([0, 7, 9]).int(), 7, 7
    expected = dense(*states, starts.tolist(), owners, 0.3)
    weights = torch.randn_like(expected)
    right = torch.autograd.grad((expected * weights).sum(), states)
    with cuda_path(monkeypatch):
        output = kernels.merged_attention(*states, index=index, sequences=own, shared_sequences=shared, scaling=0.3)
        found = torch.autograd.grad((output * weights).sum(), states)
    assert (output - expected).abs().max() <= 1e-12
    for a, b in zip(found, right, strict=True):
        assert (a - b).abs().max() <= 1e-12


@pytest.mark.parametrize("budget", slow_but([None, 1], 1))
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "kimi_k25", "mistral3"])
def test_merged_attention_of_models(name, budget, monkeypatch):
    """On the path of CUDA, in whole rows and behind a prompt; layers with a window copy what it holds."""
    model, prompts = build(name)
    ids, mask = random_completions(len(prompts))
    logps, _, expected = padded_reference(model, prompts, ids, mask)
    monkeypatch.setattr(layout, "_COPIED_KEYS", 1)
    merged = []
    own = kernels.merged_attention
    monkeypatch.setattr(kernels, "merged_attention", lambda *args, **kwargs: merged.append(1) or own(*args, **kwargs))
    with cuda_path(monkeypatch):
        scores = split_policy(model, budget).score(model, ScoreRequest(prompts, ids, mask, packed=True))
        found = gradients(model, scores, mask) if budget else backward(model, scores.logps, scores.entropies, mask)
    assert merged
    assert (scores.logps - logps * mask).abs().max() <= 1e-5
    assert relative_difference(expected, found) <= 1e-5


def test_merged_attention_where_it_saves(monkeypatch):
    """From 65,536 copies of keys on: 8 completions of a prompt of 8,193 tokens do, 8 of 100 tokens don't."""
    for n, merges in ((8193, True), (100, False)):
        segments = [(0, n, 0, 0), *((n + 2 * i, 2, 0, n - 1) for i in range(9))]
        row = layout.PrefixLayout([], torch.zeros(1), segments, {None: (None, True)})
        assert (row.shared_sequences(True) is not None) == merges
