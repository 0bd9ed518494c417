# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The matrix of models is only worth its tests if the models see their media and attend to the prompt."""

import functools

import numpy as np
import pytest
import torch
import transformers
from helpers.families import FAMILIES, base64_audio, encode, save, tokenizer
from PIL import ImageOps


every_family = pytest.mark.parametrize("name", FAMILIES)


@functools.cache
def built(name):
    return FAMILIES[name].build()


def kinds(messages):
    """Types of the media of a chat, in order."""
    return [block["type"] for block in messages[0]["content"] if block["type"] != "text"]


def with_other_media(messages):
    """Same chat with inverted images and videos, and silence for audio."""

    def other(block):
        match block:
            case {"type": "image", "image": image}:
                return {**block, "image": ImageOps.invert(image)}
            case {"type": "video", "video": video}:
                return {**block, "video": 255 - video}
            case {"type": "audio", "audio": audio}:
                return {**block, "audio": np.zeros_like(audio)}
            case {"type": "audio", "base64": _}:
                return base64_audio({"audio": np.zeros(8000, dtype=np.float32)})
        return block

    return [{**message, "content": [other(block) for block in message["content"]]} for message in messages]


@torch.no_grad()
def last_logprobs(model, inputs):
    return model(**inputs).logits[0, -1].log_softmax(-1)


@every_family
def test_build_is_tiny_and_reproducible(name):
    model, _ = FAMILIES[name].build()
    again, _ = FAMILIES[name].build()
    assert model.num_parameters() < 1_000_000
    assert not model.training
    for (key, parameter), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert parameter.dtype == torch.float32, key
        assert torch.equal(parameter, other), key


@every_family
def test_special_tokens_agree(name):
    model, processor = built(name)
    words = processor.tokenizer
    assert words.padding_side == "left"
    assert words.eos_token_id is not None and words.pad_token_id is not None
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (words.eos_token_id, words.pad_token_id)
    assert len(words) == model.config.get_text_config().vocab_size


@every_family
def test_prompts_cover_modalities_and_lengths(name):
    _, processor = built(name)
    chats = FAMILIES[name].prompts()
    assert {kind for messages in chats for kind in kinds(messages)} == set(FAMILIES[name].modalities)
    if name != "paligemma":
        assert any(not kinds(messages) for messages in chats)
    if name != "audioflamingo3":
        assert any(len(kinds(messages)) > 1 for messages in chats)
    lengths = {encode(processor, messages)["input_ids"].shape[1] for messages in chats}
    assert len(lengths) > 1 and max(lengths) < 400


def test_omni_prompt_mixes_all_modalities():
    for name in ("qwen2_5_omni", "qwen3_omni_moe"):
        assert any(set(kinds(messages)) == {"image", "audio", "video"} for messages in FAMILIES[name].prompts())


@every_family
def test_media_and_early_tokens_change_logits(name):
    model, processor = built(name)
    for messages in FAMILIES[name].prompts():
        inputs = encode(processor, messages)
        ids = inputs["input_ids"]
        logprobs = last_logprobs(model, inputs)
        assert logprobs.isfinite().all()

        other = encode(processor, with_other_media(messages))
        # silence may make other windows, and so other tokens, only where the audio came as a file
        assert name == "voxtral" or torch.equal(ids, other["input_ids"])
        change = (last_logprobs(model, other) - logprobs).abs().max()
        assert change > 0.05 if kinds(messages) else change == 0

        early = ids.clone()
        early[0, 1] = ids[0, -2]
        change = (last_logprobs(model, {**inputs, "input_ids": early}) - logprobs).abs().max()
        assert change > 0.005


@every_family
def test_generates(name):
    model, processor = built(name)
    inputs = encode(processor, FAMILIES[name].prompts()[0])
    inputs.pop("labels", None)  # PaliGemma's processor adds them
    ids = model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert ids.shape[1] == inputs["input_ids"].shape[1] + 3


# Granite Speech's substitute extractor is unknown to transformers, Phi-4's processor forgets its template
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("granite_speech", "phi4_multimodal")])
def test_saved_family_loads(name, tmp_path):
    model, processor = built(name)
    save(name, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    loaded = getattr(transformers, config.architectures[0]).from_pretrained(tmp_path).eval()
    loaded_processor = transformers.AutoProcessor.from_pretrained(tmp_path)
    assert type(loaded_processor) is type(processor)
    assert loaded_processor.tokenizer.padding_side == "left"
    assert loaded.generation_config.eos_token_id == model.generation_config.eos_token_id
    for messages in FAMILIES[name].prompts():
        inputs, reloaded = encode(processor, messages), encode(loaded_processor, messages)
        assert torch.equal(inputs["input_ids"], reloaded["input_ids"])
        torch.testing.assert_close(last_logprobs(loaded, reloaded), last_logprobs(model, inputs), rtol=0, atol=1e-5)


def test_router_loss_is_returned():
    model, processor = built("qwen3_vl_moe")
    inputs = encode(processor, FAMILIES["qwen3_vl_moe"].prompts()[0])
    output = model(**inputs, labels=inputs["input_ids"])
    plain = model(**inputs, labels=inputs["input_ids"], output_router_logits=False)
    assert output.aux_loss > 0
    torch.testing.assert_close(output.loss - plain.loss, 0.1 * output.aux_loss)


def test_sliding_windows_are_shorter_than_prompts():
    for name in ("gemma3", "gemma3n", "gemma4"):
        model, processor = built(name)
        config = model.config.get_text_config()
        assert set(config.layer_types) == {"sliding_attention", "full_attention"}
        assert all(
            encode(processor, messages)["input_ids"].shape[1] > config.sliding_window
            for messages in FAMILIES[name].prompts()
        )


def test_tokenizer_pads_left():
    words = tokenizer(image_token="<image>")
    mask = words(["a", "a cat, a dog or a bird"], padding=True, return_tensors="pt")["attention_mask"]
    assert mask[0, 0] == 0 and mask[:, -1].all()
