# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Further tiny models with their real processors, made as those of `helpers.families`."""

import functools

import pytest
import transformers as hf

from .families import (
    FAMILIES,
    GLM_PIXELS,
    GLM_TEMPLATE,
    GLM_VISION,
    QWEN2_ROPE,
    SPECIAL,
    Family,
    clip_vision,
    decoder,
    glm4v_processor,
    glm_vision_ids,
    glm_words,
    image_prompts,
    image_video_prompts,
    instantiate,
    qwen_pixels,
    single_audio_prompts,
    template,
    tokenizer,
)


def mistral3():
    words = tokenizer(image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]")
    processor = hf.PixtralProcessor(
        hf.PixtralImageProcessor(size={"longest_edge": 56}, patch_size=14),
        words,
        patch_size=7,
        spatial_merge_size=2,
        chat_template=template(image="[IMG]"),
    )
    config = hf.Mistral3Config(
        vision_config={**clip_vision(image_size=56), "model_type": "pixtral"},
        text_config=decoder(words, model_type="mistral", head_dim=16, sliding_window=None),
        image_token_index=words.image_token_id,
        vision_feature_layer=-1,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    return instantiate(hf.Mistral3ForConditionalGeneration, config, processor)


def llama4():
    """One layer sees chunks of 16 tokens, the other scales its queries by their place, of which 8 count as one."""
    words = tokenizer(
        image_token="<|image|>",
        start_of_image_token="<|image_start|>",
        end_of_image_token="<|image_end|>",
        patch_token="<|patch|>",
        tile_x_separator_token="<|tile_x_separator|>",
        tile_y_separator_token="<|tile_y_separator|>",
    )
    processor = hf.Llama4Processor(
        hf.Llama4ImageProcessor(size={"height": 28, "width": 28}, max_patches=4),
        words,
        patch_size=7,
        chat_template=template(image="<|image|>"),
    )
    config = hf.Llama4Config(
        text_config=decoder(
            words,
            head_dim=16,
            intermediate_size_mlp=96,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            no_rope_layers=[1, 0],
            attention_chunk_size=16,
            floor_scale=8,
        ),
        vision_config=clip_vision(
            intermediate_size=128,
            vision_output_dim=64,
            projector_input_dim=64,
            projector_output_dim=64,
        ),
        boi_token_index=words.start_of_image_token_id,
        eoi_token_index=words.end_of_image_token_id,
        image_token_index=words.patch_token_id,
    )
    return instantiate(hf.Llama4ForConditionalGeneration, config, processor)


def idefics_tiles() -> dict[str, str]:
    return {
        f"row_{row}_col_{column}_token": f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)
    }


def idefics2():
    words = tokenizer(image_token="<image>", image_boundary_token="<fake_token_around_image>")
    words.add_special_tokens({"additional_special_tokens": ["<end_of_utterance>"]})  # which the processor adds
    processor = hf.Idefics2Processor(
        hf.Idefics2ImageProcessor(size={"shortest_edge": 28, "longest_edge": 56}),
        words,
        image_seq_len=4,
        chat_template=template(image="<image>"),
    )
    config = hf.Idefics2Config(
        vision_config=clip_vision(image_size=56),
        perceiver_config={
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 4,
            "resampler_head_dim": 16,
            "num_key_value_heads": 2,
        },
        text_config=decoder(words, model_type="mistral", head_dim=16),
        image_token_id=words.image_token_id,
    )
    return instantiate(hf.Idefics2ForConditionalGeneration, config, processor)


def smolvlm():
    pytest.importorskip("num2words", reason="which its processor wants")
    words = tokenizer(
        image_token="<image>",
        video_token="<video>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
        **idefics_tiles(),
    )
    sizes = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
    processor = hf.SmolVLMProcessor(
        hf.SmolVLMImageProcessor(**sizes),
        words,
        hf.SmolVLMVideoProcessor(**sizes),
        image_seq_len=4,
        chat_template=template(image="<image>", video="<video>"),
    )
    config = hf.SmolVLMConfig(
        vision_config=clip_vision(),
        text_config=decoder(words, model_type="llama"),
        image_token_id=words.image_token_id,
        scale_factor=2,
        pad_token_id=words.pad_token_id,
    )
    return instantiate(hf.SmolVLMForConditionalGeneration, config, processor)


def glm4v_moe():
    processor = glm4v_processor()
    words = processor.tokenizer
    config = hf.Glm4vMoeConfig(
        text_config=decoder(
            words,
            head_dim=16,
            rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2]},
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        ),
        vision_config=GLM_VISION,
        **glm_vision_ids(words),
    )
    return instantiate(hf.Glm4vMoeForConditionalGeneration, config, processor)


def glm46v():
    words = glm_words()
    processor = hf.Glm46VProcessor(
        hf.Glm46VImageProcessor(size=GLM_PIXELS),
        words,
        hf.Glm46VVideoProcessor(size=GLM_PIXELS, do_sample_frames=False),
        chat_template=template(**GLM_TEMPLATE),
    )
    config = hf.Glm46VConfig(
        text_config=decoder(
            words, model_type="glm4v_text", rope_parameters={**QWEN2_ROPE, "partial_rotary_factor": 1.0}
        ),
        vision_config={**GLM_VISION, "model_type": "glm4v_vision"},
        **glm_vision_ids(words),
    )
    return instantiate(hf.Glm46VForConditionalGeneration, config, processor)


def ovis2():
    words = tokenizer(
        image_token="<image>",
        atom_token="<IMG_ATOM>",
        start_token="<IMG_START>",
        grid_token="<IMG_GRID>",
        column_token="<IMG_COL>",
        row_token="<IMG_ROW>",
        end_token="<IMG_END>",
    )
    processor = hf.Ovis2Processor(
        hf.Ovis2ImageProcessor(size={"height": 28, "width": 28}, crop_to_patches=True, max_patches=4),
        words,
        image_seq_length=4,
        chat_template=template(image="<image>"),
    )
    config = hf.Ovis2Config(
        vision_config=clip_vision(vocab_size=32, hidden_stride=2),
        text_config=decoder(words, model_type="qwen2"),
        image_token_id=words.atom_token_id,
        visual_indicator_token_ids=words.convert_tokens_to_ids(
            ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
        ),
        vocab_size=len(words),
        hidden_size=64,
    )
    return instantiate(hf.Ovis2ForConditionalGeneration, config, processor)


def kimi_k25():
    words = tokenizer(
        image_token="<|media_pad|>",
        video_token="<|kimi_k25_video_placeholder|>",
        begin_token="<|media_begin|>",
        content_token="<|media_content|>",
        end_token="<|media_end|>",
    )
    processor = hf.Kimi_K25Processor(
        hf.Kimi_K25ImageProcessor(),
        words,
        hf.Kimi_K25VideoProcessor(do_sample_frames=False),
        chat_template=template(
            image="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
            video="<|kimi_k25_video_placeholder|>",
        ),
    )
    config = hf.Kimi_K25Config(
        text_config=decoder(
            words,
            model_type="deepseek_v3",
            num_key_value_heads=4,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        ),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
        },
        projection_hidden_size=32,
        image_token_id=words.image_token_id,
        video_token_id=words.video_token_id,
        vision_start_token_id=words.begin_token_id,
        vision_end_token_id=words.end_token_id,
        tie_word_embeddings=False,
    )
    return instantiate(hf.Kimi_K25ForConditionalGeneration, config, processor)


def musicflamingo():
    words = tokenizer(audio_token="<sound>", audio_bos_token="<|sound_bos|>", audio_eos_token="<|sound_eos|>")
    processor = hf.MusicFlamingoProcessor(
        hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1), words, chat_template=template(audio="<sound>")
    )
    config = hf.MusicFlamingoConfig(
        audio_config={
            "model_type": "audioflamingo3_encoder",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "num_mel_bins": 16,
            "max_source_positions": 50,
        },
        text_config=decoder(words, model_type="qwen2"),
        audio_token_id=words.audio_token_id,
        audio_bos_token_id=words.audio_bos_token_id,
        audio_eos_token_id=words.audio_eos_token_id,
    )
    return instantiate(hf.MusicFlamingoForConditionalGeneration, config, processor)


def glmasr():
    words = tokenizer(audio_token="<|pad|>", audio_bos_token="<|begin_of_audio|>", audio_eos_token="<|end_of_audio|>")
    processor = hf.GlmAsrProcessor(
        hf.WhisperFeatureExtractor(feature_size=16, chunk_length=2),  # its 100 frames are 25 tokens
        words,
        chat_template=template(audio="<|begin_of_audio|><|pad|><|end_of_audio|>"),
    )
    config = hf.GlmAsrConfig(
        audio_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "num_mel_bins": 16,
        },
        text_config=decoder(words, model_type="llama"),
        audio_token_id=words.audio_token_id,
    )
    return instantiate(hf.GlmAsrForConditionalGeneration, config, processor)


def minicpmv4_6():
    words = tokenizer(
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        image_start_token="<image>",
        image_end_token="</image>",
        slice_start_token="<slice>",
        slice_end_token="</slice>",
        image_id_start_token="<image_id>",
        image_id_end_token="</image_id>",
    )
    sizes = {"scale_resolution": 112, "max_slice_nums": 2, "patch_size": 14}
    processor = hf.MiniCPMV4_6Processor(
        image_processor=hf.MiniCPMV4_6ImageProcessor(**sizes),
        video_processor=hf.MiniCPMV4_6VideoProcessor(**sizes, do_sample_frames=False),
        tokenizer=words,
        chat_template=template(image="<|image_pad|>", video="<|video_pad|>"),
    )
    config = hf.MiniCPMV4_6Config(
        text_config=decoder(
            words,
            model_type="qwen3_5_text",
            head_dim=32,
            layer_types=["linear_attention", "full_attention"],
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
        ),
        vision_config=clip_vision(image_size=112, patch_size=14),
        insert_layer_id=0,
        image_token_id=words.image_token_id,
        video_token_id=words.video_token_id,
    )
    return instantiate(hf.MiniCPMV4_6ForConditionalGeneration, config, processor)


def deepseek_vl():
    words = tokenizer(image_token="<image_placeholder>")
    processor = hf.DeepseekVLProcessor(
        hf.DeepseekVLImageProcessor(size={"height": 28, "width": 28}),
        words,
        num_image_tokens=16,
        chat_template=template(image="<image_placeholder>"),
    )
    config = hf.DeepseekVLConfig(
        vision_config=clip_vision(model_type="siglip_vision_model", vision_use_head=False),
        text_config=decoder(words, model_type="llama"),
        image_token_id=words.image_token_id,
        tie_word_embeddings=False,
    )
    return instantiate(hf.DeepseekVLForConditionalGeneration, config, processor)


def deepseek_vl_hybrid():
    words = tokenizer(image_token="<image_placeholder>")
    processor = hf.DeepseekVLHybridProcessor(
        hf.DeepseekVLHybridImageProcessor(size={"height": 28, "width": 28}, high_res_size={"height": 56, "width": 56}),
        words,
        num_image_tokens=16,
        chat_template=template(image="<image_placeholder>"),
    )
    config = hf.DeepseekVLHybridConfig(
        vision_config=clip_vision(model_type="siglip_vision_model", vision_use_head=False),
        high_res_vision_config={
            "model_type": "sam_vision_model",
            "hidden_size": 32,
            "output_channels": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 56,
            "patch_size": 7,
            "window_size": 4,
            "global_attn_indexes": [1],
            "mlp_dim": 64,
            "initializer_range": 0.02,
        },
        text_config=decoder(words, model_type="llama"),
        image_token_id=words.image_token_id,
        tie_word_embeddings=False,
    )
    return instantiate(hf.DeepseekVLHybridForConditionalGeneration, config, processor)


def ernie4_5_vl_moe():
    words = tokenizer(
        image_token="<|IMAGE_PLACEHOLDER|>",
        image_start_token="<|IMAGE_START|>",
        image_end_token="<|IMAGE_END|>",
        video_token="<|VIDEO_PLACEHOLDER|>",
        video_start_token="<|VIDEO_START|>",
        video_end_token="<|VIDEO_END|>",
    )
    processor = hf.Ernie4_5_VLMoeProcessor(
        hf.Ernie4_5_VLMoeImageProcessor(size=qwen_pixels(28)),
        words,
        # its font for times is a file of the checkpoint
        hf.Ernie4_5_VLMoeVideoProcessor(size=qwen_pixels(28), do_sample_frames=False, draw_on_frames=False),
        chat_template=template(
            image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
            video="<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>",
        ),
    )
    config = hf.Ernie4_5_VLMoeConfig(
        text_config=decoder(
            words,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]},
            moe_num_experts=4,
            moe_k=2,
            moe_num_shared_experts=1,
            moe_intermediate_size=[32, 32],
        ),
        vision_config={"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4},
        image_start_token_id=words.image_start_token_id,
        image_end_token_id=words.image_end_token_id,
        image_token_id=words.image_token_id,
        video_start_token_id=words.video_start_token_id,
        video_end_token_id=words.video_end_token_id,
        video_token_id=words.video_token_id,
        tie_word_embeddings=False,
    )
    return instantiate(hf.Ernie4_5_VLMoeForConditionalGeneration, config, processor)


def image_or_video_prompts() -> list[list[dict]]:
    return image_video_prompts()[:4]


GLM_NOTE = "No prompt has both an image and a video: they share a token, and the model then miscounts."

MORE_FAMILIES = {
    family.name: family
    for family in [
        Family("mistral3", mistral3, image_prompts, ("image",)),
        Family("llama4", llama4, image_prompts, ("image",)),
        Family("idefics2", idefics2, image_prompts, ("image",)),
        Family(
            "smolvlm",
            smolvlm,
            image_or_video_prompts,
            ("image", "video"),
            "No prompt has both an image and a video: the processor returns both by one name.",
        ),
        Family("glm4v_moe", glm4v_moe, image_or_video_prompts, ("image", "video"), GLM_NOTE),
        Family("glm46v", glm46v, image_or_video_prompts, ("image", "video"), GLM_NOTE),
        Family("ovis2", ovis2, image_prompts, ("image",)),
        Family(
            "kimi_k25",
            kimi_k25,
            image_prompts,
            ("image",),
            "No video: the model's forward fails on any that it pools over time.",
        ),
        Family("musicflamingo", musicflamingo, single_audio_prompts, ("audio",)),
        Family("glmasr", glmasr, functools.partial(single_audio_prompts, 2.6), ("audio",)),
        Family("minicpmv4_6", minicpmv4_6, image_video_prompts, ("image", "video")),
        Family("deepseek_vl", deepseek_vl, image_prompts, ("image",)),
        Family("deepseek_vl_hybrid", deepseek_vl_hybrid, image_prompts, ("image",)),
        Family("ernie4_5_vl_moe", ernie4_5_vl_moe, image_video_prompts, ("image", "video")),
    ]
}

ALL_FAMILIES = {**FAMILIES, **SPECIAL, **MORE_FAMILIES}
