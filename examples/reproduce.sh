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
# A folder has the results of one recipe, with one set of options, at one commit.
set -euo pipefail

: "${1:?name a recipe, such as qwen3_vl_2b/geometry3k_grpo}" "${2:?name a folder for the results}"
exec python "$(dirname "$0")/reproduced.py" "$@"
