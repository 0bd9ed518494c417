# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""PPO with the interface of the reference system in two processes."""

import functools

import pytest
import torch
from helpers.trainer_utils import norm, relative_difference
from launcher import Run


pytestmark = pytest.mark.slow

FITS = {"ddp": ["audio", "mixed"], "zero2": ["mixed"]}
SCENARIOS = {engine: [*(f"fit_{kind}" for kind in kinds), "resumed_episode"] for engine, kinds in FITS.items()}
SCENARIOS |= {"one": ["fit_audio", "fit_mixed"], "zero3": ["refused_shards", "actor_in_parts"]}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Runs the scenarios of an engine once, on first use."""

    def results(name: str) -> dict[str, list[dict]]:
        if name.startswith("zero"):
            pytest.importorskip("deepspeed")
        if name == "one":
            engine = "ddp"
            n = 1
        else:
            engine = name
            n = 2
        return Run(engine, n, SCENARIOS[name], tmp_path_factory.mktemp("runs") / name).results()

    return functools.cache(results)


@pytest.mark.parametrize(("engine", "kind"), [(engine, kind) for engine, kinds in FITS.items() for kind in kinds])
def test_two_processes_train_as_one(engine, kind, results):
    (first, second) = results(engine)[f"fit_{kind}"]
    (alone,) = results("one")[f"fit_{kind}"]
    assert first["seed"] != second["seed"]  # they must sample differently
    parts = [
        {name: value for name, value in alone["update"].items() if name.split(".")[0] == part}
        for part in ("model", "critic", "average")
    ]
    for part in parts:
        assert norm(part) > 0.01
        assert all(torch.equal(first["update"][name], second["update"][name]) for name in part)
        assert relative_difference(part, {name: first["update"][name] for name in part}) <= 1e-5
    assert len(alone["steps"]) == 2
    # Means and extremes of tokens of micro-batches, which differ, and metrics that only one rank has
    own = ("ratio/", "clip_ratio", "approx_kl", "critic_loss", "entropy", "step_time", "of_process")
    for results in zip(first["steps"], second["steps"], alone["steps"], strict=True):
        assert results[0].keys() - {"step_time"} == results[1].keys() - {"step_time"}
        assert {"rollout/of_process_0", "rollout/of_process_1", "rollout/everywhere"} <= results[0].keys()
        names = [name for name in results[2] if name != "kl" and not any(part in name for part in own)]
        assert {"policy_loss", "ptx_loss", "grad_norm", "kl_coef", "explained_variance", "rollout/reward_std"} <= set(
            names
        )
        for name in names:
            values = [result[name] for result in results]
            assert values[0] == values[1] == pytest.approx(values[2], rel=1e-4, abs=1e-5), name
    evaluated = [result["evaluated"] for result in (first, second, alone)]
    assert evaluated[0] == evaluated[1] and evaluated[0]["num_samples"] == 5
    for name in ("reward_mean", "reward_std", "response_length_mean", "everywhere_mean"):
        assert evaluated[0][name] == pytest.approx(evaluated[2][name], rel=1e-5)


@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_two_processes_go_on_from_a_checkpoint(engine, results):
    first, second = results(engine)["resumed_episode"]
    assert all(torch.equal(first["update"][name], second["update"][name]) for name in first["update"])
    for rank in (first, second):
        assert rank["otherwise"] == []
        assert rank["logs"][0] == rank["logs"][1] and len(rank["logs"][0]) == 4
        assert rank["evaluated"][0] == rank["evaluated"][1]


def test_weights_in_parts_are_refused(results):
    for rank in results("zero3")["refused_shards"]:
        assert rank["message"].startswith("Experience is made and scored with whole weights")


def test_an_actor_in_parts_is_like_a_whole_one(results):
    for rank in results("zero3")["actor_in_parts"]:
        assert rank["in_parts"] and rank["difference"] <= 1e-5
        assert rank["numbers"][0] == rank["numbers"][1]
        assert rank["sampled"][0] == rank["sampled"][1]
