# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""HTTP requests with limits of time and size, repeated while a server is busy or closes the connection."""

import json as json_format
import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urljoin

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection


P = ParamSpec("P")
T = TypeVar("T")

# Errors after which another attempt may succeed
_CONNECTION_ERRORS = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    urllib3.exceptions.HTTPError,
)
_BUSY_STATUSES = {408, 425, 429, 500, 501, 502, 503, 504, 507, 520, 521, 522, 523, 524, 529, 530, 599}
_MOST_REDIRECTS = 5
_CHUNK_BYTES = 2**20
_GRACE_SECONDS = 0.5  # after the deadline, so that an attempt can raise its own timeout first
_LONGEST_WAIT = 60.0  # seconds between attempts, even if a server asks for more


@dataclass
class Answer:
    """Response of a server to [`ask`]."""

    status: int
    body: bytes
    is_html: bool  # by the content type or the start of the body
    date: str = ""  # header `Date`, by the server's clock


def list_in(body: bytes, field: str, content_name: str) -> list[Any]:
    """
    Returns a list in a field of the JSON object in the body of an answer. Raises a `ValueError`, with a one-line
    message, if there's no such list, or if an error is beside it. `content_name` says what the list holds.
    """
    try:
        answer = json_format.loads(body)
    except (ValueError, RecursionError):
        answer = None
    content: dict[str, Any] = answer if isinstance(answer, dict) else {}
    values = content.get(field)
    if not isinstance(values, list):
        raise ValueError(f"it holds no {content_name}")
    if content.get("error"):
        raise ValueError(f"it holds an error beside {content_name}")
    return values


def numbers_in(
    values: list[Any], n: int, kind: str, lowest: float, highest: float, *, whole: bool = False, optional: bool = False
) -> list[Any]:
    """
    Returns the `n` numbers of a `kind` that a server answered with. Raises a `ValueError`, with the end of a sentence
    as its message, for another count, and for anything but numbers from `lowest` to `highest`, which NaN isn't.
    `whole` numbers have no fraction, and `optional` ones may be missing (`None`).
    """
    if len(values) != n:
        raise ValueError(f"has {len(values)} values of {kind} instead of {n}")
    for value in values:
        is_number = type(value) is int or type(value) is float and not whole
        if not (is_number and lowest <= value <= highest or value is None and optional):
            number = "a whole number" if whole else "a number"
            raise ValueError(f"has the {kind} {value!r:.40}, which isn't {number} from {lowest:g} to {highest:g}")
    return values


class NoAnswer(Exception):
    """Error of a request without a usable response. The message is the reason, which may be temporary."""


class TooLarge(Exception):
    """Error of a response with more bytes than the limit."""


def start_of(body: bytes) -> str:
    """Returns the start of a response's body as text, for an error."""
    return body[:200].decode(errors="replace")


def ask(
    method: str,
    url: str,
    *,
    seconds: float,
    attempts: int | None,
    max_bytes: int,
    backoff: float = 0.5,
    attempt_seconds: float | None = None,
    json: dict[str, Any] | None = None,
    session: requests.Session | None = None,
    check_url: Callable[[str], None] | None = None,
    is_usable: Callable[[Answer], bool] = lambda answer: True,
    connect_seconds: float = math.inf,
    shown: Callable[[bytes], str] = start_of,
) -> Answer:
    """
    Repeats a request until an answer `is_usable`, after waits of `backoff * 2 ** (n - 1)` seconds, or as the server
    asks, at most 60. `seconds` is for all `attempts` (`None`: any). Redirects are followed only with `check_url`,
    which sees each URL. Raises [`NoAnswer`] in the end, or [`TooLarge`].
    """
    deadline = time.monotonic() + seconds
    attempt = 0
    connections = list[HTTPConnection]()
    while True:
        attempt += 1
        until = deadline if attempt_seconds is None else min(deadline, time.monotonic() + attempt_seconds)
        wait = backoff * 2.0 ** min(attempt - 1, 60)  # a larger exponent would overflow
        try:
            with nullcontext(session) if session else requests.Session() as open_session:
                limits = until, connect_seconds, max_bytes
                call = partial(_attempt, method, url, *limits, json, open_session, check_url, connections)
                answer, retry_after = run_until(until, call)
            if answer.status not in _BUSY_STATUSES and is_usable(answer):
                return answer
            reason = f"status {answer.status}: {shown(answer.body)!r}"
            wait = max(wait, retry_after)
        except NoAnswer as error:
            reason = str(error)
        except _CONNECTION_ERRORS as error:
            reason = type(error).__name__
        finally:  # ends the attempt's thread, which a server could keep busy by endless `100 Continue`
            for connection in connections:
                sock = connection.sock
                if sock is not None:
                    with suppress(OSError):  # raised by a closed socket
                        sock.shutdown(socket.SHUT_RDWR)
        wait = min(wait, _LONGEST_WAIT)
        if attempt == attempts or time.monotonic() + wait > deadline:
            suffix = "" if attempts == 1 else f", after {attempt} attempt{'s' * (attempt > 1)} within {seconds:g} s"
            raise NoAnswer(f"{reason}{suffix}")
        time.sleep(wait)


def host_of(url: str) -> str | None:
    """Returns the host to which `requests` connects for a URL. Other parsers may read another host from the URL."""
    try:
        host = urllib3.util.parse_url(requests.Request("GET", url).prepare().url or "").host
        return None if host is None else host.lower()
    except (requests.RequestException, urllib3.exceptions.LocationParseError) as error:
        raise ValueError(str(error)) from None


def run_until(until: float, function: Callable[[], T]) -> T:
    """
    Returns the result of a function that runs in a thread. Once `time.monotonic()` is past `until`, abandons the
    thread and raises [`NoAnswer`]. Timeouts of reads don't suffice: a slow server may let no single read time out.
    """
    try:
        return started(function).result(max(until - time.monotonic(), 0.1) + _GRACE_SECONDS)
    except TimeoutError:
        raise NoAnswer("no complete response in time") from None


def started(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Calls a function in a daemon thread, and returns the future of its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _attempt(
    method: str,
    url: str,
    until: float,
    connect_seconds: float,
    max_bytes: int,
    json: dict[str, Any] | None,
    session: requests.Session,
    check_url: Callable[[str], None] | None,
    connections: list[HTTPConnection],
) -> tuple[Answer, float]:
    """
    Sends a request, and follows redirects that `check_url` allows. `until` is the deadline, by `time.monotonic()`.

    Returns the answer, and the seconds in its header `Retry-After`, or 0 if the header has no seconds.
    """
    for _ in range(_MOST_REDIRECTS + 1):
        if check_url is not None:
            check_url(url)
        # Some servers refuse the user agent of `requests`. A small compressed body could become a large one, so
        # compression isn't accepted.
        headers = {"User-Agent": "trl-multimodal-rft", "Accept-Encoding": "identity"}
        seconds_left = max(until - time.monotonic(), 0.1)  # `requests` accepts no timeout of 0
        # A URL with a `check_url` comes from a row of a dataset, so its server must get no password from ~/.netrc
        auth = None if check_url is None else lambda request: request
        request = session.prepare_request(requests.Request(method, url, headers=headers, json=json, auth=auth))
        settings: dict[str, Any] = {**session.merge_environment_settings(request.url, {}, True, None, None)}
        adapter = session.get_adapter(request.url or url)
        if check_url is not None and isinstance(adapter, HTTPAdapter):
            tls = {key: settings[key] for key in ("verify", "proxies", "cert")}
            pool: Any = adapter.get_connection_with_tls_context(request, **tls)
            pool.ConnectionCls = partial(_new_connection, pool.ConnectionCls, connections)
        # Sent by the adapter, because the session would read the whole body of a redirect
        with adapter.send(request, timeout=(min(seconds_left, connect_seconds), seconds_left), **settings) as response:
            if response.is_redirect and check_url is not None:
                url = urljoin(url, response.headers["Location"])
                continue
            body = _body(response, until, max_bytes)
            is_html = "html" in response.headers.get("Content-Type", "") or body.lstrip()[:1] == b"<"
            retry_after = response.headers.get("Retry-After", "")
            answer = Answer(response.status_code, body, is_html, response.headers.get("Date", ""))
            return answer, float(retry_after) if retry_after.isdecimal() else 0.0
    raise requests.TooManyRedirects(f"more than {_MOST_REDIRECTS} redirects")


def _new_connection(
    connection_class: type[HTTPConnection], connections: list[HTTPConnection], **settings
) -> HTTPConnection:
    """Adds the connection to `connections`, so that [`ask`] can shut it down."""
    connections.append(connection_class(**settings))
    return connections[-1]


def _body(response: requests.Response, until: float, max_bytes: int) -> bytes:
    """Raises [`TooLarge`] or [`NoAnswer`] if the body is too large or incomplete."""
    length = response.headers.get("Content-Length", "")
    n_expected = float(length) if length.isdecimal() else None
    chunks = []
    n_read = 0
    if (n_expected or 0) > max_bytes:
        raise TooLarge
    for chunk in iter(lambda: response.raw.read1(_CHUNK_BYTES), b""):
        chunks.append(chunk)
        n_read += len(chunk)
        if n_read > max_bytes:
            raise TooLarge
        if time.monotonic() > until:
            raise NoAnswer(f"only {n_read} bytes arrived in time")
    if n_expected is not None and n_read < n_expected:
        raise NoAnswer(f"only {n_read} of {n_expected:.0f} bytes arrived")
    return b"".join(chunks)
