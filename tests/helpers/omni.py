# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Omni models as they are released: a thinker, which trains, and speech modules, which don't."""

import json
import shutil
from pathlib import Path

import transformers as hf

from helpers.families import FAMILIES


OMNI = "qwen2_5_omni"
SPEAKER = {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}


def released(family: str) -> hf.PreTrainedModel:
    """Returns an omni model with speech modules around a thinker of the family."""
    thinker = FAMILIES[family].build()[0]
    if family == OMNI:
        model_class = hf.Qwen2_5OmniForConditionalGeneration
        config_class = hf.Qwen2_5OmniConfig
        small = {**SPEAKER, "hidden_size": 32, "head_dim": 16}
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
        encoder = {"channels": [8, 8, 8], "kernel_sizes": [3, 3, 3], "dilations": [1, 1, 1], "emb_dim": 8, "dim": 8}
        encoder |= {"attention_channels": 4, "se_channels": 4}
        dit = {**small, "ff_mult": 1, "emb_dim": 16, "num_embeds": 32, "mel_dim": 8}
        vocoder = {"mel_dim": 8, "upsample_initial_channel": 32, "upsample_rates": [2], "upsample_kernel_sizes": [4]}
        vocoder |= {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 1, 1]]}
        parts = {
            "talker_config": {**small, "vocab_size": 64, "embedding_size": 64, "rope_parameters": rope},
            "token2wav_config": {
                "dit_config": {**dit, **{f"enc_{name}": value for name, value in encoder.items()}},
                "bigvgan_config": vocoder,
            },
        }
    else:
        model_class = hf.Qwen3OmniMoeForConditionalGeneration
        config_class = hf.Qwen3OmniMoeConfig
        small = {**SPEAKER, "hidden_size": 32, "head_dim": 16, "vocab_size": 64}
        experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
        rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
        parts = {
            "talker_config": {
                "text_config": {**small, **experts, "shared_expert_intermediate_size": 16, "rope_parameters": rope},
                "code_predictor_config": {**small, "num_code_groups": 2},
                "thinker_hidden_size": 64,
                "num_code_groups": 2,
                "spatial_merge_size": 2,
            },
            "code2wav_config": {
                **SPEAKER,
                "hidden_size": 32,
                "codebook_size": 8,
                "decoder_dim": 32,
                "upsample_rates": [2],
                "upsampling_ratios": [2],
                "num_quantizers": 2,
            },
        }
    model = model_class(config_class(thinker_config=thinker.config.to_dict(), **parts)).float()
    model.thinker.load_state_dict(thinker.state_dict())
    return model


def save_released(family: str, source: str | Path, folder: str | Path) -> hf.PreTrainedModel:
    """Writes an omni model around the thinker of a family, with the processor in `source`. Returns the thinker."""
    folder = Path(shutil.copytree(source, folder))
    (folder / "model.safetensors").unlink()
    model = released(family)
    model.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    if family == OMNI:
        settings["architectures"] = ["Qwen2_5OmniModel"]  # transformers has no such class
    settings["thinker_config"]["text_config"]["tie_word_embeddings"] = False  # vLLM reads this setting
    (folder / "config.json").write_text(json.dumps(settings))
    assert settings["model_type"] == family and settings["talker_config"]
    return model.thinker
