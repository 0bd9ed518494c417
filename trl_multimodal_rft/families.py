# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
What depends on a model's architecture: one row per family, with the reason.

A family of which nothing is to be said needs no row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


# Also the order in which media without a placeholder are put before the text
MODALITIES = ("image", "video", "audio")

# Processor outputs that hold one value per token. Everything else a processor returns is media, which joins across
# prompts on the first dimension, whatever it counts (images, tiles, patches, windows).
TOKEN_FIELDS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")

# Those of them in which the tokens before and behind a medium are a part of it
TOKEN_FIELDS_WITH_ENDS = ("moe_mm_token_type_ids",)

# Tensors that hold the patches of all media in one row, by the sizes beside them. They join on their last dimension.
PATCH_ROWS = {"target_sizes": "pixel_values", "target_sizes_videos": "pixel_values_videos"}

# What processors say about images beside their pixels
IMAGE_SIZES = ("image_sizes", "image_attention_mask")

# Parts of names that media tensors have if they are audio; images have more names than can be listed
AUDIO_NAMES = ("audio", "input_features", "feature_attention_mask", "input_values")

# What forwards call features of audio and their mask
AUDIO_FEATURES = ("input_features", "audio_input_features")
AUDIO_MASKS = ("feature_attention_mask", "input_features_mask", "audio_attention_mask")

# Where processors keep what turns sound into features
AUDIO_EXTRACTORS = ("feature_extractor", "audio_processor")


_HEARS_AS_IT_WRITES = "it hears a piece of the audio with every token that it writes, so no text follows a prompt"


def _qwen3_omni_tokens(model, frames):
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

    return _get_feat_extract_output_lengths(frames, model.get_encoder(modality="audio").n_window)


def _llama4_query_scale(attention, places):
    if not attention.attn_temperature_tuning or attention.use_rope:
        return None
    return ((places + 1) // attention.floor_scale).float().log1p() * attention.attn_scale + 1


def _whisper_window(processor) -> float:
    return processor.feature_extractor.n_samples / processor.feature_extractor.sampling_rate


@dataclass(frozen=True)
class Family:
    """
    What is particular to a family of models. The defaults are what holds for all others.

    Args:
        model_types (`tuple[str, ...]`, *optional*):
            `model_type` of the configs.
        processors (`tuple[str, ...]`, *optional*):
            Names of the processors' classes, where something is to be said about them.
        isolate (`str`, *optional*):
            `"media"` if media must not be padded or mixed to join prompts, `"prompt"` if prompts must not be padded
            either, `None` if they may. The self-check finds others.
        media_padding (`Mapping[str, int]`, *optional*):
            What pads a media tensor when prompts join, where it is not 0.
        indexed_media (`Mapping[str, str]`, *optional*):
            By the name of a media tensor that holds places in another, counted over its dimensions but the last, that
            other. Negative places are none.
        token_field_fill (`Mapping[str, int]`, *optional*):
            What a token field holds on text that follows the prompt, where it is not 0.
        token_masks (`tuple[str, ...]`, *optional*):
            Processor outputs that say of each token which media its layers of cross-attention look at. Text that
            follows the prompt looks at those of the prompt's last token.
        blank_media (`bool`, *optional*, defaults to `False`):
            Whether the processor writes blank media for text alone, without which there is no forward.
        query_scale (`Callable`, *optional*):
            From an attention layer and places of tokens to what scales their queries, where the layer takes the places
            in the row for those in the sequence.
        padded (`str`, *optional*):
            Why completions of the family can't share their prompt, where nothing else tells.
        refused (`str`, *optional*):
            Why the family can't be trained.
        token_fields_mark_media (`bool`, *optional*, defaults to `True`):
            Whether token fields tell media from text.
        audio_limit (`Callable`, *optional*):
            From a processor to the seconds after which it cuts audio without a word. The others split long audio in
            windows.
        audio_tokens (`Callable`, *optional*):
            From a model and the sums of its mask of audio to the tokens of each clip, where Whisper's rule isn't it.
        has_frame_mask (`bool`, *optional*, defaults to `True`):
            Whether the mask of audio is one of frames, so that all ones stand for it where it is left out.
        takes_base64_audio (`bool`, *optional*, defaults to `False`):
            Whether the chat template takes audio only as an encoded file.
        has_qwen_vl_utils (`bool`, *optional*, defaults to `False`):
            Whether options of images and videos are those of qwen-vl-utils, which then samples and resizes them.
        samples_frames (`bool`, *optional*, defaults to `False`):
            Whether the processor samples frames at the rate of its video processor, whatever `do_sample_frames` of
            that says.
        bounds_whole_videos (`bool`, *optional*, defaults to `False`):
            Whether `size` of the video processor bounds all frames of a video together, not each.
        towers (`Mapping[str, str]`, *optional*):
            Dotted names of encoders that `get_encoder` doesn't know, by modality.
        not_in_vllm (`tuple[str, ...]`, *optional*):
            Kinds of media of which vLLM makes other tokens.
        trained_part (`Mapping[str, str]`, *optional*):
            By the `model_type` of what is released, the class in transformers that loads what is trained of it.
    """

    model_types: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()
    isolate: Literal["media", "prompt"] | None = None
    media_padding: Mapping[str, int] = field(default_factory=dict)
    indexed_media: Mapping[str, str] = field(default_factory=dict)
    token_field_fill: Mapping[str, int] = field(default_factory=dict)
    token_masks: tuple[str, ...] = ()
    blank_media: bool = False
    query_scale: Callable[[Any, Any], Any] | None = None
    padded: str | None = None
    refused: str | None = None
    token_fields_mark_media: bool = True
    audio_limit: Callable[[Any], float] | None = None
    audio_tokens: Callable[[Any, Any], Any] | None = None
    has_frame_mask: bool = True
    takes_base64_audio: bool = False
    has_qwen_vl_utils: bool = False
    samples_frames: bool = False
    bounds_whole_videos: bool = False
    towers: Mapping[str, str] = field(default_factory=dict)
    not_in_vllm: tuple[str, ...] = ()
    trained_part: Mapping[str, str] = field(default_factory=dict)


FAMILIES = (
    Family(
        model_types=("audioflamingo3", "musicflamingo"),
        processors=("AudioFlamingo3Processor", "MusicFlamingoProcessor"),
        audio_limit=lambda processor: processor.max_audio_len,
    ),
    Family(
        model_types=("emu3",),
        isolate="media",  # what pads an image reaches its codes
    ),
    Family(
        model_types=("fun_asr_nano",),
        isolate="media",  # its projector's attention sees what pads a clip
    ),
    Family(
        model_types=("gemma3n",),
        processors=("Gemma3nProcessor",),
        isolate="media",  # its audio encoder has no padding mask, so a clip depends on its neighbours
        audio_limit=lambda processor: 30,  # a default of the extractor's call
    ),
    Family(
        model_types=("gemma4",),
        processors=("Gemma4Processor",),
        media_padding={"image_position_ids": -1},  # marks padding patches
        audio_limit=lambda processor: 30,  # a default of the extractor's call
    ),
    Family(
        model_types=("gemma4_unified",),
        padded="the masks that it gives for generation aren't those of its forward",
    ),
    Family(
        model_types=("glm4v", "glm4v_moe", "glm46v", "glm_ocr"),
        isolate="media",  # writes images and videos with one token, and takes one of both a call
    ),
    Family(
        model_types=("glmasr",),
        processors=("GlmAsrProcessor",),
        isolate="media",  # the encoder has no mask for padding
        audio_limit=lambda processor: processor.max_audio_len,
    ),
    Family(
        model_types=("granite_speech", "granite_speech_plus"),
        isolate="media",  # the encoder has no mask for padding
        audio_tokens=lambda model, tokens: tokens,  # its mask is one of tokens
        has_frame_mask=False,
        towers={"audio": "model.encoder"},
    ),
    Family(
        model_types=("idefics",),
        isolate="media",  # every row of a batch has as many images
        token_masks=("image_attention_mask",),
        blank_media=True,
    ),
    Family(
        model_types=("instructblipvideo",),
        refused="its forward hands the places of text tokens to the Q-Former, whose tokens are others",
    ),
    Family(
        model_types=("internvl",),
        processors=("InternVLProcessor",),
        not_in_vllm=("video",),  # which has a token of its own for them
    ),
    Family(
        model_types=("kyutai_speech_to_text",),
        refused=_HEARS_AS_IT_WRITES,
    ),
    Family(
        model_types=("llama4", "llama4_text"),
        query_scale=_llama4_query_scale,
    ),
    Family(
        model_types=("llava_onevision",),
        isolate="media",  # frames that pad a video would become features
    ),
    Family(
        model_types=("minimax_m3_vl",),
        isolate="prompt",  # its sparse layers count blocks of tokens from the left edge, padding included
    ),
    Family(
        model_types=("molmo2",),
        isolate="media",  # writes images and videos with one token, and takes one of both a call
        media_padding={"image_token_pooling": -1, "video_token_pooling": -1},  # marks no patch
        indexed_media={"image_token_pooling": "pixel_values", "video_token_pooling": "pixel_values_videos"},
    ),
    Family(
        model_types=("mllama",),
        isolate="media",  # what looks at no image looks at all, padding too
        token_masks=("cross_attention_mask",),
    ),
    Family(
        model_types=("paligemma",),
        token_field_fill={"token_type_ids": 1},  # marks causal text
        token_fields_mark_media=False,  # they tell the prompt from the completion
    ),
    Family(
        model_types=("perception_lm",),
        isolate="media",  # tiles that pad an image would become features
    ),
    Family(
        model_types=("phi4_multimodal",),
        isolate="media",  # hears otherwise beside images, and features depend on the sizes of those beside them
        has_frame_mask=False,
        towers={
            "image": "model.embed_tokens_extend.image_embed",
            "audio": "model.embed_tokens_extend.audio_embed",
        },
    ),
    Family(
        model_types=("qwen2_audio",),
        processors=("Qwen2AudioProcessor",),
        audio_limit=_whisper_window,
    ),
    Family(
        model_types=("qwen2_vl", "qwen2_5_vl"),
        processors=("Qwen2VLProcessor", "Qwen2_5_VLProcessor"),
        has_qwen_vl_utils=True,
    ),
    Family(
        model_types=("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        processors=("Qwen3VLProcessor",),
        has_qwen_vl_utils=True,
        bounds_whole_videos=True,
    ),
    # Omni models are released as a thinker, which reads media and writes text, with parts that speak. The thinker is
    # what is sampled and trained, and its class finds its own weights and config in what is released.
    Family(
        model_types=("qwen2_5_omni", "qwen2_5_omni_thinker"),
        processors=("Qwen2_5OmniProcessor",),
        audio_limit=_whisper_window,
        has_qwen_vl_utils=True,
        trained_part={"qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration"},
    ),
    Family(
        model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
        processors=("Qwen3OmniMoeProcessor",),
        isolate="media",  # clips are padded to the longest before convolutions that don't know it
        audio_tokens=_qwen3_omni_tokens,
        has_qwen_vl_utils=True,
        trained_part={"qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration"},
    ),
    Family(
        model_types=("smolvlm",),
        processors=("SmolVLMProcessor",),
        samples_frames=True,  # its `apply_chat_template` asks for it
    ),
    Family(
        model_types=("voxtral",),
        processors=("VoxtralProcessor",),
        takes_base64_audio=True,
    ),
    Family(
        model_types=("voxtral_realtime",),
        refused=_HEARS_AS_IT_WRITES,
    ),
)


def family_of(model: Any) -> Family:
    """
    The row of a model.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~transformers.PreTrainedConfig`] or `str`):
            Model without wrappers, its config or its `model_type`.

    Returns:
        [`Family`]: Its row, or defaults.
    """
    model_type = model if isinstance(model, str) else getattr(model, "config", model).model_type
    return next((family for family in FAMILIES if model_type in family.model_types), Family())


def family_of_processor(processor: Any) -> Family:
    """The row of a processor."""
    names = [cls.__name__ for cls in type(processor).__mro__]
    return next((family for name in names for family in FAMILIES if name in family.processors), Family())


def media_padding(name: str) -> int:
    """What pads a media tensor when prompts join. No two families call different things by one name."""
    return next((family.media_padding[name] for family in FAMILIES if name in family.media_padding), 0)


def indexed_media(name: str) -> str | None:
    """The media tensor in which another holds places. No two families call different things by one name."""
    return next((family.indexed_media[name] for family in FAMILIES if name in family.indexed_media), None)


def modality_of(name: str) -> str:
    """Modality of a media tensor."""
    if "video" in name or name == "second_per_grid_ts":
        return "video"
    return "audio" if any(part in name for part in AUDIO_NAMES) else "image"
