# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Functions that compare prompts, and that join their tokens and media for one forward."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..data.reading.refs import MediaRef
from ..families import family_of
from .media import join_tensors
from .prompts import EncodedPrompt


def same_prompt(a: Any, b: Any) -> bool:
    """
    Returns whether two prompts have equal messages and media. Media are compared by value, but decoder objects, which
    have no equality, by class.
    """
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (np.ndarray, PIL.Image.Image)) and type(a) is type(b):
        return np.array_equal(np.asarray(a), np.asarray(b))
    if isinstance(a, MediaRef) and isinstance(b, MediaRef):
        return same_prompt(a.source, b.source) and a.options == b.options
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_prompt(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same_prompt(x, y) for x, y in zip(a, b, strict=True))
    if type(a).__eq__ is object.__eq__:
        return type(a) is type(b)
    return type(a) is type(b) and a == b


def content_digest(messages: Sequence[dict[str, Any]]) -> str:
    """Returns a hash of messages and their stored media. Equal content of equal types has the same hash."""
    text = json.dumps(messages, sort_keys=True, default=_for_json)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _for_json(value: MediaRef | np.ndarray | torch.Tensor | PIL.Image.Image | bytes) -> list[Any]:
    if isinstance(value, MediaRef):
        return [value.modality, value.stored, value.options]
    if isinstance(value, (np.ndarray, torch.Tensor, PIL.Image.Image)):
        array = np.asarray(value)
        return [str(array.dtype), array.shape, array.tobytes().hex()]
    return [type(value).__name__, value.hex() if isinstance(value, bytes) else str(value)]


def common_start(first: EncodedPrompt, token_ids: Sequence[list[int]]) -> tuple[EncodedPrompt, list[list[int]]]:
    """
    Splits sequences after their longest common prefix: `[1, 2, 3]` and `[1, 2, 4]` into `[1, 2]`, `[3]` and `[4]`.
    `token_ids` have one placeholder per medium, and `first` is the first sequence, with the media that all share.
    """
    n = next(
        (i for i, column_ids in enumerate(zip(*token_ids, strict=False)) if len({*column_ids}) > 1),
        min(map(len, token_ids)),
    )
    # `first` is longer than `token_ids[0]`, because placeholders are expanded
    end = len(first) - len(token_ids[0]) + n
    if n == 0 or first.input_ids[end:].tolist() != token_ids[0][n:]:
        raise ValueError("the sequences have no first token in common, or their media differ")
    return first.part(slice(end)), [ids[n:] for ids in token_ids]


def continued_field(model: PreTrainedModel, name: str, values: torch.Tensor, n_new: int) -> torch.Tensor:
    """
    Extends a token field of prompts `(B, P, ...)` by `n_new` text tokens, to `(B, P + n_new, ...)`. A mask of
    cross-attention repeats the last token's value. In other fields, new tokens get the field's value for text.
    """
    family = family_of(model)
    new = values[:, -1:]
    if name not in family.token_masks:
        new = torch.full_like(new, family.token_field_fill.get(name, 0))
    return torch.cat([values, new.expand(-1, n_new, *new.shape[2:])], dim=1)


def padded(ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns right-padded ids of completions, `(B, C)`, and their mask, `(B, C)`."""
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    return pad_sequence([*ids], batch_first=True), mask


def join_media(prompts: Iterable[EncodedPrompt]) -> dict[str, torch.Tensor]:
    """Joins the media of prompts for one forward, see [`~encoding.media.join_tensors`]."""
    return join_tensors(prompt.media for prompt in prompts)
