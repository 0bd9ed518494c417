# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""On images, which TRL supports, the trainers of GRPO and RLOO make TRL's updates and log TRL's metrics."""

import functools

import pytest
from datasets import Dataset
from helpers import rloo_runs
from helpers.marks import slow_but
from helpers.trainer_utils import (
    InjectedOurs,
    InjectedTRL,
    assert_equal,
    image_rows,
    images_rows,
    load,
    run,
    saved,
    text_rows,
)
from peft import LoraConfig
from transformers import Qwen2_5_VLProcessor
from trl import GRPOTrainer, RLOOTrainer

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalRLOOTrainer


FAMILY = "qwen2_5_vl"
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"], init_lora_weights=False)

# An update has two micro-batches. The second update on a generation batch is off-policy: ratios differ from 1
REUSED = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_iterations": 2,
    "max_steps": 3,
    "learning_rate": 0.03,
}
# Two updates on one generation batch, each from two of its four micro-batches
SPLIT = {**REUSED, "num_iterations": 1, "steps_per_generation": 4, "max_steps": 4}

# One loss of each kind of average; `test_trl_losses.py` compares all
OPTIONS = {
    "loss grpo": {**REUSED, "loss_type": "grpo"},
    "loss bnpo": {**REUSED, "loss_type": "bnpo"},
    "loss dr_grpo": {**REUSED, "loss_type": "dr_grpo"},
    "loss dapo": {**REUSED, "loss_type": "dapo"},
    "loss luspo": {**REUSED, "loss_type": "luspo", "importance_sampling_level": "sequence"},
    "importance sampling by sequence": {**REUSED, "loss_type": "grpo", "importance_sampling_level": "sequence"},
    "off-policy mask": {**REUSED, "off_policy_mask_threshold": 0.001},
    "two-sided clipping": {**REUSED, "delta": 1.05},
    "reference model": {**REUSED, "beta": 0.1},
    "synchronised reference model": {
        **REUSED,
        "beta": 0.1,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "ref_model_mixup_alpha": 0.5,
    },
    "two updates a batch": SPLIT,
    "two updates a batch, reused": {**SPLIT, "num_iterations": 2},
    "one update": {},
    "top entropy tokens": {"top_entropy_quantile": 0.5},
    "top entropy tokens and bonus": {"top_entropy_quantile": 0.5, "entropy_coef": 0.5},
    "temperature": {"temperature": 0.7},
    "masked truncated completions": {"mask_truncated_completions": True},
    "rewards scaled by batch": {"scale_rewards": "batch"},
    "rewards not scaled": {"scale_rewards": "none"},
}
# A generation batch lasts two updates, so the policy has left the reference when the divergence enters the rewards
RENEWED = {**SPLIT, "learning_rate": 0.01, "max_steps": 3, "beta": 0.0}
AGAIN = {**RENEWED, "num_iterations": 2}
RLOO = {
    "RLOO, one update": {"beta": 0.0},
    "RLOO, reused": AGAIN,
    "RLOO, renewed": RENEWED,
    "RLOO, kl": {**RENEWED, "beta": 0.05},
    "RLOO, normalized advantages": {**AGAIN, "normalize_advantages": True},
    "RLOO, clipped rewards": {**AGAIN, "reward_clip_range": (1.0, 3.0)},
    "RLOO, clipped ratios": {**AGAIN, "epsilon": 0.01, "epsilon_high": 0.02},
    "RLOO, masked truncated completions": {**AGAIN, "mask_truncated_completions": True},
    "RLOO, adapter": {**AGAIN, "learning_rate": 0.004, "beta": 0.05, "objects": {"peft_config": LORA}},
}
# TRL treats these as the run without them, too
EQUIVALENTS = {
    "gradient checkpointing with reference": {**REUSED, "beta": 0.1, "gradient_checkpointing": True},
    "padding to multiples": {"pad_to_multiple_of": 8},
    "RLOO, adapter, gradient checkpointing": {**RLOO["RLOO, adapter"], "gradient_checkpointing": True},
}
CASES = {**OPTIONS, **RLOO, **EQUIVALENTS}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 6, "num_generations_eval": 3}


@functools.cache
def dataset():
    return image_rows()


def trl_run(name, rows=None, **options):
    """TRL's trainer of the method that the name begins with."""
    trainer = rloo_runs.InjectedTRL if name.startswith("RLOO") else InjectedTRL
    return run(trainer, FAMILY, rows or dataset(), **{**CASES[name], **options})


trl_runs = functools.cache(trl_run)


def our_run(name, rows=None, packing="prefix", shuffle=True, **options):
    """Uses TRL's shuffle, which puts the same completions into a micro-batch."""
    options = {"self_check": False, "packing": packing, "packing_shuffle": shuffle, **CASES[name], **options}
    trainer = rloo_runs.InjectedOurs if name.startswith("RLOO") else InjectedOurs
    return run(trainer, FAMILY, rows or dataset(), **options)


# What differs in more than the formula of the loss
QUICK = ("loss dapo", "importance sampling by sequence", "reference model", "two updates a batch", "one update")
QUICK += (
    "top entropy tokens and bonus",
    "masked truncated completions",
    "RLOO, one update",
    "RLOO, kl",
    "RLOO, adapter",
)


@pytest.mark.parametrize("name", slow_but(CASES, *QUICK))
def test_packed_equals_trl(name):
    ours = our_run(name)
    assert all(ours.trainer.scored_packed)
    assert_equal(trl_runs(name), ours)


@pytest.mark.parametrize("name", ["one update", "reference model", "two updates a batch", "RLOO, kl"])
def test_padded_equals_trl(name):
    ours = our_run(name, packing="padded")
    assert not any(ours.trainer.scored_packed)
    assert_equal(trl_runs(name), ours)


TWO = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "beta": 0.05}


@pytest.mark.parametrize(
    "name, options", [("loss dapo", {}), ("reference model", {}), ("one update", {}), ("RLOO, one update", TWO)]
)
def test_groups_together_equal_trl(name, options):
    """Completions move within an update, not between updates. Metrics that average micro-batches may change."""
    ours = our_run(name, **options, shuffle=False)
    assert all(ours.trainer.scored_packed)
    shares = [entry["packing/shared_frac"] for entry in ours.history if "packing/shared_frac" in entry]
    assert shares and min(shares) > 0.5
    assert_equal(trl_run(name, **options), ours, same_metrics=False)


@pytest.mark.parametrize("name", ["reference model", "RLOO, kl"])
def test_self_check_leaves_no_trace(name):
    ours = our_run(name, self_check=True)
    check = ours.trainer.checks.self_check
    assert max(check.packed, check.rows) <= check.tolerance < min(check.media.values())
    assert_equal(trl_runs(name), ours)


@pytest.mark.parametrize(
    "name, rows, packing",
    [
        ("two updates a batch", images_rows, "prefix"),
        pytest.param("two updates a batch", images_rows, "padded", marks=pytest.mark.slow),
        ("RLOO, reused", images_rows, "prefix"),
        ("RLOO, reused", text_rows, "prefix"),
    ],
)
def test_other_rows_equal_trl(name, rows, packing):
    assert_equal(trl_run(name, rows()), our_run(name, rows(), packing=packing))


class GivenImages(Qwen2_5_VLProcessor):
    """TRL passes `None` for a row without images in a batch with some, which its processor refuses."""

    def __call__(self, images=None, text=None, **kwargs):
        return super().__call__(images=[i for i in images if i] if images else None, text=text, **kwargs)


@pytest.mark.parametrize("packing", slow_but(["prefix", "padded"], "padded"))
def test_rows_without_image_equal_trl(packing):
    rows = [{**row, "images": row["images"] if i % 2 else []} for i, row in enumerate(images_rows())]
    rows = Dataset.from_list(rows)
    model, _ = load(FAMILY)
    objects = {"model": model, "processing_class": GivenImages.from_pretrained(saved(FAMILY))}
    # In order and in one micro-batch: TRL can't run one without images
    options = {"num_iterations": 2, "beta": 0.1, "max_steps": 3, "shuffle_dataset": False}
    theirs = trl_run("one update", rows, objects=objects, **options)
    assert_equal(theirs, our_run("one update", rows, packing=packing, **options))


@pytest.mark.parametrize("checkpointing", slow_but([False, True], True))
def test_lora_equals_trl(checkpointing):
    """The reference is the model with its adapter disabled."""
    options = {"gradient_checkpointing": checkpointing, "objects": {"peft_config": LORA}}
    theirs, ours = (each("reference model", **options) for each in (trl_run, our_run))
    assert all(ours.trainer.scored_packed)
    assert max(entry.get("kl", 0) for entry in theirs.history) > 0.01
    assert_equal(theirs, ours)


@pytest.mark.parametrize("name, beta", [("two updates a batch", 0.1), ("RLOO, kl", 0.05)])
def test_evaluation_equals_trl(name, beta):
    """Evaluation between updates on one generation batch doesn't change the batch."""
    options = {**EVALUATED, "beta": beta, "max_steps": 2, "objects": {"eval_dataset": image_rows(2)}}
    theirs, ours = (each(name, **options) for each in (trl_run, our_run))
    assert sum("eval_reward" in entry for entry in theirs.history) == options["max_steps"]
    assert_equal(theirs, ours)


PROCESSED = {"repetition_penalty": 1.3, "top_k": 20, "top_p": 0.9, "temperature": 1.5, "max_completion_length": 12}


@pytest.mark.parametrize(
    "trainers, options",
    [
        pytest.param((GRPOTrainer, MultimodalGRPOTrainer), {}, marks=pytest.mark.slow),
        ((GRPOTrainer, MultimodalGRPOTrainer), PROCESSED),
        (
            (GRPOTrainer, MultimodalGRPOTrainer),
            {**REUSED, "beta": 0.1, "gradient_checkpointing": True, "objects": {"peft_config": LORA}},
        ),
        pytest.param(
            (GRPOTrainer, MultimodalGRPOTrainer),
            {**EVALUATED, "objects": {"eval_dataset": image_rows(6)}},
            marks=pytest.mark.slow,
        ),
        ((RLOOTrainer, MultimodalRLOOTrainer), PROCESSED),
        pytest.param(
            (RLOOTrainer, MultimodalRLOOTrainer),
            {
                **{**RLOO["RLOO, adapter"], **EVALUATED},
                "objects": {"peft_config": LORA, "eval_dataset": image_rows(4)},
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "processed logits", "lora, kl, checkpointing", "evaluation", "RLOO, processed", "RLOO, evaluation"],
)
def test_sampling_equals_trl(trainers, options):
    """Sampling from one prefill per prompt gives TRL's completions, and TRL's results afterwards."""
    processor = load(FAMILY)[1]
    placeholders = [processor.image_token_id, processor.video_token_id]  # TRL omits the second
    options = {"max_steps": 3, "learning_rate": 0.03, **options}
    options["generation_kwargs"] = {"suppress_tokens": placeholders}
    theirs = run(trainers[0], FAMILY, dataset(), **options)
    ours = run(trainers[1], FAMILY, dataset(), packing_shuffle=True, **options)
    shares = [entry["packing/shared_frac"] for entry in ours.history if "packing/shared_frac" in entry]
    assert shares and min(shares) >= (0.5 if isinstance(ours.trainer, MultimodalGRPOTrainer) else 0.2)
    assert_equal(theirs, ours)


# Families that TRL 1.16 can train on images
SHARING = ["qwen2_vl", "qwen3_vl", "qwen3_5", "qwen2_5_omni", "llava", "gemma3", "gemma3n", "internvl", "idefics3"]
SHARING += ["glm4v", "qwen3_vl_moe"]


@pytest.mark.parametrize("family", slow_but(SHARING, "qwen3_vl_moe"))
def test_families_equal_trl(family):
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_steps": 1}
    options["learning_rate"] = 0.1
    theirs = run(InjectedTRL, family, dataset(), **options)
    ours = run(InjectedOurs, family, dataset(), self_check=False, packing_shuffle=True, **options)
    assert all(ours.trainer.scored_packed)
    assert ("aux_loss" in ours.history[0]) == (family == "qwen3_vl_moe")
    assert_equal(theirs, ours)
