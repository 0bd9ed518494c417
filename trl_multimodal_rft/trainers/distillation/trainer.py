# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""On-policy distillation with media."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel, TrainerCallback
from trl import DistillationTrainer
from trl.trainer.utils import get_callable_name, get_config_model_id, is_async_callable

from ...algorithms.losses import LossOutput
from ...algorithms.metrics import scored_mean
from ...data.rows.names import TEACHER_COLUMNS, TEACHER_ID
from ...engines.samplers import Sampler
from ...forward.scores import ScoreRequest, Scores
from ...models.parts import check_base_is_kept
from ...models.wrapped import unwrapped
from ...reporting.model_card import common_lines, in_code
from ...rewards.calls import distinct_names
from ...rewards.named import as_reward_funcs
from ...rollout.rollout import Rewards, Rollout, TeacherScores, require
from ...rollout.stream import EncodedRow
from ..shared.arguments import mapping
from ..shared.base import MultimodalTrainer
from ..shared.ema import MovingAverage
from ..shared.finite import check_frozen_weights
from ..shared.rollout_logs import log_media_contribution
from ..shared.setup import resolve_config
from ..shared.signatures import Adapter, EvalRows, Model, Optimizers, Processor, Rows, arguments_of
from .best import choose_best, prompts_with
from .config import MultimodalDistillationConfig, SelfTeacher
from .ids import check_teacher_ids
from .method import DISTILLATION
from .separate import SeparateTeacher, SeparateTeachers, prepared_teacher, separate_teacher, taught_mask
from .several import Teachers, load_teachers
from .teacher import (
    Teacher,
    check_teacher,
    divergence_head_rule,
    keep_teacher_prompts,
    leave_out,
    load_teacher,
    prompts_under_view,
    score_on_server,
    server_teacher,
    teacher_prompts,
)


class MultimodalDistillationTrainer(MultimodalTrainer, DistillationTrainer):  # pyrefly: ignore[inconsistent-inheritance]
    """
    Trainer for on-policy distillation of models that see and hear, see
    [On-Policy Distillation of Language Models](https://huggingface.co/papers/2306.13649).

    Extends [`~trl.DistillationTrainer`] by audio and video. The student samples completions, and is trained to predict
    their tokens with the teacher's probabilities. Loss, metrics and options are TRL's. The media of a prompt are
    decoded, encoded, prefilled and forwarded once for all its completions, by the student and by the teacher.

    Example:

    ```python
    from datasets import load_dataset
    from trl_multimodal_rft import MultimodalDistillationTrainer

    dataset = load_dataset("path/to/spoken-questions", split="train")  # columns: prompt, audio

    trainer = MultimodalDistillationTrainer(
        model="Qwen/Qwen2.5-Omni-3B",
        teacher_model="Qwen/Qwen2.5-Omni-7B",
        train_dataset=dataset,
    )
    trainer.train()
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Student, as for [`~trl.DistillationTrainer`].
        teacher_model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            Teacher with the student's vocabulary. With media, the teacher must be of the student's family, as it gets
            the student's prompts and features, unless it reads by its own processor, with
            `teacher_processor="separate"`. Defaults to the model that `teacher_model_name_or_path` names. Without a
            teacher by name or on a server, the student is its own teacher. Then `teacher_view`, `student_view` or
            columns for the teacher are needed.
        args ([`MultimodalDistillationConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Dataset with a `prompt` column and media, as for [`MultimodalGRPOTrainer`]. The teacher reads the column
            `teacher_prompt`, such as the question with its solution, in place of `prompt`, and columns such as
            `teacher_image` or `teacher_images`, such as a crop, in place of the columns of their modality.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or `dict` of them, *optional*):
            Dataset to use for evaluation, with the same columns.
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            The student's processor, or a tokenizer for text. If `None`, it is loaded from the model's name.
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            Callbacks to customize the training loop.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler to use.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Quantization of a student given by name.
        peft_config ([`~peft.PeftConfig`], *optional*):
            PEFT configuration used to wrap the student.
        tools (`list[Callable]`, *optional*):
            Tools, as for [`MultimodalGRPOTrainer`].
        sampler ([`~engines.samplers.Sampler`], *optional*):
            Sampler of completions, as for [`MultimodalGRPOTrainer`].
        teacher_models (`dict[str, str | PreTrainedModel]`, *optional*):
            Several teachers in place of `teacher_model`, by the names that the rows' column `teacher_id` gives. Each
            is a model, or the name of a model or of the folder of an adapter. They come to the `teacher_models` of
            `args`. A row without a name isn't trained on.
        reward_funcs (`Callable` or `list[Callable]`, *optional*):
            Reward functions, or their names, as for [`MultimodalGRPOTrainer`]. They choose the completion that the
            teacher sees with `self_teacher="current(shows_best=True)"`.

    Raises:
        `TypeError`: If `args` is a config of TRL's own.
        `ValueError`: If the teacher has another vocabulary or processor than the student without
            `teacher_processor="separate"`, if the student is its own teacher and both read the same prompts, or if a
            model applies anything to its logits other than a scale and a soft cap.
    """

    _tag_names = DISTILLATION.tags
    teacher_model: Any
    reward_weights: Any

    def __init__(
        self,
        model: Model,
        teacher_model: str | PreTrainedModel | None = None,
        args: MultimodalDistillationConfig | None = None,
        train_dataset: Rows = None,
        eval_dataset: EvalRows = None,
        processing_class: Processor | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: Adapter = None,
        tools: list[Callable] | None = None,
        sampler: Sampler | None = None,
        teacher_models: dict[str, str | PreTrainedModel] | None = None,
        reward_funcs: Callable | str | list[Callable | str] | None = None,
    ):
        args = resolve_config(MultimodalDistillationConfig, args, model)
        arguments = arguments_of(locals(), "teacher_model", "teacher_models", "reward_funcs")
        functions = _functions_for_best(reward_funcs, tools, args)
        _check_one_source(teacher_model, teacher_models, args)
        names = [*{**mapping(args.teacher_models), **(teacher_models or {})}]
        check_teacher_ids({"train_dataset": train_dataset, "eval_dataset": eval_dataset}, names)
        several = load_teachers(teacher_models, args)
        teacher = None if several else load_teacher(teacher_model, args)
        if teacher is model:
            raise ValueError("`teacher_model` is the student itself; leave it out, and set `teacher_view`.")
        if teacher is not None:
            check_frozen_weights(teacher, "the teacher")
        if teacher is not None and args.teacher_model_server_url is not None:
            raise ValueError("`teacher_model` and `teacher_model_server_url` are two teachers; remove one of them.")
        if tools and args.keeps_decoded:
            raise ValueError("A teacher on a server can only score completions of one turn; remove `tools`.")
        if args.self_teacher_settings != SelfTeacher() and (
            teacher is not None or args.teacher_model_server_url is not None
        ):
            raise ValueError(
                f"`self_teacher={args.self_teacher!r}` is for a student that is its own teacher, but there is another "
                "teacher; leave out one of them."
            )
        _check_separate(args, teacher is not None or bool(several), tools)
        teacher_head_rule = None if teacher is None else divergence_head_rule(unwrapped(None, teacher), "teacher")
        # A teacher with a processor of its own is prepared later, when the student's is known
        reference = None if teacher is None or args.separates_teachers else teacher.eval()
        super().__init__(**arguments, reward_funcs=None, ref_model=reference)
        student = self._unwrapped(self.model)
        rewards = self._reward_functions
        rewards.functions += functions
        rewards.processors += [None] * len(functions)
        rewards.names += distinct_names([get_callable_name(function) for function in functions])
        separate: SeparateTeacher | None = None
        if teacher is not None and args.separates_teachers:
            separate = separate_teacher(self._stages, teacher.eval(), student, "the teacher")
            self.ref_model = prepared_teacher(self._stages, teacher) if separate is None else separate.model
        self.teacher_model = self.ref_model  # as `ref_model`, it can be offloaded during sampling
        url = args.teacher_model_server_url
        self.teacher_server = None if url is None else server_teacher(url, args, student, self.processing_class)
        student_head_rule = divergence_head_rule(student, "student")
        if self.teacher_model is not None and not args.separates_teachers:
            check_teacher(student, self._unwrapped(self.teacher_model), self.processing_class, args)
        elif (
            self.teacher_model is None
            and self.teacher_server is None
            and args.self_teacher_settings.weights == "base"
            and not is_peft_model(self.model)
        ):
            raise ValueError(
                "`self_teacher='base'` makes the student without its adapter the teacher, but the student has no "
                "adapter; pass `peft_config`, or pass the initial model as `teacher_model`."
            )
        if self.teacher_model is None and args.self_teacher_settings.weights == "base":
            remedy = "pass the initial model as `teacher_model`"
            check_base_is_kept(self.model, None, "the teacher of `self_teacher='base'`", remedy)
        if args.self_teacher_settings.weights == "ema":
            self.ema = MovingAverage.of(self.model, 1 - args.self_teacher_settings.rate, 'self_teacher="ema"')
            self.add_callback(self.ema)
        head_rules = student_head_rule, teacher_head_rule or student_head_rule
        self._teacher = separate or Teacher(self._stages, self.teacher_model, self.ema, head_rules, self._policy)
        self._teachers = Teachers.of(self._stages, several, student) if several else None
        self._separate = None if self._teachers is None else self._teachers.separate()
        if separate is not None:
            self._separate = SeparateTeachers(self._stages, {0: separate}, {0: None}, lambda index: nullcontext())

    # Rollout

    def _draw(self, inputs: Sequence[Any]) -> Rollout:
        self._scoring.check_weights()
        rows = list(inputs) if isinstance(inputs[0], EncodedRow) else self._stream.without_prompts(inputs)
        self._check_teacher_sees_more(rows)
        rollout: Any = self._prompt(rows)
        rollout.teacher = choice = TeacherScores()
        server = self.teacher_server
        teachers = self._teachers
        if teachers is not None:
            teachers.choose(rollout, rows)
        separate = self._separate
        if separate is None:
            prompts = teacher_prompts(self._stages, rollout, rows)
        else:
            prompts = separate.prompts(rollout, rows)
        # Made before sampling, after which prompts lose the decoded media that a server needs
        requests = None if server is None else server.requests_for(prompts)
        requests_of_teachers = {} if teachers is None else teachers.requests_for(rollout, prompts)
        rollout.prompts = prompts_under_view(self._stages, rollout, self.args.student_view)
        with self.offloading():
            rollout = replace(self._sampling(rollout), teacher=choice)
        rewards = self._rewarding(rollout) if self.args.self_teacher_settings.shows_best else None
        best = self._best_completions(rollout, rewards)
        if best is not None:
            prompts = prompts_with(self._stages, rollout, best, prompts)
        if server is not None and requests is not None:
            score_on_server(self._stages, server, rollout, requests)
        if teachers is not None:
            teachers.score_on_servers(rollout, requests_of_teachers)
        self._sampling.check_engine(rollout, self._corrects_for_engine(rollout))
        rollout = self._rewarding.without_failed(rollout)
        if teachers is not None:
            teachers.leave_out_untaught(rollout)
        if separate is not None:
            prompts = separate.score(rollout, prompts)
        keep_teacher_prompts(rollout, prompts, is_scored=server is not None)
        if best is not None:
            is_taught = torch.tensor([text is not None for text in best])
            leave_out(self._stages, rollout, is_taught.to(self.accelerator.device))
        self._rollout_log.add_completions(rollout, None if rewards is None else rewards.per_func)
        log_media_contribution(self._stages, rollout, self._steps_per_rollout)
        return rollout

    def _best_completions(self, rollout: Rollout, rewards: Rewards | None) -> list[str | None] | None:
        """Returns what the teacher sees of each completion's group with `shows_best=True`, else `None`."""
        settings = self.args.self_teacher_settings
        if rewards is None:
            return None
        if not self.model.training:
            raise ValueError(
                "`shows_best=True` of `self_teacher` needs groups, and evaluation samples one completion for each "
                "prompt; evaluate with `GenerationEvalCallback`."
            )
        return choose_best(self._stages, rollout, rewards, settings.min_reward)

    def _check_teacher_sees_more(self, rows: Sequence[EncodedRow]) -> None:
        named_rows = [row.row_index for row in rows if row.stored.get(TEACHER_ID) is not None]
        if self._teachers is None and named_rows:
            raise ValueError(
                f"row {named_rows[0]} has a {TEACHER_ID!r}, but there are no teachers to choose from; pass "
                "`teacher_models`, or remove the column."
            )
        teaches_itself = self.teacher_model is None and self.teacher_server is None and self._teachers is None
        sees_best = self.args.self_teacher_settings.shows_best
        sees_more = self.args.teacher_view or self.args.student_view or sees_best
        if teaches_itself and not (sees_more or any(name in rows[0].stored for name in TEACHER_COLUMNS)):
            raise ValueError(
                "The student is its own teacher and reads the same prompts as the teacher, so it would learn nothing; "
                "pass `teacher_model`, set `teacher_view`, `student_view` or "
                "`self_teacher='current(shows_best=True)'`, or add a column such as 'teacher_prompt' or "
                "'teacher_image'."
            )

    # Update

    def _on_rollout(self, micro_batches: list[Rollout]) -> None:
        """Does nothing, as distillation needs no log-probabilities of the student before its updates."""

    def _score(self, model: nn.Module, rollout: Rollout, **options) -> Scores:
        target = (self._teachers or self._teacher).target(rollout)
        request = ScoreRequest(*rollout.completions, packed=rollout.packed, target=target)
        self._scores = self._policy.score(model, request)
        return self._scores

    def _loss(self, scores: Scores, inputs: Rollout) -> LossOutput:
        """Computes the mean divergence over the tokens of an optimizer step on all processes."""
        mask = taught_mask(inputs)
        n_tokens = mask.sum().clamp(min=1)
        if self.model.training:
            # `num_items_in_batch` counts the tokens of a generation batch on all ranks. `n_tokens` becomes the number
            # of tokens of an optimizer step, as a mean over ranks
            n_tokens = require(inputs.num_items_in_batch).clamp(min=1) / self.accelerator.num_processes
            n_tokens = n_tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        loss = DISTILLATION.loss(scores.divergences, n_tokens)
        metrics = {"entropy": scored_mean(scores.entropies, mask)}
        if self._teachers is not None:
            metrics |= self._teachers.metrics(inputs, scores.divergences.detach())
        return LossOutput(loss, metrics)

    # Checkpoints

    def _training_lines(self) -> list[tuple[str, str]]:
        args = self.args
        divergence = {0.0: "forward KL", 1.0: "reverse KL"}.get(self.beta, "generalized Jensen-Shannon divergence")
        support = f" over the teacher's {args.loss_top_k} most likely tokens" if args.loss_top_k else ""
        lines = [("Teacher", self._teacher_in_words()), ("Loss", f"{divergence}{support}, `beta={self.beta}`")]
        lines += [(f"`{name}`", f"`{getattr(args, name)}`") for name in ("temperature", "learning_rate")]
        return [*lines, *common_lines(args.to_dict())]

    def _teacher_in_words(self) -> str:
        args = self.args
        average = f', with an average of its weights, `self_teacher="ema(rate={args.self_teacher_settings.rate})"`'
        weights = {"current": "", "base": ", without its adapter", "ema": average}
        teacher = f"the model itself{weights[args.self_teacher_settings.weights]}"
        if self._teachers is not None:
            teacher = f"{', '.join(map(in_code, self._teachers.names))}, by the column `{TEACHER_ID}`"
        elif self.teacher_server is not None:
            teacher = f"{in_code(self.teacher_server.name)} on a vLLM server"
        elif self.teacher_model is not None:
            teacher = in_code(
                get_config_model_id(self._unwrapped(self.teacher_model).config) or "a model without a name"
            )
        if args.self_teacher_settings.shows_best:
            teacher += ", which sees the best other completion of the group"
        views = {"teacher_view": args.teacher_view, "student_view": args.student_view}
        views = [f"`{name}={view}`" for name, view in views.items() if view]
        columns = [f"reading the column `{name}`" for name in TEACHER_COLUMNS if name in self.card_notes.columns]
        return ", ".join([teacher, *views, *columns])


def _check_separate(args: MultimodalDistillationConfig, has_teacher: bool, tools: list[Callable] | None) -> None:
    """Raises a `ValueError` if teachers with processors of their own can't be used."""
    if not args.separates_teachers:
        return
    if not has_teacher:
        raise ValueError(
            "`teacher_processor='separate'` is for other models, but the student is its own teacher; pass "
            "`teacher_model`, or leave it out."
        )
    if tools:
        raise ValueError(
            "`teacher_processor='separate'` scores completions of one turn; remove `tools`, or leave it out."
        )


def _check_one_source(
    teacher_model: str | nn.Module | None, teacher_models: dict[str, Any] | None, args: MultimodalDistillationConfig
) -> None:
    if teacher_models is None and args.teacher_models is None:
        return
    names = ("teacher_model_name_or_path", "teacher_model_server_url")
    others = [name for name in names if getattr(args, name) is not None]
    others += ["teacher_model"] if teacher_model is not None else []
    others += ["self_teacher"] if args.self_teacher_settings != SelfTeacher() else []
    if others:
        raise ValueError(f"`teacher_models` and `{others[0]}` name teachers; leave out one of them.")
    if not (teacher_models or args.teacher_models):
        raise ValueError("`teacher_models` is empty; name at least one teacher, or leave it out.")


def _functions_for_best(functions: Any, tools: list[Callable] | None, args: MultimodalDistillationConfig) -> list[Any]:
    """Returns the functions that choose a group's best completion. Raises a `ValueError` if they aren't read."""
    reads = args.self_teacher_settings.shows_best
    if reads != bool(functions):
        raise ValueError(
            "`self_teacher` with `shows_best=True` needs `reward_funcs`, which choose the best completion; pass them."
            if reads
            else "`reward_funcs` have no effect without `shows_best=True` in `self_teacher`; leave them out."
        )
    if reads and tools:
        raise ValueError("`shows_best=True` of `self_teacher` shows completions of one turn; remove `tools`.")
    loaded = [] if functions is None else as_reward_funcs(functions)
    for function in loaded:
        if isinstance(function, (str, nn.Module)) or is_async_callable(function):
            raise ValueError(f"`reward_funcs` of distillation are functions, got {function!r}; give such a function.")
    return loaded
