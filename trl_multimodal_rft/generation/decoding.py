# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The loop that samples behind a cache, in place of that of transformers' `generate`."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

import torch
import torch.nn.functional as F
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from ..algorithms.completions import up_to_first_end
from ..forward.attention import decoded_by, takes_boolean_mask
from ..forward.decoding import Decoding
from .caches import GrowingLayer


# Tokens between two looks at whether all completions have ended, where the host would wait for the device
_TOKENS_PER_WAIT = {"cuda": 16, "xpu": 16}

# Options for which `generate` does more than to draw from the last token's logits, and their neutral values
_NEEDS_GENERATE = {
    **dict.fromkeys(("max_time", "stop_strings", "watermarking_config"), (None,)),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "token_healing"), (None, False)),
    **dict.fromkeys(("guidance_scale", "num_return_sequences"), (None, 1)),
}


def draws(config: GenerationConfig) -> bool:
    """Whether options ask for one token after the other, without beams, and without drafts from prompts."""
    return config.get_generation_mode() in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)


def decodes(model: PreTrainedModel, config: GenerationConfig) -> bool:
    """Whether [`decode`] gives what a model's `generate` gives with these options."""
    if not getattr(model.generate, "__module__", "").startswith("transformers."):
        return False
    return draws(config) and all(getattr(config, name, None) in neutral for name, neutral in _NEEDS_GENERATE.items())


def decode(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    layout: Decoding | None = None,
    keeps: bool = False,
    **inputs: torch.Tensor | Cache | bool | int | None,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """
    Continues prompts that a cache holds but for their last token: `custom_generate` of transformers' `generate`.

    Draws the same random numbers, so that the same seed gives the same tokens and leaves the generator in the same
    state. Completions that have ended leave the batch, unless their logits or the cache are asked for.

    Args:
        model, logits_processor, stopping_criteria, generation_config, inputs:
            What `generate` made of its arguments. Of the criteria, ends and the length are used, see [`decodes`].
        input_ids (`torch.LongTensor`):
            Left-padded prompts, shape `(B, P)`.
        layout, keeps ([`~forward.decoding.Decoding`], `bool`, *optional*):
            How prompts are shared, and whether the cache is used afterwards: it then holds all tokens but the last.

    Returns:
        `torch.Tensor`: Prompts and completions, `(B, P + N)`, or, with `return_dict_in_generate`, a
        [`~transformers.generation.GenerateDecoderOnlyOutput`] with them.
    """
    config, device, cache = generation_config, input_ids.device, cast(Cache, inputs["past_key_values"])
    start = n = input_ids.size(1)
    stop = cast(int, stopping_criteria.max_length)
    ends = next((each.eos_token_id.to(device) for each in stopping_criteria if hasattr(each, "eos_token_id")), None)
    pad = config.pad_token_id if config.pad_token_id is not None or ends is None else int(ends[0])
    kept: dict[str, list[torch.Tensor]]
    kept = {name: [] for name in ("logits", "scores") if getattr(config, f"output_{name}")}
    leaves = not (keeps or kept or (layout is not None and layout.room))
    ids, mask = F.pad(input_ids, (0, stop - n)), None if layout is not None else inputs.get("attention_mask")
    mask = None if mask is None else F.pad(cast(torch.Tensor, mask), (0, stop - n), value=1)
    if mask is not None and takes_boolean_mask(model) and all(type(layer) is GrowingLayer for layer in cache.layers):
        mask = mask.bool()[:, None, None]  # which the model otherwise makes for each token
    step = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **{**inputs, "attention_mask": None})
    step["position_ids"] = step["position_ids"].clone()
    finished, rows = torch.zeros(len(ids), dtype=torch.bool, device=device), None
    groups = 1 if layout is None else layout.n_prompts
    states, every = [], _TOKENS_PER_WAIT.get(device.type, 1)
    get_state, set_state = _random_state(device)
    with decoded_by(model, layout), getattr(model, "_optimize_model_for_decode", nullcontext)():
        while n < stop:
            if layout is not None:
                layout.advance()
            if mask is not None:
                step["attention_mask"] = mask[..., :n]
            logits = model(**step, return_dict=True).logits[:, -1].float()
            if rows is not None:
                logits = logits.new_zeros(len(ids), logits.size(-1)).index_copy_(0, rows, logits)
            scores, before = logits, ids[:, :n]
            for process in logits_processor:  # the list would inspect the signature of each, for each token
                scores = process(before, scores)
            for name, values in kept.items():
                values.append(logits if name == "logits" else scores)
            drawn = torch.multinomial(scores.softmax(-1), 1)[:, 0] if config.do_sample else scores.argmax(-1)
            if ends is not None:
                drawn = drawn.masked_fill(finished, pad)
                finished |= (drawn[:, None] == ends).any(-1)
            ids[:, n] = drawn
            n += 1
            step["input_ids"] = (drawn if rows is None else drawn[rows])[:, None]
            step["position_ids"].add_(1)
            if every > 1:
                states.append(get_state())
            if ends is None or ((n - start) % every and n < stop):
                continue
            ended = (finished if rows is None else finished[rows]).view(groups, -1)
            left = int((~ended).sum(1).max())  # of the prompt that has most
            if left == 0:
                surplus = n - start - int(up_to_first_end(ids[:, start:n], ends.tolist()).sum(1).max())
                if surplus:
                    set_state(states[-1 - surplus])
                    n -= surplus
                    if keeps:
                        cache.crop(-surplus)
                break
            states.clear()
            if leaves and n < stop and 2 * left <= ended.size(1):
                index = ended.byte().argsort(dim=1, stable=True)[:, :left]
                index = (index + torch.arange(groups, device=device)[:, None] * ended.size(1)).flatten()
                rows = index if rows is None else rows[index]
                cache.reorder_cache(cast(torch.LongTensor, index))
                step["input_ids"] = step["input_ids"][index]
                step["position_ids"] = step["position_ids"].index_select(-2, index)
                mask = None if mask is None else mask[index]
    if not config.return_dict_in_generate:
        return ids[:, :n]
    output = GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, ids[:, :n]), past_key_values=cache)
    for name, values in kept.items():
        output[name] = tuple(values[: n - start])
    return output


def _random_state(device: torch.device) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]:
    """What reads and sets the random state of a device."""
    if device.type == "cpu":
        return torch.get_rng_state, torch.set_rng_state
    module = torch.get_device_module(device)
    return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)
