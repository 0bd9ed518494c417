# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Media ablation: answers of a model that listens, and log-probabilities during training."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from datasets import Audio, Dataset, load_dataset
from helpers.chats import RATE, user
from helpers.families import ALL_FAMILIES, ONE_OF_EACH_KIND
from helpers.marks import slow_but
from helpers.trainer_utils import Recording, load, make_trainer

from trl_multimodal_rft import (
    MultimodalGRPOTrainer,
    MultimodalPPOTrainer,
    MultimodalRLOOTrainer,
)
from trl_multimodal_rft.cli.arguments import parse
from trl_multimodal_rft.data.reading.refs import MediaError, iter_refs
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import encode_prompt
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate, paired_interval
from trl_multimodal_rft.extras import filter
from trl_multimodal_rft.plain.forward import Completion, encode, in_double, log_probabilities
from trl_multimodal_rft.rewards import accuracy_reward
from trl_multimodal_rft.trainers.base.logs import is_due
from trl_multimodal_rft.views import as_view


QUESTION = "Is there a cat or a dog?"
# answers
LOW = "1"
HIGH = "2"
NOTHING = "0"
PITCHES = {LOW: (200, 500), HIGH: (1500, 3000), NOTHING: (0, 0)}


def tone(answer, generator):
    hertz = generator.uniform(*PITCHES[answer])
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(0.3 * RATE)) / RATE)).astype(np.float32)


def told(answer):
    return f"{QUESTION} The answer is {answer}."


@pytest.fixture(scope="module")
def listener(tmp_path_factory):
    """
    Returns the folder of a model that has learned to answer whether a tone is low or high, or "nothing" for silence,
    unless the question contains an answer to repeat.
    """
    model, processor = load("qwen2_audio")
    generator = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        cases = [(QUESTION, tone(answer, generator), answer) for answer in PITCHES]
        cases += [(told(answer), tone(heard, generator), answer) for answer, heard in product((LOW, HIGH), PITCHES)]
        blocks = [[{"type": "audio"}, {"type": "text", "text": question}] for question, _, _ in cases]
        texts = [
            processor.apply_chat_template(user(each), tokenize=False, add_generation_prompt=True)
            + f"{answer}<|im_end|>"
            for each, (_, _, answer) in zip(blocks, cases, strict=True)
        ]
        sounds = [sound for _, sound, _ in cases]
        batch = processor(text=texts, audio=sounds, return_tensors="pt", padding=True, sampling_rate=RATE)
        labels = batch["input_ids"].clone()
        labels[:, :-2] = -100  # an answer and its end
        loss = model(**batch, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.01
    folder = tmp_path_factory.mktemp("listener")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tones(tmp_path_factory):
    """Returns eight rows with tones, and one without. Every other row names an answer other than that of its tone."""
    folder = tmp_path_factory.mktemp("tones")
    generator = np.random.default_rng(1)
    rows = []
    for i in range(8):
        answer = (LOW, HIGH)[i // 2 % 2]
        heard = answer if i % 2 else {LOW: HIGH, HIGH: LOW}[answer]
        soundfile.write(folder / f"{i}.wav", tone(heard, generator), RATE)
        prompt = user(QUESTION if i % 2 else told(answer))
        rows.append({"prompt": prompt, "audio": str(folder / f"{i}.wav"), "solution": answer})
    rows.append({"prompt": user(told(HIGH)), "audio": None, "solution": HIGH})
    return Dataset.from_list(rows).cast_column("audio", Audio(decode=False))


def loaded(folder):
    return type(load("qwen2_audio")[0]).from_pretrained(folder), load("qwen2_audio")[1]


def test_interval_is_that_of_bonett_and_price():
    # 12 pairs with both, 4 and 26 with one, 6 with neither: the documented example of the R package `statpsych`
    differences = [0] * 18 + [1] * 26 + [-1] * 4
    assert paired_interval(differences) == pytest.approx((0.2548067, 0.6251933), abs=1e-7)
    low, high = paired_interval([0.0] * 20)
    assert low == -high < 0
    assert paired_interval([1.0] * 5)[1] == 1
    many = np.random.default_rng(0).choice([-0.5, 0.0, 0.25, 1.0], 20000)
    half = 1.959964 * many.std() / np.sqrt(len(many))
    assert paired_interval(many) == pytest.approx((many.mean() - half, many.mean() + half), abs=1e-4)
    for wrong in ([], [0.5, 1.5], [float("nan")]):
        with pytest.raises(ValueError, match="between -1 and 1"):
            paired_interval(wrong)


def test_half_of_the_rows_need_their_sound(listener, tones):
    model, processor = loaded(listener)
    config = EvaluationConfig(ablate="audio", max_completion_length=2, batch_size=3)

    def reward(completions, log_metric, **columns):
        log_metric("completions", len(completions))
        return accuracy_reward(completions, **columns)

    result = evaluate(model, processor, tones, reward, config)
    metrics = result.metrics
    assert metrics["metric/completions"] == 3  # also of eight completions without their sounds, it would be less
    assert (metrics["accuracy"], metrics["rows"], metrics["audio_rows"]) == (1, 9, 8)
    assert (metrics["accuracy_with_audio"], metrics["accuracy_without_audio"]) == (1, 0.5)
    assert metrics["audio_contribution"] == 0.5
    ends = metrics["audio_contribution_low"], metrics["audio_contribution_high"]
    assert ends == pytest.approx(paired_interval([0, 1] * 4))
    silent = [row["completions_without"] for row in result.rows]
    assert silent == [[NOTHING] if i % 2 else [row["solution"]] for i, row in enumerate(tones)][:8] + [None]
    # Replaces a tone by that of another row, which is high where this one is low
    pair = [tones[1], tones[3], tones[8]]
    sampling = {"num_samples": 2, "temperature": 0.1, "max_completion_length": 2}
    config = EvaluationConfig(ablate="audio", ablate_with="other_row", **sampling)
    result = evaluate(model, processor, pair, accuracy_reward, config)
    assert [row["completions_without"] for row in result.rows] == [[HIGH] * 2, [LOW] * 2, None]
    assert (result.metrics["audio_contribution"], result.metrics["audio_rows"]) == (1, 2)
    with pytest.raises(MediaError, match="no other row has a different audio"):
        evaluate(model, processor, [tones[1], tones[1]], accuracy_reward, config)
    with pytest.raises(ValueError, match="No row has media of the modality 'audio'"):
        evaluate(
            model, processor, [{name: tones[8][name] for name in ("prompt", "solution")}], accuracy_reward, config
        )


@pytest.mark.parametrize(
    "options",
    [{"ablate": "sound"}, {"ablate": "audio", "ablate_with": "silence"}, {"ablate": "audio", "ablate_with": "crop"}],
)
def test_unknown_ablations_are_refused(options):
    with pytest.raises(ValueError, match="`ablate|There is no view 'silence'"):
        EvaluationConfig(**options)


def test_filter_keeps_exactly_what_needs_its_sound(listener, tones, tmp_path, capsys):
    tones.to_parquet(tmp_path / "tones.parquet")
    kept = tmp_path / "kept"
    arguments = ["--dataset_name", tmp_path / "tones.parquet", "--model_name_or_path", listener, "--output_dir", kept]
    arguments += ["--num_samples", 2, "--temperature", 0.1, "--max_completion_length", 2]

    def filtered(*options):
        filter.main(*parse(filter.ARGUMENTS, [str(each) for each in (*arguments, *options)]))

    with pytest.raises(ValueError, match="set `--ablate` to"):
        filtered()
    with pytest.raises(ValueError, match="No row is left"):
        filtered("--ablate", "audio", "--min_accuracy_with", "1.5")
    assert "- 4 dropped: wrong with the audio" in capsys.readouterr().out and not kept.exists()
    filtered("--ablate", "audio")
    assert "4 of 9 rows need their audio (blank in its place)" in capsys.readouterr().out
    rows = load_dataset(str(kept), split="train").cast_column("audio", Audio(decode=False))
    assert rows["prompt"] == [user(QUESTION)] * 4 and rows["solution"] == tones["solution"][1:8:2]
    for row, original in zip(rows, tones.select(range(1, 8, 2)), strict=True):
        assert row["audio"]["bytes"] == Path(original["audio"]["path"]).read_bytes()
    report = json.loads((kept / filter.REPORT).read_text())
    assert (report["rows"], report["kept"]) == (9, 4)
    assert report["dropped"] == {"correct without the audio": 4, "no audio": 1}
    assert [row["row"] for row in report["dropped_rows"]] == [0, 2, 4, 6, 8]
    assert report["dropped_rows"][0]["accuracy_without"] == 1
    assert report["dropped_rows"][-1]["accuracy_without"] is None
    with pytest.raises(ValueError, match="isn't an empty folder"):
        filtered("--ablate", "audio")


@pytest.mark.parametrize(
    ("correct", "without", "reason"),
    [
        ([True, False], [False, False], None),
        ([True, False], [True, False, False, False], None),  # both at their bounds
        ([True, True], None, "no image"),
        ([True, None], [False, False], "not scored"),
        ([False, False], [True, True], "correct without the image"),
        ([True, True], [True, False], "correct without the image"),
        ([False, False], [False, False], "wrong with the image"),
    ],
)
def test_why_rows_are_dropped(correct, without, reason):
    assert (
        filter.drop_reason_by_contribution({"correct": correct, "correct_without": without}, "image", 0.5, 0.25)
        == reason
    )


# Replaced media


def placed(family):
    """Returns prompts of a family as trainers encode them, messages with references."""
    for chat in ALL_FAMILIES[family].prompts():
        for block in chat[0]["content"]:
            if block["type"] == "audio":
                block["sampling_rate"] = RATE
        yield rows_to_messages([{"prompt": chat}])[0]["prompt"]


FAMILIES = [name for name, family in ALL_FAMILIES.items() if family.modalities]


@pytest.mark.parametrize("family", slow_but(FAMILIES, *ONE_OF_EACH_KIND))
def test_nothing_changes_but_the_features(family):
    """Tokens and shapes stay unchanged, and features are finite, for every family."""
    model, processor = ALL_FAMILIES[family].build()
    found = set()
    for messages in placed(family):
        plain = encode_prompt(messages, processor, model)
        for kind in plain.modalities - found:
            found.add(kind)
            refs = [ref for ref in iter_refs(messages) if ref.modality == kind]
            for view in (
                as_view("blank").for_modality(kind),
                as_view("other_row").for_modality(kind).with_others(refs[::-1]),
            ):
                other = encode_prompt(messages, processor, model, view=view)
                assert torch.equal(other.input_ids, plain.input_ids)
                assert {k: v.shape for k, v in other.media.items()} == {k: v.shape for k, v in plain.media.items()}
                assert all(value.isfinite().all() for value in other.media.values())
                if not view.others:
                    assert any(not torch.equal(other.media[name], plain.media[name]) for name in plain.media)
    assert found == {*ALL_FAMILIES[family].modalities}


# During training


def plain_logps(model, processor, row, ids, silent):
    """Returns log-probabilities of a completion of the plain step on a tone."""
    sound = soundfile.read(row["audio"]["path"], dtype="float32")[0]
    blocks = [{"type": "audio", "audio": 0 * sound if silent else sound}]
    blocks.append({"type": "text", "text": row["prompt"][0]["content"]})
    prompt = encode(processor, [{"role": "user", "content": blocks}])
    with torch.no_grad():
        return log_probabilities(in_double(model), Completion(prompt, ids))


@pytest.mark.parametrize(
    "trainer_class",
    slow_but([MultimodalGRPOTrainer, MultimodalRLOOTrainer, MultimodalPPOTrainer], MultimodalGRPOTrainer),
)
def test_metric_is_that_of_the_models_own_forward(listener, tones, tmp_path, trainer_class):
    model, processor = loaded(listener)
    options = {"media_contribution_steps": 1, "max_steps": 1, "learning_rate": 0.0, "shuffle_dataset": False}
    options |= {"beta": 0.0, "max_completion_length": 4, "temperature": 1.0}
    rows = tones.select([0, 1])
    objects = {"model": model, "processing_class": processor}
    recorded = type("Recorded", (Recording, trainer_class), {})
    trainer = make_trainer(recorded, "qwen2_audio", rows, tmp_path, objects=objects, **options)
    trainer.train()
    (value,) = [logs["media/contribution"] for logs in trainer.state.log_history if "media/contribution" in logs]
    moved = []
    rollout = trainer.draws[0].batch
    for row, place in ((rows[0], 0), (rows[1], 4)):
        ids = rollout.completion_ids[place][rollout.completion_mask[place].bool()]
        with_tone, silent = (plain_logps(model, processor, row, ids, each) for each in (False, True))
        moved.append((with_tone - silent).abs())
    assert value == pytest.approx(torch.cat(moved).mean().item(), rel=1e-4)
    assert moved[1].mean() > 1 and moved[1].mean() > 3 * moved[0].mean()  # only the second needs its tone


def test_who_does_not_listen_gains_nothing(tones, tmp_path):
    """The gain is exactly zero. The trainer measures none for text, at other steps, or if the option is off."""
    model, processor = load("qwen2_audio")
    for parameter in model.model.multi_modal_projector.parameters():
        torch.nn.init.zeros_(parameter)
    objects = {"model": model, "processing_class": processor}
    options = {"objects": objects, "max_steps": 2, "learning_rate": 0.0, "self_check": False}
    for rows, every, found in ((tones, 2, [0.0]), (tones, 0, []), (tones.remove_columns("audio"), 1, [])):
        trainer = make_trainer(
            MultimodalGRPOTrainer, "qwen2_audio", rows, tmp_path, media_contribution_steps=every, **options
        )
        trainer.train()
        names = {name for logs in trainer.state.log_history for name in logs if name.startswith("media/contribution")}
        assert names == ({"media/contribution"} if found else set())
        logged = {logs["step"]: logs.get("media/contribution") for logs in trainer.state.log_history[:-1]}
        assert [value for value in logged.values() if value is not None] == found
        assert not found or {step for step, value in logged.items() if value is not None} == {2}


def test_when_a_batch_is_due():
    assert [step for step in range(12) if is_due(5, step, 1)] == [4, 9]
    assert [step for step in range(0, 24, 4) if is_due(10, step, 4)] == [8, 16]
    assert all(is_due(2, step, 4) for step in range(0, 24, 4))
