# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""One gather per micro-batch combines the metrics of all ranks, whatever their number."""

import math
from collections import defaultdict

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from helpers.rloo_runs import InjectedOurs as InjectedRLOO
from helpers.trainer_utils import InjectedOurs, InjectedPPO, logged, run, text_rows

from trl_multimodal_rft.algorithms.metrics import (
    MicroBatchSums,
    completion_means,
    largest,
    log_metrics,
    rank_mean,
    smallest,
    token_mean,
)


def test_ranks_combine():
    """A rank without valid tokens, or without values, doesn't change the others' results."""
    values = torch.tensor([[1.0, 2.0, 50.0], [4.0, 50.0, 50.0], [50.0, 50.0, 50.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])

    def of_rank(rows):
        part, valid = values[rows], mask[rows]
        means = completion_means(part, valid)
        return {
            "tokens": token_mean(part, valid),
            "completions": token_mean(part[:, :1], valid),
            "low": smallest(means),
            "high": largest(means),
            "rank": rank_mean(means.nanmean()),
            "running": largest(part.max(), merge=max),
        }

    first, second = of_rank(slice(2)), of_rank(slice(2, 3))
    found = defaultdict(list, running=[60.0])

    def gather(numbers):
        others = torch.cat([metric.numbers.float() for metric in second.values()])
        return torch.cat([numbers, others[None]])

    for _ in range(2):
        log_metrics(first, gather, found)
    values = {name: numbers[0] for name, numbers in found.items()}
    expected = {"tokens": 7 / 3, "completions": 55 / 3, "low": 1.5, "high": 4, "rank": 2.75, "running": 60}
    assert values == pytest.approx(expected)
    assert {name: len(numbers) for name, numbers in found.items()} == {**dict.fromkeys(expected, 2), "running": 1}


def test_nothing_valid_is_not_a_number():
    nothing = completion_means(torch.ones(2, 3), torch.zeros(2, 3))
    found = defaultdict(list)
    log_metrics({"low": smallest(nothing), "high": largest(nothing)}, lambda numbers: numbers, found)
    assert all(math.isnan(value) for (value,) in found.values())
    log_metrics({}, None, found)  # ranks have nothing to wait for


def test_window_sums_micro_batches_and_ranks():
    window = MicroBatchSums()
    assert window.pop(None) == []
    for total, count in ((torch.tensor(1.5), 2), (torch.tensor(3.0), 1)):
        window.add(total, count)
    assert window.pop(lambda sums, reduction: 2 * sums) == [9, 6]
    assert window.pop(None) == []


def supervised():
    return {"ptx_dataset": Dataset.from_list([{**row, "completion": "number 1"} for row in text_rows(4)])}


PPO = ["policy_loss", "ratio/mean", "ratio/max", "approx_kl", "value_loss", "value_clip_ratio", "entropy"]
CLIPPED = [f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")]
IN_LOSS = {"beta": 0.1, "kl_estimator": "k3"}


@pytest.mark.parametrize(
    ("trainer_class", "options", "metrics"),
    [
        (InjectedPPO, {**IN_LOSS, "ptx_coef": 0.3}, [*PPO, *CLIPPED, "kl", "ptx_loss"]),
        (InjectedOurs, {"beta": 0.1, "entropy_coef": 0.1}, [*CLIPPED, "kl", "entropy", "policy_loss"]),
        (InjectedOurs, {"loss_type": "gmpo", "beta": 0.1}, [*CLIPPED, "kl", "entropy"]),
        (InjectedRLOO, {}, [*CLIPPED, "entropy"]),
    ],
    ids=["ppo", "grpo", "gmpo", "rloo"],
)
def test_loss_of_a_micro_batch_gathers_once(monkeypatch, trainer_class, options, metrics):
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
    objects = supervised() if "ptx_coef" in options else {}
    options = {"gradient_accumulation_steps": 2, "self_check": False, "objects": objects, **options}
    result = run(Counting, "qwen2_5_vl", text_rows(), **options)
    assert all(len(logged(result, name)) == 2 for name in metrics)
    assert counts == [1] * 4
