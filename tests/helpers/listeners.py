# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tiny models that listen: a Whisper and a model of speakers, with random weights."""

import functools
import tempfile
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    Wav2Vec2FeatureExtractor,
    WavLMConfig,
    WavLMForXVector,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)


_FOLDER = tempfile.TemporaryDirectory()
_LETTERS = ("<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ġone", "Ġtwo")
_CONTROLS = ["startoftranscript", "en", "transcribe", "translate", "startofprev", "nocaptions", "notimestamps"]


@functools.cache
def whisper_folder() -> str:
    end = "<|endoftext|>"
    vocabulary = {letters: i for i, letters in enumerate(_LETTERS)}
    tokenizer = WhisperTokenizer(
        vocab=vocabulary, merges=[], unk_token=end, bos_token=end, eos_token=end, pad_token=end
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in _CONTROLS]})
    start = tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    ids = {"decoder_start_token_id": start, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=len(tokenizer), num_mel_bins=16, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_source_positions=100, max_target_positions=32, init_std=0.5, **ids,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    no_times = tokenizer.convert_tokens_to_ids("<|notimestamps|>")
    model.generation_config = GenerationConfig(max_length=12, no_timestamps_token_id=no_times, **ids)
    folder = Path(_FOLDER.name, "whisper")
    model.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    return str(folder)


@functools.cache
def speaker_folder() -> str:
    torch.manual_seed(0)
    config = WavLMConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(16, 16),
        conv_stride=(5, 8), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, tdnn_dim=(16, 16), tdnn_kernel=(5, 1), tdnn_dilation=(1, 1),
        xvector_output_dim=16,
    )  # fmt: skip
    folder = Path(_FOLDER.name, "speakers")
    WavLMForXVector(config).save_pretrained(folder)
    Wav2Vec2FeatureExtractor().save_pretrained(folder)
    return str(folder)
