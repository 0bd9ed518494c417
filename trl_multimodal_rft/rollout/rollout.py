# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rollouts: the completions of a generation batch, and the results of all stages of a training step."""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.nn.functional as F

from ..encoding.conversations import Contexts, Conversation
from ..encoding.join import content_digest
from ..encoding.prompts import EncodedPrompt
from ..engines.in_flight import EarlyRewards
from ..forward.prompt_groups import left_pad, rows_of, to_device
from ..forward.scores import ScoreRequest
from ..policy import Completions


def _per_token(fill: float = 0.0) -> Any:
    """Returns a field with a value per token, `None` by default, and its `fill` of padding."""
    return field(default=None, metadata={"fill": fill})


@dataclass(eq=False)
class _Part:
    """Part of a rollout: a dataclass of tensors and lists with a row per completion, and of further parts."""

    def walk_fields(self) -> Iterator[tuple[Field, Any]]:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, _Part):
                yield from value.walk_fields()
            yield spec, value

    def map_values(self, change: Callable[[Field, Any], Any]) -> Self:
        values = {spec: getattr(self, spec.name) for spec in fields(self)}
        new_values = {
            spec.name: value.map_values(change) if isinstance(value, _Part) else change(spec, value)
            for spec, value in values.items()
        }
        return replace(self, **new_values)


AnyPart = TypeVar("AnyPart", bound=_Part)
# A tensor that is `None` until a stage computes it, and stays `None` for methods whose stages and losses don't read it
MethodTensor = Any


@dataclass(eq=False)
class Flight(_Part):
    """Weight versions and early rewards of completions that were sampled asynchronously."""

    versions: torch.Tensor  # (N, 2), versions of the weights by which servers sampled the first and the last token
    early_rewards: EarlyRewards | None = None  # rewards by functions that were called when completions arrived


class Turn(NamedTuple):
    """Tokens of a completion that were sampled in one turn."""

    start: int  # index of the first token
    stop: int  # index after the last token
    messages: list[dict[str, Any]]  # the prompt, or the tool results, that the turn answers

    @property
    def state(self) -> str:
        """Digest of the messages that the turn answers, equal for equal messages and media."""
        return content_digest(self.messages)


@dataclass(eq=False)
class Source(_Part):
    """Rows, prompts and texts of completions, for rewards, logs and checks. The loss doesn't read them."""

    rows: list[dict[str, Any]] = field(default_factory=list)  # as reward functions get them
    row_indices: list[int] = field(default_factory=list)  # row indices in the dataset
    messages: list[Any] = field(default_factory=list)  # prompts with references to media
    environments: list[Any] | None = None
    tools: list[dict[str, Callable]] = field(default_factory=list)  # of each completion, by name
    failures: list[Exception | None] = field(default_factory=list)  # errors that ended environments, or `None`
    whole_groups: bool = True  # whether each group is on a single rank
    batch_index: int | None = None  # index of the batch in the run, if it comes from the training loader
    n_counted: int | None = None  # see [`Prompted.n_counted`]
    ids: list[list[int]] = field(default_factory=list)  # token ids of each completion, without padding
    ended: list[bool] = field(default_factory=list)  # whether each completion ended and wasn't cut off
    completions: list[Any] = field(default_factory=list)  # texts, or messages
    sounds: list[dict[str, Any] | None] | None = None  # of completions, with a [`~rollout.speech.SpeechDecoder`]
    turns: list[list[Turn]] = field(default_factory=list)  # of each completion, where tools are called
    # Messages of each context that replaced a completion's prompt, where tools are called
    contexts: list[list[list[dict[str, Any]]]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)  # further columns that `rollout_func` returned
    flight: Flight | None = None
    from_view: MethodTensor = None  # (N,), whether a completion was sampled from a view of its prompt
    # A rollout that was sampled under `contrast_view` and isn't trained on. The list has, for each of that
    # rollout's completions, the batch index of a completion in this rollout: of the same prompt, without the view.
    contrast: "tuple[Prompted, list[int]] | None" = None

    def template_tools(self, index: int) -> dict[str, Any]:
        """Returns the chat template's argument for the tools of a completion, if there are environments."""
        return {} if self.environments is None else {"tools": [*self.tools[index].values()] or None}

    @property
    def sampled_turns(self) -> list[list[Turn]]:
        """Turns of each completion that have tokens. Without tools, a completion is one turn."""
        whole = zip(self.ids, self.messages, strict=True)
        turns = self.turns or [[Turn(0, len(ids), messages)] for ids, messages in whole]
        return [[turn for turn in turn_list if turn.stop > turn.start] for turn_list in turns]


@dataclass(frozen=True, eq=False)
class Rewards:
    """Rewards of completions."""

    # Of this rank, each completion's rewards in the order of the functions, `None` for those that aren't trained on
    by_completion: list[list[float | None]]
    logged: torch.Tensor  # (all ranks' N, number of functions)
    per_func: torch.Tensor  # `logged`, with NaN for functions that aren't trained on
    bonus: MethodTensor = None  # (all ranks' N,), bonus by `contrast_view`, added to the sum of rewards


@dataclass(eq=False)
class RewardValues(_Part):
    """What updates and the exchange of groups read of rewards."""

    has_signal: MethodTensor = None  # (N,), whether the group has signal
    causes: MethodTensor = None  # (N,), what took the signal from a completion, see `algorithms/signal.py`
    # (N,), -1 or 1 where the group's mean reward is at the lower or upper bound of the wanted range, or beyond; else 0
    out_of_range: MethodTensor = None
    scorable: MethodTensor = None  # (N,), 0 where no reward function applies


@dataclass(eq=False)
class ViewScores(_Part):
    """Prompts under the view in the loss, and the dependency of tokens on the media that the view replaces."""

    prompts: list[EncodedPrompt] = field(default_factory=list)  # under the view; empty without a view
    replaces: MethodTensor = None  # (N,), whether the view replaces media of the prompt
    dependency: MethodTensor = _per_token()  # (N, C), how far tokens depend on the replaced media


@dataclass(eq=False)
class Values(_Part):
    """Values of a critic, and the returns that the critic learns."""

    old: MethodTensor = _per_token()  # (N, C), by the critic before the update
    returns: MethodTensor = _per_token()  # (N, C)


@dataclass(eq=False)
class TeacherScores(_Part):
    """Prompts of a teacher, and scores by a teacher on a server or by one of another tokenizer."""

    prompts: list[EncodedPrompt] = field(default_factory=list)  # empty if they equal the student's
    index: MethodTensor = None  # (N,), of the completion's teacher among several, -1 without a teacher
    ids: MethodTensor = _per_token(0)  # (N, C, K), the most likely tokens
    logps: MethodTensor = _per_token()  # (N, C, K), their log-probabilities
    # (N, C), index of each token's span of text in its completion, -1 in none; `None` if all teachers share the
    # student's tokens, each of which is a span
    spans: MethodTensor = _per_token(-1)
    span_logps: MethodTensor = _per_token()  # (N, C), log-probability of each token's span


@dataclass(eq=False)
class TokenChoice(_Part):
    """Choice of the tokens that an update trains on."""

    entropies: MethodTensor = _per_token()  # (N, C), under the sampling policy
    weights: MethodTensor = _per_token()  # (N, C), weights in the policy loss; None if all are 1
    # Whether the update skips completions, because they have no gradient; empty if none
    without_gradient: list[bool] = field(default_factory=list)


class Drawn(NamedTuple):
    """What a sampler returns for a batch of prompts."""

    ids: list[list[int]]  # token ids of each completion
    logps: list[list[float | None]] | None  # of the sampler; `None` if the policy itself samples
    mask: list[list[int]] | None = None  # 0 on tokens of tool results; `None` without tools
    flight: Flight | None = None
    from_view: MethodTensor = None  # (N,), whether a completion was sampled from a view of its prompt
    contrast: "tuple[Prompted, list[int]] | None" = None  # see [`Source`]


PARTS = (Flight, Source, RewardValues, ViewScores, Values, TeacherScores, TokenChoice)


@dataclass(eq=False)
class Prompted(_Part):
    """Prompts of a batch on this rank, one per completion, before the completions are sampled."""

    prompts: list[EncodedPrompt]  # each completion's prompt; completions of a group hold the same object
    group_ids: torch.Tensor  # (N,), index of each completion's group among the groups of all ranks
    pad_token_id: int
    source: Source = field(default_factory=Source)
    step: int = 0  # optimizer step at which the completions are sampled

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def n_counted(self) -> int:
        """Number of the first completions that metrics count. Others repeat another rank's in an evaluation."""
        n_counted = self.source.n_counted
        return len(self) if n_counted is None else min(n_counted, len(self))

    def select(self, indices: Sequence[int]) -> Self:
        """
        Returns the completions at batch indices. A tensor or list with as many entries as completions has one entry
        per completion. All other values, such as an empty list, stay.
        """
        indices = list(indices)
        n = len(self)

        def pick(_: Field, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == n:
                return rows_of(value, indices)
            return [value[i] for i in indices] if isinstance(value, list) and len(value) == n else value

        return self.map_values(pick)

    def parts(self, size: int) -> list[range]:
        """Returns ranges of at most `size` batch indices, which cover all completions."""
        return [range(start, min(start + size, len(self))) for start in range(0, len(self), size)]


@dataclass(eq=False, kw_only=True)
class Rollout(Prompted):
    """
    Completions of a generation batch, or of a micro-batch, on this rank: `N` completions of at most `C` tokens.

    Fields that losses of TRL read have TRL's names, see [`TRLInputs`].
    """

    completion_ids: torch.Tensor = field(metadata={"fill": None})  # (N, C), padded on the right with `pad_token_id`
    # (N, C), 0 on padding, and on truncated completions that are masked
    completion_mask: torch.Tensor = field(metadata={"fill": 0})
    n_sampled: MethodTensor = None  # (N,), sampled tokens, also those of completions that are masked
    num_items_in_batch: MethodTensor = None  # (), tokens in the loss over all ranks; `None` without a loss
    packed: bool = False  # whether completions share a forward of their prompt
    tool_mask: MethodTensor = _per_token(1)  # (N, C), 0 on results of tools; None if every token was sampled
    sampling_per_token_logps: MethodTensor = _per_token()  # (N, C), NaN where the engine returned none
    old_per_token_logps: MethodTensor = _per_token()  # (N, C)
    ref_per_token_logps: MethodTensor = _per_token()  # (N, C)
    importance_sampling_ratio: MethodTensor = _per_token()  # (N, C) or (N, 1), of the policy to the engine
    advantages: MethodTensor = _per_token()  # (N,) or (N, C)
    rewards: RewardValues = field(default_factory=RewardValues)
    view: ViewScores = field(default_factory=ViewScores)
    values: Values = field(default_factory=Values)
    teacher: TeacherScores = field(default_factory=TeacherScores)
    tokens: TokenChoice = field(default_factory=TokenChoice)

    @property
    def completions(self) -> Completions:
        """First fields of a [`~forward.scores.ScoreRequest`]: prompts, ids and mask."""
        return self.prompts, self.completion_ids, self.completion_mask

    def request(self, **options: Any) -> ScoreRequest:
        """Returns a request for scores of the completions. `options` are its other fields."""
        return ScoreRequest(*self.completions, self.packed, **options)

    @property
    def loss_mask(self) -> torch.Tensor:
        """Mask of the tokens in the loss, `(N, C)`."""
        return self.completion_mask if self.tool_mask is None else self.completion_mask * self.tool_mask

    @property
    def rows_to_score(self) -> list[int] | None:
        """Batch indices of the completions that have a gradient, or `None` if all have a gradient."""
        is_skipped = self.tokens.without_gradient
        return [i for i, skipped in enumerate(is_skipped) if not skipped] if any(is_skipped) else None

    @property
    def scored_mask(self) -> torch.Tensor:
        """The loss mask, 0 on completions that the update skips, `(N, C)`."""
        mask = self.loss_mask
        if self.rows_to_score is None:
            return mask
        return mask * to_device(~torch.tensor(self.tokens.without_gradient), mask.device)[:, None]

    @property
    def prompt_ids(self) -> torch.Tensor:
        """Prompts padded on the left, `(N, P)`."""
        return left_pad(self.prompts, self.pad_token_id)["input_ids"].to(self.completion_ids.device)

    @property
    def prompt_mask(self) -> torch.Tensor:
        """Attention mask of `prompt_ids`, `(N, P)`."""
        return left_pad(self.prompts, self.pad_token_id)["attention_mask"].to(self.completion_ids.device)

    @property
    def weighted_advantages(self) -> MethodTensor:
        """Advantages times the ratio of the policy to the engine of each completion, `(N,)`, as RLOO reads them."""
        ratios = self.importance_sampling_ratio
        return self.advantages if ratios is None else self.advantages * ratios[:, 0]

    @property
    def old_logps(self) -> MethodTensor:
        """Log-probabilities of whole completions, `(N,)`, as TRL's RLOO reads them."""
        return None if self.old_per_token_logps is None else (self.old_per_token_logps * self.loss_mask).sum(1)

    def masked(self, mask: torch.Tensor) -> "Rollout":
        """Returns a copy without the tokens where `mask`, `(N, 1)` or `(N, C)`, is 0."""
        old = self.old_per_token_logps
        ref = self.ref_per_token_logps
        return replace(
            self,
            completion_mask=self.completion_mask * mask,
            # Masked tokens have log-probabilities of 0
            old_per_token_logps=None if old is None else old * mask,
            ref_per_token_logps=None if ref is None else ref * mask,
        )

    def for_loss(self) -> "Rollout":
        """Returns a copy without the fields that only rewards, logs and checks read."""
        return replace(self, source=Source(n_counted=self.source.n_counted))

    def micro_batches(self, n: int) -> list["Rollout"]:
        """Returns `n` parts of equal size, in order."""
        size = len(self) // n
        return [self.select(range(start, start + size)) for start in range(0, n * size, size)]

    def groups(self, size: int) -> list["Rollout"]:
        """
        Returns one rollout per group of `size` completions. Per-token tensors are cut to the group's longest
        completion in the mask, but keep at least one column.
        """
        parts = map(self.select, self.parts(size))
        token_fields = self.token_fields()
        return [part.resized(max(int(part.completion_mask.sum(1).max()), 1), token_fields) for part in parts]

    def token_fields(self) -> set[Field]:
        """Returns the fields with a value per token. Advantages and ratios may have a value per completion instead."""
        width = self.completion_ids.size(1)
        values = {spec: value for spec, value in self.walk_fields() if "fill" in spec.metadata and value is not None}
        return {spec for spec, value in values.items() if value.dim() > 1 and value.size(1) == width}

    def resized(self, width: int, token_fields: set[Field]) -> "Rollout":
        """Returns a copy whose per-token tensors are padded on the right, or cut, to `width` columns."""
        n_extra = width - self.completion_ids.size(1)

        def pad(spec: Field, value: Any) -> Any:
            if spec not in token_fields:
                return value
            fill = spec.metadata["fill"]
            no_padding = (0, 0) * (value.dim() - 2)  # of the dimensions after the dimension of tokens
            return F.pad(value, (*no_padding, 0, n_extra), value=self.pad_token_id if fill is None else fill)

        return self.map_values(pad)

    def to(self, device: torch.device | str, copy: bool = False) -> "Rollout":
        """Returns a copy with tensors on a device. Prompts stay on the CPU."""
        return self.map_values(
            lambda _, value: value.to(device, copy=copy) if isinstance(value, torch.Tensor) else value
        )

    def with_copied_prompts(self, on_device: bool = True) -> "Rollout":
        """
        Returns a copy whose prompts have new mask caches and no decoded media. With `on_device`, the copied prompts
        share the originals' media on devices.
        """
        copies: dict[int, EncodedPrompt] = {}

        def copy_prompt(prompt: EncodedPrompt) -> EncodedPrompt:
            new_caches: dict[str, Any] = {"mask_cache": {}} if on_device else {"mask_cache": {}, "on_device": {}}
            if isinstance(prompt, Contexts):
                return replace(prompt, prompts=[*map(copy_prompt, prompt.prompts)], **new_caches)
            if isinstance(prompt, Conversation):
                return replace(
                    prompt, prompt=copy_prompt(prompt.prompt), later=copy_prompt(prompt.later), **new_caches
                )
            return copies.setdefault(id(prompt), replace(prompt, decoded=(), **new_caches))

        return self.map_values(
            lambda spec, value: [copy_prompt(prompt) for prompt in value] if spec.name == "prompts" else value
        )

    def release_media(self) -> None:
        """Frees the media that forwards kept on devices, after the last forward."""
        for prompt in [*self.prompts, *self.view.prompts, *self.teacher.prompts]:
            for part in prompt.parts:
                part.on_device.clear()


def join_rollouts(rollouts: Sequence[Rollout], device: torch.device) -> Rollout:
    """
    Concatenates rollouts with the same fields, which may have been sampled at different steps. The caller sets
    `group_ids` and `num_items_in_batch`, which count over the whole batch.
    """
    width = max(rollout.completion_ids.size(1) for rollout in rollouts)
    # In a rollout with one column, a value per completion looks like a value per token, so all rollouts must agree
    token_fields = set.intersection(*(rollout.token_fields() for rollout in rollouts))
    return _join(
        [rollout.with_copied_prompts().to(device).resized(width, token_fields) for rollout in rollouts],
        len(rollouts[0]),
    )


# Fields of the account of the signal, which rollouts from older checkpoints lack
_OF_ACCOUNT = ("n_sampled", "causes")


def _join(parts: Sequence[AnyPart], n: int) -> AnyPart:
    """
    Concatenates parts of rollouts. The first rollout has `n` completions. Lists are concatenated only if the first
    rollout's list has `n` entries, one per completion.
    """
    joined: dict[str, Any] = {}
    for name in (spec.name for spec in fields(parts[0])):
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], _Part):
            joined[name] = _join(values, n)
        elif name in _OF_ACCOUNT and any(value is None for value in values):
            joined[name] = None
        elif isinstance(values[0], torch.Tensor) and values[0].dim() > 0:
            joined[name] = torch.cat(values)
        elif isinstance(values[0], list) and len(values[0]) == n:
            joined[name] = sum(values, [])
    return replace(parts[0], **joined)


_TRL_NAMES = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages", "old_logps")
_TRL_NAMES += ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")
_TRL_NAMES += ("num_items_in_batch",)


class TRLInputs(MutableMapping[str, torch.Tensor]):
    """
    Micro-batch in the form of the dictionary that TRL's `_compute_loss` reads and writes. If the method
    `weighs_advantages`, ratios to the engine are in the advantages.
    """

    def __init__(self, rollout: Rollout, weighs_advantages: bool = False):
        self.rollout = rollout
        self._weighs_advantages = weighs_advantages

    def __getitem__(self, name: str) -> torch.Tensor:
        value = getattr(self.rollout, name) if name in _TRL_NAMES else None
        if name == "advantages" and self._weighs_advantages:
            value = self.rollout.weighted_advantages
        if value is None:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        if name not in _TRL_NAMES:
            raise KeyError(name)
        setattr(self.rollout, name, value)

    def __delitem__(self, name: str) -> None:
        setattr(self.rollout, name, None)

    def __iter__(self) -> Iterator[str]:
        return (name for name in _TRL_NAMES if getattr(self.rollout, name) is not None)

    def __len__(self) -> int:
        return len([*self])
