# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
GPU-only behavior (`make test-gpu-vllm`): weights loaded in place or over NCCL, an engine that sleeps, one engine on
several GPUs, 16 bits, and a run that learns.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch
from helpers.processes import PATIENCE
from helpers.trainer_utils import audio_rows, image_rows, saved, video_rows
from peft import LoraConfig
from serving import serve, train
from weights import DECODER, QWEN_TOWER, assert_follows, trainer_of


GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a GPU")]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

TOLERANCE = 1e-3  # kernels of another engine sum in another order
ROOT = Path(__file__).parents[3]
ENGINE = {"vllm_mode": "colocate", "vllm_engine_kwargs": {"enforce_eager": True, "max_model_len": 512}}


def differences(ranks):
    return [difference for rank in ranks for draw in rank["draws"] for *_, difference in draw]


def check(ranks):
    assert all(len(rank["draws"]) == 3 for rank in ranks)
    assert max(differences(ranks)) < TOLERANCE
    assert len({rank["weights"] for rank in ranks}) == 1


def test_engine_that_sleeps(omni, tmp_path):
    """The engine drops its weights after each draw."""
    runs = {"asleep": {**ENGINE, "vllm_enable_sleep_mode": True}}
    check(train(omni, tmp_path, 1, runs, CUDA_VISIBLE_DEVICES="0")["asleep"])


def test_sixteen_bits(omni, tmp_path):
    runs = {"half": {**ENGINE, "bf16": True}}
    found = differences(train(omni, tmp_path, 1, runs, CUDA_VISIBLE_DEVICES="0")["half"])
    assert mean(found) < 0.1  # the largest of six tokens


@two_gpus
@pytest.mark.parametrize("parallel", [1, 2])
def test_an_engine_of_each_and_of_both(omni, tmp_path, parallel):
    runs = {"two": {**ENGINE, "vllm_tensor_parallel_size": parallel}}
    check(train(omni, tmp_path, 2, runs)["two"])


@two_gpus
def test_server_is_sent_weights(omni, tmp_path):
    flags = ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    with serve(omni, tmp_path, *flags, CUDA_VISIBLE_DEVICES="1") as address:
        runs = {"server": {"vllm_mode": "server", "vllm_server_base_url": address}}
        check(train(omni, tmp_path, 1, runs, CUDA_VISIBLE_DEVICES="0")["server"])


MEDIA = [("qwen2_audio", audio_rows), ("qwen2_5_vl", image_rows), ("qwen2_5_vl", video_rows)]


@pytest.mark.parametrize(("family", "rows"), MEDIA)
def test_what_is_sampled_is_what_is_scored(family, rows, tmp_path):
    """After weight changes, the engine encodes sounds, images and videos anew."""
    assert_follows(trainer_of(saved(family), rows, tmp_path), TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [{}, {"engine": {"enable_lora": True}}, {"vllm_enable_sleep_mode": True}],
    ids=["merged", "alone", "asleep"],
)
def test_adapter(options, tmp_path):
    lora = LoraConfig(r=4, target_modules=f"{DECODER}|{QWEN_TOWER}")
    assert_follows(trainer_of(saved("qwen2_5_vl"), image_rows, tmp_path, lora, **options), TOLERANCE)


@pytest.mark.parametrize(("family", "rows"), MEDIA)
def test_ratios_in_sixteen_bits(family, rows, tmp_path):
    """Ratios of the trainer's to the engine's probabilities, by which TRL weights tokens, are near 1."""
    engine = {**ENGINE["vllm_engine_kwargs"], "dtype": "bfloat16", "gpu_memory_utilization": 0.3}
    options = {"bf16": True, "max_steps": 3, "logging_steps": 1, "vllm_engine_kwargs": engine}
    trainer = trainer_of(saved(family), rows, tmp_path, **options)
    trainer.train()
    name = "sampling/importance_sampling_ratio"
    logged = [entry for entry in trainer.state.log_history if f"{name}/mean" in entry]
    assert len(logged) == 3
    for entry in logged:
        assert entry[f"{name}/mean"] == pytest.approx(1, abs=0.05)
        assert 0.5 < entry[f"{name}/min"] <= entry[f"{name}/max"] < 2


def test_learns_spoken_digits(tmp_path):
    """Runs the demo with samples of the engine."""
    engine = json.dumps({"dtype": "float32", "enforce_eager": True})
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "examples/grpo_audio.py"),
        *("--output_dir", str(tmp_path), "--use_vllm", "--vllm_max_model_length", "128"),
        *("--vllm_engine_kwargs", engine),
    ]
    run = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    metrics = json.loads((tmp_path / "demo_metrics.json").read_text())
    assert metrics["accuracy_before"] < 0.3 and metrics["accuracy_after"] > 0.8
