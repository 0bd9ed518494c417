# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks of messages, media and placeholders of a prompt, whose errors name the row and the column."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from jinja2 import Environment
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ..data.reading.refs import MediaError, MediaRef
from ..data.rows.blocks import KNOWN_TYPES
from ..data.rows.columns import further_keys
from ..data.rows.rendered import NO_MARKS, TemplateMarks
from ..data.rows.thoughts import is_part_of_tag, opened_thought
from ..data.rows.values import block_modality
from ..families import family_of_processor
from ..modalities import ENCODER_OF
from .media import check_has_frames
from .processors import Processor, control_tokens, tokenizer_of


THOUGHTS = ("<think>", "</think>")
# A chat template that returns a text unchanged
VERBATIM = {"chat_template": "{{ continuation }}"}
_TAIL_LENGTH = 16  # number of last tokens to search for a tag, which tokenizers may split


def write_chat(messages: list[dict[str, Any]], processor: Processor, label: str, **template_kwargs: Any) -> str:
    """Renders messages by the chat template. Raises a [`MediaError`] about the `label` if the template fails."""
    try:
        return str(processor.apply_chat_template(without_none(messages), tokenize=False, **template_kwargs))
    except Exception as error:  # templates raise errors of any type
        raise template_error(error, processor, template_kwargs, label) from error


def without_none(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages without keys of value `None`, such as the content of a turn with calls alone."""
    # `apply_chat_template` of transformers 5.24 does the same; that of 5.16 passes them on, and templates fail
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def has_template(processor: Processor, template_kwargs: dict[str, Any]) -> bool:
    """Returns whether the processor can render messages."""
    template = getattr(processor, "chat_template", None) or template_kwargs.get("chat_template")
    # The family that takes audio in base64 is Mistral's, whose tokenizers render messages by rules, not a template
    return bool(template) or family_of_processor(processor).takes_base64_audio


def template_names(processor: Processor, template_kwargs: dict[str, Any]) -> set[str]:
    """Returns the names that a processor's chat template, or that of `template_kwargs`, reads."""
    template = template_kwargs.get("chat_template") or getattr(processor, "chat_template", None) or ""
    sources = template.values() if isinstance(template, dict) else [template]
    tokens = chain.from_iterable(map(Environment().lex, sources))
    return {name for _, token_type, name in tokens if token_type == "name"}


def template_variables(row: Mapping[str, Any]) -> dict[str, Any]:
    """
    Returns a row's `chat_template_kwargs`, a dictionary or its JSON, without entries of `None`. Raises a `ValueError`,
    with the row and the column, for other values.
    """
    label = f"row {getattr(row, 'row_index', 0)}, column 'chat_template_kwargs'"
    variables = row.get("chat_template_kwargs") or {}
    if isinstance(variables, str):
        try:
            variables = json.loads(variables)
        except ValueError:
            raise ValueError(f"{label}: {variables!r:.60} is no JSON; write a dictionary") from None
    if not isinstance(variables, dict):
        raise ValueError(
            f"{label}: {variables!r:.60} is no dictionary; write one, such as {{'enable_thinking': False}}"
        )
    return {name: value for name, value in variables.items() if value is not None}


def template_marks(processor: Processor, template_kwargs: dict[str, Any]) -> TemplateMarks:
    """Returns the marks of a processor's chat template, none if it has no template or writes no text."""
    if not has_template(processor, template_kwargs):
        return NO_MARKS
    if family_of_processor(processor).takes_base64_audio:  # mistral-common's templates write ids, no text
        return TemplateMarks(tuple(token for token in control_tokens(tokenizer_of(processor)) if "INST]" in token))
    is_processor = isinstance(processor, ProcessorMixin)
    chat = [
        {"role": role, "content": [{"type": "text", "text": text}] if is_processor else text}
        for role, text in (("user", "Question"), ("assistant", "Answer"))
    ]
    options = {name: value for name, value in template_kwargs.items() if name != "continue_final_message"}

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        with suppress(MediaError):
            return write_chat(messages, processor, "", **{**options, "add_generation_prompt": add_generation_prompt})
        return ""

    prompt = render(chat[:1], add_generation_prompt=False)
    with_generation_prompt = render(chat[:1], add_generation_prompt=True)
    texts = (prompt, with_generation_prompt, render(chat, add_generation_prompt=False))
    tokens = [token for token in control_tokens(tokenizer_of(processor)) if not is_part_of_tag(token)]
    return TemplateMarks(
        tuple(sorted(token for token in tokens if any(token in text for text in texts))),
        with_generation_prompt.removeprefix(prompt).strip() if with_generation_prompt.startswith(prompt) else "",
    )


def template_error(error: Exception, processor: Processor, template_kwargs: dict[str, Any], label: str) -> MediaError:
    """Returns the error for a chat template that raised an error or is missing."""
    class_name = type(processor).__name__
    if not has_template(processor, template_kwargs):
        problem = f"{class_name} has no chat template that could write messages; set `processing_class.chat_template`"
    else:
        problem = f"the chat template of {class_name} rejected the messages ({error}); change the messages"
    return MediaError(f"{label}: {problem}")


def check_media(
    refs: list[MediaRef], decoded: dict[int, Any], processor: Processor, processor_kwargs: dict[str, Any]
) -> None:
    """Raises an error for the first image or video that the processor rejects on its own, without the prompt."""
    video_index = 0
    for ref in refs:
        medium = decoded[id(ref)]
        description = ""
        try:
            if ref.modality == "image":
                description = "an image of {} x {} pixels".format(*medium.size)
                processor.image_processor(images=[medium], **processor_kwargs.get("images_kwargs", {}))
            elif ref.modality == "video":
                description = f"a video of shape {tuple(medium.shape)}"
                videos_kwargs = processor_kwargs["videos_kwargs"]
                # Metadata are nested: by prompt, of which there is one, and by video
                metadata = [[videos_kwargs["video_metadata"][0][video_index]]]
                video_index += 1
                processor.video_processor(videos=[[medium]], **{**videos_kwargs, "video_metadata": metadata})
        except Exception as error:
            if ref.modality == "video":
                check_has_frames(ref, processor)
            raise ref.error(
                f"{type(processor).__name__} can't take {description} ({error}); resize it or remove the row"
            ) from error


def check_text(messages: str | list[dict[str, Any]], refs: list[MediaRef], tokens: list[str], row: int | None) -> None:
    """Raises a [`MediaError`] if the text of a prompt holds one of the placeholder `tokens`."""
    contents = [messages] if isinstance(messages, str) else [message.get("content") or "" for message in messages]
    # A content is a list of blocks, or a text, which counts as one block
    blocks: list[dict[str, Any]] = []
    for content in contents:
        blocks += [{"text": content}] if isinstance(content, str) else content
    texts = [block.get("text") or "" for block in blocks]
    first_text = next((text for text in texts if any(token in text for token in tokens)), "")
    placeholder = next((token for token in tokens if token in first_text), None)
    if placeholder is not None and refs:
        raise refs[0].error(
            f"the text of the prompt holds the placeholder {placeholder!r} itself; remove it, as the chat template "
            "writes one for each medium"
        )
    if placeholder is not None:
        raise MediaError(
            f"{of_row(row)}column 'prompt': its text holds the placeholder {placeholder!r} but no media; add the "
            "media, or remove the placeholder from the text"
        )


def check_written(
    messages: list[dict[str, Any]],
    processor: Processor,
    template_kwargs: dict[str, Any],
    row: int | None = None,
    column: str = "prompt",
    first_index: int = 0,
    sampled: bool = False,
) -> None:
    """
    Raises a [`MediaError`] if the chat template silently leaves out a part of a message from `first_index` on. Renders
    each message as the last one of a chat, as templates may leave out earlier thoughts, and skips the assistant's if
    they are `sampled`.
    """

    def render(chat: list[dict[str, Any]]) -> str | None:
        with suppress(MediaError):  # a template that raises an error leaves out nothing silently
            return write_chat(chat, processor, "", **template_kwargs)

    for m, message in enumerate(messages[first_index:], first_index):
        if sampled and message["role"] == "assistant":
            continue
        problems = [*_problems_of_thoughts(messages[: m + 1], render)]
        for path, problem, reduced in _parts_of(message):
            # If the template rejects a chat that ends with this message, the whole chat is rendered
            after = [] if render(messages[: m + 1]) is not None else messages[m + 1 :]
            whole = render([*messages[: m + 1], *after])  # `None` if the template rejects it
            # If the text is the same without the part, the model would not get the part
            if whole is not None and whole == render([*messages[:m], reduced, *after]):
                problems.append((path, problem))
        for path, problem in problems[:1]:  # the error names the first problem alone
            raise MediaError(f"{of_row(row)}column '{column}[{m - first_index}]{path}': the chat template {problem}")


def _parts_of(message: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (path, problem if ignored, message without the part) for each part that templates may ignore."""
    content = message.get("content") or ()
    blocks = () if isinstance(content, str) else content
    for b, block in enumerate(blocks):
        if block["type"] != "text" and block_modality(block["type"]) is None:
            problem = f"leaves out blocks of type {block['type']!r}, so the model would not get them; known types are "
            # An ignored block is rendered like a block of an unknown type
            reduced = {**message, "content": [*content[:b], {"type": "-"}, *content[b + 1 :]]}
            yield f".content[{b}]", problem + KNOWN_TYPES, reduced
    for key in further_keys(message):
        problem = f"leaves out {key!r} of a message, so the model would not get it; remove it, or set a template that "
        problem += "writes it (`processing_class.chat_template`)"
        yield "", problem, {name: value for name, value in message.items() if name != key}


def _problems_of_thoughts(messages: list, render: Callable[[list], str | None]) -> Iterator[tuple[str, str]]:
    """Yields (path, problem) for thoughts in the text of the last message, if it is the assistant's."""
    content = messages[-1].get("content") or ()
    texts = [content] if isinstance(content, str) else [block.get("text") or "" for block in content]
    for text in texts:
        tags = [tag for tag in THOUGHTS if tag in text and messages[-1]["role"] == "assistant"]
        if not tags:
            continue
        chat = render(messages)
        if chat is None:
            continue
        remedy = "give the thoughts as 'reasoning_content' of the message, or remove them"
        # The tags split the text into parts, all of which the rendered chat must contain
        if any(part.strip() not in chat for part in re.split("|".join(THOUGHTS), text)):
            yield "", f"leaves out a part of a text with thoughts; {remedy}"
        # The text has its own tags, so a further tag right before the text is the template's
        if any(re.search(rf"{tag}\s*{re.escape(text.strip())}", chat) for tag in tags):
            yield "", f"writes thoughts of its own before a text with thoughts; {remedy}"


def opened_thoughts(input_ids: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the tag that opens thoughts at the end of a prompt `(P,)`, with the white space after it, or `""`."""
    return opened_thought(str(tokenizer.decode(input_ids[-_TAIL_LENGTH:].tolist())))


def of_row(row: int | None) -> str:
    """Returns the start of an error message about a row."""
    return "" if row is None else f"row {row}, "


def check_placeholders(
    input_ids: torch.Tensor,
    refs: list[MediaRef],
    media: dict[str, torch.Tensor],
    placeholders: dict[str, set[int]],
    row: int | None,
) -> None:
    """Raises a [`MediaError`] if the ids don't have the placeholders of the media. `placeholders` are by modality."""
    present_ids = set(input_ids.tolist())
    for ref in refs:
        # A processor may write videos with the image token
        ids = placeholders[ref.modality] | placeholders[ENCODER_OF[ref.modality]]
        if not media or not ids & present_ids:
            raise ref.error(
                f"the chat template wrote no placeholder for this {ref.modality}, so the model would not get it; use "
                "the template of the model's processor"
            )
    stray_ids = set().union(*placeholders.values()) & present_ids
    if stray_ids and not refs:
        raise MediaError(
            f"{of_row(row)}column 'prompt': holds the placeholder token ids {sorted(stray_ids)} but no media; add the "
            "media, or remove the placeholder from the text"
        )
