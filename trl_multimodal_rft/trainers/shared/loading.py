# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Loading of models, processors, reward functions and references in a constructor, before TRL's runs."""

import atexit
import logging
from asyncio import AbstractEventLoop
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import nn
from transformers import (
    AutoProcessor,
    BitsAndBytesConfig,
    PreTrainedConfig,
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

from ...encoding.processors import adopt_template, check_processor, load_processor
from ...encoding.prompts import all_placeholder_ids
from ...engines.samplers import Sampler
from ...families import MODALITIES, family_of
from ...models.modes import fix_encoders
from ...models.parts import check_adapter, check_base_is_kept, freeze_as_built
from ...models.pretrained import is_adapter, load_model, policy_class, require_all_weights, trained_part
from ...models.reward_model import check_scores, load_trained_reward_model
from ...models.wrapped import replaced, unwrapped
from ...policy import training_obstacle
from ...rewards.model import RewardModel
from ...rollout.environments import Environments
from ...rollout.reward_functions import RewardFunctions
from .arguments import mapping
from .configs import SamplingConfig, TrainerConfig, needs_reference
from .dataset_checks import check_takes_media
from .inputs import Inputs
from .setup import NO_NAME, check_engine_format, check_head_cast, check_name, prepare_for_tools
from .signatures import Adapter, Processor


logger = get_logger(__name__)


def image_token_id(config: PreTrainedConfig, placeholders: set[int]) -> AbstractContextManager[None]:
    """
    Returns a context in which a config has an `image_token_id`, which TRL reads for every processor. A config without
    this entry gets the smallest of the `placeholders`.
    """
    has_token_id = hasattr(config, "image_token_id")
    return nullcontext() if has_token_id else replaced(config, image_token_id=min(placeholders, default=None))


@contextmanager
def loading_in_trl(by_name: bool):
    """
    Raises an error within the context if TRL loads incomplete weights. With `by_name`, this package has already loaded
    the model with `model_init_kwargs`, so TRL's warning that they are unused is hidden.
    """

    def is_shown(record: logging.LogRecord):
        return not (by_name and "but your model is already instantiated" in record.getMessage())

    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("trl.trainer.")]
    for trl_logger in loggers:
        trl_logger.addFilter(is_shown)
    try:
        with require_all_weights():
            yield
    finally:
        for trl_logger in loggers:
            trl_logger.removeFilter(is_shown)


@dataclass(frozen=True)
class Models:
    """Policy, reference and processor, checked and loaded before TRL's constructor."""

    model: PreTrainedModel
    processing_class: Processor
    processor_source: dict[str, Any] | None  # arguments that load the processor again, if it was loaded here
    revision: str | None  # of the model, if it was loaded here
    by_name: bool  # whether the model was loaded here
    ref_model: PreTrainedModel | None = None  # reference, if this package loads it, and not TRL

    def load_processor(self) -> ProcessorMixin | PreTrainedTokenizerBase:
        """Returns the processor as transformers loads it, or the processor that was passed."""
        source = self.processor_source
        return self.processing_class if source is None else AutoProcessor.from_pretrained(**source)


def load_parts(
    model: Any,
    args: TrainerConfig,
    processing_class: Processor | None,
    quantization_config: BitsAndBytesConfig | None,
    max_completion_length: int | None,
    load: Callable[..., PreTrainedModel] = load_model,
) -> Models:
    """
    Loads a model by its name with `load`, and a missing processor. Raises `ValueError` if the model can't be trained.
    """
    if hasattr(model, "model_for"):  # an actor of `lightrft`; the trainer takes its model
        model = model.model_for(args)
    by_name = isinstance(model, str)
    if by_name:
        model = load_policy(model, args, quantization_config, load)
    # Reward models have another `load`, and need no LM head
    if load is load_model and not model.can_generate():
        class_name = policy_class(model.config).__name__
        raise ValueError(
            f"{type(model).__name__} has no LM head; pass the model's name or folder, or load it as {class_name}."
        )
    revision = mapping(args.model_init_kwargs).get("revision") if by_name else None
    processor_source: Any = None
    if processing_class is None:
        name = get_config_model_id(model.config)
        if not name:
            raise ValueError(f"{NO_NAME} its processor would be loaded; pass `processing_class`.")
        processing_class = load_processor(name, revision, args.trust_remote_code)
        processor_source = {"revision": revision, "trust_remote_code": args.trust_remote_code}
        processor_source["pretrained_model_name_or_path"] = name
    adopt_template(processing_class)
    reason = training_obstacle(model, processing_class, max_completion_length)
    if reason is not None:
        raise ValueError(f"{type(model).__name__} ({model.config.model_type}) can't be trained: {reason}.")
    check_processor(processing_class)
    return Models(model, processing_class, processor_source, revision, by_name)


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


# Options that are off in TRL's constructor, because the trainers here handle signals and compile layers themselves
CONSTRUCTOR_OPTIONS: dict[str, Any] = {"enable_jit_checkpoint": False, "torch_compile_backend": "no"}


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
    with image_token_id(models.model.config, placeholders), loading_in_trl(models.by_name), replaced(args, **changes):
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


def load_policy(
    name: str,
    args: TrainerConfig,
    quantization_config: BitsAndBytesConfig | None = None,
    load: Callable[..., PreTrainedModel] = load_model,
) -> PreTrainedModel:
    """Loads the policy by its name. Raises `ValueError` for two quantization configs."""
    init_kwargs = mapping(args.model_init_kwargs)
    if quantization_config is not None and "quantization_config" in init_kwargs:
        raise ValueError(
            "`quantization_config` is set both as a trainer argument and in `args.model_init_kwargs`. Set it as a "
            "trainer argument."
        )
    model = load_by_name(name, args, init_kwargs, quantization_config, load)
    freeze_as_built(model)
    return model


def load_by_name(
    name: str,
    args: TrainerConfig,
    init_kwargs: dict[str, Any],
    quantization_config: BitsAndBytesConfig | None = None,
    load: Callable[..., PreTrainedModel] = load_model,
) -> PreTrainedModel:
    """Loads a model as TRL does. With several ranks, sets no `device_map`, because each rank places its own copy."""
    load_kwargs = {"trust_remote_code": args.trust_remote_code, **init_kwargs}
    if quantization_config is not None:
        load_kwargs["quantization_config"] = quantization_config
    if args.distributed_state is not None and args.distributed_state.distributed_type in ["MULTI_GPU", "DEEPSPEED"]:
        load_kwargs["device_map"] = None
    return load(name, **load_kwargs)


def load_reference(
    model: PreTrainedModel,
    args: TrainerConfig,
    peft_config: Adapter = None,
    quantization_config: BitsAndBytesConfig | None = None,
) -> PreTrainedModel | None:
    """
    Loads the reference if the policy is only a part of the model in its folder, such as the thinker of Qwen2.5-Omni.
    TRL would load the whole model.

    Returns the reference, or `None` if TRL can load it, or if the policy without its adapter is the reference.
    """
    if peft_config is not None or is_peft_model(model):
        return None
    name = get_config_model_id(model.config)
    if not name:
        raise ValueError(
            "The model has no path from which to load its reference; save the model and pass the folder, or pass a "
            "copy as `ref_model`, if the trainer takes it."
        )
    if not family_of(model).trained_part or trained_part(name, **mapping(args.model_init_kwargs)) is None:
        return None
    if getattr(args, "cast_lm_head_to_fp32", False):
        raise ValueError(
            f"`cast_lm_head_to_fp32` needs a reference that TRL loads, and TRL can't load the reference of {name!r}; "
            "remove the option, or set `beta=0`."
        )
    init_kwargs = {"dtype": model.dtype, "attn_implementation": model.config._attn_implementation}
    return load_by_name(name, args, {**init_kwargs, **mapping(args.model_init_kwargs)}, quantization_config)
