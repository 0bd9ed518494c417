# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Loading of tokenizers and processors as in `lightrft.utils`, but without code from model repositories."""

from typing import cast

from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin


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
