# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a prompt must hold, so that errors name the row and the column."""

from typing import Any

import torch

from ..data.columns import KNOWN_TYPES, THOUGHT_TYPES, MediaError, MediaRef, block_kind
from ..families import family_of_processor


def write_chat(messages: list[dict[str, Any]], processor, place: str, **template_kwargs) -> str:
    """What a chat template writes."""
    try:
        return processor.apply_chat_template(messages, tokenize=False, **template_kwargs)
    except Exception as error:  # of any type, as templates check little
        raise template_error(error, processor, template_kwargs, place) from error


def lacks_template(processor, template_kwargs: dict[str, Any]) -> bool:
    """Whether nothing says how messages are written."""
    own = getattr(processor, "chat_template", None) or template_kwargs.get("chat_template")
    # Mistral's tokenizers have their rules elsewhere
    return not own and not family_of_processor(processor).takes_base64_audio


def template_error(error: Exception, processor, template_kwargs: dict[str, Any], place: str) -> MediaError:
    """The error of a chat template, or of its absence."""
    name = type(processor).__name__
    if lacks_template(processor, template_kwargs):
        return MediaError(
            f"{place}: {name} has no chat template that could write messages; set `processing_class.chat_template`"
        )
    return MediaError(
        f"{place}: the chat template of {name} rejected the messages ({error}); change them to what it takes"
    )


def check_each(refs: list[MediaRef], decoded: dict[int, Any], processor, processor_kwargs: dict[str, Any]) -> None:
    """Names the image or the video that the processor rejects on its own, too."""
    videos = 0
    for ref in refs:
        medium: Any = decoded[id(ref)]
        size = ""
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
    """Refuses placeholders in the text of a prompt."""
    for message in [{"content": messages}] if isinstance(messages, str) else messages:
        content = message.get("content") or ""
        for part in [{"text": content}] if isinstance(content, str) else content:
            found = next((token for token in tokens if token in (part.get("text") or "")), None)
            if found is not None and refs:
                raise refs[0].error(
                    f"the text of the prompt holds the placeholder {found!r} itself; remove it, the chat template "
                    "writes one for each medium"
                )
            if found is not None:
                raise MediaError(
                    f"{of_row(row)}column 'prompt': its text holds the placeholder {found!r} but no media; give the "
                    "row its media, or remove the placeholder from the text"
                )


def check_blocks(
    messages: list[dict[str, Any]],
    processor: Any,
    template_kwargs: dict[str, Any],
    row: int | None = None,
) -> None:
    """Refuses blocks of types that only the chat template could know, and doesn't: it writes them as it would any."""
    for m, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for b, block in enumerate(content):
            if block["type"] in ("text", *THOUGHT_TYPES) or block_kind(block["type"]) is not None:
                continue
            of_no_type = [*content[:b], {"type": "-"}, *content[b + 1 :]]
            others = [*messages[:m], {**message, "content": of_no_type}, *messages[m + 1 :]]
            try:
                written, other = (
                    processor.apply_chat_template(chat, tokenize=False, **template_kwargs)
                    for chat in (messages, others)
                )
            except Exception:  # a template that refuses one of them says so, or knows the other
                continue
            if written == other:
                raise MediaError(
                    f"{of_row(row)}column 'prompt[{m}].content[{b}]': the chat template leaves out blocks of type "
                    f"{block['type']!r}, so that the model would not get it; known types are {KNOWN_TYPES}"
                )


def of_row(row: int | None) -> str:
    """The beginning of a message about a row."""
    return "" if row is None else f"row {row}, "


def check_placeholders(
    input_ids: torch.Tensor,
    refs: list[MediaRef],
    media: dict[str, torch.Tensor],
    placeholders: dict[str, set[int]],
    row: int | None,
) -> None:
    """Refuses ids in which media and placeholders don't agree."""
    present = set(input_ids.tolist())
    for ref in refs:
        # A processor may write its videos with the image token
        ids = placeholders[ref.kind] | (placeholders["image"] if ref.kind == "video" else set())
        if not media or not ids & present:
            raise ref.error(
                f"the chat template wrote no placeholder for this {ref.kind}, so the model would not get it; use the "
                "template that belongs to the model's processor"
            )
    stray = set().union(*placeholders.values()) & present
    if stray and not refs:
        raise MediaError(
            f"{of_row(row)}column 'prompt': holds the placeholder token ids {sorted(stray)} but no media; give the "
            "row its media, or remove the placeholder from the text"
        )
