# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tested versions of other packages, and the undocumented parts of them that this package uses."""

import inspect
import os
import pkgutil
import re
import sys
import traceback
import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distributions, packages_distributions, requires, version


PACKAGE = "trl-multimodal-rft"
# Environment variable with the versions that this process or its parents have warned about
WARNED = "TRL_MULTIMODAL_RFT_WARNED"

# Names of the KV cache in inputs and outputs of models, depending on the version of transformers
CACHE_NAMES = ("cache", "past_key_values")

GRPO = "trl.trainer.grpo_trainer:GRPOTrainer."
RLOO = "trl.trainer.rloo_trainer:RLOOTrainer."
SFT = "trl.trainer.sft_trainer:SFTTrainer."
DPO = "trl.trainer.dpo_trainer:DPOTrainer."
KTO = "trl.trainer.kto_trainer:KTOTrainer."
REWARD = "trl.trainer.reward_trainer:RewardTrainer."
DISTILLATION = "trl.trainer.distillation_trainer:DistillationTrainer."

# Parameters, in order, of the methods of transformers and of TRL that all trainers override
_OF_TRANSFORMERS = {
    "_load_from_checkpoint": "self resume_from_checkpoint model",
    "_load_rng_state": "self checkpoint",
    "_load_best_model": "self",
    "_init_training_state": (
        "self max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial"
    ),
    "train": "self resume_from_checkpoint trial ignore_keys_for_eval",
    "_get_grad_norm": "self model grad_norm",
    "get_batch_samples": "self epoch_iterator num_batches device",
    "save_model": "self output_dir _internal_call",
    "create_optimizer": "self model",
    "evaluation_loop": "self dataloader description prediction_loss_only ignore_keys metric_key_prefix",
}
_OF_TRL = {
    "get_train_dataloader": "self",
    "get_eval_dataloader": "self eval_dataset",
    "compute_loss": "self model inputs return_outputs num_items_in_batch",
    "_save_checkpoint": "self model trial",
    "create_model_card": "self model_name dataset_name tags",
    "log": "self logs start_time",
    "prediction_step": "self model inputs prediction_loss_only ignore_keys",
}
# Methods that only trainers with sampling override, and methods that only trainers with rewards override
_SAMPLING = {"_generate_and_score_completions": "self inputs", "_prepare_inputs": "self generation_batch"}
_REWARDS = {
    **_SAMPLING,
    "_compute_loss": "self model inputs",
    "_get_per_token_logps_and_entropies": (
        "self model input_ids attention_mask logits_to_keep batch_size compute_entropy compute_aux_loss pixel_values "
        "image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids "
        "mm_token_type_ids image_position_ids"
    ),
}


def _overridden(path: str, further: dict[str, str], **of_transformers: str) -> dict[str, str]:
    """
    Returns the parameters of a trainer's overridden methods, by the path of the method. `further` are more methods of
    TRL's class at `path`, and `of_transformers` more methods of `transformers.Trainer`.
    """
    methods = {path + name: parameters for name, parameters in {**_OF_TRL, **further}.items()}
    trainer_methods = {**_OF_TRANSFORMERS, **of_transformers}
    return {**methods, **{f"transformers:Trainer.{name}": parameters for name, parameters in trainer_methods.items()}}


OVERRIDDEN = {
    "GRPO": _overridden(GRPO, _REWARDS),
    "RLOO": _overridden(RLOO, _REWARDS),
    "PPO": _overridden(GRPO, _REWARDS, create_scheduler="self num_training_steps optimizer"),
    "SFT": _overridden(SFT, {}),
    "DPO": _overridden(DPO, {"compute_ref_log_probs": "self model inputs"}),
    "KTO": _overridden(KTO, {"compute_ref_log_probs": "self model inputs"}),
    "Reward": _overridden(REWARD, {"_prepare_dataset": "self dataset processing_class args dataset_name"}),
    "Distillation": _overridden(
        DISTILLATION, {**_SAMPLING, "_compute_loss": "self unwrapped_student inputs num_items_in_batch"}
    ),
}
ALL_OVERRIDDEN: dict[str, str] = {}
for _methods in OVERRIDDEN.values():
    ALL_OVERRIDDEN |= _methods

# Undocumented functions and methods that this package calls, with the parameters that it passes. Parameters before `/`
# are passed by position. `|` separates names of a parameter in different versions.
CALLED = {
    GRPO + "__init__": (
        "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks "
        "optimizers quantization_config peft_config tools rollout_func environment_factory"
    ),
    RLOO + "__init__": (
        "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks "
        "optimizers quantization_config peft_config"
    ),
    DISTILLATION + "__init__": (
        "model teacher_model args train_dataset eval_dataset processing_class callbacks optimizers "
        "quantization_config peft_config tools"
    ),
    DISTILLATION + "_get_eval_sampler": "self eval_dataset /",
    GRPO + "get_high_entropy_mask": "self entropies mask threshold /",
    GRPO + "_get_eval_sampler": "self eval_dataset /",
    # Reward functions call them
    GRPO + "_log_completion_extra": "self column values /",
    GRPO + "_log_metric": "self name value /",
    RLOO + "_log_completion_extra": "self column values /",
    RLOO + "_log_metric": "self name value /",
    SFT + "_get_eval_sampler": "self eval_dataset /",
    "transformers:Trainer._get_output_dir": "self trial /",
    "transformers:Trainer._determine_best_metric": "self metrics trial /",
    "transformers:Trainer._evaluate": "self trial ignore_keys_for_eval /",
    "transformers:Trainer._prepare_inputs": "self inputs /",
    # Functions that write and push a checkpoint
    "transformers:Trainer._save_optimizer_and_scheduler": "self output_dir /",
    "transformers:Trainer._save_scaler": "self output_dir /",
    "transformers:Trainer._save_rng_state": "self output_dir /",
    "transformers:Trainer.store_flos": "self /",
    "transformers:Trainer._push_from_checkpoint": "self checkpoint_folder /",
    "transformers:Trainer._finish_current_push": "self /",
    "trl.trainer.utils:use_adapter": "model adapter_name /",
    "trl.trainer.utils:print_prompt_completions_sample": (
        "prompts completions rewards advantages step num_samples / extra"
    ),
    "trl.trainer.utils:nanmin": "tensor /",
    "trl.trainer.utils:nanmax": "tensor /",
    "trl.trainer.utils:nanstd": "tensor / dim keepdim",
    "trl.trainer.utils:start_event_loop_in_daemon": "name",
    "trl.trainer.utils:shutdown_event_loop_in_daemon": "thread loop /",
    "trl.models:prepare_deepspeed": "model accelerator /",
    "trl.models:prepare_fsdp": "model accelerator /",
    "trl.models.utils:_ForwardRedirection.__call__": "self wrapper_module original_module method /",
    "trl.models.utils:disable_gradient_checkpointing": "model gradient_checkpointing_kwargs /",
    "trl.extras.profiling:ProfilingContext": "name report_to is_main_process step /",
    "trl.trainer.utils:create_model_from_path": "model_id / architecture kwargs",
    "trl.trainer.callbacks:SyncRefModelCallback": "ref_model accelerator /",
    "trl.distributed:DistributedBackend.gather_params": "self params /",
    "transformers.conversion_mapping:get_model_conversion_mapping": "model / add_legacy",
    "transformers.exporters.utils:precompute_export_inputs": "model inputs /",
    "transformers.core_model_loading:revert_weight_conversion": "model state_dict /",
    "transformers.core_model_loading:WeightTransform.reverse_transform": "self /",
    "transformers.core_model_loading:WeightTransform.rename_source_key": "self source_key /",
    "transformers.modeling_utils:log_state_dict_report": "model pretrained_model_name_or_path / loading_info",
    "transformers.integrations.peft:log_state_dict_report": "model pretrained_model_name_or_path / loading_info",
    "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe:_get_feat_extract_output_lengths": (
        "input_lengths n_window /"
    ),
    "peft.utils.integrations:dequantize_bnb_weight": "weight /",
    "trl.trainer.utils:get_config_model_id": "config /",
    "trl.trainer.utils:get_callable_name": "func /",
    "trl.trainer.utils:is_async_callable": "func /",
    "trl.kernels:ChunkedLogProbFunction.forward": (
        "ctx hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs /"
    ),
    "trl.kernels.chunked_divergence:ChunkedDivergenceFunction.forward": (
        "ctx student_hidden student_weight student_bias teacher_hidden teacher_weight teacher_bias beta temperature "
        "student_logit_scale student_final_logit_softcapping teacher_logit_scale teacher_final_logit_softcapping /"
    ),
    "trl.trainer.utils:maybe_gather_lm_head_ctx": "params /",
    "trl.chat_template_utils:parse_response": "tokenizer ids / prefix tools",
    SFT + "__init__": (
        "model args data_collator train_dataset eval_dataset processing_class callbacks optimizers "
        "optimizer_cls_and_kwargs quantization_config peft_config"
    ),
    "trl.trainer.utils:selective_log_softmax_and_entropy": "logits index / entropy_requires_grad temperature",
    "transformers:GenerationMixin._prepare_position_ids_for_generation": "self inputs_tensor model_kwargs /",
    "transformers:GenerationMixin.prepare_inputs_for_generation": (
        "self input_ids / next_sequence_length cache|past_key_values attention_mask is_first_iteration"
    ),
    "transformers:PreTrainedModel._can_set_attn_implementation": "",
    "accelerate.state:GradientState._set_sync_gradients": "self sync_gradients /",
    "datasets.features.features:require_decoding": "feature / ignore_decode_attribute",
    "transformers.masking_utils:create_masks_for_generate": (
        "config inputs_embeds attention_mask cache|past_key_values position_ids"
    ),
}

# Private attributes of TRL's trainers, and of transformers' below them, that this package reads or sets
_OF_ALL = "_metrics _name _paper _tag_names"
_OF_SAMPLING = f"{_OF_ALL} _buffered_inputs _logs _step"
_OF_REWARDS = f"{_OF_SAMPLING} _pending_extra_logs _pending_metrics"
_OF_READING = f"{_OF_ALL} _total_train_tokens"
ATTRIBUTES = {
    GRPO: (
        f"{_OF_REWARDS} _created_lr_scheduler _entropy_bonus_enabled _env_tools _environment_pool _last_world_entropy"
    ),
    RLOO: _OF_REWARDS,
    DISTILLATION: _OF_SAMPLING,
    SFT: f"{_OF_READING} _loss_shifts_labels",
    DPO: f"{_OF_READING} _is_vision_dataset",
    KTO: f"{_OF_READING} _is_vision_dataset",
    REWARD: _OF_READING,
}


# The first version that isn't tested, of packages of which pip may install newer ones
UNTESTED = {"accelerate": "1.16", "datasets": "5.3", "peft": "0.22"}


@lru_cache
def bounds() -> dict[str, str]:
    """
    Returns the bounds of tested versions by package, from pyproject.toml and [`UNTESTED`]; empty if this package isn't
    installed.
    """
    bounds = {}
    with suppress(PackageNotFoundError):
        for line in requires(PACKAGE) or ():
            # The name, and the bounds before any marker: `torch>=2.9,<3; python_version < "3.13"` has 2.9 and 3
            match = re.match(r"([\w-]+)(?=[^;]*>=([\d.]+))(?=[^;]*<([\d.]+))?", line)
            if match is None:
                continue
            end = match[3] or UNTESTED.get(match[1])
            if end:
                bounds[match[1]] = f">={match[2]},<{end}"
    return bounds


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    installed = {name: next(iter(distributions(name=name)), None) for name in names}
    return {name: distribution.version for name, distribution in installed.items() if distribution is not None}


def compare_with_tested(installed_version: str, tested: str) -> int:
    """Returns -1 for a version below the tested ones, 1 above them, else 0. A pre-release counts as its release."""
    # Versions as lists of integers: the installed version, and the lower and the upper bound, if there are bounds
    texts = [re.split(r"[^\d.]", installed_version)[0].strip("."), *re.findall(r"[\d.]+", tested)]
    current, *ends = ([*map(int, text.split("."))] for text in texts)
    return (current >= ends[1]) - (current < ends[0]) if ends else 0


def missing_parts() -> dict[str, str]:
    """
    Returns texts by installed package, with the names and parameters that this package uses and the installed one
    lacks. Packages that lack none are left out.
    """
    missing: dict[str, list[str]] = {name: [] for name in installed_versions(bounds())}
    for path, parameters in {**dict.fromkeys(ALL_OVERRIDDEN, ""), **CALLED}.items():
        package = path.split(".")[0].split(":")[0]
        label = path.replace(":", ".")
        if package not in missing:
            continue
        try:
            available = inspect.signature(pkgutil.resolve_name(path)).parameters
        except (ImportError, AttributeError) as error:
            if error.__cause__ is not None:  # the module exists, but one of its imports fails
                raise
            missing[package].append(f"`{label}`")
        else:
            # An argument is missing if it is passed by position and the function takes fewer (kinds of parameters up
            # to `VAR_POSITIONAL` are positional), or passed by name and the function has none of its spellings (`a|b`)
            first, _, by_name = parameters.rpartition("/")
            lost = first.split()[sum(parameter.kind <= parameter.VAR_POSITIONAL for parameter in available.values()) :]
            lost += [name for name in by_name.split() if available.keys().isdisjoint(name.split("|"))]
            missing[package] += [f"`{name}` of `{label}`" for name in lost]
    if "trl" in missing:
        missing["trl"] += missing_attributes()
    return {name: "lacks " + ", ".join(parts) for name, parts in missing.items() if parts}


_source = lru_cache(inspect.getsource)  # reading it takes long, and trainers share their bases


def missing_attributes() -> list[str]:
    """Returns the private attributes in [`ATTRIBUTES`] that no class of a trainer has or sets as `self.name`."""
    missing = []
    for path, names in ATTRIBUTES.items():
        trainer = pkgutil.resolve_name(path.removesuffix("."))
        source = "".join(map(_source, trainer.__mro__[:-1]))
        for name in names.split():
            if not hasattr(trainer, name) and not re.search(rf"self\.{name}\b[^=\n]* = ", source):
                missing.append(f"`{path.replace(':', '.')}{name}`")
    return missing


@lru_cache
def check_versions() -> None:
    """
    Warns if an installed package is newer than the tested ones. vLLM is checked when it samples.

    Raises:
        ImportError: If a package is too old, or is newer and lacks names or parameters that this package uses.
    """
    versions = installed_versions(name for name in bounds() if name != "vllm")
    newer = {name: number for name, number in versions.items() if compare_with_tested(number, bounds()[name]) > 0}
    old = {name: "is too old" for name, number in versions.items() if compare_with_tested(number, bounds()[name]) < 0}
    unfit = old or (missing_parts() if newer else {})
    if unfit:
        complaints = "; ".join(f"{name} {versions[name]} {complaint}" for name, complaint in unfit.items())
        pins = " ".join(f'"{name}{bounds()[name]}"' for name in {**unfit, **newer})
        reason = f"{PACKAGE} {version(PACKAGE)} was tested with other versions"
        raise ImportError(f"{complaints}. {reason}: run `pip install {pins}`, or update {PACKAGE}.", name=PACKAGE)
    warn_of_newer(newer)


def warn_of_newer(newer: dict[str, str]) -> None:
    """Warns of the packages `newer`, with their versions, once for this process and the processes that it starts."""
    listing = ", ".join(f"{name} {number}" for name, number in newer.items())
    earlier = os.environ.get(WARNED, "").split("; ")
    if newer and listing not in earlier and os.environ.get("RANK", "0") == "0":
        os.environ[WARNED] = "; ".join([*earlier, listing])
        tested = ", ".join(name + bounds()[name] for name in newer)
        warnings.warn(f"{listing}: newer than {PACKAGE} was tested with ({tested}).", stacklevel=4)


@lru_cache
def cache_name() -> str:
    """Returns the name of the KV cache in inputs and outputs of models, which is `cache` since transformers 5.24."""
    from transformers.masking_utils import create_masks_for_generate

    return next(name for name in inspect.signature(create_masks_for_generate).parameters if name in CACHE_NAMES)


@lru_cache
def is_torchcodec_usable() -> bool:
    """Returns whether torchcodec loads and finds FFmpeg. `transformers.utils` tells this only since 5.23."""
    try:
        import torchcodec
    except (ImportError, OSError, RuntimeError):
        return False
    return getattr(torchcodec, "ffmpeg_major_version", True) is not None  # `None` without FFmpeg, since 0.16


def unfit_packages(error: BaseException) -> str | None:
    """Returns a message about packages that don't fit together if their imports raised the error, else `None`."""
    # Errors of transformers and TRL that wrap the error of an import
    is_wrapper_text = re.compile(r"Could not import module|Failed to import").match
    cause = error
    while is_wrapper_text(str(cause)) and cause.__cause__ is not None:
        cause = cause.__cause__
    if getattr(cause, "name", None) == PACKAGE:  # raised by [`check_versions`]
        return str(cause)
    if cause is error and not _is_import_failure(error):
        return None
    text = str(cause) if isinstance(cause, (ImportError, OSError, RuntimeError)) else repr(cause)
    versions = ", ".join(map(" ".join, installed_versions(("torch", "torchvision", "transformers", "trl")).items()))
    return (
        f"packages of this environment don't fit together: {' '.join(text.split())}. It has {versions or 'no torch'}; "
        "install versions that fit, see 'Packages that don't fit' in docs/install.md."
    )


def _is_import_failure(error: BaseException) -> bool:
    """Returns whether an import failed in an installed package or in this one, not in a user's module."""
    # Other errors count only if a statement at the top of a module raised them
    is_import_error = isinstance(error, ImportError) and error.name
    frames = [
        frame
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if is_import_error or frame.f_code.co_name == "<module>"
    ]
    names = [str(frame.f_globals.get("__name__")).split(".")[0] for frame in frames]
    names = [name for name in names if name not in {"__main__", *sys.stdlib_module_names}]
    # The innermost frame that isn't of a script or the standard library tells where the import failed
    return bool(names) and names[-1] in {__name__.split(".")[0], *packages_distributions()}
