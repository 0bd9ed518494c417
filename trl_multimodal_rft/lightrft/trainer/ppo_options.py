# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks and conversion of the arguments of [`PPOTrainerVL`] and of its batches of prompts."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ...spelling import join_settings
from ...trainers.ppo.config import MultimodalPPOConfig
from ..models.actor import Actor
from .experience_config import check_discounts, check_generation_options
from .experience_trainer import WHOLE_WEIGHTS, Rollouts


# Options of the config that affect only the rollouts and the loop of `MultimodalPPOTrainer`
_ROLLOUT_OPTIONS = """
cache_implementation chat_template_kwargs dynamic_sampling eval_delay eval_on_start generation_kwargs
load_best_model_at_end log_completions mask_truncated_completions min_p multi_objective_aggregation
repetition_penalty replay_buffer_size reward_weights scale_rewards shared_trunk sync_ref_model top_k top_p
max_staleness use_transformers_continuous_batching
""".split()

# Options of generation that greedy decoding ignores
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")

# Options of generation that vLLM takes
_ENGINE_OPTIONS = {"max_new_tokens", "temperature", "top_k", "top_p", "do_sample", "eos_token_id", "gamma", "lambd"}
_ENGINE_OPTIONS |= {"pad_token_id"}


def config_of(
    strategy: MultimodalPPOConfig,
    actor: Actor,
    critic: nn.Module | None,
    reference: Actor | None,
    generate_kwargs: dict[str, Any],
    options: dict[str, Any],
) -> MultimodalPPOConfig:
    """
    Checks all options of [`PPOTrainerVL`], and returns a copy of `strategy` with `options`, which are fields of the
    config. `options` are completed in place.
    """
    if critic is not None and strategy.estimator.name != "gae":
        raise ValueError(
            f"`critic` was passed, which `advantage_estimator={strategy.advantage_estimator!r}` doesn't use; change "
            "one of them."
        )
    defaults = {field.name: field.default for field in fields(strategy)}
    for name in _ROLLOUT_OPTIONS:
        if getattr(strategy, name) != defaults[name]:
            trainer = "pass it to `PPOTrainerVL` itself" if name in SAMPLING_OPTIONS else "use `MultimodalPPOTrainer`"
            raise ValueError(f"`{name}` of `strategy` has no effect in `PPOTrainerVL`; remove it, or {trainer}.")
    if strategy.entropy_settings.policy != "rollout":
        raise ValueError(
            f"`entropy_source={strategy.entropy_source!r}` of `strategy` has no effect in `PPOTrainerVL`, which takes "
            "entropies of the rollout; set 'rollout', or use `MultimodalPPOTrainer`."
        )
    if strategy.top_entropy_quantile < 1 and actor.high_entropy_token_ratio == 0:
        raise ValueError(
            f"`top_entropy_quantile` ({strategy.top_entropy_quantile}) needs entropies of the rollouts; make the "
            f"actor with `high_entropy_token_ratio={strategy.top_entropy_quantile}`."
        )
    if reference is None or options["beta"] == 0:
        if options["kl_target"]:
            raise ValueError("`kl_target` needs a reference `initial_model` and an `init_kl_coef` above 0; pass both.")
        options |= {"beta": 0.0, "kl_estimator": None}
    elif strategy.kl_estimator is None:
        options["kl_estimator"] = "k1"  # in the reward, with any estimator
    # Names of the trainer's arguments, by the names of GAE's settings
    discounts = {"gamma": "gamma", "lam": "lambd"}
    check_discounts(generate_kwargs)
    if strategy.estimator.name == "gae":
        settings = {name: generate_kwargs[option] for name, option in discounts.items() if option in generate_kwargs}
        options["advantage_estimator"] = join_settings("gae", {**strategy.estimator.settings, **settings})
    check_generation_options(
        {name: value for name, value in generate_kwargs.items() if name not in discounts.values()}
    )
    # `copy.copy` keeps devices and processes, while `dataclasses.replace` would set them up again. `__post_init__`
    # below checks the new values, and computes fields that follow from them.
    if strategy.use_vllm:
        unread = sorted(generate_kwargs.keys() - _ENGINE_OPTIONS)
        if unread:
            raise ValueError(
                f"`{unread[0]}` has no effect with `use_vllm=True`, where sampling has {sorted(_ENGINE_OPTIONS)}; "
                "remove it."
            )
        # The log-probabilities of experience are the policy's own
        options["vllm_importance_sampling_correction"] = False
    config = copy.copy(strategy)
    vars(config).update(
        options,
        temperature=actor.temperature,
        max_completion_length=generate_kwargs.get("max_new_tokens", strategy.max_completion_length),
        data_seed=strategy.seed if strategy.data_seed is None else strategy.data_seed,
        # Fields that must agree with the options above
        num_iterations=options["num_ppo_epochs"],
        activation_checkpointing=options["gradient_checkpointing"],
        # This multiple of `num_generations` passes the trainer's check that a generation batch holds whole groups. The
        # size of a rollout follows from the dataloader instead.
        steps_per_generation=strategy.num_generations * strategy.gradient_accumulation_steps,
        generation_batch_size=None,  # follows from the other options
        eval_strategy="no",  # the trainer has no rows to evaluate on
    )
    config.__post_init__()
    differ = config.kl_in_reward or generate_kwargs.get("gamma", 1.0) != 1  # the advantages of a completion's actions
    if differ and (config.loss.per_completion or config.importance_sampling_level == "sequence"):
        raise ValueError(
            f"`loss_type={config.loss_type!r}` with `importance_sampling_level={config.importance_sampling_level!r}` "
            "takes one advantage per completion, but `gamma` below 1 and a KL divergence in the reward give one per "
            "action; set `gamma=1` and `kl_estimator='k3'` of `strategy`, or another loss."
        )
    if config.deepspeed_plugin is not None and config.deepspeed_plugin.zero_stage == 3:
        raise ValueError(WHOLE_WEIGHTS)
    return config


# Batches of prompts


def media_columns_of(actor: Actor) -> tuple[tuple[str, ...], ...]:
    """Returns the possible names of the media lists in a tuple of prompts: audio, or images and maybe videos."""
    return (("audios",),) if actor.modality == "audio" else (("images",), ("images", "videos"))


def rows_of(batch: list[dict] | tuple, possible_columns: Sequence[tuple[str, ...]]) -> list[dict[str, Any]]:
    """
    Converts a batch of prompts to rows, see [`PPOTrainerVL.fit`]. A tuple has lists of prompts, media, references and
    labels. `possible_columns` holds the possible names of its media columns: `(("images",), ("images", "videos"))`
    allows tuples of four and of five lists.
    """
    if all(isinstance(row, dict) for row in batch):
        return list(batch)
    # Three lists hold no media: prompts, references and labels
    media_columns = next((names for names in possible_columns if len(names) + 3 == len(batch)), None)
    if media_columns is None or any(isinstance(column, (str, dict)) for column in batch):
        lengths = " or ".join(str(len(names) + 3) for names in possible_columns)
        raise ValueError(
            f"A batch of prompts is a list of rows, which are dictionaries, or a tuple of {lengths} lists, got "
            f"{len(batch)} of {type(batch[0]).__name__}."
        )
    rows = []
    for prompt, *media, reference, label in zip(*batch, strict=True):
        row = {"prompt": prompt, "references": reference, "labels": label}
        for name, value in zip(media_columns, media, strict=True):
            if value is not None:
                row[name] = value if isinstance(value, list) else [value]
        rows.append(row)
    return rows


def rollouts_of(
    dataloader: DataLoader,
    args: MultimodalPPOConfig,
    buffer_limit: int,
    n_processes: int,
    n_updates: int,
    **methods: Callable,
) -> Rollouts:
    """
    Returns the rollouts of a run. Raises a `ValueError` if the experience of a rollout doesn't fill whole optimizer
    steps. `n_updates` is the number of optimizer steps per episode, and `methods` are further fields of [`Rollouts`].

    Example: 2 ranks have 4 prompts each, with 8 completions per prompt. If a rank trains on 16 samples per optimizer
    step, for 2 epochs, a rollout has 4 steps and 8 prompts.
    """
    if dataloader.batch_size is None or isinstance(dataloader.dataset, IterableDataset):
        raise ValueError("`prompts_dataloader` must have a `batch_size`, and a dataset whose length is known.")
    prompts_per_rollout = dataloader.batch_size * n_processes
    n_prompts = len(dataloader.sampler)  # pyrefly: ignore[bad-argument-type] (of a dataset with a length)
    if n_prompts < prompts_per_rollout or (n_prompts % prompts_per_rollout != 0 and not dataloader.drop_last):
        raise ValueError(
            f"{n_prompts} prompts don't fill whole batches of {dataloader.batch_size} on {n_processes} processes; set "
            "another `batch_size`, or, if the prompts fill at least one batch per process, `drop_last=True`."
        )
    n_samples = dataloader.batch_size * args.num_generations
    if buffer_limit > 0:
        n_samples = min(n_samples, buffer_limit)
    samples_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if n_samples % samples_per_step != 0:
        raise ValueError(
            f"A batch of {dataloader.batch_size} prompts puts {n_samples} samples into the buffer, which don't fill "
            f"whole optimizer steps of {samples_per_step} (`micro_train_batch_size` x `gradient_accumulation_steps`)."
        )
    steps = n_samples // samples_per_step * args.num_ppo_epochs
    per_pass = n_prompts // prompts_per_rollout
    # LightRFT's scripts count the steps of all prompts, of which the last ones may not fill a batch
    per_episode = max(n_updates // (steps * per_pass), 1) * per_pass
    return Rollouts(
        dataloader,
        steps=steps,
        n_prompts=prompts_per_rollout,
        per_episode=per_episode,
        n_rollouts=math.ceil(args.num_train_epochs * per_episode),
        limit=None if args.max_steps <= 0 else math.ceil(args.max_steps / steps),
        **methods,
    )
