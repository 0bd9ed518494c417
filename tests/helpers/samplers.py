# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Samplers for trainers of tests, such as `trainer.sampler = PseudoRandom(trainer)`."""

import numpy as np


class Wrapped:
    """Sampler that calls a trainer's sampler. Subclasses record its completions, or replace them."""

    samples_policy = False

    def __init__(self, trainer):
        self.trainer = trainer
        self.inner = trainer.sampler
        self.tokenizer = trainer._tokenizer

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)

    def __call__(self, model, prompts, **options):
        """
        Samples. After tool results, `options` has `room`, the largest number of tokens of each completion, and
        `branches`, whose `continuations` begin with the indices of completions.
        """
        return self.inner(model, prompts, **options)

    def encoded(self, text: str) -> list[int]:
        return [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]


class Remembers(Wrapped):
    """Sampler that records `calls`, which are tuples of prompts, completions and log-probabilities."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.calls = []

    def __call__(self, model, prompts, **options):
        ids, logps = super().__call__(model, prompts, **options)
        self.calls.append((prompts, ids, logps))
        return ids, logps


def pseudo_random(prompt_ids: list[list[int]], step: int, training: bool, tokenizer) -> list[list[int]]:
    """Returns completions of 2 to 8 tokens that depend only on prompts, step and mode. 60 % end with EOS."""
    generator = np.random.default_rng([step, int(training), sum(map(sum, prompt_ids))])
    vocabulary = len(tokenizer)
    completions = []
    for _ in prompt_ids:
        # Special tokens, and so placeholders, come first in the vocabulary
        ids = generator.integers(50, vocabulary, generator.integers(2, 9)).tolist()
        is_complete = generator.random() < 0.6
        completions.append([*ids[:-1], tokenizer.eos_token_id] if is_complete else ids)
    return completions


class PseudoRandom(Wrapped):
    """Sampler of pseudo-random completions. With a `config`, which evaluations pass, the model samples."""

    def __call__(self, model, prompts, *, step, config=None, **options):
        if config is not None:
            return super().__call__(model, prompts, step=step, config=config, **options)
        ids = [prompt.input_ids.tolist() for prompt in prompts]
        return pseudo_random(ids, step, self.trainer.model.training, self.tokenizer), None


class FromEngine(PseudoRandom):
    """Sampler of pseudo-random completions with made-up log-probabilities, as if from an engine. One is missing."""

    def __call__(self, model, prompts, **options):
        completions, _ = super().__call__(model, prompts, **options)
        logps = [[-5.5 - 0.01 * (token % 20) for token in ids] for ids in completions]
        logps[0][0] = None
        return completions, logps
