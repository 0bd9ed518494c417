# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What the example scripts measure and write beside the model: held-out accuracy, curves, the numbers."""

import json
import math
from pathlib import Path
from statistics import fmean

import torch
from datasets import Dataset
from transformers import GenerationConfig

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.media import encode_prompt, rows_to_messages
from trl_multimodal_rft.rewards import accuracy_reward
from trl_multimodal_rft.rollout import generate_completions


def greedy_accuracy(trainer: MultimodalGRPOTrainer, dataset: Dataset, batch_size: int = 100) -> float:
    """
    Share of rows that the trainer's model answers correctly with greedy decoding.

    Args:
        trainer ([`MultimodalGRPOTrainer`]):
            Trainer whose model and processor answer.
        dataset ([`~datasets.Dataset`]):
            Rows with the columns `prompt` and `solution` and their media.
        batch_size (`int`, *optional*, defaults to `100`):
            Rows answered at once.

    Returns:
        `float`: Accuracy between 0 and 1.
    """
    model, processor = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    tokenizer = processor.tokenizer
    config = GenerationConfig(
        max_new_tokens=trainer.max_completion_length,
        do_sample=False,
        eos_token_id=trainer.eos_token_ids,
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=trainer.generation_config.suppress_tokens,
    )
    was_training = model.training
    model.eval()
    correct = 0.0
    for start in range(0, len(dataset), batch_size):
        rows = [dataset[i] for i in range(start, min(start + batch_size, len(dataset)))]
        prompts = [encode_prompt(row["prompt"], processor, model) for row in rows_to_messages(rows)]
        with torch.no_grad():
            ids = generate_completions(model, model, prompts, config, tokenizer.pad_token_id, model.device)
        completions = tokenizer.batch_decode(ids, skip_special_tokens=True)
        correct += sum(accuracy_reward(completions=completions, solution=[row["solution"] for row in rows]))
    model.train(was_training)
    return correct / len(dataset)


def write_results(trainer: MultimodalGRPOTrainer, before: float, after: float) -> dict[str, float]:
    """
    Writes `demo_metrics.json` and `reward.png` into the output folder.

    Of a trainer with a critic, `explained_variance` is among the metrics: the mean of the trainer's metric of that name,
    values at sampling time against returns, over the last quarter of the logged steps; `None` where all returns were equal.

    Args:
        trainer ([`MultimodalGRPOTrainer`]):
            Trainer that has trained.
        before (`float`):
            Held-out accuracy before the training.
        after (`float`):
            Held-out accuracy after the training.

    Returns:
        `dict[str, float]`: The metrics written.
    """
    history = trainer.state.log_history
    metrics = {
        "accuracy_before": before,
        "accuracy_after": after,
        "train_seconds": next(logs["train_runtime"] for logs in reversed(history) if "train_runtime" in logs),
        "updates": trainer.state.global_step,
    }
    explained = [logs["explained_variance"] for logs in history if "explained_variance" in logs]
    if explained:
        known = [value for value in explained[-math.ceil(len(explained) / 4) :] if value is not None]
        metrics["explained_variance"] = fmean(known) if known else None
    folder = Path(trainer.args.output_dir)
    (folder / "demo_metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    plot_reward(history, folder / "reward.png", f"Held-out accuracy {before:.0%} before, {after:.0%} after")
    return metrics


def plot_reward(history: list[dict], path: Path, title: str) -> None:
    """
    Draws the mean reward of each logged step, with the spread over its completions, and what a critic explains of it.

    Args:
        history (`list[dict]`):
            Log history of a trainer.
        path (`Path`):
            PNG file to write.
        title (`str`):
            Title of the picture.
    """
    from matplotlib.figure import Figure

    logs = [entry for entry in history if "reward" in entry]
    steps, mean, std = ([entry[key] for entry in logs] for key in ("step", "reward", "reward_std"))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    low, high = zip(*((m - s, m + s) for m, s in zip(mean, std, strict=True)), strict=True)
    axes.fill_between(steps, low, high, alpha=0.2, label="± standard deviation")
    axes.plot(steps, mean, label="mean reward")
    axes.set(xlabel="update", ylabel="reward", title=title)
    axes.grid(alpha=0.3)
    if "explained_variance" in logs[-1]:
        explained = [math.nan if (value := entry["explained_variance"]) is None else value for entry in logs]
        right = axes.twinx()
        right.plot([], [], color="C0", label="mean reward")
        right.plot(steps, explained, color="C1", linestyle="--", label="explained variance")
        right.set(
            ylabel="explained variance of the returns",
            ylim=(min([0.0, *(value for value in explained if value == value)]), 1),
        )
        right.legend(loc="lower right")
    figure.savefig(path, dpi=150)
