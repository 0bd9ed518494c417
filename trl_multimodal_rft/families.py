# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What is particular to families of models: special cases, with reasons, and how features of prompts are joined."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
    from transformers.models.llama4.modeling_llama4 import Llama4TextAttention


# Processor outputs that hold one value per token. All other outputs are media. Media of several prompts are joined on
# the first dimension, which counts images, tiles, patches or windows.
TOKEN_FIELDS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")

# Token fields that mark the placeholders of an image, video or sound, and also the tokens just before and after them
TOKEN_FIELDS_WITH_ENDS = ("moe_mm_token_type_ids",)

# Tensors that hold the patches of all media in one row, by the name of the tensor with the media's sizes. Patches of
# several prompts are concatenated on the last dimension.
PATCH_ROWS = {"target_sizes": "pixel_values", "target_sizes_videos": "pixel_values_videos"}

# Processor outputs that describe images, besides the pixels
IMAGE_SIZES = ("image_sizes", "image_attention_mask")

# Parts of the names of audio tensors. Tensors with other names belong to images or videos, see `modality_of`.
AUDIO_NAMES = ("audio", "input_features", "feature_attention_mask", "input_values")

# Names of audio features and their masks in forwards
AUDIO_FEATURES = ("input_features", "audio_input_features")
AUDIO_MASKS = ("feature_attention_mask", "input_features_mask", "audio_attention_mask")

# Attributes of processors that extract audio features
AUDIO_EXTRACTORS = ("feature_extractor", "audio_processor")


def _qwen3_omni_tokens(model: "PreTrainedModel", frames: "torch.Tensor") -> "torch.Tensor":
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

    return _get_feat_extract_output_lengths(frames, model.get_encoder(modality="audio").n_window)


def _llama4_query_scale(attention: "Llama4TextAttention", positions: "torch.Tensor") -> "torch.Tensor | None":
    if not attention.attn_temperature_tuning or attention.use_rope:
        return None
    return ((positions + 1) // attention.floor_scale).float().log1p() * attention.attn_scale + 1


def _whisper_window(processor: "ProcessorMixin") -> float:
    return processor.feature_extractor.n_samples / processor.feature_extractor.sampling_rate


# Names of parts that many families have, see `Family.feature_dims`
_AUDIO_PARTS = {"audio_tower": 0, "multi_modal_projector": 0}
_VISION_PARTS = {"vision_tower": 0, "multi_modal_projector": 0}
_VISUAL = {"visual": 0}
_OMNI_PARTS = {"audio_tower": 0, "visual": 0}


@dataclass(frozen=True)
class Family:
    """
    Special cases of a family of models. The defaults apply to all other families.

    Args:
        model_types (`tuple[str, ...]`, *optional*):
            `model_type` of the configs.
        processors (`tuple[str, ...]`, *optional*):
            Class names of processors with special cases.
        isolate (`str`, *optional*):
            `"media"` if media of different prompts must not be padded or batched together, `"prompt"` if prompts must
            not be padded, either, `None` otherwise. The self-check finds families that lack this entry.
        media_padding (`Mapping[str, int]`, *optional*):
            Padding values of media tensors in joined prompts, if not 0.
        indexed_media (`Mapping[str, str]`, *optional*):
            Name of the indexed tensor, by the media tensor that holds the indices. An index counts over all dimensions
            of the indexed tensor except the last. Negative indices are padding.
        token_field_fill (`Mapping[str, int]`, *optional*):
            Values of token fields on text after the prompt, if not 0.
        token_masks (`tuple[str, ...]`, *optional*):
            Processor outputs that say which media each token attends to in cross-attention. Text after the prompt
            attends to the same media as the last prompt token.
        adds_blank_media (`bool`, *optional*, defaults to `False`):
            Whether the processor adds blank media to text-only prompts, which the forward requires.
        query_scale (`Callable`, *optional*):
            A function of an attention layer and token positions that returns the scale of the queries at these
            positions. Needed if the layer computes the scale from positions in the row instead of the sequence.
        sharing_obstacle (`str`, *optional*):
            Reason why completions of the family can't share their prompt, if no other field shows it.
        training_obstacle (`str`, *optional*):
            Reason why training doesn't support the family.
        answer_obstacle (`str`, *optional*):
            Reason why rows with answers, as supervised training needs them, can't be encoded.
        pads_with_first_token (`bool`, *optional*, defaults to `False`):
            Whether padding repeats the first token of a row, since the padding token's gradient isn't finite.
        token_fields_mark_media (`bool`, *optional*, defaults to `True`):
            Whether token fields distinguish media from text.
        audio_limit (`Callable`, *optional*):
            A function of a processor that returns the seconds after which the processor silently cuts audio. Other
            processors split long audio into windows.
        audio_tokens (`Callable`, *optional*):
            A function that returns the number of tokens of each clip, if Whisper's formula doesn't apply. It takes the
            model, and the sum of each clip's audio mask.
        has_frame_mask (`bool`, *optional*, defaults to `True`):
            Whether the audio mask has one value per frame, so that a mask of ones can replace a missing mask.
        takes_base64_audio (`bool`, *optional*, defaults to `False`):
            Whether the chat template requires audio as an encoded file.
        has_qwen_vl_utils (`bool`, *optional*, defaults to `False`):
            Whether images and videos have the options of qwen-vl-utils, which then samples and resizes them.
        hears_videos (`bool`, *optional*, defaults to `False`):
            Whether the processor takes the sound of a video together with its frames.
        samples_frames (`bool`, *optional*, defaults to `False`):
            Whether the processor samples frames at the rate of its video processor, even without `do_sample_frames`.
        bounds_whole_videos (`bool`, *optional*, defaults to `False`):
            Whether `size` of the video processor bounds all frames of a video together, not each frame.
        towers (`Mapping[str, str]`, *optional*):
            Dotted names, by modality, of encoders that `get_encoder` doesn't find.
        precomputes_exactly (`bool`, *optional*, defaults to `True`):
            Whether the values that transformers precomputes from sizes of media, for exports, equal the values that
            the encoder computes.
        unlisted_media (`tuple[str, ...]`, *optional*):
            Modalities that the model takes and that `input_modalities` of its class lacks.
        not_in_vllm (`tuple[str, ...]`, *optional*):
            Modalities whose placeholders vLLM expands to other tokens than the processor does.
        trained_part (`Mapping[str, str]`, *optional*):
            The class in transformers that loads the trained part of a release, by the `model_type` of the release.
        feature_dims (`Mapping[str, int]`, *optional*):
            The dimension on which outputs for single prompts are joined into the output for several prompts, by the
            name of a frozen encoder or projector. Such a module runs once per prompt and rollout, and others run in
            each forward. For two prompts with 4 and 6 patches, outputs of shapes `(4, H)` and `(6, H)` are joined on
            dimension 0.
    """

    model_types: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()
    isolate: Literal["media", "prompt"] | None = None
    media_padding: Mapping[str, int] = field(default_factory=dict)
    indexed_media: Mapping[str, str] = field(default_factory=dict)
    token_field_fill: Mapping[str, int] = field(default_factory=dict)
    token_masks: tuple[str, ...] = ()
    adds_blank_media: bool = False
    query_scale: Callable[[Any, Any], Any] | None = None
    sharing_obstacle: str | None = None
    training_obstacle: str | None = None
    answer_obstacle: str | None = None
    pads_with_first_token: bool = False
    token_fields_mark_media: bool = True
    audio_limit: Callable[[Any], float] | None = None
    audio_tokens: Callable[[Any, Any], Any] | None = None
    has_frame_mask: bool = True
    takes_base64_audio: bool = False
    has_qwen_vl_utils: bool = False
    hears_videos: bool = False
    samples_frames: bool = False
    bounds_whole_videos: bool = False
    towers: Mapping[str, str] = field(default_factory=dict)
    precomputes_exactly: bool = True
    unlisted_media: tuple[str, ...] = ()
    not_in_vllm: tuple[str, ...] = ()
    trained_part: Mapping[str, str] = field(default_factory=dict)
    feature_dims: Mapping[str, int] = field(default_factory=dict)


FAMILIES = (
    Family(model_types=("apertus1p5",), towers={"image": "model.vision_tokenizer", "audio": "model.audio_tokenizer"}),
    Family(
        model_types=("audioflamingo3", "musicflamingo"),
        processors=("AudioFlamingo3Processor", "MusicFlamingoProcessor"),
        audio_limit=lambda processor: processor.max_audio_len,
        feature_dims=_AUDIO_PARTS,
    ),
    Family(
        model_types=(
            *("aria", "aya_vision", "cohere2_vision", "deepseek_ocr2", "fast_vlm", "gemma3", "got_ocr2", "lfm3_vl"),
            *("llava", "llava_next", "llava_next_video", "qianfan_ocr", "unlimited_ocr", "vipllava"),
        ),
        feature_dims=_VISION_PARTS,
    ),
    Family(model_types=("cohere_compass", "cosmos3_omni", "glm5_next", "qwen4_exp"), feature_dims=_VISUAL),
    Family(model_types=("cosmos3_edge", "paddleocr_vl"), feature_dims={"visual": 0, "projector": 0}),
    Family(
        model_types=("deepseek_vl", "deepseek_vl_hybrid"),
        feature_dims={
            "vision_model": 0,
            "aligner": 0,
            "high_res_vision_model": 0,
            "high_res_vision_neck": 0,
            "high_res_vision_proj": 0,
        },
    ),
    Family(model_types=("dots3_note", "inkling2", "inkling2_loop"), feature_dims={"vision_tower": 0}),
    Family(
        model_types=("emu3",),
        isolate="media",  # padding of an image affects its codes
    ),
    Family(model_types=("ernie4_5_vl_moe",), feature_dims={"vision_tower": 0, "resampler_model": 0}),
    Family(
        model_types=("fun_asr_nano",),
        isolate="media",  # its projector attends to the padding of a clip
        feature_dims=_AUDIO_PARTS,
    ),
    Family(
        model_types=("gemma3n",),
        processors=("Gemma3nProcessor",),
        isolate="media",  # its audio encoder has no padding mask, so a clip depends on its neighbours
        pads_with_first_token=True,  # the gradient of the embeddings' magnitude isn't finite at the zeros of padding
        audio_limit=lambda processor: 30,  # a default of the extractor's call
        feature_dims={"vision_tower": 0, "audio_tower": 0, "embed_vision": 0, "embed_audio": 0},
    ),
    Family(
        model_types=("gemma4",),
        processors=("Gemma4Processor",),
        media_padding={"image_position_ids": -1},  # marks padding patches
        audio_limit=lambda processor: 30,  # a default of the extractor's call
        feature_dims={"vision_tower": 0, "audio_tower": 0, "embed_vision": 0, "embed_audio": 0},
    ),
    Family(
        model_types=("gemma4_unified",), sharing_obstacle="its masks for generation differ from those of its forward"
    ),
    Family(
        model_types=("glm4v", "glm4v_moe", "glm46v", "glm_ocr"),
        isolate="media",  # uses one token for images and videos, and takes one modality per call
        feature_dims=_VISUAL,
    ),
    Family(
        model_types=("glmasr",),
        processors=("GlmAsrProcessor",),
        isolate="media",  # the encoder has no mask for padding
        audio_limit=lambda processor: processor.max_audio_len,
        feature_dims=_AUDIO_PARTS,
    ),
    Family(
        model_types=("granite4_vision",),
        feature_dims={"vision_tower": 0, "layerwise_projectors": 0, "spatial_projectors": 0},
    ),
    Family(model_types=("granite_docling",), feature_dims={"vision_model": 0}),
    Family(
        model_types=("granite_speech", "granite_speech_plus"),
        isolate="media",  # the encoder has no mask for padding
        audio_tokens=lambda model, tokens: tokens,  # its mask has one value per token
        has_frame_mask=False,
        towers={"audio": "model.encoder"},
        feature_dims={"encoder": 0, "projector": 0},
    ),
    Family(model_types=("hunyuan_vl", "hy_v4_vl"), feature_dims={"vision_tower": 1}),  # packs patches into one row
    Family(model_types=("hyperclovax_vision_v2", "video_llama_3"), feature_dims={"vision_model": 0, "projector": 0}),
    Family(
        model_types=("idefics",),
        isolate="media",  # all rows of a batch must have the same number of images
        token_masks=("image_attention_mask",),
        adds_blank_media=True,
    ),
    Family(model_types=("idefics2", "idefics3"), feature_dims={"vision_model": 0, "connector": 0}),
    Family(model_types=("inkling_mm_model",), feature_dims={"audio_tower": 0, "vision_tower": 0}),
    Family(
        model_types=("instructblipvideo",),
        training_obstacle="its forward passes positions of text tokens to the Q-Former, which has other tokens",
    ),
    Family(
        model_types=("internvl",),
        processors=("InternVLProcessor",),
        not_in_vllm=("video",),  # vLLM uses another token for videos
        feature_dims=_VISION_PARTS,
    ),
    Family(model_types=("janus",), feature_dims={"vision_model": 0, "aligner": 0}),
    Family(model_types=("kimi_k25",), feature_dims={"vision_tower": 0, "mm_projector": 0}),
    Family(
        model_types=("kyutai_speech_to_text", "voxtral_realtime"),
        training_obstacle="it consumes one audio frame per generated token, so there is no prompt/completion split",
    ),
    Family(
        model_types=("lfm2_vl",),
        feature_dims={"vision_tower": 0},  # its projector reads all images of a batch in one row
    ),
    Family(
        model_types=("lighton_ocr",),
        feature_dims={"vision_encoder": 1, "vision_projection": 0},  # the encoder packs patches into one row
    ),
    Family(model_types=("llama4", "llama4_text"), query_scale=_llama4_query_scale, feature_dims={"vision_model": 0}),
    Family(
        model_types=("llava_onevision", "perception_lm"),
        isolate="media",  # padding frames or tiles would be encoded, too
        feature_dims=_VISION_PARTS,
    ),
    Family(
        model_types=("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"),
        feature_dims={"vision_tower": 1},  # packs patches into one row; the merger returns a list of images
    ),
    Family(
        model_types=("minimax_m3_vl",),
        isolate="prompt",  # its sparse layers count blocks of tokens from the left edge, padding included
        feature_dims=_VISION_PARTS,
    ),
    Family(
        model_types=("mistral3", "mistral_large4"),
        feature_dims={"vision_tower": 1, "multi_modal_projector": 0},  # the tower packs patches into one row
    ),
    Family(
        model_types=("molmo2",),
        isolate="media",  # uses one token for images and videos, and takes one modality per call
        media_padding={"image_token_pooling": -1, "video_token_pooling": -1},  # marks no patch
        indexed_media={"image_token_pooling": "pixel_values", "video_token_pooling": "pixel_values_videos"},
        feature_dims=_VISION_PARTS,
    ),
    Family(
        model_types=("mllama",),
        isolate="media",  # tokens that attend to no image attend to all, including padding
        token_masks=("cross_attention_mask",),
        feature_dims={"vision_model": 0, "multi_modal_projector": 0},
    ),
    Family(
        model_types=("muse_glimmer", "muse_glimmer_vision", "muse_spark", "muse_spark_vision"),
        precomputes_exactly=False,  # its encoder interpolates positions of the transposed image
        feature_dims={"vision_tower": 0, "vision_adapter": 0, "vision_projection": 0},
    ),
    Family(model_types=("moss_transcribe_diarize", "omniasr", "qwen3_asr"), feature_dims=_AUDIO_PARTS),
    Family(
        model_types=("ovis2",),
        feature_dims={"vision_tower": 0},  # its table of embeddings also gets tokens that belong to no image
    ),
    Family(
        model_types=("paligemma",),
        token_field_fill={"token_type_ids": 1},  # marks causal text, such as the completion
        token_fields_mark_media=False,  # token fields distinguish prompt and completion
        feature_dims=_VISION_PARTS,
    ),
    Family(
        model_types=("phi4_multimodal",),
        isolate="media",  # images in a batch change encodings of audio; their sizes change encodings of other images
        has_frame_mask=False,
        towers={"image": "model.embed_tokens_extend.image_embed", "audio": "model.embed_tokens_extend.audio_embed"},
    ),
    Family(
        model_types=("qwen2_audio",),
        processors=("Qwen2AudioProcessor",),
        audio_limit=_whisper_window,
        feature_dims=_AUDIO_PARTS,
    ),
    Family(
        model_types=("qwen2_vl", "qwen2_5_vl"),
        processors=("Qwen2VLProcessor", "Qwen2_5_VLProcessor"),
        has_qwen_vl_utils=True,
        feature_dims=_VISUAL,
    ),
    Family(
        model_types=("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        processors=("Qwen3VLProcessor",),
        has_qwen_vl_utils=True,
        bounds_whole_videos=True,
        feature_dims=_VISUAL,
    ),
    # Omni models are released as a thinker, which reads media and generates text, with parts for speech. Only the
    # thinker is sampled and trained; its class finds its weights and config in the release.
    Family(
        model_types=("qwen2_5_omni", "qwen2_5_omni_thinker"),
        processors=("Qwen2_5OmniProcessor",),
        audio_limit=_whisper_window,
        has_qwen_vl_utils=True,
        hears_videos=True,
        trained_part={"qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration"},
        feature_dims=_OMNI_PARTS,
    ),
    Family(
        model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
        processors=("Qwen3OmniMoeProcessor",),
        isolate="media",  # clips are padded to the longest before convolutions without a mask
        audio_tokens=_qwen3_omni_tokens,
        has_qwen_vl_utils=True,
        hears_videos=True,
        trained_part={"qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration"},
        feature_dims=_OMNI_PARTS,
    ),
    Family(
        model_types=("smolvlm",),
        processors=("SmolVLMProcessor",),
        samples_frames=True,  # in its `apply_chat_template`
        unlisted_media=("video",),
        feature_dims={"vision_model": 0, "connector": 0},
    ),
    Family(model_types=("step3p7",), feature_dims={"vision_model": 0, "multi_modal_projector": 0}),
    Family(
        model_types=("video_llava",), feature_dims={"image_tower": 0, "video_tower": 0, "multi_modal_projector": 0}
    ),
    Family(
        model_types=("voxtral",),
        processors=("VoxtralProcessor",),
        takes_base64_audio=True,
        answer_obstacle="mistral-common renders prompts alone, without answers after them",
        feature_dims=_AUDIO_PARTS,
    ),
)


def family_of(model: "torch.nn.Module | PreTrainedConfig | str") -> Family:
    """
    Returns the special cases of a model's family.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~transformers.PreTrainedConfig`] or `str`):
            Model without wrappers, its config or its `model_type`.

    Returns:
        [`Family`]: The special cases, or defaults for other models.
    """
    model_type = model if isinstance(model, str) else getattr(model, "config", model).model_type
    return next((family for family in FAMILIES if model_type in family.model_types), Family())


def family_of_processor(processor: "ProcessorMixin | PreTrainedTokenizerBase") -> Family:
    """Returns the special cases of a processor's family, or defaults."""
    for cls in type(processor).__mro__:  # subclasses before base classes
        for family in FAMILIES:
            if cls.__name__ in family.processors:
                return family
    return Family()


def input_modalities(model: "torch.nn.Module | type[PreTrainedModel]") -> tuple[str, ...]:
    """Returns the modalities, including text, that a model or a class of models takes."""
    config = getattr(model, "config", None) or getattr(model, "config_class", None)
    listed = tuple(getattr(model, "input_modalities", ()))
    return listed if config is None else (*listed, *family_of(config).unlisted_media)


def media_padding(name: str) -> int:
    """Returns the padding value of a media tensor. Names have the same meaning in all families."""
    return next((family.media_padding[name] for family in FAMILIES if name in family.media_padding), 0)


def indexed_media(name: str) -> str | None:
    """Returns the tensor that a media tensor indexes, if any. Names have the same meaning in all families."""
    return next((family.indexed_media[name] for family in FAMILIES if name in family.indexed_media), None)


def modality_of(name: str) -> str:
    """Returns the modality of a media tensor."""
    if "video" in name or name == "second_per_grid_ts":
        return "video"
    return "audio" if any(part in name for part in AUDIO_NAMES) else "image"
