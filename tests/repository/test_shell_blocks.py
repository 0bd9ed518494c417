# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The shell blocks of the pages run as they are written, on tiny models, with a few words that make them short."""

import shlex
import sys

import pytest
from datasets import Dataset
from helpers import forked
from helpers.first_run_page import commands
from helpers.folders import ROOT
from helpers.trainer_utils import saved
from huggingface_hub.cli.jobs import uv_app
from pip_extras import MEDIA


PAGES = {str(page.relative_to(ROOT)): page for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]}
# Beginnings of commands that don't run here, with the reason. `test_commands_are_there` reads the options of all.
NOT_RUN = {
    "pip ": "installs packages",
    "git ": "clones the repository",
    "hf ": "needs an account",
    "vllm ": "needs vLLM",
    "curl ": "asks a server",
    "make ": "trains for minutes",
    "python ": "trains for minutes, or downloads",
    "examples/": "trains for hours",
    "accelerate merge-weights": "needs the shards of a run on several GPUs",
    "accelerate launch examples/grpo_s": "trains for minutes",
    "trl-multimodal-rft chat": "serves a page",
    "trl-multimodal-rft families": "has a test",
    "trl-multimodal-rft prepare": "downloads, or has a test",
    "trl-multimodal-rft grpo --config qwen": "is a recipe, whose test is in tests/scripts",
    "trl-multimodal-rft estimate --config qwen": "downloads the config",
    "trl-multimodal-rft sft --model_name_or_path talking": "needs pretrained weights",
    "trl-multimodal-rft sft --model_name_or_path my-llama": "has a test in tests/extras/prepare",
    "trl-multimodal-rft grpo --config digits.yaml --model_name_or_path listening": "needs pretrained weights",
    "trl-multimodal-rft evaluate --pairs": "needs a judge or a reward model",
    "trl-multimodal-rft grpo --model_name_or_path Qwen/Qwen3-VL-4B-Instruct": "needs a template with tools",
    "trl-multimodal-rft compare --plain grpo --config run.yaml": "has a test",
}
FAMILIES = {"Audio": "qwen2_audio", "Qwen2.5-VL": "qwen2_5_vl"}
TRAINING = ("grpo", "sft", "dpo", "kto", "reward", "distillation")


def to_run(page):
    """Returns the commands of a page that run here, each as what its shell would run."""
    found = []
    for words in commands(page):
        job = words
        if words[:4] == ["hf", "jobs", "uv", "run"]:
            job_params = uv_app.commands["run"].make_context("run", words[4:]).params
            job = [job_params["script"], *job_params["script_args"]]
        line = shlex.join(job)
        reason = next((reason for start, reason in NOT_RUN.items() if line.startswith(start)), None)
        if reason is None:
            found.append(job)
    return found


def shortened(words):
    """Returns words that make a command short, and let it run without a GPU."""
    name = words[1] if words[0] == "trl-multimodal-rft" else "grpo"
    options = {word for word in words if word.startswith("--")}
    more = ["--model_name_or_path", "path/to/model"] * ("--model_name_or_path" not in options and "..." not in options)
    more = more if "--config" not in options and name != "evaluate" and "--model" not in options else []
    if name in TRAINING:
        more += ["--max_steps", "1", "--use_cpu", "--bf16", "False", "--report_to", "none", "--dry_run"]
        more += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1"]
        more += ["--dataset_name", "path/to/dataset"] * (not options & {"--dataset_name", "--config"})
        launch = ["--accelerate_config", "cpu", "--num_processes", "1", "--num_machines", "1"]
        more += launch * ("--accelerate_config" in options)
        more += ["--push_to_hub", "False"] * ("--push_to_hub" in options)
    if name == "grpo":
        more += ["--num_generations", "2", "--max_completion_length", "4"]
        more += ["--generation_batch_size", "2"] * ("--generation_batch_size" in options)
        more += ["--use_vllm", "False"] * ("--use_vllm" in options)
    if name == "distillation":
        more += ["--max_completion_length", "4"]
    if name in ("evaluate", "filter"):
        more += ["--max_completion_length", "4"]
    if name == "compare":
        more += [
            "--prompt",
            "What is it?",
            "--per_device_train_batch_size",
            "2",
            "--num_generations",
            "2",
            "--steps",
            "1",
        ]
    if "--dtype" in options:
        more += ["--dtype", "float32"]
    return more


def write_inputs(folder, words):
    """Writes the models and rows that a command names, of the family that its model's name has."""
    text = shlex.join(words)
    family = next((family for name, family in FAMILIES.items() if name in text), "qwen2_audio")
    family = "qwen2_5_vl" if "vision_tower" in text or words[1] == "compare" else family
    kind = "audio" if family == "qwen2_audio" else "image"
    folder.mkdir()
    models = {word for word in words if word.startswith("Qwen") or word in ("path/to/model", "judge", "reward-model")}
    for name in models | {"path/to/model"}:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(saved(family))
    media = [str(folder / f"{kind}{i}") for i in range(4)]
    for i in range(4):
        (folder / f"{kind}{i}").write_bytes(MEDIA[kind][1](i))
    columns = {"prompt": ["What is it? <answer>"] * 4, kind: media, "solution": ["a bird", "a cat"] * 2}
    named = [word for option, word in zip(words, words[1:], strict=False) if option == "--dataset_name"]
    for name in {*named, "path/to/dataset"}:
        path = folder / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            Dataset.from_dict(columns).to_json(path)
            (path.parent / "clips").mkdir()
        else:
            path.mkdir(exist_ok=True)
            Dataset.from_dict(columns).to_parquet(path / "train.parquet")
            Dataset.from_dict(columns).to_parquet(path / "test.parquet")
    (folder / "my_rewards.py").write_text("def brief(completions, **kwargs):\n    return [0.0] * len(completions)\n")


def run_here(words, folder):
    words = [str(folder) + word if word.startswith("/data") else word for word in words]
    if words[0] == "trl-multimodal-rft":
        code = "from trl_multimodal_rft.cli import main; main()"
        command = [sys.executable, "-c", code, *words[1:], *shortened(words)]
    else:  # `accelerate launch --config_file ... examples/script.py ...`
        script = next(i for i, word in enumerate(words) if word.startswith("examples/"))
        command = [sys.executable, str(ROOT / words[script]), *words[script + 1 :], *shortened(words)]
    run = forked.run(command, capture_output=True, cwd=folder)
    if words[1] == "filter" and "No row is left" in run.stderr:  # of a model with random weights
        return
    assert run.returncode == 0, (shlex.join(command), run.stdout[-500:], run.stderr[-2000:])


FIRST = "docs/first_run.md"
RUNNING = [(name, words) for name, page in PAGES.items() if name != FIRST for words in to_run(page)]


@pytest.mark.gate
@pytest.mark.parametrize(("page", "words"), RUNNING, ids=lambda value: value if isinstance(value, str) else value[1])
def test_block_runs(page, words, tmp_path):
    folder = tmp_path / "here"
    write_inputs(folder, words)
    run_here(words, folder)


def test_most_blocks_run():
    assert len(RUNNING) > 20
    every = [shlex.join(words) for page in PAGES.values() for words in commands(page)]
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in every)] == []
