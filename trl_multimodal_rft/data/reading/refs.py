# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""References to media in rows. Their errors name the row, the column and the file, without credentials."""

import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

from ...credentials import masked_url, without_credentials
from ...printable import printable
from .rules import DEFAULT_RULES, MediaRules


if TYPE_CHECKING:
    from datasets import Audio, Image, Video

T = TypeVar("T")

# Number of characters from which a word in a message is shortened, because it is probably data rather than text
_LONGEST_WORD = 300


def checksum(messages: str | list | None) -> int | None:
    """Returns a checksum of the media in messages, `None` without media."""
    refs = [*iter_refs(messages)]
    return reduce(lambda total, ref: ref.checksum(total), refs, 0) if refs else None


def shortened(value: Any) -> str:
    """Returns a value as text for messages. A text of more than 80 characters is shortened in the middle."""
    text = printable(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:50]}...{text[-27:]}"


def _only_value(value: T | dict[str, T]) -> T | dict[str, T]:
    """Returns the value of a dictionary that has one, such as `{"url": "a.png"}`; other values unchanged."""
    values = [item for item in value.values() if item is not None] if isinstance(value, dict) else []
    return values[0] if len(values) == 1 else value


def rival_keys(fields: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, str] | None:
    """
    Returns two of the `keys` under which a dictionary has different media, `None` if it has at most one medium. A
    path or URL next to bytes or samples only names them, as in Datasets.
    """
    names = ("path", "url") if any(fields.get(key) is not None for key in ("bytes", "array")) else ()
    filled = [key for key in keys if fields.get(key) is not None and key not in names]
    holding = [key for key in filled if not isinstance(fields[key], str) or fields[key]]
    for key in holding[1:]:
        first, second = (_only_value(fields[name]) for name in (holding[0], key))
        # Other values, such as arrays, aren't compared by `==`
        if first is not second and not (isinstance(first, (str, bytes, os.PathLike)) and first == second):
            return holding[0], key
    return None


class MediaError(ValueError):
    """Error of a medium that can't be put into a prompt, or decoded. Names the row, the column and the remedy."""

    def __init__(self, message: str):
        super().__init__(printable(message))


class OverlongRow(MediaError):
    """Error of a row without tokens to train on after truncation to `max_length`. Such rows are dropped."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Stored medium of a dataset, with the feature (column type) that decodes it. A deep copy is the same object."""

    value: dict[str, Any]  # with "bytes", "path", or both
    feature: "Audio | Image | Video"

    @property
    def modality(self) -> str:
        """`"image"`, `"audio"` or `"video"`."""
        return type(self.feature).__name__.lower()

    def __deepcopy__(self, memo: dict) -> "Encoded":
        return self


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class MediaRef:
    """
    Opaque reference to one medium of a dataset row, for chat messages.

    TRL deep-copies prompts and gathers them from all ranks. So that no medium is copied or sent, a copy of a reference
    is the same object, and its pickle is a short text such as `"<audio>"`. A reference equals only itself.

    Args:
        modality (`str`):
            `"image"`, `"audio"` or `"video"`.
        source (`Any`):
            Raw value from the row, see [`load_image`], [`load_audio`] and [`load_video`].
        options (`dict[str, Any]`):
            Options in the message block, such as `max_pixels`, `fps`, `video_start` or `sampling_rate`.
        column (`str`):
            Location of the medium in the row, such as `"audio"`, `"images[1]"` or `"prompt[0].content[2]"`.
        row (`int`):
            Index of the row in its dataset, or in a list of rows.
        rules ([`~data.reading.rules.MediaRules`], *optional*):
            Allowed sources and sizes.
    """

    modality: str
    source: Any
    options: dict[str, Any]
    column: str
    row: int
    rules: MediaRules = DEFAULT_RULES

    @property
    def stored(self) -> Any:
        """Raw value of the medium, without its column type."""
        return self.source.value if isinstance(self.source, Encoded) else self.source

    def checksum(self, start: int = 0) -> int:
        """
        Computes a checksum of the raw value: of bytes, samples or pixels, of the name and size of a local file, or of
        another text, such as a URL.

        Args:
            start (`int`, *optional*, defaults to 0):
                Checksum of the media before this medium.

        Returns:
            `int`: The checksum.
        """

        def byte_chunks(value: Mapping | Sequence | os.PathLike | None) -> Iterator[bytes]:
            if isinstance(value, dict):
                # A path beside bytes is left out, so that equal bytes have equal checksums
                keys = {"bytes"} if value.get("bytes") is not None else value.keys()
                for key in sorted(keys & value.keys()):
                    yield from byte_chunks(value[key])
            elif isinstance(value, list | tuple):
                for item in value:
                    yield from byte_chunks(item)
            elif isinstance(value, bytes):
                yield value
            elif isinstance(value, str | os.PathLike):
                path = os.path.join(self.rules.media_dir or "", value)
                identity = (os.path.basename(path), os.path.getsize(path)) if os.path.isfile(path) else str(value)
                yield repr(identity).encode()
            else:
                yield value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()

        return reduce(lambda total, chunk: zlib.crc32(chunk, total), byte_chunks(self.stored), start)

    def error(self, message: str) -> MediaError:
        """
        Returns an error that names the row and the column.

        Args:
            message (`str`):
                The problem and the remedy.

        Returns:
            [`MediaError`]: The error to raise.
        """
        return MediaError(
            f"row {self.row}, column '{self.column}'{self._file_in_parentheses()}: {self.message_text(message)}"
        )

    def message_text(self, text: str) -> str:
        """
        Masks credentials in a text, such as an error about this medium, and shortens long words.

        Args:
            text (`str`):
                The text.

        Returns:
            `str`: The text for a message.
        """
        sources = self.stored.values() if isinstance(self.stored, dict) else [self.stored]
        for source in sources:
            # Masked as one URL, because `without_credentials` would end a URL at its first space
            if isinstance(source, str):
                text = text.replace(source, masked_url(source))
        return re.sub(rf"[^\s'\"]{{{_LONGEST_WORD},}}", lambda word: shortened(word[0]), without_credentials(text))

    def _file_in_parentheses(self) -> str:
        value = self.stored
        if not isinstance(value, dict) or value.get("bytes") is None or not value.get("path"):
            return ""
        return f" ({self.message_text(str(value['path']))})"

    def __repr__(self) -> str:
        return f"<{self.modality}>"

    def __copy__(self) -> "MediaRef":
        return self

    def __deepcopy__(self, memo: dict) -> "MediaRef":
        return self

    def __reduce__(self) -> tuple:
        return str, (repr(self),)


def iter_refs(value: MediaRef | Sequence | Mapping | None) -> Iterator[MediaRef]:
    """Yields the references in nested lists and dictionaries, in order."""
    if isinstance(value, MediaRef):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from iter_refs(item)
    elif isinstance(value, dict):
        yield from iter_refs(list(value.values()))
