# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The benchmark of the estimators runs, and refuses to time what doesn't compute the same."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch


FUNCTIONS = ["gae", "cumulative_returns", "whiten", "group_statistics"]
SMALL = ["--rows", "8", "--tokens", "150", "--group-size", "4", "--repetitions", "1"]


@pytest.fixture
def estimators():
    path = Path(__file__).parents[1] / "benchmarks" / "estimators.py"
    spec = importlib.util.spec_from_file_location("estimators", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("gaps", "clock"), [(False, "wall"), (True, "cpu")])
def test_benchmark(estimators, gaps, clock, capsys):
    threads = torch.get_num_threads()
    estimators.main([*SMALL, "--threads", str(threads), "--clock", clock, "--json", *["--gaps"] * gaps])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])

    for name in FUNCTIONS:
        ours, usual = result["ours"][f"{name}_s"], result["usual"][f"{name}_s"]
        assert ours > 0 and result[f"{name}_ratio"] == usual / ours
        assert 0 <= result["difference"][name] < 1e-5
    expected = {"rows": 8, "tokens": 150, "group_size": 4, "gaps": gaps, "clock": clock, "threads": threads}
    assert expected.items() <= result["setting"].items()
    assert {"cpu", "cores", "gpu"} == result["hardware"].keys()
    assert {"python", "trl-multimodal-rft", "torch"} == result["versions"].keys()


@pytest.mark.parametrize("tokens", [16, 150])
def test_gaps_lie_within_completions(estimators, tokens):
    whole = estimators.build_batch(64, tokens, 4, gaps=False, device="cpu").mask
    gappy = estimators.build_batch(64, tokens, 4, gaps=True, device="cpu").mask
    assert (gappy <= whole).all()
    assert (gappy.sum(1) < whole.sum(1)).all()
    assert gappy[:, 0].all()
    last = whole.sum(1, keepdim=True) - 1
    assert gappy.gather(1, last).all()


def test_table_holds_every_ratio(estimators, capsys):
    result = estimators.main(SMALL)
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line and "ours" not in line}
    for name in FUNCTIONS:
        assert f"{result[f'{name}_ratio']:.2f}x" in rows[name]


def off_by_a_thousandth(result):
    return result * 1.001


def without_the_last_column(result):
    return result[..., :-1]


def not_a_number(result):
    return torch.cat([result[:1] * math.nan, result[1:]])


@pytest.mark.parametrize("fault", [off_by_a_thousandth, without_the_last_column, not_a_number])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_disagreement_is_an_error(estimators, name, fault, monkeypatch, capsys):
    function = "group_norm" if name == "group_statistics" else name
    right = getattr(estimators, function)

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        return (result[0], fault(result[1])) if name == "gae" else fault(result)

    monkeypatch.setattr(estimators, function, wrong)
    with pytest.raises(SystemExit, match=f"^{name}: ours and the usual way differ"):
        estimators.main([*SMALL, "--json"])
    assert capsys.readouterr().out == ""  # nothing was reported


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "10"], "multiple of `--group-size`"),
        (["--group-size", "1"], "at least 2"),
        (["--tokens", "8"], "at least 16"),
        (["--repetitions", "0"], "at least 1"),
        (["--device", "cuda", "--clock", "cpu"], "--clock wall"),
    ],
)
def test_unusable_options_are_refused(estimators, options, message, capsys):
    with pytest.raises(SystemExit):
        estimators.main([*SMALL, *options])
    assert message in capsys.readouterr().err
