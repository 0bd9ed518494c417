# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Lines that tell the user of a command nothing: of other packages, and of configs on each process."""

import logging
import os


# Beginnings of messages, by logger
_MESSAGES = {
    "DeepSpeed": "Setting accelerator to CPU",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}
# Loggers of configs, which warn before accelerate's state can tell the main process
_CONFIGS = tuple(f"trl_multimodal_rft.trainers.base.{name}" for name in ("config_options", "multimodal_config"))
# A bar of what takes less isn't drawn, such as weights of a small model or a table of a few rows
_BAR_SECONDS = "2"


def hide_lines() -> None:
    """Hides lines in this process, and short bars also in those that it starts, if bars aren't imported yet."""
    os.environ.setdefault("TQDM_DELAY", _BAR_SECONDS)
    for name in _MESSAGES:
        logging.getLogger(name).addFilter(_is_shown)
    if os.environ.get("RANK", "0") != "0":
        for name in _CONFIGS:
            logging.getLogger(name).setLevel(logging.ERROR)


def _is_shown(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_MESSAGES[record.name])
