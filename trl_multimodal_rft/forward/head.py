# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A fused LM head with TRL's kernel, and what a model does around its own head."""

import copy
import functools
import types
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx, selective_log_softmax_and_entropy


# Values that half precision holds exactly: states that no norm keeps, logits, and logits that no soft cap bends
_STATES, _LOGITS, _SMALL = (1.0, 2.0), 125, 2.0**-20

_SAME = 1e-5

# Logits of a token that are in memory at once, as in TRL
_CHUNK_SIZE = 32768


@dataclass(frozen=True)
class HeadRule:
    """What a model does around its LM head: logits are scaled, then soft-capped."""

    scale: float = 1.0  # factor of the logits
    softcap: float | None = None  # largest logit, by `softcap * tanh(logit / softcap)`


def head_rule(model: PreTrainedModel) -> HeadRule | None:
    """
    Measures what a model does around its LM head.

    A copy of it runs with a backbone and a head that return known values. No weight takes part, so that they may be on
    any device, or not loaded yet.

    Returns the rule; `None` if it is another, such as logits that are left out, or not known.
    """
    head, backbone = model.get_output_embeddings(), _backbone(model)
    # TRL projects with the weight, whatever the head's forward does, such as that of an adapter's layer. The wrapper
    # of a module that is trained beside an adapter has the weight that it runs.
    if hasattr(head, "modules_to_save"):
        plain = all(_is_plain(each) for each in [head.original_module, *head.modules_to_save.values()])
    else:
        plain = _is_plain(head)
    if not plain or backbone is None:
        return None
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    states = torch.tensor(_STATES, device=device, dtype=torch.double).repeat(head.in_features)[: head.in_features]
    states = torch.stack([states, 2 * states])[None]
    logits = torch.arange(head.out_features, device=device, dtype=torch.double) % (2 * _LOGITS + 1) - _LOGITS
    logits = torch.stack([logits, torch.full_like(logits, _SMALL)])[None]
    taken = []
    ids = torch.zeros(states.shape[:2], dtype=torch.long, device=device)
    replaced = {
        backbone: _with_forward(backbone, lambda *args, **kwargs: _Outputs(states)),
        head: _with_forward(head, lambda given: taken.append(given) or logits.clone()),
    }
    try:
        with torch.no_grad():
            result = _with_modules(model, replaced)(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    except Exception:  # such as of a family whose forward wants media
        return None
    if [given.shape for given in taken] != [states.shape] or result.shape != logits.shape:
        return None
    before, behind = (taken[0] / states).flatten(), (result[0, 1] / _SMALL).flatten()
    if not _is_constant(before) or not _is_constant(behind) or (head.bias is not None and not _is(before[0], 1)):
        return None
    scale = float(f"{before[0].item() * behind[0].item():.12g}")
    given_cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    for rule in (HeadRule(scale), HeadRule(scale, given_cap)):
        if _is(result, _apply(HeadRule(behind[0].item(), rule.softcap), logits)):
            return rule
    return None


def add_fused_head(
    model: PreTrainedModel,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> bool:
    """
    Adds a fused LM head, called as that of TRL's `add_fused_lm_head`, with what the model itself does around its head.
    TRL reads that from the config of the text model, which may name what isn't done, or not name what is.

    Returns whether the fused head gives the log-probabilities of the model's own logits; otherwise none is added.
    """
    rule = head_rule(model)
    if rule is None:
        return False
    forward = model.forward

    # `generate` validates its arguments by the signature
    @functools.wraps(type(model).forward)
    def fused_forward(self, *args, fused_lm_head=False, labels=None, shift_labels=None, **kwargs):
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels}
            return forward(*args, **kwargs, **{name: value for name, value in given.items() if value is not None})
        output = self.base_model(*args, **{**kwargs, "use_cache": False})
        states = output.last_hidden_state
        if shift_labels is None:
            states, shift_labels = states[:, :-1], labels[:, 1:]
        head = self.get_output_embeddings()
        scored = _fused_scores(states, shift_labels, head, rule, temperature, cast_lm_head_to_fp32, outputs)
        if kwargs.get("output_router_logits"):
            config = self.config.get_text_config()
            scored.aux_loss = load_balancing_loss_func(
                output.router_logits, config.num_experts, config.num_experts_per_tok, kwargs.get("attention_mask")
            )
        return scored

    model.forward = types.MethodType(fused_forward, model)
    return True


def _fused_scores(
    states: torch.Tensor,
    labels: torch.Tensor,
    head: Any,
    rule: HeadRule,
    temperature: float,
    in_fp32: bool,
    outputs: tuple[str, ...],
) -> FusedCausalLMOutput:
    """Scores of labels, 0 where they are -100. Shapes: `states` `(B, S, H)`, `labels` `(B, S)`; returns `(B, S)`."""
    parameters: Any = [each.full_tensor() if isinstance(each, DTensor) else each for each in (head.weight, head.bias)]
    weight, bias = parameters
    states, labels = states.to(weight.device), labels.to(weight.device)  # which `device_map` may have split
    mask, device = labels != -100, states.device.type
    states = states.float() if in_fp32 else states
    # Elsewhere, shapes that depend on the number of labels would be compiled anew for each batch
    compact = device in ("cuda", "xpu")
    autocast = torch.autocast(device, enabled=False) if in_fp32 else nullcontext()
    with autocast, maybe_gather_lm_head_ctx(weight, bias):
        scores = ChunkedLogProbFunction.apply(
            states[mask] if compact else states.flatten(0, 1),
            weight,
            bias,
            labels[mask] if compact else labels.clamp(min=0).flatten(),
            temperature,
            _CHUNK_SIZE,
            rule.softcap,
            rule.scale,
            outputs,
        )

    def placed(values: torch.Tensor) -> torch.Tensor:
        if compact:
            # Connected to the model also where no label counts, so that the backward pass runs on all ranks
            return values.new_zeros(mask.shape).masked_scatter(mask, values)
        return values.view(mask.shape).masked_fill(~mask, 0)

    names = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    found = {name: placed(values) for name, values in zip(names, scores, strict=True) if values is not None}
    return FusedCausalLMOutput(**found, label_mask=mask)


def scores_of_logits(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float, entropy_requires_grad: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probabilities of tokens and entropies of their distributions.

    Shapes: `logits` `(..., V)`, `ids` `(...)`; returns `(...)`.
    """
    logits = logits.float()
    if temperature < 1:
        # The lowest number stands for tokens that are left out. Divided it would be infinite, and entropies no number.
        logits = logits.clamp(min=0.5 * temperature * torch.finfo(logits.dtype).min)
    return selective_log_softmax_and_entropy(
        logits, ids, entropy_requires_grad=entropy_requires_grad, temperature=temperature
    )


def _backbone(model: PreTrainedModel) -> nn.Module | None:
    """What makes the states for the head. Some models have none but that of the language model they hold."""
    if model.base_model is not model:
        return model.base_model
    head = model.get_output_embeddings()
    beside = (list(module.children()) for module in model.modules())
    beside = next((children for children in beside if any(child is head for child in children)), [])
    return next((child for child in beside if isinstance(child, PreTrainedModel)), None)


def _with_forward(module: nn.Module, forward: Callable) -> nn.Module:
    """A shallow copy of a module with another forward."""
    copied = copy.copy(module)
    copied.forward = forward
    return copied


def _with_modules(module: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """A model with other submodules. Those that hold them are shallow copies, with the forwards of their classes."""
    if module in replaced:
        return replaced[module]
    children: Any = {name: child and _with_modules(child, replaced) for name, child in module._modules.items()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    copied = copy.copy(module)
    copied._modules = children
    vars(copied).pop("forward", None)
    return copied


class _Outputs:
    """What a backbone returns: states, and nothing else that could be asked for."""

    def __init__(self, last_hidden_state: torch.Tensor):
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | str) -> torch.Tensor | None:
        return self.last_hidden_state if index in (0, "last_hidden_state") else None


def _is_plain(head: nn.Module | None) -> bool:
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def _apply(rule: HeadRule, logits: torch.Tensor) -> torch.Tensor:
    scaled = rule.scale * logits
    return scaled if rule.softcap is None else rule.softcap * torch.tanh(scaled / rule.softcap)


def _is_constant(values: torch.Tensor) -> bool:
    return _is(values, values[0])


def _is(values: torch.Tensor, expected: torch.Tensor | float) -> bool:
    expected = torch.as_tensor(expected, dtype=torch.double, device=values.device)
    return torch.allclose(values.double(), expected.expand_as(values), rtol=_SAME, atol=0)
