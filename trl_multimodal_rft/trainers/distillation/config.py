# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the distillation trainer."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from trl import DistillationConfig

from ...data.rows.names import TEACHER_COLUMNS, TEACHER_ID
from ...spelling import read_settings, split_settings
from ...views.view_options import ContrastView, RolloutView
from ...views.views import as_view
from ..base.argument_checks import mapping
from ..base.batch_sizes import batch_options, batch_size, check_batches
from ..base.config_options import Needs, help_from_docstring
from ..base.conflicts import check_conflicts
from ..base.multimodal_config import SamplingArguments
from .conflicts import conflicts_of_losses, conflicts_of_processor, conflicts_of_self_teacher, conflicts_of_server


@dataclass(frozen=True)
class SelfTeacher:
    """Settings of the option `self_teacher`."""

    weights: Literal["current", "base", "ema"] = "current"  # the student's: now, without adapter, or averaged
    rate: Annotated[float, "(0, 1]"] = 0.05  # share of the student's weights in the average after each update
    shows_best: bool = False  # whether the teacher sees the best other completion of the group
    min_reward: float = 1.0  # that a completion needs to be shown


@dataclass(frozen=True)
class TeacherProcessor:
    """Settings of the option `teacher_processor`."""

    reader: Literal["student", "separate"] = "student"  # whose processor encodes what a teacher reads
    on_unaligned: Literal["raise", "skip"] = "raise"  # what happens to a completion of which nothing is aligned


def is_address(teacher: Any) -> bool:
    """Returns whether a teacher is on a server."""
    return isinstance(teacher, str) and teacher.startswith(("http://", "https://"))


@help_from_docstring
@dataclass
class MultimodalDistillationConfig(SamplingArguments, DistillationConfig):  # pyrefly: ignore[inconsistent-inheritance]
    r"""
    Configuration class for the [`MultimodalDistillationTrainer`].

    Holds every argument of [`~trl.DistillationConfig`] and of [`SamplingArguments`].

    Parameters:
        > Parameters that control the completions

        num_generations (`int`, *optional*, defaults to `1`):
            Number of completions per prompt in training. Student and teacher forward the prompt once for all its
            completions. With 4, a batch of 32 completions has 8 prompts. Evaluation samples one completion per prompt.
        steps_per_generation (`int`, *optional*):
            Number of micro-batches per generation batch. By default `gradient_accumulation_steps`, as in TRL.
        generation_batch_size (`int`, *optional*):
            Number of completions that all processes sample at once. Set only this or `steps_per_generation`.

        teacher_processor (`str`, *optional*, defaults to `"student"`):
            Processor of the teachers' inputs. With `"student"`, a teacher has the student's vocabulary, family and
            features. With `"separate"`, the processor in the teacher's folder encodes the same messages and media. A
            teacher of another tokenizer then scores the text of completions, and is compared on the spans of text
            that both tokenizers cut alike, with `beta=1.0` and `loss_top_k=0`. With the setting `on_unaligned="skip"`,
            as in `"separate(on_unaligned='skip')"`, completions without such a span aren't trained on and are counted
            as `teacher/unaligned`; by default, they raise an error that names the row.

        > Parameters that control what teacher and student see

        teacher_view (`str`, *optional*):
            View under which the teacher sees the media of the prompts, such as `"blank"`, see
            [Views](https://trl-multimodal-rft.readthedocs.io/views); the student sees them as they are.
        student_view (`str`, *optional*):
            View under which the student samples and is trained; the teacher sees the media as they are.
        self_teacher (`str`, *optional*, defaults to `"current"`):
            Weights with which the student is its own teacher, if there is no other teacher. `"current"` takes
            the weights at each update, without a gradient. `"base"` takes the weights without the adapter, which don't
            change. `"ema"` takes an exponential moving average of the weights. Its setting `rate`, as in
            `"ema(rate=0.05)"`, is the share of the student's weights in the average after each update, as in TRL's
            SDFT and SDPO. With the setting `shows_best=True`, as in `"ema(shows_best=True)"`, the teacher sees the
            best other completion of the group behind the question, if its reward is at least `min_reward` (1.0); the
            student never sees it. Completions without such a context aren't trained on. Needs `reward_funcs`.

        teacher_model_server_url (`str`, *optional*):
            Address of a vLLM server that holds the teacher, such as `"http://localhost:8000"`, in place of a teacher
            in this process. A server returns only the most likely tokens, so set `loss_top_k`, at most the server's
            `--max-logprobs`.

        teacher_models (`dict[str, str]`, *optional*):
            Several teachers in place of one, by the names that the column `teacher_id` gives: each a model or the
            folder of an adapter, as for `teacher_model_name_or_path`, or the address of a vLLM server, as for
            `teacher_model_server_url`. A row without a `teacher_id` isn't trained on. With
            `offload_during_generation`, only the teacher that scores is on the device.

        > Parameters that control the divergence

        loss_top_k (`int`, *optional*, defaults to `0`):
            Number of the teacher's most likely tokens over which the divergence is computed. 0 takes the whole
            vocabulary, in chunks.
        loss_add_tail (`bool`, *optional*, defaults to `True`):
            With `loss_top_k`, whether the other tokens count as one token with the remaining probability. `False`
            renormalizes the distributions over the chosen tokens.

        > Parameters that control the logging

        log_multimodal (`bool`, *optional*, defaults to `True`):
            Whether tables of completions hold media, as in [`~trl.GRPOConfig`].

    Raises:
        ValueError: If arguments are out of range, contradict each other or have no effect. The message names them and
            the remedy.
    """

    num_generations: Annotated[int, "[1, inf]"] = 1
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    teacher_view: str | None = None
    student_view: str | None = None
    self_teacher: str = "current"
    teacher_processor: str = "student"
    teacher_model_server_url: str | None = None
    teacher_models: dict[str, Any] | str | None = None
    loss_top_k: Annotated[int, "[0, inf]"] = 0
    loss_add_tail: Annotated[bool, Needs("loss_top_k")] = True
    log_multimodal: bool = True

    # Fixed values of other sampling trainers' options. `beta` interpolates between divergences here, and isn't the
    # coefficient of a KL penalty. Completions are trained on once, without importance ratios for an engine
    needs_rewards = beta_is_kl = False
    teacher_columns = (*TEACHER_COLUMNS, TEACHER_ID)
    num_generations_eval = num_iterations = 1
    sync_ref_model = vllm_importance_sampling_correction = balance_ranks = False
    rollout_view = contrast_view = None
    rollout_view_settings = RolloutView()
    contrast_view_settings = ContrastView()

    _conflicts = (
        conflicts_of_self_teacher,
        conflicts_of_processor,
        conflicts_of_server,
        conflicts_of_losses,
        *SamplingArguments._conflicts,
    )

    def __post_init__(self):
        # transformers reads this field from JSON, too
        self._VALID_DICT_FIELDS = [*self._VALID_DICT_FIELDS, "teacher_models"]
        super().__post_init__()
        for name in ("teacher_view", "student_view"):
            if getattr(self, name) is not None:
                split_settings(getattr(self, name), name)
                as_view(getattr(self, name))  # raises if the view is invalid
        if self.teacher_models is not None:
            self._check_teacher_models()
        check_conflicts(self)
        self._set_batches()

    @property
    def self_teacher_settings(self) -> SelfTeacher:
        """Settings of `self_teacher`."""
        return read_settings(SelfTeacher, "self_teacher", self.self_teacher)

    @property
    def teacher_processor_settings(self) -> TeacherProcessor:
        """Settings of `teacher_processor`."""
        return read_settings(TeacherProcessor, "teacher_processor", self.teacher_processor)

    @property
    def separates_teachers(self) -> bool:
        """`True` if teachers read by processors of their own."""
        return self.teacher_processor_settings.reader == "separate"

    @property
    def encodes_teacher_prompts(self) -> bool:
        """`True` if prompts for the teacher are encoded with the rows, by the student's processor."""
        return not self.separates_teachers

    @property
    def keeps_decoded(self) -> bool:
        """`True` if a teacher on a server needs the decoded media."""
        servers = filter(is_address, mapping(self.teacher_models).values())
        return self.teacher_model_server_url is not None or any(servers)

    def _check_teacher_models(self) -> None:
        self.teacher_models = dict(mapping(self.teacher_models))
        for name, teacher in self.teacher_models.items():
            if not isinstance(name, str) or not isinstance(teacher, str):
                raise ValueError(
                    f"`teacher_models` has {name!r}: {teacher!r}; give each teacher as a name and a model's name, "
                    "folder or address, and pass models to the trainer."
                )

    def _set_batches(self) -> None:
        """Fills in `generation_batch_size` and `steps_per_generation`, as TRL's GRPO does."""
        micro_batch_size = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size is None:
            names = batch_options(self)
            self.generation_batch_size = batch_size(self)
            self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
            check_batches(self, names)
            return
        steps, remainder = divmod(self.generation_batch_size, micro_batch_size)
        if remainder != 0 or self.steps_per_generation not in (None, steps):
            raise ValueError(
                f"`generation_batch_size` ({self.generation_batch_size}) must be `steps_per_generation` times the "
                f"{micro_batch_size} completions of a micro-batch over all processes; set only one of both options."
            )
        self.steps_per_generation = steps
        check_batches(self, ["generation_batch_size"])
