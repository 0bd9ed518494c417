# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Scenarios of distributed training: `worker.py <engine> <folder> <scenario>...`, started by `launcher.Run`.

Every process runs the same scenarios and writes its results. The global batches don't depend on their number.
"""

import faulthandler
import gc
import json
from datetime import timedelta

import distillation_scenarios
import dpo_scenarios
import grpo_scenarios
import lightrft_scenarios
import metric_scenarios
import mixed_scenarios
import offload_scenarios
import parts_scenarios
import ppo_scenarios
import sft_scenarios
import torch
from accelerate import PartialState
from fsdp2_on_cpu import enable_fsdp2_on_cpu
from helpers.processes import COLLECTIVE
from safetensors.torch import save_file
from training import ENGINE, FOLDER, ON_CPU, SCENARIOS, start


MODULES = [
    grpo_scenarios,
    ppo_scenarios,
    mixed_scenarios,
    sft_scenarios,
    dpo_scenarios,
    parts_scenarios,
    offload_scenarios,
    distillation_scenarios,
    lightrft_scenarios,
    metric_scenarios,
]


def main():
    gc.freeze()  # Each run collects garbage and would otherwise scan all imported objects
    torch.set_num_threads(1)
    if ENGINE in ("fsdp2", "hsdp") and ON_CPU:
        enable_fsdp2_on_cpu()
    rank = start(timeout=timedelta(seconds=COLLECTIVE)).process_index
    for name in SCENARIOS:
        # Before a collective fails, and its rank ends the others, each shows where it is
        faulthandler.dump_traceback_later(COLLECTIVE - 60)
        (scenario,) = {getattr(each, name) for each in MODULES if hasattr(each, name)}  # none hides another
        result = scenario(FOLDER / name)
        save_file(result.pop("update", {}), FOLDER / f"{name}-{rank}.safetensors")
        (FOLDER / f"{name}-{rank}.json").write_text(json.dumps(result))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
