# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A run that stops at any step and resumes from its checkpoint equals the uninterrupted run bit for bit."""

import json
import logging
import os
import pickle
import random
import shutil
from datetime import datetime
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from helpers.marks import slow_but
from helpers.resumed_runs import (
    REPLAY,
    REUSED,
    STEPS_PER_EPOCH,
    Case,
    Recording,
    checkpoint,
    few_live,
    logged,
    same_weights,
    stops_of,
    straight_runs,
)
from helpers.trainer_utils import TRAINERS, audio_rows, image_rows, length_and_sum, make_trainer
from peft import LoraConfig
from PIL import Image

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.data.rows.fingerprint import differences, fingerprint
from trl_multimodal_rft.forward import logprobs
from trl_multimodal_rft.trainers.checkpoints.files import load_rollout_state


pytestmark = pytest.mark.gate


class RecordingGRPO(Recording, MultimodalGRPOTrainer):
    pass


class WithDropout(RecordingGRPO):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for module in self.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3


def by_row(prompts, **kwargs) -> list[float]:
    """Gives most prompts equal rewards, so that the others come more often."""
    numbers = [int(prompt[-1]["content"][-1]["text"].split()[-1]) for prompt in prompts]
    return [float(number > 2 and i % 2 == 1) for i, number in enumerate(numbers)]


class RecordingRLOO(Recording, MultimodalRLOOTrainer):
    pass


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3)


def case(options, stops, moving=(), *, trainer=RecordingGRPO, family="qwen2_5_vl", rows=image_rows, **fields):
    return Case(trainer, family, rows, options, stops, moving, **fields)


CASES = {
    "several epochs": case({"max_steps": 11}, [STEPS_PER_EPOCH, 6]),
    "one update a batch": case({"steps_per_generation": 2, "num_iterations": 1, "max_steps": 5}, [2]),
    "shuffled as by TRL": case({"packing_shuffle": True}, [3]),
    "replay, dynamic sampling, adaptive KL": case(
        {**REPLAY, "reward": few_live, "beta": 0.1, "kl_target": 0.01, "kl_horizon": 50, "max_steps": 10},
        [2, 6],
        ["replay/frac", "kl", "kl_coef"],
    ),
    "reinforce, running scale, entropies of the rollout": case(
        {
            "advantage_estimator": "reinforce",
            "reward_running_scale": True,
            "top_entropy_quantile": 0.4,
            "beta": 0.05,
            "reward": length_and_sum,
        },
        [5],
        ["kl"],
    ),
    "current entropies, adaptive bonus": case(
        {
            "top_entropy_quantile": 0.4,
            "entropy_source": "current",
            "use_adaptive_entropy": True,
            "entropy_target": 9.0,
        },
        [3],
        ["entropy_coef"],
    ),
    "synchronised reference": case(
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}, [3], ["kl"]
    ),
    "adapter with dropout": case({"objects": {"peft_config": LORA}, "beta": 0.1}, [3], ["kl"]),
    "dropout": case({}, [3], trainer=WithDropout),
    "audio": case({}, [3], family="qwen2_audio", rows=audio_rows),
    "logged every three steps": case({"logging_steps": 3}, [5], not_logged={"loss"}),
    "evaluated between updates": case(
        {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "per_device_eval_batch_size": 4,
            "num_generations_eval": 2,
            "objects": {"eval_dataset": image_rows(3)},
        },
        [5],
        ["eval_reward"],
    ),
    "views, replay, dynamic sampling": case(
        {
            **REPLAY,
            "reward": few_live,
            "rollout_view": ("mask_patches(ratio=0.9, patch_size=28, schedule='sigmoid(midpoint=0.5, steepness=5)')"),
            "contrast_view": "diffusion_noise",
            "max_steps": 8,
        },
        [2],
        ["view/strength", "contrast/accuracy", "contrast/bonus"],
    ),
    "frozen encoder": case(  # of which micro-batches of two prompts join the features
        {"freeze": ["audio_tower", "projector"], "num_generations": 2, "steps_per_generation": 2},
        [1, 3],
        family="qwen2_audio",
        rows=audio_rows,
    ),
    "difficulty": case(  # with two generation batches in an update
        {
            "difficulty_sampling": True,
            "reward": by_row,
            "max_steps": 9,
            "steps_per_generation": 1,
            "num_iterations": 1,
        },
        [7],
        ["difficulty/pass_rate"],
        n_rows=6,
    ),
    "view in the loss, replay": case(
        {
            **REPLAY,
            "reward": few_live,
            "loss_view": "mask_patches(ratio=0.6, kl_coef=0.5, entropy_coefs=[0.1, 0.1])",
            "max_steps": 10,
        },
        [5],
        ["view/kl", "replay/frac"],
    ),
    "dependency on media, replay": case(
        {
            **REPLAY,
            "reward": few_live,
            "loss_view": "mask_patches(ratio=0.5, advantage_min=0.5, token_quantile=0.4)",
            "max_steps": 10,
        },
        [6],
        ["view/dependency", "replay/frac"],
    ),
    "rloo, replay, dynamic sampling, difficulty": case(
        {**REPLAY, "reward": few_live, "beta": 0.1, "difficulty_sampling": True, "max_steps": 10},
        [6, 2],  # at 2 with a surplus of dynamic sampling
        ["replay/frac", "kl"],
        trainer=RecordingRLOO,
    ),
}
# One run, resumed once, per mechanism
QUICK = {
    "replay, dynamic sampling, adaptive KL",
    "dropout",
    "frozen encoder",
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return straight_runs(CASES, tmp_path_factory)


def rest(trainer, step: int) -> list:
    return trainer.trained_on[step * trainer.args.gradient_accumulation_steps :]


@pytest.mark.parametrize(("name", "step"), stops_of(CASES, QUICK))
def test_resumed_run_is_the_uninterrupted_run(name, step, straight, tmp_path):
    case = CASES[name]
    uninterrupted = straight(name)
    assert not same_weights(uninterrupted, case.make(tmp_path))
    for metric in case.moving:
        assert any(entry.get(metric, 0) != 0 for entry in uninterrupted.state.log_history), metric
    resumed = case.resume(checkpoint(uninterrupted, step), tmp_path)
    assert resumed.trained_on == rest(uninterrupted, step)
    assert same_weights(uninterrupted, resumed)
    assert logged(resumed, case.not_logged) == logged(uninterrupted, case.not_logged)


# The file


def test_checkpoint_between_generation_batches_holds_no_batch(straight):
    uninterrupted = straight("several epochs")
    held = [
        load_rollout_state(checkpoint(uninterrupted, step), 0)["buffered_inputs"] is not None for step in range(1, 12)
    ]
    assert held == [step % STEPS_PER_EPOCH != 0 for step in range(1, 12)]


def test_checkpoint_holds_media_once_per_prompt(straight):
    folder = checkpoint(straight("several epochs"), 3)
    prompts = [p for batch in load_rollout_state(folder, 0)["buffered_inputs"] for p in batch.prompts]
    sizes = {id(prompt): sum(value.nbytes for value in prompt.media.values()) for prompt in prompts}
    assert len(prompts) == 4 * len(sizes)
    assert min(sizes.values()) > 50_000
    assert Path(folder, "rollout_state_0.pt").stat().st_size < 1.3 * sum(sizes.values())


def test_checkpoint_without_state_resumes_with_new_completions(straight, tmp_path, caplog):
    uninterrupted = straight("several epochs")
    missing = shutil.ignore_patterns("rollout_state_0.pt", "manifest.json")
    shutil.copytree(checkpoint(uninterrupted, 6), tmp_path / "checkpoint-6", ignore=missing)
    with caplog.at_level(logging.WARNING):
        trainer = CASES["several epochs"].resume(tmp_path / "checkpoint-6", tmp_path)
    assert "has no state of the rollouts" in caplog.text
    assert trainer.trained_on != rest(uninterrupted, 6)


def test_reference_that_follows_the_policy_must_be_there(straight, tmp_path):
    case = CASES["synchronised reference"]
    folder = tmp_path / "checkpoint-3"
    missing = shutil.ignore_patterns("ref_model", "manifest.json")
    shutil.copytree(checkpoint(straight("synchronised reference"), 3), folder, ignore=missing)
    with pytest.raises(ValueError, match="checkpoint-3 has no folder 'ref_model' with a reference that follows"):
        case.resume(folder, tmp_path)
    case.resume(folder, tmp_path, sync_ref_model=False)


class Foreign:
    """Makes a folder on unpickling."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_code_in_the_file_is_not_run(straight, tmp_path):
    missing = shutil.ignore_patterns("manifest.json")
    shutil.copytree(checkpoint(straight("several epochs"), 6), tmp_path / "checkpoint-6", ignore=missing)
    file = tmp_path / "checkpoint-6" / "rollout_state_0.pt"
    torch.save({**torch.load(file, weights_only=False), "foreign": Foreign(tmp_path / "made")}, file)
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        CASES["several epochs"].resume(tmp_path / "checkpoint-6", tmp_path)
    assert not (tmp_path / "made").exists()
    torch.load(file, weights_only=False)
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("saved", "resuming", "message"),
    [
        ("grpo", "dpo", "checkpoint-1 is of a run of 'grpo' without an adapter, and this one is of 'dpo' without"),
        ("sft", "reward", "is of a run of 'sft' without an adapter, and this one is of 'reward-trainer' without"),
        ("sft+adapter", "sft", "is of a run of 'sft' with an adapter, and this one is of 'sft' without an adapter"),
        (
            "grpo",
            "grpo+adapter",
            "'grpo' without an adapter, and this one is of 'grpo' with an adapter; resume with the trainer",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(saved, resuming, message, tmp_path):
    def make(kind, **options):
        name, _, adapts = kind.partition("+")
        objects = {"peft_config": LoraConfig(target_modules=["q_proj"])} if adapts else {}
        options |= {"objects": objects, "reward": length_and_sum if name == "grpo" else None}
        return make_trainer(TRAINERS[name], "qwen2_5_vl", rows, tmp_path / kind, **options)

    texts = {"prompt": "Is it?", "chosen": " Yes", "rejected": " No", "completion": " Yes"}
    rows = Dataset.from_list([texts] * 8)
    make(saved, max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ValueError, match=message):
        make(resuming).train(str(tmp_path / saved / "checkpoint-1"))


# The dataset


def paths_in(folder: Path, n: int = 5, color: str = "red", size: int = 56, **columns) -> Dataset:
    """Returns rows that name files of a folder."""
    folder.mkdir(exist_ok=True)
    for i in range(n):
        Image.new("RGB", (size, size + 28 * (i % 2)), color).save(folder / f"{i}.png")
    rows = [{"prompt": f"What is this? {i}", "image": str(folder / f"{i}.png"), **columns} for i in range(n)]
    return Dataset.from_list(rows)


def test_another_dataset_is_logged(tmp_path, caplog):
    options = {**REUSED, "self_check": False, "max_steps": 2}

    def warnings(rows) -> str:
        caplog.clear()
        trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", rows, tmp_path / "run", **options)
        with caplog.at_level(logging.WARNING):
            trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
        return "\n".join(text for text in caplog.messages if "has changed since" in text)

    rows = paths_in(tmp_path / "a")
    make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", rows, tmp_path / "run", **options).train()
    saved = json.loads((tmp_path / "run" / "checkpoint-1" / "manifest.json").read_text())["datasets"]
    assert len(saved["train_dataset"]["checksums"]) == 5
    assert warnings(paths_in(tmp_path / "b")) == ""
    other = rows.map(lambda row, i: {**row, "prompt": "Another?"} if i == 3 else row, with_indices=True)
    assert "checkpoint-1 was saved: of the 5 rows compared, 1 or their files differ (rows 3)." in warnings(other)
    Image.new("RGB", (84, 84), "blue").save(tmp_path / "a" / "2.png")
    assert "1 or their files differ (rows 2)" in warnings(rows)
    before = fingerprint(rows)
    for changed, clause in [
        (concatenate_datasets([rows, rows.select([0])]), "it has 6 rows, not 5"),
        (rows.add_column("answer", [""] * 5), "its columns are answer, image, prompt, not image, prompt"),
        (rows.select([4, 3, 1, 0, 2]), "of the 5 rows compared, 5 or their files differ (rows 0, 1, 2, 3, 4)"),
        (rows.rename_column("image", "x").to_iterable_dataset(), "its columns are prompt, x, not image, prompt"),
    ]:
        assert differences(before, fingerprint(changed)) == [clause]
    assert differences(before, fingerprint(rows.to_iterable_dataset())) == []


def test_fingerprints_depend_on_the_content_of_rows_alone(tmp_path):
    features = datasets.Features(
        {
            "prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "audio": datasets.Audio(16000),
            "box": datasets.List(datasets.Value("float32")),
            "grid": datasets.Array2D((2, 2), "int8"),
            "when": datasets.Value("timestamp[s]"),
            "label": datasets.Value("bool"),
        }
    )

    def row(i: int, **changes) -> dict:
        content = {"role": "user", "content": f"question {i}"}
        values = {"prompt": [content] * (1 + i % 3), "audio": {"bytes": bytes([i]) * (i + 1), "path": None}}
        values |= {"box": [float(i)] * i, "grid": [[i, 0], [0, i]], "when": datetime(2026, 1, 1 + i)}
        return {**values, "label": None if i == 1 else i % 2 == 0, **changes}

    rows = [row(i) for i in range(8)]
    whole = Dataset.from_list(rows, features=features)
    expected = fingerprint(whole)
    assert len(set(expected["checksums"].values())) == 8
    whole.save_to_disk(tmp_path / "saved", num_shards=3)
    for same in [
        datasets.load_from_disk(tmp_path / "saved"),
        concatenate_datasets([whole.select(range(3)), Dataset.from_list(rows[3:], features=features)]),
        whole.select([7, *range(7)]).select([*range(1, 8), 0]),
        whole.with_transform(lambda batch: {"index": [random.random()] * len(batch["prompt"])}),
        whole.select_columns(sorted(features, reverse=True)),
    ]:
        assert json.loads(json.dumps(fingerprint(same))) == expected
    for change in [
        {"audio": {"bytes": b"other", "path": None}},
        {"box": [4.0, 4.0, 4.0, 5.0]},
        {"box": None},
        {"grid": [[4, 0], [1, 4]]},
        {"when": None},
        {"label": False},
        {"prompt": [{"role": "user", "content": "question 4"}]},
    ]:
        changed = Dataset.from_list([*rows[:4], row(4, **change), *rows[5:]], features=features)
        (clause,) = differences(expected, fingerprint(changed))
        assert clause == "of the 8 rows compared, 1 or their files differ (rows 4)", change
    many = fingerprint(Dataset.from_dict({"prompt": [str(i) for i in range(1000)]}))
    assert len(many["checksums"]) == 63 and many["rows"] == 1000
    assert fingerprint(Dataset.from_dict({"prompt": []})) == {"rows": 0, "columns": ["prompt"], "checksums": {}}


# Allowed changes between the runs


@pytest.mark.parametrize(
    "changes",
    slow_but(
        [
            {"steps_per_generation": 2},
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 2},
            {"num_iterations": 1},
            {"num_generations": 2, "steps_per_generation": 2},
            {"beta": 0.1},
            {"advantage_estimator": "reinforce"},
            {"top_entropy_quantile": 0.5},
        ],
        {"num_generations": 2, "steps_per_generation": 2},
        {"beta": 0.1},
    ),
    ids=["generation", "micro-batch", "iterations", "groups", "reference", "advantages", "entropies"],
)
def test_another_size_resumes_with_new_completions(changes, straight, tmp_path, caplog):
    uninterrupted = straight("several epochs")
    with caplog.at_level(logging.WARNING):
        trainer = CASES["several epochs"].resume(checkpoint(uninterrupted, 6), tmp_path, **changes)
    assert "The settings of batches have changed" in caplog.text
    size = trainer.args.per_device_train_batch_size
    assert all(len(completions) == size for _, completions in trainer.trained_on)


def test_unused_state_stays_in_the_checkpoint(straight, tmp_path):
    name = "replay, dynamic sampling, adaptive KL"
    folder = checkpoint(straight(name), 6)
    state = load_rollout_state(folder, 0)
    assert state["groups"]["replay"]["groups"] and state["kl_controller"]["value"] != 0.1
    options = {
        "kl_target": None,
        "kl_horizon": 10000,
        "beta": 0.3,
        "replay_buffer_size": 0,
        "dynamic_sampling": 0,
        "max_steps": 8,
    }
    trainer = CASES[name].resume(folder, tmp_path, **options)
    assert trainer.kl_coef == 0.3
    assert not any("replay/frac" in entry for entry in trainer.state.log_history if entry.get("step", 0) > 6)


def test_a_run_with_padded_rows_does_not_pack_what_a_checkpoint_packed(straight, tmp_path, monkeypatch):
    """This also holds in the middle of a generation batch. The trainer measures its way of scoring anew."""
    name = "several epochs"
    step = 6
    uninterrupted = straight(name)
    assert uninterrupted._policy.fallbacks.packing
    trainer = CASES[name].make(tmp_path, save_strategy="no", packing="padded", self_check=True, max_steps=step + 3)
    made = []
    for kind in ("_packed_batch", "_padded_batch"):
        make = getattr(logprobs, kind)
        monkeypatch.setattr(
            logprobs, kind, lambda *args, _kind=kind, _make=make, **more: made.append(_kind) or _make(*args, **more)
        )
    trainer.train(resume_from_checkpoint=checkpoint(uninterrupted, step))
    assert {*made} == {"_padded_batch"} and not trainer._policy.fallbacks.packing
    assert trainer.checks.self_check.packed is None and trainer.checks.self_check.padded < 1e-5


def test_fingerprints_of_rows_in_lists():
    """Values of Python count by their content. A wrapper counts as what it wraps, and isn't read."""

    class Random(torch.utils.data.Dataset):
        def __init__(self, dataset):
            self.dataset = dataset

        def __len__(self):
            return len(self.dataset)

        def __getitem__(self, index):
            raise RuntimeError("A row is made at random.")

    def row(**changes):
        values = {"words": ["a", b"b", 1, None, True], "array": np.arange(3), "objects": np.array(["c", {"d": 1}])}
        values |= {
            "tensor": torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
            "sparse": torch.eye(2).to_sparse(),
        }
        return {**values, "picture": Image.new("RGB", (4, 4)), "other": object(), **changes}

    expected = fingerprint([row(), row()])
    assert expected["rows"] == 2 and differences(expected, fingerprint([row(), row()])) == []
    assert differences(expected, fingerprint(Random([row(), row()]))) == []
    assert fingerprint(Random(Random(Dataset.from_list([{"a": 1}]))))["columns"] == ["a"]
    others = {"words": ["a"], "array": np.arange(4), "objects": np.array(["c", {"d": 2}]), "tensor": torch.ones(3)}
    for name, value in {**others, "picture": Image.new("RGB", (4, 4), "red"), "other": 1}.items():
        (clause,) = differences(expected, fingerprint([row(), row(**{name: value})]))
        assert clause == "of the 2 rows compared, 1 or their files differ (rows 1)", name
