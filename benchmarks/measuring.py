# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Code that the benchmarks share: command lines, timing, and the metadata and tables of their reports."""

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.autograd.profiler import profile


if TYPE_CHECKING:
    from transformers import Trainer

    from trl_multimodal_rft.engines.samplers import Sampler

MIB = 2**20
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


# Command lines


def count(text: str) -> int:
    """Type of an option that must be at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


OPTIONS = {
    "device": {"choices": ("cpu", "cuda")},
    "clock": {"choices": tuple(CLOCKS), "help": "clock of the reported times"},
    "threads": {"type": int, "help": "CPU threads; torch's default if omitted"},
    **dict.fromkeys(
        ("repeats", "repetitions"), {"type": count, "help": "repetitions, of which the minimum is reported"}
    ),
    "seed": {"type": int},
    "json": {"action": "store_true", "help": "print the result as JSON on the last line"},
}


def command_line(doc: str) -> argparse.ArgumentParser:
    """A parser whose description is the first line of a script's docstring."""
    return argparse.ArgumentParser(
        description=doc.strip().split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )


def parse_options(parser: argparse.ArgumentParser, argv: Sequence[str] | None, **shared) -> argparse.Namespace:
    """Adds options of [`OPTIONS`] with the given defaults, and parses the command line."""
    for name, default in shared.items():
        parser.add_argument(f"--{name}", default=default, **OPTIONS[name])
    args = parser.parse_args(argv)
    if {"device": "cuda", "clock": "cpu"}.items() <= vars(args).items():
        parser.error("CPU time says nothing about a GPU; use `--clock wall`")
    return args


def report(args: argparse.Namespace, run: Callable[[argparse.Namespace], dict], table: Callable[[dict], str]) -> dict:
    """Runs a benchmark and prints its results."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    result = run(args)
    print(table(result))
    if args.json:
        print(json.dumps(result))
    return result


# Times


def now(device: str | torch.device) -> np.ndarray:
    """The time on all of [`CLOCKS`] in seconds, after the GPU has finished its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return np.array([clock() for clock in CLOCKS.values()])


@contextmanager
def python_share(shares: list[float]) -> Iterator[None]:
    """Appends the share of the time within the context that is spent outside of torch's operators."""
    with profile() as profiled:
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
    # The events themselves: to make a tree of 100,000 takes longer than the step
    operators = [each for each in profiled.kineto_results.events() if each.name()[:6] == "aten::"]
    shares.append(1 - covered(operators) / seconds)


def covered(events: Iterable) -> float:
    """Seconds in which at least one of the profiler's events runs. Operators run within those that call them."""
    # nanoseconds
    total = 0
    end = 0
    for begin, duration in sorted((event.start_ns(), event.duration_ns()) for event in events):
        total += max(begin + duration - max(begin, end), 0)
        end = max(end, begin + duration)
    return total / 1e9


class TimedSteps:
    """
    Times the steps of a trainer, without the optimizer step.

    `best` maps each measured quantity to its minimum time on each of [`CLOCKS`].

    Args:
        trainer ([`~transformers.Trainer`]):
            Trainer to measure.
    """

    def __init__(self, trainer: "Trainer"):
        self.trainer = trainer
        self.device = trainer.accelerator.device
        self.rows = self._endless(trainer.get_train_dataloader())
        self.best: dict[str, np.ndarray] = {}
        trainer.current_gradient_accumulation_steps = 1  # set by `train`, which doesn't run here

    def _step(self) -> np.ndarray:
        """Runs a step from reading the rows to the gradients, and returns its time."""
        self.trainer.model.zero_grad(set_to_none=False)
        gc.collect()
        start = now(self.device)
        rows = next(self.rows)
        self.trainer.training_step(self.trainer.model, rows, None)
        return now(self.device) - start

    @staticmethod
    def _endless(loader: Iterable) -> Iterator:
        while True:
            yield from loader

    def _keep_best(self, name: str, value: np.ndarray) -> None:
        self.best[name] = np.minimum(self.best.get(name, value), value)


class Sampling:
    """
    Replaces a trainer's sampler with a function.

    Args:
        sampler ([`~trl_multimodal_rft.engines.samplers.Sampler`]):
            Sampler of the trainer.
        sample (`Callable`):
            Function to call instead, with the same arguments.
    """

    def __init__(self, sampler: "Sampler", sample: Callable):
        self.sampler = sampler
        self.sample = sample

    def __getattr__(self, name: str):
        return getattr(self.__dict__["sampler"], name)

    def __call__(self, *args, **kwargs):
        """Samples token ids and their log-probabilities."""
        return self.sample(*args, **kwargs)


# Reports


def conditions(args: argparse.Namespace, *packages: str, **more) -> dict:
    """Settings, hardware and versions of a result."""
    options = {name: value for name, value in vars(args).items() if name != "json"}
    return {
        "setting": {**options, "threads": torch.get_num_threads(), **more},
        "hardware": hardware(getattr(args, "device", None)),
        "versions": versions("trl-multimodal-rft", "torch", *packages),
    }


def hardware(device: str | None = None) -> dict:
    """The CPU, the number of cores and, for a benchmark with a choice of device, the GPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    machine = {"cpu": names[0] if names else platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if device is not None:
        machine["gpu"] = torch.cuda.get_device_name() if device == "cuda" else None
    return machine


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of packages."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
