# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
The teachers of a run: a single one, or several of which the column `teacher_id` chooses one for each row.

They are asked for a [`Lesson`] before completions are sampled, for their scores afterwards, and for a target in the
loss.
"""

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import PreTrainedModel
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import get_config_model_id, use_adapter

from ...algorithms.metrics import Metric, scored_mean
from ...data.reading.refs import iter_refs
from ...data.rows.names import TEACHER, TEACHER_COLUMNS, TEACHER_ID
from ...encoding.dummies import dummy_prompt
from ...encoding.processors import Processor, load_processor
from ...encoding.prompt_encoder import PromptEncoder, has_teacher_prompt
from ...encoding.prompts import EncodedPrompt
from ...engines.vllm_client import EngineRequest, on_all_ranks
from ...engines.vllm_teacher import ServerTeacher
from ...families import family_of, input_modalities
from ...forward.divergence import Head, SpanTarget, Target, Targets, head_of, top_k_tokens
from ...forward.head import HeadRule
from ...forward.trees import share_media
from ...models.modes import evaluation_mode
from ...models.parts import kept_requires_grad
from ...policy import Fallbacks, PolicyForward
from ...rollout.ranks import any_rank
from ...rollout.rollout import Prompted, Rollout, TeacherScores
from ...rollout.stream import EncodedRow
from ...rollout.view_prompts import view_prompts, with_new_start
from ...views.views import as_view
from ..base.conflicts import raise_first
from ..base.ema import MovingAverage
from ..base.preparation import compile_models, enable_packing, prepare_reference
from ..sampling.context import Context
from ..sampling.offload import HostMemory, storages, weights
from ..sampling.prompting import Prompting
from ..sampling.scoring import Scoring
from .conflicts import conflicts_of_other_tokens
from .span_scores import aligned_metrics, aligner, has_aligned, span_scores, taught_mask
from .teacher_loading import (
    TeachersByName,
    divergence_head_rule,
    label,
    obstacle_to_student_prompts,
    same_tokens,
    server_teacher,
)


logger = get_logger(__name__)


@dataclass
class Teacher:
    """A teacher of the completions of its rows: another model, a server, or the student itself."""

    context: Context
    name: str | None  # by which rows choose it, `None` for a single teacher
    rules: tuple[HeadRule, HeadRule]  # of the student's head, and of the teacher's
    policy: PolicyForward  # that scores by the model
    model: Any = None  # prepared; `None` for a server and for the student itself
    server: ServerTeacher | None = None
    average: MovingAverage | None = None  # of the student's weights, which then teach
    memory: HostMemory | None = None  # for the model's weights but while it scores
    encoder: Any = None  # a [`PromptEncoder`] by a processor of its own, if it doesn't read the student's prompts
    align: Any = None  # for a teacher of other tokens, which scores the text of completions, see [`~spans.aligner`]
    _away: ExitStack = field(default_factory=ExitStack)  # closing it brings the weights back

    def __post_init__(self):
        self._send_away()

    @property
    def shares_tokens(self) -> bool:
        """Whether it scores the student's tokens."""
        return self.align is None

    def _send_away(self) -> None:
        if self.memory is not None:
            self._away.enter_context(self.memory.offloading(storages(weights(self.model))))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Returns a context in which the weights are on the device."""
        self._away.close()
        try:
            yield
        finally:
            self._send_away()

    @contextmanager
    def scoring_model(self) -> Iterator[Any]:
        """Returns a context with the teacher's model, whose weights and modes score completions."""
        if self.model is not None:
            with self.on_device():
                yield self.model
            return
        args = self.context.args
        student: Any = self.context.model
        with ExitStack() as stack:
            if self.average is not None:
                self.average.follow(student)
            stack.enter_context(evaluation_mode(student))
            stack.enter_context(disable_gradient_checkpointing(student, args.gradient_checkpointing_kwargs))
            if args.self_teacher_settings.weights == "base":
                model = self.context.accelerator.unwrap_model(student)
                stack.enter_context(kept_requires_grad(model))
                stack.enter_context(use_adapter(model, None))
            if self.average is not None:
                stack.enter_context(self.average.averaged_weights())
            yield student

    @property
    def label(self) -> str:
        """The teacher in messages."""
        return label(self.name)

    def check_takes(self, prompted: Prompted) -> None:
        """Raises a `ValueError` for media of prompts that the teacher doesn't take."""
        assert self.encoder is not None  # it reads by a processor of its own
        modalities = {*input_modalities(self.encoder.model)}
        for row, messages in zip(prompted.source.row_indices, prompted.source.messages, strict=True):
            lacking = {ref.modality for ref in iter_refs(messages)} - modalities
            if lacking:
                raise ValueError(
                    f"row {row}: {self.label} takes no {' or '.join(sorted(lacking))}; remove the row, or choose "
                    "another teacher."
                )

    def prompts_without_rows(self) -> list[EncodedPrompt]:
        """Returns what the teacher forwards if no row of this rank is its own; none for the student's prompt."""
        encoder = self.encoder
        return [] if encoder is None else [dummy_prompt(None, encoder.processor, encoder.model)]

    def target(self, rollout: Rollout) -> Target | SpanTarget:
        """Returns what the student's tokens of a micro-batch are compared with."""
        args = self.context.args
        scores = rollout.teacher
        mask = taught_mask(rollout)
        rule = self.rules[0]
        temperature = self.policy.temperature
        if not self.shares_tokens:
            spans = scores.spans, scores.span_logps
            return SpanTarget(mask, rule, rollout.completion_ids, *spans, temperature)
        settings: dict[str, Any] = {"beta": args.beta, "add_tail": args.loss_add_tail}
        # A server has scored at a temperature of 1 already
        if self.server is not None:
            return Target(mask, rule, ids=scores.ids, logps=scores.logps, **settings)
        with torch.no_grad(), self.scoring_model() as model:
            request = replace(rollout.request(hidden=True, logps=False), prompts=scores.prompts or rollout.prompts)
            hidden: Any = self.policy.score(model, request).hidden
            head = head_of(self.policy.unwrapped(model), self.rules[1])
            if args.loss_top_k:
                settings |= _top_k_of(hidden, head, mask, args.loss_top_k, temperature)
            else:
                # The loss reads the head when the student has its weights again, or the teacher is off the device
                moves = self.average is not None or self.memory is not None
                settings |= {"hidden": hidden, "head": _copied(head) if moves else head}
        return Target(mask, rule, temperature=temperature, **settings)


def _copied(head: Head) -> Head:
    return head._replace(weight=head.weight.clone(), bias=None if head.bias is None else head.bias.clone())


def _top_k_of(
    states: torch.Tensor, head: Head, mask: torch.Tensor, k: int, temperature: float
) -> dict[str, torch.Tensor]:
    """Returns `ids` and `logps`, `(B, C, k)`, of the `k` most likely tokens, and 0 where `mask`, `(B, C)`, is 0."""
    indices = mask.flatten().nonzero()[:, 0]
    top_k = top_k_tokens(states.flatten(0, 1).index_select(0, indices), head, k, temperature)
    dense = (values.new_zeros(mask.numel(), k).index_copy(0, indices, values).view(*mask.shape, k) for values in top_k)
    return dict(zip(("ids", "logps"), dense, strict=True))


@dataclass(frozen=True, eq=False)
class Lesson:
    """What teachers need of a batch before its completions are sampled."""

    index: torch.Tensor | None  # (N,), of the completion's teacher, -1 without one; `None` for a single teacher
    prompts: list[EncodedPrompt]  # of each completion's teacher
    requests: dict[int, list[EngineRequest]]  # to servers, by the index of the teacher
    is_taught: torch.Tensor | None = None  # (N,), false on completions to leave out


@dataclass
class Teachers:
    """All teachers of a run. A single one teaches every row."""

    prompting: Prompting
    named: list[Teacher]

    @classmethod
    def of(
        cls,
        prompting: Prompting,
        scoring: Scoring,
        student: PreTrainedModel,
        loaded: TeachersByName,
        average: MovingAverage | None,
        end_ids: Sequence[int],
    ) -> "Teachers":
        """
        Prepares teachers. `end_ids` end a completion of the student. Raises a `ValueError` if a teacher can't score
        completions of the student as configured.
        """
        named = []
        rule = divergence_head_rule(student, "student")
        for name, source in loaded.items():
            try:
                teacher = _prepared(prompting, scoring, student, rule, name, source, average, end_ids)
            except ValueError as error:
                if name is None:
                    raise
                raise ValueError(f"`teacher_models`, {name!r}: {error}") from error
            named.append(teacher)
        return cls(prompting, named)

    @property
    def context(self) -> Context:
        return self.prompting.context

    @property
    def names(self) -> list[str | None]:
        """The teachers' names, `None` for a single one."""
        return [teacher.name for teacher in self.named]

    @property
    def single(self) -> Teacher | None:
        """The teacher of every row, or `None` if rows choose."""
        return self.named[0] if self.names == [None] else None

    @property
    def is_student(self) -> bool:
        """`True` if the student is its own teacher."""
        return self.single is not None and self.single.model is self.single.server is None

    # Rollout

    def prepare(self, prompted: Prompted, rows: Sequence[EncodedRow]) -> Lesson:
        """
        Returns the teachers of rows, their prompts, and the requests to servers, which need the decoded media that
        sampling drops. Raises a `ValueError` for a row that names an unknown teacher. All ranks must call this.
        """
        index = self._choose(rows)
        lesson = Lesson(index, self._prompts(prompted, rows, _indices(index, len(rows))), {})
        for i, teacher in enumerate(self.named):
            if teacher.server is not None:
                chosen = _chosen(index, len(rows), i)
                lesson.requests[i] = teacher.server.requests_for([lesson.prompts[k] for k in chosen])
        return lesson

    def _choose(self, rows: Sequence[EncodedRow]) -> torch.Tensor | None:
        if self.single is not None:
            return None
        indices = []
        for row in rows:
            name = row.stored.get(TEACHER_ID)
            if name is not None and name not in self.names:
                raise ValueError(
                    f"row {row.row_index}, column {TEACHER_ID!r}: {name!r} is none of the teachers {self.names}; "
                    "write one of them, or leave the cell empty."
                )
            indices.append(-1 if name is None else self.names.index(name))
        if not any_rank(self.context.accelerator, max(indices) >= 0):
            logger.warning_once(
                f"No row of a batch names its teacher, one of {self.names}, in the column {TEACHER_ID!r}, so that the "
                "loss of the batch is 0."
            )
        return torch.tensor(indices, device=self.context.accelerator.device)

    def _prompts(self, prompted: Prompted, rows: Sequence[EncodedRow], indices: Sequence[int]) -> list[EncodedPrompt]:
        by_reader: dict[int, list[int]] = {}  # completions by a teacher with an encoder, or -1 for all others
        for i, index in enumerate(indices):
            has_encoder = index >= 0 and self.named[index].encoder is not None
            by_reader.setdefault(index if has_encoder else -1, []).append(i)
        prompts: dict[int, EncodedPrompt] = {}
        for reader, chosen in by_reader.items():
            part = prompted.select(chosen)
            encoder = None
            if reader >= 0:
                self.named[reader].check_takes(part)
                encoder = self.named[reader].encoder
            encoded = teacher_prompts(self.prompting, part, [rows[i] for i in chosen], encoder)
            prompts |= dict(zip(chosen, encoded, strict=True))
        return [prompts[i] for i in range(len(prompted))]

    def score(self, rollout: Rollout, lesson: Lesson) -> Rollout:
        """
        Returns a rollout with the scores of servers and of teachers of another tokenizer, and with the prompts by
        which others score in the update. Completions that nobody teaches are left out. All ranks must call this.
        """
        device = self.context.accelerator.device
        texts = {i: teacher for i, teacher in enumerate(self.named) if not teacher.shares_tokens}
        indices = _indices(lesson.index, len(rollout))
        kept = []
        for index, student, prompt in zip(indices, rollout.prompts, lesson.prompts, strict=True):
            prompt.decoded = ()  # no sampler needs it any more
            has_scored = index in lesson.requests or index in texts
            kept.append(student if has_scored else with_new_start(student, prompt))
        ids, logps = self._scores_of_servers(rollout, lesson)
        spans, span_logps = self._scores_of_texts(rollout, lesson, texts)
        teacher_scores = TeacherScores(
            prompts=[] if all(map(operator.is_, kept, rollout.prompts)) else kept,
            index=lesson.index,
            ids=ids,
            logps=logps,
            spans=spans,
            span_logps=span_logps,
        )
        rollout = replace(rollout, teacher=teacher_scores)
        is_taught = torch.tensor(indices, device=device) >= 0
        if lesson.is_taught is not None:
            is_taught &= lesson.is_taught.to(device)
        if texts:
            self.context.metrics.add(aligned_metrics(rollout, {i: text.name for i, text in texts.items()}, indices))
            labels = {i: teacher.label for i, teacher in texts.items()}
            is_taught &= has_aligned(self.prompting, rollout, labels, indices)
        rollout = rollout.masked(is_taught[:, None].to(rollout.completion_mask))
        n_tokens = self.context.accelerator.reduce(taught_mask(rollout).sum())
        return replace(rollout, num_items_in_batch=n_tokens)

    def _scores_of_servers(
        self, rollout: Rollout, lesson: Lesson
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        if not lesson.requests:
            return None, None
        device = self.context.accelerator.device
        n, width = rollout.completion_ids.shape
        k = self.context.args.loss_top_k
        ids = torch.zeros(n, width, k, dtype=torch.long, device=device)
        logps = torch.zeros(n, width, k, device=device)
        for index, requests in lesson.requests.items():
            chosen = _chosen(lesson.index, n, index)
            completions = [rollout.source.ids[i] for i in chosen]
            server: Any = self.named[index].server
            top_k = functools.partial(server.top_k, requests, completions, width, k)
            own_ids, own_logps = on_all_ranks(self.context.accelerator, top_k)
            ids[chosen] = own_ids.to(device)
            logps[chosen] = own_logps.to(device)
        return ids, logps

    def _scores_of_texts(
        self, rollout: Rollout, lesson: Lesson, texts: Mapping[int, Teacher]
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        if not texts:
            return None, None
        n, width = rollout.completion_ids.shape
        # To other teachers, each token is a span
        spans = torch.arange(width).repeat(n, 1)
        logps = torch.zeros(n, width)
        for index, teacher in texts.items():
            chosen = _chosen(lesson.index, n, index)
            part = [lesson.prompts[i] for i in chosen]
            with torch.no_grad(), teacher.scoring_model() as model:
                alignments = [teacher.align(rollout, i) for i in chosen]
                parts = model, teacher.policy, teacher.encoder
                spans[chosen], logps[chosen] = span_scores(self.context, alignments, width, part, *parts)
        return spans.to(rollout.completion_ids.device), logps.to(rollout.completion_ids.device)

    # Update

    def target(self, rollout: Rollout) -> Target | SpanTarget | Targets:
        """Returns what the tokens of a micro-batch are compared with, by each teacher for its own completions."""
        if self.single is not None:
            return self.single.target(rollout)
        chosen = {index: _chosen(rollout.teacher.index, len(rollout), index) for index in range(len(self.named))}
        # With sharded weights, all ranks forward a teacher, or none
        used = [index for index in chosen if any_rank(self.context.accelerator, bool(chosen[index]))]
        # Without any, no completion of the micro-batch has a teacher, and the mask is 0
        return Targets(tuple(self._part(rollout, index, chosen[index]) for index in used or [0]))

    def _part(self, rollout: Rollout, index: int, chosen: list[int]) -> Target | SpanTarget:
        """Returns a teacher's target, in which the tokens of other teachers' completions are masked."""
        n = len(rollout)
        indices = chosen or [0]
        part = rollout.select(indices)
        if not chosen:  # the teacher's prompt in `part` is another teacher's
            prompts = self.named[index].prompts_without_rows()
            part = replace(part, teacher=replace(part.teacher, prompts=prompts))
        target = self.named[index].target(part)
        if not chosen:
            target = replace(target, mask=torch.zeros_like(target.mask))
        places = torch.tensor(indices, device=rollout.completion_ids.device)

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(n, *values.shape[1:]).index_copy(0, places.to(values.device), values)

        return target.map(spread)

    def metrics(self, rollout: Rollout, divergences: torch.Tensor) -> dict[str, Metric]:
        """Returns for each named teacher the mean divergence of its tokens, and their share of those in the loss."""
        mask = taught_mask(rollout)
        metrics: dict[str, Metric] = {}
        for i, name in enumerate(self.names if self.single is None else ()):
            own_mask = mask * (rollout.teacher.index == i)[:, None].to(mask)
            metrics[f"teacher/{name}/divergence"] = scored_mean(divergences, own_mask)
            metrics[f"teacher/{name}/token_frac"] = scored_mean(own_mask.float(), mask)
        return metrics


def _indices(index: torch.Tensor | None, n: int) -> list[int]:
    """Returns the index of each of `n` completions' teacher: 0 for a single one, -1 without one."""
    return [0] * n if index is None else index.tolist()


def _chosen(index: torch.Tensor | None, n: int, teacher_index: int) -> list[int]:
    """Returns the batch indices of a teacher's completions among `n`."""
    return [i for i, other in enumerate(_indices(index, n)) if other == teacher_index]


def _prepared(
    prompting: Prompting,
    scoring: Scoring,
    student: PreTrainedModel,
    rule: HeadRule,
    name: str | None,
    source: PreTrainedModel | str | None,
    average: MovingAverage | None,
    end_ids: Sequence[int],
) -> Teacher:
    context = prompting.context
    args = context.args
    processor = prompting.encoder.processor
    if source is None:
        return Teacher(context, name, (rule, rule), scoring.policy, average=average)
    if isinstance(source, str):
        server = server_teacher(source, args, student, processor)
        return Teacher(context, name, (rule, rule), scoring.policy, server=server)
    model: Any = scoring.policy.unwrapped(source)
    rules = rule, divergence_head_rule(model, "teacher")
    obstacle = obstacle_to_student_prompts(student, model, processor, args)
    if obstacle is not None and not args.separates_teachers:
        raise ValueError(
            f"The teacher {type(model).__name__} can't score completions of the student {type(student).__name__}, "
            f"whose prompts and features it gets: {obstacle}. With `teacher_processor='separate'`, it reads them by "
            "its own processor."
        )
    reading: dict[str, Any] = {}
    if obstacle is not None:
        reading = _separate_reading(prompting, student, model, name, end_ids)
    # Prepared as a reference is, a single teacher before the engine. Its offloading is that of the reference, too
    prepared: Any = source if name is None else prepare_reference(source, args, context.accelerator)
    packs = enable_packing(context.accelerator, prepared, None, args)
    compile_models(context.accelerator, args, prepared)
    memory = HostMemory(args.device) if args.offload_during_generation and name is not None else None
    if obstacle is None:
        scoring.policy.fallbacks.packing = scoring.policy.fallbacks.packing and packs
        policy = scoring.policy
    else:
        fallbacks = Fallbacks(packing=packs, isolate=family_of(model).isolate)
        limits = {"temperature": args.temperature, "max_tokens": args.max_tokens_per_microbatch}
        policy = PolicyForward(context.accelerator, reading["encoder"].processor, fallbacks, **limits)
    return Teacher(context, name, rules, policy, prepared, memory=memory, **reading)


def _separate_reading(
    prompting: Prompting, student: PreTrainedModel, model: PreTrainedModel, name: str | None, end_ids: Sequence[int]
) -> dict[str, Any]:
    """Returns the fields of a teacher that reads prompts by the processor in its folder."""
    args = prompting.context.args
    processor = _load_processor(model, args, name)
    shares_tokens = same_tokens(student, model, prompting.encoder.processor, processor)
    if not shares_tokens:
        raise_first(conflicts_of_other_tokens(args, label(name)))
    encoder = replace(
        prompting.encoder,
        model=model,
        processor=processor,
        template_kwargs={**prompting.encoder.template_kwargs, "chat_template": None},
        for_engine=False,
        keep_decoded=False,
        feature_dtype=lambda: model.dtype,
    )
    return {"encoder": encoder, "align": None if shares_tokens else aligner(prompting, end_ids, encoder)}


def _load_processor(model: PreTrainedModel, args: Any, name: str | None) -> Processor:
    folder = get_config_model_id(model.config)
    try:
        return load_processor(folder, args.teacher_model_revision, args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`teacher_processor='separate'` needs the processor of {label(name)}, but there is none in {folder!r} "
            f"({str(error).splitlines()[0]}); save it in the folder of the model, and load the model from there."
        ) from error


def teacher_prompts(
    prompting: Prompting, prompted: Prompted, rows: Sequence[EncodedRow], encoder: PromptEncoder | None = None
) -> list[EncodedPrompt]:
    """
    Returns the teacher's prompt for each completion, by columns such as `teacher_prompt`, `teacher_view` and the
    `encoder` of a teacher that doesn't read the student's. Equal prompts are one object. Raises a `ValueError` for
    such columns with tools.
    """
    are_separate = [has_teacher_prompt(row.stored) for row in rows]
    if any(are_separate) or encoder is not None:
        if prompting.toolbox.tools:
            column = next(name for name in TEACHER_COLUMNS if name in rows[are_separate.index(True)].stored)
            raise ValueError(
                f"Columns for the teacher, such as {column!r}, can't be used with `tools`, since tool results would "
                "follow prompts of another length; remove the columns or the tools."
            )
        teacher_messages = prompting.encoder.messages([row.stored for row in rows], TEACHER)
        messages = [
            teacher if is_separate else student
            for teacher, student, is_separate in zip(
                teacher_messages, prompted.source.messages, are_separate, strict=True
            )
        ]
        encoded: dict[int, Any] = {}  # by the `id` of the student's prompt
        for prompt, row, chat, is_separate in zip(prompted.prompts, rows, messages, are_separate, strict=True):
            # Rows hold a teacher's prompt only if it has media
            known = None if encoder is not None else row.teacher_prompt if is_separate else prompt
            if known is not None:
                encoded[id(prompt)] = known
            elif id(prompt) not in encoded:
                encoded[id(prompt)] = (encoder or prompting.encoder).encode(chat, row.row_index)
        prompts = [encoded[id(prompt)] for prompt in prompted.prompts]
        prompted = replace(prompted, prompts=prompts, source=replace(prompted.source, messages=messages))
    prompts = prompts_under_view(prompting, prompted, prompting.context.args.teacher_view, encoder)
    share_media(prompts)
    return prompts


def prompts_under_view(
    prompting: Prompting, prompted: Prompted, view: str | None, encoder: PromptEncoder | None = None
) -> list[EncodedPrompt]:
    """Returns the prompts of completions, under `view` if there is one, with random numbers of this step."""
    if view is None:
        return prompted.prompts
    seeded = as_view(view).seeded(prompting.context.args.seed, prompted.step)
    return view_prompts(prompted, seeded, encoder or prompting.encoder)
