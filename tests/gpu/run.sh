#!/usr/bin/env bash
# Runs on a machine with a GPU and no network what only it shows, with the wheels of `pack.sh`, and leaves logs and tables
# in the folder `$OUT`. `DEVICE=cpu` rehearses it.
#
#   OUT=outputs/gpu tests/gpu/run.sh WHEELS [tests | report]
#   ROWS="long tower" RESUME=report-3b.json OUT=outputs/gpu tests/gpu/run.sh WHEELS report  # some rows, after others
set -uo pipefail
wheels=$(realpath "$1") resume=$(realpath -m "${RESUME:-.}") part=${2:-all} device=${DEVICE:-cuda}
out=$(realpath -m "${OUT:-outputs/gpu}") site=$(mktemp -d)
cd "$(dirname "$0")/../.."
mkdir -p "$out"
python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl || exit
export PYTHONPATH=$site HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
python3 -m pip list 2>/dev/null > "$out/packages.txt"
nvidia-smi > "$out/gpu.txt" 2>&1
if ! command -v "${CC:-gcc}" gcc clang > /dev/null; then
    echo "No C compiler: Triton can't compile the kernels of TRL's LM head and of linear attention. Install gcc, or set CC." |
        tee "$out/no_compiler.txt"
fi
which=gpu preset=${PRESET:-3b} tests_end=540 report_end=590  # seconds
if [ "$device" = cpu ]; then which=slow preset=tiny tests_end=0 report_end=0; fi
code=0
if [ "$part" != report ]; then
    timeout $tests_end python3 -m pytest tests/gpu -m "$which" -n 3 --dist loadfile -p no:cacheprovider -rs --durations 20 2>&1 |
        tee "$out/tests.txt" || code=$?
fi
if [ "$part" != tests ]; then
    if [ -n "${RESUME:-}" ]; then cp "$resume" "$out/report-$preset.json"; fi
    read -ra rows <<< "${ROWS:+--rows $ROWS}"
    timeout $report_end python3 benchmarks/gpu_report.py --device "$device" --preset "$preset" --out "$out/report-$preset.md" "${rows[@]}" 2>&1 |
        tee "$out/report.txt" || code=$?
fi
exit $code
