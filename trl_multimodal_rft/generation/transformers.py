# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sampling completions: each prompt and its media are prefilled once, whatever the number of completions."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, masking_utils
from transformers.cache_utils import DynamicLayer
from transformers.utils import ModelOutput

from ..algorithms.completions import up_to_first_end
from ..encoding.join import join_media
from ..encoding.prompts import EncodedPrompt
from ..families import family_of
from ..forward.layout import group_by_prompt
from ..forward.masks import ATTENTION_LAYERS, POINTWISE_LAYERS, linear_masks, windows_as_forwarded
from ..forward.scoring import left_pad, to_model


# Options that look at all tokens, among which gaps of a cache would be
_LOOKS_BACK = {
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "prompt_lookup_num_tokens": (None, 0),
}


@dataclass
class Branches:
    """
    Where completions stopped, so that generation can go on behind them from its cache, without prefilling them again.

    What generates fills it, and takes from it what it goes on with, as it does with a cache.

    Args:
        asked (`list[tuple[int, EncodedPrompt]]`, *optional*):
            For each prompt that is to be completed next, the place of the completion that it goes on with, and what
            was appended to that since. `None` at first.
        obstacle (`str`, *optional*):
            Why the latest were prefilled, if they weren't gone on with from the cache.
    """

    asked: list[tuple[int, EncodedPrompt]] | None = None
    obstacle: str | None = None

    def __post_init__(self):
        self._cache: Any = None
        self._mask: Any = None  # of what is in it, `(B, N)`
        # By the place of a completion its row, what was completed, and what of the completion is in the cache
        self._rows: dict[int, tuple[int, EncodedPrompt, list[int]]] = {}

    def keep(
        self,
        cache: DynamicCache,
        mask: torch.Tensor,
        prompts: Sequence[EncodedPrompt],
        completion_ids: torch.Tensor,
        eos_token_ids: Sequence[int],
    ) -> None:
        """Keeps what was generated `(B, N)` and the mask of what came before `(B, P)`."""
        sampled = up_to_first_end(completion_ids, eos_token_ids)[:, :-1]
        self._cache, self._mask = cache, torch.cat([mask, sampled.to(mask)], dim=1)
        places = range(len(prompts)) if self.asked is None else [place for place, _ in self.asked]
        self._rows = {
            place: (row, prompt, ids[:n])
            for row, (place, prompt, ids, n) in enumerate(
                zip(places, prompts, completion_ids.tolist(), sampled.sum(1).tolist(), strict=True)
            )
        }

    def take(
        self, model: PreTrainedModel, prompts: Sequence[EncodedPrompt]
    ) -> tuple[DynamicCache, torch.Tensor, list[EncodedPrompt]] | None:
        """
        The cache, its mask and what it lacks of the prompts, given away; `None` if the prompts must be prefilled
        again, as `obstacle` says why.
        """
        cache, mask, held = self._cache, self._mask, self._rows
        self._cache, self._mask, self._rows = None, None, {}
        if self.asked is None:
            return None
        self.obstacle = self._branch_obstacle(model, cache, held, prompts)
        if self.obstacle is not None:
            return None
        rests, rows = [], []
        for prompt, (place, turn) in zip(prompts, self.asked, strict=True):
            row, before, ids = held[place]
            n = len(before) + len(ids)
            fields = {name: value[n:] for name, value in prompt.token_fields.items()}
            positions = prompt.position_ids[..., n:]
            rests.append(EncodedPrompt(prompt.input_ids[n:], fields, turn.media, positions, row=prompt.row))
            rows.append(row)
        index = torch.tensor(rows, device=mask.device)
        cache.reorder_cache(index)
        return cache, mask[index], rests

    def _branch_obstacle(self, model, cache, held, prompts) -> str | None:
        """Why the cache doesn't hold what the prompts start with."""
        if cache is None:
            return "`generate` has used another cache"
        if any(type(layer) is not DynamicLayer for layer in cache.layers):
            return "its layers keep windows or states, from which padding can't be told"
        for prompt, (place, _) in zip(prompts, self.asked or (), strict=True):
            if place not in held:
                return "other completions were gone on with since"
            _, before, ids = held[place]
            tokens = torch.cat([before.input_ids, torch.tensor(ids, dtype=torch.long)])
            positions = torch.cat([before.position_ids, before.positions_after(len(ids))], dim=-1)
            n = len(tokens)
            if not torch.equal(prompt.input_ids[:n], tokens):
                return "what is to be completed doesn't start with what was sampled"
            now = prompt.position_ids[..., :n]
            if not torch.equal(now, positions.expand_as(now)):
                return "what tools returned moves the positions of what stands before it"
            if any(mask is not None for mask in linear_masks(model, prompt, 0).values()):
                return "its tokens see others than those before them"
        return None


def generate_completions(
    model: nn.Module,
    unwrapped_model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    generation_config: GenerationConfig,
    pad_token_id: int,
    device: torch.device,
    *,
    shared_prefill: bool = True,
    dummies: Sequence[EncodedPrompt] = (),
    branches: Branches | None = None,
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
        shared_prefill (`bool`, *optional*, defaults to `True`):
            Whether to prefill each prompt once.
        dummies (`Sequence[EncodedPrompt]`, *optional*):
            Further prompts that are prefilled, for the sake of their encoders, but not completed.
        branches ([`Branches`], *optional*):
            What to go on with, and where to keep what is generated, if it is to be gone on with.

    Returns:
        `torch.Tensor`: Generated ids after the prompts, shape `(B, N)`; or, with `return_dict_in_generate`, the whole
        output of `generate`, which may have rows of companions at the end.
    """
    unique = [*group_by_prompt(prompts), *dummies]
    takes_a_cache = _takes_a_cache(generation_config)
    shared_prefill = shared_prefill and takes_a_cache
    cached = _cacheable_tokens(unwrapped_model, unique) if shared_prefill else 0
    kept, past = None, None
    cache: Any = None
    if branches is not None:
        branches.obstacle = _cache_obstacle(unwrapped_model, generation_config, cached)
        if branches.obstacle is None:
            kept = branches
            past = branches.take(unwrapped_model, prompts)
    if past is not None:
        cache, _, unique = past
    rows = unique if cached else [*prompts, *dummies]
    batch = left_pad(rows, pad_token_id)
    input_ids, attention_mask, position_ids = (
        batch[name].to(device) for name in ("input_ids", "attention_mask", "position_ids")
    )
    fields = {name: value.to(device) for name, value in batch["fields"].items()}
    media = to_model(join_media(rows), unwrapped_model, device)
    seen = attention_mask[:, :0] if past is None else past[1]
    inputs: dict[str, Any]
    if cached:
        if cache is None:
            cache = DynamicCache(config=windows_as_forwarded(unwrapped_model))
        if cached > 0:
            cache.activate_past_recording()  # a sliding window would forget what cropping brings back
        stop = input_ids.size(1) + min(cached, 0)
        prefill = {name: value[:, :stop] for name, value in fields.items()}
        # The model's own forward, not its backbone's: under FSDP2 only the root gathers its parameters
        inputs = unwrapped_model.prepare_inputs_for_generation(
            input_ids[:, :stop],
            attention_mask=torch.cat([seen, attention_mask[:, :stop]], dim=1),
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
        index = torch.arange(len(prompts), device=device)
        if past is None:
            index = torch.tensor([unique.index(prompt) for prompt in prompts], device=device)
            cache.reorder_cache(index)
            seen = seen[index]
        inputs = {
            "input_ids": F.pad(input_ids[index], (seen.size(1), 0), value=pad_token_id),
            "attention_mask": torch.cat([seen, attention_mask[index]], dim=1),
            "position_ids": F.pad(position_ids.index_select(-2, index), (seen.size(1), 0)),
            "past_key_values": cache,
        }
    else:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **fields, **media}
        config = windows_as_forwarded(unwrapped_model)
        if takes_a_cache and config is not unwrapped_model.config:
            inputs["past_key_values"] = DynamicCache(config=config)  # that of `generate` would forget
    with as_generation_config(unwrapped_model, generation_config):
        output: Any = model.generate(**inputs, generation_config=generation_config)
    sequences = output["sequences"] if isinstance(output, ModelOutput) else output
    completion_ids = sequences[: len(prompts), inputs["input_ids"].size(1) :]
    if kept is not None and cache is not None and cache.get_seq_length() == sequences.size(1) - 1:
        ends = generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        kept.keep(cache, inputs["attention_mask"], prompts, completion_ids, ends)
    return output if isinstance(output, ModelOutput) else completion_ids


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
            Further arguments of [`generate_completions`]; `branches` for one part alone.

    Returns:
        `torch.Tensor`: Generated ids in the order of the prompts, shape `(B, N)`; of one part, what
        [`generate_completions`] returns.
    """
    outputs = []
    for part in [*parts, *[parts[-1]] * surplus]:
        own = [prompts[i] for i in part]
        with without_router_logits(unwrapped_model):
            output = generate_completions(
                model, unwrapped_model, own, generation_config, pad_token_id, device, **options
            )
        outputs.append(output)
    if len(parts) == 1:
        return outputs[0]
    outputs = outputs[: len(parts)]
    longest = max(output.size(1) for output in outputs)
    order = torch.tensor([i for part in parts for i in part], device=outputs[0].device).argsort()
    return torch.cat([F.pad(each, (0, longest - each.size(1)), value=pad_token_id) for each in outputs])[order]


@contextmanager
def without_router_logits(model: PreTrainedModel) -> Iterator[None]:
    """
    Turns `output_router_logits` of a config off within the context.

    `generate` would compute the load-balancing loss of each decoding step, which fails on padded prompts.
    """
    config = model.config.get_text_config(decoder=True)
    before = getattr(config, "output_router_logits", None)
    if before:
        config.output_router_logits = False
    try:
        yield
    finally:
        if before:
            config.output_router_logits = before


@contextmanager
def as_generation_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """
    Makes a generation config the model's own within the context.

    `generate` fills options that are `None` from the model's own config, so that a `min_p` or a repetition penalty
    that a checkpoint recommends would change the distribution that completions are sampled from.
    """
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


def _takes_a_cache(config: GenerationConfig) -> bool:
    """Whether `generate` can continue from a cache under these options."""
    own_cache = config.cache_implementation not in (None, "hybrid") or config.use_cache is False
    return not own_cache and config.prefill_chunk_size is None and (config.num_beams or 1) == 1


def _cache_obstacle(model: PreTrainedModel, config: GenerationConfig, cached: int) -> str | None:
    """
    Why no completion can go on from a cache, with gaps where others were longer. What prompts and caches have to do
    with it is seen by [`Branches.take`].
    """
    family = family_of(model)
    if cached != 1:
        return "its cache can't be shared by completions, or its layers carry states"
    if family.isolate is not None or family.blank_media:
        return "what media give depends on what is beside them"
    for name, neutral in _LOOKS_BACK.items():
        if getattr(config, name, None) not in neutral:
            return f"`{name}` looks at all tokens"
    return None


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
    """Cuts what follows the first end-of-sequence token of each completion of `(B, N)`."""
    lengths = up_to_first_end(completion_ids, eos_token_ids).sum(1).tolist()
    return [ids[:length] for ids, length in zip(completion_ids.tolist(), lengths, strict=True)]
