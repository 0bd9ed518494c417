# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prompts chosen by how difficult they are: bounds on a group's mean reward, and sampling of rows by pass rates."""

import io
import json
import math
from collections import Counter
from itertools import product
from statistics import fmean

import pytest
import torch
from datasets import Dataset, Image, load_dataset
from helpers import rloo_runs
from helpers.marks import by_turns
from helpers.trainer_utils import InjectedOurs, Recorded, Recording, image_rows, keys, logged, make_trainer, run, saved

from trl_multimodal_rft.cli.arguments import parse
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.data.rows.difficulty import DifficultySampler, difficulty_sampler
from trl_multimodal_rft.extras import filter
from trl_multimodal_rft.rollout.estimates import out_of_range


pytestmark = pytest.mark.gate


FAMILY = "qwen2_5_vl"
# Two groups of four completions, one in each of two micro-batches
TWO = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.03, "self_check": False}


class RecordedRLOO(Recording, rloo_runs.InjectedOurs):
    pass


def rows(**columns) -> Dataset:
    dataset = image_rows().add_column("index", range(8))
    for name, values in columns.items():
        dataset = dataset.add_column(name, values)
    return dataset


# Of each row's four completions, so many are right
RIGHT = [0, 1, 2, 3, 4, 2, 2, 0]


def right(index, **kwargs) -> list[float]:
    return [float(position % 4 < RIGHT[i]) for position, i in enumerate(index)]


def longer(index, **kwargs) -> list[float]:
    """Differs within each group, with a mean of 0.6."""
    return [0.1 * (position % 4) + 0.45 for position, _ in enumerate(index)]


# Bounds on a group's mean reward


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ends_of_the_range_are_outside(dtype):
    """Also where the mean of rounded rewards is not the bound that was written."""
    for size, n_right in ((10, 1), (10, 9), (3, 1), (7, 4)):
        rewards = torch.tensor([1.0] * n_right + [0.0] * (size - n_right), dtype=dtype)
        group_ids = torch.zeros(size, dtype=torch.long)
        mean = n_right / size
        assert out_of_range(rewards, group_ids, [mean, 1.0]).tolist() == [-1] * size
        assert out_of_range(rewards, group_ids, [0.0, mean]).tolist() == [1] * size
        assert out_of_range(rewards, group_ids, [mean - 1e-9, mean + 1e-9]).tolist() == [0] * size


def test_range_bounds_each_groups_mean_of_what_is_scored():
    nan = math.nan
    rewards = torch.tensor([0.0, 1.0, nan, 1.0, nan, nan, 0.0, 0.1])
    group_ids = torch.tensor([7, 7, 3, 3, 9, 9, 1, 1])
    assert out_of_range(rewards, group_ids, [0.1, 0.9]).tolist() == [0, 0, 1, 1, 0, 0, -1, -1]


@pytest.mark.parametrize("trainer_class", [Recorded, RecordedRLOO], ids=["grpo", "rloo"])
@pytest.mark.parametrize("named", [False, True])
def test_batches_are_filled_with_groups_in_the_range(named, trainer_class):
    """The range holds for the weighted sum or for the named function, and the others count alike in the reward."""
    bounds = {"dynamic_sampling_range": [0.25, 0.75]} if named else {"dynamic_sampling_range": [0.9, 1.3]}
    bounds |= {"dynamic_sampling_reward": "right"} if named else {}
    options = {"dynamic_sampling": 8, "max_steps": 3, **TWO, **bounds}
    result = run(trainer_class, FAMILY, rows(), reward=[longer, right], shuffle_dataset=False, **options)
    draws = result.trainer.draws
    wanted = {
        frozenset(keys(draw.batch)[i : i + 4])
        for draw, i in product(draws, (0, 4))
        if RIGHT[draw.rows[i]["index"]] == 2
    }
    used = [keys(moment.batch) for moment in result.trainer.micro_batches]
    assert len(used) == 6 and all(frozenset(each) in wanted for each in used)
    for step in range(3):
        drawn = Counter(RIGHT[draw.rows[i]["index"]] for draw in draws if draw.step == step for i in (0, 4))
        below = drawn[0] + drawn[1]
        above = drawn[3] + drawn[4]
        n = drawn.total()
        assert logged(result, "sampling/dropped_below")[step] == pytest.approx(below / n)
        assert logged(result, "sampling/dropped_above")[step] == pytest.approx(above / n)
        assert logged(result, "sampling/dropped_equal")[step] == 0
        assert logged(result, "sampling/kept_frac")[step] == pytest.approx(drawn[2] / n)


@pytest.mark.parametrize("trainer_class", [Recorded, RecordedRLOO], ids=["grpo", "rloo"])
def test_replay_replaces_groups_out_of_the_range(trainer_class):
    """Rows come in their order, so that the second batch has rows 2 and 3, and the first and last ones are dead."""
    options = {"replay_buffer_size": 4, "dynamic_sampling_range": [0.25, 0.75], "max_steps": 4, **TWO}
    result = run(trainer_class, FAMILY, rows(), reward=right, shuffle_dataset=False, **options)
    names = ("kept_frac", "dropped_equal", "dropped_below", "dropped_above")
    found = [[logged(result, f"sampling/{name}")[step] for name in names] for step in range(4)]
    assert found == [[0, 0.5, 0.5, 0], [0.5, 0, 0, 0.5], [0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]]
    assert logged(result, "replay/frac") == [0, 0, 0.5, 0.5]


# Sampling by difficulty


def test_rows_are_drawn_by_their_weights():
    rates = [0.0, 0.1, 0.5, 0.9, 1.0, None, math.nan]
    sampler = DifficultySampler(len(rates), 1, seed=3, pass_rates=rates)
    counts = Counter(row for place in range(20000) for row in sampler.rows(place))
    weights = [0.1, 0.36, 1, 0.36, 0.1, 1, 1]
    for row, weight in enumerate(weights):
        assert counts[row] / 20000 == pytest.approx(weight / sum(weights), abs=0.012)
    whole = DifficultySampler(len(rates), 7, pass_rates=rates)
    assert sorted(whole.rows(0)) == list(range(7)) and whole.rows(1) != whole.rows(2)


def test_pass_rates_follow_what_is_measured():
    sampler = DifficultySampler(4, 2, pass_rates=[None, 0.8, None, 0.2])
    sampler.update_pass_rates(torch.tensor([0, 1, 0, 1, 2]), torch.tensor([1.0, 0.0, 0.0, 0.5, math.nan]))
    assert sampler.rates[[0, 1, 3]].tolist() == pytest.approx([0.5, 0.525, 0.2]) and sampler.rates[2].isnan()
    sampler.update_pass_rates(torch.tensor([0, 0]), torch.tensor([3.0, -1.0]))  # rewards beyond 0 and 1 count as those
    sampler.update_pass_rates(torch.tensor([2]), torch.tensor([0.25]))
    assert sampler.rates.tolist() == pytest.approx([0.5, 0.525, 0.25, 0.2])
    assert sampler.coverage() == (1.0, pytest.approx(1.475 / 4))
    assert DifficultySampler(4, 2).coverage() == (0.0, 0.0)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_rows_depend_on_what_was_measured_before_they_are_drawn(ahead):
    def draws(place_of_measurement):
        sampler = DifficultySampler(40, 4, n_prefetched=ahead)
        found = []
        for place in range(8):
            found.append(sampler.rows(place))
            if place == place_of_measurement:
                sampler.update_pass_rates(torch.arange(20), torch.ones(20))
        return found

    without = draws(None)
    for place in range(7):
        found = draws(place)
        assert found[: place + 1 + ahead] == without[: place + 1 + ahead]
        if place < 3:
            assert found[place + 1 + ahead :] != without[place + 1 + ahead :]


def test_state_continues_the_draws():
    straight = DifficultySampler(8, 3, seed=1, n_prefetched=2)
    found = []
    for place in range(9):
        found.append(straight.rows(place))
        straight.update_pass_rates(torch.tensor(found[-1]), torch.tensor([0.0, 1.0, 0.0]))
        if place == 4:
            file = io.BytesIO()
            torch.save(straight.state_dict(), file)
            resumed = DifficultySampler(8, 3, seed=1, n_prefetched=2)
            file.seek(0)
            resumed.load_state_dict(torch.load(file, weights_only=True))
    for place in range(5, 9):
        assert resumed.rows(place) == found[place]
        resumed.update_pass_rates(torch.tensor(found[place]), torch.tensor([0.0, 1.0, 0.0]))
    assert torch.equal(straight.rates.nan_to_num(9), resumed.rates.nan_to_num(9))
    other = DifficultySampler(9, 3)
    other.load_state_dict(straight.state_dict())
    assert other.rates.isnan().all()
    larger = DifficultySampler(8, 4)
    larger.load_state_dict(straight.state_dict())
    assert len(larger.rows(9)) == 4 and not larger.rates.isnan().all()


def test_rows_that_are_left_out_are_not_drawn():
    sampler = DifficultySampler(6, 2, pass_rates=[0.5] * 6)
    drawn = {row for place in range(50) for row in sampler.rows(place, {1: "", 4: ""})}
    assert drawn == {0, 2, 3, 5}
    first, second = sampler.rows(50, range(5))  # the one row that is left, and one that the trainer replaces
    assert first == 5 and second in range(5)


@pytest.mark.parametrize("rate", [1.5, -0.1, "0.5"])
def test_column_must_hold_shares(rate):
    dataset = Dataset.from_dict({"pass_rate": [rate, rate]})
    range_of = "must be between 0 and 1, got"
    kind = "column 'pass_rate': is '0.5' of type str"
    with pytest.raises(ValueError, match=f"row 0.*({range_of} {rate!r}|{kind})"):
        difficulty_sampler(dataset, 1, 0, 0)


def numbers(trainer) -> list[list[int]]:
    """Returns the numbers of the rows of each draw."""
    return [draw.batch.source.row_indices[::4] for draw in trainer.draws]


@pytest.mark.parametrize(("column", "prefetch"), by_turns([False, True], [1, 0]))
def test_run_draws_by_what_it_measures(column, prefetch):
    """A sampler that is told the rewards of the run draws the same rows."""
    known = [0.0, 1.0, 0.5, 1.0, 0.0, 1.0, 0.5, None] if column else None
    dataset = rows(pass_rate=known) if column else rows()
    options = {"difficulty_sampling": True, "max_steps": 20, "media_prefetch": prefetch, **TWO, "learning_rate": 1e-4}
    result = run(Recorded, FAMILY, dataset, reward=[right, longer], **options)
    sampler = DifficultySampler(8, 2, result.trainer.args.seed, prefetch, known)
    for place, drawn in enumerate(numbers(result.trainer)):
        assert drawn == sampler.rows(place)
        sampler.update_pass_rates(torch.tensor(drawn), torch.tensor([RIGHT[i] / 4 for i in drawn]))
    assert place == 19
    final = result.trainer._stream.sampler.rates
    assert torch.equal(final.nan_to_num(9), sampler.rates.nan_to_num(9))
    assert logged(result, "difficulty/pass_rate")[-1] == pytest.approx(final.nanmean().item())
    drawn = Counter(number for each in numbers(result.trainer)[2:] for number in each)
    medium, extreme = (fmean(drawn[i] for i in each) for each in ((2, 5, 6), (0, 4, 7)))
    assert medium > 2 * extreme


def test_named_reward_is_what_is_measured():
    options = {"difficulty_sampling": True, "dynamic_sampling_reward": "right", "max_steps": 4, **TWO}
    result = run(InjectedOurs, FAMILY, rows(), reward=[longer, right], **options)
    rates = result.trainer._stream.sampler.rates
    assert rates.nan_to_num(9).tolist() == [
        n / 4 if not rate.isnan() else 9 for n, rate in zip(RIGHT, rates, strict=True)
    ]


def test_workers_read_what_will_be_drawn(tmp_path):
    options = {"difficulty_sampling": True, "max_steps": 5, "media_prefetch": 2, **TWO, "reward": right}
    found = []
    for workers in (0, 2):
        trainer = make_trainer(Recorded, FAMILY, rows(), tmp_path, dataloader_num_workers=workers, **options)
        trainer.train()
        found.append(numbers(trainer))
    pool = make_trainer(Recorded, FAMILY, rows(), tmp_path, **options)
    pool._stream.train_loader = without_pool(pool._stream)
    pool.train()
    assert found[0] == found[1] == numbers(pool)


def without_pool(stream):
    """As on systems where nothing can be forked."""
    load = type(stream).train_loader

    def train_loader(*args, **kwargs):
        loader = load(stream, *args, **kwargs)
        stream.close()
        return loader

    return train_loader


def test_unreadable_rows_are_replaced_and_not_drawn_again(tmp_path):
    dataset = rows()
    paths = [
        {"bytes": None, "path": "/nowhere.png"} if i in (2, 5) else each for i, each in enumerate(stored(dataset))
    ]
    dataset = dataset.remove_columns("image").add_column("image", paths)
    options = {"difficulty_sampling": True, "max_steps": 12, "media_prefetch": 1, "reward": right, **TWO}
    with pytest.raises(MediaError, match=r"row \d, column 'image'"):
        make_trainer(Recorded, FAMILY, dataset, tmp_path, **options).train()
    options |= {"on_media_error": "skip", "max_skipped_rows": 2}
    trainer = make_trainer(Recorded, FAMILY, dataset, tmp_path, **options)
    trainer.train()
    assert set(trainer._stream.skipped) == {2, 5}
    assert {number for each in numbers(trainer) for number in each}.isdisjoint({2, 5})
    assert trainer._stream.sampler.rates[[2, 5]].isnan().all()


def stored(dataset) -> list:

    return dataset.cast_column("image", Image(decode=False))["image"][:]


# Filtering a dataset


def filtered(folder, *options):
    arguments = [
        "--dataset_name",
        folder / "rows.parquet",
        "--model_name_or_path",
        saved(FAMILY),
        "--dtype",
        "float32",
    ]
    arguments += ["--reward_funcs", f"{__name__}.right", "--output_dir", folder / "kept", "--by", "accuracy"]
    arguments += ["--max_completion_length", 2, *options]
    filter.main(*parse(filter.ARGUMENTS, [str(each) for each in arguments]))


FOUR = ["--num_samples", 4, "--temperature", 1.0, "--batch_size", 8]


def test_filter_keeps_rows_of_medium_difficulty_with_their_pass_rates(tmp_path, capsys):
    """Both ends of the range are kept."""
    rows(pass_rate=[9.0] * 8).to_parquet(tmp_path / "rows.parquet")
    filtered(tmp_path, *FOUR, "--min", 0.25, "--max", 0.5)
    assert "4 of 8 rows have 25% to 50% of 4 answers right." in capsys.readouterr().out
    kept = load_dataset(str(tmp_path / "kept"), split="train")
    assert kept["index"][:] == [1, 2, 5, 6] and kept["pass_rate"][:] == [0.25, 0.5, 0.5, 0.5]
    assert [each.size for each in kept["image"]] == [rows()["image"][i].size for i in (1, 2, 5, 6)]
    report = json.loads((tmp_path / "kept" / filter.REPORT).read_text())
    assert report["dropped"] == {"too hard": 2, "too easy": 2}
    assert [(row["row"], row["pass_rate"]) for row in report["dropped_rows"]] == [(0, 0), (3, 0.75), (4, 1), (7, 0)]
    sampler = difficulty_sampler(kept, 2, 0, 0)
    assert sampler.rates.tolist() == [0.25, 0.5, 0.5, 0.5]


def test_filter_samples_several_answers_by_default(tmp_path):
    rows().to_parquet(tmp_path / "rows.parquet")
    filtered(tmp_path)
    report = json.loads((tmp_path / "kept" / filter.REPORT).read_text())
    settings = {name: report["settings"][name] for name in ("num_samples", "temperature")}
    assert settings == {"num_samples": 8, "temperature": 1.0}
    assert (report["min"], report["max"], report["kept"]) == (0.1, 0.9, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ablate", "image"], "leave out `--ablate`"),
        (["--temperature", "1.0"], "set `--num_samples` to at least 2"),
        (["--min_accuracy_with", "0.7"], "`--min_accuracy_with` has no effect with `--by accuracy`"),
        (["--by", "contribution", "--min", "0.1"], "`--min` has no effect with `--by contribution`"),
        (["--min", "0.9", "--max", "0.1"], r"`--min` \(0.9\) and `--max` \(0.1\) must be between 0 and 1"),
        ([*FOUR, "--min", "0.8", "--max", "0.9"], "No row is left"),
    ],
)
def test_filter_refuses(options, message, tmp_path):
    rows().to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=message):
        filtered(tmp_path, *options)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("correct", "reason"),
    [([True, None], "not scored"), ([False] * 9 + [True], None), ([True] * 9 + [False], None), ([True], "too easy")],
)
def test_why_rows_are_dropped(correct, reason):
    assert filter.drop_reason_by_accuracy({"correct": correct}, 0.1, 0.9) == reason
