# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A buffer that stores samples of experiences without padding until the update."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from .experience import Experience
from .experience_config import ExperienceConfig
from .replay_buffer_utils import BufferItem, make_experience_batch, share_media, unpadded_items
from .rollout_advantages import whiten_rows


class ReplayBuffer:
    """
    A buffer of the newest samples, in the order of their addition. It takes experiences of all modalities.

    Args:
        sample_batch_size (`int`, *optional*, defaults to `8`):
            Number of samples in an experience that [`sample`] returns.
        limit (`int`, *optional*, defaults to `0`):
            Largest number of samples; the oldest are dropped first. 0 keeps all.
        cpu_offload (`bool`, *optional*, defaults to `True`):
            Whether to move tensors to the CPU. Otherwise, they stay on their device.
        packing_samples (`bool`, *optional*, defaults to `False`):
            Whether [`sample`] and [`collate_fn`] return packed experiences. Otherwise, experiences are padded.
    """

    def __init__(
        self, sample_batch_size: int = 8, limit: int = 0, cpu_offload: bool = True, packing_samples: bool = False
    ):
        self.sample_batch_size = sample_batch_size
        self.limit = max(limit, 0)
        self.cpu_offload = cpu_offload
        self.packing_samples = packing_samples
        self._items: list[BufferItem] = []
        self._normalized_fields: set[str] = set()  # fields of the samples in the buffer

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> BufferItem:
        return self._items[index]

    def __iter__(self) -> Iterator[BufferItem]:
        return iter(self._items)

    def append(self, experience: Experience) -> None:
        """
        Adds copies of an experience's samples without padding, see [`split_experience_batch`].

        Raises:
            `RuntimeError`: If the samples in the buffer have been normalized.
            `ValueError`: If the experience can't be split.
        """
        if self._normalized_fields and self._items:
            raise RuntimeError(
                f"{sorted(self._normalized_fields)} have been normalized; call `clear` before `append`."
            )
        self._normalized_fields = set()
        batch = replace(experience)  # a shallow copy, since `to_device` changes fields in place
        items = unpadded_items(batch.to_device("cpu") if self.cpu_offload else batch)
        share_media([*self._items[-1:], *items])  # a group may span two calls of `append`
        # A limit of 0 keeps all, since `[-0:]` does
        self._items = (self._items + items)[-self.limit :]

    def sample(self) -> Experience:
        """
        Draws samples at random, without replacement.

        Returns:
            [`Experience`]: At most `sample_batch_size` samples, which stay in the buffer.
        """
        order = torch.randperm(len(self))[: self.sample_batch_size].tolist()
        return self.collate_fn([self._items[i] for i in order])

    def collate_fn(self, batch: list[BufferItem]) -> Experience:
        """
        Joins samples for a [`~torch.utils.data.DataLoader`] over the buffer, see [`make_experience_batch`].

        Args:
            batch (`list[BufferItem]`):
                The samples.
        """
        return make_experience_batch(batch, self.packing_samples)

    def normalize(self, attribute: str = "advantages", strategy: ExperienceConfig | None = None) -> None:
        """
        Normalizes a field, once, to mean 0 and population variance 1 over the actions of all samples.

        Args:
            attribute (`str`, *optional*, defaults to `"advantages"`):
                A field with one value per action.
            strategy ([`ExperienceConfig`], *optional*):
                Options. With a `strategy.accelerator`, mean and variance cover all its ranks, which must all call this
                method. Otherwise, they cover this buffer.

        Raises:
            `RuntimeError`: If the field has been normalized before.
            `ValueError`: If a sample doesn't have the field.
        """
        if attribute in self._normalized_fields:
            raise RuntimeError(f"`{attribute}` has been normalized before; call `clear` and append experiences first.")
        rows: list[torch.Tensor] = []
        masks: list[Any] = []
        for index, item in enumerate(self._items):
            row = getattr(item, attribute)
            if row is None:
                raise ValueError(f"`{attribute}` of item {index} is None and can't be normalized.")
            rows.append(row)
            has_mask = item.action_mask is not None and item.action_mask.shape == row.shape
            masks.append(item.action_mask if has_mask else torch.ones_like(row))
        accelerator = None if strategy is None else strategy.accelerator
        changes: list[dict[str, Any]] = [{attribute: part} for part in whiten_rows(rows, masks, accelerator)]
        self._items = [replace(item, **change) for item, change in zip(self._items, changes, strict=True)]
        self._normalized_fields.add(attribute)

    def clear(self) -> None:
        """Removes all samples."""
        self._items = []
        self._normalized_fields = set()


NaiveReplayBuffer = ReplayBuffer
