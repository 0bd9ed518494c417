# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Dataset columns and collators of preferences between two completions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from datasets import Dataset
from trl.data_utils import get_dataset_column_names

from ...data.reading.refs import OverlongRow
from ...data.rows.batches import Row
from ...data.rows.cells import finite_number, truth_value
from ...data.rows.features import undecoded
from ...data.rows.labels import with_class_names
from ...data.rows.names import MEDIA_COLUMNS, other_layout
from ...data.rows.pairs import COMPLETIONS, TIE, is_equal_pair
from ...data.rows.unread import lists_columns
from ...encoding.join import padded
from ...encoding.prompts import EncodedPrompt, check_ids
from ...encoding.sequences import PreferencePair
from ...forward.scores import with_answer
from ...policy import Completions, PolicyForward
from ...rollout.view_prompts import view_of_row
from ...views.views import View
from ..reading.collator import ConfigT, RowCollator, missing_columns_error


if TYPE_CHECKING:  # importing a config takes 10 ms, so a trainer imports only its own
    from .dpo_config import MultimodalDPOConfig  # noqa: F401
    from .reward_config import MultimodalRewardConfig  # noqa: F401


# Columns of the reference's log-probabilities, in datasets that were scored before the run
REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps", "ref_view_logps")
COLUMNS = ("prompt", "chosen", "rejected", "tools", "chat_template_kwargs", *MEDIA_COLUMNS, *REFERENCE_COLUMNS)

# Further columns that a reward model reads
COMPARISON_COLUMNS = ("margin", "tie", "chosen_ids", "rejected_ids")


@dataclass
class PairCollator(RowCollator[ConfigT]):
    """Collator that encodes prompts once, with their media, and pads the completions of a micro-batch."""

    view: View | None = None  # view under which chosen completions count as rejected

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        """
        Encodes the rows of a micro-batch.

        Args:
            rows (`Sequence`):
                Rows of a dataset, or [`~rollout.stream.EncodedRow`]s.

        Returns:
            `dict`: `sequences` ([`~encoding.sequences.PreferencePair`]), length `B`. `viewed` has the indices of the
            `V` pairs with a view. `prompts`, `completion_ids`, `completion_mask` and `learned` (1 on tokens of text),
            `(2 * B + V, C)`, and `lengths` hold the chosen completions, then the rejected completions, then the chosen
            completions under the view. `attention_mask`, `(1, tokens)`, is for TRL's count of tokens. It has an entry
            for each token of both completions, and of a prompt before each. The reference's log-probabilities, `(B,)`,
            are included if rows have them; subclasses return other columns in their place. `plain` is described in
            [`~trainers.supervised.data.SupervisedCollator`]. `encode_view(i, view)` encodes the prompt of row `i`
            under a view.

            For the pairs 0 and 1, of which only pair 1 has a view, the completions are chosen 0, chosen 1, rejected 0,
            rejected 1, and chosen 1 under the view.
        """
        pairs = self._encoded_rows(rows)
        stored = self._stored_rows(rows)
        if self.view is not None and self.view.type.needs_other:
            messages = [self.conversation(row) for row in stored]
            for i, pair in enumerate(pairs):
                self._add_view(pair, stored, messages, i)
        viewed = [i for i, pair in enumerate(pairs) if pair.view is not None]
        # Triples: the pair, the name of its completion's column, and the prompt before the completion
        clean_completions = []
        for name in COMPLETIONS:
            clean_completions += [(pair, name, pair.prompt_before(name)) for pair in pairs]
        n_prompt_tokens = sum(len(prompt) for _, _, prompt in clean_completions)
        completions = [*clean_completions, *((pairs[i], "chosen", cast(EncodedPrompt, pairs[i].view)) for i in viewed)]
        ids, mask = padded([torch.tensor(getattr(pair, name), dtype=torch.long) for pair, name, _ in completions])
        return {
            "sequences": pairs,
            "prompts": [with_answer(self.model, prompt, pair.answers.get(name)) for pair, name, prompt in completions],
            "completion_ids": ids,
            "completion_mask": mask,
            "learned": padded([pair.learned(name).long() for pair, name, _ in completions])[0],
            "lengths": mask.sum(1).tolist(),
            "viewed": viewed,
            "attention_mask": mask.new_ones(1, n_prompt_tokens + int(mask[: len(clean_completions)].sum())),
            "plain": lambda load, i, answer=None: self._plain_outputs(stored[i], load(), answer),
            "encode_view": lambda i, view: self._encoder_of(stored[i]).encode_view(stored[i], view),
            **self._column_tensors(stored),
        }

    def _column_tensors(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Returns the reference's log-probabilities, if rows have them. `ref_view_logps` is NaN without a view."""
        columns = {
            name: [finite_number(row.get(name), name, row.row_index) for row in rows] for name in REFERENCE_COLUMNS
        }
        columns = {name: values for name, values in columns.items() if any(value is not None for value in values)}
        for name, values in columns.items():
            if None in values and name != REFERENCE_COLUMNS[2]:
                row = rows[values.index(None)].row_index
                raise ValueError(f"row {row} has no `{name}`, but other rows have it; add it, or remove the column.")
        return {
            name: torch.tensor([math.nan if value is None else value for value in columns[name]]) for name in columns
        }

    def _encoded_pair(self, row: Row, whole: bool = False) -> PreferencePair:
        """Returns a row as a pair that isn't cut, with checked ids. With `whole`, texts are tokenized as a whole."""
        pair = self._encoder_of(row).encode_preference(row, whole=whole)
        check_ids(torch.tensor([*pair.input_ids, *pair.chosen, *pair.rejected]), self.model.config, row.row_index)
        return pair

    def read(self, row: Row) -> list:
        self._column_tensors([row])
        return self._encoder_of(row).read(row, "pair")

    def _check_room(self, prompt: EncodedPrompt, row: Row) -> None:
        max_length = self.args.max_length
        if max_length is not None and not prompt.modalities and len(prompt) >= max_length:
            raise OverlongRow(
                f"row {row.row_index} has a prompt of {len(prompt)} tokens, which leaves none of `max_length` "
                f"({max_length}) to the completions; raise `max_length`, or shorten the prompt"
            )

    def _prepare(self, dataset: Any, name: str) -> Any:
        if isinstance(dataset, Dataset) and not lists_columns(dataset):
            return dataset  # the dataset's transform may return other columns
        columns, _ = self._columns_of(dataset, name)
        layout = other_layout(dataset.features or dict.fromkeys(columns))
        if not {"chosen", "rejected"} <= columns or (layout is not None and "prompt" not in columns):
            raise missing_columns_error(name, columns, "`prompt`, `chosen` and `rejected`", layout)
        if self.view is None and isinstance(dataset, Dataset):
            undecoded_rows = undecoded(dataset.select_columns([*COMPLETIONS]))
            pairs = (undecoded_rows.__getitems__([i])[0] for i in range(len(undecoded_rows)))
            if all(map(is_equal_pair, pairs)):
                raise ValueError(f"The {name} dataset prefers nothing: 'chosen' and 'rejected' are equal in all rows.")
        return dataset

    def _add_view(self, pair: PreferencePair, rows: Sequence[Row], messages: Sequence[str | list | None], i: int):
        """
        Adds the prompt under the view to the pair of row `i`, if the view applies to its media. `rows` is the whole
        micro-batch if the view takes media of another row, and then needs the rows' `messages`; else the row alone.
        """
        assert self.view is not None
        if any(map(self.view.applies_to, pair.modalities)):
            # Random numbers depend on the row, not on rank or epoch, so that the reference can score before the run
            view = view_of_row(self.view.seeded(self.args.seed), messages, [row.row_index for row in rows], i)
            pair.view = self._encoder_of(rows[i]).encode_view(rows[i], view)


@dataclass
class PreferenceCollator(PairCollator["MultimodalDPOConfig"]):
    """Collator of the pairs of which DPO prefers one completion."""

    _token_names = ("prompt_ids", "chosen_ids", "rejected_ids")

    def encode(self, row: Row) -> PreferencePair:
        """Encodes a row as a pair, of text cut to `max_length`. Raises `OverlongRow` if a prompt of text fills it."""
        pair = self._encoded_pair(row)
        max_length = self.args.max_length
        keeps_end = self.args.truncation_mode == "keep_end"
        if max_length is not None and not _holds_media(pair):
            if not keeps_end:
                self._check_room(pair, row)
            pair = pair.cut(max_length, self.model, from_end=keeps_end)
        # `__call__` adds views that take media of another row of the micro-batch
        if self.view is not None and not self.view.type.needs_other:
            self._add_view(pair, [row], [None], 0)
        return pair

    def _token_columns(self, row: Row) -> dict[str, list[int]]:
        pair = self._encoded_pair(row)
        return {"prompt_ids": pair.input_ids.tolist(), "chosen_ids": pair.chosen, "rejected_ids": pair.rejected}


@dataclass
class ComparisonCollator(PairCollator["MultimodalRewardConfig"]):
    """Collator that encodes and pads the pairs that a reward model compares."""

    _token_names = ("chosen_ids", "rejected_ids")

    def _prepare(self, dataset: Any, name: str) -> Any:
        is_tokenized = {"chosen_ids", "rejected_ids"} <= {*(get_dataset_column_names(dataset) or ())}
        dataset = dataset if is_tokenized else super()._prepare(dataset, name)
        return with_class_names(dataset, [TIE]) if lists_columns(dataset) else dataset

    def _column_tensors(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Returns `margin` and `tie`, `(B,)`. They are 0 and false for rows without these columns."""
        margins = [finite_number(row.get("margin"), "margin", row.row_index) or 0.0 for row in rows]
        ties = [truth_value(row.get(TIE), TIE, row.row_index) for row in rows]
        return {"margin": torch.tensor(margins), "tie": torch.tensor(ties)}

    def _token_columns(self, row: Row) -> dict[str, list[int]]:
        pair = self._encoded_pair(row, whole=True)
        return {f"{name}_ids": [*pair.input_ids.tolist(), *getattr(pair, name)] for name in COMPLETIONS}

    def encode(self, row: Row) -> PreferencePair:
        """Encodes a row as a pair. Raises `OverlongRow` if a prompt and completion of text exceed `max_length`."""
        pair = self._encoded_pair(row, whole=True)
        max_length = self.args.max_length
        n_tokens = len(pair) + max(len(pair.chosen), len(pair.rejected))
        if max_length is not None and n_tokens > max_length and not _holds_media(pair):
            raise OverlongRow(
                f"row {row.row_index} has {n_tokens} tokens, more than `max_length` ({max_length}), and completions "
                "to compare aren't cut; raise `max_length`"
            )
        return pair


def _holds_media(pair: PreferencePair) -> bool:
    return bool(pair.modalities or pair.answers)


def completions_to_score(policy: PolicyForward, inputs: dict[str, Any]) -> tuple[Completions, bool]:
    """Returns the completions of a micro-batch, and whether to pack them. Packing must save enough tokens."""
    prompts = inputs["prompts"]
    packed = policy.worth_packing(prompts, inputs["lengths"], len(prompts))
    return (prompts, inputs["completion_ids"], inputs["completion_mask"]), packed
