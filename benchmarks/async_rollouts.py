# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Step times of asynchronous rollouts beside their bound by arithmetic, and what staleness costs in accuracy.

```bash
python tests/shims/vllm_cpu.py benchmarks/async_rollouts.py              # step times
python tests/shims/vllm_cpu.py benchmarks/async_rollouts.py --accuracy   # on an engine on the CPU
```

Both train the demo's model on spoken digits, in the environment of `make test-vllm`.

**Step times** are those of a trainer and of a server without an engine (`tests/helpers/fake_server.py`), in a process
of its own. Completions take a random time of a bounded Pareto distribution, in units of its mean: the shortest 0.29,
the longest 8. The server runs `slots` of them at the same time. Each update takes `update` units, in which the trainer
sleeps, and its computation on top. The bound is the time that the same completions and updates would take if nothing
else took any: the server gets a generation batch as soon as it may by the staleness, and an update starts as soon as
its completions and the update before are over.

**Accuracies** are those of greedy decoding on the held-out rows after the same number of updates, with vLLM's own
server, of runs with the same seeds.
"""

import argparse
import heapq
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch
from measuring import command_line, conditions, count, markdown, parse_options, report
from transformers import TrainerCallback


sys.path.extend(
    str(Path(__file__).resolve().parents[1] / each) for each in ("examples", "tests", "tests/engines/vllm")
)

from demo import DEMO_ARGUMENTS, saved
from grpo_audio import DEMO
from helpers.fake_server import LENGTH, fake_servers, latency
from serving import serve
from small_models import spoken_digit_model
from tasks import DIGITS, leading_answer_reward, spoken_digits

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate_trainer
from trl_multimodal_rft.rewards import accuracy_reward


# Quantiles of Student's t distribution for 95 % intervals, by the degrees of freedom
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
# On a CPU, vLLM can't prefill a part of a prompt whose request has a seed
LIMITS = ["--max-model-len", "128", "--max-num-seqs", "256", "--max-num-batched-tokens", "65536"]


def bound(staleness: int, steps: int, completions: int, slots: int, update: float) -> float:
    """Mean time of a step in units, if nothing but completions and updates took any."""
    # when each slot is free, and when each generation batch is over
    free = [0.0] * slots
    over = []
    now = 0.0
    for step in range(steps):
        while len(over) < min(step + staleness + 1, steps):
            ends = []
            for number in range(len(over) * completions, (len(over) + 1) * completions):
                ends.append(max(now, heapq.heappop(free)) + latency(number))
                heapq.heappush(free, ends[-1])
            over.append(max(ends))
        now = max(now, over[step]) + update
    return now / steps


class Updates(TrainerCallback):
    """Lets each update take some seconds longer, and measures the whole training."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.start = 0.0
        self.end = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(self.seconds)
        self.end = time.perf_counter()


def trainer_of(staleness: int, url: str, folder: str, seed: int, **options) -> MultimodalGRPOTrainer:
    """The demo's trainer, which samples from a server."""
    arguments = {**DEMO_ARGUMENTS, "output_dir": folder, "use_cpu": not torch.cuda.is_available(), "seed": seed}
    arguments |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "max_staleness": staleness}
    model, processor = spoken_digit_model(seed)
    return MultimodalGRPOTrainer(
        model=saved(model, processor, Path(folder, "model")),
        reward_funcs=[accuracy_reward, leading_answer_reward],
        args=MultimodalGRPOConfig(**{**arguments, **options}),
        train_dataset=spoken_digits()["train"],
        processing_class=processor,
    )


# Step times


def run_steps(args: argparse.Namespace) -> dict:
    """Seconds of a step with each staleness, its bound and their ratio."""
    result = {}
    completions = args.prompts * args.group
    for staleness in args.staleness:
        with tempfile.TemporaryDirectory() as folder:
            model, processor = spoken_digit_model()
            served = Path(saved(model, processor, Path(folder, "served")))
            words = sum(processor.tokenizer([*DIGITS])["input_ids"], [])
            with fake_servers(served, [0], unit=args.unit, slots=args.slots, words=words) as [server]:
                options = {"per_device_train_batch_size": completions, "num_generations": args.group}
                options |= {"max_completion_length": LENGTH, "max_steps": args.steps, "self_check": False}
                trainer = trainer_of(staleness, server.url, folder, args.seed, **options)
                watch = Updates(args.update * args.unit)
                trainer.add_callback(watch)
                trainer.train()
                counters = server.counters
        if counters["completions"] != args.steps * completions or counters["torn"]:
            raise SystemExit(f"The server was asked for something else than the trained completions: {counters}")
        step = (watch.end - watch.start) / args.steps
        least = args.unit * bound(staleness, args.steps, completions, args.slots, args.update)
        waits = [each["wait/rollout"] for each in trainer.state.log_history if "wait/rollout" in each]
        result[staleness] = {"step_s": step, "bound_s": least, "ratio": least / step}
        result[staleness]["wait_s"] = fmean(waits) if waits else math.nan
        print(f"staleness {staleness}: {step:.2f} s, {least / step:.2f} of the bound", flush=True)
    return {"staleness": result, **conditions(args, "trl", "transformers")}


def seconds(value: float) -> str:
    """Empty without a value, as a run that samples nothing ahead doesn't log that it waits."""
    return "" if math.isnan(value) else f"{value:.2f} s"


def table_of_steps(result: dict) -> str:
    """A row for each staleness."""
    found = result["staleness"]
    first = next(iter(found.values()))["step_s"]
    rows = [
        [str(staleness), *(seconds(each[name]) for name in ("step_s", "bound_s", "wait_s"))]
        + [f"{each['ratio']:.2f}", f"{first / each['step_s']:.2f}x"]
        for staleness, each in found.items()
    ]
    header = ("`max_staleness`", "step", "bound", "wait for completions", "bound / step", "faster than the first")
    return markdown(header, rows)


# Accuracy


def interval(values: list[float]) -> tuple[float, float]:
    """The mean, and what the 95 % interval of it is to both sides."""
    spread = T[len(values) - 1] * stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return fmean(values), spread


def run_accuracy(args: argparse.Namespace) -> dict:
    """Accuracies of each staleness, one of each seed, and the means of the staleness that was."""
    accuracies: dict[int, list[float]] = {each: [] for each in args.staleness}
    staleness_mean: dict[int, list[float]] = {each: [] for each in args.staleness}
    test = spoken_digits()["test"]
    with tempfile.TemporaryDirectory() as folder:
        model = saved(*spoken_digit_model(), Path(folder, "served"))
        with serve(Path(model), Path(folder), *LIMITS) as url:
            for seed in range(args.seeds):
                for staleness in args.staleness:
                    output = str(Path(folder, f"{seed}-{staleness}"))
                    options = {"per_device_train_batch_size": args.prompts * args.group, "max_steps": args.steps}
                    trainer = trainer_of(staleness, url, output, seed, **options)
                    trainer.train()
                    evaluation = EvaluationConfig(max_completion_length=3, batch_size=100)
                    found = evaluate_trainer(trainer, test, accuracy_reward, evaluation).metrics["accuracy"]
                    accuracies[staleness].append(found)
                    logs = trainer.state.log_history
                    ages = [each["staleness/mean"] for each in logs if "staleness/mean" in each]
                    staleness_mean[staleness].append(fmean(ages or [0.0]))
                    print(f"staleness {staleness}, seed {seed}: {found:.1%}", flush=True)
    return {
        "accuracy": accuracies,
        "staleness_mean": {each: fmean(values) for each, values in staleness_mean.items()},
        **conditions(args, "trl", "transformers"),
    }


def table_of_accuracies(result: dict) -> str:
    """A row for each staleness."""
    rows = []
    for staleness, values in result["accuracy"].items():
        mean, spread = interval(values)
        each = ", ".join(f"{value:.1%}" for value in values)
        rows.append([str(staleness), f"{result['staleness_mean'][staleness]:.2f}", f"{mean:.1%} ± {spread:.1%}", each])
    return markdown(("`max_staleness`", "staleness", "accuracy, 95 % interval", "each seed"), rows)


# Command line


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--accuracy", action="store_true", help="measure accuracies, not times")
    parser.add_argument("--staleness", type=int, nargs="+", help="0 1 2 4 if omitted; 0 2 with `--accuracy`")
    parser.add_argument("--steps", type=count, help="20 if omitted; those of the demo with `--accuracy`")
    parser.add_argument("--prompts", type=count, help="4 if omitted; those of the demo with `--accuracy`")
    parser.add_argument("--group", type=count, help="8 if omitted; those of the demo with `--accuracy`")
    parser.add_argument("--slots", type=count, default=32, help="completions that the server runs at the same time")
    parser.add_argument("--unit", type=float, default=1.0, help="seconds of a completion in the mean")
    parser.add_argument("--update", type=float, default=1.0, help="units of an update")
    parser.add_argument("--seeds", type=count, default=3, help="runs of each staleness with `--accuracy`")
    args = parse_options(parser, argv, threads=None, seed=0, json=False)
    group = DEMO["num_generations"] if args.accuracy else 8
    args.group = args.group or group
    args.prompts = args.prompts or (DEMO["per_device_train_batch_size"] // group if args.accuracy else 4)
    args.steps = args.steps or (DEMO["max_steps"] if args.accuracy else 20)
    args.staleness = args.staleness or ([0, 2] if args.accuracy else [0, 1, 2, 4])
    return args


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark from the command line, and returns the result."""
    args = parse(argv)
    if args.accuracy:
        return report(args, run_accuracy, table_of_accuracies)
    return report(args, run_steps, table_of_steps)


if __name__ == "__main__":
    main()
