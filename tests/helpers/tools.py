# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A tool, a model that may call it, and completions that do."""

import json

from trl.chat_template_utils import qwen3_template, qwen3_vl_chat_template

from helpers.trainer_utils import load


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


class Calling:
    """Half of the first turns call a tool, the turns after it are sampled."""

    tool = "look_up"

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if len(prompt_ids) < self.args.generation_batch_size:
            self.continued = getattr(self, "continued", 0) + len(prompt_ids)
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        call = f'<tool_call>\n{{"name": "{self.tool}", "arguments": {{"word": "cat"}}}}\n</tool_call>'
        ids = self._tokenizer(call)["input_ids"]
        end = self._tokenizer.eos_token_id
        return [[*ids, end] if i % 2 else [60 + i, 61, end] for i in range(len(prompt_ids))], None


_CALLS = (
    "{% if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)


def talking(family: str) -> dict:
    """The arguments `model` and `processing_class`; the template has turns of tools, and counts sounds."""
    model, processor = load(family)
    return {"model": model, "processing_class": with_turns_of_tools(processor)}


def with_turns_of_tools(processor):
    template = processor.chat_template.replace("<|im_end|>\n{% endfor %}", _CALLS)
    counted = "{% set n.audio = n.audio + 1 %}Audio {{ n.audio }}: <|audio_bos|>"
    template = "{% set n = namespace(audio=0) %}" + template.replace("<|audio_bos|>", counted)
    processor.chat_template = processor.tokenizer.chat_template = template
    processor.tokenizer.response_template = qwen3_template
    return processor


def call(**arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'show', 'arguments': arguments})}\n</tool_call>"


class Scripted:
    """
    Completion `i` calls the tool `show` `turns[i]` times, then answers.

    `show` returns the `shown` media of its number, as content blocks.
    """

    turns = (0, 1, 2, 3, 4, 0, 1, 2)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self._batch.continued is None:
            self.n_said, self.scripts, self.talking = 0, {}, range(len(prompt_ids))
        n = len(self._batch.prompts)
        places = [self.accelerator.process_index * n + i for i in range(n)]
        turns = [self.turns[place % len(self.turns)] for place in places]
        self.talking = [i for i in self.talking if turns[i] >= self.n_said and not self.has_ended(i)]
        assert len(self.talking) == len(prompt_ids)
        end = self._tokenizer.eos_token_id
        for i in self.talking:
            said = call(number=self.n_said) if turns[i] > self.n_said else f"The answer is {places[i]} cat"
            self.scripts[self.n_said, i] = [*self._tokenizer(said)["input_ids"], end]
        ids = [self.scripts[self.n_said, i] for i in self.talking]
        self.n_said += 1
        return (ids, None) if self._sampling_logps_expected else ids

    def has_ended(self, index: int) -> bool:
        """Whether the results of a completion didn't fit."""
        return False


def shows(*media):
    """A tool that returns one list of content blocks after the other."""

    def show(number: int) -> list:
        """
        Shows something.

        Args:
            number: Which one.

        Returns:
            It.
        """
        return media[number % len(media)]

    return show
