# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments and batches of prompts of [`PPOTrainerVL`], converted and checked."""

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
from .experience_config import ExperienceConfig, check_options
from .experience_maker import NaiveExperienceMaker
from .experience_trainer import ExperienceTrainer


# Options of the config that only the rollouts and the loop of `MultimodalPPOTrainer` have
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
    "Experience is made and scored with whole weights, which FSDP and ZeRO-3 don't keep; use `MultimodalPPOTrainer`, "
    "or DDP, ZeRO-1 or ZeRO-2."
)

# Options of generation without effect on greedy decoding
OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def check_strategy(strategy: MultimodalPPOConfig, actor: Actor, critic: nn.Module | None) -> None:
    """Raises if the config has options without effect, or doesn't match the models."""
    if not isinstance(strategy, MultimodalPPOConfig):
        raise TypeError(f"`strategy` must be a MultimodalPPOConfig, got {type(strategy).__name__}.")
    if critic is not None and strategy.estimator.name != "gae":
        raise ValueError(
            f"`critic` was passed, which `advantage_estimator={strategy.advantage_estimator!r}` doesn't use; change "
            "one of them."
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
            f"`top_entropy_quantile` ({strategy.top_entropy_quantile}) needs the entropies of the rollouts; make the "
            f"actor with `high_entropy_token_ratio={strategy.top_entropy_quantile}`."
        )


def config_of(
    strategy: MultimodalPPOConfig,
    actor: Actor,
    critic: nn.Module | None,
    reference: Actor | None,
    generate_kwargs: dict[str, Any],
    **options,
) -> MultimodalPPOConfig:
    """
    A copy of the strategy with the options of [`PPOTrainerVL`], all of them checked. Pops `gamma` and `lambd` from
    `generate_kwargs`.
    """
    check_strategy(strategy, actor, critic)
    for name, least, value in (
        ("micro_train_batch_size", 1, options["per_device_train_batch_size"]),
        ("init_kl_coef", 0, options["beta"]),
    ):
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}.")
    if reference is None or options["beta"] == 0:
        if options["kl_target"]:
            raise ValueError("`kl_target` needs an `initial_model` to diverge from, and an `init_kl_coef` above 0.")
        options |= {"beta": 0.0, "kl_estimator": None, "kl_in_reward": None}
    options |= {
        "gamma": generate_kwargs.pop("gamma", strategy.gamma),
        "lam": generate_kwargs.pop("lambd", strategy.lam),
    }
    check_options(generate_kwargs)
    # Unlike `dataclasses.replace`, this doesn't set up devices and processes again
    config = copy.copy(strategy)
    vars(config).update(
        options,
        temperature=actor.temperature,
        max_completion_length=generate_kwargs.get("max_new_tokens", strategy.max_completion_length),
        data_seed=strategy.seed if strategy.data_seed is None else strategy.data_seed,
        # The other names of these options
        num_iterations=options["num_ppo_epochs"],
        activation_checkpointing=options["gradient_checkpointing"],
        # Whole groups for any size of a micro-batch, as the trainer needs them; experience comes in other batches
        steps_per_generation=strategy.num_generations * strategy.gradient_accumulation_steps,
        generation_batch_size=None,  # follows from the others
        eval_strategy="no",  # the trainer has no rows to evaluate on
    )
    config.__post_init__()
    if config.deepspeed_plugin is not None and config.deepspeed_plugin.zero_stage == 3:
        raise ValueError(WHOLE_WEIGHTS)
    return config


def experience_maker_of(trainer: ExperienceTrainer, size: int, **arguments) -> NaiveExperienceMaker:
    """The experience maker of a trainer, with `size` samples per experience."""
    config = trainer.args
    if trainer.is_fsdp_enabled:
        raise ValueError(WHOLE_WEIGHTS)
    if trainer._policy.fallbacks.isolate is not None and config.num_generations % size != 0:
        raise ValueError(
            f"A {trainer.actor.config.model_type} mixes media with their padding, so that an experience must hold one "
            f"prompt; set `micro_rollout_batch_size` ({size}) to `num_generations` ({config.num_generations}) or a "
            "divisor of it."
        )
    names = [each.name for each in fields(ExperienceConfig) if hasattr(config, each.name)]
    options: dict[str, Any] = {name: getattr(config, name) for name in names}
    options |= {"kl_estimator": "k1", "kl_in_reward": bool(config.kl_in_reward)}
    options["ignored_media_columns"] = config.ignored_media_columns or ()
    strategy = ExperienceConfig(
        **options,
        n_samples_per_prompt=config.num_generations,
        micro_rollout_batch_size=size,
        progress=not config.disable_tqdm,
        accelerator=trainer.accelerator,
    )
    models: dict[str, Any] = {
        "actor": trainer.actor,
        "critic": trainer.critic,
        "kl_controller": trainer._kl_controller,
    }
    maker = NaiveExperienceMaker(**models, strategy=strategy, **arguments)
    for model in maker.reward_models:
        model.to(trainer.accelerator.device)
    maker.reward_scale = trainer._reward_scale  # which checkpoints hold
    return maker


def check_average(weights: dict[str, torch.Tensor], ema_model: Actor) -> None:
    """Checks that an actor can hold averages of weights: it must be a copy of the policy, and not the policy."""
    averages = dict(ema_model.model.named_parameters())
    for name, parameter in weights.items():
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
    """One optimizer and one schedule from those of policy and critic, `None` without any."""
    optimizers: dict[str, Any] = {"actor_optim": actor_optim}
    schedulers: dict[str, Any] = {"actor_scheduler": actor_scheduler}
    if config.estimator.name == "gae":
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
    """Rows of a batch of prompts, see [`PPOTrainerVL.fit`]; a tuple has one of these sets of media columns."""
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
    Checks that batches of prompts make whole optimizer steps. Returns the steps on the experience of a batch, and its
    prompts over all ranks.
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
