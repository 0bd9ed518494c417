# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Control tokens in the texts of rows and tools, which a tokenizer can't tell from those of the chat template."""

from collections.abc import Callable, Collection
from functools import partial
from itertools import groupby
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import logging

from ..data.columns import MediaError


logger = logging.get_logger(__name__)


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """
    The control tokens of a tokenizer.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's tokenizer.

    Returns:
        `set[str]`: Its special tokens, and all that were added as special ones.
    """
    added = getattr(tokenizer, "added_tokens_decoder", None)  # a property that Mistral's own tokenizers don't have
    added = added.values() if isinstance(added, dict) else ()
    return {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)} - {""}


def checked_text(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    mode: Literal["allow", "warn", "raise", "strip"],
    place: str,
    tokens: Collection[str] | None = None,
) -> str:
    """
    A text that is to become part of a message.

    Args:
        text (`str`):
            The text.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's tokenizer. Some read control tokens in a text as words, where they do no harm.
        mode (`str`):
            What happens to control tokens in it: `"allow"` keeps them, `"warn"` logs them, `"raise"` raises, and
            `"strip"` removes them, and those that the rest makes.
        place (`str`):
            Where it comes from, for errors.
        tokens (`Collection[str]`, *optional*):
            The [`control_tokens`], where many texts are checked.

    Returns:
        `str`: The text, or what is left of it.

    Raises:
        [`MediaError`]: If it holds control tokens and `mode` is `"raise"`, or if it isn't Unicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MediaError(
            f"{place}: the text has the lone surrogate {text[error.start]!a} at character {error.start}, which no "
            "tokenizer reads; decode the text with `errors='replace'`, or remove the row"
        ) from error
    if mode == "allow":
        return text
    while found := _tokens_in(text, tokenizer, control_tokens(tokenizer) if tokens is None else tokens):
        if mode == "raise":
            raise MediaError(
                f"{place}: the text holds the control token {found[0]!r}, which the model would take for one of the "
                "chat template; remove it, or set `special_tokens_in_text` to 'strip', or to 'allow' if it is meant"
            )
        if mode == "warn":
            logger.warning_once(
                f"A text of the dataset holds the control token {found[0]!r}, which the model takes for one of the "
                "chat template. Set `special_tokens_in_text` to 'raise', which names the row, to 'strip', which "
                "removes such tokens, or to 'allow' if they are meant."
            )
            break
        for token in found:
            text = text.replace(token, "")
    return text


def _tokens_in(text: str, tokenizer: PreTrainedTokenizerBase, tokens: Collection[str]) -> list[str]:
    """The tokens that stand in a text and that the tokenizer reads there, the first in the alphabet first."""
    found = sorted(token for token in tokens if token in text)
    ids = set(tokenizer(text, add_special_tokens=False)["input_ids"]) if found else set()
    return [token for token in found if tokenizer.convert_tokens_to_ids(token) in ids]


def checked_messages(
    messages: str | list[dict[str, Any]],
    processor: ProcessorMixin | PreTrainedTokenizerBase,
    mode: str | None,
    row: int | None = None,
    column: str = "prompt",
) -> Any:
    """
    A prompt whose texts are checked, see [`checked_text`].

    Args:
        messages (`str` or `list[dict]`):
            Plain text, which may hold the tokens of a template since none wraps it, or messages.
        processor ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`]):
            What is to encode them.
        mode (`str`, *optional*):
            What happens to control tokens in messages: `"allow"`, `"raise"` or `"strip"`; by default a warning.
        row (`int`, *optional*):
            Number of the row, for errors.
        column (`str`, *optional*, defaults to `"prompt"`):
            Where the messages come from, for errors.

    Returns:
        `str` or `list[dict]`: The prompt, or what is left of it.

    Raises:
        [`MediaError`]: See there.
    """
    tokenizer = processor.tokenizer if isinstance(processor, ProcessorMixin) else processor
    place = f"column '{column}" if row is None else f"row {row}, column '{column}"
    if isinstance(messages, str):
        return checked_text(messages, tokenizer, "allow", f"{place}'")
    options: dict[str, Any] = {"tokenizer": tokenizer, "mode": mode or "warn", "tokens": control_tokens(tokenizer)}
    return [
        map_texts(message, partial(checked_text, place=f"{place}[{m}]'", **options))
        for m, message in enumerate(messages)
    ]


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """
    Changes the texts in a message or its content.

    Args:
        value (`Any`):
            Any nesting of lists and dictionaries.
        change (`Callable[[str], str]`):
            Takes a text. Neighbouring blocks of text, which templates join, are one text if it changes that.

    Returns:
        `Any`: The same nesting with the changed texts.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_texts(key, change): map_texts(item, change) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    changed = []
    for is_text, run in groupby(value, lambda block: isinstance(block, dict) and isinstance(block.get("text"), str)):
        blocks = list(run)
        joined = "".join(block["text"] for block in blocks) if is_text else ""
        if (kept := change(joined)) != joined:
            blocks = [{**blocks[0], "text": kept}]
        changed += [map_texts(block, change) for block in blocks]
    return changed
