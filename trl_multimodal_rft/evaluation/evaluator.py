# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Evaluations of a model or a trainer: the accuracy of completions by reward functions."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl.distributed import DistributedBackend
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import get_callable_name

from ..data.reading.rules import DEFAULT_RULES, MediaRules
from ..encoding.processors import check_processor
from ..encoding.prompt_encoder import PromptEncoder
from ..encoding.prompts import EncodedPrompt
from ..engines.samplers import Samples, TransformersSampler
from ..families import family_of
from ..forward.attention import install_prefix_attention
from ..forward.encoders import install_encoder_attention
from ..forward.masks import sharing_obstacle
from ..models.modes import ignore_deprecated_names, kept_random_state
from ..models.wrapped import unwrapped
from ..policy import Fallbacks, PolicyForward, check_one_run
from ..rewards.calls import distinct_names
from ..rewards.named import as_reward_funcs
from ..rollout.environments import Environments, template_for_tools
from ..rollout.reward_functions import RewardFunctions
from ..rollout.turns import ToolLoop
from ..trainers.base.setup import prepare_for_tools
from ..trainers.sampling.trainer import MultimodalTrainer
from .config import EvaluationConfig
from .evaluation import Evaluation, Policy, generation_config
from .result import EvaluationResult


def evaluate(
    model: PreTrainedModel | nn.Module,
    processing_class: ProcessorMixin | PreTrainedTokenizerBase,
    dataset: Dataset | Sequence[dict[str, Any]],
    reward_funcs: Callable | list[Callable] | None,
    args: EvaluationConfig | None = None,
    *,
    accelerator: Accelerator | None = None,
    template_kwargs: dict[str, Any] | None = None,
    audio_overlong: Literal["raise", "truncate"] = "raise",
    media_rules: MediaRules = DEFAULT_RULES,
    tools: list[Callable] | None = None,
    environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | None = None,
    special_tokens_in_text: Literal["allow", "raise", "strip"] | None = None,
) -> EvaluationResult:
    """
    Samples completions of the prompts of a dataset and measures their accuracy.

    Each prompt and its media are decoded, encoded and forwarded once for all its completions. Processes share the
    batches, and each row counts once. Batches and seeds don't depend on the number of processes, so neither do the
    completions. Placeholder tokens are never sampled. Of the model's generation config, only the EOS and suppressed
    tokens apply.

    Training and evaluation modes of modules and the random states of Python, NumPy and torch are restored.

    Args:
        model ([`~transformers.PreTrainedModel`], [`~peft.PeftModel`] or [`Actor`]):
            Model to evaluate, unsharded and on the device of each process. It may be wrapped for DDP. For models in
            training under FSDP or ZeRO-3, use [`evaluate_trainer`].
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`]):
            The model's processor, or its tokenizer for text.
        dataset ([`~datasets.Dataset`] or `Sequence[dict]`):
            Rows with `prompt`, media columns, and columns that reward functions read, such as `solution`.
        reward_funcs (`Callable` or `list[Callable]`):
            Reward functions as the trainers take them, plain or async, or their names. The first decides which
            completions are correct. May be `None` with environments, whose rewards come last.
        args ([`EvaluationConfig`], *optional*):
            Options of sampling and of the metrics. By default one greedy completion per row.
        accelerator ([`~accelerate.Accelerator`], *optional*):
            Accelerator with the processes and the device. By default a new accelerator.
        template_kwargs (`dict[str, Any]`, *optional*):
            Arguments for `apply_chat_template`.
        audio_overlong (`str`, *optional*, defaults to `"raise"`):
            What happens to audio longer than the model's window: `"raise"` or `"truncate"`.
        media_rules ([`~data.reading.rules.MediaRules`], *optional*):
            Allowed sources and sizes of media.
        tools (`list[Callable]`, *optional*):
            Tools that the model may call, as for [`MultimodalGRPOTrainer`].
        environment_factory (`Callable` or `dict[str, Callable]`, *optional*):
            Environments, as for [`MultimodalGRPOTrainer`].
        special_tokens_in_text (`str`, *optional*):
            What happens to control tokens in texts of messages and of tools' results, see [`MultimodalGRPOConfig`].

    Returns:
        [`EvaluationResult`]: Metrics and rows, the same on each process.

    Raises:
        `ValueError`: If there are no rows, a row has no prompt, a reward function returns something else than a number
            or `None` per completion, the model's weights are sharded, or the processor pads audio on the wrong side.
        [`MediaError`]: If media can't be decoded or don't match their placeholders. The message names the row.

    Example:
    ```python
    result = evaluate(model, processor, dataset, accuracy_reward, EvaluationConfig(max_completion_length=16))
    print(result.metrics["accuracy"], result.metrics["accuracy_low"], result.metrics["accuracy_high"])
    ```
    """
    args = args or EvaluationConfig()
    ignore_deprecated_names()
    check_processor(processing_class)
    accelerator = accelerator or Accelerator()
    check_one_run(
        accelerator.num_processes,
        ", so that each of {launched} processes would evaluate all rows. To evaluate on the CPU, set "
        "`ACCELERATE_USE_CPU=true` in the environment.",
    )
    # An `Actor` is a wrapper of the policy's module
    module = model.model if hasattr(model, "model_for") and isinstance(model.model, nn.Module) else model
    base = unwrapped(accelerator, module)
    _check_not_sharded(accelerator, base)
    if sharing_obstacle(base) is None:
        install_prefix_attention(base)
    else:
        install_encoder_attention(base)
    encoder = PromptEncoder(
        base,
        processing_class,
        template_kwargs or {},
        audio_overlong,
        media_rules,
        special_tokens_in_text=special_tokens_in_text,
    )
    with kept_random_state():
        toolbox = Environments(tools or (), environment_factory, media_rules)
    policy = _policy(module, encoder, toolbox, args, accelerator)
    reward_funcs = [*(as_reward_funcs(reward_funcs) if reward_funcs else ()), *toolbox.reward_funcs().values()]
    return Evaluation(policy, dataset, named_rewards(reward_funcs), args, accelerator).run()


def _check_not_sharded(accelerator: Accelerator, model: PreTrainedModel) -> None:
    if DistributedBackend(accelerator).is_zero3 or any(isinstance(weight, DTensor) for weight in model.parameters()):
        raise ValueError(
            "The weights of the model are sharded, which `evaluate` doesn't support; load the whole model on each "
            "process, or evaluate with `evaluate_trainer` or `GenerationEvalCallback` during training."
        )


def _policy(
    module: nn.Module, encoder: PromptEncoder, toolbox: Environments, args: EvaluationConfig, accelerator: Accelerator
) -> Policy:
    # Without an accelerator, ranks don't wait for each other. They have different batches, of different lengths.
    forward = PolicyForward(processor=encoder.processor, fallbacks=Fallbacks(isolate=family_of(encoder.model).isolate))
    tool_loop = None
    if toolbox.tools or toolbox.factories:
        encoder = _with_tools(encoder, toolbox)
        tool_loop = functools.partial(ToolLoop, max_turns=math.inf, max_media=None, isolate=forward.fallbacks.isolate)
    config = generation_config(encoder, args)
    generating = functools.partial(unwrap_model_for_generation, module, accelerator)
    # Ranks sample independently of each other
    sampler = TransformersSampler(forward, accelerator, config, config.eos_token_id, config.pad_token_id, generating)
    return Policy(module, encoder, config, functools.partial(sampler, module, step=0), toolbox, tool_loop)


def _with_tools(encoder: PromptEncoder, toolbox: Environments) -> PromptEncoder:
    prepare_for_tools(encoder.processor)
    template_kwargs = {"chat_template": template_for_tools(encoder.processor), **encoder.template_kwargs}
    return replace(encoder, template_kwargs={**template_kwargs, "tools": toolbox.tools or None})


def evaluate_trainer(
    trainer: MultimodalTrainer,
    dataset: Dataset | Sequence[dict[str, Any]] | None = None,
    reward_funcs: Callable | list[Callable] | None = None,
    args: EvaluationConfig | None = None,
) -> EvaluationResult:
    """
    Evaluates the current model of a trainer as [`evaluate`] does, also during training and with weights that FSDP2 or
    ZeRO-3 shards. The evaluation doesn't change training.

    The trainer's engine, transformers or vLLM, samples with the chat template, tools and media options of the trainer.
    Environments are created anew.

    Args:
        trainer ([`MultimodalGRPOTrainer`], [`MultimodalRLOOTrainer`] or [`MultimodalPPOTrainer`]):
            Trainer.
        dataset ([`~datasets.Dataset`] or `Sequence[dict]`, *optional*):
            Rows with the prompts. By default the trainer's `eval_dataset`.
        reward_funcs (`Callable` or `list[Callable]`, *optional*):
            Reward functions, of which the first decides what is correct. By default the trainer's reward functions.
        args ([`EvaluationConfig`], *optional*):
            Options of sampling and of the metrics. By default one greedy completion per row, with the trainer's
            `max_completion_length` and `per_device_eval_batch_size`.

    Returns:
        [`EvaluationResult`]: Metrics and rows, the same on each process.

    Raises:
        `ValueError`: If there is no dataset, and in the cases of [`evaluate`].
    """
    check_has_sampler(trainer)
    dataset = trainer.eval_dataset if dataset is None else dataset
    if dataset is None:
        raise ValueError(
            "`evaluate_trainer` has nothing to evaluate on; pass a dataset, or set the trainer's `eval_dataset`."
        )
    if args is None:
        args = EvaluationConfig(
            max_completion_length=trainer.max_completion_length, batch_size=trainer.args.per_device_eval_batch_size
        )
    trainer.sampler.invalidate_weights()  # an engine may hold older weights

    config = generation_config(trainer.prompts, args)

    def sample(prompts: list[EncodedPrompt], **options: Any) -> Samples:
        with trainer.offloading():
            return trainer.sampler(
                trainer.model_wrapped, prompts, step=trainer.state.global_step, config=config, **options
            )

    with kept_random_state():
        toolbox = trainer.toolbox.with_new_environments()
    policy = Policy(
        trainer.model,
        trainer.prompts,
        config,
        sample,
        toolbox,
        trainer.tool_loop if trainer.toolbox.tools else None,
        trainer.args.on_media_error,
        trainer.sampler.is_collective,
        trainer.state,
        trainer.args.disable_tqdm,
    )
    if reward_funcs:
        rewards = named_rewards(reward_funcs)
    else:
        rewards = named_rewards(list(trainer.reward_funcs), trainer.reward_func_names)
    rewards = replace(rewards, speech_decoder=trainer.speech_decoder)
    return Evaluation(policy, dataset, rewards, args, trainer.accelerator).run()


def check_has_sampler(candidate: MultimodalTrainer) -> None:
    """Raises `ValueError` if a trainer has no sampler of this package, such as a trainer for supervised training."""
    if not hasattr(candidate, "sampler"):
        raise ValueError(
            f"The trainer is a {type(candidate).__name__}, which doesn't sample completions; evaluate its model with "
            "`evaluate`."
        )


def named_rewards(reward_funcs: Callable | list[Callable], names: Sequence[str] | None = None) -> RewardFunctions:
    """Returns reward functions with distinct names. Raises `ValueError` for models, duplicates and an empty list."""
    reward_funcs = as_reward_funcs(reward_funcs)
    if not reward_funcs:
        raise ValueError("The evaluation has no reward function; pass at least one, which decides what is correct.")
    for reward_func in reward_funcs:
        if isinstance(reward_func, EvaluationConfig):
            raise ValueError("`reward_funcs` is an `EvaluationConfig`; pass it as `args`.")
        if isinstance(reward_func, (str, nn.Module)):
            raise ValueError(
                "A reward model can't be called like a function; pass `RewardModel(model, processor)` or functions as "
                "`reward_funcs`."
            )
    names = names or [get_callable_name(reward_func) for reward_func in reward_funcs]
    if len(set(map(id, reward_funcs))) < len(reward_funcs):
        raise ValueError(f"Of the reward functions {names}, one is passed twice; pass it once.")
    return RewardFunctions(distinct_names(names), reward_funcs, [None] * len(reward_funcs))  # `None`: no processors
