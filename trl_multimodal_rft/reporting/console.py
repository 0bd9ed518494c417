# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Console output of a run: the parts of the model, the first example, and one line per log."""

import copy
import math
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import has_length

from ..data.reading.decoding import load_image, read_audio
from ..data.reading.media_files import evenly_spaced_frames
from ..data.reading.refs import MediaError, MediaRef, iter_refs
from ..encoding.processors import tokenizer_of
from ..encoding.prompts import placeholder_token_ids
from ..models.parts import count_parts, rates_of_parts
from ..models.wrapped import unwrapped
from ..progress import in_notebook, print_above_bars, progress_bar
from .events import EventPart


if TYPE_CHECKING:
    from transformers.utils.notebook import NotebookTrainingTracker

PRINTERS = (PrinterCallback, ProgressCallback, DEFAULT_PROGRESS_CALLBACK)  # callbacks of transformers that print logs
_LONGEST_TEXT = 2000  # maximum number of characters of a prompt or completion that are shown
_MOST_REWARDS = 3  # reward functions whose means a line shows
# Rewards that are 1 for a right answer and 0 for a wrong one
_ACCURACIES = ("accuracy_reward", "choice_reward")


class CompactLogCallback(TrainerCallback):
    """
    A [`~transformers.TrainerCallback`] that shows a run on the console of its main process. It shows the trained and
    frozen parts of the model, the first prompt as the model gets it, with one completion and its rewards, and one line
    per log above a progress bar (a table in a notebook). There is no bar with `disable_tqdm`, or if the output isn't a
    terminal.

    The callback replaces the progress bar and the dictionaries that transformers prints. Log files, trackers and
    `log_history` keep all metrics.

    Trainers of this package add this callback. When training begins, a trainer with this callback removes the
    callbacks of transformers that print logs.

    Example:
    ```python
    trainer = MultimodalGRPOTrainer(...)
    trainer.remove_callback(CompactLogCallback)  # transformers' display in its place
    trainer.train()
    ```
    """

    def __init__(self):
        self.needs_example = True  # whether the run has shown no example yet
        self._needs_model = False  # whether a run has begun that hasn't shown its model yet
        self._has_logged = False  # whether the run has logged metrics of a step
        # Whether the metrics of a finished step may still be logged, and evaluations that are shown after them
        self._awaits_metrics = False
        self._evaluations: list[tuple[TrainerState, str, dict[str, str]]] = []
        self._trainer_name = ""
        self._timed_until = 0.0  # clock at the end of the last step, evaluation or save, where the next step begins
        # Duration and number of training steps since the last line
        self._seconds = 0.0
        self._steps = 0
        self._bars: dict[str, tqdm] = {}  # open bars by name, `"train"` and `"eval"`
        self._table: NotebookTrainingTracker | None = None  # replaces lines and the bar `"train"` in a notebook

    def begin(self, trainer_name: str) -> None:
        """
        Prepares for a run. Trainers call this method when they begin to train.

        Args:
            trainer_name (`str`):
                Name of the trainer's class.
        """
        self._trainer_name = trainer_name
        self._needs_model = True
        self.needs_example = True
        self._has_logged = False

    def end(self) -> None:
        """Closes the bars of a run. Trainers call this method at the end of training, also after an error."""
        self._print_evaluations()
        self._table = None
        while self._bars:
            self._bars.popitem()[1].close()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        optimizer: Optimizer,
        **_: EventPart,
    ):
        self._show_model_once(args, state, model, optimizer)
        self._timed_until = time.perf_counter()
        self._seconds = 0.0
        self._steps = 0
        if in_notebook() and state.is_world_process_zero and not args.disable_tqdm:
            self._table = import_module("transformers.utils.notebook").NotebookTrainingTracker(state.max_steps)
            self._table.update(state.global_step)
        else:
            options = {"disable": args.disable_tqdm, "initial": state.global_step}
            self._bars["train"] = progress_bar(state.max_steps, "train", "step", **options)

    def _show_model_once(
        self, args: TrainingArguments, state: TrainerState, model: nn.Module, optimizer: Optimizer
    ) -> None:
        if self._needs_model and state.is_world_process_zero:
            model = extract_model_from_parallel(model)
            model_name = type(unwrapped(None, model)).__name__
            print_above_bars(f"{self._trainer_name} trains {model_name} for {state.max_steps} steps:")
            self._needs_model = False
            rates = rates_of_parts(model, args)
            # An optimizer that the user passed may have other rates than `args`; then no rates are shown
            optimizer_rates = {group.get("initial_lr", group["lr"]) for group in optimizer.param_groups}
            show_parts(model, rates if optimizer_rates.issuperset(chain(*rates.values())) else {})

    def show_example(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin | PreTrainedTokenizerBase,
        input_ids: Sequence[int],
        messages: str | list[dict[str, Any]] | None,
        completion_ids: Sequence[int],
        solution: str | float | list | None = None,
        rewards: Mapping[str, float] | None = None,
        rejected_ids: Sequence[int] | None = None,
    ) -> None:
        """
        Shows one example per run: the model's input, and its output or target. Trainers call this method.

        Args:
            model ([`~transformers.PreTrainedModel`]):
                The trained model, without wrappers.
            processor ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`]):
                Processing class of the model.
            input_ids (`Sequence[int]`):
                Token ids of the prompt, with expanded placeholders.
            messages (`str` or `list[dict]`, *optional*):
                The messages of the prompt, with its media.
            completion_ids (`Sequence[int]`):
                Token ids of a sampled completion, of a target, or of the chosen completion of a pair.
            solution (`str`, `float` or `list`, *optional*):
                Solution of the row.
            rewards (`Mapping[str, float]`, *optional*):
                Rewards of the completion by function; `None` for a target.
            rejected_ids (`Sequence[int]`, *optional*):
                Token ids of the rejected completion of a pair.
        """
        if not self.needs_example:
            return
        self.needs_example = False
        tokenizer = tokenizer_of(processor)
        placeholders = placeholder_token_ids(model, processor)
        descriptions = media_descriptions(messages)
        prompt = prompt_text(input_ids, tokenizer, placeholders, descriptions)
        completions = {"target" if rewards is None else "completion": completion_ids}
        if rejected_ids is not None:
            completions = {"chosen": completion_ids, "rejected": rejected_ids}
        lines = []
        if len(input_ids):
            lines.append(f"first prompt ({len(input_ids)} tokens), as the model gets it:")
            lines.append(textwrap.indent(_shortened(prompt), "  "))
        if solution is not None:
            lines.append(f"reference: {_shortened(str(solution))}")
        # If all tokens of a row are learned, there is no prompt, and the target holds the media
        for label, ids in completions.items():
            text = prompt_text(ids, tokenizer, placeholders, {} if len(input_ids) else descriptions)
            lines.append(f"{label} ({len(ids)} tokens): {_shortened(text)}")
        if rewards:
            reward_texts = (
                f"{name} {'none' if math.isnan(reward) else f'{reward:.3g}'}" for name, reward in rewards.items()
            )
            lines.append(f"rewards: {', '.join(reward_texts)}")
        print_above_bars(*lines)

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: EventPart):
        now = time.perf_counter()  # not at `on_step_end`, where other callbacks may evaluate
        self._seconds = self._seconds + now - self._timed_until
        self._steps += 1
        self._timed_until = now
        self._awaits_metrics = True

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: EventPart):
        self._print_evaluations()  # of a step without a log

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        if self._table is not None:
            self._table.update(state.global_step)
        elif "train" in self._bars:
            self._bars["train"].update(state.global_step - self._bars["train"].n)
        # Shows the pace after the first step of a run, as the first log may come much later
        if self._steps == state.global_step == 1 and not control.should_log and state.is_world_process_zero:
            self._print(state, "", times=self._pace(state))

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart
    ):
        if "eval" not in self._bars:
            loader = parts.get("eval_dataloader")
            total = len(loader) if isinstance(loader, DataLoader) and has_length(loader) else None
            self._bars["eval"] = progress_bar(total, "evaluate", "batch", disable=args.disable_tqdm)
        self._bars["eval"].update()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        self._timed_until = time.perf_counter()
        if "eval" in self._bars:
            self._bars.pop("eval").close()

    on_save = on_predict = on_evaluate

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        model: nn.Module,
        optimizer: Optimizer,
        **_: EventPart,
    ):
        is_end = {"train_loss", "train_runtime"} <= logs.keys()  # other logs may have one of them
        is_evaluation = any(name.startswith("eval_") for name in logs) or _prefix_of(logs) != "eval"
        self._has_logged = self._has_logged or not (is_evaluation or is_end)
        if not state.is_world_process_zero or not logs:
            return
        self._show_model_once(args, state, model, optimizer)  # other callbacks may log before this one begins
        if is_end:
            if not self._has_logged:  # TRL logs the metrics of a run shorter than `logging_steps` with its totals
                self._print(state, "", metric_values({"loss": logs["train_loss"], **logs}), self._pace(state))
            self._print_evaluations()
            self._print(state, f"trained in {_duration(logs['train_runtime'])}")
        elif is_evaluation:
            self._timed_until = time.perf_counter()
            if self._awaits_metrics:
                self._evaluations.append((copy.copy(state), *evaluation_values(logs)))
            else:
                self._print(state, *evaluation_values(logs))
        else:
            self._print(state, "", metric_values(logs), self._pace(state))
            self._print_evaluations()
            self._seconds = 0.0
            self._steps = 0

    def _print_evaluations(self) -> None:
        for evaluation in self._evaluations:
            self._print(*evaluation)
        self._evaluations.clear()
        self._awaits_metrics = False

    def _pace(self, state: TrainerState) -> list[str]:
        """Returns the seconds per step and the remaining time, such as `["2.1 s/step", "7 min left"]`."""
        if not self._steps:
            return []
        seconds_per_step = self._seconds / self._steps
        seconds = f"{seconds_per_step:.2g}" if seconds_per_step < 10 else f"{seconds_per_step:.0f}"
        return [f"{seconds} s/step", f"{_duration(seconds_per_step * (state.max_steps - state.global_step))} left"]

    def _print(
        self, state: TrainerState, label: str, values: Mapping[str, str] | None = None, times: Sequence[str] = ()
    ) -> None:
        values = values or {}
        if self._table is None:
            total = f"/{state.max_steps}" if state.max_steps < sys.maxsize else ""  # a loop of one's own has no end
            step = f"step {state.global_step}{total}" if state.max_steps else "evaluation"
            first_value, *other_values = [f"{name} {value}" for name, value in values.items()] or [""]
            labelled_value = [f"{label} {first_value}".strip()] if label or first_value else []
            print_above_bars(" | ".join([step, *labelled_value, *other_values, *times]))
        elif values:
            row = {f"{label} {name}".strip(): value for name, value in values.items()}
            self._table.write_line({"step": state.global_step, **row})
            self._table.display()


def console_of(callbacks: Iterable[TrainerCallback]) -> CompactLogCallback | None:
    """Returns the callback that writes to the console, or `None`."""
    return next((callback for callback in callbacks if isinstance(callback, CompactLogCallback)), None)


# Parts of the model


def show_parts(model: nn.Module, rates: Mapping[str, Sequence[float]]) -> None:
    """Prints the parts of a model, with their sizes, trained parameters and learning rates."""
    print_above_bars(*parts_lines(count_parts(model), rates))


def parts_lines(parts: Mapping[str, tuple[int, int]], rates: Mapping[str, Sequence[float]] | None = None) -> list[str]:
    """Returns lines for parts of a model, and for totals. `parts` has numbers of all and of trained parameters."""
    total, trained = (sum(counts) for counts in zip(*parts.values(), strict=True))
    lines = []
    for part, (size, n_trained) in parts.items():
        rate_text = " and ".join(f"{number:g}" for number in (rates or {}).get(part, ()))
        status = "trained" if n_trained == size else f"{_count(n_trained)} trained" if n_trained else "frozen"
        lines.append(f"  {part:<15}{_count(size):>8}  {status}{rate_text and f' at {rate_text}'}")
    return [*lines, f"  {'total':<15}{_count(total):>8}  {_count(trained)} trained"]


def _count(number: int) -> str:
    """Returns a number with three digits and a unit, such as `"1.23 M"`. 999500 rounds up to `"1 M"`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}" if number < 999.5 * size else f"{number / size:.0f} {unit}"
    return str(number)


# Prompts


def media_descriptions(messages: str | list[dict[str, Any]] | None) -> dict[str, list[str | None]]:
    """Returns texts on images, sounds and videos by modality, such as `"0.62 s"`, or `None` for unreadable media."""
    descriptions: dict[str, list[str | None]] = {}
    for ref in iter_refs(messages):
        text = None
        with suppress(MediaError, ImportError):
            text = _description(ref)
        descriptions.setdefault(ref.modality, []).append(text)
    return descriptions


def _description(ref: MediaRef) -> str | None:
    """Returns a text: a sound's duration, an image's size, or a video's number of frames and size."""
    if ref.modality == "audio":
        samples, rate = read_audio(ref)
        return f"{len(samples) / rate:.2f} s" if rate else None
    if ref.modality == "image":
        return "{}x{}".format(*load_image(ref).size)
    frames, metadata = evenly_spaced_frames(ref, 1)
    return f"{metadata['total_num_frames']} frames, {frames.shape[2]}x{frames.shape[1]}"


def prompt_text(
    input_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    placeholders: Mapping[str, set[int]],
    descriptions: Mapping[str, Sequence[str | None]],
) -> str:
    """Decodes token ids. A text such as `<audio: 13 tokens, 0.62 s>` replaces the placeholders of a sound."""
    ids = list(map(int, input_ids))
    spans = []
    for modality, placeholder_ids in placeholders.items():
        texts = descriptions.get(modality, ())
        modality_spans = _spans(ids, placeholder_ids, len(texts))
        # If a description can't be assigned to its span, no span gets a description
        texts = texts if len(modality_spans) == len(texts) else [None] * len(modality_spans)
        spans += [(start, stop, modality, text) for (start, stop), text in zip(modality_spans, texts, strict=True)]
    output = ""
    end = 0
    for start, stop, modality, text in sorted(spans):
        if start >= end:  # else media are interleaved, such as a video with its audio
            output += (
                f"{tokenizer.decode(ids[end:start])}<{modality}: {stop - start} tokens{f', {text}' if text else ''}>"
            )
            end = stop
    return f"{output}{tokenizer.decode(ids[end:])}"


def _spans(ids: Sequence[int], placeholders: set[int], n_media: int) -> list[tuple[int, int]]:
    """
    Returns (start, stop) spans of placeholders: one per medium if there are enough gaps, otherwise one per run. The
    largest gaps separate media, smaller ones are within: 0, 1, 3, 4 and 9 of two images are (0, 5) and (9, 10).
    """
    indices = [index for index, token in enumerate(ids) if token in placeholders]
    # The gap `i` is between the placeholders `i` and `i + 1`; its size is 1 if no other token is between them
    gaps = [(after - before, i) for i, (before, after) in enumerate(zip(indices, indices[1:], strict=False))]
    separators = {i for gap, i in gaps if gap > 1}
    if 0 < n_media <= len(separators):
        separators = {i for _, i in sorted(gaps, key=lambda item: (-item[0], item[1]))[: n_media - 1]}
    starts = [index for i, index in enumerate(indices) if i == 0 or i - 1 in separators]
    stops = [index + 1 for i, index in enumerate(indices) if i in separators or i == len(indices) - 1]
    return list(zip(starts, stops, strict=True))


def _shortened(text: str) -> str:
    text = text.rstrip("\n")
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


# Logs


def metric_values(logs: Mapping[str, Any]) -> dict[str, str]:
    """Returns the main metrics of a log as the console shows them."""
    values = {}
    rewards = dict(_matching(r"rewards/(.+)/mean", logs))
    if "reward" in logs:
        values["reward"] = f"{_number(logs['reward'])} ± {_number(logs.get('reward_std'))}"
    elif "loss" in logs:
        # `Trainer` leaves losses out that aren't finite, and would show 0
        values["loss"] = "nan" if logs.get("skipped_updates") == 1 else _number(logs["loss"])
    if logs.get("skipped_updates"):
        values["skipped updates"] = _per_cent(logs["skipped_updates"])
    if "accuracy" in logs:
        low = logs.get("accuracy_low")
        high = logs.get("accuracy_high")
        interval = "" if low is None or high is None else f" ({100 * low:.1f} to {_per_cent(high)})"
        values["accuracy"] = f"{_per_cent(logs['accuracy'])}{interval}"
    elif "rewards/accuracies" in logs:  # metric of DPO
        values["accuracy"] = _per_cent(logs["rewards/accuracies"])
    # Accuracy is shown, too, if it is the only function, and comes first
    accuracies = [name for name in _ACCURACIES if name in rewards]
    if len(rewards) > 1 or accuracies:
        for name in [*accuracies, *(name for name in rewards if name not in accuracies)][:_MOST_REWARDS]:
            if name == next(iter(accuracies), None):
                values.setdefault("accuracy", _per_cent(rewards[name]))
            else:
                values[name] = _per_cent(rewards[name]) if name in accuracies else _number(rewards[name])
    values |= {f"held out {name}": _number(value) for name, value in _matching(r"held_out_rewards/(.+)/mean", logs)}
    margin = logs.get("margin", logs.get("rewards/margins"))
    if margin is not None:
        values["margin"] = _number(margin)
    for name in logs:
        if re.fullmatch(r"(pass|majority)@\d+", name) and name != "pass@1":
            values[name] = _per_cent(logs[name])
    # Logs of preferences have a margin; their losses don't aim at token accuracy
    if "mean_token_accuracy" in logs and margin is None:
        values["token accuracy"] = _per_cent(logs["mean_token_accuracy"])
    if "completions/mean_length" in logs:
        clipped = logs.get("completions/clipped_ratio")
        share = "" if clipped is None else f", {100 * clipped:.0f} % clipped"
        values["length"] = f"{logs['completions/mean_length']:.1f}{share}"
    if "tools/call_frequency" in logs:
        failed = logs.get("tools/failure_frequency") or 0
        values["calls"] = _number(logs["tools/call_frequency"]) + (f", {100 * failed:.0f} % failed" if failed else "")
        for label, name in (("unparsed calls", "unparsed_frequency"), ("ended by length", "ended_by_length")):
            if logs.get(f"tools/{name}"):
                values[label] = _number(logs[f"tools/{name}"])
    if logs.get("explained_variance") is not None:  # `None` where all returns are equal
        values["explained variance"] = _number(logs["explained_variance"])
    return values


def evaluation_values(logs: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Returns the label of an evaluation, with the dataset's name if there are several, and its main metrics."""
    prefix = _prefix_of(logs)
    dataset_names = [name for name, _ in _matching("eval_(.+)_samples_per_second", logs)][:1]
    of_dataset = "".join(f"(?:{re.escape(name)}_)?" for name in dataset_names)
    pattern = f"(?:eval|{re.escape(prefix)})_{of_dataset}(.+)"
    return " ".join([prefix, *dataset_names]), metric_values(dict(_matching(pattern, logs)))


def _prefix_of(logs: Mapping[str, Any]) -> str:
    """Returns the `metric_key_prefix` of an evaluation, also for other logs `"eval"`."""
    prefixes = [name for name, _ in _matching("(.+)_samples_per_second", logs)]
    return next((name for name in prefixes if name != "train" and not name.startswith("eval")), "eval")


def _matching(pattern: str, logs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    matches = [(re.fullmatch(pattern, name), value) for name, value in logs.items()]
    return [(match[1], value) for match, value in matches if match]


def _number(value: float | None) -> str:
    """Returns a number as a short text, such as `0.75`, or `3e-04` below 0.005; `-` for no number."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.2f}" if value == 0 or abs(value) >= 0.005 else f"{value:.0e}"


def _per_cent(share: float | None) -> str:
    """Returns a share as `evaluate` shows it, such as `75.0 %`; `-` for no number."""
    return "-" if share is None or math.isnan(share) else f"{100 * share:.1f} %"


def _duration(seconds: float) -> str:
    """Returns seconds or minutes, such as `"99 s"` and `"99 min"`, or hours for longer durations."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"
