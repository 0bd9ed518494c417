# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Parts of a model, such as encoders, with the same names in every family; freezing and learning rates by part."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from ..families import family_of
from ..spelling import did_you_mean
from .modes import fix_batch_norms
from .wrapped import unwrapped


if TYPE_CHECKING:
    from peft import PeftConfig
    from peft.tuners.tuners_utils import BaseTunerLayer


PARTS = ("vision_tower", "audio_tower", "projector", "language_model")
CRITIC = "critic"
TOWERS = {"image": "vision_tower", "audio": "audio_tower"}  # parts by modality; videos pass the tower of images

# First letters of `init_lora_weights` that takes an adapter's start out of the weights of the base model
_STARTS_FROM_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

# Patterns of the last component of an encoder's dotted name, such as `visual` of `model.visual`, for encoders that
# `get_encoder` doesn't return, such as the second encoder of DeepSeek-VL
_ENCODERS = {
    "vision_tower": re.compile(r"(.+_)?(vision|image|video)_(tower|model|encoder)|visual|vqmodel"),
    "audio_tower": re.compile(r"(.+_)?(audio|speech)_(tower|model|encoder)|(acoustic|semantic)_tokenizer_encoder"),
}
# Children of encoders that project outputs to the width of the language model: Qwen's and GLM's mergers, the last
# layers of Qwen-Omni's audio encoders, and layers around Phi-4's encoders
_PROJECTORS = {
    "vision_tower": re.compile(
        r"((deepstack|patch)_)?merger(_list)?|downsample|connector|img_projection_\w+|\w+_img_feature_extensor"
    ),
    "audio_tower": re.compile(r"proj[12]?|adapter|(up|down)_proj_for_\w+"),
}


def find_tower(model: PreTrainedModel, modality: str) -> str:
    """Returns the dotted name of the encoder of a modality. Raises `ValueError` if the model has none."""
    tower = family_of(model).towers.get(modality)
    if tower is not None:
        return tower
    encoder = model.get_encoder(modality=modality)
    # If a modality has no encoder, `get_encoder` returns a model that contains the decoder
    name = next((name for name, module in model.named_modules() if module is encoder), "")
    if isinstance(encoder, PreTrainedModel) and encoder.get_decoder() is model.get_decoder():
        name = ""
    if not name:
        raise ValueError(f"{type(model).__name__} has no {modality} encoder.")
    return name


def find_towers(model: PreTrainedModel) -> dict[str, str]:
    """Returns the dotted names of a model's encoders by modality. Modalities without a known encoder are left out."""
    towers = {}
    for modality in TOWERS:
        with suppress(ValueError):
            if modality in model.input_modalities:
                towers[modality] = find_tower(model, modality)
    return towers


def freeze_as_built(model: PreTrainedModel) -> None:
    """
    Freezes the weights that the constructor of a model's class freezes, such as the position embeddings of Whisper's
    encoder. `from_pretrained` makes all weights trainable.
    """
    if is_deepspeed_zero3_enabled():  # ZeRO-3 loads weights in place, so they stay frozen
        return
    with torch.device("meta"):
        built = type(model)(model.config)
    frozen_names = {name for name, parameter in built.named_parameters() if not parameter.requires_grad}
    for name, parameter in model.named_parameters():
        if name in frozen_names:
            parameter.requires_grad_(False)


def named_parts(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """
    Yields the name, without PEFT's prefix, the part (one of `PARTS`, or `CRITIC`) and the parameter of every weight,
    tied ones once, before a wrapper such as DDP. An adapter's weights belong to the part that it changes.
    """
    base = unwrapped(None, model)
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
    parts_by_name = _parts_by_name(base)
    for name, parameter in model.named_parameters():
        short_name = name.removeprefix(prefix)
        if name.startswith(f"{CRITIC}."):
            yield name, CRITIC, parameter
        elif not name.startswith(prefix):  # PEFT's weights of prompt learning, outside the base model
            yield name, "language_model", parameter
        else:
            path = short_name
            # The part of the innermost module around the weight that has one
            while path not in parts_by_name:
                path = path.rpartition(".")[0]
            yield short_name, parts_by_name[path], parameter


def _parts_by_name(model: PreTrainedModel) -> dict[str, str]:
    """
    Returns parts by dotted names of modules. A weight has the part of the innermost of these modules around it: for
    Qwen2.5-VL, `model.visual` is the `vision_tower`, and `model.visual.merger` inside it belongs to the `projector`.
    """
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    parts_by_name = {"": "projector"}  # weights in neither the language model nor an encoder
    heads = model.get_output_embeddings(), getattr(model, "score", None)
    for module in (model.get_decoder(), model.get_input_embeddings(), *heads):
        if module in names:
            parts_by_name[names[module]] = "language_model"
    # Encoders are outside the language model, unless the decoder is the whole base model
    language_names = [name for name in parts_by_name if name not in ("", model.base_model_prefix)]
    # Encoders that match a pattern and are inside no other encoder, and the encoders that `find_towers` returns
    towers = {}
    for name in names.values():
        is_inside = any(name.startswith(f"{outer}.") for outer in [*language_names, *towers])
        for part, pattern in _ENCODERS.items():
            if not is_inside and pattern.fullmatch(name.rpartition(".")[2]):
                towers[name] = part
    towers |= {tower: TOWERS[modality] for modality, tower in find_towers(model).items()}
    for tower, part in towers.items():
        module = model.get_submodule(tower)
        for child, _ in [*module.named_children(), *module.named_parameters(recurse=False)]:
            if _PROJECTORS[part].fullmatch(child):
                parts_by_name[f"{tower}.{child}"] = "projector"
    return parts_by_name | towers


def match_keys(model: nn.Module, keys: Sequence[str], option: str) -> dict[nn.Parameter, str]:
    """
    Maps each parameter to one of the `keys`: the first pattern that matches its name or that of its module, or else
    its part. Parameters without a key are left out; a key that chooses nothing is an error.
    """
    keys_by_parameter = _match_keys(model, keys)
    present = {part for _, part, _ in named_parts(model)}
    class_name = type(unwrapped(None, model)).__name__
    for key in keys:
        if key in PARTS and key not in present:
            parts = ", ".join(part for part in PARTS if part in present)
            raise ValueError(f"`{option}` names the part {key!r}, which {class_name} lacks; it has {parts}.")
        if key not in PARTS and key not in keys_by_parameter.values():
            name = next(name for name, _, _ in named_parts(model))
            raise ValueError(
                f"`{option}` names {key!r}, which is no part ({', '.join(PARTS)}), and matches no name of a parameter "
                f"of {class_name}, such as {name!r}.{did_you_mean(key, PARTS)}"
            )
    return keys_by_parameter


def _match_keys(model: nn.Module, keys: Sequence[str]) -> dict[nn.Parameter, str]:
    patterns = [key for key in keys if key not in PARTS]
    keys_by_parameter = {}
    for name, part, parameter in named_parts(model):
        matching_keys = (key for key in patterns if fnmatchcase(name, key) or fnmatchcase(name, f"{key}.*"))
        key = next(matching_keys, part if part in keys else None)
        if key is not None and part != CRITIC:
            keys_by_parameter[parameter] = key
    return keys_by_parameter


def adapters_of(model: nn.Module, peft_config: "PeftConfig | None") -> "list[PeftConfig]":
    """Returns the config of a new adapter, or without one those of a model's active adapters."""
    if peft_config is not None:
        return [peft_config]
    active = getattr(model, "active_adapters", ())  # a method of transformers' models
    names = active() if callable(active) and hasattr(model, "peft_config") else active
    return [config for name, config in getattr(model, "peft_config", {}).items() if name in names]


def check_adapter(model: nn.Module, peft_config: "PeftConfig | None", prompt_learning: bool = False) -> None:
    """
    Raises a `ValueError` with the names of linear layers if an adapter's `target_modules` match no layer, and for
    prompt learning unless it is allowed by `prompt_learning`.
    """
    for config in adapters_of(model, peft_config):
        if getattr(config, "is_prompt_learning", False) and not prompt_learning:
            raise ValueError(
                f"{type(config).__name__} is prompt learning, which puts virtual tokens before a prompt. This trainer "
                "scores rows without them; use an adapter such as LoRA, or train with SFT and `packing=False`."
            )
    targets = getattr(peft_config, "target_modules", None)
    if isinstance(targets, str) or not targets:  # a pattern, `all-linear`, or the defaults of PEFT
        return
    layers = {name: layer for name, layer in unwrapped(None, model).named_modules() if name}
    endings = tuple(f".{target}" for target in targets)
    if any(f".{name}".endswith(endings) for name in layers):
        return
    names = dict.fromkeys(name.split(".")[-1] for name, layer in layers.items() if isinstance(layer, nn.Linear))
    class_name = type(unwrapped(None, model)).__name__
    raise ValueError(
        f"`target_modules` {sorted(targets)} of `peft_config` name no layer of {class_name}; its linear layers are "
        f"named {', '.join(name for name in names if not name.isdigit())}."
    )


def check_base_is_kept(
    model: nn.Module, peft_config: "PeftConfig | None", role: str, remedy: str, frozen: Sequence[str] = ()
) -> None:
    """
    Raises a `ValueError` if an adapter changes the base model, by its initialization, biases or further trained
    weights but those that `frozen` freezes, as the model without it isn't that before training. `role` and `remedy`
    are for the message.
    """
    for config in adapters_of(model, peft_config):
        bias = getattr(config, "bias", None)  # of LoRA, OFT and BOFT; others have none, or a flag for their own bias
        if isinstance(bias, str) and bias != "none":
            raise ValueError(
                f"`bias={bias!r}` trains biases of the base model, which stay without the adapter, so the model "
                f"without its adapter can't be {role}; use `bias='none'`, or {remedy}."
            )
        start = getattr(config, "init_lora_weights", None)
        if isinstance(start, str) and start.lower().startswith(_STARTS_FROM_BASE):
            raise ValueError(
                f"`init_lora_weights={start!r}` moves a part of the base model's weights into the adapter, so the "
                f"model without its adapter can't be {role}; use `init_lora_weights=True` (merge a trained adapter "
                f"into its base model first), or {remedy}."
            )
    unfrozen = _trained_weights_of_base(model, frozen) if hasattr(model, "peft_config") else []
    if unfrozen:
        raise ValueError(
            f"{len(unfrozen)} weights of the base model are trainable beside the adapter, such as {unfrozen[0]!r}, so "
            f"the model without its adapter can't be {role}; freeze them, name their modules in `modules_to_save` of "
            f"the adapter's config, or {remedy}."
        )


def _trained_weights_of_base(model: nn.Module, frozen: Sequence[str]) -> list[str]:
    """Returns the names of weights that stay when an adapter is switched off, and that training changes."""
    frozen_later = _match_keys(model, frozen)
    tuner = getattr(model, "base_model", model)
    prefix = getattr(type(tuner), "prefix", None)
    if prefix is None:  # prompt learning, or an adapter in a model without PEFT's wrapper
        return []
    own_parts = (prefix, "modules_to_save", "trainable_tokens", "token_adapter")
    return [
        name
        for name, parameter in tuner.named_parameters()
        if parameter.requires_grad and parameter not in frozen_later and not any(part in name for part in own_parts)
    ]


def check_trainable(model: nn.Module) -> None:
    """Raises `ValueError`, with the likely reason, if a model has no weights to train."""
    if any(parameter.requires_grad for name, parameter in model.named_parameters() if not name.startswith(CRITIC)):
        return
    base = unwrapped(None, model)
    remedy = "call `model.requires_grad_(True)` first, or pass `peft_config`"
    if base is not model:
        remedy = "load its adapter with `PeftModel.from_pretrained(..., is_trainable=True)`"
    elif getattr(base, "_hf_peft_config_loaded", False):
        remedy = (
            f"transformers freezes a model that it loads with an adapter, here from {base.config._name_or_path!r}; "
            "move the files `adapter_*` to another folder, and wrap the model by "
            "`PeftModel.from_pretrained(model, folder, is_trainable=True)`"
        )
    raise ValueError(f"{type(base).__name__} has no weights to train, as all are frozen: {remedy}.")


def freeze(model: nn.Module, keys: Sequence[str] | None) -> None:
    """
    Freezes parts of a model, including their adapters and the running statistics of their batch norms.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model before DeepSpeed, FSDP or DDP wraps it.
        keys (`list[str]`, *optional*):
            Parts (`vision_tower`, `audio_tower`, `projector` or `language_model`), or patterns of the names of
            parameters and modules, such as `model.visual.blocks.[0-3]`.

    Raises:
        `ValueError`: If the model lacks a part, a pattern matches nothing, or nothing is left to train.
    """
    if keys:
        _freeze(model, {*match_keys(model, keys, "freeze")})
        if not any(parameter.requires_grad for _, part, parameter in named_parts(model) if part != CRITIC):
            raise ValueError(f"`freeze` ({', '.join(keys)}) leaves nothing of the model to train; name fewer parts.")


def freeze_backbone(model: nn.Module, keys: Sequence[str] | None) -> None:
    """Freezes parts of a critic's backbone like [`freeze`]. Keys may match nothing, as critics have no LM head."""
    _freeze(model, {*_match_keys(model, keys or ())})


def _freeze(model: nn.Module, frozen: set[nn.Parameter]) -> None:
    """Freezes parameters, and the running statistics of batch norms that have one of them."""
    for parameter in frozen:
        parameter.requires_grad_(False)
    fix_batch_norms(module for module in model.modules() if not frozen.isdisjoint(module.parameters(recurse=False)))


def fix_frozen_batch_norms(model: nn.Module) -> None:
    """Keeps the running statistics of batch norms whose parameters are all frozen, by [`freeze`] or otherwise."""
    for module in model.modules():
        trained = [parameter.requires_grad for parameter in module.parameters(recurse=False)]
        if trained and not any(trained):
            fix_batch_norms([module])


@contextmanager
def kept_requires_grad(model: nn.Module) -> Iterator[None]:
    """
    Restores each parameter's `requires_grad` on exit. PEFT makes all weights of an adapter trainable when it enables
    the adapter again.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, requires_grad in flags:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)


@contextmanager
def kept_adapter_state(model: nn.Module) -> Iterator[None]:
    """Restores enabled adapters and `requires_grad` of weights on exit. Granite Speech's `generate` changes both."""
    layers = adapter_layers(model)
    disabled = [layer.disable_adapters for layer in layers]
    with kept_requires_grad(model):
        try:
            yield
        finally:
            for layer, is_disabled in zip(layers, disabled, strict=True):
                if layer.disable_adapters != is_disabled:
                    layer.enable_adapters(not is_disabled)


def adapter_layers(model: nn.Module) -> "list[BaseTunerLayer]":
    """Returns the layers of PEFT's adapters, without an import of PEFT."""
    layers = (layer for layer in model.modules() if isinstance(getattr(layer, "disable_adapters", None), bool))
    return [cast("BaseTunerLayer", layer) for layer in layers]


def count_parts(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Returns the number of parameters and the number of trained parameters of each part of a model."""
    counts = dict.fromkeys((*PARTS, CRITIC), (0, 0))
    for _, part, parameter in named_parts(model):
        size = _size(parameter)
        total, trained = counts[part]
        counts[part] = total + size, trained + size * parameter.requires_grad
    return {part: sizes for part, sizes in counts.items() if sizes[0]}


def rates_of_parts(model: nn.Module, args: TrainingArguments) -> dict[str, list[float]]:
    """Returns the distinct learning rates of trained weights, by part of a model."""
    rate_by_key: dict[str, float] = getattr(args, "learning_rates", None) or {}
    keys_by_parameter = match_keys(model, [*rate_by_key], "learning_rates")
    schedule = getattr(args, "value_schedule", None)  # of a critic
    rates: dict[str, list[float]] = {}
    for _, part, parameter in named_parts(model):
        if parameter.requires_grad:
            rate = args.learning_rate
            if parameter in keys_by_parameter:
                rate = rate_by_key[keys_by_parameter[parameter]]
            elif part == CRITIC and schedule is not None:
                rate = schedule.rate
            if rate not in rates.setdefault(part, []):
                rates[part].append(rate)
    return rates


def _size(parameter: nn.Parameter) -> int:
    """The parameter may be sharded or packed."""
    size = getattr(parameter, "ds_numel", None) or parameter.numel()  # `ds_numel` counts all of DeepSpeed's shards
    if type(parameter).__name__ == "Params4bit":  # packs two weights into a byte
        size *= 2 * (getattr(parameter, "quant_storage", None) or torch.uint8).itemsize
    return size
