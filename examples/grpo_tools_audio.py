# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
GRPO for models that listen again: they hear an outline, call `crop(start, end)`, get a part of the recording, and
answer.

The outline of a recording is a tone of a tenth of a second for each of its seconds, as loud as that second is beside
the loudest. Five minutes of sound become half a minute, which tells when something is to be heard, but not what.

Without arguments, a small Qwen2-Audio learns where to listen and which digit is spoken there, on a CPU in minutes. One
digit's outline is like the other's: without the tool no policy is right more often than one time in ten, which is
counted and printed. It begins with a cold start on a few hundred demonstrations:

```bash
accelerate launch examples/grpo_tools_audio.py
```

With arguments, any model that hears and whose chat template has turns of tools with sounds, and any dataset (columns
`prompt`, `audio` and `solution`):

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

from trl_multimodal_rft.data.columns import MediaRef
from trl_multimodal_rft.data.loading import load_audio
from trl_multimodal_rft.scripts.grpo import ARGUMENTS  # noqa: F401


DEMO = {
    **TOOL_DEMO_ARGUMENTS,
    "output_dir": "outputs/grpo_tools_audio",
    "max_completion_length": 34,  # a call, a second of the recording and an answer
    "max_steps": 60,
}


class Player:
    """Plays parts of a recording, which the column `recording` holds."""

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
    """How loud each second is beside the loudest, from 0 to 1."""
    seconds = np.pad(samples, (0, -len(samples) % RATE)).reshape(-1, RATE)
    power = (seconds**2).mean(axis=1)
    return np.sqrt(power / max(power.max(), 1e-12))


def outline(samples: np.ndarray) -> np.ndarray:
    """A tone of a tenth of a second for each second, as loud as that is beside the loudest."""
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE // 10) / RATE)
    return np.outer(loudness(samples), tone).reshape(-1)


def with_outlines(rows: Dataset) -> Dataset:
    """Rows with outlines in the column `audio`, and in the column `recording` what was there."""
    rows = rows.cast_column("audio", Audio(decode=False))
    return rows.map(
        lambda row: {"recording": row["audio"], "audio": encoded(outline(decoded(row["audio"])), RATE)},
        features=Features({**rows.features, "recording": Audio(decode=False)}),
    )


def demonstrations(rows: Dataset) -> list[dict]:
    """Conversations in which the loudest second is played, and the right answer given."""
    player, conversations = Player(), []
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
