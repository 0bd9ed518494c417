# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Where the bytes of media come from, and from where they may not."""

import base64
import binascii
import os
import re
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

import fsspec
import requests

from .columns import MediaRef
from .http import NoAnswer, TooLarge, TooManyRedirects, ask


# What rows may name: files, servers, stores of objects, and archives within them
PROTOCOLS = (
    "file",
    "http",
    "https",
    "hf",
    "s3",
    "s3a",
    "gs",
    "gcs",
    "az",
    "abfs",
    "abfss",
    "zip",
    "tar",
    "gzip",
    "hdfs",
    "webhdfs",
    "oss",
)

# How often a server is asked that is busy, or that breaks off
_ATTEMPTS = 4

# Starts of the files that FFmpeg may be given: containers and streams of media, no lists of other files
_MEDIA_STARTS = re.compile(
    rb"....ftyp|....(?:moov|mdat|free|skip|wide)|\x1aE\xdf\xa3|RIFF|RIFX|RF64|FORM|caff|OggS|fLaC|\x30\x26\xb2\x75"
    rb"|FLV|ID3|\xff[\xe2-\xff]|\x00\x00\x01[\xb3\xba]|\x00\x00\x00\x01|#!AMR|\x0b\x77|GIF8|\.snd|DKIF|YUV4MPEG2"
    rb"|wvpk|MAC |TTA1|G.{187}G",
    re.DOTALL,
)


@dataclass(frozen=True)
class MediaRules:
    """
    From where media may come, and how large they may be.

    Args:
        allowed_media_protocols (`tuple[str, ...]`, *optional*):
            Protocols of URLs in rows, those of links in a chained URL (`zip://a.png::https://...`) included.
        allowed_media_folders (`tuple[str, ...]`, *optional*):
            Folders in which local files must be, links followed; `None` allows all.
        allowed_media_domains (`tuple[str, ...]`, *optional*):
            Hosts of `http` and `https` URLs and of those they redirect to; `None` allows all.
        max_media_bytes (`int`, *optional*, defaults to `2**31`):
            Size of a medium's file.
        max_image_pixels (`int`, *optional*, defaults to `100_000_000`):
            Pixels of an image, and of a frame of a video.
        max_audio_seconds (`float`, *optional*, defaults to `3600.0`):
            Length of a sound that is decoded.
        max_video_seconds (`float`, *optional*, defaults to `14400.0`):
            Length of a video of which frames are decoded.
        media_timeout (`float`, *optional*, defaults to `60.0`):
            Seconds in which a download must be complete, all attempts together.
    """

    allowed_media_protocols: tuple[str, ...] = PROTOCOLS
    allowed_media_folders: tuple[str, ...] | None = None
    allowed_media_domains: tuple[str, ...] | None = None
    max_media_bytes: int = 2**31
    max_image_pixels: int = 100_000_000
    max_audio_seconds: float = 3600.0
    max_video_seconds: float = 14400.0
    media_timeout: float = 60.0


DEFAULT_RULES = MediaRules()


def fetch_file(ref: MediaRef, source: str | os.PathLike | bytes | bytearray | memoryview, rules: MediaRules) -> Any:
    """
    Fetches a file, without reading more than the rules allow.

    Args:
        ref ([`~data.columns.MediaRef`]):
            The medium, for errors.
        source (`str`, `os.PathLike` or `bytes`):
            Path, URL, `data:` URI, or the bytes themselves.
        rules ([`MediaRules`]):
            From where it may come, and how large it may be.

    Returns:
        `str` or `bytes`: A local path, or the bytes.

    Raises:
        [`~data.columns.MediaError`]: If there is no such file, if it is too large or takes too long, or if the rules
            forbid its place.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _limited(ref, bytes(source), rules)
    path = os.fspath(source)
    if path.startswith("data:"):
        return _limited(ref, _from_data_uri(ref, path, rules), rules)
    if "://" not in path and "::" not in path:
        return _local(ref, path, rules)
    protocols = [link.split("://")[0] if "://" in link else link for link in path.split("::")]
    for position, protocol in enumerate(protocols):
        is_path = position > 0 and os.sep in protocol  # the file that an archive is
        if not is_path and protocol not in rules.allowed_media_protocols:
            raise ref.error(
                f"the protocol '{protocol}' isn't one of `allowed_media_protocols`, those that rows may name; copy "
                "the media to a place that is"
            )
        if is_path:
            _local(ref, protocol, rules)
    if len(protocols) == 1 and protocols[0] == "file":
        return _local(ref, url2pathname(urlsplit(path).path), rules)
    for link in path.split("::"):
        if link.startswith("file://"):
            _local(ref, url2pathname(urlsplit(link).path), rules)
        if link.startswith(("http://", "https://")):
            _check_domain(ref, link, rules)
    if len(protocols) == 1 and protocols[0] in ("http", "https"):
        return _download(ref, path, rules)
    with fsspec.open(path, "rb") as file:
        stream: Any = file
        return _limited(ref, stream.read(rules.max_media_bytes + 1), rules)


def open_file(file: str | bytes) -> BinaryIO:
    """
    Opens what [`fetch_file`] returns. Decoders get streams, as names can mean more than one file to them.

    Args:
        file (`str` or `bytes`):
            A local path, or the bytes.

    Returns:
        `BinaryIO`: A stream.
    """
    if isinstance(file, bytes):
        return BytesIO(file)
    # By its number, as decoders read patterns and formats out of a stream's name, too
    return open(os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0)), "rb")


def check_container(ref: MediaRef, stream: BinaryIO) -> None:
    """
    Refuses what isn't a file of sounds or videos, such as a list of other files, which FFmpeg would open.

    Args:
        ref ([`~data.columns.MediaRef`]):
            The medium, for errors.
        stream (`BinaryIO`):
            Its file, at the start.

    Raises:
        [`~data.columns.MediaError`]: If its start is that of no such file.
    """
    start = stream.read(256)
    stream.seek(0)
    if not _MEDIA_STARTS.match(start):
        raise ref.error(f"this is no file of {ref.kind}; it starts with {start[:16]!r}")


def _limited(ref: MediaRef, data: bytes, rules: MediaRules) -> bytes:
    if len(data) > rules.max_media_bytes:
        raise _too_large(ref, rules)
    return data


def _too_large(ref: MediaRef, rules: MediaRules):
    return ref.error(f"more than {rules.max_media_bytes:,} bytes; remove the row or raise `max_media_bytes`")


def _from_data_uri(ref: MediaRef, uri: str, rules: MediaRules) -> bytes:
    header, comma, data = uri.partition(",")
    if not comma:
        raise ref.error("a data URI without a comma; write 'data:<type>;base64,<data>'")
    if len(data) > 4 / 3 * rules.max_media_bytes + 4:
        raise _too_large(ref, rules)
    if not header.endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return base64.b64decode(unquote_to_bytes(data))
    except binascii.Error as error:
        raise ref.error(f"its data URI isn't base64 ({error}); repair it or remove the row") from error


def _local(ref: MediaRef, path: str, rules: MediaRules) -> str:
    if not os.path.isfile(path):
        raise ref.error(f"no such file: '{os.path.abspath(path)}'; correct the path or remove the row")
    folders = rules.allowed_media_folders
    if folders is not None and not any(Path(path).resolve().is_relative_to(Path(f).resolve()) for f in folders):
        raise ref.error(f"'{path}' is in none of `allowed_media_folders`; add its folder if you trust the data")
    if os.path.getsize(path) > rules.max_media_bytes:
        raise _too_large(ref, rules)
    return path


def _check_domain(ref: MediaRef, url: str, rules: MediaRules) -> None:
    host = urlsplit(url).hostname
    if rules.allowed_media_domains is not None and host not in rules.allowed_media_domains:
        raise ref.error(f"'{host}' is none of `allowed_media_domains`; add it if you trust the data")


def _download(ref: MediaRef, url: str, rules: MediaRules) -> bytes:
    def may_visit(url: str) -> None:
        protocol = urlsplit(url).scheme
        if protocol not in ("http", "https") or protocol not in rules.allowed_media_protocols:
            raise ref.error(f"it redirects to the protocol '{protocol}', which isn't allowed; remove the row")
        _check_domain(ref, url, rules)

    try:
        answer = ask(
            "GET",
            url,
            seconds=rules.media_timeout,
            attempts=_ATTEMPTS,
            max_bytes=rules.max_media_bytes,
            may_visit=may_visit,
        )
    except TooLarge:
        raise _too_large(ref, rules) from None
    except NoAnswer as error:
        raise ref.error(
            f"cannot download '{url}' ({error}); repair the URL, remove the row, or raise `media_timeout`"
        ) from None
    except (TooManyRedirects, requests.RequestException) as error:
        raise ref.error(f"cannot download '{url}' ({error}); repair the URL or remove the row") from None
    if answer.status >= 300:
        raise ref.error(f"'{url}' gives status {answer.status}; correct the URL or remove the row")
    return answer.body
