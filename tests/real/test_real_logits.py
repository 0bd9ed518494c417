# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rounding of real logits: the package's forward passes are as exact as the model's own, and pass the self-check."""

import functools

import pytest
import torch
from helpers.checks import subject
from helpers.encoding import extended
from helpers.real_models import REAL, load, rows_of

from trl_multimodal_rft.checks.measure import outputs_of
from trl_multimodal_rft.checks.rounding import tolerance_of, two_steps
from trl_multimodal_rft.engines.token_loop import up_to_first_end
from trl_multimodal_rft.forward.encoders import to_model
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.policy import Fallbacks


pytestmark = REAL
N_NEW = 8
N_ROWS = {"text": 4, "sound": 2}  # each row of a sound runs the encoder, also in float64


def plain_logps(model, prompt, ids):
    """Log-probabilities of a completion by the model's own forward, in its dtype."""
    inputs = to_model(outputs_of(prompt), model, torch.device("cpu"))
    inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    logits = model(**extended(inputs, ids)).logits[0, -len(ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0].double()


@functools.cache
def policy(kind):
    return subject(kind, rows_of(kind, 2), objects=load(kind))


@functools.cache
@torch.no_grad()
def scored(kind):
    """Log-probabilities of sampled tokens by several forwards, of two completions to each prompt."""
    real = policy(kind)
    prompts = policy(kind).prompts[::2][: N_ROWS[kind]]
    config = real.settings.generation_config
    config.update(max_new_tokens=N_NEW, output_logits=True, return_dict_in_generate=True)
    torch.manual_seed(0)
    sampled = real.settings.sample(prompts, config, Fallbacks())
    logits = torch.stack(sampled.logits, 1)
    ids = sampled.sequences[:, -logits.size(1) :]
    mask = up_to_first_end(ids, real.settings.eos_token_ids)
    results = {"sampled": logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0][mask].double()}
    for packed in (True, False):
        scores = real.policy.score(real.model, ScoreRequest(prompts, ids, mask.long(), packed=packed))
        results["packed" if packed else "padded"] = scores.logps[mask].double()
    plain, _ = load(kind)
    for name, dtype in (("own", torch.float32), ("float64", torch.float64)):
        plain.to(dtype)
        rows = zip(prompts, ids, mask, strict=True)
        results[name] = torch.cat([plain_logps(plain, prompt, row[kept]) for prompt, row, kept in rows])
    return results


@pytest.mark.parametrize("kind", ["text", "sound"])
def test_errors_are_those_of_the_models_own_forward(kind):
    """
    Of two completions to each prompt, against the model in float64.

    In root mean square, the errors were 2e-5 by the model's own forward, and by sampling from shared prefills. Those
    of packed and of padded rows were 5e-6 and 7e-6: their head leaves less of them.
    """
    logps = scored(kind)
    errors = {name: logps[name] - logps["float64"] for name in ("own", "packed", "padded", "sampled")}
    largest = {name: error.abs().max().item() for name, error in errors.items()}
    typical = {name: error.square().mean().sqrt().item() for name, error in errors.items()}
    assert 5e-6 <= typical["own"] <= 5e-5 and largest["own"] <= 1e-4, (largest, typical)
    for name, factor in (("packed", 1), ("padded", 1), ("sampled", 2)):
        assert typical[name] <= factor * typical["own"] and largest[name] <= 2 * largest["own"], (largest, typical)


def test_self_check_in_float32_passes():
    """Within 3e-5, of a tolerance of 7e-4. Another sound moves log-probabilities by 0.6."""
    check = policy("sound").check()
    assert check.fallbacks == Fallbacks()
    assert max(check.padded, check.packed, check.rows, check.sampled) <= 1e-4
    assert len(check.media) == 1 and check.media["audio"] > 0.1


def test_self_check_in_bfloat16_passes():
    """
    On one question without a sound: a CPU without instructions for bfloat16 takes five times as long as in float32.

    The tolerance is 0.2, and twice the spacing of logits above 32 if a difference is larger, beside four times a noise
    of 0.1. How far scores differ depends on the CPU: some round each row alike, however many rows a product has. Then
    packed rows differ by 1e-5, elsewhere by 0.1.
    """
    model, processor = load("text")
    check = subject("text", rows_of("text", 1), objects=(model.bfloat16(), processor)).check()
    constant = tolerance_of(torch.bfloat16)
    largest = max(check.padded, check.packed, check.sampled)
    assert check.fallbacks == Fallbacks()
    assert check.tolerance == (constant if largest <= constant else two_steps(torch.bfloat16, 32))
    assert 1e-2 <= check.rounding <= 0.3 and largest <= 0.3
