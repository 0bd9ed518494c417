# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Whitening of advantages over several batches, as in `lightrft.trainer.advantage_calculator`."""

from argparse import Namespace

import torch

from ...algorithms.returns import whiten
from .experience import Experience


def normalize_advantages_cross_batch(
    experiences: list[Experience], advantage_estimator: str, args: Namespace
) -> list[Experience]:
    """
    Shifts and scales advantages to mean 0 and population variance 1 over the actions of all batches.

    The experience maker has whitened its advantages already; this function is for experience from elsewhere.

    Args:
        experiences (`list[Experience]`):
            Batches, padded or packed, whose advantages are replaced in place.
        advantage_estimator (`str`):
            `"gae"`, `"reinforce"` or `"reinforce_baseline"`; advantages of other estimators stay unchanged.
        args (`argparse.Namespace`):
            If `no_advantage_std_norm` is true, advantages are shifted, but not scaled.

    Returns:
        `list[Experience]`: The batches, with advantages of 0 outside the mask.

    Raises:
        `ValueError`: If a batch has no advantages or no mask.
    """
    if advantage_estimator not in ("gae", "reinforce", "reinforce_baseline"):
        return experiences
    columns = []
    for index, experience in enumerate(experiences):
        if experience.advantages is None or experience.action_mask is None:
            raise ValueError(f"`advantages` or `action_mask` of batch {index} is None; make both, and normalize then.")
        columns.append((list(experience.advantages), list(experience.action_mask)))
    rows = [row for advantages, _ in columns for row in advantages]
    values, mask = torch.cat(rows), torch.cat([row for _, masks in columns for row in masks]).bool()
    if getattr(args, "no_advantage_std_norm", False):
        values = torch.where(mask, values - values[mask].mean(), 0)
    else:
        values = whiten(values, mask)
    new_rows = iter(values.split([len(row) for row in rows]))
    for experience, (advantages, _) in zip(experiences, columns, strict=True):
        whitened = [next(new_rows) for _ in advantages]
        experience.advantages = whitened if isinstance(experience.advantages, list) else torch.stack(whitened)
    return experiences
