# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Accuracy on noisy digits of a student of a teacher that sees clean ones, and of GRPO on the noisy digits alone, in the
same CPU time.

```bash
python benchmarks/distillation_study.py
```

Both start from the same random weights. GRPO ends with the first update after as many CPU seconds as distillation
took, without those of teaching the teacher. The accuracy is that of greedy decoding on the held-out rows with the same
noise.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch
from measuring import command_line, count, markdown
from transformers import TrainerCallback


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from demo import DEMO_ARGUMENTS, seen
from distillation_vision import DEMO, NOISE, taught
from small_models import digit_model
from tasks import handwritten_digits, leading_answer_reward

from trl_multimodal_rft import (
    MultimodalDistillationConfig,
    MultimodalDistillationTrainer,
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
)
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate_trainer
from trl_multimodal_rft.rewards import accuracy_reward


class CPUBudget(TrainerCallback):
    """Ends a run after a number of CPU seconds."""

    def __init__(self, seconds: float):
        self.end = time.process_time() + seconds

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = time.process_time() >= self.end


def measured(trainer, test, seconds: float | None = None) -> tuple[float, float, int]:
    """Accuracy after training, CPU seconds of it and updates."""
    start = time.process_time()
    if seconds is not None:
        trainer.add_callback(CPUBudget(seconds))
    trainer.train()
    spent = time.process_time() - start
    evaluation = EvaluationConfig(max_completion_length=trainer.max_completion_length, batch_size=100)
    accuracy = evaluate_trainer(trainer, test, accuracy_reward, evaluation).metrics["accuracy"]
    return accuracy, spent, trainer.state.global_step


def compare(args: argparse.Namespace, seed: int, folder: str) -> dict[str, tuple[float, float, int]]:
    """Accuracy, CPU seconds and updates of both, from the same weights."""
    dataset = handwritten_digits()
    common = {"seed": seed, "use_cpu": not torch.cuda.is_available()}
    noisy = {split: seen(rows, NOISE) for split, rows in dataset.items()}
    config = MultimodalDistillationConfig(**{**DEMO, **common, "max_steps": args.steps, "output_dir": folder})
    teacher, processor = taught(dataset, config)
    student = digit_model(seed)[0]
    objects = {"args": config, "train_dataset": dataset["train"], "processing_class": processor}
    distilled = measured(MultimodalDistillationTrainer(student, teacher, **objects), noisy["test"])
    config = MultimodalGRPOConfig(**{**DEMO_ARGUMENTS, **common, "max_steps": 10_000, "output_dir": folder})
    objects = {"args": config, "train_dataset": noisy["train"], "processing_class": processor}
    rewards = [accuracy_reward, leading_answer_reward]
    alone = MultimodalGRPOTrainer(digit_model(seed)[0], rewards, **objects)
    return {"distillation": distilled, "GRPO": measured(alone, noisy["test"], distilled[1])}


def run(args: argparse.Namespace) -> dict[str, list[tuple[float, float, int]]]:
    """Accuracies, CPU seconds and updates of all runs."""
    found: dict[str, list[tuple[float, float, int]]] = {}
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            for name, each in compare(args, seed, folder).items():
                found.setdefault(name, []).append(each)
                print(f"{name} seed {seed}: {each[0]:.1%}, {each[1]:.0f} s, {each[2]} updates", flush=True)
    return found


def table(found: dict[str, list[tuple[float, float, int]]]) -> str:
    """Means, with standard deviations of the accuracy over seeds."""
    rows = []
    for name, runs in found.items():
        accuracies, seconds, updates = (list(each) for each in zip(*runs, strict=True))
        spread = f" ± {stdev(accuracies):.1%}" if len(runs) > 1 else ""
        rows.append((name, f"{fmean(accuracies):.1%}{spread}", f"{fmean(seconds):.0f} s", f"{fmean(updates):.0f}"))
    return markdown(("method", "accuracy", "CPU time", "updates"), rows)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options of the study."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=count, default=100, help="updates of distillation")
    parser.add_argument("--seeds", type=count, default=3, help="runs of each")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, list[tuple[float, float, int]]]:
    """Runs the study from the command line, and returns the result of [`run`]."""
    found = run(parse(argv))
    print(table(found))
    return found


if __name__ == "__main__":
    main()
