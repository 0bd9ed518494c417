# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The command `trl-multimodal-rft`, and what `families` prints."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from trl_multimodal_rft.cli import COMMANDS, main


ROOT = Path(__file__).parents[1]


def test_entry_point():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, name = scripts["trl-multimodal-rft"].split(":")
    assert getattr(import_module(module), name) is main


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from trl_multimodal_rft.cli import main\n"
        "try: main(['--help'])\n"
        "finally: assert not {'torch', 'transformers', 'trl'} & sys.modules.keys()"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    for command in COMMANDS:
        assert command in shown.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command, capsys):
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    assert exit.value.code == 0 and f"trl-multimodal-rft {command}" in capsys.readouterr().out


def test_unknown_command(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["guess"])
    assert exit.value.code == 2 and "guess" in capsys.readouterr().err


def test_families(capsys):
    main(["families"])
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "image, video" in rows["qwen2_5_vl"] and "media" not in rows["qwen2_5_vl"]
    assert "image, video, audio" in rows["qwen3_omni_moe"] and "media" in rows["qwen3_omni_moe"]
    assert rows["qwen2_5_omni"].endswith("Qwen2_5OmniThinkerForConditionalGeneration")
    assert "image" in rows["mllama"]  # of which nothing particular is known
    assert "t5" not in rows and len(rows) > 80


def test_known_families(capsys):
    main(["families", "--only_known"])
    output = capsys.readouterr().out
    assert "granite_speech" in output and "mllama" not in output
