# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sampling with vLLM: TRL's engine, extended to media, LoRA adapters and weights that are named as in checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from transformers import GenerationConfig
from trl.generation.vllm_generation import VLLMGeneration

from ..encoding.processors import tokenizer_of
from ..encoding.prompts import EncodedPrompt
from ..models.wrapped import unwrapped
from .vllm_adapters import MERGED, EngineAdapter
from .vllm_client import EngineRequest
from .vllm_prompts import EnginePrompts
from .vllm_requests import ServerSample
from .vllm_versions import engine_obstacle
from .vllm_weights import checkpoint_weights, gathered_weights


if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.renderers import BaseRenderer

logger = get_logger(__name__)


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
    TRL's engine for prompts with media, which are processed once for consecutive completions and for all turns of a
    conversation. [`~engines.vllm_in_process.InProcess`] runs vLLM in the trainer's process,
    [`~engines.vllm_servers.Servers`] asks servers.
    """

    def __init__(
        self,
        engine_kwargs: dict[str, Any] | None = None,
        adapter: EngineAdapter | None = None,
        while_sampling: Callable[[], AbstractContextManager] = nullcontext,
        **kwargs,
    ):
        self._engine_kwargs = engine_kwargs or {}
        self._adapter = adapter
        self._while_sampling = while_sampling  # returns a context around the engine's sampling
        self._adapter_request: LoRARequest | None = None  # the adapter in the engine, after the first sync
        self._speculates = bool(self._engine_kwargs.get("speculative_config"))
        self._n_drafts = 0.0  # the engine's counters at the last call of `acceptance_length`
        self._n_accepted = 0.0
        super().__init__(**kwargs)

    def _init_vllm(self):
        obstacle = engine_obstacle()
        if obstacle is not None:
            raise ImportError(f"`use_vllm` is set, but {obstacle}")
        try:
            renderer = self._start()
        except ValueError as error:
            if "does not support LoRA" in str(error):
                raise ValueError(f"{error} Set {MERGED}, which merges the adapter into the weights.") from error
            raise
        self.prompts = EnginePrompts(renderer, self.processing_class, self.mode)

    def _start_as_trl(self) -> None:
        super()._init_vllm()

    # What differs between an engine in this process and servers

    def _start(self) -> "BaseRenderer":
        """Starts vLLM, or connects with it. Returns the renderer, which processes prompts."""
        raise NotImplementedError

    def _complete(self, requests: list[EngineRequest], options: dict[str, Any]) -> list[ServerSample]:
        """Returns the completions of requests, in their order."""
        raise NotImplementedError

    def _load(self, adapter: EngineAdapter | None, sends_weights: bool) -> None:
        """Also resets vLLM's caches."""
        raise NotImplementedError

    def _counters(self) -> Mapping[str, float | None]:
        """Returns vLLM's counters by name. Raises `RuntimeError` or `AssertionError` if they can't be read."""
        raise NotImplementedError

    def _wake(self) -> None:
        """Loads weights that vLLM has dropped."""

    @property
    def is_collective(self) -> bool:
        """Whether all ranks must call `sample` equally often."""
        raise NotImplementedError

    # Samples

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the engine's forward."""
        return self.prompts.renderer.model_config.dtype

    def generate(
        self,
        prompts: Sequence[list[int] | dict[str, Any] | EncodedPrompt],
        images: Sequence[list | None] | None = None,
        num_generations: int = 1,
        profiler: AbstractContextManager | None = None,
    ) -> tuple:
        """
        Samples completions as in TRL, for a `rollout_func`. `num_generations` isn't read, as `prompts` has an entry
        per completion. Returns prompt ids, completion ids, and for each token, as TRL, lists of its log-probability
        and its id.
        """
        requests = self.requests(prompts, images)
        completions = self.sample(requests, profiler=profiler)
        prompt_ids = []
        for request in requests:
            prompt_ids += [request.ids] * request.count
        return (
            prompt_ids,
            [ids for ids, _ in completions],
            [[[logp] for logp in logps] for _, logps in completions],
            [[[token] for token in ids] for ids, _ in completions],
        )

    def sample(
        self,
        requests: list[EngineRequest],
        sampling: dict[str, Any] | None = None,
        profiler: AbstractContextManager | None = None,
    ) -> list[ServerSample]:
        """
        Returns the completions of requests, in their order. `sampling` are vLLM's sampling parameters, by default
        those of training.
        """
        options = self._options(sampling)
        self._wake()
        with self._while_sampling(), profiler or nullcontext():
            return self._complete(requests, options)

    def requests(
        self,
        prompts: Sequence[list[int] | dict[str, Any] | EncodedPrompt],
        images: Sequence[list | None] | None = None,
        sampling: dict[str, Any] | None = None,
        room: Sequence[int] | None = None,
    ) -> list[EngineRequest]:
        """
        Returns requests, each for consecutive completions of the same prompt object, the first of which sets the
        `room` (most tokens) and the seed. `images` belong to prompts that aren't encoded. `sampling` are vLLM's
        parameters, by default those of training.
        """
        options = self.sampling if sampling is None else sampling
        seed = options.get("seed")
        if sampling is None and seed is not None:
            seed += self.accelerator.process_index * len(prompts)  # unique over ranks, as a group may straddle them
        max_tokens = options["max_tokens"]
        room = [min(n, max_tokens) for n in room or [max_tokens] * len(prompts)]
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

    def _options(self, sampling: dict[str, Any] | None = None) -> dict[str, Any]:
        """
        Returns vLLM's sampling parameters of all requests, by default those of training. For speculative decoding,
        which doesn't support `logit_bias`, `bad_words` replace it. Raises a `ValueError` for other options that
        speculative decoding doesn't support.
        """
        options = self.sampling if sampling is None else {"logprobs": self.logprobs, **sampling}
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
        if not self._speculates:
            return None
        try:
            counters = self._counters()
        # The user has turned metrics off, or a server doesn't answer; the run goes on without this entry of the log
        except (AssertionError, RuntimeError):
            return None
        if not counters:
            return None
        last_n_drafts = self._n_drafts
        last_n_accepted = self._n_accepted
        self._n_drafts = counters.get("vllm:spec_decode_num_drafts") or 0.0
        self._n_accepted = counters.get("vllm:spec_decode_num_accepted_tokens") or 0.0
        n_drafts = self._n_drafts - last_n_drafts
        # A step samples one token after the accepted tokens of its draft
        return 1 + (self._n_accepted - last_n_accepted) / n_drafts if n_drafts > 0 else None

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
        self._load(adapter, sends_weights)
