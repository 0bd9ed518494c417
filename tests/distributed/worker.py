# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scenarios of distributed training. Every process runs all of them and writes what it saw; the tests compare."""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from datasets import Dataset
from families import FAMILIES, RATE, audio, image
from fsdp2_on_cpu import enable_fsdp2_on_cpu
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer


ENGINE, FOLDER = sys.argv[1], Path(sys.argv[2])
GROUP = 4


class InjectedTrainer(MultimodalGRPOTrainer):
    """Completions depend on the step and the place in the global batch alone, not on the number of processes."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        completions = []
        for i in range(len(prompt_ids)):
            place = self.accelerator.process_index * len(prompt_ids) + i
            generator = torch.Generator().manual_seed(1000 * self.state.global_step + place)
            length = int(torch.randint(1, 9, (), generator=generator))
            completions.append(torch.randint(50, 200, (length,), generator=generator).tolist())
        return completions, None


def reward(completion_ids, **kwargs):
    return [sum(ids) % 11 / 10 for ids in completion_ids]


def row(question, **media):
    return {"prompt": [{"role": "user", "content": question}], **media}


def image_rows():
    sizes = [(84, 56), (56, 112), (112, 84), (56, 56), (84, 84), (112, 56), (84, 112), (56, 84)]
    return [row("What is in the image?" * (1 + i % 2), image=image(*size, seed=i)["image"]) for i, size in enumerate(sizes)]


def audio_rows():
    return [
        row("What do you hear?", audio={"array": audio(0.2 + 0.1 * i, seed=i)["audio"], "sampling_rate": RATE})
        for i in range(8)
    ]


def whole(tensor):
    """The tensor on every process, also where each holds a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(model):
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def train(name, family, rows, batch, trainer_class=InjectedTrainer, **options):
    """Trains on global batches of `batch` samples; returns `(trainer, result)`."""
    AcceleratorState._reset_state()
    state = PartialState(cpu=True)
    folder = FOLDER / name
    model, processor = FAMILIES[family].build()
    model.save_pretrained(folder / "model")  # writes on the first process
    state.wait_for_everyone()
    args = MultimodalGRPOConfig(
        **{
            "output_dir": str(folder / "output"),
            "per_device_train_batch_size": batch // state.num_processes,
            "num_generations": GROUP,
            "max_completion_length": 8,
            "max_steps": 2,
            "learning_rate": 0.5,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "shuffle_dataset": False,
            "self_check": False,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
            "ddp_timeout": 40,
            "fsdp": ENGINE == "fsdp2" and state.num_processes > 1,
            **options,
        }
    )
    trainer = trainer_class(str(folder / "model"), reward, args, Dataset.from_list(rows), processing_class=processor)
    before = weights(trainer.model)
    trainer.train()
    after = weights(trainer.model)
    steps = [
        {key: value for key, value in entry.items() if isinstance(value, float)}
        for entry in trainer.state.log_history
        if "grad_norm" in entry
    ]
    return trainer, {"update": {key: after[key] - before[key] for key in before}, "steps": steps}


SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


@scenario
def straddling_groups():
    return train("straddling_groups", "qwen2_5_vl", image_rows(), 4)[1]


@scenario
def straddling_groups_of_three():
    return train("straddling_groups_of_three", "qwen2_5_vl", image_rows(), 12)[1]


WHOLE = {"beta": 0.1, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4}

@scenario
def whole_groups():
    return train("whole_groups", "qwen2_5_vl", image_rows(), 8, gradient_checkpointing=False, **WHOLE)[1]


@scenario
def whole_groups_ckpt():
    return train("whole_groups_ckpt", "qwen2_5_vl", image_rows(), 8, gradient_checkpointing=True, **WHOLE)[1]


@scenario
def sampled():
    trainer, result = train("sampled", "qwen2_audio", audio_rows(), 4, MultimodalGRPOTrainer, self_check=True)
    check = dataclasses.asdict(trainer._self_check)
    return {**result, "self_check": check}


def mixed_rows():
    return [dict(r, image=r["image"] if i in (0, 3, 4, 7) else None) for i, r in enumerate(image_rows())]


@scenario
def mixed():
    return train("mixed", "qwen2_5_vl", mixed_rows(), 8)[1]


@scenario
def mixed_padded():
    return train("mixed_padded", "qwen2_5_vl", mixed_rows(), 8, packing="padded")[1]


def ragged_rows():
    return [
        row("What do you hear?", audio={"array": audio(0.2 + 0.1 * i, seed=i)["audio"], "sampling_rate": RATE})
        for i in range(8)
    ]


@scenario
def granite():
    return train("granite", "granite_speech", audio_rows(), 16, gradient_checkpointing=False, disable_dropout=True)[1]


def image_or_audio_rows():
    images, audios = image_rows(), audio_rows()
    return [dict(images[i], audio=None) if i % 2 else dict(audios[i], image=None) for i in range(8)]


@scenario
def gemma3n():
    return train("gemma3n", "gemma3n", image_or_audio_rows(), 16)[1]


@scenario
def gemma3n_one():
    return train("gemma3n_one", "gemma3n", image_or_audio_rows(), 8)[1]


class RecordingTrainer(MultimodalGRPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sampled = []

    def _generate_single_turn(self, *args, **kwargs):
        output = super()._generate_single_turn(*args, **kwargs)
        self.sampled += output[0]
        return output


def greedy_run(name, family, rows, eos=None, **options):
    trainer, result = train(
        name, family, rows, 8, RecordingTrainer, generation_kwargs={"do_sample": False, **({"eos_token_id": eos} if eos else {})},
        max_steps=1, max_completion_length=12, **options
    )
    return {**result, "completions": trainer.sampled}


@scenario
def greedy_qwen():
    return greedy_run("greedy_qwen", "qwen2_5_vl", image_rows())


@scenario
def greedy_audio():
    return greedy_run("greedy_audio", "qwen2_audio", audio_rows())


@scenario
def fsdp_qwen():
    return train("fsdp_qwen", "qwen2_5_vl", image_rows(), 8)[1]


@scenario
def fsdp_qwen_beta():
    return train("fsdp_qwen_beta", "qwen2_5_vl", image_rows(), 8, beta=0.1, gradient_checkpointing=True, gradient_accumulation_steps=2, num_iterations=2, max_steps=4)[1]


@scenario
def fsdp_audio():
    return train("fsdp_audio", "qwen2_audio", audio_rows(), 8)[1]


@scenario
def greedy_eos():
    return greedy_run("greedy_eos", "qwen2_audio", audio_rows(), eos=list(range(20, 400, 4)))


@scenario
def mixed_sampled():
    trainer, result = train("mixed_sampled", "qwen2_5_vl", mixed_rows(), 8, MultimodalGRPOTrainer, self_check=True)
    check = dataclasses.asdict(trainer._self_check)
    return {**result, "self_check": check}


def main():
    torch.set_num_threads(1)
    if ENGINE == "fsdp2":
        enable_fsdp2_on_cpu()
    rank = PartialState(cpu=True).process_index
    for name in sys.argv[3:]:
        result = SCENARIOS[name]()
        save_file(result.pop("update"), FOLDER / f"{name}-{rank}.safetensors")
        (FOLDER / f"{name}-{rank}.json").write_text(json.dumps(result))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
