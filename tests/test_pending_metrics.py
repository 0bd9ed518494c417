# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Processes wait for each other once a micro-batch, however many metrics there are."""

import pytest
from accelerate import Accelerator
from datasets import Dataset
from helpers.trainer_utils import Injected, InjectedOurs, logged, run, text_rows

from trl_multimodal_rft import MultimodalPPOTrainer


class InjectedPPO(Injected, MultimodalPPOTrainer):
    pass


def exchanges(monkeypatch, trainer_class, **options):
    """A run, and how often processes exchange numbers in the loss of each micro-batch."""
    calls, counts = [], []

    class Counting(trainer_class):
        def compute_loss(self, *args, **kwargs):
            calls.clear()
            loss = super().compute_loss(*args, **kwargs)
            counts.append(len(calls))
            return loss

    for name in ("gather", "reduce"):
        exchange = getattr(Accelerator, name)
        monkeypatch.setattr(
            Accelerator, name, lambda *args, f=exchange, **kwargs: (calls.append(f), f(*args, **kwargs))[1]
        )
    options = {"gradient_accumulation_steps": 2, "self_check": False, **options}
    return run(Counting, "qwen2_5_vl", text_rows(), **options), counts


def supervised():
    return {"ptx_dataset": Dataset.from_list([{**row, "completion": "number 1"} for row in text_rows(4)])}


# What TRL exchanges for the loss, and further metrics
PPO = ["policy_loss", "ratio/mean", "ratio/max", "approx_kl", "value_loss", "value_clip_ratio"]
CLIPPED = [f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")]


@pytest.mark.parametrize(
    ("is_own", "trainer_class", "options", "metrics"),
    [
        (False, InjectedPPO, {"beta": 0.1}, PPO),
        (
            False,
            InjectedPPO,
            {"beta": 0.1, "kl_in_reward": False, "kl_estimator": "k2", "ptx_coef": 0.3},
            [*PPO, "kl", "ptx_loss"],
        ),
        (
            True,
            InjectedOurs,
            {"loss_type": "cpgd", "beta": 0.1, "kl_estimator": "k2"},
            [*CLIPPED, "kl"],
        ),
        (
            True,
            InjectedOurs,
            {"loss_type": "gmpo", "entropy_coef": 0.1},
            [*CLIPPED, "policy_loss"],
        ),
    ],
    ids=["ppo", "ppo, supervised", "cpgd, kl", "gmpo, entropy bonus"],
)
def test_one_exchange_beside_those_of_trl(monkeypatch, is_own, trainer_class, options, metrics):
    """A loss that TRL doesn't have makes none of TRL's."""
    with monkeypatch.context() as patch:
        _, expected = exchanges(patch, InjectedOurs)
    objects = supervised() if "ptx_coef" in options else {}
    ours, counts = exchanges(monkeypatch, trainer_class, objects=objects, **options)
    assert all(len(logged(ours, name)) == 2 for name in metrics)
    assert len(counts) == 4
    assert counts == [1 if is_own else count + 1 for count in expected]
