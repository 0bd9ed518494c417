# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Publication on the Hub: private folders and failed uploads."""

import re
import shlex
import unicodedata
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import PushInProgress

from .events import EventPart


logger = get_logger(__name__)

# Folder of prompts, completions and media in the output folder. `Trainer` doesn't publish paths that begin with `_`.
PRIVATE = "_private"
_EXCLUDED_PATTERNS = ("_*", f"{PREFIX_CHECKPOINT_DIR}-*")


def repository_name(folder: str) -> str:
    """Returns a folder's name without characters that the Hub refuses: `My-Model-v2` for `My Model (v2).git`."""
    plain = unicodedata.normalize("NFKD", Path(folder).resolve().name).encode("ascii", "ignore").decode()
    name = re.sub(r"(?:[^\w.]|\.{2,})+", "-", plain)[:80].lstrip("-.")  # the Hub allows 96 characters
    return re.sub(r"(?:\.git|[-.])+$", "", name) or "model"


def upload_command(repo: str, folder: str, private: bool) -> str:
    """Returns a command that publishes a folder without the files that a trainer leaves out."""
    excluded: list[str] = []
    for pattern in _EXCLUDED_PATTERNS:
        excluded += ["--exclude", pattern]
    return shlex.join(["hf", "upload", repo, folder, ".", *(["--private"] if private else []), *excluded])


def is_running(push: PushInProgress | None) -> bool:
    return push is not None and not push.is_done()


def warn_of_failures(jobs: Iterable[Future], checkpoint: Path) -> None:
    """Warns of uploads that fail in the background, since their errors would go unnoticed otherwise."""

    def warn(job: Future) -> None:
        if not job.cancelled() and job.exception() is not None:
            reason = " ".join(str(job.exception()).split())
            logger.warning(f"{checkpoint} was not published, or only in part: {reason} Training continues.")

    for job in jobs:
        job.add_done_callback(warn)


class SaveBeforePush(TrainerCallback):
    """A callback that saves the model before the trainer creates the model's repository on the Hub, which may fail."""

    def __init__(self, save: Callable[[], None]):
        self.save = save

    def on_push_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        self.save()
