# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A micro-batch that is differentiated in parts has the loss and the gradient of the whole."""

import pytest
from trainer_utils import (
    Injected,
    InjectedOurs,
    RemembersPacking,
    assert_equal,
    audio_rows,
    image_rows,
    logged,
    run,
)

from trl_multimodal_rft import MultimodalPPOTrainer


class InjectedPPO(RemembersPacking, Injected, MultimodalPPOTrainer):
    pass


def compare(trainer_class, family, rows, budget=60, **options):
    whole = run(trainer_class, family, rows, **options)
    parts = run(trainer_class, family, rows, max_tokens_per_microbatch=budget, **options)
    assert min(logged(parts, "token_budget/parts")) >= 2
    for entry in parts.history:
        for name in [name for name in entry if name.startswith("token_budget/")]:
            del entry[name]
    assert_equal(whole, parts)


@pytest.mark.parametrize(
    "loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo", "cpgd", "gmpo", "dual_clip"]
)
def test_loss_types(loss_type):
    options = {"num_iterations": 2, "max_steps": 4, "beta": 0.1, "gradient_accumulation_steps": 2}
    if loss_type == "cispo":
        options["epsilon_high"] = 5.0
    compare(InjectedOurs, "qwen2_5_vl", image_rows(8), loss_type=loss_type, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"entropy_coef": 0.1},
        {"top_entropy_quantile": 0.5},
        {"importance_sampling_level": "sequence"},
        {"packing": "padded"},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_options(options):
    compare(InjectedOurs, "qwen2_audio", audio_rows(8), num_iterations=2, max_steps=4, **options)


@pytest.mark.parametrize("options", [{}, {"shared_trunk": True}], ids=str)
def test_critic(options):
    compare(InjectedPPO, "qwen2_5_vl", image_rows(8), num_ppo_epochs=2, max_steps=4, beta=0.1, **options)
