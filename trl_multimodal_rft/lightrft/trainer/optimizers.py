# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A caller's optimizers and schedules of policy and critic, each pair behind one object for the trainer."""

from collections import ChainMap
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..models.actor import Actor


class _States(ChainMap):
    """The states of two optimizers. Their dictionaries make an empty state when a missing one is read."""

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        for states in self.maps:
            if parameter in states:
                return states[parameter]
        raise KeyError(parameter)


class TwoOptimizers(Optimizer):
    """The optimizers of policy and critic, which step, clear, save and load together."""

    def __init__(self, policy: Optimizer, critic: Optimizer):
        self.policy = policy
        self.critic = critic
        super().__init__([*policy.param_groups, *critic.param_groups], {})
        self._join()

    def _join(self) -> None:
        """Takes the groups and states of both, which they replace when they load a state."""
        self.param_groups = [*self.policy.param_groups, *self.critic.param_groups]
        self.state: Any = _States(self.policy.state, self.critic.state)

    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        self.policy.step()
        self.critic.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        n_policy_groups = len(self.policy.param_groups)
        sides = ((self.policy, groups[:n_policy_groups]), (self.critic, groups[n_policy_groups:]))
        for optimizer, side_groups in sides:
            for group in side_groups:
                missing = sorted(optimizer.defaults.keys() - group.keys())
                if missing:
                    raise ValueError(
                        f"The checkpoint's optimizer isn't a {type(optimizer).__name__}: it has no `{missing[0]}`. "
                        "Resume with the optimizers of the run that saved it."
                    )
            ids = set(chain.from_iterable(group["params"] for group in side_groups))
            state = {index: values for index, values in state_dict["state"].items() if index in ids}
            optimizer.load_state_dict({"state": state, "param_groups": side_groups})
        self._join()

    def clip_grad_norms(self, max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Clips the gradients of policy and of critic, each to `max_norm`, and returns their norms before."""
        policy, critic = (
            nn.utils.clip_grad_norm_(chain.from_iterable(group["params"] for group in side.param_groups), max_norm)
            for side in (self.policy, self.critic)
        )
        return policy, critic


class TwoSchedulers:
    """The schedules of policy and critic. A step moves those whose part is updated, `is_updated("critic")`."""

    def __init__(self, policy: LRScheduler, critic: LRScheduler, is_updated: Callable[[str], bool]):
        self.schedulers = {"policy": policy, "critic": critic}
        self.is_updated = is_updated

    def step(self) -> None:
        for part, scheduler in self.schedulers.items():
            if self.is_updated(part):
                scheduler.step()

    def get_last_lr(self) -> list[float]:
        """Returns the rate of each parameter group, first the policy's."""
        rates = chain.from_iterable(scheduler.get_last_lr() for scheduler in self.schedulers.values())
        return [*map(float, rates)]

    def state_dict(self) -> dict[str, Any]:
        return {part: scheduler.state_dict() for part, scheduler in self.schedulers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, scheduler in self.schedulers.items():
            scheduler.load_state_dict(state[part])


def check_optimizers(
    actor: Actor,
    critic: nn.Module | None,
    actor_optim: Optimizer | None,
    critic_optim: Optimizer | None,
    actor_scheduler: LRScheduler | None,
    critic_scheduler: LRScheduler | None,
) -> None:
    """Raises a `ValueError` if optimizers or schedules don't belong together, or to the models."""
    if actor_optim is None and critic_optim is None:
        if actor_scheduler is not None or critic_scheduler is not None:
            raise ValueError("A scheduler needs its optimizer; pass `actor_optim` (and `critic_optim`), too.")
        return
    if critic is None:
        for name, value in {"critic_optim": critic_optim, "critic_scheduler": critic_scheduler}.items():
            if value is not None:
                raise ValueError(
                    f"`{name}` trains a `critic`, which wasn't passed; pass the critic, or drop `{name}`."
                )
    pairs = {"actor": (actor_optim, actor_scheduler, actor.model)}
    if critic is not None:
        pairs["critic"] = (critic_optim, critic_scheduler, critic)
        if (actor_scheduler is None) != (critic_scheduler is None):
            raise ValueError("Pass both `actor_scheduler` and `critic_scheduler`, or none of them.")
    for side, (optimizer, scheduler, model) in pairs.items():
        if optimizer is None:
            raise ValueError(f"`{side}_optim` is None, but the other side has its optimizer; pass both, or none.")
        if scheduler is not None and scheduler.optimizer is not optimizer:
            raise ValueError(f"`{side}_scheduler` was made for another optimizer; make it for `{side}_optim`.")
        held = {*map(id, chain.from_iterable(group["params"] for group in optimizer.param_groups))}
        trained = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not held <= {id(parameter) for parameter in model.parameters()}:
            raise ValueError(f"`{side}_optim` holds weights of another model; make it from the `{side}`'s parameters.")
        missing = [name for parameter, name in trained.items() if parameter not in held]
        if missing:
            raise ValueError(
                f"`{side}_optim` doesn't hold `{missing[0]}` and {len(missing) - 1} other weights that are trained; "
                "add them, or freeze them (`requires_grad_(False)`)."
            )
