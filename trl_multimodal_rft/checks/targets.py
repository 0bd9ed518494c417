# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Selection of the prompts of a batch to check, and the same prompts with other media."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from ..encoding.prompts import EncodedPrompt
from ..families import modality_of
from ..forward.masks import windows_reach
from ..modalities import MODALITIES


_Prompt = TypeVar("_Prompt", bound=EncodedPrompt)


# Maximum number of partners with media: prompts with media of other shapes, in one forward with the first target. One
# partner may not be enough, as the strides of an encoder decide which shapes affect each other.
_MOST_PARTNERS = 3

# Integer tensors with at most this many elements may hold sizes, so they are compared by value
_MOST_SIZES = 64


@dataclass(eq=False)
class Traits:
    """Facts about a prompt, by which all ranks select the same prompts to check."""

    process: int  # rank of the process that has the prompt
    index: int  # of the prompt on its process
    length: int  # in tokens
    shapes: str  # of the media tensors, with the values of small integer tensors
    fingerprints: dict[str, float]  # sum of all features, by modality


def traits_of(process: int, index: int, prompt: EncodedPrompt) -> Traits:
    # Grids and sizes count by value, since features of different grids may have the same shape
    shapes = {
        name: value.tolist() if not value.is_floating_point() and value.numel() <= _MOST_SIZES else tuple(value.shape)
        for name, value in prompt.media.items()
    }
    fingerprints = {
        modality: sum(value.double().sum().item() for value in _features_of(prompt, modality).values())
        for modality in prompt.modalities
    }
    return Traits(process, index, len(prompt), repr(sorted(shapes.items())), fingerprints)


def choose_prompts(traits: Sequence[Traits]) -> tuple[list[Traits], dict[str, Traits], list[Traits]]:
    """
    Returns prompts to check, donors of other media by modality, and partners for a common forward. The longest prompts
    have the hardest masks. Partners, the shortest prompts with media of other shapes and of text alone, get the most
    padding.
    """
    longest = sorted(traits, key=lambda trait: -trait.length)
    traits_by_modality: dict[str, list[Traits]] = {}
    for modality in MODALITIES:
        matches = [trait for trait in longest if modality in trait.fingerprints]
        if matches:
            traits_by_modality[modality] = matches
    text_only = [trait for trait in longest if not trait.fingerprints]
    candidates = dict.fromkeys([*(matches[0] for matches in traits_by_modality.values()), *text_only[:1]])
    targets = sorted(candidates, key=lambda trait: (not trait.fingerprints, -trait.length))
    donors = {}
    for modality, (first, *others) in traits_by_modality.items():
        donor = next((trait for trait in others if trait.fingerprints[modality] != first.fingerprints[modality]), None)
        if donor is not None:
            donors[modality] = donor
    non_first = [trait for trait in longest if trait is not targets[0]]
    shortest_of_shapes: dict[str, Traits] = {}
    for trait in reversed(non_first):
        if trait.fingerprints:
            shortest_of_shapes.setdefault(trait.shapes, trait)
    partners = [trait for shapes, trait in shortest_of_shapes.items() if shapes != targets[0].shapes]
    # One partner of each modality comes first, beginning with the modalities of the first target
    modalities = sorted(MODALITIES, key=lambda modality: modality not in targets[0].fingerprints)
    one_per_modality = []
    for modality in modalities:
        one_per_modality += [partner for partner in partners if modality in partner.fingerprints][:1]
    partners = list(dict.fromkeys([*one_per_modality, *partners]))[:_MOST_PARTNERS]
    # If all media have the shapes of the first target's, a prompt with these shapes is the partner
    return (
        targets,
        donors,
        (partners or list(shortest_of_shapes.values())[:1])
        + [trait for trait in text_only if trait in non_first][-1:],
    )


def with_other_media(prompt: EncodedPrompt, modality: str, donor: EncodedPrompt | None) -> EncodedPrompt:
    """
    Returns a prompt with a donor's features, cut or repeated to its shapes, or without a donor with its own reversed,
    and floats subtracted from 1, so that a uniform image changes. Zeros stay, and none arise, as some models drop
    zeros as padding.
    """
    media = dict(prompt.media)
    donor_features = {} if donor is None else _features_of(donor, modality)
    for name, value in _features_of(prompt, modality).items():
        new_value = donor_features.get(name)
        if new_value is None or new_value.dim() != value.dim() or not new_value.numel():
            new_value = value.flip(tuple(range(value.dim())))
            new_value = 1 - new_value if value.is_floating_point() else new_value
        for dim, size in enumerate(value.shape):
            new_value = new_value.index_select(dim, torch.arange(size) % new_value.size(dim))
        media[name] = torch.where((value == 0) | (new_value == 0), value, new_value.to(value.dtype))
    return replace(prompt, media=media, mask_cache={}, on_device={})


def longer_than_windows(model: PreTrainedModel, prompt: _Prompt, later: EncodedPrompt) -> _Prompt | None:
    """
    Returns a text prompt with repeats of its tokens at the start, so that it exceeds the start that shows the masks of
    text, see [`windows_reach`], since media in `later` may need other masks. `None` if it makes no difference or
    positions don't suffice.
    """
    reach = windows_reach(model)
    n_added = reach + 1 - len(prompt)
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    is_possible = most is None or reach + 1 + 2 * len(later) <= most  # text follows the media
    if reach <= 2 or prompt.media or not later.token_fields or n_added <= 0 or not is_possible:
        return None
    index = torch.arange(n_added) % len(prompt)
    first_position = prompt.position_ids[..., :1]
    return replace(
        prompt,
        input_ids=torch.cat([prompt.input_ids[index], prompt.input_ids]),
        token_fields={name: torch.cat([value[index], value]) for name, value in prompt.token_fields.items()},
        position_ids=torch.cat([first_position + torch.arange(n_added), prompt.position_ids + n_added], dim=-1),
        mask_cache={},
    )


def _features_of(prompt: EncodedPrompt, modality: str) -> dict[str, torch.Tensor]:
    """Returns a modality's features without masks and sizes, or its integer codes if the family has no features."""
    tensors = {name: value for name, value in prompt.media.items() if value.dim() > 1 and "mask" not in name}
    features = {name: value for name, value in tensors.items() if modality_of(name) == modality}
    features = {name: value for name, value in features.items() if "grid" not in name}  # sizes, not contents
    floats, codes = (
        {name: value for name, value in features.items() if value.is_floating_point() == is_float}
        for is_float in (True, False)
    )
    # Some families hold videos in the tensors of images, so that no tensor's name contains "video"
    return floats or codes or {name: value for name, value in tensors.items() if value.is_floating_point()}
