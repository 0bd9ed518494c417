# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
The replay buffer: speed of splitting batches and making new ones, and memory.

```bash
python benchmarks/replay_buffer.py                                # 512 samples in groups of 8, an image per group
python benchmarks/replay_buffer.py --threads 1 --clock cpu --json
```

The batches mimic a rollout: prompts padded on the left, responses of all lengths padded on the right, and images in
Qwen2.5-VL's format, with patches and grids of different sizes, repeated for each response. All values are seeded.

- **Speed** of `split_experience_batch`, `remove_padding_in_sequences`, `make_experience_batch` (padded and packed) and
  `ReplayBuffer.append`, compared with plain loops over samples that index, clone, pad with `pad_sequence` and
  concatenate. The loops use dictionaries, validate nothing and support only this kind of media. The script first
  compares the results and exits with an error unless all values are equal. Then calls of the two alternate, and the
  script reports the *minimum* of each. Wall-clock time needs an idle machine. On a shared one, `--clock cpu` measures
  CPU time, which is comparable for `--threads 1`.
- **Memory**: bytes of all distinct tensor storages in the buffer, compared with those of the appended batches and of
  the results of the loops.
"""

import argparse
import math
from collections.abc import Callable, Sequence

import torch
from measuring import CLOCKS, MIB, command_line, conditions, count, parse_options, report
from torch.nn.utils.rnn import pad_sequence

from trl_multimodal_rft.lightrft import ReplayBuffer
from trl_multimodal_rft.lightrft.trainer.experience import ExperienceVL
from trl_multimodal_rft.lightrft.trainer.replay_buffer_utils import (
    BufferItemVL,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)


TEXT = (16, 256)  # text tokens of a prompt, without its image
SIDE = (8, 32)  # patches per side of an image; four patches make a token

ACTION_FIELDS = ["action_log_probs", "base_action_log_probs", "values", "returns", "advantages", "kl", "action_mask"]
FIELDS = ["sequences", "attention_mask", *ACTION_FIELDS]
MEDIA = ["pixel_values", "image_grid_thws"]


def build_batches(
    samples: int, group_size: int, batch_size: int, tokens: int, patch_values: int
) -> list[ExperienceVL]:
    """Builds batches of seeded samples with responses of up to `tokens` tokens."""
    generator, pixel_generator = (torch.Generator().manual_seed(seed) for seed in (0, 1))

    def integers(low, high, size):
        return torch.randint(low, high + 1, (size,), generator=generator)

    batches = []
    for start in range(0, samples, batch_size):
        size = min(batch_size, samples - start)
        groups = size // group_size
        sides = [2 * integers(SIDE[0] // 2, SIDE[1] // 2, groups) for _ in range(2)]
        grids = torch.stack([torch.ones(groups, dtype=torch.long), *sides], dim=1)
        patches = grids.prod(1)
        pixels = torch.randn(int(patches.sum()), patch_values, generator=pixel_generator).split(patches.tolist())
        prompts = (integers(*TEXT, groups) + patches // 4).repeat_interleave(group_size)[:, None]
        responses = integers(min(16, tokens), tokens, size)[:, None]
        n_prompt, n_actions = int(prompts.max()), int(responses.max())
        column = torch.arange(n_prompt + n_actions)
        attention_mask = (column >= n_prompt - prompts) & (column < n_prompt + responses)
        action_mask = torch.arange(n_actions) < responses
        values = torch.randn(len(ACTION_FIELDS) - 1, size, n_actions, generator=generator) * action_mask
        ids = torch.randint(1, 150_000, (size, n_prompt + n_actions), generator=generator) * attention_mask
        rows = patches.repeat_interleave(group_size).tolist()
        batches.append(
            ExperienceVL(
                sequences=ids,
                attention_mask=attention_mask.long(),
                action_mask=action_mask,
                **dict(zip(ACTION_FIELDS[:-1], values, strict=True)),
                pixel_values=torch.cat([own for own in pixels for _ in range(group_size)]),
                image_grid_thws=grids.repeat_interleave(group_size, 0),
                media_rows={"pixel_values": rows, "image_grid_thws": [1] * size},
                info={"reward": torch.randn(size, generator=generator), "response_length": responses[:, 0].float()},
            )
        )
    return batches


# The baseline: plain loops over samples


def split_loop(batch: ExperienceVL) -> list[dict]:
    """Splits a batch into samples."""
    items, start = [], 0
    for i, grid in enumerate(batch.image_grid_thws):
        stop = start + int(grid.prod())
        item = {name: getattr(batch, name)[i].clone() for name in FIELDS}
        item["pixel_values"] = batch.pixel_values[start:stop].clone()
        item["image_grid_thws"] = grid[None].clone()
        item["info"] = {key: value[i].clone() for key, value in batch.info.items()}
        items.append(item)
        start = stop
    return items


def remove_loop(items: list[dict]) -> list[dict]:
    """Removes the padding of samples."""
    clean = []
    for item in items:
        real, actions = item["attention_mask"].bool(), item["action_mask"]
        own = {name: item[name][real] for name in ("sequences", "attention_mask")}
        clean.append({**item, **own, **{name: item[name][actions] for name in ACTION_FIELDS}})
    return clean


def make_loop(items: list[dict], packed: bool) -> dict:
    """Makes a batch of samples."""
    batch = {}
    for name in FIELDS:
        column = [item[name] for item in items]
        if packed:
            batch[name] = [value.clone() for value in column]
        else:
            batch[name] = pad_sequence(column, batch_first=True, padding_side="left")
    for name in MEDIA:
        batch[name] = torch.cat([item[name] for item in items])
    batch["info"] = {key: torch.stack([item["info"][key] for item in items]) for key in items[0]["info"]}
    return batch


# Measurements


def seconds(function: Callable, arguments: list, now: Callable[[], float]) -> float:
    """Total time of one call per argument."""
    start = now()
    for argument in arguments:
        function(argument)
    return now() - start


def append_all(batches: list[ExperienceVL]) -> ReplayBuffer:
    """Appends all batches to a buffer."""
    buffer = ReplayBuffer()
    for batch in batches:
        buffer.append(batch)
    return buffer


def append_loop(batches: list[ExperienceVL]) -> list[dict]:
    """Splits all batches into samples without padding."""
    items = []
    for batch in batches:
        items += remove_loop(split_loop(batch))
    return items


def as_dict(record: BufferItemVL | ExperienceVL) -> dict:
    """A sample or batch in the format of the loops."""
    return {name: getattr(record, name) for name in (*FIELDS, *MEDIA, "info")}


def equal(ours, usual) -> bool:
    """Whether our result and that of a loop have the same values."""
    if isinstance(ours, (BufferItemVL, ExperienceVL)):
        ours = as_dict(ours)
    if isinstance(ours, torch.Tensor):
        return ours.dtype == usual.dtype and torch.equal(ours, usual)
    if isinstance(ours, dict):
        return ours.keys() == usual.keys() and all(equal(ours[name], usual[name]) for name in ours)
    return len(ours) == len(usual) and all(map(equal, ours, usual))


def storages(value) -> dict[int, int]:
    """Maps the address of each distinct tensor storage in a value to its bytes."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()}
    if isinstance(value, (BufferItemVL, ExperienceVL)):
        value = vars(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return {address: size for part in parts for address, size in storages(part).items()}


def held(value) -> int:
    """Bytes of all distinct tensor storages in a value."""
    return sum(storages(value).values())


def contests(batches: list[ExperienceVL], made_size: int) -> dict[str, tuple[Callable, Callable, list, list]]:
    """Maps each measured function to our implementation, the usual loop, and the arguments of each."""
    padded = [split_experience_batch(batch) for batch in batches]
    plain = [[as_dict(item) for item in items] for items in padded]
    clean = remove_padding_in_sequences([item for items in padded for item in items])
    order = torch.randperm(len(clean), generator=torch.Generator().manual_seed(0)).tolist()
    parts = [[clean[i] for i in order[start : start + made_size]] for start in range(0, len(clean), made_size)]
    plain_parts = [[as_dict(item) for item in items] for items in parts]
    return {
        "split": (split_experience_batch, split_loop, batches, batches),
        "remove_padding": (remove_padding_in_sequences, remove_loop, padded, plain),
        "make_padded": (make_experience_batch, lambda items: make_loop(items, False), parts, plain_parts),
        "make_packed": (
            lambda items: make_experience_batch(items, packing_samples=True),
            lambda items: make_loop(items, True),
            parts,
            plain_parts,
        ),
        "append": (append_all, append_loop, [batches], [batches]),
    }


def run(args: argparse.Namespace) -> dict:
    """
    Runs the benchmark. Returns ratios (time of the usual loops over ours, bytes of the batches over those of the
    buffer), samples per second and the underlying times, bytes, token efficiency, settings, hardware and versions.
    Raises `SystemExit` if ours and the usual loops give different results.
    """
    batches = build_batches(args.samples, args.group_size, args.batch_size, args.tokens, args.patch_values)
    functions = contests(batches, args.made_size)
    for name, (ours, usual, *arguments) in functions.items():
        if not all(equal(ours(own), usual(plain)) for own, plain in zip(*arguments, strict=True)):
            raise SystemExit(f"{name}: ours and the usual loop don't give the same")

    # A training process has already freed tensors of this size. glibc then keeps freed memory instead of returning it
    # (M_MMAP_THRESHOLD of mallopt, which adapts up to 32 MiB).
    torch.empty(30 * 2**20, dtype=torch.uint8)
    best = {"ours": dict.fromkeys(functions, math.inf), "usual": dict.fromkeys(functions, math.inf)}
    for name, (*pair, own, plain) in functions.items():
        for _ in range(args.repetitions):
            for times, function, arguments in zip(best.values(), pair, (own, plain), strict=True):
                times[name] = min(times[name], seconds(function, arguments, CLOCKS[args.clock]))

    buffer = append_all(batches)
    lengths = [len(item.sequences) for item in buffer]
    memory = {
        "batch_bytes": sum(map(held, batches)),
        "usual_bytes": held(append_loop(batches)),
        "buffer_bytes": held(list(buffer)),
    }
    return {
        **{f"{name}_ratio": best["usual"][name] / best["ours"][name] for name in functions},
        "memory_ratio": memory["batch_bytes"] / memory["buffer_bytes"],
        **memory,
        **{
            side: {
                **{f"{name}_s": value for name, value in times.items()},
                **{f"{name}_per_s": args.samples / value for name, value in times.items()},
            }
            for side, times in best.items()
        },
        **conditions(
            args,
            shortest_sample=min(lengths),
            longest_sample=max(lengths),
            dtype=str(batches[0].values.dtype).removeprefix("torch."),
        ),
    }


def table(result: dict) -> str:
    """Lines with the settings, and a table."""
    setting, ours, usual = result["setting"], result["ours"], result["usual"]
    clock = "wall-clock" if setting["clock"] == "wall" else "CPU"
    lines = [
        f"{setting['samples']} samples of {setting['shortest_sample']} to {setting['longest_sample']} tokens in "
        f"groups of {setting['group_size']}, batches of {setting['batch_size']} split and of "
        f"{setting['made_size']} made, {setting['patch_values']} values per patch in {setting['dtype']};",
        f"{result['hardware']['cpu']}, {setting['threads']} threads; torch {result['versions']['torch']}; "
        f"{clock} time, minimum of {setting['repetitions']}",
    ]
    names = [name.removesuffix("_s") for name in ours if not name.endswith("_per_s")]
    width = max(map(len, names))
    lines += ["", f"{'samples/s':{width}}  {'usual loop':>12}  {'ours':>12}  {'ours / usual':>12}"]
    lines += [
        f"{name:{width}}  {usual[f'{name}_per_s']:>12,.0f}  {ours[f'{name}_per_s']:>12,.0f}  "
        f"{result[f'{name}_ratio']:>11.2f}x"
        for name in names
    ]
    mib = {name: result[f"{name}_bytes"] / MIB for name in ("batch", "usual", "buffer")}
    lines += [
        "",
        f"memory: {mib['batch']:.1f} MiB appended, {mib['usual']:.1f} MiB kept by the loop, {mib['buffer']:.1f} MiB "
        f"by the buffer: {result['memory_ratio']:.2f}x less than appended",
    ]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--samples", type=int, default=512, help="samples in the buffer")
    parser.add_argument("--group-size", type=int, default=8, help="responses per prompt with its image")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per appended batch")
    parser.add_argument("--made-size", type=count, default=8, help="samples per batch made from the buffer")
    parser.add_argument("--tokens", type=count, default=1024, help="maximum response length")
    parser.add_argument("--patch-values", type=count, default=1176, help="values per patch, as in Qwen2.5-VL")
    args = parse_options(parser, argv, clock="wall", threads=None, repetitions=10, json=False)
    if args.group_size < 1 or args.batch_size < 1 or args.batch_size % args.group_size:
        parser.error("`--batch-size` must be a multiple of `--group-size`")
    if args.samples < 1 or args.samples % args.group_size:
        parser.error("`--samples` must be a multiple of `--group-size`")
    return args


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark from the command line, and returns the result of [`run`]."""
    return report(parse(argv), run, table)


if __name__ == "__main__":
    main()
