# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Encoding of the prompts of a dataset's rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ..data.reading.refs import iter_refs
from ..data.reading.rules import DEFAULT_RULES, MediaRules
from ..data.rows.batches import Row
from ..data.rows.columns import read_rendered, rows_to_messages
from ..data.rows.names import TEACHER, TEACHER_COLUMNS, check_has_prompt
from ..data.rows.rendered import RenderedPrompt, TemplateMarks
from ..views.views import View
from .media import check_hears_videos
from .messages import template_marks, template_names, template_variables, write_chat
from .processors import Processor, checked_prompt, checked_texts
from .prompts import EncodedPrompt, cast_features, encode_prompt, placeholder_tokens


@dataclass
class PromptEncoder:
    """Encodes the prompts of rows for a model."""

    model: PreTrainedModel  # unwrapped
    processor: Processor
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of `apply_chat_template`
    audio_overlong: Literal["raise", "truncate"] = "raise"
    keep_decoded: bool = field(default=False, kw_only=True)  # whether prompts keep their decoded media
    media_rules: MediaRules = DEFAULT_RULES
    ignored_media_columns: Sequence[str] = ()
    special_tokens_in_text: Literal["allow", "raise", "strip"] | None = None
    for_engine: bool = False  # whether prompts are for vLLM, which takes decoded media and computes positions itself
    # Whether a text to which a chat template was applied is encoded as it is, with the media of its placeholders. If
    # not, it is an error beside media.
    keeps_rendered: bool = field(default=False, kw_only=True)
    # Function that returns the dtype for the features of new prompts, or `None` to keep the processor's dtype
    feature_dtype: Callable[[], torch.dtype | None] | None = field(default=None, kw_only=True)

    def __post_init__(self):
        self._placeholders = placeholder_tokens(self.model, self.processor)
        if self.media_rules.use_audio_in_video:
            check_hears_videos(self.processor)
            if self.for_engine:
                raise ValueError(
                    "`use_audio_in_video=True` needs `use_vllm=False`: vLLM interleaves the sound of a video with its "
                    "frames by a rule of its own, so that completions would be scored against a different prompt."
                )

    def messages(self, rows: Sequence[Row], prefix: str = "") -> list[Any]:
        """
        Returns the prompts of a batch's rows with their media, or a list of `None` if environments make the prompts.
        With the prefix `teacher_`, the column `teacher_image` takes the place of `image`, for example.
        """
        if "prompt" not in rows[0]:
            return [None] * len(rows)
        rendered = [self._rendered(row) for row in rows]
        raw_rows = [row for row, prompt in zip(rows, rendered, strict=True) if prompt is None]
        options = (self.ignored_media_columns, self._placeholders, self.media_rules, prefix, self.marks)
        message_rows = rows_to_messages(raw_rows, *options)
        for row, message_row in zip(raw_rows, message_rows, strict=True):
            self._check_template_variables(row, message_row["prompt"])
        raw_prompts = (row["prompt"] for row in message_rows)
        return [next(raw_prompts) if prompt is None else prompt for prompt in rendered]

    @cached_property
    def marks(self) -> TemplateMarks:
        """The marks of the chat template."""
        return template_marks(self.processor, self.template_kwargs)

    @cached_property
    def _template_names(self) -> set[str]:
        return template_names(self.processor, self.template_kwargs)

    def _check_template_variables(self, row: Row, prompt: str | list) -> None:
        """Raises a `ValueError` for a row whose `chat_template_kwargs` ask for another prompt than is sampled."""
        variables = template_variables(row)
        others = {
            name: value
            for name, value in variables.items()
            if name in self._template_names and self.template_kwargs.get(name) != value
        }
        if not others or isinstance(prompt, str):
            return
        label = f"row {row.row_index}, column 'chat_template_kwargs'"
        texts = set()
        for template_kwargs in (self.template_kwargs, {**self.template_kwargs, **others}):
            options = {"add_generation_prompt": True, **template_kwargs}
            texts.add(write_chat(prompt, self.processor, label, **options))
        if len(texts) > 1:
            raise ValueError(
                f"{label}: all prompts of a run are sampled with the same variables of the chat template, but the row "
                f"asks for another prompt by {others!r:.200}; set `chat_template_kwargs` in the config to the values "
                "of the rows, and give other rows a run of their own, or remove the column"
            )

    def _rendered(self, row: Row) -> RenderedPrompt | str | None:
        """
        Returns the prompt of a row if it is a text that is encoded as it is: one to which the template was applied, or
        one that has placeholders and media. Returns `None` for other rows.
        """
        text = row.get("prompt")
        if not self.keeps_rendered or not isinstance(text, str):
            return None
        prompt = read_rendered(row, row.row_index, self.ignored_media_columns, self.media_rules)
        has_placeholders = any(token in text for token in self._placeholders)
        if not prompt.refs:
            return text if self.marks.are_in(text) else None
        return prompt if has_placeholders or self.marks.are_in(text) else None

    def encode_row(self, row: Row, prompt: Any = None) -> EncodedPrompt | None:
        """
        Returns the encoded prompt of a row, or `None` without media, as its format then depends on the batch's other
        rows. `prompt` is the row's prompt as text or messages, by default read from the row.
        """
        if prompt is None:
            prompt = self.read_row(row)
        if next(iter_refs(prompt), None) is None:
            self.checked_prompt(prompt, row.row_index)
            return None
        return self.encode(prompt, row.row_index)

    def read_row(self, row: Row, prefix: str = "") -> str | list | RenderedPrompt | None:
        """Returns the prompt of a row as text or messages, without decoding its media. See [`messages`]."""
        check_has_prompt(row)
        (prompt,) = self.messages([row], prefix)
        self.checked_prompt(prompt, row.row_index)
        return prompt

    def encode_teacher_prompt(self, row: Row) -> EncodedPrompt | None:
        """Returns the encoded prompt of a row's teacher, or `None` if it has no media or is the student's prompt."""
        if not has_teacher_prompt(row):
            return None
        return self.encode_row(row, self.read_row(row, TEACHER))

    def encode(
        self, prompt: Any, row: int, view: View | None = None, *, sampled: bool = False, **template_kwargs: Any
    ) -> EncodedPrompt:
        """Encodes a prompt of the row index `row`, under `view`. `sampled` says that the policy wrote a part of it."""
        encoded = encode_prompt(
            self.checked_prompt(prompt, row),
            self.processor,
            self.model,
            template_kwargs={**self.template_kwargs, **template_kwargs},
            audio_overlong=self.audio_overlong,
            keep_decoded=self.keep_decoded or self.for_engine,
            use_engine_positions=self.for_engine,
            view=view,
            row=row,
            sampled=sampled,
        )
        dtype = None if self.feature_dtype is None else self.feature_dtype()
        if dtype is not None:
            encoded.media = cast_features(encoded.media, dtype)
        return encoded

    def checked_observation(self, content: str | list, label: str) -> str | list:
        """Applies `special_tokens_in_text`, by default `"raise"`, to an environment's text or blocks."""
        return checked_texts(content, self.processor, self.special_tokens_in_text or "raise", label)

    def checked_prompt(self, prompt: Any, row: int) -> Any:
        """
        Applies `special_tokens_in_text` to a prompt. Raises `ValueError` if it ends with an assistant turn that the
        model doesn't continue.
        """
        if isinstance(prompt, RenderedPrompt):
            return replace(prompt, text=checked_prompt(prompt.text, self.processor, self.special_tokens_in_text, row))
        ends_with_answer = not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"
        if ends_with_answer and not self.template_kwargs.get("continue_final_message"):
            raise ValueError(
                f"row {row}, column 'prompt': ends with the assistant's message, so a completion would follow the "
                "answer; move the answer to a column such as 'solution', as `trl-multimodal-rft prepare ms-swift "
                "--task rl` does, or let the model continue the answer with "
                "`chat_template_kwargs={'continue_final_message': True}`"
            )
        return checked_prompt(prompt, self.processor, self.special_tokens_in_text, row)


def has_teacher_prompt(row: Row) -> bool:
    """Returns whether a teacher and the student read different prompts of a row."""
    return any(row.get(name) is not None for name in TEACHER_COLUMNS)
