# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""One gather per micro-batch combines the metrics of all ranks, whatever their number."""

import math

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from helpers.rloo_runs import InjectedOurs as InjectedRLOO
from helpers.trainer_utils import TRAINERS, InjectedOurs, InjectedPPO, logged, make_trainer, run, text_rows
from trainers.preference.test_dpo import text_pairs
from trainers.preference.test_reward_trainer import fresh

from trl_multimodal_rft.algorithms.metrics import (
    KINDS,
    MetricLog,
    MicroBatchSums,
    average,
    completion_means,
    deviation,
    event_count,
    explained,
    largest,
    latest,
    nan_mean,
    scored_mean,
    share,
    smallest,
    token_mean,
    weighted_mean,
)


def log_of(n_ranks=1, *, is_training=True):
    """A log of equal ranks."""
    return MetricLog(lambda: is_training, lambda numbers: numbers.expand(n_ranks, -1))


def values_of(metrics, n_ranks=1):
    log = log_of(n_ranks)
    log.add(metrics)
    return log.pop("train")


def test_numbers_of_all_ranks_are_not_gathered():
    log = log_of(n_ranks=3, is_training=False)
    log.add({"mean": nan_mean(torch.tensor([2.0])), "own": average(0.1), "all": latest(3), "events": event_count(2)})
    log.add({"own": average(0.2), "all": latest(5), "events": event_count(1)})
    log.add({"own": average(0.3)}, mode="train")
    assert log.pop("train") == {"own": pytest.approx(0.3)}
    assert log.pop("eval") == {"mean": 2.0, "own": pytest.approx(0.15), "all": 5.0, "events": 3.0}
    assert log.pop("eval") == {}


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
            "mean": nan_mean(means),
            "weighted": weighted_mean(means.nanmean(), valid.any(1).sum()),
        }

    first = of_rank(slice(2))
    second = of_rank(slice(2, 3))

    def gather(numbers):
        others = torch.cat([metric.numbers.float() for metric in second.values()])
        return torch.cat([numbers, others[None]])

    log = MetricLog(lambda: True, gather)
    for _ in range(2):
        log.add(first)
    expected = {"tokens": 7 / 3, "completions": 55 / 3, "low": 1.5, "high": 4, "mean": 2.75, "weighted": 2.75}
    assert log.pop("train") == pytest.approx(expected)


def test_nothing_valid_is_not_a_number():
    nothing = torch.full((2,), math.nan)
    empty = torch.zeros(2)
    metrics = {
        "low": smallest(nothing),
        "high": largest(nothing),
        "mean": nan_mean(nothing),
        "std": deviation(nothing),
    }
    assert all(map(math.isnan, values_of(metrics).values()))
    zeros = {"low": smallest(nothing, or_zero=True), "high": largest(nothing, or_zero=True), "share": share(0, 0)}
    assert set(values_of(zeros | {"tokens": token_mean(empty, empty)}).values()) == {0.0}
    assert values_of({"scored": scored_mean(empty, empty)}) == {}
    assert values_of({}) == {}  # ranks have nothing to wait for


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("sizes", [[7], [1] * 7, [2, 2, 2, 1], [5, 2]])
def test_values_do_not_depend_on_batches(sizes, n_ranks):
    generator = torch.Generator().manual_seed(0)
    values, targets = torch.randn(2, 7, generator=generator, dtype=torch.double) + 100
    values[3] = math.nan
    log = MetricLog(lambda: True, lambda numbers: torch.cat([numbers, torch.zeros_like(numbers)][:n_ranks]))
    for part, target in zip(values.split(sizes), targets.split(sizes), strict=True):
        log.add(
            {
                "mean": nan_mean(part),
                "std": deviation(part),
                "std_0": deviation(part, correction=0),
                "explained": explained(target - 100, target),
                "largest": largest(part, is_of_all_ranks=True),
            }
        )
    valid = values[~values.isnan()]
    expected = {"mean": valid.mean(), "std": valid.std(), "std_0": valid.std(correction=0), "largest": valid.max()}
    found = log.pop("train")
    assert found.pop("explained") == pytest.approx(0, abs=1e-12)  # the errors vary as much as the targets
    assert found == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-6)


def test_equal_values_have_no_deviation():
    log = log_of()
    for n in (3, 1, 5):
        log.add({"std": deviation(torch.full((n,), 0.1))})
    assert log.pop("train") == {"std": 0.0}


def test_a_checkpoint_holds_what_is_not_logged_yet():
    metrics = {"std": deviation(torch.tensor([1.0, 4.0])), "high": largest(torch.tensor([2.0])), "lr": average(0.1)}
    more = {"std": deviation(torch.tensor([7.0])), "lr": average(0.3)}
    whole = log_of()
    resumed = log_of()
    whole.add(metrics)
    resumed.load_state_dict(whole.state_dict())
    for log in (whole, resumed):
        log.add(more)
    assert whole.pop("train") == resumed.pop("train") == {"std": 3.0, "high": 2.0, "lr": pytest.approx(0.2)}
    resumed.add({"lr": average(9.0)})  # of a step that failed
    resumed.load_state_dict({"lr": [0.1, 0.2], "std": [0.1]})  # of an earlier version
    resumed.add({"std": deviation(torch.tensor([1.0, 3.0]), correction=0)})
    assert resumed.pop("train") == {"lr": pytest.approx(0.15), "std": 1.0}


def test_numbers_of_the_host_go_to_the_device_of_the_others():
    devices = []
    log = MetricLog(lambda: True, lambda numbers: devices.append(numbers.device.type))
    log.add({"kl": weighted_mean(0.3, 2), "loss": weighted_mean(torch.zeros((), device="meta"), 2)})
    assert devices == ["meta"]


def test_each_kind_is_written():
    """By the functions that make metrics, or as two means."""
    numbers = torch.tensor([1.0])
    made = [share(1, 1), event_count(1), latest(1), average(1), explained(numbers, numbers)]
    for function in (largest, smallest):
        made += [function(numbers), function(numbers, or_zero=True)]
    made += [deviation(numbers, correction) for correction in (0, 1)]
    assert {metric.kind for metric in made} | {"difference"} == {*KINDS}


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
