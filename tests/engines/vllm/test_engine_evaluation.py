# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Evaluation by the engine: greedy completions equal those of transformers, and evaluation doesn't affect training."""

import copy

import pytest
from helpers.engine_runs import make
from helpers.samplers import Remembers
from helpers.trainer_utils import audio_rows, image_rows, length_and_sum
from transformers import set_seed

from trl_multimodal_rft import GenerationEvalCallback, MultimodalGRPOTrainer, MultimodalPPOTrainer
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate, evaluate_trainer


pytestmark = pytest.mark.slow


class Trained(Remembers):
    """Records the samples of training."""

    def __call__(self, model, prompts, *, config=None, **options):
        if config is not None:
            return self.inner(model, prompts, config=config, **options)
        return super().__call__(model, prompts, **options)

    def taken(self):
        """Returns the completions since the last call."""
        calls = self.calls
        self.calls = []
        return [ids for _, ids, _ in calls]


def completions(result) -> list[list[str]]:
    return [row["completions"] for row in result.rows]


def test_evaluation_during_training_and_after(tmp_path):
    held_out = audio_rows(12).select(range(8, 12))
    options = {"num_generations_eval": 2, "per_device_eval_batch_size": 4}
    options["generation_kwargs"] = {"frequency_penalty": 0.5}  # not for evaluation
    trainer = make(MultimodalGRPOTrainer, "qwen2_audio", audio_rows(), tmp_path, **options)
    trainer.sampler = Trained(trainer)
    start = copy.deepcopy(trainer.model.state_dict())
    set_seed(1)
    trainer.train()
    alone = trainer.sampler.taken()
    trainer.model.load_state_dict(start)
    trainer.optimizer = trainer.lr_scheduler = None
    sampling = EvaluationConfig(num_samples=3, temperature=1.0, max_completion_length=6, batch_size=2)
    callback = GenerationEvalCallback(trainer, held_out, length_and_sum, sampling, freq=1)
    trainer.add_callback(callback)
    set_seed(1)
    trainer.train()
    assert trainer.sampler.taken() == alone and len(alone) == 3 and alone[0] != alone[1]

    drawn = completions(callback.result)
    assert all(len(set(samples)) == 3 for samples in drawn)
    assert completions(evaluate_trainer(trainer, held_out, length_and_sum, sampling)) == drawn  # by the seed
    sampling.seed = 1
    assert completions(evaluate_trainer(trainer, held_out, length_and_sum, sampling)) != drawn

    greedy = EvaluationConfig(max_completion_length=6, ablate="audio")
    own = evaluate_trainer(trainer, held_out, length_and_sum, greedy)
    theirs = evaluate(trainer.model, trainer.processing_class, held_out, length_and_sum, greedy)
    assert own.rows == theirs.rows and own.metrics == theirs.metrics
    assert [row["completions_without"] for row in own.rows] != completions(own)
    trainer.model.load_state_dict(start)  # as loaded from a checkpoint
    assert completions(evaluate_trainer(trainer, held_out, length_and_sum, greedy)) != completions(own)

    trainer.sampler.taken()
    metrics = trainer.evaluate(held_out)
    assert [len(each) for each in trainer.sampler.taken()] == [4, 4]  # two completions of each of four prompts
    assert metrics["eval_reward"] > 0


def test_evaluation_of_a_policy_with_a_critic(tmp_path):
    trainer = make(MultimodalPPOTrainer, "qwen2_5_vl", image_rows(), tmp_path)
    trainer.train()
    greedy = EvaluationConfig(max_completion_length=6)
    own = evaluate_trainer(trainer, image_rows(12), length_and_sum, greedy)
    theirs = evaluate(
        trainer._unwrapped(trainer.model), trainer.processing_class, image_rows(12), length_and_sum, greedy
    )
    assert own.rows == theirs.rows and own.metrics == theirs.metrics
