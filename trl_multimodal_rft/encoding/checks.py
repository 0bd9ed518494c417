# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks of messages, media and placeholders of a prompt, whose errors name the row and the column."""

from typing import Any

import torch

from ..data.columns import KNOWN_TYPES, THOUGHT_TYPES, MediaError, MediaRef, block_kind
from ..families import family_of_processor
from .processors import Processor


def write_chat(messages: list[dict[str, Any]], processor: Processor, place: str, **template_kwargs: Any) -> str:
    """Renders the chat template."""
    try:
        return str(processor.apply_chat_template(messages, tokenize=False, **template_kwargs))
    except Exception as error:  # templates raise any type
        raise template_error(error, processor, template_kwargs, place) from error


def has_template(processor: Processor, template_kwargs: dict[str, Any]) -> bool:
    """Whether the processor can render messages."""
    given = getattr(processor, "chat_template", None) or template_kwargs.get("chat_template")
    # Mistral's tokenizers have no template, but rules
    return bool(given) or family_of_processor(processor).takes_base64_audio


def template_error(error: Exception, processor: Processor, template_kwargs: dict[str, Any], place: str) -> MediaError:
    """The error for a chat template that raised or is missing."""
    name = type(processor).__name__
    if not has_template(processor, template_kwargs):
        problem = f"{name} has no chat template that could write messages; set `processing_class.chat_template`"
    else:
        problem = f"the chat template of {name} rejected the messages ({error}); change them to what it takes"
    return MediaError(f"{place}: {problem}")


def check_each(
    refs: list[MediaRef], decoded: dict[int, Any], processor: Processor, processor_kwargs: dict[str, Any]
) -> None:
    """Raises for the image or the video that the processor rejects in isolation, too."""
    videos = 0
    for ref in refs:
        medium, size = decoded[id(ref)], ""
        try:
            if ref.kind == "image":
                size = "an image of {} x {} pixels".format(*medium.size)
                processor.image_processor(images=[medium], **processor_kwargs.get("images_kwargs", {}))
            elif ref.kind == "video":
                size = f"a video of shape {tuple(medium.shape)}"
                options = processor_kwargs["videos_kwargs"]
                metadata = [[options["video_metadata"][0][videos]]]
                videos += 1
                processor.video_processor(videos=[[medium]], **{**options, "video_metadata": metadata})
        except Exception as error:
            raise ref.error(
                f"{type(processor).__name__} can't take {size} ({error}); resize it or remove the row"
            ) from error


def check_text(messages: str | list[dict[str, Any]], refs: list[MediaRef], tokens: list[str], row: int | None) -> None:
    """Refuses placeholder tokens in the text of a prompt."""
    contents = [messages] if isinstance(messages, str) else [message.get("content") or "" for message in messages]
    parts = [part for each in contents for part in ([{"text": each}] if isinstance(each, str) else each)]
    found = next((token for part in parts for token in tokens if token in (part.get("text") or "")), None)
    if found is not None and refs:
        raise refs[0].error(
            f"the text of the prompt holds the placeholder {found!r} itself; remove it, as the chat template writes "
            "one for each medium"
        )
    if found is not None:
        raise MediaError(
            f"{of_row(row)}column 'prompt': its text holds the placeholder {found!r} but no media; add the media, or "
            "remove the placeholder from the text"
        )


def check_blocks(
    messages: list[dict[str, Any]], processor: Processor, template_kwargs: dict[str, Any], row: int | None = None
) -> None:
    """Refuses blocks of types that the chat template silently ignores: it renders them like an unknown type."""
    for m, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for b, block in enumerate(content):
            if block["type"] in ("text", *THOUGHT_TYPES) or block_kind(block["type"]) is not None:
                continue
            unknown = [*content[:b], {"type": "-"}, *content[b + 1 :]]
            others = [*messages[:m], {**message, "content": unknown}, *messages[m + 1 :]]
            try:
                written, other = (write_chat(chat, processor, "", **template_kwargs) for chat in (messages, others))
            except MediaError:  # a template that raises knows its types
                continue
            if written == other:
                raise MediaError(
                    f"{of_row(row)}column 'prompt[{m}].content[{b}]': the chat template leaves out blocks of type "
                    f"{block['type']!r}, so the model would not get it; known types are {KNOWN_TYPES}"
                )


def of_row(row: int | None) -> str:
    """The start of a message about a row."""
    return "" if row is None else f"row {row}, "


def check_placeholders(
    input_ids: torch.Tensor,
    refs: list[MediaRef],
    media: dict[str, torch.Tensor],
    placeholders: dict[str, set[int]],
    row: int | None,
) -> None:
    """Refuses ids whose placeholders don't match the media."""
    present = set(input_ids.tolist())
    for ref in refs:
        # A processor may write videos with the image token
        ids = placeholders[ref.kind] | (placeholders["image"] if ref.kind == "video" else set())
        if not media or not ids & present:
            raise ref.error(
                f"the chat template wrote no placeholder for this {ref.kind}, so the model would not get it; use the "
                "template of the model's processor"
            )
    stray = set().union(*placeholders.values()) & present
    if stray and not refs:
        raise MediaError(
            f"{of_row(row)}column 'prompt': holds the placeholder token ids {sorted(stray)} but no media; add the "
            "media, or remove the placeholder from the text"
        )
