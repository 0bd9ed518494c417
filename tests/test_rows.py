# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows are read once, ahead of need, with the same results; and one that can't be read doesn't end a run."""

import errno
import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from helpers import trainer_utils
from helpers.resumed_runs import REPLAY, REUSED, Recording, checkpoint, few_live, same_weights
from helpers.trainer_utils import (
    AS_SHIPPED,
    InjectedOurs,
    audio_rows,
    image_rows,
    length_and_sum,
    load,
    sound,
    text_rows,
    with_media,
)
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import RepeatSampler

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.data.ahead import ReadAhead
from trl_multimodal_rft.data.columns import MediaError
from trl_multimodal_rft.data.fetch import FetchLater, FetchOnce, LookAhead, as_rows, numbered
from trl_multimodal_rft.data.skipping import other_row, skip_limit
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate


class Recorded(Recording, MultimodalGRPOTrainer):
    pass


def make_trainer(trainer_class, *args, **options):
    shipped = {} if trainer_class in (GRPOTrainer, RLOOTrainer) else AS_SHIPPED
    return trainer_utils.make_trainer(trainer_class, *args, **{**shipped, **options})


def trained(rows, folder, family="qwen2_audio", **options):
    trainer = make_trainer(Recorded, family, rows, folder, **options)
    trainer.train()
    return trainer


# Ahead


def noisy_rows(n: int = 6) -> Dataset:
    """Sounds that are another each time a row is read."""
    noise = np.random.default_rng()

    def read(batch):
        sounds = [
            {"array": 0.1 * noise.standard_normal(4000).astype(np.float32), "sampling_rate": 16000}
            for _ in batch["index"]
        ]
        return {**batch, "audio": sounds}

    return text_rows(n).add_column("index", range(n)).with_transform(read)


def test_reward_functions_get_the_media_that_the_model_got(tmp_path):
    heard = []

    def reward(completion_ids, audio, **kwargs):
        heard.extend(float(np.abs(each["array"]).sum()) for each in audio)
        return [float(len(ids)) for ids in completion_ids]

    trainer = make_trainer(
        Recorded, "qwen2_audio", noisy_rows(), tmp_path, reward=reward, max_steps=4, steps_per_generation=1
    )
    encoded, encode = [], trainer._encode_rows

    def recorded(inputs):
        rows, prompts = encode(inputs)
        encoded.extend(zip(rows, prompts, strict=True))
        return rows, prompts

    trainer._encode_rows = recorded
    trainer.train()
    assert heard == [float(np.abs(row["audio"]["array"]).sum()) for row, _ in encoded]
    for row, prompt in encoded:
        processed = trainer.processing_class.feature_extractor(
            row["audio"]["array"],
            sampling_rate=16000,
            return_tensors="pt",
            return_attention_mask=True,
            padding="max_length",
        )
        assert torch.equal(prompt.media["input_features"], processed["input_features"])


@pytest.mark.parametrize(
    "options", [{}, pytest.param(REPLAY, marks=pytest.mark.slow)], ids=["plain", "dynamic sampling"]
)
def test_reading_ahead_changes_nothing(options, tmp_path):
    options = {"reward": few_live, **REUSED, **options, "save_strategy": "no", "learning_rate": 1e-3}
    runs = [
        trained(
            audio_rows(5), tmp_path / str(n), **{**options, "media_prefetch": n, "dataloader_num_workers": workers}
        )
        for n, workers in ((0, 0), (0, 1), (1, 0), (3, 2))
    ]
    for run in runs[1:]:
        assert run.trained_on == runs[0].trained_on
        assert same_weights(run, runs[0])


def test_next_rows_are_read_before_they_are_needed(tmp_path):
    trainer = make_trainer(Recorded, "qwen2_audio", audio_rows(8), tmp_path, max_steps=3)
    late, take = [], ReadAhead.take

    class Watched(ReadAhead):
        def take(self, row):
            late.append(row not in self._jobs)
            return take(self, row)

    loader = trainer.get_train_dataloader()
    trainer._ahead.__class__ = Watched
    trainer.get_train_dataloader = lambda: loader
    trainer.train()
    assert late == [False] * 4  # two prompts in each batch but the first, which is read at once


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_text_keeps_the_workers_of_trls_loader(algorithm, tmp_path):
    """And trains on the same rows; media are read ahead instead."""
    trl, ours = {
        "grpo": (GRPOTrainer, MultimodalGRPOTrainer),
        "rloo": (RLOOTrainer, MultimodalRLOOTrainer),
    }[algorithm]
    options = {"dataloader_num_workers": 2, "max_steps": 1}
    made = [make_trainer(each, "qwen2_5_vl", text_rows(4), tmp_path, **options) for each in (trl, ours)]
    loaders = [trainer.get_train_dataloader() for trainer in made]
    assert [loader.num_workers for loader in loaders] == [2, 2]
    theirs, own = ([list(map(dict, batch)) for batch in loader] for loader in loaders)
    assert theirs == own and len(own) > 1
    assert made[1]._ahead is None and made[1].args.dataloader_num_workers == 2
    with_images = make_trainer(ours, "qwen2_5_vl", image_rows(4), tmp_path, **options)
    assert with_images.get_train_dataloader().num_workers == 0 and with_images._ahead is not None


def test_text_starts_no_process(tmp_path):
    trainer = make_trainer(
        Recorded, "qwen2_audio", with_media(text_rows(8), "audio", [None] * 8), tmp_path, max_steps=3
    )
    started = []
    make, trainer._get_dataloader = trainer._get_dataloader, None

    def loader(*args, **kwargs):
        found = make(*args, **kwargs)
        trainer._ahead._submit = lambda row: started.append(row)
        return found

    trainer._get_dataloader = loader
    trainer.train()
    assert trainer.state.global_step == 3 and not started


@pytest.mark.parametrize("n", [1, 3])
def test_order_ahead_is_the_order(n):
    def sampler():
        return RepeatSampler(range(10), mini_repeat_count=2, batch_size=3, repeat_count=4, seed=1)

    plain = sampler()
    epochs = [list(plain) for _ in range(3)]
    ahead = LookAhead(sampler(), size=6, repeats=4, n=n)
    blocks = [epoch[start : start + 6] for epoch in epochs for start in range(0, len(epoch), 24)]
    seen = 0
    for epoch in epochs:
        assert len(ahead) == len(epoch)
        for place, index in enumerate(ahead):
            assert index == epoch[place]
            if place % 24 == 0:
                assert index.block == seen
                for mine in (slice(0, 2), slice(2, 6)):
                    coming = [row for block in blocks[seen + 1 : seen + 1 + n] for row in block[mine]]
                    if seen + n < len(blocks):
                        assert ahead.after(seen, mine, n) == list(dict.fromkeys(coming))
                seen += 1


def test_a_process_that_dies_costs_one_row():
    parent = os.getpid()

    def read(row):
        if row == 2 and os.getpid() != parent:
            os._exit(9)
        return row * 10, os.getpid()

    ahead = ReadAhead(read, num_workers=2)
    ahead.want(range(5))
    with pytest.raises(MediaError, match="row 2: the process that decoded its media was killed"):
        ahead.take(2)
    found = [ahead.take(row) for row in (0, 1, 3, 4)]
    assert [value for value, _ in found] == [0, 10, 30, 40]
    assert all(process != parent for _, process in found)
    with pytest.raises(MediaError, match="row 2"):  # not asked for before
        ahead.take(2)
    ahead.close()


def test_processes_that_are_killed_between_rows_are_replaced():
    ahead = ReadAhead(lambda row: (row, os.getpid(), os.getpgid(0)))
    row, pid, group = ahead.take(1)
    assert group == pid != os.getpid()  # what is sent to the group of this process isn't for it
    os.kill(pid, signal.SIGTERM)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)
    ahead.want([2, 3])
    assert [ahead.take(row)[0] for row in (2, 3)] == [2, 3]
    ahead.close()


def test_without_room_for_a_copy_of_the_process_rows_are_read_here(monkeypatch, caplog):
    def fork():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    ahead = ReadAhead(lambda row: (row, os.getpid()))
    with monkeypatch.context() as without:
        without.setattr(os, "fork", fork)
        ahead.want([3, 4])
    assert "for want of memory" in caplog.text
    assert [ahead.take(row) for row in (3, 4, 5)] == [(row, os.getpid()) for row in (3, 4, 5)]
    ahead.close()


def test_what_cannot_be_sent_is_read_here():
    ahead = ReadAhead(lambda row: (os.getpid(), (each for each in ())))
    ahead.want([1])
    assert ahead.take(1)[0] == os.getpid()
    ahead.close()


def test_rows_are_read_when_they_are_looked_into():
    read = []

    def transform(batch):
        read.extend(batch["index"])
        return batch

    rows = FetchLater(FetchOnce(Dataset.from_dict({"index": range(4)}).with_transform(transform)))
    row = rows[2]
    assert row.number == 2 and row.to("cpu") is row and row.pin_memory() is row and not read
    assert row == {"index": 2} and {**row} == {"index": 2} and read == [2]


# Rows that can't be read


def damaged_rows(bad: dict[int, str], n: int = 12) -> Dataset:
    """Sounds, some of which are of files that aren't there."""
    sounds = [bad.get(i, sound(0.2 + 0.02 * i, seed=i)) for i in range(n)]
    return with_media(text_rows(n), "audio", sounds)


BAD = {1: "/nowhere/1.wav", 4: "/nowhere/4.wav", 9: "/nowhere/9.wav"}
SKIP = {"on_media_error": "skip", "max_skipped_rows": 3, "max_steps": 12, "learning_rate": 1e-3}


def skipped_rows(folder) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "skipped_rows.jsonl").read_text().splitlines()]


def numbers_of(trainer) -> list[list[int]]:
    """The numbers at the end of the prompts that were trained on, of each micro-batch."""
    decode = trainer.processing_class.tokenizer.decode
    return [[int(re.findall(r"(\d+)<", decode(ids))[-1]) for ids in prompts] for prompts, _ in trainer.trained_on]


def test_bad_row_raises_by_default(tmp_path):
    with pytest.raises(MediaError, match=r"row (1|4|9), column 'audio'.*/nowhere/\1.wav"):
        trained(damaged_rows(BAD), tmp_path, max_steps=12)


def test_bad_rows_are_skipped(tmp_path):
    runs = [trained(damaged_rows(BAD), tmp_path / str(n), **SKIP, media_prefetch=n) for n in (0, 1)]
    for n, run in enumerate(runs):
        assert run.state.global_step == 12
        entries = skipped_rows(tmp_path / str(n))
        assert sorted(entry["row"] for entry in entries) == [1, 4, 9]
        assert all(f"row {entry['row']}, column 'audio'" in entry["error"] for entry in entries)
        assert all(entry["split"] == "train" for entry in entries)
        counts = [entry["media/skipped"] for entry in run.state.log_history if "media/skipped" in entry]
        assert sum(counts) == 3 and len(counts) == 12
        assert {number for batch in numbers_of(run) for number in batch} == set(range(12)) - BAD.keys()
    assert runs[0].trained_on == runs[1].trained_on
    assert same_weights(*runs)


def test_too_many_bad_rows_end_the_run(tmp_path):
    with pytest.raises(MediaError, match=r"3 rows can't be read, more than `max_skipped_rows` \(0.2\).*skipped_rows"):
        trained(damaged_rows(BAD), tmp_path, **{**SKIP, "max_skipped_rows": 0.2})
    assert len(skipped_rows(tmp_path)) == 3


@pytest.mark.slow
def test_rows_that_were_skipped_stay_so_after_resuming(tmp_path):
    """Though they can be read again."""
    straight = trained(damaged_rows(BAD), tmp_path / "straight", **SKIP, save_strategy="steps", save_steps=1)
    resumed = make_trainer(Recorded, "qwen2_audio", damaged_rows({}), tmp_path / "resumed", **SKIP)
    entries = skipped_rows(tmp_path / "straight")
    step = entries[0]["step"] + 1
    before = {entry["row"] for entry in entries if entry["step"] < step}
    resumed.train(resume_from_checkpoint=checkpoint(straight, step))
    assert set(resumed._skipped) == before
    assert {number for batch in numbers_of(resumed) for number in batch} == set(range(12)) - before


def test_stream_goes_on_with_the_row_before(tmp_path):
    rows = [dict(row) for row in damaged_rows(BAD)]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    options = {**SKIP, "max_steps": 5, "shuffle_dataset": False}
    run = trained(stream, tmp_path, **options)
    assert [entry["row"] for entry in skipped_rows(tmp_path)] == [1, 4, 9]
    assert [sorted(set(batch)) for batch in numbers_of(run)] == [[0], [2, 3], [5], [6, 7], [8]]
    last = run._last_read
    run.evaluate(audio_rows(2))
    assert run._last_read is last  # none of the rows to evaluate
    run.num_generations = 3  # of 8 completions of a process: a group straddles
    with pytest.raises(ValueError, match="whole groups"):
        run.get_train_dataloader()


def test_stream_of_less_than_a_batch_is_an_error(tmp_path):
    def make(rows, **options):
        return make_trainer(Recorded, "qwen2_5_vl", rows.to_iterable_dataset(), tmp_path, self_check=False, **options)

    with pytest.raises(
        ValueError, match="fewer rows than a batch of 2, so nothing was trained.*`steps_per_generation`"
    ):
        make(image_rows(1)).train()
    make(image_rows(3), save_strategy="steps", save_steps=1).train()
    with pytest.raises(ValueError, match="fewer rows than a batch of 2"):
        make(image_rows(1)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    trainer = make(image_rows(3))
    trainer.train(resume_from_checkpoint=True)  # which has nothing left to do
    assert trainer.state.global_step == 2


def test_rows_of_streams_are_numbered_as_they_come():
    stream = IterableDataset.from_generator(lambda: ({"x": i // 2 % 3 + 3 * (i // 24)} for i in range(48)))
    found = as_rows(list(numbered(stream, batch=6, generations=2, repeats=4)))
    assert [row.number for row in found] == [row["x"] for row in found]


def test_other_rows_are_the_same_everywhere():
    skipped = {2, 5}
    found = other_row(2, skipped, 8, seed=0)
    assert found not in skipped and found == other_row(2, {5, 2}, 8, seed=0)
    assert other_row(3, skipped, 8, seed=0) == 3
    assert len({other_row(2, skipped, 1000, seed) for seed in range(20)}) > 10
    with pytest.raises(ValueError, match="None of the dataset's rows"):
        other_row(0, range(8), 8, seed=0)
    assert [skip_limit(share, 50) for share in (0.1, 0.001, 1, 7)] == [5, 1, 1, 7]


def test_evaluation_leaves_out_what_it_cannot_read():
    model, processor = load("qwen2_audio")
    args = {"max_completion_length": 4, "batch_size": 3}

    def reward(completions, index, **kwargs):
        return [float(i % 2) for i in index]

    with pytest.raises(MediaError, match="row 1, column 'audio'"):
        evaluate(model, processor, damaged_rows(BAD), reward, EvaluationConfig(**args))
    bad = {**BAD, 3: "/nowhere/3.wav", 5: "/nowhere/5.wav"}  # a whole batch of them
    result = evaluate(model, processor, damaged_rows(bad), reward, EvaluationConfig(**args, on_media_error="skip"))
    assert result.metrics["rows"] == 7 and result.metrics["skipped_rows"] == 5
    assert result.metrics["accuracy"] == pytest.approx(2 / 7)  # rows 7 and 11
    assert [row["index"] for row in result.rows] == [0, 2, 6, 7, 8, 10, 11]
    assert set(result.skipped) == set(bad) and all(f"row {row}," in error for row, error in result.skipped.items())


EVALUATED = {
    "on_media_error": "skip",
    "max_skipped_rows": 6,
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 6,
}


def evaluated(trainer, rows) -> dict[str, float]:
    trainer.model.train()  # as between steps
    durations = ("time", "per_second")
    return {name: n for name, n in trainer.evaluate(rows).items() if not any(part in name for part in durations)}


def test_evaluation_of_a_trainer_is_that_of_the_rows_that_can_be_read(tmp_path):
    rows, good = damaged_rows(BAD), [row for row in range(12) if row not in BAD]
    seen = []

    def reward(completion_ids, index, **kwargs):
        seen.extend(index)
        return length_and_sum(completion_ids)

    trainer = make_trainer(InjectedOurs, "qwen2_audio", audio_rows(4), tmp_path, reward=reward, **EVALUATED)
    expected = evaluated(trainer, damaged_rows({}).select(good))
    assert expected.pop("eval_media/skipped") == 0 and expected["eval_reward_std"] > 0
    for _ in range(2):
        found = evaluated(trainer, rows)
        assert found.pop("eval_media/skipped") == 3 and found == expected
    assert [(entry["row"], entry["split"]) for entry in skipped_rows(tmp_path)] == [(row, "eval") for row in BAD]
    seen.clear()
    found = evaluated(trainer, IterableDataset.from_generator(lambda: map(dict, rows)))
    assert found["eval_media/skipped"] == 3 and sorted(seen) == sorted(2 * good)
    trainer.args.max_skipped_rows = 2
    with pytest.raises(MediaError, match=r"3 rows can't be read, more than `max_skipped_rows` \(2\)"):
        evaluated(trainer, damaged_rows(BAD))
    trainer.args.max_skipped_rows = 12
    with pytest.raises(MediaError, match=r"No row to evaluate can be read. The last one: .*9.wav"):
        evaluated(trainer, damaged_rows(BAD).select([*BAD]))


def test_batch_with_a_row_that_can_no_longer_be_read_is_left_out(tmp_path):
    sounds = [BAD.get(i, sound(0.2 + 0.02 * i, seed=i)) for i in range(12)]
    rows, seen = with_media(text_rows(12), "audio", sounds), []

    def reward(completion_ids, index, **kwargs):
        seen.append((index, length_and_sum(completion_ids)))
        return seen[-1][1]

    trainer = make_trainer(InjectedOurs, "qwen2_audio", audio_rows(4), tmp_path, reward=reward, **EVALUATED)
    evaluated(trainer, rows)
    first, (lost, _), last = seen
    sounds[lost[-1]] = "/nowhere/lost.wav"
    found = evaluated(trainer, rows)
    assert found["eval_media/skipped"] == len(BAD) + 3
    assert found["eval_reward"] == pytest.approx(np.mean([first[1], last[1]]))
    evaluated(trainer, rows)
    assert {row for index, _ in seen[-3:] for row in index} == set(range(12)) - BAD.keys() - {lost[-1]}
