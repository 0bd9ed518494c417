# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Time of an update for several questions about one clip: TRL, separate prompts in one row, and prompts as a tree.

```bash
python benchmarks/shared_media.py --threads 1 --clock cpu
python benchmarks/shared_media.py --device cuda --preset 3b --json
```

All get the same rows, weights and seeded completions of 20 to 64 tokens. The model has Qwen2.5-VL's architecture and
seeded random weights, as in `policy_update.py`; the clip is given as frames, since TRL takes no videos. The benchmark
compares the gradients, counts the tokens that the decoder forwards in an update, and reports the minimum of its times
over repetitions, in which the contestants alternate.
"""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from pathlib import Path

import numpy as np
import policy_update
from datasets import Dataset
from measuring import CLOCKS, command_line, conditions, markdown, parse_options, report
from PIL import Image
from trl import GRPOConfig, GRPOTrainer

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.forward import trees
from trl_multimodal_rft.models.wrapped import replaced


QUESTIONS = ("What is red and green?", "Is there a cat, a dog or a bird?", "Describe the image.", "Compare 3, 4.")
NAMES = {"trl": "TRL", "separate": "separate prompts", "tree": "tree"}


def build_dataset(args: argparse.Namespace) -> Dataset:
    """Rows with different questions about the same frames of noise."""
    rng = np.random.default_rng(args.seed)
    side = 28 * args.side
    frames = [Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in range(args.frames)]
    questions = [f"{QUESTIONS[i % len(QUESTIONS)]} {i}" for i in range(args.questions)]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": each}], "images": frames} for each in questions])


class Contestant(policy_update.GRPOContestant):
    """Times the updates of a trainer, and counts the tokens in `tokens` that its decoder forwards in one."""

    def __init__(self, args: argparse.Namespace, name: str, folder: str):
        processor = policy_update.build_processor()
        is_trl = name == "trl"
        config = (GRPOConfig if is_trl else MultimodalGRPOConfig)(
            output_dir=str(Path(folder) / name),
            per_device_train_batch_size=args.questions * args.group,
            num_generations=args.group,
            max_completion_length=policy_update.LONGEST,
            gradient_checkpointing=False,
            use_cpu=args.device == "cpu",
            bf16=args.device == "cuda",
            report_to=[],
            seed=args.seed,
            **({} if is_trl else {"media_prefetch": 0, "self_check": False}),
        )
        model = policy_update.build_model(policy_update.PRESETS[args.preset], processor, args.device, args.seed)
        make = GRPOTrainer if is_trl else MultimodalGRPOTrainer
        trainer = make(model, policy_update.reward, config, build_dataset(args), processing_class=processor)
        super().__init__(trainer, policy_update.build_completions(args.questions * args.group, processor, args.seed))
        self.shares = name == "tree"
        self.tokens = 0
        model.get_decoder().register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        self.tokens += kwargs["inputs_embeds"].shape[:2].numel()

    def _run(self, injected):
        self.tokens = 0
        context: AbstractContextManager = nullcontext() if self.shares else replaced(trees, _WORTH_SHARING=inf)
        with context:
            return super()._run(injected)


def run(args: argparse.Namespace) -> dict:
    """Measures each contestant. Returns the results with ratios to the tree, settings, hardware and versions."""
    clock = [*CLOCKS].index(args.clock)
    with tempfile.TemporaryDirectory() as folder:
        contestants = {name: Contestant(args, name, folder) for name in NAMES}
        for contestant in contestants.values():
            contestant.warm_up(updates_only=True)
        models = {name: contestant.trainer.model for name, contestant in contestants.items()}
        differences = {name: policy_update.gradient_difference(models["trl"], model) for name, model in models.items()}
        for _ in range(args.repeats):
            for contestant in contestants.values():
                contestant.measure_update()
    tree = contestants["tree"]
    separate = contestants["separate"]
    prompts = tree.trainer._buffered_inputs[0].prompts
    return {
        "contestants": {
            name: {
                "update_s": each.best["update"][0],
                "update_cpu_s": each.best["update"][1],
                "tokens": each.tokens,
                "gradient_difference": differences[name],
            }
            for name, each in contestants.items()
        },
        "update_share_of_separate": tree.best["update"][clock] / separate.best["update"][clock],
        "update_share_of_trl": tree.best["update"][clock] / contestants["trl"].best["update"][clock],
        "token_share_of_separate": tree.tokens / separate.tokens,
        "token_share_of_trl": tree.tokens / contestants["trl"].tokens,
        **conditions(
            args,
            "trl",
            "transformers",
            dtype=str(models["tree"].dtype).removeprefix("torch."),
            parameters=sum(p.numel() for p in models["tree"].parameters()),
            prompt_tokens=sorted({len(prompt) for prompt in prompts}),
        ),
    }


def table(result: dict) -> str:
    """Lines with the settings, and a table."""
    setting = result["setting"]
    if setting["clock"] == "wall":
        suffix = "_s"
        clock = "wall-clock"
    else:
        suffix = "_cpu_s"
        clock = "CPU"
    lengths = setting["prompt_tokens"]
    lines = (
        f"{setting['parameters'] / 1e6:.1f} M parameters, {setting['dtype']}, {setting['questions']} questions of "
        f"{setting['group']} completions about {setting['frames']} frames, prompts of {lengths[0]} to {lengths[-1]} "
        f"tokens; {result['hardware']['gpu'] or result['hardware']['cpu']}, {setting['threads']} threads; {clock} "
        f"seconds, minimum of {setting['repeats']}\n"
        f"The tree takes {result['update_share_of_separate']:.2f} of the time of separate prompts, and "
        f"{result['update_share_of_trl']:.2f} of TRL's."
    )
    rows = [
        (
            NAMES[name],
            f"{each['update' + suffix]:.3f} s",
            str(each["tokens"]),
            f"{each['gradient_difference']:.0e}",
        )
        for name, each in result["contestants"].items()
    ]
    return f"{lines}\n\n{markdown(('prompts', 'update', 'tokens', 'gradient difference to TRL'), rows)}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--preset", choices=policy_update.PRESETS, default="12m", help="size of the model")
    parser.add_argument("--questions", type=int, default=4, help="prompts about the clip")
    parser.add_argument("--group", type=int, default=4, help="completions per prompt")
    parser.add_argument("--frames", type=int, default=8, help="of the clip")
    parser.add_argument("--side", type=int, default=14, help="of a frame, in tokens")
    return parse_options(parser, argv, device="cpu", clock="wall", threads=None, repeats=3, seed=0, json=False)


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark from the command line, and returns the result of [`run`]."""
    return report(parse(argv), run, table)


if __name__ == "__main__":
    main()
