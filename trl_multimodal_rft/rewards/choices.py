# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards of multiple choice: which of the choices an answer names."""

import re
from collections.abc import Sequence
from typing import Any

from ..data.choices import LETTER
from .answers import completion_text, extract_answer, normalize_answer, references_of
from .checks import RowError


_WORD = re.compile(r"\w+")


def choice_reward(completions, solution=None, choices=None, **kwargs) -> list[float | None]:
    """
    Rewards a completion that names the right one of several choices: 1.0 when it does, else 0.0.

    The answer is what [`extract_answer`] finds. What it names is told by [`named_choice`]. [`accuracy_reward`] knows
    no choices and compares with the reference alone.

    Args:
        completions (`list[str]` or `list[list[dict[str, str]]]`):
            Completions, plain or conversational. Of a conversational one, the last message is the answer.
        solution (`list`):
            Right choice of each completion, its text or its letter, with or without answer tags; or a list of those
            that are right. `None` where the reward does not apply.
        choices (`list[list[str]]`):
            Choices of each completion. `None` where the reward does not apply.
        **kwargs:
            Other dataset columns and trainer arguments, not used.

    Returns:
        `list[float | None]`: 1.0 or 0.0 for each completion, `None` where it has no solution or no choices.

    Raises:
        `ValueError`: If there is no `solution` or no `choices`, or if a solution is a dictionary or isn't one of the
            choices.

    Example:
    ```python
    >>> choices = ["Man", "Woman", "Child"]
    >>> completions = ["<answer>(B)</answer>", "a woman", "man or woman"]
    >>> choice_reward(completions, solution=["Woman"] * 3, choices=[choices] * 3)
    [1.0, 1.0, 0.0]
    ```
    """
    if solution is None or choices is None:
        name = "solution" if solution is None else "choices"
        raise ValueError(
            f"choice_reward compares with the dataset column `{name}`, which it was not given: add the column, or "
            f"use accuracy_reward for answers without choices. Columns received: {sorted(kwargs)}."
        )
    rewards = []
    for place, (completion, solutions, options) in enumerate(zip(completions, solution, choices, strict=True)):
        references = references_of(solutions, place, "choice_reward")
        if not references or options is None:
            rewards.append(None)
            continue
        right = [named_choice(extract_answer(reference), options) for reference in references]
        if None in right:
            wrong = references[right.index(None)]
            raise RowError(
                place, f"column 'solution': {wrong!r} is none of the choices {list(options)}; correct either of them."
            )
        rewards.append(float(named_choice(extract_answer(completion_text(completion)), options) in right))
    return rewards


def named_choice(answer: str, choices: Sequence[str]) -> int | None:
    """
    Which of the choices an answer names.

    In this order: the text of a choice, except for case, whitespace and punctuation; its letter, as in `"B"`, `"(B)"`
    or `"B. Woman"`, unless another choice's text follows; or text that has all words of one choice and no word that
    only others have, which is the rule of [MMAU](https://huggingface.co/papers/2410.19168).
    """
    # "A." many times over makes neither a deep recursion nor as many readings of all the text
    letters, left, lengths = [], _n_characters(answer), {_n_characters(choice) for choice in choices}
    while True:
        index = _by_text(answer, choices) if left in lengths else None
        if index is not None:
            break
        letter: Any = LETTER.match(answer.strip())
        own = len(choices) if letter is None else ord((letter[1] or letter[2] or letter[3]).upper()) - ord("A")
        if own >= len(choices):
            index = _by_words(answer, choices)
            break
        letters.append(own)
        answer, left = letter[4], left - 1
        if not answer:
            break
    for own in reversed(letters):
        index = own if index in (None, own) else None
    return index


def _by_text(answer: str, choices: Sequence[str]) -> int | None:
    texts = [normalize_answer(choice) for choice in choices]
    said = normalize_answer(answer)
    return texts.index(said) if said in texts else None


def _n_characters(text: str) -> int:
    """Those that a text keeps when it is compared with another."""
    return sum(map(str.isalnum, text.casefold()))


def _by_words(answer: str, choices: Sequence[str]) -> int | None:
    said, words = _words(answer), [_words(choice) for choice in choices]
    for index, own in enumerate(words):
        others = set().union(*words) - own
        if own and own <= said and not said & others:
            return index
    return None


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.casefold()))
