# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Runs of `PPOTrainerVL` and `PPOTrainerAL` on one or several processes: `ppo_reference_worker.py <engine> <folder>`.

The engine is `ddp`, `zero2` or `zero3`. The global batches don't depend on the number of processes. Each process
writes what it saw.
"""

import json
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from helpers.families import FAMILIES
from helpers.reference import completing, pseudo_random
from helpers.trainer_utils import audio_rows, image_rows, length_and_sum
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from transformers.integrations import unset_hf_deepspeed_config

from trl_multimodal_rft import MultimodalPPOConfig
from trl_multimodal_rft.lightrft import ActorAL, ActorVL, PPOTrainerAL, PPOTrainerVL


ENGINE, FOLDER = sys.argv[1], Path(sys.argv[2])


def mixed_rows(n):
    """Removes every other row's image, so that ranks have different media."""
    rows = enumerate(image_rows(n))
    return [row if i % 2 else {name: value for name, value in row.items() if name != "image"} for i, row in rows]


KINDS = {
    "image": ("qwen2_5_vl", PPOTrainerVL, ActorVL, image_rows),
    "audio": ("qwen2_audio", PPOTrainerAL, ActorAL, audio_rows),
    "mixed": ("qwen2_5_vl", PPOTrainerVL, ActorVL, mixed_rows),
}
N_PROMPTS = 4  # per rollout, over all ranks
GROUP = 4


def start():
    """Resets the engine of the previous scenario."""
    AcceleratorState._reset_state()
    unset_hf_deepspeed_config()
    # Accelerate must treat DeepSpeed on the CPU as on accelerators
    return PartialState(cpu=True) if ENGINE == "ddp" else PartialState(backend="gloo")


def engine_options():
    if ENGINE == "ddp":
        return {"use_cpu": True}
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    config |= {"gradient_clipping": "auto", "zero_optimization": {"stage": int(ENGINE[-1])}}
    return {"deepspeed": config, "accelerator_config": {"use_configured_state": True}}


def model_of(family, distance=0.0):
    """Returns the tiny model, or one near it."""
    model = FAMILIES[family].build()[0]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += distance * torch.randn(parameter.shape, generator=generator)
    return model


def combine(model_reward_list):
    """Returns metrics that only one rank has."""
    (rewards,) = model_reward_list
    return rewards, {f"of_process_{PartialState().process_index}": rewards, "everywhere": rewards}


class Judge(torch.nn.Module):
    def forward(self, sequences, attention_mask, **media):
        rows = [ids[mask.bool()].tolist() for ids, mask in zip(sequences, attention_mask, strict=True)]
        return torch.tensor(length_and_sum(rows))


def make(folder, kind, averages=True, **options):
    family, trainer_class, actor_class, _ = KINDS[kind]
    n_processes = start().num_processes
    processor = FAMILIES[family].build()[1]
    policy = actor_class(model_of(family), bf16=False, packing_samples=True, high_entropy_token_ratio=0.5)
    reference = actor_class(model_of(family, 0.02), bf16=False)
    average = actor_class(model_of(family), bf16=False) if averages else None
    config = MultimodalPPOConfig(
        str(folder),
        **{
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": N_PROMPTS // n_processes,
            "num_generations": GROUP,
            "max_completion_length": 6,
            "num_train_epochs": 1,
            "optim": "sgd",
            "learning_rate": 0.5,
            "lr_scheduler_type": "constant",
            "reward_running_scale": True,
            "top_entropy_quantile": 0.5,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "bf16": False,
            **engine_options(),
            **options,
        },
    )
    ppo = trainer_class(
        config,
        policy,
        None,
        Judge(),
        reference,
        average,
        *(None,) * 4,
        ema_beta=0.5,
        init_kl_coef=0.1,
        kl_target=0.01,
        kl_horizon=100,
        ptx_coef=0.5,
        micro_train_batch_size=4,
        micro_rollout_batch_size=8,
        max_epochs=2,
        max_norm=0.5,
        processor=processor,
        prompt_max_len=512,
        reward_fn=combine,
    )
    return ppo, config


def fit(folder, kind, sampled=False, **options):
    rows = KINDS[kind][3]
    ppo, config = make(folder, kind, **options)
    eos_id = ppo.tokenizer.eos_token_id
    injected = completing(lambda prompts, longest: pseudo_random(prompts, longest, eos_id, Counter()))
    prompts = DataLoader(
        list(rows(10)), N_PROMPTS // PartialState().num_processes, shuffle=True, drop_last=True, collate_fn=list
    )
    supervised = [{**row, "completion": "It is a cat."} for row in rows(3)]
    before = {name: p.detach().clone() for name, p in ppo.trainer.model.named_parameters()}
    seed = torch.initial_seed()
    with nullcontext() if sampled else injected:
        ppo.fit(config, prompts, DataLoader(supervised, batch_size=1, collate_fn=list))
        evaluated = ppo.evaluate(DataLoader(list(rows(5)), batch_size=1, collate_fn=list), 0)
    update = {name: p.detach() - before[name] for name, p in ppo.trainer.model.named_parameters()}
    averages = {f"average.{name}": p.detach() - before[name] for name, p in ppo.ema_model.model.named_parameters()}
    steps = [
        {name: value for name, value in entry.items() if isinstance(value, float)}
        for entry in ppo.trainer.state.log_history
    ]
    return {"update": {**update, **averages}, "steps": steps, "evaluated": evaluated, "seed": seed}


def resumed(folder, kind):
    """Samples for real, and repeats the run from a checkpoint in the middle of an episode."""
    options = {"num_train_epochs": 2, "optim": "adamw_torch", "learning_rate": 1e-2, "sampled": True}
    whole = fit(folder / "whole", kind, save_strategy="steps", save_steps=2, **options)
    PartialState().wait_for_everyone()
    checkpoint = str(folder / "whole" / "checkpoint-6")
    again = fit(folder / "again", kind, resume_from_checkpoint=checkpoint, **options)
    theirs, own = ({n: v for n, v in run["update"].items() if n.startswith("average.")} for run in (whole, again))
    logs = [[{n: v for n, v in step.items() if n != "step_time"} for step in run["steps"]] for run in (whole, again)]
    return {
        "update": whole["update"],
        "otherwise": [name for name in theirs if not torch.equal(theirs[name], own[name])],
        "logs": logs,
        "evaluated": [whole["evaluated"], again["evaluated"]],
    }


def refused(folder):
    try:
        make(folder, "image", averages=False)
    except ValueError as error:
        return {"update": {}, "message": str(error)}


def main():
    torch.set_num_threads(1)
    state = start()
    scenarios = {f"fit_{kind}": lambda own, kind=kind: fit(own, kind) for kind in KINDS}
    if state.num_processes > 1:
        scenarios["resumed"] = lambda own: resumed(own, "audio")
    if ENGINE == "zero3":
        scenarios = {"refused": refused}
    for name, scenario in scenarios.items():
        result = scenario(FOLDER / name)
        update = {n: value.contiguous() for n, value in result.pop("update").items()}
        save_file(update, FOLDER / f"{name}-{state.process_index}.safetensors")
        (FOLDER / f"{name}-{state.process_index}.json").write_text(json.dumps(result))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
