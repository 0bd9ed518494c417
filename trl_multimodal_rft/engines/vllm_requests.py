# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Requests to vLLM's servers: their time limits, their repetition, and checks of their answers."""

import json
import math
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import as_completed
from typing import Any, TypeVar

import requests
from accelerate.logging import get_logger

from ..credentials import without_credentials
from ..data.reading.http import Answer, NoAnswer, TooLarge, ask, list_in, numbers_in, started


logger = get_logger(__name__)

T = TypeVar("T")
U = TypeVar("U")

# Maximum number of concurrent requests
_MAX_CONCURRENT = 64
# In seconds: limit for connecting, wait before the first retry, and longest wait. Waits double up to the longest
_CONNECT_SECONDS = 10.0
_FIRST_WAIT = 0.25
_LONGEST_WAIT = 10.0
_MOST_BYTES = 2**24  # maximum size of an answer, by default
_EXCERPT_BYTES = 200  # bytes of an answer in an error

# Values of `finish_reason` of complete completions
_FINISH_REASONS = ("stop", "length", "repetition")
# Value that servers send in place of a missing log-probability
_MISSING_LOGP = -9999.0
LARGEST_LOGP = 1e-3  # limit of log-probabilities, which rounding may lift above 0
_LARGEST_EXCESS = 1e-2  # limit of what rounding adds to a sum of probabilities

# Token ids of a completion, and their log-probabilities. The engine may lack some log-probabilities (`None`).
ServerSample = tuple[list[int], list[float | None]]


class RequestLost(RuntimeError):
    """Error of a request that got no usable answer, or none in time (`timed_out`). The request may be sent again."""

    def __init__(self, message: str, timed_out: bool = False):
        super().__init__(message)
        self.timed_out = timed_out


class WarnOnce:
    """Callback for lost requests, which are sent again. Logs a warning at the first call only, in any thread."""

    def __init__(self):
        self._first_call = threading.Lock()

    def __call__(self, error: RequestLost) -> None:
        if self._first_call.acquire(blocking=False):  # never released
            logger.warning(
                f"{error} It is asked again. Further lost requests are sent again without a warning.",
                main_process_only=False,
            )


def answer_of(
    url: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    seconds: float,
    max_bytes: int = _MOST_BYTES,
    method: str = "POST",
) -> Answer:
    """
    Returns a server's answer. Raises a [`RequestLost`] if the server is busy or can't be reached, or if no complete
    answer of at most `max_bytes` comes within `seconds`.
    """
    start = time.monotonic()
    try:
        return ask(
            method,
            f"{url}{path}",
            json=body,
            seconds=seconds,
            attempts=1,
            max_bytes=max_bytes,
            connect_seconds=_CONNECT_SECONDS,
        )
    except TooLarge:
        raise lost_error(url, path, f"more than {max_bytes:,} bytes") from None
    except NoAnswer as error:
        # `NoAnswer` doesn't tell whether the time was up, so the elapsed time decides, with a tolerance of 1 %
        timed_out = time.monotonic() - start > 0.99 * seconds
        reason = f"no complete answer in {seconds:g} s" if timed_out else error
        raise lost_error(url, path, reason, timed_out=timed_out) from error
    except requests.RequestException as error:
        raise lost_error(url, path, type(error).__name__) from error


def lost_error(
    url: str, path: str, reason: str | int | Exception, answer: Answer | None = None, timed_out: bool = False
) -> RequestLost:
    """Returns the error of a lost request, with the reason and the start of the server's answer."""
    excerpt = "" if answer is None else f": {answer.body[:_EXCERPT_BYTES].decode(errors='replace')!r}"
    url = without_credentials(url)
    return RequestLost(f"The vLLM server at {url} didn't answer {path} ({reason}{excerpt}).", timed_out)


def content_of(answer: Answer, url: str, path: str) -> dict[str, Any]:
    """Returns the content of an answer. Raises a `RuntimeError` for a refusal, and for content that isn't JSON."""
    if answer.status != 200:
        raise refusal(answer, url, path)
    try:
        return json.loads(answer.body or b"null")
    except (ValueError, RecursionError):
        raise refusal(answer, url, path) from None


def refusal(answer: Answer, url: str, path: str) -> RuntimeError:
    """
    Returns an error that quotes an answer which a repetition wouldn't change. Unlike after a [`RequestLost`],
    [`until_answered`] doesn't send the request again.
    """
    return RuntimeError(str(lost_error(url, path, answer.status, answer)))


def until_answered(attempt: Callable[[int], T], patience: float, warn: Callable[[RequestLost], Any]) -> T:
    """
    Calls `attempt(n)` for `n` = 0, 1, ... until a call doesn't raise [`RequestLost`], and returns its result. Waits
    between attempts take 0.25, 0.5, 1, 2, 4 and 8 seconds, and 10 seconds from then on. Raises a `RuntimeError` when
    an attempt times out, or when the waits add up to `patience` seconds.
    """
    n = 0
    total_wait = 0.0
    while True:
        try:
            return attempt(n)
        except RequestLost as error:
            # Limits the exponent, too, as a float can't hold the waits of more than a thousand attempts
            wait = 0.0 if error.timed_out else min(_FIRST_WAIT * 2 ** min(n, 10), _LONGEST_WAIT, patience - total_wait)
            if wait <= 0:
                times = "once" if n == 0 else f"{n + 1} times"
                raise RuntimeError(
                    f"{error} It was asked {times}; check the server, or raise the limit `vllm_server_timeout`."
                ) from error
            warn(error)
        time.sleep(wait)
        n += 1
        total_wait += wait


def at_once(work: Callable[[T], U], items: Iterable[T]) -> list[U]:
    """Calls `work` on items in threads, and returns the results in order. Raises the first error at once."""
    slots = threading.Semaphore(_MAX_CONCURRENT)

    def run(item: T) -> U:
        with slots:
            return work(item)

    futures = [started(run, item) for item in items]
    for future in as_completed(futures):
        future.result()
    return [future.result() for future in futures]


# Answers


def completions_in(
    body: bytes,
    count: int,
    max_tokens: int,
    vocab_size: int,
    placeholders: Collection[int],
    end_ids: Collection[int] = (),
) -> list[ServerSample]:
    """
    Returns the `count` completions in an answer. Raises a one-line `ValueError` unless each has 1 to `max_tokens` ids
    below `vocab_size`, none a placeholder and only the last one an end, with a log-probability or `None` in place of
    it.
    """
    choices = list_in(body, "choices", "completions")
    try:
        indices = [choice["index"] for choice in choices]
    except (KeyError, TypeError):
        raise ValueError("it holds no completions") from None
    if any(type(index) is not int for index in indices) or sorted(indices) != [*range(count)]:
        raise ValueError(f"it holds the completions {indices}, not {count}")
    samples: list[ServerSample] = [([], [])] * count
    for choice in choices:
        try:
            samples[choice["index"]] = _sample_in(choice, max_tokens, vocab_size, placeholders, end_ids)
        except ValueError as error:
            raise ValueError(f"completion {choice['index']} {error}") from None
    return samples


def _sample_in(
    choice: dict[str, Any], max_tokens: int, vocab_size: int, placeholders: Collection[int], end_ids: Collection[int]
) -> ServerSample:
    """Returns the completion in a choice of an answer. A `ValueError` has the end of a sentence as its message."""
    reason = choice.get("finish_reason")
    ids = choice.get("token_ids")
    if reason not in _FINISH_REASONS:
        raise ValueError(f"ended by {reason!r}")
    if not isinstance(ids, list) or not 1 <= len(ids) <= max_tokens:
        raise ValueError(
            f"has {len(ids) if isinstance(ids, list) else 'no'} tokens, where 1 to {max_tokens} are possible"
        )
    for value in numbers_in(ids, len(ids), "token", 0, vocab_size - 1, whole=True):
        if value in placeholders:
            raise ValueError(f"has the token {value}, which stands for media that don't exist")
    early_ends = [token for token in ids[:-1] if token in end_ids]
    if early_ends:
        raise ValueError(f"has tokens after the token {early_ends[0]}, which ends a text")
    try:
        # NaN, which engines report, is as good as a missing value
        logps = [
            None if entry["logprob"] != entry["logprob"] else entry["logprob"]
            for entry in choice["logprobs"]["content"]
        ]
    except (KeyError, TypeError):
        raise ValueError("has no log-probabilities") from None
    numbers_in(logps, len(ids), "log-probability", -math.inf, LARGEST_LOGP, optional=True)
    # Servers may name the token of a log-probability by its id. Names by text aren't compared
    for token, entry in zip(ids, choice["logprobs"]["content"], strict=True):
        name = str(entry.get("token"))
        if re.fullmatch(r"token_id:\d+", name) and name != f"token_id:{token}":
            raise ValueError(f"has the log-probability of {name} for the token {token}")
    return ids, [logp_or_none(logp) for logp in logps]


def scores_in(body: bytes, ids: Sequence[int], n: int, k: int, vocab_size: int) -> list[dict[int, float]]:
    """
    Returns the log-probabilities of the `k` likeliest tokens at the last `n` positions of a prompt. Raises a one-line
    `ValueError` unless each position has the prompt's token and `k` tokens below `vocab_size`, with numbers of at most
    0 whose probabilities sum to at most 1.
    """
    positions = list_in(body, "prompt_logprobs", "scores")
    if len(positions) != len(ids):
        raise ValueError(f"it holds the scores of {len(positions)} positions, not {len(ids)}")
    scores = []
    for i in range(len(ids) - n, len(ids)):
        try:
            scores.append(_scores_of(positions[i], ids[i], k, vocab_size))
        except ValueError as error:
            raise ValueError(f"position {i} {error}") from None
    return scores


def _scores_of(position: dict[str, Any], token: int, k: int, vocab_size: int) -> dict[int, float]:
    """Returns the scores of a position of a prompt. A `ValueError` has the end of a sentence as its message."""
    try:
        tokens = [int(name) for name in position]
        logps = [entry["logprob"] for entry in position.values()]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError("has no log-probabilities by token") from None
    numbers_in(tokens, len(tokens), "token", 0, vocab_size - 1, whole=True)
    numbers_in(logps, len(tokens), "log-probability", -math.inf, LARGEST_LOGP)
    # vLLM adds the prompt's token to the `k` most likely ones
    if token not in tokens:
        raise ValueError(f"has no score of the prompt's token {token}")
    if len(tokens) < min(k, vocab_size):
        raise ValueError(f"has {len(tokens)} tokens, not the {k} most likely ones")
    total = math.fsum(map(math.exp, logps))
    if total > 1 + _LARGEST_EXCESS:
        raise ValueError(f"has tokens whose probabilities sum to {total:.3g}")
    # Without the prompt's token, if it isn't among the most likely ones
    return dict(sorted(zip(tokens, logps, strict=True), key=lambda item: -item[1])[:k])


def logp_or_none(logp: float | None) -> float | None:
    """Returns a log-probability, or `None` for values that engines and servers report in place of one."""
    return None if logp is None or logp <= _MISSING_LOGP or math.isnan(logp) else logp
