# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Options of LightRFT's command line, and of its example command lines."""

from argparse import Namespace

from trl_multimodal_rft.lightrft.strategy import get_strategy


# Options of LightRFT's command line by their defaults there
MODELS = {"pretrain": None, "reward_pretrain": None, "remote_rm_url": None, "critic_pretrain": None}
MODELS |= {"value_head_prefix": "score", "load_in_4bit": False, "lora_rank": 0, "lora_alpha": 16, "lora_dropout": 0}
MODELS |= {"target_modules": "all-linear", "flash_attn": False, "packing_samples": False, "text_only": False}
MODELS |= {"chunk_size": 4096, "disable_logprobs_flashattn": False, "freeze_prefix": False, "bf16": False}
MODELS |= {"normalize_reward_for_critic": False, "save_value_network": False, "fused_linear_logprob": False}
DATA = {"prompt_data": None, "prompt_data_probs": "1.0", "prompt_split": "train", "eval_data": None}
DATA |= {"eval_split": "test", "max_eval_samples": 500, "pretrain_data": None, "pretrain_data_probs": "1.0"}
DATA |= {"pretrain_split": "train", "input_key": "input", "images_key": "image", "use_ms": False}
DATA |= {"label_key": "label", "reference_key": "reference", "input_template": None, "system_prompt": None}
DATA |= {
    "apply_chat_template": False,
    "max_samples": 1000000,
    "limit_mm_image_per_prompt": -1,
    "prompt_max_len": 1024,
    "disable_fast_tokenizer": False,
}
ALGORITHM = {"advantage_estimator": "gae", "gamma": 1, "lambd": 0.95, "use_kl_loss": False, "kl_estimator": "k1"}
ALGORITHM |= {"init_kl_coef": 0.01, "kl_target": None, "eps_clip": 0.2, "value_clip": 0.2, "ptx_coef": 0.05}
ALGORITHM |= {"loss_agg_mode": "seq-mean-token-mean", "use_gspo": False, "normalize_advantages": True}
ALGORITHM |= {"use_sequence_rewards": True, "use_cpg_loss": False, "high_entropy_token_ratio": 0.0}
ALGORITHM |= {"reward_running_norm": False, "reward_running_norm_minus_mean": False, "reward_clip": 0.0}
ALGORITHM |= {"advantages_norm": False, "advantage_clip": 0.0, "dynamic_sampling": False, "overlong_buffer": False}
ALGORITHM |= {"overlong_buffer_len": 1024, "overlong_buffer_penalty_factor": 1.0, "use_fire": False}
ALGORITHM |= {"first_token_temperature": 10.0, "freezing_actor_steps": -1, "aux_loss_coef": 0, "enable_ema": False}
UPDATES = {"num_episodes": 1, "rollout_batch_size": 512, "micro_rollout_batch_size": 8, "max_epochs": 1}
UPDATES |= {"l2": 0.0, "micro_train_batch_size": 4, "train_batch_size": 128, "n_samples_per_prompt": 2, "seed": 42}
UPDATES |= {"actor_learning_rate": 1e-6, "critic_learning_rate": 9e-6, "lr_warmup_ratio": 0.03, "top_p": 1.0}
UPDATES |= {"adam_betas": (0.9, 0.95), "temperature": 1.0, "generate_max_len": 1024, "max_len": None}
UPDATES |= {"max_norm": 1.0, "gradient_checkpointing": False, "gradient_checkpointing_use_reentrant": False}
ENGINES = {"engine_type": "vllm", "engine_tp_size": 1, "engine_mem_util": 0.5, "enable_engine_sleep": True}
ENGINES |= {"sp_size": 1, "fsdp": False, "use_mp_opt": False, "fsdp_cpu_offload": False, "rm_use_engine": False}
ENGINES |= {"rm_engine_cudagraph": False, "mixed_mm_data": False, "local_rank": -1, "zero_stage": 2, "zpg": 1}
ENGINES |= {"adam_offload": False, "actor_init_on_gpu": False, "grad_accum_dtype": None, "overlap_comm": False}
ENGINES |= {"no_shard_vit": False, "meta_init": False, "initial_model_shard_size": None}
LOGS = {"save_path": "./ckpt", "save_steps": -1, "save_hf_ckpt": False, "disable_ds_ckpt": False, "eval_steps": -1}
LOGS |= {"save_trajectories": False, "num_trajectories_to_save": 10, "mark_high_entropy_tokens": False}
LOGS |= {"trajectory_analysis": False, "print_replay_buffer_stats": False, "logging_steps": 1, "max_ckpt_num": 3}
LOGS |= {"ckpt_path": "./ckpt/checkpoints_ppo", "max_ckpt_mem": 1e8, "load_checkpoint": False, "log_dir": None}
LOGS |= {"plot_every": 10, "use_wandb": None, "wandb_org": None, "wandb_group": None, "wandb_run_name": "ppo_1128"}
LOGS |= {"wandb_project": "lightrft_train_ppo", "use_tensorboard": None}
COMMAND_LINE = {**MODELS, **DATA, **ALGORITHM, **UPDATES, **ENGINES, **LOGS}
CRITIC_FREE = {"advantage_estimator": "group_norm", "n_samples_per_prompt": 4, "micro_train_batch_size": 4}
CRITIC_FREE |= {"save_path": "out", "bf16": False}


def strategy_of(**options):
    return get_strategy(Namespace(**{**CRITIC_FREE, **options}))


# Command lines of its examples, as they differ from the defaults in `COMMAND_LINE`

SHARED = {"bf16": True, "ckpt_path": "out", "flash_attn": True, "fsdp": True, "gradient_checkpointing": True}
SHARED |= {"l2": 0.01, "save_path": "out", "save_steps": 20, "save_trajectories": True, "use_wandb": "a key"}
SHARED |= {
    "zero_stage": 3,
    "rollout_batch_size": 128,
    "pretrain": "a model",
    "prompt_data": "rows",
    "input_key": "prompt",
}
GROUPS = {"adam_offload": True, "advantage_estimator": "group_norm", "kl_estimator": "k3", "use_kl_loss": True}
GROUPS |= {"rm_use_engine": True, "reward_pretrain": "{}", "eval_steps": 20}
SGLANG = {"engine_type": "sglang", "engine_tp_size": 2, "engine_mem_util": 0.6, "freeze_prefix": True}
SGLANG |= {"generate_max_len": 2048, "apply_chat_template": True, "system_prompt": "Think."}
GRM_LACKS = "apply_chat_template enable_ema first_token_temperature high_entropy_token_ratio images_key input_key"
GRM_LACKS += (
    " initial_model_shard_size input_template label_key mark_high_entropy_tokens max_eval_samples pretrain_data"
)
GRM_LACKS += " pretrain_data_probs reference_key system_prompt use_fire use_ms"
EXAMPLES = {
    "gsm8k_geo3k/run_grpo_geo3k_qwen2.5_vl_7b.sh": {
        **GROUPS,
        **SGLANG,
        "images_key": "images",
        "limit_mm_image_per_prompt": 10,
        "max_ckpt_num": 2,
        "mixed_mm_data": True,
        "n_samples_per_prompt": 8,
        "num_episodes": 20,
        "print_replay_buffer_stats": True,
    },
    "gsm8k_geo3k/run_ppo_geo3k_qwen2.5_vl_7b.sh": {
        **SGLANG,
        "advantages_norm": True,
        "critic_pretrain": "a model",
        "fsdp_cpu_offload": True,
        "images_key": "images",
        "max_eval_samples": 700,
        "micro_rollout_batch_size": 4,
        "mixed_mm_data": True,
        "num_episodes": 30,
    },
    "gsm8k_geo3k/run_grpo_gsm8k_qwen2.5_0.5b.sh": {
        **GROUPS,
        **SGLANG,
        "max_eval_samples": 1319,
        "micro_rollout_batch_size": 4,
        "n_samples_per_prompt": 5,
        "num_episodes": 30,
        "text_only": True,
    },
    "r1_aqa/run_grpo_r1_aqa_qwen2_audio_7b.sh": {
        **GROUPS,
        "ckpt_path_local": None,
        "engine_mem_util": 0.3,
        "images_key": "audio_path",
        "micro_rollout_batch_size": 1,
        "micro_train_batch_size": 1,
        "n_samples_per_prompt": 4,
        "prompt_max_len": 512,
        "rollout_batch_size": 4,
        "train_batch_size": 16,
        "use_wandb": "",
    },
    "grm_vl_rl/run_grm_vl_rl.sh": {
        **GROUPS,
        **SGLANG,
        **dict.fromkeys(GRM_LACKS.split()),
        "fps": 2.0,
        "generate_max_len": 4096,
        "limit_mm_video_per_prompt": 2,
        "init_kl_coef": 0.001,
        "loss_agg_mode": "seq-mean-token-sum",
        "max_pixels": 282240,
        "micro_train_batch_size": 8,
        "mixed_mm_data": True,
        "n_samples_per_prompt": 8,
        "prompt_max_len": 12288,
        "rollout_batch_size": 32,
        "system_prompt_path": "examples/grm_vl_rl/system_prompts.yaml",
        "train_batch_size": 64,
        "trajectory_analysis": True,
    },
}
