# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Dataset columns and collator of completions that are labelled as good or bad."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset, concatenate_datasets
from trl.data_utils import extract_prompt, unpair_preference_dataset

from ...data.rows.batches import Row
from ...data.rows.cells import truth_value
from ...data.rows.labels import with_class_names
from ...data.rows.names import MEDIA_COLUMNS, other_layout
from ...data.rows.unread import lists_columns
from ...encoding.sequences import PreferencePair
from ..reading.collator import missing_columns_error
from .data import PairCollator
from .kto_config import MultimodalKTOConfig


logger = get_logger(__name__)

# Columns of the reference's log-probabilities: of the row's completion, and of the completion in the KL estimate
REFERENCE_COLUMNS = ("ref_logps", "ref_KL_logps")
# Column with the index of the row whose completion `ref_KL_logps` scores
KL_ROW = "KL_row"
COLUMNS = (
    "prompt",
    "completion",
    "label",
    "tools",
    "chat_template_kwargs",
    *MEDIA_COLUMNS,
    *REFERENCE_COLUMNS,
    KL_ROW,
)
# TRL unpairs a dataset in blocks of this many pairs, and puts the chosen completions of a block first
_PAIRS_PER_BLOCK = 1000


label_of = partial(truth_value, is_required=True)


@dataclass
class LabelledCollator(PairCollator[MultimodalKTOConfig]):
    """
    Collator that encodes a prompt and its media once for two completions: its own, and the completion of the previous
    row in the micro-batch. TRL estimates the KL divergence from the second completion. If a batch of evaluation is
    larger than a micro-batch of training, rows are paired within parts of training's size.
    """

    _token_names = ("prompt_ids", "completion_ids")
    _kind = "completion"
    _cell_readers = {"label": label_of}
    calculate_kl: bool = True  # whether the loss has a KL estimate

    @property
    def reference_columns(self) -> tuple[str, ...]:
        return REFERENCE_COLUMNS[: 2 if self.calculate_kl else 1]

    def _with_shared_sides(self, pairs: list[PreferencePair], rows: Sequence[Row]) -> list[PreferencePair]:
        """Cuts pairs to `max_length`, after another row has lent its whole completion for the KL estimate."""
        if self.calculate_kl:
            lent = [replace(pairs[i].sides[0], is_counted=False) for i in self._kl_indices(len(pairs))]
            pairs = [replace(pair, sides=[*pair.sides, side]) for pair, side in zip(pairs, lent, strict=True)]
        return list(map(self._cut, pairs))

    def _column_tensors(self, rows: Sequence[Row], pairs: Sequence[PreferencePair]) -> dict[str, torch.Tensor]:
        """
        Also returns `KL_row`, `(B,)`, the row indices of the completions in the KL estimate. Raises `ValueError` if
        the reference scored the rows in other micro-batches.
        """
        kl_rows = [rows[i].row_index for i in self._kl_indices(len(rows))]
        columns = {**super()._column_tensors(rows, pairs), KL_ROW: torch.tensor(kl_rows)}
        if REFERENCE_COLUMNS[1] in columns:
            for row, kl_row in zip(rows, kl_rows, strict=True):
                if row.get(KL_ROW) != kl_row:
                    raise ValueError(
                        f"row {row.row_index}: `ref_KL_logps` scores the completion of row {row.get(KL_ROW)}, but "
                        f"this micro-batch has the completion of row {kl_row} in its place; score the reference with "
                        "the same batch size and order, or drop the column."
                    )
        return columns

    def _kl_indices(self, n: int) -> list[int]:
        """
        Returns, for each of `n` rows, the batch index of the row that lends its completion to the KL estimate.

        This is the previous row. For the first row of a micro-batch, it is the last row. With micro-batches of 3, the
        indices for 5 rows are 2, 0, 1, 4 and 3.
        """
        size = self.args.per_device_train_batch_size
        micro_batch_starts = [i - i % size for i in range(n)]
        return [i - 1 if i > start else min(start + size, n) - 1 for i, start in enumerate(micro_batch_starts)]

    def encode(self, row: Row) -> PreferencePair:
        """Encodes a row, which isn't cut yet. Raises `OverlongRow` if the prompt leaves no room in `max_length`."""
        pair = self._encoded_pair(row)
        self._check_room(pair, row)
        return pair

    def _prepare(self, dataset: Dataset | IterableDataset, name: str) -> Dataset | IterableDataset:
        if isinstance(dataset, Dataset) and not lists_columns(dataset):
            return dataset  # the dataset's transform may return other columns
        columns, _ = self._columns_of(dataset, name)
        if {"chosen", "rejected"} <= columns and "completion" not in columns:
            dataset = unpair_dataset(dataset, columns)
            columns = columns - {"chosen", "rejected"} | {"prompt", "completion", "label"}
        if not {"prompt", "completion", "label"} <= columns:
            needed = "`prompt`, `completion` and `label`, or `prompt`, `chosen` and `rejected`"
            raise missing_columns_error(
                name, columns, needed, other_layout(dataset.features or dict.fromkeys(columns))
            )
        dataset = with_class_names(dataset, ["label"])
        if isinstance(dataset, Dataset):
            labels = [label_of(cell, "label", i) for i, cell in enumerate(dataset["label"])]
            if name == "train":
                warn_of_balance(labels, self.args.desirable_weight, self.args.undesirable_weight)
        return dataset


def unpair_dataset(dataset: Dataset | IterableDataset, columns: set[str]) -> Dataset | IterableDataset:
    """
    Returns a dataset of pairs as labelled completions, in TRL's order, without decoding media.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Rows with `chosen` and `rejected`, and with or without `prompt`.
        columns (`set[str]`):
            Names of the dataset's columns.

    Returns:
        Rows with `prompt`, `completion` and `label`, and the other columns of their pairs. In a block of 1,000 pairs,
        the chosen completions come first: two pairs give chosen 0, chosen 1, rejected 0 and rejected 1.
    """
    if not isinstance(dataset, Dataset):
        dataset = dataset if "prompt" in columns else dataset.map(extract_prompt)
        return unpair_preference_dataset(dataset)
    if "prompt" not in columns:
        prompts_and_completions = dataset.select_columns(["chosen", "rejected"]).map(extract_prompt)
        dataset = concatenate_datasets(
            [dataset.remove_columns(["chosen", "rejected"]), prompts_and_completions], axis=1
        )
    dataset = dataset.remove_columns("label") if "label" in columns else dataset  # of the pair, not of a completion
    n = len(dataset)
    completion_columns = ("chosen", "rejected")
    labelled_datasets = [
        dataset.remove_columns(other).rename_column(column, "completion").add_column("label", [column == "chosen"] * n)
        for column, other in (completion_columns, completion_columns[::-1])
    ]
    starts = range(0, n, _PAIRS_PER_BLOCK)
    blocks = [np.arange(start, min(start + _PAIRS_PER_BLOCK, n)) for start in starts]
    # Once concatenated, the chosen completion of pair `i` has the index `i`, and the rejected one `n + i`
    order = np.concatenate([np.concatenate([block, block + n]) for block in blocks])
    return concatenate_datasets(labelled_datasets).select(order)


def warn_of_balance(labels: Sequence[bool], desirable_weight: float, undesirable_weight: float) -> None:
    """
    Warns if weights don't make up for unequal numbers of labels. By equation 8 of
    [KTO](https://huggingface.co/papers/2402.01306), weight times number should be 1 to 1.33 times as large for
    desirable completions as for undesirable ones.
    """
    if len({*labels}) == 1:
        logger.warning(
            f"All labels are {labels[0]}, so that KTO has no {'un' * labels[0]}desirable completions to learn from; "
            "check the column 'label', or add some."
        )
        return
    n_desirable = max(sum(labels), 1)
    n_undesirable = max(len(labels) - n_desirable, 1)
    if (
        n_desirable == n_undesirable
        or 1 <= desirable_weight * n_desirable / (undesirable_weight * n_undesirable) <= 1.33
    ):
        return
    desirable_range = [round(factor * n_undesirable * undesirable_weight / n_desirable, 2) for factor in (1, 1.33)]
    undesirable_range = [round(n_desirable * desirable_weight / n_undesirable / factor, 2) for factor in (1.33, 1)]
    logger.warning(
        f"{n_desirable} completions are desirable and {n_undesirable} aren't, and the weights of their losses don't "
        f"make up for the difference: set `desirable_weight` in {desirable_range}, or `undesirable_weight` in "
        f"{undesirable_range}."
    )
