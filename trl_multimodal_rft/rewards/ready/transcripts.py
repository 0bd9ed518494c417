# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards for transcripts of speech and of text in images."""

import re
import unicodedata
from collections.abc import Callable, Sequence
from decimal import Decimal
from numbers import Real

from ...data.reading.decoding import require_module
from ...data.rows.cells import cell_value
from ..answers import Json, extract_answer, normal_form, rewards_by_reference
from ..calls import Argument, Completion, Reference


# Spaces beside letters of scripts that are written without spaces: Chinese, Japanese, Thai, Lao, Burmese and Khmer
_UNWRITTEN = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_UNWRITTEN_SPACE = re.compile(rf"(?<=[{_UNWRITTEN}])\s+|\s+(?=[{_UNWRITTEN}])")


def ocr_reward(
    completions: Sequence[Completion], solution: Sequence[Reference] | None = None, **kwargs: Argument
) -> list[float | None]:
    """
    Rewards a transcript by its edit distance to the reference: 1 minus the distance in characters, divided by the
    length of the longer text, as in [Perception-R1](https://huggingface.co/papers/2504.07954) for text in images.

    Case and punctuation count; a run of whitespace counts as one space. [`extract_answer`] finds the transcript in the
    completion. [`wer_reward`] compares words. Needs rapidfuzz, which comes with
    [jiwer](https://github.com/jitsi/jiwer): `pip install "trl-multimodal-rft[speech]"`. For the other
    arguments and the errors, see [`accuracy_reward`].

    Args:
        solution (`list`):
            Reference of each completion: a text, or a list of texts, of which the nearest counts. `None` where the
            reward does not apply.

    Example:
    ```python
    >>> ocr_reward(["<answer>EXIT</answer>", "EXIT 4"], solution=["EXIT", "EXIT 42"])
    [1.0, 0.8571428571428571]
    ```
    """

    distance = require_module("rapidfuzz.distance.Levenshtein", "speech").distance

    def reward(answer: str, reference: str) -> float:
        return 1 - distance(answer, reference) / max(len(answer), len(reference))

    return _best_rewards(completions, solution, "ocr_reward", lambda text: " ".join(text.split()), reward, kwargs)


def wer_reward(
    completions: Sequence[Completion], solution: Sequence[Reference] | None = None, **kwargs: Argument
) -> list[float | None]:
    """
    Rewards a transcript by its word error rate: 1 minus the rate, at least 0.0, as
    [Video-R1](https://huggingface.co/papers/2503.21776) does.

    Case, punctuation and compatibility forms of Unicode don't count, except apostrophes and the marks within numbers
    ("don't", "3.5"). [`extract_answer`] finds the transcript in the completion. Needs
    [jiwer](https://github.com/jitsi/jiwer): `pip install "trl-multimodal-rft[speech]"`. For the
    arguments and the errors, see [`accuracy_reward`]. The nearest of several references counts.

    Example:
    ```python
    >>> wer_reward(["<answer>The cat sat.</answer>", "a cat sat"], solution=["the cat sat"] * 2)
    [1.0, 0.6666666666666667]
    ```
    """
    rate = require_module("jiwer", "speech").wer
    return _best_rewards(completions, solution, "wer_reward", _spoken, lambda a, b: max(1 - rate(b, a), 0.0), kwargs)


def cer_reward(
    completions: Sequence[Completion], solution: Sequence[Reference] | None = None, **kwargs: Argument
) -> list[float | None]:
    """
    Rewards a transcript by its character error rate: 1 minus the rate, at least 0.0, for languages whose words aren't
    separated by spaces.

    Spaces count as characters, except beside letters of scripts that are written without spaces, such as Chinese,
    Japanese and Thai. Everything else is as in [`wer_reward`].
    For the arguments and the errors, see [`accuracy_reward`].

    Example:
    ```python
    >>> cer_reward(["<answer>今天天气好。</answer>"], solution=["今天天气很好"])
    [0.8333333333333334]
    ```
    """
    rate = require_module("jiwer", "speech").cer

    def normalize(text: str) -> str:
        return _UNWRITTEN_SPACE.sub("", _spoken(text))

    return _best_rewards(completions, solution, "cer_reward", normalize, lambda a, b: max(1 - rate(b, a), 0.0), kwargs)


def _spoken(text: str) -> str:
    text = normal_form(text, superscripts=True).casefold().replace("’", "'")
    characters = []
    for index, character in enumerate(text):
        if unicodedata.category(character)[0] not in "PS":  # no punctuation, no symbol
            characters.append(character)
            continue
        neighbors = text[max(index - 1, 0) : index], text[index + 1 : index + 2]
        in_word = character == "'" and all(map(str.isalpha, neighbors))
        in_number = character in ".,:" and all(map(str.isdigit, neighbors))
        # Outside of words and numbers, an apostrophe is dropped, and other marks become spaces
        characters.append(character if in_word or in_number else "" if character == "'" else " ")
    return " ".join("".join(characters).split())


def _best_rewards(
    completions: Sequence[Completion],
    solution: Sequence[Reference] | None,
    name: str,
    normalize: Callable[[str], str],
    reward: Callable[[str, str], float],
    columns: dict[str, Argument],
) -> list[float | None]:
    """Returns the reward of each completion's answer, which is the largest over the references of its row."""

    def read_references(reference: Json) -> list[str]:
        entries = reference if isinstance(reference, (list, tuple)) else [reference]
        entries = [entry for entry in entries if cell_value(entry) is not None]
        texts = [normalize(extract_answer(str(entry))) for entry in entries if isinstance(entry, (str, Real, Decimal))]
        return texts if all(texts) and len(texts) == len(entries) else []

    def largest_reward(answer: str, references: list[str], position: int) -> float:
        answer = normalize(answer)
        return max(reward(answer, reference) for reference in references)

    return rewards_by_reference(
        completions, solution, name, read_references, "a text with words, or a list of these", largest_reward, columns
    )
