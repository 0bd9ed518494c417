# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Samples of experiences, stored without padding until the update."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, overload

import torch
from accelerate import Accelerator

from ...algorithms.returns import whiten
from ...forward.partition import first_fit
from .experience import Experience, VisionRecord
from .experience_config import ExperienceConfig
from .experience_media import share_media
from .replay_buffer_utils import (
    BufferItem,
    BufferItemAL,
    BufferItemOmni,
    BufferItemVL,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)


# Classes in [`ReplayBuffer.state_dict`], for `torch.serialization.safe_globals`
SAVED_CLASSES = (BufferItem, BufferItemVL, BufferItemAL, BufferItemOmni)


class ReplayBuffer:
    """
    The newest samples of experiences, in the order in which they were added.

    Args:
        limit (`int`, *optional*, defaults to `0`):
            Most samples; the oldest are dropped first. 0 keeps all.
        seed (`int`, *optional*, defaults to `0`):
            Seed of all random choices.
        cpu_offload (`bool`, *optional*, defaults to `True`):
            Whether to keep tensors on the CPU, rather than on their device.
    """

    def __init__(self, limit: int = 0, seed: int = 0, cpu_offload: bool = True):
        self.limit = limit
        self.cpu_offload = cpu_offload
        self._items: list[BufferItem] = []
        self._normalized: set[str] = set()
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> BufferItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[BufferItem]: ...
    def __getitem__(self, index: int | slice) -> BufferItem | list[BufferItem]:
        return self._items[index]

    def append(self, experience: Experience) -> None:
        """
        Adds copies of samples, which share no memory with their batch.

        Args:
            experience ([`Experience`]):
                A batch, which is split into samples without padding.

        Raises:
            `RuntimeError`: If the samples in the buffer have been normalized.
        """
        if self._normalized and self._items:
            raise RuntimeError(f"{sorted(self._normalized)} have been normalized; call `clear` before `append`.")
        self._normalized = set()
        batch = replace(experience)
        items = split_experience_batch(batch.to_device("cpu") if self.cpu_offload else batch)
        if not isinstance(batch.sequences, list):
            items = remove_padding_in_sequences(items)
        if self._items and items:
            share_media(self._items[-1], items)  # a group may be spread over batches
        self._items = (self._items + items)[-self.limit :]

    def sample(self, n: int) -> list[BufferItem]:
        """
        Draws different samples at random.

        Args:
            n (`int`):
                Number of samples.

        Returns:
            `list[BufferItem]`: At most `n` samples, which stay in the buffer.
        """
        return self._shuffled(self._items)[:n]

    def take(self, n: int) -> list[BufferItem]:
        """
        Removes the oldest samples, see [`sample`].

        Returns:
            `list[BufferItem]`: At most `n` samples, the oldest first.
        """
        taken, self._items = self._items[:n], self._items[n:]
        return taken

    def batches(
        self,
        packing_samples: bool = False,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        pad_token_id: int = 0,
    ) -> Iterator[Experience]:
        """
        All samples, once each, as experiences.

        Args:
            packing_samples, pad_token_id (*optional*):
                See [`make_experience_batch`].
            max_tokens (`int`, *optional*):
                Most tokens of an experience, padding included, which is filled by first-fit decreasing. A longer
                sample is alone in its experience.
            batch_size (`int`, *optional*):
                Samples of an experience; the last may have fewer. Pass this or `max_tokens`.
            shuffle (`bool`, *optional*, defaults to `True`):
                Whether the order is random: with `max_tokens`, that of experiences, and which of equally long samples
                share one.

        Returns:
            `Iterator[Experience]`: The experiences, made one at a time.

        Raises:
            `ValueError`: If not exactly one of `max_tokens` and `batch_size` is given.
        """
        items = self._shuffled(self._items) if shuffle else self._items
        if batch_size is not None and max_tokens is None:
            parts = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
        elif max_tokens is not None and batch_size is None:
            lengths = [len(item.sequences) for item in items]

            def size(part: list[int]) -> int:
                return sum(lengths[i] for i in part) if packing_samples else len(part) * lengths[part[0]]

            parts = [[items[i] for i in part] for part in first_fit(range(len(items)), size, max_tokens)]
            parts = self._shuffled(parts) if shuffle else parts
        else:
            raise ValueError("Pass either `max_tokens` or `batch_size`.")
        return (make_experience_batch(part, packing_samples, pad_token_id) for part in parts)

    def _shuffled(self, values: list) -> list:
        return [values[i] for i in torch.randperm(len(values), generator=self._generator).tolist()]

    def normalize(self, attribute: str = "advantages", accelerator: Accelerator | None = None) -> None:
        """
        Shifts and scales a field to mean 0 and population variance 1 over the actions of all samples, once.

        Args:
            attribute (`str`, *optional*, defaults to `"advantages"`):
                A field with one value per action.
            accelerator ([`~accelerate.Accelerator`], *optional*):
                Mean and variance are those of all its ranks, which all have to call this.

        Raises:
            `RuntimeError`: If the field has been normalized before.
            `ValueError`: If a sample doesn't have the field.
        """
        if attribute in self._normalized:
            raise RuntimeError(f"`{attribute}` has been normalized before; call `clear` and append experiences first.")
        columns = [getattr(item, attribute) for item in self._items]
        for index, column in enumerate(columns):
            if column is None:
                raise ValueError(f"`{attribute}` of item {index} is None and can't be normalized.")
        masks = [
            torch.ones_like(column) if item.action_mask is None else item.action_mask
            for item, column in zip(self._items, columns, strict=True)
        ]

        def over_ranks(sums: torch.Tensor) -> torch.Tensor:
            return sums if accelerator is None else accelerator.reduce(sums.to(accelerator.device)).to(sums.device)

        values, mask = (torch.cat(rows or [torch.zeros(0)]) for rows in (columns, masks))
        whitened = whiten(values.double(), mask.bool(), reduce=over_ranks).to(values.dtype)
        parts = whitened.split([len(column) for column in columns])
        self._items = [replace(i, **{attribute: part.clone()}) for i, part in zip(self._items, parts, strict=True)]
        self._normalized.add(attribute)

    def clear(self) -> None:
        """Removes all samples, but keeps the state of the random choices."""
        self._items = []
        self._normalized = set()

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: `SAVED_CLASSES`, and the values of `info`. Raw images are left out."""
        items = [replace(item, raw_images=None) if isinstance(item, VisionRecord) else item for item in self._items]
        return {"items": items, "normalized": sorted(self._normalized), "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Restores a state.

        Args:
            state (`dict`):
                From [`state_dict`].
        """
        self._items = state["items"][-self.limit :]
        self._normalized = set(state["normalized"])
        self._generator.set_state(state["generator"])


class NaiveReplayBuffer(ReplayBuffer):
    """
    A buffer with the interface of LightRFT's, for all modalities, see [`ReplayBuffer`].

    Args:
        sample_batch_size (`int`):
            Samples of an experience that [`sample`] returns.
        packing_samples (`bool`, *optional*, defaults to `False`):
            Whether experiences are packed rather than padded.
    """

    def __init__(
        self, sample_batch_size: int, limit: int = 0, cpu_offload: bool = True, packing_samples: bool = False
    ):
        super().__init__(max(limit, 0), cpu_offload=cpu_offload)
        self.sample_batch_size = sample_batch_size
        self.packing_samples = packing_samples

    def sample(self) -> Experience:  # pyrefly: ignore[bad-override]  LightRFT's takes no number
        """
        Draws different samples at random.

        Returns:
            [`Experience`]: At most `sample_batch_size` samples, which stay in the buffer.
        """
        return self.collate_fn(super().sample(self.sample_batch_size))

    def collate_fn(self, batch: list[BufferItem]) -> Experience:
        """
        Batches samples, for a [`~torch.utils.data.DataLoader`] over the buffer.

        Args:
            batch (`list[BufferItem]`):
                Samples.

        Returns:
            [`Experience`]: One batch, padded on the left or packed.
        """
        return make_experience_batch(batch, self.packing_samples)

    def normalize(self, attribute: str = "advantages", strategy: ExperienceConfig | None = None) -> None:
        """
        Normalizes a field over the ranks of a strategy, see [`ReplayBuffer.normalize`].

        Args:
            strategy ([`ExperienceConfig`], *optional*):
                Has the accelerator.
        """
        super().normalize(attribute, None if strategy is None else strategy.accelerator)
