# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Online DPO as an advantage estimator: its gradient and updates are those of DPO's loss and of TRL's trainer."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from helpers.families import ALL_FAMILIES
from helpers.trainer_utils import PLAIN, length_and_sum, moved, relative_difference, run, text_rows
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.algorithms.advantages import estimate_advantages
from trl_multimodal_rft.algorithms.losses import LossInputs, LossOptions, Normalizer, as_loss
from trl_multimodal_rft.encoding.join import padded


FAMILY = "qwen2_5_vl"
OPTIONS = {"advantage_estimator": "online_dpo", "loss_type": "luspo", "importance_sampling_level": "sequence"}
OPTIONS |= {"beta": 0.3}


def without_padding(ids: list[int]) -> list[int]:
    return [token for token in ids if token != 0]


def pair_loss(kind: str, margin: torch.Tensor, beta: float) -> torch.Tensor:
    return -F.logsigmoid(beta * margin) if kind == "sigmoid" else (margin - 1 / (2 * beta)) ** 2


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_gradient_is_that_of_dpo(kind):
    """Groups in any order, ties, completions without a reward, and one group without two rewards."""
    nan = torch.nan
    groups = torch.tensor([7, 3, 7, 3, 7, 3, 9, 9, 9, 1, 1, 1])
    rewards = torch.tensor([1.0, 0.5, 3.0, nan, 2.0, 2.5, 1.0, 1.0, 1.0, nan, 4.0, nan]).double()
    pairs = [(2, 0), (5, 1)]  # best and worst
    generator = torch.Generator().manual_seed(0)
    logps, old, ref = (torch.randn(12, 5, generator=generator).double() for _ in range(3))
    mask = (torch.arange(5) < torch.tensor([5, 3, 4, 1, 2, 5, 5, 4, 3, 2, 1, 5])[:, None]).double()
    logps = old.clone().requires_grad_()
    advantages = estimate_advantages(
        f"online_dpo(loss='{kind}')",
        rewards=rewards,
        rewards_per_func=rewards[:, None],
        group_ids=groups,
        mask=mask,
        old_logps=old,
        ref_logps=ref,
        kl_coef=0.3,
    )
    assert {*advantages.nonzero().flatten().tolist()} == {row for pair in pairs for row in pair}
    loss = as_loss("luspo")
    gradients = []
    for level in ("token", "sequence"):
        options = LossOptions(0.2, 0.2, importance_sampling_level=level)
        values = loss(LossInputs(logps, old, advantages, mask), options).loss
        gradients += torch.autograd.grad(loss.average(values, mask, Normalizer(1, 5, mask.sum())), logps)
    ratios = ((logps - ref) * mask).sum(1)
    whole = sum(pair_loss(kind, ratios[best] - ratios[worst], 0.3) for best, worst in pairs) / 4  # groups
    (expected,) = torch.autograd.grad(whole, logps)
    assert expected.any()
    for gradient in gradients:
        assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("rewards", "is_pair"),
    [([0.1 + 0.2, 0.3], False), ([100.0, 100.00001], False), ([0.3, 0.30001], True), ([100.0, 100.001], True)],
)
def test_rewards_that_differ_by_rounding_are_no_pair(rewards, is_pair):
    """As in the other estimators: the tolerance grows with the mean of a group."""
    rewards = torch.tensor(rewards, dtype=torch.float64)
    logps = torch.zeros(2, 1)
    arguments = {"rewards": rewards, "group_ids": torch.zeros(2).long(), "mask": torch.ones(2, 1), "kl_coef": 0.1}
    arguments |= {"rewards_per_func": rewards[:, None], "old_logps": logps, "ref_logps": logps}
    for name in ("online_dpo", "online_dpo(loss='ipo')", "group_norm"):
        assert bool(estimate_advantages(name, **arguments).any()) == is_pair


class Scripted(OnlineDPOTrainer):
    """TRL's trainer with completions that another trainer has drawn, as ids by prompt."""

    def __init__(self, *args, completions, **kwargs):
        super().__init__(*args, **kwargs)
        self._drawn = completions

    def _generate(self, model, prompts, images=None):
        texts = [self.processing_class.apply_chat_template(prompt, add_generation_prompt=True) for prompt in prompts]
        inputs = self._tokenizer(texts * 2, return_tensors="pt", padding=True, add_special_tokens=False)
        drawn = [torch.tensor(self._drawn[str(prompt)][half]) for half, prompt in product(range(2), prompts)]
        ids, mask = padded(drawn)
        return inputs["input_ids"], inputs["attention_mask"], ids, mask, None


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_update_is_that_of_trl(kind, tmp_path):
    """TRL's trainer starts from the same model and reference, and gets the completions that ours samples."""
    drawn = {}

    def record(prompts, completion_ids, **kwargs):
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            drawn.setdefault(str(prompt), []).append([*ids])
        return length_and_sum(completion_ids)

    shared = {**PLAIN, "max_steps": 1, "learning_rate": 0.3, "temperature": 1.0}
    options = {**shared, **OPTIONS, "advantage_estimator": f"online_dpo(loss='{kind}')", "num_generations": 2}
    result = run(MultimodalGRPOTrainer, FAMILY, text_rows(), reward=record, objects=moved(FAMILY), **options)
    assert len(drawn) == 4

    folder = moved(FAMILY)["model"].config._name_or_path
    reference = ALL_FAMILIES[FAMILY].model_class.from_pretrained(folder)
    rows = text_rows().filter(lambda row: str(row["prompt"]) in drawn)
    trainer = Scripted(
        ref_model=reference,
        reward_funcs=lambda completion_ids, **kwargs: length_and_sum(map(without_padding, completion_ids)),
        args=OnlineDPOConfig(
            str(tmp_path), per_device_train_batch_size=4, beta=0.3, loss_type=kind, missing_eos_penalty=None, **shared
        ),
        train_dataset=rows,
        completions=drawn,
        **moved(FAMILY),
    )
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    update = {name: value.detach() - before[name] for name, value in trainer.model.named_parameters()}
    assert relative_difference(result.update, update) < 1e-5


def test_other_losses_and_no_reference_are_refused():
    for changes in ({"loss_type": "grpo"}, {"beta": 0.0}, {"kl_estimator": "k3"}):
        with pytest.raises(ValueError, match="Set `beta`, such as to 0.1, `loss_type='luspo'`"):
            MultimodalGRPOConfig("out", **{**OPTIONS, **changes})


@pytest.mark.parametrize("changes", [{"ref_logps": None}, {"old_logps": None}, {"kl_coef": 0.0}], ids=str)
def test_estimator_needs_the_reference(changes):
    tensors = {"old_logps": torch.zeros(2, 3), "ref_logps": torch.zeros(2, 3), "mask": torch.ones(2, 3)}
    tensors |= {"rewards": torch.tensor([0.0, 1.0]), "rewards_per_func": torch.ones(2, 1), "kl_coef": 0.1}
    with pytest.raises(ValueError, match="'online_dpo' compares the policy with its reference"):
        estimate_advantages("online_dpo", group_ids=torch.zeros(2).long(), **{**tensors, **changes})
