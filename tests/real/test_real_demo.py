# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The demos of pretrained models that learn to hear and to see, for a step of each of their parts."""

import json

import numpy as np
import pytest
import soundfile
from helpers.real_models import REAL
from scripts.test_examples import launch


pytestmark = REAL


SMALL = ("--dry_run", "--per_device_train_batch_size", "2", "--num_generations", "2", "--max_completion_length", "4")


@pytest.mark.parametrize(("script", "medium"), [("grpo_speech", "audio"), ("grpo_sight", "image")])
def test_a_step_of_each_part(script, medium, tmp_path):
    output = launch(script, tmp_path, *SMALL, cold_start=1, batch_size=2)
    assert "trained in" in output and f"effect of another {medium}" in output and "Dry run: 1 step of 2" in output


def test_a_step_of_each_part_of_a_model_that_speaks(tmp_path):
    output = launch("grpo_say", tmp_path, *SMALL[1:5], "--max_completion_length", "80", cold_start=10, batch_size=20)
    metrics = json.loads((tmp_path / "demo_metrics.json").read_text())
    ears = {"understood_by_whisper", "understood_by_second_ear", "in_named_voice", "whole_frames_reward"}
    assert [*metrics] == ["after SFT", "one_reward", "guarded"]
    assert all(stage.keys() == ears and all(0 <= share <= 1 for share in stage.values()) for stage in metrics.values())
    assert "held_out_rewards/understood_by_second_ear/mean" in output
    assert {path.stem for path in tmp_path.glob("*.wav")} == {"sft", "one_reward", "guarded"}
    samples, rate = soundfile.read(tmp_path / "sft.wav")
    assert rate == 8000 and len(samples) > 60 * rate // 5


def test_codes_are_those_of_codec2():
    import codec2
    import pycodec2

    samples = 0.1 * np.random.default_rng(0).normal(size=8 * 320)
    codes = codec2.encode(samples)
    coder = pycodec2.Codec2(700)
    frames = [coder.encode(frame) for frame in (samples * 32767).astype(np.int16).reshape(8, 320)]
    parts = list(zip((0, 512, 1024, 1040), (9, 9, 4, 6), strict=True))
    bits = [
        "".join(f"{code - first:0{n}b}" for code, (first, n) in zip(codes[i : i + 4], parts, strict=True))
        for i in range(0, 32, 4)
    ]
    assert bits == [f"{int.from_bytes(frame, 'big'):032b}"[:28] for frame in frames]
    decoder = pycodec2.Codec2(700)
    expected = np.concatenate([decoder.decode(frame) for frame in frames]) / 32768
    sound = codec2.decode(codes)
    assert (sound["sampling_rate"], sound["frames"], sound["dropped_frames"]) == (8000, 8, 0)
    assert len(sound["array"]) == len(expected) == len(samples)
    levels = [np.abs(array).reshape(8, 320).mean(1)[2:] for array in (sound["array"], expected)]
    assert np.allclose(*levels, rtol=0.3)  # the decoder draws the phases of noise
    damaged = codec2.decode([*codes[:6], *codes[8:13], codes[12], *codes[13:]])
    assert (damaged["frames"], damaged["dropped_frames"]) == (7, 2)
    assert codec2.decode(codes[1:4]) is None
