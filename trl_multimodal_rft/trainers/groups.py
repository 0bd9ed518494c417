# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Groups of completions that are exchanged within a batch, or outlive it, media and all."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ..encoding.conversations import Conversation
from ..encoding.prompts import EncodedPrompt
from ..forward.scoring import left_pad


# What pads per-token tensors on the right where it isn't 0: tools' output counts unless masked, and 1 corrects nothing
_PADDING = {"tool_mask": 1, "importance_sampling_ratio": 1}


@dataclass(eq=False)
class Group:
    """The completions of one prompt with everything their loss needs."""

    prompt: EncodedPrompt  # the prompt with its media, held once
    # Values of each completion, `(G,)`, `(G, 1)` or, per token, `(G, C)` without columns that are padding in all rows
    rows: dict[str, torch.Tensor]
    step: int  # optimizer step at which the completions were sampled
    # Completions in which tools returned media, by their place in the group
    conversations: tuple[tuple[int, Conversation], ...] = ()

    def to(self, device: torch.device | str) -> "Group":
        """A copy on a device."""
        return replace(self, rows={name: value.to(device, copy=True) for name, value in self.rows.items()})

    def prompts(self) -> list[EncodedPrompt]:
        """Each completion's prompt, as copies: masks made for a batch would stay with a group that is kept."""
        own = replace(self.prompt, mask_cache={})
        others = {i: replace(each, prompt=own, mask_cache={}) for i, each in self.conversations}
        return [others.get(i, own) for i in range(len(self.rows["completion_ids"]))]


def split_groups(batch: dict[str, Any], group_size: int, step: int) -> list[Group]:
    """Takes a generation batch apart."""
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
        own = prompts[start : start + group_size]
        conversations = tuple((i, each) for i, each in enumerate(own) if isinstance(each, Conversation))
        groups.append(Group(own[0].parts[0], trimmed, step, conversations))
    return groups


def join_groups(groups: Sequence[Group], pad_token_id: int, device: torch.device) -> dict[str, Any]:
    """Makes a generation batch of groups, whenever they were sampled."""
    prompts = [prompt for group in groups for prompt in group.prompts()]
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


# Classes in what [`GroupBuffer.state_dict`] returns, for `torch.serialization.safe_globals`
SAVED_CLASSES = (EncodedPrompt, Conversation, frozenset, Group)


class GroupBuffer:
    """The newest groups of completions, on the CPU, in the order in which they came."""

    def __init__(self, limit: int = 0, max_age: int | None = None, seed: int = 0):
        self.limit = limit
        self.max_age = max_age
        self._groups: list[Group] = []
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._groups)

    def append(self, groups: Sequence[Group]) -> None:
        """Takes in copies, which share no memory with the batch they come from."""
        for group in groups[-self.limit :]:
            prompt = replace(group.prompt, decoded=(), mask_cache={})
            self._groups.append(replace(group.to("cpu"), prompt=prompt))
        self._groups = self._groups[-self.limit :]

    def sample(self, n: int, step: int) -> list[Group]:
        """Chooses different groups at random and forgets those that are too old."""
        if self.max_age is not None:
            self._groups = [group for group in self._groups if step - group.step <= self.max_age]
        order = torch.randperm(len(self._groups), generator=self._generator)[:n]
        return [self._groups[i] for i in order.tolist()]

    def take(self, n: int) -> list[Group]:
        """Takes the oldest groups out."""
        taken, self._groups = self._groups[:n], self._groups[n:]
        return taken

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds, of `SAVED_CLASSES`."""
        return {"groups": self._groups, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what [`state_dict`] gave."""
        self._groups = state["groups"][-self.limit :]
        self._generator.set_state(state["generator"])
