# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Engines on one GPU: one process with FSDP2 or DeepSpeed, which communicates with itself through NCCL, and two with DDP
through gloo, because NCCL refuses two on one GPU. `tests/distributed` tests them on the CPU, and so does a rehearsal.
"""

import importlib.util

import pytest
from distributed.test_distributed import assert_same_update
from helpers.devices import DEVICE, GPU_OR_REHEARSAL, IS_REHEARSAL, NO_STAND_IN, gated_backward_obstacle
from launcher import Run


# One worker starts them all, and they run side by side
pytestmark = [*GPU_OR_REHEARSAL, NO_STAND_IN, pytest.mark.xdist_group("processes")]

DEEPSPEED = importlib.util.find_spec("deepspeed")
PROCESSES = {"ddp": 2, **dict.fromkeys(["fsdp2", "zero2", "zero3"], 2 if IS_REHEARSAL else 1)}


def scenarios() -> list[str]:
    """Names scenarios that every engine runs. The second has gated layers, whose kernels run on GPUs alone."""
    has_gates = not IS_REHEARSAL and gated_backward_obstacle() is None
    return ["whole_groups_checkpointed", "hybrid"][: 1 + has_gates]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Starts all engines, and a single process without one."""
    folder = tmp_path_factory.mktemp("runs")
    needed = {"one": ("ddp", 1, scenarios()), "balanced": ("ddp", 2, ["balanced"])}
    engines = {engine: n for engine, n in PROCESSES.items() if DEEPSPEED or "zero" not in engine}
    needed |= {engine: (engine, n, scenarios()) for engine, n in engines.items()}
    started = {name: Run(*each, folder / name, DEVICE) for name, each in needed.items()}
    yield started
    for run in started.values():
        run.stop()


def test_ranks_exchange_groups_for_equal_work(runs):
    for rank in runs["balanced"].results()["balanced"]:
        assert rank["difference"] <= 1e-3
        for kept, moved in zip(rank["kept"], rank["steps"], strict=True):
            if "packing/rank_imbalance" in kept:
                assert kept["packing/rank_imbalance"] > 1.2 > moved["packing/rank_imbalance"]


@pytest.mark.parametrize("engine", PROCESSES)
def test_trains_as_one_process(engine, runs):
    if engine not in runs:
        pytest.skip("needs DeepSpeed")
    found, one = (runs[name].results() for name in (engine, "one"))
    for scenario in scenarios():
        expected = one[scenario][0]["update"]
        for rank in found[scenario]:
            assert rank["sharded"] == (engine == "fsdp2")
            assert_same_update(rank["update"], expected, tolerance=1e-3)
