# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions of coming generation batches, which servers sample while the policy is trained on earlier ones."""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from accelerate.logging import get_logger

from ..generation.vllm_server import RequestLost, ServerRequest, ServerSample
from .reward import EarlyCalls, EarlyRewards


logger = get_logger(__name__)

T = TypeVar("T")

_FIRST_WAIT = 0.25  # seconds before a request is sent again; each further wait is twice as long


class Answer(NamedTuple):
    """Completions of a request, as ids and log-probabilities."""

    completions: list[ServerSample]
    first: int  # version of the weights when the request was sent
    last: int  # version when the answer came
    at: float  # when it came, in seconds of the monotonic clock


# Place of the batch, number of the row, seed of the first completion, number of completions
Key = tuple[int, int, int, int]


@dataclass
class Asked:
    """A batch that was asked for."""

    batch: Any  # which the loader yields later, so that its rows are read once
    numbers: list[int]  # of its completions' rows
    answers: dict[Key, Future[Answer]]
    rewards: dict[Key, Future[EarlyRewards]]  # by functions that only wait, if there are any
    views: Any  # of completions that are sampled from other media than the batch's
    probes: list[tuple[Any, ServerRequest]]  # prompts and requests by which the engine is checked


class InFlight:
    """
    The completions of batches that were asked for, by the places of the batches in the run.

    A version of the weights is the number of batches that were trained on when the servers got them. `send` sends a
    request for a batch. It runs in threads, which do nothing else.

    Args:
        send (`Callable`):
            Sends a request and returns the completions, `send(request, salt, turn, attempt)`, where turns count
            requests. A [`RequestLost`] has it sent again.
        max_staleness (`int`):
            Number of batches that may be asked for beyond the one that is to be trained on.
        patience (`float`):
            Seconds to wait between attempts, all waits together.
        changes_weights (`bool`):
            Whether requests go on with newer weights when servers get these.
    """

    def __init__(
        self,
        send: Callable[[ServerRequest, str, int, int], list[ServerSample]],
        max_staleness: int,
        patience: float,
        changes_weights: bool = True,
    ):
        self.max_staleness, self.version = max_staleness, 0
        self._send, self._patience, self._warned = send, patience, False
        self._changes_weights = changes_weights
        self._asked: dict[int, Asked] = {}
        self._rows: dict[int, list[int]] = {}  # of a checkpoint, as are these
        self._known: dict[Key, Answer] = {}
        self._n_sent = 0
        self._n_cleared = 0
        self.processor: Any = None  # which reads completions for the threads
        self.calls = EarlyCalls()
        self.probes: list[tuple[Any, ServerRequest]] = []  # of the last batch

    def __contains__(self, place: int) -> bool:
        return place in self._asked

    def ask(
        self,
        place: int,
        batch: Any,
        numbers: list[int],
        requests: dict[Key, ServerRequest],
        reward: dict[Key, Callable[[list[ServerSample]], EarlyRewards]],
        **more: Any,
    ) -> None:
        """
        Asks for the completions of a batch, but for those that a checkpoint has, and has those of some requests
        rewarded when they come.
        """
        # Servers share no cached prefix between batches that are due at different versions
        salt = str(max(0, place - self.max_staleness))
        answers = {
            key: _started(self._answer, key, request, salt, turn)
            for turn, (key, request) in enumerate(requests.items(), start=self._n_sent)
        }
        rewards = {key: _started(self._rewarded, self._n_cleared, answers[key], each) for key, each in reward.items()}
        self._n_sent += len(requests)
        self._asked[place] = Asked(batch, numbers, answers, rewards, **more)

    def take(self, place: int) -> tuple[Asked, list[Answer], tuple[float, float]]:
        """
        Waits for the completions of a batch, and forgets it. Also returns the seconds that this took, and those that
        an answer had been there before, on average.
        """
        start, asked = time.monotonic(), self._asked[place]
        answers = [each.result() for each in asked.answers.values()]
        del self._asked[place]
        # What a checkpoint has of batches up to here
        self._rows = {each: rows for each, rows in self._rows.items() if each > place}
        self._known = {key: answer for key, answer in self._known.items() if key[0] > place}
        rested = sum(max(0.0, start - each.at) for each in answers) / len(answers)
        return asked, answers, (time.monotonic() - start, rested)

    def sample(self, requests: Sequence[ServerRequest]) -> list[ServerSample]:
        """Waits for completions by the newest weights."""
        asked = [_started(self._answer, None, each, str(self.version), turn) for turn, each in enumerate(requests)]
        return [sample for each in asked for sample in each.result().completions]

    def clear(self) -> None:
        """Forgets all batches. What was asked for is neither asked for again nor rewarded."""
        self._asked, self._rows, self._known = {}, {}, {}
        self._n_cleared, self.calls = self._n_cleared + 1, EarlyCalls()

    def _answer(self, key: Key | None, request: ServerRequest, salt: str, turn: int) -> Answer:
        if key is not None and key in self._known:
            return self._known[key]

        n_cleared = self._n_cleared

        def attempt(n: int) -> Answer:
            self._check(n_cleared)
            first = self.version
            found = self._send(request, salt, turn, n)
            return Answer(found, first, self.version if self._changes_weights else first, time.monotonic())

        return until_answered(attempt, self._patience, self._warn)

    def _rewarded(
        self, n_cleared: int, answer: Future[Answer], reward: Callable[[list[ServerSample]], EarlyRewards]
    ) -> EarlyRewards:
        completions = answer.result().completions
        self._check(n_cleared)
        return reward(completions)

    def _check(self, n_cleared: int) -> None:
        if n_cleared != self._n_cleared:
            raise RuntimeError("The run has ended.")  # where nobody reads it

    def _warn(self, error: RequestLost) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(f"{error} It is asked again, as others will be.", main_process_only=False)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: the rows of the batches that were asked for, and the answers so far."""
        answers = {key: each for asked in self._asked.values() for key, each in asked.answers.items()}
        ended = {key: each.result() for key, each in answers.items() if each.done() and each.exception() is None}
        return {
            "rows": self._rows | {place: asked.numbers for place, asked in self._asked.items()},
            "answers": {key: tuple(each) for key, each in (self._known | ended).items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what [`state_dict`] returned: the other completions are asked for again."""
        now, self._rows = time.monotonic(), state["rows"]
        self._known = {key: Answer(*each)._replace(at=now) for key, each in state["answers"].items()}


def until_answered(attempt: Callable[[int], T], patience: float, warn: Callable[[RequestLost], None]) -> T:
    """
    The result of an attempt, which gets its number. After a [`RequestLost`], there is another one, in all so many as
    waits fit into `patience` seconds: each is twice the last one, or a quarter of them where no answer came in time.
    """
    n, waited = 0, 0.0
    while True:
        try:
            return attempt(n)
        except RequestLost as error:
            wait = min(patience / 4 if error.timed_out else _FIRST_WAIT * 2**n, patience - waited)
            if wait <= 0:
                raise RuntimeError(f"{error} It was asked {n + 1} times; `vllm_server_timeout` bounds it.") from error
            warn(error)
        time.sleep(wait)
        n, waited = n + 1, waited + wait


def request_keys(
    prompts: Sequence[Any], numbers: Sequence[int], indices: Sequence[int], place: int, seed: int
) -> list[Key]:
    """
    The keys of requests for completions, consecutive ones of a prompt together, from the numbers of their rows and
    their indices among the completions of all ranks.
    """
    keys = []
    for _, run in groupby(range(len(prompts)), key=lambda i: id(prompts[i])):
        first, *others = run
        text = f"{seed} {place} {numbers[first]}"
        start = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) + indices[first]
        keys.append((place, numbers[first], start, 1 + len(others)))
    return keys


def _started(work: Callable[..., T], *given: Any) -> Future[T]:
    """The result of work in a thread that doesn't keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*given))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
