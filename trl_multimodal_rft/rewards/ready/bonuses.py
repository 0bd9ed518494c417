# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Bonuses in addition to the reward of the answer: for the length of completions, and for rare tool calls."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from ..answers import accuracy_reward
from ..calls import Argument, Completion


# Reward, between 0 and 1, above which Video-R1's code counts a completion as correct
_CORRECT = 0.1


def length_reward(
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]] | None = None,
    correctness: Callable = accuracy_reward,
    min_length: int = 320,
    max_length: int = 512,
    bonus: float = 0.2,
    **kwargs: Argument,
) -> list[float | None]:
    """
    Rewards correct completions of a length within bounds, as in [Video-R1](https://huggingface.co/papers/2503.21776).

    Video-R1's code gives the bonus only where at least two completions of the group are correct. This function gives
    it to a single correct completion, too. Other arguments go to `correctness`. For them and the errors, see
    [`accuracy_reward`].

    Args:
        completion_ids (`list[list[int]]`):
            Tokens of the completions, including the results of tools, as trainers pass them.
        correctness (`Callable`, *optional*, defaults to [`accuracy_reward`]):
            Reward function for correctness. Completions with a reward above 0.1 are correct.
        min_length (`int`, *optional*, defaults to `320`):
            Minimum number of tokens.
        max_length (`int`, *optional*, defaults to `512`):
            Maximum number of tokens.
        bonus (`float`, *optional*, defaults to `0.2`):
            Reward of a correct completion within the bounds.

    Returns:
        `list[float | None]`: `bonus` or 0.0 for each completion, `None` where `correctness` returns it.

    Example:
    ```python
    >>> length_reward(["7", "8"], completion_ids=[[5] * 400] * 2, solution=["7", "7"])
    [0.2, 0.0]
    ```
    """
    if completion_ids is None:
        raise ValueError("length_reward needs `completion_ids`, the tokens of completions, which trainers pass.")
    correctness_rewards = correctness(completions=completions, completion_ids=completion_ids, **kwargs)
    return [
        None if reward is None else bonus if reward > _CORRECT and min_length <= len(ids) <= max_length else 0.0
        for reward, ids in zip(correctness_rewards, completion_ids, strict=True)
    ]


def tool_curiosity_reward(
    completions: Sequence[Completion],
    group_ids: Sequence[int] | None = None,
    target_rate: float = 0.3,
    curiosity: float = 0.5,
    free_calls: int = 1,
    call_penalty: float = 0.05,
    **kwargs: Argument,
) -> list[float]:
    r"""
    Rewards tool calls if few completions of the group call tools, and penalizes many calls in a completion, as in
    [Pixel-Reasoner](https://huggingface.co/papers/2505.15966).

    A completion with \(n\) calls, in a group where the share \(r\) of completions calls tools, gets

    $$ \alpha \max(H - r, 0) + \beta \min(N - n, 0) $$

    if \(n > 0\), else 0, with \(H\) = `target_rate`, \(\alpha\) = `curiosity`, \(N\) = `free_calls` and \(\beta\) =
    `call_penalty`.

    Args:
        completions (`list[list[dict]]`):
            Completions. `tool_calls` of messages count as calls, and a text has no calls.
        group_ids (`list[int]`):
            Group of each completion. The trainers of this package pass it if no group straddles processes.
        target_rate (`float`, *optional*, defaults to `0.3`):
            The bonus is 0 if at least this share of the group's completions calls tools.
        curiosity (`float`, *optional*, defaults to `0.5`):
            Weight of the bonus.
        free_calls (`int`, *optional*, defaults to `1`):
            Number of calls without a penalty.
        call_penalty (`float`, *optional*, defaults to `0.05`):
            Penalty of each further call.

    Returns:
        `list[float]`: A reward for each completion.

    Raises:
        `ValueError`: If `group_ids` is missing.
    """
    if group_ids is None:
        raise ValueError(
            "tool_curiosity_reward needs `group_ids`, which trainers pass where no group straddles processes; make "
            "`per_device_train_batch_size` times `steps_per_generation` a multiple of `num_generations`."
        )
    call_counts = [
        0 if isinstance(completion, str) else sum(len(message.get("tool_calls") or ()) for message in completion)
        for completion in completions
    ]
    n_with_calls = defaultdict(int)
    for group, count in zip(group_ids, call_counts, strict=True):
        n_with_calls[group] += count > 0
    sizes = Counter(group_ids)
    return [
        curiosity * max(target_rate - n_with_calls[group] / sizes[group], 0.0)
        + call_penalty * min(free_calls - count, 0)
        if count
        else 0.0
        for group, count in zip(group_ids, call_counts, strict=True)
    ]
