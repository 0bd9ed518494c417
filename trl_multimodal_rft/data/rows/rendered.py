# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prompts to which a chat template was applied before they came here."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..reading.refs import MediaError, MediaRef
from .names import MEDIA_COLUMNS


@dataclass(frozen=True)
class TemplateMarks:
    """The marks of a model's chat template, which tell texts that it wrote from others."""

    tokens: tuple[str, ...] = ()  # control tokens that it writes around messages
    generation_prompt: str = ""  # what it writes before an answer, without white space around it

    def are_in(self, text: str) -> bool:
        """Returns whether the template was applied to a text: it begins or ends with one of the marks."""
        text = text.strip()
        ends = self.tokens if not self.generation_prompt else (*self.tokens, self.generation_prompt)
        return text.startswith(self.tokens) or text.endswith(ends)

    def check_row(
        self, row: Mapping[str, Any], column: str, row_index: int, ignored: Collection[str], *, becomes_messages: bool
    ) -> None:
        """
        Applies [`check_raw`] to the prompt in a column of a row, if it becomes messages here, or, as the row has a
        media column, where others of its dataset have media.
        """
        if becomes_messages or any(name in MEDIA_COLUMNS and name not in ignored for name in row):
            self.check_raw(row.get(column), column, row_index)

    def check_raw(self, prompt: Any, column: str, row_index: int) -> None:
        """Raises a [`MediaError`] for a text to which the template was applied, where it would be applied again."""
        if isinstance(prompt, str) and self.are_in(prompt):
            raise MediaError(
                f"row {row_index}, column '{column}': it looks like a chat template was applied already, as the text "
                f"is {_ends_of(prompt)}; beside media and messages, the trainer applies the template itself, so give "
                "the raw messages, `[{'role': 'user', 'content': ...}]`, or the raw text"
            )


NO_MARKS = TemplateMarks()


@dataclass(frozen=True)
class RenderedPrompt:
    """A text to which a chat template was applied, with the media of its placeholders."""

    text: str
    refs: list[MediaRef]  # images, videos and audios

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The media as the blocks of a message, without the text."""
        blocks: list[dict[str, Any]] = [{"type": ref.modality, ref.modality: ref} for ref in self.refs]
        return [{"role": "user", "content": blocks}]

    def check_placeholders(self, tokens: Mapping[str, list[str]], row_index: int) -> None:
        """
        Raises a [`MediaError`] unless the text has one placeholder per medium. `tokens` are the model's placeholders
        as texts, by modality.
        """
        for modality, names in tokens.items():
            n_placeholders = sum(self.text.count(name) for name in names)
            refs = [ref for ref in self.refs if ref.modality == modality]
            if len(refs) == n_placeholders:
                continue
            if not refs:
                raise MediaError(
                    f"row {row_index}, column 'prompt': its text, to which a chat template was applied, has "
                    f"{n_placeholders} {names[0]!r} but the row has no {modality}; add the {modality}, or remove the "
                    "placeholder"
                )
            placeholder = repr(names[0]) if names else f"placeholders, as the model takes no {modality},"
            raise refs[0].error(
                f"the row has {len(refs)} {modality}s for {n_placeholders} {placeholder} in its text, to which a chat "
                f"template was applied; write one for each {modality}, or give the raw messages"
            )


def _ends_of(text: str) -> str:
    text = text.strip()
    return repr(text) if len(text) <= 60 else f"{text[:30]!r} ... {text[-30:]!r}"
