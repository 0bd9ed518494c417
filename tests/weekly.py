# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Joins the results of the suites of `make test-weekly` into `weekly.json`, and prints its age and failures.

```bash
python tests/weekly.py                                # what the last run found, for `.ci/run`
python tests/weekly.py outputs/weekly/{slow,vllm}.json  # what `--write-results` wrote; exits with 1 after failures
```
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path


ROOT = Path(__file__).parents[1]
WRITTEN = Path(__file__).with_name("weekly.json")


def joined(results: Iterable[dict]) -> dict:
    """Returns the results of all suites as one: numbers of tests, names of those that failed, seconds by file."""
    total: dict = {"passed": 0, "skipped": 0, "failed": [], "seconds": {}}
    for each in results:
        total = {
            **{name: total[name] + each[name] for name in ("passed", "skipped")},
            "failed": sorted({*total["failed"], *each["failed"]}),
            "seconds": dict(sorted((total["seconds"] | each["seconds"]).items())),
        }
    return total


def results_of(path: Path) -> dict:
    """Returns the results of a suite, which has failed if it ended without any."""
    if path.exists():
        return json.loads(path.read_text())
    return {"passed": 0, "skipped": 0, "failed": [f"{path.stem}: no results"], "seconds": {}}


def git(*command: str) -> str | None:
    """Returns what git prints, or `None` if it fails, such as without the history."""
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode else done.stdout.strip()


def write(paths: Iterable[Path]) -> dict:
    """Writes `weekly.json` from the results of suites, and returns its content."""
    found = joined(map(results_of, paths))
    found = {"commit": git("rev-parse", "HEAD"), "date": datetime.now(UTC).date().isoformat(), **found}
    found["seconds"] = {file: round(seconds, 1) for file, seconds in found["seconds"].items()}
    WRITTEN.write_text(json.dumps(found, indent=0) + "\n")
    return found


def described(found: dict) -> str:
    """Returns a line about a run, and one for each test that failed."""
    commits = git("rev-list", "--count", f"{found['commit']}..HEAD") or "unknown"
    days = (datetime.now(UTC).date() - datetime.fromisoformat(found["date"]).date()).days
    n_failed, seconds = len(found["failed"]), sum(found["seconds"].values())
    counts = f"{found['passed']} passed, {n_failed} failed, {found['skipped']} skipped, {seconds:.0f} CPU s"
    return "\n".join([f"make test-weekly, {commits} commits and {days} days ago: {counts}", *found["failed"]])


def main(words: list[str]) -> int:
    if words:
        found = write(map(Path, words))
        print(described(found))
        return int(bool(found["failed"]))
    print(described(json.loads(WRITTEN.read_text())) if WRITTEN.exists() else f"No {WRITTEN.name}: `make test-weekly`")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
