# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Datasets of text whose rows are concatenated before a run, which TRL calls packing."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

from accelerate.logging import get_logger
from datasets import Dataset
from datasets.fingerprint import Hasher
from trl import pack_dataset
from trl.trainer.utils import global_then_local_main_first

from ...data.reading.refs import OverlongRow
from ...data.rows.batches import Row
from ...data.rows.unread import lists_columns
from ...encoding.concatenated import PART_LENGTHS
from ...versions import PACKAGE, installed_versions
from ..base.argument_checks import mapping
from ..base.signatures import Rows
from .data import SupervisedCollator, packs, splits_rows


logger = get_logger(__name__)


@dataclass
class Concatenator:
    """
    Concatenator of rows of text, of at most `max_length` tokens together, and their lengths, by the collator, which
    takes a row apart again, so that rows don't see each other.
    """

    collator: SupervisedCollator

    def takes(self, dataset: Rows, split: str) -> bool:
        """
        Returns whether a split's rows are concatenated: those of a dataset of text, without a transform. Rows of other
        datasets are packed with those of their micro-batch.
        """
        args = self.collator.args
        if (
            not packs(args, split)
            or args.max_length is None
            or mapping(args.dataset_kwargs).get("skip_prepare_dataset")
        ):
            return False
        if not isinstance(dataset, Dataset) or not lists_columns(dataset) or PART_LENGTHS in dataset.column_names:
            return False
        return self.collator.holds_text_alone(dataset)

    def concatenated(self, dataset: Dataset, split: str) -> Dataset:
        """Returns TRL's concatenated rows: `input_ids`, `labels` and, unless they are wrapped, `seq_lengths`."""
        args = self.collator.args
        cuts_rows = not splits_rows(args, split)
        n_rows = len(dataset)
        dataset = dataset.with_format(None)
        with global_then_local_main_first():
            tokens = dataset.map(
                self._tokenized,
                fn_kwargs={"cuts_rows": cuts_rows},
                with_indices=True,
                batched=True,
                remove_columns=dataset.column_names,
                # The default would hash the model's weights
                new_fingerprint=self._fingerprint_of_tokens(dataset, cuts_rows),
                desc=f"Tokenizing {split} dataset",
            )
            if len(tokens) < n_rows:
                logger.warning(
                    f"{n_rows - len(tokens)} of the {n_rows} rows of the {split} dataset are left out, because "
                    f"`max_length` ({args.max_length}) leaves nothing of them to learn."
                )
            if args.shuffle_dataset:  # otherwise only neighbors share a concatenated row
                tokens = tokens.shuffle(seed=args.seed)
            max_length = cast(int, args.max_length)  # `takes` refuses a dataset without it
            joined = pack_dataset(tokens, max_length, args.packing_strategy, {"desc": f"Packing {split} dataset"})
            if not cuts_rows:
                joined = joined.filter(_is_learned, desc=f"Dropping fully masked rows of the {split} dataset")
        logger.info(f"The {n_rows} rows of the {split} dataset are packed into {len(joined)}.")
        return joined

    def _tokenized(self, batch: dict[str, list], indices: list[int], cuts_rows: bool) -> dict[str, list]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        tokens: dict[str, list] = {"input_ids": [], "labels": []}
        for index, row in zip(indices, rows, strict=True):
            try:
                columns = self.collator.tokens(Row(index, row), cut=cuts_rows)
            except OverlongRow:
                continue  # nothing to learn is left of it
            for name, values in tokens.items():
                values.append(columns[name])
        return tokens

    def _fingerprint_of_tokens(self, dataset: Dataset, cuts_rows: bool) -> str:
        """Returns a fingerprint of what decides a dataset's tokens, by which a later run finds them in the cache."""
        collator = self.collator
        args = collator.args
        names = ("max_length", "truncation_mode", "completion_only_loss", "assistant_only_loss", "dataset_text_field")
        options = {name: getattr(args, name) for name in (*names, "special_tokens_in_text", "ignored_media_columns")}
        parts = [dataset._fingerprint, collator.processing_class, collator.chat_template, collator.formatting_func]
        return Hasher.hash([installed_versions([PACKAGE]), *parts, options, cuts_rows])


def _is_learned(row: dict[str, Any]) -> bool:
    """Returns whether a concatenated row has a token to learn after the first of a part, which nothing predicts."""
    lengths = row.get(PART_LENGTHS) or [len(row["labels"])]
    firsts = {0, *accumulate(lengths)}
    return any(label != -100 and index not in firsts for index, label in enumerate(row["labels"]))
