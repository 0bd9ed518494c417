# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Recordings as rows of a model that speaks, against the codec's own encode, and a supervised run on them."""

import numpy as np
import pytest
import soundfile
import torch
from datasets import Dataset
from helpers.speech import codec_folder, speech_model, speech_tokenizer
from transformers import EncodecFeatureExtractor, MimiModel

from trl_multimodal_rft import MultimodalSFTConfig, MultimodalSFTTrainer
from trl_multimodal_rft.cli import main
from trl_multimodal_rft.data import load_speech


@pytest.fixture
def recordings(tmp_path):
    """A folder as `datasets` reads it, with a table."""
    folder = tmp_path / "recordings"
    folder.mkdir()
    lines = ["file_name,text,voice"]
    for i, word in enumerate(("one", "two", "one")):
        samples = np.random.default_rng(i).normal(scale=0.1, size=4000 + 2000 * i)
        soundfile.write(folder / f"{i}.wav", samples, 24000)
        lines.append(f"{i}.wav,{word},v{i}")
    (folder / "metadata.csv").write_text("\n".join(lines))
    return folder


@pytest.fixture
def codec():
    folder = codec_folder("mimi")
    EncodecFeatureExtractor(feature_size=1, sampling_rate=24000).save_pretrained(folder)
    return folder


def test_completions_are_the_codes_of_recordings(recordings, codec):
    rows = load_speech(recordings, codec=codec, template="say {text}")
    assert rows["prompt"][:2] == ["say one", "say two"] and rows["solution"][:2] == ["one", "two"]
    assert rows["voice"][:3] == ["v0", "v1", "v2"] and "audio" in rows.column_names
    model = MimiModel.from_pretrained(codec).eval()
    tokenizer = speech_tokenizer()
    for i, completion in enumerate(rows["completion"]):
        samples, _ = soundfile.read(recordings / f"{i}.wav", dtype="float32")
        with torch.no_grad():
            codes = model.encode(torch.from_numpy(samples)[None, None]).audio_codes[0]
        expected = [code + 32 * codebook for frame in codes.T.tolist() for codebook, code in enumerate(frame)]
        assert tokenizer(completion)["input_ids"] == [6 + code for code in expected]


def test_a_model_learns_to_speak_from_prepared_recordings(recordings, codec, tmp_path, capsys):
    output = tmp_path / "rows"
    main(
        [
            "prepare",
            "speech",
            str(recordings),
            "--codec",
            codec,
            "--template",
            "say {text}",
            "--output_dir",
            str(output),
        ]
    )
    assert "train: 3 rows of" in capsys.readouterr().out
    rows = Dataset.from_parquet(str(next(output.rglob("*.parquet"))), keep_in_memory=True)
    tokenizer = speech_tokenizer()
    trainer = MultimodalSFTTrainer(
        model=speech_model(tokenizer),
        processing_class=tokenizer,
        train_dataset=rows,
        args=MultimodalSFTConfig(
            str(tmp_path / "run"), max_steps=20, learning_rate=1e-2, logging_steps=10, report_to="none", use_cpu=True,
            bf16=False, gradient_checkpointing=False, save_strategy="no", ignored_media_columns=["audio"],
        ),
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


def test_what_is_missing_is_named(recordings, codec, tmp_path):
    with pytest.raises(ValueError, match="There is no column 'words' among .*; recordings are in 'audio'"):
        load_speech(recordings, codec=codec, prompt_key="words")
    with pytest.raises(ValueError, match="decodes no codes; name a codec"):
        speech_model(speech_tokenizer()).save_pretrained(tmp_path / "llama")
        load_speech(recordings, codec=str(tmp_path / "llama"))
