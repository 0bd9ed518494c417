# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Advantage estimators, as functions of a whole batch: rewards with the group each belongs to, and masks of any shape.

Masks may be padded on either side and have gaps; results are exactly 0 outside them. A reward of `NaN` means that the
sample can't be scored: it takes part in no statistic and gets the advantage 0. Statistics are computed in float64.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from .kl import approx_kl


# Numbers count as equal within this much, relative to their mean or 1: what float32 may differ by when the same reward
# is computed in another order.
TOLERANCE = 1e-6

# Names of the estimators; the values say what each needs beside the rewards.
ESTIMATORS = {
    "group_norm": "group",
    "rloo": "group",
    "reinforce": None,
    "reinforce_baseline": "group",
    "cpgd": "group",
    "dr_grpo": "group",
    "gae": "critic",
}
ALIASES = {"grpo": "group_norm", "reinforce++": "reinforce", "reinforce++_baseline": "reinforce_baseline"}

# Columns that a recurrence handles in one matrix product.
_CHUNK = 32


@dataclass(eq=False)
class GroupStatistics:
    """
    Rewards relative to their group.

    Args:
        index (`torch.Tensor`):
            For each sample the position of its group, shape `(N,)`.
        centred (`torch.Tensor`):
            Reward minus the mean of its group; exactly 0 in a group without signal, and where unscorable; shape `(N,)`,
            float64.
        squares (`torch.Tensor`):
            Sum of the squared centred rewards of each group, shape `(number of groups,)`, float64.
        count (`torch.Tensor`):
            Scorable samples of each group, shape `(number of groups,)`.
        live (`torch.Tensor`):
            Groups with at least two scorable samples whose rewards differ, shape `(number of groups,)`.
    """

    index: torch.Tensor
    centred: torch.Tensor
    squares: torch.Tensor
    count: torch.Tensor
    live: torch.Tensor

    def std(self, correction: int) -> torch.Tensor:
        """
        Standard deviation within each group.

        Args:
            correction (`int`):
                What to subtract from the number of rewards: 1 for the sample's, 0 for the population's.

        Returns:
            `torch.Tensor`: Shape `(number of groups,)`; 0 without signal.
        """
        return (self.squares / (self.count - correction).clamp(min=1)).sqrt()


def group_statistics(rewards: torch.Tensor, group_ids: torch.Tensor) -> GroupStatistics:
    """
    Centres rewards within groups.

    A group whose rewards are equal has no signal, whatever the constant: rounding must not turn it into an advantage.

    Args:
        rewards (`torch.Tensor`):
            Rewards, `NaN` where unscorable, shape `(N,)`.
        group_ids (`torch.Tensor`):
            Group of each sample, any integers in any order, shape `(N,)`.

    Returns:
        [`GroupStatistics`]: The statistics, on the CPU.
    """
    # On the CPU: they are few, and not every device has float64
    rewards = rewards.cpu()
    index = group_ids.cpu().unique(return_inverse=True)[1]
    n_groups = int(index.max()) + 1
    scorable = ~rewards.isnan()
    values = torch.where(scorable, rewards, 0).double()

    def total(x):
        return x.new_zeros(n_groups).index_add(0, index, x)

    def extreme(fill, reduce):
        x = torch.where(scorable, values, fill)
        return x.new_full((n_groups,), fill).scatter_reduce(0, index, x, reduce)

    count = total(scorable.double())
    mean = total(values) / count.clamp(min=1)
    spread = extreme(-torch.inf, "amax") - extreme(torch.inf, "amin")
    live = (count >= 2) & (spread > TOLERANCE * mean.abs().clamp(min=1))
    centred = torch.where(scorable & live[index], values - mean[index], 0)
    return GroupStatistics(index, centred, total(centred.square()), count, live)


def group_norm(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
) -> torch.Tensor:
    r"""
    GRPO's advantage, $(R - \mathrm{mean}) / (\sigma + \epsilon)$ with the unbiased standard deviation of the group, see
    [DeepSeekMath](https://huggingface.co/papers/2402.03300).

    Args:
        rewards (`torch.Tensor`):
            Rewards, shape `(N,)`.
        group_ids (`torch.Tensor`):
            Group of each sample, shape `(N,)`.
        scale (`str`, *optional*, defaults to `"group"`):
            Divide by the standard deviation of the `"group"`, of all rewards of the `"batch"`, or by nothing (`"none"`).
        eps (`float`, *optional*, defaults to `1e-4`):
            Added to the standard deviation, in rewards.

    Returns:
        `torch.Tensor`: Advantages, shape `(N,)`.
    """
    groups = group_statistics(rewards, group_ids)
    advantages = groups.centred
    if scale == "group":
        advantages = advantages / (groups.std(correction=1) + eps)[groups.index]
    elif scale == "batch":
        scorable = rewards[~rewards.isnan()].cpu().double()
        std = scorable.std() if len(scorable) > 1 else scorable.new_zeros(())
        advantages = advantages / (std + eps)
    return advantages.to(rewards)


def dr_grpo(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    r"""
    Dr. GRPO's advantage, $R - \mathrm{mean}$, which doesn't favour groups with little spread, see
    [Understanding R1-Zero-Like Training](https://huggingface.co/papers/2503.20783).

    Args:
        rewards (`torch.Tensor`):
            Rewards, shape `(N,)`.
        group_ids (`torch.Tensor`):
            Group of each sample, shape `(N,)`.

    Returns:
        `torch.Tensor`: Advantages, shape `(N,)`.
    """
    return group_norm(rewards, group_ids, scale="none")


def rloo(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    r"""
    Reward minus the mean of the *other* samples of the group, see
    [Back to Basics](https://huggingface.co/papers/2402.14740).

    The paper's reward contains the KL penalty of the whole completion.

    Args:
        rewards (`torch.Tensor`):
            Rewards, shape `(N,)`.
        group_ids (`torch.Tensor`):
            Group of each sample, shape `(N,)`.

    Returns:
        `torch.Tensor`: Advantages, shape `(N,)`.
    """
    groups = group_statistics(rewards, group_ids)
    factor = groups.count / (groups.count - 1).clamp(min=1)
    return (groups.centred * factor[groups.index]).to(rewards)


def cpgd(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    weight: Literal["none", "std", "clip_filter_like"] = "clip_filter_like",
) -> torch.Tensor:
    r"""
    CPGD's advantage, $\omega \cdot (R - \mathrm{mean})$, see [CPGD](https://huggingface.co/papers/2505.12504).

    Args:
        rewards (`torch.Tensor`):
            Rewards, shape `(N,)`.
        group_ids (`torch.Tensor`):
            Group of each sample, shape `(N,)`.
        weight (`str`, *optional*, defaults to `"clip_filter_like"`):
            The weight $\omega$ of a group: `"none"` is 1, `"std"` is 1 over the population standard deviation of the
            group, `"clip_filter_like"` makes up for groups without signal, see [`clip_filter_like_weights`].

    Returns:
        `torch.Tensor`: Advantages, shape `(N,)`.
    """
    groups = group_statistics(rewards, group_ids)
    if weight == "std":
        weights = 1 / (groups.std(correction=0) + 1e-6)
    elif weight == "clip_filter_like":
        weights = clip_filter_like_weights(groups.live)
    else:
        weights = torch.ones_like(groups.squares)
    return (groups.centred * weights[groups.index]).to(rewards)


def clip_filter_like_weights(live: torch.Tensor, clip: float = 3.0, dead_weight: float = 1.0) -> torch.Tensor:
    """
    Weights that let groups with signal count for those without, as if these had been replaced by other prompts.

    Args:
        live (`torch.Tensor`):
            Whether each group has signal, shape `(number of groups,)`.
        clip (`float`, *optional*, defaults to `3.0`):
            Largest weight.
        dead_weight (`float`, *optional*, defaults to `1.0`):
            Weight of groups without signal, where others have some.

    Returns:
        `torch.Tensor`: Weight of each group, float64; 1 if no group has signal.
    """
    n_live = live.sum().double()
    if n_live == 0:
        return torch.ones_like(live, dtype=torch.float64)
    return torch.where(live, (len(live) / n_live).clamp(max=clip), dead_weight)


def reinforce_baseline(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    mask: torch.Tensor,
    *,
    norm_level: Literal["token", "sequence"] = "token",
) -> torch.Tensor:
    r"""
    REINFORCE++-baseline: reward minus the mean of its group, then whitened over the batch, see
    [REINFORCE++](https://huggingface.co/papers/2501.03262).

    Whitening shifts by the mean of the batch; groups without signal stay at exactly 0 nevertheless.

    Args:
        rewards (`torch.Tensor`):
            Rewards, shape `(N,)`.
        group_ids (`torch.Tensor`):
            Group of each sample, shape `(N,)`.
        mask (`torch.Tensor`):
            1 on completion tokens, shape `(N, T)`.
        norm_level (`str`, *optional*, defaults to `"token"`):
            Whether every `"token"` counts once in mean and standard deviation, so that long completions count more, or
            every `"sequence"`.

    Returns:
        `torch.Tensor`: Advantages, shape `(N,)`.
    """
    groups = group_statistics(rewards, group_ids)
    weights = mask.sum(1).cpu().double() if norm_level == "token" else torch.ones_like(groups.centred)
    scorable = ~rewards.isnan().cpu()
    whitened = _whiten(groups.centred, torch.where(scorable, weights, 0))
    return torch.where(groups.live[groups.index] & scorable, whitened, 0).to(rewards)


def reinforce(
    rewards: torch.Tensor, mask: torch.Tensor, token_kl: torch.Tensor | None = None, kl_coef: float = 0.0
) -> torch.Tensor:
    r"""
    REINFORCE++: the KL penalty of every token and the reward at the last one, summed from each token on ($\gamma = 1$)
    and whitened over all tokens of the batch, see [REINFORCE++](https://huggingface.co/papers/2501.03262).

    Needs no groups, so one completion per prompt is enough.

    Args:
        rewards (`torch.Tensor`):
            Rewards, shape `(N,)`.
        mask (`torch.Tensor`):
            1 on completion tokens, shape `(N, T)`.
        token_kl (`torch.Tensor`, *optional*):
            k1 estimate of the KL divergence from the reference at each token, shape `(N, T)`.
        kl_coef (`float`, *optional*, defaults to `0.0`):
            Coefficient of the penalty.

    Returns:
        `torch.Tensor`: Advantages, shape `(N, T)`.
    """
    mask = mask.bool() & ~rewards.isnan()[:, None]
    token_rewards = place_rewards(rewards, mask)
    if token_kl is not None:
        token_rewards = token_rewards - torch.where(mask, kl_coef * token_kl, 0)
    return whiten(cumulative_returns(token_rewards, mask), mask)


def place_rewards(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Puts each sample's reward on its last valid token.

    Args:
        rewards (`torch.Tensor`):
            Rewards, shape `(N,)`.
        mask (`torch.Tensor`):
            1 on valid tokens, shape `(N, T)`.

    Returns:
        `torch.Tensor`: Reward of each token, shape `(N, T)`; 0 all along a row without valid tokens.
    """
    mask = mask.bool()
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(last, rewards[:, None], 0)


def token_rewards(
    rewards: torch.Tensor,
    mask: torch.Tensor,
    logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    *,
    kl_coef: float = 0.0,
) -> torch.Tensor:
    """
    Reward of each token: that of its completion on the last one, less the KL penalty (k1) of every token.

    Args:
        rewards (`torch.Tensor`):
            Rewards, `NaN` where unscorable, which leaves the penalty alone, shape `(N,)`.
        mask (`torch.Tensor`):
            1 on valid tokens, shape `(N, T)`.
        logps (`torch.Tensor`, *optional*):
            Log-probabilities under the policy that sampled, shape `(N, T)`.
        ref_logps (`torch.Tensor`, *optional*):
            Log-probabilities under the reference, shape `(N, T)`.
        kl_coef (`float`, *optional*, defaults to `0.0`):
            Coefficient of the penalty.

    Returns:
        `torch.Tensor`: Reward of each token, shape `(N, T)`, 0 outside the mask.
    """
    placed = place_rewards(rewards.nan_to_num(), mask)
    return placed - kl_coef * approx_kl(logps, ref_logps, mask, "k1") if kl_coef else placed


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Shifts and scales values to mean 0 and population variance 1 over the whole mask.

    Args:
        values (`torch.Tensor`):
            Values, shape `(N, T)`.
        mask (`torch.Tensor`):
            1 on the values that count, shape `(N, T)`.

    Returns:
        `torch.Tensor`: Whitened values, 0 outside the mask; all 0 if the values are equal.
    """
    mask = mask.bool()
    return torch.where(mask, _whiten(torch.where(mask, values, 0), mask), 0).to(values.dtype)


def _whiten(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Shifts first by the mean as the dtype has it, so that what is left loses nothing to the size of the mean."""
    total = weights.sum(dtype=torch.float64).clamp(min=1)

    def mean(x):
        return (x * weights).sum(dtype=torch.float64) / total

    shift = mean(values)
    centred = values - shift.to(values.dtype)
    offset = mean(centred)
    std = (mean(centred.square()) - offset.square()).clamp(min=0).sqrt()
    if std <= TOLERANCE * shift.abs().clamp(min=1):
        return torch.zeros_like(values)
    return (centred - offset) / std


def cumulative_returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    r"""
    Discounted sum of the rewards from each token on, $G_t = r_t + \gamma G_{t+1}$, over valid tokens only.

    Args:
        rewards (`torch.Tensor`):
            Reward of each token, shape `(N, T)`. Those outside the mask are dropped.
        mask (`torch.Tensor`):
            1 on valid tokens, shape `(N, T)`.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount per valid token.

    Returns:
        `torch.Tensor`: Returns, shape `(N, T)`, 0 outside the mask.
    """
    mask = mask.bool()
    return _over_valid_tokens(mask, lambda r, valid: _suffix_sums(r, gamma), rewards)


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Generalized advantage estimation, $\delta_t = r_t + \gamma V_{t+1} - V_t$ and
    $A_t = \delta_t + \gamma \lambda A_{t+1}$, see [GAE](https://huggingface.co/papers/1506.02438).

    Tokens outside the mask are no steps: what lies before a gap continues after it.

    Args:
        rewards (`torch.Tensor`):
            Reward of each token, shape `(N, T)`. Those outside the mask are dropped.
        values (`torch.Tensor`):
            Critic's value of the state *before* each token, shape `(N, T)`.
        mask (`torch.Tensor`):
            1 on valid tokens, shape `(N, T)`.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount per valid token.
        lam (`float`, *optional*, defaults to `0.95`):
            GAE's $\lambda$.
        bootstrap (`torch.Tensor`, *optional*):
            Value of the state after the last token, shape `(N,)`: 0 where a completion ended, the critic's value where
            it was cut off. 0 everywhere by default.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Advantages, not whitened, and returns $A_t + V_t$, both of shape `(N, T)`
        and 0 outside the mask.
    """
    mask = mask.bool()

    def advantages(r, v, valid):
        delta = r - v
        delta[:, :-1] += gamma * v[:, 1:]
        if bootstrap is not None:
            steps = torch.arange(valid.size(1), device=valid.device)
            last = torch.where(valid, steps, 0).amax(1, keepdim=True)
            delta.scatter_add_(1, last, gamma * bootstrap[:, None].to(delta.dtype))
        return _suffix_sums(delta, gamma * lam)

    result = _over_valid_tokens(mask, advantages, rewards, values)
    return result, torch.where(mask, result + values, 0)


def _over_valid_tokens(mask: torch.Tensor, function: Callable, *values: torch.Tensor) -> torch.Tensor:
    """Applies a function of rows whose valid tokens are adjacent, and 0 elsewhere; it may return anything elsewhere."""
    values = [torch.where(mask, value, 0) for value in values]
    starts = mask[:, 1:] & ~mask[:, :-1]
    if (starts.sum(1) + mask[:, 0] <= 1).all():
        return torch.where(mask, function(*values, mask), 0)
    # Close the gaps. What isn't valid goes to a spare column.
    width = mask.size(1)
    place = torch.where(mask, mask.cumsum(1) - 1, width)

    def close(x):
        return x.new_zeros(len(x), width + 1).scatter(1, place, x)[:, :width]

    result = function(*map(close, values), close(mask))
    return torch.where(mask, result.gather(1, place.clamp(max=width - 1)), 0)


def _suffix_sums(x: torch.Tensor, decay: float) -> torch.Tensor:
    """`y[:, t] = x[:, t] + decay * y[:, t + 1]`: one product within chunks of columns, and the same again across them."""
    if x.is_cuda and x.dtype == torch.float32:
        return _suffix_sums(x.double(), decay).float()  # TF32, where it is on, would round to 10 bits
    rows, width = x.shape
    steps = torch.arange(_CHUNK, device=x.device)
    distance = steps[:, None] - steps  # from row j of the product to its column i
    kernel = torch.where(distance >= 0, float(decay) ** distance.clamp(min=0).to(x.dtype), 0)
    with torch.autocast(x.device.type, enabled=False):
        sums = torch.nn.functional.pad(x, (0, -width % _CHUNK)).view(rows, -1, _CHUNK) @ kernel
    if sums.size(1) > 1:
        following = _suffix_sums(sums[..., 0], decay**_CHUNK).roll(-1, dims=1)
        following[:, -1] = 0
        sums.addcmul_(following[..., None], float(decay) ** (_CHUNK - steps).to(x.dtype))
    return sums.view(rows, -1)[:, :width]


def estimate_advantages(
    estimator: str | Callable,
    *,
    rewards: torch.Tensor,
    rewards_per_func: torch.Tensor,
    group_ids: torch.Tensor,
    mask: torch.Tensor,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    scale: str = "group",
    norm_level: str = "token",
    weight: str = "clip_filter_like",
) -> torch.Tensor:
    """
    Advantages of a whole batch, by the estimator's name or by a function of the user.

    Args:
        estimator (`str` or `Callable`):
            Name of an estimator, or a function that takes the next six arguments by name and returns advantages of
            shape `(N,)` or `(N, T)`.
        rewards (`torch.Tensor`):
            Weighted and shaped rewards, `NaN` where unscorable, shape `(N,)`.
        rewards_per_func (`torch.Tensor`):
            What each reward function returned, shape `(N, F)`.
        group_ids (`torch.Tensor`):
            Group of each sample, shape `(N,)`.
        mask (`torch.Tensor`):
            1 on the tokens that are trained on, shape `(N, T)`.
        old_logps (`torch.Tensor`, *optional*):
            Log-probabilities under the policy that sampled, shape `(N, T)`.
        ref_logps (`torch.Tensor`, *optional*):
            Log-probabilities under the reference, shape `(N, T)`.
        kl_coef (`float`, *optional*, defaults to `0.0`):
            Coefficient of the k1 penalty in the reward: per token for `"reinforce"`, else of the whole completion.
        scale (`str`, *optional*, defaults to `"group"`):
            See [`group_norm`].
        norm_level (`str`, *optional*, defaults to `"token"`):
            See [`reinforce_baseline`].
        weight (`str`, *optional*, defaults to `"clip_filter_like"`):
            See [`cpgd`].

    Returns:
        `torch.Tensor`: Advantages, shape `(N,)` or `(N, T)`, 0 for unscorable samples and outside the mask.

    Raises:
        `ValueError`: If the function returns another shape or a value that isn't finite, or the name isn't known here.
    """
    if callable(estimator):
        advantages = estimator(
            rewards=rewards,
            rewards_per_func=rewards_per_func,
            group_ids=group_ids,
            mask=mask,
            old_logps=old_logps,
            ref_logps=ref_logps,
        )
        return _checked(advantages, estimator, rewards, mask)
    estimator = ALIASES.get(estimator, estimator)
    token_kl = None
    if kl_coef:
        token_kl = torch.where(mask.bool(), old_logps - ref_logps, 0)
    if estimator == "reinforce":
        return reinforce(rewards, mask, token_kl, kl_coef)
    if token_kl is not None:
        rewards = rewards - kl_coef * token_kl.sum(1)
    if estimator == "group_norm":
        return group_norm(rewards, group_ids, scale=scale)
    if estimator == "rloo":
        return rloo(rewards, group_ids)
    if estimator == "reinforce_baseline":
        return reinforce_baseline(rewards, group_ids, mask, norm_level=norm_level)
    if estimator == "cpgd":
        return cpgd(rewards, group_ids, weight=weight)
    if estimator == "dr_grpo":
        return dr_grpo(rewards, group_ids)
    raise ValueError(f"No advantages from rewards alone for {estimator!r}.")


def check_estimator(estimator: Callable) -> None:
    """
    Checks that a function of the user can be called by [`estimate_advantages`].

    Args:
        estimator (`Callable`):
            The function.

    Raises:
        `ValueError`: If it doesn't take the arguments that it is called with.
    """
    names = ("rewards", "rewards_per_func", "group_ids", "mask", "old_logps", "ref_logps")
    try:
        signature = inspect.signature(estimator)
    except (TypeError, ValueError):  # of some callables written in C
        return
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ValueError(
            f"The advantage estimator '{_name(estimator)}' {signature} can't be called with {', '.join(names)} as "
            f"keyword arguments ({error}); let it take those that it needs by these names, and `**kwargs`."
        ) from None


def _name(estimator: Callable) -> str:
    return getattr(estimator, "__name__", type(estimator).__name__)


def _checked(advantages, estimator: Callable, rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    name = _name(estimator)
    if not isinstance(advantages, torch.Tensor) or advantages.shape not in (rewards.shape, mask.shape):
        got = tuple(advantages.shape) if isinstance(advantages, torch.Tensor) else type(advantages).__name__
        raise ValueError(
            f"The advantage estimator '{name}' returned {got}; return a tensor of shape {tuple(rewards.shape)} or "
            f"{tuple(mask.shape)}."
        )
    scorable = ~rewards.isnan()
    keep = scorable if advantages.dim() == 1 else scorable[:, None] & mask.bool()
    advantages = torch.where(keep, advantages, 0)
    if not advantages.isfinite().all():
        row = int((~advantages.isfinite()).nonzero()[0, 0])
        raise ValueError(f"The advantage estimator '{name}' returned a value that isn't finite for sample {row}.")
    return advantages.to(rewards.dtype)
