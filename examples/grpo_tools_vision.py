# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
GRPO for models that look closer: they see a thumbnail, call `zoom(x, y)`, get a quarter of the picture, and answer.

Without arguments, a small Qwen2.5-VL learns where to look and to read handwritten digits, on a CPU in minutes. Its
thumbnails have four pixels, in which one digit looks like the other: without the tool no policy is right more often
than one time in ten, which is counted and printed. It begins with a cold start on a few hundred demonstrations, after
which it calls the tool and mostly answers wrongly:

```bash
accelerate launch examples/grpo_tools_vision.py
```

With arguments, any vision-language model whose chat template has turns of tools, and any dataset (columns `prompt`,
`image` and `solution`):

```bash
accelerate launch examples/grpo_tools_vision.py \
    --model_name_or_path Qwen/Qwen3-VL-4B-Instruct \
    --dtype bfloat16 \
    --dataset_name path/to/dataset \
    --thumbnail_size 448 \
    --output_dir Qwen3-VL-zoom \
    --learning_rate 1e-5 \
    --num_generations 8 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 4 \
    --max_completion_length 1024 \
    --max_tool_calling_iterations 4 \
    --use_peft \
    --lora_target_modules q_proj v_proj
```
"""

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset
from demo import DEMO_ARGUMENTS, start, train_and_measure
from PIL import Image
from small_models import hidden_digit_model
from tasks import hidden_digits
from trl import ModelConfig, TrlParser

from trl_multimodal_rft import (
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
    MultimodalSFTConfig,
    MultimodalSFTTrainer,
    TrainingCurvesCallback,
)
from trl_multimodal_rft.rewards import accuracy_reward
from trl_multimodal_rft.scripts.arguments import RFTScriptArguments
from trl_multimodal_rft.scripts.inputs import adapter_inputs, trainer_inputs
from trl_multimodal_rft.scripts.training import curves, finish, train


DEMO = {
    **DEMO_ARGUMENTS,
    "output_dir": "outputs/grpo_tools_vision",
    "thumbnail_size": 2,
    "per_device_train_batch_size": 256,
    "max_completion_length": 26,  # a call, a quarter of the picture and an answer
    "max_tool_calling_iterations": 1,
    "entropy_coef": 0.01,
    "max_steps": 120,
}
COLD_START = {
    "num_train_epochs": 6,
    "per_device_train_batch_size": 20,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "assistant_only_loss": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
}


@dataclass
class ToolScriptArguments(RFTScriptArguments):
    """
    Script arguments of this example.

    Args:
        thumbnail_size (`int`, *optional*, defaults to `448`):
            Width and height of thumbnails at most, in pixels.
    """

    thumbnail_size: int = field(default=448, metadata={"help": "Width and height of thumbnails at most, in pixels."})


class Magnifier:
    """Shows quarters of a picture, which the column `picture` holds."""

    def reset(self, picture: Image.Image, **row) -> None:
        self.picture = picture

    def zoom(self, x: int, y: int) -> list:
        """
        Shows a quarter of the picture.

        Args:
            x: 0 for the left half, 1 for the right one.
            y: 0 for the upper half, 1 for the lower one.

        Returns:
            The quarter.
        """
        if not {x, y} <= {0, 1}:
            raise ValueError("x and y must be 0 or 1.")
        width, height = self.picture.width // 2, self.picture.height // 2
        left, top = x * width, y * height
        return [{"type": "image", "image": self.picture.crop((left, top, left + width, top + height))}]


def with_thumbnails(rows: Dataset, size: int) -> Dataset:
    """Rows with thumbnails in the column `image`, and in the column `picture` what was there."""

    def shrink(row: dict) -> dict:
        thumbnail = row["image"].copy()
        thumbnail.thumbnail((size, size), Image.Resampling.BOX, reducing_gap=None)
        return {"picture": row["image"], "image": thumbnail}

    return rows.map(shrink)


def best_without_tool(rows: Dataset) -> float:
    """
    Accuracy that no policy exceeds without the tool.

    To such a policy, rows with the same prompt and the same thumbnail are one, so at best it gives the most frequent
    of their answers.
    """
    answers: defaultdict[tuple, Counter] = defaultdict(Counter)
    for row in rows:
        answers[repr(row["prompt"]), row["image"].size, row["image"].tobytes()][row["solution"]] += 1
    return sum(max(counts.values()) for counts in answers.values()) / len(rows)


def demonstrations(rows: Dataset) -> Dataset:
    """Conversations in which the right quarter is looked at, and the right answer given."""
    magnifier, conversations = Magnifier(), []
    for row in rows:
        y, x = (int(where.min() > 0) for where in np.asarray(row["picture"]).nonzero())
        magnifier.reset(**row)
        (result,) = magnifier.zoom(x, y)
        call = {"type": "function", "function": {"name": "zoom", "arguments": {"x": x, "y": y}}}
        question = {"type": "text", "text": row["prompt"][0]["content"]}
        messages = [
            {"role": "user", "content": [{"type": "image"}, question]},
            {"role": "assistant", "content": [], "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "image"}]},
            {"role": "assistant", "content": [{"type": "text", "text": row["solution"]}]},
        ]
        conversations.append({"messages": messages, "images": [row["image"], result["image"]]})
    return Dataset.from_list(conversations)


def demo(script_args, training_args, model_args):
    model, processor = hidden_digit_model()
    dataset = {name: with_thumbnails(rows, script_args.thumbnail_size) for name, rows in hidden_digits().items()}
    cold_start = MultimodalSFTTrainer(
        model=model,
        args=MultimodalSFTConfig(
            **COLD_START,
            output_dir=f"{training_args.output_dir}/cold_start",
            use_cpu=training_args.use_cpu,
            seed=training_args.seed,
        ),
        train_dataset=demonstrations(dataset["train"].select(range(200))),
        processing_class=processor,
    )
    cold_start.train()

    training_args.ignored_media_columns = ["picture"]
    trainer = MultimodalGRPOTrainer(
        model=model,
        reward_funcs=accuracy_reward,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"] if training_args.eval_strategy != "no" else None,
        processing_class=processor,
        environment_factory=Magnifier,
        callbacks=[TrainingCurvesCallback()],
        **adapter_inputs(model_args),
    )
    trainer.accelerator.print(f"Accuracy without the tool, at best: {best_without_tool(dataset['test']):.1%}")
    train_and_measure(trainer, script_args, dataset["test"], "pictures")


def main(script_args, training_args, model_args):
    training_args.ignored_media_columns = ["picture"]
    inputs = trainer_inputs(script_args, training_args, model_args)
    for name in ("train_dataset", "eval_dataset"):
        if inputs[name] is not None:
            inputs[name] = with_thumbnails(inputs[name], script_args.thumbnail_size)
    trainer = MultimodalGRPOTrainer(**inputs, environment_factory=Magnifier, callbacks=curves())
    train(trainer, script_args)
    finish(trainer, script_args)


def make_parser() -> TrlParser:
    return TrlParser((ToolScriptArguments, MultimodalGRPOConfig, ModelConfig))


if __name__ == "__main__":
    start(sys.modules[__name__], demo, DEMO)
