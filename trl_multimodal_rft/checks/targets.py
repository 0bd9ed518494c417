# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Selection of the prompts of a batch to check, and the same prompts with other media."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..encoding.prompts import EncodedPrompt
from ..families import MODALITIES, modality_of


# Most prompts with media of different shapes in one forward: which shapes affect each other depends on the strides of
# an encoder
_PARTNERS = 3

# Most integers in a tensor of sizes
_MOST_SIZES = 64


@dataclass(eq=False)
class Traits:
    """Facts about a prompt by which all ranks select those to check."""

    process: int
    index: int  # of the prompt on its process
    length: int
    shapes: str
    fingerprints: dict[str, float]  # of the media of each modality


def traits_of(process: int, index: int, prompt: EncodedPrompt) -> Traits:
    # Features of different grids and sizes may have one shape
    shapes = {
        name: value.tolist() if not value.is_floating_point() and value.numel() <= _MOST_SIZES else tuple(value.shape)
        for name, value in prompt.media.items()
    }
    fingerprints = {
        kind: sum(value.double().sum().item() for value in _features_of(prompt, kind).values())
        for kind in prompt.modalities
    }
    return Traits(process, index, len(prompt), repr(sorted(shapes.items())), fingerprints)


def choose(traits: Sequence[Traits]) -> tuple[list[Traits], dict[str, Traits], list[Traits]]:
    """
    The longest prompt of each modality and of text alone, whose masks are the hardest case; by modality, a prompt with
    another medium to swap in; and partners for a common forward: media of other shapes, and text alone, the shortest
    of each, whose padding may matter.
    """
    longest = sorted(traits, key=lambda each: -each.length)
    with_kind = {kind: found for kind in MODALITIES if (found := [t for t in longest if kind in t.fingerprints])}
    text = [each for each in longest if not each.fingerprints]
    candidates = dict.fromkeys([*(found[0] for found in with_kind.values()), *text[:1]])
    targets = sorted(candidates, key=lambda each: (not each.fingerprints, -each.length))
    donors = {}
    for kind, (first, *others) in with_kind.items():
        donor = next((o for o in others if o.fingerprints[kind] != first.fingerprints[kind]), None)
        if donor is not None:
            donors[kind] = donor
    others = [each for each in longest if each is not targets[0]]
    by_shape: dict[str, Traits] = {}
    for each in reversed(others):
        if each.fingerprints:
            by_shape.setdefault(each.shapes, each)
    different = [each for shapes, each in by_shape.items() if shapes != targets[0].shapes]
    # One of each modality, those of the target first
    kinds = sorted(MODALITIES, key=lambda kind: kind not in targets[0].fingerprints)
    of_kinds = [each for kind in kinds for each in [t for t in different if kind in t.fingerprints][:1]]
    different = list(dict.fromkeys([*of_kinds, *different]))[:_PARTNERS]
    return targets, donors, (different or list(by_shape.values())[:1]) + [each for each in text if each in others][-1:]


def with_other_media(prompt: EncodedPrompt, kind: str, donor: EncodedPrompt | None) -> EncodedPrompt:
    """
    A prompt with the features of another medium, in its shape; without a donor, with its features reversed.

    What is exactly 0 stays so, and nothing else becomes 0: some models take it for padding and drop it.
    """
    media, donated = dict(prompt.media), {} if donor is None else _features_of(donor, kind)
    for name, value in _features_of(prompt, kind).items():
        other = donated.get(name)
        if other is None or other.dim() != value.dim() or not other.numel():
            other = value.flip(tuple(range(value.dim())))
            other = 1 - other if value.is_floating_point() else other
        for dim, size in enumerate(value.shape):
            other = other.index_select(dim, torch.arange(size) % other.size(dim))
        media[name] = torch.where((value == 0) | (other == 0), value, other.to(value.dtype))
    return replace(prompt, media=media, mask_cache={}, on_device={})


def _features_of(prompt: EncodedPrompt, kind: str) -> dict[str, torch.Tensor]:
    """Features of a modality, without masks and sizes; codes, where a family has those instead."""
    tensors = {name: value for name, value in prompt.media.items() if value.dim() > 1 and "mask" not in name}
    of_kind = {name: value for name, value in tensors.items() if modality_of(name) == kind}
    of_kind = {name: value for name, value in of_kind.items() if "grid" not in name}
    floats, codes = (
        {name: value for name, value in of_kind.items() if value.is_floating_point() == is_float}
        for is_float in (True, False)
    )
    # Some families have videos in the tensors of images
    return floats or codes or {name: value for name, value in tensors.items() if value.is_floating_point()}
