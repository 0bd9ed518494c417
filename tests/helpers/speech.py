# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A tiny language model that writes codes of audio codecs, and such codecs, with random weights."""

import functools
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MimiConfig,
    MimiModel,
    PreTrainedTokenizerFast,
    Wav2Vec2BertConfig,
    Xcodec2Config,
    Xcodec2Model,
)


_WORDS = ("<pad>", "<unk>", "<end>", "say", "one", "two")
_FOLDER = tempfile.TemporaryDirectory()


def speech_tokenizer(n_codes: int = 64, special: bool = True) -> PreTrainedTokenizerFast:
    """`special` codes vanish from decoded texts, as Llasa's do."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    codes = [AddedToken(f"<|s_{code}|>", normalized=False, special=special) for code in range(n_codes)]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(codes)
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)


def speech_model(tokenizer: PreTrainedTokenizerFast, hidden_size: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden_size, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), bos_token_id=None, **sizes, **ids))
    model.generation_config = GenerationConfig(do_sample=True, **ids)
    return model


@functools.cache
def codec_folder(name: str = "xcodec2") -> str:
    """Returns the folder of a codec: Xcodec2 with one codebook of 64 codes, or Mimi with two of 32."""
    torch.manual_seed(0)
    if name == "xcodec2":
        semantic = Wav2Vec2BertConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, output_hidden_size=32,
            feature_projection_input_dim=160, codevector_dim=32,
        )  # fmt: skip
        config = Xcodec2Config(
            hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            head_dim=32, encoder_hidden_size=8, quantization_dim=96, quantization_levels=[4, 4, 4],
            semantic_model_config=semantic,
        )  # fmt: skip
        model = Xcodec2Model(config)
    else:
        config = MimiConfig(
            hidden_size=32, num_filters=4, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            head_dim=16, intermediate_size=64, codebook_size=32, codebook_dim=16, num_quantizers=2,
            vector_quantization_hidden_dimension=16, upsample_groups=32,
        )  # fmt: skip
        model = MimiModel(config)
        for codebook in [module for module in model.modules() if hasattr(module, "embed_sum")]:
            torch.nn.init.normal_(codebook.embed_sum)
    folder = Path(_FOLDER.name, name)
    model.save_pretrained(folder)
    return str(folder)


@functools.cache
def speaking_models() -> dict[str, str]:
    """Returns the folders of a model with Llasa's special tokens and of its codec, by their names on the Hub."""
    tokenizer = speech_tokenizer()
    names = ("TEXT_UNDERSTANDING_START", "TEXT_UNDERSTANDING_END", "SPEECH_GENERATION_START", "SPEECH_GENERATION_END")
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    folder = Path(_FOLDER.name, "llasa")
    speech_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"HKUSTAudio/Llasa-1B": str(folder), "HKUSTAudio/xcodec2-hf": codec_folder()}


def speech_rows(n: int = 4) -> Dataset:
    return Dataset.from_list([{"prompt": f"say {'one' if i % 2 else 'two'}", "number": i} for i in range(n)])
