# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Random combinations of options make the same two updates whether completions are packed or padded, split by a token
budget or accumulated, whether the run resumes or not, and with TRL's trainer where it supports them.

`FUZZ_N` sets the number of combinations; `FUZZ_SEED` runs a single one.
"""

import functools
import itertools
import os
from pathlib import Path

import pytest
import torch
from forward.test_frozen_towers import switch_off
from helpers.distillation_runs import teacher
from helpers.option_draws import (
    AS_TRL,
    NEUTRAL,
    NOT_DRAWN,
    OWN,
    TRANSFORMED,
    TRL_CONFIGS,
    VALUES,
    Draw,
    combinations,
    neutral,
    values_of,
)
from helpers.ppo_runs import rough
from helpers.samplers import Wrapped
from helpers.trainer_utils import (
    TRAINERS,
    audio_rows,
    clip_rows,
    image_rows,
    images_rows,
    length_and_sum,
    load,
    norm,
    text_rows,
    update_of,
    video_rows,
)
from peft import LoraConfig
from transformers import Trainer
from trl import GRPOTrainer, RLOOTrainer, SFTTrainer

from trl_multimodal_rft.encoding.prompts import all_placeholder_ids
from trl_multimodal_rft.rollout.token_filter import EntropySource


TRL_TRAINERS = {"grpo": GRPOTrainer, "rloo": RLOOTrainer, "sft": SFTTrainer}
ROWS = {"text": text_rows, "image": image_rows, "images": images_rows, "video": video_rows, "audio": audio_rows}
ROWS["clips"] = lambda n: clip_rows(range(n))
ANSWERS = ["It is a cat.", "There are two of them, I think.", "No", "A bird."]

N = int(os.environ.get("FUZZ_N", 8))
SEEDS = [int(os.environ["FUZZ_SEED"])] if "FUZZ_SEED" in os.environ else range(N)
TOLERANCE = 1e-4  # relative difference of two updates
ROUNDING = 1e-6  # of the weights, which shows in small updates


# Completions and rewards


def random_tokens(prompt_ids, step: int, kind: str, tokenizer) -> list[list[int]]:
    """Completions that depend on the random state of the run, or, if `"fixed"`, only on prompts and step."""
    generator = None
    completions = []
    if kind == "fixed":
        generator = torch.Generator().manual_seed(10_000 * step + sum(map(sum, prompt_ids)))
    for _ in prompt_ids:
        length, ended = torch.randint(0, 7, (2,), generator=generator).tolist()
        # Special tokens, and so placeholders, come first in the vocabulary
        ids = torch.randint(50, len(tokenizer), (2 + length,), generator=generator).tolist()
        completions.append([*ids[:-1], tokenizer.eos_token_id] if ended < 4 else ids)
    return completions


class RandomTokens(Wrapped):
    def __init__(self, trainer, kind: str):
        super().__init__(trainer)
        self.kind = kind

    def __call__(self, model, prompts, *, step, **options):
        ids = [prompt.input_ids.tolist() for prompt in prompts]
        return random_tokens(ids, step, self.kind, self.tokenizer), None


def with_random_tokens(trainer_class, kind: str):
    """Returns a TRL trainer with the same completions."""

    def sample(self, prompt_ids, *args, **kwargs):
        ids = random_tokens(prompt_ids, self.state.global_step, kind, self._tokenizer)
        return ids if isinstance(self, RLOOTrainer) else (ids, None)

    return type(trainer_class.__name__, (trainer_class,), {"_generate_single_turn": sample})


def of_last_token(completion_ids, **kwargs):
    return [ids[-1] % 3 / 2 for ids in completion_ids]


def partly_equal(prompts, completion_ids, **kwargs):
    """Gives all completions of about every other prompt the same reward, by the prompt's last text."""
    contents = [prompt[-1]["content"] for prompt in prompts]
    texts = [content if isinstance(content, str) else content[-1]["text"] for content in contents]
    numbers = [sum(map(ord, text)) for text in texts]
    rewards = zip(numbers, length_and_sum(completion_ids), strict=True)
    return [1.0 if number % 2 else reward for number, reward in rewards]


REWARDS = {
    "one": length_and_sum,
    "two": [length_and_sum, of_last_token],
    "missing": rough,
    "equal": partly_equal,
}


# Runs


@functools.cache
def rows(kind: str, answered: bool = False):
    dataset = ROWS[kind](8)
    if not answered:
        return dataset
    form = dataset.format
    answers = [[{"role": "assistant", "content": ANSWERS[i % 4]}] for i in range(8)]
    dataset = dataset.with_format(None).add_column("completion", answers)
    return dataset.with_transform(form["format_kwargs"]["transform"]) if form["type"] == "custom" else dataset


def make(draw: Draw, trainer_class: type, config) -> Trainer:
    model, processor = load(draw.family)
    objects = {"model": model, "processing_class": processor, "args": config}
    if draw.lora_dropout is not None:
        settings = {"r": 4, "target_modules": draw.lora_targets, "init_lora_weights": False}
        objects["peft_config"] = LoraConfig(lora_dropout=draw.lora_dropout, **settings)
    if "ptx_coef" in draw.options:
        objects["ptx_dataset"] = rows(draw.rows, answered=True)
    if draw.kind == "sft":
        trainer = trainer_class(train_dataset=rows(draw.rows, answered=True), **objects)
        if trainer_class is SFTTrainer:
            trainer.model_accepts_loss_kwargs = True  # otherwise its loss is a mean over micro-batches of any length
        return trainer
    if draw.kind == "distillation":
        teaches_itself = "self_teacher" in draw.options or ("teacher_view" in draw.options and draw.seed % 2)
        objects["teacher_model"] = None if teaches_itself else teacher(draw.family)
    else:
        objects["reward_funcs"] = REWARDS[draw.reward]
    is_trls = trainer_class in TRL_TRAINERS.values()
    if is_trls and draw.completions != "sampled":
        trainer_class = with_random_tokens(trainer_class, draw.completions)
    trainer = trainer_class(train_dataset=rows(draw.rows), **objects)
    if not is_trls and draw.completions != "sampled":
        trainer.sampler = RandomTokens(trainer, draw.completions)
    return trainer


# Comparisons: the options of a run that must make the same updates, or `None` without such a run


def is_random(draw: Draw) -> bool:
    """Returns whether a forward pass depends on the random state."""
    return bool(draw.lora_dropout) and not draw.options.get("disable_dropout")


def other_packing(draw: Draw, config) -> dict | None:
    if is_random(draw):
        return None
    if draw.kind == "sft":
        return {"packing": not config.packing}
    return {"packing": "padded" if config.packing == "prefix" else "prefix"}


def other_budget(draw: Draw, config) -> dict | None:
    return None if is_random(draw) else {"max_tokens_per_microbatch": None if config.max_tokens_per_microbatch else 30}


def other_accumulation(draw: Draw, config) -> dict | None:
    options = draw.options
    averaged = {"entropy_coef", "ptx_coef"} & options.keys() or options.get("loss_type") == "bnpo"
    if is_random(draw) or averaged or "scope='micro_batch'" in options.get("entropy_source", ""):
        return None  # a mean over the tokens of a micro-batch
    steps = config.gradient_accumulation_steps
    size = config.per_device_train_batch_size
    new = 1 if steps > 1 else 2
    changes = {"gradient_accumulation_steps": new, "per_device_train_batch_size": size * steps // new}
    if draw.kind == "sft":
        return changes
    if not config.packing_shuffle and (config.steps_per_generation > steps or draw.completions != "fixed"):
        return None  # the order of groups depends on the number of micro-batches, and is random
    return {**changes, "steps_per_generation": config.steps_per_generation * new // steps}


def as_trl(draw: Draw, config) -> dict | None:
    if draw.kind not in TRL_TRAINERS or is_random(draw) or draw.rows in TRANSFORMED:
        return None
    if draw.kind == "sft":
        return None if config.freeze or config.learning_rates else {"packing": False}
    if draw.options.keys() & OWN - AS_TRL or draw.reward == "missing" or not config.packing_shuffle:
        return None
    if draw.kind == "grpo":
        source = config.entropy_settings
        filtered = config.top_entropy_quantile < 1
        if not config.loss.sequence_level or (filtered and source != EntropySource("current", "micro_batch")):
            return None
    return {"generation_kwargs": {"suppress_tokens": sorted(all_placeholder_ids(*load(draw.family)))}}


def unkept_features(draw: Draw, config) -> dict | None:
    """Frozen encoders run in each forward, as in transformers."""
    return {} if draw.rows != "text" and (config.freeze or draw.lora_dropout is not None) else None


COMPARISONS = {
    "packing": other_packing,
    "budget": other_budget,
    "accumulation": other_accumulation,
    "TRL": as_trl,
    "features": unkept_features,
    "resumed": lambda draw, config: {},
}


def check(seed: int, folder: Path, *names: str) -> None:
    """Compares the updates of a seed's combination with those of equivalent runs."""
    draws = (draw for draw in combinations(seed) if isinstance(draw, Draw))
    for attempt, draw in enumerate(itertools.islice(draws, 3)):
        checkpoints = folder / str(attempt)
        config = draw.config(checkpoints, save_strategy="steps", save_steps=1, **neutral(draw, "base"))
        changes = {name: COMPARISONS[name](draw, config) for name in names}
        changes = {name: options for name, options in changes.items() if options is not None}
        if not changes:
            return
        try:
            trainer = make(draw, TRAINERS[draw.kind], config)
        except (ValueError, NotImplementedError):  # conflicts outside the config
            continue
        base = update_of(trainer)
        assert trainer.state.global_step == 2
        if norm(base) > 1e-4:  # otherwise all rewards are equal
            break
    else:
        raise AssertionError("three combinations in a row were refused, or updated nothing")
    for name, options in changes.items():
        if name == "TRL":
            other = make(draw, TRL_TRAINERS[draw.kind], draw.config(folder / name, TRL_CONFIGS[draw.kind], **options))
        else:
            options = {**neutral(draw, name), **options}
            other = make(draw, TRAINERS[draw.kind], draw.config(folder / name, **options))
        with pytest.MonkeyPatch.context() as patch:
            if name == "features":
                switch_off(patch)
            update = update_of(other, str(checkpoints / "checkpoint-1") if name == "resumed" else None)
        assert base.keys() == update.keys()
        difference = norm({each: base[each] - update[each] for each in base})
        if not difference <= TOLERANCE * norm(base) + ROUNDING:
            raise AssertionError(f"{name}: updates of length {norm(base):.3g} differ by {difference:.3g}: {draw}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_updates_are_equal(seed, tmp_path):
    try:
        check(seed, tmp_path, *COMPARISONS)
    except Exception as error:
        again = f"FUZZ_SEED={seed} .venv/bin/python -m pytest tests/trainers/test_options_fuzz.py -m slow -k equal"
        error.add_note(again)
        raise


# The combinations


def test_each_option_has_a_place():
    """A new option must be in one of the tables."""
    tables = [set(VALUES), set(NEUTRAL), NOT_DRAWN]
    assert OWN <= set.union(*tables)
    assert NOT_DRAWN | set(NEUTRAL) <= OWN
    assert not any(a & b for a, b in itertools.combinations(tables, 2))


def test_combinations():
    """The trainers accept most combinations. Each value occurs, and each comparison applies to enough of them."""
    tries = [draw for seed in range(600, 1200) for draw in itertools.islice(combinations(seed), 2)]
    taken = [draw for draw in tries if isinstance(draw, Draw)]
    assert len(taken) >= 0.75 * len(tries)
    drawn = {(name, repr(value)) for draw in taken for name, value in draw.options.items()}
    tables = [values_of(kind) for kind in TRAINERS]
    values = {(name, repr(value)) for table in tables for name, each in table.items() for value in each[1:]}
    assert not values - drawn
    first = [next(draw for draw in combinations(seed) if isinstance(draw, Draw)) for seed in range(60)]
    for name, compare in COMPARISONS.items():
        assert sum(compare(draw, draw.config("unused")) is not None for draw in first) >= 12, name
