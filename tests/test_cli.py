# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The command `trl-multimodal-rft`, and what `families` prints."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from helpers.families import FAMILIES

from trl_multimodal_rft.cli import COMMANDS, main
from trl_multimodal_rft.cli.families import HEADER, MARK, measurable
from trl_multimodal_rft.cli.measure import Measurement, measure
from trl_multimodal_rft.cli.tiny_media import encode
from trl_multimodal_rft.cli.tiny_models import tiny_model
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward.masks import sharing_obstacle


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
    assert "image" in rows["vipllava"]  # of which nothing particular is known
    assert "t5" not in rows and len(rows) > 80


def test_known_families(capsys):
    main(["families", "--only_known"])
    output = capsys.readouterr().out
    assert "granite_speech" in output and "vipllava" not in output


def measured(text):
    """Rows of a table of measurements by family."""
    table = text.rpartition(MARK)[2]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert lines[0] == list(HEADER)
    return {line[0]: dict(zip(HEADER, line, strict=False)) for line in lines[2:]}


@pytest.mark.slow
def test_measure_families(capsys, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Words.\n<!-- measured -->\nOld.\n")
    main(["families", "--measure", "--only", "qwen2_vl,phi4_multimodal", "--output", str(page)])
    rows = measured(capsys.readouterr().out)
    assert rows == measured(page.read_text()) and list(rows) == ["phi4_multimodal", "qwen2_vl"]
    assert "Words." in page.read_text() and "Old." not in page.read_text()
    row = rows["qwen2_vl"]
    assert (row["media"], row["scored"], row["shared prefill"]) == ("image, video", "packed", "yes")
    assert float(row["log-probs"]) < 1e-5 and float(row["gradient"]) < 1e-5
    assert rows["phi4_multimodal"]["scored"] == "not built" and "no recipe" in rows["phi4_multimodal"]["remark"]
    with pytest.raises(SystemExit):
        main(["families", "--measure", "--only", "qwen2_lv"])
    assert "there is no family 'qwen2_lv'" in capsys.readouterr().err


def test_measurements_see_what_is_wrong():
    model = tiny_model(transformers.Qwen2VLForConditionalGeneration)
    prompts = [encode(model, [("image", 0)], 1), encode(model, [], 2)]
    prompts[0].position_ids = torch.arange(len(prompts[0])).expand_as(prompts[0].position_ids)
    found = measure(model, prompts, Measurement("qwen2_vl"))
    assert found.mode == "wrong: packed" and found.logps > 1e-3 and "nothing is exact" in found.note


def test_minimax_is_measured_with_layers_of_the_kinds_that_are_released():
    obstacle = sharing_obstacle(tiny_model(transformers.MiniMaxM3SparseForConditionalGeneration))
    row = measured((ROOT / "docs" / "models.md").read_text())["minimax_m3_vl"]
    assert row["scored"] == "padded, apart" and row["remark"] == obstacle and "minimax_m3_sparse" in obstacle


def test_page_of_models():
    """It has every family, and what it says of those with real processors is what is done."""
    text = (ROOT / "docs" / "models.md").read_text()
    rows = measured(text)
    if f"transformers {transformers.__version__}" in text:
        named = {*rows, *(f"{name}_thinker" for name in rows)}
        assert not measurable().keys() - named
    for name, family in FAMILIES.items():
        row = rows[name]
        assert row["processor"] == "real" and set(row["media"].split(", ")) == set(family.modalities)
        assert row["scored"] == ("packed, apart" if family_of(name).apart else "packed")
        assert max(float(row["log-probs"]), float(row["gradient"])) < 1e-4
