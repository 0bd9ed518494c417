# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The memory model agrees with runs, published sizes and arithmetic; the benchmark of the token budget runs."""

import json
from dataclasses import replace

import memory_model
import pytest
import token_budget
import torch
from helpers.families import FAMILIES
from memory_model import CASES, LiveBytes, Prompt, Setup, anatomy, meta_model, predict, published_config
from transformers import Qwen2_5_VLForConditionalGeneration


# Parameters of the published models, https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct and so on
PUBLISHED = {"3b": 3_754_622_976, "7b": 8_292_166_656, "32b": 33_452_718_336}


def body(size, lora=None):
    return anatomy(meta_model(published_config(size), Qwen2_5_VLForConditionalGeneration, lora))


def counted_by_hand(vocabulary, hidden, mlp, layers, heads, key_heads, vision_mlp, tied):
    key = hidden // heads * key_heads
    attention = 2 * hidden * hidden + hidden + 2 * (hidden * key + key)
    decoder = layers * (attention + 3 * hidden * mlp + 2 * hidden) + hidden
    wide = 1280
    block = 4 * wide * wide + 4 * wide + 3 * wide * vision_mlp + 2 * vision_mlp + wide + 2 * wide
    merger = wide + 4 * wide * 4 * wide + 4 * wide + 4 * wide * hidden + hidden
    vision = 3 * 2 * 14 * 14 * wide + 32 * block + merger
    return vocabulary * hidden * (1 if tied else 2) + decoder + vision


@pytest.mark.parametrize("size", PUBLISHED)
def test_parameters(size):
    text, vision_mlp, tied = memory_model.SIZES[size]
    read = body(size)
    assert read.n_parameters == PUBLISHED[size] == counted_by_hand(*text, vision_mlp, tied)
    assert (read.decoder.n_layers, read.decoder.mlp, read.tied) == (text[3], text[2], tied)
    assert (read.encoders["image"].n_layers, read.encoders["image"].mlp) == (32, vision_mlp)


def test_adapters():
    text, _, _ = memory_model.SIZES["7b"]
    hidden, layers, key = text[1], text[3], 512
    read = body("7b", "q_proj,v_proj")
    assert read.n_trained == layers * 16 * (hidden + hidden + hidden + key)
    assert read.n_parameters == PUBLISHED["7b"] + read.n_trained
    assert read.adapted and not read.encoders["image"].trained


@pytest.mark.parametrize(
    ("strategy", "bytes_per_parameter"),
    [
        ("single", 16),
        ("ddp", 16),
        ("zero1", 2 + 2 + 12 / 8),
        ("zero2", 2 + 2 / 8 + 12 / 8),
        ("zero3", 16 / 8),
        ("fsdp2", 16 / 8),
    ],
)
def test_states(strategy, bytes_per_parameter):
    setup = Setup([Prompt(10)] * 2, [5, 5], precision="mixed", strategy=strategy, gpus=8)
    result = predict(body("3b"), setup)
    states = result["weights"] + result["gradients"] + result["optimizer"]
    assert states == pytest.approx(bytes_per_parameter * PUBLISHED["3b"], rel=1e-6)
    assert result["peak"] > states + result["buffers"]


def test_sharing_and_budget():
    read, prompts = body("3b"), [Prompt(1000), Prompt(1000)]
    setup = Setup([prompt for prompt in prompts for _ in range(4)], [100] * 8, checkpointing=False)
    held = memory_model.activations(read, setup).held
    # Tokens: 2 x (1000 + 4 x 100) against 8 x 1100
    padded = memory_model.activations(read, replace(setup, packed=False)).held
    assert 2.5 < padded / held < 8800 / 2800 * 1.2
    half = memory_model.activations(read, replace(setup, max_tokens=1400)).held
    assert half == pytest.approx(held / 2, rel=0.01)
    once, again = (memory_model.operations(read, replace(setup, max_tokens=m)) for m in (None, 1400))
    assert again["update"] == pytest.approx(once["update"] + once["forward"])


def test_live_bytes():
    outside = torch.ones(1000)
    with LiveBytes() as live:
        made = outside + 1
        view = made.view(10, 100)
        made *= 2
        assert live.now == 4000
        del made
        assert live.now == 4000 and view.sum() == 4000
        del view
        assert live.now == 0 and live.peak >= 4000
        weight = torch.ones(1000, requires_grad=True)
        saved = weight.sigmoid().sigmoid().sum()  # both outputs are kept
        assert live.now == 3 * 4000 + 4
        saved.backward()
    assert live.now == 2 * 4000 + 4  # the weight, its gradient and the sum


def assert_close(result, activations=0.05, peak=0.1):
    for quantity in ("gradients", "optimizer", "cache"):
        predicted, measured = result[quantity]
        assert predicted == measured > 0
    for quantity, tolerance in (("weights", 1e-5), ("activations", activations), ("peak", peak), ("operations", 0.05)):
        if quantity in result:
            predicted, measured = result[quantity]
            assert predicted == pytest.approx(measured, rel=tolerance), quantity


def test_check(capsys):
    result = memory_model.main(["--check", "--cases", "packed, checkpointing", "--json"])
    output = capsys.readouterr().out.splitlines()
    assert json.loads(output[-1])["cases"].keys() == result.keys()
    assert_close(result["packed, checkpointing"])
    assert output[-2].startswith("| packed, checkpointing | exact | exact | exact | exact |")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_cases(case):
    assert_close(memory_model.check(CASES[case]))


def test_other_layers_are_refused():
    model = FAMILIES["qwen3_vl_moe"].build()[0]
    with pytest.raises(ValueError, match="Qwen3VLMoeTextModel"):
        anatomy(meta_model(model.config, type(model)))


def test_breakdown_of_a_folder(tmp_path, capsys):
    model = FAMILIES["qwen2_audio"].build()[0]
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    memory_model.main(["--model", str(tmp_path), "--modality", "audio", "--lora", "all-linear"])
    output = capsys.readouterr().out
    assert "not measured on a GPU" in output and "| peak |" in output
    with pytest.raises(SystemExit):
        memory_model.main(["--model", "3b", "--quantized"])


def test_token_budget(capsys):
    threads = str(torch.get_num_threads())
    arguments = ["--preset", "tiny", "--prompts", "2", "--group", "4", "--budgets", "600", "--repeats", "1"]
    token_budget.main([*arguments, "--threads", threads, "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    whole, parts = result["budgets"]
    assert (whole["parts"], parts["parts"]) == (1, 2)
    assert 0 < parts["held_ratio"] < 0.9 and 0 < parts["peak_ratio"] < 0.9 and parts["cpu_s"] > 0
    assert parts["gradient_difference"] < 1e-4
