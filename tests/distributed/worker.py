# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scenarios of distributed training: `worker.py <engine> <folder> <scenario>...`, started by `launcher.Run`.

Every process runs the same scenarios and writes what it saw. A scenario has the same global batches for any number of
processes.
"""

import dataclasses
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from datasets import Dataset
from families import FAMILIES, RATE, audio, image
from fsdp2_on_cpu import enable_fsdp2_on_cpu
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoProcessor

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer


ENGINE, FOLDER, SCENARIOS = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
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


def reward(completion_ids, **kwargs):
    return [sum(ids) % 11 / 10 for ids in completion_ids]


def train(folder, family, rows, batch, trainer_class=InjectingTrainer, end_ids=None, **options):
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
        options:
            What differs in the config.

    Returns:
        `tuple`: The trainer, and a result: the `update` of each parameter, the floats that each of the `steps` logged,
        and whether processes hold parameters in part, `sharded`.
    """
    AcceleratorState._reset_state()
    state = PartialState(cpu=True)
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
        "use_cpu": True,
        "bf16": False,
        "fsdp": ENGINE == "fsdp2" and state.num_processes > 1,
    }
    args = MultimodalGRPOConfig(**{**config, **options})
    trainer = trainer_class(str(folder / "model"), reward, args, Dataset.from_list(rows), processing_class=processor)
    before = weights(trainer.model)
    trainer.train()
    after = weights(trainer.model)
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


def weights(model):
    """Copies of the parameters, whole also where each process holds a part."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


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
    rank = PartialState(cpu=True, timeout=timedelta(minutes=1)).process_index
    for name in SCENARIOS:
        result = globals()[name](FOLDER / name)
        save_file(result.pop("update"), FOLDER / f"{name}-{rank}.safetensors")
        (FOLDER / f"{name}-{rank}.json").write_text(json.dumps(result))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
