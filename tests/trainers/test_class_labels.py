# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Class labels are names where texts are read and in rewards of this package, and numbers in rewards of one's own."""

import logging
import re
from functools import partial

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Sequence, load_dataset
from helpers.chats import image
from helpers.trainer_utils import load, make_trainer, saved

from trl_multimodal_rft import (
    MultimodalDPOTrainer,
    MultimodalGRPOTrainer,
    MultimodalKTOTrainer,
    MultimodalPPOTrainer,
    MultimodalRewardTrainer,
    MultimodalSFTTrainer,
)
from trl_multimodal_rft.cli.arguments import parse
from trl_multimodal_rft.cli.commands import grpo
from trl_multimodal_rft.cli.inputs import load_split
from trl_multimodal_rft.cli.templates import with_texts
from trl_multimodal_rft.data.rows.batches import DatasetRows
from trl_multimodal_rft.data.rows.labels import with_class_names
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.extras import filter
from trl_multimodal_rft.extras.prepare.layouts import load_conversations
from trl_multimodal_rft.rewards import accuracy_reward, apply_recipe
from trl_multimodal_rft.rewards.calls import checked_reward


DIGIT = ClassLabel(names=["one", "seven", "zero"])
NAMES = ["seven", "zero", None, "one"]


def labelled(columns=("label",), nested=(), **others):
    """Returns rows whose columns have the classes of `NAMES`, or for `nested` ones lists of them."""
    numbers = [-1 if name is None else DIGIT.str2int(name) for name in NAMES]
    cells = {**dict.fromkeys(columns, numbers), **{name: [[number] for number in numbers] for name in nested}}
    rows = Dataset.from_dict({**cells, **others})
    lists = {name: (List if i % 2 else Sequence)(DIGIT) for i, name in enumerate(nested)}
    return rows.cast(Features({**rows.features, **dict.fromkeys(columns, DIGIT), **lists}))


@pytest.mark.parametrize("form", ["rows", "selected", "stream", "splits", "torch"])
def test_names_in_all_forms_of_a_dataset(form):
    rows = labelled(["a"], [] if form == "torch" else ["b", "c"], n=[1, 2, 3, 4])
    forms = {"selected": rows.select([0, 1, 2, 3][::-1]).select([3, 2, 1, 0]), "stream": rows.to_iterable_dataset()}
    forms |= {"splits": DatasetDict(train=rows), "torch": rows.with_format("torch")}
    named = with_class_names(forms.get(form, rows))
    named = named["train"] if form == "splits" else named
    assert [*named][0].keys() == rows.features.keys()
    assert [row["a"] for row in named] == NAMES and [row["n"] for row in named] == [1, 2, 3, 4]
    if form != "torch":
        assert [row["b"] + row["c"] for row in named] == [[name] * 2 for name in NAMES]


def test_rows_without_features_stay_the_same():
    rows = labelled()
    for unchanged in ([{"label": 1}], rows.with_transform(lambda batch: batch), rows.remove_columns("label")):
        assert with_class_names(unchanged) is unchanged
    assert with_class_names(rows, ["other"]) is rows


@pytest.mark.parametrize("form", ["rows", "stream"])
def test_templates_write_names(form):
    rows = labelled(n=[1, 2, 3, 4]).select([0, 1, 3])
    rows = rows if form == "rows" else rows.to_iterable_dataset()
    filled = [*with_texts(rows, {"prompt": "{n}?", "completion": "It's {label}.", "solution": "{label}"})]
    assert [row["solution"] for row in filled] == ["seven", "zero", "one"]
    assert filled[0]["completion"] == "It's seven." and [row["label"] for row in filled] == [1, 2, 0]


def test_template_of_a_missing_class_names_the_row():
    with pytest.raises(ValueError, match="row 2, column 'label': it is NoneType, but `--solution`"):
        with_texts(labelled(), {"solution": "{label}"})


@pytest.mark.parametrize(
    ("trainer_class", "column"),
    [
        (MultimodalSFTTrainer, "completion"),
        (MultimodalSFTTrainer, "text"),
        (MultimodalKTOTrainer, "completion"),
        (MultimodalDPOTrainer, "chosen"),
        (MultimodalRewardTrainer, "rejected"),
    ],
)
@pytest.mark.parametrize("form", ["rows", "stream"])
def test_trainers_of_completions_learn_names(trainer_class, column, form, tmp_path):
    columns = {name: [name] * 4 for name in ("prompt", "completion", "chosen", "rejected")}
    needed = {"completion": ["prompt", "completion"], "text": ["text"]}.get(column, ["prompt", "chosen", "rejected"])
    more = {"label": [True, False] * 2} if trainer_class is MultimodalKTOTrainer else {}
    rows = labelled([column], **{name: columns[name] for name in needed if name != column}, **more)
    rows = rows.select([0, 1, 3, 0])
    model = {"objects": {"model": str(saved("qwen2_5_vl"))}} if trainer_class is MultimodalRewardTrainer else {}
    options = {"reward": None, "self_check": False, "per_device_train_batch_size": 4, **model}
    dataset = rows if form == "rows" else rows.to_iterable_dataset()
    trainer = make_trainer(trainer_class, "qwen2_5_vl", dataset, tmp_path, **options)
    (batch, *_) = trainer.get_train_dataloader()
    texts = []
    for sequence in batch["sequences"]:
        answers = [token for side in getattr(sequence, "sides", ()) for token in side.ids]
        texts.append(trainer.processing_class.decode([*sequence.input_ids.tolist(), *answers]))
    assert {name for text in texts for name in re.findall("one|seven|zero|[0-9]", text)} == {"one", "seven", "zero"}


def own(completions, label, **kwargs):
    return [float(number) for number in label]


def test_each_reward_gets_its_own(tmp_path, caplog):
    """Also under a recipe, in which labels choose the function, and with settings."""
    arguments = {"prompts": ["?"] * 4, "completions": ["It is \\boxed{seven}."] * 4}
    solutions = DatasetRows(labelled(["solution", "label"], ["choices"])).__getitems__([0, 1, 2, 3])
    columns = {name: [row[name] for row in solutions] for name in ("solution", "label")}
    assert checked_reward(accuracy_reward)(**arguments, **columns) == [1.0, 0.0, None, 0.0]
    assert checked_reward(accuracy_reward)(**arguments, solution=[row["choices"] for row in solutions])[0] == 1.0
    recipe = {name: [("rule", "own", 1.0), ("rule", "right", 1.0)] for name in ("seven", "zero", "one", None)}
    functions = apply_recipe({"own": own, "right": partial(accuracy_reward)}, recipe, label_column="label")
    with caplog.at_level(logging.WARNING):
        rewards = [checked_reward(function)(**arguments, **columns) for function in functions]
    assert rewards == [[1.0, 2.0, -1.0, 0.0], [1.0, 0.0, None, 0.0]]
    (warning,) = [record.message for record in caplog.records if "ClassLabel" in record.message]
    assert "'own' gets the column 'label' as the numbers" in warning and "int2str" in warning


def test_plain_numbers_stay_numbers():
    seen = []
    spy = checked_reward(lambda completions, n, **kwargs: seen.extend(n) or [0.0])
    spy(prompts=["?"], completions=["a"], n=[3])
    assert seen == [3] and type(seen[0]) is int


RUNS = [(MultimodalGRPOTrainer, "rows"), (MultimodalGRPOTrainer, "stream"), (MultimodalPPOTrainer, "rows")]


@pytest.mark.parametrize(("trainer_class", "form"), RUNS)
def test_trainers_with_rewards_pass_names_and_numbers(trainer_class, form, tmp_path, caplog):
    seen = []

    def spy(completions, **kwargs):
        seen.extend(kwargs["solution"])
        return [0.0] * len(completions)

    spy.__name__ = f"spy_of_{trainer_class.__name__}_and_{form}"  # the warning is told once in a process
    rows = labelled(["solution"], prompt=["Which digit?"] * 4, image=[image(56, 56)["image"]] * 4)
    dataset = rows if form == "rows" else rows.to_iterable_dataset()
    options = {"reward": [accuracy_reward, spy], "max_steps": 2, "max_completion_length": 2}
    with caplog.at_level(logging.WARNING):
        make_trainer(trainer_class, "qwen2_5_vl", dataset, tmp_path, **options).train()
    assert {*seen} <= {1, 2, -1, 0} and -1 in seen and {*map(type, seen)} == {int}
    assert len([record for record in caplog.records if "ClassLabel" in record.message]) == 1


def test_evaluation_records_names():
    rows = labelled(["solution", "label"], prompt=["Which digit?"] * 4)
    model, processor = load("qwen2_5_vl")
    args = EvaluationConfig(max_completion_length=2, group_by="label", batch_size=4)
    result = evaluate(model, processor, rows, accuracy_reward, args)
    assert [row["label"] for row in result.rows] == NAMES == [row["solution"] for row in result.rows]
    assert {"accuracy/seven", "accuracy/zero"} <= result.metrics.keys()


def test_prepare_writes_names(tmp_path):
    chats = [[{"from": "human", "value": "Which digit?"}, {"from": "gpt", "value": "seven"}]] * 4
    labelled(["kind"], ["kinds"], conversations=chats).to_parquet(tmp_path / "rows.parquet")
    rows = load_conversations(tmp_path / "rows.parquet")
    assert [row["kind"] for row in rows] == NAMES and [row["kinds"] for row in rows] == [[name] for name in NAMES]


def test_folder_of_classes_from_a_shell(tmp_path, monkeypatch):
    for i, name in enumerate(["one", "seven"] * 4):
        (tmp_path / "digits" / name).mkdir(parents=True, exist_ok=True)
        image(56, 56, seed=i)["image"].save(tmp_path / "digits" / name / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    words = ["--dataset_name", "digits", "--prompt", "Which digit?", "--solution", "{label}"]
    script_args, *_ = parse(grpo.ARGUMENTS, [*words, "--output_dir", "out", "--use_cpu", "--bf16", "False"])
    rows = load_split(script_args, "train")
    assert rows["solution"][:] == ["one"] * 4 + ["seven"] * 4
    words += [
        "--model_name_or_path",
        str(saved("qwen2_5_vl")),
        "--max_completion_length",
        "2",
        "--num_samples",
        "2",
        "--temperature",
        "1",
    ]
    words += ["--by", "accuracy", "--min", "0", "--max", "1", "--reward_funcs", "accuracy_reward"]
    filter.main(*parse(filter.ARGUMENTS, [*words, "--output_dir", "kept"]))
    kept = load_dataset("kept", split="train")
    assert {*kept["solution"]} == {"one", "seven"} and kept.features["label"].names == ["one", "seven"]
