# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Errors in the words of a shell, and natural mistakes on a command line."""

import argparse
import json
import logging
import re
from pathlib import Path

import pytest
import soundfile
from datasets import Dataset
from helpers.folders import ROOT
from helpers.trainer_utils import saved
from trl import ModelConfig

from trl_multimodal_rft.cli import _parser
from trl_multimodal_rft.cli.inputs import adapter_inputs
from trl_multimodal_rft.cli.options import options_of
from trl_multimodal_rft.cli.preflight import check_functions, check_names, check_needed, check_sharding
from trl_multimodal_rft.cli.run_file import write_run_file
from trl_multimodal_rft.cli.words import SENTENCES, in_shell, translated_logs
from trl_multimodal_rft.data.rows.load import load_rows
from trl_multimodal_rft.models.pretrained import load_trained
from trl_multimodal_rft.reporting.console import evaluation_values
from trl_multimodal_rft.rewards import accuracy_reward


GRPO = [option["name"] for option in options_of("grpo")]


@pytest.mark.parametrize(
    ("python", "shell"),
    [
        ("Set `packing='padded'` or `beta=0`.", "Set `--packing padded` or `--beta 0`."),
        ("set `use_vllm=False`, or `dynamic_sampling=True`", "set `--use_vllm False`, or `--dynamic_sampling`"),
        ("`reward_weights=[1.0, 2.0]`", "`--reward_weights 1.0 2.0`"),
        ("`model_init_kwargs={'dtype': 'float32'}`", """`--model_init_kwargs '{"dtype": "float32"}'`"""),
        ("a dictionary such as {'max_audio_seconds': 60}.", """a dictionary such as '{"max_audio_seconds": 60}'."""),
        ("`learning_rates['x']` is 0", "`--learning_rates['x']` is 0"),
        ("the column `prompt`, and `my_column`", "the column `prompt`, and `my_column`"),
        ("pass `peft_config`, or use `MultimodalPPOTrainer`", "pass `--use_peft`, or use `trl-multimodal-rft ppo`"),
        ("run.yaml: `beta` is set twice", "run.yaml: `beta` is set twice"),
        ("rename 'ask' to 'prompt'.", 'pass `--prompt "{ask}"`.'),
        ("Resume with `train(resume_from_checkpoint='a/b')`.", "Resume with `--resume_from_checkpoint a/b`."),
        ("use `multi_gpu.yaml`", "use `--accelerate_config multi_gpu`"),
    ],
)
def test_messages_name_options(python, shell):
    assert in_shell(python, GRPO) == shell == in_shell(shell, GRPO)


def test_sentences_are_those_of_messages():
    """A remedy whose message changed would stay in Python."""
    package = ROOT / "trl_multimodal_rft"
    sources = [path.read_text() for path in package.rglob("*.py") if path.name != "words.py"]
    text = re.sub(r'["\']\s*\n\s*f?["\']', "", "\n".join(sources))  # joins the parts of a text
    foreign = ("Number of reward", "Using fsdp", "--load_best", "At most one", "You cannot")
    for pattern, _ in SENTENCES:
        parts = re.findall(r"[\w' ]{9,}", re.sub(r"\\[wd.()]|\(\?.*?\)|[\[(].*?[\])]", "\n", pattern))
        assert not parts or any(part in text for part in parts) or pattern.startswith(foreign), pattern


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lora_r", "8"], "`--lora_r` has no effect without `--use_peft`"),
        (["--use_dora"], "`--use_dora` has no effect without `--use_peft`"),
        (["--lora_target_modules", "q_proj"], "without `--use_peft`"),
        (["--eval_steps", "10"], "without `--eval_strategy steps`"),
        (["--eval_steps", "10", "--eval_strategy", "epoch"], "without `--eval_strategy steps`"),
        (["--vllm_mode", "server"], "without `--use_vllm`"),
        (["--reward_label_column", "kind"], "without `--reward_recipe JSON`"),
        (["--lora_r", "8", "--use_peft"], None),
        (["--vllm_mode", "server", "--use_vllm", "false"], None),  # as over a recipe
        (["--eval_steps", "10", "--eval_strategy", "steps"], None),
        (["--use_dora", "false"], None),
    ],
)
def test_options_need_others(words, message):
    args = _parser("grpo").parse_args(words)
    if message is None:
        check_needed("grpo", args)
    else:
        with pytest.raises(ValueError, match=re.escape(message)):
            check_needed("grpo", args)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine", "'mine' is a module, not a reward function; name a function in it: `mine.even`."),
        ("mine.py", "name a function in it: `mine.even`."),
        ("mine:even", "write a dot: `mine.even`."),
        ("accuracy_reward,mine.even", "separate them by spaces: `accuracy_reward mine.even`."),
        ("judg", "Did you mean `judge`?"),
        ("judge", None),
        ("org/judge", None),
    ],
)
def test_names_of_rewards(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def even(completions): ...\ndef _odd(completions): ...\n")
    Path("judge").mkdir()
    Path("judge", "config.json").write_text("{}")
    if message is None:
        check_functions([name])
    else:
        with pytest.raises(ValueError, match=re.escape(message)):
            check_functions([name])


@pytest.mark.parametrize(
    ("config", "uses"),
    [("zero2", "deepspeed_zero2`"), ("zero3_offload.json", "deepspeed_zero3`"), ("mine", "deepspeed_zero2` or")],
)
def test_stages_of_zero_are_configs(config, uses):
    with pytest.raises(ValueError, match=f"`--accelerate_config {uses}"):
        check_sharding(argparse.Namespace(deepspeed=config))


def test_media_rules_are_json():
    check_names(argparse.Namespace(media_rules='{"max_audio_seconds": 60}'))
    with pytest.raises(ValueError, match="max_audio_seconds"):
        check_names(argparse.Namespace(media_rules='{"max_audio_second": 60}'))


@pytest.mark.parametrize(
    ("targets", "expected"),
    [(None, "all-linear"), (["q_proj"], {"q_proj"}), (["all-linear"], "all-linear"), ([".*v_proj"], ".*v_proj")],
)
def test_targets_of_adapters(targets, expected):
    config = adapter_inputs(ModelConfig(use_peft=True, lora_target_modules=targets, lora_r=4))["peft_config"]
    assert (config.target_modules, config.r) == (expected, 4)


def test_tables_beside_media_are_named(tmp_path):
    folder = tmp_path / "birds"
    folder.mkdir()
    for i in range(2):
        soundfile.write(folder / f"{i}.wav", [0.0] * 100, 16000)
    assert len(load_rows(str(folder), None, "train", False)) == 2
    (folder / "labels.csv").write_text("audio,solution\n0.wav,a\n1.wav,b\n")
    with pytest.raises(ValueError, match=r"its table 'labels.csv' isn't read beside media"):
        load_rows(str(folder), None, "train", False)


def test_a_missing_base_is_the_adapter_s(tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "./gone"})
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(Path(saved("qwen2_audio"), "model.safetensors").read_bytes())
    with pytest.raises((OSError, ValueError), match=r"names the base model './gone' in its 'adapter_config.json'"):
        load_trained(str(tmp_path))


def test_columns_of_answers_are_named():
    with pytest.raises(ValueError, match="rename 'label' to 'solution'") as caught:
        accuracy_reward(completions=["a"], label=["a"])
    assert 'pass `--solution "{label}"`' in in_shell(str(caught.value), GRPO)


def test_whole_steps_of_the_run_file_are_whole(tmp_path):
    write_run_file(tmp_path, "grpo", {"logging_steps": 10.0, "save_steps": 0.5, "temperature": 1.0})
    text = (tmp_path / "run.yaml").read_text()
    assert "logging_steps: 10\n" in text and "save_steps: 0.5\n" in text and "temperature: 1.0\n" in text


def test_evaluations_have_their_prefix():
    logs = {"test_loss": 0.5, "test_runtime": 1.0, "test_samples_per_second": 2.0}
    assert evaluation_values(logs)[0] == "test"
    logs = {"eval_near_loss": 0.5, "eval_near_samples_per_second": 2.0}
    assert evaluation_values(logs) == ("eval near", {"loss": "0.50"})


def test_help_fits_narrow_terminals(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "50")
    with pytest.raises(SystemExit):
        _parser("grpo").parse_args(["--help"])
    lines = capsys.readouterr().out.splitlines()
    options = [line for line in lines if line.startswith("  ")]
    assert len(options) > 40 and max(map(len, options)) <= 50


def test_logs_are_translated_within_a_command_alone(caplog):
    logger = logging.getLogger("trl_multimodal_rft.cli.words")
    with translated_logs(["packing"]):
        logger.warning("set `packing='padded'` for %d rows", 5)
    logger.warning("set `packing='padded'`")
    messages = [record.msg for record in caplog.records]
    assert messages == ["set `--packing padded` for 5 rows", "set `packing='padded'`"]


def test_a_teacher_s_server_has_a_timeout():
    words = ["--teacher_model_server_url", "http://a:1", "--vllm_server_timeout", "600"]
    check_needed("distillation", _parser("distillation").parse_args(words))


def test_a_function_with_the_name_of_its_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "even.py").write_text("def even(completions, **kwargs):\n    return [0.0]\n")
    (tmp_path / "mine" / "__init__.py").write_text("")
    with pytest.raises(ValueError, match="'mine.even' is a module"):
        check_functions(["mine.even"])
    (tmp_path / "mine" / "__init__.py").write_text("from .even import even\n")
    check_functions(["mine.even"])


def test_a_folder_of_saved_rows_has_no_unread_table(tmp_path):
    rows = Dataset.from_dict({"image": ["a.png"] * 2, "label": ["a", "b"]})
    rows.save_to_disk(tmp_path / "saved")
    (tmp_path / "parquet").mkdir()
    rows.to_parquet(tmp_path / "parquet" / "train.parquet")
    for name in ("saved", "parquet"):
        assert len(load_rows(str(tmp_path / name), None, "train", False)) == 2
