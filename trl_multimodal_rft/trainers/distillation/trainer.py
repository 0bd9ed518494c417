# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""On-policy distillation with media."""

from collections.abc import Callable, Sequence
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
from ...forward.scores import Scores
from ...models.parts import check_base_is_kept
from ...reporting.model_card import common_lines, in_code
from ...rewards.calls import distinct_names
from ...rewards.named import as_reward_funcs
from ...rollout.rollout import Rewards, Rollout
from ...rollout.stream import EncodedRow
from ..base.argument_checks import mapping
from ..base.ema import MovingAverage
from ..base.preparation import prepare_reference
from ..base.setup import resolve_config
from ..base.signatures import Adapter, EvalRows, Model, Optimizers, Processor, Rows, arguments_of
from ..sampling.rollout_logs import log_media_contribution
from ..sampling.trainer import MultimodalTrainer
from .best import choose_best, prompts_with
from .config import MultimodalDistillationConfig
from .ids import check_teacher_ids
from .span_scores import taught_mask
from .teacher_loading import check_sources, load_teachers
from .teachers import Lesson, Teachers, prompts_under_view


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

    _tag_names = ["trl", "distillation", "trl-multimodal-rft"]
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
        check_sources(model, teacher_model, teacher_models, tools, args)
        names = [*{**mapping(args.teacher_models), **(teacher_models or {})}]
        check_teacher_ids({"train_dataset": train_dataset, "eval_dataset": eval_dataset}, names)
        self._loaded_teachers = load_teachers(teacher_model, teacher_models, args)
        super().__init__(**arguments, reward_funcs=None, ref_model=None)
        rewards = self._reward_functions
        rewards.functions += functions
        rewards.processors += [None] * len(functions)
        rewards.names += distinct_names([get_callable_name(function) for function in functions])
        settings = args.self_teacher_settings
        if settings.weights == "ema":
            self.ema = MovingAverage.of(self.model, 1 - settings.rate, 'self_teacher="ema"')
            self.add_callback(self.ema)
        elif settings.weights == "base":
            if not is_peft_model(self.model):
                raise ValueError(
                    "`self_teacher='base'` makes the student without its adapter the teacher, but the student has no "
                    "adapter; pass `peft_config`, or pass the initial model as `teacher_model`."
                )
            remedy = "pass the initial model as `teacher_model`"
            check_base_is_kept(self.model, None, "the teacher of `self_teacher='base'`", remedy)
        student = self._unwrapped(self.model)
        end_ids = self._sampling.ends.ids
        loaded = vars(self).pop("_loaded_teachers")
        self._teachers = Teachers.of(self._prompting, self._scoring, student, loaded, self.ema, end_ids)
        # As `ref_model`, a single teacher can be offloaded during sampling
        self.teacher_model = self.ref_model = None if self._teachers.single is None else self._teachers.single.model

    def _prepare_before_engine(self) -> None:
        single = self._loaded_teachers.get(None)
        if isinstance(single, nn.Module):
            prepared: Any = prepare_reference(single, self.args, self.accelerator)
            self._loaded_teachers[None] = prepared

    # Rollout

    def _run_stages(self, inputs: Sequence[Any]) -> Rollout:
        self._scoring.check_weights()
        rows = list(inputs) if isinstance(inputs[0], EncodedRow) else self._stream.without_prompts(inputs)
        self._check_teacher_sees_more(rows)
        shows_best = self.args.self_teacher_settings.shows_best
        if shows_best and not self.model.training:
            raise ValueError(
                "`shows_best=True` of `self_teacher` needs groups, and evaluation samples one completion for each "
                "prompt; evaluate with `GenerationEvalCallback`."
            )
        prompted = self._prompt(inputs)
        lesson = self._teachers.prepare(prompted, rows)
        student_prompts = prompts_under_view(self._prompting, prompted, self.args.student_view)
        with self.offloading():
            rollout = self._sampling(replace(prompted, prompts=student_prompts))
        rewards = None
        if shows_best:
            rewards = self._rewarding(rollout)
            lesson = self._with_best(rollout, rewards, lesson)
        self._sampling.check_engine(rollout)
        rollout = self._rewarding.without_failed(rollout)
        rollout = self._teachers.score(rollout, lesson)
        self._rollout_log.add_completions(rollout, None if rewards is None else rewards.logged)
        log_media_contribution(self._prompting, self._scoring, rollout, self._batches.n_calls)
        return rollout

    def _with_best(self, rollout: Rollout, rewards: Rewards, lesson: Lesson) -> Lesson:
        """Returns a lesson in which the teacher sees the best other completion of each completion's group."""
        best = choose_best(self._prompting, rollout, rewards, self.args.self_teacher_settings.min_reward)
        is_taught = torch.tensor([text is not None for text in best])
        prompts = prompts_with(self._prompting, rollout, best, lesson.prompts)
        return replace(lesson, prompts=prompts, is_taught=is_taught)

    def _check_teacher_sees_more(self, rows: Sequence[EncodedRow]) -> None:
        args = self.args
        named_rows = [row.row_index for row in rows if row.stored.get(TEACHER_ID) is not None]
        if named_rows and self._teachers.single is not None:
            raise ValueError(
                f"row {named_rows[0]} has a {TEACHER_ID!r}, but there are no teachers to choose from; pass "
                "`teacher_models`, or remove the column."
            )
        sees_more = args.teacher_view or args.student_view or args.self_teacher_settings.shows_best
        sees_more = sees_more or any(name in rows[0].stored for name in TEACHER_COLUMNS)
        if self._teachers.is_student and not sees_more:
            raise ValueError(
                "The student is its own teacher and reads the same prompts as the teacher, so it would learn nothing; "
                "pass `teacher_model`, set `teacher_view`, `student_view` or "
                "`self_teacher='current(shows_best=True)'`, or add a column such as 'teacher_prompt' or "
                "'teacher_image'."
            )

    # Update

    def _on_rollout(self, micro_batches: list[Rollout]) -> list[Rollout]:
        """Returns the micro-batches as they are: distillation reads no log-probabilities before an update."""
        return micro_batches

    def _score(self, model: nn.Module, rollout: Rollout, **options) -> Scores:
        target = self._teachers.target(rollout)
        request = rollout.request(target=target)
        self._scores = self._policy.score(model, request)
        return self._scores

    def _loss(self, scores: Scores, inputs: Rollout) -> LossOutput:
        """Computes the mean divergence over the tokens of an optimizer step on all processes."""
        mask = taught_mask(inputs)
        n_tokens = mask.sum().clamp(min=1)
        if self.model.training:
            # `num_items_in_batch` counts the tokens of a generation batch on all ranks. `n_tokens` becomes the number
            # of tokens of an optimizer step, as a mean over ranks
            n_tokens = inputs.num_items_in_batch.clamp(min=1) / self.accelerator.num_processes
            n_tokens = n_tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        # A divergence outside of the mask is 0
        loss = scores.divergences.sum() / n_tokens
        metrics = {"entropy": scored_mean(scores.entropies, mask)}
        metrics |= self._teachers.metrics(inputs, scores.divergences.detach())
        return LossOutput(loss, metrics)

    def _weight(self, inputs: Rollout) -> torch.Tensor | float:
        return taught_mask(inputs).sum()

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
        settings = args.self_teacher_settings
        single = self._teachers.single
        if single is None:
            teacher = f"{', '.join(map(in_code, map(str, self._teachers.names)))}, by the column `{TEACHER_ID}`"
        elif single.server is not None:
            teacher = f"{in_code(str(single.server.name))} on a vLLM server"
        elif single.model is not None:
            teacher = in_code(get_config_model_id(self._unwrapped(single.model).config) or "a model without a name")
        else:
            average = f', with an average of its weights, `self_teacher="ema(rate={settings.rate})"`'
            weights = {"current": "", "base": ", without its adapter", "ema": average}
            teacher = f"the model itself{weights[settings.weights]}"
        best = ["which sees the best other completion of the group"] if settings.shows_best else []
        views = {"teacher_view": args.teacher_view, "student_view": args.student_view}
        notes = [f"`{name}={view}`" for name, view in views.items() if view]
        notes += [f"reading the column `{name}`" for name in TEACHER_COLUMNS if name in self.card_notes.columns]
        return ", ".join([teacher, *best, *notes])


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
