# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Teachers with processors of their own, which may be of another family, and of another tokenizer."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from trl.trainer.utils import get_config_model_id

from ...algorithms.metrics import scored_mean
from ...data.reading.refs import iter_refs
from ...encoding.dummies import dummy_prompt
from ...encoding.processors import control_tokens, load_processor, tokenizer_of
from ...encoding.prompt_encoder import PromptEncoder
from ...encoding.prompts import EncodedPrompt, all_placeholder_ids
from ...encoding.spans import common_spans, end_of_answer, text_ids, token_text
from ...families import family_of, input_modalities
from ...forward.divergence import SpanTarget, Target
from ...forward.head import HeadRule
from ...forward.scores import ScoreRequest
from ...policy import Fallbacks, PolicyForward
from ...rollout.completions import right_pad
from ...rollout.ranks import sum_over_ranks
from ...rollout.rollout import Rollout, require
from ...rollout.stream import EncodedRow
from ..shared.scoring import compile_models, enable_packing, prepare_reference
from ..shared.stages import Stages
from .teacher import (
    Processor,
    Teacher,
    completions_of,
    divergence_head_rule,
    leave_out,
    same_tokens,
    teacher_indices,
    teacher_obstacle,
    teacher_prompts,
)


if TYPE_CHECKING:
    from .config import MultimodalDistillationConfig


@dataclass
class _Alignment:
    """A completion as a teacher's tokens, and the spans that both tokenizers cut alike."""

    spans: list[int]  # index of the span of each of the student's tokens, -1 in none
    teacher_ids: list[int]
    teacher_spans: list[int]


@dataclass
class SeparateTeacher:
    """
    A teacher whose processor encodes the same messages and media. If its tokenizer is the student's, it scores the
    sampled tokens, else the text of completions.
    """

    stages: Stages
    name: str  # for errors
    model: nn.Module  # prepared
    encoder: PromptEncoder
    policy: PolicyForward
    rules: tuple[HeadRule, HeadRule]  # of the student's head, and of the teacher's
    shares_tokens: bool
    _ends: tuple[int | None, int | None] = field(init=False)  # tokens that end an answer: of a chat, of plain text
    _placeholders: set[int] = field(init=False)

    def __post_init__(self):
        processor = self.encoder.processor
        self._placeholders = all_placeholder_ids(self.encoder.model, processor)
        self._ends = end_of_answer(processor), tokenizer_of(processor).eos_token_id

    def prompts(self, rollout: Rollout, rows: Sequence[EncodedRow]) -> list[EncodedPrompt]:
        """Returns the teacher's prompts for completions. Raises `ValueError` for media that it doesn't take."""
        modalities = {*input_modalities(self.encoder.model)}
        for row, messages in zip(rollout.source.row_indices, rollout.source.messages, strict=True):
            lacking = {ref.modality for ref in iter_refs(messages)} - modalities
            if lacking:
                raise ValueError(
                    f"row {row}: {self.name} takes no {' or '.join(sorted(lacking))}; remove the row, or choose "
                    "another teacher."
                )
        return teacher_prompts(self.stages, rollout, rows, self.encoder)

    # Scores of text

    def score(
        self, rollout: Rollout, chosen: Sequence[int], prompts: Sequence[EncodedPrompt]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Returns the spans of the chosen completions, and the teacher's log-probabilities of these, both on each token
        of the student, `(len(chosen), C)`. All ranks must call this, also without completions.
        """
        alignments = [self._align(rollout, i) for i in chosen]
        width = rollout.completion_ids.size(1)
        spans = torch.full((len(chosen), width), -1)
        logps = torch.zeros(len(chosen), width, dtype=torch.float32)
        teacher_logps = self._teacher_logps(prompts, [alignment.teacher_ids for alignment in alignments])
        for row, alignment in enumerate(alignments):
            spans[row, : len(alignment.spans)] = torch.tensor(alignment.spans, dtype=torch.long)
            teacher_spans = torch.tensor(alignment.teacher_spans, dtype=torch.long)
            is_aligned = teacher_spans >= 0
            totals = torch.zeros(width, dtype=torch.float32)
            totals.index_add_(0, teacher_spans[is_aligned], teacher_logps[row, : len(teacher_spans)][is_aligned])
            logps[row] = torch.where(spans[row] >= 0, totals[spans[row].clamp(min=0)], 0)
        return spans, logps

    def _align(self, rollout: Rollout, index: int) -> _Alignment:
        """
        Aligns the completion at a batch index with the teacher's tokens. Control tokens of the student are left out,
        but for the last, which is aligned with the token by which the teacher ends an answer.
        """
        tokenizer = self.stages.prompting.tokenizer
        teacher_tokenizer = tokenizer_of(self.encoder.processor)
        ids = rollout.source.ids[index]
        ends = {*self.stages.sampling.ends.ids, tokenizer.pad_token_id}
        has_end = bool(ids) and rollout.source.ended[index] and ids[-1] in ends
        control_ids = {tokenizer.convert_tokens_to_ids(token) for token in control_tokens(tokenizer)}
        positions = [i for i, token_id in enumerate(ids[: len(ids) - has_end]) if token_id not in control_ids]
        student = token_text([ids[i] for i in positions], tokenizer)
        teacher_ids = text_ids(student.text, teacher_tokenizer)
        # A text that spells a placeholder ends there, as the teacher would look for a medium
        is_media = [token_id in self._placeholders for token_id in teacher_ids]
        teacher_ids = teacher_ids[: is_media.index(True)] if any(is_media) else teacher_ids
        teacher = token_text(teacher_ids, teacher_tokenizer)
        text_spans, teacher_spans, is_whole = common_spans(student, teacher)
        spans = [-1] * len(ids)
        for i, span in zip(positions, text_spans, strict=True):
            spans[i] = span
        end = self._ends[isinstance(rollout.source.messages[index], str)]
        if has_end and end is not None and is_whole:
            next_span = max(spans, default=-1) + 1
            spans[-1] = next_span
            teacher_ids = [*teacher_ids, end]
            teacher_spans = [*teacher_spans, next_span]
        return _Alignment(spans, teacher_ids, teacher_spans)

    @torch.no_grad()
    def _teacher_logps(self, prompts: Sequence[EncodedPrompt], ids: Sequence[list[int]]) -> torch.Tensor:
        """Returns the log-probabilities of the teacher's tokens, `(N, T)`, on the CPU."""
        stages = self.stages
        args = stages.context.args
        size = args.per_device_train_batch_size if stages.context.is_training else args.per_device_eval_batch_size
        # With sharded weights, all ranks run as many forwards
        counts = stages.context.accelerator.gather(
            torch.tensor([math.ceil(len(ids) / size)], device=stages.context.accelerator.device)
        )
        padded = right_pad(ids, 0).to(stages.context.accelerator.device)
        mask = right_pad([[1] * len(row) for row in ids], 0).to(stages.context.accelerator.device)
        logps = torch.zeros(padded.shape, dtype=torch.float32)
        for start in range(0, int(counts.max()) * size, size):
            part = slice(start, start + size)
            if start >= len(ids):
                self._run_dummy()
                continue
            lengths = [len(row) for row in ids[part]]
            packed = self.policy.worth_packing(prompts[part], lengths, size, self.encoder.model)
            request = ScoreRequest(prompts[part], padded[part], mask[part], packed)
            logps[part] = self.policy.score(self.model, request).logps.float().cpu()
        for prompt in prompts:
            prompt.on_device.clear()
        return logps

    def dummy_prompt(self) -> EncodedPrompt:
        """Returns a prompt of the teacher for forwards without completions of this rank."""
        return dummy_prompt(None, self.encoder.processor, self.encoder.model)

    def _run_dummy(self) -> None:
        """Runs a forward of the teacher without completions of this rank."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.stages.context.accelerator.device)
        self.policy.score(self.model, ScoreRequest([self.dummy_prompt()], ids, torch.ones_like(ids), packed=False))

    # Update

    def target(self, rollout: Rollout) -> Target | SpanTarget:
        """Returns what the student's tokens of a micro-batch are compared with."""
        if self.shares_tokens:
            return Teacher(self.stages, self.model, None, self.rules, self.policy).target(rollout)
        return SpanTarget(
            taught_mask(rollout),
            self.rules[0],
            rollout.completion_ids,
            require(rollout.teacher.spans),
            require(rollout.teacher.span_logps),
            self.policy.temperature,
        )


def separate_teacher(
    stages: Stages, model: PreTrainedModel, student: PreTrainedModel, name: str
) -> SeparateTeacher | None:
    """
    Prepares a teacher with the processor of its folder, or returns `None` if it reads the student's inputs. Raises
    `ValueError` if it has no processor, or if the loss needs the probabilities of all tokens and the teacher has other
    tokens than the student.
    """
    args = stages.context.args
    student_processor = stages.prompting.encoder.processor
    if not args.separates_teachers or teacher_obstacle(student, model, student_processor, args) is None:
        return None
    processor = _load_processor(model, args, name)
    shares_tokens = same_tokens(student, model, student_processor, processor)
    if not shares_tokens:
        _check_loss(args, name)
    rules = divergence_head_rule(student, "student"), divergence_head_rule(model, "teacher")
    prepared, packs = _prepare(stages, model)
    fallbacks = Fallbacks(packing=packs, isolate=family_of(model).isolate)
    options = {"temperature": args.temperature, "max_tokens": args.max_tokens_per_microbatch}
    policy = PolicyForward(stages.context.accelerator, processor, fallbacks, **options)
    encoder = replace(
        stages.prompting.encoder,
        model=model,
        processor=processor,
        template_kwargs={**stages.prompting.encoder.template_kwargs, "chat_template": None},
        for_engine=False,
        keep_decoded=False,
        feature_dtype=lambda: model.dtype,
    )
    return SeparateTeacher(stages, name, prepared, encoder, policy, rules, shares_tokens)


def prepared_teacher(stages: Stages, model: PreTrainedModel) -> Any:
    """Prepares a teacher that reads the student's inputs, as the reference is prepared."""
    prepared, packs = _prepare(stages, model)
    stages.scoring.policy.fallbacks.packing = stages.scoring.policy.fallbacks.packing and packs
    return prepared


def _prepare(stages: Stages, model: PreTrainedModel) -> tuple[Any, bool]:
    """Also returns whether the model can score packed rows."""
    prepared: Any = prepare_reference(model, stages.context.args, stages.context.accelerator)
    packs = enable_packing(stages.context.accelerator, prepared, None, stages.context.args)
    compile_models(stages.context.accelerator, stages.context.args, prepared)
    return prepared, packs


def _load_processor(model: PreTrainedModel, args: "MultimodalDistillationConfig", name: str) -> Processor:
    folder = get_config_model_id(model.config)
    try:
        return load_processor(folder, args.teacher_model_revision, args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`teacher_processor='separate'` needs the processor of {name}, but there is none in {folder!r} "
            f"({str(error).splitlines()[0]}); save it in the folder of the model, and load the model from there."
        ) from error


def _check_loss(args: "MultimodalDistillationConfig", name: str) -> None:
    """Raises `ValueError` for options that teachers of another tokenizer exclude."""
    instead = (
        "; its log-probabilities of text give the reverse KL divergence of the sampled tokens: set `beta=1.0` and "
        "`loss_top_k=0`, or choose a teacher with the student's tokenizer."
    )
    if args.loss_top_k:
        raise ValueError(f"`loss_top_k={args.loss_top_k}` compares tokens, but those of {name} are others{instead}")
    if args.beta != 1.0:
        raise ValueError(f"`beta={args.beta}` compares all tokens, but those of {name} are others{instead}")
    if args.steps_per_generation != args.gradient_accumulation_steps:
        raise ValueError(
            f"The divergence from {name}, whose tokens are others than the student's, is that of completions by the "
            f"current weights, but `steps_per_generation` ({args.steps_per_generation}) isn't "
            f"`gradient_accumulation_steps` ({args.gradient_accumulation_steps}); set both to one number."
        )


def taught_mask(rollout: Rollout) -> torch.Tensor:
    """Returns the loss mask `(N, C)` without tokens in no span of text that a teacher's tokenizer cuts alike."""
    mask = rollout.loss_mask
    return mask if rollout.teacher.spans is None else mask * (rollout.teacher.spans >= 0).to(mask)


@dataclass
class SeparateTeachers:
    """The teachers of a run that have processors of their own, by their index among all teachers."""

    stages: Stages
    by_index: dict[int, SeparateTeacher]
    names: Mapping[int, str | None]  # `None` for a single teacher
    on_device: Callable[[int], AbstractContextManager]  # returns a context in which a teacher scores

    def prompts(self, rollout: Rollout, rows: Sequence[EncodedRow]) -> list[EncodedPrompt]:
        """Returns the prompt of each completion's teacher, see [`~teacher.teacher_prompts`]."""
        prompts: dict[int, EncodedPrompt] = {}
        for index in sorted(set(teacher_indices(rollout))):
            chosen = completions_of(rollout, index)
            part = rollout.select(chosen)
            part_rows = [rows[i] for i in chosen]
            if index in self.by_index:
                encoded = self.by_index[index].prompts(part, part_rows)
            else:
                encoded = teacher_prompts(self.stages, part, part_rows)
            prompts |= dict(zip(chosen, encoded, strict=True))
        return [prompts[i] for i in range(len(rollout))]

    def score(self, rollout: Rollout, prompts: list[EncodedPrompt]) -> list[EncodedPrompt]:
        """
        Adds the log-probabilities of teachers of another tokenizer to a rollout, and excludes completions of which
        nothing is aligned from the loss. Returns the prompts that other teachers still need. All ranks must call this.
        """
        by_text = {index: teacher for index, teacher in self.by_index.items() if not teacher.shares_tokens}
        if not by_text:
            return prompts
        n, width = rollout.completion_ids.shape
        # To other teachers, each token is a span
        spans = torch.arange(width).repeat(n, 1)
        logps = torch.zeros(n, width)
        remaining = [*prompts]
        for index, teacher in by_text.items():
            chosen = completions_of(rollout, index)
            with self.on_device(index):
                spans[chosen], logps[chosen] = teacher.score(rollout, chosen, [prompts[i] for i in chosen])
            for i in chosen:
                remaining[i] = rollout.prompts[i]
        rollout.teacher.spans = spans.to(rollout.completion_ids.device)
        rollout.teacher.span_logps = logps.to(rollout.completion_ids.device)
        self._log(rollout, by_text)
        self._leave_out_unaligned(rollout, by_text)
        rollout.num_items_in_batch = self.stages.context.accelerator.reduce(taught_mask(rollout).sum())
        return remaining

    def _log(self, rollout: Rollout, by_text: dict[int, SeparateTeacher]) -> None:
        """Logs the share of the tokens in the loss that are aligned, by teacher."""
        is_aligned = (require(rollout.teacher.spans) >= 0).float()
        indices = torch.tensor(teacher_indices(rollout), device=is_aligned.device)
        metrics = {}
        for index in by_text:
            mask = rollout.loss_mask * (indices == index)[:, None].to(rollout.loss_mask)
            share = scored_mean(is_aligned, mask)
            name = self.names[index]
            if name is None:
                metrics["teacher/aligned_frac"] = share
            else:
                metrics[f"teacher/{name}/aligned_frac"] = share
        self.stages.context.metrics.add(metrics)

    def _leave_out_unaligned(self, rollout: Rollout, by_text: dict[int, SeparateTeacher]) -> None:
        """Excludes completions of which nothing is aligned, or raises a `ValueError` for the first of them."""
        mask = rollout.loss_mask
        indices = teacher_indices(rollout)
        is_unaligned = (mask.any(1) & ~taught_mask(rollout).any(1)).tolist()
        unaligned = [i for i, index in enumerate(indices) if index in by_text and is_unaligned[i]]
        if unaligned and self.stages.context.args.teacher_processor_settings.on_unaligned == "raise":
            first = unaligned[0]
            text = self.stages.prompting.tokenizer.decode(rollout.source.ids[first])
            raise ValueError(
                f"row {rollout.source.row_indices[first]}: no token of the completion {text!r} can be aligned with "
                f"tokens of {by_text[indices[first]].name}; set `teacher_processor=\"separate(on_unaligned='skip')\"` "
                "to leave such completions out, or choose another teacher."
            )
        (n_unaligned,) = sum_over_ranks(self.stages.context.accelerator, [len(unaligned)])
        self.stages.context.metrics.add({"teacher/unaligned": n_unaligned})
        if n_unaligned:
            is_taught = torch.ones(len(rollout), dtype=torch.bool, device=mask.device)
            is_taught[unaligned] = False
            leave_out(self.stages, rollout, is_taught)
