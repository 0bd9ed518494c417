# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which versions of vLLM can be used."""

from importlib.metadata import packages_distributions, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from trl.import_utils import is_vllm_available


_VERSIONS = SpecifierSet(">=0.27.1,<0.31")


def engine_obstacle() -> str | None:
    """Why vLLM can't sample here."""
    remedy = 'run `pip install "trl-multimodal-rft[vllm]"`, or set `use_vllm=False`.'
    if not is_vllm_available():
        return f"vLLM isn't installed; {remedy}"
    # The build for CPUs is a distribution of another name
    installed = version(packages_distributions()["vllm"][0])
    if _VERSIONS.contains(Version(installed).base_version):
        return None
    return (
        f"vLLM {installed} is installed, and 0.27.1 to 0.30.0 are what works here: those before are built for an "
        f"earlier torch, those after exclude transformers 5.23; {remedy}"
    )
