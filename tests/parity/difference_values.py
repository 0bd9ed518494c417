# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Values of TRL's options that `test_differences.py` runs, and what a run needs for an option to have an effect."""

from __future__ import annotations

import math
import types
import typing
from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import Any, Literal

from parity.difference_runs import FOLDER, SUBJECTS, TEMPLATE, trl_config
from transformers import TrainingArguments


# Of transformers, for all trainers
OF_TRANSFORMERS = {option.name for option in fields(TrainingArguments)}

# Options of servers, the Hub and devices that aren't here: configs are made, and no trainer
CONFIG_ONLY = {
    *("accelerator_config", "ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb"),
    *("ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout", "debug", "deepspeed"),
    *("fsdp", "fsdp_config", "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy"),
    *("hub_token", "local_rank", "parallelism_config", "push_to_hub", "report_to", "tf32", "torch_compile"),
    *("torch_compile_backend", "torch_compile_mode", "trackio_bucket_id", "trackio_space_id"),
    *("trackio_static_space_id", "log_completions_hub_repo", "output_dir"),
}


def is_config_only(name: str) -> bool:
    """Returns whether an option needs what isn't here, such as vLLM."""
    return name in CONFIG_ONLY or (name.startswith("vllm_") or name == "ds3_gather_for_generation")


SAVED = {"save_strategy": "steps", "save_steps": 1}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
WATCHED = {
    "beta": 0.1,
    "max_steps": 3,
    "sync_ref_model": True,
    "ref_model_sync_steps": 1,
    "ref_model_mixup_alpha": 0.5,
}
ADAM = {"optim": "adamw_torch", "adam_epsilon": 1e-2}
ADAPTIVE = {"entropy_coef": 0.1, "use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef_delta": 0.05}
BLOCKS = {"num_blocks": 64, "max_batch_tokens": 64}  # otherwise a cache fills the memory

# Values by option, where types and choices don't give them. The first has an effect, if any has
EXPLICIT: dict[str, list] = {
    "entropy_coef_max": [0.12, -1.0, math.nan],
    "entropy_coef_min": [0.08, -1.0, math.nan],
    "entropy_target": [9.0, -1.0, math.nan],
    "accelerator_config": [{"split_batches": True}, {"split_batchesx": True}, "x"],
    "activation_checkpointing_kwargs": [{"use_reentrant": True}, {"use_reentrantx": True}, "x"],
    "adam_beta1": [0.5, 1.0, -1.0, math.nan],
    "adam_beta2": [0.5, 1.0, -1.0, math.nan],
    "adam_epsilon": [0.1, -1.0, math.nan],
    "bf16": [False, True, "False"],  # TRL's default is `True`
    "cache_implementation": ["static", "staticx"],
    "chat_template_kwargs": [{"enable_thinking": False}, {"tokenize": False}, "x"],
    "chat_template_path": [TEMPLATE, FOLDER, "/nowhere"],
    "dataloader_num_workers": [1, -1],
    "dataloader_multiprocessing_context": ["fork", "forkx"],
    "dataset_kwargs": [{"skip_prepare_dataset": True}, {"x": 1}, "x"],
    "dataset_num_proc": [1, -1],
    "disable_dropout": [True, False, "False"],
    "dataset_text_field": ["sentence", "nowhere"],
    "ddp_backend": ["gloo", "gloox"],
    "debug": ["underflow_overflow", "underflow_overflowx"],
    "deepspeed": [{"zero_optimization": {"stage": 2}}, "/nowhere.json"],
    "delta": [1.05, -1.0, 0.0, math.nan],
    "eos_token": ["<|endoftext|>", "<|nowhere|>"],
    "eval_accumulation_steps": [1, -1, 0],
    "eval_delay": [2.0, -1.0, math.nan],
    "eval_packing": [False, True, "False"],
    "completion_only_loss": [False, True, "False"],
    "eval_steps": [2, 0.5, -1, 0],
    "fsdp": ["full_shard", "full_shardx"],
    "fsdp_config": [{"fsdp_version": 2}, "/nowhere.json"],
    "generation_batch_size": [8, 6, -1],
    "generation_kwargs": [{"max_new_tokens": 4}, {"max_new_tokensx": 4}, {"temperature": -1.0}, "x"],
    "gradient_accumulation_steps": [2, 0, -1],
    "gradient_checkpointing_kwargs": [{"use_reentrant": True}, {"use_reentrantx": True}, "x"],
    "hub_model_id": ["somebody/model"],
    "hub_revision": ["main"],
    "hub_token": ["secret"],
    "include_for_metrics": [["loss"], ["lossx"], "loss"],
    "include_num_input_tokens_seen": ["all", "non_padding", True, "allx"],
    "label_names": [["labels"], ["nowhere"]],
    "label_smoothing": [0.2, 0.5, -1.0, math.nan],
    "label_smoothing_factor": [0.1, -1.0, math.nan],
    "length_column_name": ["n_tokens"],
    "learning_rate": [0.05, 0.0, -1.0, math.nan],
    "liger_kernel_config": [{"rope": True}, {"ropex": True}, "x"],
    "log_completions_hub_repo": ["somebody/completions"],
    "log_level": ["error", "errorx"],
    "log_level_replica": ["error", "errorx"],
    "logging_steps": [2, 0.5, 0, -1, math.nan],
    "loss_weights": [[0.5, 2.0], [0.5], [math.nan, 1.0], [-1.0, 1.0]],
    "lr_scheduler_kwargs": [{"num_cycles": 2}, {"num_cyclesx": 2}, "x"],
    "lr_scheduler_type": [
        *("cosine", "linear", "cosine_with_restarts", "polynomial", "constant_with_warmup", "inverse_sqrt"),
        *("cosine_with_min_lr", "reduce_lr_on_plateau", "warmup_stable_decay", "linearx"),
    ],
    "max_grad_norm": [0.1, 0.0, -1.0, math.nan],
    "max_completion_length": [5, 0, -1],
    "max_length": [38, 3, None, 0, -1],  # within the answers of the rows
    "max_steps": [1, 0],
    "metric_for_best_model": ["loss", "lossx"],
    "min_p": [0.3, 1.5, -1.0, math.nan],
    "model_init_kwargs": [{"dtype": "bfloat16"}, {"dtype": "bfloat16x"}, {"dtypex": 1}, "x"],
    "multi_objective_aggregation": ["normalize_then_sum", "normalize_then_sumx"],
    "neftune_noise_alpha": [5.0, -1.0, math.nan],
    "num_generations": [4, 3, 1, 0, -1],
    "num_generations_eval": [2, 3, 0, -1],
    "num_iterations": [2, 0, -1],
    "num_train_epochs": [0.5, 2.0, 0.0, -1.0, math.nan],
    "off_policy_mask_threshold": [0.001, -1.0, math.nan],
    "optim": ["adafactor", "adamw_torch", "adagrad", "sgdx"],
    "optim_args": ["lr=0.2", "momentum=0.9", "x"],
    "optim_target_modules": [["q_proj"], "all-linear"],
    "output_dir": ["elsewhere"],
    "pad_to_multiple_of": [16, 0, -1, "autox", "none"],
    "pad_token": ["<|endoftext|>", "<|nowhere|>"],
    "packing_strategy": ["bfd", "bfd_split", "wrapped", "bfdx"],
    "parallelism_config": ["x"],
    "per_device_eval_batch_size": [2, 0, -1],
    "per_device_train_batch_size": [2, 3, 0, -1],
    "precompute_ref_batch_size": [1, 0, -1],
    "ref_model_mixup_alpha": [0.9, 0.0, -1.0, 1.5, math.nan],
    "ref_model_sync_steps": [2, 0, -1],
    "report_to": ["none", "tensorboard", ["tensorboard"], "tensorboardx", []],
    "resume_from_checkpoint": ["nowhere"],
    "reward_clip_range": [(1.0, 3.0), (3.0, 1.0), (math.nan, 1.0), (1.0,)],
    "reward_weights": [[1.0, 0.5], [1.0], [math.nan, 1.0], [-1.0, 1.0], "x"],
    "run_name": ["mine"],
    "project": ["mine"],
    "save_steps": [1, 0.5, 0, -1],
    "save_strategy": ["epoch", "steps", "best", "no", "stepsx"],
    "save_total_limit": [1, 0, -1],
    "scale_rewards": ["batch", "none", True, False, "batchx"],
    "seed": [7, -1],
    "data_seed": [7, -1],
    "steps_per_generation": [2, 3, 0, -1],
    "teacher_model_init_kwargs": [{"dtype": "bfloat16"}, {"dtype": "bfloat16x"}, {"dtypex": 1}, "x"],
    "teacher_model_name_or_path": ["/nowhere"],
    "teacher_model_revision": ["v2"],
    "temperature": [0.5, 0.0, -1.0, math.nan],
    "top_k": [5, -1, -2],
    "top_p": [0.5, 0.0, 1.5, math.nan],
    "torch_compile_backend": ["eager", "eagerx"],
    "torch_compile_mode": ["default", "defaultx"],
    "torch_empty_cache_steps": [1, 0, -1],
    "trackio_bucket_id": ["somebody/bucket"],
    "trackio_space_id": ["somebody/space"],
    "trackio_static_space_id": ["somebody/space", False],
    "transformers_continuous_batching_config": [BLOCKS, {"num_blocksx": 64}, "x"],
    "truncation_mode": ["keep_start", "keep_end", "keep_endx"],
    "vllm_model_impl": ["transformers", "transformersx"],
    "vllm_server_base_url": ["http://127.0.0.1:9", "127.0.0.1:9"],
    "vllm_server_host": ["127.0.0.1"],
    "vllm_structured_outputs_regex": ["a+", "("],
    "vllm_importance_sampling_clip_max": [2.0, None, -1.0, math.nan],
    "vllm_importance_sampling_clip_min": [0.5, 5.0, -1.0, math.nan],
    "vllm_importance_sampling_cap": [2.0, -1.0, math.nan],
    "warmup_steps": [1, 0.5, -1.0, math.nan],
    "weight_decay": [0.5, -1.0, math.nan],
}
# Choices that TRL documents in words
CHOICES = {
    "importance_sampling_level": ["token", "sequence"],
    "vllm_mode": ["colocate", "server"],
    "vllm_importance_sampling_mode": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    "train_sampling_strategy": ["random", "sequential", "group_by_length"],
    "f_divergence_type": ["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"],
    "logging_strategy": ["no", "steps", "epoch"],
    "eval_strategy": ["no", "steps", "epoch"],
    "hub_strategy": ["end", "every_save", "checkpoint", "all_checkpoints"],
}
DPO_LOSSES = (
    "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop"
)
# By trainer, where they differ
OF_TRAINER: dict[tuple[str, str], list] = {
    ("dpo", "loss_type"): [[name] for name in (*DPO_LOSSES.split(), "sft", "sigmoid_norm", "sigmoidx")]
    + ["hinge", ["sigmoid", "sft"]],
    ("kto", "loss_type"): ["kto", "apo_zero_unpaired", "ktox"],
    ("reward", "max_length"): [50, 3, None, 0, -1],
    ("sft", "loss_type"): ["nll", "dft", "chunked_nll", "nllx"],
    ("distillation", "beta"): [0.0, 0.5, 2.0, -1.0, math.nan],
}
for _name in ("grpo", "ppo"):
    _losses = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo", "dapox"]
    OF_TRAINER[_name, "loss_type"] = _losses

# Other options of the run of an option, without which it has no effect. Those of evaluation bring rows, too
WITH: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"), ADAM),
    **dict.fromkeys(
        (
            *("batch_eval_metrics", "bf16_full_eval", "do_eval", "eval_accumulation_steps", "eval_delay"),
            *("eval_do_concat_batches", "eval_on_start", "eval_packing", "eval_steps", "eval_strategy"),
            *("eval_use_gather_object", "include_for_metrics", "num_generations_eval"),
            *("per_device_eval_batch_size", "prediction_loss_only", "fp16_full_eval"),
        ),
        EVALUATED,
    ),
    **dict.fromkeys(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), WATCHED),
    **dict.fromkeys(
        (
            *("save_steps", "save_strategy", "save_total_limit", "save_only_model", "save_on_each_node"),
            *("enable_jit_checkpoint", "restore_callback_states_from_checkpoint"),
        ),
        SAVED,
    ),
    **dict.fromkeys(
        ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        {**SAVED, **EVALUATED, "load_best_model_at_end": True, "metric_for_best_model": "loss"},
    ),
    **dict.fromkeys(
        ("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        ADAPTIVE,
    ),
    **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), {"loss_type": "sapo"}),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), {"loss_type": "vespo"}),
    "activation_checkpointing_kwargs": {"activation_checkpointing": True},
    "gradient_checkpointing_kwargs": {"gradient_checkpointing": True},
    "chat_template_kwargs": {"seed": 3},  # with the default, an advantage is 0 or 1e-8, and counts as clipped or not
    "discopop_tau": {"loss_type": ["discopop"]},
    "eval_packing": {**EVALUATED, "packing": True},
    "f_alpha_divergence_coef": {"f_divergence_type": "alpha_divergence"},
    "label_smoothing": {"loss_type": ["robust"]},
    "logging_first_step": {"logging_steps": 2},
    "loss_weights": {"loss_type": ["sigmoid", "sft"]},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_restarts", "max_steps": 3},
    "cast_lm_head_to_fp32": {"model_init_kwargs": {"dtype": "bfloat16"}},
    "use_transformers_continuous_batching": {"transformers_continuous_batching_config": BLOCKS},
    "use_transformers_paged": {"transformers_continuous_batching_config": BLOCKS},
    "entropy_coef_min": {**ADAPTIVE, "entropy_target": 1.0},
    "lr_scheduler_type": {"max_steps": 3},
    "optim": {"adam_epsilon": 1e-3},  # a smaller one makes steps of rounding
    "num_completions_to_print": {"log_completions": True},
    "log_unique_prompts": {"log_completions": True},
    "num_train_epochs": {"max_steps": -1},
    "packing_strategy": {"packing": True, "max_length": 48},
    "precompute_ref_batch_size": {"precompute_ref_log_probs": True},
    "transformers_continuous_batching_config": {"use_transformers_continuous_batching": True},
    "truncation_mode": {"max_length": 38},
    "use_bias_correction_kl": {"beta": 0.1},
    "warmup_steps": {"lr_scheduler_type": "constant_with_warmup"},
    "delta": {"loss_type": "grpo"},
    "log_completions_hub_repo": {"log_completions": True},
    "vllm_importance_sampling_clip_max": {"vllm_importance_sampling_mode": "token_mask"},
}

# Options of sampling, whose runs sample from the model. In other runs, completions are pseudo-random
SAMPLED = {
    *("cache_implementation", "generation_kwargs", "max_completion_length", "min_p", "repetition_penalty"),
    *("temperature", "top_k", "top_p", "transformers_continuous_batching_config"),
    *("use_transformers_continuous_batching", "use_transformers_paged", "use_cache", "chat_template_kwargs"),
}

# A trainer's own options about data, which run on images, too
ABOUT_DATA = {
    *("assistant_only_loss", "completion_only_loss", "dataset_num_proc", "log_multimodal", "max_completion_length"),
    *("max_length", "packing", "padding_free", "pad_to_multiple_of", "remove_unused_columns", "truncation_mode"),
    *("loss_type", "shuffle_dataset", "num_generations", "precompute_ref_log_probs"),
}
WITH_IMAGES = {name for name, subject in SUBJECTS.items() if subject.images is not None}


def names_of(trainer: str) -> list[str]:
    """Returns the names of a TRL config's fields that a user can set."""
    return [option.name for option in fields(trl_config(trainer)) if option.init]


def field_of(trainer: str, name: str) -> Field:
    return trl_config(trainer).__dataclass_fields__[name]


def default_of(option: Field) -> Any:
    return option.default_factory() if option.default is MISSING else option.default


def _plain_types(hint: Any) -> list[Any]:
    """Returns the members of a union, but for `None`, or the type itself."""
    members = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    return [member for member in members if member is not type(None)]


def _choices_of(option: Field, kinds: list[Any]) -> list[Any]:
    """Returns the texts that an option may have, from its annotation, its metadata or `CHOICES`."""
    choices = list(CHOICES.get(option.name, ()))
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            choices += typing.get_args(kind)
        if isinstance(kind, type) and issubclass(kind, Enum):
            choices += [member.value for member in kind]
    if not choices:
        choices = list(option.metadata.get("choices") or ())
    return choices


def values_of(trainer: str, name: str) -> list[Any]:
    """
    Returns values of an option: valid ones other than the default, and neighbours, which are a wrong word, -1, NaN
    and the text "False".
    """
    for table, key in ((OF_TRAINER, (trainer, name)), (EXPLICIT, name)):
        if key in table:
            return list(table[key])
    option = field_of(trainer, name)
    kinds = _plain_types(typing.get_type_hints(trl_config(trainer))[name])
    default = default_of(option)
    choices = _choices_of(option, kinds)
    if choices:
        return [*(choice for choice in choices if choice != default), f"{choices[0]}x"]
    if bool in kinds:
        return [not default, "False"]
    if float in kinds:
        return [0.5 if default in (None, 0.0) else default * 0.5, -1.0, math.nan]
    if int in kinds:
        return [2 if default is None else default + 1, -1]
    raise LookupError(f"no values of `{name}` of {trainer}: add it to `EXPLICIT`")


# Trainers that run all values of transformers' options; the others run the first
ALL_VALUES = ("grpo", "sft")


def cases_of(trainer: str, name: str) -> list[Any]:
    """Returns the values of an option that a trainer runs."""
    values = values_of(trainer, name)
    is_own = name not in OF_TRANSFORMERS or name in vars(trl_config(trainer)).get("__annotations__", ())
    return values if is_own or trainer in ALL_VALUES else values[:1]
