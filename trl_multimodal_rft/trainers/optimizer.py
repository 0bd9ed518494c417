# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""One optimizer for a policy and its critic, each with its own rate and schedule."""

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from accelerate.utils.deepspeed import DummyOptim
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler


def split_groups(
    optimizer: torch.optim.Optimizer, critic: nn.Module, learning_rate: float | None, regroup: bool
) -> tuple[bool, ...]:
    """
    Marks the parameter groups of policy and critic by a `part`.

    With `regroup` the weights of the critic get separate groups with their learning rate. Returns which groups are the
    critic's.
    """
    if isinstance(optimizer, DummyOptim):
        raise ValueError(
            "The DeepSpeed config has its own `optimizer`, which would train the critic as the policy; remove it, so "
            "that `optim`, `learning_rate` and `value_learning_rate` count."
        )
    ids = {id(parameter) for parameter in critic.parameters()}
    if regroup:
        rates = [{}, {} if learning_rate is None else {"lr": learning_rate}]
        parts = [
            {**group, **rates[is_critic], "params": [p for p in group["params"] if (id(p) in ids) == is_critic]}
            for group in optimizer.param_groups
            for is_critic in (False, True)
        ]
        optimizer.param_groups[:] = [part for part in parts if part["params"]]
    owners = [{id(parameter) in ids for parameter in group["params"]} for group in optimizer.param_groups]
    if {True} not in owners or {True, False} in owners:
        raise ValueError(
            "The optimizer must hold the critic's weights in separate parameter groups. Make the critic first, "
            "and pass it as `value_model`."
        )
    of_critic = tuple(owner == {True} for owner in owners)
    for group, is_critic in zip(optimizer.param_groups, of_critic, strict=True):
        group["part"] = "critic" if is_critic else "policy"
    return of_critic


def freeze_parts(
    optimizer: torch.optim.Optimizer, trained: Callable[[], Collection[str]], trains: Callable[[str], bool]
) -> None:
    """
    Keeps an optimizer from changing parts that an update doesn't train, as engines step from anywhere, some with one
    group at a time.

    Parts that are not in `trained()` are left as they are; a part that `trains(part)` is false for is only frozen for
    now, and its state is there in checkpoints.
    """

    def before_step(optimizer, args, kwargs) -> None:
        for group in optimizer.param_groups:
            if group["part"] not in trained():
                # Not even momentum or weight decay change what has no gradient
                for parameter in group["params"]:
                    parameter.grad = None
            elif not trains(group["part"]):
                group["thawed_lr"], group["lr"] = group["lr"], 0.0
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.zero_()  # that of the value loss, with a shared trunk

    def after_step(optimizer, args, kwargs) -> None:
        for group in optimizer.param_groups:
            if "thawed_lr" in group:
                group["lr"] = group.pop("thawed_lr")
                # Checkpoints need a state of every weight. Counted as steps, though, gradients of 0 would be a part of
                # Adam's average, and make later steps several times too large.
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    if "step" in state:
                        state["step"] = state["step"] * 0

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)


def two_schedules(args: Any, optimizer: torch.optim.Optimizer, of_critic: tuple[bool, ...], n_steps: int) -> LambdaLR:
    """The schedules of policy and critic, by their parameter groups; the policy's starts when it isn't frozen."""
    n_frozen = args.freezing_actor_steps
    policy = _schedule(args, args.lr_scheduler_type, args.warmup_steps, n_steps - n_frozen, args.learning_rate)
    critic = _schedule(
        args,
        args.value_lr_scheduler_type or args.lr_scheduler_type,
        args.warmup_steps if args.value_warmup_steps is None else args.value_warmup_steps,
        n_steps,
        args.value_learning_rate or args.learning_rate,
    )

    def thawed(step: int) -> float:
        return 0.0 if step < n_frozen else policy(step - n_frozen)

    return LambdaLR(optimizer, [critic if is_critic else thawed for is_critic in of_critic])


def check_two_schedules(scheduler: Any) -> None:
    """Refuses a scheduler that was passed, or that DeepSpeed made, with one schedule for all groups."""
    if not isinstance(scheduler, LambdaLR):
        raise ValueError(
            f"A {type(scheduler).__name__} can't give policy and critic different schedules; remove the "
            "`scheduler` of the DeepSpeed config, or pass a `LambdaLR`."
        )


def _schedule(args: Any, name: str, warmup_steps: float, n_steps: int, rate: float) -> Callable[[int], float]:
    """Factor of the initial learning rate at each step."""
    n_steps = max(n_steps, 1)
    scheduler = get_scheduler(
        name,
        torch.optim.SGD([torch.zeros(1)], lr=rate),  # some schedules end at a rate above 0
        num_warmup_steps=int(warmup_steps) if warmup_steps >= 1 else math.ceil(n_steps * warmup_steps),
        num_training_steps=n_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs if name == args.lr_scheduler_type else None,
    )
    if not isinstance(scheduler, LambdaLR):
        raise ValueError(
            f"The schedule {name!r} follows a metric or is no plain function of the step; choose another."
        )
    return scheduler.lr_lambdas[0]
