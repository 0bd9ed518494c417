# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What samples completions in training: transformers or vLLM, behind one call."""

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
from ..generation.transformers import Branches, trim_after_eos
from ..generation.vllm import MultimodalVLLMGeneration, sampling_parameters
from ..models.wrapped import is_unsharded, replaced
from ..policy import PolicyForward


# Ids of each completion, and their log-probabilities if the engine returns any
Samples = tuple[list[list[int]], list[list[float | None]] | None]


class Sampler:
    """
    Samples a completion of each prompt. A subclass is passed to a trainer as `sampler`, in place of transformers and
    vLLM; its log-probabilities, if it returns any, are checked and corrected like an engine's.
    """

    max_length: int | None = None  # tokens of a prompt and its completion at most; `None`: the model's limit
    is_collective: bool = False  # whether all ranks must call it equally often
    samples_policy: bool = False  # whether the policy itself samples, so that its scores are those of sampling
    is_engine: bool = False  # whether it takes decoded media and computes positions itself, as vLLM does
    dtype: torch.dtype | None = None  # in which it computes; `None`: the policy's

    def load_weights(self, step: int) -> None:
        """Gets the policy's weights of an optimizer step, if it doesn't have them."""

    def invalidate_weights(self) -> None:
        """The policy's weights were changed by something else than a step, such as a checkpoint."""

    def metrics(self) -> dict[str, float]:
        """What it tells of the completions since the last call, by names in the log."""
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
        Samples.

        Args:
            model (`torch.nn.Module`):
                Policy, as prepared for training.
            prompts (`Sequence[EncodedPrompt]`):
                Each completion's prompt; completions of a group hold the same object.
            step (`int`):
                Optimizer step, by which an engine knows whether its weights are old.
            config ([`~transformers.GenerationConfig`], *optional*):
                How to sample, if not as in training.
            room (`Sequence[int]`, *optional*):
                Tokens of each completion at most.
            branches ([`~generation.transformers.Branches`], *optional*):
                Caches that generation continues from after results of tools.

        Returns:
            `tuple`: Ids of each completion up to its end, and log-probabilities or `None`.
        """
        raise NotImplementedError


@dataclass
class TransformersSampler(Sampler):
    """Samples with `generate`, each prompt prefilled once, or with continuous batching."""

    policy: PolicyForward
    accelerator: Accelerator
    config: GenerationConfig
    eos_token_ids: Sequence[int]
    pad_token_id: int
    # Gives a context with the model ready to generate
    generating: Callable[[], AbstractContextManager[nn.Module]]
    profile: Callable[[str], AbstractContextManager]
    continuous_batching: Any = None  # its config
    dtype: torch.dtype | None = None  # of the model during continuous batching
    samples_policy: ClassVar[bool] = True

    @property
    def is_collective(self) -> bool:
        """Where sharded weights are gathered, or forwards of isolated prompts counted."""
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
        given = self.config if config is None else config
        with self.profile("transformers.generate"):
            output = self.policy.sample(
                model, prompts, given, self.pad_token_id, generating=self.generating, branches=branches
            )
        ids = trim_after_eos(output, self.eos_token_ids if config is None else config.eos_token_id)
        texts = [given.stop_strings] if isinstance(given.stop_strings, str) else given.stop_strings or ()
        return [self._unpadded(each, texts) for each in ids], None

    def _unpadded(self, ids: list[int], texts: Sequence[str]) -> list[int]:
        """A completion that one of the texts may have ended, without the padding behind it."""
        padding = (n for n, token in enumerate(ids) if token == self.pad_token_id)
        return ids[: next((n for n in padding if ends_with(ids[:n], texts, self.policy.processor)), len(ids))]

    def _generate_batch(self, prompts: Sequence[EncodedPrompt]) -> list[list[int]]:
        for prompt in prompts:
            if prompt.media:
                raise ValueError(
                    f"Row {prompt.row} has media, which `use_transformers_continuous_batching` doesn't support; turn "
                    "it off."
                )
        with self.profile("transformers.generate_batch"), self.generating() as model:
            own = self.policy.unwrapped(model)
            # Continuous batching refuses names of attention that it doesn't know
            with original_attention(own), replaced(own, generation_config=self.config):
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
    """Samples with vLLM, which gets the weights of a step once."""

    engine: MultimodalVLLMGeneration
    profile: Callable[[str], AbstractContextManager]
    # Entered around each call, to explain errors
    explain: Callable[[], AbstractContextManager] = nullcontext
    loaded_step: int = -1  # the step whose weights the engine has
    is_engine: ClassVar[bool] = True

    @property
    def dtype(self) -> torch.dtype:
        return self.engine.dtype

    @property
    def max_length(self) -> int:
        return self.engine.prompts.max_length

    @property
    def is_collective(self) -> bool:
        """Where ranks share an engine, or the error of a server."""
        return self.engine.mode == "server" or self.engine.tensor_parallel_size > 1

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
                sampling["seed"] = torch.randint(2**31, ()).item()  # the engine's own random numbers are training's
        with self.explain():
            self.load_weights(step)
            _, ids, logps, _ = self.engine.generate(
                prompts, profiler=self.profile("vLLM.generate"), sampling=sampling, room=room
            )
        return ids, [[logp for [logp] in each] for each in logps]

    def invalidate_weights(self) -> None:
        """The next call loads the weights."""
        self.loaded_step = -1

    def metrics(self) -> dict[str, float]:
        """Tokens that speculative decoding samples at a time, where the engine tells them."""
        length = self.engine.acceptance_length()
        return {} if length is None else {"sampling/acceptance_length": length}

    def load_weights(self, step: int) -> None:
        """Gives the engine the weights of a step, if it doesn't have them."""
        if step != self.loaded_step:
            with self.profile("sync_weights"):
                self.engine.sync_weights()
            self.loaded_step = step
