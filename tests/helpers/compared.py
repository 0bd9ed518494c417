# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What `compare` prints, and faults of our trainer that it must find."""

import re
from dataclasses import replace

import pytest
import torch

from trl_multimodal_rft.encoding.prompt_encoder import PromptEncoder
from trl_multimodal_rft.forward.layout import PrefixLayout


def verdicts(output: str) -> list[str]:
    """Returns "agree" or "DIFFER" for each line of the table."""
    return re.findall(r"(agree|DIFFER)$", output, re.MULTILINE)


def drop_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions of a prompt attend to each other."""
    branches = PrefixLayout.branches

    def unmasked(*args, **kwargs):
        queries, keys, mask = branches(*args, **kwargs)
        return queries, keys, None if mask is None else torch.zeros_like(mask)

    monkeypatch.setattr(PrefixLayout, "branches", unmasked)


def ignore_media(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of media are 0."""
    encode = PromptEncoder.encode

    def blind(*args, **kwargs):
        encoded = encode(*args, **kwargs)
        media = {name: torch.zeros_like(x) if x.is_floating_point() else x for name, x in encoded.media.items()}
        return replace(encoded, media=media)

    monkeypatch.setattr(PromptEncoder, "encode", blind)
