# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Synthetic prompts of a given length with media, built with a model's processor or from its config alone."""

import argparse
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from ..data.reading.refs import MediaRef
from ..data.reading.rules import MediaRules
from ..encoding.media import budgeted_size
from ..encoding.processors import Processor, audio_rate, load_processor
from ..encoding.prompts import EncodedPrompt, encode_prompt
from ..families import family_of


# Image encoder inputs by name, for a model without a processor. Its prompts have no placeholders, and their length
# includes the tokens of the images.
EncoderInputs = dict[str, torch.Tensor]


def encoder_outputs(model: PreTrainedModel, inputs: EncoderInputs, n_prompts: int) -> Iterator[torch.Tensor]:
    """Yields the image encoder's outputs for `n_prompts` copies of the inputs, and nothing without inputs."""
    if inputs:
        encode: Any = getattr(model, "get_image_features", None)
        batch = {
            name: torch.cat([value] * n_prompts).to(model.dtype if value.is_floating_point() else value.dtype)
            for name, value in inputs.items()
        }
        yield from _tensors(encode(**batch))


def _tensors(output: ModelOutput | torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(output, ModelOutput):
        pooled = getattr(output, "pooler_output", None)
        output = output["last_hidden_state"] if pooled is None else pooled
    return [output] if isinstance(output, torch.Tensor) else [*chain.from_iterable(map(_tensors, output))]


def synthetic_prompt(model: PreTrainedModel, args: argparse.Namespace) -> tuple[EncodedPrompt, EncoderInputs]:
    """Returns a prompt with the length and media in `args`, and encoder inputs if the model has no processor."""
    has_vision, has_audio = (modality in model.input_modalities for modality in ("image", "audio"))
    n_images = int(has_vision) if args.images is None else args.images
    seconds = (30.0 if has_audio and not has_vision else 0.0) if args.audio_seconds is None else args.audio_seconds
    if n_images and not has_vision or seconds and not has_audio:
        option = "audio_seconds" if seconds and not has_audio else "images"
        raise ValueError(
            f"`--{option}` has no effect on {type(model).__name__}, which takes only "
            f"{' and '.join(model.input_modalities)}; leave it out."
        )
    no_tokens = EncodedPrompt(torch.zeros(0, dtype=torch.long), {}, {}, torch.full((1, 0), -1))
    prompt = no_tokens
    encoder_inputs = EncoderInputs()
    if n_images or seconds:
        processor = None
        limits = {name: getattr(args, name) for name in ("min_pixels", "max_pixels")}
        with suppress(OSError, ValueError):  # a model without a processor
            processor = None if Path(args.model_name_or_path).is_file() else load_processor(args.model_name_or_path)
        if processor is None:
            pixel_limits = {name: limit for name, limit in limits.items() if limit is not None}
            side, _ = budgeted_size(args.image_size, args.image_size, pixel_limits)
            # Without images, this raises an error, as a config doesn't say what an audio encoder takes
            encoder_inputs = _inputs_from_config(model, 0 if seconds else n_images, side)
        else:
            prompt = _encode_media(model, processor, n_images, args.image_size, seconds, MediaRules(**limits))
    return _pad_to_length(prompt, args.prompt_tokens, family_of(model).token_field_fill), encoder_inputs


def _encode_media(
    model: PreTrainedModel, processor: Processor, n_images: int, side: int, seconds: float, rules: MediaRules
) -> EncodedPrompt:
    """The images are square with `side` pixels, and the sound is silent."""
    blocks = []
    for i in range(n_images):
        # Random pixels, because some models need fewer tokens for uniform images
        pixels = np.random.default_rng(i).integers(0, 256, (side, side, 3), dtype=np.uint8)
        ref = MediaRef("image", PIL.Image.fromarray(pixels), {}, "image", 0, rules)
        blocks.append({"type": "image", "image": ref})
    if seconds:
        rate = audio_rate(processor) or 0
        sound = {"array": np.zeros(int(seconds * rate), dtype=np.float32), "sampling_rate": rate}
        blocks.append({"type": "audio", "audio": MediaRef("audio", sound, {}, "audio", 0)})
    return encode_prompt([{"role": "user", "content": [*blocks, {"type": "text", "text": "?"}]}], processor, model)


def _pad_to_length(prompt: EncodedPrompt, length: int, fill: Mapping[str, int]) -> EncodedPrompt:
    n_added = max(length - len(prompt), 0)
    # New tokens are text, whose positions continue the largest position
    last = prompt.position_ids.amax(-1, keepdim=True) if len(prompt) else prompt.position_ids.new_full((1, 1), -1)
    return replace(
        prompt,
        input_ids=F.pad(prompt.input_ids, (0, n_added)),
        token_fields={
            name: F.pad(value, (0, n_added), value=fill.get(name, 0)) for name, value in prompt.token_fields.items()
        },
        position_ids=torch.cat([prompt.position_ids, last + 1 + torch.arange(n_added)], dim=-1),
        mask_cache={},
    )


def _inputs_from_config(model: PreTrainedModel, n_images: int, image_side: int) -> EncoderInputs:
    """Builds image encoder inputs from a config. Raises `RuntimeError` unless images are rows of patches (Qwen-VL)."""
    encode: Any = getattr(model, "get_image_features", None)
    if not n_images or "image_grid_thw" not in inspect.signature(encode).parameters:
        raise RuntimeError("its config doesn't say what its encoders take, and there is no processor")
    vision = model.config.vision_config
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    # `side`: patches along an image's edge, a multiple of the merge size. `width`: values of a patch.
    side = max(round(image_side / (vision.patch_size * vision.spatial_merge_size)), 1) * vision.spatial_merge_size
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "pixel_values": torch.zeros(n_images * side * side, width),
        "image_grid_thw": torch.tensor([[1, side, side]] * n_images),
    }
