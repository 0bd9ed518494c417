# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the trainers that sample: checks before anything is loaded, then the models and rewards they name."""

import atexit
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from trl.models import prepare_deepspeed
from trl.trainer.utils import (
    get_config_model_id,
    shutdown_event_loop_in_daemon,
    start_event_loop_in_daemon,
)

from ...encoding.processors import load_processor
from ...encoding.prompts import all_placeholder_ids
from ...engines.samplers import Sampler
from ...modalities import MODALITIES
from ...models.modes import fix_encoders
from ...models.parts import check_adapter, check_base_is_kept
from ...models.pretrained import is_adapter
from ...models.reward_model import check_scores, load_trained_reward_model
from ...models.wrapped import replaced, unwrapped
from ...rewards.model import RewardModel
from ...rewards.named import as_reward_funcs
from ...rollout.environments import Environments, rows_for_environments
from ...rollout.reward_functions import RewardFunctions
from ..base.argument_checks import check_arguments, mapping
from ..base.configs import SamplingConfig, needs_reference
from ..base.dataset_checks import check_kept_columns, check_takes_media, modalities, warn_of_unread_media
from ..base.loading import CONSTRUCTOR_OPTIONS, Models, image_token_id, load_parts, load_reference, loading_in_trl
from ..base.setup import (
    check_engine_format,
    check_head_cast,
    check_launch,
    check_name,
    prepare_for_tools,
    warn_of_excluded_tokens,
)
from ..base.signatures import Model, Processor


if TYPE_CHECKING:
    from trl.trainer.grpo_trainer import RewardFunc


@dataclass(frozen=True)
class Inputs:
    """Arguments of a trainer's constructor, checked."""

    model: Model
    args: SamplingConfig
    processing_class: Processor | None
    reward_funcs: list[Any] | None
    datasets: dict[str, Any]  # `train_dataset` and `eval_dataset`, as they were passed
    for_trl: dict[str, Any]  # further arguments of TRL's constructor, with a dataset in any case
    reward_processing_classes: Processor | list[Processor | None] | None = None
    ref_model: PreTrainedModel | None = None
    tools: Sequence[Callable] | None = None
    environment_factory: Callable | dict[str, Callable] | None = None
    rollout_func: Callable[..., dict[str, Any]] | None = None
    sampler: Sampler | None = None

    @property
    def uses_tools(self) -> bool:
        """`True` if completions call tools of the user or of environments."""
        return bool(self.tools) or self.environment_factory is not None

    @property
    def makes_prompts(self) -> bool:
        """`True` if environments or the user's function make prompts, and the rows may have none."""
        return self.rollout_func is not None or self.environment_factory is not None


# Arguments that TRL's constructor doesn't get
_OWN = ("reward_processing_classes", "ref_model", "tools", "environment_factory", "rollout_func", "sampler")


def check_inputs(
    model: Model,
    reward_funcs: "RewardFunc | list[RewardFunc] | None",
    args: SamplingConfig,
    processing_class: Processor | None,
    knows_rows: bool = True,
    **kwargs: Any,
) -> Inputs:
    """
    Returns the arguments of a trainer's constructor. Raises an error if they don't fit each other or the launch. Media
    of the datasets are looked for if `knows_rows`, that is if the datasets hold the rows of the run.
    """
    check_arguments(reward_funcs, args=args, processing_class=processing_class, **kwargs)
    check_launch(args, model)
    warn_of_excluded_tokens(args)
    reward_funcs = None if reward_funcs is None else as_reward_funcs(reward_funcs)
    check_kept_columns(args, reward_funcs, kwargs.get("train_dataset"))
    inputs = Inputs(
        model=model,
        args=args,
        processing_class=processing_class,
        reward_funcs=reward_funcs,
        datasets={name: kwargs.get(name) for name in ("train_dataset", "eval_dataset")},
        for_trl={name: value for name, value in kwargs.items() if name not in _OWN},
        **{name: kwargs[name] for name in _OWN if name in kwargs},
    )
    if knows_rows and inputs.environment_factory is None:  # environments may read any column
        functions = () if inputs.rollout_func else reward_funcs or ()
        warn_of_unread_media(args, inputs.datasets, modalities(model, args), reward_funcs=functions)
    if inputs.datasets["train_dataset"] is None:
        rows = rows_for_environments(inputs.environment_factory, args)
        inputs = replace(inputs, for_trl={**inputs.for_trl, "train_dataset": rows})
    return inputs


def load_for_sampling(inputs: Inputs) -> Models:
    """Loads the parts of [`load_parts`] and the reference, if any, and checks that they can sample as configured."""
    args = inputs.args
    sampler = inputs.sampler
    ref_model = inputs.ref_model
    quantization_config = inputs.for_trl.get("quantization_config")
    peft_config = inputs.for_trl.get("peft_config")
    if sampler is not None and (args.use_vllm or not isinstance(sampler, Sampler)):
        raise ValueError(
            f"`sampler` is a {type(sampler).__name__}, and `use_vllm` is {args.use_vllm}; pass a `Sampler` "
            "instance, and set `use_vllm=False`."
        )
    models = load_parts(inputs.model, args, inputs.processing_class, quantization_config, args.max_completion_length)
    model = models.model
    processing_class = models.processing_class
    check_name(model, args, ref_model, peft_config)
    check_adapter(model, peft_config)
    check_head_cast(model, args)
    if inputs.uses_tools:
        prepare_for_tools(processing_class)
    if args.use_vllm:
        check_engine_format(processing_class)
    if args.disable_dropout is None:
        fix_encoders(unwrapped(None, model))
    if any(modality in model.input_modalities for modality in MODALITIES):
        check_takes_media(processing_class, args.ignored_media_columns, *inputs.datasets.values())
    if ref_model is None:
        if needs_reference(args):
            role = f"the reference of `beta={args.beta}`"
            check_base_is_kept(model, peft_config, role, "set `beta=0`", args.freeze or ())
            ref_model = load_reference(model, args, peft_config, quantization_config)
    elif args.beta_is_kl and (args.beta == 0 or args.sync_ref_model):
        option = "sync_ref_model=True" if args.sync_ref_model else "beta=0"
        raise ValueError(f"`ref_model` was passed, which `{option}` doesn't use; change one of them.")
    return replace(models, ref_model=ref_model)


@contextmanager
def around_trl_constructor(args: SamplingConfig, models: Models):
    """Replaces options and config entries that TRL's constructor reads, within the context."""
    # The trainer starts the engine itself. If a reference is loaded, TRL mustn't load another one, or sync it
    changes = {**CONSTRUCTOR_OPTIONS, "use_vllm": False}
    if models.ref_model is not None:
        changes |= {"beta": 0.0, "sync_ref_model": False}
    # TRL passes `disable_compile` itself, and a second value would be an error
    generation_kwargs = mapping(args.generation_kwargs)
    if "disable_compile" in generation_kwargs:
        changes["generation_kwargs"] = {
            name: value for name, value in generation_kwargs.items() if name != "disable_compile"
        }
    placeholders = all_placeholder_ids(models.model, models.processing_class)
    with (
        image_token_id(models.model.config, placeholders),
        loading_in_trl(args, models.by_name),
        replaced(args, **changes),
    ):
        yield


def start_loop(name: str) -> AbstractEventLoop:
    """Starts an event loop for asynchronous tools and reward functions in a thread of its own."""
    thread, loop, ready = start_event_loop_in_daemon(name=name)
    ready.wait()
    atexit.register(shutdown_event_loop_in_daemon, thread, loop)
    return loop


@dataclass
class RewardSetup:
    """Reward functions for TRL's constructor, and reward functions of environments that are added afterwards."""

    reward_funcs: list[Any]
    processors: list[Any]
    by_name: list[bool]  # for each reward function, whether it is a model that is loaded by its name
    environment_funcs: dict[str, Callable]

    def for_trl(self) -> dict[str, Any]:
        """Returns arguments of TRL's constructor; none for a trainer without rewards."""
        # TRL encodes texts with tokenizers and needs their padding token, which processors lack
        tokenizers = [getattr(processor, "tokenizer", processor) for processor in self.processors]
        arguments = {"reward_funcs": self.reward_funcs, "reward_processing_classes": tokenizers}
        return arguments if self.reward_funcs else {}


def reward_setup(
    reward_funcs: list | None,
    processors: Processor | list[Processor | None] | None,
    toolbox: Environments,
    args: SamplingConfig,
) -> RewardSetup:
    """
    Returns the reward functions, with reward models that are adapters loaded. Raises `ValueError` if there is none and
    the config needs rewards.
    """
    environment_funcs = toolbox.reward_funcs()
    if not reward_funcs:  # environments' functions go to TRL's constructor, and none is left to add afterwards
        reward_funcs = [*environment_funcs.values()]
        environment_funcs = {}
    if not reward_funcs and args.needs_rewards:
        raise ValueError("No reward source provided: pass `reward_funcs`, or an environment with `get_reward`.")
    processors = processors or [None] * len(reward_funcs)
    reward_funcs = [*reward_funcs]
    processors = [*processors] if isinstance(processors, list) else [processors]
    init_kwargs = mapping(args.model_init_kwargs)
    trust_remote_code = args.trust_remote_code
    revision: str | None = init_kwargs.get("revision")
    for i, reward_func in enumerate(reward_funcs):
        if isinstance(reward_func, str) and is_adapter(reward_func, revision):
            reward_funcs[i], processor = load_trained_reward_model(
                reward_func, trust_remote_code=trust_remote_code, **init_kwargs
            )
            # If the list is too short, the slice is empty, and TRL raises an error afterwards
            processors[i : i + 1] = [processing_class or processor for processing_class in processors[i : i + 1]]
        elif isinstance(reward_func, str):  # TRL loads the model
            check_scores(reward_func, revision, trust_remote_code)
    return RewardSetup(reward_funcs, processors, [isinstance(func, str) for func in reward_funcs], environment_funcs)


def wrap_reward_models(
    functions: RewardFunctions,
    rewards: RewardSetup,
    accelerator: Accelerator,
    args: SamplingConfig,
    template_kwargs: dict[str, Any],
) -> None:
    """Replaces reward models by [`with_media_reader`], and sets the template's arguments of those without one."""
    functions.template_kwargs = template_kwargs
    for i, (processor, by_name) in enumerate(zip(rewards.processors, rewards.by_name, strict=True)):
        reward_func = functions.functions[i]
        functions.functions[i] = with_media_reader(reward_func, processor, by_name, accelerator, args, template_kwargs)


def with_media_reader(
    reward_func: nn.Module | Callable,
    processor: ProcessorMixin | PreTrainedTokenizerBase | None,
    by_name: bool,
    accelerator: Accelerator,
    args: SamplingConfig,
    template_kwargs: dict[str, Any],
) -> nn.Module | Callable:
    """
    Wraps a reward model and its processor in a [`RewardModel`], which reads media. Returns functions as they are, and
    also models without a processor of media. `by_name` says whether the reward model was loaded by its name.
    """
    if not isinstance(reward_func, nn.Module):
        return reward_func
    if is_peft_model(reward_func):  # TRL doesn't move such a model to the accelerator's device
        if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
            reward_func = prepare_deepspeed(reward_func, accelerator)
        else:
            reward_func = accelerator.prepare_model(reward_func, device_placement=True, evaluation_mode=True)
    model = unwrapped(accelerator, reward_func)
    takes_media = isinstance(model, PreTrainedModel) and any(
        modality in model.input_modalities for modality in MODALITIES
    )
    if processor is None and takes_media:
        processor = load_processor(
            get_config_model_id(model.config),
            revision=mapping(args.model_init_kwargs).get("revision") if by_name else None,
            trust_remote_code=args.trust_remote_code,
        )
    if not isinstance(processor, ProcessorMixin):
        return reward_func
    return RewardModel(
        reward_func,
        processor,
        batch_size=args.per_device_train_batch_size,
        template_kwargs=template_kwargs,
        audio_overlong=args.audio_overlong,
    )
