# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Log-probabilities of a policy against those of the model's own forward, with decisions common to all ranks."""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn

from ..encoding.join import continued_field
from ..encoding.prompts import EncodedPrompt, hears_videos, prompt_position_ids
from ..families import TOKEN_FIELDS, family_of
from ..forward.attention import original_attention
from ..forward.inputs import to_model
from ..forward.logprobs import takes_logits_to_keep
from ..models.wrapped import computing_dtype
from ..policy import PolicyForward
from .rounding import STRICT, exceeds, measure_noise, tolerance_of, two_steps
from .targets import choose, traits_of, with_other_media


logger = get_logger(__name__)

_Result = TypeVar("_Result")

# A model ignores a medium that moves log-probabilities by less than this share of the tolerance
_MOVES = 1e-2


class Case(NamedTuple):
    """A prompt of any rank, checked on all of them."""

    prompt: EncodedPrompt
    plain: dict[str, torch.Tensor]  # outputs of the processor as loaded, for prompts that are compared with it


def outputs_of(prompt: EncodedPrompt) -> dict[str, torch.Tensor]:
    """A prompt as a processor returns it."""
    fields = {"input_ids": prompt.input_ids, **prompt.token_fields}
    return {**prompt.media, **{name: value[None] for name, value in fields.items()}}


def _shapes(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in outputs.items()}


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised for, says nothing about exactness."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, Exception) and should_reduce_batch_size(error):
            return True
        # Of allocations outside PyTorch's allocator
        if isinstance(error, RuntimeError) and re.search("(?i)out of memory|STATUS_ALLOC_FAILED", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


class Measure:
    """
    Compares a policy with the model's own forward.

    `fallbacks` start as the policy's and become those that exact scores need. `failure` is the error of the last
    attempt.
    """

    def __init__(self, policy: PolicyForward, model: nn.Module, engine_positions: bool):
        assert policy.accelerator is not None
        self.policy, self.prepared = policy, model
        self.model = policy.unwrapped(model)
        self.accelerator = policy.accelerator
        self.device = self.accelerator.device
        self.dtype = computing_dtype(self.accelerator, self.model)
        self.tolerance = tolerance_of(self.dtype)
        self.fallbacks = replace(policy.fallbacks)
        self.model_type = self.model.config.model_type
        self.has_engine = engine_positions
        self.failure = ""
        self.largest_logit = 0.0  # of the truth, on this rank

    # The policy

    def score(
        self,
        prompts: list[EncodedPrompt],
        ids: torch.Tensor,
        mask: torch.Tensor,
        packed: bool,
        isolate: Literal["media", "prompt"] | None = None,
        model: nn.Module | None = None,
    ) -> torch.Tensor:
        """
        Log-probabilities `(P * B, N)` of the same completions `(B, N)` to each of `P` prompts, by default by the model
        as it was prepared.
        """
        fresh = [replace(prompt, mask_cache={}) for prompt in prompts]
        repeated = [prompt for prompt in fresh for _ in range(len(ids))]
        rows = [each.repeat(len(prompts), 1) for each in (ids, mask)]
        fallbacks = replace(self.fallbacks, isolate=isolate)
        model = self.prepared if model is None else model
        return self.policy.score(model, repeated, *rows, packed=packed, fallbacks=fallbacks).logps

    # The model's own forward

    def at_engine_positions(self, prompt: EncodedPrompt) -> bool:
        """Whether an engine has a prompt at other positions than the model."""
        if not self.has_engine or not prompt.media:
            return False
        expected = prompt_position_ids(self.model, prompt.input_ids, prompt.media, prompt.token_fields)
        return not torch.equal(expected, prompt.position_ids)

    def model_inputs(self, outputs: dict[str, torch.Tensor], prompt: EncodedPrompt) -> dict[str, torch.Tensor]:
        """Inputs of the model from a processor's outputs for one prompt."""
        inputs = to_model(outputs, self.model, self.device)
        inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
        hears = hears_videos(self.model, prompt.input_ids)
        return {**inputs, "use_audio_in_video": torch.tensor(True)} if hears else inputs

    def model_logps(self, inputs: dict[str, torch.Tensor], prompt: EncodedPrompt, ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of completions `(B, N)` by the model's own forward, one by one."""
        if self.at_engine_positions(prompt):
            positions = prompt.position_ids.to(self.device)
            following = positions[..., -1:] + 1 + torch.arange(ids.size(1), device=self.device)
            inputs = {**inputs, "position_ids": torch.cat([positions, following], dim=-1)}
        return torch.cat([self._model_logps(inputs, row) for row in ids[:, None]])

    def _model_logps(self, inputs: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """Those of one completion `(1, N)`."""
        n_new = ids.size(1)
        whole = {**inputs, "input_ids": torch.cat([inputs["input_ids"], ids], dim=1)}
        for name, value in (("attention_mask", 1), *((name, 0) for name in TOKEN_FIELDS if name in inputs)):
            whole[name] = nn.functional.pad(whole[name], (0, n_new), value=value)
        for name in family_of(self.model).token_masks:
            if name in inputs:
                whole[name] = continued_field(self.model, name, whole[name], n_new)
        return self.logps_of(self._logits(whole, n_new + 1)[:, -n_new - 1 : -1], ids)

    def _logits(self, inputs: dict[str, torch.Tensor], last: int) -> torch.Tensor:
        """Logits of at least the `last` tokens."""
        kept = {"logits_to_keep": last} if takes_logits_to_keep(self.model) else {}
        with self.accelerator.autocast(), original_attention(self.model):
            return self.prepared(**inputs, **kept, use_cache=False).logits

    def row_logps(self, row: EncodedPrompt, last: int) -> torch.Tensor:
        """Log-probabilities `(1, P - 1)` of a row's tokens after the first; those before the `last` may be 0."""
        inputs = self.model_inputs(outputs_of(row), row)
        logits = self._logits(inputs, min(last + 1, len(row)))[:, :-1]
        logps = self.logps_of(logits, inputs["input_ids"][:, -logits.size(1) :])
        return nn.functional.pad(logps, (len(row) - 1 - logps.size(1), 0))

    def row_logits(self, row: EncodedPrompt) -> torch.Tensor:
        """The logits `(1, P, vocabulary)` of a row's tokens."""
        return self._logits(self.model_inputs(outputs_of(row), row), len(row))

    def row_reward(self, row: EncodedPrompt) -> torch.Tensor:
        """The score `(1, 1)` that a reward model's own forward gives a row."""
        scores = self._logits(self.model_inputs(outputs_of(row), row), 1).float()
        self.largest_logit = max(self.largest_logit, scores.abs().max().item())
        return scores

    def logps_of(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities `(B, N)` of ids, from logits that may stop where completions end."""
        ids_of_logits = ids[:, : logits.size(1), None]
        logits = logits.float() / self.policy.temperature
        # Those that matter, without tokens that are masked by the lowest number
        ends = torch.cat([logits.amax(-1, keepdim=True), logits.gather(-1, ids_of_logits)], dim=-1)
        self.largest_logit = max(self.largest_logit, ends.abs().max().item() * self.policy.temperature)
        logps = logits.log_softmax(-1).gather(-1, ids_of_logits)[..., 0]
        return nn.functional.pad(logps, (0, ids.size(1) - logits.size(1)))

    # Media

    def cases(
        self, prompts: Sequence[EncodedPrompt], plain: Callable[[int], dict[str, torch.Tensor]]
    ) -> tuple[list[Case], dict[str, EncodedPrompt], list[Any]]:
        """
        Prompts to measure, prompts to take other media from by modality, and partners, the same on all ranks; `plain`
        returns what the processor as loaded makes of one of this rank's that has media.
        """

        def reread(i: int) -> dict[str, torch.Tensor]:  # only the run's template knows the tools of a prompt
            return plain(i) if prompts[i].media else outputs_of(prompts[i])

        process = self.accelerator.process_index
        traits = gather_object([traits_of(process, i, prompt) for i, prompt in enumerate(prompts)])
        targets, donors, partners = choose(traits)
        cases: dict[Any, Case] = {}
        for each in dict.fromkeys([*targets, *donors.values(), *partners]):
            is_own = each.process == process
            outputs = self.require(
                "its processor, as `AutoProcessor.from_pretrained` loads it,",
                lambda each=each, wanted=is_own and each in targets: reread(each.index) if wanted else {},
            )
            case = Case(prompts[each.index], outputs) if is_own else None
            cases[each] = broadcast_object_list([case], from_process=each.process)[0]
        others = {kind: cases[each].prompt for kind, each in donors.items()}
        return [cases[each] for each in targets], others, [cases[each].prompt for each in partners]

    def features(self, ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> float:
        """The largest difference of outputs from those of the processor as loaded, relative to the largest value."""
        worst = 0.0 if _shapes(ours) == _shapes(plain) else math.inf
        for name, value in plain.items() if worst == 0 else ():
            if value.numel():
                expected = value.to(ours[name].dtype).double()  # trainers cast features when they read them
                gap = (ours[name].double() - expected).abs().max() / expected.abs().max().clamp(min=1)
                worst = max(worst, gap.item())
        worst = self.worst(worst)
        steps = [torch.finfo(value.dtype).eps for value in ours.values() if value.is_floating_point()]
        if not worst <= max([STRICT, *steps]):  # whatever dtype the model has
            raise self.inexact(
                f"its media tensors differ by {worst:.0e} from those of its processor as "
                "`AutoProcessor.from_pretrained` loads it; pass that as `processing_class`"
            )
        return worst

    def effect(
        self,
        kind: str,
        prompt: EncodedPrompt,
        donor: EncodedPrompt | None,
        score: Callable[[Any], torch.Tensor],
        scores: torch.Tensor,
        mask: torch.Tensor,
    ) -> float:
        """How far another medium of a kind moves the scores of a prompt; NaN if there is no other."""
        swapped = with_other_media(prompt, kind, donor)
        if all(torch.equal(prompt.media[name], swapped.media[name]) for name in prompt.media):
            return math.nan
        moved = self.difference(self.require(f"scoring another {kind}", lambda: score(swapped)), scores, mask)
        if moved <= _MOVES * self.tolerance:
            raise RuntimeError(
                f"self-check: {self.model_type} answers the same with another {kind} (log-probs move by {moved:.0e}), "
                f"so training would ignore it. Check that the chat template writes a placeholder for each {kind}, "
                "that the model is the one the processor belongs to, and that its weights are loaded."
            )
        return moved

    # Decisions common to all ranks

    def difference(self, a: torch.Tensor | None, b: torch.Tensor, mask: torch.Tensor) -> float:
        """The largest difference over all ranks; infinite if there is nothing to compare."""
        value = math.inf
        if a is not None and a.shape == b.shape:
            value = torch.where(mask.bool(), a - b, 0.0).abs().max().item()
        return self.worst(math.inf if math.isnan(value) else value)

    def compare(
        self, a: torch.Tensor | None, b: torch.Tensor, mask: torch.Tensor, noise: Callable[[], torch.Tensor | None]
    ) -> tuple[float, bool]:
        """
        The largest difference over all ranks, and whether rounding explains those of each rank. `noise` returns that
        of the log-probabilities `b`, see [`noise`].
        """
        largest = self.difference(a, b, mask)
        if largest <= self.tolerance:
            return largest, True
        scale = noise() if math.isfinite(largest) else None
        if a is None or scale is None:
            return largest, False
        steps = two_steps(self.dtype, self.worst(self.largest_logit)) / self.policy.temperature
        self.tolerance = max(self.tolerance, steps)
        kept = mask.bool()
        return largest, not self.worst(float(exceeds((a - b)[kept], scale[kept], self.tolerance)))

    def settle(
        self,
        score: Callable[[bool], torch.Tensor],
        truth: torch.Tensor,
        mask: torch.Tensor,
        noise: Callable[[], torch.Tensor | None],
        *,
        packs: bool = True,
        isolates: bool = False,
        label: str = "",
    ) -> tuple[torch.Tensor, float, float | None]:
        """
        What `score` returns for padded rows, its difference from the truth, and that of packed rows if there are any,
        see [`compare`]. Sets the first fallbacks under which scores are exact, with `isolates` of those that separate
        prompts, too. Raises a `RuntimeError` if there are none.
        """
        scores, tried, before = None, list[float](), self.fallbacks.logits_from_model
        splits = self.splits() if isolates else self.splits()[:1]
        for from_model, isolate in itertools.product(sorted({before, True}), splits):
            self.fallbacks.logits_from_model, self.fallbacks.isolate = from_model, isolate
            scores = self.attempt("scoring padded rows", lambda: score(False))
            difference, is_exact = self.compare(scores, truth, mask, noise)
            tried.append(difference)
            if scores is not None and is_exact:
                break
        else:
            found = f"scores of padded rows{label} differ by {tried[-1]:.0e} from the model's forward"
            raise self.inexact(found if scores is not None else f"scoring padded rows fails ({self.failure})")
        if len(tried) > 1:
            needs_logits = from_model and not before
            how = "the model's own logits, which need more memory" if needs_logits else f"one forward per {isolate}"
            self.fall_back(f"scores of padded rows{label} differ by {tried[0]:.0e}", how)
        packed = None
        if packs and self.fallbacks.packing:
            packed_scores = self.attempt("scoring packed rows", lambda: score(True))
            packed, is_exact = self.compare(packed_scores, truth, mask, noise)
            if not is_exact:
                self.fall_back(f"scores of packed rows{label} differ by {packed:.0e}", "padded rows", packing=False)
        return scores, difference, packed

    def noise(self, score: Callable[[], torch.Tensor], mask: torch.Tensor) -> torch.Tensor | None:
        """The noise of what `score` returns, as in [`rounding`]; `None` in float32, or if it can't be measured."""
        if self.tolerance <= STRICT:
            return None
        return self.attempt("measuring the noise", lambda: measure_noise(self.model, self.dtype, score, mask))

    def worst(self, value: float) -> float:
        """The largest value over all ranks."""
        return self.accelerator.gather(torch.tensor([value], device=self.device)).max().item()

    def attempt(self, name: str, measure: Callable[[], _Result], quiet: bool = False) -> _Result | None:
        """
        Warns if something fails; returns `None` on all ranks if it failed on one. Running out of memory raises on all.
        """
        result = failed = None
        try:
            result = measure()
        except Exception as error:
            failed = error
        no_memory = is_out_of_memory(failed)
        outcome = self.worst(2.0 if no_memory else float(result is None))
        if outcome == 2:
            raise failed if no_memory and failed else MemoryError(f"{name} ran out of memory in another process")
        if failed is not None:
            self.failure = f"{type(failed).__name__}: {failed}"
            if not quiet:
                logger.warning(f"self-check: {self.model_type}: {name} failed ({self.failure}).")
        return None if outcome else result

    def require(self, name: str, measure: Callable[[], _Result]) -> _Result:
        result = self.attempt(name, measure)
        if result is None:
            raise self.inexact(f"{name} fails ({self.failure})")
        return result

    def fall_back(self, problem: str, fallback: str, **fallbacks: bool | str | None) -> None:
        """Logs why a fallback is used from here on, and sets these fields of the fallbacks."""
        logger.warning(f"self-check: {self.model_type}: {problem}; falling back to {fallback}.")
        for name, value in fallbacks.items():
            setattr(self.fallbacks, name, value)

    def splits(self) -> list[Literal["media", "prompt"] | None]:
        """The present value of the fallback `isolate`, and those that separate more prompts."""
        splits: list[Literal["media", "prompt"] | None] = [None, "media", "prompt"]
        return splits[splits.index(self.fallbacks.isolate) :]

    def inexact(self, reason: str) -> RuntimeError:
        return RuntimeError(
            f"self-check: {self.model_type} can't be trained exactly: {reason}. To train anyway, set "
            "`self_check=False`."
        )
