# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""PPO with the interface of the reference system: runs equal to those of `MultimodalPPOTrainer`, and single steps."""

import copy
import logging
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers.ppo_runs import critic_of, encoded, weights_of
from helpers.reference import media_of
from helpers.resumed_runs import equal
from helpers.samplers import Wrapped
from helpers.trainer_utils import (
    PLAIN,
    audio_rows,
    image_rows,
    length_and_sum,
    load,
    moved,
    norm,
    relative_difference,
    video_rows,
)
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.testing import assert_close
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import TrainerCallback
from trl import GRPOConfig

from trl_multimodal_rft import MultimodalPPOConfig, MultimodalPPOTrainer
from trl_multimodal_rft.algorithms.advantages import gae
from trl_multimodal_rft.algorithms.returns import token_rewards
from trl_multimodal_rft.lightrft import (
    Actor,
    ActorAL,
    ActorVL,
    Critic,
    PPOTrainerAL,
    PPOTrainerVL,
    ReplayBuffer,
)
from trl_multimodal_rft.lightrft.trainer.replay_buffer_utils import (
    make_experience_batch,
)
from trl_multimodal_rft.trainers.checkpoints.files import load_rollout_state


pytestmark = pytest.mark.gate


# Trainers


@dataclass
class Kind:
    """Classes and helpers of a modality."""

    family: str
    trainer: type
    actor: type
    rows: Any


KINDS = {
    "image": Kind("qwen2_5_vl", PPOTrainerVL, ActorVL, image_rows),
    "audio": Kind("qwen2_audio", PPOTrainerAL, ActorAL, audio_rows),
}
EOS = list(range(50, 110))  # enough tokens that responses differ in length
GROUP = 4
ONE = {"gradient_accumulation_steps": 1}
WHOLE = {**ONE, "per_device_train_batch_size": 2 * GROUP}
LEARNING_RATE = 1.0  # large enough that the rounding of the weights barely affects their difference


def strategy(folder, **options) -> MultimodalPPOConfig:
    """Groups of 4, two micro-batches of 4 per update, plain gradient descent."""
    options = PLAIN | {"max_steps": -1, "max_grad_norm": 1.0, "learning_rate": LEARNING_RATE} | options
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": GROUP} | options
    return MultimodalPPOConfig(str(folder), **options)


def make(folder, kind="image", *, cls=None, config=None, critic=None, **arguments):
    """
    Returns a trainer whose critic has nonzero values.

    `config` are options of the strategy; `policy`, `ref` and `ema` are the arguments without defaults.
    """
    kind = KINDS[kind]
    config = strategy(folder, **(config or {}))
    policy = arguments.pop("policy", None) or actor_of(kind)
    if critic is None and config.advantage_estimator == "gae":
        critic = critic_of(kind.family)
    models = (arguments.pop(name, None) for name in ("reward_model", "ref", "ema"))
    optimizers = arguments.pop("optimizers", (None,) * 4)
    arguments = {
        "init_kl_coef": 0.1,
        "micro_train_batch_size": config.per_device_train_batch_size,
        "max_norm": 1e9,
        "processor": load(kind.family)[1],
        "prompt_max_len": 512,
        "reward_fn": length_and_sum,
        "max_new_tokens": 6,
        "eos_token_id": EOS,
        **arguments,
    }
    return (cls or kind.trainer)(config, policy, critic, *models, *optimizers, **arguments)


def actor_of(kind, packing=True, **options) -> Actor:
    kind = KINDS[kind] if isinstance(kind, str) else kind
    return kind.actor(load(kind.family)[0], bf16=False, packing_samples=packing, **options)


def reference_of(kind, **options) -> Actor:
    """Returns a policy close to that of [`actor_of`]."""
    return KINDS[kind].actor(moved(KINDS[kind].family)["model"], bf16=False, **options)


def moves(ppo, before):
    """Returns how much each parameter of policy and critic moved."""
    update = {name: value - before[name] for name, value in weights_of(ppo.trainer.model).items()}
    critic = {name: value for name, value in update.items() if name.startswith("critic.")}
    return {name: value for name, value in update.items() if name not in critic}, critic


# Experience


def experience_of(ppo, kind="image", n_rows=2, noise=0.3, seed=0):
    """
    Returns the samples of a rollout of `n_rows` prompts, as if from other policies and critics than the current ones.
    """
    torch.manual_seed(seed)
    experiences = ppo.experience_maker.make_experience_list(list(KINDS[kind].rows(n_rows)), **ppo.generate_kwargs)
    for each in experiences:
        each.action_log_probs += noise * torch.randn(each.action_mask.shape)
        if each.values is not None:
            each.values += noise * torch.randn(each.action_mask.shape)
    buffer = ReplayBuffer()
    for each in experiences:
        buffer.append(each)
    return list(buffer)


def batch_of(ppo, n=None, **options):
    return make_experience_batch(experience_of(ppo, **options)[:n])


# Updates


class Noting:
    """A reward function that records its arguments, and may give the third response to each prompt no reward."""

    def __init__(self, skips=False):
        self.skips = skips
        self.calls = []

    def __call__(self, completion_ids, **columns):
        self.calls.append({"completion_ids": completion_ids, **columns})
        rewards = length_and_sum(completion_ids)
        return [None if self.skips and i % GROUP == 2 else reward for i, reward in enumerate(rewards)]

    @property
    def questions(self):
        """Returns the text of the prompts of each rollout."""
        return [[prompt[0]["content"][-1]["text"] for prompt in call["prompts"][::GROUP]] for call in self.calls]


class Given(Wrapped):
    """Returns given completions in their order."""

    def __init__(self, trainer, completions):
        super().__init__(trainer)
        self.completions = iter(completions)

    def __call__(self, model, prompts, **options):
        return [next(self.completions) for _ in prompts], None


def ended(policy):
    """Returns a policy with `EOS` as ends of text."""
    policy.generation_config.eos_token_id = EOS
    return policy


SHAPED = {"reward_running_scale": True, "reward_clip_range": [-1.0, 1.5], "soft_overlong_cache": 2}
ADAPTIVE = {"kl_estimator": "k3", "kl_target": 0.001, "kl_horizon": 40}
# Kind, packing, whether some responses have no reward, and options
RUNS = {
    "divergence in the loss, supervised rows": (
        *("image", True, False),
        {"beta": 0.1, **ADAPTIVE, "ptx_coef": 0.5, "epsilon": 0.05, "value_learning_rate": 2e-2},
    ),
    "divergence in shaped rewards": (
        *("audio", False, False),
        {"beta": 0.2, "bootstrap_truncated": True, "advantage_estimator": "gae(gamma=0.9, lam=0.8)", **SHAPED},
    ),
    "unscorable responses": (
        *("image", True, True),
        {"vf_coef": 0.3, "cliprange_value": 0.4, "bootstrap_truncated": True, "max_grad_norm": 0.5},
    ),
    "without a critic": ("image", True, False, {"advantage_estimator": "group_norm"}),
}
# Options that are arguments of `PPOTrainerVL`
ARGUMENTS = {"beta": "init_kl_coef", "epsilon": "eps_clip", "max_grad_norm": "max_norm", "ptx_coef": "ptx_coef"}
# Metrics of a rollout, and those of updates whose means they are
BOTH_LOG = {"returns_mean": "returns/mean", "rollout/shaped_reward": "shaped_reward"}
BOTH_LOG |= {name: name for name in ("ptx_loss", "grad_norm", "kl_coef", "explained_variance")}


@pytest.mark.parametrize("name", RUNS)
def test_fit_is_a_run_of_the_trainer(name, tmp_path):
    """`MultimodalPPOTrainer` makes the same updates of the same responses, over two rollouts of two epochs each."""
    kind, packing, skips, options = RUNS[name]
    family = KINDS[kind].family
    rows = KINDS[kind].rows(4)
    noting = Noting(skips)
    pairs = [{**row, "completion": "It is a cat."} for row in KINDS[kind].rows(3)] if "ptx_coef" in options else None
    options = {"num_ppo_epochs": 2, "learning_rate": 1e-2, "max_grad_norm": 1e9, "beta": 0.0, **options}
    has_critic = "gae" in options.get("advantage_estimator", "gae")
    arguments = {own: options[option] for option, own in ARGUMENTS.items() if option in options}
    if "kl_target" in options:
        arguments |= {"kl_target": 1e-3, "kl_horizon": 40}
    if "cliprange_value" in options:
        arguments["value_clip"] = options["cliprange_value"]
    arguments |= {"max_epochs": 2, "reward_fn": noting, "critic": critic_of(family) if has_critic else None}
    policy = KINDS[kind].actor(ended(moved(family)["model"]), bf16=False, packing_samples=packing)
    config = {"num_train_epochs": 1, **options}
    ppo = make(tmp_path, kind, config=config, policy=policy, ref=actor_of(kind), **arguments)
    ours = fit(ppo, loader(rows), pairs and loader(pairs))
    completions = [ids for call in noting.calls for ids in call["completion_ids"]]
    assert len(completions) == 16 and len({ids[-1] in EOS for ids in completions}) == 2

    options |= {"max_steps": 4, "max_completion_length": 6, "steps_per_generation": 2}
    options |= {"ptx_batch_size": 2} if pairs else {}
    trainer = MultimodalPPOTrainer(
        ended(moved(family)["model"]),
        Noting(skips),
        strategy(tmp_path / "trainer", shuffle_dataset=False, self_check=False, **options),
        rows,
        processing_class=load(family)[1],
        value_model=critic_of(family) if has_critic else None,
        ptx_dataset=pairs and Dataset.from_list(pairs),
    )
    trainer.sampler = Given(trainer, completions)
    before = weights_of(trainer.model)
    trainer.train()
    after = weights_of(trainer.model)
    assert (ours[1] == {}) == (not has_critic)
    for part in filter(None, ours):
        expected = {name: after[name] - before[name] for name in part}
        # LightRFT adds 1e-8 to the deviation of a group's rewards, and the trainer 1e-4
        assert norm(expected) > 1e-3 and relative_difference(expected, part) <= (1e-4 if has_critic else 1e-3)
    steps = trainer.state.log_history[:4]
    rollouts = logs_of(ppo)
    assert ppo.trainer.state.log_history[-1].keys() == trainer.state.log_history[-1].keys()
    assert [entry["step"] for entry in rollouts] == [2, 4]
    for entry, pair in zip(rollouts, (steps[:2], steps[2:]), strict=True):
        assert ("critic_loss" in entry) == ("critic_lr" in entry) == has_critic
        for own, name in BOTH_LOG.items():
            numbers = [step[name] for step in pair if name in step]
            if numbers:
                assert entry[own] == pytest.approx(fmean(numbers), rel=1e-3, abs=1e-5), own


@pytest.mark.parametrize("together", [True, False])
def test_ppo_train(together, tmp_path):
    """Each of two epochs trains once on all samples, in another order, of whole groups or of any samples."""
    ppo = make(tmp_path, config={"packing_shuffle": not together}, max_epochs=2, ref=reference_of("image"))
    items = experience_of(ppo)
    ppo.replay_buffer.append(make_experience_batch(items))
    parts = trained_on(ppo)
    status = ppo.ppo_train(2)
    assert ppo.trainer.state.global_step == 4 and len(ppo.replay_buffer) == len(items)
    places = [[place_of(ids, items) for ids in part.completion_ids] for part in parts]
    epochs = [places[:2], places[2:]]
    assert all(sorted(sum(epoch, [])) == [*range(8)] for epoch in epochs) and epochs[0] != epochs[1]
    assert all(len({place // GROUP for place in part}) == 1 for part in places) == together
    returns = torch.cat([item.returns for item in items])
    rewards = [item.info["reward"].item() for item in items]
    for name, numbers in {"returns": returns.tolist(), "step_reward": rewards}.items():
        for statistic, function in {"mean": fmean, "std": pstdev, "min": min, "max": max}.items():
            assert status[f"{name}_{statistic}"] == pytest.approx(function(numbers), rel=1e-4, abs=1e-6)
    assert status["values"] == pytest.approx(torch.cat([item.values for item in items]).mean().item(), rel=1e-4)
    assert abs(status["kl"]) > 1e-4


def test_weights_of_actions_and_gaps(tmp_path):
    """The loss is that by hand of the actor's scores: masked actions are seen, and others keep their weights."""
    ppo = make(tmp_path, config=WHOLE)
    batch = make_experience_batch(with_gaps(experience_of(ppo)))
    mask = batch.action_mask
    advantages = batch.advantages
    weights = torch.rand(mask.shape)
    inputs = (batch.sequences, mask.size(1), batch.attention_mask)
    with torch.no_grad():
        ratio = (ppo.actor(*inputs, **media_of(batch)) - batch.action_log_probs).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * weights
    status = ppo.training_step(batch, 0, weights)
    assert status["policy_loss"] == pytest.approx(-gain[mask].mean().item(), rel=1e-4, abs=1e-6)
    assert 0 < status["value_clip_ratio"] < 1 and 0 < status["clip_ratio/region_mean"] < 1


def test_tokens_of_high_entropy(tmp_path):
    """Tokens of both micro-batches of an update compete."""
    share = 0.3
    options = {"top_entropy_quantile": share, "entropy_source": "rollout(renormalize=True)"}
    ppo = make(tmp_path, config=options, policy=actor_of("image", high_entropy_token_ratio=share))
    items = with_gaps(experience_of(ppo))
    ppo.replay_buffer.append(make_experience_batch(items))
    entropies = torch.cat([item.action_entropy[item.action_mask] for item in items])
    n = math.ceil(share * len(entropies))
    least = entropies.sort(descending=True).values[n - 1]
    trained = trained_on(ppo)
    ppo.ppo_train()
    for part in trained:
        for ids, weights in zip(part.completion_ids, part.tokens.weights, strict=True):
            item = items[place_of(ids, items)]
            expected = (item.action_entropy >= least) * len(entropies) / n
            assert_close(weights[: len(expected)][item.action_mask], expected[item.action_mask])


def trained_on(ppo):
    """Returns a list that gets each micro-batch that is trained on."""
    parts = []
    train = ppo.trainer.training_step
    ppo.trainer.training_step = lambda model, part, n: parts.append(part) or train(model, part, n)
    return parts


def place_of(ids, items):
    """Returns the index of the sample with these actions, which padding may follow."""
    found = [i for i, item in enumerate(items) if is_start(item.sequences[len(item.prompt_ids) :], ids)]
    return max(found, key=lambda i: len(items[i].action_mask))


def is_start(start, ids):
    return len(start) <= len(ids) and torch.equal(start, ids[: len(start)])


def test_training_step(tmp_path):
    """An update is the mean of those of its micro-batches, each of which is a mean over its own tokens."""
    ppo = make(tmp_path)
    alone = []
    items = experience_of(ppo)
    parts = [items[:3], items[4:]]
    before = weights_of(ppo.trainer.model)
    for part in parts:
        other = make(tmp_path, config={**ONE, "per_device_train_batch_size": len(part), "num_generations": len(part)})
        other.replay_buffer.append(make_experience_batch(part))
        status = other.ppo_train()
        alone.append((status, *moves(other, before)))
        found = ppo.training_step(make_experience_batch(part), 0)
        for name in ("policy_loss", "critic_loss", "actor_lr", "critic_lr"):
            assert found[name] == pytest.approx(status[name], rel=1e-4)
    assert ppo.trainer.state.global_step == 1
    for actual, *others in zip(moves(ppo, before), *((policy, critic) for _, policy, critic in alone), strict=True):
        expected = {name: sum(each[name] for each in others) / 2 for name in actual}
        assert norm(expected) > 1e-4 and relative_difference(expected, actual) <= 1e-5


def with_gaps(items):
    """Returns samples with masked actions between others."""
    result = []
    for index, item in enumerate(items):
        mask = item.action_mask.clone()
        if len(mask) > 2:
            mask[1 + index % (len(mask) - 2)] = False
        result.append(replace(item, action_mask=mask))
    assert any(not item.action_mask.all() for item in result)
    return result


def adam(**options):
    """Returns options of a config whose optimizer has momentum, and moves weights without a gradient."""
    return {"optim": "adamw_torch", "weight_decay": 0.1, "learning_rate": 1e-2, **ONE, **options}


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_one_part_alone(part, tmp_path):
    """The other part stays bit for bit, despite momentum. The trained part moves as in a step of both."""
    updates = {}
    for method in ("training_step", f"training_step_{part}"):
        ppo = make(tmp_path, config=adam(per_device_train_batch_size=8, max_grad_norm=1e9))
        batch = batch_of(ppo)
        ppo.training_step(batch, 0)
        before = weights_of(ppo.trainer.model)
        status = getattr(ppo, method)(*((batch, 1) if method == "training_step" else (batch,)))
        assert ppo.trainer.state.global_step == 2
        updates[method] = moves(ppo, before)
    assert {"policy_loss", "actor_lr", "critic_loss", "critic_lr"} <= status.keys()
    if part == "actor":
        mine = 0
        other = 1
    else:
        mine = 1
        other = 0
    both = updates["training_step"]
    alone = updates[f"training_step_{part}"]
    assert norm(both[other]) > 0.1 and norm(alone[other]) == 0
    assert norm(alone[mine]) > 0.1
    assert all(torch.equal(both[mine][name], alone[mine][name]) for name in alone[mine])


# Invalid updates


def test_experience_that_lacks_something(tmp_path):
    ppo = make(tmp_path, ref=reference_of("image"))
    items = experience_of(ppo)[:4]
    for name in ("action_mask", "action_log_probs", "base_action_log_probs", "advantages", "returns", "values"):
        batch = make_experience_batch([replace(item, **{name: None}) for item in items], packing_samples=True)
        with pytest.raises(ValueError, match=f"The experience has no `{name}`; make it with"):
            ppo.training_step(batch, 0)
    items[0].attention_mask[2] = 0
    with pytest.raises(ValueError, match="The `attention_mask` of sample 0 hides tokens"):
        ppo.training_step(make_experience_batch(items), 0)
    without = make(tmp_path, config={"advantage_estimator": "reinforce"})
    batch = batch_of(without, 4)
    with pytest.raises(ValueError, match="'reinforce'` has no critic to train"):
        without.training_step_critic(batch)
    assert "critic_loss" not in without.training_step_actor(batch)


def test_updates_are_not_mixed(tmp_path):
    ppo = make(tmp_path)
    items = experience_of(ppo)
    batch = make_experience_batch(items[:4])
    with pytest.raises(ValueError, match="The buffer holds 0 samples .* whole optimizer steps of 2 x 4"):
        ppo.ppo_train()
    ppo.training_step_actor(batch)
    with pytest.raises(RuntimeError, match="An update of policy is half done, after 1 of 2 micro-batches"):
        ppo.training_step_critic(batch)
    ppo.replay_buffer.append(make_experience_batch(items))
    with pytest.raises(RuntimeError, match="An update is half done, after 1 of 2"):
        ppo.ppo_train()
    ppo.training_step_actor(batch)
    ppo.training_step_critic(batch)
    with pytest.raises(RuntimeError, match="An update of critic is half done"):
        ppo.training_step(batch, 0)
    ppo.training_step_critic(batch)
    ppo.ppo_train(2)


def test_schedules_need_a_length(tmp_path):
    ppo = make(tmp_path, config={"lr_scheduler_type": "linear"})
    batch = batch_of(ppo, 4)
    with pytest.raises(ValueError, match="the schedule .* has no known length; set `max_steps`"):
        ppo.training_step(batch, 0)
    ppo = make(tmp_path, config={"lr_scheduler_type": "linear", "max_steps": 4, **ONE})
    rates = [ppo.training_step(batch, step)["actor_lr"] for step in range(4)]
    assert rates == pytest.approx([1, 0.75, 0.5, 0.25])


# Whole runs


def loader(rows, batch_size=2, **options) -> DataLoader:
    return DataLoader(list(rows), batch_size=batch_size, collate_fn=list, **options)


def columns(rows, *names):
    """Returns batches of the reference system: tuples of prompts, media of each kind, references and labels."""

    def collate(batch):
        media = ([row.get(name) for row in batch] for name in names)
        others = ([row.get(name) for row in batch] for name in ("references", "labels"))
        return ([row["prompt"] for row in batch], *media, *others)

    return DataLoader(list(rows), batch_size=2, collate_fn=collate)


def fit(ppo, prompts, pretrain=None, seed=0, **options):
    """Runs two rollouts, or as many as the strategy sets."""
    torch.manual_seed(seed)
    before = weights_of(ppo.trainer.model)
    ppo.fit(ppo.strategy, prompts, pretrain, **options)
    return moves(ppo, before)


def logs_of(ppo):
    """Returns the logs without the summary of a run, which is the last one."""
    return [entry for entry in ppo.trainer.state.log_history if "train_runtime" not in entry]


def logged(ppo, name):
    return [entry[name] for entry in logs_of(ppo) if name in entry]


SMALL = {"learning_rate": 1e-2, "num_train_epochs": 1}


def fitted(folder, prompts, kind="image", *, config=None, options=None, **arguments):
    """Returns a trainer after `fit`, and how much it moved policy and critic."""
    ppo = make(folder, kind, config={**SMALL, **(config or {})}, **arguments)
    return ppo, fit(ppo, prompts if isinstance(prompts, DataLoader) else loader(prompts), **(options or {}))


def answered(rows, kind):
    """Returns rows with references and labels, whose media are lists."""
    return [
        {
            "prompt": row["prompt"],
            f"{kind}s": [row[kind]],
            "references": f"answer {i}",
            "labels": "even" if i % 2 == 0 else "odd",
        }
        for i, row in enumerate(rows)
    ]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
def test_fit(kind, tmp_path):
    """Batches of rows and of the reference's tuples train alike, and reward functions get all their arguments."""
    rows = answered(KINDS[kind].rows(4), kind)
    updates = []
    for batches in (loader(rows), columns(rows, f"{kind}s")):
        reward = Noting()
        arguments = {"ref": reference_of(kind), "reward_fn": reward, "micro_rollout_batch_size": 8}
        ppo, update = fitted(tmp_path, batches, kind, **arguments)
        updates.append(update)
        assert [call["refs"][::4] for call in reward.calls] == [["answer 0", "answer 1"], ["answer 2", "answer 3"]]
        assert reward.calls[0]["labels"] == ["even"] * 4 + ["odd"] * 4
        prompts = [prompt for call in reward.calls for prompt in call["prompts"][::4]]
        media = [prompt[0]["content"][0][kind] for prompt in prompts]
        assert all(own is row[f"{kind}s"][0] for own, row in zip(media, rows, strict=True))
        assert ppo.trainer.state.global_step == 2 and len(ppo.replay_buffer) == 0
        assert logged(ppo, "step") == [1, 2] and logged(ppo, "epoch") == [0.5, 1.0]
        assert [x > 0.1 for x in logged(ppo, "rollout/reward_std")] == [True, True]
        assert max(map(abs, logged(ppo, "kl"))) > 1e-3
    for a, b in zip(*updates, strict=True):
        assert norm(a) > 1e-3
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_tuples_with_videos_and_without_media(tmp_path):
    clip = next(iter(video_rows(1)))["video"]
    picture = image_rows(1)[0]["image"]
    rows = [
        {"prompt": "What is in the image?", "images": picture, "references": "a", "labels": "b"},
        {"prompt": "Compare them.", "images": [picture], "videos": [clip]},
        {"prompt": "Is there a bird?"},
        {"prompt": "Describe the video.", "videos": [clip]},
    ]
    updates = []
    for batches in (columns(rows, "images", "videos"), loader([{**rows[0], "images": [picture]}, *rows[1:]])):
        ppo, update = fitted(tmp_path, batches)
        updates.append(update)
    for a, b in zip(*updates, strict=True):
        assert norm(a) > 1e-3 and all(torch.equal(a[name], b[name]) for name in a)
    wrong = "A batch of prompts is a list of rows, which are dictionaries, or a tuple of 4 or 5"
    for batch in (["a", "b", "c", "d"], (["a"], ["b"]), [["a"], ["b"], {"c": 1}, ["d"]]):
        with pytest.raises(ValueError, match=wrong):
            ppo.evaluate([batch], 0)
    with pytest.raises(ValueError, match="a tuple of 4 lists, got 5 of list"):
        make(tmp_path, "audio").evaluate([([], [], [], [], [])], 0)


def test_prompts_without_media(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"Is there a bird? {i}"}]} for i in range(4)]
    words = load("qwen2_5_vl")[1].tokenizer
    ppo, updates = fitted(tmp_path, rows, processor=None, tokenizer=words)
    assert min(map(norm, updates)) > 1e-3
    words = [{"prompt": "Is there a bird?"}, {"prompt": "Is there a cat, a dog or a bird?"}]
    assert ppo.evaluate(loader(words), 2)["num_samples"] == 2


# Rewards


class Judge(nn.Module):
    """A reward model that depends on tokens and media."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, sequences, attention_mask, **media):
        assert not self.training
        seen = sum(value.float().abs().mean() for value in media.values())
        return self.weight * ((sequences % 7) * attention_mask).sum(1) + seen


def rewarded(ppo, rows, **options):
    """Returns the rewards of a rollout, and its responses as text."""
    torch.manual_seed(0)
    experiences = ppo.experience_maker.make_experience_list(list(rows), **ppo.generate_kwargs)
    rewards = torch.cat([each.info["reward"] for each in experiences])
    texts = [
        ppo.tokenizer.decode(ids[-mask.numel() :][mask], skip_special_tokens=True)
        for each in experiences
        for ids, mask in zip(each.sequences, each.action_mask, strict=True)
    ]
    return rewards.tolist(), texts, experiences


def test_reward_models_that_a_function_combines(tmp_path):
    """Its metrics may differ between micro-batches."""
    judges = [Judge(1.0), Judge(0.5)]
    calls = []

    def combine(model_reward_list, label_map):
        assert label_map == {"a": 0, "b": 1}
        calls.append(model_reward_list)
        first, second = model_reward_list
        return first - second, {"first": first, **({"odd": 1.0} if len(calls) % 2 else {"even": second.tolist()})}

    arguments = {"reward_model": judges, "reward_fn": combine, "reward_fn_label_map": {"a": 0, "b": 1}}
    ppo, _ = fitted(tmp_path, image_rows(4), **arguments, micro_rollout_batch_size=4)
    first, second = (torch.cat([models[i] for models in calls[:2]]).mean().item() for i in (0, 1))
    expected = {"reward": first - second, "first": first, "odd": 1.0, "even": calls[1][1].mean().item()}
    assert {name: logged(ppo, f"rollout/{name}")[0] for name in expected} == pytest.approx(expected)
    assert [judge.weight.item() for judge in judges] == [1.0, 0.5] and judges[0].weight.grad is None


def test_reward_recipe(serve, tmp_path):
    server = serve(lambda request: {"rewards": [10.0] * len(request["completions"])})
    recipe = {"even": [("model", "judge", 1.0), ("rule", "server", 0.1)], "odd": [("rule", "server", 2.0)]}
    arguments = {"reward_model": Judge(), "remote_rm_url": server.url, "reward_fn": None, "reward_recipe": recipe}
    ppo = make(tmp_path, reward_fn_label_map={"judge": 0, "server": 1}, **arguments)
    rewards, _, (each,) = rewarded(ppo, answered(image_rows(2), "image"))
    judged = ((each.sequences % 7) * each.attention_mask).sum(1)
    media = rewards[0] - 1 - judged[0].item()
    assert rewards == pytest.approx([judged[i].item() + media + 1 for i in range(4)] + [20.0] * 4, rel=1e-5)
    (request,) = server.requests
    assert request["labels"] == ["even"] * 4 + ["odd"] * 4
    assert [len(images) for images in request["images"]] == [1] * 8
    with pytest.raises(ValueError, match="label 'unknown', but `reward_recipe` has only"):
        rewarded(ppo, [{**answered(image_rows(1), "image")[0], "labels": "unknown"}])


# Divergence from the reference


def test_policy_without_its_adapter_is_the_reference(tmp_path):
    policy = actor_of("image", lora_rank=4)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    ppo = make(tmp_path, policy=policy, config={**SMALL, "learning_rate": 0.1})
    policy_moves, critic_moves = fit(ppo, loader(image_rows(4)))
    assert {name for name, move in policy_moves.items() if move.any()} == {n for n in policy_moves if "default" in n}
    assert norm(critic_moves) > 1e-3
    _, _, (each,) = rewarded(ppo, image_rows(2))
    inputs = each.sequences, each.action_mask.size(1), each.attention_mask
    with torch.no_grad():
        expected = torch.where(each.action_mask, actor_of("image")(*inputs, **media_of(each)), 0)
    assert_close(each.base_action_log_probs, expected, rtol=1e-4, atol=1e-4)
    assert (each.base_action_log_probs - each.action_log_probs).abs().max() > 1e-3


def test_no_divergence_without_coefficient_or_reference(tmp_path):
    for arguments in ({"ref": reference_of("image"), "init_kl_coef": 0.0}, {}):
        ppo = make(tmp_path, **arguments)
        _, _, (each,) = rewarded(ppo, image_rows(2))
        assert each.base_action_log_probs is None and ppo.trainer.ref_model is None
        assert each.kl is None and not each.info["kl"].any()
        with pytest.raises(ValueError, match="`kl_target` needs a reference `initial_model`"):
            make(tmp_path, kl_target=0.1, **arguments)


# Average of the weights, supervised rows


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_average_of_the_weights(lora_rank, tmp_path):
    policy, ema = (actor_of("image", lora_rank=lora_rank) for _ in range(2))
    ppo, (update, _) = fitted(tmp_path, image_rows(4), policy=policy, ema=ema, ema_beta=0.7)
    assert ppo.strategy.ema_decay == 0.7
    # the policy has its weights again
    averages = average_of(ppo)
    now = weights_of(ppo.trainer.model)
    behind = {name: now[name] - averages[name] for name in update}
    assert norm(behind) > 0 and norm({name: update[name] - behind[name] for name in update}) > 0
    trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    written = dict(ema.model.named_parameters())
    assert all(torch.equal(written[name], averages[name]) for name in trained & update.keys())
    with pytest.raises(ValueError, match="`ema_model` must be a copy of the policy, but has no `model.visual"):
        make(tmp_path, ema=actor_of("audio"))
    policy = actor_of("image")
    with pytest.raises(ValueError, match="holds the policy's own weights; pass a copy"):
        make(tmp_path, policy=policy, ema=policy)


def test_supervised_rows_that_are_missing_or_not_used(tmp_path):
    class Unread(list):
        def __getitem__(self, index):
            raise AssertionError("read although it doesn't count")

    prompts = loader(image_rows(4))
    with pytest.raises(ValueError, match=r"`ptx_coef` \(0.5\) needs a `pretrain_dataloader`"):
        fitted(tmp_path, prompts, ptx_coef=0.5)
    ppo = make(tmp_path, ptx_coef=0.5, config=SMALL)
    with pytest.raises(ValueError, match="supervised rows, which only `fit` takes"):
        ppo.training_step(batch_of(ppo, 4), 0)
    ppo, _ = fitted(tmp_path, prompts, options={"pretrain": DataLoader(Unread([{}]), batch_size=1)})
    assert logged(ppo, "ptx_loss") == []


# Evaluation


def test_greedy_evaluation_changes_nothing(tmp_path, caplog, monkeypatch):
    """Responses equal those of `generate` for single prompts, whatever the sampling options."""

    def restless(completion_ids, **columns):
        noise = torch.rand(()) * np.random.rand() * random.random()
        return [float(reward + 0 * noise) for reward in length_and_sum(completion_ids)]

    options = {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "temperature": 0.5, "reward_fn": restless}
    config = {"reward_running_scale": True, **adam()}
    policy = actor_of("image", temperature=0.5)
    ppo, _ = fitted(tmp_path, image_rows(4), config=config, policy=policy, ema=actor_of("image"), **options)
    policy.base_model.model.visual.eval()  # for example a frozen encoder

    def state():
        trainer = ppo.trainer
        maker = ppo.experience_maker
        parts = {
            "modes": [module.training for module in trainer.model.modules()],
            "random": [torch.get_rng_state(), np.random.get_state(), random.getstate()],
            "generation": vars(policy.base_model.generation_config),
            "counters": [trainer.state.global_step, trainer.state.log_history, maker.reward_scale.state_dict()],
            "strategy": [maker.strategy.advantage_estimator, ppo.generate_kwargs, trainer.pending_logs],
        }
        return copy.deepcopy({**parts, "average": average_of(ppo), "optimizer": trainer.optimizer.state_dict()})

    before = state()
    rows = list(image_rows(5))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    results = ppo.evaluate(loader(rows), 0)
    assert "flag" not in caplog.text
    after = state()
    responses = []
    assert [name for name in before if not equal(before[name], after[name])] == []
    for row in rows:
        inputs, start = encoded(load("qwen2_5_vl")[1], row, [])
        ids, _, mask = policy.generate(**inputs, do_sample=False, max_new_tokens=6, eos_token_id=EOS)
        responses.append(ids[0, start:][mask[0]].tolist())
    rewards = length_and_sum(responses)
    expected = {"reward_mean": fmean(rewards), "reward_std": pstdev(rewards), "num_samples": 5}
    assert results == pytest.approx({**expected, "response_length_mean": fmean(map(len, responses))})
    ppo = make(tmp_path, reward_fn=lambda completions, **columns: [None] * len(completions))
    results = ppo.evaluate(loader(image_rows(2)), 0)
    assert math.isnan(results["reward_mean"]) and math.isnan(results["reward_std"]) and results["num_samples"] == 2


def average_of(ppo) -> dict:
    with ppo.trainer.ema_weights():
        return weights_of(ppo.trainer.model)


# Logs and checkpoints


def folders(path):
    return sorted(each.name for each in path.iterdir() if each.is_dir())


def test_intervals(tmp_path):
    """A rollout has two updates, so none ends at the third."""
    config = {"logging_steps": 3, "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 4}
    evaluated = {"eval_dataloader": loader(image_rows(2))}
    ppo, _ = fitted(tmp_path / "steps", image_rows(8), config=config, options=evaluated, max_epochs=2)
    history = ppo.trainer.state.log_history
    assert [entry["step"] for entry in history if "policy_loss" in entry] == [4, 6]
    assert [entry["step"] for entry in history if "eval_reward_mean" in entry] == [4, 8]
    # The last step has a checkpoint, as in any run that saves by steps
    assert folders(tmp_path / "steps") == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
    # Ends of episodes
    config = dict.fromkeys(("logging_strategy", "save_strategy", "eval_strategy"), "epoch")
    config = {**config, "num_train_epochs": 1.5}
    ppo, _ = fitted(tmp_path / "epoch", image_rows(8), config=config, options=evaluated)
    assert ppo.trainer.state.global_step == 6
    # A run that ends within an episode ends the episode, as `Trainer.train` ends its epoch
    entries = [(entry["step"], entry["epoch"]) for entry in logs_of(ppo)]
    assert entries == [(4, 1.0)] * 2 + [(6, 1.5)] * 2
    assert folders(tmp_path / "epoch") == ["checkpoint-4", "checkpoint-6"]


def test_saved_models_that_are_not_rotated_away(tmp_path):
    config = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    fitted(tmp_path, image_rows(8), config=config, save_hf_ckpt=True)
    assert folders(tmp_path) == ["checkpoint-3", "checkpoint-4", *(f"hf-checkpoint-{step}" for step in (1, 2, 3, 4))]
    assert "optimizer.pt" not in {path.name for path in Path(tmp_path, "hf-checkpoint-4").iterdir()}


def test_what_a_checkpoint_holds(tmp_path):
    config = {**adam(), "save_strategy": "steps", "save_steps": 2}
    arguments = {"ema": actor_of("image"), "ref": reference_of("image"), "kl_target": 1e-3, "kl_horizon": 50}
    ppo, _ = fitted(tmp_path, image_rows(4), config=config, **arguments)
    folder = tmp_path / "checkpoint-4"
    own = ppo.trainer.model.state_dict()
    policy = type(ppo.actor.base_model).from_pretrained(folder).state_dict()
    assert policy.keys() == {name for name in own if not name.startswith("critic.")}
    critic = Critic.from_pretrained(folder / "critic", type(ppo.actor.base_model)).state_dict()
    saved = {**policy, **{f"critic.{name}": value for name, value in critic.items()}}
    assert all(torch.equal(value, own[name]) for name, value in saved.items())
    state = load_rollout_state(folder, 0)
    assert state["client_states"] == {"consumed_samples": 4}
    assert state["kl_controller"] == {"value": pytest.approx(ppo.trainer.kl_coef)} and ppo.trainer.kl_coef != 0.1
    ppo.save_model(str(tmp_path / "final"))
    for name, expected in (("", own), ("ema", average_of(ppo))):
        weights = type(ppo.actor.base_model).from_pretrained(tmp_path / "final" / name).state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in weights.items() if key in expected)
    config = {"save_strategy": "steps", "save_steps": 2}
    fitted(tmp_path / "alone", image_rows(4), config=config, disable_ds_ckpt=True, ema=actor_of("image"))
    names = {path.name for path in (tmp_path / "alone" / "checkpoint-2").iterdir()}
    assert {"model.safetensors", "critic"} <= names
    assert not {"optimizer.pt", "scheduler.pt", "rng_state.pth", "rollout_state_0.pt", "ema.safetensors"} & names


def test_logs_and_checkpoints_of_a_loop_of_ones_own(tmp_path):
    ppo = make(tmp_path, config={"logging_steps": 2, "save_strategy": "steps", "save_steps": 4})
    bar = tqdm(total=4)
    for step in (1, 2, 3, 4):
        logs = {"rollout_reward": float(step), "policy_loss": 2.0 * step}
        ppo.save_logs_and_checkpoints(ppo.strategy, step, bar, logs, {"mine": step}, step / 4)
    assert logged(ppo, "rollout/reward") == [1.5, 3.5]
    assert logged(ppo, "policy_loss") == [3.0, 7.0]
    assert logged(ppo, "epoch") == [0.5, 1.0]
    assert "reward=4.000" in str(bar)
    bar.close()
    assert folders(tmp_path) == ["checkpoint-4"]
    assert load_rollout_state(tmp_path / "checkpoint-4", 0)["client_states"] == {"mine": 4}
    with pytest.raises(ValueError, match="`fit` got no `eval_dataloader`"):
        ppo.save_logs_and_checkpoints(strategy(tmp_path, eval_strategy="steps", eval_steps=1), 5, None)


# Resuming from a checkpoint

EVERYTHING = {
    **adam(learning_rate=1e-2, weight_decay=0.01),
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "value_learning_rate": 2e-2,
    "freezing_actor_steps": 1,
    "reward_running_scale": True,
    "bootstrap_truncated": True,
    "save_strategy": "steps",
    "save_steps": 1,
    "logging_steps": 4,
}


def own_optimizers(policy, critic):
    """Returns optimizers of policy and critic of different types, and schedules of different lengths."""
    optimizers = torch.optim.AdamW(policy.parameters(), lr=1e-2), torch.optim.RMSprop(critic.parameters(), lr=2e-2)
    schedules = (LinearLR(each, 1.0, 0.1, n) for each, n in zip(optimizers, (12, 7), strict=True))
    return *optimizers, *schedules


def everything(folder, kind="image", own=False, **config):
    """
    Runs three rollouts of two updates in each of two episodes. Returns the prompts of each rollout. With `own`, the
    caller makes the optimizers.
    """
    policy = actor_of(kind)
    ema = actor_of(kind)
    reward = Noting()
    critic = critic_of(KINDS[kind].family)
    rows = KINDS[kind].rows(7)
    supervised = [{**row, "completion": "It is a cat."} for row in KINDS[kind].rows(3)]
    ppo = make(
        folder,
        kind,
        policy=policy,
        critic=critic,
        optimizers=own_optimizers(policy, critic) if own else (None,) * 4,
        config={**EVERYTHING, **config},
        **{"ref": reference_of(kind), "kl_target": 0.01, "kl_horizon": 50, "ema": ema, "ema_beta": 0.8},
        **{"reward_fn": reward, "max_epochs": 2, "max_norm": 1.0, "ptx_coef": 0.5},
    )
    torch.manual_seed(int.from_bytes(str(folder)[-1].encode()))  # must affect neither a resumed run nor the prompts
    ppo.fit(ppo.strategy, loader(rows, shuffle=True, drop_last=True), loader(supervised, batch_size=1))
    return ppo, ema, reward.questions


def end_of(ppo, ema) -> dict:
    """Returns all state that must match after a resumed run."""
    trainer = ppo.trainer
    maker = ppo.experience_maker
    durations = ("time", "runtime", "per_second")
    return {
        "weights": trainer.model.state_dict(),
        "average": average_of(ppo),
        "ema": ema.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "rollouts": [trainer.client_states, trainer.pending_logs],
        "controllers": [maker.kl_ctl.state_dict(), maker.reward_scale.state_dict()],
        "logs": [
            {name: value for name, value in entry.items() if not any(part in name for part in durations)}
            for entry in logs_of(ppo)
        ],
        "random": torch.get_rng_state(),
    }


@pytest.mark.parametrize(
    ("kind", "own", "stops"),
    [("image", False, [8]), ("image", True, [8]), pytest.param("audio", False, [4, 6], marks=pytest.mark.slow)],
)
def test_resumed_run_is_the_uninterrupted_run(kind, own, stops, tmp_path):
    """Resumes in the middle of an episode, between two rollouts, and between two episodes."""
    uninterrupted, ema, prompts = everything(tmp_path / "0", kind, own)
    assert uninterrupted.trainer.state.global_step == 12
    expected = end_of(uninterrupted, ema)
    assert len(expected["logs"]) == 3
    if own:  # the policy was frozen for one update
        epochs = {part: schedule["last_epoch"] for part, schedule in expected["schedule"].items()}
        assert epochs == {"policy": 11, "critic": 12}
    assert all(len(set(sum(prompts[i : i + 3], []))) == 6 for i in (0, 3)) and prompts[:3] != prompts[3:]
    for stop in stops:
        checkpoint = tmp_path / "0" / f"checkpoint-{stop}"
        resumed, ema, others = everything(tmp_path / str(stop), kind, own, resume_from_checkpoint=str(checkpoint))
        assert others == prompts[stop // 2 :]
        actual = end_of(resumed, ema)
        assert [name for name in expected if not equal(expected[name], actual[name])] == [], stop


def test_length_of_a_run(tmp_path):
    """Prompts of a former run are skipped, episodes repeat prompts, and steps are rounded up to whole rollouts."""
    runs = {}
    for consumed in (0, 6):
        noting = Noting()
        prompts = loader(image_rows(4), shuffle=True)
        options = {"config": {"num_train_epochs": 2}, "options": {"consumed_samples": consumed}}
        ppo, _ = fitted(tmp_path, prompts, **options, reward_fn=noting)
        runs[consumed] = noting.questions
        assert ppo.trainer.state.global_step == 4 - consumed // 2 and logged(ppo, "epoch")[-1] == 2
    assert runs[6] == runs[0][3:]
    # Two passes have 8 steps, and a third would need 4 more; a script may count prompts that fill no batch
    noting = Noting()
    options = {"num_update_steps_per_episodes": 9}
    config = {"logging_strategy": "epoch"}
    ppo, _ = fitted(tmp_path, prompts, config=config, options=options, max_epochs=2, reward_fn=noting)
    first = noting.questions[:2]
    second = noting.questions[2:]
    assert sorted(sum(first, [])) == sorted(sum(second, [])) and first != second
    assert ppo.trainer.state.global_step == 8 and logged(ppo, "epoch") == [1.0]
    config = {"max_steps": 3, "lr_scheduler_type": "linear", "num_train_epochs": 100}
    ppo, _ = fitted(tmp_path, image_rows(4), config=config, max_epochs=2)
    assert logged(ppo, "actor_lr") == pytest.approx([0.01 * 0.875, 0.01 * 0.375])
    with pytest.raises(RuntimeError, match="There have been updates already"):
        fit(ppo, loader(image_rows(4)))


def test_callbacks_are_asked(tmp_path):
    events = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

        def on_save(self, args, state, control, **kwargs):
            events.append("save")

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            events.append(sorted(metrics))

    config = {**SMALL, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    ppo = make(tmp_path, config=config)
    ppo.trainer.add_callback(Watch)
    fit(ppo, loader(image_rows(8)), eval_dataloader=loader(image_rows(1)))
    names = ["epoch", "eval_num_samples", "eval_response_length_mean", "eval_reward_mean", "eval_reward_std"]
    assert ppo.trainer.state.global_step == 2 and events == [names, "save"]


def test_loaders_that_do_not_fit(tmp_path):
    batches = DataLoader(list(image_rows(4)), batch_sampler=[[0, 1], [2, 3]])
    for prompts, arguments, error in (
        (loader(image_rows(4), 3), {}, "4 prompts don't fill whole batches of 3 on 1 processes"),
        (loader(image_rows(2), 3, drop_last=True), {}, "2 prompts don't fill whole batches of 3"),
        (loader(image_rows(3), 3), {}, "puts 12 samples into the buffer, which don't fill whole optimizer steps of 8"),
        (loader(image_rows(4)), {"buffer_limit": 6}, "puts 6 samples into the buffer"),
        (batches, {}, "must have a `batch_size`, and a dataset whose"),
    ):
        with pytest.raises(ValueError, match=error):
            fitted(tmp_path, prompts, **arguments)
    for config, error in (
        ({"eval_strategy": "steps", "eval_steps": 1}, "pass an `eval_dataloader`"),
        ({"save_strategy": "best", "metric_for_best_model": "reward"}, "save 'steps' or 'epoch'"),
    ):
        with pytest.raises(ValueError, match=error):
            make(tmp_path, config=SMALL).fit(strategy(tmp_path, **SMALL, **config), loader(image_rows(4)), None)


# Arguments


def test_critic_by_default(tmp_path):
    """The default critic is a copy of the policy with a zero head and separate weights."""
    policy = actor_of("image")
    arguments = {"reward_fn": length_and_sum, "prompt_max_len": 512, "max_new_tokens": 6}
    ppo = PPOTrainerVL(strategy(tmp_path), policy, *(None,) * 8, processor=load("qwen2_5_vl")[1], **arguments)
    assert ppo.critic is ppo.experience_maker.critic
    backbone, own = (dict(part.base_model.named_parameters()) for part in (ppo.critic.model, policy.base_model))
    assert all(torch.equal(backbone[name], own[name]) for name in own) and backbone.keys() == own.keys()
    assert not {p.data_ptr() for p in own.values()} & {p.data_ptr() for p in backbone.values()}
    _, _, (each,) = rewarded(ppo, image_rows(2))
    assert not each.values.any() and each.returns.any()


def test_gradient_checkpointing(tmp_path):
    """Both backbones recompute their activations."""
    for checkpointing, times in ((False, 1), (True, 2)):
        calls = [0, 0]
        policy = actor_of("image", lora_rank=4)
        config = {**ONE, "gradient_checkpointing": checkpointing}
        ppo = make(tmp_path, config=config, policy=policy, gradient_checkpointing=checkpointing)

        def count(index, calls=calls):
            calls[index] += 1

        batch = batch_of(ppo, 4)
        for index, model in enumerate((policy.base_model, ppo.critic.model)):
            layer = model.get_decoder().layers[0]
            layer.self_attn.register_forward_hook(lambda *_, index=index: count(index))
        ppo.training_step(batch, 0)
        assert calls == [times, times]


def test_limit_of_the_buffer(tmp_path):
    """Of 16 samples of each of two rollouts, the newest 8 make an update."""
    ppo = make(tmp_path, buffer_limit=8, buffer_cpu_offload=False, micro_rollout_batch_size=8, config=SMALL)
    assert (ppo.replay_buffer.limit, ppo.replay_buffer.cpu_offload) == (8, False)
    fit(ppo, loader(image_rows(8), 4))
    assert ppo.trainer.state.global_step == 2 and logged(ppo, "epoch") == [0.5, 1.0]


def test_options_of_the_rollout(tmp_path):
    with pytest.raises(ValueError, match=r"Prompt 0 has \d+ tokens, more than `prompt_max_len` \(10\)"):
        rewarded(make(tmp_path, prompt_max_len=10), image_rows(2))
    ppo = make(tmp_path, max_new_tokens=3, gamma=0.5, lambd=0.25)
    assert ppo.strategy.advantage_estimator == "gae(gamma=0.5, lam=0.25)" and ppo.strategy.max_completion_length == 3
    _, _, (each,) = rewarded(ppo, image_rows(2))
    rewards = token_rewards(each.info["reward"], each.action_mask)
    _, returns = gae(rewards, each.values, each.action_mask, gamma=0.5, lam=0.25)
    assert each.action_mask.size(1) <= 3
    assert_close(each.returns, returns)


def test_errors_of_the_constructor(tmp_path):
    policy = actor_of("image")
    processor = load("qwen2_5_vl")[1]
    critic = critic_of("qwen2_5_vl")
    sgd = torch.optim.SGD(policy.parameters())
    part = torch.optim.SGD([*policy.parameters()][:3])
    values = torch.optim.SGD(critic.parameters())

    def construct(config=None, critic=None, optimizers=(None,) * 4, **arguments):
        models = policy, critic, None, None, None
        arguments = {"processor": processor, "reward_fn": length_and_sum, **arguments}
        return PPOTrainerVL(strategy(tmp_path, **(config or {})), *models, *optimizers, **arguments)

    group_norm = {"critic": critic_of("qwen2_5_vl"), "config": {"advantage_estimator": "group_norm"}}
    for arguments, error in (
        (group_norm, "`critic` was passed, which .*'group_norm'"),
        ({"optimizers": (None, sgd, None, None)}, "`critic_optim` trains a `critic`, which wasn't passed"),
        ({"optimizers": (sgd, None, None, None)}, "`actor_optim` doesn't train the critic that 'gae' makes"),
        ({"optimizers": (None, None, LinearLR(sgd), None)}, "A scheduler needs its optimizer"),
        ({"optimizers": (sgd, None, None, None), "critic": critic}, "`critic_optim` is None, but the other side"),
        ({"optimizers": (sgd, sgd, None, None), "critic": critic}, "`critic_optim` holds weights of another model"),
        ({"optimizers": (sgd, values, LinearLR(sgd), None), "critic": critic}, "or none of them"),
        ({"optimizers": (part, values, None, None), "critic": critic}, "`actor_optim` doesn't hold `model"),
        (
            {"optimizers": (sgd, values, LinearLR(values), LinearLR(values)), "critic": critic},
            "`actor_scheduler` was made for another optimizer",
        ),
        ({"reward_fn": None}, "There is no source of reward"),
        ({"max_new_token": 5}, "`max_new_token` is no option of sampling"),
        (
            {"config": {"shared_trunk": True}},
            "`shared_trunk` of `strategy` has no effect in .*; remove it, or use `Multi",
        ),
        ({"config": {"top_p": 0.5}}, "`top_p` of `strategy` has no effect .*, or pass it to `PPOTrainerVL` itself"),
        ({"config": {"top_entropy_quantile": 0.2}}, "make the actor with `high_entropy_token_ratio=0.2`"),
        ({"processor": None}, "Pass the policy's `processor`, or its `tokenizer`"),
        (
            {"micro_train_batch_size": 0, "config": {"per_device_train_batch_size": 8}},
            "`micro_train_batch_size` must be at least 1",
        ),
        ({"init_kl_coef": -0.1}, "`init_kl_coef` must be at least 0"),
        ({"gamma": 1.5}, "`gamma` must be between 0 and 1"),
    ):
        with pytest.raises(ValueError, match=error):
            construct(**arguments)
    with pytest.raises(TypeError, match="must be a MultimodalPPOConfig, got GRPOConfig"):
        PPOTrainerVL(GRPOConfig(str(tmp_path), use_cpu=True, bf16=False), policy, *(None,) * 8, processor=processor)
    with pytest.raises(ValueError, match="The reference is an actor for temperature 2.0, the policy for 1.0"):
        make(tmp_path, policy=policy, ref=reference_of("image", temperature=2.0))
    with pytest.raises(ValueError, match="can't be its own reference without an adapter"):
        make(tmp_path, policy=policy, ref=policy)


def test_config_is_left_as_it_was(tmp_path):
    config = strategy(tmp_path, learning_rate=1e-3)
    before = {name: value for name, value in copy.deepcopy(vars(config)).items() if name != "distributed_state"}
    PPOTrainerVL(config, actor_of("image"), *(None,) * 8, processor=load("qwen2_5_vl")[1], reward_fn=length_and_sum)
    assert {name: vars(config)[name] for name in before if vars(config)[name] != before[name]} == {}


@pytest.mark.parametrize("packing", [True, False])
def test_mixed_precision_is_that_of_the_rollout(packing, tmp_path):
    """Until an update, policy and critic equal the rollout's bit for bit."""
    config = {"bf16": True, "learning_rate": 0.0, **WHOLE}
    ppo = make(tmp_path, config=config, policy=actor_of("image", packing), ref=actor_of("image"), value_clip=1e-6)
    ppo.trainer.prepare_without_fit()  # `fit` does this before the first rollout
    _, _, (each,) = rewarded(ppo, image_rows(2))
    status = ppo.training_step(each, 0)
    assert status["ratio/max"] == 1 and status["approx_kl"] == 0 and status["value_clip_ratio"] == 0
