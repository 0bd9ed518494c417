# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
On-policy distillation for vision-language models.

Without arguments, the script trains a small Qwen2.5-VL with random weights to read noisy handwritten digits, on a CPU
in minutes. Its teacher sees the same digits without the noise:

```bash
accelerate launch examples/distillation_vision.py
```

With arguments, the script trains any vision-language model on any dataset with the columns `prompt` and `image`:

```bash
accelerate launch examples/distillation_vision.py \
    --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
    --teacher_model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct \
    --dtype bfloat16 \
    --dataset_name path/to/dataset \
    --output_dir Qwen2.5-VL-Distilled \
    --learning_rate 1e-6 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 8 \
    --max_completion_length 512
```
"""

from demo import DEMO_ARGUMENTS, cold_start, demo_inputs, seen, start, train_and_measure
from small_models import digit_model
from tasks import handwritten_digits

from trl_multimodal_rft import MultimodalDistillationTrainer
from trl_multimodal_rft.cli.commands import distillation


NOISE = "diffusion_noise(step=400)"
DEMO = {
    **{name: value for name, value in DEMO_ARGUMENTS.items() if name != "entropy_coef"},
    "output_dir": "outputs/distillation_vision",
    "max_steps": 100,
    "per_device_train_batch_size": 256,
    "num_generations": 4,
    "learning_rate": 2e-3,
    "beta": 0.0,  # the reverse divergence leaves random weights at one answer to all digits
    "student_view": NOISE,
}


def taught(dataset, training_args):
    """A digit model that has been shown the answers to clean digits, and its processor."""
    teacher, processor = digit_model(training_args.seed + 1)
    answers = dataset["train"].rename_column("solution", "completion")
    cold_start(teacher, processor, answers, training_args, max_steps=100)
    return teacher, processor


def demo(script_args, training_args, model_args):
    dataset = handwritten_digits()
    teacher, processor = taught(dataset, training_args)
    student, _ = digit_model(training_args.seed)
    trainer = MultimodalDistillationTrainer(
        **{**demo_inputs(student, processor, dataset, training_args, model_args), "teacher_model": teacher}
    )
    train_and_measure(trainer, script_args, seen(dataset["test"], training_args.student_view), "noisy digits")


if __name__ == "__main__":
    start(distillation, demo, DEMO)
