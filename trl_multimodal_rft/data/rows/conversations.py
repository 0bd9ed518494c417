# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Conversations and pairs in the rows of other tools, and the datasets in a `dataset_info.json`."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ...spelling import did_you_mean
from ..reading.refs import shortened
from .load import one_line_errors, required


_INFO_FILE = "dataset_info.json"
_ROLES = {"human": "user", "gpt": "assistant", **{role: role for role in ("user", "assistant", "system")}}


def source_of(path: str | Path) -> tuple[str | Path, Callable[[dict[str, Any], int], dict[str, Any]]]:
    """
    Returns a dataset's file, and a function of a row and its index that renames the columns of the row.

    `folder/NAME` stands for the entry `NAME` of `folder/dataset_info.json`. The path of a `dataset_info.json` stands
    for its only entry. Other paths are returned unchanged.
    """
    source = Path(path).expanduser()
    file = source.parent / _INFO_FILE
    if not file.is_file() or (source.exists() and source != file):
        return path, lambda row, index: row
    with one_line_errors(str(file)):
        entries = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(entries, list):  # of ms-swift, which names a dataset by the stem of its file
        entries = {Path(item.get("dataset_path", "")).stem: item for item in entries}
    name = next(iter(entries)) if source == file and len(entries) == 1 else source.name
    entry = entries.get(name, {})
    columns: dict[str, str] = entry.get("columns") or {}
    if "file_name" in entry:  # LLaMA-Factory maps its names to names in the file, and ms-swift maps in reverse
        alpaca_names = {"prompt": "instruction", "query": "input", "response": "output"}
        columns = {name_in_file: alpaca_names.get(column, column) for column, name_in_file in columns.items()}
    elif "dataset_path" not in entry:
        problem = f"{file} names no file for {name!r}, only the entries {', '.join(map(repr, entries))}"
        raise ValueError(f"{problem}; name one with a file as '{file.parent}/NAME'.{did_you_mean(name, entries)}")
    data_file = file.parent / entry.get("file_name", entry.get("dataset_path"))
    return data_file, lambda row, index: {columns.get(key, key): value for key, value in row.items()}


def conversation(
    row: dict[str, Any],
    index: int,
    columns: tuple[str, ...] = ("messages", "conversations", "conversation", "instruction", "query"),
) -> tuple[list[dict[str, str]], str]:
    """Returns the messages of a row, with `role` and `content`, and the column in `columns` that holds them."""
    column = next((name for name in columns if row.get(name)), columns[-1])
    if column in ("query", "instruction"):
        question = required(row, index, "messages", "conversations", column)
        question += f"\n{row['input']}" if column == "instruction" and row.get("input") else ""
        # A pair is a question and its answer, which is `None` where the row ends with the question
        turns: Iterable = [
            {"role": role, "content": text}
            for turn_pair in [
                *(row.get("history") or ()),
                [question, row.get("response" if column == "query" else "output")],
            ]
            for role, text in zip(("user", "assistant"), turn_pair, strict=True)
            if text is not None
        ]
    else:
        turns = required(row, index, column)
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise ValueError(
                f"row {index}, column '{column}': {shortened(repr(turns))} is no list of messages; correct the "
                "row, or choose another layout."
            )
        turns = [message for turn in turns for message in _messages_of(turn)]
    chat = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for i, turn in enumerate(turns):
        turn = {key: value for key, value in turn.items() if value is not None}
        role = turn.get("from", turn.get("role"))
        chat.append({"role": _ROLES.get(role, role), "content": turn.get("value", turn.get("content"))})
        if chat[-1]["role"] not in _ROLES.values() or not isinstance(chat[-1]["content"], str):
            raise ValueError(
                f"row {index}, column '{column}[{i}]': {shortened(turn)} isn't a text of the user, the assistant or "
                "the system; write it as one (tool calls and blocks aren't converted), or remove the row."
            )
    return chat, column


def _messages_of(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of a turn, two for a pair of ms-swift, `{"human": text, "assistant": text}`."""
    messages = [{"role": role, "content": turn[role]} for role in ("human", "assistant") if turn.get(role) is not None]
    return messages or [turn]


def preference_pair(chat: list[dict[str, str]], row: dict[str, Any], index: int) -> dict[str, Any]:
    """Returns a prompt, its chosen and its rejected answer. In ms-swift's rows, the last message is chosen."""
    pair: dict[str, Any] = {"prompt": chat}
    last_message = chat.pop() if row.get("chosen") is None and chat[-1]["role"] == "assistant" else None
    for name, aliases in (("chosen", ()), ("rejected", ("rejected_response", "rejected_messages"))):
        value = last_message if name == "chosen" and last_message is not None else required(row, index, name, *aliases)
        value = {"role": "assistant", "content": value} if isinstance(value, str) else value
        *context, answer = conversation({name: value if isinstance(value, list) else [value]}, index, (name,))[0]
        # The messages before the answer are absent, or repeat the prompt, with or without its first (system) message
        if answer["role"] != "assistant" or context not in ([], chat, chat[1:]):
            raise ValueError(
                f"row {index}: its {name} answer must be one message of the assistant, alone or after the messages of "
                "the prompt; correct it."
            )
        pair[name] = [answer]
    return pair
