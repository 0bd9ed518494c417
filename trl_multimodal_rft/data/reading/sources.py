# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Bytes of media from the sources that the rules allow."""

import base64
import binascii
import math
import os
import re
import stat
import time
import zipfile
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any, BinaryIO, cast
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

import fsspec
import requests

from ...credentials import masked_url
from .http import NoAnswer, TooLarge, ask, host_of, run_until
from .refs import MediaError, MediaRef, rival_keys


# Protocols that connect to any host in a URL, rather than to a configured store
_HOST_PROTOCOLS = ("http", "https", "hdfs", "webhdfs")

# Characters on which URL parsers disagree: some see another host or path after them
_AMBIGUOUS_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\\]")

# Text that is a file in base64. A path of this length would have an extension, and so a dot, which doesn't match.
_BASE64 = re.compile(r"[A-Za-z0-9+/_\s-]{100,}={0,2}")

_CHUNK_BYTES = 2**20
_MOST_READ_BYTES = 2**26  # maximum bytes of one read in an archive, such as of its list of files
_ATTEMPTS = 4  # requests to a server that is busy or closes the connection


@dataclass(frozen=True)
class _Location:
    """Where the file of a medium lies, as far as it is known without opening anything."""

    protocol: str
    outer: str  # local path, URL, or text of a `data:` URI
    member: str | None = None  # name of a file in the archive `outer`, if it is one


def check_reachable(ref: MediaRef) -> None:
    """
    Raises a [`MediaError`] for a medium whose file the rules don't allow, or which isn't on this machine although its
    path is local. Opens and downloads nothing.
    """
    source = ref.stored
    items = source if isinstance(source, list) else [source]
    for item in items:
        if isinstance(item, dict) and item.get("array") is not None:
            continue
        path = encoded_source(replace(ref, source=item))
        if isinstance(path, (str, os.PathLike)):
            _locate(ref, os.fspath(path))


def _locate(ref: MediaRef, path: str) -> _Location:
    """`zip://a.png::https://example.com/b.zip` is the file `a.png` in an archive that is downloaded."""
    if path[:5].lower() == "data:":
        return _Location("data", path)
    # A name that looks like a URL is a name if its file is there
    if ("://" not in path and "::" not in path) or os.path.isfile(join_media_dir(ref, path)):
        return _Location("file", _local_path(ref, path))
    member = None
    location = path
    if path.startswith("zip://"):
        _check_protocol(ref, "zip")
        member, _, location = path.removeprefix("zip://").partition("::")
    protocol = location.partition("::")[0].partition("://")[0]
    if member is not None and "://" not in location:
        return _Location("file", _local_path(ref, location), member)
    if protocol == "file":
        name = location[len("file://") :]
        name = name if os.path.isfile(name) else url2pathname(urlsplit(location).path)
        return _Location("file", _local_path(ref, name), member)
    _check_protocol(ref, protocol)
    if protocol in ("http", "https"):
        _check_domain(ref, location)
    else:
        if "::" in location:
            raise ref.error(f"'{protocol}' can't be chained; chain zip:// alone, and once")
        if protocol in _HOST_PROTOCOLS:
            _check_domain(ref, location)
    return _Location(protocol, location, member)


def encoded_source(ref: MediaRef) -> Any:
    """
    Returns the bytes, the path or the URL in a stored dictionary. Other sources, such as a path, an array or a list of
    frames, are returned unchanged.
    """
    source = ref.stored
    if not isinstance(source, dict):
        return source
    keys = ("bytes", "path", "url")
    rivals = rival_keys(source, keys)
    if rivals:
        raise ref.error(f"the dictionary has media in both '{rivals[0]}' and '{rivals[1]}'; leave one of them")
    for key in keys:
        if source.get(key) is not None:
            return source[key]
    raise ref.error(f"the dictionary has only {sorted(source)}; give 'bytes', 'path' or 'url'")


def fetch_file(ref: MediaRef, source: str | os.PathLike | bytes | bytearray | memoryview) -> str | bytes:
    """Fetches a file within the limits of the rules, and returns its bytes or its local path."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _check_size(ref, bytes(source))
    path = os.fspath(source)  # a `data:` URI, a path or a URL
    location = _locate(ref, path)
    member = location.member
    if location.protocol == "data":
        return _check_size(ref, _from_data_uri(ref, path))
    # `file` is the outer file: a local path, downloaded bytes, or `None` for a URL that `fsspec` opens
    file: str | bytes | None = location.outer if location.protocol == "file" else None
    if location.protocol in ("http", "https"):
        file = _download(ref, location.outer)
    if file is not None and member is None:
        return file
    deadline = time.monotonic() + ref.rules.media_timeout

    def read() -> bytes:
        opened_file = fsspec.open(location.outer, "rb").open() if file is None else open_file(ref, file)
        with closing(opened_file):
            stream = cast("IO[bytes]", opened_file)
            if member is not None:
                stream = _open_in_zip(
                    ref, Bounded(ref, stream, deadline, max_read_bytes=_MOST_READ_BYTES), member.strip("/")
                )
            data = BytesIO()
            bounded = Bounded(ref, stream, deadline)
            for chunk in iter(lambda: bounded.read(_CHUNK_BYTES), b""):  # in chunks, to keep no second copy
                data.write(chunk)
                if data.tell() > ref.rules.max_media_bytes:
                    raise _too_large_error(ref)
            return data.getvalue()

    try:
        return run_until(deadline, read)
    except NoAnswer as error:
        remedy = "remove the row, or raise `media_timeout`"
        raise ref.error(f"cannot read '{masked_url(path)}' ({error}); {remedy}") from None
    except (ImportError, ValueError) as error:
        # For an unknown protocol, `fsspec` raises a `ValueError`
        if isinstance(error, ValueError) and "Protocol not known" not in str(error):
            raise
        raise ImportError(
            str(ref.error(f"no installed package reads the protocol '{location.protocol}': {error}"))
        ) from error


class Bounded:
    """
    Stream with limits: a deadline; `max_bytes` in total, for the metadata of an image; and `max_read_bytes` in one
    read, for the headers of an archive.
    """

    def __init__(
        self,
        ref: MediaRef,
        stream: IO[bytes],
        deadline: float,
        max_bytes: float = math.inf,
        max_read_bytes: float = math.inf,
    ):
        self.max_bytes = max_bytes
        self.deadline = deadline
        self._ref = ref
        self._stream = stream
        self._max_read_bytes = max_read_bytes
        self._n_read = 0

    def read(self, size: int | None = -1) -> bytes:
        if time.monotonic() > self.deadline:
            seconds = self._ref.rules.media_timeout
            raise self._ref.error(f"not read within {seconds:g} s; remove the row, or raise `media_timeout`")
        if size is not None and size > self._max_read_bytes:
            raise self._ref.error(f"the archive has {size:,} bytes of headers; split it, or remove the row")
        data = self._stream.read(-1 if size is None else size)
        self._n_read += len(data)
        if self._n_read > self.max_bytes:
            remedy = "save it without metadata, or remove the row"
            raise self._ref.error(f"its metadata takes more than {self.max_bytes:,} bytes; {remedy}")
        return data

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def open_file(ref: MediaRef, file: str | bytes) -> BinaryIO:
    """
    Opens the path or bytes from [`fetch_file`] as a stream. Decoders get the stream rather than the path, because some
    read a path as a pattern of several files.
    """
    if isinstance(file, bytes):
        return BytesIO(file)
    # Opened by a descriptor, so that the stream has no name that decoders would interpret. `O_NONBLOCK` prevents an
    # endless wait for a pipe without a writer.
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    stream = open(descriptor, "rb")
    status = os.fstat(descriptor)
    proc_link = f"/proc/self/fd/{descriptor}"
    try:
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it isn't a regular file")
        # Another file may have taken the name since the name was checked
        open_path = os.readlink(proc_link) if os.path.islink(proc_link) else os.path.realpath(file)
        _check_file(ref, open_path, status.st_size)
    except BaseException:
        stream.close()
        raise
    return stream


def _open_in_zip(ref: MediaRef, stream: Bounded, name: str) -> IO[bytes]:
    archive = zipfile.ZipFile(cast("IO[bytes]", stream))
    member = archive.getinfo(name)
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # only these can be read in chunks
        raise ref.error(f"'{name}' is compressed by method {member.compress_type}; compress it by 'deflate'")
    if member.file_size > ref.rules.max_media_bytes:
        raise _too_large_error(ref)
    return archive.open(member)


def _check_size(ref: MediaRef, data: bytes) -> bytes:
    if len(data) > ref.rules.max_media_bytes:
        raise _too_large_error(ref)
    return data


def _too_large_error(ref: MediaRef) -> MediaError:
    return ref.error(f"more than {ref.rules.max_media_bytes:,} bytes; remove the row or raise `max_media_bytes`")


def _from_data_uri(ref: MediaRef, uri: str) -> bytes:
    header, comma, data = uri.partition(",")
    if not comma:
        raise ref.error("a data URI without a comma; write 'data:<type>;base64,<data>'")
    # Spares the decoding of data that is certainly too large. Base64 writes 3 bytes as 4 characters, with padding, and
    # a URI may write each character as 3, such as "%2B". `fetch_file` checks the size of the decoded bytes.
    if len(data) > 4 * ref.rules.max_media_bytes + 8:
        raise _too_large_error(ref)
    if not header.endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return base64.b64decode(b"".join(unquote_to_bytes(data).split()), validate=True)
    except binascii.Error as error:
        raise ref.error(f"its data URI isn't base64 ({error}); repair it or remove the row") from error


def _check_protocol(ref: MediaRef, protocol: str) -> None:
    if protocol not in ref.rules.allowed_media_protocols:
        raise ref.error(
            f"the protocol '{protocol}' isn't one of `allowed_media_protocols`; add it if you trust the data, or copy "
            "the media to an allowed source"
        )


def join_media_dir(ref: MediaRef, path: str | os.PathLike) -> str:
    """Joins a relative path to the folder `media_dir`, and returns an absolute path as it is."""
    return os.path.join(ref.rules.media_dir or "", path)


def _local_path(ref: MediaRef, path: str) -> str:
    _check_protocol(ref, "file")
    original = path
    path = join_media_dir(ref, path)
    if _BASE64.fullmatch(original.rstrip()) and not os.path.isfile(path):
        raise ref.error("base64 text, not a path; put 'data:;base64,' before it")
    _check_file(ref, os.path.realpath(path), 0)  # `open_file` checks the size
    if os.path.isdir(path):
        remedy = "give the list of the files of its frames" if ref.modality == "video" else "name a file in it"
        raise ref.error(f"'{os.path.abspath(path)}' is a folder; {remedy}")
    if not os.path.isfile(path):
        hint = ""
        if not os.path.isabs(original):
            folder = ref.rules.media_dir and f"`media_dir`, '{ref.rules.media_dir}'"
            hint = f" (relative paths start from {folder or 'the working directory; `media_dir` names another'})"
        raise ref.error(f"no such file: '{os.path.abspath(path)}'{hint}; correct the path or remove the row")
    return path


def _check_file(ref: MediaRef, path: str, size: int) -> None:
    folders = ref.rules.allowed_media_folders
    if folders is not None and not any(Path(path).is_relative_to(os.path.realpath(f)) for f in folders):
        raise ref.error(f"'{path}' is in none of `allowed_media_folders`; add its folder if you trust the data")
    if size > ref.rules.max_media_bytes:
        raise _too_large_error(ref)


def _check_domain(ref: MediaRef, url: str) -> None:
    """Raises a [`MediaError`] unless the host of a URL is allowed, and all parsers agree on the host."""
    if _AMBIGUOUS_CHARACTERS.search(url):
        raise ref.error("its URL has a backslash or a control character; encode it, such as '%5C'")
    try:
        if "@" in urlsplit(url).netloc:
            raise ref.error("its URL has a user or a password; remove them, or copy the media to a local folder")
        host = host_of(url)
        allowed = [host_of(f"http://{domain}") for domain in ref.rules.allowed_media_domains or ()]
    except MediaError:
        raise
    except ValueError:  # its message may hold half a password
        raise ref.error(f"'{masked_url(url)}' isn't a URL; correct it or remove the row") from None
    if ref.rules.allowed_media_domains is not None and host not in allowed:
        raise ref.error(f"'{host}' isn't one of `allowed_media_domains`; add it if you trust the data")


def _check_url(ref: MediaRef, url: str) -> None:
    """Applies the rules to the URL of a file, or to one to which a server redirects."""
    protocol = url.partition(":")[0].lower()
    if protocol not in ("http", "https") or protocol not in ref.rules.allowed_media_protocols:
        raise ref.error(f"it redirects to the protocol '{protocol}', which isn't allowed; remove the row")
    _check_domain(ref, url)


def _download(ref: MediaRef, url: str) -> bytes:
    try:
        limit = ref.rules.max_media_bytes
        answer = ask(
            "GET",
            url,
            seconds=ref.rules.media_timeout,
            attempts=_ATTEMPTS,
            max_bytes=limit,
            check_url=partial(_check_url, ref),
        )
    except TooLarge:
        raise _too_large_error(ref) from None
    except NoAnswer as error:
        remedy = "correct the URL, remove the row, or raise `media_timeout`"
        raise ref.error(f"cannot download '{url}' ({error}); {remedy}") from None
    except requests.RequestException as error:
        reason = str(error) if isinstance(error, requests.TooManyRedirects) else type(error).__name__
        raise ref.error(f"cannot download '{url}' ({reason}); correct the URL or remove the row") from None
    if answer.status not in (200, 203):  # 206 would be a part of the file
        raise ref.error(f"'{url}' returns status {answer.status}; correct the URL or remove the row")
    return answer.body
