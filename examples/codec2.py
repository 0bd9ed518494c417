# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Codec2 at 700 bit/s as the tokens of a language model.

A frame of 40 ms has four codes: two of its spectrum, of 9 bits each, one of its energy, of 4 bits, and one of its
pitch, of 6 bits. Each of the four has numbers of its own, so that a code says which part of a frame it is. Needs
`pip install pycodec2`.
"""

from collections.abc import Sequence

import numpy as np
import pycodec2


RATE = 8000  # Hz
_BITS = (9, 9, 4, 6)
_FIRST = (0, 512, 1024, 1040)  # codes of the four parts
CODES = 1104
_SAMPLES = 320  # of a frame


def encode(samples: np.ndarray) -> list[int]:
    """Returns the codes of float samples at `RATE`."""
    codec = pycodec2.Codec2(700)
    padded = np.pad(samples, (0, -len(samples) % _SAMPLES))
    integers = (np.clip(padded, -1, 1) * 32767).astype(np.int16)
    codes = []
    for frame in integers.reshape(-1, _SAMPLES):
        word = int.from_bytes(codec.encode(frame), "big") >> 4  # 28 bits in four bytes
        for first, bits, shift in zip(_FIRST, _BITS, (19, 10, 6, 0), strict=True):
            codes.append(first + (word >> shift) % 2**bits)
    return codes


def decode(codes: Sequence[int]) -> dict | None:
    """Returns the sound of codes, as a `speech_decoder`. Frames that lack a part, or have one twice, are dropped."""
    frames, dropped = _frames(codes)
    if not frames:
        return None
    codec = pycodec2.Codec2(700)
    sounds = []
    for frame in frames:
        word = 0
        for code, first, bits in zip(frame, _FIRST, _BITS, strict=True):
            word = (word << bits) + code - first
        sounds.append(codec.decode((word << 4).to_bytes(4, "big")))
    array = np.concatenate(sounds).astype(np.float32) / 32768
    return {"array": array, "sampling_rate": RATE, "frames": len(frames), "dropped_frames": dropped}


def _frames(codes: Sequence[int]) -> tuple[list[list[int]], int]:
    """Returns the whole frames, and the number of others. A code of the first part begins a frame."""
    frames: list[list[int]] = []
    for code in codes:
        part = sum(code >= first for first in _FIRST) - 1
        if part == 0 or not frames or len(frames[-1]) == len(_FIRST):
            frames.append([])
        frames[-1].append(code if part == len(frames[-1]) else -1)
    whole = [frame for frame in frames if len(frame) == len(_FIRST) and -1 not in frame]
    return whole, len(frames) - len(whole)
