# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Names of `lightrft.utils`: tokenizers and processors, without code from model repositories, loggers, reward servers,
datasets and options.
"""

import logging
from collections.abc import Sequence
from typing import cast

import torch
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..extras.remote import RemoteReward
from ..rewards.ready.recipe import add_rewards
from .cli_args import add_arguments as add_arguments
from .datasets import blending_datasets as blending_datasets


def init_logger(name: str) -> logging.Logger:
    """Returns Python's logger of a name."""
    return logging.getLogger(name)


def ensure_video_input_available() -> None:
    """Does nothing: LightRFT's scripts call it before they import models, for versions of transformers."""


def remote_rm_fn(
    api_url: str | Sequence[str],
    queries: Sequence[str],
    prompts: Sequence[str] | None = None,
    labels: Sequence | None = None,
) -> torch.Tensor:
    """
    Requests rewards from servers, with the retries, limits and checks of [`~rewards.RemoteReward`].

    Args:
        api_url (`str` or `list[str]`):
            URL of a server, or of several, whose rewards add up.
        queries, prompts, labels (`list`):
            Texts of prompt and completion, and, *optional*, prompts and ground truths of the same number.

    Returns:
        `torch.Tensor`: Rewards, float32, on the CPU, shape `(B,)`, `NaN` where the server answered `null`.

    Raises:
        `RuntimeError`: If a server is unreachable, or doesn't return one finite number or `null` per query.
        `ValueError`: If lists have different lengths.
    """
    payload = {"queries": list(queries)}
    for name, values in (("prompts", prompts), ("labels", labels)):
        if values is not None:
            if len(values) != len(queries):
                raise ValueError(f"There are {len(values)} `{name}` for {len(queries)} `queries`; pass one for each.")
            payload[name] = list(values)
    urls = [api_url] if isinstance(api_url, str) else api_url
    rewards = [[torch.nan if r is None else r for r in RemoteReward(url).request(payload)] for url in urls]
    return add_rewards(torch.tensor(rewards, dtype=torch.float32))


def get_tokenizer(
    pretrain: str, model: PreTrainedModel, padding_side: str = "left", use_fast: bool = True
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer. If it has no padding token, tokenizer and model get the EOS token as padding token."""
    tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(pretrain, use_fast=use_fast))
    return _set_pad(tokenizer, model, padding_side)


def get_tokenizer_processor_vl(
    pretrain: str, model: PreTrainedModel, padding_side: str = "left", use_fast: bool = True
) -> tuple[PreTrainedTokenizerBase, ProcessorMixin]:
    """Loads a processor, with padding as in [`get_tokenizer`], and returns its tokenizer and the processor."""
    processor = AutoProcessor.from_pretrained(pretrain, use_fast=use_fast)
    return _set_pad(processor.tokenizer, model, padding_side), processor


def _set_pad(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, padding_side: str) -> PreTrainedTokenizerBase:
    tokenizer.padding_side = padding_side
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
    return tokenizer
