# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards for answers that point: boxes, points, spans of time, detections and counts."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np

from ..answers import Json, extract_answer, normalize_answer, rewards_by_reference
from ..calls import Argument, Completion, Reference
from .regions import (
    Box,
    Scale,
    box_iou,
    boxes_in,
    boxes_of,
    of_row,
    points_in,
    points_of,
    scaled_box,
    scales_of,
    share_of_boxes,
    span_iou,
    spans_in,
    spans_of,
)


_BOX_FORM = "[left, top, right, bottom], a dictionary with such a 'bbox_2d', or a list of these"
# A number of an answer in prose: "3", "1,000", "0.5", "-2e3"
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:(?:\d{1,3}(?:,\d{3}){1,40}+(?!\d)|\d++)(?:\.\d++)?|\.\d++)(?:[eE][-+]?\d++)?")


def box_iou_reward(
    completions: Sequence[Completion],
    solution: Sequence[Reference] | None = None,
    iou_threshold: Annotated[float | None, "[0, 1)"] = None,
    solution_scale: Scale = None,
    answer_scale: Scale = None,
    **kwargs: Argument,
) -> list[float | None]:
    """
    Rewards a box by its intersection over union with the reference, as
    [VLM-R1](https://huggingface.co/papers/2504.07615) and
    [Perception-R1](https://huggingface.co/papers/2504.07954) do.

    The answer, see [`extract_answer`], is `[left, top, right, bottom]`, `(left, top), (right, bottom)`, four numbers
    alone, or JSON with the key `bbox_2d`, `bbox`, `box` or `Position`, or with `x1` to `y2`. The first box
    counts. If answer and reference have different coordinates, set `solution_scale` and `answer_scale` to the size of
    the image in the coordinates of each: 1 for coordinates from 0 to 1, 1000 for the coordinates of Qwen3-VL, and the
    image's width and height for pixels. Qwen2.5-VL answers in pixels of the resized image.

    The threshold and the scales may also be columns, with a value for each row. For the other arguments and the
    errors, see [`accuracy_reward`].

    Args:
        solution (`list`):
            Reference of each completion: a box as above, or a list of boxes, any of which is right. `None` where the
            reward does not apply.
        iou_threshold (`float`, *optional*):
            With a threshold, the reward is 1.0 for an IoU above it, else 0.0.
        solution_scale (`float` or `tuple[float, float]`, *optional*):
            Size of the image in the coordinates of the reference, or its width and height.
        answer_scale (`float` or `tuple[float, float]`, *optional*):
            Size of the image in the coordinates of the answer, or its width and height.

    Returns:
        `list[float | None]`: Rewards from 0.0 to 1.0: 0.0 without a box, `None` without a reference.

    Example:
    ```python
    >>> box_iou_reward(["<answer>[0, 0, 10, 10]</answer>", "there"], solution=[[0, 5, 10, 10]] * 2)
    [0.5, 0.0]
    ```
    """

    def reward(answer: str, references: list[Box], position: int) -> float:
        scales = scales_of(solution_scale, answer_scale, position)  # of reference and answer
        box = next(iter(boxes_in(answer)), None)
        if box is None:
            return 0.0
        box = scaled_box(box, scales[1])
        best = max(box_iou(box, scaled_box(reference, scales[0])) for reference in references)
        threshold = of_row(iou_threshold, position)
        return best if threshold is None else float(best > threshold)

    return rewards_by_reference(completions, solution, "box_iou_reward", boxes_of, _BOX_FORM, reward, kwargs)


def point_in_box_reward(
    completions: Sequence[Completion],
    solution: Sequence[Reference] | None = None,
    solution_scale: Scale = None,
    answer_scale: Scale = None,
    **kwargs: Argument,
) -> list[float | None]:
    """
    Rewards a point in the reference's box, such as a click, as [UI-R1](https://huggingface.co/papers/2503.21620) does:
    1.0 inside or on the border, else 0.0.

    The answer, see [`extract_answer`], is `(x, y)`, `<point x="1" y="2">` or JSON with the key `point_2d`, `point` or
    `coordinate`. A box stands for its center. The first point counts. For the scales, see
    [`box_iou_reward`]. For the other arguments and the errors, see [`accuracy_reward`].

    Args:
        solution (`list`):
            Box of each completion, or a list of boxes, any of which is right.

    Example:
    ```python
    >>> point_in_box_reward(["I click (30, 40).", "(0, 0)"], solution=[[20, 20, 50, 50]] * 2)
    [1.0, 0.0]
    ```
    """

    def reward(answer: str, references: list[Box], position: int) -> float:
        scales = scales_of(solution_scale, answer_scale, position)  # of reference and answer
        points = points_in(answer)
        if not points:
            return 0.0
        x = points[0][0] / scales[1][0]
        y = points[0][1] / scales[1][1]
        boxes = [scaled_box(reference, scales[0]) for reference in references]
        return float(any(box.left <= x <= box.right and box.top <= y <= box.bottom for box in boxes))

    return rewards_by_reference(completions, solution, "point_in_box_reward", boxes_of, _BOX_FORM, reward, kwargs)


def temporal_iou_reward(
    completions: Sequence[Completion], solution: Sequence[Reference] | None = None, **kwargs: Argument
) -> list[float | None]:
    """
    Rewards spans of time by their intersection over union with the reference, as
    [VideoChat-R1](https://huggingface.co/papers/2504.06958) does.

    The answer, see [`extract_answer`], has spans such as `3.5 to 7`, `3.5s → 7s`, `[3.5, 7]`, `00:03 and 00:07`,
    `1 min until 2 min` or `{"start": 3.5, "end": 7}`. Several spans count as their union.
    Without a span, the reward is 0.0. For the other arguments and the errors, see [`accuracy_reward`].

    Args:
        solution (`list`):
            Reference of each completion, in seconds: `[start, end]`, a list of such spans (the union counts), or a
            text as above.

    Example:
    ```python
    >>> temporal_iou_reward(["<answer>2 to 6</answer>", "at the end"], solution=[[4, 8]] * 2)
    [0.3333333333333333, 0.0]
    ```
    """

    def reward(answer: str, references: list[tuple[float, float]], position: int) -> float:
        spans = spans_in(answer)
        return span_iou(spans, references) if spans else 0.0

    form = "[start, end] in seconds, a list of these, or a text such as '3.5 to 7'"
    return rewards_by_reference(completions, solution, "temporal_iou_reward", spans_of, form, reward, kwargs)


def detection_reward(
    completions: Sequence[Completion],
    solution: Sequence[Reference] | None = None,
    method: Literal["visual_rft", "perception_r1"] = "visual_rft",
    iou_threshold: Annotated[float, "[0, 1)"] = 0.5,
    solution_scale: Scale = None,
    answer_scale: Scale = None,
    **kwargs: Argument,
) -> list[float | None]:
    r"""
    Rewards the detection of all objects by boxes, with or without labels and confidences.

    The answer, see [`extract_answer`], is a JSON list such as
    `[{"bbox_2d": [0, 0, 9, 9], "label": "cat", "confidence": 0.9}]`, also with the keys `Position` and `Confidence`.

    - `"visual_rft"` ([Visual-RFT](https://huggingface.co/papers/2503.01785)): boxes are matched in order of
      confidence, each with the unmatched reference of largest IoU, if the IoU exceeds `iou_threshold`. If both have
      labels, the labels must be equal. The reward, up to 2, is the sum of two parts. The first part is the sum of the
      matches' IoU, divided by the number of boxes or of references, whichever is larger. The second part is a mean
      over boxes: the confidence of a box with a match, 1 minus the confidence of a box without a match, and 0 for a
      box without confidence. Repeated boxes count once. As in the paper, boxes with confidence 0 and no match get 1.0.
    - `"perception_r1"` ([Perception-R1](https://huggingface.co/papers/2504.07954)): boxes are assigned to references
      so that the sum of IoU is largest, and pairs above `iou_threshold` are matches. The reward, from 0 to 3, is 0.25
      times the share of entries with box and label. If there are matches, three numbers are added: 0.75 times F1, the
      share of matches with the right label, and the matches' mean IoU. Two numbers are then subtracted: half of the
      share of boxes without a match, and half of the share of references without a match.

    Without a box, the reward is 0.0. For the scales, see [`box_iou_reward`]. For the other arguments and the errors,
    see [`accuracy_reward`].

    Args:
        solution (`list`):
            Boxes of all objects, for each completion: a list of boxes or dictionaries, or a text as above.
        method (`str`, *optional*, defaults to `"visual_rft"`):
            `"visual_rft"` or `"perception_r1"`.
        iou_threshold (`float`, *optional*, defaults to `0.5`):
            IoU that a match must exceed.

    Example:
    ```python
    >>> answer = '[{"Position": [0, 0, 10, 10], "Confidence": 0.75}, {"Position": [20, 0, 30, 9], "Confidence": 0.5}]'
    >>> detection_reward([answer, "two"], solution=[[[0, 0, 10, 10]]] * 2)
    [1.125, 0.0]
    ```
    """
    reward_by_method = {"visual_rft": _visual_rft, "perception_r1": _perception_r1}
    if method not in reward_by_method:
        raise ValueError(f"detection_reward has no `method={method!r}`; set one of {[*reward_by_method]}.")

    def reward(answer: str, references: list[Box], position: int) -> float:
        scales = scales_of(solution_scale, answer_scale, position)  # of reference and answer
        boxes = [scaled_box(box, scales[1]) for box in boxes_in(answer)]
        references = [scaled_box(reference, scales[0]) for reference in references]
        return reward_by_method[method](answer, boxes, references, of_row(iou_threshold, position))

    return rewards_by_reference(completions, solution, "detection_reward", boxes_of, _BOX_FORM, reward, kwargs)


def _visual_rft(answer: str, boxes: list[Box], references: list[Box], threshold: float) -> float:
    """Returns the reward of the method `"visual_rft"`, up to 2, which doesn't depend on the text of the answer."""
    # Of boxes with equal coordinates, the first counts
    boxes = list({box[:4]: box for box in reversed(boxes)}.values())[::-1]
    boxes.sort(key=lambda box: box.confidence or 0.0, reverse=True)
    unmatched = list(references)
    iou_sum = 0.0
    confidence_sum = 0.0
    for box in boxes:
        candidates = [
            (box_iou(box, candidate), i)
            for i, candidate in enumerate(unmatched)
            if None in (box.label, candidate.label) or _label(box) == _label(candidate)
        ]
        iou, index = max(candidates, key=lambda candidate: candidate[0], default=(0.0, 0))
        is_match = iou > threshold
        if is_match:
            del unmatched[index]
            iou_sum += iou
        if box.confidence is not None and 0 <= box.confidence <= 1:
            confidence_sum += box.confidence if is_match else 1 - box.confidence
    return iou_sum / max(len(boxes), len(references)) + confidence_sum / len(boxes) if boxes else 0.0


def _perception_r1(answer: str, boxes: list[Box], references: list[Box], threshold: float) -> float:
    """Returns the reward of the method `"perception_r1"`, from 0 to 3."""
    reward = 0.25 * share_of_boxes(answer)
    if not boxes:
        return reward
    # `(boxes, references)`
    ious = np.array([[box_iou(box, reference) for reference in references] for box in boxes])
    matches = [match for match in _best_assignment(ious) if ious[match] > threshold]
    if not matches:
        return reward
    precision = len(matches) / len(boxes)
    recall = len(matches) / len(references)
    # (label of the box, label of the reference) of each match
    labels = [(_label(boxes[i]), _label(references[j])) for i, j in matches]
    is_right = [label is not None and label == reference for label, reference in labels]
    reward += 0.75 * 2 * precision * recall / (precision + recall) + float(np.mean(is_right))
    # `1 - precision` is the share of boxes without a match, and `1 - recall` the share of such references
    reward += float(np.mean([ious[match] for match in matches])) - 0.5 * (2 - precision - recall)
    return min(max(reward, 0.0), 3.0)


def _best_assignment(gains: np.ndarray) -> list[tuple[int, int]]:
    from scipy.optimize import linear_sum_assignment

    return list(zip(*(indices.tolist() for indices in linear_sum_assignment(gains, maximize=True)), strict=True))


def _label(box: Box) -> str | None:
    return None if box.label is None else normalize_answer(box.label)


def counting_reward(
    completions: Sequence[Completion],
    solution: Sequence[Reference] | None = None,
    solution_scale: Scale = 1000,
    answer_scale: Scale = 1000,
    **kwargs: Argument,
) -> list[float | None]:
    """
    Rewards a count, or points on the counted objects, as [Perception-R1](https://huggingface.co/papers/2504.07954)
    does. The reward of a count is 1.0 for the right number, else 0.0.

    The answer, see [`extract_answer`], is a number, alone or in a sentence without another number, or a list of points
    or boxes, which are counted. If the reference is a list of points, too, points are assigned to references so that
    the sum of distances is smallest. The reward is then a product of two factors: the smaller number of points
    divided by the larger number, and 1 minus the mean distance, as a share of the image's diagonal. Without a number,
    the reward is 0.0. For the scales, see [`box_iou_reward`]. For the other arguments and the errors, see
    [`accuracy_reward`].

    Args:
        solution (`list`):
            Reference of each completion: a number, a list of numbers (any of which is right), or a list of points or
            boxes.

    Example:
    ```python
    >>> counting_reward(["I see 3 dogs.", "<answer>4</answer>"], solution=[3, 3])
    [1.0, 0.0]
    ```
    """

    def reward(answer: str, references: list, position: int) -> float:
        points = points_in(answer)
        if not isinstance(references[0], tuple):
            count = len(points) if points else number_in(answer)
            return float(count in references)
        if not points:
            return float(number_in(answer) == len(references))
        scales = scales_of(solution_scale, answer_scale, position)  # of reference and answer
        guesses = np.array(points) / scales[1]
        targets = np.array(references) / scales[0]
        # Distances `(guesses, targets)`, as shares of the diagonal: coordinates are from 0 to 1
        distances = np.linalg.norm(guesses[:, None] - targets, axis=-1) / math.sqrt(2)
        mean_distance = float(np.mean([distances[pair] for pair in _best_assignment(-distances)]))
        return min(len(guesses), len(targets)) / max(len(guesses), len(targets)) * max(1 - mean_distance, 0.0)

    form = "a number, a list of numbers, or a list of points [x, y]"
    return rewards_by_reference(completions, solution, "counting_reward", _numbers_or_points, form, reward, kwargs)


def _numbers_or_points(solution: Json) -> list:
    return numbers_of(solution) or points_of(solution)


def regression_reward(
    completions: Sequence[Completion], solution: Sequence[Reference] | None = None, **kwargs: Argument
) -> list[float | None]:
    """
    Rewards a number by its relative error: 1 minus the error divided by the reference's size, at least 0.0, as
    [Video-R1](https://huggingface.co/papers/2503.21776) does.

    The answer, see [`extract_answer`], is a number, alone or in a sentence without another number. Where the reference
    is 0, only 0 is right. Without a number, the reward is 0.0. For the other arguments and the errors, see
    [`accuracy_reward`].

    Args:
        solution (`list`):
            Reference of each completion: a number, a text with a number, or a list. The nearest number of a list
            counts.

    Example:
    ```python
    >>> regression_reward(["About 3 meters.", "<answer>8</answer>", "far"], solution=[4, 4, 4])
    [0.75, 0.0, 0.0]
    ```
    """

    def reward(answer: str, references: list[float], position: int) -> float:
        number = number_in(answer)
        if number is None:
            return 0.0
        return max(
            float(number == reference) if reference == 0 else max(1 - abs(number - reference) / abs(reference), 0.0)
            for reference in references
        )

    return rewards_by_reference(
        completions, solution, "regression_reward", numbers_of, "a number or a list", reward, kwargs
    )


def number_in(text: str) -> float | None:
    """Returns the number in an answer, or `None` if the answer has no or several numbers."""
    numbers = [float(match.replace(",", "")) for match in _NUMBER.findall(text)]
    return numbers[0] if len(numbers) == 1 and math.isfinite(numbers[0]) else None


def numbers_of(solution: Json) -> list[float]:
    """Returns the numbers of a reference: a number, a text with one number, or a list of such entries."""
    entries = solution if isinstance(solution, (list, tuple)) else [solution]
    numbers = []
    for entry in entries:
        number = number_in(extract_answer(entry)) if isinstance(entry, str) else entry
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            return []
        numbers.append(float(number))
    return numbers
