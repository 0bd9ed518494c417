# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Stateful layers start each completion from the state after its prompt, with gradients."""

import copy
import itertools
from itertools import product

import pytest
import torch
import transformers as hf
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from helpers.completions import G, random_completions
from helpers.encoding import encode_chats
from helpers.families import SPECIAL
from helpers.marks import slow_but
from helpers.packed_rows import backward
from helpers.synthetic import own_logps
from helpers.trainer_utils import InjectedOurs, image_rows, norm, relative_difference, run, text_rows
from peft import LoraConfig

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer
from trl_multimodal_rft.encoding.prompts import EncodedPrompt
from trl_multimodal_rft.forward import states
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.head import add_fused_head
from trl_multimodal_rft.forward.layout import pack
from trl_multimodal_rft.forward.logprobs import completion_scores
from trl_multimodal_rft.forward.masks import sharing_obstacle
from trl_multimodal_rft.forward.scores import ScoreRequest


pytestmark = pytest.mark.skipif(
    not hasattr(hf.Cache, "get_conv_state"), reason="before transformers 5.21, no state can be given to a layer"
)


HYBRIDS = ["qwen3_5_deep", "qwen3_5_moe", "lfm2_vl"]
every_hybrid = pytest.mark.parametrize("name", HYBRIDS)


def build(name):
    """Returns completions of prompts with media of several kinds and sizes, of text, and of a single token."""
    model, processor = SPECIAL[name].build()
    add_fused_head(model, outputs=("log_probs", "entropy"))
    prompts = [*encode_chats(model, processor, SPECIAL[name].prompts()), *text_prompts([1])]
    ids, mask = random_completions(len(prompts) * G)
    mask[1] = mask[3:6] = 0  # masks one completion, and all of the second prompt
    mask[2] = torch.arange(7) < 1
    mask[6] = torch.arange(7) < 2
    return model, [prompt for prompt, _ in product(prompts, range(G))], ids * mask, mask


def text_prompts(sizes):
    return [EncodedPrompt(60 + torch.arange(n), {}, {}, torch.arange(n)[None]) for n in sizes]


@pytest.mark.parametrize(
    ("name", "mode"),
    slow_but(
        itertools.product(HYBRIDS, ["sdpa", "eager", "checkpointing"]),
        ("qwen3_5_deep", "checkpointing"),
        ("qwen3_5_moe", "eager"),
        ("lfm2_vl", "sdpa"),
    ),
)
def test_packed_equals_the_plain_forward_of_each_completion(name, mode):
    model, prompts, ids, mask = build(name)
    if mode == "eager":
        model.get_decoder().set_attn_implementation("eager")
    expected = own_logps(model, prompts, ids, mask)
    expected_gradients = backward(model, expected)
    assert sharing_obstacle(model) is None
    install_prefix_attention(model)
    assert torch.equal(own_logps(model, prompts, ids, mask), expected)  # there is no layout
    if mode == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    logps = completion_scores(model, model, ScoreRequest(prompts, ids, mask)).logps
    assert (logps - expected).abs().max() <= 1e-5
    assert relative_difference(expected_gradients, backward(model, logps)) <= 1e-5
    with torch.no_grad():
        padded = completion_scores(model, model, ScoreRequest(prompts, ids, mask, packed=False)).logps
    assert (logps - padded).abs().max() <= 1e-4  # padding on the left alone changes it


@every_hybrid
def test_long_completions_are_no_further_off_than_padded_rows(name):
    """Kernels process a row in chunks, which padding on the left shifts, and rounding grows with the length."""
    model, prompts, _, _ = build(name)
    prompts = prompts[:-G]
    install_prefix_attention(model)
    ids, mask = random_completions(len(prompts), longest=150)
    with torch.no_grad():
        expected = own_logps(model, prompts, ids, mask)
        packed, padded = (
            (completion_scores(model, model, ScoreRequest(prompts, ids, mask, packed=packed)).logps - expected)
            .abs()
            .max()
            for packed in (True, False)
        )
    assert packed <= max(1e-5, 2 * padded)


@every_hybrid
def test_a_copy_runs_its_own_weights(name):
    model, prompts, ids, mask = build(name)
    install_prefix_attention(model)
    logps = completion_scores(model, model, ScoreRequest(prompts, ids, mask)).logps
    other = copy.deepcopy(model)
    with torch.no_grad():
        for mixer in states._mixers(other):
            mixer.out_proj.weight.zero_()
        assert torch.equal(completion_scores(model, model, ScoreRequest(prompts, ids, mask)).logps, logps)
        assert (completion_scores(other, other, ScoreRequest(prompts, ids, mask)).logps - logps).abs().max() > 0.1


@pytest.mark.parametrize(
    ("sizes", "lengths"), [([4, 1, 3], [2, 0, 5, 0, 0, 1, 1, 2, 3]), ([1], [1, 0, 1]), ([3, 3], [0] * 6)]
)
def test_continued_by_definition(sizes, lengths):
    """Two batches hold each token, a prompt's last one with its completions, and no state covers padding."""
    unique = text_prompts(sizes)
    prompts = [prompt for prompt, _ in product(unique, range(3))]
    mask = (torch.arange(max(1, *lengths)) < torch.tensor(lengths)[:, None]).long()
    row = pack(prompts, torch.full_like(mask, 9), mask, [{None: None}] * len(sizes))
    layout = row.layout.state_layout
    n_tokens = row.input_ids.size(1)
    starts = [start for start, _, prompt, _ in row.layout.segments if start == prompt]
    prompt_mask = torch.ones_like(layout.prompt_index) if layout.prompt_mask is None else layout.prompt_mask
    assert (layout.prompt_mask is None) == (len(set(sizes)) == 1 and sizes[0] > 1)
    for start, prompt, index, seen in zip(starts, unique, layout.prompt_index, prompt_mask, strict=True):
        assert index[seen.bool()].tolist() == [*range(start, start + len(prompt) - 1)]
        assert seen.tolist() == sorted(seen.tolist())  # padded on the left
    assert layout.branch_index.size(1) >= 2
    owned = layout.prompt_of_branch.tolist()
    assert owned == sorted(owned) and set(owned) == set(range(len(sizes)))
    # Each position of both batches has the row's contents there
    tokens = row.input_ids[0]
    both = torch.cat([tokens[layout.prompt_index].flatten(), tokens[layout.branch_index].flatten()])
    assert torch.equal(both[layout.restore_index], tokens)
    assert len(set(layout.restore_index.tolist())) >= n_tokens - len(sizes)
    branches = [segment for segment in row.layout.segments if segment[0] != segment[2]]
    n_bare = len(sizes) - len({prompt for _, _, prompt, _ in branches})
    assert len(layout.branch_index) == len(branches) + n_bare


def test_obstacles():
    model = build("qwen3_5_deep")[0]
    mixer = states._mixers(model)[0]
    assert len(states._mixers(model)) == 3

    model.config.get_text_config().layer_types[0] = "full_attention"
    assert "3 modules keep a state for 2 layers" in sharing_obstacle(model)
    model.config.get_text_config().layer_types[0] = "hybrid"
    assert "layers of type hybrid" in sharing_obstacle(model)
    model.config.get_text_config().layer_types[0] = "linear_attention"
    assert sharing_obstacle(model) is None
    install_prefix_attention(model)
    assert sharing_obstacle(model) is None
    add_hook_to_module(mixer, AlignDevicesHook(io_same_device=True))
    assert "is replaced" in sharing_obstacle(model)


def test_mamba_1_forgets_its_state():
    config = hf.JambaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
    )
    assert "JambaMambaMixer starts from no given state" in sharing_obstacle(hf.JambaForCausalLM(config))


@pytest.mark.parametrize(
    ("name", "trainer_class"),
    slow_but(
        [*((name, MultimodalGRPOTrainer) for name in HYBRIDS), ("qwen3_5_deep", MultimodalPPOTrainer)],
        ("qwen3_5_moe", MultimodalGRPOTrainer),
        ("qwen3_5_deep", MultimodalPPOTrainer),
    ),
)
def test_trains_packed(name, trainer_class):
    """Covers sampling and the self-check, which must pass."""
    result = run(trainer_class, name, image_rows(), max_steps=1, per_device_train_batch_size=8, self_check=True)
    check = result.trainer.checks.self_check
    trainer = result.trainer
    assert max(check.packed, check.sampled, check.rows) <= 1e-4
    assert trainer._policy.fallbacks.packing and trainer._policy.fallbacks.shared_prefill
    assert result.history[0]["packing/shared_frac"] == 0.75
    assert norm(result.update) > 1e-4


@pytest.mark.parametrize(
    ("name", "rows"),
    slow_but(
        [*((name, image_rows) for name in HYBRIDS), ("qwen3_5_deep", text_rows)],
        ("lfm2_vl", image_rows),
        ("qwen3_5_deep", text_rows),
    ),
)
def test_trainer_updates_as_padded(name, rows):
    """Covers LoRA on the mixers, checkpointing, a reference and parts of a token budget."""
    options = {
        "objects": {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)},
        "gradient_checkpointing": True,
        "max_tokens_per_microbatch": 150,
        "max_steps": 1,
        "beta": 0.1,
        "self_check": False,
        "learning_rate": 1.0,
    }
    updates = []
    for packing in ("prefix", "padded"):
        torch.manual_seed(0)  # for the adapter
        result = run(InjectedOurs, name, rows(), packing=packing, **copy.deepcopy(options))
        assert set(result.trainer.scored_packed) == {packing == "prefix"}
        updates.append({key: value for key, value in result.update.items() if value.any()})
    packed, padded = updates
    assert any("out_proj" in key for key in packed) and norm(packed) > 0.01
    assert relative_difference(padded, packed) <= 1e-4
