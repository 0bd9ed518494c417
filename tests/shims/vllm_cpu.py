# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Makes vLLM's CPU build a substitute for the GPU build: patches the writing of weights, and the windows of tiny models.

Runs a script or a module with the patches; its arguments follow:

```bash
python tests/shims/vllm_cpu.py examples/grpo_audio.py --use_vllm
python tests/shims/vllm_cpu.py -m vllm.entrypoints.openai.api_server --model MODEL
```
"""

import gc
import os
import runpy
import socket
import sys
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path


# vLLM runs in this process, on its threads, with little memory
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "SAGEMAKER_CONTAINER_LOG_LEVEL": "WARNING",  # the root logger's level, which a package of the server sets
}


def set_environment() -> None:
    """Sets what vLLM reads, some of it on import, and a port: TRL would choose the same one in each process."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    for name, value in {**ENVIRONMENT, "MASTER_PORT": port}.items():
        os.environ.setdefault(name, value)


set_environment()
# It reads all installed packages for two CPU seconds, and each start of an engine asks for it
metadata.packages_distributions = cache(metadata.packages_distributions)

import torch  # noqa: E402


def leave_uncompiled() -> None:
    """Disables compilation without a GPU, where it takes longer than all computation of the tiny models."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


leave_uncompiled()

from safetensors.torch import save_file  # noqa: E402
from trl.generation.vllm_client import VLLMClient  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod  # noqa: E402
from vllm.model_executor.model_loader.reload.layerwise import (  # noqa: E402
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.models import qwen2_audio  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.utils import system_utils  # noqa: E402


# Arguments of a float32 engine on a CPU that also runs other work. Before 0.27, it profiles encoders before it knows
# which adapters they have. Blocks are those that tiny models need.
ENGINE = {"dtype": "float32", "enforce_eager": True, "gpu_memory_utilization": 0.3, "skip_mm_profiling": True}
ENGINE["num_gpu_blocks_override"] = 2048

# How TRL sends weights, by NCCL, which needs GPUs
BY_NCCL = {name: getattr(VLLMClient, name) for name in ("init_communicator", "update_named_params")}


def install() -> None:
    """Patches vLLM and its use by TRL and the package, for this process, which may be a fork of one that has vLLM."""
    set_environment()
    leave_uncompiled()
    # It requires windows of 30 s
    qwen2_audio.Qwen2AudioFeatureInputs.validate = lambda self: None
    if not current_platform.is_cpu():
        return
    # The first engine to end would unfreeze all modules, and collections would visit them for a CPU second
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    UnquantizedEmbeddingMethod.process_weights_after_loading = _leave_unpacked
    VLLMGeneration.sync_weights = _in_a_reload(VLLMGeneration.sync_weights)
    VLLMClient.init_communicator = lambda self, device=None: None
    VLLMClient.update_named_params = _send_by_folder
    # The engine of a server is in a process of its own, which a spawn would start without these patches
    system_utils._maybe_force_spawn = lambda: os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="fork")


def _in_a_reload(in_place):
    """Keeps weights writable for TRL. The CPU build packs them on loading, and writes them only in a reload."""

    def load(self):
        if self.mode == "server":
            return in_place(self)
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        with set_current_vllm_config(runner.vllm_config):
            initialize_layerwise_reload(runner.model)
            try:
                in_place(self)
            finally:
                finalize_layerwise_reload(runner.model, runner.model_config)

    return load


def _leave_unpacked(_, layer) -> None:
    """Lets an LM head follow embeddings that it is tied to: a reload packs only the layers that it gets weights of."""
    layer.cpu_linear = torch.nn.functional.linear


def _send_by_folder(client: VLLMClient, metadata, named_params) -> None:
    with tempfile.TemporaryDirectory() as folder:
        weights = {name: weight.detach().clone(memory_format=torch.contiguous_format) for name, weight in named_params}
        assert [(name, list(weight.shape)) for name, weight in weights.items()] == [(n, s) for n, _, s in metadata]
        save_file(weights, f"{folder}/model.safetensors")
        request = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        client._post(f"{client.base_url}/collective_rpc", json=request)


if __name__ == "__main__":
    install()
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
