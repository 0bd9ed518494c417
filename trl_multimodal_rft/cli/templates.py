# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Text columns from templates, such as prompts, and system messages."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets
from datasets.features.features import require_decoding

from ..data.rows.labels import as_class_number, class_names
from ..data.rows.names import TEACHER


# Columns that `--system_prompt` changes
_PROMPT_COLUMNS = ("prompt", f"{TEACHER}prompt")

Prompt = str | list[dict[str, Any]]

# Matches `{column}`, and `{{word}}`, which stands for the text `{word}`
_BRACED_NAMES = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")


def with_texts(dataset: Dataset | IterableDataset, templates: Mapping[str, str | None]) -> Dataset | IterableDataset:
    """Adds the text columns that `templates` define, by column name. Media aren't read or copied."""
    # A new column has the name of the template's option, such as `prompt` of `--prompt`. `used_columns` maps each
    # column in a template to this option.
    chosen_templates = {name: template for name, template in templates.items() if template is not None}
    used_columns = {}
    for option, text in chosen_templates.items():
        used_columns |= {name: option for _, name in _BRACED_NAMES.findall(text) if name}
    columns = dataset.column_names
    features = dataset.features or {}
    for name, option in used_columns.items():
        if columns is not None and name not in columns:
            raise ValueError(
                f"`--{option}` names the column {name!r}, but the dataset has only {sorted(columns)}. Name one of "
                f"these, or write `{{{{{name}}}}}` for the text `{{{name}}}`."
            )
        if require_decoding(features.get(name), ignore_decode_attribute=True):
            raise ValueError(
                f"The column {name!r} has media, not text; in `--{option}`, write `<image>`, `<audio>` "
                "or `<video>` where a medium goes."
            )

    def fill(row: Mapping[str, Any], row_index: int) -> dict[str, Any]:
        values = {name: class_names(as_class_number(row.get(name), features.get(name))) for name in used_columns}
        return {option: _fill_template(text, values, row_index, option) for option, text in chosen_templates.items()}

    return _with_columns(dataset, list(used_columns), {option: Value("string") for option in chosen_templates}, fill)


def with_system_message(dataset: Dataset | IterableDataset, text: str | None) -> Dataset | IterableDataset:
    """Adds a system message to a dataset's prompts, and to a teacher's prompts that lack a system message."""
    if text is None:
        return dataset
    columns = dataset.column_names
    features = dataset.features or {}
    if columns is not None and "prompt" not in columns:
        raise ValueError(
            f"The dataset has no column 'prompt' for `--system_prompt`, only {sorted(columns)}; make one with "
            "`--prompt`."
        )
    new_features = {
        name: features.get(name) for name in _PROMPT_COLUMNS if name == "prompt" or name in (columns or ())
    }
    for name, feature in new_features.items():
        if require_decoding(feature, ignore_decode_attribute=True):
            raise ValueError(
                f"The column {name!r} has media among its messages, which `--system_prompt` doesn't support; write "
                "the system message into the column."
            )
        if feature is None or isinstance(feature, Value):
            new_features[name] = List({"role": Value("string"), "content": Value("string")})

    def add_message(row: Mapping[str, Any], row_index: int) -> dict[str, Any]:
        return {name: _with_system(str(text), row[name], row_index, name) for name in _PROMPT_COLUMNS if name in row}

    return _with_columns(dataset, [*new_features], new_features, add_message)


def _with_columns(
    dataset: Dataset | IterableDataset, source_columns: list[str], new_features: dict[str, Any], make: Callable
) -> Dataset | IterableDataset:
    """`new_features` holds types (features of `datasets`) by name. `make` computes values from `source_columns`."""
    if not new_features:
        return dataset
    if isinstance(dataset, IterableDataset):
        stream = dataset.decode(False)
        features = stream.features and Features({**stream.features, **new_features})
        return stream.map(make, with_indices=True, features=features).decode(True)
    source_columns = source_columns or dataset.column_names[:1]
    new_columns = dataset.select_columns(source_columns).map(
        make,
        with_indices=True,
        remove_columns=[name for name in source_columns if name not in new_features],
        features=Features(new_features),
        desc=", ".join(new_features),
    )
    unchanged = [name for name in dataset.column_names if name not in new_features]
    return concatenate_datasets([dataset.select_columns(unchanged), new_columns], axis=1) if unchanged else new_columns


def _fill_template(template: str, row: Mapping[str, Any], row_index: int, option: str) -> str:
    """Fills a template: `"{question} {{x}}"` with the question "Why?" becomes "Why? {x}"."""

    def value(match: re.Match) -> str:
        literal, name = match.groups()  # one of them is `None`
        if literal:
            return f"{{{literal}}}"
        if not isinstance(row.get(name), (str, int, float)):
            raise ValueError(
                f"row {row_index}, column {name!r}: it is {type(row.get(name)).__name__}, but `--{option}` takes text "
                "and numbers; name another column, or add one with the text."
            )
        return str(row[name])

    return _BRACED_NAMES.sub(value, template)


def _with_system(text: str, prompt: Prompt | None, row_index: int, column: str) -> Prompt | None:
    """Only a teacher's prompt may be missing, or have a system message already."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages is None and column != "prompt":
        return None
    if not messages:
        raise ValueError(f"row {row_index}, column {column!r}: it has no prompt; write one, or drop the row.")
    if messages[0]["role"] == "system":
        if column != "prompt":
            return messages
        raise ValueError(f"row {row_index}, column 'prompt': it has a system message; leave out `--system_prompt`.")
    has_blocks = isinstance(messages[0]["content"], list)
    return [{"role": "system", "content": [{"type": "text", "text": text}] if has_blocks else text}, *messages]
