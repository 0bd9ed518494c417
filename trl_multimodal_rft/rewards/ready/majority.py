# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A reward without labels: agreement with the most frequent answer of the group."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from ..answers import accuracy_reward, completion_text, extract_answer
from ..calls import Argument, Completion
from .choices import choice_reward, vote_of


def majority_reward(
    completions: Sequence[Completion],
    group_ids: Sequence[int] | None = None,
    threshold: Annotated[float, "[0, 1]"] = 0.0,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Argument,
) -> list[float]:
    """
    Rewards the most frequent answer of a group with 1.0, and other answers with 0.0, as in
    [TTRL](https://huggingface.co/papers/2504.16084) and [AQA-TTRL](https://huggingface.co/papers/2510.05478).

    Answers are compared as in majority@k, by [`extract_answer`] without case, whitespace and
    punctuation, and numbers by their values. An answer that is empty or punctuation alone, or that names none of a
    row's `choices`, has no vote. The most frequent
    answer is the group's label, unless votes are tied or its share of the completions is below `threshold`. In a group
    without a label, all rewards are 0.0, so the group has no signal. The metric `sampling/agreement` is the mean share
    of the most frequent answer. The metric `majority/correct_frac` is the share of right labels, for rows with a
    `solution`.

    Args:
        completions (`list[str]` or `list[list[dict[str, str]]]`):
            Completions, plain or conversational.
        group_ids (`list[int]`):
            Group of each completion. The trainers of this package pass it if no group straddles processes.
        threshold (`float`, *optional*, defaults to `0.0`):
            Smallest share of a group's completions, between 0 and 1, at which their answer is the group's label.
        log_metric (`Callable`, *optional*):
            Function that logs a metric, which trainers pass.
        **kwargs:
            Dataset columns. `choices` are read, and `solution` is read for the metric alone.

    Returns:
        `list[float]`: 1.0 or 0.0 for each completion.

    Raises:
        `ValueError`: If `group_ids` is missing, or `threshold` is out of range.

    Example:
    ```python
    >>> majority_reward(["<answer>7</answer>", "7.", "8"], group_ids=[0, 0, 0])
    [1.0, 1.0, 0.0]
    ```
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"majority_reward got `threshold={threshold}`, which is a share: set it between 0 and 1.")
    if group_ids is None:
        raise ValueError(
            "majority_reward needs `group_ids`, which trainers pass where no group straddles processes; make "
            "`per_device_train_batch_size` times `steps_per_generation` a multiple of `num_generations`."
        )
    columns: Mapping[str, Any] = kwargs
    choices = columns.get("choices") or [None] * len(completions)
    answers = [
        vote_of(extract_answer(completion_text(completion)), options)
        for completion, options in zip(completions, choices, strict=True)
    ]
    groups: dict[int, list[int]] = defaultdict(list)
    for position, group in enumerate(group_ids):
        groups[group].append(position)
    # Rewards by completion, shares of the most frequent answer by group, and a completion's index for each label
    rewards = [0.0] * len(completions)
    shares = []
    winners = []
    for positions in groups.values():
        votes = Counter(answers[position] for position in positions if answers[position] is not None)
        # The most frequent answer and its number of votes, and the second number of votes, 0 if there is none
        (label, n_votes), (_, n_second) = (*votes.most_common(2), (None, 0), (None, 0))[:2]
        shares.append(n_votes / len(positions))
        if n_votes > n_second and shares[-1] >= threshold:
            for position in positions:
                rewards[position] = float(answers[position] == label)
            winners.append(next(position for position in positions if answers[position] == label))
    if log_metric is not None and shares:
        log_metric("sampling/agreement", sum(shares) / len(shares))
        label_rewards = _label_rewards(completions, columns, winners)
        if label_rewards:
            log_metric("majority/correct_frac", sum(label_rewards) / len(label_rewards))
    return rewards


def _label_rewards(completions: Sequence[Completion], columns: Mapping[str, Any], winners: list[int]) -> list[float]:
    """Returns 1.0 per right label and 0.0 per wrong label. `winners` has the index of one completion per label."""
    solutions = columns.get("solution")
    if not solutions:
        return []
    rows = {name: [values[i] for i in winners] for name, values in columns.items() if name in ("solution", "choices")}
    reward = choice_reward if any(rows.get("choices") or ()) else accuracy_reward
    rewards = reward([completions[i] for i in winners], **rows)
    return [value for value in rewards if value is not None]
