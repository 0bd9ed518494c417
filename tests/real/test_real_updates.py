# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Updates of a pretrained language model are TRL's: losses, metrics, gradients and weights, by six methods."""

import tempfile

import pytest
import torch
import trl
from datasets import Dataset
from helpers.real_models import REAL, folder, load
from helpers.trainer_utils import Run, largest_difference, logged, make_trainer, norm, relative_difference

import trl_multimodal_rft as package
from trl_multimodal_rft.models.reward_model import as_reward_model


pytestmark = REAL
QUESTIONS = ["Name a colour.", "Say hello.", "Is fire cold?", "What is seven plus one?"]
ANSWERS = ["Blue", "Hello, my friend!", "No, it is hot.", "Eight."]
WORSE = ["Nine, I think.", "Good", "Yes.", "Seven"]
# As users train: with momentum, whose steps hardly depend on how large a gradient is
OPTIONS = {
    "max_steps": 2,
    "optim": "adamw_torch",
    "learning_rate": 1e-5,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "model_init_kwargs": {"dtype": "float32"},
}
SAMPLED = {"max_completion_length": 5, "num_generations": 2, "per_device_train_batch_size": 2}
READ = {"per_device_train_batch_size": 1, "max_length": None}
# What is trained: fewer weights save time. The last layers, or those through which all layers pass gradients
LAST = ("layers.28.", "layers.29.", "norm.weight", "score.")
THROUGH = ("embed_tokens", "self_attn", "norm")


def chat(role, text):
    return [{"role": role, "content": text}]


def pairs():
    columns = {
        "prompt": [chat("user", text) for text in QUESTIONS],
        "chosen": [chat("assistant", text) for text in ANSWERS],
        "rejected": [chat("assistant", text) for text in WORSE],
    }
    return Dataset.from_dict(columns)


def asked():
    return pairs().select_columns("prompt")


def answered():
    return pairs().rename_column("chosen", "completion").remove_columns("rejected")


def labelled():
    return trl.unpair_preference_dataset(pairs())


# Rows, options, and the trained parameters, by the names of the trainers. The batches are as small as each method
# allows: six trainers make two updates twice
CASES = {
    "GRPO": (asked, SAMPLED, LAST),
    "RLOO": (asked, {**SAMPLED, "beta": 0.0}, LAST),
    "SFT": (answered, READ, THROUGH),
    "DPO": (pairs, READ, LAST),
    "KTO": (labelled, {**READ, "per_device_train_batch_size": 2}, LAST),
    "Reward": (pairs, READ, LAST),
}


def trained(name, library, **more):
    rows, options, parts = CASES[name]
    options = {**OPTIONS, **options, **more}
    objects = {"model": folder("text")}
    if name == "Reward":
        model, tokenizer = load("text")
        torch.manual_seed(0)
        objects = {"model": as_reward_model(model), "processing_class": tokenizer}
        del options["model_init_kwargs"]
    sampled = {} if rows is asked else {"reward": None}
    trainer_class = getattr(library, f"{'' if library is trl else 'Multimodal'}{name}Trainer")
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_trainer(trainer_class, None, rows(), output_dir, objects=objects, **sampled, **options)
        for weight, parameter in trainer.model.named_parameters():
            parameter.requires_grad_(any(part in weight for part in parts))
        before = {weight: p.detach().clone() for weight, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
    after = dict(trainer.model.named_parameters())
    update = {weight: after[weight].detach() - value for weight, value in before.items()}
    for entry in trainer.state.log_history:
        entry.pop("total_flos", None)  # counted by the names of inputs
    return Run(trainer, update, trainer.state.log_history), before


@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_trl(name):
    """
    With the tokens that each trainer samples itself. The second update has momentum. KTO's estimate of the KL
    divergence is a sum of log-probabilities, of which each rounds by about 1e-5.
    """
    theirs, before = trained(name, trl)
    more = {"packing_shuffle": True} if CASES[name][0] is asked else {}
    ours, _ = trained(name, package, self_check=False, **more)
    worst, where = largest_difference(theirs.history, ours.history)
    norms = [logged(run, "grad_norm") for run in (theirs, ours)]
    moved = norm(theirs.update) / norm(before)
    difference = relative_difference(theirs.update, ours.update)
    assert len(norms[0]) == theirs.trainer.args.max_steps and min(norms[0]) > 0.1
    assert worst <= (5e-5 if name == "KTO" else 2e-5), where
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert moved > 5e-5 and difference <= 2e-4 and moved * difference <= 3e-8
