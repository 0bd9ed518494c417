# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What the host of a GPU does in an update, by the log of the stand-in."""

import functools

import pytest
from helpers.devices import GPU, IS_STAND_IN


pytestmark = [*GPU, pytest.mark.skipif(not IS_STAND_IN, reason="needs the log of `shims/fake_cuda.py`")]
# Waits of the forward and of the backward pass
MOST = {"image": (4, 1), "audio": (5, 2)}


@functools.cache
def counted(case, group=2, **sizes):
    """Returns the counts of a step, which several tests read."""
    from gpu_counts import count  # which needs the stand-in

    return count(case, group=group, **sizes)


@pytest.mark.parametrize("case", MOST)
def test_counts_of_an_update(case):
    """
    Neither kernels nor waits depend on the number of completions, and no layer waits. What the host waits for is
    transformers', but for one read of the completions.
    """
    from gpu_counts import per_layer

    base = counted(case)
    larger = counted(case, group=4)
    for each, most in zip(("forward", "backward"), MOST[case], strict=True):
        assert base[each].waits.total() <= most, base[each].waits
        assert base[each].totals[1:] == larger[each].totals[1:]
    assert sum("_packed_batch" in line for line in base["forward"].waits) == 1
    for depth in ("layers", "depth") if case == "image" else ["depth"]:  # their language models have the same layers
        layer = per_layer(base, counted(case, **{depth: 4}))
        assert not any(waits for _, _, waits, _ in layer.values())
        assert layer["forward"][0] <= 95 and layer["backward"][0] <= 175, layer


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by Dynamo, of what it looks at
def test_compiled_layers_dispatch_a_third():
    """A graph counts as one operator."""
    from gpu_counts import per_layer

    plain = per_layer(counted("image"), counted("image", layers=4))
    compiled = per_layer(counted("image", compiled=True), counted("image", layers=4, compiled=True))
    totals = [sum(layer[each][0] for each in ("forward", "backward")) for layer in (plain, compiled)]
    assert 3 * totals[1] <= totals[0], totals


def test_waits_of_encoders_as_transformers_has_them(monkeypatch):
    """Three in each layer, which the counts would show."""
    from gpu_counts import count, per_layer

    for module in ("forward.attention", "trainers.base.preparation"):
        monkeypatch.setattr(f"trl_multimodal_rft.{module}.install_encoder_attention", lambda model: None)
    assert per_layer(count("image", 2), count("image", 2, depth=4))["forward"][2] == 3
