# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards of a rollout's completions."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from accelerate.logging import get_logger
from torch import nn
from trl.trainer.utils import is_async_callable, nanstd

from ..data.reading.refs import iter_refs
from ..data.reading.rules import MediaRules
from ..data.rows.features import restore_media
from ..rewards.calls import call_rewards, reward_arguments
from ..rewards.checks import checked_reward
from ..rewards.model import read_as_text
from .rollout import Rollout


logger = get_logger(__name__)


class EarlyRewards(NamedTuple):
    """Rewards by some functions, of completions that were asked for ahead, and what these functions logged."""

    values: dict[str, list[float | None]]
    logged: list[tuple[str, str, Any]]  # the argument that was called, the name, and what

    @classmethod
    def join(cls, parts: Sequence["EarlyRewards"]) -> "EarlyRewards":
        """Those of all parts, in their order."""
        values = {name: sum((each.values[name] for each in parts), []) for name in parts[0].values}
        return cls(values, sum((each.logged for each in parts), []))


class EarlyCalls:
    """
    Calls functions one by one, each of them, as they use so many connections as they were told. After an error, it
    raises that one again.
    """

    def __init__(self):
        self._locks: defaultdict[str, Lock] = defaultdict(Lock)
        self._failure: BaseException | None = None

    def __call__(self, name: str, function: Callable, **arguments: Any) -> Any:
        with self._locks[name]:
            if self._failure is not None:
                raise self._failure
            try:
                return function(**arguments)
            except BaseException as error:
                self._failure = error
                raise


def checked_functions(
    rollout: Rollout,
    names: Sequence[str],
    reward_funcs: Sequence[Any],
    processors: Sequence[Any],
    template_kwargs: dict[str, Any],
    media_rules: MediaRules,
) -> dict[str, Callable]:
    """Reward functions by name, whose arguments and results are checked; models of text read completions as text."""
    readers = [name for name, each in zip(names, reward_funcs, strict=True) if isinstance(each, nn.Module)]
    check_readers(readers, rollout.messages, rollout.completions)
    return {
        name: checked_reward(
            read_as_text(each, processor, template_kwargs) if name in readers else each,
            name,
            media_rules,
            rollout.numbers,
        )
        for name, each, processor in zip(names, reward_funcs, processors, strict=True)
    }


def rollout_arguments(rollout: Rollout, given: dict[str, Any]) -> dict[str, Any]:
    """
    Arguments of reward functions, as TRL passes them; media are as the dataset has them. There are also `group_ids`,
    unless a group straddles ranks.
    """
    rows = [
        {**row, **{key: each[i] if isinstance(each, list) else each for key, each in rollout.extra.items()}}
        for i, row in enumerate(rollout.rows)
    ]
    if rollout.environments is not None:
        rows = [{**row, "environments": each} for row, each in zip(rows, rollout.environments, strict=True)]
    prompts, completions = restore_media(rollout.messages), restore_media(rollout.completions)
    groups = {"group_ids": rollout.group_ids.tolist()} if rollout.whole_groups else {}
    return {**reward_arguments(prompts, completions, rollout.ids, rows, completions), **groups, **given}


def only_waits(reward_func: Any) -> bool:
    """
    Whether a thread may call a function while the policy is trained: it is async, or has a true `only_waits`, as those
    that ask servers. Others may use collectives, signals or the device.
    """
    return is_async_callable(reward_func) or getattr(reward_func, "only_waits", False)


def reward_early(
    rollout: Rollout, functions: Mapping[str, Callable], state: Any, loop: Any, calls: EarlyCalls
) -> EarlyRewards:
    """Calls reward functions in a thread of their own. What they log is kept."""
    logged: list[tuple[str, str, Any]] = []
    given = {key: partial(lambda *entry: logged.append(entry), key) for key in ("log_extra", "log_metric")}
    arguments = rollout_arguments(rollout, {"trainer_state": state, **given})
    one_by_one = {name: partial(calls, name, each) for name, each in functions.items() if not is_async_callable(each)}
    return EarlyRewards(call_rewards({**functions, **one_by_one}, arguments, loop), logged)


def reward_rollout(
    rollout: Rollout,
    functions: Mapping[str, Callable],
    given: dict[str, Any],
    loop: Any,
    profile: Callable[[str], Any],
    early: EarlyRewards | None = None,
) -> torch.Tensor:
    """
    Calls reward functions as TRL does, with the keyword arguments `given`, but for those that were called early; media
    are as in the dataset.

    Shapes: returns `(N, number of functions)`, NaN where a function returned `None`.
    """
    arguments, known = rollout_arguments(rollout, given), {} if early is None else early.values
    for key, *what in () if early is None else early.logged:
        given[key](*what)
    called = {name: each for name, each in functions.items() if name not in known}
    found = call_rewards(called, arguments, loop, profile) | known
    columns = (found[name] for name in functions)
    rewards = torch.tensor([[torch.nan if each is None else each for each in column] for column in columns]).T
    warn_of_unscorable(rewards, [*functions], rollout.numbers)
    return rewards.contiguous()


def reward_metrics(
    rewards_per_func: torch.Tensor, names: Sequence[str], rewards: torch.Tensor, is_std_zero: torch.Tensor
) -> dict[str, float]:
    """TRL's metrics. Shapes: `rewards_per_func` `(N, F)`, the others `(N,)`, of all ranks."""
    metrics = {}
    for i, name in enumerate(names):
        metrics[f"rewards/{name}/mean"] = rewards_per_func[:, i].nanmean().item()
        metrics[f"rewards/{name}/std"] = nanstd(rewards_per_func[:, i]).item()
    metrics["reward"] = rewards.nanmean().item()
    metrics["reward_std"] = nanstd(rewards).item()
    return {**metrics, "frac_reward_zero_std": is_std_zero.float().mean().item()}


def check_readers(names: Collection[str], prompts: Any, completions: Any) -> None:
    """
    Reward models of text can't judge media.

    Raises [`MediaError`] if prompts hold media, and warns if tools returned some.
    """
    ref = next(iter_refs(prompts), None)
    if names and ref is not None:
        raise ref.error(
            f"the reward model '{next(iter(names))}' would be given the text alone; pass its processor in "
            f"`reward_processing_classes` if it takes {ref.modality}, or use a reward function"
        )
    for name in names if next(iter_refs(completions), None) is not None else ():
        logger.warning_once(
            f"The reward model '{name}' reads text alone and doesn't get the media that tools returned; pass its "
            "processor in `reward_processing_classes` if it takes them."
        )


def warn_of_unscorable(rewards: torch.Tensor, names: Sequence[str], numbers: Sequence[int]) -> None:
    """Warns of the first row with a completion for which every function returned `None`. `rewards` is `(N, F)`."""
    rows = rewards.isnan().all(dim=1).nonzero()
    if len(rows):
        logger.warning(
            f"row {numbers[int(rows[0])]}: every reward function ({', '.join(map(repr, names))}) returned None for a "
            "completion, which isn't trained on; return a number from one of them, or remove the row."
        )
