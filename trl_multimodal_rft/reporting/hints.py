# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Hints for runs and reward functions without a learning signal."""

from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .events import EventPart


logger = get_logger(__name__)


def constant_rewards(history: list[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    """
    Returns the number of steps and the reward of each reward function that gave all completions of a run the same
    reward. Functions whose rewards differed at any step, such as a reward for a learned format, are left out.
    """
    constant = {}
    keys = (key for logs in history for key in logs if key.startswith("rewards/") and key.endswith("/mean"))
    for key in dict.fromkeys(keys):
        name = key.removeprefix("rewards/").removesuffix("/mean")
        entries = [logs for logs in history if key in logs]
        reward = entries[0][key]
        means_and_stds = [(logs[key], logs[f"rewards/{name}/std"]) for logs in entries]
        # The standard deviation of fewer than two rewards is `None`
        if all(
            None not in pair and max(pair[1], abs(pair[0] - reward)) <= 1e-6 * abs(pair[0]) for pair in means_and_stds
        ):
            # Steps count from the log before the first one with the function
            previous = next(i for i, logs in enumerate(history) if key in logs) - 1
            constant[name] = (history[-1]["step"] - (0 if previous < 0 else history[previous]["step"]), reward)
    return constant


class EqualRewardsHint(TrainerCallback):
    """
    Callback that warns once if all rewards stay equal for `patience` steps, and once per reward function with such
    rewards.

    With `grouped`, rewards are compared within groups. With `by_steps`, advantages depend on the positions of rewards
    in a completion, so equal rewards may have a signal, and the only warning is about advantages that all stay 0.
    """

    def __init__(self, grouped: bool, by_steps: bool = False, patience: int = 8):
        self.grouped, self.patience, self.by_steps = grouped, patience, by_steps
        # Functions of earlier warnings; `None` stands for all functions
        self._warned_functions: set[str | None] = set()
        self._equal_since: int | None = None  # the step before rewards became equal

    def record_rewards(self, rewards: torch.Tensor, live: torch.Tensor, step: int) -> None:
        """
        Records whether the rewards of a rollout differ or, with `grouped`, whether any group has a signal. Logs don't
        tell whether rewards differ, because RLOO's logged rewards include the KL penalty, as in TRL.

        Shapes: `rewards` and `live` (whether the completion's group has a signal) `(N,)`, of all ranks.
        """
        numbers = rewards[~rewards.isnan()]
        differs = live if self.grouped else (numbers - numbers.mean()).abs() > 1e-6 * numbers.mean().abs()
        self._equal_since = (
            None if differs.any() or not len(numbers) else step if self._equal_since is None else self._equal_since
        )

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        history = state.log_history
        steps = (
            0 if None in self._warned_functions or self._equal_since is None else state.global_step - self._equal_since
        )
        rewards = {} if self.by_steps else constant_rewards(history)
        constant = {name: values for name, values in rewards.items() if values[0] >= self.patience}
        if steps >= self.patience:
            self._warned_functions |= {None, *constant}
            equal = "an advantage of 0" if self.by_steps else "the same reward"
            mean = next(logs["reward"] for logs in reversed(history) if "reward" in logs)
            functions = "".join(f", '{name}' {reward:.3g}" for name, (_, reward) in constant.items())
            logger.warning(
                f"All completions{' of a prompt' if self.grouped else ''} have had {equal} for {steps} steps "
                f"(mean {mean:.3g}{functions}), so the model learns nothing. Look at the completions "
                "(`log_completions=True`): whether the reward functions find the answer, whether "
                "`max_completion_length` cuts it off, and whether the task is too hard or too easy for this model. A "
                "higher `temperature` and more `num_generations` make completions more diverse."
            )
        for name in constant.keys() - self._warned_functions:
            self._warned_functions.add(name)
            steps, reward = constant[name]
            logger.warning(
                f"The reward function '{name}' has given all completions the same reward for {steps} steps "
                f"({reward:.3g}), so the model learns nothing from it. Look at the completions "
                "(`log_completions=True`): whether they have what the function rewards, and whether the prompts "
                "request it."
            )
