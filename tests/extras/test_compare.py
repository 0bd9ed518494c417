# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`compare` finds that the trainers agree, and faults that are planted in ours."""

import pytest
import torch
from helpers.compared import drop_masks, ignore_media, verdicts
from helpers.trainer_utils import audio_rows, image_rows, load, saved, text_rows

from trl_multimodal_rft.cli import main
from trl_multimodal_rft.extras import compare
from trl_multimodal_rft.extras.compare import NOTHING_COMPARED, Run, Step, findings, relative_difference


OPTIONS = ["--steps", "2", "--max_completion_length", "6"]


@pytest.fixture
def images(tmp_path):
    folder = str(tmp_path / "images")
    image_rows().save_to_disk(folder)
    return ["compare", "--model", str(saved("qwen2_5_vl")), "--dataset_name", folder, *OPTIONS]


def test_trainers_agree(images, capsys):
    main(images)
    output = capsys.readouterr().out
    assert verdicts(output) == ["agree"] * 5 and "TRL 1." in output
    assert output.rstrip().endswith("The trainers agree within rounding.")
    assert (
        "seconds of a step" in output and len(output.splitlines()) <= 20 and max(map(len, output.splitlines())) < 200
    )


def test_a_dropped_mask_is_found(images, capsys, monkeypatch):
    drop_masks(monkeypatch)
    with pytest.raises(SystemExit, match="1"):
        main(images)
    output = capsys.readouterr().out
    # Sampling has masks of its own, and the loss of a first update is a mean of advantages
    assert verdicts(output) == ["agree", "DIFFER", "agree", "DIFFER", "DIFFER"]
    assert "DIFFER by more than rounding: log-probability" in output and "`--packing padded`" in output


def test_an_ignored_picture_is_found(images, capsys, monkeypatch):
    ignore_media(monkeypatch)
    with pytest.raises(SystemExit, match="1"):
        main(images)
    assert verdicts(capsys.readouterr().out).count("DIFFER") >= 3


def test_sounds_are_compared_with_padded_rows(tmp_path, capsys, monkeypatch):
    rows = audio_rows()
    monkeypatch.setattr("trl_multimodal_rft.cli.check.load_rows", lambda *_: rows)
    with pytest.raises(SystemExit, match=str(NOTHING_COMPARED)):
        main(["compare", "--model", str(saved("qwen2_audio")), "--dataset_name", "sounds", *OPTIONS])
    output = capsys.readouterr().out
    assert "TRL's trainer takes no audio and no video" in output and verdicts(output) == ["agree"] * 5


def test_options_of_media_hold_for_both_sides(tmp_path, capsys):
    """Files in the folder that an option names, and a bound on pixels, which TRL's trainer doesn't have."""
    (tmp_path / "pictures").mkdir()
    for i, row in enumerate(image_rows()):
        row["image"].save(tmp_path / "pictures" / f"{i}.png")
    names = [f"{i}.png" for i in range(len(image_rows()))]
    rows = image_rows().remove_columns("image").add_column("image", names)
    rows.to_json(tmp_path / "rows.jsonl")
    words = ["compare", "--model", str(saved("qwen2_5_vl")), "--dataset_name", str(tmp_path / "rows.jsonl"), *OPTIONS]
    words += ["--media_dir", str(tmp_path / "pictures")]
    main(words)
    output = capsys.readouterr().out
    assert verdicts(output) == ["agree"] * 5 and "TRL 1." in output
    with pytest.raises(SystemExit, match=str(NOTHING_COMPARED)):
        main([*words, "--max_pixels", "3136"])
    output = capsys.readouterr().out
    assert "TRL's trainer has no `--max_pixels`: the baseline is ours with padded rows." in output
    assert verdicts(output) == ["agree"] * 5 and "Nothing was compared with TRL's trainer." in output


def test_rows_that_trl_fails_on_are_compared_with_padded_rows(images, capsys, monkeypatch):
    def fails(*args, **kwargs):
        raise KeyError("pixels")

    monkeypatch.setattr(compare.WatchedTRL, "_generate_and_score_completions", fails)
    with pytest.raises(SystemExit, match=str(NOTHING_COMPARED)):
        main(images)
    assert "TRL's trainer fails (KeyError: 'pixels'): the baseline is ours" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scale", "reason"), [(0.0, "no weight moved"), (1e4, "no completion was scored")], ids=["zero", "peaked"]
)
def test_runs_that_learn_nothing_are_not_compared(scale, reason, images, tmp_path, capsys):
    """With zero weights no gradient reaches any; with large ones all completions of a prompt are equal."""
    model, processor = load("qwen2_5_vl")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(scale if scale == 0 or "lm_head" in name or "embed_tokens" in name else 1)
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    images[2] = str(tmp_path / "model")
    with pytest.raises(SystemExit, match=str(NOTHING_COMPARED)):
        main(images)
    assert f"Nothing was compared: {reason}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--steps": "0"}, "`--steps` must be at least 1, got 0"),
        ({"--model": "nowhere/at-all"}, "'nowhere/at-all'"),
        ({"--dataset_name": "no.jsonl"}, "no.jsonl"),
        ({"--num_generations": "3"}, "num_generations"),
    ],
)
def test_wrong_input_is_one_line(images, changes, message, capsys):
    words = list(images)
    for name, value in changes.items():
        if name in words:
            words[words.index(name) + 1] = value
        else:
            words += [name, value]
    with pytest.raises(SystemExit):
        main(words)
    errors = capsys.readouterr().err.splitlines()
    assert [line for line in errors if "compare: error" in line and message in line]


def test_a_row_that_would_not_train_is_named(tmp_path, capsys):
    folder = str(tmp_path / "rows")
    text_rows(4).add_column("image", ["nowhere.png"] * 4).save_to_disk(folder)
    with pytest.raises(SystemExit):
        main(["compare", "--model", str(saved("qwen2_5_vl")), "--dataset_name", folder, *OPTIONS])
    assert "row 0 of" in capsys.readouterr().err


# Findings of made-up runs


def made_up(shift=0.0, completions=None, scale=1.0, noise=1e-6):
    generator = torch.Generator().manual_seed(0)
    logps = [-torch.rand(50, generator=generator) + shift for _ in range(4)]
    step = Step(completions or [[1, 2], [3], [4], [5]], loss=0.5, logps=[each + noise for each in logps])
    return Run([step], [2.0 * scale], weights={"w": torch.tensor([1.0, 2.0]) + 0.1 * scale})


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({}, []),
        ({"shift": 0.01}, ["log-probability of a token, largest"]),
        ({"scale": 1.01}, ["norm of a gradient, largest share", "weights, share of 1 updates"]),
        ({"completions": [[1, 2], [3], [4], [6]]}, []),  # one token may lie between two others
        ({"completions": [[1, 2], [3], [5], [6]]}, ["unequal sampled completions"]),
    ],
)
def test_findings(changes, differing):
    before = {"w": torch.tensor([1.0, 2.0])}
    found = findings(before, (made_up(), made_up(noise=3e-6), made_up(**changes)), torch.float32)
    assert [each.name for each in found if not each.agrees] == differing


def test_a_later_nan_differs():
    runs = [made_up(), made_up(noise=3e-6), made_up()]
    for run in runs:
        run.steps += made_up().steps
    runs[2].steps[1].loss = float("nan")
    runs[2].steps[1].logps[1][3] = float("nan")
    found = findings({"w": torch.tensor([1.0, 2.0])}, runs, torch.float32)
    assert [each.name.partition(",")[0] for each in found if not each.agrees] == [
        "log-probability of a token",
        "loss of a step",
    ]


def test_weights_are_compared_by_their_updates():
    before = {"w": torch.zeros(3)}
    after = {"w": torch.tensor([3.0, 4.0, 0.0])}
    assert relative_difference(before, after, {"w": torch.tensor([3.0, 4.0, 0.5])}) == pytest.approx(0.1)
    assert relative_difference(before, before, before) == 0 and relative_difference(before, before, after) == 1
