# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Preferences with media: updates and metrics are TRL's, and those of the model's own forward."""

import functools

import pytest
from datasets import Dataset
from helpers.chats import image
from helpers.marks import slow_but
from helpers.trainer_utils import assert_equal, run, shifted, sound, with_media
from helpers.trainer_utils import load as load_model
from peft import LoraConfig
from trl import DPOTrainer

from trl_multimodal_rft import MultimodalDPOTrainer


YES = ["It is a cat.", "Two birds sing, one after the other.", "red", "There is a dog here"]
NO = ["blue", "No", "It is a bird and a dog", "7"]
SIZES = [(84, 56), (56, 56), (112, 84), (56, 112)]
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"], init_lora_weights=False)
IN_ORDER = {"per_device_train_batch_size": 4, "train_sampling_strategy": "sequential", "max_length": None}
MPO = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}

CASES = {
    **{
        name: {"loss_type": [name]}
        for name in (
            "sigmoid",
            "hinge",
            "ipo",
            "nca_pair",
            "bco_pair",
            "sppo_hard",
            "aot",
            "aot_unpaired",
            "apo_zero",
            "apo_down",
            "discopop",
            "sft",
            "sigmoid_norm",
        )
    },
    "exo_pair": {"loss_type": ["exo_pair"], "label_smoothing": 1e-3},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "MPO": MPO,
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "alpha_divergence": {"f_divergence_type": "alpha_divergence"},
    "length desensitized": {"ld_alpha": 0.3},
    "weighted": {"use_weighting": True},
    "accumulated": {**MPO, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "adapter": {**MPO, "objects": {"peft_config": LORA}},
    "moving reference": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    "checkpointing": {**MPO, "gradient_checkpointing": True},
}


def chat(role, text):
    return [{"role": role, "content": text}]


def pairs(n=8):
    """Preferences of texts in messages."""
    return [
        {
            "prompt": chat("user", "What is it?" + " Is there a cat?" * (i % 3)),
            "chosen": chat("assistant", YES[i % 4]),
            "rejected": chat("assistant", NO[i % 4]),
        }
        for i in range(n)
    ]


@functools.cache
def image_pairs(n=8):
    rows = pairs(n)
    return Dataset.from_list([{**row, "image": image(*SIZES[i % 4], seed=i)["image"]} for i, row in enumerate(rows)])


def text_pairs(n=8):
    return Dataset.from_list(pairs(n))


def sound_pairs(n=8):
    return with_media(Dataset.from_list(pairs(n)), "audio", [sound(0.3 + 0.2 * (i % 4), seed=i) for i in range(n)])


def trained(trainer_class, family, rows, *, moved=True, objects=None, **options):
    """Trains from a reference that differs from the policy, so that the first update has ratios other than 1."""
    objects = dict(objects or {})
    model, processor = load_model(family)
    if "peft_config" not in objects and moved and not options.get("sync_ref_model"):
        objects["ref_model"] = shifted(load_model(family)[0])
    objects = {"model": model, "processing_class": processor, **objects}
    options = {**IN_ORDER, "learning_rate": 0.03, **options}
    result = run(trainer_class, family, rows, reward=None, objects=objects, **options)
    result.history[-1].pop("total_flos")  # counted by the names of inputs
    return result


trl_run = functools.cache(lambda name: trained(DPOTrainer, "qwen2_5_vl", image_pairs(), **CASES[name]))


@pytest.mark.parametrize("name", slow_but(CASES, "sigmoid", "MPO", "weighted", "length desensitized", "adapter"))
def test_equals_trl_with_images(name):
    assert_equal(trl_run(name), trained(MultimodalDPOTrainer, "qwen2_5_vl", image_pairs(), **CASES[name]))


@pytest.mark.parametrize("options", [{"packing": "padded"}, {"max_tokens_per_microbatch": 60}], ids=str)
@pytest.mark.parametrize("name", ["MPO", "adapter"])
def test_equals_trl_padded_and_in_parts(name, options):
    ours = trained(MultimodalDPOTrainer, "qwen2_5_vl", image_pairs(), **CASES[name], **options)
    for entry in ours.history:
        assert entry.pop("token_budget/parts", 2) > 1
        entry.pop("token_budget/extra_time", None)
    assert_equal(trl_run(name), ours)
