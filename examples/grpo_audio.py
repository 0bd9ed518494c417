# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
GRPO for audio models.

Without arguments, the script trains a small Qwen2-Audio with random weights to recognize spoken digits. Accuracy on
held-out voices rises from chance to near-perfect, on a CPU in minutes:

```bash
accelerate launch examples/grpo_audio.py
```

With `--use_vllm` (on a GPU), vLLM samples the completions. With arguments, the script trains any audio model on any
dataset with the columns `prompt`, `audio` and `solution`:

```bash
accelerate launch examples/grpo_audio.py \
    --model_name_or_path Qwen/Qwen2-Audio-7B-Instruct \
    --dtype bfloat16 \
    --dataset_name path/to/dataset \
    --output_dir Qwen2-Audio-GRPO \
    --learning_rate 1e-5 \
    --num_generations 8 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 4 \
    --max_completion_length 256 \
    --use_peft \
    --lora_target_modules q_proj v_proj
```
"""

import shutil
from pathlib import Path

from demo import DEMO_ARGUMENTS, saved, start, train_and_measure
from small_models import spoken_digit_model
from tasks import leading_answer_reward, spoken_digits

from trl_multimodal_rft import MultimodalGRPOTrainer, TrainingCurvesCallback
from trl_multimodal_rft.cli.commands import grpo
from trl_multimodal_rft.cli.inputs import adapter_inputs
from trl_multimodal_rft.rewards import accuracy_reward


DEMO = {
    **DEMO_ARGUMENTS,
    "output_dir": "outputs/grpo_audio",
    "max_steps": 200,
}


def demo(script_args, training_args, model_args):
    model, processor = spoken_digit_model()
    if training_args.use_vllm:
        model = saved(model, processor, f"{training_args.output_dir}/before")
    dataset = spoken_digits()
    trainer = MultimodalGRPOTrainer(
        model=model,
        reward_funcs=[accuracy_reward, leading_answer_reward],
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"] if training_args.eval_strategy != "no" else None,
        processing_class=processor,
        callbacks=[TrainingCurvesCallback()],
        **adapter_inputs(model_args),
    )
    if trainer.accelerator.is_main_process:
        Path(training_args.output_dir).mkdir(parents=True, exist_ok=True)
        shutil.copy(dataset["test"][7]["audio"]["path"], Path(training_args.output_dir, "seven.wav"))
    train_and_measure(trainer, script_args, dataset["test"], "voices", times=10)


if __name__ == "__main__":
    start(grpo, demo, DEMO)
