# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows to fine-tune a language model that speaks, from recordings with texts."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoFeatureExtractor

from ...data.reading.decoding import load_audio
from ...data.reading.refs import MediaRef
from ...data.reading.rules import MediaRules
from ...data.rows.batches import DatasetRows
from ...data.rows.load import load_rows
from ...progress import progress_bar
from ...rollout.speech import SPEECH_TOKENS, load_codec


def load_speech(
    path: str | Path,
    split: str = "train",
    *,
    codec: str,
    template: str = "{text}",
    prompt_key: str = "text",
    media_dir: str | Path | None = None,
) -> Dataset:
    """
    Reads recordings in a column `audio`, with their texts, as rows for supervised training of a model that speaks.

    A completion has the recording's codes as tokens, such as `"<|s_17|><|s_4|>"`, see `speech_tokens` in
    [`MultimodalGRPOConfig`]. The rows also have the text as `solution`, for [`~rewards.spoken_wer_reward`], and their
    other columns.

    Args:
        path (`str` or `Path`):
            File, folder (such as `datasets`' `audiofolder`), or name of a dataset on the Hub.
        split (`str`, *optional*, defaults to `"train"`):
            Split.
        codec (`str`):
            Name or folder of a codec of transformers with `encode` and a feature extractor, such as
            `"HKUSTAudio/xcodec2-hf"`.
        template (`str`, *optional*, defaults to `"{text}"`):
            Template of prompts, with the text as `{text}`.
        prompt_key (`str`, *optional*, defaults to `"text"`):
            Column of the text.
        media_dir (`str` or `Path`, *optional*):
            Folder that relative paths of recordings start from.

    Returns:
        [`~datasets.Dataset`]: Rows with `prompt`, `completion`, `solution`, `audio` and the other columns.

    Raises:
        `ValueError`: If a column is missing, or the codec encodes nothing.
        [`MediaError`]: If a recording can't be read. The message names the row.
    """
    rows: Any = load_rows(str(path), None, split, streaming=False)
    for column in ("audio", prompt_key):
        if column not in rows.column_names:
            raise ValueError(
                f"There is no column {column!r} among {rows.column_names}; recordings are in 'audio', and "
                "`prompt_key` names the column of their texts."
            )
    model, size = load_codec(codec, torch.device(torch.accelerator.current_accelerator() or "cpu"))
    extractor = AutoFeatureExtractor.from_pretrained(codec, trust_remote_code=False)
    rules = MediaRules(media_dir=None if media_dir is None else str(media_dir))
    completions = []
    rate = extractor.sampling_rate
    stored_rows = DatasetRows(rows)
    with progress_bar(len(rows), "encode") as bar:
        for index in range(len(rows)):
            ref = MediaRef("audio", stored_rows[index]["audio"], {}, "audio", index, rules)
            inputs = extractor(load_audio(ref, rate), sampling_rate=rate, return_tensors="pt").to(model.device)
            with torch.no_grad():
                codes = model.encode(**inputs).audio_codes[0]  # (codebooks, frames)
            offsets = torch.arange(len(codes), device=codes.device)[:, None] * size
            completions.append("".join(map(SPEECH_TOKENS.format, (codes + offsets).T.flatten().tolist())))
            bar.update()
    texts = [str(text) for text in rows[prompt_key]]
    columns = {
        "prompt": [template.replace("{text}", text) for text in texts],
        "completion": completions,
        "solution": texts,
    }
    rows = rows.remove_columns([name for name in columns if name in rows.column_names])
    for name, values in columns.items():
        rows = rows.add_column(name, values)
    return rows
