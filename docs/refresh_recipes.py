# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`python docs/refresh_recipes.py` writes the tables of recipes.md that say where each value of a recipe was read."""

import re
from pathlib import Path

import yaml


PAGE = Path(__file__).with_name("recipes.md")
FOLDER = Path(__file__).parents[1] / "trl_multimodal_rft" / "recipes"
START = "<!-- `python docs/refresh_recipes.py` writes what follows -->\n"

# A file at a commit, whose lines don't move, or a paper
_PINNED = re.compile(r"https://(?:github\.com|huggingface\.co)/\S+/blob/[0-9a-f]{40}/\S+")
# Between the origins of a value, and not in a note
_SEVERAL = re.compile(r"; (?=\w+(?: L\d|:|$))")
_PAPER = re.compile(r"https://huggingface\.co/papers/[\d.]+")


def sources(text: str) -> dict[str, str]:
    """URLs in the field `Sources:` of a recipe's comments, by the names that its keys use."""
    found, inside = {}, False
    for line in text.splitlines():
        field = re.match(r"# (\w+): ", line)
        inside = field[1] == "Sources" if field else inside
        if inside and (named := re.fullmatch(r"#(?: Sources:)?\s+(\w+) (https://\S+)", line)):
            found[named[1]] = named[2]
    return found


def rows(text: str) -> list[tuple[str, str, str]]:
    """
    Key, value and origin of each line of a recipe, such as `beta: 0.01  # easyr1 L38: kl_coef`.

    The comment names a source with its lines, or a paper with a note, or is `ours`; several are separated by `; `.
    """
    urls, found = sources(text), []
    for name, url in urls.items():
        if not (_PINNED.fullmatch(url) or _PAPER.fullmatch(url)):
            raise ValueError(f"source {name}: {url} may change; link to a file at a commit, or to a paper.")
    for line in text.splitlines():
        if not (parts := re.match(r"(\w+): +(.+)", line)):
            continue
        key, rest = parts.groups()
        value, mark, comment = rest.partition("  # ")
        if not mark:
            raise ValueError(f"{key}: no comment says where {value} was read; name a source and its line, or `ours`.")
        found.append((key, value.strip(), "; ".join(_origin(key, each, urls) for each in _SEVERAL.split(comment))))
    if [key for key, _, _ in found] != list(yaml.safe_load(text)):
        raise ValueError("a key has no line of its own; write its value behind it.")
    return found


def _origin(key: str, comment: str, urls: dict[str, str]) -> str:
    parts = re.fullmatch(r"(\w+)(?: L(\d+)(?:-L(\d+))?)?(?:: (.+))?", comment)
    if parts is None:
        raise ValueError(f"{key}: {comment!r} is no `name L1`, `name L1-L2`, `name L1: note`, or `ours`.")
    name, first, last, note = parts.groups()
    note = f": {note}" if note else ""
    if name == "ours" and first is None:
        return f"ours{note}"
    if name not in urls:
        raise ValueError(f"{key}: `Sources:` has no {name}, only {sorted(urls)}; add it, or correct the name.")
    if _PAPER.fullmatch(urls[name]) and first is None and note:
        return f"[{name}]({urls[name]}){note}"
    if _PAPER.fullmatch(urls[name]) or first is None:
        raise ValueError(f"{key}: {comment!r}; name the line of a file, or what of a paper in a note.")
    lines = f"L{first}" + (f"-L{last}" if last else "")
    return f"[{name} {lines}]({urls[name]}#{lines}){note}"


def tables() -> str:
    """One table per recipe."""
    found = []
    for path in sorted(FOLDER.rglob("*.yaml")):
        name = path.relative_to(FOLDER).with_suffix("").as_posix()
        try:
            cells = [" | ".join((f"`{key}`", f"`{value}`", origin)) for key, value, origin in rows(path.read_text())]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        found.append(
            "\n".join([f"### {name}\n", "| key | value | read in |", "|---|---|---|", *(f"| {c} |" for c in cells)])
        )
    return "\n\n".join(found) + "\n"


def refreshed(page: str) -> str:
    """The page's text with the tables as the recipes are now."""
    return page.partition(START)[0] + START + "\n" + tables()


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text()))
