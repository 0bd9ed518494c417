# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""lmms-eval and EvalScope themselves, which `uvx` installs, on tasks of eight rows (`make test-extras`)."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from datasets import Audio, Dataset, Image, load_dataset
from helpers.chats import audio, image
from helpers.files import image_file, sound_file
from serving import SHIM

from trl_multimodal_rft.cli import main


pytestmark = pytest.mark.slow
PICTURES = [image_file(image(56, 56, seed=i)["image"]) for i in range(8)]
SOUNDS = [sound_file(audio(0.5, i)["audio"]) for i in range(8)]
LETTERS = (
    "Listen to the audio and answer the following multiple-choice question. Respond with only the letter (A, B, C,"
)
LETTERS += " or D) of the correct option.\nWhat?\nA. x\nThe best answer is:"
# Released tasks of lmms-eval: where their rows are, medium, other columns, request, tokens and metric
RELEASED = {
    "chartqa": (
        ("lmms-lab-encoder/ChartQA", "image", Image(), PICTURES, {"type": "human_test"}),
        ("What?\nAnswer the question with a single word.", 16, "relaxed_overall"),
    ),
    "mmar": (
        ("ngqtrung/mmar", "audio", Audio(), SOUNDS, {"choices": ["A. x"]}),  # the answer, if none has a letter
        (LETTERS, 128, "mmar_accuracy"),
    ),
}


def ask(model: Path, server: str, medium: bytes, text: str, max_tokens: int) -> tuple[list[dict], str]:
    """Returns messages and the server's answer."""
    name, kind = ("image_url", "image/png") if medium in PICTURES else ("audio_url", "audio/wav")
    block = {"type": name, name: {"url": f"data:{kind};base64,{base64.b64encode(medium).decode()}"}}
    body = {"model": str(model), "max_tokens": max_tokens, "temperature": 0}
    body["messages"] = [{"role": "user", "content": [block, {"type": "text", "text": text}]}]
    answer = requests.post(f"{server}/v1/chat/completions", json=body, timeout=60).json()
    return body["messages"], answer["choices"][0]["message"]["content"].strip()


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
    metrics = json.loads((folder / "metrics.json").read_text())["metrics"]
    return metrics, [text.strip() for [text] in rows["completions"]]


@pytest.mark.parametrize("task", RELEASED)
def test_lmms_eval_sends_media(task, omni, server, tmp_path, monkeypatch, capsys):
    """Its rows lie in the working directory; completions are the server's answers to requests with the files."""
    (path, column, feature, files, more), (text, max_tokens, metric) = RELEASED[task]
    asked = [ask(omni, server, file, text, max_tokens)[1] for file in files]
    answers = asked[:5] if task == "chartqa" else ["A"] * 5
    rows = [
        {"question": "What?", column: {"bytes": file}, "answer": answer, **more}
        for file, answer in zip(files, [*answers, *"BBB"], strict=True)
    ]
    Dataset.from_list(rows).cast_column(column, feature).to_parquet(tmp_path / path / "test.parquet")
    monkeypatch.chdir(tmp_path)
    where = ["--model_name_or_path", str(omni), "--server_url", server]
    metrics, completions = evaluate(f"lmms:{task}", tmp_path / "results", *where)
    assert completions == asked and len({*asked}) > 1
    assert metrics[metric] == 5 / 8 and metrics[f"{metric}_low"] < 0.4 and metrics["rows"] == 8
    for name, message in (("no_task", "results: ValueError: Tasks not found: no_task"), (task, "no answer to row 0")):
        words = ["--harness_args", '{"gen_kwargs": "max_new_tokens=1000"}']  # more than the model's context
        with pytest.raises(SystemExit):
            main(["evaluate", "--benchmark", f"lmms:{name}", *where, *words, "--output_dir", str(tmp_path)])
        assert message in capsys.readouterr().err


def test_evalscope_asks_a_server_that_evaluate_starts(omni, server, tmp_path):
    asked = [ask(omni, server, file, "What is it?", 4) for file in PICTURES]
    rows = [{"messages": messages, "answer": answer} for messages, answer in asked[:5]]
    rows += [{"messages": messages, "answer": "none"} for messages, _ in asked[5:]]
    (path := tmp_path / "vqa" / "images.jsonl").parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"local_path": str(path.parent), "subset_list": ["images"], "metric_list": ["Rouge"]}
    options = {"dataset-args": {"general_vqa": options}, "generation-config": {"max_tokens": 4, "temperature": 0}}
    served = {"dtype": "float32", "enforce-eager": True, "gpu-memory-utilization": 0.3, "max-model-len": 512}
    words = ["--model_name_or_path", str(omni), "--server_args", json.dumps(served)]
    metrics, _ = evaluate("evalscope:general_vqa", tmp_path, *words, "--harness_args", json.dumps(options))
    assert metrics["Rouge-L-R"] == 5 / 8 and metrics["Rouge-L-R_high"] > 0.8 and metrics["rows"] == 8
    assert "Shutting down" in next(tmp_path.rglob("server.txt")).read_text()
