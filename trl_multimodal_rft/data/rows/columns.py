# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks of column names, and conversion of rows to chat messages, whose media blocks hold opaque references."""

import ast
import json
import math
import mimetypes
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import PIL.Image

from ...families import MODALITIES
from ..reading.refs import Encoded, MediaError, MediaRef, iter_refs, rival_keys
from ..reading.rules import DEFAULT_RULES, MediaRules


T = TypeVar("T")

# Modalities by dataset columns. A column with a singular name holds one medium, a column with a plural name a list.
MEDIA_COLUMNS = {
    "image": "image",
    "images": "image",
    "audio": "audio",
    "audios": "audio",
    "video": "video",
    "videos": "video",
}

# Prefix of the columns that a teacher reads in place of the columns without the prefix
TEACHER = "teacher_"
TEACHER_COLUMNS = tuple(f"{TEACHER}{name}" for name in ("prompt", *MEDIA_COLUMNS))

# Keys for media in other formats: OpenAI's in blocks, Ollama's next to the content of a message
_MEDIA_KEYS = {*MEDIA_COLUMNS, *(name for modality in MODALITIES for name in (f"{modality}_url", f"input_{modality}"))}

# Options of the blocks of each modality: positive numbers, which are whole except for times and rates
_SIZE_OPTIONS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
_LIMIT_OPTIONS = ("total_pixels", "min_frames", "max_frames")
OPTIONS = {
    "image": _SIZE_OPTIONS,
    "audio": ("sampling_rate",),
    "video": (*_SIZE_OPTIONS, *_LIMIT_OPTIONS, "nframes", "fps", "sample_fps", "video_start", "video_end"),
}
# Options that only qwen-vl-utils reads
QWEN_OPTIONS = {*_SIZE_OPTIONS, *_LIMIT_OPTIONS}
FRACTIONAL_OPTIONS = {"sampling_rate", "fps", "sample_fps", "video_start", "video_end"}
_ORDERED_OPTIONS = (("min_pixels", "max_pixels"), ("min_frames", "max_frames"), ("video_start", "video_end"))

# Hints of other libraries about a medium, which are ignored
_MEDIA_TYPE_KEYS = ("media_type", "mime_type", "mimeType")
_HINTS = ("detail", "format", "annotations", "meta", "_meta", *_MEDIA_TYPE_KEYS)

# Names of prompt columns in other tools
_PROMPT_NAMES = ("prompt", "messages", "conversations", "conversation", "question", "problem", "query", "instruction")

# Columns that identify the layouts of other tools, supersets first. If a tool has layouts for both conversations and
# pairs, the name for pairs ends with `--task dpo`, as in the arguments of `prepare`.
_LAYOUTS = (
    ("verl", {"prompt", "data_source", "reward_model"}),
    ("avqa-r1", {"problem", "data_type", "path"}),
    ("avqa", {"question_text", "multi_choice"}),
    ("mmau", {"audio_id", "choices"}),
    ("easyr1", {"problem", "answer"}),
    ("rlaif-v", {"question", "chosen", "rejected"}),
    *(("llama-factory --task dpo", {column, "chosen", "rejected"}) for column in ("conversations", "instruction")),
    *(("ms-swift --task dpo", {column}) for column in ("rejected_response", "rejected_messages")),
    ("ms-swift", {"query", "response"}),
    ("llama-factory", {"instruction", "output"}),
    ("sharegpt", {"conversations"}),
)

# Prefix of `MediaRef.column` for a medium that a tool returned
TOOL_PREFIX = "tool "

# Roles by the words that datasets use for them
_ROLES = {**{role: role for role in ("user", "assistant", "system", "developer", "tool")}, "bot": "assistant"}
# Words in the tags by which other tools mark media in texts, such as `<img>`
_TAG_WORDS = {"image": "img|image|photo|pic", "audio": "audio|sound|speech|voice", "video": "video|clip|movie"}

# Types of text blocks, each with the key of its text
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Other keys of text blocks in the formats of OpenAI, Anthropic and MCP, which are ignored
_TEXT_HINTS = ("annotations", "cache_control", "logprobs", "meta", "_meta")

# Keys of messages that hold no media, or are read separately
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "thinking")
# Keys that `further_keys` skips: the content, and labels of the speaker and the tool call, which a template may omit
_LABELS = ("role", "content", "name", "tool_call_id", "id")

# Types of blocks whose strings are text, even if the strings name a file
_TEXT_TYPES = {*_TEXT_KEYS, "thinking", "reasoning", "tool_use", "tool_call", "tool_result", "function"}
_TEXT_TYPES |= {"function_call"}

KNOWN_TYPES = (
    "'text', 'image', 'audio' and 'video', OpenAI's ('input_text', 'image_url', 'input_image', 'input_audio' and so "
    "on), and those of the chat template"
)

_FILE_ENDINGS = {
    "image": "png|jpe?g|jfif|webp|gif|bmp|tiff?|heic|heif|avif",
    "video": "mp4|m4v|avi|mov|mkv|webm|mpe?g|3gp|ogv|wmv|flv",
    "audio": "wav|mp3|flac|ogg|oga|opus|m4a|aac|aiff?|wma|amr|caf",
}
_FILE_ENDING = re.compile(
    r"(?<=.)\.(?:" + "|".join(f"(?P<{name}>{ending})" for name, ending in _FILE_ENDINGS.items()) + r")(?:[?#]\S+)?$",
    re.IGNORECASE,
)
# Beginning of a path with a folder, and characters that the names of files lack and sentences have
_FOLDER = re.compile(r"\S*[/\\]")
_NOT_IN_NAMES = re.compile(r'[?*"<>|]|:(?!\d)')  # a colon in a name separates hours, minutes and seconds
_LONGEST_NAME = 255  # characters of a file's name
_SMALLEST_PICTURE = 16  # pixels of a side, below which an array is taken for a table of numbers


def check_reward_columns(row: Mapping[str, Any], index: int | None = None) -> None:
    """
    Raises a `ValueError` for a column `prompts` or `completions`. Under these names, reward functions get the prompts
    and completions of the batch.
    """
    for column in ("prompts", "completions"):
        if column in row:
            row_index = getattr(row, "row_index", index)
            raise ValueError(
                f"row {row_index} has a column {column!r}, the name under which reward functions "
                f"get the {column} of the batch; call `dataset.rename_column({column!r}, ...)`, or remove the column."
            )


def check_has_prompt(row: Mapping[str, Any]) -> None:
    """Raises a `ValueError` for a row without a prompt. The message has the remedy for the layout of the row."""
    check_names(f"row {getattr(row, 'row_index', None)}", row, row)


def other_layout(row: Mapping[str, Any]) -> str | None:
    """Returns the name of the other tool's layout that fits a row or its features, `None` if none does."""
    from .features import feature_leaves  # imports datasets and torch, which this module doesn't need otherwise

    # By layout, a column that must hold dictionaries, and keys that they must have
    nested_keys = {"verl": ("reward_model", {"ground_truth"}), "sharegpt": ("conversations", {"from", "value"})}
    for layout, needed_columns in _LAYOUTS:
        column, keys = nested_keys.get(layout, ("", set()))
        if needed_columns <= row.keys() and keys <= {key for key, _ in feature_leaves(row.get(column))}:
            return layout
    return None


def prepare_remedy(layout: str, options: str = "") -> str:
    """Returns the remedy for rows of another layout."""
    return f"convert the {layout.split()[0]} rows with `trl-multimodal-rft prepare {layout}{options}`"


def check_names(name: str, columns: Collection[str], row: Mapping[str, Any], needs_prompt: bool = True) -> None:
    """Raises a `ValueError` if a needed prompt is missing, or if the solution is only in verl's `reward_model`."""
    if "prompt" in columns or not needs_prompt:
        if "solution" not in columns and other_layout(row) == "verl":
            raise ValueError(
                f"{name} has no column 'solution', and its answers are in 'reward_model'; {prepare_remedy('verl')}, "
                "or add 'solution' for reward functions."
            )
        return
    likely_prompt = next(
        (column for prompt_name in _PROMPT_NAMES for column in columns if column.strip().lower() == prompt_name), None
    )
    remedy = (
        "rename the column of prompts to 'prompt'"
        if likely_prompt is None
        else f"rename {likely_prompt!r} to 'prompt'"
    )
    if likely_prompt == "messages":  # the last message may be the answer
        remedy = f"{prepare_remedy('ms-swift', ' --task rl')}; if they don't end with an answer, {remedy}"
    layout = other_layout(row)
    if layout is not None:
        # Options of `prepare` for rows with prompts, by layout
        options = dict.fromkeys(("ms-swift", "llama-factory", "sharegpt"), " --task rl") | {"rlaif-v": " --task judge"}
        alternative = "" if likely_prompt is None or layout == "sharegpt" or "dpo" in layout else f"{remedy}, or "
        remedy = alternative + prepare_remedy(layout, options.get(layout, ""))
    raise ValueError(f"{name} has no column 'prompt', only {sorted(columns)}; {remedy}.")


def rows_to_messages(
    rows: Sequence[Mapping[str, Any]],
    ignored: Collection[str] = (),
    placeholders: Collection[str] = (),
    rules: MediaRules = DEFAULT_RULES,
    prefix: str = "",
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

    Returns:
        `list[dict[str, Any]]`: New rows without media columns. Every medium is a block of a prompt,
        `{"type": modality, modality: MediaRef}`.

    Raises:
        MediaError: If a prompt is neither text nor messages with a role and a content, if both columns of a modality
            are set, if a singular column holds a list or a plural column doesn't, if placeholders don't match the
            media of their row, if no user message can receive media, or if a message has unread media or an invalid
            option.
    """
    readers = [_RowReader(getattr(row, "row_index", i), rules) for i, row in enumerate(rows)]
    prompt_columns = ["prompt" if row.get(f"{prefix}prompt") is None else f"{prefix}prompt" for row in rows]
    prompts = [row[column] for column, row in zip(prompt_columns, rows, strict=True)]
    media = []
    for reader, column, prompt, row in zip(readers, prompt_columns, prompts, rows, strict=True):
        reader.check_prompt(prompt, column)
        media.append(reader.column_media({key: value for key, value in row.items() if key not in ignored}, prefix))
    if any(any(row_media.values()) for row_media in media) or not all(isinstance(prompt, str) for prompt in prompts):
        for i, prompt in enumerate(prompts):
            is_text = isinstance(prompt, str)
            messages = [{"role": "user", "content": prompt}] if is_text else prompt
            # In a plain-text prompt, a placeholder token of the model stays text
            tag_modalities = [modality for modality in MODALITIES if not (is_text and f"<{modality}>" in placeholders)]
            prompts[i] = readers[i].put_media(messages, media[i], prompt_columns[i], tag_modalities)
        if next(iter_refs(prompts), None) is not None:
            prompts = [[_as_blocks(message) for message in messages] for messages in prompts]
    return [
        {**{key: value for key, value in row.items() if key not in MEDIA_COLUMNS}, "prompt": prompt}
        for row, prompt in zip(rows, prompts, strict=True)
    ]


def read_messages(
    messages: str | list | None, column: str, row_index: int, rules: MediaRules = DEFAULT_RULES
) -> list[dict[str, Any]]:
    """Returns the messages of a column as [`rows_to_messages`] parses them. A text becomes one user message."""
    reader = _RowReader(row_index, rules)
    reader.check_prompt(messages, column)
    chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages or ())
    return [reader.parse_message(message, f"{column}[{m}]") for m, message in enumerate(chat)]


def blocks_to_refs(
    blocks: Sequence[Any], path: str, row_index: int, rules: MediaRules = DEFAULT_RULES
) -> list[dict[str, Any]]:
    """Returns content blocks that come from no dataset, such as a tool's, with references in place of media."""
    reader = _RowReader(row_index, rules)
    parsed = [reader.parse_block(block, f"{path}[{b}]") for b, block in enumerate(blocks)]
    for ref in iter_refs(parsed):
        if ref.source is None:
            raise ref.error(f"the block has no {ref.modality}; add it under {ref.modality!r}")
    return parsed


def has_media(prompt: str | list[dict[str, Any]]) -> bool:
    """Returns whether the prompt of a reward function holds media. Blocks with only a type are placeholders."""
    if isinstance(prompt, str):
        return False
    blocks = [block for message in prompt if isinstance(message.get("content"), list) for block in message["content"]]
    return any(len(block) > 1 for block in blocks if block_modality(block["type"]) is not None)


def block_modality(block_type: str | None) -> str | None:
    """Returns the modality of the media that content blocks of a type hold, `None` for other types."""
    modality = str(block_type).removesuffix("_url").removeprefix("input_")
    return modality if modality in MODALITIES else None


def file_modality(text: str) -> str | None:
    """
    Returns the modality of the medium that a file name or a `data:` URI stands for, `None` for other texts. A sentence
    that ends with a file name can't be told from a name with spaces, see [`may_be_sentence`].
    """
    uri = re.match("data:(image|video|audio)/", text)
    if uri:
        return uri.group(1)
    text = text.strip()
    if len(text) > 4096 or text.startswith("data:") or "\n" in text:
        return None
    ending = _FILE_ENDING.search(text)
    if ending is None:
        return None
    if may_be_sentence(text) and (ending.start() > _LONGEST_NAME or _NOT_IN_NAMES.search(text[: ending.start()])):
        return None
    return ending.lastgroup


def may_be_sentence(text: str) -> bool:
    """Returns whether a text has several words, of which the first names no folder."""
    return len(text.split()) > 1 and not text.startswith("data:") and _FOLDER.match(text) is None


def find_media(value: Any, path: str = "") -> Iterator[tuple[str, str | None, Any]]:
    """Yields path, modality (`None` if unknown) and value of all media, encoded or decoded, in nested values."""
    decoder_modality = {"AudioDecoder": "audio", "VideoDecoder": "video"}.get(type(value).__name__)
    if isinstance(value, (MediaRef, Encoded)):
        yield path, value.modality, value
    elif isinstance(value, PIL.Image.Image):
        yield path, "image", value
    elif _holds_pixels(value):  # several pictures, or the frames of a video, have one dimension more
        yield path, "image" if len(value.shape) < 4 else None, value
    elif decoder_modality is not None:
        yield path, decoder_modality, value
    elif isinstance(value, (bytes, bytearray, memoryview)):
        yield path, None, value
    elif isinstance(value, str):
        if (modality := file_modality(value)) is not None:
            yield path, modality, value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from find_media(item, path)
    elif isinstance(value, dict):
        fields = {key: item for key, item in value.items() if not is_absent(item)}
        modality = block_modality(fields.get("type"))
        if "array" in fields and "sampling_rate" in fields:
            yield path, "audio", value
        elif fields and "bytes" in value:  # as in Datasets, with or without a path
            yield path, file_modality(str(fields.get("path", ""))), value
        elif modality is not None and any(key in fields for key in _source_keys(modality)):
            yield path, modality, value
        elif fields.keys() & {"data", "base64", "blob"} and fields.keys() & {"format", *_MEDIA_TYPE_KEYS}:
            media_type = next((fields[key] for key in _MEDIA_TYPE_KEYS if key in fields), None)
            yield path, file_modality(f"data:{media_type}"), value
        else:
            for key, item in fields.items():
                yield from find_media(item, f"{path}.{key}" if path else str(key))


def _holds_pixels(value: T) -> bool:
    """
    Returns whether an array or a tensor has the shape of pictures: (H, W) of bytes, or 1, 3 or 4 channels in the first
    or last dimension of each.
    """
    shape, dtype = getattr(value, "shape", None), str(getattr(value, "dtype", ""))
    if not isinstance(shape, tuple) or len(shape) not in (2, 3, 4) or not re.search("int|float", dtype):
        return False
    if len(shape) == 2:
        return "uint8" in dtype and min(shape) >= _SMALLEST_PICTURE
    sides = shape[-3:-1] if shape[-1] in (1, 3, 4) else shape[-2:] if shape[-3] in (1, 3, 4) else (0,)
    return min(sides) >= _SMALLEST_PICTURE


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


def is_absent(value: Any) -> bool:
    """
    Returns whether a value is `None`, or a dictionary of `None`. Arrow fills in both: `None` for a key that only other
    rows have, and a dictionary of `None` for a missing struct.
    """
    return value is None or (isinstance(value, dict) and all(item is None for item in value.values()))


def is_empty(value: str | float | list | dict | None) -> bool:
    """Returns whether a cell of a table holds nothing: it is absent, NaN, an empty list or a text of blanks."""
    is_blank_or_nan = isinstance(value, str) and not value.strip() or isinstance(value, float) and value != value
    return is_blank_or_nan or is_absent(value) or (isinstance(value, list) and not value)


@dataclass(frozen=True)
class _RowReader:
    """
    Reader of the prompt and the media of a row. Errors name the index of the row, and the `path` of a value in the
    row, such as `prompt[0].content[2]`.
    """

    row_index: int
    rules: MediaRules

    def error(self, path: str, message: str) -> MediaError:
        return MediaError(f"row {self.row_index}, column '{path}': {message}")

    def ref(self, modality: str, source: Any, path: str, options: dict[str, Any] | None = None) -> MediaRef:
        return MediaRef(modality, source, options or {}, path, self.row_index, self.rules)

    def check_prompt(self, prompt: Any, name: str) -> None:
        check_not_serialized(prompt, name, self.row_index)
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt):
            actual = "None" if prompt is None else f"of type {type(prompt).__name__}"
            actual = "an empty list" if prompt == [] else actual
            raise self.error(name, f"is {actual}; give a text or a list of messages, or remove the row")

    def column_media(self, row: dict[str, Any], prefix: str) -> dict[str, list[MediaRef]]:
        """Returns references to the media in columns, by modality. Columns with `prefix` replace those without."""
        media: dict[str, list[MediaRef]] = {modality: [] for modality in MODALITIES}
        prefixed_modalities = {
            modality for name, modality in MEDIA_COLUMNS.items() if prefix and row.get(f"{prefix}{name}") is not None
        }
        for name, modality in MEDIA_COLUMNS.items():
            column_prefix = prefix if modality in prefixed_modalities else ""
            column, singular = f"{column_prefix}{name}", f"{column_prefix}{modality}"
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
        """
        Returns copies of the messages in column `name`, into which the media of other columns are put. For
        `tag_modalities`, tags in texts, such as `<image>`, can be placeholders.
        """
        messages = [self.parse_message(message, f"{name}[{m}]") for m, message in enumerate(messages)]
        placeholders = _placeholders(messages)
        tag_modalities = [modality for modality in tag_modalities if media[modality] and not placeholders[modality]]
        if tag_modalities:
            for m, message in enumerate(messages):
                self.tags_to_placeholders(message, tag_modalities, f"{name}[{m}].content")
            placeholders = _placeholders(messages)

        # Media without placeholders go before the content of the first user message
        unplaced_blocks = []
        for modality in MODALITIES:
            blocks, refs = placeholders[modality], media[modality]
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
                if foreign_tag := re.search(tag_pattern, text, re.IGNORECASE):
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

    def tags_to_placeholders(self, message: dict[str, Any], modalities: list[str], path: str) -> None:
        """Turns literal texts of a message, such as `"<image>"`, into placeholders."""
        if message["role"] in ("assistant", "tool"):
            return
        tag_pattern, blocks = re.compile(f"<({'|'.join(modalities)})>"), []
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
        """Copies a message, with parsed blocks. Raises a [`MediaError`] for media outside of the blocks."""
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
            (key for key in message if key not in _MESSAGE_KEYS and _is_stray(key, message[key], True)), None
        )
        if isinstance(content, list):
            message["content"] = [self.parse_block(block, f"{path}.content[{b}]") for b, block in enumerate(content)]
        elif not isinstance(content, str) and next(find_media(content), None) is not None:
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

    def parse_block(self, block: dict[str, Any], path: str) -> dict[str, Any]:
        """Copies a block. A medium becomes `{"type": modality, modality: MediaRef}`, with source `None` if absent."""
        if not isinstance(block, dict) or "type" not in block:
            actual = sorted(block) if isinstance(block, dict) else f"a {type(block).__name__}"
            message = "a content block must be a dictionary with a 'type', such as {'type': 'text', 'text': ...}"
            raise self.error(path, f"{message}, got {actual}")
        block = {key: item for key, item in block.items() if not is_absent(item)}
        block_type = block.pop("type", None)
        text = block.get(_TEXT_KEYS[block_type], "") if block_type in _TEXT_KEYS else ""
        if not isinstance(block_type, str) or not isinstance(text, str):
            actual = f"text of type {type(text).__name__}" if isinstance(block_type, str) else "no type"
            raise self.error(path, f"the block has {actual}; write {{'type': 'text', 'text': '...'}}, or a media type")
        modality = block_modality(block_type)
        sources = self.pop_sources(block, _source_keys(modality), path)
        # Of the remaining keys, only text and options are read, so other keys must not hold media. Strings under
        # the keys in `text_keys` are text, even if they look like a file's name.
        text_keys = (
            {_TEXT_KEYS[block_type], *_TEXT_HINTS}
            if block_type in _TEXT_KEYS
            else block.keys()
            if sources or block_type in _TEXT_TYPES
            else {}
        )
        stray_key = next(
            (key for key, item in block.items() if _is_stray(key, item, count_file_names=key not in text_keys)), None
        )
        if stray_key is not None or (modality is not None and block_type != modality and block and not sources):
            raise self.error(
                path,
                f"nothing reads '{stray_key or next(iter(block))}' of a block of type '{block_type}', so the model "
                f"would not get it; known types are {KNOWN_TYPES}; write one block per medium, such as "
                "{'type': 'audio', 'audio': ...}",
            )
        if modality is not None:
            options = {key: item for key, item in block.items() if key not in _HINTS}
            # Scalar arrays become numbers
            options |= {key: item.item() for key, item in options.items() if getattr(item, "ndim", None) == 0}
            if sources and isinstance(sources[0], MediaRef):
                return {"type": modality, modality: sources[0]}  # the block is already parsed
            ref = self.ref(modality, sources[0] if sources else None, path, options)
            _check_options(ref)
            return {"type": modality, modality: ref}
        if block_type not in _TEXT_KEYS:
            return {"type": block_type, **block}
        empty_keys = [key for key, item in block.items() if isinstance(item, (str, list, dict)) and not item]
        filled_keys = [key for key in block if key not in _TEXT_HINTS and key not in empty_keys]
        if _TEXT_KEYS[block_type] not in block or not {*filled_keys} <= {_TEXT_KEYS[block_type]}:
            raise self.error(
                path,
                f"a block of type '{block_type}' has its text in '{_TEXT_KEYS[block_type]}' and nothing else, got "
                f"{filled_keys}; rename the key of the text, and remove other keys",
            )
        return {"type": "text", "text": block[_TEXT_KEYS[block_type]]}

    def pop_sources(self, block: dict[str, Any], keys: tuple[str, ...], path: str) -> list[Any]:
        """Returns the equal media that a block holds under several `keys`, and removes these keys from the block."""
        named = {key: block.pop(key) for key in keys if key in block}
        for fields in (named, *(item for item in named.values() if isinstance(item, dict))):
            if rivals := rival_keys(fields, keys):
                both = f"'{rivals[0]}' and '{rivals[1]}'"
                raise self.error(path, f"the block has media in both {both}; leave one of them, or write two blocks")
        return [_source(key, item) for key, item in named.items()]


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


def holds_several_media(modality: str, value: Any) -> bool:
    """Returns whether a value is a list of media. A list of frames, of samples or of rows of pixels is one medium."""
    if not isinstance(value, (list, tuple)):
        return False
    if modality == "image":
        return not (value and isinstance(value[0], list))
    first_item = next((item for item in value if not is_absent(item)), None)
    if modality == "audio":
        return isinstance(first_item, (str, os.PathLike, bytes, dict, Encoded)) or hasattr(
            first_item, "get_all_samples"
        )
    if isinstance(first_item, dict):
        first_item = next((first_item[key] for key in ("path", "url") if first_item.get(key) is not None), None)
    if isinstance(first_item, (str, os.PathLike)):
        # Files of other types are the frames of one video
        return (mimetypes.guess_type(urlsplit(os.fspath(first_item)).path)[0] or "").startswith("video/")
    return hasattr(first_item, "get_frames_at") or (isinstance(first_item, Encoded) and first_item.modality == "video")


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


def _placeholders(messages: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the blocks of messages that hold no medium, in order, by modality."""
    placeholders = {modality: [] for modality in MODALITIES}
    for message in messages:
        for block in message["content"] if isinstance(message.get("content"), list) else []:
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


def _check_options(ref: MediaRef) -> None:
    """Raises a [`MediaError`] for an unknown option of a block, and for an invalid or a contradictory value."""
    names = OPTIONS[ref.modality]
    for name, value in ref.options.items():
        if name == "index" and ref.source is None and type(value) is int:
            continue  # of the medium in its column
        if name not in names:
            raise ref.error(f"'{name}' is no option of a block of {ref.modality}; remove it, or write one of {names}")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (value == 0 and name != "video_start"):
            raise ref.error(f"the option '{name}' is {value!r}; give a positive number, or leave it out")
        if name not in FRACTIONAL_OPTIONS and value != int(value):
            raise ref.error(f"the option '{name}' is {value!r}; give a whole number")
    for low, high in _ORDERED_OPTIONS:
        if low in ref.options and high in ref.options and not ref.options[low] <= ref.options[high]:
            raise ref.error(f"'{low}' of {ref.options[low]} is above '{high}' of {ref.options[high]}; correct them")
    if ("resized_height" in ref.options) != ("resized_width" in ref.options):
        raise ref.error("one of 'resized_height' and 'resized_width' alone has no effect; give both")


def _source_keys(modality: str | None) -> tuple[str, ...]:
    """Returns the keys under which a block of a modality can hold its medium."""
    if modality is None:
        return ()
    return modality, f"{modality}_url", f"input_{modality}", "bytes", "path", "url", "base64", "data"


def _source(key: str, value: Any) -> Any:
    """Returns the medium of a block. Base64 becomes a `data:` URI, as loaders can't tell base64 from a path."""
    if isinstance(value, dict):
        key, value = next(((k, value[k]) for k in ("data", "base64") if value.get(k) is not None), (key, value))
    if key in ("data", "base64") and isinstance(value, str) and not value.startswith("data:"):
        return f"data:;base64,{value}"
    return value


def _is_stray(key: str, value: Any, count_file_names: bool) -> bool:
    """Returns whether an unread key holds media. With `count_file_names`, names of media files count as media, too."""
    if key in _MEDIA_KEYS:
        return not isinstance(value, (str, list, dict)) or len(value) > 0
    if isinstance(value, str) and not count_file_names:
        return False
    return any(count_file_names or not isinstance(medium, str) for _, _, medium in find_media(value, key))


def _as_blocks(message: dict[str, Any]) -> dict[str, Any]:
    """Copies a message and turns a string content into a text block."""
    if isinstance(message.get("content"), str):
        return {**message, "content": [{"type": "text", "text": message["content"]}]}
    return {**message}
