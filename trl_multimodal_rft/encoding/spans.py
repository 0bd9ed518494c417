# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Spans of a text that two tokenizers cut alike, and the token by which a chat template ends an answer."""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from .messages import has_template, write_chat
from .processors import Processor, control_tokens, tokenizer_of


# What decoders write for bytes that are no whole character
_REPLACEMENT = "\ufffd"

_ANSWER = "Answer"  # an answer whose end is looked for


class TokenText(NamedTuple):
    """The text of tokens, without a character at the end whose bytes are incomplete."""

    text: str
    ends: list[int]  # for each token, the number of characters of `text` that are complete after it


class Spans(NamedTuple):
    """For each token of two tokenizations of a text, the index of its span, -1 in none."""

    first: list[int]
    second: list[int]
    is_whole: bool  # whether the last span ends with the text


def token_text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> TokenText:
    """
    Returns the text of tokens, and where each of them ends. Four tokens, of which the second and third are the bytes
    of an é, have the text "cés" and the ends 1, 1, 2 and 3.
    """
    pieces: list[str] = []
    ends: list[int] = []
    n_characters = 0
    # The text up to `stop` is known. A decoder may drop a space at the start, so tokens are decoded with those of the
    # last known piece, from `start` on
    start = stop = 0
    known = ""
    for i in range(len(ids)):
        text = _decode(ids[start : i + 1], tokenizer)
        if len(text) > len(known) and not text.endswith(_REPLACEMENT):
            pieces.append(text[len(known) :])
            n_characters += len(pieces[-1])
            start = stop
            stop = i + 1
            known = _decode(ids[start:stop], tokenizer)
        ends.append(n_characters)
    return TokenText("".join(pieces), ends)


def common_spans(tokens: TokenText, other: TokenText) -> Spans:
    """
    Returns the shortest spans of a text whose ends are ends of tokens on both sides: `th|e b|ir|d.` and `t|h|e
    |bir|d|.` have three. If the tokenizer of `other` writes the text differently, the spans end where the texts first
    differ.
    """
    length = _common_length(tokens.text, other.text)
    other_ends = other.ends
    if tokens.text.startswith(" ") and not other.text.startswith(" "):
        # The first token of SentencePiece begins with a space, which its decoder drops
        length = 1 + _common_length(tokens.text[1:], other.text)
        other_ends = [end + 1 for end in other.ends]
    closing = _closing_tokens(tokens.ends)
    other_closing = _closing_tokens(other_ends)
    cuts = sorted(end for end in closing.keys() & other_closing.keys() if 0 < end <= length)
    return Spans(
        _numbered([closing[cut] for cut in cuts], len(tokens.ends)),
        _numbered([other_closing[cut] for cut in cuts], len(other_ends)),
        length == len(tokens.text),
    )


def _closing_tokens(ends: Sequence[int]) -> dict[int, int]:
    """Returns the first token that reaches each end. Later ones begin a character that isn't complete yet."""
    closing: dict[int, int] = {}
    for i, end in enumerate(ends):
        closing.setdefault(end, i)
    return closing


def _numbered(last_tokens: Sequence[int], n: int) -> list[int]:
    """Returns the span index of each of `n` tokens, from the last token of each span."""
    spans: list[int] = []
    for span, last in enumerate(last_tokens):
        spans += [span] * (last + 1 - len(spans))
    return spans + [-1] * (n - len(spans))


def _common_length(text: str, other: str) -> int:
    """Returns the number of characters at the start of two texts that are equal."""
    pairs = zip(text, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(other)))


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the tokens of a text, in which no control token stands for its name."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def end_of_answer(processor: Processor) -> int | None:
    """
    Returns the control token that the chat template writes behind an answer, such as `<end_of_turn>`, or the EOS token
    if it writes none.
    """
    tokenizer = tokenizer_of(processor)
    if not has_template(processor, {}):
        return tokenizer.eos_token_id
    has_media = isinstance(processor, ProcessorMixin)
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if has_media else text}
        for role, text in (("user", "Question"), ("assistant", _ANSWER))
    ]
    rest = write_chat(messages, processor, "end of an answer").rpartition(_ANSWER)[2]
    control_ids = {tokenizer.convert_tokens_to_ids(token) for token in control_tokens(tokenizer)}
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
    return next((token_id for token_id in ids if token_id in control_ids), tokenizer.eos_token_id)


def _decode(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode([*ids], skip_special_tokens=False, clean_up_tokenization_spaces=False))
