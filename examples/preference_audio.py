# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Preferences for audio models: DPO, and a reward model with GRPO.

Without arguments, the script shows both ways from pairs of answers to a better policy, on a CPU in minutes. A cold
start teaches a small Qwen2-Audio the form of an answer, and a few digits. From pairs of a right and a wrong answer to
spoken digits

1. a reward model learns which answer is better. GRPO then trains the policy with its rewards alone,
2. DPO trains the same policy:

```bash
accelerate launch examples/preference_audio.py
```

No run reads the solutions of the held-out voices, on which `demo_metrics.json` has the accuracies of the policies, and
the share of pairs in which the reward model prefers the right answer.

With arguments, the script trains any audio model by DPO on any dataset with the columns `prompt`, `audio`, `chosen`
and `rejected`:

```bash
accelerate launch examples/preference_audio.py \
    --model_name_or_path Qwen/Qwen2-Audio-7B-Instruct \
    --dtype bfloat16 \
    --dataset_name path/to/preferences \
    --output_dir Qwen2-Audio-DPO \
    --learning_rate 1e-6 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8
```
"""

import json
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, concatenate_datasets
from demo import SHORT_RUN, cold_start, publish, saved, start, train
from small_models import spoken_digit_model
from tasks import DIGITS, spoken_digits
from transformers import ProcessorMixin

from trl_multimodal_rft import (
    MultimodalDPOTrainer,
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
    MultimodalRewardConfig,
    MultimodalRewardTrainer,
)
from trl_multimodal_rft.cli.commands import dpo
from trl_multimodal_rft.cli.inputs import adapter_inputs
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.rewards import accuracy_reward


DEMO = {
    "output_dir": "outputs/preference_audio",
    "per_device_train_batch_size": 100,
    "max_steps": 50,
    "learning_rate": 1e-3,
    **SHORT_RUN,
}
SHARED = (
    "bf16",
    "gradient_checkpointing",
    "logging_steps",
    "max_steps",
    "report_to",
    "save_strategy",
    "seed",
    "use_cpu",
)


def pairs(rows: Dataset, seed: int) -> Dataset:
    """
    Rows with a right and a wrong answer: another digit or, in three of ten, the right digit and more. Without these,
    the reward model would know nothing of answers that don't end.
    """
    rng = np.random.default_rng(seed)

    def pair(row: dict) -> dict[str, str]:
        chosen = row["solution"]
        other = str(rng.choice([digit for digit in DIGITS if digit != chosen]))
        longer = " ".join([chosen, *[other] * rng.integers(1, 3)])
        return {"chosen": chosen, "rejected": longer if rng.random() < 0.3 else other}

    return rows.map(pair, remove_columns="solution")


def reward_model(policy: str, compared: DatasetDict, processor: ProcessorMixin, options: dict) -> tuple[str, float]:
    """Trains a reward model from a policy. Returns its folder and its accuracy on held-out pairs."""
    folder = str(Path(policy).with_name("reward_model"))
    trainer = MultimodalRewardTrainer(
        model=policy,
        args=MultimodalRewardConfig(
            folder,
            per_device_train_batch_size=100,
            per_device_eval_batch_size=100,
            learning_rate=1e-3,
            **{**options, "max_steps": 3 * options["max_steps"]},
        ),
        train_dataset=compared["train"],
        eval_dataset=compared["test"],
        processing_class=processor,
    )
    trainer.train()
    trainer.save_model()
    return folder, trainer.evaluate()["eval_accuracy"]


def rewarded_policy(policy: str, rewards: str, rows: Dataset, processor: ProcessorMixin, options: dict):
    """A policy trained by GRPO on the scores of a reward model."""
    trainer = MultimodalGRPOTrainer(
        model=policy,
        reward_funcs=rewards,
        args=MultimodalGRPOConfig(
            str(Path(policy).with_name("grpo")),
            per_device_train_batch_size=768,
            num_generations=16,
            max_completion_length=3,
            learning_rate=5e-4,
            beta=0.05,
            **options,
        ),
        train_dataset=rows,
        processing_class=processor,
    )
    trainer.train()
    trainer.save_model()
    return trainer.model


def demo(script_args, training_args, model_args):
    model, processor = spoken_digit_model(training_args.seed)
    dataset = spoken_digits()
    folder = Path(training_args.output_dir)

    def accuracy(policy) -> float:
        config = EvaluationConfig(max_completion_length=3, batch_size=100)
        return evaluate(policy, processor, dataset["test"], accuracy_reward, config).metrics["accuracy"]

    answers = dataset["train"].select(range(30)).rename_column("solution", "completion")
    cold_start(model, processor, answers, training_args, batch_size=30, max_steps=40)
    metrics = {"accuracy_before": accuracy(model)}
    policy = saved(model, processor, folder / "before")
    compared = DatasetDict(
        # A score is to tell the right digit from all others
        train=concatenate_datasets([pairs(dataset["train"], training_args.seed + 1 + i) for i in range(4)]),
        test=pairs(dataset["test"], training_args.seed),
    )

    if not script_args.dry_run:
        options = {name: getattr(training_args, name) for name in SHARED}
        rewards, metrics["reward_accuracy"] = reward_model(policy, compared, processor, options)
        prompts = dataset["train"].remove_columns("solution")
        metrics["accuracy_grpo"] = accuracy(rewarded_policy(policy, rewards, prompts, processor, options))
    trainer = MultimodalDPOTrainer(
        model=policy,
        args=training_args,
        train_dataset=compared["train"],
        processing_class=processor,
        **adapter_inputs(model_args),
    )
    train(trainer, script_args)
    if not script_args.dry_run:
        metrics["accuracy_dpo"] = accuracy(trainer.model)
        if trainer.accelerator.is_main_process:
            (folder / "demo_metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
            print(
                f"Accuracy on held-out voices: {metrics['accuracy_before']:.1%} before, "
                f"{metrics['accuracy_grpo']:.1%} after GRPO with a reward model that orders "
                f"{metrics['reward_accuracy']:.1%} of the held-out pairs right, "
                f"{metrics['accuracy_dpo']:.1%} after DPO"
            )
    publish(trainer, script_args)


if __name__ == "__main__":
    start(dpo, demo, DEMO)
