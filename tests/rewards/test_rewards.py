# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Answer rewards: extraction of the answer, equality of two answers, and the format of a completion."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from trl.rewards import accuracy_reward as trl_accuracy_reward

from trl_multimodal_rft.rewards import accuracy_reward, answers, choice_reward, expressions, format_reward


def accuracy(completion, solution, **columns):
    return accuracy_reward(completions=[completion], solution=[solution], **columns)[0]


@pytest.mark.parametrize(
    ("completion", "solution", "reward"),
    [
        ("<answer>seven</answer>", "seven", 1.0),
        ("I hear <answer> seven </answer> here", "seven", 1.0),
        ("seven", "seven", 1.0),  # without a tag, the whole text is the answer
        ("I hear seven", "seven", 0.0),
        ("seven <answer>eight</answer>", "seven", 0.0),
        ("<answer>eight</answer><answer>seven</answer>", "seven", 0.0),  # the first tag counts
        ("<answer>line one\nline two</answer>", "line one line two", 1.0),
        ("<answer>seven", "seven", 0.0),  # truncated before the closing tag
        ("<answer></answer> seven", "seven", 0.0),
        ("", "seven", 0.0),
        ("seven", "<answer>seven</answer>", 1.0),  # R1-AQA stores its references in tags
    ],
)
def test_the_answer_is_the_first_tag_or_the_whole_text(completion, solution, reward):
    assert accuracy(completion, solution) == reward


@pytest.mark.parametrize(
    ("answer", "solution", "reward"),
    [
        ("SEVEN", "seven", 1.0),
        ("Seven.", "seven", 1.0),
        ("  a \n  dog, barking! ", "A dog barking", 1.0),
        ("“It’s” a dog", "its a dog", 1.0),
        ("STRASSE", "straße", 1.0),
        ("adog", "a dog", 0.0),
        ("5.", "5", 1.0),
        ("-5", "5", 0.0),
        ("35", "3.5", 0.0),
        ("", "?", 0.0),
        ("?", "?", 1.0),
    ],
)
def test_text_is_compared_without_case_whitespace_and_punctuation(answer, solution, reward):
    assert accuracy(answer, solution) == reward
    assert accuracy(f"<answer>{answer}</answer>", solution) == reward


@pytest.mark.parametrize(
    ("answer", "solution", "reward"),
    [
        ("0.5", r"\frac{1}{2}", 1.0),
        ("$\\frac{1}{2}$", "0.5", 1.0),
        ("1,000", "1000", 1.0),
        ("y + x", "x + y", 1.0),
        (r"\pi \cdot 3", r"3\pi", 1.0),
        ("120", "5!", 1.0),
        ("3+4", "7", 1.0),
        ("7%", "7", 1.0),
        ("e", "2.718282", 1.0),
        ("0.5", "1/2", 1.0),
        ("5!", "5", 0.0),
        ("0.51", r"\frac{1}{2}", 0.0),
    ],
)
def test_expressions_are_compared_symbolically(answer, solution, reward):
    assert accuracy(answer, solution) == reward
    assert accuracy(f"<answer>{answer}</answer>", solution) == reward


@pytest.mark.parametrize(
    ("completion", "solution"),
    [
        ("I count 3 dogs", "3"),  # a number in untagged text
        ("It is $3$. <answer>4</answer>", "3"),  # a number in untagged text, against the tag
        ("\\boxed{3} <answer>4</answer>", "3"),
        ("<answer>act</answer>", "cat"),  # c * a * t commutes
        ("<answer>2 cats and a dog</answer>", "2 dogs and a cat"),
        ("<answer>3 4</answer>", "7"),  # a mixed number to math_verify
        ("<answer>4:60</answer>", "2:30"),
    ],
)
def test_what_math_verify_would_accept_wrongly_is_refused(completion, solution):
    assert accuracy(completion, solution) == 0.0


def test_prompts_do_not_matter():
    prompt = "Which digit? Put it in <answer> </answer>, as in <answer>seven</answer>."
    for prompts in ([prompt], [[{"role": "user", "content": prompt}]]):
        assert accuracy_reward(prompts=prompts, completions=["seven"], solution=["seven"]) == [1.0]
        assert accuracy_reward(prompts=prompts, completions=["eight"], solution=["seven"]) == [0.0]
        assert format_reward(prompts=prompts, completions=["seven"], solution=["seven"]) == [0.0]
        assert format_reward(prompts=prompts, completions=[""], solution=["seven"]) == [0.0]


def test_conversational_completions_are_read_from_their_last_message():
    called = [
        {"role": "assistant", "content": "<answer>eight</answer>"},
        {"role": "tool", "content": "9"},
        {"role": "assistant", "content": "<answer>seven</answer>"},
    ]
    completions = [[{"role": "assistant", "content": "Seven"}], called]
    assert accuracy_reward(completions=completions, solution=["seven", "seven"]) == [1.0, 1.0]
    assert format_reward(completions=completions) == [0.0, 1.0]
    # The output of a tool is no answer, and may be a picture
    unanswered = [
        [called[0], {"role": "tool", "content": content}]
        for content in ("<answer>seven</answer>", [{"type": "image", "image": None}])
    ]
    assert accuracy_reward(completions=unanswered, solution=["seven", "seven"]) == [0.0, 0.0]
    assert format_reward(completions=unanswered) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "solution", "reward"),
    [
        ("The answer is 7.", "7", 1.0),
        ("3 + 4 is seven, so the answer is: **7**", "7", 1.0),
        ("**Final answer:** seven", "Seven", 1.0),
        ("Answer: $\\frac{1}{2}$.", "0.5", 1.0),
        ("Therefore, the final answer is $7$. I hope it is correct.", "7", 1.0),
        ("The answer is 8, or 7.", "7", 0.0),
        ("The answer is 7. No, it is 8.", "7", 0.0),
        ("The answer is 8. No, the answer is 7.", "7", 1.0),
        ("I don't know which answer is right", "right", 0.0),
        ("We add them.\n#### 1,000", "1000", 1.0),
        ("#### 3 + 4 #### 7\n", "7", 1.0),
        ("#### Step 1\nWe add them, which makes 7.", "7", 0.0),
        (r"So it is \boxed{7}.", "7", 1.0),
        (r"\boxed{8}? No: \boxed{7}", "7", 1.0),
        (r"\boxed{7}? No: \boxed{8}", "7", 0.0),
        (r"\boxed{\frac{1}{\sqrt{4}}} it is", "0.5", 1.0),
        (r"\boxed{\text{a dog}}", "A dog.", 1.0),
        (r"\boxed{7} and \boxed{8", "7", 1.0),  # truncated
        (r"\boxed{\boxed{7}}", "7", 1.0),
        (r"\boxed{7 \text{ thousand}}", "7", 0.0),
        (r"\boxed{7 \text{ cm}}", "7 km", 0.0),
        ("<answer>7 cm</answer>", "7", 0.0),
        (r"\boxed{7} <answer>8</answer>", "7", 0.0),
        (r"The answer is 7 <answer>8", "7", 0.0),
        (r"<answer>3 + 4, so \boxed{7}</answer>", "7", 1.0),
        ("<answer>The answer is 7</answer>", "7", 1.0),
        ("B", "B. dog", 1.0),
        ("(B)", "B. dog", 1.0),
        ("(b).", "(B) dog", 1.0),
        ("The correct answer is option B.", "B. dog", 1.0),
        (r"\boxed{\text{(B)}}", "B. dog", 1.0),
        ("<answer>B</answer>", "B: dog", 1.0),
        ("dog", "B. dog", 1.0),
        ("B. a dog", "B. dog", 0.0),
        ("A. dog", "B. dog", 0.0),
        ("A", "B. dog", 0.0),
        ("B) dog", "B", 1.0),
        ("A", "a dog", 0.0),
        ("7", "3 + 4 = 7\n#### 7", 1.0),
        ("7", r"It follows that $x = \boxed{7}$.", 1.0),
        ("Seven.", "The answer is seven", 1.0),
        ("x" * 20000 + " \\boxed{" * 3000, "7", 0.0),
        ("<answer>" * 20000, "7", 0.0),
        ("answer" + "\n" * 30000 + "****" * 3000, "7", 0.0),
    ],
)
def test_answers_without_tags(completion, solution, reward):
    started = time.monotonic()
    assert accuracy(completion, solution) == reward
    assert accuracy([{"role": "assistant", "content": completion}], solution) == reward
    assert time.monotonic() - started < 60


# How TRL parses an answer and a reference. It joins several boxes, and parses mixed numbers as sums
WITH_TRL = [
    (r"\boxed{7}", "7"),
    (r"\boxed{8}", "7"),
    (r"My answer is \boxed{\frac{1}{3}}.", r"\frac{1}{3}"),
    (r"My answer is \boxed{\frac{1}{2}}.", r"\frac{1}{3}"),
    (r"\boxed{\dfrac{2}{3}}", "2/3"),
    (r"\boxed{-\frac{2}{3}}", "2/3"),
    (r"\boxed{0.333}", r"\frac{1}{3}"),
    (r"\boxed{7.0}", "7"),
    (r"\boxed{1{,}000}", "1000"),
    (r"\boxed{1,000}", "1000"),
    (r"\boxed{10^3}", "1000"),
    (r"\boxed{x=7}", "7"),
    (r"\boxed{7}", "x=7"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{\$7.50}", "7.5"),
    (r"\boxed{30^\circ}", "30"),
    (r"\boxed{7 \text{ cm}}", "7"),
    (r"\boxed{8 \text{ cm}}", "7"),
    (r"\boxed{7\,\mathrm{cm}}", "7"),
    (r"\boxed{7 apples}", "7"),
    (r"\boxed{7}", "7 meters"),
    (r"\boxed{7\text{ meters}}", "7 meters"),
    (r"\boxed{3\frac{1}{2}}", "3.5"),
    (r"\boxed{7}", "#### 7"),
    (r"\boxed{7}", r"so \boxed{7}"),
    (r"\boxed{\text{Yes}}", r"\boxed{\text{Yes}}"),
    (r"\boxed{\text{No}}", r"\boxed{\text{Yes}}"),
    (r"\boxed{\textbf{(B)}}", r"$\textbf{(B)}$"),
    (r"\boxed{2}" + " wrong" * 40 + r" \boxed{3}", "3"),
    (r"The answer is $8$, or \boxed{7}", "7"),
    ("The final answer is $7$. I hope it is correct.", "7"),
    ("The answer is: $7$", "7"),
    (r"the answer is \(8\)", "7"),
    (r"<answer>\boxed{7}</answer>", "7"),
]


@pytest.mark.parametrize(("completion", "solution"), WITH_TRL)
def test_scores_are_those_of_trl_where_both_read_an_answer(completion, solution):
    messages = [[{"role": "assistant", "content": completion}]]
    expected = trl_accuracy_reward(messages, [solution])
    assert expected[0] is not None and accuracy_reward(messages, solution=[solution]) == expected


def test_a_list_of_references_means_any_of_them():
    assert accuracy("The answer is 7.", ["seven", 7]) == 1.0
    assert accuracy("eight", ["seven", 7]) == 0.0
    assert accuracy_reward(["a"] * 2, solution=[[], [None]]) == [None, None]
    options = ["Man", "Woman", "Child"]
    assert choice_reward(["B", "C"], solution=[["Man", "B"]] * 2, choices=[options] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("reward", [accuracy_reward, choice_reward])
def test_a_dictionary_as_reference_is_an_error(reward):
    with pytest.raises(ValueError) as raised:
        reward(["7", "7"], solution=["A", {"unit": "m", "value": 7}], choices=[["A"]] * 2)
    message = str(raised.value)
    assert message.startswith("row 1, column 'solution': ") and "dict with the keys ['unit', 'value']" in message
    assert "a list of right answers" in message and "\n" not in message


def test_references():
    assert accuracy_reward(completions=["7", "8"], solution=[7, 7]) == [1.0, 0.0]
    assert accuracy_reward(completions=["a", "b", "c"], solution=["a", None, "d"]) == [1.0, None, 0.0]
    with pytest.raises(ValueError, match=r"`solution`.*\['answer', 'audio'\]"):
        accuracy_reward(completions=["a"], answer=["a"], audio=["a.wav"])
    with pytest.raises(ValueError, match="2 completions and 1 solutions"):
        accuracy_reward(completions=["a", "b"], solution=["a"])


HOSTILE = [("9^{9^{9^9}}", "7!"), ("(" * 3000 + "x" + ")" * 3000, "x+1")]


@pytest.mark.slow
def test_expressions_are_compared_within_a_time_in_any_thread():
    """Slow comparisons count as wrong. Others work as before, also concurrently and afterwards."""
    pairs = [each for pair in HOSTILE for each in (pair, ("0.5", "1/2"))]
    answers_, solutions = map(list, zip(*pairs, strict=True))
    with ThreadPoolExecutor(2) as pool:
        started = time.monotonic()
        rewards = [pool.submit(accuracy_reward, answers_, solution=solutions), pool.submit(accuracy, "x+y", "y+x")]
        assert [each.result() for each in rewards] == [[0.0, 1.0] * len(HOSTILE), 1.0]
        assert time.monotonic() - started < 200

    async def reward():
        return accuracy("y + x", "x + y")

    assert asyncio.run(reward()) == 1.0


@pytest.mark.slow
def test_the_process_that_compares_stays_and_ends_with_its_owner(tmp_path):
    """Its owner is a script without a main guard, which doesn't run twice."""
    code = (
        "import atexit, gc\n"
        "gc.disable()\n"
        "atexit.register(gc.freeze)\n"
        "from trl_multimodal_rft.rewards import accuracy_reward, expressions\n"
        "assert accuracy_reward(['7', 'a cat'], solution=['7', 'a dog']) == [1, 0]\n"
        "assert expressions._comparer.cache_info().currsize == 0\n"  # no expression needed it
        "for _ in range(2):\n"
        "    assert accuracy_reward(['x + y'], solution=['y + x']) == [1]\n"
        "    print(expressions._comparer(expressions.os.getpid())._process.pid)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    shown = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    first, second = shown.stdout.split()
    assert first == second
    with pytest.raises(ProcessLookupError):
        os.kill(int(first), 0)


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux counts memory")
def test_a_comparison_takes_no_more_memory_than_it_may_and_a_killed_process_is_replaced():
    assert accuracy("x + y", "y + x") == 1.0
    process = expressions._comparer(os.getpid())._process
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    assert re.search(rf"Max address space +{4 * 2**30} ", limits)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert accuracy("x + y", "y + x") == 1.0


PLAIN = [
    ("7.", "7", 1.0),
    ("8", "7", 0.0),
    ("0.50", ".5", 1.0),
    ("1,000", "1000", 1.0),
    ("1.000", "1000", 0.0),
    ("-5", "5", 0.0),
    ("+5", "5", 1.0),
    ("0.333333", "0.33333333", 1.0),  # math-verify's precision
    ("0.333333", "0.333334", 0.0),
    ("0.0000001", "0", 0.0),
    ("b", "B", 1.0),
    ("E", "B", 0.0),
    ("B", "7", 0.0),
    ("?", "7", 0.0),
    ("seven", r"\frac{1}{2}", 0.0),
    ("", "7", 0.0),
]


@pytest.mark.parametrize(("answer", "solution", "reward"), PLAIN)
def test_plain_answers_start_no_process_and_score_as_with_math_verify(answer, solution, reward, monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(expressions, "equal", None)
        assert accuracy(answer, solution) == reward
    if answer and answer != "seven":
        same_text = answers.normalize_answer(answer) == answers.normalize_answer(solution)
        assert (same_text or expressions.equal(answer, solution)) == bool(reward)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<answer>seven</answer>", 1.0),
        ("\n <answer>\nline one\nline two\n</answer>\n", 1.0),
        ("It is <answer>seven</answer>", 0.0),
        ("<answer>seven</answer>.", 0.0),
        ("<answer>seven</answer><|im_end|>", 0.0),
        ("<answer>seven</answer> <answer>eight</answer>", 0.0),
        ("<answer><answer>seven</answer></answer>", 0.0),
        ("<answer>seven", 0.0),
        ("<ANSWER>seven</ANSWER>", 0.0),
        ("", 0.0),
    ],
)
def test_format(completion, reward):
    assert format_reward(completions=[completion]) == [reward]
