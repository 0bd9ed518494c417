# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Asynchronous sampling: servers sample for the next generation batches while the policy trains on earlier ones."""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, groupby
from threading import Lock
from typing import Any, NamedTuple

from accelerate.logging import get_logger

from ..data.reading.http import started
from .vllm_client import EngineRequest
from .vllm_requests import ServerSample, WarnOnce, until_answered


logger = get_logger(__name__)


class EarlyRewards(NamedTuple):
    """Rewards of a batch in flight, such as those of judges on servers, and log entries of the reward functions."""

    values: dict[str, list[float | None]]  # rewards by the name of the function
    log_entries: list[tuple[str, str, Any]]  # (logging function such as `log_metric`, name, value)

    @classmethod
    def join(cls, parts: Sequence["EarlyRewards"]) -> "EarlyRewards":
        """Returns the rewards and log entries of several requests as one, in their order."""
        values = {name: sum((part.values[name] for part in parts), []) for name in parts[0].values}
        return cls(values, sum((part.log_entries for part in parts), []))


class EarlyCalls:
    """
    Caller of reward functions from several threads. It serializes the calls of a function, because one call already
    opens as many connections as the function allows. After an error, further calls raise that error.
    """

    def __init__(self):
        self._locks: defaultdict[str, Lock] = defaultdict(Lock)
        self._failure: BaseException | None = None

    def __call__(self, name: str, function: Callable, **arguments: Any) -> Any:
        with self._locks[name]:
            if self._failure is not None:
                raise self._failure
            try:
                return function(**arguments)
            except BaseException as error:
                self._failure = error
                raise


class Answer(NamedTuple):
    """Completions of a request, as ids and log-probabilities."""

    completions: list[ServerSample]
    first_version: int  # version of the weights when the request was sent
    last_version: int  # version when the answer came
    arrival: float  # time of the answer, in seconds of the monotonic clock
    digest: str = ""  # digest of the request and of the sampling settings


# Key of a request: index of the generation batch, row index, seed of the first completion, number of completions
Key = tuple[int, int, int, int]


@dataclass
class PendingBatch:
    """A batch whose completions are in flight."""

    batch: Any  # kept alive, because the data loader reads rows again if their batch is gone
    row_indices: list[int]  # row index of each completion
    answers: dict[Key, Future[Answer]]
    rewards: dict[Key, Future[EarlyRewards]]  # early rewards, if any
    views: Any  # views from which some completions are sampled
    probes: list[tuple[Any, EngineRequest]]  # prompts and requests for checks of the engine


class InFlight:
    """
    Requests for completions, and the answers of servers, by the index of their generation batch in the run.

    The version of weights is the number of batches trained on before the servers got the weights. Each request waits
    for its answer in a thread of its own. For example, with `max_staleness=2`, batch 6 is requested when the servers
    get version 4, which was trained on batches 0 to 3. Batches 4 and 5 were requested earlier.

    Args:
        send (`Callable`):
            Function `send(request, salt, request_index, attempt)` that returns the completions of a request, see
            `Servers.ask`. After a [`RequestLost`], it is called again with the next `attempt`.
        max_staleness (`int`):
            Maximum number of batches that are requested beyond the next batch to train on.
        patience (`float`):
            Limit of the sum of the waits between a request's attempts, in seconds.
        changes_weights (`bool`):
            Whether new weights of a server also apply to the rest of the requests that it is working on.
        settings (`dict`, *optional*):
            Sampling settings that aren't part of requests. Answers in a checkpoint are used only with equal settings.
    """

    def __init__(
        self,
        send: Callable[[EngineRequest, str, int, int], list[ServerSample]],
        max_staleness: int,
        patience: float,
        changes_weights: bool = True,
        settings: dict[str, Any] | None = None,
    ):
        self.max_staleness = max_staleness
        self.version = 0
        self._send = send
        self._patience = patience
        self._warn = WarnOnce()
        self._settings = settings
        self._changes_weights = changes_weights
        self._pending: dict[int, PendingBatch] = {}
        self._checkpoint_rows: dict[int, list[int]] = {}  # row indices by batch index, from a checkpoint
        self._checkpoint_answers: dict[Key, Answer] = {}
        self._n_sent = 0  # number of requests so far; spreads requests over servers
        self._n_clears = 0  # number of calls of `clear`. Ends the threads that are older than the last one.
        self.processor: Any = None  # decodes completions in the threads
        self.calls = EarlyCalls()
        # Probes of the batch that was taken last; set by `AsynchronousSampling`
        self.probes: list[tuple[Any, EngineRequest]] = []

    def __contains__(self, batch_index: int) -> bool:
        return batch_index in self._pending

    def ask(
        self,
        batch_index: int,
        batch: Any,
        row_indices: list[int],
        requests: dict[Key, EngineRequest],
        reward_functions: dict[Key, Callable[[list[ServerSample]], EarlyRewards]],
        **more: Any,
    ) -> None:
        """
        Requests the completions of a batch, except for those in a checkpoint. `reward_functions` maps keys to
        functions that get the completions of a request as soon as they arrive. `more` has the other fields of the
        [`PendingBatch`].
        """
        checkpoint_answers = self._checkpoint_answers
        outdated = [
            key
            for key, request in requests.items()
            if key in checkpoint_answers and not self._fits_request(key, request)
        ]
        if outdated:
            logger.warning(
                f"{len(outdated)} answers of the checkpoint are of other settings or of too old weights, and are "
                "requested again."
            )
        self._checkpoint_answers = {key: answer for key, answer in checkpoint_answers.items() if key not in outdated}
        # The salt is the version of the weights that this batch waits for. Requests for different versions then don't
        # share a prefix in a server's cache
        salt = str(max(0, batch_index - self.max_staleness))
        answers = {
            key: started(self._wait_for_answer, key, request, salt, request_index)
            for request_index, (key, request) in enumerate(requests.items(), start=self._n_sent)
        }
        rewards = {
            key: started(self._compute_rewards, self._n_clears, answers[key], reward)
            for key, reward in reward_functions.items()
        }
        self._n_sent += len(requests)
        self._pending[batch_index] = PendingBatch(batch, row_indices, answers, rewards, **more)

    def take(self, batch_index: int) -> tuple[PendingBatch, list[Answer], tuple[float, float]]:
        """
        Removes and returns a batch and the answers to its requests. Also returns two times in seconds: the wait of
        this call for the answers, and the mean time from an answer's arrival to this call.
        """
        start = time.monotonic()
        pending = self._pending[batch_index]
        answers = [future.result() for future in pending.answers.values()]
        del self._pending[batch_index]
        # A checkpoint's rows and answers up to this batch aren't needed again
        self._checkpoint_rows = {index: rows for index, rows in self._checkpoint_rows.items() if index > batch_index}
        self._checkpoint_answers = {
            key: answer for key, answer in self._checkpoint_answers.items() if key[0] > batch_index
        }
        mean_wait = sum(max(0.0, start - answer.arrival) for answer in answers) / len(answers)
        return pending, answers, (time.monotonic() - start, mean_wait)

    def sample(self, requests: Sequence[EngineRequest]) -> list[ServerSample]:
        """Waits for completions that servers sample with the newest weights, and returns them."""
        futures = [
            started(self._wait_for_answer, None, request, str(self.version), request_index)
            for request_index, request in enumerate(requests)
        ]
        return [*chain.from_iterable(future.result().completions for future in futures)]

    def clear(self) -> None:
        """Forgets all batches. Their requests are neither sent again nor rewarded."""
        self._pending = {}
        self._checkpoint_rows = {}
        self._checkpoint_answers = {}
        self._n_clears += 1
        self.calls = EarlyCalls()

    def _wait_for_answer(self, key: Key | None, request: EngineRequest, salt: str, request_index: int) -> Answer:
        """An answer that the checkpoint has under `key` isn't requested again. `sample` passes no key."""
        if key is not None and key in self._checkpoint_answers:
            return self._checkpoint_answers[key]

        n_clears = self._n_clears

        def attempt(attempt_index: int) -> Answer:
            self._check_not_cleared(n_clears)
            first_version = self.version
            completions = self._send(request, salt, request_index, attempt_index)
            last_version = self.version if self._changes_weights else first_version
            return Answer(completions, first_version, last_version, time.monotonic(), self._digest(request))

        return until_answered(attempt, self._patience, self._warn)

    def _compute_rewards(
        self, n_clears: int, answer: Future[Answer], reward: Callable[[list[ServerSample]], EarlyRewards]
    ) -> EarlyRewards:
        completions = answer.result().completions
        self._check_not_cleared(n_clears)
        return reward(completions)

    def _check_not_cleared(self, n_clears: int) -> None:
        if n_clears != self._n_clears:
            raise RuntimeError("This request was forgotten by `clear`.")  # ends the thread; nobody reads the error

    def _fits_request(self, key: Key, request: EngineRequest) -> bool:
        """Returns whether the checkpoint's answer fits this request, and comes from weights that are new enough."""
        answer = self._checkpoint_answers[key]
        return answer.digest == self._digest(request) and key[0] - answer.first_version <= self.max_staleness

    def _digest(self, request: EngineRequest) -> str:
        hashes = request.rendered and request.rendered["mm_hashes"]
        request_fields = [request.ids, hashes, request.count, request.max_tokens, self._settings]
        return hashlib.sha256(json.dumps(request_fields, sort_keys=True, default=str).encode()).hexdigest()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        futures = {}
        for pending in self._pending.values():
            futures |= pending.answers
        new_answers = {
            key: future.result() for key, future in futures.items() if future.done() and future.exception() is None
        }
        return {
            "rows": self._checkpoint_rows
            | {batch_index: pending.row_indices for batch_index, pending in self._pending.items()},
            "answers": {key: tuple(answer) for key, answer in (self._checkpoint_answers | new_answers).items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        now = time.monotonic()
        self._checkpoint_rows = state["rows"]
        self._checkpoint_answers = {
            key: Answer(*fields)._replace(arrival=now) for key, fields in state["answers"].items()
        }


def request_keys(
    prompts: Sequence[Any], row_indices: Sequence[int], indices: Sequence[int], batch_index: int, seed: int
) -> list[Key]:
    """
    Returns the keys of requests, each for consecutive completions of the same prompt. A request's seed is a 32-bit
    hash of run, batch and row, plus the first completion's index, so that parts of a group on two ranks get different
    seeds.
    """
    keys = []
    for _, prompt_group in groupby(range(len(prompts)), key=lambda i: id(prompts[i])):
        first_index, *other_indices = prompt_group
        text = f"{seed} {batch_index} {row_indices[first_index]}"
        first_seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) + indices[first_index]
        keys.append((batch_index, row_indices[first_index], first_seed, 1 + len(other_indices)))
    return keys
