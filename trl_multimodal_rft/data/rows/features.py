# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Features of a dataset (its types of columns), and media that are decoded only when a function reads them."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, SupportsIndex, TypeGuard, TypeVar, cast, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Audio, Dataset, Features, Image, IterableDataset, LargeList, List, Value, Video
from datasets.features.features import FeatureType

from ...versions import is_torchcodec_usable
from ..reading.decoding import check_file, decoding, install
from ..reading.refs import Encoded, MediaRef
from ..reading.rules import DEFAULT_RULES, MediaRules
from ..reading.sources import encoded_source, fetch_file, open_file
from .labels import ClassNumber, as_class_number, class_names, holds_labels
from .names import TEXT_COLUMNS
from .nested import feature_leaves, map_features, map_items


Rows = Dataset | IterableDataset | Sequence[Mapping[str, Any]]
T = TypeVar("T")


def is_media_feature(feature: FeatureType | None) -> TypeGuard[Audio | Image | Video]:
    return isinstance(feature, (Audio, Image, Video))


def holds_files(dataset: Dataset) -> bool:
    """Returns whether columns of a dataset may hold the contents of media, which take time to read."""
    leaves = [leaf for _, leaf in feature_leaves(dict(dataset.features))]
    return any(not isinstance(leaf, Value) or leaf.dtype in ("binary", "large_binary") for leaf in leaves)


def is_transformed(dataset: Dataset) -> bool:
    """Returns whether rows of a dataset pass through its own code: a transform, or an overridden `__getitem__`."""
    if not isinstance(dataset, Dataset):
        return True
    own_methods = (getattr(type(dataset), name) for name in ("__getitem__", "__getitems__"))
    return dataset.format["type"] == "custom" or {*own_methods} != {Dataset.__getitem__, Dataset.__getitems__}


class _StoredAudio(Audio):
    """Audio feature that stores files without torchcodec."""

    def encode_example(self, value: str | bytes | dict[str, Any]) -> dict[str, Any]:
        return _file_entry(value) or super().encode_example(value)


class _StoredVideo(Video):
    """Video feature that stores files without torchcodec."""

    def encode_example(self, value: str | bytes | dict[str, Any]) -> dict[str, Any]:
        return _file_entry(value) or super().encode_example(value)


def _file_entry(value: Any) -> dict[str, Any] | None:
    """Returns the dictionary that a feature stores for a file, or `None` for values that torchcodec must encode."""
    if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:
        return value
    return {"bytes": None, "path": value} if isinstance(value, str) else None


_OUTLINED_ROWS = 256  # rows of a table that are read at a time

# Features that store files without torchcodec, by the features that decode
_STORING_FEATURES = {Audio: _StoredAudio, Video: _StoredVideo, Image: Image}


@overload
def undecoded(dataset: IterableDataset) -> IterableDataset: ...


@overload
def undecoded(dataset: T) -> "T | StoredRows": ...


def undecoded(dataset: T) -> "T | IterableDataset | StoredRows":
    """
    Returns a dataset whose rows hold [`~data.reading.refs.Encoded`] media in place of decoded media, and class labels
    as [`~data.rows.labels.ClassNumber`]s, or as names in columns of texts. A dataset with a format, such as `"torch"`,
    or with code of its own is returned unchanged.
    """
    if isinstance(dataset, IterableDataset):
        features = None if dataset._formatting else dataset.features
        if features is None or not any(map(_is_converted, features.values())):
            return dataset
        # `num_threads=0` turns off decoding in advance, the default of remote streams
        return (
            dataset.decode(num_threads=0)
            .cast(_without_decoding(features))
            .map(partial(_encoded_row, features=features))
        )
    if isinstance(dataset, Dataset) and dataset.format["type"] is None and not is_transformed(dataset):
        return StoredRows(dataset) if any(map(_is_converted, dataset.features.values())) else dataset
    return dataset


class StoredRows:
    """
    Rows of a dataset, with stored media. Reads Arrow's tables rather than a cast of the dataset, which would copy the
    files in nested features.
    """

    def __init__(self, dataset: Dataset):
        self._features = dataset.features
        self._stored_features = _without_decoding(dataset.features)
        self._tables = dataset.with_format("arrow", columns=dataset.format["columns"])

    def __len__(self) -> int:
        return len(self._tables)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        # Decodes the features other than media
        columns = self._stored_features.decode_batch(cast(pa.Table, self._tables[indices]).to_pydict())
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [_encoded_row(row, self._features) for row in rows]


def table_order(dataset: Dataset) -> np.ndarray:
    """Returns the indices of a dataset's rows in the order in which its table has them."""
    return np.arange(len(dataset)) if dataset._indices is None else np.argsort(_positions(dataset), kind="stable")


def outlined_rows(
    dataset: Dataset, columns: Sequence[str], indices: np.ndarray
) -> Iterator[tuple[int, dict[str, Any]]]:
    """
    Yields rows, by indices in [`table_order`], without the contents of their media: the bytes of a file are one byte,
    and an innermost list of numbers has one item. Copies nothing large.
    """
    features = Features({column: dataset.features[column] for column in columns})
    stored_features = _without_decoding(features)
    table = dataset.data.table.select(list(columns))
    positions = indices if dataset._indices is None else _positions(dataset)[indices]
    start = 0
    while start < len(indices):
        first = positions[start]
        end = int(np.searchsorted(positions, first + _OUTLINED_ROWS))
        part = table.slice(first, positions[end - 1] - first + 1)
        rows = positions[start:end] - first
        cells = {name: _cells(column, rows) for name, column in zip(columns, part.columns, strict=True)}
        batch = stored_features.decode_batch(cells)
        for index, values in zip(indices[start:end].tolist(), zip(*batch.values(), strict=True), strict=True):
            yield index, _encoded_row(dict(zip(batch, values, strict=True)), features)
        start = end


def _positions(dataset: Dataset) -> np.ndarray:
    assert dataset._indices is not None
    return dataset._indices.column(0).to_numpy()


def _cells(column: pa.ChunkedArray, rows: np.ndarray) -> list[Any]:
    """Returns the outlined cells of some rows. For arrays of a fixed size, they are a number or `None`."""
    if isinstance(column.type, pa.ExtensionType) or pa.types.is_fixed_size_list(column.type):
        return [np.zeros(1) if is_valid else None for is_valid in np.asarray(column.is_valid())[rows]]
    outlined = pa.chunked_array([_outline(chunk) for chunk in column.chunks])
    return outlined.take(pa.array(rows)).to_pylist()


def _outline(array: pa.Array, depth: int = 0) -> pa.Array:
    """Returns an array without the contents of files and of lists of numbers, with the same missing values."""
    kind = array.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pc.if_else(pc.is_valid(array), pa.scalar(b"\0"), pa.scalar(None, pa.binary()))
    if pa.types.is_string_view(kind):
        return pc.cast(array, pa.string())
    if pa.types.is_struct(kind) and kind.num_fields:
        fields = [_outline(child) for child in array.flatten()]
        return pa.StructArray.from_arrays(fields, [field.name for field in kind], mask=pc.is_null(array))
    is_large = pa.types.is_large_list(kind)
    if not is_large and not pa.types.is_list(kind):
        return array
    is_nested = pa.types.is_list(kind.value_type) or pa.types.is_large_list(kind.value_type)
    if _holds_numbers(kind) and (depth or not is_nested):  # the outermost list may be one of media
        array = pc.list_slice(array, 0, 1)
        is_large = pa.types.is_large_list(array.type)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64 if is_large else np.int32)
    list_type = pa.LargeListArray if is_large else pa.ListArray
    values = _outline(array.flatten(), depth + 1)
    return list_type.from_arrays(pa.array(offsets), values, mask=pc.is_null(array))


def _holds_numbers(kind: pa.DataType) -> bool:
    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def restore_media(value: T) -> T:
    """Reverses [`~data.rows.columns.rows_to_messages`]: returns messages with media in place of references."""
    if isinstance(value, MediaRef):
        return cast(T, Decoded(value) if isinstance(value.source, Encoded) else value.source)
    if isinstance(value, list):
        return cast(T, [restore_media(item) for item in value])
    if isinstance(value, dict):
        # In parsed messages, the options of a block are in its reference
        options = [item.options for item in value.values() if isinstance(item, MediaRef)]
        return cast(T, {key: restore_media(item) for key, item in value.items()} | (options[0] if options else {}))
    return value


def restore_rows(rows: Sequence[Mapping[str, Any]], rules: MediaRules = DEFAULT_RULES) -> list[dict[str, Any]]:
    """Returns rows with [`Decoded`] in place of [`Encoded`] media, for functions that read columns of the dataset."""
    proxies: dict[int, Decoded] = {}  # by the `id` of encoded media, which rows may share

    def proxy(value: T, path: str, row_index: int) -> T | Decoded:
        if not isinstance(value, Encoded):
            return value
        if id(value) not in proxies:
            proxies[id(value)] = Decoded(MediaRef(value.modality, value, {}, path, row_index, rules))
        return proxies[id(value)]

    return [
        {
            key: map_items(value, partial(proxy, row_index=getattr(row, "row_index", i)), key)
            for key, value in row.items()
        }
        for i, row in enumerate(rows)
    ]


def as_encoded(value: T) -> T:
    """Returns a nested value with [`Encoded`] in place of [`Decoded`], for functions that decode media themselves."""
    return map_items(value, lambda item, path: _ref(item).source if type(item) is Decoded else item)


class Decoded:
    """Proxy of a medium that its feature decodes on first use. `isinstance` sees the class of the decoded object."""

    __slots__ = ("_medium", "_ref")

    def __init__(self, ref: MediaRef):
        object.__setattr__(self, "_ref", ref)
        object.__setattr__(self, "_medium", None)

    @property
    def __class__(self):
        return type(_media(self))

    def __getattr__(self, name: str):
        return getattr(_media(self), name)

    def __setattr__(self, name: str, value: Any):
        setattr(_media(self), name, value)

    def __repr__(self):  # doesn't decode, as logs of rows call it
        return repr(_ref(self))

    def __eq__(self, other: object):
        return _media(self) == (_media(other) if type(other) is Decoded else other)

    def __enter__(self):
        return _media(self).__enter__()

    def __exit__(self, *error: BaseException | type[BaseException] | TracebackType | None):
        return _media(self).__exit__(*error)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo: dict):
        return self

    def __reduce_ex__(self, protocol: SupportsIndex):
        return _media(self).__reduce_ex__(protocol)


# Python looks up special methods in the type, without `__getattr__`
_FORWARDED = {"__len__": len, "__bool__": bool, "__iter__": iter, "__hash__": hash, "__getitem__": operator.getitem}
for _name, _function in _FORWARDED.items():
    setattr(Decoded, _name, lambda self, *args, function=_function: function(_media(self), *args))


def _ref(decoded: Decoded) -> MediaRef:
    return object.__getattribute__(decoded, "_ref")


def _media(decoded: Decoded) -> Any:
    """Returns the medium. The first call decodes it by its feature, after checks of its source and its file."""
    media = object.__getattribute__(decoded, "_medium")
    if media is not None:
        return media
    ref = _ref(decoded)
    with decoding(ref):
        file = fetch_file(ref, encoded_source(ref))
        with open_file(ref, file) as stream:
            check_file(ref, stream)
            if ref.rules.allowed_media_folders is not None:  # the feature would open the path again, unchecked
                stream.seek(0)
                file = stream.read()
        value = ref.source.value
        feature = ref.source.feature
        if not isinstance(feature, Image) and not is_torchcodec_usable():
            name = type(feature).__name__
            error = ref.error(
                "Datasets decodes it with torchcodec, which isn't installed or finds no FFmpeg on this machine. "
                f"Install FFmpeg and torchcodec (`{install('audio')}`), or cast the column to "
                f"`{name}(decode=False)` and read its files yourself"
            )
            raise ImportError(str(error))
        media = feature.decode_example({**value, "path" if isinstance(file, str) else "bytes": file})
    object.__setattr__(decoded, "_medium", media)
    return media


def _decodes_media(feature: FeatureType | None) -> bool:
    """Returns whether a feature decodes media, without options that the loaders lack: `mode` and `stream_index`."""
    decodes = is_media_feature(feature) and feature.decode
    return decodes and getattr(feature, "mode", None) is None and getattr(feature, "stream_index", None) is None


def _holds_media(feature: FeatureType | None) -> bool:
    """Returns whether a feature, which may be nested, decodes media that the loaders support."""
    return any(_decodes_media(leaf) for _, leaf in feature_leaves(feature))


def _is_converted(feature: FeatureType | None) -> bool:
    return _holds_media(feature) or holds_labels(feature)


def _without_decoding(feature: FeatureType) -> FeatureType:
    if isinstance(feature, dict):
        return type(feature)({key: _without_decoding(item) for key, item in feature.items()})
    if isinstance(feature, (List, LargeList)):
        return replace(feature, feature=_without_decoding(feature.feature))
    if not _decodes_media(feature):
        return feature
    return next(
        storing_type(decode=False)
        for media_type, storing_type in _STORING_FEATURES.items()
        if isinstance(feature, media_type)
    )


def _encoded_row(row: dict[str, Any], features: Features) -> dict[str, Any]:
    encoded = {}
    for column, value in row.items():
        feature = features.get(column)
        if _is_converted(feature):
            value = map_features(value, feature, partial(_encoded_leaf, is_text=column in TEXT_COLUMNS))
        encoded[column] = value
    return encoded


def _encoded_leaf(value: T, feature: FeatureType, path: str, is_text: bool) -> T | Encoded | ClassNumber | str | None:
    if _decodes_media(feature) and isinstance(value, dict):
        return Encoded(value, feature)
    label = as_class_number(value, feature)
    return class_names(label) if is_text else label
