# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Check that evaluations make the metric by which a run chooses the best model."""

import inspect
import re
from difflib import get_close_matches
from typing import Any

from transformers import TrainerCallback


_PACKAGE = __name__.split(".")[0]

# Of every evaluation, and of those by algorithm, beside names with a slash
_OF_ALL = "loss entropy num_tokens runtime samples_per_second steps_per_second model_preparation_time"
_OF_REWARDS = "reward reward_std frac_reward_zero_std kl policy_loss aux_loss shaped_reward"
_OF_PAIRS = "rewards/chosen rewards/rejected rewards/margins"
_NAMES = {
    "sft": "mean_token_accuracy aux_loss",
    "dpo": f"{_OF_PAIRS} rewards/accuracies mean_token_accuracy aux_loss",
    "kto": f"{_OF_PAIRS} kl aux_loss",
    "reward-trainer": "accuracy margin min_reward mean_reward max_reward",
    "grpo": _OF_REWARDS,
    "rloo": _OF_REWARDS,
    "ppo": f"{_OF_REWARDS} explained_variance",
    "distillation": "aux_loss",
}


def check_best_metric(trainer: Any) -> None:
    """
    Raises a `ValueError` if no evaluation of a trainer makes its `metric_for_best_model`. Names that callbacks,
    `compute_metrics`, a subclass or a reward function with `log_metric` may make aren't checked.
    """
    args = trainer.args
    if args.metric_for_best_model is None or args.eval_strategy == "no" or trainer.eval_dataset is None:
        return
    name = args.metric_for_best_model.removeprefix("eval_")
    datasets = [*trainer.eval_dataset] if isinstance(trainer.eval_dataset, dict) else []
    names = {*_OF_ALL.split(), *_NAMES.get(trainer._tag_names[1], "").split()}
    functions = trainer.reward_func_names
    for function in functions:
        names |= {f"rewards/{function}/mean", f"rewards/{function}/std"}
    if _may_make_others(trainer):
        return
    own = name
    if datasets:
        dataset = next((dataset for dataset in datasets if name.startswith(f"{dataset}_")), None)
        if dataset is None:
            example = f"{datasets[0]}_{name if name in names else 'loss'}"
            raise ValueError(
                f"`metric_for_best_model` is {args.metric_for_best_model!r}, but metrics have the name of their "
                f"dataset in `eval_dataset`; name one, such as 'eval_{example}'."
            )
        own = name.removeprefix(f"{dataset}_")
    is_of_rewards = re.fullmatch(r"rewards/(.*)/turn_\d", own)
    if own in names or (is_of_rewards and is_of_rewards[1] in functions):
        return
    if "/" in own and not own.startswith("rewards/"):
        return
    similar = get_close_matches(own, names, 1)
    meant = f" Did you mean 'eval_{name.removesuffix(own)}{similar[0]}'?" if similar else ""
    raise ValueError(
        f"No evaluation makes `metric_for_best_model` {args.metric_for_best_model!r}.{meant} Evaluations make "
        f"{', '.join(sorted(names))}, and metrics with a slash that the logs show; a reward function that logs the "
        "metric takes `log_metric` as an argument."
    )


def _may_make_others(trainer: Any) -> bool:
    if trainer.compute_metrics is not None or not type(trainer).__module__.startswith(f"{_PACKAGE}."):
        return True
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        is_known = kind.__module__.startswith(("transformers.", f"{_PACKAGE}.reporting."))
        if kind.on_evaluate is not TrainerCallback.on_evaluate and not is_known:
            return True
    return any("log_metric" in inspect.signature(function).parameters for function in _functions(trainer))


def _functions(trainer: Any) -> list[Any]:
    functions = getattr(trainer, "reward_funcs", None) or []
    return [function for function in functions if inspect.isfunction(function)]
