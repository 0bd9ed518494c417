# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An adapter that vLLM's own server loads from a folder."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from helpers.processes import free_port, python_environment
from helpers.trainer_utils import image_rows, saved
from peft import LoraConfig
from test_weights import DECODER, QWEN_TOWER, assert_follows, change, difference, trainer_of
from trl.generation.vllm_client import VLLMClient


FLAGS = [
    *("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.3"),
    *("--max-model-len", "512", "--max-num-seqs", "16", "--logprobs-mode", "processed_logprobs"),
    *("--enable-scale-out", "--enable-lora", "--max-lora-rank", "8", "--enable-tower-connector-lora"),
]


@pytest.fixture
def server(tmp_path):
    port, log = free_port(), tmp_path / "server.txt"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(saved("qwen2_5_vl"))]
    environment = python_environment(VLLM_SERVER_DEV_MODE="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="True")
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), *FLAGS], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(400):
            assert process.poll() is None, log.read_text()[-8000:]
            try:
                requests.get(f"{address}/health", timeout=5).raise_for_status()
                break
            except requests.RequestException:
                time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def test_adapter_by_a_server(server, tmp_path, monkeypatch):
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device=None: None)
    lora = LoraConfig(r=8, target_modules=f"{DECODER}|{QWEN_TOWER}")
    options = {"vllm_mode": "server", "vllm_server_base_url": server, "vllm_sync_adapter": True}
    trainer = trainer_of(saved("qwen2_5_vl"), image_rows, tmp_path, lora, **options)
    assert_follows(trainer)
    client, folder = trainer.vllm_generation.vllm_client, Path(trainer.args.output_dir, "_vllm_adapter")
    served = [each["id"] for each in requests.get(f"{server}/v1/models").json()["data"]]
    assert served == [str(saved("qwen2_5_vl")), client.model]
    assert [each.name for each in folder.iterdir()] == [client.model]
    change(trainer)
    monkeypatch.setattr(trainer.vllm_generation, "sync_weights", lambda: None)
    assert difference(trainer) > 1e-3
    monkeypatch.undo()
    client.base_url += "/other"
    with pytest.raises(RuntimeError, match="404.*--enable-lora --max-lora-rank 8 --max-loras 1 --enable-tower"):
        trainer.vllm_generation.sync_weights()
