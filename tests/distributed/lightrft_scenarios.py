# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scenarios of `PPOTrainerVL` and `PPOTrainerAL`."""

from collections import Counter
from contextlib import nullcontext
from functools import partial

import torch
from accelerate import PartialState
from helpers.families import FAMILIES
from helpers.reference import completing, pseudo_random
from helpers.trainer_utils import PLAIN, audio_rows, image_rows, length_and_sum, shifted
from torch.utils.data import DataLoader
from training import compared, engine_options, refusal, start

from trl_multimodal_rft import MultimodalPPOConfig
from trl_multimodal_rft.lightrft import ActorAL, ActorVL, PPOTrainerAL, PPOTrainerVL


def every_other_image(n):
    """Removes every other row's image, so that ranks have different media."""
    rows = enumerate(image_rows(n))
    return [row if i % 2 else {name: value for name, value in row.items() if name != "image"} for i, row in rows]


KINDS = {
    "image": ("qwen2_5_vl", PPOTrainerVL, ActorVL, image_rows),
    "audio": ("qwen2_audio", PPOTrainerAL, ActorAL, audio_rows),
    "mixed": ("qwen2_5_vl", PPOTrainerVL, ActorVL, every_other_image),
}
N_PROMPTS = 4  # per rollout, over all ranks
GROUP = 4


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
    state = start()
    model, processor = FAMILIES[family].build()
    policy = actor_class(model, bf16=False, packing_samples=True, high_entropy_token_ratio=0.5)
    reference = actor_class(shifted(FAMILIES[family].build()[0]), bf16=False)
    average = actor_class(FAMILIES[family].build()[0], bf16=False) if averages else None
    config = MultimodalPPOConfig(
        str(folder),
        **{
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": N_PROMPTS // state.num_processes,
            "num_generations": GROUP,
            "max_completion_length": 6,
            **PLAIN,
            "max_grad_norm": 0.5,
            "max_steps": -1,
            "num_train_epochs": 1,
            "learning_rate": 0.5,
            "reward_running_scale": True,
            "top_entropy_quantile": 0.5,
            **engine_options(state),
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
    """Trains and evaluates. Returns the updates of the weights and of their average, the logs and the evaluation."""
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
        if "train_runtime" not in entry  # the summary
    ]
    return {"update": {**update, **averages}, "steps": steps, "evaluated": evaluated, "seed": seed}


fit_audio, fit_mixed = (partial(fit, kind=kind) for kind in ("audio", "mixed"))


def resumed_episode(folder):
    """Samples for real, and repeats the run from a checkpoint in the middle of an episode."""
    options = {"num_train_epochs": 2, "optim": "adamw_torch", "learning_rate": 1e-2, "sampled": True}
    whole = fit(folder / "whole", "audio", save_strategy="steps", save_steps=2, **options)
    PartialState().wait_for_everyone()
    again = fit(folder / "again", "audio", resume_from_checkpoint=str(folder / "whole/checkpoint-6"), **options)
    return {**compared(whole, again), "evaluated": [whole["evaluated"], again["evaluated"]]}


def refused_shards(folder):
    return {"message": refusal(make, folder, "image", averages=False)}


def actor_in_parts(folder):
    """An actor whose weights load in parts counts, scores and samples like a whole one."""
    import deepspeed
    from lightrft import test_actors

    state = start()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    ((batch, expected),) = test_actors.cases("qwen2_audio")
    path = FAMILIES["qwen2_audio"].save(folder / "model")
    whole = test_actors.make("qwen2_audio")
    state.wait_for_everyone()  # only rank 0 writes
    options = {"temperature": test_actors.TEMPERATURE, "packing_samples": True}
    actor = ActorAL(str(path), bf16=False, ds_config=config, **options)
    numbers = test_actors.counted(actor)
    held = sum(p.numel() for p in actor.parameters())
    engine, *_ = deepspeed.initialize(model=actor, config=config)
    with torch.no_grad():
        logps = [batch.score(engine), batch.score_packed(engine).view(expected.shape)]
        sampled = [batch.generate(each, max_new_tokens=4)[0] for each in (actor, whole)]
    return {
        "in_parts": all(hasattr(p, "ds_id") for p in actor.parameters()) and held < numbers[1],
        "numbers": [numbers, test_actors.counted(whole)],
        "difference": max((each - expected).abs().max().item() for each in logps),
        "sampled": [each.tolist() for each in sampled],
    }
