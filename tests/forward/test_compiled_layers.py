# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Compiled layers compute what others do, with one set of graphs for all layers and lengths."""

import copy
import re

import pytest
import torch
from accelerate.utils import DynamoBackend
from engines.test_token_loop import build as build_for_sampling
from engines.test_token_loop import options, sample
from helpers.completions import random_completions
from helpers.marks import slow_but
from helpers.packed_rows import backward, build, enable_checkpointing
from helpers.trainer_utils import InjectedOurs, image_rows, make_trainer, norm, relative_difference, run
from peft import LoraConfig
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func

from trl_multimodal_rft import MultimodalSFTConfig
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward.compiled import compile_layers
from trl_multimodal_rft.forward.logprobs import completion_scores
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.trainers.base.preparation import compile_options


# Dynamo hides the warning in a way that an error precedes
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

# By family, graphs of encoder and decoder: two around attention, and more for layers of two kinds, or where the
# modeling file ends a graph
GRAPHS = {"qwen2_audio": 4, "gemma3": 5, "qwen3_vl_moe": 4, "llava": 6, "qwen3_5": 6}


@pytest.fixture(autouse=True)
def without_graphs():
    """Forgets graphs of other tests."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(model, backend, report=None):
    counter = CompileCounterWithBackend(backend)
    # The C++ compiler takes 20 CPU seconds for the graphs of an encoder, and as many for those of a decoder
    part = model.get_decoder() if backend == "inductor" else model
    compile_layers(part, {"backend": counter, "dynamic": True}, report or pytest.fail)
    return counter


def scored(model, prompts, seed, packed=True):
    """Returns log-probabilities and gradients of completions whose lengths depend on the seed."""
    ids, mask = random_completions(len(prompts), seed=seed)
    scores = completion_scores(
        model, model, ScoreRequest(prompts, ids, mask, isolate=family_of(model).isolate, packed=packed)
    )
    return scores.logps.detach() * mask, backward(model, scores.logps, scores.entropies, mask)


def assert_equal(actual, expected):
    (logps, gradients) = actual
    (expected_logps, expected_gradients) = expected
    # 1e-6 is the distance of two numbers around 8 in float32
    assert (logps - expected_logps).abs().max() <= 1e-6 * expected_logps.abs().max().clamp(min=1)
    assert gradients.keys() == expected_gradients.keys()
    assert norm(expected_gradients) > 0 and relative_difference(expected_gradients, gradients) <= 1e-6


@pytest.mark.parametrize(
    ("family", "backend"),
    slow_but(
        # All backends get the same graphs. `test_checkpoints_are_outside_of_graphs` has those of Qwen2.5-VL.
        [("qwen2_audio", "aot_eager"), ("qwen2_audio", "inductor"), *((name, "eager") for name in [*GRAPHS][1:])],
        ("qwen2_audio", "aot_eager"),
    ),
)
def test_scores_and_gradients_are_equal(family, backend):
    """No length needs another graph, names of weights stay, and a copy runs its own weights."""
    model, prompts = build(family)
    expected = [scored(model, prompts, seed) for seed in range(3)]
    names = list(model.state_dict())
    reported = []
    counter = compiled(model, backend, reported.append)
    counts = []
    for seed in range(3):
        assert_equal(scored(model, prompts, seed), expected[seed])
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] <= GRAPHS[family] <= 8, counts
    assert [*model.state_dict()] == names
    assert all("CLIPEncoderLayer" in line for line in reported) and bool(reported) == (family == "llava")
    other = copy.deepcopy(model)
    with torch.no_grad():
        [weight.zero_() for weight in model.parameters()]
    assert_equal(scored(other, prompts, 0), expected[0])


@pytest.mark.slow
def test_checkpoints_are_outside_of_graphs():
    """Layers run again in the backward pass, compiled, in packed rows and in padded ones."""
    model, prompts = build("qwen2_5_vl")
    enable_checkpointing(model)
    expected = [scored(model, prompts, 0, packed) for packed in (True, False)]
    counter = compiled(model, "eager")
    for packed, each in zip((True, False), expected, strict=True):
        assert_equal(scored(model, prompts, 0, packed), each)
    assert 4 <= counter.frame_count <= 8


@pytest.mark.parametrize(("family", "most"), [pytest.param("qwen3_5", 10, marks=pytest.mark.slow)])
def test_samples_the_same_tokens(family, most):
    """Neither a layer nor a token needs another graph behind a cache."""
    model, tokenizer, rows = build_for_sampling(family)
    config = options(tokenizer)
    (expected, state) = sample(model, rows, config)
    counts = []
    counter = compiled(model, "eager")
    for _ in range(2):
        drawn, left = sample(model, rows, config)
        assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(drawn, expected, strict=True))
        assert torch.equal(left, state)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] <= most, counts


@pytest.mark.slow
def test_reports_what_ends_a_graph():
    """One line names a class of layers, and why."""
    model, prompts = build("qwen2_audio")
    layer = model.get_decoder().layers[0].mlp
    layer.register_forward_hook(lambda module, args, output: output * output.isfinite().all().item())
    reported = []
    compiled(model, "eager", reported.append)
    scored(model, prompts, 0)
    (line,) = reported
    assert "Qwen2DecoderLayer" in line and "item" in line


def broken_for(n_graphs):
    """Returns a backend that fails after some graphs."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        if len(graphs) > n_graphs:
            raise RuntimeError("No working C++ compiler\nat some length")
        return graph.forward

    return backend


@pytest.mark.parametrize("n_graphs", [0, 1, 3])
def test_without_a_compiler_layers_go_on_uncompiled(n_graphs, caplog):
    """One line says so, whether it fails before attention or behind, in the encoder or in the decoder."""
    model, prompts = build("qwen2_audio")
    expected = [scored(model, prompts, seed) for seed in range(2)]
    reported = []
    compile_layers(model, {"backend": broken_for(n_graphs), "dynamic": True}, reported.append)
    for seed in range(2):
        assert_equal(scored(model, prompts, seed), expected[seed])
    (line,) = reported
    assert line.startswith("`torch_compile` failed, and the run goes on uncompiled: ")
    assert line.endswith("RuntimeError: No working C++ compiler") and "Traceback" not in caplog.text


def test_layers_that_fail_with_a_cache_fill_it_once():
    model, tokenizer, rows = build_for_sampling("qwen2_5_vl")
    config = options(tokenizer)
    (expected, _) = sample(model, rows, config)
    reported = []
    compile_layers(model.get_decoder(), {"backend": broken_for(1), "dynamic": True}, reported.append)
    drawn, _ = sample(model, rows, config)
    assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(drawn, expected, strict=True))
    assert len(reported) == 1


def test_graphs_of_the_backward_pass_that_fail_go_on_uncompiled_too():
    """They are compiled before the loss is differentiated, also where no length is saved for them."""

    def fails(graph, inputs):
        raise RuntimeError("no graph")

    model, prompts = build("qwen2_audio")
    expected = scored(model, prompts, 0)
    reported = []
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=fails)
    compile_layers(model.get_decoder(), {"backend": backend, "dynamic": False}, reported.append)
    assert_equal(scored(model, prompts, 0), expected)
    assert len(reported) == 1


@pytest.mark.parametrize("option", ["torch_compile_backend", "torch_compile_mode"])
def test_names_that_torch_does_not_have_are_errors_with_the_option(option, tmp_path):
    with pytest.raises(ValueError, match=f"`{option}`.*nosuch") as raised:
        make_trainer(InjectedOurs, "qwen2_5_vl", image_rows(), tmp_path, torch_compile=True, **{option: "nosuch"})
    assert "eager" in str(raised.value) or "max-autotune" in str(raised.value)


@pytest.mark.slow
def test_trains_the_same():
    """The trainer compiles layers and not the model, here below an adapter; without one, on two ranks."""
    objects = {"peft_config": LoraConfig(target_modules="all-linear", r=4)}
    given = {"use_cpu": True, "learning_rate": 1e-1, "self_check": False, "objects": objects}
    plain = run(InjectedOurs, "qwen2_5_vl", image_rows(), **given)
    ours = run(InjectedOurs, "qwen2_5_vl", image_rows(), **given, torch_compile_backend="eager")
    assert norm(plain.update) > 0 and relative_difference(plain.update, ours.update) <= 1e-5
    assert ours.trainer.accelerator.state.dynamo_plugin.backend == DynamoBackend.NO
    assert ours.trainer.args.torch_compile_backend == "eager"
    assert sum(hasattr(each, "is_compiled") for each in ours.trainer.model.modules()) == 4


def test_options_are_those_of_transformers_and_of_accelerate(monkeypatch):
    assert compile_options(None, None) is None
    expected = {"backend": "inductor", "mode": "max-autotune", "dynamic": True, "fullgraph": False}
    assert compile_options("inductor", "max-autotune").items() >= expected.items()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    assert compile_options(None, None)["backend"] == "aot_eager"


def test_liger_names_the_remedy(tmp_path, caplog):
    config = MultimodalSFTConfig(str(tmp_path), use_cpu=True, bf16=False, use_liger_kernel=True)
    assert re.search("`use_liger_kernel=True` has no effect here: .*`torch_compile=True`", caplog.text)
    assert config.use_liger_kernel is False
