# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rule-based rewards of the R1-AQA recipe (https://huggingface.co/papers/2503.11197): a right answer, in answer tags.

Both functions read the completions and nothing else. A prompt of this recipe shows the literal tags to the model
("... in `<answer> </answer>`"), so a reward that searched prompt and completion together would find the prompt's.
"""

import re
from decimal import Decimal

from . import expressions


_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# One answer and nothing but whitespace around it; a second tag inside would make "the answer" ambiguous.
_FORMAT = re.compile(r"\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)
# Marks of prose. Not those that belong to a number or an expression: "-5", "3.5", "1,000", "5!".
_PUNCTUATION = re.compile(r"(?<!\d)!|[.,;:?\"'`“”‘’](?!\d)")
# Not for math_verify, which reads "cat" as c*a*t (equal to "act"), "3 4" as 3+4 and "2:30" as the ratio 4:60: text
# with a word in it, after LaTeX commands are set aside, numbers side by side, and clock times.
_LATEX_COMMAND = re.compile(r"\\[a-zA-Z]+")
_PROSE = re.compile(r"[^\W\d_]{2,}|\d\s+\d|:")
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?")
# Letters that have a value, so that they may equal a number
_CONSTANTS = ("e", "π")


def accuracy_reward(completions, solution=None, **kwargs) -> list[float | None]:
    """
    Rewards a completion whose answer equals the reference: 1.0 when it does, else 0.0.

    The answer is the content of the first `<answer>...</answer>`, or the whole completion when there is no such tag.
    It equals the reference when the two are the same text apart from case, whitespace and punctuation, or the same
    number (`"0.5"` and `".50"`), or else, both of them a bare expression, when they are symbolically equal (`"0.5"`
    and `"\\frac{1}{2}"`), which takes `math_verify`. Text around a tag never counts, and a number inside a sentence is
    not an expression.

    Symbolic comparisons run in a process of their own, from whatever thread they are asked for: one that takes more
    than 3 seconds is given up, and the answer is wrong.

    Args:
        completions (`list[str]` or `list[list[dict[str, str]]]`):
            Completions, plain or conversational. Of a conversational one, the last message is the answer.
        solution (`list`):
            Reference answer of each completion, with or without answer tags. `None` where the reward does not apply.
        **kwargs:
            Other dataset columns and trainer arguments, not used.

    Returns:
        `list[float | None]`:
            1.0 or 0.0 for each completion, `None` where its reference is `None`.

    Raises:
        ValueError: If there is no `solution`, or not one for each completion.

    Example:
    ```python
    >>> accuracy_reward(["<answer>Seven.</answer>", "It is 7, so <answer>8</answer>"], solution=["seven", "7"])
    [1.0, 0.0]
    ```
    """
    if solution is None:
        raise ValueError(
            "accuracy_reward compares with the dataset column `solution`, which it was not given: add the column, or "
            f"rename the one that holds the reference answers. Columns received: {sorted(kwargs)}."
        )
    if len(solution) != len(completions):
        raise ValueError(f"accuracy_reward was given {len(completions)} completions and {len(solution)} solutions.")
    return [
        None
        if reference is None
        else float(_equal(extract_answer(completion_text(completion)), extract_answer(str(reference))))
        for completion, reference in zip(completions, solution, strict=True)
    ]


def format_reward(completions, **kwargs) -> list[float]:
    """
    Rewards the form `<answer>...</answer>`: 1.0 when the completion is that and nothing else but whitespace, else 0.0.

    Args:
        completions (`list[str]` or `list[list[dict[str, str]]]`):
            Completions, plain or conversational. Of a conversational one, the last message is read.
        **kwargs:
            Dataset columns and trainer arguments, not used.

    Returns:
        `list[float]`:
            1.0 or 0.0 for each completion.

    Example:
    ```python
    >>> format_reward(["<answer>seven</answer>", "It is <answer>seven</answer>"])
    [1.0, 0.0]
    ```
    """
    return [float(_FORMAT.fullmatch(completion_text(completion)) is not None) for completion in completions]


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """
    Text of a completion.

    Args:
        completion (`str` or `list[dict[str, str]]`):
            Completion, plain or conversational.

    Returns:
        `str`: The text, of a conversational completion that of its last message; nothing if that is a tool's, which
        the model left without an answer.
    """
    if isinstance(completion, str):
        return completion
    last = completion[-1]
    return "" if last["role"] == "tool" else last["content"]


def extract_answer(text: str) -> str:
    """
    Finds the answer in a completion.

    Args:
        text (`str`):
            Completion.

    Returns:
        `str`: Content of the first `<answer>...</answer>`, or the whole text when there is no such tag, without space
        around.
    """
    match = _ANSWER.search(text)
    return (match.group(1) if match else text).strip()


def normalize_answer(text: str) -> str:
    """
    Takes away what doesn't tell answers apart.

    Args:
        text (`str`):
            Answer.

    Returns:
        `str`: In lower case, with single spaces and without punctuation, that of numbers aside.
    """
    # An answer that is nothing but punctuation stays what it is, or it would equal an empty completion.
    return " ".join(_PUNCTUATION.sub("", text.casefold()).split()) or text


def _equal(answer: str, reference: str) -> bool:
    texts = [normalize_answer(answer), normalize_answer(reference)]
    if texts[0] == texts[1]:
        return True
    if not (_is_expression(answer) and _is_expression(reference)):
        return False
    numbers = [_number(text) for text in texts]
    one, other = numbers
    if one is not None and other is not None:
        # As math_verify does: decimal fractions agree up to their sixth place
        fractions = all("." in text for text in texts)
        return one == other or fractions and round(one, 6) == round(other, 6)
    letters = [len(text) == 1 and text.isalpha() for text in texts]
    if all(letters):
        return False
    if all(letter or number is not None for letter, number in zip(letters, numbers, strict=True)):
        if not set(texts) & set(_CONSTANTS):
            return False
    return expressions.equal(answer, reference)


def _is_expression(text: str) -> bool:
    return any(map(str.isalnum, text)) and _PROSE.search(_LATEX_COMMAND.sub("", text)) is None


def _number(text: str) -> Decimal | None:
    """The number that a text is, if it is one in plain digits."""
    if _NUMBER.fullmatch(text) is None or not any(map(str.isdigit, text)):
        return None
    return Decimal(text.replace(",", ""))
