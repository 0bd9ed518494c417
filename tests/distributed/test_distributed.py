# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Two processes train as one does, with DDP, FSDP2 and DeepSpeed."""

import pytest
import torch
from launcher import Run


TIMEOUT = 600  # seconds; a run takes a tenth of it, and DeepSpeed compiles before its first
DDP = [
    "straddling_group",
    "straddling_groups",
    "whole_groups",
    "whole_groups_checkpointed",
    "mixed_rows",
    "apart",
]
ALGORITHMS = [
    "reinforce",
    "reinforce_baseline",
    "cpgd",
    "gmpo",
    "dual_clip",
    "adaptive_kl",
    "entropies_of_rollout",
    "current_entropies",
    "own_estimator",
]
ACCUMULATED = ["adaptive_kl", "entropies_of_rollout", "current_entropies"]  # some metrics average their micro-batches
GREEDY = ["greedy_images", "greedy_audio"]
FSDP2 = [*GREEDY, "greedy_apart", "straddling_groups", "whole_groups_checkpointed"]
FSDP2_ALGORITHMS = ["reinforce", "gmpo", "current_entropies"]
PPO = ["ppo_images", "ppo_shared_trunk", "ppo_adapter"]
PPO_ONLY_TWO = ["ppo_saved", "ppo_resumed"]
PPO_METRICS = [
    *[
        "loss",
        "grad_norm",
        "learning_rate",
        "value_learning_rate",
        "kl",
        "kl_coef",
        "shaped_reward",
        "explained_variance",
    ],
    *[f"{name}/{statistic}" for name in ("values", "returns", "advantages") for statistic in ("mean", "std")],
]
# Means over micro-batches, which one process makes of other completions than two do
PPO_MICRO_BATCHES = [
    "policy_loss",
    "value_loss",
    "value_clip_ratio",
    "approx_kl",
    "ratio/mean",
    "ratio/max",
    "entropy",
]


def run(engine, scenarios, folder, only_two):
    """Results of `scenarios` by two processes and by one, and of `only_two` by two."""
    runs = [Run(engine, 2, [*scenarios, *only_two], folder / "two"), Run(engine, 1, scenarios, folder / "one")]
    try:
        return [run.results(TIMEOUT) for run in runs]
    finally:
        for each in runs:
            each.stop()


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    only_two = ["sampled", "exchanged", "resumed", "resumed_by_more", "refused", *PPO_ONLY_TWO, "ppo_refused"]
    scenarios = [*DDP, *ALGORITHMS, "experience", *PPO, "ppo_mixed"]
    return run("ddp", scenarios, tmp_path_factory.mktemp("ddp"), only_two)


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory):
    only_two = ["sampled", "exchanged", *PPO_ONLY_TWO]
    return run("fsdp2", [*FSDP2, *FSDP2_ALGORITHMS, *PPO], tmp_path_factory.mktemp("fsdp2"), only_two)


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory):
    """Results of DeepSpeed, by stage."""
    pytest.importorskip("deepspeed")
    results = {}

    def train(stage: str):
        if stage not in results:
            only_two = [*PPO_ONLY_TWO, "ppo_refused"]
            results[stage] = run(stage, [*PPO, "ppo_adam"], tmp_path_factory.mktemp(stage), only_two)
        return results[stage]

    return train


def norm(update):
    return torch.cat([value.flatten() for value in update.values()]).norm().item()


def assert_same_training(two, one, metrics=("grad_norm", "loss", "reward", "reward_std")):
    first, second = (rank["update"] for rank in two)
    alone = one[0]["update"]
    assert first.keys() == second.keys() == alone.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert norm(alone) > 0.1
    assert norm({name: first[name] - alone[name] for name in alone}) <= 1e-5 * norm(alone)
    for key in metrics:
        logged = [[step[key] for step in result["steps"] if key in step] for result in (*two, *one)]
        assert logged[0] == logged[1] == pytest.approx(logged[2], rel=1e-4, abs=1e-5)


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


@pytest.mark.parametrize("scenario", ALGORITHMS)
def test_algorithms_take_the_batch_of_all_processes(ddp, scenario):
    two, one = ddp
    metrics = ["grad_norm", "loss", "shaped_reward", "kl_coef"]
    if scenario not in ACCUMULATED:
        metrics += ["kl", "clip_ratio/region_mean", "entropy"]
    assert_same_training(two[scenario], one[scenario], metrics)


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


def test_estimator_gets_the_whole_batch_on_each_process(ddp):
    two, one = ([rank["estimated"] for rank in run["own_estimator"]] for run in ddp)
    assert len(two[0]) == 2  # generation batches
    assert two[0] == two[1]
    for name in ("rewards", "rewards_per_func", "group_ids", "mask"):  # scores are rounded otherwise
        assert [call[name] for call in two[0]] == [call[name] for call in one[0]]


def test_adaptive_coefficient_moves(ddp):
    coefficients = [step["kl_coef"] for step in ddp[0]["adaptive_kl"][0]["steps"]]
    assert len(set(coefficients)) == 4


def assert_processes_exchange_their_groups(first, second):
    assert all(torch.equal(first["update"][name], second["update"][name]) for name in first["update"])
    assert norm(first["update"]) > 0.1
    # On the first process a second draw makes up for groups without signal, and later the groups that it kept
    for batches in zip(first["batches"], second["batches"], strict=True):
        dead, tokens, all_tokens = zip(*batches, strict=True)
        assert dead == (0, 0)
        assert all_tokens == (sum(tokens),) * 2
    sampling = [{k: v for k, v in step.items() if k.startswith(("sampling/", "replay/"))} for step in first["steps"]]
    assert [step["sampling/rounds"] for step in sampling] == [2, 2, 2, 2]
    assert [step["sampling/kept_frac"] for step in sampling] == [0.75, 0.75, 0.5, 0.5]
    assert [step["replay/frac"] for step in sampling] == [0, 0, 0.5, 0.5]
    assert [step["replay/age"] for step in sampling][:2] == [0, 0] < [step["replay/age"] for step in sampling][2:]
    others = [{k: step[k] for k in mine} for mine, step in zip(sampling, second["steps"], strict=True)]
    assert sampling == others
    # Two draws on both processes take each of the eight prompts once
    epochs = [[rank["drawn"][start : start + 2] for rank in (first, second)] for start in (0, 2)]
    assert all(len({n for rank in epoch for draw in rank for n in draw}) == 8 for epoch in epochs)


def test_ddp_processes_exchange_their_groups(ddp):
    assert_processes_exchange_their_groups(*ddp[0]["exchanged"])


def test_ddp_resumed_run_is_the_uninterrupted_run(ddp):
    first, second = ddp[0]["resumed"]
    assert all(torch.equal(first["update"][name], second["update"][name]) for name in first["update"])
    assert norm(first["update"]) > 0.1
    for rank in (first, second):
        assert rank["otherwise"] == []
        assert rank["logs"][0] == rank["logs"][1]
    assert any(step.get("replay/frac", 0) > 0 for step in first["logs"][0][3:])


def test_processes_that_the_run_before_did_not_have_agree_with_the_others(ddp):
    first, second = ddp[0]["resumed_by_more"]
    assert first["shared"] == second["shared"]
    assert first["shared"][0] != first["expected_before"] != 0.1  # adapted before and after
    assert all(torch.equal(first["update"][name], second["update"][name]) for name in first["update"])
    assert norm(first["update"]) > 0.01


def test_statistics_of_experience_are_those_of_all_processes(ddp):
    two, (one,) = ddp[0]["experience"], ddp[1]["experience"]
    widths = [max(map(len, rank["advantages"]["reinforce"])) for rank in two]
    assert widths[0] != widths[1]
    for estimator, expected in one["advantages"].items():
        actual = two[0]["advantages"][estimator] + two[1]["advantages"][estimator]
        assert len(actual) == len(expected) == 12
        assert max(map(abs, sum(expected, []))) > 0.1
        for a, b in zip(actual, expected, strict=True):
            assert a == pytest.approx(b, abs=1e-5), estimator


def test_groups_that_straddle_processes_are_not_exchanged(ddp):
    for rank in ddp[0]["refused"]:
        assert [message.split()[0] for message in rank["messages"]] == ["`dynamic_sampling`", "`replay_buffer_size`"]
        assert all("must be a multiple of `num_generations` (4)" in message for message in rank["messages"])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [*FSDP2, *FSDP2_ALGORITHMS])
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


@pytest.mark.slow
def test_fsdp2_processes_exchange_their_groups(fsdp2):
    assert_processes_exchange_their_groups(*fsdp2[0]["exchanged"])


# PPO


def assert_same_ppo(two, one, scenario, tolerance=1e-5):
    """Policy, critic and average made the same updates, from the same numbers."""
    two, one = two[scenario], one[scenario]
    first, second = (rank["update"] for rank in two)
    alone = one[0]["update"]
    assert first.keys() == second.keys() == alone.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for part in ("policy", "critic", "average"):
        expected = {name: value for name, value in alone.items() if part_of(name) == part}
        difference = norm({name: first[name] - value for name, value in expected.items()}) if expected else 0
        if expected:
            assert norm(expected) > 0.02, part
            assert difference <= tolerance * norm(expected), part
    accumulated = scenario == "ppo_shared_trunk"
    for key in [*PPO_METRICS, *([] if accumulated else PPO_MICRO_BATCHES)]:
        logged = [[step[key] for step in result["steps"] if key in step] for result in (*two, *one)]
        assert logged[0] == logged[1] == pytest.approx(logged[2], rel=max(1e-4, tolerance), abs=1e-5), key
    # Each process has supervised rows of its own, together those of one process
    assert two[0]["supervised"] != two[1]["supervised"]
    together = [a + b for a, b in zip(two[0]["supervised"], two[1]["supervised"], strict=True)]
    assert together == one[0]["supervised"]


def part_of(name):
    return name.split()[0] if name.startswith("average of ") else "critic" if name.startswith("critic.") else "policy"


def assert_saves_and_resumes(two):
    for rank in two["ppo_saved"]:
        assert rank["saved_otherwise"] == []
        assert rank["changed_by_saving"] == []
    first, second = two["ppo_resumed"]
    assert all(torch.equal(first["update"][name], second["update"][name]) for name in first["update"])
    assert {part_of(name) for name, value in first["update"].items() if value.any()} >= {"policy", "critic"}
    for rank in (first, second):
        assert rank["otherwise"] == []
        assert rank["logs"][0] == rank["logs"][1]
        assert rank["supervised"][0] == rank["supervised"][1]


@pytest.mark.parametrize("scenario", [*PPO, "ppo_mixed"])
def test_ddp_trains_policy_and_critic_as_one_process(ddp, scenario):
    assert_same_ppo(*ddp, scenario)


def test_ddp_saves_and_resumes_ppo(ddp):
    assert_saves_and_resumes(ddp[0])


REENTRANT = "`ptx_coef` adds a second forward to each backward"
IN_PARTS = "`ema_decay` averages whole weights, which ZeRO-3 doesn't keep"


def assert_refuses(two, *messages):
    for rank in two["ppo_refused"]:
        assert len(rank["messages"]) == len(messages)
        assert all(a.startswith(b) for a, b in zip(rank["messages"], messages, strict=True))


def test_second_forward_does_not_go_with_reentrant_checkpointing(ddp):
    assert_refuses(ddp[0], REENTRANT)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", PPO)
def test_fsdp2_trains_policy_and_critic_as_one_process(fsdp2, scenario):
    assert fsdp2[0][scenario][0]["sharded"]
    assert_same_ppo(*fsdp2, scenario)


@pytest.mark.slow
def test_fsdp2_saves_and_resumes_ppo(fsdp2):
    assert_saves_and_resumes(fsdp2[0])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", PPO)
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_deepspeed_trains_policy_and_critic_as_one_process(deepspeed, stage, scenario):
    assert_same_ppo(*deepspeed(stage), scenario)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_deepspeed_counts_no_steps_of_a_frozen_policy(deepspeed, stage):
    """Adam divides by what it remembers, so that rounding shows more."""
    assert_same_ppo(*deepspeed(stage), "ppo_adam", tolerance=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_deepspeed_saves_and_resumes_ppo(deepspeed, stage):
    assert_saves_and_resumes(deepspeed(stage)[0])


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "messages"), [("zero2", [REENTRANT]), ("zero3", [REENTRANT, IN_PARTS])])
def test_what_deepspeed_can_not_do(deepspeed, stage, messages):
    assert_refuses(deepspeed(stage)[0], *messages)
