# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""One gather per micro-batch combines the metrics of all ranks, whatever their number."""

import math
from collections import defaultdict

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from helpers.rloo_runs import InjectedOurs as InjectedRLOO
from helpers.trainer_utils import TRAINERS, InjectedOurs, InjectedPPO, logged, make_trainer, run, text_rows
from trainers.preference.test_dpo import text_pairs
from trainers.preference.test_reward_trainer import fresh

from trl_multimodal_rft.algorithms.metrics import (
    Latest,
    MetricLog,
    MicroBatchSums,
    completion_means,
    largest,
    rank_mean,
    smallest,
    token_mean,
)
from trl_multimodal_rft.trainers.base.logs import EvaluationMeans


def write(metrics, gather, found) -> None:
    log = MetricLog({"train": found}, lambda: True, gather)
    log.add(metrics)
    log.read()


def test_numbers_are_written_as_they_are():
    """Those of ranks wait until they are read."""
    found = {"train": defaultdict(list), "eval": defaultdict(list)}
    log = MetricLog(found, lambda: False, lambda numbers: numbers)
    log.add({"mean": rank_mean(torch.tensor(2.0)), "own": 0.1, "all": Latest(3)})
    log.add({"own": 0.2, "all": Latest(5)})
    log.add({"own": 0.3}, mode="train")
    assert found == {"train": {"own": [0.3]}, "eval": {"own": [0.1, 0.2], "all": [5]}}
    log.read()
    assert found["eval"]["mean"] == [2.0] and not found["train"]["mean"]
    log.replace_last("own", 0.4)
    assert found["eval"]["own"] == [0.1, 0.4]
    log.replace_last("all", None)
    assert "all" not in found["eval"]


def test_ranks_combine():
    """A rank without valid tokens, or without values, doesn't change the others' results."""
    values = torch.tensor([[1.0, 2.0, 50.0], [4.0, 50.0, 50.0], [50.0, 50.0, 50.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])

    def of_rank(rows):
        part = values[rows]
        valid = mask[rows]
        means = completion_means(part, valid)
        return {
            "tokens": token_mean(part, valid),
            "completions": token_mean(part[:, :1], valid),
            "low": smallest(means),
            "high": largest(means),
            "rank": rank_mean(means.nanmean()),
            "running": largest(part.max(), merge=max),
        }

    first = of_rank(slice(2))
    second = of_rank(slice(2, 3))
    found = defaultdict(list, running=[60.0])

    def gather(numbers):
        others = torch.cat([metric.numbers.float() for metric in second.values()])
        return torch.cat([numbers, others[None]])

    for _ in range(2):
        write(first, gather, found)
    values = {name: numbers[0] for name, numbers in found.items()}
    expected = {"tokens": 7 / 3, "completions": 55 / 3, "low": 1.5, "high": 4, "rank": 2.75, "running": 60}
    assert values == pytest.approx(expected)
    assert {name: len(numbers) for name, numbers in found.items()} == {**dict.fromkeys(expected, 2), "running": 1}


def test_nothing_valid_is_not_a_number():
    nothing = completion_means(torch.ones(2, 3), torch.zeros(2, 3))
    found = defaultdict(list)
    write({"low": smallest(nothing), "high": largest(nothing)}, lambda numbers: numbers, found)
    assert all(math.isnan(value) for (value,) in found.values())
    write({}, None, found)  # ranks have nothing to wait for


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
    calls = []
    counts = []

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


# Means over the rows of an evaluation


def test_batches_of_an_evaluation_count_by_their_rows():
    found = defaultdict(list, largest=[7.0], fixed=[3.0])
    means = EvaluationMeans(found, Accelerator(cpu=True))
    batches = [(2, 1.5, 1.0, math.nan), (2, 6.0, 4.0, 2.0), (1, 16.0, 9.0, 5.0)]
    for _ in range(2):  # a second evaluation doesn't see the first one's rows
        for n, value, answered, sometimes in batches:
            means.n_rows = n
            means.counts = {"answered": 1.0}
            for name, number in (("row", value), ("answered", answered), ("sometimes", sometimes)):
                found[name].append(number)
            found["largest"] = [max(7.0, *found["largest"])]  # merged by the metric itself
            means.on_prediction_step(*[None] * 3)
        expected = {"row": 6.2, "answered": 14 / 3, "sometimes": 3.0, "largest": 7.0, "fixed": 3.0}
        assert {name: pytest.approx([value]) for name, value in expected.items()} == found
        found.clear()
        means.on_evaluate(*[None] * 3)
        found |= {"largest": [7.0], "fixed": [3.0]}


def by_value(completion_ids, value, **kwargs):
    return list(value)


def sometimes(completion_ids, value, **kwargs):
    return [None if each < 3 else each for each in value]


def test_held_out_rewards_are_means_over_rows(tmp_path):
    """Whatever the size of the last batch; a function that doesn't apply to all rows has the mean of its rewards."""
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    rows = text_rows(5).add_column("value", values)
    for n, batch in ((1, 2), (2, 8)):
        options = {"num_generations_eval": n, "per_device_eval_batch_size": batch, "reward": [by_value, sometimes]}
        options["objects"] = {"eval_dataset": rows}
        trainer = make_trainer(InjectedOurs, "qwen2_5_vl", rows, tmp_path, max_steps=1, **options)
        metrics = trainer.evaluate()
        assert metrics["eval_rewards/by_value/mean"] == pytest.approx(sum(values) / 5)
        assert metrics["eval_rewards/sometimes/mean"] == pytest.approx(28 / 3)
        assert metrics["eval_reward"] == pytest.approx((1 + 2 + 8 + 16 + 32) / 5)


@pytest.mark.parametrize("kind", ["dpo", "reward", "sft"])
def test_held_out_pairs_count_alike(kind, tmp_path):
    """Batches of 2 of 3 rows give the means of one batch of all rows."""
    found = []
    rows = text_pairs(3)
    rows = rows.rename_column("chosen", "completion").remove_columns("rejected") if kind == "sft" else rows
    for batch in (2, 3):
        options = {"per_device_eval_batch_size": batch, "objects": {"eval_dataset": rows}, "self_check": False}
        if kind != "dpo":
            options["objects"] |= dict(zip(("model", "processing_class"), fresh("qwen2_audio"), strict=True))
        if kind == "sft":
            options["objects"] = {"eval_dataset": rows}
        trainer = make_trainer(TRAINERS[kind], "qwen2_audio", rows, tmp_path, reward=None, max_steps=1, **options)
        found.append(trainer.evaluate())
    names = {"dpo": ["rewards/margins", "logps/chosen"], "reward": ["accuracy", "margin", "mean_reward"]}
    for name in names.get(kind, ["mean_token_accuracy", "entropy"]):
        assert found[0][f"eval_{name}"] == pytest.approx(found[1][f"eval_{name}"], rel=1e-5, abs=1e-6), name
