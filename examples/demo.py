# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Code that the example scripts share: argument parsing, the demos' default arguments, accuracy on held-out rows, and
noise as a question without an answer.
"""

import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

from trl_multimodal_rft import (
    CompactLogCallback,
    MultimodalGRPOTrainer,
    MultimodalSFTConfig,
    MultimodalSFTTrainer,
    TrainingCurvesCallback,
)


# isort: split
# Behind what names the packages of an environment that don't fit together
import numpy as np
from accelerate import PartialState
from datasets import Dataset, DatasetDict, List, Value
from PIL import Image as PILImage
from tasks import encoded
from transformers import PreTrainedModel, ProcessorMixin, Trainer, TrainingArguments
from trl import ModelConfig

from trl_multimodal_rft.cli.arguments import RunArguments, parse
from trl_multimodal_rft.cli.inputs import adapter_inputs
from trl_multimodal_rft.cli.training import ScriptCallback, checkpoint_of, script_run
from trl_multimodal_rft.evaluation import EvaluationConfig, GenerationEvalCallback
from trl_multimodal_rft.rewards import accuracy_reward
from trl_multimodal_rft.views import as_view


# Defaults of runs of minutes on a CPU
SHORT_RUN = {
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 10,
    "save_strategy": "no",
    "report_to": "none",
}
# Defaults of the demos
DEMO_ARGUMENTS = {
    "per_device_train_batch_size": 768,
    "num_generations": 16,
    "max_completion_length": 3,
    "learning_rate": 1e-3,
    "entropy_coef": 0.1,
    **SHORT_RUN,
}


# Arguments


def start(script: ModuleType, demo: Callable, demo_arguments: dict[str, object]) -> None:
    """Parses the arguments and runs the script, or the demo if they name no model."""
    arguments = parse(script.ARGUMENTS, demo=demo_arguments)
    arguments[0].command = f"accelerate launch {sys.argv[0]}"
    by_name = arguments[-1].model_name_or_path is not None
    if by_name:
        script.main(*arguments)
    else:
        with script_run(*arguments[:2]):
            demo(*arguments)


def saved(model: PreTrainedModel, processor: ProcessorMixin, folder: str | Path) -> str:
    """Saves a demo's model to a folder, from which vLLM loads it."""
    if PartialState().is_main_process:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    PartialState().wait_for_everyone()
    return str(folder)


def demo_inputs(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    dataset: DatasetDict,
    training_args: TrainingArguments,
    model_args: ModelConfig,
) -> dict[str, object]:
    """Arguments that the trainers of most demos share. `grpo_audio.py` spells them out."""
    return {
        "model": model,
        "args": training_args,
        "train_dataset": dataset["train"],
        "eval_dataset": dataset["test"] if training_args.eval_strategy != "no" else None,
        "processing_class": processor,
        "callbacks": [TrainingCurvesCallback()],
        **adapter_inputs(model_args),
    }


def cold_start(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    dataset: Dataset,
    training_args: TrainingArguments,
    batch_size: int = 100,
    **options,
) -> None:
    """Fine-tunes a demo's model on demonstrations before reinforcement learning."""
    args = MultimodalSFTConfig(
        str(Path(training_args.output_dir, "cold_start")),
        per_device_train_batch_size=max(1, batch_size // PartialState().num_processes),
        bf16=training_args.bf16,
        gradient_checkpointing=False,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        seed=training_args.seed,
        use_cpu=training_args.use_cpu,
        **{"max_steps": 80, "learning_rate": 1e-3, **options},
    )
    MultimodalSFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=processor).train()


# Measurements


class HeldOutAccuracy(GenerationEvalCallback):
    """
    Measures the accuracy of greedy decoding on held-out rows, before training and several times during it.

    Args:
        trainer ([`MultimodalGRPOTrainer`]):
            Trainer that the callback will be added to.
        dataset ([`~datasets.Dataset`]):
            Rows with the columns `prompt` and `solution` and their media.
        name (`str`):
            Name of the rows in printed messages.
        batch_size (`int`, *optional*, defaults to `100`):
            Rows per batch on each process.
        times (`int`, *optional*, defaults to `4`):
            Measurements during training, the last one at its end.
    """

    def __init__(
        self, trainer: MultimodalGRPOTrainer, dataset: Dataset, name: str, batch_size: int = 100, times: int = 4
    ):
        config = EvaluationConfig(max_completion_length=trainer.max_completion_length, batch_size=batch_size)
        super().__init__(trainer, dataset, accuracy_reward, config, freq=1)
        self.name = name
        self.times = times

    def on_train_begin(self, args, state, control, **kwargs):
        self.freq = math.ceil(state.max_steps / self.times)
        super().on_train_begin(args, state, control, **kwargs)

    def write(self) -> None:
        """
        Prints the latest accuracy and the output files, and writes `demo_metrics.json`, and `trainer_state.json` with
        the log, to the output folder.

        For a trainer with a critic, the metrics include `explained_variance`. It is the mean of the trainer's metric
        of that name (values at sampling time against returns) over the last quarter of the logged steps, or `None` if
        all returns were equal.
        """
        trainer = self.trainer
        history = self.trainer.state.log_history
        before = next(logs["eval_accuracy"] for logs in history if "eval_accuracy" in logs)
        after = self.result.metrics["accuracy"]
        trainer.accelerator.print(f"Accuracy on held-out {self.name}: {before:.1%} before training, {after:.1%} after")
        trainer.save_state()
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
        if trainer.accelerator.is_main_process:
            Path(trainer.args.output_dir, "demo_metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        trainer.accelerator.print(
            f"{trainer.args.output_dir} has the model, its curves (training_curves.png), its card (README.md) and "
            "these numbers (demo_metrics.json)."
        )


def train(trainer: Trainer, script_args: RunArguments) -> None:
    """Trains a demo and saves its model and card, or takes one step with `--dry_run`."""
    trainer.add_callback(ScriptCallback(script_args))
    if script_args.disable_compact_log:
        trainer.remove_callback(CompactLogCallback)
    trainer.train(resume_from_checkpoint=checkpoint_of(trainer.args))
    if not script_args.dry_run:
        trainer.save_model()
        trainer.create_model_card(dataset_name=script_args.dataset_name)


def publish(trainer: Trainer, script_args: RunArguments) -> None:
    """Pushes to the Hub if the config says so, and ends trackers and processes."""
    if trainer.args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
        trainer.args.hub_model_id = trainer.hub_model_id
    trainer.accelerator.end_training()


def train_and_measure(
    trainer: MultimodalGRPOTrainer, script_args: RunArguments, held_out: Dataset, name: str, **measured: int
) -> None:
    """Trains a demo and measures its accuracy on held-out rows."""
    accuracy = None if script_args.dry_run else HeldOutAccuracy(trainer, held_out, name, **measured)
    if accuracy is not None:
        trainer.add_callback(accuracy)
    train(trainer, script_args)
    if accuracy is not None:
        accuracy.write()
    publish(trainer, script_args)


# Views and noise


def seen(dataset: Dataset, view: str) -> Dataset:
    """Rows whose images are as the view shows them, each with random numbers of its own."""
    spec = as_view(view)
    return dataset.map(lambda row, i: {"image": spec.seeded(i)(row["image"], 0)}, with_indices=True)


def with_noise(dataset: Dataset, every: int = 4) -> Dataset:
    """
    Replaces some recordings, images or videos with white noise of the same length or size.

    The policy can only guess the answers to noise. The expected reward therefore depends on the row, and a critic must
    listen or look to predict it.
    """
    makers = {"audio": _noise_like_recording, "image": _noise_like_picture, "video": _noise_like_video}
    (column,) = makers.keys() & set(dataset.column_names)
    file: Any = {"bytes": Value("binary"), "path": Value("string")}
    stored = dataset.cast_column(column, List(file) if column == "video" else file)[column]
    rng = np.random.default_rng(0)
    media = [makers[column](medium, rng) if row // 10 % every == 0 else medium for row, medium in enumerate(stored)]
    return dataset.remove_columns(column).add_column(column, media).cast_column(column, dataset.features[column])


def _noise_like_recording(medium: dict, rng: np.random.Generator) -> dict:
    import soundfile

    like = soundfile.info(medium["path"])
    return encoded(rng.normal(scale=0.1, size=like.frames), like.samplerate)


def _noise_like_video(medium: list[dict], rng: np.random.Generator) -> list[dict]:
    return [_noise_like_picture(frame, rng) for frame in medium]


def _noise_like_picture(medium: dict, rng: np.random.Generator) -> dict:
    like = PILImage.open(io.BytesIO(medium["bytes"]))
    file = io.BytesIO()
    pixels = rng.integers(256, size=(like.height, like.width), dtype=np.uint8)
    PILImage.fromarray(pixels).save(file, format="PNG")
    return {"bytes": file.getvalue(), "path": None}
