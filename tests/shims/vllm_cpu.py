# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What lets vLLM's build for CPUs stand in for a GPU's: how weights are written, and windows that tiny models have."""

import tempfile
from contextlib import contextmanager

import torch
from safetensors.torch import save_file
from trl.generation.vllm_client import VLLMClient
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models import qwen2_audio
from vllm.platforms import current_platform

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
    # It wants windows of 30 s
    qwen2_audio.Qwen2AudioFeatureInputs.validate = lambda self: None
    if not current_platform.is_cpu():
        return
    in_place = MultimodalVLLMGeneration._load_weights

    def load_weights(self):
        with _writable(self.llm.llm_engine):
            in_place(self)

    MultimodalVLLMGeneration._load_weights = load_weights
    # Weights reach a server by NCCL, which needs GPUs
    VLLMClient.init_communicator = lambda self, device=None: None
    VLLMClient.update_named_params = _send_by_folder


def _send_by_folder(client: VLLMClient, metadata, named_params) -> None:
    with tempfile.TemporaryDirectory() as folder:
        weights = {name: weight.detach().clone(memory_format=torch.contiguous_format) for name, weight in named_params}
        assert [(name, list(weight.shape)) for name, weight in weights.items()] == [(n, s) for n, _, s in metadata]
        save_file(weights, f"{folder}/model.safetensors")
        request = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        client._post(f"{client.base_url}/collective_rpc", json=request)
