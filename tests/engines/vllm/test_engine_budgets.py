# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""vLLM gets the same media within the budgets, and the same arguments of the processor."""

import pytest
import torch
from datasets import Dataset
from helpers.chats import chat, image, text
from helpers.engine_runs import make
from helpers.files import write_film
from helpers.trainer_utils import length_and_sum, load
from transformers import AutoProcessor
from vllm.engine.arg_utils import EngineArgs
from vllm.renderers import renderer_from_config

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.data.reading.rules import MediaRules
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import encode_prompt
from trl_multimodal_rft.engines.vllm_prompts import EnginePrompts, processors_unchecked


pytestmark = pytest.mark.slow


def with_larger_images(family, folder):
    """Returns the folder of a model whose images may have nine tiles if it is Idefics3."""
    model, processor = load(family)
    if family == "idefics3":
        processor.image_processor.size = {"longest_edge": 84}
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "idefics3", "internvl"])
def test_ids_and_pixels_are_the_same(family, tmp_path):
    folder = with_larger_images(family, tmp_path / "model")
    config = EngineArgs(folder, dtype="float32", enforce_eager=True, mm_processor_cache_gb=0)
    model, _ = load(family)
    processor = AutoProcessor.from_pretrained(folder)
    prompts = EnginePrompts(renderer_from_config(config.create_engine_config()), processor, "colocate")
    write_film(tmp_path / "film.mp4")
    blocks = [image(200, 100)]
    if family.startswith("qwen"):
        blocks.append({"type": "video", "path": str(tmp_path / "film.mp4")})
    most = {"idefics3": 56 * 56, "internvl": 900}.get(family, 5000)
    rules = MediaRules(max_pixels=most, video_fps=2.0, max_frames=4)
    for given in (rules, MediaRules()):
        [row] = rows_to_messages([{"prompt": chat(*blocks, text("What is it?"))}], rules=given)
        prompt = encode_prompt(row["prompt"], processor, model, keep_decoded=True)
        with processors_unchecked():
            [rendered] = prompts.renderer.render_cmpl([prompts.with_media(prompt.decoded[0][1], 0)])
        assert rendered["prompt_token_ids"] == prompt.input_ids.tolist()
        for name in ("pixel_values", "pixel_values_videos"):
            found = [item[name].data for items in rendered["mm_kwargs"].values() for item in items if name in item]
            if found and name in prompt.media:
                theirs = torch.cat([each.reshape(-1) for each in found])
                ours = prompt.media[name].reshape(-1)
                assert theirs.shape == ours.shape
                # Its models of Qwen normalize pixels themselves
                assert theirs.dtype == torch.uint8 or torch.equal(theirs, ours)
        if given is rules:
            short = len(prompt)
    assert short < len(prompt)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_a_run_samples_within_the_budget(family, tmp_path):
    rows = [{"prompt": chat(text(f"What is it? {i}")), "image": image(160, 120, seed=i)["image"]} for i in range(4)]
    objects = {"model": with_larger_images(family, tmp_path / "model")}
    options = {"max_steps": 2, "max_pixels": 56 * 56}
    trainer = make(MultimodalGRPOTrainer, family, Dataset.from_list(rows), tmp_path / "out", objects, **options)
    trainer.train()
    check = trainer.checks.self_check
    assert all(largest <= 1e-4 for _, largest in (check.engine, check.engine_updated))


def test_sounds_of_videos_are_refused(tmp_path):
    rows = Dataset.from_list([{"prompt": chat(text("What is it?"))}] * 4)
    options = {"use_cpu": True, "bf16": False, "num_generations": 2, "per_device_train_batch_size": 2}
    args = MultimodalGRPOConfig(str(tmp_path), use_vllm=True, use_audio_in_video=True, **options)
    model, processor = load("qwen2_5_omni")
    with pytest.raises(ValueError, match="`use_audio_in_video=True` needs `use_vllm=False`"):
        MultimodalGRPOTrainer(model, length_and_sum, args, train_dataset=rows, processing_class=processor)
