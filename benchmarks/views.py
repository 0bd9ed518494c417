# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Time of a step whose loss reads one more view of the media, against the same step without.

```bash
python benchmarks/views.py --threads 1 --clock cpu
python benchmarks/views.py --case long --device cuda --preset 3b --json
```

All get the same rows, weights and seeded completions. A step is all but sampling: the processor, the scores and the
update. The benchmark reports the minimum of its times over repetitions, in which the contestants alternate, and counts
the tokens that the decoder forwards.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import policy_update
from measuring import CLOCKS, command_line, conditions, markdown, parse_options, report

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer


CONTESTANTS = {
    "no view": None,
    "KL in the loss, with gradients": "mask_patches(ratio=0.6, kl_coef=0.01, entropy_coefs=[0.03, 0.03])",
    "weights by dependency, without": "mask_patches(ratio=0.6, token_quantile=0.4, advantage_min=0.9)",
}


class Contestant(policy_update.GRPOContestant):
    """Times the steps of a trainer, and counts the tokens in `tokens` that its decoder forwards in one."""

    def __init__(self, args: argparse.Namespace, name: str, folder: str):
        processor = policy_update.build_processor()
        config = MultimodalGRPOConfig(
            output_dir=str(Path(folder) / name),
            per_device_train_batch_size=args.prompts * args.group,
            num_generations=args.group,
            max_completion_length=policy_update.LONGEST,
            gradient_checkpointing=False,
            use_cpu=args.device == "cpu",
            bf16=args.device == "cuda",
            report_to=[],
            seed=args.seed,
            media_prefetch=0,
            self_check=False,
            loss_view=CONTESTANTS[name],
        )
        model = policy_update.build_model(policy_update.PRESETS[args.preset], processor, args.device, args.seed)
        rows = policy_update.build_dataset(policy_update.CASES[args.case], args.prompts, args.seed)
        trainer = MultimodalGRPOTrainer(model, policy_update.reward, config, rows, processing_class=processor)
        completions = policy_update.build_completions(args.prompts * args.group, processor, args.seed)
        super().__init__(trainer, completions)
        self.tokens = 0
        model.get_decoder().register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        self.tokens += kwargs["inputs_embeds"].shape[:2].numel()

    def measure(self) -> None:
        self.tokens = 0
        self._keep_best("step", self._run(self.completions))


def run(args: argparse.Namespace) -> dict:
    """Measures each contestant. Returns the results, settings, hardware and versions."""
    clock = [*CLOCKS].index(args.clock)
    with tempfile.TemporaryDirectory() as folder:
        contestants = {name: Contestant(args, name, folder) for name in CONTESTANTS}
        for contestant in contestants.values():
            contestant.warm_up(updates_only=True)
        for _ in range(args.repeats):
            for contestant in contestants.values():
                contestant.measure()
    plain = contestants["no view"]
    return {
        "contestants": {
            name: {
                "step_s": each.best["step"][clock],
                "tokens": each.tokens,
                "added_steps": each.best["step"][clock] / plain.best["step"][clock] - 1,
                "added_forwards": each.tokens / plain.tokens - 1,
            }
            for name, each in contestants.items()
        },
        **conditions(args, "trl", "transformers", dtype=str(plain.trainer.model.dtype).removeprefix("torch.")),
    }


def table(result: dict) -> str:
    """Lines with the settings, and a table."""
    setting = result["setting"]
    line = (
        f"case {setting['case']}, {setting['prompts']} x {setting['group']} completions, {setting['dtype']}; "
        f"{result['hardware']['gpu'] or result['hardware']['cpu']}, {setting['threads']} threads; {setting['clock']} "
        f"time, minimum of {setting['repeats']}"
    )
    rows = [
        (name, f"{each['step_s']:.3f} s", f"{each['added_steps']:+.2f}", f"{each['added_forwards']:+.2f}")
        for name, each in result["contestants"].items()
    ]
    return f"{line}\n\n{markdown(('view', 'step', 'added, in steps', 'added, in tokens forwarded'), rows)}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--preset", choices=policy_update.PRESETS, default="12m", help="size of the model")
    parser.add_argument("--case", choices=policy_update.CASES, default="image", help="prompts")
    parser.add_argument("--prompts", type=int, default=1, help="prompts of a step")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    return parse_options(parser, argv, device="cpu", clock="wall", threads=None, repeats=3, seed=0, json=False)


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark from the command line, and returns the result of [`run`]."""
    return report(parse(argv), run, table)


if __name__ == "__main__":
    main()
