# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Stand-ins for the models and datasets of the Hub that TRL's tests load: tiny random models of the same classes, in the
folders of a Hub cache, and the rows that the checkout's own scripts write.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers as hf
import trl
from datasets import Dataset, DatasetDict, load_from_disk
from helpers import families


ORGANIZATION = "trl-internal-testing"
_REVISION = "0" * 40
_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
_VOCABULARY = 3000  # tokens are about as long as those of the real models, whose lengths TRL's tests assume

# Dataset by the script that writes it
_DATASETS = {
    "zen": "generate_zen_dataset",
    "zen-image": "generate_zen_image_dataset",
    "zen-multi-image": "generate_zen_multi_image_dataset",
    "toolcall": "generate_toolcall_dataset",
    "harmony": "generate_harmony_dataset",
}

# Settings of text models beyond those of `families.decoder`
_MOE = {**families.EXPERTS, "norm_topk_prob": True}
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8}
_LATENT |= {"qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_NEMOTRON = {"layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 4}
_NEMOTRON |= {"mamba_n_groups": 1, "ssm_state_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
_NEMOTRON |= {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "use_mamba_kernels": False}
_GPT_OSS = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

# Text models by name after `tiny-`: class, chat template, first and last special token, and settings
_TEXT_MODELS: dict[str, tuple[type, str | None, tuple[str, ...], dict[str, Any]]] = {
    "Qwen2ForCausalLM-2.5": (hf.Qwen2ForCausalLM, "qwen2_5", (), {}),
    "Qwen3ForCausalLM": (hf.Qwen3ForCausalLM, "qwen3", (), {"head_dim": 16}),
    "Qwen3MoeForCausalLM": (hf.Qwen3MoeForCausalLM, "qwen3", (), {"head_dim": 16, **_MOE}),
    "GptOssForCausalLM": (hf.GptOssForCausalLM, "gptoss", _HARMONY, _GPT_OSS),
    "LlamaForCausalLM-3": (hf.LlamaForCausalLM, "llama3", _LLAMA, {}),
    "LlamaForCausalLM-3.1": (hf.LlamaForCausalLM, "llama3_1", _LLAMA, {}),
    "LlamaForCausalLM-3.2": (hf.LlamaForCausalLM, "llama3_2", _LLAMA, {}),
    "MistralForCausalLM-0.1": (hf.MistralForCausalLM, None, ("<s>", "</s>"), {"head_dim": 16}),
    "MistralForCausalLM-0.2": (hf.MistralForCausalLM, None, ("<s>", "</s>"), {"head_dim": 16}),
    "GPTNeoXForCausalLM": (hf.GPTNeoXForCausalLM, None, ("<|endoftext|>", "<|endoftext|>"), {}),
    "Cohere2ForCausalLM": (hf.Cohere2ForCausalLM, "cohere2", (), {"head_dim": 16, "logit_scale": 1.0}),
    "CohereForCausalLM": (hf.CohereForCausalLM, "cohere", (), {"head_dim": 16, "logit_scale": 1.0}),
    "Gemma2ForCausalLM": (hf.Gemma2ForCausalLM, "gemma", ("<bos>", "<eos>"), {"head_dim": 16}),
    "GemmaForCausalLM": (hf.GemmaForCausalLM, "gemma", ("<bos>", "<eos>"), {"head_dim": 16}),
    "Glm4MoeForCausalLM": (hf.Glm4MoeForCausalLM, "glm4moe", (), {"head_dim": 16, **families.ROUTED_EXPERTS}),
    "Lfm2ForCausalLM": (hf.Lfm2ForCausalLM, "lfm2", (), {"full_attn_idxs": [1], "block_multiple_of": 8}),
    "Lfm2ForCausalLM-2.5": (hf.Lfm2ForCausalLM, "lfm2_2_5", (), {"full_attn_idxs": [1], "block_multiple_of": 8}),
    "NemotronHForCausalLM-nano": (hf.NemotronHForCausalLM, "nemotron_3_nano", (), _NEMOTRON),
    "Olmo3ForCausalLM": (hf.Olmo3ForCausalLM, "qwen2_5", (), {}),
    "Phi3ForCausalLM": (hf.Phi3ForCausalLM, "phi3", (), {}),
    "DeepseekV3ForCausalLM": (hf.DeepseekV3ForCausalLM, "deepseekv3", (), {**_LATENT, **families.ROUTED_EXPERTS}),
    "DeepseekV3ForCausalLM-0528": (hf.DeepseekV3ForCausalLM, "deepseekv3", (), {**_LATENT, **families.ROUTED_EXPERTS}),
    "Qwen2ForSequenceClassification-2.5": (hf.Qwen2ForSequenceClassification, "qwen2_5", (), {"num_labels": 1}),
    "Qwen3ForSequenceClassification": (
        hf.Qwen3ForSequenceClassification,
        "qwen3",
        (),
        {"num_labels": 1, "head_dim": 16},
    ),
    "LlamaForSequenceClassification-3.2": (
        hf.LlamaForSequenceClassification,
        "llama3_2",
        _LLAMA,
        {"num_labels": 1},
    ),
    "Qwen3MoeForSequenceClassification": (
        hf.Qwen3MoeForSequenceClassification,
        "qwen3",
        (),
        {"num_labels": 1, "head_dim": 16, **_MOE},
    ),
}

_LLAVA_NEXT_TILES = {"image_grid_pinpoints": families.TILES}


def _llava_next():
    images = hf.LlavaNextImageProcessor(**families.CROP, **_LLAVA_NEXT_TILES)
    return families.of_llava("LlavaNext", images, {"model_type": "llama"}, **_LLAVA_NEXT_TILES)


def _gemma4():
    """Without the audio encoder, as in TRL's stand-in."""
    model, processor = families.gemma4()
    model.config.audio_config = None
    return families.instantiate(type(model), model.config, processor)


# Models with images by name after `tiny-`: builder, and chat template, if not the builder's
_IMAGE_MODELS: dict[str, tuple[Callable, str | None]] = {
    "Qwen2VLForConditionalGeneration": (families.qwen2_vl, "qwen2_5_vl"),
    "Qwen2_5_VLForConditionalGeneration": (families.qwen2_5_vl, "qwen2_5_vl"),
    "Qwen3VLForConditionalGeneration": (families.qwen3_vl, "qwen3_vl"),
    "Qwen3_5ForConditionalGeneration-NoThink": (families.qwen3_5, "qwen3_5_nothink"),
    "Qwen3_5MoeForConditionalGeneration-3.6": (families.qwen3_5_moe, "qwen3_6"),
    "Gemma3ForConditionalGeneration": (families.gemma3, None),
    "Gemma4ForConditionalGeneration": (_gemma4, None),
    "LlavaForConditionalGeneration": (families.llava, None),
    "LlavaNextForConditionalGeneration": (_llava_next, None),
    "Idefics2ForConditionalGeneration": (families.idefics2, None),
    "Idefics3ForConditionalGeneration": (families.idefics3, None),
    "SmolVLMForConditionalGeneration": (families.smolvlm, None),
}


def make_stand_ins(checkout: Path, cache: Path) -> None:
    """Writes all stand-ins into `cache`: models as `huggingface_hub` caches them, and datasets by name and config."""
    if (cache / "complete").exists():
        return
    torch.manual_seed(0)
    np.random.seed(0)
    texts = _make_datasets(checkout, cache)
    for name, (model_class, chat_template, special, settings) in _TEXT_MODELS.items():
        words = _tokenizer(texts, special)
        words.chat_template = chat_template and _template(chat_template)
        config = model_class.config_class(**families.decoder(words, **settings))
        model, _ = families.instantiate(model_class, config, SimpleNamespace(tokenizer=words), scale=2.0)
        _save(cache, f"{ORGANIZATION}/tiny-{name}", model.bfloat16(), words)
        if name == "Qwen3ForCausalLM":  # of which tests take the chat template
            _save(cache, "Qwen/Qwen3-4B", model, words)
    for name, (builder, chat_template) in _IMAGE_MODELS.items():
        model, processor = builder()
        if chat_template is not None:
            processor.chat_template = _template(chat_template)
        processor.tokenizer.padding_side = "right"
        _save(cache, f"{ORGANIZATION}/tiny-{name}", model.bfloat16(), processor)
    _make_remote_model(checkout, cache, texts)
    (cache / "complete").touch()


def stand_in(cache: Path, name: str, config: str | None) -> DatasetDict:
    """Returns the stand-in of a dataset. Raises `FileNotFoundError` for other datasets."""
    dataset = load_from_disk(str(cache / "datasets" / name.removeprefix(f"{ORGANIZATION}/") / (config or "default")))
    assert isinstance(dataset, DatasetDict)
    return dataset


def _template(name: str) -> str:
    return (_TEMPLATES / f"{name}.jinja").read_text()


def _make_datasets(checkout: Path, cache: Path) -> list[str]:
    """Saves the rows that the checkout's scripts push to the Hub, and returns texts like theirs."""
    texts: list[str] = []
    for name, script in _DATASETS.items():
        folder = cache / "datasets" / name

        def save(rows: DatasetDict, repo_id: str, config_name: str = "default", folder: Path = folder) -> None:
            if "tools" in rows["train"].column_names:  # the Hub has JSON
                columns = {split: [json.dumps(tools) for tools in part["tools"]] for split, part in rows.items()}
                parts = {split: part.remove_columns("tools") for split, part in rows.items()}
                rows = DatasetDict({key: part.add_column("tools", columns[key]) for key, part in parts.items()})
            rows.save_to_disk(str(folder / config_name))

        with mock.patch.object(DatasetDict, "push_to_hub", save):
            _module(checkout, f"scripts.{script}").main(0.1, True, f"{ORGANIZATION}/{name}")
    for split in stand_in(cache, "zen", "standard_language_modeling").values():
        texts += split["text"]
    chats = stand_in(cache, "zen", "conversational_language_modeling")["train"]
    texts += [message["content"] for messages in chats["messages"] for message in messages]
    # Tools and their calls, and what templates write around them
    texts += [json.dumps(row) for row in stand_in(cache, "toolcall", "preference")["train"]] * 3
    texts += [_template(name) for name in ("qwen2_5", "qwen3", "gptoss", "llama3_2")] * 3
    # A chat dataset that a test of the quality of training reads
    DatasetDict({"train": Dataset.from_list([{"messages": messages} for messages in chats["messages"]])}).save_to_disk(
        str(cache / "datasets" / "dolly-chatml-sft" / "default")
    )
    return texts


def _module(checkout: Path, name: str) -> ModuleType:
    """Imports a module of the checkout, whose folder `trl` mustn't hide the installed package."""
    sys.path.append(str(checkout))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(checkout))


def _tokenizer(texts: list[str], special: tuple[str, ...]) -> hf.PreTrainedTokenizerFast:
    """Returns a tokenizer trained on texts. The first and the last special token begin and end a text."""
    named = {f"special_{i}_token": token for i, token in enumerate(special)}
    words = families.tokenizer(**named).train_new_from_iterator(texts * 4, _VOCABULARY, show_progress=False)
    words.padding_side = "right"
    if special:
        ends = {"<|eot_id|>": "<|eot_id|>", "<|return|>": "<|return|>", "<|call|>": "<|return|>"}
        words.bos_token = special[0]
        words.eos_token = ends.get(special[-1], special[-1])
    return words


def _save(cache: Path, name: str, model: Any, processor: Any) -> Path:
    """Saves a model and its processor as the only snapshot of a repository in a Hub cache."""
    repository = cache / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / _REVISION
    model.config._name_or_path = name
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(_REVISION)
    return folder


def _make_remote_model(checkout: Path, cache: Path, texts: list[str]) -> None:
    """Saves the model whose code is in its repository, with TRL's code."""
    package = "scripts.generate_tiny_models.for_causal_lm._remote_code"
    configuration, modeling = (_module(checkout, f"{package}.{part}_remote") for part in ("configuration", "modeling"))
    configuration.RemoteConfig.register_for_auto_class()
    modeling.RemoteModel.register_for_auto_class("AutoModel")
    for suffix in ("ForCausalLM", "ForSequenceClassification"):
        getattr(modeling, f"Remote{suffix}").register_for_auto_class(f"AutoModel{suffix}")
    words = _tokenizer(texts, _LLAMA)
    words.chat_template = _template("llama3_2")
    config = configuration.RemoteConfig(**families.decoder(words))
    config.auto_map = {
        "AutoModel": "modeling_remote.RemoteModel",
        "AutoModelForSequenceClassification": "modeling_remote.RemoteForSequenceClassification",
    }
    model, _ = families.instantiate(modeling.RemoteForCausalLM, config, SimpleNamespace(tokenizer=words), scale=2.0)
    _save(cache, f"{ORGANIZATION}/tiny-RemoteForCausalLM", model.bfloat16(), words)
