#!/usr/bin/env bash
# Rehearses `run.sh` on a CPU: on a copy of the repository, in an environment that has what `machine.txt` and
# `wheels.txt` list and nothing else, and without a network where the system lets us take it away. The CUDA libraries
# (4 GB) are those of the machine, but unused: tiny models run on the CPU, and engines in two processes. Logs are in `$OUT`.
#
#   tests/gpu/rehearse.sh [tests | report]
set -euo pipefail
cd "$(dirname "$0")/../.."
environment=$PWD/.venv-gpu-rehearsal out=$(realpath -m "${OUT:-outputs/gpu-rehearsal}") most=45 # MiB to carry
make --silent .venv-gpu-rehearsal/ok
rm -rf "$out"
mkdir -p "$out"
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

tests/gpu/pack.sh "$copy/wheels" "$environment/bin/python"
git ls-files -z --cached --others --exclude-standard | tar --null --files-from - --create | tar --extract --directory "$copy"
size=$(du --summarize --block-size 1M "$copy" | cut -f1)
echo "The repository and the wheels take $size MiB"
((size <= most)) || { echo "More than $most MiB can't be carried"; exit 1; }

"$environment/bin/python" -I - "$copy"/wheels/*.whl <<'PYTHON'
import re, sys
from importlib.metadata import distributions
from pathlib import Path


def names(lines):
    return {re.sub(r"[-_.]+", "-", re.split("==|-[0-9]", line)[0]).lower() for line in lines}


def listed(file):
    return names(line for line in Path("tests/gpu", file).read_text().splitlines() if line[:1] != "#")


for kind, present, expected in (
    ("environment", names(each.name for each in distributions()), listed("machine.txt")),
    ("wheels", names(Path(path).name for path in sys.argv[1:]), listed("wheels.txt") | {"trl-multimodal-rft"}),
):
    if present != expected:
        sys.exit(f"{kind}: {sorted(present - expected)} are in no list, {sorted(expected - present)} are missing")
PYTHON

alone=()
if unshare --net ip link set lo up 2> /dev/null; then
    alone=(unshare --net sh -c 'ip link set lo up && exec "$@"' sh)
fi
"${alone[@]}" env --ignore-environment HOME="$copy" PATH="$environment/bin:/usr/local/bin:/usr/bin:/bin" LANG=C.UTF-8 \
    DEVICE=cpu OUT="$out" bash "$copy/tests/gpu/run.sh" "$copy/wheels" "$@"
"$environment/bin/python" - "$out/report-tiny.json" "${1:-all}" <<'PYTHON'
import json, sys

path, part = sys.argv[1:]
if part != "tests" and (left := json.load(open(path))["left"]):
    sys.exit(f"The report lacks {left}")
PYTHON
echo "Rehearsed in $SECONDS s"
