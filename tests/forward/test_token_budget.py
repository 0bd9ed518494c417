# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A micro-batch that is differentiated in parts has the loss and the gradient of the whole."""

import copy

import pytest
import torch
from helpers.marks import slow_but
from helpers.rloo_runs import InjectedOurs as InjectedRLOO
from helpers.rloo_runs import InjectedTRL as InjectedTRLRLOO
from helpers.trainer_utils import (
    InjectedOurs,
    InjectedPPO,
    PseudoRandom,
    assert_equal,
    audio_rows,
    image_rows,
    load,
    logged,
    norm,
    relative_difference,
    run,
    text_rows,
)
from peft import LoraConfig

from trl_multimodal_rft.encoding.prompts import EncodedPrompt
from trl_multimodal_rft.forward.partition import split_by_tokens
from trl_multimodal_rft.forward.scores import ScoreRequest


# GRPO divides by their number within the loss, RLOO after it
ACCUMULATED = {"per_device_train_batch_size": 4, "num_generations": 2, "gradient_accumulation_steps": 4}


def compare(trainer_class, family, rows, budget=60, **options):
    torch.manual_seed(0)  # for an adapter
    whole = run(trainer_class, family, rows, **copy.deepcopy(options))
    torch.manual_seed(0)
    parts = in_parts(trainer_class, family, rows, budget, **options)
    assert logged(parts, "packing/shared_frac") == logged(whole, "packing/shared_frac")
    assert_equal(whole, parts)


def in_parts(trainer_class, family, rows, budget, **options):
    parts = run(trainer_class, family, rows, max_tokens_per_microbatch=budget, **options)
    assert min(logged(parts, "token_budget/parts")) >= (8 if budget == 1 else 2)
    for entry in parts.history:
        for name in [name for name in entry if name.startswith("token_budget/")]:
            del entry[name]
    return parts


@pytest.mark.parametrize(
    "loss_type",
    ["dapo", "gmpo", "clip_cov(clip_cov_ratio=0.5, clip_cov_lb=0.0)"]  # the last one draws random numbers
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("dr_grpo", "cispo", "vespo", "cpgd", "luspo")],
)
def test_loss_types(loss_type):
    options = {"num_iterations": 2, "max_steps": 2, "beta": 0.1, **ACCUMULATED}
    if loss_type == "cispo":
        options["epsilon_high"] = 5.0
    if loss_type == "vespo":  # its gradient is small, so the rounding of the weights would show
        options["learning_rate"] = 0.1
    compare(InjectedOurs, "qwen2_5_vl", image_rows(8), loss_type=loss_type, **options)


def test_a_budget_that_is_never_reached():
    """A single part has all rows, the longest first."""
    options = {"per_device_train_batch_size": 16, "num_iterations": 2}
    whole = run(InjectedOurs, "qwen2_5_vl", image_rows(8), **options)
    within = run(InjectedOurs, "qwen2_5_vl", image_rows(8), max_tokens_per_microbatch=1000, **options)
    assert not logged(within, "token_budget/parts")
    assert_equal(whole, within)


@pytest.mark.parametrize(
    ("packing", "rows"), [("prefix", image_rows), pytest.param("padded", image_rows, marks=pytest.mark.slow)]
)
def test_balancing_loss(packing, rows):
    """The loss covers the whole micro-batch, whichever part its tokens are in."""
    options = {"packing": packing, "router_aux_loss_coef": 1.0, "learning_rate": 0.1, **ACCUMULATED}
    compare(InjectedOurs, "qwen3_vl_moe", rows(8), **options)


def test_rloo_equals_trl():
    options = {"num_iterations": 2, "max_steps": 2, "beta": 0.1, **ACCUMULATED}
    theirs = run(InjectedTRLRLOO, "qwen2_5_vl", text_rows(8), **options)
    ours = in_parts(InjectedRLOO, "qwen2_5_vl", text_rows(8), 30, self_check=False, packing_shuffle=True, **options)
    assert_equal(theirs, ours)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"entropy_coef": 0.1}, marks=pytest.mark.slow),
        {"top_entropy_quantile": 0.5},
        {"importance_sampling_level": "sequence"},
        {"packing": "padded"},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_options(options):
    compare(InjectedOurs, "qwen2_audio", audio_rows(8), num_iterations=2, **options)


LORA = {"peft_config": LoraConfig(target_modules="all-linear", init_lora_weights=False)}


SPLIT = [
    (InjectedOurs, "qwen2_5_vl", image_rows, {"num_iterations": 2, "beta": 0.1}),
    (InjectedOurs, "qwen2_audio", audio_rows, {"num_iterations": 2, "beta": 0.1}),
    # Rounding grows with each step of the tiny Gemma 3, however rows are laid out
    (InjectedOurs, "gemma3", image_rows, {"num_iterations": 2, "beta": 0.1, "max_steps": 1}),
    (InjectedOurs, "llava", text_rows, {"num_iterations": 2, "beta": 0.1}),
    (InjectedPPO, "qwen2_5_vl", image_rows, {"num_ppo_epochs": 2}),
    (InjectedPPO, "qwen2_5_vl", image_rows, {"shared_trunk": True}),
    (InjectedOurs, "qwen3_vl_moe", image_rows, {"router_aux_loss_coef": 1.0}),
    (InjectedOurs, "qwen2_5_vl", image_rows, {"gradient_checkpointing": True}),
    (InjectedOurs, "qwen2_5_vl", image_rows, {"packing": "padded"}),
    (InjectedOurs, "qwen2_5_vl", image_rows, {"objects": LORA, "learning_rate": 1.0, "beta": 0.1}),
]


@pytest.mark.parametrize(
    ("trainer_class", "family", "rows", "options"),
    slow_but(SPLIT, SPLIT[0], SPLIT[2], SPLIT[4]),
    ids=range(len(SPLIT)),
)
def test_groups_that_are_split(trainer_class, family, rows, options):
    """With a budget below each group, its prompt is forwarded once, and its completions one by one."""
    compare(trainer_class, family, rows(8), budget=1, **{"max_steps": 2, **options})


def by_policy(trainer, model, inputs):
    rollout = inputs.rollout
    given = rollout.prompts, rollout.completion_ids, rollout.completion_mask
    return (
        -(trainer._policy.score(model, ScoreRequest(*given, packed=rollout.packed)).logps * rollout.loss_mask).sum()
        / 100
    )


def twice(trainer, model, inputs):
    """Of two scores, the gradient of the first would be lost."""
    first, second = (trainer._score(model, inputs.rollout).logps for _ in range(2))
    return -((first + second) * inputs.rollout.loss_mask).sum() / 100


def decays(trainer, model, inputs):
    return InjectedOurs._compute_loss(trainer, model, inputs) + 1e-3 * model.lm_head.weight.square().sum()


@pytest.mark.parametrize("loss", [by_policy, twice, decays])
def test_a_gradient_that_would_be_lost_is_refused(loss):
    own = type("Own", (InjectedOurs,), {"_compute_loss": loss})
    options = {"max_steps": 1}
    assert norm(run(own, "qwen2_5_vl", text_rows(8), **options).update) > 1e-3
    with pytest.raises(RuntimeError, match="The gradient of .* would be lost.*`max_tokens_per_microbatch=None`"):
        run(own, "qwen2_5_vl", text_rows(8), max_tokens_per_microbatch=30, **options)


@pytest.mark.parametrize(
    ("lengths", "budget"), [([10, 0, 0, 0, 0, 0, 0, 10], 120), ([10] + 7 * [0], 250), ([0] * 8, 350)]
)
def test_padded_parts_without_tokens_are_within_the_budget(lengths, budget):
    prompt = EncodedPrompt(torch.arange(100), {}, {}, torch.arange(100)[None])
    parts = split_by_tokens([prompt] * 8, lengths, budget, packed=False)
    assert sorted(sum(parts, [])) == list(range(8))
    assert max(len(part) * (100 + max(lengths[i] for i in part)) for part in parts) <= budget


class Mostly(PseudoRandom):
    """Three of four completions are truncated."""

    def __call__(self, model, prompts, *, step, **options):
        last = [self.tokenizer.eos_token_id, 60, 60, 60]
        return [[50 + i % 30] * 7 + [last[i % 4]] for i in range(len(prompts))], None


@pytest.mark.parametrize(
    ("trainer_class", "family", "options"),
    [
        (InjectedOurs, "qwen2_5_vl", {"beta": 0.1}),  # which needs every score
        (InjectedPPO, "qwen2_5_vl", {"num_ppo_epochs": 2}),
        (InjectedOurs, "qwen3_vl_moe", {"router_aux_loss_coef": 1.0}),
    ],
)
def test_masked_completions_keep_padded_rows_within_the_budget(trainer_class, family, options):
    rows = image_rows(8)
    (model, processor) = load(family)
    sizes = []
    options |= {"packing": "padded", "mask_truncated_completions": True, "sampler": Mostly, "max_steps": 1}
    options["reward"] = lambda completion_ids, **kwargs: [float(i % 3) for i in range(len(completion_ids))]
    whole = run(trainer_class, family, rows, media_contribution_steps=0, **options)
    budget = 2 * max(len(prompt) + 8 for prompt in whole.trainer._buffered_inputs[0].prompts) + 4
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, given: sizes.append(given["inputs_embeds"].shape[:2].numel()), with_kwargs=True
    )
    options |= {"max_tokens_per_microbatch": budget, "objects": {"model": model, "processing_class": processor}}
    parts = run(trainer_class, family, rows, media_contribution_steps=0, **options)
    assert sizes and max(sizes) <= budget
    assert norm(whole.update) > 1e-3 and relative_difference(whole.update, parts.update) <= 1e-5


@pytest.mark.parametrize("options", [{}, pytest.param({"shared_trunk": True}, marks=pytest.mark.slow)], ids=str)
def test_critic(options):
    compare(InjectedPPO, "qwen2_5_vl", image_rows(8), num_ppo_epochs=2, beta=0.1, **options)
