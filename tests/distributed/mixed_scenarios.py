# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scenarios in which ranks hold different media."""

import functools
from unittest import mock

import PIL.Image
import torch
from datasets import Dataset
from helpers.chats import RATE, audio, image, video
from helpers.samplers import Remembers
from peft import LoraConfig
from training import GROUP, injected, row, start, train

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer, policy
from trl_multimodal_rft.rollout import ranks


class Mixed(Remembers):
    """Samples only the completions of the last step and of evaluations, and records only these."""

    def __call__(self, model, prompts, *, step, **options):
        if self.trainer.model.training and step < self.trainer.args.max_steps - 1:
            # Ends of text, of which there are many, are at no place but the last
            return [[each + (each % 5 == 0) for each in ids] for ids in injected(self.trainer, len(prompts))], None
        return super().__call__(model, prompts, step=step, **options)


class MixedTrainer(MultimodalGRPOTrainer):
    """
    Takes completions that depend only on the step and on the position in the global batch, but samples those of the
    last step and of evaluations.

    Records the samples, and for each differentiated forward pass the kinds of its media and of its dummy inputs.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sampler = Mixed(self)
        self.forwards = []
        self._add_dummies = self._policy._with_dummies
        self._policy._with_dummies = self._watched

    def _watched(self, model, completions, *args, **options):
        padded = self._add_dummies(model, completions, *args, **options)
        if torch.is_grad_enabled():
            n = len(completions.prompts)
            self.forwards.append([kinds(padded.prompts[:n]), kinds(padded.prompts[n:])])
        return padded


class MixedPPO(MixedTrainer, MultimodalPPOTrainer):
    pass


def kinds(prompts):
    return sorted(set().union(*(prompt.modalities for prompt in prompts)))


def mixed(folder, family, steps, check=None, lora=None, trainer_class=MixedTrainer, **options):
    """Trains on prompts that differ between two ranks."""
    state = start()  # before building a model, which the engine of the previous scenario would shard
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
    with mock.patch.object(policy, "find_towers", wraps=policy.find_towers) as find_towers:
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
        "searches": find_towers.call_count,
    }


# Rows


def text(words="Is there a cat, a dog or a bird?"):
    return row(words)


def images(*sizes):
    """Returns one prompt with images of the given widths and heights in tokens."""
    return row("What is in the image?", images=[image(28 * w, 28 * h, seed=10 * w + h)["image"] for w, h in sizes])


def clip(frames=4, **media):
    pictures = [PIL.Image.fromarray(frame) for frame in video(frames, 56, 56, seed=frames)["video"]]
    return row("Describe the video.", video=pictures, **media)


def sound(seconds=0.6):
    return {"array": audio(seconds, seed=int(10 * seconds))["audio"], "sampling_rate": RATE}


def audios(seconds=0.6):
    return row("What do you hear?", audio=sound(seconds))


# Scenarios: family, steps and options. In each step, the first of two ranks gets the first half of the prompts.

CHECKPOINTED = {"gradient_checkpointing": True}
# DDP searches for weights that the last forward pass doesn't use, as by default in TRL
SEARCHED = {"ddp_find_unused_parameters": True}
MEASURED = {"media_contribution_steps": 1}
PARTS = {"max_tokens_per_microbatch": 60}
PPO = {"trainer_class": MixedPPO, "num_ppo_epochs": 1}

# Each step has two micro-batches. The media are in the earlier one, then in the later one, then in one per rank.
ACCUMULATED = [
    [images((3, 2)), text(), text(), text("What is it?")],
    [text(), text("What is it?"), text(), images((2, 2), (4, 3))],
    [text(), images((3, 3)), clip(), text()],
]
# One rank differentiates each micro-batch in parts, only some of which have media
IN_PARTS = [
    [images((4, 3), (4, 4)), text(), text(), text("What is it?")],
    [text(), text("What is it?"), images((2, 2)), clip()],
    [text(), images((4, 3)), text(), text("What is it?")],
]
VISION = [
    [images((3, 2)), text()],
    [text(), images((2, 2), (4, 3))],
    [clip(), images((2, 3))],
    [text(), text("What is it?")],
    [images((2, 2)), text()],
]
DEEPSTACK = [[images((3, 2)), text()], [text(), clip()], [clip(6), images((2, 3))], [text(), images((4, 3))]]
HEARD = [[audios(), text()], [text(), audios(0.3)], [text(), text("What is it?")], [audios(0.9), text()]]
OMNI = [
    [audios(), images((3, 2))],
    [audios(0.3), audios(0.9)],
    [clip(audio=sound()), text()],
    [text(), text("What is it?")],
    [images((2, 2)), audios()],
]
AUDIO = [[audios(), text()], [text(), text("What is it?")], [text(), audios(0.3)]]
ADAPTED = [[audios(), text()], [images((3, 2)), images((2, 2))], [text(), clip()]]
CRITIC = [[images((3, 2)), text()], [text(), clip()], [text(), images((4, 3))]]
TOWER = "model.audio_tower"

SCENARIOS = {
    "mixed_vision": ("qwen2_5_vl", VISION, {"check": [text(), clip(6)], **CHECKPOINTED, **MEASURED}),
    # Several layers of the language model receive features of the vision tower
    "mixed_deepstack": ("qwen3_vl", DEEPSTACK, {"gradient_checkpointing": False, "self_check": True}),
    "mixed_audio": (
        "qwen2_audio",
        HEARD,
        {"check": [text(), audios()], "self_check": True, **CHECKPOINTED},
    ),
    # In single-modality batches, one or both towers are idle on all ranks
    "mixed_omni": (
        "qwen2_5_omni",
        OMNI,
        {"check": [audios(), clip()], "ds3_gather_for_generation": False, **CHECKPOINTED, **MEASURED},
    ),
    "mixed_padded": (
        "qwen2_5_omni",
        [[audios(), text()], [clip(), images((3, 2))], [text(), images((2, 2))]],
        {"packing": "padded", "beta": 0.1},
    ),
    "mixed_parts": ("qwen2_5_vl", IN_PARTS, PARTS),
    "mixed_parts_searched": ("qwen2_5_vl", IN_PARTS, {**PARTS, **SEARCHED}),
    # Dummy inputs have values, too, if a critic is a head on the policy
    "mixed_parts_shared": ("qwen2_5_vl", IN_PARTS, {**PARTS, **PPO, "shared_trunk": True, "value_learning_rate": 1.0}),
    # The audio encoder has nothing to train
    "mixed_adapted_language": (
        "qwen2_audio",
        AUDIO,
        {"lora": [TOWER, "model.multi_modal_projector"], "beta": 0.1},
    ),
    # The encoder is frozen, but not the layers after it
    "mixed_adapted_projector": ("qwen2_audio", AUDIO, {"lora": [TOWER], "beta": 0.1}),
    "mixed_adapted": ("qwen2_5_omni", ADAPTED, {"lora": [], "beta": 0.1}),
    # Only the policy's language model has adapters, and the critic trains all weights
    "mixed_critic": (
        "qwen2_5_vl",
        CRITIC,
        {"lora": ["model.visual"], "value_learning_rate": 20.0, **PPO, **MEASURED},
    ),
}


def scenario(name, folder):
    family, steps, options = SCENARIOS[name]
    return mixed(folder, family, steps, **options)


def accumulated(options, folder):
    with mock.patch.object(ranks, "micro_batch_order", lambda prompts, *args: range(len(prompts))):
        return mixed(folder, "qwen2_5_vl", ACCUMULATED, gradient_accumulation_steps=2, beta=0.1, **options)


def isolated(steps, folder):
    """Isolated prompts need separate forward passes, whose number must match on ranks with sharded weights."""
    try:
        return mixed(folder, "gemma3n", steps, learning_rate=1.0)
    except ValueError as error:
        return {"message": str(error)}


# The ranks hold the same kinds, but run different numbers of forward passes
NUMBERS = [[audios(0.3), audios(0.9), images((2, 2)), audios(0.5), images((3, 2)), text()]] * 2

globals().update({name: functools.partial(scenario, name) for name in SCENARIOS})
mixed_accumulated = functools.partial(accumulated, {"gradient_checkpointing": False})
mixed_accumulated_checkpointed = functools.partial(accumulated, CHECKPOINTED)
mixed_accumulated_searched = functools.partial(accumulated, {**CHECKPOINTED, **SEARCHED})
mixed_isolated = functools.partial(
    isolated, [[audios(), text()], [text(), images((2, 2))], [audios(0.3), images((3, 3))]]
)
mixed_isolated_numbers = functools.partial(isolated, NUMBERS)
