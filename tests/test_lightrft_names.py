# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Names of LightRFT's scripts: the strategy, tokenizers, and whitening over batches by its formula."""

import logging
from argparse import Namespace

import pytest
import torch
from helpers.trainer_utils import load, saved
from torch.testing import assert_close

from trl_multimodal_rft.lightrft.models.utils import compute_approx_kl
from trl_multimodal_rft.lightrft.strategy import OPTIONS, get_strategy
from trl_multimodal_rft.lightrft.trainer.advantage_calculator import normalize_advantages_cross_batch
from trl_multimodal_rft.lightrft.trainer.experience import Experience
from trl_multimodal_rft.lightrft.utils import get_tokenizer, get_tokenizer_processor_vl, init_logger, remote_rm_fn


pytestmark = pytest.mark.gate


def test_strategy_has_the_options_of_a_command_line():
    values = {"save_path": "out", "num_episodes": 2, "n_samples_per_prompt": 4, "micro_train_batch_size": 8}
    values |= {"max_epochs": 2, "actor_learning_rate": 1e-6, "critic_learning_rate": 9e-6, "l2": 0.1, "max_norm": 0.5}
    values |= {"eps_clip": 0.1, "init_kl_coef": 0.02, "kl_target": 0.1, "ptx_coef": 0.0, "seed": 3}
    values |= {"bf16": False, "gradient_checkpointing": False, "logging_steps": 5}
    assert values.keys() == OPTIONS.keys()
    others = {"advantage_estimator": "gae", "gamma": 1, "lambd": 0.9, "value_clip": 0.3}
    others |= {"zero_stage": 2, "remote_rm_url": None}
    strategy = get_strategy(Namespace(**values, **others))
    assert {name: getattr(strategy, ours) for name, ours in OPTIONS.items()} == values
    assert strategy.estimator.settings == {"gamma": 1.0, "lam": 0.9} and strategy.value_loss.cliprange == 0.3
    cases = {"use_kl_loss": True, "use_kl_estimator_k3": True, "init_kl_coef": 0.1, "advantage_estimator": "rloo"}
    cases |= {"n_samples_per_prompt": 4, "save_path": "out", "bf16": False}
    strategy = get_strategy(Namespace(**cases))
    assert (strategy.kl_estimator, strategy.kl_in_reward) == ("k3", False)
    with pytest.raises(ValueError, match="`use_kl_estimator_k3` in the reward gives a biased"):
        get_strategy(Namespace(**{**cases, "use_kl_loss": False}))


def test_k3_has_two_names():
    log_probs, base = torch.randn(2, 2, 3)
    assert_close(
        compute_approx_kl(log_probs, base, use_kl_estimator_k3=True), (base - log_probs).expm1() - (base - log_probs)
    )


def test_tokenizers_pad():
    model = load("qwen2_5_vl")
    tokenizer, processor = get_tokenizer_processor_vl(saved("qwen2_5_vl"), model, "left")
    assert processor.tokenizer is tokenizer and tokenizer.padding_side == "left" and tokenizer.pad_token is not None
    tokenizer = get_tokenizer(saved("qwen2_5_vl"), model, "right")
    assert tokenizer("a b", return_tensors="pt").input_ids.numel() and tokenizer.padding_side == "right"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("estimator, shift_only", [("gae", False), ("reinforce", True), ("rloo", False)])
def test_advantages_are_those_of_all_batches(packed, estimator, shift_only):
    torch.manual_seed(0)
    masks = [torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[1, 1, 1, 1]])]
    before = [torch.randn(mask.shape) for mask in masks]
    fields = [None] * 4
    batches = [
        Experience(mask, *fields, list(values) if packed else values.clone(), mask, list(mask) if packed else mask, {})
        for mask, values in zip(masks, before, strict=True)
    ]
    assert normalize_advantages_cross_batch(batches, estimator, Namespace(no_advantage_std_norm=shift_only)) is batches
    # In float64, as LightRFT's calculator writes it
    flat, mask = (torch.cat([each.flatten() for each in own]).double() for own in (before, masks))
    mean = (flat * mask).sum() / mask.sum()
    scale = 1 if shift_only else (((flat - mean) ** 2 * mask).sum() / mask.sum()).rsqrt()
    for batch, values, own in zip(batches, before, masks, strict=True):
        expected = values if estimator == "rloo" else ((values - mean) * scale).float() * own
        found = torch.stack(batch.advantages) if packed else batch.advantages
        assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_rewards_of_servers(serve):
    def answer(request):
        return {
            "rewards": [None if label == "no" else len(query) for query, label in zip(*pair(request), strict=True)]
        }

    def pair(request):
        return request["queries"], request.get("labels", request["queries"])

    server = serve(answer)
    assert remote_rm_fn(server.url, ["ab", "c"], ["a", ""]).tolist() == [2.0, 1.0]
    assert server.requests[0] == {"queries": ["ab", "c"], "prompts": ["a", ""]}
    rewards = remote_rm_fn([server.url, server.url], queries=["ab", "c"], labels=["yes", "no"])
    assert rewards.dtype == torch.float32 and rewards[0] == 4 and rewards[1].isnan()
    with pytest.raises(ValueError, match="There are 1 `labels` for 2 `queries`"):
        remote_rm_fn(server.url, ["ab", "c"], labels=["yes"])
    with pytest.raises(RuntimeError, match="for 3 completions"):
        remote_rm_fn(serve(lambda request: {"rewards": [1.0]}).url, ["ab", "c", "d"])


def test_loggers_have_names():
    assert init_logger("a.b") is logging.getLogger("a.b")
