# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Engines on one GPU: one process with FSDP2 or DeepSpeed, which communicates with itself through NCCL, and two with DDP
through gloo, because NCCL refuses two on one GPU. `tests/distributed` tests them on the CPU.
"""

import pytest
from helpers.devices import GPU, NO_STAND_IN
from launcher import Run
from test_distributed import assert_same_update


pytestmark = [*GPU, NO_STAND_IN]

SCENARIOS = ["whole_groups_checkpointed", "hybrid"]
PROCESSES = {"ddp": 2, "fsdp2": 1, "zero2": 1, "zero3": 1}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Returns the result of a single process without an engine."""
    return Run("ddp", 1, SCENARIOS, tmp_path_factory.mktemp("one") / "run", "cuda").results()


def test_ranks_exchange_groups_for_equal_work(tmp_path):
    for rank in Run("ddp", 2, ["balanced"], tmp_path / "run", "cuda").results()["balanced"]:
        assert rank["difference"] <= 1e-3
        for kept, moved in zip(rank["kept"], rank["steps"], strict=True):
            if "packing/rank_imbalance" in kept:
                assert kept["packing/rank_imbalance"] > 1.2 > moved["packing/rank_imbalance"]


@pytest.mark.parametrize("engine", PROCESSES)
def test_trains_as_one_process(engine, one, tmp_path):
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed", reason="needs DeepSpeed")
    found = Run(engine, PROCESSES[engine], SCENARIOS, tmp_path / "run", "cuda").results()
    for scenario in SCENARIOS:
        expected = one[scenario][0]["update"]
        for rank in found[scenario]:
            assert rank["sharded"] == (engine == "fsdp2")
            assert_same_update(rank["update"], expected, tolerance=1e-3)
