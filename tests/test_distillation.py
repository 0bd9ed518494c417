# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The distillation trainer: TRL's updates on text and images, and those of the equations on audio and video."""

import numpy as np
import PIL.Image
import pytest
from datasets import Dataset
from helpers.distillation_runs import CallingTRL, InjectedOurs, InjectedTRL, by_hand, distill, teacher
from helpers.families import encode
from helpers.samplers import pseudo_random
from helpers.tools import Calling, look_up, with_tools
from helpers.trainer_utils import (
    assert_equal,
    audio_rows,
    image_rows,
    load,
    norm,
    relative_difference,
    text_rows,
    video_rows,
    with_media,
)
from peft import LoraConfig

from trl_multimodal_rft import MultimodalDistillationTrainer


SPLIT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
OPTIONS = {
    "reverse": {},
    "forward": {"beta": 0.0},
    "jsd": {"beta": 0.5},
    "temperature": {"beta": 0.3, "temperature": 0.7},
    "accumulation": {**SPLIT, "beta": 0.5},
    "checkpointing": {**SPLIT, "gradient_checkpointing": True},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 6},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows", [text_rows, image_rows])
def test_packed_equals_trl(rows, name):
    """Losses, updates and metrics."""
    runs = []
    for trainer_class in (InjectedTRL, InjectedOurs):
        options = dict(OPTIONS[name])
        if name == "evaluated":
            options["objects"] = {"eval_dataset": rows(6)}
        if trainer_class is InjectedOurs:
            options["keep_groups_together"] = False
        runs.append(distill(trainer_class, "qwen2_5_vl", rows(), **options))
    assert all(runs[1].trainer.scored_packed)
    assert_equal(*runs)


KINDS = {
    "audio": ("qwen2_audio", audio_rows),
    "video": ("qwen2_5_vl", video_rows),
    "image": ("qwen2_5_vl", image_rows),
}


def blank(medium, kind):
    if kind == "audio":
        return {**medium, "array": 0 * medium["array"]}
    grey = np.full_like(np.asarray(medium), 128)
    return grey if kind == "video" else PIL.Image.fromarray(grey)


def content(row, kind, question=None, blanked=False):
    """Returns a row's turn of the user."""
    medium = blank(row[kind], kind) if blanked else row[kind]
    block = {"type": kind, kind: medium["array"] if kind == "audio" else medium}
    return [block, {"type": "text", "text": question or row["prompt"][0]["content"]}]


def one_step(kind, n_rows=2, objects=None, **options):
    """Returns a step on 4 completions of each of some rows, and what it made of weights and metrics."""
    family, rows = KINDS[kind]
    options = {"max_steps": 1, "learning_rate": 1.0, **options}
    return distill(InjectedOurs, family, rows(n_rows), objects, **options)


def completions_of(run, kind, contents):
    """Returns what the sampler gave for prompts of which each is completed 4 times."""
    prompts = [encode_ids(run.trainer.processing_class, each) for each in contents for _ in range(4)]
    return pseudo_random(prompts, 0, True, run.trainer._tokenizer)


def encode_ids(processor, content):
    return encode(processor, [{"role": "user", "content": content}])["input_ids"][0].tolist()


def expected(run, kind, contents, *, read=None, teaches=None, **options):
    """Returns the loss, the entropy and the gradients of a step by the equations."""
    family, _ = KINDS[kind]
    student, processor = load(family)
    ids = completions_of(run, kind, contents)
    four = [each for each in contents for _ in range(4)]
    read = [each for each in read or contents for _ in range(4)]
    return by_hand(student, teaches or teacher(family), processor, four, ids, read=read, **options)


def assert_step(run, loss, entropy, gradients):
    logs = run.history[0]
    assert logs["loss"] == pytest.approx(loss, rel=1e-4) and logs["entropy"] == pytest.approx(entropy, rel=1e-4)
    update = {name: run.update[name] for name in gradients}
    rate = run.trainer.args.learning_rate
    assert relative_difference({name: -rate * value for name, value in gradients.items()}, update) <= 1e-5
    assert loss > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_update_is_that_of_the_equations(kind):
    """With a teacher of its own, packed."""
    run = one_step(kind, beta=0.5, temperature=0.8)
    assert all(run.trainer.scored_packed)
    contents = [content(row, kind) for row in KINDS[kind][1](2)]
    assert_step(run, *expected(run, kind, contents, beta=0.5, temperature=0.8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["teacher_view", "student_view"])
def test_student_is_its_own_teacher_under_a_view(kind, side):
    run = one_step(kind, objects={"teacher_model": None}, **{side: "blank"})
    rows = KINDS[kind][1](2)
    clean, blanked = ([content(row, kind, blanked=each) for row in rows] for each in (False, True))
    seen, read = (clean, blanked) if side == "teacher_view" else (blanked, clean)
    itself, _ = load(KINDS[kind][0])
    assert_step(run, *expected(run, kind, seen, read=read, teaches=itself, beta=1.0))


@pytest.mark.parametrize("kind", ["audio", "image"])
def test_teacher_reads_a_privileged_prompt(kind):
    """Which is longer than the student's, of one row, and under a view."""
    family, rows = KINDS[kind]
    questions = ["Is there a bird? The answer is cat, and no dog.", None]
    messages = [None if each is None else [{"role": "user", "content": each}] for each in questions]
    given = rows(2)
    medium = [given[i][kind] for i in range(2)]
    told = Dataset.from_list([{"prompt": given[i]["prompt"], "teacher_prompt": messages[i]} for i in range(2)])
    told = with_media(told, kind, medium)
    options = {"max_steps": 1, "beta": 0.0, "teacher_view": "blank", "learning_rate": 1.0}
    run = distill(InjectedOurs, family, told, {"teacher_model": None}, **options)
    seen = [content(row, kind) for row in told]
    read = [content(row, kind, question, blanked=True) for row, question in zip(told, questions, strict=True)]
    itself, _ = load(family)
    assert_step(run, *expected(run, kind, seen, read=read, teaches=itself, beta=0.0))


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.mark.parametrize("weights", ["current", "base"])
def test_own_teacher_of_an_adapter(weights):
    """The teacher has the adapter, or is the model that it starts from."""
    rows = KINDS["image"][1](2)
    objects = {"teacher_model": None, "peft_config": LORA}
    options = {"objects": objects, "teacher_view": "blank", "self_teacher": weights, "max_steps": 2}
    run = distill(InjectedOurs, "qwen2_5_vl", rows, learning_rate=0.0, **options)
    clean, blanked = ([content(row, "image", blanked=each) for row in rows] for each in (False, True))
    student = run.trainer.accelerator.unwrap_model(run.trainer.model).eval()
    teaches = student if weights == "current" else load("qwen2_5_vl")[0]
    ids = completions_of(run, "image", clean)
    four = [[each for each in given for _ in range(4)] for given in (clean, blanked)]
    processor = run.trainer.processing_class
    loss, entropy, gradients = by_hand(student, teaches, processor, four[0], ids, read=four[1], beta=1.0)
    assert run.history[0]["loss"] == pytest.approx(loss, rel=1e-4)
    assert run.history[0]["grad_norm"] == pytest.approx(norm(gradients), rel=1e-4)
    assert all("lora" in name for name in gradients)


def test_parts_of_a_token_budget_change_nothing():
    whole, parts = (one_step("audio", beta=0.5, max_tokens_per_microbatch=budget) for budget in (None, 60))
    assert parts.history[0]["token_budget/parts"] > 1
    assert_equal(whole, parts, same_metrics=False)
    assert parts.history[0]["loss"] == pytest.approx(whole.history[0]["loss"], rel=1e-5)


def test_padded_rows_change_nothing():
    packed, padded = (one_step("audio", beta=0.5, packing=each) for each in ("prefix", "padded"))
    assert all(packed.trainer.scored_packed) and not any(padded.trainer.scored_packed)
    assert_equal(packed, padded)


def test_top_k_over_all_tokens_is_the_whole_divergence():
    """And over fewer, another update."""
    size = load("qwen2_audio")[0].config.get_text_config().vocab_size
    whole, everything, few = (one_step("audio", beta=0.5, loss_top_k=k) for k in (0, size, 4))
    assert_equal(whole, everything, tolerance=1e-3)
    assert few.history[0]["loss"] < whole.history[0]["loss"]
    assert relative_difference(whole.update, few.update) > 0.1


def test_several_updates_of_a_generation_batch():
    """Each has the mean over its own share of the tokens, whichever those of the batch are."""
    rows = image_rows(4)
    at_once = distill(InjectedOurs, "qwen2_5_vl", rows, per_device_train_batch_size=16, max_steps=1)
    split = distill(
        InjectedOurs,
        "qwen2_5_vl",
        rows,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        learning_rate=0.0,
    )
    # Over both updates, the shares add up
    losses = [logs["loss"] for logs in split.history if "loss" in logs]
    assert sum(losses) / 2 == pytest.approx(at_once.history[0]["loss"], rel=1e-4)


CALLS = {"max_completion_length": 200, "generation_kwargs": {"max_new_tokens": 8, "suppress_tokens": list(range(9))}}


def test_tools_work_as_in_trl():
    """Tokens of their results don't count in the divergence."""
    objects = with_tools(tools=[look_up], teacher_model=teacher("qwen3_vl"))
    theirs = distill(CallingTRL, "qwen3_vl", text_rows(), objects, **CALLS)
    objects = with_tools(tools=[look_up], teacher_model=teacher("qwen3_vl"))
    options = {**CALLS, "keep_groups_together": False, "sampler": Calling}
    ours = distill(MultimodalDistillationTrainer, "qwen3_vl", text_rows(), objects, **options)
    assert theirs.history[0]["tools/call_frequency"] == 0.5
    assert_equal(theirs, ours)
