# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""First stage of a rollout: rows become environments and encoded prompts, and are checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accelerate.logging import get_logger
from torch import nn
from transformers import PreTrainedTokenizerBase

from ...data.rows.batches import Row
from ...data.rows.names import TEACHER, check_has_prompt, check_reward_columns
from ...data.rows.unread import without_media
from ...encoding.processors import tokenizer_of
from ...encoding.prompt_encoder import PromptEncoder, has_teacher_prompt
from ...families import input_modalities
from ...reporting.card_notes import CardNotes
from ...rollout.collect import collect
from ...rollout.environments import Environments
from ...rollout.reward_functions import RewardFunctions
from ...rollout.rollout import Prompted
from ...rollout.stream import EncodedRow, RowStream, warn_of_positions
from ..base.dataset_checks import check_held_out, unchecked_datasets, warn_of_unread_media
from .context import Context


logger = get_logger(__name__)


@dataclass
class Prompting:
    """Stage that reads rows, resets environments, and encodes prompts."""

    context: Context
    encoder: PromptEncoder
    toolbox: Environments
    stream: RowStream
    notes: CardNotes
    reward_functions: RewardFunctions
    encodes_text: bool  # `False` if `rollout_func` tokenizes prompts without media
    unchecked_datasets: set[str]  # names of datasets whose first batch is still to be checked
    looked_for_media: bool = False  # whether the media of environments were looked for in a batch
    warned_of_positions: bool = False  # whether a warning of positions beyond the model's range was logged

    def __call__(self, inputs: Sequence[Any]) -> Prompted:
        """Checks a batch of rows, returns its prompts, and notes columns and modalities for the model card."""
        rows = list(inputs) if isinstance(inputs[0], EncodedRow) else self.stream.without_prompts(inputs)
        self._check_rows([row.stored for row in rows])
        batch_index = getattr(inputs, "batch_index", None) if self.context.is_training else None
        prompted = self.collect(rows, batch_index)
        prompted = replace(prompted, source=replace(prompted.source, n_counted=getattr(inputs, "n_counted", None)))
        source = prompted.source
        self.notes.add(source.rows[0], source.messages, [prompt.modalities for prompt in prompted.prompts])
        if prompted.prompts and not self.warned_of_positions:  # no prompts if `rollout_func` encodes them
            self.warned_of_positions = warn_of_positions(prompted.prompts, source.row_indices, self.encoder.model)
        return prompted

    def collect(self, rows: Sequence[EncodedRow], batch_index: int | None = None) -> Prompted:
        """Returns rows, one per completion, with their environments and encoded prompts."""
        return collect(
            rows,
            self.encoder,
            self.toolbox,
            encodes_text=self.encodes_text,
            group_size=self.context.group_size,
            pad_token_id=self.tokenizer.pad_token_id,
            accelerator=self.context.accelerator,
            step=self.context.step,
            batch_index=batch_index,
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return tokenizer_of(self.encoder.processor)

    @property
    def _reads_columns(self) -> bool:
        # Reward models get no columns, so no name of a column is wrong for them
        return not all(isinstance(function, nn.Module) for function in self.reward_functions.functions)

    def _check_rows(self, rows: list[Row]) -> None:
        if self._reads_columns:
            check_reward_columns(rows[0], 0)
        if self.toolbox.factories:  # environments make prompts, and may read any column
            return
        for row in rows:
            check_has_prompt(row)
        name = "train_dataset" if self.context.is_training else "eval_dataset"
        if name in self.unchecked_datasets:
            self.unchecked_datasets.remove(name)
            datasets = {name: [dict(row) for row in rows]}
            warn_of_unread_media(
                self.context.args, datasets, input_modalities(self.encoder.model), dataset_part="first"
            )

    def read_row(self, row: Row) -> list:
        """Returns the prompts of a row, also its teacher's, without decoding media. Asks environments for the row."""
        if self.toolbox.factories:
            self.toolbox.check_row(row)
            return []
        if not self.encodes_text:  # `rollout_func` reads the messages
            return self.encoder.messages([row])
        prompts = [self.encoder.read_row(row)]
        if self.context.args.encodes_teacher_prompts and has_teacher_prompt(row):
            prompts.append(self.encoder.read_row(row, TEACHER))
        return prompts

    def check_new(self, datasets: dict[str, Any], reward_funcs: Sequence[Any]) -> None:
        """Checks datasets for evaluation that the constructor didn't get, as it checks its own."""
        if not self.toolbox.factories:  # environments may read any column
            takes = input_modalities(self.encoder.model)
            warn_of_unread_media(self.context.args, datasets, takes, reward_funcs=reward_funcs)
        self.check_held_out(datasets)

    def check_held_out(self, datasets: Mapping[str, Any]) -> None:
        """
        Checks the first rows of datasets for evaluation before training begins, see
        [`~trainers.base.dataset_checks.check_held_out`].
        """
        self.unchecked_datasets |= unchecked_datasets(datasets)
        takes = input_modalities(self.encoder.model)
        for row in check_held_out(self.context.args, datasets, self.stream, takes):
            if self._reads_columns:
                check_reward_columns(row, 0)
            self.toolbox.check_row(row)

    def look_for_media(self, prompted: Prompted) -> None:
        """Warns if no prompt and no result of a tool has media in the first batch of environments."""
        if self.looked_for_media or not self.toolbox.factories or not prompted.prompts:
            return
        self.looked_for_media = True
        takes = input_modalities(self.encoder.model)
        warning = without_media("The environments", prompted.source.rows[0], takes)
        if warning and not self.notes.modalities:
            logger.warning(warning)
