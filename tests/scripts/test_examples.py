# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Launches the example scripts like users, for a few steps, and uses the saved models."""

import ast
import io
import json
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile
from datasets import Dataset, Features, Image, List, Value
from demo import with_noise
from grpo_agent import Screen, demonstrations, pages
from helpers import forked
from helpers.families import encode
from helpers.folders import ROOT
from helpers.processes import PATIENCE
from helpers.tools import Saying
from small_models import cropping_model, hidden_digit_model, screen_model
from tasks import handwritten_digits, hidden_digits, long_recordings, moving_digits, spoken_digits

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer, MultimodalPPOConfig
from trl_multimodal_rft.cli.arguments import parse
from trl_multimodal_rft.cli.commands import ppo
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate_trainer
from trl_multimodal_rft.rewards import accuracy_reward


HELD = {"train": 40, "test": 16}  # rows of datasets by name
ACCELERATE = ("-m", "accelerate.commands.launch", "--num_processes", "1")
KEPT = tempfile.TemporaryDirectory()
# The demos with fewer rows, twenty of them held out, and a cold start of fewer and smaller steps. Their pictures are
# kept in a file: the package with MNIST takes three seconds to load
BRIEF = """
import functools, pathlib, runpy, sys
sys.path.insert(0, "examples")
most, size, pictures, sys.argv = *map(int, sys.argv[1:3]), pathlib.Path(sys.argv[3]), sys.argv[4:]
import numpy as np
import demo, tasks
ROWS = {"train": 400, "test": 20}
mnist = tasks._mnist
def few():
    if not pictures.exists():
        parts = {split: [each[:n] for each in mnist()[split]] for split, n in ROWS.items()}
        np.savez(pictures, **{f"{split}{i}": each for split, part in parts.items() for i, each in enumerate(part)})
    stored = np.load(pictures)
    return {split: (stored[f"{split}0"], stored[f"{split}1"]) for split in ROWS}
tasks._mnist = few
def brief(task):
    @functools.wraps(task)
    def rows(*args, **options):
        splits = task(*args, **options)
        for split, n in ROWS.items():
            splits[split] = splits[split].select(range(min(n, len(splits[split]))))
        return splits
    return rows
tasks.spoken_digits = brief(tasks.spoken_digits)  # which `long_recordings` takes, too
tasks.moving_digits = functools.partial(tasks.moving_digits, 40, 20)
whole = demo.cold_start
def cold_start(*args, batch_size=100, **options):
    return whole(*args, batch_size=min(size, batch_size), **{**options, "max_steps": most})
demo.cold_start = cold_start
def capped(name, most):
    config = getattr(package, name)
    def small(*args, per_device_train_batch_size, **options):
        return config(*args, per_device_train_batch_size=min(most, per_device_train_batch_size), **options)
    setattr(package, name, small)
if "preference" in sys.argv[0]:  # of trainers without options on the command line
    import trl_multimodal_rft as package
    capped("MultimodalGRPOConfig", 16)
    capped("MultimodalRewardConfig", 8)
if "agent" in sys.argv[0]:  # which draws its rows itself
    import grpo_agent
    pages = grpo_agent.pages
    grpo_agent.pages = lambda n, seed: pages(min(n, ROWS["test"]), seed)
    demo.start(grpo_agent.grpo, grpo_agent.demo, grpo_agent.DEMO)
elif "say" in sys.argv[0]:
    import grpo_say
    grpo_say.spoken_rows = functools.partial(grpo_say.spoken_rows, 20)
    grpo_say.second_recognizer = functools.partial(grpo_say.second_recognizer, 60)
    demo.start(grpo_say.grpo, grpo_say.demo, grpo_say.DEMO)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def launch(script, output_dir, *options, compact=False, launcher=None, cold_start=2, batch_size=20):
    """
    Launches a script for two steps of few rows, after `cold_start` supervised steps of at most `batch_size` rows.
    """
    pictures = str(Path(KEPT.name, "pictures.npz"))
    launcher = ("-c", BRIEF, str(cold_start), str(batch_size), pictures) if launcher is None else launcher
    command = [
        *(sys.executable, *launcher, f"examples/{script}.py", "--output_dir", str(output_dir)),
        *("--max_steps", "2", "--per_device_train_batch_size", "32", "--logging_steps", "1"),
        *([] if compact else ["--disable_compact_log"]),
        *options,
    ]
    run = forked.run(command, cwd=ROOT, capture_output=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return run.stdout + run.stderr


def check_results(output_dir, output, *more):
    """`output` has logs as dictionaries."""
    check_files(output_dir, output, *more)
    before = json.loads((output_dir / "demo_metrics.json").read_text())["accuracy_before"]
    assert re.findall(r"'eval_accuracy': '?(\d[\d.e-]*)", output)[0] == f"{before:.4g}"
    assert "'reward':" in output and "'packing/shared_frac':" in output


def check_files(output_dir, output, *more):
    metrics = json.loads((output_dir / "demo_metrics.json").read_text())
    assert metrics.keys() == {"accuracy_before", "accuracy_after", "train_seconds", "updates", *more}
    assert metrics["updates"] == 2
    assert (output_dir / "training_curves.png").read_bytes().startswith(b"\x89PNG")
    card = (output_dir / "README.md").read_text()
    assert "self-check: largest differences" in card and "trl-multimodal-rft" in card
    assert "![Training curves](training_curves.png)" in card and "\nmodel-index:" in card
    assert re.search(r"Accuracy on held-out \w+: \d+\.\d% before training, \d+\.\d% after", output)
    (line,) = [line for line in output.splitlines() if line.startswith(f"{output_dir} has the model")]
    assert all((output_dir / name).exists() for name in re.findall(r"\((.*?)\)", line))


@pytest.mark.gate
def test_audio_and_asking_the_saved_model(tmp_path):
    output = launch("grpo_audio", tmp_path, compact=True, launcher=ACCELERATE)
    check_files(tmp_path, output)
    lines = [line for line in output.splitlines() if "Warning" in line or line.startswith(("step ", "Multi", "  ask"))]
    assert lines[0] == "MultimodalGRPOTrainer trains Qwen2AudioForConditionalGeneration for 2 steps:"
    assert lines[1].startswith("step 0/2 | eval accuracy ") and lines[-1].endswith(f"model_name_or_path {tmp_path}")
    assert sum(line.startswith("step ") and " | reward " in line for line in lines) == 2
    assert not any("Warning" in line for line in lines)

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "hub.md").read_text(), re.DOTALL)
    code = next(block for block in blocks if "outputs/grpo_audio" in block)
    code = code.replace("outputs/grpo_audio", str(tmp_path))
    run = forked.run([sys.executable, "-c", code], capture_output=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr[-2000:]
    (answer,) = ast.literal_eval(run.stdout.strip().splitlines()[-1])
    assert isinstance(answer, str)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["grpo_vision", "grpo_video"])
def test_vision_and_video(script, tmp_path):
    check_results(tmp_path, launch(script, tmp_path))


@pytest.mark.slow
def test_preferences(tmp_path):
    output = launch("preference_audio", tmp_path, "--max_steps", "1", "--per_device_train_batch_size", "8")
    metrics = json.loads((tmp_path / "demo_metrics.json").read_text())
    assert metrics.keys() == {"accuracy_before", "reward_accuracy", "accuracy_grpo", "accuracy_dpo"}
    assert f"{metrics['accuracy_before']:.1%} before, {metrics['accuracy_grpo']:.1%} after GRPO" in output
    assert "\nrewards: reward_model " in output and "'rewards/margins':" in output
    folders = (tmp_path / name for name in (".", "before", "grpo", "reward_model"))
    assert all((folder / "model.safetensors").exists() for folder in folders)


LEARNED = 32  # updates after which the model calls its tool


@pytest.mark.slow
@pytest.mark.parametrize(("script", "cold_start"), [("grpo_tools_audio", 2), ("grpo_tools_vision", LEARNED)])
def test_tools(script, cold_start, tmp_path):
    output = launch(script, tmp_path, cold_start=cold_start, batch_size=10)
    check_results(tmp_path, output)
    assert "Accuracy without the tool, at best: 10.0%" in output
    if cold_start < LEARNED:
        return
    assert json.loads((tmp_path / "demo_metrics.json").read_text())["accuracy_before"] > 0.1
    calls = re.findall(r"'tools/call_frequency': '?([\d.]+)", output)
    assert float(calls[0]) > 0.5 and "tool media vs. model's forward" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "build", "rows", "more"),
    [
        ("grpo_tools_audio", cropping_model, partial(long_recordings, None, 40, 40), ()),
        ("grpo_tools_vision", hidden_digit_model, hidden_digits, ("--thumbnail_size", "28")),
    ],
)
def test_tools_with_arguments(script, build, rows, more, tmp_path):
    model, processor = build()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    for name, split in rows().items():
        split.select(range(HELD[name])).to_parquet(tmp_path / "data" / f"{name}.parquet")
    options = (
        *("--model_name_or_path", str(tmp_path / "model"), "--dtype", "float32", *more),
        *("--dataset_name", str(tmp_path / "data"), "--num_generations", "8", "--max_completion_length", "16"),
        *("--bf16", "False", "--use_cpu", "--eval_strategy", "steps", "--eval_steps", "1"),
        *("--per_device_eval_batch_size", "80"),
    )
    output = launch(script, tmp_path / "trained", *options)
    assert "'tools/call_frequency':" in output and "rewards/format_reward/mean" in output and "eval_reward" in output
    assert not (tmp_path / "trained" / "cold_start").exists()


@pytest.mark.slow
def test_agent(tmp_path):
    output = launch("grpo_agent", tmp_path, "--num_generations", "4", "--per_device_train_batch_size", "8")
    check_results(tmp_path, output)
    mean, longest, read = re.findall(r"\(.* to .*\); contexts of (\d+) tokens, (\d+) at most, (\d+) in a", output)[-1]
    assert 0 < int(mean) <= min(int(longest), int(read))


class Demonstrating(Saying):
    """Says what demonstrations say, and keeps what it reads."""

    read = ()

    def __call__(self, model, prompts, **options):
        self.read = [*self.read, *prompts]
        return super().__call__(model, prompts, **options)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 6])
def test_the_agents_demonstrations_are_right_and_have_its_contexts(most, tmp_path):
    model, processor = screen_model()
    rows = pages(4, seed=0)
    options = {"max_context_media": most, "ignored_media_columns": ["page", "opened"], "use_cpu": True, "bf16": False}
    args = MultimodalGRPOConfig(str(tmp_path), **options)
    trainer = MultimodalGRPOTrainer(model, accuracy_reward, args, rows, None, processor, environment_factory=Screen)
    lessons = [[*demonstrations(rows.select([i]), most, seed=i)] for i in range(4)]
    script = {i: [turn["completion"][0]["content"][0]["text"] for turn in turns] for i, turns in enumerate(lessons)}
    assert max(map(len, script.values())) > 4
    trainer.sampler = sampler = Demonstrating(trainer, script)
    config = EvaluationConfig(max_completion_length=200, batch_size=4)
    assert evaluate_trainer(trainer, rows, accuracy_reward, config).metrics["accuracy"] == 1
    read = [(each.input_ids.tolist(), each.media["pixel_values"].sum().item()) for each in sampler.read]
    expected = []
    for turn in (turn for turns in lessons for turn in turns):
        blocks = [block for message in turn["prompt"] for block in message["content"] if block["type"] == "image"]
        for block, image in zip(blocks, turn["images"], strict=True):
            block["image"] = image
        inputs = encode(processor, turn["prompt"])
        expected.append((inputs["input_ids"][0].tolist(), inputs["pixel_values"].sum().item()))
    assert sorted(read) == [(ids, pytest.approx(total)) for ids, total in sorted(expected)]


def check_critic(output_dir, output):
    check_results(output_dir, output, "explained_variance")
    # As many updates as epochs: one batch of completions, whose values are computed on sampling
    (logged,) = re.findall(r"'explained_variance': '?([-\d.e]+|None)", output)
    metrics = json.loads((output_dir / "demo_metrics.json").read_text())
    if logged == "None":  # no answer was right
        assert metrics["explained_variance"] is None
    else:
        assert metrics["explained_variance"] == pytest.approx(float(logged), rel=1e-3)
    assert (output_dir / "critic" / "value_head.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ppo_audio", "ppo_vision"])
def test_ppo(script, tmp_path):
    check_critic(tmp_path, launch(script, tmp_path))


@pytest.mark.slow
def test_distillation(tmp_path):
    """A student that sees noisy digits comes close to a teacher that sees clean ones."""
    options = ["--max_steps", "8"]
    output = launch("distillation_vision", tmp_path, *options, cold_start=12)
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == 8 and losses[-1] < 0.5 * losses[0]
    assert "'packing/shared_frac':" in output and "distillation" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_sft(tmp_path):
    output = launch("sft", tmp_path)
    assert "'mean_token_accuracy':" in output and "Accuracy on held-out recordings after training" in output
    assert json.loads((tmp_path / "demo_metrics.json").read_text())["updates"] == 2
    assert (tmp_path / "training_curves.png").exists() and "SFT" in (tmp_path / "README.md").read_text()


def test_arguments(tmp_path):
    """The command line overrides a config file, which overrides the demo. A model by name ignores the demo."""

    def read(*args):
        demo = {"max_steps": 7, "learning_rate": 1e-3, "output_dir": "demo", "bf16": False}
        script_args, training_args, model_args = parse(ppo.ARGUMENTS, ["--use_cpu", *args], demo)
        values = training_args.max_steps, training_args.learning_rate, training_args.output_dir
        return (*values, model_args.model_name_or_path, script_args.value_model_name_or_path)

    default = MultimodalPPOConfig(use_cpu=True)
    plain = (default.max_steps, default.learning_rate)
    settings = tmp_path / "settings.yaml"
    named = tmp_path / "named.yaml"
    settings.write_text("max_steps: 5\noutput_dir: file\nvalue_model_name_or_path: critic\n")
    named.write_text("model_name_or_path: model\noutput_dir: file\n")
    assert read() == (7, 1e-3, "demo", None, None)
    assert read("--max_steps", "3") == (3, 1e-3, "demo", None, None)
    assert read("--config", str(settings)) == (5, 1e-3, "file", None, "critic")
    assert read("--config", str(settings), "--max_steps=3") == (3, 1e-3, "file", None, "critic")
    assert read("--model_name_or_path", "model", "--output_dir", "mine") == (*plain, "mine", "model", None)
    assert read("--model_name_or_path=model", "--output_dir", "mine") == (*plain, "mine", "model", None)
    assert read("--config", str(named)) == (*plain, "file", "model", None)


def test_with_noise(tmp_path):
    for dataset, read in (
        (spoken_digits(tmp_path, train_rows=30, test_rows=10)["train"], read_recording),
        (handwritten_digits()["train"].select(range(30)), read_picture),
        (moving_digits(30, 4, frames=2)["train"], read_video),
    ):
        noisy = with_noise(dataset, every=2)
        assert noisy.features == dataset.features and noisy["solution"] == dataset["solution"]
        changed = []
        for row, clear in zip(noisy, dataset, strict=True):
            samples = read(row)
            like = read(clear)
            assert samples.shape == like.shape
            changed.append(not np.array_equal(samples, like))
            if changed[-1]:
                samples = samples.reshape(-1)
                assert abs(np.corrcoef(samples[1:], samples[:-1])[0, 1]) < 0.2  # 0 for white noise
        assert changed == [row // 10 % 2 == 0 for row in range(30)]


def read_recording(row):
    audio = row["audio"]
    return soundfile.read(io.BytesIO(audio["bytes"]) if audio["bytes"] else audio["path"])[0]


def read_picture(row):
    return np.asarray(row["image"], dtype=float)


def read_video(row):
    return np.stack([np.asarray(frame, dtype=float) for frame in row["video"]])


@pytest.mark.slow
def test_script_that_stands_alone(tmp_path):
    model, processor = hidden_digit_model()
    for each in (model, processor):
        each.save_pretrained(tmp_path / "model")
    pictures = hidden_digits()["train"].select(range(40))
    features = Features({"problem": Value("string"), "answer": Value("string"), "images": List(Image())})
    rows = [{"problem": "<image>What digit?", "answer": row["solution"], "images": [row["image"]]} for row in pictures]
    dataset = Dataset.from_list(rows, features)
    for split, n in HELD.items():
        dataset.select(range(n)).to_parquet(tmp_path / "data" / f"{split}.parquet")
    options = ("--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "data"), "--use_cpu")
    options += ("--dtype", "float32", "--bf16", "False", "--num_generations", "8", "--max_completion_length", "4")
    options += ("--use_peft", "--lora_target_modules", "all-linear", "--eval_strategy", "steps", "--eval_steps", "1")
    output = launch("grpo_vlm", tmp_path / "trained", *options, compact=True)
    assert output.count("\nstep ") >= 2 and "eval reward" in output and "effect of another image" in output
    assert (tmp_path / "trained" / "adapter_model.safetensors").exists()
