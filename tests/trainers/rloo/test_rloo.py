# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""[`MultimodalRLOOTrainer`] beyond TRL's, see `test_trl_parity.py`: its correction for engines, and its card."""

from contextlib import nullcontext

import pytest
import torch
from helpers.samplers import FromEngine
from helpers.trainer_utils import image_rows, make_trainer
from huggingface_hub import ModelCard

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalRLOOTrainer


FAMILY = "qwen2_5_vl"


@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_truncate"])
def test_corrects_for_vllm_as_trls_grpo(mode, tmp_path):
    bounds = {"clip_max": 1.0, "clip_min": 0.001}
    named = {f"vllm_importance_sampling_{name}": value for name, value in {"mode": mode, **bounds}.items()}
    options = {**named, "self_check": False, "max_steps": 1, "beta": 0.0, "learning_rate": 0.0}
    runs = []
    grpo = MultimodalGRPOTrainer
    rloo = MultimodalRLOOTrainer
    for trainer_class, corrects in ((grpo, True), (rloo, True), (rloo, False)):
        options["vllm_importance_sampling_correction"] = corrects
        trainer = make_trainer(trainer_class, FAMILY, image_rows(), tmp_path, sampler=FromEngine, **options)
        trainer.use_vllm = True
        trainer.train()
        [inputs] = trainer._buffered_inputs
        metrics = {key: value for key, value in trainer.state.log_history[0].items() if "sampl" in key}
        lost = trainer.state.log_history[0]["signal/engine_ratios"]
        assert (lost > 0) == (corrects and mode == "sequence_mask")
        runs.append((inputs, metrics, trainer.state.log_history[0]["loss"]))
    (grpo, expected, _), (rloo, metrics, loss), (uncorrected, without, uncorrected_loss) = runs
    assert len(expected) == 6 and expected == pytest.approx(metrics, rel=1e-5)
    assert [*without] == ["sampling/no_logp_frac"]
    ratios = grpo.importance_sampling_ratio[:, 0]
    torch.testing.assert_close(rloo.importance_sampling_ratio[:, 0], ratios)
    torch.testing.assert_close(rloo.advantages, uncorrected.advantages)
    # On-policy, each completion's ratio to the old policy is 1
    assert loss == pytest.approx(-(ratios * rloo.advantages).mean().item(), abs=1e-4)
    assert uncorrected_loss == pytest.approx(-rloo.advantages.mean().item(), abs=1e-4)
    assert abs(loss - uncorrected_loss) > 0.01
    assert uncorrected.advantages.abs().min() > 0
    inside = (ratios > 0.001) & (ratios < 1)
    assert inside.any() and not inside.all()


class LossOfTRL(MultimodalRLOOTrainer):
    """Computes the loss as TRL's RLOO does, from the micro-batch as a dictionary."""

    def _compute_loss(self, model, inputs):
        mask = inputs["completion_mask"]
        logps, *_ = self._get_per_token_logps_and_entropies(model, None, None, mask.size(1))
        ratio = torch.exp((logps * mask).sum(1) - inputs["old_logps"])
        advantages = inputs["advantages"]
        return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def test_a_loss_of_trl_is_corrected_for_vllm_too(tmp_path):
    options = {"self_check": False, "max_steps": 1, "beta": 0.0, "learning_rate": 0.0, "sampler": FromEngine}
    bounds = {"mode": "sequence_truncate", "clip_max": 1.0, "clip_min": 0.001}
    options |= {f"vllm_importance_sampling_{name}": value for name, value in bounds.items()}
    losses = []
    for trainer_class in (MultimodalRLOOTrainer, LossOfTRL):
        trainer = make_trainer(trainer_class, FAMILY, image_rows(), tmp_path, **options)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert abs(losses[0]) > 0.01 and losses[1] == pytest.approx(losses[0], abs=1e-4)


def test_model_card_names_the_method(tmp_path):
    options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "self_check": True}
    trainer = make_trainer(MultimodalRLOOTrainer, FAMILY, image_rows(), tmp_path, **options)
    trainer.train()
    card = ModelCard.load(tmp_path / "README.md")
    assert {"rloo", "trl", "trl-multimodal-rft"} <= set(card.data.tags)
    assert "grpo" not in card.data.tags
    assert "Method: RLOO" in card.text
    assert str(trainer.checks.self_check) in card.text


def with_engine_logps(prompts, trainer):
    output = trainer.processing_class.apply_chat_template(
        prompts, tokenize=True, add_generation_prompt=True, return_dict=True
    )
    n = len(prompts)
    return {
        "prompt_ids": output["input_ids"],
        "completion_ids": [[60, 61, 62]] * n,
        "logprobs": [[-5.5, -5.6, -5.4]] * n,
    }


SOURCES = {"a sampler": {"sampler": FromEngine}, "a rollout_func": {"objects": {"rollout_func": with_engine_logps}}}


@pytest.mark.parametrize(
    "loss, mode, level",
    [
        ("gmpo", "token_truncate", "completions"),
        ("vespo", "sequence_mask", "tokens"),
        ("gmpo", "sequence_mask", None),
        ("vespo", "token_mask", None),
    ],
)
@pytest.mark.parametrize("source", SOURCES)
def test_losses_get_ratios_of_their_level_from_any_source(source, loss, mode, level, tmp_path):
    options = {"loss_type": loss, "vllm_importance_sampling_mode": mode, "max_steps": 1, "self_check": False}
    trainer = make_trainer(MultimodalGRPOTrainer, FAMILY, image_rows(), tmp_path, **SOURCES[source], **options)
    if source == "a rollout_func":
        trainer.sampler.samples_policy = False  # as vLLM
    message = f"'{loss}'.* needs the importance ratios of {level}"
    with nullcontext() if level is None else pytest.raises(ValueError, match=message):
        trainer.train()
