# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The benchmark runs, and measures two trainers that compute the same."""

import importlib.util
import json
import math
from pathlib import Path

import gpu_report
import pytest
import torch


@pytest.fixture(scope="module")
def policy_update():
    path = Path(__file__).parents[1] / "benchmarks" / "policy_update.py"
    spec = importlib.util.spec_from_file_location("policy_update", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("case", "family"),
    [
        ("text", "qwen2_5_vl"),
        pytest.param("image", "qwen2_5_vl", marks=pytest.mark.slow),
        pytest.param("image", "qwen3_5", marks=pytest.mark.slow),
        pytest.param("audio", "qwen2_audio", marks=pytest.mark.slow),
    ],
)
def test_benchmark(policy_update, case, family, capsys):
    threads = str(torch.get_num_threads())
    options = ["--case", case, "--family", family, "--preset", "tiny", "--repeats", "1", "--threads", threads]
    policy_update.main([*options, "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])

    for name in ("update_ratio", "step_ratio", "memory_ratio", "processor_ratio"):
        assert math.isfinite(result[name]) and result[name] > 0
    for trainer in ("trl", "ours"):
        for quantity in ("update", "step", "generation"):
            assert result[trainer][f"{quantity}_s"] > 0 and result[trainer][f"{quantity}_cpu_s"] > 0
    assert result["gradient_difference"] < 1e-4
    setting = result["setting"]
    # TRL puts each prompt through the processor for each completion, and once more if it holds an image; of sounds the
    # other side is padded rows of ours
    per_prompt = {"image": 2 * setting["group"], "text": setting["group"], "audio": 1}
    assert result["processor_ratio"] == per_prompt[case]
    if case == "image":
        assert setting["media_tokens"] == 392
        assert result["update_shared_fraction"] == 1 - 1 / setting["group"]
        # Bytes, not seconds: the prompt is forwarded once instead of 8 times
        assert result["memory_ratio"] > 4
    assert {"cpu", "cores", "gpu"} == result["hardware"].keys()
    assert result["versions"]["trl"].startswith("1.16")


def test_cpu_clock_is_refused_on_cuda(policy_update, capsys):
    with pytest.raises(SystemExit):
        policy_update.main(["--device", "cuda", "--clock", "cpu"])
    assert "--clock wall" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        policy_update.main(["--family", "qwen3_5", "--preset", "3b"])
    assert "no `--preset 3b` of qwen3_5" in capsys.readouterr().err


@pytest.mark.slow
def test_gpu_report(tmp_path):
    """All that it runs on a GPU, of tiny models."""
    gpu_report.main(["--device", "cpu", "--preset", "tiny", "--out", str(tmp_path / "report.md")])
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["left"] == [] and found["rollout"]["transformers"]["tokens_per_s"] > 0
    assert [row["setting"]["baseline"] for row in found["rows"]] == ["TRL", *2 * ["TRL", "padded rows"]]
    for row in found["rows"]:
        assert row["gradient_difference"] < 1e-4 and row["update_ratio"] > 0 and len(row["kernels"]) == 5
        # What both compute: the decoder is too small to hide prompts that are forwarded once
        assert row["operations"]["trl"] > row["operations"]["ours"] > 0
    assert "## Where an update goes" in (tmp_path / "report.md").read_text()
