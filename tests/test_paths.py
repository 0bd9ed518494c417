# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Distinguishes paths from names on the Hub."""

import subprocess
import sys
from pathlib import Path

import pytest

from trl_multimodal_rft.paths import local_path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("home").mkdir()
    Path("home", "x.json").write_text("{}")
    Path("rows.jsonl").write_text("{}")
    return tmp_path


def test_paths(folder):
    assert local_path("rows.jsonl") == local_path("./rows.jsonl") == Path("rows.jsonl")
    assert local_path(f"{folder}/rows.jsonl") == folder / "rows.jsonl"
    assert local_path("~/x.json") == folder / "home" / "x.json"
    assert local_path("home") == Path("home")


@pytest.mark.parametrize("name", ["squad", "lmms-lab/LLaVA-v1.5", "hf://datasets/user/data/rows.jsonl"])
def test_names_on_hub(folder, name):
    assert local_path(name) is None


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("row.jsonl", "{folder}' has 'rows.jsonl'"),
        ("./rows.json", "{folder}' has 'rows.jsonl'"),
        ("~/y.json", "{folder}/home' has 'x.json'"),
        ("data/rows.jsonl", "{folder}' has no 'data'"),
        ("outputs/run/checkpoint-10", "{folder}' has no 'outputs'"),
        ("~no-such-user/x", "{folder}' has no '~no-such-user'"),
        ("rows.jsonl.gz", "{folder}' has 'rows.jsonl'"),
        ("home/../rows.csv", "{folder}' has 'rows.jsonl'"),
    ],
)
def test_missing_path_is_named_with_what_is_near(folder, name, has):
    with pytest.raises(ValueError) as error:
        local_path(name)
    assert str(error.value) == f"There is no file or folder {name!r}; '{has.format(folder=folder)}."


def test_imports_nothing_heavy():
    code = "import sys, trl_multimodal_rft.paths; assert not {'torch', 'datasets', 'transformers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
