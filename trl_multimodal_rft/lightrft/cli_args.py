# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The options that LightRFT's scripts share."""

from argparse import ArgumentParser

from .strategy import RULES


_FLAGS = (
    "packing_samples fsdp use_mp_opt fsdp_cpu_offload rm_use_engine rm_engine_cudagraph mixed_mm_data "
    "fused_linear_logprob"
).split()
_NUMBERS = {"engine_tp_size": 1, "engine_mem_util": 0.5, "sp_size": 1, "plot_every": 10, "chunk_size": 4096}


def add_arguments(parser: ArgumentParser) -> None:
    """
    Adds the options that LightRFT's scripts share: of the engine, of training, of FSDP and of reward models.

    Args:
        parser (`argparse.ArgumentParser`):
            Parser of a script, which has all other options.
    """
    for name in _FLAGS:
        parser.add_argument(f"--{name}", action="store_true", help=_help(name))
    for name, default in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=_help(name))
    parser.add_argument("--log_dir", help=_help("log_dir"))
    parser.add_argument("--enable_engine_sleep", action="store_true", default=True, help=_help("enable_engine_sleep"))
    parser.add_argument("--disable_engine_sleep", action="store_false", dest="enable_engine_sleep")


def _help(name: str) -> str:
    return RULES[name].meaning.replace("%", "%%")
