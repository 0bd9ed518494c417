# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Gives a CPU build of torch a device `cuda` whose memory is the host's, to show what only a GPU would.

Runs a script or a module on it; its arguments follow:

```bash
python tests/shims/fake_cuda.py benchmarks/gpu_counts.py
python tests/shims/fake_cuda.py -m pytest tests/gpu -m gpu
```

The package takes its paths for GPUs: pinned memory, autocast, autograd's thread for the device, variable-length
attention. Operators with tensors of both devices raise an error, and so do calls of attention kernels that these would
refuse. [`watch`] records what the host waits for, uploads and operators. Nothing here tells about speed, races,
several GPUs, or about kernels that Triton compiles. `fake_cuda.cpp` is compiled once per version of torch, which takes
30 seconds.
"""

import ctypes
import hashlib
import importlib.util
import os
import runpy
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace


NAME = "fake_cuda_device"
SOURCE = Path(__file__).with_suffix(".cpp")
BUILD = """
import sys
from torch.utils import cpp_extension
name, source, folder = sys.argv[1:]
cpp_extension.load(name, [source], build_directory=folder, extra_cflags=["-O1", "-w"])
"""


def build() -> Path:
    """Returns the compiled device, which an earlier process may have compiled."""
    key = hashlib.sha256(f"{version('torch')}{sys.version}".encode() + SOURCE.read_bytes()).hexdigest()[:12]
    folder = SOURCE.parents[2] / "build" / f"{NAME}-{key}"
    if not (folder / f"{NAME}.so").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-c", BUILD, NAME, str(SOURCE), str(folder)], check=True)
    return folder


def _load(folder: Path):
    """Loads the device before torch asks for one, which it does on import."""
    torch_folder = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    libraries = [*sorted(torch_folder.glob("lib/libgomp*")), *sorted(torch_folder.parent.glob("torch.libs/libgomp*"))]
    libraries += [torch_folder / f"lib/lib{name}.so" for name in ("c10", "torch_cpu", "torch", "shm", "torch_python")]
    for each in [*libraries, folder / f"{NAME}.so"]:
        ctypes.CDLL(str(each), mode=ctypes.RTLD_GLOBAL)
    sys.path.insert(0, str(folder))
    return importlib.import_module(NAME)


device = _load(build())

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402


PROPERTIES = SimpleNamespace(name="stand-in", total_memory=80 << 30, major=9, minor=0, multi_processor_count=132)
STREAM = SimpleNamespace(
    cuda_stream=0,
    device=torch.device("cuda", 0),
    synchronize=lambda: report("sync", "stream", 0, True),
    wait_stream=lambda other: None,
    wait_event=lambda event: None,
    record_event=lambda event=None: event,
)
OF_CUDA = {
    "_lazy_init": lambda: None,
    "is_initialized": lambda: True,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "device": nullcontext,
    "stream": nullcontext,
    "current_stream": lambda device=None: STREAM,
    "default_stream": lambda device=None: STREAM,
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_properties": lambda device=None: PROPERTIES,
    "is_bf16_supported": lambda including_emulation=True: True,
    "synchronize": lambda device=None: report("sync", "device", 0, True),
    "empty_cache": lambda: None,
    "mem_get_info": lambda device=None: (PROPERTIES.total_memory, PROPERTIES.total_memory),
    "memory_allocated": lambda index=None: device.allocated(),
    "memory_reserved": lambda index=None: device.allocated(),
    "max_memory_allocated": lambda index=None: device.peak(),
    "reset_peak_memory_stats": lambda index=None: device.reset_peak(),
    # Random numbers come from the CPU's generator
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
}
OF_ACCELERATOR = {
    "is_available": lambda: True,
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_index": lambda: 0,
    "device_count": lambda: 1,
    "synchronize": lambda device=None: report("sync", "device", 0, True),
}


class Watch:
    """What was reported: `operators` by name, and `waits` and `uploads` by the line that runs them."""

    def __init__(self):
        self.operators = Counter()
        self.waits = Counter()
        self.uploads = Counter()

    def __call__(self, kind: str, what: str, n_bytes: int, waits: bool) -> None:
        if kind == "operator":
            self.operators[what] += 1
            return
        line = _line()
        if waits:
            self.waits[f"{kind}: {what}: {line}"] += 1
        if kind == "upload":
            self.uploads[line] += 1


_watches: list[Watch] = []


def report(kind: str, what: str, n_bytes: int, waits: bool) -> None:
    for each in _watches:
        each(kind, what, n_bytes, waits)


@contextmanager
def watch():
    """Yields a [`Watch`] that records what runs within the context."""
    _watches.append(Watch())
    device.listen(report)
    try:
        yield _watches[-1]
    finally:
        _watches.pop()
        device.listen(report if _watches else None)


@contextmanager
def one_kernel(name: str = ""):
    """Reports what runs within the context as one operator, or as none."""
    if name:
        report("operator", name, 0, False)
    device.unreported(1)
    try:
        yield
    finally:
        device.unreported(-1)


def _line() -> str:
    """The innermost line outside of torch, or autograd's thread, which has no other."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        name = frame.f_code.co_name
        is_inner = any(each in file for each in ("/torch/", __file__, "/contextlib.py", "/functools.py", "<"))
        if not is_inner and name != "__torch_dispatch__":
            return f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno} {name}"
        frame = frame.f_back
    return "autograd"


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """`scaled_dot_product_attention`, which on CUDA chooses among kernels that a CPU lacks."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (each.to(dtype) for each in (query, key, value))
        attn_mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.to(dtype)
    states = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
    assert len({each.device for each in states}) == 1, "attention has tensors of both devices"
    assert len({each.dtype for each in states} - {torch.bool}) == 1, "attention has tensors of two dtypes"
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf)
    with torch.autocast("cuda", enabled=False):
        dtype = torch.promote_types(query.dtype, torch.float32)
        wide = [each.to(dtype) for each in (query, key, value)]
        attn_mask = attn_mask if attn_mask is None else attn_mask.to(dtype)
        options = {"scale": scale, "enable_gqa": enable_gqa}
        mathematical = torch.ops.aten._scaled_dot_product_attention_math
        output = mathematical(*wide, attn_mask, dropout_p, is_causal, None, **options)[0]
    return output.to(query.dtype)


def _forward_of_flash_attention(
    query, key, value, *rest, scale=None, window_size_left=None, window_size_right=None, **_
):
    *sequences, _, is_causal, _ = rest
    with one_kernel("variable-length attention"):
        states, sequences = _on_host((query, key, value), sequences)
        window = _window(is_causal, window_size_left, window_size_right)
        found = _reference().attend(*states, sequences, window, scale or query.size(-1) ** -0.5)
        empty = torch.empty(0)
        return tuple(each.cuda() for each in (*found, torch.zeros(2, dtype=torch.uint64), empty, empty))


def _backward_of_flash_attention(gradient, *rest, scale=None, window_size_left=None, window_size_right=None):
    *states, is_causal, _, _ = rest
    *states, _ = states
    with one_kernel("gradient of variable-length attention"):
        states, sequences = _on_host((gradient, *states[:5]), states[5:])
        window = _window(is_causal, window_size_left, window_size_right)
        return tuple(
            each.cuda()
            for each in _reference().gradients(*states, sequences, window, scale or gradient.size(-1) ** -0.5)
        )


def _dense_flash_attention(query, key, value, dropout_p=0.0, is_causal=False, *rest, scale=None):
    states = (query, key, value)
    assert query.size(-1) == key.size(-1) == value.size(-1) <= 256 and query.size(-1) % 8 == 0
    assert query.size(1) % key.size(1) == 0 and all(each.stride(-1) == 1 for each in states)  # grouped queries, too
    with one_kernel("attention"):
        (query, key, value), _ = _on_host(states, ())
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = on_cpu(query.float(), key.float(), value.float(), dropout_p, is_causal, scale=scale)
        empty = torch.empty(0).cuda()
        n = query.size(2), key.size(2)
        return output.to(query.dtype).cuda(), lse.cuda(), empty, empty, *n, empty, empty, empty


def _reference():
    """Kernels as `cuda_path.py` has them, whose imports must not precede those of what runs here."""
    sys.path.append(str(SOURCE.parents[1]))
    try:
        return importlib.import_module("helpers.cuda_path")
    finally:
        sys.path.pop()


def _on_host(states, sequences):
    assert all(each.is_cuda for each in (*states, *sequences[:2])), "the kernel has tensors of the host"
    assert all(each.dtype in (torch.bfloat16, torch.float16) for each in states[:3]), "the kernel takes half precision"
    return tuple(each.cpu() for each in states), (*(each.cpu() for each in sequences[:2]), *sequences[2:])


def _window(is_causal, left, right) -> tuple[int, int]:
    return (-1 if left is None else left, 0 if is_causal else -1 if right is None else right)


def _product(left, right, out_dtype=torch.float32):
    with one_kernel():
        return (left.float() @ right.float()).to(out_dtype)


def _added_product(total, left, right, out_dtype, *, beta=1, alpha=1, out):
    with one_kernel():
        return out.copy_(beta * total + alpha * (left.float() @ right.float()))


def _histogram(values, bins=100, min=0, max=0):
    report("sync", "aten::histc", 0, True)
    with one_kernel("aten::histc"):
        return torch.histc(values.cpu().float(), bins, min, max).to(values.dtype).cuda()


def _of_cpu(operator):
    """An operator that the fallback can't run."""

    def call(*args, **kwargs):
        with one_kernel(operator.name()):
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.cpu, (args, kwargs))
            return tree_map_only(torch.Tensor, torch.Tensor.cuda, operator(*args, **kwargs))

    return call


def _deepcopy(self, memo):
    if not self.is_cuda or isinstance(self, torch.nn.Parameter):
        return _own_deepcopy(self, memo)
    return memo.setdefault(id(self), self.detach().clone())


def install() -> None:
    """Patches torch."""
    for owner, patches in ((torch.cuda, OF_CUDA), (torch.cuda.random, OF_CUDA), (torch.accelerator, OF_ACCELERATOR)):
        for name, patch in patches.items():
            if hasattr(owner, name):
                setattr(owner, name, patch)
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch.backends.cuda.is_built = lambda: True
    torch.Tensor.__deepcopy__ = _deepcopy
    F.scaled_dot_product_attention = _attention
    aten = torch.ops.aten
    for name, function in {
        "_flash_attention_forward": _forward_of_flash_attention,
        "_flash_attention_backward": _backward_of_flash_attention,
        "_scaled_dot_product_flash_attention": _dense_flash_attention,
        "mm.dtype": _product,
        "mm.dtype_out": lambda left, right, out_dtype, *, out: out.copy_(_product(left, right, out_dtype)),
        "addmm.dtype_out": _added_product,
        "histc": _histogram,
        "convolution": _of_cpu(aten.convolution.default),
        "convolution_backward": _of_cpu(aten.convolution_backward.default),
    }.items():
        _library.impl(name, function, "CUDA")


_library = torch.library.Library("aten", "IMPL")
_own_deepcopy = torch.Tensor.__deepcopy__
install()

if __name__ == "__main__":
    sys.modules["fake_cuda"] = sys.modules["__main__"]
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
