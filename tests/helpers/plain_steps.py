# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Short runs of the trainers in float32, and comparisons of their updates with those of the plain steps."""

import copy
import tempfile
from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset

from helpers.samplers import PseudoRandom
from helpers.trainer_utils import (
    Gradients,
    audio_rows,
    image_rows,
    load,
    make_trainer,
    norm,
    relative_difference,
    with_media,
)
from trl_multimodal_rft.extras.compare_plain import PlainComparison
from trl_multimodal_rft.plain.forward import Completion, encode, encode_answer


MEDIA = [("qwen2_5_vl", image_rows), pytest.param("qwen2_audio", audio_rows, marks=pytest.mark.slow)]
TOLERANCE = 1e-5  # of float32
# Answers to rows
CHOSEN = ["It is a cat.", "Two birds sing, one after the other.", "red", "There is a dog here"]
REJECTED = ["blue", "No", "It is a bird and a dog", "7"]


class Records(PseudoRandom):
    """Sampler that records the tokens of its completions."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.ids = []

    def __call__(self, *args, **kwargs):
        ids, logps = super().__call__(*args, **kwargs)
        self.ids += ids
        return ids, logps


@dataclass
class Trained:
    """What a run computed: the tokens that it sampled, and losses and gradients of its updates."""

    processor: object
    start: torch.nn.Module  # the policy before the run, in float64
    ids: list[list[int]]
    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    update: dict[str, torch.Tensor]  # change of each parameter over all updates


def trained(trainer_class, family, rows, objects=None, model=None, samples=True, **options) -> Trained:
    """Trains on rows in their order. If the trainer samples, a batch has 4 completions of each of two prompts."""
    own, processor = load(family)
    model = own if model is None else model
    start = copy.deepcopy(model).double().eval()
    gradients = Gradients()
    objects = {"model": model, "processing_class": processor, "callbacks": [gradients], **(objects or {})}
    options = {"learning_rate": 0.05, **options}
    if samples:
        options |= {"sampler": Records, "shuffle_dataset": False}
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(trainer_class, family, rows, folder, objects=objects, **options)
        step = trainer.training_step

        def training_step(*args, **kwargs):
            loss = step(*args, **kwargs)
            losses.append(loss.item())
            return loss

        trainer.training_step = training_step
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
    update = {name: p.detach() - before[name] for name, p in trainer.model.named_parameters()}
    ids = trainer.sampler.ids if samples else []
    return Trained(processor, start, ids, losses, gradients.seen, update)


def messages_of(row) -> list[dict]:
    """Returns a row's prompt with its media in blocks."""
    blocks = [{"type": kind, kind: row[kind]} for kind in ("image", "audio") if kind in row]
    if "audio" in row:
        blocks[0]["audio"] = row["audio"]["array"]
    (message,) = row["prompt"]
    return [{"role": "user", "content": [*blocks, {"type": "text", "text": message["content"]}]}]


def groups_of(run: Trained, rows, reward=None, size: int = 4) -> list[list[Completion]]:
    """Returns the completions of a run for the plain step, in groups of one prompt."""
    groups = []
    for start in range(0, len(run.ids), size):
        prompt = encode(run.processor, messages_of(rows[start // size]))
        ids = run.ids[start : start + size]
        rewards = [0.0] * size if reward is None else reward(completion_ids=ids)
        groups.append([Completion(prompt, torch.tensor(i), r) for i, r in zip(ids, rewards, strict=True)])
    return groups


def difference(trained_gradients, plain_gradients) -> float:
    """Returns the relative difference of gradients, where parameters without effect have none or 0."""
    ours, plain = (
        {name: value.double() for name, value in gradients.items() if value is not None and value.any()}
        for gradients in (trained_gradients, plain_gradients)
    )
    assert len(plain) > 10
    return relative_difference(plain, ours)


def assert_same(
    run: Trained, updates: list[tuple[float, dict[str, torch.Tensor]]], tolerance: float = TOLERANCE
) -> None:
    """Asserts that a run's updates are those of a plain step, given as loss and gradients, and aren't small."""
    assert len(run.losses) == len(run.gradients) == len(updates)
    for i, (loss, gradients) in enumerate(updates):
        assert norm(gradients) > 0.1
        assert abs(run.losses[i] - loss) <= tolerance * max(1, abs(loss)), (run.losses[i], loss)
        assert difference(run.gradients[i], gradients) <= tolerance, difference(run.gradients[i], gradients)
    assert any(change.any() for change in run.update.values())


def assert_plain(trainer_class, family: str, rows, n_updates: int, **options) -> PlainComparison:
    """Asserts that a run's updates are those of the plain step, or of its loss and estimator on plain numbers."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"sampler": PseudoRandom, "self_check": False, **options}
        comparison = PlainComparison(make_trainer(trainer_class, family, rows, folder, **options))
        comparison.train(n_updates)
    assert not comparison.differs, comparison.report()
    return comparison


# Rows with answers


def image_pairs() -> Dataset:
    """Returns rows with an image and two answers."""
    return _with_answers(image_rows())


def sound_pairs() -> Dataset:
    """Returns rows with a sound and two answers."""
    rows = [{name: value for name, value in row.items() if name == "prompt"} for row in audio_rows()]
    return with_media(_with_answers(Dataset.from_list(rows)), "audio", [row["audio"] for row in audio_rows()])


PAIRS = [("qwen2_5_vl", image_pairs), pytest.param("qwen2_audio", sound_pairs, marks=pytest.mark.slow)]


def _with_answers(rows: Dataset) -> Dataset:
    chosen, rejected = (
        [[{"role": "assistant", "content": texts[i % 4]}] for i in range(len(rows))] for texts in (CHOSEN, REJECTED)
    )
    return rows.add_column("chosen", chosen).add_column("rejected", rejected)


def answers_of(run: Trained, rows: Dataset, column: str) -> list[Completion]:
    """Returns the answers of a column for the plain step."""
    return [encode_answer(run.processor, messages_of(row), row[column][0]["content"]) for row in rows]


def answering(trainer_class, family: str, rows: Dataset, **options) -> Trained:
    """Trains for one update on all rows."""
    options = {"max_steps": 1, "reward": None, "train_sampling_strategy": "sequential", **options}
    return trained(trainer_class, family, rows, samples=False, **options)
