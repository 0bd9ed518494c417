# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A contributor's day: follows the rows of CONTRIBUTING.md, one addition each, in a copy of the repository.

The rows name the files and the commands. What an addition writes anywhere else is an error, as is a command that the
row doesn't name. Then `make fix` has to write what follows from other changes, and the default tests that look at all
of them to pass. `python tests/contributor.py` prints each step.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from helpers.fork_server import IMPORTED
from helpers.forked import ADDRESS


ROOT = Path(__file__).parents[1]
PACKAGE = "trl_multimodal_rft"
TEXTS = Path(__file__).with_suffix(".txt")
FAMILY = "vipllava"


def additions() -> dict[str, list[tuple[str, str, str]]]:
    """
    Returns the additions of `contributor.txt` by the rows that they follow: for each file its path, text and where.

    The text of a file that isn't there is all of it; otherwise it stands below the first line that begins with what
    follows `|`, or at the end. What follows `<` is a trainer's file of which the new one is a copy under another name.
    """
    found = {}
    for section in re.split(r"^=== ", TEXTS.read_text(), flags=re.MULTILINE)[1:]:
        title, *files = re.split(r"^--- ", section, flags=re.MULTILINE)
        heads = [file.partition("\n")[::2] for file in files]
        found[title.strip()] = [(*re.match(r"(\S+) ?(.*)", head).groups(), text) for head, text in heads]
    return found


def add(tree: Path, path: str, where: str, text: str) -> None:
    """Adds a text to a file of the copy."""
    file = tree / path
    file.parent.mkdir(exist_ok=True)
    sign, _, start = where.partition(" ")
    if sign == "<":
        file.write_text((tree / start).read_text().replace("MultimodalRLOO", "MultimodalPlain"))
    elif not file.exists():
        file.write_text(Path(__file__).read_text().partition("\n")[0] + "\n" + text)
    elif sign == "|":
        lines = file.read_text().splitlines(keepends=True)
        index = next((i for i, line in enumerate(lines) if line.lstrip().startswith(start)), None)
        if index is None:
            raise LookupError(f"{path} has no line that begins with {start!r}")
        indent = re.match(" *", lines[index])[0]
        added = [indent + line if line.strip() else line for line in text.splitlines(keepends=True)]
        file.write_text("".join([*lines[: index + 1], *added, *lines[index + 1 :]]))
    else:
        file.write_text(f"{file.read_text()}\n\n{text}")


# What looks at every name that is registered, exported or documented, and the tests of the additions
WHOLE = "architecture house docs docstrings model_card grpo_config trl_losses reference_api fix added"
PARTS = "hostile_rewards families advantages losses views ready_rewards grpo_sampling plain contract cli nothing_twice"
NEW = f"{FAMILY} greedy reinforce mirror full_stop echo plain versions every_override table help listed"
ALIKE = "reinforce_baseline [audio-plain] [image-plain]"  # named like additions, but tests of what was there before
CONFIG, OPTIONS = f"{PACKAGE}/trainers/shared/multimodal_config.py", f"{PACKAGE}/cli/options.json"
# Lines, unformatted, in a module that pages link to; a test file; and an option
CHANGES = [
    (f"{PACKAGE}/rollout/rollout.py", "| from dataclasses", "import  os\n\n\n\n"),
    ("tests/test_added.py", "", "import pytest\n\ndef test_a(): pass\n\n@pytest.mark.slow\ndef test_b(): pass\n"),
    (CONFIG, "| balance_ranks: bool", "added_option: int = 3\n"),
    (
        CONFIG,
        "| balance_ranks (`bool`",
        "    Whether to.\nadded_option (`int`, *optional*, defaults to `3`):\n    Added here.\n",
    ),
]


def rows(page: str) -> dict[str, str]:
    """Returns the rows of the table of additions, by their first cells."""
    return dict(re.findall(r"^\| (an? [^|]+) \| (.+) \|$", page, re.MULTILINE))


def named(text: str) -> tuple[list[str], list[str]]:
    """Returns patterns of the files that a row names, and its commands."""
    spans = re.findall(r"`([^`]+)`", text)
    spans = [span.replace("make fix", "python tests/fix.py") for span in spans]
    commands = [span.replace("<name>", FAMILY) for span in spans if span.startswith("python ")]
    paths = [span for span in spans if re.fullmatch(r"[\w<>*/.]+(?:/|\.(?:py|md|json))", span)]
    at_root = [path.startswith(("tests/", "docs/", "CHANGELOG", "README")) for path in paths]
    full = [path if is_full else f"{PACKAGE}/{path}" for path, is_full in zip(paths, at_root, strict=True)]
    return [re.sub(r"<\w+>", "*", path) + "*" * path.endswith("/") for path in full], commands


def run(command: list[str], tree: Path) -> str:
    """Runs a command in the copy, and returns what it prints."""
    ended = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{ended.stdout[-6000:]}{ended.stderr[-3000:]}")
    return ended.stdout


def environment(tree: Path) -> dict[str, str]:
    """Returns the environment of commands in the copy, apart from a test run of this repository."""
    outer = {name for name in os.environ if name.startswith("PYTEST_")} | {ADDRESS}
    inner = {name: value for name, value in os.environ.items() if name not in outer}
    return inner | {"PYTHONPATH": str(tree), "COLUMNS": "200"}


# A process that imports other packages once, and forks for each command of Python
FORKS = f"""
import gc, importlib, json, os, runpy, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # imports print
for name in {[name for name in IMPORTED if not name.startswith(PACKAGE)]}:
    importlib.import_module(name)
gc.freeze()
gc.set_threshold(20_000, 20, 20)
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
else:
    sys.exit()
words, output = json.loads(line)
os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
os.dup2(1, 2)
sys.argv = words[words[0] == "-m" :]
if words[0] == "-m":
    sys.path[0] = os.getcwd()
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    path = os.path.abspath(words[0])
    sys.path[0] = os.path.dirname(path)
    runpy.run_path(path, run_name="__main__")
"""


@contextmanager
def python(tree: Path) -> Iterator[Callable[[list[str]], str]]:
    """Provides a function that runs words behind `python` in the copy, and returns what the command prints."""
    with tempfile.NamedTemporaryFile() as output:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", FORKS], cwd=tree, env=environment(tree), **pipes) as forks:

            def run_forked(words: list[str]) -> str:
                forks.stdin.write(f"{json.dumps([words, output.name])}\n")
                forks.stdin.flush()
                code, printed = forks.stdout.readline().strip(), Path(output.name).read_text()
                if code != "0":
                    raise RuntimeError(f"python {' '.join(words)} failed:\n{printed[-9000:]}")
                return printed

            yield run_forked


def changed(tree: Path) -> list[str]:
    return [line[3:] for line in run(["git", "status", "--porcelain", "-uall"], tree).splitlines()]


def follow(tree: Path) -> None:
    """Makes the additions in a copy of the repository, and runs the tests. Raises an error where a row falls short."""
    subprocess.run(f"git ls-files | tar -cT - | tar -xC {tree}", shell=True, check=True, cwd=ROOT)
    git = ["git", "-c", "user.name=contributor", "-c", "user.email=contributor@localhost"]
    commit = [[*git, "add", "-A"], [*git, "commit", "-q", "-m", "addition"]]
    for command in (["git", "init", "-q"], *commit):
        run(command, tree)
    page = (tree / "CONTRIBUTING.md").read_text()
    table = rows(page)
    [common] = re.findall(r"^For each of them .*?^$", page, re.MULTILINE | re.DOTALL)
    always, finally_ = named(common)
    commands: list[str] = []
    for title, texts in additions().items():
        allowed, of_row = named(table[title])
        for path, where, text in texts:
            add(tree, path, where, text)
        changelog = tree / "CHANGELOG.md"
        changelog.write_text(changelog.read_text().replace("## [Unreleased]\n", f"## [Unreleased]\n\n- {title}\n", 1))
        if others := [path for path in changed(tree) if not is_named(path, [*allowed, *always])]:
            raise RuntimeError(f"The row of {title} doesn't name {', '.join(others)}")
        commands += [each for each in of_row if each not in commands]
        for command in commit:
            run(command, tree)
        print(title, "is added", flush=True)
    for path, where, text in CHANGES:
        add(tree, path, where, text)
    for command in commit:
        run(command, tree)
    everything = [*always, *(path for title in additions() for path in named(table[title])[0])]
    everything += [path for path, _, _ in CHANGES]
    with python(tree) as run_python:
        for command in [*commands, *finally_]:  # the last one is `make fix`
            printed = run_python(shlex.split(command)[1:])
            print(command, flush=True)
        if others := [path for path in changed(tree) if not is_named(path, everything)]:
            raise RuntimeError(f"Commands of the rows write what no row names: {', '.join(others)}")
        check_fix(printed, tree)
        pytest = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:helpers.cpu_seconds"]
        whole, parts = ([f"test_{name}.py" for name in names.split()] for names in (WHOLE, PARTS))
        files = [f"tests/{name}" for name in (*whole, *parts)]
        pytest += ["-W", "error:`make fix` would change:UserWarning"]  # it has written all of that
        pytest += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported already
        wanted = f"({' or '.join([*whole, *NEW.split()])}) and not ({' or '.join(ALIKE.split())})"
        print(run_python([*pytest, *files, "-k", wanted])[-300:], flush=True)


def check_fix(printed: str, tree: Path) -> None:
    """Raises an error unless `make fix` has written what other changes leave stale, and formatted the code."""
    written = printed.partition("make fix: ")[2].strip().split(", ")
    if missing := {"tests/test_added.py", CHANGES[0][0], OPTIONS} - {*written}:
        raise RuntimeError(f"`make fix` doesn't write {', '.join(sorted(missing))}, only {', '.join(written)}")
    for words in (["check"], ["format", "--check"]):
        run([sys.executable, "-m", "ruff", *words, "--quiet", "."], tree)


def is_named(path: str, patterns: list[str]) -> bool:
    """Returns whether a pattern has a path, in the same folder."""
    return any(fnmatch(path, pattern) and path.count("/") == pattern.count("/") for pattern in patterns)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        follow(Path(folder))
