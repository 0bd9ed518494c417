# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Boxes, points and spans of time in answers, and their overlap."""

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeGuard, TypeVar

from ..answers import Json, extract_answer
from ..calls import RowError


T = TypeVar("T")

_NUMBER = r"\s*+([-+]?\d++(?:\.\d++)?)\s*+"
# "[1, 2, 3, 4]", "(1, 2, 3, 4)", "[[1, 2], [3, 4]]" and "(1, 2), (3, 4)"
_BOX = re.compile(rf"[\[(]{_NUMBER},{_NUMBER}(?:[\])]\s*,\s*[\[(]|,){_NUMBER},{_NUMBER}[\])]")
# "(1, 2)", or the four numbers of a box
_POINT = re.compile(rf"[\[(]{_NUMBER},{_NUMBER}(?:,{_NUMBER},{_NUMBER})?[\])]")
_ASSIGN = r"""["']?\s*+[=:]\s*+["']?"""
# 'x="1" y="2"' and "x1: 1, y1: 2"
_PAIR = re.compile(rf"""\bx(\d*){_ASSIGN}{_NUMBER}["']?[\s,]*+["']?y\1{_ASSIGN}{_NUMBER}""", re.IGNORECASE)
_UNIT = r"(?:h(?:(?:ou)?rs?)?|m(?:in(?:ute)?s?)?|s(?:ec(?:ond)?s?)?)(?![a-z])"
_AMOUNT = r"\d++(?:\.\d++)?"
# "3.5", "00:03", "3 s", "1 min 3 s"
_TIME = rf"((?:\d++:){{1,2}}{_AMOUNT}|{_AMOUNT}(?:\s*+{_UNIT}(?:\s*+{_AMOUNT}\s*+{_UNIT})*+)?)"
_QUANTITY = re.compile(rf"({_AMOUNT})\s*+([hms]?)", re.IGNORECASE)
_SECONDS = {"h": 3600, "m": 60, "s": 1}
# Text between the two times of a span, such as "to", or "'end':" in "{'start': 1.5, 'end': 3}"
_TO = r"""(?:(?:to|and|until|till|through)\b|->|[-–—→~]|["']?[,;]?\s*+["']?end\w*+["']?\s*+[:=]\s*+["']?)"""
# "[1.5, 3]", and "1.5 to 3", "1.5s - 3s", "00:01 and 00:03"
_SPAN = re.compile(
    rf"[\[(]\s*+{_TIME}\s*+,\s*+{_TIME}\s*+[\])]|(?<![\d.,:]){_TIME}\s*+(?:s\b\s*+)?{_TO}\s*+{_TIME}", re.IGNORECASE
)
_BOX_KEYS = ("bbox_2d", "bbox", "box", "position")
_POINT_KEYS = ("point_2d", "point", "coordinate")
_CORNERS = (("x1", "y1", "x2", "y2"), ("xmin", "ymin", "xmax", "ymax"), ("left", "top", "right", "bottom"))
_CONFIDENCE_KEYS = ("confidence", "score")
_LABEL_KEYS = ("label", "category")

# Size of the image in the coordinates of an answer or a solution: a number for both sides, or (width, height)
Scale = float | tuple[float, float] | None


class Box(NamedTuple):
    """A box in an answer or a solution, in the coordinates of the answer or the solution."""

    left: float
    top: float
    right: float
    bottom: float
    confidence: float | None = None
    label: str | None = None

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)

    @property
    def center(self) -> tuple[float, float]:
        return (self.left + self.right) / 2, (self.top + self.bottom) / 2


def box_iou(one: Box, other: Box) -> float:
    """Returns the intersection over union of two boxes in the same coordinate system."""
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    intersection = max(width, 0.0) * max(height, 0.0)
    return intersection / (one.area + other.area - intersection)


def span_iou(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Returns the intersection over union of two sets of spans. Overlaps within a set count once."""
    lengths = [_length(spans), _length(others)]
    union = _length([*spans, *others])
    return (sum(lengths) - union) / union


def _length(spans: Sequence[tuple[float, float]]) -> float:
    total = 0.0
    end = -math.inf
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


def boxes_in(text: str) -> list[Box]:
    """Returns the boxes of positive area in an answer. Boxes in JSON may have labels and confidences."""
    boxes, _ = _read_items(_json_in(text), _as_box)
    # Four numbers alone are a box, too, and so are two pairs such as "x1: 1, y1: 2" and "x2: 3, y2: 4"
    text = text if "[" in text or "(" in text else f"[{text.strip(' .')}]"
    corners = [pair[1:] for pair in _PAIR.findall(text)]
    matches = _BOX.findall(text) or [one + other for one, other in zip(corners[::2], corners[1::2], strict=False)]
    if boxes:
        return boxes
    boxes = [_as_box([float(number) for number in numbers]) for numbers in matches]
    return [box for box in boxes if box is not None]


def share_of_boxes(text: str) -> float:
    """Returns the share of boxes with a label among the entries of a JSON list, or of one entry without a list."""
    value = _json_in(text)
    entries = value if isinstance(value, list) else [value]
    boxes = [_as_box(entry) for entry in entries if isinstance(entry, dict)]
    return sum(box is not None and box.label is not None for box in boxes) / max(len(entries), 1)


def points_in(text: str) -> list[tuple[float, float]]:
    """Returns the points in an answer. A box counts as its center."""
    points, _ = _read_items(_json_in(text), _as_point)
    if points:
        return points
    matches = [pair[1:] for pair in _PAIR.findall(text)] or _POINT.findall(text)
    candidates = [_as_point([float(number) for number in numbers if number]) for numbers in matches]
    return [point for point in candidates if point is not None]


def spans_in(text: str) -> list[tuple[float, float]]:
    """
    Returns the spans of time in an answer, in seconds. A start without a unit has the unit of the span's end: "1 to 2
    min" is (60.0, 120.0).
    """
    # (start, end) of each match. `_SPAN` has two alternatives, and the groups of the one that doesn't match are empty.
    times = [[time for time in groups if time] for groups in _SPAN.findall(text)]
    spans = [_as_span([_seconds(start, _QUANTITY.findall(end)[-1][1]), _seconds(end)]) for start, end in times]
    return [span for span in spans if span is not None]


def boxes_of(solution: Json) -> list[Box]:
    """Returns the boxes of a solution: a text, a box, a dictionary or a list of boxes and dictionaries."""
    return _items_of(solution, boxes_in, _as_box)


def points_of(solution: Json) -> list[tuple[float, float]]:
    """Returns the points of a solution: a text, or a list of points or boxes."""
    return _items_of(solution, points_in, _as_point)


def spans_of(solution: Json) -> list[tuple[float, float]]:
    """Returns the spans of a solution: a text, a pair of seconds, or a list of pairs."""
    return _items_of(solution, spans_in, _as_span)


def _items_of(solution: Json, read_text: Callable[[str], list[T]], as_item: Callable[[Json], T | None]) -> list[T]:
    """Returns an empty list if the solution has an unreadable item."""
    if isinstance(solution, str):
        return read_text(extract_answer(solution))
    items, n_unreadable = _read_items(solution, as_item)
    return [] if n_unreadable else items


def of_row(setting: list[T] | T, position: int) -> T:
    """Returns the setting of a row: its entry if the setting is a column (a list), else the setting of all rows."""
    return setting[position] if isinstance(setting, list) else setting


def scales_of(
    solution_scale: list[Scale] | Scale, answer_scale: list[Scale] | Scale, position: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns an image's (width, height) in the coordinates of solution and answer, or `(1, 1)` without scales."""
    settings = {"solution_scale": of_row(solution_scale, position), "answer_scale": of_row(answer_scale, position)}
    if all(size is None for size in settings.values()):
        return (1.0, 1.0), (1.0, 1.0)
    scales = []
    for column, scale in settings.items():
        pair: list = list(scale) if isinstance(scale, tuple | list) else [scale, scale]
        if len(pair) != 2 or not all(_is_number(size) and size > 0 for size in pair):
            raise RowError(
                position,
                f"column '{column}': {scale!r:.60} is no scale; set both 'solution_scale' and 'answer_scale', each to "
                "1, 1000 or the image's [width, height] in pixels.",
            )
        scales.append((float(pair[0]), float(pair[1])))
    return scales[0], scales[1]


def scaled_box(box: Box, scale: tuple[float, float]) -> Box:
    """Returns a box with coordinates as shares of the image's width and height."""
    width, height = scale
    return box._replace(
        left=box.left / width, right=box.right / width, top=box.top / height, bottom=box.bottom / height
    )


def _json_in(text: str) -> Json:
    """Returns the JSON value in an answer, or `None`. Python's quotes and tuples are read as JSON, too."""
    before, fence, fenced = text.partition("```")
    text = fenced.partition("```")[0].removeprefix("json").strip() if fence else before
    for spelling in (text, text.translate({ord("'"): '"', ord("("): "[", ord(")"): "]"})):
        try:
            return json.loads(spelling)
        except (ValueError, RecursionError):
            continue
    return None


def _read_items(value: Json, read_item: Callable[[Json], T | None]) -> tuple[list[T], int]:
    """Returns the results of `read_item` on the items of nested lists, and the number of items that it can't read."""
    values = []
    n_unreadable = 0
    stack = [value]
    while stack:
        item = stack.pop()
        result = read_item(item)
        if result is not None:
            values.append(result)
        elif isinstance(item, (list, tuple)) and item:
            stack += reversed(item)
        else:
            n_unreadable += 1
    return values, n_unreadable


def _as_box(value: Json) -> Box | None:
    """Returns the box of four numbers, two corners or a dictionary, or `None` if none has a positive area."""
    confidence = label = None
    if isinstance(value, dict):
        entries = {str(key).lower(): item for key, item in value.items()}
        confidence, label = (_first_value(entries, keys) for keys in (_CONFIDENCE_KEYS, _LABEL_KEYS))
        value = _first_value(entries, _BOX_KEYS) or _values(entries, _CORNERS)
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(item, (list, tuple)) for item in value):
        value = sum(map(list, value), [])  # two corners
    if not (isinstance(value, (list, tuple)) and len(value) == 4 and all(map(_is_number, value))):
        return None
    left, top, right, bottom = map(float, value)
    confidence = confidence if _is_number(confidence) else None
    box = Box(left, top, right, bottom, confidence, None if label is None else str(label))
    return box if box.left < box.right and box.top < box.bottom and math.isfinite(box.area) else None


def _as_point(value: Json) -> tuple[float, float] | None:
    """Returns the point that two numbers, a dictionary or the center of a box describe, or `None`."""
    if isinstance(value, dict):
        entries = {str(key).lower(): item for key, item in value.items()}
        value = _first_value(entries, (*_POINT_KEYS, *_BOX_KEYS)) or _values(entries, (("x", "y"), *_CORNERS))
    if isinstance(value, (list, tuple)) and all(map(_is_number, value)):
        if len(value) == 2:
            return float(value[0]), float(value[1])
        box = _as_box(value)
        return None if box is None else box.center
    return None


def _as_span(value: Json) -> tuple[float, float] | None:
    """Returns the span in seconds that two numbers or a dictionary describe, or `None` without a positive length."""
    if isinstance(value, dict):
        return next(iter(spans_in(str(value))), None)  # `_SPAN` matches such a text, see `_TO`
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_number, value)):
        return (float(value[0]), float(value[1])) if value[0] < value[1] else None
    return None


def _first_value(entries: dict[str, Json], keys: Sequence[str]) -> Json:
    return next((entries[key] for key in keys if entries.get(key) is not None), None)


def _values(entries: dict[str, Json], keys: Sequence[Sequence[str]]) -> list:
    """Returns the values of the first group of keys that is complete. `keys` are groups such as `_CORNERS`."""
    # Underscores in keys don't count: "x_min" is "xmin"
    entries = {key.replace("_", ""): value for key, value in entries.items()}
    return next(([entries[key] for key in group] for group in keys if entries.keys() >= {*group}), [])


def _is_number(value: Json) -> TypeGuard[float]:
    """Returns whether a value is a number that can be a coordinate or time, thus neither NaN nor huge."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e12


def _seconds(time: str, unit: str = "") -> float:
    """Converts a time such as "00:03" or "1 min 3 s" to seconds. `unit` applies to numbers without a unit."""
    if ":" in time:
        return sum(float(part) * 60**i for i, part in enumerate(reversed(time.split(":"))))
    return sum(float(n) * _SECONDS[(item_unit or unit or "s").lower()] for n, item_unit in _QUANTITY.findall(time))
