# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prompts of a forward: their groups, the parts that need separate forwards, and padding."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal

import torch
import torch.nn.functional as F

from ..encoding.prompts import EncodedPrompt
from ..families import IMAGE_SIZES


def group_by_prompt(prompts: Sequence[EncodedPrompt]) -> dict[EncodedPrompt, list[int]]:
    """Returns the batch indices of each prompt's completions, with prompts in order of first appearance."""
    groups: dict[EncodedPrompt, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt.shared, []).append(index)
    return groups


def split_samples(prompts: Sequence[EncodedPrompt], isolate: Literal["media", "prompt"] | None) -> list[list[int]]:
    """
    Splits a batch into one part per forward, of ascending batch indices. With `isolate="media"`, prompts share it if
    their media join exactly (modalities, sizes, no padding), since some encoders have no mask for padding; with
    `"prompt"`, only completions of one prompt do.
    """
    if isolate is None:
        return [list(range(len(prompts)))]
    if isolate == "prompt":
        return list(group_by_prompt(prompts).values())
    parts: dict[tuple, list[int]] = {}
    text_only = []
    groups = group_by_prompt(prompts).values()
    for members in chain.from_iterable(_split_by_shapes(prompts, group) for group in groups):
        # The prompt's media, and the media of the completions' later turns, once each
        pieces = dict.fromkeys(chain.from_iterable(prompts[i].parts for i in members))
        pieces = [piece for piece in pieces if piece.media]
        if not pieces:
            text_only += members
            continue
        modalities = frozenset().union(*(prompts[i].modalities for i in members))
        # If the processor pads images to one shape, only the `IMAGE_SIZES` differ
        sizes = []
        for piece in pieces:
            sizes += [piece.media[name].tolist() for name in IMAGE_SIZES if name in piece.media]
        parts.setdefault((modalities, _shapes(pieces), repr(sizes)), []).extend(members)
    split = list(parts.values())
    if text_only:
        # Text has no cross-attention masks `(P, ...)` to join with those of other prompts, so it gets a separate part
        token_fields = chain.from_iterable(prompt.token_fields.values() for prompt in prompts)
        has_cross_attention_masks = any(values.dim() > 1 for values in token_fields)
        split = [*split, text_only] if has_cross_attention_masks or not split else [split[0] + text_only, *split[1:]]
    return [sorted(part) for part in split]


def _shapes(parts: Iterable[EncodedPrompt]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns the names and shapes of media tensors, without the dimension of media, once each and sorted."""
    media = chain.from_iterable(part.media.items() for part in parts)
    return (*sorted({(name, (*value.shape[1:],)) for name, value in media}),)


def _split_by_shapes(prompts: Sequence[EncodedPrompt], group: list[int]) -> list[list[int]]:
    by_shapes: dict[tuple, list[int]] = {}
    for i in group:
        by_shapes.setdefault(_shapes(prompts[i].parts), []).append(i)
    # A name occurs twice if its tensors have different shapes
    names = [name for name, _ in {*chain.from_iterable(by_shapes)}]
    return [group] if len(names) == len({*names}) else list(by_shapes.values())


def left_pad(prompts: Sequence[EncodedPrompt], pad_token_id: int) -> dict:
    """
    Returns a left-padded batch: ids and mask `(B, P)`, positions `(B, P)`, or `(R, B, P)` for multimodal rotary
    embeddings, and the token fields `(B, P, ...)` as `fields`.
    """
    longest = max(len(prompt) for prompt in prompts)
    gaps = [longest - len(prompt) for prompt in prompts]
    names = sorted(set().union(*(prompt.token_fields for prompt in prompts)))

    def stack(tensors: Sequence[torch.Tensor], value: int = 0) -> torch.Tensor:
        padded = [
            F.pad(t, (*(0, 0) * (t.dim() - 1), gap, 0), value=value) for t, gap in zip(tensors, gaps, strict=True)
        ]
        return torch.stack(padded)

    n_dims = max(prompt.position_ids.dim() for prompt in prompts)
    # `(R,)` if a prompt has multimodal positions, else `()`. Positions of other prompts are repeated for all axes.
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


def with_equal_dims(positions: list[torch.Tensor]) -> list[torch.Tensor]:
    """Expands positions `(1, n)` to `(R, 1, n)` if other positions have `R` axes, for multimodal rotary embeddings."""
    reference = max(positions, key=lambda p: p.dim())
    return [p if p.dim() == reference.dim() else p.expand(reference.size(0), *p.shape) for p in positions]


def to_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor from the host to a device, without waiting for the device to finish earlier work."""
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)


def rows_of(values: torch.Tensor, rows: slice | Sequence[int]) -> torch.Tensor:
    """Returns rows of a tensor without waiting for the device: a view if the rows are consecutive, else a copy."""
    if not isinstance(rows, slice):
        stop = rows[0] + len(rows) if rows else 0
        if list(rows) != list(range(stop - len(rows), stop)):
            return values.index_select(0, to_device(torch.tensor(rows), values.device))
        rows = slice(stop - len(rows), stop)
    return values[rows]
