# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Several teachers in one stages, of which the column `teacher_id` chooses one for each row."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from torch import nn
from transformers import PreTrainedModel

from ...algorithms.metrics import Metric, scored_mean
from ...data.rows.names import TEACHER_ID
from ...encoding.prompts import EncodedPrompt
from ...engines.vllm_client import EngineRequest, on_all_ranks
from ...engines.vllm_teacher import ServerTeacher
from ...forward.divergence import SpanTarget, Target, Targets
from ...rollout.ranks import any_rank
from ...rollout.rollout import Rollout
from ...rollout.stream import EncodedRow
from ..shared.arguments import mapping
from ..shared.finite import check_frozen_weights
from ..shared.offload import HostMemory, storages, weights
from ..shared.stages import Stages
from .config import is_address
from .separate import SeparateTeacher, SeparateTeachers, prepared_teacher, separate_teacher, taught_mask
from .teacher import (
    Teacher,
    check_teacher,
    completions_of,
    divergence_head_rule,
    leave_out,
    load_teacher,
    server_teacher,
)


if TYPE_CHECKING:
    from .config import MultimodalDistillationConfig


logger = get_logger(__name__)


@dataclass
class NamedTeacher:
    """
    A teacher of the rows that name it: a prepared model, or a server.

    With `memory`, the model's weights are on the host but while it scores.
    """

    name: str
    model: nn.Module | None = None
    server: ServerTeacher | None = None
    memory: HostMemory | None = None
    separate: SeparateTeacher | None = None  # by which the model scores, if it has a processor of its own
    _away: ExitStack = field(default_factory=ExitStack)  # closing it brings the weights back

    def send_away(self) -> None:
        """Moves the weights to the host, if there is `memory`."""
        if self.memory is not None and self.model is not None:
            self._away.enter_context(self.memory.offloading(storages(weights(self.model))))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Returns a context in which the weights are on the device."""
        self._away.close()
        try:
            yield
        finally:
            self.send_away()


def load_teachers(
    teachers: Mapping[str, str | PreTrainedModel] | None, args: "MultimodalDistillationConfig"
) -> dict[str, PreTrainedModel | str]:
    """
    Returns models by the names of teachers, and the addresses of those on servers. Loads models by their names. To
    the teachers of the config come those that were passed.
    """
    passed = teachers or {}
    servers = [name for name, teacher in passed.items() if is_address(teacher)]
    if servers:
        raise ValueError(
            f"`teacher_models` of the trainer has an address for {servers[0]!r}; give addresses in `teacher_models` "
            "of the config."
        )
    loaded: dict[str, PreTrainedModel | str] = {}
    for name, teacher in {**mapping(args.teacher_models), **passed}.items():
        model = teacher if is_address(teacher) else load_teacher(teacher, args)
        if model is None:
            raise ValueError(f"`teacher_models` has no model for {name!r}; name or pass one.")
        if not isinstance(model, str):
            divergence_head_rule(model, f"teacher {name!r}")
            check_frozen_weights(model, f"the teacher {name!r}")
            model.eval()
        loaded[name] = model
    return loaded


@dataclass
class Teachers:
    """Teachers by their names, each of which scores the completions of its rows."""

    stages: Stages
    student: PreTrainedModel
    named: list[NamedTeacher]
    _by_model: list[Teacher | SeparateTeacher] = field(init=False)

    def __post_init__(self):
        student_rule = divergence_head_rule(self.student, "student")
        self._by_model = []
        for teacher in self.named:
            rule = student_rule
            if teacher.separate is not None:
                self._by_model.append(teacher.separate)
                continue
            if teacher.model is not None:
                rule = divergence_head_rule(
                    self.stages.scoring.policy.unwrapped(teacher.model), f"teacher {teacher.name!r}"
                )
            self._by_model.append(
                Teacher(self.stages, teacher.model, None, (student_rule, rule), self.stages.scoring.policy)
            )

    @classmethod
    def of(cls, stages: Stages, loaded: Mapping[str, PreTrainedModel | str], student: PreTrainedModel) -> "Teachers":
        """
        Returns teachers that are prepared as the reference is. Raises `ValueError` if the tokens or features of one
        differ from the student's.
        """
        args = stages.context.args
        processor = stages.prompting.encoder.processor
        named = []
        for name, model in loaded.items():
            memory = HostMemory(args.device) if args.offload_during_generation else None
            try:
                if isinstance(model, str):
                    named.append(NamedTeacher(name, server=server_teacher(model, args, student, processor)))
                    continue
                separate = separate_teacher(stages, model, student, f"the teacher {name!r}")
                if not args.separates_teachers:
                    check_teacher(student, model, processor, args)
            except ValueError as error:
                raise ValueError(f"`teacher_models`, {name!r}: {error}") from error
            prepared: Any = prepared_teacher(stages, model) if separate is None else separate.model
            named.append(NamedTeacher(name, prepared, memory=memory, separate=separate))
            named[-1].send_away()
        return cls(stages, student, named)

    # Rollout

    def choose(self, rollout: Rollout, rows: Sequence[EncodedRow]) -> None:
        """
        Sets the teachers of completions, none for rows without one, and warns once of a batch of such rows. Raises
        `ValueError` for a row that names an unknown teacher.
        """
        indices = [self._index_of(row) for row in rows]
        rollout.teacher.index = torch.tensor(indices, device=self.stages.context.accelerator.device)
        if not any_rank(self.stages.context.accelerator, max(indices) >= 0):
            logger.warning_once(
                f"No row of a batch names its teacher, one of {self.names}, in the column {TEACHER_ID!r}, so that the "
                "loss of the batch is 0."
            )

    @property
    def names(self) -> list[str]:
        """The teachers' names."""
        return [teacher.name for teacher in self.named]

    def _index_of(self, row: EncodedRow) -> int:
        name = row.stored.get(TEACHER_ID)
        if name is None:
            return -1
        if name not in self.names:
            raise ValueError(
                f"row {row.row_index}, column {TEACHER_ID!r}: {name!r} is none of the teachers {self.names}; write "
                "one of them, or leave the cell empty."
            )
        return self.names.index(name)

    def requests_for(self, rollout: Rollout, prompts: Sequence[EncodedPrompt]) -> dict[int, list[EngineRequest]]:
        """Returns requests to each server, by its index, for the prompts of its completions."""
        requests: dict[int, list[EngineRequest]] = {}
        for index, teacher in enumerate(self.named):
            if teacher.server is not None:
                chosen = [prompts[i] for i in completions_of(rollout, index)]
                requests[index] = teacher.server.requests_for(chosen)
        return requests

    def score_on_servers(self, rollout: Rollout, requests: Mapping[int, list[EngineRequest]]) -> None:
        """Adds the top tokens of teachers on servers to a rollout."""
        if not requests:
            return
        shape = *rollout.completion_ids.shape, self.stages.context.args.loss_top_k
        device = self.stages.context.accelerator.device
        ids = torch.zeros(shape, dtype=torch.long, device=device)
        logps = torch.zeros(shape, device=device)
        for index, server_requests in requests.items():
            chosen = completions_of(rollout, index)
            completions = [rollout.source.ids[i] for i in chosen]
            server: Any = self.named[index].server
            top_k = functools.partial(server.top_k, server_requests, completions, shape[1], shape[2])
            own_ids, own_logps = on_all_ranks(self.stages.context.accelerator, top_k)
            ids[chosen] = own_ids.to(device)
            logps[chosen] = own_logps.to(device)
        rollout.teacher.ids = ids
        rollout.teacher.logps = logps

    def leave_out_untaught(self, rollout: Rollout) -> None:
        """Excludes completions without a teacher from the loss. All ranks must call this."""
        index = rollout.teacher.index
        assert index is not None
        leave_out(self.stages, rollout, index >= 0)

    def separate(self) -> SeparateTeachers | None:
        """Returns the teachers with processors of their own, or `None` if there are none."""
        by_index = {i: teacher.separate for i, teacher in enumerate(self.named) if teacher.separate is not None}
        if not by_index:
            return None
        names = dict(enumerate(self.names))
        return SeparateTeachers(self.stages, by_index, names, lambda index: self.named[index].on_device())

    # Update

    def target(self, rollout: Rollout) -> Targets:
        """Returns the distributions of the teachers for a micro-batch, each for its own completions."""
        parts = []
        for index, teacher in enumerate(self.named):
            chosen = completions_of(rollout, index)
            # With sharded weights, all ranks forward a teacher, or none
            if any_rank(self.stages.context.accelerator, bool(chosen)):
                parts.append(self._part(rollout, index, teacher, chosen))
        if not parts:  # no completion of the micro-batch has a teacher, and the mask is 0
            parts = [self._part(rollout, 0, self.named[0], [])]
        return Targets(tuple(parts))

    def _part(self, rollout: Rollout, index: int, teacher: NamedTeacher, chosen: list[int]) -> Target | SpanTarget:
        """Returns a teacher's target, in which the tokens of other teachers' completions are masked."""
        n = len(rollout)
        indices = chosen or [0]
        part = rollout.select(indices)
        if teacher.server is None:
            part.teacher = replace(part.teacher, ids=None, logps=None)
        if not chosen:  # the teacher's prompt in `part` is another teacher's
            prompts = [] if teacher.separate is None else [teacher.separate.dummy_prompt()]
            part.teacher = replace(part.teacher, prompts=prompts)
        # A teacher of another tokenizer has scored the texts of the rollout already, so its model isn't needed here
        reads_scores = teacher.separate is not None and not teacher.separate.shares_tokens
        with nullcontext() if reads_scores else teacher.on_device():
            target = self._by_model[index].target(part)
            # The teacher's head leaves the device with it
            if teacher.memory is not None and isinstance(target, Target) and target.head is not None:
                head = target.head
                bias = None if head.bias is None else head.bias.clone()
                target = replace(target, head=head._replace(weight=head.weight.clone(), bias=bias))
        if not chosen:
            target = replace(target, mask=torch.zeros_like(target.mask))
        places = torch.tensor(indices, device=rollout.completion_ids.device)

        def spread(values: torch.Tensor) -> torch.Tensor:
            """Returns values `(N, ...)`, 0 for completions of other teachers."""
            return values.new_zeros(n, *values.shape[1:]).index_copy(0, places.to(values.device), values)

        return target.map(spread)

    def metrics(self, rollout: Rollout, divergences: torch.Tensor) -> dict[str, Metric]:
        """Returns for each teacher the mean divergence of its tokens, and their share of the tokens in the loss."""
        mask = taught_mask(rollout)
        index = rollout.teacher.index
        assert index is not None
        metrics = {}
        for i, name in enumerate(self.names):
            teacher_mask = mask * (index == i)[:, None].to(mask)
            metrics[f"teacher/{name}/divergence"] = scored_mean(divergences, teacher_mask)
            metrics[f"teacher/{name}/token_frac"] = scored_mean(teacher_mask.float(), mask)
        return metrics
