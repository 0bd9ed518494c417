# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Plugin of lmms-eval that sends sounds to servers; lmms-eval's own `openai` model takes sounds for videos."""

import base64
import io
from pathlib import Path

import numpy as np
from lmms_eval.api.task import ConfigurableMessagesTask, ConfigurableTask
from lmms_eval.protocol import ChatMessages
from scipy.io import wavfile


_messages = ChatMessages.to_openai_messages


def register() -> list:
    """Replaces two functions with which lmms-eval makes requests. Returns no models to add."""
    ConfigurableMessagesTask.doc_to_visual, ChatMessages.to_openai_messages = media, messages
    return []


def media(task: ConfigurableTask, row: dict) -> list:
    """Returns the media of a row. A decoded sound, as samples or as a decoder, becomes a dictionary with its type."""
    visuals = list(ConfigurableTask.doc_to_visual(task, row) or [])
    for i, visual in enumerate(visuals):
        if hasattr(visual, "get_all_samples") or (isinstance(visual, dict) and "array" in visual):
            visuals[i] = {"type": "audio", "array": visual["array"], "sampling_rate": visual["sampling_rate"]}
    return visuals


def messages(chat: ChatMessages, **options: dict[str, float] | bool) -> list[dict]:
    """Returns the messages of a request. A sound is its file in Base64, or for samples a WAV file in Base64."""
    sent = _messages(chat, **options)
    for part in (part for message in sent for part in message["content"] if part["type"] == "audio_url"):
        if isinstance(sound := part.pop("audio_url")["url"], str):
            data, kind = Path(sound).read_bytes(), Path(sound).suffix.removeprefix(".")
        else:
            wavfile.write(file := io.BytesIO(), sound["sampling_rate"], np.asarray(sound["array"]).T)
            data, kind = file.getvalue(), "wav"
        part |= {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": kind}}
    return sent
