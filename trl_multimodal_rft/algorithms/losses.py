# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Policy losses, TRL's included: functions of tensors that return a loss to minimize, and the metrics of the loss.

A policy loss is a function decorated with [`policy_loss`]. Its docstring holds the formula and the paper.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

import torch

from ..spelling import check_settings, check_unused, join_settings, split_settings
from .kl import approx_kl
from .metrics import Metric, completion_means, largest, rank_mean, scored_mean, smallest, token_mean
from .papers import Paper, cite, paper_of


# Upper bound of log-ratios, as the exponential of a larger log-ratio may overflow and have a gradient of NaN
_LARGEST_LOG_RATIO = 20.0


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


# All values of `loss_type`
LOSSES: dict[str, LossType] = {}


def policy_loss(name: str, **properties) -> Callable:
    """
    Returns a decorator that registers a function of [`LossInputs`] and [`LossOptions`] as the loss `name`. The
    `properties` are fields of its [`LossType`]. By default, `paper` is the first paper in the docstring. Keyword-only
    arguments of the function are its settings.
    """

    def register(function):
        check_unused([name], LOSSES, "policy_loss")
        LOSSES[name] = LossType(name, properties.pop("paper", paper_of(function)), function, **properties)
        return function

    return register


def describe_losses() -> str:
    """Returns names and papers of the losses, for the help of an option."""
    return ", ".join(cite(loss.paper, name) for name, loss in LOSSES.items())


def as_loss(text: str) -> LossType:
    """
    Returns a loss by its name, which settings may follow (`"cpgd(drift_coef=0.1)"`). Raises `KeyError` for an
    unknown name, and `ValueError` for a setting or value that the loss doesn't have.
    """
    name, settings = split_settings(text)
    chosen = LOSSES[name]
    settings = settings or {}
    parameters = inspect.signature(chosen.function).parameters.values()
    setting_names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    check_settings(chosen.function, name, settings, setting_names)
    return replace(chosen, settings=settings)


def grpo_loss(
    loss_type: LossType,
    inputs: LossInputs,
    options: LossOptions,
    normalizer: Normalizer,
    *,
    kl_coef: float = 0.0,
    entropy_coef: float | None = None,
    aux_coef: float = 0.0,
) -> LossOutput:
    """
    Computes a micro-batch's part of the loss of an optimizer step, a scalar: the policy loss with a KL term (if
    `inputs` have `ref_logps`), an entropy bonus (unless `entropy_coef` is `None`), and load balancing (if `inputs`
    have an `aux_loss`).
    """
    mask = inputs.mask
    n_micro_batches = normalizer.n_micro_batches
    losses, metrics = loss_type(inputs, options)
    loss = loss_type.average(losses, mask, normalizer)
    metrics = dict(metrics)
    if inputs.ref_logps is not None:
        kl = approx_kl(inputs.logps, inputs.ref_logps, mask, options.kl_estimator)
        # A loss with one ratio per completion has no ratios of tokens
        if options.kl_estimator == "k3" and options.kl_bias_correction and not loss_type.per_completion:
            kl = kl * importance_ratios(inputs, options)
        loss = loss + kl_coef * loss_type.average(kl, mask, normalizer)
        metrics["kl"] = token_mean(kl, mask)
    if entropy_coef is not None:
        # TRL logs the mean of this metric over micro-batches, so a division by their number is undone
        metrics["policy_loss"] = rank_mean(loss * n_micro_batches if loss_type.is_mean else loss)
        entropy_sum, weight_sum = entropy_sums(inputs)
        loss = loss - entropy_coef * entropy_sum / weight_sum.clamp(min=1) / n_micro_batches
    if inputs.aux_loss is not None:
        loss = loss + aux_coef * inputs.aux_loss / n_micro_batches
        metrics["aux_loss"] = rank_mean(inputs.aux_loss)
    metrics["entropy"] = scored_mean(inputs.entropies, mask if inputs.scored is None else inputs.scored)
    return LossOutput(loss, metrics)


def entropy_sums(inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weighted sum of entropies of the tokens that are trained on, and the sum of their weights."""
    weights = inputs.mask * inputs.weights
    return (inputs.entropies * weights).sum(), weights.sum()


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
    return ((_per_token(inputs.advantages) >= 0) | (divergence <= options.off_policy_threshold)).to(inputs.mask.dtype)


def _per_token(advantages: torch.Tensor) -> torch.Tensor:
    """Returns advantages `(B,)` as `(B, 1)`, and advantages `(B, T)` as they are."""
    return advantages[:, None] if advantages.dim() == 1 else advantages


def _off_policy_weights(inputs: LossInputs, options: LossOptions) -> torch.Tensor | float:
    """Returns token weights: the off-policy mask times the importance ratio of the old policy to the engine."""
    ratio = 1.0 if inputs.sampling_ratio is None else inputs.sampling_ratio
    return off_policy_mask(inputs, options) * ratio


def _clip_metrics(low: torch.Tensor, high: torch.Tensor, mask: torch.Tensor) -> dict[str, Metric]:
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


def _ppo_loss(ratio: torch.Tensor, inputs: LossInputs, options: LossOptions) -> LossOutput:
    """Computes PPO's clipped loss from ratios `(B, T)` or `(B, 1)`, see [`clipped_loss`]."""
    advantages = _per_token(inputs.advantages)
    clipped = ratio.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)
    ratio = ratio.clamp(max=options.delta)
    loss = -torch.min(ratio * advantages, clipped * advantages)
    low = (ratio < 1 - options.epsilon_low) & (advantages < 0)
    high = (ratio > 1 + options.epsilon_high) & (advantages > 0)
    return LossOutput(
        loss * inputs.weights * _off_policy_weights(inputs, options), _clip_metrics(low, high, inputs.mask)
    )


_DR_GRPO = Paper("Understanding R1-Zero-Like Training", "2503.20783")
_TOKEN_MEAN = {"mode": "seq-mean-token-mean", "denominator": "completions", "needs_advantage": True}
_TOKEN_SUM = {"mode": "seq-mean-token-sum", "denominator": "completions", "needs_advantage": True}


@policy_loss("luspo", paper=Paper("LUSPO", "2602.05261"), **_TOKEN_SUM, sequence_level=True)
@policy_loss("dapo", paper=Paper("DAPO", "2503.14476"), sequence_level=True, needs_advantage=True)
@policy_loss("dr_grpo", paper=_DR_GRPO, denominator="length_limit", sequence_level=True, needs_advantage=True)
@policy_loss("bnpo", paper=None, denominator="micro_batch_tokens", sequence_level=True, needs_advantage=True)
@policy_loss("grpo", paper=Paper("DeepSeekMath", "2402.03300"), **_TOKEN_MEAN, sequence_level=True)
def clipped_loss(inputs: LossInputs, options: LossOptions) -> LossOutput:
    r"""
    PPO's clipped loss $-\min(r A, \mathrm{clip}(r, 1 - \epsilon_\mathrm{low}, 1 + \epsilon_\mathrm{high}) A)$ with $r$
    of at most $\delta$. The loss types with this formula differ in the average over tokens and completions.

    See [`LossType.__call__`] for the arguments.
    """
    return _ppo_loss(importance_ratios(inputs, options), inputs, options)


@policy_loss("cispo", sequence_level=True, needs_advantage=True)
def cispo_loss(inputs: LossInputs, options: LossOptions) -> LossOutput:
    r"""
    REINFORCE with clipped importance weights, $-\mathrm{sg}[\min(r, \epsilon_\mathrm{high})] A \log \pi$ with the
    stop-gradient $\mathrm{sg}$, see [MiniMax-M1](https://huggingface.co/papers/2506.13585).

    See [`LossType.__call__`] for the arguments.
    """
    advantages = _per_token(inputs.advantages)
    ratio = importance_ratios(inputs, options).detach()
    loss = -ratio.clamp(max=options.epsilon_high) * advantages * inputs.logps
    is_clipped = (ratio > options.epsilon_high) & (advantages > 0)
    metrics = {"cispo_clip_ratio": token_mean(is_clipped.float(), inputs.mask)}
    return LossOutput(loss * inputs.weights * _off_policy_weights(inputs, options), metrics)


@policy_loss("sapo", **_TOKEN_MEAN, sequence_level=True, clips_ratios=False)
def sapo_loss(inputs: LossInputs, options: LossOptions) -> LossOutput:
    r"""
    Policy loss with a soft gate instead of the clip, $-\frac{4}{\tau} \sigma(\tau (r - 1)) A$, see
    [Soft Adaptive Policy Optimization](https://huggingface.co/papers/2511.20347).

    See [`LossType.__call__`] for the arguments.
    """
    advantages = _per_token(inputs.advantages)
    temperature = torch.where(advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
    gate = (temperature * (importance_ratios(inputs, options) - 1)).sigmoid() * 4 / temperature
    return LossOutput(-gate * advantages * inputs.weights * _off_policy_weights(inputs, options), {})


@policy_loss("vespo", sequence_level=True, clips_ratios=False, needs_advantage=True)
def vespo_loss(inputs: LossInputs, options: LossOptions) -> LossOutput:
    r"""
    REINFORCE weighted by completion, $-\mathrm{sg}[e^\lambda w^k e^{-\lambda w}] A \log \pi$, see
    [VESPO](https://huggingface.co/papers/2602.10693). Here $w$ is the ratio of policy to engine over the whole
    completion, and $\mathrm{sg}$ stops the gradient.

    See [`LossType.__call__`] for the arguments.
    """
    advantages = _per_token(inputs.advantages)
    smallest_log = math.log(1e-8)
    with torch.no_grad():
        log_ratio = log_ratios(inputs.logps, inputs.old_logps, inputs.mask)
        log_w = log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).sum(1, keepdim=True)
        if inputs.sampling_ratio is not None:
            log_w = log_w + inputs.sampling_ratio.log().clamp(smallest_log, _LARGEST_LOG_RATIO).sum(1, keepdim=True)
        log_w = log_w.clamp(smallest_log, _LARGEST_LOG_RATIO)
        k = torch.where(advantages >= 0, options.vespo_k_pos, options.vespo_k_neg)
        rate = torch.where(advantages >= 0, options.vespo_lambda_pos, options.vespo_lambda_neg).clamp(min=1e-4)
        weight = (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    loss = -weight * advantages * inputs.logps * inputs.weights * off_policy_mask(inputs, options)
    return LossOutput(loss, {"vespo/phi_seq_mean": token_mean(weight, inputs.mask)})


@policy_loss("cpgd")
def cpgd_loss(
    inputs: LossInputs,
    options: LossOptions,
    *,
    drift_coef: Annotated[float, "[0, inf)"] = 0.01,
    drift_clamp: Annotated[float, "(0, inf]"] = 2.0,
) -> LossOutput:
    """
    CPGD's policy gradient, clipped in the *log*-ratio at `log(1 - epsilon_low)` and `log(1 + epsilon_high)`, plus the
    [`policy_drift`], see [CPGD](https://huggingface.co/papers/2505.12504).

    The gradient weight of a token is its advantage, not ratio times advantage, and 0 if the token is clipped. Like a
    KL term, the drift isn't multiplied by the weights of tokens.

    See [`LossType.__call__`] for the other arguments.

    Args:
        drift_coef (`float`, *optional*, defaults to `0.01`):
            Coefficient of the drift.
        drift_clamp (`float`, *optional*, defaults to `2.0`):
            Largest weight of a token in the drift.
    """
    advantages = _per_token(inputs.advantages)
    log_ratio = log_ratios(inputs.logps, inputs.old_logps, inputs.mask)
    smallest_log = math.log(1 - options.epsilon_low)
    largest_log = math.log(1 + options.epsilon_high)
    loss = -torch.min(log_ratio * advantages, log_ratio.clamp(smallest_log, largest_log) * advantages)
    drift = drift_coef * policy_drift(inputs.logps, inputs.old_logps, drift_clamp)
    low = (log_ratio < smallest_log) & (advantages < 0)
    high = (log_ratio > largest_log) & (advantages > 0)
    return LossOutput(
        loss * inputs.weights * _off_policy_weights(inputs, options) + drift, _clip_metrics(low, high, inputs.mask)
    )


def policy_drift(logps: torch.Tensor, old_logps: torch.Tensor, clamp: float) -> torch.Tensor:
    r"""
    Computes [CPGD](https://huggingface.co/papers/2505.12504)'s drift, a pull back to the policy that sampled.

    The gradient of the drift is $(r - 1) \nabla \log \pi$, as for the k3 estimate of
    $\mathrm{KL}(\pi_\mathrm{old} \| \pi)$, with $r - 1$ clamped so that no token dominates. The value of the drift has
    no meaning.

    Args:
        logps, old_logps (`torch.Tensor`):
            Log-probabilities under the current policy and under the policy that sampled, shape `(B, T)`.
        clamp (`float`):
            Largest weight $r - 1$.

    Returns:
        `torch.Tensor`: Drift of each token, shape `(B, T)`.
    """
    return ((logps.detach() - old_logps).exp() - 1).clamp(max=clamp) * logps


@policy_loss("gmpo", **_TOKEN_MEAN, per_completion=True)
def gmpo_loss(inputs: LossInputs, options: LossOptions) -> LossOutput:
    """
    The advantage of a completion times the geometric mean of its ratios, see
    [Geometric-Mean Policy Optimization](https://huggingface.co/papers/2507.20673). Log-ratios are clipped at
    `-epsilon_low` for negative advantages, and at `epsilon_high` for positive advantages. The paper sets both to 0.4.

    See [`LossType.__call__`] for the arguments. Advantages are per completion. The mean is weighted by `weights`.
    """
    advantages = inputs.advantages
    log_ratio = log_ratios(inputs.logps, inputs.old_logps, inputs.mask)
    clipped = torch.where(
        advantages[:, None] > 0, log_ratio.clamp(max=options.epsilon_high), log_ratio.clamp(min=-options.epsilon_low)
    )
    weights = inputs.mask * inputs.weights
    mean = torch.where(weights.bool(), clipped * weights, 0).sum(1) / weights.sum(1).clamp(min=1)
    loss = -mean.clamp(max=_LARGEST_LOG_RATIO).exp() * advantages
    low = (log_ratio < -options.epsilon_low) & (advantages[:, None] < 0)
    high = (log_ratio > options.epsilon_high) & (advantages[:, None] > 0)
    loss = (loss[:, None] * _off_policy_weights(inputs, options)).squeeze(1)
    return LossOutput(loss, _clip_metrics(low, high, inputs.mask))


@policy_loss("dual_clip", needs_advantage=True)
def dual_clip_loss(inputs: LossInputs, options: LossOptions) -> LossOutput:
    r"""
    PPO's clipped loss, bounded by $-\delta A$ for negative advantages, so that a token that became much likelier can't
    dominate the batch, see [Dual-clip PPO](https://huggingface.co/papers/1912.09729).

    See [`LossType.__call__`] for the arguments.
    """
    log_ratio = log_ratios(inputs.logps, inputs.old_logps, inputs.mask)
    return _ppo_loss(log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp(), inputs, options)


def rloo_loss(inputs: LossInputs, options: LossOptions) -> LossOutput:
    """
    RLOO's loss with one clipped ratio per completion, see
    [Back to Basics](https://huggingface.co/papers/2402.14740).

    Args:
        inputs ([`LossInputs`]):
            Tensors of a micro-batch. Its `old_logps` are sums over completions, shape `(B,)`.
        options ([`LossOptions`]):
            The clip range.

    Returns:
        [`LossOutput`]: The mean over completions, and metrics.
    """
    log_ratio = torch.where(inputs.mask.bool(), inputs.logps, 0).sum(1) - inputs.old_logps
    # PPO's loss of `B` completions as of `B` rows with one token
    inputs = replace(inputs, mask=torch.ones_like(log_ratio)[:, None], advantages=inputs.advantages[:, None])
    losses, metrics = _ppo_loss(log_ratio.exp()[:, None], inputs, options)
    return LossOutput(losses.mean(), metrics)


def view_term(
    logps: torch.Tensor,
    view_logps: torch.Tensor,
    mask: torch.Tensor,
    *,
    kl_coef: float = 0.0,
    kl_clip: float | None = None,
    entropy_coefs: tuple[float, float] = (0.0, 0.0),
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Computes the Implicit Perception Loss and the Double Entropy Loss of
    [PAPO](https://huggingface.co/papers/2507.06448),
    $-\gamma \min(k_3, c) - \eta_1 \log \pi - \eta_2 \log \tilde\pi$. Here $\pi$ is the policy on the clean prompt,
    $\tilde\pi$ the policy on the view, and $k_3$ an estimate of $\mathrm{KL}(\pi \| \tilde\pi)$. Both $\pi$ and
    $\tilde\pi$ have gradients. Entropies are estimated from sampled tokens, as in the paper.

    Args:
        logps, view_logps (`torch.Tensor`):
            Log-probabilities of completions after the clean prompt, and after the view, shape `(B, T)`.
        mask (`torch.Tensor`):
            1 on the tokens that count, shape `(B, T)`.
        kl_coef (`float`, *optional*, defaults to `0.0`):
            $\gamma$.
        kl_clip (`float`, *optional*):
            $c$, the divergence of a token, in nats, above which the loss has no gradient that raises it.
        entropy_coefs (`tuple[float, float]`, *optional*, defaults to `(0.0, 0.0)`):
            $\eta_1$ and $\eta_2$.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The loss of each token, and the divergence, shape `(B, T)`.
    """
    kl = approx_kl(logps, view_logps, mask, "k3")
    clean_coef, view_coef = entropy_coefs
    return -kl_coef * kl.clamp(max=kl_clip) - clean_coef * logps - view_coef * view_logps, kl


def ratio_metrics(inputs: LossInputs) -> dict[str, Metric]:
    """Returns mean and largest ratio, and the k3 estimate of the divergence from the policy that sampled."""
    log_ratio = log_ratios(inputs.logps.detach(), inputs.old_logps, inputs.mask)
    ratio = log_ratio.exp()
    return {
        "ratio/mean": token_mean(ratio, inputs.mask),
        "ratio/max": largest(torch.where(inputs.mask.bool(), ratio, 0), merge=max),
        "approx_kl": token_mean(ratio - 1 - log_ratio, inputs.mask),
    }


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
