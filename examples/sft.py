# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Supervised fine-tuning for multimodal models.

Without arguments, the script trains a small Qwen2-Audio with random weights to recognize spoken digits, on 400 labeled
recordings and on a CPU in a minute:

```bash
accelerate launch examples/sft.py
```

The other trainers accept the saved model directly, as a cold start:

```bash
accelerate launch examples/grpo_audio.py --model_name_or_path outputs/sft --dataset_name path/to/dataset
```

With arguments, the script trains any model on any dataset with the columns `prompt` and `completion`, or `messages`,
and `audio`, `image(s)` or `video(s)`:

```bash
accelerate launch examples/sft.py \
    --model_name_or_path Qwen/Qwen2-Audio-7B-Instruct \
    --dtype bfloat16 \
    --dataset_name path/to/dataset \
    --output_dir Qwen2-Audio-SFT \
    --learning_rate 1e-5 \
    --packing \
    --per_device_train_batch_size 8 \
    --max_tokens_per_microbatch 8192 \
    --use_peft \
    --lora_target_modules q_proj v_proj
```
"""

import json
from pathlib import Path

from demo import SHORT_RUN, demo_inputs, publish, start, train
from small_models import spoken_digit_model
from tasks import spoken_digits

from trl_multimodal_rft import MultimodalSFTTrainer
from trl_multimodal_rft.cli.commands import sft
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.rewards import accuracy_reward


DEMO = {
    "output_dir": "outputs/sft",
    "per_device_train_batch_size": 100,
    "max_steps": 80,
    "learning_rate": 1e-3,
    "packing": True,
    **SHORT_RUN,
}


def demo(script_args, training_args, model_args):
    model, processor = spoken_digit_model()
    dataset = spoken_digits()
    rows = dataset.rename_column("solution", "completion")
    rows["train"] = rows["train"].select(range(400))
    trainer = MultimodalSFTTrainer(**demo_inputs(model, processor, rows, training_args, model_args))
    train(trainer, script_args)
    if trainer.accelerator.is_main_process:
        config = EvaluationConfig(max_completion_length=3, batch_size=100)
        accuracy = evaluate(model, processor, dataset["test"], accuracy_reward, config).metrics["accuracy"]
        print(f"Accuracy on held-out recordings after training: {accuracy:.1%}")
        metrics = {"accuracy_after": accuracy, "updates": trainer.state.global_step}
        Path(training_args.output_dir, "demo_metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    publish(trainer, script_args)


if __name__ == "__main__":
    start(sft, demo, DEMO)
