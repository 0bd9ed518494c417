# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Dynamic sampling and replay in runs: each group keeps its media and scores. `test_groups.py` has the unit tests."""

import dataclasses
import functools
import math
from itertools import product
from statistics import fmean

import pytest
import torch
from helpers.marks import slow_but
from helpers.trainer_utils import (
    InjectedOurs,
    Recorded,
    Recording,
    audio_rows,
    by_key,
    image_rows,
    keys,
    logged,
    norm,
    relative_difference,
    run,
)
from peft import LoraConfig
from transformers import TrainerCallback

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.forward.scores import ScoreRequest


FAMILY = {"image": "qwen2_5_vl", "audio": "qwen2_audio"}

# Two groups of four completions, one in each of two micro-batches
TWO = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.03}


@functools.cache
def dataset(kind):
    return audio_rows() if kind == "audio" else image_rows().add_column("index", range(8))


def graded(hard):
    """Returns different rewards for the completions of a prompt, or equal ones where `hard(index, step)`."""

    def reward(index, trainer_state, **kwargs):
        step = trainer_state.global_step
        return [0.1 if hard(i, step) else i + position % 4 for position, i in enumerate(index)]

    return reward


def by_position(rewards, group_ids, mask, **kwargs):
    """Returns advantages that differ between tokens."""
    centred = rewards - rewards.view(-1, 4).mean(1)[group_ids]
    return centred[:, None] * torch.arange(1, mask.size(1) + 1)


class Alone(Recorded):
    """Also scores each completion of a new generation batch separately, with policy and reference."""

    def _compute_loss(self, model, inputs):
        if self.model.training and self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            for batch in self._buffered_inputs:
                batch.alone = self._score_alone(self.model, batch)
                if self.ref_model is not None:
                    batch.ref_alone = self._score_alone(self.ref_model, batch)
        return super()._compute_loss(model, inputs)

    @torch.no_grad()
    def _score_alone(self, model, batch):
        rows = zip(batch.prompts, batch.completion_ids, batch.completion_mask, strict=True)
        return torch.cat(
            [
                self._policy.score(model, ScoreRequest([p], ids[None], mask[None], packed=False)).logps
                for p, ids, mask in rows
            ]
        )


def ours(kind, hard, trainer_class=Alone, **options):
    options = {"self_check": False, "shuffle_dataset": False, **TWO, **options}
    return run(trainer_class, FAMILY[kind], dataset(kind), reward=graded(hard), **options)


def never(index, step):
    return False


def always(index, step):
    return True


@dataclasses.dataclass
class Generation:
    """Draws and micro-batches of a generation batch, and the drawn groups as `(index, keys of the completions)`."""

    step: int
    draws: list
    moments: list
    live: list
    dead: list
    used: set


def generations(trainer, hard):
    args = trainer.args
    moments = [moment for moment in trainer.micro_batches if moment.training]
    every = args.steps_per_generation * args.num_iterations
    for start in range(0, len(moments), every):
        part = moments[start : start + args.steps_per_generation]
        step = part[0].step
        draws = [draw for draw in trainer.draws if draw.training and draw.step == step]
        live = []
        dead = []
        for draw in draws:
            names = keys(draw.batch)
            for i in range(0, len(names), 4):
                index = draw.rows[i]["index"]
                (dead if hard(index, step) else live).append((index, frozenset(names[i : i + 4])))
        used = {key for moment in part for key in keys(moment.batch)}
        yield Generation(step, draws, part, live, dead, used)


def completions(groups):
    return {key for _, group in groups for key in group}


def check_rows(generation, origins):
    """Asserts that each completion has the values of its draw, its scores, masks, prompt and media."""
    for name in ("advantages", "old_per_token_logps"):
        drawn = by_key(origins, name)
        for key, value in by_key(generation.moments, name).items():
            assert torch.equal(value, drawn[key]), name
    is_filtered = generation.moments[0].batch["tokens.weights"] is not None
    weights = by_key(generation.moments, "tokens.weights") if is_filtered else {}
    if weights:
        entropies = by_key(origins, "tokens.entropies")
        tokens = [pair for key in weights for pair in zip(entropies[key].tolist(), weights[key].tolist(), strict=True)]
        kept = [entropy for entropy, weight in tokens if weight]
        assert len(kept) == math.ceil(len(tokens) / 2)
        assert min(kept) >= max(entropy for entropy, weight in tokens if not weight)
    current = {key: row for moment in generation.moments for key, row in zip_rows(moment.batch, moment.logps)}
    first_window = [m for m in generation.moments if m.step == generation.step]
    for key in (key for moment in first_window for key in keys(moment.batch)):
        torch.testing.assert_close(by_key(generation.moments, "alone")[key], current[key], rtol=0, atol=1e-5)
    for moment in generation.moments:
        batch = moment.batch
        assert batch["num_items_in_batch"] == sum(m.batch["completion_mask"].sum() for m in generation.moments)
        for prompt, ids, mask in zip(batch.prompts, batch["prompt_ids"], batch["prompt_mask"], strict=True):
            assert torch.equal(ids[mask.bool()], prompt.input_ids)


def zip_rows(batch, values):
    masks = batch["completion_mask"].bool()
    return zip(keys(batch), [value[mask] for value, mask in zip(values, masks, strict=True)], strict=True)


VARIANTS = {
    "plain": {},
    "truncated masked": {"mask_truncated_completions": True},
    "advantages by token": {"advantage_estimator": by_position},
    "kl in the reward": {"advantage_estimator": "reinforce", "beta": 0.1},
    "reused": {"steps_per_generation": 4, "num_iterations": 2, "beta": 0.1, "loss_type": "cpgd"},
    "shuffled": {"packing": "padded", "packing_shuffle": True, "loss_type": "gmpo"},
    "entropy filter": {"top_entropy_quantile": 0.5},
}


# Dynamic sampling


@pytest.mark.parametrize(
    ("kind", "variant"),
    slow_but(
        [*(("image", name) for name in VARIANTS), ("audio", "plain")],
        ("audio", "plain"),
        ("image", "entropy filter"),
        ("image", "shuffled"),
    ),
)
def test_batch_is_filled_with_groups_that_have_signal(kind, variant):
    options = VARIANTS[variant]
    steps = 4 * options.get("num_iterations", 1) * options.get("steps_per_generation", 2) // 2
    result = ours(kind, hard, dynamic_sampling=4, max_steps=steps, **options)
    size = options.get("steps_per_generation", 2)
    surplus = []
    stale = 0
    found = list(generations(result.trainer, hard))
    assert len(found) == 4
    for i, generation in enumerate(found):
        chosen = surplus + generation.live
        assert len(chosen) >= size
        # The run needed the last round
        last = keys(generation.draws[-1].batch)
        before = [group for group in chosen if not group[1] & set(last)]
        assert len(generation.draws) == 1 or len(before) < size
        assert generation.used == completions(chosen[:size])
        stale += len(surplus) > 0
        surplus = chosen[size:]
        check_rows(generation, result.trainer.draws)
        n_drawn = len(generation.live) + len(generation.dead)
        assert logged(result, "sampling/rounds")[i] == len(generation.draws)
        assert logged(result, "sampling/kept_frac")[i] == pytest.approx(len(generation.live) / n_drawn)
        assert logged(result, "reward")[i] == pytest.approx(fmean(d.rewards.mean().item() for d in generation.draws))
    assert stale > 0
    assert max(logged(result, "sampling/rounds")) > 1


def hard(index, step):
    return index in (0, 4, 5, 6)


def test_groups_drawn_at_once_are_on_policy_and_left_over_ones_are_not():
    result = ours("audio", hard, dynamic_sampling=4, max_steps=4)
    fresh = []
    left_over = []
    for generation in generations(result.trainer, hard):
        drawn_now = completions(generation.live)
        old = by_key(generation.moments, "old_per_token_logps")
        for moment in generation.moments:
            for key, logps in zip_rows(moment.batch, moment.logps):
                (fresh if key in drawn_now else left_over).append((logps - old[key]).abs().max().item())
    assert max(fresh) <= 1e-5
    assert min(left_over) > 1e-3


def test_extra_prompts_cover_the_dataset_in_a_seeded_order():
    def extra(**options):
        options = {"dynamic_sampling": 5, "max_steps": 3, **options}
        draws = ours("image", always, Recorded, **options).trainer.draws
        assert all(len({row["index"] for row in draw.rows[i : i + 4]}) == 1 for draw, i in product(draws, (0, 4)))
        rounds = [draw.rows[i]["index"] for k, draw in enumerate(draws) if k % 5 for i in (0, 4)]
        return rounds

    order = extra()
    assert len(order) == 24
    epochs = [order[start : start + 8] for start in (0, 8, 16)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(8))
    assert order != extra(seed=1)


@pytest.mark.parametrize("options", [{"dynamic_sampling": 4}, {"replay_buffer_size": 4}], ids=str)
def test_nothing_is_exchanged_in_evaluation(options):
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "max_steps": 2}

    def hard_when_evaluated(index, step):
        return step > 0  # evaluation follows the step

    result = ours(
        "image",
        hard_when_evaluated,
        Recorded,
        objects={"eval_dataset": dataset("image").select(range(2))},
        **evaluated,
        **options,
    )
    drawn = [draw for draw in result.trainer.draws if not draw.training]
    moments = [moment for moment in result.trainer.micro_batches if not moment.training]
    assert len(drawn) == len(moments) == 2
    for draw, moment in zip(drawn, moments, strict=True):
        assert keys(draw.batch) == keys(moment.batch)
        assert not moment.batch["advantages"].any()
    assert not any(name.startswith(("eval_sampling", "eval_replay")) for entry in result.history for name in entry)


# Replay


def hard_later(index, step):
    """No prompt is hard in the first step, every other one in the second, and all afterwards."""
    return step > 1 or (step == 1 and index % 2 == 1)


MOVING_REFERENCE = {
    "beta": 0.1,
    "sync_ref_model": True,
    "ref_model_sync_steps": 1,
    "ref_model_mixup_alpha": 0.5,
}


@pytest.mark.parametrize(
    "kind, options",
    [
        *slow_but(
            (("image", options) for options in VARIANTS.values() if "num_iterations" not in options),
            ("image", VARIANTS["plain"]),
            ("image", VARIANTS["entropy filter"]),
        ),
        pytest.param("audio", MOVING_REFERENCE, marks=pytest.mark.slow),
        ("image", {**MOVING_REFERENCE, "loss_type": "dual_clip", "kl_estimator": "k2"}),
        ("audio", {**MOVING_REFERENCE, "advantage_estimator": by_position}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "plain",
)
def test_past_groups_replace_dead_ones(kind, options):
    result = ours(kind, hard_later, replay_buffer_size=8, max_steps=3, **options)
    past = []
    replays = 0
    for i, generation in enumerate(generations(result.trainer, hard_later)):
        assert len(generation.draws) == 1
        replayed = [group for group in past if group[1] & generation.used]
        assert len(replayed) == len(generation.dead) == min(i, 2)
        assert generation.used == completions(generation.live + replayed)
        check_rows(generation, result.trainer.draws)
        old, alone = (by_key(generation.moments, name) for name in ("old_per_token_logps", "alone"))
        for key in completions(replayed):
            assert len(old[key]) == 0 or (old[key] - alone[key]).abs().max() > 1e-3
        if "sync_ref_model" in options:
            stored, given, fresh = (
                by_key(moments, name)
                for moments, name in (
                    (result.trainer.draws, "ref_per_token_logps"),
                    (generation.moments, "ref_per_token_logps"),
                    (generation.moments, "ref_alone"),
                )
            )
            for key in generation.used:
                torch.testing.assert_close(given[key], fresh[key], rtol=0, atol=1e-5)
            for key in completions(replayed):
                assert (given[key] - stored[key]).abs().max() > 1e-4
        ages = [i - origin for origin, group in enumerate_origins(result.trainer, replayed)]
        assert logged(result, "replay/frac")[i] == len(replayed) / 2
        assert logged(result, "replay/age")[i] == pytest.approx(fmean(ages) if ages else 0.0)
        assert logged(result, "sampling/kept_frac")[i] == len(generation.live) / 2
        past += generation.live
        replays += len(replayed)
    assert replays == 3


def enumerate_origins(trainer, groups):
    """Returns the step at which each group was drawn."""
    for group in groups:
        yield next(draw.step for draw in trainer.draws if set(keys(draw.batch)) & group[1]), group


def hard_after_first(index, step):
    return step > 0


@pytest.mark.parametrize("kind", slow_but(FAMILY, "audio"))
def test_media_of_stored_groups_are_used(kind):
    class Inverting(TrainerCallback):
        """Changes the media in the buffer after the first step."""

        def on_step_end(self, args, state, control, **kwargs):
            for group in self.trainer._batches.groups.replay.state_dict()["groups"]:
                for value in group.prompts[0].media.values():
                    if value.is_floating_point():
                        value.neg_()

    def update(*callbacks):
        class WithCallback(Recorded):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, callbacks=list(callbacks), **kwargs)
                for callback in callbacks:
                    callback.trainer = self

        trainer = ours(kind, hard_after_first, WithCallback, replay_buffer_size=4, max_steps=2).trainer
        values = {}
        for moment in trainer.micro_batches[2:]:
            values |= dict(zip_rows(moment.batch, moment.logps))
        return values

    stored = update()
    again = update()
    changed = update(Inverting())
    assert stored.keys() == changed.keys() and len(stored) == 8
    assert all(torch.equal(stored[key], again[key]) for key in stored)
    assert all((stored[key] - changed[key]).abs().max() > 1e-3 for key in stored)


def test_lora_scores_replayed_groups_without_its_adapter():
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    options = {"replay_buffer_size": 4, "beta": 0.1, "objects": {"peft_config": lora}, "max_steps": 2}
    result = ours("image", hard_after_first, Recorded, **options)
    _, generation = generations(result.trainer, hard_after_first)
    stored, given = (by_key(m, "ref_per_token_logps") for m in (result.trainer.draws, generation.moments))
    assert logged(result, "replay/frac") == [0.0, 1.0]
    for key in generation.used:  # the base model has not changed
        torch.testing.assert_close(given[key], stored[key], rtol=0, atol=1e-5)
        assert (given[key] - by_key(generation.moments, "old_per_token_logps")[key]).abs().max() > 1e-3


class Sampled(Recording, MultimodalGRPOTrainer):
    """Samples instead of injecting completions."""


@pytest.mark.parametrize("kind", slow_but(FAMILY, "image"))
def test_groups_of_sampled_completions(kind):
    options = {"dynamic_sampling": 2, "replay_buffer_size": 4, "beta": 0.1}
    result = ours(kind, hard, Sampled, max_steps=3, self_check=True, **options)
    drawn = by_key(result.trainer.draws, "old_per_token_logps")
    for generation in generations(result.trainer, hard):
        assert len(generation.used) == 8
        now = completions(generation.live + generation.dead)
        for moment in generation.moments:
            for key, logps in zip_rows(moment.batch, moment.logps):
                assert torch.equal(by_key([moment], "old_per_token_logps")[key], drawn[key])
                assert key not in now or (logps - drawn[key]).abs().max() <= 1e-5
    assert norm(result.update) > 0.001


def test_exchange_without_dead_groups_changes_nothing():
    plain, dynamic, replay = (
        ours("image", never, InjectedOurs, max_steps=2, num_iterations=2, **options)
        for options in ({}, {"dynamic_sampling": 4}, {"replay_buffer_size": 4})
    )
    assert relative_difference(plain.update, dynamic.update) == 0
    assert relative_difference(plain.update, replay.update) == 0
