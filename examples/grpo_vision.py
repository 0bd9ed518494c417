# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
GRPO for vision-language models.

Without arguments, the script trains a small Qwen2.5-VL with random weights to read handwritten digits, on a CPU in
minutes:

```bash
accelerate launch examples/grpo_vision.py
```

With arguments, the script trains any vision-language model on any dataset with the columns `prompt`, `image` and
`solution`:

```bash
accelerate launch examples/grpo_vision.py \
    --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
    --dtype bfloat16 \
    --dataset_name path/to/dataset \
    --output_dir Qwen2.5-VL-GRPO \
    --learning_rate 1e-5 \
    --num_generations 8 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 4 \
    --max_completion_length 256 \
    --use_peft \
    --lora_target_modules q_proj v_proj
```
"""

from demo import DEMO_ARGUMENTS, demo_inputs, start, train_and_measure
from small_models import digit_model
from tasks import handwritten_digits, leading_answer_reward

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.cli.commands import grpo
from trl_multimodal_rft.rewards import accuracy_reward


DEMO = {
    **DEMO_ARGUMENTS,
    "output_dir": "outputs/grpo_vision",
    "max_steps": 250,
}


def demo(script_args, training_args, model_args):
    model, processor = digit_model()
    dataset = handwritten_digits()
    trainer = MultimodalGRPOTrainer(
        **demo_inputs(model, processor, dataset, training_args, model_args),
        reward_funcs=[accuracy_reward, leading_answer_reward],
    )
    train_and_measure(trainer, script_args, dataset["test"], "digits")


if __name__ == "__main__":
    start(grpo, demo, DEMO)
