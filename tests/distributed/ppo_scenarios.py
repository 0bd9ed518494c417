# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""PPO scenarios."""

import functools

import torch
from accelerate import PartialState
from datasets import Dataset
from grpo_scenarios import UNEVEN, balanced, partly
from helpers.families import FAMILIES
from helpers.ppo_runs import RemembersSupervised
from peft import LoraConfig
from training import (
    ENGINE,
    GROUP,
    SHORT_AND_LONG,
    InjectingTrainer,
    RemembersParts,
    audio_rows,
    averages,
    compared,
    image_rows,
    refusal,
    train,
    weights,
)
from transformers import AutoProcessor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from trl_multimodal_rft import MultimodalPPOTrainer
from trl_multimodal_rft.models import Critic


PPO = {
    "num_ppo_epochs": 2,
    "max_steps": 4,
    "beta": 0.1,
    "freezing_actor_steps": 1,
    "bootstrap_truncated": True,
    "learning_rate": 0.1,
    "lr_scheduler_type": "linear",
    "value_learning_rate": 0.5,
    "value_lr_scheduler_type": "cosine",
    "vf_coef": 1.0,
    "max_grad_norm": 5.0,
    "ema_decay": None if ENGINE == "zero3" else 0.8,
    "ptx_coef": 0.3,
}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


class InjectingPPO(RemembersSupervised, RemembersParts, InjectingTrainer, MultimodalPPOTrainer):
    pass


def ppo(folder, family="qwen2_5_vl", rows=None, batch=3 * GROUP, n_supervised=2, objects=None, **options):
    """
    Each of two ranks has one group and half of another, and each global micro-batch has `n_supervised` rows.

    The result extends that of [`train`] by the ids of the `supervised` completions and by the `parts` of each
    micro-batch.
    """
    rows = image_rows() if rows is None else rows
    options = {**PPO, **options}
    # Completions have equal length, so that the mean over two ranks is the mean over all tokens
    answered = [{**each, "completion": f"number {i}"} for i, each in enumerate(rows[:7])]
    objects = {**(objects or {}), "ptx_dataset": Dataset.from_list(answered)}
    options["ptx_batch_size"] = n_supervised // PartialState().num_processes
    trainer, result = train(folder, family, rows, batch, InjectingPPO, objects=objects, **options)
    return trainer, {**result, "supervised": [ids.tolist() for ids, _ in trainer.supervised], "parts": trainer.parts}


AUDIO = {"family": "qwen2_audio", "rows": audio_rows()}
PLAIN = {
    # All weights get gradients, so that DDP need not search for unused ones
    "ppo_images": {"gradient_checkpointing": False, "ddp_find_unused_parameters": False},
    # Runs two micro-batches a step. The reward scale and the KL coefficient follow the global batch
    "ppo_shared_trunk": {
        **{**AUDIO, "shared_trunk": True, "value_learning_rate": 0.05, "gradient_accumulation_steps": 2},
        **{"reward_running_scale": True, "kl_target": 0.01, "kl_horizon": 40},
    },
    # TRL makes checkpointing reentrant with ZeRO-3
    "ppo_adapter": {
        **{**AUDIO, "objects": {"peft_config": LORA}, "learning_rate": 0.5},
        "gradient_checkpointing": ENGINE != "zero3",
    },
    # In the first generation batch the second of two ranks has no media, in the second one the first has none
    "ppo_mixed": {"rows": partly(image_rows(), 0, 3), "batch": 2 * GROUP},
}


def plain(name, folder):
    return ppo(folder, **PLAIN[name])[1]


globals().update({name: functools.partial(plain, name) for name in PLAIN})


def ppo_parts(folder):
    """The first rank forwards its prompts together, the second one by one, with ten supervised rows."""
    options = {"max_tokens_per_microbatch": 110} if PartialState().num_processes > 1 else {}
    return ppo(folder, rows=SHORT_AND_LONG[2:6], batch=4 * GROUP, n_supervised=20, **options)[1]


def ppo_saved(folder):
    """Saves and loads policy, critic and average. Adam must not count steps of the policy while it is frozen."""
    options = {"optim": "adamw_torch", "learning_rate": 0.01, "value_learning_rate": 0.02, "weight_decay": 0.1}
    options |= {"batch": 2 * GROUP, "num_ppo_epochs": 1, "max_steps": 2}
    trainer, result = ppo(folder, "qwen2_audio", audio_rows(), **options)
    trained = weights(trainer.model)
    trainer.save_model(folder / "saved")
    PartialState().wait_for_everyone()
    unset_hf_deepspeed_config()  # prevents ZeRO-3 from sharding the loaded weights
    model_class = FAMILIES["qwen2_audio"].model_class
    critic = Critic.from_pretrained(folder / "saved" / "critic", model_class)
    saved = {
        **weights(model_class.from_pretrained(folder / "saved")),
        **{f"critic.{name}": value for name, value in weights(critic).items()},
    }
    if trainer.ema is not None:
        average = weights(model_class.from_pretrained(folder / "saved" / "ema"))
        saved |= {f"average of {name}": value for name, value in average.items()}
        # Frozen weights have no average
        trained |= {**{f"average of {name}": trained[name] for name in average}, **averages(trainer)}
        AutoProcessor.from_pretrained(folder / "saved" / "ema")
    still = weights(trainer.model)
    return {
        **result,
        "saved_otherwise": [n for n in saved | trained if n not in saved or not torch.equal(saved[n], trained[n])],
        "changed_by_saving": [n for n in still if not torch.equal(still[n], trained[n])],
    }


def ppo_resumed(folder):
    """Stops in the second epoch of a generation batch, before the policy's first step."""
    options = {"gradient_accumulation_steps": 2, "optim": "adamw_torch", "learning_rate": 0.01, "max_steps": 4}
    options |= {"value_learning_rate": 0.02, "save_strategy": "steps", "save_steps": 3, "steps_per_generation": 4}
    options |= {"batch": 2 * GROUP, "freezing_actor_steps": 3}
    _, straight = ppo(folder / "straight", **options)
    PartialState().wait_for_everyone()
    checkpoint = folder / "straight" / "output" / "checkpoint-3"
    trainer, result = ppo(folder / "again", checkpoint=checkpoint, **options)
    return compared(straight, result) | {"supervised": [straight["supervised"][6:], result["supervised"]]}


def balanced_ppo(folder):
    """Policy and critic, with groups where they were sampled and exchanged."""
    options = {"rows": UNEVEN, "gradient_accumulation_steps": 2, "num_iterations": 1}
    view = "mask_patches(ratio=0.6, kl_coef=0.5, entropy_coefs=[0.0, 0.0])"
    return balanced(folder, ppo, **{**PPO, **options}, loss_view=view)


def ppo_refused(folder):
    """Covers a second forward pass with reentrant checkpointing, and the limits of ZeRO-3."""
    cases = [{"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}]
    if ENGINE == "zero3":
        cases.append({"ema_decay": 0.8})
    return {"messages": [refusal(ppo, folder / str(i), **options) for i, options in enumerate(cases)]}
