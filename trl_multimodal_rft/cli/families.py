# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft families`: which models of transformers see and hear, and what is particular to them."""

import argparse
import functools
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ..families import FAMILIES, MODALITIES, family_of


if TYPE_CHECKING:
    from .measure import Measurement

# What `docs/vllm.md` says of families that were run with vLLM, beside media of which it makes other tokens
VLLM = {
    "idefics3": "yes",
    "internvl": "yes",
    "glm4v": "images",
    "llava": "no",
    "llava_onevision": "no",
    "paligemma": "no",
    "phi4_multimodal": "no",
    "qwen2_5_omni": "yes",
    "qwen2_5_vl": "yes",
    "qwen2_audio": "yes",
    "qwen2_vl": "yes",
    "qwen3_omni_moe": "no",
    "qwen3_vl": "yes",
    "qwen3_vl_moe": "no",
    "voxtral": "no",
}


def rows(only_known: bool = False) -> list[tuple[str, str, str, str]]:
    """What is known of each model without loading one."""
    import transformers

    classes = _classes()
    known = {model_type for family in FAMILIES for model_type in family.model_types}
    found = []
    for model_type in sorted(known if only_known else known | classes.keys()):
        family = family_of(model_type)
        part = family.trained_part.get(model_type)
        if part is None and model_type not in classes:
            continue  # the text model of a family
        modalities = getattr(getattr(transformers, part or classes[model_type]), "input_modalities", ())
        kinds = [kind for kind in MODALITIES if kind in modalities]
        if kinds:
            found.append((model_type, ", ".join(kinds), family.isolate or "", part or ""))
    return found


def _classes() -> dict[str, str]:
    """Names of the classes of models that take media, by `model_type`."""
    from transformers.models.auto import modeling_auto

    classes = {
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    known = {model_type for family in FAMILIES for model_type in family.model_types}
    others = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES  # where some models that hear are registered
    classes.update({model_type: others[model_type] for model_type in known & others.keys() - classes.keys()})
    return classes


def measurable() -> dict[str, str]:
    """Families that complete prompts with media, each class once."""
    import transformers

    found: dict[str, str] = {}
    parts = {model_type for family in FAMILIES for model_type in family.trained_part}
    for model_type, name in sorted(_classes().items()):
        model_class = getattr(transformers, name)
        takes_media = not {*MODALITIES}.isdisjoint(model_class.input_modalities)
        if model_type in parts or not takes_media or name in found.values() or not model_class.can_generate():
            continue
        if not model_class.config_class().is_encoder_decoder:
            found[model_type] = name
    return found


def run(args: argparse.Namespace) -> None:
    """Prints the table."""
    if args.measure:
        print_measurements(args)
        return
    header = ("model_type", "takes", "apart", "trained part")
    table: list[tuple[str, ...]] = [header, *rows(args.only_known)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    table.insert(1, tuple("-" * width for width in widths))
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(
        "\ntakes: media that the class in transformers takes. apart: `media` if prompts share a forward only where no "
        "medium is padded\nor mixed with another kind. trained part: what is loaded and trained of a model that also "
        "speaks."
    )


def print_measurements(args: argparse.Namespace) -> None:
    """Measures families and prints a table."""
    from transformers import CONFIG_MAPPING

    from .measure import measure_all, measure_class, measure_real, real_families

    classes = measurable()
    work = {name: functools.partial(measure_class, class_name=value) for name, value in classes.items()}
    if args.processors is not None:
        real = [name for name in real_families(args.processors) if name in CONFIG_MAPPING]
        parts = {f"{name}_thinker" for name in real}  # of the same models
        work = {name: value for name, value in work.items() if name not in parts}
        work |= {
            name: functools.partial(measure_real, path=args.processors, class_name=classes.get(name)) for name in real
        }
    if args.only is not None:
        if unknown := [name for name in args.only if name not in work]:
            raise ValueError(
                f"there is no family {unknown[0]!r}; those that can be measured: {', '.join(sorted(work))}"
            )
        work = {name: work[name] for name in args.only}
    found = []
    for n, each in enumerate(measure_all(dict(sorted(work.items())), args.time_limit, args.num_workers), 1):
        found.append(each)
        print(f"[{n}/{len(work)}] {' | '.join(cells(each))}", file=sys.stderr)
    text = table(found)
    print(text, end="")
    if args.output is not None:
        file = Path(args.output)
        before = file.read_text(encoding="utf-8").partition(MARK)[0] if file.exists() else ""
        file.write_text(f"{before}{MARK}\n\n{text}", encoding="utf-8")


# What stands before measurements in a file
MARK = "<!-- measured -->"

HEADER = ("family", "media", "processor", "scored", "log-probs", "gradient", "shared prefill", "vLLM", "remark")


def cells(found: "Measurement") -> tuple[str, ...]:
    """One row of the table of measurements."""
    numbers = ["" if number is None else f"{number:.0e}" for number in (found.logps, found.gradient)]
    vllm = VLLM.get(found.family.removesuffix("_thinker"), "")
    if vllm == "yes" and (missing := family_of(found.family).not_in_vllm):
        vllm = f"but {', '.join(missing)}"
    real = "real" if found.real else "made up" if found.kinds else ""
    return (found.family, found.kinds, real, found.mode, *numbers, found.sharing, vllm, found.note)


def table(measured: "list[Measurement]") -> str:
    """Measurements in Markdown."""
    modes = [each.mode.split(":")[0] for each in measured]
    totals = ", ".join(f"{modes.count(mode)} {mode}" for mode in sorted(set(modes), key=modes.count, reverse=True))
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "trl", "torch"))
    rows = [HEADER, tuple("---" for _ in HEADER), *map(cells, measured)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return f"With {versions}: {totals}.\n\n" + "\n".join(lines) + "\n"
