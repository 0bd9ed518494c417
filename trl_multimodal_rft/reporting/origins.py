# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Origins of a model and its data by names and local files, without requests to the Hub."""

import os
import re

import yaml
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.repocard import metadata_load


_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_name(name: str) -> bool:
    """Whether a name is `owner/name` of a repository on the Hub, and no local path, which takes precedence."""
    return _REPOSITORY.fullmatch(name) is not None and not os.path.exists(name)


def base_metadata(name: str) -> dict[str, str]:
    """
    Metadata of the base model for a model card: its name on the Hub and its license, from the model's card in its
    folder or in the Hub's cache. In a folder that this package wrote, the card names the base.
    """
    on_hub = is_hub_name(name)
    path = try_to_load_from_cache(name, "README.md") if on_hub else os.path.join(name, "README.md")
    try:
        card = metadata_load(path) or {} if isinstance(path, str) and os.path.isfile(path) else {}
    except (ValueError, yaml.YAMLError):  # not written by this package
        card = {}
    base = name if on_hub else card.get("base_model") if "trl-multimodal-rft" in (card.get("tags") or ()) else None
    known = {"base_model": base, **{key: card.get(key) for key in ("license", "license_name", "license_link")}}
    return {key: value for key, value in known.items() if isinstance(value, str)}
