# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""From dataset rows to chat messages whose media blocks hold opaque references, and back."""

import mimetypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit


# Dataset column -> kind of the media it holds. A column named like its kind holds one medium, the plural a list.
MEDIA_COLUMNS = {
    "image": "image",
    "images": "image",
    "audio": "audio",
    "audios": "audio",
    "video": "video",
    "videos": "video",
}

# The order in which media without a placeholder are put before the text.
_KINDS = ("image", "video", "audio")


class MediaError(ValueError):
    """A medium that cannot be placed or decoded. The message names the row, the column and the remedy."""


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class MediaRef:
    """
    Opaque handle to one medium of a dataset row, made to travel inside chat messages.

    TRL deep-copies prompts and gathers them across ranks. A reference is never copied, and is pickled as the short
    text `"<audio>"`, so that the medium stays where it is. Two references are equal only if they are the same object.

    Args:
        kind (`str`):
            `"image"`, `"audio"` or `"video"`.
        source (`Any`):
            Raw value from the row, see [`load_image`], [`load_audio`] and [`load_video`].
        options (`dict[str, Any]`):
            Extra keys of the message block, such as `max_pixels`, `fps`, `video_start` or `sampling_rate`.
        column (`str`):
            Where the medium comes from, such as `"audio"`, `"images[1]"` or `"prompt[0].content[2]"`.
        row (`int`):
            Index of the row in its batch.
    """

    kind: Literal["image", "audio", "video"]
    source: Any
    options: dict[str, Any]
    column: str
    row: int

    def error(self, message: str) -> MediaError:
        """
        The error that tells which row and column a message is about.

        Args:
            message (`str`):
                What is wrong, and the remedy.

        Returns:
            [`MediaError`]: To be raised.
        """
        return MediaError(f"row {self.row}, column '{self.column}': {message}")

    def __repr__(self) -> str:
        return f"<{self.kind}>"

    def __copy__(self) -> "MediaRef":
        return self

    def __deepcopy__(self, memo: dict) -> "MediaRef":
        return self

    def __reduce__(self) -> tuple:
        return str, (repr(self),)


def rows_to_messages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Moves the media of dataset rows into their prompts.

    Media inline in the prompt keep their place; they are given under the name of their kind (`"audio"`), or as
    `"audio_url"`, `"base64"`, `"bytes"`, `"path"` or `"url"`. Placeholders without a medium (`{"type": "image"}`) take the media
    of the columns in order. Where a prompt has no placeholder for a kind, that kind's media are put at the start of
    the first user message: images, then videos, then audios. Literal texts such as `"<image>"` are left alone.

    The rows of a batch come out alike: if any row has media or a conversational prompt, every plain-text prompt
    becomes one user message (so that TRL gives its completions to reward functions as messages, too), and if any row
    has media, every string content becomes a text block. Plain-text prompts in a batch without media stay strings, as
    TRL expects for text.

    Args:
        rows (`list[dict[str, Any]]`):
            Dataset rows with a `"prompt"` (text or messages) and any of the [`MEDIA_COLUMNS`], `None` where a row has
            none. They are not modified.

    Returns:
        `list[dict[str, Any]]`: New rows without media columns, in whose prompts every medium is a block
        `{"type": kind, kind: MediaRef}`.

    Raises:
        MediaError: If both columns of a kind are set, a column does not hold one medium or a list as its name says,
            the placeholders of a prompt do not match the media of its row, or no user message can receive them.
    """
    media = [_column_media(row, index) for index, row in enumerate(rows)]
    prompts = [row["prompt"] for row in rows]
    if any(any(by_kind.values()) for by_kind in media) or not all(isinstance(prompt, str) for prompt in prompts):
        for index, prompt in enumerate(prompts):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompts[index] = _place(messages, media[index], index)
        if next(iter_refs(prompts), None) is not None:
            prompts = [[_as_blocks(message) for message in messages] for messages in prompts]
    return [
        {**{key: value for key, value in row.items() if key not in MEDIA_COLUMNS}, "prompt": prompt}
        for row, prompt in zip(rows, prompts, strict=True)
    ]


def has_media(prompt: str | list[dict[str, Any]]) -> bool:
    """
    Whether a prompt has its media in its messages, as the trainers hand it to reward functions.

    Args:
        prompt (`str` or `list[dict]`):
            Text or messages.

    Returns:
        `bool`: `False` for placeholders without a medium, too.
    """
    if isinstance(prompt, str):
        return False
    blocks = [block for message in prompt if isinstance(message["content"], list) for block in message["content"]]
    return any(len(block) > 1 for block in blocks if block["type"] != "text")


def iter_refs(value: Any) -> Iterator[MediaRef]:
    """
    Finds the media in messages.

    Args:
        value (`Any`):
            Messages, or any nesting of lists and dictionaries of them.

    Yields:
        [`MediaRef`]: Each one, in order.
    """
    if isinstance(value, MediaRef):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from iter_refs(item)
    elif isinstance(value, dict):
        yield from iter_refs(list(value.values()))


def restore_media(value: Any) -> Any:
    """
    Undoes [`rows_to_messages`] for functions that read prompts.

    Args:
        value (`Any`):
            Messages, or any nesting of lists and dictionaries of them.

    Returns:
        `Any`: A copy in which each [`MediaRef`] is replaced by its raw medium, with the options of its block beside it.
    """
    if isinstance(value, MediaRef):
        return value.source
    if isinstance(value, list):
        return [restore_media(item) for item in value]
    if isinstance(value, dict):
        options = [item.options for item in value.values() if isinstance(item, MediaRef)]
        return {key: restore_media(item) for key, item in value.items()} | (options[0] if options else {})
    return value


def strip_media(value: Any) -> Any:
    """
    Makes messages fit for logs: each [`MediaRef`] is replaced by a text such as `"<audio>"`, and each message content by
    one string, so that all rows have one type and can be printed and written as JSON or Parquet.

    Args:
        value (`Any`):
            Messages, or any nesting of lists and dictionaries of them.

    Returns:
        `Any`: The same nesting, without media.

    Example:
    ```python
    >>> strip_media([{"role": "user", "content": [{"type": "audio", "audio": ref}, {"type": "text", "text": "Who?"}]}])
    [{"role": "user", "content": "<audio>Who?"}]
    ```
    """
    if isinstance(value, MediaRef):
        return repr(value)
    if isinstance(value, list):
        return [strip_media(item) for item in value]
    if isinstance(value, dict):
        if "role" in value and "content" in value:
            blocks = _as_blocks(value)["content"] or []
            value = {**value, "content": "".join(str(block.get("text", f"<{block['type']}>")) for block in blocks)}
        return {key: strip_media(item) for key, item in value.items()}
    return value


def _absent(value: Any) -> bool:
    # Arrow fills the keys that other rows have with None, and a missing struct with a struct of None
    return value is None or (isinstance(value, dict) and all(item is None for item in value.values()))


def _column_media(row: dict[str, Any], index: int) -> dict[str, list[MediaRef]]:
    """The media of the columns of a row, by kind."""
    media = {kind: [] for kind in _KINDS}
    for column, kind in MEDIA_COLUMNS.items():
        value = row.get(column)
        if _absent(value):
            continue
        whole = MediaRef(kind, value, {}, column, index)
        if column == kind:
            if _holds_several(kind, value):
                raise whole.error(f"holds a list; rename the column to '{column}s'")
            refs = [whole]
        else:
            if not isinstance(value, (list, tuple)):
                raise whole.error(f"holds a {type(value).__name__}, not a list; rename the column to '{kind}'")
            refs = [MediaRef(kind, item, {}, f"{column}[{i}]", index) for i, item in enumerate(value)]
            for ref in refs:
                if _absent(ref.source):
                    raise ref.error(f"is None; leave it out of the list, or set the whole column to None if no {kind}")
        if refs and media[kind]:
            raise whole.error(f"the row also has '{kind}'; set one of the two columns to None")
        media[kind] += refs
    return media


def _holds_several(kind: str, value: Any) -> bool:
    """Frames make a video, numbers a waveform and rows of pixels an image, but a list of files is none of them."""
    if not isinstance(value, (list, tuple)):
        return False
    if kind == "image":
        return not (value and isinstance(value[0], list))
    first = next((item for item in value if not _absent(item)), None)
    if kind == "audio":
        return isinstance(first, (str, os.PathLike, bytes, dict)) or hasattr(first, "get_all_samples")
    if isinstance(first, dict):
        first = next((first[key] for key in ("path", "url") if first.get(key) is not None), None)
    if isinstance(first, (str, os.PathLike)):
        # A frame may be a file, too
        return (mimetypes.guess_type(urlsplit(os.fspath(first)).path)[0] or "").startswith("video/")
    return hasattr(first, "get_frames_at")


def _place(messages: list[dict[str, Any]], media: dict[str, list[MediaRef]], row: int) -> list[dict[str, Any]]:
    """Copies `messages` with every media block holding its reference, and the media of the columns in place."""
    messages = [{key: item for key, item in m.items() if item is not None or key == "content"} for m in messages]
    placeholders = {kind: [] for kind in _KINDS}
    for m, message in enumerate(messages):
        if not isinstance(message.get("content"), list):
            continue
        message["content"] = [
            _parse_block(block, f"prompt[{m}].content[{b}]", row) for b, block in enumerate(message["content"])
        ]
        for block in message["content"]:
            for ref in iter_refs(block):
                if ref.source is None:
                    placeholders[ref.kind].append(block)

    unplaced = []
    for kind in _KINDS:
        blocks, refs = placeholders[kind], media[kind]
        if blocks and not refs:
            raise blocks[0][kind].error(f"placeholder without {kind}; add the {kind} inline, or in column '{kind}s'")
        if blocks and len(blocks) != len(refs):
            column = refs[0].column.split("[")[0]
            raise MediaError(
                f"row {row}, column '{column}': {len(refs)} for {len(blocks)} {kind} placeholders in the prompt; write "
                f"one {{'type': '{kind}'}} block for each, or none at all"
            )
        for block, ref in zip(blocks, refs, strict=False):
            block[kind] = replace(ref, options=block[kind].options)
        if not blocks:
            unplaced += [{"type": kind, kind: ref} for ref in refs]

    if unplaced:
        user = next((message for message in messages if message["role"] == "user"), None)
        if user is None:
            raise next(iter_refs(unplaced)).error("no user message to put it in; add one, or a placeholder block")
        user["content"] = unplaced + (_as_blocks(user).get("content") or [])
    return messages


def _parse_block(block: dict[str, Any], where: str, row: int) -> dict[str, Any]:
    """Copies a content block. A medium becomes `{"type": kind, kind: MediaRef}`, a placeholder one of source None."""
    if not isinstance(block, dict) or "type" not in block:
        raise MediaError(f"row {row}, column '{where}': a content block must be a dictionary with a 'type'")
    block = {key: item for key, item in block.items() if not _absent(item)}
    kind = block["type"].removesuffix("_url")
    if kind not in _KINDS:
        return block
    if "base64" in block:
        block["url"] = f"data:;base64,{block.pop('base64')}"
    sources = [block.pop(key) for key in (kind, f"{kind}_url", "bytes", "path", "url") if key in block]
    options = {key: item for key, item in block.items() if key != "type"}
    return {"type": kind, kind: MediaRef(kind, sources[0] if sources else None, options, where, row)}


def _as_blocks(message: dict[str, Any]) -> dict[str, Any]:
    """Copies a message; a string content becomes a text block."""
    if isinstance(message.get("content"), str):
        return {**message, "content": [{"type": "text", "text": message["content"]}]}
    return {**message}
