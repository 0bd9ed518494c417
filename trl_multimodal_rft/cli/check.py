# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft check`: which rows of a dataset would not train, and how long the others are."""

import argparse
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..data.columns import MEDIA_COLUMNS, iter_refs, rows_to_messages, without_credentials
from ..data.features import undecoded
from ..data.named import load_rows
from ..data.rows import DatasetRows, Row
from ..data.rules import RULE_NAMES, MediaRules
from ..data.unread import check_columns, check_has_prompt, check_ignored
from ..encoding.control_tokens import checked_prompt
from ..encoding.processors import load_processor
from ..encoding.prompts import encode_prompt, placeholder_token_ids, placeholder_tokens
from ..models.pretrained import read_config
from ..scripts.prompts import with_system_message, with_texts
from .check_report import CheckedRow, Report


class RowChecker(torch.utils.data.Dataset):
    """Rows by their place, encoded as trainers encode them."""

    def __init__(self, rows: Dataset | IterableDataset | None, model: PreTrainedModel, processor: Any, args):
        self.rows: Any = DatasetRows(rows) if isinstance(rows, Dataset) else None
        self.model = model
        self.processor = processor
        self.ignored = args.ignored_media_columns or ()
        self.template_kwargs = args.chat_template_kwargs
        self.overlong = args.audio_overlong
        self.rules = MediaRules(**{name: getattr(args, name) for name in RULE_NAMES})
        self.own_tokens = placeholder_tokens(model, processor)
        self.token_ids = {
            kind: torch.tensor(sorted(ids)) for kind, ids in placeholder_token_ids(model, processor).items()
        }

    def __getitem__(self, place: int | tuple[int, dict[str, Any]]) -> CheckedRow:
        checked = CheckedRow(place if isinstance(place, int) else place[0])
        try:
            row = self.rows[place] if isinstance(place, int) else Row(*place)
            self._encode(row, checked)
        except Exception as error:  # any of them would end a run
            text = without_credentials(str(error))
            where = re.match(r"(?:row [^,]*, )?column '([^']*)'(?: \(([^)]*)\))?: ", text)
            if where is None:
                checked.error = f"{type(error).__name__}: {text}"
            else:
                checked.column, file = where.groups()
                checked.error = f"'{file}': " * (file is not None) + text[where.end() :]
        return checked

    def _encode(self, row: Row, checked: CheckedRow) -> None:
        check_has_prompt(row)
        prompt = rows_to_messages([row], self.ignored, self.own_tokens, self.rules)[0]["prompt"]
        if isinstance(prompt, str) and any(column in row and column not in self.ignored for column in MEDIA_COLUMNS):
            prompt = [{"role": "user", "content": prompt}]  # as in a batch with media
        prompt = checked_prompt(prompt, self.processor, None, row.number)
        for ref in iter_refs(prompt):
            checked.media[ref.kind] = checked.media.get(ref.kind, 0) + 1
        arguments: Any = {"template_kwargs": self.template_kwargs, "row": row.number}
        try:
            encoded = encode_prompt(prompt, self.processor, self.model, **arguments)
        except ValueError as error:
            if "audio" not in checked.media:
                raise
            try:  # what is well when it is cut is overlong
                encoded = encode_prompt(prompt, self.processor, self.model, audio_overlong="truncate", **arguments)
            except ValueError:
                raise error from None
            checked.is_cut = True
            if self.overlong == "raise":
                raise
        checked.tokens = len(encoded)
        counts = {kind: int(torch.isin(encoded.input_ids, ids).sum()) for kind, ids in self.token_ids.items()}
        if checked.media.keys() == {"video"} and not counts["video"]:
            counts["video"] = counts["image"]  # some processors write videos with the image's token
        checked.media_tokens = {kind: counts[kind] for kind in checked.media}


def without_weights(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """Builds a model that takes no memory."""
    with torch.device("meta"), no_init_weights():
        return model_class._from_config(config)


def check(rows: Dataset | IterableDataset, checker: RowChecker, num_workers: int) -> Iterator[CheckedRow]:
    """Checks rows, in order, by several processes."""
    # Rows of a stream are read here, in their order, and sent to the processes like their places otherwise
    places: Iterable = range(len(rows)) if isinstance(rows, Dataset) else enumerate(undecoded(rows))
    loader = DataLoader(checker, sampler=places, batch_size=None, num_workers=num_workers)
    n_checked = 0
    try:
        for checked in tqdm(loader, total=len(rows) if isinstance(rows, Dataset) else None, unit="row", desc="check"):
            yield checked
            n_checked += 1
    except RuntimeError as error:  # rows have their own errors
        raise ValueError(
            f"A process was killed while it read one of the rows from {n_checked} on, by a decoder that crashed or "
            f"ran out of memory, of which fewer `--num_workers` need less ({error})."
        ) from error


def run(args: argparse.Namespace) -> None:
    """Checks a dataset, and prints what it found."""
    check_ignored(args.ignored_media_columns)
    source: dict[str, Any] = {} if args.model_revision is None else {"revision": args.model_revision}
    source |= {"trust_remote_code": True} if args.trust_remote_code else {}
    config, model_class = read_config(args.model_name_or_path, **source)
    try:
        processor = load_processor(args.model_name_or_path, **source)
    except OSError as error:
        raise ValueError(f"{args.model_name_or_path!r} has no processor: {error}") from error
    model = without_weights(config, model_class)
    limit = args.max_prompt_length
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is None and positions is not None:
        limit = positions - args.max_completion_length
    rows = load_rows(args.dataset_name, args.dataset_config, args.dataset_split, args.dataset_streaming)
    rows = with_system_message(with_texts(rows, {"prompt": args.prompt}), args.system_prompt)
    report = Report(
        args.dataset_name, args.dataset_split, args.model_name_or_path, limit, cuts=args.audio_overlong == "truncate"
    )
    try:
        warning = check_columns(rows, "the dataset", args.ignored_media_columns or (), takes=model.input_modalities)
        if warning is not None:
            report.warnings.append(warning)
    except ValueError as error:  # of no row in particular
        report.warnings.append(str(error))
        report.is_refused = True
    if "prompt" in (rows.column_names or ()):
        rows = rows.select_columns([name for name in rows.column_names if name in ("prompt", *MEDIA_COLUMNS)])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers' threads don't survive a fork
    for checked in check(rows, RowChecker(rows, model, processor, args), args.num_workers):
        report.add(checked)
    text = report.text()
    print(text, end="")
    if args.output is not None:
        Path(args.output).write_text(text, encoding="utf-8")
    if report.failed:
        raise SystemExit(1)
