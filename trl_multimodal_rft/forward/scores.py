# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Requests for scores of completions, the scores as tensors, and completions split by context."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..algorithms.metrics import Metric, average
from ..encoding.conversations import conversation, encode_prefix
from ..encoding.prompts import EncodedPrompt
from ..models.critic import Critic, ValueHead
from .divergence import SpanTarget, Target, Targets
from .layout import States
from .masks import linear_masks
from .prompt_groups import rows_of, to_device


@dataclass(eq=False)
class ContextRows:
    """
    `N` completions of at most `C` tokens, split into `M` rows of at most `L` tokens, one row per context. A completion
    has several contexts if its prompt was rewritten between turns. For example, completion 0 has 3 tokens after its
    first context and 2 after its second, completion 1 has 4 tokens: `lengths` is `[[3, 2], [4]]`, `M` 3 and `L` 4.
    """

    prompts: list[EncodedPrompt]  # the context of each row
    lengths: list[list[int]]  # per completion, the number of its tokens after each of its contexts
    width: int  # C, the padded length of completions

    def cut(self, values: torch.Tensor) -> torch.Tensor:
        """Splits values of the completions' tokens `(N, C, ...)` into rows `(M, L, ...)`, 0 on padding."""
        parts = [
            row[: sum(context_lengths)].split(context_lengths)
            for row, context_lengths in zip(values, self.lengths, strict=True)
        ]
        return pad_sequence([*chain.from_iterable(parts)], batch_first=True)

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """Joins values of rows `(M, L, ...)` to values of completions `(N, C, ...)`, the reverse of [`cut`]."""
        parts = [row[:n] for row, n in zip(values, chain.from_iterable(self.lengths), strict=True)]
        rows = pad_sequence([*torch.cat(parts).split([*map(sum, self.lengths)])], batch_first=True)
        # Padding of the second dimension to C. `F.pad` takes pairs of paddings from the last dimension on.
        return F.pad(rows, (*(0, 0) * (rows.dim() - 2), 0, self.width - rows.size(1)))

    def rows_of_completions(self, chosen: set[int]) -> list[int]:
        """Returns the rows of the completions with these batch indices."""
        completion_of_row: list[int] = []
        for i, lengths in enumerate(self.lengths):
            completion_of_row += [i] * len(lengths)
        return [row for row, i in enumerate(completion_of_row) if i in chosen]


def context_rows(prompts: Sequence[EncodedPrompt], width: int) -> ContextRows | None:
    """Returns the rows of completions padded to a `width`, or `None` if each completion has one context."""
    contexts = [*chain.from_iterable(prompt.contexts for prompt in prompts)]
    lengths = [prompt.lengths_by_context(width) for prompt in prompts]
    return None if len(contexts) == len(prompts) else ContextRows(contexts, lengths, width)


def split_lengths(prompts: Sequence[EncodedPrompt], lengths: Sequence[int]) -> tuple[list[EncodedPrompt], list[int]]:
    """Returns the contexts of completions of these `lengths`, and the number of tokens after each context."""
    counts = [prompt.lengths_by_context(length) for prompt, length in zip(prompts, lengths, strict=True)]
    contexts = chain.from_iterable(prompt.contexts for prompt in prompts)
    return [*contexts], [*chain.from_iterable(counts)]


def with_media(
    model: PreTrainedModel,
    prompt: EncodedPrompt,
    media_turns: Sequence[EncodedPrompt],
    prompt_and_completion: EncodedPrompt,
) -> EncodedPrompt:
    """
    Returns the prompt for scoring a completion with media: `media_turns` are its turns that hold some, and
    `prompt_and_completion` is encoded as one sequence by [`encode_prefix`], up to the last of these turns or a later
    one.
    """
    if not media_turns:
        return prompt
    # If media after the prompt change the prompt's positions or masks, completions can't share its forward
    positions = prompt_and_completion.position_ids[..., : len(prompt)]
    is_same = torch.equal(positions, prompt.position_ids.expand_as(positions))
    is_causal = is_same and all(mask is None for mask in linear_masks(model, prompt_and_completion, 0).values())
    return conversation(prompt, media_turns, prompt_and_completion, is_causal)


def with_answer(model: PreTrainedModel, prompt: EncodedPrompt, completion: EncodedPrompt | None) -> EncodedPrompt:
    """Returns the prompt for scoring a completion with media, or `prompt` itself if `completion` is `None`."""
    if completion is None:
        return prompt
    prompt_and_completion = encode_prefix(prompt, completion.input_ids.tolist(), [(0, completion)], model)
    return with_media(model, prompt, [completion], prompt_and_completion)


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """
    Completions, the scores to compute for them, and settings of the forwards.

    Args:
        prompts (`Sequence[EncodedPrompt]`):
            Each completion's prompt, length `B`; completions of a group share one object.
        ids, mask (`torch.Tensor`):
            Right-padded completions, and 1 on their tokens, shape `(B, C)`.
        packed (`bool`, *optional*, defaults to `True`):
            Whether prompts are forwarded once for all their completions, unless the [`~policy.PolicyForward`] that
            scores the request pads rows (`Fallbacks.packing`).
        logps, hidden (`bool`, *optional*, default to `True` and `False`):
            Whether to compute log-probabilities and entropies, and whether to return the LM head's inputs,
            `(B, C, H)` with hidden size `H`, respectively.
        compute_aux_loss (`bool`, *optional*, defaults to `False`):
            Whether to compute the load-balancing loss of a mixture of experts, in which a prompt counts once for each
            of its completions.
        whole (`bool`, *optional*, defaults to `False`):
            Whether `prompts` are whole sequences. `ids` are then the next tokens at each position of a sequence, and
            `mask` is 1 where they are scored.
        critic ([`~models.Critic`] or [`~models.ValueHead`], *optional*):
            Critic that computes values. For values alone, a separate critic needs no forward of the policy.
        target ([`~forward.divergence.Target`] or [`~forward.divergence.Targets`], *optional*):
            Target to compare distributions of tokens with, or a [`~forward.divergence.SpanTarget`] to compare sampled
            tokens with. The scores are then divergences and entropies.
        supervised ([`ScoreRequest`], *optional*):
            Request for supervised completions. Their log-probabilities are computed in the same forward of the
            wrapped model.
        rows (`Sequence[int]`, *optional*):
            Batch indices of the completions to forward. Other completions have scores of 0.
        isolate, min_forwards (`str`, `int`, *optional*, default to `None` and `1`):
            Prompts that get separate forwards: `"media"` separates prompts whose media would give other features if
            they were encoded together, see [`~forward.prompt_groups.split_samples`]; `"prompt"` separates all of them;
            by default, all share one forward. With `isolate`, at least `min_forwards` forwards run, and surplus
            forwards have weight 0.
        logits_temperature (`float`, *optional*):
            Temperature of log-probabilities that are computed from the model's logits, which are then in memory for
            all tokens. By default, the fused head computes them. The next two options need a temperature.
        logit_bias (`dict[int, float]`, *optional*):
            Biases to add to logits, by token.
        extra_outputs (`Collection[str]`, *optional*, defaults to `()`):
            Fields of TRL's `FusedCausalLMOutput` to compute in addition.
        states (`dict`, *optional*):
            [`~forward.logprobs.prompt_states`] of a single prompt, so that only its completions are forwarded.
    """

    prompts: Sequence[EncodedPrompt]
    ids: torch.Tensor
    mask: torch.Tensor
    packed: bool = True
    logps: bool = True
    hidden: bool = False
    compute_aux_loss: bool = False
    whole: bool = False
    critic: Critic | ValueHead | None = None
    target: Target | SpanTarget | Targets | None = None
    supervised: "ScoreRequest | None" = None
    rows: Sequence[int] | None = None
    isolate: Literal["media", "prompt"] | None = None
    min_forwards: int = 1
    logits_temperature: float | None = None
    logit_bias: dict[int, float] | None = None
    extra_outputs: Collection[str] = ()
    states: States | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def needs_policy(self) -> bool:
        """`False` if the values of a separate critic are the only scores."""
        return self.logps or self.hidden or self.target is not None or not isinstance(self.critic, Critic)

    def select(self, index: Sequence[int]) -> "ScoreRequest":
        """
        Chooses completions.

        Args:
            index (`Sequence[int]`):
                Batch indices of the completions.

        Returns:
            [`ScoreRequest`]: The request for these completions, in their order.
        """
        prompts = [self.prompts[i] for i in index]
        return replace(self._map_rows(prompts, lambda values: rows_of(values, index)), rows=None)

    def with_dummies(self, dummies: Sequence[EncodedPrompt]) -> "ScoreRequest":
        """
        Adds dummy prompts, which have no completion and don't affect the other prompts.

        Args:
            dummies (`Sequence[EncodedPrompt]`):
                Prompts to add at the end.

        Returns:
            [`ScoreRequest`]: The request with these prompts, without scores of their tokens.
        """
        if not dummies:
            return self

        def pad_rows(values: torch.Tensor) -> torch.Tensor:
            return F.pad(values, (*(0, 0) * (values.dim() - 1), 0, len(dummies)))

        return self._map_rows([*self.prompts, *dummies], pad_rows)

    def by_context(self, contexts: ContextRows) -> "ScoreRequest":
        """
        Splits completions whose contexts were rewritten.

        Args:
            contexts ([`~forward.scores.ContextRows`]):
                Rows of the completions, one for each context.

        Returns:
            [`ScoreRequest`]: The request for these rows.
        """
        rows = None if self.rows is None else contexts.rows_of_completions({*self.rows})
        return replace(self._map_rows(contexts.prompts, contexts.cut), rows=rows)

    def _map_rows(
        self, prompts: Sequence[EncodedPrompt], change: Callable[[torch.Tensor], torch.Tensor]
    ) -> "ScoreRequest":
        target = None if self.target is None else self.target.map(change)
        return replace(self, prompts=prompts, ids=change(self.ids), mask=change(self.mask), target=target)


# `None` for a missing score, with the type of a tensor, so that callers needn't assert that requested scores exist
_NONE = cast(torch.Tensor, None)


def _per_completion() -> torch.Tensor:
    return field(default=_NONE, metadata={"per_completion": True})


@dataclass
class Scores:
    """Scores of `B` completions of at most `C` tokens. Scores that weren't requested are `None`."""

    logps: torch.Tensor = _per_completion()  # log-probabilities of the tokens, `(B, C)`
    divergences: torch.Tensor = _per_completion()  # of the tokens' distributions from the target, `(B, C)`
    entropies: torch.Tensor = _per_completion()  # of the tokens' distributions, `(B, C)`
    values: torch.Tensor = _per_completion()  # of the states before each token, `(B, C)`
    top1: torch.Tensor = _per_completion()  # 1 where a token is the most likely one, `(B, C)`
    mean_logits: torch.Tensor = _per_completion()  # means over the vocabulary of the tokens' logits, `(B, C)`
    log_sum_sq_probs: torch.Tensor = _per_completion()  # logarithms of sums of squared probabilities, `(B, C)`
    hidden: torch.Tensor | None = _per_completion()  # last hidden states, which predict the tokens, `(B, C, H)`
    aux_loss: torch.Tensor = _NONE  # load-balancing loss of a mixture of experts, a scalar
    router: torch.Tensor = _NONE  # `router_statistics` of `E` experts, `(2, E)`, summed over parts of a batch
    supervised: torch.Tensor = _NONE  # log-probabilities of `ScoreRequest.supervised`
    deferred: "DeferredParts | None" = field(default=None, init=False)  # parts whose gradients are pending
    view: "Scores | None" = field(default=None, init=False)  # scores of the completions after prompts under a view

    def __post_init__(self):
        shapes = {name: tuple(value.shape[:2]) for name, value in self.tensors(per_completion=True).items()}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"scores of the same completions have different shapes: {shapes}")

    def tensors(self, per_completion: bool | None = None) -> dict[str, torch.Tensor]:
        """
        Returns the tensors that aren't `None`, by field. If `per_completion` is `True`, only tensors with a row per
        completion; if `False`, only tensors without such rows.
        """
        names = [spec.name for spec in fields(self) if spec.name not in ("deferred", "view")]
        names_per_completion = [spec.name for spec in fields(self) if "per_completion" in spec.metadata]
        if per_completion is not None:
            names = [name for name in names if (name in names_per_completion) == per_completion]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def map(self, function: Callable) -> "Scores":
        """Returns scores with a function applied to each tensor, without `deferred` and `view`."""
        return Scores(**{name: function(value) for name, value in self.tensors().items()})

    def rows(self, index: slice | Sequence[int]) -> "Scores":
        """Returns scores of some completions; fields without a row per completion stay."""
        chosen = {name: rows_of(value, index) for name, value in self.tensors(per_completion=True).items()}
        return Scores(**chosen, **self.tensors(per_completion=False))

    def scatter_rows(self, indices: Sequence[int], n: int) -> "Scores":
        """
        Returns scores of `n` completions: the first `len(indices)` rows, moved to `indices`, and 0 elsewhere. Further
        rows, of dummies, are dropped. The rows `[a, b, dummy]` with `indices=[2, 0]` and `n=3` become `[b, 0, a]`.
        """

        def scatter(values: torch.Tensor) -> torch.Tensor:
            index = to_device(torch.tensor(indices, dtype=torch.long), values.device)
            return values.new_zeros(n, *values.shape[1:]).index_copy(0, index, values[: len(indices)])

        return self.map_rows(scatter)

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Scores":
        """Applies a differentiable function to each tensor with a row per completion. Keeps `deferred`, not `view`."""
        results = {name: function(value) for name, value in self.tensors(per_completion=True).items()}
        scores = Scores(**results, **self.tensors(per_completion=False))
        scores.deferred = self.deferred
        return scores

    @classmethod
    def join(cls, parts: Sequence["Scores"], indices: Sequence[Sequence[int]]) -> "Scores":
        """
        Joins scores of parts of a batch in the order of the batch. `indices` holds the batch indices of each part.
        `supervised` is that of the first part with supervised completions. Router statistics are summed, and the
        caller computes `aux_loss` from the summed router statistics.
        """
        of_parts = [part.tensors(per_completion=True) for part in parts]
        order = [*chain.from_iterable(indices)]
        tensors: dict[str, torch.Tensor] = {name: torch.cat([part[name] for part in of_parts]) for name in of_parts[0]}
        joined = cls(**tensors)
        if order != sorted(order):  # entry `i` of the argsort below is the row of batch index `i`
            joined = joined.rows(sorted(range(len(order)), key=order.__getitem__))
        routers = [part.router for part in parts if part.router is not None]
        joined.router = torch.stack(routers).sum(0) if routers else _NONE
        joined.supervised = next((part.supervised for part in parts if part.supervised is not None), _NONE)
        return joined


def router_statistics(router_logits: Sequence[torch.Tensor], top_k: int, weights: torch.Tensor) -> torch.Tensor:
    """
    Returns the statistics of the load-balancing loss over all layers, `(2, E)`: how often each expert was chosen, and
    its summed probabilities; those of parts can be added. `router_logits` are `(N, E)` by layer; `weights` `(N,)`
    count the tokens.
    """
    weights = weights.reshape(-1, 1).float()
    statistics = []
    for logits in router_logits:
        probabilities = logits.reshape(len(weights), -1).to(weights.device).softmax(-1)
        chosen = torch.zeros_like(probabilities, dtype=torch.float32)
        chosen.scatter_(1, probabilities.topk(top_k).indices, 1.0)
        statistics.append(torch.stack([(chosen * weights).sum(0), (probabilities.float() * weights).sum(0)]))
    return torch.stack(statistics).sum(0)


def load_balancing_loss(router: torch.Tensor) -> torch.Tensor:
    """
    Computes the load-balancing loss of the [Switch Transformer](https://huggingface.co/papers/2101.03961), as in
    transformers, from [`router_statistics`] of a batch `(2, E)`.
    """
    chosen, probabilities = router
    # Tokens times layers, since the probabilities of a token sum to 1 in each layer
    n_routings = probabilities.detach().sum()
    return len(chosen) * (chosen * probabilities).sum() / n_routings**2


class DeferredParts:
    """
    Scores of the parts of a micro-batch, without activations. A loss is computed from [`joined`];
    [`backward_by_parts`] then runs each part again, with the same random numbers. All ranks run `n_parts` forwards for
    their collectives, and repeat the last part if they have fewer.
    """

    def __init__(self, score: Callable, parts: list[list[int]], n_parts: int, device: torch.device):
        start = time.perf_counter()
        self.score = score
        self.parts = parts + parts[-1:] * (n_parts - len(parts))
        self.n_local = len(parts)  # without surplus forwards
        self._device_random = None if device.type == "cpu" else torch.get_device_module(device)
        self._random_states = []
        self.outputs: list[Scores] = []
        for index, part in enumerate(self.parts):
            self._random_states.append(self._random_state())
            with torch.no_grad():
                scores = score(index, part)
            self.outputs.append(scores.map(_leaf))
        self.seconds = time.perf_counter() - start  # duration of these additional forwards

    @property
    def metrics(self) -> dict[str, Metric]:
        """Number of parts, and seconds of the additional forwards, of this rank."""
        return {"token_budget/parts": average(len(self.parts)), "token_budget/extra_time": average(self.seconds)}

    def joined(self) -> Scores:
        """Returns scores in the order of the batch, as one forward of the whole micro-batch would return them."""
        scores = Scores.join(self.outputs[: self.n_local], self.parts[: self.n_local])
        scores.deferred = self
        return scores

    def recompute(self, index: int) -> Scores:
        """Computes a part once more, with a gradient and the same random numbers, which no later draw repeats."""
        state = self._random_state()
        self._set_random_state(self._random_states[index])
        scores = self.score(index, self.parts[index])
        self._set_random_state(state)
        return scores

    def _random_state(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the states of the generators of the CPU and of the device."""
        return torch.get_rng_state(), self._device_random and self._device_random.get_rng_state()

    def _set_random_state(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        cpu, device = state
        torch.set_rng_state(cpu)
        if self._device_random is not None:
            self._device_random.set_rng_state(device)


def _leaf(value: torch.Tensor) -> torch.Tensor:
    """
    Detaches a score for the loss. A `backward()` that reaches the score raises an error, as the gradient would
    otherwise be lost silently.
    """

    def raise_error(leaf: torch.Tensor) -> None:
        raise lost_gradient_error("a score")

    leaf = value.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(raise_error)  # `torch.autograd.grad` doesn't call the hook
    return leaf


def lost_gradient_error(name: str) -> RuntimeError:
    """Returns the error for a loss whose gradient of a tensor would be lost under a token budget."""
    return RuntimeError(
        f"The gradient of {name} would be lost, as `max_tokens_per_microbatch` splits the forward of a micro-batch: "
        "compute the loss from one call of the trainer's `_score`, or call `backward_by_parts` with the scores' "
        "`deferred` in place of `backward()`, or set `max_tokens_per_microbatch=None`."
    )
