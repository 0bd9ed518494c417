# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Media in values of any kind: files, bytes, arrays, decoders and blocks."""

import mimetypes
import os
import re
from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import PIL.Image

from ...families import MODALITIES
from ..reading.refs import Encoded, MediaRef
from .names import MEDIA_COLUMNS


T = TypeVar("T")

# Keys for media in other formats: OpenAI's in blocks, Ollama's next to the content of a message
_MEDIA_KEYS = {*MEDIA_COLUMNS, *(f"{name}_url" for name in MODALITIES), *(f"input_{name}" for name in MODALITIES)}
# Keys of a medium's type in other libraries
MEDIA_TYPE_KEYS = ("media_type", "mime_type", "mimeType")

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
        modality = file_modality(value)
        if modality is not None:
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
        elif modality is not None and any(key in fields for key in source_keys(modality)):
            yield path, modality, value
        elif fields.keys() & {"data", "base64", "blob"} and fields.keys() & {"format", *MEDIA_TYPE_KEYS}:
            media_type = next((fields[key] for key in MEDIA_TYPE_KEYS if key in fields), None)
            yield path, file_modality(f"data:{media_type}"), value
        else:
            for key, item in fields.items():
                yield from find_media(item, f"{path}.{key}" if path else str(key))


def _holds_pixels(value: T) -> bool:
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


def is_stray(key: str, value: Any, count_file_names: bool) -> bool:
    """Returns whether an unread key holds media. With `count_file_names`, names of media files count as media, too."""
    if key in _MEDIA_KEYS:
        return not isinstance(value, (str, list, dict)) or len(value) > 0
    if isinstance(value, str) and not count_file_names:
        return False
    return any(count_file_names or not isinstance(medium, str) for _, _, medium in find_media(value, key))
