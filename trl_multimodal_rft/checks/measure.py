# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Measurement of a policy's log-probabilities against the model's own forward, with decisions common to all ranks."""

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
from ..forward.encoders import to_model
from ..forward.logprobs import takes_logits_to_keep
from ..forward.scores import ScoreRequest
from ..models.wrapped import computing_dtype
from ..policy import PolicyForward
from .rounding import STRICT, exceeds_rounding, measure_noise, tolerance_of, two_steps
from .targets import choose_prompts, traits_of, with_other_media


logger = get_logger(__name__)

_Result = TypeVar("_Result")

# Names of the fallback `Fallbacks.isolate` in reports
FORWARDS: dict[str | None, str] = {"media": "one forward per shape of media", "prompt": "one forward per prompt"}

# If other media move log-probabilities by less than this share of the tolerance, the model counts as ignoring media
_MIN_EFFECT = 1e-2


class Case(NamedTuple):
    """A prompt of one rank that all ranks check, and a processor's outputs for it."""

    prompt: EncodedPrompt
    # Outputs of the processor that `AutoProcessor.from_pretrained` loads; empty if the prompt isn't compared with them
    plain: dict[str, torch.Tensor]


def outputs_of(prompt: EncodedPrompt) -> dict[str, torch.Tensor]:
    """Returns a prompt in the form of a processor's outputs: media, and token ids and token fields `(1, L)`."""
    fields = {"input_ids": prompt.input_ids, **prompt.token_fields}
    return {**prompt.media, **{name: value[None] for name, value in fields.items()}}


def _shapes(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in outputs.items()}


def _relative_difference(ours: torch.Tensor, plain: torch.Tensor) -> float:
    """Returns the largest difference of two tensors, relative to the largest absolute value of `plain`, or to 1."""
    if not plain.numel():
        return 0.0
    expected = plain.to(ours.dtype).double()  # trainers cast features when they read them
    return ((ours.double() - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether an error or one of its causes is a lack of memory, and so says nothing about exactness."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, Exception) and should_reduce_batch_size(error):
            return True
        # Allocations outside PyTorch's allocator raise errors without a specific class
        if isinstance(error, RuntimeError) and re.search("(?i)out of memory|STATUS_ALLOC_FAILED", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


class Measure:
    """
    Measurement of a policy against the model's own forward. `fallbacks` end as those that exact scores need, and
    `failure` is the last error that [`attempt`] caught on this rank. All ranks must make the same calls, as decisions
    are common to them.
    """

    def __init__(self, policy: PolicyForward, model: nn.Module, has_engine_positions: bool):
        assert policy.accelerator is not None
        self.policy = policy
        self.prepared = model  # `prepared` has the accelerator's wrappers, `model` hasn't
        self.model = policy.unwrapped(model)
        self.accelerator = policy.accelerator
        self.device = self.accelerator.device
        self.dtype = computing_dtype(self.accelerator, self.model)
        self.tolerance = tolerance_of(self.dtype)
        self.fallbacks = replace(policy.fallbacks)
        self.model_type = self.model.config.model_type
        self.has_engine_positions = has_engine_positions  # whether prompts have an engine's position ids
        self.failure = ""
        self.largest_logit = 0.0  # absolute, of the model's own forwards on this rank

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
        Returns the policy's log-probabilities `(P * B, N)` of the same `B` completions of up to `N` tokens after each
        of `P` prompts, prompt by prompt. `isolate` tells which prompts get separate forwards, see
        [`~forward.prompt_groups.split_samples`]. `model` defaults to the model as the accelerator prepared it.
        """
        copies = [replace(prompt, mask_cache={}) for prompt in prompts]
        row_prompts = []
        for prompt in copies:
            row_prompts += [prompt] * len(ids)
        ids_and_mask = [tensor.repeat(len(prompts), 1) for tensor in (ids, mask)]
        fallbacks = replace(self.fallbacks, isolate=isolate)
        model = self.prepared if model is None else model
        return self.policy.score(
            model, ScoreRequest(row_prompts, *ids_and_mask, packed=packed), fallbacks=fallbacks
        ).logps

    # The model's own forward

    def at_engine_positions(self, prompt: EncodedPrompt) -> bool:
        """Returns whether a prompt has an engine's position ids, and they differ from those of the model."""
        if not self.has_engine_positions or not prompt.media:
            return False
        model_positions = prompt_position_ids(self.model, prompt.input_ids, prompt.media, prompt.token_fields)
        return not torch.equal(model_positions, prompt.position_ids)

    def model_inputs(self, outputs: dict[str, torch.Tensor], prompt: EncodedPrompt) -> dict[str, torch.Tensor]:
        """Returns the model's inputs, made from a processor's outputs for one prompt."""
        inputs = to_model(outputs, self.model, self.device)
        inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
        has_sounds = hears_videos(self.model, prompt.input_ids)
        return {**inputs, "use_audio_in_video": torch.tensor(True)} if has_sounds else inputs

    def model_logps(self, inputs: dict[str, torch.Tensor], prompt: EncodedPrompt, ids: torch.Tensor) -> torch.Tensor:
        """Returns log-probabilities `(B, N)` of completions by the model's own forward, one completion at a time."""
        if self.at_engine_positions(prompt):
            positions = prompt.position_ids.to(self.device)
            # Tokens of a completion are text, so their positions count on from the prompt's last one
            completion_positions = positions[..., -1:] + 1 + torch.arange(ids.size(1), device=self.device)
            inputs = {**inputs, "position_ids": torch.cat([positions, completion_positions], dim=-1)}
        return torch.cat([self._model_logps(inputs, row) for row in ids[:, None]])

    def _model_logps(self, inputs: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """Returns the log-probabilities `(1, N)` of one completion. Token fields mark its tokens as text."""
        n_new = ids.size(1)
        row_inputs = {**inputs, "input_ids": torch.cat([inputs["input_ids"], ids], dim=1)}
        for name, value in (("attention_mask", 1), *((name, 0) for name in TOKEN_FIELDS if name in inputs)):
            row_inputs[name] = nn.functional.pad(row_inputs[name], (0, n_new), value=value)
        for name in family_of(self.model).token_masks:
            if name in inputs:
                row_inputs[name] = continued_field(self.model, name, row_inputs[name], n_new)
        # The prompt's last token predicts the first new token
        return self.logps_of(self._logits(row_inputs, n_new + 1)[:, -n_new - 1 : -1], ids)

    def _logits(self, inputs: dict[str, torch.Tensor], n_last: int) -> torch.Tensor:
        options = {"logits_to_keep": n_last} if takes_logits_to_keep(self.model) else {}
        with self.accelerator.autocast(), original_attention(self.model):
            return self.prepared(**inputs, **options, use_cache=False).logits

    def row_logps(self, row: EncodedPrompt, n_last: int) -> torch.Tensor:
        """
        Returns log-probabilities `(1, L - 1)` of the `L` tokens of a row, a prompt with its completion, from the
        second token on. Computes at least the last `n_last` of them, and leaves the others at 0.
        """
        inputs = self.model_inputs(outputs_of(row), row)
        logits = self._logits(inputs, min(n_last + 1, len(row)))[:, :-1]
        logps = self.logps_of(logits, inputs["input_ids"][:, -logits.size(1) :])
        return nn.functional.pad(logps, (len(row) - 1 - logps.size(1), 0))

    def row_logits(self, row: EncodedPrompt) -> torch.Tensor:
        """Returns the logits `(1, L, vocabulary)` of the `L` tokens of a row."""
        return self._logits(self.model_inputs(outputs_of(row), row), len(row))

    def row_reward(self, row: EncodedPrompt) -> torch.Tensor:
        """Returns the score `(1, 1)` of a row by a reward model's own forward."""
        scores = self._logits(self.model_inputs(outputs_of(row), row), 1).float()
        self.largest_logit = max(self.largest_logit, scores.abs().max().item())
        return scores

    def logps_of(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Returns log-probabilities `(B, N)` of ids, 0 for ids beyond the logits `(B, M, vocabulary)`, `M <= N`."""
        ids_of_logits = ids[:, : logits.size(1), None]
        logits = logits.float() / self.policy.temperature
        # For `largest_logit`, only the largest logit of a token and the logit of its id count. Models may set other
        # logits to the lowest number of the dtype.
        unmasked = torch.cat([logits.amax(-1, keepdim=True), logits.gather(-1, ids_of_logits)], dim=-1)
        self.largest_logit = max(self.largest_logit, unmasked.abs().max().item() * self.policy.temperature)
        logps = logits.log_softmax(-1).gather(-1, ids_of_logits)[..., 0]
        return nn.functional.pad(logps, (0, ids.size(1) - logits.size(1)))

    # Media

    def cases(
        self, prompts: Sequence[EncodedPrompt], plain: Callable[[int], dict[str, torch.Tensor]]
    ) -> tuple[list[Case], dict[str, EncodedPrompt], list[Any]]:
        """
        Returns prompts to measure, donors of other media by modality, and partners in a forward, the same on all
        ranks, see [`choose_prompts`]. `plain(i)` returns the processor's outputs for this rank's prompt `i` with
        media, as `AutoProcessor` loads it.
        """

        # A prompt without media has no features to compare, and `plain` would leave the run's tools out of its text
        def process_again(i: int) -> dict[str, torch.Tensor]:
            return plain(i) if prompts[i].media else outputs_of(prompts[i])

        rank = self.accelerator.process_index
        traits = gather_object([traits_of(rank, i, prompt) for i, prompt in enumerate(prompts)])
        targets, donors, partners = choose_prompts(traits)
        cases: dict[Any, Case] = {}  # by the traits of a prompt; the prompt's rank sends the case to all ranks
        for candidate in dict.fromkeys([*targets, *donors.values(), *partners]):
            is_local = candidate.process == rank
            outputs = self.require(
                "its processor, as `AutoProcessor.from_pretrained` loads it,",
                lambda candidate=candidate, needs_outputs=is_local and candidate in targets: (
                    process_again(candidate.index) if needs_outputs else {}
                ),
            )
            case = Case(prompts[candidate.index], outputs) if is_local else None
            cases[candidate] = broadcast_object_list([case], from_process=candidate.process)[0]
        donor_prompts = {modality: cases[donor].prompt for modality, donor in donors.items()}
        return [cases[target] for target in targets], donor_prompts, [cases[partner].prompt for partner in partners]

    def compare_features(self, ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> float:
        """
        Returns the largest difference between two processors' outputs, relative to the largest absolute value of a
        tensor in `plain`, or to 1 if that is larger.
        """
        largest = math.inf
        if _shapes(ours) == _shapes(plain):
            largest = 0.0
            for name, value in plain.items():
                largest = max(largest, _relative_difference(ours[name], value))
        largest = self.max_over_ranks(largest)
        epsilons = [torch.finfo(value.dtype).eps for value in ours.values() if value.is_floating_point()]
        if not largest <= max([STRICT, *epsilons]):  # the limit depends on the features' dtype, not on the model's
            raise self.inexact_error(
                f"its media tensors differ by {largest:.0e} from those of its processor as "
                "`AutoProcessor.from_pretrained` loads it; pass this processor as `processing_class`"
            )
        return largest

    def effect(
        self,
        modality: str,
        prompt: EncodedPrompt,
        donor: EncodedPrompt | None,
        score: Callable[[Any], torch.Tensor],
        scores: torch.Tensor,
        mask: torch.Tensor,
    ) -> float:
        """Returns the largest change of a prompt's scores by other media of a modality, or NaN without other media."""
        other_prompt = with_other_media(prompt, modality, donor)
        if all(torch.equal(prompt.media[name], other_prompt.media[name]) for name in prompt.media):
            return math.nan
        change = self.difference(
            self.require(f"scoring another {modality}", lambda: score(other_prompt)), scores, mask
        )
        if change <= _MIN_EFFECT * self.tolerance:
            raise RuntimeError(
                f"self-check: {self.model_type} answers the same with another {modality} (log-probs move by "
                f"{change:.0e}), so training would ignore the {modality}. Check that the chat template writes a "
                f"placeholder for each {modality}, that model and processor belong together, and that all weights are "
                "loaded."
            )
        return change

    # Decisions common to all ranks

    def difference(self, a: torch.Tensor | None, b: torch.Tensor, mask: torch.Tensor) -> float:
        """Returns the largest difference over all ranks; infinity if `a` is missing, or has another shape or NaN."""
        value = math.inf
        if a is not None and a.shape == b.shape:
            value = torch.where(mask.bool(), a - b, 0.0).abs().max().item()
        return self.max_over_ranks(math.inf if math.isnan(value) else value)

    def compare(
        self, a: torch.Tensor | None, b: torch.Tensor, mask: torch.Tensor, noise: Callable[[], torch.Tensor | None]
    ) -> tuple[float, bool]:
        """
        Returns the largest difference over all ranks, and whether rounding explains those of all ranks: by the
        [`Measure.noise`] of `b`, if one exceeds `tolerance`, which first rises to twice the dtype's spacing at the
        largest logit, divided by the temperature.
        """
        largest = self.difference(a, b, mask)
        if largest <= self.tolerance:
            return largest, True
        token_noise = noise() if math.isfinite(largest) else None
        if a is None or token_noise is None:
            return largest, False
        rounding_steps = two_steps(self.dtype, self.max_over_ranks(self.largest_logit)) / self.policy.temperature
        self.tolerance = max(self.tolerance, rounding_steps)
        is_compared = mask.bool()
        return largest, not self.max_over_ranks(
            float(exceeds_rounding((a - b)[is_compared], token_noise[is_compared], self.tolerance))
        )

    def settle_fallbacks(
        self,
        score: Callable[[bool], torch.Tensor],
        truth: torch.Tensor,
        mask: torch.Tensor,
        noise: Callable[[], torch.Tensor | None],
        *,
        tries_isolation: bool = False,
        label: str = "",
    ) -> tuple[torch.Tensor, float, float | None]:
        """
        Returns the scores of padded rows, their difference from `truth`, and that of packed rows, or `None`. Sets the
        first fallbacks under which [`compare`] calls padded scores exact: the current ones, fewer prompts per forward,
        the model's logits; a `RuntimeError` if none. Turns packing off if packed scores aren't.
        """
        # If the fallbacks are the defaults, the order with `tries_isolation` is: the fused head with `isolate` `None`,
        # "media" and "prompt", then the model's logits with the same three
        scores = None
        differences = list[float]()
        was_from_model = self.fallbacks.logits_from_model
        isolate_values = self.isolate_values() if tries_isolation else self.isolate_values()[:1]
        for from_model, isolate in itertools.product(sorted({was_from_model, True}), isolate_values):
            self.fallbacks.logits_from_model = from_model
            self.fallbacks.isolate = isolate
            scores = self.attempt("scoring padded rows", lambda: score(False))
            difference, is_exact = self.compare(scores, truth, mask, noise)
            differences.append(difference)
            if scores is not None and is_exact:
                break
        else:
            problem = f"scores of padded rows{label} differ by {differences[-1]:.0e} from the model's forward"
            raise self.inexact_error(problem if scores is not None else f"scoring padded rows fails ({self.failure})")
        if len(differences) > 1:
            needs_logits = from_model and not was_from_model
            fallback = "the model's own logits, which need more memory" if needs_logits else FORWARDS[isolate]
            self.fall_back(f"scores of padded rows{label} differ by {differences[0]:.0e}", fallback)
        packed_difference = None
        if self.fallbacks.packing:
            packed_scores = self.attempt("scoring packed rows", lambda: score(True))
            packed_difference, is_exact = self.compare(packed_scores, truth, mask, noise)
            if not is_exact:
                self.fall_back(
                    f"scores of packed rows{label} differ by {packed_difference:.0e}", "padded rows", packing=False
                )
        return scores, difference, packed_difference

    def noise(self, score: Callable[[], torch.Tensor], mask: torch.Tensor) -> torch.Tensor | None:
        """Returns the noise of `score`'s results, see [`rounding`], or `None` in float32 or if measuring fails."""
        if self.tolerance <= STRICT:
            return None
        return self.attempt("measuring the noise", lambda: measure_noise(self.model, self.dtype, score, mask))

    def max_over_ranks(self, value: float) -> float:
        return self.accelerator.gather(torch.tensor([value], device=self.device)).max().item()

    def attempt(self, name: str, measure: Callable[[], _Result], quiet: bool = False) -> _Result | None:
        """
        Returns the result of `measure`, or `None` on all ranks if it fails on one rank. The failing rank logs a
        warning. Raises an error on all ranks if one rank runs out of memory.
        """
        result = failure = None
        try:
            result = measure()
        except Exception as error:
            failure = error
        no_memory = is_out_of_memory(failure)
        # Of the rank that fared worst: 0 for a result, 1 for a failure, 2 for a lack of memory
        outcome = self.max_over_ranks(2.0 if no_memory else float(result is None))
        if outcome == 2:
            raise failure if no_memory and failure else MemoryError(f"{name} ran out of memory in another process")
        if failure is not None:
            self.failure = f"{type(failure).__name__}: {failure}"
            if not quiet:
                logger.warning(f"self-check: {self.model_type}: {name} failed ({self.failure}).")
        return None if outcome else result

    def require(self, name: str, measure: Callable[[], _Result]) -> _Result:
        """Returns the result of `measure`. Raises an error on all ranks if it fails on one rank."""
        result = self.attempt(name, measure)
        if result is None:
            raise self.inexact_error(f"{name} fails ({self.failure})")
        return result

    def fall_back(self, problem: str, fallback: str, **fallbacks: bool | str | None) -> None:
        """Logs a problem and the fallback from it, and sets the fields of `self.fallbacks` that are passed by name."""
        logger.warning(f"self-check: {self.model_type}: {problem}; falling back to {fallback}.")
        for name, value in fallbacks.items():
            setattr(self.fallbacks, name, value)

    def isolate_values(self) -> list[Literal["media", "prompt"] | None]:
        """Returns the current value of `fallbacks.isolate`, then the values that split forwards further."""
        isolate_values: list[Literal["media", "prompt"] | None] = [None, "media", "prompt"]
        return isolate_values[isolate_values.index(self.fallbacks.isolate) :]

    def inexact_error(self, reason: str) -> RuntimeError:
        """Returns the error for a model that no fallback scores exactly."""
        return RuntimeError(
            f"self-check: {self.model_type} can't be trained exactly: {reason}. To train anyway, set "
            "`self_check=False`."
        )
