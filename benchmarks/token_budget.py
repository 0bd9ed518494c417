# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Memory and time of an update with and without `max_tokens_per_microbatch`, for the same data and model.

```bash
python benchmarks/token_budget.py --threads 1
python benchmarks/token_budget.py --threads 1 --checkpointing
```

The model has Qwen2.5-VL's architecture and seeded random weights. The data are prompts with images of unequal size and
seeded completions of 20 to 64 tokens. The benchmark compares the gradients and measures

- **tokens**: what the text decoder forwards for the gradient; a group that is split forwards its prompt once,
- **held**: bytes of activations at the start of a backward pass, for the part of the micro-batch that holds the most,
- **peak**: peak memory of the update without weights and gradients,
- **time**: CPU time of the update, the minimum over repetitions, in which the budgets alternate.

Memory counts the storage of every live tensor once (`fake_run.Watch`). The LM head processes
512 columns of the logits at a time instead of 32768. This vocabulary has only 400, so a buffer of 32768 columns would
dominate the memory.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import policy_update
import torch
from datasets import concatenate_datasets
from fake_run import Watch
from measuring import MIB, Sampling, command_line, conditions, markdown, parse_options, report

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.forward import head
from trl_multimodal_rft.models.modes import checkpoint_activations
from trl_multimodal_rft.models.wrapped import replaced


# Width and height in tokens
IMAGES = ((28, 14), (10, 5), (20, 10), (14, 10))


class Watched(MultimodalGRPOTrainer):
    """
    A trainer that uses fixed completions of 20 to 64 tokens instead of sampling, and records each micro-batch.

    `watch` selects what to measure, `"memory"` or `"time"`, since measuring memory takes time. `moments` holds the
    results: the `batch`, the `tokens` that are forwarded with a gradient, the bytes of activations `held` at the start
    of a backward pass, the `peak` in bytes, and the `seconds` of CPU time.
    """

    watch = "memory"

    def __init__(self, *args, **kwargs):
        self.moments: list[SimpleNamespace] = []
        super().__init__(*args, **kwargs)
        self.sampler = Sampling(self.sampler, self._given)

    @staticmethod
    def _given(model, prompts, **options):
        rng = np.random.default_rng(0)
        lengths = rng.integers(policy_update.SHORTEST, policy_update.LONGEST + 1, len(prompts))
        return [rng.integers(50, 200, length).tolist() for length in lengths], None

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        self._memory = Watch()
        self._held = 0
        self._tokens = 0
        self._start = time.process_time()
        if self.watch == "memory":
            self._watching.enter_context(self._memory)
        self._watched = inputs
        return inputs

    def training_step(self, *args, **kwargs):
        backward = self.accelerator.backward

        def watched(*inputs, **options):
            self._held = max(self._held, self._memory.now)
            return backward(*inputs, **options)

        def count(decoder, args, kwargs):
            if torch.is_grad_enabled():
                self._tokens += kwargs["inputs_embeds"].shape[:2].numel()

        self.accelerator.backward = watched
        decoder = self.accelerator.unwrap_model(self.model).get_decoder()
        counting = decoder.register_forward_pre_hook(count, with_kwargs=True)
        try:
            with ExitStack() as self._watching:
                loss = super().training_step(*args, **kwargs)
                seconds = time.process_time() - self._start
        finally:
            self.accelerator.backward = backward
            counting.remove()
        self.moments.append(
            SimpleNamespace(
                batch=self._watched,
                tokens=self._tokens,
                held=self._held,
                peak=self._memory.peak,
                seconds=seconds,
            )
        )
        return loss


def small_tile():
    """
    Context in which the LM head processes 512 columns of logits at a time. It allocates its usual 32768 columns for a
    smaller vocabulary, too, and they would take most of a tiny model's memory.
    """
    return replaced(head, _CHUNK_SIZE=512)


class Contestant:
    """
    Measures the updates of a trainer with a token budget.

    Args:
        args (`argparse.Namespace`):
            Parsed command line.
        budget (`int`, *optional*):
            `max_tokens_per_microbatch`.
        folder (`str`):
            Output folder.
    """

    def __init__(self, args: argparse.Namespace, budget: int | None, folder: str):
        processor = policy_update.build_processor()
        config = MultimodalGRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=args.prompts * args.group,
            num_generations=args.group,
            max_completion_length=policy_update.LONGEST,
            max_tokens_per_microbatch=budget,
            gradient_checkpointing=False,  # only `train` turns it on
            self_check=False,
            media_prefetch=0,
            use_cpu=True,
            bf16=False,
            report_to=[],
            seed=args.seed,
        )
        cases = [policy_update.Case(1, 1, IMAGES[i % len(IMAGES)]) for i in range(args.prompts)]
        rows = concatenate_datasets([policy_update.build_dataset(case, 1, i) for i, case in enumerate(cases)])
        model = policy_update.build_model(policy_update.PRESETS[args.preset], processor, "cpu", args.seed)
        if args.checkpointing:
            checkpoint_activations(model)
        self.trainer = Watched(model, policy_update.reward, config, rows, processing_class=processor)
        self.trainer.current_gradient_accumulation_steps = 1  # set by `train`, which doesn't run here
        model.train()

    def update(self, watch: str) -> dict:
        """Runs an update, and returns its memory and time."""
        self.trainer.model.zero_grad(set_to_none=False)
        self.trainer.watch = watch
        rows = next(iter(self.trainer.get_train_dataloader()))
        self.trainer.training_step(self.trainer.model, rows, None)
        moment = self.trainer.moments[-1]
        return {"tokens": moment.tokens, "held_bytes": moment.held, "peak_bytes": moment.peak, "cpu_s": moment.seconds}

    def parts(self) -> int:
        """Number of parts of the latest update."""
        return int(self.trainer._metric_log.pop("train").get("token_budget/parts", 1))

    def tokens(self) -> int:
        """Number of tokens of the micro-batch, with each prompt once."""
        batch = self.trainer.moments[-1].batch
        return sum(map(len, set(batch.prompts))) + int(batch.completion_mask.sum())


def run(args: argparse.Namespace) -> dict:
    """Measures each budget. Returns the results with ratios to no budget, settings, hardware and versions."""
    budgets = [None, *args.budgets]
    with tempfile.TemporaryDirectory() as folder, small_tile():
        contestants = [Contestant(args, budget, folder) for budget in budgets]
        for contestant in contestants:  # warm-up; allocates the gradients
            contestant.update("time")
        results = [contestant.update("memory") for contestant in contestants]
        whole = contestants[0].trainer.model
        differences = [policy_update.gradient_difference(whole, each.trainer.model) for each in contestants]
        seconds = [[contestant.update("time")["cpu_s"] for contestant in contestants] for _ in range(args.repeats)]
    for i, result in enumerate(results):
        result["budget"] = budgets[i]
        result["parts"] = contestants[i].parts()
        result["cpu_s"] = min(times[i] for times in seconds)
        result["gradient_difference"] = differences[i]
        for name in ("held_bytes", "peak_bytes", "cpu_s"):
            result[f"{name.rpartition('_')[0]}_ratio"] = result[name] / results[0][name]
    own = {"parameters": sum(p.numel() for p in whole.parameters()), "tokens": contestants[0].tokens()}
    return {"budgets": results, **conditions(args, "trl", "transformers", **own)}


def table(result: dict) -> str:
    """A line with the settings, and a table."""
    setting = result["setting"]
    line = (
        f"{setting['parameters'] / 1e6:.1f} M parameters, {setting['prompts']} x {setting['group']} completions, "
        f"{setting['tokens']} tokens with each prompt once, checkpointing "
        f"{'on' if setting['checkpointing'] else 'off'}; {result['hardware']['cpu']}, {setting['threads']} threads; "
        f"minimum of {setting['repeats']}"
    )
    rows = []
    for each in result["budgets"]:
        rows.append(
            [
                "none" if each["budget"] is None else str(each["budget"]),
                str(each["parts"]),
                str(each["tokens"]),
                f"{each['held_bytes'] / MIB:.0f} MiB, **{each['held_ratio']:.2f}x**",
                f"{each['peak_bytes'] / MIB:.0f} MiB, **{each['peak_ratio']:.2f}x**",
                f"{each['cpu_s']:.2f} s, **{each['cpu_ratio']:.2f}x**",
                f"{each['gradient_difference']:.0e}",
            ]
        )
    header = ("budget", "parts", "tokens", "held", "peak", "CPU time", "gradient difference")
    return f"{line}\n\n{markdown(header, rows)}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=[1600, 1200, 800, 500], help="tokens, one run for each"
    )
    parser.add_argument("--prompts", type=int, default=4, help="prompts per micro-batch")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--preset", choices=("tiny", "12m"), default="12m", help="size of the model")
    parser.add_argument("--checkpointing", action="store_true", help="use gradient checkpointing")
    return parse_options(parser, argv, threads=None, repeats=3, seed=0, json=False)


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark from the command line, and returns the result of [`run`]."""
    return report(parse(argv), run, table)


if __name__ == "__main__":
    main()
