# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Compilation of single layers of a decoder and of encoders, with attention outside of the graphs."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch._dynamo import config
from torch._dynamo.utils import counters
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .layout import PrefixLayout
from .shared_cache import Decoding
from .states import install_prefix_states


# An input or the output of a layer
Value = torch.Tensor | Cache | PrefixLayout | Decoding | tuple[torch.Tensor | None, ...] | bool | int | None

# Arguments of `torch.compile`
Options = dict[str, Any]

# Settings of Dynamo during a layer's forward:
# - Without nested graph breaks, a break in a called function would break the graphs of its callers, too.
# - Floats of a layer, such as epsilons, are constants of the graph.
# - A function has graphs for different layers, for forwards with and without gradients, and for prompts and single
#   tokens. The recompile limit leaves room for all of them.
# - A function that can't be compiled runs uncompiled. A whole layer couldn't run again, as it may have filled a cache.
_CONFIG = {"nested_graph_breaks": True, "specialize_float": True, "recompile_limit": 64, "suppress_errors": True}


def compile_layers(model: PreTrainedModel, options: Options, report: Callable[[str], None] = print) -> None:
    """
    Compiles the layers of a model's decoder and encoders in place. Layers of one class share graphs for all lengths.

    Attention, states of linear attention, and caches depend on lengths, on prompts and on the index of a layer. So
    they run outside of the graphs. Hooks of modules, such as FSDP2's hooks, run outside, too. Names of weights don't
    change. If compiling fails, as without a C++ compiler, the layers go on uncompiled.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Unwrapped model.
        options (`dict[str, Any]`):
            Arguments of `torch.compile`.
        report (`Callable`):
            Function of one line of text. Called if compiling fails, and for a class of layers if its graph breaks at
            operations other than attention, states and caches.
    """
    install_prefix_states(model)
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    errors: list[str] = []
    for layer in [*_layers(model)]:
        if type(layer) not in classes:
            classes[type(layer)] = _compiled_class(type(layer), options, report, errors)
        layer.__class__ = classes[type(layer)]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yields outermost layers (modules with transformers' base class of layers) that aren't compiled yet."""
    for child in module.children():
        if not isinstance(child, GradientCheckpointingLayer):
            yield from _layers(child)
        elif not hasattr(child, "is_compiled"):
            yield child


class _Recorder(logging.Filter):
    """Records the errors of the compiler in place of Dynamo's log, which shows their tracebacks."""

    def __init__(self, errors: list[str]):
        super().__init__()
        self._errors = errors

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.exc_info:
            return True
        error = getattr(record.exc_info[1], "inner_exception", record.exc_info[1])
        self._errors.append(f"{type(error).__name__}: {error}".strip().partition("\n")[0])
        return False


def _compiled_class(
    layer_class: type[nn.Module], options: Options, report: Callable[[str], None], errors: list[str]
) -> type[nn.Module]:
    """
    Returns a subclass of a layer class with the same name and a compiled forward, unless there are `errors` of any
    class. `nn.Module.compile` would include gradient checkpointing, within which attention can't leave the graph.
    """
    compiled = torch.compile(layer_class.forward, **options)
    log = logging.getLogger("torch._dynamo.convert_frame")
    recorder = _Recorder(errors)

    @functools.wraps(layer_class.forward)
    def forward(layer: nn.Module, *args: Value, **kwargs: Value) -> Value:
        if errors:
            return layer_class.forward(layer, *args, **kwargs)
        if args and isinstance(args[0], torch.Tensor) and args[0]._is_view():
            # The graph of a tensor's view would depend on the shape of the viewed tensor
            args = args[0].clone(), *args[1:]
        keywords = {name: _wrap_cache(value) for name, value in kwargs.items()}
        # Dynamo's counts of graph breaks by reason. New reasons are added at the end of the dictionary.
        break_counts = counters["graph_break"]
        n_before = len(break_counts)
        log.addFilter(recorder)
        try:
            # Graphs of the backward pass are compiled here, too, where errors are suppressed
            with config.patch(_CONFIG), functorch_config.patch(force_non_lazy_backward_lowering=True):
                output = compiled(layer, *map(_wrap_cache, args), **keywords)
        finally:
            log.removeFilter(recorder)
        if errors:
            report(f"`torch_compile` failed, and the run goes on uncompiled: {errors[0]}")
            return output
        reasons = [
            reason
            for reason in itertools.islice(break_counts, n_before, None)
            if "torch.compiler.disable" not in reason
        ]
        if reasons:
            explanation = reasons[0].partition("Explanation: ")[2].partition("\n")[0]
            report(f"The compiled graph of {layer_class.__name__} has an additional break: {explanation}")
        return output

    names = {"__module__": layer_class.__module__, "__qualname__": layer_class.__qualname__}
    return type(layer_class.__name__, (layer_class,), {**names, "forward": forward, "is_compiled": True})


class _UncompiledCache:
    """A cache whose `update` isn't compiled, since it reads the index of the layer and counts tokens."""

    def __init__(self, cache: Cache):
        self._cache = cache

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, **kwargs: Value
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.update(key_states, value_states, layer_idx, **kwargs)

    def __getattr__(self, name: str) -> Value | Callable:
        return getattr(self._cache, name)


def _wrap_cache(value: Value) -> Value | _UncompiledCache:
    return _UncompiledCache(value) if isinstance(value, Cache) else value
