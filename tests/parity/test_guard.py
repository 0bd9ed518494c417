# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What `guard.py` takes for granted: branches of TRL's constructors that never run, and tables of options."""

import ast
import sys
from pkgutil import resolve_name

import guard
import house
import pytest
from datasets import Dataset
from helpers.tools import look_up, with_tools
from helpers.trainer_utils import length_and_sum, load, make_trainer, text_rows


PAIR = {"prompt": ["Where?"] * 8, "chosen": ["Here, I think."] * 8, "rejected": ["No."] * 8}
ANSWER = {"prompt": ["Where?"] * 8, "completion": ["Here."] * 8}
LABELLED = {**ANSWER, "label": [True, False] * 4}
PAIRS = ("DPO", "Reward")
# Options that would have TRL's constructor enter such a branch
OPTIONS = {
    "SFT": {"packing": True, "max_length": 64},
    "DPO": {"precompute_ref_log_probs": True, "max_length": 64},
    "KTO": {"precompute_ref_log_probs": True, "max_length": 64},
}


@pytest.mark.parametrize("name", house.trainers())
def test_facts_are_of_conditions_in_the_constructor(name):
    (function,) = guard.Replaced(guard.INSTALLED, name).methods["__init__"][0].nodes
    conditions = [node.test for node in ast.walk(function) if isinstance(node, ast.If)]
    for condition in conditions:  # grows by the parts of conditions
        conditions += condition.values if isinstance(condition, ast.BoolOp) else []
        conditions += [condition.operand] if isinstance(condition, ast.UnaryOp) else []
    assert guard.FACTS[name].keys() <= {*map(ast.unparse, conditions)}


@pytest.mark.parametrize("name", house.trainers())
def test_branches_that_never_run_do_not_run(name, tmp_path):
    trl = guard.trl_of(house.trainers()[name])
    ran = set()

    def trace_line(frame, event, argument):
        ran.add(frame.f_lineno)
        return trace_line

    def trace(frame, event, argument):
        return trace_line if frame.f_code is trl.__init__.__code__ else None

    columns = PAIR if name in PAIRS else {"SFT": ANSWER, "KTO": LABELLED}.get(name)
    rows = text_rows() if columns is None else Dataset.from_dict(columns)
    objects = with_tools(tools=[look_up]) if name in ("GRPO", "RLOO") else {}
    reward = length_and_sum if name in ("GRPO", "RLOO", "PPO") else None
    if name == "Distillation":
        objects["teacher_model"] = load("qwen2_5_vl")[0]
    former = sys.gettrace()
    sys.settrace(trace)
    try:
        make_trainer(
            house.trainers()[name],
            "qwen2_5_vl",
            rows,
            tmp_path,
            reward=reward,
            objects=objects,
            **OPTIONS.get(name, {}),
        )
    finally:
        sys.settrace(former)
    (branches,) = guard.Replaced(guard.INSTALLED, name).code_of(set())
    dead = {node.lineno for node in branches.walk() if hasattr(node, "lineno")}
    assert ran and dead and not ran & dead


@pytest.mark.parametrize("path", guard.TABLES)
def test_tables_of_options_name_options(path):
    """Each name, with its prefix, is an option of some config."""
    options = set().union(*(config.__dataclass_fields__ for config in house.exported("Config").values()))
    assert {guard.TABLES[path] + name for name in resolve_name(f"{house.PACKAGE.name}.{path}")} <= options
