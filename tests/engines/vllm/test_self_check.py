# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The self-check distinguishes an engine that samples from the policy from one that doesn't."""

import json
import shutil

import pytest
import torch
from helpers.engine_runs import make
from helpers.marks import slow_but
from helpers.trainer_utils import Recording, audio_rows, by_key, image_rows, moved, saved
from transformers import AutoProcessor

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.checks import run_checks
from trl_multimodal_rft.engines.vllm import MultimodalVLLMGeneration


FAMILY = "qwen2_5_vl"


def grpo(tmp_path, trainer_class=MultimodalGRPOTrainer, **options):
    return make(trainer_class, FAMILY, image_rows(), tmp_path, **options)


def assert_exact(check):
    assert max(check.engine) < 1e-5 and max(check.engine_updated) < 1e-5
    assert "engine vs. recomputed  " in str(check) and "engine vs. recomputed, updated" in str(check)


# Engines that sample from the policy; those with the same arguments follow each other, as they are one


def test_grpo_samples_from_the_policy(tmp_path, monkeypatch):
    trainer = grpo(tmp_path, temperature=0.7, generation_kwargs={"logit_bias": {60: 2.0}})
    printed: list[str] = []
    monkeypatch.setattr(run_checks, "print_above_bars", printed.append)
    trainer.train()
    assert_exact(trainer.checks.self_check)
    assert ["engine vs. recomputed" in each for each in printed] == [False, True, True]
    assert ["engine vs. recomputed, updated" in each for each in printed] == [False, False, True]
    assert trainer.checks._engine_check.first_batch is None  # the trainer keeps no media


def test_completions_end_as_those_of_transformers(tmp_path):
    """At the ends of the trainer's processor, which aren't those of the folder. The check sees one that goes on."""
    processor = AutoProcessor.from_pretrained(saved(FAMILY))
    processor.tokenizer.eos_token = "e"  # which is drawn now and then
    ends = [processor.tokenizer.eos_token_id]

    class Recorded(Recording, MultimodalGRPOTrainer):
        pass

    objects = {"processing_class": processor}
    options = {"max_completion_length": 200, "max_steps": 2}
    options |= {"per_device_train_batch_size": 16, "num_generations": 8}
    given = (Recorded, FAMILY, image_rows(), tmp_path, objects, {"max_model_len": 512})
    trainer = make(*given, **options)
    trainer.train()
    sampled = [ids for draw in trainer.draws for ids in draw.batch.source.ids]
    assert sum(ids[-1] in ends for ids in sampled) > 3 and not any(set(ends) & set(ids[:-1]) for ids in sampled)
    trainer = make(*given, **options, generation_kwargs={"ignore_eos": True})
    with pytest.raises(RuntimeError, match=r"completions go on after an end of text, \['e', .*remove `ignore_eos`"):
        trainer.train()


@pytest.mark.slow
def test_ppo_samples_from_the_policy(tmp_path):
    options = {"num_ppo_epochs": 1}
    trainer = make(MultimodalPPOTrainer, FAMILY, image_rows(), tmp_path, **options)
    trainer.train()
    assert_exact(trainer.checks.self_check)
    assert 0.5 < trainer.state.log_history[0]["sampling/importance_sampling_ratio/mean"] < 1


def some_signal(completion_ids, prompts, **kwargs):
    """Gives all completions of every other prompt the same reward."""
    dead = [sum(map(ord, str(prompt))) % 2 for prompt in prompts]
    return [0.0 if none else float(sum(ids) % 7) for none, ids in zip(dead, completion_ids, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {"dynamic_sampling": 4, "vllm_importance_sampling_mode": "token_mask"},
        pytest.param(
            {"replay_buffer_size": 8, "vllm_importance_sampling_mode": "sequence_truncate"}, marks=pytest.mark.slow
        ),
    ],
)
def test_exchanged_groups_keep_what_they_were_sampled_with(options, tmp_path):
    class Recorded(Recording, MultimodalGRPOTrainer):
        pass

    trainer = grpo(tmp_path, Recorded, objects={"reward_funcs": some_signal}, max_steps=4, **options)
    trainer.train()
    assert_exact(trainer.checks.self_check)
    for name in ("sampling_per_token_logps", "old_per_token_logps"):
        drawn = by_key(trainer.draws, name)
        used = by_key(trainer.micro_batches, name)
        assert used and all(torch.equal(value, drawn[key]) for key, value in used.items())
    history = trainer.state.log_history
    exchanged = [logged.get("sampling/rounds", 1) > 1 or logged.get("replay/frac", 0) > 0 for logged in history]
    assert any(exchanged)
    for batch in (each.batch for each in trainer.micro_batches):
        old = batch["old_per_token_logps"]
        sampled = batch["sampling_per_token_logps"]
        ratios = batch["importance_sampling_ratio"]
        mask = batch.scored_mask
        if ratios.size(1) == 1:
            differences = torch.where(mask.bool(), old - sampled, 0.0).nan_to_num(nan=0.0)
            expected = differences.sum(1).exp().clamp(max=3.0)
            torch.testing.assert_close(ratios[:, 0], expected)
        else:
            torch.testing.assert_close(ratios[mask.bool()], (old - sampled)[mask.bool()].exp())


@pytest.mark.parametrize(
    "options", slow_but([{"top_k": 5}, {"generation_kwargs": {"frequency_penalty": 0.5}}], {"top_k": 5})
)
def test_changed_distributions_of_an_engine_are_not_measured(options, tmp_path):
    trainer = grpo(tmp_path, max_steps=1, **options)
    trainer.train()
    assert trainer.checks.self_check.engine is None


# Engines that sample from another policy


def test_without_a_self_check_training_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(MultimodalVLLMGeneration, "sync_weights", lambda self: None)
    trainer = grpo(tmp_path, self_check=False, max_steps=2)
    trainer.train()
    assert trainer.state.log_history[1]["sampling/sampling_logp_difference/mean"] > 0.01


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("float32", 1e-5), pytest.param("bfloat16", 0.05, marks=pytest.mark.slow)]
)
def test_weights_that_a_sync_leaves_out_stop_training_after_an_update(dtype, rounding, tmp_path, monkeypatch):
    named = MultimodalVLLMGeneration._iter_named_params
    stale = {}

    def all_but_one(self):
        for name, parameter in named(self):
            if name.endswith("layers.0.self_attn.q_proj.weight"):
                # On a CPU, an engine can't keep a weight that it doesn't receive
                parameter = stale.setdefault(name, parameter.detach().clone())
            yield name, parameter

    monkeypatch.setattr(MultimodalVLLMGeneration, "_iter_named_params", all_but_one)
    trainer = grpo(tmp_path, engine={"dtype": dtype}, max_completion_length=24)
    with pytest.raises(RuntimeError, match="after 1 updates .before them.*doesn't get all trained weights"):
        trainer.train()
    assert trainer.checks.self_check.engine[0] < rounding and len(stale) == 1


def copied(folder):
    """Returns a new copy of the family's folder."""
    return shutil.copytree(saved(FAMILY), folder)


def test_an_engine_with_other_weights_stops_training(tmp_path, monkeypatch):
    processor = AutoProcessor.from_pretrained(saved(FAMILY))
    policy = moved(FAMILY)["model"]
    folder = copied(tmp_path / "other")
    policy.name_or_path = str(folder)
    monkeypatch.setattr(MultimodalVLLMGeneration, "sync_weights", lambda self: None)
    objects = {"model": policy, "processing_class": processor}
    trainer = grpo(tmp_path, objects=objects)
    with pytest.raises(RuntimeError, match="on the first batch.*engine's settings, weights.*`self_check=False`"):
        trainer.train()


@pytest.mark.slow
def test_other_pixels_in_an_engine_stop_training(tmp_path):
    processor = AutoProcessor.from_pretrained(saved(FAMILY))
    folder = copied(tmp_path / "other")
    [file] = [each for each in folder.glob("*.json") if "image_mean" in each.read_text()]
    settings = json.loads(file.read_text())
    settings.get("image_processor", settings)["image_mean"] = [0.0, 0.0, 0.0]
    file.write_text(json.dumps(settings))
    trainer = grpo(tmp_path, objects={"model": str(folder), "processing_class": processor})
    with pytest.raises(RuntimeError, match="on the first batch.*processed media differ"):
        trainer.train()


# Engines with other arguments


@pytest.mark.slow
def test_rounding_of_the_engine_is_no_error(tmp_path):
    trainer = grpo(tmp_path, engine={"dtype": "bfloat16"}, max_completion_length=24)
    trainer.train()
    check = trainer.checks.self_check
    assert 1e-4 < check.engine[0] < 0.05 and 1e-4 < check.engine_updated[0] < 0.05


@pytest.mark.slow
def test_rloo_weighs_what_the_engine_samples(tmp_path):
    drawn = []

    class Remembering(MultimodalRLOOTrainer):
        def _compute_loss(self, model, inputs):
            drawn.append((inputs["advantages"], inputs.rollout))  # without weights, which the scores of this step give
            return super()._compute_loss(model, inputs)

    options = {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 0.98}
    trainer = make(Remembering, "qwen2_audio", audio_rows(), tmp_path, **options)
    trainer.train()
    assert_exact(trainer.checks.self_check)
    assert len(drawn) == 3
    weights = []
    for (before, output), logged in zip(drawn, trainer.state.log_history, strict=False):
        mask = output.scored_mask
        rows = output.rows_to_score or [*range(len(output))]
        differences = (output.old_per_token_logps - output.sampling_per_token_logps) * mask
        ratios = differences.sum(1).exp()
        ratios = ratios.clamp(max=0.98)
        torch.testing.assert_close(output.advantages, before * ratios)
        ratios = ratios[rows]
        weights.append(ratios)
        for name in ("min", "mean", "max"):
            expected = getattr(ratios, name)().item()
            assert logged[f"sampling/importance_sampling_ratio/{name}"] == pytest.approx(expected, rel=1e-5)
        expected = differences.abs().sum() / mask.sum()
        assert logged["sampling/sampling_logp_difference/mean"] == pytest.approx(expected.item(), rel=1e-5)
    # Placeholders, which the engine excludes, have some probability
    assert 0.9 < torch.cat(weights).min() < torch.cat(weights).max() == pytest.approx(0.98)
