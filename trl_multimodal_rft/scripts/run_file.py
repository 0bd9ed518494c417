# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`run.yaml` in the output folder of a run: the user's options, for `--config` to start the same run."""

import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from .options import TRACEBACK


NAME = "run.yaml"

_FIRST = ("model_name_or_path", "dataset_name", "output_dir")
# Options of one launch, not of the run
_NOT_KEPT = {"config", "resume_from_checkpoint", "dry_run", "launch", TRACEBACK}
_SECRET = re.compile(r"(^|_)(hub_token|auth_token|access_token|api_?key|secret|password)$|^token$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"token|key|secret|passw|credential", re.IGNORECASE)


def write_run_file(folder: str | Path, command: str, options: Mapping[str, Any], resumed: bool = False) -> None:
    """Writes the options that the user of a run set. A resumed run, which may be longer, leaves its `max_steps`."""
    keys, path = {**options, **options.get("launch", {})}, Path(folder, NAME)
    if resumed:
        with suppress(OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError):  # a user may have edited it
            before = yaml.safe_load(path.read_text(encoding="utf-8")).get("max_steps")
            keys.pop("max_steps", None)
            keys |= {} if before is None else {"max_steps": before}
    keys = {name: keys[name] for name in dict.fromkeys([*_FIRST, *keys]) if name in keys and name not in _NOT_KEPT}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(_without_secrets(keys), sort_keys=False, allow_unicode=True, width=119)
    path.write_text(f"# {command} --config {shlex.quote(str(path))}\n{text}", encoding="utf-8")


def _without_secrets(value: Any, *, is_environment: bool = False) -> Any:
    """Values in types that YAML has, without tokens, keys and passwords, also within dictionaries as JSON."""
    value = getattr(value, "value", value)  # of an enumeration
    if isinstance(value, str) and value.startswith("{"):
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        kept = _without_secrets(parsed)
        return value if kept == parsed else json.dumps(kept)
    if isinstance(value, (list, tuple)):
        return [_without_secrets(each) for each in value]
    if not isinstance(value, Mapping):
        return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
    secret = _SECRET_VARIABLE if is_environment else _SECRET
    return {
        str(name): _without_secrets(each, is_environment=name == "env")
        for name, each in value.items()
        if not secret.search(str(name))
    }
