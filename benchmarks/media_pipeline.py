# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Overhead of media loading in a GRPO step: media loaded on demand, prefetched, and encoded before the run.

```bash
python benchmarks/media_pipeline.py
python benchmarks/media_pipeline.py --clips 2 --seconds 4 --json
```

The rows are video files, by default 10 seconds of 1280 x 720 at 25 frames per second. The model is a small Qwen2.5-VL
with seeded random weights. The benchmark emulates sampling on an accelerator: the process waits `--wait` times as long
as one core takes to read a generation batch. Three runs alternate on the same rows:

- **when needed** (`media_prefetch=0`): the step reads, decodes and processes its rows, then samples, then updates.
- **ahead** (`media_prefetch=1`): another process prepares the next rows during the step.
- **known**: the prompts were encoded before the run, so a step spends no time on media.

The benchmark reports the median wall-clock time of a step and its ratio to that of *known*.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from datasets import Dataset
from measuring import Sampling, command_line, conditions, markdown, parse_options, report
from policy_update import CASES, PRESETS, build_model, build_processor
from transformers import TrainerCallback

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.data.rows.batches import DatasetRows


class Emulated(MultimodalGRPOTrainer):
    """Waits instead of sampling. `known` holds encoded prompts of rows, which the trainer then doesn't read."""

    def __init__(self, *args, wait: float, known: dict | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self._wait = wait
        self.sampler = Sampling(self.sampler, self._wait_and_draw)
        if known is not None:
            self._stream._encode = lambda row, *_: known[row.row_index]

    def _wait_and_draw(self, model, prompts, *, step, **options):
        time.sleep(self._wait)
        draw = np.random.default_rng(step)
        return [draw.integers(20, 200, 8).tolist() for _ in prompts], None


class StepTimes(TrainerCallback):
    """Wall-clock times of the steps."""

    def __init__(self):
        self.seconds: list[float] = []
        self._last = None

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now


def write_clip(path: Path, seconds: float, rate: int, width: int, height: int, seed: int) -> None:
    """Writes a video of moving, noisy stripes."""
    noise = np.random.default_rng(seed).integers(0, 60, (height, width, 3), np.uint8)
    stripes = (np.arange(2 * width) // 40 % 2 * 150).astype(np.uint8)
    with av.open(path, "w") as file:
        stream = file.add_stream("libx264", rate=Fraction(rate), options={"preset": "veryfast", "crf": "23"})
        stream.width = width
        stream.height = height
        stream.pix_fmt = "yuv420p"
        for i in range(int(seconds * rate)):
            shift = (3 * i + 50 * seed) % width
            frame = np.roll(noise, shift // 4, axis=0) + stripes[None, shift : shift + width, None]
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())


def trainer(rows: Dataset, folder: str, args: argparse.Namespace, **options) -> Emulated:
    """Builds a trainer."""
    own = {name: options.pop(name) for name in ("wait", "known") if name in options}
    config = MultimodalGRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=args.group * args.prompts,
        num_generations=args.group,
        max_completion_length=8,
        max_steps=args.steps + 2,
        shuffle_dataset=False,
        self_check=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **options,
    )
    processor = build_processor()
    processor.chat_template = processor.chat_template.replace("image", "video")
    model = build_model(PRESETS["tiny"], processor, "cpu", 0)
    return Emulated(
        model=model,
        reward_funcs=lambda completion_ids, **kwargs: [float(sum(ids) % 7) for ids in completion_ids],
        args=config,
        train_dataset=rows,
        processing_class=processor,
        callbacks=[StepTimes()],
        **own,
    )


def step_seconds(run: Emulated) -> list[float]:
    """Trains, and returns the times of the last `--steps` steps."""
    run.train()
    times = next(each for each in run.callback_handler.callbacks if isinstance(each, StepTimes))
    return times.seconds[1:]


def run(args: argparse.Namespace) -> dict:
    """
    Measures the three runs. Returns the step times, their ratios to that of *known*, the times of reading and waiting,
    settings, hardware and versions.
    """
    seconds: dict[str, list[float]] = {"when needed": [], "ahead": [], "known": []}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{i}.mp4") for i in range(args.clips)]
        for i, path in enumerate(paths):
            write_clip(path, args.seconds, 25, *args.size, seed=i)
        question = CASES["image"].questions[0]
        n = max(args.clips, args.prompts)
        size = {"min_pixels": 28 * 28, "max_pixels": args.frame_pixels}
        videos = [{"type": "video", "video": str(paths[i % args.clips]), **size} for i in range(n)]
        blocks = [[video, {"type": "text", "text": question}] for video in videos]
        rows = Dataset.from_list([{"prompt": [{"role": "user", "content": each}]} for each in blocks])
        reader = trainer(rows, folder, args, wait=0.0, media_prefetch=0)
        start = time.perf_counter()
        known = {row.row_index: reader.prompts.encode_row(row) for row in DatasetRows(rows).__getitems__([*range(n)])}
        reading = (time.perf_counter() - start) / n * args.prompts
        wait = args.wait * reading
        for _ in range(args.repeats):
            for name, options in (
                ("when needed", {"media_prefetch": 0}),
                ("ahead", {"media_prefetch": 1}),
                ("known", {"media_prefetch": 0, "known": known}),
            ):
                seconds[name] += step_seconds(trainer(rows, folder, args, wait=wait, **options))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "step_s": medians,
        "ratios": {name: value / medians["known"] for name, value in medians.items()},
        "reading_s": reading,
        "wait_s": wait,
        **conditions(args, "trl", "transformers", "av"),
    }


def table(result: dict) -> str:
    """A line with the settings, and a table."""
    setting = result["setting"]
    ratios = result["ratios"]
    width, height = setting["size"]
    line = (
        f"{setting['prompts']} clips of {setting['seconds']:g} s, {width} x {height}, in a step; reading them takes "
        f"{result['reading_s']:.2f} s of one core, sampling is emulated by {result['wait_s']:.2f} s"
    )
    rows = [[name, f"{value:.2f} s", f"{ratios[name]:.2f}x"] for name, value in result["step_s"].items()]
    return f"{line}\n\n{markdown(['media', 'step', 'relative to *known*'], rows)}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--clips", type=int, default=4, help="video files")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a clip")
    parser.add_argument("--size", type=int, nargs=2, default=(1280, 720), help="width and height of a clip")
    parser.add_argument("--frame_pixels", type=int, default=32 * 28 * 28, help="maximum pixels of a frame")
    parser.add_argument("--prompts", type=int, default=2, help="prompts per step")
    parser.add_argument("--group", type=int, default=4, help="completions per prompt")
    parser.add_argument("--steps", type=int, default=6, help="measured steps per run")
    parser.add_argument("--wait", type=float, default=1.2, help="emulated sampling time per time to read a batch")
    parser.add_argument("--repeats", type=int, default=2, help="repetitions of each run")
    return parse_options(parser, argv, threads=1, json=False)


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark from the command line, and returns the result of [`run`]."""
    return report(parse(argv), run, table)


if __name__ == "__main__":
    main()
