# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Conversations that an engine samples, compared with the model's forward pass of each whole conversation."""

import itertools

import torch
import vllm_cpu
from helpers import engine_runs
from helpers.families import encode
from helpers.tools import shows

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.encoding.prompts import EncodedPrompt
from trl_multimodal_rft.rollout.turns import ToolLoop


WORDS = [" cat", " dog", " bird", " red", " green", " blue"]
OPTIONS = {
    "max_completion_length": 1200,
    "max_steps": 2,
    # A bias selects words. The trainer's log-probabilities don't include it, so importance weights would be 0.
    "vllm_importance_sampling_correction": False,
}
ENGINE = {**vllm_cpu.ENGINE, "max_model_len": 2048}


class Talking:
    """
    Completion `i` calls `show` `turns[i]` times with arbitrary sampled words, then answers.

    `differences` hold the engine's log-probabilities minus the baseline's, for each conversation of each draw.
    """

    turns = (0, 1, 2, 3, 1, 0, 2, 1)
    media: list  # results of the tool, by number

    def __init__(self, *args, **kwargs):
        self.differences = []
        self.conversations = []
        super().__init__(*args, **kwargs)

    def _let_call(self, index: int, number: int, message: dict) -> None:
        if self.turns[index] > number:
            function = {"name": "show", "arguments": {"number": number}}
            message["tool_calls"] = [{"type": "function", "function": function}]

    def tool_loop(self, **options):
        let_call = self._let_call

        class Calling(ToolLoop):
            def run(self, trajectories):
                for i, trajectory in enumerate(trajectories):
                    let_call(i, 0, trajectory.messages[-1])
                super().run(trajectories)

            def _sample_turns(self, trajectories, idle_prompt):
                super()._sample_turns(trajectories, idle_prompt)
                for trajectory in trajectories:
                    let_call(trajectory.index, len(trajectory.sampled_turns) - 1, trajectory.messages[-1])

        return Calling(**vars(super().tool_loop(**options)))

    def _generate_and_score_completions(self, inputs):
        rows = [each.row for each in inputs]
        output = super()._generate_and_score_completions(inputs)
        logps = output.sampling_per_token_logps
        for i, row in enumerate(rows):
            mask = output.completion_mask[i].bool()
            ids = output.completion_ids[i][mask]
            prompt = output.prompts[i]
            self.conversations.append((row, prompt, ids, output.tool_mask[i][mask].bool(), logps[i][mask]))
            assert prompt.decoded == ()  # the trainer keeps no media
        self.differences.append([self.difference(*each) for each in self.conversations[-len(rows) :]])
        return output

    def difference(self, row, prompt: EncodedPrompt, ids, is_sampled, sampled, media=None) -> torch.Tensor:
        """Returns the difference at the sampled tokens, with these media instead of those shown."""
        messages = [{"role": "user", "content": _blocks(row)}]
        place = 0
        for number, (was_sampled, group) in enumerate(itertools.groupby(is_sampled.tolist())):
            end = place + len(list(group))
            content = [_plain(block) for block in (media or self.media)[number // 2 % len(self.media)]]
            if was_sampled:
                # The last turn has no end if the engine's limit cut it
                last = end - int(ids[end - 1] == self._tokenizer.eos_token_id)
                content = [{"type": "text", "text": self._tokenizer.decode(ids[place:last])}]
            messages.append({"role": "assistant" if was_sampled else "tool", "content": content})
            place = end
        processor = self.processing_class
        model = self._unwrapped(self.model)
        inputs = encode(processor, messages, chat_template=processor.chat_template)
        start = len(prompt)
        stop = len(prompt) + len(ids)
        if media is None:
            assert inputs["input_ids"][0, :stop].tolist() == [*prompt.input_ids.tolist(), *ids.tolist()]
        bias = torch.zeros(model.config.get_text_config().vocab_size)
        bias[list(self._sampling.logit_bias)] = torch.tensor(list(self._sampling.logit_bias.values()))
        was_training = model.training
        with torch.no_grad():
            logits = model.eval()(**inputs).logits[0, start - 1 : stop - 1] + bias
        model.train(was_training)
        truth = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        return torch.where(is_sampled, sampled - truth, 0.0)

    @property
    def largest(self) -> list[float]:
        """Returns the largest difference of each draw."""
        return [max(each.abs().max().item() for each in draw) for draw in self.differences]


class TalkingGRPO(Talking, MultimodalGRPOTrainer):
    pass


def _blocks(row) -> list[dict]:
    own = [{"type": kind, kind: row[kind]} for kind in ("image", "video", "audio") if row.get(kind) is not None]
    return [_plain(block) for block in [*own, {"type": "text", "text": row["prompt"][0]["content"]}]]


def _plain(block: dict) -> dict:
    """Returns a block in the format of processors."""
    return {"type": "audio", "audio": block["audio"]["array"]} if block["type"] == "audio" else block


def make(trainer_class, objects: dict, rows, media: list, folder, **options):
    """Returns a trainer of two updates whose completions are conversations of six words."""
    Talking.media = media
    tokenizer = objects["processing_class"].tokenizer
    words = [id for word in WORDS for id in tokenizer(word)["input_ids"]]
    assert len(words) == len(WORDS)
    bias = {**dict.fromkeys(words, 100.0), tokenizer.eos_token_id: 100.0}
    options = {"generation_kwargs": {"logit_bias": bias}, "vllm_engine_kwargs": ENGINE, **OPTIONS, **options}
    return engine_runs.make(trainer_class, None, rows, folder, {"tools": [shows(*media)], **objects}, **options)
