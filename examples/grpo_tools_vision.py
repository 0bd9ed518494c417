# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
GRPO for vision models with a tool: the model sees a thumbnail, calls `zoom(x, y)`, sees a quarter of the image and
answers.

Without arguments, the script trains a small Qwen2.5-VL to find a handwritten digit in an image and to read it, on a
CPU in minutes. All digits look alike in the thumbnails of four pixels, so no policy without the tool exceeds an
accuracy of 10%. The script computes and prints this bound. Training starts with a cold start: supervised fine-tuning
on a few hundred demonstrations, after which the model calls the tool, but most of its answers are wrong:

```bash
accelerate launch examples/grpo_tools_vision.py
```

With arguments, the script trains any vision-language model on any dataset with the columns `prompt`, `image` and
`solution`. The model's chat template must support tool messages:

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
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from datasets import Dataset, DatasetDict
from demo import start
from PIL import Image
from small_models import hidden_digit_model
from tasks import hidden_digits
from tool_demo import TOOL_DEMO_ARGUMENTS, demonstration, train_by_name, train_demo
from trl import ModelConfig

from trl_multimodal_rft import MultimodalGRPOConfig
from trl_multimodal_rft.cli.arguments import RLScriptArguments


DEMO = {
    **TOOL_DEMO_ARGUMENTS,
    "output_dir": "outputs/grpo_tools_vision",
    "thumbnail_size": 2,
    "max_completion_length": 26,  # a tool call, a quarter of the image and an answer
    "max_steps": 120,
}


@dataclass
class ToolScriptArguments(RLScriptArguments):
    """
    Script arguments of this example.

    Args:
        thumbnail_size (`int`, *optional*, defaults to `448`):
            Maximum width and height of thumbnails in pixels.
    """

    thumbnail_size: int = field(default=448, metadata={"help": "Maximum width and height of thumbnails in pixels."})


ARGUMENTS = (ToolScriptArguments, MultimodalGRPOConfig, ModelConfig)


class Magnifier:
    """Shows quarters of the image in the column `picture`."""

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
        width = self.picture.width // 2
        height = self.picture.height // 2
        left = x * width
        top = y * height
        return [{"type": "image", "image": self.picture.crop((left, top, left + width, top + height))}]


def with_thumbnails(rows: Dataset, size: int) -> Dataset:
    """Moves the images to the column `picture` and puts their thumbnails into `image`."""

    def shrink(row: dict) -> dict:
        thumbnail = row["image"].copy()
        thumbnail.thumbnail((size, size), Image.Resampling.BOX, reducing_gap=None)
        return {"picture": row["image"], "image": thumbnail}

    return rows.map(shrink)


def demonstrations(rows: Dataset) -> list[dict]:
    """Conversations in which the model zooms into the right quarter and answers correctly."""
    magnifier = Magnifier()
    conversations = []
    for row in rows:
        y, x = (int(where.min() > 0) for where in np.asarray(row["picture"]).nonzero())
        magnifier.reset(**row)
        conversations.append(demonstration(row, magnifier.zoom, x=x, y=y))
    return conversations


def demo(script_args, training_args, model_args):
    model, processor = hidden_digit_model()
    dataset = DatasetDict(
        {name: with_thumbnails(rows, script_args.thumbnail_size) for name, rows in hidden_digits().items()}
    )
    lessons = demonstrations(dataset["train"].select(range(200)))
    training_args.ignored_media_columns = ["picture"]
    train_demo(model, processor, dataset, lessons, 6, Magnifier, "pictures", script_args, training_args, model_args)


def main(script_args, training_args, model_args):
    training_args.ignored_media_columns = ["picture"]
    prepare = partial(with_thumbnails, size=script_args.thumbnail_size)
    train_by_name(prepare, Magnifier, script_args, training_args, model_args)


if __name__ == "__main__":
    start(sys.modules[__name__], demo, DEMO)
