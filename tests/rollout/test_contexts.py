# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Contexts that are rewritten in a completion: scores equal the model's forward of each as its processor has it."""

import copy

import pytest
import torch
from helpers.ahead import Ahead as AskedAhead
from helpers.chats import image
from helpers.families import encode
from helpers.marks import slow_but
from helpers.tools import Scripted, call, shows, talking
from helpers.trainer_utils import (
    Recording,
    audio_rows,
    image_rows,
    length_and_sum,
    logged,
    norm,
    relative_difference,
    run,
)

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.encoding.conversations import Conversation
from trl_multimodal_rft.engines.samplers import Sampler
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate_trainer
from trl_multimodal_rft.rollout.rollout import Turn


class Recorded(Recording, MultimodalGRPOTrainer):
    pass


TEXT = {"type": "text", "text": "Is there a cat?"}
SHOWN = [[image(56, 84, 0), TEXT], [TEXT], [image(84, 56, 1), image(56, 56, 2)], [TEXT, image(56, 56, 3)]]
# The update is the gradient
LONG = {"max_completion_length": 1500, "max_steps": 1, "self_check": True, "learning_rate": 1.0}


def train(trainer=Recorded, family="qwen3_vl", environment=None, objects=None, **options):
    """Returns a run of completions that call `show`, a tool, or one of an environment that rewards them."""
    if environment is None:
        acts = {"tools": [shows(*SHOWN)]}
        options = {"max_context_media": 1, **options}
    else:
        acts = {"environment_factory": environment}
        options = {"reward": None, **options}
    rows = audio_rows() if family == "qwen2_5_omni" else image_rows()
    options = {**LONG, "sampler": Scripted, "objects": {**talking(family), **acts, **(objects or {})}, **options}
    return run(trainer, family, rows, **options)


def media_of(messages) -> list[dict]:
    return [block for message in messages for block in message["content"] if block["type"] != "text"]


def without_first(messages, n):
    """Returns messages without their first media."""
    left_out = [id(block) for block in media_of(messages)[:n]]
    kept = [[block for block in message["content"] if id(block) not in left_out] for message in messages]
    return [{**message, "content": content} for message, content in zip(messages, kept, strict=True)]


def contexts(row, index, most):
    """
    Returns the contexts of a completion as messages, each with the texts behind it: what was sampled, and, as long as
    no medium is too many, what tools returned.
    """
    own = [{"type": kind, kind: row[kind]} for kind in ("image", "audio") if row.get(kind) is not None]
    own = [{**each, "audio": each["audio"]["array"]} if each["type"] == "audio" else each for each in own]
    messages = [{"role": "user", "content": [*own, {"type": "text", "text": row["prompt"][0]["content"]}]}]
    found = []
    behind = []
    for n in range(Scripted.turns[index]):
        function = {"name": "show", "arguments": {"number": n}}
        asked = {"role": "assistant", "content": [], "tool_calls": [{"type": "function", "function": function}]}
        result = {"role": "tool", "name": "show", "content": SHOWN[n]}
        behind += [{"role": "assistant", "content": [{"type": "text", "text": call(number=n)}]}, result]
        surplus = len(media_of([*messages, *behind])) - most
        if surplus > 0:
            found.append((messages, behind[:-1]))
            whole = [*messages, *behind[:-2], asked, result]
            messages = without_first(whole, surplus)
            behind = []
    answer = {"role": "assistant", "content": [{"type": "text", "text": f"The answer is {index} cat"}]}
    return [*found, (messages, [*behind, answer])]


def plain_update(family, draw, most, weights) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """
    Returns what a step at a learning rate of 1 adds to the model, by log-probabilities of plain forwards in float64,
    with the processor's inputs, and the weights of tokens in their sum, and these log-probabilities.
    """
    model, processor = (talking(family)[name] for name in ("model", "processing_class"))
    model = model.double()
    found = []
    total = 0
    for i, row in enumerate(draw.rows):
        logps = []
        ids = []
        for messages, behind in contexts(row, i, most):
            start = encode(processor, messages)["input_ids"].size(1)
            inputs = encode(processor, [*messages, *behind])
            inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
            tokens = inputs["input_ids"][0]
            # What the template writes behind the end of the last turn wasn't sampled
            end = int((tokens == processor.tokenizer.eos_token_id).nonzero()[-1]) + 1
            scores = model(**inputs).logits[0, start - 1 : end - 1].log_softmax(-1)
            logps.append(scores.gather(-1, tokens[start:end, None])[:, 0])
            ids += tokens[start:end].tolist()
        mask = draw.batch["completion_mask"][i].bool()
        assert ids == draw.batch["completion_ids"][i][mask].tolist()
        found.append(torch.cat(logps))
        total += (weights[i][mask] * found[-1]).sum()
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, found


def check_update(result, expected):
    update = {name: result.update[name].double() for name in expected}
    assert norm(update) > 1e-4 and relative_difference(expected, update) <= 1e-4


# What each paper's loss multiplies a token's advantage by where policy and sampler are equal: of `n` completions, of
# this one's tokens, and of all
WEIGHTS = {
    "grpo": lambda n, tokens, total: 1 / (n * tokens),
    "gmpo": lambda n, tokens, total: 1 / (n * tokens),
    "luspo": lambda n, tokens, total: 1 / n,
    "dr_grpo": lambda n, tokens, total: 1 / (n * LONG["max_completion_length"]),
    "cispo": lambda n, tokens, total: 0.2 / total,  # the ratio's bound, `epsilon_high`
    **dict.fromkeys(["dapo", "vespo"], lambda n, tokens, total: 1 / total),
}
# by contexts
PADDED = {"packing": "padded"}
SPLIT = {"max_tokens_per_microbatch": 200}
CASES = [("qwen3_vl", most, "dapo", PADDED) for most in (1, 2)]
CASES += [(family, 1, "dapo", PADDED) for family in ("qwen2_5_omni", "llava", "gemma3", "qwen3_5")]
CASES += [("qwen3_vl", 1, loss, SPLIT) for loss in ("grpo", "gmpo", "luspo", "dr_grpo", "cispo", "vespo")]


@pytest.mark.parametrize(("family", "most", "loss", "other"), slow_but(CASES, CASES[0]))
def test_each_token_is_scored_in_its_context(family, most, loss, other):
    """Also the update is that of plain forwards of each context in float64, by each loss' formula, in all layouts."""
    options = {"family": family, "max_context_media": most, "loss_type": loss}
    results = [train(**options, **way) for way in ({"packing": "prefix"}, other)]
    packed, *_ = moments = [result.trainer.micro_batches[0] for result in results]
    draw = results[0].trainer.draws[0]
    assert [moment.batch.packed for moment in moments] == [True, other is SPLIT]
    assert {len(prompt.contexts) for prompt in draw.batch.prompts} == ({1, 2, 3} if most == 2 else {1, 2, 3, 4})
    mask = draw.batch["completion_mask"].bool()
    sampled = mask * draw.batch["tool_mask"]
    tokens = sampled.sum(1, keepdim=True).double()
    weights = WEIGHTS[loss](len(sampled), tokens, tokens.sum()) * draw.batch["advantages"][:, None] * sampled
    update, logps = plain_update(family, draw, most, weights)
    for result, moment in zip(results, moments, strict=True):
        check_update(result, update)
        assert (moment.logps[mask] - torch.cat(logps)).abs().max() <= 1e-4
        assert (moment.loss - packed.loss).abs() <= 1e-5


class Short(Scripted):
    turns = (1, 2, 3, 4)


class Ahead(AskedAhead, Short):
    """Has the first turns from a server, whose requests are a group each."""

    def __init__(self, trainer):
        super().__init__(trainer, send=self.send)
        self.turn = 1
        self.scripts = {}
        self.n = 8

    def send(self, request, salt, turn, attempt):
        ids = self.encoded(call(number=0))
        return [(ids, [-1.0] * len(ids))] * request.count


@pytest.mark.slow
def test_contexts_behind_turns_that_were_asked_for_ahead():
    options = {"self_check": False, "vllm_importance_sampling_correction": False}
    first, second = (train(sampler=each, **options).trainer.micro_batches[0] for each in (Short, Ahead))
    assert [len(prompt.contexts) for prompt in second.batch.prompts] == [2, 2, 3, 4] * 2
    assert torch.equal(first.batch["completion_ids"], second.batch["completion_ids"])
    assert (first.logps - second.logps).abs().max() <= 1e-5


@pytest.mark.slow
def test_contexts_of_completions_without_a_gradient_are_not_forwarded():
    def reward(completion_ids, **kwargs):
        return [1.0] * 4 + [float(i % 2) for i in range(4)]

    every, some = (train(trainer, reward=reward) for trainer in (Recorded, MultimodalGRPOTrainer))
    assert (logged(every, "packing/skipped_frac"), logged(some, "packing/skipped_frac")) == ([0], [0.5])
    assert norm(every.update) > 1e-3 and relative_difference(every.update, some.update) <= 1e-4


class Album:
    """Shows pictures, and rewards each turn."""

    def reset(self, image, **row):
        self.n = 0

    def show(self, number: int) -> list:
        """
        Shows something.

        Args:
            number: Which one.
        """
        self.n += 1
        return SHOWN[number]

    def get_reward(self) -> list[float]:
        return [0.25] * self.n + [1.0]


PICTURE = image(56, 56, 9)


class Summary(Album):
    """Keeps what was said apart from the last one, and changes what it was given."""

    def get_context(self, messages):
        messages[-1]["content"] = ""
        messages[0]["content"][:] = messages[0]["content"][-1:]
        text = {"type": "text", "text": f"Seen: {self.n}<|im_end|>"}  # a control token, which is left out
        return None if self.n < 2 else [messages[0], {"role": "user", "content": [text, PICTURE]}]


def test_environments_rewrite_contexts():
    result = train(environment=Summary)
    batch = result.trainer.draws[0].batch
    assert [len(prompt.contexts) for prompt in batch.prompts] == [max(n, 1) for n in Scripted.turns]
    assert isinstance(batch.prompts[2].contexts[0], Conversation)  # the first result was appended
    assert all(len(media_of(messages)) == 1 for messages in batch.source.messages)
    processor = talking("qwen3_vl")["processing_class"]
    rewritten = batch.source.contexts[4]
    assert [messages[1]["content"][0]["text"] for messages in rewritten] == ["Seen: 2", "Seen: 3", "Seen: 4"]
    texts = [processor.decode(context.input_ids) for context in batch.prompts[4].contexts]
    assert all(f"Seen: {n}" in text for n, text in enumerate(texts[1:], start=2))
    assert norm(result.update) > 1e-3
    # Each turn is known by what it answers
    turns = batch.source.turns
    assert [len(each) for each in turns] == [n + 1 for n in Scripted.turns]
    assert len({each[0].state for each in turns}) == 2  # a prompt of each group
    assert len({each[1].state for each in turns if len(each) > 1}) == 1
    for each, ids, mask in zip(turns, batch["completion_ids"], batch["tool_mask"], strict=True):
        for turn in each:
            assert mask[turn.start : turn.stop].all() and ids[turn.stop - 1] == processor.tokenizer.eos_token_id


@pytest.mark.parametrize(
    "chosen",
    [
        lambda _: [],
        lambda _: "Go on.",
        lambda given: given[:2],
        lambda _: [{"content": "Go on."}],
        lambda given: [{"role": "user"}, *given[1:]],
        lambda given: [*given[:-1], {**given[-1], "content": None}],
    ],
)
def test_contexts_without_a_message_to_answer(chosen):
    forgetful = type("Forgetful", (Album,), {"get_context": lambda self, messages: chosen(messages)})
    problem = "^row 6: `get_context` returned .*, which the assistant can't answer; return"
    with pytest.raises(ValueError, match=problem):
        train(environment=forgetful)


class Engine(Sampler):
    """Takes decoded media, as vLLM does. Every other completion asks for images, which rewrite its context."""

    is_engine = True
    max_length = 4096

    def __call__(self, model, prompts, *, step, config=None, room=None, branches=None):
        self.turn = 0 if room is None else self.turn + 1
        assert all(prompt.decoded for prompt in prompts if prompt.modalities)
        texts = [call(number=1 - i % 2) if self.turn < 2 else "The cat" for i in range(len(prompts))]
        ids = [[*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id] for text in texts]
        return ids, [[-1.0] * len(each) for each in ids]


def test_an_engine_gets_the_media_of_a_prompt_that_others_no_longer_read():
    engine = Engine()
    engine.tokenizer = talking("qwen3_vl")["processing_class"].tokenizer
    trainer = train(objects={"sampler": engine}, sampler=None, self_check=False).trainer
    prompts = trainer.draws[0].batch.prompts
    assert [len(prompt.contexts) for prompt in prompts] == [1, 3] * 4
    assert all(part.decoded == () for prompt in prompts for part in (prompt, *prompt.parts))


@pytest.mark.slow
def test_views_replace_the_media_of_each_context():
    rollout = train(loss_view="blank(kl_coef=0.1)").trainer.micro_batches[0].batch.rollout
    for prompt, view in zip(rollout.prompts, rollout.view.prompts, strict=True):
        for own, other in zip(prompt.contexts, view.contexts, strict=True):
            assert own.input_ids.tolist() == other.input_ids.tolist() and bool(own.modalities) == (own is not other)


@pytest.mark.slow
def test_evaluation_reads_the_last_media():
    n_images = []

    class Counting(Scripted):
        def __call__(self, model, prompts, **options):
            n_images.extend(len(prompt.media.get("image_grid_thw", ())) for prompt in prompts)
            return super().__call__(model, prompts, **options)

    trainer = train(sampler=Counting, max_context_media=None).trainer
    for most in (None, 2):
        n_images.clear()
        args = EvaluationConfig(max_completion_length=1500, max_context_media=most)
        evaluate_trainer(trainer, image_rows(), length_and_sum, args)
        assert max(n_images) == 2 if most else max(n_images) > 2


def test_control_tokens_of_results_stay_as_the_run_allows_them():
    """What the policy wrote is text of another role in a new context, and has none."""
    token = "<|im_start|>"

    class Starting(Scripted):
        turns = (2,)

        def encoded(self, text):
            return super().encoded(f"{token}Look. {text}")

    objects = {"tools": [shows([{"type": "text", "text": token}], SHOWN[0])]}
    result = train(objects=objects, sampler=Starting, special_tokens_in_text="allow", self_check=False)
    (messages,) = result.trainer.draws[0].batch.source.contexts[0]
    assert [token in str(message["content"]) for message in messages[1:]] == [False, True, False, False]


CONTENTS = [["a", "bstr:c", "d"], ["astr:b", "c", "d"], [["a"], "b"], ["a", ["b"]], b"1", "1", 1]
CONTENTS += [image(*size)["image"] for size in ((28, 56), (56, 28))]


def test_states_differ_with_what_was_answered():
    messages = [[{"role": "user", "content": content}] for content in CONTENTS]
    states = [Turn(0, 1, each).state for each in messages]
    assert len({*states}) == len(CONTENTS)
    assert states == [Turn(2, 3, each).state for each in copy.deepcopy(messages)]
