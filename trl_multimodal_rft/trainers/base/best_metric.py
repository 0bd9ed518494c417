# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Check that evaluations make the metric by which a run chooses the best model."""

import inspect
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from transformers import TrainerCallback


_PACKAGE = __name__.split(".")[0]

# Of all evaluations, and by algorithm. Other names with a slash depend on the options of a run
_OF_ALL = "loss entropy num_tokens runtime samples_per_second steps_per_second model_preparation_time"
_OF_REWARDS = "reward reward_std frac_reward_zero_std kl policy_loss aux_loss shaped_reward"
_OF_PAIRS = "rewards/chosen rewards/rejected rewards/margins"
_OF_VIEWS = "rewards/view rewards/view_accuracies rewards/view_margins rewards/above_anchor"
_NAMES = {
    "sft": "mean_token_accuracy aux_loss",
    "dpo": f"{_OF_PAIRS} rewards/accuracies mean_token_accuracy aux_loss {_OF_VIEWS}",
    "kto": f"{_OF_PAIRS} kl aux_loss",
    "reward-trainer": "accuracy margin min_reward mean_reward max_reward",
    "grpo": _OF_REWARDS,
    "rloo": _OF_REWARDS,
    "ppo": f"{_OF_REWARDS} explained_variance",
    "distillation": "aux_loss",
}


def evaluation_metrics(algorithm: str, reward_names: Sequence[str]) -> set[str]:
    """
    Returns the names of metrics that an evaluation makes by the algorithm, a trainer's second tag. With a slash, these
    are only the names that begin with `rewards/`.
    """
    names = {*_OF_ALL.split(), *_NAMES.get(algorithm, "").split()}
    for function in reward_names:
        names |= {f"rewards/{function}/mean", f"rewards/{function}/std"}
        names |= {f"rewards/{function}/turn_{i}" for i in range(1, 9)}
    return names


def check_best_metric(metric: str, names: set[str], datasets: Sequence[str]) -> None:
    """
    Raises a `ValueError` if no evaluation makes a `metric_for_best_model`, by the `names` of [`evaluation_metrics`].
    `datasets` are the names of several datasets.
    """
    name = metric.removeprefix("eval_")
    prefix = ""
    if datasets:
        dataset = max((dataset for dataset in datasets if name.startswith(f"{dataset}_")), key=len, default=None)
        if dataset is None:
            raise ValueError(
                f"`metric_for_best_model` is {metric!r}, but metrics have the name of their dataset in "
                f"`eval_dataset`; name one, such as 'eval_{datasets[0]}_{name if name in names else 'loss'}'."
            )
        prefix = f"{dataset}_"
    name = name.removeprefix(prefix)
    if name in names or ("/" in name and not name.startswith("rewards/")):
        return
    similar = get_close_matches(name, names, 1)
    meant = f" Did you mean 'eval_{prefix}{similar[0]}'?" if similar else ""
    shown = ", ".join(sorted(name for name in names if "/turn_" not in name))
    raise ValueError(
        f"No evaluation makes `metric_for_best_model` {metric!r}.{meant} Evaluations make {shown}, and metrics with a "
        "slash that the logs show; a reward function that logs the metric takes `log_metric` as an argument."
    )


def makes_other_metrics(
    trainer_class: type, callbacks: Sequence[TrainerCallback], functions: Sequence[Any], compute_metrics: Any
) -> bool:
    """Returns whether a subclass, a callback, a reward function or the user's function may make other metrics."""
    if compute_metrics is not None or not trainer_class.__module__.startswith(f"{_PACKAGE}."):
        return True
    for callback in callbacks:
        kind = type(callback)
        is_known = kind.__module__.startswith(("transformers.", f"{_PACKAGE}.reporting."))
        if kind.on_evaluate is not TrainerCallback.on_evaluate and not is_known:
            return True
    return any(map(_takes_log_metric, functions))


def _takes_log_metric(function: Any) -> bool:
    try:
        return "log_metric" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # the name of a reward model, or a function of C
        return False
