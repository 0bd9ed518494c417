# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
TRL's guarantees for tools and environments in its GRPO trainer, for this package's trainers, with the self-check on.

| scenario | test |
|---|---|
| a plain tool is called rightly, called with a wrong argument, and not called | `test_tools` |
| the same of an async tool | `test_tools` |
| an unknown tool, and a call that can't be parsed | `test_tools` |
| a tool returns an image on rows of text | `test_tools` |
| a tool returns an image on rows of images | `test_tools` |
| methods of an environment are tools; each completion has its own, which rewards see | `test_environments` |
| `reset` shows text, blocks with an image, or nothing | `test_environments` |
| the environment of a row is that of its column, with its tools and those of all | `test_environments` |
| environments give the reward, plain and async, and say nothing of others | `test_environments` |
| an environment has the data, and there is no dataset | `test_environments_without_a_dataset` |

`test_tools.py` covers results that are too long, a limit of turns, templates without tools and `rollout_func`.
"""

import asyncio
import functools

import pytest
from datasets import Dataset
from helpers.chats import image
from helpers.tools import GRPO, RLOO, Saying, call, talking
from helpers.trainer_utils import logged, make_trainer, norm, run

from trl_multimodal_rft.encoding.conversations import Conversation


TRAINERS = [GRPO, pytest.param(RLOO, marks=pytest.mark.slow)]
LONG = {"max_completion_length": 800, "max_steps": 1, "self_check": True}


def multiply(a: int, b: int) -> int:
    """
    Multiplies.

    Args:
        a: One.
        b: Other.

    Returns:
        The product.
    """
    return a * b


async def add(a: int, b: int) -> int:
    """
    Adds.

    Args:
        a: One.
        b: Other.

    Returns:
        The sum.
    """
    return a + b


def look() -> list:
    """
    Looks.

    Returns:
        What is there.
    """
    return [image(56, 56, 7), {"type": "text", "text": "Here it is."}]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_tools(trainer):
    calls = [
        call("multiply", a=3, b=4),
        call("multiply", a=3, c=4),
        call("add", a=3, b=4),
        call("look"),
        call("add", a=3, c=4),
        call("look"),
        call("fly"),
        '<tool_call>{"name": "multiply"</tool_call>',
    ]
    sampler = functools.partial(Saying, script={i: [each] for i, each in enumerate(calls)})
    question = [{"role": "user", "content": "What is it?"}]
    rows = Dataset.from_list([{"prompt": question, "image": each} for each in (image(56, 84)["image"], None)])
    seen = []

    def reward(completions, **kwargs):
        seen.extend(completions)
        return [float(i % 3) for i in range(len(completions))]

    objects = {**talking("qwen3_vl"), "tools": [multiply, add, look]}
    options = {"objects": objects, "sampler": sampler, "shuffle_dataset": False, **LONG}
    result = run(trainer, "qwen3_vl", rows, reward=reward, **options)
    assert logged(result, "tools/call_frequency") == [7 / 8]
    assert logged(result, "tools/failure_frequency") == pytest.approx([3 / 7])
    assert [len(completion) for completion in seen] == [3] * 7 + [1]
    results = [completion[1]["content"] for completion in seen[:7]]
    assert (results[0], results[2]) == ("12", "7")
    for i, reason in ((1, "argument 'c'"), (4, "argument 'c'"), (6, "Tool fly not found")):
        assert reason in results[i]
    for i in (3, 5):
        assert [block["type"] for block in results[i]] == ["image", "text"]
    prompts = result.trainer.inputs.rollout.prompts
    assert [bool(prompt.media) for prompt in prompts] == [True] * 4 + [False] * 4
    assert [isinstance(prompt, Conversation) for prompt in prompts] == [i in (3, 5) for i in range(8)]
    assert result.trainer.checks.self_check.conversation <= 1e-4
    assert norm(result.update) > 1e-3


class Counter:
    """Counts, and is rewarded for it."""

    def reset(self, start, **row):
        self.count, self.row = start, row
        return None if start else " It starts at zero."

    async def increase(self, by: int) -> str:
        """
        Counts on.

        Args:
            by: How far.

        Returns:
            Where it is.
        """
        self.count += by
        return f"at {self.count}"

    def get_reward(self) -> float:
        return float(self.count)


class Room:
    """Has something to see."""

    def reset(self, **row):
        self.looks = 0
        return [image(56, 56, 1), {"type": "text", "text": "You are here."}]

    def turn(self) -> list:
        """
        Looks elsewhere.

        Returns:
            The view.
        """
        self.looks += 1
        return [image(84, 56, self.looks)]

    async def get_reward(self) -> float:
        return self.looks / 2


@pytest.mark.parametrize("trainer", TRAINERS)
def test_environments(trainer):
    turns = {1: 1, 2: 2, 3: 3, 4: 1, 6: 2}
    script = {i: [call("turn") if i < 4 else call("increase", by=i)] * n for i, n in turns.items()}
    script[0] = [call("increase", by=1)]  # its environment doesn't have it
    script[5] = [call("multiply", a=5, b=5)]
    sampler = functools.partial(Saying, script=script)
    question = [{"role": "user", "content": "Go on."}]
    rows = [{"prompt": question, "environment": name, "start": 0} for name in ("room", "counter")]
    seen = []

    def right(environments, **kwargs):
        seen.extend(environments)
        return [0.0] * len(environments)

    objects = {
        **talking("qwen3_vl"),
        "tools": [multiply],
        "environment_factory": {"room": Room, "counter": Counter, "other": Room},
    }
    options = {"objects": objects, "sampler": sampler, "shuffle_dataset": False, **LONG}
    result = run(trainer, "qwen3_vl", Dataset.from_list(rows), reward=right, **options)
    assert [type(each) for each in seen] == [Room] * 4 + [Counter] * 4 and len({*map(id, seen)}) == 8
    assert result.trainer.environments == seen
    assert [each.looks for each in seen[:4]] == [0, 1, 2, 3]
    assert [each.count for each in seen[4:]] == [4, 0, 12, 0]
    assert all("environment" not in each.row for each in seen[4:])
    names = result.trainer.reward_func_names
    assert names == ["right", "Room", "Counter"]
    _, rooms, counters = result.trainer.reward_funcs  # which TRL's tests call with environments alone
    assert counters(environments=seen[3:6]) == [None, 4.0, 0.0]
    assert asyncio.run(rooms(environments=seen[3:5])) == [1.5, None]
    del seen[4].count
    with pytest.raises(AttributeError, match="count"):
        counters(environments=seen[4:])
    assert logged(result, "rewards/Room/mean") == [0.75] and logged(result, "rewards/Counter/mean") == [4.0]
    assert logged(result, "tools/call_frequency") == [11 / 8]
    assert logged(result, "tools/failure_frequency") == pytest.approx([1 / 11])
    rendered = result.trainer.sampler.rendered
    assert all("You are here." in text for text in rendered[:4])
    assert all("It starts at zero." in text for text in rendered[4:])
    assert [prompt.modalities for prompt in result.trainer.inputs.rollout.prompts] == (
        [{"image"}] * 4 + [frozenset()] * 4
    )
    assert result.trainer.checks.self_check.conversation <= 1e-4
    assert norm(result.update) > 1e-3

    rows[0]["environment"] = "nowhere"
    with pytest.raises(ValueError, match="environment='nowhere'"):
        run(trainer, "qwen3_vl", Dataset.from_list(rows), reward=right, **options)


class Task(Room):
    """Has the data."""

    given = 0

    def reset(self, **row):
        Task.given += 1
        return [*super().reset(**row), {"type": "text", "text": f"Task {Task.given}"}]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_environments_without_a_dataset(trainer, monkeypatch, tmp_path):
    sampler = functools.partial(Saying, script={i: [call("turn")] * (i % 3) for i in range(8)})
    monkeypatch.setattr(Task, "given", 0)
    objects = {**talking("qwen3_vl"), "environment_factory": Task}
    options = {"objects": objects, "sampler": sampler, **LONG, "max_steps": 2}
    result = run(trainer, "qwen3_vl", None, reward=None, **options)
    assert logged(result, "rewards/Task/mean") == [7 / 16] * 2
    assert result.trainer.inputs["advantages"].abs().sum() > 0 and norm(result.update) > 1e-3
    tasks = [int(text.split("Task ")[1].split("<")[0]) for text in result.trainer.sampler.rendered]
    assert sorted(tasks) == [*range(9, 17)]
    for objects, message in (
        (talking("qwen3_vl"), "`train_dataset` is required"),
        ({**talking("qwen3_vl"), "environment_factory": {"task": Task}}, "multiple environments"),
        ({**talking("qwen3_vl"), "environment_factory": Task}, "`max_steps` must be set"),
    ):
        steps = {"max_steps": -1} if "max_steps" in message else {}
        with pytest.raises(ValueError, match=message):
            make_trainer(trainer, "qwen3_vl", None, tmp_path, objects=objects, **{**LONG, **steps})
