# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions of coming generation batches, which servers sample while the policy is trained on earlier ones."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from accelerate.logging import get_logger

from ..data.reading.http import started
from ..generation.vllm_requests import ServerSample, WarnOnce, until_answered
from ..generation.vllm_server import EngineRequest
from .reward import EarlyCalls
from .rollout import EarlyRewards


logger = get_logger(__name__)


class Answer(NamedTuple):
    """Completions of a request, as ids and log-probabilities."""

    completions: list[ServerSample]
    first: int  # version of the weights when the request was sent
    last: int  # version when the answer came
    at: float  # when it came, in seconds of the monotonic clock
    digest: str = ""  # digest of the request, and of how to sample


# Index of the batch, number of the row, seed of the first completion, number of completions
Key = tuple[int, int, int, int]


@dataclass
class PendingBatch:
    """A batch whose completions are in flight."""

    batch: Any  # which the loader yields later, so that its rows are read once
    numbers: list[int]  # of its completions' rows
    answers: dict[Key, Future[Answer]]
    rewards: dict[Key, Future[EarlyRewards]]  # by functions that only wait, if there are any
    views: Any  # of completions that are sampled from other media than the batch's
    probes: list[tuple[Any, EngineRequest]]  # prompts and requests by which the engine is checked


class InFlight:
    """
    The completions of batches that were asked for, by the indices of the batches in the run.

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
        settings (`dict`, *optional*):
            How completions are sampled, beyond what a request says. Answers of a checkpoint under others aren't taken.
    """

    def __init__(
        self,
        send: Callable[[EngineRequest, str, int, int], list[ServerSample]],
        max_staleness: int,
        patience: float,
        changes_weights: bool = True,
        settings: dict[str, Any] | None = None,
    ):
        self.max_staleness, self.version = max_staleness, 0
        self._send, self._patience, self._warn = send, patience, WarnOnce()
        self._settings = settings
        self._changes_weights = changes_weights
        self._pending: dict[int, PendingBatch] = {}
        self._rows: dict[int, list[int]] = {}  # of a checkpoint, as are these
        self._checkpoint_answers: dict[Key, Answer] = {}
        self._n_sent = 0
        self._n_cleared = 0
        self.processor: Any = None  # which reads completions for the threads
        self.calls = EarlyCalls()
        self.probes: list[tuple[Any, EngineRequest]] = []  # of the last batch

    def __contains__(self, batch_index: int) -> bool:
        return batch_index in self._pending

    def ask(
        self,
        batch_index: int,
        batch: Any,
        numbers: list[int],
        requests: dict[Key, EngineRequest],
        reward: dict[Key, Callable[[list[ServerSample]], EarlyRewards]],
        **more: Any,
    ) -> None:
        """
        Asks for the completions of a batch, but for those that a checkpoint has, and has those of some requests
        rewarded when they come.
        """
        known = self._checkpoint_answers
        others = [key for key, each in requests.items() if key in known and not self._fits(key, each)]
        if others:
            logger.warning(f"{len(others)} answers of the checkpoint are of other settings, and are asked for again.")
        self._checkpoint_answers = {key: answer for key, answer in known.items() if key not in others}
        # Servers share no cached prefix between batches that are due at different versions
        salt = str(max(0, batch_index - self.max_staleness))
        answers = {
            key: started(self._answer, key, request, salt, turn)
            for turn, (key, request) in enumerate(requests.items(), start=self._n_sent)
        }
        rewards = {key: started(self._rewarded, self._n_cleared, answers[key], each) for key, each in reward.items()}
        self._n_sent += len(requests)
        self._pending[batch_index] = PendingBatch(batch, numbers, answers, rewards, **more)

    def take(self, batch_index: int) -> tuple[PendingBatch, list[Answer], tuple[float, float]]:
        """
        Waits for the completions of a batch, and forgets it. Also returns the seconds that this took, and those that
        an answer had been there before, on average.
        """
        start, pending = time.monotonic(), self._pending[batch_index]
        answers = [each.result() for each in pending.answers.values()]
        del self._pending[batch_index]
        # What a checkpoint has of batches up to here
        self._rows = {each: rows for each, rows in self._rows.items() if each > batch_index}
        self._checkpoint_answers = {
            key: answer for key, answer in self._checkpoint_answers.items() if key[0] > batch_index
        }
        rested = sum(max(0.0, start - each.at) for each in answers) / len(answers)
        return pending, answers, (time.monotonic() - start, rested)

    def sample(self, requests: Sequence[EngineRequest]) -> list[ServerSample]:
        """Waits for completions by the newest weights."""
        pending = [started(self._answer, None, each, str(self.version), turn) for turn, each in enumerate(requests)]
        return [sample for each in pending for sample in each.result().completions]

    def clear(self) -> None:
        """Forgets all batches. What was asked for is neither asked for again nor rewarded."""
        self._pending, self._rows, self._checkpoint_answers = {}, {}, {}
        self._n_cleared, self.calls = self._n_cleared + 1, EarlyCalls()

    def _answer(self, key: Key | None, request: EngineRequest, salt: str, turn: int) -> Answer:
        if key is not None and key in self._checkpoint_answers:
            return self._checkpoint_answers[key]

        n_cleared = self._n_cleared

        def attempt(n: int) -> Answer:
            self._check(n_cleared)
            first = self.version
            found = self._send(request, salt, turn, n)
            last = self.version if self._changes_weights else first
            return Answer(found, first, last, time.monotonic(), self._digest(request))

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

    def _fits(self, key: Key, request: EngineRequest) -> bool:
        """Whether the checkpoint's answer is one to this request, by weights that are new enough."""
        answer = self._checkpoint_answers[key]
        return answer.digest == self._digest(request) and key[0] - answer.first <= self.max_staleness

    def _digest(self, request: EngineRequest) -> str:
        hashes = request.media and request.media["mm_hashes"]
        request_fields = [request.ids, hashes, request.count, request.most, self._settings]
        return hashlib.sha256(json.dumps(request_fields, sort_keys=True, default=str).encode()).hexdigest()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        answers = {key: each for pending in self._pending.values() for key, each in pending.answers.items()}
        ended = {key: each.result() for key, each in answers.items() if each.done() and each.exception() is None}
        return {
            "rows": self._rows | {batch_index: pending.numbers for batch_index, pending in self._pending.items()},
            "answers": {key: tuple(each) for key, each in (self._checkpoint_answers | ended).items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        now, self._rows = time.monotonic(), state["rows"]
        self._checkpoint_answers = {key: Answer(*each)._replace(at=now) for key, each in state["answers"].items()}


def request_keys(
    prompts: Sequence[Any], numbers: Sequence[int], indices: Sequence[int], batch_index: int, seed: int
) -> list[Key]:
    """
    The keys of requests for completions, consecutive ones of a prompt together, from the numbers of their rows and
    their indices among the completions of all ranks.
    """
    keys = []
    for _, run in groupby(range(len(prompts)), key=lambda i: id(prompts[i])):
        first, *others = run
        text = f"{seed} {batch_index} {numbers[first]}"
        start = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) + indices[first]
        keys.append((batch_index, numbers[first], start, 1 + len(others)))
    return keys
