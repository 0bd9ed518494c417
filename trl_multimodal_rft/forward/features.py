# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Encoders without trained weights: no graph, and one forward per prompt while its rollout is in use."""

import copy
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from ..encoding.join import cat_padded
from ..encoding.prompts import EncodedPrompt
from ..families import MODALITIES
from ..models.modes import has_dropout
from ..models.towers import find_tower


@dataclass
class _Call:
    """A call of a frozen module with the media of one prompt."""

    shape: torch.Size  # of its first floating-point input
    output: Any  # in which floating-point tensors that nothing reads have no memory
    autocast: torch.dtype | None


@dataclass
class _Scope:
    """What a forward computes now."""

    kind: str | None  # of media whose features it computes; of a model without a method for each kind, any
    calls: dict[tuple[str, nn.Module], list[_Call]] = field(default_factory=dict)  # of frozen modules
    n_calls: Counter = field(default_factory=Counter)


class _Encoded(Exception):
    """The media are encoded; the decoder needn't run."""


def frozen_modules(model: PreTrainedModel) -> list[nn.Module]:
    """
    The largest modules, with weights of which none is trained, that media pass on their way to the language model. Of
    an encoder whose layers are frozen, but not all of it, these are its children.
    """
    text = {model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()}

    def search(module: nn.Module, is_encoder: bool) -> list[nn.Module]:
        found = []
        for child in module.children():
            if child in text or next(child.parameters(), None) is None:
                continue
            # Some modules replace embeddings of tokens by features
            holds_text = "input_ids" in _parameters(type(child)) or not text.isdisjoint(child.modules())
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                found += search(child, is_encoder)
            elif holds_text:
                found += search(child, False)
            elif _is_frozen(child):
                found.append(child)
            elif not is_encoder and any(
                isinstance(each, nn.ModuleList) and _is_frozen(each) for each in child.modules()
            ):
                found += search(child, True)
        return found

    return search(model, False)


@contextmanager
def frozen_features(model: PreTrainedModel, prompts: Iterable[EncodedPrompt]) -> Iterator[None]:
    """
    Keeps frozen modules out of the graph of forwards within the context, whose media are those of `prompts` in their
    order, and takes the outputs that [`encode_frozen`] computed.
    """
    prompts = [prompt for prompt in prompts if prompt.media]
    modules = frozen_modules(model) if prompts else []
    known = [prompt.on_device.get((model, *modules)) for prompt in prompts]
    scope = _scope(model)

    def call(module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        key, output = (scope.kind, module), None
        if None not in known:
            parts = [calls[key] for calls in known if key in calls]
            output = _joined_output(parts, _first_features(args, kwargs), scope.n_calls[key])
            scope.n_calls[key] += 1
        if output is not None:
            return output
        with torch.set_grad_enabled(torch.is_grad_enabled() and _reaches_weights(args, kwargs)):
            return forward(*args, **kwargs)

    with _wrapped(model, modules, scope, call):
        yield


def encode_frozen(
    model: PreTrainedModel,
    prompts: Iterable[EncodedPrompt],
    inputs_of: Callable[[EncodedPrompt], Mapping[str, torch.Tensor]],
) -> None:
    """
    Computes what frozen modules return for each prompt's media, unless the prompt has it, by the model's own forward
    up to its decoder. `inputs_of` returns the inputs of one prompt.

    Modules that draw random numbers, or count batches, are left alone, as are sharded models, whose ranks must all run
    them equally often.
    """
    prompts = [prompt for prompt in prompts if prompt.media]
    if not prompts or _is_sharded(model):
        return
    modules = frozen_modules(model)
    missing = {id(prompt): prompt for prompt in prompts if (model, *modules) not in prompt.on_device}
    if not missing or not all(map(_is_deterministic, modules)):
        return
    kinds = _frozen_kinds(model, modules)
    for prompt in missing.values():
        if not kinds.isdisjoint(prompt.modalities):
            prompt.on_device[(model, *modules)] = _calls_of_one(model, modules, inputs_of(prompt))


def _calls_of_one(model, modules, inputs) -> dict[tuple[str, nn.Module], list[_Call]]:
    """Calls of frozen modules in the forward of one prompt, by the kind of its media."""
    scope, reached = _scope(model), []

    def call(module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        reaches_weights, given = _reaches_weights(args, kwargs), _first_features(args, kwargs)
        with torch.set_grad_enabled(reaches_weights):
            output = forward(*args, **kwargs)
        if reaches_weights or given is None or scope.kind is None:
            return output
        output = _mapped(lambda each: each.detach().requires_grad_() if _is_float(each) else each, [output])
        made = _Call(given.shape, output, _autocast_dtype(given))
        scope.calls.setdefault((scope.kind, module), []).append(made)
        return _mapped(torch.clone, [output])

    def stop(module, args, kwargs):
        reached.extend(each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
        raise _Encoded

    handle = model.get_decoder().register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.enable_grad(), _wrapped(model, modules, scope, call):
            model(**inputs, use_cache=False)
    except _Encoded:
        pass
    finally:
        handle.remove()
    # What the decoder's inputs would have a gradient of is what the code between frozen modules reads
    read = _leaves_of_graph(reached)
    kinds_read = {
        kind for (kind, _), made in scope.calls.items() for each in made if not read.isdisjoint(_tensors(each.output))
    }
    for (kind, _), made in scope.calls.items():
        keep = functools.partial(_kept, read=read if kind in kinds_read else None)
        for each in made:
            each.output = _mapped(keep, [each.output])
    return scope.calls


def _frozen_kinds(model: PreTrainedModel, modules: Sequence[nn.Module]) -> set[str]:
    """Kinds of media whose encoders have frozen modules."""
    kinds = set()
    for kind in ("image", "audio"):
        if kind in model.input_modalities:
            try:
                tower = model.get_submodule(find_tower(model, kind))
            except ValueError:
                continue
            inside = {*tower.modules()}
            if any(module in inside or tower in module.modules() for module in modules):
                kinds |= {kind, "video"} if kind == "image" else {kind}
    return kinds


def _kept(leaf: torch.Tensor, read: set[torch.Tensor] | None) -> torch.Tensor:
    """A part of an output without its memory, unless it is read; without knowing what is, all are."""
    if not _is_float(leaf) or read is None or leaf in read:
        return leaf.detach()
    return leaf.new_full((), torch.nan).expand(leaf.shape)  # not a number, so that nothing uses it unnoticed


def _joined_output(parts: list[list[_Call]], given: torch.Tensor | None, place: int) -> Any:
    """The output of the call at a place, from those of each prompt; `None` if they aren't its parts."""
    if given is None or not parts:
        return None
    flat = [call for part in parts for call in part]
    if any(call.autocast != _autocast_dtype(given) for call in flat):
        return None
    together = [part[place] for part in parts if len(part) > place]
    dim = _joined_dim([call.shape for call in together], given.shape) if len(together) == len(parts) else None
    if dim is not None:
        return _join(together, dim)
    # One call per medium, for instance
    if place < len(flat) and flat[place].shape == given.shape:
        return _join([flat[place]], 0)
    return None


def _joined_dim(shapes: list[torch.Size], whole: torch.Size) -> int | None:
    """The dimension on which tensors of these shapes were joined, padded on the others."""
    if any(len(shape) != len(whole) for shape in shapes):
        return None
    if len(shapes) == 1:
        return 0 if shapes[0] == whole else None
    sums, largest = ([function(sizes) for sizes in zip(*shapes, strict=True)] for function in (sum, max))
    for dim in range(len(whole)):
        if list(whole) == [*largest[:dim], sums[dim], *largest[dim + 1 :]]:
            return dim
    return None


def _join(calls: list[_Call], dim: int) -> Any:
    """The output of a call whose input are those of calls, joined on a dimension; `None` if it isn't known."""

    def join(*tensors: torch.Tensor) -> torch.Tensor:
        if len(tensors) == 1:
            return tensors[0].clone()  # as some models change features in place
        # One row holds all where the input is one
        is_row = dim > 0 and tensors[0].dim() > 2 and tensors[0].size(0) == 1
        return cat_padded(list(tensors), 0, int(is_row))

    try:
        return _mapped(join, [call.output for call in calls])
    except ValueError:  # of different structures
        return None


def _mapped(function: Callable, values: Sequence[Any]) -> Any:
    """Results of modules with `function` of the tensors at each place of them."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return function(*values)
    if isinstance(first, Mapping):
        mapped = {name: _mapped(function, [value[name] for value in values]) for name in first}
        result = copy.copy(first)  # outputs of transformers may have further keys than their fields
        for name, value in mapped.items():
            result[name] = value
        return result
    if isinstance(first, (tuple, list)):
        return type(first)(_mapped(function, each) for each in zip(*values, strict=True))
    return first


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(found.append, [value])
    return found


@contextmanager
def _wrapped(model: PreTrainedModel, modules: Sequence[nn.Module], scope: _Scope, call: Callable) -> Iterator[None]:
    """Runs `call` in place of the forwards of modules, and keeps track of what the model computes."""

    def of_kind(kind: str, method: Callable) -> Callable:
        def compute(*args, **kwargs):
            before = scope.kind
            if before not in MODALITIES:  # features of videos may be those of images
                scope.kind = kind
            try:
                return method(*args, **kwargs)
            finally:
                scope.kind = before

        return compute

    def of_module(module: nn.Module, forward: Callable) -> Callable:
        return lambda *args, **kwargs: call(module, forward, args, kwargs)

    with ExitStack() as stack:
        for kind, method in _methods(model).items():
            stack.enter_context(_attribute(model.base_model, method.__name__, of_kind(kind, method)))
        for module in modules:
            stack.enter_context(_attribute(module, "forward", of_module(module, module.forward)))
        yield


@contextmanager
def _attribute(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of an instance within the context."""
    before = {name: vars(holder)[name]} if name in vars(holder) else {}
    vars(holder)[name] = value
    try:
        yield
    finally:
        del vars(holder)[name]
        vars(holder).update(before)


def _methods(model: PreTrainedModel) -> dict[str, Callable]:
    """The methods by which a model's forward computes the features of each kind."""
    names = {kind: f"get_{kind}_features" for kind in MODALITIES}
    return {kind: getattr(model.base_model, name) for kind, name in names.items() if hasattr(model.base_model, name)}


def _scope(model: PreTrainedModel) -> _Scope:
    return _Scope(None if _methods(model) else "any")


@functools.cache
def _parameters(module_class: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(module_class.forward).parameters)


def _has_frozen_layers(module: nn.Module) -> bool:
    return any(isinstance(each, nn.ModuleList) and _is_frozen(each) for each in module.modules())


def _is_frozen(module: nn.Module) -> bool:
    return not any(weight.requires_grad for weight in module.parameters())


def _is_deterministic(module: nn.Module) -> bool:
    """Whether a module returns the same in each forward, and changes nothing."""
    norms = (each for each in module.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm))
    return not has_dropout(module) and not any(norm.training and not norm._forward_pre_hooks for norm in norms)


def _first_features(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    return next(filter(_is_float, given), given[0] if given else None)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _reaches_weights(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether inputs depend on trained weights; hooks for checkpointing make others require a gradient, too."""
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.requires_grad]
    return any(isinstance(leaf, nn.Parameter) for leaf in _leaves_of_graph(given))


def _leaves_of_graph(tensors: Sequence[torch.Tensor]) -> set[torch.Tensor]:
    """The leaves, weights among them, that tensors get their gradients from."""
    leaves = {each for each in tensors if each.is_leaf and each.requires_grad}
    nodes, seen = [each.grad_fn for each in tensors], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves


def _is_sharded(model: PreTrainedModel) -> bool:
    """Whether ranks gather weights of the model while it runs."""
    wrapped = any(isinstance(each, FSDPModule) or hasattr(each, "_fsdp_wrapped_module") for each in model.modules())
    return wrapped or any(hasattr(parameter, "ds_id") for parameter in model.parameters())
