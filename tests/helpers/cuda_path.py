# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
The path of CUDA on a CPU: a strict stand-in for torch's variable-length kernel, and counts of operations.

Queries, keys and values have the shape `(tokens, heads, head_dim)`. `sequences` holds the first token of each sequence
for queries and for keys, `int32`, and the length of the longest sequence for both: `([0, 2, 5], [0, 4, 7], 3, 4)` for
sequences of 2 and 3 queries with 4 and 3 keys. `window` is the number of keys that a query sees to its left and to its
right, -1 for all.
"""

import itertools
from collections import Counter
from contextlib import contextmanager

import torch
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trl_multimodal_rft.forward import head, kernels


class _Kernel(torch.autograd.Function):
    """Attention within sequences. The last query of a sequence stands at the position of its last key."""

    @staticmethod
    def forward(ctx, query, key, value, sequences, scale, window):
        output, lse = attend(query, key, value, sequences, window, scale)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.settings = sequences, window, scale
        return output

    @staticmethod
    def backward(ctx, gradient):
        return (*gradients(gradient.contiguous(), *ctx.saved_tensors, *ctx.settings), None, None, None)


def attend(query, key, value, sequences, window, scaling):
    """Returns attention and the log-sum-exp of scores, `(heads, tokens)`. Asserts what the CUDA kernel requires."""
    _check(query, key, value, sequences)
    outputs = []
    lses = []
    for _, _, q, k, v in _sequences(query, key, value, sequences):
        scores = _scores(q, k, window, scaling)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outputs).to(query.dtype), torch.cat(lses, dim=1)


def gradients(gradient, query, key, value, output, lse, sequences, window, scaling):
    """
    Returns the gradients of queries, keys and values. `lse` is the log-sum-exp over all keys, of which `key` may be a
    part. Asserts what the CUDA kernel requires.
    """
    _check(query, key, value, sequences)
    assert gradient.shape == output.shape == query.shape and gradient.dtype == output.dtype == query.dtype
    assert lse.shape == (query.size(1), len(query)) and lse.dtype == _wide(query).dtype and lse.is_contiguous()
    of_query, of_key, of_value = (torch.zeros_like(_wide(tensor)) for tensor in (query, key, value))
    starts = sequences[1].tolist()
    groups = query.size(1) // key.size(1)
    for i, (a, b, q, k, v) in enumerate(_sequences(query, key, value, sequences)):
        d_out, out = (_wide(tensor[a:b]).transpose(0, 1) for tensor in (gradient, output))
        p = (_scores(q, k, window, scaling) - lse[:, a:b, None]).exp()
        d_scores = p * (d_out @ v.mT - (d_out * out).sum(-1, keepdim=True)) * scaling
        of_query[a:b] = (d_scores @ k).transpose(0, 1)
        for total, tensor in ((of_key, d_scores.mT @ q), (of_value, p.mT @ d_out)):
            total[starts[i] : starts[i + 1]] = tensor.unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
    return tuple(tensor.to(query.dtype) for tensor in (of_query, of_key, of_value))


def flash_forward(query, key, value, sequences, is_causal, scaling):
    """Stands in for `kernels.flash_forward`."""
    return attend(query, key, value, sequences, (-1, 0 if is_causal else -1), scaling)


def flash_backward(*arguments):
    """Stands in for `kernels.flash_backward`."""
    *states, sequences, is_causal, scaling = arguments
    return gradients(*states, sequences, (-1, 0 if is_causal else -1), scaling)


def _check(query, key, value, sequences):
    assert all(states.dim() == 3 and states.stride(-1) == 1 for states in (query, key, value))
    assert query.size(-1) == key.size(-1) == value.size(-1) <= 256 and query.size(-1) % 8 == 0
    assert query.size(1) % key.size(1) == 0 and key.shape == value.shape
    for starts, longest, states in zip(sequences[:2], sequences[2:], (query, key), strict=True):
        assert starts.dtype == torch.int32 and starts.is_contiguous() and type(longest) is int
        assert starts[0] == 0 and starts[-1] == len(states) and starts.diff().max() == longest
        assert starts.diff().min() > 0


def _wide(states):
    return states if states.dtype == torch.float64 else states.float()


def _sequences(query, key, value, sequences):
    """Yields each sequence: bounds of its queries, and queries, keys and values `(heads of queries, n, head_dim)`."""
    groups = query.size(1) // key.size(1)
    bounds = (itertools.pairwise(tensor.tolist()) for tensor in sequences[:2])
    for (a, b), (c, d) in zip(*bounds, strict=True):
        key_and_value = (_wide(tensor[c:d]).transpose(0, 1).repeat_interleave(groups, 0) for tensor in (key, value))
        yield a, b, _wide(query[a:b]).transpose(0, 1), *key_and_value


def _scores(query, key, window, scaling):
    n = query.size(1)
    m = key.size(1)
    left, right = (side if side >= 0 else n + m for side in window)
    # Positions of keys relative to queries, `(n, m)`
    distances = torch.arange(m)[None] - torch.arange(m - n, m)[:, None]
    return (query @ key.mT * scaling).masked_fill((distances < -left) | (distances > right), -torch.inf)


class VarlenKernel:
    """
    A stand-in for `torch.nn.attention.varlen.varlen_attn` that asserts what the kernel on CUDA requires.

    `calls` holds the head size, the window and the number of computed pairs of queries and keys of each call.
    """

    def __init__(self):
        self.calls = []

    def __call__(self, query, key, value, *sequences, scale=None, window_size=(-1, -1), enable_gqa=False):
        _check(query, key, value, sequences)
        assert query.size(1) == key.size(1) or enable_gqa, "`enable_gqa` is missing"
        lengths = [starts.diff().tolist() for starts in sequences[:2]]
        assert all(queries <= keys for queries, keys in zip(*lengths, strict=True))
        self.calls.append((query.size(-1), tuple(window_size), _computed(*lengths, window_size)))
        return _Kernel.apply(query, key, value, sequences, scale or query.size(-1) ** -0.5, window_size)


def _computed(queries, keys, window) -> int:
    """Returns the number of pairs of queries and keys in a window, for sequences with these numbers of both."""
    total = 0
    (left, right) = window
    for n, m in zip(queries, keys, strict=True):
        last = torch.arange(m - n, m)  # the key at the position of each query
        first = torch.zeros_like(last) if left < 0 else (last - left).clamp(min=0)
        end = torch.full_like(last, m - 1) if right < 0 else (last + right).clamp(max=m - 1)
        total += int((end - first + 1).sum())
    return total


@contextmanager
def cuda_path(monkeypatch):
    """
    Takes the path of CUDA within the context: variable-length kernels, and scores of positions with labels alone.
    Yields the [`VarlenKernel`].
    """
    kernel = VarlenKernel()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "has_varlen_kernel", lambda query: True)
        patch.setattr(varlen, "varlen_attn", kernel)
        patch.setattr(kernels, "flash_forward", flash_forward)
        patch.setattr(kernels, "flash_backward", flash_backward)
        patch.setattr(head, "_selects_labels", lambda device: True)
        yield kernel


class Counts(TorchDispatchMode):
    """Mode that counts the `operations` that are dispatched within the context."""

    def __init__(self):
        super().__init__()
        self.operations = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations[function._overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


class Attentions(TorchFunctionMode):
    """
    Mode that records the shapes of queries and keys in scaled dot product attention. `calls` lists the shapes of all
    calls. `planned` holds those of calls that cuDNN may take, which makes a plan for each shape.
    """

    def __init__(self):
        super().__init__()
        self.calls = []
        self.planned = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append(tuple(states.shape for states in args[:2]))
            self.planned |= {self.calls[-1]} if torch.backends.cuda.cudnn_sdp_enabled() else set()
        return function(*args, **(kwargs or {}))
