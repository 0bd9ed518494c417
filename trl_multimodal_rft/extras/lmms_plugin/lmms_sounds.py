# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A plugin for lmms-eval's environment: it sends sounds to servers, which its `openai` model takes for videos."""

import base64
import io
from pathlib import Path

import numpy as np
from lmms_eval.api.task import ConfigurableMessagesTask, ConfigurableTask
from lmms_eval.protocol import ChatMessages
from scipy.io import wavfile


_messages = ChatMessages.to_openai_messages


def register() -> list:
    """Replaces how lmms-eval makes requests, and adds no models to its list."""
    ConfigurableMessagesTask.doc_to_visual, ChatMessages.to_openai_messages = media, messages
    return []


def media(task: ConfigurableTask, row: dict) -> list:
    """The media of a row. Decoded sounds, samples or a decoder, say their type."""
    found = list(ConfigurableTask.doc_to_visual(task, row) or [])
    for i, each in enumerate(found):
        if hasattr(each, "get_all_samples") or (isinstance(each, dict) and "array" in each):
            found[i] = {"type": "audio", "array": each["array"], "sampling_rate": each["sampling_rate"]}
    return found


def messages(chat: ChatMessages, **options: dict[str, float] | bool) -> list[dict]:
    """The messages of a request. Sounds are files in Base64: those of their paths, or WAV of their samples."""
    sent = _messages(chat, **options)
    for part in (part for message in sent for part in message["content"] if part["type"] == "audio_url"):
        if isinstance(sound := part.pop("audio_url")["url"], str):
            data, kind = Path(sound).read_bytes(), Path(sound).suffix.removeprefix(".")
        else:
            wavfile.write(file := io.BytesIO(), sound["sampling_rate"], np.asarray(sound["array"]).T)
            data, kind = file.getvalue(), "wav"
        part |= {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": kind}}
    return sent
