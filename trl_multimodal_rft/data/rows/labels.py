# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Class labels of a dataset, which are numbers in its rows and names in texts and in rewards of this package."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, TypeVar, cast

from datasets import ClassLabel, Dataset, Features, IterableDataset, LargeList, List, Value, concatenate_datasets
from datasets.features.features import FeatureType

from .nested import feature_leaves, map_features, map_items


T = TypeVar("T")


class ClassNumber(int):
    """Number of a class label, as Datasets gives it, with the `name` of its class. -1 is no class, without a name."""

    name: str | None

    def __new__(cls, number: int, name: str | None = None) -> "ClassNumber":
        value = super().__new__(cls, number)
        value.name = name
        return value


class _ClassName(ClassLabel):
    """Class label that is read as its name, and as `None` for -1, the missing label."""

    def decode_example(self, value: int, token_per_repo_id: dict[str, str | bool | None] | None = None) -> str | None:
        return None if value < 0 else self.int2str(int(value))  # an array's number, with a format


def holds_labels(feature: FeatureType | None) -> bool:
    """Returns whether a feature, which may be nested, has class labels that are read as numbers."""
    return any(isinstance(leaf, ClassLabel) and type(leaf) is not _ClassName for _, leaf in feature_leaves(feature))


def as_class_number(value: T, feature: FeatureType | None) -> T | ClassNumber:
    """Returns the [`ClassNumber`] of a cell, also of an array's number. Returns other values unchanged."""
    if not isinstance(feature, ClassLabel) or value is None or isinstance(value, (str, list)):
        return value
    number = int(cast(int, value))
    return ClassNumber(number, None if number < 0 else feature.int2str(number))


def class_names(value: T) -> T:
    """Returns a nested value with the names of class labels in place of [`ClassNumber`]s."""
    return map_items(value, lambda item, path: item.name if type(item) is ClassNumber else item)


def class_numbers(value: T) -> T:
    """Returns a nested value with plain numbers in place of [`ClassNumber`]s."""
    return map_items(value, lambda item, path: int(item) if type(item) is ClassNumber else item)


def with_class_names(dataset: T, columns: Collection[str] | None = None) -> T:
    """
    Returns a dataset whose rows have the names of class labels in place of their numbers, in some columns or in all.
    Also takes a stream and a dictionary of datasets. Other rows, and those of a transform, are returned unchanged.
    """
    if isinstance(dataset, dict):
        named = {split: with_class_names(rows, columns) for split, rows in dataset.items()}
        return type(dataset)(named)  # pyrefly: ignore[bad-return]
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        return dataset
    if not isinstance(dataset, (Dataset, IterableDataset)):
        return dataset
    features = dataset.features or {}
    labels = [name for name in features if holds_labels(features[name]) and (columns is None or name in columns)]
    nested = [name for name in labels if not isinstance(features[name], ClassLabel)]
    if isinstance(dataset, Dataset) and nested and dataset.format["type"] is None:
        # A cast would copy all columns with their files, and forget how nested labels are read
        texts = Features({name: _with_leaves(features[name], lambda leaf: Value("string")) for name in nested})
        names = dataset.select_columns(nested).map(_row_with_names, fn_kwargs={"features": features}, features=texts)
        others = dataset.remove_columns(nested)
        parts = [others, names] if others.column_names else [names]
        order = dataset.column_names
        dataset = concatenate_datasets(parts, axis=1).select_columns(order)
    for name in (name for name in labels if isinstance(dataset, IterableDataset) or name not in nested):
        dataset = dataset.cast_column(name, _with_leaves(features[name], lambda leaf: _ClassName(names=leaf.names)))
    return dataset


def _row_with_names(row: dict[str, Any], features: Features) -> dict[str, Any]:
    return {
        name: map_features(value, features[name], lambda item, leaf, path: class_names(as_class_number(item, leaf)))
        for name, value in row.items()
    }


def _with_leaves(feature: FeatureType, change: Callable[[ClassLabel], FeatureType]) -> FeatureType:
    """Returns a nested feature with other features in place of its class labels."""
    if isinstance(feature, dict):
        return {key: _with_leaves(item, change) for key, item in feature.items()}
    if isinstance(feature, (List, LargeList)):
        return replace(feature, feature=_with_leaves(feature.feature, change))
    return change(feature) if isinstance(feature, ClassLabel) else feature
