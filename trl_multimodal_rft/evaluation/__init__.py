# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Accuracy, pass@k and majority votes of a model on a dataset, also during training."""

from .callbacks import GenerationEvalCallback
from .config import EvaluationConfig
from .evaluator import evaluate, evaluate_trainer
from .metrics import majority_at_k, mean_interval, paired_interval, pass_at_k, wilson_interval
from .pairs import pair_result, score_pairs
from .result import EvaluationResult
