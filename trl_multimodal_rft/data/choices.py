# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Choices of questions and their letters."""

import re
from collections.abc import Sequence


# "B", "(B)", "B.", "B:" and "B)", alone or before text. Not "A woman": a letter before a space may be a word.
LETTER = re.compile(r"(?:\(([A-Za-z])\)|([A-Za-z])[).:]|([A-Za-z])$)\s*(.*)", re.DOTALL)


def letter_of(match: re.Match) -> str:
    """The letter of a match of `LETTER`, in upper case."""
    return (match[1] or match[2] or match[3]).upper()


def without_letters(choices: Sequence[str]) -> list[str]:
    """Removes the letters of choices, if all have them in order."""
    letters = [LETTER.match(choice) for choice in choices]
    in_order = all(
        letter is not None and letter[4] and (letter[1] or letter[2] or "") == chr(ord("A") + i)
        for i, letter in enumerate(letters)
    )
    return [letter[4] for letter in letters if letter] if in_order else list(choices)
