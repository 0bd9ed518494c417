# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Datasets of text that are packed before a run: rows and updates are TRL's, and rows don't see each other."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from datasets import Dataset
from helpers.families import decoder, instantiate, tokenizer
from helpers.trainer_utils import load
from trainers.supervised.test_sft import (
    PAIRS,
    assert_same,
    flat,
    make,
    picture_rows,
    text_rows,
    trained,
    weights_after,
)
from trl import SFTConfig, SFTTrainer


STRATEGIES = ("bfd", "bfd_split", "wrapped")
# Of 13 to 39 tokens. 30 is shorter than some rows
LENGTHS = {"max_length": 30, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


def text_model() -> dict:
    """Returns a model of text, whose rows TRL's own packing on a CPU keeps apart."""
    torch.manual_seed(0)
    words = tokenizer()
    config = hf.Qwen3Config(**decoder(words, head_dim=16))
    model, _ = instantiate(hf.Qwen3ForCausalLM, config, SimpleNamespace(tokenizer=words), scale=3.0)
    return {"model": model, "processing_class": words}


def rows_of(dataset):
    return [{name: row[name] for name in dataset.column_names} for row in dataset]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_and_updates_equal_trl(strategy, tmp_path):
    options = {"packing": True, "packing_strategy": strategy, "shuffle_dataset": True, **LENGTHS}
    theirs = SFTTrainer(
        args=SFTConfig(str(tmp_path / "trl"), **{**PAIRS, **options}), train_dataset=text_rows(16), **text_model()
    )
    ours = make("qwen2_5_vl", text_rows(16), tmp_path / "ours", objects=text_model(), **options)
    assert rows_of(ours.train_dataset) == rows_of(theirs.train_dataset) and 5 < len(ours.train_dataset) < 16
    assert ("seq_lengths" in ours.train_dataset.column_names) == (strategy != "wrapped")
    assert_same(trained(theirs), trained(ours), of_means=0.02)


def own_loss(model, sequences):
    """Computes the mean loss over all learned tokens, and its gradient, one row at a time."""
    n = sum(int(each.learned[1:].sum()) for each in sequences)
    total = 0.0
    for sequence in sequences:
        labels = sequence.input_ids.masked_fill(~sequence.learned, -100)
        logits = model(input_ids=sequence.input_ids[None]).logits[0, :-1].double()
        loss = torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum", ignore_index=-100) / n
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("is_padded", [False, True])
def test_loss_and_gradient_are_those_of_rows_alone(strategy, is_padded, tmp_path):
    options = {"packing": True, "packing_strategy": strategy, **LENGTHS}
    trainer = make("qwen2_5_vl", text_rows(16), tmp_path, **options)
    trainer._policy.fallbacks = replace(trainer._policy.fallbacks, packing=not is_padded)
    rows = [*trainer.train_dataset][-4:]
    batch = trainer.data_collator(rows)
    assert len(batch["sequences"]) > 4 or strategy == "wrapped"
    n = torch.tensor(sum(int(each.learned[1:].sum()) for each in batch["sequences"]))
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=n)
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    expected_loss, own = own_loss(load("qwen2_5_vl")[0], batch["sequences"])
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
    names = sorted(own.keys() & gradients.keys())
    expected = flat(own, names)
    assert len(names) > 20 and (flat(gradients, names) - expected).norm() <= 1e-5 * expected.norm()


def test_resumed_run_is_the_one_that_did_not_stop(tmp_path):
    options = {"packing": True, **LENGTHS, "max_steps": 4, "optim": "adamw_torch", "shuffle_dataset": True}
    options |= {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1}
    expected = weights_after(make("qwen2_5_vl", text_rows(16), tmp_path, **options))
    resumed = make("qwen2_5_vl", text_rows(16), tmp_path, **options)
    before = torch.cat([parameter.detach().flatten().clone() for parameter in resumed.model.parameters()])
    resumed.train(f"{tmp_path}/checkpoint-2")
    after = torch.cat([parameter.detach().flatten() for parameter in resumed.model.parameters()])
    assert torch.equal(after - before, expected) and expected.norm() > 0


def test_evaluation_packs_as_training_or_by_its_own_option(tmp_path):
    rows = {"train_dataset": text_rows(8), "eval_dataset": text_rows(8)}
    losses = {}
    for eval_packing in (None, False):
        trainer = make(
            "qwen2_5_vl",
            rows["train_dataset"],
            tmp_path,
            objects={"eval_dataset": rows["eval_dataset"]},
            packing=True,
            eval_packing=eval_packing,
            max_length=64,
            per_device_eval_batch_size=8,
        )
        assert ("seq_lengths" in trainer.eval_dataset.column_names) == (eval_packing is None)
        assert (len(trainer.eval_dataset) < 8) == (eval_packing is None)
        found = [trainer.evaluate(), trainer.evaluate(rows["eval_dataset"])]
        losses[eval_packing] = [entry["eval_loss"] for entry in found]
        assert losses[eval_packing][0] == pytest.approx(losses[eval_packing][1], rel=1e-6)
    assert losses[None] == pytest.approx(losses[False], rel=1e-5)


OTHERS = {
    "media": (picture_rows, {}),
    "stream": (lambda: text_rows().to_iterable_dataset(), {}),
    "transform": (lambda: text_rows().with_transform(dict), {}),
    "any length": (text_rows, {"max_length": None}),
    "left as is": (text_rows, {"dataset_kwargs": {"skip_prepare_dataset": True}}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_rows_are_packed_by_micro_batch(name, tmp_path):
    rows, options = OTHERS[name]
    trainer = make("qwen2_5_vl", rows(), tmp_path, packing=True, **{"max_length": 64, "max_steps": 1, **options})
    if name != "stream":
        assert len(trainer.train_dataset) == 8 and "seq_lengths" not in trainer.train_dataset.column_names
    trainer.train()
    assert trainer.state.global_step == 1 and trainer.checks.self_check.packed < 1e-5


def test_media_in_messages_are_found_in_any_row(tmp_path):
    """Only the last row has a picture, in a block of its message."""
    rows = [*text_rows(3, form="chat")]
    for row in rows:
        for message in row["messages"]:
            message["content"] = [{"type": "text", "text": message["content"]}]
    rows.append(picture_rows(1)[0])
    rows[-1]["messages"][0]["content"][0]["image"] = rows[-1].pop("image")
    trainer = make("qwen2_5_vl", Dataset.from_list(rows), tmp_path, packing=True, max_length=64)
    assert len(trainer.train_dataset) == 4


def test_rows_with_nothing_to_learn_are_dropped(tmp_path):
    rows = [{"input_ids": [60] * 40, "labels": [-100] * 35 + [60] * 5}] + [{"input_ids": [61, 62, 63]}] * 3
    rows = [{"labels": row["input_ids"], **row} for row in rows]
    trainer = make("qwen2_5_vl", Dataset.from_list(rows), tmp_path, packing=True, max_length=30)
    assert rows_of(trainer.train_dataset) == [
        {"input_ids": [61, 62, 63] * 3, "labels": [61, 62, 63] * 3, "seq_lengths": [3] * 3}
    ]
    split = make(
        "qwen2_5_vl", Dataset.from_list(rows), tmp_path, packing=True, packing_strategy="bfd_split", max_length=30
    )
    assert rows_of(split.train_dataset) == [
        {
            "input_ids": [60] * 10 + [61, 62, 63] * 3,
            "labels": [-100] * 5 + [60] * 5 + [61, 62, 63] * 3,
            "seq_lengths": [10, 3, 3, 3],
        }
    ]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"seq_lengths": [2, 2]}, "'seq_lengths': its lengths are those of 4 tokens, but `input_ids` has 3; pack"),
        (
            {"labels": [60, -100, -100], "seq_lengths": [1, 2]},
            "has nothing to learn: its labels are -100, or first in",
        ),
    ],
)
def test_packed_rows_are_checked(row, message, tmp_path):
    row = {"input_ids": [60, 61, 62], "labels": [60, 61, 62], **row}
    with pytest.raises(ValueError, match=rf"^row \d(, column )?.*{message}"):
        make("qwen2_5_vl", Dataset.from_list([row] * 4), tmp_path).train()


def test_columns_of_tokens_are_listed_and_filled(tmp_path):
    trainer = make("qwen2_5_vl", text_rows(4).select([2, 1]), tmp_path)
    assert trainer.train_dataset.column_names == ["prompt", "completion", "input_ids", "labels"]
    assert [len(ids) for ids in trainer.train_dataset["input_ids"]] == [
        len(row["labels"]) for row in trainer.train_dataset
    ]
    trainer.train()
    assert "input_ids" not in make("qwen2_5_vl", picture_rows(4), tmp_path).train_dataset.column_names


def test_transforms_are_hashed_without_the_model(tmp_path):
    """`datasets` pickles a transform to hash it, which must not take in the weights."""
    trainer = make("qwen2_5_vl", text_rows(4), tmp_path)
    assert len(pickle.dumps(trainer.train_dataset.format["format_kwargs"]["transform"])) < 1000
