# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Teachers for distillation: loading, checks that they fit the student, and scores of the student's completions."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import get_config_model_id, use_adapter

from ...data.rows.names import TEACHER, TEACHER_COLUMNS
from ...encoding.processors import load_processor, tokenizer_of
from ...encoding.prompt_encoder import PromptEncoder, has_teacher_prompt
from ...encoding.prompts import EncodedPrompt
from ...engines.vllm_client import EngineRequest, on_all_ranks
from ...engines.vllm_teacher import ServerTeacher
from ...families import MODALITIES, input_modalities
from ...forward.divergence import Head, Target, head_of, top_k_tokens
from ...forward.head import HeadRule, head_rule
from ...forward.scores import ScoreRequest
from ...forward.trees import share_media
from ...models.modes import evaluation_mode
from ...models.parts import kept_requires_grad
from ...models.pretrained import is_adapter, load_adapted
from ...policy import PolicyForward
from ...rollout.rollout import Rollout, require
from ...rollout.stream import EncodedRow
from ...rollout.view_prompts import view_prompts, with_new_start
from ...views.views import as_view
from ..shared.arguments import mapping
from ..shared.ema import MovingAverage
from ..shared.loading import load_by_name
from ..shared.stages import Stages


if TYPE_CHECKING:
    from .config import MultimodalDistillationConfig


# Settings of processors that change features of media, other than limits on the size of media
_FEATURE_SETTINGS = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "rescale_factor")
_FEATURE_SETTINGS += ("sampling_rate", "feature_size", "hop_length", "n_fft")

Processor = ProcessorMixin | PreTrainedTokenizerBase


def load_teacher(
    teacher: str | PreTrainedModel | None, args: "MultimodalDistillationConfig"
) -> PreTrainedModel | None:
    """
    Loads a teacher by its name as TRL does, with the weights of an adapter merged into those of its base model, or
    returns the model that was passed.
    """
    teacher = args.teacher_model_name_or_path if teacher is None else teacher
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
    if not is_adapter(teacher, revision):
        return load_by_name(teacher, args, init_kwargs)

    def load_base(name: str, **source: str) -> PreTrainedModel:
        return load_by_name(name, args, {**init_kwargs, **source})

    return load_adapted(teacher, revision, load_base)[0].merge_and_unload()


def check_teacher(
    student: PreTrainedModel, teacher: PreTrainedModel, processor: Processor, args: "MultimodalDistillationConfig"
) -> None:
    """Raises `ValueError` if the teacher's tokens, or its features of media, differ from the student's."""
    obstacle = teacher_obstacle(student, teacher, processor, args)
    if obstacle is not None:
        raise ValueError(
            f"The teacher {type(teacher).__name__} can't score completions of the student {type(student).__name__}, "
            f"whose prompts and features it gets: {obstacle}. With `teacher_processor='separate'`, it reads them by "
            "its own processor."
        )


def teacher_obstacle(
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
    vocab_sizes = {model.config.get_text_config().vocab_size for model in (student, teacher)}
    vocabularies = [tokenizer_of(side).get_vocab() for side in (processor, teacher_processor)]
    return len(vocab_sizes) == 1 and vocabularies[0] == vocabularies[1]


def _config_difference(student: PreTrainedModel, teacher: PreTrainedModel, has_media: bool) -> str | None:
    vocab_sizes = [model.config.get_text_config().vocab_size for model in (student, teacher)]
    if vocab_sizes[0] != vocab_sizes[1]:
        return f"it has vocab_size {vocab_sizes[1]}, the student {vocab_sizes[0]}"
    modalities = [modality for modality in MODALITIES if modality in input_modalities(student)] if has_media else []
    lacking_modalities = [modality for modality in modalities if modality not in input_modalities(teacher)]
    if lacking_modalities:
        return f"it takes no {' or '.join(lacking_modalities)}"
    if modalities and student.config.model_type != teacher.config.model_type:
        return f"it is a {teacher.config.model_type!r}, the student a {student.config.model_type!r}"
    if not modalities:
        return None
    id_names = [name for name in vars(student.config) if name.endswith(("_token_id", "_token_index"))]
    for name in id_names:
        ids = [getattr(model.config, name, None) for model in (student, teacher)]
        if ids[0] != ids[1] and name not in ("pad_token_id", "bos_token_id", "eos_token_id"):
            return f"its `{name}` is {ids[1]}, the student's {ids[0]}"
    return None


def _processor_difference(student: Processor, teacher: Processor) -> str | None:
    tokenizers = [tokenizer_of(side) for side in (student, teacher)]
    vocabularies = [tokenizer.get_vocab() for tokenizer in tokenizers]
    for token, index in vocabularies[0].items():
        if vocabularies[1].get(token) != index:
            return (
                f"token {index} is {token!r} to the student, and {tokenizers[1].convert_ids_to_tokens(index)!r} to "
                "the teacher"
            )
    for name in ("image_processor", "video_processor", "feature_extractor"):
        components = [getattr(side, name, None) for side in (student, teacher)]
        if None in components:
            continue
        for setting in _FEATURE_SETTINGS:
            values = [getattr(component, setting, None) for component in components]
            if values[0] != values[1]:
                return f"`{setting}` of its {name} is {values[1]}, of the student's {values[0]}"
    return None


def divergence_head_rule(model: PreTrainedModel, role: str) -> HeadRule:
    """
    Returns the scale and soft cap of a model's LM head. Raises `ValueError` if the model applies anything else to its
    logits.
    """
    rule = head_rule(model)
    if rule is None:
        raise ValueError(
            f"Divergences are computed from hidden states and the LM head, but the {role} {type(model).__name__} "
            f"does more around its head than a scale and a soft cap; use another {role}."
        )
    return rule


def teacher_indices(rollout: Rollout) -> list[int]:
    """Returns the index of each completion's teacher: 0 for a single one, -1 without a teacher among several."""
    index = rollout.teacher.index
    return [0] * len(rollout) if index is None else index.tolist()


def completions_of(rollout: Rollout, teacher_index: int) -> list[int]:
    """Returns the batch indices of a teacher's completions."""
    return [i for i, index in enumerate(teacher_indices(rollout)) if index == teacher_index]


def teacher_prompts(
    stages: Stages, rollout: Rollout, rows: Sequence[EncodedRow], encoder: PromptEncoder | None = None
) -> list[EncodedPrompt]:
    """
    Returns the teacher's prompt for each completion. Columns for the teacher, such as `teacher_prompt`, replace the
    columns that the student reads, and `teacher_view` changes the media. A teacher that doesn't read the student's
    prompts has an `encoder`.

    Completions that share a prompt share the teacher's prompt, too. If teacher and student read the same prompt, it is
    a single object. Raises `ValueError` if rows have columns for the teacher and there are tools.
    """
    are_separate = [has_teacher_prompt(row.stored) for row in rows]
    if any(are_separate) or encoder is not None:
        if stages.prompting.toolbox.tools:
            column = next(name for name in TEACHER_COLUMNS if name in rows[are_separate.index(True)].stored)
            raise ValueError(
                f"Columns for the teacher, such as {column!r}, can't be used with `tools`, since tool results would "
                "follow prompts of another length; remove the columns or the tools."
            )
        conversations = stages.prompting.encoder.messages([row.stored for row in rows], TEACHER)
        teacher_prompts_by_id: dict[int, Any] = {}
        student_messages = rollout.source.messages
        messages = [
            conversation if is_separate else student
            for student, conversation, is_separate in zip(student_messages, conversations, are_separate, strict=True)
        ]
        # The teacher's prompts by the `id` of the student's prompts. Rows hold a teacher's prompt only if it has media
        for prompt, row, conversation, is_separate in zip(rollout.prompts, rows, messages, are_separate, strict=True):
            encoded = row.teacher_prompt if is_separate else prompt
            if encoder is None and encoded is not None:
                teacher_prompts_by_id[id(prompt)] = encoded
            elif id(prompt) not in teacher_prompts_by_id:
                teacher_prompts_by_id[id(prompt)] = (encoder or stages.prompting.encoder).encode(
                    conversation, row.row_index
                )
        prompts = [teacher_prompts_by_id[id(prompt)] for prompt in rollout.prompts]
        rollout = replace(rollout, prompts=prompts, source=replace(rollout.source, messages=messages))
    prompts = prompts_under_view(stages, rollout, stages.context.args.teacher_view, encoder)
    share_media(prompts)
    return prompts


def prompts_under_view(
    stages: Stages, rollout: Rollout, view: str | None, encoder: PromptEncoder | None = None
) -> list[EncodedPrompt]:
    """Returns the prompts of completions, under `view` if there is one, with random numbers of this step."""
    if view is None:
        return rollout.prompts
    return view_prompts(
        rollout, as_view(view).seeded(stages.context.args.seed, rollout.step), encoder or stages.prompting.encoder
    )


def server_teacher(
    url: str, args: "MultimodalDistillationConfig", student: PreTrainedModel, processor: Processor
) -> ServerTeacher:
    """Returns the teacher on a server. Raises `ValueError` if its tokens or features differ from the student's."""
    server = ServerTeacher(url, processor, args.vllm_server_timeout, args.trust_remote_code)
    vocab_size = student.config.get_text_config().vocab_size
    if server.vocab_size != vocab_size:
        obstacle: str | None = f"it has vocab_size {server.vocab_size}, the student {vocab_size}"
    else:
        teacher_processor = load_processor(server.name, server.revision, args.trust_remote_code)
        obstacle = _processor_difference(processor, teacher_processor)
    if obstacle is not None:
        raise ValueError(f"The teacher {server.name!r} can't score completions of the student: {obstacle}.")
    return server


def score_on_server(stages: Stages, server: ServerTeacher, rollout: Rollout, requests: list[EngineRequest]) -> None:
    """Adds the top tokens of a teacher on a server to a rollout. `requests` hold the teacher's prompts."""
    width = rollout.completion_ids.size(1)
    device = stages.context.accelerator.device
    top_k = functools.partial(server.top_k, requests, rollout.source.ids, width, stages.context.args.loss_top_k)
    ids, logps = on_all_ranks(stages.context.accelerator, top_k)
    rollout.teacher.ids = ids.to(device)
    rollout.teacher.logps = logps.to(device)


def keep_teacher_prompts(rollout: Rollout, prompts: Sequence[EncodedPrompt], is_scored: bool) -> None:
    """
    Sets the teacher's prompts in a rollout, continued by the turns after tool calls. Leaves them unset if they are the
    student's prompts, or if the teacher has scored the completions already. Drops decoded media of the teacher's
    prompts, which no sampler needs.
    """
    prompts = [with_new_start(student, teacher) for student, teacher in zip(rollout.prompts, prompts, strict=True)]
    for prompt in prompts:
        prompt.decoded = ()
    prompts_differ = any(student is not teacher for student, teacher in zip(rollout.prompts, prompts, strict=True))
    if prompts_differ and not is_scored:
        rollout.teacher.prompts = prompts


def leave_out(stages: Stages, rollout: Rollout, is_taught: torch.Tensor) -> None:
    """Excludes completions where `is_taught`, `(N,)`, is false from the loss. All ranks must call this."""
    rollout.completion_mask = rollout.completion_mask * is_taught[:, None].to(rollout.completion_mask)
    rollout.num_items_in_batch = stages.context.accelerator.reduce(rollout.loss_mask.sum())


@dataclass
class Teacher:
    """The teacher: another model, or the student with its current, base or averaged weights."""

    stages: Stages
    model: nn.Module | None  # `None` if the student teaches itself
    average: MovingAverage | None
    rules: tuple[HeadRule, HeadRule]  # of the student's head, and of the teacher's
    policy: PolicyForward  # that scores by the model

    @contextmanager
    def _teacher_model(self) -> Iterator[nn.Module]:
        """Yields the teacher's model, with the weights and modes that score completions."""
        if self.model is not None:
            yield self.model
            return
        args = self.stages.context.args
        student: Any = self.stages.context.model
        model = self.stages.context.accelerator.unwrap_model(student)
        without_adapter = args.self_teacher_settings.weights == "base"
        if self.average is not None:
            self.average.follow(student)
        with (
            evaluation_mode(student),
            disable_gradient_checkpointing(student, args.gradient_checkpointing_kwargs),
            kept_requires_grad(model) if without_adapter else nullcontext(),
            use_adapter(model, None) if without_adapter else nullcontext(),
            nullcontext() if self.average is None else self.average.averaged_weights(),
        ):
            yield student

    def target(self, rollout: Rollout) -> Target:
        """Returns the teacher's distributions for a micro-batch, from a server's earlier response or a forward."""
        args = self.stages.context.args
        mask = rollout.loss_mask
        policy = self.policy
        if rollout.teacher.ids is not None:
            distributions = {"ids": rollout.teacher.ids, "logps": rollout.teacher.logps}
            return Target(mask, self.rules[0], args.beta, add_tail=args.loss_add_tail, **distributions)
        with torch.no_grad(), self._teacher_model() as model:
            completions = rollout.teacher.prompts or rollout.prompts, rollout.completion_ids, rollout.completion_mask
            packed = rollout.packed and policy.fallbacks.packing
            request = ScoreRequest(*completions, packed=packed, hidden=True, logps=False)
            hidden_states = require(policy.score(model, request).hidden)
            head = head_of(policy.unwrapped(model), self.rules[1])
            # The head is copied, because the student gets its current weights back before the loss reads the target
            if self.average is not None and not args.loss_top_k:
                head = head._replace(weight=head.weight.clone(), bias=None if head.bias is None else head.bias.clone())
            distributions: Any = {"hidden": hidden_states, "head": head}
            if args.loss_top_k:
                distributions = top_k_of(hidden_states, head, mask, args.loss_top_k, policy.temperature)
        return Target(mask, self.rules[0], args.beta, policy.temperature, add_tail=args.loss_add_tail, **distributions)


def top_k_of(
    states: torch.Tensor, head: Head, mask: torch.Tensor, k: int, temperature: float
) -> dict[str, torch.Tensor]:
    """Returns `ids` and `logps`, `(B, C, k)`, of the `k` most likely tokens, and 0 where `mask`, `(B, C)`, is 0."""
    indices = mask.flatten().nonzero()[:, 0]
    top_k = top_k_tokens(states.flatten(0, 1).index_select(0, indices), head, k, temperature)
    # The tokens go back to their positions among the positions with a mask of 0
    dense = (values.new_zeros(mask.numel(), k).index_copy(0, indices, values).view(*mask.shape, k) for values in top_k)
    return dict(zip(("ids", "logps"), dense, strict=True))
