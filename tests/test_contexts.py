# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Contexts that are rewritten in a completion: scores equal the model's forward of each as its processor has it."""

import copy
import functools

import pytest
import torch
from helpers.ahead import Ahead as AskedAhead
from helpers.chats import image
from helpers.families import encode
from helpers.tools import Scripted, call, shows, talking
from helpers.trainer_utils import (
    Recording,
    audio_rows,
    image_rows,
    length_and_sum,
    logged,
    make_trainer,
    norm,
    relative_difference,
    run,
)

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.algorithms.losses import LOSSES
from trl_multimodal_rft.encoding.conversations import Conversation
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate_trainer
from trl_multimodal_rft.rollout.rollout import Turn
from trl_multimodal_rft.rollout.samplers import Sampler


class Recorded(Recording, MultimodalGRPOTrainer):
    pass


TEXT = {"type": "text", "text": "Is there a cat?"}
SHOWN = [[image(56, 84, 0), TEXT], [TEXT], [image(84, 56, 1), image(56, 56, 2)], [TEXT, image(56, 56, 3)]]
# The update is the gradient
LONG = {"max_completion_length": 1500, "max_steps": 1, "self_check": True, "learning_rate": 1.0}


@functools.cache
def train(family="qwen3_vl", most=1, trainer=Recorded, **options):
    objects = {**talking(family), "tools": [shows(*SHOWN)]}
    rows = audio_rows() if family == "qwen2_5_omni" else image_rows()
    return run(trainer, family, rows, objects=objects, sampler=Scripted, max_context_media=most, **LONG, **options)


def n_media(messages) -> int:
    return sum(block["type"] != "text" for message in messages for block in message["content"] or () if block != TEXT)


def without_first(messages, n):
    """Returns messages without their first media."""
    kept = []
    for message in messages:
        content = []
        for block in message["content"]:
            is_medium = block["type"] != "text"
            content += [] if is_medium and n > 0 else [block]
            n -= is_medium
        kept.append({**message, "content": content})
    return kept


def contexts(row, index, most):
    """
    Returns the contexts of a completion as messages, each with the texts behind it: what was sampled, and, as long as
    no medium is too many, what tools returned.
    """
    own = [{"type": kind, kind: row[kind]} for kind in ("image", "audio") if row.get(kind) is not None]
    own = [{**each, "audio": each["audio"]["array"]} if each["type"] == "audio" else each for each in own]
    messages = [{"role": "user", "content": [*own, {"type": "text", "text": row["prompt"][0]["content"]}]}]
    found, behind = [], []
    for n in range(Scripted.turns[index]):
        function = {"name": "show", "arguments": {"number": n}}
        asked = {"role": "assistant", "content": [], "tool_calls": [{"type": "function", "function": function}]}
        result = {"role": "tool", "name": "show", "content": SHOWN[n]}
        behind += [{"role": "assistant", "content": [{"type": "text", "text": call(number=n)}]}, result]
        surplus = n_media([*messages, *behind]) - most
        if surplus > 0:
            found.append((messages, behind[:-1]))
            whole = [*messages, *behind[:-2], asked, result]
            messages, behind = without_first(whole, surplus), []
    answer = {"role": "assistant", "content": [{"type": "text", "text": f"The answer is {index} cat"}]}
    return [*found, (messages, [*behind, answer])]


def truth(model, processor, row, index, most) -> tuple[torch.Tensor, list[int]]:
    """Returns log-probabilities of a completion, and its ids, from the processor and the model."""
    logps, ids = [], []
    for messages, behind in contexts(row, index, most):
        start = encode(processor, messages)["input_ids"].size(1)
        inputs = encode(processor, [*messages, *behind])
        inputs = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        tokens = inputs["input_ids"][0]
        # What the template writes behind the end of the last turn wasn't sampled
        end = int((tokens == processor.tokenizer.convert_tokens_to_ids("<|im_end|>")).nonzero()[-1]) + 1
        scores = model(**inputs).logits[0, start - 1 : end - 1].log_softmax(-1)
        logps.append(scores.gather(-1, tokens[start:end, None])[:, 0])
        ids += tokens[start:end].tolist()
    return torch.cat(logps), ids


def plain_update(family, draw, most, weights) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """
    Returns what a step at a learning rate of 1 adds to the model, by log-probabilities of plain forwards in float64
    and the weights of tokens in their sum, and these log-probabilities.
    """
    model, processor = (talking(family)[name] for name in ("model", "processing_class"))
    model, found, total = model.double(), [], 0
    for i, row in enumerate(draw.rows):
        logps, ids = truth(model, processor, row, i, most)
        mask = draw.batch["completion_mask"][i].bool()
        assert ids == draw.batch["completion_ids"][i][mask].tolist()
        found, total = [*found, logps.detach()], total + (weights[i][mask] * logps).sum()
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, found


def check_update(result, expected):
    update = {name: result.update[name].double() for name in expected}
    assert norm(update) > 1e-4 and relative_difference(expected, update) <= 1e-4


CASES = [
    ("qwen3_vl", 1),
    pytest.param("qwen3_vl", 2, marks=pytest.mark.slow),
    pytest.param("qwen3_vl", 0, marks=pytest.mark.slow),
    pytest.param("qwen2_5_omni", 1, marks=pytest.mark.slow),
    pytest.param("llava", 1, marks=pytest.mark.slow),
    pytest.param("gemma3", 1, marks=pytest.mark.slow),
    pytest.param("qwen3_5", 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "most"), CASES)
def test_each_token_is_scored_in_its_context(family, most):
    """Also the update is that of plain forwards of each context in float64, by the formula of the loss."""
    packed, padded = (train(family, most, packing=packing) for packing in ("prefix", "padded"))
    draw = packed.trainer.draws[0]
    assert draw.batch.packed and not padded.trainer.draws[0].batch.packed
    assert {len(prompt.contexts) for prompt in draw.batch.prompts} == ({1, 2, 3} if most == 2 else {1, 2, 3, 4})
    in_loss = draw.batch["completion_mask"].bool() & draw.batch["tool_mask"].bool()
    # GRPO's gradient at a ratio of 1; a completion counts by its tokens, as `loss_type="dapo"` has it
    weights = draw.batch["advantages"][:, None] * in_loss / in_loss.sum()
    update, logps = plain_update(family, draw, most, weights)
    for result in (packed, padded):
        check_update(result, update)
        for found, expected, mask in zip(
            result.trainer.micro_batches[0].logps, logps, draw.batch["completion_mask"].bool(), strict=True
        ):
            assert (found[mask] - expected).abs().max() <= 1e-4
    assert packed.trainer.micro_batches[0].gradient[~in_loss].abs().max() == 0


# What each paper's loss multiplies a token's advantage by where policy and sampler are equal: of `n` completions, of
# this one's tokens, and of all
WEIGHTS = {
    "grpo": lambda n, tokens, total: 1 / (n * tokens),
    "sapo": lambda n, tokens, total: 1 / (n * tokens),
    "gmpo": lambda n, tokens, total: 1 / (n * tokens),
    "luspo": lambda n, tokens, total: 1 / n,
    "dr_grpo": lambda n, tokens, total: 1 / (n * LONG["max_completion_length"]),
    "cispo": lambda n, tokens, total: 0.2 / total,  # the ratio's bound, `epsilon_high`
    **dict.fromkeys(["dapo", "bnpo", "vespo", "cpgd", "dual_clip"], lambda n, tokens, total: 1 / total),
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_completion_counts_as_one_in_every_loss(loss):
    """Each loss' gradient is that of plain forwards of each context, and a budget, which splits by contexts, too."""
    whole, parts = (train(loss_type=loss, max_tokens_per_microbatch=n) for n in (None, 200))
    batch = whole.trainer.draws[0].batch
    sampled = batch["completion_mask"] * batch["tool_mask"]
    tokens = sampled.sum(1, keepdim=True).double()
    weights = WEIGHTS[loss](len(sampled), tokens, tokens.sum()) * batch["advantages"][:, None] * sampled
    update, _ = plain_update("qwen3_vl", whole.trainer.draws[0], 1, weights)
    for result in (whole, parts):
        check_update(result, update)
    a, b = (result.trainer.micro_batches[0] for result in (whole, parts))
    assert (a.loss - b.loss).abs() <= 1e-5 and a.logps.shape == b.logps.shape == a.batch["completion_ids"].shape


class Short(Scripted):
    turns = (1, 2, 3, 4)


class Ahead(AskedAhead, Short):
    """Has the first turns from a server, whose requests are a group each."""

    def __init__(self, trainer):
        super().__init__(trainer, send=self.send)
        self.turn, self.scripts, self.n = 1, {}, 8

    def send(self, request, salt, turn, attempt):
        ids = self.encoded(call(number=0))
        return [(ids, [-1.0] * len(ids))] * request.count


@pytest.mark.slow
def test_contexts_behind_turns_that_were_asked_for_ahead(tmp_path):
    options = {**LONG, "self_check": False, "max_context_media": 1, "vllm_importance_sampling_correction": False}
    now, later = ({**options, "objects": {**talking("qwen3_vl"), "tools": [shows(*SHOWN)]}} for _ in range(2))
    now = run(Recorded, "qwen3_vl", image_rows(), sampler=Short, **now)
    ahead = make_trainer(Recorded, "qwen3_vl", image_rows(), tmp_path, **later)
    ahead.sampler = Ahead(ahead)
    ahead.train()
    first, second = (trainer.micro_batches[0] for trainer in (now.trainer, ahead))
    assert [len(prompt.contexts) for prompt in second.batch.prompts] == [2, 2, 3, 4] * 2
    assert torch.equal(first.batch["completion_ids"], second.batch["completion_ids"])
    assert (first.logps - second.logps).abs().max() <= 1e-5


@pytest.mark.slow
def test_contexts_of_completions_without_a_gradient_are_not_forwarded():
    def reward(completion_ids, **kwargs):
        return [1.0] * 4 + [float(i % 2) for i in range(4)]

    every, some = (train(trainer=trainer, reward=reward) for trainer in (Recorded, MultimodalGRPOTrainer))
    assert (logged(every, "packing/skipped_frac"), logged(some, "packing/skipped_frac")) == ([0], [0.5])
    assert norm(every.update) > 1e-3 and relative_difference(every.update, some.update) <= 1e-4


PICTURE = image(56, 56, 9)


class Album:
    """Shows pictures, and keeps what was said apart from the last one."""

    def reset(self, image, **row):
        self.n = 0

    def show(self, number: int) -> list:
        """
        Shows something.

        Args:
            number: Which one.
        """
        self.n += 1
        return self._shown(number)

    def _shown(self, number):
        return SHOWN[number]

    def get_context(self, messages):
        text = {"type": "text", "text": f"Seen: {self.n}"}
        return None if self.n < 2 else [messages[0], {"role": "user", "content": [text, PICTURE]}]

    def get_reward(self) -> float:
        return float(self.n)


def test_environments_rewrite_contexts():
    objects = {**talking("qwen3_vl"), "environment_factory": Album}
    result = run(Recorded, "qwen3_vl", image_rows(), reward=None, objects=objects, sampler=Scripted, **LONG)
    batch = result.trainer.draws[0].batch
    assert [len(prompt.contexts) for prompt in batch.prompts] == [max(n, 1) for n in Scripted.turns]
    assert isinstance(batch.prompts[2].contexts[0], Conversation)  # the first result was appended
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
    "chosen", [lambda _: [], lambda _: "Go on.", lambda given: given[:2], lambda _: [{"content": "Go on."}]]
)
def test_contexts_without_a_message_to_answer(chosen):
    forgetful = type("Forgetful", (Album,), {"get_context": lambda self, messages: chosen(messages)})
    objects = {**talking("qwen3_vl"), "environment_factory": forgetful}
    with pytest.raises(
        ValueError, match="^row 6: `get_context` returned .*, which the assistant can't answer; return"
    ):
        run(Recorded, "qwen3_vl", image_rows(), reward=None, objects=objects, sampler=Scripted, **LONG)


class EveryOther(Album):
    """Shows a picture to every other completion of a group, whose context that rewrites."""

    made = 0

    def __init__(self):
        self.place = EveryOther.made
        EveryOther.made += 1

    def _shown(self, number):
        return [TEXT, *SHOWN[0][:1]] if self.place % 2 else [TEXT]

    def get_context(self, messages):
        return None


class Engine(Sampler):
    """Takes decoded media, as vLLM does, and lists the rows of prompts that come without."""

    is_engine, max_length = True, 4096

    def __call__(self, model, prompts, *, step, config=None, room=None, branches=None):
        self.turn = 0 if room is None else self.turn + 1
        self.lost = [prompt.row for prompt in prompts if prompt.modalities and not prompt.decoded]
        text = call(number=self.turn) if self.turn < 2 else "The cat"
        ids = [[*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id] for _ in prompts]
        assert not self.lost
        return ids, [[-1.0] * len(each) for each in ids]


def test_an_engine_gets_the_media_of_a_prompt_that_others_no_longer_read(tmp_path):
    EveryOther.made, engine = 0, Engine()
    objects = {**talking("qwen3_vl"), "environment_factory": EveryOther, "sampler": engine}
    options = {**LONG, "self_check": False, "max_context_media": 1, "reward": None, "objects": objects}
    trainer = make_trainer(Recorded, "qwen3_vl", image_rows(), tmp_path, **options)
    engine.tokenizer = trainer.processing_class.tokenizer
    trainer.train()
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
def test_evaluation_reads_the_last_media(tmp_path):
    objects, n_images = {**talking("qwen3_vl"), "tools": [shows(*SHOWN)]}, []

    class Counting(Scripted):
        def __call__(self, model, prompts, **options):
            n_images.extend(len(prompt.media.get("image_grid_thw", ())) for prompt in prompts)
            return super().__call__(model, prompts, **options)

    trainer = make_trainer(Recorded, "qwen3_vl", image_rows(), tmp_path, objects=objects, sampler=Counting, **LONG)
    for most in (None, 2):
        args = EvaluationConfig(max_completion_length=1500, max_context_media=most)
        evaluate_trainer(trainer, image_rows(), length_and_sum, args)
        assert max(n_images) == 2 if most else max(n_images) > 2
        n_images.clear()


def test_control_tokens_of_results_stay_as_the_run_allows_them():
    """What the policy wrote is text of another role in a new context, and has none."""
    token = "<|im_start|>"

    class Starting(Scripted):
        turns = (2,)

        def encoded(self, text):
            return super().encoded(f"{token}Look. {text}")

    objects = {**talking("qwen3_vl"), "tools": [shows([{"type": "text", "text": token}], SHOWN[0])]}
    options = {**LONG, "max_context_media": 1, "special_tokens_in_text": "allow", "self_check": False}
    result = run(Recorded, "qwen3_vl", image_rows(), objects=objects, sampler=Starting, **options)
    (messages,) = result.trainer.draws[0].batch.source.contexts[0]
    assert [token in str(message["content"]) for message in messages[1:]] == [False, True, False, False]


MESSAGES = [
    [{"role": "user", "content": ["a", "bstr:c", "d"]}],
    [{"role": "user", "content": ["astr:b", "c", "d"]}],
    [{"role": "user", "content": [["a"], "b"]}],
    [{"role": "user", "content": ["a", ["b"]]}],
    [{"role": "user", "content": b"1"}],
    [{"role": "user", "content": "1"}],
    [{"role": "user", "content": 1}],
    [{"role": "user", "content": image(28, 56)["image"]}],
    [{"role": "user", "content": image(56, 28)["image"]}],
]


def test_states_differ_with_what_was_answered():
    assert len({Turn(0, 1, messages).state for messages in MESSAGES}) == len(MESSAGES)
    again = [Turn(2, 3, copy.deepcopy(messages)).state for messages in MESSAGES]
    assert again == [Turn(0, 1, messages).state for messages in MESSAGES]
