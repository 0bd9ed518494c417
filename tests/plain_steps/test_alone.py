# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The plain steps use nothing of what they are compared with, and are short."""

import ast

import pytest
from helpers.folders import ROOT


FILES = sorted((ROOT / "trl_multimodal_rft" / "plain").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_is_short_and_imports_no_code_under_test(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 150
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert (node.level, node.module) == (1, "forward") or not node.level
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        roots = {name.split(".")[0] for name in names}
        assert roots <= {"", "copy", "dataclasses", "typing", "torch", "transformers", "forward"}
