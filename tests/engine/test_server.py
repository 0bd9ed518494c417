# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""vLLM's own server in a process of its own: what it is refused for, and that what it samples is what is scored."""

import json
import os
import subprocess
import sys
import time

import pytest
import requests
from helpers.processes import free_port, python_environment
from helpers.trainer_utils import length_and_sum
from omni import Exact, load_omni, omni_rows, save_omni

from trl_multimodal_rft import MultimodalGRPOConfig


FLAGS = [
    *("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.3"),
    *("--max-model-len", "512", "--max-num-seqs", "16"),
    *("--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_omni(tmp_path_factory.mktemp("omni") / "model")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """Address of a server, which is the same for all tests: it takes a minute to start."""
    if "VLLM_TEST_SERVER" in os.environ:
        yield os.environ["VLLM_TEST_SERVER"]
        return
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    environment = python_environment(VLLM_SERVER_DEV_MODE="1")
    with log.open("w") as output:
        process = subprocess.Popen([*command, *FLAGS], env=environment, stdout=output, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def wait_for(address, process, log, seconds=400):
    for _ in range(seconds):
        try:
            return requests.get(f"{address}/health", timeout=5).raise_for_status()
        except requests.RequestException:
            assert process.poll() is None, log.read_text()[-8000:]
            time.sleep(1)
    raise AssertionError(f"no server after {seconds} s\n{log.read_text()[-8000:]}")


def make(server, folder, tmp_path, rows=None, **options):
    options = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server,
        **options,
    }
    args = MultimodalGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)
    rows = omni_rows() if rows is None else rows
    return Exact(reward_funcs=length_and_sum, args=args, train_dataset=rows, **load_omni(folder))


def test_what_is_sampled_is_what_is_scored(server, folder, tmp_path):
    trainer = make(server, folder, tmp_path, per_device_train_batch_size=16)
    trainer.train()
    print(trainer.differences, [[round(d, 7) for _, _, d in draw] for draw in trainer.draws], [i for _, i, _ in trainer.draws[0]])
    assert max(trainer.differences) < 1e-5 and len(trainer.differences) == 3  # after two updates of all weights
