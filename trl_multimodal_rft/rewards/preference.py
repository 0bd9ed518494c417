# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards for a judge that writes which of two answers is better."""

import re
from collections.abc import Sequence
from typing import Literal

from .answers import completion_text, extract_answer, normal_form, references_of
from .checks import Argument, Completion, Reference, RowError, require_column


Verdict = Literal["A", "B", "tie"]

# Where judges write verdicts: in tags, in the last fields of Omni-RRM's JSON, and in the brackets of MT-Bench
_MARKED = re.compile(
    r'<answer>([^<]*)</answer>|"(?:better|(?:final_)?verdict)"\s*:\s*"([^"]*)"|\[\[([^\[\]]*)\]\]', re.IGNORECASE
)
_AROUND = re.compile(r"</?answer>|[\[\]()*.\"'\s]+")
_ANSWER = r"(?:(?:answer|response|candidate|assistant|image|video|audio) )?(?:%s)(?: is better)?"
_VERDICTS: dict[Verdict, re.Pattern] = {
    "A": re.compile(_ANSWER % "a|1"),
    "B": re.compile(_ANSWER % "b|2"),
    "tie": re.compile(r"c|tie|equal|both (?:\w+ ){0,2}equally good"),
}


def preference_reward(
    completions: Sequence[Completion], solution: Sequence[Reference] | None = None, **kwargs: Argument
) -> list[float | None]:
    """
    Rewards a judge whose verdict on two answers is that of the reference: 1.0 when it is, else 0.0.

    [`verdict_in`] finds the verdict in the completion. Judges prefer answers by their position, too, so that rows
    should show each pair in both orders, as those of [`~data.judge_rows`] do. For the other arguments and the errors,
    see [`accuracy_reward`].

    Args:
        solution (`list`):
            Right verdict for each completion, `"A"`, `"B"` or `"tie"`, or as judges write it; or a list of right ones.
            `None` where the reward does not apply.

    Example:
    ```python
    >>> completions = ["<think>B is vague.</think> <answer>A</answer>", '{"better": "equal"}', "[[B]], or [[A]]"]
    >>> preference_reward(completions, solution=["A", "tie", "B"])
    [1.0, 1.0, 0.0]
    ```
    """
    solution = require_column(solution, "solution", "preference_reward", kwargs)
    rewards: list[float | None] = []
    for position, (completion, solutions) in enumerate(zip(completions, solution, strict=True)):
        references = references_of(solutions, position, "preference_reward")
        right = {reference: verdict_in(reference) for reference in references}
        if wrong := [reference for reference, each in right.items() if each is None]:
            raise RowError(position, f"column 'solution': {wrong[0]!r:.100} is no verdict; write 'A', 'B' or 'tie'.")
        verdict = verdict_in(completion_text(completion))
        rewards.append(float(verdict is not None and verdict in right.values()) if references else None)
    return rewards


def verdict_in(text: str) -> Verdict | None:
    """
    The verdict that a judge writes behind its thoughts.

    It is in `<answer>` tags, as `"1"` of [R1-Reward](https://huggingface.co/papers/2505.02835) and `"Image 1 is
    better"` or `"Both images are equally good"` of LightRFT; a field `better`, `verdict` or `final_verdict` of JSON,
    as that of [Omni-RRM](https://huggingface.co/papers/2602.00846); in double brackets, as `"[[C]]"` for a tie of
    [MT-Bench](https://huggingface.co/papers/2306.05685); or, without any of these, what [`extract_answer`] finds.

    Args:
        text (`str`):
            Completion.

    Returns:
        `str` or `None`: `"A"` if the first answer is better, `"B"` if the second is, or `"tie"`; `None` without a
        verdict, and if several contradict each other.
    """
    written = text.rpartition("</think>")[2].partition("<think>")[0]
    marked = ["".join(groups) for groups in _MARKED.findall(written)] or [extract_answer(written)]
    found = {_named(each) for each in marked} - {None}
    return found.pop() if len(found) == 1 else None


def _named(text: str) -> Verdict | None:
    words = _AROUND.sub(" ", normal_form(text)).strip().casefold()
    return next((verdict for verdict, pattern in _VERDICTS.items() if pattern.fullmatch(words)), None)
