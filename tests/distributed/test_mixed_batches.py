# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Ranks with different media train like one process, and no collective hangs."""

from unittest import mock

import pytest
import torch
from datasets import Dataset
from engine_lists import engines_of
from helpers.marks import slow_but
from helpers.trainer_utils import Gradients, Injected, image_rows, load, run, sound, text_rows
from launcher import Run

from trl_multimodal_rft import MultimodalGRPOTrainer, policy
from trl_multimodal_rft.modalities import MODALITIES


ENCODERS = {  # by scenario, the kinds whose encoders train
    "mixed_vision": {"image"},
    "mixed_deepstack": {"image"},
    "mixed_audio": {"audio"},
    "mixed_omni": {"image", "audio"},
    "mixed_padded": {"image", "audio"},
    "mixed_accumulated": {"image"},
    "mixed_accumulated_checkpointed": {"image"},
    "mixed_parts": {"image"},
    "mixed_parts_shared": {"image"},
    "mixed_adapted_language": set(),
    "mixed_adapted_projector": {"audio"},
    "mixed_adapted": {"image", "audio"},
    "mixed_critic": {"image"},
}
MEASURED = ["mixed_vision", "mixed_omni", "mixed_critic"]  # with the contribution of media
SEARCHED = ["mixed_accumulated_searched", "mixed_parts_searched"]  # DDP searches for unused weights
ISOLATED = ["mixed_isolated", "mixed_isolated_numbers"]
REFUSED = {"fsdp2": ["mixed_isolated_numbers"]}  # and, by the same lines, with all engines that shard
REFUSAL = "Ranks hold different modalities, but this model needs separate forward passes"


def scenarios_of(engine):
    """Returns the scenarios of an engine that train."""
    return [*(name for name in ENCODERS if engine in engines_of(name)), *([*SEARCHED, *ISOLATED] * (engine == "ddp"))]


@pytest.fixture(scope="module")
def one_process(request, tmp_path_factory):
    """Runs the scenarios of the selected engines in one process, in the background of the first test."""
    items = [item for item in request.session.items if item.module is request.module]
    engines = [item.callspec.params["engine"] for item in items if "one_process" in item.fixturenames]
    names = dict.fromkeys(name for engine in engines for name in scenarios_of(engine))
    run = Run("ddp", 1, [*names], tmp_path_factory.mktemp("mixed") / "one")
    yield run
    run.stop()


@pytest.mark.parametrize(
    "engine",
    [pytest.param("ddp", marks=pytest.mark.gate), *slow_but(["fsdp2", "zero3"])],
)
def test_processes_with_different_media_train_as_one_process(engine, one_process, tmp_path):
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    names = scenarios_of(engine)
    encoders = {name: ENCODERS[name] for name in names if name in ENCODERS}
    refused = REFUSED.get(engine, [])
    two = Run(engine, 2, [*names, *refused], tmp_path / "two")
    try:
        results = two.results()
        alone = one_process.results()
    finally:
        two.stop()
    for name in refused:
        assert all(rank["message"].startswith(REFUSAL) for rank in results.pop(name)), name
    for name, ranks in results.items():
        assert_same_training(name, ranks, alone[name][0])
    for name in encoders.keys() & MEASURED:
        assert_same_contribution(name, results[name], alone[name][0])
    for name, kinds in encoders.items():
        assert_encoders_run_together(name, engine, kinds, [rank["forwards"] for rank in results[name]])
        assert not any(dummies for _, dummies in alone[name][0]["forwards"]), name
    for rank in results.get("mixed_parts", []) + results.get("mixed_parts_shared", []):
        # The last step's completions are alike in each group, so that nothing is forwarded
        assert all(step["token_budget/parts"] >= 2 for step in rank["steps"][:-1] if "loss" in step)
    # The trainer finds the trainable encoders once per run, in the policy and in the critic if it exists
    for name in encoders:
        n = 2 if name == "mixed_critic" else 1
        assert all(rank["searches"] in ([n] if engine == "ddp" else [0, n]) for rank in results[name]), name
    # The media were in the earlier micro-batch, in the later one, and in one per rank
    if "mixed_accumulated" in results:
        held = [[own for own, _ in rank["forwards"]] for rank in results["mixed_accumulated"]]
        assert held == [[["image"], [], [], [], [], ["image"]], [[], [], [], ["image"], ["video"], []]]


def assert_same_training(name, ranks, alone):
    first, second = (rank["update"] for rank in ranks)
    expected = alone["update"]
    assert first.keys() == second.keys() == expected.keys(), name
    assert all(torch.equal(first[key], second[key]) for key in first), name
    encoders = [key for key in expected if any(part in key for part in ("visual", "vision", "audio", "projector"))]
    for keys in (encoders, [key for key in expected if key not in encoders]):
        size = norm(expected[key] for key in keys)
        assert size > 0.01 or (keys is encoders and name == "mixed_adapted_language"), name
        assert norm(first[key] - expected[key] for key in keys) <= 1e-5 * size, name
    for key in ("grad_norm", "loss", "reward", "reward_std"):
        logged = [[step[key] for step in result["steps"]] for result in (*ranks, alone)]
        assert logged[0] == logged[1] == pytest.approx(logged[2], rel=1e-4, abs=1e-5), name
    sampled = [a + b for a, b in zip(*(rank["samples"] for rank in ranks), strict=True)]
    assert sampled == alone["samples"], name
    for rank in ranks:
        assert len(rank["evaluations"]) == len(alone["evaluations"]), name
        for evaluation, other in zip(rank["evaluations"], alone["evaluations"], strict=True):
            assert evaluation == pytest.approx(other, rel=1e-4), name


def assert_same_contribution(name, ranks, alone):
    """Each rank measures its prompt of a step if the prompt has media. One process measures both."""
    metric = "media/contribution"
    for step, other, expected in zip(*(result["steps"] for result in (*ranks, alone)), strict=True):
        names = {key for key in expected if key.startswith(metric)}
        assert names == {key for key in step if key.startswith(metric)}, name
        assert {key: step[key] for key in names} == {key: other[key] for key in names}, name
        assert {key: step[key] for key in names} == pytest.approx({key: expected[key] for key in names}, rel=1e-3), (
            name
        )
    assert [metric in step for step in alone["steps"]] == [True, True, True, False, True][: len(alone["steps"])], name


def assert_encoders_run_together(name, engine, encoders, forwards):
    """Encoders run on both ranks where one rank or the engine needs them, and nowhere else."""
    used = set()
    for forward in zip(*forwards, strict=True):
        held = set().union(*(own for own, _ in forward))
        used |= encoder_kinds(held) & encoders
        for own, dummies in forward:
            if engine == "ddp":
                assert encoder_kinds(own) | set(dummies) == encoders | encoder_kinds(own), name
                assert not encoder_kinds(own) & set(dummies), name
            else:
                # ZeRO-3 needs the encoders that had a gradient before
                needed = held | (used - encoder_kinds(held) if engine == "zero3" else set())
                assert set(own) | set(dummies) == needed, name


def encoder_kinds(media):
    return {"image" if kind == "video" else kind for kind in media}


def norm(tensors):
    return torch.cat([torch.zeros(1), *(tensor.flatten() for tensor in tensors)]).norm().item()


# Dummy inputs in one process


class WithDummies(Injected, MultimodalGRPOTrainer):
    """Adds dummy inputs of all kinds to each differentiated forward pass."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._policy.processes.dummies = self._dummies_of_all_kinds

    def _dummies_of_all_kinds(self, model, prompts, beside_others=False):
        kinds = [kind for kind in MODALITIES if kind in self._unwrapped(self.model).input_modalities]
        return [self._policy.processes._dummy(kind, model) for kind in kinds] if torch.is_grad_enabled() else []


def gradients(trainer_class, family, rows, dtype, **options):
    model, processor = load(family)
    recorded = Gradients()
    objects = {"model": model.to(dtype), "processing_class": processor, "callbacks": [recorded]}
    options = {"shuffle_dataset": False, "self_check": False, **options}
    run(trainer_class, family, Dataset.from_list(rows), objects=objects, **options)
    return [{name: value for name, value in each.items() if value is not None} for each in recorded.seen]


@pytest.mark.parametrize(
    ("family", "n_kinds", "options"),
    [
        ("qwen2_5_vl", 2, {}),
        ("qwen3_vl", 2, {"gradient_checkpointing": True}),
        ("qwen2_audio", 1, {}),
        ("qwen2_5_omni", 3, {}),
        ("qwen2_5_omni", 3, {"packing": "padded"}),
        ("qwen3_vl_moe", 2, {}),
        ("qwen3_vl_moe", 2, {"packing": "padded"}),
    ],
    ids=str,
)
def test_dummy_inputs_change_no_gradient(family, n_kinds, options):
    """The first step has no media, the second has media."""
    rows = list(text_rows(2)) + ([] if family == "qwen2_audio" else list(image_rows(1)))
    if "vl" not in family:
        rows.append({"prompt": [{"role": "user", "content": "What do you hear?"}], "audio": sound(0.7)})
    rows += list(text_rows(4 - len(rows)))
    columns = dict.fromkeys(name for row in rows for name in row)
    rows = [{**columns, **row} for row in rows]
    # Wide enough to hide rounding, which depends on the length of the row. The kernels of experts allow no wider type.
    dtype = torch.float32 if family == "qwen3_vl_moe" else torch.float64
    plain = gradients(type("Plain", (Injected, MultimodalGRPOTrainer), {}), family, rows, dtype, **options)
    with mock.patch.object(policy, "dummy_prompt", wraps=policy.dummy_prompt) as made:
        with_dummies = gradients(WithDummies, family, rows, dtype, **options)
    assert made.call_count == n_kinds  # despite two steps
    assert len(plain) == len(with_dummies) == 2
    in_encoders = with_dummies[0].keys() - plain[0].keys()
    assert {part for name in in_encoders for part in name.split(".")[:2]} & {"visual", "audio_tower"}
    assert not any(with_dummies[0][name].any() for name in in_encoders)
    for without, added in zip(plain, with_dummies, strict=True):
        difference = norm(added[name] - without[name] for name in without)
        assert difference <= 1e-6 * norm(without.values())
