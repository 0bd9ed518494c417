# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tests with a real vLLM engine on the CPU (`make test-vllm`)."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from helpers import families
from trl.import_utils import is_vllm_available


sys.path.insert(0, str(Path(__file__).parent))  # for modules that tests of this folder share

if not is_vllm_available():
    collect_ignore_glob = ["test_*.py"]
else:
    sys.path.insert(0, str(Path(__file__).parents[2] / "shims"))
    import vllm_cpu

    if not torch.cuda.is_available():
        vllm_cpu.install()

    # Attention on the CPU supports a head size of 32
    _decoder = families.decoder

    def _with_large_heads(tokenizer, **changes):
        changes |= {name: 32 for name in ("head_dim", "query_pre_attn_scalar") if changes.get(name) == 16}
        return _decoder(tokenizer, **{"num_attention_heads": 2, "num_key_value_heads": 1, **changes})

    families.decoder = _with_large_heads
    families.QWEN2_ROPE["mrope_section"] = [4, 6, 6]
    families.QWEN3_ROPE["mrope_section"] = [8, 4, 4]


def pytest_configure(config):
    # vLLM's build for CPUs looks at all attributes of all modules since 0.31
    config.addinivalue_line("filterwarnings", "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning")


@pytest.fixture(scope="session")
def omni(tmp_path_factory):
    """Returns the folder of a complete Qwen2.5-Omni, as released."""
    from helpers.omni import OMNI, save_released
    from helpers.trainer_utils import saved

    folder = tmp_path_factory.mktemp("omni") / "model"
    save_released(OMNI, saved(OMNI), folder)
    return folder


@pytest.fixture(scope="session")
def server(omni, tmp_path_factory):
    """Returns the address of a server of the model. All tests share it."""
    from serving import serve

    with serve(omni, tmp_path_factory.mktemp("server")) as address:
        yield address


class SharedEngine:
    """Starts engines for trainers. One with the arguments of the last one is that one, without what it remembers."""

    def __init__(self, start):
        self.start = start
        self.arguments = None
        self.engine = None

    def __call__(self, **arguments):
        alike = self.engine is not None and arguments == self.arguments
        if not alike or self.engine.llm_engine.has_unfinished_requests():
            self.end()
            self.arguments = arguments
            self.engine = self.start(**arguments)
        self.engine.reset_prefix_cache()
        self.engine.llm_engine.reset_mm_cache()
        self.engine.llm_engine.reset_encoder_cache()
        return self.engine

    def end(self) -> None:
        """Ends an engine, also one that failed to start."""
        from vllm.distributed import cleanup_dist_env_and_memory

        if self.arguments is None:
            return
        self.engine = self.arguments = None
        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="session")
def shared_engine():
    from trl.generation import vllm_generation

    vllm_generation.LLM = shared = SharedEngine(vllm_generation.LLM)
    yield shared
    shared.end()


@pytest.fixture(autouse=True)
def engines_gone(shared_engine):
    yield
    if shared_engine.engine is None:  # it failed to start
        shared_engine.end()
