# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Random combinations of options, each a function of its seed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from inspect import get_annotations
from itertools import product
from pathlib import Path

from trl import GRPOConfig, RLOOConfig, SFTConfig

from helpers.trainer_utils import CONFIGS, PLAIN
from trl_multimodal_rft.algorithms.advantages import ESTIMATORS, Estimator
from trl_multimodal_rft.algorithms.losses import LOSSES
from trl_multimodal_rft.data.reading.rules import OPTION_NAMES
from trl_multimodal_rft.trainers.base.multimodal_config import MediaArguments, MultimodalArguments, SamplingArguments


TRL_CONFIGS = {"grpo": GRPOConfig, "rloo": RLOOConfig, "sft": SFTConfig}
RUN = {name: value for name, value in PLAIN.items() if name != "learning_rate"} | {"adam_epsilon": 1e-3}
_SHARED = (MediaArguments, SamplingArguments, MultimodalArguments)
OWN = {name for config in (*_SHARED, *CONFIGS.values()) for name in get_annotations(config) if name[0] != "_"}
OWN -= {"generation_batch_size", "loss_type", "num_generations", "steps_per_generation"}  # TRL has these, too
OWN -= {"teacher_columns"}  # an attribute of the class, no option
# Options in `OWN` with which TRL's trainer makes the same updates, in another way
AS_TRL = {"disable_dropout", "packing", "packing_shuffle", "max_tokens_per_microbatch", "entropy_source"}


def is_drawn(estimator: Estimator) -> bool:
    """Returns whether an estimator reads rewards alone, and isn't Online DPO, which allows few other options."""
    return estimator.needs != "critic" and estimator.step_input is None and estimator.name != "online_dpo"


# Values of drawn options, as far as a config has the options. The first value is the default.
SWITCHES = [
    *("bootstrap_truncated", "cast_lm_head_to_fp32", "difficulty_sampling"),
    *("gradient_checkpointing", "mask_truncated_completions", "normalize_advantages", "packing_shuffle"),
    *("reward_running_scale", "shared_trunk", "sync_ref_model", "use_adaptive_entropy"),
]
VALUES = {
    **dict.fromkeys(SWITCHES, [False, True]),
    **dict.fromkeys(["shuffle_dataset", "use_bias_correction_kl"], [True, False]),
    "beta": [0.0, 0.1],
    "cliprange_value": [0.2, 0.02, None],
    "completion_only_loss": [None, False],
    "delta": [None, 1.5],
    "disable_dropout": [None, True, False],
    "entropy_coef": [0.0, 0.1],
    "epsilon": [0.2, 0.02],
    "epsilon_high": [None, 0.28],
    "importance_sampling_level": ["token", "sequence"],
    "lr_scheduler_type": ["constant", "linear"],
    "max_grad_norm": [1e9, 0.5],
    "multi_objective_aggregation": ["sum_then_normalize", "normalize_then_sum"],
    "num_iterations": [1, 2],
    "off_policy_mask_threshold": [None, 0.01],
    "optim": ["sgd", "adamw_torch"],
    "pad_to_multiple_of": ["auto", 8],
    "ref_model_mixup_alpha": [0.6, 0.3],
    "repetition_penalty": [1.0, 1.2],
    "reward_clip_range": [None, [0.5, 3.0]],
    "reward_weights": [None, [1.0, -0.5]],
    "scale_rewards": ["group", "batch", "none"],
    "temperature": [1.0, 0.7],
    "top_entropy_quantile": [1.0, 0.5],
    "top_k": [0, 50],
    "top_p": [1.0, 0.9],
    "weight_decay": [0.0, 0.1],
    "advantage_estimator": [
        *("group_norm", "pass_at_k(k=2)"),  # with its default of 4, it learns nothing of groups of 4
        *(name for name, own in ESTIMATORS.items() if name not in ("group_norm", "pass_at_k") and is_drawn(own)),
        *("reinforce_baseline(norm_level='sequence')", "cpgd(weight='none')", "cpgd(weight='std')"),
    ],
    "contrast_view": [None, "blank", "blank(fraction=1.0, reward_ratio=1.2, bonus=1.0)"],
    "dynamic_sampling": [0, 4, 2],
    "dynamic_sampling_range": [None, [0.5, 2.5]],
    "ema_decay": [None, 0.9],
    "entropy_source": [
        "rollout",
        *(
            f"{policy}(scope={scope!r})"
            for policy, scope in product(("rollout", "current"), ("sequence", "micro_batch"))
        ),
        *("current", "rollout(renormalize=True)", "current(renormalize=True, scope='sequence')"),
    ],
    "freeze": [None, ["projector"], ["vision_tower", "projector"], ["audio_tower", "projector"]],
    "freezing_actor_steps": [0, 1],
    "kl_estimator": [None, "k1", "k2", "k3"],
    "kl_horizon": [10000, 50],
    "kl_target": [None, 0.01],
    "loss_add_tail": [True, False],
    "loss_top_k": [0, 5],
    "loss_view": [
        *(None, "blank(kl_coef=0.5)", "mask_patches(ratio=0.6, kl_coef=0.5, kl_clip=0.1, entropy_coefs=[0.1, 0.2])"),
        *("blank(entropy_coefs=[0.1, 0.2])", "blank(advantage_min=0.5, token_quantile=0.5, kl_coef=0.5)"),
        *("mask_patches(ratio=0.6, token_quantile=0.5)", "mask_patches(ratio=0.6, advantage_min=0.5)"),
        *("blank(temperature=0.1)", "mask_patches(ratio=0.6, temperature=0.1, kl_coef=0.5)"),
    ],
    "learning_rates": [None, {"language_model": 0.02}],
    "loss_type": ["dapo", *(name for name in LOSSES if name != "dapo"), "cpgd(drift_coef=0.5, drift_clamp=0.5)"],
    "max_length": [None, 30],
    "max_pixels": [None, 2 * 28 * 28],
    "max_tokens_per_microbatch": [None, 50],
    "num_ppo_epochs": [2, 1],
    "packing": ["prefix", "padded"],
    "ptx_batch_size": [1, 2],
    "ptx_coef": [0.0, 0.5],
    "replay_buffer_size": [0, 4],
    "rollout_view": [
        *(None, "mask_patches(patch_size=28)", "mask_patches(patch_size=28, fraction=0.8, schedule='linear')"),
        "mask_patches(patch_size=28, schedule='sigmoid(midpoint=0.5)')",
    ],
    "self_teacher": ["current", "base", "ema", "ema(rate=0.5)"],
    "soft_overlong_cache": [None, 4],
    "student_view": [None, "mask_patches(ratio=0.6)"],
    "teacher_view": [None, "blank"],
    "value_learning_rate": [None, 0.05],
    "value_lr_scheduler_type": [None, "cosine", "linear"],
    "value_warmup_steps": [None, 1],
    "vf_coef": [0.1, 1.0],
}
# Values in place of `VALUES`, by trainer
OWN_VALUES = {
    "rloo": {"advantage_estimator": [None], "beta": [0.05, 0.0]},
    "ppo": {
        "advantage_estimator": ["gae", "gae(gamma=0.9, lam=0.5)", *VALUES["advantage_estimator"]],
        "num_iterations": [1],
    },
    "distillation": {"beta": [1.0, 0.0, 0.3]},
    "sft": {"packing": [False, True], "loss_type": ["nll", "dft"], "pad_to_multiple_of": ["auto"]},
}

# Options that change no update, drawn separately for each run
NEUTRAL = {
    "balance_ranks": [False, True],  # one process has nothing to exchange, see tests/distributed for two
    "media_contribution_steps": [10, 1, 0],
    "media_prefetch": [1, 0, 2],
    "offload_during_generation": [False, True],
    "remove_unused_columns": [False, True],
    "self_check": [True, False, False],
    "special_tokens_in_text": [None, "allow", "raise", "strip"],
}

# Options without use here, because these runs have no files, tools or engine
NOT_DRAWN = {
    *(name for name in OPTION_NAMES if name not in VALUES),
    "media_rules",
    *("audio_overlong", "ignored_media_columns", "max_skipped_rows", "on_media_error"),
    "dynamic_sampling_reward",  # see test_difficulty.py
    "rejected_view",  # see test_dpo.py
    *("max_tool_calling_iterations", "max_tool_media", "max_context_media", "vllm_engine_kwargs"),
    *("speech_decoder", "speech_tokens", "sample_only", "held_out_rewards"),  # see test_speech.py
    *("log_multimodal", "num_completions_to_print", "teacher_model_server_url"),
    "teacher_models",  # see test_several_teachers.py
    "teacher_processor",  # see test_separate_teacher.py
    *("max_staleness", "vllm_server_base_url"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
}

# Options that depend on another option: unless it has one of these values, a config raises an error, or the dependent
# option has no effect
CRITIC = ["bootstrap_truncated", "cliprange_value", "freezing_actor_steps", "shared_trunk", "value_learning_rate"]
CRITIC += ["value_lr_scheduler_type", "value_warmup_steps", "vf_coef"]
KL = ["kl_estimator", "kl_target", "sync_ref_model"]
NEEDS = {
    **dict.fromkeys(CRITIC, ("advantage_estimator", ["gae", "gae(gamma=0.9, lam=0.5)"])),
    **dict.fromkeys(KL, ("beta", [0.1, 0.05])),
    "kl_horizon": ("kl_target", [0.01]),
    "ptx_batch_size": ("ptx_coef", [0.5]),
    "entropy_source": ("top_entropy_quantile", [0.5]),
    "scale_rewards": ("advantage_estimator", ["group_norm"]),
    "dynamic_sampling_range": ("dynamic_sampling", [4, 2]),
    "ref_model_mixup_alpha": ("sync_ref_model", [True]),
    "use_adaptive_entropy": ("entropy_coef", [0.1]),
    "loss_add_tail": ("loss_top_k", [5]),
    "self_teacher": ("teacher_view", ["blank"]),
}
# Options that are drawn with a chance of 0.4, and others with 0.12
OFTEN = {"advantage_estimator", "beta", "loss_type", "packing", "num_iterations", *NEEDS}
OFTEN |= {
    "freeze",
    "loss_top_k",
    "student_view",
    "teacher_view",
    "num_ppo_epochs",
    "packing_shuffle",
    "ptx_coef",
    "max_length",
}

# Completions per micro-batch, micro-batches per update, micro-batches per generation batch, and completions per prompt
SHAPES = [(8, 1, 1, 4), (4, 2, 2, 4), (4, 2, 2, 2), (4, 1, 2, 4), (4, 2, 4, 2), (2, 4, 4, 4), (6, 2, 2, 3)]
FAMILIES = {
    "text": ["qwen2_5_vl", "gemma3"],
    "image": ["qwen2_5_vl", "gemma3"],
    "images": ["qwen2_5_vl", "gemma3"],
    "video": ["qwen2_5_vl"],
    "clips": ["qwen2_5_vl"],  # questions about one clip, so that prompts have a common start
    "audio": ["qwen2_audio"],
}
TRANSFORMED = ("audio", "video", "clips")  # rows that `with_media` makes


@dataclass
class Draw:
    """A combination of options."""

    seed: int  # determines all other fields
    kind: str  # trainer: "grpo", "rloo", "ppo", "sft" or "distillation"
    rows: str  # media of the prompts
    family: str
    reward: str
    lora_dropout: float | None  # `None` trains all weights without an adapter
    lora_targets: str | list[str]  # modules with adapters, whose weights aren't 0
    completions: str  # "sampled", "random" tokens, or "fixed" ones, which depend on prompt and step
    options: dict  # options with values other than the default

    def config(self, folder: str | Path, config_class: type | None = None, **changes):
        """Returns the config of a run of two updates, limited to the class's fields."""
        config_class = config_class or CONFIGS[self.kind]
        names = {entry.name for entry in fields(config_class)}
        options = {**RUN, **self.options, **changes}
        options.setdefault("learning_rate", 0.003 if "optim" in self.options else 0.03)
        return config_class(str(folder), **{name: value for name, value in options.items() if name in names})


def values_of(kind: str) -> dict[str, list]:
    """Returns the values of the options of a trainer's config that are drawn."""
    names = {entry.name for entry in fields(CONFIGS[kind])}
    return {name: OWN_VALUES.get(kind, {}).get(name, values) for name, values in VALUES.items() if name in names}


def neutral(draw: Draw, run: str) -> dict:
    """Returns options of one of a draw's runs. They must not affect the updates."""
    generator = random.Random(f"{draw.seed} {run}")
    names = {entry.name for entry in fields(CONFIGS[draw.kind])}
    if "packing_shuffle" in draw.options:
        names -= {"balance_ranks"}
    if draw.rows in TRANSFORMED:
        names -= {"remove_unused_columns"}  # `with_media` needs it
    if "difficulty_sampling" in draw.options:
        names -= {"media_prefetch"}  # rows that are drawn early depend on fewer measurements
    return {name: generator.choice(values) for name, values in NEUTRAL.items() if name in names}


def combinations(seed: int) -> Iterator[Draw | str]:
    """Yields combinations drawn from a seed. For a combination that a config refuses, yields the reason."""
    generator = random.Random(seed)
    while True:
        draw = _drawn(seed, generator)
        try:
            draw.config("unused")
        except ValueError as error:
            yield str(error)
        else:
            yield draw


KINDS = ["grpo", "grpo", "grpo", "rloo", "ppo", "ppo", "sft", "distillation"]


def _drawn(seed: int, generator: random.Random) -> Draw:
    # Trainer, media and batches
    kind = generator.choice(KINDS)
    rows = generator.choice([*FAMILIES])
    size, accumulated, batches, group = generator.choice(SHAPES)
    options = {"per_device_train_batch_size": 4 // accumulated, "gradient_accumulation_steps": accumulated}
    if kind != "sft":
        options |= {"per_device_train_batch_size": size, "steps_per_generation": batches, "num_generations": group}
        options |= {"max_completion_length": 8, "ref_model_sync_steps": 1}
    # Options to draw from, and their values
    values = values_of(kind)
    for_trl = kind in ("grpo", "rloo") and generator.random() < 0.42
    if for_trl:  # TRL's trainer must support the draw, too
        rows = generator.choice(["text", "image", "images"])
        options["packing_shuffle"] = True
        values = {name: value for name, value in values.items() if name not in OWN or name in AS_TRL}
        if kind == "grpo":
            values["loss_type"] = ["dapo", *(name for name, value in LOSSES.items() if value.sequence_level)]
    if rows != "text":
        values.pop("max_length", None)  # so that no truncation cuts a medium
    elif kind == "distillation":  # without media, teacher and student read the same
        views = {"self_teacher", "student_view", "teacher_view"}
        values = {name: value for name, value in values.items() if name not in views}
    if "freeze" in values:
        other = "vision_tower" if rows == "audio" else "audio_tower"
        values["freeze"] = [value for value in values["freeze"] if other not in (value or ())]
    # Draw options, those that others depend on first
    for name in sorted(values, key=lambda name: (name in NEEDS, NEEDS.get(name, name)[0] in NEEDS, name)):
        parent, parent_values = NEEDS.get(name, (name, values[name]))
        if name in options or (parent in values and options.get(parent, values[parent][0]) not in parent_values):
            continue
        if values[name][1:] and generator.random() < (0.4 if name in OFTEN else 0.12):
            options[name] = generator.choice(values[name][1:])
    if for_trl and "top_entropy_quantile" in options:
        options["entropy_source"] = "current(scope='micro_batch')"
    if kind == "ppo":
        options.setdefault("num_ppo_epochs", 2)
    # Rewards, completions and adapters
    rewards = ["one", "two", "equal"] if for_trl else ["one", "two", "equal", "missing"]
    completions = generator.choice(["sampled", "random", "random", "fixed", "fixed"])
    if completions == "sampled":
        options.pop("mask_truncated_completions", None)  # no completion ends
    dropout = generator.choice([None] * 5 + [0.0, 0.0, 0.3])
    if options.get("self_teacher") == "base" and dropout is None:
        dropout = 0.0
    return Draw(
        seed,
        kind,
        rows,
        family=generator.choice(FAMILIES[rows]),
        reward="two" if "reward_weights" in options else generator.choice(rewards),
        lora_dropout=dropout,
        lora_targets=generator.choice(["all-linear", ["q_proj", "v_proj"]]),
        completions=completions,
        options=options,
    )
