# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Loading of models by name."""

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from logging import Logger
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightRenaming
from transformers.integrations import deepspeed
from transformers.models.auto import modeling_auto
from transformers.utils import cached_file
from transformers.utils.loading_report import LoadStateDictInfo, log_state_dict_report
from transformers.utils.peft_utils import find_adapter_config_file
from trl.trainer.utils import create_model_from_path

from ..data.reading.decoding import require_module
from ..encoding.model_folders import check_adapter_folder, check_model_folder, holds_model, loading_errors
from ..encoding.processors import load_processor
from ..families import family_of
from .wrapped import replaced


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


if Version(transformers.__version__) < Version("5.23"):
    # Without this, decoders would be saved and sent to vLLM as `language_model.model.model`, unlike in released models
    for model_type in ("qwen2_audio", "voxtral", "audioflamingo3", "musicflamingo", "glmasr", "granite_speech"):
        _, head, *towers = cast(list[WeightRenaming], get_checkpoint_conversion_mapping(model_type))
        decoder = WeightRenaming("^language_model", "model.language_model")
        register_checkpoint_conversion_mapping(model_type, [head, decoder, *towers], overwrite=True)


class _TransposeBack(Transpose):
    """
    Conversion for saving that transposes weights that loading has transposed for their shapes, which transformers'
    reverse conversion doesn't: experts of Qwen3-VL-MoE would get shapes that vLLM can't load.
    """

    def convert(
        self,
        input_dict: dict[str, torch.Tensor | list[torch.Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: PreTrainedModel | PreTrainedConfig | list | None,
    ) -> dict[str, torch.Tensor]:
        [(name, values)] = input_dict.items()
        weight = values[0] if isinstance(values, list) else values
        # Square weights aren't transposed on loading
        saved_weight = (
            weight if weight.size(self.dim0) == weight.size(self.dim1) else weight.transpose(self.dim0, self.dim1)
        )
        return {self.get_target_pattern({name: weight}, source_patterns, target_patterns): saved_weight.contiguous()}


def _reverse(self: Transpose) -> Transpose:
    """Returns the conversion for saving. `check_dims` marks conversions that depend on the weight's shape."""
    reverse_class: type[Transpose] = _TransposeBack if self.check_dims else Transpose
    return reverse_class(self.dim1, self.dim0)


# Set for all models, since other code may call their `save_pretrained`
setattr(Transpose, "reverse_op", property(_reverse))  # noqa: B010

# Arguments of `from_pretrained` that locate files
SOURCE_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def trained_part(name: str, **kwargs) -> type[PreTrainedModel] | None:
    """Returns the class of the trained part of a model, such as an omni model's thinker, or `None` for the whole."""
    config, _ = PreTrainedConfig.get_config_dict(
        name, **{key: kwargs[key] for key in SOURCE_ARGUMENTS if key in kwargs}
    )
    model_type = config.get("model_type", "")
    part = family_of(model_type).trained_part.get(model_type)
    if part is not None:
        return getattr(transformers, part)
    if model_type and model_type not in CONFIG_MAPPING and "auto_map" not in config:
        newer = config.get("transformers_version")
        raise ImportError(
            f"{name!r} is a {model_type!r} model, which transformers {transformers.__version__} doesn't have"
            + (f'; it was saved with {newer}: run `pip install "transformers>={newer}"`.' if newer else ".")
        )
    return None


@contextmanager
def require_all_weights(
    get_new_weights: Callable[[PreTrainedModel], Iterable[nn.Parameter]] = lambda model: (),
) -> Iterator[None]:
    """
    Raises a `ValueError` if the folder of a model that is loaded within the context lacks weights, which would be
    random, or holds weights of other shapes. `get_new_weights` returns the parameters that the folder needn't hold,
    such as a head that is removed later; transformers' report doesn't name them.
    """

    def report(model: PreTrainedModel, loading_info: LoadStateDictInfo, **options: str | bool | Logger) -> None:
        name = options["pretrained_model_name_or_path"]
        class_name = type(model).__name__
        weights = dict(model.named_parameters())
        new = {*get_new_weights(model)}
        missing = sorted(key for key in loading_info.missing_keys if key in weights and weights[key] not in new)
        if missing:
            raise ValueError(
                f"{name!r} lacks weights of {class_name}, which would be random ({len(missing)}: "
                f"{', '.join(missing[:3])}{', ...' * (len(missing) > 3)}); name a folder with all weights, as "
                "`save_pretrained` writes it."
            )
        if loading_info.mismatched_keys and not options["ignore_mismatched_sizes"]:
            weight, shape, expected = min(loading_info.mismatched_keys)
            trait = "with `num_labels=1`" if 1 in expected[:1] else "whose config and weights belong together"
            raise ValueError(
                f"{name!r} holds {weight!r} of shape {[*shape]}, and {class_name} takes {[*expected]}; "
                f"name a model {trait}."
            )
        expected = {key for key in loading_info.missing_keys if weights.get(key) in new}
        told = replace(loading_info, missing_keys=loading_info.missing_keys - expected)
        log_state_dict_report(model=model, loading_info=told, **cast(dict[str, Any], options))

    # `integrations.peft` has imported the function by name, and calls it for an adapter in the folder of a model
    hook = {"log_state_dict_report": report}
    with replaced(transformers.modeling_utils, **hook), replaced(transformers.integrations.peft, **hook):
        yield


def load_model(name: str, **kwargs) -> PreTrainedModel:
    """Loads the trained part of a model, as TRL loads a policy."""
    check_model_folder(name, kwargs.get("subfolder", ""))
    with loading_errors(name), require_all_weights():
        if "architecture" not in kwargs:
            kwargs["architecture"] = trained_part(name, **kwargs)
            config, _ = PreTrainedConfig.get_config_dict(
                name, **{k: kwargs[k] for k in SOURCE_ARGUMENTS if k in kwargs}
            )
            architecture = (config.get("architectures") or [""])[0]
            if architecture.endswith("ForSequenceClassification"):
                raise ValueError(
                    f"{name!r} is a {architecture}, which scores and writes no text; name the model that it was "
                    f"trained from, and use {name!r} as a reward model or critic."
                )
        return create_model_from_path(name, **kwargs)


def load_frozen(model_class: Any, name: str, device: torch.device) -> PreTrainedModel:
    """Returns a model that isn't trained, whole also under ZeRO-3, which shards what `from_pretrained` loads."""
    with replaced(deepspeed, _hf_deepspeed_config_weak_ref=None):
        model = model_class.from_pretrained(name, trust_remote_code=False)
    return model.to(device).eval().requires_grad_(False)


def load_trained(
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    load: Callable[..., PreTrainedModel] = load_model,
    **kwargs,
) -> tuple[Any, ProcessorMixin | PreTrainedTokenizerBase]:
    """Loads a model or an adapter that a trainer has saved, and its processor."""
    source = {"revision": revision or "main"}
    kwargs["trust_remote_code"] = trust_remote_code
    if not is_adapter(name, revision):
        return load(name, **source, **kwargs), load_processor(name, trust_remote_code=trust_remote_code, **source)
    model, config = load_adapted(name, revision, functools.partial(load, **kwargs))
    # An adapter may have been saved with or without the processor
    has_processor = cached_file(name, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False, **source)
    processor_name = name
    if not has_processor:
        processor_name = str(config.base_model_name_or_path)
        source = {"revision": config.revision or "main"}
    return model, load_processor(processor_name, trust_remote_code=trust_remote_code, **source)


def load_adapted(
    name: str, revision: str | None, load: Callable[..., PreTrainedModel]
) -> "tuple[PeftModel, PeftConfig]":
    """Loads the base model of an adapter by `load`, and the adapter. Returns the `PeftModel` and its `PeftConfig`."""
    peft = require_module("peft", "peft")
    source = {"revision": revision or "main"}
    check_adapter_folder(name)
    config = peft.PeftConfig.from_pretrained(name, **source)
    base = config.base_model_name_or_path
    if base is None:
        raise ValueError(f"The adapter {name!r} names no base model; set `base_model_name_or_path` in its config.")
    try:
        model = load(base, revision=config.revision or "main")
    except OSError as error:
        raise OSError(
            f"The adapter {name!r} names the base model {base!r} in its 'adapter_config.json', which can't be loaded "
            f"from {os.getcwd()!r}; write its path or its name on the Hub there. {error}"
        ) from error
    try:
        with loading_errors(name, "adapter"), warnings.catch_warnings():
            warnings.filterwarnings("error", ".*Found missing adapter keys")
            return peft.PeftModel.from_pretrained(model, name, **source), config
    except UserWarning as error:
        raise ValueError(f"{name!r} lacks weights of an adapter, which would be random: {str(error)[:200]}") from None


def is_adapter(name: str, revision: str | None = None) -> bool:
    """Returns whether a folder or repository holds an adapter, but no model. A model's folder may hold both."""
    return not holds_model(name) and find_adapter_config_file(name, revision=revision or "main") is not None


def read_config(name: str, **kwargs) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Returns the config of a model, and the class of its trained part."""
    try:
        part = trained_part(name, **kwargs)
        config_class = transformers.AutoConfig if part is None else cast(type[PreTrainedConfig], part.config_class)
        config = config_class.from_pretrained(name, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name!r} is no folder or file with a config of transformers, and no model that can be read from the "
            "Hub, or, offline, from the Hub's cache; check the name."
        ) from error
    return config, part or policy_class(config)


def policy_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Returns transformers' class that generates text, for the config of a policy or of a sequence classifier."""
    mappings = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    names = []
    for name in config.architectures or []:
        names.append(name.replace("ForSequenceClassification", "ForConditionalGeneration"))
        names.append(name.replace("ForSequenceClassification", "ForCausalLM"))
    names += [mapping[config.model_type] for mapping in mappings if config.model_type in mapping]
    model_class = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if model_class is None:
        raise ValueError(f"transformers has no class that generates text with a {config.model_type!r} config.")
    return model_class
