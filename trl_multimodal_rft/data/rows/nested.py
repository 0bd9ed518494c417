# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Traversal of nested features and values."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar, cast

from datasets import Audio, Dataset, Image, IterableDataset, LargeList, List, Value, Video
from datasets.features.features import FeatureType


Rows = Dataset | IterableDataset | Sequence[Mapping[str, Any]]
T = TypeVar("T")


def feature_leaves(feature: FeatureType | None, key: str = "") -> Iterator[tuple[str, FeatureType | None]]:
    """Yields the leaves of a nested feature, except those of type `null`, each with the key that holds it."""
    if isinstance(feature, (List, LargeList)):
        yield from feature_leaves(feature.feature, key)
    elif isinstance(feature, dict):
        for name, item in feature.items():
            yield from feature_leaves(item, name)
    elif not (isinstance(feature, Value) and feature.dtype == "null"):
        yield key, feature


def is_media_feature(feature: FeatureType | None) -> TypeGuard[Audio | Image | Video]:
    return isinstance(feature, (Audio, Image, Video))


def map_features(value: T, feature: FeatureType, change: Callable[[Any, FeatureType, str], Any], path: str = "") -> T:
    """Returns a nested value, with `change(item, feature, path)` in place of the item of each leaf feature."""
    if isinstance(feature, dict) and isinstance(value, dict):
        return cast(T, {key: map_features(item, feature[key], change, f"{path}.{key}") for key, item in value.items()})
    if isinstance(feature, (List, LargeList)) and isinstance(value, list):
        return cast(T, [map_features(item, feature.feature, change, f"{path}[{i}]") for i, item in enumerate(value)])
    return change(value, feature, path)


def map_items(value: T, change: Callable[[Any, str], Any], path: str = "") -> T:
    """Returns nested lists and dictionaries, with `change(item, path)` for other items. Reuses unchanged parts."""
    # `issubclass` of the type, since `isinstance` decodes a `Decoded`
    if issubclass(type(value), list):
        before = cast(list, value)
        items = [map_items(item, change, f"{path}[{i}]") for i, item in enumerate(before)]
        return cast(T, items) if any(map(operator.is_not, items, before)) else value
    if issubclass(type(value), dict):
        fields = cast(dict, value)
        entries = {key: map_items(item, change, f"{path}.{key}") for key, item in fields.items()}
        return cast(T, entries) if any(map(operator.is_not, entries.values(), fields.values())) else value
    return change(value, path)
