# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Walks through nested features and values."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from datasets import Audio, Dataset, Image, IterableDataset, LargeList, List, Value, Video


Rows = Dataset | IterableDataset | Sequence[Mapping[str, Any]]


def feature_leaves(feature: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The features in a nested one that hold values, each with the key that it is stored under."""
    if isinstance(feature, (List, LargeList)):
        yield from feature_leaves(feature.feature, key)
    elif isinstance(feature, dict):
        for name, item in feature.items():
            yield from feature_leaves(item, name)
    elif not (isinstance(feature, Value) and feature.dtype == "null"):
        yield key, feature


def is_media_feature(feature: Any) -> bool:
    return isinstance(feature, (Audio, Image, Video))


def map_features(value: Any, feature: Any, change: Callable[[Any, Any, str], Any], place: str = "") -> Any:
    """A nested value in which `change(item, feature, place)` replaces what the leaves of its feature describe."""
    if isinstance(feature, dict) and isinstance(value, dict):
        return {key: map_features(item, feature[key], change, f"{place}.{key}") for key, item in value.items()}
    if isinstance(feature, (List, LargeList)) and isinstance(value, list):
        return [map_features(item, feature.feature, change, f"{place}[{i}]") for i, item in enumerate(value)]
    return change(value, feature, place)


def map_items(value: Any, change: Callable[[Any, str], Any], place: str = "") -> Any:
    """Nested lists and dictionaries in which `change(item, place)` replaces the rest. Unchanged parts are reused."""
    # By its type, since `isinstance` decodes a `Decoded`
    if issubclass(type(value), list):
        items = [map_items(item, change, f"{place}[{i}]") for i, item in enumerate(value)]
        return items if any(map(operator.is_not, items, value)) else value
    if issubclass(type(value), dict):
        held = {key: map_items(item, change, f"{place}.{key}") for key, item in value.items()}
        return held if any(map(operator.is_not, held.values(), value.values())) else value
    return change(value, place)
