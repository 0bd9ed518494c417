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
from checks.test_self_check import asking, picture
from helpers.checks import released, subject
from helpers.trainer_utils import audio_rows, image_rows

from trl_multimodal_rft.checks.rounding import exceeds_rounding, noise_of, tolerance_of, two_steps
from trl_multimodal_rft.forward import encoders as encoder_features
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
N_CHECKS = 40_000
N_PROMPTS = 2
N_COMPARED = 4
N_REPEATS = 10
N_NEW = 4


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

    truth = draw(1, equal_completions)
    compared = draw(N_COMPARED, equal_completions)
    scale = noise_of(draw(N_REPEATS, False))
    differences = compared - truth
    tolerance = two_steps(torch.bfloat16, 25)
    failed = exceeds_rounding(differences, scale, tolerance).movedim(0, -1).flatten(1).any(-1)
    assert failed.float().mean() < 1e-4
    by_constant = (differences.abs() > TOLERANCE).movedim(0, -1).flatten(1).any(-1).float().mean()
    assert by_constant > 0.5 or noise < 0.06  # the constant alone isn't enough
    assert exceeds_rounding(differences + 1.2, scale, tolerance).float().mean() > 0.99  # nats
    assert exceeds_rounding(differences + math.inf, scale, tolerance).all()


def test_one_outlier_passes_and_more_do_not():
    noise = torch.full((8,), 0.1)
    tolerance = 0.2
    differences = torch.zeros(4, 8)
    differences[0, 0] = 1.1
    differences[1, :2] = torch.tensor([-0.7, 0.7])
    differences[2, 0] = -1.3
    differences[3] = 0.5
    assert exceeds_rounding(differences, noise, tolerance).tolist() == [False, True, True, True]
    assert two_steps(torch.bfloat16, 25.0) == 0.25
    assert noise_of(torch.tensor([[math.nan, 1.0]]).repeat(3, 1)).tolist() == [0.0, 0.0]


# Models


@pytest.mark.parametrize(("family", "rows"), [("qwen2_audio", audio_rows), ("qwen2_5_vl", image_rows)])
def test_rounding_of_a_released_model_passes(family, rows):
    check = released(family, rows(2)).check()
    assert max(check.padded, check.packed, check.rows, check.sampled) > TOLERANCE
    assert check.fallbacks == Fallbacks() and check.features == 0
    assert re.search(r"rounding noise +\de-0[12] +a token's tolerance is raised by 4 times its noise\n", str(check))


def padding(name, change):
    """Changes a tensor of batches that are padded on the left."""

    def defect(checked, monkeypatch):
        left_pad = forward.left_pad

        def changed(*args):
            made = left_pad(*args)
            return made | {name: change(made[name])}

        monkeypatch.setattr(forward, "left_pad", changed)

    return defect


def media(checked, monkeypatch):
    def swapped(parts):
        first, *others = parts
        return join_tensors([*others, first])

    join_tensors = encoder_features.join_tensors
    monkeypatch.setattr(encoder_features, "join_tensors", swapped)


def neighbours(checked, monkeypatch):
    checked.model.model.multi_modal_projector.register_forward_hook(
        lambda module, args, output: output + 0.5 * output.roll(1, dims=0)
    )


def features(checked, monkeypatch):
    for prompt in checked.prompts:
        prompt.media = {name: value * 0.99 for name, value in prompt.media.items()}


def dropout(checked, monkeypatch):
    """Adds to what is compared, and not to the noise behind which it could hide."""
    checked.model.get_decoder().layers[-1].register_forward_hook(
        lambda module, args, output: torch.nn.functional.dropout(output, 0.2)
    )


def images_of_two_questions(n):
    """Prompts of a similar length differ by a few masked tokens, whose effect may be smaller than that of rounding."""
    questions = ["What is in the image?" + " Describe its colours, shapes and where they are." * 2, "What is it?"]
    return asking(questions, image=[picture()] * n)


POSITIONS = padding("position_ids", lambda value: 3 * value)
MASK = padding("attention_mask", lambda value: value.flip(1))


@pytest.mark.parametrize(
    ("make", "family", "rows", "defect", "outcome"),
    [
        (
            subject,
            "qwen2_5_vl",
            image_rows,
            POSITIONS,
            "exactly: scores of padded rows differ",
        ),
        (
            released,
            "qwen2_5_vl",
            image_rows,
            POSITIONS,
            "exactly: scores of padded rows differ",
        ),
        (released, "llava", images_of_two_questions, MASK, ["prompt"]),
        (released, "llava", image_rows, media, ["media", "prompt"]),
        (released, "llava", image_rows, neighbours, ["media", "prompt"]),
        (
            subject,
            "qwen2_audio",
            audio_rows,
            features,
            "differ by 4e-02 from those of its processor",
        ),
        (released, "qwen2_audio", audio_rows, features, "its media tensors differ by 4e-02"),  # computed in float32
        (released, "llava", image_rows, dropout, "llava can't be trained exactly"),
    ],
)
def test_defects_are_found(make, family, rows, defect, outcome, monkeypatch):
    """They raise, or others of the fallback `isolate` don't have them."""
    broken = make(family, rows(2))
    defect(broken, monkeypatch)
    if isinstance(outcome, str):
        with pytest.raises(RuntimeError, match=outcome):
            broken.check()
    else:
        assert broken.check().fallbacks.isolate in outcome


def test_noise_that_errors_could_hide_behind_is_said(caplog):
    loud = released("llava", image_rows(2))
    with torch.no_grad():
        loud.model.lm_head.weight *= 2
    loud.check()
    assert re.search(
        r"llava: rounding in torch.bfloat16 moves log-probs by \S+, so it could hide errors below \S+", caplog.text
    )
