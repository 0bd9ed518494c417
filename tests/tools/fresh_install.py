# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
What a new user does today: README's install lines in an empty environment, with the newest versions that pip resolves.

There all trainers are imported, all commands show their help without a word on stderr, and the commands of
`docs/first_run.md` print what this page shows. This file needs Python alone.
`--first ""` leaves out README's line for machines without a GPU; `--first "torch==2.13.0 torchvision==0.28.0"` serves
where a disk has the build for CPUs.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


sys.path.append(str(Path(__file__).parents[1]))

from helpers import first_run_page  # noqa: E402


ROOT = Path(__file__).parents[2]
EXTRAS = "audio,examples"  # of the page
SHOWN = (
    "torch torchvision torchcodec transformers trl accelerate datasets peft av pillow numpy huggingface_hub".split()
)
IMPORTS = "import trl_multimodal_rft as package; print(*(getattr(package, name).__name__ for name in package.__all__))"
COMMANDS = "from trl_multimodal_rft.cli import COMMANDS; print(*COMMANDS)"
VERSIONS = (
    f"from importlib.metadata import version; print(*(f'{{name}} {{version(name)}}' for name in {SHOWN}), sep=', ')"
)


def copy_clone(folder: Path) -> None:
    """Copies the files that git would."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def install_lines(first: str | None) -> list[str]:
    """Returns README's lines, the first of which is for machines without a GPU, or others in its place."""
    section = (ROOT / "README.md").read_text().partition("\n## Install\n")[2]
    lines = re.findall(r"^pip install .*?(?=  #|$)", section.partition("\n## ")[0], re.MULTILINE)
    assert len(lines) == 2 and "--index-url" in lines[0] and "-e" in lines[1], lines
    return lines if first is None else [*([f"pip install {first}"] if first else []), lines[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", help="what to install first; by default torch and torchvision for CPUs, by README")
    first = parser.parse_args().first
    with tempfile.TemporaryDirectory() as name:
        clone = Path(name, "clone")
        home = Path(name, "venv")
        folder = Path(name, "hour")
        copy_clone(clone)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        outside = ("PYTHONPATH", "VIRTUAL_ENV", "PIP_CONSTRAINT", "LD_LIBRARY_PATH")
        env = {key: value for key, value in os.environ.items() if key not in outside}
        env |= {"PATH": f"{home / 'bin'}:{env['PATH']}", "HF_HOME": str(Path(name, "cache")), "HF_HUB_OFFLINE": "1"}

        def run(*words: str | Path, cwd: Path = clone) -> subprocess.CompletedProcess:
            started = time.perf_counter()
            done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)
            print(f"{time.perf_counter() - started:6.1f} s  {' '.join(map(str, words))[:100]}", flush=True)
            assert done.returncode == 0, done.stdout + done.stderr
            return done

        def command(*words: str) -> subprocess.CompletedProcess:
            return run("trl-multimodal-rft", *words, cwd=folder)

        for line in install_lines(first):
            run("bash", "-c", line)
        if first:
            env["LD_LIBRARY_PATH"] = run("python", ROOT / "tests" / "shims" / "install.py").stdout.strip()
        print(run("python", "-c", VERSIONS).stdout, end="")
        imported = run("python", "-c", IMPORTS)
        assert "newer than" not in imported.stderr, imported.stderr
        folder.mkdir()
        for each in run("python", "-c", COMMANDS).stdout.split():
            shown = command(each, "--help")
            assert shown.stdout.startswith(f"usage: trl-multimodal-rft {each}") and not shown.stderr, shown
        run("pip", "install", "-e", f".[{EXTRAS}]")
        run("python", clone / "examples" / "first_run.py", cwd=folder)
        played = {}
        for page in (first_run_page.RECORDINGS, first_run_page.PAIRS, first_run_page.AGENT):
            first_run_page.write_files(folder, page)
            played[page] = first_run_page.play(command, folder, page)
        (shown,) = [run for line, run in played[first_run_page.RECORDINGS].items() if " evaluate " in line]
        accuracy = float(re.search(r"^accuracy ([\d.]+) %", shown.stdout, re.MULTILINE)[1])
        assert accuracy > 80, shown.stdout
    print(f"README's lines install, and the first run evaluates to {accuracy} %")


if __name__ == "__main__":
    main()
