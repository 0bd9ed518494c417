# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Time of the advantage estimators: functions of the whole batch against the usual loops, in one run.

```bash
python benchmarks/estimators.py                          # 256 completions of up to 4,096 tokens
python benchmarks/estimators.py --gaps --threads 1       # with tokens of tools within the completions
python benchmarks/estimators.py --device cuda --json
```

Measured are, on the same seeded float32 tensors,

- **gae** and **cumulative_returns** against their recurrences, written as a loop over columns from the right. A column
  holds all rows; rows masked in it carry what they had.
- **whiten** against the masked mean and standard deviation in plain PyTorch. There is no loop to save here.
- **group_statistics**, by way of `group_norm`, against a loop over groups.

First the results are compared: the script exits with an error if any differs by more than 1e-4, relative to the
largest value. Then calls of the two alternate, and the *minimum* of each is reported. Wall-clock time needs an idle
machine, since other work interrupts a long loop more often than a short call; on a shared one, `--clock cpu` measures
CPU time, which is comparable for `--threads 1`.

On the CPU, new memory costs more than most of these operations. A process that trains has freed tensors of tens of MiB
before, after which the C library keeps freed memory instead of returning it; the benchmark frees one such tensor
first.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from measuring import CLOCKS, hardware, versions

from trl_multimodal_rft.algorithms.advantages import cumulative_returns, gae, group_norm, whiten


GAMMA, LAM = 0.99, 0.95
GAPS = 4  # per row, with `--gaps`
TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class Batch:
    """
    What the estimators are given.

    Args:
        token_rewards (`torch.Tensor`):
            Reward of each token, shape `(N, T)`.
        values (`torch.Tensor`):
            Critic's value of the state before each token, shape `(N, T)`.
        mask (`torch.Tensor`):
            Whether a token is valid, shape `(N, T)`.
        bootstrap (`torch.Tensor`):
            Value of the state after the last token, shape `(N,)`.
        rewards (`torch.Tensor`):
            Reward of each row, shape `(N,)`.
        group_ids (`torch.Tensor`):
            Group of each row, shape `(N,)`.
    """

    token_rewards: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    bootstrap: torch.Tensor
    rewards: torch.Tensor
    group_ids: torch.Tensor


def build_batch(rows: int, tokens: int, group_size: int, gaps: bool, device: str) -> Batch:
    """Seeded rows, padded on the right, whose lengths lie between half of `tokens` and all of them."""
    generator = torch.Generator().manual_seed(0)
    token_rewards, values = torch.randn(2, rows, tokens, generator=generator)
    bootstrap, rewards = torch.randn(2, rows, generator=generator)
    column = torch.arange(tokens)
    lengths = torch.randint(tokens // 2, tokens + 1, (rows, 1), generator=generator)
    mask = column < lengths
    if gaps:
        gap = max(tokens // 32, 1)
        # A valid token is left at either end
        starts = 1 + (torch.rand(rows, GAPS, generator=generator) * (lengths - gap - 1)).long()
        for start in starts.split(1, dim=1):
            mask &= (column < start) | (column >= start + gap)
    tensors = (token_rewards, values, mask, bootstrap, rewards, torch.arange(rows) // group_size)
    return Batch(*(tensor.to(device) for tensor in tensors))


def gae_loop(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, bootstrap: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, both of shape `(N, T)`, column by column."""
    following, advantage = bootstrap, torch.zeros_like(bootstrap)
    advantages = torch.empty_like(rewards)
    for t in reversed(range(rewards.size(1))):
        valid, value = mask[:, t], values[:, t]
        delta = rewards[:, t] + GAMMA * following - value
        advantage = torch.where(valid, delta + GAMMA * LAM * advantage, advantage)
        following = torch.where(valid, value, following)
        advantages[:, t] = advantage
    return torch.where(mask, advantages, 0), torch.where(mask, advantages + values, 0)


def returns_loop(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Discounted sums of the rewards to come, shape `(N, T)`, column by column."""
    total = rewards.new_zeros(len(rewards))
    returns = torch.empty_like(rewards)
    for t in reversed(range(rewards.size(1))):
        total = torch.where(mask[:, t], rewards[:, t] + GAMMA * total, total)
        returns[:, t] = total
    return torch.where(mask, returns, 0)


def plain_whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Values with mean 0 and population variance 1 over the mask, shape `(N, T)`."""
    count = mask.sum()
    centred = values - (values * mask).sum() / count
    std = ((centred.square() * mask).sum() / count).sqrt()
    return centred / std * mask


def group_norm_loop(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """GRPO's advantages, shape `(N,)`, group by group."""
    advantages = torch.empty_like(rewards)
    for group in group_ids.unique():
        members = group_ids == group
        scores = rewards[members]
        advantages[members] = (scores - scores.mean()) / (scores.std() + 1e-4)
    return advantages


def contests(batch: Batch) -> dict[str, tuple[Callable, Callable]]:
    """By the name of what is measured, our computation and the usual one, each returning a tuple of tensors."""
    rewards, values, mask, bootstrap = batch.token_rewards, batch.values, batch.mask, batch.bootstrap
    return {
        "gae": (
            lambda: gae(rewards, values, mask, gamma=GAMMA, lam=LAM, bootstrap=bootstrap),
            lambda: gae_loop(rewards, values, mask, bootstrap),
        ),
        "cumulative_returns": (
            lambda: (cumulative_returns(rewards, mask, GAMMA),),
            lambda: (returns_loop(rewards, mask),),
        ),
        "whiten": (lambda: (whiten(values, mask),), lambda: (plain_whiten(values, mask),)),
        "group_statistics": (
            lambda: (group_norm(batch.rewards, batch.group_ids),),
            lambda: (group_norm_loop(batch.rewards, batch.group_ids),),
        ),
    }


def relative_difference(expected: tuple[torch.Tensor, ...], actual: tuple[torch.Tensor, ...]) -> float:
    """Largest difference of two results, relative to the largest value expected; `NaN` if a value is."""
    pairs = list(zip(expected, actual, strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return math.inf
    return torch.stack([(a - b).abs().max() / a.abs().max() for a, b in pairs]).max().item()


def seconds(function: Callable, device: str, now: Callable[[], float]) -> float:
    """Time of a call."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = now()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return now() - start


def run(args: argparse.Namespace) -> dict:
    """
    Runs the benchmark.

    Args:
        args (`argparse.Namespace`):
            Parsed command line.

    Returns:
        `dict`: Ratios (the usual way over ours), the times in seconds they were computed from, relative differences of
        the results, setting, hardware and versions.

    Raises:
        `SystemExit`: If ours and the usual way don't compute the same.
    """
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    batch = build_batch(args.rows, args.tokens, args.group_size, args.gaps, args.device)
    functions = contests(batch)
    differences = {}
    for name, (ours, usual) in functions.items():
        differences[name] = relative_difference(usual(), ours())
        if not differences[name] <= TOLERANCE:  # NaN, too
            raise SystemExit(f"{name}: ours and the usual way differ by {differences[name]:.1e}, relative")

    # Below the 32 MiB up to which glibc adapts (M_MMAP_THRESHOLD of mallopt)
    torch.empty(30 * 2**20, dtype=torch.uint8)
    best = {"ours": dict.fromkeys(functions, math.inf), "usual": dict.fromkeys(functions, math.inf)}
    for name, pair in functions.items():
        for _ in range(args.repetitions):
            for times, function in zip(best.values(), pair, strict=True):
                times[name] = min(times[name], seconds(function, args.device, CLOCKS[args.clock]))
    return {
        **{f"{name}_ratio": best["usual"][name] / best["ours"][name] for name in functions},
        **{side: {f"{name}_s": value for name, value in times.items()} for side, times in best.items()},
        "difference": differences,
        "setting": {
            **{
                name: getattr(args, name)
                for name in ("rows", "tokens", "group_size", "gaps", "repetitions", "device", "clock")
            },
            "valid_tokens": int(batch.mask.sum()),
            "threads": torch.get_num_threads(),
            "dtype": str(batch.values.dtype).removeprefix("torch."),
        },
        "hardware": hardware(args.device),
        "versions": versions("trl-multimodal-rft", "torch"),
    }


def table(result: dict) -> str:
    """
    The result as text.

    Args:
        result (`dict`):
            What [`run`] returns.

    Returns:
        `str`: A few lines about the setting and a table.
    """
    setting, ours, usual = result["setting"], result["ours"], result["usual"]
    clock = "wall-clock" if setting["clock"] == "wall" else "CPU"
    lines = [
        f"{setting['rows']} x {setting['tokens']} tokens in {setting['dtype']}, {setting['valid_tokens']} of them "
        f"valid{f' with up to {GAPS} gaps per row' if setting['gaps'] else ''}, groups of {setting['group_size']};",
        f"{result['hardware']['gpu'] or result['hardware']['cpu']}, {setting['threads']} threads; torch "
        f"{result['versions']['torch']}; {clock} time, minimum of {setting['repetitions']}",
    ]
    width = max(len(name) for name in result["difference"])
    lines += ["", f"{'':{width}}  {'usual way':>12}  {'ours':>12}  {'usual / ours':>12}  {'difference':>10}"]
    lines += [
        f"{name:{width}}  {usual[f'{name}_s'] * 1e3:>9.2f} ms  {ours[f'{name}_s'] * 1e3:>9.2f} ms  "
        f"{result[f'{name}_ratio']:>11.2f}x  {difference:>10.0e}"
        for name, difference in result["difference"].items()
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict:
    """
    Command line of the benchmark.

    Args:
        argv (`list[str]`, *optional*):
            Arguments; those of the process by default.

    Returns:
        `dict`: What [`run`] returns.
    """
    parser = argparse.ArgumentParser(
        description=__doc__.strip().split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256, help="completions in the batch")
    parser.add_argument("--tokens", type=int, default=4096, help="columns of the batch")
    parser.add_argument("--group-size", type=int, default=8, help="completions per prompt")
    parser.add_argument("--gaps", action="store_true", help="mask spans within the completions, too")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="which time is measured")
    parser.add_argument("--threads", type=int, help="CPU threads, if not torch's own choice")
    parser.add_argument("--repetitions", type=int, default=30, help="how many repetitions the minimum is taken over")
    parser.add_argument("--json", action="store_true", help="print the result as JSON in the last line")
    args = parser.parse_args(argv)
    if args.device == "cuda" and args.clock == "cpu":
        parser.error("CPU time says nothing about a GPU; use `--clock wall`")
    if args.repetitions < 1:
        parser.error("`--repetitions` must be at least 1")
    if args.tokens < 16:
        parser.error("`--tokens` must be at least 16: the shortest rows have half of them")
    if args.group_size < 2 or args.rows < 1 or args.rows % args.group_size:
        parser.error("`--rows` must be a multiple of `--group-size`, which must be at least 2")

    result = run(args)
    print(table(result))
    if args.json:
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
