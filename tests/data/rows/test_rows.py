# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The trainer reads rows once, ahead of need, with the same results. An unreadable row doesn't end a run."""

import copy
import errno
import gc
import json
import multiprocessing
import os
import re
import signal
import struct
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import RepeatSampler

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.data.rows.batches import (
    BatchShape,
    EpochBatches,
    StreamBatches,
    repeat_order,
    seeded_order,
)
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.data.rows.prefetch import PrefetchPool
from trl_multimodal_rft.encoding.prompts import encode_prompt
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.rewards.failures import RewardError
from trl_multimodal_rft.rollout import stream
from trl_multimodal_rft.rollout.stream import other_row, skip_limit


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
    """Returns sounds that differ on each read."""
    noise = np.random.default_rng()

    def read(batch):
        arrays = [0.1 * noise.standard_normal(4000, np.float32) for _ in batch["index"]]
        return {**batch, "audio": [{"array": array, "sampling_rate": 16000} for array in arrays]}

    return text_rows(n).add_column("index", range(n)).with_transform(read)


def test_reward_functions_get_the_media_that_the_model_got(tmp_path):
    heard = []

    def reward(completion_ids, audio, **kwargs):
        heard.extend(float(np.abs(each["array"]).sum()) for each in audio)
        return [float(len(ids)) for ids in completion_ids]

    trainer = make_trainer(
        Recorded, "qwen2_audio", noisy_rows(), tmp_path, reward=reward, max_steps=4, steps_per_generation=1
    )
    encoded = []
    generate = trainer._generate_and_score_completions

    def recorded(rows):
        encoded.extend(rows)
        return generate(rows)

    trainer._generate_and_score_completions = recorded
    trainer.train()
    assert heard == [float(np.abs(each.row["audio"]["array"]).sum()) for each in encoded]
    for each in encoded:
        options = {"sampling_rate": 16000, "return_tensors": "pt", "return_attention_mask": True}
        processed = trainer.processing_class.feature_extractor(
            each.row["audio"]["array"], padding="max_length", **options
        )
        assert torch.equal(each.prompt.media["input_features"], processed["input_features"])


@pytest.mark.parametrize(
    "options", [{}, pytest.param(REPLAY, marks=pytest.mark.slow)], ids=["plain", "dynamic sampling"]
)
def test_reading_ahead_changes_nothing(options, tmp_path):
    options = {"reward": few_live, **REUSED, **options, "save_strategy": "no", "learning_rate": 1e-3}
    rows = audio_rows(5)
    runs = [
        trained(rows, tmp_path / str(n), **{**options, "media_prefetch": n, "dataloader_num_workers": workers})
        for n, workers in ((0, 0), (0, 1), (1, 1), (3, 2))
    ]
    for run in runs[1:]:
        assert run.trained_on == runs[0].trained_on
        assert same_weights(run, runs[0])


def test_next_rows_are_read_before_they_are_needed(tmp_path, monkeypatch):
    trainer = make_trainer(Recorded, "qwen2_audio", audio_rows(8), tmp_path, max_steps=3, dataloader_num_workers=1)
    late = []

    class Watched(PrefetchPool):
        def take(self, row):
            late.append(row not in self._jobs)
            return super().take(row)

    monkeypatch.setattr(stream, "PrefetchPool", Watched)
    trainer.train()
    assert late == [False] * 6  # two prompts in each batch
    late.clear()
    make_trainer(Recorded, "qwen2_5_vl", image_rows(8), tmp_path, max_steps=3).train()
    assert late == [False] * 4  # without a transform, the trainer reads the first batch at once
    rows = with_media(text_rows(8), "audio", [None] * 8)  # no process reads text-only rows
    trainer = make_trainer(Recorded, "qwen2_audio", rows, tmp_path, max_steps=3)
    monkeypatch.setattr(PrefetchPool, "_submit", None)
    trainer.train()
    assert trainer.state.global_step == 3


class Casts(TorchDispatchMode):
    """Counts how often the features of each medium are cast."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].size()[-1:] == (self.width,):
            if args[0].dtype != output.dtype:
                self.counts[args[0].float().sum().item()] += 1
        return output


def test_features_are_cast_once_per_generation_batch(tmp_path):
    """By the process that reads them: sampling, two iterations of two micro-batches, and a reference take them so."""
    model, processor = load("qwen2_5_vl")
    options = {"num_iterations": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "beta": 0.1}
    options |= {"self_check": False, "max_steps": 2, "media_prefetch": 0}
    objects = {"model": model.to(torch.bfloat16), "processing_class": processor, "ref_model": copy.deepcopy(model)}
    trainer = make_trainer(Recorded, "qwen2_5_vl", image_rows(4), tmp_path, objects=objects, **options)
    with Casts(model.model.visual.patch_embed.proj.weight[0].numel()) as casts:
        trainer.train()
    assert trainer.state.global_step == 2 and len(casts.counts) == 2
    assert set(casts.counts.values()) == {1}


def test_features_are_not_cast_where_models_take_them_differently(tmp_path):
    """A float32 model must not get features that were rounded for another."""
    model, processor = load("qwen2_5_vl")
    objects = {"model": model.to(torch.bfloat16), "processing_class": processor}
    trainer = make_trainer(MultimodalPPOTrainer, "qwen2_5_vl", image_rows(4), tmp_path, objects=objects, beta=0)
    assert trainer.prompts.feature_dtype() == torch.bfloat16
    trainer.critic.model.float()
    assert trainer.prompts.feature_dtype() is None
    trainer.model.float()
    assert trainer.prompts.feature_dtype() == torch.float32
    trainer.ref_model = load("qwen2_5_vl")[0].to(torch.bfloat16)
    assert trainer.prompts.feature_dtype() is None


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
@pytest.mark.parametrize("streamed", [False, True], ids=["dataset", "stream"])
def test_loader_gives_the_rows_of_trls(algorithm, streamed, tmp_path):
    """Compares micro-batch by micro-batch, in two epochs, and from the middle of the second one."""
    trl, ours = {
        "grpo": (GRPOTrainer, MultimodalGRPOTrainer),
        "rloo": (RLOOTrainer, MultimodalRLOOTrainer),
    }[algorithm]
    rows = text_rows(9).to_iterable_dataset() if streamed else text_rows(9)
    options = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 1, "num_generations": 2}
    theirs, own = (
        make_trainer(each, "qwen2_5_vl", rows, tmp_path, **options).get_train_dataloader() for each in (trl, ours)
    )
    if not streamed:
        assert len(theirs) == len(own) and len(own.dataset) == 9
    for epoch in range(2):
        theirs.set_epoch(epoch)
        own.batch_sampler.set_epoch(epoch)
        batches = [[each.row for each in batch] for batch in own]
        assert batches == [[dict(row) for row in batch] for batch in theirs] and len(batches) > 1
        assert all(len(batch) == len({id(row) for row in batch}) * 2 for batch in batches)
    rest = skip_first_batches(own, 3)
    rest.batch_sampler.batch_sampler.set_epoch(1)
    assert [[each.row for each in batch] for batch in rest] == batches[3:]


SHAPES = {
    "one rank": BatchShape(6, 3, 4),
    "groups straddle": BatchShape(4, 3, 2, n_ranks=3),
    "kept": BatchShape(3, drop_last=False),
    "kept, filled up": BatchShape(3, n_ranks=2, drop_last=False),
    "dropped": BatchShape(3, n_ranks=2),
}


@pytest.mark.parametrize("n_rows", [4, 17, 18, 20])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_ranks_get_what_accelerate_gives_them(shape, n_rows):
    n_prompts = shape.n_rows
    stream_of_rows = Dataset.from_dict({"number": range(n_rows)}).to_iterable_dataset()
    for shuffle in (True, False):
        for rank in range(shape.n_ranks):
            own = replace(shape, rank=rank)
            if shape.completions_per_row > 1:
                plain = RepeatSampler(
                    range(n_rows), own.completions_per_row, n_prompts, own.n_repeats, shuffle, seed=1
                )
                order = partial(repeat_order, seed=1)
            else:
                plain = SeedableRandomSampler(range(n_rows), generator=torch.Generator(), data_seed=1)
                plain = plain if shuffle else range(n_rows)
                order = partial(seeded_order, seed=1)
            if own.drop_last and n_rows < n_prompts:
                with pytest.raises(ValueError, match=f"has {n_rows} rows, fewer than a batch of {n_prompts}"):
                    EpochBatches(n_rows, own, None, order)
                continue
            batches = EpochBatches(n_rows, own, None, order if shuffle else None)
            for epoch in range(3):
                expected = BatchSampler(plain, own.size, own.drop_last)
                if own.n_ranks > 1:
                    expected = BatchSamplerShard(expected, own.n_ranks, rank)
                expected = list(expected)
                batches.set_epoch(epoch)
                assert [batch.keys for batch in batches] == expected and len(batches) == len(expected)
            if not shuffle and n_rows >= n_prompts:
                streamed = StreamBatches(stream_of_rows, own, None)
                assert [[row.row_index for row in batch.keys] for batch in streamed] == expected


def test_ranks_read_their_own_shards_of_a_stream():
    def rows(shards):
        for shard in shards:
            yield from ({"x": 10 * shard + i} for i in range(6))

    dataset = IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2]})
    shape = BatchShape(4, 2, 3, n_ranks=2)
    seen = []
    for rank in range(2):
        batches = [batch.keys for batch in StreamBatches(dataset, replace(shape, rank=rank), None)]
        assert all(batches[i] is batches[i - i % 3] for i in range(len(batches)))
        found = [row for keys in batches[::3] for row in keys[::2]]
        assert all(keys[0] is keys[1] and keys[2] is keys[3] for keys in batches)
        assert [row.row_index for row in found] == list(range(rank, 2 * len(found), 2))
        seen += [row["x"] for row in found]
    assert sorted(seen) == [10 * shard + i for shard, i in product(range(3), range(6))]
    straddling = BatchShape(3, 2, n_ranks=2)
    keys = [StreamBatches(dataset, replace(straddling, rank=rank), None) for rank in range(2)]
    assert [[row["x"] for row in next(iter(each)).keys] for each in keys] == [[0, 0, 1], [1, 2, 2]]


def test_no_row_is_read_ahead_that_the_run_does_not_use():
    """Steps count as in `Trainer`: an epoch ends with a step of the remaining micro-batches."""
    batches = EpochBatches(10, BatchShape(2, n_repeats=3), None, partial(seeded_order, seed=0))  # 15 micro-batches
    used = []
    for epoch in range(2):
        batches.set_epoch(epoch)
        used += [batch.batch_index for batch in batches]
    for accumulation in (1, 2, 3, 4, 30):
        per_epoch = -(-15 // accumulation)
        for max_steps in range(1, 2 * per_epoch):
            epochs, rest = divmod(max_steps, per_epoch)
            last = used[: 15 * epochs + min(rest * accumulation, 15)][-1]
            assert batches.coming(last, 3, max_steps, accumulation) == [], (accumulation, max_steps)
            if last:
                assert batches.coming(last - 1, 3, max_steps, accumulation) == batches.keys(last)


def test_a_process_that_dies_costs_one_row():
    parent = os.getpid()

    def read(row):
        if row == 2 and os.getpid() != parent:
            os._exit(9)
        return row * 10, os.getpid()

    ahead = PrefetchPool(read, num_workers=2)
    ahead.prefetch(range(5))
    with pytest.raises(MediaError, match="row 2: the process that decoded its media was killed"):
        ahead.take(2)
    found = [ahead.take(row) for row in (0, 1, 3, 4)]
    assert [value for value, _ in found] == [0, 10, 30, 40]
    assert all(process != parent for _, process in found)
    with pytest.raises(MediaError, match="row 2"):  # not requested before
        ahead.take(2)
    ahead.close()


def test_processes_that_are_killed_are_replaced_and_what_cannot_be_sent_is_read_here():
    ahead = PrefetchPool(lambda row: (row, os.getpid(), os.getpgid(0)))
    row, pid, group = ahead.take(1)
    assert group == pid != os.getpid()  # signals to this process's group don't reach it
    os.kill(pid, signal.SIGTERM)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)
    ahead.prefetch([2, 3])
    assert [ahead.take(row)[0] for row in (2, 3)] == [2, 3]
    ahead.close()
    ahead = PrefetchPool(lambda row: (os.getpid(), (each for each in ())))
    ahead.prefetch([1])
    assert ahead.take(1)[0] == os.getpid()
    ahead.close()


def test_processes_that_are_killed_while_they_send_a_row_are_replaced(tmp_path):
    """Their pool's thread waits for the rest."""

    def read(row):
        if row == 2 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.write(ahead._pool._result_queue._writer.fileno(), struct.pack("!i", 1000) + b"its start")
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    ahead = PrefetchPool(read)
    ahead.prefetch(range(5))
    thread = ahead._pool._executor_manager_thread
    assert [ahead.take(row) for row in (2, 0, 1, 3, 4)] == [2, 0, 1, 3, 4]
    ahead.close()
    assert not thread.is_alive()  # which the interpreter would wait for at its end


def test_processes_that_hang_are_replaced_and_the_row_that_hangs_is_named(tmp_path):
    """As in a decoder, or on a file system that is gone; `SIGSTOP` stops all threads."""

    def read(row):
        if row == 2 or (row == 1 and not (tmp_path / "once").exists()):
            (tmp_path / "once").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return row

    ahead = PrefetchPool(read, patience=lambda row: 1.0)
    ahead.prefetch([0, 1, 3])
    assert [ahead.take(row) for row in (0, 1, 3)] == [0, 1, 3]
    ahead.prefetch([2, 4])
    with pytest.raises(MediaError, match="row 2: reading its media timed out twice.*raise `media_timeout`"):
        ahead.take(2)
    assert ahead.take(4) == 4
    ahead.close()


def test_a_pool_that_is_closed_leaves_nothing_for_the_end_of_the_interpreter(tmp_path):
    """Python 3.11 writes to a pipe there that the pool's thread closes at that moment: `Bad file descriptor`."""

    def read(row):
        (tmp_path / str(row)).touch()
        if row:
            time.sleep(60)
        return bytes(1_000_000)

    for row in (0, 1):  # in the middle of sending, or of reading
        ahead = PrefetchPool(read)
        ahead.prefetch([row])
        while not (tmp_path / str(row)).exists():
            time.sleep(0.01)
        thread = ahead._pool._executor_manager_thread
        workers = ahead._workers
        ahead.close()
        assert not thread.is_alive() and not any(worker.is_alive() for worker in workers)


@pytest.mark.gate
def test_workers_collect_nothing_of_their_parent():
    """Tensors on a GPU can't be destroyed in a fork."""

    class Cycle:
        def __init__(self):
            self.own = self

        def __del__(self):
            destroyed.append(os.getpid())

    def read(row):
        gc.collect()
        return os.getpid(), list(destroyed), gc.isenabled()

    destroyed = []
    ahead = PrefetchPool(read)
    gc.collect()
    gc.freeze()  # as an application may have done
    n_frozen = gc.get_freeze_count()
    Cycle()
    pid, found, gc_enabled = ahead.take(1)
    ahead.close()
    assert pid != os.getpid() and found == [] and gc_enabled
    assert gc.isenabled() and gc.get_freeze_count() > n_frozen / 2  # none is thawed, but some have been freed
    gc.collect()
    assert destroyed == [os.getpid()]


def test_without_room_for_a_copy_of_the_process_rows_are_read_here(monkeypatch, caplog):
    def fork():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    ahead = PrefetchPool(lambda row: (row, os.getpid()))
    with monkeypatch.context() as without:
        without.setattr(os, "fork", fork)
        ahead.prefetch([3, 4])
    assert "no worker can be forked" in caplog.text
    assert [ahead.take(row) for row in (3, 4, 5)] == [(row, os.getpid()) for row in (3, 4, 5)]
    ahead.close()


def test_batches_are_read_when_they_are_accessed(tmp_path):
    """The trainer reads them once, however many micro-batches use them."""
    read = []

    def transform(batch):
        read.extend(batch["index"])
        return batch

    rows = text_rows(4).add_column("index", range(4)).with_transform(transform)
    options = {"steps_per_generation": 2, "shuffle_dataset": False}
    loader = make_trainer(Recorded, "qwen2_5_vl", rows, tmp_path, **options).get_train_dataloader()
    read.clear()  # the constructor inspects the columns
    first, second, *_ = list(loader)
    assert first is second and len(first) == 16 and "labels" not in first and read == []
    assert [each.row_index for each in first] == [i for i, _ in product(range(4), range(4))] and read == [0, 1, 2, 3]
    assert first[0] is first[3] and first[3] is not first[4]


def test_resuming_reads_no_row_whose_completions_were_saved(tmp_path):
    read = []
    sounds = audio_rows(5)

    def transform(batch):
        read.extend(batch["index"])
        return {**batch, "audio": [sounds[i]["audio"] for i in batch["index"]]}

    rows = text_rows(5).add_column("index", range(5)).with_transform(transform)
    options = {**REUSED, "self_check": False, "media_prefetch": 0}  # a generation batch lasts four steps
    make_trainer(Recorded, "qwen2_audio", rows, tmp_path, **{**options, "max_steps": 1}).train()
    resumed = make_trainer(Recorded, "qwen2_audio", rows, tmp_path, **{**options, "max_steps": 5})
    for step, expected in ((4, 0), (5, 4)):
        read.clear()
        resumed.args.max_steps = step
        resumed.train(resume_from_checkpoint=checkpoint(resumed, 1))
        assert resumed.state.global_step == step and len(read) == expected


@pytest.mark.parametrize("fails", [False, True])
def test_no_worker_outlives_a_run(fails, tmp_path):
    workers = []

    def reward(completion_ids, trainer_state, **kwargs):
        workers.extend(each.pid for each in multiprocessing.active_children())
        if fails and trainer_state.global_step == 2:
            raise ZeroDivisionError
        return length_and_sum(completion_ids)

    trainer = make_trainer(
        Recorded, "qwen2_audio", audio_rows(8), tmp_path, max_steps=3, reward=reward, dataloader_num_workers=1
    )
    with pytest.raises(RewardError) if fails else nullcontext():
        trainer.train()
    assert workers
    deadline = time.monotonic() + 60
    while {each.pid for each in multiprocessing.active_children()} & {*workers}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Unreadable rows


def damaged_rows(bad: dict[int, str], n: int = 12) -> Dataset:
    """Returns sounds, some of which have missing files."""
    sounds = [bad.get(i, sound(0.2 + 0.02 * i, seed=i)) for i in range(n)]
    return with_media(text_rows(n), "audio", sounds)


BAD = {1: "/nowhere/1.wav", 4: "/nowhere/4.wav", 9: "/nowhere/9.wav"}
SKIP = {"on_media_error": "skip", "max_skipped_rows": 3, "max_steps": 12, "learning_rate": 1e-3}


def skipped_rows(folder) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "skipped_rows.jsonl").read_text().splitlines()]


def numbers_of(trainer) -> list[list[int]]:
    """Returns the numbers at the end of the trained prompts, for each micro-batch."""
    decode = trainer.processing_class.tokenizer.decode
    return [[int(re.findall(r"(\d+)<", decode(ids))[-1]) for ids in prompts] for prompts, _ in trainer.trained_on]


def test_bad_rows_end_the_run_by_default_and_where_they_are_too_many(tmp_path):
    with pytest.raises(MediaError, match=r"row (1|4|9), column 'audio'.*/nowhere/\1.wav"):
        trained(damaged_rows(BAD), tmp_path, max_steps=12)
    with pytest.raises(MediaError, match=r"3 rows can't be read, more than `max_skipped_rows` \(0.2\).*skipped_rows"):
        trained(damaged_rows(BAD), tmp_path, **{**SKIP, "on_media_error": "skip", "max_skipped_rows": 0.2})
    assert len(skipped_rows(tmp_path)) == 3


@pytest.mark.gate
def test_bad_rows_are_skipped(tmp_path):
    runs = [
        trained(damaged_rows(BAD), tmp_path / str(n), **SKIP, media_prefetch=n, dataloader_num_workers=n)
        for n in (0, 1)
    ]
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


@pytest.mark.gate
def test_rows_that_were_skipped_stay_so_after_resuming(tmp_path):
    """The rows are readable again."""
    straight = trained(damaged_rows(BAD), tmp_path / "straight", **SKIP, save_strategy="steps", save_steps=1)
    resumed = make_trainer(Recorded, "qwen2_audio", damaged_rows({}), tmp_path / "resumed", **SKIP)
    entries = skipped_rows(tmp_path / "straight")
    step = entries[0]["step"] + 1
    before = {entry["row"] for entry in entries if entry["step"] < step}
    resumed.train(resume_from_checkpoint=checkpoint(straight, step))
    assert set(resumed._stream.skipped) == before
    assert {number for batch in numbers_of(resumed) for number in batch} == set(range(12)) - before


def test_stream_goes_on_with_the_row_before(tmp_path):
    rows = [dict(row) for row in damaged_rows(BAD)]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    options = {**SKIP, "max_steps": 5, "shuffle_dataset": False}
    run = trained(stream, tmp_path, **options)
    assert [entry["row"] for entry in skipped_rows(tmp_path)] == [1, 4, 9]
    assert [sorted(set(batch)) for batch in numbers_of(run)] == [[0], [2, 3], [5], [6, 7], [8]]
    last = run._stream._last_row
    run.evaluate(audio_rows(2))
    assert run._stream._last_row is last  # not a row of the evaluation
    run.args.num_generations = 3  # of 8 completions of a rank: a group straddles
    with pytest.raises(ValueError, match="whole groups"):
        run.get_train_dataloader()


def test_stream_of_less_than_a_batch_is_an_error(tmp_path):
    def make(rows, **options):
        return make_trainer(Recorded, "qwen2_5_vl", rows.to_iterable_dataset(), tmp_path, self_check=False, **options)

    message = "has 1 rows, fewer than a batch of 2, so there is nothing to train on.*`steps_per_generation`"
    with pytest.raises(ValueError, match=message):
        make(image_rows(1)).train()
    make(image_rows(3), save_strategy="steps", save_steps=1).train()
    with pytest.raises(ValueError, match="fewer than a batch of 2"):
        make(image_rows(1)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    trainer = make(image_rows(3))
    trainer.train(resume_from_checkpoint=True)  # no step remains
    assert trainer.state.global_step == 2


def test_other_rows_are_the_same_everywhere():
    skipped = {2, 5}
    found = other_row(2, skipped, 8, seed=0)
    assert found not in skipped and found == other_row(2, dict.fromkeys((5, 2)), 8, seed=0)
    assert other_row(3, skipped, 8, seed=0) == 3
    assert len({other_row(2, skipped, 1000, seed) for seed in range(20)}) > 10
    with pytest.raises(ValueError, match="None of the dataset's rows"):
        other_row(0, dict.fromkeys(range(8), "no such file"), 8, seed=0)
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


EVALUATED = {"on_media_error": "skip", "max_skipped_rows": 6}
EVALUATED |= {"num_generations_eval": 2, "per_device_eval_batch_size": 6}


def test_prompts_that_the_model_continues(tmp_path):
    """Where they are asked for, the assistant's last message is the start of the completion; others have an answer."""
    rows = list(image_rows(2))
    rows[0]["prompt"] += [{"role": "assistant", "content": "I see a"}]
    options = {"chat_template_kwargs": {"continue_final_message": True}, "max_steps": 1, "shuffle_dataset": False}
    trainer = make_trainer(trainer_utils.Recorded, "qwen2_5_vl", Dataset.from_list(rows), tmp_path, **options)
    trainer.train()
    processor = load("qwen2_5_vl")[1]
    for row, prompt in zip(rows, trainer.draws[0].batch.prompts[::4], strict=True):
        first, *rest = row["prompt"]
        blocks = [{"type": "image", "image": row["image"]}, {"type": "text", "text": first["content"]}]
        rest = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in rest]
        options = {"continue_final_message": True} if rest else {"add_generation_prompt": True}
        chat = [{**first, "content": blocks}, *rest]
        ids = processor.apply_chat_template([chat], tokenize=True, return_dict=True, **options)["input_ids"][0]
        assert prompt.input_ids.tolist() == list(ids)
        placed = rows_to_messages([{"prompt": chat}])[0]["prompt"]
        kept = encode_prompt(placed, processor, trainer.model, template_kwargs=options, keep_decoded=True).decoded[0][
            1
        ]
        text = processor.apply_chat_template(chat, tokenize=False, **options)
        assert kept.token_ids(processor) == processor.tokenizer(text)["input_ids"]


def evaluated(trainer, rows) -> dict[str, float]:
    trainer.model.train()  # the mode between steps
    durations = ("time", "per_second")
    return {name: n for name, n in trainer.evaluate(rows).items() if not any(part in name for part in durations)}


def test_evaluation_of_a_trainer_is_that_of_the_rows_that_can_be_read(tmp_path):
    rows = damaged_rows(BAD)
    good = [row for row in range(12) if row not in BAD]
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
    sounds = [BAD.get(i, sound(0.2 + 0.02 * i, seed=i)) for i in range(12)]
    rows = with_media(text_rows(12), "audio", sounds)
    evaluated(trainer, rows)
    sounds[5] = "/nowhere/lost.wav"  # a row that became unreadable
    with pytest.raises(MediaError, match="row 5, column 'audio'"):
        evaluated(trainer, rows)
