# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Measures, on the user's own model and data, what this package promises."""

import copy
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from accelerate.logging import get_logger

from ..algorithms.responses import up_to_first_end
from ..media.encoding import EncodedPrompt, placeholder_token_ids
from ..packing.layout import group_by_prompt


if TYPE_CHECKING:
    from .multimodal import MultimodalMixin


logger = get_logger(__name__)

_NEW_TOKENS = 4


@dataclass
class SelfCheck:
    """
    What the self-check measured, as largest absolute differences of log-probabilities over all processes.

    Args:
        packed (`float` or `None`):
            Packed against padded forward; `None` where packing is off.
        media (`float` or `None`):
            Effect of taking the media away; `None` if the first batch has none.
        rows (`float`):
            Prompts in one forward, as far as they share one, against each alone.
        apart (`str` or `None`):
            Which prompts get forwards of their own for that, see [`~packing.completion_scores`].
        sampled (`float` or `None`):
            Recomputed log-probabilities against those of sampling; `None` with vLLM.
        tolerance (`float`):
            What counts as equal, from the dtype of the computation.
    """

    packed: float | None
    media: float | None
    rows: float
    apart: str | None
    sampled: float | None
    tolerance: float

    def __str__(self) -> str:
        parts = []
        if self.packed is not None:
            equal = "=" if self.packed <= self.tolerance else "differs from"
            parts.append(f"packed {equal} padded {self.packed:.0e}")
        parts.append("no media yet" if self.media is None else f"media moves log-probs by {self.media:.2g}")
        rows = f"rows {'in' if self.rows <= self.tolerance else ''}dependent {self.rows:.0e}"
        parts.append(rows if self.apart is None else f"{rows} (each {self.apart} apart)")
        if self.sampled is not None:
            equal = "=" if self.sampled <= self.tolerance else "differs from"
            parts.append(f"recomputed {equal} sampled {self.sampled:.0e}")
        return f"self-check: {', '.join(parts)}"


def run_self_check(trainer: "MultimodalMixin") -> SelfCheck:
    """
    Runs the four checks on the prompts at hand and sets the trainer's fallbacks.

    Args:
        trainer (`MultimodalMixin`):
            Trainer in evaluation mode, with encoded prompts.

    Returns:
        [`SelfCheck`]: The measurements, the same on every process.

    Raises:
        `RuntimeError`: If taking the media away changes nothing, that is if the model doesn't get them.
    """
    prompts = list(group_by_prompt(trainer._samples))
    first = next((p for p in prompts if p.media), prompts[0])
    twin = replace(first, mask_cache={})
    others = [p for p in prompts if p is not first] or [twin]
    # A partner whose media have another shape than the first's is the harder case
    second = next((p for p in others if _shapes(p) != _shapes(first)), others[0])
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision)
    tolerance = 2 * math.sqrt(torch.finfo(autocast or trainer._unwrapped(trainer.model).dtype).eps)

    ids, mask, sampled = _scripted(trainer, first) if trainer.use_vllm else _sample(trainer, first)

    def score(prompts, packed, **options):
        samples = [p for p in prompts for _ in range(2)]
        many = [t.repeat(len(prompts), 1) for t in (ids, mask)]
        return trainer._score(trainer.model, samples, *many, packed=packed, **options).logps

    # Every process runs every forward, whatever its prompts hold: a sharded model would hang otherwise
    alone = score([first], packed=False)
    sampled = None if sampled is None else _worst(trainer, _difference(alone, sampled, mask))
    packed = None
    if trainer._can_pack:
        packed = _worst(trainer, _attempt(lambda: _difference(score([first], packed=True), alone, mask)))
    # Not zero: some models drop tiles that are zero throughout, as padding
    without = {
        name: value * 1e-3 if value.is_floating_point() and "mask" not in name else value
        for name, value in first.media.items()
    }
    effect = _difference(score([replace(first, media=without, mask_cache={})], packed=False), alone, mask)
    media = -_worst(trainer, -effect if first.media else -math.inf)  # the least over processes that have some

    separate = torch.cat([alone, score([second], packed=False), alone])
    use_packed = packed is not None and packed <= tolerance

    def joined(apart):
        scores = score([first, second, twin], packed=use_packed, apart=apart)
        return _difference(scores, separate, mask.repeat(3, 1))

    splits = [None, "media", "prompt"]
    for apart in splits[splits.index(trainer._apart) :]:
        rows = _worst(trainer, _attempt(joined, apart))
        if rows <= tolerance:
            break
    result = SelfCheck(packed, None if media == math.inf else media, rows, apart, sampled, tolerance)
    _apply(trainer, result)
    return result


def _apply(trainer: "MultimodalMixin", result: SelfCheck) -> None:
    if result.media == 0:
        raise RuntimeError(
            f"{result}. The model answers the same without its media, so training would ignore them. Check that the chat "
            "template writes a placeholder for each medium and that the model is the one the processor belongs to."
        )
    if result.packed is not None and not result.packed <= result.tolerance:
        logger.warning(f"{result}. Completions are scored in padded rows from here on.")
        trainer._can_pack = False
    if result.apart != trainer._apart:
        logger.warning(f"{result}. Prompts that disturb each other get forwards of their own from here on.")
        trainer._apart = result.apart
    if result.sampled is not None and not result.sampled <= result.tolerance and trainer._share_prefill:
        logger.warning(f"{result}. Prompts are prefilled once per completion from here on.")
        trainer._share_prefill = False


def _sample(trainer, prompt: EncodedPrompt) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two short completions of a prompt, their mask, and the log-probabilities they were sampled with."""
    config = copy.deepcopy(trainer.generation_config)
    config.update(max_new_tokens=_NEW_TOKENS, min_new_tokens=None, return_dict_in_generate=True, output_logits=True)
    output = trainer._sample_completions([prompt, prompt], config)
    logits = torch.stack(output.logits, dim=1)[:2].float() / trainer.temperature
    ids = output.sequences[:2, -logits.size(1) :]
    mask = up_to_first_end(ids, trainer.eos_token_ids).long()
    sampled = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return ids, mask, sampled


def _scripted(trainer, prompt: EncodedPrompt) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Two completions made of the prompt's last text tokens, where the engine that samples gives no logits."""
    placeholders = set().union(
        *placeholder_token_ids(trainer._unwrapped(trainer.model), trainer.processing_class).values()
    )
    text = [i for i in prompt.input_ids.tolist() if i not in placeholders][-_NEW_TOKENS:]
    ids = torch.tensor([text, text[::-1]], device=trainer.accelerator.device)
    return ids, torch.ones_like(ids), None


def _worst(trainer, value: float) -> float:
    """The largest over all processes, so that all decide alike."""
    return trainer.accelerator.gather(torch.tensor([value], device=trainer.accelerator.device)).max().item()


def _shapes(prompt: EncodedPrompt) -> dict[str, torch.Size]:
    return {name: value.shape[1:] for name, value in prompt.media.items()}


def _difference(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> float:
    return ((a - b) * mask).abs().max().item()


def _attempt(measure, *args) -> float:
    """A forward that fails is as wrong as one that differs."""
    try:
        return measure(*args)
    except (IndexError, NotImplementedError, RuntimeError, ValueError) as error:
        logger.warning(f"self-check: {error}")
        return math.inf
