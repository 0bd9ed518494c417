# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sampling with transformers: each prompt and its media are prefilled once for all its completions."""

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel, masking_utils
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.utils import ModelOutput

from ..algorithms.completions import up_to_first_end
from ..encoding.prompts import EncodedPrompt
from ..families import family_of
from ..forward.attention import decoding_obstacle
from ..forward.decoding import MASKED, Decoding
from ..forward.features import frozen_features
from ..forward.inputs import left_pad, media_inputs
from ..forward.layer_masks import Causal, span_mask
from ..forward.layout import group_by_prompt
from ..forward.masks import ATTENTION_LAYERS, POINTWISE_LAYERS, linear_masks, trees_of, windows_as_forwarded
from ..models.wrapped import replaced
from .caches import CompletionLayer, GrowingLayer, growing_cache, share_prompts, takes_completions
from .decoding import decode, decodes, draws


# Prefixes are prefilled first if that leaves at most this share of the tokens
_WORTH_PREFILLING = 0.9

# Completions share keys and values of prompts while they are decoded if these have at least so many tokens
_WORTH_SHARING = 64

# Options that look at all tokens, and their neutral values: tokens may be missing behind a cache
_LOOKS_BACK = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), (None, 1.0)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "prompt_lookup_num_tokens"), (None, 0)),
}


# By the place of a completion: its row in a cache, its prompt, and its tokens there
Rows = dict[int, tuple[int, EncodedPrompt, list[int]]]


@dataclass
class Branches:
    """
    The cache behind completions, so that generation can continue from it without prefilling them again.

    [`generate_completions`] fills it, and takes the cache out of it.
    """

    # For each prompt to complete next, the index of the completion that it continues, and what was appended to that;
    # `None` at first
    continuations: list[tuple[int, EncodedPrompt]] | None = None
    obstacle: str | None = None  # why the latest prompts were prefilled instead

    def __post_init__(self):
        self._cache: DynamicCache | None = None
        self._mask: torch.Tensor | None = None  # of what is in it, `(B, N)`
        self._rows: Rows = {}

    def keep(
        self,
        cache: DynamicCache,
        mask: torch.Tensor,
        prompts: Sequence[EncodedPrompt],
        completion_ids: torch.Tensor,
        eos_token_ids: Sequence[int],
    ) -> None:
        """Keeps a cache with completions `(B, N)` behind what `mask` `(B, P)` is of."""
        sampled = up_to_first_end(completion_ids, eos_token_ids)[:, :-1]
        self._cache, self._mask = cache, torch.cat([mask, sampled.to(mask)], dim=1)
        indices = range(len(prompts)) if self.continuations is None else [index for index, _ in self.continuations]
        self._rows = {
            index: (row, prompt, ids[:n])
            for row, (index, prompt, ids, n) in enumerate(
                zip(indices, prompts, completion_ids.tolist(), sampled.sum(1).tolist(), strict=True)
            )
        }

    def take(
        self, model: PreTrainedModel, prompts: Sequence[EncodedPrompt]
    ) -> tuple[DynamicCache, torch.Tensor, list[EncodedPrompt]] | None:
        """
        Hands out the cache, its mask, and the rest of the prompts behind it; `None`, with the reason as `obstacle`, if
        the prompts must be prefilled.
        """
        cache, mask, held = self._cache, self._mask, self._rows
        self._cache, self._mask, self._rows = None, None, {}
        if self.continuations is None:
            return None
        if cache is None or mask is None:
            self.obstacle = "`generate` has used another cache"
            return None
        self.obstacle = self._branch_obstacle(model, cache, held, prompts)
        if self.obstacle is not None:
            return None
        rests, rows = [], []
        for prompt, (parent, turn) in zip(prompts, self.continuations, strict=True):
            row, before, ids = held[parent]
            n = len(before) + len(ids)
            rests.append(replace(prompt.part(slice(n, None)), media=turn.media))
            rows.append(row)
        cache.layers = [layer.whole() if isinstance(layer, CompletionLayer) else layer for layer in cache.layers]
        index = torch.tensor(rows, device=mask.device)
        cache.reorder_cache(cast(torch.LongTensor, index))
        return cache, mask[index], rests

    def _branch_obstacle(
        self, model: PreTrainedModel, cache: DynamicCache, held: Rows, prompts: Sequence[EncodedPrompt]
    ) -> str | None:
        """Why the cache isn't that of the prompts' first tokens."""
        if any(not isinstance(layer, GrowingLayer) or layer.is_sliding for layer in cache.layers):
            return "its layers keep windows or states, which have no mask for padding"
        for prompt, (parent, _) in zip(prompts, self.continuations or (), strict=True):
            if parent not in held:
                return "other completions were continued since"
            _, before, ids = held[parent]
            tokens = torch.cat([before.input_ids, torch.tensor(ids, dtype=torch.long)])
            positions = torch.cat([before.position_ids, before.positions_after(len(ids))], dim=-1)
            n = len(tokens)
            if not torch.equal(prompt.input_ids[:n], tokens):
                return "the prompt doesn't start with what was sampled"
            now = prompt.position_ids[..., :n]
            if not torch.equal(now, positions.expand_as(now)):
                return "what tools returned changes earlier positions"
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
    shared_prefixes: bool = True,
    decoding_loop: bool = True,
    dummies: Sequence[EncodedPrompt] = (),
    branches: Branches | None = None,
) -> Any:
    """
    Generates a completion of each prompt, equal to that of `generate` on repeated prompts.

    Unique prompts are prefilled once, through the model's own forward, and the cache is expanded to their completions.
    With `shared_prefixes`, which takes one more forward, so is what they start with, see [`~forward.trees.Node`].
    Where the family or the options don't allow that, `generate` gets repeated prompts. `dummies` are prefilled, for
    the collectives in their encoders, but not completed. `branches` hold a cache to continue from, and get the new
    one.

    Returns ids after the prompts, `(B, N)`; or, with `return_dict_in_generate`, the whole output of `generate`, with
    rows of dummies at the end.
    """
    unique = [*group_by_prompt(prompts), *dummies]
    past, order = None, torch.tensor([unique.index(prompt) for prompt in prompts], device=device)
    loops, room = decoding_loop and decodes(unwrapped_model, generation_config), 0
    is_static = generation_config.cache_implementation == "static"
    shares = loops and _in_groups(order.tolist(), len(unique)) and shares_prompts(unwrapped_model, unique, is_static)
    if is_static and shares and branches is None and (generation_config.disable_compile or device.type == "cpu"):
        generation_config, room = copy.copy(generation_config), generation_config.max_new_tokens or 0
        generation_config.cache_implementation = None if room else "static"
    options = generation_config
    takes_a_cache = options.cache_implementation in (None, "hybrid") and options.use_cache is not False
    takes_a_cache = takes_a_cache and options.prefill_chunk_size is None and draws(options)
    cached = _cacheable_tokens(unwrapped_model, unique) if shared_prefill and takes_a_cache else 0
    obstacle = _cache_obstacle(unwrapped_model, generation_config, cached)
    if branches is not None:
        branches.obstacle = obstacle
        if obstacle is None and (past := branches.take(unwrapped_model, prompts)) is not None:
            order = None
        branches = branches if obstacle is None else None
    if past is None and obstacle is None and shared_prefixes:
        past = _prefilled_prefixes(model, unwrapped_model, unique, device, pad_token_id)
    rows = past[2] if past is not None else unique if cached else [*prompts, *dummies]
    batch, media = _batch(rows, unwrapped_model, device, pad_token_id)
    inputs: dict[str, Any]
    layout = None
    if cached:
        with frozen_features(unwrapped_model, rows):
            inputs = _prefill(model, unwrapped_model, batch, media, cached, past, pad_token_id)
        if order is not None:
            layout = _decoding(inputs, len(order), room) if shares else None
            _reorder(inputs, order, with_cache=layout is None)
    else:
        del batch["position_ids"]
        inputs = {**batch, **media}
        config = windows_as_forwarded(unwrapped_model)
        if takes_a_cache and config is not unwrapped_model.config:
            inputs["past_key_values"] = DynamicCache(config=config)  # the default one forgets what leaves a window
    with (
        frozen_features(unwrapped_model, () if cached else rows),
        as_generation_config(unwrapped_model, generation_config),
    ):
        generate = cast(Callable[..., torch.Tensor | ModelOutput], model.generate)
        if cached and loops:
            inputs["custom_generate"] = functools.partial(decode, layout=layout, keeps=branches is not None)
        output = generate(**inputs, generation_config=generation_config)
    sequences = output["sequences"] if isinstance(output, ModelOutput) else output
    completion_ids = sequences[: len(prompts), inputs["input_ids"].size(1) :]
    if branches is not None and inputs["past_key_values"].get_seq_length() == sequences.size(1) - 1:
        ends = generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        branches.keep(inputs["past_key_values"], inputs["attention_mask"], prompts, completion_ids, ends)
    return output if isinstance(output, ModelOutput) else completion_ids


def _batch(rows: Sequence[EncodedPrompt], model: PreTrainedModel, device: torch.device, pad_token_id: int) -> tuple:
    """Left-padded tensors per token, and the media, of rows."""
    batch = left_pad(rows, pad_token_id)
    batch = {**batch.pop("fields"), **batch}
    return {name: value.to(device) for name, value in batch.items()}, media_inputs(rows, model, device)


def _prefilled_prefixes(
    model: nn.Module,
    unwrapped_model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    device: torch.device,
    pad_token_id: int,
) -> tuple[DynamicCache, torch.Tensor, list[EncodedPrompt]] | None:
    """
    A cache of what prompts start with, with a row for each, its mask, and the rests of the prompts; `None` if that
    saves too little, or isn't exact.
    """
    trees = trees_of(unwrapped_model, prompts, [0] * len(prompts))
    layers = growing_cache(windows_as_forwarded(unwrapped_model)).layers
    if len(trees) == len(prompts) or any(type(layer) is not GrowingLayer for layer in layers):
        return None
    prefixes, rests, owner = [], {}, {}
    for number, tree in enumerate(trees):
        n = min(tree.stop, *(len(prompt) - 1 for prompt in tree.leaves))
        if n < 1 or any(_is_within_media(prompt, n) for prompt in tree.leaves):
            return None
        prefixes.append(tree.prompt.part(slice(n)))
        for prompt in tree.leaves:
            rests[prompt], owner[prompt] = prompt.part(slice(n, None)), number
    forwarded = sum(len(rows) * max(map(len, rows)) for rows in (prefixes, rests.values()))
    if forwarded > _WORTH_PREFILLING * len(prompts) * max(map(len, prompts)):
        return None
    order = torch.tensor([owner[prompt] for prompt in prompts], device=device)
    options = {"cached": 0, "past": None, "pad_token_id": pad_token_id}
    with frozen_features(unwrapped_model, prefixes):
        filled = _prefill(model, unwrapped_model, *_batch(prefixes, unwrapped_model, device, pad_token_id), **options)
    _reorder(filled, order)
    return filled["past_key_values"], filled["attention_mask"], [rests[prompt] for prompt in prompts]


def _is_within_media(prompt: EncodedPrompt, n: int) -> bool:
    """Whether the first `n` tokens of a prompt may hold a part of its media."""
    first, end = prompt.media_span or (0, len(prompt))
    return bool(prompt.media) and first < n < end


def _prefill(
    model: nn.Module,
    unwrapped_model: PreTrainedModel,
    batch: dict[str, torch.Tensor],
    media: dict[str, torch.Tensor],
    cached: int,
    past: tuple | None,
    pad_token_id: int,
) -> dict[str, Any]:
    """
    Fills a cache with prompts, or with what follows a `past` one, and returns the inputs with which `generate`
    continues. `cached` is from [`_cacheable_tokens`], or 0 to keep all tokens in the cache.
    """
    input_ids, attention_mask, position_ids = (
        batch.pop(name) for name in ("input_ids", "attention_mask", "position_ids")
    )
    if past is None:
        cache = growing_cache(windows_as_forwarded(unwrapped_model))
        seen = attention_mask[:, :0]
    else:
        cache, seen, _ = past
    if cached > 0:
        cache.activate_past_recording()  # a sliding window would forget what cropping brings back
    stop = input_ids.size(1) + min(cached, 0)
    # The model's own forward, not its backbone's: under FSDP2 only the root gathers its parameters
    inputs = unwrapped_model.prepare_inputs_for_generation(
        input_ids[:, :stop],
        attention_mask=torch.cat([seen, attention_mask[:, :stop]], dim=1),
        position_ids=position_ids[..., :stop],
        past_key_values=cache,
        use_cache=True,
        is_first_iteration=True,
        **{name: value[:, :stop] for name, value in batch.items()},
        **media,
    )
    model(**{**inputs, "logits_to_keep": 1})
    if cached > 0:
        cache.crop(-1)  # `generate` starts from one token
        for layer in cast(list[DynamicSlidingWindowLayer], cache.layers):
            if hasattr(layer, "record_past"):
                layer.record_past = False
    return {
        "input_ids": F.pad(input_ids, (seen.size(1), 0), value=pad_token_id),
        "attention_mask": torch.cat([seen, attention_mask], dim=1),
        "position_ids": F.pad(position_ids, (seen.size(1), 0)),
        "past_key_values": cache,
    }


def shares_prompts(model: PreTrainedModel, prompts: Sequence[EncodedPrompt], has_room: bool = False) -> bool:
    """Whether completions of prompts hold keys and values of these once, and whether caches have room for all."""
    if decoding_obstacle(model) is not None or not _cacheable_tokens(model, prompts):
        return False
    is_long = has_room or max(map(len, prompts)) > _WORTH_SHARING
    return is_long and takes_completions(growing_cache(windows_as_forwarded(model)), has_room)


def _in_groups(order: Sequence[int], n_prompts: int) -> bool:
    """Whether completions of a prompt follow each other, as many for each."""
    return len(order) % n_prompts == 0 and [*order] == [i * n_prompts // len(order) for i in range(len(order))]


def _decoding(inputs: dict[str, Any], n_rows: int, room: int) -> Decoding | None:
    """
    How `n_rows` completions share what the cache holds of prompts, which becomes one of completions, if they can and
    it pays, or if they have `room`.
    """
    cache, seen = inputs["past_key_values"], inputs["attention_mask"][:, : inputs["past_key_values"].get_seq_length()]
    if not room and len(seen) == n_rows:
        return None
    offset = torch.full((1,), -1, device=seen.device) if room else None
    shared = share_prompts(cache, n_rows, room, offset)
    padding = torch.zeros(seen.shape, device=seen.device).masked_fill(seen == 0, MASKED)[:, None, None]
    return Decoding(shared, None if bool(seen.all()) else padding, offset, room)


def _reorder(inputs: dict[str, Any], order: torch.Tensor, with_cache: bool = True) -> None:
    """Puts the rows of inputs of a model in an order."""
    if with_cache:
        inputs["past_key_values"].reorder_cache(cast(torch.LongTensor, order))
    inputs["position_ids"] = inputs["position_ids"].index_select(-2, order)
    for name in ("input_ids", "attention_mask"):
        inputs[name] = inputs[name][order]


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
    [`generate_completions`] for parts of the completions, whose indices are `parts`, one after the other.

    The last part is generated `surplus` times again, for ranks that have more parts. Returns ids in the order of the
    prompts, `(B, N)`; for one part, what [`generate_completions`] returns.
    """
    outputs = []
    for part in [*parts, *[parts[-1]] * surplus]:
        rows = [prompts[i] for i in part]
        with without_router_logits(unwrapped_model):
            outputs.append(
                generate_completions(model, unwrapped_model, rows, generation_config, pad_token_id, device, **options)
            )
    if len(parts) == 1:
        return outputs[0]
    outputs = outputs[: len(parts)]
    longest = max(output.size(1) for output in outputs)
    order = torch.tensor([i for part in parts for i in part], device=outputs[0].device).argsort()
    return torch.cat([F.pad(each, (0, longest - each.size(1)), value=pad_token_id) for each in outputs])[order]


def without_router_logits(model: PreTrainedModel) -> AbstractContextManager[None]:
    """
    Turns `output_router_logits` of a config off within the context: `generate` would compute the load-balancing loss
    of each decoding step, which fails on padded prompts.
    """
    config = model.config.get_text_config(decoder=True)
    is_on = getattr(config, "output_router_logits", False)
    return replaced(config, output_router_logits=False) if is_on else nullcontext()


def as_generation_config(model: PreTrainedModel, config: GenerationConfig) -> AbstractContextManager[None]:
    """
    Replaces a model's generation config within the context.

    `generate` fills options that are `None` from it, so that a `min_p` or a repetition penalty that a checkpoint
    recommends would change the distribution that completions are sampled from.
    """
    return replaced(model, generation_config=config)


def _cache_obstacle(model: PreTrainedModel, config: GenerationConfig, cached: int) -> str | None:
    """Why no completion can continue from a cache, as far as model and options show, else see [`Branches.take`]."""
    family = family_of(model)
    if cached != 1:
        return "its cache can't be shared by completions, or its layers carry states"
    if family.isolate is not None or family.blank_media:
        return "features of media depend on the batch"
    for name, neutral in _LOOKS_BACK.items():
        if getattr(config, name, None) not in neutral:
            return f"`{name}` looks at all tokens"
    return None


def _cacheable_tokens(model: PreTrainedModel, prompts: Sequence[EncodedPrompt]) -> int:
    """
    How much of the prompts to cache before `generate` continues: 1 for all of it (the last token is cropped again), -1
    for all but the last token, 0 for nothing.
    """
    layer_types = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    is_known = layer_types <= {*masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, *POINTWISE_LAYERS}
    if not is_known or family_of(model).token_masks or _generates_from_media(model):
        return 0
    if layer_types <= ATTENTION_LAYERS:
        return 1
    # A recurrent state can't be cropped. Leaving the last token out is exact if no earlier one attends to it.
    masks = [(prompt, mask) for prompt in prompts for mask in linear_masks(model, prompt, 1).values()]
    allowed = [(len(prompt), mask.prompt if isinstance(mask, Causal) else mask) for prompt, mask in masks]
    sees_last = any(each is not None and bool(span_mask(each[: n - 1], n)[:, -1].any()) for n, each in allowed)
    return 0 if sees_last or min(map(len, prompts)) < 2 else -1


def _generates_from_media(model: PreTrainedModel) -> bool:
    """Whether `generate` of a family requires media even with a cache."""
    _, *parameters = inspect.signature(cast(type[GenerationMixin], type(model)).generate).parameters.values()
    named = (each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)
    return any(each.default is each.empty for each in named)


def trim_after_eos(completion_ids: torch.Tensor, eos_token_ids: Sequence[int]) -> list[list[int]]:
    """Completions `(B, N)` up to their first end-of-sequence token."""
    lengths = up_to_first_end(completion_ids, eos_token_ids).sum(1).tolist()
    return [ids[:length] for ids, length in zip(completion_ids.tolist(), lengths, strict=True)]
