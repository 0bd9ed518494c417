# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A tool, a model that may call it, and completions that call it."""

import functools
import json

import numpy as np
import pytest
from datasets import Dataset
from trl.chat_template_utils import qwen3_template, qwen3_vl_chat_template

from helpers.samplers import Wrapped
from helpers.trainer_utils import load, logged, run
from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalRLOOTrainer


def look_up(word: str) -> str:
    """
    Looks a word up.

    Args:
        word: The word.

    Returns:
        Its meaning.
    """
    return f"{word} is a bird"


def with_tools(**objects):
    model, processor = load("qwen3_vl")
    processor.chat_template = processor.tokenizer.chat_template = qwen3_vl_chat_template
    return {"model": model, "processing_class": processor, **objects}


def call(name: str = "show", **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def first_calls(n: int, tokenizer, tool: str = "look_up") -> list[list[int]]:
    """Returns the ids of `n` first turns. Every other turn calls a tool."""
    ids = tokenizer(call(tool, word="cat"))["input_ids"]
    end = tokenizer.eos_token_id
    return [[*ids, end] if i % 2 else [60 + i, 61, end] for i in range(n)]


class Calling(Wrapped):
    """Sampler whose first turns call a tool for every other completion. The model samples later turns."""

    tool = "look_up"
    continued = 0

    def __call__(self, model, prompts, *, room=None, **options):
        if room is None:
            return first_calls(len(prompts), self.tokenizer, self.tool), None
        self.continued += len(prompts)
        return super().__call__(model, prompts, room=room, **options)


# Part of a chat template that writes calls of tools
_CALLS = (
    "{% if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)


def talking(family: str) -> dict:
    """Returns arguments of a trainer: model and processor. The template has turns of tools, and numbers sounds."""
    model, processor = load(family)
    return {"model": model, "processing_class": with_turns_of_tools(processor)}


def with_turns_of_tools(processor):
    template = processor.chat_template.replace("<|im_end|>\n{% endfor %}", _CALLS)
    counted = "{% set n.audio = n.audio + 1 %}Audio {{ n.audio }}: <|audio_bos|>"
    template = "{% set n = namespace(audio=0) %}" + template.replace("<|audio_bos|>", counted)
    processor.chat_template = processor.tokenizer.chat_template = template
    processor.tokenizer.response_template = qwen3_template
    return processor


class Saying(Wrapped):
    """
    Sampler that returns the texts of a script by completion and turn, and then a final answer. With the script `{0:
    [call(number=0)]}`, completion 0 calls a tool, and says "Done 0" in the next turn. Completion 1 says "Done 1" in
    the first turn. A completion `i` in `unanswered` ends with its call of turn `unanswered[i]`.
    """

    def __init__(self, trainer, script: dict[int, list[str]], unanswered: dict[int, int] | None = None):
        super().__init__(trainer)
        self.script = script
        self.unanswered = unanswered or {}

    def __call__(self, model, prompts, *, room=None, branches=None, **options):
        if room is None:
            self.turn = 0
            indices = range(len(prompts))
            self.rendered = [self.tokenizer.decode(prompt.input_ids) for prompt in prompts]
        else:
            self.turn = self.turn + 1
            indices = [index for index, _ in branches.continuations]
            # Only completions that called a tool continue
            called = [i for i in self.calling if self.text(i, self.turn - 1).startswith("<tool_call>\n{")]
            assert indices == [i for i in called if self.unanswered.get(i) != self.turn - 1]
        self.calling = indices
        return [self.encoded(self.text(i, self.turn)) for i in indices], None

    def text(self, i: int, turn: int) -> str:
        texts = self.script.get(i, [])
        return texts[turn] if turn < len(texts) else f"Done {i}"


class Scripted(Wrapped):
    """
    Sampler whose completion `i` calls the tool `show` `turns[i]` times, then answers.

    The argument of `show` is the number of the turn, see [`shows`]. `scripts` has ids by `(turn, completion)`.
    """

    turns = (0, 1, 2, 3, 4, 0, 1, 2)

    def __call__(self, model, prompts, *, room=None, branches=None, **options):
        if room is None:
            self.turn = 0
            self.scripts = {}
            self.n = len(prompts)
        indices = [*range(self.n)] if room is None else [index for index, _ in branches.continuations]
        first = self.trainer.accelerator.process_index * self.n  # index of the rank's first completion on all ranks
        for i in indices:
            n_turns = self.turns[(first + i) % len(self.turns)]
            text = call(number=self.turn) if n_turns > self.turn else f"The answer is {first + i} cat"
            self.scripts[self.turn, i] = self.encoded(text)
        ids = [self.scripts[self.turn, i] for i in indices]
        self.turn += 1
        return ids or [self.encoded("Nothing")], None  # a rank may have no completion to continue


class KeepsInputs:
    """Mixin that keeps the last micro-batch."""

    def _compute_loss(self, model, inputs):
        self.inputs = inputs
        return super()._compute_loss(model, inputs)


class GRPO(KeepsInputs, MultimodalGRPOTrainer):
    pass


class RLOO(KeepsInputs, MultimodalRLOOTrainer):
    pass


def shows(*media):
    """Returns a tool that shows an entry of `media`, which are lists of content blocks."""

    def show(number: int) -> list:
        """
        Shows something.

        Args:
            number: Which one.
        """
        return media[number % len(media)]

    return show


def play(factory, rows, script, trainer=GRPO, sampler=Saying, unanswered=None, **options):
    """Runs one step in environments, with the completions of a script. Returns the results."""
    sampler = functools.partial(sampler, script=script, unanswered=unanswered)
    options["objects"] = {**talking("qwen3_vl"), "environment_factory": factory}
    options = {"shuffle_dataset": False, "max_steps": 1, "reward": None, "max_completion_length": 1200, **options}
    return run(trainer, "qwen3_vl", Dataset.from_list(rows), sampler=sampler, **options)


def check_rewards(result, name, rewards):
    """Asserts that a run had the mean, and the advantages by `"grpo"`, of `rewards`: a list per group."""
    rewards = np.array(rewards)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    assert result.trainer.inputs["advantages"].tolist() == pytest.approx(advantages.flatten().tolist(), abs=1e-4)
    assert logged(result, f"rewards/{name}/mean") == [rewards.mean()]
