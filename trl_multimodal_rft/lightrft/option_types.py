# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Types and ranges of the options of LightRFT's command line."""

from typing import Annotated, Any

from ..spelling import check_value
from ..trainers.base.config_options import options_of
from ..trainers.ppo.config import MultimodalPPOConfig


_FLAGS = """
bf16 use_kl_loss use_kl_estimator_k3 advantages_norm no_advantage_std_norm reward_running_norm
reward_running_norm_minus_mean overlong_buffer use_cpg_loss use_gspo enable_ema gradient_checkpointing_use_reentrant
load_checkpoint buffer_cpu_offload dataloader_pin_memory save_hf_ckpt flash_attn packing_samples load_in_4bit
fused_linear_logprob disable_logprobs_flashattn text_only normalize_reward_for_critic save_value_network
apply_chat_template use_ms disable_fast_tokenizer normalize_advantages use_sequence_rewards adam_offload fsdp
fsdp_cpu_offload overlap_comm use_mp_opt meta_init actor_init_on_gpu no_shard_vit mixed_mm_data rm_use_engine
rm_engine_cudagraph save_trajectories mark_high_entropy_tokens trajectory_analysis print_replay_buffer_stats use_fire
"""
_TEXTS = """
save_path ckpt_path ckpt_path_local log_dir wandb_run_name wandb_project wandb_org wandb_group kl_estimator
advantage_estimator loss_agg_mode engine_type remote_rm_url pretrain critic_pretrain reward_pretrain
value_head_prefix target_modules grad_accum_dtype prompt_data prompt_data_probs prompt_split eval_data eval_split
pretrain_data pretrain_data_probs pretrain_split input_key output_key images_key reference_key label_key
input_template system_prompt system_prompt_path adam_betas reward_clip_range
"""
_COUNTS = """
max_epochs micro_train_batch_size generate_max_len engine_tp_size n_samples_per_prompt train_batch_size
rollout_batch_size prompt_max_len micro_rollout_batch_size overlong_buffer_len kl_horizon max_samples
max_eval_samples max_len chunk_size num_trajectories_to_save plot_every logging_steps zpg sp_size
initial_model_shard_size lora_alpha max_pixels
"""
_FROM_ZERO = """
l2 eps_clip aux_loss_coef critic_learning_rate reward_clip advantage_clip overlong_buffer_penalty_factor
first_token_temperature max_ckpt_mem
"""

# Fields that take the values of options as they are. `PPOTrainerVL` has some of these options as arguments.
OPTIONS = {
    "save_path": "output_dir",
    "num_episodes": "num_train_epochs",
    "max_epochs": "num_ppo_epochs",
    "n_samples_per_prompt": "num_generations",
    "micro_train_batch_size": "per_device_train_batch_size",
    "generate_max_len": "max_completion_length",
    "actor_learning_rate": "learning_rate",
    "critic_learning_rate": "value_learning_rate",
    "lr_warmup_ratio": "warmup_steps",
    "l2": "weight_decay",
    "max_norm": "max_grad_norm",
    "eps_clip": "epsilon",
    "aux_loss_coef": "router_aux_loss_coef",
    "engine_tp_size": "vllm_tensor_parallel_size",
    "engine_mem_util": "vllm_gpu_memory_utilization",
    "enable_engine_sleep": "vllm_enable_sleep_mode",
    "max_ckpt_num": "save_total_limit",
    "disable_ds_ckpt": "save_only_model",
    "wandb_run_name": "run_name",
    **{name: name for name in ("seed", "bf16", "gradient_checkpointing", "temperature", "reward_clip_range")},
    **{name: name for name in ("ptx_coef", "kl_target", "logging_steps")},
    "init_kl_coef": "beta",
}
# Names of options by their type, with the range of numbers. Texts have no check of their own here
_NAMES_BY_TYPE: list[tuple[Any, str]] = [
    (bool, _FLAGS),
    (str, _TEXTS),
    (bool | str, "freeze_prefix use_wandb use_tensorboard dynamic_sampling"),  # names of parts, a key, a folder, ...
    (Annotated[int, "[1, inf)"], _COUNTS),
    (Annotated[int, "[0, inf)"], "seed lora_rank buffer_limit max_ckpt_num zero_stage"),
    (Annotated[int, "[-1, inf]"], "freezing_actor_steps eval_steps local_rank"),
    (Annotated[int, "[-1, inf)"], "limit_mm_image_per_prompt limit_mm_video_per_prompt"),
    (float, "save_steps"),
    (Annotated[float, "[0, inf)"], _FROM_ZERO),
    (Annotated[float, "[0, inf]"], "max_norm kl_target"),
    (Annotated[float, "(0, inf)"], "num_episodes fps"),
    (Annotated[float, "(0, inf]"], "value_clip"),
    (Annotated[float, "[0, 1]"], "gamma lambd high_entropy_token_ratio"),
    (Annotated[float, "[0, 1)"], "lr_warmup_ratio lora_dropout"),
    (Annotated[float, "(0, 1)"], "ema_beta"),
    (Annotated[float, "(0, 1]"], "top_p"),
]
TYPES: dict[str, Any] = {}  # type of each option
for _annotation, _names in _NAMES_BY_TYPE:
    TYPES.update(dict.fromkeys(_names.split(), _annotation))
# Those of a field of the config with the same limits
_TABLE = options_of(MultimodalPPOConfig)
TYPES |= {name: _TABLE[field].annotation for name, field in OPTIONS.items() if name not in TYPES}

# Texts that say whether an option is on, but would all switch it on
_WORDS = ("true", "false", "yes", "no", "on", "off", "none", "null", "0", "1", "")


def check_option(name: str, value: Any) -> None:
    """
    Raises a `ValueError` about a value that isn't of the type of its option, or out of range. A text is no switch:
    `"False"` would switch an option on.

    Args:
        name (`str`):
            Name of the option.
        value:
            Its value.
    """
    annotation = TYPES[name]
    label = f"`{name}`"
    if annotation == bool | str:
        # LightRFT's scripts also write "True" for the key of a tracker
        if isinstance(value, str) and value.lower() in _WORDS and (name, value.lower()) != ("use_wandb", "true"):
            raise ValueError(
                f"{label} must be `True`, `False` or a name, got the text {value!r}; write it without quotes."
            )
        return
    check_value(label, value, annotation, "correct it, or remove the option")
