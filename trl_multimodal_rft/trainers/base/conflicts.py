# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Options that exclude each other, or have no effect together: tables of conditions of which none may be true, with
messages. A config lists its tables in `_conflicts`; those of a single config stand beside it.
"""

from collections.abc import Sequence
from typing import Any

from ...views.view_options import as_schedule


# Conditions of which none may be true, and messages about them
Conflicts = Sequence[tuple[bool, str]]


def raise_first(conflicts: Conflicts) -> None:
    """Raises a `ValueError` with the message of the first condition that is true."""
    for is_true, message in conflicts:
        if is_true:
            raise ValueError(message)


def check_conflicts(config: Any) -> None:
    """Raises a `ValueError` about the first conflict of a config whose options are completed."""
    for conflicts_of in config._conflicts:
        raise_first(conflicts_of(config))


def conflicts_of_noise(args: Any) -> Conflicts:
    """Returns the conflict of `neftune_noise_alpha` with packed rows."""
    packs = args.packing == "prefix" or args.packing is True or getattr(args, "eval_packing", False)
    remedy = "set `packing=False`" if isinstance(args.packing, bool) else "set `packing='padded'`"
    return [
        (
            args.neftune_noise_alpha is not None and packs,
            "The noise of `neftune_noise_alpha` depends on the length of a row, which isn't known in packed rows; "
            f"{remedy}, or remove it.",
        )
    ]


def conflicts_of_reference(args: Any) -> Conflicts:
    """Returns conflicts about the reference of a preference loss."""
    return [
        (
            args.sync_ref_model and args.precompute_ref_log_probs,
            "`precompute_ref_log_probs=True` needs a fixed reference, but `sync_ref_model=True` updates it; "
            "remove one of them.",
        )
    ]


def conflicts_of_engine(args: Any) -> Conflicts:
    """Returns conflicts of vLLM's options with each other, and with those of sampling."""
    if not args.use_vllm:
        return []
    has_server = args.vllm_mode == "server"
    engine_kwargs = args.vllm_engine_kwargs if isinstance(args.vllm_engine_kwargs, dict) else {}
    engine_names = [name for name in engine_kwargs if name != "enable_lora"]
    sampling = {"logit_bias": None, "min_p": args.min_p, **(args.generation_kwargs or {})}
    unsupported = next((name for name in ("logit_bias", "min_p") if sampling[name]), None)
    return [
        (
            has_server and args.offload_during_generation,
            "`offload_during_generation` has no effect with `vllm_mode='server'`, whose engine samples on other GPUs; "
            "remove one of them.",
        ),
        (
            has_server and bool(engine_names),
            f"`vllm_engine_kwargs` ({', '.join(engine_names)}) are for the trainer's own engine. Remove them and "
            "start the server with these arguments, or set `vllm_mode='colocate'`.",
        ),
        (
            bool(engine_kwargs.get("speculative_config")) and unsupported is not None,
            f"vLLM doesn't support `{unsupported}` with `vllm_engine_kwargs['speculative_config']`; remove one of "
            "them.",
        ),
        (
            bool(args.vllm_max_model_length) and "max_model_len" in engine_kwargs,
            f"`vllm_max_model_length` ({args.vllm_max_model_length}) and `vllm_engine_kwargs['max_model_len']` "
            f"({engine_kwargs.get('max_model_len')}) both set the engine's length; remove one of them.",
        ),
    ]


def conflicts_of_staleness(args: Any) -> Conflicts:
    """Returns the conflict of `max_staleness` with an engine that is no server."""
    return [
        (
            args.max_staleness > 0 and not (args.use_vllm and args.vllm_mode == "server"),
            f"`max_staleness={args.max_staleness}` samples while the policy is trained, which needs servers; set "
            "`use_vllm=True` and `vllm_mode='server'`, or remove `max_staleness`.",
        )
    ]


def conflicts_of_views(args: Any) -> Conflicts:
    """Returns conflicts of views in sampling that apply to no completion. Raises for a schedule that doesn't fit."""
    rollout_settings = args.rollout_view_settings
    settings_by_option = {"rollout_view": rollout_settings, "contrast_view": args.contrast_view_settings}
    as_schedule(rollout_settings.schedule)(0.0)  # raises for an invalid schedule
    if rollout_settings.schedule != "constant":
        rollout_settings.view.scaled(1.0)  # raises if the view has no strength to schedule
    return [
        (
            settings.view is not None and int(settings.fraction * args.num_generations) == 0,
            f"`fraction` ({settings.fraction}) of `{option}`, times `num_generations` ({args.num_generations}) and "
            "rounded down, is no completion; raise one of them.",
        )
        for option, settings in settings_by_option.items()
    ]


def conflicts_of_groups(args: Any) -> Conflicts:
    """Returns conflicts of the options that choose prompts or exchange groups of completions."""
    exchange_options = [name for name in ("dynamic_sampling", "replay_buffer_size") if getattr(args, name)]
    moving_options = [*exchange_options, *(["balance_ranks"] if args.balance_ranks else [])]
    n_completions = args.per_device_train_batch_size * args.steps_per_generation
    return [
        *(
            (
                args.num_generations < 2,
                f"`{name}` selects prompts whose completions differ in reward, so `num_generations` must be at least "
                "2.",
            )
            for name in exchange_options
        ),
        *(
            (
                n_completions % args.num_generations != 0,
                f"`{name}` exchanges whole groups of each process, so `per_device_train_batch_size` times "
                f"`steps_per_generation` ({n_completions}) must be a multiple of `num_generations` "
                f"({args.num_generations}).",
            )
            for name in moving_options
        ),
        (
            args.balance_ranks and args.packing_shuffle,
            "`balance_ranks` moves whole groups between ranks, but `packing_shuffle=True` shuffles completions across "
            "groups; remove one of them.",
        ),
        (
            args.difficulty_sampling and not args.shuffle_dataset,
            "`difficulty_sampling` chooses the order of rows, and `shuffle_dataset=False` keeps the dataset's; remove "
            "one of them.",
        ),
    ]
