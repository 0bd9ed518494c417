# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Dynamic sampling and replay: groups with signal, newly sampled or from a buffer, replace groups without signal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from datasets import IterableDataset

from ..algorithms.metrics import Metric, average, share
from ..encoding.conversations import Contexts, Conversation
from ..encoding.prompts import EncodedPrompt
from .ranks import any_rank, sum_over_ranks
from .rollout import PARTS, RewardValues, Rollout, join_rollouts


# Classes in the result of [`GroupBuffer.state_dict`], for `torch.serialization.safe_globals`, also by earlier names
_RENAMED = (RewardValues, f"{RewardValues.__module__}.Rewards")
SAVED_CLASSES: tuple[Callable | tuple[Callable, str], ...] = (
    EncodedPrompt,
    Contexts,
    Conversation,
    frozenset,
    Rollout,
    *PARTS,
    _RENAMED,
)


# Optimizer steps after which a replayed group isn't used any more
REPLAY_MAX_AGE = 8


class GroupBuffer:
    """Buffer of the newest groups of completions, each a [`Rollout`] on the CPU, the oldest first."""

    def __init__(self, limit: int = 0, max_age: int | None = None, seed: int = 0):
        self.limit = limit  # number of the newest groups to keep; 0 keeps all
        self.max_age = max_age  # optimizer steps after which a group isn't used any more
        self._groups: list[Rollout] = []
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._groups)

    def append(self, groups: Sequence[Rollout]) -> None:
        """Adds copies of groups. The copies share no memory with the batch of the groups."""
        self._groups += [
            group.with_copied_prompts(on_device=False).to("cpu", copy=True) for group in groups[-self.limit :]
        ]
        self._groups = self._groups[-self.limit :]

    def sample(self, n: int, step: int) -> list[Rollout]:
        """Drops groups that are too old. Returns at most `n` random groups, which also stay in the buffer."""
        if self.max_age is not None:
            self._groups = [group for group in self._groups if step - group.step <= self.max_age]
        return [self._groups[i] for i in torch.randperm(len(self._groups), generator=self._generator)[:n].tolist()]

    def take(self, n: int) -> list[Rollout]:
        """Removes and returns at most `n` groups, the oldest first."""
        oldest = self._groups[:n]
        self._groups = self._groups[n:]
        return oldest

    def state_dict(self) -> dict[str, Any]:
        return {"groups": self._groups, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._groups = state["groups"][-self.limit :]
        self._generator.set_state(state["generator"])


@dataclass
class GroupExchange:
    """Replacement of groups without signal by groups with signal, on each rank separately."""

    accelerator: Accelerator
    group_size: int
    replay: GroupBuffer  # groups with signal of earlier steps
    # Groups with signal for which the last batch had no room. All ranks draw while any rank lacks groups, so without
    # a limit, the surplus of the other ranks would grow and age.
    surplus: GroupBuffer
    max_rounds: int  # maximum number of draws in a step, the rollout itself included; 0 without dynamic sampling
    replays: bool  # whether groups from `replay` fill a batch
    is_bounded: bool = False  # whether the mean rewards of groups must be in a range

    def state_dict(self) -> dict[str, Any]:
        return {"replay": self.replay.state_dict(), "surplus": self.surplus.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.replays:
            self.replay.load_state_dict(state["replay"])
        if self.max_rounds > 0:
            self.surplus.load_state_dict(state["surplus"])

    def exchange(self, rollout: Rollout, draw: Callable[[int], Rollout]) -> tuple[Rollout, bool, dict[str, Metric]]:
        """
        Returns a rollout with signal in as many groups as possible, whether any rank's rollout has a group of an
        earlier step, and metrics. `draw(n)` samples completions of `n` further prompts. All ranks must call this.

        For example, 1 of 4 groups has signal, and the surplus is empty. If 2 of the 4 groups of a further draw have
        signal, and no draw is left, the result has these 3 groups, and 1 replayed group, or else 1 without signal.
        """
        step = rollout.step
        is_dynamic = self.max_rounds > 0
        drawn_groups = rollout.for_loss().groups(self.group_size)  # buffers needn't keep the dataset's rows
        n_groups = len(drawn_groups)
        rounds = 1
        # Picks are groups with signal. The surplus comes first, as its completions are older
        picks = self.surplus.take(len(self.surplus)) + _with_signal(drawn_groups)
        while rounds < self.max_rounds and any_rank(self.accelerator, len(picks) < n_groups):
            new_groups = draw(n_groups).for_loss().groups(self.group_size)
            drawn_groups = drawn_groups + new_groups
            picks = picks + _with_signal(new_groups)
            rounds = rounds + 1
        if is_dynamic:
            self.surplus.append(picks[n_groups:])
        picks = picks[:n_groups]
        # Replayed groups, and then groups without signal, fill the rest
        old_groups = self.replay.sample(n_groups - len(picks), step)
        if self.replays:
            self.replay.append(picks)
        with_signal = _with_signal(drawn_groups)
        without_signal = [group for group in drawn_groups if group not in with_signal]
        groups = picks + old_groups + without_signal[: n_groups - len(picks) - len(old_groups)]

        result = join_rollouts(groups, self.accelerator.device)
        n_tokens = self.accelerator.gather(result.loss_mask.sum()).sum()
        result = replace(
            result, packed=rollout.packed, step=step, group_ids=rollout.group_ids, num_items_in_batch=n_tokens
        )
        total_age = sum(step - group.step for group in old_groups)
        unequal_groups = [group for group in drawn_groups if group.rewards.has_signal.all()]
        n_equal = len(drawn_groups) - len(unequal_groups)
        n_below, n_above = (sum(_range_side(group) == side for group in unequal_groups) for side in (-1, 1))
        counts = [len(drawn_groups), len(with_signal), n_groups, len(old_groups), total_age, n_equal, n_below, n_above]
        n_drawn, n_with_signal, n_used, n_replayed, total_age, *n_dropped = sum_over_ranks(self.accelerator, counts)
        metrics = {"sampling/kept_frac": share(n_with_signal, n_drawn, is_of_all_ranks=True)}
        if self.is_bounded:
            for name, n in zip(("equal", "below", "above"), n_dropped, strict=True):
                metrics[f"sampling/dropped_{name}"] = share(n, n_drawn, is_of_all_ranks=True)
        if is_dynamic:
            metrics["sampling/rounds"] = average(rounds)
        if self.replays:
            metrics["replay/frac"] = share(n_replayed, n_used, is_of_all_ranks=True)
            metrics["replay/age"] = share(total_age, n_replayed, is_of_all_ranks=True)
        return result, any_rank(self.accelerator, any(group.step != step for group in groups)), metrics


def _with_signal(groups: list[Rollout]) -> list[Rollout]:
    return [group for group in groups if group.rewards.has_signal.all() and _range_side(group) == 0]


def _range_side(group: Rollout) -> int:
    return 0 if group.rewards.out_of_range is None else int(group.rewards.out_of_range[0])


def group_exchange(args: Any, accelerator: Accelerator, dataset: Any, makes_prompts: bool) -> GroupExchange | None:
    """
    Returns the exchange of groups, `None` without dynamic sampling and without replay. Raises a `ValueError` if groups
    of these prompts, such as those that user code makes, can't be exchanged, or rows can't be drawn in another order.
    """
    for name in ("dynamic_sampling", "difficulty_sampling"):
        if getattr(args, name) and isinstance(dataset, IterableDataset):
            raise ValueError(
                f"`{name}` draws prompts in another order, which an iterable dataset doesn't allow; pass a `Dataset`."
            )
    if not args.dynamic_sampling and args.replay_buffer_size == 0:
        return None
    if makes_prompts:
        raise ValueError(
            "`dynamic_sampling` and `replay_buffer_size` exchange groups of the dataset's prompts, but `rollout_func` "
            "and `environment_factory` make prompts themselves; set both options to 0, or leave these arguments out."
        )
    n_groups = args.per_device_train_batch_size * args.steps_per_generation // args.num_generations
    return GroupExchange(
        accelerator,
        args.num_generations,
        replay=GroupBuffer(args.replay_buffer_size, REPLAY_MAX_AGE, args.seed + accelerator.process_index),
        surplus=GroupBuffer(n_groups),
        max_rounds=args.dynamic_sampling,
        replays=args.replay_buffer_size > 0,
        is_bounded=args.dynamic_sampling_range is not None,
    )
