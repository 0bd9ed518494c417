# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Advantage estimators: functions of a whole batch of rewards, group ids and masks.

An estimator is a function decorated with [`estimator`]. Its docstring holds the formula and the paper. A batch has `N`
completions of up to `T` tokens. Masks may have gaps, and padding on either side. Advantages are exactly 0 outside the
mask. A reward of `NaN` means that the completion can't be scored: it enters no statistic and gets the advantage 0.
Statistics are computed in float64.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F

from ..spelling import check_settings, check_unused, join_settings, split_settings
from .kl import approx_kl
from .papers import Paper, cite, paper_of
from .returns import TOLERANCE, Steps, cumulative_returns, token_rewards, whiten


# Added to a standard deviation of rewards before a division by it, as in TRL
_EPS = 1e-4


@dataclass(frozen=True)
class Estimator:
    """A value of `advantage_estimator`, with its function and properties."""

    name: str
    paper: Paper | None
    function: Callable  # takes arguments of `estimate_advantages`, by their names
    alias: str | None = None  # second name, which users may write instead of `name`
    # Requirement besides rewards: several completions per prompt ("group"), or values ("critic")
    needs: Literal["group", "critic"] | None = None
    per_token: bool = False  # whether advantages and KL penalties are per token instead of per completion
    # Whether KL is by default a penalty in the reward (the estimate k1 of `approx_kl`), not a term of the loss
    kl_in_reward: bool = False
    default_kl_estimator: Literal["k2", "k3"] = "k3"  # default of `kl_estimator` if KL is a term of the loss
    # Input about the steps of completions: rewards of steps ("steps"), or rewards and states of steps ("states")
    step_input: Literal["steps", "states"] | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # `{"weight": "std"}` for `"cpgd(weight='std')"`

    @property
    def spelling(self) -> str:
        """The name with its settings, as a value of `advantage_estimator`."""
        return join_settings(self.name, self.settings)


ESTIMATORS: dict[str, Estimator] = {}  # by name
ALIASES: dict[str, str] = {}  # names by alias


def estimator(name: str, **properties) -> Callable:
    """Returns a decorator that registers a function as estimator `name` with `properties`, fields of [`Estimator`]."""

    def register(function):
        # No other estimator may have the name or the alias, as its name or its alias
        check_unused(
            [name, *([properties["alias"]] if "alias" in properties else [])], {*ESTIMATORS, *ALIASES}, "estimator"
        )
        ESTIMATORS[name] = Estimator(name, paper_of(function), function, **properties)
        if "alias" in properties:
            ALIASES[properties["alias"]] = name
        return function

    return register


# Keyword arguments whose values come from options of trainers. An estimator's other keyword arguments are settings.
_TRAINER_ARGUMENTS = ("kl_coef", "scale", "bootstrap")


def as_estimator(text: str) -> Estimator:
    """
    Returns an estimator by its name or alias, which settings may follow (`"cpgd(weight='std')"`). Raises `KeyError`
    for an unknown name, and `ValueError` for a setting or value that the estimator doesn't have.
    """
    name, settings = split_settings(text)
    chosen = ESTIMATORS[ALIASES.get(name, name)]
    settings = settings or {}
    parameters = inspect.signature(chosen.function).parameters.values()
    setting_names = [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in _TRAINER_ARGUMENTS
    ]
    check_settings(chosen.function, name, settings, setting_names)
    return replace(chosen, settings=settings)


def describe_estimators(*needs: str | None) -> str:
    """Returns names and papers of the estimators with one of the requirements `needs`, for the help of an option."""
    candidates = (candidate for candidate in ESTIMATORS.values() if candidate.needs in needs)
    return ", ".join(cite(candidate.paper, candidate.name, candidate.alias) for candidate in candidates)


@dataclass(eq=False)
class GroupStatistics:
    """Rewards relative to their group, for `N` completions in `G` groups."""

    index: torch.Tensor  # index of each completion's group, `(N,)`
    centred: torch.Tensor  # reward minus group mean, 0 for NaN and in groups without signal, `(N,)`, float64
    squares: torch.Tensor  # weighted sum of the squared centred rewards, `(G,)`, float64
    count: torch.Tensor  # number of scorable completions, or the sum of their weights, `(G,)`
    has_signal: torch.Tensor  # whether the group has signal, that is, different rewards, `(G,)`

    def std(self, correction: int) -> torch.Tensor:
        """
        Returns the standard deviation within each group, `(G,)`, 0 for groups without signal. The `correction` is 1
        for the unbiased and 0 for the population standard deviation, as in `torch.std`.
        """
        return (self.squares / (self.count - correction).clamp(min=1)).sqrt()


def group_statistics(
    rewards: torch.Tensor, group_ids: torch.Tensor, weights: torch.Tensor | float = 1.0
) -> GroupStatistics:
    """
    Centres rewards `(N,)` within groups with ids `(N,)`, on the CPU. `weights` `(N,)` say how often a reward counts.

    Rewards that differ only by rounding count as equal, so that rounding never becomes an advantage. Rewards `[1, 0,
    2, 2]` in groups `[7, 7, 5, 5]` have `index` `[1, 1, 0, 0]`, `centred` `[0.5, -0.5, 0, 0]` and `has_signal`
    `[False, True]`.
    """
    # On the CPU, as not every device has float64
    rewards = rewards.cpu()
    index = group_ids.cpu().unique(return_inverse=True)[1]
    n_groups = int(index.max()) + 1
    scorable = ~rewards.isnan()
    values = torch.where(scorable, rewards, 0).double()

    def group_sums(x):
        return x.new_zeros(n_groups).index_add(0, index, x * weights)

    def group_extremes(fill, reduce):
        x = torch.where(scorable, values, fill)  # `fill` keeps unscorable rewards from being the extreme
        return x.new_full((n_groups,), fill).scatter_reduce(0, index, x, reduce)

    count = group_sums(scorable.double())
    mean = group_sums(values) / count.clamp(min=1)
    reward_ranges = group_extremes(-torch.inf, "amax") - group_extremes(torch.inf, "amin")
    # The sum of two completions' weights may be slightly below 2, as fractions are rounded
    has_signal = (count >= 2 - TOLERANCE) & (reward_ranges > TOLERANCE * mean.abs().clamp(min=1))
    centred = torch.where(scorable & has_signal[index], values - mean[index], 0)
    return GroupStatistics(index, centred, group_sums(centred.square()), count, has_signal)


@estimator("group_norm", alias="grpo", needs="group")
def group_norm(
    rewards: torch.Tensor, group_ids: torch.Tensor, *, scale: Literal["group", "batch", "none"] = "group"
) -> torch.Tensor:
    r"""
    GRPO's advantage, $(R - \mathrm{mean}) / (\sigma + \epsilon)$ with the unbiased standard deviation of the group,
    see [DeepSeekMath](https://huggingface.co/papers/2402.03300).

    See [`estimate_advantages`] for the arguments.
    """
    groups = group_statistics(rewards, group_ids)
    advantages = groups.centred
    if scale == "group":
        advantages = advantages / (groups.std(correction=1) + _EPS)[groups.index]
    elif scale == "batch":
        scorable = rewards[~rewards.isnan()].cpu().double()
        std = scorable.std() if len(scorable) > 1 else scorable.new_zeros(())
        advantages = advantages / (std + _EPS)
    return advantages.to(rewards)


@estimator("rloo", needs="group", kl_in_reward=True)
def rloo(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    r"""
    RLOO's advantage, the reward minus the mean reward of the *other* completions of the group, see
    [Back to Basics](https://huggingface.co/papers/2402.14740). The reward contains the KL penalty of the whole
    completion.

    See [`estimate_advantages`] for the arguments.
    """
    groups = group_statistics(rewards, group_ids)
    # The reward minus the group mean, times this factor, is the reward minus the mean of the others
    factor = groups.count / (groups.count - 1).clamp(min=1)
    return (groups.centred * factor[groups.index]).to(rewards)


@estimator("reinforce", alias="reinforce++", per_token=True, kl_in_reward=True)
def reinforce(
    rewards: torch.Tensor,
    mask: torch.Tensor,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    *,
    kl_coef: float = 0.0,
) -> torch.Tensor:
    r"""
    REINFORCE++'s advantage: the return of each token ($\gamma = 1$), whitened over all tokens of the batch, see
    [REINFORCE++](https://huggingface.co/papers/2501.03262). Every token is rewarded with its KL penalty, and the last
    token also with the completion's reward. One completion per prompt is enough.

    See [`estimate_advantages`] for the arguments.
    """
    mask = mask.bool() & ~rewards.isnan()[:, None]
    returns = cumulative_returns(token_rewards(rewards, mask, old_logps, ref_logps, kl_coef=kl_coef), mask)
    return whiten(returns, mask)


@estimator("reinforce_baseline", alias="reinforce++_baseline", needs="group", default_kl_estimator="k2")
def reinforce_baseline(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    mask: torch.Tensor,
    *,
    norm_level: Literal["token", "sequence"] = "token",
) -> torch.Tensor:
    r"""
    REINFORCE++-baseline's advantage: the reward minus the mean of its group, whitened over the batch, see
    [REINFORCE++](https://huggingface.co/papers/2501.03262). Groups without signal are left out of the whitening, and
    have the advantage 0.

    See [`estimate_advantages`] for the other arguments.

    Args:
        norm_level (`str`, *optional*, defaults to `"token"`):
            Unit that counts once in the mean and the standard deviation: `"token"`, so that long completions count
            more, or `"sequence"`.
    """
    groups = group_statistics(rewards, group_ids)
    weights = mask.sum(1).cpu().double() if norm_level == "token" else torch.ones_like(groups.centred)
    scorable = ~rewards.isnan().cpu()
    return whiten(groups.centred, groups.has_signal[groups.index] & scorable, torch.where(scorable, weights, 0)).to(
        rewards
    )


@estimator("cpgd", needs="group")
def cpgd(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    weight: Literal["none", "std", "clip_filter_like"] = "clip_filter_like",
) -> torch.Tensor:
    r"""
    CPGD's advantage, $\omega \cdot (R - \mathrm{mean})$ with a weight $\omega$ per group, see
    [CPGD](https://huggingface.co/papers/2505.12504).

    See [`estimate_advantages`] for the other arguments.

    Args:
        weight (`str`, *optional*, defaults to `"clip_filter_like"`):
            Weight of a group with signal: 1 (`"none"`), 1 over its population standard deviation (`"std"`), or the
            number of groups divided by the number of groups with signal, at most 3 (`"clip_filter_like"`).
    """
    groups = group_statistics(rewards, group_ids)
    if weight == "std":
        weights = 1 / (groups.std(correction=0) + 1e-6)
    elif weight == "clip_filter_like":
        weights = clip_filter_like_weights(groups.has_signal)
    else:
        weights = torch.ones_like(groups.squares)
    return (groups.centred * weights[groups.index]).to(rewards)


def clip_filter_like_weights(
    has_signal: torch.Tensor, clip: float = 3.0, weight_without_signal: float = 1.0
) -> torch.Tensor:
    """
    Returns weights of groups, `(G,)`, float64, by which groups with signal make up for groups without signal.

    For example, if 2 of 4 groups have signal, their weight is 4 / 2, and the other two groups have the weight
    `weight_without_signal`. Weights of groups with signal are at most `clip`. If no group has signal, all weights are
    1. `has_signal` has the shape `(G,)`.
    """
    n_with_signal = has_signal.sum().double()
    if n_with_signal == 0:
        return torch.ones_like(has_signal, dtype=torch.float64)
    return torch.where(has_signal, (len(has_signal) / n_with_signal).clamp(max=clip), weight_without_signal)


@estimator("dr_grpo", needs="group")
def dr_grpo(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    r"""
    Dr. GRPO's advantage, $R - \mathrm{mean}$, which doesn't favour groups with little spread, see
    [Understanding R1-Zero-Like Training](https://huggingface.co/papers/2503.20783).

    See [`estimate_advantages`] for the arguments.
    """
    return group_norm(rewards, group_ids, scale="none")


@estimator("online_dpo", needs="group", kl_in_reward=True)
def online_dpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    mask: torch.Tensor,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    *,
    kl_coef: float = 0.0,
    loss: Literal["sigmoid", "ipo"] = "sigmoid",
) -> torch.Tensor:
    r"""
    Online DPO's weight $G \beta \sigma(-\beta \Delta)$ for the completion with the largest reward of a group, and the
    negative weight for the completion with the smallest reward, see
    [Online AI Feedback](https://huggingface.co/papers/2402.04792). The group has $G$ completions, and $\Delta$ is the
    difference of $\log \pi - \log \pi_\mathrm{ref}$ between the two. Other completions, and groups whose
    rewards are equal up to rounding, have the weight 0. With `loss="ipo"`
    ([IPO](https://huggingface.co/papers/2310.12036)), the weight is $G (1 / \beta - 2 \Delta)$.

    With a policy loss that sums over the tokens of a completion (`"luspo"`), the first update on a batch has the
    gradient of DPO's loss.

    See [`estimate_advantages`] for the other arguments; `kl_coef` is $\beta$, above 0.

    Args:
        loss (`str`, *optional*, defaults to `"sigmoid"`):
            Loss of a pair: `"sigmoid"` or `"ipo"`.

    Raises:
        `ValueError`: Without log-probabilities of policy and reference, or if `kl_coef` isn't above 0.
    """
    if old_logps is None or ref_logps is None or kl_coef <= 0:
        raise ValueError(
            "'online_dpo' compares the policy with its reference; pass `old_logps`, `ref_logps` and a `kl_coef` above "
            "0."
        )
    _, groups = group_ids.unique(return_inverse=True)
    # Batch indices, sorted by group, and by reward within a group. Rewards `[0.5, NaN, 0.9, 0.1]` of the groups
    # `[0, 0, 1, 1]` give `[0, 3, 2]`.
    scorable_indices = (~rewards.isnan()).nonzero().flatten()
    reward_order = scorable_indices[rewards[scorable_indices].argsort(stable=True)]
    sorted_indices = reward_order[groups[reward_order].argsort(stable=True)]
    n_scorable = groups[sorted_indices].bincount()
    has_scorable = n_scorable > 0
    ends = n_scorable.cumsum(0)
    # Batch indices of the first and the last completion of each group in this order: `[0, 3]` and `[0, 2]`
    worst = sorted_indices[(ends - n_scorable)[has_scorable]]
    best = sorted_indices[ends[has_scorable] - 1]
    has_signal = group_statistics(rewards, group_ids).has_signal.to(groups.device)
    is_pair = has_signal[groups[best]]
    worst = worst[is_pair]
    best = best[is_pair]
    log_ratios = torch.where(mask.bool(), old_logps - ref_logps, 0).double().sum(1)  # of whole completions
    margins = log_ratios[best] - log_ratios[worst]
    weights = kl_coef * (-kl_coef * margins).sigmoid() if loss == "sigmoid" else 1 / kl_coef - 2 * margins
    advantages = torch.zeros_like(rewards)
    advantages[best] = (groups.bincount()[groups[best]] * weights).to(rewards)
    advantages[worst] = -advantages[best]
    return advantages


@estimator("turn_norm", needs="group", per_token=True, step_input="steps")
def turn_norm(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    mask: torch.Tensor,
    steps: Steps,
    *,
    turn_discount: Annotated[float, "[0, 1]"] = 1.0,
    norm: Literal["turn", "trajectory"] = "turn",
) -> torch.Tensor:
    r"""
    Advantage of each token: the return of its step, $G_k = \sum_{j \ge k} \gamma^{j - k} r_j$, normalized within its
    group. The reward of the last step includes the reward of the whole completion. The process supervision of
    [DeepSeekMath](https://huggingface.co/papers/2402.03300) normalizes rewards before the sum instead.

    For example, a completion has two steps with the rewards 1 and 0, and another has one step with the reward 0. Their
    first steps have the advantages 0.71 and -0.71. The second step has no step to compare with, and the advantage 0.

    See [`estimate_advantages`] for the other arguments.

    Args:
        turn_discount (`float`, *optional*, defaults to `1.0`):
            $\gamma$, per step. A step is a turn, or a part of a turn that a reward function rewards.
        norm (`str`, *optional*, defaults to `"turn"`):
            Steps of the group that give the mean and the unbiased standard deviation: steps with the same index
            (`"turn"`), or all steps, with the same weight for every completion (`"trajectory"`). With `"trajectory"`,
            advantages are 0 if the group's returns are equal at every index.
    """
    batch_indices, step_indices = steps.indices()
    returns = torch.where(rewards.cpu().isnan()[batch_indices], torch.nan, steps.returns(turn_discount))
    step_groups = group_ids.cpu()[batch_indices]
    # Steps with equal group ids and step indices form a group, with a unique id
    groups = group_statistics(returns, step_groups * (step_indices.amax() + 1) + step_indices)
    centred = groups.centred
    if norm == "trajectory":
        step_has_signal = groups.has_signal[groups.index].double()
        # Each of a completion's k steps has the weight 1 / k
        groups = group_statistics(returns, step_groups, 1 / batch_indices.bincount().double()[batch_indices])
        # Whether a group of completions has different returns at some step index
        is_mixed = torch.zeros(len(groups.has_signal)).double().index_add(0, groups.index, step_has_signal) > 0
        centred = torch.where(is_mixed[groups.index], groups.centred, 0)
    return steps.on_tokens(centred / (groups.std(correction=1) + _EPS)[groups.index], mask).to(rewards)


@estimator("ps_grpo", needs="group", step_input="steps")
def ps_grpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    steps: Steps,
    *,
    gamma: Annotated[float, "[0, 1]"] = 0.5,
    rho: Annotated[float, "(0, inf)"] = 0.3,
) -> torch.Tensor:
    r"""
    PS-GRPO's advantage: GRPO's advantage of the outcomes, the rewards of whole completions, see Equation 6 of
    [URSA](https://huggingface.co/papers/2501.04686). If a completion's step rewards $p_k$ drop,
    $\max_k (p_k - p_{k+1}) / p_k \ge \rho$, its outcome is first multiplied by $1 - \gamma$. Step rewards count in no
    other way.

    See [`estimate_advantages`] for the other arguments.

    Args:
        gamma (`float`, *optional*, defaults to `0.5`):
            Share of an outcome above 0 that a drop removes.
        rho (`float`, *optional*, defaults to `0.3`):
            Smallest relative drop, from a rewarded step to the next rewarded step, that counts.

    Raises:
        `ValueError`: If no function gives a reward of whole completions.
    """
    outcomes = steps.outcomes
    if outcomes.isnan().all() and not rewards.isnan().all():
        raise ValueError("`advantage_estimator='ps_grpo'` needs a reward function of whole completions, too; add one.")
    rewards_by_completion = [
        [step.reward for step in completion if step.reward is not None] for completion in steps.steps
    ]
    has_drop = torch.tensor(
        [any(a > 0 and a - b >= rho * a for a, b in pairwise(step_rewards)) for step_rewards in rewards_by_completion]
    )
    outcomes = torch.where(has_drop & (outcomes > 0), (1 - gamma) * outcomes, outcomes)
    return group_norm(outcomes, group_ids).to(rewards)


@estimator("gigpo", needs="group", per_token=True, step_input="states")
def gigpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    mask: torch.Tensor,
    steps: Steps,
    *,
    turn_discount: Annotated[float, "[0, 1]"] = 0.95,
    omega: Annotated[float, "[0, inf)"] = 1.0,
    norm: Literal["std", "none"] = "std",
) -> torch.Tensor:
    r"""
    GiGPO's advantage: the completion's advantage in its group, plus $\omega$ times the turn's advantage, see
    [GiGPO](https://huggingface.co/papers/2505.10978). The turn's advantage compares its discounted return
    $\sum_{j \ge k} \gamma^{j - k} r_j$ with the returns of all turns of the group that answer the same prompt or the
    same tool results. If no other turn answers them, the second term is 0.

    See [`estimate_advantages`] for the other arguments.

    Args:
        turn_discount (`float`, *optional*, defaults to `0.95`):
            $\gamma$, per turn.
        omega (`float`, *optional*, defaults to `1.0`):
            Weight of the second term.
        norm (`str`, *optional*, defaults to `"std"`):
            Whether both terms are divided by the unbiased standard deviation of their group.
    """
    turns = steps.merge_turns()
    scale = "group" if norm == "std" else "none"
    batch_indices = turns.indices()[0]
    states = torch.tensor([turn.state for turn in chain.from_iterable(turns.steps)])
    returns = torch.where(rewards.cpu().isnan()[batch_indices], torch.nan, turns.returns(turn_discount))
    # Turns with equal group ids and states form a group, with a unique id
    turn_advantages = group_norm(returns, group_ids.cpu()[batch_indices] * (states.amax() + 1) + states, scale=scale)
    completion_advantages = group_norm(rewards.cpu().double(), group_ids.cpu(), scale=scale)
    return turns.on_tokens(completion_advantages[batch_indices] + omega * turn_advantages, mask).to(rewards)


@estimator("gae", needs="critic", per_token=True, kl_in_reward=True)
def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: Annotated[float, "[0, 1]"] = 1.0,
    lam: Annotated[float, "[0, 1]"] = 0.95,
    bootstrap: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Generalized advantage estimation, $\delta_t = r_t + \gamma V_{t+1} - V_t$ and
    $A_t = \delta_t + \gamma \lambda A_{t+1}$, see
    [Generalized Advantage Estimation](https://huggingface.co/papers/1506.02438). Tokens outside the mask are skipped:
    $V_{t+1}$ before a gap is the value after the gap.

    Args:
        rewards (`torch.Tensor`):
            Reward of each token, shape `(N, T)`.
        values (`torch.Tensor`):
            Critic's value of the state *before* each token, shape `(N, T)`.
        mask (`torch.Tensor`):
            1 on valid tokens, shape `(N, T)`.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount per valid token.
        lam (`float`, *optional*, defaults to `0.95`):
            GAE's $\lambda$.
        bootstrap (`torch.Tensor`, *optional*):
            Value of the state after the last token, shape `(N,)`: the critic's value if a completion was truncated, 0
            if it ended. By default, all are 0.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Advantages, not whitened, and returns $A_t + V_t$, shape `(N, T)`.
    """
    mask = mask.bool()
    width = mask.size(1)
    rewards = torch.where(mask, rewards, 0)
    values = torch.where(mask, values, 0)
    # Index of the next valid token after each token. `width` stands for the state after the last token: the mask `[1,
    # 0, 1]` gives `[2, 2, 3]`.
    next_index = torch.where(mask, torch.arange(width, device=mask.device), width)
    next_index = F.pad(next_index[:, 1:], (0, 1), value=width).flip(1).cummin(1).values.flip(1)
    final_values = values.new_zeros(len(values)) if bootstrap is None else bootstrap.to(values.dtype)
    delta = rewards - values + gamma * torch.cat([values, final_values[:, None]], dim=1).gather(1, next_index)
    advantages = cumulative_returns(delta, mask, gamma * lam)
    return advantages, torch.where(mask, advantages + values, 0)


def estimate_advantages(
    name: str | Estimator | Callable,
    *,
    rewards: torch.Tensor,
    rewards_per_func: torch.Tensor,
    group_ids: torch.Tensor,
    mask: torch.Tensor,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    scale: str = "group",
    steps: Steps | None = None,
) -> torch.Tensor:
    r"""
    Computes the advantages of a whole batch, by the name of an estimator or by a user's function.

    Args:
        name (`str`, [`Estimator`] or `Callable`):
            Name of an estimator, which settings may follow (`"cpgd(weight='std')"`), the estimator itself, or a
            function that takes the next six arguments by name and returns advantages of shape `(N,)` or `(N, T)`.
        rewards (`torch.Tensor`):
            Weighted and shaped rewards, `NaN` where unscorable, shape `(N,)`.
        rewards_per_func (`torch.Tensor`):
            Rewards by each reward function, shape `(N, F)`.
        group_ids (`torch.Tensor`):
            Group of each completion, any integers in any order, shape `(N,)`.
        mask (`torch.Tensor`):
            1 on the tokens that are trained on, shape `(N, T)`.
        old_logps (`torch.Tensor`, *optional*):
            Log-probabilities under the policy that sampled, shape `(N, T)`.
        ref_logps (`torch.Tensor`, *optional*):
            Log-probabilities under the reference, shape `(N, T)`.
        kl_coef (`float`, *optional*, defaults to `0.0`):
            Coefficient of the k1 penalty in the reward. Estimators per token subtract it from the rewards of tokens,
            others from the reward of the completion. In [`online_dpo`], the coefficient is $\beta$ instead.
        scale (`str`, *optional*, defaults to `"group"`):
            [`group_norm`] divides by the standard deviation of the `"group"`, of all rewards of the `"batch"`, or by
            nothing (`"none"`).
        steps ([`~algorithms.returns.Steps`], *optional*):
            Steps of the completions with their rewards, which some estimators need.

    Returns:
        `torch.Tensor`: Advantages, shape `(N,)` or `(N, T)`, 0 for unscorable completions and outside the mask.

    Raises:
        `ValueError`: If the function returns another shape or a value that isn't finite, or the name is unknown.
    """
    tensors: dict[str, Any] = {
        "rewards": rewards,
        "rewards_per_func": rewards_per_func,
        "group_ids": group_ids,
        "mask": mask,
        "old_logps": old_logps,
        "ref_logps": ref_logps,
    }
    if callable(name):
        return _check_advantages(name(**tensors), name, rewards, mask)
    try:
        chosen = name if isinstance(name, Estimator) else as_estimator(name)
    except KeyError:
        chosen = None
    if chosen is None:
        raise ValueError(f"There is no advantage estimator {name!r}; name one of {', '.join(ESTIMATORS)}.")
    if chosen.needs == "critic" or (chosen.step_input and steps is None):
        missing = "values of a critic; call `gae`" if chosen.needs == "critic" else "rewards of steps; pass `steps`"
        raise ValueError(f"`advantage_estimator={chosen.spelling!r}` needs {missing}.")
    parameters = inspect.signature(chosen.function).parameters
    # Estimators with the argument `kl_coef` use it themselves
    if kl_coef and not chosen.per_token and "kl_coef" not in parameters:
        kl = approx_kl(tensors["old_logps"], tensors["ref_logps"], mask, "k1")
        tensors["rewards"] = rewards - kl_coef * kl.sum(1)
    arguments = {**tensors, "kl_coef": kl_coef, "scale": scale, "steps": steps}
    return chosen.function(**{key: value for key, value in arguments.items() if key in parameters}, **chosen.settings)


def check_estimator(function: Callable) -> None:
    """Raises a `ValueError` if a user's function doesn't accept the arguments that [`estimate_advantages`] passes."""
    names = ("rewards", "rewards_per_func", "group_ids", "mask", "old_logps", "ref_logps")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ValueError(
            f"The advantage estimator '{_function_name(function)}' {signature} can't be called with "
            f"{', '.join(names)} as keyword arguments ({error}); name its parameters like "
            "these arguments, and add `**kwargs` for arguments that it doesn't need."
        ) from None


def _function_name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _check_advantages(advantages, function: Callable, rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Returns a user's advantages, set to 0 for unscorable completions and outside the mask. Raises a `ValueError` for
    another shape, or a value that isn't finite.
    """
    name = _function_name(function)
    if not isinstance(advantages, torch.Tensor) or advantages.shape not in (rewards.shape, mask.shape):
        result = tuple(advantages.shape) if isinstance(advantages, torch.Tensor) else type(advantages).__name__
        raise ValueError(
            f"The advantage estimator '{name}' returned {result}; return a tensor of shape {tuple(rewards.shape)} or "
            f"{tuple(mask.shape)}."
        )
    scorable = ~rewards.isnan()
    is_valid = scorable if advantages.dim() == 1 else scorable[:, None] & mask.bool()
    advantages = torch.where(is_valid, advantages, 0)
    if not advantages.isfinite().all():
        index = int((~advantages.isfinite()).nonzero()[0, 0])
        raise ValueError(f"The advantage estimator '{name}' returned a value that isn't finite for sample {index}.")
    return advantages.to(rewards.dtype)
