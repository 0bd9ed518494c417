# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft families`: models of transformers with vision or audio, and their family-specific rules."""

import argparse
from itertools import chain

from ..families import FAMILIES, family_of, input_modalities
from ..modalities import MODALITIES


def rows() -> list[tuple[str, str, str, str]]:
    """Returns the rows of the table, one per model, without loading models."""
    import transformers

    trained_parts = dict(chain.from_iterable(family.trained_part.items() for family in FAMILIES))
    lines = []
    for model_type, class_name in sorted({**classes_with_media(), **trained_parts}.items()):
        family = family_of(model_type)
        part = trained_parts.get(model_type)
        modalities = input_modalities(getattr(transformers, class_name))
        ordered_modalities = [modality for modality in MODALITIES if modality in modalities]
        if ordered_modalities:
            lines.append((model_type, ", ".join(ordered_modalities), family.isolate or "", part or ""))
    return lines


def classes_with_media() -> dict[str, str]:
    """Returns the names of the classes in transformers that take media, by `model_type`."""
    from transformers.models.auto import modeling_auto

    classes = {
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    family_types = {*chain.from_iterable(family.model_types for family in FAMILIES)}
    speech = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES  # some audio models are registered here
    classes.update({model_type: speech[model_type] for model_type in family_types & speech.keys() - classes.keys()})
    return classes


def run(args: argparse.Namespace) -> None:
    """Prints the table."""
    header = ("model_type", "takes", "isolate", "trained part")
    table: list[tuple[str, ...]] = [header, *rows()]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    table.insert(1, tuple("-" * width for width in widths))
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(
        "\ntakes: modalities that the class in transformers takes. isolate: `media` if a forward must not pad media "
        "or mix modalities,\n`prompt` if it must not pad prompts, either. trained part: the loaded and trained part "
        "of a model that also generates speech."
    )
