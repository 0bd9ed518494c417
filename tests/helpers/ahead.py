# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Trainers that ask ahead for completions, without vLLM: its servers are a function of prompt, seed and salt."""

import hashlib
from contextlib import nullcontext
from itertools import groupby

from helpers.samplers import Wrapped
from trl_multimodal_rft.generation.vllm_server import EngineRequest
from trl_multimodal_rft.rollout.in_flight import InFlight


LENGTH = 6


def answer(ids: list[int], seed: int, salt: str) -> list[int]:
    """Returns a completion."""
    drawn = hashlib.sha256(f"{ids} {seed} {salt}".encode()).digest()[:LENGTH]
    return [50 + each % 100 for each in drawn]


def answers(request: EngineRequest, salt: str, turn: int, attempt: int) -> list:
    """Returns the completions of a request, all tokens with the same log-probability."""
    return [(answer(request.ids, request.seed + i, salt), [-1.0] * LENGTH) for i in range(request.count)]


class Engine:
    """What a trainer asks of vLLM to ask ahead."""

    def server_requests(self, prompts):
        runs = [[*run] for _, run in groupby(prompts, key=id)]
        return [EngineRequest(run[0].input_ids.tolist(), None, len(run), LENGTH, None) for run in runs]

    def check_starts(self):
        pass


class Ahead(Wrapped):
    """Replaces a trainer's sampler, `events` are the order in which batches are asked for and used."""

    def __init__(self, trainer, max_staleness: int = 2, send=answers, patience: float = 20.0):
        super().__init__(trainer)
        self.events = []
        self.profile, self.explain = (lambda name: nullcontext()), nullcontext
        trainer.vllm_generation = Engine()
        self.flight = trainer.in_flight = InFlight(send, max_staleness, patience)
        ask, take = self.flight.ask, self.flight.take
        self.flight.ask = lambda place, *given, **more: (
            self.events.append(("ask", place)),
            ask(place, *given, **more),
        )
        self.flight.take = lambda place: (self.events.append(("use", place)), take(place))[1]

    def __call__(self, model, prompts, **options):
        """Returns log-probabilities, too, as vLLM does."""
        ids, _ = super().__call__(model, prompts, **options)
        return ids, [[-1.0] * len(each) for each in ids]

    def load_weights(self, step: int) -> None:
        self.events.append(("weights", step))
