# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`compare` on pretrained models finds that trainers agree, and faults that are planted in ours."""

import re

import pytest
from helpers.compared import drop_masks, ignore_media, verdicts
from helpers.real_models import REAL, folder, rows_of

from trl_multimodal_rft.cli import main


pytestmark = REAL
BASELINES = {"text": "TRL 1.", "image": "TRL 1.", "sound": "padded rows"}


def compared(kind, monkeypatch):
    rows = rows_of(kind, 2)
    monkeypatch.setattr("trl_multimodal_rft.cli.check.load_rows", lambda *_: rows)
    sizes = ["--steps", "2", "--max_completion_length", "6", "--per_device_train_batch_size", "4"]
    main(["compare", "--model", folder(kind), "--dataset_name", kind, "--num_generations", "4", *sizes])


@pytest.mark.parametrize("kind", BASELINES)
def test_trainers_agree(kind, capsys, monkeypatch):
    compared(kind, monkeypatch)
    output = capsys.readouterr().out
    assert verdicts(output) == ["agree"] * 5 and BASELINES[kind] in output
    # By the statistics of a batch, the batch norms of the model that sees would magnify rounding to 0.01
    rounding = re.search(r"log-probability of a token, largest +\S+ +(\S+)", output)
    assert rounding is not None and float(rounding[1]) < 1e-3


@pytest.mark.parametrize("plant", [drop_masks, ignore_media])
def test_a_fault_is_found(plant, capsys, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(SystemExit, match="1"):
        compared("image", monkeypatch)
    assert "DIFFER" in verdicts(capsys.readouterr().out)
