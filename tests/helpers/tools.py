# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A tool, a model that may call it, and completions that do."""

from trl.chat_template_utils import qwen3_vl_chat_template

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
