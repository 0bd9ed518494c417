# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Errors that only replaced code of TRL raises have a counterpart in the package, or a reason why they can't occur.

`lost_errors.json` lists them: a part of TRL's message, the functions that raise it, and either the file `here` and a
text of the package's message in it, or the reason `why` there is none.
"""

import json
from functools import cache
from pathlib import Path

import guard
import house
import pytest


LISTED = json.loads(Path(__file__).with_name("lost_errors.json").read_text())


BRANCH = "        if data_collator is None:\n            raise ValueError(f'A {model}')\n"
METHOD = "    def get_train_dataloader(self):\n        _more()\n        raise ValueError('new')\n\n"


@cache
def errors(name: str) -> set[tuple[str, str]]:
    return guard.errors(guard.Replaced(guard.INSTALLED, name))


def matches(entry: dict, function: str, message: str) -> bool:
    return function in entry["in"] and entry["error"] in message


@pytest.mark.parametrize("name", house.trainers())
def test_lost_errors_have_counterparts(name):
    unknown = [error for error in errors(name) if sum(matches(entry, *error) for entry in LISTED) != 1]
    assert not unknown, "add them to lost_errors.json, with the check of this package or the reason to have none"


@pytest.mark.parametrize("entry", LISTED, ids=lambda entry: entry["error"])
def test_counterparts_exist(entry):
    assert entry.keys() - {"error", "in"} in ({"here"}, {"why"})
    raised = set().union(*map(errors, house.trainers()))
    for function in entry["in"]:
        assert any(function == each and entry["error"] in message for each, message in raised), function
    if "here" in entry:
        path, text = entry["here"]
        assert any(text in each for each in guard.texts_in(path))


def test_one_more_error_of_trl_is_found():
    """In a replaced method, in a branch of a constructor, and in a function that only these call."""
    module = "trl.trainer.kto_trainer"
    text = guard.text_of(module)
    for before, code in {
        "        if data_collator is None and": BRANCH,
        "    def _prepare_dataset(\n": METHOD,
    }.items():
        assert before in text
        text = text.replace(before, code + before, 1)
    changed = guard.Upstream({module: text + "\n\ndef _more():\n    raise TypeError('newer')\n"})
    found = guard.errors(guard.Replaced(changed, "KTO")) - errors("KTO")
    methods = {"__init__": "A {}", "get_train_dataloader": "new", "_more": "newer"}
    assert found == {(f"kto_trainer.{name}", message) for name, message in methods.items()}
