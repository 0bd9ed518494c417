# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Where a model and its data come from, as far as names and files on this machine tell. Nothing asks the Hub."""

import os
import re
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.repocard import metadata_load


_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_name(name: str) -> bool:
    """
    Tells names of repositories on the Hub from folders, which are read first where there are both.

    Returns whether it is written `owner/name`, and is no path here.
    """
    return _REPOSITORY.fullmatch(name) is not None and not os.path.exists(name)


def base_metadata(name: str) -> dict[str, str]:
    """
    What a model card says about the model that was trained: its name on the Hub, and its license.

    The license is that of the model's own card, in its folder or in the Hub's cache. The folder of a model that this
    package trained knows its base from there, too.
    """
    on_hub = is_hub_name(name)
    if on_hub:
        path: Any = try_to_load_from_cache(name, "README.md")
    else:
        path = os.path.join(name, "README.md") if os.path.isdir(name) else None
    try:
        card = metadata_load(path) or {} if isinstance(path, str) and os.path.isfile(path) else {}
    except (ValueError, yaml.YAMLError):  # somebody else's file
        card = {}
    base = name if on_hub else card.get("base_model") if "trl-multimodal-rft" in (card.get("tags") or ()) else None
    known = {"base_model": base, **{key: card.get(key) for key in ("license", "license_name", "license_link")}}
    return {key: value for key, value in known.items() if isinstance(value, str)}
