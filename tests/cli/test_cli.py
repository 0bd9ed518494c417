# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The command `trl-multimodal-rft`, and the output of `families`."""

import argparse
import dataclasses
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from argparse import SUPPRESS
from collections import Counter
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path

import psutil
import pytest
import torch
import transformers
import yaml
from datasets import Dataset
from families_report import report
from families_report.measure import Measurement, measure
from families_report.report import HEADER, MARK, measurable
from families_report.tiny_media import encode
from families_report.tiny_models import tiny_model
from helpers import forked
from helpers.families import FAMILIES
from helpers.first_run_page import RECORDINGS
from helpers.folders import ROOT
from helpers.marks import OUTSIDE
from helpers.processes import PATIENCE
from helpers.trainer_utils import saved

import trl_multimodal_rft
from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer, MultimodalPPOTrainer, cli, data
from trl_multimodal_rft.algorithms.critic import ptx_loss
from trl_multimodal_rft.checks.engine_check import EngineCheck
from trl_multimodal_rft.cli import COMMANDS, main, options, parsers, preflight
from trl_multimodal_rft.cli.errors import input_error
from trl_multimodal_rft.cli.options import FIRST_OPTIONS, GROUPS, table
from trl_multimodal_rft.cli.preflight import check_batch, check_functions, process_count
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward.masks import sharing_obstacle
from trl_multimodal_rft.spelling import REMOVED, did_you_mean
from trl_multimodal_rft.trainers.checkpoints.manifest import verify_checkpoint


def test_entry_point_and_layouts_are_those_of_the_package():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, name = scripts["trl-multimodal-rft"].split(":")
    assert getattr(import_module(module), name) is main
    assert {*parsers.LAYOUTS.values()} == {name for name in data.__all__ if name.startswith("load_")}


HEAVY = ("torch", "transformers", "trl", "datasets", "accelerate", "numpy", "gradio")
# Runs the command for each command line of standard input, and prints its output and imports
RUNS = f"""
import contextlib, io, json, os, sys
from trl_multimodal_rft.cli import main
found = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as exit:
            code = exit.code
    found.append([code, out.getvalue(), err.getvalue(), [name for name in {HEAVY} if name in sys.modules]])
print(json.dumps(found), flush=True)
os._exit(0)  # clearing all modules takes seconds
"""


def runs(lines, cwd):
    """Returns exit code, output, errors and heavy modules for each command line, in one new process."""
    options = {"cwd": cwd, "env": {**os.environ, "COLUMNS": "120"}, "check": True}
    found = subprocess.run(
        [sys.executable, "-c", RUNS], input=json.dumps(lines), capture_output=True, text=True, **options
    )
    return json.loads(found.stdout)


def test_help_imports_nothing_heavy(tmp_path):
    lines = [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in COMMANDS),
        ["check", "--help", "ignored"],
        ["check", "--help_all"],
        ["dpo", "--help", "rejected_view"],
        ["grpo", "--help=num-generations"],
        ["grpo", "--help", "lora"],
        ["grpo", "--help-all"],
    ]
    found = runs(lines, tmp_path)
    for words, (code, out, err, heavy) in zip(lines, found, strict=True):
        assert (code, err, heavy) == (0, "", []), words
        assert (
            words[0].startswith("-") or len(words) == 3 or "=" in words[-1] or f"trl-multimodal-rft {words[0]}" in out
        )
    top, version, *_, full = [out for _, out, _, _ in found]
    assert all(command in top for command in COMMANDS)
    assert version == f"trl-multimodal-rft {trl_multimodal_rft.__version__}\n"
    short = found[lines.index(["grpo", "--help"])][1]
    titles = [short.index(f"\n{GROUPS[name]}:\n") for name in ("script", "model", "multimodal", "trl")]
    assert titles == sorted(titles) and "--num_generations " in short and "--self_check [BOOL]" in full
    for option in ("--adam_beta1", "--machine_rank"):
        assert option not in short and option in full
    assert "--dataset_name" in short and "(default: train)" in full
    for (name, *words), (_, out, _, _) in zip(lines, found, strict=True):
        is_short = words == ["--help"] and (name in cli.LAUNCHED or name in ("check", "estimate"))
        assert not is_short or len(out.splitlines()) <= 80, name
    check = found[lines.index(["check", "--help"])][1]
    assert check.index("\n  --dataset_name ") < check.index("\n  --config ") < check.index("\n  --trust_remote_code ")
    explained = found[lines.index(["check", "--help", "ignored"])][1]
    assert explained.startswith("--ignored_media_columns TEXT") and "reward functions read" in explained
    assert "reward functions read" in found[lines.index(["check", "--help_all"])][1]
    assert found[-3][1].lstrip().startswith("options:\n  --num_generations INT")
    assert "`anchor_coef`" in found[-4][1], "a description is cut"
    lora = found[-2][1]
    assert "--lora_modules_to_save TEXT [TEXT ...]" in lora and "--beta" not in lora


# Options that recipes set to what was the default when their sources were written
OLDER_DEFAULTS = {"use_bias_correction_kl", "vllm_importance_sampling_correction", "kl_estimator", "top_p", "top_k"}
OLDER_DEFAULTS |= {"lora_dropout", "dynamic_sampling_range"}


def test_first_options_are_those_of_the_examples():
    """
    Each option that the examples, the first pages and a tenth of the recipes use stands in the first block of its
    commands' help, and nothing in it is unused.
    """
    recipes = [yaml.safe_load(path.read_text()) for path in (ROOT / "trl_multimodal_rft" / "recipes").rglob("*.yaml")]
    counts = Counter(name for recipe in recipes for name in recipe)
    first = [ROOT / "README.md", ROOT / "docs" / "README.md", RECORDINGS, *(ROOT / "examples").glob("*.py")]
    texts = [page.read_text() for page in first]
    shells = [code for text in texts for code in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)]
    files = [code for text in texts for code in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    used = {*re.findall(r"--(\w+)", " ".join(shells)), *(name for code in files for name in yaml.safe_load(code))}
    common = {name for name, count in counts.items() if count >= len(recipes) / 10} - OLDER_DEFAULTS
    assert len(used) > 25 and len(common) > 30 and {*FIRST_OPTIONS} <= used | {*counts, "num_processes"}
    for command in COMMANDS:
        parser = cli._parser(command)
        block, *_ = (each for each in parser._action_groups if each.title == "options")
        taken = {each.dest for each in parser._actions}
        shown = {each.dest.removeprefix("launch ") for each in block._group_actions if each.help != SUPPRESS}
        assert ((used | common) & taken) - shown <= {"model_name_or_path"}, command  # `chat` takes it without its name


MODEL = ["--model_name_or_path", "org/model"]
ROWS = ["--dataset_name", "org/rows"]
REWARD = [*MODEL, *ROWS, "--reward_funcs"]
BATCH = ["grpo", *MODEL, *ROWS, "--per_device_train_batch_size", "2", "--num_generations", "4"]
FILES = {
    "number.yaml": "max_steps: 3\nlearning_rate: fast\n",
    "steps.yaml": "max_steps: [3]\n",
    "key.yaml": "max_steps: 3\n\nnum_generation: 4\n",
    "removed.yaml": "evaluation_strategy: steps\n",
    "twice.yaml": "max-steps: 3\nmax_steps: 4\n",
    "tabs.yaml": "max_steps: 3\n\tseed: 1\n",
    "list.yaml": "- max_steps\n",
    "bomb.yaml": "a0: &a0 [x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(40)),
    "endless.yaml": "max_steps: 3\nmodel_init_kwargs: &x {a: [*x]}\n",
    "root.yaml": "&x\nmax_steps: 3\nmodel_init_kwargs: *x\n",
    "deep.yaml": "max_steps: " + "[" * 5000 + "]" * 5000,
    "inner.yaml": "model_init_kwargs:\n  dtype: float32\n  dtype: auto\n",
    "choice.yaml": "max_steps: 3\neval_strategy: stepz\n",
    "launch.yaml": "num_processes: two\n",
    "folder/config.json": "{}",
    "check.yaml": "max_prompt_length: long\nlearning_rate: 1\n",
}
# Expected words of the message, for each command line
MISTAKES = [
    (["gpro"], 2, "no command 'gpro'; `--help` lists the commands. Did you mean `grpo`?"),
    (["gpro", "--config", "digits.yaml"], 2, "no command 'gpro'; `--help` lists the commands. Did you mean `grpo`?"),
    (["grpo", *ROWS], 1, "set `--model_name_or_path`"),
    (["rloo", *MODEL], 1, "set `--dataset_name`"),
    (["filter", *MODEL, *ROWS], 1, "set `--ablate`"),
    (["filter", *MODEL, "--by", "accuracy", "--dataset_name", "rows.jsonl"], 1, "There is no file or folder"),
    (["check", "--dataset", "x", "--model", "y"], 2, "no option `--dataset`. Did you mean `--dataset_name`?"),
    (["estimate", "--model", "y"], 2, "no option `--model`. Did you mean `--model_name_or_path`?"),
    (["check"], 2, "the following arguments are required: --dataset_name, --model_name_or_path"),
    (["chat"], 2, "one of the arguments model_name_or_path is required"),
    (["prepare", "avqaa", "x", "--output_dir", "y"], 2, "invalid choice: 'avqaa' (choose from 'avqa', "),
    (["grpo", *MODEL, *ROWS, "--num_generation", "4"], 2, "Did you mean `--num_generations`?"),
    (["grpo", *MODEL, *ROWS, "--max_prompt_length=4"], 2, "It was removed: remove long prompts from the dataset"),
    (["ppo", *MODEL, *ROWS, "--no_cuda"], 2, "It was removed: use `--use_cpu`."),
    (
        ["ppo", *MODEL, *ROWS, "--lam=0.9"],
        2,
        "It was removed: use `--advantage_estimator` with a setting, such as 'gae",
    ),
    (
        ["grpo", *MODEL, *ROWS, '--reward_recipe={"a": {}, "a": {}}'],
        2,
        'json value: \'{"a": {}, "a": {}}\' (it sets `a` twice',
    ),
    (["check", *MODEL, *ROWS, '--chat_template_kwargs={"a": 1, "a": 2}'], 2, "(it sets `a` twice; remove one)"),
    (["grpo", *MODEL, *ROWS, "--reward_funcs", "length_reward(bonus=1, bonus=2)"], 1, "it sets `bonus` twice; remove"),
    (["grpo", *MODEL, *ROWS, "--max_steps", "few"], 2, "--max_steps: invalid int value: 'few'"),
    (["grpo", *MODEL, *ROWS, "--temperature", "0"], 2, "above 0, got 0.0; set a low temperature such as 0.1"),
    (["grpo", *MODEL, *ROWS, "--max_steps", "2", "3"], 2, "unrecognized arguments: 3"),
    (["grpo", *MODEL, *ROWS, "--learning_rate=-1e-5"], 2, "--learning_rate: it must be at least 0, got -1e-05"),
    (["grpo", *MODEL, *ROWS, "--top_p", "1.5"], 2, "--top_p: it must be above 0 and at most 1, got 1.5"),
    (
        ["grpo", *MODEL, *ROWS, "--vllm_mode", "servers"],
        2,
        "'server', 'colocate'). Did you mean `server`?",
    ),
    (["grpo", *MODEL, *ROWS, "--max_steps", "0"], 1, "`--max_steps 0` takes no step; set it above 0"),
    (["grpo", *MODEL, *ROWS, "--num_processes", "two"], 2, "--num_processes: invalid int value: 'two'"),
    (["grpo", *MODEL, *ROWS, "--accelerate_config", "tpu"], 1, "no file 'tpu'. This package has cpu, deepspeed_zero1"),
    (["grpo", "--config", "qwen2_audio_7b/avqa"], 1, "Did you mean `qwen2_audio_7b/avqa_grpo`?"),
    (["grpo", "--config", "geometry3k_cisp"], 1, "Did you mean `qwen2_5_vl_7b/geometry3k_cispo`?"),
    (["grpo", "--config", "geometry3k_ppo"], 1, "Did you mean `qwen2_5_vl_3b/geometry3k_ppo`?"),
    (["grpo", "--config", "numbr.yaml"], 1, "There is no file or folder 'numbr.yaml'; '"),
    (["grpo", "--config", "qwen2_audio_7b/avqa_grpo"], 1, "no folder 'avqa' with the rows of 'qwen2_audio_7b/avqa_g"),
    (
        ["check", *MODEL, "--config", "qwen2_audio_7b/avqa_grpo"],
        1,
        "make it: trl-multimodal-rft prepare avqa train",
    ),
    (["grpo", "--config", "number.yaml"], 2, "number.yaml: argument --learning_rate: invalid float value: 'fast'"),
    (["grpo", "--config", "steps.yaml"], 2, "steps.yaml: argument --max_steps: invalid int value: '[3]'"),
    (["grpo", "--config", "key.yaml"], 2, "key.yaml: there is no option `--num_generation`. Did you mean"),
    (["sft", "--config", "removed.yaml"], 2, "removed.yaml: there is no option `--evaluation_strategy`. It was rem"),
    (["grpo", "--config=twice.yaml"], 1, "twice.yaml: `max_steps` is set twice"),
    (["grpo", "--config", "tabs.yaml"], 1, "tabs.yaml: it isn't YAML: while scanning"),
    (["grpo", "--config", "list.yaml"], 1, "list.yaml: it has no keys"),
    (["grpo", "--config", "bomb.yaml"], 1, "bomb.yaml: its aliases (`*name`) repeat values without end"),
    (["evaluate", "--config", "endless.yaml"], 1, "endless.yaml: its aliases (`*name`) repeat values without end"),
    (["grpo", "--config", "root.yaml"], 1, "root.yaml: its aliases (`*name`) repeat values without end"),
    (["sft", "--config", "deep.yaml"], 1, "deep.yaml: it is nested too deeply; write it flat"),
    (["grpo", "--config", "inner.yaml"], 1, "inner.yaml: `dtype` is set twice in one mapping; remove one"),
    (
        ["grpo", "--config", "choice.yaml"],
        2,
        "choice.yaml: argument --eval_strategy: invalid choice: 'stepz' (",
    ),
    (["grpo", "--config", "launch.yaml"], 2, "launch.yaml: argument --num_processes: invalid int value: 'two'"),
    (["check", *MODEL, "--dataset_name", "..evil"], 1, "There is no file or folder '..evil'"),
    (["check", *MODEL, "--dataset_name", "org/..evil"], 1, "There is no file or folder 'org/..evil'"),
    (["check", "--config", "check.yaml"], 2, "check.yaml: argument --max_prompt_length: invalid int value: 'long'"),
    (["grpo", *MODEL, "--dataset_name", "rows.jsonl"], 1, "There is no file or folder 'rows.jsonl'"),
    (["evaluate", *ROWS, "--model_name_or_path", "./model"], 1, "There is no file or folder './model'"),
    (["chat", "./model"], 1, "There is no file or folder './model'"),
    (["check", *MODEL, "--dataset_name", "rows.jsonl"], 1, "There is no file or folder 'rows.jsonl'"),
    (["grpo", *MODEL, *ROWS, "--lora_r", "8"], 1, "`--lora_r` has no effect without `--use_peft`; add it"),
    (["grpo", *MODEL, *ROWS, "--learning_rate", "-1e-5"], 2, "--learning_rate: it must be at least 0, got -1e-05"),
    (["dpo", *MODEL, *ROWS, "--deepspeed", "zero2"], 1, "use `--accelerate_config deepspeed_zero2`"),
    (["sft", *MODEL, *ROWS, "--freeze_vit", "true"], 2, "as in `--freeze vision_tower`"),
    (["grpo", *REWARD, "acuracy_reward"], 1, "reward function 'acuracy_reward'. Did you mean `accuracy_reward`?"),
    (["ppo", *REWARD, "hopeless"], 1, "no reward function 'hopeless'; name one of ['accuracy_reward'"),
    (["grpo", *REWARD, "min.good"], 1, "there is no module 'min'. '"),
    (["sft", *MODEL, *ROWS, "--report_to", "tensorbord"], 1, "no tracker. Did you mean `tensorboard`?"),
    (["dpo", *MODEL, *ROWS, "--report_to", "no-such"], 1, "no tracker. Name one of clearml, "),
    (["kto", *MODEL, *ROWS, "--report_to=mlflow"], 1, "names 'mlflow', which isn't installed: `pip install mlflow`"),
    (["sft", *ROWS, "--model_name_or_path", "folder", "--output_dir", "./folder/"], 1, "the folder of the model"),
    (["grpo", *MODEL, *ROWS, "--n", "4"], 2, "there is no option `--n`. Use `--num_generations`."),
    (["dpo", *MODEL, *ROWS, "--max-completion-length", "4"], 2, "Use `--max_length`, for a prompt and its completion"),
    (["kto", *MODEL, *ROWS, "--num_generations", "4"], 2, "Leave it out, as completions are those of the dataset."),
    (["sft", *MODEL, *ROWS, "--media_dir", "pictures"], 1, "pictures', which isn't a folder; correct it."),
    (["check", *MODEL, *ROWS, "--num_generations", "4"], 2, "It is an option of a run: `--config` reads the file"),
    (["grpo", *REWARD, "length_reward", "--value_warmup_steps", "4"], 2, "there is no option `--value_warmup_steps`."),
    (["check", *MODEL, *ROWS, "--media_rules", '{"max_image": 1}'], 1, "no key 'max_image'. Did you mean `max_im"),
    (
        [*BATCH, "--num_processes", "3"],
        1,
        "`--per_device_train_batch_size 2` x `--gradient_accumulation_steps 1` x 3 pr",
    ),
    (
        [*BATCH, "--accelerate_config", "cpu"],
        1,
        "Set `--per_device_train_batch_size 4` or `--gradient_accumulation_st",
    ),
    ([*BATCH, "--generation_batch_size", "6", "--num_processes", "1"], 1, "Set `--generation_batch_size 8`."),
    ([*BATCH, "--num_processes", "2", "--eval_strategy", "epoch", "--per_device_eval_batch_size", "1"], 1, "_eval_b"),
]


def test_mistakes_are_one_line_before_anything_heavy_is_imported(tmp_path):
    (tmp_path / "folder").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    found = runs([words for words, _, _ in MISTAKES], tmp_path)
    for (words, status, message), (code, out, err, heavy) in zip(MISTAKES, found, strict=True):
        assert (code, out, heavy) == (status, "", []) and message in err, (words, err)
        assert err.count("\n") == 1 and err.startswith("trl-multimodal-rft") and ": error: " in err


def test_names_of_rewards_and_tools(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def even(completions): ...")
    check_functions([*table()["rewards"], "mine.even", "box_iou_reward(iou_threshold=0.5)"])
    check_functions(["zoom(scale=1000)", "mine.even"], "tool")
    for name, kind in (("box_iou(a=1)", "reward function"), ("zooms", "tool")):
        with pytest.raises(ValueError, match=f"no {kind} '{re.escape(name.partition('(')[0])}'"):
            check_functions(name, kind)


@pytest.mark.parametrize("form", ["mine.py", "mine/__init__.py", "package/mine.py"])
def test_modules_are_found_without_importing_them(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path(form)
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise SystemExit")
    check_functions("package.mine.even" if "package" in form else "mine.even")
    check_functions(["trl.rewards.think_format_reward", "json.dumps"])
    assert "mine" not in sys.modules
    with pytest.raises(ValueError, match="There is no tool 'your.zoom': there is no module 'your'"):
        check_functions("your.zoom", "tool")


@pytest.mark.parametrize(
    ("launch", "config", "variables", "devices", "message"),
    [
        ({"num_processes": 2}, None, {}, 0, "is 2, but this machine has no accelerators to use; leave it out, or, on"),
        ({"num_processes": 4}, None, {}, 2, "is 4, but this machine has 2 accelerators to use; set it to 2"),
        ({"num_processes": 2}, None, {"CUDA_VISIBLE_DEVICES": "3"}, 4, "has 1 accelerator to use; set it to 1"),
        ({"num_processes": 2}, "single_gpu", {}, 4, "'single_gpu' has `distributed_type: 'NO'`, which starts one"),
        ({}, "multi_gpu", {}, 4, "is 8, but this machine has 4"),
        ({"num_processes": 8, "num_machines": 2}, None, {}, 4, None),
        ({"num_processes": 2, "cpu": True}, None, {}, 0, None),
        ({"num_processes": 2}, "multi_gpu", {"ACCELERATE_USE_CPU": "true"}, 0, None),
        ({"num_processes": 2, "config_file": "mine.yaml"}, None, {}, 0, None),
        ({"num_processes": 4}, None, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 8, None),
    ],
)
def test_processes_have_devices(launch, config, variables, devices, message, tmp_path, monkeypatch):
    for i in range(devices):
        (tmp_path / f"nvidia{i}").touch()
    monkeypatch.setattr(preflight, "_ACCELERATORS", (f"{tmp_path}/nvidia[0-9]*",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    args = argparse.Namespace(launch=launch, accelerate_config=config)
    with nullcontext() if message is None else pytest.raises(ValueError, match=re.escape(message)):
        preflight.check_processes(args)
    args.use_cpu = True
    if config != "single_gpu":
        preflight.check_processes(args)


@OUTSIDE
def test_another_release_of_trl_has_its_own_options(monkeypatch):
    monkeypatch.setattr(options, "version", lambda name: "0")
    stored = json.loads(Path(options.__file__).with_name("options.json").read_text())
    assert stored["versions"] != {} and table.__wrapped__() == stored


def test_removed_names_have_replacements_that_exist():
    names = {option["name"] for option in table()["options"]}
    for trainer in (MultimodalGRPOTrainer, MultimodalPPOTrainer):
        names.update(inspect.signature(trainer).parameters)
    for name, remedy in REMOVED.items():
        replacement = re.match(r"use `(\w+)`", remedy)
        assert replacement is None or replacement[1] in names
        fields = {each.name for each in dataclasses.fields(MultimodalGRPOConfig)}
        assert name not in fields and did_you_mean(name, names) == f" It was removed: {remedy}."
    assert did_you_mean("learning-rat", names) == " Did you mean `learning_rate`?"
    assert did_you_mean("zzz", names) == ""


REWARDS = """
def broken(completions, **kwargs):
    return [{}["gone"] for _ in completions]


def length(completions, **kwargs):
    return [float(len(each)) for each in completions]


def on_one_rank(completions, **kwargs):
    import os

    return [{"0": 1.0}[os.environ["RANK"]] for _ in completions]


calls = []


def slow_on_the_other(completions, **kwargs):
    import os, time

    calls.append(time.time())
    if len(calls) == 3 and os.environ["RANK"] == "0":
        time.sleep(100)
    elif len(calls) == 3:
        open("raised", "w").write(str(calls[-1]))
        raise TimeoutError("no answer")
    return length(completions)


def full(completions, **kwargs):
    import torch

    def step(self, *args, **kwargs):
        raise torch.OutOfMemoryError("Memory is full.\\nA second line")

    calls.append(1)
    if len(calls) == 3:
        torch.optim.AdamW.step = step
    return length(completions)
"""


@pytest.mark.parametrize(
    ("more", "devices", "count"),
    [
        ({"launch": {"num_processes": 3}}, 4, 3),
        ({"accelerate_config": "fsdp2"}, 4, 8),
        ({"launch": {"config_file": "mine.yaml"}}, 1, None),
        ({}, 0, 1),
        ({}, 1, 1),
        ({}, 2, None),
    ],
)
def test_batches_are_checked_early_where_the_number_of_processes_is_known(more, devices, count, tmp_path, monkeypatch):
    for i in range(devices):
        (tmp_path / f"nvidia{i}").touch()
    monkeypatch.setattr(preflight, "_ACCELERATORS", (f"{tmp_path}/nvidia[0-9]*", f"{tmp_path}/other*"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert process_count(more.get("launch", {}), more.get("accelerate_config")) == count
    args = argparse.Namespace(per_device_train_batch_size=1, num_generations=2, **more)
    for command in ("grpo", "rloo", "ppo", "distillation"):
        with pytest.raises(ValueError, match="multiple of `num_gen") if count in (1, 3) else nullcontext():
            check_batch(command, args)
    check_batch("sft", args)
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").touch()
    assert process_count({}, None) is None


def run_of(n_processes, folder, *more):
    """Returns the command line of a run that fails on its rows without `--prompt`."""
    Dataset.from_dict({"question": ["What?"] * 4}).to_parquet(folder / "rows.parquet")
    (folder / "mine.py").write_text(REWARDS)
    words = ["--model_name_or_path", saved("qwen2_audio"), "--dataset_name", folder / "rows.parquet"]
    words += ["--use_cpu", "--bf16", "False", "--report_to", "none", "--output_dir", "out", "--logging_steps", "1"]
    words += ["--num_generations", "2", "--per_device_train_batch_size", "2", "--max_completion_length", "4"]
    words += [f"--num_processes={n_processes}", *["--multi_gpu"] * (n_processes > 1), *more]
    code = "from trl_multimodal_rft.cli import main; main()"
    return [sys.executable, "-c", code, "grpo", *map(str, words)]


def launched(*arguments):
    return forked.run(run_of(*arguments), capture_output=True, cwd=arguments[1], timeout=PATIENCE)


def test_error_of_input_in_launched_processes_is_one_line(tmp_path):
    run = launched(2, tmp_path)
    last = run.stderr.splitlines()[-1]
    assert last.startswith(
        "trl-multimodal-rft grpo: error: `--dataset_name` has no column 'prompt', only ['question']"
    )
    assert 'pass `--prompt "{question}"`' in last
    assert run.returncode == 1 and run.stderr.count("has no column") == 1
    for noise in ("Traceback", "CalledProcessError", "ChildFailedError", "had defaults used instead", "elastic"):
        assert noise not in run.stderr


def test_lines_of_other_packages_are_hidden():
    """A logger's line that tells nothing, and bars of what is done at once; other lines of the logger stay."""
    code = """
import logging
from trl_multimodal_rft.cli.foreign import hide_lines

hide_lines()
from tqdm import tqdm

for _ in tqdm(range(2)):
    logging.getLogger("DeepSpeed").warning(
        "Setting accelerator to CPU. If you have another, we were unable to detect it."
    )
    logging.getLogger("DeepSpeed").warning("A line that counts.")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "A line that counts.\n" * 2)


@pytest.mark.gate
def test_tracebacks_of_launched_processes(tmp_path):
    """A reward function's own frames alone, and on request the whole traceback, without accelerate's."""
    mine = ["--prompt", "{question}", "--reward_funcs", "mine.broken"]
    asked = launched(1, tmp_path, "--debug")
    broken = launched(1, tmp_path, *mine)
    whole = launched(1, tmp_path, *mine, "--debug")
    for run, line in ((asked, "ValueError: `train_dataset` has no column"), (whole, "KeyError: 'gone'")):
        assert run.returncode == 1 and f"\n{line}" in run.stderr
        assert "CalledProcessError" not in run.stderr and "Traceback" in run.stderr
    assert broken.returncode == 1 and 0 < broken.stderr.count("  File ") <= 2 < whole.stderr.count("  File ")
    own = broken.stderr[broken.stderr.index("Traceback of the reward function") :]
    assert "\nKeyError: 'gone'\n" in own
    last = broken.stderr.splitlines()[-1]
    told = r"The reward function 'broken' raised KeyError for row \d, at mine.py:3: 'gone'"
    assert re.fullmatch(rf"trl-multimodal-rft grpo: error: {told} \(`--debug` shows the traceback\)", last)


@pytest.mark.gate
def test_error_of_one_of_two_processes_is_not_followed_by_the_other_s(tmp_path):
    """The other process only loses its connection."""
    run = launched(2, tmp_path, "--prompt", "{question}", "--reward_funcs", "mine.on_one_rank")
    assert run.returncode == 1 and run.stderr.count("Traceback") == 1, run.stderr
    last = run.stderr.splitlines()[-1]
    assert last.startswith("trl-multimodal-rft grpo: error: The reward function 'on_one_rank' raised KeyError for row")


@pytest.mark.gate
def test_a_process_that_waits_ends_soon_after_the_error_of_another(tmp_path):
    """Torch's launcher would kill it after 30 seconds."""
    more = ["--prompt", "{question}", "--reward_funcs", "mine.slow_on_the_other", "--save_steps", "1"]
    run = launched(2, tmp_path, *more)
    assert time.time() - float((tmp_path / "raised").read_text()) < 25
    last = run.stderr.splitlines()[-1]
    assert "'slow_on_the_other' raised TimeoutError" in last and last.endswith("(`--debug` shows the traceback)")
    told = "Ended by an error after step 2; the last checkpoint is out/checkpoint-2. Resume with: trl-multimodal-rft "
    assert run.stdout.splitlines()[-1].startswith(f"{told}grpo --config out/run.yaml")
    assert run.returncode == 1 and "saves a checkpoint" not in run.stderr


@pytest.mark.gate
@pytest.mark.parametrize("more", [[], ["--debug"]])
def test_the_last_lines_after_an_unknown_error_are_how_far_the_run_came(more, tmp_path):
    options = ["--prompt", "{question}", "--reward_funcs", "mine.full", "--save_steps", "1", "--optim", "adamw_torch"]
    run = launched(1, tmp_path, *options, *more)
    assert run.returncode == 1 and run.stderr.count("Traceback") == 1 and "OutOfMemoryError" in run.stderr
    assert run.stdout.splitlines()[-1].startswith("Ended by an error after step 2; the last checkpoint is out/checkp")
    line = "trl-multimodal-rft grpo: error: OutOfMemoryError: Memory is full."
    assert (run.stderr.splitlines()[-1] == line) == (not more)


def test_errors_that_the_package_explains_are_lines():
    """That of a self-check, unlike one of torch in the package's code."""
    with pytest.raises(RuntimeError) as explained:
        EngineCheck._check_difference(argparse.Namespace(tolerance=1.0), (2.0, 3.0), 1.0, "now", "why")
    assert input_error(explained.value).startswith("self-check: the engine's log-probabilities differ by 2e+00")
    with pytest.raises(RuntimeError, match="size of tensor") as of_torch:
        ptx_loss(torch.ones(2, 3), torch.ones(2, 4))
    assert input_error(of_torch.value) is None


def by_accelerate(command, n_processes):
    """Returns the command line that runs the script of a command by `accelerate launch`."""
    words = [word for word in command[command.index("grpo") :] if word[:6] not in ("--num_p", "--multi")]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", f"--num_processes={n_processes}"]
    launcher += ["--multi_gpu" if n_processes > 1 else "--cpu", "--module", "trl_multimodal_rft.cli.launched"]
    return [*launcher, *words]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_processes", "number", "launcher", "code"),
    [
        (2, signal.SIGINT, "command", 130),
        (1, signal.SIGTERM, "command", 143),
        (2, signal.SIGTERM, "command", 143),
        (1, signal.SIGHUP, "command", 129),
        (1, signal.SIGTERM, "accelerate", -signal.SIGTERM),
        (2, signal.SIGHUP, "accelerate", 1),
    ],
)
def test_signalled_run_ends_with_a_checkpoint_without_traceback(n_processes, number, launcher, code, tmp_path):
    """
    Ctrl-C reaches the group, and schedulers send a signal to the launcher alone. With `enable_jit_checkpoint`:
    `test_signalled_to_end` in `distributed/test_killed.py`.
    """
    more = ["--max_steps", "10000", "--disable_tqdm", "--prompt", "{question}", "--reward_funcs", "mine.length"]
    command = run_of(n_processes, tmp_path, *more)
    shown = []
    if launcher == "accelerate":
        command = by_accelerate(command, n_processes)
    pipes: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes) as run:
        for line in run.stdout:  # until all processes have ended
            if "| reward " in line and not any("| reward " in each for each in shown):
                (os.killpg if number == signal.SIGINT else os.kill)(run.pid, number)
            shown.append(line)
    assert run.returncode == code
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    assert verify_checkpoint(checkpoint) == []
    (place,) = [place for place, line in enumerate(shown) if line.startswith("Interrupted after step ")]
    step = checkpoint.name.partition("-")[2]
    told = f"Interrupted after step {step}; the last checkpoint is out/{checkpoint.name}. Resume with: "
    assert shown[place].startswith(told)
    if launcher == "command":
        assert "Traceback" not in "".join(shown) and place == len(shown) - 1


def is_running(process: psutil.Process) -> bool:
    """A zombie doesn't count as running."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow
@pytest.mark.parametrize("n_processes", [1, 2])
@pytest.mark.parametrize("moment", ["imports", "trains"])
def test_training_does_not_outlive_its_killed_command(moment, n_processes, tmp_path):
    more = ["--max_steps", "10000", "--disable_tqdm", "--prompt", "{question}", "--reward_funcs", "mine.length"]
    command = run_of(n_processes, tmp_path, *more)
    pipes: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes) as run:
        processes = []
        while len(processes) < n_processes:
            processes = psutil.Process(run.pid).children()
            assert run.poll() is None
            time.sleep(0.02)
        if moment == "trains":
            next(line for line in run.stdout if "| reward " in line)
        run.kill()
        shown = run.stdout.read()  # until all processes have closed it
    patience = time.monotonic() + 60
    while any(map(is_running, processes)):
        assert time.monotonic() < patience
        time.sleep(0.05)
    assert ("Interrupted after step " in shown) == (moment == "trains")


# Runs a command, or a launched script that fails on its options, and prints whether its imports are collected
COLLECTED = """
import atexit, gc, runpy, sys
from trl_multimodal_rft.cli import main
gc.unfreeze()  # the process that was forked
disable, calls = gc.disable, []
gc.disable = lambda: calls.append(disable())
atexit.register(lambda: print(gc.isenabled(), len(calls), gc.get_freeze_count()))
name = sys.argv[1]
main() if name == "families" else runpy.run_module("trl_multimodal_rft.cli.launched", run_name="__main__")
"""


@pytest.mark.parametrize("words", [["families"], ["grpo", "--dataset_name", "none", "--no_such_option"]])
def test_imports_of_commands_are_not_searched_for_garbage(words):
    """Nor are they kept from the collection at exit, without which libraries such as triton report leaks."""
    run = forked.run([sys.executable, "-c", COLLECTED, *words], capture_output=True)
    assert run.stdout.splitlines()[-1] == "True 1 0", run.stderr


def test_only_a_lost_pipe_of_the_output_ends_a_command_quietly(monkeypatch):
    words = [sys.executable, "-c", "from trl_multimodal_rft.cli import main; main()", "families"]
    read, write = os.pipe()
    os.close(read)
    with open(write) as lost:
        run = subprocess.run(words, stdout=lost, stderr=subprocess.PIPE, text=True)
    assert (run.returncode, run.stderr) == (128 + signal.SIGPIPE, "")

    def send(args):
        own, other = socket.socketpair()
        with own, other:
            other.shutdown(socket.SHUT_RDWR)
            own.sendall(b"rows")

    monkeypatch.setattr(import_module("trl_multimodal_rft.cli.families"), "run", send)
    with pytest.raises(BrokenPipeError):
        main(["families"])


def test_families(capsys):
    main(["families"])
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "image, video" in rows["qwen2_5_vl"] and "media" not in rows["qwen2_5_vl"]
    assert "image, video, audio" in rows["qwen3_omni_moe"] and "media" in rows["qwen3_omni_moe"]
    assert rows["qwen2_5_omni"].endswith("Qwen2_5OmniThinkerForConditionalGeneration")
    assert "image" in rows["vipllava"]  # a family without particulars
    assert "t5" not in rows and len(rows) > 80


def measured(text):
    """Returns rows of a table of measurements by family."""
    table = text.rpartition(MARK)[2]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert lines[0] == list(HEADER)
    return {line[0]: dict(zip(HEADER, line, strict=False)) for line in lines[2:]}


@pytest.mark.slow
def test_measure_families(capsys, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Words.\n<!-- measured -->\nOld.\n")
    report.main(["--synthetic", "--only", "qwen2_vl,phi4_multimodal", "--output", str(page)])
    rows = measured(capsys.readouterr().out)
    assert rows == measured(page.read_text()) and list(rows) == ["phi4_multimodal", "qwen2_vl"]
    assert "Words." in page.read_text() and "Old." not in page.read_text()
    row = rows["qwen2_vl"]
    assert (row["media"], row["scored"], row["shared prefill"]) == ("image, video", "packed", "yes")
    assert float(row["log-probs"]) < 1e-5 and float(row["gradient"]) < 1e-5
    assert rows["phi4_multimodal"]["scored"] == "not built" and "no recipe" in rows["phi4_multimodal"]["remark"]
    with pytest.raises(SystemExit):
        report.main(["--only", "qwen2_lv"])
    assert "there is no family 'qwen2_lv'" in capsys.readouterr().err


def test_measurements_see_what_is_wrong():
    model = tiny_model(transformers.Qwen2VLForConditionalGeneration)
    prompts = [encode(model, [("image", 0)], 1), encode(model, [], 2)]
    prompts[0].position_ids = torch.arange(len(prompts[0])).expand_as(prompts[0].position_ids)
    found = measure(model, prompts, Measurement("qwen2_vl"))
    assert found.mode == "wrong: packed" and found.logps > 1e-3 and "nothing is exact" in found.note


def test_page_of_models():
    obstacle = sharing_obstacle(tiny_model(transformers.MiniMaxM3SparseForConditionalGeneration))
    text = (ROOT / "docs" / "generated" / "families.md").read_text()
    row = measured(text)["minimax_m3_vl"]
    assert row["scored"] == "padded (isolated)" and row["remark"] == obstacle and "minimax_m3_sparse" in obstacle
    # The table has every family, and its statements about those with real processors match the measurements
    rows = measured(text)
    if f"transformers {transformers.__version__}" in text:
        named = {*rows, *(f"{name}_thinker" for name in rows)}
        assert not measurable().keys() - named
    for name, family in FAMILIES.items():
        row = rows[name]
        assert row["processor"] == "real" and set(row["media"].split(", ")) == set(family.modalities)
        assert row["scored"] == ("packed (isolated)" if family_of(name).isolate else "packed")
        assert max(float(row["log-probs"]), float(row["gradient"])) < 1e-4
