# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sources of the values of a recipe, from the comments in its file. Files of sources' values have the same form."""

import re
from typing import NamedTuple

import yaml


# A file at a commit, whose lines don't move
_PINNED = re.compile(r"https://(?:github\.com|huggingface\.co)/\S+/blob/[0-9a-f]{40}/\S+")
# Separates the origins of a value. A semicolon before other text belongs to a note.
_SEVERAL = re.compile(r"; (?=\w+(?: L\d|:|$))")
_PAPER = re.compile(r"https://huggingface\.co/papers/([\d.]+)")


class Origin(NamedTuple):
    """Where a value was read: a file's name and its lines, a paper with a note, or `ours`."""

    name: str
    lines: str = ""
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.lines}".rstrip()


def header(text: str) -> dict[str, list[str]]:
    """Returns the fields in a recipe's comments by name: lists of lines."""
    fields: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        match = re.match(r"# (?:(\w+):| {8,})\s+(.*)", line)
        if match:
            name = match[1] or name
            fields.setdefault(name, []).append(match[2])
    return fields


def method(text: str) -> str:
    """Returns the command that trains with a recipe, such as `grpo`."""
    return re.search(r"trl-multimodal-rft (\w+) --config", " ".join(header(text)["Launch"]))[1]


def sources(text: str) -> dict[str, str]:
    """Returns URLs by the names of sources, from lines such as `# Sources: easyr1 https://...` and the lines below."""
    urls = {}
    in_sources = False
    for line in text.splitlines():
        field = re.match(r"# (\w+): ", line)
        in_sources = field[1] == "Sources" if field else in_sources
        entry = re.fullmatch(r"#(?: Sources:)?\s+(\w+) (https://\S+)", line)
        if in_sources and entry:
            urls[entry[1]] = entry[2]
    return urls


def origins(text: str) -> dict[str, tuple[Origin, ...]]:
    """
    Returns origins by key of a recipe. `beta: 0.01  # easyr1 L38: kl_coef` has `Origin("easyr1", "L38", "kl_coef")`.

    The comment names a source with lines, or a paper with a note, or is `ours`. `; ` separates several origins.
    """
    urls = sources(text)
    names = {}
    for name, url in urls.items():
        if not (_PINNED.fullmatch(url) or _PAPER.fullmatch(url)):
            raise ValueError(f"source {name}: {url} may change; link to a file at a commit, or to a paper.")
    for line in text.splitlines():
        parts = re.match(r"(\w+): +(.+)", line)
        if not parts:
            continue
        key, value_and_comment = parts.groups()
        value, mark, comment = value_and_comment.partition("  # ")
        if not mark:
            raise ValueError(f"{key}: no comment says where {value} was read; name a source and its line, or `ours`.")
        names[key] = tuple(_origin(key, origin, urls) for origin in _SEVERAL.split(comment))
    if [*names] != list(yaml.safe_load(text)):
        raise ValueError("a key has no line of its own; write its value behind it.")
    return names


def _origin(key: str, comment: str, urls: dict[str, str]) -> Origin:
    parts = re.fullmatch(r"(\w+)(?: (L\d+(?:-L\d+)?))?(?:: (.+))?", comment)
    if parts is None:
        raise ValueError(f"{key}: {comment!r} is no `name L1`, `name L1-L2`, `name L1: note`, or `ours`.")
    name, lines, note = parts.groups()
    origin = Origin(name, lines or "", note or "")
    if name == "ours" and lines is None:
        return origin
    if name not in urls:
        raise ValueError(f"{key}: `Sources:` has no {name}, only {sorted(urls)}; add it, or correct the name.")
    is_paper = _PAPER.fullmatch(urls[name]) is not None
    if is_paper == (lines is not None) or (is_paper and not note):
        raise ValueError(f"{key}: {comment!r}; name the line of a file, or what of a paper in a note.")
    return origin
