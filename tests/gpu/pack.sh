#!/usr/bin/env bash
# Fills a folder with what `wheels.txt` names and with this package, for a machine with Python 3.12 and no network.
#
#   tests/gpu/pack.sh FOLDER [PYTHON]
#   VLLM=1 tests/gpu/pack.sh FOLDER [PYTHON]  # with vLLM, by `wheels-vllm.txt`
set -euo pipefail
folder=$(realpath -m "$1") python=${2:-python3}
cd "$(dirname "$0")/../.."
mkdir -p "$folder"
where=(--dest "$folder" --no-deps --quiet)
lists=(tests/gpu/wheels.txt ${VLLM:+tests/gpu/wheels-vllm.txt})
for minor in $(seq 34 -1 5); do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
cat "${lists[@]}" | grep -v '^#\|^deepspeed' | "$python" -m pip download "${where[@]}" --only-binary=:all: \
    --python-version 3.12 --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 --requirement /dev/stdin
# DeepSpeed is published as source, which is Python as long as nothing is built ahead
DS_BUILD_OPS=0 "$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" \
    "$(grep '^deepspeed' tests/gpu/wheels.txt)" .
# Kernels of CUDA 13 alone, which are a tenth of the wheel
"$python" - "$folder"/bitsandbytes-*.whl <<'PYTHON'
import re, shutil, sys, zipfile

path = sys.argv[1]
with zipfile.ZipFile(path) as whole, zipfile.ZipFile(path + ".part", "w", zipfile.ZIP_DEFLATED) as part:
    for item in whole.infolist():
        if not re.search(r"_(cuda1[12]\d|cuda132|rocm\d+|xpu\d+)\.so$", item.filename):
            part.writestr(item, whole.read(item))
shutil.move(path + ".part", path)
PYTHON
du -ch "$folder"/*.whl | tail -1
