# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Packed equals padded for every family: log-probabilities, entropies, gradients, masks and layouts."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from helpers.completions import G, random_completions
from helpers.cuda_path import cuda_path
from helpers.encoding import encode_chats
from helpers.families import ALL_FAMILIES, FAMILIES, ONE_OF_EACH_KIND
from helpers.marks import slow_but
from helpers.packed_rows import backward, build, enable_checkpointing, padded_reference
from helpers.trainer_utils import InjectedOurs, image_rows, make_trainer, relative_difference, run
from torch.nn.attention import varlen
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import EncodedPrompt, encode_prompt
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward import attention, layout
from trl_multimodal_rft.forward import logprobs as forward
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.head import add_fused_head
from trl_multimodal_rft.forward.layout import pack, packed_length
from trl_multimodal_rft.forward.logprobs import completion_scores
from trl_multimodal_rft.forward.masks import linear_masks
from trl_multimodal_rft.forward.partition import micro_batch_order
from trl_multimodal_rft.forward.prompt_groups import group_by_prompt, split_samples
from trl_multimodal_rft.forward.scores import ScoreRequest, Scores
from trl_multimodal_rft.policy import Fallbacks, PolicyForward


# Attention sinks run eagerly
WITHOUT_KERNELS = {"llava_gpt_oss"}


def assert_packed_equals_padded(model, prompts, packing=nullcontext):
    """Returns what `packing()` yields, with which rows are packed."""
    ids, mask = random_completions(len(prompts))
    logps, entropies, grads = padded_reference(model, prompts, ids, mask)
    with packing() as entered:
        packed = completion_scores(model, model, ScoreRequest(prompts, ids, mask, isolate=family_of(model).isolate))
        packed_grads = backward(model, packed.logps, packed.entropies, mask)
    assert (packed.logps - logps * mask).abs().max() <= 1e-5
    assert (packed.entropies - entropies * mask).abs().max() <= 1e-5
    assert relative_difference(grads, packed_grads) <= 1e-5
    return entered


MODES = ["eager", "checkpointing", "cuda"]


def in_modes(names):
    """Returns each name with one mode, by turns, but one family of each kind with all."""
    kept = [(name, mode) for name in names if name in ONE_OF_EACH_KIND for mode in MODES]
    others = [(name, MODES[i % 3]) for i, name in enumerate(names) if name not in ONE_OF_EACH_KIND]
    return slow_but(kept + others, *kept)


@pytest.mark.parametrize(("name", "mode"), in_modes(FAMILIES))
def test_packed_equals_padded(name, mode, monkeypatch):
    """`test_families.test_by_name` compares packed rows with the model, with sdpa and without checkpointing."""
    if (name, mode) == ("phi4_multimodal", "eager"):
        pytest.skip("its vision tower has no working eager attention in transformers 5.23")
    model, prompts = build(name, "eager" if mode == "eager" else "sdpa")
    if mode == "checkpointing":
        if not model.supports_gradient_checkpointing or name == "granite_speech":
            pytest.skip("the family does not support gradient checkpointing")
        enable_checkpointing(model)
    on_cuda = partial(cuda_path, monkeypatch)
    kernel = assert_packed_equals_padded(model, prompts, on_cuda if mode == "cuda" else nullcontext)
    assert kernel is None or bool(kernel.calls) == (name not in WITHOUT_KERNELS)


def test_images_of_one_shape_but_several_sizes():
    """Phi-4's processor pads them, and the features of one depend on the sizes of the others in the batch."""
    model, processor = FAMILIES["phi4_multimodal"].build()
    add_fused_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    install_prefix_attention(model.eval())
    prompts = [encode_prompt(row["prompt"], processor, model) for row in rows_to_messages(list(image_rows(6)))]
    shapes = [tuple(prompt.media["image_pixel_values"].shape) for prompt in prompts]
    assert shapes[1] == shapes[2] and shapes[0] == shapes[3] == shapes[4]
    ids = torch.randint(50, 200, (6, 4), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together, alone = (
            completion_scores(model, model, ScoreRequest(prompts, ids, torch.ones_like(ids), isolate=isolate)).logps
            for isolate in ("media", "prompt")
        )
    assert (together - alone).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_omni_moe", "glm4v_moe"])
def test_load_balancing_loss(name):
    """The loss and the gradient of packed rows, of padded ones and of parts equal the model's for padded rows."""
    model, prompts = build(name)
    prompts = [*prompts[:G], *[prompt for prompt in prompts if not prompt.media][:G]]
    ids, mask = random_completions(len(prompts))
    mask[1] = 0
    batch = forward._padded_batch(model, prompts, ids, mask)
    kinds = [
        model(**batch.inputs, output_router_logits=True).aux_loss,
        *(
            PolicyForward(fallbacks=Fallbacks(**fallbacks))
            .score(model, ScoreRequest(prompts, ids, mask, packed=packed, compute_aux_loss=True))
            .aux_loss
            for packed, fallbacks in product((True, False), ({}, {"logits_from_model": True}, {"isolate": "prompt"}))
        ),
    ]
    gradients = []
    for loss in kinds:
        model.zero_grad()
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert kinds[0] > 0 and any("gate" in name and value.any() for name, value in gradients[0].items())
    for loss, gradient in zip(kinds[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, kinds[0])
        assert relative_difference({name: gradient[name] for name in gradients[0]}, gradient) <= 1e-5
        assert relative_difference(gradients[0], gradient) <= 1e-5


@pytest.mark.parametrize("max_tokens", [None, 60])
@pytest.mark.parametrize("packing", [True, False])
def test_a_request_is_packed_if_the_policy_packs(packing, max_tokens, monkeypatch):
    """So is one for supervised completions; without a policy, rows are packed."""
    model, prompts = build("qwen2_audio")
    (ids, mask) = random_completions(len(prompts))
    used = set()
    for name in ("_packed_batch", "_padded_batch"):
        batch = getattr(forward, name)
        monkeypatch.setattr(forward, name, lambda *a, _n=name, _b=batch, **more: used.add(_n) or _b(*a, **more))
    policy = PolicyForward(fallbacks=Fallbacks(packing=packing), max_tokens=max_tokens)
    request = ScoreRequest(prompts, ids, mask)
    with torch.no_grad():
        policy.score(model, replace(request, supervised=request))
        assert used == {"_packed_batch" if packing else "_padded_batch"}
        used.clear()
        policy.score(model, request, fallbacks=Fallbacks(packing=not packing))
        assert used == {"_padded_batch" if packing else "_packed_batch"}
        used.clear()
        policy.score(model, replace(request, packed=False))
        assert used == {"_padded_batch"}
        used.clear()
        completion_scores(model, model, request)
    assert used == {"_packed_batch"}


def test_rows_of_scores_stay_together():
    numbers = torch.arange(12.0).reshape(4, 3)
    scores = Scores(logps=numbers, values=-numbers, router=torch.full((2, 4), 2.0))
    places = [[2, 0], [3], [1]]
    parts = [scores.rows(own) for own in places]
    parts[1].supervised = torch.ones(7, 5)
    parts[2].router = None
    joined = Scores.join(parts, places)
    assert joined.logps.equal(numbers) and joined.values.equal(-numbers) and joined.entropies is None
    assert joined.router.equal(2 * scores.router) and joined.supervised is parts[1].supervised
    chosen = joined.rows(slice(2))
    assert chosen.values.equal(-numbers[:2]) and chosen.supervised.shape == (7, 5)
    assert chosen.router.equal(joined.router)
    with pytest.raises(ValueError, match="different shapes"):
        Scores(logps=numbers, values=numbers[:3])


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("name", ["qwen2_audio", "gemma3"])
def test_masked_completions_take_no_tokens(name, cuda, monkeypatch):
    model, prompts = build(name)
    ids, mask = random_completions(len(prompts))
    expected = completion_scores(model, model, ScoreRequest(prompts, ids, mask)).logps
    mask[1] = mask[3:6] = 0
    row = pack(prompts, ids, mask, [linear_masks(model, p, 7) for p in group_by_prompt(prompts)])
    assert row.input_ids.size(1) == packed_length(prompts, mask.sum(1).tolist())
    with cuda_path(monkeypatch) if cuda else nullcontext():
        scores = completion_scores(model, model, ScoreRequest(prompts, ids, mask))
        assert (scores.logps - expected * mask).abs().max() <= 1e-5
        assert not scores.logps[mask == 0].any() and not scores.entropies[mask == 0].any()
        mask[:] = 0
        scores = completion_scores(model, model, ScoreRequest(prompts, ids, mask))
        scores.logps.sum().backward()
    assert not scores.logps.any()


def text_prompts(sizes):
    return [EncodedPrompt(torch.arange(n), {}, {}, torch.arange(n)[None]) for n in sizes]


def lengths_to_mask(lengths):
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def held_masks(layout):
    """Returns the bytes of a layout without indices, each storage once."""
    storages = {}
    seen = set()
    todo = [layout]
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor) and value.dtype not in (torch.int64, torch.int32):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif id(value) not in seen:
            seen.add(id(value))
            todo += value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
            todo += value if isinstance(value, (list, tuple)) else []
    return sum(storages.values())


@pytest.fixture
def layouts(monkeypatch):
    """Records the layouts of all rows packed from here on."""
    seen = []
    original = forward.pack

    def spy(*args, **kwargs):
        row = original(*args, **kwargs)
        seen.append(row.layout)
        return row

    monkeypatch.setattr(forward, "pack", spy)
    return seen


@pytest.mark.parametrize("entries", [0, layout.MASK_ENTRIES])
@pytest.mark.parametrize("tril", [False, True])
@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ([40, 41, 41, 48, 57, 1, 3, 120], [5, 17, 9, 16, 1, 8, 20, 33]),
        ([3, 120], [90, 2]),
    ],
)
def test_masks_by_definition(sizes, lengths, entries, tril, monkeypatch):
    """Covers prompts together and isolated, of odd lengths, with None or a causal mask."""
    monkeypatch.setattr(layout, "MASK_ENTRIES", entries)
    prompts = [prompt for prompt, _ in product(text_prompts(sizes), range(2))]
    mask = lengths_to_mask([n for length in lengths for n in (length, max(length - 4, 0))])
    whole = torch.tensor([[0, i + 1] for i in range(160)]) if tril else None
    row = pack(prompts, torch.ones_like(mask), mask, [{None: whole}] * len(sizes))
    segments = {start: (prompt, shared) for start, _, prompt, shared in row.layout.segments}
    n_branches = 0
    for block in row.layout.blocks:
        for is_causal in (True, False):
            attended = [row.layout.prompts(block, None, torch.float32, is_causal)]
            assert (attended[0][2] is None) == (is_causal and not tril)
            if len(block.branch_index):
                attended.append(row.layout.branches(block, None, torch.float32))
            for queries, keys, masks in attended:
                if masks is None:
                    continue
                # Requirements of kernels
                assert masks.stride(-1) == 1
                assert not any(n % 16 for n in (masks.storage_offset(), *masks.stride()[:-1]))
                for own, query, key in zip(masks.expand(len(queries), 1, -1, -1), queries.tolist(), keys, strict=True):
                    start = query[0]
                    prompt, shared = segments[start]
                    for token, seen in zip(sorted(set(query)), own[0], strict=False):
                        expected = [*range(prompt, prompt + shared), *range(start, token + 1)]
                        assert key[seen == 0].tolist() == expected
                    assert (own == 0).any(-1).all()  # padding attends to something, too
            n_branches += len(block.branch_index)
    assert n_branches == 2 * int((mask.sum(1) > 0).sum())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "paligemma"])
def test_prompts_in_calls_of_their_own(name, attention, monkeypatch):
    """This applies to prompts whose joint masks would be large."""
    monkeypatch.setattr(layout, "MASK_ENTRIES", 0)
    assert_packed_equals_padded(*build(name, attention))


def test_kernels_without_masks_have_none_built(layouts, monkeypatch):
    model, prompts = build("qwen2_5_vl")
    ids, mask = random_completions(len(prompts))
    expected = completion_scores(model, model, ScoreRequest(prompts, ids, mask)).logps
    assert held_masks(layouts[0]) > 0
    with cuda_path(monkeypatch) as kernel, monkeypatch.context() as patch:

        def kernel_before_2_13(*args, scale=None, window_size=None):
            return kernel(*args, scale=scale, window_size=window_size, enable_gqa=True)

        for each in (kernel, kernel_before_2_13):
            patch.setattr(varlen, "varlen_attn", each)
            logps = completion_scores(model, model, ScoreRequest(prompts, ids, mask)).logps
            assert (logps - expected).abs().max() <= 1e-5
            assert held_masks(layouts[-1]) == 0


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_one_mask_for_the_branches_of_a_prompt(name, checkpointing, layouts):
    """All layers share it, also in the backward pass. Where attention is plain causal, all prompts share one mask."""
    model, _ = build(name)
    processor = FAMILIES[name].build()[1]
    if checkpointing:
        enable_checkpointing(model)
    chats = [[{"role": "user", "content": [{"type": "text", "text": "up " * n}]}] for n in (100, 108, 116)]
    prompts = [prompt for prompt, _ in product(encode_chats(model, processor, chats), range(4))]
    sizes = [len(prompt) for prompt in group_by_prompt(prompts)]
    ids, mask = random_completions(len(prompts), 240)
    longest = int(mask.sum(1).max())
    logps = completion_scores(model, model, ScoreRequest(prompts, ids, mask)).logps
    held = held_masks(layouts[0])
    text = model.config.get_text_config()
    rows = longest * text.num_attention_heads // text.num_key_value_heads  # a query for each head that shares a key
    if name == "qwen2_5_vl":
        limit = 4 * rows * (max(sizes) + longest)
    else:  # in sliding and full layers, with the model's boolean masks
        limit = sum(2 * (4 * (n * n + rows * (n + longest)) + (n + 240) ** 2) for n in sizes)
    assert 0 < held < 1.1 * limit
    logps.sum().backward()
    assert len(layouts) == 1 and held_masks(layouts[0]) == held


@pytest.mark.parametrize("name", ["qwen2_audio", "gemma3", "llava_gpt_oss"])
def test_flash_attention_keeps_its_name(name, monkeypatch):
    """
    Transformers loads flash kernels by name. Layers without a kernel run on sdpa: without a GPU, all do; those with
    sinks run eagerly.
    """
    model, prompts = build(name)
    ids, mask = random_completions(len(prompts))
    expected = completion_scores(model, model, ScoreRequest(prompts, ids, mask)).logps
    model, prompts = build(name)
    monkeypatch.setattr(attention, "_WRAPPED", set())
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", None)
    model.get_decoder().config._attn_implementation_internal = "flash_attention_2"
    for _ in range(2):
        install_prefix_attention(model)
        assert model.get_decoder().config._attn_implementation == "flash_attention_2"
    logps = completion_scores(model, model, ScoreRequest(prompts, ids, mask)).logps
    assert (logps - expected).abs().max() <= 1e-5


def test_autocast_gives_attention_one_dtype(monkeypatch):
    model, prompts = build("qwen2_5_vl")
    ids, mask = random_completions(len(prompts))
    seen = set()
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def spy(module, query, key, value, *args, **kwargs):
        if module.__class__.__name__ == "Qwen2_5_VLAttention":
            seen.add((query.dtype, key.dtype, value.dtype))
        return sdpa(module, query, key, value, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", spy)
    with torch.autocast("cpu", torch.bfloat16):
        completion_scores(model, model, ScoreRequest(prompts, ids, mask))
    assert seen == {(torch.bfloat16,) * 3}


def test_without_a_layout_attention_is_unchanged():
    model, processor = FAMILIES["gemma3"].build()
    inputs = processor.apply_chat_template(
        [FAMILIES["gemma3"].prompts()[0]], tokenize=True, return_dict=True, return_tensors="pt"
    )
    for base in ("sdpa", "eager"):
        changed = copy.deepcopy(model)
        for m in (model, changed):
            m.get_decoder().set_attn_implementation(base)
        install_prefix_attention(changed)
        assert changed.get_decoder().config._attn_implementation == f"prefix_shared_{base}"
        assert torch.equal(model(**inputs).logits, changed(**inputs).logits)
    assert "prefix_shared" not in changed.config.to_json_string()


def test_split_samples():
    model, prompts = build("granite_speech")
    assert split_samples(prompts, None) == [list(range(len(prompts)))]
    assert [len(part) for part in split_samples(prompts, "prompt")] == [G] * (len(prompts) // G)
    parts = split_samples(prompts, "media")
    assert sorted(i for part in parts for i in part) == list(range(len(prompts)))
    for part in parts:
        shapes = {tuple(v.shape[1:]) for i in part for v in prompts[i].media.values() if v.dim() == 3}
        assert len(shapes) <= 1
        assert all(i in part for i in range(len(prompts)) if any(prompts[i] is prompts[j] for j in part))


def test_micro_batches_keep_groups_and_balance():
    _, prompts = build("qwen2_5_vl")
    prompts = prompts[: 4 * G]
    lengths = [40, 1, 1, 1, 1, 1, 2, 2, 2, 30, 1, 1]
    order = micro_batch_order(prompts, lengths, 2)
    assert sorted(order) == list(range(12))
    halves = [order[:6], order[6:]]
    for half in halves:
        assert len({id(prompts[i]) for i in half}) == 2
    loads = [packed_length([prompts[i] for i in half], [lengths[i] for i in half]) for half in halves]
    naive = [packed_length(prompts[i : i + 6], lengths[i : i + 6]) for i in (0, 6)]
    assert max(loads) <= max(naive)
    # 5 samples a batch can't hold two groups of 3: the buffer still places all samples, and splits one group
    order = micro_batch_order(prompts[:9] + prompts[9:10], lengths[:10], 2)
    assert sorted(order) == list(range(10))


@pytest.mark.gate  # flex attention compiles its masks
@pytest.mark.filterwarnings("ignore:_compile flag")
def test_attention_sinks():
    """Flex attention supports them only on a GPU, packed rows do everywhere."""
    updates = []
    for implementation in ("eager", "flex_attention"):
        model, processor = ALL_FAMILIES["llava_gpt_oss"].build()
        model.set_attn_implementation({"text_config": implementation})
        objects = {"model": model, "processing_class": processor}
        options = {"objects": objects, "self_check": False, "packing": "prefix", "max_steps": 1}
        result = run(InjectedOurs, None, image_rows(), **options)
        assert all(result.trainer.scored_packed)
        updates.append({name: value for name, value in result.update.items() if value.any()})
    assert any("sinks" in name for name in updates[0])
    assert relative_difference(*updates) <= 1e-5


def test_attention_that_ignores_sinks_is_refused(tmp_path):
    model, processor = ALL_FAMILIES["llava_gpt_oss"].build()
    model.get_decoder().config._attn_implementation = "sdpa"
    objects = {"model": model, "processing_class": processor}
    with pytest.raises(ValueError, match="GptOssModel has attention sinks, which sdpa ignores; load .*'eager'"):
        make_trainer(InjectedOurs, None, image_rows(), tmp_path, objects=objects)
