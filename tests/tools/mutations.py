# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Plants the defects of `mutations.json`, one at a time, and counts those that the tests find.

Each entry replaces one line of the package:

- `file`: path below `trl_multimodal_rft/`;
- `line`: the line without indentation, which the file has once; or, with `after`, the first such line below that one,
  which the file has once;
- `to`: what replaces it, indented alike (nothing: the line goes);
- `why`: the defect, in a few words;
- `tests` (optional): arguments of pytest that run first. Then, or by default, run a few files that import the module,
  before those that import what imports it. Options alone (`["-m", "not slow"]`) are for these. Files that a tree lacks
  are left out;
- `covers` (optional): the test, or the scenario and its engines, that can go because others find this defect.

`python tests/tools/mutations.py --tree 6305b17 --jobs 2` runs them in a commit, or in another folder, with the tests
there; `--since HEAD~3` runs those of modules that differ from a commit. `tests/tools/house.py` prints how many each
folder has. The heavy packages of others are imported once. A mutant is a copy of the tree, which a forked child
imports.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import house
import psutil


HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# CPU seconds of a mutant, and seconds in which all of its processes wait: then it hangs, and is found
LIMIT = 1000
IDLE = 120
NEAREST = 6  # files with tests
PRELOADED = "torchvision peft pytest soundfile av trl.trainer.grpo_trainer trl.trainer.sft_trainer"
# Modules are imported already; files run in the order of the arguments
DEFAULT = ["-m", "not slow"]  # with the tests of each change and of extras
PYTEST = "-x -q -p no:cacheprovider -W ignore::pytest.PytestAssertRewriteWarning".split()


def entries() -> list[dict]:
    return json.loads((HERE / "mutations.json").read_text())


def mutated(entry: dict, package: Path) -> str:
    """Returns the text of the entry's file with its defect; raises where the anchor is missing or ambiguous."""
    lines = (package / entry["file"]).read_text().splitlines(keepends=True)
    stripped = [line.strip() for line in lines]
    anchor = entry.get("after", entry["line"])
    n = stripped.count(anchor)
    below = stripped[stripped.index(anchor) :] if anchor in stripped else []
    if n != 1 or entry["line"] not in below:
        raise LookupError(f"{entry['file']} has {n} lines {anchor!r}, or none {entry['line']!r} from there on")
    index = len(lines) - len(below) + below.index(entry["line"])
    lines[index] = lines[index].replace(entry["line"], entry["to"]) if entry["to"] else ""
    return "".join(lines)


def imports_of(tree: Path) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Returns what each module of the package imports, and each test file, also through `tests/helpers`."""
    house.ROOT = tree
    house.PACKAGE = tree / "trl_multimodal_rft"
    helpers = {f"helpers.{path.stem}": path for path in (tree / "tests/helpers").glob("*.py")}
    known = {**house.modules(), **helpers}
    modules = {name: house.imports(path, known) for name, path in known.items()}
    of_tests = {}
    for path in sorted(tree.glob("tests/**/test_*.py"), key=lambda path: path.stat().st_size):
        if path.parent.name not in ("gpu", "vllm"):
            of_tests[str(path.relative_to(tree))] = names = house.imports(path, known)
            more = names
        while more:
            more = {each for name in names & helpers.keys() for each in modules[name]} - names
            names |= more
    return modules, of_tests


def runs(entry: dict, tree: Path, modules: dict[str, set[str]], of_tests: dict[str, set[str]]) -> list[list[str]]:
    """Returns the arguments of pytest for an entry's runs, the next of which starts if one finds nothing."""
    options = entry.get("tests", [])
    path = Path(entry["file"])
    files = {each: (tree / each.split("::")[0]).exists() for each in options if each.startswith("tests/")}
    named = [each for each in options if files.get(each, True)] if any(files.values()) else []
    near = {".".join(("trl_multimodal_rft", *path.with_suffix("").parts)).removesuffix(".__init__")}
    seen = set(near)
    chosen = []
    while near and len(chosen) < NEAREST:
        ring = [each for each, names in of_tests.items() if names & near and each not in chosen]
        chosen += sorted(ring, key=lambda each: path.stem not in Path(each).stem)  # then the smallest
        near = {name for name, names in modules.items() if names & near} - seen
        seen |= near
    if not named and not chosen:
        raise LookupError(f"No test imports {entry['file']}, not even indirectly: name some as `tests`")
    nearest = [each for each in chosen[:NEAREST] if each not in named]
    return [each for each in (named, [*nearest, *(() if files else options)] if nearest else []) if each]


def start(copy: Path, chosen: list[str]) -> int:
    """Forks a child that runs pytest in a copy of the tree, and returns its process ID."""
    pid = os.fork()
    if pid:
        return pid
    status = 3
    try:
        log = os.open(f"{copy}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2), os.setsid(), os.chdir(copy)
        sys.path[:] = [
            str(copy),
            *(path for path in sys.path if Path(path).resolve() not in (HERE, HERE.parent, ROOT)),
        ]
        os.environ["PYTHONPATH"] = str(copy)
        del sys.modules["house"]
        status = sys.modules["pytest"].main([*DEFAULT, *chosen, *PYTEST])
    finally:
        sys.stdout.flush(), sys.stderr.flush(), os._exit(status)


def run(chosen: list[dict], tree: str, jobs: int) -> list[str]:
    """Runs the entries, prints a line for each, and returns these."""
    lines = []
    running = {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        original = Path(temporary, "original")
        original.mkdir()
        is_folder = Path(tree).is_dir()
        listed = "git ls-files -co --exclude-standard | tar -cT - --ignore-failed-read"
        files = listed if is_folder else f"git archive {tree}"
        subprocess.run(f"{files} | tar -xC {original}", shell=True, check=True, cwd=tree if is_folder else ROOT)
        subprocess.run([sys.executable, "-m", "compileall", "-q", "."], cwd=original)
        known = imports_of(original)
        waiting = [(each, mutated(each, house.PACKAGE), runs(each, original, *known)) for each in chosen]
        while waiting or running:
            if waiting and len(running) < jobs:
                (entry, text, given) = waiting.pop(0)
                copy = Path(temporary, str(len(waiting)))
                shutil.copytree(original, copy, ignore=shutil.ignore_patterns(f"{Path(entry['file']).stem}.*.pyc"))
                Path(copy, "trl_multimodal_rft", entry["file"]).write_text(text)
                running[start(copy, given[0])] = [entry, copy, 0, given[1:], 0]
            time.sleep(1)
            for pid, (entry, copy, idle, further, seconds) in [*running.items()]:
                process = psutil.Process(pid)
                family = [*process.children(recursive=True), process]
                ended, status, used = os.wait4(pid, os.WNOHANG)
                if ended:
                    running.pop(pid)
                    seconds += used.ru_utime + used.ru_stime
                    log = Path(f"{copy}.log").read_text(errors="replace")
                    code = os.waitstatus_to_exitcode(status)
                    if not code and further:
                        running[start(copy, further[0])] = [entry, copy, 0, further[1:], seconds]
                        continue
                    outcomes = {
                        0: "SURVIVED",
                        -9: "found, as it hangs",
                        5: "NOT RUN, as no test has the names of `tests`",
                    }
                    found = outcomes.get(code, f"BROKEN: {code}: {log[-500:]}")
                    if code in (1, 2):  # a test failed, or a file couldn't be imported
                        failed = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - |$)", log, re.MULTILINE)
                        found = f"found by {failed[-1] if failed else '?'}"
                    lines.append(f"{seconds:6.1f} s  {entry['file']}: {entry['why']}: {found}")
                    print(lines[-1], flush=True)
                    shutil.rmtree(copy)
                    continue
                with suppress(psutil.NoSuchProcess):  # one that starts or waits for a core is "running"
                    waits = all(each.status() in ("sleeping", "zombie") for each in family)
                    running[pid][2] = idle + 1 if waits else 0
                    if idle > IDLE or sum(sum(each.cpu_times()) for each in family) > LIMIT:
                        for each in family:  # some of which may be in other sessions
                            each.kill()
    return lines


def uncollected(chosen: list[dict], tree: Path) -> list[str]:
    """Returns what is wrong with the tests that entries name: pytest collects none of them."""
    lines = []
    known = imports_of(tree)
    codes = {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        for entry in chosen:
            arguments = runs(entry, tree, *known)[0]
            if not any(argument in ("-k", "-m") or "::" in argument for argument in entry.get("tests", [])):
                continue
            if tuple(arguments) not in codes:
                copy = Path(temporary, str(len(codes)))
                copy.symlink_to(tree)
                status = os.waitpid(start(copy, [*arguments, "--collect-only"]), 0)[1]
                codes[tuple(arguments)] = os.waitstatus_to_exitcode(status)
            if codes[tuple(arguments)]:
                lines.append(f"{entry['file']}: {entry['why']}: pytest collects none of {arguments}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--since", metavar="COMMIT", help="entries of modules that differ from this commit")
    parser.add_argument("--only", default="", help="entries whose JSON contains this text")
    parser.add_argument("--collect", action="store_true", help="only collect the tests that the entries name")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time")
    parser.add_argument("--tree", default=str(ROOT), help="folder or commit, by default this folder")
    parser.add_argument("--out", type=Path, help="file for the results")
    args = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", OMP_NUM_THREADS="1")
    for name in PRELOADED.split():
        importlib.import_module(name)
    threads = {Path(f"/proc/self/task/{each}/comm").read_text().strip() for each in os.listdir("/proc/self/task")[1:]}
    assert threads <= {"jemalloc_bg_thd"}, f"forks with threads: {threads}"  # Arrow's is prepared for forks
    chosen = [each for each in entries() if args.only in json.dumps(each)]
    if args.since is not None:
        changed = house.changed_since(args.since)
        chosen = [each for each in chosen if f"trl_multimodal_rft/{each['file']}" in changed]
    if args.collect:
        lines = uncollected(chosen, ROOT)
        print("\n".join([*lines, f"{len(lines)} of {len(chosen)} defects have no tests"]))
        return int(bool(lines))
    lines = run(chosen, args.tree, args.jobs) if chosen else []
    n = sum(": found" in line for line in lines)
    seconds = sum(os.times()[2:4])
    lines.append(f"{n} of {len(lines)} defects found in {args.tree}, {seconds:.0f} CPU seconds")
    print(lines[-1])
    if args.out:
        args.out.write_text("\n".join([*lines, ""]))
    return int(n < len(lines) - 1)


if __name__ == "__main__":
    sys.exit(main())
