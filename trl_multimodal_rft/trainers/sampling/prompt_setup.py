# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The encoder of prompts and the rows that it encodes, made in a constructor after TRL's."""

from collections.abc import Callable
from functools import partial
from typing import Any

from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from ...algorithms.metrics import MetricLog
from ...data.rows.batches import BatchShape, repeat_order
from ...data.rows.names import MEDIA_COLUMNS
from ...encoding.prompt_encoder import PromptEncoder
from ...engines.vllm_prompts import EnginePrompts
from ...policy import Live
from ...rollout.environments import Environments
from ...rollout.stream import RowStream
from ..base.configs import SamplingConfig
from ..base.signatures import Processor
from .asynchronous import row_encoder
from .constructor_inputs import Inputs


def make_encoder(
    inputs: Inputs,
    toolbox: Environments,
    live: Live,
    *,
    model: PreTrainedModel,
    processing_class: Processor,
    template_kwargs: dict[str, Any],
) -> PromptEncoder:
    """Returns the encoder of prompts for the unwrapped `model`."""
    args = inputs.args
    return PromptEncoder(
        model,
        processing_class,
        {**template_kwargs, "tools": toolbox.tools or None},
        args.audio_overlong,
        args.rules,
        args.ignored_media_columns or (),
        args.special_tokens_in_text,
        keep_decoded=args.keeps_decoded,
        for_engine=args.use_vllm if inputs.sampler is None else inputs.sampler.is_engine,
        feature_dtype=live.feature_dtype,
    )


def make_stream(
    inputs: Inputs,
    toolbox: Environments,
    accelerator: Accelerator,
    live: Live,
    *,
    encoder: PromptEncoder,
    metrics: MetricLog,
    engine_prompts: Callable[[], EnginePrompts],
) -> RowStream:
    """Returns the reader of rows. `engine_prompts` returns the encoder for servers."""
    args = inputs.args
    encode: Callable | None = encoder.encode_row
    if args.max_staleness > 0 and not toolbox.tools:
        # For asynchronous sampling, the process that reads a row also renders its media for servers. With tools, the
        # media stay decoded for later turns
        encode = row_encoder(encoder, engine_prompts)
    if toolbox.factories or inputs.rollout_func is not None:
        encode = None
    columns = ["prompt", "chat_template_kwargs", *args.teacher_columns, *MEDIA_COLUMNS]
    return RowStream(
        args,
        accelerator,
        encode=encode,
        messages=encoder.messages,
        encode_teacher_prompt=encoder.encode_teacher_prompt if args.encodes_teacher_prompts else None,
        columns=columns if args.remove_unused_columns else None,
        metrics=metrics,
        state=lambda: live.state,
    )


def prompt_loader(
    stream: RowStream,
    dataset: Dataset | IterableDataset,
    args: SamplingConfig,
    accelerator: Accelerator,
    shuffles: bool | None,
    steps_per_rollout: int,
) -> DataLoader:
    """Returns the loader of training prompts, one batch per rollout, in TRL's order."""
    if isinstance(dataset, IterableDataset) and shuffles:
        dataset = dataset.shuffle(seed=args.order_seed)
    n_ranks = accelerator.num_processes
    size = args.generation_batch_size // n_ranks  # of this rank
    shape = BatchShape(size, args.num_generations or 1, steps_per_rollout, n_ranks, accelerator.process_index)
    order = partial(repeat_order, seed=args.order_seed) if shuffles else None
    return stream.train_loader(dataset, shape, args.media_prefetch, order)
