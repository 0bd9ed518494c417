# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tiny random models without processors, and their prompts: random tensors, with media of several sizes or without."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import transformers as hf
from families_report.measure import plain_logits
from families_report.tiny_media import Medium, encode
from families_report.tiny_models import tiny_model
from packaging.version import Version

from trl_multimodal_rft.cli.families import classes_with_media
from trl_multimodal_rft.encoding.prompts import EncodedPrompt


def build(model_type: str, chats: list[list[Medium]], **changes) -> tuple[hf.PreTrainedModel, list[EncodedPrompt]]:
    """Returns a model with `changes` of its config, and a prompt per chat. A chat lists modality and size of media."""
    class_name = classes_with_media().get(model_type)
    if class_name is None and Version(hf.__version__) < Version("5.24"):
        pytest.skip(f"this transformers has no {model_type}")
    model = tiny_model(getattr(hf, class_name), changes)
    model.generation_config = hf.GenerationConfig(pad_token_id=0)
    try:
        return model, [encode(model, media, seed) for seed, media in enumerate(chats)]
    except (RuntimeError, TypeError) as error:
        if Version(hf.__version__) >= Version("5.23"):
            raise
        pytest.skip(f"transformers {hf.__version__} encodes no media of {model_type}: {error}")


def of(kind: str) -> list[list[Medium]]:
    """Returns three chats: with one medium of size 0, with two of sizes 1 and 0, and without media."""
    return [[(kind, 0)], [(kind, 1), (kind, 0)], []]


IMAGES = ("minicpmv4_7", "mllama", "idefics", "nemotron_h_omni", "inkling2", "unlimited_ocr")
IMAGES += ("minimax_m3_vl", "mistral_large4", "hy_v4_vl", "inkling2_loop", "exaone4_5")

FAMILIES: dict[str, Callable[..., tuple[hf.PreTrainedModel, list[EncodedPrompt]]]] = {
    **{name: partial(build, name, of("image")) for name in IMAGES},
    **{name: partial(build, name, of("audio")) for name in ("fun_asr_nano", "glmasr")},
    **{name: partial(build, name, of("image")[:2]) for name in ("blip-2", "instructblip")},  # prompts need images
    # The scale of queries grows within a prompt
    "llama4": partial(build, "llama4", of("image"), text_config={"floor_scale": 4}),
    "minicpm_ocr": partial(build, "minicpm_ocr", of("image"), downsample_mode="16x"),
    "minicpmv4_6": partial(build, "minicpmv4_6", [*of("image"), of("video")[1]]),
    **{
        name: partial(build, "molmo2", of(kind), text_config={"pad_token_id": 0})
        for name, kind in (("molmo2", "image"), ("molmo2 video", "video"))
    },
}


# Reference values of the models


def own_logps(model, prompts, ids, mask, temperature=1.0):
    """Returns log-probabilities `(B, C)` by plain forward passes of single completions, at the model's positions."""
    logps = torch.zeros(ids.shape)
    for row, length in enumerate(mask.sum(1).tolist()):
        completion = ids[row, :length]
        if length:
            scores = (plain_logits(model, prompts[row], completion) / temperature).log_softmax(-1)
            logps[row, :length] = scores.gather(-1, completion[:, None])[:, 0]
    return logps
