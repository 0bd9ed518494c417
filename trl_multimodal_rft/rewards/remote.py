# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards from a server, over HTTP."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from ..data.columns import (
    MEDIA_COLUMNS,
    MediaRef,
    as_text,
    has_media,
    iter_refs,
    rows_to_messages,
    strip_media,
    without_credentials,
)
from ..data.encode import png, wav
from ..data.features import as_encoded
from ..data.http import Answer, NoAnswer, TooLarge, ask
from ..data.loading import load_audio, load_image, load_video
from ..data.rules import DEFAULT_RULES, MediaRules
from ..families import MODALITIES
from .checks import is_finite


# Bytes of an answer: some for each reward, as a number may be written at length, and some around them
_BYTES_PER_REWARD, _BYTES_AROUND = 1024, 2**20


class RemoteReward:
    """
    A reward function that asks a server, with the signature of TRL's.

    Each request is a JSON object with lists of equal length: `prompts` and `completions` as text, `queries` (both
    together), and, where the dataset has them, `labels`, `images` (lists of PNG files in base64), `audios` (WAV) and
    `videos` (lists of lists of PNG frames). It is to return `{"rewards": [...]}`, one number per completion, `null`
    where the reward doesn't apply.

    Args:
        url (`str`):
            Where to send requests to.
        label_column (`str`, *optional*, defaults to `"labels"`):
            Column with the ground truth.
        batch_size (`int`, *optional*, defaults to `64`):
            Completions in a request.
        concurrency (`int`, *optional*, defaults to `4`):
            Requests under way at once.
        timeout (`float`, *optional*, defaults to `120.0`):
            Seconds in which an attempt must be answered, whole.
        retries (`int`, *optional*, defaults to `5`):
            How often to try again if the server is busy (408, 425, 429), fails (5xx), breaks off, answers with a page,
            or can't be reached; `None` for as long as `patience` lasts.
        patience (`float`, *optional*, defaults to `3600.0`):
            Seconds for all attempts of a request together. A run keeps its state while it waits.
        backoff (`float`, *optional*, defaults to `1.0`):
            Seconds before the first retry, doubled for each further one, up to a minute.
        sampling_rate (`int`, *optional*, defaults to `16000`):
            Rate of the audio that is sent, in Hz.
        name (`str`, *optional*, defaults to `"remote_reward"`):
            What its metrics are called, `rewards/<name>/mean` and so on.

    Raises:
        `RuntimeError`: When called, if the server can't be reached, refuses a request, or answers something else than
            one finite number or `null` per completion. The message names the server.
    """

    def __init__(
        self,
        url: str,
        *,
        label_column: str = "labels",
        batch_size: int = 64,
        concurrency: int = 4,
        timeout: float = 120.0,
        retries: int | None = 5,
        patience: float = 3600.0,
        backoff: float = 1.0,
        sampling_rate: int = 16000,
        name: str = "remote_reward",
    ):
        self.url = url
        self.label_column = label_column
        self.batch_size = batch_size
        self.concurrency = concurrency
        self.timeout = timeout
        self.sampling_rate = sampling_rate
        self.attempts = None if retries is None else retries + 1
        self.patience = patience
        self.backoff = backoff
        self.__name__ = name

    def __call__(
        self, prompts: list, completions: list, media_rules: MediaRules = DEFAULT_RULES, **columns
    ) -> list[float | None]:
        """
        Asks for the rewards of completions.

        Args:
            prompts (`list`):
                Prompts, text or messages with their media.
            completions (`list`):
                Completions, text or messages.
            media_rules ([`~data.rules.MediaRules`], *optional*):
                From where media may come, and how large they may be; trainers pass those of the run.
            columns:
                Columns of the dataset, one value per completion; labels and media are sent.

        Returns:
            `list[float | None]`: One reward per completion.
        """
        rows = []
        for i, prompt in enumerate(as_encoded(prompts)):
            names = [self.label_column] if has_media(prompt) else [self.label_column, *MEDIA_COLUMNS]
            given = {name: as_encoded(columns[name][i]) for name in names if columns.get(name)}
            rows.append({"prompt": prompt, **given})
        payload = self._payload(rows, completions, media_rules)
        parts = [
            {name: values[start : start + self.batch_size] for name, values in payload.items()}
            for start in range(0, len(prompts), self.batch_size)
        ]
        with requests.Session() as session:
            adapter = requests.adapters.HTTPAdapter(pool_maxsize=self.concurrency)
            session.mount("http://", adapter)
            session.mount("https://", adapter)
            with ThreadPoolExecutor(self.concurrency) as pool:
                rewards = list(pool.map(lambda part: self._ask(session, part), parts))
        return [reward for part in rewards for reward in part]

    def _ask(self, session: requests.Session, part: dict[str, list]) -> list[float | None]:
        n = len(part["completions"])
        try:
            answer = ask(
                "POST",
                self.url,
                json=part,
                session=session,
                seconds=self.patience,
                seconds_each=self.timeout,
                attempts=self.attempts,
                backoff=self.backoff,
                max_bytes=_BYTES_AROUND + n * _BYTES_PER_REWARD,
                is_usable=lambda answer: not (answer.status == 200 and answer.is_html),
            )
        except TooLarge:
            raise RuntimeError(
                f"The reward server {self._shown} answered with more than {n} rewards can take; it must return one "
                "number for each completion."
            ) from None
        except (NoAnswer, requests.RequestException) as error:
            reason = error if isinstance(error, NoAnswer) else type(error).__name__
            raise RuntimeError(f"The request to the reward server {self._shown} failed: {reason}.") from error
        return self._rewards(answer, n)

    @property
    def _shown(self) -> str:
        return without_credentials(self.url)

    def _rewards(self, answer: Answer, n: int) -> list[float | None]:
        text = answer.body[:200].decode(errors="replace")
        if answer.status != 200:
            raise RuntimeError(f"The reward server {self._shown} answered {answer.status}: {text!r}.")
        try:
            rewards = json.loads(answer.body)["rewards"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RuntimeError(
                f"The reward server {self._shown} answered {text!r} instead of {{'rewards': [...]}}."
            ) from error
        if not isinstance(rewards, list) or len(rewards) != n:
            raise RuntimeError(
                f"The reward server {self._shown} answered {str(rewards)[:200]} for {n} completions; it must return "
                "one reward for each."
            )
        for reward in rewards:
            if not (reward is None or is_finite(reward)):
                raise RuntimeError(
                    f"The reward server {self._shown} returned {repr(reward)[:200]}; rewards are finite numbers or "
                    "null."
                )
        return rewards

    def _payload(self, rows: list[dict[str, Any]], completions: list, media_rules: MediaRules) -> dict[str, list]:
        messages = [row["prompt"] for row in rows_to_messages(rows, rules=media_rules)]
        prompts = [as_text(strip_media(prompt), roles=False) for prompt in messages]
        texts = [as_text(completion, roles=False) for completion in completions]
        queries = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        payload: dict[str, list] = {"prompts": prompts, "completions": texts, "queries": queries}
        if any(self.label_column in row for row in rows):
            payload["labels"] = [row.get(self.label_column) for row in rows]
        encoded: dict[tuple, Any] = {}  # the completions of a prompt share its media

        def encode(ref: MediaRef):
            key = (id(ref.source), ref.kind, str(ref.options))
            if key not in encoded:
                encoded[key] = self._encode(ref)
            return encoded[key]

        for kind in MODALITIES:
            refs = [[ref for ref in iter_refs(prompt) if ref.kind == kind] for prompt in messages]
            if any(refs):
                payload[f"{kind}s"] = [[encode(ref) for ref in of_row] for of_row in refs]
        return payload

    def _encode(self, ref: MediaRef) -> str | list[str]:
        if ref.kind == "image":
            return _base64(png(load_image(ref)))
        if ref.kind == "video":
            return [_base64(png(frame)) for frame in load_video(ref)[0]]
        return _base64(wav(load_audio(ref, self.sampling_rate), self.sampling_rate))


def _base64(file: bytes) -> str:
    return base64.b64encode(file).decode()
