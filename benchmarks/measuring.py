# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What all benchmarks report beside their numbers."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch


MIB = 2**20
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def hardware(device: str | None = None) -> dict:
    """What it ran on, with the GPU if the benchmark has a choice of device."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    machine = {"cpu": names[0] if names else platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if device is not None:
        machine["gpu"] = torch.cuda.get_device_name() if device == "cuda" else None
    return machine


def versions(*packages: str) -> dict[str, str]:
    """Of Python and of packages."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """
    A table.

    Args:
        header (`Sequence[str]`):
            Titles of the columns.
        rows (`Sequence[Sequence[str]]`):
            The cells.

    Returns:
        `str`: The table in Markdown.
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
