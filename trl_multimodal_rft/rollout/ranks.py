# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
What ranks exchange: rows and sums, and before the update whole groups, so that no rank waits for one with longer rows.
"""

import io
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from ..forward.contexts import by_context
from ..forward.partition import micro_batch_order, packed_length
from .rollout import Rollout, join_rollouts


_TOLERANCE = 0.02  # by which the longest rank may exceed the mean; less isn't worth the transfer


def arranged(
    rollout: Rollout, args: Any, accelerator: Accelerator, may_move: bool = True
) -> tuple[Rollout, dict[str, float]]:
    """
    A rollout in the order of its micro-batches, whole groups together, and metrics. With `balance_ranks`, ranks
    exchange groups before, if they may. All ranks have to call this.
    """
    steps, metrics, generator = args.steps_per_generation, {}, None
    if args.balance_ranks and accelerator.num_processes > 1:
        # The same order on all ranks, so that their longest micro-batches coincide
        generator = torch.Generator().manual_seed(args.seed + rollout.step)
        if may_move:
            rollout, metrics["packing/moved_mb"] = _exchanged(rollout, args.num_generations, accelerator)
    if steps > 1:
        later = [sum(map(len, prompt.contexts[1:])) for prompt in rollout.prompts]
        lengths = [n + more for n, more in zip(rollout.completion_mask.sum(1).tolist(), later, strict=True)]
        rollout = rollout.select(micro_batch_order(rollout.prompts, lengths, steps, generator))
    return rollout, metrics


def _exchanged(rollout: Rollout, group_size: int, accelerator: Accelerator) -> tuple[Rollout, float]:
    """The rollout after the exchange, with as many groups as before, and the megabytes that all ranks have sent."""
    groups, rank = rollout.groups(group_size), accelerator.process_index
    loads = torch.tensor([[forwarded_length(group) for group in groups], _free(groups)], device=accelerator.device)
    loads, free = accelerator.gather(loads[None]).transpose(0, 1).tolist()
    assignment = balanced(loads, free)
    held = dict(enumerate(groups, start=rank * len(groups)))
    received, n_bytes = _moved(held, assignment, accelerator)
    if n_bytes > 0:
        joined = join_rollouts([{**held, **received}[group] for group in assignment[rank]], accelerator.device)
        rollout = replace(joined, packed=rollout.packed, step=rollout.step)
    return rollout, n_bytes / 1e6


def forwarded_length(rollout: Rollout) -> int:
    """Tokens that the update forwards of completions and their prompts."""
    lengths = rollout.completion_mask.sum(1).tolist()
    rows = range(len(rollout)) if rollout.rows_to_score is None else rollout.rows_to_score
    prompts, lengths = by_context([rollout.prompts[i] for i in rows], [lengths[i] for i in rows])
    return packed_length(prompts, lengths) if rollout.packed else sum(map(len, prompts)) + sum(lengths)


def rank_metrics(micro_batches: Sequence[Rollout], accelerator: Accelerator) -> dict[str, float]:
    """How much longer than the mean the longest ranks' micro-batches are. All ranks have to call this."""
    if accelerator.num_processes == 1:
        return {}
    lengths = torch.tensor([[forwarded_length(each) for each in micro_batches]], device=accelerator.device)
    everyone = accelerator.gather(lengths).float()
    return {"packing/rank_imbalance": float(everyone.amax(0).sum() / everyone.mean(0).sum().clamp(min=1))}


def balanced(loads: Sequence[Sequence[int]], free: Sequence[Sequence[int]]) -> list[list[int]]:
    """
    The groups that each rank holds after swaps of free ones between the longest and the shortest rank, as long as a
    swap brings them closer; groups count over all ranks. Swaps keep the numbers of groups, and move fewer than a new
    distribution would.
    """
    n = len(loads[0])
    assignment = [list(range(rank * n, rank * n + n)) for rank in range(len(loads))]
    load, is_free = sum(map(list, loads), []), sum(map(list, free), [])
    totals = [sum(each) for each in loads]
    while max(totals) > (1 + _TOLERANCE) * sum(totals) / len(totals):
        longest, shortest = totals.index(max(totals)), totals.index(min(totals))
        gap = totals[longest] - totals[shortest]
        swaps = (
            (abs(gap - 2 * (load[a] - load[b])), i, j)
            for i, a in enumerate(assignment[longest])
            for j, b in enumerate(assignment[shortest])
            if is_free[a] and is_free[b]
        )
        left, i, j = min(swaps, default=(gap, 0, 0))
        if left >= gap:
            break
        a, b = assignment[longest][i], assignment[shortest][j]
        assignment[longest][i], assignment[shortest][j] = b, a
        totals[longest] -= load[a] - load[b]
        totals[shortest] += load[a] - load[b]
    return assignment


def _free(groups: Sequence[Rollout]) -> list[int]:
    """Whether each group may move: the media of its prompt are in no other group here, which would share them."""
    media = [{id(prompt.shared.on_device) for prompt in group.prompts} for group in groups]
    held = Counter(sum(map(list, media), []))
    return [int(all(held[each] == 1 for each in own)) for own in media]


def _moved(
    held: dict[int, Rollout], assignment: Sequence[Sequence[int]], accelerator: Accelerator
) -> tuple[dict[int, Rollout], int]:
    """The groups that this rank gets from others, and the bytes that all ranks send."""
    rank, device, n = accelerator.process_index, accelerator.device, len(held)
    moves = [(group, group // n, to) for to, own in enumerate(assignment) for group in own if group // n != to]
    sent = {group: packed_group(held[group]) for group, source, _ in moves if source == rank}
    sizes = torch.tensor([len(sent.get(group, ())) for group in range(n * len(assignment))], device=device)
    sizes = accelerator.reduce(sizes).tolist() if moves else []
    if dist.is_initialized() and dist.get_backend() == dist.Backend.GLOO:  # sends no memory of a GPU
        device = torch.device("cpu")
    transfers, buffers = [], {}
    for group, source, to in moves:  # in the same order on both sides
        if source == rank:
            transfers.append(dist.P2POp(dist.isend, sent[group].to(device), to))
        elif to == rank:
            buffers[group] = torch.empty(sizes[group], dtype=torch.uint8, device=device)
            transfers.append(dist.P2POp(dist.irecv, buffers[group], source))
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()
    return {group: pickle.loads(data.cpu().numpy().tobytes()) for group, data in buffers.items()}, sum(sizes)


class _Pickler(pickle.Pickler):
    """Copies tensors that are a part of their storage, which would be written whole."""

    def reducer_override(self, value):
        if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            return value.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def packed_group(group: Rollout) -> torch.Tensor:
    """A group as bytes, without what is on devices or made again."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(group.with_copied_prompts(on_device=False).to("cpu"))
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


# Rows of all ranks, and of this one


def gather_rows(accelerator: Accelerator, values: torch.Tensor) -> torch.Tensor:
    """Rows of all ranks, padded on the right."""
    return accelerator.gather(accelerator.pad_across_processes(values.contiguous(), dim=1))


def local_rows(accelerator: Accelerator, values: torch.Tensor, n: int) -> torch.Tensor:
    """This rank's `n` rows of those of all ranks."""
    start = accelerator.process_index * n
    return values[start : start + n]


def any_rank(accelerator: Accelerator, condition: bool) -> bool:
    """Whether a condition holds on any rank."""
    return bool(accelerator.gather(torch.tensor([condition], device=accelerator.device)).any())


def sum_over_ranks(accelerator: Accelerator, numbers: Sequence[float]) -> list[float]:
    """The sum of each number over the ranks."""
    return accelerator.gather(torch.tensor([numbers], device=accelerator.device)).sum(0).tolist()
