# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Supported versions of TRL, transformers and torch, and the undocumented parts of them that this package uses."""

import inspect
import pkgutil
import re
import warnings
from functools import lru_cache
from importlib.metadata import distributions, version

from packaging.version import Version


# What the tests run, see docs/install.md; pyproject.toml has the lower bounds, so that newer versions install
TESTED = {"trl": ">=1.16,<1.17", "transformers": ">=5.16,<5.25", "torch": ">=2.11,<2.16"}

# Names of a cache in inputs and outputs of models, by version
CACHE_NAMES = ("cache", "past_key_values")

GRPO = "trl.trainer.grpo_trainer:GRPOTrainer."
RLOO = "trl.trainer.rloo_trainer:RLOOTrainer."
SFT = "trl.trainer.sft_trainer:SFTTrainer."
DPO = "trl.trainer.dpo_trainer:DPOTrainer."
REWARD = "trl.trainer.reward_trainer:RewardTrainer."
DISTILLATION = "trl.trainer.distillation_trainer:DistillationTrainer."

# Methods that trainers override: parameters, in order. Those of transformers and of TRL's trainers, by all
_OF_TRANSFORMERS = {
    "_load_from_checkpoint": "self resume_from_checkpoint model",
    "_load_best_model": "self",
    "_init_training_state": (
        "self max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial"
    ),
    "train": "self resume_from_checkpoint trial ignore_keys_for_eval",
    "_get_grad_norm": "self model grad_norm",
    "save_model": "self output_dir _internal_call",
    "create_optimizer": "self model",
}
_OF_TRL = {
    "get_train_dataloader": "self",
    "get_eval_dataloader": "self eval_dataset",
    "compute_loss": "self model inputs return_outputs num_items_in_batch",
    "_save_checkpoint": "self model trial",
    "create_model_card": "self model_name dataset_name tags",
}
# By those that sample, and of these by those with rewards
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
    methods = {path + name: given for name, given in {**_OF_TRL, **further}.items()}
    others = {**_OF_TRANSFORMERS, **of_transformers}
    return {**methods, **{f"transformers:Trainer.{name}": given for name, given in others.items()}}


OVERRIDDEN = {
    "GRPO": _overridden(GRPO, _REWARDS),
    "RLOO": _overridden(RLOO, _REWARDS),
    "PPO": _overridden(GRPO, _REWARDS, create_scheduler="self num_training_steps optimizer"),
    "SFT": _overridden(SFT, {}),
    "DPO": _overridden(DPO, {"compute_ref_log_probs": "self model inputs"}),
    "Reward": _overridden(REWARD, {"_prepare_dataset": "self dataset processing_class args dataset_name"}),
    "Distillation": _overridden(
        DISTILLATION, {**_SAMPLING, "_compute_loss": "self unwrapped_student inputs num_items_in_batch"}
    ),
}
ALL_OVERRIDDEN = {path: given for each in OVERRIDDEN.values() for path, given in each.items()}

# Undocumented functions and methods that the package calls, with the parameters that it passes. `|` separates names
# of a parameter in different versions.
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
    DISTILLATION + "_get_eval_sampler": "eval_dataset",
    GRPO + "get_high_entropy_mask": "self entropies mask threshold",
    GRPO + "_get_eval_sampler": "eval_dataset",
    SFT + "_get_eval_sampler": "eval_dataset",
    "transformers:Trainer._get_output_dir": "trial",
    # Functions that write and push a checkpoint
    "transformers:Trainer._save_optimizer_and_scheduler": "output_dir",
    "transformers:Trainer._save_scaler": "output_dir",
    "transformers:Trainer._save_rng_state": "output_dir",
    "transformers:Trainer.store_flos": "",
    "transformers:Trainer._push_from_checkpoint": "checkpoint_folder",
    "transformers:Trainer._finish_current_push": "",
    "trl.trainer.utils:use_adapter": "model adapter_name",
    "trl.trainer.utils:print_prompt_completions_sample": (
        "prompts completions rewards advantages step num_samples extra"
    ),
    "trl.trainer.utils:nanmin": "tensor",
    "trl.trainer.utils:nanmax": "tensor",
    "trl.trainer.utils:nanstd": "tensor dim keepdim",
    "trl.trainer.utils:disable_dropout_in_model": "model",
    "trl.trainer.utils:start_event_loop_in_daemon": "name",
    "trl.trainer.utils:shutdown_event_loop_in_daemon": "thread loop",
    "trl.models:prepare_deepspeed": "model accelerator",
    "trl.models:prepare_fsdp": "model accelerator",
    "trl.models.utils:_ForwardRedirection.__call__": "wrapper_module original_module method",
    "trl.models.utils:disable_gradient_checkpointing": "model gradient_checkpointing_kwargs",
    "trl.extras.profiling:profiling_context": "trainer name",
    "trl.trainer.utils:create_model_from_path": "model_id architecture kwargs",
    "trl.trainer.callbacks:SyncRefModelCallback": "ref_model accelerator",
    "trl.distributed:DistributedBackend.gather_params": "params",
    "transformers.conversion_mapping:get_model_conversion_mapping": "model add_legacy",
    "transformers.exporters.utils:precompute_export_inputs": "model inputs",
    "transformers.core_model_loading:revert_weight_conversion": "model state_dict",
    "transformers.core_model_loading:WeightTransform.reverse_transform": "",
    "transformers.core_model_loading:WeightTransform.rename_source_key": "source_key",
    "transformers.modeling_utils:log_state_dict_report": "model pretrained_model_name_or_path loading_info",
    "transformers.integrations.peft:log_state_dict_report": "model pretrained_model_name_or_path loading_info",
    "peft.utils.integrations:dequantize_bnb_weight": "weight",
    "trl.trainer.utils:get_config_model_id": "config",
    "trl.trainer.utils:get_callable_name": "func",
    "trl.trainer.utils:is_async_callable": "func",
    "trl.kernels:ChunkedLogProbFunction.forward": (
        "hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs"
    ),
    "trl.kernels.chunked_divergence:ChunkedDivergenceFunction.forward": (
        "student_hidden student_weight student_bias teacher_hidden teacher_weight teacher_bias beta temperature "
        "student_logit_scale student_final_logit_softcapping teacher_logit_scale teacher_final_logit_softcapping"
    ),
    "trl.trainer.utils:maybe_gather_lm_head_ctx": "params",
    "trl.chat_template_utils:is_chat_template_prefix_preserving": "processing_class",
    "trl.chat_template_utils:parse_response": "tokenizer ids prefix tools",
    SFT + "__init__": (
        "model args data_collator train_dataset eval_dataset processing_class callbacks optimizers "
        "optimizer_cls_and_kwargs quantization_config peft_config"
    ),
    "trl.trainer.utils:selective_log_softmax_and_entropy": "logits index entropy_requires_grad temperature",
    "transformers:GenerationMixin._prepare_position_ids_for_generation": "self inputs_tensor model_kwargs",
    "transformers:GenerationMixin.prepare_inputs_for_generation": (
        "self input_ids cache|past_key_values attention_mask is_first_iteration"
    ),
    "transformers:PreTrainedModel._can_set_attn_implementation": "",
    "transformers.masking_utils:create_masks_for_generate": (
        "config inputs_embeds attention_mask cache|past_key_values position_ids"
    ),
}


def missing_parts() -> dict[str, list[str]]:
    """Returns parts of the contract that an installed package lacks, by package."""
    missing = {name: [] for name in TESTED}
    for path, parameters in {**ALL_OVERRIDDEN, **CALLED}.items():
        package, label = path.split(".")[0].split(":")[0], path.replace(":", ".")
        if package not in TESTED:
            continue
        try:
            found = inspect.signature(pkgutil.resolve_name(path)).parameters
        except (ImportError, AttributeError):
            missing[package].append(f"`{label}`")
        else:
            names = (name for name in parameters.split() if found.keys().isdisjoint(name.split("|")))
            missing[package] += [f"`{name}` of `{label}`" for name in names]
    return {name: parts for name, parts in missing.items() if parts}


def check_versions() -> None:
    """
    Warns if an installed package is newer than the tested ones.

    Raises:
        ImportError: If one is too old, or is newer and lacks what this package uses.
    """
    installed = {name: Version(version(name)) for name in TESTED}
    lowest, end = ({name: Version(re.findall(r"[\d.]+", each)[i]) for name, each in TESTED.items()} for i in (0, 1))
    old = {name: "is too old" for name, each in installed.items() if each < lowest[name]}
    # What precedes a release counts as that release
    untested = [name for name, each in installed.items() if name in old or Version(each.base_version) >= end[name]]
    if not untested:
        return
    wrong = old or {name: "lacks " + ", ".join(parts) for name, parts in missing_parts().items()}
    if wrong:
        found = "; ".join(f"{name} {installed[name]} {what}" for name, what in wrong.items())
        pins = " ".join(f'"{name}{TESTED[name]}"' for name in dict.fromkeys([*wrong, *untested]))
        own = f"trl-multimodal-rft {version('trl-multimodal-rft')}"
        raise ImportError(f"{found}. {own} was tested with other versions: run `pip install {pins}`, or update it.")
    found = ", ".join(f"{name} {installed[name]}" for name in untested)
    tested = ", ".join(name + TESTED[name] for name in untested)
    warnings.warn(f"{found}: newer than trl-multimodal-rft was tested with ({tested}).", stacklevel=2)


@lru_cache
def cache_name() -> str:
    """The name of a cache in inputs and outputs of models, which is `cache` since transformers 5.24."""
    from transformers.masking_utils import create_masks_for_generate

    return next(name for name in inspect.signature(create_masks_for_generate).parameters if name in CACHE_NAMES)


@lru_cache
def is_torchcodec_usable() -> bool:
    """Whether torchcodec loads and finds FFmpeg, as `transformers.utils` tells since 5.23."""
    try:
        import torchcodec
    except (ImportError, OSError, RuntimeError):
        return False
    return getattr(torchcodec, "ffmpeg_major_version", True) is not None  # `None` without FFmpeg, since 0.16


def unfit_packages(error: BaseException) -> str | None:
    """The last cause of an error by which transformers and TRL only name what they couldn't import."""
    if not re.match(r"Could not import module|Failed to import", str(error)) or error.__cause__ is None:
        return None
    while error.__cause__ is not None:
        error = error.__cause__
    versions = {each.name: f"{each.name} {each.version}" for each in distributions()}
    found = ", ".join(versions[name] for name in ("torch", "torchvision", "transformers") if name in versions)
    return (
        f"packages of this environment don't fit together: {' '.join(str(error).split())}. It has {found}; install "
        "versions that fit, see 'Packages that don't fit' in docs/install.md."
    )
