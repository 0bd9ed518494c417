# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Metric of how much the policy's completions depend on the media of their prompts."""

from collections.abc import Callable, Sequence

import torch
from accelerate.logging import get_logger
from torch import nn

from ..data.reading.refs import MediaError
from ..encoding.prompts import EncodedPrompt
from ..forward.prompt_groups import group_by_prompt
from ..forward.scores import ScoreRequest
from ..modalities import MODALITIES
from ..models.modes import measurement_mode
from ..policy import Completions, PolicyForward
from ..views.views import View, as_view


logger = get_logger(__name__)

# Prompts per rank. Two are enough, as a completion has many tokens and a run has many batches.
_N_PROMPTS = 2


def media_contribution(
    policy: PolicyForward,
    model: nn.Module,
    completions: Completions,
    mask: torch.Tensor,
    encode: Callable[[int, View], EncodedPrompt],
) -> dict[str, float]:
    """
    Returns by modality how far the log-probabilities of a few completions move, in nats per token, if silence or grey
    of the same size replaces the media. It is exactly 0 for a policy that ignores media, as both forwards round alike.
    All ranks must call this. `encode` takes a completion's batch index and a view.
    """
    prompts, ids, completion_mask = completions
    # Batch index of a completion, a modality of its prompt, and the prompt without media of this modality
    cases = [
        (index, modality, _prompt_without(encode, index, modality)) for index, modality in _select_cases(prompts, mask)
    ]
    cases = [case for case in cases if case[2] is not None]
    accelerator = policy.accelerator
    assert accelerator is not None
    if not accelerator.gather(torch.tensor([bool(cases)], device=accelerator.device)).any():
        return {}
    # A rank without cases forwards its first prompt, since all ranks must take part in collectives. The modality
    # `None` excludes this forward from the sums.
    indices, modalities, blank_prompts = (
        list(column) for column in zip(*(cases or [(0, None, prompts[0])]), strict=True)
    )
    mask = mask[indices]
    with measurement_mode(model, accelerator.device):
        logps = [
            policy.score(model, ScoreRequest(row_prompts, ids[indices], completion_mask[indices], packed=False)).logps
            for row_prompts in ([prompts[index] for index in indices], blank_prompts)
        ]
    change = ((logps[0] - logps[1]).abs() * mask).sum(1)
    # By modality, the sum of changes and the number of tokens
    sums = torch.zeros(len(MODALITIES), 2, dtype=change.dtype, device=change.device)
    for i, modality in enumerate(modalities):
        if modality is not None:
            sums[MODALITIES.index(modality)] += torch.stack([change[i], mask[i].sum().to(change.dtype)])
    sums = accelerator.reduce(sums, reduction="sum").cpu()
    means = {
        modality: (total / count).item() for modality, (total, count) in zip(MODALITIES, sums, strict=True) if count
    }
    metrics = {}
    if means:
        metrics["media/contribution"] = (sums[:, 0].sum() / sums[:, 1].sum()).item()
    if len(means) > 1:
        for modality, mean in means.items():
            metrics[f"media/contribution/{modality}"] = mean
    return metrics


def _select_cases(prompts: Sequence[EncodedPrompt], mask: torch.Tensor) -> list[tuple[int, str]]:
    """Returns (batch index, modality) pairs, one per modality of up to `_N_PROMPTS` prompts with tokens that count."""
    cases: list[tuple[int, str]] = []
    for indices in group_by_prompt(prompts).values():
        # `encode` returns only the prompt before tool results, so completions with media of tools are left out
        candidates = [index for index in indices if mask[index].any() and len(prompts[index].parts) == 1]
        if candidates:
            cases += [(candidates[0], modality) for modality in sorted(prompts[candidates[0]].modalities)]
        if len({index for index, _ in cases}) == _N_PROMPTS:
            break
    return cases


def _prompt_without(encode: Callable[[int, View], EncodedPrompt], index: int, modality: str) -> EncodedPrompt | None:
    try:
        return encode(index, as_view("blank").for_modality(modality))
    except MediaError as error:
        logger.warning_once(f"`media/contribution` leaves out prompts whose media can't be read again: {error}")
        return None
