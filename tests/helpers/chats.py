# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Synthetic chats with images, videos and sounds."""

import base64
import io
from functools import partial

import numpy as np
import soundfile
from PIL import Image


RATE = 16000  # Hz; the rate of every audio family

# Content blocks


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def mosaic(frames: int, height: int, width: int, seed: int) -> np.ndarray:
    """
    Returns frames `(frames, height, width, 3)` with random colours in blocks of 14 x 14 pixels. Patches of white noise
    would all look alike to a tower.
    """
    rows = -(-height // 14)
    columns = -(-width // 14)
    colours = np.random.default_rng(seed).integers(0, 256, (frames, rows, columns, 3), dtype=np.uint8)
    return colours.repeat(14, axis=1).repeat(14, axis=2)[:, :height, :width]


def image(width: int, height: int, seed: int = 0) -> dict:
    return {"type": "image", "image": Image.fromarray(mosaic(1, height, width, seed)[0])}


def audio(seconds: float, seed: int = 0) -> dict:
    start, end = np.random.default_rng(seed).uniform(300, 3000, 2)  # Hz; noise would sound the same for every seed
    time = np.arange(int(seconds * RATE)) / RATE
    chirp = 0.5 * np.sin(2 * np.pi * (start + (end - start) * time / (2 * seconds)) * time)
    return {"type": "audio", "audio": chirp.astype("float32")}


def video(frames: int, width: int, height: int, seed: int = 0) -> dict:
    return {"type": "video", "video": mosaic(frames, height, width, seed)}


def turn(role: str, content: str | list[dict]) -> list[dict]:
    return [{"role": role, "content": content}]


user = partial(turn, "user")
assistant = partial(turn, "assistant")


def chat(*blocks: dict) -> list[dict]:
    return user(list(blocks))


# Prompts of several chats


def audio_prompts() -> list[list[dict]]:
    return [
        chat(audio(0.7, seed=1), text("What do you hear?")),
        chat(audio(0.25, seed=2), audio(0.9, seed=3), text("Compare the audio: is there a cat, a dog or a bird?")),
        chat(text("Is there a bird?")),
    ]


def image_prompts() -> list[list[dict]]:
    return [
        chat(image(84, 56, seed=1), text("What is in the image?")),
        chat(image(56, 56, seed=2), image(112, 84, seed=3), text("Compare them. Is there a cat, a dog or a bird?")),
        chat(text("Is there a bird?")),
    ]


def image_video_prompts() -> list[list[dict]]:
    return [
        *image_prompts(),
        chat(video(4, 56, 84, seed=4), text("Describe the video.")),
        chat(image(56, 84, seed=5), text("Is it in"), video(6, 56, 56, seed=6), text("?")),
    ]


def image_or_video_prompts() -> list[list[dict]]:
    return image_video_prompts()[:4]


def omni_prompts(cell: int = 28) -> list[list[dict]]:
    """Returns prompts for omni models, which don't resize videos. A token covers `cell` x `cell` pixels."""
    return [
        chat(audio(0.6, seed=1), text("What do you hear?")),
        chat(
            image(84, 56, seed=2),
            audio(0.9, seed=3),
            text("Compare them to"),
            video(4, 2 * cell, 2 * cell, seed=4),
            audio(0.3, seed=5),
            text("Is there a bird?"),
        ),
        chat(text("Is there a bird?")),
    ]


def image_audio_prompts() -> list[list[dict]]:
    return [*image_prompts(), *audio_prompts()[:2], chat(image(56, 84, seed=5), text("and"), audio(0.5, seed=6))]


def phi4_prompts() -> list[list[dict]]:
    """Returns prompts with flat images, to have few tokens: an image that fills its crop has 545, the least is 290."""
    return [
        chat(image(64, 10, seed=1), text("What is in the image?")),
        chat(audio(0.7, seed=1), text("What do you hear?")),
        chat(audio(0.25, seed=2), audio(0.9, seed=3), text("Compare the audio: is there a cat, a dog or a bird?")),
        chat(text("Is there a bird?")),
        chat(image(60, 12, seed=5), text("and"), audio(0.5, seed=6)),
    ]


def base64_audio_prompts() -> list[list[dict]]:
    """Returns prompts for Voxtral, which accepts audio as a path, an address or base64, but not as an array."""
    return [
        chat(*(base64_audio(block) if block["type"] == "audio" else block for block in message["content"]))
        for (message,) in audio_prompts()
    ]


def base64_audio(block: dict) -> dict:
    file = io.BytesIO()
    soundfile.write(file, block["audio"], RATE, format="WAV")
    return {"type": "audio", "base64": base64.b64encode(file.getvalue()).decode()}


def always_image_prompts() -> list[list[dict]]:
    """Returns prompts for PaliGemma, whose processor requires an image in every prompt."""
    return [*image_prompts()[:2], chat(image(28, 28, seed=4), text("Is there a bird?"))]


def single_audio_prompts(longest: float = 1.4) -> list[list[dict]]:
    """
    Returns prompts for processors that accept one audio per prompt. The second audio is longer than the encoder's
    window: `longest` seconds.
    """
    return [
        chat(audio(0.7, seed=1), text("What do you hear?")),
        chat(audio(longest, seed=2), text("Is there a cat, a dog or a bird?")),
        chat(text("Is there a bird?")),
    ]
