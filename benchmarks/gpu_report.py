# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Runs the other benchmarks on one GPU and writes a Markdown report.

```bash
python benchmarks/gpu_report.py --out report.md                   # 3B, bfloat16
python benchmarks/gpu_report.py --preset 7b --out report.md
python benchmarks/gpu_report.py --rows long tower --out report.md  # what has these words in its name
python benchmarks/gpu_report.py --device cpu --preset tiny        # dry run; its numbers are meaningless
```

From `policy_update.py`, the report has the update, its memory and the whole step, compared with unmodified
`trl.GRPOTrainer` on the same random weights. For audio, which TRL doesn't support, the baseline is our padded rows.
Prompts have about 400 and 1,400 tokens, groups 8 and 16 completions, completions 128 and 1,024 tokens. Further rows
have completions of log-normal lengths, 512 tokens on average and 1,024 at most, and prompts with images of other sizes
in each step, which shows kernels that plan for each shape. The rows of `project.py`'s targets come first. Each case
samples in its first row, and has updates alone in the others. For each update, the report has its share of the rate of
a large matrix product, which the script measures. The share counts six operations per weight and forwarded token,
without attention and encoders. Rows that don't fit in memory use gradient checkpointing in both trainers. For one
update of ours, the report lists the kernels that take the most time and the lines that wait for the GPU. It compares
the vision tower with the model's own on the same images. From `rollout.py`, it has the tokens per second and the whole
step of each installed sampler, each in a process of its own.

The report has the error of each row that failed, and lists measurements that it skipped for lack of time. The script
updates the file after each row, and next to it one of the same name that ends with `.json`. Where that is there, of
the same models and device, the script goes on with what it lacks. A row that failed runs again if `--rows` names it.
"""

import argparse
import collections
import gc
import itertools
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import policy_update
import rollout
import torch
from measuring import MIB, command_line, hardware, markdown, now, parse_options, versions
from project import TARGETS
from torch.profiler import ProfilerActivity, profile
from trl.import_utils import is_vllm_available

from trl_multimodal_rft.forward.attention import install_prefix_attention


CASES = {"image": "qwen2_5_vl", "audio": "qwen2_audio", "long": "qwen2_5_vl", "long_audio": "qwen2_audio"}
# Cases, group sizes, completion tokens, and which of them come first
SIZES = {"tiny": (["image", "audio"], (2,), (8, 16), [("image", 8)])}
USUAL_SIZES = [*CASES], (8, 16), (128, 1024), [*TARGETS]
LARGE = 8192  # rows of a matrix
LINES = 5
SAMPLING_SECONDS = 240
NO_TIME = "no time"
VLLM_ON_CPU = Path(__file__).parents[1] / "tests/shims/vllm_cpu.py"


def settings(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Options of `policy_update.py` for each row, the most important rows first."""
    cases, groups, tokens, targets = SIZES.get(args.preset, USUAL_SIZES)
    random = ["varied", *(case for case in cases if CASES[case] == "qwen2_5_vl")]
    rows = [(case, groups[0], completion, "equal") for case, completion in targets]
    rows += [(case, max(groups[0], 4), tokens[-1], "lognormal") for case in random]
    rows += [(case, group, completion, "equal") for completion in tokens for case in cases for group in groups]
    sampled: set[str] = set()
    for case, group, completion, lengths in dict.fromkeys([*rows, ("text", 2, tokens[0], "equal")]):
        options = {"device": args.device, "preset": args.preset, "repeats": args.repeats, "case": case}
        options |= {"family": CASES.get(case, "qwen2_5_vl"), "group": group, "tokens": completion, "lengths": lengths}
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        if case in sampled or lengths != "equal":
            words.append("--updates_only")
        else:
            sampled.add(case)
        yield policy_update.parse(words)


def matrix_rate(device: str) -> float:
    """Operations per second of a large matrix product, in bfloat16 on a GPU."""
    size = LARGE if device == "cuda" else LARGE // 8
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    times = []
    for _ in range(13):
        start = now(device)
        a @ b
        times.append(now(device) - start)
    return 2 * size**3 / min(seconds for seconds, _ in times[3:])


def operations(contestants: dict[str, policy_update.Contestant]) -> dict[str, float]:
    """Operations of an update of both trainers: six per weight and token."""
    ours = contestants["ours"]
    prompts = ours.trainer._buffered_inputs[0].prompts
    unique = {id(prompt): len(prompt) for prompt in prompts}
    lengths = [len(ids) for ids in ours.completions]
    model = ours.trainer.accelerator.unwrap_model(ours.trainer.model)
    layers = model.get_decoder().layers
    per_token = 6 * sum(parameter.numel() for parameter in layers.parameters())
    head = 6 * model.get_output_embeddings().weight.numel() * sum(lengths)
    return {
        "trl": per_token * sum(len(prompt) + max(lengths) for prompt in prompts) + head,
        "ours": per_token * (sum(unique.values()) + sum(lengths)) + head,
    }


def watch(contestants: dict[str, policy_update.Contestant]) -> dict:
    """The kernels and waits of an update of ours, and the operations of both trainers."""
    ours = contestants["ours"]
    on_gpu = ours.device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU, *activities]) as profiled:
            ours._run(ours.completions)
    name = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    times = {event.key: getattr(event, name) for event in profiled.key_averages()}
    total = sum(times.values())
    largest = sorted(times, key=lambda key: -times[key])[:LINES]
    return {
        "operations": operations(contestants),
        "kernels": [(key, times[key] / total) for key in largest],
        "waits": waits(ours) if on_gpu else [],
    }


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


def measure(args: argparse.Namespace) -> dict:
    """Measures a row, with gradient checkpointing if it runs out of memory without."""
    try:
        return policy_update.run(args, watch)
    except torch.cuda.OutOfMemoryError:
        if args.checkpointing:
            raise
    free()
    args.checkpointing = True
    return measure(args)


def towers(args: argparse.Namespace) -> list[dict]:
    """Times the forward and backward pass of the model's own vision tower and of ours, on the same images."""
    processor = policy_update.build_processor()
    model = policy_update.build_model(policy_update.PRESETS[args.preset], processor, args.device, args.seed)
    results = []
    for case, images in (("image", 1), ("image", 8), ("long", 1))[: 1 if args.preset in SIZES else None]:
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
            result[f"{name}_s"], result[name] = min(seconds), features.detach().float()
    for result in results:
        del result["pixels"], result["grids"]
        own, ours = result.pop("own"), result.pop("ours")
        result["difference"] = ((ours - own).norm() / own.norm()).item()
    return results


def sample(args: argparse.Namespace, name: str) -> dict:
    """The result of `rollout.py` with a sampler, in a process that returns its memory."""
    tokens = SIZES.get(args.preset, USUAL_SIZES)[2][0]
    shim, preset = [], args.preset
    if args.device == "cpu" and rollout.CONTESTANTS[name][-1]:
        shim, preset = [str(VLLM_ON_CPU)], "12m"  # vLLM's kernels on a CPU take no heads as small as the tiny model's
    options = ["--device", args.device, "--preset", preset, "--repeats", str(args.repeats), "--prompts", "1"]
    options += ["--group", str(4 if args.preset in SIZES else 8), "--tokens", str(tokens), "--contestants", name]
    command = [sys.executable, *shim, rollout.__file__, *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SAMPLING_SECONDS)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    return json.loads(done.stdout.splitlines()[-1])


def free() -> None:
    """Frees the memory of a row."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def cells(result: dict, rate: float) -> list[str]:
    """A row of the table."""
    setting, trl, ours = result["setting"], result["trl"], result["ours"]

    def seconds(name: str) -> str:
        if f"{name}_s" not in ours:
            return ""
        return f"{trl[f'{name}_s']:.3f} → {ours[f'{name}_s']:.3f} s, **{result[f'{name}_ratio']:.2f}x**"

    memory = " → ".join(f"{each['memory_bytes'] / MIB / 1024:.2f}" for each in (trl, ours))
    share = " → ".join(
        f"{result['operations'][name] / result[name]['update_s'] / rate:.0%}" for name in ("trl", "ours")
    )
    lengths = setting["update_completion_tokens"]
    tokens = sum(lengths)
    each = f"{max(lengths):,}" + (f", {tokens / len(lengths):,.0f} on average" if min(lengths) < max(lengths) else "")
    is_varied = setting["case"] == "varied"  # the rows of the latest step aren't those of the reported one
    sampled = setting["prompts"] * setting["group"] * setting["step_completion_tokens"]
    return [
        setting["family"] + (", checkpointing" if setting["checkpointing"] else ""),
        "varied" if is_varied else f"{setting['prompt_tokens']:,} ({setting['media_tokens']:,})",
        f"{setting['prompts']} x {setting['group']}",
        each,
        setting["baseline"],
        seconds("update"),
        f"{memory} GiB, **{result['memory_ratio']:.2f}x**",
        "" if is_varied else share,
        f"{tokens / ours['update_s']:,.0f}",
        seconds("step"),
        f"{sampled / ours['generation_s']:,.0f}" if "generation_s" in ours else "",
        f"{result['gradient_difference']:.0e}",
    ]


HEADER = [
    *("model", "prompt (media)", "completions", "tokens each", "baseline", "update", "update memory"),
    *("share of the rate", "trained tokens/s", "whole step", "sampled tokens/s", "gradient difference"),
]


def page(args: argparse.Namespace, rate: float, found: dict) -> str:
    """The report."""
    machine = hardware(args.device)
    named = versions("trl-multimodal-rft", "trl", "transformers", "torch", "accelerate")
    lines = [
        f"# {args.preset} on {machine['gpu'] or machine['cpu']}",
        "",
        f"{', '.join(f'{name} {version}' for name, version in named.items())}; a product of large matrices reaches "
        f"{rate / 1e12:.3g} TFLOP/s. Baseline → ours, minimum of {args.repeats}.",
        "",
        markdown(HEADER, [cells(result, rate) for result in found["rows"]]),
    ]
    if found["rows"]:
        last = found["rows"][-1]
        lines += ["", f"## Where an update goes ({', '.join(cells(last, rate)[:4])})", ""]
        lines += [f"- {share:.0%} `{name[:100]}`" for name, share in last["kernels"]]
        if last["waits"]:
            total = sum(count for _, count in last["waits"])
            lines += ["", f"It waits for the GPU {total} times:", ""]
            lines += [f"- {count}x `{line}`" for line, count in last["waits"][: 2 * LINES]]
    if found["towers"]:
        rows = [
            (
                f"{each['images']} x {each['case']}",
                f"{each['own_s']:.4f} → {each['ours_s']:.4f} s, **{each['own_s'] / each['ours_s']:.2f}x**",
                f"{each['difference']:.0e}",
            )
            for each in found["towers"]
        ]
        header = ("images", "the model's own → ours, forward and backward", "difference of features")
        lines += ["", "## Vision tower", "", markdown(header, rows)]
    if found["rollout"]:
        lines += ["", "## Sampling", "", rollout.table(found["rollout"])]
        ours, trl = (found["rollout"].get(name) for name in ("vLLM", "TRL with vLLM"))
        if ours and trl:
            lines += ["", f"Whole step with vLLM, TRL over ours: **{trl['step_s'] / ours['step_s']:.2f}x**"]
    if found["left"]:
        lines += ["", "## Left out", "", *[f"- {name}: {reason}" for name, reason in found["left"].items()]]
    return "\n".join(lines) + "\n"


def measurements(args: argparse.Namespace, found: dict) -> dict[str, Callable[[], None]]:
    """What adds each part of the report, by its name, in their order."""
    rows = {}
    for each in settings(args):
        name = f"{each.family}, {each.case}, groups of {each.group}, {each.lengths} lengths up to {each.tokens}"
        rows[name] = lambda each=each: found["rows"].append(measure(each))
    samplers = [name for name, (*_, use_vllm) in rollout.CONTESTANTS.items() if not use_vllm or is_vllm_available()]
    n_targets = len(SIZES.get(args.preset, USUAL_SIZES)[-1])
    return {
        **dict(itertools.islice(rows.items(), n_targets)),
        "vision tower": lambda: found["towers"].extend(towers(args)),
        **{name: row for name, row in rows.items() if "lognormal" in name},
        **{
            f"sampling with {each}": lambda each=each: found["rollout"].update(sample(args, each)) for each in samplers
        },
        **rows,
    }


def run(args: argparse.Namespace) -> str:
    """Runs the measurements that the files lack, and writes the report after each."""
    end = time.monotonic() + 60 * args.minutes
    rate, file = matrix_rate(args.device), args.out.with_suffix(".json")
    machine = hardware(args.device)
    of = [args.preset, args.device, machine["gpu"] or machine["cpu"]]
    found = {"of": of, "rows": [], "towers": [], "rollout": {}, "done": [], "left": {}}
    before = json.loads(file.read_text()) if file.exists() else {}
    if before.get("of") == of:
        found = before

    def write() -> str:
        text = page(args, rate, found)
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
        try:
            measurement()
            found["done"].append(name)
        except Exception as error:  # must not cost the other rows
            message = next(iter(str(error).splitlines()), "")
            found["left"][name] = f"{type(error).__name__}: {message}"
        free()
        write()
    return write()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options of the report."""
    parser = command_line(__doc__)
    parser.add_argument("--preset", choices=["tiny", "3b", "7b"], default="3b", help="size of the models")
    parser.add_argument("--minutes", type=float, default=9, help="time after which no new row starts")
    parser.add_argument("--rows", nargs="+", help="measure what has one of these in its name, such as `tower`, `1024`")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_report.md"), help="output file")
    return parse_options(parser, argv, device="cuda", repeats=1, seed=0)


def main(argv: Sequence[str] | None = None) -> str:
    """Runs the report from the command line, and returns its text."""
    text = run(parse(argv))
    print(text)
    return text


if __name__ == "__main__":
    main()
