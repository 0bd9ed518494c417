# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Trains in each of several processes, and writes what it sampled: `worker.py OUTPUT MODEL OPTIONS`."""

import json
import sys
from pathlib import Path


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "shims")]

import vllm_cpu  # noqa: E402
from helpers.trainer_utils import length_and_sum  # noqa: E402
from omni import Exact, load_omni, omni_rows  # noqa: E402

from trl_multimodal_rft import MultimodalGRPOConfig  # noqa: E402


def main(output: Path, model: Path, options: dict) -> None:
    vllm_cpu.install()
    # Three groups of four, of which both processes have half of the second
    args = MultimodalGRPOConfig(
        output_dir=str(output / "run"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=6,
        num_generations=4,
        max_completion_length=6,
        max_steps=3,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=False,
        use_vllm=True,
        **options,
    )
    trainer = Exact(reward_funcs=length_and_sum, args=args, train_dataset=omni_rows(), **load_omni(model))
    asked = []
    client = getattr(trainer.vllm_generation, "vllm_client", None)
    if client is not None:
        generate = client.generate
        client.generate = lambda prompts, n, **more: asked.append([len(prompts), n]) or generate(prompts, n=n, **more)
    trainer.train()
    result = {
        "draws": trainer.draws,
        "asked": asked,  # of the server: how many prompts, and completions of each
        "weights": sum(parameter.double().abs().sum().item() for parameter in trainer.model.parameters()),
        "processes": trainer.accelerator.num_processes,
    }
    (output / f"{trainer.accelerator.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
