# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What [`PPOTrainerVL`] makes of its arguments and batches of prompts, and which of them don't go together."""

import copy
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from ...trainers.ppo_config import MultimodalPPOConfig
from ..models.actor import Actor


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


# Batches of prompts


def rows_of(batch: list[dict] | tuple, columns: Sequence[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Rows of a batch of prompts, see [`PPOTrainerVL.fit`]; a tuple may hold one of these sets of media columns."""
    if all(isinstance(row, dict) for row in batch):
        return list(batch)
    media = next((names for names in columns if len(names) + 3 == len(batch)), None)
    if media is None or any(isinstance(column, (str, dict)) for column in batch):
        lengths = " or ".join(str(len(names) + 3) for names in columns)
        raise ValueError(
            f"A batch of prompts is a list of rows, which are dictionaries, or a tuple of {lengths} lists, got "
            f"{len(batch)} of {type(batch[0]).__name__}."
        )
    rows = []
    for prompt, *values, reference, label in zip(*batch, strict=True):
        row = {"prompt": prompt, "references": reference, "labels": label}
        for name, value in zip(media, values, strict=True):
            if value is not None:
                row[name] = value if isinstance(value, list) else [value]
        rows.append(row)
    return rows


def check_rollout(
    dataloader: DataLoader, args: MultimodalPPOConfig, buffer_limit: int, n_processes: int
) -> tuple[int, int]:
    """
    Checks that batches of prompts make whole optimizer steps. Returns the steps on the experience of a batch, and the
    prompts of all processes in one.
    """
    if dataloader.batch_size is None or isinstance(dataloader.dataset, IterableDataset):
        raise ValueError("`prompts_dataloader` must have a `batch_size`, and a dataset whose length is known.")
    per_rollout, n_prompts = dataloader.batch_size * n_processes, len(dataloader.sampler)  # pyrefly: ignore[bad-argument-type] (of a dataset with a length)
    if n_prompts < per_rollout or (n_prompts % per_rollout != 0 and not dataloader.drop_last):
        raise ValueError(
            f"{n_prompts} prompts don't fill whole batches of {dataloader.batch_size} on {n_processes} processes; set "
            "another `batch_size`, or `drop_last=True` if there are enough for one."
        )
    n_samples = dataloader.batch_size * args.num_generations
    if buffer_limit > 0:
        n_samples = min(n_samples, buffer_limit)
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if n_samples % step != 0:
        raise ValueError(
            f"A batch of {dataloader.batch_size} prompts leaves {n_samples} samples in the buffer, which don't fill "
            f"whole optimizer steps of {step} (`micro_train_batch_size` x `gradient_accumulation_steps`)."
        )
    return n_samples // step * args.num_ppo_epochs, per_rollout
