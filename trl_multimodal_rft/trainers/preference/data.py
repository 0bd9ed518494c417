# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Dataset columns and collators of preferences between two completions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from datasets import Dataset
from trl.data_utils import get_dataset_column_names

from ...data.reading.refs import OverlongRow
from ...data.rows.batches import Row
from ...data.rows.cells import Cell, finite_number, truth_value
from ...data.rows.features import undecoded
from ...data.rows.labels import with_class_names
from ...data.rows.names import MEDIA_COLUMNS, other_layout
from ...data.rows.pairs import COMPLETIONS, TIE, is_equal_pair
from ...data.rows.unread import lists_columns
from ...encoding.join import padded
from ...encoding.prompts import check_ids
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
    # What a row is read as, see [`~encoding.supervised.SupervisedEncoder.read`], and whether texts are read as a whole
    _kind: ClassVar[Literal["pair", "completion"]] = "pair"
    _is_whole: ClassVar[bool] = False
    # Functions that read the cells of further columns, which become tensors
    _cell_readers: ClassVar[dict[str, Callable[[Cell, str, int], float]]] = {}

    @property
    def reference_columns(self) -> tuple[str, ...]:
        """Columns of the reference's log-probabilities, in the order of a row's sides."""
        return ()

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        """
        Encodes the rows of a micro-batch.

        Args:
            rows (`Sequence`):
                Rows of a dataset, or [`~rollout.stream.EncodedRow`]s.

        Returns:
            `dict`: `sequences` ([`~encoding.sequences.PreferencePair`]), length `B`. `prompts`, `completion_ids`,
            `completion_mask` and `learned` (1 on tokens of text), `(N, C)`, and `lengths` hold the first sides of all
            pairs, then the second sides, then the third ones. `viewed` has the indices of the pairs with a third side.
            `attention_mask`, `(1, tokens)`, is for TRL's count of tokens. It has an entry for each token of a row's
            own completions, and of a prompt before each. The reference's log-probabilities, `(B,)`, are included if
            rows have them, and NaN where a row has no such side. `plain` is described in
            [`~trainers.supervised.data.SupervisedCollator`]. `encode_view(i, view)` encodes the prompt of row `i`
            under a view.

            In DPO, the sides are the chosen completion, the rejected one, and the chosen one under the view. For the
            pairs 0 and 1, of which only pair 1 has a view, the completions are chosen 0, chosen 1, rejected 0,
            rejected 1, and chosen 1 under the view.
        """
        stored = self._stored_rows(rows)
        pairs = self._with_shared_sides(self._encoded_rows(rows), stored)
        by_side = zip_longest(*([(pair, side) for side in pair.sides] for pair in pairs))
        completions = [entry for entry in chain.from_iterable(by_side) if entry is not None]
        ids, mask = padded([torch.tensor(side.ids, dtype=torch.long) for _, side in completions])
        counted = [(pair.prompt_before(side), side.ids) for pair, side in completions if side.is_counted]
        n_tokens = sum(len(prompt) + len(side_ids) for prompt, side_ids in counted)
        return {
            "sequences": pairs,
            "n_counted": getattr(rows, "n_counted", len(rows)),
            "prompts": [with_answer(self.model, pair.prompt_before(side), side.answer) for pair, side in completions],
            "completion_ids": ids,
            "completion_mask": mask,
            "learned": padded([side.learned.long() for _, side in completions])[0],
            "lengths": mask.sum(1).tolist(),
            "viewed": [i for i, pair in enumerate(pairs) if len(pair.sides) > 2],
            "attention_mask": mask.new_ones(1, n_tokens),
            "plain": lambda load, i, answer=None: self._plain_outputs(stored[i], load(), answer),
            "encode_view": lambda i, view: self._encoder_of(stored[i]).encode_view(stored[i], view),
            **self._column_tensors(stored, pairs),
        }

    def _with_shared_sides(self, pairs: list[PreferencePair], rows: Sequence[Row]) -> list[PreferencePair]:
        """Returns the pairs of a micro-batch with the sides that take something of another row."""
        return pairs

    def _column_tensors(self, rows: Sequence[Row], pairs: Sequence[PreferencePair]) -> dict[str, torch.Tensor]:
        """Returns tensors of further columns, and the reference's log-probabilities, if rows have them."""
        columns = {}
        for name, read_cell in self._cell_readers.items():
            columns[name] = torch.tensor([read_cell(row.get(name), name, row.row_index) for row in rows])
        for i, name in enumerate(self.reference_columns):
            logps = [finite_number(row.get(name), name, row.row_index) for row in rows]
            needed = [k for k, pair in enumerate(pairs) if len(pair.sides) > i]
            missing = [rows[k].row_index for k in needed if logps[k] is None]
            if needed and len(missing) == len(needed):  # the trainer scores the reference itself
                continue
            if missing:
                raise ValueError(
                    f"row {missing[0]} has no `{name}`, but other rows have it; add it, or remove the column."
                )
            columns[name] = torch.tensor([math.nan if value is None else value for value in logps])
        return columns

    def _encoded_pair(self, row: Row) -> PreferencePair:
        """Returns a row as a pair that isn't cut, with checked ids."""
        encoder = self._encoder_of(row)
        is_pair = self._kind == "pair"
        pair = encoder.encode_preference(row, whole=self._is_whole) if is_pair else encoder.encode_completion(row)
        ids = [*pair.input_ids, *chain.from_iterable(side.ids for side in pair.sides)]
        check_ids(torch.tensor(ids), self.model.config, row.row_index)
        return pair

    def _token_columns(self, row: Row) -> dict[str, list[int]]:
        pair = self._encoded_pair(row)
        prompt_ids = pair.input_ids.tolist()
        if self._is_whole:
            return {f"{side.column}_ids": [*prompt_ids, *side.ids] for side in pair.sides}
        return {"prompt_ids": prompt_ids, **{f"{side.column}_ids": side.ids for side in pair.sides}}

    def read(self, row: Row) -> list:
        readers = dict.fromkeys(self.reference_columns, finite_number) | self._cell_readers
        for name, read_cell in readers.items():
            read_cell(row.get(name), name, row.row_index)
        return self._encoder_of(row).read(row, self._kind)

    def _cut(self, pair: PreferencePair) -> PreferencePair:
        """Cuts a pair of text to `max_length`."""
        max_length = self.args.max_length
        if max_length is None or pair.holds_media:
            return pair
        return pair.cut(max_length, self.model, from_end=self._keeps_end)

    def _check_room(self, pair: PreferencePair, row: Row) -> None:
        max_length = self.args.max_length
        if max_length is not None and not pair.holds_media and len(pair) >= max_length:
            raise OverlongRow(
                f"row {row.row_index} has a prompt of {len(pair)} tokens, which leaves none of `max_length` "
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


@dataclass
class PreferenceCollator(PairCollator["MultimodalDPOConfig"]):
    """Collator of the pairs of which DPO prefers one completion."""

    _token_names = ("prompt_ids", "chosen_ids", "rejected_ids")

    @property
    def reference_columns(self) -> tuple[str, ...]:
        return REFERENCE_COLUMNS[: 2 if self.view is None else 3]

    def encode(self, row: Row) -> PreferencePair:
        """Encodes a row as a pair, of text cut to `max_length`. Raises `OverlongRow` if a prompt of text fills it."""
        pair = self._encoded_pair(row)
        if not self._keeps_end:
            self._check_room(pair, row)
        pair = self._cut(pair)
        return pair if self.view is None or self.view.type.needs_other else self._with_view(pair, [row], [None], 0)

    def _with_shared_sides(self, pairs: list[PreferencePair], rows: Sequence[Row]) -> list[PreferencePair]:
        if self.view is None or not self.view.type.needs_other:
            return pairs
        messages = [self.conversation(row) for row in rows]
        return [self._with_view(pair, rows, messages, i) for i, pair in enumerate(pairs)]

    def _with_view(
        self, pair: PreferencePair, rows: Sequence[Row], messages: Sequence[str | list | None], i: int
    ) -> PreferencePair:
        """
        Returns the pair of row `i` with its chosen completion under the view, if the view applies to its media. `rows`
        is the whole micro-batch if the view takes media of another row, and then needs the rows' `messages`; else the
        row alone.
        """
        assert self.view is not None
        if not any(map(self.view.applies_to, pair.modalities)):
            return pair
        # Random numbers depend on the row, not on rank or epoch, so that the reference can score before the run
        view = view_of_row(self.view.seeded(self.args.seed), messages, [row.row_index for row in rows], i)
        prompt = self._encoder_of(rows[i]).encode_view(rows[i], view)
        return replace(pair, sides=[*pair.sides, replace(pair.sides[0], prompt=prompt, is_counted=False)])


def _number_or_zero(cell: Cell, column: str, row_index: int) -> float:
    return finite_number(cell, column, row_index) or 0.0


@dataclass
class ComparisonCollator(PairCollator["MultimodalRewardConfig"]):
    """Collator that encodes and pads the pairs that a reward model compares."""

    _token_names = ("chosen_ids", "rejected_ids")
    _is_whole = True
    # 0 and false for rows without these columns
    _cell_readers = {"margin": _number_or_zero, TIE: truth_value}

    def _prepare(self, dataset: Any, name: str) -> Any:
        is_tokenized = {"chosen_ids", "rejected_ids"} <= {*(get_dataset_column_names(dataset) or ())}
        dataset = dataset if is_tokenized else super()._prepare(dataset, name)
        return with_class_names(dataset, [TIE]) if lists_columns(dataset) else dataset

    def encode(self, row: Row) -> PreferencePair:
        """Encodes a row as a pair. Raises `OverlongRow` if a prompt and completion of text exceed `max_length`."""
        pair = self._encoded_pair(row)
        max_length = self.args.max_length
        n_tokens = len(pair) + max(len(side.ids) for side in pair.sides)
        if max_length is not None and n_tokens > max_length and not pair.holds_media:
            raise OverlongRow(
                f"row {row.row_index} has {n_tokens} tokens, more than `max_length` ({max_length}), and completions "
                "to compare aren't cut; raise `max_length`"
            )
        return pair


def completions_to_score(policy: PolicyForward, inputs: dict[str, Any]) -> tuple[Completions, bool]:
    """Returns the completions of a micro-batch, and whether to pack them. Packing must save enough tokens."""
    prompts = inputs["prompts"]
    packed = policy.worth_packing(prompts, inputs["lengths"], len(prompts))
    return (prompts, inputs["completion_ids"], inputs["completion_mask"]), packed
