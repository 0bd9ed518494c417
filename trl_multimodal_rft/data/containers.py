# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Files of sounds and videos before a decoder sees them: that they are such files, and that they are whole."""

import re
from collections.abc import Callable
from typing import BinaryIO

from .columns import MediaRef


# Starts of the files that FFmpeg may be given: containers and streams of media, no lists of other files
_MEDIA_STARTS = re.compile(
    rb"....ftyp|....(?:moov|mdat|free|skip|wide)|\x1aE\xdf\xa3|RIFF|RIFX|RF64|FORM|caff|OggS|fLaC|\x30\x26\xb2\x75"
    rb"|FLV|\xff[\xe2-\xff]|\x00\x00\x01[\xb3\xba]|\x00\x00\x00\x01|#!AMR|\x0b\x77|GIF8|\.snd|DKIF|YUV4MPEG2"
    rb"|wvpk|MAC |TTA1|G.{187}G",
    re.DOTALL,
)

# Those that tell where each frame is
_INDEXED = re.compile(rb"....(?:ftyp|moov|mdat|free|skip|wide)|\x1aE\xdf\xa3", re.DOTALL)

# Lists of files and of addresses, which FFmpeg finds behind any start: in the text before the first zero
_LISTS = re.compile(rb"<mpd|<smil|<assetmap|c=in ip|#extm3u|ffconcat", re.IGNORECASE)
_PROBED = 2**20  # bytes by which FFmpeg knows a format

# What is written while it is recorded says of its length 0 or the largest number
_LARGEST = 2**32 - 2**16

_MOST_PARTS = 100_000  # of a file, that are looked at
_ID3V1 = 128  # bytes of a tag behind an MP3, which some count as part of it


def check_container(ref: MediaRef, stream: BinaryIO) -> None:
    """
    Refuses what isn't a file of sounds or videos, such as a list of other files, which FFmpeg would open.

    Args:
        ref ([`~data.columns.MediaRef`]):
            The medium, for errors.
        stream (`BinaryIO`):
            Its file; it is at the start afterwards.

    Raises:
        [`~data.columns.MediaError`]: If it is no such file.
    """
    _behind_tags(stream)
    start = stream.read(_PROBED)
    stream.seek(0)
    if not _MEDIA_STARTS.match(start) or _LISTS.search(start.partition(b"\0")[0]):
        raise ref.error(f"this is no file of {ref.kind}; it starts with {start[:16]!r}")


def check_whole(ref: MediaRef, stream: BinaryIO) -> None:
    """
    Refuses a file that was cut off, which decoders pass over: one whose header tells of more than there is.

    Known of WAV, AVI, AIFF, MP4, MOV, M4A, Matroska, WebM, Ogg, and of MP3 with a header of LAME's. Others, such as
    MPEG-TS, don't say how long they are: what there is of them is taken as all.

    Args:
        ref ([`~data.columns.MediaRef`]):
            The medium, for errors.
        stream (`BinaryIO`):
            Its file; it is at the start afterwards.

    Raises:
        [`~data.columns.MediaError`]: If it was cut off.
    """
    size = stream.seek(0, 2)
    _behind_tags(stream)
    start = stream.tell()
    head = stream.read(12)
    stream.seek(start)
    find = next((find for pattern, find in _LENGTHS if re.match(pattern, head, re.DOTALL)), None)
    part = find(stream, size) if find else None
    stream.seek(0)
    if part is not None and sum(part) > size:
        begin, length = part
        raise ref.error(
            f"the file is cut off: {max(size - begin, 0)} of {length} bytes; fetch it again or remove the row"
        )


def finds_frames(stream: BinaryIO) -> bool:
    """
    Whether a file of a video tells where each frame is and when it is shown, as MP4, MOV, Matroska and WebM do. Of
    others, such as AVI and MPEG-TS, what seems to be a frame's number or its time may be that of another.

    Args:
        stream (`BinaryIO`):
            The file; it is at the start afterwards.

    Returns:
        `bool`: Whether decoders may look for frames, which they otherwise must decode from the first.
    """
    _behind_tags(stream)
    found = _INDEXED.match(stream.read(8))
    stream.seek(0)
    return found is not None


def _behind_tags(stream: BinaryIO) -> None:
    """Moves to what is behind ID3 tags, which may stand before any format."""
    place = 0
    for _ in range(_MOST_PARTS):
        stream.seek(place)
        tag = stream.read(10)
        if tag[:3] != b"ID3" or len(tag) < 10:
            break
        size = sum((byte & 127) << shift for byte, shift in zip(tag[6:], (21, 14, 7, 0), strict=True))
        place += 10 + size + (10 if tag[5] & 16 else 0)
    stream.seek(place)


# Each finds the part of a file that may be cut off: where it begins, and how many bytes it says it has


def _riff(stream: BinaryIO, size: int) -> tuple[int, int] | None:
    kind, length = stream.read(4), stream.read(4)
    order, samples = ("little", b"data") if kind == b"RIFF" else ("big", b"SSND" if kind == b"FORM" else b"data")
    if stream.read(4) == b"AVI ":
        length = int.from_bytes(length, "little")
        return (stream.tell() - 4, length) if length < _LARGEST else None
    for _ in range(_MOST_PARTS):
        chunk = stream.read(8)
        if len(chunk) < 8:
            break
        length = int.from_bytes(chunk[4:], order)
        if chunk[:4] == samples:
            return (stream.tell(), length) if length < _LARGEST else None
        stream.seek(length + length % 2, 1)
    return None


def _boxes(stream: BinaryIO, size: int) -> tuple[int, int] | None:
    """Of MP4 and its like: the box that ends behind the end."""
    place = 0
    for _ in range(_MOST_PARTS):
        stream.seek(place)
        head = stream.read(16)
        length = int.from_bytes(head[:4] if head[:4] != b"\0\0\0\1" else head[8:], "big")
        if length < 8:  # no more of them, or one that goes to the end
            return None
        if place + length > size:
            return place, length
        place += length
    return None


def _matroska(stream: BinaryIO, size: int) -> tuple[int, int] | None:
    stream.seek(4, 1)
    header = _ebml_number(stream)
    if header is None:
        return None
    stream.seek(header, 1)
    if stream.read(4) != b"\x18\x53\x80\x67":  # all but the header is one segment
        return None
    length = _ebml_number(stream)
    return None if length is None else (stream.tell(), length)


def _ebml_number(stream: BinaryIO) -> int | None:
    """A number, by whose first bits one knows its length; all ones mean unknown."""
    first = stream.read(1)
    if not first or not first[0]:
        return None
    rest = stream.read(8 - first[0].bit_length())
    bits = 7 * (1 + len(rest))
    number = int.from_bytes(first + rest, "big") & ((1 << bits) - 1)
    return None if number == (1 << bits) - 1 else number


def _ogg(stream: BinaryIO, size: int) -> tuple[int, int] | None:
    """The last page."""
    place = stream.seek(max(0, size - 2**17))
    tail = stream.read()
    page = tail.rfind(b"OggS\0")
    if page < 0:
        return None
    lengths = tail[page + 27 : page + 27 + tail[page + 26]] if len(tail) > page + 26 else b""
    return place + page, 27 + len(lengths) + sum(lengths)


def _mp3(stream: BinaryIO, size: int) -> tuple[int, int] | None:
    """What the header says that LAME writes into the first frame."""
    begin = stream.tell()
    frame = stream.read(64)
    found = re.search(rb"Xing|Info", frame)
    if not found:
        return None
    flags, fields = int.from_bytes(frame[found.end() :][:4], "big"), frame[found.end() + 4 :]
    if not flags & 2:  # doesn't tell its bytes
        return None
    after = 4 * (flags & 1)  # behind the number of frames
    return begin, int.from_bytes(fields[after : after + 4], "big") - _ID3V1


_LENGTHS: tuple[tuple[bytes, Callable[[BinaryIO, int], tuple[int, int] | None]], ...] = (
    (rb"(?:RIFF|RIFX).{4}WAVE|RIFF.{4}AVI |FORM.{4}AIF[FC]", _riff),
    (rb".{4}(?:ftyp|moov|mdat|free|skip|wide)", _boxes),
    (rb"\x1aE\xdf\xa3", _matroska),
    (rb"OggS", _ogg),
    (rb"\xff[\xe2-\xff]", _mp3),
)
