# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Per-token log-probabilities and entropies of completions: packed with a shared prefix, or padded."""

import inspect
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput, selective_log_softmax_and_entropy

from ..encoding.companions import CompanionPrompt
from ..encoding.prompts import EncodedPrompt, join_media
from ..families import family_of
from .layout import PackedRow, group_by_prompt, pack, split_samples
from .masks import linear_masks
from .scores import Scores


@contextmanager
def inject(decoder: nn.Module, **kwargs):
    """
    Overwrites keyword arguments of the text decoder within the context.

    The outer model sees ordinary inputs and merges media as usual, so nothing here depends on the family.

    Args:
        decoder (`torch.nn.Module`):
            The text decoder, `model.get_decoder()`.
        kwargs:
            What its forward is to receive.
    """

    def overwrite(module, args, received):
        return args, {**received, **kwargs}

    handle = decoder.register_forward_pre_hook(overwrite, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def completion_scores(
    model: nn.Module,
    unwrapped_model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    completion_ids: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    packed: bool = True,
    apart: Literal["media", "prompt"] | None = None,
    min_forwards: int = 1,
    output_router_logits: bool = False,
    value_head: nn.Module | None = None,
    logits_temperature: float | None = None,
) -> Scores:
    """
    Log-probabilities and entropies of completions, packed or padded.

    Args:
        model (`torch.nn.Module`):
            Model to call, as prepared by the accelerator, with TRL's fused LM head and, for `packed`,
            [`install_prefix_attention`] applied.
        unwrapped_model ([`~transformers.PreTrainedModel`]):
            The same model without wrappers.
        prompts (`Sequence[EncodedPrompt]`):
            Each completion's prompt, length `B`; those of a group hold the same object.
        completion_ids (`torch.Tensor`):
            Right-padded completions, shape `(B, C)`.
        completion_mask (`torch.Tensor`):
            1 on completion tokens, shape `(B, C)`.
        packed (`bool`, *optional*, defaults to `True`):
            Whether each prompt and its media are forwarded once for all its completions.
        apart (`str`, *optional*):
            Which prompts get forwards of their own: `"media"` those whose media don't join exactly, `"prompt"` all. By
            default all prompts share one.
        min_forwards (`int`, *optional*, defaults to `1`):
            With `apart`, how many forwards to run at least, so that processes of a sharded model run equally many.
            Surplus ones repeat the last and weigh nothing.
        output_router_logits (`bool`, *optional*, defaults to `False`):
            Whether to compute the load-balancing loss of a mixture of experts. Packed, prompt tokens count once in it,
            not once per completion.
        value_head (`torch.nn.Module`, *optional*):
            Head of a critic that shares the model, see [`~models.ValueHead`].
        logits_temperature (`float`, *optional*):
            Temperature of log-probabilities from the model's own logits, for models that change them behind the LM
            head in a way that TRL's fused head doesn't know. Keeps the logits of all completion tokens in memory. By
            default the fused head computes them, at its temperature.

    Returns:
        [`~forward.scores.Scores`]: Log-probabilities and entropies (`None` if the head computes none), 0 where the
        mask is 0, the auxiliary loss or `None`, and with a `value_head` the values.
    """
    score = packed_scores if packed else padded_scores

    def part(prompts, ids, mask):
        return score(model, unwrapped_model, prompts, ids, mask, output_router_logits, value_head, logits_temperature)

    return _in_parts(part, prompts, completion_ids, completion_mask, apart, min_forwards)


def completion_values(
    critic: nn.Module,
    unwrapped_model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    completion_ids: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    packed: bool = True,
    apart: Literal["media", "prompt"] | None = None,
    min_forwards: int = 1,
) -> torch.Tensor:
    """
    Values of the states before each completion token, packed or padded.

    Args:
        critic (`torch.nn.Module`):
            A [`~models.Critic`]: called like a model, with the ids first, it returns the value after every token.
        unwrapped_model ([`~transformers.PreTrainedModel`]):
            Its model.
        prompts (`Sequence[EncodedPrompt]`):
            Each completion's prompt, length `B`; those of a group hold the same object.
        completion_ids (`torch.Tensor`):
            Right-padded completions, shape `(B, C)`.
        completion_mask (`torch.Tensor`):
            1 on completion tokens, shape `(B, C)`.
        packed (`bool`, *optional*, defaults to `True`):
            See [`completion_scores`].
        apart (`str`, *optional*):
            See [`completion_scores`].
        min_forwards (`int`, *optional*, defaults to `1`):
            See [`completion_scores`].

    Returns:
        `torch.Tensor`: Values, shape `(B, C)`, 0 where the mask is 0.
    """

    def part(prompts, ids, mask):
        if packed:
            row, inputs = _packed_inputs(unwrapped_model, prompts, ids, mask)
            with inject(unwrapped_model.get_decoder(), prefix_layout=row.layout, position_ids=row.position_ids):
                values = critic(inputs.pop("input_ids"), **inputs)[0][row.score_index]
        else:
            # A state is that of the token before
            inputs = _padded_inputs(unwrapped_model, prompts, ids, mask)
            values = critic(inputs.pop("input_ids"), **inputs)[:, -ids.size(1) - 1 : -1]
        return Scores(values=torch.where(mask.bool(), values, 0.0))

    return _in_parts(part, prompts, completion_ids, completion_mask, apart, min_forwards).values


def _in_parts(score, prompts, completion_ids, completion_mask, apart, min_forwards) -> Scores:
    """Scores with as many forwards as `apart` asks for."""
    if apart is None:
        return score(prompts, completion_ids, completion_mask)
    parts = split_samples(prompts, apart)
    surplus = max(min_forwards - len(parts), 0)
    results = []
    for part in parts + parts[-1:] * surplus:
        results.append(score([prompts[i] for i in part], completion_ids[part], completion_mask[part]))
    # Companions count in no loss
    own = [
        replace(result, aux_loss=None) if _all_companions(prompts, part) else result
        for result, part in zip(results, parts, strict=False)
    ]
    joined = Scores.join(own, parts)
    # Surplus forwards weigh nothing, but have a backward like the others
    name, first = next(iter(joined.tensors().items()))
    zero = 0.0 * sum(result.tensors()[name].sum() for result in results[len(parts) :])
    setattr(joined, name, first + zero)
    return joined


def _all_companions(prompts, part) -> bool:
    return all(isinstance(prompts[i], CompanionPrompt) for i in part)


def packed_scores(
    model: nn.Module,
    unwrapped_model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    completion_ids: torch.Tensor,
    completion_mask: torch.Tensor,
    output_router_logits: bool = False,
    value_head: nn.Module | None = None,
    logits_temperature: float | None = None,
) -> Scores:
    """
    Scores completions in one row that holds each prompt, and its media, once.

    The shared forward is exact: every token sees what it would see in a row of its own. The idea of sharing a prefix
    in RL is that of [Prefix Grouper](https://huggingface.co/papers/2506.05433).

    Args:
        model (`nn.Module`):
            As in [`completion_scores`].
        unwrapped_model ([`~transformers.PreTrainedModel`]):
            As there.
        prompts (`Sequence[EncodedPrompt]`):
            As there.
        completion_ids (`torch.Tensor`):
            As there, shape `(B, C)`.
        completion_mask (`torch.Tensor`):
            As there, shape `(B, C)`.
        output_router_logits (`bool`, *optional*, defaults to `False`):
            As there.
        value_head (`nn.Module`, *optional*):
            As there.
        logits_temperature (`float`, *optional*):
            As there.

    Returns:
        [`~forward.scores.Scores`]: As there.
    """
    row, inputs = _packed_inputs(unwrapped_model, prompts, completion_ids, completion_mask)
    router, mask = {}, {}
    if output_router_logits:
        segments = [segment for segment in row.layout.segments if segment[3] == 0]
        uncounted = torch.zeros_like(row.input_ids, dtype=torch.bool)
        for prompt, (start, length, _, _) in zip(row.prompts, segments, strict=True):
            uncounted[0, start : start + length] = isinstance(prompt, CompanionPrompt)
        router, mask = {"output_router_logits": True}, _uncount(uncounted, inputs)
    with (
        inject(unwrapped_model.get_decoder(), prefix_layout=row.layout, position_ids=row.position_ids, **mask),
        _last_hidden_states(unwrapped_model) as hidden,
    ):
        if logits_temperature is None:
            outputs = model(**inputs, **router, shift_labels=row.shift_labels, fused_lm_head=True)
        else:
            kept = (row.shift_labels[0] != -100).nonzero()[:, 0]
            outputs = _own_scores(
                model, unwrapped_model, {**inputs, **router}, kept, row.shift_labels, logits_temperature
            )

    def unpack(values):
        return torch.where(completion_mask.bool(), values[0][row.score_index], 0.0)

    return Scores(
        logps=unpack(outputs.log_probs),
        entropies=None if outputs.entropy is None else unpack(outputs.entropy),
        values=None if value_head is None else unpack(value_head(hidden[0])),
        aux_loss=outputs.aux_loss,
    )


def padded_scores(
    model: nn.Module,
    unwrapped_model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    completion_ids: torch.Tensor,
    completion_mask: torch.Tensor,
    output_router_logits: bool = False,
    value_head: nn.Module | None = None,
    logits_temperature: float | None = None,
) -> Scores:
    """
    Scores completions with one padded row per completion, as TRL does, for media of every kind.

    For models whose completions can't share their prompt, and for prompts too short to gain from it.

    Args:
        model (`nn.Module`):
            As in [`completion_scores`].
        unwrapped_model ([`~transformers.PreTrainedModel`]):
            As there.
        prompts (`Sequence[EncodedPrompt]`):
            As there.
        completion_ids (`torch.Tensor`):
            As there, shape `(B, C)`.
        completion_mask (`torch.Tensor`):
            As there, shape `(B, C)`.
        output_router_logits (`bool`, *optional*, defaults to `False`):
            As there.
        value_head (`nn.Module`, *optional*):
            As there.
        logits_temperature (`float`, *optional*):
            As there.

    Returns:
        [`~forward.scores.Scores`]: As there.
    """
    n_new = completion_ids.size(1)
    inputs = _padded_inputs(unwrapped_model, prompts, completion_ids, completion_mask)
    # Each position predicts the next token; prompts aren't scored
    predicts = slice(-n_new - 1, -1)
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[:, predicts] = completion_ids.masked_fill(completion_mask == 0, -100)
    router, mask = {}, {}
    if output_router_logits:
        uncounted = torch.tensor([[isinstance(prompt, CompanionPrompt)] for prompt in prompts], device=labels.device)
        router, mask = {"output_router_logits": True}, _uncount(uncounted, inputs)
    with inject(unwrapped_model.get_decoder(), **mask), _last_hidden_states(unwrapped_model) as hidden:
        if logits_temperature is None:
            outputs = model(**inputs, **router, shift_labels=labels, fused_lm_head=True)
        else:
            kept = torch.arange(labels.size(1), device=labels.device)[predicts]
            outputs = _own_scores(model, unwrapped_model, {**inputs, **router}, kept, labels, logits_temperature)
    values = None
    if value_head is not None:
        values = torch.where(completion_mask.bool(), value_head(hidden[0])[:, predicts], 0.0)
    return Scores(
        logps=outputs.log_probs[:, predicts],
        entropies=None if outputs.entropy is None else outputs.entropy[:, predicts],
        values=values,
        aux_loss=outputs.aux_loss,
    )


def _own_scores(model, unwrapped_model, inputs, kept, labels, temperature: float) -> Any:
    """What TRL's fused head returns with `shift_labels`, from the model's own logits at the kept positions."""
    part = takes_logits_to_keep(unwrapped_model)
    outputs = model(**inputs, use_cache=False, **({"logits_to_keep": kept} if part else {}))
    logits = outputs.logits if part else outputs.logits[:, kept]
    kept_labels = labels[:, kept]
    logps, entropies = selective_log_softmax_and_entropy(
        logits.float(), kept_labels.clamp(min=0), temperature=temperature
    )

    def spread(values):
        everywhere = values.new_zeros(labels.shape)
        return everywhere.index_copy(1, kept, torch.where(kept_labels != -100, values, 0.0))

    return FusedCausalLMOutput(
        log_probs=spread(logps), entropy=spread(entropies), aux_loss=getattr(outputs, "aux_loss", None)
    )


def takes_logits_to_keep(model: PreTrainedModel) -> bool:
    """
    Whether a model's forward can leave out logits.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Unwrapped model.

    Returns:
        `bool`: Whether it has the argument `logits_to_keep`.
    """
    return "logits_to_keep" in inspect.signature(type(model).forward).parameters


def _uncount(tokens: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Takes tokens out of the load-balancing loss by the inputs' mask; returns the mask for the decoder."""
    mask = inputs["attention_mask"]
    if not tokens.any() or tokens.all():
        return {}
    inputs["attention_mask"] = mask.masked_fill(tokens, 0)
    return {"attention_mask": mask}


@contextmanager
def _last_hidden_states(model: PreTrainedModel):
    """What the LM head gets, of each forward within the context."""
    hidden = []
    handle = model.base_model.register_forward_hook(lambda module, args, output: hidden.append(output[0]))
    try:
        yield hidden
    finally:
        handle.remove()


def _packed_inputs(model, prompts, completion_ids, completion_mask) -> tuple[PackedRow, dict[str, torch.Tensor]]:
    """The packed row, and what a forward takes."""
    longest = int(completion_mask.sum(1).max())
    masks = [linear_masks(model, prompt, longest) for prompt in group_by_prompt(prompts)]
    row = pack(prompts, completion_ids, completion_mask, masks, family_of(model).token_field_fill)
    inputs = {
        "input_ids": row.input_ids,
        "attention_mask": torch.ones_like(row.input_ids),
        "position_ids": row.position_ids,
        **to_model(join_media(row.prompts), model, completion_ids.device),
        **row.token_fields,
    }
    return row, inputs


def _padded_inputs(model, prompts, completion_ids, completion_mask) -> dict[str, torch.Tensor]:
    """What a forward takes, one row per completion."""
    device = completion_ids.device
    n_new = completion_ids.size(1)
    fill = family_of(model).token_field_fill
    batch = left_pad(prompts, model.config.get_text_config().pad_token_id or 0)
    positions = batch["position_ids"].to(device)
    fields = {
        name: F.pad(value, (0, n_new), value=fill.get(name, 0)).to(device) for name, value in batch["fields"].items()
    }
    return {
        "input_ids": torch.cat([batch["input_ids"].to(device), completion_ids], dim=1),
        "attention_mask": torch.cat([batch["attention_mask"].to(device), completion_mask], dim=1),
        "position_ids": torch.cat([positions, positions[..., -1:] + 1 + torch.arange(n_new, device=device)], dim=-1),
        **to_model(join_media(prompts), model, device),
        **fields,
    }


def left_pad(prompts: Sequence[EncodedPrompt], pad_token_id: int) -> dict:
    """
    Prompts as a left-padded batch.

    Args:
        prompts (`Sequence[EncodedPrompt]`):
            The rows, length `B`.
        pad_token_id (`int`):
            Id written on padding.

    Returns:
        `dict`: `input_ids` and `attention_mask` of shape `(B, P)`, `position_ids` of shape `(B, P)` or `(R, B, P)`,
        and `fields` with the token fields, each `(B, P)`.
    """
    longest = max(len(prompt) for prompt in prompts)
    gaps = [longest - len(prompt) for prompt in prompts]
    names = sorted({name for prompt in prompts for name in prompt.token_fields})

    def stack(tensors, value=0):
        return torch.stack([F.pad(t, (gap, 0), value=value) for t, gap in zip(tensors, gaps, strict=True)])

    n_dims = max(prompt.position_ids.dim() for prompt in prompts)
    axes = next(prompt.position_ids.shape[:-2] for prompt in prompts if prompt.position_ids.dim() == n_dims)
    positions = [
        F.pad(prompt.position_ids.expand(*axes, 1, -1), (gap, 0)) for prompt, gap in zip(prompts, gaps, strict=True)
    ]
    return {
        "input_ids": stack([prompt.input_ids for prompt in prompts], pad_token_id),
        "attention_mask": stack([torch.ones_like(prompt.input_ids) for prompt in prompts]),
        "position_ids": torch.cat(positions, dim=-2),
        "fields": {
            name: stack([p.token_fields.get(name, torch.zeros_like(p.input_ids)) for p in prompts]) for name in names
        },
    }


def to_model(media: dict[str, torch.Tensor], model: PreTrainedModel, device: torch.device) -> dict[str, torch.Tensor]:
    """
    Moves media to a device and, where they are features, to the model's dtype.

    Args:
        media (`dict[str, torch.Tensor]`):
            Media arguments of a forward.
        model ([`~transformers.PreTrainedModel`]):
            Unwrapped model.
        device (`torch.device`):
            Where the forward runs.

    Returns:
        `dict[str, torch.Tensor]`: The moved tensors.
    """
    return {
        name: value.to(device, model.dtype if value.is_floating_point() else value.dtype)
        for name, value in media.items()
    }
