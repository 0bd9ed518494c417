# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Accuracy and media contribution of the demos with and without views, when a quarter of the media are noise.

```bash
python benchmarks/views_study.py --task image
python benchmarks/views_study.py --task audio
python benchmarks/views_study.py --task video
```

Each method trains the demo's model for as many updates, once per seed. The accuracy is that of greedy decoding on the
held-out rows, none of which is noise; the contribution is the mean of the last quarter of the logged
`media/contribution`. The line of each run is printed as it ends, and the table of means at the end.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch
from measuring import command_line, count, markdown


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from demo import DEMO_ARGUMENTS, with_noise
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
MASKS = {"image": "mask_patches(patch_size=7)", "audio": "mask_audio", "video": "mask_patches(patch_size=7)"}
NOISES = {"image": "diffusion_noise", "audio": "noise", "video": "diffusion_noise"}


def methods(task: str) -> dict[str, dict]:
    """Options of each method."""
    mask = {"loss_view": MASKS[task]}
    found = {
        "GRPO": {},
        "PAPO": {**mask, "view_kl_coef": 0.01, "view_entropy_coefs": [0.03, 0.03]},
        "VPPO": {**mask, "dependency_quantile": 0.4, "dependency_advantage_min": 0.9},
        "NoisyRollout": {"rollout_view": NOISES[task], "rollout_view_schedule": "sigmoid"},
    }
    return found if task != "video" else {**found, "T-GRPO": {"contrast_view": "shuffle_frames"}}


def train(args: argparse.Namespace, options: dict, seed: int, folder: str) -> tuple[float, float]:
    """Accuracy and media contribution after a run."""
    build, data = TASKS[args.task]
    (model, processor), dataset = build(seed), data()
    config = MultimodalGRPOConfig(
        **{
            **DEMO_ARGUMENTS,
            "output_dir": folder,
            "max_steps": args.steps,
            "seed": seed,
            "use_cpu": not torch.cuda.is_available(),
            "media_contribution_steps": min(5, args.steps),
            **options,
        }
    )
    trainer = MultimodalGRPOTrainer(
        model=model,
        reward_funcs=[accuracy_reward, leading_answer_reward],
        args=config,
        train_dataset=with_noise(dataset["train"]),
        processing_class=processor,
    )
    trainer.train()
    evaluation = EvaluationConfig(max_completion_length=config.max_completion_length, batch_size=100)
    accuracy = evaluate_trainer(trainer, dataset["test"], accuracy_reward, evaluation).metrics["accuracy"]
    logged = [logs["media/contribution"] for logs in trainer.state.log_history if "media/contribution" in logs]
    return accuracy, fmean(logged[-max(1, len(logged) // 4) :])


def run(args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Accuracies and contributions of all runs, by method."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, options in methods(args.task).items():
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                found.setdefault(name, []).append(train(args, options, seed, folder))
            accuracy, contribution = found[name][-1]
            print(f"{args.task} {name} seed {seed}: {accuracy:.1%} {contribution:.2f} nats", flush=True)
    return found


def table(args: argparse.Namespace, found: dict[str, list[tuple[float, float]]]) -> str:
    """Means, with standard deviations over seeds."""

    def spread(values: list[float], form: str) -> str:
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
