# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
GRPO for audio models with a tool: the model hears an outline of a recording, calls `crop(start, end)`, hears that
part and answers.

The outline has a tone of 0.1 s for each second of the recording. The loudness of the tone is that of the second,
relative to the loudest second. Five minutes of audio become half a minute. The outline shows when there is sound, but
not which sound.

Without arguments, the script trains a small Qwen2-Audio to find the spoken digit in a recording and to recognize it,
on a CPU in minutes. The outlines of all digits sound alike, so no policy without the tool exceeds an accuracy of 10%.
The script computes and prints this bound. Training starts with a cold start: supervised fine-tuning on a few hundred
demonstrations:

```bash
accelerate launch examples/grpo_tools_audio.py
```

With arguments, the script trains any audio model on any dataset with the columns `prompt`, `audio` and `solution`.
The model's chat template must support tool messages with audio:

```bash
accelerate launch examples/grpo_tools_audio.py \
    --model_name_or_path path/to/model \
    --dtype bfloat16 \
    --dataset_name path/to/dataset \
    --output_dir outputs/crop \
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

import numpy as np
from datasets import Audio, Dataset, DatasetDict, Features
from demo import start
from small_models import cropping_model
from tasks import RATE, encoded, long_recordings
from tool_demo import TOOL_DEMO_ARGUMENTS, demonstration, train_by_name, train_demo

from trl_multimodal_rft.cli.commands import grpo
from trl_multimodal_rft.data.reading.decoding import load_audio
from trl_multimodal_rft.data.reading.refs import MediaRef


ARGUMENTS = grpo.ARGUMENTS
DEMO = {
    **TOOL_DEMO_ARGUMENTS,
    "output_dir": "outputs/grpo_tools_audio",
    "max_completion_length": 34,  # a tool call, one second of the recording and an answer
    "max_steps": 60,
}


class Player:
    """Plays parts of the recording in the column `recording`."""

    def reset(self, recording: dict, **row) -> None:
        self.samples = decoded(recording)

    def crop(self, start: int, end: int) -> list:
        """
        Plays a part of the recording.

        Args:
            start: Second at which it begins.
            end: Second at which it ends.

        Returns:
            The part.
        """
        if not 0 <= start < end <= np.ceil(len(self.samples) / RATE):
            raise ValueError(f"start must be before end, both from 0 to {len(self.samples) / RATE:.1f}.")
        return [{"type": "audio", "audio": encoded(self.samples[start * RATE : end * RATE], RATE)}]


def decoded(recording: dict) -> np.ndarray:
    return load_audio(MediaRef("audio", recording, {}, "recording", 0), RATE)


def loudness(samples: np.ndarray) -> np.ndarray:
    """Loudness of each second relative to the loudest, from 0 to 1."""
    seconds = np.pad(samples, (0, -len(samples) % RATE)).reshape(-1, RATE)
    power = (seconds**2).mean(axis=1)
    return np.sqrt(power / max(power.max(), 1e-12))


def outline(samples: np.ndarray) -> np.ndarray:
    """A tone of 0.1 s for each second, with the loudness of that second relative to the loudest."""
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE // 10) / RATE)
    return np.outer(loudness(samples), tone).reshape(-1)


def with_outlines(rows: Dataset) -> Dataset:
    """Moves the recordings to the column `recording` and puts their outlines into `audio`."""
    rows = rows.cast_column("audio", Audio(decode=False))
    return rows.map(
        lambda row: {"recording": row["audio"], "audio": encoded(outline(decoded(row["audio"])), RATE)},
        features=Features({**rows.features, "recording": Audio(decode=False)}),
    )


def demonstrations(rows: Dataset) -> list[dict]:
    """Conversations in which the model plays the loudest second and answers correctly."""
    player = Player()
    conversations = []
    for row in rows:
        player.reset(**row)
        second = int(loudness(player.samples).argmax())
        conversations.append(demonstration(row, player.crop, start=second, end=second + 1))
    return conversations


def demo(script_args, training_args, model_args):
    model, processor = cropping_model()
    dataset = DatasetDict({name: with_outlines(rows) for name, rows in long_recordings().items()})
    lessons = demonstrations(dataset["train"].select(range(200)))
    training_args.ignored_media_columns = ["recording"]
    train_demo(model, processor, dataset, lessons, 4, Player, "recordings", script_args, training_args, model_args)


def main(script_args, training_args, model_args):
    training_args.ignored_media_columns = ["recording"]
    train_by_name(with_outlines, Player, script_args, training_args, model_args)


if __name__ == "__main__":
    start(sys.modules[__name__], demo, DEMO)
