# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A hint where a run has nothing to learn from."""

from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback


logger = get_logger(__name__)


def steps_without_signal(history: list[dict[str, Any]], grouped: bool) -> int:
    """
    How long rewards have not told completions apart.

    Args:
        history (`list[dict[str, Any]]`):
            Logs of a trainer.
        grouped (`bool`):
            Whether completions are compared with those of the same prompt, or else with all.

    Returns:
        `int`: Latest steps in a row with completions of whose rewards the logs say that they were equal.
    """
    since, last = None, 0
    for logs in history:
        if "reward" in logs:  # else completions are trained on once more
            told_apart = not _all_equal(logs, grouped)
            since = None if told_apart else last if since is None else since
        last = logs["step"]
    return 0 if since is None else last - since


def _all_equal(logs: dict[str, Any], grouped: bool) -> bool:
    mean, std = logs["reward"], logs["reward_std"]
    if grouped:
        return logs["frac_reward_zero_std"] == 1
    # `None` where there is but one reward, or none
    return mean is not None and std is not None and std <= 1e-6 * abs(mean)


class EqualRewardsHint(TrainerCallback):
    """
    Says once that all rewards have been equal for some steps.

    Args:
        grouped (`bool`):
            See [`steps_without_signal`].
        patience (`int`, *optional*, defaults to `20`):
            For how many steps.
    """

    def __init__(self, grouped: bool, patience: int = 20):
        self.grouped, self.patience, self._said = grouped, patience, False

    def on_log(self, args, state, control, **kwargs):
        steps = 0 if self._said else steps_without_signal(state.log_history, self.grouped)
        if steps >= self.patience:
            self._said = True
            reward = next(logs["reward"] for logs in reversed(state.log_history) if "reward" in logs)
            logger.warning(
                f"All completions{' of a prompt' if self.grouped else ''} have had the same reward for {steps} steps "
                f"(mean {reward:.3g}), of which nothing is learned. Look at what is sampled (`log_completions=True`): "
                "whether the reward functions find the answer in it, whether `max_completion_length` cuts it off, and "
                "whether the task is too hard or too easy for this model. A higher `temperature` and more "
                "`num_generations` tell more completions apart."
            )
