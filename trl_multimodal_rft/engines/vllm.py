# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sampling with vLLM: TRL's engine, extended to media, LoRA adapters and weights that are named as in checkpoints."""

import math
import re
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, is_peft_model
from transformers import GenerationConfig
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration, empty_cache

from ..credentials import without_credentials
from ..encoding.processors import tokenizer_of
from ..encoding.prompts import EncodedPrompt
from ..models.wrapped import replaced, unwrapped
from .vllm_adapters import MERGED, EngineAdapter, load_adapter
from .vllm_prompts import EnginePrompts, processors_unchecked
from .vllm_requests import RequestLost, ServerSample, WarnOnce, at_once, logp_or_none, until_answered
from .vllm_server import (
    EngineRequest,
    ServerClient,
    ServerGroup,
    check_server_settings,
    clock_of,
    on_all_ranks,
    server_completions,
    server_renderer,
)
from .vllm_versions import SUPPORTED, engine_obstacle
from .vllm_weights import checkpoint_weights, gathered_weights, load_and_find_unread


logger = get_logger(__name__)

# A counter of a server, in Prometheus' text format
_COUNTER = re.compile(r"^(vllm:\w+)_total(?:{.*})? (\d+(?:\.\d+)?(?:e[+-]?\d+)?)", re.MULTILINE)
_METRICS_SECONDS = 10.0  # time limit for reading a server's counters

if engine_obstacle() is None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.models.utils import StageMissingLayer
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    from .vllm_versions import LOADS_BENEATH_ADAPTERS


def ends_of_text(ids: Sequence[int]) -> dict[str, Any]:
    """Returns sampling parameters by which vLLM ends completions at `ids`, not at the ids in the model's folder."""
    return {"stop_token_ids": [*ids], "ignore_eos": True}


def sampling_parameters(config: GenerationConfig) -> dict[str, Any]:
    """Returns vLLM's sampling parameters for a generation config."""
    random_sampling = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
    return {
        **(random_sampling if config.do_sample else {"temperature": 0.0}),
        "max_tokens": config.max_new_tokens,
        **({} if config.eos_token_id is None else ends_of_text(config.eos_token_id)),
        "logit_bias": dict.fromkeys(config.suppress_tokens or (), -100.0),
        "detokenize": False,
    }


class MultimodalVLLMGeneration(VLLMGeneration):
    """
    TRL's engine for prompts with media. A prompt's media are processed once for consecutive completions and for all
    turns of a conversation.
    """

    # `placeholders` are ids that no completion may have. Servers read adapters from `adapter_folder`.
    def __init__(
        self,
        engine_kwargs: dict[str, Any] | None = None,
        adapter: EngineAdapter | None = None,
        adapter_folder: str | None = None,
        while_sampling: Callable[[], AbstractContextManager] = nullcontext,
        max_staleness: int = 0,
        placeholders: Collection[int] = (),
        **kwargs,
    ):
        self._placeholders = placeholders
        self._connection_times: dict[str, float] = {}  # by address, the time of connection on the server's clock
        self._warn = WarnOnce()
        self._max_staleness = max_staleness
        self._engine_kwargs = engine_kwargs or {}
        self._adapter = adapter
        self._adapter_folder = adapter_folder
        self._while_sampling = while_sampling  # returns a context around the engine's sampling
        self.vllm_client: Any = None  # client of this rank's server; on rank 0, of all servers
        self._adapter_request: LoRARequest | None = None  # the adapter in the engine, after the first sync
        # Index, over the whole run, of the generation batch that is due at the next sync
        self.generation_batch_index = 0
        # Adapters on servers: the index of the generation batch that was due at their sync, and their folder. An
        # adapter stays on the servers as long as requests in flight may use it
        self._adapters: list[tuple[int, Path]] = []
        self._takes_all_weights = False  # whether the first sync has shown that vLLM has a place for all weights
        self._speculates = bool(self._engine_kwargs.get("speculative_config"))
        self._n_drafts = self._n_accepted = 0.0  # the engine's counters at the last call of `acceptance_length`
        super().__init__(**kwargs)

    def _init_vllm(self):
        obstacle = engine_obstacle()
        if obstacle is not None:
            raise ImportError(f"`use_vllm` is set, but {obstacle}")
        adapter_kwargs = self._adapter.engine_kwargs if self._adapter else {}
        if self._needs_base_weights and self.mode == "colocate" and not LOADS_BENEATH_ADAPTERS:
            raise ValueError(
                "An adapter with 4-bit weights or `vllm_enable_sleep_mode=True` needs vLLM 0.28 or later; install it, "
                f"or set {MERGED}."
            )
        try:
            # TRL constructs `LLM` with fixed arguments. The replacement adds arguments, or replaces them
            engine_class = getattr(vllm_generation, "LLM", None)
            engine_kwargs = {**adapter_kwargs, **self._engine_kwargs}
            with (
                replaced(vllm_generation, LLM=lambda **args: engine_class(**{**args, **engine_kwargs})),
                processors_unchecked(),
            ):
                if self.mode == "server":
                    info = self._connect()
                else:
                    info = {}
                    super()._init_vllm()
        except ValueError as error:
            if "does not support LoRA" in str(error):
                raise ValueError(f"{error} Set {MERGED}, which merges the adapter into the weights.") from error
            raise
        if self.mode == "server":
            self._speculates = bool(info.get("speculative_config"))
            self._with_bad_words(self.sampling)  # called only for its error about unsupported options
            name = cast(str, self.model.name_or_path)
            renderer = server_renderer(info, name, self._engine_kwargs["revision"], self.trust_remote_code)
        else:
            renderer = self.llm.renderer
        self.prompts = EnginePrompts(renderer, self.processing_class, self.mode)

    def _connect(self) -> dict[str, Any]:
        """Connects each rank with its server, and rank 0 with all. Returns the settings of this rank's server."""
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
    def dtype(self) -> torch.dtype:
        """Dtype of the engine's forward."""
        return self.prompts.renderer.model_config.dtype

    # Samples

    def generate(
        self,
        prompts: Sequence[list[int] | dict[str, Any] | EncodedPrompt],
        images: Sequence[list | None] | None = None,
        num_generations: int = 1,
        profiler: AbstractContextManager | None = None,
        sampling: dict[str, Any] | None = None,
        room: Sequence[int] | None = None,
    ) -> tuple:
        """
        Samples completions. `images` belong to prompts that aren't encoded. `room` has the maximum number of tokens of
        each completion. `sampling` are vLLM's sampling parameters, by default those of training. `num_generations`
        isn't read: `prompts` has an entry per completion.

        Returns prompt ids, completion ids, log-probabilities, and the ids of the log-probabilities. As in TRL, the
        last two have a list for each token, here of one entry.
        """
        options = self._with_bad_words(self.sampling if sampling is None else {"logprobs": self.logprobs, **sampling})
        seed = options.pop("seed", None)
        if sampling is None and seed is not None:
            seed += self.accelerator.process_index * len(prompts)  # unique over ranks, as a group may straddle them
        max_tokens = options["max_tokens"]
        requests = self._requests(
            prompts, images, seed, [min(n, max_tokens) for n in room or [max_tokens] * len(prompts)]
        )
        # A sleeping engine has no weights
        if self.mode == "colocate" and self.enable_sleep_mode and self._llm_weights_sleeping:
            self.sync_weights()
        sample = self._sample_with_server if self.mode == "server" else self._sample_with_engine
        with self._while_sampling():
            completions = sample(requests, options, profiler or nullcontext())
        prompt_ids = []
        for request in requests:
            prompt_ids += [request.ids] * request.count
        return (
            prompt_ids,
            [ids for ids, _ in completions],
            [[[logp] for logp in logps] for _, logps in completions],
            [[[token] for token in ids] for ids, _ in completions],
        )

    def _requests(
        self,
        prompts: Sequence[list[int] | dict[str, Any] | EncodedPrompt],
        images: Sequence[list | None] | None,
        seed: int | None,
        room: Sequence[int],
    ) -> list[EngineRequest]:
        """
        Returns requests. A request is for consecutive completions of the same prompt object: the prompts A, A, B give
        two requests, for 2 and 1 completions. The first of the completions sets the `room` and the seed of a request.
        """
        requests: list[EngineRequest] = []
        last_prompt = None
        for index, prompt in enumerate(prompts):
            prompt_images = images[index] if images is not None else None
            if last_prompt is not None and prompt is last_prompt and not prompt_images:
                requests[-1] = requests[-1]._replace(count=requests[-1].count + 1)
                continue
            last_prompt = prompt
            rendered = self.prompts.engine_input(prompt, prompt_images, index)
            seed_of_prompt = None if seed is None else seed + index
            requests.append(EngineRequest(rendered["prompt_token_ids"], rendered, 1, room[index], seed_of_prompt))
        if any(len(request.ids) + request.max_tokens > self.prompts.max_length for request in requests):
            logger.warning_once(
                f"The engine was started for {self.prompts.max_length} tokens, which leaves less than {max(room)} to "
                f"completions of some prompts; {self.prompts.remedy_of_length}."
            )
        return requests

    def server_requests(self, prompts: Sequence[EncodedPrompt]) -> list[EngineRequest]:
        """Returns the requests to a server for completions of prompts."""
        requests = self._requests(prompts, None, None, [self.sampling["max_tokens"]] * len(prompts))
        return [request.for_server() for request in requests]

    def ask(self, request: EngineRequest, salt: str, request_index: int, attempt: int) -> list[ServerSample]:
        """
        Returns completions from a server, see [`server_completions`]. The server depends on the rank, `request_index`
        and `attempt`, so that requests are spread over servers, and a retry goes to the next server.
        """
        rank = self.accelerator.process_index
        n_ranks = self.accelerator.num_processes
        urls = self._urls
        url = urls[(rank + request_index * n_ranks + attempt) % len(urls)]
        options = {**self._with_bad_words(self.sampling), "seed": request.seed}
        try:
            return self._request_completions(url, request, options, attempt, salt)
        except RequestLost as error:
            # A timeout ends the run, unless it is the first attempt's and another server can answer the next attempt
            error.timed_out = error.timed_out and (attempt > 0 or len(urls) == 1)
            raise

    def _request_completions(
        self, url: str, request: EngineRequest, options: dict[str, Any], attempt: int, salt: str | None = None
    ) -> list[ServerSample]:
        """Returns completions from a server. A retry checks that the server still has the trained weights."""
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

    @property
    def sampling(self) -> dict[str, Any]:
        """vLLM's sampling parameters in training."""
        structured = {} if self.structured_outputs_regex is None else {"regex": self.structured_outputs_regex}
        return {
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0 if self.min_p is None else self.min_p,
            "max_tokens": self.max_completion_length,
            "logprobs": self.logprobs,
            **self.generation_kwargs,
            **({"structured_outputs": structured} if structured else {}),
        }

    def _with_bad_words(self, options: dict[str, Any]) -> dict[str, Any]:
        """
        Returns a copy of options. For speculative decoding, which doesn't support `logit_bias`, `bad_words` replace
        it. Raises a `ValueError` for other options that speculative decoding doesn't support.
        """
        options = dict(options)
        if self._speculates and options.get("min_p"):
            raise ValueError("vLLM doesn't support `min_p` with `speculative_config`; remove one of the two.")
        bias = options.pop("logit_bias", None) if self._speculates else None
        if not bias:
            return options
        tokenizer = tokenizer_of(self.processing_class)
        words = {int(token): tokenizer.convert_ids_to_tokens(int(token)) for token in bias}
        for token, word in words.items():
            is_banned = bias.get(token, bias.get(str(token))) <= -100
            if not is_banned or tokenizer.encode(word or "", add_special_tokens=False) != [token]:
                raise ValueError(
                    "vLLM doesn't support `logit_bias` with `speculative_config`, and `bad_words` can't replace the "
                    f"bias of token {token}; remove one of the two options."
                )
        return {**options, "bad_words": [*options.get("bad_words", []), *words.values()]}

    def acceptance_length(self) -> float | None:
        """
        Returns the mean number of tokens per speculative step since the last call, or `None` if vLLM doesn't report
        it.
        """
        counters = self._counters() if self._speculates else None
        if not counters:
            return None
        last_counts = self._n_drafts, self._n_accepted
        self._n_drafts, self._n_accepted = (
            counters.get(f"vllm:spec_decode_num_{name}") or 0.0 for name in ("drafts", "accepted_tokens")
        )
        n_drafts = self._n_drafts - last_counts[0]
        # A step samples one token after the accepted tokens of its draft
        return 1 + (self._n_accepted - last_counts[1]) / n_drafts if n_drafts > 0 else None

    def _counters(self) -> Mapping[str, float | None]:
        """Returns the counters of the engine or of this rank's server, by name, or none if they can't be read."""
        try:
            if self.mode == "server":
                return _server_counters(self.vllm_client)
            return {metric.name: getattr(metric, "value", None) for metric in self.llm.get_metrics()}
        # The user has turned metrics off, or a server doesn't answer; the run goes on without this entry of the log
        except (AssertionError, RuntimeError):
            return {}

    def _sample_with_engine(
        self, requests: list[EngineRequest], options: dict[str, Any], profiler: AbstractContextManager
    ) -> list[ServerSample]:
        """Returns completions. Ranks that share an engine run each other's requests, and return their part."""
        if isinstance(options.get("structured_outputs"), dict):
            options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
        start = 0
        batch = requests
        if self.tensor_parallel_size > 1:
            requests_of_ranks: list[Any] = [None] * self.tensor_parallel_size
            torch.distributed.all_gather_object(requests_of_ranks, requests, group=self.tp_group)
            rank = torch.distributed.get_rank(group=cast(torch.distributed.ProcessGroup, self.tp_group))
            start = sum(map(len, requests_of_ranks[:rank]))
            batch = [*chain.from_iterable(requests_of_ranks)]
            if is_peft_model(self.model):
                # Collectives of the update must end before those of the engine (huggingface/trl#3671)
                torch.distributed.barrier(device_ids=[self.accelerator.local_process_index])
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        with profiler:
            outputs = self._run_requests(batch, options)
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True
        completions = []
        for output in outputs[start : start + len(requests)]:
            for sample in output.outputs:  # `logprobs` has a dictionary by token for each position
                logps = [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
                completions.append((list(sample.token_ids), [*map(logp_or_none, logps)]))
        return completions

    def _run_requests(self, requests: list[EngineRequest], options: dict[str, Any]) -> list[Any]:
        """Returns the outputs of requests, as `vllm.LLM.generate` does, without processing media again."""
        engine = self.llm.llm_engine
        outputs = {}
        for i, request in enumerate(requests):
            sampling = {"seed": request.seed, **options, "max_tokens": request.max_tokens, "n": request.count}
            params = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY)
            engine.add_request(str(i), request.rendered, params, lora_request=self._adapter_request)
        while engine.has_unfinished_requests():
            outputs.update({int(output.request_id): output for output in engine.step() if output.finished})
        return [outputs[i] for i in range(len(requests))]

    def _sample_with_server(
        self, requests: list[EngineRequest], options: dict[str, Any], profiler: AbstractContextManager
    ) -> list[ServerSample]:
        def complete(request: EngineRequest) -> list[ServerSample]:
            request = request.for_server()  # media are converted while other requests are answered
            url = self.vllm_client.base_url
            patience = self.server_timeout
            return until_answered(
                lambda attempt: self._request_completions(url, request, options, attempt), patience, self._warn
            )

        with profiler:
            answers = on_all_ranks(self.accelerator, lambda: at_once(complete, requests))
            self.check_restarts()
        return [*chain.from_iterable(answers)]

    # Weights

    def _iter_fsdp2_params(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        return gathered_weights(module, self.dtype, self.accelerator.device)

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights = super()._iter_named_params() if self._adapter is None else self._adapter.weights()
        # vLLM uses the names of checkpoints, which may differ from those of the model in memory
        return checkpoint_weights(unwrapped(self.accelerator, self.model), weights)

    @property
    def unmerged_adapter(self) -> EngineAdapter | None:
        """Adapter that the engine gets unmerged, or `None` if it gets all weights, with any adapter merged."""
        return self._adapter if self._adapter and self._adapter.is_unmerged else None

    @property
    def _needs_base_weights(self) -> bool:
        """
        Whether the engine gets base weights besides the adapter. If the policy's weights have 4 bits, the engine needs
        the dequantized weights. With a sleep mode, each sleep drops the engine's weights.
        """
        adapter = self.unmerged_adapter
        return adapter is not None and (adapter.is_4bit or self.enable_sleep_mode)

    def sync_weights(self):
        """Updates the engine's weights, or its adapter, and resets its caches."""
        adapter = self.unmerged_adapter
        is_first = self._adapter_request is None
        # Base weights below an adapter never change, so they are sent again only if a sleep has dropped them
        sends_weights = adapter is None or self._needs_base_weights and (is_first or self.enable_sleep_mode)
        if self.mode == "server":
            with ExitStack() as stack:
                if self._max_staleness > 0:  # servers sample during updates
                    self._on_main_process(lambda: stack.enter_context(self.vllm_client.paused()))
                # A server that is gone must raise an error here. Later, ranks would wait for it in a collective
                self._on_main_process(lambda: self.vllm_client.reset_encoder_caches())
                self.check_restarts()
                if sends_weights:
                    on_all_ranks(self.accelerator, super().sync_weights)
                if adapter is not None:
                    self._load_adapter_on_servers(adapter)
                self._on_main_process(stack.close)
            return
        if self.enable_sleep_mode:
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        if sends_weights:
            self._load_weights()
        if adapter is not None:
            self._load_adapter(adapter)
        self.llm.reset_prefix_cache()
        # vLLM caches encoders' outputs by media alone, and would reuse those of old weights (huggingface/trl#7198)
        self.llm.llm_engine.reset_encoder_cache()

    def _load_weights(self) -> None:
        worker = self.llm.llm_engine.model_executor.driver_worker
        model = self._runner.model
        # vLLM must load weights itself, as its kernels may hold them in other layouts (vllm-project/vllm#42821)
        reload = getattr(worker, "reload_weights", None)
        if reload is None:
            raise RuntimeError(
                f"vLLM's {type(worker).__name__} can't reload weights. As it may have changed their layout, "
                f"it would sample from another model; install {SUPPORTED} for GPUs, or set `use_vllm=False`."
            )
        is_unneeded = _unused_weight_test(model)
        weights = ((name, weight) for name, weight in self._iter_named_params() if not is_unneeded(name))
        if self._takes_all_weights:
            # vLLM reads some weights only when it has all weights of their layer. By then, the adapter may be unmerged
            # from the model's weights, so vLLM gets copies of the merged weights
            reload(weights_iterator=((name, weight.clone()) for name, weight in weights))
            return
        # vLLM silently drops weights that it has no place for. The names in its list of loaded weights aren't those of
        # the checkpoint, so reads are recorded instead
        left_out = load_and_find_unread(lambda iterator: reload(weights_iterator=iterator), weights)
        if left_out:
            raise RuntimeError(
                f"vLLM's {type(model).__name__} has no place for {len(left_out)} weights of the model, such as "
                f"'{left_out[0]}', so it would sample from another model; set `use_vllm=False`."
            )
        self._takes_all_weights = True

    def _load_adapter(self, adapter: EngineAdapter) -> None:
        engine = self.llm.llm_engine
        last_request = self._adapter_request
        with tempfile.TemporaryDirectory() as folder:
            adapter.write(folder)
            adapter_id = 1 if last_request is None else last_request.lora_int_id + 1
            request = LoRARequest(f"policy-{adapter_id}", adapter_id, folder)
            if last_request is not None:
                engine.remove_lora(last_request.lora_int_id)
            engine.add_lora(request)
        self._adapter_request = request
        # vLLM silently drops adapters of layers that it doesn't have or can't adapt
        manager: Any = self._runner.lora_manager._adapter_manager
        left_out = sorted(manager.get_adapter(adapter_id).loras.keys() - manager.modules.keys())
        if left_out:
            raise RuntimeError(
                f"vLLM's {type(self._runner.model).__name__} has no place for the adapter of {len(left_out)} layers, "
                f"such as '{left_out[0]}', so it would sample from another model; leave these layers out of "
                f"`target_modules`, or set {MERGED}, which merges the adapter into the weights at each sync."
            )

    @property
    def _runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.model_runner

    def _load_adapter_on_servers(self, adapter: EngineAdapter) -> None:
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


def _server_counters(client: ServerClient) -> dict[str, float]:
    """Returns the counters of a server, summed over its engines."""
    counters: dict[str, float] = defaultdict(float)
    answer = client.answer("/metrics", method="GET", attempt_timeout=_METRICS_SECONDS, patience=0.0)
    for name, value in _COUNTER.findall(answer.body.decode(errors="replace")):
        counters[name] += float(value)
    return counters


def _unused_weight_test(model: torch.nn.Module) -> Callable[[str], bool]:
    """Returns a predicate of names of weights, true for weights of encoders that the engine doesn't have."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    unused = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, StageMissingLayer))

    def is_unused(name: str) -> bool:
        engine_names = [name] if mapper is None else mapper.apply_list([name])
        return any(engine_name.startswith(unused) for engine_name in engine_names)

    return is_unused
