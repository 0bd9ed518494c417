# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Hooks that the launches of `test_launch_configs.py` add to an unmodified script. Python runs this file at startup when
this folder is on `PYTHONPATH`.

Each training process writes how accelerate configured it to a JSON file in the folder `LAUNCH_REPORTS`. With
`FSDP2_ON_CPU`, accelerate uses FSDP2 without a GPU.
"""

import atexit
import json
import os
import sys
from pathlib import Path


def report() -> None:
    accelerate = sys.modules.get("accelerate")
    if accelerate is None or not accelerate.state.AcceleratorState._shared_state:
        return  # a launcher
    state = accelerate.state.AcceleratorState()
    facts = {
        "process": state.process_index,
        "processes": state.num_processes,
        "type": state.distributed_type.value,
        "device": state.device.type,
        "mixed_precision": state.mixed_precision,
    }
    if state.distributed_type == "FSDP":
        facts["fsdp_version"] = state.fsdp_plugin.fsdp_version
    if state.distributed_type == "DEEPSPEED":
        facts["zero_stage"] = state.deepspeed_plugin.zero_stage
    Path(os.environ["LAUNCH_REPORTS"], f"{os.getpid()}.json").write_text(json.dumps(facts))


atexit.register(report)

if "FSDP2_ON_CPU" in os.environ and "LOCAL_RANK" in os.environ:  # not in the launcher
    sys.path.append(str(Path(__file__).parent.parent))
    from fsdp2_on_cpu import enable_fsdp2_on_cpu

    enable_fsdp2_on_cpu()
