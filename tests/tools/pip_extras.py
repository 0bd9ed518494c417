# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
The wheel with each of its extras, in an otherwise empty environment.

There the command line trains a tiny model by its name, on rows in the Hub's format, and evaluates the saved model.
`make test-extras` checks all extras. With names as arguments, this file checks only those. `vllm` and `flash-attn`
need a GPU, `make demo` installs `examples`, `make demo-sight` `examples-real`, and `make test` the others.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from pathlib import Path

from datasets import Audio, Dataset, Features, Image, List, Value, Video
from helpers.chats import audio, image, video
from helpers.families import FAMILIES
from helpers.files import image_file, sound_file, video_file


ROOT = Path(__file__).parents[2]
ELSEWHERE = {"vllm", "flash-attn", "examples", "examples-real", "docs", "test", "dev"}
HOW = ["--max_steps", "2", "--num_generations", "2", "--per_device_train_batch_size", "4", "--report_to", "none"]
HOW += ["--max_completion_length", "4", "--bf16", "False", "--dtype", "float32", "--logging_steps", "1"]
HOW += ["--accelerate_config", "cpu", "--gradient_checkpointing", "False"]
HOW += ["--steps_per_generation", "1", "--gradient_accumulation_steps", "1"]
# Recipes in the wheel that name rewards
RECIPES = {
    "audio": ["--config", "qwen2_audio_7b/avqa_grpo"],
    "image": ["--config", "qwen2_5_vl_3b/geometry3k_grpo", "--use_vllm", "False"],
}
# Checks of the other extras
OPTIONS = {
    "logging": ["--report_to", "all", "--log_completions"],
    "speech": ["--reward_funcs", "wer_reward", "cer_reward", "ocr_reward"],
    "peft": ["--use_peft", "--lora_target_modules", "all-linear"],
    "peft,quantization": ["--use_peft", "--lora_target_modules", "all-linear", "--load_in_4bit"],
}
# Packages whose environments tests act in; two of them don't go together
ENVIRONMENTS = {
    "environments": ("openenv", "extras/test_openenv.py"),
}


MEDIA = {
    "audio": (Audio(), lambda i: sound_file(audio(0.5, i)["audio"], name="MP3" if i % 2 else "WAV")),
    "image": (Image(), lambda i: image_file(image(84, 56, seed=i)["image"])),
    "video": (Video(), lambda i: video_file(video(4, 84, 56, seed=i)["video"], codec="mpeg4", rate=2)),
}


def write_inputs(folder: Path) -> None:
    """Writes two models, and rows of text and of each media kind."""
    for family in ("qwen2_audio", "qwen2_5_vl"):
        FAMILIES[family].save(folder / family)
    for kind, (feature, make) in {"text": (None, None), **MEDIA}.items():
        features = {"prompt": Value("string"), "solution": Value("string"), "choices": List(Value("string"))}
        rows = [{"prompt": f"What is it? {i}", "solution": str(i), "choices": ["0", "1", "2", "3"]} for i in range(4)]
        if make is not None:
            features[kind] = feature
            rows = [{**row, kind: {"bytes": make(i), "path": None}} for i, row in enumerate(rows)]
        for split in ("train", "test"):
            Dataset.from_list(rows, Features(features)).to_parquet(folder / "rows" / kind / f"{split}.parquet")


def write_wheel(folder: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):  # a build leaves files in its source folder
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "trl_multimodal_rft", folder / "trl_multimodal_rft")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, folder], check=True)
    shutil.rmtree(folder / "trl_multimodal_rft")  # commands run in this folder, and must use the installed package


def environment(extra: str, folder: Path) -> dict[str, str]:
    """Returns the variables of a new environment with the wheel and the extra."""
    home = folder / "venv"
    (wheel,) = folder.glob("*.whl")
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    outside |= {"PATH": f"{home / 'bin'}:{outside['PATH']}", "LD_LIBRARY_PATH": str(home / "ffmpeg")}
    outside |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "WANDB_MODE": "offline"}
    install = ["-m", "pip", "install", "-q", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    for words in ([*install, f"{wheel}[{extra}]" if extra else wheel], [ROOT / "tests" / "shims" / "install.py"]):
        subprocess.run([home / "bin" / "python", *words], env=outside, check=True)
    return outside


def check(extra: str, folder: Path) -> None:
    """Installs an extra and uses its features."""
    outside = environment(f"audio,{extra},image" if extra in ENVIRONMENTS else extra, folder)  # tests need media
    kind = extra if extra in MEDIA else "text"
    model = folder / ("qwen2_5_vl" if kind in ("image", "video") else "qwen2_audio")
    trained = folder / "trained"
    programs = folder / "venv" / "bin"

    def command(*words):
        subprocess.run([programs / "trl-multimodal-rft", *words], cwd=folder, env=outside, check=True)

    if extra == "deepspeed":  # its launcher and kernels need a GPU
        subprocess.run([programs / "python", "-c", "import deepspeed"], env=outside, check=True)
        return
    if extra in ENVIRONMENTS:  # against the package's servers
        python = programs / "python"
        (package, tests) = ENVIRONMENTS[extra]
        more = ["-m", "pip", "install", "-q", "--constraint", ROOT / "constraints.txt", package, "pytest"]
        subprocess.run([python, *more], env=outside, check=True)
        subprocess.run(
            [python, "-m", "pytest", "-q", "-m", "extras", ROOT / "tests" / tests], cwd=folder, env=outside, check=True
        )
        return
    rows = ["--dataset_name", folder / "rows" / kind]
    how = [*RECIPES.get(extra, ["--reward_funcs", "accuracy_reward"]), *HOW, *OPTIONS.get(extra, [])]
    command("check", "--model_name_or_path", model, "--dataset_name", rows[1], "--num_workers", "0")
    command("grpo", "--model_name_or_path", model, *rows, "--output_dir", trained, *how)
    if extra == "plots":
        assert (trained / "training_curves.png").stat().st_size
    if extra == "logging":
        assert list(trained.rglob("events.out.tfevents*")) and list(folder.rglob("run-*.wandb"))
    if extra == "chat":
        asked_over_http([programs / "trl-multimodal-rft", "chat", trained, "--port", "7899"], outside)
    options = ["--reward_funcs", "format_reward", "--max_completion_length", "4", "--accelerate_config", "cpu"]
    command("evaluate", "--model_name_or_path", trained, *rows, *options, "--output_dir", folder / "results")
    assert json.loads((folder / "results" / "metrics.json").read_text())["metrics"]["rows"] == 4


def asked_over_http(words: list, env: dict) -> None:
    """Waits for the server, which prints its address, and sends requests."""
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as page:
        try:
            assert any("http://127.0.0.1:7899" in line for line in page.stdout)
            with urllib.request.urlopen("http://127.0.0.1:7899/config", timeout=60) as answer:
                assert json.load(answer)["components"]
        finally:
            page.terminate()


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = ["", *(extra for extra in project["optional-dependencies"] if extra not in ELSEWHERE)]
    known[known.index("quantization")] = "peft,quantization"  # adapters need both
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", default=known, help="which; all by default, and none at all")
    for extra in parser.parse_args().extras:
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(Path(folder))
            write_wheel(Path(folder))
            check(extra, Path(folder))
        print(f"{extra or 'no extra'}: installed, trained and evaluated", flush=True)


if __name__ == "__main__":
    main()
