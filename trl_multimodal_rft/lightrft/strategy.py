# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""LightRFT's `get_strategy`, which converts command-line options to a [`Strategy`]."""

import math
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger

from ..algorithms.advantages import ALIASES, ESTIMATORS, as_estimator
from ..spelling import check_choice, did_you_mean, join_settings, split_settings
from ..trainers.checkpoints.files import checkpoints
from .option_types import OPTIONS, check_option
from .strategy_object import Strategy
from .trainer.experience_config import NORMALIZED


logger = get_logger(__name__)

Options = dict[str, Any]  # values of a command line by LightRFT's names, without those that are `None`
Convert = Callable[[Any, Options], dict[str, Any]]


@dataclass(frozen=True)
class Rule:
    """What becomes of an option of LightRFT's command line."""

    meaning: str  # fields that it sets, where it goes instead, or the remedy; for `docs/from_lightrft.md`, too
    convert: Convert | None  # from its value and all options to fields of the config; `None` refuses the option
    neutral: tuple = (False,)  # values that do nothing, besides `None`; 0 equals `False`
    note: str | None = None  # for a line in the log: what to do where the option says something that trains the same
    silent: tuple = ()  # values without this line

    def fields(self, name: str, options: Options) -> dict[str, Any]:
        """Returns the fields of the config that the option `name` sets. Raises a `ValueError` if it is refused."""
        if self.convert is None:
            raise ValueError(f"`{name}={options[name]!r}` has no field in the config; {self.meaning}.")
        return self.convert(options[name], options)


# Values where a script lacks the option, as in LightRFT
DEFAULTS = {
    "advantage_estimator": "gae",
    "init_kl_coef": 0.001,
    "loss_agg_mode": "seq-mean-token-mean",
    "micro_train_batch_size": 8,
    "n_samples_per_prompt": 8,
}

# Fields that an option sets, if it isn't one of `OPTIONS`, or not always

# LightRFT 0.1.1 takes these, reads them nowhere, and averages over completions the means over their tokens
_AGGREGATIONS = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
_DYNAMIC_SAMPLING = 4  # rounds; LightRFT has no such number


def _estimator_of(options: Options) -> str:
    return as_estimator(split_settings(options["advantage_estimator"])[0]).name


def _loss(mode: str, options: Options) -> dict[str, Any]:
    check_choice("`loss_agg_mode`", mode, _AGGREGATIONS)
    if options.get("use_cpg_loss"):
        return {"loss_type": join_settings("cpgd", {"drift_coef": 0.0, "average": "completions"})}
    return {"loss_type": "grpo"}


def _estimator(text: str, options: Options) -> dict[str, Any]:
    name, settings = split_settings(text)
    settings = settings or {}
    if _estimator_of(options) == "gae":
        # Names of GAE's settings, by the names of LightRFT's options
        names = {"gamma": "gamma", "lambd": "lam"}
        settings |= {names[option]: float(options[option]) for option in names if option in options}
    return {"advantage_estimator": join_settings(name, settings)}


def _whiten(value: bool, options: Options) -> dict[str, Any]:
    name = _estimator_of(options)
    if name not in NORMALIZED:
        raise ValueError(
            f"`advantages_norm={value}` whitens advantages, which `advantage_estimator={name!r}` never does; remove "
            "it, or use 'gae', 'reinforce' or 'reinforce_baseline'."
        )
    return {}


def _shift(value: bool, options: Options) -> dict[str, Any]:
    name = _estimator_of(options)
    if name not in NORMALIZED:
        raise ValueError(
            f"`no_advantage_std_norm={value}` has no effect with `advantage_estimator={name!r}`, whose advantages "
            "aren't normalized; remove it."
        )
    return {"no_advantage_std_norm": True}


def _divergence(coef: float, options: Options) -> dict[str, Any]:
    """Puts the KL divergence into the rewards, or with `use_kl_loss` into the loss."""
    if options.get("kl_estimator") is not None:
        check_choice("`kl_estimator`", options["kl_estimator"], ("k1", "k2", "k3"))
    if coef == 0:
        return {"beta": 0.0}
    # LightRFT has two names for k3
    estimator = "k3" if options.get("use_kl_estimator_k3") else options.get("kl_estimator")
    name = "use_kl_estimator_k3" if options.get("use_kl_estimator_k3") else f"kl_estimator={estimator!r}"
    if not options.get("use_kl_loss"):
        if estimator == "k2":
            raise ValueError(f"`{name}` is for the loss; pass `use_kl_loss`, too, or use 'k1' or 'k3' in the reward.")
        return {"beta": coef, "kl_estimator": "k1", "use_kl_estimator_k3": estimator == "k3"}
    if estimator == "k1":
        raise ValueError(f"`{name}` as a loss has no gradient on average; use 'k2' or 'k3' with `use_kl_loss`.")
    if estimator is None:
        estimator = as_estimator(options["advantage_estimator"]).default_kl_estimator
    # k3 is LightRFT's own, without TRL's factor of the ratio
    return {"beta": coef, "kl_estimator": estimator, "use_bias_correction_kl": False}


def _kl_target(value: float, options: Options) -> dict[str, Any]:
    return {"kl_target": value, **({"kl_horizon": options["kl_horizon"]} if "kl_horizon" in options else {})}


def _entropy(share: float, options: Options) -> dict[str, Any]:
    settings = {"scope": "sequence", "renormalize": True, "rounding": "down"}
    return {"top_entropy_quantile": share, "entropy_source": join_settings("rollout", settings)}


def _overlong(value: bool, options: Options) -> dict[str, Any]:
    factor = options.get("overlong_buffer_penalty_factor", 1)
    if factor != 1:
        raise ValueError(f"`overlong_buffer_penalty_factor={factor}` has no field; the penalty falls to -1, set 1.")
    return {"soft_overlong_cache": options.get("overlong_buffer_len", 1024)}


def _dynamic_sampling(value: bool | int, options: Options) -> dict[str, Any]:
    return {"dynamic_sampling": _DYNAMIC_SAMPLING if value is True else value}


def _value_clip(value: float, options: Options) -> dict[str, Any]:
    return {"cliprange_value": value} if _estimator_of(options) == "gae" else {}


def _betas(values: Sequence[float], options: Options) -> dict[str, Any]:
    if len(values) != 2:
        raise ValueError(f"`adam_betas={values!r}` must be two numbers.")
    return {"adam_beta1": values[0], "adam_beta2": values[1]}


def _freeze(value: bool | str | list[str], options: Options) -> dict[str, Any]:
    if value is True and options.get("text_only"):
        return {}  # a model of text has no encoder
    return {"freeze": ["vision_tower", "projector"] if value is True else value}


def _average(value: bool, options: Options) -> dict[str, Any]:
    return {"ema_decay": options.get("ema_beta", 0.992)}


def _critic_rate(value: float, options: Options) -> dict[str, Any]:
    return {"value_learning_rate": value} if _estimator_of(options) == "gae" else {}


# Sizes


def _micro_batch(options: Options) -> int:
    return options["micro_train_batch_size"] * int(os.environ.get("WORLD_SIZE", 1))


def _rollout(options: Options) -> int:
    return options["rollout_batch_size"] * options["n_samples_per_prompt"]


def _train_batch(size: int, options: Options) -> dict[str, Any]:
    unit = _micro_batch(options)
    if size < unit or size % unit != 0:
        raise ValueError(
            f"`train_batch_size={size}` isn't a multiple of {unit} samples (`micro_train_batch_size` x processes); "
            "change one of them."
        )
    return {"gradient_accumulation_steps": size // unit}


def _rollout_batch(size: int, options: Options) -> dict[str, Any]:
    unit = options.get("train_batch_size", _micro_batch(options))
    if _rollout(options) % unit != 0:
        raise ValueError(
            f"`rollout_batch_size={size}` makes {_rollout(options)} completions, which don't fill whole optimizer "
            f"steps of {unit} samples (`train_batch_size`); change one of them."
        )
    return {"generation_batch_size": _rollout(options)}


def _in_steps(rollouts: int, options: Options) -> int:
    """Converts a number of rollouts, in which LightRFT counts, to one of optimizer steps, if sizes say how many."""
    if "rollout_batch_size" not in options or "train_batch_size" not in options:
        return rollouts
    return rollouts * max(_rollout(options) // options["train_batch_size"], 1) * options.get("max_epochs", 1)


def _logging_steps(value: int, options: Options) -> dict[str, Any]:
    return {"logging_steps": _in_steps(value, options)}


def _freezing_steps(value: int, options: Options) -> dict[str, Any]:
    return {"freezing_actor_steps": _in_steps(value, options)}


def _save_steps(value: float, options: Options) -> dict[str, Any]:
    if value <= 0 or value == math.inf:
        return {"save_strategy": "no"}
    if value != int(value):
        raise ValueError(f"`save_steps={value}` must be a whole number of rollouts, -1 or infinite.")
    return {"save_strategy": "steps", "save_steps": _in_steps(int(value), options)}


def _eval_steps(value: float, options: Options) -> dict[str, Any]:
    if value == math.inf or value == -1 and not (options.get("eval_data") or options.get("eval_split")):
        return {}
    # The config's check needs whole groups
    sizes = {"per_device_eval_batch_size": options["n_samples_per_prompt"]}
    if value == -1:
        return {"eval_strategy": "epoch", **sizes}
    return {"eval_strategy": "steps", "eval_steps": _in_steps(int(value), options), **sizes}


def _engine(name: str, options: Options) -> dict[str, Any]:
    check_choice("`engine_type`", name, ("vllm", "sglang", "transformers"))
    return {"use_vllm": True}


# Folders and trackers


def _checkpoint_folder(value: str, options: Options) -> dict[str, Any]:
    if Path(value) != Path(options.get("save_path", "")):
        raise ValueError(f"`ckpt_path={value!r}` has no field, as checkpoints are in `save_path`; remove it.")
    return {}


def _last_checkpoint(value: bool, options: Options) -> dict[str, Any]:
    folder = options.get("save_path")
    # `True` lets the run pass over a last checkpoint that is damaged
    return {"resume_from_checkpoint": True if folder and checkpoints(folder) else None}


def _wandb_variable(name: str) -> Rule:
    def convert(value: str, options: Options) -> dict[str, Any]:
        if options.get("use_wandb"):
            os.environ[name] = value
        return {}

    return Rule(f"the environment variable `{name}`, with `use_wandb`", convert)


def _tensorboard(value: Any, options: Options) -> dict[str, Any]:
    if options.get("use_wandb"):
        return {}  # LightRFT logs to one tracker
    if isinstance(value, str):
        os.environ["TENSORBOARD_LOGGING_DIR"] = value
    return {"report_to": "tensorboard"}


# Kinds of rules


def _field(name: str, option: str) -> Rule:
    meaning = "the field of the same name" if name == option else f"`{name}`"
    return Rule(meaning, lambda value, options: {name: value}, neutral=())


def _fixed(name: str, field_value: Any) -> Rule:
    return Rule(f"`{name}={field_value!r}`", lambda value, options: {name: field_value})


def _no_fields(value: Any, options: Options) -> dict[str, Any]:
    return {}


def _elsewhere(names: str, meaning: str) -> dict[str, Rule]:
    """Returns rules for options that set no field: arguments of others, and settings of another option."""
    return dict.fromkeys(names.split(), Rule(meaning, _no_fields))


def _noted(names: str, meaning: str, note: str, *neutral: Any) -> dict[str, Rule]:
    """Returns rules for options that set no field, but get a line in the log."""
    return dict.fromkeys(names.split(), Rule(meaning, _no_fields, (False, *neutral), note))


def _refused(names: str, remedy: str, *neutral: Any) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), Rule(remedy, None, (False, *neutral)))


_BY_LAUNCH = "decided by `accelerate launch` and its `--config_file`; one line in the log"
_LAUNCH = "`accelerate launch` decides this: pass it what you need, or set it in the file of its `--config_file`"
# All options of LightRFT's command line. The table in `docs/from_lightrft.md` has this order, a row for rules that are
# the same, so options of one meaning stand together
RULES: dict[str, Rule] = {
    **{name: _field(field, name) for name, field in OPTIONS.items()},
    # KL divergence
    "init_kl_coef": Rule("`beta`", _divergence, ()),
    **_elsewhere("use_kl_loss", "`kl_estimator`: without it `k1`, in the reward; with it `k2` or `k3`, in the loss"),
    **_elsewhere("kl_estimator use_kl_estimator_k3", "`kl_estimator` with `use_kl_loss`; in the reward `k1` or `k3`"),
    "kl_target": Rule("the field of the same name", _kl_target),
    **_elsewhere("kl_horizon", "the field of the same name, with `kl_target`"),
    # Advantages and rewards
    "advantage_estimator": Rule("the field of the same name", _estimator),
    **_elsewhere("gamma", '`gamma` of `"gae"`; else an argument of `PPOTrainerVL`'),
    **_elsewhere("lambd", '`lam` of `"gae"`; nothing with other estimators'),
    "advantages_norm": Rule('what `"gae"`, `"reinforce"` and `"reinforce_baseline"` do; else an error', _whiten),
    "no_advantage_std_norm": Rule("shifts the advantages of these three, without scaling them", _shift),
    "reward_running_norm": _fixed("reward_running_scale", True),
    "reward_clip": Rule("`reward_clip_range`", lambda value, options: {"reward_clip_range": [-value, value]}),
    "overlong_buffer": Rule("`soft_overlong_cache`, of `overlong_buffer_len`", _overlong),
    **_elsewhere("overlong_buffer_len overlong_buffer_penalty_factor", "read by `overlong_buffer`; a factor of 1"),
    "dynamic_sampling": Rule("`dynamic_sampling`, which needs `MultimodalPPOTrainer`", _dynamic_sampling),
    # Loss
    "loss_agg_mode": Rule(
        "nothing, as in LightRFT 0.1.1: the loss is the mean over completions of their means; "
        "`loss_type` of the config has other averages",
        _loss,
    ),
    **_elsewhere("use_cpg_loss", "`loss_type=\"cpgd(drift_coef=0.0, average='completions')\"`, with any estimator"),
    "use_gspo": _fixed("importance_sampling_level", "sequence"),
    "high_entropy_token_ratio": Rule(
        "`top_entropy_quantile`, of each completion, rounded down (`entropy_source`); an argument of the actor, too",
        _entropy,
        (False, 1),
    ),
    "value_clip": Rule('`cliprange_value`, with `"gae"`', _value_clip, ()),
    # Updates
    "critic_learning_rate": Rule('`value_learning_rate`, with `"gae"`', _critic_rate, ()),
    "adam_betas": Rule("`adam_beta1`, `adam_beta2`", _betas),
    "freezing_actor_steps": Rule("`freezing_actor_steps`, in optimizer steps", _freezing_steps, (False, -1)),
    "freeze_prefix": Rule('`freeze`: `["vision_tower", "projector"]`, or the parts that it names', _freeze),
    "enable_ema": Rule("`ema_decay`", _average),
    **_elsewhere("ema_beta", "read by `enable_ema`"),
    "gradient_checkpointing_use_reentrant": _fixed("gradient_checkpointing_kwargs", {"use_reentrant": True}),
    # Sizes
    "train_batch_size": Rule("`gradient_accumulation_steps`, from the samples of all processes", _train_batch),
    "rollout_batch_size": Rule("`generation_batch_size`, in completions", _rollout_batch),
    "engine_type": Rule(
        '`use_vllm`, with `"vllm"` and `"sglang"`; `"transformers"` samples with the model itself',
        _engine,
        (False, "transformers"),
        "vLLM samples in its place",
        ("vllm",),
    ),
    # Logs and checkpoints
    "ckpt_path": Rule("`save_path`, which it has to be", _checkpoint_folder, (False, "./ckpt/checkpoints_ppo")),
    **_noted(
        "ckpt_path_local max_ckpt_mem",
        "nothing; one line in the log",
        "checkpoints are in `save_path`, at most `max_ckpt_num`",
        1e8,
    ),
    "load_checkpoint": Rule("`resume_from_checkpoint`: the last checkpoint in `save_path`, if any", _last_checkpoint),
    "save_steps": Rule("`save_steps` in optimizer steps, `save_strategy`", _save_steps, ()),
    "eval_steps": Rule(
        "`eval_steps` in optimizer steps; -1 with `eval_data` or `eval_split`: every episode", _eval_steps
    ),
    "logging_steps": Rule("`logging_steps` in optimizer steps", _logging_steps),
    "use_wandb": Rule(
        '`report_to="wandb"`; log in before', lambda value, options: {"report_to": "wandb"}, (False, "")
    ),
    "wandb_project": _wandb_variable("WANDB_PROJECT"),
    "wandb_org": _wandb_variable("WANDB_ENTITY"),
    "wandb_group": _wandb_variable("WANDB_RUN_GROUP"),
    "use_tensorboard": Rule('`report_to="tensorboard"`, into the folder that it names', _tensorboard, (False, "")),
    # Arguments elsewhere, as in LightRFT's scripts
    **_elsewhere(
        "prompt_max_len micro_rollout_batch_size buffer_limit buffer_cpu_offload dataloader_pin_memory top_p max_len "
        "remote_rm_url save_hf_ckpt",
        "an argument of `PPOTrainerVL`",
    ),
    **_elsewhere(
        "pretrain flash_attn packing_samples lora_rank lora_alpha lora_dropout target_modules load_in_4bit "
        "fused_linear_logprob chunk_size disable_logprobs_flashattn text_only",
        "an argument of actors, or their class",
    ),
    **_elsewhere(
        "critic_pretrain value_head_prefix normalize_reward_for_critic reward_pretrain",
        "an argument of the critic, or of reward models",
    ),
    **_elsewhere("save_value_network", "done by `save_model`"),
    **_elsewhere(
        "prompt_data prompt_data_probs prompt_split max_samples eval_data eval_split max_eval_samples pretrain_data "
        "pretrain_data_probs pretrain_split input_key output_key images_key reference_key label_key input_template "
        "apply_chat_template system_prompt system_prompt_path fps max_pixels limit_mm_image_per_prompt "
        "limit_mm_video_per_prompt use_ms disable_fast_tokenizer",
        "read by the script: datasets and tokenizers",
    ),
    **_elsewhere("local_rank", "set by the launcher"),
    **_elsewhere("normalize_advantages use_sequence_rewards", "nothing, as in LightRFT"),
    **_elsewhere("num_trajectories_to_save first_token_temperature plot_every", "settings of options that do nothing"),
    **_elsewhere("mixed_mm_data", "nothing: ranks may hold different media anyway"),
    **_elsewhere("print_replay_buffer_stats", "nothing: statistics of the buffer are logged anyway"),
    # Lines in the log
    **_noted("zero_stage", _BY_LAUNCH, _LAUNCH, 2),
    **_noted("adam_offload fsdp fsdp_cpu_offload grad_accum_dtype overlap_comm use_mp_opt", _BY_LAUNCH, _LAUNCH),
    **_noted("zpg sp_size", _BY_LAUNCH, _LAUNCH, 1),
    **_noted("meta_init actor_init_on_gpu initial_model_shard_size no_shard_vit", _BY_LAUNCH, _LAUNCH),
    **_noted(
        "rm_use_engine rm_engine_cudagraph",
        "reward models score in the processes of the run; one line in the log",
        "reward models score in the processes of the run; for an engine, start a server and set `remote_rm_url`",
    ),
    **_noted(
        "save_trajectories mark_high_entropy_tokens trajectory_analysis log_dir",
        "`log_completions` of `MultimodalPPOTrainer` logs completions; one line in the log",
        "nothing is written; `log_completions` of `MultimodalPPOTrainer` logs completions",
    ),
    # Errors
    **_refused("advantage_clip", "clip rewards by `reward_clip`"),
    **_refused("reward_running_norm_minus_mean", "scale rewards by `reward_running_norm` alone"),
    **_refused("use_fire", "sample all tokens at one `temperature`"),
}


@dataclass
class Converted:
    """What became of options."""

    fields: dict[str, Any] = field(default_factory=dict)  # of the config
    options_by_field: dict[str, str] = field(default_factory=dict)  # which option set a field
    notes: dict[str, list[str]] = field(default_factory=dict)  # options by their line in the log
    errors: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raises a `ValueError` with all errors, if any."""
        if self.errors:
            raise ValueError(" ".join(self.errors))

    def log(self) -> None:
        """Logs the lines on the main process, once accelerate has its state."""
        for note, options in self.notes.items():
            logger.warning(f"{', '.join(options)}: {note}.")


def convert_options(names: Iterable[str], options: Options) -> Converted:
    """
    Converts options to fields of the config.

    Args:
        names (`Iterable[str]`):
            Options to convert, which `RULES` has.
        options (`dict`):
            Values of these options, and of those that their rules read.

    Returns:
        [`Converted`]: Fields, lines for the log, and errors.
    """
    result = Converted()
    for name in names:
        value = options[name]
        rule = RULES[name]
        if value in rule.neutral:
            continue
        try:
            check_option(name, value)
            own_fields = rule.fields(name, options)
        except ValueError as error:
            result.errors.append(str(error))
            continue
        except TypeError as error:  # of a number in place of a list, for example
            result.errors.append(f"`{name}={value!r}` can't be converted ({error}); correct its type.")
            continue
        if rule.note is not None and value not in rule.silent:
            result.notes.setdefault(rule.note, []).append(f"`{name}={value!r}`")
        result.fields |= own_fields
        result.options_by_field |= dict.fromkeys(own_fields, name)
    return result


def convert_command_line(args: Namespace) -> Converted:
    """Converts the options of a command line. Raises a `ValueError` if one is unknown or can't be converted."""
    options: Options = DEFAULTS | {name: value for name, value in vars(args).items() if value is not None}
    # LightRFT's command line has a coefficient even without supervised rows
    if getattr(args, "pretrain_data", "") is None:
        options.pop("ptx_coef", None)
    errors = [
        f"`{name}` is no option of LightRFT's; remove it.{did_you_mean(name, RULES)}"
        for name, value in options.items()
        if name not in RULES and value is not False
    ]
    estimator = split_settings(options["advantage_estimator"])[0]
    check_choice("`advantage_estimator`", estimator, (*ESTIMATORS, *ALIASES))
    converted = convert_options([name for name in RULES if name in options], options)
    converted.errors[:0] = errors
    converted.check()
    return converted


def get_strategy(args: Namespace) -> Strategy:
    """
    Converts the options of a LightRFT command line to the strategy of a run.

    Args:
        args (`argparse.Namespace`):
            Options by LightRFT's names, see the table in `docs/from_lightrft.md`. `None`, and `False` or 0 where these
            mean "off", do nothing. Options that are arguments of actors, of [`PPOTrainerVL`] or of a dataset are left
            to the script, which passes them there. Without `use_kl_loss`, the KL divergence is in the rewards.

    Returns:
        [`~lightrft.strategy_object.Strategy`]: A config, to pass as `strategy` to the PPO trainers, with the methods
        that LightRFT's scripts call.

    Raises:
        `ValueError`: If an option is unknown, isn't of its type, would train something else here, or contradicts
            another, or if the config doesn't allow them. The message names the options and the remedies.
    """
    converted = convert_command_line(args)
    # LightRFT's schedule: a cosine from the learning rate to a tenth of it
    schedule = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    try:
        strategy = Strategy(**schedule, **converted.fields)
    except ValueError as error:
        text = str(error)
        names = [
            f" `{field}` is LightRFT's `{option}`."
            for field, option in converted.options_by_field.items()
            if field != option and re.search(rf"`{field}\b", text)
        ]
        raise ValueError(text + "".join(names)) from None
    converted.log()
    passed = {name for name, value in vars(args).items() if value is not None}
    unasked = {name for name, option in converted.options_by_field.items() if option not in passed}
    if "ema_beta" not in passed:
        unasked.add("ema_decay")  # `enable_ema` alone asks for no particular decay
    strategy.remember(args, {name: converted.fields[name] for name in unasked if name in converted.fields})
    return strategy
