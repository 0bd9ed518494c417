# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Every kind of value at every door: in columns, messages, pairs, answers, prompts of a teacher, tools, environments,
LightRFT's rows, `check` and `evaluate`, a value is a medium, a text, or an error, as one function says.
"""

import base64
import collections
import datetime
import decimal
import functools
import io
import pathlib
import tempfile
import uuid

import numpy as np
import PIL.Image
import pytest
import torch
from helpers.distillation_runs import teacher
from helpers.trainer_utils import length_and_sum, load, make_trainer, text_rows

from trl_multimodal_rft import (
    MultimodalDistillationTrainer,
    MultimodalDPOTrainer,
    MultimodalGRPOTrainer,
    MultimodalKTOTrainer,
    MultimodalSFTTrainer,
    cli,
)
from trl_multimodal_rft.cli.check import RowChecker
from trl_multimodal_rft.data.reading.refs import MediaError, iter_refs
from trl_multimodal_rft.data.reading.rules import DEFAULT_RULES
from trl_multimodal_rft.data.rows.batches import Row
from trl_multimodal_rft.data.rows.columns import read_messages, rows_to_messages
from trl_multimodal_rft.data.rows.values import media_in, read_value
from trl_multimodal_rft.encoding.prompt_encoder import PromptEncoder
from trl_multimodal_rft.evaluation.config import EvaluationConfig
from trl_multimodal_rft.evaluation.evaluator import evaluate
from trl_multimodal_rft.rollout.environments import Environments, as_content


FOLDER = pathlib.Path(tempfile.mkdtemp())
PICTURE = PIL.Image.effect_noise((84, 56), 64).convert("RGB")
PICTURE.save(FOLDER / "a.png")
PNG = (FOLDER / "a.png").read_bytes()
BASE64 = base64.b64encode(PNG).decode()
PIXELS = np.asarray(PICTURE)
SAMPLES = np.sin(np.arange(2000) / 9).astype(np.float32)


class Chart:
    def __repr__(self):
        return "Chart(640x480)"


# By name: the value, what it is, and the modality of what it is or names
VALUES = {
    "PIL": (PICTURE, "medium", "image"),
    "bytes of RGB": (PIXELS, "medium", "image"),
    "floats of a tensor": (torch.rand(3, 56, 84), "medium", "image"),
    "a file": (FOLDER / "a.png", "medium", "image"),
    "contents of a file": (PNG, "medium", "image"),
    "a view of contents": (memoryview(PNG), "medium", "image"),
    "as in Datasets": ({"bytes": PNG, "path": None}, "medium", "image"),
    "as in Datasets, named": ({"bytes": None, "path": str(FOLDER / "a.png")}, "medium", "image"),
    "samples and rate": ({"array": SAMPLES, "sampling_rate": 16000}, "medium", "audio"),
    "as soundfile gives it": ((SAMPLES, 16000), "medium", "audio"),
    "as scipy gives it": ((16000, SAMPLES[None]), "medium", "audio"),
    "a rate of numpy": ((SAMPLES, np.float64(8000)), "medium", "audio"),
    "words": ("What is it?", "text", None),
    "words about a file": ("What is in cat.png", "text", "image"),
    "words with a colon": ("data: 3, 4", "text", None),
    "a long word": ("ACGT" * 60, "text", None),
    "a long word and others": ("ACGT" * 60 + ", a gene", "text", None),  # an ambiguous pattern would never end
    "a name": ("cat.png", "text", "image"),
    "a quoted name": ("'sounds/bark.WAV'\n", "text", "audio"),
    "a name in angles": ("<clip.mp4>", "text", "video"),
    "a URL": ("https://example.org/x/y.jpeg?raw=1", "text", "image"),
    "a URI": (f"data:image/png;base64,{BASE64}", "text", "image"),
    "a URI in capitals": (f"DATA:IMAGE/PNG;BASE64,{BASE64}", "text", "image"),
    "words and a URI": (f"a {{ background: url(data:image/png;base64,{BASE64}) }}", "text", None),
    "a URI and words": (f"data:audio/wav;base64,{BASE64} What is it?", "text", "audio"),
    "words with a slash": ("Yes/No: is cat.png a file", "text", None),
    "a command": ("./run.sh --input a.wav --output b.mp3", "text", "audio"),
    "a comment": ("// Implement a function that returns the sum of all numbers in a list " * 3, "text", None),
    "base64": (BASE64, "text", "image"),
    "base64 in lines": ("\n".join(BASE64[i : i + 76] for i in range(0, len(BASE64), 76)), "text", "image"),
    "an integer": (7, "text", None),
    "a truth": (True, "text", None),
    "a number of numpy": (np.float32(0.5), "text", None),
    "a decimal": (decimal.Decimal("1.50"), "text", None),
    "a day": (datetime.date(2026, 1, 2), "text", None),
    "an id": (uuid.UUID(int=3), "text", None),
    "a small table": (np.arange(6).reshape(2, 3), "text", None),
    "a size": ({"path": "a.csv", "bytes": 1234}, "parts", None),
    "a table": ({"data": "a,b", "format": "csv"}, "parts", None),
    "a deque": (collections.deque([1, "a"]), "parts", None),
    "a range": (range(10**12), "text", None),
    "a dictionary": ({"x": 1, "y": ["a", None]}, "parts", None),
    "a set": ({"a"}, "parts", None),
    "a generator": ((i for i in range(3)), "objection", None),
    "a function": (len, "objection", None),
    "an object": (Chart(), "objection", None),
    "an open file": (io.BytesIO(PNG), "objection", None),
    "an empty picture": (PIL.Image.new("RGB", (0, 5)), "objection", None),
    "an empty array": (np.zeros((0, 8, 3), np.uint8), "objection", None),
    "a mask": (PIXELS > 3, "objection", None),
    "samples without a rate": (SAMPLES, "objection", None),
    "nothing": (None, "nothing", None),
}
ARRAYS = ("an empty array", "a mask", "samples without a rate", "a small table", "a number of numpy")


@pytest.mark.parametrize("name", VALUES)
def test_the_function(name):
    value, kind, modality = VALUES[name]
    reading = read_value(value)
    assert (reading.kind, reading.modality) == (kind, modality)
    assert [*media_in({"a": [value]})] == [("a", reading)] * (kind == "medium" or modality is not None)


# Doors for a medium: what a value becomes in a media column, and in a block of its modality


def as_source(name):
    value, kind, modality = VALUES[name]
    if name in ARRAYS or isinstance(value, str):
        return "medium"  # loaders open a text, and ask an array for its shape
    is_other = modality not in (None, "image")
    return "medium" if kind == "medium" and not is_other else "nothing" if kind == "nothing" else "objection"


def as_prompt(name):
    value, _, modality = VALUES[name]
    is_text = isinstance(value, str) and (modality is None or name in ("words about a file", "a command"))
    return "text" if is_text else "objection"


def as_answer(name):
    return "text" if isinstance(VALUES[name][0], str) else "objection"


def as_result(name):
    value, kind, modality = VALUES[name]
    if isinstance(value, pathlib.Path) or (kind == "medium" and modality is None):
        return "objection"
    return {"parts": "text", "nothing": "text"}.get(kind, kind)


def as_item(name):
    value, _, modality = VALUES[name]
    holds_data = isinstance(value, str) and modality is not None and BASE64[:20] in value
    return "objection" if holds_data else as_result(name)


def user(content):
    return [{"role": "user", "content": content}]


def assistant(content):
    return [{"role": "assistant", "content": content}]


ROW = {"prompt": user("What?"), "completion": assistant("A"), "chosen": assistant("A"), "rejected": assistant("B")}


@functools.cache
def reader(trainer_class):
    rows = {
        MultimodalSFTTrainer: ("prompt", "completion"),
        MultimodalKTOTrainer: ("prompt", "completion", "label"),
        MultimodalDPOTrainer: ("prompt", "chosen", "rejected"),
    }
    columns = rows.get(trainer_class)
    data = text_rows(8)
    options = {"objects": {}, "reward": None}
    if columns is not None:
        full = [ROW | {"label": i % 2 == 0} for i in range(8)]
        data = type(data).from_list([{name: row[name] for name in columns} for row in full])
    elif trainer_class is MultimodalGRPOTrainer:
        options = {}
    else:
        options["objects"] = {"teacher_model": teacher("qwen2_5_vl")}
    return make_trainer(trainer_class, "qwen2_5_vl", data, tempfile.mkdtemp(), **options)._read_row


@functools.cache
def checker():
    model, processor = load("qwen2_5_vl")
    args = cli._parser("check").parse_args(["--dataset_name", "-", "--model_name_or_path", "-"])
    return RowChecker(None, model, processor, args)


def checked(row):
    found = checker()[0, row]
    if found.error:
        raise MediaError(found.error)
    return found


def read_lightrft(row):
    model, processor = load("qwen2_5_vl")
    return PromptEncoder(model, processor, keeps_rendered=True).messages([Row(0, row)])


def shown_by_reset(value):
    class Gallery:
        def reset(self, **row):
            return value

        def look(self) -> str:
            """Looks."""
            return ""

    toolbox = Environments(factory=Gallery)
    _, [messages], [failure] = toolbox.reset_all([user("Go.")], [{}], [0], lambda content, label: content)
    if failure is not None:
        raise failure
    return messages


def content_of(value):
    return as_content(value, "the tool 'x'", "tool 'x'", 0, DEFAULT_RULES)


def prompt(messages):
    return rows_to_messages([{"prompt": messages}])


def image_block(value):
    return user([{"type": "image", "image": value}, {"type": "text", "text": "Hm."}])


DOORS = {
    "a column": (as_source, lambda value: rows_to_messages([{"prompt": "Hm.", "image": value}])),
    "a column of several": (
        as_source,
        lambda value: rows_to_messages([{"prompt": "Hm.", "images": None if value is None else [value]}]),
    ),
    "a block": (as_source, lambda value: read_messages(image_block(value), "prompt", 0)),
    "GRPO's column": (as_source, lambda value: reader(MultimodalGRPOTrainer)(Row(0, {**ROW, "image": value}))),
    "GRPO's prompt": (as_prompt, lambda value: reader(MultimodalGRPOTrainer)(Row(0, {"prompt": user(value)}))),
    "GRPO's text": (as_prompt, lambda value: reader(MultimodalGRPOTrainer)(Row(0, {"prompt": value}))),
    "a system message": (as_prompt, lambda value: prompt([{"role": "system", "content": value}, *user("Hm.")])),
    "a text block": (as_prompt, lambda value: prompt(user([{"type": "text", "text": value}]))),
    "a block of OpenAI": (as_prompt, lambda value: prompt(user([{"type": "input_text", "text": value}]))),
    "a teacher's column": (
        as_source,
        lambda value: reader(MultimodalDistillationTrainer)(Row(0, {"prompt": "Hm.", "teacher_image": value})),
    ),
    "a teacher's prompt": (
        as_prompt,
        lambda value: reader(MultimodalDistillationTrainer)(Row(0, {"prompt": "Hm.", "teacher_prompt": user(value)})),
    ),
    "SFT's column": (as_source, lambda value: reader(MultimodalSFTTrainer)(Row(0, {**ROW, "image": value}))),
    "SFT's prompt": (as_prompt, lambda value: reader(MultimodalSFTTrainer)(Row(0, {**ROW, "prompt": user(value)}))),
    "SFT's completion": (
        as_answer,
        lambda value: reader(MultimodalSFTTrainer)(Row(0, {**ROW, "completion": assistant(value)})),
    ),
    "KTO's column": (
        as_source,
        lambda value: reader(MultimodalKTOTrainer)(Row(0, {**ROW, "image": value, "label": True, "chosen": None})),
    ),
    "KTO's completion": (
        as_answer,
        lambda value: reader(MultimodalKTOTrainer)(Row(0, {**ROW, "completion": assistant(value), "label": True})),
    ),
    "a pair's column": (as_source, lambda value: reader(MultimodalDPOTrainer)(Row(0, {**ROW, "image": value}))),
    "a pair's prompt": (as_prompt, lambda value: reader(MultimodalDPOTrainer)(Row(0, {**ROW, "prompt": user(value)}))),
    "a pair's answer": (
        as_answer,
        lambda value: reader(MultimodalDPOTrainer)(Row(0, {**ROW, "chosen": assistant(value)})),
    ),
    "LightRFT's column": (as_source, lambda value: read_lightrft({"prompt": "Hm.", "image": value})),
    "LightRFT's prompt": (as_prompt, lambda value: read_lightrft({"prompt": user(value)})),
    "a tool": (as_result, content_of),
    "a tool's list": (as_item, lambda value: content_of([value, "as asked"])),
    "an environment": (as_result, lambda value: shown_by_reset(value) if value is not None else "None"),
    "check's prompt": (as_prompt, lambda value: checked({"prompt": user(value)})),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", VALUES)
def test_every_kind_of_value_at_every_door(name, door):
    expect, read = DOORS[door]
    value, kind, _ = VALUES[name]
    if expect is as_source and kind == "parts":
        pytest.skip("the loaders ask lists and dictionaries for what they hold")
    expected = expect(name)
    try:
        result = read(value)
    except (MediaError, ValueError):
        assert expected == "objection"
        return
    refs = [ref for ref in iter_refs(result) if ref.source is not None] if isinstance(result, (list, dict)) else []
    assert ("medium" if refs else "text") == ("text" if expected == "nothing" else expected)


def test_evaluations_ask_before_they_generate():
    model, processor = load("qwen2_5_vl")
    rows = text_rows(4)
    for prompt in ("cat.png", f"data:image/png;base64,{BASE64}"):
        data = [*rows, {"prompt": user(prompt)}]
        line = r"`dataset`: row 4, column 'prompt\[0\].content': the text '.*' is a medium"
        with pytest.raises(MediaError, match=line):
            evaluate(model, processor, data, length_and_sum, args=EvaluationConfig(max_completion_length=2))
