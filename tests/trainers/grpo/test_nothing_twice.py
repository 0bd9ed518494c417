# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a step doesn't compute changes nothing: updates and metrics equal those of the plain path."""

import functools
from itertools import product

import numpy as np
import pytest
import torch
from helpers.grpo_runs import FAMILY, TWO
from helpers.marks import by_turns, slow_but
from helpers.samplers import FromEngine
from helpers.trainer_utils import (
    TRAINERS,
    Injected,
    PseudoRandom,
    audio_rows,
    image_rows,
    largest_difference,
    length_and_sum,
    load,
    logged,
    norm,
    relative_difference,
    run,
    text_rows,
)

from trl_multimodal_rft.algorithms.losses import LOSSES, LossOutput, log_ratios
from trl_multimodal_rft.algorithms.losses import policy_loss as listed
from trl_multimodal_rft.trainers.sampling.micro_batches import Batches


@functools.cache
def trainer_class(kind: str, *, plain: bool, engine: bool = False):
    class Counting(Injected, TRAINERS[kind]):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.n_tokens = 0
            self.n_scored = 0
            self.score = self._policy.score
            self._policy.score = self.counting
            processes = self._policy.processes
            self.make_dummies = processes.dummies_for_unselected
            processes.dummies_for_unselected = self.without_counting
            if engine:
                self.sampler = FromEngine(self)
                self.use_vllm = True
            decoder = self._unwrapped(self.model).get_decoder()
            decoder.register_forward_pre_hook(self.count, with_kwargs=True)

        def count(self, module, args, kwargs):
            if torch.is_grad_enabled():
                self.n_tokens += kwargs["inputs_embeds"].shape[:2].numel()

        def without_counting(self, *args):
            dummies = self.make_dummies(*args)  # larger than these prompts
            self.n_tokens -= sum(map(len, dummies))
            return dummies

        def counting(self, model, request):
            self.n_scored += model is self.model and request.logps and not torch.is_grad_enabled()
            return self.score(model, request)

    class AllEarly(Batches):
        n_on_policy = 0  # all old scores come from a separate pass

    class Plain(Counting):
        _uses_every_score = True

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._batches.__class__ = AllEarly

    return Plain if plain else Counting


def both(kind: str, family: str, rows, engine: bool = False, **options):
    """Runs of the plain path and as shipped."""
    options = {"learning_rate": 0.03, **options}
    return [run(trainer_class(kind, plain=plain, engine=engine), family, rows, **options) for plain in (True, False)]


def assert_same(plain, ours, without: tuple[str, ...] = ()) -> None:
    assert norm(plain.update) > 1e-3
    assert relative_difference(plain.update, ours.update) <= 5e-6
    histories = [
        [{name: value for name, value in entry.items() if name not in without} for entry in each.history]
        for each in (plain, ours)
    ]
    difference, name = largest_difference(*histories)
    assert difference <= 1e-5, name


# Old log-probabilities

ENGINE = {"vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_mode": "sequence_truncate"}


@pytest.mark.parametrize(
    ("kind", "options", "scored"),
    [
        ("grpo", {"steps_per_generation": 4}, (4, 2)),
        (
            "grpo",
            {"num_iterations": 2, "top_entropy_quantile": 0.5, "entropy_source": "rollout(scope='sequence')"},
            (2, 0),
        ),
        ("grpo", {"num_iterations": 2, "top_entropy_quantile": 0.5}, (2, 2)),
        ("rloo", {"num_iterations": 2, "beta": 0.0}, (2, 0)),
        ("rloo", {"num_iterations": 2, "beta": 0.0, "steps_per_generation": 4}, (4, 2)),
        ("rloo", {"num_iterations": 2, "beta": 0.1}, (2, 2)),  # the reward holds the KL divergence
        ("ppo", {"num_ppo_epochs": 2}, (2, 0)),
        ("ppo", {"num_ppo_epochs": 2, "advantage_estimator": "reinforce", "beta": 0.0}, (2, 0)),
    ],
)
def test_the_update_scores_what_it_is_on_policy_for(kind, options, scored):
    options = {**TWO, **options}
    plain, ours = both(kind, FAMILY, image_rows(), engine=True, **options, **ENGINE)
    assert_same(plain, ours)
    assert (plain.trainer.n_scored, ours.trainer.n_scored) == scored


# Groups without signal


def half_dead(completion_ids, prompts, **kwargs):
    """Gives the completions of every other prompt the same reward."""
    order = list(dict.fromkeys(map(str, prompts)))
    rewards = length_and_sum(completion_ids)
    return [0.5 if order.index(str(p)) % 2 else reward for p, reward in zip(prompts, rewards, strict=True)]


def all_dead(completion_ids, **kwargs):
    return [0.5] * len(completion_ids)


# A group with signal beside one without, alone, and its halves
@pytest.mark.parametrize(
    ("family", "rows", "size"),
    [(FAMILY, image_rows, 8), ("qwen2_audio", audio_rows, 4), (FAMILY, text_rows, 2), (FAMILY, image_rows, 2)],
)
def test_groups_without_signal_are_not_forwarded(family, rows, size):
    options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size, "reward": half_dead}
    plain, ours = both("grpo", family, rows(), **options)
    assert_same(plain, ours, without=("entropy",))
    assert [entry["packing/skipped_frac"] for entry in ours.history[:2]] == [0.5, 0.5]
    assert ours.trainer.n_tokens <= 0.55 * plain.trainer.n_tokens


# CPGD's drift and IPO's square pull all completions back; Clip-Cov and KL-Cov choose from the tokens of all
NEED_ALL = ("cpgd", "ipo", "clip_cov", "kl_cov")
# Metrics of losses that are means over the scores of all tokens
MEANS_OF_SCORES = ("vespo/phi_seq_mean", "fipo/influence_weight_mean")


# One of each kind: clipped, by completion, with a drift, of the ratio to the engine, and detached
@pytest.mark.parametrize("loss", slow_but(LOSSES, "dapo", "gmpo", "cpgd", "vespo", "cispo"))
def test_every_loss_leaves_them_out_or_needs_them(loss):
    options = {**TWO, "steps_per_generation": 4, "loss_type": loss, "reward": half_dead, **ENGINE}
    if loss == "vespo":
        options["vllm_importance_sampling_mode"] = "token_truncate"
    plain, ours = both("grpo", FAMILY, image_rows(), engine=True, **options)
    of_scores = [name for name in ours.history[0] if name.startswith(("sampling/", *MEANS_OF_SCORES))]
    assert_same(plain, ours, without=("entropy", *of_scores))
    skipped = 0 if loss in NEED_ALL else 0.5
    assert [entry["packing/skipped_frac"] for entry in ours.history if "packing/skipped_frac" in entry] == [skipped]
    assert (plain.trainer.n_scored, ours.trainer.n_scored) == (4, 2)


@pytest.mark.parametrize(
    ("kind", "options", "skipped"),
    [
        ("rloo", {"beta": 0.0}, 0.5),
        ("rloo", {"beta": 0.1}, 0.0),  # the divergence in the rewards is a signal
        ("ppo", {}, 0.0),
        ("grpo", {"beta": 0.1}, 0.0),
        ("grpo", {"entropy_coef": 0.01}, 0.0),
        ("grpo", {"top_entropy_quantile": 0.5}, 0.0),
        ("grpo", {"top_entropy_quantile": 0.5, "entropy_source": "rollout(scope='sequence')"}, 0.5),
        ("grpo", {"max_tokens_per_microbatch": 48}, 0.5),
        ("grpo", {"num_iterations": 2}, 0.5),
    ],
)
def test_what_else_asks_for_them(kind, options, skipped):
    plain, ours = both(kind, FAMILY, image_rows(), reward=half_dead, **TWO, **options)
    assert_same(plain, ours, without=("entropy", "token_budget/parts"))
    assert [each["packing/skipped_frac"] for each in ours.history if "packing/skipped_frac" in each][-1] == skipped


def pulled_back(inputs, options):
    """The policy gradient and a term on all tokens, as prime-rl's squared log-ratio."""
    log_ratio = log_ratios(inputs.logps, inputs.old_logps, inputs.mask)
    return LossOutput(0.5 * inputs.logps - log_ratio.exp() * inputs.advantages[:, None], {})


def longer(kind, name):
    """A subclass whose loss has a further term on all tokens."""

    def own(self, *given):
        output = getattr(super(subclass, self), name)(*given)
        rollout = getattr(given[-1], "rollout", given[-1])
        term = 0.5 * (self._scores.logps * rollout.loss_mask).sum() / 100
        return LossOutput(output.loss + term, output.metrics) if name == "_loss" else output + term

    subclass = type("Longer", (TRAINERS[kind],), {name: own})
    return subclass


TERMS = [("grpo", "listed"), *((kind, name) for kind, name in product(("grpo", "rloo"), ("_loss", "_compute_loss")))]


@pytest.mark.parametrize(("kind", "own", "budget"), by_turns(TERMS, [48, None]))
def test_a_term_on_all_tokens_needs_them(kind, own, budget, monkeypatch):
    """In a loss that a user listed, and in those of subclasses, for batches of which half has no advantage."""
    options = {"reward": half_dead, "beta": 0.0, "learning_rate": 0.03, "max_tokens_per_microbatch": budget}
    if own == "listed":
        monkeypatch.setitem(LOSSES, "pulled_back", None)
        del LOSSES["pulled_back"]
        listed("pulled_back")(pulled_back)
        options["loss_type"] = "pulled_back"
    else:
        monkeypatch.setitem(TRAINERS, kind, longer(kind, own))
    make = trainer_class.__wrapped__  # without what was made of other bases
    plain, ours = (run(make(kind, plain=each), FAMILY, image_rows(), **options) for each in (True, False))
    assert_same(plain, ours)
    assert [each["packing/skipped_frac"] for each in ours.history if "packing/skipped_frac" in each] == [0, 0]


def test_a_listed_loss_may_leave_them_out(monkeypatch):
    monkeypatch.setitem(LOSSES, "mine", None)
    del LOSSES["mine"]
    listed("mine", needs_advantage=True)(LOSSES["grpo"].function)
    result = run(trainer_class("grpo", plain=False), FAMILY, image_rows(), reward=half_dead, loss_type="mine")
    assert result.history[0]["packing/skipped_frac"] == 0.5


class Unlikely(PseudoRandom):
    """Completions of 40 random tokens."""

    def __call__(self, model, prompts, *, step, **options):
        generator = np.random.default_rng(step)
        return [generator.integers(50, 300, 40).tolist() for _ in prompts], None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("rloo", {"beta": 0.0, "steps_per_generation": 2}),
        ("rloo", {"beta": 0.0, "num_iterations": 2, "max_tokens_per_microbatch": 300}),
        ("grpo", {"loss_type": "vespo", "steps_per_generation": 2}),
        ("grpo", {"loss_type": "vespo", "num_iterations": 2, "loss_view": "blank(token_quantile=0.5)"}),
    ],
)
def test_the_ratio_of_what_is_not_forwarded_is_one(kind, options):
    """Old log-probabilities of -220 in all, with those of an earlier policy."""
    options = {"max_completion_length": 40, "reward": half_dead, "learning_rate": 0.01, "max_steps": 4, **options}
    options |= {"logging_nan_inf_filter": False, "sampler": Unlikely}
    plain, ours = both(kind, FAMILY, image_rows(), **options)
    skipped = [entry["packing/skipped_frac"] for entry in ours.history if "packing/skipped_frac" in entry]
    assert skipped and set(skipped) == {0.5}
    assert norm(plain.update) > 1e-3 and relative_difference(plain.update, ours.update) <= 1e-4
    expected = logged(plain, "loss")
    found = logged(ours, "loss")
    assert len(found) == 4 and np.allclose(expected, found, rtol=0, atol=1e-4), (expected, found)


def test_dropout_draws_the_same_numbers():
    model, processor = load(FAMILY)
    model.get_decoder().layers[0].self_attn.attention_dropout = 0.1
    options = {"reward": half_dead, "objects": {"model": model, "processing_class": processor}, "max_steps": 1}
    run_ = run(trainer_class("grpo", plain=False), FAMILY, image_rows(), **options)
    assert run_.history[0]["packing/skipped_frac"] == 0


def test_a_step_without_signal_decays_weights():
    """An optimizer with momentum and weight decay moves weights whose gradient is 0, but not those without one."""

    def some_dead(completion_ids, trainer_state, **kwargs):
        return all_dead(completion_ids) if trainer_state.global_step else length_and_sum(completion_ids)

    options = {"optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.1, "reward": some_dead, "max_steps": 3}
    plain, ours = both("grpo", "qwen2_audio", audio_rows(), **options)
    assert [entry["packing/skipped_frac"] for entry in ours.history[1:3]] == [1, 1]
    assert norm(plain.update) > 1e-3
    assert relative_difference(plain.update, ours.update) <= 1e-5
