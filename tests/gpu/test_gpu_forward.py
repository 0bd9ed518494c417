# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Packed equals padded in the dtypes and with the kernels of GPUs, and so does generation with one prefill."""

import functools

import pytest
import torch
from engines.test_generation import build as build_to_sample
from engines.test_generation import config
from helpers.completions import random_completions
from helpers.devices import GPU, NO_STAND_IN, gpu_only
from helpers.marks import by_turns
from helpers.packed_rows import backward, build, enable_checkpointing, padded_reference
from helpers.trainer_utils import relative_difference
from torch.nn.attention import varlen

from trl_multimodal_rft.engines.transformers import generate_completions
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward import kernels, layout
from trl_multimodal_rft.forward.logprobs import completion_scores
from trl_multimodal_rft.forward.prompt_groups import split_samples
from trl_multimodal_rft.forward.scores import ScoreRequest


KINDS = {
    "qwen2_5_vl": "M-RoPE",
    "qwen2_audio": "sound",
    "gemma3": "sliding windows, images that see themselves",
    "paligemma": "prompts that see themselves",
    "qwen3_vl_moe": "experts",
    "qwen3_5": "linear attention",
}
# Rounding that packed rows may add to that of padded ones, as both round at random
WORSE = 1.25


def scores(name, device, dtype, attention="sdpa", packed=True, checkpointing=False, seed=0):
    """Returns log-probabilities and entropies in one vector, and gradients, in float32."""
    model, prompts = build(name, attention, device, dtype)
    if checkpointing:
        enable_checkpointing(model)
    ids, mask = (each.to(device) for each in random_completions(len(prompts), seed=seed))
    if packed:
        result = completion_scores(model, model, ScoreRequest(prompts, ids, mask, isolate=family_of(model).isolate))
        logps = result.logps
        entropies = result.entropies
        gradients = backward(model, logps, entropies, mask)
    else:
        logps, entropies, gradients = padded_reference(model, prompts, ids, mask)
    values = torch.cat([(each * mask).detach().float() for each in (logps, entropies)])
    return values, {name: gradient.float() for name, gradient in gradients.items()}


@pytest.fixture
def kernel_calls(monkeypatch):
    """Records the windows of torch's variable-length kernel, by its calls."""
    calls = []
    kernel = varlen.varlen_attn

    @functools.wraps(kernel)  # callers read its signature
    def recorded(*args, **kwargs):
        calls.append(kwargs.get("window_size", (-1, -1)))
        return kernel(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", recorded)
    return calls


@pytest.mark.parametrize(("name", "attention"), by_turns(KINDS, ["sdpa", "eager", "checkpointing"], mark=NO_STAND_IN))
def test_float32(name, attention, device):
    if device == "cpu" and name != "qwen2_5_vl":
        pytest.skip("`test_packing` has it")
    options = {"checkpointing": True} if attention == "checkpointing" else {"attention": attention}
    packed, packed_gradients = scores(name, device, torch.float32, **options)
    padded, gradients = scores(name, device, torch.float32, packed=False, **options)
    assert (packed - padded).abs().max() <= 1e-4
    assert relative_difference(gradients, packed_gradients) <= 1e-4


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    gpu_only(
        [*((name, False) for name in KINDS), ("qwen2_5_vl", True), ("qwen3_5", True)],
        # The first family's kernel without windows also runs in `test_merged_attention` and in self-checks
        ("gemma3", False),
        ("paligemma", False),
    ),
)
def test_bfloat16(name, checkpointing, device, kernel_calls):
    """Decoders use torch's variable-length kernel, with windows and for branches behind images that see themselves."""
    check_bfloat16(name, device, "sdpa", checkpointing)
    assert any(right == 0 for _, right in kernel_calls) == (device == "cuda")


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)], indirect=True)
@pytest.mark.parametrize("name", gpu_only(["qwen2_5_vl", "qwen2_audio"], "qwen2_5_vl"))
def test_merged_attention(name, device, monkeypatch):
    """Completions attend to their prompt and to themselves in two calls, as where a copy of keys would be large."""
    calls = []
    forward = kernels.flash_forward
    monkeypatch.setattr(kernels, "flash_forward", lambda *args: calls.append(args) or forward(*args))
    monkeypatch.setattr(layout, "_COPIED_KEYS", 1)
    check_bfloat16(name, device, "sdpa")
    assert calls


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_flash_attention(name, device):
    pytest.importorskip("flash_attn", reason="needs flash-attn")
    if device == "cpu":
        pytest.skip("flash-attn runs on GPUs")
    check_bfloat16(name, device, "flash_attention_2")


@NO_STAND_IN
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch warns on compilation
@pytest.mark.parametrize("name", ["qwen2_audio", "gemma3"])
def test_flex_attention(name, device):
    """Packed rows use sdpa, and everything else uses flex attention."""
    if device == "cpu":
        pytest.skip("compiles for minutes")
    packed, packed_gradients = scores(name, device, torch.float32, "flex_attention")
    padded, gradients = scores(name, device, torch.float32, packed=False)
    assert (packed - padded).abs().max() <= 1e-4
    assert relative_difference(gradients, packed_gradients) <= 1e-4


def check_bfloat16(name, device, attention, checkpointing=False):
    """Packed rows are as close to float32 as padded ones, over several draws of completions."""
    errors = {"packed": [], "padded": []}
    for seed in range(3):
        truth, gradients = scores(name, device, torch.float32, packed=False, seed=seed)
        for kind, found in errors.items():
            options = {"packed": kind == "packed", "checkpointing": checkpointing, "seed": seed}
            values, own = scores(name, device, torch.bfloat16, attention, **options)
            found.append([(values - truth).square().mean(), relative_difference(gradients, own) ** 2])
    packed, padded = (torch.tensor(found).mean(0).sqrt() for found in errors.values())
    assert (packed <= WORSE * padded).all(), (packed, padded)


# On the stand-in, `test_gpu_sampling.py` compares the others
@pytest.mark.parametrize("name", gpu_only(KINDS, "qwen2_audio", "paligemma", "qwen3_vl_moe"))
def test_shared_prefill_equals_generate(name, device):
    model, plain, processor, prompts = build_to_sample(name)
    model = model.to(device)
    plain = plain.to(device)
    tokenizer = processor.tokenizer
    arguments = (config(tokenizer, do_sample=True), tokenizer.pad_token_id, model.device)
    for part in split_samples(prompts, "media"):
        rows = [prompts[i] for i in part]
        torch.manual_seed(0)
        expected = generate_completions(plain, plain, rows, *arguments, shared_prefill=False)
        torch.manual_seed(0)
        assert generate_completions(model, model, rows, *arguments).equal(expected)
