# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A vLLM server loads an adapter from a folder."""

from pathlib import Path

import pytest
import requests
from helpers.trainer_utils import image_rows, saved
from peft import LoraConfig
from serving import serve
from weights import DECODER, QWEN_TOWER, assert_follows, change, difference, trainer_of


FLAGS = ["--enable-lora", "--max-lora-rank", "8", "--enable-tower-connector-lora"]


@pytest.fixture
def server(tmp_path):
    with serve(saved("qwen2_5_vl"), tmp_path, *FLAGS, VLLM_ALLOW_RUNTIME_LORA_UPDATING="True") as address:
        yield address


def test_adapter_by_a_server(server, tmp_path, monkeypatch):
    lora = LoraConfig(r=8, target_modules=f"{DECODER}|{QWEN_TOWER}")
    options = {"vllm_mode": "server", "vllm_server_base_url": server, "vllm_engine_kwargs": None}
    trainer = trainer_of(saved("qwen2_5_vl"), image_rows, tmp_path, lora, vllm_sync_adapter=True, **options)
    assert_follows(trainer)
    client, folder = trainer.vllm_generation.vllm_client, Path(trainer.args.output_dir, "_vllm_adapter")
    served = [each["id"] for each in requests.get(f"{server}/v1/models").json()["data"]]
    assert served == [str(saved("qwen2_5_vl")), client.model]
    assert [each.name for each in folder.iterdir()] == [client.model]
    change(trainer)
    monkeypatch.setattr(trainer.vllm_generation, "sync_weights", lambda: None)
    assert difference(trainer) > 1e-3
    monkeypatch.undo()
    client.clients[0].base_url += "/other"
    monkeypatch.setattr(client, "reset_encoder_caches", lambda: None)
    with pytest.raises(RuntimeError, match="404.*--enable-lora --max-lora-rank 8 --max-loras 1 --enable-tower"):
        trainer.vllm_generation.sync_weights()
