# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Asynchronous sampling of trainers without vLLM: completions are a function of prompt, seed and salt. The salt names the
version of the weights that sample.
"""

import hashlib
from contextlib import nullcontext
from itertools import groupby

from helpers.samplers import Wrapped
from trl_multimodal_rft.engines.in_flight import InFlight
from trl_multimodal_rft.engines.vllm_client import EngineRequest


LENGTH = 6  # tokens of a completion


def answer(ids: list[int], seed: int, salt: str) -> list[int]:
    """Returns the completion for a prompt, a seed and a salt."""
    digest = hashlib.sha256(f"{ids} {seed} {salt}".encode()).digest()[:LENGTH]
    return [50 + byte % 100 for byte in digest]


def answers(request: EngineRequest, salt: str, turn: int, attempt: int) -> list:
    """Stands in for `send` of [`InFlight`]: returns a request's completions and their log-probabilities, all -1."""
    return [(answer(request.ids, request.seed + i, salt), [-1.0] * LENGTH) for i in range(request.count)]


class Engine:
    """The part of vLLM's interface that asynchronous sampling uses."""

    def requests(self, prompts):
        # Completions of a group hold one prompt object
        groups = [[*group] for _, group in groupby(prompts, key=id)]
        return [EngineRequest(group[0].input_ids.tolist(), None, len(group), LENGTH, None) for group in groups]

    def check_restarts(self):
        pass


class Ahead(Wrapped):
    """
    Asynchronous sampler of a trainer. `events` lists, in order, requests `("ask", batch_index)`, uses of their
    completions `("use", batch_index)`, and loads of weights `("weights", step)`.
    """

    def __init__(self, trainer, max_staleness: int = 2, send=answers, patience: float = 20.0):
        super().__init__(trainer)
        self.events = []
        self.profile = lambda name: nullcontext()
        self.explain = nullcontext
        trainer.vllm_generation = Engine()
        self.flight = trainer.in_flight = InFlight(send, max_staleness, patience)
        ask = self.flight.ask
        take = self.flight.take
        self.flight.ask = lambda batch_index, *args, **kwargs: (
            self.events.append(("ask", batch_index)),
            ask(batch_index, *args, **kwargs),
        )
        self.flight.take = lambda batch_index: (self.events.append(("use", batch_index)), take(batch_index))[1]

    def __call__(self, model, prompts, **options):
        """Returns completions and log-probabilities, as vLLM does."""
        ids, _ = super().__call__(model, prompts, **options)
        return ids, [[-1.0] * len(completion) for completion in ids]

    def load_weights(self, step: int) -> None:
        self.events.append(("weights", step))
