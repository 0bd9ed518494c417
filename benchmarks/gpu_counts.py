# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Counts what a GPU's host does in a step of tiny models: operators, kernels, waits and uploads. It needs no GPU:

```bash
python tests/shims/fake_cuda.py benchmarks/gpu_counts.py
```

A row is the forward or the backward pass of an update of one prompt, with bfloat16 autocast, or all else of the step:
rewards, scores, metrics, and the optimizer. *Dispatched* are calls of PyTorch's operators, *kernels* those that aren't
views. The counts of a layer are half the difference of a model with two more. *Compiled* layers are those of
`torch_compile=True`. No compiler generates kernels for the stand-in, so their graphs are counted and not compiled: a
graph is dispatched once, and has a kernel for each matrix product and one before, between and behind these. Attention,
which is outside of the graphs, is counted as ever.
"""

import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path


sys.path.append(str(Path(__file__).parents[1] / "tests"))

import fake_cuda  # noqa: E402
import policy_update  # noqa: E402
from functorch.compile import make_boxed_func  # noqa: E402
from measuring import markdown  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402

from trl_multimodal_rft.forward.compiled import compile_layers  # noqa: E402


CASES = {"image": ("qwen2_5_vl", "depth"), "audio": ("qwen2_audio", "encoder_layers")}
PASSES = ("forward", "backward", "rest")
COLUMNS = ("dispatched", "kernels", "waits", "uploads")
LINES = 12


class Dispatched(TorchDispatchMode):
    """Counts operators, views and calls that autograd makes among them."""

    n = 0

    @classmethod
    def ignore_compile_internals(cls):
        """Lets functions be compiled within the mode."""
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += 1
        return function(*args, **(kwargs or {}))


def as_one(graph, inputs):
    """Counts a graph as one operator, with the kernels that a compiler would generate."""
    products = sum(str(node.target).startswith(("aten.mm", "aten.addmm", "aten.bmm")) for node in graph.graph.nodes)

    def run(*args):
        for mode in _modes:
            mode.n += 1
        for _ in range(2 * products):
            fake_cuda.report("operator", "compiled kernel", 0, False)
        with fake_cuda.one_kernel("compiled kernel"), _disable_current_modes():
            return graph(*args)

    return make_boxed_func(run)


COMPILED = {"backend": aot_autograd(fw_compiler=as_one, bw_compiler=as_one), "dynamic": True}
_modes: list[Dispatched] = []


class Pass:
    """Counts of a pass, of waits and uploads by their line."""

    def __init__(self):
        self.dispatched = 0
        self.operators = Counter()
        self.waits = Counter()
        self.uploads = Counter()

    @contextmanager
    def counted(self):
        with fake_cuda.watch() as watch, Dispatched() as dispatched:
            _modes.append(dispatched)
            try:
                yield
            finally:
                _modes.remove(dispatched)
        self.dispatched += dispatched.n
        self.operators.update(watch.operators)
        self.waits.update({line: n for line, n in watch.waits.items() if "measuring.py" not in line})  # its clock's
        self.uploads.update(watch.uploads)

    @property
    def totals(self) -> list[int]:
        """The values of [`COLUMNS`]."""
        return [self.dispatched, self.operators.total(), self.waits.total(), self.uploads.total()]


def count(case: str, group: int = 8, layers: int = 2, depth: int = 2, compiled: bool = False) -> dict[str, Pass]:
    """Counts a step of a tiny model with this group size and these depths of its decoder and of its encoder."""
    family, name = CASES[case]
    presets = policy_update.FAMILIES[family].presets
    preset = presets["tiny"]
    tower = {**preset.tower, name: depth}
    if "fullatt_block_indexes" in tower:
        tower["fullatt_block_indexes"] = [depth - 1]
    options = ["--preset", "tiny", "--device", "cuda", "--family", family, "--case", case, "--group", str(group)]
    presets["tiny"] = policy_update.Preset({**preset.text, "num_hidden_layers": layers}, tower)
    try:
        with tempfile.TemporaryDirectory() as folder:
            arguments = policy_update.parse([*options, "--updates_only"])
            ours = policy_update.build_trainers(arguments, folder, ["ours"])["ours"]
            ours.trainer.args.self_check = False  # which takes most of the time, before what is counted
            if compiled:
                compile_layers(ours.trainer.model, COMPILED)
            ours.warm_up(True)
            passes = {each: Pass() for each in PASSES}
            _count_calls(ours.trainer, "compute_loss", passes["forward"])
            _count_calls(ours.trainer.accelerator, "backward", passes["backward"])
            with passes["rest"].counted():
                ours._run(ours.completions)
    finally:
        presets["tiny"] = preset
    for each in PASSES[:2]:
        for name in ("operators", "waits", "uploads"):
            getattr(passes["rest"], name).subtract(getattr(passes[each], name))
    passes["rest"].dispatched -= passes["forward"].dispatched + passes["backward"].dispatched
    for name in ("operators", "waits", "uploads"):
        setattr(passes["rest"], name, +getattr(passes["rest"], name))
    return passes


def _count_calls(owner, name: str, counted: Pass) -> None:
    function = getattr(owner, name)

    def call(*args, **kwargs):
        with counted.counted():
            return function(*args, **kwargs)

    setattr(owner, name, call)


def per_layer(base: dict[str, Pass], deeper: dict[str, Pass]) -> dict[str, list[float]]:
    """Totals of one of the two layers by which models differ."""
    return {
        each: [(b - a) / 2 for a, b in zip(base[each].totals, deeper[each].totals, strict=True)] for each in PASSES
    }


def table() -> str:
    rows = []
    lines = []
    for case in CASES:
        base = count(case)
        found = {"update": {each: base[each].totals for each in PASSES}}
        found["groups of 16"] = {each: one.totals for each, one in count(case, group=16).items()}
        found["decoder layer"] = per_layer(base, count(case, layers=4))
        found["encoder layer"] = per_layer(base, count(case, depth=4))
        compiled = count(case, compiled=True)
        found["compiled decoder layer"] = per_layer(compiled, count(case, layers=4, compiled=True))
        found["compiled encoder layer"] = per_layer(compiled, count(case, depth=4, compiled=True))
        for what, passes in found.items():
            rows += [(case, what, each, *(f"{n:g}" for n in passes[each])) for each in PASSES]
        for each in PASSES:
            lines += [f"{case}, {each}: {n}x {line}" for line, n in base[each].waits.most_common(LINES)]
    return "\n".join([markdown(("case", "of", "pass", *COLUMNS), rows), "", *lines])


if __name__ == "__main__":
    print(table())
