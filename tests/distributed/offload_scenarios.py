# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scenarios in which states of the update leave the device while the model samples."""

from functools import partial

from accelerate import PartialState
from helpers.samplers import Wrapped
from peft import LoraConfig
from ppo_scenarios import InjectingPPO
from training import ENGINE, GROUP, InjectingTrainer, compared, image_rows, train

from trl_multimodal_rft.trainers.sampling.offload import storages, weights


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


class Counts(Wrapped):
    """Counts, at each rollout, bytes of memory by what they are for."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.live = []
        for parameter in trainer.ref_model.parameters() if trainer.ref_model is not None else ():
            if parameter.numel() > 0 and ENGINE in ("ddp", "zero2"):
                parameter.data = parameter.data.clone()  # which is mapped from its file, as none on a GPU is

    def __call__(self, model, prompts, **options):
        trainer = self.trainer
        optimizer = self.trainer.optimizer
        critic = [] if getattr(trainer, "critic", None) is None else [*weights(trainer.critic)]
        ids = set(map(id, critic))
        tensors = {
            "policy": [each for each in weights(trainer.model) if id(each) not in ids],
            "critic": critic,
            "gradients": [parameter.grad for parameter in trainer.model.parameters()],
        }
        while hasattr(optimizer, "optimizer"):
            for name in ("averaged_gradients", "all_grad_tensors"):
                given = getattr(optimizer, name, None) or {}
                tensors["gradients"] += [each for group in given.values() for each in group or ()]
            tensors["gradients"].append(getattr(optimizer, "grad_partitions_flat_buffer", None))
            optimizer = optimizer.optimizer
        tensors["optimizer"] = [value for state in optimizer.state.values() for value in state.values()]
        # Copies in float32, with which DeepSpeed steps
        tensors["copies"] = list(optimizer.state) if ENGINE.startswith("zero") else []
        tensors["reference"] = [] if trainer.ref_model is None else weights(trainer.ref_model)
        count = {}
        for name, each in tensors.items():
            count[name] = sum(storage.nbytes() for storage in storages(each).values())
        self.live.append(count)
        return super().__call__(model, prompts, **options)


def both(folder, trainer_class, **options):
    """
    Runs without the option, and with it: where they differ, and what is in memory at each rollout.

    Gradients are accumulated over two rollouts. The second update takes the model's own samples.
    """
    trainer_class = type("Offloading", (trainer_class,), {"n_given": 1})
    given = {"optim": "adamw_torch", "learning_rate": 0.01, "weight_decay": 0.1, "max_steps": 2, "beta": 0.1}
    given |= {"gradient_accumulation_steps": 2, "steps_per_generation": 1, **options}
    runs = []
    for offload in (False, True):
        more = {"trainer_class": trainer_class, "sampler": Counts, "offload_during_generation": offload}
        runs.append(train(folder / str(offload), "qwen2_5_vl", image_rows(), 2 * GROUP, **more, **given))
        PartialState().wait_for_everyone()
    (plain, straight), (ours, result) = runs
    return compared(straight, result) | {"live": [plain.sampler.live, ours.sampler.live]}


CHECKPOINTED = {"gradient_checkpointing": ENGINE != "zero3"}
AVERAGED = {"ema_decay": None if ENGINE == "zero3" else 0.8}
offloaded = partial(both, trainer_class=InjectingTrainer)
offloaded_adapter = partial(both, trainer_class=InjectingTrainer, objects={"peft_config": LORA}, **CHECKPOINTED)
offloaded_ppo = partial(both, trainer_class=InjectingPPO, num_ppo_epochs=1, gradient_checkpointing=False, **AVERAGED)
