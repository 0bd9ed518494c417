# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The page of `trl-multimodal-rft chat`, asked over HTTP."""

import argparse

import numpy as np
import pytest
import soundfile
from helpers.chats import RATE, audio, chat, text
from helpers.families import encode
from helpers.trainer_utils import load, saved
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from trl_multimodal_rft.cli import chat as command


gradio = pytest.importorskip("gradio", exc_type=ImportError)

QUESTION = "What do you hear in the audio?"


@pytest.fixture
def served():
    """Serves a page; gives a client of it."""
    from gradio_client import Client

    pages = []

    def serve(*argv):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        page = command.page(*command.load(parser.parse_args([*argv, "--max_completion_length", "6"])))
        pages.append(page)
        _, url, shared = page.launch(prevent_thread_lock=True, quiet=True)
        assert url.startswith("http://127.0.0.1:") and shared is None
        return Client(url, verbose=False)

    yield serve
    for page in pages:
        page.close()


def greedy(model, processor, sound):
    config = GenerationConfig(
        max_new_tokens=6,
        eos_token_id=processor.tokenizer.eos_token_id,
        pad_token_id=processor.tokenizer.pad_token_id,
        suppress_tokens=[model.config.audio_token_id],
    )
    inputs = encode(processor, chat({"type": "audio", "audio": sound}, text(QUESTION)))
    output = model.generate(**inputs, generation_config=config)
    return processor.tokenizer.decode(output[0, inputs["input_ids"].size(1) :], skip_special_tokens=True)


def test_adapter_and_its_base_hear(served, tmp_path):
    from gradio_client import handle_file
    from gradio_client.exceptions import AppError

    model, processor = load("qwen2_audio")
    sounds = [np.float32(audio(seconds, seed=seed)["audio"]) for seconds, seed in ((0.5, 1), (0.8, 2))]
    by_base = [greedy(model, processor, sound) for sound in sounds]
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    by_adapter = [greedy(model, processor, sound) for sound in sounds]
    assert len({*by_base, *by_adapter}) == 4
    model.save_pretrained(tmp_path / "adapter")

    client = served(str(tmp_path / "adapter"))
    for i, sound in enumerate(sounds):
        soundfile.write(tmp_path / f"{i}.wav", sound, RATE, subtype="FLOAT")
        answers = client.predict(QUESTION, handle_file(tmp_path / f"{i}.wav"), api_name="/ask")
        assert answers == (by_adapter[i], by_base[i])
    (tmp_path / "none.wav").write_text("no sound")
    with pytest.raises(AppError, match="column 'audio'"):
        client.predict(QUESTION, handle_file(tmp_path / "none.wav"), api_name="/ask")
    with pytest.raises(AppError, match="There is no question"):
        client.predict(" ", None, api_name="/ask")


def test_model_beside_another(served):
    folder = str(saved("qwen2_audio"))
    answers = served(folder, "--base", folder).predict("Is there a cat?", None, api_name="/ask")
    assert len(answers) == 2 and answers[0] == answers[1]
    assert isinstance(served(folder).predict("Is there a cat?", None, api_name="/ask"), str)
