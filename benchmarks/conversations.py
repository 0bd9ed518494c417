# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Generation after tool results: from the KV cache of the previous turn, and with a new prefill of the conversation.

```bash
OMP_NUM_THREADS=1 python benchmarks/conversations.py
python benchmarks/conversations.py --device cuda --preset 3b --tokens 256
```

The model is that of `policy_update.py`, with seeded random weights. The benchmark samples completions of one prompt
with an image and appends an image and a question to each, as a tool result. It then samples the next turn in both
ways, which alternate, and compares the token ids. It reports the *minimum* time of each way (CPU time on a CPU) and
their ratio.
"""

import argparse
from collections.abc import Sequence

import torch
from measuring import CLOCKS, command_line, conditions, now, parse_options, report
from policy_update import CASES, PRESETS, build_dataset, build_model, build_processor
from transformers import GenerationConfig

from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.conversations import encode_prefix
from trl_multimodal_rft.encoding.prompts import encode_prompt
from trl_multimodal_rft.engines.transformers import Branches, generate_completions


def run(args: argparse.Namespace) -> dict:
    """Measures the second turn in both ways."""
    processor = build_processor()
    model = build_model(PRESETS[args.preset], processor, args.device, args.seed).eval()
    rows = rows_to_messages(build_dataset(CASES["image"], 2, args.seed))
    prompt, result = (encode_prompt(row["prompt"], processor, model) for row in rows)
    tokenizer = processor.tokenizer
    config = GenerationConfig(
        max_new_tokens=args.tokens,
        min_new_tokens=args.tokens,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=sorted(set(tokenizer.all_special_ids) - {tokenizer.eos_token_id}),
        disable_compile=True,
    )
    options = (config, tokenizer.pad_token_id, torch.device(args.device))

    @torch.no_grad()
    def sample(prompts, branches=None):
        return generate_completions(model, model, prompts, *options, branches=branches)

    clock = [*CLOCKS].index("wall" if args.device == "cuda" else "cpu")
    best = {"cached": float("inf"), "again": float("inf")}
    for repeat in range(args.repeats + 1):
        branches = Branches()
        first = sample([prompt] * args.group, branches).tolist()
        wholes = [
            encode_prefix(prompt, [*ids, *result.input_ids.tolist()], [(len(ids), result)], model) for ids in first
        ]
        branches.continuations = [(place, result) for place in range(args.group)]
        ids = {}
        for name, way in (("cached", branches), ("again", None)):
            start = now(args.device)
            ids[name] = sample(wholes, way)
            if repeat > 0:  # the first repetition is a warm-up
                best[name] = min(best[name], (now(args.device) - start)[clock])
        if branches.obstacle is not None:
            raise RuntimeError(f"The cache was not used: {branches.obstacle}.")
    return {
        "cached_s": best["cached"],
        "again_s": best["again"],
        "ratio": best["again"] / best["cached"],
        "same_ids": torch.equal(ids["cached"], ids["again"]),
        "tokens": {"prompt": len(prompt), "turn": args.tokens, "result": len(result)},
        **conditions(args, "transformers"),
    }


def table(result: dict) -> str:
    """A line with times."""
    return (
        f"from the cache {result['cached_s']:.2f} s, prefilled again {result['again_s']:.2f} s, "
        f"ratio {result['ratio']:.2f}, same ids: {result['same_ids']}, tokens {result['tokens']}"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="12m", help="size of the model")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=32, help="sampled tokens per turn")
    return parse_options(parser, argv, device="cpu", threads=1, repeats=2, seed=0, json=False)


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark from the command line, and returns the result of [`run`]."""
    return report(parse(argv), run, table)


if __name__ == "__main__":
    main()
