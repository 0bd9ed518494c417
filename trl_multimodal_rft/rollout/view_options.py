# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Options that name a view: for which completions it is, how strong, and what it does in the loss."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypeVar

from ..families import MODALITIES
from ..spelling import check_settings, check_value, did_you_mean, split_settings
from ..views import View, as_view


@dataclass(frozen=True)
class RolloutView:
    """A view that a share of each group is sampled from, by the option `rollout_view`."""

    view: View | None = None
    fraction: Annotated[float, "(0, 1]"] = 0.5  # of a group: its last completions, rounded down
    schedule: str = "constant"  # of the view's strength, see `SCHEDULES`


@dataclass(frozen=True)
class ContrastView:
    """A view that further completions are sampled from, by the option `contrast_view`."""

    view: View | None = None
    fraction: Annotated[float, "(0, 1]"] = 0.5  # further completions of a group, as a share of it, rounded down
    reward_ratio: Annotated[float, "[0, inf)"] = 0.8  # of the group's mean reward to theirs, at least, for the bonus
    bonus: Annotated[float, "(0, inf)"] = 0.3  # of the group's right completions


@dataclass(frozen=True)
class LossView:
    """A view in the loss, by the option `loss_view`."""

    view: View | None = None
    kl_coef: Annotated[float, "[0, inf)"] = 0.0  # of the divergence between the policies with and without the view
    kl_clip: Annotated[float, "(0, inf]"] = 10.0  # divergence of a token in nats from which on it isn't raised further
    # Of the entropies of the policy and of the policy under the view, which are lowered
    entropy_coefs: list[float] | None = None
    advantage_min: Annotated[float | None, "[0, 1]"] = None  # weight of the advantage that depends least on the media
    token_quantile: Annotated[float, "(0, 1]"] = 1.0  # share of the tokens that are trained on, by their dependency
    temperature: Annotated[float | None, "(0, inf)"] = None  # of the weights of tokens by differences of entropies

    @property
    def has_term(self) -> bool:
        """Whether it adds terms to the loss."""
        return self.kl_coef != 0 or self.entropy_coefs is not None

    @property
    def is_trained(self) -> bool:
        """Whether terms in the loss have a gradient under the view."""
        return self.kl_coef != 0 or (self.entropy_coefs or (0, 0))[1] != 0

    @property
    def measures_divergence(self) -> bool:
        """Whether distributions under the policy that sampled are compared with those under the view."""
        return self.advantage_min is not None or self.token_quantile < 1

    @property
    def measures_dependency(self) -> bool:
        """Whether the dependency on media is measured, by a divergence or by entropies."""
        return self.measures_divergence or self.temperature is not None


@dataclass(frozen=True)
class RejectedView:
    """A view after which a chosen completion is rejected, by the option `rejected_view`."""

    view: View | None = None
    conditional_coef: Annotated[float, "[0, inf)"] = 1.0  # of the preference for the media over the view
    anchor_coef: Annotated[float, "[0, inf)"] = 1.0  # of the term that keeps chosen rewards above the anchor
    anchor: float = 0.0  # reward of a chosen completion


T = TypeVar("T", RolloutView, ContrastView, LossView, RejectedView)


def view_option(cls: type[T], option: str, value: str | None) -> T:
    """
    Reads an option that names a view, whose settings (`"mask_patches(ratio=0.6, kl_coef=0.01)"`) are those of the view
    and the fields of a class. Raises `ValueError` if neither has a setting, or both, or a value is out of range.
    """
    if value is None:
        return cls()
    name, settings = split_settings(value)
    hints = {each.name: (each.type, each.default) for each in fields(cls) if each.name != "view"}
    chosen, own = as_view(name), {}
    known = inspect.signature(chosen.type.function).parameters
    if both := sorted(hints.keys() & known):
        raise ValueError(f"The view {name!r} has a setting {both[0]!r}, as `{option}` does; rename that of the view.")
    for key, given in (settings or {}).items():
        if key in hints:
            annotation, default = hints[key]
            check_value(f"`{key}` of `{option}`", given, annotation, f"the default is {default!r}")
            own[key] = given
        elif key not in known:
            raise ValueError(
                f"`{option}={value!r}` has no setting {key!r}: the view {name!r} has {[*known][2:]}, and the option "
                f"{[*hints]}.{did_you_mean(key, [*known, *hints])}"
            )
    rest = {key: given for key, given in (settings or {}).items() if key not in own}
    check_settings(chosen.type.function, option, rest)
    return cls(replace(chosen, settings=rest), **own)


def changed_media(config: Mapping[str, Any]) -> dict[str, set[str]]:
    """The modalities of media that the views of a config change, by its options that name them."""
    names = ("rollout_view", "contrast_view", "loss_view", "teacher_view", "student_view", "rejected_view")
    views = {f"`{name}`": as_view(split_settings(config[name])[0]) for name in names if config.get(name)}
    kinds = {name: {*filter(view.applies_to, MODALITIES)} for name, view in views.items()}
    return {name: each | {"video"} if config["use_audio_in_video"] else each for name, each in kinds.items()}


def sigmoid(progress: float, midpoint: float = 2 / 3, steepness: float = 30.0) -> float:
    r"""
    The decay of a strength in [NoisyRollout](https://huggingface.co/papers/2504.13055), to a share
    $1 - 1 / (1 + e^{-\lambda (t - \gamma) / T})$ of it, where $t / T$ is the progress of the run, $\gamma / T$ the
    midpoint and $\lambda$ the steepness.
    """
    return (1 - math.tanh(steepness * (progress - midpoint) / 2)) / 2


# Strength of a view at a share of the run
SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "sigmoid": sigmoid,
}


def as_schedule(text: str) -> Callable[[float], float]:
    """
    A schedule by its name, with settings behind it: `"sigmoid(midpoint=0.5)"`.

    Raises `ValueError` if there is no such schedule, or it has no such setting.
    """
    name, settings = split_settings(text)
    if name not in SCHEDULES:
        raise ValueError(f"There is no schedule {name!r}; name one of {', '.join(map(repr, SCHEDULES))}.")
    check_settings(SCHEDULES[name], name, settings or {})
    return functools.partial(SCHEDULES[name], **(settings or {}))


def last_of_groups(share: float, n: int, first: int, group_size: int) -> list[int]:
    """
    Which of `n` completions, from the place `first` of all ranks' on, are the last of their group, so many as a share
    of it, rounded down.
    """
    start = group_size - int(share * group_size)
    return [i for i in range(n) if (first + i) % group_size >= start]
