# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Verdicts of four parsers of answers on the same completions, handwritten in the spellings of Geometry3K.

```bash
pip install mathruler
python benchmarks/answer_parsers.py
```

`mathruler` grades what `boxed` has, as EasyR1's `math.py` and verl's `geo3k.py` do; `tags` grades the text in
`<answer>` or the whole completion, as EasyR1's `r1v.py`; `math-verify` is TRL's `accuracy_reward`; `ours` is
[`~rewards.accuracy_reward`]. A completion is right if a teacher would accept it, up to rounding.
"""

import json
import re
from pathlib import Path

from mathruler.grader import extract_boxed_content, grade_answer
from trl.rewards import accuracy_reward as math_verify_reward

from trl_multimodal_rft.rewards import accuracy_reward


ROWS = Path(__file__).with_name("geometry_answers.json")


def boxed(completion: str, solution: str) -> bool:
    """Verdict of mathruler on the last box."""
    return bool(grade_answer(extract_boxed_content(completion), solution))


def tagged(completion: str, solution: str) -> bool:
    """Verdict of mathruler on the text in tags."""
    match = re.search(r"<answer>(.*?)</answer>", completion)
    return bool(grade_answer(match[1].strip() if match else completion.strip(), solution))


def verified(completion: str, solution: str) -> bool:
    """Verdict of TRL's reward, which is False if math-verify can't parse the solution."""
    return math_verify_reward([[{"role": "assistant", "content": completion}]], [f"${solution}$"])[0] == 1.0


def ours(completion: str, solution: str) -> bool:
    """Verdict of this package."""
    return accuracy_reward([completion], [solution])[0] == 1.0


PARSERS = {"mathruler": boxed, "tags": tagged, "math-verify": verified, "ours": ours}


def main() -> None:
    rows = json.loads(ROWS.read_text())
    verdicts = [[parse(row["completion"], row["solution"]) for parse in PARSERS.values()] for row in rows]
    print("| solution | completion | right | " + " | ".join(PARSERS) + " |\n|---|---|---|" + "---|" * len(PARSERS))
    for row, row_verdicts in zip(rows, verdicts, strict=True):
        if set(row_verdicts) != {row["right"]}:
            marks = " | ".join("yes" if verdict else "no" for verdict in (row["right"], *row_verdicts))
            print(f"| `{row['solution']}` | `{row['completion']}` | {marks} |")
    for name, verdict in zip(PARSERS, zip(*verdicts, strict=True), strict=True):
        missed = sum(row["right"] and not value for row, value in zip(rows, verdict, strict=True))
        wrong = sum(value and not row["right"] for row, value in zip(rows, verdict, strict=True))
        right = len(rows) - missed - wrong
        print(f"{name}: {right} of {len(rows)} agree, {missed} right missed, {wrong} wrong accepted")


if __name__ == "__main__":
    main()
