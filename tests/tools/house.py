# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Reads the package's modules: what imports what, their layers, names, and overrides of TRL.

```bash
python tests/tools/house.py                          # prints the lines of each folder per planted defect
python tests/tools/house.py --changed-since HEAD~3   # prints the test files that import what has changed
```
"""

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache, partial
from pathlib import Path


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trl_multimodal_rft"
DEFECTS = Path(__file__).with_name("mutations.json")
UNCLEAR = {"each", "found", "own", "given", "taken"}  # no names of local variables, either


# The interface with TRL


def exported(end: str) -> dict[str, type]:
    """Returns the package's trainers (`"Trainer"`) or configs (`"Config"`) by their methods, such as `"GRPO"`."""
    import trl_multimodal_rft

    names = {name: re.fullmatch(rf"Multimodal(\w+){end}", name) for name in dir(trl_multimodal_rft)}
    return {found[1]: getattr(trl_multimodal_rft, name) for name, found in names.items() if found}


def trainers() -> dict[str, type]:
    return exported("Trainer")


def is_own(each: type) -> bool:
    return each.__module__.split(".")[0] == PACKAGE.name


def overrides(trainer: type) -> set[str]:
    """Returns `Class.method` for methods of this package's trainers that TRL's or transformers' classes have, too."""
    bases = [each for each in trainer.__mro__ if not is_own(each) and each is not object]
    upstream = {name for base in bases for name in vars(base)}
    return {
        f"{each.__name__}.{name}"
        for each in trainer.__mro__
        if is_own(each)
        for name, value in vars(each).items()
        if name in upstream
        and not name.startswith("__")
        and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
    }


# Modules


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def names_by_source(path: Path) -> dict[str, set[str]]:
    """
    Returns for each module that a file imports, at any depth, the names that it takes from it: imported ones, and
    attributes such as `module.name`. `import module` takes none.
    """
    package = ".".join(path.relative_to(ROOT).parent.parts)
    found: dict[str, set[str]] = defaultdict(set)
    full: dict[str, str] = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found[source] |= {each.name for each in node.names}
            full |= {each.asname or each.name: f"{source}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name: found[each.name] for each in node.names}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in full:
            found[full[node.value.id]].add(node.attr)
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Returns the known modules that a module imports; for a name that a package offers, the module with it, too."""

    def homes(source: str, name: str) -> set[str]:
        if f"{source}.{name}" in known:
            return {f"{source}.{name}"}
        if source not in known or known[source].name != "__init__.py":
            return {source}
        offered = names_by_source(known[source]).items()
        return {source}.union(*(homes(other, name) for other, names in offered if name in names))

    sources = names_by_source(path).items()
    found = {each for source, names in sources for name in names for each in homes(source, name)}
    return (found | {source for source, names in sources if not names}) & known.keys()


def import_circles() -> list[list[str]]:
    """Returns modules that import each other, directly or indirectly. Lazy names of a package are no imports of it."""
    known = modules()
    lazy = {name for name, path in known.items() if path.name == "__init__.py" and "lazy_names(" in path.read_text()}
    reached = {name: set() if name in lazy else imports(path, known) - {name} for name, path in known.items()}
    for through in known:
        for name in known:
            if through in reached[name]:
                reached[name] |= reached[through]
    circles = {frozenset(other for other in reached[name] if name in reached[other]) for name in known}
    return sorted(sorted(circle) for circle in circles if len(circle) > 1)


def changed_since(commit: str) -> list[str]:
    """Returns the paths of files that differ from a commit."""
    git = partial(subprocess.check_output, cwd=ROOT, text=True)
    paths = git(["git", "diff", "--name-only", "--no-renames", commit]).split()
    return paths + git(["git", "ls-files", "--others", "--exclude-standard"]).split()


def modules_and_tests() -> dict[str, Path]:
    """Returns the modules of the package, examples, benchmarks and tests, by the names that import them."""
    known = modules()
    for folder in ("examples", "benchmarks"):
        known |= {path.stem: path for path in (ROOT / folder).glob("*.py")}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name.startswith("test_"):
            known[".".join(path.relative_to(ROOT / "tests").with_suffix("").parts)] = path
        elif (path.parent / "__init__.py").exists():
            known[f"{path.parent.name}.{path.stem}"] = path
        else:
            known[path.stem] = path
    return known


def tests_changed_since(commit: str) -> list[str]:
    """Returns the test files that have changed since a commit, or that import what has, at any depth."""
    known = modules_and_tests()
    paths = changed_since(commit)
    affected = {name for name, path in known.items() if str(path.relative_to(ROOT)) in paths}
    importers = defaultdict(set)
    for name, path in known.items():
        for imported in imports(path, known):
            importers[imported].add(name)
    waiting = [*affected]
    while waiting:
        new = importers[waiting.pop()] - affected
        affected |= new
        waiting += new
    return sorted(str(known[name].relative_to(ROOT)) for name in affected if known[name].name.startswith("test_"))


# Layers


def layers() -> list[str]:
    """Returns the modules of docs/architecture.md, each above those that it imports, from outside of the core down."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    core, _, beyond = page.partition("\n## Outside of the core\n")
    return [name for table in (beyond, core) for name in re.findall(r"^\| \[`(\w+)[`./py]+\]", table, re.MULTILINE)]


def outside() -> list[str]:
    """Returns the folders of the package that docs/architecture.md lists as outside of the core."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("\n## Outside of the core\n")[1].split("\n## ")[0]
    return re.findall(r"^\| \[`([\w/]+)/`\]", table, re.MULTILINE)


# Names and types


@cache
def trees() -> dict[str, ast.Module]:
    """Returns the syntax trees of the package's modules, by their names within it."""
    return {name.removeprefix(f"{PACKAGE.name}."): tree_of(path) for name, path in modules().items()}


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    given = function.args
    stars = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *stars]


def glossary() -> tuple[list[str], set[str]]:
    """Returns the terms of docs/glossary.md, and the words in code that don't occur in names."""
    _, _, text = (ROOT / "docs" / "glossary.md").read_text().partition("| term |")
    table, _, below = text.partition("\n\n")
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    words = " ".join([*(row[2] for row in rows if len(row) == 3), below.partition("such as")[2]])
    return [row[0] for row in rows], {*re.findall(r"`(\w+)`", words)}


def names_outside_the_glossary(modules: dict[str, ast.Module]) -> list[str]:
    """Returns names that the glossary excludes: of modules, functions, classes, parameters, attributes and locals."""
    found = []
    (_, words) = glossary()
    for module, tree in modules.items():
        names = {module.rpartition(".")[2]}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names |= {node.name, *(each.arg for each in parameters(node))}
            elif isinstance(node, ast.ClassDef):
                names |= {node.name, *(each.target.id for each in node.body if isinstance(each, ast.AnnAssign))}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if ast.unparse(node.value) == "self" else set()  # others may not be ours
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names |= {node.id} & UNCLEAR
        spelled = {name: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_") for name in names}
        found += [f"{module}: {name}" for name in sorted(names) if words & {*spelled[name]}]
    return found


_OF_USERS = ("evaluation.evaluator.evaluate_trainer", "evaluation.callbacks.__init__", "extras.compare_plain.__init__")


def takes_a_trainer() -> list[str]:
    """Returns the functions that get a trainer, besides those to which users give one."""
    return [
        f"{name}.{node.name}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and f"{name}.{node.name}" not in _OF_USERS
        if any(each.arg == "trainer" for each in parameters(node))
    ]


def private_of_others() -> list[str]:
    """Returns private attributes that one class has and that code outside of a method's own object reads."""
    methods = (
        each
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for each in node.body
    )
    attributes = {each.name for each in methods if isinstance(each, ast.FunctionDef)}
    reads = [
        (name, each) for name, tree in trees().items() for each in ast.walk(tree) if isinstance(each, ast.Attribute)
    ]
    attributes |= {
        each.attr for _, each in reads if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    }
    return sorted(
        f"{name}: {ast.unparse(each)}"
        for name, each in reads
        if each.attr in attributes and each.attr.startswith("_") and not each.attr.startswith("__")
        if ast.unparse(each.value) not in ("self", "cls", "super()")
    )


def lines_per_defect() -> dict[str, int]:
    """Returns the lines of each folder of the package per planted defect; modules at the top are one folder, `.`."""

    def folder(path: Path) -> str:
        return path.parts[0] if len(path.parts) > 1 else "."

    defects = Counter(folder(Path(entry["file"])) for entry in json.loads(DEFECTS.read_text()))
    total: Counter[str] = Counter()
    for path in modules().values():
        total[folder(path.relative_to(PACKAGE))] += len(path.read_text().splitlines())
    return {each: n // max(defects[each], 1) for each, n in total.items()}


def _main() -> None:
    if "--changed-since" in sys.argv:
        print(*tests_changed_since(sys.argv[-1]))
        return
    print("lines per planted defect (at most 150, so that each folder is guarded):")
    print(*(f"  {name}: {n}" for name, n in lines_per_defect().items()), sep="\n")


if __name__ == "__main__":
    _main()
