# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tiny models of transformers' architectures, from the default configs of their classes."""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel


VOCABULARY = 400

_HEADS = 4
_HEAD_DIM = 32
_HIDDEN = _HEADS * _HEAD_DIM
_POSITIONS = 2048
_PATCHES = 4  # along each side of an image

# Settings by patterns of their names; the first match applies. Equal sizes keep dependent settings consistent.
_SMALL: tuple[tuple[str, int], ...] = (
    (r"(linear|mamba|ssm).*num.*heads|linear_num_(key|value)_heads|mamba_num_heads", _HEADS),
    (r"index_n_heads", 32),  # with few, many keys score 0, and ties decide
    (r"(\w+_)?(num_key_value_heads|num_kv_heads)", 2),
    (r"(\w+_)?(num_attention_heads|num_heads|n_heads|attention_heads)", _HEADS),
    (r"(\w*head_dim|dim_head)", _HEAD_DIM),
    (r"(kv|q)_lora_rank|laurel_rank|hc_lowrank", _HEAD_DIM),
    (r"(\w+_)?(num_hidden_layers|num_layers|n_layers|encoder_layers|depth|layers|num_blocks)", 2),
    (r"n_routed_experts|num_local_experts|moe_num_experts|num_experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_k", 2),
    (r"n_group|topk_group|first_k_dense_replace|num_nextn_predict_layers", 1),
    (r"num_kv_shared_layers", 0),
    (r"n_groups", 2),
    (r"deepstack_visual_indexes", 1),
    (r"max_source_positions", 50),
    (r"sliding_window|sliding_window_size|attention_chunk_size|index_topk", 8),
    (r"max_position_embeddings", _POSITIONS),
    (r"vocab_size|unpadded_vocab_size|vocab_size_per_layer_input", VOCABULARY),
    (r"\w*(hidden_size|intermediate_size)\w*|\w*(hidden_dim|ffn_dim|mlp_dim|expert_dim)", _HIDDEN),
    (r"(d_model|\w*embed_dim|output_proj_dims|word_embed_proj_dim|\w*projection_dim|output_dim|decoder_dim)", _HIDDEN),
)

_IDS = re.compile(r"\w*(_id|_ids|_index|_idx)")


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_IMAGE = 310
_VIDEO = 311
_AUDIO = 312
_SIDES = {"vision_start_token_id": 313, "vision_end_token_id": 314, "audio_start_token_id": 315}
_SAM = {"image_size": 128, "downsample_channels": [_HIDDEN // 2, _HIDDEN], "output_channels": _HIDDEN // 4}
_SAM |= {"window_size": 2, "global_attn_indexes": [1]}
_MINICPM = {"image_token_id": _IMAGE, "video_token_id": _VIDEO, "insert_layer_id": 0}
_CHAMELEON_CODES = {"num_embeddings": 8, "resolution": 64, "base_channels": 32, "latent_channels": 32, "embed_dim": 32}
_EMU_CODES = {"codebook_size": 8, "base_channels": _HIDDEN, "channel_multiplier": [1, 1], "num_res_blocks": 1}
_EMU_VOCABULARY = {"<image>": _IMAGE, "<|extra_200|>": 319, **{f"<|visual token {i:06d}|>": 320 + i for i in range(8)}}
_FAST_VIT = {"layers": [1, 1, 1, 1], "embed_dims": [16, 16, 32, _HIDDEN // 2]}
_PERCEPTION = {"embed_dim": _HIDDEN, "depth": 2, "num_heads": _HEADS, "img_size": [64, 64]}
_INDEXER = {"n_heads": _HEADS, "kv_heads": 1, "head_dim": _HEAD_DIM, "budget": 8, "compress_ratio": 2}
_SPARSE = {"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2}
_LLAMA4 = {"projector_input_dim": _HIDDEN, "projector_output_dim": _HIDDEN, "vision_output_dim": _HIDDEN}
_MLLAMA = {"vision_output_dim": 3 * _HIDDEN, "intermediate_layers_indices": [0, 1], "num_global_layers": 1}
_MLLAMA |= {"max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]}
_SPEECH = {"num_filters": 4, "hidden_size": 16, "depths": [1, 1, 1], "downsampling_ratios": [4, 4], "vae_std": 0.0}

# Settings that a class leaves to checkpoints, and numbers that depend on sizes, by `model_type`
CHANGES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {_PATCHES**2: 8}, "max_value_projector_patch_to_query_dict": 8},
    "blip-2": {"image_token_index": _IMAGE, "num_query_tokens": 4},
    "chameleon": {
        "image_token_id": _IMAGE,
        "vocabulary_map": {"<image>": _IMAGE, **{f"IMGIMG{'ABCDEFGH'[i]}Z": 320 + i for i in range(8)}},
        "vq_config": _CHAMELEON_CODES,
    },
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
        "vision_config": {"sam_config": _SAM},
    },
    "dots3_note": {
        "text_config": {"head_dim": 2 * _HEAD_DIM},
        "vision_config": {"adapter_in_dim": _HIDDEN, "adapter_out_dim": _HIDDEN},
        "audio_config": {"adapter_input_size": _HIDDEN, "adapter_out_dim": _HIDDEN},
    },
    "emu3": {"image_token_id": _IMAGE, "vocabulary_map": _EMU_VOCABULARY, "vq_config": _EMU_CODES},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [_HIDDEN, _HIDDEN]}},
    "fast_vlm": {"vision_config": {"architecture": "fastvit_t8", "model_args": _FAST_VIT}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": _HIDDEN // 4}},
    "gemma3": {"mm_tokens_per_image": 4},
    "glm5_next": {"text_config": {"index_kpool": 4}},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "downsample_rate": "1/2",
        "spatial_target_layers": [0, 1, 0, 1],
    },
    "idefics": {"additional_vocab_size": 2},
    "hunyuan_vl": {"text_config": {"head_dim": _HEAD_DIM, "rope_parameters": {"alpha": 1000.0}}},
    "inkling2_loop": {
        "text_config": {"loop_layer_index_start": 1, "loop_layer_index_end": 2, "n_layers_per_attn_res_block": 1}
    },
    "instructblip": {"image_token_index": _IMAGE, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": _VIDEO, "num_query_tokens": 4},
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": _HIDDEN}},
    "llama4": {"vision_config": {"intermediate_size": 4 * _HIDDEN, **_LLAMA4}},
    "minicpm_ocr": _MINICPM,
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": _MINICPM,
    "minimax_m3_vl": {  # by default all layers are of one kind, in the released model of two
        "text_config": {
            **_SPARSE,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"],
        }
    },
    "mllama": {"text_config": {"cross_attention_layers": [1]}, "vision_config": _MLLAMA},
    "molmo2": {
        "adapter_config": {"vision_feature_layer": [1, 0]},
        "vision_config": {"num_position_embeddings": _PATCHES**2},
    },
    "nemotron_h_omni": {
        "image_token_id": _IMAGE,
        "video_token_id": _VIDEO,
        "vision_config": {"mlp_ratio": 2.0, "max_img_size": 64, "summary_idxs": [0], "num_cls_tokens": 2},
    },
    "muse_glimmer": {"out_hidden_size": 4 * _HIDDEN},
    "muse_spark": {"out_hidden_size": 4 * _HIDDEN},
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_core_tiny_patch16_384",
            "model_args": {**_PERCEPTION, "global_pool": "", "ref_feat_shape": [4, 4]},
        }
    },
    "qwen2_5_omni_thinker": _SIDES,
    "qwen3_omni_moe_thinker": _SIDES,
    "qwen4_exp": {"text_config": {f"indexer_{name}": value for name, value in _INDEXER.items()}},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "unlimited_ocr": {"vision_config": {"sam_config": _SAM, "encoder_config": {"image_size": 128, "patch_size": 64}}},
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config": _SPEECH, "semantic_tokenizer_encoder_config": _SPEECH},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "voxtral": {"audio_token_id": _AUDIO},
}


def tiny_config(config: PreTrainedConfig, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Returns a config of the same kind with small sizes."""
    ids: dict[int, int] = {}
    values = config.to_dict()
    for name, part in config.sub_configs.items():
        if (
            values.get(name) is None
            and re.fullmatch(r"(vision|audio|text)_config", name)
            and getattr(part, "model_type", None)
        ):
            values[name] = part().to_dict()
    values = _shrunk(values, ids)
    if "image_grid_pinpoints" in values:
        side = values["vision_config"]["image_size"]
        values["image_grid_pinpoints"] = [[side, 2 * side], [2 * side, side]]
    return type(config).from_dict(_merged(values, changes or {}))


def _merged(values: dict, changes: Mapping) -> dict:
    values = dict(values)
    for name, value in changes.items():
        own = values.get(name)
        values[name] = _merged(own, value) if isinstance(own, dict) and isinstance(value, Mapping) else value
    return values


def _shrunk(values: dict[str, Any], ids: dict[int, int]) -> dict[str, Any]:
    small = {name: _small(name, value, ids) for name, value in values.items()}
    layers = next(
        (n for n in ("num_hidden_layers", "depth", "num_layers", "encoder_layers", "layers") if n in small), None
    )
    if layers is not None and isinstance(values[layers], int):
        _cut_layers(small, values, layers)
    if "kv_lora_rank" in small and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    patch = small.get("patch_size")
    size = small.get("image_size")
    if isinstance(patch, int) and isinstance(size, int):
        small["image_size"] = _PATCHES * patch
    elif isinstance(patch, int) and isinstance(size, list):
        small["image_size"] = [_PATCHES * patch] * len(size)
    rope = small.get("rope_parameters")
    if isinstance(rope, dict):
        for each in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
            _cut_rope(each, small)
    return small


def _small(name: str, value: Any, ids: dict[int, int]) -> Any:
    if not isinstance(name, str):
        return value  # labels of a classifier
    if isinstance(value, dict):
        return _shrunk(value, ids) if name != "rope_parameters" else copy.deepcopy(value)
    if _IDS.fullmatch(name):
        if isinstance(value, list):
            return [_inside(each, ids) for each in value]
        return _inside(value, ids)
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return [_small(name, each, ids) for each in value]
    if isinstance(value, int) and not isinstance(value, bool):
        limit = next((limit for pattern, limit in _SMALL if re.fullmatch(pattern, name)), value)
        return min(value, limit)
    return value


def _inside(value: Any, ids: dict[int, int]) -> Any:
    """Moves ids of special tokens to the end of the vocabulary."""
    if not isinstance(value, int) or isinstance(value, bool) or value < VOCABULARY:
        return value
    return ids.setdefault(value, VOCABULARY - 1 - len(ids))


def meant_ids(values: Any, name: str = "") -> set[int]:
    if isinstance(values, dict):
        parts = [meant_ids(value, key) for key, value in values.items() if isinstance(key, str)]
        return set().union(*parts)
    if isinstance(values, list):
        return set().union(*(meant_ids(each, name) for each in values)) if _IDS.fullmatch(name) else set()
    return {values} if type(values) is int and _IDS.fullmatch(name) else set()


def _cut_layers(small: dict[str, Any], values: dict[str, Any], name: str) -> None:
    """Keeps the first layer of each kind, and the matching entries of lists."""
    n_layers = values[name]
    lists = {key: value for key, value in values.items() if isinstance(value, list) and len(value) == n_layers}
    kinds = list(zip(*(value for value in lists.values() if isinstance(value[0], str)), strict=True))
    chosen = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())
    if len(chosen) < 2:
        chosen = sorted({0, n_layers - 1} if not kinds else {*chosen, *range(n_layers)})[:2]
    small[name] = len(chosen)
    for key in lists:
        small[key] = [small[key][i] for i in chosen]
    own = {int(i): value for i, value in (small.get("per_layer_config") or {}).items()}
    if own:
        small["per_layer_config"] = {place: own[i] for place, i in enumerate(chosen) if i in own}
    last = len(chosen) - 1
    for key, value in values.items():
        if re.fullmatch(r"\w*(indexes|indices|layers|idxs)", key) and isinstance(value, list) and key not in lists:
            small[key] = sorted({min(each, last) for each in value if isinstance(each, int)})


def _cut_rope(rope: dict[str, Any], small: dict[str, Any]) -> None:
    """Scales the sections of a head for time, height and width, which modelling code fixes for large heads."""
    if "rope_type" not in rope or "vocab_size" not in small:
        return
    factor = rope.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1
    total = int(int(small.get("head_dim") or _HEAD_DIM) * factor) // 2
    n = len(rope.get("mrope_section") or "thw")
    rope["mrope_section"] = [*[total // n] * (n - 1), total - (n - 1) * (total // n)]


def tiny_model(model_class: type[PreTrainedModel], changes: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """Returns a model with random weights, the same at each call, scaled so that media affect the output."""
    torch.manual_seed(0)
    config = model_class.config_class()
    config = tiny_config(config, {**CHANGES.get(config.model_type, {}), **(changes or {})})
    model = model_class._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # such as a gate of cross-attention
                parameter.normal_(std=0.5 if parameter.numel() == 1 else 0.1)
            elif parameter.ndim >= 2 and parameter.abs().max() < 0.5:
                parameter.mul_(3.0)
    return model
