# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Benchmarks of lmms-eval and EvalScope: readers of what a real run of each wrote, and refused command lines."""

import json
import re
import shutil
from pathlib import Path

import pytest

from trl_multimodal_rft.cli import main
from trl_multimodal_rft.evaluation import EvaluationResult, paired_interval, wilson_interval
from trl_multimodal_rft.evaluation.result import gains, summary
from trl_multimodal_rft.extras.harness_run import flags
from trl_multimodal_rft.extras.harnesses import harness_command, harness_result, read_evalscope, read_lmms


# Eight questions, of which five have the model's own completion as the answer
STORED = Path(__file__).with_name("harness_results")
RIGHT = [True] * 5 + [False] * 3
READERS = {"lmms": (read_lmms, "exact_match"), "evalscope": (read_evalscope, "Rouge-L-R")}
SETTINGS = {"confidence": 0.9}


@pytest.fixture
def copy(tmp_path):
    """Returns a function that copies a harness's files, with a text in place of another."""

    def copied(name: str, before: str = "", after: str = "") -> Path:
        folder = shutil.copytree(STORED / name, tmp_path / name)
        for path in folder.rglob("*.json*"):
            path.write_text(path.read_text().replace(before, after) if before else path.read_text())
        return folder

    return copied


@pytest.mark.parametrize("name", READERS)
def test_scores_of_rows_give_the_figure_of_the_harness_with_an_interval(name, tmp_path):
    read, metric = READERS[name]
    result = harness_result(*read(STORED / name), SETTINGS)
    low, high = wilson_interval(5, 8, 0.9)
    assert result.metrics == {metric: 5 / 8, f"{metric}_low": low, f"{metric}_high": high, "rows": 8}
    assert [row["correct"] for row in result.rows] == [[right] for right in RIGHT]
    assert [row["prompt"].removeprefix("<image>") for row in result.rows] == [
        f"Which colour is it? {i}" for i in range(8)
    ]
    assert result.rows[5]["solution"] == "none" and result.rows[0]["completions"] == [result.rows[0]["solution"]]
    assert f"{metric} 62.5 % (90 %: {100 * low:.1f}" in summary(result)
    named = [{**row, "score/accuracy": row[f"score/{metric}"]} for row in result.rows]
    assert "accuracy 62.5 %" in summary(harness_result(named, {"accuracy": 5 / 8}, SETTINGS))
    # Another model, whose first answer is wrong
    result.save(tmp_path)
    result.rows[0] |= {f"score/{metric}": 0.0, "correct": [False]}
    low, high = paired_interval([-1] + [0] * 7, 0.9)
    expected = {f"{metric}_gain": -1 / 8, f"{metric}_gain_low": low, f"{metric}_gain_high": high}
    assert gains(result, tmp_path) == pytest.approx(expected)
    result.rows[0]["prompt"] = "?"
    with pytest.raises(ValueError, match="has other prompts, first in row 0; name the `output_dir` of"):
        gains(result, tmp_path)


def test_gains_of_our_own_results(tmp_path):
    """Rows of several samples, one of which isn't scored."""
    correct = [[True, False], [True, True], [None, True]]
    rows = [{"prompt": str(i), "correct": each} for i, each in enumerate(correct)]
    result = EvaluationResult({"accuracy": 0.75, "accuracy_low": 0.5}, rows, SETTINGS)
    result.save(tmp_path)
    rows[0]["correct"] = [True, True]
    assert gains(result, tmp_path)["accuracy_gain"] == 0.25
    for column, first, differs in (("solution", "a", "solutions"), ("fingerprint", 1, "media")):
        for row in rows:
            row[column] = None
        rows[1][column] = first
        assert gains(result, tmp_path)["accuracy_gain"] == 0.25  # the other is older than the column
        result.save(tmp_path / column)
        rows[1][column] = 2 if column == "fingerprint" else "b"
        with pytest.raises(ValueError, match=f"has other {differs}, first in row 1; name the `output_dir` of"):
            gains(result, tmp_path / column)


def doubled(lines: str) -> str:
    return lines + lines


def halved(lines: str) -> str:
    return "".join(lines.splitlines(keepends=True)[:4])


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(("change", "message"), [(doubled, "row 0 of .* more than once"), (halved, "4 of 8 rows of")])
def test_samples_that_are_missing_or_repeated(name, change, message, copy):
    folder = copy(name)
    [path] = folder.rglob("*.jsonl")
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=f"{message}.*; run it again"):
        READERS[name][0](folder)


@pytest.mark.parametrize("figure", ["NaN", "Infinity", "-Infinity"])
def test_figures_that_are_no_numbers(figure, copy):
    folder = copy("lmms", '"exact_match,none": 0.625', f'"exact_match,none": {figure}')
    with pytest.raises(ValueError, match="which isn't finite; its log says why"):
        harness_result(*read_lmms(folder), SETTINGS)


@pytest.mark.parametrize(
    ("value", "figure", "metrics"),
    [
        ('{"id": 7, "score": 1.0}', 62.5, {"exact_match", "exact_match_low", "exact_match_high"}),  # a percentage
        ("1.0", 0.7, {"exact_match"}),  # no mean of the rows, such as an F1
        ('{"id": 7}', 0.625, {"exact_match"}),  # no score
        ("3.0", 9 / 8, {"exact_match"}),  # beyond 1
    ],
)
def test_an_interval_needs_scores_of_rows(copy, value, figure, metrics):
    folder = copy("lmms", '"exact_match": 1.0', f'"exact_match": {value}')
    [path] = folder.rglob("*_results.json")
    path.write_text(path.read_text().replace('none": 0.625', f'none": {figure}'))
    result = harness_result(*read_lmms(folder), SETTINGS)
    assert {*result.metrics} == {*metrics, "rows"}
    assert result.metrics["exact_match"] == (0.625 if figure == 62.5 else figure)


def test_rows_without_an_answer_or_a_score_are_refused(copy, tmp_path):
    failed = '"filtered_resps": "[LMMS_EVAL_REQUEST_FAILED after 5 retries] Invalid URL"'
    with pytest.raises(ValueError, match=r"no answer to row 5 of 'eight': \[LMMS.*Invalid URL\.$"):
        read_lmms(copy("lmms", '"filtered_resps": "gre', failed + ', "old": "gre'))
    with pytest.raises(ValueError, match=r"couldn't score row 0 of 'general_vqa_eight': LookupError: no punkt"):
        read_evalscope(
            copy("evalscope", '"metadata": {}', '"metadata": {"metric_errors": {"Rouge": "LookupError: no punkt"}}')
        )
    assert all(read(tmp_path / "empty") == ([], {}) for read, _ in READERS.values())


def test_words_of_a_command_line(tmp_path):
    words = " ".join(harness_command("lmms", "mmstar", "checkpoint", "http://a:1", tmp_path))
    assert re.match(r"lmms-eval eval --model openai --model_args model=checkpoint,base_url=http://a:1/v1 ", words)
    words = " ".join(harness_command("evalscope", "mmau", "checkpoint", "http://a:1", tmp_path))
    assert re.search(r" --model checkpoint --api-url http://a:1/v1 --datasets mmau ", words)
    options = {"a": 1, "b": True, "c": None, "d": False, "e": {"x": "y z"}, "f": "g; h"}
    assert flags(options) == ["--a", "1", "--b", "--e", json.dumps({"x": "y z"}), "--f", "g; h"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lm:mmstar --model_name_or_path m", "is 'lm:mmstar'; before the colon, write one of lmms, evalscope"),
        ("lmms:mmstar", "Set `--model_name_or_path` to the model to serve"),
        (
            "lmms:mmstar --model_name_or_path m --num_samples 4 --temperature 1",
            "`--(num_samples|temperature)` has no effect on",
        ),
        ("lmms:mmstar --model_name_or_path m", "There is no program `vllm`. Install vLLM, or set `--server_url`"),
        (
            "lmms:mmstar --model_name_or_path m --server_url http://a",
            "There is no program `uvx`. Run `pip install uv`",
        ),
    ],
)
def test_refused_command_lines(words, message, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["evaluate", "--output_dir", str(tmp_path), "--benchmark", *words.split()])
    assert re.search(f"error: .*{message}", capsys.readouterr().err)
