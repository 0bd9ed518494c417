# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A rollout of rows: their environments, and their prompts, encoded."""

import functools
from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator

from ..data.reading.refs import MediaError, iter_refs
from ..encoding.join import same_prompt
from ..encoding.prompt_encoder import PromptEncoder
from ..forward.trees import share_media
from ..views.views import View
from .environments import Environments
from .rollout import Prompted, Source
from .stream import EncodedRow


def collect(
    rows: Sequence[EncodedRow],
    encoder: PromptEncoder,
    toolbox: Environments,
    *,
    encodes_text: bool,
    group_size: int,
    pad_token_id: int,
    accelerator: Accelerator,
    views: Mapping[int, View] | None = None,
    step: int = 0,
    batch_index: int | None = None,
) -> Prompted:
    """
    Returns `rows`, one row per completion, with environments and encoded prompts.

    A batch with media is always encoded. A batch of text is encoded only if `encodes_text`: without it, the user's
    `rollout_func` tokenizes the text. `views`, by row index, has the views under which prompts are encoded.
    """
    dataset_rows = [row.row for row in rows]
    row_indices = [row.row_index for row in rows]
    dataset_messages = [row.messages for row in rows]
    messages = dataset_messages
    failures: list[Exception | None] = [None] * len(rows)
    tools = [toolbox.tools_by_name] * len(rows)
    environments = None
    if toolbox.factories:
        environments, messages, failures = toolbox.reset_all(
            dataset_messages, dataset_rows, row_indices, encoder.checked_observation
        )
        tools = [*map(toolbox.tools_in, environments)]
    source = Source(
        dataset_rows,
        row_indices,
        messages,
        environments,
        tools,
        failures,
        whole_groups=accelerator.num_processes == 1 or len(rows) % group_size == 0,
        batch_index=batch_index,
    )
    # Groups are counted over all ranks, since a group may straddle ranks. For example, with groups of 2 and 3 rows per
    # rank, rank 0 has the ids 0, 0, 1, and rank 1 has 1, 2, 2
    group_ids = (torch.arange(len(rows)) + accelerator.process_index * len(rows)) // group_size
    prompts = []
    if encodes_text or any(next(iter_refs(prompt), None) is not None for prompt in messages):
        for i, row in enumerate(rows):
            same_group = i > 0 and group_ids[i] == group_ids[i - 1]
            if row.prompt is not None:
                prompts.append(row.prompt)
            elif same_group and same_prompt(messages[i], messages[i - 1]):
                prompts.append(prompts[-1])
            else:
                view = None if views is None else views[row.row_index]
                encode = functools.partial(encoder.encode, row=row.row_index, view=view, **source.template_tools(i))
                try:
                    prompts.append(encode(messages[i]))
                except MediaError as error:
                    # If the messages are the row's own, the row is at fault. If the row has none, no prompt is left
                    if messages[i] is dataset_messages[i] or dataset_messages[i] is None:
                        raise
                    # The environment's observation can't be encoded. The trajectory ends, with the row's own prompt
                    failures[i] = error
                    messages[i] = dataset_messages[i]
                    prompts.append(encode(messages[i]))
    share_media(prompts)
    return Prompted(prompts, group_ids.to(accelerator.device), pad_token_id, source, step)
