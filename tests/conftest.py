# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
import gc
import os
import signal
import sys
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
# Tiny models run fastest on one thread. The other cores stay free for the other workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Otherwise each kind of CPU rounds in its own way, which a few updates at a high learning rate show (`tests/golden`)
os.environ.setdefault("MKL_CBWR", "AVX2")

for folder in ("tests", "tests/tools", "examples", "benchmarks"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # Shells ignore SIGINT in background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # while much is imported that stays

import torch  # noqa: E402
from helpers.files import decoder  # noqa: E402, F401
from helpers.reward_server import serve  # noqa: E402, F401


torch.set_num_threads(1)

pytest_plugins = ["helpers.forked"]


def pytest_collection_finish():
    """Keeps the collector from what was imported: it costs a twelfth of the time otherwise, each time for nothing."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 20)
