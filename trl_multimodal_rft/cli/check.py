# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft check`: a report on a dataset, with rows that can't train, lengths, and sizes of media."""

import argparse
import hashlib
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.initialization import no_init_weights

from ..credentials import shown_url, without_credentials
from ..data.reading.refs import MediaError, iter_refs
from ..data.reading.rules import OWN_NAMES, rules_of
from ..data.reading.sizes import media_size
from ..data.rows.batches import DatasetRows, Row, too_few_rows
from ..data.rows.columns import MEDIA_COLUMNS
from ..data.rows.counts import empty_cells
from ..data.rows.features import undecoded
from ..data.rows.load import load_rows
from ..data.rows.pairs import COMPLETIONS, check_text_only, put_answer_media, read_answer
from ..data.rows.unread import check_columns, check_has_prompt, check_ignored
from ..encoding.media import decode_media
from ..encoding.messages import opened_thoughts
from ..encoding.processors import load_processor, tokenizer_of
from ..encoding.prompts import placeholder_token_ids
from ..families import MODALITIES, input_modalities
from ..models.pretrained import read_config
from ..progress import progress_bar
from ..reporting.curves import save_figure
from ..reporting.model_card import in_code
from ..reporting.plots import check_plot, histograms
from ..rewards.named import check_reward_columns, load_reward_funcs
from ..rollout.prompt_encoder import PromptEncoder
from .prompts import with_system_message, with_texts


_LISTED = 20  # maximum number of rows and columns that the report lists for a cause
_SILENCE = 1e-3  # peak below which a sound counts as silence
_TOKENS = ("prompt", "text", *MODALITIES)
_POINTS = "min | median | p90 | p99 | max"  # columns for a distribution
_OF_MODALITY = {"image": "of an image", "audio": "of a sound", "video": "of a video"}


@dataclass
class CheckedRow:
    """Findings on one row."""

    index: int  # row index in the dataset
    media: dict[str, int] = field(default_factory=dict)  # number of media by modality
    tokens: int | None = None  # tokens of the prompt, `None` if it can't be encoded
    thinks: bool = False  # whether the prompt ends with an open `<think>`
    media_tokens: dict[str, int] = field(default_factory=dict)  # number of placeholders in the prompt, by modality
    sizes: dict[str, list[float]] = field(default_factory=dict)  # by measure, such as 'seconds of a sound'
    is_cut: bool = False  # whether the row has audio longer than the model's window
    files: dict[str, str] = field(default_factory=dict)  # names of media files by column
    silent: str | None = None  # column of the first silent sound
    digest: bytes = b""  # digest of the prompt and the decoded media
    error: str | None = None  # reason why the row would not train
    column: str | None = None  # column that the error names


class RowChecker(torch.utils.data.Dataset):
    """Dataset that encodes rows like the trainers. A key is a row index, or a tuple of row index and row."""

    def __init__(
        self,
        rows: Dataset | IterableDataset | None,
        model: PreTrainedModel,
        processor: ProcessorMixin | PreTrainedTokenizerBase,
        args: argparse.Namespace,
    ):
        self.rows: Any = DatasetRows(rows) if isinstance(rows, Dataset) else None
        self.raises_overlong = args.audio_overlong == "raise"
        self.encoder = PromptEncoder(
            model,
            processor,
            args.chat_template_kwargs,
            media_rules=rules_of(args.media_rules, **{name: getattr(args, name) for name in OWN_NAMES}),
            ignored_media_columns=args.ignored_media_columns or (),
            keep_decoded=True,
        )
        self.token_ids = {
            kind: torch.tensor(sorted(ids)) for kind, ids in placeholder_token_ids(model, processor).items()
        }

    def __getitem__(self, key: int | tuple[int, dict[str, Any]]) -> CheckedRow:
        checked = CheckedRow(key if isinstance(key, int) else key[0])
        try:
            self._encode(self.rows[key] if isinstance(key, int) else Row(*key), checked)
        except Exception as error:  # any error would end a run
            text = without_credentials(str(error))
            location = re.match(r"(?:row [^,]*, )?column '([^']*)'(?: \(([^)]*)\))?: ", text)
            if location is None:
                checked.error = f"{type(error).__name__}: {text}"
            else:
                checked.column, file = location.groups()
                checked.error = f"'{file}': " * (file is not None) + text[location.end() :]
        return checked

    def _encode(self, row: Row, checked: CheckedRow) -> None:
        check_has_prompt(row)
        ignored, rules = self.encoder.ignored_media_columns, self.encoder.media_rules
        if all(name in row for name in COMPLETIONS):
            row = put_answer_media(row, ignored, rules=rules)
        elif isinstance(row.get("label"), bool) and "completion" in row:  # a row for KTO
            check_text_only(read_answer(row["completion"], "completion", row.row_index, rules))
        (prompt,) = self.encoder.messages([row])
        media_columns = [column for column in MEDIA_COLUMNS if column not in self.encoder.ignored_media_columns]
        if isinstance(prompt, str) and any(column in row for column in media_columns):
            prompt = [{"role": "user", "content": prompt}]  # as trainers do in a batch with media
        refs, answer_refs = list(iter_refs(prompt)), list(iter_refs([row.get(name) for name in COMPLETIONS]))
        for ref in refs + answer_refs:
            checked.media[ref.modality] = checked.media.get(ref.modality, 0) + 1
            path = ref.stored.get("path") if isinstance(ref.stored, dict) else ref.stored
            if isinstance(path, str | os.PathLike):
                checked.files[ref.column] = shown_url(os.path.basename(path))
            with suppress(MediaError):  # encoding reports the error below
                for name, size in media_size(ref).items():
                    checked.sizes.setdefault(f"{name} {_OF_MODALITY[ref.modality]}", []).append(size)
        decode_media(answer_refs, self.encoder.processor, self.encoder.audio_overlong)
        try:
            encoded = self.encoder.encode(prompt, row.row_index)
        except ValueError as error:
            if "audio" not in checked.media:
                raise
            try:  # if the row is valid with cut audio, its audio is too long
                encoded = replace(self.encoder, audio_overlong="truncate").encode(prompt, row.row_index)
            except ValueError:
                raise error from None
            checked.is_cut = True
            if self.raises_overlong:
                raise
        checked.tokens = len(encoded)
        checked.thinks = bool(opened_thoughts(encoded.input_ids, tokenizer_of(self.encoder.processor)))
        digest = hashlib.blake2b(encoded.input_ids.numpy().tobytes(), digest_size=16)
        audio_columns = iter([ref.column for ref in refs if ref.modality == "audio"])
        for _, decoded in encoded.decoded:
            for medium in (medium for media in decoded.media.values() for medium in media):
                digest.update(np.asarray(medium).tobytes())
            for sound, column in zip(decoded.media.get("audio", ()), audio_columns, strict=False):
                if np.abs(sound).max() < _SILENCE:
                    checked.silent = checked.silent or column
            for frames in decoded.media.get("video", ()):
                height, width = sorted(frames.shape[1:])[1:]  # the smallest dimension is the channels
                checked.sizes.setdefault("sampled frames of a video", []).append(len(frames))
                checked.sizes.setdefault("pixels of all sampled frames", []).append(len(frames) * height * width)
        counts = {kind: int(torch.isin(encoded.input_ids, ids).sum()) for kind, ids in self.token_ids.items()}
        if checked.media.keys() == {"video"} and not counts["video"]:
            counts["video"] = counts["image"]  # some processors write videos with the image's token
        checked.media_tokens = {kind: counts[kind] for kind in checked.media}
        checked.digest = digest.digest()


def without_weights(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """Returns a model on the meta device, where weights take no memory."""
    with torch.device("meta"), no_init_weights():
        return model_class._from_config(config)


def check(rows: Dataset | IterableDataset, checker: RowChecker, num_workers: int) -> Iterator[CheckedRow]:
    # Workers read a dataset's rows by index. A stream is read in this process, which sends the rows to the workers.
    keys: Iterable = range(len(rows)) if isinstance(rows, Dataset) else enumerate(undecoded(rows))
    loader = DataLoader(checker, sampler=keys, batch_size=None, num_workers=num_workers)
    n_checked = 0
    try:
        with progress_bar(len(rows) if isinstance(rows, Dataset) else None, "check") as bar:
            for checked in loader:
                yield checked
                n_checked += 1
                bar.update()
    except RuntimeError as error:  # an error of a worker; `CheckedRow.error` holds errors of rows
        raise ValueError(
            f"A process was killed while it read one of the rows from {n_checked} on: a decoder crashed, or memory "
            f"ran out, of which fewer `--num_workers` need less ({error})."
        ) from error


@dataclass
class Rows:
    """Rows with the same finding."""

    example: str = ""  # error of the first row
    count: int = 0
    first: list[str] = field(default_factory=list)  # indices of the first rows, with a file or an earlier equal row
    columns: dict[str, None] = field(default_factory=dict)  # columns, in order of appearance

    def add(self, row: CheckedRow, note: str | None = None) -> None:
        self.count += 1
        if len(self.first) < _LISTED:
            note = note or row.files.get(row.column or row.silent or next(iter(row.files), ""))
            self.first.append(f"{row.index} ({note})" if note else str(row.index))
        if row.column is not None and len(self.columns) < _LISTED:
            self.columns[row.column] = None

    @property
    def listed(self) -> str:
        return ", ".join(self.first) + (f" and {self.count - len(self.first)} more" * (self.count > _LISTED))


@dataclass
class Report:
    """
    Findings of a check, for a report in Markdown. To save memory, it stores only numbers and a digest per row, and
    names and errors of the first rows with a finding.
    """

    title: str
    limit: int | None  # maximum number of tokens of a prompt
    cuts: bool  # whether audio beyond the model's window is cut
    warnings: list[str] = field(default_factory=list)
    empty: str = ""  # note on columns with empty cells
    is_refused: bool = False  # whether the dataset as a whole would not train
    rows: int = 0
    sizes: dict[str, array] = field(default_factory=dict)
    causes: dict[tuple[str, str], Rows] = field(default_factory=dict)  # by column and masked error
    overlong: Rows = field(default_factory=Rows)
    cut: Rows = field(default_factory=Rows)
    silent: Rows = field(default_factory=Rows)
    repeated: Rows = field(default_factory=Rows)
    thinks: int = 0  # rows whose prompt ends with an open `<think>`
    first_rows: dict[bytes, int] = field(default_factory=dict)  # index of the first row with a digest
    tokens: dict[str, array] = field(default_factory=lambda: {name: array("q") for name in _TOKENS})
    media: dict[str, array] = field(default_factory=lambda: {kind: array("q") for kind in MODALITIES})

    @property
    def failed(self) -> int:
        """Number of rows that would not train."""
        if self.is_refused:
            return self.rows
        return sum(cause.count for cause in self.causes.values()) + self.overlong.count

    def add(self, row: CheckedRow) -> None:
        self.rows += 1
        for kind, number in row.media.items():
            self.media[kind].append(number)
        for name, values in row.sizes.items():
            self.sizes.setdefault(name, array("d")).extend(values)
        if row.is_cut:
            self.cut.add(row)
        if row.error is not None:
            # Errors with one cause quote different names, numbers and objects, so these are masked
            key = re.sub(r"'[^']*'|\"[^\"]*\"|<[^>]*>|[\d.]*\d", "-", row.error)
            column = re.sub(r"\[\d+\]", "[]", row.column or "")
            self.causes.setdefault((column, key), Rows(row.error)).add(row)
        if row.tokens is None:
            return
        self.thinks += row.thinks
        if row.silent is not None:
            self.silent.add(row)
        first = self.first_rows.setdefault(row.digest, row.index)
        if first != row.index:
            self.repeated.add(row, f"as {first}")
        text = row.tokens - sum(row.media_tokens.values())
        for name, number in {"prompt": row.tokens, "text": text, **row.media_tokens}.items():
            self.tokens[name].append(number)
        if self.limit is not None and row.tokens > self.limit:
            self.overlong.add(row)

    def text(self) -> str:
        verdict = f"{self._share(self.failed)} would not" if self.failed else f"All {self.rows} rows would"
        parts = [f"# Check of {self.title}", f"{verdict} train." + f" Note: {self.empty}." * bool(self.empty)]
        parts += [f"    {' '.join(warning.split())}" for warning in self.warnings]
        parts += ["## What would fail"] if self.causes else []
        for cause in sorted(self.causes.values(), key=lambda cause: -cause.count):
            columns = f" in {', '.join(map(in_code, cause.columns))}" if cause.columns else ""
            parts += [f"### {self._share(cause.count)}{columns}", f"    {' '.join(cause.example.split())}"]
            parts.append(f"Rows: {cause.listed}")
        total = sum(self.tokens["prompt"])
        lengths = [[*row, f"{100 * sum(self.tokens[row[0]]) / total:.3g} %"] for row in _percentiles(self.tokens)]
        parts += _section("## Lengths", f"tokens of | rows | {_POINTS} | share", lengths)
        if self.limit is not None and lengths:
            parts.append(f"Overlong, of more than {self.limit} tokens: {self._listed(self.overlong)}")
        parts += _section("## Sizes of media", f"size | number | {_POINTS}", _percentiles(self.sizes))
        counts = {kind: numbers for kind, numbers in self.media.items() if numbers}
        rows = [[kind, len(n), min(n), int(np.median(n)), max(n), sum(n)] for kind, n in counts.items()]
        parts += _section("## Media of a row", "kind | rows | min | median | max | all", rows)
        if "audio" in counts:
            parts.append(f"Audio beyond the model's window{', which is cut' * self.cuts}: {self._listed(self.cut)}")
            parts.append(f"Silence, nowhere above -60 dB: {self._listed(self.silent)}")
        parts.append(f"Rows that repeat the prompt and media of an earlier row: {self._listed(self.repeated)}")
        opened = "The prompt opens thoughts (`<think>`), with which completions begin in rewards and logs"
        parts += [f"{opened}: {self._share(self.thinks)}."] * bool(self.thinks)
        return "\n\n".join(parts) + "\n"

    def _share(self, count: int) -> str:
        return f"{count} of {self.rows} rows ({100 * count / self.rows:.3g} %)"

    def _listed(self, rows: Rows) -> str:
        return self._share(rows.count) + f". Rows: {rows.listed}" * bool(rows.count)


def _percentiles(numbers: Mapping[str, array]) -> list[list[str]]:
    rows = []
    for name, values in numbers.items():
        if values:
            points = np.percentile(values, (0, 50, 90, 99, 100), method="higher")
            rows.append([name, str(len(values)), *(f"{p:.0f}" if p.is_integer() else f"{p:.6g}" for p in points)])
    return rows


def _section(title: str, header: str, rows: Sequence[Sequence[str | int]]) -> list[str]:
    """Returns a title and a table, or an empty list without rows."""
    lines = [header, "---" + " | ---" * header.count("|"), *(" | ".join(map(str, row)) for row in rows)]
    return [title, "\n".join(f"| {line} |" for line in lines)] if rows else []


def run(args: argparse.Namespace) -> None:
    check_ignored(args.ignored_media_columns)
    check_plot(args.plot)
    source: dict[str, Any] = {"revision": args.model_revision, "trust_remote_code": args.trust_remote_code}
    config, model_class = read_config(args.model_name_or_path, **source)
    try:
        processor = load_processor(args.model_name_or_path, **source)
    except OSError as error:
        raise ValueError(f"{args.model_name_or_path!r} has no processor: {error}") from error
    model = without_weights(config, model_class)
    limit = args.max_prompt_length
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    contexts = [length for length in (positions, args.vllm_max_model_length) if length is not None]
    if limit is None and contexts:
        limit = min(contexts) - args.max_completion_length
    rows = load_rows(args.dataset_name, args.dataset_config, args.dataset_split, args.dataset_streaming)
    rows = with_system_message(with_texts(rows, {"prompt": args.prompt}), args.system_prompt)
    title = f"{in_code(args.dataset_name)} ({in_code(args.dataset_split)}) with {in_code(args.model_name_or_path)}"
    report = Report(title, limit, args.audio_overlong == "truncate")
    try:
        ignored, takes = args.ignored_media_columns or (), input_modalities(model)
        warning = check_columns(rows, "the dataset", ignored, reads=("prompt", *COMPLETIONS), takes=takes)
        if warning is not None:
            report.warnings.append(warning)
        report.warnings += check_reward_columns(load_reward_funcs(args.reward_funcs or ()), rows)
        if isinstance(rows, Dataset) and 0 < len(rows) < args.batch_rows:
            raise too_few_rows(len(rows), args.batch_rows, is_group=True)
    except ValueError as error:  # an error of the dataset as a whole
        report.warnings.append(str(error))
        report.is_refused = True
    report.empty = empty_cells(rows, {*MEDIA_COLUMNS, "solution"}.difference(args.ignored_media_columns or ()))
    if "prompt" in (rows.column_names or ()):
        columns = ("prompt", *COMPLETIONS, "completion", "label", *MEDIA_COLUMNS)
        rows = rows.select_columns([name for name in rows.column_names if name in columns])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers' threads don't survive a fork
    for checked in check(rows, RowChecker(rows, model, processor, args), args.num_workers):
        report.add(checked)
    if not report.rows:
        raise ValueError(f"{args.dataset_name!r} has no rows.")
    text = report.text()
    print(text, end="")
    if args.output is not None:
        Path(args.output).write_text(text, encoding="utf-8")
    if args.plot is not None:
        tokens = {f"tokens of {name}": numbers for name, numbers in report.tokens.items()}
        save_figure(histograms({**tokens, **report.sizes}, "number"), Path(args.plot))
    if report.failed:
        raise SystemExit(1)
