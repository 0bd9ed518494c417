# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Weights as checkpoints hold them, which is how vLLM knows them."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    GroupWeightRename,
    WeightConverter,
    WeightTransform,
    revert_weight_conversion,
)


def checkpoint_weights(
    model: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Turns weights of a model in memory into those of its checkpoint."""
    joining = [each for each in _converters(model) if len(each.source_patterns) > 1]
    joined = {}
    for name, weight in weights:
        if any(_takes(each, name) for each in joining):
            joined[name] = weight.clone()
        else:
            yield from _revert(model, {name: weight}).items()
    yield from _revert(model, joined).items()


def checkpoint_layer(model: PreTrainedModel, name: str) -> str | None:
    """The name that a layer has in its model's checkpoint."""
    weight = f"{name}.weight"
    if any(_takes(each, weight) for each in _converters(model)):
        return None
    [stored] = _revert(model, {weight: torch.empty(0)})
    return stored.removesuffix(".weight") if stored.endswith(".weight") else None


def _converters(model: PreTrainedModel) -> list[WeightTransform]:
    """What makes weights of the checkpoint of those in memory, beyond other names."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # not loaded, but built
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return [each.reverse_transform() for each in conversions if isinstance(each, WeightConverter)]


class _Exchange(GroupWeightRename):
    """Renames a weight without the others of its group, which tell what is converted: in memory, all is."""

    __slots__ = ()

    def reverse_transform(self) -> GroupWeightRename:
        renaming = super().reverse_transform()
        renaming._active = True
        return renaming


def _revert(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights as the checkpoint holds them, by themselves."""
    own: Any = model
    loaded = getattr(own, "_weight_conversions", None) or []
    if not any(isinstance(each, GroupWeightRename) for each in loaded):
        return revert_weight_conversion(model, weights)
    conversions = [copy.copy(each) for each in loaded]
    for each in conversions:
        if isinstance(each, GroupWeightRename):
            each.__class__ = _Exchange
    own._weight_conversions = conversions
    try:
        return revert_weight_conversion(model, weights)
    finally:
        own._weight_conversions = loaded


def _takes(converter: WeightTransform, name: str) -> bool:
    return converter.rename_source_key(name)[1] is not None
