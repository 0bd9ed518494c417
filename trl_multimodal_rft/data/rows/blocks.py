# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Content blocks of messages: the dialects of OpenAI, Anthropic, MCP and others become one form."""

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from ..reading.refs import MediaError, MediaRef, rival_keys
from ..reading.rules import MediaRules
from .values import (
    MEDIA_TYPE_KEYS,
    block_modality,
    is_absent,
    is_stray,
    read_value,
    source_keys,
    source_objection,
)


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
_HINTS = ("detail", "format", "annotations", "meta", "_meta", *MEDIA_TYPE_KEYS)

# Types of text blocks, each with the key of its text
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Other keys of text blocks in the formats of OpenAI, Anthropic and MCP, which are ignored
_TEXT_HINTS = ("annotations", "cache_control", "logprobs", "meta", "_meta")

# Types of blocks whose strings are text, even if the strings name a file
_TEXT_TYPES = {*_TEXT_KEYS, "thinking", "reasoning", "tool_use", "tool_call", "tool_result", "function"}
_TEXT_TYPES |= {"function_call"}

KNOWN_TYPES = (
    "'text', 'image', 'audio' and 'video', OpenAI's ('input_text', 'image_url', 'input_image', 'input_audio' and so "
    "on), and those of the chat template"
)


@dataclass(frozen=True)
class Location:
    """Where a value stands: the index of its row, and its `path` in the row, such as `prompt[0].content[2]`."""

    row_index: int
    path: str
    rules: MediaRules

    def error(self, message: str) -> MediaError:
        return MediaError(f"row {self.row_index}, column '{self.path}': {message}")

    def ref(self, modality: str, source: Any, options: dict[str, Any] | None = None) -> MediaRef:
        """Returns a reference to a medium. Raises a [`MediaError`] for a value that can't be one, such as a number."""
        if isinstance(source, tuple):
            reading = read_value(source)
            source = reading.value if reading.kind == "medium" else source  # samples with their rate
        ref = MediaRef(modality, source, options or {}, self.path, self.row_index, self.rules)
        actual = source_objection(modality, source)
        if actual is not None:
            raise ref.error(f"is {actual}; give a file, its bytes, an array or a decoded {modality}")
        return ref


def parse_block(block: Any, location: Location) -> dict[str, Any]:
    """
    Returns a block of any dialect in one form: `{"type": "text", "text": str}`, or `{"type": modality, modality:
    MediaRef}`, with source `None` if there is no medium. Types that only the chat template knows stay as they are.
    """
    if not isinstance(block, dict) or "type" not in block:
        actual = sorted(block) if isinstance(block, dict) else f"a {type(block).__name__}"
        message = "a content block must be a dictionary with a 'type', such as {'type': 'text', 'text': ...}"
        raise location.error(f"{message}, got {actual}")
    fields = {key: item for key, item in block.items() if not is_absent(item)}
    block_type = fields.pop("type", None)
    if not isinstance(block_type, str):
        raise _without_text("no type", location)
    if block_modality(block_type) is not None:
        return _media_block(block_type, fields, location)
    if block_type in _TEXT_KEYS:
        return _text_block(block_type, fields, location)
    return _template_block(block_type, fields, location)


def _media_block(block_type: str, fields: dict[str, Any], location: Location) -> dict[str, Any]:
    modality = str(block_modality(block_type))
    sources = _pop_sources(fields, source_keys(modality), location)
    # Beside a medium there are options and hints, whose strings are text, even if they look like a file's name
    _check_nothing_unread(block_type, fields, fields if sources else {}, location)
    if block_type != modality and fields and not sources:
        raise _unread(next(iter(fields)), block_type, location)
    if sources and isinstance(sources[0], MediaRef):
        return {"type": modality, modality: sources[0]}  # the block is already parsed
    options = {key: item for key, item in fields.items() if key not in _HINTS}
    for key, item in options.items():
        if getattr(item, "ndim", None) == 0:  # a scalar array
            options[key] = item.item()
    ref = location.ref(modality, sources[0] if sources else None, options)
    _check_options(ref)
    return {"type": modality, modality: ref}


def _text_block(block_type: str, fields: dict[str, Any], location: Location) -> dict[str, Any]:
    key = _TEXT_KEYS[block_type]
    if not isinstance(fields.get(key, ""), str):
        raise _without_text(f"text of type {type(fields[key]).__name__}", location)
    _check_nothing_unread(block_type, fields, (key, *_TEXT_HINTS), location)
    empty_keys = [name for name, item in fields.items() if isinstance(item, (str, list, dict)) and not item]
    filled_keys = [name for name in fields if name not in _TEXT_HINTS and name not in empty_keys]
    if key not in fields or not {*filled_keys} <= {key}:
        raise location.error(
            f"a block of type '{block_type}' has its text in '{key}' and nothing else, got {filled_keys}; rename the "
            "key of the text, and remove other keys"
        )
    return {"type": "text", "text": fields[key]}


def _template_block(block_type: str, fields: dict[str, Any], location: Location) -> dict[str, Any]:
    _check_nothing_unread(block_type, fields, fields if block_type in _TEXT_TYPES else {}, location)
    return {"type": block_type, **fields}


def _pop_sources(fields: dict[str, Any], keys: tuple[str, ...], location: Location) -> list[Any]:
    """Returns the equal media that a block holds under several `keys`, and removes these keys from the block."""
    named = {key: fields.pop(key) for key in keys if key in fields}
    for holder in (named, *(item for item in named.values() if isinstance(item, dict))):
        rivals = rival_keys(holder, keys)
        if rivals:
            both = f"'{rivals[0]}' and '{rivals[1]}'"
            raise location.error(f"the block has media in both {both}; leave one of them, or write two blocks")
    return [_source(key, item) for key, item in named.items()]


def _check_nothing_unread(
    block_type: str, fields: dict[str, Any], text_keys: Container[str], location: Location
) -> None:
    """Raises a [`MediaError`] for media under a key that isn't read. Strings under `text_keys` are text."""
    for key, item in fields.items():
        if is_stray(key, item, count_file_names=key not in text_keys):
            raise _unread(key, block_type, location)


def _unread(key: str, block_type: str, location: Location) -> MediaError:
    return location.error(
        f"nothing reads '{key}' of a block of type '{block_type}', so the model would not get it; known types are "
        f"{KNOWN_TYPES}; write one block per medium, such as {{'type': 'audio', 'audio': ...}}"
    )


def _without_text(actual: str, location: Location) -> MediaError:
    return location.error(f"the block has {actual}; write {{'type': 'text', 'text': '...'}}, or a media type")


def _check_options(ref: MediaRef) -> None:
    names = OPTIONS[ref.modality]
    for name, value in ref.options.items():
        if name == "index" and ref.source is None and type(value) is int:
            continue  # says which medium of its column a placeholder stands for
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


def _source(key: str, value: Any) -> Any:
    """Base64 becomes a `data:` URI, as loaders can't tell base64 from a path."""
    if isinstance(value, dict):
        key, value = next(((k, value[k]) for k in ("data", "base64") if value.get(k) is not None), (key, value))
    if key in ("data", "base64") and isinstance(value, str) and not value.startswith("data:"):
        return f"data:;base64,{value}"
    return value
