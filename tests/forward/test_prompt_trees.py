# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prompts that start alike share what they start with: scores, gradients and updates equal those of separate rows."""

import copy
import functools
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from engines.test_generation import config
from helpers.chats import chat, text
from helpers.completions import G, random_completions
from helpers.cuda_path import cuda_path
from helpers.encoding import encode_chats
from helpers.families import ALL_FAMILIES, FAMILIES, ONE_OF_EACH_KIND
from helpers.marks import slow_but
from helpers.packed_rows import backward, skip_linear_attention
from helpers.trainer_utils import (
    QUESTIONS,
    TRAINERS,
    Injected,
    clip_rows,
    largest_difference,
    norm,
    relative_difference,
    run,
)

from trl_multimodal_rft.algorithms.losses import LOSSES
from trl_multimodal_rft.encoding.prompts import EncodedPrompt
from trl_multimodal_rft.engines.transformers import generate_completions
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward import trees
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.head import add_fused_head
from trl_multimodal_rft.forward.logprobs import completion_scores
from trl_multimodal_rft.forward.masks import _is_causal, linear_masks, trees_of
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.policy import PolicyForward


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
    return model.eval(), [prompt for prompt, _ in product(prompts, range(G))]


def several_questions(name):
    """Chats about the same media, about others, and about none."""
    of_family = ALL_FAMILIES[name].prompts()
    shared = of_family[0][0]["content"]
    other = of_family[1]
    chats = [chat(*shared, text(LONG + question)) for question in QUESTIONS]
    texts = [chat(text(LONG + question)) for question in QUESTIONS[:2] if name != "paligemma"]  # it requires an image
    return [chats[0], other, *chats[1:], *texts]


def shared_nodes(model, prompts):
    return [node for node, _ in trees.walk(trees_of(model, prompts, [1] * len(prompts))) if node.children]


def alone(model, prompts, ids, mask):
    """Scores and gradients of the model's own forward of each completion, without padding."""
    logps = torch.zeros(ids.shape)
    entropies = torch.zeros(ids.shape)
    for i, length in enumerate(mask.sum(1).tolist()):
        if length:
            row = prompts[i : i + 1], ids[i : i + 1, :length], mask[i : i + 1, :length]
            scores = completion_scores(model, model, ScoreRequest(*row, packed=False))
            logps[i, :length] = scores.logps[0]
            entropies[i, :length] = scores.entropies[0]
    return logps, entropies, backward(model, logps, entropies, mask)


def differences(scores, expected, model, mask):
    """The largest differences of log-probabilities, entropies and gradients from what is expected."""
    logps, entropies, grads = expected
    own = backward(model, scores.logps, scores.entropies, mask)
    return (
        (scores.logps - logps * mask).abs().max().item(),
        (scores.entropies - entropies * mask).abs().max().item(),
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


MODES = ["sdpa", "eager", "cuda"]


def in_modes(names):
    """Returns each name with one mode, by turns, but one family of each kind with all."""
    return [
        pytest.param(name, mode, marks=[pytest.mark.slow] * (mode != "cuda" or name not in ONE_OF_EACH_KIND))
        for i, name in enumerate(names)
        for mode in (MODES if name in ONE_OF_EACH_KIND else MODES[i % 3 :][:1])
    ]


@pytest.mark.parametrize(("name", "mode"), in_modes([*FAMILIES, *OTHERS]))
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
            completion_scores(model, model, ScoreRequest(prompts, ids, mask, isolate=isolate)), expected, model, mask
        )
        with separate():
            scores = completion_scores(model, model, ScoreRequest(prompts, ids, mask, isolate=isolate))
        before = differences(scores, expected, model, mask)
    # Chunked kernels of states round by where a chunk starts
    assert all(now <= max(1e-5, 2 * then) for now, then in zip(found, before, strict=True)), (found, before)
    shared = {bool(node.prompt.media) for node in shared_nodes(model, prompts)}
    assert shared == {bool(prompt.media) for prompt in prompts if _is_causal(linear_masks(model, prompt, 1))}


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("name", slow_but(["qwen2_5_vl", "gemma3", "qwen3_5_deep"], "qwen2_5_vl", "gemma3"))
def test_random_trees(name, cuda, monkeypatch, separate):
    """Prompts over few tokens start alike in many ways, some are the start of others, and one occurs twice."""
    monkeypatch.setattr(trees, "_WORTH_SHARING", -1e9)
    model, _ = built(name, [])
    depths = set()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 24, (9,), generator=generator).tolist()
        drawn = [60 + torch.randint(0, 2, (n,), generator=generator) for n in sizes]
        drawn += [drawn[0], drawn[1][: sizes[1] // 2 + 1], torch.cat([drawn[2], drawn[3]])]
        unique = [EncodedPrompt(ids, {}, {}, torch.arange(len(ids))[None]) for ids in drawn]
        prompts = [prompt for prompt, _ in product(unique, range(2))]
        ids, mask = random_completions(len(prompts), seed=seed)
        mask[3] = mask[8:10] = 0
        nodes = dict(trees.walk(trees_of(model, prompts, [1] * len(prompts))))
        depths |= {sum(1 for _ in ancestors(node, nodes)) for node in nodes}
        expected = alone(model, prompts, ids, mask)
        with cuda_path(monkeypatch) if cuda else nullcontext():
            scores = completion_scores(model, model, ScoreRequest(prompts, ids, mask))
            assert max(differences(scores, expected, model, mask)) <= 1e-5
    assert max(depths) >= 4


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_audio", "gemma3", "kimi_k25", "qwen3_5"])
def test_prefill_shares_what_prompts_start_with(name, separate):
    model, prompts = built(name, several_questions(name))
    tokenizer = ALL_FAMILIES[name].build()[1].tokenizer
    tokens = []
    results = []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["inputs_embeds"].shape[:2].numel()), with_kwargs=True
    )
    for shares in (True, False):
        tokens.clear()
        with nullcontext() if shares else separate():
            args = config(tokenizer, do_sample=False), tokenizer.pad_token_id, model.device
            ids = generate_completions(model, model, prompts, *args)
        results.append((ids, sum(tokens[:2])))
    handle.remove()
    (shared, n_shared), (alone, n_alone) = results
    assert torch.equal(shared, alone)
    # Windows and states have no mask for padding, and Gemma 3 sees an image both ways
    assert (n_shared < 0.8 * n_alone) == (name not in ("gemma3", "qwen3_5"))


@functools.cache
def counting(kind):
    class Counting(Injected, TRAINERS[kind]):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.n_tokens = 0
            self._unwrapped(self.model).get_decoder().register_forward_pre_hook(self.count, with_kwargs=True)

        def count(self, module, args, kwargs):
            self.n_tokens += kwargs["inputs_embeds"].shape[:2].numel()

    return Counting


BATCH = {"per_device_train_batch_size": 16, "shuffle_dataset": False, "learning_rate": 0.03, "max_steps": 2}
# Of losses with small gradients, whose updates the rounding of weights would hide
RATES = {"cispo": 0.3}


# One per token, one whose weights have no gradient, and one per sequence; `test_options_fuzz.py` draws from all
OF_LOSSES = [next(iter(LOSSES)), "cispo", "luspo"]
UPDATES = [("grpo", {"loss_type": loss, "beta": 0.05, "learning_rate": RATES.get(loss, 0.03)}) for loss in OF_LOSSES]
OF_TRAINERS = [
    ("grpo", {"num_iterations": 2, "max_tokens_per_microbatch": 300}),
    ("rloo", {"beta": 0.1}),
    ("ppo", {"num_ppo_epochs": 2}),
    ("ppo", {"shared_trunk": True}),
]


@pytest.mark.parametrize(("kind", "options"), slow_but([*UPDATES, *OF_TRAINERS], UPDATES[0], *OF_TRAINERS))
def test_updates_equal_those_of_separate_prompts(kind, options, separate):
    options = {**BATCH, **options}
    ours = run(counting(kind), "qwen2_5_vl", clip_rows(), **options)
    with separate():
        expected = run(counting(kind), "qwen2_5_vl", clip_rows(), **options)
    assert norm(expected.update) > 1e-3
    assert relative_difference(expected.update, ours.update) <= 5e-6
    difference, name = largest_difference(expected.history, ours.history)
    assert difference <= 1e-5, name
    assert ours.trainer.n_tokens <= (1 if "max_tokens_per_microbatch" in options else 0.75) * expected.trainer.n_tokens
    for each, bound in ((ours, 0.85), (expected, 0.75)):
        shares = [entry["packing/shared_frac"] for entry in each.history if "packing/shared_frac" in entry]
        assert all(share >= bound for share in shares) and (each is ours or set(shares) == {0.75})


def test_micro_batches_keep_prompts_together_that_share_a_clip(separate):
    options = {**BATCH, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": 1}
    rows = clip_rows((0, 4, 1, 5, 2, 6, 3, 7))
    ours = run(counting("grpo"), "qwen2_5_vl", rows, **options)
    with separate():
        expected = run(counting("grpo"), "qwen2_5_vl", rows, **options)
    clips = [
        {prompt.media["pixel_values_videos"].sum().item() for prompt in batch.prompts}
        for batch in ours.trainer._buffered_inputs
    ]
    assert [len(each) for each in clips] == [1] * 4
    assert relative_difference(expected.update, ours.update) <= 5e-6
    assert expected.history[0]["packing/shared_frac"] == 0.75 < 0.8 < ours.history[0]["packing/shared_frac"]


def test_one_completion_of_each_prompt_is_worth_packing():
    model, prompts = built("qwen2_5_vl", several_questions("qwen2_5_vl"))
    policy = PolicyForward()
    unique = [prompts[i * G] for i in (0, 2, 3, 4)]
    arguments = unique, [4] * len(unique), len(unique)
    assert not policy.worth_packing(*arguments)
    assert policy.worth_packing(*arguments, model)


def test_padded_rows_repeat_their_prompt_and_are_as_long_as_the_longest():
    """Four completions of a prompt: `n + 4 * 4` tokens packed, `4 * (n + 4)` padded; of one, as many."""
    policy = PolicyForward()
    prompt = EncodedPrompt(torch.arange(4), {}, {}, torch.arange(4)[None])
    assert policy.worth_packing([prompt] * 4, [4] * 4, 4)
    assert not policy.worth_packing([prompt], [4], 1)


def test_router_statistics_count_each_token_once_per_completion(separate):
    model, prompts = built("qwen3_vl_moe", several_questions("qwen3_vl_moe"))
    ids, mask = random_completions(len(prompts))
    request = ScoreRequest(prompts, ids, mask, compute_aux_loss=True)
    ours = completion_scores(model, model, request).router
    with separate():
        expected = completion_scores(model, model, request).router
    padded = completion_scores(model, model, replace(request, packed=False)).router
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(ours, padded)


@pytest.mark.parametrize("change", ["ids", "positions", "fields", "media"])
def test_what_differs_is_not_shared(change):
    """A prompt with another token, position, token field or pixel within the clip's tokens shares what precedes it."""
    model, prompts = built("qwen2_5_vl", several_questions("qwen2_5_vl"))
    first = prompts[0]
    second = prompts[2 * G]
    place = first.media_span[0] + 1
    assert [node.stop for node in shared_nodes(model, [first, second])] == [57]
    if change == "media":
        second.media = {**second.media, "pixel_values": second.media["pixel_values"].clone()}
        second.on_device = {}
        second.media["pixel_values"][-1, -1] += 1e-3
        place = first.media_span[0]
    elif change == "fields":
        second.token_fields = {name: value.clone() for name, value in second.token_fields.items()}
        second.token_fields["mm_token_type_ids"][place] += 1
    else:
        values = second.input_ids if change == "ids" else second.position_ids
        values[..., place] += 1
    second.mask_cache.clear()
    symbols = trees._symbols([first, second])
    assert trees._n_equal(symbols[first], symbols[second]) == place
    assert shared_nodes(model, [first, second]) == []


def ancestors(node, nodes):
    node = nodes[node]
    while node is not None:
        yield node
        node = nodes[node]
