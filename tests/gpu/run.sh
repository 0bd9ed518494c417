#!/usr/bin/env bash
# Runs on a machine with a GPU and no network what only it shows, within nine minutes: installs the wheels of `pack.sh`,
# runs the tests, and fills the report with the time that is left, cheap rows first. Logs and tables are in the folder
# `$OUT`; what a run that is ended had written stays there. `rehearse.sh` rehearses it.
#
#   OUT=outputs/gpu tests/gpu/run.sh WHEELS [tests | report]
#   ROWS="long tower" RESUME=report-3b.json OUT=outputs/gpu tests/gpu/run.sh WHEELS report  # some rows, after others
set -uo pipefail
wheels=$(realpath "$1") resume=$(realpath -m "${RESUME:-.}") part=${2:-all} device=${DEVICE:-cuda} minutes=${MINUTES:-9}
out=$(realpath -m "${OUT:-outputs/gpu}") site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
cd "$(dirname "$0")/../.."
mkdir -p "$out"
python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl || exit
python3 -m compileall -q -j 0 "$site" trl_multimodal_rft > /dev/null  # many processes import it
export PYTHONPATH=$site HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
python3 -m pip list 2>/dev/null > "$out/packages.txt"
nvidia-smi > "$out/gpu.txt" 2>&1
if ! command -v "${CC:-gcc}" gcc clang > /dev/null; then
    echo "No C compiler: Triton can't compile the kernels of TRL's LM head and of linear attention. Install gcc, or set CC." |
        tee "$out/no_compiler.txt"
fi
echo "installed after $SECONDS s"
# Seconds after which tests that hang leave the time to the report, and those of a trainer in a row
preset=${PRESET:-3b} tests_end=180 seconds=20
if [ "$device" = cpu ]; then
    export REHEARSAL=1
    preset=tiny tests_end=0 minutes=120 seconds=600
fi
code=0
if [ "$part" != report ]; then
    workers=$(($(env -u OMP_NUM_THREADS nproc) / 2 + 1)) # processes of engines run beside them
    options=(-n $workers --dist loadgroup -p no:cacheprovider -p no:benchmark -v -rs --durations 20)
    timeout -s INT -k 15 $tests_end python3 -m pytest tests/gpu -m gpu "${options[@]}" 2>&1 |
        tee "$out/tests.txt" || code=$?
    echo "tested after $SECONDS s"
fi
if [ "$part" != tests ]; then
    if [ -n "${RESUME:-}" ]; then cp "$resume" "$out/report-$preset.json"; fi
    left=$((60 * minutes - SECONDS - 10))
    printf -v time '%d.%02d' $(((left - 20) / 60)) $(((left - 20) % 60 * 100 / 60)) # in which rows start
    options=(--device "$device" --preset "$preset" --out "$out/report-$preset.md" --minutes "$time" --seconds $seconds)
    timeout -k 5 $left python3 benchmarks/gpu_report.py "${options[@]}" ${ROWS:+--rows $ROWS} 2>&1 |
        tee "$out/report.txt" || code=$?
    echo "reported after $SECONDS s"
fi
exit $code
