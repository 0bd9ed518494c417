# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards for multiple-choice questions."""

import re
import unicodedata
from collections.abc import Hashable, Sequence

from ..answers import completion_text, extract_answer, normal_form, normalize_answer, number_of, references_of
from ..calls import Argument, Completion, Reference, RowError, require_column
from ..letters import listed_letters, read_letter


_WORD = re.compile(r"\w+")


def choice_reward(
    completions: Sequence[Completion],
    solution: Sequence[Reference] | None = None,
    choices: Sequence[Sequence[str] | None] | None = None,
    **kwargs: Argument,
) -> list[float | None]:
    """
    Rewards a completion that names the right choice: 1.0 if it does, else 0.0.

    [`extract_answer`] finds the answer in the completion, and [`named_choice`] finds the choice in the answer.
    For the other arguments and the errors, see [`accuracy_reward`], which doesn't use choices.

    Args:
        solution (`list`):
            Right choice of each completion: its text, its letter, or a list of right choices. Answer tags are allowed.
            `None` where the reward does not apply.
        choices (`list[list[str]]`):
            Choices of each completion. `None` where the reward does not apply.

    Example:
    ```python
    >>> choices = ["Man", "Woman", "Child"]
    >>> completions = ["<answer>(B)</answer>", "a woman", "man or woman"]
    >>> choice_reward(completions, solution=["Woman"] * 3, choices=[choices] * 3)
    [1.0, 1.0, 0.0]
    ```
    """
    solution = require_column(solution, "solution", "choice_reward", kwargs)
    choices = require_column(choices, "choices", "choice_reward", kwargs)
    rewards = []
    for position, (completion, solutions, options) in enumerate(zip(completions, solution, choices, strict=True)):
        references = references_of(solutions, position, "choice_reward")
        if not references or options is None:
            rewards.append(None)
            continue
        right = [named_choice(extract_answer(reference), options) for reference in references]
        if None in right:
            wrong = references[right.index(None)]
            problem = f"column 'solution': {wrong!r} is none of the choices {list(options)}; correct one of the two."
            raise RowError(position, problem)
        rewards.append(float(named_choice(extract_answer(completion_text(completion)), options) in right))
    return rewards


def extracted_answer(completion: str, choices: Sequence[str] | None = None) -> str:
    """Returns the answer in a completion. If the answer names one of the `choices`, returns the choice's text."""
    answer = extract_answer(completion)
    index = named_choice(answer, choices) if choices else None
    return answer if index is None or choices is None else choices[index]


def vote_of(answer: str, choices: Sequence[str] | None = None) -> Hashable:
    """
    Returns what equal answers share: the index of the named choice, a number's value, or else the normalized text.
    Returns `None` for an answer without a vote: it is empty or punctuation alone, or names none of the `choices`.
    """
    if choices:
        return named_choice(answer, choices)
    text = normalize_answer(answer)
    if all(unicodedata.category(character)[0] in "PZC" or character in "$`^" for character in text):
        return None
    number = number_of(text)
    return text if number is None else number


def named_choice(answer: str, choices: Sequence[str]) -> int | None:
    """
    Returns the index of the choice that an answer names, `None` for none or several: by its text; by its letter,
    unless another's text follows; or by all of its words and none that only others have, as in
    [MMAU](https://huggingface.co/papers/2410.19168), which ignores negations.
    """
    answer = normal_form(answer).strip()
    choices = [normal_form(choice) for choice in choices]
    texts = [normalize_answer(choice) for choice in choices]
    index = None
    # Each pass removes one leading letter, such as "A.". Normalizing the rest in every pass would take quadratic time,
    # so a pass only normalizes a rest with as many letters and digits as a choice has.
    indices = []
    start = 0
    n_left = _n_characters(answer)
    lengths = {_n_characters(choice) for choice in choices}
    while True:
        text = normalize_answer(answer[start:]) if n_left in lengths else None
        if text in texts:
            index = texts.index(text)
            break
        letter = read_letter(answer, start)  # (letter, index of the text behind the letter)
        if letter is None or ord(letter[0]) - ord("A") >= len(choices):
            index = _by_words(answer[start:], choices)
            break
        indices.append(ord(letter[0]) - ord("A"))
        n_left -= _n_characters(answer[start : letter[1]])
        start = letter[1]
        if start == len(answer):
            break
    # Letters in a list count, too: "(A) or (C)" names two choices
    listed = listed_letters(answer[start:]) if indices else ()
    named_indices = {*indices, *(ord(letter) - ord("A") for letter in listed), index} - {None}
    return named_indices.pop() if len(named_indices) == 1 else None


def _n_characters(text: str) -> int:
    """Returns the number of letters and digits. Punctuation and spaces don't change it."""
    return sum(map(str.isalnum, text.casefold()))


def _by_words(answer: str, choices: Sequence[str]) -> int | None:
    """Returns the index of the choice that an answer names by rule 3 of [`named_choice`], or `None`."""
    answer_words, *words_by_choice = [set(_WORD.findall(text.casefold())) for text in (answer, *choices)]
    for index, choice_words in enumerate(words_by_choice):
        other_words = set().union(*words_by_choice) - choice_words
        if choice_words and choice_words <= answer_words and not answer_words & other_words:
            return index
    return None
