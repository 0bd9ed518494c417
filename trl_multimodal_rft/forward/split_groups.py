# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Forwards of a group with more tokens than the token budget: the prompt once, then the completions in chunks."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import torch
from transformers import PreTrainedModel

from ..encoding.prompts import EncodedPrompt
from .layout import PackedRow, States
from .states import has_states


class KeptPrompt:
    """
    Keys and values of a prompt, from `forward`, for chunks of its completions. All chunks but the last attend to
    detached ones, whose gradients a hook sums in float32; the last chunk's backward adds them, and goes on through the
    prompt.
    """

    def __init__(self, forward: Callable[[], States]):
        self._forward = forward
        self._states: States = {}
        # Sums of gradients by attention layer, and by 0 for keys or 1 for values
        self._sums: dict[tuple, torch.Tensor] = {}

    def states(self, is_first: bool, is_last: bool) -> States:
        """Returns keys and values for a chunk. The first chunk computes them, and the last chunk frees them."""
        if is_first:
            self._states = self._forward()
            self._sums = {}
        states = self._states
        sums = self._sums
        if is_last:
            self._states = {}
            self._sums = {}
        if not torch.is_grad_enabled():
            return states
        prepare = _add_sum if is_last else _detach_and_sum
        return {
            layer: (prepare(keys, sums, (layer, 0)), prepare(values, sums, (layer, 1)))
            for layer, (keys, values) in states.items()
        }


def _detach_and_sum(state: torch.Tensor, sums: dict[tuple, torch.Tensor], key: tuple) -> torch.Tensor:
    """Returns detached keys or values, with a hook that adds their gradient to the sum at `key`."""

    def add_gradient(leaf: torch.Tensor) -> None:
        gradient = leaf.grad
        leaf.grad = None
        if gradient is not None:
            gradient_sum = gradient.float() if gradient.dtype.itemsize < 4 else gradient
            sums[key] = gradient_sum if key not in sums else sums[key].add_(gradient_sum)

    leaf = state.detach()
    if state.requires_grad:
        leaf.requires_grad_().register_post_accumulate_grad_hook(add_gradient)
    return leaf


def _add_sum(state: torch.Tensor, sums: dict[tuple, torch.Tensor], key: tuple) -> torch.Tensor:
    """Returns keys or values with their graph, and with a hook that adds the sum at `key` to their gradient."""
    if not state.requires_grad:
        return state
    state = state.view_as(state)
    state.register_hook(lambda gradient: (gradient + sums.pop(key)).to(gradient.dtype) if key in sums else None)
    return state


def without_prompt(row: PackedRow, states: States) -> PackedRow:
    """Returns a row without its single prompt. The completions attend to the prompt's `states`."""
    [block] = row.layout.blocks
    _, n_prompt, *_ = row.layout.segments[0]
    layout = replace(
        row.layout,
        blocks=[
            replace(
                block, prompt_index=block.prompt_index[:0, :0], branch_index=block.branch_index - n_prompt, starts=[]
            )
        ],
        restore_index=row.layout.restore_index[n_prompt:] - n_prompt,
        # `False` tells kernels not to compute prompts, since the row has none
        windows={layer_type: (window, False) for layer_type, (window, _) in row.layout.windows.items()},
        states=states,
        n_cached=n_prompt,
    )
    return replace(
        row,
        input_ids=row.input_ids[:, n_prompt:],
        shift_labels=row.shift_labels[:, n_prompt:],
        position_ids=row.position_ids[..., n_prompt:],
        token_fields={name: value[:, n_prompt:] for name, value in row.token_fields.items()},
        parts=row.parts[1:],
        layout=layout,
        label_index=row.label_index - n_prompt,
        # Padding, which had index 0, gets index 0 again. Its scores are masked.
        score_index=(row.score_index - n_prompt).clamp(min=0),
    )


def chunk_ends(prompts: Sequence[EncodedPrompt], parts: Sequence[Sequence[int]]) -> dict[int, tuple[bool, bool]]:
    """
    Returns whether a chunk of a split group is the group's first and last, `(is_first, is_last)`, by its index in
    `parts`. `parts` holds the batch indices of each forward's completions. If completions 0 to 2 belong to one group,
    and 3 and 4 to another, `[[0, 1], [2], [3, 4]]` gives `{0: (True, False), 1: (False, True)}`.
    """
    # Completions of one prompt have the same object as `shared`
    prompts_of_parts = [{prompts[i].shared for i in part} for part in parts]
    n_chunks = Counter(chain.from_iterable(prompts_of_parts))
    n_seen = Counter()
    ends = {}
    for index, part_prompts in enumerate(prompts_of_parts):
        # At most one prompt, as a chunk holds a single prompt
        for prompt in [prompt for prompt in part_prompts if n_chunks[prompt] > 1]:
            n_seen[prompt] += 1
            ends[index] = n_seen[prompt] == 1, n_seen[prompt] == n_chunks[prompt]
    return ends


def keeps_states(model: PreTrainedModel) -> bool:
    """
    Returns whether completions can be forwarded after a [`KeptPrompt`]. Two features of a model prevent this: layers
    with a recurrent or convolutional state, as only keys and values are kept, and reentrant checkpointing, as it hides
    the prompt's graph.
    """
    if has_states(model):
        return False
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(module, "gradient_checkpointing", False) and getattr(function, "keywords", {}).get("use_reentrant"):
            return False
    return True
