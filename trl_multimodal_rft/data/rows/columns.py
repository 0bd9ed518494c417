# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Conversion of rows to chat messages, whose media blocks hold opaque references."""

import ast
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from ...credentials import masked_url
from ...modalities import MODALITIES
from ..reading.refs import MediaError, MediaRef, iter_refs, shortened
from ..reading.rules import DEFAULT_RULES, MediaRules
from .blocks import Location, parse_block
from .names import MEDIA_COLUMNS, prepare_remedy
from .rendered import NO_MARKS, RenderedPrompt, TemplateMarks
from .values import (
    block_modality,
    holds_several_media,
    is_absent,
    is_file_name,
    is_stray,
    media_in,
    named_modality,
)


T = TypeVar("T")

# Prefix of `MediaRef.column` for a medium that a tool returned
TOOL_PREFIX = "tool "

# Roles by the words that datasets use for them
_ROLES = {**{role: role for role in ("user", "assistant", "system", "developer", "tool")}, "bot": "assistant"}
# Words in the tags by which other tools mark media in texts, such as `<img>`
_TAG_WORDS = {"image": "img|image|photo|pic", "audio": "audio|sound|speech|voice", "video": "video|clip|movie"}

# Keys of messages that hold no media, or are read separately
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "thinking")
# Keys that `further_keys` skips: the content, and labels of the speaker and the tool call, which a template may omit
_LABELS = ("role", "content", "name", "tool_call_id", "id")


def rows_to_messages(
    rows: Sequence[Mapping[str, Any]],
    ignored: Collection[str] = (),
    placeholders: Collection[str] = (),
    rules: MediaRules = DEFAULT_RULES,
    prefix: str = "",
    marks: TemplateMarks = NO_MARKS,
) -> list[dict[str, Any]]:
    """
    Moves the media of dataset rows into their prompts.

    Media in blocks of the prompt stay there. A block holds a medium under its modality (`"audio"`), `"audio_url"`,
    `"base64"`, `"bytes"`, `"path"` or `"url"`. OpenAI's block types (`"image_url"`, `"input_audio"`, `"input_text"`)
    work, too.

    Media of columns fill placeholders without a medium (`{"type": "image"}`) in order. If a row has a column of a
    modality but no such placeholder, the literal texts `"<image>"`, `"<video>"` and `"<audio>"` are placeholders,
    except in assistant and tool messages. Media of a modality without any placeholder go to the start of the first
    user message: images, then videos, then audios.

    All rows of a batch get the same format. If any row has media or a conversational prompt, every plain-text prompt
    becomes one user message, so that TRL passes all completions to reward functions as messages. If any row has media,
    every string content becomes a text block. If all prompts are plain text without media, they stay strings, as TRL
    expects for text.

    The row `{"prompt": "A <image>", "image": "a.png"}` becomes `{"prompt": [{"role": "user", "content": [{"type":
    "text", "text": "A "}, {"type": "image", "image": MediaRef(...)}]}]}`.

    Args:
        rows (`Sequence[Mapping[str, Any]]`):
            Dataset rows with a `"prompt"` (text or messages) and any of the [`MEDIA_COLUMNS`], which may be `None`.
            Errors name the `row_index` of a [`~data.rows.batches.Row`], or the index of other rows. Rows aren't
            modified.
        ignored (`Collection[str]`, *optional*, defaults to `()`):
            Media columns that aren't put into prompts.
        placeholders (`Collection[str]`, *optional*, defaults to `()`):
            The model's placeholder tokens. If `"<image>"` is one of them, plain-text prompts keep `"<image>"` as text.
        rules ([`~data.reading.rules.MediaRules`], *optional*):
            Allowed sources and sizes of media.
        prefix (`str`, *optional*, defaults to `""`):
            Prefix of columns that replace the columns without the prefix, if a row has them. With `"teacher_"`,
            `"teacher_prompt"` replaces `"prompt"`, and `"teacher_images"` replaces `"image"` and `"images"`.
        marks ([`~data.rows.rendered.TemplateMarks`], *optional*):
            Marks of the model's chat template. Texts to which it was applied aren't put into messages.

    Returns:
        `list[dict[str, Any]]`: New rows without media columns. Every medium is a block of a prompt,
        `{"type": modality, modality: MediaRef}`.

    Raises:
        MediaError: If a prompt is neither text nor messages with a role and a content, if both columns of a modality
            are set, if a singular column holds a list or a plural column doesn't, if placeholders don't match the
            media of their row, if no user message can receive media, if a message has unread media or an invalid
            option, or if a chat template was applied to a text beside media or a media column.
    """
    readers = [_RowReader(getattr(row, "row_index", i), rules) for i, row in enumerate(rows)]
    prompt_columns = ["prompt" if row.get(f"{prefix}prompt") is None else f"{prefix}prompt" for row in rows]
    prompts = [row[column] for column, row in zip(prompt_columns, rows, strict=True)]
    media = []
    for reader, column, prompt, row in zip(readers, prompt_columns, prompts, rows, strict=True):
        reader.check_prompt(prompt, column)
        media.append(reader.column_media({key: value for key, value in row.items() if key not in ignored}, prefix))
    become_messages = any(any(row_media.values()) for row_media in media)
    become_messages = become_messages or not all(isinstance(prompt, str) for prompt in prompts)
    for reader, column, row in zip(readers, prompt_columns, rows, strict=True):
        marks.check_row(row, column, reader.row_index, ignored, becomes_messages=become_messages)
    if become_messages:
        for i, prompt in enumerate(prompts):
            is_text = isinstance(prompt, str)
            messages = [{"role": "user", "content": prompt}] if is_text else prompt
            # In a plain-text prompt, a placeholder token of the model stays text
            tag_modalities = [modality for modality in MODALITIES if not (is_text and f"<{modality}>" in placeholders)]
            prompts[i] = readers[i].put_media(messages, media[i], prompt_columns[i], tag_modalities)
    for reader, column, prompt in zip(readers, prompt_columns, prompts, strict=True):
        reader.check_texts(prompt, column)
    if next(iter_refs(prompts), None) is not None:
        prompts = [[_as_blocks(message) for message in messages] for messages in prompts]
    return [
        {**{key: value for key, value in row.items() if key not in MEDIA_COLUMNS}, "prompt": prompt}
        for row, prompt in zip(rows, prompts, strict=True)
    ]


def read_rendered(
    row: Mapping[str, Any], row_index: int, ignored: Collection[str] = (), rules: MediaRules = DEFAULT_RULES
) -> RenderedPrompt:
    """Returns the text of a row's prompt, to which a chat template was applied, with the media of its columns."""
    reader = _RowReader(row_index, rules)
    media = reader.column_media({key: value for key, value in row.items() if key not in ignored}, "")
    return RenderedPrompt(row["prompt"], sum(media.values(), []))


def read_messages(
    messages: str | list | None, column: str, row_index: int, rules: MediaRules = DEFAULT_RULES, role: str = "user"
) -> list[dict[str, Any]]:
    """Returns the messages of a column as [`rows_to_messages`] parses them. A text becomes one message of `role`."""
    reader = _RowReader(row_index, rules)
    reader.check_prompt(messages, column)
    chat = [{"role": role, "content": messages}] if isinstance(messages, str) else list(messages or ())
    return [reader.parse_message(message, f"{column}[{m}]") for m, message in enumerate(chat)]


def blocks_to_refs(
    blocks: Sequence[Any], path: str, row_index: int, rules: MediaRules = DEFAULT_RULES
) -> list[dict[str, Any]]:
    """Returns content blocks that come from no dataset, such as a tool's, with references in place of media."""
    parsed = [parse_block(block, Location(row_index, f"{path}[{b}]", rules)) for b, block in enumerate(blocks)]
    for ref in iter_refs(parsed):
        if ref.source is None:
            raise ref.error(f"the block has no {ref.modality}; add it under {ref.modality!r}")
    return parsed


def has_media(prompt: str | list[dict[str, Any]]) -> bool:
    """Returns whether the prompt of a reward function holds media. Blocks with only a type are placeholders."""
    if isinstance(prompt, str):
        return False
    return any(len(block) > 1 for block in _blocks(prompt) if block_modality(block["type"]) is not None)


def _blocks(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    blocks = []
    for message in messages:
        if isinstance(message.get("content"), list):
            blocks += message["content"]
    return blocks


def strip_media(value: T) -> T:
    """
    Returns messages for logs, in which each [`MediaRef`] is a text such as `"<audio>"` and each message content is one
    string, so that all rows have one type and can be written as JSON or Parquet.
    """
    if isinstance(value, MediaRef):
        return cast(T, repr(value))
    if isinstance(value, list):
        return cast(T, [strip_media(item) for item in value])
    if not isinstance(value, dict):
        return value
    stripped = {key: strip_media(item) for key, item in value.items()}
    if "role" in value and "content" in value:
        blocks = _as_blocks(value)["content"] or []
        stripped["content"] = "".join(str(block.get("text", f"<{block['type']}>")) for block in blocks)
    return cast(T, stripped)


def as_text(messages: str | list[dict[str, Any]], with_roles: bool = True) -> str:
    """Returns a prompt or a completion as one text. Several messages begin with their roles, if `with_roles`."""
    if isinstance(messages, str):
        return messages
    if not with_roles:
        return "".join(message["content"] for message in messages)
    texts = []
    for message in messages:
        calls = [str(call) for call in message.get("tool_calls") or ()]
        texts.append("\n".join([*filter(None, [message.get("content")]), *calls]))
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True))


@dataclass(frozen=True)
class _RowReader:
    """
    Reader of the prompt and the media of a row. Errors name the index of the row, and the `path` of a value in the
    row, such as `prompt[0].content[2]`.
    """

    row_index: int
    rules: MediaRules

    def location(self, path: str) -> Location:
        return Location(self.row_index, path, self.rules)

    def error(self, path: str, message: str) -> MediaError:
        return self.location(path).error(message)

    def ref(self, modality: str, source: Any, path: str) -> MediaRef:
        return self.location(path).ref(modality, source)

    def check_prompt(self, prompt: Any, name: str) -> None:
        check_not_serialized(prompt, name, self.row_index)
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt):
            actual = "None" if prompt is None else f"of type {type(prompt).__name__}"
            actual = "an empty list" if prompt == [] else actual
            raise self.error(name, f"is {actual}; give a text or a list of messages, or remove the row")

    def check_texts(self, prompt: str | list[dict[str, Any]], column: str) -> None:
        """
        Raises a [`MediaError`] for a prompt without media and a text that is nothing but a medium, as the model would
        read its letters. Answers and results of tools may be the names of files.
        """
        if next(iter_refs(prompt), None) is not None:
            return
        for m, message in enumerate([{"content": prompt}] if isinstance(prompt, str) else prompt):
            if message.get("role") not in ("assistant", "tool"):
                for block in _as_blocks(message).get("content") or []:
                    self.check_text(block.get("text"), column if isinstance(prompt, str) else f"{column}[{m}].content")

    def check_text(self, text: str | None, path: str) -> None:
        if isinstance(text, str) and is_file_name(text):
            modality = named_modality(text)
            raise self.error(
                path,
                f"the text {shortened(masked_url(text.strip()))!r} is a medium, of which the model would read the "
                f"letters; give it in a block, {{'type': '{modality}', '{modality}': ...}}, or in the column "
                f"'{modality}'",
            )

    def column_media(self, row: dict[str, Any], prefix: str) -> dict[str, list[MediaRef]]:
        """Columns with `prefix` replace those without."""
        media: dict[str, list[MediaRef]] = {modality: [] for modality in MODALITIES}
        prefixed_modalities = {
            modality for name, modality in MEDIA_COLUMNS.items() if prefix and row.get(f"{prefix}{name}") is not None
        }
        for name, modality in MEDIA_COLUMNS.items():
            column_prefix = prefix if modality in prefixed_modalities else ""
            column = f"{column_prefix}{name}"
            singular = f"{column_prefix}{modality}"
            value = row.get(column)
            if value is None:
                continue
            if is_absent(value):
                raise self.error(column, f"{sorted(value)} are all None; set one of them, or the whole column to None")
            if column == singular:
                if holds_several_media(modality, value):
                    raise self.error(column, f"holds a list; rename the column to '{column}s'")
                refs = [self.ref(modality, value, column)]
            else:
                if not isinstance(value, (list, tuple)):
                    problem = f"holds a {type(value).__name__}, not a list"
                    raise self.error(column, f"{problem}; rename the column to '{singular}'")
                refs = [self.ref(modality, item, f"{column}[{i}]") for i, item in enumerate(value)]
                for ref in refs:
                    if is_absent(ref.source):
                        raise ref.error("is None; leave it out of the list, or set the whole column to None")
            if refs and media[modality]:
                raise self.error(column, f"the row also has '{singular}'; set one of the two columns to None")
            media[modality] += refs
        return media

    def put_media(
        self, messages: list[dict[str, Any]], media: dict[str, list[MediaRef]], name: str, tag_modalities: list[str]
    ) -> list[dict[str, Any]]:
        """For `tag_modalities`, tags in texts of the column `name`, such as `<image>`, can be placeholders."""
        messages = [self.parse_message(message, f"{name}[{m}]") for m, message in enumerate(messages)]
        writes_blocks = next(iter_refs(messages), None) is not None  # beside blocks, a tag is text
        placeholders = _placeholders(messages)
        tag_modalities = [modality for modality in tag_modalities if media[modality] and not placeholders[modality]]
        if tag_modalities:
            for m, message in enumerate(messages):
                self.tags_to_placeholders(message, tag_modalities, f"{name}[{m}].content")
            placeholders = _placeholders(messages)

        # Media without placeholders go before the content of the first user message
        unplaced_blocks = []
        for modality in MODALITIES:
            blocks = placeholders[modality]
            refs = media[modality]
            if not (writes_blocks or blocks or refs) and any(media.values()):
                self.check_tags(messages, modality, name)
            if blocks and not refs:
                raise blocks[0][modality].error(
                    f"the placeholder has no {modality}; add the {modality} to its block, or to column '{modality}s'"
                )
            if blocks and len(blocks) != len(refs):
                form = f"{{'type': '{modality}'}}"
                problem = (
                    f"{modality} placeholders in the messages; write one {form} block per {modality}, or no block"
                )
                if modality in tag_modalities:
                    problem = (
                        f"'<{modality}>' in the text of the prompt; write one per {modality}, or one {form} block per "
                        f"{modality}, with which '<{modality}>' stays text"
                    )
                raise self.error(
                    refs[0].column.split("[")[0], f"has {len(refs)} {modality}s for {len(blocks)} {problem}"
                )
            for block, ref in zip(blocks, _in_order_of_blocks(refs, blocks, modality), strict=False):
                options = {key: value for key, value in block[modality].options.items() if key != "index"}
                block[modality] = replace(ref, options=options)
            if not blocks and refs:
                text = as_text(
                    [strip_media(message) for message in messages if message["role"] not in ("assistant", "tool")]
                )
                # A tag of another tool, such as `<img>`, shows that the medium belongs at another place
                tag_pattern = rf"<(?!(?-i:{modality})>)({_TAG_WORDS[modality]})[ _-]?\d*\s*/?>"
                foreign_tag = re.search(tag_pattern, text, re.IGNORECASE)
                if foreign_tag is not None:
                    remedy = f"write '<{modality}>' where each {modality} goes, or add blocks of type '{modality}'"
                    raise self.error(name, f"{foreign_tag[0]!r} in the text is no placeholder; {remedy}")
                unplaced_blocks += [{"type": modality, modality: ref} for ref in refs]

        if unplaced_blocks:
            user_message = next((message for message in messages if message["role"] == "user"), None)
            if user_message is None:
                raise next(iter_refs(unplaced_blocks)).error(
                    "there is no user message to put it in; add a user message, or a placeholder block"
                )
            user_message["content"] = unplaced_blocks + (_as_blocks(user_message).get("content") or [])
        return messages

    def check_tags(self, messages: list[dict[str, Any]], modality: str, name: str) -> None:
        """Raises a [`MediaError`] for a tag such as `<image>` in a row that has media of other modalities alone."""
        if any(lacking_tag(message, modality) for message in messages):
            raise self.error(
                name,
                f"'<{modality}>' in the text has no {modality}, as the row has none; add it in the column "
                f"'{modality}', or remove '<{modality}>', or add blocks of the other media, with which it stays text",
            )

    def tags_to_placeholders(self, message: dict[str, Any], modalities: list[str], path: str) -> None:
        """Turns literal texts of a message, such as `"<image>"`, into placeholders."""
        if message["role"] in ("assistant", "tool"):
            return
        tag_pattern = re.compile(f"<({'|'.join(modalities)})>")
        blocks = []
        for block in _as_blocks(message).get("content") or []:
            if block["type"] != "text" or not tag_pattern.search(block.get("text", "")):
                blocks.append(block)
                continue
            for i, piece in enumerate(tag_pattern.split(block["text"])):  # text and modality alternate
                if i % 2:
                    blocks.append({"type": piece, piece: self.ref(piece, None, path)})
                elif piece:
                    blocks.append({**block, "text": piece})
        if any(block["type"] != "text" for block in blocks):
            message["content"] = blocks

    def parse_message(self, message: dict[str, Any], path: str) -> dict[str, Any]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            actual = sorted(message) if isinstance(message, dict) else f"a {type(message).__name__}"
            is_sharegpt = isinstance(message, dict) and "from" in message
            remedy = prepare_remedy("sharegpt") if is_sharegpt else "set its role to 'user', 'assistant' or 'system'"
            raise self.error(path, f"a message must be a dictionary with 'role' and 'content', got {actual}; {remedy}")
        role = message["role"].strip().lower()
        if role in ("human", "gpt") or _ROLES.get(role, message["role"]) != message["role"]:
            remedy = f"write {_ROLES[role]!r}" if role in _ROLES else prepare_remedy("sharegpt")
            raise self.error(path, f"the role is {message['role']!r}; {remedy}")
        message = {key: item for key, item in message.items() if item is not None or key == "content"}
        if message.get("tool_calls"):
            message["tool_calls"] = _without_absent(message["tool_calls"])
        content = message.get("content")
        stray_key = next(
            (key for key in message if key not in _MESSAGE_KEYS and is_stray(key, message[key], True)), None
        )
        if isinstance(content, list):
            message["content"] = [
                parse_block(block, self.location(f"{path}.content[{b}]")) for b, block in enumerate(content)
            ]
        elif not isinstance(content, str) and next(media_in(content), None) is not None:
            stray_key = "content"
        elif not isinstance(content, str) and not (
            content is None and message["role"] == "assistant" and further_keys(message)
        ):
            actual = "no content" if content is None else f"content of type {type(content).__name__}"
            raise self.error(
                path,
                f"the message has {actual}; give a text or a list of blocks, such as {{'type': 'text', 'text': ...}}, "
                "or remove the row",
            )
        if stray_key is not None:
            raise self.error(
                path,
                f"nothing reads the media in '{stray_key}' of a message; move each to a block of 'content', such as "
                "{'type': 'image', 'image': ...}, or to a media column",
            )
        return message


def _without_absent(value: T) -> T:
    """Returns tool calls without keys of value `None`, which Arrow adds if calls of other rows have these keys."""
    if isinstance(value, list):
        return cast(T, [_without_absent(item) for item in value])
    if isinstance(value, Mapping):  # templates read the key `arguments` of each call
        fields = {key: item for key, item in value.items() if item is not None or key == "arguments"}
        return cast(T, {key: _without_absent(item) for key, item in fields.items()})
    return value


def further_keys(message: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a message, such as `tool_calls`, that aren't empty, besides content and labels."""
    fields = {key: value for key, value in message.items() if key not in _LABELS and not is_absent(value)}
    return [key for key, value in fields.items() if value not in ("", [], {})]


def check_not_serialized(text: str | Sequence | None, column: str, row_index: int) -> None:
    """Raises a [`MediaError`] for a serialized list of messages, which would become the text of a user message."""
    if not isinstance(text, str) or not re.match(r"\s*\[\s*\{", text):
        return
    for decoder_name, decode in (("json.loads", json.loads), ("ast.literal_eval", ast.literal_eval)):
        try:
            messages = decode(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if all(isinstance(message, dict) and ("role" in message or "from" in message) for message in messages):
            raise MediaError(
                f"row {row_index}, column '{column}': is the text of a list of messages; decode it: "
                f"`dataset.map(lambda row: {{'{column}': {decoder_name}(row['{column}'])}})`"
            )
        return


def lacking_tag(message: Mapping[str, Any], modality: str) -> bool:
    """Returns whether a line of a message begins with a tag of a modality, such as `<image>`, without a medium."""
    pattern = re.compile(rf"^[ \t]*<{modality}>", re.MULTILINE)
    blocks = _as_blocks({**message}).get("content") or []
    return message.get("role") not in ("assistant", "tool") and any(
        pattern.search(str(block.get("text", ""))) for block in blocks if block.get("type") == "text"
    )


def _placeholders(messages: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the blocks of messages that hold no medium, in order, by modality."""
    placeholders = {modality: [] for modality in MODALITIES}
    for block in _blocks(messages):
        for ref in iter_refs(block):
            if ref.source is None:
                placeholders[ref.modality].append(block)
    return placeholders


def _in_order_of_blocks(refs: list[MediaRef], blocks: list[dict[str, Any]], modality: str) -> list[MediaRef]:
    """Returns the media of a column in the order of their placeholders, which may have an `index` of their medium."""
    indices = [block[modality].options.get("index", position) for position, block in enumerate(blocks)]
    if sorted(indices) != [*range(len(blocks))]:
        raise blocks[0][modality].error(
            f"the option 'index' of the {modality} blocks is {indices}; give each {modality} of the column one block, "
            "counted from 0, or leave 'index' out"
        )
    return [refs[index] for index in indices] if blocks else refs


def _as_blocks(message: dict[str, Any]) -> dict[str, Any]:
    if isinstance(message.get("content"), str):
        return {**message, "content": [{"type": "text", "text": message["content"]}]}
    return {**message}
