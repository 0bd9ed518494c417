# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reward recipes: each function gets only its rows, with its weight, directly and in a trainer."""

import asyncio
import math
from argparse import Namespace

import pandas as pd
import pytest
import torch
from datasets import Dataset
from helpers.trainer_utils import InjectedOurs, Recorded, image_rows, make_trainer, run
from transformers import AutoModelForSequenceClassification, LlamaConfig

from trl_multimodal_rft.cli.arguments import load_reward_recipe, parse
from trl_multimodal_rft.cli.commands import grpo
from trl_multimodal_rft.cli.preflight import check_run
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.rewards import apply_recipe
from trl_multimodal_rft.rewards.ready.recipe import combine_rewards


RECIPE = {
    "count": [("rule", "length", 1.0), ("rule", "first", 0.5)],
    "describe": [("model", "first", 2.0), ("model", "first", -0.5)],
    "free": [],
}
LABELS = ["describe", "count", "free", "count", "describe", "count"]
CALL = {
    "prompts": [f"prompt {i}" for i in range(6)],
    "completions": ["a", "bb", "ccc", "dddd", "eeeee", "ffffff"],
    "completion_ids": [[i] * i for i in range(1, 7)],
    "label": LABELS,
    "solution": [10 * i for i in range(6)],
    "trainer_state": object(),
    "log_metric": object(),
}


def length(completions, **columns):
    return [float(len(completion)) for completion in completions]


def first(completions, completion_ids, **columns):
    return [None if ids[0] == 5 else float(ids[0]) for ids in completion_ids]


async def first_later(completions, completion_ids, **columns):
    await asyncio.sleep(0)
    return first(completions, completion_ids)


def test_rewards_are_weighted_where_the_label_asks_for_them_and_sum_up():
    by_length, by_first = apply_recipe({"length": length, "first": first}, RECIPE)
    assert by_length(**CALL) == [None, 2.0, None, 4.0, None, 6.0]
    assert by_first(**CALL) == [1.5, 1.0, None, 2.0, None, 3.0]
    assert [by_length.__name__, by_first.__name__] == ["length", "first"]
    sources = [torch.tensor([float("nan") if r is None else r for r in f(**CALL)]) for f in (length, first)]
    expected = combine_rewards(sources, LABELS, RECIPE, {"length": 0, "first": 1})
    parts = [f(**CALL) for f in apply_recipe({"length": length, "first": first}, RECIPE)]
    sums = [[part for part in row if part is not None] for row in zip(*parts, strict=True)]
    total = torch.tensor([sum(row) if row else math.nan for row in sums])
    assert torch.equal(total.isnan(), expected.isnan())
    assert torch.allclose(total.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_function_sees_its_rows_alone(asynchronous):
    seen = []

    def look(**columns):
        seen.append(columns)
        return [1.0] * len(columns["completions"])

    async def look_later(**columns):
        return look(**columns)

    recipe = {"count": [("rule", "look", 3.0)], "describe": [], "free": []}
    (function,) = apply_recipe({"look": look_later if asynchronous else look}, recipe)
    rewards = asyncio.run(function(**CALL)) if asynchronous else function(**CALL)
    assert rewards == [None, 3.0, None, 3.0, None, 3.0]
    assert function.__name__ == ("look_later" if asynchronous else "look")
    (columns,) = seen
    expected = {name: [v[i] for i in (1, 3, 5)] if isinstance(v, list) else v for name, v in CALL.items()}
    assert columns == expected
    assert columns["trainer_state"] is CALL["trainer_state"] and columns["log_metric"] is CALL["log_metric"]
    # Another name for the column, and a batch without a row for the function
    (function,) = apply_recipe({"look": look}, recipe, label_column="solution_type")
    rest = {name: value for name, value in CALL.items() if name != "label"}
    assert function(**rest, solution_type=["free"] * 6) == [None] * 6
    assert len(seen) == 1


def test_extra_columns_have_a_value_for_every_row():
    def logs(completions, log_extra, **columns):
        log_extra("shouted", [completion.upper() for completion in completions])
        return [0.0] * len(completions)

    recipe = {"count": [("rule", "logs", 1.0)], "describe": [], "free": []}
    (function,) = apply_recipe({"logs": logs}, recipe)
    logged = []
    for labels in (["free"] * 6, LABELS, ["free"] * 6):
        function(**{**CALL, "label": labels}, log_extra=lambda column, values: logged.append((column, values)))
    assert logged == [("shouted", [None, "BB", None, "DDDD", None, "FFFFFF"]), ("shouted", [None] * 6)]


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"uses \['first'\], .* only \['length'\]"):
        apply_recipe({"length": length}, RECIPE)
    functions = apply_recipe({"length": length, "first": first}, RECIPE)
    with pytest.raises(
        ValueError, match=r"row 2, column 'label': .* label 'typo', only \['count', 'describe', 'free'\]"
    ):
        functions[0](**{**CALL, "label": [*LABELS[:2], "typo", *LABELS[3:]]})
    with pytest.raises(ValueError, match="column 'label', .*`label_column`"):
        functions[0](**{name: value for name, value in CALL.items() if name != "label"})

    def short(completions, **columns):
        return [1.0]

    def refuses(prompts, **columns):
        raise MediaError("row 1, column 'image': no such file")

    recipe = {"count": [("rule", "it", 1.0)], "describe": [], "free": []}
    with pytest.raises(ValueError, match="'it' returned 1 rewards for 3 completions"):
        apply_recipe({"it": short}, recipe)[0](**CALL)
    with pytest.raises(MediaError) as caught:
        apply_recipe({"it": refuses}, recipe)[0](**CALL)
    assert "rows [1, 3, 5]" in caught.value.__notes__[0]
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(ValueError, match="'it' is a model; .*`RewardModel`"):
        apply_recipe({"it": AutoModelForSequenceClassification.from_config(config)}, recipe)


# In a trainer


def labelled_rows() -> Dataset:
    rows = image_rows(2)
    return rows.add_column("task", ["count", "describe"]).add_column("solution", [3, 5])


def test_a_trainer_rewards_by_label():
    seen = {"length": [], "modulo": []}

    def length(prompts, completion_ids, solution, task, image, **columns):
        seen["length"] += list(zip(task, solution, image, strict=True))
        assert len(prompts) == len(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    async def modulo(prompts, completion_ids, solution, task, **columns):
        assert all(prompt[0]["content"][0]["type"] == "image" for prompt in prompts)
        seen["modulo"] += list(zip(task, solution, strict=True))
        return [float(sum(ids) % s) for ids, s in zip(completion_ids, solution, strict=True)]

    recipe = {"count": [("rule", "length", 0.5)], "describe": [("rule", "length", 2.0), ("rule", "modulo", -1.0)]}
    rows = labelled_rows()
    functions = apply_recipe({"length": length, "modulo": modulo}, recipe, label_column="task")
    # One group of four completions per prompt
    trainer = run(Recorded, "qwen2_5_vl", rows, reward=functions, max_steps=1).trainer
    (draw,) = trainer.draws
    expected = []
    for row, ids, mask in zip(draw.rows, draw.batch["completion_ids"], draw.batch["completion_mask"], strict=True):
        ids = ids[mask.bool()].tolist()
        describe = row["task"] == "describe"
        expected.append(2.0 * len(ids) - sum(ids) % row["solution"] if describe else 0.5 * len(ids))
    assert draw.rewards.nansum(1).tolist() == expected
    tasks = [row["task"] for row in draw.rows]
    assert sorted(tasks) == ["count"] * 4 + ["describe"] * 4
    assert draw.rewards[:, 1].isnan().tolist() == [task == "count" for task in tasks]
    assert [each[:2] for each in seen["length"]] == [(row["task"], row["solution"]) for row in draw.rows]
    assert all(picture is not None for *_, picture in seen["length"])
    assert seen["modulo"] == [("describe", 5)] * 4
    (metrics,) = (entry for entry in trainer.state.log_history if "reward" in entry)
    assert metrics["reward"] == pytest.approx(sum(expected) / 8)
    assert trainer.reward_func_names == ["length", "modulo"]


def test_a_trainer_logs_extra_columns_of_some_rows(tmp_path):
    def length(completion_ids, **columns):
        return [float(len(ids)) for ids in completion_ids]

    def logs(completion_ids, log_extra, log_metric, **columns):
        log_extra("last", [ids[-1] for ids in completion_ids])
        log_metric("longest", max(map(len, completion_ids)))
        return length(completion_ids)

    recipe = {"count": [("rule", "logs", 1.0)], "describe": [("rule", "length", 1.0)]}
    functions = apply_recipe({"logs": logs, "length": length}, recipe, label_column="task")
    # Each step has groups of one prompt, so that every other step has no row for `logs`
    options = {"per_device_train_batch_size": 4, "max_steps": 4, "log_completions": True}

    trainer = make_trainer(InjectedOurs, "qwen2_5_vl", labelled_rows(), tmp_path, reward=functions, **options)
    trainer.train()
    tables = [pd.read_parquet(path) for path in sorted((tmp_path / "_private" / "completions").iterdir())]
    with_column = [table for table in tables if "last" in table]
    assert with_column
    for table in with_column:
        assert (table["last"].notna() == table["logs"].notna()).all()
    assert any(table["last"].isna().all() for table in with_column)
    assert any("longest" in entry for entry in trainer.state.log_history)


def test_by_name_from_a_command():
    words = [
        "--reward_recipe",
        '{"count": {"counting_reward": 2.0}, "quiz": {"accuracy_reward": 1, "format_reward": 0.5}}',
    ]
    script, *_ = parse(grpo.ARGUMENTS, [*words, "--reward_label_column", "kind", "--output_dir", "out"])
    rewards = script.load_rewards([])
    columns = {"solution": ["2", "2"], "kind": ["count", "quiz"]}
    given = [each(["Count."] * 2, ["<answer>2</answer>"] * 2, **columns) for each in rewards]
    names = [each.__name__ for each in rewards]
    assert dict(zip(names, given, strict=True)) == {
        "counting_reward": [2.0, None],
        "accuracy_reward": [None, 1.0],
        "format_reward": [None, 0.5],
    }
    with pytest.raises(ValueError, match="`reward_recipe` names the reward functions, too"):
        parse(grpo.ARGUMENTS, [*words, "--reward_funcs", "accuracy_reward", "--output_dir", "out"])


@pytest.mark.parametrize(
    "recipe",
    [{}, {"count": "counting_reward"}, {"count": {"counting_reward": "1"}}, {"a": {"b": True}}, {"a": {"b": 1e999}}],
)
def test_another_form_is_refused(recipe):
    with pytest.raises(ValueError, match="write the weights of reward functions by the label of a row"):
        load_reward_recipe(recipe, "task")
    with pytest.raises(ValueError, match="write the weights"):
        check_run("grpo", Namespace(model_name_or_path="m", dataset_name="d", reward_recipe=recipe))


def test_unknown_names_are_refused_before_a_launch():
    recipe = {"count": {"counting": 1.0}}
    with pytest.raises(ValueError, match="There is no reward function 'counting'"):
        check_run("grpo", Namespace(model_name_or_path="m", dataset_name="d", reward_recipe=recipe))
