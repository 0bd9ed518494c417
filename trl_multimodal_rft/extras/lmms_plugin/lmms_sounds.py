# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A plugin of lmms-eval that sends sounds to servers, since lmms-eval's `openai` model mistakes sounds for videos."""

import base64
import io
from pathlib import Path

import numpy as np
from lmms_eval.api.task import ConfigurableMessagesTask, ConfigurableTask
from lmms_eval.protocol import ChatMessages
from scipy.io import wavfile


_messages = ChatMessages.to_openai_messages


def register() -> list:
    """Replaces the functions with which lmms-eval makes requests. Registers no models, so the list is empty."""
    ConfigurableMessagesTask.doc_to_visual, ChatMessages.to_openai_messages = media, messages
    return []


def media(task: ConfigurableTask, row: dict) -> list:
    """
    Returns the media of a row. A sound is a dictionary of samples, or a decoder of `datasets`. It becomes a dictionary
    of samples with the type `"audio"`.
    """
    items = list(ConfigurableTask.doc_to_visual(task, row) or [])
    for i, item in enumerate(items):
        if hasattr(item, "get_all_samples") or (isinstance(item, dict) and "array" in item):
            items[i] = {"type": "audio", "array": item["array"], "sampling_rate": item["sampling_rate"]}
    return items


def messages(chat: ChatMessages, **options: dict[str, float] | bool) -> list[dict]:
    """Returns the messages of a request. Sounds are sent in Base64: files unchanged, and samples as WAV."""
    request = _messages(chat, **options)
    for block in (block for message in request for block in message["content"] if block["type"] == "audio_url"):
        if isinstance(sound := block.pop("audio_url")["url"], str):  # the path of a file
            data, suffix = Path(sound).read_bytes(), Path(sound).suffix.removeprefix(".")
        else:
            wavfile.write(file := io.BytesIO(), sound["sampling_rate"], np.asarray(sound["array"]).T)
            data, suffix = file.getvalue(), "wav"
        block |= {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": suffix}}
    return request
