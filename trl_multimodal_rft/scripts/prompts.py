# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prompts for datasets that have none, or none with a system message."""

import re
from collections.abc import Mapping
from typing import Any

from datasets import (
    Audio,
    Dataset,
    Features,
    Image,
    IterableDataset,
    LargeList,
    List,
    Value,
    Video,
    concatenate_datasets,
)


# "{{word}}" or "{word}"
_NAMES = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")


def with_prompts(
    dataset: Dataset | IterableDataset, template: str | None = None, system: str | None = None
) -> Dataset | IterableDataset:
    """
    Makes the column `prompt`. Media stay where they are stored, neither read nor copied.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Rows.
        template (`str`, *optional*):
            Text in which `{column}` is what that column of the row holds, a text or number. Other braces stay, and
            `{{word}}` is `{word}`. By default the dataset's own prompts.
        system (`str`, *optional*):
            Text of a system message before the prompt.

    Returns:
        `Dataset` or `IterableDataset`: The rows, with prompts that are texts, or with a system message, messages.

    Raises:
        `ValueError`: If there is no such column, a row has neither text nor number in it, or prompts have a system
            message already or hold media.
    """
    if template is None and system is None:
        return dataset
    named = ["prompt"] if template is None else [name for _, name in _NAMES.findall(template) if name]
    columns = dataset.column_names
    missing = [] if columns is None else [name for name in named if name not in columns]
    if missing:
        raise ValueError(
            f"The dataset has no column {missing[0]!r} for its prompts, only {sorted(columns or ())}; name those in "
            "`--prompt`, and write `{{word}}` for braces around a word."
        )
    for name in named:
        if _holds_media((dataset.features or {}).get(name)):
            remedy = (
                "write the system message into the column" if template is None else f"write `<{name}>` for its place"
            )
            raise ValueError(f"The column {name!r} has media, which texts of prompts can't hold; {remedy}.")

    def prompt_of(row: Mapping[str, Any], place: int) -> dict[str, Any]:
        return {
            "prompt": _with_system(row["prompt"] if template is None else _filled(template, row, place), system, place)
        }

    if isinstance(dataset, IterableDataset):
        stream = dataset.decode(False)
        features = stream.features and Features(
            {**stream.features, "prompt": _prompt_feature(stream, template, system)}
        )
        return stream.map(prompt_of, with_indices=True, features=features).decode(True)
    kept = list(dict.fromkeys(named)) or dataset.column_names[:1]
    made = dataset.select_columns(kept).map(
        prompt_of,
        with_indices=True,
        remove_columns=[name for name in kept if name != "prompt"],
        features=Features({"prompt": _prompt_feature(dataset, template, system)}),
        desc="prompts",
    )
    rest = [name for name in dataset.column_names if name != "prompt"]
    return concatenate_datasets([dataset.select_columns(rest), made], axis=1) if rest else made


def _filled(template: str, row: Mapping[str, Any], place: int) -> str:
    def value(match: re.Match) -> str:
        literal, name = match.groups()
        if literal:
            return f"{{{literal}}}"
        if not isinstance(row.get(name), (str, int, float)):
            raise ValueError(
                f"row {place}, column {name!r}: it is {type(row.get(name)).__name__}, and `--prompt` takes text and "
                "numbers; name another column, or add one with the text."
            )
        return str(row[name])

    return _NAMES.sub(value, template)


def _with_system(prompt: str | list[dict[str, Any]], system: str | None, place: int) -> str | list[dict[str, Any]]:
    if system is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not messages or messages[0]["role"] == "system":
        raise ValueError(f"row {place}, column 'prompt': it has a system message; leave out `--system_prompt`.")
    blocks = isinstance(messages[0]["content"], list)
    return [{"role": "system", "content": [{"type": "text", "text": system}] if blocks else system}, *messages]


def _prompt_feature(dataset: Dataset | IterableDataset, template: str | None, system: str | None) -> Any:
    own = None if template is not None else (dataset.features or {}).get("prompt")
    if own is not None and not isinstance(own, Value):
        return own
    return Value("string") if system is None else List({"role": Value("string"), "content": Value("string")})


def _holds_media(feature: Any) -> bool:
    if isinstance(feature, (list, List, LargeList)):
        return any(map(_holds_media, feature if isinstance(feature, list) else [feature.feature]))
    if isinstance(feature, dict):
        return any(map(_holds_media, feature.values()))
    return isinstance(feature, (Audio, Image, Video))
