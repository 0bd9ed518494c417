# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Packed rows, and left-padded batches.

A packed row holds each prompt once, followed by one branch per completion. A branch is a copy of the prompt's last
token and the completion without its last token: exactly the positions that predict the completion. For example, a
prompt `p0 p1 p2` with the completions `a0 a1` and `b0` is packed as

    row position   0   1   2  |  3   4  |  5
    token          p0  p1  p2 |  p2  a0 |  p2
    label          -   -   -  |  a0  a1 |  b0
    position       0   1   2  |  2   3  |  2

The branch at 3 attends to itself and to the row positions 0 and 1, which it shares with its prompt. If prompts start
alike, the row holds their common start once, and the remainders of these prompts are branches, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn

from ..encoding.prompts import EncodedPrompt
from .layer_masks import Causal, LayerMask, span_mask
from .prompt_groups import group_by_prompt, to_device, with_equal_dims
from .trees import Node, leaf, walk


# Keys and values of a prompt in each attention layer, both `(1, heads, P, head_dim)`
States = dict[nn.Module, tuple[torch.Tensor, torch.Tensor]]

# Arguments of a variable-length kernel for `S` sequences: the cumulative lengths of queries and of keys, both
# `(S + 1,)` as int32, and the largest length of queries and of keys
Sequences = tuple[torch.Tensor, torch.Tensor, int, int]

# A prompt or a branch in a row: (start, length, start of the parent, number of shared tokens). A branch continues its
# parent, and shares all tokens before the parent's last token. A prompt is its own parent and shares no tokens. The
# segments of the example above are (0, 3, 0, 0), (3, 2, 0, 2) and (5, 1, 0, 2).
Segment = tuple[int, int, int, int]

# Prompts in one attention call are padded to the longest. So they share a call only if the longest is at most this
# many times as long as the shortest.
_LENGTH_TOLERANCE = 1.25

# Prompts of unequal length in one call need a mask per branch. If these masks would have more entries than this (1 MiB
# in float32), each prompt gets a separate call, in which its branches share a mask. At such sizes, further calls cost
# little.
MASK_ENTRIES = 2**18

# Two kernel calls replace one if they save at least this many copies of keys, see `PrefixLayout.shared_sequences`.
# With 2 heads of size 128 in half precision, a copy of a key and a value takes 1 KiB, and the gradients take as much.
_COPIED_KEYS = 2**14

# Kernels require multiples of this for the row stride of a mask, and for the first column of a view of a mask
MASK_ALIGNMENT = 16


@dataclass(eq=False)
class PrefixBlock:
    """
    `N` prompts of similar length, or common starts of prompts, and their `M` branches, which take two calls of
    attention. Indices are positions in the packed row, padded on the right by repeats: `prompt_index` `[[0, 1, 2]]`,
    `branch_index` `[[3, 4], [5, 5]]`, `key_index` `[[0, 1, 3, 4], [0, 1, 5, 5]]`.
    """

    prompt_index: torch.Tensor  # of the prompts, `(N, P)`; `(0, 0)` if this block computes branches alone
    branch_index: torch.Tensor  # of the branches, `(M, L)`
    key_index: torch.Tensor  # keys of a branch, `(M, P - 1 + L)`: its prompt without the last token, then the branch
    starts: list[int]  # position of each prompt's first token; empty if this block computes branches alone
    sizes: list[int]  # number of tokens of each prompt
    prompt_of_branch: torch.Tensor  # prompt of each branch, `(M,)`
    # For each prompt, the masks of it and of text after it, by layer type
    layer_masks: list[Mapping[str | None, LayerMask]]

    def unseen_keys(self, layer_type: str | None) -> int:
        """Returns the number of keys at the start that no branch sees because of windows, in layers of a type."""
        masks = [by_type[layer_type] for by_type in self.layer_masks]
        windows = [mask.window for mask in masks if isinstance(mask, Causal) and mask.window is not None]
        return max(min(self.sizes) - max(windows), 0) if len(windows) == len(masks) else 0


@dataclass(eq=False)
class StateLayout:
    """
    A packed row as two batches, for layers that carry a state: `N` prompts without their last token, from whose states
    `M` branches start. In the module's example, `prompt_index` is `[[0, 1]]`, `branch_index` `[[3, 4], [5, 5]]`,
    `restore_index` `[0, 1, 2, 2, 3, 4]`.
    """

    prompt_index: torch.Tensor  # of the prompts without their last token, padded on the left, `(N, H)`
    prompt_mask: torch.Tensor | None  # False on padding, `(N, H)`; `None` without padding
    # Of the branches, padded on the right, `(M, L)`. The last token of a prompt without completions is a branch, too.
    branch_index: torch.Tensor
    prompt_of_branch: torch.Tensor  # prompt of each branch, `(M,)`
    restore_index: torch.Tensor  # index of each row position in the concatenated outputs of both batches, `(T,)`


@dataclass(eq=False)
class PrefixLayout:
    """The attention pattern of a packed row, in the forms that attention backends need."""

    blocks: list[PrefixBlock]
    restore_index: torch.Tensor  # index of each row position in the concatenated outputs of the blocks, `(T,)`
    segments: Sequence[Segment]  # in row order
    # By layer type, if variable-length kernels support its masks: the window of the causal text after prompts (`None`:
    # all tokens), and whether all prompts are causal, too. Other layer types have no entry.
    windows: dict[str | None, tuple[int | None, bool]]
    # A forward of a prompt without completions fills this dictionary. A later forward of completions alone reads it.
    states: States | None = None
    n_cached: int = 0  # number of prompt tokens that the row leaves out, as `states` has their keys and values

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each token of the row in its own sequence, `(1, T)`."""
        _, lengths, _, shared = torch.tensor(self.segments).T
        return to_device(_ranges(shared, lengths)[None, self.n_cached :], self.restore_index.device)

    @cached_property
    def shared_positions(self) -> dict[int, torch.Tensor]:
        """Row positions of the tokens that a segment shares with its parents, by the start of the segment."""
        return _shared_positions(self.segments)

    def sequences(self, window: int | None, with_prompts: bool) -> tuple[torch.Tensor | None, torch.Tensor, Sequences]:
        """
        Returns row positions of queries `(Q,)` (`None`: all) and of keys `(K,)`, and the other arguments of a
        variable-length kernel. Each branch is a sequence. If `with_prompts`, each prompt is a sequence, too.

        Keys of a sequence are the shared tokens, then the branch. Shared tokens before the `window` of the branch's
        first token are left out. That doesn't shift the causal mask, as the kernel aligns it to the last key. The
        module's example without a window and without prompts: queries `[3, 4, 5]`, keys `[0, 1, 3, 4, 0, 1, 5]`,
        cumulative lengths `[0, 2, 3]` and `[0, 4, 7]`. The result is cached for all layers.
        """
        key = ("sequences", window, with_prompts)
        if key not in self._cache:
            # The parent of a prompt is the prompt itself
            segments = [segment for segment in self.segments if with_prompts or segment[0] != segment[2]]
            starts, lengths, _, shared = torch.tensor(segments).T
            n_seen = shared if window is None else shared.clamp(max=window - 1)  # of the shared tokens, the last ones
            pieces = [
                (self.shared_positions[start][n_shared - n :], torch.arange(start, start + length))
                for (start, length, _, n_shared), n in zip(segments, n_seen.tolist(), strict=True)
            ]
            keys = torch.cat([*chain.from_iterable(pieces)])
            bounds = [F.pad(sizes.cumsum(0), (1, 0)).int() for sizes in (lengths, n_seen + lengths)]
            device = self.restore_index.device
            queries = None if with_prompts or self.n_cached else to_device(_ranges(starts, lengths), device)
            sequences = [to_device(cumulative_lengths, device) for cumulative_lengths in bounds]
            longest = int(lengths.max()), int((n_seen + lengths).max())
            self._cache[key] = queries, to_device(keys, device), (*sequences, *longest)
        return self._cache[key]

    def shared_sequences(
        self, with_prompts: bool
    ) -> tuple[torch.Tensor | None, Sequences, torch.Tensor | None, torch.Tensor, Sequences] | None:
        """
        Returns the arguments of two kernel calls that replace the call of [`sequences`] without a window, or `None` if
        two calls would save few copies of keys.

        In the first call, each sequence attends to its own tokens. In the second call, all sequences with the same
        parent are joined to one sequence of queries, and attend to the tokens that they share. In the module's
        example, the second call has one sequence of the queries `[3, 4, 5]` and one of the keys `[0, 1]`.

        The result has five entries. For the first call: row positions `(Q,)` of queries and keys (`None`: all), and
        the kernel's other arguments. For the second call: indices `(R,)` of its queries among the first call's queries
        (`None`: all), row positions `(K,)` of its keys, including cached keys, and the kernel's other arguments.
        """
        key = ("shared", with_prompts)
        if key not in self._cache:
            self._cache[key] = self._shared_sequences(with_prompts)
        return self._cache[key]

    def _shared_sequences(self, with_prompts: bool):
        segments = [segment for segment in self.segments if with_prompts or segment[0] != segment[2]]
        # By parent, the row positions of the tokens that its sequences share
        shared = {
            parent: self.shared_positions[start]
            for start, _, parent, _ in segments
            if len(self.shared_positions[start])
        }
        # By parent, the indices of its sequences' queries among the first call's queries
        query_index: dict[int, list[torch.Tensor]] = {parent: [] for parent in shared}
        offset = 0
        for _, length, parent, n_shared in segments:
            if n_shared:
                query_index[parent].append(torch.arange(offset, offset + length))
            offset += length
        # A single call copies shared keys for each sequence, and cached keys once more, to join them with the row's
        # keys. Two calls copy shared keys once.
        n_joins = 1 if self.n_cached else 0
        n_copies = {parent: len(indices) + n_joins for parent, indices in query_index.items()}
        n_saved = sum(len(shared[parent]) * (n - 1) for parent, n in n_copies.items())
        if not n_saved or n_saved < _COPIED_KEYS:
            return None
        starts, lengths, _, _ = torch.tensor(segments).T
        joined_index = [torch.cat(indices) for indices in query_index.values()]
        index = torch.cat(joined_index)
        device = self.restore_index.device

        def bounds(sizes: torch.Tensor) -> tuple[torch.Tensor, int]:
            return to_device(F.pad(sizes.cumsum(0), (1, 0)).int(), device), int(sizes.max())

        sequence_bounds, longest = bounds(lengths)
        query_bounds, most_queries = bounds(torch.tensor([len(indices) for indices in joined_index]))
        key_bounds, most_keys = bounds(torch.tensor([len(positions) for positions in shared.values()]))
        return (
            None if with_prompts or self.n_cached else to_device(_ranges(starts, lengths), device),
            (sequence_bounds, sequence_bounds, longest, longest),
            None if len(index) == offset and (index.diff() == 1).all() else to_device(index, device),
            to_device(torch.cat([*shared.values()]), device),
            (query_bounds, key_bounds, most_queries, most_keys),
        )

    @cached_property
    def varlen_restore_index(self) -> torch.Tensor:
        """Index of each row position, `(T,)`, in the outputs of all blocks' prompts (padded) and then all branches."""
        spans = []  # (row position, length, index in outputs)
        offset = 0
        for block in self.blocks:
            n, width = block.prompt_index.shape
            spans += [(block.starts[i], block.sizes[i], offset + i * width) for i in range(n)]
            offset += n * width
        for start, length, parent, _ in self.segments:
            if start != parent:
                spans.append((start, length, offset))
                offset += length
        return to_device(_restore_index(spans), self.restore_index.device)

    @cached_property
    def state_layout(self) -> StateLayout:
        """The layout for layers that carry a state from token to token, computed once for all these layers."""
        prompts = [(start, length) for start, length, parent, _ in self.segments if start == parent]
        prompt_of_segment = {start: i for i, (start, _) in enumerate(prompts)}  # index of a segment's prompt, by start
        parents = {parent for start, _, parent, _ in self.segments if start != parent}
        # A path leads from the last token of a prompt, or of a common start, to the end of a completion. Completions
        # after the same remainder have paths of their own, which compute the remainder's states again.
        paths = []
        prompt_of_branch = []
        for start, length, parent, _ in self.segments:
            index = prompt_of_segment[start] = prompt_of_segment[parent]
            if start not in parents:  # the segment ends a path
                sequence = torch.cat([self.shared_positions[start], torch.arange(start, start + length)])
                paths.append(sequence[prompts[index][1] - 1 :])
                prompt_of_branch.append(index)

        starts, sizes = torch.tensor(prompts).T[:, :, None]
        longest = max(1, int(sizes.max()) - 1)  # of the prompts without their last token
        prompt_steps = torch.arange(longest) - longest + sizes - 1  # below 0 on padding
        prompt_index = starts + prompt_steps.clamp(min=0)

        lengths = torch.tensor([[len(path)] for path in paths])
        # At least two steps, since mixers take a single token for a decoding step, which has no gradient
        steps = torch.arange(max(2, int(lengths.max())))
        branch_index = torch.stack([path[steps.clamp(max=len(path) - 1)] for path in paths])

        is_prompt = prompt_steps >= 0
        is_branch = steps < lengths
        prompt_outputs, branch_outputs = torch.arange(prompt_index.numel() + branch_index.numel()).split(
            [prompt_index.numel(), branch_index.numel()]
        )
        restore = torch.empty_like(self.restore_index, device="cpu")
        restore[prompt_index[is_prompt]] = prompt_outputs.view_as(prompt_index)[is_prompt]
        restore[branch_index[is_branch]] = branch_outputs.view_as(branch_index)[is_branch]
        # The last token of a parent takes the output of its copy at the start of a branch
        last_positions = {start: start + length - 1 for start, length, *_ in self.segments}
        for start, _, parent, _ in reversed(self.segments):
            if start != parent:
                restore[last_positions[parent]] = restore[start]

        device = self.restore_index.device
        return StateLayout(
            to_device(prompt_index, device),
            None if is_prompt.all() else to_device(is_prompt, device),
            to_device(branch_index, device),
            to_device(torch.tensor(prompt_of_branch), device),
            to_device(restore, device),
        )

    @cached_property
    def _cache(self) -> dict:
        return {}

    def prompts(
        self, block: PrefixBlock, layer_type: str | None, dtype: torch.dtype, is_causal: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """
        Returns positions of queries `(N * C, L)` and keys `(N * C, K)` of a block's prompts, cached, and an additive
        mask `(1 or N * C, 1, L, K)`, `None` if plain causal. Prompts much longer than their windows are `C` chunks,
        which see nearby keys alone; else `C` is 1.
        """
        all_causal = all(masks[layer_type] is None for masks in block.layer_masks)
        if all_causal and is_causal:
            return block.prompt_index, block.prompt_index, None
        key = ("prompts", block, layer_type, dtype)
        if key not in self._cache:
            self._cache[key] = self._local_prompts(
                block, [by_type[layer_type] for by_type in block.layer_masks], dtype
            )
        if self._cache[key] is None:
            n, width = block.prompt_index.shape
            if all_causal:  # one mask for all prompts, as padding is on the right, where no token sees it
                masks = self._full_masks(1, width, width, dtype).triu_(1)
            else:
                masks = self._full_masks(n, width, width, dtype)
                masks.diagonal(dim1=1, dim2=2).zero_()  # padding sees itself
                for mask, by_type, size in zip(masks, block.layer_masks, block.sizes, strict=True):
                    mask[:size, :size].masked_fill_(self._boolean_mask(by_type[layer_type], 0, size), 0.0)
            self._cache[key] = block.prompt_index, block.prompt_index, masks[:, None]
        return self._cache[key]

    def branches(
        self, block: PrefixBlock, layer_type: str | None, dtype: torch.dtype, heads_per_key: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Returns positions of queries `(M, L)` and keys `(M, K)` of a block's branches, cached, without keys that none
        sees, and an additive mask `(1 or M, 1, L * G, K)`, in which row `l * G + g` is for query `l` of head `g` of
        the `G = heads_per_key` of a key head.
        """
        n_skipped = block.unseen_keys(layer_type)
        positions = block.branch_index, block.key_index[:, n_skipped:]
        if len(set(block.sizes)) == 1 and all(by_type[layer_type] is None for by_type in block.layer_masks):
            return *positions, self._causal_mask(block, dtype, heads_per_key)
        key = ("branches", block, layer_type, dtype, heads_per_key)
        if key not in self._cache:
            n = len(block.sizes)
            longest = block.branch_index.size(1)
            n_shared = max(block.sizes) - 1 - n_skipped
            # One mask per prompt: columns of the shared tokens, padded to `n_shared`, then columns of the branch
            masks = self._full_masks(n, longest, n_shared + longest, dtype)
            masks[:, :, n_shared:].diagonal(dim1=1, dim2=2).zero_()
            for mask, by_type, size in zip(masks, block.layer_masks, block.sizes, strict=True):
                is_seen = self._boolean_mask(by_type[layer_type], size - 1, size - 1 + longest)
                mask[:, : size - 1 - n_skipped].masked_fill_(is_seen[:, n_skipped : size - 1], 0.0)
                mask[:, n_shared:].masked_fill_(is_seen[:, size - 1 :], 0.0)
            masks = masks[block.prompt_of_branch.to(masks.device)] if n > 1 else masks
            self._cache[key] = self._repeat_rows(masks, heads_per_key)[:, None]
        return *positions, self._cache[key]

    def _causal_mask(self, block: PrefixBlock, dtype: torch.dtype, heads_per_key: int) -> torch.Tensor:
        """Returns a view of one mask for all blocks whose branches follow equally long prompts."""

        def count_keys_and_queries(block: PrefixBlock) -> tuple[int, int]:
            return block.sizes[0] - 1, block.branch_index.size(1)

        # Of all blocks with equally long prompts
        shapes = [count_keys_and_queries(candidate) for candidate in self.blocks if len(set(candidate.sizes)) == 1]
        most_before, most_queries = (max(counts) for counts in zip(*shapes, strict=True))
        key = ("branches", dtype, heads_per_key)
        if key not in self._cache:
            spare_rows = max((n_before - most_before) % MASK_ALIGNMENT for n_before, _ in shapes)
            masks = self._full_masks(
                1, most_queries + spare_rows, most_before + most_queries + spare_rows, dtype
            ).triu_(most_before + 1)
            self._cache[key] = self._repeat_rows(masks, heads_per_key)
        n_before, n_queries = count_keys_and_queries(block)
        # Entry `(i, j)` of the block's mask is entry `(down + i, right + j)` of the common mask, and both are visible
        # if `j <= n_before + i`. A move of the view along the diagonal changes nothing, and aligns its first column.
        down = (n_before - most_before) % MASK_ALIGNMENT
        right = most_before - n_before + down
        return self._cache[key][
            :, None, down * heads_per_key : (down + n_queries) * heads_per_key, right : right + n_before + n_queries
        ]

    def _local_prompts(self, block: PrefixBlock, masks: Sequence[LayerMask], dtype: torch.dtype):
        """
        Returns the result of [`prompts`] in chunks, or `None` if a window is missing or too long. With a window of 4
        and a lookahead of 0, queries 0 to 3 of a chunk see keys -3 to 3 relative to it.
        """
        causal_masks = [
            (mask.window, mask.lookahead, mask.prompt)
            for mask in masks
            if isinstance(mask, Causal) and mask.window and mask.lookahead is not None
        ]
        if len(causal_masks) < len(masks):
            return None
        window = max(values[0] for values in causal_masks)
        lookahead = max(values[1] for values in causal_masks)
        # `size`: number of queries of a chunk. `width`: padded length of a prompt.
        size = max(window, lookahead)
        width = block.prompt_index.size(1)
        n_keys = window - 1 + size + lookahead
        if width < 2 * n_keys:  # chunks would save little
            return None
        # Positions in prompts, `(C, L)` and `(C, K)`; keys before the start and after the end are masked in `is_seen`
        chunk_starts = torch.arange(0, width, size)[:, None]
        queries = chunk_starts + torch.arange(size)
        keys = chunk_starts + torch.arange(n_keys) - window + 1
        distance = queries[:, :, None] - keys[:, None]
        masks_of_prompts = []
        for (prompt_window, _, prompt), length in zip(causal_masks, block.sizes, strict=True):
            query_index, key_index = (values.clamp(0, length - 1) for values in (queries[:, :, None], keys[:, None]))
            is_seen = (distance >= 0) & (distance < prompt_window)  # causal, unless the prompt has spans
            if prompt is not None:
                is_seen = (key_index >= prompt[query_index, 0]) & (key_index < prompt[query_index, 1])
            # Padding sees itself, so that no row of the mask hides all keys
            masks_of_prompts.append((is_seen & (keys >= 0)[:, None] & (keys < length)[:, None]) | (distance == 0))
        device = self.restore_index.device
        is_seen = to_device(torch.cat(masks_of_prompts), device)
        additive = self._full_masks(len(is_seen), size, n_keys, dtype).masked_fill_(is_seen, 0.0)[:, None]
        starts, lengths = torch.tensor([block.starts, block.sizes])[:, :, None, None]
        queries, keys = (starts + values.clamp(min=0).minimum(lengths - 1) for values in (queries, keys))
        return to_device(queries.flatten(0, 1), device), to_device(keys.flatten(0, 1), device), additive

    def _boolean_mask(self, mask: LayerMask, start: int, end: int) -> torch.Tensor:
        """Returns the boolean mask `(end - start, end)` of the queries from `start` to before `end` of a sequence."""
        device = self.restore_index.device
        if isinstance(mask, torch.Tensor):
            return span_mask(mask[start:end].to(device), end)
        mask = mask or Causal()
        if mask.prompt is not None and end == len(mask.prompt):
            return span_mask(mask.prompt[start:].to(device), end)
        is_seen = torch.ones(end - start, end, dtype=torch.bool, device=device).tril(start)
        return is_seen if mask.window is None else is_seen.triu(start - mask.window + 1)

    def _repeat_rows(self, masks: torch.Tensor, heads_per_key: int) -> torch.Tensor:
        if heads_per_key == 1:
            return masks
        n, n_queries, n_keys = masks.shape
        repeated = self._full_masks(n, n_queries * heads_per_key, n_keys, masks.dtype)
        repeated.unflatten(1, (n_queries, heads_per_key)).copy_(masks[:, :, None])
        return repeated

    def _full_masks(self, n: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns additive masks `(n, rows, columns)` with aligned row strides, in which all keys are hidden."""
        shape = (n, rows, -(-columns // MASK_ALIGNMENT) * MASK_ALIGNMENT)
        masks = torch.full(shape, torch.finfo(dtype).min, dtype=dtype, device=self.restore_index.device)
        return masks[:, :, :columns]


@dataclass(eq=False)
class PackedRow:
    """`T` tokens of prompts and completions in one row without padding, see the module's example."""

    input_ids: torch.Tensor  # `[prompt 1 | branch 1 | branch 2 | ... | prompt 2 | ...]`, `(1, T)`
    shift_labels: torch.Tensor  # the token that each position predicts, -100 on prompts, `(1, T)`
    position_ids: torch.Tensor  # of each token in its own sequence, `(1, T)` or `(R, 1, T)`
    token_fields: dict[str, torch.Tensor]  # each `(1, T)`
    nodes: dict[int, Node]  # nodes of the prompts' trees, by the row position of the node's first token
    parts: list[EncodedPrompt]  # prompts and later turns that hold the row's media, in row order
    layout: PrefixLayout
    label_index: torch.Tensor  # positions with a label, `(N,)`
    score_index: torch.Tensor  # row position that predicts each completion token, 0 on padding, `(B, C)`; in the
    # module's example `[[3, 4], [5, 0]]`


def packed_length(prompts: Sequence[EncodedPrompt], lengths: Sequence[int]) -> int:
    """Returns the number of tokens of the packed row of completions, if different prompts share no tokens."""
    return sum(len(prompt) for prompt in group_by_prompt(prompts)) + sum(lengths)


def pack(
    prompts: Sequence[EncodedPrompt],
    completion_ids: torch.Tensor,
    completion_mask: torch.Tensor,
    masks: Sequence[Mapping[str | None, LayerMask]],
    field_fill: Mapping[str, int] | None = None,
    with_last: bool = False,
    trees: Sequence[Node] | None = None,
    device: torch.device | None = None,
) -> PackedRow:
    """
    Lays out prompts and completions as one row, see the module's example.

    The row holds each prompt, or each node of the prompts' `trees`, once. `masks` are the
    [`~forward.masks.linear_masks`] of each unique prompt, in order of first appearance. `field_fill` has the values of
    token fields on completion tokens, by default 0. A completion without tokens isn't in the row. With `with_last`,
    the row also holds the last token of each completion, which predicts nothing. The row is on the `device`, by
    default the device of the completions.

    Shapes: `completion_ids`, `completion_mask` `(B, C)`, padded on the right.
    """
    device = device or completion_ids.device
    lengths = completion_mask.sum(1).tolist()
    completions = completion_ids.cpu()
    groups = group_by_prompt(prompts)
    masks_of_prompt = dict(zip(groups, masks, strict=True))
    fields = sorted(set().union(*(prompt.token_fields for prompt in prompts)))

    ids = []
    labels = []
    positions = []
    segments = []
    field_pieces: dict[str, list[torch.Tensor]] = {name: [] for name in fields}
    parts: list[EncodedPrompt] = []
    score_start = torch.zeros(len(prompts), dtype=torch.long)
    starts: dict[Node, int] = {}  # of nodes in the row
    offset = 0
    for node, parent in walk([*map(leaf, groups)] if trees is None else trees):
        # A node starts with a copy of its parent's last token
        prompt = node.prompt
        first_token = 0 if parent is None else parent.stop - 1
        span = slice(first_token, node.stop)
        start = offset
        size = node.stop - first_token
        starts[node] = start
        segments.append((start, size, start if parent is None else starts[parent], first_token))
        ids.append(prompt.input_ids[span])
        labels.append(torch.full((size,), -100))
        positions.append(prompt.position_ids[..., span])
        if first_token <= (prompt.media_span or (0,))[0] < node.stop:  # the node has the first placeholder
            parts.append(prompt.parts[0])
        for name in fields:
            field_pieces[name].append(prompt.token_fields.get(name, torch.zeros_like(prompt.input_ids))[span])
        offset += size
        members = [] if node.children else groups[prompt]  # completions follow leaves
        for member in members:
            length = lengths[member]
            if length == 0:
                continue
            completion = completions[member, :length]
            n_tokens = length if with_last else length - 1
            ids.append(torch.cat([prompt.input_ids[-1:], completion[:n_tokens]]))
            labels.append(F.pad(completion, (0, n_tokens + 1 - length), value=-100))
            sequence = prompts[member]  # unlike the shared `prompt`, has media of the completion's later turns
            positions.append(torch.cat([sequence.position_ids[..., -1:], sequence.positions_after(n_tokens)], dim=-1))
            parts += sequence.parts[1:]
            for name in fields:
                fill = (field_fill or {}).get(name, 0)
                field_pieces[name].append(F.pad(sequence.field_after(name, n_tokens, fill), (1, 0), value=fill))
            segments.append((offset, n_tokens + 1, start, len(prompt) - 1))
            score_start[member] = offset
            offset += n_tokens + 1

    labels = torch.cat(labels)
    steps = torch.arange(completion_ids.size(1))
    in_row = steps < torch.tensor(lengths)[:, None]
    score_index = torch.where(in_row, score_start[:, None] + steps, 0)
    return PackedRow(
        input_ids=to_device(torch.cat(ids)[None], device),
        shift_labels=to_device(labels[None], device),
        position_ids=to_device(torch.cat(with_equal_dims(positions), dim=-1), device),
        token_fields={name: to_device(torch.cat(values)[None], device) for name, values in field_pieces.items()},
        nodes={start: node for node, start in starts.items()},
        parts=parts,
        layout=_layout(segments, {start: masks_of_prompt[node.prompt] for node, start in starts.items()}, device),
        label_index=to_device((labels != -100).nonzero()[:, 0], device),
        score_index=to_device(score_index, device),
    )


def _layout(
    segments: Sequence[Segment], masks: Mapping[int, Mapping[str | None, LayerMask]], device: torch.device
) -> PrefixLayout:
    """`masks` holds the masks of prompts and of trees' nodes, by start in the row."""
    shared_positions = _shared_positions(segments)
    branches_of = {start: [] for start in masks}
    for start, length, parent, _ in segments:
        if start != parent:
            branches_of[parent].append((start, length))
    units = [
        _Unit(
            torch.cat([shared_positions[start], torch.arange(start, start + length)]),
            branches_of[start],
            masks[start],
            start == parent,
        )
        for start, length, parent, _ in segments
        if start in masks and (start == parent or branches_of[start])
    ]
    # Prompts of similar length share a block, so that many short prompts need few attention calls. A cluster holds the
    # units of one block.
    clusters: list[list[_Unit]] = []
    for unit in sorted(units, key=lambda unit: (not unit.is_root, len(unit.tokens))):
        if clusters and _should_share_call([*clusters[-1], unit]):
            clusters[-1].append(unit)
        else:
            clusters.append([unit])

    blocks = []
    spans = []
    offset = 0
    for cluster in clusters:
        block = _block(cluster, device)
        prompts = [(int(unit.tokens[0]), len(unit.tokens)) for unit in cluster if unit.is_root]
        branches = [*chain.from_iterable(unit.branches for unit in cluster)]
        for index, sequences in ((block.prompt_index, prompts), (block.branch_index, branches)):
            spans += [(start, size, offset + row * index.size(1)) for row, (start, size) in enumerate(sequences)]
            offset += index.numel()
        blocks.append(block)
    # Lengths of the units' longest sequences, in which a branch replaces the unit's last token
    lengths = [len(unit.tokens) - 1 + max((length for _, length in unit.branches), default=1) for unit in units]
    windows = {
        layer_type: _window([unit.masks[layer_type] for unit in units], lengths) for layer_type in units[0].masks
    }
    windows = {layer_type: window for layer_type, window in windows.items() if window is not None}
    return PrefixLayout(blocks, to_device(_restore_index(spans), device), segments, windows)


@dataclass
class _Unit:
    """A prompt, or another node of a prompt's tree, and the branches after it."""

    tokens: torch.Tensor  # row positions of the tokens from the tree's root to the end of the unit, `(P,)`
    branches: list[tuple[int, int]]  # (start, length) in the row
    masks: Mapping[str | None, LayerMask]
    is_root: bool  # whether the unit is the root of its tree


def _shared_positions(segments: Sequence[Segment]) -> dict[int, torch.Tensor]:
    """Returns the row positions of the tokens that a segment shares with its parents, by the start of the segment."""
    shared_positions = {}  # of a segment itself
    child_positions = {}  # of its children
    parents = {parent for start, _, parent, _ in segments if start != parent}
    for start, length, parent, _ in segments:
        shared_positions[start] = torch.arange(0) if start == parent else child_positions[parent]
        if start in parents:
            child_positions[start] = torch.cat([shared_positions[start], torch.arange(start, start + length - 1)])
    return shared_positions


def _window(masks: Sequence[LayerMask], lengths: Sequence[int]) -> tuple[int | None, bool] | None:
    """
    Returns the window of the causal text after each prompt, if all have the same, and whether the prompts are causal,
    too; otherwise `None`. transformers makes no mask for a sequence that fits into the window, so masks without one
    agree.
    """
    causal = [mask or Causal() for mask in masks if not isinstance(mask, torch.Tensor)]
    if len(causal) < len(masks):
        return None
    window = max((mask.window for mask in causal if mask.window is not None), default=None)
    for mask, length in zip(causal, lengths, strict=True):
        if mask.window != window and (mask.window is not None or window is None or length > window):
            return None
    return window, all(mask.prompt is None for mask in causal)


def _restore_index(spans: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Returns the index of each row position in outputs, from spans `(row position, length, index in outputs)`."""
    starts, lengths, outputs = torch.tensor(spans).T
    return _ranges(outputs, lengths)[_ranges(starts, lengths).argsort()]


def _ranges(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns concatenated ranges of integers: for the starts 3 and 0 and the lengths 2 and 3, `[3, 4, 0, 1, 2]`."""
    starts = starts.flatten()
    lengths = lengths.flatten()
    return (starts - lengths.cumsum(0) + lengths).repeat_interleave(lengths) + torch.arange(int(lengths.sum()))


def _should_share_call(units: Sequence[_Unit]) -> bool:
    """Returns whether units, sorted from the shortest to the longest, should share an attention call."""
    shortest = len(units[0].tokens)
    longest = len(units[-1].tokens)
    if units[0].is_root != units[-1].is_root or longest > _LENGTH_TOLERANCE * shortest:
        return False
    masks = chain.from_iterable(unit.masks.values() for unit in units)
    if shortest == longest and all(mask is None for mask in masks):
        return True  # one mask for all branches
    lengths = [length for _, length in chain.from_iterable(unit.branches for unit in units)]
    return len(lengths) * max(lengths, default=0) * (longest - 1 + max(lengths, default=0)) <= MASK_ENTRIES


def _block(units: Sequence[_Unit], device: torch.device) -> PrefixBlock:
    """Takes units of which all are roots of their trees, or none is."""
    sizes = [len(unit.tokens) for unit in units]
    # Padding repeats the last position. Causal attention and masks hide padding from tokens, and outputs of padding
    # are dropped.
    steps = torch.arange(max(sizes))
    prompt_index = torch.stack([unit.tokens[steps.clamp(max=len(unit.tokens) - 1)] for unit in units])

    n_branches = torch.tensor([len(unit.branches) for unit in units])
    prompt_of_branch = torch.arange(len(units)).repeat_interleave(n_branches)
    branches = [*chain.from_iterable(unit.branches for unit in units)]
    branches = torch.tensor(branches, dtype=torch.long).view(-1, 2)
    longest = int(branches[:, 1].max()) if len(branches) else 0
    branch_steps = torch.arange(longest)
    branch_index = branches[:, :1] + torch.minimum(branch_steps, branches[:, 1:] - 1)
    key_index = torch.cat([prompt_index[prompt_of_branch, : max(sizes) - 1], branch_index], dim=1)

    starts = [int(unit.tokens[0]) for unit in units if unit.is_root]
    prompt_index = prompt_index if starts else prompt_index[:0, :0]
    prompt_index, branch_index, key_index = (
        to_device(index, device) for index in (prompt_index, branch_index, key_index)
    )
    return PrefixBlock(
        prompt_index, branch_index, key_index, starts, sizes, prompt_of_branch, [unit.masks for unit in units]
    )
