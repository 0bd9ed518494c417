# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Weights with the names and shapes of checkpoints, which vLLM loads."""

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import is_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    GroupWeightRename,
    WeightConverter,
    WeightTransform,
    revert_weight_conversion,
)

from ..models.wrapped import replaced


# What wrappers of adapters and of checkpointing add to the names of weights
_WRAPPERS = (".base_layer", "modules_to_save.default.", "_checkpoint_wrapped_module.")

# Of each model's weights by name: the name in the checkpoint and 0; where it is converted beyond renaming, the group
# of weights that are converted together, and their number
_targets_of: WeakKeyDictionary[PreTrainedModel, dict[str, tuple[str, float]]] = WeakKeyDictionary()


def checkpoint_weights(
    model: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Converts weights of a model in memory to those of its checkpoint."""
    groups: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, weight in weights:
        target, size = _target(model, name)
        if size == 0:
            yield target, weight
        elif size == 1:
            yield from _revert(model, {name: weight}).items()
        else:
            groups[target][name] = weight.clone()
            if len(groups[target]) == size:
                yield from _revert(model, groups.pop(target)).items()
    for group in groups.values():
        yield from _revert(model, group).items()


def gathered_weights(
    module: nn.Module, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Weights of a model that FSDP2 has sharded, cast as for a forward: before they are gathered. All ranks must call it.
    """
    for name, parameter in module.named_parameters():
        for part in _WRAPPERS:
            name = name.replace(part, "")
        # Adapters are merged, and beside a layer of `modules_to_save` is the one that it replaces
        if is_peft_model(module) and (cast(str, module.prefix) in name or "original_module" in name):
            continue
        shard = parameter.detach()
        shard = shard.to(dtype) if shard.is_floating_point() else shard
        yield name.removeprefix("base_model.model."), cast(DTensor, shard.to(device)).full_tensor()


def checkpoint_layer(model: PreTrainedModel, name: str) -> str | None:
    """The name of a layer in its model's checkpoint; `None` if its weight is converted beyond renaming."""
    stored, size = _target(model, f"{name}.weight")
    return stored.removesuffix(".weight") if size == 0 and stored.endswith(".weight") else None


def load_and_find_unread(
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], Any], weights: Iterable[tuple[str, torch.Tensor]]
) -> list[str]:
    """Loads weights, and returns the names of those that no operation read. Views of a weight don't read it."""
    with _Reads() as reads:
        given = reads.give(weights)
        load(given)
        for _ in given:  # what it didn't ask for
            pass
    return [name for name, _ in reads.unread.values()]


# What operations take and return: tensors, and others, in containers
Tree = torch.Tensor | tuple | list | dict[str, Any] | float | None


class _Reads(TorchDispatchMode):
    """Finds out which weights are read. It holds the others, so that nothing else gets their memory."""

    def __init__(self):
        super().__init__()
        self.unread: dict[int, tuple[str, torch.Tensor]] = {}  # names and weights by their memory
        self._is_loading = True

    def give(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Gives copies of weights, which share no memory."""
        self._is_loading = False  # what makes the weights may have tensors without memory
        for name, weight in weights:
            copied = weight.clone()
            if copied.numel():
                self.unread[copied.untyped_storage().data_ptr()] = name, copied
            self._is_loading = True
            yield name, copied
            self._is_loading = False
        self._is_loading = True

    def __torch_dispatch__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Tree:
        output = func(*args, **(kwargs or {}))
        if self._is_loading:
            for place in _memory((args, kwargs)) - _memory(output):
                self.unread.pop(place, None)
        return output


def _memory(values: Tree) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tree_leaves(values) if isinstance(each, torch.Tensor)}


def _target(model: PreTrainedModel, name: str) -> tuple[str, float]:
    """A weight's entry in `_targets_of`."""
    targets = _targets_of.get(model)
    if targets is None:
        names = [each for each, _ in model.named_parameters()]
        for part in _WRAPPERS:
            names = [each.replace(part, "") for each in names]
        targets = _targets_of[model] = _find_targets(model, names)
    if name not in targets:
        targets |= _find_targets(model, [name], complete=False)
    return targets[name]


def _find_targets(model: PreTrainedModel, names: list[str], complete: bool = True) -> dict[str, tuple[str, float]]:
    """The entries of weights, of all the model's with `complete`."""
    converters = _converters(model)
    groups, joins = {}, {}
    for name in names:
        for converter in converters:
            group, source = converter.rename_source_key(name)
            if source is not None:
                groups[name], joins[name] = group, len(converter.source_patterns) > 1
                break
    sizes = Counter(groups.values())
    # A group of unknown size is complete when no more weights follow
    found = {
        name: (group, sizes[group] if complete else math.inf if joins[name] else 1) for name, group in groups.items()
    }
    markers = {name: torch.empty(0) for name in names if name not in groups}
    names_of = {id(marker): name for name, marker in markers.items()}
    found |= {names_of[id(marker)]: (stored, 0) for stored, marker in _revert(model, markers).items()}
    return found


def _converters(model: PreTrainedModel) -> list[WeightTransform]:
    """Conversions from the checkpoint, other than renaming, reversed."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # built from a config, not loaded
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return [each.reverse_transform() for each in conversions[::-1] if isinstance(each, WeightConverter)]


class _Exchange(GroupWeightRename):
    """Renames a weight without the others of its group, by which it tells whether weights are renamed already."""

    __slots__ = ()

    def reverse_transform(self) -> GroupWeightRename:
        renaming = super().reverse_transform()
        renaming._active = True
        return renaming


def _revert(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Some weights as the checkpoint holds them."""
    # Before transformers 5.21, conversions don't know that a thinker is a part of the model that vLLM loads
    prefix = "thinker." if model.base_model_prefix == "thinker" else ""
    return {prefix + name: weight for name, weight in _revert_conversions(model, weights).items()}


def _revert_conversions(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Reverts each weight by itself, whichever others of its group it comes with."""
    loaded = vars(model).get("_weight_conversions") or []
    if not any(isinstance(each, GroupWeightRename) for each in loaded):
        return revert_weight_conversion(model, weights)
    conversions = [copy.copy(each) for each in loaded]
    for each in conversions:
        if isinstance(each, GroupWeightRename):
            each.__class__ = _Exchange
    with replaced(model, _weight_conversions=conversions):
        return revert_weight_conversion(model, weights)
