# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Supported versions of vLLM."""

from importlib.metadata import packages_distributions, version

from packaging.version import Version
from trl.import_utils import is_vllm_available


_FIRST, _UNSUPPORTED = Version("0.27.1"), Version("0.31")


def engine_obstacle() -> str | None:
    """Why vLLM can't sample here; `None` if it can."""
    remedy = 'run `pip install "trl-multimodal-rft[vllm]"`, or set `use_vllm=False`.'
    if not is_vllm_available():
        return f"vLLM isn't installed; {remedy}"
    # The distribution for CPUs has another name
    installed = version(packages_distributions()["vllm"][0])
    if _FIRST <= Version(Version(installed).base_version) < _UNSUPPORTED:
        return None
    return (
        f"vLLM {installed} is installed, but 0.27.1 to 0.30.0 are supported: earlier ones are built for an earlier "
        f"torch, later ones exclude transformers 5.23; {remedy}"
    )
