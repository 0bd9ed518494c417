# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Registry of advantage estimators, and the statistics of groups that they share.

An estimator is a function decorated with [`estimator`]. Its docstring holds the formula and the paper. A batch has `N`
completions of up to `T` tokens. Masks may have gaps, and padding on either side. Advantages are exactly 0 outside the
mask. A reward of `NaN` means that the completion can't be scored: it enters no statistic and gets the advantage 0.
Statistics are computed in float64.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from ..spelling import check_properties, check_settings, check_unused, join_settings, split_settings
from .papers import Paper, cite, paper_of
from .returns import TOLERANCE


# Added to a standard deviation of rewards before a division by it, as in TRL
EPS = 1e-4


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
    # Whether it reads log-probabilities of the sampled tokens, besides those of a KL penalty
    reads_logps: bool = False
    settings: dict[str, Any] = field(default_factory=dict)  # `{"weight": "std"}` for `"cpgd(weight='std')"`

    @property
    def spelling(self) -> str:
        """The name with its settings, as a value of `advantage_estimator`."""
        return join_settings(self.name, self.settings)

    def setting(self, name: str) -> Any:
        """Returns the value of a setting, or its default; `None` if the estimator has no such setting."""
        parameter = inspect.signature(self.function).parameters.get(name)
        return self.settings.get(name, None if parameter is None else parameter.default)


ESTIMATORS: dict[str, Estimator] = {}  # by name
ALIASES: dict[str, str] = {}  # names by alias


def estimator(name: str, **properties) -> Callable:
    """Returns a decorator that registers a function as estimator `name` with `properties`, fields of [`Estimator`]."""

    def register(function: Callable) -> Callable:
        # No other estimator may have the name or the alias, as its name or its alias
        check_unused(
            [name, *([properties["alias"]] if "alias" in properties else [])], {*ESTIMATORS, *ALIASES}, "estimator"
        )
        check_properties(Estimator, name, properties)
        ESTIMATORS[name] = Estimator(name, paper_of(function), function, **properties)
        if "alias" in properties:
            ALIASES[properties["alias"]] = name
        return function

    return register


# Keyword arguments whose values come from options of trainers. An estimator's other keyword arguments are settings.
_TRAINER_ARGUMENTS = ("kl_coef", "scale", "eps", "bootstrap")


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
    Rewards that differ only by rounding count as equal, so that rounding never becomes an advantage.
    """
    # On the CPU, as not every device has float64
    rewards = rewards.cpu()
    index = group_ids.cpu().unique(return_inverse=True)[1]
    n_groups = int(index.max()) + 1
    scorable = ~rewards.isnan()
    values = torch.where(scorable, rewards, 0).double()

    def group_sums(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(n_groups).index_add(0, index, x * weights)

    def group_extremes(fill: float, reduce: str) -> torch.Tensor:
        x = torch.where(scorable, values, fill)  # `fill` keeps unscorable rewards from being the extreme
        return x.new_full((n_groups,), fill).scatter_reduce(0, index, x, reduce)

    count = group_sums(scorable.double())
    mean = group_sums(values) / count.clamp(min=1)
    reward_ranges = group_extremes(-torch.inf, "amax") - group_extremes(torch.inf, "amin")
    # The sum of two completions' weights may be slightly below 2, as fractions are rounded
    has_signal = (count >= 2 - TOLERANCE) & (reward_ranges > TOLERANCE * mean.abs().clamp(min=1))
    centred = torch.where(scorable & has_signal[index], values - mean[index], 0)
    return GroupStatistics(index, centred, group_sums(centred.square()), count, has_signal)
