# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The benchmark of generation behind results of tools runs, and both ways give the same."""

import json

import conversations
import torch


def test_conversations(capsys):
    threads = str(torch.get_num_threads())
    arguments = ["--preset", "tiny", "--group", "2", "--tokens", "3", "--repeats", "1", "--threads", threads]
    conversations.main([*arguments, "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["same_ids"] and result["ratio"] > 0
    assert result["tokens"]["turn"] == 3 and min(result["tokens"].values()) > 0
