# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""vLLM's servers, which sample for the trainer's ranks."""

import math
import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any, cast

from accelerate.utils import broadcast_object_list
from trl.generation.vllm_generation import VLLMGeneration

from ..credentials import without_credentials
from .vllm import MultimodalVLLMGeneration
from .vllm_adapters import EngineAdapter, load_adapter
from .vllm_client import (
    EngineRequest,
    ServerClient,
    ServerGroup,
    check_server_settings,
    clock_of,
    on_all_ranks,
    server_completions,
    server_renderer,
)
from .vllm_prompts import processors_unchecked
from .vllm_requests import RequestLost, ServerSample, WarnOnce, at_once, until_answered
from .vllm_versions import engine_obstacle


if engine_obstacle() is None:
    from vllm.lora.request import LoRARequest
    from vllm.renderers import BaseRenderer

# A counter of a server, in Prometheus' text format
_COUNTER = re.compile(r"^(vllm:\w+)_total(?:{.*})? (\d+(?:\.\d+)?(?:e[+-]?\d+)?)", re.MULTILINE)
_METRICS_SECONDS = 10.0  # time limit for reading a server's counters


class Servers(MultimodalVLLMGeneration):
    """
    vLLM's servers (`vllm_mode="server"`). Each rank samples with one of them, and rank 0 sends the weights to all, or
    an adapter by `adapter_folder`. No completion may have the ids `placeholders`.
    """

    def __init__(
        self,
        *args,
        placeholders: Collection[int] = (),
        adapter_folder: str | None = None,
        max_staleness: int = 0,
        **kwargs,
    ):
        self._placeholders = placeholders
        self._adapter_folder = adapter_folder
        self._max_staleness = max_staleness
        self._connection_times: dict[str, float] = {}  # by address, the time of connection on the server's clock
        self._warn = WarnOnce()
        self.vllm_client: Any = None  # client of this rank's server; on rank 0, of all servers
        # Index, over the whole run, of the generation batch that is due at the next sync
        self.generation_batch_index = 0
        # Adapters on servers: the index of the generation batch that was due at their sync, and their folder. An
        # adapter stays on the servers as long as requests in flight may use it
        self._adapters: list[tuple[int, Path]] = []
        super().__init__(*args, **kwargs)

    def _start(self) -> "BaseRenderer":
        with processors_unchecked():
            info = self._connect()
        self._speculates = bool(info.get("speculative_config"))
        self._options()  # called only for its error about unsupported options
        name = cast(str, self.model.name_or_path)
        return server_renderer(info, name, self._engine_kwargs["revision"], self.trust_remote_code)

    def _connect(self) -> dict[str, Any]:
        """Connects each rank with its server, and rank 0 with all."""
        rank = self.accelerator.process_index
        n_ranks = self.accelerator.num_processes
        timeout = self.server_timeout
        urls = self._urls
        if len(urls) > n_ranks and self._max_staleness == 0:
            raise ValueError(
                f"`vllm_server_base_url` has {len(urls)} servers for {n_ranks} processes, and each process uses only "
                "one server; leave out the other servers."
            )

        def connect() -> tuple[ServerClient, dict[str, Any]]:
            rank_url = urls[rank % len(urls)]
            client = ServerClient(rank_url, timeout) if rank else ServerGroup(urls, self.group_port, timeout)
            info = client.get_server_info()
            check_server_settings(client, info, self.model.config, self._engine_kwargs["dtype"])
            used_urls = urls if rank == 0 or self._max_staleness > 0 else [rank_url]
            self._connection_times = {url: clock_of(url, timeout)[1] for url in used_urls}
            return client, info

        self.vllm_client, info = on_all_ranks(self.accelerator, connect)
        self._on_main_process(lambda: self.vllm_client.init_communicator(self.accelerator.device))
        return info

    @property
    def _urls(self) -> Sequence[str]:
        return (self.server_base_url or f"http://{self.server_host}:{self.server_port}").split(",")

    def _on_main_process(self, work: Callable[[], None]) -> None:
        on_all_ranks(self.accelerator, work if self.accelerator.is_main_process else lambda: None)

    @property
    def is_collective(self) -> bool:
        return True  # after each call, ranks exchange errors, so that all of them raise the error of one rank's server

    # Samples

    def _complete(self, requests: list[EngineRequest], options: dict[str, Any]) -> list[ServerSample]:
        def complete(request: EngineRequest) -> list[ServerSample]:
            request = request.for_server()  # media are converted while other requests are answered
            url = self.vllm_client.base_url
            patience = self.server_timeout
            return until_answered(
                lambda attempt: self._request_completions(url, request, options, attempt), patience, self._warn
            )

        answers = on_all_ranks(self.accelerator, lambda: at_once(complete, requests))
        self.check_restarts()
        return [*chain.from_iterable(answers)]

    def ask(self, request: EngineRequest, salt: str, request_index: int, attempt: int) -> list[ServerSample]:
        """
        Returns completions from a server, see [`server_completions`]. The server depends on the rank, `request_index`
        and `attempt`, so that requests are spread over servers, and a retry goes to the next server.
        """
        rank = self.accelerator.process_index
        n_ranks = self.accelerator.num_processes
        urls = self._urls
        url = urls[(rank + request_index * n_ranks + attempt) % len(urls)]
        try:
            return self._request_completions(url, request, self._options(), attempt, salt)
        except RequestLost as error:
            # A timeout ends the run, unless it is the first attempt's and another server can answer the next attempt
            error.timed_out = error.timed_out and (attempt > 0 or len(urls) == 1)
            raise

    def _request_completions(
        self, url: str, request: EngineRequest, options: dict[str, Any], attempt: int, salt: str | None = None
    ) -> list[ServerSample]:
        """A retry checks that the server still has the trained weights."""
        timeout = self.server_timeout * (1 + self._max_staleness)
        adapter = self._adapter_request
        if attempt > 0 and adapter is not None:  # a restarted server doesn't know the adapter
            load_adapter(url, Path(adapter.lora_path), timeout)
        completions = server_completions(
            url,
            None if adapter is None else adapter.lora_name,
            request,
            options,
            timeout=timeout,
            vocab_size=self.prompts.renderer.model_config.get_vocab_size(),
            placeholders=self._placeholders,
            salt=salt,
        )
        if attempt > 0:
            self._check_not_restarted(url)
        return completions

    def _check_not_restarted(self, url: str) -> None:
        """
        Raises a `RuntimeError` if a server was restarted and has lost the trained weights. A lost adapter needs no
        check: each version has its own name, and a restarted server refuses unknown names.
        """
        restart_loses_weights = self.unmerged_adapter is None or self._needs_base_weights
        # A server that started after the connection was restarted. One second is added, because the time of the
        # connection was rounded down to whole seconds
        if restart_loses_weights and clock_of(url, self.server_timeout)[0] > self._connection_times[url] + 1:
            raise RuntimeError(
                f"The vLLM server at {without_credentials(url)} was started again and has lost the trained "
                "weights, so it would sample with the weights of its folder; resume the run, which sends the trained "
                "weights again."
            )

    def check_restarts(self) -> None:
        """Raises a `RuntimeError` if a server has lost the trained weights by a restart. All ranks must call this."""

        def check() -> None:
            for url in self._connection_times:
                # An unreachable server is no error here, as no request is waiting for it at this point
                with suppress(RequestLost):
                    self._check_not_restarted(url)

        self._on_main_process(check)

    def _counters(self) -> Mapping[str, float | None]:
        """Sums the counters over the engines of this rank's server."""
        counters: dict[str, float] = defaultdict(float)
        answer = self.vllm_client.answer("/metrics", method="GET", attempt_timeout=_METRICS_SECONDS, patience=0.0)
        for name, value in _COUNTER.findall(answer.body.decode(errors="replace")):
            counters[name] += float(value)
        return counters

    # Weights

    def _load(self, adapter: EngineAdapter | None, sends_weights: bool) -> None:
        with ExitStack() as stack:
            if self._max_staleness > 0:  # servers sample during updates
                self._on_main_process(lambda: stack.enter_context(self.vllm_client.paused()))
            # A server that is gone must raise an error here. Later, ranks would wait for it in a collective
            self._on_main_process(lambda: self.vllm_client.reset_encoder_caches())
            self.check_restarts()
            if sends_weights:
                on_all_ranks(self.accelerator, lambda: VLLMGeneration.sync_weights(self))
            if adapter is not None:
                self._load_adapter(adapter)
            self._on_main_process(stack.close)

    def _load_adapter(self, adapter: EngineAdapter) -> None:
        # A unique name, as other runs may use the servers
        [name] = broadcast_object_list([f"policy-{uuid.uuid4().hex}"])
        folder = Path(self._adapter_folder or "", name).absolute()
        is_main = self.accelerator.is_main_process
        if is_main:
            folder.mkdir(parents=True)
        adapter.write(folder if is_main else None)
        # Requests in flight use adapters from batch index `oldest_index` on. Without asynchronous sampling, none is in
        # flight
        oldest_index = self.generation_batch_index - self._max_staleness if self._max_staleness > 0 else math.inf
        old_folders = [path for batch_index, path in self._adapters if batch_index < oldest_index]
        current_adapters = [adapter_entry for adapter_entry in self._adapters if adapter_entry[0] >= oldest_index]
        self._adapters = [*current_adapters, (self.generation_batch_index, folder)]
        self._on_main_process(lambda: adapter.replace_on_servers(self.vllm_client.clients, folder, old_folders))
        self._adapter_request = LoRARequest(name, 1, str(folder))
        self.vllm_client.model = name
