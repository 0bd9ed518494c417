# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The completions that flow through a training step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F

from ..encoding.conversations import Conversation
from ..encoding.prompts import EncodedPrompt
from ..forward.inputs import left_pad
from ..forward.layout import rows_of, to_device


# Per-token tensors, with the value on padding (that of ids is the padding token)
_PER_TOKEN = {
    "completion_ids": None,
    "completion_mask": 0,
    "tool_mask": 1,
    "sampling_per_token_logps": 0.0,
    "old_per_token_logps": 0.0,
    "old_entropies": 0.0,
    "ref_per_token_logps": 0.0,
    "dependency": 0.0,
    "old_values": 0.0,
    "returns": 0.0,
    "teacher_ids": 0,
    "teacher_logps": 0.0,
    "token_weights": 0.0,
}

# What only rewards, logs and checks read
_BEFORE_LOSS = ("rows", "messages", "environments", "ids", "completions", "extra", "rewards_per_func")
_BEFORE_LOSS += ("place", "versions", "early_rewards", "from_view", "contrast", "bonus")


@dataclass(eq=False)
class Rollout:
    """
    Completions of a generation batch on this rank, or a micro-batch of them: `N` completions of at most `C` tokens.

    Each field is written by one stage of the step. Fields that a loss reads have TRL's names, and `rollout[name]` and
    `rollout.get(name)` read them as TRL's losses read their dictionary.
    """

    # collect
    prompts: list[EncodedPrompt]  # each completion's prompt; completions of a group hold the same object
    group_ids: torch.Tensor  # (N,), the number of each completion's group among those of all ranks
    pad_token_id: int
    place: int | None = None  # of the batch in the run, where it is one that the loader of training yielded
    rows: list[dict[str, Any]] = field(default_factory=list)  # as reward functions get them
    numbers: list[int] = field(default_factory=list)  # of the rows in their dataset
    messages: list[Any] = field(default_factory=list)  # prompts with references to media
    environments: list[Any] | None = None
    whole_groups: bool = True  # whether no group straddles ranks
    # sample
    completion_ids: Any = None  # (N, C), padded on the right
    completion_mask: Any = None  # (N, C), 0 on padding, and on truncated completions that are masked
    tool_mask: Any = None  # (N, C), 0 on results of tools; None if every token was sampled
    ids: list[list[int]] = field(default_factory=list)  # of each completion, without padding
    completions: list[Any] = field(default_factory=list)  # texts, or messages
    sampling_per_token_logps: Any = None  # (N, C), NaN where the engine returned none
    extra: dict[str, Any] = field(default_factory=dict)  # further columns, of `rollout_func`
    versions: Any = None  # (N, 2), of the weights by which servers sampled first and last tokens ahead of the update
    early_rewards: Any = None  # of completions that were asked for ahead, by functions that only wait
    from_view: Any = None  # (N,), whether a completion was sampled from a view of its prompt
    # Further completions, sampled from another view, which aren't trained on, and beside which ones they were sampled
    contrast: "tuple[Rollout, list[int]] | None" = None
    # The teacher's prompt of each completion, where it differs from the student's; empty if none does
    teacher_prompts: list[EncodedPrompt] = field(default_factory=list)
    teacher_ids: Any = None  # (N, C, K), the most likely tokens of a teacher on a server
    teacher_logps: Any = None  # (N, C, K), their log-probabilities
    # score
    packed: bool = False  # whether completions share a forward of their prompt
    old_per_token_logps: Any = None  # (N, C)
    old_entropies: Any = None  # (N, C)
    ref_per_token_logps: Any = None  # (N, C)
    view_prompts: list[EncodedPrompt] = field(default_factory=list)  # under the view in the loss; empty without one
    dependency: Any = None  # (N, C), how far the tokens' distributions depend on the media that the view replaces
    viewed: Any = None  # (N,), whether the view replaces media of the prompt
    importance_sampling_ratio: Any = None  # (N, C) or (N, 1), of the trainer's policy to the engine's
    old_values: Any = None  # (N, C), of a critic
    bootstrap: Any = None  # (N,), value after the cut of a truncated completion
    # reward
    rewards_per_func: Any = None  # (all ranks' N, number of functions)
    bonus: Any = None  # (all ranks' N,), on top of their sum, by the rewards of the contrast
    # estimate
    advantages: Any = None  # (N,) or (N, C)
    returns: Any = None  # (N, C)
    scorable: Any = None  # (N,), 0 where no reward function applies
    live: Any = None  # (N,), whether rewards differ within the group
    out_of_range: Any = None  # (N,), -1 or 1 where the group's mean reward is below or above the wanted range
    num_items_in_batch: Any = None  # (), tokens in the loss over all ranks
    step: int = 0  # optimizer step at which the completions were sampled
    # update
    without_gradient: list[bool] = field(default_factory=list)  # completions that it needn't forward; empty for none
    # token filter
    token_weights: Any = None  # (N, C), weights in the policy loss; None for 1

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def loss_mask(self) -> torch.Tensor:
        """1 on tokens in the loss, `(N, C)`."""
        return self.completion_mask if self.tool_mask is None else self.completion_mask * self.tool_mask

    @property
    def rows_to_score(self) -> list[int] | None:
        """Completions that have a gradient, `None` for all."""
        return [i for i, none in enumerate(self.without_gradient) if not none] if any(self.without_gradient) else None

    @property
    def scored_mask(self) -> torch.Tensor:
        """The loss mask without completions that the update doesn't forward, `(N, C)`."""
        mask = self.loss_mask
        if self.rows_to_score is None:
            return mask
        return mask * to_device(~torch.tensor(self.without_gradient), mask.device)[:, None]

    @property
    def prompt_ids(self) -> torch.Tensor:
        """Prompts padded on the left, `(N, P)`."""
        return left_pad(self.prompts, self.pad_token_id)["input_ids"].to(self.completion_ids.device)

    @property
    def prompt_mask(self) -> torch.Tensor:
        """0 on the padding of `prompt_ids`, `(N, P)`."""
        return left_pad(self.prompts, self.pad_token_id)["attention_mask"].to(self.completion_ids.device)

    @property
    def old_logps(self) -> torch.Tensor | None:
        """Log-probabilities of whole completions, `(N,)`, as TRL's RLOO reads them."""
        return None if self.old_per_token_logps is None else (self.old_per_token_logps * self.loss_mask).sum(1)

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or the default where no stage has written it."""
        value = getattr(self, name, None)
        return default if value is None else value

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def keys(self) -> list[str]:
        """Names of the fields that are written, so that a loss may copy its inputs as `{**inputs}`."""
        return [each.name for each in fields(self) if each.name in self]

    def select(self, indices: Sequence[int]) -> "Rollout":
        """Some of the completions, in this order."""
        indices, n = list(indices), len(self)
        changed: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == n:
                changed[each.name] = rows_of(value, indices)
            elif isinstance(value, list) and len(value) == n:
                changed[each.name] = [value[i] for i in indices]
        return replace(self, **changed)

    def for_loss(self) -> "Rollout":
        """Without what only rewards, logs and checks read."""
        defaults = {each.name: each for each in fields(self) if each.name in _BEFORE_LOSS}
        empty = {name: None if each.default is None else each.default_factory() for name, each in defaults.items()}
        return replace(self, **empty)

    def micro_batches(self, n: int) -> list["Rollout"]:
        """`n` parts of equal size, in order."""
        size = len(self) // n
        return [self.select(range(start, start + size)) for start in range(0, n * size, size)]

    def groups(self, size: int) -> list["Rollout"]:
        """One rollout per group of `size` completions, without columns that are padding in the whole group."""
        parts = [self.select(range(start, start + size)) for start in range(0, len(self), size)]
        names = self.per_token_fields()
        return [part.resized(max(int(part.completion_mask.sum(1).max()), 1), names) for part in parts]

    def per_token_fields(self) -> set[str]:
        """Names of the tensors with a value per token, which advantages and ratios may or may not have."""
        width = self.completion_ids.size(1)
        maybe = {name: self.get(name) for name in ("advantages", "importance_sampling_ratio")}
        found = {name for name, value in maybe.items() if value is not None and value.shape[1:] == (width,)}
        return found | {name for name in _PER_TOKEN if name in self}

    def resized(self, width: int, names: set[str]) -> "Rollout":
        """With per-token tensors padded on the right, or cut, to a number of columns."""
        more = width - self.completion_ids.size(1)
        fills = {**_PER_TOKEN, "completion_ids": self.pad_token_id}
        given = {name: getattr(self, name) for name in names}
        after = {name: (0, 0) * (value.dim() - 2) for name, value in given.items()}  # of dimensions behind the tokens
        changed = {name: F.pad(given[name], (*after[name], 0, more), value=fills.get(name, 0)) for name in names}
        return replace(self, **changed)

    def to(self, device: torch.device | str, copy: bool = False) -> "Rollout":
        """With tensors on a device; prompts stay on the CPU."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        moved = {k: v.to(device, copy=copy) for k, v in values.items() if isinstance(v, torch.Tensor)}
        return replace(self, **moved)

    def with_copied_prompts(self, on_device: bool = True) -> "Rollout":
        """With prompts that share no cached masks, nor what only generation needs, with those of this one."""
        copies: dict[int, EncodedPrompt] = {}

        def copied(prompt: EncodedPrompt) -> EncodedPrompt:
            fresh: dict[str, Any] = {"mask_cache": {}} if on_device else {"mask_cache": {}, "on_device": {}}
            if isinstance(prompt, Conversation):
                return replace(prompt, prompt=copied(prompt.prompt), later=copied(prompt.later), **fresh)
            return copies.setdefault(id(prompt), replace(prompt, decoded=(), **fresh))

        names = ("prompts", "view_prompts", "teacher_prompts")
        return replace(self, **{name: [copied(prompt) for prompt in getattr(self, name)] for name in names})

    def release(self) -> None:
        """Frees what forwards kept of the media, once no more of them come."""
        for prompt in [*self.prompts, *self.view_prompts, *self.teacher_prompts]:
            for part in prompt.parts:
                part.on_device.clear()


def join_rollouts(rollouts: Sequence[Rollout], device: torch.device) -> Rollout:
    """
    Concatenates rollouts with the same fields, whenever they were sampled. The caller sets `group_ids` and
    `num_items_in_batch`, which count over the whole batch.
    """
    width = max(each.completion_ids.size(1) for each in rollouts)
    names = set.intersection(*(each.per_token_fields() for each in rollouts))
    parts = [each.with_copied_prompts().to(device).resized(width, names) for each in rollouts]
    changed: dict[str, Any] = {}
    for name in (each.name for each in fields(Rollout)):
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], torch.Tensor) and values[0].dim() > 0:
            changed[name] = torch.cat(values)
        elif isinstance(values[0], list) and len(values[0]) == len(parts[0]):
            changed[name] = sum(values, [])
    return replace(parts[0], **changed)
