# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Leaves of nested features and values."""

import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from datasets import LargeList, List, Value
from datasets.features.features import FeatureType


T = TypeVar("T")


def feature_leaves(feature: FeatureType | None, key: str = "") -> Iterator[tuple[str, FeatureType | None]]:
    """Yields the innermost key and the feature of each leaf of a nested feature, except leaves of type `null`."""
    if isinstance(feature, (List, LargeList)):
        yield from feature_leaves(feature.feature, key)
    elif isinstance(feature, dict):
        for name, item in feature.items():
            yield from feature_leaves(item, name)
    elif not (isinstance(feature, Value) and feature.dtype == "null"):
        yield key, feature


def map_features(value: T, feature: FeatureType, change: Callable[[Any, FeatureType, str], Any], path: str = "") -> T:
    """Returns a nested value, with `change(item, feature, path)` in place of the item of each leaf feature."""
    if isinstance(feature, dict) and isinstance(value, dict):
        return cast(T, {key: map_features(item, feature[key], change, f"{path}.{key}") for key, item in value.items()})
    if isinstance(feature, (List, LargeList)) and isinstance(value, list):
        return cast(T, [map_features(item, feature.feature, change, f"{path}[{i}]") for i, item in enumerate(value)])
    return change(value, feature, path)


def map_items(value: T, change: Callable[[Any, str], Any], path: str = "") -> T:
    """Applies `change(item, path)` to items of nested lists and dictionaries. Doesn't copy unchanged containers."""
    # Not `isinstance(value, list)`, which would decode a `Decoded`
    if issubclass(type(value), list):
        old_items = cast(list, value)
        new_items = [map_items(item, change, f"{path}[{i}]") for i, item in enumerate(old_items)]
        return cast(T, new_items) if any(map(operator.is_not, new_items, old_items)) else value
    if issubclass(type(value), dict):
        old_fields = cast(dict, value)
        new_fields = {key: map_items(item, change, f"{path}.{key}") for key, item in old_fields.items()}
        return cast(T, new_fields) if any(map(operator.is_not, new_fields.values(), old_fields.values())) else value
    return change(value, path)
