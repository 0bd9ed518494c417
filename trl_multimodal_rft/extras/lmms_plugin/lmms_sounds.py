# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A plugin of lmms-eval that sends sounds to servers, since lmms-eval's `openai` model mistakes sounds for videos."""

import base64
import io
from itertools import chain
from pathlib import Path

import numpy as np
from lmms_eval.api.task import ConfigurableMessagesTask, ConfigurableTask
from lmms_eval.protocol import ChatMessages
from scipy.io import wavfile


_messages = ChatMessages.to_openai_messages


def register() -> list:
    """Replaces the functions with which lmms-eval makes requests. Registers no models, so the list is empty."""
    ConfigurableMessagesTask.doc_to_visual = media
    ChatMessages.to_openai_messages = messages
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
    for block in chain.from_iterable(message["content"] for message in request):
        if block["type"] != "audio_url":
            continue
        sound = block.pop("audio_url")["url"]
        if isinstance(sound, str):  # the path of a file
            data = Path(sound).read_bytes()
            suffix = Path(sound).suffix.removeprefix(".")
        else:
            file = io.BytesIO()
            wavfile.write(file, sound["sampling_rate"], np.asarray(sound["array"]).T)
            data = file.getvalue()
            suffix = "wav"
        block |= {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": suffix}}
    return request
