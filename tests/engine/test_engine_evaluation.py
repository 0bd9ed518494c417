# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Evaluation by the engine: greedy completions are those of transformers, and training doesn't notice."""

import copy

import pytest
from helpers.trainer_utils import audio_rows, image_rows, length_and_sum
from test_colocate import make
from transformers import set_seed

from trl_multimodal_rft import (
    GenerationEvalCallback,
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
    MultimodalPPOConfig,
    MultimodalPPOTrainer,
)
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate, evaluate_trainer


def remembering(trainer_class):
    class Remembers(trainer_class):
        drawn = ()

        def _generate_single_turn(self, *args, **kwargs):
            completions = super()._generate_single_turn(*args, **kwargs)
            self.drawn = [*self.drawn, completions[0]]
            return completions

    return Remembers


def completions(result) -> list[list[str]]:
    return [row["completions"] for row in result.rows]


@pytest.mark.parametrize(
    ("trainer_class", "config_class", "family", "rows"),
    [
        (MultimodalGRPOTrainer, MultimodalGRPOConfig, "qwen2_audio", audio_rows),
        (MultimodalPPOTrainer, MultimodalPPOConfig, "qwen2_5_vl", image_rows),
    ],
)
def test_evaluation_during_training_and_after(trainer_class, config_class, family, rows, tmp_path):
    held_out = rows(12).select(range(8, 12))
    trainer = make(
        remembering(trainer_class),
        config_class,
        family,
        rows(8),
        tmp_path,
        num_generations_eval=2,
        per_device_eval_batch_size=4,
        generation_kwargs={"frequency_penalty": 0.5},  # not for evaluation
    )
    start = copy.deepcopy(trainer.model.state_dict())
    set_seed(1)
    trainer.train()
    alone, trainer.drawn = trainer.drawn, ()
    trainer.model.load_state_dict(start)
    trainer.optimizer = trainer.lr_scheduler = None
    sampling = EvaluationConfig(num_samples=3, temperature=1.0, max_completion_length=6, batch_size=2)
    callback = GenerationEvalCallback(trainer, held_out, length_and_sum, sampling, freq=1)
    trainer.add_callback(callback)
    set_seed(1)
    trainer.train()
    assert trainer.drawn == alone and len(alone) == 3 and alone[0] != alone[1]
    trainer.remove_callback(callback)

    drawn = completions(callback.result)
    assert all(len(set(samples)) == 3 for samples in drawn)
    assert completions(evaluate_trainer(trainer, held_out, length_and_sum, sampling)) == drawn  # by the seed
    sampling.seed = 1
    assert completions(evaluate_trainer(trainer, held_out, length_and_sum, sampling)) != drawn

    greedy = EvaluationConfig(max_completion_length=6)
    own = evaluate_trainer(trainer, held_out, length_and_sum, greedy)
    model = trainer._unwrapped(trainer.model)
    theirs = evaluate(getattr(model, "policy", model), trainer.processing_class, held_out, length_and_sum, greedy)
    assert own.rows == theirs.rows and own.metrics == theirs.metrics
    model.load_state_dict(start)  # as one that was read from a checkpoint
    before = evaluate_trainer(trainer, held_out, length_and_sum, greedy)
    assert completions(before) != completions(own)

    trainer.drawn = ()
    metrics = trainer.evaluate(held_out)
    assert len(trainer.drawn[0]) == 4 and len(trainer.drawn) == 2  # two completions of each of four prompts
    assert metrics["eval_reward"] > 0
