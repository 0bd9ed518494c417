# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Default models of the example scripts: real architectures, small enough to train on a laptop.

The weights are random, so a trained model owes its accuracy to the training alone. Each function takes the seed of the
weights and returns a float32 model and its processor. `save_pretrained` and the `Auto` classes save and load both like
any other checkpoint.

The encoders are initialized with a standard deviation five to ten times larger than usual. With the usual one,
activations vanish in matrices this narrow: so little of the input reaches the decoder that learning starts late, or
never.
"""

import json
import string
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tasks import DIGITS, DIRECTIONS, HANDWRITTEN_QUESTION, HIDDEN_QUESTION, MOVING_QUESTION, SPOKEN_QUESTION
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)
from transformers.integrations import deepspeed
from trl.chat_template_utils import qwen3_template


AudioModel = tuple[Qwen2AudioForConditionalGeneration, Qwen2AudioProcessor]
VisionModel = tuple[Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor]

VISION_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}


def spoken_digit_model(seed: int = 0) -> AudioModel:
    """Qwen2-Audio with 0.5 million parameters, for one second of audio."""
    return _audio_model([SPOKEN_QUESTION, *DIGITS], seed, hop_length=160)


def cropping_model(seed: int = 0) -> AudioModel:
    """
    [`spoken_digit_model`] with half as many frames and with tokens for calls of `crop(start, end)`.

    The processor's chat template formats tool calls as Qwen's does.
    """
    calls = [tool_call("crop", start=i, end=i + 1) for i in range(4)]
    model, processor = _audio_model([SPOKEN_QUESTION, *DIGITS, "tool", *calls], seed, hop_length=320)
    processor.tokenizer.response_template = qwen3_template  # parses tool calls
    return model, processor


def digit_model(seed: int = 0) -> VisionModel:
    """Qwen2.5-VL with 0.5 million parameters, for images of about 28 x 28 pixels and questions on digits."""
    return _vision_model([HANDWRITTEN_QUESTION, *DIGITS], seed, initializer_range=0.1)


def motion_model(seed: int = 0) -> VisionModel:
    """Qwen2.5-VL with 0.5 million parameters, for videos of about 28 x 28 pixels and questions on directions."""
    return _vision_model([MOVING_QUESTION, *DIRECTIONS], seed, initializer_range=0.2)


def hidden_digit_model(seed: int = 0) -> VisionModel:
    """
    [`digit_model`] for images of about 28 x 28 pixels, with tokens for calls of `zoom(x, y)`.

    The processor's chat template formats tool calls as Qwen's does.
    """
    calls = [tool_call("zoom", x=i, y=i) for i in range(2)]
    model, processor = _vision_model([HIDDEN_QUESTION, *DIGITS, "tool", *calls], seed, initializer_range=0.1)
    processor.tokenizer.response_template = qwen3_template  # parses tool calls
    return model, processor


def screen_model(seed: int = 0) -> VisionModel:
    """[`hidden_digit_model`] with tokens for calls of `scroll(down)` and `click(x, y)` instead."""
    calls = [call for i in range(2) for call in (tool_call("scroll", down=i), tool_call("click", x=i, y=i))]
    model, processor = _vision_model([HIDDEN_QUESTION, *DIGITS, "tool", *calls], seed, initializer_range=0.1)
    processor.tokenizer.response_template = qwen3_template  # parses tool calls
    return model, processor


def _audio_model(texts: list[str], seed: int, hop_length: int) -> AudioModel:
    tokenizer = _tokenizer(
        texts, audio_token="<|AUDIO|>", audio_bos_token="<|audio_bos|>", audio_eos_token="<|audio_eos|>"
    )
    feature_extractor = WhisperFeatureExtractor(feature_size=40, chunk_length=1, hop_length=hop_length)
    chat_template = _chat_template(audio="<|audio_bos|><|AUDIO|><|audio_eos|>")
    processor = Qwen2AudioProcessor(feature_extractor, tokenizer, chat_template=chat_template)
    config = Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "d_model": 96,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 384,
            "num_mel_bins": feature_extractor.feature_size,
            "max_source_positions": feature_extractor.nb_max_frames // 2,  # two frames each
            "initializer_range": 0.2,
        },
        # vLLM's attention supports heads of 32 on a CPU, too
        text_config=_decoder(tokenizer, model_type="qwen2", num_attention_heads=3, num_key_value_heads=1),
        audio_token_index=tokenizer.audio_token_id,
    )
    return _initialize(Qwen2AudioForConditionalGeneration, config, processor, seed)


def _vision_model(texts: list[str], seed: int, initializer_range: float) -> VisionModel:
    # pixels per side of a patch; patches per side of a token
    patch = 7
    merge = 2
    hidden = 96
    tokenizer = _tokenizer(texts, **VISION_TOKENS)
    token_area = (patch * merge) ** 2
    pixels = {
        "patch_size": patch,
        "merge_size": merge,
        "size": {"shortest_edge": token_area, "longest_edge": 64 * token_area},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(**pixels),
        tokenizer,
        Qwen2VLVideoProcessor(**pixels, cap_pixels_per_frame=True),
        chat_template=_chat_template(
            image="<|vision_start|><|image_pad|><|vision_end|>", video="<|vision_start|><|video_pad|><|vision_end|>"
        ),
    )
    config = Qwen2_5_VLConfig(
        text_config=_decoder(
            tokenizer,
            hidden_size=hidden,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
        ),
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": hidden,
            "patch_size": patch,
            "spatial_merge_size": merge,
            "fullatt_block_indexes": [0, 1],
            "initializer_range": initializer_range,
        },
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
        vision_start_token_id=tokenizer.vision_bos_token_id,
        vision_end_token_id=tokenizer.vision_eos_token_id,
    )
    return _initialize(Qwen2_5_VLForConditionalGeneration, config, processor, seed)


def _tokenizer(texts: list[str], **named: str) -> PreTrainedTokenizerFast:
    """
    Tokenizer whose vocabulary has the words of `texts`, the ASCII characters and the special tokens `named`.

    With random weights, all tokens are equally likely at first. The model therefore samples a right answer sooner from
    these 100 tokens than from the 300 of a byte-level vocabulary. Characters outside ASCII are unknown.
    """
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>", *named.values()]
    splitter = pre_tokenizers.Metaspace(prepend_scheme="never")  # "Which digit" is "Which" and "▁digit"
    words = [word for text in ["system", "user", "assistant", *texts] for word, _ in splitter.pre_tokenize_str(text)]
    scores = dict.fromkeys(special, 0.0)
    scores |= dict.fromkeys(string.printable.replace(" ", "▁"), -10.0)
    scores |= dict.fromkeys(words, -1.0)  # a word scores higher as one token than as characters
    unigram = Tokenizer(models.Unigram(list(scores.items()), unk_id=special.index("<|unknown|>")))
    unigram.pre_tokenizer = splitter
    unigram.decoder = decoders.Metaspace(prepend_scheme="never")
    return PreTrainedTokenizerFast(
        tokenizer_object=unigram,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|unknown|>",
        padding_side="left",
        extra_special_tokens=named,
    )


def tool_call(name: str, **arguments: int) -> str:
    """A tool call as the chat template formats it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _chat_template(**marks: str) -> str:
    """ChatML with tool calls. `marks` maps the type of a content block to its text."""
    media = "".join(f"{{% elif block.type == '{kind}' %}}{mark}" for kind, mark in marks.items())
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
        f"{{% if block.type == 'text' %}}{{{{ block.text }}}}{media}{{% endif %}}"
        "{% endfor %}{% endif %}"
        "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _decoder(tokenizer: PreTrainedTokenizerFast, **changes) -> dict:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **changes,
    }


def _initialize(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, processor: ProcessorMixin, seed: int
) -> tuple[PreTrainedModel, ProcessorMixin]:
    with torch.random.fork_rng(devices=[]), _built_whole():
        torch.manual_seed(seed)
        model = model_class(config).float().eval()
    model.generation_config = GenerationConfig(
        eos_token_id=processor.tokenizer.eos_token_id, pad_token_id=processor.tokenizer.pad_token_id
    )
    return model, processor


@contextmanager
def _built_whole() -> Iterator[None]:
    """Disables ZeRO-3, which partitions weights at loading time and only some weights of a newly built model."""
    config = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config
