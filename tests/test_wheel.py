# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The wheel has the data files that an installed package needs."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from helpers.processes import PATIENCE
from packaging.requirements import Requirement


ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_extras_name_extras_that_exist():
    extras = PROJECT["optional-dependencies"]
    for extra in extras:
        for line in extras[extra]:
            requirement = Requirement(line)
            assert requirement.name != PROJECT["name"] or requirement.extras <= extras.keys()
    assert {"audio", "image", "video", "vllm", "logging"} <= extras.keys()


@pytest.mark.slow
def test_wheel_is_whole(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    package, no_caches = "trl_multimodal_rft", shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / package, source / package, ignore=no_caches)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    run = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert packed == {str(path.relative_to(source)) for path in (source / package).rglob("*") if path.is_file()}
