# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards for completions that are speech: what a recognizer hears, whose voice it is, and how long it lasts."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
import torch
from accelerate import PartialState
from transformers import (
    AutoFeatureExtractor,
    AutoModelForAudioXVector,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
)

from ...data.reading.decoding import load_audio
from ...data.reading.refs import MediaRef
from ...data.reading.rules import DEFAULT_RULES, MediaRules
from ...models.pretrained import load_frozen
from ..answers import references_of
from ..calls import Argument, Completion, Reference, require_column
from .transcripts import cer_reward, wer_reward


# An item of `completion_audio`
Sound = dict[str, Any] | None

_AT_ONCE = 16  # sounds in a forward of a model


def spoken_wer_reward(
    completions: Sequence[Completion],
    solution: Sequence[Reference] | None = None,
    completion_audio: Sequence[Sound] | None = None,
    recognizer: str | Callable[[list[dict[str, Any]]], list[str]] = "openai/whisper-large-v3",
    characters: bool = False,
    likelihood_weight: Annotated[float, "[0, 1]"] = 0.0,
    **kwargs: Argument,
) -> list[float | None]:
    """
    Rewards speech by the word error rate of what a speech recognizer hears, as [`wer_reward`] does for transcripts.

    Speech in which the recognizer hears nothing gets 0.0, and so does a completion without a sound. Measure another
    recognizer beside this one (`held_out_rewards`), since a policy learns to please the one that rewards it.

    With a `likelihood_weight` `w`, the reward is the weighted harmonic mean of `1 - tanh(3 * WER)`, whose weight is
    `1 - w`, and of `exp(-NLL / 3)`, where NLL is the mean negative log-likelihood of the reference's tokens, or 0.0
    with a WER of at least 1. Llasa's GRPO has the weight 0.4.

    Args:
        completion_audio (`list`):
            Sounds of the completions, by the trainer's `speech_decoder`.
        recognizer (`str` or `Callable`, *optional*, defaults to `"openai/whisper-large-v3"`):
            Name or folder of a speech recognizer of transformers that generates texts, such as Whisper, which is
            loaded once, or a function of a list of sounds that returns their transcripts. For a server, see
            [`RemoteReward`], which sends it the sounds.
        characters (`bool`, *optional*, defaults to `False`):
            Whether to count errors of characters, as [`cer_reward`] does.
        likelihood_weight (`float`, *optional*, defaults to `0.0`):
            Weight of the likelihood, for a recognizer by name.

    For the other arguments and the errors, see [`accuracy_reward`]. Needs what [`wer_reward`] needs.
    """
    name = "spoken_wer_reward"
    sounds = _sounds(completion_audio, name)
    indices = [i for i, sound in enumerate(sounds) if sound is not None]
    heard: list[Any] = [sounds[i] for i in indices]
    transcripts = [""] * len(sounds)
    model = _Recognizer.load(recognizer) if isinstance(recognizer, str) and heard else None
    listen = recognizer if callable(recognizer) else model
    texts = [] if listen is None or not heard else listen(heard)
    for i, text in zip(indices, texts, strict=True):
        transcripts[i] = text or ""  # `None` of a function
    error_reward = cer_reward if characters else wer_reward
    rewards = error_reward(transcripts, solution=solution, **kwargs)
    if likelihood_weight == 0 or not heard:
        return rewards
    if model is None:
        raise ValueError(f"`likelihood_weight` of {name} needs the name of a model as `recognizer`.")
    for i, sound in zip(indices, heard, strict=True):
        reward = rewards[i]
        reference = next(iter(references_of((solution or [None])[i], i, name)), None)
        if reward and reference is not None:
            likelihood = math.exp(-model.loss(sound, reference) / 3)
            accuracy = 1 - math.tanh(3 * (1 - reward))
            parts = [(1 - likelihood_weight, accuracy), (likelihood_weight, likelihood)]
            rewards[i] = 1 / sum(weight / max(value, 1e-6) for weight, value in parts)
    return rewards


def speaker_reward(
    completions: Sequence[Completion],
    audio: Sequence[Any] | None = None,
    completion_audio: Sequence[Sound] | None = None,
    speaker_model: str = "microsoft/wavlm-base-plus-sv",
    media_rules: MediaRules = DEFAULT_RULES,
    **kwargs: Argument,
) -> list[float | None]:
    """
    Rewards speech by the cosine similarity of its speaker's embedding and that of the row's recording, at least 0.0.
    A completion without a sound gets 0.0.

    Args:
        completions (`list`):
            Completions, which aren't read.
        audio (`list`):
            Recordings of the wanted voices, `None` where the reward does not apply.
        completion_audio (`list`):
            Sounds of the completions, by the trainer's `speech_decoder`.
        speaker_model (`str`, *optional*, defaults to `"microsoft/wavlm-base-plus-sv"`):
            Name or folder of a model of speakers (`AutoModelForAudioXVector`), which is loaded once.
        media_rules ([`~data.MediaRules`], *optional*):
            Rules by which the recordings are read.

    Returns:
        `list[float | None]`: Similarities from 0 to 1, `None` where there is no recording.
    """
    sounds = _sounds(completion_audio, "speaker_reward")
    recordings = require_column(audio, "audio", "speaker_reward", kwargs)
    rewards: list[float | None] = [None if recording is None else 0.0 for recording in recordings]
    for i, (sound, recording) in enumerate(zip(sounds, recordings, strict=True)):
        if sound is None or recording is None:
            continue
        ref = MediaRef("audio", recording, {}, "audio", i, media_rules)
        extractor, model = _speaker_model(speaker_model)
        rate = extractor.sampling_rate
        embeddings = [
            _embedding(extractor, model, samples) for samples in (_samples(sound, rate), load_audio(ref, rate))
        ]
        rewards[i] = max(torch.nn.functional.cosine_similarity(*embeddings, dim=0).item(), 0.0)
    return rewards


def duration_reward(
    completions: Sequence[Completion],
    solution: Sequence[Reference] | None = None,
    completion_audio: Sequence[Sound] | None = None,
    seconds_per_character: tuple[float, float] = (0.04, 0.12),
    **kwargs: Argument,
) -> list[float | None]:
    """
    Rewards speech whose duration fits its text: 1.0 if the seconds per character of the reference are within the
    range, down to 0.0 at none, and at twice the upper bound. A completion without a sound gets 0.0.

    It prevents drawling and hurried speech, which a recognizer's reward alone may bring about, see
    https://huggingface.co/papers/2511.21270.

    Args:
        completions (`list`):
            Completions, which aren't read.
        solution (`list`):
            The text of each completion, `None` where the reward does not apply.
        completion_audio (`list`):
            Sounds of the completions, by the trainer's `speech_decoder`.
        seconds_per_character (`tuple[float, float]`, *optional*, defaults to `(0.04, 0.12)`):
            Range of a natural pace, for example of English.

    Returns:
        `list[float | None]`: Rewards from 0 to 1, `None` where there is no text.
    """
    sounds = _sounds(completion_audio, "duration_reward")
    texts = require_column(solution, "solution", "duration_reward", kwargs)
    low = seconds_per_character[0]
    high = seconds_per_character[1]
    rewards: list[float | None] = []
    for i, (sound, text) in enumerate(zip(sounds, texts, strict=True)):
        reference = next(iter(references_of(text, i, "duration_reward")), "")
        if not reference or sound is None:
            rewards.append(0.0 if reference else None)
            continue
        pace = len(sound["array"]) / sound["sampling_rate"] / len(reference)
        rewards.append(min(1.0, pace / low, max(0.0, 2 - pace / high)))
    return rewards


def whole_frames_reward(
    completions: Sequence[Completion], completion_audio: Sequence[Sound] | None = None, **kwargs: Argument
) -> list[float]:
    """
    Rewards speech whose codes are whole frames of the codec: the share of frames that the `speech_decoder` could use.
    A completion without a sound gets 0.0.

    Args:
        completions (`list`):
            Completions, which aren't read.
        completion_audio (`list`):
            Sounds of the completions, by the trainer's `speech_decoder`.

    Returns:
        `list[float]`: Shares from 0 to 1.
    """
    return [
        0.0 if sound is None else sound["frames"] / max(sound["frames"] + sound["dropped_frames"], 1)
        for sound in _sounds(completion_audio, "whole_frames_reward")
    ]


def _sounds(completion_audio: Sequence[Sound] | None, name: str) -> Sequence[Sound]:
    if completion_audio is None:
        raise ValueError(f"{name} hears completions; set `speech_decoder`, which turns their codes into sounds.")
    return completion_audio


def _samples(sound: dict[str, Any], rate: int) -> np.ndarray:
    return load_audio(MediaRef("audio", sound, {}, "completion_audio", 0), rate)


@dataclass(frozen=True, eq=False)
class _Recognizer:
    """Speech recognizer of transformers that generates texts, such as Whisper."""

    processor: Any
    model: Any

    @classmethod
    @functools.lru_cache(maxsize=4)
    def load(cls, name: str) -> Self:
        model = load_frozen(AutoModelForSpeechSeq2Seq, name, PartialState().device)
        return cls(AutoProcessor.from_pretrained(name, trust_remote_code=False), model)

    @torch.no_grad()
    def __call__(self, sounds: list[dict[str, Any]]) -> list[str]:
        texts = []
        for start in range(0, len(sounds), _AT_ONCE):
            ids = self.model.generate(**self._features(sounds[start : start + _AT_ONCE]))
            texts += self.processor.batch_decode(ids, skip_special_tokens=True)
        return texts

    @torch.no_grad()
    def loss(self, sound: dict[str, Any], reference: str) -> float:
        """Returns the mean negative log-likelihood of the tokens of a reference, by the model's own loss."""
        labels = self.processor.tokenizer(reference, return_tensors="pt").input_ids.to(self.model.device)
        if labels[0, 0] == self.model.config.decoder_start_token_id:  # the model puts it before the labels
            labels = labels[:, 1:]
        return self.model(**self._features([sound]), labels=labels).loss.item()

    def _features(self, sounds: list[dict[str, Any]]) -> Any:
        rate = self.processor.feature_extractor.sampling_rate
        arrays = [_samples(sound, rate) for sound in sounds]
        inputs = self.processor.feature_extractor(arrays, sampling_rate=rate, return_tensors="pt")
        return inputs.to(self.model.device, self.model.dtype)


@functools.lru_cache(maxsize=4)
def _speaker_model(name: str) -> tuple[Any, Any]:
    model = load_frozen(AutoModelForAudioXVector, name, PartialState().device)
    return AutoFeatureExtractor.from_pretrained(name, trust_remote_code=False), model


@torch.no_grad()
def _embedding(extractor: Any, model: Any, samples: np.ndarray) -> torch.Tensor:
    inputs = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt").to(model.device)
    return model(**inputs).embeddings[0]
