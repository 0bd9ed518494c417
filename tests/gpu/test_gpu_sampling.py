# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
The loop that samples behind a cache draws what `generate` draws, with kernels and waits of GPUs, and the same from a
CUDA graph.
"""

import functools
import gc
import itertools
import sys
from contextlib import contextmanager

import pytest
import torch
from engines.test_token_loop import assert_same, build, operations_of_a_token, options, sample
from helpers.devices import GPU, GPU_OR_CPU, IS_STAND_IN, NO_STAND_IN, gpu_only
from helpers.four_bits import NF4, save_wide
from helpers.marks import by_turns
from helpers.recorded_step import RecordedStep

from trl_multimodal_rft.engines import transformers as generation
from trl_multimodal_rft.engines.token_loop import runner_on
from trl_multimodal_rft.forward import shared_cache
from trl_multimodal_rft.forward.attention import install_prefix_attention


def step_of(device):
    """A graph of the device, or what records one."""
    device = torch.device(device)
    return RecordedStep(device) if IS_STAND_IN or device.type == "cpu" else runner_on(device)


def in_autocast(forward, device):
    @functools.wraps(forward)
    def call(*args, **kwargs):
        with torch.autocast(device, torch.bfloat16):
            return forward(*args, **kwargs)

    return call


@pytest.mark.parametrize(("name", "short"), by_turns(["qwen2_5_vl", "gemma3", "qwen3_5"], [0, 64], mark=NO_STAND_IN))
def test_tokens_and_random_state_are_those_of_generate(name, short, device, monkeypatch):
    """Completions end between two looks at whether all have; short prompts are copied."""
    monkeypatch.setattr(shared_cache, "SHORT_PROMPT", short)
    model, tokenizer, rows = build(name)
    for ends in (20, 4):
        found = assert_same(model.to(device), rows, options(tokenizer, eos_token_id=list(range(30, 400, ends))))
    assert found.size(1) % 16


@pytest.mark.parametrize("name", gpu_only(["qwen2_5_vl", "gemma3"], "gemma3"))
def test_bfloat16(name, device):
    """The first logits behind a prompt are as close to those in float32 as those of `generate`."""
    model, tokenizer, rows = build(name)
    config = options(tokenizer, max_new_tokens=2, output_logits=True, return_dict_in_generate=True)
    expected = sample(model.to(device), rows, config, shared_prefill=False)[0].logits[0].log_softmax(-1)
    model.bfloat16()
    theirs, ours = (sample(model, rows, config, shared_prefill=own)[0].logits[0] for own in (False, True))
    errors = [(each.log_softmax(-1) - expected).square().mean().sqrt() for each in (theirs, ours)]
    assert 0 < errors[1] <= 1.5 * errors[0]


@pytest.mark.parametrize(
    ("name", "dtype"),
    gpu_only(
        itertools.product(
            ["qwen2_5_vl", "qwen2_audio", "gemma3", "qwen3_5", "qwen3_vl_moe"], ["float32", "bfloat16", "autocast"]
        ),
        # On a CPU, `test_token_graph.py` has all families in float32
        ("qwen2_audio", "bfloat16"),
        ("gemma3", "autocast"),
    ),
)
def test_graph_generates_the_same_tokens(name, dtype, device, monkeypatch):
    """Rooms grow, windows slide, states change in place, and completions that have ended leave."""
    if name == "qwen3_5" and device == "cpu" and dtype != "float32":
        pytest.skip("its layers need float32 on a CPU")
    monkeypatch.setattr(generation, "ROOM", 16)
    model, tokenizer, rows = build(name)
    model.to(device, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    if dtype == "autocast":
        model.forward = in_autocast(model.forward, device)
    for ends in (20, 4):
        config = options(tokenizer, eos_token_id=list(range(30, 400, ends)), max_new_tokens=40)
        static = options(tokenizer, eos_token_id=config.eos_token_id, max_new_tokens=40, cache_implementation="static")
        expected, before = sample(model, rows, static)
        step = step_of(device)
        found, after = sample(model, rows, config, runner=step, casts_weights_once=dtype == "autocast")
        assert step.obstacle is None, step.obstacle
        assert torch.equal(found, expected) and torch.equal(after, before)


@NO_STAND_IN
@pytest.mark.parametrize("device", GPU_OR_CPU, indirect=True)
@torch.no_grad()  # as trainers sample: on some CPUs, bitsandbytes packs weights that sample, and adds biases in place
def test_graph_of_4_bits(device, tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    _, tokenizer, rows = build("qwen2_5_vl")
    model_class = save_wide("qwen2_5_vl", tmp_path)
    four = {"quantization_config": NF4, "dtype": torch.float32, "device_map": {"": device}}
    model = model_class.from_pretrained(tmp_path, **four)
    install_prefix_attention(model)
    static = options(tokenizer, cache_implementation="static")
    expected, _ = sample(model, rows, static)
    step = step_of(device)
    found, _ = sample(model, rows, options(tokenizer), runner=step)
    assert step.obstacle is None, step.obstacle
    assert torch.equal(found, expected)


@pytest.mark.parametrize("error", ["value", "python"])
def test_a_capture_that_fails_harms_nothing(error, device):
    """The generator draws, memory is freed, and another step is captured."""
    model, tokenizer, rows = build("qwen2_5_vl")
    expected, before = sample(model.to(device), rows, options(tokenizer, cache_implementation="static"))
    calls = 0

    def wait(module, args, output):
        nonlocal calls
        calls += 1
        if error == "value":
            return output * float(output.detach().isfinite().all())
        if calls == 3:  # of the prefill, of a step that runs as it is, and of the capture
            raise KeyError("of a hook")
        return output

    hook = model.get_decoder().layers[1].register_forward_hook(wait)
    step = step_of(device)
    found, after = sample(model, rows, options(tokenizer), runner=step)
    hook.remove()
    assert step.obstacle is not None and torch.equal(found, expected) and torch.equal(after, before)
    torch.rand(3, device=device)
    step = step_of(device)
    found, after = sample(model, rows, options(tokenizer), runner=step)
    assert step.obstacle is None and torch.equal(found, expected) and torch.equal(after, before)


@pytest.mark.usefixtures("freed")
@pytest.mark.parametrize("_", [pytest.param(0, marks=[*GPU, NO_STAND_IN])])
def test_memory_of_a_graph_is_free_afterwards(_):
    model, tokenizer, rows = build("qwen2_5_vl")
    model.to("cuda")

    def held():
        gc.collect()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    found = []
    for _ in range(4):
        step = runner_on(torch.device("cuda"))
        sample(model, rows, options(tokenizer, max_new_tokens=40), runner=step)
        assert step.obstacle is None
        del step
        found.append(held())
    assert found[1] == found[-1]


@pytest.mark.parametrize("graph", [False, True])
def test_waits(graph, device):
    """The host waits for every 16th token, and uploads nothing for a token."""
    fake_cuda = sys.modules.get("fake_cuda")
    if fake_cuda is None or device == "cpu":
        pytest.skip("counts on the stand-in for a GPU")
    model, tokenizer, rows = build("qwen2_5_vl")
    sample(model.to(device), rows, options(tokenizer))  # encodes the media
    totals = []
    for n in (16, 32):
        step = functools.partial(step_of, device) if graph else lambda: None
        with fake_cuda.watch() as watch:
            sample(model, rows, options(tokenizer, max_new_tokens=n, eos_token_id=None), runner=step())
        with fake_cuda.watch() as ended:
            config = options(tokenizer, max_new_tokens=n, min_new_tokens=n, eos_token_id=[30])
            sample(model, rows, config, runner=step())
        totals.append([sum(each.values()) for each in (watch.waits, watch.uploads, ended.waits, ended.uploads)])
    more = [b - a for a, b in zip(*totals, strict=True)]
    assert more == [0, 0, 1, 0], (more, ended.waits, ended.uploads)


@pytest.mark.parametrize(("name", "short"), [("qwen2_5_vl", 0), ("qwen2_5_vl", 64), ("gemma3", 0)])
def test_operations(name, short, device, monkeypatch):
    """A token takes at most half of the operations of `generate` outside of the layers, and no more in a layer."""
    fake_cuda = sys.modules.get("fake_cuda")
    if fake_cuda is None or device == "cpu":
        pytest.skip("counts on the stand-in for a GPU")
    monkeypatch.setattr(shared_cache, "SHORT_PROMPT", short)
    model, tokenizer, rows = build(name)

    @contextmanager
    def counting():
        with fake_cuda.watch() as watch:
            yield watch.operators

    counted = functools.partial(operations_of_a_token, model.to(device).bfloat16(), tokenizer, rows, counting, None)
    (outside, layers) = counted()
    (before, layers_before) = counted(shared_prefill=False)
    assert layers.total() <= layers_before.total(), (layers, layers_before)
    assert outside.total() <= 0.5 * before.total(), (outside, before)
