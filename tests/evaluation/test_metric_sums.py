# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Metrics of an evaluation don't depend on the size of its batches, and equal sums and counts over single rows."""

import numpy as np
import pytest
from datasets import Dataset
from helpers.distillation_runs import teacher
from helpers.samplers import PseudoRandom
from helpers.trainer_utils import TRAINERS, load, make_trainer, moved, shifted
from trainers.preference.test_reward_trainer import fresh

from trl_multimodal_rft.data.rows.batches import EvalBatches


N_ROWS = 7
ANSWERS = ["A cat.", "blue", "Two birds sing in a tree.", "No", "red", "7", "There is a dog here, and a bird"]
SAMPLED = ["grpo", "rloo", "ppo", "distillation"]
READ = ["sft", "dpo", "kto", "reward"]
# What isn't a metric of rows, or depends on the other rows of a batch by its formula
NO_METRICS = ("runtime", "per_second", "preparation_time", "num_tokens", "epoch", "step", "packing/")
BY_BATCH = {
    "ppo": {"loss"},  # advantages are whitened over a batch
}


REWARDED: list[tuple] = []  # completions, and the values of their rows


class ByPrompt(PseudoRandom):
    """Sampler whose completions depend on their own prompt alone."""

    def __call__(self, model, prompts, *, step, config=None, **options):
        completions = []
        seen: dict[int, int] = {}
        for prompt in prompts:
            number = int(prompt.input_ids.sum())
            seen[number] = seen.get(number, 0) + 1
            generator = np.random.default_rng([number, seen[number]])
            ids = generator.integers(50, len(self.tokenizer), generator.integers(2, 9)).tolist()
            completions.append([*ids[:-1], self.tokenizer.eos_token_id] if generator.random() < 0.6 else ids)
        return completions, None


def sometimes(completion_ids, value, **kwargs):
    REWARDED.extend(zip(completion_ids, value, strict=True))
    return [None if number < 3 else number + len(ids) for ids, number in zip(completion_ids, value, strict=True)]


def length(completion_ids, log_metric=None, **kwargs):
    for ids in completion_ids:
        log_metric("length_of_own", len(ids))
    return [len(ids) % 5 + 0.1 * (sum(ids) % 7) for ids in completion_ids]


def rows(kind):
    prompts = [[{"role": "user", "content": f"What is number {i}? " + "Say it. " * i}] for i in range(N_ROWS)]
    dataset = Dataset.from_dict({"prompt": prompts})
    answers = [[{"role": "assistant", "content": answer}] for answer in ANSWERS]
    if kind in SAMPLED:
        return dataset.add_column("value", [float(i) for i in range(N_ROWS)])
    if kind == "sft":
        return dataset.add_column("completion", answers)
    if kind == "kto":
        return dataset.add_column("completion", answers).add_column(
            "label", [i in (0, 1, 3, 6) for i in range(N_ROWS)]
        )
    rejected = [[{"role": "assistant", "content": answer + " Or not."}] for answer in reversed(ANSWERS)]
    return dataset.add_column("chosen", answers).add_column("rejected", rejected)


def options_of(kind):
    options = {"beta": 0.1} if kind in ("grpo", "rloo", "dpo", "kto") else {}
    if kind == "kto":
        options["loss_type"] = "apo_zero_unpaired"  # the KL estimate of others is of a batch
    if kind == "grpo":
        options |= {"entropy_coef": 0.1, "kl_estimator": "k3"}
    if kind == "ppo":
        options |= {"advantage_estimator": "gae", "beta": 0.1}
    return options


def trainer_of(kind, folder, batch, dataset):
    objects = moved("qwen2_5_vl", 0.03)
    if kind in ("grpo", "dpo", "kto", "ppo"):
        objects["ref_model"] = shifted(load("qwen2_5_vl")[0], 0.02, seed=5)
    if kind == "reward":
        objects = dict(zip(("model", "processing_class"), fresh("qwen2_5_vl"), strict=True))
    if kind == "distillation":
        objects["teacher_model"] = teacher("qwen2_5_vl")
    options = {"self_check": False, "bf16": False, **options_of(kind)}
    if kind in SAMPLED:
        options["sampler"] = ByPrompt
    if kind in ("grpo", "rloo", "ppo"):
        options["num_generations_eval"] = 2
        batch = 2 * batch
    reward = [length, sometimes] if kind in SAMPLED and kind != "distillation" else None
    objects["eval_dataset"] = dataset
    return make_trainer(
        TRAINERS[kind],
        "qwen2_5_vl",
        rows(kind),
        folder,
        reward=reward,
        objects=objects,
        per_device_eval_batch_size=batch,
        max_steps=1,
        **options,
    )


def metrics_of(trainer, kind):
    found = trainer.evaluate()
    names = [name for name in found if not any(part in name for part in NO_METRICS)]
    return {name.removeprefix("eval_"): found[name] for name in names}


@pytest.fixture(scope="module")
def of_one_batch(tmp_path_factory):
    found = {}

    def metrics(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind)
            found[kind] = metrics_of(trainer_of(kind, folder, N_ROWS, rows(kind)), kind)
        return found[kind]

    return metrics


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", [*READ, *SAMPLED])
def test_metrics_do_not_depend_on_the_size_of_batches(kind, size, tmp_path, of_one_batch):
    expected = of_one_batch(kind)
    found = metrics_of(trainer_of(kind, tmp_path, size, rows(kind)), kind)
    assert found.keys() == expected.keys() and len(found) > 3
    excepted = BY_BATCH.get(kind, set())
    differing = {
        name: (found[name], expected[name])
        for name in expected.keys() - excepted
        if found[name] != pytest.approx(expected[name], rel=2e-5, abs=2e-6, nan_ok=True)
    }
    assert not differing


# Names of metrics by what they are means over, if it isn't the rows
OVER_TOKENS = {
    "sft": {"completion": ["loss", "entropy", "mean_token_accuracy"]},
    "dpo": {"both": ["entropy"], "chosen": ["mean_token_accuracy", "logits/chosen"], "rejected": ["logits/rejected"]},
    "kto": {"completion": ["entropy", "logits/chosen", "logits/rejected"]},
    "reward": {},
}
EXTREMES = {"min_reward": min, "max_reward": max}


def tokens_of(kind, trainer, dataset):
    """Numbers of learned tokens of a row, by side."""
    batch = next(iter(trainer.get_eval_dataloader(dataset)))
    if kind == "sft":
        return {"completion": (batch["labels"][:, 1:] != -100).sum().item()}
    if kind == "reward":
        return {}
    counts = batch["completion_mask"].sum(1).tolist()
    names = ("completion",) if kind == "kto" else ("chosen", "rejected")
    return {**dict(zip(names, counts, strict=False)), "both": sum(counts)}


@pytest.mark.parametrize("kind", READ)
def test_metrics_are_sums_over_single_rows(kind, tmp_path, of_one_batch):
    """Computed in float64 from evaluations of one row each."""
    dataset = rows(kind)
    trainer = trainer_of(kind, tmp_path, 1, dataset)
    singles = []
    counts = []
    for i in range(N_ROWS):
        row = dataset.select([i])
        found = trainer.evaluate(row)
        singles.append({name.removeprefix("eval_"): number for name, number in found.items()})
        counts.append(tokens_of(kind, trainer, row))
    found = dict(of_one_batch(kind))
    if kind == "kto":
        labels = dataset["label"]
        assert ["rewards/chosen" in single for single in singles] == labels
        assert ["rewards/rejected" in single for single in singles] == [not label for label in labels]
        margin = found.pop("rewards/margins")
        assert margin == pytest.approx(found["rewards/chosen"] - found["rewards/rejected"], rel=1e-5)
    side_of = {name: side for side, names in OVER_TOKENS[kind].items() for name in names}
    for name, number in found.items():
        values = [(single[name], count) for single, count in zip(singles, counts, strict=True) if name in single]
        if name in EXTREMES:
            expected = EXTREMES[name](value for value, _ in values)
        else:
            weights = np.array([count.get(side_of.get(name), 1) for _, count in values], dtype=np.float64)
            expected = (np.array([value for value, _ in values]) * weights).sum() / weights.sum()
        assert number == pytest.approx(expected, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("kind", ["grpo", "rloo", "ppo"])
def test_metrics_are_sums_over_completions(kind, tmp_path):
    """Computed in float64 from the completions and their rewards."""
    trainer = trainer_of(kind, tmp_path, 2, rows(kind))
    REWARDED.clear()
    found = {name.removeprefix("eval_"): number for name, number in trainer.evaluate().items()}
    completions, values = (list(column) for column in zip(*REWARDED, strict=True))
    values = np.array(values)
    assert sorted(values) == sorted([*range(N_ROWS)] * 2)
    lengths = np.array([len(ids) for ids in completions], dtype=np.float64)
    ended = np.array([ids[-1] == trainer._tokenizer.eos_token_id for ids in completions])
    first = np.array(length(completions, log_metric=lambda *_: None))
    second = np.where(values >= 3, values + lengths, np.nan)
    total = first + np.nan_to_num(second)
    expected = {
        "rewards/length/mean": first.mean(),
        "rewards/length/std": first.std(ddof=1),
        "rewards/sometimes/mean": np.nanmean(second),
        "rewards/sometimes/std": np.nanstd(second, ddof=1),
        "reward": total.mean(),
        "reward_std": total.std(ddof=1),
        "length_of_own": lengths.mean(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": 1 - ended.mean(),
        "completions/mean_terminated_length": lengths[ended].mean(),
        "completions/min_terminated_length": lengths[ended].min(),
        "completions/max_terminated_length": lengths[ended].max(),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("n_rows", "size", "n_repeats", "n_ranks"), [(11, 2, 1, 4), (7, 1, 1, 4), (7, 4, 2, 2), (5, 1, 2, 2)]
)
def test_ranks_share_the_rows_of_an_evaluation(n_rows, size, n_repeats, n_ranks, drop_last, whole):
    """Each row counts once, ranks have batches of equal sizes, and accelerate knows what counts of the last ones."""
    options = {"n_rows": n_rows, "drop_last": drop_last, "whole": whole}
    ranks = [
        EvalBatches(lambda: range(n_rows), list, size, n_repeats, (n_ranks, rank), **options)
        for rank in range(n_ranks)
    ]
    batches = [[*rank] for rank in ranks]
    steps = [*zip(*batches, strict=True)]
    assert {len(rank) for rank in ranks} == {len(steps)}
    counted = []
    for step in steps:
        assert len({len(batch) for batch in step}) == 1 and len(step[0]) <= size
        assert not whole or len(step[0]) == size
        for batch in step:
            counted += batch.keys[: batch.n_counted]
    n_kept = n_rows - n_rows % (size * n_ranks // n_repeats) if drop_last else n_rows
    assert sorted(counted) == sorted([*range(n_kept)] * n_repeats)
    last = sum(batch.n_counted for batch in steps[-1])
    total = size * ranks[0].num_processes
    n_repeated = sum(map(len, steps[-1])) - last
    assert ranks[0].n_left % total == (last if n_repeated else 0)
