# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The loop that samples behind a cache draws what `generate` draws, with each prompt held once."""

import types
from collections import Counter
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from helpers.cuda_path import Counts
from helpers.encoding import build_encoded
from helpers.families import FAMILIES, MORE_FAMILIES
from helpers.marks import slow_but
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from trl_multimodal_rft.engines import token_loop
from trl_multimodal_rft.engines import transformers as generation
from trl_multimodal_rft.engines.transformers import Branches, generate_completions
from trl_multimodal_rft.forward import shared_cache as forward
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.masks import sharing_obstacle
from trl_multimodal_rft.forward.prompt_groups import split_samples
from trl_multimodal_rft.forward.shared_cache import Decoding
from trl_multimodal_rft.versions import cache_name


G = 4


def build(name):
    model, processor, prompts = build_encoded(name)
    model.config.get_text_config().output_router_logits = False  # `generate` fails with it on padded prompts
    install_prefix_attention(model)
    return model, processor.tokenizer, [prompt for prompt, _ in product(prompts, range(G))]


def options(tokenizer, **kwargs):
    """Many tokens end a completion, so that lengths differ."""
    defaults = {"max_new_tokens": 24, "do_sample": True, "eos_token_id": list(range(30, len(tokenizer), 20))}
    return GenerationConfig(
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=list(range(30)),
        disable_compile=True,
        **{**defaults, **kwargs},
    )


def sample(model, rows, config, **kwargs):
    """Returns completions, and the state of the generator behind them."""
    torch.manual_seed(1)
    unwrapped = model.get_base_model() if hasattr(model, "get_base_model") else model
    output = generate_completions(model, unwrapped, rows, config, config.pad_token_id, unwrapped.device, **kwargs)
    return output, (torch.cuda if unwrapped.device.type == "cuda" else torch).get_rng_state()


def assert_same(model, rows, config, **kwargs):
    """As `generate` on repeated prompts, without a cache of ours."""
    expected, before = sample(model, rows, config, shared_prefill=False)
    found, after = sample(model, rows, config, **kwargs)
    assert torch.equal(found, expected)
    assert torch.equal(after, before)
    return found


@pytest.fixture
def layouts(monkeypatch):
    """Layouts of the calls of the loop."""
    found = []
    decode = token_loop.decode

    def spy(*args, layout, **kwargs):
        found.append(layout)
        return decode(*args, layout=layout, **kwargs)

    monkeypatch.setattr(generation, "decode", spy)
    return found


@pytest.fixture(params=[0, 1000], ids=["shared", "copied"])
def short(request, monkeypatch):
    """Up to how many tokens prompts are copied to their completions."""
    monkeypatch.setattr(forward, "SHORT_PROMPT", request.param)
    return request.param


DEFAULT = ("qwen2_5_vl", "qwen2_audio", "gemma3", "qwen3_5", "gemma3n")
# Families with the decoder of another one: of Qwen2, LLaMA, Mistral, Qwen3.5 and GLM-4.1V. `test_families.py` samples
# from them
SAME_DECODER = {"audioflamingo3", "musicflamingo", "internvl", "llava_onevision", "ovis2"}
SAME_DECODER |= {"voxtral", "idefics3", "glmasr", "smolvlm", "deepseek_vl", "deepseek_vl_hybrid", "omniasr"}
SAME_DECODER |= {"mistral3", "minicpmv4_6", "glm46v"}
NAMES = [name for name in [*FAMILIES, *MORE_FAMILIES] if name not in SAME_DECODER]


@pytest.mark.parametrize("name", slow_but(NAMES, *DEFAULT))
def test_tokens_and_random_state_are_those_of_generate(name, layouts, monkeypatch):
    """
    Completions beyond rooms of three tokens, and gemma3's window of 8; prompts that are shared or copied, as those
    of llama4, in chunks, always are.
    """
    monkeypatch.setattr(forward, "ROOM", 3)
    model, tokenizer, prompts = build(name)
    for part in split_samples(prompts, "media"):
        rows = [prompts[i] for i in part]
        config = options(tokenizer, top_p=0.95, temperature=0.8)
        expected, before = sample(model, rows, config, shared_prefill=False)
        for short in (0, 1000):
            monkeypatch.setattr(forward, "SHORT_PROMPT", short)
            found, after = sample(model, rows, config)
            assert torch.equal(found, expected) and torch.equal(after, before)
    copies = name == "llama4" or sharing_obstacle(model) is not None  # as Qwen3.5 has before transformers 5.21
    assert all((layout is None) == copies for layout in layouts) and layouts


OPTIONS = {
    "greedy": {"do_sample": False},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "warpers": {"top_k": 9, "min_p": 0.01, "typical_p": 0.9, "temperature": 1.3},
    "words": {"bad_words_ids": [[40]], "sequence_bias": [[[50], 2.0]], "exponential_decay_length_penalty": (3, 1.1)},
    "forced": {"forced_eos_token_id": 30, "begin_suppress_tokens": [31, 32], "renormalize_logits": True},
    "no end": {"eos_token_id": None},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("more", [0, 1])
def test_options(name, more, layouts, monkeypatch):
    """With prompts of different lengths, as many completions of each, or one that has more: all are copied then."""
    monkeypatch.setattr(forward, "SHORT_PROMPT", 0)
    model, tokenizer, rows = build("qwen2_audio")
    rows += rows[-1:] * more
    assert_same(model, rows, options(tokenizer, **OPTIONS[name]))
    assert [layout.n_prompts for layout in layouts] == [1 if more else len(rows) // G]


@pytest.mark.parametrize("option", [{"num_beams": 2}, {"max_time": 60.0}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_generate_does_what_the_loop_does_not(option, layouts):
    model, tokenizer, rows = build("qwen2_audio")
    rows = rows[:1] if "prompt_lookup_num_tokens" in option else rows
    assert_same(model, rows, options(tokenizer, do_sample=False, **option))
    assert layouts == []


def test_adapters(layouts):
    model, tokenizer, rows = build("qwen2_5_vl")
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    plain = sample(model, rows, options(tokenizer))[0]
    adapted = assert_same(get_peft_model(model, lora), rows, options(tokenizer))
    assert len(layouts) == 2 and not torch.equal(adapted, plain)


@pytest.mark.parametrize("keeps", [False, True])
def test_one_wait_for_several_tokens(keeps, layouts, short, monkeypatch):
    """What was drawn behind the last end is taken back, from the generator and the cache."""
    monkeypatch.setitem(token_loop._TOKENS_PER_CHECK, "cpu", 16)
    model, tokenizer, rows = build("qwen2_5_vl")
    config = options(tokenizer, eos_token_id=list(range(30, 400, 4)), max_new_tokens=40)
    branches = Branches()
    found = assert_same(model, rows, config, branches=branches if keeps else None)
    assert found.size(1) % 16 and layouts[-1] is not None
    if keeps:
        cache = branches._stored[0]
        length = max(map(len, rows)) + found.size(1) - 1
        assert cache.get_seq_length() == length and {layer.join_prompts().keys.size(-2) for layer in cache.layers} == {
            length
        }


@torch.no_grad()
def test_logps_are_those_of_generate(layouts, short):
    model, tokenizer, rows = build("qwen2_5_vl")
    config = options(tokenizer, output_logits=True, return_dict_in_generate=True)

    def logps(own, dtype=None):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            return torch.stack(sample(model, rows, config, shared_prefill=own)[0].logits).float().log_softmax(-1)

    expected = logps(False)
    noise = (logps(False, torch.bfloat16)[0] - expected[0]).abs().max()
    assert 1e-3 < (logps(True, torch.bfloat16)[0] - expected[0]).abs().max() <= 1.5 * noise
    assert (logps(True) - expected).abs().max() <= 1e-5  # of tiny models with large logits
    model.double()
    assert (logps(True) - logps(False)).abs().max() <= 1e-6


@pytest.mark.parametrize("window", [None, 3, 6, 40])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention(window, softcap, has_sinks):
    """Against the formula in float64: a window, padding, soft caps and sinks."""
    generator = torch.Generator().manual_seed(0)
    n = 2
    group = 3
    heads = 4
    kv = 2
    p = 7
    c = 5
    d = 8
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    query = draw(n * group, heads, 1, d)
    key = draw(n * group, kv, c, d)
    value = draw(n * group, kv, c, d)
    prompt_key = draw(n, kv, p, d)
    prompt_value = draw(n, kv, p, d)
    sinks = draw(heads)
    gaps = torch.tensor([[1, 1, 0, 0, 0, 0, 0], [0] * 7]).bool()
    padding = torch.zeros(n, p, dtype=torch.float64).masked_fill(gaps, -1e30)[:, None, None]
    held = p if window is None else min(p, window - 1)
    layer = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    layer.keys, layer.values = (each[..., p - held :, :] for each in (prompt_key, prompt_value))
    layout = Decoding({0: layer}, padding)
    found = layout.attend(
        types.SimpleNamespace(layer_idx=0),
        query,
        *(each if window is None else each[..., -window:, :] for each in (key, value)),  # what the cache holds
        {"scaling": 0.3, "softcap": softcap, "s_aux": sinks if has_sinks else None},
    )
    keys, values = (
        torch.cat([a.repeat_interleave(group, 0), b], 2).repeat_interleave(heads // kv, 1)
        for a, b in ((prompt_key, key), (prompt_value, value))
    )
    scores = (query @ keys.mT) * 0.3
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores[..., :p].masked_fill_(gaps.repeat_interleave(group, 0)[:, None, None], -torch.inf)
    if window is not None:
        scores[..., : max(p + c - window, 0)] = -torch.inf
    if has_sinks:
        scores = torch.cat([scores, sinks.view(1, heads, 1, 1).expand(n * group, -1, -1, -1)], -1)
    expected = (scores.softmax(-1)[..., : p + c] @ values).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("group", [8, 64])
@pytest.mark.parametrize("length", [1358, 16000])
def test_memory_of_keys(group, length):
    """Prompts count once, and completions what they have, in rooms of 128 tokens at most."""
    heads = 2
    size = 4
    n = 10
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.zeros(1, heads, length, size), torch.zeros(1, heads, length, size), layer)
    layout = forward.share_prompts(cache, torch.ones(1, length), group)
    for _ in range(n):
        layout.advance()
        for layer in range(2):
            cache.update(torch.ones(group, heads, 1, size), torch.ones(group, heads, 1, size), layer)
    tensors = [each for layer in (*layout.shared.values(), *cache.layers) for each in (layer.keys, layer.values)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    rooms = 1 + forward.ROOM
    assert sum(storages.values()) <= 2 * 2 * heads * size * 4 * (length + forward.ROOM + group * rooms)
    assert cache.get_seq_length() == length + n


class Shapes(TorchDispatchMode):
    """Records operations with the shapes of their tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        shapes = [
            tuple(each.shape) for each in torch.utils._pytree.tree_leaves(args) if isinstance(each, torch.Tensor)
        ]
        self.calls.append((str(function), shapes))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["shared", "copied", "rows", "static"])
def test_processes_that_wait_for_each_other_run_more_steps(kind, first, monkeypatch):
    """All completions of this process end, with their `first` token or later, and those of another go on."""
    monkeypatch.setattr(forward, "SHORT_PROMPT", 1000 if kind == "copied" else 0)
    if kind == "rows":  # each with its own prompt
        monkeypatch.setattr(generation, "shares_prompts", lambda model: False)
    model, tokenizer, rows = build("qwen2_5_vl")
    ends = {"eos_token_id": [*range(len(tokenizer))]} if first else {}
    config = options(tokenizer, **ends)
    expected, before = sample(model, rows, config)
    asked = []

    def most(left, device):
        asked.append(left)
        return left or asked.count(0) < 4  # three more steps

    monkeypatch.setattr(token_loop, "_max_over_ranks", most)
    steps = []
    own = model.forward
    model.forward = lambda *args, **kwargs: steps.append(len(kwargs["input_ids"])) or own(*args, **kwargs)
    static = {"cache_implementation": "static"} if kind == "static" else {}
    found, after = sample(model, rows, options(tokenizer, **ends, **static), ranks_in_step=True)
    assert torch.equal(found, expected) and torch.equal(after, before)
    assert (expected.size(1) == 1) == first and len(steps) == 1 + expected.size(1) - 1 + 3


@pytest.mark.parametrize("name", slow_but(["qwen2_5_vl", "qwen3_5"], "qwen3_5"))
def test_static_form(name, layouts):
    """Each step runs the same operations on the same shapes, and the host waits for none of its values."""
    model, tokenizer, rows = build(name)
    obstacle = sharing_obstacle(model)
    if obstacle is not None:
        pytest.skip(obstacle)
    kwargs = {"output_logits": True, "return_dict_in_generate": True}
    expected, before = sample(model, rows, options(tokenizer, **kwargs))
    steps = []
    forward = model.forward

    def watched(*args, **kwargs):
        with Shapes() as shapes:
            output = forward(*args, **kwargs)
        steps.append(shapes.calls)
        return output

    model.forward = watched
    found, after = sample(model, rows, options(tokenizer, cache_implementation="static", **kwargs))
    assert torch.equal(found.sequences, expected.sequences) and torch.equal(after, before)
    for logits, others in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits, others, rtol=0, atol=1e-4)
    assert [layout.room for layout in layouts] == [0, 24]
    prefills = len(steps) - len(found.logits) + 1
    assert len(steps) > 10 and all(step == steps[prefills + 1] for step in steps[prefills + 1 :])
    assert not any("_local_scalar_dense" in name for name, _ in steps[-1])


@pytest.mark.slow
@torch.no_grad()
def test_static_form_compiles_once(layouts):
    """The step for the first token compiles; tokens after it reuse that, and are the same."""
    model, tokenizer, rows = build("qwen2_5_vl")
    endless = {"eos_token_id": None}  # completions that have ended leave, which is another shape
    expected, _ = sample(model, rows, options(tokenizer, **endless))
    counter = torch._dynamo.testing.CompileCounter()
    forward = model.forward
    frames = []
    compiled = torch.compile(forward, backend=counter, dynamic=False)

    def watched(*args, **kwargs):
        if kwargs[cache_name()].get_seq_length() == 0:
            return forward(*args, **kwargs)
        output = compiled(*args, **kwargs)
        frames.append(counter.frame_count)
        return output

    model.forward = watched
    config = options(tokenizer, cache_implementation="static", **endless)
    assert torch.equal(sample(model, rows, config)[0], expected)
    assert 0 < frames[0] == frames[-1] and len(frames) == expected.size(1) - 1 > 10


def operations_of_a_token(model, tokenizer, rows, counting, end, **kwargs):
    """Operations by name outside of the decoder's layers, and in them, as `counting()` counts them in its context."""
    totals = []
    for n in (8, 24):
        inside = Counter()
        hooks = []
        with counting() as counter:
            for layer in model.get_decoder().layers:
                hooks.append(layer.register_forward_pre_hook(lambda *_: inside.subtract(counter)))  # noqa: B023
                hooks.append(layer.register_forward_hook(lambda *_: inside.update(counter)))  # noqa: B023
            shortest = None if end is None else n
            config = options(tokenizer, max_new_tokens=n, min_new_tokens=shortest, eos_token_id=end)
            sample(model, rows, config, **kwargs)
        for hook in hooks:
            hook.remove()
        totals.append((counter - inside, inside))
    return [Counter({name: (b[name] - a[name]) / 16 for name in b}) for a, b in zip(*totals, strict=True)]


def test_operations_of_a_token(layouts, short, monkeypatch):
    """Outside of the decoder's layers, in them, and how often the host waits, with 16 tokens for a wait."""
    monkeypatch.setitem(token_loop._TOKENS_PER_CHECK, "cpu", 16)
    model, tokenizer, rows = build("qwen2_5_vl")

    @contextmanager
    def counting():
        with Counts() as counts:
            yield counts.operations

    outside, layers = operations_of_a_token(model, tokenizer, rows, counting, 30)
    before, layers_before = operations_of_a_token(model, tokenizer, rows, counting, 30, shared_prefill=False)
    waits = "_local_scalar_dense"
    assert outside.total() <= 0.5 * before.total() and outside[waits] <= 0.05 * before[waits]
    # A second attention, and what merges them, by views and three operations
    more = 0 if short else 5
    assert layers.total() <= layers_before.total() + more * len(model.get_decoder().layers)
