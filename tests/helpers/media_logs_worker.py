# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Runs whose logs test_media_logs.py reads: `helpers/media_logs_worker.py boards <folder>`, or in several processes
`helpers/media_logs_worker.py processes <folder>`.
"""

import json
import os
import sys
from pathlib import Path

from datasets import Dataset
from transformers import TrainerCallback

from helpers.chats import image, video
from helpers.trainer_utils import InjectedOurs, make_trainer, sound
from trl_multimodal_rft.reporting import media_logs


def mixed_rows(n: int = 8) -> list[dict]:
    """Returns rows with the same question. In turn, they have a sound, one or more images, a video, or no media."""
    rows = []
    for i in range(n):
        row = {"prompt": [{"role": "user", "content": "What is it?"}], "audio": None, "images": None, "video": None}
        if i % 4 == 0:
            row["audio"] = sound(0.3 + 0.1 * i, seed=i)
        elif i % 4 == 1:
            row["images"] = [image(84, 56, seed=10 * i + j)["image"] for j in range(1 + i // 4)]
        elif i % 4 == 2:
            row["video"] = video(4 + 2 * (i // 4), 84, 56, seed=i)["video"]
        rows.append(row)
    return rows


def dataset(n: int = 8) -> Dataset:
    """Returns the rows without Arrow, which would turn arrays into lists of numbers."""
    rows = mixed_rows(n)
    indices = Dataset.from_dict({"index": list(range(n))})
    return indices.with_transform(lambda batch: {key: [rows[i][key] for i in batch["index"]] for key in rows[0]})


OPTIONS = {"log_completions": True, "num_completions_to_print": 0, "shuffle_dataset": False}


def boards(folder: Path) -> None:
    """Runs two steps of four prompts with all boards."""
    import trackio

    options = {"report_to": ["trackio", "wandb", "tensorboard"], "project": "logs", "run_name": "run"}
    options |= {"per_device_train_batch_size": 16, "max_steps": 2, **OPTIONS}
    trainer = make_trainer(InjectedOurs, "qwen2_5_omni", dataset(), folder / "output", **options)
    trainer.train()
    (run,) = trackio.Api().runs("logs")
    logs = trackio.sqlite_storage.SQLiteStorage.get_logs(run.project, run.name)
    (folder / "trackio.json").write_text(json.dumps(logs))


class LogsAlone(TrainerCallback):
    """Callback that logs on the main process only, as callbacks may do between logs of all ranks."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1 and self.trainer.accelerator.is_main_process:
            self.trainer.log({"alone": 1.0})


def processes(folder: Path) -> None:
    """
    Runs three steps of three prompts each. Two ranks share the completions of the second prompt. A callback logs the
    first step, all ranks log the second, and an evaluation logs the third. Another run logs at most two prompts.
    """
    size = 12 // int(os.environ.get("WORLD_SIZE", 1))
    alone = LogsAlone()
    objects = {"callbacks": [alone], "eval_dataset": dataset(3)}
    options = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size, **OPTIONS}
    schedule = {"max_steps": 3, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    trainer = make_trainer(
        InjectedOurs,
        "qwen2_5_omni",
        dataset(6),
        folder / "all",
        objects=objects,
        **options,
        **schedule,
    )
    alone.trainer = trainer
    trainer.train()
    n_held = sum(len(media) for media in trainer._rollout_log.media.rows())
    (folder / f"held-{trainer.accelerator.process_index}.json").write_text(json.dumps(n_held))
    media_logs.MAX_PROMPTS = 2
    trainer = make_trainer(InjectedOurs, "qwen2_5_omni", dataset(6), folder / "bound", max_steps=1, **options)
    trainer.train()


if __name__ == "__main__":
    {"boards": boards, "processes": processes}[sys.argv[1]](Path(sys.argv[2]))
