# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sampling from a graph of the step of a token: what a replay would miss, and the same tokens."""

import pytest
import torch
from engines.test_token_loop import SAME_DECODER, build, options, sample
from helpers.families import FAMILIES, MORE_FAMILIES
from helpers.marks import slow_but
from helpers.recorded_step import RecordedStep
from helpers.trainer_utils import AS_SHIPPED, image_rows, load, make_trainer
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.engines import token_loop
from trl_multimodal_rft.engines import transformers as generation
from trl_multimodal_rft.engines.token_loop import weights_cast_once
from trl_multimodal_rft.engines.transformers import Branches, shares_prompts
from trl_multimodal_rft.forward.masks import sharing_obstacle
from trl_multimodal_rft.forward.prompt_groups import split_samples


DEFAULT = ("qwen2_5_vl", "gemma3", "qwen3_5")
# LLaMA 4 shares no prompts
FAMILY_NAMES = [name for name in [*FAMILIES, *MORE_FAMILIES] if name not in SAME_DECODER | {"llama4"}]


@pytest.fixture
def recorded(monkeypatch):
    """Captures on the CPU, in rooms of 5, 10, ... tokens. Returns the steps."""
    monkeypatch.setitem(token_loop.STEPS, "cpu", RecordedStep)
    monkeypatch.setattr(generation, "ROOM", 5)
    monkeypatch.setattr(RecordedStep, "instances", [])
    return RecordedStep.instances


def sampled(model, rows, config, **kwargs):
    """Returns what a graph samples, and the step."""
    step = RecordedStep(torch.device("cpu"))
    return *sample(model, rows, config, runner=step, **kwargs), step


@pytest.mark.parametrize("name", slow_but(FAMILY_NAMES, *DEFAULT))
def test_tokens_and_random_state_are_those_without_a_graph(name, recorded):
    """Rooms grow, windows slide, and completions that have ended leave."""
    model, tokenizer, prompts = build(name)
    if sharing_obstacle(model) is not None or not shares_prompts(model):
        pytest.skip("prompts aren't shared")
    for part in split_samples(prompts, "media"):
        rows = [prompts[i] for i in part]
        config = options(tokenizer, top_p=0.95, temperature=0.8, min_new_tokens=8)  # for two rooms
        expected, before = sample(model, rows, config)
        found, after, step = sampled(model, rows, config)
        assert torch.equal(found, expected) and torch.equal(after, before)
        assert step.obstacle is None and 2 <= step.captures < step.replays


def test_tokens_behind_a_room_are_those_of_one_that_holds_all(recorded, monkeypatch):
    model, tokenizer, rows = build("gemma3")
    config = options(tokenizer, eos_token_id=None, max_new_tokens=33, do_sample=False)
    found, _, step = sampled(model, rows, config)
    assert step.captures == 4  # of rooms of 5, 10, 20 and 33 tokens
    monkeypatch.setattr(generation, "ROOM", 1000)
    assert torch.equal(sampled(model, rows, config)[0], found)
    assert torch.equal(sample(model, rows, config)[0], found)


def test_completions_leave_and_the_rest_is_captured_anew(recorded):
    model, tokenizer, rows = build("qwen2_5_vl")
    config = options(tokenizer, eos_token_id=list(range(30, 400, 9)), max_new_tokens=40)
    expected, _ = sample(model, rows, config)
    sizes = []
    forward = model.forward

    def watched(*args, input_ids=None, **kwargs):
        sizes.append(len(input_ids))
        return forward(*args, input_ids=input_ids, **kwargs)

    model.forward = watched
    found, _, _ = sampled(model, rows, config)
    assert torch.equal(found, expected)
    assert sizes[-1] <= len(rows) // 2 < len(rows) in sizes


def test_logits_are_those_of_each_token(recorded):
    """A replay overwrites those of the token before."""
    model, tokenizer, rows = build("qwen2_audio")
    config = options(tokenizer, output_logits=True, output_scores=True, return_dict_in_generate=True)
    expected, _ = sample(model, rows, config)
    found, _, step = sampled(model, rows, config)
    assert step.replays > 5
    for name in ("logits", "scores"):
        torch.testing.assert_close(torch.stack(found[name]), torch.stack(expected[name]), rtol=0, atol=1e-4)


def test_a_cache_is_continued(recorded):
    """As after the result of a tool: the cache holds what the graph wrote."""
    model, tokenizer, rows = build("qwen2_5_vl")
    config = options(tokenizer, max_new_tokens=12)
    kept = {}
    for runs in (None, RecordedStep(torch.device("cpu"))):
        branches = Branches()
        ids, _ = sample(model, rows, config, branches=branches, runner=runs)
        cache = branches._stored[0]
        whole = [layer.join_prompts() for layer in cache.layers]
        kept[runs is None] = ids, [(layer.keys, layer.values) for layer in whole]
    assert torch.equal(kept[True][0], kept[False][0])
    torch.testing.assert_close(kept[True][1], kept[False][1], rtol=0, atol=1e-5)


def test_adapters(recorded):
    model, tokenizer, rows = build("qwen2_5_vl")
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    expected, _ = sample(adapted, rows, options(tokenizer))
    found, _, step = sampled(adapted, rows, options(tokenizer))
    assert torch.equal(found, expected) and step.replays > 5


def test_a_step_that_waits_for_a_value_runs_as_it_is(recorded):
    model, tokenizer, rows = build("qwen2_5_vl")
    expected, before = sample(model, rows, options(tokenizer))
    hook = (
        model.get_decoder()
        .layers[1]
        .register_forward_hook(lambda module, inputs, output: output * float(1 + 0 * inputs[0].detach().sum()))
    )
    found, after, step = sampled(model, rows, options(tokenizer))
    hook.remove()
    assert torch.equal(found, expected) and torch.equal(after, before)
    assert "not permitted" in step.obstacle and step.replays == 0


@pytest.mark.parametrize("what", ["number", "address", "shape", "random"])
def test_what_a_replay_would_miss_is_found(what):
    """The guard of these tests."""
    n = 0
    kept = torch.zeros(2)

    def step():
        nonlocal n, kept
        n += 1
        if what == "number":
            return kept + n
        if what == "address":
            kept = kept + 1
            return kept * 2
        if what == "shape":
            return torch.ones(n) * 2
        return torch.rand(2)

    run = RecordedStep(torch.device("cpu"))
    run(step)
    with pytest.raises(AssertionError):
        for _ in range(3):
            run(step)
            assert run.obstacle is None


class Casts(TorchDispatchMode):
    """Counts casts of weights."""

    def __init__(self, model):
        super().__init__()
        self.addresses = {each.data_ptr() for each in model.parameters()}
        self.n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default:
            self.n += args[0].data_ptr() in self.addresses
        return function(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("trains", [True, False])
def test_weights_are_cast_once(trains):
    """Frozen ones, too, as below adapters; with the same logits, and nothing is held afterwards."""
    model, tokenizer, rows = build("qwen2_5_vl")
    model.requires_grad_(trains)
    forward = model.forward
    found = {}

    def in_autocast(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*args, **kwargs)

    model.forward = in_autocast
    for once in (False, True):
        counts = []
        for n in (4, 16):
            config = options(
                tokenizer, max_new_tokens=n, eos_token_id=None, output_logits=True, return_dict_in_generate=True
            )
            with Casts(model) as casts:
                output = sample(model, rows, config, casts_weights_once=once)[0]
            counts.append(casts.n)
        found[once] = counts[1] - counts[0], torch.stack(output.logits)
        assert not torch.is_autocast_enabled("cpu") and all(
            each.requires_grad == trains for each in model.parameters()
        )
    assert found[False][0] >= 12 * 7 * len(model.get_decoder().layers) and found[True][0] == 0
    assert torch.equal(found[True][1], found[False][1])
    with weights_cast_once(model), Casts(model) as casts:
        model(torch.ones(1, 4, dtype=torch.long))
        first = casts.n
        model(torch.ones(1, 4, dtype=torch.long))
    assert casts.n == first
    with Casts(model) as casts:
        model(torch.ones(1, 4, dtype=torch.long))
    assert casts.n == first


def train(tmp_path, caplog, **kwargs):
    model, processor = load("qwen2_5_vl")
    objects = {"model": model, "processing_class": processor}
    trainer = make_trainer(
        MultimodalGRPOTrainer, None, image_rows(), tmp_path, objects=objects, **AS_SHIPPED, max_steps=1, **kwargs
    )
    trainer.train()
    return trainer


def test_training_samples_from_a_graph(recorded, tmp_path, caplog):
    trainer = train(tmp_path, caplog, max_completion_length=12)
    assert trainer.checks.self_check.sampled < 1e-4 and trainer._policy.fallbacks.graph
    assert all(step.captures and step.obstacle is None for step in recorded) and len(recorded) >= 2


def test_disable_compile_turns_it_off(recorded, tmp_path, caplog):
    trainer = train(tmp_path, caplog, generation_kwargs={"disable_compile": True})
    assert recorded == [] and not trainer._policy.fallbacks.graph


def test_a_resumed_run_goes_by_its_options(recorded, tmp_path, caplog):
    trainer = train(tmp_path, caplog)
    state = trainer.checks.state_dict()
    assert state["fallbacks"]["graph"]
    for graph in (True, False):
        trainer._policy.fallbacks.graph = graph
        trainer.checks.load_state_dict(state)
        assert trainer._policy.fallbacks.graph == graph


def test_a_graph_that_is_wrong_is_found_by_the_self_check(recorded, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(RecordedStep, "replay", lambda self: None)  # the logits of the token before
    trainer = train(tmp_path, caplog, max_completion_length=12)
    assert "sampling from a graph of the device differs" in caplog.text
    assert not trainer._policy.fallbacks.graph and trainer._policy.fallbacks.shared_prefill


def test_a_capture_that_fails_says_why_once(recorded, tmp_path, caplog, monkeypatch):
    def fail(self, step):
        raise RuntimeError("no capture of this step\nmore")

    monkeypatch.setattr(RecordedStep, "capture", fail)
    trainer = train(tmp_path, caplog, max_completion_length=12)
    lines = [record.message for record in caplog.records if "without a graph" in record.message]
    assert len(lines) == 1 and lines[0].endswith("of the device: no capture of this step")
    assert not trainer._policy.fallbacks.graph and len(recorded) == 1
