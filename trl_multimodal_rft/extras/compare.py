# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
`trl-multimodal-rft compare`: a few steps of GRPO with TRL's trainer and with ours, on the user's model and rows.

Both trainers start from the same weights and read the same rows. Each samples, by the same random numbers. Both train
on the completions of the baseline, so that everything after sampling can be compared. The baseline is TRL's trainer,
or for rows that TRL can't train on our trainer with padded rows, which shares no prompt.

A third run measures rounding: it is the baseline once more, with the inputs of the decoder and of encoders rounded up
or down at random, as the self-check does. A difference counts if it is larger than
[`~checks.rounding.NOISE_FACTOR`] times that of rounding, plus the constant of the dtype.
"""

import argparse
import gc
import importlib.metadata
import io
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset, Image, List, Value
from torch import nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

from ..checks.rounding import NOISE_FACTOR, exceeds_rounding, noise_of, perturbed_inputs, tolerance_of
from ..cli.check import RowChecker, read_inputs
from ..data.reading.refs import iter_refs
from ..data.reading.rules import BUDGET_NAMES
from ..data.rows.names import MEDIA_COLUMNS
from ..encoding.prompts import EncodedPrompt, placeholder_token_ids
from ..engines.samplers import Sampler
from ..models.modes import fix_batch_norms
from ..models.pretrained import load_model
from ..progress import announce
from ..reporting.console import CompactLogCallback
from ..reporting.events import EventPart
from ..rollout.rollout import TRLInputs
from ..trainers.grpo.config import MultimodalGRPOConfig
from ..trainers.grpo.trainer import MultimodalGRPOTrainer


MIB = 2**20
_SEED = 0
_PADDED = "padded rows"
# Options of ours that change what a model gets of a row
_CHANGES_INPUT = (*BUDGET_NAMES, "ignored_media_columns")
NOTHING_COMPARED = 3  # exit status
_OF_MEDIA = {*MEDIA_COLUMNS, "path", "url"}  # keys of rows and of blocks of messages
_PATH_MAX = 1000  # characters; a longer text is no path, such as a `data:` URL


# Records of a run


@dataclass
class Step:
    """What a trainer computed in a step. Completions are in the order in which they were sampled."""

    sampled: list[list[int]]  # completions that the trainer itself sampled
    completions: list[list[int]] = field(default_factory=list)  # completions that it trained on
    logps: list[torch.Tensor | None] = field(default_factory=list)  # of each completion, `None` if it wasn't scored
    loss: float = 0.0
    sampling_seconds: float = 0.0
    seconds: float = 0.0


@dataclass
class Run:
    """Records of a trainer's run, and the weights after it."""

    steps: list[Step] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    memory: int = 0  # bytes: peak above weights on a GPU, saved for the backward pass of the first step on a CPU
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # after the steps, on the CPU


@dataclass
class Watch(TrainerCallback):
    """Records the steps of a trainer, and replaces its completions by those of an earlier run."""

    earlier: Run | None = None
    counts_saved: bool = False  # whether `saved` gets the bytes that the first step saves for its backward pass
    saved: list[int] = field(default_factory=list)
    run: Run = field(default_factory=Run)
    began: float = 0.0

    def sample(self, step: int, draw: Callable[[], list[list[int]]]) -> list[list[int]]:
        """Records what `draw` samples in a step, and returns the completions to train on."""
        torch.manual_seed(_SEED + step)
        start = _now()
        ids = draw()
        self.run.steps.append(Step(ids, sampling_seconds=_now() - start))
        return ids if self.earlier is None else self.earlier.steps[step].sampled

    def note(self, loss: torch.Tensor, ids: torch.Tensor, logps: torch.Tensor, counts: torch.Tensor) -> None:
        """Records the loss, and ids and log-probabilities `(B, T)` where `counts` is 1."""
        step = self.run.steps[-1]
        step.loss = loss.item()
        for row, row_logps, is_counted in zip(ids, logps.detach(), counts.bool(), strict=True):
            step.completions.append(row[is_counted].tolist())
            step.logps.append(row_logps[is_counted].float().cpu())

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart
    ):
        self.began = _now()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        now = _now()
        self.run.steps[-1].seconds = now - self.began
        self.began = now


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def saved_bytes(model: nn.Module, into: list[int]) -> Iterator[None]:
    """Appends the bytes that are saved for backward passes, with each storage counted once and without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # The graph keeps the tensor, so its address stays unique until the backward pass
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
    into.append(sum(saved.values()))


class Watched(GRPOTrainer):
    """Trainer whose `watch` records its steps."""

    watch: Watch

    def training_step(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not self.watch.counts_saved or self.watch.saved:
            return super().training_step(model, inputs, num_items_in_batch)
        with saved_bytes(model, self.watch.saved):
            return super().training_step(model, inputs, num_items_in_batch)


class WatchedTRL(Watched):
    """TRL's trainer, watched."""

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], None]:
        sample = super()._generate_single_turn
        return self.watch.sample(self.state.global_step, lambda: sample(prompt_ids, *args, **kwargs)[0]), None

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        ids = batch["completion_ids"]
        # TRL shuffles the batch, and this with it
        return {**batch, "sampling_order": torch.arange(len(ids), device=ids.device)}

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
        scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._latest_logps = scores[0]
        return scores

    def _compute_loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        order = inputs["sampling_order"].argsort()
        logps = self._latest_logps[order]
        self.watch.note(loss, inputs["completion_ids"][order], logps, inputs["completion_mask"][order])
        return loss


class WatchedOurs(Watched, MultimodalGRPOTrainer):
    """Our trainer, watched."""

    def _compute_loss(self, model: nn.Module, inputs: TRLInputs) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        rollout = inputs.rollout
        assert self._scores is not None
        self.watch.note(loss, rollout.completion_ids, self._scores.logps, rollout.completion_mask)
        # Completions with the advantage 0 aren't forwarded
        if rollout.scored_mask is not None:
            logps = self.watch.run.steps[-1].logps
            for i in (rollout.scored_mask.sum(1) == 0).nonzero().flatten().tolist():
                logps[i] = None
        return loss


class WatchedSampler:
    """Sampler that calls a trainer's sampler, watched."""

    samples_policy = False  # as completions may be replaced

    def __init__(self, sampler: Sampler, watch: Watch):
        self.sampler = sampler
        self.watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sampler"], name)

    def __call__(
        self, model: nn.Module, prompts: Sequence[EncodedPrompt], *, step: int, **options: Any
    ) -> tuple[list[list[int]], None]:
        return self.watch.sample(step, lambda: self.sampler(model, prompts, step=step, **options)[0]), None


# Runs


def reward(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """Returns rewards that need no solutions, and that differ between most completions."""
    return [float(sum(ids) % 17) for ids in completion_ids]


class Comparison:
    """Runs of the two trainers on the same rows; `folder` is for the trainers' files."""

    def __init__(
        self, args: argparse.Namespace, rows: Dataset, processor: ProcessorMixin | PreTrainedTokenizerBase, folder: str
    ):
        self.args = args
        self.rows = rows
        self.processor = processor
        self.folder = folder
        self.dtype = getattr(torch, args.dtype)

    def load(self) -> PreTrainedModel:
        """Loads the model as it is before training, with batch norms at their running statistics."""
        args = self.args
        model = load_model(
            args.model_name_or_path,
            dtype=self.dtype,
            revision=args.model_revision or "main",
            trust_remote_code=args.trust_remote_code,
        )
        # In training mode, statistics of a batch with little variance magnify rounding, which then hides differences
        fix_batch_norms(model.modules())
        return model

    def train(self, side: str, earlier: Run | None = None, *, rounds: bool = False) -> Run:
        """
        Trains and returns the records. `side` is `"TRL"`, `"padded rows"` or `"ours"`. Completions are those of the
        `earlier` run. With `rounds`, the inputs are rounded at random.
        """
        model = self.load()
        with warnings.catch_warnings(action="ignore"):
            trainer, watch = self._make_trainer(side, model, earlier)
        weights = 0
        on_gpu = trainer.accelerator.device.type == "cuda"
        if on_gpu:
            weights = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        watch.counts_saved = not on_gpu
        rounding = perturbed_inputs(model, self.dtype, _SEED) if rounds else nullcontext()
        with rounding, redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            trainer.train()
        run = watch.run
        run.memory = torch.cuda.max_memory_allocated() - weights if on_gpu else watch.saved[0]
        run.gradient_norms = [logs["grad_norm"] for logs in trainer.state.log_history if "grad_norm" in logs]
        run.weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
        del trainer, model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return run

    def _make_trainer(self, side: str, model: PreTrainedModel, earlier: Run | None) -> tuple[Watched, Watch]:
        args = self.args
        placeholders = placeholder_token_ids(model, self.processor).values()
        config_class: Callable[..., GRPOConfig] = GRPOConfig if side == "TRL" else MultimodalGRPOConfig
        our_options = {"self_check": False, "packing": "padded" if side == _PADDED else args.packing}
        chosen = {name: getattr(args, name) for name in (*_CHANGES_INPUT, "audio_overlong", "media_rules")}
        our_options |= {name: value for name, value in chosen.items() if value is not None}
        options = {} if side == "TRL" else our_options
        config = config_class(
            output_dir=str(Path(self.folder, side.replace(" ", "_"))),
            max_steps=args.steps,
            per_device_train_batch_size=args.per_device_train_batch_size,
            gradient_accumulation_steps=1,
            num_generations=args.num_generations,
            max_completion_length=args.max_completion_length,
            # TRL's trainer may sample the placeholder of a medium, which would then lack its medium
            generation_kwargs={"suppress_tokens": sorted(set().union(*placeholders))},
            gradient_checkpointing=args.gradient_checkpointing,
            learning_rate=args.learning_rate,
            # Without momentum, and without a division by the size of gradients, which would magnify rounding
            optim="sgd",
            lr_scheduler_type="constant",
            disable_dropout=True,
            shuffle_dataset=False,
            chat_template_kwargs=args.chat_template_kwargs or None,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            report_to=[],
            seed=_SEED,
            **options,
        )
        watch = Watch(earlier)
        trainer_class: Callable[..., Watched] = WatchedTRL if side == "TRL" else WatchedOurs
        trainer = trainer_class(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=self.rows,
            processing_class=self.processor,
            callbacks=[watch],
        )
        trainer.watch = watch
        if isinstance(trainer, WatchedOurs):
            trainer.sampler = cast("Sampler", WatchedSampler(trainer.sampler, watch))
            trainer.remove_callback(CompactLogCallback)
        return trainer, watch


# Findings


@dataclass
class Finding:
    """A quantity of both trainers."""

    name: str
    difference: float
    rounding: float  # the difference that rounding alone makes
    agrees: bool

    @property
    def line(self) -> str:
        """The finding as a row of the table."""
        verdict = "agree" if self.agrees else "DIFFER"
        return f"{self.name:36}{self.difference:>12.2g}{self.rounding:>12.2g}  {verdict}"


def _log_probabilities(runs: Sequence[Run]) -> torch.Tensor:
    """Returns `(R, N)` for the completions that all `R` runs scored."""
    rows: list[list[torch.Tensor]] = [[] for _ in runs]
    for steps in zip(*(run.steps for run in runs), strict=True):
        for logps in zip(*(step.logps for step in steps), strict=True):
            if all(completion_logps is not None for completion_logps in logps):
                for row, completion_logps in zip(rows, logps, strict=True):
                    row.append(completion_logps)
    return torch.stack([torch.cat(row) if row else torch.zeros(0) for row in rows])


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return sum((weight.double() - other[name].double()).square().sum().item() for name, weight in one.items()) ** 0.5


def relative_difference(
    before: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]
) -> float:
    """Returns the norm of the difference of two updates of weights, relative to the norm of the first."""
    difference = _distance(expected, actual)
    update = _distance(expected, before)
    return difference / update if update else float(difference > 0)


def lacks_comparison(before: dict[str, torch.Tensor], runs: Sequence[Run]) -> str | None:
    """Returns why the numbers of runs would agree whatever the trainers compute, or `None`."""
    if _log_probabilities(runs).numel() == 0:
        return "no completion was scored, as where all completions of a prompt are equal, and so their rewards"
    if all(_distance(run.weights, before) == 0 for run in runs):
        return "no weight moved, as where all advantages or all gradients are 0"
    return None


def findings(before: dict[str, torch.Tensor], runs: Sequence[Run], dtype: torch.dtype) -> list[Finding]:
    """Returns what the baseline, the baseline with other roundings, and our trainer have in common, and what not."""
    baseline, rounded, ours = runs
    constant = tolerance_of(dtype)
    results = []

    def n_unequal(run: Run) -> int:
        n = 0
        for one, other in zip(baseline.steps, run.steps, strict=True):
            n += sum(a != b for a, b in zip(one.sampled, other.sampled, strict=True))
        return n

    # A token midway between two others may fall to either, and a completion after it is another
    n_rounded = n_unequal(rounded)
    results.append(
        Finding("unequal sampled completions", n_unequal(ours), n_rounded, n_unequal(ours) <= 1 + 2 * n_rounded)
    )
    logps = _log_probabilities(runs)
    differences = (logps[1:] - logps[0]).abs()
    by_rounding = differences[0].max().item()
    agrees = not (exceeds_rounding(differences[1], noise_of(logps[:2]), constant) or differences.isnan().any())
    results.append(Finding("log-probability of a token, largest", differences[1].max().item(), by_rounding, agrees))

    def compare(name: str, difference: float, rounding: float) -> None:
        results.append(Finding(name, difference, rounding, difference <= constant + NOISE_FACTOR * rounding))

    def largest(values: Callable[[Run], list[float]], other: Run, relative: bool) -> float:
        expected = torch.tensor(values(baseline), dtype=torch.float64)
        differences = (expected - torch.tensor(values(other), dtype=torch.float64)).abs()
        # Unlike Python's, torch's maximum is NaN where any number is
        return (differences / expected.abs().clamp(min=1e-30) if relative else differences).max().item()

    def losses(run: Run) -> list[float]:
        return [step.loss for step in run.steps]

    def norms(run: Run) -> list[float]:
        return run.gradient_norms

    compare("loss of a step, largest", largest(losses, ours, False), largest(losses, rounded, False))
    compare("norm of a gradient, largest share", largest(norms, ours, True), largest(norms, rounded, True))
    updates = [relative_difference(before, baseline.weights, other.weights) for other in (ours, rounded)]
    compare(f"weights, share of {len(ours.steps)} updates", *updates)
    return results


def costs(baseline: Run, ours: Run, name: str, device: str) -> list[str]:
    """Returns lines with seconds and memory of both trainers. The first step, in which caches fill, doesn't count."""
    kind = "peak above the weights" if device == "cuda" else "saved for backward"

    def fastest(run: Run, quantity: str) -> float:
        return min(getattr(step, quantity) for step in run.steps[1:] or run.steps)

    lines = [f"{'':36}{name:>12}{'ours':>12}{'ratio':>9}"]
    for label, quantity in (("seconds of a step", "seconds"), ("  of these for sampling", "sampling_seconds")):
        a = fastest(baseline, quantity)
        b = fastest(ours, quantity)
        lines.append(f"{label:36}{a:>12.3f}{b:>12.3f}{a / b:>8.2f}x")
    sizes = [run.memory / MIB for run in (baseline, ours)]
    lines.append(f"{f'MiB, {kind}':36}{sizes[0]:>12.0f}{sizes[1]:>12.0f}{sizes[0] / sizes[1]:>8.2f}x")
    return lines


# The command


def _first_rows(
    rows: Any, args: argparse.Namespace, model: PreTrainedModel, processor: ProcessorMixin | PreTrainedTokenizerBase
) -> Dataset:
    """Returns the rows of the steps. Raises a `ValueError` about the first that would not train, as `check` does."""
    n_rows = args.steps * max(args.per_device_train_batch_size // args.num_generations, 1)
    chosen = rows.select(range(min(n_rows, len(rows))))
    checker = RowChecker(chosen, model, processor, args)
    for index in range(len(chosen)):
        checked = checker[index]
        if checked.error is not None:
            column = f" in column '{checked.error_column}'" if checked.error_column else ""
            raise ValueError(f"row {index} of {args.dataset_name!r} would not train{column}: {checked.error}")
    if args.media_dir is not None:  # TRL has no such option
        chosen = Dataset.from_list([_from_folder(row, args.media_dir) for row in chosen])
    # TRL takes no plain text beside images
    if any(column in MEDIA_COLUMNS for column in chosen.column_names):
        chosen = chosen.map(lambda row: {"prompt": _as_messages(row["prompt"])})
    # TRL leaves the decoding of files to the processor, which needs a torchvision with decoders
    text = Value("string")
    for column, names, images in (("image", text, Image()), ("images", List(text), List(Image()))):
        if chosen.features.get(column) == names:
            chosen = chosen.cast_column(column, images)
    return chosen


def _as_messages(prompt: str | list) -> list:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _from_folder(value: Any, folder: str, is_media: bool = False) -> Any:
    """Returns a row, or a value of it, with names of media files in a folder as absolute paths. Texts stay."""
    if isinstance(value, dict):
        return {key: _from_folder(item, folder, is_media or key in _OF_MEDIA) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_folder(item, folder, is_media) for item in value]
    path = Path(folder, value).absolute() if is_media and isinstance(value, str) and len(value) < _PATH_MAX else None
    return str(path) if path is not None and path.is_file() else value


def _reads_only_images(rows: Dataset) -> bool:
    for index in range(len(rows)):
        row = rows[index]
        if any(row.get(column) is not None for column, modality in MEDIA_COLUMNS.items() if modality != "image"):
            return False
        if any(ref.modality != "image" for ref in iter_refs(row["prompt"])):
            return False
    return True


def _trl_obstacle(rows: Dataset, args: argparse.Namespace) -> str | None:
    options = [f"`--{name}`" for name in _CHANGES_INPUT if getattr(args, name)]
    if options:
        return f"TRL's trainer has no {', '.join(options)}"
    return None if _reads_only_images(rows) else "TRL's trainer takes no audio and no video"


def run(args: argparse.Namespace) -> None:
    """
    Compares the trainers and prints a table. Exits with status 1 if they differ by more than rounding, and with
    [`NOTHING_COMPARED`] if they agree because nothing trained, or if TRL's trainer didn't run.
    """
    if args.steps < 1:
        raise ValueError(f"`--steps` must be at least 1, got {args.steps}.")
    rows, model, processor = read_inputs(args)
    rows = _first_rows(rows, args, model, processor)
    obstacle = _trl_obstacle(rows, args)
    name = "TRL" if obstacle is None else _PADDED
    notes = []
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(args, rows, processor, folder)
        before = {key: weight.detach().cpu() for key, weight in comparison.load().named_parameters()}
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            notes.append("Batch norms keep their running statistics in all runs.")
        announce(f"training with {name}")
        try:
            baseline = comparison.train(name)
        except Exception as error:
            if name == _PADDED:
                raise
            reason = " ".join(str(error).split())[:200]
            obstacle = f"TRL's trainer fails ({type(error).__name__}: {reason})"
            name = _PADDED
            baseline = comparison.train(name)
        announce("measuring the rounding")
        rounded = comparison.train(name, baseline, rounds=True)
        announce("training with ours")
        ours = comparison.train("ours", baseline)
    if obstacle is not None:
        notes.append(f"{obstacle}: the baseline is ours with padded rows.")
    reason = lacks_comparison(before, (baseline, rounded, ours))
    if reason is not None:
        print(*notes, f"Nothing was compared: {reason}.", sep="\n")
        raise SystemExit(NOTHING_COMPARED)
    if [step.completions for step in ours.steps] != [step.completions for step in baseline.steps]:
        raise RuntimeError("The trainers trained on other completions than those that the baseline sampled.")
    results = findings(before, (baseline, rounded, ours), comparison.dtype)
    tokens = []
    for step in baseline.steps:
        tokens += map(len, step.completions)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    version = importlib.metadata.version("trl") if name == "TRL" else ""
    size = f"{args.steps} steps of {args.per_device_train_batch_size} completions"
    print(f"{args.model_name_or_path} on {args.dataset_name}: {args.dtype}, {device},")
    print(f"{size} of {min(tokens)} to {max(tokens)} tokens, {name} {version}".rstrip())
    print(*notes, sep="\n", end="\n" * bool(notes))
    print(f"\n{'':36}{'difference':>12}{'rounding':>12}")
    print(*(finding.line for finding in results), "", *costs(baseline, ours, name, device), sep="\n")
    differing = [finding.name for finding in results if not finding.agrees]
    if differing:
        print(f"\nThe trainers DIFFER by more than rounding: {'; '.join(differing)}.")
        if name == "TRL" and args.packing != "padded":
            print(
                "With `--packing padded`, ours trains without sharing prompts, which tells whether that is the cause."
            )
        raise SystemExit(1)
    if obstacle is not None:
        print("\nOurs with and without shared prompts agree within rounding. Nothing was compared with TRL's trainer.")
        raise SystemExit(NOTHING_COMPARED)
    print("\nThe trainers agree within rounding.")
