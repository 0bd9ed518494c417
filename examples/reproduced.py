# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Options, table and curve of `reproduce.sh`."""

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

from trl_multimodal_rft.cli.options import config_path, launched_command_parser, options_of


# Options of a training that its evaluation has, too: those of its rows, its prompts and its sampling
SHARED = ("dataset_name", "dataset_config", "media_dir", "ignored_media_columns", "prompt", "system_prompt")
SHARED += ("min_pixels", "max_pixels", "max_frames", "video_fps", "use_audio_in_video", "audio_overlong")
SHARED += ("special_tokens_in_text", "max_completion_length", "tools", "max_tool_calling_iterations")
SHARED += ("max_tool_media", "max_context_media", "trust_remote_code")
RECORD = "settings.json"  # what the results of a folder are of


def settings_of(recipe: str, options: list[str]) -> tuple[str, list[str], list[str]]:
    """
    The command of a recipe, the options of its model, and those of an evaluation by its first reward function.

    Args:
        recipe (`str`):
            Name of a recipe of the package, or a YAML file with its comments.
        options (`list[str]`):
            Further options of the training, some of which its evaluation has, too.

    Raises:
        `ValueError`: If there is no such recipe, or if it has no command or no reward function.
    """
    comments = Path(config_path("recipes", recipe)).read_text(encoding="utf-8")
    command = re.search(r"^# .*trl-multimodal-rft (\w+) --config", comments, re.MULTILINE)
    parser = None if command is None else launched_command_parser("TRAIN", options_of(command[1]))
    settings = {} if parser is None else vars(parser.parse_with_config(["--config", recipe, *options]))
    if not settings.get("reward_funcs"):
        raise ValueError(f"{recipe!r} names no command or no `reward_funcs`, by which completions are right.")
    shared = [word for name in SHARED for word in words_of(name, settings.get(name))]
    shared += ["--reward_funcs", settings["reward_funcs"][0], "--dtype", "bfloat16"]
    model = ["--model_name_or_path", settings["model_name_or_path"]]
    return command[1], model + words_of("model_revision", settings.get("model_revision")), shared


def words_of(name: str, value) -> list[str]:
    """The words of an option on a command line. A text may begin with dashes, and have several lines."""
    if value is None or value == []:
        return []
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]


def check_record(folder: Path, record: dict) -> None:
    """
    Writes what the results of a folder are of.

    Raises:
        `ValueError`: If the folder has results of something else.
    """
    path = folder / RECORD
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else record
    if not path.is_file() and (folder / "before").exists():
        raise ValueError(f"'{folder}' has results without {RECORD}, which says what they are of; name another folder.")
    other = [name for name, value in record.items() if earlier.get(name) != value]
    if other:
        raise ValueError(
            f"'{folder}' has results of another {' and '.join(other)} ({path}); name another folder, or remove it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")


def commit() -> str:
    """The commit of this checkout, with a mark if files have changed since."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    described = subprocess.run(words, capture_output=True, text=True)
    return described.stdout.strip() or "unknown"


def table(before: dict, after: dict[str, dict]) -> str:
    """
    Accuracies as a Markdown table: before training, after the training of each seed, and the mean over seeds.

    Intervals of single models are those of `evaluate`; the mean comes with the standard deviation over seeds.
    """

    def cell(metrics: dict) -> str:
        ends = (metrics.get(f"accuracy_{end}") for end in ("low", "high"))
        return f"{metrics['accuracy']:.1%} | " + " to ".join("?" if end is None else f"{end:.1%}" for end in ends)

    lines = ["| model | accuracy | 95 % interval |", "|---|---|---|", f"| before | {cell(before)} |"]
    lines += [f"| after, {seed} | {cell(metrics)} |" for seed, metrics in after.items()]
    values = [metrics["accuracy"] for metrics in after.values()]
    if len(values) > 1:
        lines.append(f"| after, mean | {statistics.mean(values):.1%} | ± {statistics.stdev(values):.1%} over seeds |")
    return "\n".join([*lines, "", f"Rows: {before['rows']:.0f}"])


def curve(rewards: dict[str, dict[int, float]]) -> Figure:
    """The mean reward of completions by update, a line for each seed."""
    figure = Figure((6, 3), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for seed, values in rewards.items():
        axes.plot(values.keys(), values.values(), label=seed, linewidth=1)
    axes.set(xlabel="update", ylabel="mean reward of completions")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def rewards_of(run: Path) -> dict[int, float]:
    """Mean rewards by update, from the last checkpoint of a run."""
    last = max(run.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name.split("-")[1]))
    history = json.loads(last.read_text())["log_history"]
    return {entry["step"]: entry["reward"] for entry in history if "reward" in entry}


def metrics_of(evaluation: Path) -> dict:
    """Metrics in the results of an evaluation."""
    return json.loads((evaluation / "metrics.json").read_text())["metrics"]


def write_results(folder: Path) -> None:
    """Writes `results.md` and `curve.png` of the seeds that are evaluated, and prints the table."""
    runs = {path.parents[1].name: path.parents[1] for path in sorted(folder.glob("seed-*/after/metrics.json"))}
    text = table(metrics_of(folder / "before"), {seed: metrics_of(run / "after") for seed, run in runs.items()})
    (folder / "results.md").write_text(text + "\n")
    curve({seed: rewards_of(run) for seed, run in runs.items()}).savefig(folder / "curve.png")
    print(text)


def reproduce(recipe: str, folder: Path, words: list[str], seeds: list[str], options: list[str]) -> None:
    """Evaluates, trains with each seed, and evaluates again. `words` are further options of the evaluation."""

    def run(*command: str) -> None:
        subprocess.run(["trl-multimodal-rft", *command], check=True)

    def evaluate(model: list[str], results: Path) -> None:
        if not (results / "metrics.json").is_file():
            run("evaluate", *shared, *model, *words, "--output_dir", str(results))

    command, model, shared = settings_of(recipe, options)
    text = Path(config_path("recipes", recipe)).read_text(encoding="utf-8")
    check_record(folder, {"recipe": text, "training": options, "evaluation": words, "commit": commit()})
    evaluate(model, folder / "before")
    for seed in seeds:
        result = folder / f"seed-{seed}"
        if not (result / "after" / "metrics.json").is_file():
            resume = ["--resume_from_checkpoint", "true"] if any(result.glob("checkpoint-*")) else []
            run(command, "--config", recipe, *options, *resume, "--seed", seed, "--output_dir", str(result))
        evaluate(["--model_name_or_path", str(result)], result / "after")
    write_results(folder)


if __name__ == "__main__":
    name, folder, *words = sys.argv[1:]
    try:
        seeds = os.environ.get("SEEDS", "0 1 2").split()
        options = shlex.split(os.environ.get("TRAIN", ""))
        reproduce(name, Path(folder), words, seeds, options)
    except ValueError as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
