# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Where the bytes of media come from, and from where they may not."""

import base64
import binascii
import os
import time
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

import fsspec
import requests

from .columns import MediaRef
from .http import NoAnswer, TooLarge, TooManyRedirects, ask, within


# Protocols that connect to any host a URL names, rather than to a store of the user's
_WITH_HOSTS = ("http", "https", "hdfs", "webhdfs")

# How often a server is asked that is busy, or that breaks off
_ATTEMPTS = 4


def fetch_file(ref: MediaRef, source: str | os.PathLike | bytes | bytearray | memoryview) -> Any:
    """
    Fetches a file, without reading more than the rules of its medium allow.

    Args:
        ref ([`~data.columns.MediaRef`]):
            The medium, for its rules and for errors.
        source (`str`, `os.PathLike` or `bytes`):
            Path, URL, `data:` URI, or the bytes themselves.

    Returns:
        `str` or `bytes`: A local path, or the bytes.

    Raises:
        [`~data.columns.MediaError`]: If there is no such file, if it is too large or takes too long, or if the rules
            forbid its place.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _limited(ref, bytes(source))
    path = os.fspath(source)
    if path.startswith("data:"):
        return _limited(ref, _from_data_uri(ref, path))
    if "://" not in path and "::" not in path:
        return _local(ref, path)
    links = path.split("::")
    for position, link in enumerate(links):
        protocol, separator, _ = link.partition("://")
        if position > 0 and not separator and os.sep in link:  # the file that an archive is
            _local(ref, link)
            continue
        _check_protocol(ref, protocol)
        if protocol == "file":
            _local(ref, url2pathname(urlsplit(link).path))
        if protocol in _WITH_HOSTS:
            _check_domain(ref, link)
    if links == [path] and path.startswith("file://"):
        return url2pathname(urlsplit(path).path)
    if links == [path] and path.startswith(("http://", "https://")):
        return _download(ref, path)

    def read() -> bytes:
        with fsspec.open(path, "rb") as file:
            stream: Any = file
            return stream.read(ref.rules.max_media_bytes + 1)

    try:
        return _limited(ref, within(time.monotonic() + ref.rules.media_timeout, read))
    except NoAnswer as error:
        raise ref.error(f"cannot read '{path}' ({error}); remove the row, or raise `media_timeout`") from None
    except (ImportError, ValueError) as error:
        if isinstance(error, ValueError) and "Protocol not known" not in str(error):
            raise
        protocols = " and ".join(dict.fromkeys(link.split("://")[0] for link in links if "://" in link))
        raise ImportError(str(ref.error(f"no package is installed that reads {protocols}: {error}"))) from error


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


def _limited(ref: MediaRef, data: bytes) -> bytes:
    if len(data) > ref.rules.max_media_bytes:
        raise _too_large(ref)
    return data


def _too_large(ref: MediaRef):
    return ref.error(f"more than {ref.rules.max_media_bytes:,} bytes; remove the row or raise `max_media_bytes`")


def _from_data_uri(ref: MediaRef, uri: str) -> bytes:
    header, comma, data = uri.partition(",")
    if not comma:
        raise ref.error("a data URI without a comma; write 'data:<type>;base64,<data>'")
    if len(data) > 4 / 3 * ref.rules.max_media_bytes + 4:
        raise _too_large(ref)
    if not header.endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return base64.b64decode(b"".join(unquote_to_bytes(data).split()), validate=True)
    except binascii.Error as error:
        raise ref.error(f"its data URI isn't base64 ({error}); repair it or remove the row") from error


def _check_protocol(ref: MediaRef, protocol: str) -> None:
    if protocol not in ref.rules.allowed_media_protocols:
        raise ref.error(
            f"the protocol '{protocol}' isn't one of `allowed_media_protocols`, those that rows may name; copy the "
            "media to a place that is, or add it if you trust the data"
        )


def _local(ref: MediaRef, path: str) -> str:
    _check_protocol(ref, "file")
    folders = ref.rules.allowed_media_folders
    if folders is not None and not any(Path(path).resolve().is_relative_to(Path(f).resolve()) for f in folders):
        raise ref.error(f"'{path}' is in none of `allowed_media_folders`; add its folder if you trust the data")
    if not os.path.isfile(path):
        raise ref.error(f"no such file: '{os.path.abspath(path)}'; correct the path or remove the row")
    if os.path.getsize(path) > ref.rules.max_media_bytes:
        raise _too_large(ref)
    return path


def _check_domain(ref: MediaRef, url: str) -> None:
    host = urlsplit(url).hostname
    if ref.rules.allowed_media_domains is not None and host not in ref.rules.allowed_media_domains:
        raise ref.error(f"'{host}' is none of `allowed_media_domains`; add it if you trust the data")


def _download(ref: MediaRef, url: str) -> bytes:
    def may_visit(url: str) -> None:
        protocol = urlsplit(url).scheme
        if protocol not in ("http", "https") or protocol not in ref.rules.allowed_media_protocols:
            raise ref.error(f"it redirects to the protocol '{protocol}', which isn't allowed; remove the row")
        _check_domain(ref, url)

    try:
        answer = ask(
            "GET",
            url,
            seconds=ref.rules.media_timeout,
            attempts=_ATTEMPTS,
            max_bytes=ref.rules.max_media_bytes,
            may_visit=may_visit,
        )
    except TooLarge:
        raise _too_large(ref) from None
    except NoAnswer as error:
        raise ref.error(
            f"cannot download '{url}' ({error}); repair the URL, remove the row, or raise `media_timeout`"
        ) from None
    except (TooManyRedirects, requests.RequestException) as error:
        raise ref.error(f"cannot download '{url}' ({error}); repair the URL or remove the row") from None
    if answer.status >= 300:
        raise ref.error(f"'{url}' gives status {answer.status}; correct the URL or remove the row")
    return answer.body
