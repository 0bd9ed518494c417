# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The benchmark of attention masks runs, counts bytes, and refuses masks that are wrong."""

import json

import masks
import pytest
import torch

from trl_multimodal_rft.forward.layout import PrefixLayout


SMALL = ["--prompt-length", "400", "--completion-length", "200", "--group", "8", "--repetitions", "1"]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes(window, dtype, capsys):
    threads = torch.get_num_threads()
    options = ["--dtype", dtype, "--threads", str(threads), "--json", *(["--window", str(window)] if window else [])]
    masks.main([*SMALL, *options])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    size = getattr(torch, dtype).itemsize
    for case in result["cases"]:
        n = case["prompts"]
        prompts = n * 400**2 if window else 0
        assert case["usual_bool_bytes"] == n * 8 * 200 * 599 + prompts
        assert case["usual_number_bytes"] == size * case["usual_bool_bytes"]
        limit = size * (n * 200 * 600 + prompts if window else 215 * 624)
        assert 0.7 * limit < case["ours_bytes"] <= 1.05 * limit
        assert case["layout_bytes"] < case["usual_bool_bytes"]
        assert min(case["usual_s"], case["ours_s"], case["layout_s"]) > 0


def test_wrong_masks_are_an_error(monkeypatch, capsys):
    right = PrefixLayout.masks

    def wrong(*args):
        prompts, branches = right(*args)
        return prompts, branches.roll(1, -1)

    monkeypatch.setattr(PrefixLayout, "masks", wrong)
    with pytest.raises(SystemExit, match="isn't what it is defined to be"):
        masks.main(SMALL)
    assert capsys.readouterr().out == ""
