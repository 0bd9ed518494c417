# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A micro-batch that is differentiated in parts has the loss and the gradient of the whole."""

import pytest
from helpers.rloo_runs import InjectedOurs as InjectedRLOO
from helpers.rloo_runs import InjectedTRL as InjectedTRLRLOO
from helpers.trainer_utils import (
    InjectedOurs,
    InjectedPPO,
    assert_equal,
    audio_rows,
    image_rows,
    logged,
    run,
    text_rows,
)


# GRPO divides by their number within the loss, RLOO after it
ACCUMULATED = {"per_device_train_batch_size": 4, "num_generations": 2, "gradient_accumulation_steps": 4}


def compare(trainer_class, family, rows, budget=60, **options):
    assert_equal(run(trainer_class, family, rows, **options), in_parts(trainer_class, family, rows, budget, **options))


def in_parts(trainer_class, family, rows, budget, **options):
    parts = run(trainer_class, family, rows, max_tokens_per_microbatch=budget, **options)
    assert min(logged(parts, "token_budget/parts")) >= 2
    for entry in parts.history:
        for name in [name for name in entry if name.startswith("token_budget/")]:
            del entry[name]
    return parts


@pytest.mark.parametrize(
    "loss_type",
    ["dapo", "gmpo"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("grpo", "bnpo", "dr_grpo", "cispo", "vespo", "cpgd", "dual_clip", "sapo", "luspo")
    ],
)
def test_loss_types(loss_type):
    options = {"num_iterations": 2, "max_steps": 4, "beta": 0.1, **ACCUMULATED}
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


def test_rloo():
    compare(InjectedRLOO, "qwen2_5_vl", image_rows(8), num_iterations=2, max_steps=4, **ACCUMULATED)


def test_rloo_equals_trl():
    options = {"num_iterations": 2, "max_steps": 4, "beta": 0.1, **ACCUMULATED}
    theirs = run(InjectedTRLRLOO, "qwen2_5_vl", text_rows(8), **options)
    ours = in_parts(
        InjectedRLOO, "qwen2_5_vl", text_rows(8), 30, self_check=False, keep_groups_together=False, **options
    )
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
    compare(InjectedOurs, "qwen2_audio", audio_rows(8), num_iterations=2, max_steps=4, **options)


@pytest.mark.parametrize("options", [{}, pytest.param({"shared_trunk": True}, marks=pytest.mark.slow)], ids=str)
def test_critic(options):
    compare(InjectedPPO, "qwen2_5_vl", image_rows(8), num_ppo_epochs=2, max_steps=4, beta=0.1, **options)
