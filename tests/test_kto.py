# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Labelled completions with media: updates and metrics are TRL's, and those of the paper on the model's own forward."""

import copy
import functools
import re

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from helpers.families import ALL_FAMILIES
from helpers.marks import slow_but
from helpers.trainer_utils import (
    PLAIN,
    assert_equal,
    load,
    make_trainer,
    relative_difference,
    run,
    shifted,
    sound,
    with_media,
)
from peft import LoraConfig
from test_dpo import conversations, image_pairs, own_logps, sums, text_pairs
from trl import KTOTrainer, unpair_preference_dataset

from trl_multimodal_rft import MultimodalKTOConfig, MultimodalKTOTrainer
from trl_multimodal_rft.encoding import supervised
from trl_multimodal_rft.trainers.kto_data import unpaired


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"], init_lora_weights=False)
IN_ORDER = {"per_device_train_batch_size": 4, "max_length": None}
CASES = {
    "kto": {},
    "apo_zero_unpaired": {"loss_type": "apo_zero_unpaired", "train_sampling_strategy": "random"},
    "weighted": {"desirable_weight": 1.7, "undesirable_weight": 0.4, "beta": 0.5},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "adapter": {"objects": {"peft_config": LORA}},
    "moving reference": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    "checkpointing": {"gradient_checkpointing": True},
    "cut": {"max_length": 33},
}


def labelled(pairs):
    """One completion of each pair: four are desirable, four aren't, in an order that isn't regular."""
    good = [i in (0, 1, 4, 6) for i in range(len(pairs))]
    pairs = pairs.map(lambda row, i: {"completion": row["chosen" if good[i] else "rejected"]}, with_indices=True)
    return pairs.remove_columns(["chosen", "rejected"]).add_column("label", good)


image_rows = functools.cache(lambda: labelled(image_pairs()))


def trained(trainer_class, rows, family="qwen2_5_vl", objects=None, **options):
    """Trains from a reference that differs from the policy, so that the first update has ratios other than 1."""
    objects = dict(objects or {})
    model, processor = load(family)
    if "peft_config" not in objects and not options.get("sync_ref_model"):
        objects["ref_model"] = shifted(load(family)[0], 0.02)
    objects = {"model": model, "processing_class": processor, **objects}
    options = {**IN_ORDER, "learning_rate": 0.3, **options}
    result = run(trainer_class, family, rows, reward=None, objects=objects, **options)
    result.history[-1].pop("total_flos")  # counted by the names of inputs
    return result


trl_run = functools.cache(lambda name: trained(KTOTrainer, image_rows(), **CASES[name]))


@pytest.mark.parametrize("name", slow_but(CASES, "kto", "apo_zero_unpaired", "adapter"))
def test_equals_trl_with_images(name):
    ours = trained(MultimodalKTOTrainer, image_rows(), **CASES[name])
    assert_equal(trl_run(name), ours, of_metrics=1e-5)
    assert {"kl", "rewards/margins", "logps/chosen", "logits/rejected"} <= ours.history[0].keys()
    assert (ours.history[0]["kl"] > 0) == (name != "apo_zero_unpaired")


@pytest.mark.parametrize("options", [{"packing": "padded"}, {"max_tokens_per_microbatch": 60}], ids=str)
def test_equals_trl_padded_and_in_parts(options):
    ours = trained(MultimodalKTOTrainer, image_rows(), **options)
    for entry in ours.history:
        assert entry.pop("token_budget/parts", 2) > 1
        entry.pop("token_budget/extra_time", None)
    assert_equal(trl_run("kto"), ours, of_metrics=1e-5)


@pytest.mark.parametrize("precompute", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_paired", [False, True])
def test_equals_trl_with_text(is_paired, precompute):
    """Pairs are two rows each, and the reference may be scored before the run."""
    rows = text_pairs() if is_paired else labelled(text_pairs())
    options = {"eval_strategy": "steps", "eval_steps": 1, "precompute_ref_log_probs": precompute}
    options |= {"per_device_eval_batch_size": 4, "objects": {"eval_dataset": rows.select(range(4))}}
    theirs, ours = (trained(trainer, rows, **options) for trainer in (KTOTrainer, MultimodalKTOTrainer))
    assert_equal(theirs, ours, of_metrics=1e-5)


def test_pairs_are_unpaired_as_by_trl():
    rows = concatenate_datasets([text_pairs(8)] * 150)  # more than TRL reads at once
    assert unpaired(rows, set(rows.column_names)).to_list() == unpair_preference_dataset(rows).to_list()
    implicit = Dataset.from_list([{"chosen": p["prompt"] + p["chosen"], "rejected": p["prompt"] + p["rejected"]} for p in text_pairs(2)])
    assert unpaired(implicit, {"chosen", "rejected"}).sort("label").to_list() == [
        {name: row[name] for name in ("prompt", "completion", "label")}
        for row in unpaired(text_pairs(2), {"prompt", "chosen", "rejected"}).sort("label").select_columns(["prompt", "completion", "label"])
    ]
    pictures = unpaired(image_pairs(2), {"prompt", "chosen", "rejected", "image"})
    assert [row["label"] for row in pictures] == [True, True, False, False]
    assert pictures[0]["image"] == pictures[2]["image"] != pictures[1]["image"]


@pytest.mark.parametrize(
    ("family", "packing"),
    [
        ("qwen2_5_omni", "prefix"),
        *(
            pytest.param(family, packing, marks=pytest.mark.slow)
            for family in ("qwen2_5_omni", "qwen2_audio", "qwen3_vl")
            for packing in ("prefix", "padded")
            if (family, packing) != ("qwen2_5_omni", "prefix")
        ),
    ],
)
def test_update_is_that_of_the_paper(family, packing, tmp_path):
    """Compares with equations 7 and 8 in float64, on a plain forward of each prompt with each completion."""
    prompts, answers, dataset = conversations(family)
    n, good = len(prompts), [i % 3 != 1 for i in range(len(prompts))]
    rows = [dataset[i] for i in range(n)]
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": good[i]} for i, row in enumerate(rows)]
    dataset = Dataset.from_dict({"n": range(n)})
    dataset = dataset.with_transform(lambda batch: {k: [rows[i][k] for i in batch["n"]] for k in rows[0]})
    model, processor = ALL_FAMILIES[family].build()
    plain, reference = copy.deepcopy(model).double().eval(), shifted(copy.deepcopy(model).double().eval())
    options = {**PLAIN, "per_device_train_batch_size": n, "max_steps": 1, "learning_rate": 0.1, "packing": packing}
    options |= {"router_aux_loss_coef": 0.0, "desirable_weight": 1.5, "undesirable_weight": 0.7, "beta": 0.3}
    args = MultimodalKTOConfig(str(tmp_path), **options)
    objects = {"model": model.double(), "processing_class": processor, "ref_model": copy.deepcopy(reference)}
    trainer = MultimodalKTOTrainer(args=args, train_dataset=dataset, **objects)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()

    def ratios(answers):
        with torch.no_grad():
            by_reference = sums(own_logps(reference, processor, prompts, answers))
        return sums(own_logps(plain, processor, prompts, answers)) - by_reference

    own = [answers[i % 4] for i in range(4)]
    given = [own[i % 4] for i in range(n)]
    other = [given[i - 1] for i in range(n)]
    kl = ratios_of(ratios, other, n).detach().mean().clamp(min=0)
    ratio = ratios_of(ratios, given, n)
    is_good = torch.tensor(good)
    losses = torch.where(is_good, 1.5 * (1 - (0.3 * (ratio - kl)).sigmoid()), 0.7 * (1 - (0.3 * (kl - ratio)).sigmoid()))
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert log["kl"] == pytest.approx(kl.item(), rel=1e-4) and kl > 0
    losses.mean().backward()
    update = {name: (before[name] - p.detach()) / 0.1 for name, p in trainer.model.named_parameters()}
    update = {name: value for name, value in update.items() if value.any()}
    gradient = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None and p.grad.any()}
    assert update.keys() == gradient.keys() and len(gradient) > 10
    assert relative_difference(gradient, update) < 1e-5  # the head scores in float32
