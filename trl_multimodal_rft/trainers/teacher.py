# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Teachers of a distillation: how they are loaded, which fit a student, and what they say of its completions."""

from typing import Any

import torch
from transformers import PreTrainedModel, ProcessorMixin
from trl.trainer.utils import get_config_model_id

from ..encoding.processors import load_processor
from ..families import MODALITIES
from ..forward.divergence import Head, Target, head_of, top_k_tokens
from ..forward.head import HeadRule, head_rule
from ..models.pretrained import load_model
from ..models.wrapped import unwrapped
from ..rollout.rollout import Rollout


# Settings of processors that features of media depend on, besides their size
_GEOMETRY = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "rescale_factor")
_GEOMETRY += ("sampling_rate", "feature_size", "hop_length", "n_fft")


def load_teacher(teacher: Any, args: Any) -> Any:
    """A teacher as TRL loads it by its name; a model as it is."""
    teacher = args.teacher_model_name_or_path if teacher is None else teacher
    init_kwargs = dict(args.teacher_model_init_kwargs or {})
    if not isinstance(teacher, str):
        if init_kwargs:
            raise ValueError(
                "`teacher_model_init_kwargs` say how to load a teacher by its name, but "
                + ("there is none" if teacher is None else "`teacher_model` is a model already")
                + "; remove them."
            )
        return teacher
    if args.teacher_model_revision is not None:
        init_kwargs.setdefault("revision", args.teacher_model_revision)
    if args.distributed_state.distributed_type in ["MULTI_GPU", "DEEPSPEED"]:
        init_kwargs["device_map"] = None
    return load_model(teacher, **{"trust_remote_code": args.trust_remote_code, **init_kwargs})


def check_teacher(student: PreTrainedModel, teacher: PreTrainedModel, processor: Any, args: Any) -> None:
    """Refuses a teacher that other tokens, or other features of media, mean something to."""
    obstacle = _other_config(student, teacher, isinstance(processor, ProcessorMixin))
    name = get_config_model_id(teacher.config)
    if obstacle is None and name:
        try:
            theirs = load_processor(name, args.teacher_model_revision, args.trust_remote_code)
        except (OSError, ValueError):
            theirs = None  # saved without one, or not readable from here
        obstacle = None if theirs is None else _other_processor(processor, theirs)
    if obstacle is not None:
        raise ValueError(
            f"The teacher {type(teacher).__name__} can't score completions of the student {type(student).__name__}, "
            f"whose prompts and features it gets: {obstacle}."
        )


def _other_config(student: PreTrainedModel, teacher: PreTrainedModel, has_media: bool) -> str | None:
    """How the tokens of two models differ, by their configs."""
    sizes = [each.config.get_text_config().vocab_size for each in (student, teacher)]
    if sizes[0] != sizes[1]:
        return f"it has vocab_size {sizes[1]}, the student {sizes[0]}"
    kinds = [kind for kind in MODALITIES if kind in student.input_modalities] if has_media else []
    lacking = [kind for kind in kinds if kind not in teacher.input_modalities]
    if lacking:
        return f"it takes no {' or '.join(lacking)}"
    if kinds and student.config.model_type != teacher.config.model_type:
        return f"it is a {teacher.config.model_type!r}, the student a {student.config.model_type!r}"
    names = [name for name in vars(student.config) if name.endswith(("_token_id", "_token_index"))]
    for name in names if kinds else ():
        ids = [getattr(each.config, name, None) for each in (student, teacher)]
        if ids[0] != ids[1] and name not in ("pad_token_id", "bos_token_id", "eos_token_id"):
            return f"its `{name}` is {ids[1]}, the student's {ids[0]}"
    return None


def _other_processor(own: Any, theirs: Any) -> str | None:
    """How the tokens or the features of two processors differ."""
    tokenizers = [getattr(each, "tokenizer", each) for each in (own, theirs)]
    vocabularies = [each.get_vocab() for each in tokenizers]
    for token, index in vocabularies[0].items():
        if vocabularies[1].get(token) != index:
            return (
                f"token {index} is {token!r} to the student, and {tokenizers[1].convert_ids_to_tokens(index)!r} to it"
            )
    for name in ("image_processor", "video_processor", "feature_extractor"):
        both = [getattr(each, name, None) for each in (own, theirs)]
        for setting in _GEOMETRY if None not in both else ():
            values = [getattr(each, setting, None) for each in both]
            if values[0] != values[1]:
                return f"`{setting}` of its {name} is {values[1]}, of the student's {values[0]}"
    return None


def rule_of(model: PreTrainedModel, who: str) -> HeadRule:
    """What a model does around its LM head. Raises a `ValueError` for anything but scale and soft cap."""
    rule = head_rule(model)
    if rule is None:
        raise ValueError(
            f"Divergences are computed from hidden states and the LM head, but what the {who} {type(model).__name__} "
            "does around its head is neither a scale nor a soft cap."
        )
    return rule


def local_target(trainer: Any, rollout: Rollout) -> Target:
    """What a teacher on this device says of the completions of a micro-batch."""
    args, mask = trainer.args, rollout.loss_mask
    model, rule = trainer.teacher_model, trainer.teacher_rule
    with torch.no_grad():
        states = trainer._policy.states(
            model, rollout.prompts, rollout.completion_ids, rollout.completion_mask, packed=rollout.packed
        )
        head = head_of(unwrapped(trainer.accelerator, model), rule)
        given: Any = {"hidden": states, "head": head}
        if args.loss_top_k:
            given = top_k_of(states, head, mask, args.loss_top_k, trainer.temperature)
    return Target(mask, trainer.student_rule, trainer.beta, trainer.temperature, add_tail=args.loss_add_tail, **given)


def top_k_of(
    states: torch.Tensor, head: Head, mask: torch.Tensor, k: int, temperature: float
) -> dict[str, torch.Tensor]:
    """The `k` most likely tokens where the mask `(B, C)` is 1, and their log-probabilities, `(B, C, k)`."""
    places = mask.flatten().nonzero()[:, 0]
    found = top_k_tokens(states.flatten(0, 1).index_select(0, places), head, k, temperature)
    placed = (each.new_zeros(mask.numel(), k).index_copy(0, places, each).view(*mask.shape, k) for each in found)
    return dict(zip(("ids", "logps"), placed, strict=True))
