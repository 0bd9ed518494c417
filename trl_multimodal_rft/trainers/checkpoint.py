# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a checkpoint must hold beyond TRL's for a resumed run to go on as if it hadn't stopped."""

from pathlib import Path
from typing import Any

import torch

from ..replay import SAVED_CLASSES


def save_rollout_state(checkpoint: str | Path, process_index: int, state: dict[str, Any]) -> None:
    """
    Writes a process's part of the state.

    Args:
        checkpoint (`str` or `Path`):
            Folder of the checkpoint.
        process_index (`int`):
            Rank of the process.
        state (`dict`):
            Tensors, numbers, strings, containers of them, and encoded prompts. A prompt that several completions share
            is written once.
    """
    torch.save(state, Path(checkpoint, f"rollout_state_{process_index}.pt"))


def load_rollout_state(checkpoint: str | Path, process_index: int) -> dict[str, Any] | None:
    """
    Reads what [`save_rollout_state`] wrote, onto the CPU. No code in the file is run.

    Args:
        checkpoint (`str` or `Path`):
            Folder of the checkpoint.
        process_index (`int`):
            Rank of the process.

    Returns:
        `dict` or `None`: The state; `None` if the checkpoint has none for this process.
    """
    path = Path(checkpoint, f"rollout_state_{process_index}.pt")
    if not path.exists():
        return None
    with torch.serialization.safe_globals([*SAVED_CLASSES]):
        return torch.load(path, map_location="cpu", weights_only=True)
