# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions that are speech: codes of a frozen audio codec, as sounds for reward functions and logs."""

import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from ..algorithms.metrics import Metric, nan_mean
from ..models.pretrained import load_frozen
from ..spelling import is_dotted, load_dotted
from .completion_columns import Ends
from .rollout import Prompted


P = TypeVar("P", bound=Prompted)

# A sound: `"array"`, float32 samples of shape `(samples,)`, `"sampling_rate"` in Hz, `"frames"`, the number of whole
# frames of the codec, and `"dropped_frames"`, the number of damaged ones, which were left out
Sound = dict[str, Any]

SPEECH_TOKENS = "<|s_{}|>"  # the form of the tokens that stand for codes, by default
_SILENT = 1e-3  # root mean square of samples below which a sound is silent, -60 dB of full scale
_MOST_SOUNDS = 32  # that a codec decodes at once


@dataclass(frozen=True, eq=False)
class SpeechDecoder:
    """Decoder of completions whose tokens stand for codes of an audio codec, which isn't trained."""

    decode: Callable[[list[list[int]], Sequence[int]], list[Sound | None]]  # gets codes and row indices
    codes: dict[int, int]  # by token id
    ends: Ends
    tokenizer: PreTrainedTokenizerBase

    def __call__(self, rollout: P) -> P:
        """
        Returns completions with their sounds, `None` for a completion that is empty, cut off or can't be decoded.
        Sounds that are there already are kept.
        """
        source = rollout.source
        if source.sounds is not None:
            return rollout
        code_lists = [self._codes(ids) for ids in source.ids]
        indices = [i for i, codes in enumerate(code_lists) if codes]
        sounds: list[Sound | None] = [None] * len(code_lists)
        rows = [source.row_indices[i] for i in indices]
        for i, sound in zip(indices, self.decode([code_lists[i] for i in indices], rows), strict=True):
            sounds[i] = sound
        return replace(rollout, source=replace(source, sounds=sounds))

    def metrics(self, rollout: Prompted) -> dict[str, Metric]:
        """Returns metrics of the sounds of completions that metrics count."""
        ids = rollout.source.ids[: rollout.n_counted]
        sounds = (rollout.source.sounds or [])[: rollout.n_counted]
        heard = [sound for sound in sounds if sound is not None]
        levels = [math.sqrt(np.mean(np.square(sound["array"], dtype=np.float64))) for sound in heard]
        has_ended = [self._has_ended(completion) for completion in ids]
        lost = [sound is None for sound, ended in zip(sounds, has_ended, strict=True) if ended]
        values = {
            "seconds": [seconds_of(sound) for sound in heard],
            "silent": [level < _SILENT for level in levels],
            "dropped_frames": [sound["dropped_frames"] for sound in heard],
            "unended": [not ended for ended in has_ended],
            "undecodable": lost,
        }
        return {f"speech/{name}": nan_mean(torch.tensor(column, dtype=torch.float)) for name, column in values.items()}

    def _codes(self, ids: list[int]) -> list[int]:
        """Returns the codes of a completion, none if it is cut off."""
        return [self.codes[token_id] for token_id in ids if token_id in self.codes] if self._has_ended(ids) else []

    def _has_ended(self, ids: list[int]) -> bool:
        return self.ends.end(ids, self.tokenizer)


def decoder_of(
    args: Any, ends: Ends, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> SpeechDecoder | None:
    """Returns the decoder of the options `speech_decoder` and `speech_tokens`, if there is one."""
    decoder = getattr(args, "speech_decoder", None)
    if decoder is None:
        return None
    codes = speech_codes(args.speech_tokens, tokenizer)
    if isinstance(decoder, str) and is_dotted(decoder) and not os.path.exists(decoder):
        decoder = load_dotted(decoder, "speech decoder", (), "my_codec.decode")
    decode = _Codec.load(decoder, len(codes), device) if isinstance(decoder, str) else _Function(decoder)
    return SpeechDecoder(decode, codes, ends, tokenizer)


def seconds_of(sound: Sound) -> float:
    return len(sound["array"]) / sound["sampling_rate"]


def speech_codes(speech_tokens: str | None, tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    """Returns the codes of the tokens of `speech_tokens` by token id. Raises `ValueError` if there are none."""
    speech_tokens = SPEECH_TOKENS if speech_tokens is None else speech_tokens
    if "{}" in speech_tokens:
        pattern = re.compile(re.escape(speech_tokens).replace(re.escape("{}"), r"(\d+)"))
        matches = {token_id: pattern.fullmatch(token) for token, token_id in tokenizer.get_vocab().items()}
        codes = {token_id: int(match[1]) for token_id, match in matches.items() if match}
    else:
        numbers = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", speech_tokens)
        first = int(numbers[1]) if numbers else 0
        codes = {first + code: code for code in range(int(numbers[2]) if numbers else 0)}
    if not codes or max(codes) >= len(tokenizer):
        raise ValueError(
            f"`speech_tokens={speech_tokens!r}` are no tokens of the tokenizer; set it to the form of the codec's "
            "tokens, such as '<|s_{}|>', or to the id of the first token and their number, such as '128266, 28672'."
        )
    return codes


def whole_frames(codes: Sequence[int], n_codebooks: int, size: int) -> tuple[list[list[int]], int]:
    """
    Returns the whole frames of a stream of codes, and the number of damaged frames. A frame has a code of each
    codebook, in order; the codes of codebook `k` are `k * size` to `(k + 1) * size - 1`. A code out of order begins a
    new frame if it is of the first codebook.
    """
    frames: list[list[int]] = []
    n_begun = 0
    frame: list[int] = []
    is_in_order = False
    for code in codes:
        codebook = code // size
        if codebook == 0:
            frame = []
            is_in_order = True
        n_begun += not is_in_order or codebook == 0
        is_in_order = is_in_order and codebook == len(frame)
        frame = [*frame, code % size] if is_in_order else []
        if is_in_order and len(frame) == n_codebooks:
            frames.append(frame)
            frame = []
            is_in_order = False
    return frames, n_begun - len(frames)


def load_codec(name: str, device: torch.device) -> tuple[PreTrainedModel, int]:
    """Returns a codec of transformers, frozen, with the number of codes of a codebook."""
    model = load_frozen(AutoModel, name, device)
    size = getattr(model.config, "codebook_size", None)
    levels = getattr(model.config, "quantization_levels", None)
    size = math.prod(levels) if size is None and levels else size
    if size is None or not hasattr(model, "decode"):
        raise ValueError(
            f"{name!r} is a {type(model).__name__}, which decodes no codes; name a codec such as "
            "'HKUSTAudio/xcodec2-hf', or in Python, pass a function as `speech_decoder`."
        )
    return model, size


@dataclass(frozen=True, eq=False)
class _Codec:
    """Codec of transformers, whose codebooks have `size` codes."""

    model: PreTrainedModel
    n_codebooks: int
    size: int

    @classmethod
    def load(cls, name: str, n_codes: int, device: torch.device) -> Self:
        model, size = load_codec(name, device)
        return cls(model, -(-n_codes // size), size)

    def __call__(self, code_lists: list[list[int]], rows: Sequence[int]) -> list[Sound | None]:
        config: Any = self.model.config
        rate = getattr(config, "output_sampling_rate", None) or config.sampling_rate
        frame_lists = [whole_frames(codes, self.n_codebooks, self.size) for codes in code_lists]
        # Sounds of equal length, so that no padding changes a sound
        by_length: dict[int, list[int]] = defaultdict(list)
        for i, (frames, _) in enumerate(frame_lists):
            by_length[len(frames)].append(i)
        sounds: list[Sound | None] = [None] * len(code_lists)
        for length in sorted(by_length.keys() - {0}):
            for start in range(0, len(by_length[length]), _MOST_SOUNDS):
                indices = by_length[length][start : start + _MOST_SOUNDS]
                frames = torch.tensor([frame_lists[i][0] for i in indices], device=self.model.device)
                with torch.no_grad():
                    decoded = self.model.decode(audio_codes=frames.transpose(1, 2)).audio_values
                for i, samples in zip(indices, decoded.reshape(len(indices), -1).float().cpu().numpy(), strict=True):
                    sounds[i] = _as_sound(samples, rate, length, frame_lists[i][1])
        return sounds


@dataclass(frozen=True, eq=False)
class _Function:
    """Decoder that is a function of the codes of a completion."""

    function: Callable[[list[int]], Any]

    def __call__(self, code_lists: list[list[int]], rows: Sequence[int]) -> list[Sound | None]:
        return [self._sound(codes, row) for codes, row in zip(code_lists, rows, strict=True)]

    def _sound(self, codes: list[int], row: int) -> Sound | None:
        try:
            value = self.function(codes)
        except Exception as error:
            error.add_note(f"`speech_decoder` raised this for the codes of a completion of row {row}.")
            raise
        if value is None:
            return None
        try:
            values = value if isinstance(value, dict) else dict(zip(("array", "sampling_rate"), value, strict=True))
            numbers = [values["sampling_rate"], values.get("frames", len(codes)), values.get("dropped_frames", 0)]
            samples = torch.as_tensor(values["array"]).detach().float().cpu().numpy()
            rate, frames, dropped_frames = map(int, numbers)
        except (TypeError, ValueError, KeyError):
            raise ValueError(
                f"`speech_decoder` returned a {type(value).__name__} for a completion of row {row}; return the "
                "samples and the sampling rate, a dictionary with 'array' and 'sampling_rate', or `None`."
            ) from None
        if samples.ndim != 1 or rate <= 0:
            raise ValueError(
                f"`speech_decoder` returned samples of shape {samples.shape} at {rate} Hz for a completion of row "
                f"{row}; return samples of one channel, `(samples,)`, and a positive rate."
            )
        return _as_sound(samples, rate, frames, dropped_frames)


def _as_sound(samples: np.ndarray, rate: int, frames: int, dropped_frames: int) -> Sound | None:
    if not (len(samples) and np.isfinite(samples).all()):
        return None
    return {"array": samples, "sampling_rate": int(rate), "frames": frames, "dropped_frames": dropped_frames}
