# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Registry of policy losses, their inputs and options, and the parts of formulas that they share.

A policy loss is a function decorated with [`policy_loss`]. Its docstring holds the formula and the paper.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from ..spelling import check_properties, check_settings, check_unused, join_settings, split_settings
from .metrics import Metric, completion_means, largest, smallest, token_mean, weighted_mean
from .papers import Paper, cite, paper_of


# Upper bound of log-ratios, as the exponential of a larger log-ratio may overflow and have a gradient of NaN
LARGEST_LOG_RATIO = 20.0


class LossOutput(NamedTuple):
    """A loss and its metrics."""

    loss: torch.Tensor  # of each token, `(B, T)`, of each completion, `(B, 1)` or `(B,)`, or a scalar
    metrics: dict[str, Metric]  # by their names in the log


@dataclass(frozen=True)
class LossInputs:
    """Tensors of a micro-batch: `B` completions of up to `T` tokens."""

    logps: torch.Tensor  # current log-probabilities, `(B, T)`
    old_logps: torch.Tensor  # log-probabilities under the policy that sampled, without gradient, `(B, T)`
    advantages: torch.Tensor  # `(B,)` or `(B, T)`
    mask: torch.Tensor  # 1 on the tokens that count, `(B, T)`
    weights: torch.Tensor | float = 1.0  # of tokens in the policy gradient, `(B, T)`
    # Log-probabilities that the engine returned, NaN where it returned none, `(B, T)`, by default `old_logps`
    sampling_logps: torch.Tensor | None = None
    sampling_ratio: torch.Tensor | None = None  # importance ratio of old policy to engine, `(B, T or 1)`
    ref_logps: torch.Tensor | None = None  # under the reference, for a KL term in the loss, `(B, T)`
    entropies: Any = None  # of the policy's token distributions, `(B, T)`
    aux_loss: torch.Tensor | None = None  # load-balancing loss of a mixture of experts, a scalar
    # The mask, but 0 on completions that the update doesn't forward, by default the mask itself, `(B, T)`
    scored: torch.Tensor | None = None
    # For the account of the signal, both `(B,)`: indices in [`~algorithms.signal.CAUSES`] of what took it from
    # completions before the loss, -1 if nothing did, and numbers of sampled tokens, by default those of the mask
    causes: torch.Tensor | None = None
    n_sampled: torch.Tensor | None = None

    @property
    def scored_tokens(self) -> torch.Tensor:
        """The mask of the tokens that the update forwards, `(B, T)`."""
        return self.mask if self.scored is None else self.scored

    def mean_of_scored(self, values: torch.Tensor) -> Metric:
        """Returns the metric of the mean of values `(B, T)` or `(B, 1)` over what the update forwards."""
        if values.size(1) > 1:
            return token_mean(values, self.scored_tokens)
        is_forwarded = self.scored_tokens.any(1, keepdim=True) | ~self.mask.any(1, keepdim=True)
        return token_mean(values, is_forwarded)


@dataclass(frozen=True)
class LossOptions:
    """
    TRL's options of policy losses, with TRL's defaults. Settings that only this package has are keyword arguments of a
    loss's function.
    """

    # The ratio is clipped at `1 - epsilon_low` and `1 + epsilon_high`
    epsilon_low: float
    epsilon_high: float
    delta: float = math.inf  # upper bound of the ratio, above `1 + epsilon_high`, for negative advantages
    importance_sampling_level: str = "token"  # "sequence": the geometric mean of a completion's ratios
    # Divergence from the policy that sampled, in nats per token, above which `off_policy_mask` drops completions
    off_policy_threshold: float | None = None
    kl_estimator: str = "k3"  # of the KL term
    kl_bias_correction: bool = True  # whether k3 is multiplied by the ratio
    # SAPO's temperatures for advantages above 0, and for other advantages
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    # Parameters k and lambda of VESPO's weights, for advantages of at least 0, and for negative advantages
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0


@dataclass(frozen=True)
class Normalizer:
    """Counts in the denominators of losses, see [`LossType.average`]."""

    n_micro_batches: int  # micro-batches of the optimizer step on this rank
    length_limit: int  # maximum length of a completion
    batch_tokens: torch.Tensor | float  # tokens of the optimizer step, as a mean over ranks


@dataclass(frozen=True)
class LossType:
    """A value of `loss_type`, with its function and properties."""

    name: str
    paper: Paper | None
    function: Callable[..., LossOutput]  # takes [`LossInputs`], [`LossOptions`] and its settings
    mode: Literal["seq-mean-token-mean", "seq-mean-token-sum", "token-sum"] = "token-sum"  # of `aggregate`
    # Denominator of the sum: completions of the optimizer step; these completions times the length limit; tokens of
    # the micro-batch times the number of micro-batches; or tokens of the optimizer step
    denominator: Literal["completions", "length_limit", "micro_batch_tokens", "batch_tokens"] = "batch_tokens"
    per_completion: bool = False  # whether the loss has one ratio and one advantage per completion
    sequence_level: bool = False  # whether the loss supports `importance_sampling_level="sequence"`
    clips_ratios: bool = True  # whether the loss clips ratios, instead of softening them
    needs_advantage: bool = False  # whether completions with advantage 0 have no gradient, and needn't be forwarded
    settings: dict[str, Any] = field(default_factory=dict)  # `{"drift_coef": 0.1}` for `"cpgd(drift_coef=0.1)"`

    @property
    def spelling(self) -> str:
        """The name with its settings, as a value of `loss_type`."""
        return join_settings(self.name, self.settings)

    @property
    def is_mean(self) -> bool:
        """`True` if the loss is a mean over a micro-batch, divided by the accumulation steps."""
        return self.denominator != "batch_tokens"

    def __call__(self, inputs: LossInputs, options: LossOptions) -> LossOutput:
        """
        Computes the loss of a micro-batch.

        Args:
            inputs ([`LossInputs`]):
                Tensors of the micro-batch.
            options ([`LossOptions`]):
                Options of the loss.

        Returns:
            [`LossOutput`]: Metrics, and the loss of each token, shape `(B, T)`, or of each completion, shape `(B,)`
            (`(B, 1)` if it counts for every token of the completion).
        """
        return self.function(inputs, options, **self.settings)

    def average(self, values: torch.Tensor, mask: torch.Tensor, normalizer: Normalizer) -> torch.Tensor:
        """
        Returns a micro-batch's part of the loss of an optimizer step, a scalar, with TRL's denominator for the loss
        type. The `values` are per token, `(B, T)`, or per completion, `(B, 1)` or `(B,)`.
        """
        completions = len(mask) * normalizer.n_micro_batches
        if values.dim() == 1:  # one value per completion, so there are no tokens to average over
            return values.sum() / completions
        denominators = {
            "completions": completions,
            "length_limit": completions * normalizer.length_limit,
            "micro_batch_tokens": mask.sum().clamp(min=1) * normalizer.n_micro_batches,
            "batch_tokens": normalizer.batch_tokens,
        }
        return aggregate(values, mask, self.mode, denominators[self.denominator])

    def mean(self, loss: torch.Tensor, mask: torch.Tensor, normalizer: Normalizer) -> Metric:
        """Returns the metric of a loss that [`average`] has returned: a mean over completions or over tokens."""
        loss = loss * normalizer.n_micro_batches if self.is_mean else loss
        return weighted_mean(loss, self.weight(mask, normalizer))

    def weight(self, mask: torch.Tensor, normalizer: Normalizer) -> torch.Tensor:
        """
        Returns the number of completions, or of tokens, over which the loss of a micro-batch is a mean, 0 for an empty
        mask.
        """
        if self.denominator == "batch_tokens":
            return normalizer.batch_tokens * mask.any()
        return mask.sum() if self.denominator == "micro_batch_tokens" else len(mask) * mask.any()


# All values of `loss_type`
LOSSES: dict[str, LossType] = {}


def policy_loss(name: str, **properties) -> Callable:
    """
    Returns a decorator that registers a function of [`LossInputs`] and [`LossOptions`] as the loss `name`. The
    `properties` are fields of its [`LossType`]. By default, `paper` is the first paper in the docstring. Keyword-only
    arguments of the function are its settings.
    """

    def register(function: Callable) -> Callable:
        check_unused([name], LOSSES, "policy_loss")
        check_properties(LossType, name, properties)
        LOSSES[name] = LossType(name, properties.pop("paper", paper_of(function)), function, **properties)
        return function

    return register


def describe_losses() -> str:
    """Returns names and papers of the losses, for the help of an option."""
    return ", ".join(cite(loss.paper, name) for name, loss in LOSSES.items())


def as_loss(text: str) -> LossType:
    """
    Returns a loss by its name, which settings may follow (`"cpgd(drift_coef=0.1)"`). Raises `KeyError` for an
    unknown name, and `ValueError` for a setting or value that the loss doesn't have. Some losses have a setting
    `average`, which chooses the average over tokens and completions.
    """
    name, settings = split_settings(text)
    chosen = LOSSES[name]
    settings = settings or {}
    parameters = inspect.signature(chosen.function).parameters.values()
    setting_names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    check_settings(chosen.function, name, settings, setting_names)
    if settings.get("average") == "completions":
        chosen = replace(chosen, mode="seq-mean-token-mean", denominator="completions")
    return replace(chosen, settings=settings)


def log_ratios(logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns current minus old log-probability of each token, `(B, T)`, 0 outside the mask."""
    return torch.where(mask.bool(), logps - old_logps, 0)


def importance_ratios(inputs: LossInputs, options: LossOptions) -> torch.Tensor:
    """Returns ratios of current to old policy, `(B, T)`, or `(B, 1)` with `importance_sampling_level="sequence"`."""
    log_ratio = log_ratios(inputs.logps, inputs.old_logps, inputs.mask)
    if options.importance_sampling_level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / inputs.mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def off_policy_mask(inputs: LossInputs, options: LossOptions) -> torch.Tensor | float:
    """
    Returns a mask, `(B, 1)` or `(B, T)`, that is 0 on negative advantages of completions for which the policy diverges
    from the policy that sampled, see [DeepSeek-V3.2](https://huggingface.co/papers/2512.02556). Without the option
    `off_policy_threshold`, returns 1.
    """
    if options.off_policy_threshold is None:
        return 1.0
    sampled = inputs.old_logps if inputs.sampling_logps is None else inputs.sampling_logps
    # An engine may leave out log-probabilities, which are NaN
    divergence = log_ratios(sampled, inputs.logps.detach(), inputs.mask).nan_to_num(nan=0.0)
    divergence = divergence.sum(1, keepdim=True) / inputs.mask.sum(1, keepdim=True).clamp(min=1)
    return ((per_token(inputs.advantages) >= 0) | (divergence <= options.off_policy_threshold)).to(inputs.mask.dtype)


def per_token(advantages: torch.Tensor) -> torch.Tensor:
    """Returns advantages `(B,)` as `(B, 1)`, and advantages `(B, T)` as they are."""
    return advantages[:, None] if advantages.dim() == 1 else advantages


def off_policy_weights(inputs: LossInputs, options: LossOptions) -> torch.Tensor | float:
    """Returns token weights: the off-policy mask times the importance ratio of the old policy to the engine."""
    ratio = 1.0 if inputs.sampling_ratio is None else inputs.sampling_ratio
    return off_policy_mask(inputs, options) * ratio


def clip_metrics(low: torch.Tensor, high: torch.Tensor, mask: torch.Tensor) -> dict[str, Metric]:
    """
    Returns shares of clipped tokens or completions, from booleans `low` and `high`, `(B, T)` or `(B, 1)`: whether the
    ratio is clipped at the lower or at the upper bound.
    """
    shares = {"low": low.float(), "high": high.float(), "region": (low | high).float()}
    return {
        **{f"clip_ratio/{name}_mean": token_mean(share, mask) for name, share in shares.items()},
        "clip_ratio/low_min": smallest(completion_means(shares["low"], mask)),
        "clip_ratio/high_max": largest(completion_means(shares["high"], mask)),
    }


def ppo_loss(ratio: torch.Tensor, inputs: LossInputs, options: LossOptions) -> LossOutput:
    """Computes PPO's clipped loss from ratios `(B, T)` or `(B, 1)`, see [`clipped_loss`]."""
    advantages = per_token(inputs.advantages)
    clipped = ratio.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)
    ratio = ratio.clamp(max=options.delta)
    loss = -torch.min(ratio * advantages, clipped * advantages)
    low = (ratio < 1 - options.epsilon_low) & (advantages < 0)
    high = (ratio > 1 + options.epsilon_high) & (advantages > 0)
    return LossOutput(
        loss * inputs.weights * off_policy_weights(inputs, options), clip_metrics(low, high, inputs.mask)
    )


def aggregate(
    values: torch.Tensor,
    mask: torch.Tensor,
    mode: Literal["seq-mean-token-mean", "seq-mean-token-sum", "token-sum"],
    denominator: torch.Tensor | float,
) -> torch.Tensor:
    r"""
    Sums the losses of a micro-batch so that the sum over micro-batches and processes is the loss of the whole batch,
    however the batch is split.

    Args:
        values (`torch.Tensor`):
            Loss of each token, shape `(B, T)`.
        mask (`torch.Tensor`):
            1 on the tokens that count, shape `(B, T)`.
        mode (`str`):
            `"seq-mean-token-mean"`: $\sum_i \frac{1}{|o_i|} \sum_t x_{i,t}$ over the number of completions, as in
            GRPO, with the loss $x_{i,t}$ of a token of completion $o_i$. `"seq-mean-token-sum"`:
            $\sum_i \sum_t x_{i,t}$ over the number of completions. `"token-sum"`: the same sum over the number of
            tokens as in DAPO, or over a constant as in Dr. GRPO.
        denominator (`torch.Tensor` or `float`):
            Completions, tokens or constant of the whole batch.

    Returns:
        `torch.Tensor`: The micro-batch's part of the loss, a scalar; 0 if no token counts.
    """
    sums = torch.where(mask.bool(), values * mask, 0).sum(1)
    if mode == "seq-mean-token-mean":
        sums = sums / mask.sum(1).clamp(min=1)
    return sums.sum() / denominator
