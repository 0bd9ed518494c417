# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
The self-check in bfloat16, at logits as large as those of released models: rounding passes, defects don't.

A GPU's kernels round differently with each shape, and a CPU's don't. Here random rounding in all layers takes their
place.
"""

import math
import re

import pytest
import torch
from helpers.checks import released
from helpers.trainer_utils import audio_rows, image_rows
from test_checks import completions_of, engine_check, move, sampled_by
from test_self_check import asking, picture

from trl_multimodal_rft.checks.rounding import exceeds, noise_of, tolerance_of, two_steps
from trl_multimodal_rft.forward import inputs
from trl_multimodal_rft.forward import logprobs as forward
from trl_multimodal_rft.policy import Fallbacks


TOLERANCE = tolerance_of(torch.bfloat16)


@pytest.fixture(autouse=True)
def same_samples():
    """Completions, and with them what rounding hides, depend on the generator that earlier tests left behind."""
    torch.manual_seed(0)


# Simulation

# Largest logit and that of the token, of confident and of unlikely tokens
TOKENS = ((25, 24.5), (25, 25), (25, 22), (25, 17.2), (25, 16.1), (30, 20.3))
N_CHECKS, N_PROMPTS, N_COMPARED, N_REPEATS, N_NEW = 40_000, 2, 4, 10, 4


def evaluations(noise, generator, n=50_000):
    """Returns log-probabilities `(tokens, n)` of one token by independent noise of hidden states, rounded logits."""
    others = 22 - torch.empty(len(TOKENS), 1, 30).exponential_(1 / 3, generator=generator)
    ends = torch.tensor(TOKENS)[:, None].float()
    logits = torch.cat([ends[..., :1], others, ends[..., 1:]], dim=-1).expand(-1, n, -1)
    logits = (logits + noise * torch.randn(logits.shape, generator=generator)).bfloat16().float()
    return logits[..., -1] - logits.logsumexp(-1)


@pytest.mark.parametrize("equal_completions", [False, True])
@pytest.mark.parametrize("noise", [0.01, 0.03, 0.06])
def test_rounding_fails_fewer_than_one_of_ten_thousand_checks(noise, equal_completions):
    """Each check compares two completions to each of two prompts four times. Equal completions have equal noise."""
    generator = torch.Generator().manual_seed(0)
    values = evaluations(noise, generator)
    shape = (N_CHECKS, N_PROMPTS, 2, N_NEW)
    kinds = torch.randint(len(TOKENS), shape, generator=generator)
    if equal_completions:
        kinds = kinds[:, :, :1].expand(shape)

    def draw(n, shared):
        drawn = torch.randint(values.size(1), (n, *shape), generator=generator)
        drawn = drawn[:, :, :, :1].expand_as(drawn) if shared else drawn
        return values[kinds.expand_as(drawn), drawn].flatten(-2)

    truth, compared = draw(1, equal_completions), draw(N_COMPARED, equal_completions)
    scale = noise_of(draw(N_REPEATS, False))
    differences = compared - truth
    tolerance = two_steps(torch.bfloat16, 25)
    failed = exceeds(differences, scale, tolerance).movedim(0, -1).flatten(1).any(-1)
    assert failed.float().mean() < 1e-4
    by_constant = (differences.abs() > TOLERANCE).movedim(0, -1).flatten(1).any(-1).float().mean()
    assert by_constant > 0.5 or noise < 0.06  # the constant alone isn't enough
    assert exceeds(differences + 1.2, scale, tolerance).float().mean() > 0.99  # nats
    assert exceeds(differences + math.inf, scale, tolerance).all()


def test_one_outlier_passes_and_more_do_not():
    noise, tolerance = torch.full((8,), 0.1), 0.2
    differences = torch.zeros(4, 8)
    differences[0, 0] = 1.1
    differences[1, :2] = torch.tensor([-0.7, 0.7])
    differences[2, 0] = -1.3
    differences[3] = 0.5
    assert exceeds(differences, noise, tolerance).tolist() == [False, True, True, True]
    assert two_steps(torch.bfloat16, 25.0) == 0.25
    assert noise_of(torch.tensor([[math.nan, 1.0]]).repeat(3, 1)).tolist() == [0.0, 0.0]


# Models


@pytest.mark.parametrize(("family", "rows"), [("qwen2_audio", audio_rows), ("qwen2_5_vl", image_rows)])
def test_rounding_of_a_released_model_passes(family, rows):
    check = released(family, rows(2)).check()
    assert max(check.padded, check.packed, check.rows, check.sampled) > TOLERANCE
    assert check.fallbacks == Fallbacks() and check.features == 0
    assert re.search(r"rounding noise +\de-0[12] +4 times a token's adds to its tolerance\n", str(check))


def test_wrong_positions_are_found(monkeypatch):
    left_pad = forward.left_pad
    monkeypatch.setattr(
        forward, "left_pad", lambda *args: (batch := left_pad(*args)) | {"position_ids": 3 * batch["position_ids"]}
    )
    with pytest.raises(RuntimeError, match="can't be trained exactly: log-probabilities in a batch differ by"):
        released("qwen2_5_vl", image_rows(2)).check()


def test_a_mask_on_the_wrong_side_is_found(monkeypatch):
    def flipped(*args):
        batch = left_pad(*args)
        return {**batch, "attention_mask": batch["attention_mask"].flip(1)}

    left_pad = forward.left_pad
    monkeypatch.setattr(forward, "left_pad", flipped)
    # Prompts of a similar length differ by a few masked tokens, whose effect may be smaller than that of rounding
    questions = ["What is in the image?" + " Describe its colours, shapes and where they are." * 2, "What is it?"]
    rows = asking(questions, image=[picture()] * 2)
    assert released("llava", rows).check().fallbacks == Fallbacks(isolate="prompt")


def test_swapped_media_are_found(monkeypatch):
    def swapped(parts):
        parts = list(parts)
        return join_tensors(parts[1:] + parts[:1])

    join_tensors = inputs.join_tensors
    monkeypatch.setattr(inputs, "join_tensors", swapped)
    check = released("llava", image_rows(2)).check()
    assert check.fallbacks.isolate is not None


def test_disturbed_neighbours_are_found():
    mixed = released("llava", image_rows(2))
    mixed.model.model.multi_modal_projector.register_forward_hook(
        lambda module, args, output: output + 0.5 * output.roll(1, dims=0)
    )
    assert mixed.check().fallbacks.isolate is not None


def test_other_features_are_found():
    """Those are computed in float32, whatever the model's dtype."""
    quieter = released("qwen2_audio", audio_rows(2))
    for prompt in quieter.prompts:
        prompt.media = {name: value * 0.99 for name, value in prompt.media.items()}
    with pytest.raises(RuntimeError, match="its media tensors differ by 4e-02"):
        quieter.check()


def test_dropout_is_no_rounding():
    """It adds to what is compared, and not to the noise behind which it could hide."""
    random = released("llava", image_rows(2))
    random.model.get_decoder().layers[-1].register_forward_hook(
        lambda module, args, output: torch.nn.functional.dropout(output, 0.2)
    )
    with pytest.raises(RuntimeError, match="llava can't be trained exactly"):
        random.check()


def test_noise_that_errors_could_hide_behind_is_said(caplog):
    loud = released("llava", image_rows(2))
    with torch.no_grad():
        loud.model.lm_head.weight *= 2
    loud.check()
    assert re.search(
        r"llava: rounding in torch.bfloat16 moves log-probs by \S+, so errors below \S+ can't", caplog.text
    )


# Engines


def test_an_engine_with_rounding_is_measured_and_one_without_weights_is_found():
    listener = released("qwen2_audio", audio_rows(2))
    check, completions = engine_check(listener, torch.bfloat16), completions_of(listener)
    sampled = sampled_by(listener, completions)
    assert check.run(listener.model, 0, completions, completions[2], sampled)
    move(listener)
    with pytest.raises(RuntimeError, match="after 1 updates, and were .* before.*doesn't get all trained weights"):
        check.run(listener.model, 1, completions, completions[2], sampled)
    with pytest.raises(RuntimeError, match="on the first batch.*its settings, weights"):
        engine_check(listener, torch.bfloat16).run(listener.model, 0, completions, completions[2], sampled)
    check = engine_check(listener, torch.bfloat16)
    assert check.run(listener.model, 0, completions, completions[2], sampled_by(listener, completions))
    move(listener)
    assert check.run(listener.model, 1, completions, completions[2], sampled_by(listener, completions))
