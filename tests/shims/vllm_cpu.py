# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What lets vLLM's build for CPUs stand in for a GPU's: how weights are written, and windows that tiny models have."""

from contextlib import contextmanager

from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models import qwen2_audio

from trl_multimodal_rft.generation.vllm import MultimodalVLLMGeneration


# Arguments of an engine of float32 on a CPU that does other things, too
ENGINE = {"dtype": "float32", "enforce_eager": True, "gpu_memory_utilization": 0.3}


@contextmanager
def _writable(engine):
    """The build for CPUs packs weights as it loads them, so that they can be written only in a reload."""
    runner = engine.model_executor.driver_worker.model_runner
    with set_current_vllm_config(runner.vllm_config):
        initialize_layerwise_reload(runner.model)
        try:
            yield
        finally:
            finalize_layerwise_reload(runner.model, runner.model_config)


def install() -> None:
    """Patches vLLM and the package's use of it, for this process."""
    in_place = MultimodalVLLMGeneration._load_weights

    def load_weights(self):
        with _writable(self.llm.llm_engine):
            in_place(self)

    MultimodalVLLMGeneration._load_weights = load_weights
    # It wants windows of 30 s
    qwen2_audio.Qwen2AudioFeatureInputs.validate = lambda self: None
