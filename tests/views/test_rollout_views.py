# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Views in sampling: from which medium each completion is sampled, and on which it is scored and trained."""

import math
from itertools import product

import pytest
import torch
from datasets import Dataset
from helpers.encoding import own_logps
from helpers.marks import slow_but
from helpers.samplers import Remembers
from helpers.trainer_utils import (
    Recording,
    audio_rows,
    by_key,
    image_rows,
    keys,
    load,
    make_trainer,
    video_rows,
)
from torch.testing import assert_close

from trl_multimodal_rft import (
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
    MultimodalPPOTrainer,
    MultimodalRLOOTrainer,
)
from trl_multimodal_rft.algorithms.shaping import contrast_bonus
from trl_multimodal_rft.views.view_options import as_schedule, last_of_groups


GROUP = 4  # completions per prompt


def turned(medium, rng):
    """Negative pixels, and frames or samples in reverse: a view without random numbers."""
    return medium[::-1] if medium.ndim == 1 else 255 - medium[::-1]


def fractional(medium, rng, fraction=0.5):
    return medium


TURNED = f"{__name__}.turned"


class GRPO(Recording, MultimodalGRPOTrainer):
    pass


class RLOO(Recording, MultimodalRLOOTrainer):
    pass


class PPO(Recording, MultimodalPPOTrainer):
    pass


def by_ids(completion_ids, **kwargs):
    return [float(sum(ids) % 3 == 0) + 0.1 * (i % 3) for i, ids in enumerate(completion_ids)]


def trained(trainer_class, family, rows, folder, **options):
    """Returns a trainer that decoded greedily, with the `calls` of its sampler."""
    options = {"max_steps": 1, "top_k": 1, "shuffle_dataset": False, "reward": by_ids, **options}
    trainer = make_trainer(trainer_class, family, rows, folder, sampler=Remembers, **options)
    trainer.train()
    trainer.family = family
    return trainer


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


# The truth: transformers' own processor, forward and `generate`, one prompt at a time


def inputs_of(processor, row, is_turned=False):
    kind = next((kind for kind in ("image", "audio", "video") if row.get(kind) is not None), None)
    blocks = [{"type": "text", "text": row["prompt"][0]["content"]}]
    if kind is not None:
        medium = row[kind]["array"] if kind == "audio" else row[kind]
        if is_turned:
            medium = medium.point(lambda value: 255 - value) if kind == "image" else turned(medium, None)
        blocks = [{"type": kind, kind: medium}, *blocks]
    options = {"do_sample_frames": False} if kind == "video" else {}
    return processor.apply_chat_template(
        [{"role": "user", "content": blocks}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=options,
    )


def decoded(trainer, inputs):
    """The first policy's own greedy completion."""
    model, _ = load(trainer.family)
    model.generation_config = trainer.generation_config
    ids = model.generate(**inputs, top_k=1)
    return ids[0, inputs["input_ids"].size(1) :].tolist()


# NoisyRollout


@pytest.mark.parametrize(
    ("trainer_class", "family", "rows"),
    slow_but(
        [
            (GRPO, "qwen2_5_vl", image_rows),
            (GRPO, "qwen2_5_vl", video_rows),
            (GRPO, "qwen2_audio", audio_rows),
            (RLOO, "qwen2_5_vl", image_rows),
            (PPO, "qwen2_5_vl", image_rows),
        ],
        (GRPO, "qwen2_5_vl", image_rows),
        (RLOO, "qwen2_5_vl", image_rows),
    ),
)
def test_last_completions_are_sampled_from_the_view_and_scored_without(trainer_class, family, rows, tmp_path):
    dataset = rows()
    options = {"rollout_view": TURNED, "beta": 0.1, "gradient_accumulation_steps": 2}
    if trainer_class is not PPO:
        options["num_iterations"] = 2  # whose old log-probabilities are scored before the first update
    trainer = trained(trainer_class, family, dataset, tmp_path, steps_per_generation=2, **options)
    (prompts, sampled, _) = trainer.sampler.calls[0]
    (model, processor) = load(family)
    (draw,) = {id(draw): draw for draw in trainer.draws[:1]}.values()
    n_prompts = len(sampled) // GROUP
    n_differ = 0
    truth = {}
    for number in range(n_prompts):
        group = range(GROUP * number, GROUP * (number + 1))
        clean, view = (inputs_of(processor, dataset[number], turns) for turns in (False, True))
        expected = [decoded(trainer, clean)] * 2 + [decoded(trainer, view)] * 2
        assert [sampled[i] for i in group] == expected
        n_differ += expected[0] != expected[-1]
        # One prefill for those with the medium as it is, and one for the others
        assert len({id(prompts[i]) for i in group[:2]}) == len({id(prompts[i]) for i in group[2:]}) == 1
        for ids in map(tuple, expected):
            truth[tuple(clean["input_ids"][0].tolist()), ids] = own_logps(model, clean, torch.tensor(ids))
    assert n_differ == n_prompts
    assert draw.batch.source.from_view.tolist() == n_prompts * [False, False, True, True]
    first = trainer.micro_batches[:2]  # before the first update
    for name in ("ref_per_token_logps", "old_per_token_logps"):
        found = by_key(first, name)
        assert found.keys() == truth.keys()
        for key, logps in found.items():
            assert_close(logps, truth[key], rtol=0, atol=2e-5)
    for moment in first:
        scored = moment.batch.rows_to_score or range(len(moment.batch))
        for key, logps in [(keys(moment.batch)[i], moment.logps[i]) for i in scored]:
            assert_close(logps[: len(key[1])], truth[key], rtol=0, atol=2e-5)


def test_advantages_are_of_the_whole_group(tmp_path):
    trainer = trained(GRPO, "qwen2_5_vl", image_rows(), tmp_path, rollout_view=f"{TURNED}(fraction=0.25)")
    (draw,) = trainer.draws
    rewards = draw.rewards[:, 0].view(-1, GROUP)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    assert_close(draw.batch.advantages, expected.flatten())
    assert draw.batch.source.from_view.tolist() == 2 * [False, False, False, True]
    assert logged(trainer, "view/reward") == pytest.approx([rewards[:, 3].mean().item()])
    assert logged(trainer, "view/reward_clean") == pytest.approx([rewards[:, :3].mean().item()])


def mixed_rows():
    """Rows 0 and 3 have an image."""
    return Dataset.from_list(
        [{**row, "image": row["image"] if i in (0, 3) else None} for i, row in enumerate(image_rows())]
    )


def test_rows_without_a_medium_are_sampled_as_they_are(tmp_path):
    trainer = trained(GRPO, "qwen2_5_vl", mixed_rows(), tmp_path, rollout_view=TURNED, max_steps=3)
    marked = [draw.batch.source.from_view.tolist() for draw in trainer.draws]
    views = [False, False, True, True]
    assert marked == [[*views, *4 * [False]], [*4 * [False], *views], 8 * [False]]
    assert [len({id(prompt) for prompt in prompts}) for prompts, _, _ in trainer.sampler.calls] == [3, 3, 2]
    rewards = trainer.draws[1].rewards[:, 0]
    assert len(logged(trainer, "view/reward")) == 2  # nothing to compare in the last step
    assert logged(trainer, "view/reward")[1] == pytest.approx(rewards[6:].mean().item())
    assert logged(trainer, "view/reward_clean")[1] == pytest.approx(rewards[4:6].mean().item())


def test_evaluation_sees_the_media(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "objects": {"eval_dataset": image_rows(2)}}
    views = {"rollout_view": TURNED, "contrast_view": TURNED}
    trainer = trained(GRPO, "qwen2_5_vl", image_rows(), tmp_path, **views, **options)
    assert [len(ids) for _, ids, _ in trainer.sampler.calls] == [8 + 4, 8]
    assert len({id(prompt) for prompt in trainer.sampler.calls[1][0]}) == 2
    assert not any(
        name.startswith(("eval_view", "eval_contrast")) for entry in trainer.state.log_history for name in entry
    )


@pytest.mark.parametrize(("midpoint", "steepness"), [(40, 30), (10, 5)])
def test_schedule_is_that_of_the_paper(midpoint, steepness):
    """The strength is alpha_0 (1 - 1 / (1 + exp(-lambda (t - gamma) / t_max))), in the authors' code of 60 steps."""
    schedule = as_schedule(f"sigmoid(midpoint={midpoint / 60}, steepness={steepness})")
    for step in range(61):
        expected = 1 - 1 / (1 + math.exp(-steepness * (step - midpoint) / 60))
        assert schedule(step / 60) == pytest.approx(expected, abs=1e-12)
    if (midpoint, steepness) == (40, 30):
        assert as_schedule("sigmoid")(0.5) == pytest.approx(schedule(0.5))


def test_strength_follows_the_schedule(tmp_path):
    options = {"rollout_view": "mask_patches(ratio=0.8, schedule='linear')", "max_steps": 4}
    trainer = trained(GRPO, "qwen2_5_vl", image_rows(), tmp_path, **options)
    assert logged(trainer, "view/strength") == [1.0, 0.75, 0.5, 0.25]
    shares = []  # of patches that are masked
    for prompts, _, _ in trainer.sampler.calls:
        clean, masked = (torch.cat([prompts[i].media["pixel_values"] for i in each]) for each in ((0, 4), (2, 6)))
        shares.append((clean != masked).any(1).float().mean().item())
    assert shares == sorted(shares, reverse=True) and shares[0] > 2 * shares[-1]


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_place_in_the_group_alone_decides(n_ranks):
    n = 24 // n_ranks
    found = [rank * n + i for rank in range(n_ranks) for i in last_of_groups(0.5, n, rank * n, 6)]
    assert found == [i for i in range(24) if i % 6 >= 3]


# T-GRPO


def t_grpo(rewards, contrasted, ratio=0.8, alpha=0.3):
    """Bonuses of a group by the paper's rule: alpha for right answers where p >= mu * p~."""
    p = sum(rewards) / len(rewards)
    p_of_view = sum(contrasted) / len(contrasted)
    return [alpha if p >= ratio * p_of_view and reward > 0.1 else 0.0 for reward in rewards]


CALLS = []


def right(prompts, completion_ids, log_extra, log_metric, group_ids=None, **kwargs):
    """1 for some answers, more rarely for those of which there are many."""
    rewards = [float(sum(ids) % 3 == 0) for ids in completion_ids]
    CALLS.append((prompts, completion_ids, rewards, group_ids))
    log_extra("place", [len(CALLS)] * len(rewards))
    log_metric("calls", len(CALLS))
    return rewards


def length(completion_ids, **kwargs):
    return [0.01 * (sum(ids) % 7) for ids in completion_ids]


@pytest.mark.parametrize(("fraction", "n"), [(0.25, 1), (0.5, 2), (1.0, 4)])
def test_contrast_is_sampled_from_the_view(fraction, n, tmp_path):
    CALLS.clear()
    options = {"contrast_view": f"{TURNED}(fraction={fraction})", "reward": right}
    trainer = trained(GRPO, "qwen2_5_vl", video_rows(), tmp_path, **options)
    processor = trainer.processing_class
    rows = video_rows()
    clean, view = ([decoded(trainer, inputs_of(processor, rows[i], turns)) for i in (0, 1)] for turns in (False, True))
    assert clean != view
    (_, own, rewards, groups), (prompts, others, contrasted, none) = CALLS
    assert own == GROUP * [clean[0]] + GROUP * [clean[1]] and groups == GROUP * [0] + GROUP * [1]
    assert others == n * [view[0]] + n * [view[1]] and none is None
    assert [prompt[0]["content"][-1]["text"] for prompt in prompts] == [
        rows[i]["prompt"][0]["content"] for i, _ in product((0, 1), range(n))
    ]
    assert logged(trainer, "contrast/accuracy") == [sum(contrasted) / len(contrasted)]
    assert logged(trainer, "contrast/accuracy_clean") == [sum(rewards) / len(rewards)]
    bonus = [t_grpo(rewards[i : i + GROUP], contrasted[i * n // GROUP :][:n]) for i in (0, GROUP)]
    assert logged(trainer, "contrast/bonus") == [pytest.approx(sum(map(sum, bonus)) / 8)]
    assert trainer.draws[0].batch.source.ids == own  # the others aren't trained on


def test_bonus_of_any_rewards():
    generator = torch.Generator().manual_seed(0)
    rewards, contrast = (torch.randint(0, 3, (60, 6), generator=generator) / 2 for _ in range(2))
    contrast[:, :3] = torch.nan
    contrast[::5] = torch.nan  # groups without a medium
    rewards[3, 1] = torch.nan
    found = contrast_bonus(rewards.flatten(), contrast.flatten(), 6, ratio=1.1, bonus=0.5).view(60, 6)
    for i in range(60):
        known = [reward for reward in rewards[i].tolist() if not math.isnan(reward)]
        expected = t_grpo(known, contrast[i, 3:].tolist(), 1.1, 0.5) if i % 5 else len(known) * [0.0]
        if i == 3:
            expected.insert(1, 0.0)
        assert found[i].tolist() == expected
    assert 0 < found.count_nonzero() < (rewards > 0.1).sum()


@pytest.mark.parametrize(
    ("trainer_class", "family", "rows", "view"),
    slow_but(
        [
            (GRPO, "qwen2_5_vl", video_rows, "shuffle_frames"),
            (RLOO, "qwen2_5_vl", video_rows, "shuffle_frames"),
            (PPO, "qwen2_5_vl", mixed_rows, "blank"),
            (GRPO, "qwen2_5_vl", mixed_rows, "blank"),
        ],
        (GRPO, "qwen2_5_vl", video_rows, "shuffle_frames"),
        (GRPO, "qwen2_5_vl", mixed_rows, "blank"),
    ),
)
def test_bonus_is_that_of_the_paper(trainer_class, family, rows, view, tmp_path):
    CALLS.clear()
    options = {
        "contrast_view": view,
        "per_device_train_batch_size": 16,
        "top_k": 0,
        "max_steps": 3,
        "beta": 0.0,
        "reward": [right, length],
        "reward_weights": [1.0, 0.5],
        **({"num_ppo_epochs": 1} if trainer_class is PPO else {}),
    }
    trainer = trained(trainer_class, family, rows(), tmp_path, **options)
    outcomes = set()
    for step, draw in enumerate(trainer.draws):
        (prompts, sampled, _) = trainer.sampler.calls[step]
        n = len(draw.batch)
        per_func = draw.rewards
        has = [bool(row.get("image")) or rows is video_rows for row in draw.rows]
        places = [start + i for start in range(0, n, GROUP) if has[start] for i in (2, 3)]
        assert len(sampled) == n + len(places)
        assert all(prompt is not prompts[i] for prompt, i in zip(prompts[n:], places, strict=True))
        contrast = torch.full((n,), torch.nan)
        contrast[places] = torch.tensor(right(None, sampled[n:], *2 * [lambda *args: None]))
        bonus = contrast_bonus(per_func[:, 0], contrast, GROUP, ratio=0.8, bonus=0.3)
        groups = (each.view(-1, GROUP).any(1).tolist() for each in (per_func[:, 0], bonus))
        outcomes |= {*zip(*groups, strict=True)}
        total = per_func @ torch.tensor([1.0, 0.5]) + bonus
        if trainer_class is not PPO:
            groups = total.view(-1, GROUP)
            is_rloo = trainer_class is RLOO
            scale = (GROUP - 1) / GROUP if is_rloo else groups.std(1, keepdim=True) + 1e-4
            assert_close(draw.batch.advantages, ((groups - groups.mean(1, keepdim=True)) / scale).flatten())
        assert logged(trainer, "reward")[step] == pytest.approx(total.mean().item())
        # Of what is trained on alone
        assert logged(trainer, "rewards/right/mean")[step] == pytest.approx(per_func[:, 0].mean().item())
    if rows is video_rows:
        assert outcomes >= {(True, True), (True, False)}
        assert logged(trainer, "calls") == [1, 3, 5]  # each second call is of the contrast
        assert [len(ids) for _, ids, _, _ in CALLS[:6]] == 3 * [16, 8]
        assert [*trainer._logs["extra"]["place"]] == 16 * [5]
    else:
        assert [len(sampled) for _, sampled, _ in trainer.sampler.calls] == [16 + 4, 16, 16 + 4]
        assert len(logged(trainer, "contrast/accuracy")) == 2  # there is none in the second step


# What is refused


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rollout_view": "mask_patch"}, "There is no view 'mask_patch'"),
        ({"contrast_view": "mask_patches(size=3)"}, "has no setting 'size'"),
        ({"rollout_view": "blank(bonus=0.5)"}, "has no setting 'bonus': the view 'blank' has .., and the option"),
        ({"contrast_view": "blank(bonus=0.0)"}, "`bonus` of `contrast_view` must be above 0, got 0.0"),
        (
            {"rollout_view": f"{__name__}.fractional"},
            "has a setting 'fraction', as `rollout_view` does; rename the view's setting",
        ),
        ({"rollout_view": "blank(fraction=0.2)"}, "times `num_generations` .4. and rounded down, is no completion"),
        ({"rollout_view": "blank(fraction=1.5)"}, "`fraction` of `rollout_view` must be above 0 and at most 1"),
        ({"rollout_view": "blank(schedule='linear')"}, "'blank' has no strength"),
        ({"rollout_view": "mask_patches(schedule='cosine')"}, "There is no schedule 'cosine'"),
        (
            {"contrast_view": "blank", "multi_objective_aggregation": "normalize_then_sum"},
            "which change the sum",
        ),
    ],
)
def test_config_refuses(options, problem):
    with pytest.raises(ValueError, match=problem):
        MultimodalGRPOConfig("unused", per_device_train_batch_size=8, num_generations=4, use_cpu=True, **options)


@pytest.mark.parametrize("option", ["rollout_view", "contrast_view"])
@pytest.mark.parametrize("name", ["tools", "environment_factory", "rollout_func"])
def test_samples_of_others_are_refused(option, name, tmp_path):
    given = {"tools": [len], "environment_factory": dict, "rollout_func": print}
    with pytest.raises(ValueError, match=f"`{option}` samples completions from a view .* but `{name}`"):
        make_trainer(GRPO, "qwen2_5_vl", image_rows(), tmp_path, objects={name: given[name]}, **{option: "blank"})
