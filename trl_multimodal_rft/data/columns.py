# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Converts dataset rows to chat messages whose media blocks hold opaque references, and back."""

import ast
import json
import math
import mimetypes
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

import PIL.Image

from ..families import MODALITIES
from .rules import DEFAULT_RULES, MediaRules


if TYPE_CHECKING:
    from datasets import Audio, Image, Video

T = TypeVar("T")

# Dataset column -> kind of its media. A column with the name of the kind holds one medium, the plural a list.
MEDIA_COLUMNS = {
    "image": "image",
    "images": "image",
    "audio": "audio",
    "audios": "audio",
    "video": "video",
    "videos": "video",
}

# Start of the names of columns that a teacher reads in place of those without it
TEACHER = "teacher_"
TEACHER_COLUMNS = tuple(f"{TEACHER}{name}" for name in ("prompt", *MEDIA_COLUMNS))

# Keys for media in other formats: OpenAI's in blocks, Ollama's next to the content of a message
_MEDIA_KEYS = {*MEDIA_COLUMNS, *(name for kind in MODALITIES for name in (f"{kind}_url", f"input_{kind}"))}

# Options of the blocks of each kind: positive numbers, whole except those in seconds and per second
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
_HINTS = ("detail", "format", "media_type", "mime_type")

_SHAREGPT = "convert the sharegpt rows with `trl-multimodal-rft prepare sharegpt`"

# Longer words in a message are data, and are shortened
_LONGEST_WORD = 300

# Prefix of the location of a medium that a tool returned
FROM_TOOL = "tool "

# Types of text blocks and the key of their text, beside which OpenAI, Anthropic and MCP add keys that are ignored
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_TEXT_HINTS = ("annotations", "cache_control", "logprobs", "meta", "_meta")

# Keys of messages that hold no media, or are read separately
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "thinking")

# Types that a template may omit, as most omit earlier reasoning
THOUGHT_TYPES = ("thinking", "reasoning")

# Types whose strings are text, even if they name a file
_WORD_TYPES = {*_TEXT_KEYS, *THOUGHT_TYPES, "tool_use", "tool_call", "tool_result", "function", "function_call"}

KNOWN_TYPES = (
    "'text', 'image', 'audio' and 'video', OpenAI's ('input_text', 'image_url', 'input_image', 'input_audio' and so "
    "on), 'thinking', and those of the chat template"
)

_ENDINGS = {
    "image": "png|jpe?g|webp|gif|bmp|tiff?|heic",
    "video": "mp4|m4v|avi|mov|mkv|webm|mpe?g",
    "audio": "wav|mp3|flac|ogg|opus|m4a|aac|aiff?|wma",
}
_ENDING = re.compile(
    r"(?<=.)\.(?:" + "|".join(f"(?P<{kind}>{each})" for kind, each in _ENDINGS.items()) + r")(?:[?#]\S*)?$",
    re.IGNORECASE,
)

# A URL in a text, which may contain quotes
_URL = re.compile(
    r"(?<![\w.+:/-])(?:(?:[A-Za-z][\w.+-]*:)?//|data:(?!;base64,')(?=[\w/.+-]*[;,]))"
    r"(?:[^\s'\"<>]|['\"<>](?=[\w%&=+/@:-]))*"
)
# A user and a password, such as in `http:/user:password@host`
_LOGIN = re.compile(r"(?<![^/'\"\s])[^\s'\"/:@]+:[^\s'\"/@]*@(?=[\w\[])")


def without_credentials(text: str) -> str:
    """Removes user information and queries, which may hold signatures, from the URLs in a text."""
    text = _URL.sub(lambda found: shown_url(found[0]), text)
    return re.sub(r"\?[^\s'\"<>?=]*=[^\s'\"<>]*", "?***", _LOGIN.sub("***@", text))


def shown_url(url: str) -> str:
    """Removes user information, query and fragment from a URL, however they are encoded, and what `data:` holds."""
    if url[:5].lower() == "data:":
        return f"{re.split('[;,]', url, maxsplit=1)[0]};***"
    if "://" not in url and not url.startswith("//"):
        return _LOGIN.sub("***@", url)
    place, mark, rest = (*re.split(r"([?#]|%3f|%23)", url, maxsplit=1, flags=re.IGNORECASE), "", "")[:3]
    links = []
    for link in re.split(r"::(?=[\w.+-]+://)", place):
        scheme, separator, link = link.partition("//" if link.startswith("//") else "://")
        parts = re.split("@|%40", link)
        authority = re.split(r"[/\\]", link)[0]
        # A password may contain characters that end the authority; a colon precedes it, or a port
        if len(parts) > 1 and (":" in authority or len(re.split("@|%40", authority)) > 1):
            link = f"***@{parts[-1]}"
        elif not re.fullmatch(r"(?:\[[^\]]*\]|(?:[^:]|::)*)(?::\d*)?", authority) or (
            ":" in authority and "@" in rest
        ):
            link = "***"
        links.append(f"{scheme}{separator}{link}" if separator else scheme)
    return _LOGIN.sub("***@", "::".join(links)) + (f"{mark}***" if mark else "")


def shortened(value: Any) -> str:
    """The start and end of a value in at most 80 characters, for messages."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:50]}...{text[-27:]}"


class MediaError(ValueError):
    """A medium that can't be placed or decoded. The message names the row, the column and the remedy."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A medium as a dataset stores it, with the feature that decodes it. It is never copied."""

    value: dict[str, Any]  # with "bytes", "path", or both
    feature: "Audio | Image | Video"

    @property
    def kind(self) -> str:
        """`"image"`, `"audio"` or `"video"`."""
        return type(self.feature).__name__.lower()

    def __deepcopy__(self, memo: dict) -> "Encoded":
        return self


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class MediaRef:
    """
    Opaque reference to one medium of a dataset row, for chat messages.

    TRL deep-copies prompts and gathers them from all ranks. A reference is never copied, and is pickled as the short
    text `"<audio>"`, so that the medium isn't moved. Two references are equal only if they are the same object.

    Args:
        kind (`str`):
            `"image"`, `"audio"` or `"video"`.
        source (`Any`):
            Raw value from the row, see [`load_image`], [`load_audio`] and [`load_video`].
        options (`dict[str, Any]`):
            Options in the message block, such as `max_pixels`, `fps`, `video_start` or `sampling_rate`.
        column (`str`):
            Where the medium comes from, such as `"audio"`, `"images[1]"` or `"prompt[0].content[2]"`.
        row (`int`):
            Number of the row in its dataset, or in a list of rows.
        rules ([`~data.rules.MediaRules`], *optional*):
            Allowed sources and sizes.
    """

    kind: str
    source: Any
    options: dict[str, Any]
    column: str
    row: int
    rules: MediaRules = DEFAULT_RULES

    @property
    def stored(self) -> Any:
        """The raw value, also of a feature that decodes it."""
        return self.source.value if isinstance(self.source, Encoded) else self.source

    def error(self, message: str) -> MediaError:
        """
        Returns an error that names the row and the column.

        Args:
            message (`str`):
                The problem and the remedy.

        Returns:
            [`MediaError`]: The error to raise.
        """
        return MediaError(f"row {self.row}, column '{self.column}'{self._file()}: {self.shown(message)}")

    def shown(self, text: str) -> str:
        """
        Removes credentials from a text, such as an error about this medium.

        Args:
            text (`str`):
                The text.

        Returns:
            `str`: The text to show.
        """
        for source in self.stored.values() if isinstance(self.stored, dict) else [self.stored]:
            if isinstance(source, str):  # the whole value is the URL
                text = text.replace(source, shown_url(source))
        return re.sub(rf"[^\s'\"]{{{_LONGEST_WORD},}}", lambda word: shortened(word[0]), without_credentials(text))

    def _file(self) -> str:
        """The name of a file whose bytes the row holds."""
        value = self.stored
        if not isinstance(value, dict) or value.get("bytes") is None or not value.get("path"):
            return ""
        return f" ({self.shown(str(value['path']))})"

    def __repr__(self) -> str:
        return f"<{self.kind}>"

    def __copy__(self) -> "MediaRef":
        return self

    def __deepcopy__(self, memo: dict) -> "MediaRef":
        return self

    def __reduce__(self) -> tuple:
        return str, (repr(self),)


def rows_to_messages(
    rows: Sequence[Mapping[str, Any]],
    ignored: Collection[str] = (),
    placeholders: Collection[str] = (),
    rules: MediaRules = DEFAULT_RULES,
    prefix: str = "",
) -> list[dict[str, Any]]:
    """
    Moves the media of dataset rows into their prompts.

    Media in blocks of the prompt keep their place; their key is their kind (`"audio"`), `"audio_url"`, `"base64"`,
    `"bytes"`, `"path"` or `"url"`. OpenAI's block types (`"image_url"`, `"input_audio"`, `"input_text"`) work, too.
    Media of columns fill placeholders without a medium (`{"type": "image"}`) in order. If a row has a column of a kind
    but no such placeholder, the literal texts `"<image>"`, `"<video>"` and `"<audio>"` are placeholders, except in
    assistant and tool messages. Media of a kind without any placeholder go to the start of the first user message:
    images, then videos, then audios.

    All rows of a batch get the same format: if any row has media or a conversational prompt, every plain-text prompt
    becomes one user message (so that TRL passes its completions to reward functions as messages, too), and if any row
    has media, every string content becomes a text block. Plain-text prompts in a batch without media stay strings, as
    TRL expects for text.

    Args:
        rows (`Sequence[Mapping[str, Any]]`):
            Dataset rows with a `"prompt"` (text or messages) and any of the [`MEDIA_COLUMNS`], which may be `None`.
            Errors name the `number` of a [`~data.rows.Row`], or the index of other rows. They are not modified.
        ignored (`Collection[str]`, *optional*, defaults to `()`):
            Media columns that no prompt gets.
        placeholders (`Collection[str]`, *optional*, defaults to `()`):
            The model's placeholder tokens. If `"<image>"` is one, plain-text prompts keep it as text.
        rules ([`~data.rules.MediaRules`], *optional*):
            Allowed sources and sizes of media.
        prefix (`str`, *optional*, defaults to `""`):
            Where a row has columns whose names start with it, they take the place of the prompt, or of the columns of
            their kind of media, such as `"teacher_images"` of `"image"`.

    Returns:
        `list[dict[str, Any]]`: New rows without media columns, in whose prompts every medium is a block
        `{"type": kind, kind: MediaRef}`.

    Raises:
        MediaError: If a prompt is neither text nor messages with a role and a content, if both columns of a kind are
            set, if a singular column holds a list or a plural one doesn't, if placeholders don't match the media of
            their row, if no user message can receive them, or if a message has unread media or an invalid option.
    """
    numbers = [getattr(row, "number", place) for place, row in enumerate(rows)]
    names = ["prompt" if row.get(f"{prefix}prompt") is None else f"{prefix}prompt" for row in rows]
    prompts = [row[name] for name, row in zip(names, rows, strict=True)]
    for name, number, prompt in zip(names, numbers, prompts, strict=True):
        check_decoded(prompt, name, number)
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt):
            found = (
                "None" if prompt is None else "an empty list" if prompt == [] else f"of type {type(prompt).__name__}"
            )
            remedy = "give a text or a list of messages, or remove the row"
            raise MediaError(f"row {number}, column '{name}': is {found}; {remedy}")
    media = [
        _column_media({key: value for key, value in row.items() if key not in ignored}, number, prefix)
        for number, row in zip(numbers, rows, strict=True)
    ]
    if any(any(by_kind.values()) for by_kind in media) or not all(isinstance(prompt, str) for prompt in prompts):
        for index, prompt in enumerate(prompts):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            tags = [kind for kind in MODALITIES if not (isinstance(prompt, str) and f"<{kind}>" in placeholders)]
            prompts[index] = _place(messages, media[index], names[index], numbers[index], tags)
        if next(iter_refs(prompts), None) is not None:
            prompts = [[_ruled(_as_blocks(message), rules) for message in messages] for messages in prompts]
    return [
        {**{key: value for key, value in row.items() if key not in MEDIA_COLUMNS}, "prompt": prompt}
        for row, prompt in zip(rows, prompts, strict=True)
    ]


def blocks_to_refs(
    blocks: Sequence[Any], place: str, row: int, rules: MediaRules = DEFAULT_RULES
) -> list[dict[str, Any]]:
    """Reads content blocks from outside a dataset, such as a tool's: each medium becomes a [`MediaRef`]."""
    message = {"content": [_parse_block(block, f"{place}[{b}]", row) for b, block in enumerate(blocks)]}
    for ref in iter_refs(message):
        if ref.source is None:
            raise ref.error(f"the block has no {ref.kind}; add it under {ref.kind!r}")
    return _ruled(message, rules)["content"]


def has_media(prompt: str | list[dict[str, Any]]) -> bool:
    """Whether a prompt has its media in its messages, as the trainers pass it to reward functions."""
    if isinstance(prompt, str):
        return False
    blocks = [block for message in prompt if isinstance(message.get("content"), list) for block in message["content"]]
    return any(len(block) > 1 for block in blocks if block_kind(block["type"]) is not None)


def block_kind(block_type: str | None) -> str | None:
    """The kind of media that content blocks of a type hold."""
    kind = str(block_type).removesuffix("_url").removeprefix("input_")
    return kind if kind in MODALITIES else None


def file_kind(text: str) -> str | None:
    """The kind of media that a file name or a `data:` URI stands for, `None` for other texts."""
    uri = re.match("data:(image|video|audio)/", text)
    if uri:
        return uri.group(1)
    if len(text) > 4096 or text.startswith("data:") or "\n" in text:
        return None
    ending = _ENDING.search(text)
    # A sentence may end with a file name
    is_path = ending is not None and (len(text.split()) == 1 or re.match(r"\S*[/\\]", text) is not None)
    return ending.lastgroup if is_path else None


def find_media(value: Any, place: str = "") -> Iterator[tuple[str, str | None, Any]]:
    """Finds media, encoded or decoded, in nested lists and dictionaries: their place, kind (if known) and value."""
    decoder = {"AudioDecoder": "audio", "VideoDecoder": "video"}.get(type(value).__name__)
    if isinstance(value, (MediaRef, Encoded)):
        yield place, value.kind, value
    elif isinstance(value, PIL.Image.Image):
        yield place, "image", value
    elif decoder is not None:
        yield place, decoder, value
    elif isinstance(value, (bytes, bytearray, memoryview)):
        yield place, None, value
    elif isinstance(value, str):
        if (kind := file_kind(value)) is not None:
            yield place, kind, value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from find_media(item, place)
    elif isinstance(value, dict):
        held = {key: item for key, item in value.items() if not _absent(item)}
        kind = block_kind(held.get("type"))
        if "array" in held and "sampling_rate" in held:
            yield place, "audio", value
        elif held and "bytes" in value:  # as in Datasets, with or without a path
            yield place, file_kind(str(held.get("path", ""))), value
        elif kind is not None and any(key in held for key in _source_keys(kind)):
            yield place, kind, value
        elif held.keys() & {"data", "base64"} and held.keys() & {"format", "media_type", "mime_type"}:
            yield place, file_kind(f"data:{held.get('media_type', held.get('mime_type'))}"), value
        else:
            for key, item in held.items():
                yield from find_media(item, f"{place}.{key}" if place else str(key))


def iter_refs(value: MediaRef | Sequence | Mapping | None) -> Iterator[MediaRef]:
    if isinstance(value, MediaRef):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from iter_refs(item)
    elif isinstance(value, dict):
        yield from iter_refs(list(value.values()))


def strip_media(value: T) -> T:
    """
    Makes messages fit for logs: each [`MediaRef`] becomes a text such as `"<audio>"` and each message content one
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


def as_text(messages: str | list[dict[str, Any]], roles: bool = True) -> str:
    """Writes a prompt or a completion as one text."""
    if isinstance(messages, str):
        return messages
    if not roles:
        return "".join(message["content"] for message in messages)
    texts = []
    for message in messages:
        calls = [str(call) for call in message.get("tool_calls") or ()]
        texts.append("\n".join([*filter(None, [message.get("content")]), *calls]))
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True))


def _absent(value: Any) -> bool:
    # Arrow fills keys of other rows with None, and a missing struct with a struct of None
    return value is None or (isinstance(value, dict) and all(item is None for item in value.values()))


def _column_media(row: dict[str, Any], index: int, prefix: str = "") -> dict[str, list[MediaRef]]:
    media = {kind: [] for kind in MODALITIES}
    replaced = {kind for name, kind in MEDIA_COLUMNS.items() if prefix and row.get(f"{prefix}{name}") is not None}
    for name, kind in MEDIA_COLUMNS.items():
        own = prefix if kind in replaced else ""
        column, singular = f"{own}{name}", f"{own}{kind}"
        value = row.get(column)
        if value is None:
            continue
        whole = MediaRef(kind, value, {}, column, index)
        if _absent(value):
            raise whole.error(f"{sorted(value)} are all None; set one of them, or the whole column to None")
        if column == singular:
            if _holds_several(kind, value):
                raise whole.error(f"holds a list; rename the column to '{column}s'")
            refs = [whole]
        else:
            if not isinstance(value, (list, tuple)):
                raise whole.error(f"holds a {type(value).__name__}, not a list; rename the column to '{singular}'")
            refs = [MediaRef(kind, item, {}, f"{column}[{i}]", index) for i, item in enumerate(value)]
            for ref in refs:
                if _absent(ref.source):
                    raise ref.error("is None; leave it out of the list, or set the whole column to None")
        if refs and media[kind]:
            raise whole.error(f"the row also has '{singular}'; set one of the two columns to None")
        media[kind] += refs
    return media


def _holds_several(kind: str, value: Any) -> bool:
    """Whether a value is a list of media. Lists of frames, samples and rows of pixels are one medium each."""
    if not isinstance(value, (list, tuple)):
        return False
    if kind == "image":
        return not (value and isinstance(value[0], list))
    first = next((item for item in value if not _absent(item)), None)
    if kind == "audio":
        return isinstance(first, (str, os.PathLike, bytes, dict, Encoded)) or hasattr(first, "get_all_samples")
    if isinstance(first, dict):
        first = next((first[key] for key in ("path", "url") if first.get(key) is not None), None)
    if isinstance(first, (str, os.PathLike)):
        # A frame may be a file, too
        return (mimetypes.guess_type(urlsplit(os.fspath(first)).path)[0] or "").startswith("video/")
    return hasattr(first, "get_frames_at") or (isinstance(first, Encoded) and first.kind == "video")


def check_decoded(text: str | Sequence | None, column: str, row: int) -> None:
    """Refuses a serialized list of messages, which would become the text of a user message."""
    if not isinstance(text, str) or not re.match(r"\s*\[\s*\{", text):
        return
    for name, decode in (("json.loads", json.loads), ("ast.literal_eval", ast.literal_eval)):
        try:
            messages = decode(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if all(isinstance(each, dict) and ("role" in each or "from" in each) for each in messages):
            raise MediaError(
                f"row {row}, column '{column}': is the text of a list of messages; decode it: "
                f"`dataset.map(lambda row: {{'{column}': {name}(row['{column}'])}})`"
            )
        return


def _place(
    messages: list[dict[str, Any]], media: dict[str, list[MediaRef]], name: str, row: int, tags: list[str]
) -> list[dict[str, Any]]:
    """Copies messages of the column `name` and puts the media of other columns into them."""
    messages = [_parse_message(message, f"{name}[{m}]", row) for m, message in enumerate(messages)]
    placeholders = _placeholders(messages)
    tags = [kind for kind in tags if media[kind] and not placeholders[kind]]
    if tags:
        for m, message in enumerate(messages):
            _open_tags(message, tags, f"{name}[{m}].content", row)
        placeholders = _placeholders(messages)

    unplaced = []
    for kind in MODALITIES:
        blocks, refs = placeholders[kind], media[kind]
        if blocks and not refs:
            raise blocks[0][kind].error(f"placeholder without {kind}; add the {kind} inline, or in column '{kind}s'")
        if blocks and len(blocks) != len(refs):
            column = refs[0].column.split("[")[0]
            found = f"{kind} placeholders in the prompt; write one {{'type': '{kind}'}} block for each, or none at all"
            if kind in tags:
                found = (
                    f"'<{kind}>' in the text of the prompt; write one for each, or {{'type': '{kind}'}} blocks, which "
                    f"make '<{kind}>' plain text"
                )
            raise MediaError(f"row {row}, column '{column}': {len(refs)} for {len(blocks)} {found}")
        for block, ref in zip(blocks, refs, strict=False):
            block[kind] = replace(ref, options=block[kind].options)
        if not blocks:
            unplaced += [{"type": kind, kind: ref} for ref in refs]

    if unplaced:
        user = next((message for message in messages if message["role"] == "user"), None)
        if user is None:
            raise next(iter_refs(unplaced)).error("no user message to put it in; add one, or a placeholder block")
        user["content"] = unplaced + (_as_blocks(user).get("content") or [])
    return messages


def _placeholders(messages: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    placeholders = {kind: [] for kind in MODALITIES}
    for message in messages:
        for block in message["content"] if isinstance(message.get("content"), list) else []:
            for ref in iter_refs(block):
                if ref.source is None:
                    placeholders[ref.kind].append(block)
    return placeholders


def _open_tags(message: dict[str, Any], kinds: list[str], where: str, row: int) -> None:
    """Turns literal texts such as `"<image>"` into placeholders."""
    if message["role"] in ("assistant", "tool"):
        return
    tag, blocks = re.compile(f"<({'|'.join(kinds)})>"), []
    for block in _as_blocks(message).get("content") or []:
        if block["type"] != "text" or not tag.search(block.get("text", "")):
            blocks.append(block)
            continue
        for i, part in enumerate(tag.split(block["text"])):  # text and kind alternate
            if i % 2:
                blocks.append({"type": part, part: MediaRef(part, None, {}, where, row)})
            elif part:
                blocks.append({**block, "text": part})
    if any(block["type"] != "text" for block in blocks):
        message["content"] = blocks


def _parse_message(message: dict[str, Any], where: str, row: int) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        found = sorted(message) if isinstance(message, dict) else f"a {type(message).__name__}"
        is_sharegpt = isinstance(message, dict) and "from" in message
        remedy = _SHAREGPT if is_sharegpt else "set its role to 'user', 'assistant' or 'system'"
        raise MediaError(
            f"row {row}, column '{where}': a message must be a dictionary with 'role' and 'content', got {found}; "
            f"{remedy}"
        )
    if message["role"] in ("human", "gpt"):
        raise MediaError(f"row {row}, column '{where}': the role is {message['role']!r}; {_SHAREGPT}")
    message = {key: item for key, item in message.items() if item is not None or key == "content"}
    content = message.get("content")
    stray = next((key for key in message if key not in _MESSAGE_KEYS and _is_stray(key, message[key], True)), None)
    if isinstance(content, list):
        message["content"] = [_parse_block(block, f"{where}.content[{b}]", row) for b, block in enumerate(content)]
    elif not isinstance(content, str) and next(find_media(content), None) is not None:
        stray = "content"
    elif not isinstance(content, str) and not (content is None and message["role"] == "assistant"):
        found = "no content" if content is None else f"content of type {type(content).__name__}"
        raise MediaError(
            f"row {row}, column '{where}': the message has {found}; give a text or a list of blocks, such as "
            "{'type': 'text', 'text': ...}, or remove the row"
        )
    if stray is not None:
        raise MediaError(
            f"row {row}, column '{where}': nothing reads the media in '{stray}' of a message; move each to a block "
            "of 'content', such as {'type': 'image', 'image': ...}, or to a media column"
        )
    return message


def _parse_block(block: dict[str, Any], where: str, row: int) -> dict[str, Any]:
    """Copies a content block. A medium becomes `{"type": kind, kind: MediaRef}`, with source None in a placeholder."""
    if not isinstance(block, dict) or "type" not in block:
        raise MediaError(f"row {row}, column '{where}': a content block must be a dictionary with a 'type'")
    block = {key: item for key, item in block.items() if not _absent(item)}
    name = block.pop("type", None)
    words = block.get(_TEXT_KEYS[name], "") if name in _TEXT_KEYS else ""
    if not isinstance(name, str) or not isinstance(words, str):
        found = f"text of type {type(words).__name__}" if isinstance(name, str) else "no type"
        raise MediaError(
            f"row {row}, column '{where}': the block has {found}; write {{'type': 'text', 'text': '...'}}, or a "
            "media type"
        )
    kind = block_kind(name)
    sources = [_source(key, block.pop(key)) for key in _source_keys(kind) if key in block]
    # Of the remaining keys only text and options are read, which hold no media
    words = {_TEXT_KEYS[name]} if name in _TEXT_KEYS else block.keys() if sources or name in _WORD_TYPES else {}
    stray = next((key for key, item in block.items() if _is_stray(key, item, files=key not in words)), None)
    if stray is not None or (kind is not None and name != kind and block and not sources):
        raise MediaError(
            f"row {row}, column '{where}': nothing reads '{stray or next(iter(block))}' of a block of type '{name}', "
            f"so the model would not get it; known types are {KNOWN_TYPES}; write one block per medium, such as "
            "{'type': 'audio', 'audio': ...}"
        )
    if kind is not None:
        options = {key: item for key, item in block.items() if key not in _HINTS}
        options |= {key: item.item() for key, item in options.items() if getattr(item, "ndim", None) == 0}
        ref = MediaRef(kind, sources[0] if sources else None, options, where, row)
        _check_options(ref)
        return {"type": kind, kind: ref}
    if name not in _TEXT_KEYS:
        return {"type": name, **block}
    empty = [key for key, item in block.items() if isinstance(item, (str, list, dict)) and not item]
    held = [key for key in block if key not in _TEXT_HINTS and key not in empty]
    if _TEXT_KEYS[name] not in block or not {*held} <= {_TEXT_KEYS[name]}:
        raise MediaError(
            f"row {row}, column '{where}': a block of type '{name}' has its text in '{_TEXT_KEYS[name]}' and nothing "
            f"else, got {held}; rename the key of the text, and remove other keys"
        )
    return {"type": "text", "text": block[_TEXT_KEYS[name]]}


def _check_options(ref: MediaRef) -> None:
    known = OPTIONS[ref.kind]
    for name, value in ref.options.items():
        if name not in known:
            raise ref.error(f"'{name}' is no option of a block of {ref.kind}; remove it, or write one of {known}")
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (value == 0 and name != "video_start"):
            raise ref.error(f"the option '{name}' is {value!r}; give a positive number, or leave it out")
        if name not in FRACTIONAL_OPTIONS and value != int(value):
            raise ref.error(f"the option '{name}' is {value!r}; give a whole number")
    for low, high in _ORDERED_OPTIONS:
        if low in ref.options and high in ref.options and not ref.options[low] <= ref.options[high]:
            raise ref.error(f"'{low}' of {ref.options[low]} is above '{high}' of {ref.options[high]}; correct them")
    if ("resized_height" in ref.options) != ("resized_width" in ref.options):
        raise ref.error("one of 'resized_height' and 'resized_width' alone has no effect; give both")


def _source_keys(kind: str | None) -> tuple[str, ...]:
    if kind is None:
        return ()
    return kind, f"{kind}_url", f"input_{kind}", "bytes", "path", "url", "base64", "data"


def _source(key: str, value: Any) -> Any:
    """The medium of a block. Base64 becomes a `data:` URI, as loaders can't tell it from a path."""
    if isinstance(value, dict):
        key, value = next(((k, value[k]) for k in ("data", "base64") if value.get(k) is not None), (key, value))
    if key in ("data", "base64") and isinstance(value, str) and not value.startswith("data:"):
        return f"data:;base64,{value}"
    return value


def _is_stray(key: str, value: Any, files: bool) -> bool:
    """Whether an unread key of a block holds media; with `files`, texts that name media files count."""
    if key in _MEDIA_KEYS:
        return not isinstance(value, (str, list, dict)) or len(value) > 0
    if isinstance(value, str) and not files:
        return False
    return any(files or not isinstance(medium, str) for _, _, medium in find_media(value, key))


def _as_blocks(message: dict[str, Any]) -> dict[str, Any]:
    """Copies a message and turns a string content into a text block."""
    if isinstance(message.get("content"), str):
        return {**message, "content": [{"type": "text", "text": message["content"]}]}
    return {**message}


def _ruled(message: dict[str, Any], rules: MediaRules) -> dict[str, Any]:
    """Copies a message of blocks and sets the rules of its media."""
    if not isinstance(message.get("content"), list):
        return message
    blocks = [
        {key: replace(item, rules=rules) if isinstance(item, MediaRef) else item for key, item in block.items()}
        for block in message["content"]
    ]
    return {**message, "content": blocks}
