# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Clients of vLLM's servers: checks of the servers' settings, requests with media, and resets of caches.

Servers get token ids and processed media. The trainer processes media with vLLM's renderer and the server's settings.
Raw media are never sent, since HTTP requests would need them as encoded files, and lack a field for processor options.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import accumulate
from types import TracebackType
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import CONFIG_MAPPING, PreTrainedConfig
from trl.generation.vllm_client import VLLMClient

from ..credentials import without_credentials
from ..data.reading.http import Answer
from ..data.reading.refs import MediaError
from ..printable import Foreign
from .vllm_requests import (
    ServerSample,
    WarnOnce,
    answer_of,
    at_once,
    completions_in,
    content_of,
    lost_error,
    refusal,
    scores_in,
    until_answered,
)
from .vllm_versions import engine_obstacle


if engine_obstacle() is None:
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal.inputs import PlaceholderRange
    from vllm.renderers import BaseRenderer, renderer_from_config

    from .vllm_versions import mm_serde

T = TypeVar("T")

# Settings of a server that affect processed media: in its model config, and in its multimodal config
_MODEL_KEYS = ("tokenizer_mode", "config_format", "hf_overrides", "model_impl", "max_model_len")
_MEDIA_KEYS = """
mm_processor_kwargs mm_device_do_normalize video_pruning_rate video_pruning_method language_model_only
""".split()
_GENERATE_PATH = "/inference/v1/generate"
_INFO_PATH = "/server_info?config_format=json"
# Limits of an answer's size in bytes: for the log-probability of a token, and for the rest of the answer
_BYTES_PER_LOGP = 2**10
_BYTES_PER_ANSWER = 2**20
# Fields of a config that must be equal for two models to exchange weights
_SHAPE_FIELDS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


class RequestOptions(TypedDict, total=False):
    """HTTP method of a request, and maximum size of its answer in bytes."""

    method: str
    max_bytes: int


class EngineRequest(NamedTuple):
    """Request for completions of a prompt."""

    ids: list[int]
    # The rendered prompt; after `for_server`, its features in the servers' format, or `None` without media
    rendered: dict[str, Any] | None
    count: int  # number of completions
    max_tokens: int  # maximum length of a completion
    seed: int | None

    def parameters(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns vLLM's sampling parameters for this request. `options` are those of all requests."""
        return {**options, "seed": self.seed, "max_tokens": self.max_tokens, "n": self.count}

    def for_server(self) -> "EngineRequest":
        """Returns the request with media in the format of servers. Large media take time to convert."""
        return self._replace(rendered=server_features(self.rendered or {}))


class ServerClient(VLLMClient):
    """TRL's client, with a `timeout` in seconds for each attempt of a call, and for all waits between attempts."""

    def __init__(self, base_url: str, timeout: float, group_port: int = 51216):
        self.timeout = timeout
        self.warn = WarnOnce()
        super().__init__(base_url=base_url, connection_timeout=timeout, group_port=group_port)

    def answer(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        patience: float | None = None,
        attempt_timeout: float | None = None,
        **request_options: Unpack[RequestOptions],
    ) -> Answer:
        """
        Returns the server's answer. `attempt_timeout` limits each attempt, and `patience` all waits between attempts,
        in seconds. Both are `timeout` by default.
        """
        seconds = self.timeout if attempt_timeout is None else attempt_timeout
        patience = self.timeout if patience is None else patience
        return until_answered(
            lambda _: answer_of(self.base_url, path, body, seconds=seconds, **request_options), patience, self.warn
        )

    def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        patience: float | None = None,
        **request_options: Unpack[RequestOptions],
    ) -> dict[str, Any]:
        """Returns the content of the server's answer, see [`answer`]."""
        return content_of(self.answer(path, body, patience, **request_options), self.base_url, path)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Waits for the server to be up."""
        self.call("/health", method="GET")

    def get_server_info(self) -> dict[str, Any]:
        """Returns the server's settings."""
        try:
            info = self.call(_INFO_PATH, method="GET")["vllm_config"]
        except RuntimeError as error:
            raise RuntimeError(f"{error} Start it with `VLLM_SERVER_DEV_MODE=1` in its environment.") from error
        settings = info["model_config"]
        settings.pop("trust_remote_code", None)  # the trainer's counts
        settings["model"] = Foreign(str(settings["model"]))
        settings["revision"] = None if settings["revision"] is None else Foreign(str(settings["revision"]))
        return info

    def _get(self, url: str, **options: float) -> dict[str, Any]:
        return self.call(url.removeprefix(self.base_url), method="GET")

    def _post(self, url: str, json: dict[str, Any] | None = None, **options: float) -> dict[str, Any]:
        return self.call(url.removeprefix(self.base_url), json)


class ServerGroup(ServerClient):
    """
    Client of several servers, which get the weights by one broadcast at `group_port` and must have different seeds.
    Rank 0 has it, and samples with the first server. Other ranks have a [`ServerClient`].
    """

    def __init__(self, urls: Sequence[str], group_port: int, timeout: float):
        super().__init__(urls[0], timeout, group_port=group_port)
        self.clients = [ServerClient(url, timeout) for url in urls]
        seeds = [client.get_server_info()["model_config"]["seed"] for client in self.clients]
        if len(set(seeds)) < len(seeds):
            raise ValueError(
                f"The vLLM servers {', '.join(map(without_credentials, urls))} have the seeds {seeds}. Servers with "
                "equal seeds draw the same random numbers; start each server with a different `--seed`."
            )

    def get_world_size(self) -> int:
        """Returns the number of workers of all servers."""
        return sum(client.get_world_size() for client in self.clients)

    def reset_prefix_cache(self) -> None:
        """Resets the prefix caches of all servers."""
        for client in self.clients:
            client.call("/reset_prefix_cache")

    def reset_encoder_caches(self) -> None:
        """Resets the encoder caches of all servers, which hold outputs by old weights (huggingface/trl#7198)."""
        for client in self.clients:
            client.call("/reset_encoder_cache")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses all servers within the context. They drop their caches, and continue their requests afterwards."""
        with ExitStack() as stack:
            for client in self.clients:
                stack.push(partial(_resume, client))  # resumes even if another server fails
                client.call("/pause?mode=keep")
            yield

    def _post(self, url: str, json: dict[str, Any] | None = None, **options: float) -> dict[str, Any]:
        """Posts to all servers at once, as they wait for each other. Returns the first server's answer."""
        path = url.removeprefix(self.base_url)
        bodies = [json] * len(self.clients)
        if path == "/init_weight_transfer_engine":
            assert json is not None
            # This process has rank 0 of the broadcast. Workers of servers follow: after 2 workers, the offset is 3
            offsets = accumulate((client.get_world_size() for client in self.clients[:-1]), initial=1)
            bodies = [{"init_info": {**json["init_info"], "rank_offset": offset}} for offset in offsets]
        # Pairs (client, body). Calls aren't retried, as a server may have received a part of the weights
        pairs = zip(self.clients, bodies, strict=True)
        return at_once(lambda pair: pair[0].call(path, pair[1], patience=0.0), pairs)[0]

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        """Sends weights. After an error, this rank still gathers the other weights, as the other ranks wait for it."""
        try:
            super().update_named_params(metadata, named_params)
        except Exception:
            for _ in named_params:
                pass
            raise


def _resume(
    client: ServerClient, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """
    Resumes a paused server, as `__exit__` of a context. An error of resuming must not hide the `error` that ended the
    pause.
    """
    with nullcontext() if error is None else suppress(Exception):
        client.call("/resume", patience=None if error is None else 0.0)


def on_all_ranks(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Calls `work` on all ranks, and returns this rank's result. If one rank fails, all raise that rank's error."""
    if accelerator.num_processes == 1:
        return work()
    result = None
    error = None
    try:
        result = work()
    except Exception as exception:
        error = exception
    n_failed = torch.tensor([error is not None], dtype=torch.int32, device=accelerator.device)
    if accelerator.reduce(n_failed).item():
        report = (isinstance(error, ValueError), f"Process {accelerator.process_index}: {error}")
        is_value_error, message = gather_object([] if error is None else [report])[0]
        raise (ValueError if is_value_error else RuntimeError)(message) from error
    return cast(T, result)


def check_server_settings(client: ServerClient, info: dict[str, Any], config: PreTrainedConfig, dtype: str) -> None:
    """
    Raises a `ValueError` if a server can't take processed media, or if its version, log-probabilities, dtype or model
    don't fit the trainer's.
    """
    check_protocol(client)
    settings = info["model_config"]
    server_dtype = settings["dtype"].removeprefix("torch.")
    problem = None
    if settings["logprobs_mode"] != "processed_logprobs":
        problem = (
            f"returns {settings['logprobs_mode']} instead of the log-probabilities by which it samples; start it with "
            "`--logprobs-mode processed_logprobs`"
        )
    elif server_dtype != dtype:
        problem = (
            f"computes in {server_dtype}, and the trainer in {dtype}, so they round differently; start the server "
            f"with `--dtype {dtype}`"
        )
    else:
        differences = _shape_differences(settings, config)
        if differences:
            problem = (
                f"serves '{settings['model']}', another model than the trainer's: {differences}; start it with the "
                "trainer's model"
            )
    if problem is not None:
        raise ValueError(f"The vLLM server at {without_credentials(client.base_url)} {problem}.")


def check_protocol(client: ServerClient) -> None:
    """Raises a `ValueError` if a server runs another version of vLLM, or can't take processed media."""
    version = client.call("/version", method="GET")["version"]
    if version.split("+")[0] != vllm.__version__.split("+")[0]:
        raise ValueError(
            f"The vLLM server at {without_credentials(client.base_url)} runs vLLM {version} and the trainer "
            f"{vllm.__version__}, which may process media differently; install the same version for both."
        )
    if client.answer(_GENERATE_PATH, {}).status == 404:
        raise ValueError(
            f"The vLLM server at {without_credentials(client.base_url)} takes no features of media; start it with "
            "`--enable-scale-out`."
        )


def _shape_differences(settings: dict[str, Any], config: PreTrainedConfig) -> str:
    """The text is empty if the config can't be read. Reads `config.json`, and no code beside it."""
    revision = settings["revision"]
    source = {} if revision is None else {"revision": revision.for_loading()}
    try:
        entries, _ = PreTrainedConfig.get_config_dict(settings["model"].for_loading(), **source)
    except (OSError, ValueError):
        return ""  # a path on another machine
    model_type = entries.get("model_type")
    if model_type not in CONFIG_MAPPING:  # only code beside the config could tell more
        return "" if model_type == config.model_type else f"`model_type` is {model_type}, not {config.model_type}"
    try:
        server_text = CONFIG_MAPPING[model_type].from_dict(entries).get_text_config()
    except ValueError:
        return ""  # of another version of transformers
    trainer_text = config.get_text_config()
    values = {name: (getattr(server_text, name, None), getattr(trainer_text, name, None)) for name in _SHAPE_FIELDS}
    return ", ".join(
        f"`{name}` is {actual}, not {expected}" for name, (actual, expected) in values.items() if actual != expected
    )


def clock_of(url: str, timeout: float) -> tuple[float, float]:
    """
    Returns a server's start time and current time, in seconds of its clock. Raises a [`RequestLost`] if the server
    doesn't answer.
    """
    answer = answer_of(url, _INFO_PATH, seconds=timeout, method="GET")
    start = str(content_of(answer, url, _INFO_PATH)["vllm_config"].get("instance_id"))  # a time in nanoseconds
    now = parsedate_to_datetime(answer.date).timestamp() if answer.date else math.inf
    # By these values for an unknown start or current time, a server never counts as restarted
    return float(start) / 1e9 if start.isdecimal() else 0.0, now


def server_renderer(info: dict[str, Any], model: str, revision: str | None, trust_remote_code: bool) -> "BaseRenderer":
    """Returns a renderer that processes prompts as the server would, without an engine."""
    settings = info["model_config"]
    media_settings = settings["multimodal_config"] or {}
    args = EngineArgs(
        model=model,
        revision=revision,
        trust_remote_code=trust_remote_code,
        dtype=settings["dtype"].removeprefix("torch."),
        mm_processor_cache_gb=0,  # each prompt is rendered once
        limit_mm_per_prompt=media_settings.get("limit_per_prompt", {}),
        **{name: settings[name] for name in _MODEL_KEYS},
        **{name: media_settings[name] for name in _MEDIA_KEYS if name in media_settings},
    )
    return renderer_from_config(args.create_engine_config())


def server_features(rendered: dict[str, Any]) -> dict[str, Any] | None:
    """
    Returns a prompt's processed media and the positions of their embeddings, or `None` without media. If the process
    that read the row has computed them, `rendered` has them as `"features"`.
    """
    if "mm_kwargs" not in rendered:
        return rendered.get("features")
    return {
        "mm_hashes": dict(rendered["mm_hashes"]),
        "mm_placeholders": {
            modality: [_embedding_range(placeholder_range, modality) for placeholder_range in ranges]
            for modality, ranges in rendered["mm_placeholders"].items()
        },
        "kwargs_data": {
            modality: [mm_serde.encode_mm_kwargs_item(item) for item in items]
            for modality, items in rendered["mm_kwargs"].items()
        },
    }


def _embedding_range(placeholder_range: "PlaceholderRange", modality: str) -> dict[str, int]:
    """Returns the offset and length of the embeddings of one image, sound or video, without surrounding tokens."""
    offset = placeholder_range.offset
    length = placeholder_range.length
    is_embed = placeholder_range.is_embed
    if is_embed is not None:
        first, last = is_embed.nonzero().flatten()[[0, -1]].tolist()
        if not is_embed[first : last + 1].all():
            raise MediaError(
                f"This model has text among the placeholders of one {modality}, which vLLM's server doesn't support; "
                "set `vllm_mode='colocate'`."
            )
        offset += first
        length = last - first + 1
    return {"offset": offset, "length": length}


def server_completions(
    url: str,
    model: str | None,
    request: EngineRequest,
    options: dict[str, Any],
    *,
    timeout: float,
    vocab_size: int,
    placeholders: Collection[int] = (),
    salt: str | None = None,
) -> list[ServerSample]:
    """
    Returns completions from a server. Only requests with the same `salt` share a cached prefix. Raises a
    [`RequestLost`] if no fitting answer comes within `timeout` seconds, and a `RuntimeError` if the server refuses the
    request.
    """
    n_logps = request.count * request.max_tokens * (1 + (options.get("logprobs") or 0))
    body = {**_request_body(model, request, options), **({} if salt is None else {"cache_salt": salt})}
    end_ids = options.get("stop_token_ids") or ()

    def read(answer: bytes) -> list[ServerSample]:
        return completions_in(answer, request.count, request.max_tokens, vocab_size, placeholders, end_ids)

    # A restarted server lacks the adapter `model`; the next attempt loads it
    lost_statuses = () if model is None else (404,)
    return _generated(url, body, timeout, n_logps, read, lost_statuses)


def prompt_scores(
    client: ServerClient, requests: Sequence[EngineRequest], counts: Sequence[int], k: int, vocab_size: int
) -> list[list[dict[int, float]]]:
    """
    Returns the log-probabilities of the `k` most likely tokens at the last positions of prompts, `counts` of each. The
    probabilities are normalized over the whole vocabulary, at a temperature of 1.
    """

    def score(item: tuple[EngineRequest, int]) -> list[dict[int, float]]:
        request, count = item
        # TRL's client can't read the answers of vLLM 0.32 and later
        body = _request_body(client.model, request, {"prompt_logprobs": k, "detokenize": False})
        n_logps = len(request.ids) * (1 + k)
        read = partial(scores_in, ids=request.ids, n=count, k=k, vocab_size=vocab_size)
        attempt = partial(_generated, client.base_url, body, client.timeout, n_logps, read)
        return until_answered(lambda _: attempt(), client.timeout, client.warn)

    return at_once(score, zip(requests, counts, strict=True))


def _generated(
    url: str,
    body: dict[str, Any],
    timeout: float,
    n_logps: int,
    read: Callable[[bytes], T],
    lost_statuses: Collection[int] = (),
) -> T:
    """
    Requests tokens or scores, and returns what `read` finds in the answer with `n_logps` log-probabilities. Raises a
    [`RequestLost`] if there's no answer, an answer with one of the `lost_statuses`, or one that `read` refuses by a
    `ValueError`. Raises a `RuntimeError` for a refusal.
    """
    answer = answer_of(
        url, _GENERATE_PATH, body, seconds=timeout, max_bytes=_BYTES_PER_ANSWER + n_logps * _BYTES_PER_LOGP
    )
    if answer.status in lost_statuses:
        raise lost_error(url, _GENERATE_PATH, answer.status, answer)
    if answer.status != 200:
        raise refusal(answer, url, _GENERATE_PATH)
    try:
        return read(answer.body)
    except ValueError as error:
        raise lost_error(url, _GENERATE_PATH, error, answer) from None


def _request_body(model: str | None, request: EngineRequest, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": model,
        "token_ids": request.ids,
        "features": request.rendered,
        # 2 is FINAL_ONLY. Otherwise, completions that end before the last one may be missing (vllm-project/vllm#52399)
        "sampling_params": {**request.parameters(options), "output_kind": 2},
    }
