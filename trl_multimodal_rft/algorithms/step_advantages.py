# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Advantages by the rewards of steps, or by the values of a critic: turn-level GRPO, PS-GRPO, GiGPO and GAE."""

from itertools import chain, pairwise
from typing import Annotated, Literal

import torch
import torch.nn.functional as F

from .estimators import EPS, estimator, group_statistics
from .group_advantages import group_norm
from .returns import Steps, cumulative_returns


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

    See [`~algorithms.advantages.estimate_advantages`] for the other arguments.

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
    return steps.on_tokens(centred / (groups.std(correction=1) + EPS)[groups.index], mask).to(rewards)


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

    See [`~algorithms.advantages.estimate_advantages`] for the other arguments.

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

    See [`~algorithms.advantages.estimate_advantages`] for the other arguments.

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
