# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The packed row: every prompt once, followed by its completions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F

from ..encoding.prompts import EncodedPrompt
from ..families import IMAGE_SIZES


T = TypeVar("T")

# Prompts share an attention call if the longest exceeds the shortest by no more than this factor, which bounds padding
_LENGTH_TOLERANCE = 1.25

# Prompts of unequal length in one call need a mask per branch. Beyond so many entries (1 MiB in float32), each prompt
# gets its own call, where its branches share a mask; by then the work outweighs a call.
MASK_ENTRIES = 2**18

# Kernels want the length of a mask's rows, and their first column, to be multiples of this
MASK_ALIGNMENT = 16


@dataclass(eq=False)
class PrefixBlock:
    """
    `N` prompts of similar length and their `M` branches, attended in two calls: the prompts, then the branches.

    A branch is a copy of the prompt's last token followed by the completion without its last token: exactly the
    positions that predict the completion. Indices are positions in the packed row, padded on the right.
    """

    prompt_index: torch.Tensor  # of the prompts, `(N, P)`
    branch_index: torch.Tensor  # of the branches, `(M, L)`
    key_index: torch.Tensor  # of a branch's keys: its prompt without the last token, then itself, `(M, P - 1 + L)`
    sizes: list[int]  # tokens of each prompt
    owner: torch.Tensor  # prompt of each branch, `(M,)`
    linear: list[dict[str | None, torch.Tensor | None]]  # `linear_masks` of each prompt


@dataclass(eq=False)
class Continued:
    """
    A packed row as two batches, for layers that carry a state from token to token: `N` prompts without their last
    token, and `M` branches that start from the state behind them. Indices are positions in the packed row.
    """

    head_index: torch.Tensor  # of the prompts without their last token, padded on the left, `(N, H)`
    head_mask: torch.Tensor | None  # False on padding, `(N, H)`; `None` without padding
    # Of the branches, padded on the right, `(M, L)`; the last token of a prompt without any
    branch_index: torch.Tensor
    owner: torch.Tensor  # prompt of each branch, `(M,)`
    restore_index: torch.Tensor  # place of each row position in the concatenated outputs of both batches, `(T,)`


@dataclass(eq=False)
class PrefixLayout:
    """Which token of a packed row attends to which, as the attention backends need it."""

    blocks: list[PrefixBlock]
    restore_index: torch.Tensor  # place of each row position in the concatenated outputs of the blocks, `(T,)`
    # In row order, each prompt and branch as (start, length, prompt start, shared prompt tokens); a prompt shares 0
    # tokens, a branch all but the last of its prompt
    segments: list[tuple[int, int, int, int]]
    causal_layers: set  # layer types that are plain causal for every prompt, where varlen kernels need no mask

    @cached_property
    def places(self) -> torch.Tensor:
        """Place of each row position in its own sequence, `(1, T)`."""
        places = [torch.arange(shared, shared + length) for _, length, _, shared in self.segments]
        return torch.cat(places)[None].to(self.restore_index.device)

    @cached_property
    def varlen(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """
        The layout as `S` sequences of variable length: queries are the row itself, keys are gathered per segment.

        Returns key positions `(K,)`, cumulative query and key lengths `(S + 1,)` as int32, and the longest query and
        key segment, for causal attention that is aligned to the last key.
        """
        keys = [
            torch.cat([torch.arange(prompt_start, prompt_start + shared), torch.arange(start, start + length)])
            for start, length, prompt_start, shared in self.segments
        ]
        query_lengths = torch.tensor([length for _, length, _, _ in self.segments])
        key_lengths = torch.tensor([len(k) for k in keys])
        device = self.restore_index.device
        query_starts, key_starts = (
            torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
            for lengths in (query_lengths, key_lengths)
        )
        return torch.cat(keys).to(device), query_starts, key_starts, int(query_lengths.max()), int(key_lengths.max())

    @cached_property
    def continued(self) -> Continued:
        """The layout for layers that carry a state along the row, computed once for all of them."""
        branches: dict[int, list[tuple[int, int]]] = {}  # by the start of their prompt
        for start, length, prompt, _ in self.segments:
            branches.setdefault(prompt, []).append((start, length))
        prompts = [segments.pop(0) for segments in branches.values()]
        lasts = [start + size - 1 for start, size in prompts]
        owned = [segments or [(last, 1)] for segments, last in zip(branches.values(), lasts, strict=True)]
        owner = torch.tensor([i for i, segments in enumerate(owned) for _ in segments])

        starts, sizes = torch.tensor(prompts).T[:, :, None]
        longest = max(1, int(sizes.max()) - 1)
        head_steps = torch.arange(longest) - longest + sizes - 1  # below 0 on padding
        head_index = starts + head_steps.clamp(min=0)

        starts, lengths = torch.tensor(sum(owned, [])).T[:, :, None]
        # At least two: mixers take a single token for a decoding step, which has no gradient
        steps = torch.arange(max(2, int(lengths.max())))
        branch_index = starts + steps.minimum(lengths - 1)

        is_head, is_branch = head_steps >= 0, steps < lengths
        head_places, branch_places = torch.arange(head_index.numel() + branch_index.numel()).split(
            [head_index.numel(), branch_index.numel()]
        )
        restore = torch.empty_like(self.restore_index, device="cpu")
        restore[head_index[is_head]] = head_places.view_as(head_index)[is_head]
        restore[branch_index[is_branch]] = branch_places.view_as(branch_index)[is_branch]
        # A branch begins with a copy of its prompt's last token
        restore[torch.tensor(lasts)[owner]] = branch_places.view_as(branch_index)[:, 0]

        device = self.restore_index.device
        return Continued(
            head_index.to(device),
            None if is_head.all() else is_head.to(device),
            branch_index.to(device),
            owner.to(device),
            restore.to(device),
        )

    def masks(
        self, block: PrefixBlock, kind: str | None, dtype: torch.dtype, is_causal: bool = True, groups: int = 1
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """
        What a block adds to its scores in layers of type `kind`; cached, on the row's device, for all layers.

        `is_causal` says whether the caller is causal where the mask of the prompts is `None`; `groups` `G` is the
        number of query heads that share a key and are attended as one sequence in branches.

        Returns the masks of the prompts, `(1 or N, 1, P, P)` or `None` for plain causal attention, and of the
        branches, `(1 or M, 1, L * G, P - 1 + L)`: one for all branches, except for short prompts of unequal length.
        """
        key = (block, kind, dtype, is_causal, groups)
        if key not in self._masks:
            plain = all(linear[kind] is None for linear in block.linear)
            if not plain:
                prompts = self._prompt_masks(block, kind, dtype)
            else:
                prompts = None if is_causal else self._causal_mask("prompts", block, dtype)
            if plain and len(set(block.sizes)) == 1:
                branches = self._causal_mask("branches", block, dtype, groups)
            else:
                branches = self._repeat_rows(self._branch_masks(block, kind, dtype), groups)[:, None]
            self._masks[key] = (prompts, branches)
        return self._masks[key]

    @cached_property
    def _masks(self) -> dict:
        return {}

    def _causal_mask(self, part: str, block: PrefixBlock, dtype: torch.dtype, groups: int = 1) -> torch.Tensor:
        """A view of one mask for blocks of all sizes, unless separate masks are smaller in total."""

        def shape(block: PrefixBlock) -> tuple[int, int]:
            """Keys before that of the first query, and queries."""
            width = block.prompt_index.size(1)
            return (0, width) if part == "prompts" else (width - 1, block.branch_index.size(1))

        shapes = [shape(each) for each in self.blocks if part == "prompts" or len(set(each.sizes)) == 1]
        most, rows = (max(sizes) for sizes in zip(*shapes, strict=True))
        key = (part, dtype, groups)
        if rows * (most + rows) > sum(queries * (before + queries) for before, queries in set(shapes)):
            key, shapes = (*key, shape(block)), [shape(block)]
            [(most, rows)] = shapes
        if key not in self._masks:
            spare = max((before - most) % MASK_ALIGNMENT for before, _ in shapes)
            masks = self._hidden(1, rows + spare, most + rows + spare, dtype).triu_(most + 1)
            self._masks[key] = self._repeat_rows(masks, groups)
        before, queries = shape(block)
        # Moves along the diagonal to an aligned column
        down = (before - most) % MASK_ALIGNMENT
        right = most - before + down
        return self._masks[key][:, None, down * groups : (down + queries) * groups, right : right + before + queries]

    def _prompt_masks(self, block: PrefixBlock, kind: str | None, dtype: torch.dtype) -> torch.Tensor:
        n, width = block.prompt_index.shape
        masks = self._hidden(n, width, width, dtype)
        masks.diagonal(dim1=1, dim2=2).zero_()  # padding sees itself
        for mask, linear, size in zip(masks, block.linear, block.sizes, strict=True):
            mask[:size, :size].masked_fill_(self._seen(linear[kind], 0, size), 0.0)
        return masks[:, None]

    def _branch_masks(self, block: PrefixBlock, kind: str | None, dtype: torch.dtype) -> torch.Tensor:
        n, shared = block.prompt_index.size(0), block.prompt_index.size(1) - 1
        longest = block.branch_index.size(1)
        masks = self._hidden(n, longest, shared + longest, dtype)
        masks[:, :, shared:].diagonal(dim1=1, dim2=2).zero_()
        for mask, linear, size in zip(masks, block.linear, block.sizes, strict=True):
            seen = self._seen(linear[kind], size - 1, size - 1 + longest)
            mask[:, : size - 1].masked_fill_(seen[:, : size - 1], 0.0)
            mask[:, shared:].masked_fill_(seen[:, size - 1 :], 0.0)
        return masks[block.owner.to(masks.device)] if n > 1 else masks

    def _seen(self, linear: torch.Tensor | None, start: int, end: int) -> torch.Tensor:
        """Which of the first `end` tokens of a sequence those from `start` to `end` attend to."""
        device = self.restore_index.device
        if linear is None:
            return torch.ones(end - start, end, dtype=torch.bool, device=device).tril(start)
        return linear[start:end, :end].to(device)

    def _repeat_rows(self, masks: torch.Tensor, groups: int) -> torch.Tensor:
        if groups == 1:
            return masks
        n, rows, columns = masks.shape
        repeated = self._hidden(n, rows * groups, columns, masks.dtype)
        repeated.unflatten(1, (rows, groups)).copy_(masks[:, :, None])
        return repeated

    def _hidden(self, n: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Masks that hide everything, with aligned rows."""
        shape = (n, rows, -(-columns // MASK_ALIGNMENT) * MASK_ALIGNMENT)
        masks = torch.full(shape, torch.finfo(dtype).min, dtype=dtype, device=self.restore_index.device)
        return masks[:, :, :columns]


@dataclass(eq=False)
class PackedRow:
    """`T` tokens of prompts and completions in one row without padding."""

    input_ids: torch.Tensor  # `[prompt 1 | branch 1 | branch 2 | ... | prompt 2 | ...]`, `(1, T)`
    shift_labels: torch.Tensor  # the token that each position predicts, -100 on prompts, `(1, T)`
    position_ids: torch.Tensor  # of each token in its own sequence, `(1, T)` or `(R, 1, T)`
    token_fields: dict[str, torch.Tensor]  # each `(1, T)`
    prompts: list[EncodedPrompt]  # in row order
    parts: list[EncodedPrompt]  # the same, each followed by what holds media of its completions
    layout: PrefixLayout
    score_index: torch.Tensor  # row position that predicts each completion token, 0 on padding, `(B, C)`


def group_by_prompt(prompts: Sequence[EncodedPrompt]) -> dict[EncodedPrompt, list[int]]:
    """Indices of the completions of each prompt."""
    groups: dict[EncodedPrompt, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt.shared, []).append(index)
    return groups


def split_samples(prompts: Sequence[EncodedPrompt], isolate: Literal["media", "prompt"] | None) -> list[list[int]]:
    """
    Splits completions into parts that share a forward, as ascending indices; a group stays in one part.

    Some encoders have no mask for padding, so that a clip's features depend on the longest clip in the batch, and some
    models take one modality per call. `"media"` groups prompts whose media join exactly (same modalities, no padding,
    images of the same sizes), `"prompt"` only completions of one prompt.
    """
    if isolate is None:
        return [list(range(len(prompts)))]
    if isolate == "prompt":
        return list(group_by_prompt(prompts).values())
    parts: dict[tuple, list[int]] = {}
    text_only = []
    for members in group_by_prompt(prompts).values():
        pieces = list({piece: None for i in members for piece in prompts[i].parts if piece.media})
        if not pieces:
            text_only += members
            continue
        modalities = frozenset().union(*(prompts[i].modalities for i in members))
        key = tuple(
            sorted({(name, tuple(value.shape[1:])) for piece in pieces for name, value in piece.media.items()})
        )
        # The only difference where the processor pads images to one shape
        sizes = [piece.media[name].tolist() for piece in pieces for name in IMAGE_SIZES if name in piece.media]
        parts.setdefault((modalities, key, repr(sizes)), []).extend(members)
    split = list(parts.values())
    if text_only:
        has_masks = any(values.dim() > 1 for prompt in prompts for values in prompt.token_fields.values())
        split = [*split, text_only] if has_masks or not split else [split[0] + text_only, *split[1:]]
    return [sorted(part) for part in split]


def micro_batch_order(prompts: Sequence[EncodedPrompt], lengths: Sequence[int], n_batches: int) -> list[int]:
    """
    An order of completions that keeps groups together and balances packed lengths over equally large micro-batches,
    which come in random order. A group that fits into none is split over as few as possible.
    """
    size = len(prompts) // n_batches
    groups = [(len(p) + sum(lengths[i] for i in members), members) for p, members in group_by_prompt(prompts).items()]
    batches: list[list[int]] = [[] for _ in range(n_batches)]
    loads = [0] * n_batches
    for load, members in sorted(groups, key=lambda group: -group[0]):
        while members:
            room = [size - len(batch) for batch in batches]
            fitting = [b for b in range(n_batches) if room[b] >= len(members)]
            # The lightest that takes the whole group, else the one that takes most of it
            b = min(fitting, key=lambda b: loads[b]) if fitting else max(range(n_batches), key=lambda b: room[b])
            taken, members = members[: room[b]], members[room[b] :]
            batches[b] += taken
            loads[b] += load
    return [i for b in torch.randperm(n_batches).tolist() for i in batches[b]]


def packed_length(prompts: Sequence[EncodedPrompt], lengths: Sequence[int]) -> int:
    """Tokens of the packed row that holds these completions."""
    return sum(len(prompt) for prompt in group_by_prompt(prompts)) + sum(lengths)


def split_by_tokens(
    prompts: Sequence[EncodedPrompt], lengths: Sequence[int], max_tokens: int, packed: bool = True
) -> list[list[int]]:
    """Splits completions into parts of at most so many tokens, by first-fit decreasing, keeping groups together."""

    def size(part: list[list[int]]) -> int:
        members = sum(part, [])
        if packed:
            return packed_length([prompts[i] for i in members], [lengths[i] for i in members])
        return len(members) * (max(len(prompts[i]) for i in members) + max(lengths[i] for i in members))

    return [sum(part, []) for part in first_fit(list(group_by_prompt(prompts).values()), size, max_tokens)]


def first_fit(items: Sequence[T], size: Callable[[list[T]], int], capacity: int) -> list[list[T]]:
    """Fills bins by first-fit decreasing."""
    bins: list[list[T]] = []
    for item in sorted(items, key=lambda item: -size([item])):
        fitting = next((each for each in bins if size([*each, item]) <= capacity), None)
        if fitting is None:
            bins.append([item])
        else:
            fitting.append(item)
    return bins


def pack(
    prompts: Sequence[EncodedPrompt],
    completion_ids: torch.Tensor,
    completion_mask: torch.Tensor,
    masks: Sequence[dict],
    field_fill: Mapping[str, int] | None = None,
    with_last: bool = False,
) -> PackedRow:
    """
    Lays out prompts and completions as one row in which each prompt stands once.

    `masks` are the [`~forward.masks.linear_masks`] of each unique prompt, in order of first appearance; `field_fill`
    is the value of token fields on completion tokens, where it isn't 0. A completion that is masked throughout gets no
    place in the row. With `with_last` the row also holds the last token of each completion, which predicts nothing.
    Shapes: `completion_ids`, `completion_mask` `(B, C)`, padded on the right.
    """
    device = completion_ids.device
    lengths = completion_mask.sum(1).tolist()
    completions = completion_ids.cpu()
    groups = group_by_prompt(prompts)
    fields = sorted({name for prompt in prompts for name in prompt.token_fields})

    ids, labels, positions, segments = [], [], [], []
    columns: dict[str, list[torch.Tensor]] = {name: [] for name in fields}
    parts: list[EncodedPrompt] = []
    score_start = torch.zeros(len(prompts), dtype=torch.long)
    units = []  # for each prompt: start, length and [(start, length) of its branches]
    offset = 0
    for prompt, members in groups.items():
        start, size = offset, len(prompt)
        segments.append((start, size, start, 0))
        ids.append(prompt.input_ids)
        labels.append(torch.full((size,), -100))
        positions.append(prompt.position_ids)
        parts.append(prompt.parts[0])
        for name in fields:
            columns[name].append(prompt.token_fields.get(name, torch.zeros_like(prompt.input_ids)))
        offset += size
        branches = []
        for member in members:
            if (length := lengths[member]) == 0:
                continue
            completion = completions[member, :length]
            taken = length if with_last else length - 1
            ids.append(torch.cat([prompt.input_ids[-1:], completion[:taken]]))
            labels.append(F.pad(completion, (0, taken + 1 - length), value=-100))
            whole = prompts[member]  # a conversation has more than the prompt that is shared
            positions.append(torch.cat([whole.position_ids[..., -1:], whole.positions_after(taken)], dim=-1))
            parts += whole.parts[1:]
            for name in fields:
                fill = (field_fill or {}).get(name, 0)
                columns[name].append(F.pad(whole.field_after(name, taken, fill), (1, 0), value=fill))
            segments.append((offset, taken + 1, start, size - 1))
            branches.append((offset, taken + 1))
            score_start[member] = offset
            offset += taken + 1
        units.append((start, size, branches))

    steps = torch.arange(completion_ids.size(1))
    in_row = steps < torch.tensor(lengths)[:, None]
    score_index = torch.where(in_row, score_start[:, None] + steps, 0)
    return PackedRow(
        input_ids=torch.cat(ids)[None].to(device),
        shift_labels=torch.cat(labels)[None].to(device),
        position_ids=torch.cat(same_rank(positions), dim=-1).to(device),
        token_fields={name: torch.cat(values)[None].to(device) for name, values in columns.items()},
        prompts=list(groups),
        parts=parts,
        layout=_layout(units, masks, segments, offset, device),
        score_index=score_index.to(device),
    )


def same_rank(positions: list[torch.Tensor]) -> list[torch.Tensor]:
    """Expands positions `(1, n)` to `(R, 1, n)` if others have several axes, as media may."""
    most = max(positions, key=lambda p: p.dim())
    return [p if p.dim() == most.dim() else p.expand(most.size(0), *p.shape) for p in positions]


def _layout(units, masks, segments, total, device) -> PrefixLayout:
    # Clusters of prompts of similar length, so that many short ones need few attention calls
    clusters: list[list[tuple]] = []
    for each in sorted(zip(units, masks, strict=True), key=lambda each: each[0][1]):
        if clusters and _share_a_call(*zip(*clusters[-1], each, strict=True)):
            clusters[-1].append(each)
        else:
            clusters.append([each])

    blocks, sources, taken = [], torch.empty(total, dtype=torch.long), 0
    for cluster in clusters:
        members, member_masks = zip(*cluster, strict=True)
        block = _block(members, member_masks, device)
        prompts = [unit[:2] for unit in members]
        branches = [branch for *_, owned in members for branch in owned]
        for index, sequences in ((block.prompt_index, prompts), (block.branch_index, branches)):
            for row, (start, size) in enumerate(sequences):
                sources[start : start + size] = taken + row * index.size(1) + torch.arange(size)
            taken += index.numel()
        blocks.append(block)
    causal = {kind for kind in masks[0] if all(mask[kind] is None for mask in masks)}
    return PrefixLayout(blocks, sources.to(device), segments, causal)


def _share_a_call(units, masks) -> bool:
    """Whether one call attends prompts, given from the shortest to the longest."""
    shortest, longest = units[0][1], units[-1][1]
    if longest > _LENGTH_TOLERANCE * shortest:
        return False
    if shortest == longest and not any(mask is not None for linear in masks for mask in linear.values()):
        return True  # one mask for all branches
    lengths = [length for _, _, branches in units for _, length in branches]
    return len(lengths) * max(lengths, default=0) * (longest - 1 + max(lengths, default=0)) <= MASK_ENTRIES


def _block(units, masks, device) -> PrefixBlock:
    width = max(size for _, size, _ in units)
    steps = torch.arange(width)
    starts = torch.tensor([start for start, _, _ in units])
    sizes = torch.tensor([size for _, size, _ in units])
    # Padding points at the last token of the sequence: its output is dropped, no query of a causal prompt sees it, and
    # every other mask hides it
    prompt_index = starts[:, None] + torch.minimum(steps, sizes[:, None] - 1)

    owner = torch.tensor([i for i, (_, _, branches) in enumerate(units) for _ in branches], dtype=torch.long)
    branches = torch.tensor([branch for _, _, owned in units for branch in owned], dtype=torch.long).view(-1, 2)
    longest = int(branches[:, 1].max()) if len(branches) else 0
    branch_steps = torch.arange(longest)
    branch_index = branches[:, :1] + torch.minimum(branch_steps, branches[:, 1:] - 1)
    key_index = torch.cat([prompt_index[owner, : width - 1], branch_index], dim=1)

    return PrefixBlock(
        prompt_index.to(device), branch_index.to(device), key_index.to(device), sizes.tolist(), owner, list(masks)
    )
