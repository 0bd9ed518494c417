# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Metrics have the name of their dataset, by which the best model is chosen and a run stops early."""

import math

import pytest
from datasets import Dataset
from helpers.trainer_utils import TRAINERS, make_trainer, text_rows
from transformers import EarlyStoppingCallback, TrainerCallback

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.trainers.base.best_metric import check_best_metric, evaluation_metrics


NEAR = [5.0, 9.0, 5.0, 5.0, 5.0, 5.0, 5.0]  # rewards by step: best at step 2
FAR = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]  # best at the last step


def rows(mark):
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"{mark} {i}"}]} for i in range(2)])


def trainer_with(tmp_path, metric, eval_dataset, callbacks=(), kind="grpo", reward_funcs=None, **options):
    def reward(completion_ids, prompts, **kwargs):
        text = prompts[0][0]["content"]
        if text.startswith("near"):
            return [NEAR[trainer.state.global_step - 1]] * len(completion_ids)
        if text.startswith("far"):
            return [FAR[trainer.state.global_step - 1]] * len(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    samples = kind == "grpo"
    dataset = text_rows(8)
    if not samples:
        dataset = dataset.add_column("completion", [[{"role": "assistant", "content": "A cat."}]] * 8)
        eval_dataset = dataset
    trainer = make_trainer(
        TRAINERS[kind],
        "qwen2_5_vl",
        dataset,
        tmp_path,
        reward=(reward_funcs or reward) if samples else None,
        objects={"eval_dataset": eval_dataset, "callbacks": list(callbacks)},
        max_steps=7,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
        greater_is_better=True,
        per_device_eval_batch_size=8,
        **({"media_contribution_steps": 0} if samples else {}),
        **options,
    )
    return trainer


@pytest.mark.parametrize(("metric", "best", "last"), [("eval_near_reward", 2, 5), ("far_reward", 7, 7)])
def test_a_dataset_chooses_the_best_model(metric, best, last, tmp_path):
    datasets = {"near": rows("near"), "far": rows("far")}
    trainer = trainer_with(tmp_path, metric, datasets, [EarlyStoppingCallback(3)])
    trainer.train()
    assert trainer.state.global_step == last
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    logs = [entry for entry in trainer.state.log_history if entry.get("step") == 2]
    assert {name for entry in logs for name in entry if name.endswith("_reward") and "/" not in name} == {
        "eval_near_reward",
        "eval_far_reward",
    }
    assert trainer.evaluate(rows("other"), metric_key_prefix="test")["test_reward"] > 0


@pytest.mark.parametrize(
    ("metric", "kind", "datasets", "message"),
    [
        ("eval_reward", "grpo", ["near", "far"], "name one, such as 'eval_near_reward'"),
        ("loss", "grpo", ["near"], "name one, such as 'eval_near_loss'"),
        ("near_rewrd", "grpo", ["near"], "Did you mean 'eval_near_reward'"),
        ("accuracy", "grpo", [], "No evaluation makes `metric_for_best_model` 'accuracy'"),
        ("rewards/rewrad/mean", "grpo", [], "Did you mean 'eval_rewards/reward/mean'"),
        ("eval_mean_token_acuracy", "sft", [], "Did you mean 'eval_mean_token_accuracy'"),
    ],
)
def test_a_name_that_no_evaluation_makes_is_an_error_before_the_first_step(metric, kind, datasets, message, tmp_path):
    eval_dataset = {name: rows(name) for name in datasets} or rows("near")
    trainer = trainer_with(tmp_path, metric, eval_dataset, kind=kind)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_longest_name_of_a_dataset_counts():
    names = evaluation_metrics("sft", [])
    check_best_metric("eval_math_hard_loss", names, ["math", "math_hard"])
    with pytest.raises(ValueError, match="Did you mean 'eval_math_hard_loss'"):
        check_best_metric("eval_math_hard_los", names, ["math", "math_hard"])


def test_an_evaluation_without_rewards_is_never_the_best(tmp_path):
    def nothing(completion_ids, **kwargs):
        return [None] * len(completion_ids)

    trainer = trainer_with(tmp_path, "rewards/nothing/mean", rows("other"), reward_funcs=nothing)
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert trainer.state.best_metric == -math.inf and {entry["eval_reward"] for entry in evaluations} == {None}
    assert math.isnan(trainer.evaluate()["eval_reward"])


def test_metrics_of_others_choose_too(tmp_path):
    """Of a subclass, a callback, and a reward function that logs."""

    class Adds(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            metrics["eval_own"] = 1.0

    trainer = trainer_with(tmp_path, "own", rows("near"), [Adds()])
    trainer.train()
    assert trainer.state.best_metric == 1.0

    class Subclass(MultimodalGRPOTrainer):
        def evaluate(self, *args, **kwargs):
            return {**super().evaluate(*args, **kwargs), "eval_own": 2.0}

    trainer = trainer_with(tmp_path / "subclass", "own", rows("near"))
    trainer.__class__ = Subclass
    trainer.train()
    assert trainer.state.best_metric == 2.0
