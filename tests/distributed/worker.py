# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scenarios of distributed training: `worker.py <engine> <folder> <scenario>...`, started by `launcher.Run`.

Every process runs the same scenarios and writes what it saw. A scenario has the same global batches for any number of
processes.
"""

import dataclasses
import functools
import hashlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from datasets import Dataset
from families import FAMILIES, RATE, audio, image
from fsdp2_on_cpu import enable_fsdp2_on_cpu
from peft import LoraConfig
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoProcessor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from trl_multimodal_rft import (
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
    MultimodalPPOConfig,
    MultimodalPPOTrainer,
)
from trl_multimodal_rft.actors import Actor, Critic
from trl_multimodal_rft.algorithms.kl import FixedKLController
from trl_multimodal_rft.rollout.experience_maker import ExperienceConfig, NaiveExperienceMaker
from trl_multimodal_rft.trainers.checkpoint import load_rollout_state, save_rollout_state


ENGINE, FOLDER, SCENARIOS = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
ZERO = {"zero2": 2, "zero3": 3}  # stages of DeepSpeed
GROUP = 4  # completions of a prompt


# Trainers


class RecordingTrainer(MultimodalGRPOTrainer):
    """Keeps the last completions it sampled."""

    def _generate_single_turn(self, *args, **kwargs):
        self.sampled, logprobs = super()._generate_single_turn(*args, **kwargs)
        return self.sampled, logprobs


class InjectingTrainer(RecordingTrainer):
    """For two steps, takes completions that depend on the step and on the place in the global batch alone."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self.state.global_step >= 2 * self.num_iterations:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        completions = []
        for i in range(len(prompt_ids)):
            place = self.accelerator.process_index * len(prompt_ids) + i
            generator = torch.Generator().manual_seed(1000 * self.state.global_step + place)
            length = int(torch.randint(1, 9, (), generator=generator))
            completions.append(torch.randint(50, 200, (length,), generator=generator).tolist())
        return completions, None


class InjectingPPO(InjectingTrainer, MultimodalPPOTrainer):
    """Remembers the supervised completions of each micro-batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.supervised = []

    def _supervised_batch(self):
        batch = super()._supervised_batch()
        if batch is not None:
            self.supervised.append(batch[1].tolist())
        return batch


class ExchangingTrainer(RecordingTrainer):
    """Remembers of each batch how many groups have no signal, its tokens, and the prompts drawn beside the sampler's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.drawn = [], []

    def _exchange_groups(self, batch):
        output = super()._exchange_groups(batch)
        dead = (output["advantages"].view(-1, GROUP) == 0).all(1).sum()
        tokens = output["completion_mask"].sum()
        self.batches.append([int(dead), int(tokens), int(output["num_items_in_batch"])])
        return output

    def _draw_prompts(self, n):
        rows = super()._draw_prompts(n)
        self.drawn.append([len(row["audio"]["array"]) if "audio" in row else 0 for row in rows[::GROUP]])
        return rows


def reward(completion_ids, **kwargs):
    return [sum(ids) % 11 / 10 for ids in completion_ids]


def unequal_reward(completion_ids, trainer_state, **kwargs):
    """
    On the second process all groups have signal. On the first the first one of a draw has, and in the second half of the
    run none.
    """
    if PartialState().process_index == 1:
        n_live = len(completion_ids)
    else:
        n_live = GROUP if trainer_state.global_step < trainer_state.max_steps // 2 else 0
    return [float(i % 2) if i < n_live else 1.0 for i in range(len(completion_ids))]


def train(
    folder,
    family,
    rows,
    batch,
    trainer_class=InjectingTrainer,
    end_ids=None,
    reward_func=reward,
    checkpoint=None,
    objects=None,
    **options,
):
    """
    Trains on global batches of `batch` samples.

    Args:
        folder (`Path`):
            Folder of the scenario.
        family (`str`):
            Key of the model in `FAMILIES`.
        rows (`list[dict]`):
            Dataset, read in order.
        batch (`int`):
            Samples of a step, over all processes.
        trainer_class (`type`, *optional*, defaults to `InjectingTrainer`):
            Trainer.
        end_ids (`list[int]`, *optional*):
            Tokens that end a completion.
        reward_func (`Callable`, *optional*, defaults to `reward`):
            Reward function.
        checkpoint (`Path`, *optional*):
            Checkpoint to go on from.
        objects (`dict`, *optional*):
            Further arguments of the trainer.
        options:
            What differs in the config.

    Returns:
        `tuple`: The trainer, and a result: the `update` of each parameter, and of the average if there is one, the floats
        that each of the `steps` logged, and whether processes hold parameters in part, `sharded`.
    """
    state = start()
    model, processor = FAMILIES[family].build()
    if end_ids is not None:
        model.generation_config.eos_token_id = end_ids
    model.save_pretrained(folder / "model")  # the first process does
    state.wait_for_everyone()
    config = {
        "output_dir": str(folder / "output"),
        "per_device_train_batch_size": batch // state.num_processes,
        "num_generations": GROUP,
        "max_completion_length": 8,
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.5,  # so that rounding of the weights doesn't show in an update
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "self_check": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
        **engine_options(state),
    }
    config_class = MultimodalPPOConfig if issubclass(trainer_class, MultimodalPPOTrainer) else MultimodalGRPOConfig
    args = config_class(**{**config, **options})
    data = Dataset.from_list(rows)
    trainer = trainer_class(
        str(folder / "model"), reward_func, args, data, processing_class=processor, **(objects or {})
    )
    before = {**weights(trainer.model), **averages(trainer)}
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    after = {**weights(trainer.model), **averages(trainer)}
    steps = [
        {name: value for name, value in entry.items() if isinstance(value, float)}
        for entry in trainer.state.log_history
        if "grad_norm" in entry
    ]
    return trainer, {
        "update": {name: after[name] - before[name] for name in before},
        "steps": steps,
        "sharded": any(isinstance(p, DTensor) for p in trainer.model.parameters()),
    }


def start(**options):
    """Forgets the accelerator and the engine of the scenario before; gives the state of the processes."""
    AcceleratorState._reset_state()
    unset_hf_deepspeed_config()
    if ENGINE in ZERO and "WORLD_SIZE" in os.environ:
        return PartialState(backend="gloo", **options)  # accelerate refuses DeepSpeed with `cpu=True`
    return PartialState(cpu=True, **options)


def engine_options(state):
    """Arguments of a config."""
    if ENGINE in ZERO and state.num_processes > 1:
        zero = {"stage": ZERO[ENGINE], "stage3_gather_16bit_weights_on_model_save": True}
        config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
        config |= {"gradient_clipping": "auto", "zero_optimization": zero}
        return {"deepspeed": config, "use_cpu": False, "accelerator_config": {"use_configured_state": True}}
    return {"use_cpu": True, "fsdp": ENGINE == "fsdp2" and state.num_processes > 1}


def weights(model):
    """Copies of the parameters, whole also where each process holds a part."""
    return {name: whole(p) for name, p in model.named_parameters()}


def averages(trainer):
    """Copies of the averages of the policy's parameters."""
    average = getattr(trainer, "ema", None)
    return {} if average is None else {f"average of {name}": whole(value) for name, value in average._average.items()}


def whole(value):
    if hasattr(value, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([value]):
            return value.detach().clone()
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


# Datasets


def row(question, **media):
    return {"prompt": [{"role": "user", "content": question}], **media}


def image_rows():
    sizes = [(84, 56), (56, 112), (112, 84), (56, 56), (84, 84), (112, 56), (84, 112), (56, 84)]
    return [
        row("What is in the image? " * (1 + i % 2), image=image(*size, seed=i)["image"])
        for i, size in enumerate(sizes)
    ]


def audio_rows(seconds=(0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)):
    return [
        row("What do you hear?", audio={"array": audio(length, seed=i)["audio"], "sampling_rate": RATE})
        for i, length in enumerate(seconds)
    ]


# Scenarios of DDP


def straddling_group(folder):
    """One group, half of it on each of two processes."""
    return train(folder, "qwen2_5_vl", image_rows(), GROUP)[1]


def straddling_groups(folder):
    """Three groups: each of two processes has a whole one and half of another."""
    return train(folder, "qwen2_5_vl", image_rows(), 3 * GROUP)[1]


REUSED = {"beta": 0.1, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4}


def whole_groups(folder):
    """Two micro-batches of whole groups per generation, used twice, with a reference model."""
    return train(folder, "qwen2_5_vl", image_rows(), 2 * GROUP, gradient_checkpointing=False, **REUSED)[1]


def whole_groups_checkpointed(folder):
    return train(folder, "qwen2_5_vl", image_rows(), 2 * GROUP, gradient_checkpointing=True, **REUSED)[1]


def mixed_rows(folder):
    """In the first step the second of two processes has no media, in the second step the first has none."""
    rows = [{**row, "image": row["image"] if i in (0, 3) else None} for i, row in enumerate(image_rows())]
    return train(folder, "qwen2_5_vl", rows, 2 * GROUP)[1]


def apart(folder):
    """
    Images and clips of different lengths, which this family takes in forwards of their own: two on the first of two
    processes, one on the second.
    """
    audios = [{**row, "image": None} for row in audio_rows()]
    images = [{**row, "audio": None} for row in image_rows()]
    rows = [*audios[:1], *images[1:4], *audios[4:6], *images[6:]]
    return train(folder, "gemma3n", rows, 4 * GROUP)[1]


def sampled(folder):
    """A group straddles processes, which sample its completions."""
    trainer, result = train(folder, "qwen2_audio", audio_rows(), GROUP, RecordingTrainer, self_check=True)
    return {**result, "self_check": dataclasses.asdict(trainer._self_check), "completions": trainer.sampled}


# Algorithms that need the whole batch of all processes: one group on each of two, and half of another. The second
# generation batch comes from a policy that has left its reference.
OFF_POLICY = {"num_iterations": 2, "max_steps": 4, "beta": 0.1, "learning_rate": 0.1}


def own_estimator(rewards, rewards_per_func, group_ids, mask, old_logps, ref_logps):
    """One advantage per token, less the divergence from the reference."""
    given = {
        "rewards": rewards,
        "rewards_per_func": rewards_per_func,
        "group_ids": group_ids,
        "mask": mask,
        "old_logps": old_logps,
        "ref_logps": ref_logps,
    }
    ESTIMATED.append({name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in given.items()})
    means = rewards.view(-1, GROUP).mean(1)[group_ids]
    return (rewards - means)[:, None] - 0.1 * torch.where(mask.bool(), old_logps - ref_logps, 0)


ESTIMATED = []  # digests of what the estimator was called with

ALGORITHMS = {
    "reinforce": {"advantage_estimator": "reinforce"},
    "reinforce_baseline": {"advantage_estimator": "reinforce_baseline"},
    "cpgd": {"advantage_estimator": "cpgd", "loss_type": "cpgd", "kl_estimator": "k2"},
    "gmpo": {"loss_type": "gmpo", "epsilon": 0.4, "kl_estimator": "k2"},
    "dual_clip": {
        "loss_type": "dual_clip",
        "kl_estimator": "k2",
        "advantage_estimator": "dr_grpo",  # which doesn't undo the scale
        "reward_running_scale": True,
    },
    "adaptive_kl": {"kl_target": 0.01, "kl_horizon": 40, "gradient_accumulation_steps": 2},
    "entropies_of_rollout": {"top_entropy_quantile": 0.4, "gradient_accumulation_steps": 2},
    "current_entropies": {
        "top_entropy_quantile": 0.4,
        "entropy_source": "current",
        "entropy_renormalize": True,
        "gradient_accumulation_steps": 2,
    },
    "own_estimator": {"advantage_estimator": own_estimator},
}


def algorithm(name, folder):
    ESTIMATED.clear()
    options = {**OFF_POLICY, **ALGORITHMS[name]}
    trainer, result = train(folder, "qwen2_5_vl", image_rows(), 3 * GROUP, **options)
    return {**result, "estimated": list(ESTIMATED)}


# Scenarios of two processes only, which exchange their own groups and sample with random numbers of their own

EXCHANGED = {
    "dynamic_sampling": True,
    "dynamic_sampling_max_rounds": 2,
    "replay_buffer_size": 4,
    "beta": 0.1,
    "learning_rate": 0.1,
    "shuffle_dataset": True,
    "trainer_class": ExchangingTrainer,
    "reward_func": unequal_reward,
}


def exchanged(folder):
    """Two groups on each process, with clips in forwards of their own, of which the processes need different numbers."""
    trainer, result = train(folder, "gemma3n", audio_rows(), 4 * GROUP, max_steps=4, **EXCHANGED)
    return {**result, "batches": trainer.batches, "drawn": trainer.drawn}


def resumed(folder):
    """Two updates on each generation batch, from two micro-batches each; stops between them."""
    options = {
        **EXCHANGED,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
        "max_steps": 6,
        "optim": "adamw_torch",
        "learning_rate": 0.01,
        "save_strategy": "steps",
        "save_steps": 3,
        "kl_target": 0.01,
        "kl_horizon": 100,
        "self_check": True,
    }
    _, straight = train(folder / "straight", "qwen2_5_vl", image_rows(), 2 * GROUP, **options)
    PartialState().wait_for_everyone()
    checkpoint = folder / "straight" / "output" / "checkpoint-3"
    _, result = train(folder / "again", "qwen2_5_vl", image_rows(), 2 * GROUP, checkpoint=checkpoint, **options)
    updates = straight["update"], result["update"]
    logs = [
        [{name: value for name, value in step.items() if "time" not in name} for step in each["steps"]]
        for each in (straight, result)
    ]
    return {
        **result,
        "otherwise": [name for name in updates[0] if not torch.equal(updates[0][name], updates[1][name])],
        "logs": logs,
    }


def resumed_by_more(folder):
    """The second process has no state of its own, as after a run of one process."""
    options = {**EXCHANGED, "max_steps": 4, "kl_target": 0.01, "kl_horizon": 100, "self_check": True}
    saving = {"save_strategy": "steps", "save_steps": 2}
    train(folder / "before", "qwen2_5_vl", image_rows(), 2 * GROUP, **options, **saving)
    checkpoint = folder / "before" / "output" / "checkpoint-2"
    state = PartialState()
    state.wait_for_everyone()
    if state.is_main_process:
        (checkpoint / "rollout_state_1.pt").unlink()
        saved = load_rollout_state(checkpoint, 0)
        saved["batches"]["num_processes"] = 1
        save_rollout_state(checkpoint, 0, saved)
    state.wait_for_everyone()
    trainer, result = train(folder / "after", "qwen2_5_vl", image_rows(), 2 * GROUP, checkpoint=checkpoint, **options)
    shared = [trainer.beta, trainer._n_extra_prompts, dataclasses.asdict(trainer._self_check)]
    return {**result, "shared": shared, "expected_before": load_rollout_state(checkpoint, 0)["kl_controller"]["value"]}


class InjectingMaker(NaiveExperienceMaker):
    """Takes responses that depend on the prompt alone; those to later prompts are longer."""

    def _generate(self, prompts, config, pad_id):
        responses = []
        for i, prompt in enumerate(prompts):
            place = int(self.tokenizer.decode(prompt.input_ids).split("number ")[1].split()[0])
            generator = torch.Generator().manual_seed(100 * place + i)
            length = 2 + 2 * place + int(torch.randint(0, 3, (), generator=generator))
            responses.append(torch.randint(50, 200, (length,), generator=generator))
        return torch.nn.utils.rnn.pad_sequence(responses, batch_first=True, padding_value=pad_id)


def experience(folder):
    """Statistics of the experience maker are those of all processes, whose responses have different widths."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    model, processor = FAMILIES["qwen2_5_vl"].build()
    reference = FAMILIES["qwen2_5_vl"].build()[0]
    with torch.no_grad():
        reference.get_output_embeddings().weight.mul_(1.2)
    prompts = [f"Is there a bird in number {i} of them?" for i in range(4)]
    each = len(prompts) // accelerator.num_processes
    prompts = prompts[accelerator.process_index * each :][:each]
    advantages = {}
    for estimator in ("group_norm", "rloo", "reinforce", "reinforce_baseline", "cpgd", "dr_grpo"):
        config = ExperienceConfig(
            estimator,
            n_samples_per_prompt=3,
            micro_rollout_batch_size=3,
            kl_in_reward=estimator != "cpgd",
            reward_running_scale=True,
            progress=False,
            accelerator=accelerator,
        )
        maker = InjectingMaker(
            Actor(model, bf16=False),
            None,
            None,
            Actor(reference, bf16=False),
            processor.tokenizer,
            64,
            FixedKLController(0.1),
            config,
            reward_fn=lambda completion_ids, **kwargs: [sum(ids) % 11 / 10 for ids in completion_ids],
        )
        made = maker.make_experience_list(prompts)
        rows = [a[mask].tolist() for e in made for a, mask in zip(e.advantages, e.action_mask, strict=True)]
        advantages[estimator] = rows
    return {"advantages": advantages}


def refused(folder):
    """A process must hold whole groups to exchange them."""
    messages = []
    for option in ({"dynamic_sampling": True}, {"replay_buffer_size": 4}):
        try:
            MultimodalGRPOConfig(
                str(folder), per_device_train_batch_size=GROUP // 2, num_generations=GROUP, use_cpu=True, **option
            )
        except ValueError as error:
            messages.append(str(error))
    return {"messages": messages}


# PPO


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


def ppo(folder, family="qwen2_5_vl", rows=None, batch=3 * GROUP, objects=None, **options):
    """
    One group and half of another on each of two processes, and two supervised rows for each global micro-batch.

    Beside what [`train`] returns, the result holds the ids of the `supervised` completions.
    """
    rows = image_rows() if rows is None else rows
    options = {**PPO, **options}
    # Completions of equal length, so that the mean of two processes is that over all tokens
    answered = [{**each, "completion": f"number {i}"} for i, each in enumerate(rows[:7])]
    objects = {**(objects or {}), "ptx_dataset": Dataset.from_list(answered)}
    options["per_device_ptx_batch_size"] = 2 // PartialState().num_processes
    trainer, result = train(folder, family, rows, batch, InjectingPPO, objects=objects, **options)
    return trainer, {**result, "supervised": trainer.supervised}


def ppo_images(folder):
    """All weights get gradients, so that DDP need not look for others."""
    return ppo(folder, gradient_checkpointing=False, ddp_find_unused_parameters=False)[1]


def ppo_shared_trunk(folder):
    """Two micro-batches a step, a reward scale and a KL coefficient that follow all processes."""
    options = {"gradient_accumulation_steps": 2, "reward_running_scale": True, "kl_target": 0.01, "kl_horizon": 40}
    # Transformers reads positions of the audio tower without a call, so that ZeRO-3 sees no gradient of them
    data = ("qwen2_5_vl", image_rows()) if ENGINE == "zero3" else ("qwen2_audio", audio_rows())
    return ppo(folder, *data, shared_trunk=True, value_learning_rate=0.05, **options)[1]


def ppo_adapter(folder):
    checkpointing = ENGINE != "zero3"  # where TRL makes it reentrant
    objects = {"peft_config": LORA}
    return ppo(folder, objects=objects, learning_rate=0.5, gradient_checkpointing=checkpointing)[1]


def ppo_adam(folder):
    """While the policy is frozen, Adam must not count steps of it."""
    options = {"optim": "adamw_torch", "learning_rate": 0.01, "value_learning_rate": 0.02, "weight_decay": 0.1}
    return ppo(folder, freezing_actor_steps=2, **options)[1]


def ppo_mixed(folder):
    """In the first generation batch the second of two processes has no media, in the second one the first has none."""
    rows = [{**row, "image": row["image"] if i in (0, 3) else None} for i, row in enumerate(image_rows())]
    return ppo(folder, rows=rows, batch=2 * GROUP)[1]


def ppo_saved(folder):
    """A sampled step after the injected ones; policy, critic and average are saved and loaded again."""
    trainer, result = ppo(folder, "qwen2_audio", audio_rows(), batch=2 * GROUP, max_steps=5)
    trained = weights(trainer.model)
    trainer.save_model(folder / "saved")
    PartialState().wait_for_everyone()
    unset_hf_deepspeed_config()  # so that ZeRO-3 doesn't split what is loaded
    model_class = type(FAMILIES["qwen2_audio"].build()[0])
    critic = Critic.from_pretrained(folder / "saved" / "critic", model_class)
    saved = {
        **weights(model_class.from_pretrained(folder / "saved")),
        **{f"critic.{name}": value for name, value in weights(critic).items()},
    }
    if trainer.ema is not None:
        average = weights(model_class.from_pretrained(folder / "saved" / "ema"))
        saved |= {f"average of {name}": value for name, value in average.items()}
        trained |= averages(trainer)
        AutoProcessor.from_pretrained(folder / "saved" / "ema")
    still = weights(trainer.model)
    return {
        **result,
        "saved_otherwise": [n for n in saved | trained if n not in saved or not torch.equal(saved[n], trained[n])],
        "changed_by_saving": [n for n in still if not torch.equal(still[n], trained[n])],
        "completions": trainer.sampled,
    }


def ppo_resumed(folder):
    """Stops in the second epoch of a generation batch, before the policy's first step."""
    options = {"gradient_accumulation_steps": 2, "optim": "adamw_torch", "learning_rate": 0.01, "max_steps": 6}
    options |= {"value_learning_rate": 0.02, "save_strategy": "steps", "save_steps": 3, "steps_per_generation": 4}
    options |= {"batch": 2 * GROUP, "freezing_actor_steps": 4}
    _, straight = ppo(folder / "straight", **options)
    PartialState().wait_for_everyone()
    checkpoint = folder / "straight" / "output" / "checkpoint-3"
    trainer, result = ppo(folder / "again", checkpoint=checkpoint, **options)
    updates = straight["update"], result["update"]
    logs = [
        [{name: value for name, value in step.items() if "time" not in name} for step in each["steps"]]
        for each in (straight, result)
    ]
    return {
        **result,
        "otherwise": [name for name in updates[0] if not torch.equal(updates[0][name], updates[1][name])],
        "logs": logs,
        "supervised": [straight["supervised"][6:], result["supervised"]],
    }


def ppo_refused(folder):
    """A second forward with reentrant checkpointing, and what ZeRO-3 can't do."""
    messages = []
    cases = [{"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}]
    if ENGINE == "zero3":
        cases.append({"ema_decay": 0.8})
    for i, options in enumerate(cases):
        try:
            ppo(folder / str(i), **options)
        except ValueError as error:
            messages.append(str(error))
    return {"messages": messages}


# Scenarios of FSDP2, beside those above


def greedy(folder, family, rows, batch=2 * GROUP):
    """Two steps on given completions, one on sampled ones, which end at different lengths, and saving."""
    trainer, result = train(
        folder,
        family,
        rows,
        batch,
        end_ids=list(range(20, 400, 5)),
        max_steps=3,
        generation_kwargs={"do_sample": False},
    )
    trainer.save_model(folder / "saved")
    PartialState().wait_for_everyone()
    model_class = type(FAMILIES[family].build()[0])
    saved, trained = weights(model_class.from_pretrained(folder / "saved")), weights(trainer.model)
    AutoProcessor.from_pretrained(folder / "saved")
    result["saved_otherwise"] = [name for name in saved | trained if not torch.equal(saved[name], trained[name])]
    return {**result, "completions": trainer.sampled}


def greedy_images(folder):
    return greedy(folder, "qwen2_5_vl", image_rows())


def greedy_audio(folder):
    return greedy(folder, "qwen2_audio", audio_rows())


def greedy_apart(folder):
    """Clips of different lengths in forwards of their own, of which two processes need different numbers."""
    return greedy(folder, "gemma3n", audio_rows((0.2, 0.4, 0.3, 0.3, 0.2, 0.2, 0.5, 0.3)), 4 * GROUP)


def main():
    torch.set_num_threads(1)
    if ENGINE == "fsdp2":
        enable_fsdp2_on_cpu()
    # A process that waits in vain fails after a minute, and says where
    rank = start(timeout=timedelta(minutes=1)).process_index
    scenarios = {**globals(), **{name: functools.partial(algorithm, name) for name in ALGORITHMS}}
    for name in SCENARIOS:
        result = scenarios[name](FOLDER / name)
        save_file(result.pop("update", {}), FOLDER / f"{name}-{rank}.safetensors")
        (FOLDER / f"{name}-{rank}.json").write_text(json.dumps(result))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
