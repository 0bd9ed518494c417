# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Groups of completions that outlive their batch, and the choice of groups that fill a batch."""

import inspect
import io
import operator
import pickle
import random
import re
from dataclasses import fields, replace
from itertools import product

import pytest
import torch
from accelerate import Accelerator

from trl_multimodal_rft.algorithms.metrics import KINDS
from trl_multimodal_rft.encoding.prompts import DecodedPrompt, EncodedPrompt
from trl_multimodal_rft.forward.partition import micro_batch_order
from trl_multimodal_rft.rollout import rollout
from trl_multimodal_rft.rollout.groups import SAVED_CLASSES, GroupBuffer, GroupExchange
from trl_multimodal_rft.rollout.ranks import balanced_assignment, forwarded_length, pickled_group
from trl_multimodal_rft.rollout.rollout import PARTS, RewardValues, Rollout, join_rollouts
from trl_multimodal_rft.rollout.skipped_forwards import without_gradient


def group(number: int, step: int = 0, size: int = 2, live: bool = True) -> Rollout:
    ids = torch.tensor([number])
    prompt = EncodedPrompt(
        ids, {}, {"pixel_values": torch.ones(1, 3)}, ids[None], decoded=((slice(0, 1), DecodedPrompt([], {}, {}, {})),)
    )
    completions = {"completion_ids": torch.full((size, 3), number), "completion_mask": torch.ones(size, 3)}
    rewards = RewardValues(has_signal=torch.full((size,), live))
    return Rollout([prompt] * size, torch.zeros(size), 0, **completions, rewards=rewards, step=step)


def prompts_in(groups) -> list[int]:
    return [int(own.prompts[0].input_ids) for own in groups]


def test_newest_groups_are_kept_without_images():
    buffer = GroupBuffer(2, max_age=5, seed=0)
    own = group(1)
    buffer.append([group(0), own, group(2)])
    assert prompts_in(buffer.state_dict()["groups"]) == [1, 2]
    assert own.prompts[0].decoded
    assert not buffer.take(1)[0].prompts[0].decoded
    buffer.append([group(3)])
    assert prompts_in(buffer.state_dict()["groups"]) == [2, 3]


def test_old_groups_are_forgotten():
    buffer = GroupBuffer(0, max_age=2, seed=0)
    buffer.append([group(number, step=number) for number in range(5)])
    assert sorted(prompts_in(buffer.sample(9, step=4))) == [2, 3, 4]
    assert prompts_in(buffer.state_dict()["groups"]) == [2, 3, 4]
    forever = GroupBuffer()
    forever.append([group(0, step=0)])
    assert prompts_in(forever.sample(1, step=10**6)) == [0]


def test_every_field_of_tokens_is_padded_and_cut():
    """Whatever the classes say has a value per token, in groups of other widths, one of which ends early."""
    parts = {"": Rollout} | {each.name: type(getattr(group(0), each.name)) for each in fields(Rollout)}
    described = {
        prefix: re.findall(r"^    (\w+): .*# .*\(N, C\b", inspect.getsource(part), re.MULTILINE)
        for prefix, part in parts.items()
        if part is Rollout and not prefix or part in PARTS
    }
    names = [f"{prefix}.{name}".strip(".") for prefix, part in described.items() for name in part]
    names += ["completion_mask"]
    assert len(names) >= 15 and len({*names}) == len(names)
    read = {name: operator.attrgetter(name) for name in names}

    def wide(number: int, width: int) -> Rollout:
        mask = torch.ones(2, width, dtype=torch.long)
        mask[:, 3:] *= width == 6
        whole = group(number)
        for name in names:
            owner, _, attribute = name.rpartition(".")
            shape = (2, width, *(5,) * (owner == "teacher"))
            setattr(operator.attrgetter(owner)(whole) if owner else whole, attribute, number + torch.rand(shape))
        return replace(whole, completion_mask=mask, completion_ids=mask * number)

    whole = [wide(1, 4), wide(2, 6)]
    groups = [each for part in whole for each in part.groups(2)]
    assert {name: get(groups[0]).shape[1] for name, get in read.items()} == dict.fromkeys(names, 3)
    joined = join_rollouts(groups, torch.device("cpu"))
    for name, get in read.items():
        value, first, last = map(get, (joined, *whole))
        assert value.shape == (4, *last.shape[1:])
        assert torch.equal(value[:2, :3], first[:, :3]) and torch.equal(value[2:], last)
        assert value[:2, 3:].unique().tolist() == [1 if name == "tool_mask" else 0]


def test_completions_without_gradient_have_no_advantage_on_any_token_that_counts():
    own = replace(group(0, size=3), completion_mask=torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1]]))
    own.advantages = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]])
    assert without_gradient(own) == [False, True, True]
    own.advantages = torch.tensor([1.0, 0.0, -1.0])
    assert without_gradient(own) == [False, True, False]


def test_what_is_kept_is_a_copy():
    buffer = GroupBuffer()
    own = group(1)
    buffer.append([own])
    own.completion_ids.zero_()
    assert buffer.take(1)[0].completion_ids.tolist() == [[1] * 3] * 2


def test_groups_survive_a_checkpoint():
    buffer = GroupBuffer(3, max_age=2, seed=0)
    buffer.append([group(number) for number in range(3)])
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    loaded = GroupBuffer(3, max_age=2, seed=1)
    with torch.serialization.safe_globals([*SAVED_CLASSES]):
        loaded.load_state_dict(torch.load(file, weights_only=True))
    assert prompts_in(loaded.state_dict()["groups"]) == [0, 1, 2]
    assert prompts_in(loaded.sample(2, 0)) == prompts_in(buffer.sample(2, 0))


def test_a_group_of_a_class_by_its_earlier_name_is_loaded(monkeypatch):
    earlier = type("Rewards", (RewardValues,), {"__module__": rollout.__name__})
    monkeypatch.setattr(rollout, "Rewards", earlier, raising=False)
    file = io.BytesIO()
    torch.save(replace(group(1), rewards=earlier(has_signal=torch.ones(2))), file)
    file.seek(0)
    with torch.serialization.safe_globals([*SAVED_CLASSES]):
        loaded = torch.load(file, weights_only=True)
    assert type(loaded.rewards) is RewardValues and loaded.rewards.has_signal.all()


# Exchanges. `test_grpo_sampling.py` checks that each completion keeps its prompt, media and scores


class Exchanged:
    """Batches of two groups, numbered in the order of the draws; `live(number, step)` have signal."""

    def __init__(self, live, rounds: int = 0, replay: int = 0, max_age: int | None = None):
        self.live = live
        self.n = 0
        buffers = GroupBuffer(replay, max_age, seed=0), GroupBuffer(2)
        self.exchange = GroupExchange(Accelerator(cpu=True), 2, *buffers, rounds, replay > 0)

    def draw(self, step: int) -> Rollout:
        numbers = (self.n, self.n + 1)
        self.n = self.n + 2
        return join_rollouts([group(i, step, live=self.live(i, step)) for i in numbers], torch.device("cpu"))

    def step(self, step: int) -> tuple[list[int], bool, dict[str, float]]:
        """Returns the groups to train on, whether one is from an earlier step, and metrics."""
        result, is_stale, metrics = self.exchange.exchange(self.draw(step), lambda _: self.draw(step))
        values = {name: KINDS[metric.kind].value(metric.numbers).item() for name, metric in metrics.items()}
        return result.completion_ids[::2, 0].tolist(), is_stale, values


NONE = {"sampling/kept_frac": 0.0}


@pytest.mark.parametrize(
    ("live", "options", "used", "metrics"),
    [
        *([None, {"rounds": n}, [0, 1], {**NONE, "sampling/rounds": n}] for n in (1, 3, 5)),
        (3, {"rounds": 2}, [3, 0], {"sampling/kept_frac": 0.25, "sampling/rounds": 2}),
        (None, {"replay": 4}, [0, 1], {**NONE, "replay/frac": 0.0, "replay/age": 0.0}),
    ],
)
def test_batch_that_is_not_filled_keeps_its_dead_groups(live, options, used, metrics):
    """Sampling gives up after the last round."""
    run = Exchanged(lambda number, step: number == live, **options)
    assert run.step(0) == (used, False, metrics)
    assert run.n == 2 * options.get("rounds", 1)


@pytest.mark.parametrize(
    "options, steps, fractions",
    [
        ({}, range(4), [0, 1, 1, 1]),
        ({"max_age": 1}, range(4), [0, 1, 0, 0]),
        ({"max_age": 2}, range(4), [0, 1, 1, 0]),
        ({"replay": 1}, range(4), [0, 0.5, 0.5, 0.5]),
        ({"max_age": 2}, range(0, 8, 2), [0, 1, 0, 0]),  # two updates per batch
    ],
    ids=str,
)
def test_replay_is_limited_in_size_and_age(options, steps, fractions):
    run = Exchanged(lambda number, step: step == 0, **{"replay": 8, **options})
    newest = [0, 1][-options.get("replay", 2) :]
    for step, fraction in zip(steps, fractions, strict=True):
        dead = [run.n, run.n + 1]
        used, is_stale, metrics = run.step(step)
        replayed = newest if fraction else []
        assert sorted(used) == replayed + dead[: 2 - len(replayed)] and is_stale == bool(replayed)
        assert metrics["replay/frac"] == fraction and metrics["replay/age"] == (step if fraction else 0)
    for kept in run.exchange.replay.state_dict()["groups"]:  # without the memory of the rest of their batch
        for value in (value for _, value in kept.walk_fields() if isinstance(value, torch.Tensor)):
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


# The second time, a group was left over
@pytest.mark.parametrize(("first", "used", "fresh", "fraction"), [(0, [0, 1], [], 1.0), (1, [1, 2], [3], 0.5)])
def test_replay_fills_what_dynamic_sampling_leaves(first, used, fresh, fraction):
    """Replay uses another group than the leftover one."""
    run = Exchanged(lambda number, step: step == 0 and number >= first, rounds=2, replay=4)
    assert run.step(0)[0] == used
    again, is_stale, metrics = run.step(1)
    assert again[: len(fresh)] == fresh and {*again[len(fresh) :]} <= {*used} and len({*again}) == 2 and is_stale
    assert metrics["replay/frac"] == fraction and metrics["sampling/rounds"] == 2


# Groups that ranks exchange, see also `distributed/test_distributed.py`


def longest_first(loads: list[list[int]]) -> int:
    """Returns the longest rank where each takes the next longest group as long as it has room."""
    totals = [0] * len(loads)
    held = [0] * len(loads)
    for load in sorted(sum(loads, []), reverse=True):
        rank = min((r for r in range(len(loads)) if held[r] < len(loads[0])), key=totals.__getitem__)
        totals[rank] = totals[rank] + load
        held[rank] = held[rank] + 1
    return max(totals)


@pytest.mark.parametrize("ranks, n", [(2, 4), (8, 2), (8, 8), (32, 16)])
def test_swaps_balance_about_as_well_as_a_new_distribution(ranks, n):
    generator = random.Random(0)
    for _ in range(20):
        loads = [[int(generator.lognormvariate(8, 0.7)) for _ in range(n)] for _ in range(ranks)]
        places = balanced_assignment(loads, [[1] * n] * ranks)
        load = sum(loads, [])
        assert sorted(sum(places, [])) == [*range(ranks * n)] and {*map(len, places)} == {n}
        longest = max(sum(load[group] for group in held) for held in places)
        assert longest <= 1.2 * longest_first(loads) and longest <= max(map(sum, loads))
        assert sum(group // n != rank for rank, held in enumerate(places) for group in held) <= ranks * n / 2


def test_what_is_balanced_or_not_free_stays():
    assert balanced_assignment([[5, 5], [6, 4]], [[1, 1]] * 2) == [[0, 1], [2, 3]]
    assert balanced_assignment([[9, 1], [1, 1]], [[1, 1]] * 2) == [[0, 1], [2, 3]]  # no swap helps
    assert balanced_assignment([[9, 9], [1, 1]], [[1, 1]] * 2) == [[2, 1], [0, 3]]
    assert balanced_assignment([[9, 9], [1, 1]], [[0, 1], [0, 1]]) == [[0, 3], [2, 1]]
    assert balanced_assignment([[9, 9], [1, 1]], [[0, 0], [1, 1]]) == [[0, 1], [2, 3]]
    assert balanced_assignment([[0, 0], [0, 0]], [[1, 1]] * 2) == [[0, 1], [2, 3]]


def test_load_of_a_group_counts_its_prompt_for_each_padded_row():
    own = group(1)  # two completions of 3 tokens to a prompt of 1
    assert [forwarded_length(replace(own, packed=packed)) for packed in (True, False)] == [1 + 2 * 3, 2 * (1 + 3)]


def test_longest_micro_batches_of_ranks_coincide():
    lengths = torch.tensor([[1, 9, 5, 3], [30, 10, 90, 50]]).repeat_interleave(2, 1)
    prompts = [group(0).prompts[0] for _, _ in product(range(4), range(2))]
    prompts = [prompts[i // 2 * 2] for i in range(8)]
    orders = [micro_batch_order(prompts, own.tolist(), 4, torch.Generator().manual_seed(3)) for own in lengths]
    ranked = [own[order][::2].argsort().tolist() for own, order in zip(lengths, orders, strict=True)]
    assert ranked[0] == ranked[1] != [*range(4)]


def test_pieces_of_a_split_group_count_their_own_loads():
    """The piece of two completions is lighter than the other groups, so that the next group joins it."""
    groups = [[10] * 6, [15] * 2, [12] * 2, [11] * 2, [1] * 2, [1] * 2]
    lengths = [length for own in groups for length in own]
    prompts = [prompt for own in groups for prompt in [group(0).prompts[0]] * len(own)]
    order = micro_batch_order(prompts, lengths, 4)
    assert max(sum(lengths[i] for i in order[start : start + 4]) for start in range(0, 16, 4)) == 10 * 2 + 11 * 2


def test_a_group_travels_without_its_neighbours():
    """Tensors of prompts may be parts of a batch's."""
    own = group(1)
    batch = torch.rand(1000, 3)
    own.prompts[0].media["pixel_values"] = batch[5:6]
    own.prompts[0].on_device["pixel_values"] = batch
    data = pickled_group(own)
    assert len(data) < 8000 < batch.nbytes
    found = pickle.loads(data.numpy().tobytes())
    assert torch.equal(found.prompts[0].media["pixel_values"], batch[5:6])
    assert found.prompts[0] is found.prompts[1] and not found.prompts[0].on_device and not found.prompts[0].decoded
    assert torch.equal(found.completion_ids, own.completion_ids)
