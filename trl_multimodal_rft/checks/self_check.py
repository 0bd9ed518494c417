# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Self-check of a policy's scores and samples against the model's own forward, on the user's model and data."""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.utils import ModelOutput

from ..encoding.conversations import Conversation
from ..encoding.join import join_media
from ..encoding.prompts import EncodedPrompt, all_placeholder_ids, plain_outputs
from ..engines.token_loop import STEPS, up_to_first_end
from ..forward.attention import original_attention
from ..forward.prompt_groups import group_by_prompt
from ..models.modes import measurement_mode
from ..models.parts import kept_adapter_state
from ..models.wrapped import is_unsharded, replaced
from ..policy import Fallbacks, PolicyForward
from .measure import FORWARDS, Case, Measure, outputs_of
from .rounding import NOISE_FACTOR, STRICT
from .targets import longer_than_windows


logger = get_logger(__name__)

Messages = str | list[dict[str, Any]]  # of a prompt

_N_NEW_TOKENS = 4

# Limit of a difference, in nats, above which a warning says that rounding could hide errors
_WARNING_LIMIT = 1.0


@dataclass(kw_only=True)
class SelfCheck:
    """
    Largest absolute differences of log-probabilities over all ranks, in nats. The truth is the model's own forward on
    its processor's outputs, one prompt and one completion at a time, or `generate` where its attention gives other
    logits.
    """

    # Media tensors against those of `AutoProcessor.from_pretrained`'s processor, see `Measure.compare_features`
    features: float | None = None
    padded: float  # padded rows against the truth
    packed: float | None = None  # packed rows against the truth; `None` without packing
    # Effect of other media by modality; NaN if the batch holds no other media
    media: dict[str, float] = field(default_factory=dict)
    rows: float | None = None  # scores with several prompts per forward against scores with one prompt per forward
    sampled: float | None = None  # log-probabilities of sampling against the truth; `None` if sampling returns none
    changes: tuple[str, ...] = ()  # intended changes of the sampled distribution: suppressed tokens, options (`top_p`)
    # Effect of `changes` on the log-probabilities of sampled tokens; `None` if sampling returns no scores
    changed: float | None = None
    training: float | None = None  # training mode against evaluation mode
    tolerance: float  # limit of a difference without noise, from the dtype of the computation
    fallbacks: Fallbacks  # the fallbacks under which the differences hold
    engine_positions: bool = False  # whether the truth has the positions that a sampling engine computed
    # Mean and largest difference of an engine's log-probabilities from recomputed ones: on the first batch, after
    # updates of the weights, and on tokens after tool media
    engine: tuple[float, float] | None = None
    engine_updated: tuple[float, float] | None = None
    engine_conversation: tuple[float, float] | None = None
    # Tokens after the last tool result, of the first completion with tool media, against the truth
    conversation: float | None = None
    rounding: float | None = None  # largest noise of a token, measured in half precision, see `checks/rounding.py`

    def __str__(self) -> str:
        facts = self._facts()
        widths = [max(len(fact[i]) for fact in facts) for i in (0, 1)]  # of names and figures
        lines = [f"  {name:{widths[0]}}  {figure:{widths[1]}}  {note}".rstrip() for name, figure, note in facts]
        return "\n".join([f"self-check: largest differences of log-probs (tolerance {self.tolerance:.0e})", *lines])

    def _facts(self) -> list[tuple[str, str, str]]:
        fallbacks = self.fallbacks
        padded_notes = ["with the model's logits"] * fallbacks.logits_from_model
        padded_notes += ["at the engine's positions"] * self.engine_positions
        # `None` hides the line of changes, and NaN shows "not measured"
        changed = (math.nan if self.changed is None else self.changed) if self.changes else None
        trains_alike = (self.training or 0.0) <= self.tolerance + NOISE_FACTOR * (self.rounding or 0.0)
        comparisons = [
            ("rounding noise", self.rounding, f"a token's tolerance is raised by {NOISE_FACTOR} times its noise"),
            ("features vs. processor", self.features, ""),
            ("padded rows vs. model's forward", self.padded, ", ".join(padded_notes)),
            ("packed rows vs. model's forward", self.packed, "" if fallbacks.packing else "falls back to padded rows"),
            ("batched vs. one by one", self.rows, FORWARDS[fallbacks.isolate] if fallbacks.isolate else ""),
            ("sampled vs. model's forward", self.sampled, "" if fallbacks.shared_prefill else "separate prefills"),
            ("sampled vs. full distribution", changed, f"intended: {', '.join(self.changes)}"),
            ("training vs. evaluation mode", self.training, "" if trains_alike else "dropout or batch norm"),
            ("tool media vs. model's forward", self.conversation, ""),
        ]
        engines = [  # pairs of a mean and a largest difference, or `None`
            ("engine vs. recomputed", self.engine),
            ("engine vs. recomputed, updated", self.engine_updated),
            ("engine vs. recomputed, tool media", self.engine_conversation),
        ]
        media_effects = [
            (f"effect of another {modality}", _figure(change, ".2g"), "") for modality, change in self.media.items()
        ]
        return [
            *((name, _figure(value), note) for name, value, note in comparisons if value is not None),
            *((name, _figure(pair[0]), f"on average, at most {pair[1]:.0e}") for name, pair in engines if pair),
            *(media_effects or ([] if self.training is None else [("effect of media", "no media yet", "")])),
        ]


def _figure(value: float, digits: str = ".0e") -> str:
    return "not measured" if math.isnan(value) else format(value, digits)


@dataclass(frozen=True)
class RunSettings:
    """Settings by which a run encodes prompts and samples completions."""

    load_processor: Callable[[], Any]  # returns the processor that `AutoProcessor.from_pretrained` loads
    template_kwargs: dict[str, Any]
    generation_config: GenerationConfig
    eos_token_ids: Sequence[int]
    # Samples completions by a config and fallbacks; `None` if transformers doesn't sample
    sample: Callable[[list[EncodedPrompt], GenerationConfig, Fallbacks], Any] | None
    generating: Callable[[], AbstractContextManager[nn.Module]]  # returns a context of the model, ready to generate
    samples_rollouts: bool = True  # whether transformers also samples the rollouts
    changes: Sequence[str] = ()  # options that change the sampled distribution, such as `top_p`
    audio_overlong: Literal["raise", "truncate"] = "raise"
    has_engine_positions: bool = False  # whether the sampling engine computed the prompts' positions


def run_self_check(
    policy: PolicyForward,
    model: nn.Module,
    prompts: list[EncodedPrompt],
    messages: Sequence[Messages],
    settings: RunSettings,
    media_effects: dict[str, float],
) -> SelfCheck:
    """
    Measures a policy on prompts and their messages, without changing the policy. All ranks check the same prompts, so
    that they run the same forwards, as a sharded model needs. Modalities in `media_effects`, from earlier checks,
    aren't measured again.
    """
    check = _Check(policy, model, settings, media_effects)
    with measurement_mode(model, check.device):
        measurements = check.run(messages, prompts)
    with check.restoring_buffers():
        with measurement_mode(model, check.device, is_evaluation=False):
            training = check.training_difference()
        with measurement_mode(model, check.device, is_evaluation=False, keeps_checkpointing=True):
            check.check_backward()
    return replace(measurements, training=training)


def check_conversation(
    policy: PolicyForward,
    model: nn.Module,
    prompts: Sequence[EncodedPrompt],
    completion_ids: Sequence[list[int]],
    has_engine_positions: bool,
) -> tuple[float, Fallbacks] | None:
    """
    Measures the tokens that follow tool media in a completion, also after a prompt longer than the model's windows,
    against the model's own forward. Returns their difference and the fallbacks, or `None` if no rank has such a
    completion.
    """
    # At most one completion of this rank, preferably after a prompt of text, whose masks only the results change. The
    # first rank that has one sends it to the others.
    local_cases = [
        (prompt, ids)
        for prompt, ids in zip(prompts, completion_ids, strict=True)
        if isinstance(prompt, Conversation) and len(ids) > len(prompt.later)
    ]
    local_case = sorted(local_cases, key=lambda case: bool(case[0].media))[:1]
    holders = [rank for rank, has_case in enumerate(gather_object([bool(local_case)])) if has_case]
    if not holders:
        return None
    measure = Measure(policy, model, has_engine_positions)
    is_holder = measure.accelerator.process_index == holders[0]
    prompt, completion = broadcast_object_list(local_case if is_holder else [None], from_process=holders[0])[0]
    conversations = [prompt]
    differences = list[float]()
    longer = longer_than_windows(measure.model, prompt, prompt.later)
    if longer is not None:
        conversations.append(_with_prompt(prompt, longer))
    n = len(prompt.later)
    ids = torch.tensor([completion], device=measure.device)
    mask = torch.ones_like(ids)
    with measurement_mode(model, measure.device):
        for measured in conversations:
            whole = EncodedPrompt(
                torch.cat([measured.input_ids, measured.later.input_ids]),
                {
                    name: torch.cat([value, measured.later.token_fields[name]])
                    for name, value in measured.token_fields.items()
                },
                join_media(measured.parts),
                torch.cat([measured.position_ids, measured.later.position_ids], dim=-1),
            )
            inputs = measure.model_inputs(outputs_of(whole), whole)
            score_by_model = functools.partial(measure.model_logps, inputs, whole, ids[:, n:])
            truth = measure.require("its own forward of a conversation with tool media", score_by_model)
            noise = functools.cache(functools.partial(measure.noise, score_by_model, mask[:, n:]))
            score = functools.partial(_score_after, measure, measured, ids, mask, n)
            _, padded, packed = measure.settle_fallbacks(score, truth, mask[:, n:], noise, label=" after tool media")
            differences.append(padded if packed is None or not measure.fallbacks.packing else packed)
    return max(differences), measure.fallbacks


def _score_after(
    measure: Measure, prompt: EncodedPrompt, ids: torch.Tensor, mask: torch.Tensor, n: int, packed: bool
) -> torch.Tensor:
    return measure.score([prompt], ids, mask, packed)[:, n:]


def _with_prompt(conversation: Conversation, longer: Conversation) -> Conversation:
    """Returns a `longer` copy of a conversation, with its own prompt, and with later tokens at their positions."""
    n_added = len(longer) - len(conversation)
    prompt = EncodedPrompt(longer.input_ids, longer.token_fields, {}, longer.position_ids, row=longer.row)
    later = replace(conversation.later, position_ids=conversation.later.position_ids + n_added)
    return replace(longer, prompt=prompt, later=later)


class _Completions(NamedTuple):
    """Two short completions of a prompt, their true log-probabilities, and a function that measures their noise."""

    ids: torch.Tensor  # `(2, N)`, as the mask, the log-probabilities and the noise
    mask: torch.Tensor
    logps: torch.Tensor
    noise: Callable[[], torch.Tensor | None]


class _Check(Measure):
    """A self-check on the prompts of a run."""

    def __init__(
        self, policy: PolicyForward, model: nn.Module, settings: RunSettings, media_effects: dict[str, float]
    ):
        super().__init__(policy, model, settings.has_engine_positions)
        self.settings = settings
        self.media_effects = dict(media_effects)
        self.placeholders = all_placeholder_ids(self.model, policy.processor)
        self.changed: float | None = None
        self.rounding: float | None = None

    def run(self, messages: Sequence[Messages], prompts: list[EncodedPrompt]) -> SelfCheck:
        """Measures all but training mode. `scored_case` and `shortest_prompt` keep the data for training mode."""
        local_prompts = [(prompt, messages[indices[0]]) for prompt, indices in group_by_prompt(prompts).items()]
        load_processor = functools.cache(self.settings.load_processor)
        settings = self.settings
        encoding_options = settings.audio_overlong, settings.template_kwargs
        targets, donors, partners = self.cases(
            [prompt for prompt, _ in local_prompts],
            lambda i: plain_outputs(local_prompts[i][1], load_processor(), *encoding_options),
        )
        differences: dict[str, list[float]] = {"features": [], "padded": [], "packed": [], "sampled": []}
        for target in targets:
            if target.prompt.media:
                differences["features"].append(self.compare_features(outputs_of(target.prompt), target.plain))
            completions, sampled = self._sample_and_recompute(target)
            if sampled is not None and self.settings.samples_rollouts:
                differences["sampled"].append(sampled)
            self._keep_noise(completions)
            score = functools.partial(self.score, [target.prompt], completions.ids, completions.mask)
            scores, padded, packed = self.settle_fallbacks(
                score, completions.logps, completions.mask, completions.noise
            )
            self.scored_case = target.prompt, completions, scores
            differences["padded"].append(padded)
            differences["packed"] += [] if packed is None else [packed]
            ids, mask, *_ = completions
            for modality in sorted(target.prompt.modalities - self.media_effects.keys()):
                score_other = functools.partial(self._score_one, ids, mask)
                self.media_effects[modality] = self.effect(
                    modality, target.prompt, donors.get(modality), score_other, scores, mask
                )
        # Any completions serve for this comparison. These are the ids and the mask of the last target's.
        rows = self._compare_batches(targets[0].prompt, partners, *self.scored_case[1][:2])
        # The shortest prompt with media, or else the shortest prompt
        self.shortest_prompt = min(
            [*(target.prompt for target in targets), *partners], key=lambda prompt: (not prompt.media, len(prompt))
        )
        features, padded, packed, sampled = (max(values, default=None) for values in differences.values())
        assert padded is not None  # there is a target
        return SelfCheck(
            features=features,
            padded=padded,
            packed=packed,
            media=self.media_effects,
            rows=rows,
            sampled=sampled,
            changes=(*(["no media tokens"] if self.placeholders else []), *self.settings.changes),
            changed=self.changed,
            training=math.nan,  # measured later
            tolerance=self.tolerance,
            fallbacks=self.fallbacks,
            engine_positions=any(self.at_engine_positions(target.prompt) for target in targets),
            rounding=self.rounding,
        )

    def _score_one(self, ids: torch.Tensor, mask: torch.Tensor, prompt: EncodedPrompt) -> torch.Tensor:
        return self.score([prompt], ids, mask, packed=False)

    def _keep_noise(self, completions: _Completions) -> None:
        noise = completions.noise()
        if noise is None:
            return
        self.rounding = max(self.rounding or 0.0, self.max_over_ranks(noise.max().item()))
        limit = self.tolerance + NOISE_FACTOR * self.rounding
        if limit > _WARNING_LIMIT:
            logger.warning(
                f"self-check: {self.model_type}: rounding in {self.dtype} moves log-probs by {self.rounding:.0e}, so "
                f"it could hide errors below {limit:.0e}; check the model in float32."
            )

    # Training mode

    @contextmanager
    def restoring_buffers(self) -> Iterator[None]:
        """Restores the model's buffers at exit, such as the statistics of batch norms."""
        statistics = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in statistics:
                    buffer.copy_(value)

    def training_difference(self) -> float:
        prompt, (ids, mask, *_), scores = self.scored_case
        training_scores = self.attempt(
            "scoring in training mode", lambda: self.score([prompt], ids, mask, packed=False)
        )
        return self.difference(training_scores, scores, mask)

    def check_backward(self) -> None:
        """
        Runs a backward pass of `shortest_prompt`, so that a kernel without one fails before the first update. Not
        under DeepSpeed and FSDP, which would take it for a training step, nor with reentrant checkpointing, which
        refuses `autograd.grad`.
        """
        module = self.accelerator.unwrap_model(self.prepared)
        trained_parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not is_unsharded(self.accelerator) or not trained_parameters:
            return
        _, (ids, mask, *_), _ = self.scored_case

        def run_backward(packed: bool) -> bool:
            rows = (tensor[: 2 if packed else 1] for tensor in (ids, mask))  # a row is packed from two completions
            with torch.enable_grad():
                total = self.score([self.shortest_prompt], *rows, packed=packed, model=module).sum()
                try:
                    if total.requires_grad:
                        torch.autograd.grad(total, trained_parameters, allow_unused=True)
                except RuntimeError as error:
                    if "use_reentrant" not in str(error):
                        raise
            return True  # `attempt` takes `None` for a failure

        packings = [True, False] if self.fallbacks.packing else [False]
        for packed in packings:
            row_type = "packed" if packed else "padded"
            if self.attempt(f"the backward pass of {row_type} rows", lambda packed=packed: run_backward(packed)):
                return
            if packed:
                self.fall_back("packed rows have no backward pass", "padded rows", packing=False)
        raise RuntimeError(
            f"self-check: {self.model_type} can't be trained: its backward pass fails ({self.failure}). Install the "
            "packages of its kernels, or load it with another `attn_implementation`."
        )

    # Sampling

    def _sample_and_recompute(self, target: Case) -> tuple[_Completions, float | None]:
        """
        Returns completions of a prompt and the difference of sampled log-probabilities from the truth, or `None` if
        sampling returns none. If the difference is too large, samples again with fallbacks.
        """
        ids, mask, sampled = self._sample(target.prompt)
        completions = self._with_true_logps(target, ids, mask, sampled)
        if sampled is None:
            return completions, None
        difference, is_exact = self.compare(sampled, completions.logps, mask, completions.noise)
        if not is_exact and self.fallbacks.graph and self.device.type in STEPS:
            problem = f"sampling from a graph of the device differs by {difference:.0e}"
            self.fall_back(problem, "sampling without it", graph=False)
            return self._sample_and_recompute(target)
        if not is_exact and self.fallbacks.shared_prefill:
            problem = f"sampling from a shared prefill differs by {difference:.0e}"
            self.fall_back(problem, "one prefill per completion", shared_prefill=False)
            return self._sample_and_recompute(target)
        if not is_exact:
            raise self.inexact_error(
                f"it samples with log-probabilities that differ by {difference:.0e} from those of its own forward"
            )
        return completions, difference

    def _sample(self, prompt: EncodedPrompt) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns two completions of a prompt, their mask, and their log-probabilities from sampling, if any."""
        sample = self.settings.sample
        if sample is None:
            return self._scripted_completions(prompt)
        config = copy.deepcopy(self.settings.generation_config)
        config.update(max_new_tokens=_N_NEW_TOKENS, min_new_tokens=None, num_beams=1, num_return_sequences=1)
        config.update(return_dict_in_generate=True, output_logits=True, output_scores=True)
        output = self.attempt("sampling", lambda: sample([prompt, prompt], config, self.fallbacks))
        if output is None and self.fallbacks.shared_prefill:
            problem = "sampling from a shared prefill fails"
            self.fall_back(problem, "one prefill per completion", shared_prefill=False)
            return self._sample(prompt)
        if output is None:
            raise self.inexact_error(f"it can't sample completions ({self.failure})")
        if not isinstance(output, ModelOutput) or output.get("logits") is None:
            # A user's own `generate` may return only ids
            ids = output["sequences"][:2] if isinstance(output, ModelOutput) else output[:2]
            ids = ids[:, -_N_NEW_TOKENS:]
            return (ids, self._completion_mask(ids), None) if ids.size(1) else self._scripted_completions(prompt)
        logits = torch.stack(output["logits"], dim=1)[:2].float() / self.policy.temperature
        ids = output["sequences"][:2, -logits.size(1) :]
        mask = self._completion_mask(ids)
        if output.get("scores") is not None:
            self._compare_distributions(logits, torch.stack(output["scores"], dim=1)[:2].float(), ids, mask, config)
        return ids, mask, _logps(logits, ids)

    def _compare_distributions(
        self,
        logits: torch.Tensor,
        scores: torch.Tensor,
        ids: torch.Tensor,
        mask: torch.Tensor,
        config: GenerationConfig,
    ) -> None:
        """
        Checks that only suppressed tokens change the distribution, unless options of the run change it, too. `logits`
        `(2, N, vocabulary)` are the model's, and `scores` the same after the logits processors of `generate`.
        """
        suppressed_ids = torch.tensor(config.suppress_tokens or [], dtype=torch.long, device=logits.device)
        drawn_logps = _logps(scores, ids)
        self.changed = max(self.changed or 0.0, self.difference(_logps(logits, ids), drawn_logps, mask))
        difference = self.difference(_logps(logits.index_fill(-1, suppressed_ids, -math.inf), ids), drawn_logps, mask)
        if not self.settings.changes and not difference <= STRICT:  # strict, as both come from the same logits
            raise self.inexact_error(
                "`generate` draws from another distribution than the scored one: log-probabilities differ by "
                f"{difference:.0e}, although suppressed tokens are left out of both"
            )

    def _scripted_completions(self, prompt: EncodedPrompt) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Returns two completions made of the prompt's last text tokens, for runs in which nothing samples."""
        text_ids = [i for i in prompt.input_ids.tolist() if i not in self.placeholders][-_N_NEW_TOKENS:]
        ids = torch.tensor([text_ids, text_ids[::-1]], device=self.device)
        return ids, torch.ones_like(ids), None

    def _completion_mask(self, ids: torch.Tensor) -> torch.Tensor:
        return up_to_first_end(ids, self.settings.eos_token_ids).long()

    # The truth

    def _with_true_logps(
        self, target: Case, ids: torch.Tensor, mask: torch.Tensor, sampled: torch.Tensor | None
    ) -> _Completions:
        """
        Returns completions with their true log-probabilities, see [`SelfCheck`]. The model's own forward computes them
        if sampled log-probabilities agree with it, or if the prompt has an engine's positions, which `generate` can't
        take. Otherwise, `generate` computes them, unless it returns no logits.
        """
        inputs = self.model_inputs(target.plain, target.prompt)
        forward = functools.partial(self.model_logps, inputs, target.prompt, ids)
        generate = functools.partial(self._generate, inputs, ids)
        logps = self.attempt("the model's forward", forward)
        score = generate if logps is None else forward
        noise = functools.cache(lambda: self.noise(score, mask))  # pyrefly: ignore[bad-argument-type]
        if self.at_engine_positions(target.prompt):
            if logps is None:
                raise self.inexact_error(f"its own forward fails at the engine's positions ({self.failure})")
        elif logps is None or sampled is None or not self.compare(logps, sampled, mask, noise)[1]:
            generated = self.attempt("`generate`", generate, quiet=sampled is None)
            logps = logps if generated is None else generated
            if logps is None:
                raise self.inexact_error(f"neither its forward nor its `generate` can be measured ({self.failure})")
        return _Completions(ids, mask, logps, noise)

    def _generate(self, inputs: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor | None:
        """Returns log-probabilities of completions `(B, N)` by `generate`, or `None` if it returns no logits."""
        config = copy.deepcopy(self.settings.generation_config)
        # Scripted completions may go on after an end of text
        config.update(max_new_tokens=ids.size(1), min_new_tokens=None, do_sample=False, num_beams=1, eos_token_id=None)
        config.update(return_dict_in_generate=True, output_logits=True)
        results = []
        as_config = replaced(self.model, generation_config=config)
        with self.settings.generating() as model, kept_adapter_state(model), original_attention(self.model), as_config:
            for row in ids[:, None]:
                processors = LogitsProcessorList([_ForcedIds(row)])
                output = model.generate(**inputs, generation_config=config, logits_processor=processors)
                if not isinstance(output, ModelOutput) or output.get("logits") is None:
                    return None
                results.append(self.logps_of(torch.stack(output["logits"], dim=1)[:1], row))
        return torch.cat(results)

    # Comparisons with the truth

    def _compare_batches(
        self, first_prompt: EncodedPrompt, partners: list[EncodedPrompt], ids: torch.Tensor, mask: torch.Tensor
    ) -> float:
        """
        Returns the difference of batched scores from scores of single prompts. Falls back until they agree. The first
        prompt is at both ends of the batch. A packed batch has all completions of a prompt, a padded batch only the
        first.
        """
        prompts = [first_prompt, *partners, first_prompt]
        scores_per_prompt = [
            self.require("scoring one prompt", lambda prompt=prompt: self.score([prompt], ids, mask, packed=False))
            for prompt in prompts[:-1]
        ]
        separate_scores = torch.cat([*scores_per_prompt, scores_per_prompt[0]])

        @functools.cache
        def noise() -> torch.Tensor | None:
            score_functions = [
                functools.partial(self.score, [prompt], ids, mask, packed=False) for prompt in prompts[:-1]
            ]
            results = [self.noise(score, mask) for score in score_functions]
            noises = [result for result in results if result is not None]
            return torch.cat([*noises, noises[0]]) if len(noises) == len(results) else None

        def compare_batched(packed: bool, isolate: Literal["media", "prompt"] | None) -> tuple[float, bool]:
            n = len(ids) if packed else 1  # completions per prompt
            scores = self.attempt(
                "scoring several prompts at once",
                lambda: self.score(prompts, ids[:n], mask[:n], packed=packed, isolate=isolate),
            )
            rows = torch.arange(len(separate_scores), device=self.device).view(len(prompts), -1)[:, :n].flatten()

            def noise_of_rows() -> torch.Tensor | None:
                noise_of_all = noise()
                return None if noise_of_all is None else noise_of_all[rows]

            return self.compare(scores, separate_scores[rows], mask[:n].repeat(len(prompts), 1), noise_of_rows)

        difference = math.inf
        packings = [True, False] if self.fallbacks.packing else [False]
        for packed, isolate in itertools.product(packings, self.isolate_values()):
            # Padded rows must agree, too. Sampling uses them, and so do batches that gain nothing from packing.
            results = [compare_batched(rows_packed, isolate) for rows_packed in {packed, False}]
            difference = max(result_difference for result_difference, _ in results)
            if all(is_exact for _, is_exact in results):
                if isolate != self.fallbacks.isolate:
                    problem = "batching prompts changes their log-probabilities"
                    self.fall_back(problem, FORWARDS[isolate], isolate=isolate)
                if packed != self.fallbacks.packing:
                    problem = "packing prompts into one row changes their log-probabilities"
                    self.fall_back(problem, "padded rows", packing=packed)
                return difference
        raise self.inexact_error(
            f"batching prompts changes log-probabilities by {difference:.0e}, even with one prompt per forward"
        )


class _ForcedIds(LogitsProcessor):
    """Logits processor that forces `generate` to sample the ids `(1, N)` one by one."""

    def __init__(self, ids: torch.Tensor):
        self.ids = iter(ids.unbind(1))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -math.inf).scatter(1, next(self.ids)[:, None], 0.0)


def _logps(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
