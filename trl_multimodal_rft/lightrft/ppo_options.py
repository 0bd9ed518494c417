# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What the arguments of [`PPOTrainerVL`] make of a config, and which of them don't go together."""

import copy
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ..trainers.ppo_config import MultimodalPPOConfig
from .actor import Actor


# Options of the config that belong to the rollouts and the loop of `MultimodalPPOTrainer`
_OF_ROLLOUTS = (
    "cache_implementation",
    "chat_template_kwargs",
    "dynamic_sampling",
    "entropy_source",
    "eval_delay",
    "eval_on_start",
    "generation_kwargs",
    "load_best_model_at_end",
    "log_completions",
    "mask_truncated_completions",
    "min_p",
    "multi_objective_aggregation",
    "repetition_penalty",
    "replay_buffer_size",
    "reward_weights",
    "scale_rewards",
    "shared_trunk",
    "sync_ref_model",
    "top_k",
    "top_p",
    "use_transformers_continuous_batching",
    "use_vllm",
)

WHOLE_WEIGHTS = (
    "Experience is made and scored with whole weights, which FSDP and ZeRO-3 don't keep; take `MultimodalPPOTrainer`, "
    "or DDP, ZeRO-1 or ZeRO-2."
)

# Options of generation that only sampling has
OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def check_strategy(strategy: MultimodalPPOConfig, actor: Actor, critic: nn.Module | None) -> None:
    """Refuses a config that would have no effect in part, or doesn't go with the models."""
    if not isinstance(strategy, MultimodalPPOConfig):
        raise TypeError(f"`strategy` must be a MultimodalPPOConfig, got {type(strategy).__name__}.")
    if critic is not None and strategy.advantage_estimator != "gae":
        raise ValueError(
            f"`critic` was passed, which `advantage_estimator={strategy.advantage_estimator!r}` has no use for; "
            "change one of them."
        )
    defaults = {field.name: field.default for field in fields(strategy)}
    for name in _OF_ROLLOUTS:
        if getattr(strategy, name) != defaults[name]:
            hint = f"; pass `{name}` to the trainer itself" if name in OF_SAMPLING else ""
            raise ValueError(
                f"`{name}` of `strategy` has no effect in these steps{hint or ', only in `MultimodalPPOTrainer`'}; "
                "remove it."
            )
    if strategy.top_entropy_quantile < 1 and actor.high_entropy_token_ratio == 0:
        raise ValueError(
            f"`top_entropy_quantile` ({strategy.top_entropy_quantile}) goes by the entropies of the rollouts; make "
            f"the actor with `high_entropy_token_ratio={strategy.top_entropy_quantile}`."
        )


def changed(strategy: MultimodalPPOConfig, **options) -> MultimodalPPOConfig:
    """A copy with other options. Unlike `dataclasses.replace`, it doesn't set up devices and processes again."""
    config = copy.copy(strategy)
    vars(config).update(options)
    config.__post_init__()
    return config


def check_average(own: dict[str, torch.Tensor], ema_model: Actor) -> None:
    """Checks that an actor can take averages of weights: it is a copy of the policy, and not the policy."""
    averages = dict(ema_model.model.named_parameters())
    for name, parameter in own.items():
        if name not in averages or averages[name].shape != parameter.shape:
            raise ValueError(
                f"`ema_model` must be a copy of the policy, but has no `{name}` {tuple(parameter.shape)}."
            )
        if averages[name] is parameter:
            raise ValueError("`ema_model` holds the policy's own weights; pass a copy.")


def joined_optimizers(
    config: MultimodalPPOConfig,
    critic: nn.Module | None,
    actor_optim: torch.optim.Optimizer | None,
    critic_optim: torch.optim.Optimizer | None,
    actor_scheduler: LambdaLR | None,
    critic_scheduler: LambdaLR | None,
) -> tuple[torch.optim.Optimizer | None, LambdaLR | None]:
    """One optimizer and one schedule of those of policy and critic, `None` where nothing was given."""
    optimizers: dict[str, Any] = {"actor_optim": actor_optim}
    schedulers: dict[str, Any] = {"actor_scheduler": actor_scheduler}
    if config.advantage_estimator == "gae":
        optimizers["critic_optim"], schedulers["critic_scheduler"] = critic_optim, critic_scheduler
    elif critic_optim is not None or critic_scheduler is not None:
        raise ValueError(
            "`critic_optim` or `critic_scheduler` was passed, but "
            f"`advantage_estimator={config.advantage_estimator!r}` has no critic."
        )
    if critic is None and critic_optim is not None:
        raise ValueError("`critic_optim` was passed, but no `critic` whose weights it could hold.")
    given = {name for name, each in (optimizers | schedulers).items() if each is not None}
    if not given:
        return None, None
    if not given >= optimizers.keys():
        raise ValueError(f"One optimizer trains all: with {sorted(given)} pass {sorted(optimizers)}, or none.")
    classes: set[Any] = {type(each) for each in optimizers.values()}
    if len(classes) > 1:
        names = sorted(each.__name__ for each in classes)
        raise ValueError(f"One optimizer trains policy and critic, so both must be of one class, got {names}.")
    optimizer = classes.pop()([dict(group) for each in optimizers.values() for group in each.param_groups])
    for each in optimizers.values():
        optimizer.state.update(each.state)
    if not given & schedulers.keys():
        return optimizer, None
    for name, each in schedulers.items():
        if not isinstance(each, LambdaLR):
            raise ValueError(
                f"`{name}` must be a `LambdaLR`, such as `transformers.get_scheduler` gives, got "
                f"{type(each).__name__}."
            )
    n_frozen = config.freezing_actor_steps

    def thawed(factor):
        return lambda step: 0.0 if step < n_frozen else factor(step - n_frozen)

    factors = [thawed(factor) for factor in schedulers["actor_scheduler"].lr_lambdas]
    if "critic_scheduler" in schedulers:
        factors += schedulers["critic_scheduler"].lr_lambdas
    return optimizer, LambdaLR(optimizer, factors)
