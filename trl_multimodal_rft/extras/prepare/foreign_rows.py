# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Conversations and pairs in the rows of other tools, and the datasets in a `dataset_info.json`."""

import json
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from ...data.reading.refs import shortened
from ...data.rows.cells import Cell
from ...data.rows.load import one_line_errors, required
from ...data.rows.names import MEDIA_COLUMNS
from ...spelling import did_you_mean


_INFO_FILE = "dataset_info.json"
_ROLES = {"human": "user", "gpt": "assistant", **{role: role for role in ("user", "assistant", "system")}}
# Columns whose messages have the tags of LLaMA-Factory's `dataset_info.json`
_TAGGED = ("messages", "conversations", "chosen", "rejected")
# Its tags: for the keys of a message, and for its roles, with the keys and roles that they stand for
_KEY_TAGS = {"role_tag": "from", "content_tag": "value"}
_ROLE_TAGS = {"user_tag": "human", "assistant_tag": "gpt", "system_tag": "system"}


def source_of(path: str | Path) -> tuple[str | Path, Callable[[dict[str, Any], int], dict[str, Any]]]:
    """
    Returns a dataset's file, and a function of a row and its index that renames its columns, and keys and roles of
    messages. `folder/NAME` is the entry `NAME` of `folder/dataset_info.json`, whose own path stands for its only
    entry.
    """
    source = Path(path).expanduser()
    file = source.parent / _INFO_FILE
    if not file.is_file() or (source.exists() and source != file):
        return path, lambda row, index: row
    with one_line_errors(str(file)):
        entries = json.loads(file.read_text(encoding="utf-8-sig"))
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
    tags: dict[str, str] = entry.get("tags") or {}
    keys = {tag: _KEY_TAGS[name] for name, tag in tags.items() if name in _KEY_TAGS}
    roles = {tag: _ROLE_TAGS[name] for name, tag in tags.items() if name in _ROLE_TAGS}

    def rename(row: dict[str, Any], index: int) -> dict[str, Any]:
        row = {columns.get(key, key): value for key, value in row.items()}
        return {key: _renamed(value, keys, roles) if key in _TAGGED else value for key, value in row.items()}

    return data_file, rename


def _renamed(value: Cell, keys: dict[str, str], roles: dict[str, str]) -> Cell:
    """Returns a message, or a list of messages, with LLaMA-Factory's own keys and roles in place of tags."""
    if isinstance(value, list):
        return [_renamed(item, keys, roles) for item in value]
    if not isinstance(value, dict):
        return value
    message = {keys.get(key, key): item for key, item in value.items()}
    role = message.get("from")
    return message | ({"from": roles.get(role, role)} if isinstance(role, str) else {})


def conversation(
    row: dict[str, Any],
    index: int,
    columns: tuple[str, ...] = ("messages", "conversations", "conversation", "instruction", "query"),
) -> tuple[list[dict[str, str]], str]:
    """Returns the messages of a row, with `role` and `content`, and the column in `columns` that holds them."""
    column = next((name for name in columns if row.get(name)), columns[-1])
    if column in ("query", "instruction"):
        turns: Iterable = _turns_of_columns(row, index, column)
    else:
        turns = required(row, index, column)
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise ValueError(
                f"row {index}, column '{column}': {shortened(repr(turns))} is no list of messages; correct the "
                "row, or choose another layout."
            )
        turns = [*chain.from_iterable(map(_messages_of, turns))]
    chat = [{"role": "system", "content": _text(row["system"], "system", index)}] if row.get("system") else []
    for i, turn in enumerate(turns):
        turn = {key: value for key, value in turn.items() if value is not None}
        role = turn.get("from", turn.get("role"))
        text = turn.get("value", turn.get("content"))
        role = _ROLES.get(role, "") if isinstance(role, str) else ""
        chat.append({"role": role, "content": text})
        if not role or not isinstance(text, str):
            raise ValueError(
                f"row {index}, column '{column}[{i}]': {shortened(turn)} isn't a text of the user, the assistant or "
                "the system; write it as one (tool calls and blocks aren't converted), or remove the row."
            )
        used = {"from" if "from" in turn else "role", "value" if "value" in turn else "content", "id"}
        used |= {"loss"} if turn.get("loss") is (role == "assistant") else set()  # the default, without effect
        unread = [key for key, value in turn.items() if key not in used and value not in ("", [], {})]
        if unread:
            raise ValueError(
                f"row {index}, column '{column}[{i}]': {unread[0]!r} of the message isn't converted; write it into "
                "the text or into columns of the row, or remove it or the row."
            )
    return chat, column


def _turns_of_columns(row: dict[str, Any], index: int, column: str) -> list[dict[str, str]]:
    """Returns the messages of a row of texts: pairs in `history`, and a question in `column` with its answer."""
    question = _text(required(row, index, "messages", "conversations", column), column, index)
    if column == "instruction" and row.get("input"):
        question += "\n" + _text(row["input"], "input", index)
    answer_column = "response" if column == "query" else "output"
    turns = []
    for i, pair in enumerate(row.get("history") or ()):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(
                f"row {index}, column 'history[{i}]': {shortened(repr(pair))} is no pair of a question and an answer; "
                "write `[question, answer]`, or remove the row."
            )
        turns += [(role, text, f"history[{i}]") for role, text in zip(("user", "assistant"), pair, strict=True)]
    turns += [("user", question, column), ("assistant", row.get(answer_column), answer_column)]
    # The answer is `None` where the row ends with the question
    return [{"role": role, "content": _text(text, name, index)} for role, text, name in turns if text is not None]


def _text(value: Cell, column: str, index: int) -> str:
    if not isinstance(value, str):
        raise ValueError(f"row {index}, column '{column}': {shortened(repr(value))} is no text; write it as one.")
    return value


def _messages_of(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of a turn, two for a pair of ms-swift, `{"human": text, "assistant": text}`."""
    roles = [role for role in ("human", "assistant") if turn.get(role) is not None]
    others = {key: value for key, value in turn.items() if key not in ("human", "assistant")}
    return [{"role": role, "content": turn[role], **others} for role in roles] or [turn]


def preference_pair(chat: list[dict[str, str]], row: dict[str, Any], index: int) -> dict[str, Any]:
    """Returns a prompt, its chosen and its rejected answer. In ms-swift's rows, the last message is chosen."""
    pair: dict[str, Any] = {"prompt": chat}
    rejected_media = [name for name in MEDIA_COLUMNS if row.get(f"rejected_{name}")]
    if rejected_media:
        raise ValueError(
            f"row {index}, column 'rejected_{rejected_media[0]}': media of the rejected answer alone aren't "
            "converted; mark their places in the answers by `<image>`, and list those of the prompt, the chosen and "
            "the rejected answer in 'images', or remove the row."
        )
    ends_with_answer = chat[-1]["role"] == "assistant"
    if ends_with_answer and row.get("chosen") is not None:
        raise ValueError(
            f"row {index} has a 'chosen' answer, but its conversation also ends with an answer; remove one of them."
        )
    last_message = chat.pop() if ends_with_answer else None
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
