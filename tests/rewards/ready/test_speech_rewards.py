# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards of speech, against the models' own `generate`, loss and embeddings."""

import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers.listeners import speaker_folder, whisper_folder
from transformers import (
    AutoFeatureExtractor,
    WavLMForXVector,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)

from trl_multimodal_rft.rewards import (
    duration_reward,
    speaker_reward,
    spoken_wer_reward,
    wer_reward,
    whole_frames_reward,
)
from trl_multimodal_rft.rewards.named import check_reward_columns, load_reward_funcs


def sound(seconds: float, seed: int = 0, rate: int = 16000, **more) -> dict:
    samples = np.random.default_rng(seed).normal(scale=0.1, size=int(seconds * rate)).astype(np.float32)
    return {"array": samples, "sampling_rate": rate, "frames": 4, "dropped_frames": 1, **more}


def empty(n: int) -> list[str]:
    return [""] * n


def transcripts_of(sounds: list[dict]) -> tuple[list[str], WhisperForConditionalGeneration, WhisperProcessor]:
    model = WhisperForConditionalGeneration.from_pretrained(whisper_folder()).eval()
    processor = WhisperProcessor.from_pretrained(whisper_folder())
    texts = []
    for item in sounds:
        features = processor(item["array"], sampling_rate=16000, return_tensors="pt").input_features
        texts.append(processor.batch_decode(model.generate(features), skip_special_tokens=True)[0])
    return texts, model, processor


def test_error_rates_are_those_of_what_the_model_hears():
    sounds = [sound(0.5), sound(1.0, seed=1), sound(1.5, seed=2)]
    texts, _, _ = transcripts_of(sounds)
    assert all(text.strip() for text in texts)
    solution = [texts[0], f"{texts[1]} and more", "else"]
    rewards = spoken_wer_reward(empty(4), solution=[*solution, "one"], completion_audio=[*sounds, None],
                                recognizer=whisper_folder())  # fmt: skip
    assert rewards == [*wer_reward(texts, solution=solution), 0.0]
    assert rewards[0] == 1.0 > rewards[1] > 0


def test_likelihood_is_the_loss_of_the_model():
    """Llasa's formula, with the mean loss of the reference's tokens by the model's own forward."""
    sounds = [sound(0.5), sound(1.0, seed=1)]
    texts, model, processor = transcripts_of(sounds)
    solution = [texts[0], f"{texts[1]} and more"]
    options = {"completion_audio": sounds, "recognizer": whisper_folder(), "likelihood_weight": 0.4}
    rewards = spoken_wer_reward(empty(2), solution=solution, **options)
    for item, text, reference, reward in zip(sounds, texts, solution, rewards, strict=True):
        features = processor(item["array"], sampling_rate=16000, return_tensors="pt").input_features
        labels = processor.tokenizer(reference, return_tensors="pt").input_ids
        labels = labels[:, 1:] if labels[0, 0] == model.config.decoder_start_token_id else labels
        with torch.no_grad():
            logits = model(input_features=features, labels=labels).logits[0].double()
        nll = -logits.log_softmax(-1).gather(1, labels.T).mean().item()
        accuracy = 1 - math.tanh(3 * (1 - wer_reward([text], solution=[reference])[0]))
        assert reward == pytest.approx(1 / (0.6 / accuracy + 0.4 / math.exp(-nll / 3)), rel=1e-4)


def test_silence_never_scores():
    """A function hears nothing, and a reference that is `None` doesn't apply."""
    options = {"completion_audio": [sound(0.1)] * 3, "recognizer": lambda sounds: ["", " ", "one"]}
    for characters in (False, True):
        columns = {**options, "characters": characters}
        assert spoken_wer_reward(empty(3), solution=["one", "one", "one"], **columns) == [0.0, 0.0, 1.0]
        assert spoken_wer_reward(empty(3), solution=[None, "one", None], **columns) == [None, 0.0, None]
        columns["recognizer"] = lambda sounds: [None, None, "one"]
        assert spoken_wer_reward(empty(3), solution=["one", "one", "one"], **columns) == [0.0, 0.0, 1.0]
    nothing = {"completion_audio": [None, None], "recognizer": "no/model"}  # isn't loaded
    assert spoken_wer_reward(empty(2), solution=["one", None], **nothing) == [0.0, None]
    options["likelihood_weight"] = 0.4
    with pytest.raises(ValueError, match="needs the name of a model"):
        spoken_wer_reward(empty(3), solution=["one"] * 3, **options)


def test_similarity_of_speakers_is_that_of_embeddings():
    sounds = [sound(0.5), sound(0.7, seed=1), None, sound(0.5)]
    recordings = [{"array": sound(0.5)["array"], "sampling_rate": 16000}, sound(0.6, seed=3), sound(0.5), None]
    rewards = speaker_reward(empty(4), audio=recordings, completion_audio=sounds, speaker_model=speaker_folder())
    assert rewards[0] == pytest.approx(1.0, abs=1e-5) and rewards[2:] == [0.0, None]
    model = WavLMForXVector.from_pretrained(speaker_folder()).eval()
    extractor = AutoFeatureExtractor.from_pretrained(speaker_folder())
    embeddings = []
    for item in (sounds[1], recordings[1]):
        inputs = extractor(item["array"], sampling_rate=16000, return_tensors="pt")
        with torch.no_grad():
            embeddings.append(model(**inputs).embeddings[0])
    expected = torch.nn.functional.cosine_similarity(*embeddings, dim=0).item()
    assert rewards[1] == pytest.approx(max(expected, 0.0), abs=1e-5)


def test_unlike_speakers_get_nothing(tmp_path):
    """The model's bias makes the embeddings of two sounds each other's negative."""
    sounds = [sound(0.5), sound(0.7, seed=1)]
    model = WavLMForXVector.from_pretrained(speaker_folder()).eval()
    extractor = AutoFeatureExtractor.from_pretrained(speaker_folder())
    with torch.no_grad():
        inputs = [extractor(item["array"], sampling_rate=16000, return_tensors="pt") for item in sounds]
        hidden = torch.stack([model(**item).embeddings[0] for item in inputs])
        model.feature_extractor.bias -= hidden.mean(0)
        first, second = (model(**item).embeddings[0] for item in inputs)
    assert torch.nn.functional.cosine_similarity(first, second, dim=0).item() < -0.99
    model.save_pretrained(tmp_path)
    extractor.save_pretrained(tmp_path)
    columns = {"audio": [sounds[1], sounds[0]], "completion_audio": [sounds[0], sounds[0]]}
    assert speaker_reward(empty(2), **columns, speaker_model=str(tmp_path)) == [0.0, pytest.approx(1.0, abs=1e-5)]


def test_duration_and_frames():
    sounds = [sound(0.5), sound(0.05), sound(1.5), sound(5.0), None, sound(0.5)]
    solution = ["seven six"] * 5 + [None]  # nine characters
    rewards = duration_reward(empty(6), solution=solution, completion_audio=sounds)
    expected = [1.0, 0.05 / 9 / 0.04, 2 - 1.5 / 9 / 0.12, 0.0, 0.0, None]
    assert rewards == [value if value is None else pytest.approx(value) for value in expected]
    assert whole_frames_reward(empty(2), completion_audio=[sound(0.5), None]) == [0.8, 0.0]


@pytest.mark.parametrize("reward", [spoken_wer_reward, speaker_reward, duration_reward, whole_frames_reward])
def test_without_a_decoder(reward):
    with pytest.raises(ValueError, match=f"{reward.__name__} hears completions; set `speech_decoder`"):
        reward([""], solution=["one"], audio=[sound(0.1)])


def test_columns_are_checked_before_models_are_loaded():
    functions = load_reward_funcs(["spoken_wer_reward(recognizer='no/model')", "speaker_reward", "duration_reward"])
    rows = Dataset.from_list([{"prompt": "say one", "solution": "one", "audio": {"path": "one.wav"}}])
    assert check_reward_columns(functions, rows) == []
    with pytest.raises(ValueError, match="`audio`, which is missing"):
        check_reward_columns(functions, rows.remove_columns("audio"))
