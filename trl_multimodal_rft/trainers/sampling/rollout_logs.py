# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Logs of a rollout: TRL's metrics and table of completions, media, the first example, and hints about rewards."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from huggingface_hub import CommitScheduler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from ...algorithms.metrics import average, latest, share
from ...algorithms.signal import CAUSES
from ...checks.media_contribution import media_contribution
from ...data.reading.refs import MediaRef
from ...data.rows.columns import strip_media
from ...data.rows.labels import class_names
from ...encoding.prompts import EncodedPrompt
from ...reporting.console import console_of
from ...reporting.events import EventPart
from ...reporting.media_logs import COMPLETION_AUDIO, TABLES, MediaLog, MediaLogCallback
from ...rollout.estimates import Estimates, reward_metrics
from ...rollout.ranks import sum_over_ranks
from ...rollout.rollout import Rollout
from ...views.views import View
from ..base.logs import ReadMetrics, is_due
from .prompting import Prompting
from .rewarding import Rewarding
from .rollout_views import view_metrics
from .scoring import Scoring


logger = get_logger(__name__)


@dataclass
class RolloutLog:
    """Logger of rollouts: TRL's metrics and tables, media, and the first example of a run."""

    rewarding: Rewarding
    tables: Mapping[str, Any]  # TRL's table of completions, by column
    extra_logs: dict[str, list[Any]]  # values that reward functions passed to `log_extra`, by column
    pending_metrics: dict[str, list[float]]  # values that reward functions passed to `log_metric`, by name
    main_handler: CallbackHandler | None  # callbacks on the main process, `None` on other processes

    def __post_init__(self):
        args = self.rewarding.context.args
        self.media = None
        self.hint = None
        if args.log_completions:
            self.media = MediaLog(args.generation_batch_size, args.log_multimodal, self.rewarding.context.accelerator)
        if self.rewarding.functions.names:
            self.hint = SignalHint(args.reads_steps)

    def callbacks(self, handler: CallbackHandler, scheduler: CommitScheduler | None) -> Iterator[TrainerCallback]:
        """
        Yields callbacks for metrics, for hints about the signal, and for logs of media, which TRL's scheduler
        publishes.
        """
        yield ReadMetrics(self.rewarding.context.metrics)
        if self.hint is not None:
            yield self.hint
        if self.rewarding.functions.held_out:
            yield HeldOutHint(self.rewarding.functions.held_out)
        if self.media is not None:
            has_tools = bool(self.rewarding.prompting.toolbox.tools)
            columns = self.rewarding.prompting.notes.columns
            callback = MediaLogCallback(
                self.media, self.rewarding.context.args, handler, self.tables, columns, has_tools
            )
            if scheduler is not None:
                scheduler.folder_path = (callback.folder / TABLES).resolve()
            yield callback

    def add(self, rollout: Rollout, per_func: torch.Tensor, rewards: torch.Tensor, estimates: Estimates) -> None:
        """Logs prompts, completions, advantages (means over tokens), and `rewards`, `(N,)`, of all ranks."""
        context = self.rewarding.context
        names = self.rewarding.functions.names
        advantages = estimates.advantages
        counted = torch.arange(len(rollout)) < rollout.n_counted
        is_counted = context.accelerator.gather(counted.to(per_func.device))
        context.metrics.add(
            reward_metrics(
                per_func[is_counted],
                names,
                rewards[is_counted],
                estimates.is_std_zero[is_counted],
                self.rewarding.functions.held_out,
            )
        )
        if rollout.source.from_view is not None:
            context.metrics.add(
                view_metrics(rewards, context.accelerator.gather(rollout.source.from_view), context.group_size)
            )
        for i, name in enumerate(names):
            self.tables["rewards"][name].extend(per_func[:, i].tolist())
        self.tables["advantages"].extend((advantages if advantages.dim() == 1 else advantages.mean(dim=1)).tolist())
        self._add_reward_logs(rollout)
        self.add_completions(rollout, per_func)

    def add_completions(self, rollout: Rollout, per_func: torch.Tensor | None = None) -> None:
        """Logs prompts and completions, and shows the first ones of a run on the console."""
        self.tables["prompt"].extend(gather_object(strip_media(rollout.source.messages)))
        self.tables["completion"].extend(gather_object(strip_media(rollout.source.completions)))
        if self.media is not None:
            source = rollout.source
            completions: list = source.completions if self.rewarding.prompting.toolbox.tools else [None] * len(rollout)
            if source.sounds is not None:
                heard = zip(completions, source.sounds, source.row_indices, strict=True)
                completions = [[completion, *sound_refs(sound, row)] for completion, sound, row in heard]
            self.media.add(source.messages, self.rewarding.context.group_size, completions)
        console = None
        if self.main_handler is not None and self.rewarding.context.is_training:
            console = console_of(self.main_handler.callbacks)
        if console is not None and console.needs_example:
            ids = rollout.completion_ids[0]
            mask = rollout.completion_mask[0].bool()
            rewards = [] if per_func is None else per_func[0].tolist()
            console.show_example(
                self.rewarding.prompting.encoder.model,
                self.rewarding.prompting.encoder.processor,
                rollout.prompts[0].input_ids.tolist(),
                rollout.source.messages[0],
                ids[mask].tolist(),
                solution=class_names(rollout.source.rows[0].get("solution")),
                rewards=dict(zip(self.rewarding.functions.names, rewards, strict=True)),
            )

    def measure_difficulty(self, rollout: Rollout, per_func: torch.Tensor) -> None:
        """Records pass rates of rows, by the rewards of all ranks, if `difficulty_sampling` needs them."""
        context = self.rewarding.context
        sampler = self.rewarding.prompting.stream.sampler
        if sampler is None or not context.is_training:
            return
        row_indices = context.accelerator.gather(
            torch.tensor(rollout.source.row_indices, device=context.accelerator.device)
        )
        index = reward_index(context.args.dynamic_sampling_reward, self.rewarding.functions.names)
        sampler.update_pass_rates(row_indices, per_func[:, index])
        known_frac, mean_pass_rate = sampler.coverage()
        numbers = {"known_frac": latest(known_frac), "pass_rate": latest(mean_pass_rate)}
        context.metrics.add({f"difficulty/{name}": number for name, number in numbers.items()})

    def _add_reward_logs(self, rollout: Rollout) -> None:
        """Values are logged in the same order on all ranks."""
        for column in sorted(set(gather_object(list(self.extra_logs)))):
            self.tables["extra"][column].extend(gather_object(self.extra_logs.get(column, [None] * len(rollout))))
        self.extra_logs.clear()
        for name in sorted(set(gather_object(list(self.pending_metrics)))):
            values: list[float] = [] if rollout.n_counted == 0 else self.pending_metrics.get(name, [])
            sums = sum_over_ranks(self.rewarding.context.accelerator, [float(sum(values)), len(values)])
            self.rewarding.context.metrics.add({name: share(*sums, is_of_all_ranks=True)})
        self.pending_metrics.clear()


def sound_refs(sound: dict[str, Any] | None, row: int) -> list[MediaRef]:
    """Returns the sound of a completion for the table of completions."""
    if sound is None:
        return []
    source = {name: sound[name] for name in ("array", "sampling_rate")}
    return [MediaRef("audio", source, {}, COMPLETION_AUDIO, row)]


def reward_index(name: str | None, names: Sequence[str]) -> int:
    """Returns the index of the reward function with a name, 0 for `None`. Raises `ValueError` for unknown names."""
    if name is None:
        return 0
    if name not in names:
        raise ValueError(
            f"`dynamic_sampling_reward` is {name!r}, but the reward functions are {', '.join(map(repr, names))}; name "
            "one of them."
        )
    return names.index(name)


def log_media_contribution(prompting: Prompting, scoring: Scoring, rollout: Rollout, n_micro_batches: int) -> None:
    """
    Logs how far media change the log-probabilities of some completions, every `media_contribution_steps`.
    `n_micro_batches` are those of a rollout, over all iterations.
    """
    context = scoring.context
    interval = context.args.media_contribution_steps
    n_steps = max(1, n_micro_batches // context.args.gradient_accumulation_steps)
    if not (interval and context.is_training and is_due(interval, context.step, n_steps)):
        return

    def encode(i: int, view: View) -> EncodedPrompt:
        source = rollout.source
        return prompting.encoder.encode(source.messages[i], source.row_indices[i], view, **source.template_tools(i))

    batch = rollout.completions, rollout.loss_mask
    contribution = media_contribution(scoring.policy, context.model, *batch, encode)
    context.metrics.add({name: average(mean) for name, mean in scoring.checks.smoothed(contribution).items()})


def constant_rewards(history: list[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    """
    Returns the reward functions that gave all completions of a run the same reward, by name, with the number of their
    steps and the reward. Leaves out functions whose rewards differed at any step, such as one for a learned format.
    """
    constant = {}
    keys = dict.fromkeys(chain.from_iterable(history))
    for key in [key for key in keys if key.startswith("rewards/") and key.endswith("/mean")]:
        name = key.removeprefix("rewards/").removesuffix("/mean")
        reward_logs = [logs for logs in history if key in logs]
        reward = reward_logs[0][key]
        means_and_stds = [(logs[key], logs[f"rewards/{name}/std"]) for logs in reward_logs]
        # Up to rounding, stds must be 0, and means the first reward. The std of fewer than two rewards is `None`
        if all(
            None not in pair and max(pair[1], abs(pair[0] - reward)) <= 1e-6 * abs(pair[0]) for pair in means_and_stds
        ):
            # Steps count from the log before the first one with the function
            previous_index = next(i for i, logs in enumerate(history) if key in logs) - 1
            constant[name] = (
                history[-1]["step"] - (0 if previous_index < 0 else history[previous_index]["step"]),
                reward,
            )
    return constant


# What to do where a cause of [`~algorithms.signal.CAUSES`] has taken the signal from all tokens
_REMEDIES = {
    "no_reward": "No reward function returns a number for the completions: look at its conditions and at the rows.",
    "equal_rewards": "All completions of a prompt have the same reward. Look at the completions "
    "(`log_completions=True`): whether the reward functions find the answer, whether `max_completion_length` cuts it "
    "off, and whether the task is too hard or too easy for this model. A higher `temperature` and more "
    "`num_generations` make completions more diverse.",
    "clipped_rewards": "Rewards differ only outside of `reward_clip_range`; set a wider range.",
    "estimator": "Rewards differ, but all advantages are 0: choose another `advantage_estimator`, or other settings "
    "of it.",
    "truncation": "All completions are cut off, and `mask_truncated_completions` leaves them out: raise "
    "`max_completion_length`.",
    "entropy_filter": "`top_entropy_quantile` leaves out all tokens; raise it.",
    "off_policy_mask": "The policy has moved too far from the one that sampled; raise `off_policy_mask_threshold`, or "
    "lower `learning_rate` or `num_iterations`.",
    "engine_ratios": "The probabilities of the engine and of the trainer are too far apart: see "
    "`sampling/sampling_logp_difference/mean`, and raise `vllm_importance_sampling_clip_max`.",
    "trust_region": "The loss clips the ratios of all tokens; lower `learning_rate` or `num_iterations`, or raise "
    "`epsilon`.",
}


def steps_without_signal(history: list[dict[str, float]]) -> int:
    """
    Returns the number of the last steps of a run in which no token had a signal, see [`~algorithms.signal`]. With a
    loss of one's own, which has no such account, these are steps in which all rewards of each group were equal.
    """
    lost_since = None  # the step before
    previous = last = 0.0
    for logs in history:
        share = logs.get("signal/tokens", 1 - logs.get("frac_reward_zero_std", math.nan))
        if not math.isnan(share):
            last = logs["step"]
            if share > 0:
                lost_since = None
            elif lost_since is None:
                lost_since = previous
        previous = logs["step"]
    return 0 if lost_since is None else int(last - lost_since)


class SignalHint(TrainerCallback):
    """
    Callback that warns once if no token has a learning signal for `patience` steps, with what took it, and once per
    reward function that gives all completions the same reward for as long. With `by_steps`, advantages depend on the
    positions of rewards in a completion, so that equal sums of a function aren't looked at.
    """

    def __init__(self, by_steps: bool = False, patience: int = 8):
        self.patience = patience
        self.by_steps = by_steps
        # Functions of earlier warnings; `None` stands for the signal of all
        self._warned_functions: set[str | None] = set()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        history = state.log_history
        n_lost_steps = 0 if None in self._warned_functions else steps_without_signal(history)
        # By function: the number of steps, and the reward
        steps_and_rewards = {} if self.by_steps else constant_rewards(history)
        constant = {name: pair for name, pair in steps_and_rewards.items() if pair[0] >= self.patience}
        if n_lost_steps >= self.patience:
            self._warned_functions |= {None, *constant}
            logs = next((logs for logs in reversed(history) if "signal/tokens" in logs), {"signal/equal_rewards": 1.0})
            shares = {cause: logs.get(f"signal/{cause}", 0.0) for cause in CAUSES}
            main_cause = max(CAUSES, key=lambda cause: shares[cause])
            lost_shares = ", ".join(f"{cause} {share:.0%}" for cause, share in shares.items() if share > 0)
            functions = "".join(f", '{name}' {reward:.3g}" for name, (_, reward) in constant.items())
            mean_reward = next((logs["reward"] for logs in reversed(history) if "reward" in logs), math.nan)
            logger.warning(
                f"No token has had a learning signal for {n_lost_steps} steps (mean reward {mean_reward:.3g}"
                f"{functions}), so the model learns nothing from rewards. Shares of tokens by what took it "
                f"(`signal/*`): {lost_shares}. {_REMEDIES[main_cause]}"
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


class HeldOutHint(TrainerCallback):
    """
    Callback that warns once per held-out reward that falls while the reward rises: by more than three standard errors
    each, between the first and the last quarter of the run's logs so far, of which there must be 12.
    """

    def __init__(self, names: Collection[str]):
        self._names = {*names}  # of functions without a warning

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        for name in sorted(self._names):
            keys = "reward", f"held_out_rewards/{name}/mean"
            logs = [entry for entry in state.log_history if None not in map(entry.get, keys)]
            rewards = [-entry[keys[0]] for entry in logs]
            values = [entry[keys[1]] for entry in logs]
            if len(logs) < 12 or not (is_lower_later(values) and is_lower_later(rewards)):
                continue
            self._names.remove(name)
            logger.warning(
                f"The held-out reward '{name}' fell to {values[-1]:.3g} while the reward rose to {-rewards[-1]:.3g}, "
                "so the policy may exploit the rewards that it is trained on. Look at the completions "
                "(`log_completions=True`), raise `beta`, lower `learning_rate`, or add a reward that prevents it."
            )


def is_lower_later(values: Sequence[float]) -> bool:
    """Returns whether the last quarter of values is lower than the first, by more than three standard errors."""
    quarter = len(values) // 4
    first = torch.tensor(values[:quarter], dtype=torch.double)
    last = torch.tensor(values[-quarter:], dtype=torch.double)
    error = ((first.var() + last.var()) / quarter).sqrt()
    return bool(first.mean() - last.mean() > 3 * error)
