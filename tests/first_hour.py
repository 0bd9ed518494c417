# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
The first hour of a new user: from a folder of sounds to a trained model, with common mistakes.

The environment has only the wheel of this repository. The working directory has only the user's files. Through the
commands a model with random weights learns spoken digits from WAV files that a JSON Lines file names. The console of
its training is compared with `first_hour.txt`, in which numbers, times and folders are masked; `--write` stores it
anew. Each mistake gives one line and exit code 1 or 2.
"""

import argparse
import json
import re
import subprocess
import tempfile
import time
from difflib import unified_diff
from pathlib import Path

import soundfile
import soxr
from extras import environment, write_wheel
from PIL import Image
from small_models import digit_model, spoken_digit_model
from tasks import SPOKEN_QUESTION, spoken_digits


CONSOLE = Path(__file__).with_suffix(".txt")
RATE = 22050  # Hz; the model has another rate
REWARDS = """
def begins_with_answer(completions, solution, **kwargs):
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float(text.strip().startswith(answer)) for text, answer in zip(texts, solution)]
"""
CPU = ["--accelerate_config", "cpu", "--dtype", "float32"]
MODEL = ["--model_name_or_path", "model"]
ROWS = ["--dataset_name", "train.jsonl", "--media_dir", "sounds", "--prompt", "{question}"]
HELD_OUT = ["--dataset_name", "test.jsonl", "--dataset_test_split", "train", *ROWS[2:]]
SCORED = [*CPU, "--reward_funcs", "accuracy_reward", "--max_completion_length", "3"]
# The settings of `make demo`, for fewer updates
LEARN = [*CPU, "--reward_funcs", "accuracy_reward", "my_rewards.begins_with_answer", "--max_steps", "100"]
LEARN += ["--per_device_train_batch_size", "768", "--num_generations", "16", "--max_completion_length", "3"]
LEARN += ["--learning_rate", "1e-3", "--entropy_coef", "0.1", "--gradient_checkpointing", "False", "--bf16", "False"]
LEARN += ["--logging_steps", "20", "--save_strategy", "no", "--report_to", "none", "--output_dir", "trained"]
SHORT = [*CPU, "--bf16", "False", "--report_to", "none", "--max_steps", "1", "--output_dir", "refused"]
SHORT += ["--num_generations", "2", "--per_device_train_batch_size", "2"]

QUESTION = [{"role": "user", "content": SPOKEN_QUESTION}]
SHOWN = [{"role": "user", "content": "<image>Which digit is shown?"}]
# A row in the format of each tool
LAYOUTS = {
    "sharegpt": {"conversations": [{"from": "human", "value": SPOKEN_QUESTION}, {"from": "gpt", "value": "one"}]},
    "llama-factory": {"messages": [*QUESTION, {"role": "assistant", "content": "one"}]},
    "ms-swift": {"query": SPOKEN_QUESTION, "response": "one"},
    "easyr1": {"problem": SHOWN[0]["content"], "answer": "one", "images": ["image.png"]},
    "verl": {
        "data_source": "digits",
        "prompt": SHOWN,
        "images": [{"image": "image.png"}],
        "reward_model": {"style": "rule", "ground_truth": "one"},
        "extra_info": {"index": 0},
    },
}
# Refused commands, and the words of the one-line message; `test_cli.py` and `test_messages.py` have the others
REFUSED = [
    (["gropo"], r"no command 'gropo'.* `grpo`"),
    (["grpo", *MODEL, "--dataset_name", "rows.jsonl"], r"no file or folder 'rows\.jsonl'; .*'train\.jsonl'"),
    (["grpo", *MODEL, "--dataset_name", "~/no.json"], r"no file or folder '.*/no\.json'"),
    (["grpo", "--model_name_or_path", "./modle", *ROWS], r"no file or folder './modle'; .*'model'"),
    (["grpo", *MODEL, *ROWS, *SHORT, "--temperature", "0"], r"`temperature` must be above 0"),
    (["grpo", *MODEL, "--dataset_name", "train.jsonl", *SHORT], r"no column 'prompt'.* 'question' to 'prompt'"),
    (
        ["rloo", *MODEL, *ROWS[:2], *ROWS[4:], *SHORT],
        r"train_\d+\.wav.*relative paths start from the working directory",
    ),
    (["evaluate", *MODEL, "--dataset_name", "deaf.jsonl", *SCORED], r"'audio_path'.* rename it to 'audio'"),
    (["sft", *MODEL, "--dataset_name", "sharegpt.jsonl", *SHORT[:-4]], r"prepare sharegpt"),
    (["grpo", *MODEL, "--dataset_name", "verl.jsonl", *SHORT], r"prepare verl"),
]


def write_files(folder: Path) -> None:
    """Writes the user's files: sounds, rows, rewards, configs, and two models with random weights."""
    (folder / "sounds").mkdir(parents=True)
    for split, rows in spoken_digits().items():
        lines = []
        for number, row in enumerate(rows):
            samples, rate = soundfile.read(row["audio"]["path"])
            name = f"{split}_{number}.wav"
            soundfile.write(folder / "sounds" / name, soxr.resample(samples, rate, RATE), RATE)
            lines.append({"question": SPOKEN_QUESTION, "audio": name, "solution": row["solution"]})
        write_lines(folder / f"{split}.jsonl", lines)
    Image.new("RGB", (28, 28)).save(folder / "image.png")
    deaf = {"prompt": SPOKEN_QUESTION, "audio_path": "sounds/train_0.wav", "solution": "one"}
    for name, row in {**LAYOUTS, "deaf": deaf}.items():
        write_lines(folder / f"{name}.jsonl", [row] * 2)
    (folder / "my_rewards.py").write_text(REWARDS)
    for name, make in (("model", spoken_digit_model), ("seeing", digit_model)):
        for part in make():
            part.save_pretrained(folder / name)


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def masked(console: str, folder: Path) -> list[str]:
    """Masks what differs between runs and machines: numbers, times, folders, and a completion."""
    text = console.replace(str(folder), "FOLDER").split("\r")[-1]
    text = re.sub(r"(?m)^completion \(.*", "completion", text)
    return re.sub(r"(?<!\w)-?\d[\d,]*(?<!,)(\.\d+)?(e[-+]?\d+)?( (s|min|h|k|M|B)\b)?", "N", text).splitlines()


def play(folder: Path, env: dict[str, str], programs: Path, write: bool) -> None:
    """Plays the hour in a folder with the user's files."""

    def command(*words: str, code: int = 0) -> subprocess.CompletedProcess:
        started = time.perf_counter()
        line = [str(programs / "trl-multimodal-rft"), *words]
        done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True)
        print(f"{time.perf_counter() - started:6.1f} s  {' '.join(words)[:100]}", flush=True)
        assert done.returncode in ([0] if code == 0 else [1, 2]), done.stdout + done.stderr
        return done

    # Help and mistakes
    assert command("--version").stdout.startswith("trl-multimodal-rft ")
    for name in ("grpo", "check", "chat"):
        shown = command(name, "--help").stdout
        assert "--model_name_or_path" in shown or name == "chat", shown
    for words, pattern in REFUSED:
        error = command(*words, code=1).stderr
        assert re.search(pattern, error.splitlines()[-1]) and "Traceback" not in error, error
    assert "Traceback" in command(*REFUSED[-1][0], "--debug", code=1).stderr

    # Rows of other tools
    for layout in LAYOUTS:
        command("prepare", layout, f"{layout}.jsonl", "--output_dir", f"prepared/{layout}")
        kind = (
            ["sft", *SHORT[:-4]] if layout in ("sharegpt", "llama-factory", "ms-swift") else ["grpo", *SHORT, *SCORED]
        )
        model = "seeing" if layout in ("easyr1", "verl") else "model"
        command(*kind, "--model_name_or_path", model, "--dataset_name", f"prepared/{layout}", "--dry_run")

    # From sounds to a trained model
    command("check", *MODEL, *ROWS, "--dataset_split", "train[:100]")
    assert not (folder / "trained").exists()
    dry = command("grpo", *MODEL, *ROWS, *LEARN, "--dry_run").stdout
    assert "<audio: " in dry and not (folder / "trained").exists(), dry
    run = command("grpo", *MODEL, *ROWS, *LEARN)
    assert "Warning" not in run.stderr, run.stderr
    shown = masked(run.stdout, folder)
    if write:
        CONSOLE.write_text("\n".join(shown) + "\n")
    difference = list(unified_diff(CONSOLE.read_text().splitlines(), shown, "stored", "shown", lineterm=""))
    assert not difference, "\n".join(difference)
    again = command("grpo", "--config", "trained/run.yaml", "--dry_run").stdout
    assert "<audio: " in again, again
    result = command(
        "evaluate", "--model_name_or_path", "trained", *HELD_OUT, *SCORED, "--output_dir", "results"
    ).stdout
    print(result)
    metrics = json.loads((folder / "results" / "metrics.json").read_text())["metrics"]
    assert metrics["accuracy"] > 0.8, metrics

    # The card's code accepts a sound of any rate
    code = re.search(
        r"## Quick start\n\n```python\n(.*?)```", (folder / "trained" / "README.md").read_text(), re.DOTALL
    )
    script = code[1].replace("audio.wav", "sounds/test_7.wav")
    heard = subprocess.run([programs / "python", "-c", script], cwd=folder, env=env, text=True, capture_output=True)
    assert heard.stdout.split()[-1].strip("[]'\"") == "seven", script + heard.stdout + heard.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the console of the run")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory() as name:
        outside = Path(name, "outside")
        outside.mkdir()
        write_wheel(outside)
        env = environment("audio,image,plots", outside)
        del env["WANDB_MODE"]  # offline, it prints an extra line
        folder = Path(name, "hour")
        write_files(folder)
        play(folder, env, outside / "venv" / "bin", write)
    print("the first hour: played")


if __name__ == "__main__":
    main()
