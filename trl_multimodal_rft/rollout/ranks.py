# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Exchange among ranks. Ranks gather tensors and sums. Before the update, they swap groups to balance their tokens."""

import io
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from ..algorithms.metrics import Metric, average, share
from ..forward.layout import packed_length
from ..forward.partition import micro_batch_order
from ..forward.scores import split_lengths
from .rollout import Rollout, join_rollouts


_TOLERANCE = 0.02  # share by which the longest rank may exceed the mean; a smaller excess isn't worth the transfer


def arrange_rollout(
    rollout: Rollout, args: Any, accelerator: Accelerator, may_exchange: bool = True
) -> tuple[Rollout, dict[str, Metric]]:
    """
    Returns a rollout in the order of its micro-batches, with whole groups together, and metrics. With `balance_ranks`
    and `may_exchange`, ranks first exchange groups. All ranks have to call this.
    """
    steps = args.steps_per_generation
    metrics: dict[str, Metric] = {}
    generator = None
    if args.balance_ranks and accelerator.num_processes > 1:
        # Equal generators on all ranks, so that all run their longest micro-batch at the same position
        generator = torch.Generator().manual_seed(args.seed + rollout.step)
        if may_exchange:
            rollout, n_bytes = _exchange(rollout, args.num_generations, accelerator)
            metrics["packing/moved_mb"] = average(n_bytes / 1e6)
    if steps > 1:
        # Tokens of later contexts, which are forwarded in addition to prompt and completion
        later_lengths = [sum(map(len, prompt.contexts[1:])) for prompt in rollout.prompts]
        lengths = [n + more for n, more in zip(rollout.completion_mask.sum(1).tolist(), later_lengths, strict=True)]
        rollout = rollout.select(micro_batch_order(rollout.prompts, lengths, steps, generator))
    return rollout, metrics


def _exchange(rollout: Rollout, group_size: int, accelerator: Accelerator) -> tuple[Rollout, float]:
    """Keeps the number of groups. Also returns the number of bytes that all ranks sent."""
    groups = rollout.groups(group_size)
    rank = accelerator.process_index
    # Forwarded tokens of groups, and whether a group may move: `(2, groups)`, gathered as two lists `(ranks, groups)`
    loads = torch.tensor([[forwarded_length(group) for group in groups], _movable(groups)], device=accelerator.device)
    loads, movable = accelerator.gather(loads[None]).transpose(0, 1).tolist()
    assignment = balanced_assignment(loads, movable)
    local_groups = dict(enumerate(groups, start=rank * len(groups)))
    received, n_bytes = _move(local_groups, assignment, accelerator)
    if n_bytes > 0:
        joined = join_rollouts([{**local_groups, **received}[group] for group in assignment[rank]], accelerator.device)
        rollout = replace(joined, packed=rollout.packed, step=rollout.step)
    return rollout, n_bytes


def forwarded_length(rollout: Rollout) -> int:
    """Returns the number of tokens of prompts and completions that the update forwards."""
    lengths = rollout.completion_mask.sum(1).tolist()
    rows = range(len(rollout)) if rollout.rows_to_score is None else rollout.rows_to_score
    prompts, lengths = split_lengths([rollout.prompts[i] for i in rows], [lengths[i] for i in rows])
    return packed_length(prompts, lengths) if rollout.packed else sum(map(len, prompts)) + sum(lengths)


def rank_metrics(micro_batches: Sequence[Rollout], accelerator: Accelerator) -> dict[str, Metric]:
    """
    Returns the imbalance of ranks: the sum of each micro-batch's largest number of tokens on a rank, divided by the
    sum of its mean numbers over ranks. All ranks must call this.
    """
    if accelerator.num_processes == 1:
        return {}
    lengths = torch.tensor(
        [[forwarded_length(micro_batch) for micro_batch in micro_batches]], device=accelerator.device
    )
    rank_lengths = accelerator.gather(lengths).float()
    imbalance = share(rank_lengths.amax(0).sum(), rank_lengths.mean(0).sum(), is_of_all_ranks=True)
    return {"packing/rank_imbalance": imbalance}


def balanced_assignment(loads: Sequence[Sequence[int]], movable: Sequence[Sequence[int]]) -> list[list[int]]:
    """
    Returns the indices of each rank's groups after swaps of `movable` ones between the ranks with the most and the
    fewest tokens, until none brings their totals closer, or the largest is near the mean: `[[2, 1], [0, 3]]` for the
    loads `[[9, 5], [4, 2]]`.
    """
    n_groups = len(loads[0])  # per rank
    assignment = [list(range(rank * n_groups, rank * n_groups + n_groups)) for rank in range(len(loads))]
    group_loads = sum(map(list, loads), [])
    is_movable = sum(map(list, movable), [])
    totals = [sum(rank_loads) for rank_loads in loads]
    while max(totals) > (1 + _TOLERANCE) * sum(totals) / len(totals):
        longest = totals.index(max(totals))
        shortest = totals.index(min(totals))
        gap = totals[longest] - totals[shortest]
        # (gap after the swap, positions of the two groups in their ranks' lists)
        swaps = []
        for i, a in enumerate(assignment[longest]):
            for j, b in enumerate(assignment[shortest]):
                if is_movable[a] and is_movable[b]:
                    swaps.append((abs(gap - 2 * (group_loads[a] - group_loads[b])), i, j))
        new_gap, i, j = min(swaps, default=(gap, 0, 0))
        if new_gap >= gap:
            break
        a = assignment[longest][i]
        b = assignment[shortest][j]
        assignment[longest][i] = b
        assignment[shortest][j] = a
        totals[longest] -= group_loads[a] - group_loads[b]
        totals[shortest] += group_loads[a] - group_loads[b]
    return assignment


def _movable(groups: Sequence[Rollout]) -> list[int]:
    """Returns for each group 1 if it may move, or 0 if it shares the media of its prompt with another group."""
    media_ids = [{id(prompt.shared.on_device) for prompt in group.prompts} for group in groups]
    n_holders = Counter(sum(map(list, media_ids), []))
    return [int(all(n_holders[media_id] == 1 for media_id in group_media_ids)) for group_media_ids in media_ids]


def _move(
    local_groups: dict[int, Rollout], assignment: Sequence[Sequence[int]], accelerator: Accelerator
) -> tuple[dict[int, Rollout], int]:
    """Also returns the number of bytes that all ranks send."""
    rank = accelerator.process_index
    device = accelerator.device
    n_groups = len(local_groups)
    # (index of a group among all ranks' groups, source rank, target rank)
    moves: list[tuple[int, int, int]] = []
    for target, rank_groups in enumerate(assignment):
        moves += [(group, group // n_groups, target) for group in rank_groups if group // n_groups != target]
    payloads = {group: pickled_group(local_groups[group]) for group, source, _ in moves if source == rank}
    # Sizes in bytes of groups that this rank sends, 0 for others. The sum over ranks gives every rank all sizes.
    sizes = torch.tensor([len(payloads.get(group, ())) for group in range(n_groups * len(assignment))], device=device)
    sizes = accelerator.reduce(sizes).tolist() if moves else []
    if dist.is_initialized() and dist.get_backend() == dist.Backend.GLOO:  # Gloo can't send memory of a GPU
        device = torch.device("cpu")
    transfers = []
    buffers = {}
    for group, source, target in moves:  # the same order on all ranks, as sends and receives are paired in order
        if source == rank:
            transfers.append(dist.P2POp(dist.isend, payloads[group].to(device), target))
        elif target == rank:
            buffers[group] = torch.empty(sizes[group], dtype=torch.uint8, device=device)
            transfers.append(dist.P2POp(dist.irecv, buffers[group], source))
    if transfers:
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
    return {group: pickle.loads(data.cpu().numpy().tobytes()) for group, data in buffers.items()}, sum(sizes)


class _Pickler(pickle.Pickler):
    """Pickler that copies a tensor if it is only a part of its storage, as pickle would write the whole storage."""

    def reducer_override(self, value):
        if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            return value.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def pickled_group(group: Rollout) -> torch.Tensor:
    """Returns a pickled group as a tensor of bytes, on the CPU, without caches of its prompts and decoded media."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(group.with_copied_prompts(on_device=False).to("cpu"))
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


# Tensors of all ranks


def gather_rows(accelerator: Accelerator, values: torch.Tensor) -> torch.Tensor:
    """Joins tensors of all ranks, each `(N, C)`, to `(ranks * N, C)`, padded on the right to the largest `C`."""
    return accelerator.gather(accelerator.pad_across_processes(values.contiguous(), dim=1))


def local_rows(accelerator: Accelerator, values: torch.Tensor, n: int) -> torch.Tensor:
    """Returns this rank's part, `(n, ...)`, of a joined tensor of all ranks, `(ranks * n, ...)`."""
    start = accelerator.process_index * n
    return values[start : start + n]


def any_rank(accelerator: Accelerator, condition: bool) -> bool:
    """Returns whether a condition holds on any rank."""
    return bool(accelerator.gather(torch.tensor([condition], device=accelerator.device)).any())


def sum_over_ranks(accelerator: Accelerator, numbers: Sequence[float]) -> list[float]:
    """Returns the sum of each number over the ranks."""
    return accelerator.gather(torch.tensor([numbers], device=accelerator.device)).sum(0).tolist()
