# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Runs of all trainers that something ends in the middle: a file, a server, a callback, the memory, a signal."""

import errno
import functools
import http.server
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback

from helpers.reward_server import Server
from helpers.tools import talking
from helpers.trainer_utils import TRAINERS, image_rows, load, make_trainer, shifted
from trl_multimodal_rft.extras.remote import RemoteReward


STEP = 3  # the last step before the end, in the middle of a rollout
SAVED = 2  # steps between two checkpoints
N_ROWS = 5


# What a run needs from outside


class World:
    """Images, which files or a website hold, and a reward, which a function or a server computes."""

    def __init__(self, folder: Path, end: str = ""):
        self.media = folder / "media"
        self.media.mkdir(parents=True, exist_ok=True)
        for i, row in enumerate(image_rows(N_ROWS)):
            file = self.media / f"{i}.png"
            if not file.exists():  # another process may have made it
                row["image"].save(file)
        self.judge_is_away = self.room_is_away = False
        self.site = Site(self.media) if end == "a website" else None
        self.server = served(Server(scored)) if end == "a reward server" else None

    @property
    def places(self) -> list[str]:
        root = str(self.media) if self.site is None else f"http://127.0.0.1:{self.site.server_port}"
        return [f"{root}/{i}.png" for i in range(N_ROWS)]

    def reward(self, prompts, completions, **kwargs) -> list[float]:
        if self.judge_is_away:
            raise TimeoutError("the judge is away")
        if self.server is not None:
            remote = RemoteReward(self.server.url, timeout=0.5, patience=1)
            return remote(prompts=prompts, completions=completions)
        return [float(len(completion[0]["content"]) % 7) for completion in completions]

    def without_judge(self) -> None:
        self.judge_is_away = True

    def without_room(self) -> None:
        self.room_is_away = True

    def remove_files(self) -> None:
        for path in self.media.glob("*"):
            path.unlink()

    def close(self) -> None:
        for server in (self.site, self.server):
            if server is not None and server.socket.fileno() != -1:
                server.shutdown()
                server.server_close()


def served(server):
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return server


def scored(request) -> dict:
    return {"rewards": [float(len(completion) % 7) for completion in request["completions"]]}


def Site(folder: Path):
    """Returns a running website with the files of a folder."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    return served(http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder)))


# Trainers

SHARED = {"per_device_train_batch_size": 2, "optim": "adamw_torch", "max_steps": 6, "learning_rate": 1e-2}
SHARED |= {"save_strategy": "steps", "save_steps": SAVED, "eval_strategy": "steps", "eval_steps": STEP}
SHARED |= {"media_rules": {"media_timeout": 1}, "per_device_eval_batch_size": 2, "lr_scheduler_type": "linear"}
READING = {**SHARED, "gradient_accumulation_steps": 2, "max_length": 512}
SAMPLING = {**SHARED, "per_device_train_batch_size": 4, "media_prefetch": 1}
ROLLOUTS = {**SAMPLING, "steps_per_generation": 2, "num_generations_eval": 2}
OPTIONS = {
    "grpo": {**ROLLOUTS, "beta": 0.1},
    "rloo": ROLLOUTS,
    "ppo": {**ROLLOUTS, "num_ppo_epochs": 1},
    "sft": READING,
    "dpo": READING,
    "kto": {**READING, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
    "reward": READING,
    "distillation": {**SAMPLING, "num_generations": 2},
}
REWARDED = ("grpo", "rloo", "ppo")


def said(words: str) -> list[dict]:
    return [{"role": "assistant", "content": words}]


ANSWERS = {
    "sft": {"completion": [said(f"It is {i}.") for i in range(N_ROWS)]},
    "kto": {"completion": [said(f"It is {i}.") for i in range(N_ROWS)], "label": [i % 2 == 0 for i in range(N_ROWS)]},
}
ANSWERS["dpo"] = {
    "chosen": [said(f"It is {i}.") for i in range(N_ROWS)],
    "rejected": [said(f"There are {i} of them") for i in range(N_ROWS)],
}
ANSWERS["reward"] = ANSWERS["dpo"]


def rows_of(name: str, world: World) -> Dataset:
    columns = {"prompt": image_rows(N_ROWS)["prompt"][:], "image": world.places, **ANSWERS.get(name, {})}
    return Dataset.from_dict(columns)


class Room:
    """An environment that may be away."""

    world: World

    def reset(self, **kwargs) -> str:
        if self.world.room_is_away:
            raise TimeoutError("the room is away")
        return "Go on."

    def look(self) -> str:
        """Looks around."""
        return "A room."


def made(name: str, folder: Path, world: World, end: str = "", **options):
    """Returns a trainer of a tiny model. An end may need an environment, which the run without an end has, too."""
    rows = rows_of(name, world)
    objects = {"eval_dataset": rows.select(range(2))}
    if end == "an environment":
        objects |= {**talking("qwen3_vl"), "environment_factory": type("Room", (Room,), {"world": world})}
    if name == "distillation":
        objects["teacher_model"] = shifted(load("qwen2_5_vl")[0])
    family = "qwen3_vl" if end == "an environment" else "qwen2_5_vl"
    reward = world.reward if name in REWARDED else None
    return make_trainer(
        TRAINERS[name], family, rows, folder, objects=objects, reward=reward, **{**OPTIONS[name], **options}
    )


# Ends


class At(TrainerCallback):
    """Callback that acts at an event after some steps."""

    def __init__(self, event: str, step: int, act: Callable):
        setattr(self, event, self._act)
        self.step = step
        self.act = act

    def _act(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()


class Away(RuntimeError):
    pass


def away() -> None:
    raise Away("it is away")


def full(*args, **kwargs) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_memory(*args, **kwargs) -> None:
    raise torch.OutOfMemoryError("Tried to allocate 2 GiB.")


def half_updated(trainer) -> None:
    """Lets the next update fail after the first weight."""

    def step(*args, **kwargs):
        with torch.no_grad():
            next(trainer.model.parameters()).add_(1)
        away()

    trainer.optimizer.step = step


def full_memory(model) -> None:
    """Lets the next forward pass fail."""
    model.get_input_embeddings().register_forward_pre_hook(no_memory)


READ_AHEAD = ("a file", "a website")
# By name, the event and what is done at it
ENDS = {
    "a file": ("on_step_begin", lambda trainer, world: world.remove_files()),
    "a website": ("on_step_begin", lambda trainer, world: world.close()),
    "a full disk": ("on_log", lambda trainer, world: full()),
    "the memory": ("on_step_begin", lambda trainer, world: full_memory(trainer.model)),
    "a callback": ("on_step_begin", lambda trainer, world: away()),
    "a callback after a step": ("on_step_end", lambda trainer, world: away()),
    "half an update": ("on_pre_optimizer_step", lambda trainer, world: half_updated(trainer)),
    "an evaluation": ("on_prediction_step", lambda trainer, world: away()),
    "Ctrl-C": ("on_step_begin", lambda trainer, world: signal.raise_signal(signal.SIGINT)),
    "SIGTERM": ("on_step_begin", lambda trainer, world: signal.raise_signal(signal.SIGTERM)),
    "a reward": ("on_step_begin", lambda trainer, world: world.without_judge()),
    "a reward server": ("on_step_begin", lambda trainer, world: world.close()),
    "an environment": ("on_step_begin", lambda trainer, world: world.without_room()),
    "a teacher": ("on_step_begin", lambda trainer, world: full_memory(trainer.teacher_model)),
}
OF_SOME = {
    "a reward": REWARDED,
    "a reward server": REWARDED,
    "an environment": ("grpo", "rloo"),
    "a teacher": ("distillation",),
}
TABLE = [(name, end) for end in ENDS for name in OF_SOME.get(end, OPTIONS)]

OF_TWO = (
    "a file",
    "the memory",
    "a callback",
    "half an update",
    "an evaluation",
    "a full disk",
    "a reward",
    "a teacher",
)
TABLE_OF_TWO = [(name, end) for name, end in TABLE if end in OF_TWO]


def end_at(trainer, world: World, end: str) -> None:
    """Lets a run end after its third step, or later by what was read ahead."""
    event, act = ENDS[end]
    step = 1 if end in READ_AHEAD else STEP
    trainer.add_callback(At(event, step, lambda: act(trainer, world)))
