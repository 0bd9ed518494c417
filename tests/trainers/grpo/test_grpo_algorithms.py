# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The config's options beyond TRL's, through the trainer: against TRL where it has them, otherwise by hand."""

import math
from statistics import fmean, stdev

import pytest
import torch
from helpers.grpo_runs import FAMILY, TWO, centred, check_advantages, dataset, loss_by_hand, ours, rough
from helpers.marks import slow_but
from helpers.plain_steps import assert_plain
from helpers.trainer_utils import (
    InjectedOurs,
    Recorded,
    assert_equal,
    audio_rows,
    image_rows,
    length_and_sum,
    load,
    logged,
    make_trainer,
    moved,
    norm,
    relative_difference,
)
from torch.testing import assert_close
from trl.experimental.gmpo import GMPOTrainer

from trl_multimodal_rft import MultimodalGRPOTrainer


# Two updates on one generation batch, each from two of its four micro-batches, and the same again
REUSED = {**TWO, "steps_per_generation": 4, "num_iterations": 2, "max_steps": 4}


def constant(completion_ids, **kwargs):
    return [0.1] * len(completion_ids)


# Advantages


KL_IN_REWARD = {"beta": 0.5, "kl_estimator": "k1"}


@pytest.mark.parametrize(
    ("estimator", "options"),
    [
        ("group_norm", {}),
        ("grpo", KL_IN_REWARD),
        ("group_norm", {"scale_rewards": "none"}),
        ("rloo", {"beta": 0.5}),
        ("reinforce", {}),
        ("reinforce++", {"beta": 0.5}),
        ("reinforce++_baseline(norm_level='sequence')", {}),
        ("reinforce_baseline", KL_IN_REWARD),
        ("cpgd", {}),
        ("cpgd(weight='std')", {}),
        ("dr_grpo", {}),
        ("max_rl", {}),
        ("pass_at_k(k=2)", KL_IN_REWARD),
        ("pkpo(k=2)", {}),
        ("opo", {}),
        ("optimal_token_baseline", {}),
        ("optimal_token_baseline", KL_IN_REWARD),
    ],
)
def test_updates_are_those_of_the_estimator(estimator, options):
    """With rewards, groups and log-probabilities of the plain step. `test_advantages.py` tests its formula."""
    rewards = []

    def kept(**columns):
        rewards.extend(rough(**columns))
        return rewards[-len(columns["completion_ids"]) :]

    batches = {**TWO, "per_device_train_batch_size": 8, "shuffle_dataset": False, "objects": moved(FAMILY)}
    options = {"advantage_estimator": estimator, "reward": kept, **batches, **options}
    assert_plain(MultimodalGRPOTrainer, FAMILY, dataset(), 1, **options)
    assert None in rewards and sum(reward is not None and abs(reward - 0.1) < 1e-6 for reward in rewards) >= 4


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_function_as_estimator(beta, by_token):
    given = []

    def estimator(rewards, rewards_per_func, group_ids, mask, old_logps, ref_logps):
        given.append((rewards, rewards_per_func, group_ids, mask, old_logps, ref_logps))
        advantages = torch.arange(1.0, len(rewards) + 1)
        return advantages[:, None] + 0.1 * torch.arange(mask.size(1)) if by_token else advantages

    def length(completion_ids, **kwargs):
        return [float(len(ids)) if sum(ids) % 3 else None for ids in completion_ids]

    result = ours(
        advantage_estimator=estimator,
        beta=beta,
        reward=[rough, length],
        reward_weights=[2.0, 0.5],
        objects=moved(FAMILY),
        max_steps=1,
        per_device_train_batch_size=16,
        shuffle_dataset=False,
        learning_rate=0.0,
    )
    assert len(given) == 1
    rewards, rewards_per_func, group_ids, mask, old_logps, ref_logps = given[0]
    (moment,) = result.trainer.micro_batches
    batch = moment.batch  # one micro-batch keeps the order of generation
    assert rewards_per_func.shape == (16, 2) and rewards.shape == (16,)
    columns = [(2 * a, b / 2) for a, b in rewards_per_func.tolist()]
    unscorable = [math.isnan(a) and math.isnan(b) for a, b in columns]
    assert any(unscorable) and not all(unscorable)
    expected = [
        math.nan if u else sum(x for x in row if not math.isnan(x)) for row, u in zip(columns, unscorable, strict=True)
    ]
    assert_close(rewards, torch.tensor(expected), equal_nan=True)
    assert group_ids.tolist() == [i // 4 for i in range(16)]
    assert torch.equal(mask, batch["completion_mask"])
    assert torch.equal(old_logps, batch["old_per_token_logps"])
    scored = mask.bool() & (batch["advantages"] != 0).view(16, -1).any(1)[:, None]
    assert_close(old_logps[scored], moment.logps[scored], rtol=0, atol=1e-5)
    if beta:
        assert torch.equal(ref_logps, batch["ref_per_token_logps"])
        assert (old_logps - ref_logps)[mask.bool()].abs().max() > 0.01
    else:
        assert ref_logps is None
    reached = estimator(*given[0])
    reached[torch.tensor(unscorable)] = 0
    assert torch.equal(batch["advantages"], reached * mask if by_token else reached)


# Losses


def check_losses(result, weights=None, moments=None):
    """Compares each micro-batch's loss and its gradient by the log-probabilities with hand-computed ones."""
    moments = moments or result.trainer.micro_batches
    for moment, weight in zip(moments, weights or [1.0] * len(moments), strict=True):
        logps = moment.logps.clone().requires_grad_()
        loss = loss_by_hand(result.trainer, moment, logps, weight)
        assert_close(moment.loss, loss.detach(), rtol=1e-5, atol=1e-6)
        if moment.training:
            expected = torch.autograd.grad(loss, logps)[0]
            assert expected.abs().max() > 1e-5
            assert_close(moment.gradient, expected, rtol=1e-4, atol=1e-7)


# `test_trl_losses.py` compares the formulas with TRL's, and `test_losses.py` sums them over micro-batches


@pytest.mark.parametrize(
    ("family", "rows", "packing"),
    [pytest.param(FAMILY, dataset, "padded", marks=pytest.mark.slow), ("qwen2_audio", audio_rows, "prefix")],
)
def test_loss_may_be_overridden_in_the_way_of_trl(family, rows, packing):
    """TRL's trainer for GMPO overrides `_compute_loss` and requests scores, which must include media."""

    class Overriding(InjectedOurs):
        _compute_loss = GMPOTrainer._compute_loss

    options = {**REUSED, "epsilon": 0.1, "beta": 0.1, "packing": packing, "max_tokens_per_microbatch": 300}
    own = ours(family=family, rows=rows(), loss_type="gmpo", **options)
    overriding = ours(Overriding, family, rows(), **options)
    assert set(overriding.trainer.scored_packed) == {packing == "prefix"}
    assert_equal(own, overriding, sums=True, of_metrics=5e-4)


def test_coefficient_that_subclasses_read_is_that_of_the_config():
    """This holds wherever the KL divergence enters."""
    for options in ({}, {"kl_estimator": "k1"}, {"kl_estimator": "k2"}, {"kl_target": 0.1}):
        trainer = ours(beta=0.1, max_steps=1, **options).trainer
        assert trainer.beta == 0.1
        assert (trainer.kl_coef == 0.1) == ("kl_target" not in options)


def test_gmpo_takes_no_advantages_by_token():
    def by_token(mask, **kwargs):
        return mask.float()

    with pytest.raises(ValueError, match="`loss_type='gmpo'` takes one advantage per completion"):
        ours(advantage_estimator=by_token, loss_type="gmpo", max_steps=1)


LOSSES_OF_TOKENS = {
    "ipo(ipo_threshold=0.02, kl_tau=0.5)": {},
    "dppo_tv": {"epsilon": 0.02},
    "dppo_kl": {"epsilon": 0.01},
    "clip_cov(clip_cov_ratio=1.0, clip_cov_lb=0.1)": {},  # leaves out all tokens of the range
    "kl_cov(kl_cov_ratio=0.2)": {},
    "fipo(decay_rate=2.0, clip_high_only=False)": {"delta": 3.0},
}


@pytest.mark.parametrize(
    "name", slow_but(LOSSES_OF_TOKENS, "ipo(ipo_threshold=0.02, kl_tau=0.5)", "kl_cov(kl_cov_ratio=0.2)")
)
def test_losses_of_tokens_are_those_of_plain_log_probabilities_packed_and_padded(name):
    assert_plain(MultimodalGRPOTrainer, FAMILY, dataset(), 4, loss_type=name, **REUSED, **LOSSES_OF_TOKENS[name])
    updates = []
    for packing in ("prefix", "padded"):
        updates.append(ours(loss_type=name, packing=packing, **REUSED, **LOSSES_OF_TOKENS[name]).update)
    assert norm(updates[0]) > 1e-3
    assert relative_difference(*updates) < 2e-5
    plain = ours(loss_type="dapo", **REUSED)
    assert relative_difference(plain.update, updates[0]) > 1e-3


# KL


@pytest.mark.parametrize("estimator, loss_type", [("rloo", "dual_clip"), ("reinforce", "dapo")])
def test_kl_in_the_reward_is_logged_and_not_in_the_loss(estimator, loss_type):
    options = {**REUSED, "max_steps": 2, "beta": 0.5, "advantage_estimator": estimator, "loss_type": loss_type}
    assert_plain(MultimodalGRPOTrainer, FAMILY, dataset(), 2, objects=moved(FAMILY), **options)
    result = ours(objects=moved(FAMILY), **options)
    assert result.trainer.args.kl_in_reward and result.trainer.args.kl_estimator == "k1"
    batch = result.trainer.draws[0].batch
    mask = batch["completion_mask"].bool()
    expected = (batch["old_per_token_logps"] - batch["ref_per_token_logps"])[mask].mean().item()
    assert logged(result, "kl") == [pytest.approx(expected, rel=1e-4)]


@pytest.mark.parametrize("options", [{"loss_type": "gmpo"}, {"kl_estimator": "k2"}], ids=str)
def test_terms_need_no_second_forward(options):
    class Counting(InjectedOurs):
        forwards = 0

        def _compute_loss(self, model, inputs):
            layers = [m for name, m in model.named_modules() if name.endswith("language_model.layers.0")]
            hook = layers[0].register_forward_pre_hook(lambda *_: setattr(self, "forwards", self.forwards + 1))
            loss = super()._compute_loss(model, inputs)
            hook.remove()
            return loss

    result = ours(Counting, beta=0.1, kl_target=0.1, entropy_coef=0.1, **TWO, **options)
    assert result.trainer.forwards == 2 * 2


@pytest.mark.parametrize(
    "options, target",
    [
        ({}, 0.03),
        pytest.param({"kl_estimator": "k2"}, 10.0, marks=pytest.mark.slow),
        ({"kl_estimator": "k1", "loss_type": "cpgd"}, 0.25),
    ],
    ids=["k3", "k2", "in the reward"],
)
def test_kl_target_moves_the_coefficient(options, target):
    steps = {**TWO, "max_steps": 3, "steps_per_generation": 2}
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    result = ours(
        beta=0.1,
        kl_target=target,
        kl_horizon=10,
        objects={**moved(FAMILY), "eval_dataset": image_rows(1)},
        **steps,
        **evaluated,
        **options,
    )
    kind = result.trainer.args.kl_estimator
    beta = 0.1
    betas = []
    estimates = []
    for step in range(3):
        moments = [m for m in result.trainer.micro_batches if m.step == step and m.training]
        assert [m.kl_coef for m in moments] == pytest.approx([beta] * 2)
        total = tokens = 0
        for m in moments:
            mask = m.batch["completion_mask"].bool()
            d = (m.logps - m.batch["ref_per_token_logps"])[mask]
            total += {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[kind].sum().item()
            tokens += len(d)
        beta *= 1 + min(max(total / tokens / target - 1, -0.2), 0.2) * 8 / 10
        betas.append(beta)
        estimates.append(total / tokens)
    assert logged(result, "kl_coef") == pytest.approx(betas)
    assert logged(result, "kl/estimate") == pytest.approx(estimates, rel=1e-4)
    assert abs(beta - 0.1) > 0.005
    assert result.trainer.args.beta == 0.1


def test_divergence_that_the_controller_holds_is_not_that_of_trls_loss():
    """`kl` is TRL's term, k3 times the ratio with `use_bias_correction_kl`. The target controls k3 alone."""
    options = {**REUSED, "max_steps": 2, "num_iterations": 1, "learning_rate": 0.1}  # the second update is off-policy
    result = ours(beta=0.1, kl_target=0.1, use_bias_correction_kl=True, objects=moved(FAMILY), **options)
    for step in range(2):
        plain = []
        corrected = []
        for moment in (each for each in result.trainer.micro_batches if each.step == step):
            mask = moment.batch["completion_mask"].bool()
            d = (moment.logps - moment.batch["ref_per_token_logps"])[mask]
            k3 = (-d).exp() - 1 + d
            old = moment.batch.get("old_per_token_logps", moment.logps)
            plain.append(k3)
            corrected.append(k3 * (moment.logps - old)[mask].exp())
        assert logged(result, "kl/estimate")[step] == pytest.approx(torch.cat(plain).mean().item(), rel=1e-4)
        assert logged(result, "kl")[step] == pytest.approx(torch.cat(corrected).mean().item(), rel=1e-4)
    assert logged(result, "kl/estimate")[1] != pytest.approx(logged(result, "kl")[1], rel=1e-2)


# High-entropy tokens


def highest(entropies, mask, ratio, renormalize):
    """Returns the weights of tokens: of some, those with the highest entropies count, and the first of equal ones."""
    valid = mask.bool()
    n = int(valid.sum())
    k = math.ceil(ratio * n - 1e-9)
    chosen = entropies[valid].round(decimals=5).sort(descending=True, stable=True).indices[:k]
    kept = torch.zeros(n)
    kept[chosen] = n / k if renormalize else 1.0
    weights = torch.zeros(mask.shape)
    weights[valid] = kept
    return weights


def weights_by_hand(moments, scope, ratio, renormalize, entropies):
    """Returns the weights of an optimizer step's micro-batches."""
    masks = [moment.batch["completion_mask"] for moment in moments]
    if scope == "batch":
        return highest(torch.cat(entropies), torch.cat(masks), ratio, renormalize).chunk(len(masks))
    if scope == "micro_batch":
        return [highest(*pair, ratio, renormalize) for pair in zip(entropies, masks, strict=True)]
    weights = []
    for rows in zip(entropies, masks, strict=True):
        by_completion = [highest(*row, ratio, renormalize) for row in zip(*rows, strict=True)]
        weights.append(torch.stack(by_completion))
    return weights


class Scoring(Recorded):
    """Scores each new generation batch."""

    def _compute_loss(self, model, inputs):
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            for batch in self._buffered_inputs:
                batch.sampled = self._scoring.score(self.model, batch).entropies
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize(
    "scope, source, renormalize, options",
    [
        ("batch", "rollout", False, {}),
        ("batch", "current", True, {"loss_type": "cpgd(drift_coef=0.5, drift_clamp=0.05)"}),
        ("sequence", "current", True, {"loss_type": "dual_clip"}),
        ("sequence", "rollout", False, {"advantage_estimator": "reinforce"}),
        ("micro_batch", "rollout", True, {}),
        pytest.param("batch", "rollout", False, {"loss_type": "gmpo"}, marks=pytest.mark.slow),
    ],
)
def test_entropy_filter_equals_that_by_hand(scope, source, renormalize, options):
    """The filter applies to the policy loss alone: the KL divergence and CPGD's drift cover all tokens."""
    result = ours(
        Scoring,
        top_entropy_quantile=0.3,
        entropy_source=f"{source}(scope={scope!r}, renormalize={renormalize})",
        beta=0.1,
        kl_estimator="k2",
        **{**REUSED, "learning_rate": 0.05},
        **options,
    )
    moments = result.trainer.micro_batches
    assert len(moments) == 8
    expected = []
    others = []
    for step in range(4):
        part = [moment for moment in moments if moment.step == step]
        sources = {
            "rollout": [moment.batch["sampled"] for moment in part],
            "current": [moment.entropies for moment in part],
        }
        arguments = part, scope, 0.3, renormalize
        expected += weights_by_hand(*arguments, sources[source])
        others += weights_by_hand(*arguments, sources["current" if source == "rollout" else "rollout"])
    check_losses(result, expected)
    # The sources agree until the first update
    assert all(torch.equal(a, b) for a, b in zip(expected[:2], others[:2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(expected[2:], others[2:], strict=True))
    if source == "rollout":
        assert all(torch.equal(a, b) for a, b in zip(expected[:4], expected[4:], strict=True))


def test_entropy_filter_works_in_evaluation():
    """Evaluation filters by the current entropies, because earlier ones don't exist."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "max_steps": 1}
    for scope in ("batch", "sequence"):
        result = ours(
            top_entropy_quantile=0.3,
            entropy_source=f"rollout(scope={scope!r})",
            objects={"eval_dataset": image_rows(2)},
            **options,
        )
        moments = [moment for moment in result.trainer.micro_batches if not moment.training]
        weights = weights_by_hand(moments, scope, 0.3, False, [moment.entropies for moment in moments])
        check_losses(result, weights, moments)


MISALIGNED = {**TWO, "num_iterations": 2}
ROLLOUT, CURRENT = ({"top_entropy_quantile": 0.5, "entropy_source": source} for source in ("rollout", "current"))


@pytest.mark.parametrize(
    "options, passes, trls",
    [
        ({}, [0, 0], [0, 0]),
        (ROLLOUT, [0, 0], [0, 0]),
        ({**TWO, **ROLLOUT}, [2, 2], [0, 0]),
        ({**TWO, **CURRENT}, [2, 2], [0, 0]),
        ({**CURRENT, "entropy_source": "current(scope='sequence')"}, [0, 0], [0, 0]),
        ({**CURRENT, "entropy_source": "current(scope='micro_batch')"}, [0, 0], [0, 0]),
        ({"beta": 0.1}, [0, 0], [0, 0]),
        ({"beta": 0.1, "kl_estimator": "k1"}, [1, 1], [0, 0]),
        ({"beta": 0.1, "kl_estimator": "k1", **ROLLOUT}, [1, 1], [0, 0]),
        ({"advantage_estimator": lambda rewards, **_: rewards}, [1, 1], [0, 0]),
        ({"replay_buffer_size": 4}, [1, 1], [0, 0]),
        # A rollout for two optimizer steps: the first one's scores are the old ones
        (MISALIGNED, [0, 0], [2, 0]),
        ({**TWO, "steps_per_generation": 4}, [2, 0], [4, 0]),
        ({**TWO, "steps_per_generation": 3}, [3, 3], [3, 3]),
        ({**MISALIGNED, **ROLLOUT}, [2, 0], [2, 0]),
        ({**MISALIGNED, **ROLLOUT, "entropy_source": "rollout(scope='sequence')"}, [0, 0], [2, 0]),
        ({**MISALIGNED, **CURRENT}, [2, 2], [2, 0]),
        ({**MISALIGNED, "beta": 0.1, "kl_estimator": "k1"}, [2, 0], [2, 0]),
        ({**MISALIGNED, "dynamic_sampling": 4}, [2, 0], [2, 0]),
    ],
)
def test_forwards_without_a_gradient_are_made_where_the_update_comes_too_late(options, passes, trls):
    """`trls` are those of TRL's trainer, which the metric `extra_scoring_time` leaves out."""

    class Counting(InjectedOurs):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.passes = [0, 0]
            self.score = self._policy.score
            self._policy.score = self.counted

        def counted(self, model, *args, **kwargs):
            self.passes[self.state.global_step] += not torch.is_grad_enabled() and model is not self.ref_model
            return self.score(model, *args, **kwargs)

    result = ours(Counting, max_steps=2, **options)
    assert result.trainer.passes == passes
    logged = ["extra_scoring_time" in entry for entry in result.history[:2]]
    assert logged == [own > 0 and (not any(trls) or CURRENT.items() <= options.items()) for own in passes]


# Rewards


def test_overlong_completions_are_penalized():
    options = {"soft_overlong_cache": 5, "advantage_estimator": "dr_grpo", "max_steps": 1, **TWO}
    result = ours(**options, reward=[length_and_sum, constant], reward_weights=[0.5, 1.0])
    (drawn,) = result.trainer.draws
    lengths = drawn.batch["completion_mask"].sum(1).tolist()
    penalties = [min(0, 3 - n) / 5 for n in lengths]  # up to -1 at 8 tokens
    assert min(penalties) <= -0.8 and 0 in penalties
    assert drawn.rewards[:, 2].tolist() == pytest.approx(penalties)
    assert logged(result, "rewards/soft_overlong_punishment/mean") == [pytest.approx(fmean(penalties))]
    drawn.rewards *= torch.tensor([0.5, 1.0, 1.0])
    rewards = check_advantages(result.trainer.micro_batches, drawn, centred)
    assert logged(result, "reward") == [pytest.approx(fmean(rewards))]


@pytest.mark.parametrize("options", [{}, {"multi_objective_aggregation": "normalize_then_sum"}], ids=["sum", "each"])
def test_penalty_makes_no_completion_scorable(options):
    """A completion whose only reward is `None` is excluded as without the penalty, which alone would rank it."""

    def some(completion_ids, **kwargs):
        return [None if sum(ids) % 3 == 0 else len(ids) % 5 + 0.1 * (sum(ids) % 7) for ids in completion_ids]

    result = ours(soft_overlong_cache=5, reward=some, max_steps=1, **TWO, **options)
    (drawn,) = result.trainer.draws
    unscorable = drawn.rewards[:, 0].isnan()
    assert 0 < unscorable.sum() < len(unscorable)
    assert torch.equal(drawn.rewards[:, 1].isnan(), unscorable)
    assert (drawn.batch["advantages"][unscorable] == 0).all() and (drawn.batch["advantages"][~unscorable] != 0).any()
    scored = drawn.rewards[~unscorable].sum(1)
    assert logged(result, "reward") == [pytest.approx(scored.mean().item())]
    if not options:
        assert drawn.batch["advantages"][~unscorable].sum().item() == pytest.approx(0, abs=1e-5)


def test_rewards_are_scaled_by_those_of_the_run_and_then_clipped():
    options = {"advantage_estimator": "dr_grpo", "max_steps": 3, "reward": rough, "per_device_train_batch_size": 16}
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    result = ours(
        reward_running_scale=True,
        reward_clip_range=[0.5, 1.5],
        objects={"eval_dataset": dataset().select(range(2))},
        **options,
        **evaluated,
    )
    seen = []
    means = {True: [], False: []}

    def shape(reward):
        return min(max(reward / stdev(seen), 0.5), 1.5)

    for drawn, moment in zip(result.trainer.draws, result.trainer.micro_batches, strict=True):
        if drawn.training:
            seen += drawn.rewards[~drawn.rewards.isnan()].tolist()
        rewards = check_advantages([moment], drawn, centred, shape=shape)
        rewards = [reward for reward in rewards if reward is not None]
        assert {0.5, 1.5} <= set(rewards) and stdev(seen) > 1.05
        means[drawn.training].append(fmean(rewards))
    assert logged(result, "shaped_reward") == pytest.approx(means[True])
    assert logged(result, "eval_shaped_reward") == pytest.approx(means[False])


def test_config_is_left_alone(tmp_path):
    """Another trainer can use the same config."""
    options = {"soft_overlong_cache": 4, "reward_weights": [0.5], "dynamic_sampling": 4, "kl_target": 0.1}
    first = make_trainer(InjectedOurs, FAMILY, dataset(), tmp_path, beta=0.1, self_check=False, **options)
    before = first.args.to_dict()
    first.train()
    assert first.args.to_dict() == before
    model = load(FAMILY)[0]
    second = InjectedOurs(
        model, length_and_sum, first.args, train_dataset=dataset(), processing_class=first.processing_class
    )
    second.train()
    for (name, one), other in zip(first.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other), name
