# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The wheel has the data files that an installed package needs, and a tag all that the index needs."""

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml
from helpers.folders import ROOT
from helpers.processes import PATIENCE
from packaging.requirements import Requirement


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_extras_name_extras_that_exist():
    extras = PROJECT["optional-dependencies"]
    for extra in extras:
        for line in extras[extra]:
            requirement = Requirement(line)
            assert requirement.name != PROJECT["name"] or requirement.extras <= extras.keys()
    assert {"audio", "image", "video", "vllm", "logging"} <= extras.keys()


def test_a_tag_is_ready_for_the_index(tmp_path):
    """README's links lead to files of the tag, and the metadata to the repository; another version is refused."""
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    prepare = runpy.run_path(str(ROOT / "docs" / "release.py"))["main"]
    address = "https://host/we/it"
    tag = "v0.1.0"
    with pytest.raises(SystemExit, match="tag `v0.1.0`"):
        prepare(address, "v0.2", tmp_path)
    prepare(address, tag, tmp_path)
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Homepage"] == address and len(urls) == 4
    text = (tmp_path / "README.md").read_text()
    links = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text)
    ours = [link for pair in links for link in pair if link.startswith(address)]
    for link in [*ours, urls["Documentation"], urls["Changelog"]]:
        kind, _, path = link.removeprefix(f"{address}/").partition("/")
        is_file = path.startswith(f"{tag}/") and (ROOT / path.removeprefix(f"{tag}/").partition("#")[0]).exists()
        assert kind == "actions" or (kind in ("blob", "raw", "tree") and is_file), link
    assert len(ours) > 25 and all("://" in link or link.startswith("#") for pair in links for link in pair if link)
    assert 'pip install "trl-multimodal-rft[audio' in text and "pip install -e" not in text


def test_citation_has_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"] and citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_workflow_and_containers_run_what_is_there():
    """The job that publishes has the environment's identity and no other right; containers make targets."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["needs"] == "build"
    scripts = [step["run"].split()[1] for step in jobs["build"]["steps"] if step.get("run", "").endswith('_NAME"')]
    assert [(ROOT / script).exists() for script in scripts] == [True]
    makefile = (ROOT / "Makefile").read_text().replace("$(VLLM_GPU)", ".venv-vllm-gpu").replace("$(VENV)", ".venv")
    for name, target in (("Dockerfile", ".venv/examples"), ("Dockerfile.gpu", ".venv-vllm-gpu/ok")):
        text = (ROOT / name).read_text()
        assert re.search(r"make (?:PYTHON=\S+ )?(\.\S+)", text)[1] == target and f"\n{target}:" in makefile
        for recipe in re.findall(r"grpo --config (\S+)", text):
            assert (ROOT / "trl_multimodal_rft" / "recipes" / f"{recipe}.yaml").exists()


@pytest.mark.gate
def test_wheel_is_whole(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    package = "trl_multimodal_rft"
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / package, source / package, ignore=no_caches)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    run = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert packed == {str(path.relative_to(source)) for path in (source / package).rglob("*") if path.is_file()}
