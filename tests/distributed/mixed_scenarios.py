# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scenarios of processes that hold different media."""

from unittest import mock

import PIL.Image
import torch
from datasets import Dataset
from helpers.chats import RATE, audio, image, video
from helpers.samplers import Remembers
from peft import LoraConfig
from training import GROUP, injected, row, start, train

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer
from trl_multimodal_rft.forward import processes
from trl_multimodal_rft.trainers import base


class Mixed(Remembers):
    """Samples the completions of the last step and of evaluations, and remembers these alone."""

    def __call__(self, model, prompts, *, step, **options):
        if self.trainer.model.training and step < self.trainer.args.max_steps - 1:
            return injected(self.trainer, len(prompts)), None
        return super().__call__(model, prompts, step=step, **options)


class MixedTrainer(MultimodalGRPOTrainer):
    """
    Takes completions that depend on the step and on the place in the global batch alone, but samples those of the last
    step and of evaluations.

    Remembers what it sampled, and for each forward that is differentiated the kinds of its media and of its
    companions.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sampler = Mixed(self)
        self.forwards = []
        self._companions, self._policy.processes.dummies = self._policy.processes.dummies, self._watched

    def _watched(self, model, prompts, *args):
        dummies = self._companions(model, prompts, *args)
        if torch.is_grad_enabled():
            self.forwards.append([kinds(prompts), kinds(dummies)])
        return dummies


class MixedPPO(MixedTrainer, MultimodalPPOTrainer):
    pass


def kinds(prompts):
    return sorted(set().union(*(prompt.modalities for prompt in prompts)))


def mixed(folder, family, steps, check=None, lora=None, trainer_class=MixedTrainer, **options):
    """Trains on prompts that are different on each of two processes."""
    state = start()  # before a model is built that the engine of the scenario before would split
    rows = [each for step in steps for each in step]
    columns = dict.fromkeys(name for each in [*rows, *(check or [])] for name in each)
    options = {
        "max_steps": len(steps),
        "ddp_find_unused_parameters": False,
        "generation_kwargs": {"do_sample": False},
        **options,
    }
    objects = {}
    if check is not None:
        objects["eval_dataset"] = Dataset.from_list([{**columns, **each} for each in check])
        options |= {"eval_strategy": "steps", "eval_steps": len(steps) - 1}
        options["per_device_eval_batch_size"] = len(check) * GROUP // state.num_processes
    if lora is not None:
        frozen = "|".join(rf"{name}\..*|{name}" for name in lora) or None
        objects["peft_config"] = LoraConfig(
            r=4, target_modules="all-linear", exclude_modules=frozen, init_lora_weights=False
        )
    with mock.patch.object(processes, "find_tower", wraps=processes.find_tower) as find_tower:
        trainer, result = train(
            folder,
            family,
            [{**columns, **each} for each in rows],
            len(steps[0]) * GROUP // options.get("gradient_accumulation_steps", 1),
            trainer_class,
            end_ids=list(range(20, 400, 5)),
            objects=objects,
            **options,
        )
    evaluations = [
        [entry["eval_reward"], entry["eval_entropy"]] for entry in trainer.state.log_history if "eval_reward" in entry
    ]
    return {
        **result,
        "evaluations": evaluations,
        "samples": [ids for _, ids, _ in trainer.sampler.calls],
        "forwards": trainer.forwards,
        "searches": find_tower.call_count,
    }


# Rows


def text(words="Is there a cat, a dog or a bird?"):
    return row(words)


def images(*sizes):
    """One prompt with images of so many tokens in width and height."""
    return row("What is in the image?", images=[image(28 * w, 28 * h, seed=10 * w + h)["image"] for w, h in sizes])


def clip(frames=4, **media):
    pictures = [PIL.Image.fromarray(frame) for frame in video(frames, 56, 56, seed=frames)["video"]]
    return row("Describe the video.", video=pictures, **media)


def sound(seconds=0.6):
    return {"array": audio(seconds, seed=int(10 * seconds))["audio"], "sampling_rate": RATE}


def audios(seconds=0.6):
    return row("What do you hear?", audio=sound(seconds))


# Scenarios. In each step the first of two processes gets the first half of the prompts.


def mixed_vision(folder):
    steps = [
        [images((3, 2)), text()],
        [text(), images((2, 2), (4, 3))],
        [clip(), images((2, 3))],
        [text(), text("What is it?")],
        [images((2, 2)), text()],
    ]
    options = {"gradient_checkpointing": True, "media_contribution_steps": 1}
    return mixed(folder, "qwen2_5_vl", steps, check=[text(), clip(6)], **options)


def mixed_deepstack(folder):
    """The language model gets features of the tower in several layers."""
    steps = [[images((3, 2)), text()], [text(), clip()], [clip(6), images((2, 3))], [text(), images((4, 3))]]
    return mixed(folder, "qwen3_vl", steps, gradient_checkpointing=False, self_check=True)


def mixed_audio(folder):
    steps = [[audios(), text()], [text(), audios(0.3)], [text(), text("What is it?")], [audios(0.9), text()]]
    options = {"gradient_checkpointing": True, "self_check": True, "ds3_gather_for_generation": False}
    return mixed(folder, "qwen2_audio", steps, check=[text(), audios()], **options)


def mixed_omni(folder):
    """In batches of one modality, one tower or both have nothing to do on any process."""
    steps = [
        [audios(), images((3, 2))],
        [audios(0.3), audios(0.9)],
        [clip(audio=sound()), text()],
        [text(), text("What is it?")],
        [images((2, 2)), audios()],
    ]
    options = {"gradient_checkpointing": True, "media_contribution_steps": 1}
    return mixed(folder, "qwen2_5_omni", steps, check=[audios(), clip()], **options)


def mixed_padded(folder):
    steps = [[audios(), text()], [clip(), images((3, 2))], [text(), images((2, 2))]]
    return mixed(folder, "qwen2_5_omni", steps, packing="padded", beta=0.1)


# Two micro-batches a step: the media are in the earlier one, then in the later one, then in one on each process.
ACCUMULATED = [
    [images((3, 2)), text(), text(), text("What is it?")],
    [text(), text("What is it?"), text(), images((2, 2), (4, 3))],
    [text(), images((3, 3)), clip(), text()],
]


def accumulated(folder, **options):
    options = {"gradient_accumulation_steps": 2, "beta": 0.1, **options}
    with mock.patch.object(base, "micro_batch_order", lambda prompts, *args: range(len(prompts))):
        return mixed(folder, "qwen2_5_vl", ACCUMULATED, **options)


def mixed_accumulated(folder):
    return accumulated(folder, gradient_checkpointing=False)


def mixed_accumulated_checkpointed(folder):
    return accumulated(folder, gradient_checkpointing=True)


def mixed_accumulated_searched(folder):
    """DDP looks for weights that the last forward doesn't use, as it does by TRL's default."""
    return accumulated(folder, gradient_checkpointing=True, ddp_find_unused_parameters=True)


# One of the processes differentiates each micro-batch in parts, of which some have media
PARTS = [
    [images((4, 3), (4, 4)), text(), text(), text("What is it?")],
    [text(), text("What is it?"), images((2, 2)), clip()],
    [text(), images((4, 3)), text(), text("What is it?")],
]


def mixed_parts(folder):
    return mixed(folder, "qwen2_5_vl", PARTS, max_tokens_per_microbatch=60)


def mixed_parts_searched(folder):
    return mixed(folder, "qwen2_5_vl", PARTS, max_tokens_per_microbatch=60, ddp_find_unused_parameters=True)


def mixed_parts_shared(folder):
    """Companions have values, too, where a critic is a head on the policy."""
    options = {"shared_trunk": True, "num_ppo_epochs": 1, "value_learning_rate": 1.0}
    return mixed(folder, "qwen2_5_vl", PARTS, trainer_class=MixedPPO, max_tokens_per_microbatch=60, **options)


AUDIO = [[audios(), text()], [text(), text("What is it?")], [text(), audios(0.3)]]
NOT_LANGUAGE = ["model.audio_tower", "model.multi_modal_projector"]


def mixed_adapted_language(folder):
    """There is nothing to train in what hears."""
    return mixed(folder, "qwen2_audio", AUDIO, lora=NOT_LANGUAGE, beta=0.1)


def mixed_adapted_projector(folder):
    """The encoder is frozen, but not what comes after it."""
    return mixed(folder, "qwen2_audio", AUDIO, lora=NOT_LANGUAGE[:1], beta=0.1)


def mixed_adapted(folder):
    steps = [[audios(), text()], [images((3, 2)), images((2, 2))], [text(), clip()]]
    return mixed(folder, "qwen2_5_omni", steps, lora=[], beta=0.1)


def mixed_critic(folder):
    """Adapters in the policy's language model alone, and a critic that is trained whole."""
    steps = [[images((3, 2)), text()], [text(), clip()], [text(), images((4, 3))]]
    options = {"lora": ["model.visual"], "trainer_class": MixedPPO, "num_ppo_epochs": 1, "value_learning_rate": 20.0}
    return mixed(folder, "qwen2_5_vl", steps, media_contribution_steps=1, **options)


# Prompts that get forwards of their own, which must be the same on all processes where these hold weights in part


def forwards_apart(folder, steps):
    try:
        return mixed(folder, "gemma3n", steps, learning_rate=1.0)
    except ValueError as error:
        return {"message": str(error)}


def mixed_apart(folder):
    return forwards_apart(folder, [[audios(), text()], [text(), images((2, 2))], [audios(0.3), images((3, 3))]])


def mixed_apart_numbers(folder):
    """The same kinds on the processes, but not in the same numbers of forwards."""
    step = [audios(0.3), audios(0.9), images((2, 2)), audios(0.5), images((3, 2)), text()]
    return forwards_apart(folder, [step, step])
