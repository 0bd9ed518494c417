# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Metric of how much the policy's completions depend on the media of their prompts."""

from collections.abc import Callable, Sequence

import torch
from accelerate.logging import get_logger
from torch import nn

from ..data.reading.refs import MediaError
from ..encoding.prompts import EncodedPrompt
from ..families import MODALITIES
from ..forward.layout import group_by_prompt
from ..forward.scores import ScoreRequest
from ..models.modes import measurement_mode
from ..policy import Completions, PolicyForward
from ..views.views import View, as_view


logger = get_logger(__name__)

# Prompts per rank. Two are enough, as a completion has many tokens and a run has many batches.
_PROMPTS = 2


def is_due(every: int, step: int, n_steps: int) -> bool:
    """Returns whether one of the `n_steps` updates after `step` is a multiple of `every`."""
    return (step + n_steps) // every > step // every


def media_contribution(
    policy: PolicyForward,
    model: nn.Module,
    completions: Completions,
    mask: torch.Tensor,
    encode: Callable[[int, View], EncodedPrompt],
) -> dict[str, float]:
    r"""
    Returns metrics of how far log-probabilities of completions move without the media of their prompts.

    For the tokens $y_t$ of a few completions, the metric is the mean of

    $$|\log \pi(y_t \mid x, m, y_{<t}) - \log \pi(y_t \mid x, \tilde{m}, y_{<t})|$$

    in nats, where $m$ are the media of one modality in the prompt, and $\tilde{m}$ silence or grey of the same
    duration and size. For a policy that ignores media, the metric is exactly 0, as both forwards have the same shape
    and round alike. All ranks must call this function. `mask` `(B, C)` is 1 on tokens that count, and `encode` encodes
    the prompt of a completion under a view.
    """
    prompts, ids, completion_mask = completions
    # Index of a completion, a modality of its prompt, and the prompt without media of this modality
    cases = [(row, kind, _without(encode, row, kind)) for row, kind in _select_cases(prompts, mask)]
    cases = [case for case in cases if case[2] is not None]
    accelerator = policy.accelerator
    assert accelerator is not None
    if not accelerator.gather(torch.tensor([bool(cases)], device=accelerator.device)).any():
        return {}
    # Ranks without anything to measure take part in the forwards, which may have collectives
    rows, kinds, without = (list(entries) for entries in zip(*(cases or [(0, None, prompts[0])]), strict=True))
    mask = mask[rows]
    with measurement_mode(model, accelerator.device):
        logps = [
            policy.score(model, ScoreRequest(entries, ids[rows], completion_mask[rows], packed=False)).logps
            for entries in ([prompts[row] for row in rows], without)
        ]
    change = ((logps[0] - logps[1]).abs() * mask).sum(1)
    sums = torch.zeros(len(MODALITIES), 2, dtype=change.dtype, device=change.device)
    for i, kind in enumerate(kinds):
        if kind is not None:
            sums[MODALITIES.index(kind)] += torch.stack([change[i], mask[i].sum().to(change.dtype)])
    sums = accelerator.reduce(sums, reduction="sum").cpu()
    means = {kind: (total / count).item() for kind, (total, count) in zip(MODALITIES, sums, strict=True) if count}
    metrics = {}
    if means:
        metrics["media/contribution"] = (sums[:, 0].sum() / sums[:, 1].sum()).item()
    for kind, mean in means.items() if len(means) > 1 else ():
        metrics[f"media/contribution/{kind}"] = mean
    return metrics


def _select_cases(prompts: Sequence[EncodedPrompt], mask: torch.Tensor) -> list[tuple[int, str]]:
    """Returns pairs of a completion's index and a modality, for one completion of each of up to `_PROMPTS` prompts."""
    cases: list[tuple[int, str]] = []
    for rows in group_by_prompt(prompts).values():
        # `encode` returns only the first part of a prompt, so prompts with later parts (media of tools) are left out
        plain = [row for row in rows if mask[row].any() and len(prompts[row].parts) == 1]
        cases += [(row, kind) for row in plain[:1] for kind in sorted(prompts[row].modalities)]
        if len({row for row, _ in cases}) == _PROMPTS:
            break
    return cases


def _without(encode: Callable[[int, View], EncodedPrompt], row: int, kind: str) -> EncodedPrompt | None:
    """Returns a completion's prompt without media of a modality, or `None` if its media have become unreadable."""
    try:
        return encode(row, as_view("blank").for_modality(kind))
    except MediaError as error:
        logger.warning_once(f"`media/contribution` leaves out prompts whose media can't be read again: {error}")
        return None
