# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Learning rates of a model's parts, and one optimizer for a policy and its critic, with separate schedules."""

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedModel, get_scheduler

from ...models.modes import disable_unsupported_checkpointing
from ...models.parts import check_trainable, freeze, match_keys
from ...models.wrapped import unwrapped
from .argument_checks import mapping
from .configs import TrainerConfig


if TYPE_CHECKING:
    from peft import PeftModel

    from ..ppo.config import MultimodalPPOConfig


# File in a checkpoint with the options that decide the optimizer's parameter groups
_PARTS = "trained_parts.json"


# Parts


def freeze_and_check(model: "PreTrainedModel | PeftModel", args: TrainerConfig, optimizer: Optimizer | None) -> None:
    """
    Freezes parts of a model. Raises `ValueError` if `learning_rates` name a part in which nothing is trained, or if
    they come together with a user's `optimizer`.
    """
    check_trainable(model)
    disable_unsupported_checkpointing(unwrapped(None, model), args)
    freeze(model, args.freeze)
    is_reentrant = args.gradient_checkpointing and mapping(args.gradient_checkpointing_kwargs).get("use_reentrant")
    if args.freeze and is_reentrant:
        model.enable_input_require_grads()  # else layers after frozen embeddings get no gradient
    if not args.learning_rates:
        return
    if optimizer is not None:
        raise ValueError(
            "`learning_rates` are for the trainer's own optimizer; drop them, and set rates in the groups of your "
            "optimizer."
        )
    keys_by_parameter = match_keys(model, [*args.learning_rates], "learning_rates")
    trained_keys = {key for parameter, key in keys_by_parameter.items() if parameter.requires_grad}
    idle_keys = mapping(args.learning_rates).keys() - trained_keys
    if idle_keys:
        raise ValueError(
            f"`learning_rates` has a rate for {min(idle_keys)!r}, but no weight is trained at this rate: the weights "
            "are frozen, or another key comes first for them. Remove the key, or train its weights (see `freeze`, "
            "and the `target_modules` of an adapter)."
        )


def split_groups_by_rate(
    model: nn.Module,
    optimizer: Optimizer,
    args: TrainerConfig,
    rates: Mapping[str, float | None] | None = None,
    keys: Mapping[int, str] | None = None,
) -> None:
    """
    Splits the parameter groups of a new optimizer by `learning_rates` and by further `rates`, whose keys `keys` maps
    from ids of parameters. The schedule multiplies the rate of each group.
    """
    part_rates = mapping(args.learning_rates)
    keys_by_parameter = match_keys(model, [*part_rates], "learning_rates")
    keys = {**{id(parameter): key for parameter, key in keys_by_parameter.items()}, **(keys or {})}
    # `None` is the key of parameters without a rate of their part, which keep the rate of their group
    all_rates: dict[str | None, float | None] = {None: None, **part_rates, **(rates or {})}
    groups = []
    for group in optimizer.param_groups:
        parameters_by_key: dict[str | None, list] = {key: [] for key in all_rates}
        for parameter in group["params"]:
            parameters_by_key[keys.get(id(parameter))].append(parameter)
        for key, parameters in parameters_by_key.items():
            rate_option = {} if all_rates[key] is None else {"lr": all_rates[key]}
            groups += [{**group, **rate_option, "params": parameters}] if parameters else []
    grouped_ids: set[int] = set()
    for group in groups:
        grouped_ids |= set(map(id, group["params"]))
    if any(parameter.requires_grad and id(parameter) not in grouped_ids for parameter in keys_by_parameter):
        raise ValueError(
            f"`learning_rates` has no effect with `optim={args.optim!r}`, which has no parameter groups; drop one of "
            "the two options."
        )
    optimizer.param_groups[:] = groups


def check_rates(optimizer: Optimizer, scheduler: LRScheduler | None, args: TrainerConfig) -> None:
    """
    Raises `ValueError` for `learning_rates` if DeepSpeed's config has an optimizer or a schedule, as these have one
    rate for all parts.
    """
    # A dummy stands in for an optimizer or a schedule that DeepSpeed's config defines
    is_dummy = [isinstance(optimizer, DummyOptim), isinstance(scheduler, DummyScheduler)]
    if args.learning_rates and any(is_dummy):
        raise ValueError(
            f"The DeepSpeed config has its own `{'optimizer' if is_dummy[0] else 'scheduler'}`, which would train all "
            "parts at one rate; remove it, so that `learning_rates` count."
        )


def save_options_of_parts(checkpoint: Path, args: TrainerConfig) -> None:
    """Writes `freeze` and `learning_rates` into a checkpoint, for [`parts_mismatch`]. Writes no file without them."""
    if args.freeze or args.learning_rates:
        (checkpoint / _PARTS).write_text(json.dumps(_options_of_parts(args)))


def parts_mismatch(checkpoint: str | Path, args: TrainerConfig) -> str | None:
    """Returns an error message if a checkpoint was saved with other `freeze` or `learning_rates` than this run has."""
    path = Path(checkpoint, _PARTS)
    saved = json.loads(path.read_text()) if path.exists() else dict.fromkeys(_options_of_parts(args))
    for name, value in _options_of_parts(args).items():
        if saved[name] != value:
            return (
                f"{checkpoint} was saved with `{name}={saved[name]}`, but this run has `{name}={value}`, so the "
                f"saved optimizer state doesn't fit its weights or rates. Resume with the same `{name}`, or start a "
                "new run with `model` set to the checkpoint."
            )
    return None


def _options_of_parts(args: TrainerConfig) -> dict[str, list[str] | dict[str, float] | None]:
    return {name: getattr(args, name) or None for name in ("freeze", "learning_rates")}


# Policy and critic


def mark_group_parts(
    model: nn.Module, optimizer: Optimizer, critic: nn.Module, args: "MultimodalPPOConfig", regroup: bool
) -> tuple[bool, ...]:
    """
    Sets the `part` of each parameter group, `"policy"` or `"critic"`, after `regroup` has moved the critic's weights
    to groups with its rate. Returns whether each is the critic's. Raises a `ValueError` for a group of both, or an
    optimizer in DeepSpeed's config.
    """
    if isinstance(optimizer, DummyOptim):
        raise ValueError(
            "The DeepSpeed config has its own `optimizer`, which would train the critic as the policy; remove it, so "
            "that `optim`, `learning_rate` and `value_learning_rate` count."
        )
    critic_ids = {id(parameter) for parameter in critic.parameters()}
    if regroup:
        split_groups_by_rate(
            model, optimizer, args, {"critic": args.value_schedule.rate}, dict.fromkeys(critic_ids, "critic")
        )
    # For each group, `{True}` if its weights are the critic's, `{False}` if they are the policy's, both if mixed
    owners = [{id(parameter) in critic_ids for parameter in group["params"]} for group in optimizer.param_groups]
    if {True} not in owners or {True, False} in owners:
        raise ValueError(
            "The optimizer must hold the critic's weights in separate parameter groups. Make the critic before "
            "the optimizer, and pass the critic as `value_model`."
        )
    critic_groups = tuple(owner == {True} for owner in owners)
    for group, is_critic in zip(optimizer.param_groups, critic_groups, strict=True):
        group["part"] = "critic" if is_critic else "policy"
    return critic_groups


def freeze_parts(
    optimizer: Optimizer, trainable: Callable[[], Collection[str]], is_updated: Callable[[str], bool]
) -> None:
    """
    Adds hooks that keep an optimizer, also DeepSpeed's, from changing parts that an update doesn't train. Parts
    outside of `trainable()` keep weights and states; trainable ones that aren't `is_updated` keep weights, but get
    states, which checkpoints need.
    """

    def before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        for group in optimizer.param_groups:
            if group["part"] not in trainable():
                # Without a gradient, not even momentum or weight decay change a weight
                for parameter in group["params"]:
                    parameter.grad = None
            elif not is_updated(group["part"]):
                group["thawed_lr"] = group["lr"]
                group["lr"] = 0.0
                for parameter in group["params"]:
                    # With a shared trunk, the policy's weights get gradients of the value loss, too
                    if parameter.grad is not None:
                        parameter.grad.zero_()

    def after_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        for group in optimizer.param_groups:
            if "thawed_lr" in group:
                group["lr"] = group.pop("thawed_lr")
                # Checkpoints need a state of every weight. Gradients of 0 leave Adam's averages at 0. If these
                # updates counted as steps, the bias correction of later steps would be too weak, and the steps several
                # times too large. So the step counter goes back to 0.
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    if "step" in state:
                        state["step"] = state["step"] * 0

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)


def two_schedules(
    args: "MultimodalPPOConfig", optimizer: Optimizer, critic_groups: tuple[bool, ...], n_steps: int
) -> LambdaLR:
    """
    Returns a scheduler of policy and critic. With `freezing_actor_steps=10` in a run of 100 steps, the policy's rate
    is 0 for 10 steps, and then follows a schedule of 90 steps; the critic's has 100.
    """
    n_frozen = args.freezing_actor_steps
    policy_schedule = _schedule(
        args, args.lr_scheduler_type, args.warmup_steps, n_steps - n_frozen, args.learning_rate
    )
    value_schedule = args.value_schedule
    critic_schedule = _schedule(
        args, value_schedule.lr_scheduler_type, value_schedule.warmup_steps, n_steps, value_schedule.rate
    )

    def policy_factor(step: int) -> float:
        return 0.0 if step < n_frozen else policy_schedule(step - n_frozen)

    return LambdaLR(optimizer, [critic_schedule if is_critic else policy_factor for is_critic in critic_groups])


def _schedule(
    args: "MultimodalPPOConfig", name: str, warmup_steps: float, n_steps: int, rate: float
) -> Callable[[int], float]:
    """Returns a function from the step to the factor of the initial `rate`. `warmup_steps` below 1 are a share."""
    n_steps = max(n_steps, 1)
    scheduler = get_scheduler(
        name,
        # Schedules with a minimum rate, such as `cosine_with_min_lr`, read the optimizer's rate
        torch.optim.SGD([torch.zeros(1)], lr=rate),
        num_warmup_steps=int(warmup_steps) if warmup_steps >= 1 else math.ceil(n_steps * warmup_steps),
        num_training_steps=n_steps,
        # `lr_scheduler_kwargs` belong to `lr_scheduler_type`. A critic's schedule of another type has none
        scheduler_specific_kwargs=mapping(args.lr_scheduler_kwargs) if name == args.lr_scheduler_type else None,
    )
    if not isinstance(scheduler, LambdaLR):
        raise ValueError(
            f"The schedule {name!r} follows a metric or is no plain function of the step; choose another."
        )
    return scheduler.lr_lambdas[0]
