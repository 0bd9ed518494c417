# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
What waiting for media costs a GRPO step: media read when they are needed, ahead of need, and not at all.

```bash
python benchmarks/media_pipeline.py
python benchmarks/media_pipeline.py --clips 2 --seconds 4 --json
```

The rows are video files, 10 seconds of 1280 x 720 at 25 frames per second by default, for a small Qwen2.5-VL with
seeded random weights. Sampling is emulated: the process waits, as it does for an accelerator, `--wait` times as long
as one core takes to read a generation batch. Three runs alternate with the same rows:

- **when needed** (`media_prefetch=0`): the step reads, decodes and processes its rows, then samples, then updates.
- **ahead** (`media_prefetch=1`): another process does that for the next rows meanwhile.
- **known**: prompts were encoded before the run, so that a step does nothing for its media.

Reported is the median wall-clock time of a step, and its ratio to that of *known*.
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
from trl_multimodal_rft.data.rows import DatasetRows


class Emulated(MultimodalGRPOTrainer):
    """Waits where others sample. `known` are prompts of rows that needn't be read."""

    def __init__(self, *args, wait: float, known: dict | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self._wait = wait
        self.sampler = Sampling(self.sampler, self._wait_and_draw)
        if known is not None:
            self._stream._encode = lambda row: known[row.number]

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
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(int(seconds * rate)):
            shift = (3 * i + 50 * seed) % width
            frame = np.roll(noise, shift // 4, axis=0) + stripes[None, shift : shift + width, None]
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())


def trainer(rows: Dataset, folder: str, args: argparse.Namespace, **options) -> Emulated:
    """A trainer of the benchmark."""
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
    """Trains."""
    run.train()
    times = next(each for each in run.callback_handler.callbacks if isinstance(each, StepTimes))
    return times.seconds[1:]


def run(args: argparse.Namespace) -> dict:
    """
    Seconds of a step and their ratios to those of *known*, seconds of reading and waiting; setting, hardware and
    versions.
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
        known = {row.number: reader.prompts.encode_row(row) for row in DatasetRows(rows).__getitems__([*range(n)])}
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
    """A line about the setting, and a table."""
    setting, ratios = result["setting"], result["ratios"]
    width, height = setting["size"]
    line = (
        f"{setting['prompts']} clips of {setting['seconds']:g} s, {width} x {height}, in a step; reading them takes "
        f"{result['reading_s']:.2f} s of one core, sampling is emulated by {result['wait_s']:.2f} s"
    )
    rows = [[name, f"{value:.2f} s", f"{ratios[name]:.2f}x"] for name, value in result["step_s"].items()]
    return f"{line}\n\n{markdown(['media', 'step', 'by *known*'], rows)}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--clips", type=int, default=4, help="video files")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a clip")
    parser.add_argument("--size", type=int, nargs=2, default=(1280, 720), help="width and height of a clip")
    parser.add_argument("--frame_pixels", type=int, default=32 * 28 * 28, help="most pixels of a frame for the model")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of a step")
    parser.add_argument("--group", type=int, default=4, help="completions of a prompt")
    parser.add_argument("--steps", type=int, default=6, help="steps that count, of each run")
    parser.add_argument("--wait", type=float, default=1.2, help="emulated sampling, by the time to read a batch")
    parser.add_argument("--repeats", type=int, default=2, help="how often the runs alternate")
    return parse_options(parser, argv, threads=1, json=False)


def main(argv: Sequence[str] | None = None) -> dict:
    """Command line of the benchmark; returns what [`run`] does."""
    return report(parse(argv), run, table)


if __name__ == "__main__":
    main()
