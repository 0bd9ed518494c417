# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sampling completions: each prompt and its media are prefilled once, whatever the number of completions."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, masking_utils
from transformers.utils import ModelOutput

from ..algorithms.completions import up_to_first_end
from ..encoding.prompts import EncodedPrompt, join_media
from ..families import family_of
from ..forward.layout import group_by_prompt
from ..forward.masks import ATTENTION_LAYERS, POINTWISE_LAYERS, linear_masks, windows_as_forwarded
from ..forward.scoring import left_pad, to_model


def generate_completions(
    model: nn.Module,
    unwrapped_model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    generation_config: GenerationConfig,
    pad_token_id: int,
    device: torch.device,
    *,
    share_prefill: bool = True,
    companions: Sequence[EncodedPrompt] = (),
) -> Any:
    """
    Generates a completion of each prompt, equal to what `generate` would give on repeated prompts.

    The unique prompts are prefilled once, through the model's own forward, and the cache is expanded to their
    completions. Where the family or the options don't allow that, the prompts are repeated and `generate` does
    everything.

    Args:
        model (`torch.nn.Module`):
            Model to call, as given by `unwrap_model_for_generation`.
        unwrapped_model ([`~transformers.PreTrainedModel`]):
            The same model without wrappers.
        prompts (`Sequence[EncodedPrompt]`):
            Each completion's prompt, length `B`; those of a group hold the same object.
        generation_config ([`~transformers.GenerationConfig`]):
            How to sample.
        pad_token_id (`int`):
            Id written on left padding.
        device (`torch.device`):
            Where the model is.
        share_prefill (`bool`, *optional*, defaults to `True`):
            Whether to prefill each prompt once.
        companions (`Sequence[EncodedPrompt]`, *optional*):
            Further prompts that are prefilled, for the sake of their encoders, but not completed.

    Returns:
        `torch.Tensor`: Generated ids after the prompts, shape `(B, N)`; or, with `return_dict_in_generate`, the whole
        output of `generate`, which may have rows of companions at the end.
    """
    unique = [*group_by_prompt(prompts), *companions]
    takes_a_cache = _takes_a_cache(generation_config, unwrapped_model.generation_config)
    share_prefill = share_prefill and takes_a_cache
    cached = _cacheable_tokens(unwrapped_model, unique) if share_prefill else 0
    rows = unique if cached else [*prompts, *companions]
    batch = left_pad(rows, pad_token_id)
    input_ids, attention_mask, position_ids = (
        batch[name].to(device) for name in ("input_ids", "attention_mask", "position_ids")
    )
    fields = {name: value.to(device) for name, value in batch["fields"].items()}
    media = to_model(join_media(rows), unwrapped_model, device)
    if cached:
        cache: Any = DynamicCache(config=windows_as_forwarded(unwrapped_model))
        if cached > 0:
            cache.activate_past_recording()  # a sliding window would forget what cropping brings back
        stop = input_ids.size(1) + min(cached, 0)
        prefill = {name: value[:, :stop] for name, value in fields.items()}
        # The model's own forward, not its backbone's: under FSDP2 only the root gathers its parameters
        inputs = unwrapped_model.prepare_inputs_for_generation(
            input_ids[:, :stop],
            attention_mask=attention_mask[:, :stop],
            position_ids=position_ids[..., :stop],
            past_key_values=cache,
            use_cache=True,
            is_first_iteration=True,
            **prefill,
            **media,
        )
        model(**{**inputs, "logits_to_keep": 1})
        if cached > 0:
            cache.crop(-1)  # `generate` wants one token to start from
            for layer in cache.layers:
                if hasattr(layer, "record_past"):
                    layer.record_past = False
        index = torch.tensor([unique.index(prompt) for prompt in prompts], device=device)
        cache.reorder_cache(index)
        inputs = {
            "input_ids": input_ids[index],
            "attention_mask": attention_mask[index],
            "position_ids": position_ids.index_select(-2, index),
            "past_key_values": cache,
        }
    else:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **fields, **media}
        config = windows_as_forwarded(unwrapped_model)
        if takes_a_cache and config is not unwrapped_model.config:
            inputs["past_key_values"] = DynamicCache(config=config)  # that of `generate` would forget
    output = model.generate(**inputs, generation_config=generation_config)
    return output if isinstance(output, ModelOutput) else output[: len(prompts), input_ids.size(1) :]


def generate_in_parts(
    model: nn.Module,
    unwrapped_model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    parts: Sequence[Sequence[int]],
    generation_config: GenerationConfig,
    pad_token_id: int,
    device: torch.device,
    *,
    surplus: int = 0,
    **options,
) -> Any:
    """
    [`generate_completions`] for parts of the completions, one after the other.

    Args:
        model (`torch.nn.Module`):
            As in [`generate_completions`].
        unwrapped_model ([`~transformers.PreTrainedModel`]):
            As there.
        prompts (`Sequence[EncodedPrompt]`):
            Each completion's prompt, length `B`.
        parts (`Sequence[Sequence[int]]`):
            Indices of completions of each part, together all, as [`split_samples`] gives them.
        generation_config ([`~transformers.GenerationConfig`]):
            As there.
        pad_token_id (`int`):
            Id written on padding on either side.
        device (`torch.device`):
            As there.
        surplus (`int`, *optional*, defaults to `0`):
            How often to generate the last part again, for the sake of processes that have more parts.
        options:
            Further arguments of [`generate_completions`].

    Returns:
        `torch.Tensor`: Generated ids in the order of the prompts, shape `(B, N)`; of one part, what
        [`generate_completions`] returns.
    """
    outputs = []
    for part in [*parts, *[parts[-1]] * surplus]:
        own = [prompts[i] for i in part]
        outputs.append(
            generate_completions(model, unwrapped_model, own, generation_config, pad_token_id, device, **options)
        )
    if len(parts) == 1:
        return outputs[0]
    outputs = outputs[: len(parts)]
    longest = max(output.size(1) for output in outputs)
    order = torch.tensor([i for part in parts for i in part], device=outputs[0].device).argsort()
    return torch.cat([F.pad(each, (0, longest - each.size(1)), value=pad_token_id) for each in outputs])[order]


@contextmanager
def as_generation_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """
    Makes a generation config the model's own within the context.

    Where a config that is passed says nothing, `generate` takes what the checkpoint recommends, such as a repetition
    penalty.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model without wrappers.
        config ([`~transformers.GenerationConfig`]):
            Config.
    """
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


def _takes_a_cache(config: GenerationConfig, own: GenerationConfig) -> bool:
    """Whether `generate` can go on from a cache under these options, or the model's own where they say nothing."""

    def option(name):
        value = getattr(config, name)
        return getattr(own, name) if value is None else value

    own_cache = option("cache_implementation") not in (None, "hybrid") or option("use_cache") is False
    return not own_cache and option("prefill_chunk_size") is None and (option("num_beams") or 1) == 1


def _cacheable_tokens(model: PreTrainedModel, prompts: Sequence[EncodedPrompt]) -> int:
    """
    How much of the prompts a cache may hold before `generate` takes over: 1 for all of it (the last token is cropped
    again), -1 for all but the last token, 0 for nothing.
    """
    layer_types = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    is_known = layer_types <= {*masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, *POINTWISE_LAYERS}
    if not is_known or family_of(model).token_masks or _generates_from_media(model):
        return 0
    if layer_types <= ATTENTION_LAYERS:
        return 1
    # A recurrent state can't be cropped. Leaving the last token out is exact if no earlier one looks at it.
    sees_last = any(
        mask is not None and bool(mask[: len(prompt) - 1, len(prompt) - 1].any())
        for prompt in prompts
        for mask in linear_masks(model, prompt, 1).values()
    )
    return 0 if sees_last or min(map(len, prompts)) < 2 else -1


def _generates_from_media(model: PreTrainedModel) -> bool:
    """Whether `generate` of a family wants media also where a cache holds them."""
    model_class: Any = type(model)
    _, *parameters = inspect.signature(model_class.generate).parameters.values()
    named = (each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)
    return any(each.default is each.empty for each in named)


def trim_after_eos(completion_ids: torch.Tensor, eos_token_ids: Sequence[int]) -> list[list[int]]:
    """
    Cuts what follows the first end-of-sequence token of each completion.

    Args:
        completion_ids (`torch.Tensor`):
            Generated ids, shape `(B, N)`.
        eos_token_ids (`Sequence[int]`):
            Ids that end a completion.

    Returns:
        `list[list[int]]`: The completions, each with its end-of-sequence token if it has one.
    """
    lengths = up_to_first_end(completion_ids, eos_token_ids).sum(1).tolist()
    return [ids[:length] for ids, length in zip(completion_ids.tolist(), lengths, strict=True)]
