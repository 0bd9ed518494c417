# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rule-based rewards for right answers and their format, as in R1-AQA (https://huggingface.co/papers/2503.11197).

The rewards read only the completions, since R1-AQA's prompts contain answer tags, too ("... in `<answer> </answer>`").
"""

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate
from numbers import Real
from typing import TypeVar

import numpy as np
import torch

from ..data.rows.cells import cell_value
from ..data.rows.thoughts import has_thoughts, without_thoughts
from . import expressions
from .calls import Argument, Completion, Reference, RowError, require_column
from .letters import listed_letters, read_letter


T = TypeVar("T")
# A value of an answer, or of a reference
Json = str | float | Decimal | list | tuple | dict | None

# One answer with only whitespace around its tags. With further tags inside, two answers would be possible.
_FORMAT = re.compile(r"\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)
_OPENING_TAG, _CLOSING_TAG = (re.compile(tag, re.IGNORECASE) for tag in ("<answer>", "</answer>"))
# The start of a box, an escaped character such as `\{`, or a brace
_BRACES = re.compile(r"(\\f?boxed\s*\{)|\\.|[{}]", re.DOTALL)
# "The answer is 7." and "**Final answer:** 7", not "I wonder which answer is right"
_STATEMENT = re.compile(r"\banswer[*_]*(?:\s+is\b[*_]*:?|\s*[:=])[*_]*", re.IGNORECASE)
_BEFORE_STATEMENT = re.compile(r"(?:^|\W|\b(?:the|my|our|final|correct|right|best|so|thus|hence))\Z", re.IGNORECASE)
_HOPE = re.compile(r"\. I hope it is correct\.?\Z")  # suffix of Minerva's answers
# A whole answer in math mode, in `\text{}` or after the word "option"
_WRAPPED = re.compile(
    r"\$\$?([^$]+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]"
    r"|\\(?:text|mathrm|mathbf|mbox)\w*\s*\{([^{}]*)\}|(?:option|choice) (\S+)",
    re.DOTALL | re.IGNORECASE,
)
_MOST_WRAPPINGS = 5  # maximum number of nested delimiters to remove
# A number with a unit: "7 \text{ cm}^2", "7 cm", and "7 m" if the letter is more often a unit than a variable
_UNIT = re.compile(
    r"(?P<value>.*?\d.*?)(?:\\[,;! ]|\s)*"
    r"(?P<unit>\\(?:text|mathrm|mbox)\w*\s*\{[^{}]*\}(?:\^\{?\d\}?)?|\s[A-Za-z]{2,}|(?<=\d)\s?[mgshdlLJNWVAKCF])",
    re.DOTALL,
)
_LONGEST_MEASURE = 100  # limit on the length of a number with its unit, in characters
# Words behind numbers that aren't units
_FACTORS = {"dozen", "hundred", "thousand", "million", "billion", "trillion", "pi"}
# Punctuation of prose, in any script, but not of numbers and expressions: "-5", "3.5", "1,000", "5!".
_PUNCTUATION = re.compile(r"(?:(?<!\d)!|[.,;:?\"'`“”‘’„«»¡¿。、「」『』।॥؟،؛۔])(?!\d)")
# Maximum number of combining marks on a letter, as in Unicode's stream-safe form. Further marks are dropped, because
# normalization takes quadratic time to sort marks.
_MOST_MARKS = 30
_LATEX_COMMAND = re.compile(r"\\[a-zA-Z]+_?")
# Commands that may stand between numbers, as in "3 \times 4" and "5 \sqrt 2"; "3 \quad 4" is a list
_INFIX = re.compile(
    r"\\(?:times|cdot|div|pm|mp|leq?(?:slant)?|geq?(?:slant)?|lt|gt|neq?|approx|sqrt|pi|log|ln|exp|sin|cos|tan)(?![a-zA-Z])"
)
# Texts with words (except LaTeX commands), adjacent numbers or clock times aren't passed to math_verify, which reads
# "cat" as c*a*t (equal to "act"), "3 4" as 3+4 and "2:30" as a ratio (equal to "4:60")
_PROSE = re.compile(r"[^\W\d_]{2,}|[^\W_]\s*\.?\s+\d|:|\|\s*\||\.\.|[*,/<>^±×÷≤≥.%=]\s*[*,/<>^±×÷≤≥%]")
# Characters of expressions. math_verify stops at the first other character, and reads "7?8" as 7.
_READABLE = re.compile(r"[-+*/^=<>.,!%×÷±≤≥()\[\]{}|\sA-Za-z0-9α-ω]*")
# Spaces and signs in LaTeX such as `\,` and `\%`, backslashes before brackets, and underscores of subscripts
_ESCAPE = re.compile(r"\\(?:[,;:! %$]|(?=[()\[\]{}|]))|(?<=[A-Za-z}])_")
_LATEX_SPACE = re.compile(r"\\[,;:]")
_LONGEST_EXPRESSION = 1000  # maximum length of an expression, in characters
# "1,000", ".5" and "1e3" are numbers; "1/2" and "1 1/2" are fractions
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?(?:(?<=[0-9])e[-+]?[0-9]{1,3})?")
_MIXED = re.compile(r"([-+]?)\s*(?:([0-9]+) )?([0-9]+/0*[1-9][0-9]*)")
# A factor of a product: "6.63", "10^{-34}", "10^8" or "\frac{1}{2}", and the operators between factors
_FACTOR = re.compile(
    r"(?P<base>[-+]?[0-9.,e]{1,12})(?:\s*\^\s*(?P<brace>\{)?\s*(?P<power>[-+]?[0-9]{1,3})\s*(?(brace)\}))?"
    r"|(?P<sign>[-+]?)\\[dt]?frac\s*\{(?P<above>[0-9]{1,12})\}\s*\{(?P<below>[0-9]{1,12})\}"
)
_BETWEEN_FACTORS = re.compile(r"\s*(\\times(?![a-z])|\\cdot(?![a-z])|\\div(?![a-z])|[×*÷])\s*")
_MOST_FACTORS = 6
_SMALL = Fraction(1, 10**4)  # below it, six decimal places hold fewer than three digits
# Operators beside those of ASCII
_ASCII_OPERATORS = {"−": "-", "·": "*", "⋅": "*", "∙": "*"}
# Letters with a value, which may equal a number
_CONSTANTS = ("e", "π")


def accuracy_reward(
    completions: Sequence[Completion], solution: Sequence[Reference] | None = None, **kwargs: Argument
) -> list[float | None]:
    """
    Rewards a completion whose answer equals the reference: 1.0 when it does, else 0.0.

    [`extract_answer`] finds the answer in the completion. It equals the reference if both are the same text except for
    case, whitespace, punctuation and compatibility forms, the same number (`".5"` and `"1/2"`), the same choice
    (`"B"`, `"Option B"`, `"dog"` and `"B. dog"`), or two expressions that `math_verify` reads and finds equal (`"0.5"`
    and `"\\frac{1}{2}"`). Units of an answer in LaTeX may be missing (`"7"` and `"\\boxed{7 \\text{ cm}}"`). Text
    around a tag never counts, and a number inside a sentence is not an expression.

    Symbolic comparisons run in a separate process, from any thread. A comparison of more than 3 seconds is aborted,
    and the answer counts as wrong.

    Args:
        completions (`list[str]` or `list[list[dict[str, str]]]`):
            Completions, plain or conversational. The last message of a conversational completion is the answer.
        solution (`list`):
            Reference of each completion: a number, a text in which [`extract_answer`] finds the answer, or a list of
            references, any of which is right. `None` where the reward does not apply.
        **kwargs:
            Other dataset columns and trainer arguments, not used.

    Returns:
        `list[float | None]`: 1.0 or 0.0 for each completion, `None` where its reference is `None` or an empty list.

    Raises:
        ValueError: If `solution` is missing or has another length than the completions, or if a reference has another
            form. The message names the row.

    Example:
    ```python
    >>> accuracy_reward(["<answer>Seven.</answer>", "It is 7, so <answer>8</answer>"], solution=["seven", "7"])
    [1.0, 0.0]
    ```
    """
    solution = require_column(solution, "solution", "accuracy_reward", kwargs)
    if len(solution) != len(completions):
        raise ValueError(f"accuracy_reward got {len(completions)} completions and {len(solution)} solutions.")
    rewards: list[float | None] = []
    for position, (completion, solutions) in enumerate(zip(completions, solution, strict=True)):
        references = references_of(solutions, position, "accuracy_reward")
        answer, in_latex = _find_answer(completion_text(completion))
        answer = normal_form(answer).strip()
        is_right = answer != "" and any(_is_right(answer, in_latex, reference) for reference in references)
        rewards.append(float(is_right) if references else None)
    return rewards


def format_reward(completions: Sequence[Completion], **kwargs: Argument) -> list[float]:
    """
    Rewards the form `<answer>...</answer>`: 1.0 if a completion has only whitespace around the tags, else 0.0.
    Thoughts before them don't count, see [`extract_answer`].

    See [`accuracy_reward`] for the arguments.

    Example:
    ```python
    >>> format_reward(["<answer>seven</answer>", "It is <answer>seven</answer>"])
    [1.0, 0.0]
    ```
    """
    answers = [without_thoughts(completion_text(completion)) for completion in completions]
    return [float(_FORMAT.fullmatch(answer) is not None) for answer in answers]


vars(format_reward)["required_in_prompt"] = "<answer>"  # see `missing_instructions`


def boxed_format_reward(completions: Sequence[Completion], think: bool = True, **kwargs: Argument) -> list[float]:
    """
    Rewards the form of [EasyR1](https://github.com/hiyouga/EasyR1): 1.0 when the completion begins with thoughts, such
    as `<think>...</think>`, and has a closed `\\boxed{}` after them, with any text around it, else 0.0.

    See [`accuracy_reward`] for the other arguments.

    Args:
        think (`bool`, *optional*, defaults to `True`):
            Whether the completion must begin with thoughts. Otherwise only the box is required. If a prompt ends with
            the opening tag, trainers add the tag to the completion. Without `completion_ids`, which trainers pass, the
            opening tag may be missing.

    Example:
    ```python
    >>> boxed_format_reward(["<think>3 + 4</think> \\boxed{7}", "\\boxed{7}", "<think>\\boxed{7}</think> 7"])
    [1.0, 0.0, 0.0]
    ```
    """
    rewards = []
    for completion in completions:
        text = completion_text(completion)
        # Without `completion_ids`, the opening tag may be at the end of the prompt, which the function doesn't get
        begins = not think or has_thoughts(text, prompt_may_open="completion_ids" not in kwargs)
        if not isinstance(completion, str):  # a tokenizer that parses turns puts thoughts beside the content
            begins = begins or any(completion[-1].get(name) for name in ("reasoning_content", "reasoning", "thinking"))
        rewards.append(float(begins and _last_box(without_thoughts(text)) is not None))
    return rewards


vars(boxed_format_reward)["required_in_prompt"] = "\\boxed"


def rewards_by_reference(
    completions: Sequence[Completion],
    solution: Sequence[Reference] | None,
    name: str,
    read_references: Callable[[Json], list[T]],
    form: str,
    reward: Callable[[str, list[T], int], float],
    columns: dict[str, Argument],
) -> list[float | None]:
    """
    Returns `reward(answer, references, position)` of each completion, or `None` if the cell in `solution` is empty. If
    `read_references` gives none, raises a [`RowError`] with the function's `name` and the expected `form`.
    """
    rewards: list[float | None] = []
    pairs = zip(completions, require_column(solution, "solution", name, columns), strict=True)
    for position, (completion, reference) in enumerate(pairs):
        reference = cell_value(plain(reference))
        if reference is None or reference in ([], [None]):
            rewards.append(None)
            continue
        references = read_references(reference)
        if not references:
            problem = f"column 'solution': {name} got {reference!r:.100}, which isn't {form}; correct it."
            raise RowError(position, problem)
        rewards.append(reward(extract_answer(completion_text(completion)), references, position))
    return rewards


def completion_text(completion: Completion) -> str:
    """Returns the text of a completion or of its last message. A tool's message counts as empty."""
    if isinstance(completion, str):
        return completion
    last = completion[-1]
    content = "" if last["role"] == "tool" else last.get("content") or ""
    return content if isinstance(content, str) else "".join(block.get("text") or "" for block in content)


def extract_answer(text: str) -> str:
    """
    Finds the answer in a completion, or in a reference.

    Args:
        text (`str`):
            Completion or reference.

    Returns:
        `str`: Content of the first `<answer>...</answer>`, in upper or lower case, or of a box or statement inside the
        tags. Without tags, content of the last `\\boxed{}`, or the text after `####` in the last line or after a final
        "the answer is". Otherwise, or if `<answer>` isn't closed, the whole text, without outer whitespace and
        Markdown. Of a text with thoughts, only what follows the last thought counts, and `""` if one isn't closed.
        The tags of thoughts are those of common chat templates, such as `<think>...</think>` and
        `[THINK]...[/THINK]`.

    Example:
    ```python
    >>> [extract_answer(text) for text in ("<answer> 7 </answer>", "So \\boxed{7}.", "#### 7", "The answer is **7**.")]
    ['7', '7', '7', '7']
    ```
    """
    return _find_answer(text)[0]


def _find_answer(text: str) -> tuple[str, bool]:
    """Also returns whether the answer is in LaTeX."""
    text = without_thoughts(text)
    # An answer in tags, in which there may be a box or a statement
    _, *after_tag = _OPENING_TAG.split(text, maxsplit=1)
    if after_tag:
        answer, *after_closing_tag = _CLOSING_TAG.split(after_tag[0], maxsplit=1)
        if not after_closing_tag:
            return text.strip(), False
        text = answer
    box = _last_box(text)
    if box is not None:
        return _unwrapped(box), True
    # The last line without tags, as (text before "####", "####", text behind); `hashes[1]` is "" without "####"
    hashes = ("", "", "") if after_tag else text.rstrip().rpartition("\n")[2].rpartition("####")
    answer = hashes[2] if hashes[1] else text
    stated_answer = _stated_answer(answer)
    if hashes[1] or stated_answer is not None:
        answer = answer if stated_answer is None else stated_answer
        return _unwrapped(answer), "$" in answer or "\\" in answer
    return text.strip().strip("*_").strip() or text.strip(), False


def _last_box(text: str) -> str | None:
    """Returns the content of the closed `\\boxed{}` that opens last, such as the inner one of two, or `None`."""
    open_braces: list[int | None] = []  # index after the opening brace of a box, `None` for other braces
    last_begin = -1
    content = None
    for brace in _BRACES.finditer(text):
        if brace[0] == "{":
            open_braces.append(None)
        elif brace[1]:  # the start of a box
            open_braces.append(brace.end())
        elif brace[0] == "}" and open_braces:
            begin = open_braces.pop()
            if begin is not None and begin > last_begin:
                last_begin = begin
                content = text[begin : brace.start()]
    return content


def _stated_answer(text: str) -> str | None:
    """Returns the answer in a statement such as "the answer is 7" that ends a text, or `None`."""
    for statement in reversed([*_STATEMENT.finditer(text)]):
        if _BEFORE_STATEMENT.search(text[max(0, statement.start() - 10) : statement.start()].rstrip()):
            answer = _HOPE.sub("", text[statement.end() :].strip())
            return answer if answer and "\n" not in answer else None
    return None


def _unwrapped(answer: str) -> str:
    """Removes the full stop, Markdown, and LaTeX delimiters."""
    for _ in range(_MOST_WRAPPINGS):
        answer = answer.strip().removesuffix(".").strip("*_ ") or answer.strip()
        wrapped = _WRAPPED.fullmatch(answer)
        if wrapped is None:
            break
        answer = wrapped[wrapped.lastindex or 0].strip()
    return answer


def plain(solution: Reference) -> Json:
    """Converts a reference that is an array or tensor to a list or a number."""
    return solution.tolist() if isinstance(solution, np.ndarray | np.generic | torch.Tensor) else solution


def references_of(solution: Reference, position: int, name: str) -> list[str]:
    """Returns the right answers in a row's reference. The list is empty if the reward doesn't apply."""
    solution = plain(solution)
    entries = solution if isinstance(solution, (list, tuple)) else [solution]
    references = [reference for reference in entries if cell_value(reference) is not None]
    for reference in references:
        if not isinstance(reference, (str, Real, Decimal)):
            keys = f" with the keys {sorted(map(str, reference))}" if isinstance(reference, dict) else ""
            key = next(iter(reference), "text") if isinstance(reference, dict) else "text"
            raise RowError(
                position,
                f"column 'solution': {name} got a {type(reference).__name__}{keys}; write a text, a number or a list "
                f'of right answers: `dataset.map(lambda row: {{"solution": row["solution"][{key!r}]}})`.',
            )
    return list(map(str, references))


def normalize_answer(text: str) -> str:
    """Returns a text without case, punctuation, extra whitespace and compatibility forms."""
    return _folded(normal_form(text))


def _folded(text: str) -> str:
    """Returns a text without case, punctuation and extra whitespace."""
    folded = _LATEX_SPACE.sub(" ", text.casefold().replace("i\u0307", "i"))  # from the Turkish capital İ
    # An answer of punctuation alone stays unchanged, as it would otherwise equal an empty completion
    return " ".join(_PUNCTUATION.sub("", folded).split()) or text


def normal_form(text: str, superscripts: bool = False) -> str:
    """Returns a text in Unicode's NFKC, with ASCII digits for all scripts. With `superscripts`, "5²" becomes "52"."""
    if text.isascii():
        return text
    characters = []
    n_marks = 0
    for character in "".join(_decomposed(character, superscripts) for character in text):
        n_marks = n_marks + 1 if unicodedata.combining(character) else 0
        if n_marks <= _MOST_MARKS:
            characters.append(character)
    return unicodedata.normalize("NFC", "".join(characters))


def _decomposed(character: str, superscripts: bool) -> str:
    """Returns a character in NFKD, or as an ASCII digit or operator. A fraction gets a space in front."""
    digit = unicodedata.decimal(character, None)
    form = unicodedata.decomposition(character)  # such as "<super> 0032"
    if digit is not None or character in _ASCII_OPERATORS:
        return _ASCII_OPERATORS[character] if digit is None else str(digit)
    if form.startswith("<super>") and not superscripts:
        return character
    decomposed = unicodedata.normalize("NFKD", character)
    return " " + decomposed.replace("⁄", "/") if form.startswith("<fraction>") else decomposed


def _is_right(answer: str, in_latex: bool, reference: str) -> bool:
    reference = normal_form(extract_answer(reference)).strip()
    if _equal(answer, reference) or _same_choice(answer, reference):
        return True
    # In LaTeX, one of two equal numbers may lack its unit
    value, unit = _value_and_unit(answer)
    right_value, right_unit = _value_and_unit(reference)
    units = {unit, right_unit} - {""}
    return in_latex and len(units) == 1 and _equal(value, right_value)


def _same_choice(answer: str, reference: str) -> bool:
    """Returns whether both texts name the same choice, by letter, text or both. The reference must have a letter."""
    # (letter, index of the text behind the letter), or `None`
    answer_choice = read_letter(answer)
    right_choice = read_letter(reference)
    if right_choice is None:
        return False
    right_text = reference[right_choice[1] :].strip(" .")
    if answer_choice is None:
        return bool(right_text) and _equal(answer, right_text)
    answer_text = answer[answer_choice[1] :].strip(" .")
    if answer_choice[0] != right_choice[0] or listed_letters(answer_text) - {right_choice[0]}:
        return False
    return not answer_text or not right_text or _equal(answer_text, right_text)


def _value_and_unit(text: str) -> tuple[str, str]:
    """Splits a number with a unit into both. Returns other texts with an empty unit."""
    match = _UNIT.fullmatch(text) if len(text) < _LONGEST_MEASURE else None
    if match is None or not _is_expression(match["value"]):
        return text, ""
    unit = normalize_answer(re.sub(r"\\\w+|[{}]", "", match["unit"]))
    return (text, "") if unit in _FACTORS else (match["value"], unit)


def _equal(answer: str, reference: str) -> bool:
    texts = [_folded(answer), _folded(reference)]
    if texts[0] == texts[1]:
        return True
    numbers = [number_of(text) for text in texts]
    value, right_value = numbers
    if value is not None and right_value is not None:
        # As in math_verify, fractions are equal if they agree up to the sixth decimal place. Small ones, which would
        # all be 0, must agree up to the sixth significant digit
        are_fractions = all(
            "." in text or "/" in text or number.denominator > 1
            for text, number in zip(texts, (value, right_value), strict=True)
        )
        places = 6
        largest = max(abs(value), abs(right_value))
        if 0 < largest < _SMALL:
            places += int(math.log10(largest.denominator // largest.numerator))
        return value == right_value or are_fractions and round(value, places) == round(right_value, places)
    if not (_is_expression(answer) and _is_expression(reference)):
        return False
    units = {_value_and_unit(text)[1] for text in (answer, reference)} - {""}
    are_letters = [len(text) == 1 and text.isalpha() for text in texts]
    if all(are_letters) or len(units) > 1:
        return False
    # Of a letter and a number, only a constant such as "e" can be equal to the number
    if all(is_letter or number is not None for is_letter, number in zip(are_letters, numbers, strict=True)):
        if not set(texts) & set(_CONSTANTS):
            return False
    return expressions.equal(answer, reference)


def _is_expression(text: str) -> bool:
    """Returns whether a text can be an expression. math_verify would read only parts of other texts."""
    if len(text) > _LONGEST_EXPRESSION or not any(map(str.isalnum, text)):
        return False
    bare = _LATEX_COMMAND.sub("", _INFIX.sub("+", text))
    if _PROSE.search(bare) is not None:
        return False
    bare = _ESCAPE.sub("", bare).strip("$?;°\"' ")
    # Brackets and bars must close, as math_verify reads "7)8" as 7
    depths = [0, *accumulate((character in "([{") - (character in ")]}") for character in bare)]
    return min(depths) == depths[-1] == bare.count("|") % 2 == 0 and _READABLE.fullmatch(bare) is not None


def number_of(text: str) -> Fraction | None:
    """Returns the value of a number, of a fraction such as "1 1/2", or of a product, or `None` for other texts."""
    if len(text) > _LONGEST_EXPRESSION:
        return None
    text = text.strip("$ ")
    mixed = _MIXED.fullmatch(text)
    if mixed is not None:  # sign, whole number if any, fraction
        return Fraction(mixed[1] + "1") * (int(mixed[2] or 0) + Fraction(mixed[3]))
    if _NUMBER.fullmatch(text) is None or not any(map(str.isdigit, text)):
        return _product(text)
    return Fraction(text.replace(",", ""))


def _product(text: str) -> Fraction | None:
    """Returns the value of factors such as "3 \\times 10^{8}", "1.5*4" and "\\frac{1}{2}", or `None`."""
    parts = _BETWEEN_FACTORS.split(text)
    if len(parts) >= 2 * _MOST_FACTORS:
        return None
    value = Fraction(1)
    for operator, part in zip(["*", *parts[1::2]], parts[::2], strict=True):
        factor = _factor(part)
        if factor is None or factor == 0 and operator in ("÷", "\\div"):
            return None
        value = value / factor if operator in ("÷", "\\div") else value * factor
    return value


def _factor(text: str) -> Fraction | None:
    match = _FACTOR.fullmatch(text)
    if match is None or match["below"] and int(match["below"]) == 0:
        return None
    if match["below"]:
        return Fraction(f"{match['sign']}{match['above']}/{match['below']}")
    if _NUMBER.fullmatch(match["base"]) is None or not any(map(str.isdigit, match["base"])):
        return None
    base = Fraction(match["base"].replace(",", ""))
    power = match["power"]
    if power is None:
        return base
    # The power of "-3^2" isn't that of the whole base
    return None if match["base"][0] in "-+" or base == 0 else base ** int(power)
