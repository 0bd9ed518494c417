# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Rollouts of a GRPO step: transformers with one prefill per prompt, vLLM, and unmodified TRL with vLLM, in one run.

```bash
OMP_NUM_THREADS=1 python tests/shims/vllm_cpu.py benchmarks/sampling.py --clock cpu --threads 1
python benchmarks/sampling.py --device cuda --preset 3b --tokens 512 --json
```

All three use the same dataset with images and the model of `policy_update.py`, with seeded random weights. vLLM runs
in the process of its trainer (`colocate`). On a CPU, it needs `tests/shims/vllm_cpu.py` in the environment of
`make test-vllm`. The benchmark measures

- **tokens per second**: sampled tokens divided by the time of generation, including the weight transfer to the engine.
- **step**: the time from reading the rows to the gradients, without the optimizer step.
- **processor**: prompts with images that go through a processor in a step, in the trainer and in vLLM.
- **prompt**: tokens of the prompt for the sampler and for the scorer. Unmodified TRL passes expanded placeholders to
  vLLM, which expands them again (https://github.com/huggingface/trl/issues/6294), so vLLM samples from a different
  prompt.

No completion ends early. After a warm-up step, repetitions of the three alternate, and the benchmark reports the
*minimum* of each quantity. CPU ratios are not GPU ratios.
"""

import argparse
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measuring import CLOCKS, Sampling, TimedSteps, command_line, conditions, markdown, now, parse_options, report
from policy_update import CASES, PRESETS, build_dataset, build_model, build_processor, reward
from transformers import Qwen2_5_VLProcessor
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer


CONTESTANTS = {
    "transformers": (MultimodalGRPOTrainer, MultimodalGRPOConfig, False),
    "vLLM": (MultimodalGRPOTrainer, MultimodalGRPOConfig, True),
    "TRL with vLLM": (GRPOTrainer, GRPOConfig, True),
}


class Contestant(TimedSteps):
    """
    Times the steps of a trainer.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trainer to measure.
        processed (`list[int]`):
            List to which the processor adds its numbers of prompts with images.
    """

    def __init__(self, trainer: GRPOTrainer, processed: list[int]):
        super().__init__(trainer)
        self.processed = processed
        self.prompts = 0  # processed in the latest step
        self.tokens = 0  # sampled in the latest step
        self.scored = self.sampled_after = 0  # tokens of the prompt
        if isinstance(trainer, MultimodalGRPOTrainer):
            self._generate = trainer.sampler
            trainer.sampler = Sampling(trainer.sampler, self._timed_sampler)
        else:
            self._generate = trainer._generate_single_turn
            trainer._generate_single_turn = self._timed
        if trainer.use_vllm:
            engine = trainer.vllm_generation.llm
            self._ask = engine.generate
            engine.generate = self._watched

    def _timed_sampler(self, model, prompts, **options):
        start = now(self.device)
        ids, logps = self._generate(model, prompts, **options)
        self._keep_best("generation", now(self.device) - start)
        self.scored = self.sampled_after = len(prompts[0])
        self.tokens = sum(map(len, ids))
        return ids, logps

    def _timed(self, prompt_ids, *args, **kwargs):
        self.scored = self.sampled_after = len(prompt_ids[0])
        start = now(self.device)
        result = self._generate(prompt_ids, *args, **kwargs)
        self._keep_best("generation", now(self.device) - start)
        self.tokens = sum(map(len, result[0]))
        return result

    def _watched(self, *args, **kwargs):
        outputs = self._ask(*args, **kwargs)
        self.sampled_after = len(outputs[0].prompt_token_ids)
        return outputs

    def step(self) -> None:
        """Runs a step up to the gradients, with weights that the engine doesn't have yet."""
        self.trainer.state.global_step += 1
        self.trainer._step += 1
        self.processed.clear()
        self._keep_best("step", self._step())
        self.prompts = sum(self.processed)


def count_prompts() -> list[int]:
    """Returns a list to which each processor call with images adds its number of prompts."""
    processed = []
    call = Qwen2_5_VLProcessor.__call__

    @functools.wraps(call)
    def counting(self, images=None, text=None, **kwargs):
        if images is not None and len(images):
            processed.append(len(text) if isinstance(text, list) else 1)  # vLLM passes one prompt per call, or none
        return call(self, images=images, text=text, **kwargs)

    Qwen2_5_VLProcessor.__call__ = counting
    return processed


def build(name: str, args: argparse.Namespace, folder: Path, processed: list[int]) -> Contestant:
    """Builds a contestant with the model in `folder`."""
    trainer_class, config_class, use_vllm = CONTESTANTS[name]
    case = CASES["image"]
    processor = build_processor()
    tokenizer = processor.tokenizer
    if use_vllm:
        banned = {tokenizer.image_token_id: -100.0, tokenizer.video_token_id: -100.0}
        kwargs = {"ignore_eos": True, "detokenize": False, "logit_bias": banned}
    else:
        kwargs = {"min_new_tokens": args.tokens}
    prompts = build_dataset(case, args.prompts, args.seed)
    # Prefetching would hide the media processing from the measurement
    # No completion ends early, which the self-check would refuse
    own = {"media_prefetch": 0, "self_check": False} if config_class is MultimodalGRPOConfig else {}
    config = config_class(
        output_dir=str(folder / name),
        per_device_train_batch_size=args.prompts * args.group,
        num_generations=args.group,
        max_completion_length=args.tokens,
        generation_kwargs=kwargs,
        model_init_kwargs={"dtype": "bfloat16" if args.device == "cuda" else "float32"},
        gradient_checkpointing=False,
        use_cpu=args.device == "cpu",
        bf16=args.device == "cuda",
        report_to=[],
        seed=args.seed,
        use_vllm=use_vllm,
        vllm_max_model_length=2048,
        **own,
    )
    trainer = trainer_class(str(folder / "model"), reward, config, prompts, processing_class=processor)
    return Contestant(trainer, processed)


def run(args: argparse.Namespace) -> dict:
    """
    Measures each contestant. Returns tokens per second, seconds, processed prompts, prompt tokens for the sampler and
    for the scorer, settings, hardware and versions.
    """
    if args.device == "cpu" and hasattr(vllm_generation, "LLM"):  # as in `tests/engines/vllm`
        vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)
    clock = [*CLOCKS].index(args.clock)
    processed = count_prompts()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processor = build_processor()
        model = build_model(PRESETS[args.preset], processor, args.device, args.seed)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(folder / "model")
        # vLLM finds this class by its name
        plain = Qwen2_5_VLProcessor(**{part: getattr(processor, part) for part in processor.get_attributes()})
        plain.chat_template = processor.chat_template
        plain.save_pretrained(folder / "model")
        del model
        contestants = {each: build(each, args, folder, processed) for each in args.contestants}
        for _ in range(1 + args.repeats):
            for contestant in contestants.values():
                if not contestant.prompts:
                    contestant.step()  # warm-up, in which our trainers run their self-check
                    contestant.best.clear()
                    continue
                contestant.step()
    results = {
        each: {
            "tokens_per_s": contestant.tokens / contestant.best["generation"][clock],
            "generation_s": contestant.best["generation"][clock],
            "step_s": contestant.best["step"][clock],
            "processor_prompts": contestant.prompts,
            "prompt_tokens_sampled_after": contestant.sampled_after,
            "prompt_tokens_scored": contestant.scored,
        }
        for each, contestant in contestants.items()
    }
    return {**results, **conditions(args, "trl", "transformers", parameters=parameters)}


def table(result: dict) -> str:
    """Lines with the settings, and a table."""
    setting = result["setting"]
    machine = result["hardware"]
    title = (
        f"{setting['parameters'] / 1e6:.1f} M parameters, {setting['prompts']} x {setting['group']} completions of "
        f"{setting['tokens']} tokens; {machine['gpu'] or machine['cpu']}, {setting['threads']} threads; "
        f"{setting['clock']} time, minimum of {setting['repeats']}"
    )
    header = ("", "tokens per s", "generation", "whole step", "prompts processed", "prompt sampled after / scored")
    rows = [
        (
            each,
            f"{values['tokens_per_s']:,.0f}",
            f"{values['generation_s']:.2f} s",
            f"{values['step_s']:.2f} s",
            str(values["processor_prompts"]),
            f"{values['prompt_tokens_sampled_after']} / {values['prompt_tokens_scored']}",
        )
        for each, values in result.items()
        if each in CONTESTANTS
    ]
    return f"{title}\n\n{markdown(header, rows)}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="12m", help="size of the model")
    parser.add_argument("--prompts", type=int, default=2, help="prompts per step, each with an image and 418 tokens")
    parser.add_argument("--group", type=int, default=16, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per completion")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS])
    shared = {"device": "cpu", "clock": "wall", "threads": None, "repeats": 3, "seed": 0, "json": False}
    return parse_options(parser, argv, **shared)


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark from the command line, and returns the result of [`run`]."""
    return report(parse(argv), run, table)


if __name__ == "__main__":
    main()
