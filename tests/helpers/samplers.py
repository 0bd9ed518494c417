# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Samplers that tests give to trainers, `trainer.sampler = PseudoRandom(trainer)`."""

import numpy as np


class Wrapped:
    """A sampler around that of a trainer, which it calls unless a subclass has completions of its own."""

    def __init__(self, trainer):
        self.trainer, self.inner = trainer, trainer.sampler
        self.tokenizer = trainer._tokenizer

    @property
    def is_collective(self):
        return self.inner.is_collective

    @property
    def max_length(self):
        return self.inner.max_length

    def invalidate_weights(self):
        self.inner.invalidate_weights()

    def __call__(self, model, prompts, **options):
        """`options` hold the `room` of each completion and `branches` in turns after results of tools."""
        return self.inner(model, prompts, **options)

    def encoded(self, text: str) -> list[int]:
        """A completion that ends."""
        return [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]


def places(prompts, options) -> list[int]:
    """Which completions of the batch these prompts belong to; none for the dummy prompt of a rank without any."""
    if options.get("room") is None:
        return [*range(len(prompts))]
    return [place for place, _ in options["branches"].asked]


def pseudo_random(prompt_ids: list[list[int]], step: int, training: bool, tokenizer) -> list[list[int]]:
    """Completions that depend on prompts, step and mode alone."""
    generator = np.random.default_rng([step, int(training), sum(map(sum, prompt_ids))])
    vocabulary = len(tokenizer)
    completions = []
    for _ in prompt_ids:
        # Special tokens, and so placeholders, come first in the vocabulary
        ids = generator.integers(50, vocabulary, generator.integers(2, 9)).tolist()
        ended = generator.random() < 0.6
        completions.append([*ids[:-1], tokenizer.eos_token_id] if ended else ids)
    return completions


class PseudoRandom(Wrapped):
    """Pseudo-random completions."""

    def __call__(self, model, prompts, *, step, **options):
        ids = [prompt.input_ids.tolist() for prompt in prompts]
        return pseudo_random(ids, step, model.training, self.tokenizer), None


class Fixed(Wrapped):
    """The completions that a function gives for a number of prompts."""

    def __init__(self, trainer, completions):
        super().__init__(trainer)
        self.completions = completions

    def __call__(self, model, prompts, **options):
        return self.completions(len(prompts)), None
