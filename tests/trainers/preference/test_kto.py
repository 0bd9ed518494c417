# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Labelled completions with media: updates and metrics are those of TRL, and of the paper on the model's forward."""

import copy
import functools
import re
from itertools import product

import pytest
import torch
from datasets import ClassLabel, Dataset, concatenate_datasets
from helpers.families import ALL_FAMILIES
from helpers.marks import slow_but
from helpers.trainer_utils import (
    PLAIN,
    assert_equal,
    assert_update_is_gradient,
    counted_calls,
    load,
    make_trainer,
    run,
    shifted,
    sound,
    with_media,
)
from peft import LoraConfig
from trainers.preference.test_dpo import conversations, image_pairs, own_logps, sums, text_pairs
from trl import KTOTrainer, unpair_preference_dataset

from trl_multimodal_rft import MultimodalKTOConfig, MultimodalKTOTrainer
from trl_multimodal_rft.encoding import supervised
from trl_multimodal_rft.trainers.preference.kto_data import unpair_dataset


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"], init_lora_weights=False)
IN_ORDER = {"per_device_train_batch_size": 4, "max_length": None}
CASES = {
    "kto": {},
    "apo_zero_unpaired": {"loss_type": "apo_zero_unpaired", "train_sampling_strategy": "random"},
    "weighted": {"desirable_weight": 1.7, "undesirable_weight": 0.4, "beta": 0.2},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "adapter": {"objects": {"peft_config": LORA}},
    "moving reference": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    "checkpointing": {"gradient_checkpointing": True},
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
        objects["ref_model"] = shifted(load(family)[0], 0.02, seed=7)
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
    assert {"kl", "rewards/chosen", "logps/chosen", "logits/rejected"} <= ours.history[0].keys()
    assert name != "kto" or ours.history[0]["kl"] > 0


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
    n = 2 if is_paired else 4  # so that one batch has all rows, as TRL's metrics are of a batch
    options |= {"per_device_eval_batch_size": 4, "objects": {"eval_dataset": rows.select(range(n))}}
    theirs, ours = (trained(trainer, rows, **options) for trainer in (KTOTrainer, MultimodalKTOTrainer))
    assert_equal(theirs, ours)


def test_rows_of_text_are_cut_as_by_trl():
    """Also the completions of the KL estimate, and rows whose prompt fills `max_length` are left out."""
    theirs, ours = (
        trained(trainer, labelled(text_pairs()), max_length=18) for trainer in (KTOTrainer, MultimodalKTOTrainer)
    )
    assert [entry.pop("rows/cut", 0) for entry in ours.history][0] > 0 and len(ours.trainer.train_dataset) < 8
    assert_equal(theirs, ours)


@pytest.mark.parametrize("precompute", [False, True])
def test_larger_batches_of_an_evaluation_equal_trl(precompute):
    """The KL estimate has the pairs of micro-batches of the training, also where the sizes share no factor."""
    rows = labelled(text_pairs())
    options = {"eval_strategy": "steps", "eval_steps": 1, "precompute_ref_log_probs": precompute, "max_steps": 1}
    options |= {"per_device_train_batch_size": 2, "objects": {"eval_dataset": rows.select(range(7))}}
    whole = [
        trained(trainer, rows, per_device_eval_batch_size=8, **options)
        for trainer in (KTOTrainer, MultimodalKTOTrainer)
    ]
    assert_equal(*whole)
    other = trained(MultimodalKTOTrainer, rows, per_device_eval_batch_size=3, **options)
    assert len(other.history) == len(whole[1].history)


def test_pairs_are_unpaired_as_by_trl():
    rows = concatenate_datasets([text_pairs(8)] * 150)  # more than TRL reads at once
    assert unpair_dataset(rows, set(rows.column_names)).to_list() == unpair_preference_dataset(rows).to_list()
    named = rows.select(range(3)).add_column("label", ["a", "b", "c"])
    assert unpair_dataset(named, set(named.column_names))["label"][:] == [True] * 3 + [False] * 3
    whole = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in text_pairs(2)]
    implicit = unpair_dataset(Dataset.from_list(whole), {"chosen", "rejected"})
    assert implicit.to_list() == unpair_dataset(text_pairs(2), {*rows.column_names}).to_list()
    pictures = unpair_dataset(image_pairs(2), {"prompt", "chosen", "rejected", "image"})
    assert [row["label"] for row in pictures] == [True, True, False, False]
    assert pictures[0]["image"] == pictures[2]["image"] != pictures[1]["image"]


SEEDS = {"qwen2_5_omni": 1, "qwen2_audio": 3, "qwen3_vl": 2}  # of references whose KL estimate is positive


@pytest.mark.parametrize(
    ("family", "packing"),
    [
        ("qwen2_5_omni", "prefix"),
        *(
            pytest.param(family, packing, marks=pytest.mark.slow)
            for family, packing in product(("qwen2_5_omni", "qwen2_audio", "qwen3_vl"), ("prefix", "padded"))
            if (family, packing) != ("qwen2_5_omni", "prefix")
        ),
    ],
)
def test_update_is_that_of_the_paper(family, packing, tmp_path):
    """Compares with equations 7 and 8 in float64, on a plain forward of each prompt with each completion."""
    prompts, answers, dataset = conversations(family)
    n = len(prompts)
    good = [i % 3 != 1 for i in range(len(prompts))]
    rows = [dataset[i] for i in range(n)]
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": good[i]} for i, row in enumerate(rows)]
    dataset = Dataset.from_dict({"n": range(n)})
    dataset = dataset.with_transform(lambda batch: {k: [rows[i][k] for i in batch["n"]] for k in rows[0]})
    model, processor = ALL_FAMILIES[family].build()
    plain = copy.deepcopy(model).double().eval()
    reference = shifted(copy.deepcopy(plain), seed=SEEDS[family])
    options = {**PLAIN, "per_device_train_batch_size": n, "max_steps": 1, "learning_rate": 0.1, "packing": packing}
    options |= {"router_aux_loss_coef": 0.0, "desirable_weight": 1.5, "undesirable_weight": 0.7, "beta": 0.3}
    args = MultimodalKTOConfig(str(tmp_path), **options)
    objects = {"model": model.double(), "processing_class": processor, "ref_model": copy.deepcopy(reference)}
    trainer = MultimodalKTOTrainer(args=args, train_dataset=dataset, **objects)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()

    def ratios(said):
        def logps(model):
            return sums([own_logps(model, processor, [p], [s])[0] for p, s in zip(prompts, said, strict=True)])

        with torch.no_grad():
            by_reference = logps(reference)
        return logps(plain) - by_reference

    said = [answers[i % 4] for i in range(n)]
    kl = ratios(said[-1:] + said[:-1]).detach().mean().clamp(min=0)
    ratio = ratios(said)
    is_good = torch.tensor(good)
    advantage = 0.3 * (ratio - kl)
    losses = torch.where(is_good, 1.5 * (1 - advantage.sigmoid()), 0.7 * (1 - (-advantage).sigmoid()))
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert log["kl"] == pytest.approx(kl.item(), rel=1e-4) and kl > 0
    losses.mean().backward()
    assert_update_is_gradient(before, trainer.model, plain, learning_rate=0.1)


# Rows


def test_a_prompt_is_encoded_and_forwarded_once(tmp_path, monkeypatch):
    encoded = counted_calls(monkeypatch, supervised, "encode_prompt")
    forwarded = []
    trainer = ours(
        tmp_path, image_rows().select(range(4)), max_steps=1, self_check=False, precompute_ref_log_probs=True
    )
    trainer.model.get_decoder().register_forward_hook(lambda *_: forwarded.append(1))
    encoded.clear()
    trainer.train()
    assert len(encoded) == 4 and len(forwarded) == 1


def ours(folder, rows, objects=None, **options):
    model, processor = load("qwen2_5_vl")
    objects = {"model": model, "processing_class": processor, **(objects or {})}
    options = {**IN_ORDER, "learning_rate": 0.03, **options}
    return make_trainer(MultimodalKTOTrainer, "qwen2_5_vl", rows, folder, reward=None, objects=objects, **options)


def test_a_model_by_its_name_has_its_reference(tmp_path, caplog):
    model, processor = load("qwen2_5_vl")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    objects = {"model": str(tmp_path / "model"), "processing_class": None}
    trainer = ours(tmp_path / "out", image_rows(), objects=objects, max_steps=1)
    assert trainer.ref_model is not None
    trainer.train()
    assert trainer.state.log_history[0]["rewards/chosen"] == pytest.approx(0, abs=1e-6)
    assert "instantiated" not in caplog.text


def with_label(value):
    rows = image_rows().to_list()
    return Dataset.from_list([{**row, "label": value if i == 2 else int(row["label"])} for i, row in enumerate(rows)])


def with_words(*words):
    """Labels in words, the last for the third row."""
    rows = image_rows().remove_columns("label").select(range(4))
    return rows.add_column("label", ["TRUE", " Yes", words[-1], "desirable"])


def with_classes(rows, names):
    labels = rows["label"][:]
    return rows.remove_columns("label").add_column("label", labels).cast_column("label", ClassLabel(names=names))


@pytest.mark.parametrize("names", [["bad", "good"], ["good", "bad"], ["Desirable", "undesirable"], ["0", "1"]])
@pytest.mark.parametrize("kind", ["table", "selection", "stream"])
def test_classes_are_labels_by_their_names(names, kind, tmp_path):
    rows = with_classes(image_rows(), names)
    rows = rows.select(range(2, 6)) if kind == "selection" else rows.select(range(4))
    expected = [names[i].lower() in ("good", "desirable", "1") for i in rows["label"]]
    rows = rows.to_iterable_dataset() if kind == "stream" else rows
    trainer = ours(tmp_path, rows, max_steps=1, objects={"eval_dataset": rows})
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        assert next(iter(loader))["label"].tolist() == expected


def test_classes_stay_labels_while_the_reference_is_scored(tmp_path):
    rows = with_classes(image_rows(), ["good", "bad"]).shuffle(seed=1)
    trainer = ours(tmp_path, rows, precompute_ref_log_probs=True, max_length=80, max_steps=1)
    expected = [i == 0 for i in rows["label"]]
    for n, batch in enumerate(trainer.get_train_dataloader()):
        assert batch["label"].tolist() == expected[4 * n : 4 * n + 4]


def test_words_are_labels(tmp_path):
    trainer = ours(tmp_path, with_words("BAD"))
    assert next(iter(trainer.get_train_dataloader()))["label"].tolist() == [True, True, False, True]


def test_labels_of_an_evaluation_are_checked_at_the_start(tmp_path):
    with pytest.raises(ValueError, match="row 2, column 'label': is 'maybe' of type str"):
        ours(tmp_path, image_rows(), objects={"eval_dataset": {"other": with_words("maybe")}})


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (lambda rows: rows.remove_columns("label"), {}, "needs `prompt`, `completion` and `label`, or `prompt`, `cho"),
        (lambda rows: with_label(2), {}, "row 2, column 'label': is 2 of type int; give True or False."),
        (lambda rows: with_words("maybe"), {}, "row 2, column 'label': is 'maybe' of type str; give True or False."),
        (lambda rows: with_classes(rows, ["good", "soso"]), {}, "row 0, column 'label': is 'soso' of type str"),
        (lambda rows: with_label(-1), {}, "row 2, column 'label': is -1 of type int; give True or False."),
        (lambda rows: with_label(None), {}, "row 2, column 'label': is empty; fill it, or leave the row out."),
        (lambda rows: rows.add_column("ref_logps", [-9.0] * 7 + [None]), {}, "row 7 has no `ref_logps`, but other"),
        (lambda rows: rows, {"per_device_train_batch_size": 1}, "batch size must be > 1"),
        (lambda rows: rows, {"train_sampling_strategy": "random"}, "requires `train_sampling_strategy='sequential'`"),
        (lambda rows: rows, {"loss_type": "bco"}, "`loss_type` must be one of 'kto', 'apo_zero_unpaired', got 'bco'."),
        (lambda rows: rows, {"loss_type": None}, "`loss_type` must be one of 'kto', 'apo_zero_unpaired', got None."),
        (lambda rows: rows, {"neftune_noise_alpha": 5.0}, "which isn't known in packed rows; set `packing='padded'`"),
        (lambda rows: rows.remove_columns("image"), {"max_length": 5}, "leaves none of `max_length` (5) to the compl"),
    ],
)
def test_mistakes_are_named(change, options, said, tmp_path):
    with pytest.raises(ValueError, match=re.escape(said)):
        ours(tmp_path, change(image_rows()), **options).train()


def test_unequal_numbers_of_labels_are_warned_of(tmp_path, caplog):
    rows = image_rows().select([0, 1, 4, 2])
    ours(tmp_path, rows)
    assert "3 completions are desirable and 1 aren't" in caplog.text
    assert "`desirable_weight` in [0.33, 0.44], or `undesirable_weight` in [2.26, 3.0]" in caplog.text
    caplog.clear()
    ours(tmp_path, rows, undesirable_weight=2.5)
    ours(tmp_path, image_rows())
    assert "desirable" not in caplog.text
    ours(tmp_path, image_rows().select([0, 1, 4, 6]))
    assert "All labels are True, so that KTO has no undesirable completions" in caplog.text


@pytest.mark.slow
def test_a_run_is_resumed(tmp_path):
    rows = with_media(labelled(text_pairs()), "audio", [sound(0.3 + 0.2 * (i % 4), seed=i) for i in range(8)])
    rows = concatenate_datasets([rows, rows])
    model, processor = load("qwen2_audio")
    objects = {"model": model, "processing_class": processor, "ref_model": shifted(load("qwen2_audio")[0])}
    options = {**IN_ORDER, "learning_rate": 0.03, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}

    def trainer(folder):
        own = {**objects, "model": copy.deepcopy(model)}
        return make_trainer(MultimodalKTOTrainer, "qwen2_audio", rows, folder, reward=None, objects=own, **options)

    whole = trainer(tmp_path / "whole")
    resumed = trainer(tmp_path / "resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    weights = resumed.model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in whole.model.state_dict().items())


def test_a_stored_reference_is_that_of_the_micro_batch(tmp_path):
    """The KL estimate of a row depends on the row before it."""
    trainer = ours(tmp_path, image_rows(), precompute_ref_log_probs=True)
    stored = trainer.train_dataset
    assert stored["KL_row"] == [3, 0, 1, 2, 7, 4, 5, 6] and trainer.ref_model is None
    with pytest.raises(ValueError, match="the completion of row 3, but this micro-batch has the completion of"):
        ours(tmp_path, stored, per_device_train_batch_size=2).train()
