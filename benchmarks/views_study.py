# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Accuracy and media contribution of the demos with and without views, when a quarter of the media are noise.

```bash
python benchmarks/views_study.py --task image
python benchmarks/views_study.py --task audio
python benchmarks/views_study.py --task video
```

Each seed has one cold start of the demo's model on some answers, from which each method trains for as many updates.
The accuracy is that of greedy decoding on the held-out rows, none of which is noise. The contribution is the mean of
the last quarter of the logged `media/contribution`. A line is printed after each run, and the table of means at the
end.
"""

import argparse
import copy
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch
from datasets import Dataset
from measuring import command_line, count, markdown


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from demo import DEMO_ARGUMENTS, cold_start, with_noise
from small_models import digit_model, motion_model, spoken_digit_model
from tasks import handwritten_digits, leading_answer_reward, moving_digits, spoken_digits

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate_trainer
from trl_multimodal_rft.rewards import accuracy_reward


TASKS = {
    "image": (digit_model, handwritten_digits),
    "audio": (spoken_digit_model, spoken_digits),
    "video": (motion_model, moving_digits),
}
MASKS = {"image": "mask_patches(patch_size=7, ", "audio": "mask_audio(", "video": "mask_patches(patch_size=7, "}
NOISES = {"image": "diffusion_noise", "audio": "noise", "video": "diffusion_noise"}


def methods(task: str) -> dict[str, dict]:
    """Options of each method."""
    found = {
        "GRPO": {},
        "PAPO": {"loss_view": f"{MASKS[task]}kl_coef=0.01, entropy_coefs=[0.03, 0.03])"},
        "VPPO": {"loss_view": f"{MASKS[task]}token_quantile=0.4, advantage_min=0.9)"},
        "NoisyRollout": {"rollout_view": f"{NOISES[task]}(schedule='sigmoid')"},
    }
    return found if task != "video" else {**found, "T-GRPO": {"contrast_view": "shuffle_frames"}}


def measured(trainer: MultimodalGRPOTrainer, test: Dataset) -> float:
    """Accuracy on held-out rows."""
    config = EvaluationConfig(max_completion_length=trainer.max_completion_length, batch_size=100)
    return evaluate_trainer(trainer, test, accuracy_reward, config).metrics["accuracy"]


def run_seed(args: argparse.Namespace, seed: int, folder: str) -> Iterator[tuple[str, float, float]]:
    """Name, accuracy and media contribution of the cold start, which has none, and of each method after it."""
    build, data = TASKS[args.task]
    (model, processor) = build(seed)
    dataset = data()
    common = {**DEMO_ARGUMENTS, "output_dir": folder, "seed": seed, "use_cpu": not torch.cuda.is_available()}
    common |= {"per_device_train_batch_size": 256, "learning_rate": 5e-4, "max_steps": args.steps}
    common["entropy_coef"] = 0.0  # the bonus of the demos, which start from random weights, undoes a cold start
    common["media_contribution_steps"] = min(5, args.steps)
    objects = {
        "reward_funcs": [accuracy_reward, leading_answer_reward],
        "train_dataset": with_noise(dataset["train"]),
        "processing_class": processor,
    }
    answers = dataset["train"].select(range(400)).rename_column("solution", "completion")
    cold_start(model, processor, answers, MultimodalGRPOConfig(**common), max_steps=args.cold_steps)
    for name, options in {"cold start": {}, **methods(args.task)}.items():
        trainer = MultimodalGRPOTrainer(copy.deepcopy(model), args=MultimodalGRPOConfig(**common | options), **objects)
        if name != "cold start":
            trainer.train()
        history = trainer.state.log_history
        logged = [logs["media/contribution"] for logs in history if "media/contribution" in logs]
        late = logged[-max(1, len(logged) // 4) :]
        yield name, measured(trainer, dataset["test"]), fmean(late) if late else math.nan


def run(args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Accuracies and contributions of all runs, by method."""
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            for name, *each in run_seed(args, seed, folder):
                found.setdefault(name, []).append((each[0], each[1]))
                print(f"{args.task} {name} seed {seed}: {each[0]:.1%} {each[1]:.2f} nats", flush=True)
    return found


def table(args: argparse.Namespace, found: dict[str, list[tuple[float, float]]]) -> str:
    """Means, with standard deviations over seeds."""

    def spread(values: list[float], form: str) -> str:
        if math.isnan(values[0]):
            return ""
        return f"{fmean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")

    rows = []
    for name, runs in found.items():
        accuracies, contributions = (list(each) for each in zip(*runs, strict=True))
        rows.append((name, spread(accuracies, ".1%"), spread(contributions, ".2f")))
    head = f"{args.task}: {args.steps} updates, {args.seeds} seeds, a quarter of the media are noise"
    return f"{head}\n\n{markdown(('method', 'accuracy', '`media/contribution`, nats'), rows)}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options of the study."""
    parser = command_line(__doc__)
    parser.add_argument("--task", choices=TASKS, default="image", help="demo")
    parser.add_argument("--steps", type=count, default=100, help="updates of a run")
    parser.add_argument("--cold_steps", type=count, default=40, help="updates of the cold start")
    parser.add_argument("--seeds", type=count, default=3, help="runs of a method")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, list[tuple[float, float]]]:
    """Runs the study from the command line, and returns the result of [`run`]."""
    args = parse(argv)
    found = run(args)
    print(table(args, found))
    return found


if __name__ == "__main__":
    main()
