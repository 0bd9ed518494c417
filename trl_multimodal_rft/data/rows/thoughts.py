# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Thoughts in texts of models, in the tags of their chat templates."""

import re


# "<think>", "<seed:think>" and "<|thinking|>"; "<|START_THINKING|>" (Cohere) and "<|begin_of_thought|>"
_NAME = r"(?:\w{1,20}:)?(?:think(?:ing)?|thoughts?|reasoning)"
# The tags of Mistral and Kimi, and the channels of Gemma 4 and gpt-oss, whose thoughts end where the answer begins
_OPENING = re.compile(
    rf"(?i:<\|?{_NAME}\|?>|<\|(?:start|begin)_(?:of_)?{_NAME}\|>)|\[THINK\]|◁think▷|<\|inner_prefix\|>"
    r"|<\|channel>thought|<\|channel\|>analysis<\|message\|>"
)
_CLOSING = re.compile(
    rf"(?i:<\|?/{_NAME}\|?>|<\|end_(?:of_)?{_NAME}\|>)|\[/THINK\]|◁/think▷|<\|inner_suffix\|>"
    r"|<channel\|>|<\|channel\|>final.{0,40}?<\|message\|>"
)
_PARTS = ("<|channel>", "<|channel|>", "<|message|>")  # tokens that tags have beside text


def without_thoughts(text: str) -> str:
    """Returns what follows the last closed thought in a text, or `""` if a thought isn't closed."""
    start = max((tag.end() for tag in _CLOSING.finditer(text)), default=0)
    return "" if _OPENING.search(text, start) else text[start:]


def has_thoughts(text: str, prompt_may_open: bool = False) -> bool:
    """
    Returns whether a text begins with thoughts, and closes them. With `prompt_may_open`, the text may also lack the
    opening tag, which the end of the prompt then has.
    """
    begins = _OPENING.match(text.lstrip()) or prompt_may_open and not _OPENING.search(text)
    return bool(begins) and _CLOSING.search(text) is not None


def opened_thought(text: str) -> str:
    """Returns the tag that opens a thought at the end of a text, with the white space after it, or `""`."""
    tags = [*_OPENING.finditer(text)]
    return text[tags[-1].start() :] if tags and not text[tags[-1].end() :].strip() else ""


def is_part_of_tag(token: str) -> bool:
    """Returns whether a token is a tag of thoughts, or a part of one."""
    return token in _PARTS or any(tag.fullmatch(token) for tag in (_OPENING, _CLOSING))
