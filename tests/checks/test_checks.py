# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks of a rollout take a policy and completions: samples of an engine, and media ablation."""

import copy
import math

import pytest
import torch
from helpers.checks import G, released, subject
from helpers.encoding import own_logps
from helpers.samplers import Wrapped
from helpers.trainer_utils import (
    audio_rows,
    image_rows,
    length_and_sum,
    make_trainer,
    norm,
    run,
    sound,
    text_rows,
    with_media,
)

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.checks.engine_check import EngineCheck
from trl_multimodal_rft.checks.measure import outputs_of
from trl_multimodal_rft.checks.media_contribution import media_contribution
from trl_multimodal_rft.checks.run_checks import Checks
from trl_multimodal_rft.checks.self_check import SelfCheck
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.encoding.prompts import encode_prompt
from trl_multimodal_rft.engines.samplers import Sampler
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.policy import Fallbacks, PolicyForward
from trl_multimodal_rft.views import as_view


BIAS = {3: -100.0}


def completions_of(checked, length=6):
    """Returns prompts, random completions, one of which ended, and their mask."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(50, 200, (len(checked.prompts), length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    return checked.prompts, ids, mask


def engine_check(checked, dtype=torch.float32):
    found = SelfCheck(features=0.0, padded=0.0, rows=0.0, training=0.0, tolerance=7e-4, fallbacks=Fallbacks())
    return EngineCheck(checked.policy, found, dtype, BIAS)


def sampled_by(checked, completions):
    """Returns log-probabilities like an engine with the policy's current weights."""
    with torch.no_grad():
        return checked.policy.score(checked.model, ScoreRequest(*completions, packed=False, logit_bias=BIAS)).logps


def move(checked):
    with torch.no_grad():
        for parameter in checked.model.get_decoder().parameters():
            parameter *= 1.1


@pytest.fixture
def listener():
    return subject("qwen2_audio", audio_rows(2))


def test_a_bias_of_logits_is_part_of_the_distribution(listener):
    prompts, ids, mask = completions_of(listener)
    completions = (prompts, torch.full_like(ids, 60), mask)
    bias = 2.0
    with torch.no_grad():
        plain, biased = (
            listener.policy.score(listener.model, ScoreRequest(*completions, packed=False, logit_bias=each)).logps
            for each in (None, {60: bias})
        )
    expected = plain + bias - torch.log1p(plain.exp() * math.expm1(bias))
    torch.testing.assert_close(biased[mask.bool()], expected[mask.bool()])


def test_an_engine_that_samples_from_the_policy_is_measured_twice(listener):
    check = engine_check(listener)
    completions = completions_of(listener)
    mask = completions[2]
    sampled = sampled_by(listener, completions)
    sampled[0, 0] = math.nan  # an engine may not return a token's
    assert not check.run(listener.model, 0, completions, torch.zeros_like(mask), sampled)
    assert check.run(listener.model, 1, completions, mask, sampled)
    assert max(check.check.engine) < 1e-5 and check.check.engine_updated is None
    assert not check.run(listener.model, 1, completions, mask, sampled)  # the same step
    assert not check.run(listener.model, 2, completions, mask, sampled)  # no weight changed
    move(listener)
    assert check.run(listener.model, 3, completions, mask, sampled_by(listener, completions))
    assert max(check.check.engine_updated) < 1e-5
    assert check.first_batch is None  # the trainer keeps no media
    assert not check.run_after_tools(listener.model, completions, mask, sampled)  # no tool was called


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (subject, torch.float32),
        pytest.param(subject, torch.bfloat16, marks=pytest.mark.slow),
        (released, torch.bfloat16),
    ],
)
def test_an_engine_that_does_not_get_the_weights_raises(make, dtype):
    torch.manual_seed(0)
    listener = make("qwen2_audio", audio_rows(2))
    completions = completions_of(listener)

    def run(check, step, sampled=None):
        """The engine has the current weights unless it `sampled` before."""
        sampled = sampled_by(listener, completions) if sampled is None else sampled
        return check.run(listener.model, step, completions, completions[2], sampled)

    updated = engine_check(listener, dtype)
    check = engine_check(listener, dtype)
    assert run(updated, 0)
    sampled = sampled_by(listener, completions)
    assert run(check, 0, sampled)
    move(listener)
    assert run(updated, 1)
    with pytest.raises(RuntimeError, match="after 1 updates .before them.*doesn't get all trained weights"):
        run(check, 1, sampled)
    error = r"the engine's log-probabilities differ by \S+ on average.* on the first batch.*engine's settings, weights"
    with pytest.raises(RuntimeError, match=error):
        run(engine_check(listener, dtype), 0, sampled)


# Media


def ablating(checked):
    """Encodes a prompt again, under a view."""
    processor = checked.policy.processor
    return lambda row, view: encode_prompt(checked.messages[row], processor, checked.model, view=view)


def test_contribution_is_the_mean_difference_without_a_medium(listener):
    completions = completions_of(listener)
    encode = ablating(listener)
    prompts, ids, mask = completions
    counts = mask.index_fill(1, torch.tensor([0]), 0)  # not those of a tool
    metrics = media_contribution(listener.policy, listener.model, completions, counts, encode)
    moved = []
    for row in (0, G):  # a completion of each prompt
        place = slice(row, row + 1)
        with torch.no_grad():
            heard, unheard = (
                listener.policy.score(
                    listener.model, ScoreRequest([each], ids[place], mask[place], packed=False)
                ).logps
                for each in (prompts[row], encode(row, as_view("blank").for_modality("audio")))
            )
        moved.append((heard - unheard).abs()[counts[place].bool()])
    assert metrics == {"media/contribution": pytest.approx(torch.cat(moved).mean().item(), rel=1e-4)}
    assert metrics["media/contribution"] > 1e-3


def test_contribution_of_each_kind_and_none_of_those_that_are_gone():
    rows = with_media(image_rows(2), "audio", [sound(0.3 + 0.1 * i, seed=i) for i in range(2)])
    both = subject("qwen2_5_omni", rows)
    completions = completions_of(both)
    encode = ablating(both)
    metrics = media_contribution(both.policy, both.model, completions, completions[2], encode)
    kinds = [metrics.pop(f"media/contribution/{kind}") for kind in ("image", "audio")]
    assert metrics == {"media/contribution": pytest.approx(sum(kinds) / 2)} and min(kinds) > 1e-3

    def gone(row, view):
        if view.applies_to("audio"):
            raise MediaError("the file is gone")
        return encode(row, view)

    images = media_contribution(both.policy, both.model, completions, completions[2], gone)
    assert images == {"media/contribution": pytest.approx(kinds[0])}


def test_text_has_no_contribution():
    text = subject("qwen2_audio", text_rows(1))
    completions = completions_of(text)
    assert media_contribution(text.policy, text.model, completions, completions[2], ablating(text)) == {}


def test_contribution_is_a_moving_average_that_a_resumed_run_continues():
    """A single measurement is of a few completions."""
    checks = Checks(PolicyForward(), accelerator=None)
    name = "media/contribution"
    assert checks.smoothed({name: 1.0}) == {name: 1.0}
    assert checks.smoothed({name: 2.0, f"{name}/image": 4.0}) == {name: pytest.approx(1.3), f"{name}/image": 4.0}
    assert checks.smoothed({}) == {}
    resumed = Checks(PolicyForward(), accelerator=None)
    resumed.load_state_dict(copy.deepcopy(checks.state_dict()))
    assert resumed.smoothed({name: 0.0}) == checks.smoothed({name: 0.0}) == {name: pytest.approx(0.7 * 1.3)}
    earlier = {key: value for key, value in checks.state_dict().items() if key != "contributions"}
    resumed.load_state_dict(earlier)
    assert resumed.smoothed({name: 0.5}) == {name: 0.5}


# Another sampler


def other_sampler(shift: float, length: int = 4):
    """Random tokens, with log-probabilities by the model's own forward of each completion, shifted."""

    class Other(Wrapped):
        def __call__(self, model, prompts, *, step, **options):
            generator = torch.Generator().manual_seed(step)
            ids = []
            logps = []
            for prompt in prompts:
                own = torch.randint(50, 200, (length,), generator=generator)
                ids.append(own.tolist())
                inputs = {"attention_mask": torch.ones(1, len(prompt)).long(), **outputs_of(prompt)}
                logps.append((own_logps(model, inputs, own) + shift).tolist())
            return ids, logps

    return Other


@pytest.mark.parametrize(
    ("trainer_class", "mode", "n_tokens"),
    [(MultimodalGRPOTrainer, "token_truncate", 1), (MultimodalRLOOTrainer, "sequence_truncate", 4)],
)
def test_log_probabilities_of_another_sampler_weigh_completions(trainer_class, mode, n_tokens):
    options = {"beta": 0.0, "max_completion_length": 4, "max_steps": 1, "reward": length_and_sum}
    options |= {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 9.0}
    updates = {}
    for shift in (0.0, 0.3):
        result = run(trainer_class, "qwen2_audio", audio_rows(), sampler=other_sampler(shift), **options)
        updates[shift] = result.update
        assert result.history[0]["sampling/sampling_logp_difference/mean"] == pytest.approx(shift, abs=1e-5)
    factor = math.exp(-0.3 * n_tokens)
    scaled = {name: value * factor for name, value in updates[0.0].items()}
    assert norm(scaled) > 1e-3
    assert norm({name: scaled[name] - updates[0.3][name] for name in scaled}) <= 1e-3 * norm(scaled)


def test_a_sampler_as_an_argument(tmp_path):
    """With log-probabilities far from the policy's, which are corrected, and which the self-check finds."""

    class Fixed(Sampler):
        def __call__(self, model, prompts, **options):
            return [[60 + i, 61, 62] for i in range(len(prompts))], [[-9.0] * 3] * len(prompts)

    with pytest.raises(ValueError, match="`sampler` is a type, and `use_vllm` is False; pass a `Sampler`"):
        make_trainer(MultimodalPPOTrainer, "qwen2_audio", audio_rows(), tmp_path, objects={"sampler": Fixed})
    for trainer_class in (MultimodalGRPOTrainer, MultimodalRLOOTrainer, MultimodalPPOTrainer):
        options = {"max_completion_length": 4, "max_steps": 1, "objects": {"sampler": Fixed()}}
        logged = run(trainer_class, "qwen2_audio", audio_rows(), **options).history[0]
        assert logged["completions/mean_length"] == 3 and logged["sampling/sampling_logp_difference/mean"] > 1
        with pytest.raises(RuntimeError, match="the engine's log-probabilities differ"):
            run(trainer_class, "qwen2_audio", audio_rows(), self_check=True, **options)


def test_the_self_check_measures_another_sampler():
    options = {"self_check": True, "max_completion_length": 4, "learning_rate": 0.1}
    check = run(MultimodalGRPOTrainer, "qwen2_audio", audio_rows(), sampler=other_sampler(0.0), **options)
    check = check.trainer.checks.self_check
    assert check.sampled is None
    assert max(check.engine) <= 1e-5 and max(check.engine_updated) <= 1e-5
    with pytest.raises(
        RuntimeError, match=r"the engine's log-probabilities differ by 2e-02 on average.*let transformers"
    ):
        run(MultimodalGRPOTrainer, "qwen2_audio", audio_rows(), sampler=other_sampler(0.02), **options)
