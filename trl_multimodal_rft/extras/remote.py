# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards from a server, over HTTP."""

import base64
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

import requests

from ..credentials import masked, without_credentials
from ..data.reading.decoding import load_audio, load_image, load_video
from ..data.reading.http import Answer, NoAnswer, TooLarge, ask, list_in, numbers_in
from ..data.reading.media_files import png, wav
from ..data.reading.refs import MediaRef, iter_refs
from ..data.reading.rules import DEFAULT_RULES, MediaRules
from ..data.rows.cells import cell_value
from ..data.rows.columns import as_text, rows_to_messages, strip_media
from ..modalities import MODALITIES
from ..rewards.calls import LARGEST_REWARD, Argument
from ..rewards.model import rows_of_batch


P = TypeVar("P")
T = TypeVar("T")

# Limits of a response in bytes: per reward, since numbers may have many digits, and for the text around rewards
_BYTES_PER_REWARD = 1024
_BYTES_AROUND = 2**20


@dataclass(eq=False, repr=False)
class Server:
    """Base class of reward functions that ask a server. For the fields, see [`RemoteReward`]."""

    url: str
    _: KW_ONLY
    concurrency: int = 4
    timeout: float = 120.0
    retries: int | None = 5
    patience: float = 3600.0
    backoff: float = 1.0
    name: str = "server"
    only_waits: ClassVar[bool] = True  # threads may call the function while the policy trains

    def __post_init__(self):
        self.__name__ = self.name

    @property
    def _public_url(self) -> str:
        return without_credentials(self.url)

    def _api_key(self) -> str | None:
        return None

    def _start_of(self, body: bytes) -> str:
        """Returns the start of a response for an error, without secrets, such as a key that the server repeats."""
        text = body.decode(errors="replace")
        key = self._api_key()
        if key is not None:
            for spelling in (key, json.dumps(key)[1:-1], quote(key, safe="")):
                text = text.replace(spelling, "***")
        return masked(text[:1000])[:200]

    def _ask_all(
        self, ask: Callable[[requests.Session, P], T], items: Iterable[P], api_key: str | None = None
    ) -> list[T]:
        with requests.Session() as session, ThreadPoolExecutor(self.concurrency) as pool:
            for scheme in ("http://", "https://"):
                session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=self.concurrency))
            if api_key is not None:
                session.headers["Authorization"] = f"Bearer {api_key}"
            try:
                return list(pool.map(partial(ask, session), items))
            except BaseException:
                pool.shutdown(cancel_futures=True)  # otherwise, the remaining calls would wait for the same server
                raise

    def _post(
        self,
        payload: dict[str, Any],
        session: requests.Session,
        max_bytes: int,
        too_large: str,
        is_usable: Callable[[Answer], bool],
    ) -> Answer:
        """
        Sends a request until a response is usable, and returns this response. Raises `RuntimeError` if no response is
        usable within the limits of attempts and time. For a response above `max_bytes`, the message of the error is
        `too_large`.
        """
        try:
            return ask(
                "POST",
                self.url,
                json=payload,
                session=session,
                seconds=self.patience,
                attempt_seconds=self.timeout,
                attempts=None if self.retries is None else self.retries + 1,
                backoff=self.backoff,
                max_bytes=max_bytes,
                is_usable=is_usable,
                shown=self._start_of,
            )
        except TooLarge:
            raise RuntimeError(too_large) from None
        except (NoAnswer, requests.RequestException) as error:
            reason = error if isinstance(error, NoAnswer) else type(error).__name__
            raise RuntimeError(f"The request to the reward server {self._public_url} failed: {reason}.") from error


@dataclass(eq=False, repr=False)
class RemoteReward(Server):
    """
    A reward function, with TRL's signature, that requests scores from a server.

    Each request is a JSON object with lists of equal length: `prompts` and `completions` as text, `queries` (both
    concatenated), and, if the dataset has them, `labels`, `images` (lists of PNG files in base64), `audios` (WAV) and
    `videos` (lists of lists of PNG frames), and, with a `speech_decoder`, `completion_audios` (WAV, `null` where there
    is no sound). The server must return `{"rewards": [...]}`, one number per completion,
    `null` where the reward doesn't apply.

    Args:
        url (`str`):
            URL of the server.
        label_column (`str`, *optional*, defaults to `"labels"`):
            Column with the ground truth.
        batch_size (`int`, *optional*, defaults to `64`):
            Maximum number of completions per request.
        concurrency (`int`, *optional*, defaults to `4`):
            Maximum number of concurrent requests.
        timeout (`float`, *optional*, defaults to `120.0`):
            Seconds until the response to an attempt must be complete.
        retries (`int`, *optional*, defaults to `5`):
            Number of retries if the server is busy (408, 425, 429), fails (5xx), closes the connection, responds with
            an HTML page, or is unreachable; `None` retries until `patience` is over.
        patience (`float`, *optional*, defaults to `3600.0`):
            Seconds for all attempts of a request together. Until then the run waits and loses nothing; afterwards it
            ends with an error.
        backoff (`float`, *optional*, defaults to `1.0`):
            Seconds before the first retry, doubled for each further one, up to a minute.
        sampling_rate (`int`, *optional*, defaults to `16000`):
            Sampling rate of the sent audio, in Hz.
        score_key (`str`, *optional*, defaults to `"rewards"`):
            Name of the list in the server's answers.
        name (`str`, *optional*, defaults to `"remote_reward"`):
            Name in metrics such as `rewards/<name>/mean`.

    Raises:
        `RuntimeError`: When called, if the server is unreachable, refuses a request, or doesn't return one finite
            number or `null` per completion. The message names the server.
    """

    _: KW_ONLY
    label_column: str = "labels"
    batch_size: int = 64
    sampling_rate: int = 16000
    score_key: str = "rewards"
    name: str = "remote_reward"

    def __call__(
        self,
        prompts: list,
        completions: list,
        media_rules: MediaRules = DEFAULT_RULES,
        completion_audio: list | None = None,
        **columns: Argument,
    ) -> list[float | None]:
        """Requests the rewards of completions, with labels and media. Trainers pass the `media_rules` of the run."""
        payload = self._payload(rows_of_batch(prompts, columns, [self.label_column]), completions, media_rules)
        if completion_audio is not None:
            encode = base64_encoder(self.sampling_rate)
            sounds = [None if sound is None else encode(sound_ref(sound)) for sound in completion_audio]
            payload["completion_audios"] = sounds
        return self.request(payload)

    def request(self, payload: dict[str, list]) -> list[float | None]:
        """
        Requests the rewards of a payload.

        Args:
            payload (`dict[str, list]`):
                Lists of equal length by the names of a request, see the class.

        Returns:
            `list[float | None]`: Rewards, `None` where the server answered `null`.

        Raises:
            `RuntimeError`: As for a call.
        """
        n = len(next(iter(payload.values())))
        batches = [
            {name: values[start : start + self.batch_size] for name, values in payload.items()}
            for start in range(0, n, self.batch_size)
        ]
        return [*chain.from_iterable(self._ask_all(self._request_rewards, batches))]

    def _request_rewards(self, session: requests.Session, batch: dict[str, list]) -> list[float | None]:
        n = len(next(iter(batch.values())))
        response = self._post(
            batch,
            session,
            max_bytes=_BYTES_AROUND + n * _BYTES_PER_REWARD,
            too_large=f"The response of the reward server {self._public_url} is too large for {n} rewards; it must "
            "return one number for each completion.",
            is_usable=lambda response: not (response.status == 200 and response.is_html),
        )
        text = self._start_of(response.body)
        if response.status != 200:
            raise RuntimeError(f"The reward server {self._public_url} answered {response.status}: {text!r}.")
        try:
            rewards = list_in(response.body, self.score_key, "rewards")
            return numbers_in(rewards, n, "reward", -LARGEST_REWARD, LARGEST_REWARD, optional=True)
        except ValueError as error:
            raise RuntimeError(
                f"The reward server {self._public_url} answered {text!r} for {n} completions ({error}); it must "
                f"return {{{self.score_key!r}: [...]}} with one finite number, or null, for each completion, and no "
                "error."
            ) from error

    def _payload(self, rows: list[dict[str, Any]], completions: list, media_rules: MediaRules) -> dict[str, list]:
        """Returns the lists of a request (see the class) for all completions, with media of their full size."""
        messages = [row["prompt"] for row in rows_to_messages(rows, rules=media_rules.without_budgets())]
        prompts = [as_text(strip_media(prompt), with_roles=False) for prompt in messages]
        texts = [as_text(completion, with_roles=False) for completion in completions]
        queries = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        payload: dict[str, list] = {"prompts": prompts, "completions": texts, "queries": queries}
        if any(self.label_column in row for row in rows):
            payload["labels"] = [cell_value(row.get(self.label_column)) for row in rows]
        encode = base64_encoder(self.sampling_rate)
        for modality in MODALITIES:
            refs = [[ref for ref in iter_refs(prompt) if ref.modality == modality] for prompt in messages]
            if any(refs):
                payload[f"{modality}s"] = [[encode(ref) for ref in refs_of_row] for refs_of_row in refs]
        return payload


def sound_ref(sound: dict[str, Any]) -> MediaRef:
    """Returns a reference to an item of `completion_audio`."""
    return MediaRef("audio", sound, {}, "completion_audio", 0)


def base64_encoder(sampling_rate: int) -> Callable[[MediaRef], str | list[str]]:
    """Returns a function that encodes media, each once: images as PNG, audio as WAV, videos as PNG files of frames."""
    encoded: dict[tuple[int, str, str], str | list[str]] = {}

    def encode(ref: MediaRef) -> str | list[str]:
        # The rows of a prompt's completions hold the same object as `source`
        key = (id(ref.source), ref.modality, str(ref.options))
        if key not in encoded:
            if ref.modality == "image":
                encoded[key] = _base64(png(load_image(ref)))
            elif ref.modality == "video":
                encoded[key] = [_base64(png(frame)) for frame in load_video(ref)[0]]
            else:
                encoded[key] = _base64(wav(load_audio(ref, sampling_rate), sampling_rate))
        return encoded[key]

    return encode


def _base64(file: bytes) -> str:
    return base64.b64encode(file).decode()
