# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Packages that are missing, or don't fit together: one line at every command, in environments that are broken."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
from cli.test_cli import RUNS, run_of
from helpers.folders import ROOT
from helpers.processes import PATIENCE

from trl_multimodal_rft.cli import COMMANDS, LAUNCHED
from trl_multimodal_rft.cli.errors import input_error
from trl_multimodal_rft.versions import unfit_packages


SITE = Path(sysconfig.get_path("purelib"))
# What commands need to go on to their imports
ARGUMENTS = {
    **dict.fromkeys(LAUNCHED, ["--model_name_or_path", "model", "--dataset_name", "rows"]),
    "chat": ["model"],
    "check": ["--model_name_or_path", "model", "--dataset_name", "rows"],
    "compare": ["--model", "model", "--dataset_name", "rows"],
    "estimate": ["--model_name_or_path", "model"],
    "families": [],
    "prepare": ["verl", "none.jsonl", "--output_dir", "prepared"],
}
LINES = [[name, *words] for name in COMMANDS for words in (["--help"], ARGUMENTS[name])]
ALIKE = [name for name in LAUNCHED if name not in ("grpo", "evaluate")]  # commands that begin as these


def environment(folder: Path, without: str) -> tuple[Path, Path]:
    """
    Makes a virtual environment with links to the packages of this one, but for files whose names match a pattern, and
    packages that other ones import, or that print. Returns its Python and the folder of its packages.
    """
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for path in SITE.iterdir():
        if "trl_multimodal" in path.name or not re.match(f"{without}|timm|bitsandbytes", path.name):
            (site / path.name).symlink_to(path)
    return folder / "bin" / "python", site


def without_torchvision(folder: Path) -> Path:
    """Returns the Python of an environment with a torchvision for another torch."""
    python, site = environment(folder, "torchvision$")
    (site / "torchvision").mkdir()
    (site / "torchvision" / "__init__.py").write_text(f"raise RuntimeError({REASON!r})")
    return python


def without_a_name(folder: Path) -> Path:
    """Returns the Python of an environment in which TRL lacks a function, and which has another accelerate."""
    python, site = environment(folder, "trl$|accelerate-")
    shutil.copytree(SITE / "trl", site / "trl", copy_function=os.symlink)
    utils = site / "trl" / "trainer" / "utils.py"
    text = utils.read_text()
    utils.unlink()
    utils.write_text(text.replace("def nanmin(", "def least("))
    information = site / "accelerate-1.15.99.dist-info"
    information.mkdir()
    information.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 1.15.99\n")
    return python


def run(words: list, folder: Path, **options) -> subprocess.CompletedProcess:
    return subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=PATIENCE, **options)


def check_lines(python: Path, folder: Path, lines: list[list[str]], reason: str, others: Sequence[str] = ()) -> None:
    """Checks that command lines end with a line about packages, but for help and other commands that need none."""
    ended = run([python, "-c", RUNS], folder, input=json.dumps(lines))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    for words, (code, _, err, _) in zip(lines, found, strict=True):
        if words[0] in others or (words[1:] == ["--help"] and code == 0):
            assert "don't fit" not in err and "Traceback" not in err, err
            continue
        line = rf"trl-multimodal-rft {words[0]}: error: packages of this environment don't fit together: {reason}"
        assert code == 1 and re.fullmatch(line + r"\. It has .*; install versions that fit, see .*\n", err), err


REASON = "operator torchvision::nms does not exist"
VERSIONS = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchvision", "transformers", "trl"))


def test_nothing_is_installed(tmp_path):
    python, _ = environment(tmp_path / "venv", "")
    check_lines(python, tmp_path, LINES, "No (module named|package metadata was found for) .*")


@pytest.mark.parametrize(
    "text", ["{}['gone']", "import gone", "from transformers import gone", "import transformers.gone"]
)
def test_the_module_of_a_user_is_no_package(text, tmp_path, monkeypatch):
    """Its error keeps its traceback, but for a package that fails as it imports it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_rewards.py").write_text(text)
    with pytest.raises((KeyError, ImportError)) as raised:
        importlib.import_module("own_rewards")
    assert unfit_packages(raised.value) is None and input_error(raised.value) is None
    (tmp_path / "torchvision.py").write_text("{}['gone']")
    (tmp_path / "own_rewards.py").write_text("import torchvision")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(KeyError) as raised:
        importlib.import_module("own_rewards")
    assert "don't fit together: KeyError('gone'). It has torch" in unfit_packages(raised.value)


@pytest.mark.slow
def test_packages_for_others(tmp_path):
    python = without_torchvision(tmp_path / "venv")
    check_lines(python, tmp_path, [each for each in LINES if each[0] not in LAUNCHED], REASON)


@pytest.mark.slow
def test_a_name_is_missing(tmp_path):
    """With another accelerate than that of the stored options, which commands then collect."""
    reason = r"cannot import name 'nanmin' from 'trl\.trainer\.utils' .*"
    lines = [each for each in LINES if each[0] not in ALIKE and (each[1:] == ["--help"] or each[0] == "check")]
    check_lines(without_a_name(tmp_path / "venv"), tmp_path, lines, reason, others=["families", "prepare"])


@pytest.mark.slow
def test_packages_of_launched_processes_and_of_scripts(tmp_path):
    python = without_torchvision(tmp_path / "venv")
    command = run([python, *run_of(1, tmp_path)[1:]], tmp_path)
    line = f"packages of this environment don't fit together: {REASON}. It has {VERSIONS}; install versions that fit"
    assert command.returncode == 1 and command.stderr.count("\n") == 1
    assert command.stderr.startswith(f"trl-multimodal-rft grpo: error: {line}")
    said = run([python, ROOT / "examples" / "grpo_audio.py"], tmp_path).stderr
    assert said.splitlines()[-1].startswith(f"ImportError: {line}"), said
