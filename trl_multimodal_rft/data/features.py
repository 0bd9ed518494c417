# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Media of a dataset's features, which are left as they are stored until somebody looks at them."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from datasets import Audio, Dataset, Features, Image, IterableDataset, LargeList, List, Video
from transformers.utils import is_torchcodec_usable

from .columns import Encoded, MediaRef
from .loading import check_file, decoding, encoded_source, install
from .rules import DEFAULT_RULES, MediaRules
from .sources import fetch_file, open_file


class _Stored:
    """A feature that needs no torchcodec to leave media as they are."""

    def encode_example(self, value):
        if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:
            return value
        return {"bytes": None, "path": value} if isinstance(value, str) else super().encode_example(value)


class _StoredAudio(_Stored, Audio):
    pass


class _StoredVideo(_Stored, Video):
    pass


_STORED = {Audio: _StoredAudio, Video: _StoredVideo, Image: Image}


def undecoded(dataset: Any) -> Any:
    """A dataset whose rows hold the media of features that decode as [`~data.columns.Encoded`]."""
    if isinstance(dataset, IterableDataset):
        features = None if dataset._formatting else dataset.features
        if features is None or not any(map(_holds_media, features.values())):
            return dataset
        # `decode` undoes the decoding ahead that remote streams come with
        stream = dataset.decode(num_threads=0).cast(_stored_features(features))
        return stream.map(partial(_encoded_row, features=features))
    if isinstance(dataset, Dataset) and dataset.format["type"] is None:
        return _StoredRows(dataset) if any(map(_holds_media, dataset.features.values())) else dataset
    return dataset


class _StoredRows:
    """The rows of a dataset as they are stored. Casting the dataset would copy its files, of nested features."""

    def __init__(self, dataset: Dataset):
        self._features = dataset.features
        self._stored = _stored_features(dataset.features)
        self._tables = dataset.with_format("arrow", columns=dataset.format["columns"])

    def __len__(self) -> int:
        return len(self._tables)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        table: Any = self._tables[indices]
        columns = self._stored.decode_batch(table.to_pydict())  # of other features
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [_encoded_row(row, self._features) for row in rows]


def restore_media(value: Any) -> Any:
    """Undoes [`~data.columns.rows_to_messages`] for functions that read prompts."""
    if isinstance(value, MediaRef):
        return Decoded(value) if isinstance(value.source, Encoded) else value.source
    if isinstance(value, list):
        return [restore_media(item) for item in value]
    if isinstance(value, dict):
        options = [item.options for item in value.values() if isinstance(item, MediaRef)]
        return {key: restore_media(item) for key, item in value.items()} | (options[0] if options else {})
    return value


def restore_rows(rows: Sequence[Mapping[str, Any]], rules: MediaRules = DEFAULT_RULES) -> list[dict[str, Any]]:
    """Rows as their dataset gives them, for functions that read columns."""
    shared: dict[int, Decoded] = {}

    def restored(value: Any, column: str, row: int) -> Any:
        if isinstance(value, Encoded):
            if id(value) not in shared:
                shared[id(value)] = Decoded(MediaRef(value.kind, value, {}, column, row, rules))
            return shared[id(value)]
        if isinstance(value, list):
            items = [restored(item, f"{column}[{i}]", row) for i, item in enumerate(value)]
            return items if any(map(operator.is_not, items, value)) else value
        if isinstance(value, dict):
            held = {key: restored(item, f"{column}.{key}", row) for key, item in value.items()}
            return held if any(map(operator.is_not, held.values(), value.values())) else value
        return value

    numbers = [getattr(row, "number", place) for place, row in enumerate(rows)]
    return [
        {key: restored(value, key, number) for key, value in row.items()}
        for number, row in zip(numbers, rows, strict=True)
    ]


def as_encoded(value: Any) -> Any:
    """Undoes [`restore_media`] and [`restore_rows`] for functions that decode media themselves."""
    if type(value) is Decoded:  # another look would decode it
        return _ref(value).source
    if isinstance(value, list):
        return [as_encoded(item) for item in value]
    if isinstance(value, dict):
        return {key: as_encoded(item) for key, item in value.items()}
    return value


class Decoded:
    """
    What a feature makes of a medium, made when it is touched: it behaves as that object does, for `isinstance` too.

    Args:
        ref ([`~data.columns.MediaRef`]):
            The medium, with an [`~data.columns.Encoded`] as its source.

    Raises:
        [`~data.columns.MediaError`]: When it is touched, if it can't be decoded, or may not be opened.
        `ImportError`: When it is touched, if Datasets lacks torchcodec, or that FFmpeg.
    """

    __slots__ = ("_medium", "_ref")

    def __init__(self, ref: MediaRef):
        object.__setattr__(self, "_ref", ref)
        object.__setattr__(self, "_medium", None)

    @property
    def __class__(self):
        return type(_medium(self))

    def __getattr__(self, name):
        return getattr(_medium(self), name)

    def __setattr__(self, name, value):
        setattr(_medium(self), name, value)

    def __repr__(self):  # which logs of whole rows write
        return repr(_ref(self))

    def __eq__(self, other):
        return _medium(self) == (_medium(other) if type(other) is Decoded else other)

    def __hash__(self):
        return hash(_medium(self))

    def __len__(self):
        return len(_medium(self))

    def __bool__(self):
        return bool(_medium(self))

    def __iter__(self):
        return iter(_medium(self))

    def __getitem__(self, key):
        return _medium(self)[key]

    def __enter__(self):
        return _medium(self).__enter__()

    def __exit__(self, *error):
        return _medium(self).__exit__(*error)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce_ex__(self, protocol):
        return _medium(self).__reduce_ex__(protocol)


def _ref(decoded: Decoded) -> MediaRef:
    return object.__getattribute__(decoded, "_ref")


def _medium(decoded: Decoded) -> Any:
    medium = object.__getattribute__(decoded, "_medium")
    if medium is None:
        medium = _decode(_ref(decoded))
        object.__setattr__(decoded, "_medium", medium)
    return medium


def _decode(ref: MediaRef) -> Any:
    """What the feature gives, if the rules allow it and the file is one that is safe to open."""
    with decoding(ref):
        file = fetch_file(ref, encoded_source(ref))
        with open_file(file) as stream:
            check_file(ref, stream)
        value, feature = ref.source.value, ref.source.feature
        if not isinstance(feature, Image) and not is_torchcodec_usable(decode=ref.kind):
            name = type(feature).__name__
            message = (
                "Datasets decodes it with torchcodec, which isn't installed or finds no FFmpeg on this machine. "
                f"Install both (`{install('audio')}`), or cast the column to `{name}(decode=False)` and read its "
                "files yourself"
            )
            raise ImportError(str(ref.error(message)))
        return feature.decode_example({**value, "path" if isinstance(file, str) else "bytes": file})


def _is_medium(feature: Any) -> bool:
    """Whether a feature decodes media as the loaders do. One that chooses a mode or a stream decodes them its way."""
    if not isinstance(feature, (Audio, Image, Video)) or not feature.decode:
        return False
    return getattr(feature, "mode", None) is None and getattr(feature, "stream_index", None) is None


def _holds_media(feature: Any) -> bool:
    if isinstance(feature, dict):
        return any(map(_holds_media, feature.values()))
    return _holds_media(feature.feature) if isinstance(feature, (List, LargeList)) else _is_medium(feature)


def _stored_features(features: Features) -> Features:
    return Features({column: _stored(feature) for column, feature in features.items()})


def _stored(feature: Any) -> Any:
    if isinstance(feature, dict):
        return {key: _stored(item) for key, item in feature.items()}
    if isinstance(feature, (List, LargeList)):
        return replace(feature, feature=_stored(feature.feature))
    if not _is_medium(feature):
        return feature
    return next(stored(decode=False) for kind, stored in _STORED.items() if isinstance(feature, kind))


def _encoded_row(row: dict[str, Any], features: Features) -> dict[str, Any]:
    return {
        column: _encoded(value, features[column]) if _holds_media(features.get(column)) else value
        for column, value in row.items()
    }


def _encoded(value: Any, feature: Any) -> Any:
    if isinstance(feature, dict) and isinstance(value, dict):
        return {key: _encoded(item, feature[key]) for key, item in value.items()}
    if isinstance(feature, (List, LargeList)) and isinstance(value, list):
        return [_encoded(item, feature.feature) for item in value]
    return Encoded(value, feature) if _is_medium(feature) and isinstance(value, dict) else value
