# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows of text have the tokens that TRL gives them, where a prompt ends inside of a token, and with other ends."""

import types
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from helpers import families
from transformers import Qwen3Config, Qwen3ForCausalLM

import trl_multimodal_rft


# The tokens " red" and " squares" take in the last space of their prompts
PAIRS = [
    {"prompt": "a picture ", "chosen": "red squares", "rejected": "how many"},
    {"prompt": "a picture", "chosen": " red squares", "rejected": " how many"},
    {"prompt": "what is it ", "chosen": "how", "rejected": "1"},
]
COMPLETIONS = [
    {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 2 == 0}
    for number, row in enumerate(PAIRS)
]
ROWS = {"DPO": PAIRS, "Reward": PAIRS, "KTO": [*COMPLETIONS, COMPLETIONS[0]], "SFT": COMPLETIONS}
COLUMNS = {
    "DPO": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "Reward": ("chosen_ids", "rejected_ids"),
    "KTO": ("prompt_ids", "completion_ids"),
    "SFT": ("input_ids", "labels"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of a model of text, for outputs, too."""
    tokenizer = families.tokenizer()
    tokenizer.padding_side = "right"
    config = Qwen3Config(**families.decoder(tokenizer, head_dim=16))
    model, _ = families.instantiate(Qwen3ForCausalLM, config, types.SimpleNamespace(tokenizer=tokenizer))
    folder = tmp_path_factory.mktemp("text")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


def make(prefix: str, name: str, rows: list, folder: Path, formatting_func=None, **options):
    """A trainer of TRL, or with `prefix` "Multimodal" of this package."""
    package = trl_multimodal_rft if prefix else trl
    config = getattr(package, f"{prefix}{name}Config")
    options = {"use_cpu": True, "bf16": False, "report_to": [], "max_steps": 1, "save_strategy": "no", **options}
    args = config(str(folder / "out"), **options)
    further = {} if formatting_func is None else {"formatting_func": formatting_func}
    trainer = getattr(package, f"{prefix}{name}Trainer")
    return trainer(str(folder / "model"), args=args, train_dataset=Dataset.from_list(rows), **further)


@pytest.mark.parametrize("name", ROWS)
def test_a_prompt_may_end_inside_of_a_token(name, folder):
    theirs, ours = (make(prefix, name, ROWS[name], folder) for prefix in ("", "Multimodal"))
    for column in COLUMNS[name]:
        assert list(ours.train_dataset[column]) == list(theirs.train_dataset[column])
    if name == "Reward":  # its new head has other random numbers
        return
    for trainer in (theirs, ours):
        trainer.train()
    losses = [trainer.state.log_history[-1]["train_loss"] for trainer in (theirs, ours)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


TEXTS = [{"text": "a picture of red squares"}, {"text": "how many"}] * 2
CASES = {
    "texts": (TEXTS, {}),
    "packed": (TEXTS, {"packing": True, "max_length": 32}),
    "formatting_func": ([{"words": row["text"]} for row in TEXTS], {"formatting_func": lambda row: row["words"]}),
    "completions": (COMPLETIONS, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_texts_end_with_the_end_that_is_saved(case, folder):
    rows, options = CASES[case]
    options = {"eos_token": "<|endoftext|>", **options}
    theirs, ours = (make(prefix, "SFT", rows, folder, **options) for prefix in ("", "Multimodal"))
    end = ours.processing_class.convert_tokens_to_ids("<|endoftext|>")
    assert theirs.processing_class.eos_token_id == ours.processing_class.eos_token_id == end
    ids = [sum(trainer.train_dataset["input_ids"], []) for trainer in (theirs, ours)]
    assert sorted(ids[0]) == sorted(ids[1])
    assert ids[0].count(end) == len(rows)


def test_pairs_for_a_reward_end_with_the_end_that_is_saved(folder):
    options = {"eos_token": "<|endoftext|>"}
    theirs, ours = (make(prefix, "Reward", PAIRS, folder, **options) for prefix in ("", "Multimodal"))
    for column in COLUMNS["Reward"]:
        assert list(ours.train_dataset[column]) == list(theirs.train_dataset[column])
