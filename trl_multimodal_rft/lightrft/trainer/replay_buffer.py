# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Samples of experiences, kept without padding until they are trained on."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator

from ...algorithms.returns import whiten
from ...forward.layout import first_fit
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


# Classes in what [`ReplayBuffer.state_dict`] returns, for `torch.serialization.safe_globals`
SAVED_CLASSES = (BufferItem, BufferItemVL, BufferItemAL, BufferItemOmni)


class ReplayBuffer:
    """
    The newest samples of experiences, in the order in which they came.

    Args:
        limit (`int`, *optional*, defaults to `0`):
            Number of samples kept at most; the oldest go first. 0 keeps all.
        seed (`int`, *optional*, defaults to `0`):
            Seed of all random choices.
        cpu_offload (`bool`, *optional*, defaults to `True`):
            Whether to keep everything on the CPU, rather than where it came from.
    """

    def __init__(self, limit: int = 0, seed: int = 0, cpu_offload: bool = True):
        self.limit = limit
        self.cpu_offload = cpu_offload
        self._items: list[BufferItem] = []
        self._normalized: set[str] = set()
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int | slice) -> Any:
        return self._items[index]

    def append(self, experience: Experience) -> None:
        """
        Takes in copies, which share no memory with the batch they come from.

        Args:
            experience ([`Experience`]):
                A batch, which is taken apart into samples without padding.

        Raises:
            `RuntimeError`: If what is there has been normalized, and what comes has not.
        """
        if self._normalized and self._items:
            raise RuntimeError(
                f"{sorted(self._normalized)} have been normalized; call `clear` before you add to them."
            )
        self._normalized = set()
        batch: Any = replace(experience)
        kept = split_experience_batch(batch.to_device("cpu") if self.cpu_offload else batch)
        if not isinstance(batch.sequences, list):
            kept = remove_padding_in_sequences(kept)
        if len(self) > 0 and kept:
            share_media(self[-1], kept)  # a group may be spread over batches
        self._items = (self._items + kept)[-self.limit :]

    def sample(self, n: int) -> list[BufferItem]:
        """
        Chooses different samples at random.

        Args:
            n (`int`):
                Number of samples wanted.

        Returns:
            `list[BufferItem]`: At most `n` samples, which stay in the buffer.
        """
        order = torch.randperm(len(self._items), generator=self._generator)[:n]
        return [self._items[i] for i in order.tolist()]

    def take(self, n: int) -> list[BufferItem]:
        """
        Takes the oldest samples out.

        Args:
            n (`int`):
                Number of samples wanted.

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
            packing_samples (`bool`, *optional*, defaults to `False`):
                Whether experiences are packed rather than padded.
            max_tokens (`int`, *optional*):
                Fills each experience up to this many tokens, padding counted in, by first-fit decreasing. A longer
                sample gets an experience of its own.
            batch_size (`int`, *optional*):
                Puts this many samples into each experience; the last may have fewer. Give this or `max_tokens`.
            shuffle (`bool`, *optional*, defaults to `True`):
                Whether the order is random. With `max_tokens` this is about the order of experiences, and which of
                equally long samples go together.
            pad_token_id (`int`, *optional*, defaults to `0`):
                Id written on padding.

        Returns:
            `Iterator[Experience]`: The experiences, made one at a time.

        Raises:
            `ValueError`: If not exactly one of `max_tokens` and `batch_size` is given.
        """
        if (max_tokens is None) == (batch_size is None):
            raise ValueError("Give either `max_tokens` or `batch_size`.")
        items = self._items
        if shuffle:
            items = [items[i] for i in torch.randperm(len(items), generator=self._generator).tolist()]
        if batch_size is not None:
            parts = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
        else:
            capacity: Any = max_tokens
            lengths = [len(item.sequences) for item in items]

            def size(part: list[int]) -> int:
                return sum(map(lengths.__getitem__, part)) if packing_samples else len(part) * lengths[part[0]]

            parts = [[items[i] for i in part] for part in first_fit(range(len(items)), size, capacity)]
            if shuffle:
                parts = [parts[i] for i in torch.randperm(len(parts), generator=self._generator).tolist()]
        return (make_experience_batch(part, packing_samples, pad_token_id) for part in parts)

    def normalize(self, attribute: str = "advantages", accelerator: Accelerator | None = None) -> None:
        """
        Shifts and scales a field to mean 0 and population variance 1 over the actions of all samples, once.

        Args:
            attribute (`str`, *optional*, defaults to `"advantages"`):
                A field with one value per action.
            accelerator ([`~accelerate.Accelerator`], *optional*):
                Takes the mean and the variance over all its processes, which then all have to call this.

        Raises:
            `RuntimeError`: If it has been normalized before.
            `ValueError`: If a sample lacks the field.
        """
        if attribute in self._normalized:
            raise RuntimeError(f"`{attribute}` has been normalized before; doing it twice changes what it means.")
        items = self._items
        for index, item in enumerate(items):
            if getattr(item, attribute) is None:
                raise ValueError(f"`{attribute}` of item {index} is None and can't be normalized.")

        def over_processes(sums: torch.Tensor) -> torch.Tensor:
            return sums if accelerator is None else accelerator.reduce(sums.to(accelerator.device)).to(sums.device)

        values = torch.cat([getattr(item, attribute) for item in items] or [torch.zeros(0)])
        valid = torch.cat([_valid(item, attribute) for item in items] or [torch.zeros(0)])
        whitened = whiten(values.double(), valid, reduce=over_processes).to(values.dtype)
        parts = whitened.split([len(getattr(item, attribute)) for item in items])
        self._items = [replace(item, **{attribute: part.clone()}) for item, part in zip(items, parts, strict=True)]
        self._normalized.add(attribute)

    def clear(self) -> None:
        """Forgets everything but the state of the random choices."""
        self._items = []
        self._normalized = set()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: `SAVED_CLASSES`, and what `info` holds. Raw images are left out."""
        entries = [replace(e, raw_images=None) if isinstance(e, VisionRecord) else e for e in self._items]
        return {
            "items": entries,
            "normalized": sorted(self._normalized),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Takes back what [`state_dict`] gave.

        Args:
            state (`dict`):
                That dictionary.
        """
        self._items = state["items"][-self.limit :]
        self._normalized = set(state["normalized"])
        self._generator.set_state(state["generator"])


class NaiveReplayBuffer(ReplayBuffer):
    """
    A [`ReplayBuffer`] with the interface of LightRFT's, for all modalities.

    Args:
        sample_batch_size (`int`):
            Number of samples in what [`sample`] returns.
        limit (`int`, *optional*, defaults to `0`):
            Number of samples kept at most; the oldest go first. 0 keeps all.
        cpu_offload (`bool`, *optional*, defaults to `True`):
            Whether to keep everything on the CPU, rather than where it came from.
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
        Chooses different samples at random.

        Returns:
            [`Experience`]: At most `sample_batch_size` samples, which stay in the buffer.
        """
        return self.collate_fn(super().sample(self.sample_batch_size))

    def collate_fn(self, batch: list[BufferItem]) -> Experience:
        """
        Makes an experience of samples, for a [`~torch.utils.data.DataLoader`] over the buffer.

        Args:
            batch (`list[BufferItem]`):
                Samples.

        Returns:
            [`Experience`]: One batch, padded on the left or packed.
        """
        return make_experience_batch(batch, self.packing_samples)

    def normalize(self, attribute: str = "advantages", strategy: ExperienceConfig | None = None) -> None:
        """
        Shifts and scales a field to mean 0 and variance 1, see [`ReplayBuffer.normalize`].

        Args:
            attribute (`str`, *optional*, defaults to `"advantages"`):
                A field with one value per action.
            strategy ([`ExperienceConfig`], *optional*):
                Takes the mean and the variance over all processes of its accelerator.
        """
        super().normalize(attribute, None if strategy is None else strategy.accelerator)


def _valid(item: BufferItem, attribute: str) -> torch.Tensor:
    if item.action_mask is None:
        return torch.ones_like(getattr(item, attribute), dtype=torch.bool)
    return item.action_mask.bool()
