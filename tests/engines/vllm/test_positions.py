# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The trainer scores prompts at vLLM's positions, which differ from transformers' after a long video."""

import pytest
import torch
from datasets import Dataset
from helpers.chats import RATE, audio, image, video
from helpers.omni import OMNI
from helpers.tools import talking
from helpers.trainer_utils import load, saved, with_media
from talking import TalkingGRPO, make
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.renderers import renderer_from_config

from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import encode_prompt
from trl_multimodal_rft.engines.vllm_prompts import EnginePrompts, processors_unchecked


pytestmark = pytest.mark.slow


# Multiples of 64 pixels, the smallest size that all families support
def clip(frames, width, height, seed=0):
    return video(frames, 64 * width, 64 * height, seed)


def still(width, height, seed=0):
    return image(64 * width, 64 * height, seed)


def sound(seconds):
    return {**audio(seconds), "sampling_rate": RATE}


TEXT = {"type": "text", "text": "Describe the video."}
MEDIA = {
    "wide": [clip(4, 3, 2), TEXT],
    "long": [clip(16, 1, 1), TEXT],
    "two long": [clip(12, 1, 2), TEXT, clip(20, 1, 1, seed=1), TEXT],
    "images and long": [still(2, 1), clip(16, 1, 1), TEXT, still(1, 3, seed=1), clip(8, 1, 1, seed=2), TEXT],
}
SOUNDS = {"sounds": [clip(16, 1, 1), sound(0.5), TEXT, still(1, 1), sound(0.9), TEXT]}


def rated(media, **options):
    """Without a frame rate, videos are too short in Qwen2.5-VL."""
    return {
        name: [{**block, "sample_fps": 2.0, **options} if block["type"] == "video" else block for block in blocks]
        for name, blocks in media.items()
    }


FAMILIES = {
    "qwen2_vl": MEDIA,
    "qwen2_5_vl": rated(MEDIA),
    "qwen3_vl": rated(MEDIA),
    OMNI: rated(MEDIA | SOUNDS, min_pixels=56 * 56),  # the processor in these tests resizes no videos
}


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_vllm(family, omni):
    folder = str(omni if family == OMNI else saved(family))
    config = EngineArgs(folder, dtype="float32", enforce_eager=True, mm_processor_cache_gb=0).create_engine_config()
    model, processor = load(family)
    prompts = EnginePrompts(renderer_from_config(config), processor, "colocate")
    theirs = object.__new__(ModelRegistry.resolve_model_cls(config.model_config.architectures, config.model_config)[0])
    object.__setattr__(theirs, "config", config.model_config.hf_config)
    if family == OMNI:
        object.__setattr__(theirs, "config", config.model_config.hf_config.thinker_config)
    differ = set()
    for name, blocks in FAMILIES[family].items():
        [row] = rows_to_messages([{"prompt": [{"role": "user", "content": [dict(block) for block in blocks]}]}])
        own, prompt = (
            encode_prompt(row["prompt"], processor, model, keep_decoded=True, use_engine_positions=engine)
            for engine in (False, True)
        )
        with processors_unchecked():
            [rendered] = prompts.renderer.render_cmpl([prompts.with_media(prompt.decoded[0][1], 0)])
        assert rendered["prompt_token_ids"] == prompt.input_ids.tolist()
        features = [
            MultiModalFeatureSpec(data=item, modality=kind, identifier="", mm_position=place, mm_hash="")
            for kind, items in rendered["mm_kwargs"].items()
            for item, place in zip(items, rendered["mm_placeholders"][kind], strict=True)
        ]
        expected, offset = theirs.get_mrope_input_positions(rendered["prompt_token_ids"], features)
        assert torch.equal(prompt.position_ids[-3:, 0], expected.long()), name
        # Positions after the prompt
        assert (prompt.position_ids[-3:, 0, -1] + 1 == len(prompt) + offset).all()
        assert torch.equal(prompt.position_ids[:-3], own.position_ids[:-3])
        if not torch.equal(own.position_ids, prompt.position_ids):
            differ.add(name)
    assert differ == ({"long", "two long", "images and long"} if family in ("qwen2_vl", "qwen2_5_vl") else set())


def test_long_videos_are_scored_as_they_are_sampled(tmp_path):
    videos = [clip(16 + 4 * (i % 2), 1, 1, seed=i)["video"] for i in range(8)]
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Describe the video. {i}"}]} for i in range(8)])
    rows = with_media(rows, "video", videos)
    shown = [[TEXT, clip(20, 1, 1, seed=9), TEXT], [clip(12, 1, 2, seed=10)]]
    trainer = make(TalkingGRPO, talking("qwen2_vl"), rows, shown, tmp_path)
    trainer.train()
    check = trainer.checks.self_check
    assert check.engine_positions and "at the engine's positions" in str(check)
    assert check.padded < 1e-5 and check.packed < 1e-5
    assert check.conversation < 1e-5
    measured = (check.engine, check.engine_updated, check.engine_conversation)
    assert all(largest <= 1e-4 for _, largest in measured)
    # The model's default positions differ
    assert max(trainer.largest) > 1e-3
