# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Supported versions of vLLM, and imports that differ between them."""

from functools import cache
from importlib import metadata
from importlib.metadata import version

from trl.import_utils import is_vllm_available

from ..versions import bounds, compare_with_tested, warn_of_newer


# Cached, since several modules call it, and it reads the names of all installed packages for seconds of CPU time
packages_distributions = cache(metadata.packages_distributions)

_BOUNDS = bounds().get("vllm", "")
SUPPORTED = "vllm" + _BOUNDS


def engine_obstacle(alternative: str = "set `use_vllm=False`") -> str | None:
    """Returns why vLLM can't run here, with a remedy and an `alternative` to vLLM, or `None` if it can run."""
    remedy = f'run `pip install "trl-multimodal-rft[vllm]"`, or {alternative}.'
    if not is_vllm_available():
        return f"vLLM isn't installed; {remedy}"
    # vLLM's distribution for CPUs has another name
    installed = version(packages_distributions()["vllm"][0])
    comparison = compare_with_tested(installed, _BOUNDS)
    if comparison < 0:  # older than the tested versions
        return f"vLLM {installed} is installed, but {SUPPORTED} is supported; {remedy}"
    if comparison > 0:
        warn_of_newer({"vllm": installed})
    return None


if engine_obstacle() is None:
    from vllm.lora.layers import BaseLayerWithLoRA

    try:
        from vllm.entrypoints.scale_out.token_in_token_out import mm_serde as mm_serde
    except ImportError:  # before 0.25
        from vllm.entrypoints.serve.disagg import mm_serde as mm_serde

    # Whether vLLM can load the base weights of layers with an adapter (from 0.28 on)
    LOADS_BENEATH_ADAPTERS = hasattr(BaseLayerWithLoRA, "load_weights")
