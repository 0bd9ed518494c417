# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Samplers of completions in training: transformers or vLLM, behind one call."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import nn
from transformers import GenerationConfig

from ..encoding.processors import ends_with
from ..encoding.prompts import EncodedPrompt
from ..forward.attention import original_attention
from ..models.wrapped import is_unsharded, replaced
from ..policy import PolicyForward
from .transformers import Branches, sample_completions, trim_after_eos
from .vllm import MultimodalVLLMGeneration, sampling_parameters


# Ids of each completion, and log-probabilities of the ids, or `None` if the sampler returns none
Samples = tuple[list[list[int]], list[list[float | None]] | None]


class Sampler:
    """
    Base class of samplers. A trainer takes an instance of a subclass as `sampler`, in place of transformers and vLLM.

    A sampler may return log-probabilities. The trainer treats them like vLLM's: it checks them, and corrects the loss
    by importance ratios.
    """

    max_length: int | None = None  # maximum tokens of a prompt and its completion; `None`: the model's limit
    is_collective: bool = False  # whether all ranks must call it equally often
    samples_policy: bool = False  # whether the policy itself samples, with the same log-probabilities as in training
    is_engine: bool = False  # whether it takes decoded media and computes positions itself, as vLLM does
    dtype: torch.dtype | None = None  # dtype of its computations; `None`: the policy's

    def load_weights(self, step: int) -> None:
        """Loads the policy's weights after optimizer step `step`, unless the sampler has these weights."""

    def invalidate_weights(self) -> None:
        """Handles a change of the policy's weights outside of optimizer steps, such as by loading a checkpoint."""

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the completions since the last call, by names in the log."""
        return {}

    def __call__(
        self,
        model: nn.Module,
        prompts: Sequence[EncodedPrompt],
        *,
        step: int,
        config: GenerationConfig | None = None,
        room: Sequence[int] | None = None,
        branches: Branches | None = None,
    ) -> Samples:
        """
        Samples a completion for each prompt.

        Args:
            model (`torch.nn.Module`):
                Policy, as prepared for training.
            prompts (`Sequence[EncodedPrompt]`):
                One prompt per completion. Completions of a group have the same prompt object.
            step (`int`):
                Optimizer step, by which an engine knows whether its weights are old.
            config ([`~transformers.GenerationConfig`], *optional*):
                Settings of sampling, by default those of training.
            room (`Sequence[int]`, *optional*):
                Maximum number of tokens of each completion after results of tools, in training and evaluation. A
                sampler may exceed it: surplus tokens are cut off.
            branches ([`~engines.transformers.Branches`], *optional*):
                Caches from which generation continues after tool results.

        Returns:
            `tuple`: Ids of each completion up to its end, and log-probabilities or `None`.
        """
        raise NotImplementedError


@dataclass
class TransformersSampler(Sampler):
    """Sampler that runs `generate`, with each prompt prefilled once, or transformers' continuous batching."""

    policy: PolicyForward
    accelerator: Accelerator
    config: GenerationConfig
    eos_token_ids: Sequence[int]
    pad_token_id: int
    # Returns a context with the model ready to generate
    generating: Callable[[], AbstractContextManager[nn.Module]]
    profile: Callable[[str], AbstractContextManager] = nullcontext
    continuous_batching: Any = None  # config of continuous batching, `None` for `generate`
    dtype: torch.dtype | None = None  # the model's dtype during continuous batching
    samples_policy: ClassVar[bool] = True

    @property
    def is_collective(self) -> bool:
        """`True` if ranks gather sharded weights, or must agree on the number of forwards (`Fallbacks.isolate`)."""
        return not is_unsharded(self.accelerator) or self.policy.fallbacks.isolate is not None

    def __call__(
        self,
        model: nn.Module,
        prompts: Sequence[EncodedPrompt],
        *,
        step: int,
        config: GenerationConfig | None = None,
        room: Sequence[int] | None = None,
        branches: Branches | None = None,
    ) -> Samples:
        if self.continuous_batching is not None and config is None:
            return self._generate_batch(prompts), None
        sampling_config = self.config if config is None else config
        with self.profile("transformers.generate"):
            output = sample_completions(
                self.policy,
                model,
                prompts,
                sampling_config,
                self.pad_token_id,
                generating=self.generating,
                branches=branches,
            )
        ids = trim_after_eos(output, self.eos_token_ids if config is None else config.eos_token_id)
        stop_strings = (
            [sampling_config.stop_strings]
            if isinstance(sampling_config.stop_strings, str)
            else sampling_config.stop_strings or ()
        )
        return [self._strip_padding(completion, stop_strings) for completion in ids], None

    def _strip_padding(self, ids: list[int], stop_strings: Sequence[str]) -> list[int]:
        padding = (n for n, token in enumerate(ids) if token == self.pad_token_id)
        return ids[: next((n for n in padding if ends_with(ids[:n], stop_strings, self.policy.processor)), len(ids))]

    def _generate_batch(self, prompts: Sequence[EncodedPrompt]) -> list[list[int]]:
        """Samples by continuous batching. Raises `ValueError` if a prompt has media."""
        for prompt in prompts:
            if prompt.media:
                raise ValueError(
                    f"Row {prompt.row} has media, which `use_transformers_continuous_batching` doesn't support; turn "
                    "it off."
                )
        with self.profile("transformers.generate_batch"), self.generating() as model:
            unwrapped = self.policy.unwrapped(model)
            # Continuous batching rejects attention implementations that it doesn't know
            with original_attention(unwrapped), replaced(unwrapped, generation_config=self.config):
                if self.dtype is not None:
                    model.to(self.dtype)
                outputs = model.generate_batch(
                    [prompt.input_ids.tolist() for prompt in prompts],
                    generation_config=self.config,
                    continuous_batching_config=self.continuous_batching,
                    progress_bar=False,
                )
                model.train()
        return [output.generated_tokens for output in outputs.values()]


@dataclass
class VLLMSampler(Sampler):
    """Sampler that runs vLLM, and loads the weights of each optimizer step once."""

    engine: MultimodalVLLMGeneration
    profile: Callable[[str], AbstractContextManager]
    # Returns a context that explains errors of a call
    explain: Callable[[], AbstractContextManager] = nullcontext
    loaded_step: int = -1  # the step whose weights the engine has, -1 for unknown weights
    is_engine: ClassVar[bool] = True

    @property
    def dtype(self) -> torch.dtype:
        return self.engine.dtype

    @property
    def max_length(self) -> int:
        return self.engine.prompts.max_length

    @property
    def is_collective(self) -> bool:
        return self.engine.is_collective

    def __call__(
        self,
        model: nn.Module,
        prompts: Sequence[EncodedPrompt],
        *,
        step: int,
        config: GenerationConfig | None = None,
        room: Sequence[int] | None = None,
        branches: Branches | None = None,
    ) -> Samples:
        sampling = None
        if config is not None:
            sampling = sampling_parameters(config)
            if config.do_sample:
                # Requests with a seed don't draw from the engine's random state, so training's samples stay the same
                sampling["seed"] = torch.randint(2**31, ()).item()
        with self.explain():
            self.load_weights(step)
            requests = self.engine.requests(prompts, sampling=sampling, room=room)
            completions = self.engine.sample(requests, sampling, self.profile("vLLM.generate"))
        return [ids for ids, _ in completions], [logps for _, logps in completions]

    def invalidate_weights(self) -> None:
        """Makes the next call load the weights."""
        self.loaded_step = -1

    def metrics(self) -> dict[str, float]:
        """Returns the mean number of tokens per step of speculative decoding, if the engine reports it."""
        length = self.engine.acceptance_length()
        return {} if length is None else {"sampling/acceptance_length": length}

    def load_weights(self, step: int) -> None:
        """Loads the weights of a step into the engine, unless it has them."""
        if step != self.loaded_step:
            with self.profile("sync_weights"):
                self.engine.sync_weights()
            self.loaded_step = step
