# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Updates of `PPOTrainerVL` next to a loop over the models' own forwards in float64: losses, gradients and Adam's steps.

The trainer only samples the completions. All else of an update is computed here from rewards and ids.
"""

import copy
import math
import signal
import sys
from argparse import Namespace
from itertools import product
from pathlib import Path

import pytest
import torch
from helpers import forked
from helpers.folders import TESTS
from helpers.ppo_runs import critic_of, encoded, weights_of
from helpers.processes import python_environment
from helpers.trainer_utils import (
    PLAIN,
    audio_rows,
    image_rows,
    length_and_sum,
    load,
    moved,
    norm,
    relative_difference,
    saved,
)
from lightrft.test_reference_numbers import by_definition
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from trl_multimodal_rft import MultimodalPPOConfig
from trl_multimodal_rft.lightrft import ActorAL, ActorVL, PPOTrainerAL, PPOTrainerVL
from trl_multimodal_rft.lightrft.strategy import get_strategy


pytestmark = pytest.mark.gate

KINDS = {
    "vision": ("qwen2_5_vl", PPOTrainerVL, ActorVL, image_rows),
    "audio": ("qwen2_audio", PPOTrainerAL, ActorAL, audio_rows),
}
GROUP = 4  # completions of each of the two prompts, as in `test_reference_numbers.py`
GAMMA = 0.9
LAMBDA = 0.8
COEFFICIENT = 0.2
CLIP = 0.2
MAX_NORM = 0.3
RATES = {"policy": 1e-2, "critic": 2e-2}


def adam(parameters, rate):
    """Returns Adam, whose large `eps` keeps the rounding of small gradients from becoming whole steps."""
    optimizer = torch.optim.Adam(parameters, lr=rate, eps=1e-3)
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


class Loop:
    """The definitions of the reference pages, over copies of the models in float64."""

    def __init__(self, policy, reference, critic, processor, rows, completions, estimator, clips_logps):
        self.clips_logps = clips_logps  # whether the loss is that of LightRFT's `use_cpg_loss`
        self.policy, self.reference, self.critic = (
            copy.deepcopy(model).double() for model in (policy, reference, critic)
        )
        self.processor = processor
        self.pairs = list(zip(rows, completions, strict=True))
        self.estimator = estimator
        rewards = length_and_sum(completions)
        with torch.no_grad():
            self.old_logps = self.logps(self.policy)
            base = self.logps(self.reference)
            self.old_values = self.values()
        columns = (rewards, *([row.tolist() for row in part] for part in (self.old_logps, base, self.old_values)))
        options = {"coefficient": COEFFICIENT, "gamma": GAMMA, "lambd": LAMBDA, "clip": None, "k3": False}
        samples = list(zip(*columns, strict=True))
        self.advantages, self.returns, _ = by_definition(estimator, samples, **options)
        self.optimizers = {"policy": adam(self.policy.parameters(), RATES["policy"])}
        if estimator == "gae":
            self.optimizers["critic"] = adam(self.critic.parameters(), RATES["critic"])

    def inputs(self, row, completion):
        inputs, start = encoded(self.processor, row, completion)
        as_double = {
            name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
            for name, value in inputs.items()
        }
        return as_double, start

    def logps(self, model):
        rows = []
        for row, completion in self.pairs:
            inputs, start = self.inputs(row, completion)
            logits = model(**inputs).logits[0, start - 1 : -1]
            rows.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
        return rows

    def values(self):
        """Returns the value of the state before each token."""
        rows = []
        for row, completion in self.pairs:
            inputs, start = self.inputs(row, completion)
            hidden = self.critic.model.base_model(**inputs).last_hidden_state[0, start - 1 : -1]
            rows.append((hidden @ self.critic.head.weight[0]) + self.critic.head.bias)
        return rows

    def losses(self):
        """
        Returns the loss of the policy, as it is logged, too, and, with a critic, that of values: means over tokens,
        then over completions.
        """
        losses = []
        constants = []  # without a gradient, which the log leaves out
        for logps, old, advantages in zip(self.logps(self.policy), self.old_logps, self.advantages, strict=True):
            ratio = (logps - old).exp()
            advantage = torch.tensor(advantages, dtype=torch.float64)
            if self.clips_logps:
                upper = torch.minimum(logps, math.log(1 + CLIP) + old)
                lower = torch.maximum(logps, math.log(1 - CLIP) + old)
                losses.append((-torch.where(advantage > 0, upper, lower) * advantage).mean())
                constants.append((old * advantage).mean())
            else:
                losses.append(-torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean())
                constants.append(torch.zeros(()))
        result = {"policy": torch.stack(losses).mean()}
        result["logged"] = result["policy"] + torch.stack(constants).mean()
        if self.estimator == "gae":
            losses = []
            errors = []
            for values, old, returns in zip(self.values(), self.old_values, self.returns, strict=True):
                target = torch.tensor(returns, dtype=torch.float64)
                clipped = old + (values - old).clamp(-CLIP, CLIP)
                errors.append(0.5 * torch.max((values - target) ** 2, (clipped - target) ** 2))
                losses.append(errors[-1].mean())
            result["critic"] = torch.stack(losses).mean()
            result["per token"] = torch.cat(errors).mean()  # as the metric is logged
        return result

    def update(self):
        """Makes an update. Returns losses and norms of gradients."""
        losses = self.losses()
        norms = {}
        for part, (optimizer, scheduler) in self.optimizers.items():
            optimizer.zero_grad()
            losses[part].backward()
            parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
            norms[part] = nn.utils.clip_grad_norm_(parameters, MAX_NORM).item()
            optimizer.step()
            scheduler.step()
        return {part: loss.item() for part, loss in losses.items()}, norms


@pytest.mark.parametrize(
    ("kind", "estimator", "use_cpg_loss"),
    [
        *((kind, estimator, False) for kind, estimator in product(KINDS, ("gae", "group_norm", "rloo"))),
        *(("vision", estimator, True) for estimator in ("gae", "rloo", "cpgd")),
        ("audio", "group_norm", True),
    ],
)
def test_two_updates_are_those_of_the_loop(kind, estimator, use_cpg_loss, tmp_path):
    family, trainer_class, actor_class, make_rows = KINDS[kind]
    rows = list(make_rows(2))
    model, processor = load(family)
    reference = moved(family)["model"]
    critic = critic_of(family)
    strategy = get_strategy(
        Namespace(save_path="out", advantage_estimator=estimator, use_cpg_loss=use_cpg_loss, bf16=False)
    )
    options = {
        "num_generations": GROUP,
        "gradient_accumulation_steps": 1,
        "loss_type": strategy.loss_type,
        "beta": 0.0,
    }
    config = MultimodalPPOConfig(
        str(tmp_path), **{**PLAIN, "max_grad_norm": MAX_NORM, "advantage_estimator": estimator, **options}
    )
    policy = actor_class(model.double(), bf16=False, packing_samples=True)
    parts = {"policy": adam(policy.parameters(), RATES["policy"])}
    if estimator == "gae":
        parts["critic"] = adam(critic.double().parameters(), RATES["critic"])
    optimizers, schedulers = zip(*parts.values(), strict=True)
    missing = (None,) * (2 - len(parts))
    discounts = {"gamma": GAMMA, "lambd": LAMBDA} if estimator == "gae" else {"gamma": GAMMA}
    ppo = trainer_class(
        *(
            config,
            policy,
            critic if estimator == "gae" else None,
            None,
            actor_class(reference.double(), bf16=False),
            None,
        ),
        *(*optimizers, *missing, *schedulers, *missing),
        init_kl_coef=COEFFICIENT,
        micro_train_batch_size=2 * GROUP,
        max_epochs=2,
        max_norm=MAX_NORM,
        processor=processor,
        prompt_max_len=512,
        reward_fn=length_and_sum,
        max_new_tokens=6,
        eos_token_id=list(range(50, 110)),
        **discounts,
    )
    experiences = ppo.experience_maker.make_experience_list(rows, **ppo.generate_kwargs)
    completions = []
    for experience in experiences:
        actions = experience.sequences[:, -experience.action_mask.size(1) :]
        completions += [ids[mask].tolist() for ids, mask in zip(actions, experience.action_mask, strict=True)]
        ppo.replay_buffer.append(experience)
    assert len({len(ids) for ids in completions}) > 1
    repeated = [row for row, _ in product(rows, range(GROUP))]
    loop = Loop(model, reference, critic, processor, repeated, completions, estimator, use_cpg_loss)
    before = weights_of(ppo.trainer.model)
    status = ppo.ppo_train()
    losses, norms = zip(loop.update(), loop.update(), strict=True)

    def mean(numbers, part):
        return sum(entry[part] for entry in numbers) / 2

    assert status["policy_loss"] == pytest.approx(mean(losses, "logged"), rel=1e-4, abs=1e-6)
    assert status["grad_norm"] == pytest.approx(mean(norms, "policy"), rel=1e-4)
    assert norms[0]["policy"] > MAX_NORM  # so that clipping counts
    expected = {name: value for name, value in weights_of(loop.policy).items() if not name.startswith("critic.")}
    found = weights_of(ppo.trainer.model)
    moves = [{name: weights[name] - before[name] for name in expected} for weights in (expected, found)]
    assert norm(moves[0]) > 1e-2 and relative_difference(*moves) <= 1e-4
    if estimator == "gae":
        assert status["critic_loss"] == pytest.approx(mean(losses, "per token"), rel=1e-4)
        assert status["critic_grad_norm"] == pytest.approx(mean(norms, "critic"), rel=1e-4)
        expected = {f"critic.{name}": value for name, value in weights_of(loop.critic).items()}
        moves = [{name: weights[name] - before[name] for name in expected} for weights in (expected, found)]
        assert norm(moves[0]) > 1e-2 and relative_difference(*moves) <= 1e-4
    assert status["actor_lr"] == pytest.approx(RATES["policy"] * (1 + 1 / 2) / 2)


def run_script(*words):
    command = [sys.executable, str(TESTS / "helpers" / "lightrft_script.py"), *map(str, words)]
    return forked.run(command, capture_output=True, env=python_environment())


def saved_weights(folder):
    files = sorted(Path(folder).glob("*.safetensors")) + sorted(Path(folder, "critic").glob("*.safetensors"))
    return {f"{path.parent.name}/{name}": value for path in files for name, value in load_file(path).items()}


@pytest.mark.parametrize("estimator", ["gae", pytest.param("rloo", marks=pytest.mark.slow)])
def test_killed_script_resumes_bit_for_bit(estimator, tmp_path):
    """A script with LightRFT's options, two optimizers and two schedules is killed within a rollout."""
    model = saved("qwen2_5_vl")
    whole = run_script(tmp_path / "model", model, estimator)
    assert whole.returncode == 0 and "rollouts: 6" in whole.stdout, whole.stderr[-3000:]
    # Folders with the same last name, since a card names the model after it
    killed = run_script(tmp_path / "killed" / "model", model, estimator, 5)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert not (tmp_path / "killed" / "model" / "model.safetensors").exists()
    resumed = run_script(tmp_path / "killed" / "model", model, estimator)
    assert resumed.returncode == 0 and "rollouts: 2" in resumed.stdout, resumed.stderr[-3000:]
    expected = saved_weights(tmp_path / "model")
    found = saved_weights(tmp_path / "killed" / "model")
    assert expected.keys() == found.keys() and any(name.startswith("critic/") for name in found) == (
        estimator == "gae"
    )
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
