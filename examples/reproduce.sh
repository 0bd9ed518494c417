#!/usr/bin/env bash
# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
#
# Trains a recipe with the seeds 0, 1 and 2, and evaluates its model before and after by greedy decoding on the split
# `test`: results.md with confidence intervals, and curve.png. A later call goes on where the last one ended.
#
#   trl-multimodal-rft prepare geometry3k ...  # the recipe's comments have the command
#   examples/reproduce.sh qwen3_vl_2b/geometry3k_grpo outputs/geometry3k
#
# Further words are options of `trl-multimodal-rft evaluate`, such as `--dataset_name avqa-r1-validation`. TRAIN has
# further options of the training, SEEDS other seeds: TRAIN="--num_processes 4" SEEDS="0 1" examples/reproduce.sh ...
set -euo pipefail

recipe=${1:?name a recipe, such as qwen3_vl_2b/geometry3k_grpo} folder=${2:?name a folder for the results}
shift 2
here=$(dirname "$0")
read -ra seeds <<<"${SEEDS:-0 1 2}"
read -ra train <<<"${TRAIN:-}"
settings=$(python "$here/reproduced.py" settings "$recipe" "${train[@]}")
mapfile -t settings <<<"$settings"
command=${settings[0]} model=${settings[1]} fixed=("${settings[@]:2}")

evaluate() { # MODEL RESULTS WORDS...
    [ -f "$2/metrics.json" ] || trl-multimodal-rft evaluate "${fixed[@]}" --model_name_or_path "$1" --output_dir "$2" "${@:3}"
}

evaluate "$model" "$folder/before" "$@"
for seed in "${seeds[@]}"; do
    run=$folder/seed-$seed
    if [ ! -f "$run/after/metrics.json" ]; then
        resume=()
        compgen -G "$run/checkpoint-*" >/dev/null && resume=(--resume_from_checkpoint true)
        trl-multimodal-rft "$command" --config "$recipe" --seed "$seed" --output_dir "$run" "${train[@]}" "${resume[@]}"
    fi
    evaluate "$run" "$run/after" "$@"
done
python "$here/reproduced.py" results "$folder"
