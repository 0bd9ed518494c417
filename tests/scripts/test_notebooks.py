# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Executes the notebooks in their folder, with other values in the parameter cell and without the Hub.

An additional last cell writes the results for comparison.
"""

import json
import math
import os
import re
import runpy
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from helpers import forked, notebook_models
from helpers.folders import ROOT
from helpers.processes import PATIENCE
from safetensors.torch import load_file
from tasks import DIRECTIONS, spoken_digits


FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
REFRESH = runpy.run_path(str(FOLDER.parents[1] / "docs" / "refresh_notebooks.py"))
RELEASE = runpy.run_path(str(FOLDER.parents[1] / "docs" / "release.py"))
parameters_cell = REFRESH["parameters_cell"]


# In a forked process, where the kernel is forked, too
EXECUTE = f"""
import sys
import nbformat
from nbclient import NotebookClient
place = {{"metadata": {{"path": {str(FOLDER)!r}}}}}
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout={PATIENCE}, kernel_name="python3", resources=place).execute()
nbformat.write(notebook, sys.argv[1])
"""


def execute(name, result, *, after=None, instead=None, **parameters):
    """
    Runs a notebook, with the code in `after` after its cells and the one in `instead` for some of it. Returns it and
    its value of `result`.
    """
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    cell = parameters_cell(notebook)
    for variable in parameters:
        assert re.search(rf"^{variable}\b|, {variable} =", cell.source, re.MULTILINE), variable
    cell.source += "".join(f"\n{variable} = {value!r}" for variable, value in parameters.items())
    for text, code in (after or {}).items():
        (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source)
        cell.source = f"{cell.source}\n\n{code}"
    for text, code in (instead or {}).items():
        (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source)
        cell.source = cell.source.replace(text, code)
    written = Path(parameters["output_dir"], "result.json")
    code = f"import json, pathlib\n\npathlib.Path({str(written)!r}).write_text(json.dumps({result}))"
    notebook.cells.append(nbformat.v4.new_code_cell(code))
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%matplotlib inline"))  # which an import would set
    written.parent.mkdir(exist_ok=True)
    executed = written.with_suffix(".ipynb")
    nbformat.write(notebook, executed)
    run = forked.run([sys.executable, "-c", EXECUTE, str(executed)], capture_output=True)
    assert run.returncode == 0, run.stderr[-6000:]
    return nbformat.read(executed, as_version=4), json.loads(written.read_text())


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def printed(notebook):
    return "".join(output.text for output in outputs_of(notebook) if output.get("name") == "stdout")


def shown(notebook, kind):
    return [output.data[kind] for output in outputs_of(notebook) if kind in output.get("data", {})]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_as_committed(path):
    """They have the outputs of a run of this code from top to bottom, hide no warnings, and their links resolve."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = outputs_of(notebook)
    assert notebook.metadata["sources"] == REFRESH["sources"](notebook), "run `make notebooks`"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert shown(notebook, "image/png") and not any(output.get("name") == "stderr" for output in outputs)
    assert path.stat().st_size < 2**20 and not re.search(r"/(home|root|tmp|work)/", path.read_text())
    assert not any("warnings" in cell.source for cell in code)
    is_small = hasattr(notebook_models, path.stem)
    assert ("The outputs are those of these cells with a tiny" in notebook.cells[0].source) == is_small
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for link in re.findall(r"\]\(([^)#]+)", cell.source):
                assert link.startswith("https://") or (FOLDER / link).exists(), link


@pytest.mark.parametrize(
    "address", ["https://github.com/we/it", "https://github.com/we/it/", "https://github.com/we/it.git"]
)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_address_of_the_repository(path, address, tmp_path):
    """A command writes it into the badge and the first cell, and nothing else changes."""
    copy = tmp_path / "examples" / "notebooks" / path.name
    copy.parent.mkdir(parents=True)
    copy.write_text(path.read_text())
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    RELEASE["name_repository"](address, tmp_path)
    old, new = (nbformat.read(each, as_version=4) for each in (path, copy))
    page = f"https://colab.research.google.com/github/we/it/blob/main/examples/notebooks/{path.name}"
    assert f"]({page})" in new.cells[0].source and 'source = "https://github.com/we/it"' in new.cells[1].source
    assert [cell.source for cell in old.cells[2:]] == [cell.source for cell in new.cells[2:]]
    assert "<owner>" in path.read_text() and "<owner>" not in copy.read_text()
    readme = (tmp_path / "README.md").read_text()
    assert "git clone https://github.com/we/it trl" in readme and readme.count("[![CI]") == 1
    named = copy.read_text()
    RELEASE["name_repository"](address, tmp_path)  # once more changes nothing
    assert (tmp_path / "README.md").read_text() == readme and copy.read_text() == named


@pytest.mark.parametrize(
    "address", ["we/it", "https://gitlab.com/we/it", "https://github.com/we", "https://github.com/we/it/tree/main"]
)
def test_other_addresses_are_refused(address, tmp_path):
    with pytest.raises(SystemExit, match="isn't the address of a repository on GitHub"):
        RELEASE["name_repository"](address, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_first_cell_installs_the_package(path, tmp_path):
    """Where the package isn't found: from a clone of the address, in whose folder of notebooks the others run."""
    (cell,) = (cell for cell in nbformat.read(path, as_version=4).cells if "find_spec" in cell.source)
    site = tmp_path / "site"
    source = cell.source.replace('find_spec("trl_multimodal_rft")', 'find_spec("trl_multimodal_rft_isnt_here")')
    source = source.replace("%pip install", f"%pip install --no-deps --no-build-isolation --target {site}")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbformat.write(notebook, tmp_path / "first.ipynb")
    code = EXECUTE.replace(repr(str(FOLDER)), repr(str(tmp_path)))
    local = {  # git, and pip by it, read the address from here
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{ROOT.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/<owner>/<name>",
    }
    command = [sys.executable, "-c", code, str(tmp_path / "first.ipynb")]
    run = forked.run(command, env={**os.environ, **local}, capture_output=True)
    assert run.returncode == 0, run.stderr[-6000:]
    assert (site / "trl_multimodal_rft" / "__init__.py").exists()
    assert ("git clone" not in source) or (tmp_path / "trl-multimodal-rft" / "examples" / "tasks.py").exists()


def test_committed_run_is_what_the_text_says():
    notebook = nbformat.read(FOLDER / "grpo_audio.ipynb", as_version=4)
    before, after = re.search(r"accuracy: ([\d.]+)% before, ([\d.]+)% after", printed(notebook)).groups()
    assert float(before) == 0 and float(after) > 95


def test_committed_preferences_are_learned():
    """The table has accuracy and margin, which rise, and held-out voices are understood better."""
    notebook = nbformat.read(FOLDER / "dpo_audio.ipynb", as_version=4)
    *_, table = shown(notebook, "text/html")
    assert all(word in table for word in ("training", "held out", "accuracy", "margin"))
    rows = [re.findall(r"<td[^>]*>([\d.-]+)</td>", row) for row in table.split("<tr>")]
    (first, *_, last) = ([*map(float, row)] for row in rows if row)
    assert len(last) == 4 and last[0] > first[0] and last[1] > first[1] and last[2] > 0.8
    before, after = re.search(r"([\d.]+)% before, ([\d.]+)% after", printed(notebook)).groups()
    assert float(after) > float(before)


@pytest.mark.slow
def test_dpo_audio(tmp_path):
    """The cells of the table are those of the trainer's log."""
    notebook, result = execute(
        "dpo_audio",
        "{'history': trainer.state.log_history, 'table': table.to_numpy().tolist(), 'rows': len(test)}",
        instead={"per_device_train_batch_size=32, max_steps=30": "per_device_train_batch_size=8, max_steps=2"},
        **{"output_dir": str(tmp_path), "max_steps": 4, "batch_size": 8, "train_rows": 40, "test_rows": 20},
    )
    history = result["history"]
    trained, held_out = ([log for log in history if f"{kind}rewards/margins" in log] for kind in ("", "eval_"))
    assert [log["step"] for log in trained] == [1, 2, 3, 4] and [log["step"] for log in held_out] == [2, 4]
    for row, log in zip(result["table"], trained, strict=True):
        assert row[:2] == [log["rewards/accuracies"], log["rewards/margins"]]
    for row, log in zip(result["table"][1::2], held_out, strict=True):
        assert row[2:] == [log["eval_rewards/accuracies"], log["eval_rewards/margins"]]
    assert result["rows"] == 20 and "Right answers to held-out voices" in printed(notebook)
    assert len(shown(notebook, "image/png")) == 1


@pytest.mark.slow
def test_grpo_audio(tmp_path):
    notebook, result = execute(
        "grpo_audio",
        "{'history': trainer.state.log_history, 'answer': answer, 'wav': wav, 'after': metrics, 'accuracy': "
        "before.metrics['accuracy']}",
        **{"output_dir": str(tmp_path), "max_steps": 2, "batch_size": 32, "train_rows": 40, "test_rows": 20},
    )
    assert [entry["step"] for entry in result["history"] if "eval_accuracy" in entry] == [1, 2]
    assert all(math.isfinite(value) for entry in result["history"] for value in entry.values() if value is not None)
    assert result["after"]["rows"] == 20 and {"accuracy/seven", "accuracy/zero"} <= result["after"].keys()
    assert result["wav"] == spoken_digits(train_rows=40, test_rows=20)["test"][7]["audio"]["path"]
    assert isinstance(result["answer"], str)
    for name in ("model.safetensors", "processor_config.json", "training_curves.png"):
        assert (tmp_path / name).exists()
    output = printed(notebook)
    assert "accuracy_reward [1.0, 0.0, 0.0]" in output and "leading_answer_reward [1.0, 1.0, 0.0]" in output
    assert "self-check: largest differences" in output
    assert f"held-out accuracy: {result['accuracy']:.1%} before, {result['after']['accuracy']:.1%} after" in output
    # The curves and the bars; three recordings, and the one in the question
    assert len(shown(notebook, "image/png")) == 2
    assert sum("<audio" in html for html in shown(notebook, "text/html")) == 4


@pytest.mark.slow
def test_custom_advantage_and_reward(tmp_path):
    remember = (
        "calls, own = [], ranks\n\n\n"
        "def ranks(rewards, group_ids, **kwargs):\n"
        "    calls.append([rewards.tolist(), group_ids.tolist(), own(rewards, group_ids, **kwargs).tolist(), "
        "sorted(kwargs)])\n    return own(rewards, group_ids, **kwargs)"
    )
    look = (
        "[[np.asarray(row['image']).tolist(), points_at_light([question_about(row['image'])] * 5, said)] "
        "for row in test.select(range(20))]"
    )
    notebook, result = execute(
        "custom_advantage_and_reward",
        f"{{'calls': calls, 'seen': {look}, 'runs': {{name: t.state.log_history for name, t in trainers.items()}}, "
        "'rows': [len(result.rows) for result in results.values()]}",
        after={"def ranks(": remember},
        **{"output_dir": str(tmp_path), "max_steps": 2, "batch_size": 32, "rows": 8},
    )
    assert len(result["calls"]) == 2  # one generation batch per update, in one of the runs
    for rewards, groups, advantages, others in result["calls"]:
        assert len(rewards) == 32 and {"mask", "old_logps", "rewards_per_func"} <= {*others}
        for reward, group, advantage in zip(rewards, groups, advantages, strict=True):
            own = [r for r, g in zip(rewards, groups, strict=True) if g == group]
            place = sum(r < reward for r in own) - sum(r > reward for r in own)
            assert advantage == pytest.approx(math.sqrt(3) * place / 15)
    for pixels, (*rewards, elsewhere) in result["seen"]:
        pixels = np.array(pixels)
        brightest = np.array(np.unravel_index(pixels.argmax(), pixels.shape)) - 13.5
        cosines = [brightest @ heading / np.linalg.norm(brightest) for heading in DIRECTIONS.values()]
        assert rewards == pytest.approx(cosines, abs=0.3) and elsewhere == -1
    assert result["rows"] == [100, 100] and result["runs"].keys() == {"group_norm", "ranks"}
    for name, history in result["runs"].items():
        logs = [entry for entry in history if "reward" in entry]
        assert [entry["step"] for entry in logs] == [1, 2] and all(-1 <= entry["reward"] <= 1 for entry in logs)
        assert (tmp_path / name / "model.safetensors").exists()
    assert len(shown(notebook, "image/png")) >= 5


@pytest.mark.slow
def test_qwen2_audio_lora(tmp_path):
    """Runs the recipe on a tiny Qwen2-Audio, and twenty chirps in the columns of ESC-50."""
    values = notebook_models.qwen2_audio_lora(tmp_path)
    trained = Path(values["output_dir"])
    notebook, result = execute(
        "qwen2_audio_lora",
        "{'history': trainer.state.log_history, 'answers': [row['completions'] for row in answers.rows], "
        "'same': [row['completions'] for row in evaluate_trainer(trainer, test, accuracy_reward, settings).rows], "
        "'train': list(train['prompt']), 'solutions': list(test['solution']), 'columns': train.column_names}",
        **values,
    )
    assert result["columns"] == ["prompt", "audio", "solution"] and len(result["train"]) == 16
    assert result["solutions"] == ["chirping birds", "vacuum cleaner", "sea waves", "clock tick"]
    for (message,) in result["train"]:
        choices = re.fullmatch(r"What makes this sound: (.*)\? Answer .*", message["content"])[1].split(", ")
        assert len({*choices}) == 4 and {*choices} <= {name.replace("_", " ") for name in notebook_models.CATEGORIES}
    logs = [entry for entry in result["history"] if "reward" in entry]
    assert [entry["step"] for entry in logs] == [1, 2] and all(math.isfinite(entry["loss"]) for entry in logs)
    assert [entry["step"] for entry in result["history"] if "eval_accuracy" in entry] == [1, 2]
    # Only the language model has the adapter, which gives the results of the trained model
    names = {*load_file(trained / "adapter_model.safetensors")}
    assert names and all(re.search(r"language_model.*\.[qkvo]_proj\.lora_", name) for name in names)
    assert result["answers"] == result["same"][:3]
    assert (trained / "checkpoint-2" / "adapter_model.safetensors").exists()
    assert (trained / "evaluation" / "step-2" / "metrics.json").exists()
    assert "PeftModel" in (trained / "README.md").read_text()
    assert len(shown(notebook, "image/png")) == 1


@pytest.mark.slow
def test_qwen2_5_vl_t4(tmp_path):
    """Runs the notebook for a T4 on a small Qwen2.5-VL in 4 bits, and pictures in the columns of Geometry3K."""
    values = notebook_models.qwen2_5_vl_t4(tmp_path)
    trained = Path(values["output_dir"])
    notebook, result = execute(
        "qwen2_5_vl_t4",
        "{'history': trainer.state.log_history, 'answers': [row['completions'] for row in answers.rows], "
        "'same': [row['completions'] for row in evaluate_trainer(trainer, test, accuracy_reward, settings).rows], "
        "'four': sum(type(module).__name__ == 'Linear4bit' for module in trainer.model.modules())}",
        **values,
    )
    logs = [entry for entry in result["history"] if "reward" in entry]
    assert [entry["step"] for entry in logs] == [1, 2] and all(math.isfinite(entry["loss"]) for entry in logs)
    assert result["four"] > 10 and result["answers"] == result["same"][:3]
    names = {*load_file(trained / "adapter_model.safetensors")}
    assert names and all(re.search(r"language_model.*\.[qkvo]_proj\.lora_", name) for name in names)
    assert "PeftModel" in (trained / "README.md").read_text() and len(shown(notebook, "image/png")) == 2
