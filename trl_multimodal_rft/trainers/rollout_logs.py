# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a trainer logs of a rollout: TRL's metrics and table of completions, media, and the first example."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from ..algorithms.metrics import PendingMetrics
from ..checks.media_contribution import is_due, media_contribution
from ..data.columns import strip_media
from ..encoding.prompts import EncodedPrompt
from ..reporting.console import waiting_display
from ..rollout.advantages import out_of_range
from ..rollout.collect import template_tools
from ..rollout.ranks import local_rows
from ..rollout.reward import reward_metrics
from ..rollout.rollout import Rollout
from ..views import View
from .views import view_metrics


def log_rollout(
    trainer: Any, rollout: Rollout, rewards: torch.Tensor, is_std_zero: torch.Tensor, advantages: torch.Tensor
) -> None:
    """
    Logs rewards, prompts, completions and advantages, those per token as their mean.

    Shapes: `rewards`, `is_std_zero` `(N,)`, `advantages` `(N,)` or `(N, C)`, all of all ranks.
    """
    metrics, logs = trainer._mode_metrics, trainer._logs
    per_func, names = rollout.rewards_per_func, trainer.reward_func_names
    for name, value in reward_metrics(per_func, names, rewards, is_std_zero).items():
        metrics[name].append(value)
    if rollout.from_view is not None:
        trainer._log_metrics(view_metrics(rewards, trainer.accelerator.gather(rollout.from_view), trainer._group_size))
    for i, name in enumerate(names):
        logs["rewards"][name].extend(per_func[:, i].tolist())
    logs["advantages"].extend((advantages if advantages.dim() == 1 else advantages.mean(dim=1)).tolist())
    _log_by_rewards(trainer, len(rollout))
    log_completions(trainer, rollout)


def log_completions(trainer: Any, rollout: Rollout) -> None:
    """Logs prompts and completions, and shows the first of a run."""
    trainer._logs["prompt"].extend(gather_object(strip_media(rollout.messages)))
    trainer._logs["completion"].extend(gather_object(strip_media(rollout.completions)))
    if trainer._media_log is not None:
        shown = rollout.completions if trainer.tools else None
        trainer._media_log.add(rollout.messages, trainer._group_size, shown)
    _show_first(trainer, rollout)


def measure_groups(
    trainer: Any, rollout: Rollout, rewards: torch.Tensor, group_ids: torch.Tensor, live: torch.Tensor
) -> None:
    """
    Notes whether rewards differ, and how difficult prompts are, where the config asks for it: whether the mean rewards
    of groups are within the wanted range, and the pass rates of rows.

    Shapes: `rewards`, `group_ids` and `live`, whether the rewards of a group differ, `(N,)`, of all ranks.
    """
    args, n, per_func, sampler = trainer.args, len(rollout), rollout.rewards_per_func, trainer._stream.sampler
    name, names = args.dynamic_sampling_reward, trainer.reward_func_names
    if args.dynamic_sampling_range is not None:
        bounded = rewards if name is None else per_func[:, reward_index(name, names)]
        rollout.out_of_range = local_rows(
            trainer.accelerator, out_of_range(bounded, group_ids, args.dynamic_sampling_range), n
        )
    if trainer.model.training:
        trainer.rewards_hint.measure(rewards, live, trainer.state.global_step)
    if sampler is not None and trainer.model.training:
        numbers = torch.tensor(rollout.numbers, device=trainer.accelerator.device)
        sampler.measure(trainer.accelerator.gather(numbers), per_func[:, reward_index(name, names)])
        known, mean = sampler.known()
        trainer._log_metrics({"difficulty/known_frac": known, "difficulty/pass_rate": mean})


def reward_index(name: str | None, names: Sequence[str]) -> int:
    """The place of a reward function among those of a trainer; without a name, the first."""
    if name is None:
        return 0
    if name not in names:
        raise ValueError(
            f"`dynamic_sampling_reward` is {name!r}, but the reward functions are {', '.join(map(repr, names))}; name "
            "one of them."
        )
    return names.index(name)


def log_contribution(trainer: Any, rollout: Rollout) -> None:
    """Logs how far media move the log-probabilities of some completions, where that is due."""
    args, every = trainer.args, trainer.args.media_contribution_steps
    n_steps = max(1, trainer._steps_per_rollout // args.gradient_accumulation_steps)
    if every and trainer.model.training and is_due(every, trainer.state.global_step, n_steps):

        def encode(row: int, view: View) -> EncodedPrompt:
            tools = template_tools(trainer.toolbox, rollout.environments, row)
            return trainer.prompts.encode(rollout.messages[row], rollout.numbers[row], view=view, **tools)

        completions = rollout.prompts, rollout.completion_ids, rollout.completion_mask
        trainer._log_metrics(
            media_contribution(trainer._policy, trainer.model, completions, rollout.loss_mask, encode)
        )


def _log_by_rewards(trainer: Any, n: int) -> None:
    """Logs what reward functions passed to `log_extra` and `log_metric`, in the same order on all ranks."""
    extra, metrics = trainer._pending_extra_logs, trainer._pending_metrics
    for column in sorted(set(gather_object(list(extra)))):
        trainer._logs["extra"][column].extend(gather_object(extra.get(column, [None] * n)))
    extra.clear()
    for name in sorted(set(gather_object(list(metrics)))):
        values = metrics.get(name, [])
        stats = torch.tensor([sum(values), len(values)], dtype=torch.float32, device=trainer.accelerator.device)
        total, count = trainer.accelerator.gather(stats).view(-1, 2).sum(dim=0).tolist()
        trainer._mode_metrics[name].append(total / count)
    metrics.clear()


def _show_first(trainer: Any, rollout: Rollout) -> None:
    """Shows the first prompt and completion of a run on its console."""
    display = waiting_display(trainer) if trainer.model.training else None
    if display is not None:
        ids, mask = rollout.completion_ids[0], rollout.completion_mask[0].bool()
        rewards = [] if rollout.rewards_per_func is None else rollout.rewards_per_func[0].tolist()
        display.show_example(
            rollout.prompts[0].input_ids.tolist(),
            rollout.messages[0],
            ids[mask].tolist(),
            reference=rollout.rows[0].get("solution"),
            rewards=dict(zip(trainer.reward_func_names, rewards, strict=True)),
        )


class ReadMetrics(TrainerCallback):
    """Reads the metrics of an optimizer step or of a batch of evaluation, before anything logs or saves them."""

    def __init__(self, pending: PendingMetrics):
        self.pending = pending

    def on_step_end(self, args, state, control, **kwargs):
        self.pending.read()

    on_prediction_step = on_step_end
