# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Control tokens in the texts of rows and tools, which a tokenizer can't distinguish from the chat template's."""

from collections.abc import Callable, Collection
from itertools import groupby
from typing import Literal, TypeVar, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.reading.refs import MediaError
from .processors import Processor, tokenizer_of


logger = logging.get_logger(__name__)

M = TypeVar("M", str, list)
T = TypeVar("T")


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Returns the control tokens of a tokenizer."""
    added = getattr(tokenizer, "added_tokens_decoder", None)  # Mistral's tokenizers have none
    added = added.values() if isinstance(added, dict) else ()
    return {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)} - {""}


def checked_text(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    mode: Literal["allow", "warn", "raise", "strip"],
    label: str,
    tokens: Collection[str],
) -> str:
    """
    Checks the characters and control tokens of a text, and returns it, without these tokens in mode `"strip"`. Raises
    a [`MediaError`] for a lone surrogate, and for a control token in mode `"raise"`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MediaError(
            f"{label}: the text has the lone surrogate {text[error.start]!a} at character {error.start}, which no "
            "tokenizer can encode; decode the text with `errors='replace'`, or remove the row"
        ) from error
    if mode == "allow":
        return text
    to_strip: set[str] = set()
    while candidates := sorted(token for token in tokens if token in text):
        ids = set(tokenizer(text, add_special_tokens=False)["input_ids"])
        matches = [token for token in candidates if tokenizer.convert_tokens_to_ids(token) in ids]
        if not matches:
            break
        if mode == "raise":
            raise MediaError(
                f"{label}: the text holds the control token {matches[0]!r}, which the model would take for one of the "
                "chat template; remove it, or set `special_tokens_in_text` to 'strip', or to 'allow' if intended"
            )
        if mode == "warn":
            logger.warning_once(
                f"A text of the dataset holds the control token {matches[0]!r}, which the model takes for one of the "
                "chat template. Set `special_tokens_in_text` to 'raise' to find the row, to 'strip' to remove such "
                "tokens, or to 'allow' if they are intended."
            )
            break
        to_strip.update(matches)
        text = _without(text, to_strip)
    return text


def _without(text: str, tokens: Collection[str]) -> str:
    """Removes tokens from a text, and tokens that appear when a removal joins their parts, in linear time."""
    by_end: dict[str, list[str]] = {}
    for token in sorted(tokens, key=len, reverse=True):
        by_end.setdefault(token[-1], []).append(token)
    characters: list[str] = []
    for character in text:
        characters.append(character)
        for token in by_end.get(character, ()):
            if characters[-len(token) :] == [*token]:
                del characters[-len(token) :]
                break
    return "".join(characters)


def checked_texts(value: T, processor: Processor, mode: Literal["allow", "warn", "raise", "strip"], label: str) -> T:
    """Applies [`checked_text`] to all texts in messages or content."""
    tokenizer = tokenizer_of(processor)
    tokens = control_tokens(tokenizer)
    return _map_texts(value, lambda text: checked_text(text, tokenizer, mode, label, tokens))


def checked_prompt(
    prompt: M, processor: Processor, mode: Literal["allow", "raise", "strip"] | None, row: int, column: str = "prompt"
) -> M:
    """Applies [`checked_texts`] to a column of a row. A plain text may hold control tokens."""
    allowed = "allow" if isinstance(prompt, str) else mode or "warn"
    return checked_texts(prompt, processor, allowed, f"row {row}, column '{column}'")


def _map_texts(value: T, change: Callable[[str], str]) -> T:
    if isinstance(value, str):
        return cast(T, change(value))
    if isinstance(value, dict):
        return cast(T, {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()})
    if not isinstance(value, list):
        return value
    items = []
    for is_text, run in groupby(value, lambda block: isinstance(block, dict) and isinstance(block.get("text"), str)):
        blocks = list(run)
        joined = "".join(block["text"] for block in blocks) if is_text else ""
        if (new_text := change(joined)) != joined:
            blocks = [{**blocks[0], "text": new_text}]
        items += [_map_texts(block, change) for block in blocks]
    return cast(T, items)
