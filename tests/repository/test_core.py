# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The core runs alone, in a copy of the package without what docs/architecture.md lists as outside of the core."""

import os
import shutil
import subprocess
import sys

import house
import pytest


ROOT = house.ROOT

# Imports each module of the copy, each trainer with its config, and prints the help of each command
USE = """
import importlib
import pkgutil

import trl_multimodal_rft
from trl_multimodal_rft import cli, trainers

for module in pkgutil.walk_packages(trl_multimodal_rft.__path__, "trl_multimodal_rft."):
    if module.name != "trl_multimodal_rft.cli.launched":
        print(importlib.import_module(module.name).__name__)
for name in trainers.__all__:
    print(getattr(trainers, name).__name__)
for command in cli.COMMANDS:
    try:
        cli.main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0, command
"""


def imports_outside(name, known, seen):
    """Whether a module of the tests imports what is outside of the core, itself or through another of them."""
    seen.add(name)
    for imported in house.imports(known[name], known):
        path = known[imported]
        if path.is_relative_to(house.PACKAGE):
            if any(path.is_relative_to(house.PACKAGE / folder) for folder in house.outside()):
                return True
        elif imported not in seen and imports_outside(imported, known, seen):
            return True
    return False


def core_tests():
    """Test files in the folders of the core's layers that import nothing from outside of it."""
    known = house.modules_and_tests()
    folders = [ROOT / "tests" / layer for layer in house.layers()]
    return [
        str(path.relative_to(ROOT))
        for name, path in known.items()
        if path.name.startswith("test_")
        and "vllm" not in path.parts  # whose folder has an environment of its own
        and any(path.is_relative_to(folder) for folder in folders)
        and not imports_outside(name, known, set())
    ]


@pytest.fixture
def core(tmp_path):
    """Folder with a copy of the package that has the core alone."""
    copy = tmp_path / house.PACKAGE.name
    shutil.copytree(house.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in house.outside():
        shutil.rmtree(copy / folder)
    return tmp_path


def run(folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.gate
def test_modules_trainers_and_help(core):
    used = run(core, "-c", USE)
    assert used.returncode == 0, used.stderr[-2000:]
    lines = used.stdout.splitlines()
    assert {"trl_multimodal_rft.trainers", "trl_multimodal_rft.rewards.answers", "MultimodalGRPOTrainer"} <= {*lines}
    assert not any(line.startswith("trl_multimodal_rft.evaluation") for line in lines)
    outside = run(core, "-c", "from trl_multimodal_rft.rewards import choice_reward")
    assert "No module named 'trl_multimodal_rft.rewards.ready'" in outside.stderr


@pytest.mark.slow
def test_quick_tests(core):
    for name in ("tests", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, core / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "constraints.txt"):
        shutil.copy(ROOT / name, core)
    files = core_tests()
    assert len(files) > 40
    tested = run(core, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert tested.returncode == 0, tested.stdout[-5000:]
