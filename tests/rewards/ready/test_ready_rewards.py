# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Ready-made rewards: against libraries and the papers' formulas, with wrong answers and references, and by name."""

import itertools
import math
import sys
import time
from functools import partial
from inspect import signature

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers.samplers import Wrapped
from helpers.tools import look_up, with_tools
from helpers.trainer_utils import load, make_trainer
from torchvision.ops import box_iou as torchvision_iou

from trl_multimodal_rft import MultimodalGRPOTrainer, rewards
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.rewards.calls import RowError, checked_reward
from trl_multimodal_rft.rewards.named import as_reward_funcs, load_reward_funcs
from trl_multimodal_rft.rewards.ready import regions
from trl_multimodal_rft.rewards.ready.grounding import number_in


def of(name, answer, solution, **settings):
    """The reward of one answer, which is the same in tags and in a conversation."""
    reward = getattr(rewards, name)
    tagged = [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"So <answer>{answer}</answer>"}]
    [plain] = reward(prompts=["?"], completions=[answer], solution=[solution], **settings)
    assert reward(prompts=["?"], completions=[tagged], solution=[solution], **settings) == [plain]
    return plain


# Boxes, points and spans


def random_boxes(n, generator):
    corners = np.sort(generator.integers(0, 50, (n, 2, 2)), axis=1)
    return (corners + [[[0, 0], [1, 1]]]).reshape(n, 4)  # left, top, right, bottom, with an area


def test_box_iou_is_torchvisions():
    generator = np.random.default_rng(0)
    ones = random_boxes(60, generator)
    others = random_boxes(60, generator)
    expected = torchvision_iou(torch.tensor(ones), torch.tensor(others)).diag().tolist()
    answers = [str(box.tolist()) for box in ones]
    assert rewards.box_iou_reward(answers, solution=others.tolist()) == pytest.approx(expected)
    assert rewards.box_iou_reward(answers, solution=list(others)) == pytest.approx(expected)  # arrays
    above = rewards.box_iou_reward(answers, solution=others.tolist(), iou_threshold=0.3)
    assert above == [float(iou > 0.3) for iou in expected] and {0.0, 1.0} == set(above)


def test_any_of_several_boxes_is_right():
    several = [[0, 0, 4, 4], {"bbox_2d": [10, 10, 20, 20]}]
    assert of("box_iou_reward", "[10, 10, 20, 20]", several) == 1.0
    assert of("box_iou_reward", "[30, 30, 40, 40]", several) == 0.0
    assert of("point_in_box_reward", "(20, 15)", several) == 1.0  # on the border
    assert of("point_in_box_reward", "(5, 5)", several) == 0.0


def test_scales():
    """Pixels of a 200 x 100 image against coordinates up to 1000 and up to 1."""
    settings = {"solution_scale": [[200, 100]], "answer_scale": [1000]}
    assert of("box_iou_reward", "[100, 200, 500, 600]", [20, 20, 100, 60], **settings) == pytest.approx(1)
    assert of("point_in_box_reward", "(499, 599)", [20, 20, 100, 60], **settings) == 1.0
    assert of("point_in_box_reward", "(99, 59)", [20, 20, 100, 60], **settings) == 0.0
    [reward] = rewards.box_iou_reward(["[0.1, 0.2, 0.5, 0.6]"], [[100, 200, 500, 600]], None, 1000, 1)
    assert reward == pytest.approx(1)
    [reward] = rewards.box_iou_reward(["[0.1, 0.2, 0.5, 0.6]"], [[20, 20, 100, 60]], None, (200, 100), 1.0)
    assert reward == pytest.approx(1)
    for wrong in ({"answer_scale": 1000}, {"answer_scale": [1000], "solution_scale": [[200, 0]]}):
        with pytest.raises(ValueError, match=r"row 0, column '(answer|solution)_scale'.* is no scale; set both"):
            of("box_iou_reward", "[1, 2, 3, 4]", [1, 2, 3, 4], **wrong)


def test_temporal_iou():
    """VideoChat-R1's formula: intersection over the hull where spans overlap."""
    generator = np.random.default_rng(0)
    for start, end, from_, to in np.sort(generator.integers(0, 30, (40, 2, 2)), axis=2).reshape(-1, 4).tolist():
        if start == end or from_ == to:
            continue
        shared = max(0, min(end, to) - max(start, from_))
        expected = shared / (max(end, to) - min(start, from_)) if shared else 0.0
        assert of("temporal_iou_reward", f"{start} to {end}", [from_, to]) == pytest.approx(expected)
    # Its example for several spans, which are compared as unions: [0, 4] and [22, 25] with [1, 5]
    assert of("temporal_iou_reward", "[[0, 3], [2, 4], [22, 25]]", [[1, 5], [2, 4]]) == pytest.approx(3 / 8)
    assert of("temporal_iou_reward", "at the end", [1, 5]) == of("temporal_iou_reward", "7 to 9", "1 to 5") == 0.0


# Detections


def test_matching_is_the_best():
    """Compares with all pairings of points."""
    generator = np.random.default_rng(0)
    for trial in range(60):
        n, m = generator.integers(1, 6, 2)
        answer, reference = (generator.integers(0, 4 if trial % 2 else 100, (size, 2)).tolist() for size in (n, m))
        few, many = sorted((answer, reference), key=len)
        distances = [
            np.mean([math.dist(one, other) for one, other in zip(few, others, strict=True)]) / math.sqrt(2) / 100
            for others in itertools.permutations(many, len(few))
        ]
        settings = {"solution_scale": 100, "answer_scale": 100}
        reward = of("counting_reward", f"{answer}", reference, **settings)
        assert reward == pytest.approx(len(few) / len(many) * (1 - min(distances)))


REFERENCES = [[0, 0, 10, 10], [20, 0, 30, 10]]


def listed(*boxes):
    names = ("Position", "Confidence")
    return str([dict(zip(names, box, strict=True)) for box in boxes])


@pytest.mark.parametrize(
    ("answer", "iou", "confidence"),
    [
        (listed(([0, 0, 10, 10], 0.9), ([20, 0, 30, 10], 0.5)), 1.0, 0.7),
        (listed(([0, 0, 10, 10], 0.9), ([50, 0, 60, 10], 0.2)), 0.5, (0.9 + 0.8) / 2),
        (listed(([0, 0, 10, 8], 1.0)), 0.4, 1.0),  # IoU 0.8, one of two found
        (listed(([0, 0, 10, 5], 1.0)), 0.0, 0.0),  # IoU 0.5 isn't above the threshold
        # The more confident box takes the reference, as bad as it is
        (listed(([0, 0, 10, 10], 0.5), ([0, 0, 10, 8], 0.75)), 0.4, (0.75 + 0.5) / 2),
        (listed(([0, 0, 10, 10], 0.5), ([0, 0, 10, 10], 0.5)), 0.5, 0.5),  # the same twice
        (listed(([0, 0, 10, 10], 7), ([20, 0, 30, 10], 1)), 1.0, 0.5),  # no such confidence
        ("[[0, 0, 10, 10], [20, 0, 30, 10]]", 1.0, 0.0),
    ],
)
def test_detection_of_visual_rft(answer, iou, confidence):
    assert of("detection_reward", answer, REFERENCES) == pytest.approx(iou + confidence)


def labelled(*boxes):
    return str([{"bbox_2d": box, "label": label} for box, label in boxes])


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (labelled(([0, 0, 10, 10], "cat"), ([20, 0, 30, 10], "Dog")), 3.0),
        (labelled(([0, 0, 10, 10], "cat"), ([20, 0, 30, 10], "cat")), 0.25 + 0.75 + 0.5 + 1),
        (labelled(([0, 0, 10, 8], "cat")), 0.25 + 0.75 * 2 / 3 + 1 + 0.8 - 0.25),
        (labelled(([50, 0, 60, 10], "cat")), 0.25),
        ('[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}, {"label": "dog"}]', 0.125 + 0.75 * 2 / 3 + 1 + 1 - 0.25),
        ("[[0, 0, 10, 10]]", 0.75 * 2 / 3 + 0 + 1 - 0.25),
    ],
)
def test_detection_of_perception_r1(answer, reward):
    references = [{"bbox_2d": box, "label": label} for box, label in zip(REFERENCES, ("cat", "dog"), strict=True)]
    assert of("detection_reward", answer, references, method="perception_r1") == pytest.approx(reward)
    if "label" in answer:
        assert of("detection_reward", answer.replace("cat", "cow"), references) <= 1  # labels must agree


def test_unknown_method():
    with pytest.raises(ValueError, match="no .method='r1'.; set one of .*'perception_r1'"):
        of("detection_reward", "", [[1, 2, 3, 4]], method="r1")


# Numbers


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("3 dogs", 3),
        ("1,000", 1000),
        ("-2.5e3", -2500),
        ("3.5m", 3.5),
        (".5", 0.5),
        ("50%", 50),
        ("$4", 4),
        ("3,5", None),
    ]
    + [(each, None) for each in ("1/2", "x2", "no", "3 or 4", "", "9" * 400)],
)
def test_numbers_of_answers(answer, number):
    assert number_in(answer) == number


def test_regression():
    assert of("regression_reward", "8", 10) == pytest.approx(0.8)
    assert of("regression_reward", "\\boxed{12}", "10") == pytest.approx(0.8)
    assert of("regression_reward", "-10", 10) == of("regression_reward", "far", 10) == 0.0
    assert of("regression_reward", "8", [100, 10]) == pytest.approx(0.8)
    assert of("regression_reward", "0", 0) == 1.0 and of("regression_reward", "0.01", 0) == 0.0


def test_counting():
    assert of("counting_reward", "There are 3.", 3) == of("counting_reward", "4", [3, 4]) == 1.0
    assert of("counting_reward", "There are 2 or 3.", 3) == of("counting_reward", "many", 3) == 0.0
    assert of("counting_reward", "[(1, 2), (3, 4), (5, 6)]", "3") == 1.0
    points = [[100, 100], [500, 500]]
    assert of("counting_reward", "2", points) == 1.0 and of("counting_reward", "3", points) == 0.0
    assert of("counting_reward", "[[500, 500], [100, 100]]", points) == 1.0
    # Perception-R1: two of three points, and a mean distance of half of 50
    assert of("counting_reward", "[[500, 500], [130, 140]]", [*points, [0, 900]]) == pytest.approx(
        2 / 3 * (1 - 25 / (1000 * 2**0.5))
    )
    assert of("counting_reward", "[[0, 0, 200, 200], [400, 400, 600, 600]]", points) == 1.0  # centers
    shares = {"solution_scale": (1000, 1000), "answer_scale": 1}
    assert of("counting_reward", "[[0.5, 0.5], [0.1, 0.1]]", points, **shares) == pytest.approx(1)


# Transcripts


def test_ocr():
    pytest.importorskip("rapidfuzz")
    assert of("ocr_reward", "EXIT  42", "EXIT 42") == 1.0
    assert of("ocr_reward", "exit 42", "EXIT 42") == pytest.approx(3 / 7)
    assert of("ocr_reward", "EXIT 42 now", "EXIT") == pytest.approx(4 / 11)  # of the longer text
    assert of("ocr_reward", "", "EXIT") == of("ocr_reward", "####", "EXIT") == 0.0
    assert of("ocr_reward", "EXIT", ["STOP", "EXIT!"]) == pytest.approx(4 / 5)


def test_word_and_character_error_rates():
    jiwer = pytest.importorskip("jiwer")
    for answer, reference in [
        ("the cat sat on a mat", "the cat sat on the mat"),
        ("cat", "the cat sat"),
        ("", "the cat"),
        ("a b c d e", "x"),  # a rate of more than 1
        ("今天天气好", "今天天气很好"),
    ]:
        assert of("wer_reward", answer, reference) == pytest.approx(max(1 - jiwer.wer(reference, answer), 0))
        assert of("cer_reward", answer, reference) == pytest.approx(max(1 - jiwer.cer(reference, answer), 0))
    assert of("wer_reward", "“Don’t”, he said: it's 3.5!", "don't he said it's 3.5") == 1.0
    assert of("wer_reward", "it's 35", "its 3.5") == 0.0
    for answer, reference in [
        *(
            ("今天，天气好。", "今天 天气好"),
            ("你好世界", "你好,世界"),
            ("你 好 世 界", "你好世界"),
            ("约翰·史密斯", "约翰史密斯"),
        ),
        *(("共3个，对吗？", "共 3 个对吗"), ("こんにちは、世界！", "こんにちは世界"), ("สวัสดี ครับ", "สวัสดีครับ")),
        ("我喜欢 Python，编程", "我喜欢Python编程"),
    ]:
        assert of("cer_reward", answer, reference) == of("cer_reward", reference, answer) == 1.0
    assert of("cer_reward", "helloworld", "hello, world") == pytest.approx(10 / 11)
    assert of("wer_reward", "a cat", ["the dog", "the cat"]) == 0.5
    assert of("cer_reward", "हिन्दी", "हिन्दी!") == 1.0  # with its vowel signs
    for name in ("wer_reward", "cer_reward", "ocr_reward"):
        with pytest.raises(RowError, match="row 0, column 'solution'.*isn't a text with words"):
            of(name, "cat", " ... " if name != "ocr_reward" else " ")


def test_missing_jiwer_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jiwer", None)
    for name in ("wer_reward", "cer_reward"):
        with pytest.raises(ImportError, match=r'jiwer is missing.*pip install "trl-multimodal-rft\[speech\]"'):
            of(name, "cat", "cat")


# Form and length


@pytest.mark.parametrize(
    ("completion", "reward", "without_thoughts"),
    [
        ("<think>3 + 4</think> So \\boxed{7}.", 1.0, 1.0),
        ("3 + 4</think> So \\boxed{7}.", 1.0, 1.0),  # behind a prompt that may have opened the tag
        ("\n<think>\n</think>\\boxed{\\frac{1}{2}}", 1.0, 1.0),
        ("So \\boxed{7}.", 0.0, 1.0),
        ("<think>\\boxed{7}</think> 7", 0.0, 0.0),
        ("<think>3</think> \\boxed{7", 0.0, 0.0),
        ("I <think>3</think> \\boxed{7}", 0.0, 1.0),
        ("", 0.0, 0.0),
    ],
)
def test_boxed_format(completion, reward, without_thoughts):
    for each in (completion, [{"role": "assistant", "content": completion}]):
        assert rewards.boxed_format_reward([each]) == [reward]
        in_a_run = rewards.boxed_format_reward([each], completion_ids=[[1]])  # which says what the prompt opened
        assert in_a_run == [reward * ("<think>" in completion)]
        assert rewards.boxed_format_reward([each], think=False) == [without_thoughts]
    parsed = [{"role": "assistant", "content": completion.rpartition("</think>")[2], "reasoning_content": "3 + 4"}]
    expected = 1.0 if "\\boxed{7}" in parsed[0]["content"] or "frac" in completion else 0.0
    assert rewards.boxed_format_reward([parsed], completion_ids=[[1]]) == [expected]


# Thoughts, each before the answer {}, in the tags of chat templates
THOUGHTS = [
    *(
        "<think>\nIs it <answer>9</answer>?\n</think>\n\n{}",
        "It was \\boxed{{9}}.\n</think>\n{}",
        "<THINK>9</THINK> {}",
    ),
    *("[THINK]The answer is 9[/THINK]{}", "◁think▷9◁/think▷{}", "<seed:think>9</seed:think>\n{}"),
    *("<|START_THINKING|>9<|END_THINKING|>{}", "<|begin_of_thought|>9<|end_of_thought|>{}", "<thought>9</thought>{}"),
    *("<|channel>thought\n9<channel|>{}", "<reasoning>\n#### 9\n</reasoning>\n{}", "<|thinking|>9<|/thinking|>{}"),
    "<|channel|>analysis<|message|>9<|end|><|start|>assistant<|channel|>final<|message|>{}",
    *(
        "<think>a <think>b</think> 9</think>{}",
        "<think></think>{}",
        "<think>9</think>8<think>7</think>{}",
        "<think>\n9</think>{}",
    ),
]
# Texts without an answer {} behind their thoughts
OPEN_THOUGHTS = [
    *("<think>\n{}", "[THINK]{}", "<|channel|>analysis<|message|>{}", "<|channel>thought\n{}", "◁think▷{}"),
    *("<think>9</think> <think>{}", "{} <think>", "<think>{}</think>", "{}</think>", "<think>{}</think>\n\n"),
]


@pytest.mark.parametrize("as_messages", [False, True])
def test_the_answer_follows_the_thoughts(as_messages):
    def scores(reward, answer, solution, **columns):
        texts = [text.format(answer) for text in [*THOUGHTS, *OPEN_THOUGHTS]]
        blocks = [{"type": "text", "text": texts[0]}]
        completions = (
            [[{"role": "assistant", "content": text}] for text in [blocks, *texts[1:]]] if as_messages else texts
        )
        columns = {name: [value] * len(texts) for name, value in columns.items()}
        found = [
            reward([each], **{"solution": [solution], **{name: value[:1] for name, value in columns.items()}})[0]
            for each in completions
        ]
        return found[: len(THOUGHTS)], found[len(THOUGHTS) :]

    right = [1.0] * len(THOUGHTS), [0.0] * len(OPEN_THOUGHTS)
    for answer in ("4", "$4$", "<answer>4</answer>", "\\boxed{4}", "The answer is 4."):
        assert scores(rewards.accuracy_reward, answer, "4") == right
        assert scores(rewards.counting_reward, answer, 4) == scores(rewards.regression_reward, answer, 4) == right
    assert scores(rewards.accuracy_reward, "A bird.", "<think>A cat?</think> A bird") == right
    assert scores(rewards.choice_reward, "A", "A", choices=["x", "y"]) == right
    assert scores(rewards.preference_reward, "[[A]]", "A") == right
    assert scores(rewards.box_iou_reward, "[0, 0, 5, 5]", [0, 0, 5, 5]) == right
    assert scores(rewards.temporal_iou_reward, "1 to 3", [1, 3]) == right
    assert scores(rewards.ocr_reward, "EXIT", "EXIT") == right
    for tags, form in (("<answer>4</answer>", rewards.format_reward), ("\\boxed{4}", rewards.boxed_format_reward)):
        settings = {} if form is rewards.format_reward else {"think": False}
        assert scores(partial(form, **settings), tags, None) == right
    for each in (*THOUGHTS, *OPEN_THOUGHTS):
        votes = [each.format("4"), each.format("$4$"), "<think>4</think> 5"]
        said = [[{"role": "assistant", "content": vote}] for vote in votes] if as_messages else votes
        assert rewards.majority_reward(said, group_ids=[0] * 3) == ([1, 1, 0] if each in THOUGHTS else [0, 0, 1])


def test_a_thought_alone_never_equals_a_reference():
    assert (
        rewards.accuracy_reward(["<think>", "", "4"], solution=["<think>", "<answer></answer>", "<think>4"])
        == [0.0] * 3
    )


def test_length():
    """Video-R1: 0.2 for correct answers of 320 to 512 tokens."""
    lengths = [319, 320, 512, 513, 400, 400, 400]
    columns = {"completion_ids": [[1] * n for n in lengths], "solution": [*["7"] * 5, ["8", "7"], None]}
    completions = [*["7"] * 4, "8", "7", "7"]
    assert rewards.length_reward(completions, **columns) == [0.0, 0.2, 0.2, 0.0, 0.0, 0.2, None]
    settings = {"min_length": 1, "max_length": 319, "bonus": 1.0, "correctness": rewards.ocr_reward}
    assert rewards.length_reward(completions, **columns, **settings) == [1.0, *[0.0] * 5, None]
    with pytest.raises(ValueError, match="length_reward needs `completion_ids`"):
        rewards.length_reward(["7"], solution=["7"])


# Groups


def calls(n):
    return [{"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}, {"role": "tool"}] * n


def test_tool_curiosity():
    """Pixel-Reasoner: groups of 5 and 2 whose shares of completions with calls are 0.2 and 1."""
    completions = [calls(3), *[calls(0)] * 4, calls(1), calls(2)]
    found = rewards.tool_curiosity_reward(completions, group_ids=[0] * 5 + [1] * 2)
    assert found == pytest.approx([0.5 * 0.1 - 0.05 * 2, 0, 0, 0, 0, 0, -0.05])
    settings = {"target_rate": 0.5, "curiosity": 1.0, "free_calls": 3}
    found = rewards.tool_curiosity_reward([calls(3), "no", "no"], group_ids=[4, 4, 4], **settings)
    assert found == pytest.approx([1 / 6, 0, 0])
    with pytest.raises(ValueError, match="needs `group_ids`.*`per_device_train_batch_size`.*`num_generations`"):
        rewards.tool_curiosity_reward(["a"])


class SomeCall(Wrapped):
    """One completion of the first group of four calls the tool, and all of the second one do."""

    def __call__(self, model, prompts, *, room=None, **options):
        if room is not None:
            return [self.encoded("A bird") for _ in prompts], None
        call = '<tool_call>\n{"name": "look_up", "arguments": {"word": "cat"}}\n</tool_call>'
        return [self.encoded(call if i in (2, 4, 5, 6, 7) else "No") for i in range(len(prompts))], None


def test_rewards_see_groups_in_training_and_evaluation(tmp_path):
    seen = []

    def watch(completions, group_ids, **kwargs):
        seen.append(group_ids)
        return [0.0] * len(completions)

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is a cat? {i}"}]} for i in range(4)])
    functions = ["tool_curiosity_reward", watch]
    options = {"max_steps": 1, "max_completion_length": 300, "self_check": False}
    trainer = make_trainer(
        MultimodalGRPOTrainer, "qwen3_vl", rows, tmp_path, reward=functions, objects=with_tools(tools=[look_up]),
        sampler=SomeCall, **options,
    )  # fmt: skip
    trainer.train()
    assert seen == [[0] * 4 + [1] * 4]
    mean = trainer.state.log_history[0]["rewards/tool_curiosity_reward/mean"]
    assert mean == pytest.approx(0.5 * (0.3 - 0.25) / 8)
    evaluate(*load("qwen3_vl"), rows, watch, EvaluationConfig(max_completion_length=2, num_samples=2, temperature=1.0))
    assert seen[1:] == [[0, 0, 1, 1, 2, 2, 3, 3]]


class SomeAgree(Wrapped):
    """Three of four completions of the first group agree; the second group is tied."""

    def __call__(self, model, prompts, **options):
        return [self.encoded(answer) for answer in ("3", "It is 4", " 3. ", "3", "1", "1", "2", "2")], None


def test_labels_of_majorities():
    """Answers agree as those of majority@k do."""
    logged = {}
    columns = {"group_ids": [0] * 4 + [1] * 4 + [5] * 3, "log_metric": logged.__setitem__}
    said = ["<answer>A cat.</answer>", "a CAT", "dog", "\\boxed{bird}", "1", "2", "2", "1", "", " ", "x"]
    expected = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert rewards.majority_reward(said, **columns) == expected
    assert logged == {"sampling/agreement": pytest.approx((2 / 4 + 2 / 4 + 1 / 3) / 3)}
    # Of the two groups with a label, one is right; a row without a solution doesn't count
    rewards.majority_reward(said, solution=["cat"] * 4 + ["1"] * 4 + ["y"] * 3, **columns)
    assert logged["majority/correct_frac"] == 0.0
    rewards.majority_reward(said, solution=["a cat"] * 4 + ["1"] * 4 + [None] * 3, **columns)
    assert logged["majority/correct_frac"] == 1.0
    assert rewards.majority_reward(said, threshold=0.5, **columns) == [*expected[:-1], 0.0]
    assert rewards.majority_reward(said, threshold=0.51, **columns) == [0.0] * 11
    choices = [["Man", "Woman"]] * 4
    named = ["(B)", "a woman", "I can't say", "I can't say"]
    assert rewards.majority_reward(named, group_ids=[0] * 4, choices=choices) == [1.0, 1.0, 0.0, 0.0]
    assert rewards.majority_reward(named, group_ids=[0] * 4) == [0.0, 0.0, 1.0, 1.0]
    assert rewards.majority_reward([], group_ids=[]) == []
    for silent in ("...", "?!", "$$", "```", "—", "。", "<answer>**</answer>", " "):
        assert rewards.majority_reward([silent] * 3 + ["7"], group_ids=[0] * 4) == [0.0, 0.0, 0.0, 1.0], silent
    for symbol in ("+", "😀", "∞"):
        assert rewards.majority_reward([symbol] * 2 + ["7"], group_ids=[0] * 3) == [1.0, 1.0, 0.0], symbol
    assert rewards.majority_reward(["-", "- ", "+"], group_ids=[0] * 3, choices=[["+", "-"]] * 3) == [1.0, 1.0, 0.0]
    numbers = ["\\boxed{3 \\times 10^8}", "$3\\cdot10^{8}$", "3e8", "300,000,000", "7", "7", "7"]
    assert rewards.majority_reward(numbers, group_ids=[0] * 7) == [1.0] * 4 + [0.0] * 3
    with pytest.raises(ValueError, match="needs `group_ids`.*`num_generations`"):
        rewards.majority_reward(["a"])
    with pytest.raises(ValueError, match="`threshold=2`"):
        rewards.majority_reward(["a"], group_ids=[0], threshold=2)


def test_a_run_learns_from_majorities(tmp_path):
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"How many? {i}"}]} for i in range(4)])
    options = {"max_steps": 1, "self_check": False, "max_completion_length": 8}
    trainer = make_trainer(
        MultimodalGRPOTrainer, "qwen3_vl", rows, tmp_path, reward="majority_reward(threshold=0.5)", sampler=SomeAgree,
        **options,
    )  # fmt: skip
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["sampling/agreement"] == pytest.approx((3 / 4 + 2 / 4) / 2) and "majority/correct_frac" not in logs
    assert logs["rewards/majority_reward/mean"] == pytest.approx(3 / 8)


# References and names

BAD = [
    ("box_iou_reward", [1, 2, 3], "which isn't [left, top, right, bottom]"),
    ("box_iou_reward", [[1, 2, 3, 4], [1, 2]], "which isn't"),
    ("box_iou_reward", [3, 2, 1, 4], "which isn't"),
    ("point_in_box_reward", {"box": "left"}, "which isn't"),
    ("detection_reward", "two cats", "which isn't"),
    ("temporal_iou_reward", [5, 1], "which isn't [start, end] in seconds"),
    ("temporal_iou_reward", [1, 2, 3, 4], "which isn't"),
    ("counting_reward", "several", "which isn't a number"),
    ("regression_reward", ["1", None], "which isn't a number"),
    ("regression_reward", True, "which isn't a number"),
    ("ocr_reward", {"text": "a"}, "isn't a text"),
    ("ocr_reward", ["EXIT", {"text": "a"}], "isn't a text"),
    ("length_reward", {"text": "a"}, "write a text"),
]


@pytest.mark.parametrize(("name", "solution", "problem"), BAD)
def test_bad_references_name_row_and_column(name, solution, problem):
    columns = {"solution": [None, solution], "completion_ids": [[1]] * 2}
    with pytest.raises(RowError, match="row 1, column 'solution'") as error:
        getattr(rewards, name)(completions=["a", "b"], **columns)
    assert problem in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(RowError, match="row 31, column 'solution'"):  # with the row's number in the dataset
        reward = checked_reward(getattr(rewards, name), rows=[30, 31])
        reward(prompts=["?", "?"], completions=["a", "b"], **columns)


# Rewards that read the column `solution`, or that give it to another reward
WITH_REFERENCES = [
    name
    for name in rewards.__all__
    if name.endswith("_reward") and {"solution", "correctness"} & signature(getattr(rewards, name)).parameters.keys()
]


@pytest.mark.parametrize("name", WITH_REFERENCES)
def test_rows_without_a_reference_have_no_reward(name):
    if name in ("cer_reward", "wer_reward"):
        pytest.importorskip("jiwer")
    reward = getattr(rewards, name)
    ids = [[1], [1]]
    choices = [["a", "b"]] * 4
    missing = [None, [], float("nan"), np.float32("nan")]
    columns = {"completion_ids": ids * 2, "choices": choices, "completion_audio": [None] * 4}
    assert reward(completions=["a"] * 4, solution=missing, **columns) == [None] * 4
    with pytest.raises(ValueError, match=r"column `solution`, which is missing.*'question'[],]"):
        reward(completions=["a", "b"], completion_ids=ids, completion_audio=[None] * 2, question=["?"])


def test_settings_by_name():
    reward, overlong = load_reward_funcs(
        [
            "box_iou_reward(iou_threshold=0.5)",
            "get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)",
        ]
    )
    assert reward(["[0, 0, 4, 4]"], solution=[[0, 0, 4, 3]]) == [1.0]
    [scaled] = load_reward_funcs(["box_iou_reward(solution_scale=[200, 100], answer_scale=1000)"])
    assert scaled(["[0, 0, 500, 500]"] * 3, solution=[[0, 0, 100, 50]] * 3) == [1.0] * 3
    assert overlong([[0] * 8]) == [-0.5]
    [boxed] = as_reward_funcs("boxed_format_reward(think=False)")
    assert boxed(["\\boxed{1}"]) == [1.0] and boxed.required_in_prompt == "\\boxed"
    for name, problem in [
        ("box_iou_reward(threshold=0.5)", "no setting 'threshold', only .*'iou_threshold'"),
        (
            "box_iou_reward(iou_threshold=2)",
            "`iou_threshold` of 'box_iou_reward' must be at least 0 and below 1, got 2",
        ),
        ("detection_reward(iou_threshold=None)", "`iou_threshold` of 'detection_reward' can't be None"),
        ("majority_reward(threshold=2)", "`threshold` of 'majority_reward' must be between 0 and 1, got 2"),
        ("length_reward(bonus=0.1, bonus=0.5)", "can't be read .it sets `bonus` twice; remove one"),
        ("length_reward(bonus=1e999)", "`bonus` of 'length_reward' must be finite, got inf"),
        ("length_reward(min_length=3.5)", "`min_length` of 'length_reward' must be a whole number, got 3.5"),
        ("boxed_format_reward(think='no')", "`think` of 'boxed_format_reward' must be `True` or `False`"),
        ("accuracy_reward(solution='x')", "`solution` of 'accuracy_reward' is no setting, as the trainer passes it"),
        ("length_reward(completion_ids=[[1]])", "`completion_ids` of 'length_reward' is no setting"),
        ("..x.y", r"There is no reward function '\.\.x\.y'; name one of"),
        ("box_iou_reward(0.5)", "can't be read.*settings need names"),
        ("box_iou_reward(iou_threshold=print())", "can't be read"),
        ("box_iou_reward(", "no reward function"),
        ("box_iou_rewards(a=1)", "Did you mean `box_iou_reward`"),
        ("RemoteReward", r"needs settings: `RemoteReward\(url=\.\.\.\)`"),
    ]:
        with pytest.raises(ValueError, match=problem):
            load_reward_funcs([name])


def test_trainers_take_all_by_name(tmp_path):
    pytest.importorskip("jiwer")
    with_boxes = ["box_iou_reward(iou_threshold=0.1)", "point_in_box_reward", "detection_reward", "counting_reward"]
    with_boxes += ["temporal_iou_reward", "ocr_reward", "wer_reward", "cer_reward", "length_reward"]
    for names, solution in (
        ([*with_boxes, "boxed_format_reward", "tool_curiosity_reward"], "[0, 0, 5, 5] from 1 to 3"),
        (["regression_reward"], "3"),
    ):
        rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "?"}], "solution": solution}] * 8)
        options = {"max_steps": 1, "self_check": False}
        trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", rows, tmp_path, reward=names, **options)
        assert trainer.reward_func_names == [name.partition("(")[0] for name in names]
        trainer.train()
        logs = trainer.state.log_history[0]
        assert all(f"rewards/{name}/mean" in logs for name in trainer.reward_func_names)


def test_long_answers_are_read_in_linear_time():
    long = ["1" + " " * 40000, "1" * 40000, "[" * 40000, "[1," * 20000, "1:" * 20000, "1," * 20000, "1 to " * 9000]
    start = time.process_time()
    for text in long:
        for read in (regions.boxes_in, regions.points_in, regions.spans_in, number_in):
            read(text)
    assert time.process_time() - start < 5
