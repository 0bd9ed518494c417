# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A vLLM server loads an adapter from a folder."""

from pathlib import Path

import pytest
import requests
from helpers.trainer_utils import image_rows, saved
from peft import LoraConfig
from serving import serve
from weights import DECODER, QWEN_TOWER, OfVersions, assert_follows, change, difference, trainer_of


pytestmark = pytest.mark.slow


FLAGS = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "3", "--enable-tower-connector-lora"]
LORA = LoraConfig(r=8, target_modules=f"{DECODER}|{QWEN_TOWER}")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve(
        saved("qwen2_5_vl"), tmp_path_factory.mktemp("server"), *FLAGS, VLLM_ALLOW_RUNTIME_LORA_UPDATING="True"
    ) as address:
        yield address


def models(server) -> list[str]:
    return [each["id"] for each in requests.get(f"{server}/v1/models").json()["data"]]


def test_adapter_by_a_server(server, tmp_path, monkeypatch):
    options = {"vllm_mode": "server", "vllm_server_base_url": server, "vllm_engine_kwargs": {"enable_lora": True}}
    trainer = trainer_of(saved("qwen2_5_vl"), image_rows, tmp_path, LORA, **options)
    assert_follows(trainer)
    client = trainer.vllm_generation.vllm_client
    folder = Path(trainer.args.output_dir, "_vllm_adapter")
    served = models(server)
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


def test_requests_in_flight_keep_their_adapter(server, tmp_path):
    """Servers have the adapters of so many versions as completions may be of."""
    options = {"vllm_mode": "server", "vllm_server_base_url": server, "vllm_engine_kwargs": {"enable_lora": True}}
    options |= {"max_staleness": 2, "learning_rate": 1e-1, "max_steps": 5, "save_strategy": "no", "logging_steps": 1}
    trainer = trainer_of(saved("qwen2_5_vl"), image_rows, tmp_path, LORA, trainer_class=OfVersions, **options)
    assert trainer.vllm_generation.unmerged_adapter.engine_kwargs["max_loras"] == 3
    folder = Path(trainer.args.output_dir, "_vllm_adapter")
    before = models(server)
    trainer.train()
    found = trainer.differences_by_age()
    assert len(found) == 5 * 8 and {age for age, _ in found} == {0, 1, 2}
    assert max(difference for _, difference in found) < 1e-4
    assert len(models(server)) == len(before) + 3 == len(before) + len([*folder.iterdir()])
    first, *_, last = trainer.weights.values()
    assert max((first[name] - last[name]).abs().max() for name in first if "lora_B" in name) > 1e-3
