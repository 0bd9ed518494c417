# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks in a constructor, of config, launch and model against each other, and warnings about them."""

import os
import reprlib
from typing import TYPE_CHECKING, TypeVar

from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from trl.chat_template_utils import add_response_schema, supports_tool_calling
from trl.trainer.utils import get_config_model_id

from ...encoding.processors import tokenizer_of
from ...families import family_of_processor
from ...models.modes import ignore_deprecated_names
from ...policy import check_one_run
from .argument_checks import check_instances, check_output_dir, check_parallelism
from .configs import SamplingConfig, TrainerConfig, needs_reference, options_that_exclude_tokens
from .signatures import Adapter, Model


if TYPE_CHECKING:
    from peft import PeftModel


logger = get_logger(__name__)

Config = TypeVar("Config", bound=TrainingArguments)

# Fields of a checkpoint's generation config that training sets itself, or that aren't about sampling
_NOT_RECOMMENDATIONS = {"max_length", "max_new_tokens", "pad_token_id", "bos_token_id", "eos_token_id"}
_NOT_RECOMMENDATIONS |= {"decoder_start_token_id", "return_dict_in_generate", "transformers_version"}


def resolve_config(
    config_class: type[Config], args: TrainingArguments | None, model: "str | PreTrainedModel | PeftModel"
) -> Config:
    """
    Returns `args`, or a default config whose `output_dir` is named after the model and the algorithm. Raises
    `TypeError` for configs of other classes.
    """
    ignore_deprecated_names()
    check_instances(model=model, args=args)
    if model is None or isinstance(model, os.PathLike):
        raise TypeError(f"`model` is a {type(model).__name__}; pass a name or a folder as a string, or a model.")
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        algorithm = config_class.__name__.removeprefix("Multimodal").removesuffix("Config")
        args = config_class(f"{name.split('/')[-1]}-{algorithm}")
    # PPO's config is an instance of GRPO's, whose trainer would ignore the critic
    ignores_critic = getattr(args, "_has_critic", False) and not getattr(config_class, "_has_critic", False)
    if not isinstance(args, config_class) or ignores_critic:
        raise TypeError(
            f"`args` is a {type(args).__name__}; use {config_class.__name__}, which takes TRL's arguments and those "
            "of this package."
        )
    if args.should_save and args.save_strategy != "no":
        name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", None)
        check_output_dir(str(args.output_dir), name)
    return args


# Start of error messages, which continue with the part of the run that needs the name
NO_NAME = "The model was passed as an instance, and has no name (`_name_or_path` of its config is empty) by which"


def check_name(
    model: PreTrainedModel, args: SamplingConfig, ref_model: PreTrainedModel | None, peft_config: Adapter
) -> None:
    """Raises `ValueError` if a model has no name, and vLLM or a reference would be loaded by its name."""
    if get_config_model_id(model.config):
        return
    if args.use_vllm:
        raise ValueError(
            f"{NO_NAME} vLLM would load it; save the model and its processor with `save_pretrained`, and load them "
            "from there, or set `use_vllm=False`."
        )
    if needs_reference(args) and ref_model is None and peft_config is None and not is_peft_model(model):
        raise ValueError(
            f"{NO_NAME} the reference of `beta={args.beta}` would be loaded; save the model and load it from there, "
            "or set `beta=0`."
        )


def check_engine_format(processing_class: ProcessorMixin | PreTrainedTokenizerBase) -> None:
    """Raises `ValueError` for models that vLLM supports only in their makers' format of tokens and weights."""
    # The family that takes audio in base64 is Mistral's
    if family_of_processor(processing_class).takes_base64_audio:
        raise ValueError(
            f"vLLM doesn't take prompts of {type(processing_class).__name__}: it supports this model only with "
            "Mistral's own tokenizer and weight names, not with the names of transformers. Set `use_vllm=False`."
        )


def check_launch(args: TrainerConfig, model: Model) -> None:
    """
    Raises an error if Accelerate or `Trainer` would silently misread the launch: processes that train separately or
    stand for several, several GPUs in one, ranks that share rows, or a DeepSpeed config that updates with gradients
    that aren't finite.
    """
    check_one_run(
        args.world_size,
        ": {launched} separate runs would write into the same folder. To train on the CPU, set "
        "`ACCELERATE_USE_CPU=true` in the environment, or with DeepSpeed `ddp_backend='gloo'` in the config; to train "
        "on GPUs, make them visible and start the script with `accelerate launch`.",
    )
    # If `accelerate launch` starts one process, it sets `ACCELERATE_USE_CPU`, to `True` or `False`, and leaves
    # `WORLD_SIZE` unset. It also sets `MASTER_ADDR` if the user requested several processes.
    is_launched_alone = "ACCELERATE_USE_CPU" in os.environ and "WORLD_SIZE" not in os.environ and args.world_size == 1
    if is_launched_alone and "MASTER_ADDR" in os.environ:
        raise RuntimeError(
            "`accelerate launch` was to start several processes, but a config with `distributed_type: 'NO'`, such as "
            "`cpu.yaml` and `single_gpu.yaml`, starts one. To start several, use `multi_gpu.yaml`, and on the CPU "
            "also set `ACCELERATE_USE_CPU=true` in the environment. To start one, use `--num_processes 1`, and unset "
            "`MASTER_ADDR`."
        )
    if args.n_gpu > 1:
        raise RuntimeError(
            f"One process sees {args.n_gpu} GPUs, over which `torch.nn.DataParallel` would split packed rows. Start "
            f"the script with `accelerate launch --num_processes {args.n_gpu}`, or show it one GPU: "
            "`CUDA_VISIBLE_DEVICES=0`."
        )
    check_parallelism(args, model)
    # DeepSpeed steps the optimizer itself, so that only its own checks for overflow can skip an update
    deepspeed_config = {} if args.deepspeed_plugin is None else args.deepspeed_plugin.deepspeed_config
    for section, option in (("bf16", "check_grad_overflow"), ("zero_optimization", "compute_grad_norm")):
        if deepspeed_config.get(section, {}).get(option) is False:
            raise ValueError(
                f"`{section}.{option}` is false in the DeepSpeed config, so DeepSpeed would also apply gradients that "
                "aren't finite; remove this entry."
            )


def warn_of_unused_recommendations(recommended: GenerationConfig, used: GenerationConfig) -> None:
    """Warns of sampling options that a checkpoint recommends and training doesn't use."""
    defaults = GenerationConfig._get_default_generation_params()
    options = vars(used)
    unused = {
        name: value
        for name, value in recommended.to_diff_dict().items()
        if name not in _NOT_RECOMMENDATIONS
        and not name.startswith(("_", "output_"))
        and options.get(name, value) is None
        and value != defaults.get(name)
    }
    if unused:
        listed = ", ".join(f"`{name}={reprlib.repr(value)}`" for name, value in sorted(unused.items()))
        logger.warning(
            f"The checkpoint's generation config recommends {listed}. Training doesn't use it: only the trainer's "
            "config and its `generation_kwargs` decide how completions are sampled. To use the recommendation, put it "
            "into `generation_kwargs`."
        )


def warn_of_excluded_tokens(args: SamplingConfig) -> None:
    """Warns if options that exclude tokens from sampling bias the correction for vLLM (huggingface/trl#6789)."""
    options = [f"`{name}={value}`" for name, value in options_that_exclude_tokens(args).items()]
    if options and args.use_vllm and args.vllm_importance_sampling_correction:
        logger.warning(
            f"With {' and '.join(options)}, vLLM's log-probabilities are relative to the tokens that aren't excluded, "
            "and the trainer's to all tokens. So the importance ratios that correct for vLLM are too small, and the "
            "self-check can't compare both. Remove these options, or set `vllm_importance_sampling_correction=False`."
        )


def check_head_cast(model: PreTrainedModel, args: SamplingConfig) -> None:
    """Raises `ValueError` if `cast_lm_head_to_fp32` is set and TRL's code for text models doesn't find the head."""
    # TRL casts `model.lm_head`, and with tied weights hooks `model.model.embed_tokens`
    tied = getattr(model.config, "tie_word_embeddings", None)
    trl_finds_head = hasattr(model, "lm_head") and tied is not None
    if tied:
        trl_finds_head = trl_finds_head and hasattr(getattr(model, "model", None), "embed_tokens")
    if getattr(args, "cast_lm_head_to_fp32", False) and not trl_finds_head:
        raise ValueError(
            f"`cast_lm_head_to_fp32` doesn't work for {type(model).__name__} ({model.config.model_type}), whose head "
            "or embeddings aren't where TRL looks for them; drop it, or load the model in float32 with "
            "`model_init_kwargs={'dtype': 'float32'}`."
        )


def prepare_for_tools(processing_class) -> None:
    """
    Adds TRL's schema of tool calls to a tokenizer without one. Raises `ValueError` if the chat template takes no tools
    or TRL has no schema for it.
    """
    name = type(processing_class).__name__
    tokenizer = tokenizer_of(processing_class)
    if not supports_tool_calling(processing_class):
        raise ValueError(
            f"The chat template of {name} does not support tool calling: it must write the tool calls of assistant "
            "messages, and messages of the role 'tool'. Set `processing_class.chat_template` to a template that does, "
            "such as the template of a newer model of the family, or one of `trl.chat_template_utils`."
        )
    if any(getattr(tokenizer, f"response_{suffix}", None) is not None for suffix in ("template", "schema")):
        return
    try:
        add_response_schema(processing_class)
    except ValueError as error:
        raise ValueError(
            f"TRL doesn't know the format of tool calls for the chat template of {name}, so calls can't be parsed. "
            "Set `response_template` of the tokenizer. For calls like "
            '`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, set it to '
            "`trl.chat_template_utils.qwen3_template`."
        ) from error
