# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The loop that samples behind a cache draws what `generate` draws, with the kernels and waits of GPUs."""

import functools
import sys
from contextlib import contextmanager

import pytest
from test_decoding import assert_same, build, operations_of_a_token, options, sample

from trl_multimodal_rft.forward import decoding


@pytest.mark.parametrize("short", [0, 64])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "qwen3_5"])
def test_tokens_and_random_state_are_those_of_generate(name, short, device, monkeypatch):
    """Completions end between two looks at whether all have; short prompts are copied."""
    monkeypatch.setattr(decoding, "SHORT_PROMPT", short)
    model, tokenizer, rows = build(name)
    for ends in (20, 4):
        found = assert_same(model.to(device), rows, options(tokenizer, eos_token_id=list(range(30, 400, ends))))
    assert found.size(1) % 16


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_bfloat16(name, device):
    """The first logits behind a prompt are as close to those in float32 as those of `generate`."""
    model, tokenizer, rows = build(name)
    config = options(tokenizer, max_new_tokens=2, output_logits=True, return_dict_in_generate=True)
    expected = sample(model.to(device), rows, config, shared_prefill=False)[0].logits[0].log_softmax(-1)
    model.bfloat16()
    theirs, ours = (sample(model, rows, config, shared_prefill=own)[0].logits[0] for own in (False, True))
    errors = [(each.log_softmax(-1) - expected).square().mean().sqrt() for each in (theirs, ours)]
    assert 0 < errors[1] <= 1.5 * errors[0]


def test_waits(device):
    """The host waits for every 16th token, and uploads nothing for a token."""
    fake_cuda = sys.modules.get("fake_cuda")
    if fake_cuda is None or device == "cpu":
        pytest.skip("counts on the stand-in for a GPU")
    model, tokenizer, rows = build("qwen2_5_vl")
    sample(model.to(device), rows, options(tokenizer))  # encodes the media
    totals = []
    for n in (16, 80):
        with fake_cuda.watch() as watch:
            sample(model, rows, options(tokenizer, max_new_tokens=n, eos_token_id=None))
        with fake_cuda.watch() as ended:
            sample(model, rows, options(tokenizer, max_new_tokens=n, min_new_tokens=n, eos_token_id=[30]))
        totals.append([sum(each.values()) for each in (watch.waits, watch.uploads, ended.waits, ended.uploads)])
    more = [b - a for a, b in zip(*totals, strict=True)]
    assert more == [0, 0, 4, 0], (more, ended.waits, ended.uploads)


@pytest.mark.parametrize(("name", "short"), [("qwen2_5_vl", 0), ("qwen2_5_vl", 64), ("gemma3", 0)])
def test_operations(name, short, device, monkeypatch):
    """A token takes at most half of the operations of `generate` outside of the layers, and no more in a layer."""
    fake_cuda = sys.modules.get("fake_cuda")
    if fake_cuda is None or device == "cpu":
        pytest.skip("counts on the stand-in for a GPU")
    monkeypatch.setattr(decoding, "SHORT_PROMPT", short)
    model, tokenizer, rows = build(name)

    @contextmanager
    def counting():
        with fake_cuda.watch() as watch:
            yield watch.operators

    counted = functools.partial(operations_of_a_token, model.to(device).bfloat16(), tokenizer, rows, counting, None)
    (outside, layers), (before, layers_before) = counted(), counted(shared_prefill=False)
    assert layers.total() <= layers_before.total(), (layers, layers_before)
    assert outside.total() <= 0.5 * before.total(), (outside, before)
