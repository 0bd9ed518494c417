# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What only GPUs show: weights by NCCL, an engine that sleeps, one of several GPUs, 16 bits."""

import json
from statistics import mean

import pytest
import torch
from serving import serve, train


GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a GPU")]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

ENGINE = {"vllm_mode": "colocate", "vllm_engine_kwargs": {"enforce_eager": True, "max_model_len": 512}}


def differences(ranks):
    return [difference for rank in ranks for draw in rank["draws"] for *_, difference in draw]


def check(ranks, tolerance=1e-3):
    """Kernels of another engine add in another order."""
    assert all(len(rank["draws"]) == 3 for rank in ranks)
    assert max(differences(ranks)) < tolerance
    assert len({rank["weights"] for rank in ranks}) == 1


def test_engine_that_sleeps(omni, tmp_path):
    """Its weights are gone after each draw."""
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
