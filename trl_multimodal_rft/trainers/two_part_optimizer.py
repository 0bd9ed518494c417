# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""One optimizer for a policy and its critic, each with its own rate and schedule."""

import math
from typing import Any

import torch
from accelerate.utils.deepspeed import DummyOptim
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from ..models.trainer_mixin import TrainerMixin


class TwoPartOptimizerMixin(TrainerMixin):
    """Gives a trainer with a `critic` parameter groups for policy and critic, of which one may stay as it is."""

    critic: Any
    _critic_groups: tuple[bool, ...] = ()  # which parameter groups of the optimizer are the critic's
    _trained: frozenset[str] | set[str] = frozenset({"policy", "critic"})  # what an update may change

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        created = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if self.critic is None or self._critic_groups:
            return optimizer
        if isinstance(optimizer, DummyOptim):
            raise ValueError(
                "The DeepSpeed config has its own `optimizer`, which would train the critic as the policy; remove it, "
                "so that `optim`, `learning_rate` and `value_learning_rate` count."
            )
        critic = {id(parameter) for parameter in self.critic.parameters()}
        if created:
            rate = self.args.value_learning_rate
            rates = [{}, {} if rate is None else {"lr": rate}]
            parts = [
                {**group, **rates[is_critic], "params": [p for p in group["params"] if (id(p) in critic) == is_critic]}
                for group in optimizer.param_groups
                for is_critic in (False, True)
            ]
            optimizer.param_groups[:] = [part for part in parts if part["params"]]
        owners = [{id(parameter) in critic for parameter in group["params"]} for group in optimizer.param_groups]
        if {True} not in owners or {True, False} in owners:
            raise ValueError(
                "The optimizer must hold the critic's weights in parameter groups of their own. Make the critic "
                "first, and pass it as `value_model`."
            )
        self._critic_groups = tuple(owner == {True} for owner in owners)
        for group, is_critic in zip(optimizer.param_groups, self._critic_groups, strict=True):
            group["part"] = "critic" if is_critic else "policy"
        # Engines step from anywhere, some with one group at a time
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        return optimizer

    def _before_step(self, optimizer, args, kwargs) -> None:
        for group in optimizer.param_groups:
            if group["part"] not in self._trained:
                # Not even momentum or weight decay touch what has no gradient
                for parameter in group["params"]:
                    parameter.grad = None
            elif not self._trains(group["part"]):
                group["thawed_lr"], group["lr"] = group["lr"], 0.0
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.zero_()  # that of the value loss, with a shared trunk

    def _after_step(self, optimizer, args, kwargs) -> None:
        for group in optimizer.param_groups:
            if "thawed_lr" in group:
                group["lr"] = group.pop("thawed_lr")
                # Checkpoints need a state of every weight. Counted as steps, though, gradients of 0 would be a part of
                # Adam's average, and make later steps several times too large.
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    if "step" in state:
                        state["step"] = state["step"] * 0

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        if self.critic is None:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is None:
            args, n_frozen = self.args, self.args.freezing_actor_steps
            policy = self._schedule(
                args.lr_scheduler_type, args.warmup_steps, num_training_steps - n_frozen, args.learning_rate
            )
            critic = self._schedule(
                args.value_lr_scheduler_type or args.lr_scheduler_type,
                args.warmup_steps if args.value_warmup_steps is None else args.value_warmup_steps,
                num_training_steps,
                args.value_learning_rate or args.learning_rate,
            )

            def thawed(step: int) -> float:
                return 0.0 if step < n_frozen else policy(step - n_frozen)

            self.lr_scheduler = LambdaLR(
                self.optimizer if optimizer is None else optimizer,
                [critic if is_critic else thawed for is_critic in self._critic_groups],
            )
            self._created_lr_scheduler = True
        elif not isinstance(self.lr_scheduler, LambdaLR):
            raise ValueError(
                f"A {type(self.lr_scheduler).__name__} can't give policy and critic schedules of their own; remove "
                "the `scheduler` of the DeepSpeed config, or pass a `LambdaLR`."
            )
        return self.lr_scheduler

    def _schedule(self, name: str, warmup_steps: float, n_steps: int, rate: float):
        """Factor of the initial learning rate at each step."""
        args, n_steps = self.args, max(n_steps, 1)
        scheduler = get_scheduler(
            name,
            torch.optim.SGD([torch.zeros(1)], lr=rate),  # some schedules end at a rate of their own
            num_warmup_steps=int(warmup_steps) if warmup_steps >= 1 else math.ceil(n_steps * warmup_steps),
            num_training_steps=n_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs if name == args.lr_scheduler_type else None,
        )
        if not isinstance(scheduler, LambdaLR):
            raise ValueError(
                f"The schedule {name!r} follows a metric or is no plain function of the step; choose another."
            )
        return scheduler.lr_lambdas[0]

    def _trains(self, part: str) -> bool:
        """Whether this update changes the `"policy"`, or the `"critic"`."""
        frozen = part == "policy" and self.state.global_step < self.args.freezing_actor_steps
        return part in self._trained and not frozen

    def _if_trained(self, part: str, loss: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """
        The loss of a part from its scores, or a zero in its place, whatever the loss is: engines wait for the
        gradients of all weights.
        """
        return loss if self._trains(part) else (0 * scores.nan_to_num()).sum()
