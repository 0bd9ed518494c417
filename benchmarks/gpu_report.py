# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Measures this package and TRL on one GPU, and writes a Markdown report.

```bash
python benchmarks/gpu_report.py --out report.md                    # 3B, bfloat16
python benchmarks/gpu_report.py --preset 7b --out report.md
python benchmarks/gpu_report.py --rows long tower --out report.md  # rows with one of these words in their names
python benchmarks/gpu_report.py --device cpu --preset tiny         # dry run; its numbers are meaningless
```

Each row compares unmodified `trl.GRPOTrainer` with `MultimodalGRPOTrainer` on the same random weights; for audio,
which TRL doesn't support, with our padded rows. Only one trainer is on the GPU at a time: the script builds it,
measures it for at most `--seconds`, and frees it. Cheap rows come first:

1. **Updates** on given completions, with nothing sampled: prompts of about 400 and 1,400 tokens with 8 completions of
   256 tokens, with and without gradient checkpointing; 4 prompts with 8 completions of 512; audio; and a prompt of
   16,000 tokens. A first update warms up. If a second one doesn't fit in the time, the first counts.
2. **Sampling** with transformers: 128 tokens of 8 and of 64 completions, after a few tokens that warm up.
3. One **whole step**, from reading a prompt to the gradients, after an update with the self-check.
4. The vision tower, ours and the model's own on the same images; vLLM, if it is installed; other lengths and groups.

For an update the report has

- its time, which is that of the forward and the backward pass, each from an idle GPU to an idle GPU,
- *kernels*: the time in which at least one kernel runs, in a further step under torch's profiler. The few kernels of a
  step outside of its update are included,
- *host*: the time until the host has launched the last kernel of a pass. If the host takes almost all of the time and
  kernels a small part of it, the host bounds the update,
- the peak of allocated memory above weights and gradients,
- the share of the rate of a large matrix product, which the script measures. Six operations count per weight and
  forwarded token, without attention and encoders,
- the difference of the gradients of every fourth tensor.

It lists the kernels that take the most time in the first row, and the lines of ours that wait for the GPU.

The script writes the file, and one of the same name that ends with `.json`, after each trainer of a row, so a killed
run keeps them. If a `.json` file of the same models and device is there, the script goes on with what it lacks. The
report names what failed, ran out of memory or time, or didn't start. What failed runs again if `--rows` names it.
"""

import argparse
import collections
import gc
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import policy_update
import sampling
import torch
from measuring import MIB, command_line, covered, hardware, markdown, now, parse_options, versions
from project import TARGETS
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities
from trl.import_utils import is_vllm_available

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.models.wrapped import replaced


FAMILIES = {"audio": "qwen2_audio", "long_audio": "qwen2_audio"}  # of other cases: Qwen2.5-VL
SIDES = ("ours", "trl")
PARTS = ("update", "sampling", "step")
UPDATE, SAMPLING, STEP = PARTS
LARGE = 8192  # rows of a matrix
WARM_UP = 4  # sampled tokens
EVERY = 4  # tensors, of one of which the gradient is compared
LINES = 5
SAMPLING_SECONDS = 240  # of an engine in a process of its own
NO_TIME = "no time"
VLLM_ON_CPU = Path(__file__).parents[1] / "tests/shims/vllm_cpu.py"


# Rows


def update(case: str, group: int, tokens: int, *more: object) -> list:
    """Options of `policy_update.py` for a row of updates."""
    return [UPDATE, "--case", case, "--group", group, "--tokens", tokens, "--updates_only", *more]


def usual_rows() -> Iterator[list]:
    """Parts and options of the rows, cheap and important ones first."""
    (image, long, video) = ((case, 8, tokens) for case, tokens in TARGETS)
    for row in (image, long):
        yield update(*row)
        yield update(*row, "--checkpointing")
    yield update(*image, "--torch_compile", "--checkpointing")
    yield update("image", 8, 512, "--prompts", 4, "--checkpointing")
    yield update("audio", 8, 256)
    yield update("audio", 8, 256, "--checkpointing")
    yield update(*video, "--checkpointing")
    for group in (8, 64):
        yield [SAMPLING, "--case", "image", "--group", group, "--tokens", 128]
    yield [SAMPLING, "--case", "image", "--group", 8, "--tokens", 128, "--torch_compile"]
    yield [STEP, "--case", "image", "--group", 8, "--tokens", 256, "--checkpointing"]


def further_rows() -> Iterator[list]:
    """Rows that follow the vision tower: other lengths, images of other sizes in each step, and larger groups."""
    for case in ("varied", "image", "long"):
        yield update(case, 8, 1024, "--lengths", "lognormal", "--checkpointing")
    for tokens, case, group in itertools.product((128, 1024), ("image", "audio", "long", "long_audio"), (8, 16)):
        yield update(case, group, tokens, "--checkpointing")
    yield update("text", 2, 128)
    for group, tokens in itertools.product((8, 64, 256), (128, 1024)):
        yield [SAMPLING, "--case", "long", "--group", group, "--tokens", tokens]


TINY = (
    [
        update("image", 2, 8),
        update("audio", 2, 8, "--checkpointing"),
        [SAMPLING, "--case", "image", "--group", 2, "--tokens", 8],
        [STEP, "--case", "image", "--group", 2, "--tokens", 8],
    ],
    [update("varied", 4, 16, "--lengths", "lognormal")],
)


def settings(args: argparse.Namespace, rows: Sequence[list]) -> dict[str, argparse.Namespace]:
    """Options of rows by their names."""
    named = {}
    for part, *words in rows:
        family = FAMILIES.get(words[1], "qwen2_5_vl")
        shared = ["--device", args.device, "--preset", args.preset, "--repeats", args.repeats, "--family", family]
        row = policy_update.parse([str(word) for word in [*words, *shared]])
        row.part = part
        prompts = row.prompts or policy_update.CASES[row.case].prompts
        name = f"{part}: {family}, {row.case}, {prompts} x {row.group} x {row.tokens}"
        name += ", lognormal" * (row.lengths == "lognormal") + ", checkpointing" * row.checkpointing
        name += ", compiled" * row.torch_compile
        named[name] = row
    return named


# Measurements of a trainer


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises an error after a time, as soon as Python runs again."""

    def stop(*_) -> None:
        raise TimeoutError(f"not within {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again each second, as imports and destructors drop errors
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def measure(args: argparse.Namespace, side: str, seconds: float, found: dict) -> None:
    """Builds a trainer, adds its measurements to `found` one after the other, and frees it."""
    with tempfile.TemporaryDirectory() as folder, limit(seconds):
        contestant = policy_update.build_trainers(args, folder, [side])[side]
        if args.part != STEP and isinstance(contestant.trainer, MultimodalGRPOTrainer):
            contestant.trainer.args.self_check = False
        MEASURED[args.part](contestant, args, found)


def measure_update(contestant: policy_update.GRPOContestant, args: argparse.Namespace, found: dict) -> None:
    """Updates on given completions: time, memory, gradients, kernels and waits."""
    parameters = [*contestant.trainer.model.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    hosts: list[float] = []
    for run in range(1 + args.repeats):
        if run == 1:  # the first was cold
            contestant.best.clear()
            hosts.clear()
        memory = contestant.memory()  # of an update
        contestant.keep_update()
        hosts.append(contestant.launches["update"])
        found |= {"is_warm": run > 0, "memory_bytes": memory}
        found |= {"update_s": contestant.best["update"][0], "host_s": min(hosts)}
    describe(contestant, args, found)
    found["gradients"] = [None if each.grad is None else each.grad.clone() for each in parameters[::EVERY]]
    found |= kernels(contestant)
    if has_cuda(contestant) and isinstance(contestant.trainer, MultimodalGRPOTrainer):
        found["waits"] = waits(contestant)


def measure_sampling(contestant: policy_update.GRPOContestant, args: argparse.Namespace, found: dict) -> None:
    """Sampling of a prompt's completions with transformers."""
    warm_up_sampling(contestant)
    contestant.measure_sampling()
    found["generation_s"] = contestant.best["generation"][0]
    describe(contestant, args, found)


def measure_step(contestant: policy_update.GRPOContestant, args: argparse.Namespace, found: dict) -> None:
    """A step from reading a prompt to the gradients, and its parts."""
    contestant.warm_up(updates_only=True)
    warm_up_sampling(contestant)
    contestant.measure_step()
    found["step_s"] = contestant.best["step"][0]
    found |= {f"step_{phase}_s": seconds[0] for phase, seconds in contestant.phases.items()}
    describe(contestant, args, found)


MEASURED = {UPDATE: measure_update, SAMPLING: measure_sampling, STEP: measure_step}


def describe(contestant: policy_update.GRPOContestant, args: argparse.Namespace, found: dict) -> None:
    """Adds settings, and the operations of an update of both trainers: six per weight and token."""
    if not isinstance(contestant.trainer, MultimodalGRPOTrainer):
        return
    found["setting"] = policy_update.description(args, contestant)["setting"]
    prompts = contestant.trainer._buffered_inputs[0].prompts
    unique = {id(prompt): len(prompt) for prompt in prompts}
    lengths = [len(ids) for ids in contestant.completions]
    model = contestant.trainer.accelerator.unwrap_model(contestant.trainer.model)
    per_token = 6 * sum(parameter.numel() for parameter in model.get_decoder().layers.parameters())
    head = 6 * model.get_output_embeddings().weight.numel() * sum(lengths)
    found["operations"] = {
        "trl": per_token * sum(len(prompt) + max(lengths) for prompt in prompts) + head,
        "ours": per_token * (sum(unique.values()) + sum(lengths)) + head,
    }


def warm_up_sampling(contestant: policy_update.GRPOContestant) -> None:
    """Samples a few tokens."""
    with replaced(contestant.trainer.generation_config, max_new_tokens=WARM_UP, min_new_tokens=WARM_UP):
        contestant.measure_sampling()
    contestant.best.clear()


def has_cuda(contestant: policy_update.Contestant) -> bool:
    """Whether torch sees the kernels of the trainer's device. `tests/shims/fake_cuda.py` has none."""
    return contestant.device.type == "cuda" and ProfilerActivity.CUDA in supported_activities()


def kernels(contestant: policy_update.Contestant) -> dict:
    """Seconds of kernels in an update, or of operators on a CPU, and the shares of those that take longest."""
    on_gpu = has_cuda(contestant)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
            contestant._run(contestant.completions)
    events = profiled.profiler.kineto_results.events()
    if on_gpu:  # without annotations, which span other events
        events = [each for each in events if each.device_type() == DeviceType.CUDA and not each.is_user_annotation()]
        totals: dict[str, float] = collections.Counter()
        for event in events:
            totals[event.name()] += event.duration_ns()
    else:
        events = [event for event in events if event.name()[:6] == "aten::"]
        totals = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
    if not events:  # as where a machine lets nobody profile
        return {}
    total = sum(totals.values())
    largest = sorted(totals, key=lambda name: -totals[name])[:LINES]
    return {"kernels_s": covered(events), "kernels": [(name, totals[name] / total) for name in largest]}


def waits(contestant: policy_update.Contestant) -> list[tuple[str, int]]:
    """Lines that wait for the GPU in an update, with their counts."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            contestant._run(contestant.completions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = collections.Counter(
        f"{'/'.join(Path(each.filename).parts[-2:])}:{each.lineno}"
        for each in caught
        if "synchroniz" in str(each.message)
    )
    return lines.most_common()


def matrix_rate(args: argparse.Namespace) -> float:
    """Operations per second of a large matrix product, in bfloat16 on a GPU."""
    if args.device == "cuda":
        size = LARGE
        dtype = torch.bfloat16
    else:
        size = LARGE // 8
        dtype = torch.float32
    if args.preset == "tiny":
        size = LARGE // 8
    a, b = torch.randn(2, size, size, device=args.device, dtype=dtype)
    times = []
    for _ in range(13):
        start = now(args.device)
        a @ b
        times.append(now(args.device) - start)
    return 2 * size**3 / min(seconds for seconds, _ in times[3:])


def free() -> None:
    """Frees the memory of a trainer."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# Measurements without a trainer


def towers(args: argparse.Namespace) -> list[dict]:
    """Times the forward and backward pass of the model's own vision tower and of ours, on the same images."""
    processor = policy_update.build_processor()
    model = policy_update.build_model(policy_update.PRESETS[args.preset], processor, args.device, args.seed)
    results = []
    for case, images in (("image", 1), ("image", 8), ("long", 1))[: 1 if args.preset == "tiny" else None]:
        width, height = (2 * tokens for tokens in policy_update.CASES[case].image_size)
        grids = torch.tensor([[1, height, width]] * images)
        width = model.config.vision_config.patch_size**2 * 3 * model.config.vision_config.temporal_patch_size
        pixels = torch.randn(int(grids.prod(1).sum()), width).to(args.device, model.dtype)
        results.append({"case": case, "images": images, "pixels": pixels, "grids": grids.to(args.device)})
    for name in ("own", "ours"):
        if name == "ours":
            install_prefix_attention(model)
        for result in results:
            seconds = []
            for _ in range(3 + args.repeats):
                model.zero_grad()
                start = now(args.device)
                features = torch.cat(model.get_image_features(result["pixels"], result["grids"]).pooler_output)
                features.float().square().mean().backward()
                seconds.append((now(args.device) - start)[0])
            result[f"{name}_s"] = min(seconds)
            result[name] = features.detach().float()
    for result in results:
        del result["pixels"], result["grids"]
        own = result.pop("own")
        ours = result.pop("ours")
        result["difference"] = ((ours - own).norm() / own.norm()).item()
    return results


def sample(args: argparse.Namespace, name: str) -> dict:
    """The result of `sampling.py` with a sampler, in a process that returns its memory."""
    shim = []
    preset = args.preset
    if args.device == "cpu" and sampling.CONTESTANTS[name][-1]:
        # vLLM's kernels on a CPU take no heads as small as the tiny model's
        shim = [str(VLLM_ON_CPU)]
        preset = "12m"
    if args.preset == "tiny":
        group = 4
        tokens = 8
    else:
        group = 8
        tokens = 128
    options = ["--device", args.device, "--preset", preset, "--repeats", str(args.repeats), "--prompts", "1"]
    options += ["--group", str(group), "--tokens", str(tokens), "--contestants", name]
    command = [sys.executable, *shim, sampling.__file__, *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SAMPLING_SECONDS)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    return json.loads(done.stdout.splitlines()[-1])


# The report


def pair(row: dict, name: str, form: Callable[[float], str], ratio: bool = True) -> str:
    """Baseline → ours, with their ratio; what stopped a measurement in its place."""

    def value(side: str) -> str:
        found = row.get(side, {})
        return form(found[name]) if name in found else found.get("error", "")

    sides = [value(side) for side in reversed(SIDES)]
    both = all(row.get(side, {}).get(name) for side in SIDES)
    text = " → ".join(sides) if any(sides) else ""
    return text + (f", **{row['trl'][name] / row['ours'][name]:.2f}x**" if both and ratio else "")


def seconds(value: float) -> str:
    return f"{value:.3f} s"


def of_update(row: dict, name: str) -> str:
    """A part of an update's time, and its share."""
    shares = {
        side: {name: (row[side][name], row[side][name] / row[side]["update_s"])}
        for side in SIDES
        if name in row.get(side, {})
    }
    return pair(shares, name, lambda part: f"{part[0]:.3f} s, {part[1]:.0%}", ratio=False)


def sizes(row: dict) -> list[str]:
    """Cells of all tables that say what was measured."""
    setting = row["ours"]["setting"]
    lengths = setting["update_completion_tokens"]
    tokens = f"{max(lengths):,}"
    if min(lengths) < max(lengths):
        tokens += f", {sum(lengths) / len(lengths):,.0f} on average"
    is_varied = setting["case"] == "varied"  # the rows of the latest step aren't those of the reported one
    return [
        setting["family"]
        + ", checkpointing" * setting["checkpointing"]
        + ", compiled layers" * setting["torch_compile"],
        "varied" if is_varied else f"{setting['prompt_tokens']:,} ({setting['media_tokens']:,})",
        f"{setting['prompts']} x {setting['group']}",
        tokens,
        setting["baseline"],
    ]


def update_cells(row: dict, rate: float) -> list[str]:
    """A row of the table of updates."""
    ours = row["ours"]
    setting = row["ours"]["setting"]
    rates = {
        side: {"share": ours["operations"][side] / row[side]["update_s"] / rate}
        for side in SIDES
        if "update_s" in row.get(side, {}) and setting["case"] != "varied"
    }
    difference = row.get("gradient_difference")
    cold = [side for side in SIDES if not row.get(side, {}).get("is_warm", True)]
    return [
        *sizes(row),
        pair(row, "update_s", seconds) + (f" (first update: {' and '.join(cold)})" if cold else ""),
        of_update(row, "kernels_s"),
        of_update(row, "host_s"),
        pair(row, "memory_bytes", lambda value: f"{value / MIB / 1024:.2f} GiB"),
        pair(rates, "share", lambda value: f"{value:.0%}", ratio=False),
        f"{sum(setting['update_completion_tokens']) / ours['update_s']:,.0f}",
        "" if difference is None else f"{difference:.0e}",
    ]


SIZES = ("model", "prompt (media)", "completions", "tokens each", "baseline")
UPDATES = ("update", "of it kernels", "of it host", "update memory")
UPDATES += ("share of the rate", "trained tokens/s", "gradient difference")


def page(args: argparse.Namespace, found: dict) -> str:
    """The report."""
    machine = hardware(args.device)
    rate = found["rate"]
    named = versions("trl-multimodal-rft", "trl", "transformers", "torch", "accelerate")
    lines = [
        f"# {args.preset} on {machine['gpu'] or machine['cpu']}",
        "",
        f"{', '.join(f'{name} {version}' for name, version in named.items())}; a product of large matrices reaches "
        f"{rate / 1e12:.3g} TFLOP/s. Baseline → ours, minimum of {args.repeats}.",
    ]
    rows = {part: [] for part in PARTS}
    for name, row in found["rows"].items():
        if "setting" in row.get("ours", {}):
            rows[name.partition(":")[0]].append(row)
    if rows[UPDATE]:
        cells = [update_cells(row, rate) for row in rows[UPDATE]]
        lines += ["", "## Updates", "", markdown((*SIZES, *UPDATES), cells)]
        lines += ["", "The host bounds an update in which it takes almost all of the time, and kernels a small part."]
    if rows[SAMPLING]:
        cells = []
        for row in rows[SAMPLING]:
            tokens = sum(row["ours"]["setting"]["update_completion_tokens"])
            rates = [
                f"{tokens / row[side]['generation_s']:,.0f}" for side in SIDES if "generation_s" in row.get(side, {})
            ]
            cells.append([*sizes(row), pair(row, "generation_s", seconds), " → ".join(reversed(rates))])
        lines += ["", "## Sampling with transformers", "", markdown((*SIZES, "sampling", "tokens/s"), cells)]
    if rows[STEP]:
        phases = policy_update.PHASES
        cells = [
            [*sizes(row), *(pair(row, name, seconds) for name in ("step_s", *(f"step_{each}_s" for each in phases)))]
            for row in rows[STEP]
        ]
        lines += ["", "## Whole step", "", markdown((*SIZES, "step", *phases), cells)]
    for row in rows[UPDATE][:1]:
        for side, title in (("trl", row["ours"]["setting"]["baseline"]), ("ours", "ours")):
            if row.get(side, {}).get("kernels"):
                lines += ["", f"## Where an update goes: {title} ({', '.join(sizes(row)[:4])})", ""]
                lines += [f"- {share:.0%} `{name[:100]}`" for name, share in row[side]["kernels"]]
        if row["ours"].get("waits"):
            total = sum(count for _, count in row["ours"]["waits"])
            lines += ["", f"A step of ours waits for the GPU {total} times:", ""]
            lines += [f"- {count}x `{line}`" for line, count in row["ours"]["waits"][: 2 * LINES]]
    if found["towers"]:
        cells = [
            (
                f"{each['images']} x {each['case']}",
                f"{each['own_s']:.4f} → {each['ours_s']:.4f} s, **{each['own_s'] / each['ours_s']:.2f}x**",
                f"{each['difference']:.0e}",
            )
            for each in found["towers"]
        ]
        header = ("images", "the model's own → ours, forward and backward", "difference of features")
        lines += ["", "## Vision tower", "", markdown(header, cells)]
    if found["rollout"]:
        lines += ["", "## Sampling with vLLM", "", sampling.table(found["rollout"])]
        ours, trl = (found["rollout"].get(name) for name in ("vLLM", "TRL with vLLM"))
        if ours and trl:
            lines += ["", f"Whole step with vLLM, TRL over ours: **{trl['step_s'] / ours['step_s']:.2f}x**"]
    if found["left"]:
        lines += ["", "## Left out", "", *[f"- {name}: {reason}" for name, reason in found["left"].items()]]
    return "\n".join(lines) + "\n"


def measurements(args: argparse.Namespace, found: dict) -> dict[str, Callable[[], None]]:
    """What adds each part of the report, by its name, in their order."""
    kept: dict[str, list] = {}  # gradients of ours in the latest row

    def add(name: str, row: argparse.Namespace, side: str) -> None:
        entry = found["rows"].setdefault(name, {})
        measured = entry[side] = {}
        ours = kept.pop(name, None)
        kept.clear()
        try:
            factor = (1 if row.part == UPDATE else 2) * (5 if row.torch_compile else 1)  # compilers take a while
            measure(row, side, args.seconds * factor, measured)
        except (TimeoutError, torch.OutOfMemoryError) as error:
            measured["error"] = str(error) if isinstance(error, TimeoutError) else "out of memory"
            raise
        finally:
            gradients = measured.pop("gradients", None)
            if gradients and side == "ours":
                kept[name] = gradients
            elif gradients and ours:
                entry["gradient_difference"] = policy_update.relative_difference(gradients, ours)

    def of(rows: Sequence[list]) -> dict[str, Callable[[], None]]:
        return {
            f"{name}; {side}": lambda name=name, row=row, side=side: add(name, row, side)
            for (name, row), side in product(settings(args, rows).items(), args.sides)
            if side == "ours" or not row.torch_compile  # whose baseline is in another row
        }

    parts = TINY if args.preset == "tiny" else (usual_rows(), further_rows())
    first, last = parts
    engines = sampling.CONTESTANTS if is_vllm_available() else ()
    return {
        **of(first),
        "vision tower": lambda: found["towers"].extend(towers(args)),
        **{f"vLLM: {each}": lambda each=each: found["rollout"].update(sample(args, each)) for each in engines},
        **of(last),
    }


def run(args: argparse.Namespace) -> str:
    """Runs the measurements that the files lack, and writes the report after each."""
    end = time.monotonic() + 60 * args.minutes
    file = args.out.with_suffix(".json")
    machine = hardware(args.device)
    of = [args.preset, args.device, machine["gpu"] or machine["cpu"], "one trainer at a time"]
    found = {"of": of, "rows": {}, "towers": [], "rollout": {}, "done": [], "left": {}}
    before = json.loads(file.read_text()) if file.exists() else {}
    if before.get("of") == of:
        found = before
    found["rate"] = matrix_rate(args)

    def write() -> str:
        text = page(args, found)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
        file.with_suffix(".part").write_text(json.dumps(found))
        file.with_suffix(".part").replace(file)
        return text

    for name, measurement in measurements(args, found).items():
        is_named = any(words in name for words in args.rows or ())
        failed = found["left"].get(name, NO_TIME) != NO_TIME
        if name in found["done"] or (args.rows and not is_named) or (failed and not is_named):
            continue
        found["left"].pop(name, None)
        if time.monotonic() > end:
            found["left"][name] = NO_TIME
            continue
        start = time.monotonic()
        try:
            measurement()
            found["done"].append(name)
        except Exception as error:  # must not cost the other rows
            message = next(iter(str(error).splitlines()), "")
            found["left"][name] = f"{type(error).__name__}: {message}"
        free()
        write()
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
    return write()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options of the report."""
    parser = command_line(__doc__)
    parser.add_argument("--preset", choices=["tiny", "3b", "7b"], default="3b", help="size of the models")
    parser.add_argument("--minutes", type=float, default=9, help="time after which no new measurement starts")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20,
        help="time of a trainer in a row; sampling has twice that, compiled layers five times",
    )
    parser.add_argument("--rows", nargs="+", help="measure what has one of these in its name, such as `tower`, `1024`")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="trainers to measure")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_report.md"), help="output file")
    return parse_options(parser, argv, device="cuda", repeats=1, seed=0)


def main(argv: Sequence[str] | None = None) -> str:
    """Runs the report from the command line, and returns its text."""
    text = run(parse(argv))
    print(text)
    return text


if __name__ == "__main__":
    main()
