# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft check`: a report on a dataset, with rows that can't train, lengths, and sizes of media."""

import argparse
import hashlib
import os
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.initialization import no_init_weights

from ..credentials import masked_url, without_credentials
from ..data.reading.refs import MediaError, iter_refs
from ..data.reading.rules import OPTION_NAMES, rules_of
from ..data.reading.sizes import media_size
from ..data.rows.batches import DatasetRows, Row, too_few_rows_error
from ..data.rows.cells import is_truth, truth_value
from ..data.rows.columns import as_text, further_keys, strip_media
from ..data.rows.counts import describe_empty_cells
from ..data.rows.features import undecoded
from ..data.rows.labels import with_class_names
from ..data.rows.load import load_rows
from ..data.rows.names import MEDIA_COLUMNS, check_has_prompt
from ..data.rows.pairs import COMPLETIONS, check_text_only, is_equal_pair, put_answer_media, read_answer
from ..data.rows.unread import check_columns, check_ignored
from ..encoding.media import decode_media
from ..encoding.messages import opened_thoughts
from ..encoding.processors import load_processor, tokenizer_of
from ..encoding.prompt_encoder import PromptEncoder
from ..encoding.prompts import placeholder_token_ids, placeholder_tokens
from ..encoding.supervised import SupervisedEncoder
from ..families import input_modalities
from ..modalities import MODALITIES
from ..models.pretrained import read_config
from ..paths import names_reward_model
from ..printable import printable
from ..progress import progress_bar
from ..reporting.model_card import in_code
from ..rewards.named import DEFAULT_REWARDS, check_reward_columns, load_reward_funcs
from .options import config_path
from .options import read_config as read_run_config
from .templates import with_system_message, with_texts
from .words import in_shell


_MAX_LISTED = 20  # maximum number of rows and columns that the report lists for a cause
_SILENT_PEAK = 1e-3  # peak below which a sound counts as silence
_LENGTHS = ("prompt", "text", *MODALITIES, *COMPLETIONS, "completion")  # rows of the table of lengths
_POINTS = "min | median | p90 | p99 | max"  # columns for a distribution
_OF_MODALITY = {"image": "of an image", "audio": "of a sound", "video": "of a video"}


@dataclass
class CheckedRow:
    """Findings on one row."""

    index: int  # row index in the dataset
    n_media: dict[str, int] = field(default_factory=dict)  # by modality
    n_tokens: int | None = None  # of the prompt, `None` if it can't be encoded
    n_answer_tokens: dict[str, int] = field(default_factory=dict)  # of completions in text, by column
    has_equal_answers: bool = False  # whether both completions of a pair are the same
    has_empty_answer: bool = False  # whether a completion has nothing to read
    label: bool | None = None  # of KTO
    opens_thoughts: bool = False  # whether the prompt ends with an open `<think>`
    n_placeholders: dict[str, int] = field(default_factory=dict)  # in the prompt, by modality
    sizes: dict[str, list[float]] = field(default_factory=dict)  # by measure, such as 'seconds of a sound'
    has_overlong_audio: bool = False  # whether the row has audio longer than the model's window
    file_names: dict[str, str] = field(default_factory=dict)  # names of media files by column
    silent_column: str | None = None  # column of the first silent sound
    digest: bytes = b""  # digest of the prompt and the decoded media
    error: str | None = None  # reason why the row would not train
    error_column: str | None = None  # column that the error names


class RowChecker(torch.utils.data.Dataset):
    """
    Dataset that encodes rows as the trainers do. A key is the index of a row in `rows`, or for a stream a tuple of row
    index and row.
    """

    def __init__(
        self,
        rows: Dataset | IterableDataset | None,
        model: PreTrainedModel,
        processor: ProcessorMixin | PreTrainedTokenizerBase,
        args: argparse.Namespace,
        reads_labels: bool = False,
    ):
        self.reads_labels = reads_labels  # whether `label` has the labels of KTO
        self.rows: Any = DatasetRows(rows) if isinstance(rows, Dataset) else None
        self.rejects_overlong_audio = args.audio_overlong == "raise"
        self.encoder = PromptEncoder(
            model,
            processor,
            args.chat_template_kwargs,
            media_rules=rules_of(args.media_rules, **{name: getattr(args, name) for name in OPTION_NAMES}),
            ignored_media_columns=args.ignored_media_columns or (),
            keep_decoded=True,
        )
        self.placeholder_ids = {
            modality: torch.tensor(sorted(ids)) for modality, ids in placeholder_token_ids(model, processor).items()
        }

    @cached_property
    def answer_encoder(self) -> SupervisedEncoder:
        encoder = self.encoder
        return SupervisedEncoder(
            encoder.processor,
            encoder.model,
            template_kwargs=encoder.template_kwargs,
            ignored_media_columns=encoder.ignored_media_columns,
            placeholders=placeholder_tokens(encoder.model, encoder.processor),
            media_rules=encoder.media_rules,
        )

    def __getitem__(self, key: int | tuple[int, dict[str, Any]]) -> CheckedRow:
        checked = CheckedRow(key if isinstance(key, int) else key[0])
        try:
            self._encode(self.rows[key] if isinstance(key, int) else Row(*key), checked)
        except Exception as error:  # any error would end a run
            text = without_credentials(str(error))
            # An error of a medium begins with its column and its file, such as "column 'images' (dog.png): "
            location = re.match(r"(?:row [^,]*, )?column '([^']*)'(?: \(([^)]*)\))?: ", text)
            if location is None:
                checked.error = f"{type(error).__name__}: {text}"
            else:
                checked.error_column, file = location.groups()
                message = text[location.end() :]
                checked.error = message if file is None else f"'{file}': {message}"
        return checked

    def _encode(self, row: Row, checked: CheckedRow) -> None:
        check_has_prompt(row)
        ignored = self.encoder.ignored_media_columns
        rules = self.encoder.media_rules
        answer_columns: Sequence[str] = ()
        if all(name in row for name in COMPLETIONS):
            placed_row = put_answer_media(row, ignored, rules=rules, marks=self.encoder.marks)
            answer_columns = COMPLETIONS
            checked.has_equal_answers = is_equal_pair(row)
            row = placed_row
        elif self.reads_labels:
            answer_columns = ("completion",)
            checked.label = truth_value(row.get("label"), "label", row.row_index, is_required=True)
            check_text_only(read_answer(row.get("completion"), "completion", row.row_index, rules))
        answers = [read_answer(row[name], name, row.row_index, rules) for name in answer_columns]
        checked.has_empty_answer = not all(map(_has_content, answers))
        answer_lengths = {name: self.answer_encoder.n_answer_tokens(row, name) for name in answer_columns}
        checked.n_answer_tokens = {name: n for name, n in answer_lengths.items() if n is not None}
        (prompt,) = self.encoder.messages([row])
        media_columns = [column for column in MEDIA_COLUMNS if column not in self.encoder.ignored_media_columns]
        if isinstance(prompt, str) and any(column in row for column in media_columns):
            prompt = [{"role": "user", "content": prompt}]  # as trainers do in a batch with media columns
        refs = list(iter_refs(prompt))
        answer_refs = list(iter_refs([row.get(name) for name in COMPLETIONS]))
        for ref in refs + answer_refs:
            checked.n_media[ref.modality] = checked.n_media.get(ref.modality, 0) + 1
            path = ref.stored.get("path") if isinstance(ref.stored, dict) else ref.stored
            if isinstance(path, str | os.PathLike):
                checked.file_names[ref.column] = masked_url(os.path.basename(path))
            with suppress(MediaError):  # encoding reports the error below
                for name, size in media_size(ref).items():
                    checked.sizes.setdefault(f"{name} {_OF_MODALITY[ref.modality]}", []).append(size)
        decode_media(answer_refs, self.encoder.processor, self.encoder.audio_overlong)
        try:
            encoded = self.encoder.encode(prompt, row.row_index)
        except ValueError as error:
            if "audio" not in checked.n_media:
                raise
            try:  # if encoding succeeds with cut audio, overlong audio was the error
                encoded = replace(self.encoder, audio_overlong="truncate").encode(prompt, row.row_index)
            except ValueError:
                raise error from None
            checked.has_overlong_audio = True
            if self.rejects_overlong_audio:
                raise
        checked.n_tokens = len(encoded)
        checked.opens_thoughts = bool(opened_thoughts(encoded.input_ids, tokenizer_of(self.encoder.processor)))
        # Media that the encoder read: a digest for repeated rows, silence, and the sizes of sampled frames
        digest = hashlib.blake2b(encoded.input_ids.numpy().tobytes(), digest_size=16)
        audio_columns = iter([ref.column for ref in refs if ref.modality == "audio"])
        for _, decoded in encoded.decoded:
            for medium in chain.from_iterable(decoded.media.values()):
                digest.update(np.asarray(medium).tobytes())
            for sound, column in zip(decoded.media.get("audio", ()), audio_columns, strict=False):
                if np.abs(sound).max() < _SILENT_PEAK:
                    checked.silent_column = checked.silent_column or column
            for frames in decoded.media.get("video", ()):
                height, width = sorted(frames.shape[1:])[1:]  # the smallest dimension is the channels
                checked.sizes.setdefault("sampled frames of a video", []).append(len(frames))
                checked.sizes.setdefault("pixels of all sampled frames", []).append(len(frames) * height * width)
        counts = {
            modality: int(torch.isin(encoded.input_ids, ids).sum()) for modality, ids in self.placeholder_ids.items()
        }
        if checked.n_media.keys() == {"video"} and not counts["video"]:
            counts["video"] = counts["image"]  # some processors use the image's placeholder for videos
        checked.n_placeholders = {modality: counts[modality] for modality in checked.n_media}
        checked.digest = digest.digest()


def _has_content(answer: list[dict[str, Any]]) -> bool:
    return bool(as_text(strip_media(answer)).strip() or [*iter_refs(answer)] or any(map(further_keys, answer)))


def without_weights(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """Returns a model on the meta device, where weights take no memory."""
    with torch.device("meta"), no_init_weights():
        return model_class._from_config(config)


def checked_rows(rows: Dataset | IterableDataset, checker: RowChecker, num_workers: int) -> Iterator[CheckedRow]:
    """Yields the findings on each row. Worker processes encode the rows."""
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
            f"A worker process was killed while it read one of the rows from {n_checked} on: a decoder crashed, or "
            f"memory ran out. Fewer `--num_workers` need less memory ({error})."
        ) from error


@dataclass
class Finding:
    """Rows with the same finding."""

    example: str = ""  # error of the first row
    count: int = 0
    # The first rows as text: `"7"`, `"7 (dog.wav)"` with a file's name, or `"7 (as 3)"` if row 3 is equal
    first_rows: list[str] = field(default_factory=list)
    columns: dict[str, None] = field(default_factory=dict)  # keys are the columns, in order of appearance

    def add(self, row: CheckedRow, note: str | None = None) -> None:
        self.count += 1
        if len(self.first_rows) < _MAX_LISTED:
            note = note or row.file_names.get(row.error_column or row.silent_column or next(iter(row.file_names), ""))
            self.first_rows.append(f"{row.index} ({note})" if note else str(row.index))
        if row.error_column is not None and len(self.columns) < _MAX_LISTED:
            self.columns[row.error_column] = None

    @property
    def listing(self) -> str:
        listed = ", ".join(self.first_rows)
        return f"{listed} and {self.count - len(self.first_rows)} more" if self.count > _MAX_LISTED else listed


@dataclass
class Report:
    """
    Findings of a check, for a report in Markdown. To save memory, it stores only numbers and a digest per row, and
    names and errors of the first rows with a finding.
    """

    title: str
    max_tokens: int | None  # of a prompt
    max_length: int | None  # of a prompt and an answer
    cuts_audio: bool  # whether audio beyond the model's window is cut
    warnings: list[str] = field(default_factory=list)
    empty_note: str = ""  # on columns with empty cells
    is_refused: bool = False  # whether the dataset as a whole would not train
    n_rows: int = 0
    sizes: dict[str, array] = field(default_factory=dict)  # by measure
    # Rows with errors, by column and error with masked details
    causes: dict[tuple[str, str], Finding] = field(default_factory=dict)
    overlong_prompts: Finding = field(default_factory=Finding)
    overlong_audio: Finding = field(default_factory=Finding)
    overlong_answers: Finding = field(default_factory=Finding)
    equal_answers: Finding = field(default_factory=Finding)
    empty_answers: Finding = field(default_factory=Finding)
    labels: Counter = field(default_factory=Counter)  # number of rows by label of KTO
    silent: Finding = field(default_factory=Finding)
    repeated: Finding = field(default_factory=Finding)
    n_opening_thoughts: int = 0  # rows whose prompt ends with an open `<think>`
    first_indices: dict[bytes, int] = field(default_factory=dict)  # row index of the first row, by digest
    tokens: dict[str, array] = field(default_factory=lambda: {name: array("q") for name in _LENGTHS})
    media_counts: dict[str, array] = field(default_factory=lambda: {modality: array("q") for modality in MODALITIES})

    @property
    def n_failed(self) -> int:
        """Number of rows that would not train."""
        if self.is_refused:
            return self.n_rows
        return sum(cause.count for cause in self.causes.values()) + self.overlong_prompts.count

    def note_error(self, reason: str) -> None:
        """Notes why the dataset as a whole would not train."""
        self.warnings.append(reason)
        self.is_refused = True

    def add(self, row: CheckedRow) -> None:
        self.n_rows += 1
        for modality, number in row.n_media.items():
            self.media_counts[modality].append(number)
        for name, values in row.sizes.items():
            self.sizes.setdefault(name, array("d")).extend(values)
        if row.has_overlong_audio:
            self.overlong_audio.add(row)
        if row.has_equal_answers:
            self.equal_answers.add(row)
        if row.has_empty_answer:
            self.empty_answers.add(row)
        if row.label is not None:
            self.labels[row.label] += 1
        if row.error is not None:
            # Errors with one cause differ in quoted names, numbers and objects. Without these, they share a key.
            masked_error = re.sub(r"'[^']*'|\"[^\"]*\"|<[^>]*>|[\d.]*\d", "-", row.error)
            column = re.sub(r"\[\d+\]", "[]", row.error_column or "")
            self.causes.setdefault((column, masked_error), Finding(row.error)).add(row)
        if row.n_tokens is None:
            return
        self.n_opening_thoughts += row.opens_thoughts
        if row.silent_column is not None:
            self.silent.add(row)
        first_index = self.first_indices.setdefault(row.digest, row.index)
        if first_index != row.index:
            self.repeated.add(row, f"as {first_index}")
        n_text = row.n_tokens - sum(row.n_placeholders.values())
        lengths = {"prompt": row.n_tokens, "text": n_text, **row.n_placeholders, **row.n_answer_tokens}
        for name, number in lengths.items():
            self.tokens[name].append(number)
        if self.max_tokens is not None and row.n_tokens > self.max_tokens:
            self.overlong_prompts.add(row)
        elif row.n_answer_tokens and self.max_length is not None:
            if row.n_tokens + max(row.n_answer_tokens.values()) > self.max_length:
                self.overlong_answers.add(row)

    def text(self) -> str:
        verdict = f"{self._share(self.n_failed)} would not" if self.n_failed else f"All {self.n_rows} rows would"
        parts = [
            f"# Check of {self.title}",
            f"{verdict} train. Note: {self.empty_note}." if self.empty_note else f"{verdict} train.",
        ]
        parts += [f"    {' '.join(warning.split())}" for warning in self.warnings]
        parts += ["## What would fail"] if self.causes else []
        for cause in sorted(self.causes.values(), key=lambda cause: -cause.count):
            columns = f" in {', '.join(map(in_code, cause.columns))}" if cause.columns else ""
            parts += [f"### {self._share(cause.count)}{columns}", f"    {' '.join(cause.example.split())}"]
            parts.append(f"Rows: {cause.listing}")
        total = sum(self.tokens["prompt"])
        lengths = [[*row, f"{100 * sum(self.tokens[row[0]]) / total:.3g} %"] for row in _percentiles(self.tokens)]
        for row in lengths:
            row[-1] = row[-1] if row[0] in ("prompt", "text", *MODALITIES) else "-"  # answers are no part of a prompt
        parts += _section("## Lengths", f"tokens of | rows | {_POINTS} | share", lengths)
        if self.max_tokens is not None and lengths:
            parts.append(f"Overlong, of more than {self.max_tokens} tokens: {self._summary(self.overlong_prompts)}")
        parts += self._answer_lines()
        parts += _section("## Sizes of media", f"size | number | {_POINTS}", _percentiles(self.sizes))
        counts = {modality: numbers for modality, numbers in self.media_counts.items() if numbers}
        rows = [
            [modality, len(per_row), min(per_row), int(np.median(per_row)), max(per_row), sum(per_row)]
            for modality, per_row in counts.items()
        ]
        parts += _section("## Media of a row", "kind | rows | min | median | max | all", rows)
        if "audio" in counts:
            note = ", which is cut" * self.cuts_audio
            parts.append(f"Audio beyond the model's window{note}: {self._summary(self.overlong_audio)}")
            parts.append(f"Silence, nowhere above -60 dB: {self._summary(self.silent)}")
        parts.append(f"Rows that repeat the prompt and media of an earlier row: {self._summary(self.repeated)}")
        opening_note = "Prompts that end with an open `<think>`, which rewards and logs put before completions"
        if self.n_opening_thoughts:
            parts.append(f"{opening_note}: {self._share(self.n_opening_thoughts)}.")
        return "\n\n".join(parts) + "\n"

    def _answer_lines(self) -> list[str]:
        lines = []
        if any(self.tokens[name] for name in (*COMPLETIONS, "completion")):
            lines.append(f"Answers without anything to read: {self._summary(self.empty_answers)}")
        if lines and self.max_length is not None:
            note = "which DPO and KTO cut, and reward models refuse"
            overlong = self._summary(self.overlong_answers)
            lines.append(f"Answers of more than {self.max_length} tokens with their prompt, {note}: {overlong}")
        if self.tokens["chosen"]:
            lines.append(f"Pairs of equal answers, which teach nothing: {self._summary(self.equal_answers)}")
        if self.labels:
            lines.append(f"Labels: {self.labels[True]} desirable, {self.labels[False]} undesirable")
        return lines

    def _share(self, count: int) -> str:
        return f"{count} of {self.n_rows} rows ({100 * count / self.n_rows:.3g} %)"

    def _summary(self, rows: Finding) -> str:
        share = self._share(rows.count)
        return f"{share}. Rows: {rows.listing}" if rows.count else share


def _percentiles(numbers: Mapping[str, array]) -> list[list[str]]:
    rows = []
    for name, values in numbers.items():
        if values:
            points = np.percentile(values, (0, 50, 90, 99, 100), method="higher")
            rows.append([name, str(len(values)), *(f"{p:.0f}" if p.is_integer() else f"{p:.6g}" for p in points)])
    return rows


def _section(title: str, header: str, rows: Sequence[Sequence[str | int]]) -> list[str]:
    lines = [header, "---" + " | ---" * header.count("|"), *(" | ".join(map(str, row)) for row in rows)]
    return [title, "\n".join(f"| {line} |" for line in lines)] if rows else []


def _with_labels(rows: Dataset | IterableDataset, report: Report) -> tuple[Dataset | IterableDataset, bool]:
    """
    Returns rows with the names of their labels, and whether these are the labels of KTO: a row with a completion has
    one. Warns of a column `label` that KTO would refuse, but which rows for SFT may have.
    """
    columns = {*(rows.column_names or ())}
    if not {"completion", "label"} <= columns or {*COMPLETIONS} <= columns:
        return rows, False
    rows = with_class_names(rows, ["label"])
    labels = rows["label"] if isinstance(rows, Dataset) else [row["label"] for row in rows.take(1)]
    if any(map(is_truth, labels)):
        return rows, True
    report.warnings.append("No cell of 'label' is true or false, so that KTO would refuse the rows; SFT ignores it.")
    return rows, False


def _reward_names(args: argparse.Namespace, columns: Collection[str]) -> Sequence[str]:
    if args.reward_funcs is not None or args.config is None:
        return args.reward_funcs or ()
    options = read_run_config(config_path("recipes", args.config))
    others = ("reward_recipe", "reward_model_name_or_path", "teacher_model_name_or_path")
    samples = not {*COMPLETIONS, "completion", "messages"}.intersection(columns)
    return DEFAULT_REWARDS if samples and all(options.get(name) is None for name in others) else ()


def read_inputs(
    args: argparse.Namespace,
) -> tuple[Dataset | IterableDataset, PreTrainedModel, ProcessorMixin | PreTrainedTokenizerBase]:
    """Returns the rows, the model without weights and the processor that the options name."""
    model_source: dict[str, Any] = {"revision": args.model_revision, "trust_remote_code": args.trust_remote_code}
    config, model_class = read_config(args.model_name_or_path, **model_source)
    try:
        processor = load_processor(args.model_name_or_path, **model_source)
    except OSError as error:
        raise ValueError(f"{args.model_name_or_path!r} has no processor: {error}") from error
    model = without_weights(config, model_class)
    rows = load_rows(args.dataset_name, args.dataset_config, args.dataset_split, args.dataset_streaming)
    rows = with_system_message(
        with_texts(rows, {"prompt": args.prompt, "solution": args.solution}), args.system_prompt
    )
    return rows, model, processor


def run(args: argparse.Namespace) -> None:
    """Checks a dataset and prints the report. Exits with status 1 if rows would not train."""
    check_ignored(args.ignored_media_columns)
    rows, model, processor = read_inputs(args)
    config = model.config
    max_tokens = args.max_prompt_length
    max_positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    context_lengths = [length for length in (max_positions, args.vllm_max_model_length) if length is not None]
    if max_tokens is None and context_lengths:
        max_tokens = min(context_lengths) - args.max_completion_length
    title = f"{in_code(args.dataset_name)} ({in_code(args.dataset_split)}) with {in_code(args.model_name_or_path)}"
    if args.max_length is not None:  # which has to leave a token for the answer
        max_tokens = min(args.max_length - 1, args.max_length if max_tokens is None else max_tokens)
    report = Report(title, max_tokens, args.max_length, args.audio_overlong == "truncate")
    rows, reads_labels = _with_labels(rows, report)
    try:
        ignored = args.ignored_media_columns or ()
        modalities = input_modalities(model)
        warning = check_columns(
            rows, "the dataset", ignored, message_columns=("prompt", *COMPLETIONS), model_modalities=modalities
        )
        if warning is not None:
            report.warnings.append(warning)
        names = _reward_names(args, rows.column_names or ())
        functions = load_reward_funcs([name for name in names if not names_reward_model(name)])
        report.warnings += check_reward_columns(functions, rows)
    except ValueError as error:  # an error of the dataset as a whole
        report.note_error(str(error))
    if isinstance(rows, Dataset) and 0 < len(rows) < args.batch_rows:
        report.note_error(str(too_few_rows_error(len(rows), args.batch_rows, has_groups=True)))
    if isinstance(rows, Dataset) and len(rows) > 1 and "solution" in rows.column_names:
        solutions = {str(solution) for solution in rows["solution"]}
        if len(solutions) == 1:
            report.warnings.append(
                f"All {len(rows)} solutions are {solutions.pop()!r:.60}, so that a model needs no question to answer."
            )
    report.empty_note = describe_empty_cells(
        rows, {*MEDIA_COLUMNS, "solution"}.difference(args.ignored_media_columns or ())
    )
    if "prompt" in (rows.column_names or ()):
        columns = ("prompt", *COMPLETIONS, "completion", "label", *MEDIA_COLUMNS)
        rows = rows.select_columns([name for name in rows.column_names if name in columns])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers' threads don't survive a fork
    for checked in checked_rows(rows, RowChecker(rows, model, processor, args, reads_labels), args.num_workers):
        report.add(checked)
    if not report.n_rows:
        raise ValueError(f"{args.dataset_name!r} has no rows.")
    if report.equal_answers.count == report.n_rows and args.rejected_view is None:
        report.note_error("The dataset prefers nothing: 'chosen' and 'rejected' are equal in all rows.")
    if len(report.labels) == 1:
        report.warnings.append(f"All labels are {[*report.labels][0]}, so that KTO has nothing to compare with.")
    text = "\n".join(in_shell(line, [*vars(args)]) for line in report.text().split("\n"))
    print(printable(text), end="")
    if args.output is not None:
        Path(args.output).write_text(text, encoding="utf-8")
    if report.n_failed:
        raise SystemExit(1)
