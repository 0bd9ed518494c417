# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Search for media of a dataset that no prompt contains, before a model silently trains on text alone."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from datasets import Audio, Dataset, IterableDataset, LargeList, List, Value, Video
from datasets.features.features import FeatureType

from ...credentials import masked_url
from ...families import MODALITIES
from ..reading.refs import Encoded, MediaError
from .columns import (
    MEDIA_COLUMNS,
    TEACHER,
    block_modality,
    check_names,
    find_media,
    holds_several_media,
    is_absent,
    is_empty,
    may_be_sentence,
    other_layout,
    prepare_remedy,
)
from .counts import empty_row_indices
from .features import Rows, feature_leaves
from .load import check_separator


# Number of evenly spaced rows that are inspected
_N_ROWS = 16

_MODALITIES_BY_FEATURE = {"Audio": "audio", "Image": "image", "Video": "video", "Pdf": "PDF"}

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
        else:
            can_rename = self.path == self.column and column not in columns
            remedy = f"{'rename' if can_rename else 'move'} it to {column!r}"
            remedy += f" (`rename_column({self.column!r}, {column!r})`)" * can_rename
        return f"{self.path!r} ({self.evidence}): {remedy}"


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
    Raises an error, or returns a text of warnings, if a dataset has media that no prompt contains. Looks at features
    and at up to 16 rows, without decoding media. If the dataset is a list, the modalities of prompts are those of all
    its rows. Doesn't look at rows of streams and of datasets with a transform.

    Also raises an error for wrong names of columns, for lists in `image`, `audio` or `video`, and for empty media
    columns.

    `message_columns` hold messages, `model_modalities` are the inputs of the model, and `dataset_part` tells whether
    `dataset` is the whole dataset, its first rows, or some of its rows. `needs_prompt` requires a column `prompt`.
    `option_modalities` maps options to the modalities that they change. Prompts must have one of an option's
    modalities.
    """
    features, rows, modalities = _inspect_dataset(dataset, message_columns, ignored)
    columns = list(features or dict.fromkeys(key for row in rows for key in row))
    # Features can stand in for a row: they have its columns and nested keys
    sample = features or (rows[0] if rows else {})
    if columns:
        check_separator(columns)
        check_names(name, columns, sample, needs_prompt)
    modalities = modalities.union(
        *(
            _row_modalities(row, message_columns, ignored)
            for row in (dataset if isinstance(dataset, Sequence) else rows)
        )
    )
    has_media = bool(modalities - {None})
    if single_message_columns := [
        column for column in ("prompt", "completion", "chosen", "rejected") if isinstance(sample.get(column), dict)
    ]:
        remedy = f", or {prepare_remedy('llama-factory --task dpo')}" * ("chosen" in single_message_columns)
        raise MediaError(
            f"{name}: column {single_message_columns[0]!r} holds a message; write a list of messages, `[...]`{remedy}."
        )
    for modality in MODALITIES:
        feature = features.get(modality)
        is_list = isinstance(feature, (List, LargeList)) and isinstance(feature.feature, (Audio, Video))
        if modality not in ignored and (
            is_list or any(holds_several_media(modality, row.get(modality)) for row in rows)
        ):
            raise MediaError(f"{name}: column '{modality}' holds a list; rename the column to '{modality}s'")
    # Media that no prompt contains: an error if they are certain and the only ones, otherwise a warning
    other_columns = [column for column in columns if column not in {*message_columns, *ignored, *MEDIA_COLUMNS}]
    findings = [
        _media_in_column(column, features.get(column), [row.get(column) for row in rows]) for column in other_columns
    ]
    unread_media = [media for media in findings if media is not None]
    media_columns, warnings = [c for c in columns if c in MEDIA_COLUMNS and c not in ignored], []
    if unread_media:
        paths_in_answers = [media.path for media in unread_media if re.search("chosen|rejected", media.column)]
        if paths_in_answers and not needs_prompt and {"chosen", "rejected"} <= {*columns}:
            raise MediaError(
                f"{name}: no answer gets {paths_in_answers}; put media of answers into blocks of 'chosen' and "
                "'rejected', or name the columns in `ignored_media_columns`"
            )
        model_modalities = {*MODALITIES}.intersection(model_modalities)
        has_likely_media = any(
            media.is_certain or (media.in_every_cell and media.suits_any(model_modalities)) for media in unread_media
        )
        # Rows after the first rows may still fill the media columns
        is_text_alone = has_likely_media and not (has_media or (dataset_part == "first" and media_columns))
        layout = other_layout(sample)
        message = (
            f"{name}: no prompt gets these "
            f"media{', and there are no others, so that the model would get text alone' * is_text_alone}: "
            f"{'; '.join(media.describe(columns) for media in unread_media)}. If only reward functions read a column, "
            "name it in `ignored_media_columns`."
        )
        message += "" if layout is None else f" Or {prepare_remedy(layout)}."
        if is_text_alone and dataset_part != "some":
            raise MediaError(message)
        warnings.append(message)
    # Options that change no medium of the prompts. `message_columns` may include a teacher's media columns.
    modalities |= {
        MEDIA_COLUMNS.get(column.removeprefix(TEACHER)) for column in message_columns if column in columns
    } - {None}
    knows_modalities = columns and None not in modalities and not isinstance(dataset, IterableDataset)
    for option, option_targets in (option_modalities or {}).items():
        if knows_modalities and not modalities.intersection(option_targets):
            modalities_text = ", ".join(sorted(modalities)) or "text alone"
            message = (
                f"{name}: {option} changes {' or '.join(sorted(option_targets))}, but prompts hold {modalities_text}; "
                f"remove {option}."
            )
            if dataset_part == "all":
                raise ValueError(message)
            warnings.append(message)
    if media_columns and not has_media and dataset_part == "all" and not isinstance(dataset, IterableDataset):
        raise MediaError(
            f"{name}: no row has anything in {', '.join(map(repr, media_columns))}, so that the model would get text "
            "alone; fill in the media, or remove the column."
        )
    if knows_modalities and not has_media:
        warnings.append(without_media(name, columns, model_modalities, dataset_part))
    return " ".join(filter(None, warnings)) or None


def without_media(
    name: str, columns: Collection[str], model_modalities: Collection[str], dataset_part: str = "first"
) -> str:
    """Returns a warning that prompts have no media, or an empty text for a model that takes text alone."""
    model_inputs = [modality for modality in MODALITIES if modality in model_modalities]
    if not model_inputs:
        return ""
    where = "" if dataset_part == "all" else " of the first batch"
    return (
        f"{name}: no prompt{where} has media, so that a model for {', '.join(model_inputs)} gets text alone. The "
        f"columns are {sorted(columns)}; if one of them stands for media, put the media into 'prompt' or "
        f"{model_inputs[0]!r}."
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
        return dataset.format["type"] != "custom"
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
        rows = [
            dict(zip(text_columns, row, strict=True)) for row in zip(*(values[c] for c in text_columns), strict=True)
        ]
    modalities = {
        MEDIA_COLUMNS[column] for column in filled_columns.difference(ignored) if [*feature_leaves(features[column])]
    }
    # Keys and features in the columns of messages
    leaves = [leaf for column in message_columns for leaf in feature_leaves(features.get(column, Value("null")))]
    if any(key in ("bytes", "path", "url", "base64") for key, _ in leaves):
        modalities |= {*MODALITIES}
    # JSON may hold media of any modality
    unknown_modality = {None for _, leaf in leaves if type(leaf).__name__ == "Json"}
    return (
        features,
        rows,
        modalities | unknown_modality | {block_modality(key) for key, _ in leaves if block_modality(key)},
    )


def _media_in_column(column: str, feature: FeatureType | None, values: list) -> _UnreadMedia | None:
    """Returns the media in a column, if any. Certain media take precedence over texts that may be names of files."""
    for path, modality, evidence in _media_in_feature(feature, column):
        return _UnreadMedia(column, path, modality, isinstance(feature, (List, LargeList)), evidence, is_certain=True)
    cells = [[*find_media(value, column)] for value in values]  # paths, modalities and media by cell
    in_every_cell = all(media or is_absent(value) or not value for media, value in zip(cells, values, strict=True))
    findings = [(isinstance(values[i], (list, tuple)), *medium) for i, media in enumerate(cells) for medium in media]
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
    """Returns whether a feature, which may be nested, holds text or JSON."""
    leaves = [leaf for _, leaf in feature_leaves(feature)]
    return any("string" in leaf.dtype if isinstance(leaf, Value) else type(leaf).__name__ == "Json" for leaf in leaves)


def _row_modalities(row: dict[str, Any], message_columns: Collection[str], ignored: Collection[str]) -> set[str]:
    """Returns the modalities of a row's media, or all modalities if the modality of a medium is unknown."""
    columns = [column for column in MEDIA_COLUMNS if column not in ignored and not is_empty(row.get(column))]
    block_modalities = [
        modality
        for c in message_columns
        if not isinstance(row.get(c), str)
        for _, modality, _ in find_media(row.get(c))
    ]
    return (
        {*MODALITIES}
        if None in block_modalities
        else {*map(MEDIA_COLUMNS.__getitem__, columns), *filter(None, block_modalities)}
    )
