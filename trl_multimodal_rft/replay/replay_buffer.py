# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Groups of completions, and samples of experiences, that outlive their batch, media and all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from ..algorithms.advantages import TOLERANCE
from ..media.encoding import EncodedPrompt
from ..packing.forward import left_pad
from ..rollout.experience import Experience, VisionRecord
from .replay_buffer_utils import (
    BufferItem,
    BufferItemAL,
    BufferItemOmni,
    BufferItemVL,
    make_experience_batch,
    remove_padding_in_sequences,
    share_media,
    split_experience_batch,
)


# What pads per-token tensors on the right where it is not 0: tools' output counts unless masked, and no correction is 1.
_PADDING = {"tool_mask": 1, "importance_sampling_ratio": 1}


@dataclass(eq=False)
class Group:
    """
    The completions of one prompt with everything their loss needs.

    Args:
        prompt ([`EncodedPrompt`]):
            The prompt with its media, held once.
        rows (`dict[str, torch.Tensor]`):
            Values of each completion, `(G,)`, `(G, 1)` or, per token, `(G, C)` without columns that are padding in all
            rows.
        step (`int`):
            Optimizer step at which the completions were sampled.
    """

    prompt: EncodedPrompt
    rows: dict[str, torch.Tensor]
    step: int

    def to(self, device: torch.device | str) -> "Group":
        """
        A copy on a device.

        Args:
            device (`torch.device` or `str`):
                Where the values of the completions go. The prompt stays on the CPU.

        Returns:
            [`Group`]: The copy, which shares no memory with a larger batch.
        """
        return replace(self, rows={name: value.to(device, copy=True) for name, value in self.rows.items()})


def split_groups(batch: dict[str, Any], group_size: int, step: int) -> list[Group]:
    """
    Takes a generation batch apart.

    Args:
        batch (`dict`):
            What the trainer made of a generation batch: tensors with one row per completion, groups one after the other,
            and `encoded_prompts`.
        group_size (`int`):
            Completions per prompt.
        step (`int`):
            Current optimizer step.

    Returns:
        `list[Group]`: The groups in order. Their tensors are views of the batch.
    """
    prompts = batch["encoded_prompts"]
    width = batch["completion_ids"].size(1)
    own = {"prompt_ids", "prompt_mask"}  # made anew from the prompts
    rows = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor) and v.dim() > 0 and k not in own}
    groups = []
    for start in range(0, len(prompts), group_size):
        part = {name: value[start : start + group_size] for name, value in rows.items()}
        length = max(int(part["completion_mask"].sum(1).max()), 1)
        trimmed = {
            name: value[:, :length] if value.dim() == 2 and value.size(1) == width else value
            for name, value in part.items()
        }
        groups.append(Group(prompts[start], trimmed, step))
    return groups


def join_groups(groups: Sequence[Group], pad_token_id: int, device: torch.device) -> dict[str, Any]:
    """
    Makes a generation batch of groups, whenever they were sampled.

    Args:
        groups (`Sequence[Group]`):
            Groups with the same values.
        pad_token_id (`int`):
            Id written on padding.
        device (`torch.device`):
            Where the tensors go.

    Returns:
        `dict`: `prompt_ids` and `prompt_mask`, padded on the left, the values of the completions, padded on the right,
        and `encoded_prompts`. What counts over the whole batch is for the caller to add.
    """
    # Copies, or masks made for the batch would stay with a group that is kept
    own = [replace(group.prompt, mask_cache={}) for group in groups]
    prompts = [p for p, group in zip(own, groups, strict=True) for _ in range(len(group.rows["completion_ids"]))]
    padded = left_pad(prompts, pad_token_id)
    width = max(group.rows["completion_ids"].size(1) for group in groups)
    padding = {"completion_ids": pad_token_id, **_PADDING}
    batch = {"prompt_ids": padded["input_ids"].to(device), "prompt_mask": padded["attention_mask"].to(device)}
    for name in groups[0].rows:
        values = [group.rows[name].to(device) for group in groups]
        # `(G, 1)` is one value per completion, unless all completions of the group have one token
        lengths = [group.rows["completion_ids"].size(1) for group in groups]
        if all(value.dim() == 2 and value.size(1) == n for value, n in zip(values, lengths, strict=True)):
            values = [F.pad(v, (0, width - v.size(1)), value=padding.get(name, 0)) for v in values]
        batch[name] = torch.cat(values)
    return {**batch, "encoded_prompts": prompts}


# Classes in what [`ReplayBuffer.state_dict`] returns, for `torch.serialization.safe_globals`
SAVED_CLASSES = (EncodedPrompt, frozenset, Group, BufferItem, BufferItemVL, BufferItemAL, BufferItemOmni)


class ReplayBuffer:
    """
    The newest groups of completions, or samples of experiences, in the order in which they came.

    Args:
        limit (`int`, *optional*, defaults to `0`):
            Number of groups or samples kept at most; the oldest go first. 0 keeps all.
        max_age (`int`, *optional*):
            Number of optimizer steps after which a group isn't handed out any more.
        seed (`int`, *optional*, defaults to `0`):
            Seed of all random choices.
        cpu_offload (`bool`, *optional*, defaults to `True`):
            Whether to keep everything on the CPU, rather than where it came from.
    """

    def __init__(self, limit: int = 0, max_age: int | None = None, seed: int = 0, cpu_offload: bool = True):
        self.limit = limit
        self.max_age = max_age
        self.cpu_offload = cpu_offload
        self._groups: list[Group] | list[BufferItem] = []
        self._normalized: set[str] = set()
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int | slice) -> Group | BufferItem | list:
        return self._groups[index]

    def append(self, experience: Experience | Sequence[Group]) -> None:
        """
        Takes in copies, which share no memory with the batch they come from.

        Args:
            experience ([`Experience`] or `Sequence[Group]`):
                A batch, which is taken apart into samples without padding, or groups, the newest last, which are kept
                without the images that only generation needs.

        Raises:
            `ValueError`: If samples are to be kept by age, which only groups have.
            `RuntimeError`: If what is there has been normalized, and what comes has not.
        """
        if self._normalized and self._groups:
            raise RuntimeError(
                f"{sorted(self._normalized)} have been normalized; call `clear` before you add to them."
            )
        self._normalized = set()
        kept: list[Any]
        if isinstance(experience, Experience):
            if self.max_age is not None:
                raise ValueError("`max_age` counts from the step of a group; experiences have none.")
            batch = replace(experience)
            kept = split_experience_batch(batch.to_device("cpu") if self.cpu_offload else batch)
            if not isinstance(batch.sequences, list):
                kept = remove_padding_in_sequences(kept)
            if len(self) > 0 and kept:
                share_media(self[-1], kept)  # a group may be spread over batches
        else:
            kept = []
            for group in experience[-self.limit :]:
                copy = group.to("cpu" if self.cpu_offload else group.rows["completion_ids"].device)
                kept.append(replace(copy, prompt=replace(copy.prompt, images=[], mask_cache={})))
        self._groups = (self._groups + kept)[-self.limit :]

    def sample(self, n: int, step: int | None = None) -> list[Group] | list[BufferItem]:
        """
        Chooses different entries at random and forgets those that are too old.

        Args:
            n (`int`):
                Number of entries wanted.
            step (`int`, *optional*):
                Current optimizer step; needed for `max_age`.

        Returns:
            `list`: At most `n` entries, which stay in the buffer.

        Raises:
            `ValueError`: If there is a `max_age` and no `step`.
        """
        if self.max_age is not None:
            if step is None:
                raise ValueError("`max_age` is set, so `sample` needs the current `step`.")
            self._groups = [group for group in self._groups if step - group.step <= self.max_age]
        order = torch.randperm(len(self._groups), generator=self._generator)[:n]
        return [self._groups[i] for i in order.tolist()]

    def take(self, n: int) -> list[Group] | list[BufferItem]:
        """
        Takes the oldest entries out.

        Args:
            n (`int`):
                Number of entries wanted.

        Returns:
            `list`: At most `n` entries, the oldest first.
        """
        taken, self._groups = self._groups[:n], self._groups[n:]
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
            `TypeError`: If the buffer holds groups.
        """
        if (max_tokens is None) == (batch_size is None):
            raise ValueError("Give either `max_tokens` or `batch_size`.")
        items = self._items()
        if shuffle:
            items = [items[i] for i in torch.randperm(len(items), generator=self._generator).tolist()]
        if batch_size is not None:
            parts = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
        else:
            parts = _first_fit(items, max_tokens, padded=not packing_samples)
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
            `TypeError`: If the buffer holds groups.
        """
        if attribute in self._normalized:
            raise RuntimeError(f"`{attribute}` has been normalized before; doing it twice changes what it means.")
        items, statistics = self._items(), torch.zeros(1, 3, dtype=torch.float64)
        for index, item in enumerate(items):
            if getattr(item, attribute) is None:
                raise ValueError(f"`{attribute}` of item {index} is None and can't be normalized.")
            valid = getattr(item, attribute)[_valid(item, attribute)].double()
            statistics += torch.stack([valid.sum(), valid.square().sum(), valid.new_tensor(valid.numel())]).cpu()
        if accelerator is not None:
            statistics = accelerator.gather(statistics.to(accelerator.device)).cpu()
        total, squares, count = statistics.sum(0).tolist()
        mean = total / max(count, 1)
        std = max(squares / max(count, 1) - mean**2, 0) ** 0.5
        scale = 0.0 if std <= TOLERANCE * max(abs(mean), 1) else 1 / std
        for index, item in enumerate(items):
            value = getattr(item, attribute)
            result = torch.where(_valid(item, attribute), (value.double() - mean) * scale, 0).to(value.dtype)
            self._groups[index] = replace(item, **{attribute: result})
        self._normalized.add(attribute)

    def clear(self) -> None:
        """Forgets everything but the state of the random choices."""
        self._groups = []
        self._normalized = set()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: `SAVED_CLASSES`, and what `info` holds. Raw images are left out."""
        entries = [replace(e, raw_images=None) if isinstance(e, VisionRecord) else e for e in self._groups]
        return {
            "groups": entries,
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
        self._groups = state["groups"][-self.limit :]
        self._normalized = set(state["normalized"])
        self._generator.set_state(state["generator"])

    def _items(self) -> list[BufferItem]:
        if not all(isinstance(entry, BufferItem) for entry in self._groups):
            raise TypeError("The buffer holds groups, which `join_groups` makes batches of; this is for experiences.")
        return self._groups


def _valid(item: BufferItem, attribute: str) -> torch.Tensor:
    if item.action_mask is None:
        return torch.ones_like(getattr(item, attribute), dtype=torch.bool)
    return item.action_mask.bool()


def _first_fit(items: list[BufferItem], max_tokens: int, padded: bool) -> list[list[BufferItem]]:
    parts: list[list[BufferItem]] = []
    sizes: list[int] = []
    for item in sorted(items, key=lambda item: -len(item.sequences)):
        for index, part in enumerate(parts):
            # The first is the longest
            added = len(part[0].sequences) if padded else len(item.sequences)
            if sizes[index] + added <= max_tokens:
                part.append(item)
                sizes[index] += added
                break
        else:
            parts.append([item])
            sizes.append(len(item.sequences))
    return parts
