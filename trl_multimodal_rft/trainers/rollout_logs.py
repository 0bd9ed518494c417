# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a trainer logs of a rollout: TRL's metrics and table of completions, media, and the first example."""

from typing import Any

import torch
from accelerate.utils import gather_object

from ..data.columns import strip_media
from ..reporting.console import waiting_display
from ..rollout.reward import reward_metrics
from ..rollout.rollout import Rollout


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
    for i, name in enumerate(names):
        logs["rewards"][name].extend(per_func[:, i].tolist())
    logs["prompt"].extend(gather_object(strip_media(rollout.messages)))
    logs["completion"].extend(gather_object(strip_media(rollout.completions)))
    logs["advantages"].extend((advantages if advantages.dim() == 1 else advantages.mean(dim=1)).tolist())
    _log_by_rewards(trainer, len(rollout))
    if trainer._media_log is not None:
        shown = rollout.completions if trainer.tools else None
        trainer._media_log.add(rollout.messages, trainer._group_size, shown)
    _show_first(trainer, rollout)


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
        display.show_example(
            rollout.prompts[0].input_ids.tolist(),
            rollout.messages[0],
            ids[mask].tolist(),
            reference=rollout.rows[0].get("solution"),
            rewards=dict(zip(trainer.reward_func_names, rollout.rewards_per_func[0].tolist(), strict=True)),
        )
