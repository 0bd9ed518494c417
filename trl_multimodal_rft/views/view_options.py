# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Options that name a view, with settings for its share of completions, its strength, and its terms in the loss."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypeVar

from ..modalities import MODALITIES
from ..spelling import check_setting, check_settings, did_you_mean, split_settings
from .views import View, as_view, setting_names


@dataclass(frozen=True)
class RolloutView:
    """View under which a share of each group is sampled, by the option `rollout_view`."""

    view: View | None = None
    fraction: Annotated[float, "(0, 1]"] = 0.5  # share of a group's completions, the last ones, rounded down
    schedule: str = "constant"  # schedule of the view's strength, see `SCHEDULES`


@dataclass(frozen=True)
class ContrastView:
    """View under which further completions are sampled, by the option `contrast_view`."""

    view: View | None = None
    fraction: Annotated[float, "(0, 1]"] = 0.5  # number of further completions as a share of the group, rounded down
    # The bonus applies if the mean reward of the group is at least this many times the mean reward under the view
    reward_ratio: Annotated[float, "[0, inf)"] = 0.8
    bonus: Annotated[float, "(0, inf)"] = 0.3  # addition to the rewards of the group's right completions


@dataclass(frozen=True)
class LossView:
    """View under which completions are scored again, for terms and weights of the loss, by the option `loss_view`."""

    view: View | None = None
    # Weight of a term that increases the policy's divergence from itself under the view
    kl_coef: Annotated[float, "[0, inf)"] = 0.0
    # Divergence of a token, in nats, above which training doesn't increase it further
    kl_clip: Annotated[float, "(0, inf]"] = 10.0
    # Weights of two entropies that the loss lowers: of the policy without and with the view
    entropy_coefs: list[float] | None = None
    # Factor on the advantage of the completion that depends least on media. The mean factor of a batch is 1.
    advantage_min: Annotated[float | None, "[0, 1]"] = None
    token_quantile: Annotated[float, "(0, 1]"] = 1.0  # share of tokens to train on, the most media-dependent first
    # Temperature of the softmax that turns absolute differences of tokens' entropies, under the view minus with the
    # media, into weights of the tokens in the loss
    temperature: Annotated[float | None, "(0, inf)"] = None

    @property
    def has_term(self) -> bool:
        """`True` if the view adds terms to the loss."""
        return self.kl_coef != 0 or self.entropy_coefs is not None

    @property
    def has_gradient(self) -> bool:
        """`True` if a term of the loss has a gradient through the scores under the view."""
        return self.kl_coef != 0 or (self.entropy_coefs or (0, 0))[1] != 0

    @property
    def measures_divergence(self) -> bool:
        """`True` if a setting needs the divergence between distributions with the media and under the view."""
        return self.advantage_min is not None or self.token_quantile < 1

    @property
    def measures_dependency(self) -> bool:
        """`True` if the dependency of tokens on media is measured, by a divergence or by entropies."""
        return self.measures_divergence or self.temperature is not None


@dataclass(frozen=True)
class RejectedView:
    """View under which the chosen completion counts as rejected, by the option `rejected_view`."""

    view: View | None = None
    conditional_coef: Annotated[float, "[0, inf)"] = 1.0  # weight of the preference for the media over the view
    anchor_coef: Annotated[float, "[0, inf)"] = 1.0  # weight of the term that keeps chosen rewards above the anchor
    anchor: float = 0.0  # reward that chosen completions should exceed


T = TypeVar("T", RolloutView, ContrastView, LossView, RejectedView)


def view_option(cls: type[T], option: str, value: str | None) -> T:
    """
    Reads an option that names a view, with settings of the view and of `cls`, such as
    `"mask_patches(ratio=0.6, kl_coef=0.01)"`. Raises `ValueError` if a setting belongs to neither or to both, or if a
    value is out of range.
    """
    if value is None:
        return cls()
    name, settings = split_settings(value, option)
    option_fields = {spec.name: (spec.type, spec.default) for spec in fields(cls) if spec.name != "view"}
    view = as_view(name)
    option_settings = {}
    view_parameters = setting_names(view.type.function)
    ambiguous = sorted(option_fields.keys() & {*view_parameters})
    if ambiguous:
        raise ValueError(
            f"The view {name!r} has a setting {ambiguous[0]!r}, as `{option}` does; rename the view's setting."
        )
    for key, setting in (settings or {}).items():
        if key in option_fields:
            annotation, default = option_fields[key]
            check_setting(f"`{key}` of `{option}`", setting, annotation, default)
            option_settings[key] = setting
        elif key not in view_parameters:
            raise ValueError(
                f"`{option}={value!r}` has no setting {key!r}: the view {name!r} has {view_parameters}, and "
                f"the option has {[*option_fields]}.{did_you_mean(key, [*view_parameters, *option_fields])}"
            )
    view_settings = {key: setting for key, setting in (settings or {}).items() if key not in option_settings}
    check_settings(view.type.function, option, view_settings, view_parameters)
    return cls(replace(view, settings=view_settings), **option_settings)


def changed_media(config: Mapping[str, Any]) -> dict[str, set[str]]:
    """Returns the modalities that the views of a config replace, by the options that name the views."""
    view_options = ("rollout_view", "contrast_view", "loss_view", "teacher_view", "student_view", "rejected_view")
    views = {f"`{name}`": as_view(split_settings(config[name])[0]) for name in view_options if config.get(name)}
    modalities_by_option = {name: {*filter(view.applies_to, MODALITIES)} for name, view in views.items()}
    # A view of sounds also changes the sound of a video that the model hears
    return {
        name: modalities | {"video"} if config["use_audio_in_video"] and "audio" in modalities else modalities
        for name, modalities in modalities_by_option.items()
    }


def sigmoid(progress: float, midpoint: float = 2 / 3, steepness: float = 30.0) -> float:
    r"""
    Returns the share of a view's strength in [NoisyRollout](https://huggingface.co/papers/2504.13055),
    $1 - 1 / (1 + e^{-\lambda (t - \gamma) / T})$, where $t / T$ is the progress of the run, $\gamma / T$ the midpoint
    and $\lambda$ the steepness.
    """
    return (1 - math.tanh(steepness * (progress - midpoint) / 2)) / 2


# Share of a view's strength by the progress of the run, from 0 to 1
SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "sigmoid": sigmoid,
}


def as_schedule(text: str) -> Callable[[float], float]:
    """
    Returns the schedule of a name that may have settings, such as `"sigmoid(midpoint=0.5)"`.

    Raises `ValueError` if there is no such schedule, or it has no such setting.
    """
    name, settings = split_settings(text, "schedule")
    if name not in SCHEDULES:
        raise ValueError(f"There is no schedule {name!r}; name one of {', '.join(map(repr, SCHEDULES))}.")
    check_settings(SCHEDULES[name], name, settings or {})
    return functools.partial(SCHEDULES[name], **(settings or {}))


def last_of_groups(share: float, n_completions: int, first_index: int, group_size: int) -> list[int]:
    """
    Returns the indices, among `n_completions` completions, of the last `share` of each group, rounded down.
    `first_index` is the index of the first completion among the completions of all ranks. With a share of 0.5, a
    `group_size` of 3 and a `first_index` of 0, the indices of 6 completions are `[2, 5]`.
    """
    first_in_group = group_size - int(share * group_size)
    return [i for i in range(n_completions) if (first_index + i) % group_size >= first_in_group]
