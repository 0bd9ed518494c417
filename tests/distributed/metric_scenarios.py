# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Evaluations of seven rows, which ranks can't share evenly."""

from types import SimpleNamespace

from evaluation.test_metric_sums import READ, SAMPLED, metrics_of, rows, trainer_of
from helpers import trainer_utils
from trainers.preference.test_reward_trainer import fresh
from training import start


def metric_sums(folder):
    """Evaluates with each trainer, in batches of one and of two rows per rank."""
    state = start()
    trainer_utils._MODELS = SimpleNamespace(name=str(folder))
    with state.main_process_first():  # which alone writes weights
        trainer_utils.load("qwen2_5_vl")
        fresh("qwen2_5_vl")
    return {
        f"{kind} {size}": metrics_of(trainer_of(kind, folder / kind, size, rows(kind)), kind)
        for kind in [*READ, *SAMPLED]
        for size in (1, 2)
    }
