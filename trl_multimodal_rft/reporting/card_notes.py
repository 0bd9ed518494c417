# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a run has read, for its model card."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class CardNotes:
    """The modalities, columns and conversations that a run has read so far, for its model card."""

    modalities: set[str] = field(default_factory=set)
    columns: set[str] = field(default_factory=set)
    # Roles and texts of prompts; once two prompts differ, no more are added
    conversations: set[tuple[tuple[str, str], ...]] = field(default_factory=set)

    def add(self, columns: Iterable[str], prompts: Iterable[Any], modalities: Iterable[Iterable[str]]) -> None:
        """Adds the columns, prompts and modalities of rows."""
        self.columns.update(columns)
        if len(self.conversations) < 2:
            self.conversations.update(map(conversation_of, prompts))
        self.modalities.update(*modalities)


def conversation_of(prompt: str | list[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Returns the role and text of each message of a prompt, without media."""
    if isinstance(prompt, str):
        return (("user", prompt),)
    return tuple(
        (role, content if isinstance(content, str) else "".join(block.get("text") or "" for block in content))
        for role, content in [(message["role"], message.get("content") or "") for message in prompt]
    )
