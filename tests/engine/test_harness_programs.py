# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""lmms-eval and EvalScope themselves, which `uvx` installs, on a task of eight rows (`make test-extras`)."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from datasets import Audio, Dataset, load_dataset
from helpers.chats import audio, image
from helpers.files import image_file, sound_file
from serving import SHIM

from trl_multimodal_rft.cli import main


pytestmark = pytest.mark.slow
TASK = """
task: images
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/images.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.media
doc_to_text: question
doc_to_target: answer
generation_kwargs: {{max_new_tokens: 4}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
# What lmms-eval asks about a row of MMAR
MMAR = "Listen to the audio and answer the following multiple-choice question. Respond with only the letter (A, B, C, or"
MMAR += " D) of the correct option.\nWhat?\nA. x\nThe best answer is:"


def part(kind: str, data: bytes) -> dict:
    name = kind.partition("/")[0] + "_url"
    return {"type": name, name: {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}


def ask(model: Path, server: str, *content: dict, max_tokens: int = 4) -> tuple[list[dict], str]:
    """Returns messages and the server's answer."""
    body = {"model": str(model), "max_tokens": max_tokens, "temperature": 0}
    body["messages"] = [{"role": "user", "content": content}]
    answer = requests.post(f"{server}/v1/chat/completions", json=body, timeout=60).json()
    return body["messages"], answer["choices"][0]["message"]["content"].strip()


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def tasks(omni, server, tmp_path_factory):
    """Returns a folder with a task of each harness: the server's completion is the answer to five of eight rows."""
    folder, rows, messages = tmp_path_factory.mktemp("tasks"), [], []
    for i in range(8):
        (path := folder / f"{i}.png").write_bytes(data := image_file(image(56, 56, seed=i)["image"]))
        question = {"type": "text", "text": f"What is it? {i}"}
        asked, answer = ask(omni, server, part("image/png", data), question)
        answer = answer if i < 5 else "none"
        rows.append({"media": str(path), "question": question["text"], "answer": answer})
        messages.append({"messages": asked, "answer": answer})
    write_jsonl(folder / "images.jsonl", rows)
    write_jsonl(folder / "vqa" / "images.jsonl", messages)
    (folder / "images.yaml").write_text(TASK.format(folder=folder))
    (folder / "utils.py").write_text("def media(row):\n    return [row['media']]\n")
    return folder


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    """Puts this environment's `uvx` and a `vllm` on the path, and tells uv where pip looks for packages."""
    vllm = tmp_path / "bin" / "vllm"
    vllm.parent.mkdir()
    vllm.write_text(
        f'#!/bin/sh\nshift\nexec {sys.executable} {SHIM} -m vllm.entrypoints.openai.api_server --model "$@"\n'
    )
    vllm.chmod(0o755)
    (vllm.parent / "uvx").symlink_to(Path(sys.executable).with_name("uvx"))
    monkeypatch.setenv("PATH", f"{vllm.parent}:/usr/bin:/bin")
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    for line in listed.stdout.splitlines():
        option, _, value = line.partition("=")
        names = {"index-url": "UV_DEFAULT_INDEX", "find-links": "UV_FIND_LINKS", "cert": "SSL_CERT_FILE"}
        if name := names.get(option.rpartition(".")[2]):
            monkeypatch.setenv(name, value.strip("'"))


def evaluate(benchmark, folder, *words):
    main(["evaluate", "--benchmark", benchmark, "--output_dir", str(folder), *words])
    rows = load_dataset("parquet", data_files=str(folder / "rows.parquet"), split="train")
    assert rows["correct"] == [[True]] * 5 + [[False]] * 3
    return json.loads((folder / "metrics.json").read_text())["metrics"], [text.strip() for [text] in rows["completions"]]


def test_lmms_eval_asks_a_server(omni, server, tasks, tmp_path, capsys):
    where = ["--model_name_or_path", str(omni), "--server_url", server]
    where += ["--harness_args", json.dumps(options := {"include_path": str(tasks)})]
    metrics, _ = evaluate("lmms:images", tmp_path, *where)
    assert metrics["exact_match"] == 5 / 8 and metrics["exact_match_low"] < 0.4 and metrics["rows"] == 8
    options["gen_kwargs"] = "max_new_tokens=1000"  # more than the model's context
    for task, message in (
        ("no_task", "has no results: ValueError: Tasks not found: no_task"),
        ("images", "no answer to row 0"),
    ):
        words = [*where[:-1], json.dumps(options), "--output_dir", str(tmp_path)]
        with pytest.raises(SystemExit):
            main(["evaluate", "--benchmark", f"lmms:{task}", *words])
        assert message in capsys.readouterr().err


def test_lmms_eval_sends_sounds(omni, server, tmp_path, monkeypatch):
    """Its released task finds rows in the folder; their sounds give the completions that the server gives of files."""
    files = [sound_file(audio(0.5, i)["audio"]) for i in range(8)]
    row = {"question": "What?", "choices": ["A. x"]}  # answers without a letter are one of the choices, at random
    rows = [{**row, "audio": {"bytes": file}, "answer": "AB"[i > 4]} for i, file in enumerate(files)]
    dataset = Dataset.from_list(rows).cast_column("audio", Audio())
    dataset.to_parquet(tmp_path / "ngqtrung" / "mmar" / "test.parquet")
    monkeypatch.chdir(tmp_path)
    metrics, completions = evaluate(
        "lmms:mmar", tmp_path / "results", "--model_name_or_path", str(omni), "--server_url", server
    )
    question = {"type": "text", "text": MMAR}
    asked = [ask(omni, server, part("audio/wav", file), question, max_tokens=128) for file in files]
    assert completions == [answer for _, answer in asked] and len({*completions}) > 1
    assert metrics["mmar_accuracy"] == 5 / 8 and metrics["mmar_accuracy_low"] < 0.4 and metrics["rows"] == 8


def test_evalscope_asks_a_server_that_evaluate_starts(omni, tasks, tmp_path):
    options = {"local_path": str(tasks / "vqa"), "subset_list": ["images"], "metric_list": ["Rouge"]}
    options = {"dataset-args": {"general_vqa": options}, "generation-config": {"max_tokens": 4, "temperature": 0}}
    served = {"dtype": "float32", "enforce-eager": True, "gpu-memory-utilization": 0.3, "max-model-len": 512}
    words = ["--model_name_or_path", str(omni), "--server_args", json.dumps(served)]
    metrics, _ = evaluate("evalscope:general_vqa", tmp_path, *words, "--harness_args", json.dumps(options))
    assert metrics["Rouge-L-R"] == 5 / 8 and metrics["Rouge-L-R_high"] > 0.8 and metrics["rows"] == 8
    assert "Shutting down" in next(tmp_path.rglob("server.txt")).read_text()
