# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
The first hour of a new user: `docs/first_run.md`, `first_pairs.md` and `first_agent.md` as they stand, and common
mistakes.

The environment has only the wheel of this repository. The working directory has only the user's files. The commands of
the pages train small models, and print what the pages show. The console of the first training is compared with
`first_hour.txt`, in which numbers, times and folders are masked; `--write` stores it anew. Each mistake gives one line
and exit code 1 or 2.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from difflib import unified_diff
from pathlib import Path

import soundfile
import soxr
from helpers import first_run_page
from helpers.files import write_lines
from PIL import Image
from pip_extras import environment, write_wheel
from tasks import SPOKEN_QUESTION


ROOT = Path(__file__).parents[1]
CONSOLE = Path(__file__).with_suffix(".txt")
RATE = 22050  # Hz; the model has another rate
CPU = ["--accelerate_config", "cpu", "--dtype", "float32"]
MODEL = ["--model_name_or_path", "model"]
ROWS = ["--dataset_name", "train.jsonl", "--media_dir", "recordings", "--prompt", "{question}"]
SCORED = [*CPU, "--reward_funcs", "accuracy_reward", "--max_completion_length", "3"]
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
    """Writes the user's files: those of the page, whose sounds get another rate, and rows in other layouts."""
    folder.mkdir()
    subprocess.run([sys.executable, ROOT / "examples" / "first_run.py"], cwd=folder, check=True)
    for path in (folder / "recordings").iterdir():
        samples, rate = soundfile.read(path)
        soundfile.write(path, soxr.resample(samples, rate, RATE), RATE)
    rows = [line.split(",") for line in (folder / "train.csv").read_text().splitlines()[1:]]
    rows = [{"question": SPOKEN_QUESTION, "audio": name, "solution": answer} for name, answer in rows]
    write_lines(folder / "train.jsonl", rows)
    Image.new("RGB", (28, 28)).save(folder / "image.png")
    deaf = {"prompt": SPOKEN_QUESTION, "audio_path": "recordings/train_0.wav", "solution": "one"}
    for name, row in {**LAYOUTS, "deaf": deaf}.items():
        write_lines(folder / f"{name}.jsonl", [row] * 2)
    for page in (first_run_page.PAGE, first_run_page.PAIRS):
        first_run_page.write_files(folder, page)


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
        seeing = ["grpo", "--model_name_or_path", "seeing", *SHORT, *SCORED]
        kind = seeing if layout in ("easyr1", "verl") else ["sft", *MODEL, *SHORT[:-4]]
        command(*kind, "--dataset_name", f"prepared/{layout}", "--dry_run")

    # The pages
    run = first_run_page.play(command, folder)["trl-multimodal-rft grpo --config digits.yaml"]
    assert "Warning" not in run.stderr, run.stderr
    printed = first_run_page.masked(run.stdout, folder)
    if write:
        CONSOLE.write_text("\n".join(printed) + "\n")
    difference = list(unified_diff(CONSOLE.read_text().splitlines(), printed, "stored", "shown", lineterm=""))
    assert not difference, "\n".join(difference)
    again = command("grpo", "--config", "digits/run.yaml", "--dry_run").stdout
    assert "<audio: " in again, again
    metrics = json.loads((folder / "results" / "metrics.json").read_text())["metrics"]
    assert metrics["accuracy"] > 0.8, metrics

    first_run_page.play(command, folder, first_run_page.PAIRS)
    code, shown = re.findall(r"```(?:python|text)\n(.*?)```", first_run_page.AGENT.read_text(), re.DOTALL)
    acted = subprocess.run([programs / "python", "-c", code], cwd=folder, env=env, text=True, capture_output=True)
    roles = [[line.split()[0] for line in text.splitlines()[-3:]] for text in (acted.stdout, shown)]
    assert roles[0] == roles[1] and "tool: <image>" in acted.stdout, code + acted.stdout + acted.stderr

    # The card's code accepts a sound of any rate
    card = (folder / "digits" / "README.md").read_text()
    code = re.search(r"## Quick start\n\n```python\n(.*?)```", card, re.DOTALL)[1]
    script = code.replace("audio.wav", "recordings/test_7.wav")
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
