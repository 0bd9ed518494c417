# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Encoders of media: inputs on the device, attention without host syncs, and cached outputs of frozen encoders.

[`encode_frozen`] runs the frozen modules once per prompt, and caches their outputs on the prompt. In a forward of
several prompts, [`frozen_features`] concatenates cached outputs instead of running frozen modules, on the dimension
that `feature_dims` of the [`~families.Family`] names. Other frozen modules run in each forward, without a graph.
"""

import copy
import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Unpack, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..encoding.media import cat_padded, join_tensors
from ..encoding.prompts import EncodedPrompt
from ..families import family_of
from ..modalities import ENCODER_OF, MODALITIES
from ..models.modes import has_dropout, without_checkpointing
from ..models.parts import adapter_layers, find_towers
from ..models.wrapped import replaced
from . import kernels
from .kernels import AttentionOptions
from .prompt_groups import to_device


# "flash" in the name makes attention layers pass whole rows and the cumulative lengths of their sequences
_VARLEN = "torch_varlen_flash"
_WITHOUT_CUDNN = "sdpa_without_cudnn"

# Arguments of encoders with the sizes of media. transformers can precompute further arguments from sizes.
_SIZE_ARGUMENTS = ("grid_thw", "feature_lens", "target_sizes")

# Host copies of integer tensors such as sizes of media, by the tensor on a device
_host_copies = WeakTensorKeyDictionary()


def install_encoder_attention(model: PreTrainedModel) -> None:
    """
    Makes encoders that pack media into one row compute each layer's attention in one call; transformers would call
    SDPA per sequence, and read lengths from the device in each layer. Layers get copies of their configs, as a changed
    model config would have new models download a flash kernel of an unknown name.
    """
    decoder = set(model.get_decoder().modules())
    copies: dict[tuple[int, str], PreTrainedConfig] = {}  # by id of the original config and implementation
    for module in model.modules():
        config = getattr(module, "config", None)
        is_attention = "Attention" in type(module).__name__ and module not in decoder
        if is_attention and isinstance(config, PreTrainedConfig) and config._attn_implementation == "sdpa":
            # Attention of an encoder that packs a row takes cumulative lengths of sequences, named `cu_seqlens`
            key = id(config), _VARLEN if "cu_seqlens" in _argument_names(type(module)) else _WITHOUT_CUDNN
            if key not in copies:
                copies[key] = copy.copy(config)
                copies[key]._attn_implementation = key[1]
            vars(module)["config"] = copies[key]
    hooked_modules: set[nn.Module] = set()  # within a module that has the hook already
    if not copies or not family_of(model).precomputes_exactly:
        return
    for module in model.modules():
        if module not in hooked_modules and any(name in _argument_names(type(module)) for name in _SIZE_ARGUMENTS):
            submodules = set(module.modules())
            if decoder.isdisjoint(submodules) and any(name == _VARLEN for _, name in _layer_configs(module)):
                module.register_forward_pre_hook(_add_precomputed, with_kwargs=True)
                hooked_modules |= submodules


@contextmanager
def original_encoders(model: PreTrainedModel) -> Iterator[None]:
    """Disables the attention of [`install_encoder_attention`] within the context."""
    with ExitStack() as stack:
        for config, _ in [*_layer_configs(model)]:
            stack.enter_context(replaced(config, _attn_implementation="sdpa"))
        yield


def remember_on_host(moved: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Remembers `value`, the host copy of an integer tensor, for encoders that read it. Returns the `moved` tensor."""
    if moved is not value and not value.is_floating_point():
        _host_copies[moved] = value
    return moved


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    host_copy = _host_copies.get(tensor)
    return tensor.cpu() if host_copy is None else host_copy


@functools.cache
def _argument_names(module_class: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(module_class.forward).parameters)[1:]


def _layer_configs(module: nn.Module) -> Iterator[tuple[PreTrainedConfig, str]]:
    """Yields configs of layers that [`install_encoder_attention`] changed, and their implementations."""
    for layer in module.modules():
        config = getattr(layer, "config", None)
        if isinstance(config, PreTrainedConfig) and config._attn_implementation in (_VARLEN, _WITHOUT_CUDNN):
            yield config, config._attn_implementation


def _add_precomputed(
    tower: nn.Module, args: tuple, kwargs: dict[str, torch.Tensor | bool]
) -> tuple[tuple, dict[str, torch.Tensor | int]] | None:
    """Pre-hook that adds the arguments that an encoder's forward would otherwise compute from sizes on the device."""
    if next(_layer_configs(tower), None) is None:  # within `original_encoders`
        return None
    arguments = {**dict(zip(_argument_names(type(tower)), args, strict=False)), **kwargs}
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    device = next(iter(tensors.values())).device

    def move(value: torch.Tensor | int) -> torch.Tensor | int:
        if not isinstance(value, torch.Tensor) or value.device == device:
            return value
        return remember_on_host(to_device(value, device), value)

    return args, {**tree_map(move, _precompute(tower, tensors)), **kwargs}


@torch.no_grad()
def _precompute(tower: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | int]:
    """Computes, on the host, the arguments of an encoder's forward that depend on the sizes of media alone."""
    from transformers.exporters.utils import precompute_export_inputs

    sizes = {name: _on_host(value) for name, value in tensors.items() if name in (*_SIZE_ARGUMENTS, "merge_sizes")}
    inputs: dict[str, torch.Tensor | int] = {**sizes}
    if "feature_lens" in sizes:
        inputs["input_features"] = tensors["input_features"]
    input_names = set(inputs)
    # FSDP replaces the class of the encoder. transformers searches the Python module of the class for functions, so
    # this object shares the encoder's attributes, but has the original class.
    plain_tower = object.__new__(next(base for base in type(tower).__mro__ if not issubclass(base, FSDPModule)))
    plain_tower.__dict__ = tower.__dict__
    precompute_export_inputs(plain_tower, inputs)
    # transformers has added arguments to `inputs`
    new_arguments = {name: value for name, value in inputs.items() if name not in input_names}
    for prefix in ("", "window_"):
        starts = new_arguments.get(f"cu_{prefix}seqlens")
        if isinstance(starts, torch.Tensor):
            new_arguments[f"max_{prefix}seqlen"] = int(starts.diff().max())
    if "target_sizes" in sizes:
        new_arguments["max_seqlen"] = int(sizes["target_sizes"].prod(-1).max())
    return new_arguments


@torch.compiler.disable
def _varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    **options: Unpack[AttentionOptions],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Computes attention within sequences of a row of `T` tokens by `cu_seq_lens_q` `(sequences + 1,)`, or SDPA with the
    mask without them. Query, key, value `(1, heads, T, head_dim)`; returns `(1, T, heads, head_dim)`.
    """
    sdpa = functools.partial(_sdpa_without_cudnn, module, **options)
    if cu_seq_lens_q is None:
        return sdpa(query, key, value, attention_mask)
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (states.to(torch.get_autocast_dtype(device)) for states in (query, key, value))
    if options.get("dropout", 0.0) == 0.0 and query.size(-1) <= 256 and kernels.has_varlen_kernel(query):
        starts = cu_seq_lens_q.to(query.device)
        longest = max_length_q
        query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        output = kernels.varlen_attention(
            query, key, value, sequences=(starts, starts, longest, longest), scaling=options.get("scaling")
        )
        return output[None], None
    lengths = _on_host(cu_seq_lens_q).diff().tolist()
    sequences = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    return torch.cat([sdpa(*sequence, None)[0] for sequence in sequences], dim=1), None


@torch.compiler.disable
def _sdpa_without_cudnn(
    module: nn.Module, *states: torch.Tensor | None, **options: Unpack[AttentionOptions]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    with kernels.without_cudnn():
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *states, **options)


AttentionInterface.register(_VARLEN, _varlen_attention)
AttentionInterface.register(_WITHOUT_CUDNN, _sdpa_without_cudnn)


# The output of a module
Output = torch.Tensor | Mapping[str, "Output"] | Sequence["Output"] | str | bool | int | float | None

Forward = Callable[..., Output]


@dataclass
class _Call:
    """A recorded call of a frozen module with the media of one prompt."""

    shape: torch.Size  # of the call's first floating-point input, or else of its first input tensor
    output: Output  # floating-point tensors that aren't needed take no memory, see `_drop_unread`
    autocast: torch.dtype | None  # dtype of mixed precision during the call


@dataclass
class _Scope:
    """State of a running forward: the modality that it encodes, and its calls of frozen modules."""

    modality: str  # "" outside of methods that encode media; "any" if the model has no such methods
    calls: dict[tuple[str, nn.Module], list[_Call]] = field(default_factory=dict)  # of frozen modules
    n_calls: Counter = field(default_factory=Counter)  # number of calls so far, by modality and module


class _MediaEncoded(Exception):
    """Ends a forward in which media are encoded, so that the decoder doesn't run."""


def frozen_modules(model: PreTrainedModel) -> list[nn.Module]:
    """
    Returns the outermost frozen modules that media pass on their way to the language model. For an encoder with both
    frozen layers and trained weights, returns the frozen children.
    """
    text_modules = {model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()}

    def search(module: nn.Module, is_encoder: bool) -> list[nn.Module]:
        modules = []
        for child in module.children():
            if child in text_modules or next(child.parameters(), None) is None:
                continue
            # A module that takes `input_ids` merges media into token embeddings, so it isn't an encoder
            holds_text = "input_ids" in _forward_arguments(type(child)) or not text_modules.isdisjoint(child.modules())
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                modules += search(child, is_encoder)
            elif holds_text:
                modules += search(child, False)
            elif _is_frozen(child):
                modules.append(child)
            # An encoder in which some layers are frozen
            elif not is_encoder and any(_is_frozen(m) for m in child.modules() if isinstance(m, nn.ModuleList)):
                modules += search(child, True)
        return modules

    return search(model, False)


@contextmanager
def frozen_features(model: PreTrainedModel, prompts: Iterable[EncodedPrompt]) -> Iterator[None]:
    """
    Keeps frozen modules out of the autograd graph within the context, whose forward gets the media of `prompts` in
    order: the outputs of [`encode_frozen`] replace their calls. Modules that `feature_dims` don't name, and those with
    an input of another shape, run anyway.
    """
    prompts = [prompt for prompt in prompts if prompt.media]
    modules = frozen_modules(model) if prompts else []
    dims = _feature_dims(model, modules)
    key = _cache_key(model, modules)
    # By prompt, the calls by modality and module that `encode_frozen` recorded
    cached_calls = [prompt.on_device.get(key, {}) for prompt in prompts]
    all_cached = all(key in prompt.on_device for prompt in prompts)
    scope = _scope(model)

    def call(module: nn.Module, forward: Forward, args: tuple, kwargs: dict[str, Output]) -> Output:
        modality = scope.modality
        index = scope.n_calls[modality, module]
        scope.n_calls[modality, module] += 1
        features = _first_input(args, kwargs)
        if module in dims and features is not None and all_cached:
            # For each prompt with media of the modality, the recorded calls of the module
            prompt_calls = [calls[modality, module] for calls in cached_calls if (modality, module) in calls]
            autocasts = {record.autocast for record in itertools.chain.from_iterable(prompt_calls)}
            calls = _calls_of(prompt_calls, index, features) if autocasts == {_autocast_dtype(features)} else []
            if calls:
                return _join_outputs(calls, dims[module])
        with nullcontext() if _depends_on_weights(args, kwargs) else _without_graph(module):
            return forward(*args, **kwargs)

    with _intercept(model, modules, scope, call):
        yield


def _feature_dims(model: PreTrainedModel, frozen: Sequence[nn.Module]) -> dict[nn.Module, int]:
    """Returns the dimensions on which outputs of frozen modules are joined, for modules within parts that have one."""
    dims_by_part = family_of(model).feature_dims
    if not frozen or not dims_by_part:
        return {}
    names = {module: name for name, module in model.named_modules()}
    dims: dict[nn.Module, int] = {}
    for module in frozen:
        parts = [part for part in names[module].split(".") if part in dims_by_part]
        if parts:
            dims[module] = dims_by_part[parts[0]]
    return dims


def encode_frozen(
    model: PreTrainedModel,
    prompts: Iterable[EncodedPrompt],
    inputs_of: Callable[[EncodedPrompt], Mapping[str, torch.Tensor]],
) -> None:
    """
    Caches on prompts the outputs of frozen modules that the family's `feature_dims` name, from the model's own forward
    up to its decoder. None of modules that draw random numbers or update statistics, nor for sharded models, where all
    ranks must run modules equally often.
    """
    prompts = [prompt for prompt in prompts if prompt.media]
    if not prompts or is_sharded(model):
        return
    modules = frozen_modules(model)
    dims = _feature_dims(model, modules)
    key = _cache_key(model, modules)
    # Prompts with the same media share `on_device`, so that media are encoded once
    missing = {id(prompt.on_device): prompt for prompt in prompts if key not in prompt.on_device}
    if not missing or not all(map(_is_deterministic, dims)):
        return
    modalities = _frozen_modalities(model, [*dims])
    for prompt in missing.values():
        if not modalities.isdisjoint(prompt.modalities):
            prompt.on_device[key] = _record_calls(model, [*dims], inputs_of(prompt))


def _cache_key(model: PreTrainedModel, modules: Sequence[nn.Module]) -> tuple:
    """Returns the cache key of frozen modules' outputs for a prompt: the modules, and their active adapters."""
    layers = itertools.chain.from_iterable(map(adapter_layers, modules))
    return model, *modules, *((layer.disable_adapters, *layer.active_adapters) for layer in layers)


def _record_calls(
    model: PreTrainedModel, modules: Sequence[nn.Module], inputs: Mapping[str, torch.Tensor]
) -> dict[tuple[str, nn.Module], list[_Call]]:
    """Runs the encoders for one prompt, and returns the calls of frozen modules by modality and module."""
    scope = _scope(model)
    decoder_inputs = []

    def call(module: nn.Module, forward: Forward, args: tuple, kwargs: dict[str, Output]) -> Output:
        """Records no call whose inputs are no media or depend on trained weights."""
        features = _first_input(args, kwargs)
        if not scope.modality or features is None or _depends_on_weights(args, kwargs):
            return forward(*args, **kwargs)
        with _without_graph(module):
            output = forward(*args, **kwargs)
        output = _map_tensors(lambda item: item.detach().requires_grad_() if _is_float(item) else item, [output])
        record = _Call(features.shape, output, _autocast_dtype(features))
        scope.calls.setdefault((scope.modality, module), []).append(record)
        return _map_tensors(torch.clone, [output])

    def stop(module: nn.Module, args: tuple, kwargs: dict[str, Output]) -> None:
        decoder_inputs.extend(_tensors((args, kwargs)))
        raise _MediaEncoded

    hook = model.get_decoder().register_forward_pre_hook(stop, with_kwargs=True)
    # A resumed run encodes media again, so this must not change the random state. Before transformers 5.23, encoders
    # draw random numbers even if they drop no layers.
    with torch.random.fork_rng(devices=[]), suppress(_MediaEncoded), hook, torch.enable_grad():
        with _intercept(model, modules, scope, call):
            model(**inputs, use_cache=False)
    # `call` made outputs of frozen modules leaves of the graph. An output that the decoder's inputs don't depend on
    # was only read by other frozen modules, and isn't needed again. If the decoder's inputs depend on no output of a
    # modality, all outputs of the modality are kept.
    read_tensors = leaves_of_graph(decoder_inputs)
    modalities_read = {
        modality
        for (modality, _), records in scope.calls.items()
        if any(not read_tensors.isdisjoint(_tensors(record.output)) for record in records)
    }
    for (modality, _), records in scope.calls.items():
        drop = functools.partial(_drop_unread, read_tensors=read_tensors if modality in modalities_read else None)
        for record in records:
            record.output = _map_tensors(drop, [record.output])
    return scope.calls


def _frozen_modalities(model: PreTrainedModel, modules: Sequence[nn.Module]) -> set[str]:
    """Videos pass the encoder of images."""
    modalities = set()
    for modality, name in find_towers(model).items():
        tower = model.get_submodule(name)
        tower_modules = {*tower.modules()}
        # The frozen module is a part of the tower, or the tower is a part of the frozen module
        if any(module in tower_modules or tower in module.modules() for module in modules):
            modalities |= {read for read in MODALITIES if ENCODER_OF[read] == modality}
    return modalities


def _drop_unread(leaf: torch.Tensor, read_tensors: set[torch.Tensor | None] | None) -> torch.Tensor:
    """Returns a tensor of an output, detached, and without memory unless `read_tensors` (`None`: all) has it."""
    if not _is_float(leaf) or read_tensors is None or leaf in read_tensors:
        return leaf.detach()
    return leaf.new_full((), torch.nan).expand(leaf.shape)  # not a number, so that nothing uses it unnoticed


def _calls_of(prompt_calls: list[list[_Call]], index: int, features: torch.Tensor) -> list[_Call]:
    """
    Returns the recorded calls that make up a module's call `index` with the input `features`, or an empty list if the
    shapes of their inputs don't match. `prompt_calls` holds the recorded calls of each prompt.
    """
    calls = [records[index] for records in prompt_calls if index < len(records)]
    if not calls or len(calls) < len(prompt_calls):
        return []
    shapes = [call.shape for call in calls]
    if any(len(shape) != features.dim() for shape in shapes):
        return []
    # The joined input has the summed size along one dimension, and is padded to the largest size along the others: for
    # inputs `(4, 7)` and `(6, 9)`, it is `(10, 9)` or `(6, 16)`
    sums, largest = ([function(sizes) for sizes in zip(*shapes, strict=True)] for function in (sum, max))
    joined_shapes = [[*largest[:dim], sums[dim], *largest[dim + 1 :]] for dim in range(features.dim())]
    return calls if list(features.shape) in joined_shapes else []


def _join_outputs(calls: list[_Call], dim: int) -> Output:
    def join(*tensors: torch.Tensor) -> torch.Tensor:
        # A copy of the cached tensor, as some models change outputs of encoders in place
        return tensors[0].clone() if len(tensors) == 1 else cat_padded(list(tensors), 0, dim)

    return _map_tensors(join, [call.output for call in calls])


def _map_tensors(function: Forward, values: Sequence[Output]) -> Output:
    """The result has the structure of one output."""
    first_value = values[0]
    if isinstance(first_value, torch.Tensor):
        return function(*values)
    if isinstance(first_value, Mapping):
        mappings = cast(Sequence[Mapping[str, Output]], values)
        # A copy, as outputs of transformers may have keys that the constructor doesn't take
        result = cast(MutableMapping[str, Output], copy.copy(first_value))
        for name in first_value:
            result[name] = _map_tensors(function, [mapping[name] for mapping in mappings])
        return result
    if isinstance(first_value, (tuple, list)):
        return type(first_value)(
            _map_tensors(function, items) for items in zip(*cast(Sequence[Sequence[Output]], values), strict=True)
        )
    return first_value


def _tensors(value: Output | tuple[tuple, dict[str, Output]]) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@contextmanager
def _intercept(model: PreTrainedModel, modules: Sequence[nn.Module], scope: _Scope, call: Callable) -> Iterator[None]:
    """Runs `call` in place of the forwards of modules, and sets the modality of `scope` while media are encoded."""

    def set_modality(modality: str, method: Forward) -> Forward:
        @functools.wraps(method)  # `generate` reads the arguments of the method
        def compute(*args: Output, **kwargs: Output) -> Output:
            # The method for videos may call the method for images. The modality stays video.
            with replaced(scope, modality=scope.modality if scope.modality in MODALITIES else modality):
                return method(*args, **kwargs)

        return compute

    def replace_forward(module: nn.Module, forward: Forward) -> Forward:
        return lambda *args, **kwargs: call(module, forward, args, kwargs)

    with ExitStack() as stack:
        for modality, method in _feature_methods(model).items():
            stack.enter_context(replaced(model.base_model, **{method.__name__: set_modality(modality, method)}))
        for module in modules:
            stack.enter_context(replaced(module, forward=replace_forward(module, module.forward)))
        yield


@contextmanager
def _without_graph(module: nn.Module) -> Iterator[None]:
    with torch.no_grad(), without_checkpointing(module):
        yield


def _feature_methods(model: PreTrainedModel) -> dict[str, Callable]:
    names = {modality: f"get_{modality}_features" for modality in MODALITIES}
    return {
        modality: getattr(model.base_model, name)
        for modality, name in names.items()
        if hasattr(model.base_model, name)
    }


def _scope(model: PreTrainedModel) -> _Scope:
    return _Scope("" if _feature_methods(model) else "any")


@functools.cache
def _forward_arguments(module_class: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(module_class.forward).parameters)


def _is_frozen(module: nn.Module) -> bool:
    return not any(weight.requires_grad for weight in module.parameters())


def _is_deterministic(module: nn.Module) -> bool:
    """Returns whether a module computes the same output in all forwards, and changes none of its state."""
    # A norm with a pre-hook uses running statistics even in training mode, see `models.modes`
    norms = (submodule for submodule in module.modules() if isinstance(submodule, nn.modules.batchnorm._BatchNorm))
    return not has_dropout(module) and not any(norm.training and not norm._forward_pre_hooks for norm in norms)


def _first_input(args: tuple, kwargs: dict[str, Output]) -> torch.Tensor | None:
    tensors = _tensors((args, kwargs))
    return next(filter(_is_float, tensors), tensors[0] if tensors else None)


def _is_float(value: Output) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _depends_on_weights(args: tuple, kwargs: dict[str, Output]) -> bool:
    """
    Returns whether inputs depend on trained weights. `requires_grad` isn't enough, as hooks of checkpointing set it on
    other inputs, too.
    """
    tensors = [tensor for tensor in _tensors((args, kwargs)) if tensor.requires_grad]
    # A leaf that isn't known may be a weight
    return any(leaf is None or isinstance(leaf, nn.Parameter) for leaf in leaves_of_graph(tensors))


def leaves_of_graph(tensors: Sequence[torch.Tensor]) -> set[torch.Tensor | None]:
    """Returns the leaves of the autograd graph of tensors, such as weights. `None` stands for unknown leaves."""
    leaves: set[torch.Tensor | None] = {tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad}
    nodes = [tensor.grad_fn for tensor in tensors]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        elif node.name() == "CheckpointFunctionBackward":  # reentrant checkpointing hides its leaves
            leaves.add(None)
        nodes += [next_node for next_node, _ in node.next_functions]
    return leaves


def is_sharded(model: PreTrainedModel) -> bool:
    """Returns whether ranks gather weights of the model while it runs."""
    wrapped = any(isinstance(part, FSDPModule) or hasattr(part, "_fsdp_wrapped_module") for part in model.modules())
    return wrapped or any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def media_inputs(
    prompts: Iterable[EncodedPrompt], model: PreTrainedModel, device: torch.device
) -> dict[str, torch.Tensor]:
    """Returns the joined media of prompts on a device, and remembers integer tensors on the host for encoders."""
    prompts = list(prompts)
    moved = join_tensors([_upload(prompt, model.dtype, device) for prompt in prompts])
    if device.type == "cpu":
        return moved
    copies = join_tensors(
        {name: value for name, value in prompt.media.items() if not value.is_floating_point()} for prompt in prompts
    )
    return {name: remember_on_host(value, copies[name]) if name in copies else value for name, value in moved.items()}


def _upload(prompt: EncodedPrompt, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """The copy is cached on the prompt."""
    key = device, dtype
    if key not in prompt.on_device:
        moved = {name: to_device(value, device) for name, value in prompt.media.items()}
        prompt.on_device[key] = {
            name: value.to(dtype) if value.is_floating_point() else value for name, value in moved.items()
        }
    return prompt.on_device[key]


def encode_once(model: PreTrainedModel, prompts: Iterable[EncodedPrompt], device: torch.device) -> None:
    """Computes the outputs of frozen encoders for prompts that don't have them yet, see [`encode_frozen`]."""

    def inputs_of(prompt: EncodedPrompt) -> dict[str, torch.Tensor]:
        inputs = {
            "input_ids": prompt.input_ids[None],
            "attention_mask": torch.ones_like(prompt.input_ids)[None],
            "position_ids": prompt.position_ids,
            **{name: value[None] for name, value in prompt.token_fields.items()},
        }
        moved = {name: to_device(value, device) for name, value in inputs.items()}
        return {**moved, **media_inputs([prompt], model, device)}

    encode_frozen(model, prompts, inputs_of)


def to_model(media: dict[str, torch.Tensor], model: PreTrainedModel, device: torch.device) -> dict[str, torch.Tensor]:
    """Moves media to a device and features to the model's dtype."""
    return {
        name: remember_on_host(value.to(device, model.dtype if value.is_floating_point() else value.dtype), value)
        for name, value in media.items()
    }
