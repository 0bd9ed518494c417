# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Choices of questions and their letters."""

import re
from collections.abc import Sequence


# "B", "(B)", "B.", "B:" and "B)", alone or before text. Not "A woman": a letter before a space may be a word.
LETTER = re.compile(r"(?:\(([A-Za-z])\)|([A-Za-z])[).:]|([A-Za-z])$)\s*(.*)", re.DOTALL)
# "option B", "(B", "The answer is B", "B is right, not A"
_STATED_LETTER = re.compile(
    r"(?:the )?(?:(?:correct |right |best )?(?:option|choice|answer)(?: is)?:? )?[\[(*]*+([a-z])[\])*.:]*+"
    r"(?: is (?:the )?(?:correct|right|best|true)(?: (?:option|choice|answer|one))?)?(?:,? not \(?[a-z]\)?)?[.! ]*",
    re.IGNORECASE | re.ASCII,
)
_OPTION_WORD = re.compile(r"(?:option|choice) (?=\(?[a-z]\b)", re.IGNORECASE | re.ASCII)
# "B.", "(C)" or "D:" at the start or after a blank, or a text of one letter
_LISTED_LETTER = re.compile(r"(?:^|[\s)])\(?([A-Z])(?:[).:](?!\w)|(?<=^.)$)")

# "or C", "/(C)" or "and option c" at the start of the text behind a letter. Not "and a cat" and "and I", whose letters
# are words, "/b/", a sound, and "Both A and C", which is the text of a choice.
_JOINED_LETTER = re.compile(
    r"(?:(?:[,;/&]|(?i:and|or)\b)\s*+)++(?:(?i:option|choice) )?+[\[(*]*+"
    r"(?:([B-HJ-Z])(?![\w'’/-])|([A-HJ-Za-hj-z])(?=[\])*.:,;&]|\s*$))"
)


def read_letter(text: str, start: int = 0) -> tuple[str, int] | None:
    """
    Returns the letter of a choice that a text begins with or states, in upper case, and the index of the rest.

    For "(b) cat", returns `("B", 4)`; for "The answer is B", `("B", 15)`; for "A woman", `None`.
    """
    stated = _STATED_LETTER.fullmatch(text, start)
    if stated is not None:
        return stated[1].upper(), len(text)
    option_word = _OPTION_WORD.match(text, start)
    letter = LETTER.match(text, start if option_word is None else option_word.end())
    return None if letter is None else ((letter[1] or letter[2] or letter[3]).upper(), letter.start(4))


def listed_letters(text: str) -> set[str]:
    """Returns the letters that a text behind a letter lists, as in "B. cat C. dog", "or B" and "/(b)"."""
    letters = set(_LISTED_LETTER.findall(text))
    joined_letter = _JOINED_LETTER.match(text)
    return letters if joined_letter is None else {*letters, (joined_letter[1] or joined_letter[2]).upper()}


def without_letters(choices: Sequence[str]) -> list[str]:
    """
    Returns choices without their letters: `["cat", "dog"]` for `["A. cat", "B. dog"]`. Choices whose letters aren't A,
    B and so on, in order, stay unchanged.
    """
    matches = [LETTER.match(choice) for choice in choices]
    letters_are_in_order = all(
        match is not None and match[4] and (match[1] or match[2] or "") == chr(ord("A") + i)
        for i, match in enumerate(matches)
    )
    return [match[4] for match in matches if match] if letters_are_in_order else list(choices)
