# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Updates of a pretrained model that sees by `trl.GRPOTrainer` and by `MultimodalGRPOTrainer`: `real_curves.py --sight`.

Both trainers get the same folder, rows, options and seed, and train the projector in float32 while tower and language
model are frozen. They begin with a model after a cold start by SFT on answers of one word, which the first run trains.
A run stores its rewards, KL divergences and checksums of tokens after each update, and the trained weights after the
first and the last one.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from measuring import conditions, markdown
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.models.modes import fix_batch_norms
from trl_multimodal_rft.rewards import accuracy_reward


ROOT = Path(__file__).resolve().parents[1]
sys.path.extend(str(ROOT / folder) for folder in ("examples", "docs"))

from demo import cold_start  # noqa: E402
from draw_images import as_svg  # noqa: E402
from pretrained import is_complete, save_release  # noqa: E402
from reproduced import commit  # noqa: E402
from sight_tasks import pictured_shapes  # noqa: E402
from vision_model import vision_model  # noqa: E402


STORED = ROOT / "benchmarks" / "sight_curves"  # JSON of each run
OUTPUTS = ROOT / "outputs" / "sight_curves"  # models and weights
TRL = "trl"
TRL_AS_IS = "trl_as_is"
OURS = "ours"
LABELS = {
    TRL: "TRL, tower in evaluation mode",
    TRL_AS_IS: "TRL as it is: batch norms in training mode",
    OURS: "ours",
}
UPDATES = {TRL: 40, TRL_AS_IS: 15, OURS: 40}
OPTIONS = {
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 4,
    "learning_rate": 5e-4,
    "lr_scheduler_type": "constant",
    "beta": 0.01,
    "temperature": 1.0,
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "model_init_kwargs": {"dtype": "float32"},
}
FROZEN = ["vision_tower", "language_model", "lm_head"]
# TRL's order of rows, and the frozen parts, which TRL has no option for
OWN = {"packing_shuffle": True, "self_check": False, "freeze": FROZEN}
TRAINED = "multi_modal_projector"
# Arguments of SFT
COLD_START = {
    "max_steps": 40,
    "batch_size": 16,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "freeze": FROZEN,
}
WINDOW = 10  # updates of a mean


class Records(TrainerCallback):
    """
    Stores what a run has computed after each update.

    Args:
        path (`Path`):
            JSON file to write to.
        header (`dict`):
            Conditions of the run.
        tokens (`list`):
            Checksums of the completions of each update, which the reward function appends.
    """

    def __init__(self, path: Path, header: dict, tokens: list[list[str]]):
        self.path = path
        self.header = header
        self.tokens = tokens
        self.weights: dict[str, torch.Tensor] = {}
        self.start: dict[str, float] = {}

    def _keep(self, moment: str, model: PreTrainedModel) -> None:
        named = model.named_parameters()
        self.weights |= {f"{moment}/{name}": p.detach().clone() for name, p in named if p.requires_grad}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._keep("before", model)
        self.start = {"wall_s": time.time(), "cpu_s": time.process_time()}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            self._keep("first", model)
            save_file(self.weights, OUTPUTS / f"{self.path.stem}.safetensors")
        if state.global_step == state.max_steps:
            self._keep("last", model)
            save_file(self.weights, OUTPUTS / f"{self.path.stem}.safetensors")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" not in logs:
            return
        history = [entry for entry in state.log_history if "reward" in entry]
        curves = {name: [entry[name] for entry in history] for name in ("reward", "kl", "loss", "grad_norm")}
        seconds = {"wall_s": time.time() - self.start["wall_s"], "cpu_s": time.process_time() - self.start["cpu_s"]}
        self.path.write_text(json.dumps({**self.header, **seconds, **curves, "tokens": self.tokens}) + "\n")


def cold_started() -> str:
    """Returns the folder of a model after a cold start on answers of one word. A later call returns at once."""
    folder = OUTPUTS / "cold_start"
    if not is_complete(folder):
        release = vision_model()
        model = AutoModelForImageTextToText.from_pretrained(release)
        processor = AutoProcessor.from_pretrained(release)
        rows = pictured_shapes()["train"].select_columns(["prompt", "image", "solution"])
        args = TrainingArguments(str(OUTPUTS), bf16=False, use_cpu=True)  # seed 42
        cold_start(model, processor, rows.rename_column("solution", "completion"), args, **COLD_START)
        save_release(folder, processor, model)
    return str(folder)


def train(args: argparse.Namespace, run: str) -> None:
    """Trains by one of [`LABELS`], and stores what comes of it."""
    checksums = []

    def is_right(completions, completion_ids, solution, **_) -> list[float]:
        tokens = [[*map(int, each)] for each in completion_ids]
        checksums.append([hashlib.sha256(repr(each).encode()).hexdigest()[:8] for each in tokens])
        return accuracy_reward(completions, solution)

    trainer_class = GRPOTrainer
    config_class = GRPOConfig
    own = {}
    if run == OURS:
        trainer_class = MultimodalGRPOTrainer
        config_class = MultimodalGRPOConfig
        own = OWN
    rows = pictured_shapes(train_rows=400, test_rows=4, seed=1)["train"]
    header = {"commit": commit(), **conditions(args, "trl", "transformers")}
    header["setting"] = {"run": run, "seed": args.seed, "threads": torch.get_num_threads(), **OPTIONS}
    STORED.mkdir(exist_ok=True)
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    records = Records(STORED / f"{run}_{args.seed}.json", header, checksums)
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(folder, seed=args.seed, max_steps=UPDATES[run], **OPTIONS, **own)
        trainer = trainer_class(cold_started(), is_right, config, rows, callbacks=[records])
        if run != OURS:
            for name, parameter in trainer.model.named_parameters():
                parameter.requires_grad_(TRAINED in name)
        if run == TRL:
            fix_batch_norms(trainer.model.model.vision_tower.modules())
        trainer.train()


def compare() -> str:
    """Returns differences between stored runs as a table: of TRL's from ours, and of our seeds from each other."""
    runs = {path.stem: json.loads(path.read_text()) for path in sorted(STORED.glob("*.json"))}
    seeds = [name for name in runs if name.startswith(OURS)]
    pairs = [(f"{side}_0", f"{OURS}_0") for side in (TRL, TRL_AS_IS)] + [*combinations(seeds, 2)]
    header = ["runs", "updates", "same tokens", f"mean reward of {WINDOW}", "KL", "first update", "all updates"]
    rows = [_differences(one, other, runs) for one, other in pairs if one in runs and other in runs]
    lines = [markdown(header, rows), ""]
    for name, found in runs.items():
        n = len(found["reward"])
        means = [f"{fmean(part):.3f}" for part in (found["reward"][:WINDOW], found["reward"][-WINDOW:])]
        cost = f"{found['cpu_s']:.0f} CPU s ({found['cpu_s'] / n:.1f} an update)"
        lines.append(f"{name}: {n} updates, mean reward {' -> '.join(means)}; {cost}; commit {found['commit'][:8]}")
    return "\n".join(lines)


def _differences(one: str, other: str, runs: dict[str, dict]) -> list[str]:
    """A row of the table, over the updates that both runs have."""
    first = runs[one]
    second = runs[other]
    n = min(len(first["reward"]), len(second["reward"]))
    reward = _means(first["reward"][:n]) - _means(second["reward"][:n])
    kl = pd.Series(first["kl"][:n]) - pd.Series(second["kl"][:n])
    same = _same_updates(first["tokens"], second["tokens"])
    weights = [_of_weights(one, other, moment) for moment in ("first", "last")]
    return [f"{one}, {other}", str(n), str(same), f"{reward.abs().max():.3f}", f"{kl.abs().max():.0e}", *weights]


def _same_updates(one: list, other: list) -> int:
    """Returns the number of first updates whose completions are all the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _means(rewards: list[float]) -> pd.Series:
    return pd.Series(rewards).rolling(WINDOW).mean()


def _of_weights(one: str, other: str, moment: str) -> str:
    """The norm of the difference of both runs' weights, relative to the change that the first run made to them."""
    paths = [OUTPUTS / f"{name}.safetensors" for name in (one, other)]
    if not all(path.exists() for path in paths):
        return ""
    theirs, ours = (load_file(path) for path in paths)
    if not all(any(name.startswith(moment) for name in weights) for weights in (theirs, ours)):
        return ""

    def vector(weights: dict[str, torch.Tensor], moment: str) -> torch.Tensor:
        return torch.cat([p.flatten() for name, p in sorted(weights.items()) if name.startswith(moment)]).double()

    change = vector(theirs, moment) - vector(theirs, "before")
    return f"{(vector(ours, moment) - vector(theirs, moment)).norm() / change.norm():.1e}"


def figure() -> Figure:
    """Mean rewards and KL divergences of TRL's runs, and of ours with the range of their seeds."""
    drawn = Figure(figsize=(8, 3), layout="constrained")
    axes = drawn.subplots(1, 2)
    for axis, quantity in zip(axes, ("reward", "kl"), strict=True):
        _draw(axis, quantity)
    axes[0].set(xlabel="update", ylabel=f"reward, mean of {WINDOW} updates")
    axes[1].set(xlabel="update", ylabel="KL divergence")
    drawn.legend(handles=axes[0].get_lines(), loc="outside lower center", ncols=3, edgecolor="none", framealpha=0)
    return drawn


def _draw(axis: Axes, quantity: str) -> None:
    found = {}
    for path in sorted(STORED.glob("*.json")):
        values = pd.Series(json.loads(path.read_text())[quantity])
        values.index += 1
        found[path.stem] = values.rolling(WINDOW, min_periods=1).mean() if quantity == "reward" else values
    seeds = pd.DataFrame({name: values for name, values in found.items() if name.startswith(OURS)})
    axis.fill_between(seeds.index, seeds.min(axis=1), seeds.max(axis=1), color="C1", alpha=0.25, linewidth=0)
    for name, color, style in ((TRL, "C0", "-"), (TRL_AS_IS, "C3", ":"), (OURS, "C1", "--")):
        if f"{name}_0" in found:
            axis.plot(found[f"{name}_0"], style, color=color, label=LABELS[name])


def run(args: argparse.Namespace) -> dict:
    """Trains the runs that `args` names, and draws the figure if it has a path."""
    for each in args.runs or ():
        train(args, each)
    if args.figure:
        args.figure.write_text(as_svg(figure))
    return {"table": compare()}
