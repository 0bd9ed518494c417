# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tiny random models whose prompts join by a rule of their own, with inputs made by hand for want of a processor."""

import torch
import transformers as hf
from transformers.models.mistral_large4.configuration_mistral_large4 import MistralLarge4TextConfig

from trl_multimodal_rft.encoding.prompts import EncodedPrompt, prompt_position_ids
from trl_multimodal_rft.families import TOKEN_FIELDS, modality_of


PLACEHOLDER = 10
TEXT = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def instantiate(model_class: type, config: hf.PreTrainedConfig) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:  # else attention is nearly uniform, and media hardly count
                parameter.normal_(std=0.1) if not parameter.any() else parameter.mul_(6)
    model.generation_config = hf.GenerationConfig(pad_token_id=0, eos_token_id=None)
    model.config.get_text_config().pad_token_id = 0
    return model


def encoded(model: hf.PreTrainedModel, inputs: dict[str, torch.Tensor]) -> EncodedPrompt:
    """A prompt of what a processor would return."""
    ids = inputs["input_ids"][0]
    fields = {name: inputs[name][0] for name in TOKEN_FIELDS if name in inputs}
    media = {name: value for name, value in inputs.items() if name not in ("input_ids", *TOKEN_FIELDS)}
    positions = prompt_position_ids(model, ids, media, fields)
    return EncodedPrompt(ids, fields, media, positions, modalities=frozenset(map(modality_of, media)))


def _ids(n_media: int, seed: int, n_after: int = 4) -> torch.Tensor:
    text = torch.randint(20, 90, (3 + n_after,), generator=_seeded(seed))
    return torch.cat([text[:3], torch.full((n_media,), PLACEHOLDER), text[3:]])[None]


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def glmasr():
    config = hf.GlmAsrConfig(
        audio_config={
            **VISION,
            "model_type": "glmasr_encoder",
            "num_attention_heads": 4,
            "num_mel_bins": 16,
            "head_dim": 8,
        },
        text_config={**TEXT, "model_type": "llama", "intermediate_size": 64, "num_key_value_heads": 2},
        audio_token_id=PLACEHOLDER,
    )

    def prompt(frames, *args):
        return {
            "input_ids": _ids((frames + 1) // 8, *args),
            "input_features": torch.randn(1, 16, frames, generator=_seeded(frames)),
            "input_features_mask": torch.ones(1, frames, dtype=torch.long),
        }

    return instantiate(hf.GlmAsrForConditionalGeneration, config), [prompt(32, 1), prompt(48, 2, 7)]


def fun_asr_nano():
    config = hf.FunAsrNanoConfig(
        audio_config={
            **VISION,
            "num_hidden_layers": 3,
            "num_timestamp_prediction_layers": 1,
            "num_mel_bins": 8,
            "num_stacked_frames": 2,
            "fsmn_kernel_size": 5,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        adaptor_config={
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "projector_hidden_size": 48,
        },
        text_config={**TEXT, "model_type": "qwen3", "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8},
        audio_token_id=PLACEHOLDER,
    )

    def prompt(frames, *args):
        return {
            "input_ids": _ids(frames, *args),
            "input_features": torch.randn(1, frames, 16, generator=_seeded(frames)),
            "input_features_mask": torch.ones(1, frames, dtype=torch.long),
        }

    return instantiate(hf.FunAsrNanoForConditionalGeneration, config), [prompt(9, 1), prompt(14, 2, 7)]


def minimax_m3_vl():
    config = hf.MiniMaxM3VLConfig(
        vision_config={**VISION, "image_size": 32, "patch_size": 4},
        text_config={
            **TEXT,
            "intermediate_size": 32,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rotary_dim": 4,
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        image_token_index=PLACEHOLDER,
        video_token_index=PLACEHOLDER + 1,
        projector_hidden_size=32,
    )

    def prompt(height, width, *args):
        return {
            "input_ids": _ids(height * width // 4, *args),
            "pixel_values": torch.randn(height * width, 96, generator=_seeded(width)),
            "image_grid_thw": torch.tensor([[1, height, width]]),
        }

    model = instantiate(hf.MiniMaxM3SparseForConditionalGeneration, config)
    return model, [prompt(4, 4, 1), prompt(4, 8, 2, 9)]


def mistral_large4():
    config = hf.MistralLarge4Config(
        vision_config={**VISION, "model_type": "pixtral", "patch_size": 4, "image_size": 32, "hidden_act": "silu"},
        text_config=MistralLarge4TextConfig(
            **TEXT,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_key_value_heads=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            index_topk=8,
            index_head_dim=16,
            index_n_heads=32,  # with few, many keys have a score of 0, and which of them count is left to `topk`
            max_position_embeddings=256,
        ),
        image_token_index=PLACEHOLDER,
    )

    def prompt(height, width, *args):
        return {
            "input_ids": _ids(height * width // 64, *args),
            "pixel_values": torch.randn(1, 3, height, width, generator=_seeded(height)),
            "image_sizes": torch.tensor([[height, width]]),
        }

    model = instantiate(hf.MistralLarge4ForConditionalGeneration, config)
    return model, [prompt(16, 16, 1), prompt(24, 16, 2, 9)]


def molmo2(kind="image"):
    config = hf.Molmo2Config(
        vision_config={
            **VISION,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "image_size": [8, 8],
            "patch_size": 2,
            "num_position_embeddings": 16,
        },
        adapter_config={
            "vision_feature_layer": [-1, 0],
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "intermediate_size": 64,
            "text_hidden_size": 32,
        },
        text_config={
            **TEXT,
            "additional_vocab_size": 16,
            "intermediate_size": 64,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        image_patch_id=PLACEHOLDER,
        **{f"{name}_token_id": 11 + i for i, name in enumerate(("image_start", "image_end", "low_res_image_start"))},
    )
    # A crop has 4 x 4 patches, and a token for each 2 x 2 of them
    windows = torch.arange(16).view(2, 2, 2, 2).permute(0, 2, 1, 3).reshape(4, 4)

    def prompt(crops, *args):
        """An image for each number of crops, or a video with as many frames."""
        total = sum(crops)
        ids = _ids(4 * total, *args)
        pixels = torch.randn(total, 16, 12, generator=_seeded(total))
        places = torch.cat([windows + 16 * i for i in range(total)])
        places[-1, 0] = -1  # a patch that isn't there
        result = {"input_ids": ids, "mm_token_type_ids": (ids == PLACEHOLDER).long()}
        if kind == "video":
            grids = torch.tensor([[total, 2, 2]])
            return {**result, "pixel_values_videos": pixels, "video_token_pooling": places, "video_grids": grids}
        return {
            **result,
            "pixel_values": pixels,
            "image_token_pooling": places,
            "image_grids": torch.tensor([[2, 2, 2 * (n - 1), 2] for n in crops]),
            "image_num_crops": torch.tensor(crops),
        }

    model = instantiate(hf.Molmo2ForConditionalGeneration, config)
    return model, [prompt([2], 1), prompt([3, 2], 2, 7)]


# Each gives a model and two prompts with media of different sizes
HANDMADE = {build.__name__: build for build in (fun_asr_nano, glmasr, minimax_m3_vl, mistral_large4, molmo2)}
