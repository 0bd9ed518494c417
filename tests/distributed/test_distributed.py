# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Two ranks train like one process with DDP, FSDP2 and DeepSpeed's ZeRO-2 and 3. ZeRO-1: `test_launch_configs.py`."""

import re
from itertools import product

import pytest
import torch
from engine_lists import PARTS, engines_of
from evaluation.test_metric_sums import BY_BATCH
from launcher import Run


ALGORITHMS = "reinforce reinforce_baseline cpgd gmpo dual_clip adaptive_kl entropies_of_rollout".split()
ALGORITHMS += ["current_entropies", "own_estimator", "token_baseline", "best_of_two"]
LOSSES = ["grpo_loss", "cispo_loss", "vespo_loss", "luspo_loss"]
ADAPTERS = ["adapter_images", "adapter_audio"]
TOKEN_BUDGET = ["token_budget", "rloo_token_budget"]
SPLIT = ["split_groups"]
GREEDY = {"fsdp2": ["greedy_images"], "zero3": ["greedy_audio"]}
SAVED = {"fsdp2": ["greedy_images", "greedy_isolated"], "zero3": ["greedy_audio"]}
VIEWS = ["papo", "vppo", "mapo"]
VIEWS_IN_PARTS = ["papo_token_budget"]
FOR_EACH_ENGINE = "whole_groups_checkpointed"
IN_DEFAULT_RUN = {"ddp": ["straddling_group"]}
DDP = "straddling_group straddling_groups skipped_rows whole_groups shuffled clips mixed_rows isolated_media".split()
DDP += ["rloo", "views", "one_image", "without_signal", "asynchronous", FOR_EACH_ENGINE]
DDP += [*TOKEN_BUDGET, *SPLIT, *ADAPTERS, *LOSSES, *ALGORITHMS, *VIEWS, *VIEWS_IN_PARTS, "papo_without_media"]
METRICS = ["loss", "grad_norm", "reward", "reward_std", "shaped_reward", "kl_coef", "media/skipped"]
METRICS += ["packing/skipped_frac", "view/weight_max", "view/reward", "view/reward_clean"]
METRICS += ["contrast/accuracy", "contrast/bonus", "staleness/mean", "staleness/max"]
# Means over micro-batches, which hold different completions on one process and on two
MICRO_BATCHES = [
    "kl",
    "entropy",
    "view/kl",
    "view/entropy",
    "view/dependency",
    "clip_ratio/region_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_max",
]
ONE_MICRO_BATCH = "straddling_group straddling_groups hybrid skipped_rows mixed_rows isolated_media rloo".split()
ONE_MICRO_BATCH += [
    "greedy_images",
    "greedy_audio",
    "greedy_isolated",
    "reinforce",
    "reinforce_baseline",
    "token_baseline",
    "best_of_two",
    "cpgd",
    "gmpo",
    "dual_clip",
]
ONE_MICRO_BATCH += ["own_estimator", *VIEWS, "papo_without_media"]

PPO = ["ppo_images", "ppo_shared_trunk", "ppo_adapter", "ppo_parts"]
PPO_METRICS = "loss grad_norm learning_rate value_learning_rate kl kl_coef shaped_reward explained_variance".split()
PPO_METRICS += [
    f"{name}/{statistic}" for name, statistic in product(("values", "returns", "advantages"), ("mean", "std"))
]
PPO_MICRO_BATCHES = "policy_loss value_loss value_clip_ratio approx_kl ratio/mean ratio/max entropy".split()


# Launches


class Runs:
    """One launch of two processes per engine, and one of a single process as their baseline."""

    def __init__(self, scenarios, folder):
        self.scenarios = scenarios
        self.folder = folder
        self._runs = {}
        self._results = {}

    def results(self, name):
        if name.startswith("zero"):
            pytest.importorskip("deepspeed")
        for each in ("one", name):  # in parallel
            if each in self.scenarios and each not in self._runs:
                if each == "one":
                    engine = "ddp"
                    n = 1
                else:
                    engine = each
                    n = 2
                self._runs[each] = Run(engine, n, self.scenarios[each], self.folder / each)
        if name not in self._results:
            self._results[name] = self._runs[name].results()
        return self._results[name]

    def stop(self):
        for run in self._runs.values():
            run.stop()


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Runs the scenarios that the selected tests need."""
    scenarios = {}
    for item in request.session.items:
        if item.module is request.module and "runs" in item.fixturenames:
            given = item.callspec.params
            for fixture, name in {"two": given["engine"], "one": "one"}.items():
                if fixture in item.fixturenames:
                    scenarios.setdefault(name, {})[given["scenario"]] = None
    runs = Runs({name: list(each) for name, each in scenarios.items()}, tmp_path_factory.mktemp("runs"))
    yield runs
    runs.stop()


@pytest.fixture
def two(runs, engine, scenario):
    return runs.results(engine)[scenario]


@pytest.fixture
def one(two, runs, scenario):
    return runs.results("one")[scenario]


def weight(engine, name):
    """Returns the marks of a scenario: each change has to pass all with DDP, and one with each engine that shards."""
    if name in IN_DEFAULT_RUN.get(engine, ()):
        return []
    return [pytest.mark.gate if engine == "ddp" or name == FOR_EACH_ENGINE else pytest.mark.slow]


def of(*tables):
    """Parametrizes a test with each engine's scenarios."""
    return pytest.mark.parametrize(
        ("engine", "scenario"),
        [
            pytest.param(engine, name, marks=weight(engine, name))
            for scenarios in tables
            for engine, names in scenarios.items()
            for name in names
        ],
    )


def on(engines, *names):
    return of(dict.fromkeys(engines, names))


def with_engines(*names):
    """Parametrizes a test with the engines that `engine_lists.py` has for each scenario."""
    return of({engine: [name for name in names if engine in engines_of(name)] for engine in ("ddp", *PARTS)})


# GRPO and RLOO


def norm(update):
    return torch.cat([value.flatten() for value in update.values()]).norm().item()


def assert_same_ranks(two, least=0.1):
    first, second = (rank["update"] for rank in two)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert norm(first) > least


def assert_same_update(actual, expected, least=0.1, tolerance=2e-5):
    assert actual.keys() == expected.keys()
    assert norm(expected) > least
    assert norm({name: actual[name] - expected[name] for name in expected}) <= tolerance * norm(expected)


def assert_same_metrics(two, one, names, tolerance=1e-5):
    for name in names:
        logged = [[step[name] for step in result["steps"] if name in step] for result in (*two, *one)]
        # A loss may be the small difference of larger numbers
        assert logged[0] == logged[1] == pytest.approx(logged[2], rel=tolerance, abs=1e-6), name


@of({"ddp": ["skipped_rows"]})
def test_processes_skip_the_same_rows(two, one):
    assert [rank["skipped"] for rank in (*two, *one)] == [[1, 4]] * 3
    for ranks in (two, one):
        for each in zip(*(rank["evaluations"] for rank in ranks), strict=True):
            rows = [row for evaluated, _, _ in each for row in evaluated]
            assert sorted(rows) == sorted(4 * [0, 2, 3, 5, 6, 7])
            assert [*each] == [[evaluated, pytest.approx(sum(rows) / len(rows)), 2] for evaluated, _, _ in each]


TALKS = ["conversations", "lost_environments"]


@of({"ddp": [*TALKS, "rewritten_contexts", "rewarded_turns"], "fsdp2": ["conversations"]})
def test_conversations_train_as_in_one_process(two, one, scenario):
    assert_same_ranks(two)
    assert_same_update(two[0]["update"], one[0]["update"])
    turns = [f"rewards/by_turn/turn_{i}" for i in range(1, 5)] if scenario == "rewarded_turns" else []
    names = ["call_frequency", "failure_frequency", "ended_by_turns", "environment_failures"]
    assert_same_metrics(two, one, ["loss", *(f"tools/{name}" for name in names), *turns])
    if scenario == "lost_environments":
        n_calls = 4
        n_failures = 4
    else:
        n_calls = 7
        n_failures = 0
    assert two[0]["steps"][0]["tools/call_frequency"] == n_calls / (12 if turns else 8)
    assert two[0]["steps"][0]["tools/environment_failures"] == n_failures
    assert all(name in two[0]["steps"][0] for name in turns)


@of({engine: [name for name in [*DDP, "hybrid"] if engine in engines_of(name)] for engine in ("ddp", *PARTS)}, SAVED)
def test_trains_as_one_process(two, one, engine, scenario):
    assert two[0]["sharded"] == (engine == "fsdp2")
    assert_same_ranks(two)
    assert_same_update(two[0]["update"], one[0]["update"])
    assert_same_metrics(two, one, [*METRICS, *(MICRO_BATCHES if scenario in ONE_MICRO_BATCH else [])])


@on(["fsdp2"], "compiled_layers")
def test_compiled_layers_train_as_others_in_one_process(two, one):
    assert two[0]["sharded"] and (two[0]["compiled"], one[0]["compiled"]) == (4, 0)
    assert_same_ranks(two)
    assert_same_update(two[0]["update"], one[0]["update"])


@on(["ddp"], "straddling_group", "straddling_groups")
def test_a_group_that_straddles_processes_is_packed_on_each(two, scenario):
    shares = [step["packing/shared_frac"] for step in two[0]["steps"]]
    # Either both completions of a process share a prompt, or 4 of 6 have one prompt and 2 another
    assert shares == pytest.approx([0.5 if scenario == "straddling_group" else 2 / 3] * 2, abs=0.05)


@on(["ddp"], "one_image")
def test_prompts_that_share_an_image_are_packed_on_each(two):
    assert all(step["packing/shared_frac"] > 0.8 for step in two[0]["steps"] if "packing/shared_frac" in step)


@on(["ddp"], FOR_EACH_ENGINE)
def test_processes_have_different_numbers_of_tokens(two):
    """Otherwise the mean of their means would equal the mean over all tokens."""
    assert all(a != b for a, b in zip(two[0]["tokens"], two[1]["tokens"], strict=True))


@with_engines(*TOKEN_BUDGET, "ppo_parts")
def test_processes_run_as_many_parts_as_the_one_that_needs_most(two):
    assert [rank["parts"] for rank in two] == [[[1, 2]] * 4, [[2, 2]] * 4]  # micro-batches


@with_engines(*SPLIT)
def test_groups_of_one_process_are_split(two):
    parts = [torch.tensor(rank["parts"]) for rank in two]
    assert (parts[0][:, 0] == 2).all() and (parts[1][:, 0] > 2).all()
    assert (parts[0][:, 1] == parts[1][:, 0]).all() and (parts[1][:, 1] == parts[1][:, 0]).all()


@on(["ddp"], "clips")
def test_positions_of_the_encoder_are_not_trained(two):
    """Transformers' encoder fixes them, but loads them as trainable."""
    assert [v.any() for name, v in two[0]["update"].items() if "audio_tower.embed_positions" in name] == [False]


@with_engines("not_finite")
def test_what_is_not_finite_is_neither_trained_on_nor_saved(two, one, engine):
    """Skips an update as one process does, ends the run after too many, and leaves checkpoints intact."""
    assert_same_ranks(two)
    assert_same_update(two[0]["update"], one[0]["update"])
    for rank in two:
        assert [step["skipped_updates"] for step in rank["steps"]] == [0, 1, 0]
        assert [step["learning_rate"] for step in rank["steps"]] == pytest.approx([0.6, 0.4, 0.2])
        too_many, not_saved, *unchecked = rank["errors"]
        assert too_many.startswith("The gradient of 1 updates in a row isn't finite.")
        assert not_saved.startswith("Weights aren't finite after step 2, ")
        assert rank["saved"] == [["checkpoint-1"], ["checkpoint-1"]]
        assert len(unchecked) == (engine == "zero3")
        assert all(message.startswith("`zero_optimization.compute_grad_norm` is false") for message in unchecked)
    assert "such as 'lm_head.weight'" in two[1]["errors"][1]


@on(["ddp"], "own_estimator")
def test_estimator_gets_the_whole_batch_on_each_process(two, one):
    first, second, alone = (rank["estimated"] for rank in (*two, *one))
    assert len(first) == 2  # generation batches
    assert first == second
    for name in ("rewards", "rewards_per_func", "group_ids", "mask"):  # scores round differently
        assert [call[name] for call in first] == [call[name] for call in alone]


@on(["ddp"], "adaptive_kl")
def test_adaptive_coefficient_moves(two):
    coefficients = [step["kl_coef"] for step in two[0]["steps"]]
    # After the first of the two updates on each batch of completions
    assert coefficients[0] == coefficients[1] != coefficients[2] == coefficients[3]


@on(["ddp"], "experience")
def test_statistics_of_experience_are_those_of_all_processes(two, one):
    widths = [max(map(len, rank["advantages"]["reinforce"])) for rank in two]
    assert widths[0] != widths[1]
    for estimator, expected in one[0]["advantages"].items():
        actual = two[0]["advantages"][estimator] + two[1]["advantages"][estimator]
        assert len(actual) == len(expected) == 12
        assert max(map(abs, sum(expected, []))) > 0.1
        for a, b in zip(actual, expected, strict=True):
            assert a == pytest.approx(b, abs=1e-5), estimator


# Sampling


@on(["ddp"], "checked")
def test_checks_of_noisy_processes_agree_and_memory_stops_all(two):
    first, second = two
    check = first["self_check"]
    assert check == second["self_check"] and check["rounding"] > 0.03
    assert max(check["padded"], check["packed"], check["rows"], check["sampled"]) > 0.177
    assert check["fallbacks"]["packing"] and check["fallbacks"]["isolate"] is None
    assert first["error"] == "MemoryError: scoring packed rows ran out of memory in another process"
    assert second["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@on(["ddp"], "sampled")
def test_processes_agree_on_their_own_samples(two):
    first, second = two
    assert_same_ranks(two)
    check = first["self_check"]
    assert check == second["self_check"]
    assert max(check["packed"], check["rows"]) <= check["tolerance"] < min(check["media"].values())
    assert first["steps"][0]["packing/shared_frac"] > 0
    # The ranks share a prompt and must sample different completions
    for step in zip(*(rank["completions"] for rank in two), strict=True):
        assert len({tuple(ids) for completions in step for ids in completions}) > 2


@of(GREEDY)
def test_generates_as_one_process(two, one):
    completions = [rank["completions"] for rank in two]
    assert completions[0] + completions[1] == one[0]["completions"]
    longest = [max(map(len, ids)) for ids in completions]
    assert longest[0] != longest[1]  # so one rank waits for the other


# Groups that ranks exchange


@on(["ddp"], "exchanged")
def test_processes_exchange_their_groups(two):
    first, second = two
    assert_same_ranks(two)
    # On the first rank, a second draw replaces groups without signal. Later, the kept groups do.
    for batches in zip(first["batches"], second["batches"], strict=True):
        dead, tokens, all_tokens = zip(*batches, strict=True)
        assert dead == (0, 0)
        assert all_tokens == (sum(tokens),) * 2
    sampling = [{k: v for k, v in step.items() if k.startswith(("sampling/", "replay/"))} for step in first["steps"]]
    assert [step["sampling/rounds"] for step in sampling] == [2, 2, 2, 2]
    assert [step["sampling/kept_frac"] for step in sampling] == [0.75, 0.75, 0.5, 0.5]
    assert [step["sampling/dropped_equal"] for step in sampling] == [0.25, 0.25, 0.5, 0.5]
    assert [step["replay/frac"] for step in sampling] == [0, 0, 0.5, 0.5]
    assert [step["replay/age"] for step in sampling][:2] == [0, 0] < [step["replay/age"] for step in sampling][2:]
    others = [{k: step[k] for k in mine} for mine, step in zip(sampling, second["steps"], strict=True)]
    assert sampling == others
    rates, coming = first["difficulty"]
    assert first["difficulty"] == second["difficulty"] and len(set(rates)) > 1 and coming
    # Two draws on both ranks take each of the eight prompts once
    epochs = [[rank["drawn"][start : start + 2] for rank in (first, second)] for start in (0, 2)]
    assert all(len({n for rank in epoch for draw in rank for n in draw}) == 8 for epoch in epochs)


@on(["ddp"], "balanced", "balanced_ppo", "balanced_token_weights")
def test_ranks_exchange_groups_for_equal_work(two):
    """The global batch is the same, so that gradients differ by rounding alone."""
    assert_same_ranks(two)
    for rank in two:
        assert rank["difference"] < 1e-5
        for kept, moved in zip(rank["kept"], rank["steps"], strict=True):
            names = {"loss", "grad_norm", "reward", "shaped_reward", "explained_variance"} & kept.keys()
            assert {name: moved[name] for name in names} == pytest.approx(
                {name: kept[name] for name in names}, rel=1e-5, abs=1e-6
            )
            if "packing/rank_imbalance" in kept:
                assert kept["packing/rank_imbalance"] > 1.2 > 1.05 > moved["packing/rank_imbalance"] >= 1
                # Two of each rank's four groups: the media of prompts and of their views, and some kB of tokens
                sizes = sorted(two[0]["media"] + two[1]["media"])
                assert 2 * sum(sizes[:4]) < moved["packing/moved_mb"] * 1e6 < 2 * sum(sizes[4:]) + 4 * 30_000


# Saving and resuming


@of({"ddp": ADAPTERS}, SAVED, {"fsdp2": ["adapter_images"]})
def test_what_is_saved_loads_as_it_was_trained(two):
    """Covers the folder of `save_model` and a checkpoint."""
    for rank in two:
        assert len(rank["saved_otherwise"]) >= 2
        assert not any(rank["saved_otherwise"])


@on(["ddp"], "resumed")
def test_resumed_run_is_the_uninterrupted_run(two):
    assert_same_ranks(two)
    for rank in two:
        assert rank["otherwise"] == []
        assert rank["logs"][0] == rank["logs"][1]
    for name in ("replay/frac", "packing/moved_mb"):
        assert any(step.get(name, 0) > 0 for step in two[0]["logs"][0][3:]), name


@with_engines("resumed_reference")
def test_reference_that_follows_the_policy_is_restored(two, engine):
    assert_same_ranks(two)
    for rank in two:
        assert rank["otherwise"] == []
        assert rank["moved"] and rank["kl"][-1] > 1e-6
        if engine == "ddp":
            assert "has no folder 'ref_model' with a reference that follows the policy" in rank["message"]


@on(["fsdp2"], "adapter_images")
def test_adapters_in_shards_resume(two):
    assert all(rank["otherwise"] == [] and rank["logs"][0] == rank["logs"][1] for rank in two)


@pytest.mark.slow
def test_shards_are_resumed_by_another_number_of_processes(tmp_path):
    (two,) = Run("fsdp2", 2, ["sharded"], tmp_path / "two").results().values()
    (four,) = Run("fsdp2", 4, ["resharded"], tmp_path / "four").results().values()
    for rank in four:
        assert rank["sharded"] and [step["reward"] for step in rank["steps"]] == pytest.approx(
            [step["reward"] for step in two[0]["steps"]]
        )
        assert_same_update(rank["update"], two[0]["update"], tolerance=1e-4)
        assert "saved without FSDP (or with `save_only_model`), and this run is with FSDP's" in rank["message"]


@pytest.mark.slow
def test_replicated_shards_train_as_one_process(tmp_path):
    """Four processes, of which two pairs hold the shards; checkpoints, too, are those of one pair."""
    scenarios = ["resumed_reference"]
    four = Run("hsdp", 4, scenarios, tmp_path / "four")
    one = Run("ddp", 1, scenarios, tmp_path / "one")
    (ranks,) = four.results().values()
    ((single,),) = one.results().values()
    assert all(rank["sharded"] and rank["otherwise"] == [] for rank in ranks)
    for rank in ranks[1:]:
        assert_same_ranks([ranks[0], rank], least=0.01)
    # Adam divides by gradients that round
    assert_same_update(ranks[0]["update"], single["update"], tolerance=2e-4)


@on(["ddp"], "resumed_by_more")
def test_processes_that_the_run_before_did_not_have_agree_with_the_others(two):
    first, second = two
    assert first["shared"] == second["shared"]
    assert first["shared"][0] != first["expected_before"] != 0.1  # adapted before and after
    assert_same_ranks(two, least=0.01)


# PPO


def part_of(name):
    return name.split()[0] if name.startswith("average of ") else "critic" if name.startswith("critic.") else "policy"


def assert_same_ppo(two, one, engine, scenario, tolerance=1e-5):
    """Asserts that policy, critic and average made the same updates from the same numbers."""
    assert_same_ranks(two)
    for part in ("policy", "critic", "average"):
        actual, expected = (
            {name: value for name, value in run[0]["update"].items() if part_of(name) == part} for run in (two, one)
        )
        if part == "average" and engine == "zero3":
            assert actual == {}
        else:
            assert_same_update(actual, expected, least=0.02, tolerance=tolerance)
    accumulated = scenario == "ppo_shared_trunk"
    assert_same_metrics(two, one, [*PPO_METRICS, *([] if accumulated else PPO_MICRO_BATCHES)], tolerance)
    # Each rank has different supervised rows, together those of one process
    assert two[0]["supervised"] != two[1]["supervised"]
    together = [a + b for a, b in zip(two[0]["supervised"], two[1]["supervised"], strict=True)]
    assert together == one[0]["supervised"]


@with_engines(*PPO, "ppo_mixed")
def test_trains_policy_and_critic_as_one_process(two, one, engine, scenario):
    assert two[0]["sharded"] == (engine == "fsdp2")
    assert_same_ppo(two, one, engine, scenario)


@on(["zero3"], "ppo_saved")
def test_deepspeed_counts_no_steps_of_a_frozen_policy(two, one, engine, scenario):
    """Adam normalizes a gradient by its size, so rounding matters where the gradient is near zero."""
    assert_same_ppo(two, one, engine, scenario, tolerance=1e-2)


@with_engines("ppo_saved")
def test_what_ppo_saves_loads_as_it_was_trained(two):
    for rank in two:
        assert rank["saved_otherwise"] == []
        assert rank["changed_by_saving"] == []


@with_engines("ppo_resumed")
def test_resumed_ppo_is_the_uninterrupted_run(two):
    assert_same_ranks(two, least=0)
    assert {part_of(name) for name, value in two[0]["update"].items() if value.any()} >= {"policy", "critic"}
    for rank in two:
        assert rank["otherwise"] == []
        assert rank["logs"][0] == rank["logs"][1]
        assert rank["supervised"][0] == rank["supervised"][1]


REENTRANT = "`ptx_coef` adds a second forward to each backward"
IN_PARTS = "`ema_decay` averages whole weights, which ZeRO-3 doesn't keep"


@on(["ddp", "zero3"], "ppo_refused")
def test_what_ppo_can_not_do(two, engine):
    """Covers a second forward pass with reentrant checkpointing, and an average of weights with ZeRO-3."""
    expected = [REENTRANT, IN_PARTS] if engine == "zero3" else [REENTRANT]
    for rank in two:
        assert len(rank["messages"]) == len(expected)
        assert all(message.startswith(start) for message, start in zip(rank["messages"], expected, strict=True))


@on(["fsdp2"], FOR_EACH_ENGINE, "adapter_images")
def test_shards_are_cast_before_an_engine_gets_the_weights(two):
    for rank in two:
        assert rank["cast_otherwise"] == [] and rank["gathered"] == 0.5


# Frozen parts, and learning rates of parts

TOWER = re.compile(r"(base_model\.model\.)?(critic\.model\.)?model\.visual\.(?!merger)")


@with_engines("parts", "parts_adapter")
def test_parts_train_as_in_one_process(two, one, engine):
    assert_same_ranks(two)
    assert_same_update(two[0]["update"], one[0]["update"])
    assert_same_metrics(two, one, ["loss", "grad_norm", "learning_rate"])
    assert two[0]["steps"][0]["learning_rate"] == 0.5
    assert two[0]["sharded"] == (engine == "fsdp2")
    moved = {name for name, value in two[0]["update"].items() if value.any()}
    assert not any(map(TOWER.match, moved)) and any("merger" in name for name in moved)


@with_engines("parts_ppo")
def test_parts_of_policy_and_critic_train_as_in_one_process(two, one, engine, scenario):
    assert_same_ppo(two, one, engine, scenario)
    moved = {name for name, value in two[0]["update"].items() if value.any()}
    assert not any(map(TOWER.match, moved))
    assert {"critic.head.weight", "lm_head.weight", "critic.model.model.visual.merger.mlp.0.weight"} <= moved


@with_engines("parts_resumed")
def test_resumed_run_trains_the_same_parts(two):
    assert_same_ranks(two, least=0.01)
    for rank in two:
        assert rank["otherwise"] == []
        assert rank["logs"][0][2:] == rank["logs"][1][-2:]
        assert "checkpoint-2 was saved with `freeze=['vision_tower']`, but this run has `freeze=" in rank["message"]


@on(["zero2"], "parts_of_deepspeed")
def test_rates_of_parts_need_an_optimizer_and_schedule_that_the_trainer_makes(two):
    for rank in two:
        for name, message in zip(["optimizer", "scheduler"], rank["messages"], strict=True):
            assert message.startswith(f"The DeepSpeed config has its own `{name}`, which would train all parts at one")


# States that wait in the host's memory


@with_engines("offloaded", "offloaded_adapter", "offloaded_ppo")
def test_states_leave_the_device_while_the_model_samples(two, engine, scenario):
    """Over accumulated rollouts, bit for bit."""
    for rank in two:
        assert rank["otherwise"] == [] and rank["logs"][0] == rank["logs"][1]
        plain, ours = rank["live"]
        assert len(plain) == len(ours) == 4
        for before, after in zip(plain, ours, strict=True):
            stays = {"policy"} if engine == "ddp" else {"policy", "critic"}  # which engines gather together
            assert before["policy"] > 0
            assert after == {name: number if name in stays else 0 for name, number in before.items()}
        # FSDP2 keeps gradients that it hasn't reduced to itself
        assert {each["gradients"] > 0 for each in plain[1::2]} == {engine != "fsdp2"}
        assert plain[2]["optimizer"] > 0
        assert (plain[2]["reference"] > 0) == (scenario != "offloaded_adapter")
        assert (plain[2]["copies"] > 0) == engine.startswith("zero")


# Evaluation


@on(["ddp"], "metric_sums")
def test_metrics_of_an_evaluation_do_not_depend_on_ranks(two, one):
    """Seven rows in batches of one and of two, which ranks can't share evenly."""
    for rank in two:
        for evaluation, expected in one[0].items():
            excepted = BY_BATCH.get(evaluation.split()[0], set())
            for name in expected.keys() - excepted:
                assert rank[evaluation][name] == pytest.approx(expected[name], rel=2e-5, abs=2e-6), (evaluation, name)


# Supervised training


@with_engines("sft_rows", "sft_parts", "sft_adapter")
def test_supervised_rows_train_as_in_one_process(engine, two, one):
    """Ranks have different media and numbers of tokens, over accumulated micro-batches, also in parts."""
    assert_same_ranks(two)
    assert_same_update(two[0]["update"], one[0]["update"])
    assert_same_metrics(two, one, ["loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"])
    assert all(rank["sharded"] == (engine == "fsdp2") for rank in two)


# Preferences


PAIRS = ["loss", "grad_norm", "entropy", "num_tokens", "rewards/chosen", "rewards/margins", "rewards/view"]
PAIRS += ["rewards/view_margins", "rewards/above_anchor", "logps/view"]


@with_engines("dpo_pairs", "dpo_parts", "dpo_adapter")
def test_preferences_train_as_in_one_process(engine, two, one):
    """Ranks have different media and tokens, and views of their media, over accumulated micro-batches."""
    assert_same_ranks(two)
    assert_same_update(two[0]["update"], one[0]["update"])
    assert_same_metrics(two, one, PAIRS)
    assert all(step["media/contribution"] > 0 for rank in two for step in rank["steps"])
    assert engine != "fsdp2" or two[0]["sharded"]


@with_engines("dpo_answers")
def test_preferences_of_answers_with_media_train_as_in_one_process(engine, two, one):
    assert_same_ranks(two)
    assert_same_update(two[0]["update"], one[0]["update"])
    assert_same_metrics(two, one, PAIRS)
    assert engine != "fsdp2" or two[0]["sharded"]


@with_engines("kto_parts")
def test_labelled_completions_train_as_in_one_process(engine, two, one):
    """Ranks have different media, tokens and numbers of labels, over accumulated micro-batches."""
    assert_same_ranks(two)
    assert_same_update(two[0]["update"], one[0]["update"])
    assert_same_metrics(two, one, ["loss", "grad_norm", "entropy", "num_tokens"])


@on(["ddp"], "kto_as_trl")
def test_the_kl_estimate_of_ranks_is_that_of_trl(two):
    assert_same_ranks(two)
    for rank in two:
        assert rank["distance"] < 1e-5
        for ours, theirs in zip(rank["steps"], rank["trl"], strict=True):
            for name in ("loss", "kl", "rewards/chosen", "logps/rejected", "num_tokens"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
        assert max(step["kl"] for step in rank["steps"]) > 0


@with_engines("reward_pairs", "reward_parts")
def test_reward_models_train_as_in_one_process(engine, two, one):
    """Ranks have different media, tokens, margins and ties."""
    assert_same_ranks(two, least=0.01)
    assert_same_update(two[0]["update"], one[0]["update"], least=0.01)
    names = ["loss", "grad_norm", "num_tokens", "accuracy", "margin", "mean_reward", "min_reward", "max_reward"]
    assert_same_metrics(two, one, names)
    assert engine != "fsdp2" or two[0]["sharded"]


@with_engines("rewarded_by_models")
def test_reward_models_by_name_score_as_in_one_process(engine, two, one):
    """One of them is an adapter."""
    assert_same_ranks(two)
    assert_same_metrics(
        two, one, [f"rewards/{name}/{each}" for name, each in product(("whole", "adapter"), ("mean", "std"))]
    )


@with_engines("dpo_resumed", "reward_resumed")
def test_resumed_preferences_are_the_uninterrupted_ones(two, scenario):
    assert_same_ranks(two, least=0.01)
    metrics = {"mean_reward", "accuracy"} if "reward" in scenario else {"rewards/view_margins", "media/contribution"}
    for rank in two:
        assert rank["otherwise"] == [] and rank["logs"][0][3:] == rank["logs"][1][-1:]
        assert metrics <= rank["logs"][0][3].keys()


@on(["ddp"], "dpo_skipped")
def test_processes_skip_the_same_preferences(two, one):
    assert_same_ranks(two)
    assert_same_update(two[0]["update"], one[0]["update"])
    assert [rank["skipped"] for rank in (*two, *one)] == [[1, 6]] * 3
    for rank in two:
        assert rank["evaluated"] == pytest.approx(one[0]["evaluated"], rel=1e-5)
    assert one[0]["evaluated"]["eval_media/skipped"] == 2


# Distillation


DISTILLATION = ["distill_teacher", "distill_parts", "distill_top_k", "distill_view", "distill_adapter"]
DISTILLATION += ["distill_average", "distill_several", "distill_separate", "distill_best"]


@with_engines(*DISTILLATION)
def test_two_ranks_are_distilled_into_like_one(two, one, engine):
    """Teachers are models of their own, sharded like the student, or the student itself."""
    assert_same_ranks(two, least=0.01)
    assert_same_update(two[0]["update"], one[0]["update"], least=0.01)
    assert_same_metrics(two, one, ["loss", "grad_norm", "entropy", "num_tokens"])
    assert engine != "fsdp2" or two[0]["sharded"]
