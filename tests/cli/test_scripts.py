# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scripts: parsing of their arguments, and their prompts."""

import json
import os
import re
import sys

import pytest
import yaml
from datasets import Audio, Dataset, Features, IterableDataset, Value
from helpers import forked
from helpers.chats import audio
from helpers.files import sound_file
from helpers.processes import PATIENCE
from helpers.trainer_utils import load, saved
from small_models import spoken_digit_model
from tasks import spoken_digits
from transformers import Qwen2AudioForConditionalGeneration
from trl import TrlParser

from trl_multimodal_rft.cli import launch, main, preflight
from trl_multimodal_rft.cli.arguments import SFTScriptArguments, parse
from trl_multimodal_rft.cli.commands import grpo, ppo, rloo, sft
from trl_multimodal_rft.cli.inputs import load_split, with_prompts
from trl_multimodal_rft.cli.option_table import options
from trl_multimodal_rft.cli.options import launched_command_parser
from trl_multimodal_rft.data.reading.refs import Encoded
from trl_multimodal_rft.data.rows.features import undecoded
from trl_multimodal_rft.extras import evaluate, filter


CPU = ["--output_dir", "out", "--use_cpu", "--bf16", "False"]


# Arguments


def recipe(folder, **keys):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": "model", "use_cpu": True, "bf16": False, **keys}))
    return str(path)


def test_config_file_is_for_script_and_launcher(tmp_path, monkeypatch):
    launched = []
    monkeypatch.setattr(launch, "_run_accelerate", launched.append)
    monkeypatch.setattr(preflight, "device_count", lambda: 2)
    keys = {"reward_funcs": "choice_reward", "accelerate_config": "multi_gpu", "num_processes": 3}
    path = recipe(tmp_path, num_generations=4, multi_gpu=True, dataset_name="rows", **keys)
    command = ["--config", path, "--max_steps", "2", "--num_processes", "2", "--output_dir=out", "--seed=3"]
    with pytest.raises(SystemExit) as exit:
        main(["grpo", *command])
    words = launched[0]
    assert exit.value.code == 0 and words[0].endswith("accelerate_configs/multi_gpu.yaml")
    assert words[1:3] == ["--multi_gpu", "--num_processes=2"]
    assert words[3:] == ["--module", "trl_multimodal_rft.cli.launched", "grpo", *command]
    script_args, training_args, model_args = parse(grpo.ARGUMENTS, command)
    assert script_args.reward_funcs == ["choice_reward"] and model_args.model_name_or_path == "model"
    assert (training_args.num_generations, training_args.max_steps, training_args.seed) == (4, 2, 3)


CONFIG = """# Values as they may be written, of each type
model_name_or_path: &model a/b
eval_strategy: no  # which YAML reads as false
learning_rate: 1e-5  # which YAML reads as text
temperature: 1
max_steps: "7"
reward_weights: [1, 5e-1]
reward_clip_range: [-1, 1]
bf16: off
use_cpu: true
self_check: "False"
report_to: none
model_revision: main
vllm_engine_kwargs: {max_num_seqs: 4}
datasets: [{path: rows, split: train}]
delta: null
beta: 1.e-3
epsilon: null  # as if it were not set
debug: true
env: {TRL_MULTIMODAL_RFT_OF_A_TEST: 1}
"""


def test_config_file_is_read_as_the_command_line_would_be(tmp_path, monkeypatch):
    monkeypatch.delenv("TRL_MULTIMODAL_RFT_OF_A_TEST", raising=False)
    (tmp_path / "run.yaml").write_text(CONFIG)
    words = ["--config", str(tmp_path / "run.yaml"), "--no-shuffle-dataset"]
    script_args, config, model_args = parse(grpo.ARGUMENTS, words)
    assert (config.eval_strategy, config.learning_rate, config.max_steps) == ("no", 1e-5, 7)
    assert (config.temperature, config.reward_weights, config.reward_clip_range) == (1.0, [1.0, 0.5], [-1.0, 1.0])
    assert (config.bf16, config.use_cpu, config.self_check, config.report_to) == (False, True, False, [])
    assert (config.vllm_engine_kwargs, config.delta, config.beta) == ({"max_num_seqs": 4}, None, 1e-3)
    assert config.debug == [] and config.epsilon == grpo.ARGUMENTS[1].epsilon
    assert not config.shuffle_dataset and script_args.datasets[0].path == "rows"
    assert (model_args.model_name_or_path, model_args.model_revision) == ("a/b", "main")
    assert os.environ.pop("TRL_MULTIMODAL_RFT_OF_A_TEST") == "1"


@pytest.mark.parametrize("script", [grpo, rloo, ppo, sft, evaluate, filter])
def test_command_line_is_read_as_by_trl(script):
    """Covers each option with a value, and each switch off."""
    words = []
    for option in options(script.ARGUMENTS):
        name = option["name"]
        kind = option["type"]
        if name in ("parallelism_config", "liger_kernel_config", "debug", "datasets"):
            continue
        value = {"int": "3", "float": "0.25", "bool": str(not option["default"]), "str": "x"}.get(kind)
        value = option["choices"][-1] if option["choices"] else value
        if value is not None:
            words.append([f"--{name}", value])
    assert len(words) > 40
    every = [word for pair in words for word in pair]
    expected = vars(TrlParser(script.ARGUMENTS).parse_known_args(every)[0])
    parsed = vars(launched_command_parser("", options(script.ARGUMENTS)).parse_args(every))
    assert parsed == {name: expected[name] for name in parsed} and len(parsed) == len(words)


@pytest.mark.parametrize("script", [grpo, evaluate])
def test_help_of_a_script_that_is_run_as_a_file(script, capsys):
    texts = []
    for words in (["--help_all"], ["--help-all"], ["--help"]):
        with pytest.raises(SystemExit):
            parse(script.ARGUMENTS, words)
        texts.append(capsys.readouterr().out)
    full, same, short = texts
    assert same == full and "None" not in short.splitlines()
    for option in ("--num_machines", *["--adam_beta1"] * (script is grpo)):
        assert f"{option} " in full and f"{option} " not in short


# Prompts

ROWS = {
    "question": ["What is it?", "And {this}?"],
    "n": [3, 4],
    "audio": [{"bytes": b"no sound", "path": None}, {"bytes": b"none either", "path": None}],
}
FEATURES = Features({"question": Value("string"), "n": Value("int64"), "audio": Audio()})


def rows_of(kind, rows=ROWS, features=FEATURES):
    dataset = Dataset.from_dict(rows, features=features)
    return dataset if kind == "dataset" else dataset.to_iterable_dataset()


def read(dataset):
    rows = undecoded(dataset)
    return list(rows) if isinstance(dataset, IterableDataset) else rows.__getitems__(list(range(len(dataset))))


def prompted(dataset, **arguments):
    return with_prompts(dataset, SFTScriptArguments(**arguments))


@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_prompts_are_filled_in(kind):
    template = r"{question} Choose among {n}. \boxed{} {{n}} <audio>"
    texts = [r"What is it? Choose among 3. \boxed{} {n} <audio>", r"And {this}? Choose among 4. \boxed{} {n} <audio>"]
    made = prompted(rows_of(kind), prompt=template, completion="{n}!")
    assert [row["completion"] for row in read(made)] == ["3!", "4!"]
    assert [row["prompt"] for row in read(made)] == texts
    assert made.features == {**FEATURES, "prompt": Value("string"), "completion": Value("string")}
    # The trainer decoded nothing, because no decoder accepts these bytes
    assert [row["audio"].value["bytes"] for row in read(made)] == [b"no sound", b"none either"]
    assert all(isinstance(row["audio"], Encoded) for row in read(made))

    both = prompted(rows_of(kind), prompt=template, system_prompt="Be brief.")
    for messages, text in zip((row["prompt"] for row in read(both)), texts, strict=True):
        assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


BLOCKS = [{"role": "user", "content": [{"type": "audio", "text": None}, {"type": "text", "text": "What?"}]}]
SYSTEM = {"role": "system", "content": "Be brief."}
BLOCK = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}


@pytest.mark.parametrize("kind", ["dataset", "stream"])
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("What?", [SYSTEM, {"role": "user", "content": "What?"}]),
        ([{"role": "user", "content": "What?"}], [SYSTEM, {"role": "user", "content": "What?"}]),
        (BLOCKS, [BLOCK, *BLOCKS]),
    ],
)
def test_system_prompt_before_prompts(prompt, expected, kind):
    dataset = Dataset.from_dict({"prompt": [prompt] * 2, "n": [1, 2]})
    made = prompted(dataset if kind == "dataset" else dataset.to_iterable_dataset(), system_prompt="Be brief.")
    assert [row["prompt"] for row in read(made)] == [expected] * 2 and [row["n"] for row in read(made)] == [1, 2]
    with pytest.raises(ValueError, match="row 0, column 'prompt': it has a system message"):
        list(prompted(made, system_prompt="Be long."))


@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_system_prompt_before_what_a_teacher_reads(kind):
    user = {"role": "user", "content": "It is a cat."}
    own = {"role": "system", "content": "You know."}
    dataset = Dataset.from_dict({"prompt": ["What?"] * 3, "teacher_prompt": [[user], [own, user], None]})
    made = prompted(dataset if kind == "dataset" else dataset.to_iterable_dataset(), system_prompt="Be brief.")
    assert [row["teacher_prompt"] for row in read(made)] == [[SYSTEM, user], [own, user], None]
    assert [row["prompt"][0] for row in read(made)] == [SYSTEM] * 3
    empty = Dataset.from_dict({"prompt": ["What?"] * 2, "teacher_prompt": [[user], []]})
    with pytest.raises(ValueError, match="row 1, column 'teacher_prompt': it has no prompt"):
        list(prompted(empty if kind == "dataset" else empty.to_iterable_dataset(), system_prompt="Be brief."))


@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_prompts_that_cant_be_made(kind):
    with pytest.raises(ValueError, match=r"names the column 'quest', .* only \['audio', 'n', 'question'\]"):
        prompted(rows_of(kind), prompt="{quest}")
    with pytest.raises(ValueError, match="no column 'prompt' for `--system_prompt`"):
        prompted(rows_of(kind), system_prompt="Be brief.")
    with pytest.raises(ValueError, match="'audio' has media.*`<audio>`"):
        list(prompted(rows_of(kind), prompt="{audio}"))
    missing = rows_of(kind, {**ROWS, "question": ["What?", None]})
    with pytest.raises(ValueError, match="row 1, column 'question': it is NoneType"):
        list(prompted(missing, prompt="{question}"))
    feature = Features({"prompt": [{"role": Value("string"), "content": [{"audio": Audio()}]}]})
    inside = Dataset.from_dict({"prompt": [[{"role": "user", "content": [{"audio": b"no sound"}]}]]}, features=feature)
    with pytest.raises(ValueError, match="'prompt' has media.*into the column"):
        prompted(inside if kind == "dataset" else inside.to_iterable_dataset(), system_prompt="Be brief.")


def test_mixture(tmp_path):
    """Datasets combine as in TRL, and the held-out rows are always the same."""
    for name, rows in (("few", 6), ("many", 30)):
        columns = {"question": [f"{name} {i}" for i in range(rows)], "unused": [0] * rows}
        Dataset.from_dict(columns).to_parquet(tmp_path / name / "train.parquet")
    parts = [{"path": str(tmp_path / name), "split": "train", "columns": ["question"]} for name in ("few", "many")]

    def mixed(split, **keys):
        path = recipe(tmp_path, prompt="{question}?", **keys)
        script_args = parse(grpo.ARGUMENTS, ["--config", path, *CPU])[0]
        rows = load_split(script_args, split)
        return list(rows["prompt"])

    every = [f"few {i}?" for i in range(6)] + [f"many {i}?" for i in range(30)]
    assert mixed("train", datasets=parts) == every
    shares = [{**part, "fraction": share} for part, share in zip(parts, (1, 2), strict=True)]
    assert mixed("train", datasets=shares) == every[:18]
    train, test = (mixed(split, datasets=parts, test_split_size=0.25) for split in ("train", "test"))
    assert len(test) == 9 and sorted(train + test) == sorted(every)
    with pytest.raises(ValueError, match="no split 'test'; set `test_split_size`"):
        mixed("test", datasets=parts)
    with pytest.raises(ValueError, match="A stream can't be split"):
        mixed("test", datasets=parts, test_split_size=0.25, streaming=True)


# Runs


def command(name, *options, cwd):
    words = [sys.executable, "-c", "from trl_multimodal_rft.cli import main; main()", name, *options]
    run = forked.run(words, cwd=cwd, capture_output=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return run.stdout + run.stderr


@pytest.mark.gate
@pytest.mark.parametrize("script", [rloo, ppo, sft])
def test_script_trains(script, tmp_path):
    sounds = [{"bytes": sound_file(audio(0.5, seed=i)["audio"]), "path": None} for i in range(4)]
    rows = [{"question": "What do you hear?", "audio": each, "solution": str(i)} for i, each in enumerate(sounds)]
    Dataset.from_list(rows).to_parquet(tmp_path / "data" / "train.parquet")
    given = {"model_name_or_path": str(saved("qwen2_audio")), "dataset_name": str(tmp_path / "data")}
    given |= {"prompt": "{question}", "system_prompt": "Listen.", "dtype": "float32"}
    how = {"output_dir": str(tmp_path / "trained"), "max_steps": 1, "report_to": "none", "logging_steps": 1}
    if script is sft:
        how |= {"completion": "{solution}", "per_device_train_batch_size": 2}
    else:
        how |= {"num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 4}
        how |= {"reward_funcs": "helpers.trainer_utils.length_and_sum"}
    if script is ppo:
        rows = [{**row, "prompt": "What?", "completion": "A bird."} for row in rows]
        Dataset.from_list(rows).to_parquet(tmp_path / "answers" / "train.parquet")
        how |= {"ptx_dataset_name": str(tmp_path / "answers"), "ptx_coef": 0.1}
        named = recipe(tmp_path, **given, **how, value_model_name_or_path=str(tmp_path / "critic"))
        with pytest.raises(OSError, match="critic"):
            script.main(*parse(script.ARGUMENTS, ["--config", named]))
        how["shared_trunk"] = True
    if script is rloo:
        how |= {"use_peft": True, "lora_target_modules": "all-linear"}
    script.main(*parse(script.ARGUMENTS, ["--config", recipe(tmp_path, **given, **how)]))
    trained = Qwen2AudioForConditionalGeneration.from_pretrained(tmp_path / "trained").state_dict()
    before = load("qwen2_audio")[0].state_dict()
    adapters = [weight for name, weight in trained.items() if "lora_B" in name]
    assert any(weight.any() for weight in adapters) == bool(adapters) == (script is rloo)
    assert adapters or any(not trained[name].equal(before[name]) for name in before)
    assert "Listen." in (tmp_path / "trained" / "README.md").read_text()


@pytest.mark.gate
def test_train_and_evaluate(tmp_path):
    for part in spoken_digit_model():
        part.save_pretrained(tmp_path / "model")
    for split, rows in spoken_digits(train_rows=40, test_rows=10).items():
        rows = rows.remove_columns("prompt").add_column("unit", ["digit"] * len(rows))
        rows.to_parquet(tmp_path / "data" / f"{split}.parquet")
    brief = "def brief(completions, unit, **kwargs):\n    return [float(len(u)) for u in unit]\n"
    (tmp_path / "mine.py").write_text(brief)
    given = {"dataset_name": "data", "prompt": "Which {unit} is spoken?"}
    given["reward_funcs"] = ["accuracy_reward", "mine.brief"]
    how = {"output_dir": "trained", "max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 8}
    logs = {"max_completion_length": 4, "logging_steps": 1, "report_to": "none", "gradient_checkpointing": False}
    path = recipe(tmp_path, **given, **how, **logs, accelerate_config="fsdp2")
    output = command("grpo", "--config", path, "--accelerate_config", "cpu", "--max_steps=2", cwd=tmp_path)
    assert re.findall(r"step (\d)/2 \| reward 5\.\d\d ± .* \| accuracy \d+\.\d %", output) == ["1", "2"]
    state = yaml.safe_load((tmp_path / "trained" / "run.yaml").read_text())
    assert (state["max_steps"], state["accelerate_config"], state["prompt"]) == (2, "cpu", given["prompt"])
    assert (tmp_path / "trained" / "model.safetensors").exists()
    card = (tmp_path / "trained" / "README.md").read_text()
    assert "Which digit is spoken?" in card and "![Training curves](training_curves.png)" in card
    assert "- Training data: data, columns" in card and "\ndatasets:" not in card

    options = [*("--model_name_or_path", "trained", "--dataset_name", "data", "--prompt", "Which {unit} is spoken?")]
    options += [*("--reward_funcs", "mine.brief", "--max_completion_length", "4", "--accelerate_config", "cpu")]
    command("evaluate", *options, "--system_prompt", "Listen.", "--output_dir", "results", cwd=tmp_path)
    metrics = json.loads((tmp_path / "results" / "metrics.json").read_text())["metrics"]
    assert metrics["rows"] == 10 and metrics["reward/brief"] == 5
    (prompt,) = set(Dataset.from_parquet(str(tmp_path / "results" / "rows.parquet"))["prompt"])
    assert "Listen." in prompt and "<audio>" in prompt and "Which digit is spoken?" in prompt
