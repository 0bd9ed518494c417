# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Memory and time of the attention masks of a packed row, compared with one mask per completion.

```bash
python benchmarks/masks.py --threads 1 --clock cpu                  # plain causal attention
python benchmarks/masks.py --threads 1 --clock cpu --window 1024    # masks of the model, here of a window
python benchmarks/masks.py --threads 1 --clock cpu --dtype bfloat16
```

Prompts and completions have unequal lengths, up to `--prompt-length` and `--completion-length`. For each number of
prompts, the benchmark reports

- **usual**: one boolean mask per completion, and its floating-point copy, to which scaled dot product attention
  converts it. The bytes are computed. The time is that of building the boolean mask, which each forward pass repeats.
- **ours**: the measured bytes after all blocks have read their masks as sdpa does, and the time of reading. These
  masks are floating-point from the start and need no copy.
- **layout**: bytes of the row and its indices, and the time to build them. Kernels that read no mask need only these.

The benchmark first compares all masks with their definition. Times are the *minimum* over the repetitions.
"""

import argparse
from collections.abc import Sequence
from itertools import product

import torch
from fake_run import Watch
from measuring import CLOCKS, MIB, command_line, conditions, count, markdown, parse_options, report

from trl_multimodal_rft.encoding.prompts import EncodedPrompt
from trl_multimodal_rft.forward.layout import PackedRow, pack


class Case:
    """
    Prompts and completions of unequal lengths.

    Args:
        args (`argparse.Namespace`):
            Parsed command line.
        n_prompts (`int`):
            Number of prompts.
    """

    def __init__(self, args: argparse.Namespace, n_prompts: int):
        generator = torch.Generator().manual_seed(args.seed)

        def lengths(n: int, most: int, least: int) -> torch.Tensor:
            return torch.randint(least, most + 1, (n,), generator=generator).index_fill_(0, torch.tensor([0]), most)

        self.args = args
        self.sizes = lengths(n_prompts, args.prompt_length, args.prompt_length * 9 // 10).tolist()
        self.lengths = lengths(n_prompts * args.group, args.completion_length, args.completion_length // 2)
        prompts = [EncodedPrompt(torch.ones(n).long(), {}, {}, torch.arange(n)[None]) for n in self.sizes]
        self.samples = [prompt for prompt, _ in product(prompts, range(args.group))]
        self.completions = torch.ones(len(self.samples), args.completion_length, dtype=torch.long)
        self.mask = (torch.arange(args.completion_length) < self.lengths[:, None]).long()
        self.linear = [{None: self._seen(n + args.completion_length)} for n in self.sizes]

    def _seen(self, total: int) -> torch.Tensor | None:
        """The mask of a prompt with its completion, as the model defines it."""
        if self.args.window is None:
            return None
        return torch.ones(total, total, dtype=torch.bool).tril_().triu_(1 - self.args.window)

    def pack(self) -> PackedRow:
        """Builds the row."""
        return pack(self.samples, self.completions, self.mask, self.linear)

    def read(self, row: PackedRow) -> list[tuple]:
        """The masks of all blocks."""
        dtype = getattr(torch, self.args.dtype)
        layout = row.layout
        attended = [(layout.prompts(each, None, dtype), layout.branches(each, None, dtype)) for each in layout.blocks]
        return [(prompts[2], branches[2]) for prompts, branches in attended]

    def check(self) -> None:
        """Compares all masks with their definition: a token attends to itself and the window before it."""
        row = self.pack()
        for block, parts in zip(row.layout.blocks, self.read(row), strict=True):
            for part, keys in zip(parts, (block.prompt_index, block.key_index), strict=True):
                if part is None:
                    continue
                if len(block.sizes) > 1 and len(set(block.sizes)) > 1:
                    raise SystemExit("Prompts share an attention call: increase `--prompt-length`")
                distance = (
                    torch.arange(part.size(2))[:, None] + keys.size(1) - part.size(2) - torch.arange(keys.size(1))
                )
                right = (distance >= 0) & (distance < (self.args.window or distance.numel()))
                if not torch.equal(part == 0, right.expand_as(part)):
                    raise SystemExit("a mask isn't what it is defined to be")

    def usual(self) -> list[torch.Tensor]:
        """A boolean mask for each completion."""
        width = max(self.sizes)
        longest = int(self.lengths.max())
        owner = torch.arange(len(self.sizes)).repeat_interleave(self.args.group)
        if self.args.window is None:
            seen = torch.arange(width - 1) < torch.tensor(self.sizes)[:, None] - 1
            tril = torch.ones(longest, longest, dtype=torch.bool).tril()
            return [torch.cat([seen[owner][:, None].expand(-1, longest, -1), tril.expand(len(owner), -1, -1)], dim=-1)]
        prompts = torch.zeros(len(self.sizes), width, width, dtype=torch.bool)
        branches = torch.zeros(len(self.sizes), longest, width - 1 + longest, dtype=torch.bool)
        for i, (linear, size) in enumerate(zip(self.linear, self.sizes, strict=True)):
            queries = slice(size - 1, size - 1 + longest)
            prompts[i, :size, :size] = linear[None][:size, :size]
            branches[i, :, : size - 1] = linear[None][queries, : size - 1]
            branches[i, :, width - 1 :] = linear[None][queries, queries]
        return [prompts, branches[owner]]

    def measure(self) -> dict:
        """Checks and measures the case."""
        self.check()
        clock = CLOCKS[self.args.clock]
        times: dict[str, list[float]] = {"usual": [], "layout": [], "ours": []}
        for _ in range(self.args.repetitions):
            start = clock()
            usual = sum(mask.nbytes for mask in self.usual())
            times["usual"].append(clock() - start)
            start = clock()
            row = self.pack()
            times["layout"].append(clock() - start)
            start = clock()
            self.read(row)
            times["ours"].append(clock() - start)
        with Watch() as live:
            row = self.pack()
            layout = live.now
            masks = self.read(row)
            held = live.now - layout
        del masks
        return {
            "prompts": len(self.sizes),
            "usual_bool_bytes": usual,
            "usual_number_bytes": usual * getattr(torch, self.args.dtype).itemsize,
            "ours_bytes": held,
            "layout_bytes": layout,
            **{f"{name}_s": min(values) for name, values in times.items()},
        }


def run(args: argparse.Namespace) -> dict:
    """Measures each number of prompts. Returns bytes and seconds, settings, hardware and versions."""
    return {"cases": [Case(args, n_prompts).measure() for n_prompts in args.prompts], **conditions(args)}


def table(result: dict) -> str:
    """A line with the settings, and a table."""
    setting = result["setting"]
    line = (
        f"prompts of up to {setting['prompt_length']} tokens, completions of up to {setting['completion_length']}, "
        f"{setting['dtype']}, window {setting['window']}; {result['hardware']['cpu']}, {setting['threads']} threads; "
        f"{setting['clock']} seconds, minimum of {setting['repetitions']}"
    )
    rows = []
    for case in result["cases"]:
        usual = case["usual_bool_bytes"] + case["usual_number_bytes"]
        rows.append(
            [
                f"{case['prompts']} x {setting['group']}",
                f"{case['usual_bool_bytes'] / MIB:.0f} + {case['usual_number_bytes'] / MIB:.0f} MiB",
                f"{case['ours_bytes'] / MIB:.0f} MiB, **{usual / case['ours_bytes']:.0f}x** less",
                f"{case['layout_bytes'] / MIB:.1f} MiB",
                f"{case['usual_s']:.3f} s",
                f"{case['ours_s']:.3f} s",
                f"{case['layout_s']:.3f} s",
            ]
        )
    header = (
        "prompts x completions",
        "usual masks",
        "our masks",
        "layout alone",
        "usual masks, time",
        "our masks, time",
        "layout, time",
    )
    return f"{line}\n\n{markdown(header, rows)}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=[2, 4], help="prompts per row, one run for each")
    parser.add_argument("--group", type=count, default=8, help="completions per prompt")
    parser.add_argument("--prompt-length", type=int, default=4096, help="maximum tokens; the minimum is 9/10")
    parser.add_argument("--completion-length", type=int, default=4096, help="maximum tokens; the minimum is half")
    parser.add_argument("--window", type=int, help="window of the model's own masks; full attention if omitted")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the scores")
    return parse_options(parser, argv, clock="wall", threads=None, repetitions=5, seed=0, json=False)


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark from the command line, and returns the result of [`run`]."""
    return report(parse(argv), run, table)


if __name__ == "__main__":
    main()
