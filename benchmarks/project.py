# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Predicts the time and memory of a GRPO step on one GPU, for TRL's padded rows and our packed ones, without a GPU.

```bash
python benchmarks/project.py                                  # Qwen2.5-VL 3B and 7B on an H200, in bfloat16
python benchmarks/project.py --presets 3b --bandwidth 3.5e12  # another machine
python benchmarks/project.py --measured                       # next to what an H100 took
```

**These are predictions, not measurements.** `gpu_report.py` measures what this script predicts.

The script runs the operations of a model of the real widths on fake tensors, with the kernels of a GPU
(`fake_run`), and counts floating-point operations, bytes, dispatched operations and live
memory. Totals follow from models of one and two layers of each kind, since layers are alike. The constants are those
of [`Machine`].

- **A kernel** takes the longest of its operations at the rate of its kind, its bytes at the bandwidth, and the
  shortest time of any kernel. Causal attention counts the pairs of queries and keys that it computes.
- **A phase** (forward or backward pass of the vision tower or the decoder) takes the longer of the time of its
  kernels and the time in which the host dispatches its operations.
- **An update** is a forward and a backward pass; **scoring** is a forward pass. Memory is the peak above weights and
  gradients. If the update of either trainer doesn't fit beside weights, gradients and AdamW's state, both use gradient
  checkpointing.
- **A step with vLLM** adds processing the prompts, the weight transfer to the engine, sampling and scoring. Names of
  weights and the processor of a prompt are timed on this machine's CPU.

It leaves out the optimizer, the loss and metrics of a trainer, waits of the host for the GPU, plans of cuDNN, and the
pointwise kernels in tiles of the LM head.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import product

import numpy as np
import policy_update
import torch
from fake_run import FakeFloats, Watch, kernels_of_gpus
from measuring import command_line, markdown, parse_options, report, versions
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.initialization import no_init_weights

from trl_multimodal_rft.encoding.prompts import EncodedPrompt
from trl_multimodal_rft.engines.vllm_weights import checkpoint_weights
from trl_multimodal_rft.forward import head
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.logprobs import completion_scores
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.models.modes import checkpoint_activations


GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """
    An H200 and its host, in SI units. Products and bandwidth were measured on one. The times of the host and of a
    kernel are such that updates and sampled tokens of 3B take about as long as on an H100 with 16 cores of a virtual
    machine; the rest are assumptions.
    """

    peak: float = 989e12  # operations per second: dense bfloat16, by the data sheet
    products: float = 769e12  # operations per second of large products: 769 to 798e12 with 8192 rows and columns
    attention: float = 350e12  # the same of FlashAttention 2, which torch's kernels run on Hopper
    bandwidth: float = 4.3e12  # bytes per second of copies; 4.8e12 by the data sheet
    kernel: float = 4e-6  # seconds of the shortest kernel, with the gap to the next one
    forward: float = 35e-6  # seconds in which Python calls and dispatches an operation
    backward: float = 20e-6  # seconds in which autograd does, without Python
    memory: float = field(default=139 * GIB, compare=False)  # bytes that a process can use; no cost depends on them
    load_call: float = 1.5e-3  # seconds of a call of vLLM's `load_weights`: 1.5 to 1.6e-3 with as many layers on a CPU
    load_weight: float = 1e-4  # seconds of the host per weight in a call: at most 2.9e-4 on a CPU, which packs them
    token: float = 1.5e-3  # seconds per sampled token beyond reading the weights: scheduler, sampling, attention


@dataclass(frozen=True)
class Prompt:
    """A prompt of `tokens`, of which `frames` of a `width` and a `height` in tokens."""

    tokens: int
    frames: int
    width: int
    height: int


PROMPTS = {
    "image": Prompt(418, 1, 28, 14),
    "long": Prompt(1358, 1, 37, 36),
    "video": Prompt(16000, 40, 28, 14),
}
COMPLETIONS = (128, 256, 512, 1024)
# 3.35e12 bytes per second by the data sheet, of which copies reach as large a share as on an H200
H100 = Machine(bandwidth=3.0e12, memory=79 * GIB)
# Measurements of `gpu_report.py` on an H100, from one run or two: an update at 3B on a prompt with 8 completions of
# 256 tokens, with gradient checkpointing
MEASURED = {
    ("trl", "update_s"): (3.65, 4.47),
    ("ours", "update_s"): (0.57, 0.61),
    ("ours", "gpu_s"): (0.22,),
    ("trl", "memory_bytes"): (3.88 * GIB, 3.89 * GIB),
    ("ours", "memory_bytes"): (2.41 * GIB, 2.42 * GIB),
}
MEASURED_NAMES = {"update_s": "seconds", "gpu_s": "seconds of kernels", "memory_bytes": "GiB"}
SIDES = {"trl": "TRL", "ours": "ours"}
# Prompt, completion tokens, and the least ratio of the baseline to ours, at 3B
TARGETS = {("image", 256): 2.5, ("long", 256): 4.0, ("video", 512): 5.0}
MEMORY_TARGET = 2.5
STEP_TARGET = 1.5
UPDATE = ("forward", "backward")
QUANTITIES = ("host", "gpu", "operations", "dispatched", "bytes")


class Costs(Watch):
    """
    Adds up what operations cost on a GPU.

    `totals` has each of [`QUANTITIES`] for `phase`, which is `"forward"` or `"backward"`.

    Args:
        machine ([`Machine`]):
            Rates.
        known (`Iterable[torch.Tensor]`):
            Tensors whose memory isn't counted.
    """

    def __init__(self, machine: Machine, known: Iterable[torch.Tensor] = ()):
        super().__init__(known)
        self.machine = machine
        self.phase = "forward"
        self.totals = {phase: dict.fromkeys(QUANTITIES, 0.0) for phase in UPDATE}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.operations
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "prim":  # attributes of fake tensors
            return result
        machine = self.machine
        name = func._overloadpacket.__name__
        totals = self.totals[self.phase]
        # Gradient checkpointing runs Python in the backward pass, with gradients
        in_python = self.phase == "forward" or torch.is_grad_enabled()
        totals["dispatched"] += 1
        totals["host"] += machine.forward if in_python else machine.backward
        if func.is_view or name.startswith(("empty", "new_empty", "_unsafe_view", "_local_scalar")):
            return result
        operations = self.operations - before
        rate = machine.products
        if "attention" in name or "_varlen_attn" in name:
            operations = attention_operations(name, args, kwargs or {})
            rate = machine.attention
        moved = moved_bytes(name, args, result)
        totals["operations"] += operations
        totals["bytes"] += moved
        totals["gpu"] += max(operations / rate, moved / machine.bandwidth, machine.kernel)
        return result


def moved_bytes(name: str, args: Sequence, result) -> int:
    """Bytes that a kernel reads and writes. One that picks rows reads as many as it writes."""
    written = sum(each.nbytes for each in tensors(result))
    if name in ("index_select", "index", "embedding", "gather"):
        return 2 * written
    return written + sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in tensors(args))


def tensors(values) -> Iterator[torch.Tensor]:
    """Tensors in a tensor, a list, or a list of lists."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors(value)


def attention_operations(name: str, args: Sequence, kwargs: dict) -> float:
    """Operations of an attention kernel: two products forward and five backward, of the pairs that it computes."""
    is_backward = "backward" in name
    query, key = args[is_backward : is_backward + 2]
    starts = [each for each in args if isinstance(each, torch.Tensor) and each.dtype == torch.int32]
    if starts:  # sequences of variable lengths, one after the other
        queries, keys = (each.diff().double() for each in starts[:2])
        is_causal = next(each for each in (*args, *kwargs.values()) if isinstance(each, bool))
        heads, size = query.shape[1:]
    else:
        (batch, heads, length, size) = query.shape
        longest = key.size(2)
        queries = torch.tensor([length] * batch).double()
        keys = torch.tensor([longest] * batch).double()
        is_causal = next((each for each in args if isinstance(each, bool)), False)
    pairs = queries * (keys - queries) + queries * (queries + 1) / 2 if is_causal else queries * keys
    return (5 if is_backward else 2) * 2 * heads * size * float(pairs.sum())


# Runs on fake tensors


def build(preset: str, layers: int, windowed: int, full: int, checkpointing: bool, mode: FakeFloats):
    """A model of fake weights with some layers of the decoder, and some windowed and full ones of the vision tower."""
    sizes = policy_update.PRESETS[preset]
    tower = {"depth": windowed + full, "fullatt_block_indexes": [*range(windowed, windowed + full)]}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": sizes.vocab_size or 400,
            "max_position_embeddings": 32768,
            **sizes.text,
            "num_hidden_layers": layers,
        },
        vision_config={**sizes.tower, **tower},
        tie_word_embeddings=sizes.text.get("tie_word_embeddings", False),
    )
    with mode, no_init_weights():
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
        model.tie_weights()
        model.train()
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
    if checkpointing:
        checkpoint_activations(model, {"use_reentrant": False, "preserve_rng_state": False})
    return model


def run_costs(machine: Machine, model, mode: FakeFloats, forward: Callable[[], torch.Tensor]) -> np.ndarray:
    """[`QUANTITIES`] of the forward and of the backward pass, bytes held between them, and bytes at the peak."""
    with mode, kernels_of_gpus():
        known = [*model.parameters(), *model.buffers(), *(each.grad for each in model.parameters())]
        with Costs(machine, known) as costs:
            loss = forward()
            held = costs.now
            costs.phase = "backward"
            loss.backward()
    return np.array([*(costs.totals[phase][each] for phase, each in product(UPDATE, QUANTITIES)), held, costs.peak])


def run_decoder(
    machine: Machine, preset: str, layers: int, prompt: int, group: int, tokens: int, packed: bool, checkpointing: bool
) -> np.ndarray:
    """Costs of a decoder of some layers and of the LM head, for a prompt with a group of completions."""
    mode = FakeFloats()
    model = build(preset, layers, 1, 1, checkpointing, mode)
    if packed:
        install_prefix_attention(model)
    head.add_fused_head(model, outputs=("log_probs", "entropy"))
    ids = torch.zeros(prompt, dtype=torch.long)
    positions = torch.arange(prompt).expand(4, 1, prompt)
    prompts = [EncodedPrompt(ids, {}, {}, positions)] * group
    completions = torch.zeros(group, tokens, dtype=torch.long)

    def forward() -> torch.Tensor:
        mask = torch.ones_like(completions)
        return completion_scores(model, model, ScoreRequest(prompts, completions, mask, packed=packed)).logps.mean()

    return run_costs(machine, model, mode, forward)


@functools.cache
def decoder_costs(machine: Machine, preset: str, *arguments) -> np.ndarray:
    """[`run_decoder`] with all layers."""
    one, two = (run_decoder(machine, preset, layers, *arguments) for layers in (1, 2))
    return one + (policy_update.PRESETS[preset].text["num_hidden_layers"] - 1) * (two - one)


def run_tower(
    machine: Machine,
    preset: str,
    windowed: int,
    full: int,
    width: int,
    height: int,
    frames: int,
    packed: bool,
    checkpointing: bool,
) -> np.ndarray:
    """Costs of a vision tower of some windowed and some full layers, for frames of one size in tokens."""
    mode = FakeFloats()
    model = build(preset, 1, windowed, full, checkpointing, mode)
    if packed:
        install_prefix_attention(model)
    vision = model.config.vision_config
    grid = torch.tensor([[frames, 2 * height, 2 * width]])
    with mode:
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.zeros(int(grid.prod()), patch, dtype=torch.bfloat16)

    def forward() -> torch.Tensor:
        return torch.cat(model.get_image_features(pixels, grid).pooler_output).sum()

    return run_costs(machine, model, mode, forward)


@functools.cache
def tower_costs(machine: Machine, preset: str, width: int, height: int, frames: int, *arguments) -> np.ndarray:
    """[`run_tower`] with all layers."""
    if frames > 2:  # frames don't see each other
        one, two = (tower_costs(machine, preset, width, height, n, *arguments) for n in (1, 2))
        return one + (frames - 1) * (two - one)
    sizes = policy_update.PRESETS[preset].tower
    n_full = len(sizes["fullatt_block_indexes"])
    one, windowed, full = (
        run_tower(machine, preset, *layers, width, height, frames, *arguments) for layers in ((1, 1), (2, 1), (1, 2))
    )
    return one + (sizes["depth"] - n_full - 1) * (windowed - one) + (n_full - 1) * (full - one)


# Predictions


def predict_update(
    machine: Machine, preset: str, prompt: Prompt, group: int, tokens: int, packed: bool, checkpointing: bool
) -> dict[str, float]:
    """Seconds, operations and bytes of an update, and seconds of scoring."""
    frames = prompt.frames * (1 if packed else group)
    tower = tower_costs(machine, preset, prompt.width, prompt.height, frames, packed, checkpointing)
    decoder = decoder_costs(machine, preset, prompt.tokens, group, tokens, packed, checkpointing)
    *phases, held, peak = zip(tower, decoder, strict=True)
    forward, backward = np.array(phases).reshape(2, len(QUANTITIES), 2)
    host, gpu, operations, dispatched, _ = forward + backward
    return {
        "update_s": float(np.maximum(*forward[:2]).sum() + np.maximum(*backward[:2]).sum()),
        "scoring_s": float(np.maximum(*forward[:2]).sum()),
        "encoding_s": float(np.maximum(*forward[:2])[0]),
        "host_s": float(host.sum()),
        "gpu_s": float(gpu.sum()),
        "operations": float(operations.sum()),
        "dispatched": float(dispatched.sum()),
        # The tower's activations wait for the decoder's backward pass
        "memory_bytes": float(max(held[0] + peak[1], peak[0])),
    }


@functools.cache
def whole_model(preset: str) -> tuple[int, int, int, float]:
    """Numbers of weights, of those read for each token, and of their tensors; CPU seconds to name those for vLLM."""
    sizes = policy_update.PRESETS[preset]
    full = len(sizes.tower["fullatt_block_indexes"])
    layers = sizes.text["num_hidden_layers"], sizes.tower["depth"] - full, full
    model = build(preset, *layers, checkpointing=False, mode=FakeFloats())
    weights = list(model.named_parameters())
    for _ in range(2):  # the first may look up what the second knows
        start = time.process_time()
        for _ in checkpoint_weights(model, weights):
            pass
        seconds = time.process_time() - start
    read = sum(parameter.numel() for parameter in model.get_decoder().layers.parameters())
    read += model.get_output_embeddings().weight.numel()
    return sum(parameter.numel() for _, parameter in weights), read, len(weights), seconds


@functools.cache
def processor_seconds(prompt: Prompt) -> float:
    """CPU seconds of the processor for a prompt."""
    processor = policy_update.build_processor()
    shape = 28 * prompt.height, 28 * prompt.width, 3
    images = [np.random.default_rng(i).integers(0, 256, shape, dtype=np.uint8) for i in range(prompt.frames)]
    text = "<|vision_start|><|image_pad|><|vision_end|>" * prompt.frames
    seconds = []
    for _ in range(2):
        start = time.process_time()
        processor(images=images, text=[text], return_tensors="pt")
        seconds.append(time.process_time() - start)
    return min(seconds)


def predict(
    machine: Machine, preset: str, case: str, group: int, tokens: int, without_checkpointing: bool = True
) -> dict:
    """A row of the table: predictions of both trainers, with checkpointing if they need it."""
    prompt = PROMPTS[case]
    weights, read, tensors_of_weights, naming = whole_model(preset)
    for checkpointing in (False, True)[not without_checkpointing :]:
        updates = {
            name: predict_update(machine, preset, prompt, group, tokens, name == "ours", checkpointing)
            for name in ("trl", "ours")
        }
        # Weights, gradients and two moments, in bfloat16
        used = {name: 8 * weights + each["memory_bytes"] for name, each in updates.items()}
        if max(used.values()) <= machine.memory:
            break
    copied = 2 * 2 * weights / machine.bandwidth
    prefill = updates["ours"]["encoding_s"] + 2 * read * prompt.tokens / machine.products
    loads = {
        "trl": tensors_of_weights * machine.load_call,
        "ours": naming + machine.load_call + tensors_of_weights * machine.load_weight,
    }
    for name, each in updates.items():
        each["fits"] = used[name] <= machine.memory
        each["share"] = each["operations"] / each["update_s"] / machine.peak
        each["sync_s"] = max(loads[name], copied)
        each["sampling_s"] = prefill + tokens * (2 * read / machine.bandwidth + machine.token)
        # Both the trainer and the engine run it, TRL for each completion
        each["processing_s"] = 2 * (group if name == "trl" else 1) * processor_seconds(prompt)
        parts = ("processing", "sync", "sampling", "scoring", "update")
        each["step_s"] = sum(each[f"{part}_s"] for part in parts)
    ratios = {
        f"{name.rpartition('_')[0]}_ratio": updates["trl"][name] / updates["ours"][name]
        for name in ("update_s", "scoring_s", "sync_s", "step_s", "memory_bytes")
    }
    setting = {"preset": preset, "case": case, "prompt_tokens": prompt.tokens, "tokens": tokens}
    return {**setting, "group": group, "checkpointing": checkpointing, **updates, **ratios}


def targets(rows: list[dict]) -> list[dict]:
    """Targets at 3B, with what is predicted."""
    found = []
    for row in rows:
        least = TARGETS.get((row["case"], row["tokens"]))
        if row["preset"] != "3b" or least is None:
            continue
        for name, limit in (("update", least), ("memory", MEMORY_TARGET), ("step", STEP_TARGET)):
            ratio = row[f"{name}_ratio"]
            place = {"prompt_tokens": row["prompt_tokens"], "tokens": row["tokens"]}
            found.append({**place, "name": name, "target": limit, "predicted": ratio, "met": ratio >= limit})
    return found


def run(args: argparse.Namespace) -> dict:
    """Predicts all rows."""
    machine = Machine(**{each.name: getattr(args, each.name) for each in fields(Machine)})
    rows = []
    for preset, case in itertools.product(args.presets, args.cases):
        fits = True  # without checkpointing, which longer completions don't if shorter ones don't
        for tokens in sorted(args.tokens):
            rows.append(predict(machine, preset, case, args.group, tokens, fits))
            fits = not rows[-1]["checkpointing"]
    named = versions("trl-multimodal-rft", "torch", "trl", "transformers")
    return {"rows": rows, "targets": targets(rows), "machine": vars(machine), "versions": named}


def differences() -> dict[tuple[str, str], tuple[float, list[float]]]:
    """Predictions of [`MEASURED`], each with its relative differences from the measurements."""
    found = {}
    for (side, name), values in MEASURED.items():
        predicted = predict_update(H100, "3b", PROMPTS["image"], 8, 256, side == "ours", checkpointing=True)[name]
        found[side, name] = predicted, [predicted / value - 1 for value in values]
    return found


def comparison() -> str:
    """A table of predictions and measurements."""
    rows = []
    for (side, name), (predicted, relative) in differences().items():
        unit = GIB if name == "memory_bytes" else 1
        measured = ", ".join(f"{value / unit:.2f}" for value in MEASURED[side, name])
        shares = ", ".join(f"{each:+.0%}" for each in relative)
        rows.append((SIDES[side], MEASURED_NAMES[name], measured, f"{predicted / unit:.2f}", shares))
    return markdown(("H100, 3B", "of an update", "measured", "predicted", "difference"), rows)


HEADER = [
    *("model", "prompt", "tokens each", "update", "of it host / GPU", "share of peak", "update memory"),
    *("scoring", "weight sync", "step with vLLM"),
]


def cells(row: dict) -> list[str]:
    """A row of the table."""
    trl = row["trl"]
    ours = row["ours"]

    def pair(form: Callable[[dict], str], ratio: str | None = None) -> str:
        return f"{form(trl)} → {form(ours)}" + (f", **{row[f'{ratio}_ratio']:.1f}x**" if ratio else "")

    def milliseconds(name: str) -> str:
        return pair(lambda each: f"{1000 * each[f'{name}_s']:,.0f}", name)

    def size(each: dict) -> str:
        return f"{each['memory_bytes'] / GIB:.1f}" + ("" if each["fits"] else " (doesn't fit)")

    return [
        row["preset"] + (", checkpointing" if row["checkpointing"] else ""),
        f"{row['prompt_tokens']:,}",
        f"{row['tokens']:,}",
        milliseconds("update"),
        pair(lambda each: f"{1000 * each['host_s']:,.0f} / {1000 * each['gpu_s']:,.0f}"),
        pair(lambda each: f"{each['share']:.0%}"),
        pair(size, "memory"),
        *(milliseconds(name) for name in ("scoring", "sync", "step")),
    ]


def table(result: dict) -> str:
    """The assumptions and the tables."""
    versions_of = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    constants = ", ".join(f"{name} {value:.3g}" for name, value in result["machine"].items())
    lines = [
        "PREDICTIONS, NOT MEASURED. TRL → ours: milliseconds, and GiB above weights and gradients, of a prompt with "
        f"{result['rows'][0]['group']} completions.",
        f"Assumptions: {constants}; {versions_of}.",
        "",
        markdown(HEADER, [cells(row) for row in result["rows"]]),
    ]
    if result["targets"]:
        rows = [
            (
                f"{each['name']}, prompt of {each['prompt_tokens']:,}, {each['tokens']:,} tokens each",
                f"{each['target']:.1f}x",
                f"{each['predicted']:.1f}x",
                "met" if each["met"] else "**missed**",
            )
            for each in result["targets"]
        ]
        lines += ["", markdown(("target at 3b", "at least", "predicted", ""), rows)]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the script from the command line, and returns the result of [`run`]."""
    parser = command_line(__doc__)
    parser.add_argument("--presets", nargs="+", choices=policy_update.PRESETS, default=["3b", "7b"])
    parser.add_argument("--cases", nargs="+", choices=PROMPTS, default=[*PROMPTS], help="prompts")
    parser.add_argument("--tokens", nargs="+", type=int, default=COMPLETIONS, help="per completion")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--measured", action="store_true", help="compare with what was measured on an H100 instead")
    for each in fields(Machine):
        parser.add_argument(f"--{each.name}", type=float, default=each.default, help="see `Machine`")
    args = parse_options(parser, argv, threads=None, json=False)
    if args.measured:
        print(comparison())
        return {}
    return report(args, run, table)


if __name__ == "__main__":
    main()
