# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The tests of GPUs on a stand-in for one, `shims/fake_cuda.py`, which has to be loaded before torch is."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from helpers.folders import ROOT
from helpers.processes import PATIENCE, python_environment


ON_STAND_IN = [sys.executable, "tests/shims/fake_cuda.py"]
PYTEST = ["-m", "pytest", "tests/gpu", "-m", "gpu", "-p", "no:cacheprovider", "-rA", "--no-header", "-q"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("g++") and shutil.which("ninja")), reason="needs g++ and ninja"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
]


def on_stand_in(*arguments, **environment: str) -> subprocess.CompletedProcess:
    options = {"capture_output": True, "text": True, "timeout": PATIENCE, "cwd": ROOT}
    return subprocess.run([*ON_STAND_IN, *arguments], env=python_environment(**environment), **options)


def test_gpu_tests():
    """They import nothing that a machine with a GPU may lack."""
    on_stand_in("-m", "this")  # compiles it, which takes packages that are hidden below
    listed = os.pathsep.join([str(ROOT / "tests/gpu/listed"), python_environment()["PYTHONPATH"]])
    done = on_stand_in(*PYTEST, "-W", "ignore::pytest.PytestAssertRewriteWarning", PYTHONPATH=listed)
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR)", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
    assert outcomes.count("PASSED") == len(outcomes) > 45


# Prints what runs though a GPU would refuse it, and waits and uploads of what runs
SCRIPT = """
import json
import fake_cuda, torch
from torch.nn.attention.varlen import varlen_attn
device, host = torch.ones(16, 2, 8, device="cuda", dtype=torch.bfloat16), torch.ones(16, 2, 8)
starts = torch.tensor([0, 16], dtype=torch.int32).cuda()
values, accepted, found = torch.arange(4.0).cuda(), [], {}
for name, run in {
    "sum of both": lambda: device + host,
    "list of both": lambda: torch.cat([device, host]),
    "float32": lambda: varlen_attn(device.float(), device.float(), device.float(), starts, starts, 16, 16),
    "long starts": lambda: varlen_attn(device, device, device, starts.long(), starts, 16, 16),
    "short maximum": lambda: varlen_attn(device, device, device, starts, starts, 15, 16),
    "two dtypes": lambda: torch.nn.functional.scaled_dot_product_attention(device, device.float(), device),
}.items():
    try:
        run()
    except (RuntimeError, AssertionError):
        continue
    accepted.append(name)
for name, run in {
    "item": lambda: values[0].item(),
    "if": lambda: bool(values.any()),
    "mask": lambda: values[values > 1],
    "list": lambda: values.tolist(),
    "upload": lambda: torch.ones(3).cuda(),
    "index": lambda: values[[1, 0]],
    "pinned": lambda: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
    "sum": lambda: values.sum() * 2,
    "choice": lambda: torch.where(values > 1, values, 0),
}.items():
    with fake_cuda.watch() as watch:
        run()
    found[name] = [sum(each.values()) for each in (watch.waits, watch.uploads)]
print(json.dumps([accepted, found]))
"""


def test_what_a_gpu_would_refuse_and_waits_and_uploads(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = on_stand_in(str(tmp_path / "script.py"))
    assert done.returncode == 0, done.stderr
    accepted, found = json.loads(done.stdout)
    assert accepted == []
    assert found == {
        **dict.fromkeys(["item", "if", "mask", "list"], [1, 0]),
        **dict.fromkeys(["upload", "index"], [1, 1]),
        "pinned": [0, 1],
        **dict.fromkeys(["sum", "choice"], [0, 0]),
    }
