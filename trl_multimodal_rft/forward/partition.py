# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Partitions of completions into micro-batches, and of micro-batches into parts within a token budget."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

import torch

from ..encoding.prompts import EncodedPrompt
from .layout import packed_length
from .prompt_groups import group_by_prompt
from .trees import prompt_trees


T = TypeVar("T")


def micro_batch_order(
    prompts: Sequence[EncodedPrompt], lengths: Sequence[int], n_batches: int, generator: torch.Generator | None = None
) -> list[int]:
    """
    Returns the batch indices of completions in the order of `n_batches` micro-batches of equal size. The micro-batches
    have balanced packed lengths, and a random order. For example, the completions of prompts A, B, A, B in 2
    micro-batches have the order `[0, 2, 1, 3]` or `[1, 3, 0, 2]`.

    Groups, and prompts that start alike, stay together. A group that fits into no micro-batch is split over as few
    micro-batches as possible. The order doesn't depend on whether rows are packed, so updates are the same for packed
    and padded rows. With equal generators, ranks run their longest micro-batches at the same position.
    """
    size = len(prompts) // n_batches
    groups = group_by_prompt(prompts)
    n_completion_tokens = {prompt: sum(lengths[i] for i in members) for prompt, members in groups.items()}
    # Completions that should stay together: the tokens that their prompts share, and their batch indices
    bundles: list[tuple[int, list[int]]] = []
    for tree in prompt_trees(n_completion_tokens, groups):
        n_shared = tree.stop if tree.children else 0  # tokens of the common start, which each bundle holds once
        members = []
        for prompt in tree.leaves:
            if members and len(members) + len(groups[prompt]) > size:
                bundles.append((n_shared, members))
                members = []
            members = members + groups[prompt]
        bundles.append((n_shared, members))

    def load(n_shared: int, members: list[int]) -> int:
        """Returns the number of tokens of a bundle, or of a piece of one, in a packed row."""
        n_counted = sum(len(prompt) - n_shared for prompt in {prompts[i] for i in members})
        return n_shared + n_counted + sum(lengths[i] for i in members)

    batches: list[list[int]] = [[] for _ in range(n_batches)]
    loads = [0] * n_batches
    for n_shared, members in sorted(bundles, key=lambda bundle: -load(*bundle)):
        while members:
            n_free = [size - len(batch) for batch in batches]
            fitting = [b for b in range(n_batches) if n_free[b] >= len(members)]
            # The lightest micro-batch with room for all members, or else the micro-batch with the most room
            b = min(fitting, key=lambda b: loads[b]) if fitting else max(range(n_batches), key=lambda b: n_free[b])
            chosen = members[: n_free[b]]
            members = members[n_free[b] :]
            batches[b] += chosen
            loads[b] += load(n_shared, chosen)
    # Ranks with equal generators draw equal permutations, so sorted micro-batches of similar load run at the same time
    if generator is not None:
        batches = [batches[b] for b in sorted(range(n_batches), key=lambda b: -loads[b])]
    order = torch.randperm(n_batches, generator=generator).tolist()
    return [*chain.from_iterable(batches[b] for b in order)]


def split_by_tokens(
    prompts: Sequence[EncodedPrompt], lengths: Sequence[int], max_tokens: int, packed: bool = True
) -> list[list[int]]:
    """
    Splits completions into parts of at most `max_tokens` tokens, first-fit decreasing, as batch indices. Groups stay
    together, unless they exceed it; the prompt counts in each of their chunks, which come last: 4 tokens with
    completions of 3, 3 and 2 become `[[0, 1], [2]]` at 10.
    """

    def size(index_lists: list[list[int]]) -> int:
        """Returns the number of tokens of all listed completions in a packed row, or in padded rows with padding."""
        members = sum(index_lists, [])
        if packed:
            return packed_length([prompts[i] for i in members], [lengths[i] for i in members])
        return len(members) * (max(len(prompts[i]) for i in members) + max(lengths[i] for i in members))

    groups = []
    chunks = []
    for members in group_by_prompt(prompts).values():
        # Completions to split. Completions without tokens join the first chunk, since a packed chunk needs tokens.
        scored = [[i] for i in members if lengths[i] or not packed]
        if len(scored) < 2 or size([members]) <= max_tokens:
            groups.append(members)
            continue
        group_chunks = [sum(chunk, []) for chunk in first_fit(scored, size, max_tokens)]
        chunks += [group_chunks[0] + [i for i in members if [i] not in scored], *group_chunks[1:]]
    return [sum(part, []) for part in first_fit(groups, size, max_tokens)] + chunks


def first_fit(items: Sequence[T], size: Callable[[list[T]], int], capacity: int) -> list[list[T]]:
    """
    Fills bins of a `capacity` with items, from the largest to the smallest. An item goes to the first bin with room,
    or to a new bin, even if the item alone is larger than the capacity.
    """
    bins: list[list[T]] = []
    for item in sorted(items, key=lambda item: -size([item])):
        fitting = next((candidate for candidate in bins if size([*candidate, item]) <= capacity), None)
        if fitting is None:
            bins.append([item])
        else:
            fitting.append(item)
    return bins
