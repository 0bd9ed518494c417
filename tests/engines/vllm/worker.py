# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Trains in one or several processes, and writes what each one sampled: `worker.py OUTPUT MODEL RUNS`."""

import json
import os
import sys
from pathlib import Path


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "shims")]

import vllm_cpu  # noqa: E402
from helpers.engine_runs import RecordedOmni, make  # noqa: E402
from omni import load_omni, omni_rows  # noqa: E402


def run(output: Path, model: Path, name: str, options: dict) -> None:
    """Runs three steps of three groups of four. Of two ranks, each has half of the second group."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    options = {"per_device_train_batch_size": 12 // processes, **options}
    trainer = make(RecordedOmni, None, omni_rows(), output / "run", load_omni(model), **options)
    assert trainer.accelerator.num_processes == processes
    asked = []
    if trainer.args.vllm_mode == "server":
        complete = trainer.vllm_generation._request_completions

        def recorded(url, request, *given):
            asked.append(request.count)
            return complete(url, request, *given)

        trainer.vllm_generation._request_completions = recorded
    trainer.train()
    result = {
        "draws": trainer.draws,
        "asked": asked,  # requests to the server: the number of completions of each prompt
        "weights": sum(parameter.double().abs().sum().item() for parameter in trainer.model.parameters()),
    }
    (output / f"{name}-{trainer.accelerator.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    vllm_cpu.install()
    for name, options in json.loads(sys.argv[3]).items():
        run(Path(sys.argv[1]), Path(sys.argv[2]), name, options)
