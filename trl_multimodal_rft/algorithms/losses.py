# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Policy losses that TRL doesn't have, and how losses of either kind are averaged.

A loss is one function under [`policy_loss`], whose docstring holds its formula and paper. Losses are to be minimised.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from .papers import Paper, paper_of


# Beyond this, the exponential overflows sooner or later, and its gradient becomes NaN
_LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossOptions:
    """
    What policy losses are told beside the tokens; each reads what its docstring names.

    Args:
        epsilon_low (`float`):
            The ratio is clipped at `1 - epsilon_low`.
        epsilon_high (`float`):
            The ratio is clipped at `1 + epsilon_high`.
        delta (`float`, *optional*, defaults to `inf`):
            Bound of the ratio for negative advantages in [`dual_clip_loss`], above `1 + epsilon_high`; usually 3.
        drift_coef (`float`, *optional*, defaults to `0.01`):
            Coefficient of the [`policy_drift`].
        drift_clamp (`float`, *optional*, defaults to `2.0`):
            Largest weight of a token in the [`policy_drift`].
    """

    epsilon_low: float
    epsilon_high: float
    delta: float = math.inf
    drift_coef: float = 0.01
    drift_clamp: float = 2.0


@dataclass(frozen=True)
class LossType:
    r"""
    A value of `loss_type`.

    Args:
        name (`str`):
            The value.
        paper ([`~algorithms.papers.Paper`], *optional*):
            Where it comes from.
        function (`Callable`, *optional*):
            What [`LossType.__call__`] calls. `None` for the losses of TRL, which are TRL's code.
        mode (`str`, *optional*, defaults to `"token-sum"`):
            How [`aggregate`] sums.
        over (`str`, *optional*, defaults to `"batch_tokens"`):
            What the sum is divided by: the `"completions"` of the optimizer step, the `"length_limit"` of all of them,
            the tokens of the micro-batch (`"micro_batch_tokens"`) times the accumulation steps, or the tokens of the
            optimizer step (`"batch_tokens"`).
        per_completion (`bool`, *optional*, defaults to `False`):
            Whether it has one ratio, and takes one advantage, per completion.
        clips (`bool`, *optional*, defaults to `True`):
            Whether it clips ratios; others soften them.
        clips_log_ratio (`bool`, *optional*, defaults to `False`):
            Whether `epsilon` bounds the log-ratio instead of the ratio.
    """

    name: str
    paper: Paper | None = None
    function: Callable[..., torch.Tensor] | None = None
    mode: Literal["seq-mean-token-mean", "seq-mean-token-sum", "token-sum"] = "token-sum"
    over: Literal["completions", "length_limit", "micro_batch_tokens", "batch_tokens"] = "batch_tokens"
    per_completion: bool = False
    clips: bool = True
    clips_log_ratio: bool = False

    @property
    def is_own(self) -> bool:
        """Whether TRL doesn't have it."""
        return self.function is not None

    @property
    def is_mean(self) -> bool:
        """Whether it is a mean over a micro-batch, divided by the accumulation steps."""
        return self.over != "batch_tokens"

    def __call__(
        self,
        logps: torch.Tensor,
        old_logps: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        options: LossOptions,
        *,
        weights: torch.Tensor | float = 1.0,
        correction: torch.Tensor | float = 1.0,
    ) -> torch.Tensor:
        """
        Calls the function.

        Args:
            logps (`torch.Tensor`):
                Current log-probabilities, shape `(B, T)`.
            old_logps (`torch.Tensor`):
                Log-probabilities under the policy that sampled, without gradient, shape `(B, T)`.
            advantages (`torch.Tensor`):
                Advantages, shape `(B,)` or `(B, T)`.
            mask (`torch.Tensor`):
                1 on the tokens that count, shape `(B, T)`.
            options ([`LossOptions`]):
                What the loss reads of them.
            weights (`torch.Tensor` or `float`, *optional*, defaults to `1.0`):
                Weight of each token in the policy gradient, shape `(B, T)`; 0 on tokens that aren't trained on.
            correction (`torch.Tensor` or `float`, *optional*, defaults to `1.0`):
                Factor for what the sampler did otherwise than the policy that sampled, shape `(B, T)` or `(B, 1)`.

        Returns:
            `torch.Tensor`: Loss of each token, shape `(B, T)`, or of each completion, shape `(B,)`.
        """
        return self.function(logps, old_logps, advantages, mask, options, weights=weights, correction=correction)

    def average(
        self,
        values: torch.Tensor,
        mask: torch.Tensor,
        *,
        accumulation: int,
        length_limit: int,
        batch_tokens: torch.Tensor | float,
    ) -> torch.Tensor:
        """
        A micro-batch's part of the loss of an optimizer step, with the denominator that TRL gives the loss type.

        Args:
            values (`torch.Tensor`):
                Of each token, shape `(B, T)`, or of each completion, shape `(B,)`.
            mask (`torch.Tensor`):
                1 on the tokens that count, shape `(B, T)`.
            accumulation (`int`):
                Micro-batches of the optimizer step on this process.
            length_limit (`int`):
                Tokens that a completion may have.
            batch_tokens (`torch.Tensor` or `float`):
                Tokens of the optimizer step, per process.

        Returns:
            `torch.Tensor`: A scalar.
        """
        completions = len(mask) * accumulation
        if values.dim() == 1:
            return values.sum() / completions
        denominators = {
            "completions": completions,
            "length_limit": completions * length_limit,
            "micro_batch_tokens": mask.sum().clamp(min=1) * accumulation,
            "batch_tokens": batch_tokens,
        }
        return aggregate(values, mask, self.mode, denominators[self.over])

    def clipped(
        self, log_ratio: torch.Tensor, advantages: torch.Tensor, options: LossOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Tokens beyond the clip range, on the side that their advantage pushes to.

        Args:
            log_ratio (`torch.Tensor`):
                Log-ratios, shape `(B, T)`.
            advantages (`torch.Tensor`):
                Advantages, shape `(B,)` or `(B, T)`.
            options ([`LossOptions`]):
                Holds the range.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Tokens below and tokens above it, both of shape `(B, T)`.
        """
        low, high = -options.epsilon_low, options.epsilon_high
        if not self.clips_log_ratio:
            low, high = torch.log1p(torch.tensor([low, high])).tolist()
        advantages = _per_token(advantages)
        return (log_ratio < low) & (advantages < 0), (log_ratio > high) & (advantages > 0)


_DEEPSEEK_MATH = Paper("DeepSeekMath", "2402.03300")
_DR_GRPO = Paper("Understanding R1-Zero-Like Training", "2503.20783")
_TRL_LOSSES = (
    LossType("grpo", _DEEPSEEK_MATH, mode="seq-mean-token-mean", over="completions"),
    LossType("bnpo", over="micro_batch_tokens"),
    LossType("dr_grpo", _DR_GRPO, over="length_limit"),
    LossType("dapo", Paper("DAPO", "2503.14476")),
    LossType("cispo", Paper("MiniMax-M1", "2506.13585")),
    LossType(
        "sapo",
        Paper("Soft Adaptive Policy Optimization", "2511.20347"),
        mode="seq-mean-token-mean",
        over="completions",
        clips=False,
    ),
    LossType("vespo", Paper("VESPO", "2602.10693"), clips=False),
    LossType("luspo", Paper("LUSPO", "2602.05261"), mode="seq-mean-token-sum", over="completions"),
)

# All values of `loss_type`: those of TRL, and below each of ours
LOSSES = {loss.name: loss for loss in _TRL_LOSSES}


def policy_loss(name: str, **facts) -> Callable:
    """
    Makes a function the loss of that name. See [`LossType.__call__`] for what it takes and returns.

    Args:
        name (`str`):
            Value of `loss_type`.
        facts:
            Fields of its [`LossType`].

    Returns:
        `Callable`: The decorator. It returns the function as it was.
    """

    def register(function):
        LOSSES[name] = LossType(name, paper_of(function), function, **facts)
        return function

    return register


def log_ratios(logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    The current minus the old log-probability of each token.

    See [`LossType.__call__`] for the arguments.

    Returns:
        `torch.Tensor`: Log-ratios, shape `(B, T)`, 0 outside the mask.
    """
    return torch.where(mask.bool(), logps - old_logps, 0)


def sequence_ratios(
    logps: torch.Tensor,
    sampled_logps: torch.Tensor,
    mask: torch.Tensor,
    mode: str = "sequence_mask",
    low: float | None = None,
    high: float | None = None,
) -> torch.Tensor:
    r"""
    How much more likely completions are under the policy than under the engine that sampled them, within bounds.

    $w_i = \exp \sum_t (\log \pi(o_{i,t}) - \log \mu(o_{i,t}))$, which corrects for the engine $\mu$.

    Args:
        logps (`torch.Tensor`):
            Log-probabilities under the policy, shape `(B, T)`.
        sampled_logps (`torch.Tensor`):
            Those of the engine, NaN where it has none, which corrects nothing, shape `(B, T)`.
        mask (`torch.Tensor`):
            1 on sampled tokens, shape `(B, T)`.
        mode (`str`, *optional*, defaults to `"sequence_mask"`):
            What is done with a ratio out of bounds: `"sequence_mask"` makes it 0, `"sequence_truncate"` the bound.
        low (`float`, *optional*):
            Lower bound.
        high (`float`, *optional*):
            Upper bound.

    Returns:
        `torch.Tensor`: The ratios, shape `(B,)`.
    """
    differences = torch.where(mask.bool(), logps - sampled_logps, 0.0).nan_to_num(nan=0.0)
    ratios = differences.sum(1).exp()
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if mode == "sequence_truncate":
        return ratios.clamp(low, high)
    return ratios.masked_fill((ratios < low) | (ratios > high), 0.0)


def _per_token(advantages: torch.Tensor) -> torch.Tensor:
    return advantages[:, None] if advantages.dim() == 1 else advantages


@policy_loss("cpgd")
def cpgd_loss(logps, old_logps, advantages, mask, options, *, weights=1.0, correction=1.0) -> torch.Tensor:
    r"""
    CPGD's policy gradient, clipped in the *log*-ratio at `log(1 - epsilon_low)` and `log(1 + epsilon_high)`, with the
    [`policy_drift`], see [CPGD](https://huggingface.co/papers/2505.12504).

    The gradient weight of a token is its advantage inside the clip range and 0 beyond, never ratio times advantage.
    Like the KL divergence, the drift counts on all tokens.

    See [`LossType.__call__`] for the arguments.
    """
    advantages = _per_token(advantages)
    log_ratio = log_ratios(logps, old_logps, mask)
    clipped = log_ratio.clamp(math.log(1 - options.epsilon_low), math.log(1 + options.epsilon_high))
    loss = -torch.min(log_ratio * advantages, clipped * advantages) * weights * correction
    return loss + options.drift_coef * policy_drift(logps, old_logps, options.drift_clamp)


def policy_drift(logps: torch.Tensor, old_logps: torch.Tensor, clamp: float) -> torch.Tensor:
    r"""
    CPGD's pull back towards the policy that sampled, see [CPGD](https://huggingface.co/papers/2505.12504).

    Its gradient is that of the k3 estimate of $\mathrm{KL}(\pi_\mathrm{old} \| \pi)$, $(r - 1) \nabla \log \pi$, whose
    weight is clamped so that no token dominates; its value means nothing.

    Args:
        logps (`torch.Tensor`):
            Current log-probabilities, shape `(B, T)`.
        old_logps (`torch.Tensor`):
            Log-probabilities under the policy that sampled, shape `(B, T)`.
        clamp (`float`):
            Largest weight $r - 1$.

    Returns:
        `torch.Tensor`: Drift of each token, shape `(B, T)`.
    """
    return ((logps.detach() - old_logps).exp() - 1).clamp(max=clamp) * logps


@policy_loss("gmpo", mode="seq-mean-token-mean", over="completions", per_completion=True, clips_log_ratio=True)
def gmpo_loss(logps, old_logps, advantages, mask, options, *, weights=1.0, correction=1.0) -> torch.Tensor:
    r"""
    The geometric mean of a completion's ratios times its advantage, see
    [Geometric-Mean Policy Optimization](https://huggingface.co/papers/2507.20673).

    Log-ratios are clipped at `-epsilon_low` where the advantage is negative and at `epsilon_high` where it is
    positive; the paper uses 0.4.

    See [`LossType.__call__`] for the arguments: one advantage per completion, and the `weights` in the geometric mean.
    """
    log_ratio = log_ratios(logps, old_logps, mask)
    clipped = torch.where(
        advantages[:, None] > 0, log_ratio.clamp(max=options.epsilon_high), log_ratio.clamp(min=-options.epsilon_low)
    )
    weights = mask * weights
    mean = torch.where(weights.bool(), clipped * weights, 0).sum(1) / weights.sum(1).clamp(min=1)
    loss = -mean.clamp(max=_LARGEST_LOG_RATIO).exp() * advantages
    return (loss[:, None] * correction).squeeze(1)


@policy_loss("dual_clip")
def dual_clip_loss(logps, old_logps, advantages, mask, options, *, weights=1.0, correction=1.0) -> torch.Tensor:
    r"""
    PPO's clipped loss, bounded by $-\delta A$ where the advantage is negative, see
    [Dual-clip PPO](https://huggingface.co/papers/1912.09729).

    Without the bound, one token that became much likelier while its advantage is negative dominates the batch.

    See [`LossType.__call__`] for the arguments.
    """
    advantages = _per_token(advantages)
    ratio = log_ratios(logps, old_logps, mask).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)
    loss = -torch.min(ratio * advantages, clipped * advantages)
    loss = torch.where(advantages < 0, torch.min(loss, -options.delta * advantages), loss)
    return loss * weights * correction


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None = None
) -> torch.Tensor:
    r"""
    Half the squared error of the critic, clipped around its old values as in
    [PPO](https://huggingface.co/papers/1707.06347):
    $\frac{1}{2} \max((\mathrm{clip}(V, V_\mathrm{old} \pm \epsilon) - R)^2, (V - R)^2)$.

    Args:
        values (`torch.Tensor`):
            Current values, shape `(B, T)`.
        old_values (`torch.Tensor`):
            Values when the completions were sampled, shape `(B, T)`.
        returns (`torch.Tensor`):
            Returns, shape `(B, T)`.
        clip (`float`, *optional*):
            How far values may move from the old ones to be rewarded for it. `None` doesn't clip.

    Returns:
        `torch.Tensor`: Loss of each token, shape `(B, T)`.
    """
    error = (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.max(error, (clipped - returns).square())
    return error / 2


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    r"""
    How much of the returns the critic knows before: $1 - \mathrm{Var}(R - V) / \mathrm{Var}(R)$.

    Args:
        values (`torch.Tensor`):
            Values, shape `(B, T)`.
        returns (`torch.Tensor`):
            Returns, shape `(B, T)`.
        mask (`torch.Tensor`):
            1 on the tokens that count, shape `(B, T)`.

    Returns:
        `torch.Tensor`: A scalar, at most 1; `NaN` if the returns are equal or there are fewer than two.
    """
    returns, errors = returns[mask.bool()].double(), (returns - values)[mask.bool()].double()
    if len(returns) < 2:
        return returns.new_tensor(torch.nan)
    variance = returns.var(correction=0)
    return torch.where(variance > 0, 1 - errors.var(correction=0) / variance, torch.nan)


def aggregate(
    values: torch.Tensor,
    mask: torch.Tensor,
    mode: Literal["seq-mean-token-mean", "seq-mean-token-sum", "token-sum"],
    denominator: torch.Tensor | float,
) -> torch.Tensor:
    r"""
    Sums the losses of a micro-batch so that the sum over micro-batches and processes is the loss of the whole batch.

    A denominator of the whole batch makes the result independent of how the batch is split.

    Args:
        values (`torch.Tensor`):
            Loss of each token, shape `(B, T)`.
        mask (`torch.Tensor`):
            1 on the tokens that count, shape `(B, T)`.
        mode (`str`):
            `"seq-mean-token-mean"`: $\sum_i \frac{1}{|o_i|} \sum_t x_{i,t}$ as in GRPO, with the number of completions
            as denominator. `"seq-mean-token-sum"`: $\sum_i \sum_t x_{i,t}$ over the number of completions.
            `"token-sum"`: the same sum over the number of tokens as in DAPO, or over a constant as in Dr. GRPO.
        denominator (`torch.Tensor` or `float`):
            Completions, tokens or constant of the whole batch.

    Returns:
        `torch.Tensor`: The micro-batch's part of the loss, a scalar; 0 if no token counts.
    """
    sums = torch.where(mask.bool(), values * mask, 0).sum(1)
    if mode == "seq-mean-token-mean":
        sums = sums / mask.sum(1).clamp(min=1)
    return sums.sum() / denominator
