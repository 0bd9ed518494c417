# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tiny random models of real transformers architectures, each with its real processor, all built without a network.

The parametrised tests of the packing and of the trainers run over [`FAMILIES`]. Every model has fewer than a million
parameters, two or three decoder layers and a small vocabulary, and its weights are scaled up after a seeded
initialisation: with the usual small weights attention is nearly uniform and media hardly reach the logits, so that a
wrong mask, a wrong position or a lost image would go unnoticed.
"""

import base64
import functools
import io
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.audio_utils import mel_filter_bank, spectrogram


RATE = 16000  # Hz; every audio family listens at this rate
CORPUS = [
    "You are a helpful assistant. system user assistant",
    "What do you hear in the audio? What is in the image? Describe the video. Compare them.",
    "Is there a cat, a dog or a bird? The answer is red green blue 0 1 2 3 4 5 6 7 8 9 10",
]


@dataclass(frozen=True)
class Family:
    """
    One architecture of the matrix.

    Args:
        name (`str`):
            Key in [`FAMILIES`].
        build (`Callable`):
            Returns `(model, processor)`: float32, in evaluation mode, the same weights at every call.
        prompts (`Callable`):
            Returns chats, each a list with one user message whose content blocks hold the media themselves.
        modalities (`tuple[str, ...]`):
            Which of `"image"`, `"audio"` and `"video"` the prompts contain.
        note (`str`, *optional*, defaults to `""`):
            What differs from the checkpoint a user would load.
    """

    name: str
    build: Callable[[], tuple[hf.PreTrainedModel, hf.ProcessorMixin]]
    prompts: Callable[[], list[list[dict]]]
    modalities: tuple[str, ...]
    note: str = ""

    def save(self, folder: str | Path) -> Path:
        """Saves model and processor, so that both can be loaded from `folder`."""
        model, processor = self.build()
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        return Path(folder)


def encode(processor: hf.ProcessorMixin, messages: list[dict], **options) -> hf.BatchFeature:
    """Turns one chat into model inputs of batch size 1, ending where the assistant is to answer."""
    return processor.apply_chat_template(
        [messages], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True, **options
    )


# Content blocks


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def mosaic(frames: int, height: int, width: int, seed: int) -> np.ndarray:
    """Random colours in blocks of 14 x 14 pixels: the patches of white noise would all look alike to a tower."""
    rows, columns = -(-height // 14), -(-width // 14)
    colours = np.random.default_rng(seed).integers(0, 256, (frames, rows, columns, 3), dtype=np.uint8)
    return colours.repeat(14, axis=1).repeat(14, axis=2)[:, :height, :width]


def image(width: int, height: int, seed: int = 0) -> dict:
    return {"type": "image", "image": Image.fromarray(mosaic(1, height, width, seed)[0])}


def audio(seconds: float, seed: int = 0) -> dict:
    start, end = np.random.default_rng(seed).uniform(300, 3000, 2)  # Hz; noise would sound the same for every seed
    time = np.arange(int(seconds * RATE)) / RATE
    chirp = 0.5 * np.sin(2 * np.pi * (start + (end - start) * time / (2 * seconds)) * time)
    return {"type": "audio", "audio": chirp.astype("float32")}


def video(frames: int, width: int, height: int, seed: int = 0) -> dict:
    return {"type": "video", "video": mosaic(frames, height, width, seed)}


def chat(*blocks: dict) -> list[dict]:
    return [{"role": "user", "content": list(blocks)}]


# Tokenizers and templates


def tokenizer(**named: str) -> hf.PreTrainedTokenizerFast:
    """Byte-level BPE tokenizer with ChatML tokens and `named` ones, such as `image_token="<image>"`."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *dict.fromkeys(named.values())]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(CORPUS * 20, trainer)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        extra_special_tokens=named,
    )


def template(**placeholders: str) -> str:
    """ChatML template that writes `placeholders[type]` for a content block of another type than text."""
    blocks = "".join(f"{{% elif block.type == '{kind}' %}}{mark}" for kind, mark in placeholders.items())
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
        "{% if block.type == 'text' %}{{ block.text }}" + blocks + "{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


# Models


def instantiate(model_class: type, config: hf.PreTrainedConfig, processor: hf.ProcessorMixin, scale: float = 6.0):
    """Seeded model with scaled weights whose special token ids are the tokenizer's; returns `(model, processor)`."""
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2 and not parameter.any():  # such as the image projection of Gemma 3
                parameter.normal_(std=0.1)
            elif parameter.ndim >= 2 and parameter.abs().max() < 0.5:
                parameter.mul_(scale)
    special = special_ids(processor.tokenizer)
    model.generation_config = hf.GenerationConfig(**special)
    for key, value in special.items():
        setattr(model.config, key, value)
    return model, processor


def special_ids(tokenizer: hf.PreTrainedTokenizerFast) -> dict[str, int | None]:
    return {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }


def decoder(tokenizer: hf.PreTrainedTokenizerFast, **changes) -> dict:
    """Settings that the text configs of most families share."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        **special_ids(tokenizer),
        **changes,
    }


def clip_vision(**changes) -> dict:
    """Settings that the vision configs of most families share."""
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 7,
        **changes,
    }


def qwen2_audio():
    words = tokenizer(audio_token="<|AUDIO|>", audio_bos_token="<|audio_bos|>", audio_eos_token="<|audio_eos|>")
    processor = hf.Qwen2AudioProcessor(
        hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1),
        words,
        chat_template=template(audio="<|audio_bos|><|AUDIO|><|audio_eos|>"),
    )
    config = hf.Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "max_source_positions": 50,  # 1 s, the chunk length: the encoder accepts no other
        },
        text_config=decoder(words, model_type="qwen2"),
        audio_token_index=words.audio_token_id,
    )
    return instantiate(hf.Qwen2AudioForConditionalGeneration, config, processor)


QWEN_VISION_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
QWEN_VISION_TEMPLATE = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}


def qwen_vision_ids(words: hf.PreTrainedTokenizerFast) -> dict[str, int]:
    return {
        "image_token_id": words.image_token_id,
        "video_token_id": words.video_token_id,
        "vision_start_token_id": words.vision_bos_token_id,
        "vision_end_token_id": words.vision_eos_token_id,
    }


def qwen_pixels(cell: int) -> dict[str, int]:
    """Limits of the resizing, from 1 to 24 cells of `cell` x `cell` pixels; a cell is one token."""
    return {"shortest_edge": cell * cell, "longest_edge": 24 * cell * cell}


QWEN2_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
QWEN3_ROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
QWEN2_5_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}
QWEN3_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}


def qwen2_vl():
    words = tokenizer(**QWEN_VISION_TOKENS)
    processor = hf.Qwen2VLProcessor(
        hf.Qwen2VLImageProcessor(size=qwen_pixels(28)),
        words,
        hf.Qwen2VLVideoProcessor(size=qwen_pixels(28)),
        chat_template=template(**QWEN_VISION_TEMPLATE),
    )
    config = hf.Qwen2VLConfig(
        text_config=decoder(words, rope_parameters=QWEN2_ROPE),
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2},
        **qwen_vision_ids(words),
    )
    return instantiate(hf.Qwen2VLForConditionalGeneration, config, processor)


def qwen2_5_vl():
    words = tokenizer(**QWEN_VISION_TOKENS)
    processor = hf.Qwen2_5_VLProcessor(
        hf.Qwen2VLImageProcessor(size=qwen_pixels(28)),
        words,
        hf.Qwen2VLVideoProcessor(size=qwen_pixels(28)),
        chat_template=template(**QWEN_VISION_TEMPLATE),
    )
    config = hf.Qwen2_5_VLConfig(
        text_config=decoder(words, rope_parameters=QWEN2_ROPE),
        vision_config=QWEN2_5_VISION,
        **qwen_vision_ids(words),
    )
    return instantiate(hf.Qwen2_5_VLForConditionalGeneration, config, processor)


def qwen3_vl_processor() -> hf.Qwen3VLProcessor:
    return hf.Qwen3VLProcessor(
        hf.Qwen2VLImageProcessor(size=qwen_pixels(32), patch_size=16, merge_size=2),
        tokenizer(**QWEN_VISION_TOKENS),
        hf.Qwen3VLVideoProcessor(size=qwen_pixels(32)),
        chat_template=template(**QWEN_VISION_TEMPLATE),
    )


def qwen3_vl():
    processor = qwen3_vl_processor()
    config = hf.Qwen3VLConfig(
        text_config=decoder(processor.tokenizer, head_dim=16, rope_parameters=QWEN3_ROPE),
        vision_config={**QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
        **qwen_vision_ids(processor.tokenizer),
    )
    return instantiate(hf.Qwen3VLForConditionalGeneration, config, processor)


def qwen3_vl_moe():
    processor = qwen3_vl_processor()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "router_aux_loss_coef": 0.1}
    config = hf.Qwen3VLMoeConfig(
        text_config=decoder(
            processor.tokenizer, head_dim=16, rope_parameters=QWEN3_ROPE, output_router_logits=True, **experts
        ),
        vision_config={**QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
        **qwen_vision_ids(processor.tokenizer),
    )
    return instantiate(hf.Qwen3VLMoeForConditionalGeneration, config, processor)


def qwen3_5(layer_types=("linear_attention", "full_attention"), experts: bool = False, scale: float = 6.0):
    processor = qwen3_vl_processor()
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config_class, model_class = (
        (hf.Qwen3_5MoeConfig, hf.Qwen3_5MoeForConditionalGeneration)
        if experts
        else (hf.Qwen3_5Config, hf.Qwen3_5ForConditionalGeneration)
    )
    config = config_class(
        text_config=decoder(
            processor.tokenizer,
            head_dim=32,
            rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
            num_hidden_layers=len(layer_types),
            layer_types=list(layer_types),
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            **({**mixture, "shared_expert_intermediate_size": 32} if experts else {}),
        ),
        vision_config=QWEN3_VISION,
        **qwen_vision_ids(processor.tokenizer),
    )
    return instantiate(model_class, config, processor, scale)


def qwen3_5_deep(experts: bool = False):
    """With states before and after attention. Weights are smaller, as rounding grows with each layer."""
    layers = ("linear_attention", "linear_attention", "full_attention", "linear_attention")
    return qwen3_5(layers, experts, scale=3.0)


def lfm2_vl():
    """Images of more than 8 tokens are split in tiles of 4."""
    tiles = {
        f"row_{row}_col_{column}_token": f"<|img_row_{row}_col_{column}|>"
        for row in range(1, 5)
        for column in range(1, 5)
    }
    words = tokenizer(
        image_token="<image>",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
        **tiles,
    )
    processor = hf.Lfm2VlProcessor(
        hf.Lfm2VlImageProcessor(
            encoder_patch_size=14, min_image_tokens=2, max_image_tokens=8, tile_size=56, max_tiles=4
        ),
        words,
        chat_template=template(image="<image>"),
    )
    config = hf.Lfm2VlConfig(
        text_config=decoder(
            words,
            model_type="lfm2",
            num_hidden_layers=3,
            layer_types=["conv", "full_attention", "conv"],
            conv_L_cache=3,
            block_multiple_of=2,
        ),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_patches": 16,
            "patch_size": 14,
        },
        image_token_id=words.image_token_id,
        projector_hidden_size=32,
    )
    return instantiate(hf.Lfm2VlForConditionalGeneration, config, processor)


QWEN_OMNI_TOKENS = {
    **QWEN_VISION_TOKENS,
    "audio_token": "<|AUDIO|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}


def qwen2_5_omni():
    words = tokenizer(**QWEN_OMNI_TOKENS)
    processor = hf.Qwen2_5OmniProcessor(
        hf.Qwen2VLImageProcessor(size=qwen_pixels(28)),
        hf.Qwen2VLVideoProcessor(do_resize=False),  # the processor overrides `size` with at least 128 tokens
        hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1),
        words,
        chat_template=template(audio="<|audio_bos|><|AUDIO|><|audio_eos|>", **QWEN_VISION_TEMPLATE),
    )
    config = hf.Qwen2_5OmniThinkerConfig(
        text_config=decoder(words, rope_parameters=QWEN2_ROPE),
        vision_config=QWEN2_5_VISION,
        audio_config={
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "max_source_positions": 50,
            "n_window": 20,
            "output_dim": 64,
        },
        audio_token_index=words.audio_token_id,
        audio_start_token_id=words.audio_bos_token_id,
        audio_end_token_id=words.audio_eos_token_id,
        image_token_index=words.image_token_id,
        video_token_index=words.video_token_id,
        vision_start_token_id=words.vision_bos_token_id,  # no field of this config class, but the model reads it
    )
    return instantiate(hf.Qwen2_5OmniThinkerForConditionalGeneration, config, processor)


def llava():
    words = tokenizer(image_token="<image>")
    processor = hf.LlavaProcessor(
        hf.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        words,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template(image="<image>"),
    )
    config = hf.LlavaConfig(
        vision_config=clip_vision(model_type="clip_vision_model"),
        text_config=decoder(words, model_type="llama"),
        image_token_index=words.image_token_id,
        image_seq_length=16,
        vision_feature_select_strategy="default",
    )
    return instantiate(hf.LlavaForConditionalGeneration, config, processor)


def gemma3():
    words = tokenizer(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
    processor = hf.Gemma3Processor(
        hf.Gemma3ImageProcessor(size={"height": 28, "width": 28}),
        words,
        image_seq_length=16,
        chat_template=template(image="<start_of_image>"),
    )
    config = hf.Gemma3Config(
        text_config=decoder(
            words,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=8,  # shorter than an image, let alone a prompt
            layer_types=["sliding_attention", "full_attention"],
        ),
        vision_config=clip_vision(model_type="siglip_vision_model", vision_use_head=False),
        mm_tokens_per_image=16,
        image_token_index=words.image_token_id,
        boi_token_index=words.boi_token_id,
        eoi_token_index=words.eoi_token_id,
    )
    return instantiate(hf.Gemma3ForConditionalGeneration, config, processor)


def gemma3n():
    words = tokenizer(
        image_token="<image_soft_token>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
        audio_token="<audio_soft_token>",
        boa_token="<start_of_audio>",
        eoa_token="<end_of_audio>",
    )
    processor = hf.Gemma3nProcessor(
        hf.Gemma3nAudioFeatureExtractor(feature_size=16),
        hf.SiglipImageProcessor(size={"height": 96, "width": 96}),
        words,
        audio_seq_length=8,
        image_seq_length=9,
        chat_template=template(image="<image_soft_token>", audio="<audio_soft_token>"),
    )
    text_vocabulary = len(words) - 16  # the last ids go through the embeddings of the vision and of the audio tower
    config = hf.Gemma3nConfig(
        text_config=decoder(
            words,
            head_dim=16,
            sliding_window=8,
            num_hidden_layers=3,
            num_kv_shared_layers=1,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            vocab_size_per_layer_input=text_vocabulary,
            hidden_size_per_layer_input=8,
            laurel_rank=8,
            altup_num_inputs=2,
        ),
        vision_config={
            "architecture": "test_convnext",
            "hidden_size": 64,
            "vocab_size": 8,
            "vocab_offset": text_vocabulary,
        },
        audio_config={
            "input_feat_size": 16,
            "hidden_size": 32,
            "conf_num_attention_heads": 4,
            "conf_num_hidden_layers": 2,
            "sscp_conv_channel_size": [8, 4],
            "vocab_size": 8,
            "vocab_offset": text_vocabulary + 8,
        },
        audio_soft_tokens_per_image=8,
        vision_soft_tokens_per_image=9,
        image_token_id=words.image_token_id,
        audio_token_id=words.audio_token_id,
        boi_token_id=words.boi_token_id,
        eoi_token_id=words.eoi_token_id,
        boa_token_id=words.boa_token_id,
        eoa_token_id=words.eoa_token_id,
    )
    return instantiate(hf.Gemma3nForConditionalGeneration, config, processor)


def paligemma():
    words = tokenizer(image_token="<image>", bos_token="<bos>")
    images = hf.SiglipImageProcessor(size={"height": 28, "width": 28})
    images.image_seq_length = 16
    processor = hf.PaliGemmaProcessor(images, words, chat_template=template(image="<image>"))
    config = hf.PaliGemmaConfig(
        text_config=decoder(words, model_type="gemma", head_dim=16),
        vision_config=clip_vision(model_type="siglip_vision_model", vision_use_head=False),
        image_token_index=words.image_token_id,
        vocab_size=len(words),
        projection_dim=64,
        hidden_size=64,
    )
    return instantiate(hf.PaliGemmaForConditionalGeneration, config, processor)


def audioflamingo3():
    words = tokenizer(audio_token="<sound>")
    processor = hf.AudioFlamingo3Processor(
        hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1), words, chat_template=template(audio="<sound>")
    )
    config = hf.AudioFlamingo3Config(
        audio_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "num_mel_bins": 16,
            "max_source_positions": 50,
        },
        text_config=decoder(words, model_type="qwen2"),
        audio_token_id=words.audio_token_id,
    )
    return instantiate(hf.AudioFlamingo3ForConditionalGeneration, config, processor)


def qwen3_omni_moe():
    words = tokenizer(**QWEN_OMNI_TOKENS)
    processor = hf.Qwen3OmniMoeProcessor(
        hf.Qwen2VLImageProcessor(size=qwen_pixels(32), patch_size=16, merge_size=2),
        hf.Qwen2VLVideoProcessor(do_resize=False, patch_size=16, merge_size=2),
        hf.WhisperFeatureExtractor(feature_size=16, chunk_length=2),
        words,
        chat_template=template(audio="<|audio_bos|><|AUDIO|><|audio_eos|>", **QWEN_VISION_TEMPLATE),
    )
    config = hf.Qwen3OmniMoeThinkerConfig(
        text_config=decoder(
            words,
            head_dim=16,
            rope_parameters=QWEN3_ROPE,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            router_aux_loss_coef=0.1,
        ),
        vision_config={**QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
        audio_config={
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "max_source_positions": 50,
            "downsample_hidden_size": 16,
            "output_dim": 64,
        },
        audio_token_id=words.audio_token_id,
        audio_start_token_id=words.audio_bos_token_id,
        image_token_id=words.image_token_id,
        video_token_id=words.video_token_id,
        vision_start_token_id=words.vision_bos_token_id,
    )
    # its three convolutions attenuate the audio
    return instantiate(hf.Qwen3OmniMoeThinkerForConditionalGeneration, config, processor, scale=7.0)


def internvl():
    words = tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )
    size = {"height": 28, "width": 28}
    processor = hf.InternVLProcessor(
        hf.GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=3),
        words,
        hf.InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=template(image="<IMG_CONTEXT>", video="<video>"),
    )
    config = hf.InternVLConfig(
        vision_config=clip_vision(image_size=[28, 28], patch_size=[7, 7]),
        text_config=decoder(words, model_type="qwen2"),
        image_token_id=words.context_image_token_id,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    return instantiate(hf.InternVLForConditionalGeneration, config, processor)


def idefics3():
    rows = {
        f"row_{row}_col_{column}_token": f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)
    }
    words = tokenizer(
        image_token="<image>", fake_image_token="<fake_token_around_image>", global_image_token="<global-img>", **rows
    )
    processor = hf.Idefics3Processor(
        hf.Idefics3ImageProcessor(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
        words,
        image_seq_len=4,
        chat_template=template(image="<image>"),
    )
    config = hf.Idefics3Config(
        vision_config=clip_vision(),
        text_config=decoder(words, model_type="llama"),
        image_token_id=words.image_token_id,
        scale_factor=2,
        pad_token_id=words.pad_token_id,
    )
    return instantiate(hf.Idefics3ForConditionalGeneration, config, processor)


def gemma4():
    words = tokenizer(
        image_token="<|image|>",
        boi_token="<|image>",
        eoi_token="<image|>",
        audio_token="<|audio|>",
        boa_token="<|audio>",
        eoa_token="<audio|>",
        video_token="<|video|>",
    )
    processor = hf.Gemma4Processor(
        hf.Gemma4AudioFeatureExtractor(feature_size=16),
        hf.Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70),  # 70 is the least that it accepts
        words,
        hf.Gemma4VideoProcessor(patch_size=4, max_soft_tokens=70, do_sample_frames=False),
        chat_template=template(image="<|image|>", audio="<|audio|>", video="<|video|>"),
    )
    config = hf.Gemma4Config(
        text_config=decoder(
            words,
            head_dim=16,
            global_head_dim=16,
            sliding_window=8,
            num_hidden_layers=3,
            num_kv_shared_layers=1,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            vocab_size_per_layer_input=len(words),
            hidden_size_per_layer_input=8,
            use_bidirectional_attention="vision",
        ),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 256,
        },
        audio_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "subsampling_conv_channels": [16, 4],
            "output_proj_dims": 32,
        },
        image_token_id=words.image_token_id,
        boi_token_id=words.boi_token_id,
        eoi_token_id=words.eoi_token_id,
        audio_token_id=words.audio_token_id,
        boa_token_id=words.boa_token_id,
        eoa_token_index=words.eoa_token_id,
        video_token_id=words.video_token_id,
    )
    return instantiate(hf.Gemma4ForConditionalGeneration, config, processor)


def glm_words() -> hf.PreTrainedTokenizerFast:
    return tokenizer(
        image_token="<|image|>",
        video_token="<|video|>",
        boi_token="<|begin_of_image|>",
        eoi_token="<|end_of_image|>",
        bov_token="<|begin_of_video|>",
        eov_token="<|end_of_video|>",
    )


GLM_PIXELS = {"shortest_edge": 2 * 28 * 28, "longest_edge": 24 * 28 * 28}
GLM_TEMPLATE = {
    "image": "<|begin_of_image|><|image|><|end_of_image|>",
    "video": "<|begin_of_video|><|video|><|end_of_video|>",
}
GLM_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "image_size": 56,
    "out_hidden_size": 64,
}


def glm_vision_ids(words: hf.PreTrainedTokenizerFast) -> dict[str, int]:
    return {
        "image_token_id": words.image_token_id,
        "video_token_id": words.video_token_id,
        "image_start_token_id": words.boi_token_id,
        "image_end_token_id": words.eoi_token_id,
        "video_start_token_id": words.bov_token_id,
        "video_end_token_id": words.eov_token_id,
    }


def glm4v_processor() -> hf.Glm4vProcessor:
    return hf.Glm4vProcessor(
        hf.Glm4vImageProcessor(size=GLM_PIXELS),
        glm_words(),
        hf.Glm4vVideoProcessor(size=GLM_PIXELS, do_sample_frames=False),
        chat_template=template(**GLM_TEMPLATE),
    )


def glm4v():
    processor = glm4v_processor()
    words = processor.tokenizer
    config = hf.Glm4vConfig(
        text_config=decoder(words, rope_parameters={**QWEN2_ROPE, "partial_rotary_factor": 1.0}),
        vision_config=GLM_VISION,
        **glm_vision_ids(words),
    )
    return instantiate(hf.Glm4vForConditionalGeneration, config, processor)


def llava_onevision():
    words = tokenizer(image_token="<image>", video_token="<video>")
    size = {"height": 28, "width": 28}
    tiles = [[28, 28], [28, 56], [56, 28], [56, 56]]
    processor = hf.LlavaOnevisionProcessor(
        hf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=tiles),
        words,
        hf.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=template(image="<image>", video="<video>"),
    )
    config = hf.LlavaOnevisionConfig(
        vision_config=clip_vision(model_type="siglip_vision_model", vision_use_head=False),
        text_config=decoder(words, model_type="qwen2"),
        image_token_index=words.image_token_id,
        video_token_index=words.video_token_id,
        image_grid_pinpoints=tiles,
    )
    return instantiate(hf.LlavaOnevisionForConditionalGeneration, config, processor)


def phi4_multimodal():
    words = tokenizer(image_token="<|image|>", audio_token="<|audio|>")
    processor = hf.Phi4MultimodalProcessor(
        # 32 x 32 patches in a crop: the processor counts tokens for these only
        hf.Phi4MultimodalImageProcessor(size={"height": 64, "width": 64}, patch_size=2, dynamic_hd=2),
        hf.Phi4MultimodalFeatureExtractor(feature_size=16),
        words,
        chat_template=template(image="<|image|>", audio="<|audio|>"),
    )
    config = hf.Phi4MultimodalConfig(
        **decoder(words),
        vision_config=clip_vision(image_size=64, crop_size=64, patch_size=2, image_token_id=words.image_token_id),
        audio_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_blocks": 2,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 16,
            "input_size": 16,
            "audio_token_id": words.audio_token_id,
        },
    )
    return instantiate(hf.Phi4MultimodalForCausalLM, config, processor)


TEKKEN_FOLDER = tempfile.TemporaryDirectory()  # mistral-common reads its vocabulary from a file only


def voxtral():
    from mistral_common.tokens.tokenizers.base import SpecialTokens  # which nothing else here needs

    # The processor looks for the audio token at id 24, two after the place that it has in the enumeration
    order = list(SpecialTokens)
    special = [*order[:22], "<SPECIAL_22>", "<SPECIAL_23>", *order[22:25]]  # audio, its beginning, transcription
    vocabulary = {
        "config": {
            "pattern": r"\p{L}+|\p{N}|[^\p{L}\p{N}]",
            "num_vocab_tokens": 256,
            "default_vocab_size": 256 + len(special),
            "default_num_special_tokens": len(special),
            "version": "v7",
        },
        "vocab": [
            {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": None}
            for byte in range(256)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(special)
        ],
        "audio": {
            "sampling_rate": RATE,
            "frame_rate": 2.5,  # 75 tokens in a window of 30 s, instead of 12.5 Hz and 375
            "audio_encoding_config": {"num_mel_bins": 16, "hop_length": 160, "window_size": 400},
            "chunk_length_s": 30.0,
        },
    }
    path = Path(TEKKEN_FOLDER.name, "tekken.json")
    path.write_text(json.dumps(vocabulary))
    words = hf.MistralCommonBackend(path)
    processor = hf.VoxtralProcessor(hf.WhisperFeatureExtractor(feature_size=16), words)
    config = hf.VoxtralConfig(
        audio_config={
            "hidden_size": 16,
            "intermediate_size": 16 * 1500 // 75,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_mel_bins": 16,
        },
        text_config=decoder(words, model_type="llama", head_dim=16),
        audio_token_id=processor.audio_token_id,
    )
    return instantiate(hf.VoxtralForConditionalGeneration, config, processor)


@pytest.fixture
def mel_extractor(monkeypatch):
    """Lets transformers load the substitute extractor of Granite Speech."""

    class Loadable(MelExtractor):
        def __init__(self, feature_size, **settings):
            super().__init__(feature_size)
            self.padding_side = settings.get("padding_side", self.padding_side)

    Loadable.__name__ = "MelExtractor"
    mapping = hf.models.auto.feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING
    monkeypatch.setattr(mapping, "_extra_content", {hf.GraniteSpeechConfig: Loadable})


class MelExtractor(hf.GraniteSpeechFeatureExtractor):
    """Log-mel features of Granite Speech without torchaudio, whose wheels need CUDA."""

    def __init__(self, mels: int):
        hf.SequenceFeatureExtractor.__init__(self, feature_size=mels, sampling_rate=RATE, padding_value=0.0)
        self.melspec_kwargs = {"hop_length": 160}
        self.projector_window_size, self.projector_downsample_rate = 15, 5
        self.filters = mel_filter_bank(257, mels, 0, RATE / 2, RATE)

    def __call__(self, audios, device="cpu"):
        padded, lengths = self._get_audios_and_audio_lengths(audios)
        mels = [
            spectrogram(wave.numpy(), np.hanning(400), 400, 160, 512, mel_filters=self.filters, log_mel="log10").T
            for wave in padded
        ]
        mels = torch.tensor(np.stack(mels), dtype=torch.float32)
        mels = mels[:, : mels.shape[1] // 2 * 2] / 4 + 1
        sizes = self._get_num_audio_features(lengths)
        return hf.BatchFeature(
            {
                "input_features": mels.reshape(len(mels), -1, 2 * mels.shape[-1]),
                "audio_embed_sizes": sizes,
                "input_features_mask": torch.arange(max(sizes))[None] < torch.tensor(sizes)[:, None],
            }
        )


def granite_speech(logits_scaling: float = 1.0):
    words = tokenizer(audio_token="<|audio|>")
    processor = hf.GraniteSpeechProcessor(MelExtractor(8), words, chat_template=template(audio="<|audio|>"))
    config = hf.GraniteSpeechConfig(
        text_config=decoder(words, model_type="granite", logits_scaling=logits_scaling),
        encoder_config={
            "input_dim": 16,
            "num_layers": 2,
            "hidden_dim": 32,
            "feedforward_mult": 2,
            "num_heads": 4,
            "dim_head": 8,
            "output_dim": 8,
            "context_size": 20,
            "max_pos_emb": 32,
        },
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 32,
            "encoder_hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "vocab_size": 8,
            "max_position_embeddings": 8,
        },
        audio_token_index=words.audio_token_id,
        has_lora_adapter=False,
    )
    return instantiate(hf.GraniteSpeechForConditionalGeneration, config, processor)


# Whose logits are scaled behind the head


def llava_next_granite():
    words = tokenizer(image_token="<image>")
    tiles = [[28, 28], [28, 56], [56, 28], [56, 56]]
    processor = hf.LlavaNextProcessor(
        hf.LlavaNextImageProcessor(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=tiles
        ),
        words,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template(image="<image>"),
    )
    config = hf.LlavaNextConfig(
        vision_config=clip_vision(model_type="clip_vision_model"),
        text_config=decoder(words, model_type="granite", logits_scaling=8.0),
        image_token_index=words.image_token_id,
        image_grid_pinpoints=tiles,
        vision_feature_select_strategy="default",
    )
    return instantiate(hf.LlavaNextForConditionalGeneration, config, processor)


def cohere_text(words: hf.PreTrainedTokenizerFast) -> dict:
    layers = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    return decoder(words, model_type="cohere2", logit_scale=0.25, **layers)


def aya_vision():
    words = tokenizer(
        image_token="<image>",
        img_patch_token="<|IMG_PATCH|>",
        start_of_img_token="<|START_OF_IMG|>",
        end_of_img_token="<|END_OF_IMG|>",
        tile_token="TILE",
        tile_global_token="TILE_GLOBAL",
    )
    processor = hf.AyaVisionProcessor(
        hf.GotOcr2ImageProcessor(size={"height": 28, "width": 28}, max_patches=2),
        words,
        patch_size=7,
        img_size=28,
        downsample_factor=2,
        chat_template=template(image="<image>"),
    )
    config = hf.AyaVisionConfig(
        vision_config=clip_vision(model_type="siglip_vision_model", vision_use_head=False),
        text_config=cohere_text(words),
        image_token_index=words.img_patch_token_id,
    )
    return instantiate(hf.AyaVisionForConditionalGeneration, config, processor)


def cohere2_vision():
    words = tokenizer(
        image_token="<|IMG_PATCH|>",
        boi_token="<|START_OF_IMG|>",
        eoi_token="<|END_OF_IMG|>",
        img_line_break_token="<|IMG_LINE_BREAK|>",
    )
    processor = hf.Cohere2VisionProcessor(
        hf.Cohere2VisionImageProcessor(size={"height": 28, "width": 28}, max_patches=2, patch_size=2),
        words,
        chat_template=template(image="<|IMG_PATCH|>"),
    )
    config = hf.Cohere2VisionConfig(
        vision_config=clip_vision(model_type="siglip_vision_model", vision_use_head=False),
        text_config=cohere_text(words),
        image_token_id=words.image_token_id,
        alignment_intermediate_size=64,
    )
    return instantiate(hf.Cohere2VisionForConditionalGeneration, config, processor)


def chameleon():
    names = {f"code_{i}_token": f"IMGIMG{'A' * 4}{chr(ord('A') + i)}Z" for i in range(8)}
    words = tokenizer(image_token="<image>", boi_token="<racm3:break>", eoi_token="<eoss>", sep_token="<sep>", **names)
    processor = hf.ChameleonProcessor(
        hf.ChameleonImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        words,
        image_seq_length=49,
    )
    processor.chat_template = template(image="<image>")
    config = hf.ChameleonConfig(
        **decoder(words),
        vq_config={
            "embed_dim": 16,
            "num_embeddings": 8,
            "latent_channels": 16,
            "resolution": 28,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1],
            "num_res_blocks": 1,
            "attn_type": "vanilla",
        },
        vocabulary_map=words.get_vocab(),
    )
    return instantiate(hf.ChameleonForConditionalGeneration, config, processor)


def inkling():
    words = tokenizer(
        image_token="<|image|>",
        audio_token="<|audio|>",
        image_bos_token="<|content_image|>",
        audio_bos_token="<|content_audio_input|>",
    )
    processor = hf.InklingProcessor(
        hf.InklingFeatureExtractor(feature_size=16),
        hf.InklingImageProcessor(size={"height": 40, "width": 40}),
        words,
        num_dmel_bins=8,
        chat_template=template(image="<|content_image|><|image|>", audio="<|content_audio_input|><|audio|>"),
    )
    config = hf.InklingConfig(
        text_config=decoder(
            words,
            head_dim=16,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            swa_head_dim=16,
            sliding_window_size=16,
            d_rel=4,
            rel_extent=32,
            local_layer_ids=[0],
            mlp_layer_types=["dense", "sparse"],
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            logits_mup_width_multiplier=4.0,
        ),
        audio_config={"n_mel_bins": 16, "mel_vocab_size": 8},
        vision_config={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        image_token_id=words.image_token_id,
        audio_token_id=words.audio_token_id,
        image_bos_token_id=words.image_bos_token_id,
        audio_bos_token_id=words.audio_bos_token_id,
    )
    return instantiate(hf.InklingForConditionalGeneration, config, processor)


# Prompts


def audio_prompts() -> list[list[dict]]:
    return [
        chat(audio(0.7, seed=1), text("What do you hear?")),
        chat(audio(0.25, seed=2), audio(0.9, seed=3), text("Compare the audio: is there a cat, a dog or a bird?")),
        chat(text("Is there a bird?")),
    ]


def image_prompts() -> list[list[dict]]:
    return [
        chat(image(84, 56, seed=1), text("What is in the image?")),
        chat(image(56, 56, seed=2), image(112, 84, seed=3), text("Compare them. Is there a cat, a dog or a bird?")),
        chat(text("Is there a bird?")),
    ]


def image_video_prompts() -> list[list[dict]]:
    return [
        *image_prompts(),
        chat(video(4, 56, 84, seed=4), text("Describe the video.")),
        chat(image(56, 84, seed=5), text("Is it in"), video(6, 56, 56, seed=6), text("?")),
    ]


def omni_prompts(cell: int = 28) -> list[list[dict]]:
    """For omni models, which take videos as they are: `cell` is the side in pixels of what becomes a token."""
    return [
        chat(audio(0.6, seed=1), text("What do you hear?")),
        chat(
            image(84, 56, seed=2),
            audio(0.9, seed=3),
            text("Compare them to"),
            video(4, 2 * cell, 2 * cell, seed=4),
            audio(0.3, seed=5),
            text("Is there a bird?"),
        ),
        chat(text("Is there a bird?")),
    ]


def image_audio_prompts() -> list[list[dict]]:
    return [*image_prompts(), *audio_prompts()[:2], chat(image(56, 84, seed=5), text("and"), audio(0.5, seed=6))]


def phi4_prompts() -> list[list[dict]]:
    """Low images, as one that fills its crop would be 545 tokens; the least is 290."""
    return [
        chat(image(64, 10, seed=1), text("What is in the image?")),
        chat(audio(0.7, seed=1), text("What do you hear?")),
        chat(audio(0.25, seed=2), audio(0.9, seed=3), text("Compare the audio: is there a cat, a dog or a bird?")),
        chat(text("Is there a bird?")),
        chat(image(60, 12, seed=5), text("and"), audio(0.5, seed=6)),
    ]


def base64_audio_prompts() -> list[list[dict]]:
    """For Voxtral, which takes audio as a path, an address or the base64 of a file, but not as an array."""
    return [
        [
            {
                **message,
                "content": [
                    base64_audio(block) if block["type"] == "audio" else block for block in message["content"]
                ],
            }
            for message in messages
        ]
        for messages in audio_prompts()
    ]


def base64_audio(block: dict) -> dict:
    file = io.BytesIO()
    soundfile.write(file, block["audio"], RATE, format="WAV")
    return {"type": "audio", "base64": base64.b64encode(file.getvalue()).decode()}


def always_image_prompts() -> list[list[dict]]:
    """For PaliGemma, whose processor wants an image in every prompt."""
    return [*image_prompts()[:2], chat(image(28, 28, seed=4), text("Is there a bird?"))]


def single_audio_prompts(longest: float = 1.4) -> list[list[dict]]:
    """For processors that take one audio per prompt; the second one is longer than the window."""
    return [
        chat(audio(0.7, seed=1), text("What do you hear?")),
        chat(audio(longest, seed=2), text("Is there a cat, a dog or a bird?")),
        chat(text("Is there a bird?")),
    ]


FAMILIES = {
    family.name: family
    for family in [
        Family("qwen2_audio", qwen2_audio, audio_prompts, ("audio",)),
        Family("qwen2_vl", qwen2_vl, image_video_prompts, ("image", "video")),
        Family("qwen2_5_vl", qwen2_5_vl, image_video_prompts, ("image", "video")),
        Family("qwen3_vl", qwen3_vl, image_video_prompts, ("image", "video")),
        Family("qwen3_vl_moe", qwen3_vl_moe, image_video_prompts, ("image", "video")),
        Family(
            "qwen3_5", qwen3_5, image_video_prompts, ("image", "video"), "Half of the layers are linear attention."
        ),
        Family(
            "qwen2_5_omni",
            qwen2_5_omni,
            omni_prompts,
            ("image", "audio", "video"),
            "The thinker alone, which is the part that reads and writes text.",
        ),
        Family(
            "qwen3_omni_moe",
            qwen3_omni_moe,
            functools.partial(omni_prompts, 32),
            ("image", "audio", "video"),
            "The thinker alone, which is the part that reads and writes text.",
        ),
        Family("llava", llava, image_prompts, ("image",)),
        Family("llava_onevision", llava_onevision, image_video_prompts, ("image", "video")),
        Family("gemma3", gemma3, image_prompts, ("image",)),
        Family(
            "gemma3n",
            gemma3n,
            image_audio_prompts,
            ("image", "audio"),
            "The vision tower is a small ConvNeXt of timm: timm's MobileNetV5 cannot be made tiny through the config.",
        ),
        Family("gemma4", gemma4, image_audio_prompts, ("image", "audio"), "70 tokens is the least an image can have."),
        Family("paligemma", paligemma, always_image_prompts, ("image",), "The checkpoints have no chat template."),
        Family(
            "audioflamingo3",
            audioflamingo3,
            single_audio_prompts,
            ("audio",),
            "The processor takes one audio per prompt.",
        ),
        Family(
            "voxtral",
            voxtral,
            base64_audio_prompts,
            ("audio",),
            "The processor takes audio by path, address or base64, never as an array.",
        ),
        Family(
            "granite_speech",
            granite_speech,
            audio_prompts,
            ("audio",),
            "The feature extractor is a substitute without torchaudio, so the processor cannot be loaded again.",
        ),
        Family("internvl", internvl, image_video_prompts, ("image", "video")),
        Family("idefics3", idefics3, image_prompts, ("image",)),
        Family(
            "glm4v",
            glm4v,
            lambda: image_video_prompts()[:4],
            ("image", "video"),
            "No prompt has both an image and a video: they share a token, and the model then miscounts.",
        ),
        Family(
            "phi4_multimodal",
            phi4_multimodal,
            phi4_prompts,
            ("image", "audio"),
            "Loading the processor loses its chat template; an image has at least 290 tokens.",
        ),
    ]
}

# In the default run of tests that say the same of every family; the slow run has all
ONE_OF_EACH_KIND = {"qwen2_audio", "qwen2_5_vl", "qwen2_5_omni", "qwen3_5", "gemma3", "phi4_multimodal"}


def every_family(names: Iterable[str] = FAMILIES) -> list:
    """Parameters of a test that says the same of every family."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in ONE_OF_EACH_KIND)) for name in names]


# Models that something is special about, for the tests of that alone
SPECIAL = {
    family.name: family
    for family in [
        Family("aya_vision", aya_vision, image_prompts, ("image",)),
        Family("chameleon", chameleon, image_prompts, ("image",)),
        Family("cohere2_vision", cohere2_vision, image_prompts, ("image",)),
        Family("granite_speech_scaled", functools.partial(granite_speech, 8.0), audio_prompts, ("audio",)),
        Family("inkling", inkling, audio_prompts, ("audio",)),
        Family("lfm2_vl", lfm2_vl, image_prompts, ("image",)),
        Family("llava_next_granite", llava_next_granite, image_prompts, ("image",)),
        Family("qwen3_5_deep", qwen3_5_deep, image_video_prompts, ("image", "video")),
        Family("qwen3_5_moe", functools.partial(qwen3_5_deep, experts=True), image_video_prompts, ("image", "video")),
    ]
}
