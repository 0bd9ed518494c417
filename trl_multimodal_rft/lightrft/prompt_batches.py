# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Batches of prompts as the PPO trainer takes them."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ..trainers.ppo_config import MultimodalPPOConfig


def rows_of(batch: list[dict] | tuple, columns: Sequence[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Rows of a batch of prompts, see [`PPOTrainerVL.fit`]; a tuple may hold one of these sets of media columns."""
    if all(isinstance(row, dict) for row in batch):
        return list(batch)
    media = next((names for names in columns if len(names) + 3 == len(batch)), None)
    if media is None or any(isinstance(column, (str, dict)) for column in batch):
        lengths = " or ".join(str(len(names) + 3) for names in columns)
        raise ValueError(
            f"A batch of prompts is a list of rows, which are dictionaries, or a tuple of {lengths} lists, got "
            f"{len(batch)} of {type(batch[0]).__name__}."
        )
    rows = []
    for prompt, *values, reference, label in zip(*batch, strict=True):
        row = {"prompt": prompt, "references": reference, "labels": label}
        for name, value in zip(media, values, strict=True):
            if value is not None:
                row[name] = value if isinstance(value, list) else [value]
        rows.append(row)
    return rows


def check_rollout(
    dataloader: DataLoader, args: MultimodalPPOConfig, buffer_limit: int, n_processes: int
) -> tuple[int, int]:
    """
    Checks that batches of prompts make whole optimizer steps. Returns the steps on the experience of a batch, and the
    prompts of all processes in one.
    """
    if dataloader.batch_size is None or isinstance(dataloader.dataset, IterableDataset):
        raise ValueError("`prompts_dataloader` must have a `batch_size`, and a dataset whose length is known.")
    sampler: Any = dataloader.sampler
    per_rollout, n_prompts = dataloader.batch_size * n_processes, len(sampler)
    if n_prompts < per_rollout or (n_prompts % per_rollout != 0 and not dataloader.drop_last):
        raise ValueError(
            f"{n_prompts} prompts don't fill whole batches of {dataloader.batch_size} on {n_processes} processes; set "
            "another `batch_size`, or `drop_last=True` if there are enough for one."
        )
    n_samples = dataloader.batch_size * args.num_generations
    if buffer_limit > 0:
        n_samples = min(n_samples, buffer_limit)
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if n_samples % step != 0:
        raise ValueError(
            f"A batch of {dataloader.batch_size} prompts leaves {n_samples} samples in the buffer, which don't fill "
            f"whole optimizer steps of {step} (`micro_train_batch_size` x `gradient_accumulation_steps`)."
        )
    return n_samples // step * args.num_ppo_epochs, per_rollout
