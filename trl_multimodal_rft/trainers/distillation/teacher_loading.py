# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Teachers of a run by their names, and the reasons why one can't read what the student reads."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel, ProcessorMixin
from trl.trainer.utils import get_config_model_id

from ...credentials import masked, revealed
from ...encoding.processors import Processor, load_processor, tokenizer_of
from ...engines.vllm_teacher import ServerTeacher
from ...families import input_modalities
from ...forward.head import HeadRule, head_rule
from ...modalities import MODALITIES
from ...models.pretrained import is_adapter, load_adapted
from ...models.wrapped import unwrapped
from ..base.argument_checks import mapping
from ..base.conflicts import raise_first
from ..base.finite import check_frozen_weights
from ..base.loading import load_by_name
from .config import SelfTeacher, is_address


if TYPE_CHECKING:
    from .config import MultimodalDistillationConfig


# Settings of processors that change features of media, other than limits on the size of media
_FEATURE_SETTINGS = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "rescale_factor")
_FEATURE_SETTINGS += ("sampling_rate", "feature_size", "hop_length", "n_fft")

# A model, the address of a server, or `None` for the student itself. The name of a single teacher is `None`
TeachersByName = dict[str | None, PreTrainedModel | str | None]


def check_sources(
    student: Any,
    teacher: str | PreTrainedModel | None,
    teachers: Mapping[str, str | PreTrainedModel] | None,
    tools: Any,
    args: "MultimodalDistillationConfig",
) -> None:
    """
    Raises a `ValueError` unless the teachers that are passed to the trainer, `teacher` or `teachers`, or that `args`
    names are one, or several by their names, and fit the other arguments.
    """
    url = args.teacher_model_server_url
    has_model = teacher is not None or args.teacher_model_name_or_path is not None
    changes_itself = args.self_teacher_settings != SelfTeacher()
    has_names = teachers is not None or args.teacher_models is not None
    others = {"teacher_model_name_or_path": args.teacher_model_name_or_path, "teacher_model_server_url": url}
    others |= {"teacher_model": teacher, "self_teacher": changes_itself or None}
    other = next((name for name, value in others.items() if value is not None), None)
    passed = teachers or {}
    single = args.teacher_model_name_or_path if teacher is None else teacher
    named = {**mapping(args.teacher_models), **passed}
    server = next(filter(lambda name: is_address(passed[name]), passed), None)
    raise_first(
        (
            (has_names and other is not None, f"`teacher_models` and `{other}` name teachers; leave out one of them."),
            (has_names and not named, "`teacher_models` is empty; name at least one teacher, or leave it out."),
            (
                is_address(single),
                f"`teacher_model` is the address {masked(str(single))!r}; give addresses in "
                "`teacher_model_server_url`.",
            ),
            (
                server is not None,
                f"`teacher_models` of the trainer has an address for {server!r}; give addresses in `teacher_models` "
                "of the config.",
            ),
            (
                isinstance(teacher, nn.Module) and teacher is student,
                "`teacher_model` is the student itself; leave it out, and set `teacher_view`.",
            ),
            (
                has_model and url is not None,
                "`teacher_model` and `teacher_model_server_url` are two teachers; remove one of them.",
            ),
            (
                bool(tools) and args.keeps_decoded,
                "A teacher on a server can only score completions of one turn; remove `tools`.",
            ),
            (
                changes_itself and (has_model or url is not None),
                f"`self_teacher={args.self_teacher!r}` is for a student that is its own teacher, but there is another "
                "teacher; leave out one of them.",
            ),
            (
                args.separates_teachers and not (has_model or named),
                "`teacher_processor='separate'` is for other models, but the student is its own teacher; pass "
                "`teacher_model`, or leave it out.",
            ),
            (
                args.separates_teachers and bool(tools),
                "`teacher_processor='separate'` scores completions of one turn; remove `tools`, or leave it out.",
            ),
        )
    )


def load_teachers(
    teacher: str | PreTrainedModel | None,
    teachers: Mapping[str, str | PreTrainedModel] | None,
    args: "MultimodalDistillationConfig",
) -> TeachersByName:
    """Returns the teachers that are passed to the trainer, or that `args` names. Loads models by their names."""
    if args.teacher_model_server_url is not None:
        return {None: revealed(args.teacher_model_server_url)}
    named = {**mapping(args.teacher_models), **(teachers or {})}
    loaded: TeachersByName = {}
    sources = named or {None: args.teacher_model_name_or_path if teacher is None else teacher}
    for name, source in sources.items():
        model = source if is_address(source) else _load(source, args)
        if model is None and name is not None:
            raise ValueError(f"`teacher_models` has no model for {name!r}; name or pass one.")
        if isinstance(model, nn.Module):
            divergence_head_rule(unwrapped(None, model), "teacher" if name is None else f"teacher {name!r}")
            check_frozen_weights(model, label(name))
            model.eval()
        loaded[name] = model
    return loaded


def label(name: str | None) -> str:
    """Returns a teacher's name in messages."""
    return "the teacher" if name is None else f"the teacher {name!r}"


def _load(teacher: str | PreTrainedModel | None, args: "MultimodalDistillationConfig") -> PreTrainedModel | None:
    """Loads a teacher as TRL does, with an adapter merged into its base model, or returns what isn't a name."""
    init_kwargs = dict(mapping(args.teacher_model_init_kwargs))
    if not isinstance(teacher, str):
        if init_kwargs:
            raise ValueError(
                "`teacher_model_init_kwargs` say how to load a teacher by its name, but "
                + ("no teacher has a name" if teacher is None else "`teacher_model` is a model already")
                + "; remove them."
            )
        return teacher
    if args.teacher_model_revision is not None:
        init_kwargs.setdefault("revision", args.teacher_model_revision)
    revision = init_kwargs.get("revision")

    def load(name: str, **source: str) -> PreTrainedModel:
        return load_by_name(name, args, {**init_kwargs, **source})

    if is_adapter(teacher, revision):
        return load_adapted(teacher, revision, load)[0].merge_and_unload()
    return load(teacher)


def divergence_head_rule(model: PreTrainedModel, role: str) -> HeadRule:
    """Returns the scale and soft cap of a model's LM head. Raises a `ValueError` for a head that does more."""
    rule = head_rule(model)
    if rule is None:
        raise ValueError(
            f"Divergences are computed from hidden states and the LM head, but the {role} {type(model).__name__} "
            f"does more around its head than a scale and a soft cap; use another {role}."
        )
    return rule


def server_teacher(
    url: str, args: "MultimodalDistillationConfig", student: PreTrainedModel, processor: Processor
) -> ServerTeacher:
    """Returns the teacher on a server. Raises a `ValueError` if its tokens or features differ from the student's."""
    server = ServerTeacher(url, processor, args.vllm_server_timeout, args.trust_remote_code)
    obstacle = _vocabulary_difference(server.vocab_size, student)
    if obstacle is None:
        teacher_processor = load_processor(*server.source, args.trust_remote_code)
        obstacle = _processor_difference(processor, teacher_processor)
    if obstacle is not None:
        raise ValueError(f"The teacher {server.name!r} can't score completions of the student: {obstacle}.")
    return server


def obstacle_to_student_prompts(
    student: PreTrainedModel, teacher: PreTrainedModel, processor: Processor, args: "MultimodalDistillationConfig"
) -> str | None:
    """Returns the reason why a teacher can't read the student's prompts, features and tokens, or `None`."""
    obstacle = _config_difference(student, teacher, isinstance(processor, ProcessorMixin))
    name = get_config_model_id(teacher.config)
    if obstacle is None and name:
        try:
            teacher_processor = load_processor(name, args.teacher_model_revision, args.trust_remote_code)
        except (OSError, ValueError):
            return None  # the teacher was saved without a processor, or this process can't read it
        obstacle = _processor_difference(processor, teacher_processor)
    return obstacle


def same_tokens(
    student: PreTrainedModel, teacher: PreTrainedModel, processor: Processor, teacher_processor: Processor
) -> bool:
    """Returns whether each token id means the same to both models."""
    sizes = {model.config.get_text_config().vocab_size for model in (student, teacher)}
    return len(sizes) == 1 and tokenizer_of(processor).get_vocab() == tokenizer_of(teacher_processor).get_vocab()


def _vocabulary_difference(size: int, student: PreTrainedModel) -> str | None:
    student_size = student.config.get_text_config().vocab_size
    return None if size == student_size else f"it has vocab_size {size}, the student {student_size}"


def _config_difference(student: PreTrainedModel, teacher: PreTrainedModel, has_media: bool) -> str | None:
    obstacle = _vocabulary_difference(teacher.config.get_text_config().vocab_size, student)
    modalities = [modality for modality in MODALITIES if has_media and modality in input_modalities(student)]
    if obstacle is not None or not modalities:
        return obstacle
    lacking = [modality for modality in modalities if modality not in input_modalities(teacher)]
    if lacking:
        return f"it takes no {' or '.join(lacking)}"
    config = student.config
    if config.model_type != teacher.config.model_type:
        return f"it is a {teacher.config.model_type!r}, the student a {config.model_type!r}"
    text_ids = ("pad_token_id", "bos_token_id", "eos_token_id")
    for name in vars(config):
        is_of_media = name.endswith(("_token_id", "_token_index")) and name not in text_ids
        value = getattr(teacher.config, name, None)
        if is_of_media and getattr(config, name) != value:
            return f"its `{name}` is {value}, the student's {getattr(config, name)}"
    return None


def _processor_difference(student: Processor, teacher: Processor) -> str | None:
    vocabulary = tokenizer_of(teacher).get_vocab()
    for token, index in tokenizer_of(student).get_vocab().items():
        if vocabulary.get(token) != index:
            other = tokenizer_of(teacher).convert_ids_to_tokens(index)
            return f"token {index} is {token!r} to the student, and {other!r} to the teacher"
    for name in ("image_processor", "video_processor", "feature_extractor"):
        components = [getattr(side, name, None) for side in (student, teacher)]
        if None in components:
            continue
        for setting in _FEATURE_SETTINGS:
            values = [getattr(component, setting, None) for component in components]
            if values[0] != values[1]:
                return f"`{setting}` of its {name} is {values[1]}, of the student's {values[0]}"
    return None
