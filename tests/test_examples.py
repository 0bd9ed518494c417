# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The example scripts, launched as users launch them, for a few steps; and the README's use of what they save."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent


def launch(script, output_dir, *options):
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", f"examples/{script}.py"),
        *("--output_dir", str(output_dir), "--max_steps", "2", "--per_device_train_batch_size", "32"),
        *("--logging_steps", "1", *options),
    ]
    run = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return run.stdout + run.stderr


def check_results(output_dir, output, *more):
    metrics = json.loads((output_dir / "demo_metrics.json").read_text())
    assert metrics.keys() == {"accuracy_before", "accuracy_after", "train_seconds", "updates", *more}
    assert metrics["updates"] == 2
    assert (output_dir / "reward.png").read_bytes().startswith(b"\x89PNG")
    card = (output_dir / "README.md").read_text()
    assert "self-check: packed = padded" in card and "trl-multimodal-rft" in card
    assert re.search(r"Accuracy on held-out \w+ before training: \d+\.\d%", output)
    assert "'reward':" in output and "'packing/shared_frac':" in output


def test_audio_and_the_readme(tmp_path):
    check_results(tmp_path, launch("grpo_audio", tmp_path))

    from tasks import spoken_digits

    wav = spoken_digits(train_rows=10, test_rows=10)["test"][0]["audio"]["path"]
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = next(block for block in blocks if "outputs/grpo_audio" in block)
    code = code.replace("outputs/grpo_audio", str(tmp_path)).replace("seven.wav", wav)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    assert re.fullmatch(r"\['.*'\]", run.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("script", ["grpo_vision", "grpo_video"])
def test_vision_and_video(script, tmp_path):
    check_results(tmp_path, launch(script, tmp_path))


def check_critic(output_dir, output):
    check_results(output_dir, output, "explained_variance")
    # As many updates as epochs: one batch of completions, whose values are measured when they are sampled
    (logged,) = re.findall(r"'explained_variance': '?([-\d.e]+)", output)
    metrics = json.loads((output_dir / "demo_metrics.json").read_text())
    assert metrics["explained_variance"] == pytest.approx(float(logged), rel=1e-3)
    assert (output_dir / "critic" / "value_head.safetensors").exists()


def test_ppo_audio(tmp_path):
    check_critic(tmp_path, launch("ppo_audio", tmp_path))


@pytest.mark.slow
def test_ppo_vision(tmp_path):
    check_critic(tmp_path, launch("ppo_vision", tmp_path))


@pytest.mark.slow
def test_with_arguments(tmp_path):
    """The way users take: a model by name, a dataset by path, LoRA."""
    from small_models import spoken_digit_model
    from tasks import spoken_digits

    model, processor = spoken_digit_model()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    rows = spoken_digits(train_rows=20, test_rows=10)
    for split in rows:
        rows[split].to_parquet(tmp_path / "data" / f"{split}.parquet")
    options = (
        *("--model_name_or_path", str(tmp_path / "model"), "--dtype", "float32"),
        *("--dataset_name", str(tmp_path / "data"), "--use_peft", "--lora_target_modules", "q_proj", "v_proj"),
        *("--num_generations", "8", "--max_completion_length", "4", "--bf16", "False", "--use_cpu"),
        *("--eval_strategy", "steps", "--eval_steps", "1"),
    )
    output = launch("grpo_audio", tmp_path / "trained", *options)
    assert "rewards/format_reward/mean" in output and "eval_reward" in output
    assert (tmp_path / "trained" / "adapter_model.safetensors").exists()
