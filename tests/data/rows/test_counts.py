# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The number of media in a dataset's prompts, compared with the number that reading its rows finds."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from datasets import Audio, Dataset, Features, Image, Json, List, Value, Video, concatenate_datasets
from PIL import Image as PILImage

from trl_multimodal_rft.data.reading.refs import iter_refs
from trl_multimodal_rft.data.rows.cells import finite_number, truth_value
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.data.rows.counts import describe_empty_cells, empty_row_indices, max_media_per_row
from trl_multimodal_rft.data.rows.values import is_empty
from trl_multimodal_rft.modalities import MODALITIES


PICTURE = PILImage.new("RGB", (4, 4))
NONE = dict.fromkeys(MODALITIES, 0)
TEXT = {"prompt": Value("string")}
HOLES = {"type": Value("string"), "text": Value("string"), "max_pixels": Value("int64")}


def user(*content) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]}]


def messages(blocks: dict) -> dict:
    return {"prompt": List({"role": Value("string"), "content": List(blocks)})}


def counted(dataset: Dataset) -> dict[str, int]:
    """Returns the maximum number of media of each kind in the rows, without decoding."""
    undecoded = dataset.with_format("arrow")[:].to_pylist()
    prompts = [rows_to_messages([row])[0]["prompt"] for row in undecoded]
    kinds = [[ref.modality for ref in iter_refs(prompt)] for prompt in prompts]
    return {kind: max(each.count(kind) for each in kinds) for kind in MODALITIES}


image_block = {"type": "image", "image": PICTURE}
hole = {"type": "image"}

CASES = {
    "text": ([{"prompt": "a"}, {"prompt": "b"}], TEXT, {}),
    "text_messages": (
        [{"prompt": [{"role": "user", "content": "a <image>"}]}],
        {"prompt": List({"role": Value("string"), "content": Value("string")})},
        {},
    ),
    "image": (
        [{"prompt": "a", "image": PICTURE}, {"prompt": "b", "image": None}],
        {**TEXT, "image": Image()},
        {"image": 1},
    ),
    "no_image": ([{"prompt": "a", "image": None}], {**TEXT, "image": Image()}, {}),
    "null": ([{"prompt": "a", "images": None}], {**TEXT, "images": Value("null")}, {}),
    "images": (
        [{"prompt": "a", "images": [PICTURE] * n} for n in (1, 3, 0)] + [{"prompt": "a", "images": None}],
        {**TEXT, "images": List(Image())},
        {"image": 3},
    ),
    "urls": (
        [{"prompt": "<audio><audio>", "audios": ["a.wav", "b.wav"], "video": "https://example.com/a.mp4"}],
        {**TEXT, "audios": List(Value("string")), "video": Value("string")},
        {"audio": 2, "video": 1},
    ),
    "both_columns": (
        [{"prompt": "a", "image": PICTURE, "images": None}, {"prompt": "a", "image": None, "images": [PICTURE] * 2}],
        {**TEXT, "image": Image(), "images": List(Image())},
        {"image": 2},
    ),
    "placeholders": (
        [{"prompt": user(hole, "a", hole), "images": [PICTURE] * 2}, {"prompt": user("b"), "images": [PICTURE]}],
        {**messages(HOLES), "images": List(Image())},
        {"image": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_counts_of_columns_are_those_of_rows(case):
    rows, features, expected = CASES[case]
    dataset = Dataset.from_list(rows, features=Features(features))
    assert max_media_per_row(dataset) == counted(dataset) == {**NONE, **expected}


@pytest.mark.parametrize("feature", [Audio(), Video()])
def test_nothing_is_decoded(feature):
    name = type(feature).__name__.lower()
    broken = [{"prompt": "a", name: {"bytes": b"no medium", "path": None}}]
    dataset = Dataset.from_list(broken, features=Features({**TEXT, name: feature}))
    assert max_media_per_row(dataset) == {**NONE, name: 1}
    dataset = Dataset.from_list([{"prompt": "a", f"{name}s": [broken[0][name]] * 2}])
    dataset = dataset.cast_column(f"{name}s", List(feature))
    assert max_media_per_row(dataset) == {**NONE, name: 2}


def test_rows_of_several_tables_and_of_selections():
    parts = [Dataset.from_list([{"prompt": "a", "images": [PICTURE] * n}]) for n in (1, 4)]
    both = concatenate_datasets([*parts, parts[0]])
    assert max_media_per_row(both)["image"] == max_media_per_row(both.shuffle(seed=0))["image"] == 4
    assert max_media_per_row(both.select([0]))["image"] >= 1  # at least the number that a row needs


def test_other_columns_and_those_that_are_ignored_do_not_count():
    rows = [{"prompt": "a", "images": [PICTURE] * 2, "picture": PICTURE, "extra": {"image": "a.png"}}]
    dataset = Dataset.from_list(rows)
    assert max_media_per_row(dataset)["image"] == 2
    assert max_media_per_row(dataset, ignored=["images"]) == NONE
    assert max_media_per_row(dataset.with_format("numpy", columns=["prompt"])) == NONE
    dataset = Dataset.from_list([{"prompt": "a", "image": np.zeros((4, 4, 3), np.uint8).tolist()}])
    assert max_media_per_row(dataset) == {**NONE, "image": 1}


@pytest.mark.parametrize("cells", [["a", "", " ", None], [1.5, float("nan"), None], [[1], [], None], [{"a": 1}, None]])
def test_empty_rows_are_those_of_empty_cells(cells):
    dataset = Dataset.from_dict({"cell": cells})
    assert (
        empty_row_indices(dataset, "cell")
        == [i for i, cell in enumerate(cells) if is_empty(cell)]
        == [*range(1, len(cells))]
    )
    assert empty_row_indices(dataset.select([1, 0, 1]), "cell") == [0, 2]
    assert (
        describe_empty_cells(dataset.select([0]), ["cell", "other"])
        == describe_empty_cells([{"cell": None}], ["cell"])
        == ""
    )


def test_datasets_without_a_count():
    dataset = Dataset.from_list([{"prompt": "a", "image": PICTURE}])
    assert max_media_per_row(dataset.with_transform(lambda batch: batch)) is None
    assert max_media_per_row(dataset.to_iterable_dataset()) is None
    assert max_media_per_row([{"prompt": "a"}]) is None
    assert max_media_per_row(dataset.remove_columns("prompt")) is None
    assert (
        max_media_per_row(Dataset.from_list([{"prompt": "a", "images": "a.png"}])) is None
    )  # reading it raises an error
    inline = Dataset.from_list([{"prompt": user("a", image_block)}])
    assert max_media_per_row(inline) is None  # its other rows may have media that no column shows
    mixed = [{"prompt": user(image_block | {"image": "a.png"})}, {"prompt": [{"role": "user", "content": "b"}]}]
    assert max_media_per_row(Dataset.from_list(mixed, features=Features({"prompt": Json()}))) is None


@pytest.mark.parametrize("cell", [10**400, -(10**400), Decimal("1e400"), Fraction(10**400), math.inf, "1", True])
def test_what_is_no_finite_number_is_refused(cell):
    with pytest.raises(ValueError, match="row 2, column 'margin': is .* give a finite number"):
        finite_number(cell, "margin", 2)


@pytest.mark.parametrize("cell", [Decimal("sNaN"), Decimal("NaN"), math.nan, np.float32("nan")], ids=repr)
def test_every_nan_is_missing(cell):
    assert finite_number(cell, "margin", 2) is None and truth_value(cell, "label", 2) is False
    with pytest.raises(ValueError, match="row 2, column 'label': is empty"):
        truth_value(cell, "label", 2, is_required=True)
