# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""TRL's fused LM head, with what a model does around its own."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head, selective_log_softmax_and_entropy


# Values that half precision holds exactly: states that no norm keeps, logits, and logits that no soft cap bends
_STATES, _LOGITS, _SMALL = (1.0, 2.0), 125, 2.0**-20

_SAME = 1e-5


@dataclass(frozen=True)
class HeadRule:
    """What a model does around its LM head: logits are scaled, then soft-capped."""

    scale: float = 1.0  # factor of the logits
    softcap: float | None = None  # largest logit, by `softcap * tanh(logit / softcap)`


def head_rule(model: PreTrainedModel) -> HeadRule | None:
    """
    Measures what a model does around its LM head.

    Its own forward is run between stand-ins for the backbone and the head, whose values are known. No weight takes
    part, so that they may be anywhere, or nowhere yet.

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
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(patch.object(backbone, "forward", lambda *args, **kwargs: _Outputs(states)))
        stack.enter_context(patch.object(head, "forward", lambda given: taken.append(given) or logits.clone()))
        try:
            result = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
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


def add_fused_head(model: PreTrainedModel, **options: Any) -> bool:
    """
    Adds TRL's fused LM head with what the model itself does around its head. TRL reads that from the config of the
    text model, where it may stand and not be done, or not stand and be done.

    Returns whether the fused head gives the log-probabilities of the model's own logits.
    """
    rule = head_rule(model)
    config = model.config.get_text_config()
    known = {} if rule is None else {"logit_scale": rule.scale, "final_logit_softcapping": rule.softcap}
    with ExitStack() as stack:
        for name, value in known.items():
            stack.enter_context(patch.object(config, name, value, create=True))
        add_fused_lm_head(model, **options)
    return rule is not None


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
