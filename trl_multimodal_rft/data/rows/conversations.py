# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Conversations and pairs of other tools' rows, and the datasets that a `dataset_info.json` of theirs names."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ...spelling import did_you_mean
from ..reading.refs import shortened
from .load import reading, required


_NAME = "dataset_info.json"
_ROLES = {"human": "user", "gpt": "assistant", **{role: role for role in ("user", "assistant", "system")}}


def source_of(path: str | Path) -> tuple[str | Path, Callable[[dict[str, Any], int], dict[str, Any]]]:
    """
    The file and a function that renames the columns of a row, for `folder/NAME` of the entry `NAME` of the folder's
    `dataset_info.json`, for that file itself of its only entry. Other paths are returned as they are.
    """
    given = Path(path).expanduser()
    file = given.parent / _NAME
    if not file.is_file() or (given.exists() and given != file):
        return path, lambda row, index: row
    with reading(str(file)):
        entries = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(entries, list):
        entries = {Path(each.get("dataset_path", "")).stem: each for each in entries}
    name = next(iter(entries)) if given == file and len(entries) == 1 else given.name
    entry = entries.get(name, {})
    columns: dict[str, str] = entry.get("columns") or {}
    if "file_name" in entry:  # LLaMA-Factory's, from its names
        defaults = {"prompt": "instruction", "query": "input", "response": "output"}
        columns = {theirs: defaults.get(column, column) for column, theirs in columns.items()}
    elif "dataset_path" not in entry:
        known = f"{file} names no file for {name!r}, only the entries {', '.join(map(repr, entries))}"
        raise ValueError(f"{known}; name one with a file as '{file.parent}/NAME'.{did_you_mean(name, entries)}")
    place = file.parent / entry.get("file_name", entry.get("dataset_path"))
    return place, lambda row, index: {columns.get(key, key): value for key, value in row.items()}


def conversation(
    row: dict[str, Any], index: int, columns: tuple[str, ...] = ("messages", "conversations", "instruction", "query")
) -> tuple[list[dict[str, str]], str]:
    """The messages of a row and the column they come from."""
    column = next((name for name in columns if row.get(name)), columns[-1])
    if column in ("query", "instruction"):
        asked = required(row, index, "messages", "conversations", column)
        asked += f"\n{row['input']}" if column == "instruction" and row.get("input") else ""
        turns: Iterable = [
            {"role": role, "content": text}
            for pair in [*(row.get("history") or ()), [asked, row.get("response" if column == "query" else "output")]]
            for role, text in zip(("user", "assistant"), pair, strict=True)
            if text is not None
        ]
    else:
        turns = required(row, index, column)
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise ValueError(
                f"row {index}, column '{column}': {shortened(repr(turns))} is no list of messages; is it "
                "of another layout?"
            )
    chat = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for i, turn in enumerate(turns):
        turn = {key: value for key, value in turn.items() if value is not None}
        role = turn.get("from", turn.get("role"))
        chat.append({"role": _ROLES.get(role, role), "content": turn.get("value", turn.get("content"))})
        if chat[-1]["role"] not in _ROLES.values() or not isinstance(chat[-1]["content"], str):
            raise ValueError(
                f"row {index}, column '{column}[{i}]': {shortened(turn)} is no text of a user, an assistant "
                "or a system; write it as one (calls of tools and blocks aren't converted), or remove the row."
            )
    return chat, column


def with_answers(chat: list[dict[str, str]], row: dict[str, Any], index: int) -> dict[str, Any]:
    """A prompt with its preferred and its rejected answer, which ms-swift has as the last message and in a column."""
    pair: dict[str, Any] = {"prompt": chat}
    if row.get("chosen") is None and chat[-1]["role"] == "assistant":
        row = {**row, "chosen": chat.pop()}
    for name, columns in (("chosen", ()), ("rejected", ("rejected_response", "rejected_messages"))):
        value = required(row, index, name, *columns)
        value = {"role": "assistant", "content": value} if isinstance(value, str) else value
        *before, answer = conversation({name: value if isinstance(value, list) else [value]}, index, (name,))[0]
        if answer["role"] != "assistant" or before not in ([], chat, chat[1:]):
            raise ValueError(f"row {index}: its {name} answer isn't the assistant's to the same prompt; correct it.")
        pair[name] = [answer]
    return pair
