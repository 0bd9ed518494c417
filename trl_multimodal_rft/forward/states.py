# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Layers with a recurrent or convolutional state: completions start from the state after their prompt."""

import functools
import inspect
import types
from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache, PreTrainedModel

from ..versions import CACHE_NAMES
from .autograd import Context
from .layout import PrefixLayout


# Types of layers whose token mixer carries a state from token to token
STATE_LAYERS = {"linear_attention", "conv"}

# Methods of a cache by which mixers read their state
_STATE_METHODS = {"get_conv_state", "get_recurrent_state"}

# Names under which mixers take the cache
_CACHE_ARGUMENTS = {*CACHE_NAMES, "cache_params"}

# Names under which kernels take the initial state. Some mixers, such as Mamba 1's, pass none. They silently ignore the
# state of the cache if they get more than one token.
_INITIAL_STATE_ARGUMENTS = {"initial_state", "initial_states"}


class _GatherCopies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context[tuple[int, torch.Size]], states: torch.Tensor, index: torch.Tensor, dim: int
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.settings = dim, states.shape
        return states.index_select(dim, index)

    @staticmethod
    def backward(ctx: Context[tuple[int, torch.Size]], gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        dim, shape = ctx.settings
        [index] = ctx.saved_tensors
        dtype = torch.float32 if gradient.dtype.itemsize < 4 else gradient.dtype
        total = gradient.new_zeros(shape, dtype=dtype)
        return total.index_add_(dim, index, gradient.to(dtype)).to(gradient.dtype), None, None


def gather_copies(states: torch.Tensor, index: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """
    Selects states like `index_select`, but sums their gradients in float32. The keys, values and states of a prompt
    get a gradient from each completion. A running sum of 65 gradients in bfloat16 would be 1 % off.
    """
    return _GatherCopies.apply(states, index, dim)


class _GraphCache:
    """
    A cache of one layer's mixer, by its `state_idx`, that keeps the autograd graph, which transformers' lose by copies
    into buffers. The methods have the signatures of `Cache`, but ignore `layer_idx`. States are by row of the batch.
    """

    def __init__(self, conv: dict[int, torch.Tensor], recurrent: dict[int, torch.Tensor]):
        self.conv = conv
        self.recurrent = recurrent

    def select_rows(self, index: torch.Tensor) -> "_GraphCache":
        kinds = (self.conv, self.recurrent)
        return _GraphCache(*({i: gather_copies(state, index) for i, state in kind.items()} for kind in kinds))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.recurrent.get(state_idx)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **options: int | None,
    ) -> torch.Tensor:
        earlier_states = self.conv.get(state_idx)
        width = conv_kernel_size or (conv_states if earlier_states is None else earlier_states).size(-1)
        # The convolution at the first new tokens reads earlier inputs, or zeros if there are none
        if earlier_states is not None:
            conv_states = torch.cat([earlier_states, conv_states], dim=-1)
        elif conv_states.size(-1) < width:
            conv_states = F.pad(conv_states, (width - conv_states.size(-1), 0))
        self.conv[state_idx] = conv_states[..., -width:]
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **options: int | None
    ) -> torch.Tensor:
        self.recurrent[state_idx] = recurrent_states
        return recurrent_states


def install_prefix_states(model: PreTrainedModel) -> None:
    """Enables mixers with a state to run packed rows. Without a [`PrefixLayout`], results are the same as before."""
    for mixer in _mixers(model):
        # A bound method, so that a copy of the module runs its own weights
        mixer.forward = types.MethodType(_prefix_forward, mixer)


def states_obstacle(model: PreTrainedModel) -> str | None:
    """Returns the reason why completions can't start from their prompt's state, or `None` if they can."""
    mixers = _mixers(model)
    layer_types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    n_layers = sum(layer_type in STATE_LAYERS for layer_type in layer_types)
    if n_layers and not hasattr(Cache, "get_conv_state"):
        return "before transformers 5.21, layers of type linear_attention or conv start from no given state"
    if len(mixers) != n_layers:
        return f"{len(mixers)} modules keep a state for {n_layers} layers of type linear_attention or conv"
    for mixer in mixers:
        attributes, keywords = names_in_code(type(mixer))
        if "get_recurrent_state" in attributes and not keywords & _INITIAL_STATE_ARGUMENTS:
            return f"{type(mixer).__name__} starts from no given state"
        if _cache_name(mixer) is None or "attention_mask" not in inspect.signature(type(mixer).forward).parameters:
            return f"{type(mixer).__name__} has no known arguments for cache and mask"
        forward = vars(mixer).get("forward")  # set on the instance, in place of the method of its class
        if forward is not None and getattr(forward, "__func__", None) is not _prefix_forward:
            return f"the forward of {type(mixer).__name__} is replaced, by hooks of a device map or by kernels"
    return None


@torch.compiler.disable
def _prefix_forward(
    mixer: nn.Module,
    hidden_states: torch.Tensor,
    *args: torch.Tensor | Cache | None,
    prefix_layout: PrefixLayout | None = None,
    **kwargs: torch.Tensor | Cache | None,
) -> torch.Tensor:
    """
    Runs the forward of a mixer on a packed row `(1, T, hidden)`: on the prompts, then on the branches, from the
    prompts' states. Always twice, so that ranks gather sharded weights equally often.
    """
    forward = type(mixer).forward
    if not isinstance(prefix_layout, PrefixLayout):
        return forward(mixer, hidden_states, *args, **kwargs)
    layout = prefix_layout.state_layout

    def run_mixer(index: torch.Tensor, mask: torch.Tensor | None, states: _GraphCache) -> torch.Tensor:
        """`index`, `(batch, length)`, are row positions. Updates `states`."""
        rows = hidden_states[0].index_select(0, index.flatten()).view(*index.shape, -1)
        return forward(mixer, rows, *args, **{**kwargs, "attention_mask": mask, _cache_name(mixer): states})

    states = _GraphCache({}, {})
    prompt_outputs = run_mixer(layout.prompt_index, layout.prompt_mask, states)
    branch_outputs = run_mixer(layout.branch_index, None, states.select_rows(layout.prompt_of_branch))
    outputs = torch.cat([prompt_outputs.flatten(0, 1), branch_outputs.flatten(0, 1)])
    return outputs.index_select(0, layout.restore_index)[None]


def has_states(model: PreTrainedModel) -> bool:
    """Returns whether layers of a model carry a state from token to token."""
    return bool(_mixers(model))


def _mixers(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.get_decoder().modules() if _STATE_METHODS & names_in_code(type(module))[0]]


def _cache_name(mixer: nn.Module) -> str | None:
    return next((name for name in inspect.signature(type(mixer).forward).parameters if name in _CACHE_ARGUMENTS), None)


@functools.cache
def names_in_code(module_class: type) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the names of attributes and of keyword arguments that occur in the code of a module's class."""
    classes = [base for base in module_class.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    members = chain.from_iterable(vars(base).values() for base in classes)
    functions = [member for member in members if inspect.isfunction(member)]
    codes = [inspect.unwrap(f).__code__ for f in functions]
    # The compiler keeps the names of a call's keyword arguments as a constant tuple
    constants = chain.from_iterable(code.co_consts for code in codes)
    constant_tuples = [value for value in constants if isinstance(value, tuple)]
    attributes = chain.from_iterable(code.co_names for code in codes)
    return frozenset(attributes), frozenset(chain.from_iterable(constant_tuples))
