# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Divergences between the token distributions of two models, from the models' hidden states and LM heads."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from ..algorithms.span_divergence import span_divergence
from .autograd import Context
from .head import HeadRule, fused_scores, gather_weights


# Number of tokens per chunk. Computations without a kernel hold the logits `(tokens, V)` of one chunk at a time.
_TOKENS_AT_ONCE = 512

# Upper bound of the log-probability of all top tokens together, as in TRL, so that the probability of the other tokens
# stays above 0
_LARGEST_TOP_LOGP = -1e-7


class Head(NamedTuple):
    """An LM head from `H` to `V` tokens: weight `(V, H)`, bias `(V,)` or `None`, and the rule of its logits."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    rule: HeadRule


def head_of(model: PreTrainedModel, rule: HeadRule) -> Head:
    """Returns the LM head of an unwrapped model. Gathers FSDP2's shards; `gather_weights` gathers ZeRO-3's later."""
    head = cast(nn.Linear, model.get_output_embeddings())
    weight, bias = (
        parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for parameter in (head.weight, head.bias)
    )
    return Head(weight, bias, rule)


@dataclass(frozen=True)
class Target:
    """
    A teacher's distributions of completion tokens, for [`divergences`]: `hidden` and `head` for the whole vocabulary,
    or `ids` and `logps` of the `K` likeliest tokens. Shapes are for `B` completions of up to `C` tokens.
    """

    mask: torch.Tensor  # (B, C), 1 on tokens to compare
    student_rule: HeadRule
    beta: float = 1.0  # 0 for the forward KL, 1 for the reverse KL, else the generalized JSD
    temperature: float = 1.0
    hidden: torch.Tensor | None = None  # the teacher's last hidden states, (B, C, H_t)
    head: Head | None = None  # the teacher's LM head
    ids: torch.Tensor | None = None  # token ids, (B, C, K)
    logps: torch.Tensor | None = None  # log-probabilities of these tokens, (B, C, K)
    add_tail: bool = True  # whether all other tokens count as one token; else the K tokens are renormalized

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Target":
        """Applies a function to each tensor with a row per completion."""
        hidden, ids, logps = (
            None if value is None else function(value) for value in (self.hidden, self.ids, self.logps)
        )
        return replace(self, mask=function(self.mask), hidden=hidden, ids=ids, logps=logps)


@dataclass(frozen=True)
class SpanTarget:
    """A teacher's log-probabilities of spans of tokens, for [`~algorithms.span_divergence.span_divergence`]."""

    mask: torch.Tensor  # (B, C), 1 on tokens to compare, which are in spans
    student_rule: HeadRule
    ids: torch.Tensor  # the sampled tokens, (B, C)
    spans: torch.Tensor  # index of each token's span in its completion, -1 in none, (B, C)
    logps: torch.Tensor  # log-probability of each token's span, (B, C)
    temperature: float = 1.0

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "SpanTarget":
        """Applies a function to each tensor with a row per completion."""
        mask, ids, spans, logps = (function(value) for value in (self.mask, self.ids, self.spans, self.logps))
        return replace(self, mask=mask, ids=ids, spans=spans, logps=logps)


@dataclass(frozen=True)
class Targets:
    """Targets of several teachers, of which each compares other completions: no token is in the masks of two."""

    parts: tuple[Target | SpanTarget, ...]

    @property
    def student_rule(self) -> HeadRule:
        return self.parts[0].student_rule

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Targets":
        """Applies a function to each tensor with a row per completion."""
        return Targets(tuple(part.map(function) for part in self.parts))


def divergences(
    hidden: torch.Tensor, head: Head, target: Target | SpanTarget | Targets
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Computes the divergence of a student's token distributions from a target, and the student's entropy, in nats.

    With the distributions $p_s$ of the student and $p_t$ of the teacher, and $m = (1 - \\beta) p_s + \\beta p_t$, the
    divergence is $\\mathrm{KL}(p_t \\| p_s)$ for $\\beta = 0$, $\\mathrm{KL}(p_s \\| p_t)$ for $\\beta = 1$, else the
    generalized Jensen-Shannon divergence $\\beta \\mathrm{KL}(p_t \\| m) + (1 - \\beta) \\mathrm{KL}(p_s \\| m)$ of
    [On-Policy Distillation](https://huggingface.co/papers/2306.13649). From a [`SpanTarget`], it is estimated by the
    sampled tokens. The divergence has a gradient for the student alone, and the entropy has none. Logits of all tokens
    are never in memory at once.

    Shapes: `hidden` `(B, C, H)`; returns `(B, C)` twice, 0 where the target's mask is 0.
    """
    if isinstance(target, Targets):
        results = [divergences(hidden, head, part) for part in target.parts]
        return sum_of([result[0] for result in results]), sum_of([result[1] for result in results])
    if isinstance(target, SpanTarget):
        return _span_divergences(hidden, head, target)
    mask = target.mask.to(head.weight.device)
    index = mask.flatten().nonzero()[:, 0]  # `(N,)`: only tokens of the mask are computed

    def select(values: torch.Tensor) -> torch.Tensor:
        return values.to(head.weight.device).flatten(0, 1).index_select(0, index)

    if target.ids is not None and target.logps is not None:
        results = top_k_divergence(
            select(hidden),
            head,
            select(target.ids),
            select(target.logps),
            beta=target.beta,
            temperature=target.temperature,
            add_tail=target.add_tail,
        )
    else:
        assert target.hidden is not None and target.head is not None
        teacher = target.head
        results = ChunkedDivergenceFunction.apply(
            select(hidden),
            head.weight,
            head.bias,
            select(target.hidden),
            teacher.weight.to(head.weight.device),
            teacher.bias,
            target.beta,
            target.temperature,
            head.rule.scale,
            head.rule.softcap,
            teacher.rule.scale,
            teacher.rule.softcap,
        )
    # `results` are divergences and entropies `(N,)`
    outputs = [values.new_zeros(mask.numel()).index_copy(0, index, values).view(mask.shape) for values in results]
    return outputs[0], outputs[1].detach()


def _span_divergences(hidden: torch.Tensor, head: Head, target: SpanTarget) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [`divergences`] from the spans of a teacher of another tokenizer."""
    labels = target.ids.masked_fill(target.mask == 0, -100)
    names = ("log_probs", "entropy")
    scores = fused_scores(hidden, labels, None, head, head.rule, target.temperature, False, names)
    assert scores.log_probs is not None and scores.entropy is not None
    device = scores.log_probs.device
    spans = target.spans.masked_fill(target.mask == 0, -1).to(device)
    return span_divergence(scores.log_probs, target.logps.to(device), spans), scores.entropy.detach()


def sum_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of tensors of one shape."""
    return torch.stack(tensors).sum(0)


def top_k_tokens(
    hidden: torch.Tensor, head: Head, k: int, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the `k` most likely tokens of each distribution and their log-probabilities, without gradients.

    Shapes: `hidden` `(N, H)`; returns ids and log-probabilities `(N, k)`.
    """
    with torch.no_grad(), gather_weights(head.weight, head.bias):
        results = [_log_softmax(part, head, temperature).topk(k, dim=-1) for part in hidden.split(_TOKENS_AT_ONCE)]
    if not results:
        empty = hidden.new_zeros(0, k, dtype=torch.float32)
        return empty.long(), empty
    return torch.cat([result.indices for result in results]), torch.cat([result.values for result in results])


def top_k_divergence(
    hidden: torch.Tensor,
    head: Head,
    ids: torch.Tensor,
    logps: torch.Tensor,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    add_tail: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Computes [`divergences`] over a teacher's `K` likeliest tokens (`ids`, `logps` `(N, K)`, at the temperature
    already) for `hidden` `(N, H)`, and the student's entropy, `(N,)` twice. With `add_tail`, all others count as one
    token, which gives a lower bound; otherwise both are renormalized.
    """

    options = _Options(head.rule, beta, temperature, add_tail)
    return _TopKDivergence.apply(hidden, head.weight, head.bias, ids, logps, options)


class _Options(NamedTuple):
    rule: HeadRule
    beta: float
    temperature: float
    add_tail: bool


class _TopKDivergence(torch.autograd.Function):
    """Autograd function of [`top_k_divergence`]. The backward pass recomputes logits, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Context[_Options],
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ids: torch.Tensor,
        logps: torch.Tensor,
        options: _Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(hidden, weight, bias, ids, logps)
        ctx.settings = options
        divergence = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(divergence)
        with gather_weights(weight, bias):
            for chunk in _chunks(len(hidden)):
                head = Head(weight, bias, options.rule)
                divergence[chunk], all_logps = _chunk_divergences(
                    hidden[chunk], head, ids[chunk], logps[chunk], options
                )
                entropy[chunk] = -(all_logps.exp() * all_logps).sum(-1)
        ctx.mark_non_differentiable(entropy)
        return divergence, entropy

    @staticmethod
    def backward(ctx: Context[_Options], gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, ids, logps = ctx.saved_tensors
        with gather_weights(weight, bias), torch.enable_grad():
            hidden = hidden.detach().requires_grad_()
            weight = weight.detach().requires_grad_()
            bias = None if bias is None else bias.detach().requires_grad_()
            # Inputs with a gradient, and their gradients summed over the chunks
            inputs = zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
            leaves = [leaf for leaf, needs_gradient in inputs if needs_gradient and leaf is not None]
            totals = [torch.zeros_like(leaf) for leaf in leaves]
            for chunk in _chunks(len(hidden)):
                head = Head(weight, bias, ctx.settings.rule)
                divergence, _ = _chunk_divergences(hidden[chunk], head, ids[chunk], logps[chunk], ctx.settings)
                for total, part in zip(totals, torch.autograd.grad(divergence, leaves, gradient[chunk]), strict=True):
                    total += part
        remaining_totals = iter(totals)
        return (
            *(next(remaining_totals) if needs_gradient else None for needs_gradient in ctx.needs_input_grad[:3]),
            None,
            None,
            None,
        )


def _chunks(n: int) -> list[slice]:
    return [slice(start, start + _TOKENS_AT_ONCE) for start in range(0, n, _TOKENS_AT_ONCE)]


def _chunk_divergences(
    hidden: torch.Tensor, head: Head, ids: torch.Tensor, logps: torch.Tensor, options: _Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns divergences `(N,)` over the tokens `ids`, and the student's log-probabilities of all tokens `(N, V)`."""
    all_logps = _log_softmax(hidden, head, options.temperature)
    # `support` `(N, K)` is true on tokens that aren't left out
    support = logps > -math.inf
    teacher = logps.float()
    student = all_logps.gather(-1, ids).masked_fill(~support, -math.inf)
    if options.add_tail:
        support = torch.cat([support, torch.ones_like(support[:, :1])], dim=-1)
        student = _with_tail(student)
        teacher = _with_tail(teacher)
    else:
        student, teacher = (values - values.logsumexp(-1, keepdim=True) for values in (student, teacher))
    return _divergence(student, teacher, support, options.beta), all_logps


def _log_softmax(hidden: torch.Tensor, head: Head, temperature: float) -> torch.Tensor:
    """Returns `(N, V)` in float32, from states `(N, H)`."""
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if head.bias is None else head.bias.float()
        logits = head.rule.scale * torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)
    if head.rule.softcap is not None:
        logits = head.rule.softcap * torch.tanh(logits / head.rule.softcap)
    return (logits / temperature).log_softmax(-1)


def _with_tail(logps: torch.Tensor) -> torch.Tensor:
    """Appends the log-probability of all other tokens together, so that `(N, K)` becomes `(N, K + 1)`."""
    total = logps.logsumexp(-1, keepdim=True).clamp(max=_LARGEST_TOP_LOGP)
    return torch.cat([logps, torch.log(-torch.expm1(total))], dim=-1)


def _divergence(student: torch.Tensor, teacher: torch.Tensor, support: torch.Tensor, beta: float) -> torch.Tensor:
    """Computes the divergence `(N,)` from log-probabilities `(N, K)`, where the boolean `support` `(N, K)` is true."""
    # A difference of two infinite log-probabilities would be NaN
    student, teacher = (torch.where(support, logps, 0.0) for logps in (student, teacher))
    if beta == 0:
        terms = teacher.exp() * (teacher - student)
    elif beta == 1:
        terms = student.exp() * (student - teacher)
    else:
        mixture = torch.logaddexp(student + math.log(1 - beta), teacher + math.log(beta))
        terms = beta * teacher.exp() * (teacher - mixture) + (1 - beta) * student.exp() * (student - mixture)
    return torch.where(support, terms, 0.0).sum(-1)
