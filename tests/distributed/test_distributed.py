# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Two processes train as one does, with DDP and with FSDP2."""

import pytest
import torch
from launcher import Run


TIMEOUT = 300  # seconds; a run takes a tenth of it
DDP = [
    "straddling_group",
    "straddling_groups",
    "whole_groups",
    "whole_groups_checkpointed",
    "mixed_rows",
    "apart",
]
GREEDY = ["greedy_images", "greedy_audio"]
FSDP2 = [*GREEDY, "greedy_apart", "straddling_groups", "whole_groups_checkpointed"]


def run(engine, scenarios, folder):
    """Results of `scenarios` and of `sampled`, by two processes and by one."""
    runs = [Run(engine, 2, [*scenarios, "sampled"], folder / "two"), Run(engine, 1, scenarios, folder / "one")]
    try:
        return [run.results(TIMEOUT) for run in runs]
    finally:
        for each in runs:
            each.stop()


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    return run("ddp", DDP, tmp_path_factory.mktemp("ddp"))


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory):
    return run("fsdp2", FSDP2, tmp_path_factory.mktemp("fsdp2"))


def norm(update):
    return torch.cat([value.flatten() for value in update.values()]).norm().item()


def assert_same_training(two, one):
    first, second = (rank["update"] for rank in two)
    alone = one[0]["update"]
    assert first.keys() == second.keys() == alone.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert norm(alone) > 0.1
    assert norm({name: first[name] - alone[name] for name in alone}) <= 1e-5 * norm(alone)
    for key in ("grad_norm", "loss", "reward", "reward_std"):
        logged = [[step[key] for step in result["steps"] if key in step] for result in (two[0], one[0])]
        assert logged[0] == pytest.approx(logged[1], rel=1e-4, abs=1e-5)


def assert_processes_agree(results):
    first, second = results["sampled"]
    assert all(torch.equal(first["update"][name], second["update"][name]) for name in first["update"])
    assert norm(first["update"]) > 0.1
    check = first["self_check"]
    assert check == second["self_check"]
    assert max(check["packed"], check["rows"], check["sampled"]) <= check["tolerance"] < check["media"]
    assert first["steps"][0]["packing/shared_frac"] > 0
    # The processes share a prompt, and must not sample the same completions of it
    assert len({tuple(ids) for rank in (first, second) for ids in rank["completions"]}) > 2


@pytest.mark.parametrize("scenario", DDP)
def test_ddp_trains_as_one_process(ddp, scenario):
    two, one = ddp
    assert_same_training(two[scenario], one[scenario])


def test_a_group_that_straddles_processes_is_packed_on_each(ddp):
    shares = {
        name: [step["packing/shared_frac"] for step in ddp[0][name][0]["steps"]]
        for name in ("straddling_group", "straddling_groups")
    }
    assert shares["straddling_group"] == [0.5, 0.5]
    # Of 6 completions on a process 4 and 2 have the same prompt
    assert shares["straddling_groups"] == pytest.approx([2 / 3, 2 / 3], abs=0.05)


def test_ddp_processes_agree_on_their_own_samples(ddp):
    assert_processes_agree(ddp[0])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", FSDP2)
def test_fsdp2_trains_as_one_process(fsdp2, scenario):
    two, one = fsdp2
    assert two[scenario][0]["sharded"]
    assert_same_training(two[scenario], one[scenario])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", GREEDY)
def test_fsdp2_generates_as_one_process(fsdp2, scenario):
    two, one = fsdp2
    completions = [rank["completions"] for rank in two[scenario]]
    assert completions[0] + completions[1] == one[scenario][0]["completions"]
    longest = [max(map(len, ids)) for ids in completions]
    assert longest[0] != longest[1]  # so one process had to wait for the other


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [*GREEDY, "greedy_apart"])
def test_fsdp2_saves_what_it_trained(fsdp2, scenario):
    assert fsdp2[0][scenario][0]["saved_otherwise"] == []


@pytest.mark.slow
def test_fsdp2_processes_agree_on_their_own_samples(fsdp2):
    assert_processes_agree(fsdp2[0])
