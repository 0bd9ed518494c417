# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Search for media of a dataset that no prompt contains, before a model silently trains on text alone."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from datasets import Audio, Dataset, IterableDataset, LargeList, List, Value, Video
from datasets.features.features import FeatureType

from ...credentials import masked_url
from ...modalities import MODALITIES
from ..reading.refs import Encoded, MediaError, iter_refs
from .columns import read_messages
from .counts import empty_row_indices
from .features import Rows, feature_leaves, is_transformed, outlined_rows, table_order
from .load import check_separator
from .names import MEDIA_COLUMNS, TEACHER, check_names, other_layout, prepare_remedy
from .values import block_modality, holds_several_media, is_empty, may_be_sentence, media_in


# Numbers of evenly spaced rows that are inspected, and of those whose messages are read
_N_ROWS = 16
_N_PARSED = 1000

_MODALITIES_BY_FEATURE = {modality.title(): modality for modality in MODALITIES} | {"Pdf": "PDF"}

# Words in column names that show the modality of media, if the media themselves don't
_MODALITY_WORDS = {
    "audio": "audio|sound|speech|voice|wav|music",
    "image": "image|img|picture|photo|figure|screenshot",
    "video": "video|movie|film",
}


@dataclass
class _UnreadMedia:
    """Media of a column that no prompt contains."""

    column: str
    path: str  # location in the column
    modality: str | None
    is_list: bool  # whether a cell holds a list of media
    evidence: str  # how the media were recognized
    is_certain: bool  # `False` for texts that may only look like file names
    in_every_cell: bool = True  # whether every cell with a value holds such media

    @property
    def likely_modality(self) -> str | None:
        return self.modality or next(
            (modality for modality, words in _MODALITY_WORDS.items() if re.search(words, self.path.lower())), None
        )

    def suits_any(self, modalities: Collection[str]) -> bool:
        return bool(modalities) if self.likely_modality is None else self.likely_modality in modalities

    def describe(self, columns: Collection[str]) -> str:
        modality = self.likely_modality
        column = f"{modality}s" if self.is_list else modality
        if self.evidence == "blocks":
            remedy = "move them to 'prompt'"
        elif modality == "PDF":
            remedy = "give images of the pages in 'images'"
        elif modality is None:
            remedy = "rename it to 'audio', 'image' or 'video'"
        elif self.path == self.column and not self.is_list and modality in columns:
            remedy = f"put it and {modality!r} into a list in '{modality}s'"
        else:
            can_rename = self.path == self.column and column not in columns
            remedy = f"{'rename' if can_rename else 'move'} it to {column!r}"
            remedy += f" (`rename_column({self.column!r}, {column!r})`)" * can_rename
        return f"{self.path!r} ({self.evidence}): {remedy}"


@dataclass
class _Columns:
    """A dataset's columns, as far as they are known without decoding media, and what is read of them."""

    dataset: Rows
    name: str
    ignored: Collection[str]
    message_columns: Collection[str]
    needs_prompt: bool
    dataset_part: Literal["all", "first", "some"]
    model_modalities: Collection[str]
    option_modalities: Mapping[str, set[str]]

    def __post_init__(self):
        features, rows, modalities = _inspect_dataset(self.dataset, self.message_columns, self.ignored)
        self.features = features
        self.rows = rows
        names = dict.fromkeys(features)  # in order
        if not features:
            for row in rows:
                names.update(dict.fromkeys(row))
        self.names = list(names)
        # Features can stand in for a row: they have its columns and nested keys
        self.sample: Mapping[str, Any] = features or (rows[0] if rows else {})
        all_rows = self.dataset if isinstance(self.dataset, Sequence) else rows
        for row in all_rows:
            modalities |= _row_modalities(row, self.message_columns, self.ignored)
        self.modalities: set[str | None] = modalities  # of the prompts, `None` for an unknown one
        self.media_columns = [name for name in self.names if name in MEDIA_COLUMNS and name not in self.ignored]

    @property
    def has_media(self) -> bool:
        return bool(self.modalities - {None})

    @property
    def read_modalities(self) -> set[str | None]:
        """Modalities of the prompts and of the media columns among `message_columns`, such as a teacher's."""
        names = [name.removeprefix(TEACHER) for name in self.message_columns if name in self.names]
        return self.modalities | {MEDIA_COLUMNS[name] for name in names if name in MEDIA_COLUMNS}

    @property
    def knows_modalities(self) -> bool:
        return bool(self.names) and None not in self.read_modalities and not isinstance(self.dataset, IterableDataset)

    @cached_property
    def unread_media(self) -> list[_UnreadMedia]:
        read = {*self.message_columns, *self.ignored, *MEDIA_COLUMNS}
        findings = [
            _media_in_column(name, self.features.get(name), [row.get(name) for row in self.rows])
            for name in self.names
            if name not in read
        ]
        return [media for media in findings if media is not None]

    @property
    def gives_text_alone(self) -> bool:
        # Rows after the first rows may still fill the media columns
        if self.has_media or (self.dataset_part == "first" and self.media_columns):
            return False
        inputs = {*MODALITIES}.intersection(self.model_modalities)
        return any(
            media.is_certain or (media.in_every_cell and media.suits_any(inputs)) for media in self.unread_media
        )


def check_columns(
    dataset: Rows,
    name: str,
    ignored: Collection[str] = (),
    *,
    message_columns: Collection[str] = ("prompt",),
    needs_prompt: bool = True,
    dataset_part: Literal["all", "first", "some"] = "all",
    model_modalities: Collection[str] = (),
    option_modalities: Mapping[str, set[str]] | None = None,
) -> str | None:
    """
    Raises an error, or returns a text of warnings, for media that no prompt contains, wrong names of columns and empty
    media columns, from features and up to 16 undecoded rows, none of streams. `dataset_part` says whether other rows
    may have media; `option_modalities` maps options to the modalities that they change.
    """
    columns = _Columns(
        dataset,
        name,
        ignored,
        message_columns,
        needs_prompt,
        dataset_part,
        model_modalities,
        option_modalities or {},
    )
    if columns.names:
        check_separator(columns.names)
        check_names(name, columns.names, columns.sample, needs_prompt)
    warnings = []
    for rule, error in _RULES:
        for message in rule(columns):
            if error is not None:
                raise error(f"{name}: {message}")
            warnings.append(f"{name}: {message}")
    return " ".join(warnings) or None


def _single_messages(columns: _Columns) -> Iterator[str]:
    names = ("prompt", "completion", "chosen", "rejected")
    single = [name for name in names if isinstance(columns.sample.get(name), dict)]
    if single:
        remedy = f", or {prepare_remedy('llama-factory --task dpo')}" if "chosen" in single else ""
        yield f"column {single[0]!r} holds a message; write a list of messages, `[...]`{remedy}."


def _lists_of_media(columns: _Columns) -> Iterator[str]:
    for modality in MODALITIES:
        feature = columns.features.get(modality)
        is_list = isinstance(feature, (List, LargeList)) and isinstance(feature.feature, (Audio, Video))
        is_list = is_list or any(holds_several_media(modality, row.get(modality)) for row in columns.rows)
        if is_list and modality not in columns.ignored:
            yield f"column '{modality}' holds a list; rename the column to '{modality}s'"


def _media_of_answers(columns: _Columns) -> Iterator[str]:
    paths = [media.path for media in columns.unread_media if re.search("chosen|rejected", media.column)]
    if paths and not columns.needs_prompt and {"chosen", "rejected"} <= {*columns.names}:
        yield (
            f"no answer gets {paths}; put media of answers into blocks of 'chosen' and 'rejected', or name the "
            "columns in `ignored_media_columns`"
        )


def _only_media_unread(columns: _Columns) -> Iterator[str]:
    if columns.gives_text_alone and columns.dataset_part != "some":
        yield from _unread_media(columns)


def _unread_media(columns: _Columns) -> Iterator[str]:
    if not columns.unread_media:
        return
    consequence = ", and there are no others, so that the model would get text alone"
    consequence = consequence if columns.gives_text_alone else ""
    remedies = "; ".join(media.describe(columns.names) for media in columns.unread_media)
    layout = other_layout(columns.sample)
    conversion = "" if layout is None else f" Or {prepare_remedy(layout)}."
    yield (
        f"no prompt gets these media{consequence}: {remedies}. If only reward functions read a column, name it in "
        f"`ignored_media_columns`.{conversion}"
    )


def _useless_options_of_all_rows(columns: _Columns) -> Iterator[str]:
    if columns.dataset_part == "all":
        yield from _useless_options(columns)


def _useless_options(columns: _Columns) -> Iterator[str]:
    if not columns.knows_modalities:
        return
    held = columns.read_modalities
    for option, changed in columns.option_modalities.items():
        if not held.intersection(changed):
            yield (
                f"{option} changes {' or '.join(sorted(changed))}, but prompts hold "
                f"{', '.join(sorted(filter(None, held))) or 'text alone'}; remove {option}."
            )


def _empty_media_columns(columns: _Columns) -> Iterator[str]:
    is_whole = columns.dataset_part == "all" and not isinstance(columns.dataset, IterableDataset)
    if columns.media_columns and not columns.has_media and is_whole:
        yield (
            f"no row has anything in {', '.join(map(repr, columns.media_columns))}, so that the model would get text "
            "alone; fill in the media, or remove the column."
        )


def _no_media(columns: _Columns) -> Iterator[str]:
    if columns.knows_modalities and not columns.has_media and columns.dataset_part != "some":
        yield from _text_alone(columns.names, columns.model_modalities, columns.dataset_part)


# Rules in the order of their checks: a function that yields a message where the rule is broken, and the error, `None`
# for a warning. Once a rule has raised, the rules below aren't checked.
_RULES: tuple[tuple[Callable[[_Columns], Iterator[str]], type[ValueError] | None], ...] = (
    (_single_messages, MediaError),
    (_lists_of_media, MediaError),
    (_media_of_answers, MediaError),
    (_only_media_unread, MediaError),
    (_unread_media, None),
    (_useless_options_of_all_rows, ValueError),
    (_useless_options, None),
    (_empty_media_columns, MediaError),
    (_no_media, None),
)


def without_media(
    name: str, columns: Collection[str], model_modalities: Collection[str], dataset_part: str = "first"
) -> str:
    """Returns a warning that prompts have no media, or an empty text for a model that takes text alone."""
    return "".join(f"{name}: {message}" for message in _text_alone(columns, model_modalities, dataset_part))


def _text_alone(columns: Collection[str], model_modalities: Collection[str], dataset_part: str) -> Iterator[str]:
    inputs = [modality for modality in MODALITIES if modality in model_modalities]
    where = "" if dataset_part == "all" else " of the first batch"
    if inputs:
        yield (
            f"no prompt{where} has media, so that a model for {', '.join(inputs)} gets text alone. The columns are "
            f"{sorted(columns)}; if one of them stands for media, put the media into 'prompt' or {inputs[0]!r}."
        )


def check_ignored(columns: Collection[str] | None) -> None:
    """Raises a `ValueError` for an invalid value of `ignored_media_columns`."""
    if isinstance(columns, str):
        raise ValueError(f"`ignored_media_columns` must be a list of names, got {columns!r}; write [{columns!r}].")
    if "prompt" in (columns or ()):
        raise ValueError("`ignored_media_columns` names 'prompt', which is always read; leave it out.")


def lists_columns(dataset: Rows) -> bool:
    """
    Returns whether columns are known before rows are read. A transform hides them, as does a stream without features.
    """
    if isinstance(dataset, Dataset):
        return not is_transformed(dataset)
    return isinstance(dataset, Sequence) or getattr(dataset, "features", None) is not None


def _inspect_dataset(
    dataset: Rows, message_columns: Collection[str], ignored: Collection[str]
) -> tuple[dict[str, Any], list[dict], set]:
    """
    Returns a dataset's features, some of its rows, and modalities of prompts (`None` for an unknown modality). Rows of
    a `Dataset` have only its columns of text. Streams, and datasets whose columns are unknown, have no rows here.
    """
    if not lists_columns(dataset):
        return {}, [], set()
    n_rows = min(len(dataset), _N_ROWS) if isinstance(dataset, (Dataset, Sequence)) else 0
    indices = [i * len(dataset) // n_rows for i in range(n_rows)]
    if isinstance(dataset, Sequence):
        return {}, [dataset[i] for i in indices], set()
    features = dict(dataset.features)
    filled_columns = {column for column in features if column in MEDIA_COLUMNS}
    rows = []
    if isinstance(dataset, Dataset):
        features = {column: features[column] for column in dataset.format["columns"]}
        filled_columns = {
            c for c in filled_columns & features.keys() if len(empty_row_indices(dataset, c)) < len(dataset)
        }
        # Other columns aren't read, because reading decodes their media. Their features show the media.
        text_columns = [
            c for c, feature in features.items() if _holds_text(feature) and not [*_media_in_feature(feature, c)]
        ]
        values = dataset.select_columns(text_columns).with_format(None)[indices] if text_columns else {}
        rows = [{name: values[name][i] for name in text_columns} for i in range(n_rows if text_columns else 0)]
    modalities: set[str | None] = {
        MEDIA_COLUMNS[column] for column in filled_columns.difference(ignored) if [*feature_leaves(features[column])]
    }
    present = [column for column in message_columns if column in features and column not in MEDIA_COLUMNS]
    n_read = 0
    if isinstance(dataset, Dataset) and present:
        n_read = min(len(dataset), _N_PARSED)
        order = table_order(dataset)[np.arange(n_read) * len(dataset) // max(n_read, 1)]
        for _, row in outlined_rows(dataset, present, order):
            modalities |= _row_modalities(row, present, ())
    if isinstance(dataset, Dataset) and n_read == len(dataset):
        return features, rows, modalities
    # Other rows may have media for which their features have keys
    for column in message_columns:
        for key, leaf in feature_leaves(features.get(column, Value("null"))):
            if key in ("bytes", "path", "url", "base64"):
                modalities |= {*MODALITIES}
            if type(leaf).__name__ == "Json":
                modalities.add(None)  # it may hold media of any modality
            if block_modality(key) is not None:
                modalities.add(block_modality(key))
    return features, rows, modalities


def _media_in_column(column: str, feature: FeatureType | None, values: list) -> _UnreadMedia | None:
    """Certain media take precedence over texts that may be names of files."""
    for path, modality, evidence in _media_in_feature(feature, column):
        return _UnreadMedia(column, path, modality, isinstance(feature, (List, LargeList)), evidence, is_certain=True)
    findings = []
    in_every_cell = True
    for value in values:
        media = [*media_in(value, column)]
        if not media and not is_empty(value):
            in_every_cell = False
        is_list = isinstance(value, (list, tuple))
        findings += [(is_list, path, reading.modality, reading.value) for path, reading in media]
    # Media before texts that may be names of files
    for is_list, path, modality, medium in sorted(findings, key=lambda finding: isinstance(finding[-1], str)):
        if isinstance(medium, Encoded):
            continue  # stored in a dataset, whose features show the medium when they are checked
        if isinstance(medium, str):
            if not in_every_cell and may_be_sentence(medium):
                continue  # an answer that ends with a file's name, rather than a name with spaces
            evidence = f"texts that look like files, such as {masked_url(medium)[:60]!r}"
            return _UnreadMedia(
                column, path, modality, is_list, evidence, is_certain=False, in_every_cell=in_every_cell
            )
        is_block = isinstance(medium, dict) and block_modality(medium.get("type")) is not None
        evidence = "blocks" if is_block else f"of type {type(medium).__name__}"
        return _UnreadMedia(column, path, modality, is_list, evidence, is_certain=True)
    return None


def _media_in_feature(feature: FeatureType | None, path: str) -> Iterator[tuple[str, str | None, str]]:
    """Yields the path and the modality of the media in a feature, and how they were recognized."""
    name = type(feature).__name__
    if name in _MODALITIES_BY_FEATURE:
        yield path, _MODALITIES_BY_FEATURE[name], f"feature {name}"
    elif isinstance(feature, (List, LargeList)):
        yield from _media_in_feature(feature.feature, path)
    elif isinstance(feature, dict) and {"array", "sampling_rate"} <= feature.keys():
        yield path, "audio", "arrays with their rate"
    elif isinstance(feature, dict):
        for key, item in feature.items():
            yield from _media_in_feature(item, path if key == "bytes" else f"{path}.{key}")
    elif isinstance(feature, Value) and "binary" in feature.dtype:
        yield path, None, "bytes"


def _holds_text(feature: FeatureType) -> bool:
    leaves = [leaf for _, leaf in feature_leaves(feature)]
    return any("string" in leaf.dtype if isinstance(leaf, Value) else type(leaf).__name__ == "Json" for leaf in leaves)


def _message_modalities(messages: str | list | None, column: str) -> set[str]:
    """Returns the modalities of the media in messages, none for those that the encoder refuses when it reads them."""
    if not isinstance(messages, list) or not messages:
        return set()
    try:
        refs = iter_refs(read_messages(messages, column, 0))
        return {ref.modality for ref in refs if ref.source is not None}
    except MediaError:
        return set()


def _row_modalities(row: dict[str, Any], message_columns: Collection[str], ignored: Collection[str]) -> set[str]:
    """Returns the modalities of a row's media."""
    modalities = {
        modality
        for column, modality in MEDIA_COLUMNS.items()
        if column not in ignored and not is_empty(row.get(column))
    }
    for column in message_columns:
        name = column.removeprefix(TEACHER)
        if name not in MEDIA_COLUMNS:
            modalities |= _message_modalities(row.get(column), column)
        elif not is_empty(row.get(column)):
            modalities.add(MEDIA_COLUMNS[name])
    return modalities
