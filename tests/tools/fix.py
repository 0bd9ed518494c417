# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Writes what follows from the rest of the repository; `make fix` runs it.

It formats the code and writes the table of options and its page, the page of what recipes have otherwise than their
sources, and the drawing of the package; in README and docs counts, lists of commands, LightRFT's options, differences
from TRL, the self-check's example, pinned versions, and entries of public names on the reference pages. No test fails
where one of these is stale, but for LightRFT's options and the recipes' page.
"""

import pkgutil
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from itertools import chain, groupby
from pathlib import Path


sys.path.append(str(Path(__file__).parents[1]))

import difference_sheets  # noqa: E402
import house  # noqa: E402
import trl  # noqa: E402
from families_report.report import MARK  # noqa: E402
from helpers import reference_pages  # noqa: E402
from packaging.requirements import Requirement  # noqa: E402
from parity import difference_page  # noqa: E402

import trl_multimodal_rft  # noqa: E402
from trl_multimodal_rft import data, evaluation, lightrft, models, rewards, trainers  # noqa: E402
from trl_multimodal_rft.checks.self_check import SelfCheck  # noqa: E402
from trl_multimodal_rft.cli import LAUNCHED  # noqa: E402
from trl_multimodal_rft.lazy import lazy_names  # noqa: E402
from trl_multimodal_rft.lightrft.strategy import RULES  # noqa: E402
from trl_multimodal_rft.policy import Fallbacks  # noqa: E402
from trl_multimodal_rft.versions import UNTESTED  # noqa: E402


ROOT = Path(__file__).parents[2]
README, FAMILIES, INSTALL = (ROOT / name for name in ("README.md", "docs/generated/families.md", "docs/install.md"))
LIGHTRFT = ROOT / "docs" / "from_lightrft.md"
DIFFERENCES = ROOT / "docs" / "compare.md"
COLUMNS = ROOT / "tests" / "columns"
PUBLIC = [trl_multimodal_rft, data, evaluation, lightrft, models, rewards, trainers]
SELF_CHECK = SelfCheck(
    features=0.0,
    padded=1e-6,
    packed=5e-7,
    media={"audio": 0.29},
    rows=5e-7,
    sampled=5e-7,
    changes=("no media tokens",),
    changed=8e-3,
    training=0.0,
    tolerance=7e-4,
    fallbacks=Fallbacks(),
)


def pages() -> list[Path]:
    """Returns README, CONTRIBUTING and the pages below docs/."""
    return [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def without_lines(text: str) -> str:
    """Returns a page whose links to names in code have no numbers of lines: the site finds these."""
    return re.sub(r"(\[`[\w.]+`\]\([\w./]+\.py)#L\d+\)", r"\1)", text)


# Numbers


def counts() -> Iterator[tuple[Path, str, int]]:
    """Yields each number that a page states: the page, a pattern of the text around it, and its value."""
    cells = [line.strip("| ").split(" | ") for line in FAMILIES.read_text().partition(MARK)[2].splitlines()]
    rows = [row for row in cells if len(row) > 3 and row[0] not in ("family", "---")]

    def scored(*modes: str) -> int:
        return sum(row[3] in modes for row in rows)

    yield README, r"for (\d+) families, without changes", sum(row[2] == "real" for row in rows)
    yield README, r"^\| prompt once \| (\d+) \|", scored("packed")
    yield README, r"^\| once; [^|]+ \| (\d+) \|", scored("packed (isolated)")
    yield README, r"^\| prompt in each row, as TRL \| (\d+) \|", scored("padded", "padded (isolated)")
    yield README, r"^\| refused \| (\d+) \|", scored("refused")
    yield ROOT / "docs" / "models.md", r"table of (\d+) families", len(rows)


def with_number(text: str, around: str, number: int) -> str:
    """Returns a page with a number in the place of the pattern's group. Raises a `LookupError` without a match."""
    found = re.search(around, text, re.MULTILINE)
    if found is None:
        raise LookupError(f"No text matches {around!r}: correct that in tests/tools/fix.py, or take it out.")
    return f"{text[: found.start(1)]}{number}{text[found.end(1) :]}"


# Lists


def lists() -> Iterator[tuple[Path, str, str, Collection[str]]]:
    """Yields each list of names in a page: the page, the texts before and behind the list, and the names."""
    others = ROOT / "docs" / "from_others.md"
    of_trl = [f"{name}Trainer" for name in house.trainers() if hasattr(trl, f"{name}Trainer")]
    yield ROOT / "docs" / "launch.md", "as `trl grpo` does: ", ".\n", LAUNCHED
    yield others, "| TRL | here |\n|---|---|\n| ", " and their configs", of_trl
    train = [name for name in LAUNCHED if name not in ("evaluate", "filter")]
    yield others, " | `trl-multimodal-rft ", ", with the same", train


def with_names(text: str, before: str, behind: str, names: Collection[str]) -> str:
    """Returns a page whose list, separated by commas, has these names: new ones at its end, the others unchanged."""
    start = text.find(before) + len(before)
    end = text.find(behind, start)
    if start < len(before) or end < 0:
        raise LookupError(f"No list is between {before!r} and {behind!r}: correct that in tests/tools/fix.py.")
    items = text[start:end].split(", ")
    found = [re.search(r"(\w+)(?: --help)?`", item)[1] for item in items]
    kept = [item for name, item in zip(found, items, strict=True) if name in names]
    return text[:start] + ", ".join([*kept, *(f"`{name}`" for name in names if name not in found)]) + text[end:]


_PAGES = {"Config": "configs.md", "Trainer": "trainers.md", "Callback": "trainers.md"}


def undocumented() -> Iterator[tuple[Path, str]]:
    """Yields public names that no reference page has, each with the page for it."""
    folder = ROOT / "docs" / "reference"
    entries = {each for page in folder.glob("*.md") for each in re.findall(r"^::: (\S+)$", page.read_text(), re.M)}
    objects = [pkgutil.resolve_name(name) for name in sorted(entries)]
    for package in PUBLIC:
        for name in dir(package):  # includes lazy imports
            value = getattr(package, name)
            is_public = not name.startswith("_") and hasattr(value, "__qualname__") and value is not lazy_names
            if not is_public or value.__module__ in entries or value in objects:
                continue
            kind = re.search("(Trainer|Config|Callback)?$", name)[1]
            page = folder / _PAGES.get(kind, f"{package.__name__.rpartition('.')[2]}.md")
            objects.append(value)
            full = f"{package.__name__ if kind else value.__module__}.{name}"
            yield page if page.exists() else folder / "encoding.md", full


def with_entry(text: str, name: str) -> str:
    """Returns a reference page with an entry for a name, below the last one of its kind, with the same options."""
    kind = re.search("(?:Trainer|Config|Callback)?$", name)[0]
    [*_, last] = re.finditer(rf"^::: \S+{kind}$(?:\n    .*)*", text, re.MULTILINE)
    entry = re.sub(r"^::: \S+", f"::: {name}", last[0])
    return f"{text[: last.end()]}\n\n{entry}{text[last.end() :]}"


def lightrft_table() -> str:
    """Returns the table of LightRFT's options: what each becomes, with a row for neighbours of the same meaning."""
    lines = ["| option of LightRFT | field of the config, or where it goes |", "|---|---|"]
    for (meaning, is_refused), items in groupby(RULES.items(), lambda item: (item[1].meaning, not item[1].convert)):
        names = ", ".join(f"`{name}`" for name, _ in items)
        lines.append(f"| {names} | {'error: ' * is_refused}{meaning} |")
    return "\n".join(lines)


def with_block(text: str, name: str, block: str) -> str:
    """Returns a page with a block between its markers `<!-- name -->` and `<!-- end of name -->`."""
    before, start, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"\n<!-- end of {name} -->")
    if not end:
        raise LookupError(f"No markers of {name!r} are in the page: correct that in tests/tools/fix.py.")
    return f"{before}{start}\n{block}\n{end}{after}"


# Versions, examples, and files beside the pages


def versions_table() -> str:
    """Returns the table of versions of other packages that fit this version, from its requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    cells = {"this version": project["version"]}
    for requirement in map(Requirement, requirements):
        ends = {end.operator: end.version for end in requirement.specifier}
        end = ends.get("<", UNTESTED.get(requirement.name))
        if end is not None:
            major, minor = end.split(".")
            last = f"{major}.{int(minor) - 1}"
            cells[requirement.name] = last if last == ends[">="] else f"{ends['>=']} to {last}"
    names = sorted(cells, key=lambda name: (name != "this version", name != "trl", name != "transformers"))
    rows = [names, ["---"] * len(names), [cells[name] for name in names]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def with_versions(text: str, column: Path) -> str:
    """Returns the page of versions with the pins of a column's file in the row of that column."""
    names = re.search(r"^\| command \| Python \| (.*) \|$", text, re.MULTILINE)[1].split(" | ")
    row = re.search(rf"^\| `make test-{column.stem}` \| [\d.]+ \| (.*) \|$", text, re.MULTILINE)
    pins = dict(re.findall(r"^([\w-]+?)(?:-cpu)?==([\d.]+)", column.read_text(), re.MULTILINE))
    cells = dict(zip(names, row[1].split(" | "), strict=True))
    cells = [re.sub(r"^[\d.]+", pins.get(name, "\\g<0>"), cell) for name, cell in cells.items()]
    return f"{text[: row.start(1)]}{' | '.join(cells)}{text[row.end(1) :]}"


def derived() -> dict[Path, str]:
    """Returns the text of each derived file. Raises a `LookupError` if a page lost such a place."""
    texts = {page: without_lines(page.read_text()) for page in pages()}
    for page, around, number in counts():
        texts[page] = with_number(texts[page], around, number)
    for page, before, behind, names in lists():
        texts[page] = with_names(texts[page], before, behind, names)
    for page, name in undocumented():
        texts[page] = with_entry(texts[page], name)
    for column in sorted(COLUMNS.glob("*.txt")):
        texts[INSTALL] = with_versions(texts[INSTALL], column)
    texts[INSTALL] = with_block(texts[INSTALL], "versions", versions_table())
    texts[LIGHTRFT] = with_block(texts[LIGHTRFT], "options", lightrft_table())
    texts[LIGHTRFT] = with_block(texts[LIGHTRFT], "pages", reference_pages.table())
    texts[DIFFERENCES] = with_block(texts[DIFFERENCES], "differences", difference_page.tables())
    texts[README] = re.sub(r"^self-check: [^`]*", lambda _: f"{SELF_CHECK}\n", texts[README], flags=re.MULTILINE)
    texts[difference_sheets.PAGE] = difference_sheets.page()
    texts |= runpy.run_path(str(ROOT / "docs" / "refresh_options.py"))["stored"]()
    drawing = runpy.run_path(str(ROOT / "docs" / "draw_architecture.py"))
    texts[drawing["PICTURE"]] = drawing["picture"]()
    return texts


def stale(texts: dict[Path, str]) -> list[str]:
    """Returns the names of the files whose text differs."""
    return [str(path.relative_to(ROOT)) for path, text in texts.items() if path.read_text() != text]


def main() -> int:
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]  # not those of environments
    paths = [ROOT / name for name in subprocess.check_output(git, cwd=ROOT, text=True).splitlines()]
    before = {path: path.read_bytes() for path in paths if path.exists()}
    ruff = [sys.executable, "-m", "ruff"]
    is_wrong = subprocess.run([*ruff, "check", "--fix", "--quiet", "."], cwd=ROOT).returncode
    subprocess.run([*ruff, "format", "--quiet", "."], cwd=ROOT, check=True)
    changed = [str(path.relative_to(ROOT)) for path, content in before.items() if path.read_bytes() != content]
    texts = derived()
    changed += stale(texts)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print("make fix:", ", ".join(sorted(changed)) or "nothing was stale")
    return is_wrong


if __name__ == "__main__":
    sys.exit(main())
