# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks of media containers before a decoder reads them: format, completeness, streams, and index of frames."""

import re
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from .refs import MediaRef


if TYPE_CHECKING:
    from av import AudioStream, VideoStream

S = TypeVar("S", "AudioStream", "VideoStream")


# First bytes of the files that FFmpeg may open: media containers and streams, but no playlists
_MEDIA_STARTS = re.compile(
    rb"....ftyp|....(?:moov|mdat|free|skip|wide)|\x1aE\xdf\xa3|RIFF|RIFX|RF64|FORM.{4}AIF[FC]|caff|OggS|fLaC"
    rb"|\x30\x26\xb2\x75|FLV|\xff[\xe2-\xff]|\x00\x00\x01[\xb3\xba]|\x00\x00\x00\x01|#!AMR|\x0b\x77|GIF8|\.snd|DKIF|YUV4MPEG2"
    rb"|wvpk|MAC |TTA1|riff\x2e\x91\xcf\x11|NIST_1A\n|G.{187}G",
    re.DOTALL,
)

# First bytes of formats that store an index of their frames
_INDEXED_STARTS = re.compile(rb"....(?:ftyp|moov|mdat|free|skip|wide)|\x1aE\xdf\xa3", re.DOTALL)

# Text by which FFmpeg detects playlists and session descriptions, anywhere before the first zero byte
_PLAYLIST_TEXTS = re.compile(rb"<mpd|<smil|<assetmap|c=in ip|#extm3u|ffconcat", re.IGNORECASE)
_PROBE_BYTES = 2**20  # FFmpeg detects a format from this number of first bytes

# The length of a file that was written as a stream was unknown. It is stated as 0, or as at most `_HEADER_BYTES` less
# than the largest number of 32 bits, or in sounds, than the largest signed one or a round one
_UNKNOWN_LENGTHS = {"sound": (2_000_000_000, 2**31, 2**32), "video": (2**32,)}
_HEADER_BYTES = 2**16

_BEYOND_ANY_FILE = 2**63  # above the largest offset that a file can have

_MOST_PARTS = 1_000_000  # limit on the chunks, boxes, pages or tags that are read from a file
_ID3V1_BYTES = 128  # length of an ID3v1 tag at the end of an MP3
_OGG_LAST_PAGE = 4  # flag of the last page of a stream
_REVERSAL = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))  # each byte with its bits in reverse order
# flags in FFmpeg's disposition of a stream
_DEFAULT = 0x1
_COVER = 0x400


def check_container(ref: MediaRef, stream: BinaryIO) -> None:
    """
    Raises a [`MediaError`] for a file that isn't audio or video. Playlists raise it, too, because FFmpeg would open
    the files that a playlist names, without checks of their sources.
    """
    _skip_tags(stream)
    start = stream.read(_PROBE_BYTES)
    stream.seek(0)
    if not _MEDIA_STARTS.match(start) or _PLAYLIST_TEXTS.search(start.partition(b"\0")[0]):
        fix = "WAV or FLAC" if ref.modality == "audio" else "MP4"
        raise ref.error(
            f"this isn't a readable {ref.modality} file: it starts with {start[:16]!r}; convert it to {fix}"
        )


def check_complete(ref: MediaRef, stream: BinaryIO) -> None:
    """
    Raises a [`MediaError`] for truncated WAV, AIFF, AVI, MP4, MOV, M4A, Matroska, WebM, GIF, and MP3 with a LAME
    header, and for damaged Ogg, which decoders read without an error. A file whose header states no length passes.
    """
    size = stream.seek(0, 2)
    _skip_tags(stream)
    start = stream.tell()
    head = stream.read(16)
    stream.seek(start)
    find_missing = next((function for pattern, function in _FINDERS if re.match(pattern, head, re.DOTALL)), None)
    missing = find_missing(stream, size) if find_missing else None
    stream.seek(0)
    if missing is not None:
        raise ref.error(f"the file is damaged or cut off: {missing}; fetch it again or remove the row")


def best_stream(streams: "tuple[S, ...]") -> "S | None":
    """Returns the stream that `ffmpeg` would select, by the default flag and the number of pixels or channels."""

    def priority(stream: "AudioStream | VideoStream") -> int:
        size = stream.width * stream.height if stream.type == "video" else stream.channels
        flag = type(stream.disposition)  # flags aren't integers before PyAV 17
        # The formula of `ffmpeg`; a cover picture comes last
        return 0 if stream.disposition & flag(_COVER) else size + 5_000_000 * bool(stream.disposition & flag(_DEFAULT))

    return max(streams, key=priority, default=None)


def is_indexed(stream: BinaryIO) -> bool:
    """
    Returns whether a video's format has an index of the positions and times of its frames, so that decoders may seek.

    MP4, MOV, Matroska and WebM have one. In AVI, MPEG-TS and other formats, a seek may end at a wrong frame.
    """
    _skip_tags(stream)
    start = stream.read(8)
    stream.seek(0)
    return _INDEXED_STARTS.match(start) is not None


def has_idr_picture(packet: bytes, extradata: bytes | None) -> bool:
    """
    Returns whether an H.264 keyframe is an IDR picture. Decoding can start there, because no later frame depends on
    earlier frames. Another keyframe may begin a gradual refresh, at which decoding can't start.
    """
    if not extradata or extradata[0] != 1:  # no `avcC` header: the format has no index either, so decoders don't seek
        return False
    # A packet is a sequence of NAL units, each after its length of `prefix_size` bytes. The `avcC` header stores this
    # size minus 1 in 2 bits. The first byte of a unit ends with its type in 5 bits, and type 5 is an IDR picture.
    offset = 0
    prefix_size = 1 + (extradata[4] & 3)
    while offset + prefix_size < len(packet):
        if packet[offset + prefix_size] & 31 == 5:
            return True
        offset += prefix_size + int.from_bytes(packet[offset : offset + prefix_size], "big")
    return False


def _skip_tags(stream: BinaryIO) -> None:
    """Moves a stream behind ID3 tags, which may precede any format."""
    offset = 0
    for _ in range(_MOST_PARTS):
        stream.seek(offset)
        tag = stream.read(10)
        if tag[:3] != b"ID3" or len(tag) < 10:
            break
        # A size has 7 bits per byte. The flag 16 stands for a footer of 10 bytes.
        size = sum((byte & 127) << shift for byte, shift in zip(tag[6:], (21, 14, 7, 0), strict=True))
        offset += 10 + size + (10 if tag[5] & 16 else 0)
    stream.seek(offset)


# The functions `_missing_in_...` get a stream at the end of its ID3 tags, and the size of the file in bytes. For a
# truncated file, they return a description such as "3 of 10 bytes"; for a complete file, `None`.


def _shortfall(begin: int, length: int, size: int) -> str | None:
    """Returns a text such as "3 of 10 bytes" if a file of `size` bytes ends before `begin + length`, else `None`."""
    return None if begin + length <= size else f"{max(size - begin, 0)} of {length} bytes"


def _missing_in_riff(stream: BinaryIO, size: int) -> str | None:
    """Looks for the end of the chunk of samples in WAV and AIFF, or of each RIFF chunk in AVI (one chunk per GB)."""
    start = stream.tell()
    head = stream.read(12)
    byte_order = "big" if head[:4] in (b"FORM", b"RIFX") else "little"
    is_video = head[8:] == b"AVI "
    offset = start if is_video else start + 12
    ids = (b"RIFF",) if is_video else (b"data", b"SSND")
    unknown_lengths = _UNKNOWN_LENGTHS["video" if is_video else "sound"]
    for _ in range(_MOST_PARTS):
        stream.seek(offset)
        header = stream.read(8)  # id and length of a chunk
        if len(header) < 8:
            break
        length = int.from_bytes(header[4:], byte_order)
        is_known = length > 0 and all(abs(limit - length) > _HEADER_BYTES for limit in unknown_lengths)
        missing = _shortfall(offset + 8, length, size) if header[:4] in ids and is_known else None
        if missing is not None:
            return missing
        offset += 8 + length + length % 2  # a chunk of odd length is padded
    return None


def _missing_in_boxes(stream: BinaryIO, size: int) -> str | None:
    offset = stream.tell()
    for _ in range(_MOST_PARTS):
        stream.seek(offset)
        head = stream.read(16)
        # A length of 1 means that the length follows the type of the box, in 8 bytes
        length = int.from_bytes(head[:4] if head[:4] != b"\0\0\0\1" else head[8:], "big")
        if offset >= size or length < 8:  # the end of the file, or a box that extends to the end
            break
        missing = _shortfall(offset, length, size)
        if missing:
            return missing
        offset += length
    return None


def _missing_in_matroska(stream: BinaryIO, size: int) -> str | None:
    """Looks for the end of the segment, which follows the EBML header."""
    stream.seek(4, 1)  # the id of the header
    header_size = _ebml_number(stream)
    if header_size is None:
        return None
    stream.seek(header_size, 1)
    if stream.read(4) != b"\x18\x53\x80\x67":  # no segment after the header
        return None
    length = _ebml_number(stream)
    return None if length is None else _shortfall(stream.tell(), length, size)


def _ebml_number(stream: BinaryIO) -> int | None:
    """
    Reads an EBML number: zero bits at the start of the first byte count the further bytes, so `0x40 0x02` is 2. `None`
    if it is invalid, or if its bits are all 1, which stands for an unknown length.
    """
    first = stream.read(1)
    if not first or not first[0]:
        return None
    tail = stream.read(8 - first[0].bit_length())
    n_bits = 7 * (1 + len(tail))
    number = int.from_bytes(first + tail, "big") & ((1 << n_bits) - 1)
    return None if number == (1 << n_bits) - 1 else number


def _missing_in_ogg(stream: BinaryIO, size: int) -> str | None:
    """Looks for incomplete and missing pages, and for pages that don't match their checksums."""
    # Serial numbers of streams whose last page is still to come, and by serial number the latest page number
    open_streams = set()
    latest_page_numbers = {}
    for flags, serial, begin, end in _ogg_pages(stream):
        if end > size:
            return "its last page isn't complete"
        stream.seek(begin)
        page = stream.read(end - begin)
        page_number = int.from_bytes(page[18:22], "little")
        # The checksum is computed with zeros in its place
        if page[22:26] != _ogg_checksum(page[:22] + bytes(4) + page[26:]):
            return f"page {page_number} is damaged"
        if serial in open_streams and page_number != latest_page_numbers[serial] + 1:
            return f"page {latest_page_numbers[serial] + 1} is missing"
        latest_page_numbers[serial] = page_number
        (open_streams.discard if flags & _OGG_LAST_PAGE else open_streams.add)(serial)
    return "the last page of a stream is missing" if open_streams else None


def _ogg_checksum(page: bytes) -> bytes:
    """Returns the checksum of an Ogg page: zlib's CRC-32 with reversed bits and another initial value."""
    return (zlib.crc32(page.translate(_REVERSAL), 2**32 - 1) ^ (2**32 - 1)).to_bytes(4, "big").translate(_REVERSAL)


def _ogg_pages(stream: BinaryIO) -> Iterator[tuple[int, bytes, int, int]]:
    """
    Yields, for each page, its flags, the serial number of its stream, and its start and end in the file. Skips other
    data. A page begins with 27 bytes, the last of which is the number of its segments. The lengths of the segments
    follow, one byte per segment, and then the segments.
    """
    offset = stream.tell()
    for _ in range(_MOST_PARTS):
        stream.seek(offset)
        head = stream.read(27)
        if head[:4] == b"OggS":
            lengths = stream.read(head[26]) if len(head) == 27 else b""
            is_complete = len(head) == 27 and len(lengths) == head[26]
            # An incomplete page ends beyond the end of any file
            begin = offset
            offset = offset + 27 + len(lengths) + sum(lengths) if is_complete else _BEYOND_ANY_FILE
            yield (head[5] if len(head) > 5 else 0), head[14:18], begin, offset
        elif head:
            # Skips to the next page. The read may end within the page's first 4 bytes, so the next read begins 3 bytes
            # before its end.
            head += stream.read(2**12)
            skip = head.find(b"OggS", 1)
            offset += max(len(head) - 3, 1) if skip < 0 else skip
        else:
            return


def _missing_in_mp3(stream: BinaryIO, size: int) -> str | None:
    """Compares the file's length with the length in the LAME header of the first frame."""
    begin = stream.tell()
    frame = stream.read(64)
    tag = re.search(rb"Xing|Info", frame)
    if not tag:
        return None
    # After its name, the header has 4 bytes of flags, then the fields that the flags announce
    flags = int.from_bytes(frame[tag.end() :][:4], "big")
    fields = frame[tag.end() + 4 :]
    if not flags & 2:  # the header has no length
        return None
    offset = 4 * (flags & 1)  # the length follows the number of frames, if the header has one
    length = int.from_bytes(fields[offset : offset + 4], "big")
    # Some encoders include an ID3v1 tag in the length, even if the file lacks it
    return None if begin + length - _ID3V1_BYTES == size else _shortfall(begin, length, size)


def _missing_in_gif(stream: BinaryIO, size: int) -> str | None:
    """Looks for the last block of a GIF at the end of the file, where zeros may follow the block."""
    stream.seek(max(0, size - 2**12))
    return None if stream.read().rstrip(b"\0").endswith(b"\0;") else "its last block is missing"


# Patterns of the first bytes of a file, each with the function that looks for missing parts
_FINDERS: tuple[tuple[bytes, Callable[[BinaryIO, int], str | None]], ...] = (
    (rb"RIF[FX].{4}WAVE|RIFF.{4}AVI |FORM.{4}AIF[FC]", _missing_in_riff),
    (rb".{4}(?:ftyp|moov|mdat|free|skip|wide)", _missing_in_boxes),
    (rb"\x1aE\xdf\xa3", _missing_in_matroska),
    (rb"OggS", _missing_in_ogg),
    (rb"\xff[\xe2-\xff]", _missing_in_mp3),
    (rb"GIF8", _missing_in_gif),
)
