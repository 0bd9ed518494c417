# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Ready rewards of completions that nobody expects: values and time; and scores of answers as people judge them."""

import inspect
import math
import random
import time
import unicodedata

import pytest

from trl_multimodal_rft import rewards
from trl_multimodal_rft.rewards.calls import RowError
from trl_multimodal_rft.rewards.named import REWARD_NAMES, load_reward_funcs


# Hostile completions

PIECES = [
    *"0123456789.,:;+-*/^=<>()[]{}|&?!~_$%#@\\'\"`es ",
    *("\n", "111,", "1e9", "<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "\\text{", "\\frac", "#### "),
    *("The answer is ", " to ", " and ", "end:", "x1=1 y1=2 ", "A. ", "(B)", "option ", "[1, 2, 3, 4], ", "```json"),
    *('{"x": 1}', "\u0301", "\u0316", "\uff9e", "\u0344", "\ufdfa", "½", "²", "７", "İ", "。", "→", "😀"),
]
REFERENCES = ["0.5", "B", "(A) dog", "[0, 0, 5, 5] from 1 to 3", ["a cat", "1" * 300], [[1, 2], [3, 4]], [4, 8], 3]
NEED_SERVERS = {name for name in REWARD_NAMES if inspect.isclass(getattr(rewards, name, None))}
# TRL's `reasoning_accuracy_reward` runs math-verify in this process
READY = sorted({*REWARD_NAMES} - NEED_SERVERS - {"reasoning_accuracy_reward"})
KNOWN = [
    *("The answer is 12345678901234567890123.5", "From 1 to 2" + "0" * 400 + " seconds", "```x" + " " * 99_000 + "y"),
    *("\u0301\u0316" * 50_000, "(A)" * 33_000 + "x", "1" + ",111" * 25_000 + "1", "\ufdfa\u0344" * 50_000),
]


def hostile(seed, length):
    """A text of about a length: a unit many times, nested units, or a mixture; with a beginning and an end."""
    generator = random.Random(seed)

    def some(most):
        letter = chr(generator.choice([generator.randrange(0x80, 0xD800), generator.randrange(0xE000, 0x20000)]))
        return "".join(generator.choices([*PIECES, letter], k=generator.randint(1, most)))

    kind = generator.choice(["repeated", "repeated", "nested", "mixed"])
    unit = some(4)
    inner = some(3)
    start = generator.choice(["", some(3)])
    end = generator.choice(["", some(3)])
    middle = {
        "repeated": unit * (length // len(unit)),
        "nested": unit * (length // len(unit) // 2) + inner + "])}>"[seed % 4] * (length // 2),
        "mixed": "".join(generator.choices(PIECES, k=length // 2)),
    }[kind]
    return start + middle + end


def reward_of(function, text, solution):
    completions = [[{"role": "assistant", "content": text}]]
    columns = {"solution": [solution], "choices": [["dog", "cat"]], "completion_ids": [[1] * 400], "group_ids": [0]}
    columns |= {"audio": [None], "completion_audio": [None]}
    [reward] = function(prompts=["?"], completions=completions, **columns)
    return reward


def with_references(name):
    """A function and those of `REFERENCES` that it takes."""
    [function] = load_reward_funcs([name])
    taken = []
    for solution in REFERENCES:
        try:
            reward_of(function, "a", solution)
        except RowError:
            continue
        taken.append(solution)
    assert taken
    return function, taken if "solution" in inspect.signature(function).parameters else taken[:1]


def cpu_seconds(function, text, solution):
    start = time.process_time()
    reward = reward_of(function, text, solution)
    assert reward is None or math.isfinite(reward), (ascii(text[:200]), solution)
    return time.process_time() - start


def check_time(function, solution, text, tenth=None):
    """A text takes in proportion to another of a tenth of its length, if any; three times that for busy machines."""
    for _ in range(3):
        seconds = [cpu_seconds(function, part, solution) for part in (tenth, text) if part is not None]
        if seconds[-1] < 30 * max([0.01, *seconds[:-1]]):
            return
    raise AssertionError((ascii(text[:20]), seconds))


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 115), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READY)
def test_hostile_completions_have_rewards_in_linear_time(name, seeds):
    if name in ("cer_reward", "wer_reward"):
        pytest.importorskip("jiwer")
    function, references = with_references(name)
    for seed in seeds:
        lengths = (100_000, 10_000) if seed >= 60 and seed % 2 else [(1, 10, 100, 1000)[seed // 2 % 4]]
        check_time(function, references[seed % len(references)], *(hostile(seed, length) for length in lengths))
    for text in KNOWN * (0 in seeds):
        check_time(function, references[0], text, text[: len(text) // 10])


# Scores

# Answers, each with its reference; decomposed accents as LaTeX's \'
RIGHT = r"""
７ ≟ 7 ¦ 7 ≟ ７ ¦ １２．５ ≟ 12.5 ¦ ٣ ≟ 3 ¦ 𝟕 ≟ 7 ¦ cafe\' ≟ café ¦ café ≟ CAFE\' ¦ 1/2 ≟ ½ ¦ -½ ≟ -0.5 ¦ 3½ ≟ 7/2
1000 ≟ 1e3 ¦ 1e3 ≟ 1,000 ¦ 100 ≟ 1e2 ¦ 2.5e-1 ≟ 1/4 ¦ 1.5 ≟ 1 1/2 ¦ −5 ≟ -5 ¦ 0.333333 ≟ 1/3 ¦ H₂O ≟ H2O ¦ ㎏ ≟ kg
東京 ≟ 東京。 ¦ 「東京」 ≟ 東京 ¦ हाँ। ≟ हाँ ¦ ¿Sí? ≟ si\' ¦ İstanbul ≟ istanbul ¦ İ ≟ i ¦ ｃａｔ ≟ cat
<ANSWER>7</ANSWER> ≟ 7 ¦ <Answer>7</answer> ≟ 7 ¦ <answer>The answer is 7</answer> ≟ 7 ¦ <answer>**7**</answer> ≟ 7
<answer>So the answer is: 7.</answer> ≟ 7 ¦ 12345678901234567890123.5 ≟ 12345678901234567890123.50
3 \times 10^8 ≟ 3 \times 10^{8} ¦ \boxed{1.5 \times 10^{3}} ≟ 1500 ¦ $3 \cdot 4$ ≟ 12 ¦ 6 \div 4 ≟ 1.5 ¦ 3 · 10^8 ≟ 3e8
2 \pm 3 ≟ 2\pm3 ¦ x \leq 5 ≟ x\le5 ¦ 5 \sqrt 2 ≟ 5\sqrt{2} ¦ 3 ⋅ 4 ≟ 12 ¦ 3\,\times\,10^{2} ≟ 300
-3^2 ≟ -9 ¦ 3\cdot4 ≟ 12 ¦ \frac{1}{3} ≟ 0.333333 ¦ 1.60e-19 ≟ 1.6e-19 ¦ 1.6 \times 10^{-19} ≟ 1.6e-19
0.000000333333 ≟ 1/3000000 ¦ 0.000333 ≟ 1/3000
\boxed{3\text{ m}} ≟ 3 m ¦ 3 m ≟ 3m ¦ \boxed{3} ≟ 3 m ¦ \boxed{7 cm} ≟ 7 ¦ |-7| ≟ 7 ¦ x=7 ≟ 7 ¦ 7? ≟ 7 ¦ [0, 1) ≟ [0,1)
"""
WRONG = r"""
\boxed{3\text{ kg}} ≟ 3 m ¦ 3 s ≟ 3 m ¦ \boxed{3m} ≟ 3 s ¦ \boxed{3\text{ kg}} ≟ 3g ¦ \boxed{3 pi} ≟ 3
1.6e-19 ≟ 9.11e-31 ¦ 0.0 ≟ 1.6e-19 ¦ 1/10000000 ≟ 1/20000000 ¦ 0.000000149 ≟ 0.0000001 ¦ 1.6726e-27 ≟ 1.6749e-27
\boxed{1.6\times10^{-19}} ≟ 9.11\times10^{-31} ¦ \frac{1.6}{10^{19}} ≟ \frac{9.11}{10^{31}}
x=1.6\times10^{-9} ≟ x=2\times10^{-9} ¦ 3 \quad 4 ≟ 12 ¦ 3 \quad 4 ≟ 7 ¦ 3 \times 10^8 ≟ 3 \times 10^9
-3^2 ≟ 9 ¦ 6 \div 0 ≟ 0
7.7?8 ≟ 7.7 ¦ 5² ≟ 52 ¦ 3½ ≟ 31/2 ¦ 1/0 ≟ 0 ¦ 7)8( ≟ 7 ¦ 7||8 ≟ 7 ¦ 7 . 8 ≟ 8 ¦ 7 a 8 ≟ 7 ¦ 1e3 ≟ 8.154845485377136
7«8 ≟ 78 ¦ 7'!8 ≟ 78 ¦ 7:8 ≟ 7 ¦ ı ≟ i ¦ 3 4 ≟ 7 ¦ 1e999 ≟ 1e998 ¦ 123456789012345678901234.5 ≟ 0.5 ¦ 1/3 ≟ 0.34
"""
LETTERS_RIGHT = r"""
A ¦ (A) ¦ A. ¦ Option A ¦ option (A). ¦ A is correct. ¦ A is the right answer ¦ (A ¦ Ａ ¦ （Ａ） ¦ [A] ¦ choice A
A, not B ¦ The correct answer is A. ¦ A is right, not B ¦ <answer>Option A</answer> ¦ \boxed{\text{Option A}} ¦ A. dog
"""
# Texts behind a letter that name no other choice
LETTERS_WITH_TEXT = r"""
A. cat or dog ¦ A. Both B and C ¦ (A) cats and b ¦ A: and a cat ¦ A. and I ¦ A. /b/ ¦ A. or else ¦ A. Vitamin C
A. or A ¦ A. & co ¦ A) or B-cells ¦ A. /home/c ¦ A. and C's
"""
LETTERS_WRONG = r"""
A. B. C. D. ¦ (A)(B)(C)(D) ¦ A) B) C) ¦ A. B ¦ A is not correct ¦ not A ¦ A or B ¦ A, B ¦ A and B ¦ B is right, not A
(A) and (B) ¦ Option B ¦ A: B: C: ¦ B. A. ¦ A is wrong ¦ A. cat B. dog ¦ (A)(C) ¦ A. or C ¦ (A) or C ¦ (A)/(C) ¦ A), C
A. or option B ¦ A. and/or B ¦ a) & b ¦ a. or (b). ¦ A. and C are right ¦ A., B, C ¦ Option A. or option B ¦ A. /C
"""


def of_table(table):
    return [item.strip() for line in table.strip().split("\n") for item in line.split("¦")]


def pairs_of(table):
    return [tuple(item.replace("\\'", "\u0301").split(" ≟ ")) for item in of_table(table)]


def scored_otherwise(reward, answers, score, solutions, **columns):
    found = reward(answers, solution=solutions, **columns)
    return [pair for *pair, value in zip(answers, solutions, found, strict=True) if value != score]


@pytest.mark.parametrize(("table", "score"), [(RIGHT, 1.0), (WRONG, 0.0)])
def test_scores_of_answers(table, score):
    answers, solutions = map(list, zip(*pairs_of(table), strict=True))
    assert scored_otherwise(rewards.accuracy_reward, answers, score, solutions) == []
    tagged = [answer if "<" in answer else f"<answer>{answer}</answer>" for answer in answers]
    assert scored_otherwise(rewards.accuracy_reward, tagged, score, solutions) == []


def test_no_sign_hides_the_rest_of_an_answer():
    """Of ASCII, Latin 1 and other punctuation: `7?8` is neither 7 nor 78."""
    codes = [*range(0x20, 0x100), *range(0x2010, 0x2060), *range(0x3000, 0x3040), *range(0xFF01, 0xFF20)]
    signs = [chr(code) for code in codes if unicodedata.category(chr(code))[0] in "PSZ"]
    answers = [f"7{sign}8" for sign in signs]
    for solution in ("7", "78"):
        assert scored_otherwise(rewards.accuracy_reward, answers, 0.0, [solution] * len(answers)) == []


@pytest.mark.parametrize(("table", "score"), [(LETTERS_RIGHT, 1.0), (LETTERS_WRONG, 0.0)])
@pytest.mark.parametrize("solution", ["A", "(A)", "A. dog", "a"])
def test_scores_of_letters(table, score, solution):
    answers = of_table(table)
    solutions = [solution] * len(answers)
    choices = [["dog", "cat", "cow", "owl"]] * len(answers)
    assert scored_otherwise(rewards.accuracy_reward, answers, score, solutions) == []
    assert scored_otherwise(rewards.choice_reward, answers, score, solutions, choices=choices) == []


def test_text_behind_a_letter_names_no_choice():
    answers = of_table(LETTERS_WITH_TEXT)
    assert scored_otherwise(rewards.accuracy_reward, answers, 1.0, ["A"] * len(answers)) == []


SPANS = """
4 until 8 ¦ 4 till 8 ¦ 4 → 8 ¦ 4 -> 8 ¦ 4 — 8 ¦ 4s–8s ¦ [4s, 8s] ¦ from 00:04 through 00:08 ¦ start: 4, end: 8
From 4s - 8 seconds. ¦ [4.0, 8] ¦ [[4, 6], [6, 8]] ¦ between 00:04 and 00:08 ¦ 4 to 8
4 ~ 8 s ¦ {"start": 4, "end": 8} ¦ {'start_time': '00:04', 'end_time': '00:08'} ¦ [{"start": 4.0, "end": 8.0}]
"""
MINUTES = "1 min to 2 min ¦ 1 to 2 minutes ¦ 1m - 2m ¦ 60 s to 1m60s ¦ 00:01:00 until 2:00 ¦ 0 h 1 min → 120 sec"
HOURS = "1:00:00 to 1:00:01.5"
NO_SPANS = "for 3 seconds ¦ 8 until 4 ¦ 4, 8 ¦ at 4 ¦ 4 meters 8 ¦ until 8 ¦ 4 or 8 ¦ {'end': 8}"
BOXES = """
[0, 0, 10.0, 10] ¦ (0, 0), (10, 10) ¦ [[0, 0], [10, 10]] ¦ {'bbox': [0, 0, 10, 10]}
[{"bbox_2d": [0, 0, 10, 10], "label": "ca
```json [{"bbox_2d": [0, 0, 10, 10], "label": "cat"}] ``` ¦ It is at [0,0,10,10], not at [0, 0, 1, 1].
{"Position": [0, 0, 10, 10], "Confidence": 0.5}
0, 0, 10, 10 ¦ 0,0,10,10. ¦ {"x1": 0, "y1": 0, "x2": 10, "y2": 10} ¦ {'x_min': 0, 'y_min': 0, 'x_max': 10, 'y_max': 10}
[{"left": 0, "top": 0, "right": 10, "bottom": 10}] ¦ <box x1="0" y1="0" x2="10" y2="10"> ¦ x1: 0, y1: 0, x2: 10, y2: 10
"""
NO_BOXES = """
0, 0, 10 ¦ 0, 0, 10, 10, 2 ¦ at 0, 0, 10, 10 ¦ {'x1': 0, 'y1': 0, 'x2': 10} ¦ x1=0 y1=0 x2=a y2=1 ¦ left of the tree
[1, 2, 3] ¦ [30, 20, 10, 40] ¦ [1e999, 1, 2, 3] ¦ [[[
"""
POINTS = """
(3, 4) ¦ [3.0, 4] ¦ {"point_2d": [3, 4], "label": "x"} ¦ [2, 2, 4, 6] ¦ {"x": 3, "y": 4} ¦ x=3, y=4
<point x="3" y="4"> ¦ <point x='3.0' y='4.0' alt='a'> ¦ <points x1="3" y1="4">
"""
NO_POINTS = """nowhere ¦ 3 4 ¦ <point x=3> ¦ y=4 ¦ {"x": 3} ¦ <point x="3" y="four"> ¦ x1=3 y2=4"""


@pytest.mark.parametrize(
    ("name", "table", "solution", "score"),
    [
        ("temporal_iou_reward", SPANS, [4, 8], 1.0),
        ("temporal_iou_reward", MINUTES, [60, 120], 1.0),
        ("temporal_iou_reward", HOURS, [3600, 3601.5], 1.0),
        ("temporal_iou_reward", NO_SPANS, [4, 8], 0.0),
        ("box_iou_reward", BOXES, [0, 0, 10, 10], 1.0),
        ("box_iou_reward", NO_BOXES, [0, 0, 10, 10], 0.0),
        ("detection_reward", NO_BOXES, [[0, 0, 10, 10]], 0.0),
        ("point_in_box_reward", POINTS, [2.9, 3.9, 3.1, 4.1], 1.0),
        ("point_in_box_reward", NO_POINTS, [2.9, 3.9, 3.1, 4.1], 0.0),
    ],
)
def test_scores_of_places_and_times(name, table, solution, score):
    reward = getattr(rewards, name)
    answers = of_table(table)
    for forms in (answers, [f"<answer>{answer}</answer>" for answer in answers]):
        assert scored_otherwise(reward, forms, score, [solution] * len(forms)) == []
    if score and name != "point_in_box_reward":  # references are read alike
        assert scored_otherwise(reward, answers, score, answers) == []
