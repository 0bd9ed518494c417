# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Two processes train together: each with its engine, with one engine for both, and with a server."""

import pytest
import vllm_cpu
from serving import train


pytestmark = pytest.mark.slow


ENGINE = {"vllm_engine_kwargs": {**vllm_cpu.ENGINE, "max_model_len": 512}}
BOTH = {"ACCELERATE_USE_CPU": "true"}  # otherwise accelerate starts two runs of one process each


def check(two):
    """Each rank samples from the policy that it scores, for shared groups too, and both end with the same weights."""
    first, second = two
    assert first["weights"] == second["weights"]
    assert [len(rank["draws"]) for rank in two] == [3, 3]
    for mine, others in zip(first["draws"], second["draws"], strict=True):
        assert max(difference for *_, difference in (*mine, *others)) < 1e-5
        prompts = [prompt for prompt, *_ in (*mine, *others)]
        assert [prompts.count(prompt) for prompt in prompts] == [4] * 12
        assert mine[-1][0] == others[0][0]  # the shared group
        completions = [tuple(ids) for _, ids, _ in (*mine, *others)]
        assert len(set(completions)) == 12


def test_server_and_an_engine_of_each(server, omni, tmp_path):
    runs = {
        "server": {"vllm_mode": "server", "vllm_server_base_url": server},
        "colocate": {"vllm_mode": "colocate", **ENGINE},
    }
    results = train(omni, tmp_path, 2, runs, **BOTH)
    check(results["server"])
    check(results["colocate"])
    # Each rank's rows of a group are one request
    assert [sorted(rank["asked"]) for rank in results["server"]] == [[2] * 3 + [4] * 3] * 2


def test_one_engine_of_both(omni, tmp_path):
    """Tensor parallelism: each rank runs half of every layer, and both send it all prompts."""
    runs = {"parallel": {"vllm_mode": "colocate", "vllm_tensor_parallel_size": 2, **ENGINE}}
    check(train(omni, tmp_path, 2, runs, **BOTH)["parallel"])
