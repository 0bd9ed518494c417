# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""On-policy distillation with media."""

from collections.abc import Callable, Sequence
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel, TrainerCallback
from trl import DistillationTrainer
from trl.trainer.utils import get_config_model_id

from ...algorithms.losses import LossOutput
from ...algorithms.metrics import scored_mean
from ...data.rows.names import TEACHER_COLUMNS
from ...engines.samplers import Sampler
from ...forward.scores import ScoreRequest, Scores
from ...models.parts import check_base_is_kept
from ...models.wrapped import unwrapped
from ...reporting.model_card import common_lines, in_code
from ...rollout.rollout import Rollout, require
from ...rollout.stream import EncodedRow
from ..shared.base import MultimodalTrainer
from ..shared.ema import MovingAverage
from ..shared.rollout_logs import log_media_contribution
from ..shared.setup import resolve_config
from ..shared.signatures import Adapter, EvalRows, Model, Optimizers, Processor, Rows, arguments_of
from .config import MultimodalDistillationConfig
from .method import DISTILLATION
from .teacher import (
    Teacher,
    check_teacher,
    divergence_head_rule,
    keep_teacher_prompts,
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
            the student's prompts and features. Defaults to the model that `teacher_model_name_or_path` names. Without
            a teacher by name or on a server, the student is its own teacher. Then `teacher_view`, `student_view` or
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

    Raises:
        `TypeError`: If `args` is a config of TRL's own.
        `ValueError`: If the teacher has another vocabulary or processor than the student, if the student is its own
            teacher and both read the same prompts, or if a model applies anything to its logits other than a scale and
            a soft cap.
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
    ):
        args = resolve_config(MultimodalDistillationConfig, args, model)
        arguments = arguments_of(locals(), "teacher_model")
        teacher = load_teacher(teacher_model, args)
        if teacher is model:
            raise ValueError("`teacher_model` is the student itself; leave it out, and set `teacher_view`.")
        if teacher is not None and args.teacher_model_server_url is not None:
            raise ValueError("`teacher_model` and `teacher_model_server_url` are two teachers; remove one of them.")
        if tools and args.teacher_model_server_url is not None:
            raise ValueError("A teacher on a server can only score completions of one turn; remove `tools`.")
        if args.self_teacher_settings.weights != "current" and (
            teacher is not None or args.teacher_model_server_url is not None
        ):
            raise ValueError(
                f"`self_teacher={args.self_teacher!r}` is for a student that is its own teacher, but there is another "
                "teacher; leave out one of them."
            )
        teacher_head_rule = None if teacher is None else divergence_head_rule(unwrapped(None, teacher), "teacher")
        super().__init__(**arguments, reward_funcs=None, ref_model=None if teacher is None else teacher.eval())
        student = self._unwrapped(self.model)
        self.teacher_model = self.ref_model  # as `ref_model`, it can be offloaded during sampling
        url = args.teacher_model_server_url
        self.teacher_server = None if url is None else server_teacher(url, args, student, self.processing_class)
        student_head_rule = divergence_head_rule(student, "student")
        if self.teacher_model is not None:
            check_teacher(student, self._unwrapped(self.teacher_model), self.processing_class, args)
        elif (
            self.teacher_server is None
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
        self._teacher = Teacher(self._run, self.teacher_model, self.ema, head_rules)

    # Rollout

    def _draw(self, inputs: Sequence[Any]) -> Rollout:
        """Samples completions of rows, and returns their rollout with the teacher's prompts or scores."""
        self._check_policy()
        rows = list(inputs) if isinstance(inputs[0], EncodedRow) else self._stream.without_prompts(inputs)
        self._check_teacher_sees_more(rows)
        rollout, server = self._collect(rows), self.teacher_server
        prompts = teacher_prompts(self._run, rollout, rows)
        # Made before sampling, after which prompts lose the decoded media that a server needs
        requests = None if server is None else server.requests_for(prompts)
        rollout.prompts = prompts_under_view(self._run, rollout, self.args.student_view)
        with self.offloading():
            self._sample(rollout)
        if server is not None and requests is not None:
            score_on_server(self._run, server, rollout, requests)
        keep_teacher_prompts(rollout, prompts, is_scored=server is not None)
        self._check_sampler(rollout)
        self._run.leave_out_failed(rollout)
        self._rollout_log.add_completions(rollout)
        log_media_contribution(self._run, rollout, self._steps_per_rollout)
        return rollout

    def _check_teacher_sees_more(self, rows: Sequence[EncodedRow]) -> None:
        """Raises a `ValueError` if the student is its own teacher and both read the same prompts."""
        teaches_itself = self.teacher_model is None and self.teacher_server is None
        sees_more = self.args.teacher_view or self.args.student_view
        if teaches_itself and not (sees_more or any(name in rows[0].stored for name in TEACHER_COLUMNS)):
            raise ValueError(
                "The student is its own teacher and reads the same prompts as the teacher, so it would learn nothing; "
                "pass `teacher_model`, set `teacher_view` or `student_view`, or add a column such as 'teacher_prompt' "
                "or 'teacher_image'."
            )

    # Update

    def _on_rollout(self, micro_batches: list[Rollout]) -> None:
        """Does nothing, as distillation needs no log-probabilities of the student before its updates."""

    def _score(self, model: nn.Module, rollout: Rollout, **options) -> Scores:
        """Computes a micro-batch's scores and divergences from the teacher, with gradients."""
        target = self._teacher.target(rollout)
        request = ScoreRequest(*rollout.completions, packed=rollout.packed, target=target)
        self._scores = self._policy.score(model, request)
        return self._scores

    def _loss(self, scores: Scores, inputs: Rollout) -> LossOutput:
        """Computes the mean divergence over the tokens of an optimizer step on all processes."""
        mask = inputs.loss_mask
        n_tokens = mask.sum().clamp(min=1)
        if self.model.training:
            # `num_items_in_batch` counts the tokens of a generation batch on all ranks. `n_tokens` becomes the number
            # of tokens of an optimizer step, as a mean over ranks
            n_tokens = require(inputs.num_items_in_batch).clamp(min=1) / self.accelerator.num_processes
            n_tokens = n_tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        loss = DISTILLATION.loss(scores.divergences, n_tokens)
        return LossOutput(loss, {"entropy": scored_mean(scores.entropies, mask)})

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
        if self.teacher_server is not None:
            teacher = f"{in_code(self.teacher_server.name)} on a vLLM server"
        elif self.teacher_model is not None:
            teacher = in_code(
                get_config_model_id(self._unwrapped(self.teacher_model).config) or "a model without a name"
            )
        views = [f"`{name}={value}`" for name in ("teacher_view", "student_view") if (value := getattr(args, name))]
        columns = [f"reading the column `{name}`" for name in TEACHER_COLUMNS if name in self.card_notes.columns]
        return ", ".join([teacher, *views, *columns])
