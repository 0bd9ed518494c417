# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Loading of models, processors and references in a constructor, before TRL's runs."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from transformers import (
    AutoProcessor,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from trl.trainer.utils import (
    get_config_model_id,
)

from ...credentials import revealed
from ...encoding.processors import adopt_template, check_processor, load_processor
from ...families import family_of
from ...models.parts import freeze_as_built
from ...models.pretrained import load_model, policy_class, require_all_weights, trained_part
from ...models.wrapped import replaced
from ...policy import training_obstacle
from .argument_checks import mapping
from .configs import TrainerConfig
from .setup import NO_NAME
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
def loading_in_trl(args: TrainerConfig, by_name: bool):
    """
    Context in which TRL loads models by `model_init_kwargs`, which have their secrets there. Incomplete weights are an
    error. With `by_name`, this package has already loaded the model, so TRL's warning that they are unused is hidden.
    """

    def is_shown(record: logging.LogRecord):
        return not (by_name and "but your model is already instantiated" in record.getMessage())

    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("trl.trainer.")]
    for trl_logger in loggers:
        trl_logger.addFilter(is_shown)
    held = args.model_init_kwargs
    vars(args)["model_init_kwargs"] = revealed(held)  # setting the attribute would hide them again
    try:
        with require_all_weights():
            yield
    finally:
        vars(args)["model_init_kwargs"] = held
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


# Options that are off in TRL's constructor, because the trainers here handle signals and compile layers themselves
CONSTRUCTOR_OPTIONS: dict[str, Any] = {"enable_jit_checkpoint": False, "torch_compile_backend": "no"}


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
    Loads the reference if the policy is only a part of the model in its folder, such as the thinker of Qwen2.5-Omni,
    of which TRL would load all. `None` if TRL can load it, or if the policy without its adapter is the reference.
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
