# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Measures, on the user's own model and data, what this package promises, against the model's own forward."""

import copy
import functools
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object
from accelerate.utils.memory import should_reduce_batch_size
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.utils import ModelOutput
from trl.models.utils import disable_gradient_checkpointing

from ..algorithms.completions import up_to_first_end
from ..data.columns import iter_refs
from ..encoding.conversations import Conversation
from ..encoding.join import continued_field, join_media
from ..encoding.media import decode_media
from ..encoding.prompts import (
    EncodedPrompt,
    all_placeholder_ids,
    outputs_of_files,
    processor_outputs,
    prompt_position_ids,
)
from ..families import MODALITIES, TOKEN_FIELDS, family_of, modality_of
from ..forward.attention import original_attention
from ..forward.layout import group_by_prompt
from ..forward.scoring import takes_logits_to_keep, to_model
from ..generation.transformers import as_generation_config
from ..models.modes import evaluation_mode
from ..models.wrapped import computing_dtype
from ..policy import Completions, Fallbacks
from .setup import sampling_changes


if TYPE_CHECKING:
    from .multimodal import MultimodalMixin


logger = get_logger(__name__)

_NEW_TOKENS = 4

# Prompts with media of different shapes that are forwarded together, at most. Which shapes disturb each other depends
# on the strides of an encoder.
_PARTNERS = 3

# Integers that a tensor of sizes has at most
_MOST_SIZES = 64

# A medium that moves log-probabilities by less than this share of what counts as equal isn't heard or seen
_MOVES = 1e-2

# Completions of each process that are compared with an engine
_PROBES = 4

# After an update, an engine's log-probabilities may be farther from the trainer's than before, by this factor. That
# some don't reach the engine shows when the trainer's have moved by a multiple of what that allows.
_GROWS, _SHOWS = 4, 2


@dataclass
class SelfCheck:
    """
    What the self-check measured, as largest absolute differences of log-probabilities over all processes, in nats.

    The truth is the model's own forward on what its processor returns, one prompt and one completion at a time,
    without anything of this package: its own positions, masks and logits. Where that isn't what its `generate`
    computes, because attention is different within a prompt, the truth are the logits of `generate`.
    """

    # Media tensors against those of the processor as it is loaded, relative to the largest value; `None` if there are
    # no media
    features: float | None
    padded: float  # padded rows against the truth
    packed: float | None  # packed rows against the truth; `None` where packing is off
    # By modality, how much the log-probabilities move with another medium in its place; NaN if there is no other
    media: dict[str, float]
    rows: float  # prompts in one forward, as far as they share one, against each alone
    # Log-probabilities of sampling against the truth; `None` if sampling gives none, NaN if it fails for the self-
    # check, as a `generate` of the user's may
    sampled: float | None
    # What changes the distribution that is sampled from on purpose: suppressed placeholders, options such as `top_p`
    changes: tuple[str, ...]
    changed: float | None  # how far these move the log-probabilities of sampled tokens; `None` if sampling gives none
    # Log-probabilities in training mode against those in evaluation mode, which dropout and batch norm move
    training: float
    tolerance: float  # what counts as equal, from the dtype of the computation
    fallbacks: Fallbacks  # what the numbers hold for, after all fallbacks
    # Whether the truth has the positions of an engine that samples, which aren't always the model's own
    engine_positions: bool = False
    # Log-probabilities of an engine that samples the rollouts against recomputed ones on the first batch, as their
    # mean and largest difference
    engine: tuple[float, float] | None = None
    engine_updated: tuple[float, float] | None = None  # the same after weights have moved
    # The same in a completion behind media that a tool returned; `None` before the first
    engine_conversation: tuple[float, float] | None = None
    # Rows in which a tool returned media, behind these, against the model's own forward; `None` before the first
    conversation: float | None = None

    def __str__(self) -> str:
        fallbacks = self.fallbacks
        parts = []
        if self.features is not None:
            parts.append(f"features = processor's {self.features:.0e}")
        own = " (its own logits)" if fallbacks.logits_from_model else ""
        own += " (at the engine's positions)" if self.engine_positions else ""
        parts.append(f"log-probs = model's own {self.padded:.0e}{own}")
        if self.packed is not None:
            parts.append(
                f"packed {'=' if self.packed <= self.tolerance else 'differs from'} model's own {self.packed:.0e}"
            )
        for kind, moved in self.media.items():
            parts.append(f"{kind} not measured" if math.isnan(moved) else f"{kind} moves log-probs by {moved:.2g}")
        if not self.media:
            parts.append("no media yet")
        rows = f"rows independent {self.rows:.0e}"
        parts.append(rows if fallbacks.isolate is None else f"{rows} (one forward per {fallbacks.isolate})")
        if self.sampled is not None and math.isnan(self.sampled):
            parts.append("sampling not measured")
        elif self.sampled is not None:
            parts.append(
                f"sampled = model's own {self.sampled:.0e}{'' if fallbacks.shared_prefill else ' (separate prefills)'}"
            )
        if self.changes:
            moved = "" if self.changed is None else f" (moves log-probs by {self.changed:.0e})"
            parts.append(f"sampling applies {', '.join(self.changes)}{moved}")
        parts.append(
            f"training mode {'=' if self.training <= self.tolerance else 'differs from'} evaluation mode "
            f"{self.training:.0e}"
        )
        if self.engine is not None:
            parts.append("engine = recomputed {:.0e}, at most {:.0e}".format(*self.engine))
        if self.engine_updated is not None:
            parts.append("after an update {:.0e}, at most {:.0e}".format(*self.engine_updated))
        if self.engine_conversation is not None:
            parts.append("engine behind media of tools {:.0e}, at most {:.0e}".format(*self.engine_conversation))
        if self.conversation is not None:
            parts.append(f"behind media of tools = model's own {self.conversation:.0e}")
        return f"self-check: {', '.join(parts)}"


@dataclass
class _Case:
    """A prompt of any process, as all processes check it."""

    prompt: EncodedPrompt
    plain: Any  # what the processor returns; only of prompts that are compared with it, else `None`
    error: str | None = None


@dataclass
class _Traits:
    """What tells which prompts are worth checking."""

    process: int
    index: int
    length: int
    shapes: str
    fingerprints: dict[str, float] = field(default_factory=dict)  # of the media of each modality


def run_self_check(
    trainer: "MultimodalMixin", messages: Sequence[Any], prompts: list[EncodedPrompt], measured: dict[str, float]
) -> SelfCheck:
    """
    Measures the prompts at hand. Nothing of the trainer is changed.

    All processes check the same prompts, which come from all of them, so that the forwards of a sharded model agree.
    """
    check = _Check(trainer, measured)
    with measuring(trainer):
        measurements = check.run(messages, prompts)
    with measuring(trainer, evaluation=False):
        return replace(measurements, training=check.training_mode())


def check_conversation(
    trainer: "MultimodalMixin", prompts: Sequence[EncodedPrompt], completion_ids: Sequence[list[int]]
) -> bool:
    """
    Measures a completion in which a tool returned media, if there is one on any process, and applies what it found.
    """
    own = [
        (prompt, ids)
        for prompt, ids in zip(prompts, completion_ids, strict=True)
        if isinstance(prompt, Conversation) and len(ids) > len(prompt.later)
    ][:1]
    holders = [process for process, holds in enumerate(gather_object([bool(own)])) if holds]
    if not holders:
        return False
    is_own = trainer.accelerator.process_index == holders[0]
    prompt, ids = broadcast_object_list(own if is_own else [None], from_process=holders[0])[0]
    with measuring(trainer):
        check = _Check(trainer, {})
        trainer._self_check.conversation = check.behind_tools(prompt, ids)
    trainer._self_check.fallbacks = trainer._policy.fallbacks = check.fallbacks
    return True


@contextmanager
def measuring(trainer: "MultimodalMixin", evaluation: bool = True):
    """Forwards of the policy within this context leave no trace."""
    device = trainer.accelerator.device
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs),
        evaluation_mode(trainer.model) if evaluation else nullcontext(),
    ):
        yield


class EngineCheck:
    """
    Compares the log-probabilities of an engine that samples the rollouts, such as vLLM, with the trainer's.

    It does so on the first batch, on the first one after the weights have moved so far that it shows if the engine
    didn't get them, and on the first media that tools return. A few completions of each process are looked at, each by
    itself.
    """

    def __init__(self, trainer: "MultimodalMixin", check: SelfCheck):
        self.trainer = trainer
        self.check = check
        check.engine = check.engine_updated = check.engine_conversation = None
        engine: Any = trainer.vllm_generation
        self.tolerance = max(check.tolerance, _tolerance(engine.dtype))
        self.step = -1  # the last one looked at
        self.first: tuple[Completions, torch.Tensor, torch.Tensor] | None = None  # with log-probabilities and mask

    def run(self, batch: dict[str, Any], prompts: Sequence[EncodedPrompt], mask: torch.Tensor) -> bool:
        """
        Measures a batch, if that tells something new.

        Shapes: `mask` `(B, C)`.
        """
        check, step = self.check, self.trainer.state.global_step
        if check.engine_updated is not None or step == self.step:
            return False
        self.step = step
        if self.first is not None and not self._moved() > _SHOWS * self._limit():
            return False
        sampled = batch["sampling_per_token_logps"]
        mask = mask * ~sampled.isnan()  # an engine may have none of a token
        rows = _telling(prompts, mask)
        own = [replace(prompts[i], mask_cache={}) for i in rows]
        completions = own, batch["completion_ids"][rows], batch["completion_mask"][rows]
        logps, mask = self._score(completions), mask[rows]
        measured = self._difference(logps, sampled[rows], mask)
        if measured is None:
            return False
        limit, before = self._limit(), check.engine
        if before is None:
            check.engine, self.first = measured, (completions, logps, mask)
            when = "on the first batch"
            reason = (
                "it has other settings or weights, or makes something else of the media. Load the model and "
                "`processing_class` from one folder, and start a server with that folder, too"
            )
        else:
            check.engine_updated, self.first = measured, None  # media and all
            when = f"after {step} updates, and were {before[0]:.0e} before"
            reason = "it doesn't get all weights that are trained, or rounds them"
        self._judge(measured, limit, when, reason)
        return True

    def run_behind_tools(self, batch: dict[str, Any], prompts: Sequence[EncodedPrompt], mask: torch.Tensor) -> bool:
        """Measures what was sampled behind media that a tool returned, the first time that there is something."""
        check = self.check
        if check.engine_conversation is not None:
            return False
        sampled = batch["sampling_per_token_logps"]
        mask = mask * ~sampled.isnan()
        for i, prompt in enumerate(prompts):
            mask[i, : len(prompt.later) if isinstance(prompt, Conversation) else None] = 0
        row = int(mask.sum(1).argmax())  # any, where there is none
        if not self.trainer.accelerator.reduce(mask[row].sum(), reduction="sum").item():
            return False
        place = slice(row, row + 1)
        prompt = replace(prompts[row], mask_cache={})
        logps = self._score(([prompt], batch["completion_ids"][place], batch["completion_mask"][place]))
        measured = self._difference(logps, sampled[place], mask[place])
        assert measured is not None
        limit, check.engine_conversation = self._limit(), measured
        reason = "it makes something else of media that tools return, or has them at other positions"
        self._judge(measured, limit, "behind media of tools", reason)
        return True

    def _judge(self, measured: tuple[float, float], limit: float, when: str, reason: str) -> None:
        mean, largest = measured
        is_strict = self.tolerance <= _tolerance(torch.float32)
        if not mean <= limit or (is_strict and not largest <= self.tolerance):
            raise RuntimeError(
                f"{self.check}: the engine's log-probabilities are {mean:.0e} on average, {largest:.0e} at most, from "
                f"the trainer's {when}. Rounding explains an average of {limit:.0e}, so {reason}. Set "
                "`use_vllm=False`, or `self_check=False` to go on."
            )

    def _limit(self) -> float:
        """How far apart log-probabilities may be on average: not much farther than they were before the update."""
        limit = self.tolerance / 2
        if self.check.engine is None:
            return limit
        return min(limit, max(_GROWS * self.check.engine[0], self.tolerance**2 / 2, _tolerance(torch.float32) / 2))

    def _moved(self) -> float:
        """How far the trainer's log-probabilities of the first batch have moved on average."""
        assert self.first is not None
        completions, before, mask = self.first
        moved = self._difference(self._score(completions), before, mask)
        assert moved is not None
        return moved[0]

    def _score(self, completions: Completions) -> torch.Tensor:
        """The trainer's log-probabilities `(N, C)` with what the engine adds to logits, of which there are many."""
        trainer = self.trainer
        prompts, ids, mask = completions
        with measuring(trainer):
            logps = [
                trainer._policy.score(
                    trainer.model,
                    [prompt],
                    ids[i : i + 1],
                    mask[i : i + 1],
                    packed=False,
                    logit_bias=trainer._logit_bias,
                ).logps
                for i, prompt in enumerate(prompts)
            ]
        return torch.cat(logps)

    def _difference(self, a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> tuple[float, float] | None:
        """Mean and largest over all processes; `None` if there are no tokens."""
        accelerator = self.trainer.accelerator
        difference = torch.where(mask.bool(), (a - b).abs(), 0.0).nan_to_num(nan=math.inf)
        total, count = accelerator.reduce(
            torch.stack([difference.sum(), mask.sum().float()]), reduction="sum"
        ).tolist()
        largest = accelerator.gather(difference.max()[None]).max().item()
        return (total / count, largest) if count else None


def _telling(prompts: Sequence[EncodedPrompt], mask: torch.Tensor) -> list[int]:
    """A few completions with tokens, first of prompts with different kinds of media, then of different prompts."""
    order: dict[int, tuple] = {}
    n_of_kinds: Counter[frozenset[str]] = Counter()
    for prompt, rows in group_by_prompt(prompts).items():
        place = n_of_kinds[prompt.modalities]
        n_of_kinds[prompt.modalities] += 1
        empty = {i: not mask[i].any() for i in rows}
        order |= {i: (empty[i], nth, place) for nth, i in enumerate(sorted(rows, key=empty.__getitem__))}
    return sorted(order, key=order.__getitem__)[:_PROBES]


def _tolerance(dtype: torch.dtype) -> float:
    # Scores are computed in float32 at best, also those of a model in float64
    return 2 * math.sqrt(max(torch.finfo(each).eps for each in (dtype, torch.float32)))


class _Check:
    """One run of the self-check; `fallbacks` are those found so far."""

    def __init__(self, trainer, measured: dict[str, float]):
        self.trainer = trainer
        self.model = trainer._unwrapped(trainer.model)
        self.device = trainer.accelerator.device
        self.tolerance = _tolerance(computing_dtype(trainer.accelerator, self.model))
        self.fallbacks = replace(trainer._policy.fallbacks)
        self.media = dict(measured)
        self.model_type = self.model.config.model_type
        self.failure = ""  # what the last attempt failed with
        self.engine_positions = False
        self.changes: list[str] = sampling_changes(trainer.args)
        if all_placeholder_ids(self.model, trainer.processing_class):
            self.changes.insert(0, "suppressed placeholders")
        self.changed: float | None = None
        self.scored: tuple[EncodedPrompt, torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.cannot_sample = False

    def run(self, messages: Sequence[Any], prompts: list[EncodedPrompt]) -> SelfCheck:
        self.n_rows = len(prompts)
        targets, donors, partners = self._choose(messages, prompts)
        ids = mask = None
        worst: dict[str, list[float]] = {"features": [], "padded": [], "packed": [], "sampled": []}
        for target in targets:
            if target.prompt.media:
                worst["features"].append(self._features(target))
            ids, mask, sampled, truth = self._sample_and_recompute(target)
            if sampled is not None:
                worst["sampled"].append(sampled)
            padded, scores = self._padded(target.prompt, ids, mask, truth)
            worst["padded"].append(padded)
            self.scored = target.prompt, ids, mask, scores
            if self.fallbacks.packing:
                worst["packed"].append(self._packed(target.prompt, ids, mask, truth))
            for kind in sorted(target.prompt.modalities - self.media.keys()):
                self._swap(kind, target.prompt, donors.get(kind), ids, mask, scores)
        rows = self._independent_rows(targets[0].prompt, partners, ids, mask)
        features, padded, packed, sampled = (max(values, default=None) for values in worst.values())
        assert padded is not None  # there is a target
        sampled = math.nan if self.cannot_sample else sampled
        return SelfCheck(
            features,
            padded,
            packed,
            self.media,
            rows,
            sampled,
            tuple(self.changes),
            self.changed,
            math.nan,  # measured in training mode
            self.tolerance,
            self.fallbacks,
            self.engine_positions,
        )

    def training_mode(self) -> float:
        """How far log-probabilities of the last completions are from those in evaluation mode."""
        assert self.scored is not None
        prompt, ids, mask, scores = self.scored
        statistics = [(buffer, buffer.clone()) for buffer in self.model.buffers()]  # of batch norms, which move
        other = self._attempt("scoring in training mode", lambda: self._score([prompt], ids, mask, packed=False))
        for buffer, value in statistics:
            buffer.copy_(value)
        return self._difference(other, scores, mask)

    # What is checked

    def _choose(self, messages, prompts) -> tuple[list[_Case], dict[str, EncodedPrompt], list[EncodedPrompt]]:
        """
        The longest prompt of all and of each modality, whose masks are the hardest case; other media to swap in; and
        partners for a common forward: media of other shapes, and text alone, the shortest of each, as what pads them
        may change them, too.
        """
        own = {prompt: messages[rows[0]] for prompt, rows in group_by_prompt(prompts).items()}
        process = self.trainer.accelerator.process_index
        traits = gather_object([_traits(process, i, prompt) for i, prompt in enumerate(own)])
        longest = sorted(traits, key=lambda each: -each.length)
        with_kind = {kind: [each for each in longest if kind in each.fingerprints] for kind in MODALITIES}
        targets = [found[0] for found in with_kind.values() if found]
        targets = sorted(_unique([*targets, longest[0]]), key=lambda each: (not each.fingerprints, -each.length))
        donors = {}
        for kind, (first, *others) in ((kind, found) for kind, found in with_kind.items() if found):
            donor = next((o for o in others if o.fingerprints[kind] != first.fingerprints[kind]), None)
            if donor is not None:
                donors[kind] = donor
        others = [each for each in longest if each is not targets[0]]
        by_shape: dict[str, _Traits] = {}
        for each in reversed(others):
            if each.fingerprints:
                by_shape.setdefault(each.shapes, each)
        different = [each for shapes, each in by_shape.items() if shapes != targets[0].shapes]
        # One of each modality, those first that are beside their own kind
        own_kinds = sorted(MODALITIES, key=lambda kind: kind not in targets[0].fingerprints)
        of_kinds = [next((each for each in different if kind in each.fingerprints), None) for kind in own_kinds]
        different = _unique([each for each in [*of_kinds, *different] if each is not None])[:_PARTNERS]
        text = [each for each in others if not each.fingerprints][-1:]
        partners = (different or list(by_shape.values())[:1]) + text

        cases = {}
        for each in _unique([*targets, *donors.values(), *partners]):
            case = None
            if each.process == process:
                case = self._case(*list(own.items())[each.index], plain=each in targets)
            cases[id(each)] = broadcast_object_list([case], from_process=each.process)[0]
        return (
            [cases[id(each)] for each in targets],
            {kind: cases[id(each)].prompt for kind, each in donors.items()},
            [cases[id(each)].prompt for each in partners],
        )

    @functools.cached_property
    def processor(self):
        return self.trainer._processor_as_loaded()

    def _case(self, prompt: EncodedPrompt, messages, plain: bool) -> _Case:
        if not plain:
            return _Case(prompt, None)
        if not prompt.media:
            # Text is tokenized by the template of its turn, which tools of its environment may be a part of
            fields = {"input_ids": prompt.input_ids, **prompt.token_fields}
            return _Case(prompt, {name: value[None] for name, value in fields.items()})
        try:
            refs = list(iter_refs(messages))
            media = decode_media(refs, self.processor, self.trainer.args.audio_overlong)
            template = self.trainer._template_kwargs()
            outputs = processor_outputs(messages, self.processor, *media, template)
        except Exception as error:
            _raise_out_of_memory(error)
            return _Case(prompt, None, f"{type(error).__name__}: {error}")
        try:
            read = outputs_of_files(messages, self.processor, self.trainer.args.audio_overlong, template)
        except Exception as error:  # it may read fewer formats
            logger.warning(
                f"self-check: {self.model_type}: {type(self.processor).__name__} can't read a row's videos itself, so "
                f"that its own frames weren't compared ({error})"
            )
            read = None
        # Its frames may be less exact, but not of other sizes or times
        return _Case(prompt, outputs if read is None or _same_layout(read, outputs) else read)

    # The truth

    def _features(self, target: _Case) -> float:
        if target.plain is None:
            raise self._cannot(f"its processor, as `AutoProcessor.from_pretrained` loads it, fails ({target.error})")
        prompt, plain = target.prompt, target.plain
        fields = {"input_ids": prompt.input_ids, **prompt.token_fields}
        ours = {**prompt.media, **{name: value[None] for name, value in fields.items()}}
        worst = 0.0 if ours.keys() == plain.keys() else math.inf
        for name in ours.keys() & plain.keys():
            if ours[name].shape != plain[name].shape:
                worst = math.inf
            elif plain[name].numel():
                value = plain[name].double()
                worst = max(worst, ((ours[name].double() - value).abs().max() / value.abs().max().clamp(min=1)).item())
        worst = self._worst(worst)
        if not worst <= self.tolerance:
            raise self._cannot(
                f"its media tensors differ by {worst:.0e} from those of its processor as "
                "`AutoProcessor.from_pretrained` loads it; pass that as `processing_class`"
            )
        return worst

    def _sample_and_recompute(self, target: _Case):
        """
        Two short completions of a prompt, their mask, how far the log-probabilities that they were sampled with are
        from the truth, and the truth.
        """
        ids, mask, sampled = self._sample(target.prompt)
        truth = self._truth(target, ids, mask, sampled)
        if sampled is None:
            return ids, mask, None, truth
        difference = self._difference(truth, sampled, mask)
        if not difference <= self.tolerance and self.fallbacks.shared_prefill:
            self._warn(
                f"sampling from a shared prefill differs by {difference:.0e}", "prompts are prefilled one by one"
            )
            self.fallbacks.shared_prefill = False
            return self._sample_and_recompute(target)
        if not difference <= self.tolerance:
            raise self._cannot(
                f"it samples with log-probabilities that are {difference:.0e} from those of its own forward"
            )
        return ids, mask, difference, truth

    def _sample(self, prompt: EncodedPrompt) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        trainer = self.trainer
        if trainer.use_vllm or trainer.use_transformers_continuous_batching:
            return self._scripted(prompt)  # what samples the rollouts isn't what would be measured here
        config = copy.deepcopy(trainer.generation_config)
        # Beams have logits of their own
        config.update(max_new_tokens=_NEW_TOKENS, min_new_tokens=None, num_beams=1, num_return_sequences=1)
        config.update(return_dict_in_generate=True, output_logits=True, output_scores=True)
        output = self._attempt(
            "sampling",
            lambda: trainer._sample_completions([prompt, prompt], config, self.fallbacks.shared_prefill),
        )
        if output is None and self.fallbacks.shared_prefill:
            self.fallbacks.shared_prefill = False
            return self._sample(prompt)
        if output is None and not prompt.media:
            # A `generate` of the user's may know batches of the run's size alone
            output = self._attempt(
                f"sampling {self.n_rows} rows",
                lambda: trainer._sample_completions([prompt] * self.n_rows, config, self.fallbacks.shared_prefill),
            )
            if output is None:
                self.cannot_sample = True
                return self._scripted(prompt)
        if output is None:
            raise self._cannot(f"it can't sample completions ({self.failure})")
        if not isinstance(output, ModelOutput) or output.get("logits") is None:
            # A `generate` of the user's, which returns ids alone
            ids = output["sequences"][:2] if isinstance(output, ModelOutput) else output[:2]
            ids = ids[:, -_NEW_TOKENS:]
            return (ids, self._mask(ids), None) if ids.size(1) else self._scripted(prompt)
        logits = torch.stack(output["logits"], dim=1)[:2].float() / trainer.temperature
        ids = output["sequences"][:2, -logits.size(1) :]
        mask = self._mask(ids)
        sampled = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        if output.get("scores") is not None:
            scores = torch.stack(output["scores"], dim=1)[:2].float()
            self._compare_distributions(logits, scores, ids, mask, config)
        return ids, mask, sampled

    def _compare_distributions(self, logits, scores, ids, mask, config: GenerationConfig) -> None:
        """Whether completions are drawn from what the trainer's config makes of the logits, and nothing else."""
        suppressed = torch.tensor(config.suppress_tokens or [], dtype=torch.long, device=logits.device)
        own, expected, drawn = (
            each.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
            for each in (logits, logits.index_fill(-1, suppressed, -math.inf), scores)
        )
        self.changed = max(self.changed or 0.0, self._difference(own, drawn, mask))
        unexplained = self._difference(expected, drawn, mask)
        if not sampling_changes(self.trainer.args) and not unexplained <= self.tolerance:
            raise self._cannot(
                f"`generate` draws from a distribution other than the one that is scored: log-probabilities differ by "
                f"{unexplained:.0e} where only suppressed tokens are left out"
            )

    def _scripted(self, prompt: EncodedPrompt) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Two completions made of the prompt's last text tokens, where nothing samples here."""
        placeholders = all_placeholder_ids(self.model, self.trainer.processing_class)
        text = [i for i in prompt.input_ids.tolist() if i not in placeholders][-_NEW_TOKENS:]
        ids = torch.tensor([text, text[::-1]], device=self.device)
        return ids, torch.ones_like(ids), None

    def _mask(self, ids: torch.Tensor) -> torch.Tensor:
        return up_to_first_end(ids, self.trainer.eos_token_ids).long()

    def _truth(self, target: _Case, ids, mask, sampled) -> torch.Tensor:
        plain = to_model(target.plain, self.model, self.device)
        plain["attention_mask"] = torch.ones_like(plain["input_ids"])
        if self._has_engine_positions(target.prompt):
            self.engine_positions = True
            return self._at_engine_positions(plain, target.prompt, ids)
        own = self._attempt(
            "its own forward", lambda: torch.cat([self._own_forward(plain, row) for row in ids[:, None]])
        )
        if own is not None and sampled is not None and self._difference(own, sampled, mask) <= self.tolerance:
            return own
        # What sampling follows decides
        generated = self._attempt("`generate`", lambda: self._own_generate(plain, ids), quiet=sampled is None)
        if generated is not None:
            return generated
        if own is None:
            raise self._cannot(f"neither its forward nor its `generate` can be measured ({self.failure})")
        return own

    def _has_engine_positions(self, prompt: EncodedPrompt) -> bool:
        if not self.trainer.use_vllm or not prompt.media:
            return False
        own = prompt_position_ids(self.model, prompt.input_ids, prompt.media, prompt.token_fields)
        return not torch.equal(own, prompt.position_ids)

    def _at_engine_positions(self, plain: dict[str, torch.Tensor], prompt: EncodedPrompt, ids) -> torch.Tensor:
        """The truth where an engine has other positions than `generate` of the model."""
        positions = prompt.position_ids.to(self.device)
        following = positions[..., -1:] + 1 + torch.arange(ids.size(1), device=self.device)
        plain["position_ids"] = torch.cat([positions, following], dim=-1)
        own = self._attempt(
            "its own forward", lambda: torch.cat([self._own_forward(plain, row) for row in ids[:, None]])
        )
        if own is None:
            raise self._cannot(f"its own forward can't be measured at the engine's positions ({self.failure})")
        return own

    def _own_forward(self, plain: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of one completion, `(1, N)`, by the model's own forward."""
        trainer, n_new = self.trainer, ids.size(1)
        inputs: dict[str, Any] = {**plain, "input_ids": torch.cat([plain["input_ids"], ids], dim=1)}
        for name, value in (("attention_mask", 1), *((name, 0) for name in TOKEN_FIELDS if name in plain)):
            inputs[name] = torch.nn.functional.pad(inputs[name], (0, n_new), value=value)
        for name in family_of(self.model).token_masks:
            if name in plain:
                inputs[name] = continued_field(self.model, name, inputs[name], n_new)
        if takes_logits_to_keep(self.model):
            inputs["logits_to_keep"] = n_new + 1
        with trainer.accelerator.autocast(), original_attention(self.model):
            logits = trainer.model(**inputs, use_cache=False).logits
        return self._logps(logits[:, -n_new - 1 : -1], ids)

    def _own_generate(self, plain: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor | None:
        """Log-probabilities of completions, `(B, N)`, by `generate`, one by one; `None` if it has none."""
        config = copy.deepcopy(self.trainer.generation_config)
        config.update(
            max_new_tokens=ids.size(1),
            min_new_tokens=None,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            output_logits=True,
        )
        results = []
        own = as_generation_config(self.model, config)
        with self.trainer._generating() as model, original_attention(self.model), own:
            for row in ids[:, None]:
                output = _generate(model, plain, config, row)
                if not isinstance(output, ModelOutput) or output.get("logits") is None:
                    return None
                results.append(self._logps(torch.stack(output["logits"], dim=1)[:1], row))
        return torch.cat(results)

    def _logps(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # Fewer logits than ids where a completion has ended
        logps = (logits.float() / self.trainer.temperature).log_softmax(-1)
        logps = logps.gather(-1, ids[:, : logits.size(1), None])[..., 0]
        return torch.nn.functional.pad(logps, (0, ids.size(1) - logits.size(1)))

    def behind_tools(self, prompt: Conversation, completion_ids: list[int]) -> float:
        """How far what follows the last result of a tool is from the model's own forward of all of it."""
        n = len(prompt.later)
        later = prompt.later
        whole = EncodedPrompt(
            torch.cat([prompt.input_ids, later.input_ids]),
            {name: torch.cat([value, later.token_fields[name]]) for name, value in prompt.token_fields.items()},
            join_media(prompt.parts),
            torch.cat([prompt.position_ids, later.position_ids], dim=-1),
        )
        tokens = {"input_ids": whole.input_ids, **whole.token_fields}
        rows = {name: value[None] for name, value in tokens.items()}
        plain = to_model({**rows, **whole.media}, self.model, self.device)
        plain["attention_mask"] = torch.ones_like(plain["input_ids"])
        ids = torch.tensor([completion_ids], device=self.device)
        mask = torch.ones_like(ids)
        if self._has_engine_positions(whole):
            truth = self._at_engine_positions(plain, whole, ids[:, n:])
        else:
            truth = self._attempt("its own forward of a conversation", lambda: self._own_forward(plain, ids[:, n:]))
        if truth is None:
            raise self._cannot(f"its own forward can't be measured behind media of tools ({self.failure})")
        scores = self._attempt(
            "scoring a conversation",
            lambda: self._score([replace(prompt, mask_cache={})], ids, mask, packed=self.fallbacks.packing)[:, n:],
        )
        difference = self._difference(scores, truth, mask[:, n:])
        if difference <= self.tolerance:
            return difference
        found = f"log-probabilities behind media of tools differ by {difference:.0e} from those of its own forward"
        if not self.fallbacks.packing:
            raise self._cannot(found)
        self._warn(found, "completions are scored in padded rows")
        self.fallbacks.packing = False
        return self.behind_tools(prompt, completion_ids)

    # What is compared with it

    def _score(
        self, prompts: list[EncodedPrompt], ids, mask, packed: bool, isolate: str | None = None
    ) -> torch.Tensor:
        repeated = [prompt for prompt in prompts for _ in range(len(ids))]
        rows = [each.repeat(len(prompts), 1) for each in (ids, mask)]
        fallbacks = replace(self.fallbacks, isolate=isolate)
        return self.trainer._policy.score(
            self.trainer.model, repeated, *rows, packed=packed, fallbacks=fallbacks
        ).logps

    def _padded(self, prompt: EncodedPrompt, ids, mask, truth) -> tuple[float, torch.Tensor]:
        """How far padded rows are from the truth, and their log-probabilities."""
        prompt = replace(prompt, mask_cache={})
        scores = self._attempt("scoring padded rows", lambda: self._score([prompt], ids, mask, packed=False))
        difference = self._difference(scores, truth, mask)
        if difference <= self.tolerance:
            return difference, scores
        if self.fallbacks.logits_from_model and scores is None:
            raise self._cannot(f"it fails at scoring padded rows ({self.failure})")
        if self.fallbacks.logits_from_model:
            raise self._cannot(
                f"its log-probabilities in a batch differ by {difference:.0e} from those of its own forward on one "
                "prompt"
            )
        found = (
            "fails" if scores is None else f"gives log-probabilities that are {difference:.0e} from the model's own"
        )
        self._warn(
            f"TRL's fused head {found}", "log-probabilities are taken from its own logits, which needs more memory"
        )
        self.fallbacks.logits_from_model = True
        return self._padded(prompt, ids, mask, truth)

    def _packed(self, prompt: EncodedPrompt, ids, mask, truth) -> float:
        prompt = replace(prompt, mask_cache={})
        scores = self._attempt("scoring packed rows", lambda: self._score([prompt], ids, mask, packed=True))
        difference = self._difference(scores, truth, mask)
        if not difference <= self.tolerance:
            self._warn(f"packed rows differ by {difference:.0e}", "completions are scored in padded rows")
            self.fallbacks.packing = False
        return difference

    def _swap(self, kind: str, prompt: EncodedPrompt, donor: EncodedPrompt | None, ids, mask, scores) -> None:
        """Measures the effect of another medium of a kind."""
        swapped = _with_other_media(prompt, kind, donor)
        if all(torch.equal(prompt.media[name], swapped.media[name]) for name in prompt.media):
            self.media[kind] = math.nan  # nothing to tell them apart by
            return
        other = self._attempt(f"scoring another {kind}", lambda: self._score([swapped], ids, mask, packed=False))
        if other is None:
            raise self._cannot(f"it fails with another {kind} in the place of the first ({self.failure})")
        moved = self.media[kind] = self._difference(other, scores, mask)
        if moved <= _MOVES * self.tolerance:
            raise RuntimeError(
                f"self-check: {self.model_type} answers the same with another {kind} (log-probs move by {moved:.0e}), "
                f"so training would ignore it. Check that the chat template writes a placeholder for each {kind}, "
                "that the model is the one the processor belongs to, and that its weights are loaded."
            )

    def _independent_rows(self, first: EncodedPrompt, partners: list[EncodedPrompt], ids, mask) -> float:
        prompts = [replace(each, mask_cache={}) for each in (first, *partners, first)]
        alone = {}
        for each in (first, *partners):
            scores = self._attempt(
                "scoring a prompt by itself", lambda p=each: self._score([p], ids, mask, packed=False)
            )
            if scores is None:
                raise self._cannot(f"it fails at scoring a prompt by itself ({self.failure})")
            alone[id(each)] = scores
        separate = torch.cat([alone[id(each)] for each in (first, *partners, first)])
        difference = math.inf
        for packed in [True, False][not self.fallbacks.packing :]:
            splits = [None, "media", "prompt"]
            for isolate in splits[splits.index(self.fallbacks.isolate) :]:
                # Batches that gain nothing from packing are padded, and so are prompts to sample from
                difference = max(
                    self._rows_together(prompts, ids, mask, rows_packed, isolate, separate)
                    for rows_packed in {packed, False}
                )
                if difference <= self.tolerance:
                    if isolate != self.fallbacks.isolate:
                        self._warn("prompts in one forward disturb each other", f"each {isolate} gets its own")
                    if packed != self.fallbacks.packing:
                        self._warn("prompts in one packed row disturb each other", "rows are padded")
                    self.fallbacks.isolate, self.fallbacks.packing = isolate, packed
                    return difference
        raise self._cannot(f"prompts disturb each other by {difference:.0e} even in forwards of their own")

    def _rows_together(self, prompts, ids, mask, packed: bool, isolate: str | None, separate) -> float:
        n = len(ids) if packed else 1  # each padded row holds its prompt
        own = [rows[:n] for rows in (ids, mask)]
        scores = self._attempt(
            "scoring several prompts at once", lambda: self._score(prompts, *own, packed=packed, isolate=isolate)
        )
        expected = separate.view(len(prompts), len(ids), -1)[:, :n].flatten(0, 1)
        return self._difference(scores, expected, own[1].repeat(len(prompts), 1))

    # Agreement

    def _difference(self, a: torch.Tensor | None, b: torch.Tensor, mask: torch.Tensor) -> float:
        """The largest over all processes, so that all decide alike; infinite where there is nothing to compare."""
        value = math.inf
        if a is not None and a.shape == b.shape:
            value = torch.where(mask.bool(), a - b, 0.0).abs().max().item()
        return self._worst(math.inf if math.isnan(value) else value)

    def _worst(self, value: float) -> float:
        return self.trainer.accelerator.gather(torch.tensor([value], device=self.device)).max().item()

    def _attempt(self, what: str, measure, quiet: bool = False):
        """What a model can't do is known by one sentence; `None` on all processes if one of them fails."""
        result = None
        try:
            result = measure()
        except Exception as error:
            _raise_out_of_memory(error)
            self.failure = f"{type(error).__name__}: {error}"
            if not quiet:
                logger.warning(f"self-check: {self.model_type} fails at {what} ({self.failure}).")
        return None if self._worst(float(result is None)) else result

    def _warn(self, found: str, remedy: str) -> None:
        logger.warning(f"self-check: {self.model_type}: {found}, so from here on {remedy}.")

    def _cannot(self, reason: str) -> RuntimeError:
        return RuntimeError(
            f"self-check: {self.model_type} can't be trained exactly: {reason}. To train nevertheless, set "
            "`self_check=False`."
        )


def _raise_out_of_memory(error: Exception) -> None:
    """A model that doesn't fit isn't an inexact one."""
    if isinstance(error, MemoryError) or should_reduce_batch_size(error):
        raise error


class _Force(LogitsProcessor):
    """Lets `generate` write given ids."""

    def __init__(self, ids: torch.Tensor):
        self.ids = iter(ids.unbind(1))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -math.inf).scatter(1, next(self.ids)[:, None], 0.0)


def _generate(model, plain: dict[str, torch.Tensor], config: GenerationConfig, ids: torch.Tensor) -> Any:
    return model.generate(**plain, generation_config=config, logits_processor=LogitsProcessorList([_Force(ids)]))


def _same_layout(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether a processor returned the same token ids, and tensors of the same shapes."""
    shapes = [{name: value.shape for name, value in each.items()} for each in (a, b)]
    return shapes[0] == shapes[1] and torch.equal(a["input_ids"], b["input_ids"])


def _traits(process: int, index: int, prompt: EncodedPrompt) -> _Traits:
    # Grids and sizes tell shapes that features don't
    shapes = {
        name: value.tolist() if not value.is_floating_point() and value.numel() <= _MOST_SIZES else tuple(value.shape)
        for name, value in prompt.media.items()
    }
    fingerprints = {
        kind: sum(value.double().sum().item() for value in _features_of(prompt, kind).values())
        for kind in prompt.modalities
    }
    return _Traits(process, index, len(prompt), repr(sorted(shapes.items())), fingerprints)


def _unique(traits: list[_Traits]) -> list[_Traits]:
    return list({id(each): each for each in traits}.values())


def _features_of(prompt: EncodedPrompt, kind: str) -> dict[str, torch.Tensor]:
    """The features of a modality, without masks and sizes; codes, where a family has those for features."""
    tensors = {name: value for name, value in prompt.media.items() if value.dim() > 1 and "mask" not in name}
    own = {name: value for name, value in tensors.items() if modality_of(name) == kind}
    floats, codes = (
        {name: value for name, value in own.items() if value.is_floating_point() == is_float and "grid" not in name}
        for is_float in (True, False)
    )
    # Some families write videos with the tensors of images
    return floats or codes or {name: value for name, value in tensors.items() if value.is_floating_point()}


def _with_other_media(prompt: EncodedPrompt, kind: str, donor: EncodedPrompt | None) -> EncodedPrompt:
    """
    A prompt with the features of another medium, in the shape of its own. Without another, its own turned around.

    What is exactly 0 stays so, and nothing else becomes it: to some models it is padding, which they drop.
    """
    media, donated = dict(prompt.media), {} if donor is None else _features_of(donor, kind)
    for name, own in _features_of(prompt, kind).items():
        other = donated.get(name)
        if other is None or other.dim() != own.dim() or not other.numel():
            other = own.flip(tuple(range(own.dim())))
            other = 1 - other if own.is_floating_point() else other
        for dim, size in enumerate(own.shape):
            other = other.index_select(dim, torch.arange(size) % other.size(dim))
        media[name] = torch.where((own == 0) | (other == 0), own, other.to(own.dtype))
    return replace(prompt, media=media, mask_cache={})
