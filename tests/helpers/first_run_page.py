# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The commands on pages, and files on those for a user's first day. It imports the standard library alone."""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess


@dataclass(frozen=True)
class Part:
    """A part of `docs/first_run.md`, below a title."""

    name: str

    def read_text(self) -> str:
        text = (Path(__file__).parents[2] / "docs" / "first_run.md").read_text()
        return re.search(rf"^## {self.name}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]


Page = Path | Part
RECORDINGS = Part("A folder of recordings")
PAIRS = Part("Answers that people compared")
AGENT = Part("A tool that shows")
BY_HAND = ("hf ", "trl-multimodal-rft chat ")  # commands that need an account, or a browser


def write_files(folder: Path, page: Page = RECORDINGS) -> None:
    """Writes the files whose text a page shows."""
    for name, text in re.findall(r"^```\w+\n# (\S+\.\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        (folder / name).write_text(text)


def typed(page: Page = RECORDINGS) -> list[tuple[str, str]]:
    """Returns commands of a page with their outputs: the next fence if it names no language, else an empty string."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    commands = []
    for (language, text), (following, shown) in zip(fences, [*fences[1:], ("text", "")], strict=True):
        lines = text.replace("\\\n", " ").splitlines() if language == "bash" else []
        commands += [(line, "" if following else shown) for line in lines if not line.startswith(BY_HAND)]
    return commands


def commands(page):
    """Returns the words of each command in a page's shell blocks, without variables, redirections and placeholders."""
    text = "".join(re.findall(r"^```(?:ba)?sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
    open_quote = ""
    for line in text.replace("\\\n", " ").splitlines(keepends=True):
        open_quote += line.partition(" > ")[0]
        try:
            words = [word for word in shlex.split(open_quote, comments=True) if word != "..."]
        except ValueError:  # the quote continues in the next line
            continue
        open_quote = ""
        while words and re.match(r"\w+=", words[0]):
            del words[0]
        if words:
            yield words


def masked(console: str, folder: Path) -> list[str]:
    """Returns lines of output with constants for numbers, times, folders and completions, which differ by run."""
    text = console.replace(str(folder), "FOLDER").split("\r")[-1]  # after the last state of a progress bar
    text = re.sub(r"(?m)^completion \(.*", "completion", text)
    return re.sub(r"(?<!\w)-?\d[\d,]*(?<!,)(\.\d+)?(e[-+]?\d+)?( (s|min|h|k|M|B)\b)?", "N", text).splitlines()


def play(
    command: Callable[..., CompletedProcess], folder: Path, page: Page = RECORDINGS
) -> dict[str, CompletedProcess]:
    """Runs the commands of a page. Asserts that they print the page's lines in order. Returns results by command."""
    runs = {}
    for line, shown in typed(page):
        runs[line] = command(*shlex.split(line)[1:])
        printed = masked(runs[line].stdout, folder)
        remaining = iter(printed)
        missing = [text for text in masked(shown, folder) if text not in remaining]
        assert not missing, "\n".join([line, *missing, "isn't in", *printed])
        # A dry run writes no folder
        assert not line.endswith("digits.yaml --dry_run") or not (folder / "digits").exists()
    return runs
