# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Names of `lightrft.utils`: tokenizers and processors, without code from model repositories, loggers, reward servers,
datasets and options.
"""

import base64
import logging
from collections.abc import Mapping, Sequence
from typing import cast

import PIL.Image
import torch
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..data.reading.media_files import png
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
    references: Sequence | None = None,
    raw_images: Sequence[PIL.Image.Image | Sequence[PIL.Image.Image] | None] | None = None,
    score_key: str = "rewards",
    *,
    further: Mapping[str, Sequence] | None = None,
) -> torch.Tensor:
    """
    Requests rewards from servers, with the retries, limits and checks of [`~rewards.RemoteReward`].

    The request holds `queries` and, if they are given, `prompts`, `labels`, `references` and `images`, which are PNG
    files in base64, a list per query, or `null`.

    Args:
        api_url (`str` or `list[str]`):
            URL of a server, or of several, whose rewards add up.
        queries, prompts, labels, references (`list`):
            Texts of prompt and completion, and, *optional*, prompts, labels and reference answers of the same number.
        raw_images (`list`, *optional*):
            Images of each query: an image, a list of them, or `None`.
        score_key (`str`, *optional*, defaults to `"rewards"`):
            Name of the list of rewards in the answer.
        further (`dict[str, list]`, *optional*):
            Other lists for the request, by name.

    Returns:
        `torch.Tensor`: Rewards, float32, on the CPU, shape `(B,)`, `NaN` where the server answered `null`.

    Raises:
        `RuntimeError`: If a server is unreachable, or doesn't return one finite number or `null` per query.
        `ValueError`: If lists have different lengths.
    """
    payload: dict[str, list] = {"queries": list(queries)}
    images = None if raw_images is None else _base64_images(raw_images)
    lists = {"prompts": prompts, "labels": labels, "references": references, "images": images, **(further or {})}
    for name, values in lists.items():
        if values is not None:
            if len(values) != len(queries):
                raise ValueError(f"There are {len(values)} `{name}` for {len(queries)} `queries`; pass one for each.")
            payload[name] = list(values)
    urls = [api_url] if isinstance(api_url, str) else api_url
    rewards = []
    for url in urls:
        answer = RemoteReward(url, score_key=score_key).request(payload)
        rewards.append([torch.nan if reward is None else reward for reward in answer])
    return add_rewards(torch.tensor(rewards, dtype=torch.float32))


def _base64_images(raw_images: Sequence[PIL.Image.Image | Sequence[PIL.Image.Image] | None]) -> list[list[str] | None]:
    encoded: dict[int, str] = {}  # by the `id` of an image, which the samples of a prompt share
    lists: list[list[str] | None] = []
    for entry in raw_images:
        images = [entry] if isinstance(entry, PIL.Image.Image) else entry
        for image in images or ():
            if id(image) not in encoded:
                encoded[id(image)] = base64.b64encode(png(image)).decode()
        lists.append(None if images is None else [encoded[id(image)] for image in images])
    return lists


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
