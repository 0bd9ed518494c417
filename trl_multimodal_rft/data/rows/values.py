# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a value of a row, of a message or of a tool is for a model: a medium, a text, or what no model reads."""

import base64
import binascii
import dataclasses
import datetime
import mimetypes
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from numbers import Number
from typing import Any, Literal
from uuid import UUID

import PIL.Image

from ...modalities import FILE_ENDINGS, FIRST_BYTES, MODALITIES
from ..reading.refs import Encoded, MediaRef
from .names import MEDIA_COLUMNS


# Keys for media in other formats: OpenAI's in blocks, Ollama's next to the content of a message
_MEDIA_KEYS = {*MEDIA_COLUMNS, *(f"{name}_url" for name in MODALITIES), *(f"input_{name}" for name in MODALITIES)}
# Keys of a medium's type in other libraries
MEDIA_TYPE_KEYS = ("media_type", "mime_type", "mimeType")

_FILE_ENDING = re.compile(
    r"(?<=.)\.(?:" + "|".join(f"(?P<{name}>{ending})" for name, ending in FILE_ENDINGS.items()) + r")(?:[?#]\S+)?$",
    re.IGNORECASE,
)
# Beginning of a path with a folder, and characters that the names of files lack and sentences have
_FOLDER = re.compile(r"\S*[/\\]")
_NOT_IN_NAMES = re.compile(r'[?*"<>|]|:(?!\d)')  # a colon in a name separates hours, minutes and seconds
_LONGEST_NAME = 255  # characters of a file's name
_LONGEST_PATH = 4096  # characters of a path or URL
_QUOTES = " \t\r\n'\"`<>"  # characters around a name that aren't a part of it

# A medium in base64: a `data:` URI at the start of a text, or a text of its own in lines without blanks
_DATA_URI = re.compile(r"data:[\w.+-]*/?[\w.+-]*(?:;[\w=.-]+)*;base64,\s*(?=[A-Za-z0-9+/_-]{24})", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/_\r\n-]+={0,2}")
_SHORTEST_BASE64 = 100  # characters of a file in base64
_SMALLEST_PICTURE = 16  # pixels of a side, below which an array is taken for a table of numbers
_LARGEST_TABLE = 1000  # numbers, above which the text of an array is shortened by numpy and torch

# Types whose text says all of them, besides `str`
_TEXT_TYPES = (Number, Decimal, datetime.date, datetime.time, datetime.timedelta, UUID, Enum, range)
_DECODERS = {"AudioDecoder": "audio", "VideoDecoder": "video"}


@dataclass(frozen=True)
class Reading:
    """What a value is for a model."""

    # A text may name a medium, whose modality is known then. Parts are the items of a list or a dictionary, to be
    # read one by one. An objection is a value that no model reads.
    kind: Literal["medium", "text", "parts", "nothing", "objection"]
    value: Any = None  # the medium as the loaders take it, the text, or the parts
    modality: str | None = None  # `None` for a medium of unknown modality, such as bytes
    objection: str = ""  # what the value is, in words that follow "is"


def read_value(value: Any) -> Reading:
    """
    Reads a value of a row, of a message or of a tool. Media are pictures, sounds with their rate, decoders, bytes,
    files (`os.PathLike`), and dictionaries of them as in Datasets, blocks and MCP; a text may be a number, a date or a
    small array. Everything else is an objection.
    """
    if isinstance(value, str):
        return Reading("text", value, named_modality(value))
    if is_absent(value):
        return Reading("nothing")
    medium = _as_media(value)
    if medium is not None:
        return medium
    if isinstance(value, _TEXT_TYPES):
        return Reading("text", str(value))
    if not _is_array(value):
        if isinstance(value, Collection) or is_record(value):
            return Reading("parts", value)
        return Reading("objection", value, objection=f"of type {type(value).__name__}")
    dtype = str(value.dtype).removeprefix("torch.")
    n_items = int(value.numel() if hasattr(value, "numel") else value.size)
    is_mask = "bool" in dtype and len(value.shape) > 1
    if is_mask or n_items > _LARGEST_TABLE or (n_items == 0 and len(value.shape) > 1):
        return Reading("objection", value, objection=f"an array of {dtype} of shape {tuple(value.shape)}")
    return Reading("text", str(value))


def media_in(value: Any, path: str = "") -> Iterator[tuple[str, Reading]]:
    """Yields the paths and readings of all media in nested values, and of texts that name media."""
    reading = read_value(value)
    if reading.kind == "medium" or (reading.kind == "text" and reading.modality is not None):
        yield path, reading
    elif reading.kind == "parts" and isinstance(value, Mapping):
        for key, item in value.items():
            yield from media_in(item, f"{path}.{key}" if path else str(key))
    elif reading.kind == "parts" and not is_record(value):
        for item in value:
            yield from media_in(item, path)


def unread_part(value: Any, path: str = "") -> str | None:
    """Returns what isn't text in a value that is read as one text, and where it is; `None` if all of it is text."""
    reading = read_value(value)
    if isinstance(value, os.PathLike):
        return f"a path ({path})"
    if reading.kind == "medium" or (isinstance(value, str) and data_modality(value) is not None):
        return f"a medium ({path})"
    if reading.kind == "objection":
        return f"{'an object ' if reading.objection.startswith('of') else ''}{reading.objection} ({path})"
    if reading.kind != "parts":
        return None
    if is_record(value):
        items = [(f"{path}.{name}", item) for name, item in _fields(value).items()]
    elif isinstance(value, Mapping):
        items = [(f"{path}.{key}", item) for key, item in value.items()]
    else:
        items = [(path, item) for item in value]
    return next(filter(None, (unread_part(item, where) for where, item in items)), None)


def source_objection(modality: str, value: Any) -> str | None:
    """Returns what a value of a media column or of a block is, if it can't be a medium of the modality."""
    if isinstance(value, str) or is_absent(value) or _is_array(value):
        return None  # the loaders open a text, and check the shape of an array
    reading = read_value(value)
    if reading.kind == "text":
        return f"the {type(value).__name__} {reading.value}"
    if reading.kind == "objection":
        return reading.objection
    # A file of a video has a sound, and one of a picture may be a frame
    is_file = isinstance(value, (os.PathLike, Encoded)) or (isinstance(value, Mapping) and "array" not in value)
    if reading.kind == "medium" and not is_file and reading.modality not in (None, modality):
        return f"of modality {reading.modality}"
    return None


def _as_media(value: Any) -> Reading | None:
    if isinstance(value, (MediaRef, Encoded)):
        return Reading("medium", value, value.modality)
    if isinstance(value, PIL.Image.Image):
        if 0 in value.size:
            return Reading("objection", value, objection="an empty picture")
        return Reading("medium", value, "image")
    if type(value).__name__ in _DECODERS:
        return Reading("medium", value, _DECODERS[type(value).__name__])
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Reading("medium", value, _modality_of_bytes(bytes(value[:16])))
    if isinstance(value, os.PathLike):
        return Reading("medium", value, file_modality(os.fspath(value)))
    if _holds_pixels(value):  # several pictures, or the frames of a video, have one dimension more
        return Reading("medium", value, "image" if len(value.shape) < 4 else None)
    if isinstance(value, tuple):
        return _sound_with_rate(value)
    return _media_of_fields(value) if isinstance(value, Mapping) else None


def _sound_with_rate(value: tuple) -> Reading | None:
    """Reads samples and their rate, in the order of soundfile or of scipy."""
    if len(value) != 2:
        return None
    samples, rate = value if _is_array(value[0]) and len(value[0].shape) > 0 else value[::-1]
    is_number = isinstance(rate, Number) and not isinstance(rate, (bool, complex))
    is_rate = is_number or getattr(rate, "shape", None) == ()
    if not is_rate or not _is_array(samples) or len(samples.shape) not in (1, 2) or 0 in samples.shape:
        return None
    return Reading("medium", {"array": samples, "sampling_rate": rate}, "audio")


def _media_of_fields(value: Mapping) -> Reading | None:
    fields = {key: item for key, item in value.items() if not is_absent(item)}
    block_type = fields.get("type")
    modality = block_modality(block_type)
    if "array" in fields and "sampling_rate" in fields:
        return Reading("medium", value, "audio")
    if modality is not None and any(key in fields for key in source_keys(modality)):
        return Reading("medium", value, modality)
    contents = fields.get("bytes")
    is_file = isinstance(contents, (bytes, bytearray, memoryview)) or (contents is None and "path" in fields)
    if "bytes" in value and is_file:  # as in Datasets
        modality = file_modality(str(fields.get("path", "")))
        if modality is None and contents is not None:
            modality = _modality_of_bytes(bytes(contents[:16]))
        return Reading("medium", value, modality)
    media_type = next((fields[key] for key in MEDIA_TYPE_KEYS if key in fields), None)
    modality = file_modality(f"data:{media_type}") or file_modality(f"x.{fields.get('format')}")
    data = next((fields[key] for key in ("data", "base64", "blob") if key in fields), None)
    if data is not None and modality is not None:
        return Reading("medium", {"type": modality, "data": data}, modality)
    resource = fields.get("resource")
    if block_type == "resource" and isinstance(resource, Mapping):  # MCP's embedded file
        medium = _media_of_fields(resource)
        if medium is None and not isinstance(resource.get("text"), str):
            return Reading("objection", value, objection=f"a resource with {sorted(map(str, resource))}")
        return Reading("text", resource["text"]) if medium is None else medium
    if block_type == "resource_link":
        return Reading("objection", value, objection=f"a link to {fields.get('uri')!r}")
    return None


def block_modality(block_type: str | None) -> str | None:
    """Returns the modality of the media that content blocks of a type hold, `None` for other types."""
    modality = str(block_type).removesuffix("_url").removeprefix("input_")
    return modality if modality in MODALITIES else None


def source_keys(modality: str | None) -> tuple[str, ...]:
    """Returns the keys under which a block of a modality can hold its medium."""
    if modality is None:
        return ()
    return modality, f"{modality}_url", f"input_{modality}", "bytes", "path", "url", "base64", "data"


def file_modality(text: str) -> str | None:
    """
    Returns the modality of the medium that a file name or a `data:` URI stands for, `None` for other texts. A sentence
    that ends with a file name can't be told from a name with spaces, see [`may_be_sentence`].
    """
    uri = re.match("data:(image|video|audio)/", text, re.IGNORECASE)
    if uri:
        return uri.group(1).lower()
    text = text.strip()
    if len(text) > _LONGEST_PATH or text[:5].lower() == "data:" or "\n" in text:
        return None
    ending = _FILE_ENDING.search(text)
    if ending is None:
        return None
    if may_be_sentence(text) and (ending.start() > _LONGEST_NAME or _NOT_IN_NAMES.search(text[: ending.start()])):
        return None
    return ending.lastgroup


def named_modality(text: str) -> str | None:
    """
    Returns the modality of the medium that a text holds, see [`data_modality`], or names: a file's name, which may be
    quoted, or a URL of a file. Returns `None` for other texts.
    """
    return data_modality(text) or file_modality(text if len(text) > _LONGEST_PATH else text.strip(_QUOTES))


def data_modality(text: str) -> str | None:
    """Returns the modality of the medium that a text holds in base64: all of it, or a `data:` URI at its start."""
    start = text[:400].strip(_QUOTES)
    uri = _DATA_URI.match(start)
    if uri is not None:
        return file_modality(uri[0]) or _modality_of_base64(start[uri.end() :])
    is_base64 = len(text) >= _SHORTEST_BASE64 and _BASE64.fullmatch(text.strip()) is not None
    return _modality_of_base64(start) if is_base64 else None


def is_file_name(text: str) -> bool:
    """
    Returns whether a text is nothing but a medium: its data, a URL or a name without blanks, or an existing file's
    name.
    """
    name = text.strip(_QUOTES)
    is_name = file_modality(name) is not None and (len(name.split()) == 1 or os.path.isfile(name))
    return is_name or data_modality(text) is not None


def may_be_sentence(text: str) -> bool:
    """Returns whether a text has several words, of which the first names no folder."""
    return len(text.split()) > 1 and text[:5].lower() != "data:" and _FOLDER.match(text) is None


def _modality_of_base64(text: str) -> str | None:
    start = re.sub(r"\s", "", text[:64])
    try:
        return _modality_of_bytes(base64.b64decode(start[:24], altchars=b"-_" if re.search("[-_]", start) else None))
    except (binascii.Error, ValueError):
        return None


def _modality_of_bytes(start: bytes) -> str | None:
    for modality, patterns in FIRST_BYTES.items():
        if any(re.match(pattern, start, re.DOTALL) for pattern in patterns.values()):
            return modality
    return None


def _is_array(value: Any) -> bool:
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype")


def is_record(value: Any) -> bool:
    """Returns whether a value is an object with named fields, of a dataclass or of pydantic."""
    return not isinstance(value, type) and (
        dataclasses.is_dataclass(value) or callable(getattr(value, "model_dump", 0))
    )


def _fields(record: Any) -> Mapping[str, Any]:
    dump = getattr(record, "model_dump", None)
    return (
        dump() if callable(dump) else {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    )


def _holds_pixels(value: Any) -> bool:
    """
    Returns whether an array or a tensor has the shape of pictures: (H, W) of bytes, or 1, 3 or 4 channels in the first
    or last dimension of each.
    """
    shape = getattr(value, "shape", None)
    dtype = str(getattr(value, "dtype", ""))
    if not isinstance(shape, tuple) or len(shape) not in (2, 3, 4) or not re.search("int|float", dtype):
        return False
    if len(shape) == 2:
        return "uint8" in dtype and min(shape) >= _SMALLEST_PICTURE
    sides = shape[-3:-1] if shape[-1] in (1, 3, 4) else shape[-2:] if shape[-3] in (1, 3, 4) else (0,)
    return min(sides) >= _SMALLEST_PICTURE


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


def holds_several_media(modality: str, value: Any) -> bool:
    """Returns whether a value is a list of media. A list of frames, of samples or of rows of pixels is one medium."""
    if not isinstance(value, (list, tuple)) or read_value(value).kind == "medium":
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
        name = os.fspath(first_item)
        return file_modality(name) == "video" or (mimetypes.guess_type(name)[0] or "").startswith("video/")
    return hasattr(first_item, "get_frames_at") or (isinstance(first_item, Encoded) and first_item.modality == "video")


def is_stray(key: str, value: Any, count_file_names: bool) -> bool:
    """Returns whether an unread key holds media. With `count_file_names`, names of media files count as media, too."""
    if key in _MEDIA_KEYS:
        return not isinstance(value, (str, list, dict)) or len(value) > 0
    if isinstance(value, str) and not count_file_names:
        return False
    return any(count_file_names or reading.kind == "medium" for _, reading in media_in(value, key))
