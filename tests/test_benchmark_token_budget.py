# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The benchmark of the token budget runs."""

import json

import token_budget
import torch


def test_token_budget(capsys):
    threads = str(torch.get_num_threads())
    arguments = ["--preset", "tiny", "--prompts", "2", "--group", "4", "--budgets", "600", "--repeats", "1"]
    token_budget.main([*arguments, "--threads", threads, "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    whole, parts = result["budgets"]
    assert (whole["parts"], parts["parts"]) == (1, 2)
    assert 0 < parts["held_ratio"] < 0.9 and 0 < parts["peak_ratio"] < 0.9 and parts["cpu_s"] > 0
    assert parts["gradient_difference"] < 1e-4
