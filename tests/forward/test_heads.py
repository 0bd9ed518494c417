# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scores use the model's logits, including its operations before and after the LM head."""

import copy
import math
from itertools import product

import pytest
import torch
from helpers.collectives import Gathered
from helpers.encoding import encode_chats
from helpers.families import FAMILIES, SPECIAL, encode
from helpers.packed_rows import backward
from helpers.synthetic import FAMILIES as SYNTHETIC
from helpers.synthetic import own_logps
from helpers.trainer_utils import image_rows, length_and_sum
from peft import LoraConfig, get_peft_model
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import WhisperConfig
from trl.trainer.utils import add_fused_lm_head

from trl_multimodal_rft import ActorVL, MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.forward import head
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.head import HeadRule, add_fused_head, head_rule
from trl_multimodal_rft.forward.masks import sharing_obstacle
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.models.wrapped import replaced
from trl_multimodal_rft.policy import Fallbacks, PolicyForward


TEMPERATURE = 0.7

# Operations of each model, whatever their names in the config
RULES = {
    "aya_vision": HeadRule(),
    "chameleon": None,  # omits image tokens
    "cohere2_vision": HeadRule(),
    "gemma3": HeadRule(),  # although the config has a soft cap
    "gemma4": HeadRule(softcap=8.0),
    "granite_speech_scaled": HeadRule(),
    "inkling": HeadRule(scale=0.25),
    "llava_next_granite": HeadRule(),
}


def build(name):
    family = FAMILIES.get(name) or SPECIAL[name]
    model, processor = family.build()
    if name.startswith("gemma"):
        model.config.text_config.final_logit_softcapping = 8.0
    return model, processor, family.prompts()[:2]


@pytest.mark.parametrize("name", RULES)
def test_scores_are_those_of_the_models_own_logits(name):
    model, processor, chats = build(name)
    ids = torch.randint(60, 200, (4, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 5, [1] * 3 + [0] * 2, [1] * 4 + [0], [1] * 5])
    prompts = [prompt for prompt, _ in product(encode_chats(model, processor, chats), range(2))]
    expected = own_logps(model, prompts, ids, mask, TEMPERATURE)
    expected_gradients = backward(model, expected)

    assert head_rule(model) == RULES[name]
    before = copy.deepcopy(model.config)
    has_head = add_fused_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    assert has_head == (RULES[name] is not None) and model.config.to_dict() == before.to_dict()
    packing = sharing_obstacle(model) is None
    if packing:
        install_prefix_attention(model)
    isolate = "media" if name == "granite_speech_scaled" else None
    policy = PolicyForward(
        fallbacks=Fallbacks(isolate=isolate, logits_from_model=not has_head), temperature=TEMPERATURE
    )
    for packed in {False, packing}:
        scores = policy.score(model, ScoreRequest(prompts, ids, mask, packed=packed))
        torch.testing.assert_close(scores.logps, expected.detach(), rtol=0, atol=2e-5)
        assert scores.entropies.isfinite().all()
        for key, gradient in backward(model, scores.logps).items():
            scale = max(1.0, expected_gradients[key].abs().max().item())  # of rounding
            torch.testing.assert_close(gradient, expected_gradients[key], rtol=1e-4, atol=1e-4 * scale, msg=key)


def test_trainers_score_policy_and_reference_by_the_rule(tmp_path, monkeypatch):
    """TRL's constructor adds its head to a policy, and to a reference that it loads."""
    for name, logits_from_model in (("cohere2_vision", False), ("chameleon", True)):
        model, processor, _ = build(name)
        if not logits_from_model:
            model = str(SPECIAL[name].save(tmp_path / name))
        args = MultimodalGRPOConfig(
            output_dir=str(tmp_path / "run"),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=6,
            max_steps=1,
            beta=0.1 if not logits_from_model else 0.0,
            temperature=TEMPERATURE,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
        )
        options = {"args": args, "train_dataset": image_rows(4), "processing_class": processor}
        run = MultimodalGRPOTrainer(model, length_and_sum, **options)
        assert run._policy.fallbacks.logits_from_model == logits_from_model
        run.train()
        check = run.checks.self_check
        assert check.fallbacks == run._policy.fallbacks and check.fallbacks.logits_from_model == logits_from_model
        assert max(check.padded, check.packed, check.sampled) < 1e-4
        history = {key: value for entry in run.state.log_history for key, value in entry.items()}
        assert math.isfinite(history["entropy"]) and abs(history.get("kl", 0.0)) < 1e-6


@pytest.mark.parametrize("name", ["chameleon", "cohere2_vision"])
def test_actors_score_by_the_rule(name):
    model, processor, chats = build(name)
    inputs = encode(processor, chats[0])
    ids = torch.randint(60, 200, (1, 5), generator=torch.Generator().manual_seed(0))
    prompts = encode_chats(model, processor, chats[:1])
    expected = own_logps(model, prompts, ids, torch.ones_like(ids), TEMPERATURE).detach()
    actor = ActorVL(model, bf16=False, temperature=TEMPERATURE, packing_samples=True)
    media = {key: value for key, value in inputs.items() if key not in ("input_ids", "attention_mask")}
    sequences = torch.cat([inputs["input_ids"], ids], dim=1)
    for packed in ({}, {"packed_seq_lens": [sequences.size(1)]}):
        logps = actor(sequences, 5 if not packed else [5], **packed, **media)
        torch.testing.assert_close(logps.detach(), expected, rtol=0, atol=2e-5)


def test_a_model_without_a_base_model_scores_by_the_states_of_its_decoder():
    """Llama 4 has its encoder, its decoder and the head side by side."""
    model, _ = SYNTHETIC["llama4"]()
    assert model.base_model is model and head_rule(model) == HeadRule()
    ids = torch.arange(20, 30)[None]
    expected = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).flatten()
    expected_gradients = backward(model, expected)
    assert add_fused_head(model)
    scored = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.flatten()
    torch.testing.assert_close(scored, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(backward(model, scored), expected_gradients, rtol=1e-4, atol=1e-4)
    masked = model(input_ids=ids, labels=ids.masked_fill(ids < 25, -100), fused_lm_head=True).log_probs.flatten()
    assert torch.equal(masked, torch.where(ids[0, 1:] < 25, 0, scored))
    assert model(input_ids=ids).logits.size(-1) == model.get_output_embeddings().out_features  # the head is back


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.:UserWarning")  # of older versions of PEFT
def test_an_adapter_of_the_head_is_not_left_out():
    model, _, _ = build("llava_next_granite")
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["lm_head"]))
    assert head_rule(adapted.get_base_model()) is None
    whole = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    assert head_rule(whole.get_base_model()) == HeadRule()


def test_a_copy_scores_by_its_own_weights():
    """As of a model that a first trainer trained, and a second gets with a copy as its reference."""
    model, processor, chats = build("qwen2_vl")
    for _ in range(2):
        add_fused_lm_head(model)  # which TRL's trainers have done before
        assert add_fused_head(model)
    other = copy.deepcopy(model)
    inputs = encode(processor, chats[0])
    with torch.no_grad():
        other.get_decoder().layers[0].mlp.down_proj.weight.mul_(3)
        plain, moved = (each(**inputs).logits for each in (model, other))
        scored = other(**inputs, labels=inputs["input_ids"], fused_lm_head=True).log_probs
    assert (plain - moved).abs().max() > 1e-2
    expected = moved[:, :-1].log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
    torch.testing.assert_close(scored, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shards_are_cast_before_they_are_joined(dtype):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        weight = DTensor.from_local(torch.ones(8, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        with Gathered() as gathered:
            joined = head._gather_weight(weight, dtype)
    finally:
        dist.destroy_process_group()
    assert joined.dtype == dtype and joined.shape == (16, 4) and gathered.n_bytes == joined.nbytes
    assert torch.equal(joined[:8], torch.ones(8, 4, dtype=dtype))


def test_replaced_attributes_come_back():
    """Methods, attributes, properties, other names of a config, and what was not there before, also after an error."""
    module = torch.nn.Linear(1, 1)
    config = WhisperConfig(attn_implementation="eager")
    values = {"_attn_implementation": "sdpa", "hidden_size": 3, "use_cache": False, "further": 1}
    with pytest.raises(KeyError), replaced(module, forward=len, training=False), replaced(config, **values):
        assert module([1, 2]) == 2 and not module.training
        assert {name: getattr(config, name) for name in values} == values and config.d_model == 3
        raise KeyError
    assert "forward" not in vars(module) and module.training and module(torch.zeros(1)).shape == (1,)
    assert config.to_dict() == WhisperConfig().to_dict() and config._attn_implementation == "eager"
    assert not hasattr(config, "further")
