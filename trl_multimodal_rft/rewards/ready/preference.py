# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards for the training of a judge, a model that says which of two answers is better."""

import re
from collections.abc import Sequence
from typing import Literal

from ...data.rows.thoughts import without_thoughts
from ..answers import completion_text, extract_answer, normal_form, references_of
from ..calls import Argument, Completion, Reference, RowError, require_column


Verdict = Literal["A", "B", "tie"]

# Judges write verdicts in tags, in the last fields of Omni-RRM's JSON, or in the brackets of MT-Bench
_MARKED_VERDICT = re.compile(
    r'<answer>([^<]*)</answer>|"(?:better|(?:final_)?verdict)"\s*:\s*"([^"]*)"|\[\[([^\[\]]*)\]\]', re.IGNORECASE
)
_DECORATION = re.compile(r"</?answer>|[\[\]()*.\"'\s]+")
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
    Rewards the verdict of a judge on two answers: 1.0 if it equals the reference, else 0.0.

    [`verdict_in`] finds the verdict in the completion. Judges may favor the first or the second answer, so the dataset
    should have each pair in both orders, as [`~data.judge_rows`] makes them. For the other arguments and the errors,
    see [`accuracy_reward`].

    Args:
        solution (`list`):
            Right verdict for each completion: `"A"`, `"B"`, `"tie"`, a text with a verdict, or a list of right
            verdicts. `None` where the reward does not apply.

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
        right_verdicts = {reference: verdict_in(reference) for reference in references}
        wrong = [reference for reference, expected in right_verdicts.items() if expected is None]
        if wrong:
            raise RowError(position, f"column 'solution': {wrong[0]!r:.100} is no verdict; write 'A', 'B' or 'tie'.")
        verdict = verdict_in(completion_text(completion))
        rewards.append(float(verdict is not None and verdict in right_verdicts.values()) if references else None)
    return rewards


def verdict_in(text: str) -> Verdict | None:
    """
    Returns the verdict that a judge writes after its thoughts.

    The verdict stands in one of these places, or else in the answer that [`extract_answer`] finds:

    - `<answer>` tags: `"1"` in [R1-Reward](https://huggingface.co/papers/2505.02835), and `"Image 1 is better"` or
      `"Both images are equally good"` in LightRFT
    - a JSON field `better`, `verdict` or `final_verdict`, as in [Omni-RRM](https://huggingface.co/papers/2602.00846)
    - double brackets: `"[[C]]"` for a tie in [MT-Bench](https://huggingface.co/papers/2306.05685)

    Args:
        text (`str`):
            Completion.

    Returns:
        `str` or `None`: `"A"` if the first answer is better, `"B"` if the second is better, or `"tie"`. `None` without
        a verdict, or if verdicts contradict each other.
    """
    final_text = without_thoughts(text)
    candidates = ["".join(groups) for groups in _MARKED_VERDICT.findall(final_text)] or [extract_answer(final_text)]
    verdicts = {_as_verdict(words) for words in candidates} - {None}
    return verdicts.pop() if len(verdicts) == 1 else None


def _as_verdict(text: str) -> Verdict | None:
    words = _DECORATION.sub(" ", normal_form(text)).strip().casefold()
    return next((verdict for verdict, pattern in _VERDICTS.items() if pattern.fullmatch(words)), None)
