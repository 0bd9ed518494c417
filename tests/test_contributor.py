# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The rows of CONTRIBUTING.md name every file and command that their additions need."""

import contributor
import pytest


@pytest.mark.slow
def test_additions_need_what_their_rows_name(tmp_path):
    contributor.follow(tmp_path)


def test_a_row_names_files_and_commands():
    row = "`a/b.py`: a function in `cli/`, `trainers/<name>_config.py`; `docs/x.md` by `python docs/write.py <name>`"
    files, commands = contributor.named(row)
    package = contributor.PACKAGE
    assert files == [f"{package}/a/b.py", f"{package}/cli/*", f"{package}/trainers/*_config.py", "docs/x.md"]
    assert commands == [f"python docs/write.py {contributor.FAMILY}"]
    named = ("cli/new.py", "trainers/mine_config.py", "a/b.py"), ("cli/deep/new.py", "trainers/mine.py", "b.py")
    for paths, expected in zip(named, (True, False), strict=True):
        assert {contributor.is_named(f"{package}/{path}", files) for path in paths} == {expected}
