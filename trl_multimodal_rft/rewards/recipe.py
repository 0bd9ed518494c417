# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which rewards count for which kind of sample."""

from collections.abc import Sequence

import torch


def combine_rewards(
    rewards: Sequence[torch.Tensor],
    labels: Sequence[str],
    recipe: dict[str, list[tuple[str, str, float]]],
    label_map: dict[str, int],
) -> torch.Tensor:
    """
    Adds up rewards as the label of each sample says, see [`add_rewards`].

    Args:
        rewards (`Sequence[torch.Tensor]`):
            Rewards of each source, shape `(B,)`.
        labels (`Sequence[str]`):
            Label of each sample, such as its task.
        recipe (`dict[str, list[tuple[str, str, float]]]`):
            For each label the rewards that count, as (kind, name, weight); the kind is for the reader.
        label_map (`dict[str, int]`):
            Which source has which name.

    Returns:
        `torch.Tensor`: Rewards, shape `(B,)`; `NaN` if the recipe of a label is empty.

    Raises:
        `ValueError`: If a label isn't in the recipe, or a name isn't in the map.
    """
    total = []
    for i, label in enumerate(labels):
        if label not in recipe:
            raise ValueError(
                f"Sample {i} has the label {label!r}, which `reward_recipe` doesn't know: {sorted(recipe)}."
            )
        for _, name, _ in recipe[label]:
            if name not in label_map:
                raise ValueError(f"`reward_recipe` asks for {name!r}, which `reward_fn_label_map` doesn't know.")
        parts = [weight * rewards[label_map[name]][i].item() for _, name, weight in recipe[label]]
        total.append(add_rewards(rewards[0].new_tensor(parts)))
    return torch.stack(total)


def add_rewards(rewards: torch.Tensor) -> torch.Tensor:
    """
    Adds up rewards that may not apply to a sample.

    Args:
        rewards (`torch.Tensor`):
            Rewards, `NaN` where they don't apply, shape `(number of rewards, ...)`.

    Returns:
        `torch.Tensor`: Sums over the first dimension of those that apply, `NaN` where none does.
    """
    return torch.where(rewards.isnan().all(0), torch.nan, rewards.nansum(0))
