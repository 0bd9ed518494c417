# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A fused LM head with TRL's kernel, and the scale and soft cap of a model's logits."""

import functools
import inspect
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import (
    FusedCausalLMOutput,
    add_fused_lm_head,
    maybe_gather_lm_head_ctx,
    selective_log_softmax_and_entropy,
)

from ..models.wrapped import replaced


# Probes of `head_rule`, exact in half precision: states that a norm would change, the largest logit, and a logit so
# small that no soft cap changes it
_STATES = (1.0, 2.0)
_LOGIT_RANGE = 125
_SMALL_LOGIT = 2.0**-20

_RTOL = 1e-5  # relative tolerance of a measured scale or logit

# Number of logits per token that are in memory at once, as in TRL
_CHUNK_SIZE = 32768


class LinearHead(Protocol):
    """A module or a tuple with the weight `(V, H)` and the bias `(V,)` of an LM head."""

    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def bias(self) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class HeadRule:
    """The scale that a model applies to the logits of its LM head, and the soft cap of the scaled logits."""

    scale: float = 1.0  # factor of the logits
    softcap: float | None = None  # largest logit, by `softcap * tanh(logit / softcap)`


def head_rule(model: PreTrainedModel) -> HeadRule | None:
    """
    Measures the scale and soft cap of a model's logits, which its config may omit or misstate, by the forward of its
    class with fixed backbone and head, so weights needn't be loaded. `None` if the model changes logits in any other
    way.
    """
    head = cast(nn.Linear | None, model.get_output_embeddings())
    backbone = _backbone(model)
    if head is None or backbone is None:
        return None
    # TRL doesn't call the head but multiplies by its weight, so an adapter of the head would be skipped. PEFT's
    # wrapper for `modules_to_save` is no obstacle: its `weight` is the weight of the active copy.
    if hasattr(head, "modules_to_save"):
        is_plain = all(_is_plain(layer) for layer in [head.original_module, *head.modules_to_save.values()])
    else:
        is_plain = _is_plain(head)
    if not is_plain:
        return None
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    states = torch.tensor(_STATES, device=device, dtype=torch.double).repeat(head.in_features)[: head.in_features]
    # States `(1, 2, H)`, and logits `(1, 2, V)`: from -125 to 125 at the first token, small ones at the second
    states = torch.stack([states, 2 * states])[None]
    logits = torch.arange(head.out_features, device=device, dtype=torch.double) % (2 * _LOGIT_RANGE + 1) - _LOGIT_RANGE
    logits = torch.stack([logits, torch.full_like(logits, _SMALL_LOGIT)])[None]
    inputs = []
    ids = torch.zeros(states.shape[:2], dtype=torch.long, device=device)
    try:
        with (
            torch.no_grad(),
            replaced(backbone, forward=lambda *args, **kwargs: _BackboneOutput(states)),
            replaced(head, forward=lambda hidden: inputs.append(hidden) or logits.clone()),
        ):
            result = type(model).forward(model, input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    except Exception:  # such as in a forward that requires media
        return None
    if [hidden.shape for hidden in inputs] != [states.shape] or result.shape != logits.shape:
        return None
    # Factors that the model applies before the head, to its inputs, and after it, to its logits. Small logits show the
    # scale without the soft cap.
    scale_before = (inputs[0] / states).flatten()
    scale_after = (result[0, 1] / _SMALL_LOGIT).flatten()
    # One factor must describe all entries, and not be 0. With a bias, a factor of the inputs isn't a factor of the
    # logits, as it doesn't scale the bias.
    is_constant = _is_close(scale_before, scale_before[0]) and _is_close(scale_after, scale_after[0])
    if (
        not is_constant
        or not scale_before[0] * scale_after[0]
        or (head.bias is not None and not _is_close(scale_before[0], 1))
    ):
        return None
    # 12 digits drop rounding errors
    scale = float(f"{scale_before[0].item() * scale_after[0].item():.12g}")
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    # The replaced head ignores its inputs, so `result` has only the factor after the head
    for rule in (HeadRule(scale), HeadRule(scale, softcap)):
        if _is_close(result, _apply_rule(HeadRule(scale_after[0].item(), rule.softcap), logits)):
            return rule
    return None


def add_fused_head(
    model: PreTrainedModel,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
    rule: HeadRule | None = None,
) -> bool:
    """
    Adds a fused LM head, which computes log-probabilities without holding the logits.

    The model's forward then takes the arguments that TRL's `add_fused_lm_head` adds, and `label_index`, the indices
    `(N,)` of labels in flattened `shift_labels`. With `label_index`, the host needn't wait for the device to find the
    labels. Without labels, the forward returns the hidden states before the head.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Unwrapped model, whose forward is replaced.
        temperature (`float`, *optional*, defaults to `1.0`):
            Divides the logits.
        cast_lm_head_to_fp32 (`bool`, *optional*, defaults to `False`):
            Whether to project in float32.
        outputs (`tuple[str, ...]`, *optional*, defaults to `("log_probs",)`):
            Fields of TRL's `FusedCausalLMOutput` to compute.
        rule ([`HeadRule`], *optional*):
            Scale and soft cap of the logits, for a head that FSDP2 has already sharded. By default, they are measured,
            not read from the config.

    Returns:
        `bool`: `True` if the head was added, `False` if it can't reproduce log-probabilities of the model's logits.
    """
    rule = rule or head_rule(model)
    if rule is None:
        return False
    rule_of_head = rule  # for the nested function, a variable that can't be `None`
    # An attribute of the model, so that a copy of the model runs its own weights. With TRL's closure, the copy would
    # run the weights of the first model.
    vars(model).setdefault("_plain_forward", _without_fused_head(model.forward))

    # `wraps` keeps the signature, by which `generate` validates its arguments
    @functools.wraps(type(model).forward)
    def fused_forward(
        self: PreTrainedModel,
        *args: torch.Tensor,
        fused_lm_head: bool = False,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        label_index: torch.Tensor | None = None,
        **kwargs: torch.Tensor | Cache | bool | int | None,
    ) -> ModelOutput:
        forward = vars(self)["_plain_forward"]
        if not fused_lm_head:
            targets = {"labels": labels, "shift_labels": shift_labels}
            return forward(*args, **kwargs, **{name: value for name, value in targets.items() if value is not None})
        states = run_backbone(self, forward, args, {**kwargs, "use_cache": False})
        if labels is None and shift_labels is None:
            return BaseModelOutput(last_hidden_state=states)
        if shift_labels is None:
            assert labels is not None
            states = states[:, :-1]
            shift_labels = labels[:, 1:]
        head = cast(nn.Linear, self.get_output_embeddings())
        return fused_scores(
            states, shift_labels, label_index, head, rule_of_head, temperature, cast_lm_head_to_fp32, outputs
        )

    model.forward = types.MethodType(fused_forward, model)
    return True


def _without_fused_head(forward: Callable) -> Callable:
    function = getattr(forward, "__func__", None)
    if function is None or function.__globals__.get("__name__") != add_fused_lm_head.__module__:
        return forward
    return inspect.getclosurevars(function).nonlocals.get("original_forward", forward)


def fused_scores(
    states: torch.Tensor,
    labels: torch.Tensor,
    index: torch.Tensor | None,
    head: LinearHead,
    rule: HeadRule,
    temperature: float,
    in_fp32: bool,
    outputs: tuple[str, ...],
) -> FusedCausalLMOutput:
    """
    Computes scores of labels `(B, S)`, 0 where labels are -100, from states `(B, S, H)`. `index` `(N,)` holds the
    indices of the `N` labels other than -100 in flattened labels, if they are known.
    """
    dtype = torch.float32 if in_fp32 else states.dtype
    weight = _gather_weight(head.weight, dtype)
    bias = None if head.bias is None else _gather_weight(head.bias, dtype)
    # `device_map` may have put them elsewhere
    states = states.to(weight.device)
    labels = labels.to(weight.device)
    mask = labels != -100
    device = states.device.type
    states = states.float() if in_fp32 else states
    label_index = None
    if _selects_labels(device):
        label_index = mask.flatten().nonzero()[:, 0] if index is None else index
    autocast = torch.autocast(device, enabled=False) if in_fp32 else nullcontext()
    with autocast, gather_weights(weight, bias):
        scores = ChunkedLogProbFunction.apply(
            states.flatten(0, 1) if label_index is None else states.flatten(0, 1).index_select(0, label_index),
            weight,
            bias,
            labels.clamp(min=0).flatten() if label_index is None else labels.flatten().index_select(0, label_index),
            temperature,
            _CHUNK_SIZE,
            rule.softcap,
            rule.scale,
            outputs,
        )

    def scatter(values: torch.Tensor) -> torch.Tensor:
        if label_index is None:
            return values.view(mask.shape).masked_fill(~mask, 0)
        # Even without labels, the result depends on the model, so that all ranks run the backward pass
        return values.new_zeros(mask.numel()).index_copy(0, label_index, values).view(mask.shape)

    # The kernel returns a tuple in this order, with `None` for scores that `outputs` doesn't name
    names = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    computed = {name: scatter(values) for name, values in zip(names, scores, strict=True) if values is not None}
    return FusedCausalLMOutput(**computed, label_mask=mask)


def _gather_weight(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FSDP2's shards are cast first, so that ranks exchange half as much."""
    return cast(DTensor, parameter.to(dtype)).full_tensor() if isinstance(parameter, DTensor) else parameter


def gather_weights(weight: torch.Tensor, bias: torch.Tensor | None) -> AbstractContextManager[None]:
    """Returns a context in which ZeRO-3 holds the whole weights of a head."""
    return maybe_gather_lm_head_ctx(*(cast(nn.Parameter, tensor) for tensor in (weight, bias) if tensor is not None))


def _selects_labels(device: str) -> bool:
    """Returns whether a device scores only positions with labels. Other devices would recompile for each number."""
    return device in ("cuda", "xpu")


def scores_of_logits(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float, entropy_requires_grad: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes log-probabilities of tokens `(...)` and entropies of their distributions, from logits `(..., V)`."""
    logits = logits.float()
    if temperature < 1:
        # Some models give masked tokens the lowest finite logit. Divided by the temperature, the logit would be
        # infinite, and entropies NaN.
        logits = logits.clamp(min=0.5 * temperature * torch.finfo(logits.dtype).min)
    return selective_log_softmax_and_entropy(
        logits, ids, entropy_requires_grad=entropy_requires_grad, temperature=temperature
    )


def _backbone(model: PreTrainedModel) -> nn.Module | None:
    """In a model without a `base_model`, backbone and head are children of one module."""
    if model.base_model is not model:
        return model.base_model
    head = model.get_output_embeddings()
    decoder = model.get_decoder()
    families = ([*module.children()] for module in model.modules())
    siblings = next((children for children in families if head in children), [])
    models = [child for child in siblings if isinstance(child, PreTrainedModel)]
    return decoder if decoder in models else next(iter(models), None)


def run_backbone(
    model: PreTrainedModel, forward: Callable[..., ModelOutput], args: tuple, kwargs: dict
) -> torch.Tensor:
    """Returns the last hidden states. A model without a `base_model` runs its forward with an identity as head."""
    if model.base_model is not model:
        return model.base_model(*args, **kwargs).last_hidden_state
    backbone = _backbone(model)
    head = model.get_output_embeddings()
    outputs = []
    assert backbone is not None and head is not None
    hook = backbone.register_forward_hook(lambda module, inputs, output: outputs.append(output.last_hidden_state))
    with hook, replaced(head, forward=lambda states: states):
        forward(*args, **kwargs)
        return outputs[-1]


class _BackboneOutput:
    """Output of a backbone: the states `(B, S, H)`, and `None` for any other field."""

    def __init__(self, last_hidden_state: torch.Tensor):
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | str) -> torch.Tensor | None:
        return self.last_hidden_state if index in (0, "last_hidden_state") else None


def _is_plain(head: nn.Module | torch.Tensor) -> bool:
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def _apply_rule(rule: HeadRule, logits: torch.Tensor) -> torch.Tensor:
    scaled = rule.scale * logits
    return scaled if rule.softcap is None else rule.softcap * torch.tanh(scaled / rule.softcap)


def _is_close(values: torch.Tensor, expected: torch.Tensor | float) -> bool:
    expected = torch.as_tensor(expected, dtype=torch.double, device=values.device)
    return torch.allclose(values.double(), expected.expand_as(values), rtol=_RTOL, atol=0)
