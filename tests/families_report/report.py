# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Measures tiny models of all families and writes the table of `docs/generated/families.md`."""

import argparse
import functools
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import transformers
from helpers.families import ALL_FAMILIES
from transformers import CONFIG_MAPPING

from trl_multimodal_rft.cli.families import classes_with_media
from trl_multimodal_rft.families import FAMILIES, family_of
from trl_multimodal_rft.modalities import MODALITIES

from .measure import Measurement, measure_all, measure_class, measure_real


# Results in `docs/vllm.md` for families that ran with vLLM, except for media that vLLM tokenizes differently
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


def measurable() -> dict[str, str]:
    """Returns families that complete prompts with media, each class once."""
    found: dict[str, str] = {}
    parts = {model_type for family in FAMILIES for model_type in family.trained_part}
    for model_type, name in sorted(classes_with_media().items()):
        model_class = getattr(transformers, name)
        takes_media = not {*MODALITIES}.isdisjoint(model_class.input_modalities)
        if model_type in parts or not takes_media or name in found.values() or not model_class.can_generate():
            continue
        try:
            if not model_class.config_class().is_encoder_decoder:
                found[model_type] = name
        except ValueError:  # a pair of an encoder and a decoder, which older versions don't build without both
            continue
    return found


# Text before the measurements in a file
MARK = "<!-- measured -->"
# Text before what another version of transformers gives
DIFFERENCES = "<!-- differences -->"

HEADER = ("family", "media", "processor", "scored", "log-probs", "gradient", "shared prefill", "vLLM", "remark")


def cells(found: Measurement) -> tuple[str, ...]:
    """Returns one row of the table of measurements, which says what fails without the text of an exception."""
    numbers = ["" if number is None else f"{number:.0e}" for number in (found.logps, found.gradient)]
    vllm = VLLM.get(found.family.removesuffix("_thinker"), "")
    missing = family_of(found.family).not_in_vllm
    if vllm == "yes" and missing:
        vllm = f"but {', '.join(missing)}"
    real = "real" if found.real else "synthetic" if found.kinds else ""
    row = (found.family, found.kinds, real, found.mode, *numbers, found.sharing, vllm, found.note)
    return tuple(re.sub(r"(: )?\b\w+Error: [^;]*", "", cell) for cell in row)


def summary(rows: Sequence[tuple[str, ...]]) -> str:
    modes = [row[HEADER.index("scored")].split(":")[0] for row in rows]
    totals = ", ".join(f"{modes.count(mode)} {mode}" for mode in sorted(set(modes), key=modes.count, reverse=True))
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "trl", "torch"))
    return f"With {versions}: {totals}."


def table(rows: list[tuple[str, ...]], header: tuple[str, ...] = HEADER) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in lines)


def with_table(page: str, measured: list[Measurement], with_rest: bool = False) -> str:
    """Replaces a page's table, or with the rest of it these families' rows."""
    text, _, stored = page.partition(MARK)
    rows = [tuple(line[2:-2].split(" | ")) for line in stored.splitlines()[6:]] if with_rest else []
    rows = sorted({row[0]: row for row in [*rows, *map(cells, measured)]}.values())
    return f"{text}{MARK}\n\n{summary(rows)}\n\n{table(rows)}"


def with_differences(page: str, measured: list[Measurement]) -> str:
    """Replaces a page's differences from its table, which another version of transformers gave."""
    modes = dict(re.findall(r"^\| (\S+) \| [^|]*\| (?:real|synthetic|) ?\| ([^|]*) \|", page, re.MULTILINE))
    shown = [dict(zip(HEADER, cells(each), strict=True)) for each in measured]
    other = [(row["family"], modes.get(row["family"], "not in it"), row["scored"], row["remark"]) for row in shown]
    rows = table([row for row in other if row[1] != row[2]], ("family", "in the table", "here", "remark"))
    missing = ", ".join(f"`{name}`" for name in sorted(modes.keys() - {each.family for each in measured}))
    absent = f"Not in this version, or without its media: {missing}. Scored otherwise than in the table below:"
    text = f"{summary([*map(cells, measured)])} {absent}\n\n{rows}"
    return re.sub(rf"(?<={DIFFERENCES}\n).*?(?=\n## )", lambda match: f"\n{text}", page, count=1, flags=re.DOTALL)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures families, prints the table, and writes it into a page."""
    parser = argparse.ArgumentParser("families_report", description=__doc__)
    add = parser.add_argument
    add(
        "--only",
        type=lambda names: names.split(","),
        help="families to measure, such as qwen2_audio,qwen2_5_vl; others keep their rows",
    )
    add("--synthetic", action="store_true", help="random tensors instead of what processors return, for all families")
    add("--output", type=Path, help="page in Markdown whose table is replaced")
    add("--differences", action="store_true", help="replace the page's differences from its table instead")
    args = parser.parse_args(argv)
    classes = measurable()
    work = {name: functools.partial(measure_class, class_name=value) for name, value in classes.items()}
    for name in () if args.synthetic else ALL_FAMILIES.keys() & {*CONFIG_MAPPING}:
        work.pop(f"{name}_thinker", None)  # part of the same model
        work[name] = functools.partial(measure_real, class_name=classes.get(name))
    if args.only is not None:
        unknown = [name for name in args.only if name not in work]
        if unknown:
            parser.error(f"there is no family {unknown[0]!r}; those that can be measured: {', '.join(sorted(work))}")
        work = {name: work[name] for name in args.only}
    found = []
    for n, each in enumerate(measure_all(dict(sorted(work.items()))), 1):
        found.append(each)
        print(f"[{n}/{len(work)}] {' | '.join(cells(each)[:-1])} | {each.note}", file=sys.stderr)
    rows = [*map(cells, found)]
    print(summary(rows), table(rows), sep="\n\n", end="")
    if args.output is not None:
        page = args.output.read_text(encoding="utf-8")
        with_rest = args.only is not None
        page = with_differences(page, found) if args.differences else with_table(page, found, with_rest)
        args.output.write_text(page, encoding="utf-8")
