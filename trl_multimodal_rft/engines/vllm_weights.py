# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Conversion of weights to the names and shapes of checkpoints, as vLLM loads them."""

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


# Parts of weight names that adapters and activation checkpointing add
_WRAPPERS = (".base_layer", "modules_to_save.default.", "_checkpoint_wrapped_module.")

# (target, size) of each weight, by model and by name in memory. If a weight is only renamed, the target is its name in
# the checkpoint, and the size is 0. Other weights are converted in groups: the target is the group's name, and the
# size is the number of its weights, infinite if unknown. For example, `q`, `k` and `v`, which are one weight `qkv` in
# the checkpoint, have the entry ("qkv", 3)
_targets_of: WeakKeyDictionary[PreTrainedModel, dict[str, tuple[str, float]]] = WeakKeyDictionary()


def checkpoint_weights(
    model: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Converts the weights of a model in memory to the weights of its checkpoint."""
    groups: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, weight in weights:
        target, size = _target(model, name)
        if size == 0:
            yield target, weight
        elif size == 1:
            yield from _revert(model, {name: weight}).items()
        else:
            # A copy, since the weight's memory may be written again before the group is complete
            groups[target][name] = weight.clone()
            if len(groups[target]) == size:
                yield from _revert(model, groups.pop(target)).items()
    for group in groups.values():  # groups of unknown size
        yield from _revert(model, group).items()


def gathered_weights(
    module: nn.Module, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yields the unsharded weights of an FSDP2 model, cast to `dtype` before the all-gather, as in a forward. All ranks
    must call this.
    """
    for name, parameter in module.named_parameters():
        for part in _WRAPPERS:
            name = name.replace(part, "")
        # Left out: adapters, which are merged, and original modules, which `modules_to_save` replaces
        if is_peft_model(module) and (cast(str, module.prefix) in name or "original_module" in name):
            continue
        shard = parameter.detach()
        shard = shard.to(dtype) if shard.is_floating_point() else shard
        yield name.removeprefix("base_model.model."), cast(DTensor, shard.to(device)).full_tensor()


def checkpoint_layer(model: PreTrainedModel, name: str) -> str | None:
    """Returns the name of a layer in its model's checkpoint, `None` if its weight is converted, not only renamed."""
    checkpoint_name, size = _target(model, f"{name}.weight")
    return checkpoint_name.removesuffix(".weight") if size == 0 and checkpoint_name.endswith(".weight") else None


def load_and_find_unread(
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], Any], weights: Iterable[tuple[str, torch.Tensor]]
) -> list[str]:
    """Calls `load` with weights, and returns the names of weights that no operation reads. Slicing isn't reading."""
    with _ReadRecorder() as reads:
        copies = reads.track(weights)
        load(copies)
        for _ in copies:  # weights that `load` didn't ask for are unread, too
            pass
    return [name for name, _ in reads.unread.values()]


# Arguments and results of operations: tensors and other values, in containers
Tree = torch.Tensor | tuple | list | dict[str, Any] | float | None


class _ReadRecorder(TorchDispatchMode):
    """Mode that records the unread weights. References to them keep other tensors from reusing their memory."""

    def __init__(self):
        super().__init__()
        self.unread: dict[int, tuple[str, torch.Tensor]] = {}  # names and weights by memory address
        self._is_loading = True

    def track(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The copies share no memory."""
        # Operations of `weights` that produce the next weight aren't recorded, as their tensors may have no address,
        # such as a DTensor's
        self._is_loading = False
        for name, weight in weights:
            weight_copy = weight.clone()
            if weight_copy.numel():
                self.unread[weight_copy.untyped_storage().data_ptr()] = name, weight_copy
            self._is_loading = True
            yield name, weight_copy
            self._is_loading = False
        self._is_loading = True

    def __torch_dispatch__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Tree:
        output = func(*args, **(kwargs or {}))
        if self._is_loading:
            # An output in the memory of an input, such as a slice, is a view, which reads nothing
            for address in _memory_addresses((args, kwargs)) - _memory_addresses(output):
                self.unread.pop(address, None)
        return output


def _memory_addresses(values: Tree) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


def _target(model: PreTrainedModel, name: str) -> tuple[str, float]:
    targets = _targets_of.get(model)
    if targets is None:
        names = [key for key, _ in model.named_parameters()]
        for part in _WRAPPERS:
            names = [key.replace(part, "") for key in names]
        targets = _targets_of[model] = _find_targets(model, names)
    if name not in targets:
        targets |= _find_targets(model, [name], covers_model=False)
    return targets[name]


def _find_targets(model: PreTrainedModel, names: list[str], covers_model: bool = True) -> dict[str, tuple[str, float]]:
    """With `covers_model`, `names` are all of the model's names."""
    converters = _converters(model)
    groups = {}
    has_several_sources = {}
    for name in names:
        for converter in converters:
            group, source = converter.rename_source_key(name)
            if source is not None:
                groups[name] = group
                has_several_sources[name] = len(converter.source_patterns) > 1
                break
    sizes = Counter(groups.values())
    # Without all names, the size is 1 for a converter with one source, and unknown for several sources. A group of
    # unknown size gets an infinite size, so it is converted after the last weight
    entries = {
        name: (group, sizes[group] if covers_model else math.inf if has_several_sources[name] else 1)
        for name, group in groups.items()
    }
    # The remaining weights are only renamed. Empty tensors are reverted in their place, and recognized by identity
    # under their new names.
    markers = {name: torch.empty(0) for name in names if name not in groups}
    names_of = {id(marker): name for name, marker in markers.items()}
    entries |= {
        names_of[id(marker)]: (checkpoint_name, 0) for checkpoint_name, marker in _revert(model, markers).items()
    }
    return entries


def _converters(model: PreTrainedModel) -> list[WeightTransform]:
    """Returns the reversed conversions of the model's checkpoint, except renamings."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # built from a config, not loaded
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return [
        conversion.reverse_transform() for conversion in conversions[::-1] if isinstance(conversion, WeightConverter)
    ]


class _UnguardedRename(GroupWeightRename):
    """
    A `GroupWeightRename` whose reverse is always active. In transformers, the reverse becomes active only at the first
    weight of its group.
    """

    __slots__ = ()

    def reverse_transform(self) -> GroupWeightRename:
        renaming = super().reverse_transform()
        renaming._active = True
        return renaming


def _revert(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # Before transformers 5.21, conversions lack the prefix of a thinker, which is a part of the model that vLLM loads.
    # Later conversions have the prefix, and no `base_model_prefix` is 'thinker'.
    prefix = "thinker." if model.base_model_prefix == "thinker" else ""
    return {prefix + name: weight for name, weight in _revert_conversions(model, weights).items()}


def _revert_conversions(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Reverts a weight's conversion even if other weights of a group are missing."""
    load_conversions = vars(model).get("_weight_conversions") or []
    if not any(isinstance(conversion, GroupWeightRename) for conversion in load_conversions):
        return revert_weight_conversion(model, weights)
    conversions = [copy.copy(conversion) for conversion in load_conversions]
    for conversion in conversions:
        if isinstance(conversion, GroupWeightRename):
            conversion.__class__ = _UnguardedRename
    with replaced(model, _weight_conversions=conversions):
        return revert_weight_conversion(model, weights)
