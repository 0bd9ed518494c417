# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Encoders compute each layer's attention in one call, and wait for no device: equal to transformers' own forward."""

import copy
import functools
import gc
import inspect
from contextlib import nullcontext

import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from helpers.cuda_path import Attentions, cuda_path
from helpers.encoding import build_encoded
from helpers.families import instantiate
from helpers.packed_rows import enable_checkpointing
from helpers.synthetic import FAMILIES as SYNTHETIC
from helpers.trainer_utils import PLAIN, image_rows, load
from torch import nn
from torch.nn.attention import varlen
from torch.utils._pytree import tree_leaves, tree_map
from trainers.supervised.test_sft import picture_rows

from trl_multimodal_rft import MultimodalSFTConfig, MultimodalSFTTrainer
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward import encoders, kernels, logprobs
from trl_multimodal_rft.forward.attention import original_attention
from trl_multimodal_rft.forward.encoders import install_encoder_attention, remember_on_host, to_model
from trl_multimodal_rft.forward.prompt_groups import split_samples
from trl_multimodal_rft.models.parts import freeze_as_built
from trl_multimodal_rft.rewards import format_reward


# Sizes of heads in released encoders, of images and of sounds
RELEASED = {
    "qwen2_vl": (80, 0),
    "qwen2_5_vl": (80, 0),
    "qwen3_vl": (72, 0),
    "qwen3_vl_moe": (72, 0),
    "qwen3_5": (72, 0),
    "glm4v": (128, 0),
    "qwen2_5_omni": (80, 64),
    "qwen3_omni_moe": (72, 64),
    "kimi_k25": (72, 0),
    "minicpmv4_6": (72, 0),
    "ernie4_5_vl_moe": (80, 0),
    "glm4v_moe": (128, 0),
    "glm46v": (128, 0),
}
HEADS = ("num_heads", "num_attention_heads", "encoder_attention_heads")
WIDTHS = ("embed_dim", "d_model", "hidden_size")
DEPTHS = ("depth", "num_hidden_layers", "encoder_layers")


def changed(model, processor, sizes, depth=2):
    """A model of the same family whose encoders have two heads of these sizes and this depth."""
    config = copy.deepcopy(model.config)
    for part, size in zip(("vision_config", "audio_config"), sizes, strict=True):
        if size:
            encoder = getattr(config, part)
            for names, value in ((HEADS, 2), (WIDTHS, 2 * size), (DEPTHS, depth)):
                setattr(encoder, next(name for name in names if name in encoder.to_dict()), value)
    if hasattr(config, "projection_hidden_size"):
        config.projection_hidden_size = 2 * sizes[0]
    return instantiate(type(model), config, processor)[0]


@functools.cache
def _released(name, depth=2):
    model, processor, prompts = build_encoded(name)
    return changed(model, processor, RELEASED[name], depth), prompts


def released(name, depth=2):
    """A model with heads of the released sizes, and the family's prompts: several media of different sizes."""
    model, prompts = _released(name, depth)
    return copy.deepcopy(model), prompts


def split_attentions(module):
    """Layers that attend within the sequences of a row."""
    parts = (part for part in module.modules() if "Attention" in type(part).__name__)
    return [part for part in parts if "cu_seqlens" in inspect.signature(part.forward).parameters]


def encoder_calls(model, prompts):
    """Name and arguments of each call of an encoder in a forward of the prompts."""
    calls = []
    handles = []
    seen = set(model.get_decoder().modules())
    for name, module in model.named_modules():
        takes_sizes = {"grid_thw", "feature_lens", "target_sizes"} & set(inspect.signature(module.forward).parameters)
        if takes_sizes and split_attentions(module) and seen.isdisjoint(module.modules()):
            seen |= set(module.modules())
            record = functools.partial(lambda name, module, *given: calls.append((name, *given[:2])), name)
            handles.append(module.register_forward_hook(record, with_kwargs=True))
    ids = torch.ones(len(prompts), 1, dtype=torch.long)
    for part in split_samples(prompts, family_of(model).isolate):
        inputs = logprobs._padded_batch(model, [prompts[i] for i in part], ids[part], ids[part]).inputs
        with torch.no_grad():
            model(**inputs, use_cache=False)
    for handle in handles:
        handle.remove()
    assert calls
    return calls


def run(model, calls):
    """Outputs of the calls, and gradients of an objective that weights every feature differently."""
    model.zero_grad(set_to_none=True)
    outputs = []
    for name, args, kwargs in calls:
        leaves = tree_leaves(dict(model.get_submodule(name)(*args, **kwargs)))
        outputs += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(output.shape, generator=generator).to(output.device) for output in outputs]
    sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True)).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [output.detach() for output in outputs], gradients


def assert_close(found, expected, tolerance=1e-5):
    for output, own in zip(found[0], expected[0], strict=True):
        assert (output - own).abs().max() <= tolerance * max(own.abs().max(), 1)
    largest = max(gradient.abs().max() for gradient in expected[1].values())
    assert found[1].keys() == expected[1].keys()
    for name, own in expected[1].items():
        assert (found[1][name] - own).abs().max() <= tolerance * largest, name


OTHERS = ("minicpmv4_7", "minicpm_ocr", "minimax_m3_vl")


@pytest.mark.parametrize("name", [*RELEASED, *OTHERS, "qwen2_5_vl, checkpointing", "qwen2_5_omni, checkpointing"])
def test_one_call_per_layer_equals_transformers(name, monkeypatch):
    checkpointing = "checkpointing" in name
    name = name.split(",")[0]
    model, prompts = SYNTHETIC[name]() if name in OTHERS else released(name)
    if not split_attentions(model):
        pytest.skip("its encoder masks other images in this version of transformers")
    calls = encoder_calls(model, prompts)
    expected = run(model, calls)

    install_encoder_attention(model)
    for output, own in zip(tree_leaves(run(model, calls)), tree_leaves(expected), strict=True):
        assert torch.equal(output, own)  # without a kernel, SDPA of each sequence as before

    if checkpointing:
        enable_checkpointing(model)
    with cuda_path(monkeypatch) as kernel:
        assert_close(run(model, calls), expected)
    layers = sum(len(split_attentions(model.get_submodule(name))) for name, *_ in calls)
    assert len(kernel.calls) == layers * (1 + checkpointing)
    if name in RELEASED:
        assert {size for size, *_ in kernel.calls} == {size for size in RELEASED[name] if size}
        assert {window for _, window, _ in kernel.calls} == {(-1, -1)}


def on_meta(calls):
    """Calls with tensors on a device that raises an error wherever a host would wait for a GPU."""
    return tree_map(lambda each: remember_on_host(each.to("meta"), each) if torch.is_tensor(each) else each, calls)


def without_data(query, *others, enable_gqa=False, **options):
    """The variable-length kernel on the device `meta`."""
    return query + others[0] + others[1]


@pytest.fixture
def meta(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # which doesn't know the device
    monkeypatch.setattr(varlen, "varlen_attn", without_data)
    monkeypatch.setattr(kernels, "has_varlen_kernel", lambda query: True)


@pytest.mark.parametrize("name", RELEASED)
def test_no_encoder_waits_for_its_device(name, meta):
    """Neither forward nor backward, in any layer or outside of them, with and without a kernel."""
    model, prompts = released(name)
    calls = on_meta(encoder_calls(model, prompts))
    install_encoder_attention(model.to("meta"))
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"), original_attention(model):
        run(model, calls)
    run(model, calls)


def test_sequences_without_a_kernel_wait_for_no_device(meta, monkeypatch):
    monkeypatch.setattr(kernels, "has_varlen_kernel", lambda query: False)
    model, prompts = released("qwen2_5_vl")
    calls = on_meta(encoder_calls(model, prompts))
    install_encoder_attention(model.to("meta"))
    run(model, calls)


@pytest.mark.parametrize("run", ["sft", "evaluate"])
def test_padded_training_and_evaluation_take_one_call_per_layer(run, tmp_path, monkeypatch):
    model, processor = load("qwen2_5_vl")
    with cuda_path(monkeypatch) as kernel:
        if run == "sft":
            args = MultimodalSFTConfig(str(tmp_path), **PLAIN)
            MultimodalSFTTrainer(model, args, train_dataset=picture_rows(), processing_class=processor).train()
        else:
            args = EvaluationConfig(max_completion_length=2)
            evaluate(model, processor, image_rows(), format_reward, args, accelerator=Accelerator(cpu=True))
    assert kernel.calls


def test_device_tensors_keep_their_copies_on_the_host():
    model, prompts = released("qwen2_5_vl")
    media = prompts[0].media
    moved = to_model(media, model, torch.device("meta"))
    assert encoders._on_host(moved["image_grid_thw"]) is media["image_grid_thw"]
    assert moved["pixel_values"] not in encoders._host_copies  # large
    size = len(encoders._host_copies)
    del moved
    gc.collect()
    assert len(encoders._host_copies) < size

    # The encoder gets the tensor itself, also through wrappers that move inputs
    received = []
    model.model.visual.register_forward_pre_hook(
        lambda module, args, kwargs: received.append(kwargs["grid_thw"]), with_kwargs=True
    )
    inputs = logprobs._padded_batch(model, prompts[:1], *[torch.ones(1, 1, dtype=torch.long)] * 2).inputs
    with torch.no_grad():
        model(**inputs)
    assert received[0] is inputs["image_grid_thw"]


def test_shapes_for_which_cudnn_makes_plans(meta, monkeypatch):
    """None of an encoder with a mini-batch of images, whose number varies."""
    model = build_encoded("gemma3")[0].to("meta")
    size = model.config.vision_config.image_size
    encoder = model.get_encoder(modality="image")
    install_encoder_attention(model)

    def shapes():
        with Attentions() as attentions, torch.no_grad():
            for n in range(1, 25):
                encoder(torch.empty(n, 3, size, size, device="meta"))
        return len(attentions.planned)

    assert shapes() == 0
    monkeypatch.setattr(kernels, "without_cudnn", nullcontext)
    assert shapes() == 24


def test_installation(tmp_path, monkeypatch):
    model, prompts = released("qwen2_5_omni")
    calls = encoder_calls(model, prompts)
    expected = run(model, calls)
    model.save_pretrained(tmp_path / "before")
    config = model.config.to_dict()
    for _ in range(2):
        install_encoder_attention(model)
    assert all(len(model.get_submodule(name)._forward_pre_hooks) == 1 for name, *_ in calls)
    model.save_pretrained(tmp_path / "after")
    assert model.config.to_dict() == config
    saved = [(tmp_path / folder / "config.json").read_text() for folder in ("before", "after")]
    assert saved[0] == saved[1] and "flash" not in saved[1]
    freeze_as_built(model)  # builds a model from the config

    copied = copy.deepcopy(model)
    with cuda_path(monkeypatch) as kernel:
        with original_attention(copied):
            assert_close(run(copied, calls), expected, tolerance=0)
        assert not kernel.calls
        assert_close(run(copied, calls), expected)
        assert kernel.calls


@pytest.mark.parametrize("name", RELEASED)
def test_autocast_gives_the_kernel_one_dtype(name, meta, monkeypatch):
    model, prompts = released(name)
    calls = encoder_calls(model, prompts)
    install_encoder_attention(model)
    monkeypatch.undo()

    def kernel(*states, **options):
        assert {each.dtype for each in states[:3]} == {torch.bfloat16}
        return states[0]

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(kernels, "has_varlen_kernel", lambda query: query.dtype == torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for each, args, kwargs in calls:
            model.get_submodule(each)(*args, **kwargs)


@pytest.mark.parametrize(
    "name",
    ["CohereCompassVision", "Exaone4_5_Vision", "MuseGlimmerVision", "MuseSparkVision", "PaddleOCRVision"]
    + ["VideoLlama3Vision"],
)
def test_encoders_alone(name, monkeypatch):
    """Of families without a model in the tests. Some need more than transformers precomputes."""
    if not hasattr(hf, f"{name}Config"):
        pytest.skip("not in this version of transformers")
    sizes = {"depth": 2, "num_hidden_layers": 2, "num_attention_heads": 2, "num_heads": 2, "hidden_size": 64}
    sizes |= {"num_key_value_heads": 1}
    config = getattr(hf, f"{name}Config")()
    for key, value in {**sizes, "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0]}.items():
        if hasattr(config, key):
            setattr(config, key, value)
    torch.manual_seed(0)
    encoder = getattr(hf, f"{name}Model")._from_config(config, attn_implementation="sdpa").eval()
    encoder.get_decoder = torch.nn.Module  # none
    weight = next(part.weight for part in encoder.modules() if isinstance(part, (nn.Linear, nn.Conv2d, nn.Conv3d)))
    grids = torch.tensor([[1, 8, 12], [1, 8, 8]])
    shape = weight.shape[1:] if weight.dim() == 4 else weight[0].flatten().shape
    kwargs = {"grid_thw": grids, "merge_sizes": torch.tensor([2, 2])}
    pixels = torch.randn(160, *shape)
    pixels = pixels[None] if name == "PaddleOCRVision" else pixels
    names = inspect.signature(encoder.forward).parameters
    calls = [("", (pixels,), {key: value for key, value in kwargs.items() if key in names})]
    expected = run(encoder, calls)
    install_encoder_attention(encoder)
    with cuda_path(monkeypatch) as kernel:
        assert_close(run(encoder, calls), expected)
    assert len(kernel.calls) == 2


def test_attention_without_cudnn_compiles_in_one_graph():
    def attend(states):
        with kernels.without_cudnn():
            return torch.nn.functional.scaled_dot_product_attention(states, states, states)

    states = torch.randn(1, 2, 8, 16)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert torch.equal(compiled(states), attend(states))
