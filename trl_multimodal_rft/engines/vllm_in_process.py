# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""vLLM in the trainer's process."""

import tempfile
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model
from trl.generation import vllm_generation
from trl.generation.vllm_generation import empty_cache

from ..models.wrapped import replaced
from .vllm import MultimodalVLLMGeneration
from .vllm_adapters import MERGED, EngineAdapter
from .vllm_client import EngineRequest
from .vllm_prompts import processors_unchecked
from .vllm_requests import ServerSample, logp_or_none
from .vllm_versions import SUPPORTED, engine_obstacle
from .vllm_weights import load_and_find_unread


if engine_obstacle() is None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.models.utils import StageMissingLayer
    from vllm.renderers import BaseRenderer
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    from .vllm_versions import LOADS_BENEATH_ADAPTERS


class InProcess(MultimodalVLLMGeneration):
    """vLLM in the trainer's process (`vllm_mode="colocate"`). Ranks may share an engine, by tensor parallelism."""

    def __init__(self, *args, **kwargs):
        self._takes_all_weights = False  # whether the first sync has shown that vLLM has a place for all weights
        super().__init__(*args, **kwargs)

    def _start(self) -> "BaseRenderer":
        if self._needs_base_weights and not LOADS_BENEATH_ADAPTERS:
            raise ValueError(
                "An adapter with 4-bit weights or `vllm_enable_sleep_mode=True` needs vLLM 0.28 or later; install it, "
                f"or set {MERGED}."
            )
        # TRL constructs `LLM` with fixed arguments. The replacement adds arguments, or replaces them
        engine_class = getattr(vllm_generation, "LLM", None)
        adapter_kwargs = self._adapter.engine_kwargs if self._adapter else {}
        engine_kwargs = {**adapter_kwargs, **self._engine_kwargs}
        with (
            replaced(vllm_generation, LLM=lambda **args: engine_class(**{**args, **engine_kwargs})),
            processors_unchecked(),
        ):
            self._start_as_trl()
        return self.llm.renderer

    @property
    def is_collective(self) -> bool:
        return self.tensor_parallel_size > 1

    # Samples

    def _wake(self) -> None:
        if self.enable_sleep_mode and self._llm_weights_sleeping:
            self.sync_weights()

    def _complete(self, requests: list[EngineRequest], options: dict[str, Any]) -> list[ServerSample]:
        """Ranks that share an engine run each other's requests, and return their part."""
        if isinstance(options.get("structured_outputs"), dict):
            options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
        start = 0  # index of this rank's first request
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
        """Returns the outputs of `vllm.LLM.generate`, without processing media again."""
        engine = self.llm.llm_engine
        outputs = {}
        for i, request in enumerate(requests):
            params = SamplingParams(**request.parameters(options), output_kind=RequestOutputKind.FINAL_ONLY)
            engine.add_request(str(i), request.rendered, params, lora_request=self._adapter_request)
        while engine.has_unfinished_requests():
            outputs.update({int(output.request_id): output for output in engine.step() if output.finished})
        return [outputs[i] for i in range(len(requests))]

    def _counters(self) -> Mapping[str, float | None]:
        return {metric.name: getattr(metric, "value", None) for metric in self.llm.get_metrics()}

    # Weights

    def _load(self, adapter: EngineAdapter | None, sends_weights: bool) -> None:
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


def _unused_weight_test(model: torch.nn.Module) -> Callable[[str], bool]:
    """Returns a predicate of names of weights, true for weights of encoders that the engine doesn't have."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    unused = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, StageMissingLayer))

    def is_unused(name: str) -> bool:
        engine_names = [name] if mapper is None else mapper.apply_list([name])
        return any(engine_name.startswith(unused) for engine_name in engine_names)

    return is_unused
