# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""On images, [`MultimodalRLOOTrainer`] makes the updates and metrics of TRL's RLOO. It also trains on sound."""

import functools

import pytest
import torch
from helpers.marks import slow_but
from helpers.rloo_runs import InjectedOurs, InjectedTRL
from helpers.samplers import PseudoRandom
from helpers.trainer_utils import (
    assert_equal,
    image_rows,
    images_rows,
    load,
    make_trainer,
    run,
    text_rows,
)
from huggingface_hub import ModelCard
from peft import LoraConfig
from trl import RLOOTrainer

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalRLOOTrainer


FAMILY = "qwen2_5_vl"
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"], init_lora_weights=False)


# Two updates on one generation batch, each from two of its four micro-batches, and the first one again
REUSED = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "max_steps": 3,
    "learning_rate": 0.01,
    "beta": 0.0,
}
# A generation batch lasts two updates, so the policy has left the reference when the divergence enters the rewards
RENEWED = {**REUSED, "num_iterations": 1}
OPTIONS = {
    "one update": {"beta": 0.0},
    "reused": REUSED,
    "renewed": RENEWED,
    "kl": {**RENEWED, "beta": 0.05},
    "normalized advantages": {**REUSED, "normalize_advantages": True},
    "clipped rewards": {**REUSED, "reward_clip_range": (1.0, 3.0)},
    "clipped ratios": {**REUSED, "epsilon": 0.01, "epsilon_high": 0.02},
    "masked truncated completions": {**REUSED, "mask_truncated_completions": True},
    "adapter": {**REUSED, "learning_rate": 0.004, "beta": 0.05, "objects": {"peft_config": LORA}},
}
EQUIVALENTS = {
    "gradient checkpointing": {**REUSED, "gradient_checkpointing": True},
    "adapter, gradient checkpointing": {**OPTIONS["adapter"], "gradient_checkpointing": True},
}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 6, "num_generations_eval": 3}


@functools.cache
def dataset():
    return image_rows()


@functools.cache
def trl_run(name):
    return run(InjectedTRL, FAMILY, dataset(), **{**OPTIONS, **EQUIVALENTS}[name])


def our_run(rows=None, **options):
    """Uses TRL's shuffle, which puts the same completions into a micro-batch."""
    options = {"self_check": False, "keep_groups_together": False, **options}
    return run(InjectedOurs, FAMILY, rows or dataset(), **options)


@pytest.mark.parametrize(
    "name", slow_but([*OPTIONS, *EQUIVALENTS], "one update", "kl", "clipped ratios", "adapter", "clipped rewards")
)
def test_packed_equals_trl(name):
    ours = our_run(**{**OPTIONS, **EQUIVALENTS}[name])
    assert all(ours.trainer.scored_packed)
    assert_equal(trl_run(name), ours)


def test_padded_equals_trl():
    ours = our_run(**OPTIONS["kl"], packing="padded")
    assert not any(ours.trainer.scored_packed)
    assert_equal(trl_run("kl"), ours)


def test_groups_together_equal_trl():
    """Completions move within an update, not between updates. Metrics that average micro-batches may change."""
    options = {"beta": 0.05, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2}
    theirs = run(InjectedTRL, FAMILY, dataset(), **options)
    ours = our_run(**options, keep_groups_together=True)
    assert all(ours.trainer.scored_packed)
    shares = [entry["packing/shared_frac"] for entry in ours.history if "packing/shared_frac" in entry]
    assert shares and min(shares) > 0.5
    assert_equal(theirs, ours, same_metrics=False)


def test_self_check_leaves_no_trace():
    ours = our_run(**OPTIONS["kl"], self_check=True)
    check = ours.trainer.checks.self_check
    assert max(check.packed, check.rows) <= check.tolerance < min(check.media.values())
    assert_equal(trl_run("kl"), ours)


@pytest.mark.parametrize("rows", [images_rows, text_rows], ids=["several images", "text"])
def test_other_rows_equal_trl(rows):
    rows = rows()
    assert_equal(run(InjectedTRL, FAMILY, rows, **REUSED), our_run(rows, **REUSED))


def test_evaluation_equals_trl():
    """Evaluation between updates on one generation batch doesn't change the batch."""
    options = {**OPTIONS["kl"], **EVALUATED, "max_steps": 2, "objects": {"eval_dataset": image_rows(4)}}
    theirs, ours = run(InjectedTRL, FAMILY, dataset(), **options), our_run(**options)
    assert sum("eval_reward" in entry for entry in theirs.history) == options["max_steps"]
    assert_equal(theirs, ours)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "top_k": 20, "top_p": 0.9, "temperature": 1.5, "max_completion_length": 12},
        pytest.param(
            {**OPTIONS["adapter"], **EVALUATED, "objects": {"peft_config": LORA, "eval_dataset": image_rows(3)}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["processed logits", "adapter, kl, evaluation"],
)
def test_sampling_equals_trl(options):
    """Sampling from one prefill per prompt gives TRL's completions, and TRL's results afterwards."""
    processor = load(FAMILY)[1]
    placeholders = [processor.image_token_id, processor.video_token_id]  # TRL omits the second
    options = {
        "max_steps": 3,
        "learning_rate": 0.03,
        **options,
        "generation_kwargs": {"suppress_tokens": placeholders},
    }
    theirs = run(RLOOTrainer, FAMILY, dataset(), **options)
    ours = run(MultimodalRLOOTrainer, FAMILY, dataset(), keep_groups_together=False, **options)
    assert_equal(theirs, ours)


# Config and model card


class FromEngine(PseudoRandom):
    """Synthetic log-probabilities of an engine, one of which is missing."""

    def __call__(self, model, prompts, **options):
        completions, _ = super().__call__(model, prompts, **options)
        logps = [[-4 - 0.01 * (token % 100) for token in ids] for ids in completions]
        logps[0][0] = None
        return completions, logps


@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_truncate"])
def test_corrects_for_vllm_as_trls_grpo(mode, tmp_path):
    bounds = {"clip_max": 1.0, "clip_min": 0.001}
    named = {f"vllm_importance_sampling_{name}": value for name, value in {"mode": mode, **bounds}.items()}
    options = {**named, "self_check": False, "max_steps": 1, "beta": 0.0, "learning_rate": 0.0}
    runs, grpo, rloo = [], MultimodalGRPOTrainer, MultimodalRLOOTrainer
    for trainer_class, corrects in ((grpo, True), (rloo, True), (rloo, False)):
        options["vllm_importance_sampling_correction"] = corrects
        trainer = make_trainer(trainer_class, FAMILY, image_rows(), tmp_path, sampler=FromEngine, **options)
        trainer.use_vllm = True
        trainer.train()
        [inputs] = trainer._buffered_inputs
        metrics = {key: value for key, value in trainer.state.log_history[0].items() if "sampl" in key}
        runs.append((inputs, metrics))
    (grpo, expected), (rloo, metrics), (uncorrected, without) = runs
    assert len(expected) == 5 and expected == pytest.approx(metrics, rel=1e-5) and not without
    ratios = grpo["importance_sampling_ratio"][:, 0]
    torch.testing.assert_close(rloo["advantages"], ratios * uncorrected["advantages"])
    assert uncorrected["advantages"].abs().min() > 0
    inside = (ratios > 0.001) & (ratios < 1)
    assert inside.any() and not inside.all()


def test_model_card_names_the_method(tmp_path):
    options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "self_check": True}
    trainer = make_trainer(MultimodalRLOOTrainer, FAMILY, dataset(), tmp_path, **options)
    trainer.train()
    card = ModelCard.load(tmp_path / "README.md")
    assert {"rloo", "trl", "trl-multimodal-rft"} <= set(card.data.tags)
    assert "grpo" not in card.data.tags
    assert "Method: RLOO" in card.text
    assert str(trainer.checks.self_check) in card.text
