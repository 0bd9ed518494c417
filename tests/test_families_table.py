# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows of the table of families name existing parts of transformers, have tests, and apply."""

import inspect
import re
from pathlib import Path

import pytest
import transformers
from helpers.families import FAMILIES as MATRIX
from helpers.families import MORE_FAMILIES, SPECIAL
from helpers.synthetic import FAMILIES as SYNTHETIC
from packaging.version import Version
from transformers import CONFIG_MAPPING, MODEL_MAPPING, LlamaConfig, ProcessorMixin

from trl_multimodal_rft.cli import families
from trl_multimodal_rft.families import FAMILIES, TOKEN_FIELDS, Family, family_of, family_of_processor, media_padding
from trl_multimodal_rft.modalities import MODALITIES


# Written by `python tests/families_report`
PAGE = Path(__file__).parents[1] / "docs" / "generated" / "families.md"
MEASURED = re.findall(r"^\| (\S+) \| .*synthetic", PAGE.read_text(), re.MULTILINE)
TAKEN = dict(re.findall(r"^\| (\S+) \| ((?:(?:image|video|audio)(?:, )?)+) \|", PAGE.read_text(), re.MULTILINE))

every_row = pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.model_types[0])


def has_argument(model_type, name):
    """Returns whether a class for models of a type, such as that of a thinker, accepts a tensor."""
    config = CONFIG_MAPPING[model_type]
    return config in MODEL_MAPPING and name in inspect.signature(MODEL_MAPPING[config].forward).parameters


@every_row
def test_rows_name_what_transformers_has(row):
    assert row.model_types
    if Version(transformers.__version__) < Version("5.24") and not {*row.model_types} <= {*CONFIG_MAPPING}:
        pytest.skip("a newer transformers has it")
    for model_type in row.model_types:
        assert model_type in CONFIG_MAPPING
    for name in row.processors:
        assert issubclass(getattr(transformers, name), ProcessorMixin)
    for model_type, name in row.trained_part.items():
        assert {model_type, getattr(transformers, name).config_class.model_type} <= {*row.model_types}
    for name in (*row.media_padding, *row.indexed_media, *row.indexed_media.values()):
        assert any(has_argument(model_type, name) for model_type in row.model_types)
    assert row.token_field_fill.keys() <= {*TOKEN_FIELDS} and row.towers.keys() <= {*MODALITIES}
    assert {*row.not_in_vllm} <= {*MODALITIES}


@every_row
def test_rows_say_something_that_is_tested(row):
    assert row != Family(model_types=row.model_types, processors=row.processors)
    tested = {*MATRIX, *SPECIAL, *MORE_FAMILIES, *SYNTHETIC, *MEASURED}
    assert row.training_obstacle or {*row.model_types} & tested


def test_media_that_were_measured_are_listed():
    listed = {model_type: {*kinds.split(", ")} for model_type, kinds, *_ in families.rows()}
    assert len(TAKEN) > 60
    for model_type, kinds in TAKEN.items():
        assert {*kinds.split(", ")} <= listed.get(model_type, {*MODALITIES}), model_type


def test_rows_are_found():
    for row in FAMILIES:
        for model_type in row.model_types:
            assert family_of(model_type) is row
            assert model_type not in CONFIG_MAPPING or family_of(CONFIG_MAPPING[model_type]) is row
        for name in row.processors:
            if not hasattr(transformers, name):
                continue  # `test_rows_name_what_transformers_has` knows why
            derived = type("Own", (getattr(transformers, name),), {})
            assert family_of_processor(derived.__new__(derived)) is row
    model, processor = MATRIX["paligemma"].build()
    assert family_of(model).token_field_fill == {"token_type_ids": 1}
    assert family_of(LlamaConfig()) == family_of_processor(processor) == Family()
    assert (media_padding("image_position_ids"), media_padding("pixel_values")) == (-1, 0)
