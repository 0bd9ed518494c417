# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Runs `policy_update.py` for each row of the tables in `README.md`, and prints them in Markdown.

```bash
OMP_WAIT_POLICY=passive python benchmarks/step_table.py --threads 2   # on an idle machine
python benchmarks/step_table.py --threads 1 --clock cpu               # on a busy one
python benchmarks/step_table.py --rows text engine --repeats 1
```

Times are TRL's → ours, of the step without sampling (*update*) and of the whole step, and then of the parts of the
step, as `policy_update.py` defines them.
"""

import argparse
import gc
from collections.abc import Sequence

import policy_update
from measuring import MIB, command_line, markdown, parse_options
from policy_update import PHASES, PRESETS


# Options of `policy_update.py`; rows below the first four show what a step skips
ROWS = {
    "image": "--case image",
    "long": "--case long",
    "qwen3_5": "--case image --family qwen3_5",
    "text": "--case text",
    "engine": "--case image --corrects_engine",
    "frozen_tower": "--case image --freeze_tower --checkpointing",
    "equal_rewards": "--case image --prompts 4 --equal_rewards 0.5 --updates_only",
}
TRAINERS = ("trl", "ours")
HEADER = (
    "case",
    "prompt",
    "completions",
    "update",
    "whole step",
    "sampling",
    "saved activations",
    "prompts processed",
)


def cells(name: str, result: dict) -> list[str]:
    """A row of the first table."""
    setting = result["setting"]
    sides = [result[each] for each in TRAINERS]
    clock = suffix(result)

    def seconds(quantity: str) -> str:
        if f"{quantity}_ratio" not in result:
            return ""
        trl, ours = (side[quantity + clock] for side in sides)
        return f"{trl:.2f} s → {ours:.2f} s, **{result[f'{quantity}_ratio']:.2f}x**"

    trl, ours = (side["memory_bytes"] / MIB for side in sides)
    return [
        f"`{name}`",
        f"{setting['prompt_tokens']} tokens",
        f"{setting['prompts']} x {setting['group']}",
        *map(seconds, ("update", "step", "generation")),
        f"{trl:.0f} → {ours:.0f} MiB, **{result['memory_ratio']:.1f}x**",
        " → ".join(str(side["processor_prompts"]) for side in sides),
    ]


def parts(name: str, result: dict) -> list[list[str]]:
    """Rows of the second table: the parts of a step of each trainer, and the share of Python in sampling."""
    rows = []
    clock = suffix(result)
    for trainer in TRAINERS:
        side = result[trainer]
        if "python_share_of_sampling" in side:
            times = [side[f"step_{phase}{clock}"] for phase in PHASES]
            shares = [f"{seconds:.3f} s, {seconds / sum(times):.0%}" for seconds in times]
            python = f"{side['python_share_of_sampling']:.0%}"
            rows.append([f"`{name}`", "TRL" if trainer == "trl" else "ours", *shares, python])
    return rows


def suffix(result: dict) -> str:
    """How the names of times on the reported clock end."""
    return "_s" if result["setting"]["clock"] == "wall" else "_cpu_s"


def tables(results: dict[str, dict]) -> str:
    """Both tables."""
    steps = markdown(HEADER, [cells(name, result) for name, result in results.items()])
    header = ("case", "trainer", *PHASES, "Python in sampling")
    return f"{steps}\n\n{markdown(header, [row for name, result in results.items() for row in parts(name, result)])}"


def run(args: argparse.Namespace) -> dict[str, dict]:
    """Runs the rows, and prints each as it is done."""
    threads = [] if args.threads is None else ["--threads", str(args.threads)]
    results = {}
    for name in args.rows:
        common = ["--preset", args.preset, "--repeats", str(args.repeats), "--clock", args.clock, *threads]
        results[name] = policy_update.main([*ROWS[name].split(), *common])
        gc.collect()
    return results


def main(argv: Sequence[str] | None = None) -> dict[str, dict]:
    """Runs the rows from the command line, prints the tables, and returns the results."""
    parser = command_line(__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS], help="rows to run")
    parser.add_argument("--preset", choices=PRESETS, default="12m", help="size of the model")
    args = parse_options(parser, argv, clock="wall", threads=None, repeats=3)
    results = run(args)
    print(f"\n{tables(results)}")
    return results


if __name__ == "__main__":
    main()
