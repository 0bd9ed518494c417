# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""vLLM in the place of transformers' sampling."""

import os
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from trl.extras.profiling import profiling_context

from ..encoding.prompts import EncodedPrompt
from ..generation.vllm import MultimodalVLLMGeneration
from ..generation.vllm_adapters import EngineAdapter
from ..models.quantization import is_4bit
from ..models.trainer_mixin import TrainerMixin
from ..models.wrapped import computing_dtype, unwrapped
from .checkpoint_files import checkpoints, step_of
from .self_check import EngineCheck
from .setup import media_limits, sampling_changes


logger = get_logger(__name__)


class EngineMixin(TrainerMixin):
    """Lets vLLM sample for a trainer, with its weights, and checks what it samples with."""

    _engine_check: EngineCheck | None = None

    def _set_engine(self, placeholders: set[int], revision: str | None) -> None:
        """Makes vLLM sample, with the arguments that TRL gives it."""
        args = self.args
        own = args.generation_kwargs or {}
        # A sampled placeholder would stand for media that aren't there
        bias = dict.fromkeys(placeholders, -100.0)
        self._logit_bias = bias | {int(i): float(value) for i, value in own.get("logit_bias", {}).items()}
        named = {str(i): value for i, value in self._logit_bias.items()}  # as JSON has it
        # Each log-probability is detokenized otherwise, which takes time, and fails beyond the vocabulary
        own = {
            "detokenize": "stop" in own,
            **own,
            "logit_bias": named if args.vllm_mode == "server" else self._logit_bias,
        }
        in_4bit = is_peft_model(self.model) and is_4bit(self.model)
        alone = in_4bit if args.vllm_sync_adapter is None else args.vllm_sync_adapter
        # TRL would round to 4 bits what it merges
        adapter = EngineAdapter(self.model, self.accelerator, alone) if alone or in_4bit else None
        self.vllm_generation = MultimodalVLLMGeneration(
            model=self.model,
            accelerator=self.accelerator,
            processing_class=self.processing_class,
            mode=args.vllm_mode,
            structured_outputs_regex=args.vllm_structured_outputs_regex,
            server_base_url=args.vllm_server_base_url,
            server_host=args.vllm_server_host,
            server_port=args.vllm_server_port,
            group_port=args.vllm_group_port,
            server_timeout=args.vllm_server_timeout,
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            max_model_length=args.vllm_max_model_length,
            max_num_seqs=args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
            enable_sleep_mode=args.vllm_enable_sleep_mode,
            model_impl=args.vllm_model_impl,
            trust_remote_code=args.trust_remote_code,
            repetition_penalty=self.repetition_penalty,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_completion_length=self.max_completion_length,
            generation_kwargs=own,
            engine_kwargs={**self._engine_kwargs(revision), **(args.vllm_engine_kwargs or {})},
            adapter=adapter,
            adapter_folder=os.path.join(args.output_dir, "_vllm_adapter"),  # which pushes leave out
        )
        if self.tools:
            logger.info("Conversations with tools are continued from vLLM's prefix cache, or prefilled again without.")
        self._last_loaded_step = -1  # the step whose weights the engine has

    def _engine_kwargs(self, revision: str | None) -> dict[str, Any]:
        """What the engine needs to be as the trainer, beside TRL's arguments; the user's win."""
        dtype = computing_dtype(self.accelerator, unwrapped(self.accelerator, self.model))
        kwargs: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "revision": revision}
        if self.args.vllm_mode == "server":
            return kwargs
        limits, more = {}, self.args.max_tool_media if self.tools else 0
        if self.rollout_func is None and self.environment_factories is None and more is not None:
            found = media_limits(self.args, self.train_dataset, self.eval_dataset)
            limits = {kind: most + more for kind, most in found.items()}
        return {**kwargs, "mm_processor_cache_gb": 0, "limit_mm_per_prompt": limits}  # each prompt comes once

    def _ask_engine(
        self, prompts, sampling: dict[str, Any] | None = None, room: list[int] | None = None
    ) -> tuple[list[list[int]], list[list[float | None]]]:
        """Completions by vLLM with the weights of this step, and the log-probabilities it sampled them with."""
        with self._engine_errors():
            if self.state.global_step != self._last_loaded_step:
                with profiling_context(self, "sync_weights"):
                    self.vllm_generation.sync_weights()
                self._last_loaded_step = self.state.global_step
            engine: Any = self.vllm_generation
            _, completion_ids, logps, _ = engine.generate(
                prompts, profiler=profiling_context(self, "vLLM.generate"), sampling=sampling, room=room
            )
        return completion_ids, [[logp for [logp] in each] for each in logps]

    @contextmanager
    def _engine_errors(self):
        """Errors within the context, in training, get a note on how to resume."""
        try:
            yield
        except Exception as error:
            if self.is_in_train:
                step = self.state.global_step
                saved = [path for path in checkpoints(self.args.output_dir) if step_of(path) <= step]
                remedy = "No checkpoint was saved to resume from; lower `save_steps`."
                if saved:
                    remedy = f"Resume with `train(resume_from_checkpoint={str(saved[-1])!r})`."
                error.add_note(f"Sampling with vLLM failed after step {step} of training. {remedy}")
            raise

    def _check_engine(self, output: dict[str, Any], prompts: list[EncodedPrompt], mask: torch.Tensor) -> None:
        """Compares what an engine sampled with, on its first batch and after an update."""
        trainer: Any = self
        check = self._self_check
        if check is None or not self.model.training or "sampling_per_token_logps" not in output:
            return
        if not self._samples_from_policy():
            return
        if self._engine_check is None or self._engine_check.check is not check:
            self._engine_check = EngineCheck(trainer, check)
        is_new = self._engine_check.run(output, prompts, mask)
        if self.tools:
            is_new = self._engine_check.run_behind_tools(output, prompts, mask) or is_new
        if is_new:
            logger.info(str(check))
            self.accelerator.print(check)

    def _samples_from_policy(self) -> bool:
        """Whether an engine's log-probabilities are those of the policy, with nothing but our bias of its logits."""
        return self.use_vllm and not sampling_changes(self.args)


def as_tensor(logps: Any, completion_ids: torch.Tensor) -> torch.Tensor:
    """
    An engine's log-probabilities beside its completions, or other numbers of their tokens.

    Shapes: `completion_ids` `(B, C)`; returns `(B, C)`.
    """
    if isinstance(logps, torch.Tensor):
        return logps
    rows = [[float("nan") if logp is None else logp for logp in row] for row in logps]
    width = completion_ids.size(1)
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], device=completion_ids.device)
