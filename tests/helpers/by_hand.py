# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tiny random models of families with handmade tensors, and prompts of several sizes, with and without media."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers as hf
from packaging.version import Version

from trl_multimodal_rft.encoding.prompts import EncodedPrompt, prompt_position_ids


IMAGE, VIDEO, START, END = 5, 6, 7, 8
TEXT = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = {**TEXT, "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2}
del SMALL["intermediate_size"], SMALL["num_key_value_heads"]
TOWER = {**VISION, "num_attention_heads": 2}
CLIP = {**VISION, "image_size": 28, "patch_size": 14}


def random(model_class: type, config: hf.PreTrainedConfig) -> hf.PreTrainedModel:
    """Returns weights large enough to reveal a wrong mask or position; none is 0."""
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.5 if parameter.numel() == 1 else 0.1)
            elif parameter.ndim >= 2 and parameter.abs().max() < 0.5:
                parameter.mul_(6)
    model.generation_config = hf.GenerationConfig(pad_token_id=0)
    return model


def words(n: int) -> torch.Tensor:
    return 30 + torch.arange(n)


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def marks(sizes: list[int], token: int = IMAGE) -> torch.Tensor:
    """Returns placeholders of media between start and end tokens."""
    ids = [torch.tensor([START, *[token] * size, END]) for size in sizes]
    return torch.cat(ids) if ids else torch.empty(0, dtype=torch.long)


def encoded(model, ids, media=None, fields=None, kind="image") -> EncodedPrompt:
    media, fields = media or {}, fields or {}
    positions = prompt_position_ids(model, ids, media, fields)
    return EncodedPrompt(ids, fields, media, positions, modalities=frozenset([kind] if media else ()))


def spliced(model, n_media: int, behind: int, media: dict, kind: str = "image", has_types: bool = False):
    """Returns a prompt of words, placeholders of its media without start and end tokens, and `n` words."""
    ids = torch.cat([words(3), torch.full((n_media,), IMAGE), words(behind)])
    return encoded(model, ids, media, {"mm_token_type_ids": (ids == IMAGE).long()} if has_types else {}, kind)


def of_images(model, media: Callable[[list], dict], tokens: Callable, *prompts: tuple[int, list, int]):
    """Returns prompts of words, images of these sizes, and words."""
    return [
        encoded(
            model,
            torch.cat([words(before), marks([tokens(size) for size in sizes]), words(behind)]),
            media(sizes) if sizes else {},
        )
        for before, sizes, behind in prompts
    ]


def llama4():
    text = {**TEXT, "intermediate_size_mlp": 96, "head_dim": 16, "num_local_experts": 4, "no_rope_layer_interval": 2}
    text |= {"interleave_moe_layer_step": 2, "attention_chunk_size": 8, "floor_scale": 4}
    vision = {**VISION, "intermediate_size": 128, "vision_output_dim": 32, "image_size": 28, "patch_size": 7}
    vision |= {"projector_input_dim": 32, "projector_output_dim": 32}
    config = hf.Llama4Config(
        text_config=hf.Llama4TextConfig(**text),
        vision_config=hf.Llama4VisionConfig(**vision),
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    model = random(hf.Llama4ForConditionalGeneration, config)

    def media(sizes):
        return {"pixel_values": pixels(len(sizes), 3, 28, 28)}

    return model, of_images(model, media, lambda size: 4, (3, [1], 4), (2, [1, 1], 9), (6, [], 0))


def minicpm(name):
    text = {**TEXT, "model_type": "qwen3_5_text", "head_dim": 16, "layer_types": ["linear_attention"] * 3}
    text["layer_types"] = [*text["layer_types"], "full_attention"]
    text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    text["linear_num_value_heads"] = 4
    markers = {"image_start_id": START, "image_end_id": END, "slice_start_id": 9, "slice_end_id": 10}
    has_markers = name == "MiniCPMV4_7"
    config = getattr(hf, f"{name}Config")(
        text_config=text,
        vision_config={**VISION, "num_hidden_layers": 3, "image_size": 64, "patch_size": 4},
        insert_layer_id=1,
        downsample_mode="16x",
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=False,
        **({**markers, "newline_id": 11} if has_markers else {}),
    )
    model = random(getattr(hf, f"{name}ForConditionalGeneration"), config)

    def prompt(before, sizes, behind, suffix="", token=IMAGE):
        ids = torch.cat([words(before), marks([h * w // 16 for h, w in sizes], token), words(behind)])
        patches = 4 * sum(h * w for h, w in sizes)
        media = {
            f"pixel_values{suffix}": pixels(1, 3, 4, patches),
            f"target_sizes{suffix}": torch.tensor(sizes),
        }
        fields = {"mm_token_type_ids": (ids == IMAGE).long()} if has_markers else {}
        return encoded(model, ids, media if sizes else {}, fields, kind="video" if suffix else "image")

    prompts = [prompt(3, [(8, 8)], 4), prompt(2, [(4, 8), (8, 4)], 9), prompt(6, [], 0)]
    if name == "MiniCPMV4_6":
        prompts.append(prompt(2, [(4, 8), (8, 4)], 3, "_videos", VIDEO))
    return model, prompts


def mllama(vocab_size: int = 120, image_token: int = 110):
    vision = {"hidden_size": 16, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4}
    vision |= {"intermediate_size": 32, "vision_output_dim": 48, "image_size": 28, "patch_size": 14}
    vision |= {"intermediate_layers_indices": [0, 1], "max_num_tiles": 2}
    vision["supported_aspect_ratios"] = [[1, 1], [1, 2], [2, 1]]
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = hf.MllamaConfig(
        text_config=hf.MllamaTextConfig(
            **{**TEXT, "vocab_size": vocab_size}, cross_attention_layers=[1, 3], rope_parameters=rope
        ),
        vision_config=hf.MllamaVisionConfig(**vision),
        image_token_index=image_token,
    )
    model = random(hf.MllamaForConditionalGeneration, config)

    def prompt(before, tiles, behind):
        n = len(tiles)
        ids = torch.cat([words(before), torch.full((n,), image_token), words(behind)])
        values = pixels(1, n, 2, 3, 28, 28)
        shown = torch.arange(2) < torch.tensor(tiles)[:, None]
        looks = torch.arange(len(ids))[:, None] >= before + torch.arange(n)
        return encoded(
            model,
            ids,
            {
                "pixel_values": values * shown[None, :, :, None, None, None],
                "aspect_ratio_ids": torch.tensor([tiles]),
                "aspect_ratio_mask": shown[None].long(),
            },
            {"cross_attention_mask": (looks[:, :, None] & shown).long()},
        )

    return model, [prompt(3, [1], 5), prompt(2, [2, 1], 9), prompt(0, [2], 4), encoded(model, words(6))]


def idefics():
    text = {name: value for name, value in TEXT.items() if name != "num_key_value_heads"}
    config = hf.IdeficsConfig(
        **text,
        additional_vocab_size=2,
        cross_layer_interval=2,
        freeze_text_layers=False,
        freeze_vision_layers=False,
        use_resampler=True,
        vision_config=hf.IdeficsVisionConfig(embed_dim=32, **{k: v for k, v in CLIP.items() if k != "hidden_size"}),
        perceiver_config=hf.IdeficsPerceiverConfig(
            use_resampler=True, resampler_n_latents=3, resampler_depth=1, resampler_n_heads=2, resampler_head_dim=8
        ),
    )
    model = random(hf.IdeficsForVisionText2Text, config)

    def prompt(before, n, behind):
        ids = torch.cat([words(before), torch.full((n,), 121), words(behind)])
        nth = (ids == 121).cumsum(0)  # the last image before a token
        looks = nth[:, None] == 1 + torch.arange(max(n, 1))
        values = pixels(1, n, 3, 28, 28) if n else torch.zeros(1, 1, 3, 28, 28)
        fields = {"image_attention_mask": looks.long()}
        prompt = encoded(model, ids, {"pixel_values": values}, fields)
        return prompt if n else replace(prompt, modalities=frozenset())  # keeps the processor's blank image

    return model, [prompt(3, 1, 5), prompt(2, 2, 9), prompt(6, 0, 1)]


def nemotron_h_omni():
    text = {**TEXT, "model_type": "nemotron_h", "layers_block_type": ["mamba", "attention", "mlp", "mamba", "moe"]}
    del text["num_hidden_layers"]
    text |= {"head_dim": 16, "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2}
    text |= {"chunk_size": 8, "n_routed_experts": 4, "moe_intermediate_size": 32}
    text["moe_shared_expert_intermediate_size"] = 32
    vision = {"model_type": "radio", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"mlp_ratio": 2.0, "patch_size": 4, "image_size": 16, "max_img_size": 64, "summary_idxs": [0]}
    vision |= {"num_cls_tokens": 2, "num_registers": 2, "video_temporal_patch_size": 2, "dtype": "float32"}
    config = hf.AutoConfig.for_model(
        "nemotron_h_omni",
        text_config=text,
        vision_config=vision,
        audio_config=None,
        vision_hidden_size=32,
        projector_hidden_size=48,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    model = random(hf.AutoModelForMultimodalLM._model_mapping[type(config)], config)

    def media(sizes):
        return {"pixel_values": pixels(sum(h * w for h, w in sizes), 48), "image_grid_hw": torch.tensor(sizes)}

    prompts = (3, [(4, 4)], 5), (2, [(4, 8), (8, 4)], 9), (6, [], 0)
    return model, of_images(model, media, lambda size: size[0] * size[1] // 4, *prompts)


def inkling2():
    text = {name: TEXT[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "pad_token_id")}
    text |= {"vocab_size": 128, "unpadded_vocab_size": 120, "num_hidden_layers": 4, "head_dim": 16, "d_rel": 4}
    text |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "eos_token_id": 2}
    text |= {"sliding_window_size": 6, "rel_extent": 8, "layer_types": ["hybrid_sliding", "hybrid"] * 2}
    text |= {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
    text |= {"log_scaling_n_floor": 4, "n_layers_per_attn_res_block": 2}
    vision = {**VISION, "patch_size": 4, "posemb_grid_size": 4, "projection_hidden_dim": 48, "text_hidden_size": 64}
    config = hf.Inkling2Config(
        text_config=hf.Inkling2TextConfig(**text),
        vision_config=hf.Inkling2VisionConfig(**vision),
        image_token_id=IMAGE,
    )
    model = random(hf.Inkling2ForConditionalGeneration, config)

    def media(sizes):
        patches = sum(h * w for h, w in sizes)
        return {
            "pixel_values": pixels(patches, 8, 8, 3),
            "image_grid_thw": torch.tensor([[1, *size] for size in sizes]),
        }

    prompts = (3, [(2, 2)], 5), (2, [(2, 3), (3, 1)], 9), (6, [], 0)
    return model, of_images(model, media, lambda size: size[0] * size[1], *prompts)


def unlimited_ocr():
    text = {**TEXT, "num_key_value_heads": 4, "num_hidden_layers": 3, "moe_intermediate_size": 32, "sliding_window": 7}
    text |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    sam = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 64}
    sam |= {"image_size": 128, "patch_size": 16, "window_size": 2, "global_attn_indexes": [1]}
    sam |= {"downsample_channels": [24, 32], "initializer_range": 0.02}
    vision = {"sam_config": sam, "encoder_config": {**VISION, "image_size": 128, "patch_size": 64}}
    config = hf.UnlimitedOcrConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    model = random(hf.UnlimitedOcrForConditionalGeneration, config)

    def media(sizes):
        return {"pixel_values": pixels(len(sizes), 3, 128, 128)}

    return model, of_images(model, media, lambda size: 7, (3, [1], 5), (2, [1, 1], 9), (6, [], 0))


def blip2(model_class=hf.Blip2ForConditionalGeneration, text=None):
    opt = {"model_type": "opt", "vocab_size": 120, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2}
    opt |= {"num_attention_heads": 4, "word_embed_proj_dim": 64, "max_position_embeddings": 128, "pad_token_id": 0}
    former = {**VISION, "vocab_size": 60, "encoder_hidden_size": 32, "cross_attention_frequency": 1}
    config = model_class.config_class(
        vision_config=CLIP,
        qformer_config=former,
        text_config=opt if text is None else text,
        num_query_tokens=4,
        image_token_index=IMAGE,
    )
    model = random(model_class, config)

    def prompt(n):
        media = {"pixel_values": pixels(1, 3, 28, 28)}
        if model_class is hf.InstructBlipForConditionalGeneration:
            media |= {
                "qformer_input_ids": (10 + torch.arange(n))[None],
                "qformer_attention_mask": torch.ones(1, n).long(),
            }
        return encoded(model, torch.cat([torch.full((4,), IMAGE), words(n)]), media)

    return model, [prompt(8), prompt(12)]


def instructblip():
    return blip2(hf.InstructBlipForConditionalGeneration, {**TEXT, "model_type": "llama", "num_hidden_layers": 2})


def glmasr():
    hears = {**TOWER, "model_type": "glmasr_encoder", "num_attention_heads": 4, "num_mel_bins": 16, "head_dim": 8}
    text = {**SMALL, "model_type": "llama", "intermediate_size": 64, "num_key_value_heads": 2}
    config = hf.GlmAsrConfig(audio_config=hears, text_config=text, audio_token_id=IMAGE)

    model = random(hf.GlmAsrForConditionalGeneration, config)

    def prompt(frames, behind):
        media = {"input_features": pixels(1, 16, frames), "input_features_mask": torch.ones(1, frames).long()}
        return spliced(model, (frames + 1) // 8, behind, media, kind="audio")

    return model, [prompt(32, 4), prompt(48, 7), encoded(model, words(6))]


def fun_asr_nano():
    hears = {**TOWER, "num_hidden_layers": 3, "num_timestamp_prediction_layers": 1, "num_mel_bins": 8}
    hears |= {"num_stacked_frames": 2, "fsmn_kernel_size": 5, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    adaptor = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 8, "num_hidden_layers": 1}
    text = {**SMALL, "model_type": "qwen3", "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
    config = hf.FunAsrNanoConfig(
        audio_config=hears,
        adaptor_config={**adaptor, "projector_hidden_size": 48},
        text_config=text,
        audio_token_id=IMAGE,
    )

    model = random(hf.FunAsrNanoForConditionalGeneration, config)

    def prompt(frames, behind):
        media = {"input_features": pixels(1, frames, 16), "input_features_mask": torch.ones(1, frames).long()}
        return spliced(model, frames, behind, media, kind="audio")

    return model, [prompt(9, 4), prompt(14, 7), encoded(model, words(6))]


def minimax_m3_vl():
    text = {**SMALL, "intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4}
    text |= {"num_experts_per_tok": 2, "num_local_experts": 4, "dense_intermediate_size": 64}
    text |= {"shared_intermediate_size": 32, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4}
    text |= {"index_topk_blocks": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]}
    config = hf.MiniMaxM3VLConfig(
        vision_config={**TOWER, "image_size": 32, "patch_size": 4},
        text_config={**text, "mlp_layer_types": ["dense", "sparse"]},
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        projector_hidden_size=32,
    )

    model = random(hf.MiniMaxM3SparseForConditionalGeneration, config)

    def prompt(height, width, behind):
        grid = torch.tensor([[1, height, width]])
        media = {"pixel_values": pixels(height * width, 96), "image_grid_thw": grid}
        return spliced(model, height * width // 4, behind, media)

    return model, [prompt(4, 4, 4), prompt(4, 8, 9), encoded(model, words(6))]


def mistral_large4():
    text = {**SMALL, "intermediate_size": 64, "moe_intermediate_size": 32, "num_key_value_heads": 4}
    text |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    text |= {"qk_nope_head_dim": 8, "v_head_dim": 16, "index_topk": 8, "index_head_dim": 16}
    # With few index heads, many keys score 0, and `topk` breaks the ties
    text |= {"index_n_heads": 32, "max_position_embeddings": 256}
    vision = {**TOWER, "model_type": "pixtral", "patch_size": 4, "image_size": 32, "hidden_act": "silu"}
    config = hf.MistralLarge4Config(vision_config=vision, text_config=text, image_token_index=IMAGE)

    model = random(hf.MistralLarge4ForConditionalGeneration, config)

    def prompt(height, width, behind):
        media = {"pixel_values": pixels(1, 3, height, width), "image_sizes": torch.tensor([[height, width]])}
        return spliced(model, height * width // 64, behind, media)

    return model, [prompt(16, 16, 4), prompt(24, 16, 9), encoded(model, words(6))]


def molmo2(kind="image"):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    vision = {**TOWER, **heads, "image_size": [8, 8], "patch_size": 2, "num_position_embeddings": 16}
    adapter = {**heads, "vision_feature_layer": [-1, 0], "hidden_size": 32, "intermediate_size": 64}
    text = {**SMALL, "additional_vocab_size": 16, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
    config = hf.Molmo2Config(
        vision_config=vision,
        adapter_config={**adapter, "text_hidden_size": 32},
        text_config=text,
        image_patch_id=IMAGE,
        **{f"{name}_token_id": 11 + i for i, name in enumerate(("image_start", "image_end", "low_res_image_start"))},
    )
    # A crop has 4 x 4 patches, and one token per 2 x 2 of them
    windows = torch.arange(16).view(2, 2, 2, 2).permute(0, 2, 1, 3).reshape(4, 4)

    model = random(hf.Molmo2ForConditionalGeneration, config)

    def prompt(crops, behind):
        """Returns an image for each number of crops, or a video with as many frames."""
        total = sum(crops)
        places = torch.cat([windows + 16 * i for i in range(total)])
        places[-1, 0] = -1  # a padding patch
        values = pixels(total, 16, 12)
        if kind == "video":
            grids = torch.tensor([[total, 2, 2]])
            media = {"pixel_values_videos": values, "video_token_pooling": places, "video_grids": grids}
        else:
            grids = torch.tensor([[2, 2, 2 * (n - 1), 2] for n in crops])
            media = {"pixel_values": values, "image_token_pooling": places, "image_grids": grids}
            media["image_num_crops"] = torch.tensor(crops)
        return spliced(model, 4 * total, behind, media, kind, has_types=True)

    return model, [prompt([2], 4), prompt([3, 2], 7), encoded(model, words(6))]


FAMILIES: dict[str, Callable[[], tuple[hf.PreTrainedModel, list[EncodedPrompt]]]] = {
    "llama4": llama4,
    "minicpmv4_6": lambda: minicpm("MiniCPMV4_6"),
    "minicpmv4_7": lambda: minicpm("MiniCPMV4_7"),
    "minicpm_ocr": lambda: minicpm("MiniCPMOcr"),
    "mllama": mllama,
    "idefics": idefics,
    "nemotron_h_omni": nemotron_h_omni,
    "inkling2": inkling2,
    "unlimited_ocr": unlimited_ocr,
    "blip2": blip2,
    "instructblip": instructblip,
    "fun_asr_nano": fun_asr_nano,
    "glmasr": glmasr,
    "minimax_m3_vl": minimax_m3_vl,
    "mistral_large4": mistral_large4,
    "molmo2": molmo2,
    "molmo2 video": lambda: molmo2("video"),
}


def of_installed(build: Callable) -> Callable:
    """Skips the test of a family that a supported, older transformers doesn't have."""

    def built(*args):
        try:
            return build(*args)
        except (AttributeError, ValueError) as error:
            absent = re.match("module transformers has no attribute|Unrecognized model identifier", str(error))
            if absent is None or Version(hf.__version__) >= Version("5.23"):
                raise
            pytest.skip(str(error)[:100])

    return built


FAMILIES = {name: of_installed(build) for name, build in FAMILIES.items()}


# Reference values of the models


def own_logps(model, prompts, ids, mask):
    """Scores each completion alone with the model's plain forward pass, at the model's default positions."""
    logps = torch.zeros(ids.shape)
    for row, length in enumerate(mask.sum(1).tolist()):
        prompt, completion = prompts[row], ids[row, :length]
        # Extends cross-attention masks as `generate` does
        fields = {
            name: torch.cat([f, (f[-1:] if f.dim() > 1 else 0 * f[-1:]).expand(length, *f.shape[1:])])[None]
            for name, f in prompt.token_fields.items()
        }
        input_ids = torch.cat([prompt.input_ids, completion])[None]
        logits = model(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **fields, **prompt.media, use_cache=False
        ).logits[0, -length - 1 : -1]
        logps[row, :length] = logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0]
    return logps


def gradients(model, logps):
    weights = torch.randn(logps.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad(set_to_none=True)
    (logps * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
