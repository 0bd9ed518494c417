# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Losses, gradients and metrics equal those of TRL's `_compute_loss`, called on tensors without a model."""

import inspect
import itertools
import re
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch.testing import assert_close
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.gmpo import GMPOTrainer

from trl_multimodal_rft.algorithms.entropy import adapted_entropy_coef
from trl_multimodal_rft.algorithms.losses import (
    LOSSES,
    LossInputs,
    LossOptions,
    Normalizer,
    entropy_sums,
    grpo_loss,
    rloo_loss,
)
from trl_multimodal_rft.algorithms.metrics import MetricLog, token_mean, weighted_mean


TRL_LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
BATCH = 6
LENGTH = 5
ACCUMULATION = 2
STEPS = 4
LIMIT = 9
EPSILON_LOW = 0.1
EPSILON_HIGH = 0.2
DELTA = 1.5
COEF = 0.2  # of the entropy bonus
# Differ from TRL's defaults
SHAPES = {
    "sapo_temperature_pos": 0.9,
    "sapo_temperature_neg": 1.2,
    "vespo_k_pos": 1.9,
    "vespo_lambda_pos": 2.8,
    "vespo_k_neg": 2.7,
    "vespo_lambda_neg": 1.8,
}


def scores(self, *args, **kwargs):
    return self.scores


def trl_trainer(base, scores_of, loss_type="grpo", level="token", training=True, **options):
    """Returns a TRL trainer with the attributes that its loss reads, without its constructor, which needs a model."""
    trainer = object.__new__(type("Trainer", (base,), {"_get_per_token_logps_and_entropies": scores}))
    read = {
        "delta": None,
        "use_bias_correction_kl": True,
        "steps_per_generation": STEPS,
        "entropy_target": 1.0,
        "entropy_coef_delta": 0.05,
        "entropy_coef_min": 0.0,
        "entropy_coef_max": 0.22,
        **SHAPES,
    }
    args = SimpleNamespace(**{name: options.pop(name, value) for name, value in read.items()})
    attributes = {
        "scores": scores_of,
        "model": SimpleNamespace(training=training),
        "accelerator": Accelerator(cpu=True),
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "args": args,
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "epsilon_low": EPSILON_LOW,
        "epsilon_high": EPSILON_HIGH,
        "max_completion_length": LIMIT,
        "current_gradient_accumulation_steps": ACCUMULATION,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "beta": 0.0,
        "aux_loss_enabled": False,
        "router_aux_loss_coef": 0.1,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "entropy_coef": 0.0,
        "_last_world_entropy": 0.9,
        "_entropy_window_stats": None,
    }
    vars(trainer).update({**attributes, **options})
    return trainer


def batch(by_token=False):
    """Returns completions of different lengths, one of them masked, with ratios on both sides of the clip range."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([5, 3, 4, 0, 1, 2])
    completion_mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    tool_mask = torch.ones_like(completion_mask)
    tool_mask[0, 2] = 0
    mask = completion_mask * tool_mask
    logps = -random(BATCH, LENGTH).abs()
    ratio = torch.where(mask.bool(), (0.2 * random(BATCH, LENGTH)).exp(), 1)
    return {
        "prompt_ids": torch.zeros(BATCH, 1, dtype=torch.long),
        "prompt_mask": torch.ones(BATCH, 1, dtype=torch.long),
        "completion_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long),
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": random(BATCH, LENGTH) if by_token else random(BATCH),
        "logps": logps,
        "old_per_token_logps": logps + 0.1 + 0.6 * random(BATCH, LENGTH),
        "ref_per_token_logps": logps + 0.5 * random(BATCH, LENGTH),
        "sampling_per_token_logps": logps + 0.3 * random(BATCH, LENGTH),
        "importance_sampling_ratio": ratio,
        "num_items_in_batch": torch.tensor(4 * int(mask.sum())),
        "entropies": random(BATCH, LENGTH).abs(),
        "aux_loss": torch.tensor(0.7, dtype=torch.float64),
        "mask": mask,
    }


def logged(metrics):
    found = defaultdict(list)
    log = MetricLog(lambda: True, lambda numbers: numbers)
    log.add({name: metric for name, metric in metrics.items() if not name.startswith("signal/")})  # TRL has none
    for name, value in log.pop("train").items():
        found[name].append(value)
    return found


def compare(loss_type, options, level="token", ours_as=None, base=GRPOTrainer):
    """Runs one micro-batch in TRL's trainer and here; `ours_as` is this package's name of the loss."""
    values = batch(options.get("by_token", False))
    case = (loss_type, level, options)
    if "on_policy" in options:
        del values["old_per_token_logps"]
    if "use_vllm" not in options:
        del values["importance_sampling_ratio"], values["sampling_per_token_logps"]
    options = {name: value for name, value in options.items() if name not in ("by_token", "on_policy")}
    theirs, ours = (
        {name: values[name].clone().requires_grad_() for name in ("logps", "entropies", "aux_loss")} for _ in range(2)
    )
    trainer = trl_trainer(base, tuple(theirs.values()), loss_type, level, **options)
    args = trainer.args
    mask = values["mask"]
    n_tokens = values["num_items_in_batch"]
    training = trainer.model.training
    quantile = trainer.top_entropy_quantile
    inputs = LossInputs(
        ours["logps"],
        values.get("old_per_token_logps", ours["logps"].detach()),
        values["advantages"],
        mask,
        weights=trainer.get_high_entropy_mask(values["entropies"], mask, 1 - quantile) if quantile < 1 else 1.0,
        sampling_logps=values.get("sampling_per_token_logps"),
        sampling_ratio=values.get("importance_sampling_ratio"),
        ref_logps=values["ref_per_token_logps"] if trainer.beta else None,
        entropies=ours["entropies"],
        aux_loss=ours["aux_loss"] if trainer.aux_loss_enabled else None,
    )
    is_gated = trainer.use_adaptive_entropy and trainer._last_world_entropy > args.entropy_target
    loss, metrics = grpo_loss(
        LOSSES[ours_as or loss_type],
        inputs,
        LossOptions(
            EPSILON_LOW,
            EPSILON_HIGH,
            delta=args.delta or torch.inf,
            importance_sampling_level=level,
            off_policy_threshold=trainer.off_policy_mask_threshold,
            kl_bias_correction=args.use_bias_correction_kl,
            **SHAPES,
        ),
        Normalizer(ACCUMULATION, LIMIT, n_tokens * ACCUMULATION / STEPS)
        if training
        else Normalizer(1, LIMIT, n_tokens),
        kl_coef=trainer.beta,
        entropy_coef=(0.0 if is_gated else COEF) if trainer._entropy_bonus_enabled else None,
        aux_coef=trainer.router_aux_loss_coef,
    )
    expected = trainer._compute_loss(trainer.model, values)
    their_metrics = trainer._metrics["train" if training else "eval"]
    adapted = their_metrics.pop("entropy_coef", None)
    check_equal((expected, theirs, their_metrics), (loss, ours, logged(metrics)), case)
    if trainer.use_adaptive_entropy and training:
        total, count = entropy_sums(inputs)
        entropy = (total / count).item()
        bounds = {"target": args.entropy_target, "step": 0.05, "min_coef": 0.0, "max_coef": 0.22}
        assert adapted == [pytest.approx(adapted_entropy_coef(COEF, entropy, **bounds))], case
        assert trainer._last_world_entropy == pytest.approx(entropy), case


def check_equal(theirs, ours, case):
    """Compares loss, gradients with respect to the leaves, and metrics."""
    for (loss, leaves, _), other in ((theirs, ours), (ours, theirs)):
        assert loss.item() == pytest.approx(other[0].item(), rel=1e-6, abs=1e-9), case
        assert leaves.keys() == other[1].keys()
    for name in theirs[1]:
        gradients = [
            torch.autograd.grad(loss, leaves[name], retain_graph=True, allow_unused=True)[0]
            for loss, leaves, _ in (theirs, ours)
        ]
        zero = torch.zeros_like(theirs[1][name])
        gradients = [zero if each is None else each for each in gradients]
        assert_close(*gradients, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{case}, {name}: {text}")
    assert theirs[2].keys() == ours[2].keys(), case
    for name, values in theirs[2].items():
        assert ours[2][name] == pytest.approx(values, rel=1e-6, abs=1e-7, nan_ok=True), (case, name)


KL = [{}, {"beta": 0.3}, {"beta": 0.3, "use_bias_correction_kl": False}]
BONUS = {"_entropy_bonus_enabled": True, "entropy_coef": COEF}
BONUSES = [
    {},
    BONUS,
    {**BONUS, "use_adaptive_entropy": True},
    {**BONUS, "use_adaptive_entropy": True, "_last_world_entropy": 1.1, "entropy_target": 0.7},
]
MASKS = [
    {},
    {"top_entropy_quantile": 0.5},
    {"off_policy_mask_threshold": 0.05},
    {"off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.5, "use_vllm": True, "aux_loss_enabled": True},
]
OTHERS = [{}, {"delta": DELTA}, {"training": False}, {"by_token": True}, {"on_policy": True}]


# Covers each pair of these, and most triples
OPTIONS = [{**KL[i % 3], **BONUSES[i % 4], **MASKS[i // 3 % 4], **OTHERS[i % 5]} for i in range(30)]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", TRL_LOSSES)
def test_loss_is_that_of_trl(loss_type, level):
    for options in OPTIONS:
        if not (level == "sequence" and "by_token" in options):
            compare(loss_type, options, level)


def test_dual_clip_is_trls_two_sided_clipping():
    for options in OPTIONS:
        compare("dapo", {"delta": DELTA, **options}, ours_as="dual_clip")


def test_gmpo_is_that_of_trl():
    for kl, masked, other in itertools.product(KL[:2], MASKS[:2], [{}, {"training": False}, {"on_policy": True}]):
        compare("gmpo", {**kl, **masked, **other}, base=GMPOTrainer)


def test_all_loss_types_of_trl_are_compared():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    named = re.findall(r"self\.loss_type (?:==|in) (.+?)(?: and|:)", source)
    assert {name for each in named for name in re.findall(r'"(\w+)"', each)} == {*TRL_LOSSES}
    assert {*LOSSES} > {*TRL_LOSSES}


@pytest.mark.parametrize("aux", [False, True])
def test_rloo_is_that_of_trl(aux):
    values = batch()
    del values["tool_mask"]
    mask = values["mask"] = values["completion_mask"]
    log_ratio = torch.tensor([0.5, -0.5, 0.5, 0, -0.5, 0.05])
    values["old_logps"] = (values["logps"] * mask).sum(1) - log_ratio
    values["advantages"] = torch.tensor([1.0, -2, -1, 3, 1, 0.5])
    theirs, ours = (
        {name: values[name].clone().requires_grad_() for name in ("logps", "entropies", "aux_loss")} for _ in range(2)
    )
    trainer = trl_trainer(RLOOTrainer, tuple(theirs.values()), aux_loss_enabled=aux)
    expected = trainer._compute_loss(trainer.model, values)
    loss, metrics = rloo_loss(
        LossInputs(ours["logps"], values["old_logps"], values["advantages"], mask),
        LossOptions(EPSILON_LOW, EPSILON_HIGH),
    )
    metrics["entropy"] = token_mean(ours["entropies"], mask)
    if aux:
        loss = loss + 0.1 * ours["aux_loss"]
        metrics["aux_loss"] = weighted_mean(ours["aux_loss"], BATCH)
    check_equal((expected, theirs, trainer._metrics["train"]), (loss, ours, logged(metrics)), aux)
    assert trainer._metrics["train"]["clip_ratio/region_mean"] == [pytest.approx(2 / BATCH)]
