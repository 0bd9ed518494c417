# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Trains with servers, and writes what each process sampled and moved: `servers_worker.py OUTPUT MODEL RUNS`.
"""

import json
import sys
from pathlib import Path


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "shims")]

import torch  # noqa: E402
import vllm_cpu  # noqa: E402
from helpers.engine_runs import make  # noqa: E402
from omni import load_omni, omni_rows  # noqa: E402
from requests.adapters import HTTPAdapter  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from trl_multimodal_rft import MultimodalGRPOTrainer  # noqa: E402
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate_trainer  # noqa: E402


class Moved(TorchDispatchMode):
    """Counts the bytes of collectives, inputs and outputs."""

    n_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            self.n_bytes += sum(each.nbytes for each in tensors)
        return func(*args, **(kwargs or {}))


class Sent:
    """Counts the bytes of requests and answers."""

    def __init__(self):
        self.n_bytes = 0
        self._send = HTTPAdapter.send

    def __enter__(self):
        def send(adapter, request, **options):
            response = self._send(adapter, request, **options)
            self.n_bytes += len(request.body or b"") + int(response.headers["Content-Length"])
            return response

        HTTPAdapter.send = send
        return self

    def __exit__(self, *error):
        HTTPAdapter.send = self._send


def counted(engine, name: str, counts: dict[str, list[int]]) -> None:
    """Counts the bytes of each call of an engine's method."""
    method = getattr(engine, name)

    def call(*args, **kwargs):
        with Moved() as moved, Sent() as sent:
            result = method(*args, **kwargs)
        counts.setdefault(name, []).append([moved.n_bytes, sent.n_bytes])
        return result

    setattr(engine, name, call)


def run(output: Path, model: Path, options: dict) -> dict:
    n_evaluated = options.pop("n_evaluated", 0)
    rows = omni_rows().select([0, 1, 2, 3] * 2)
    options = {
        "per_device_train_batch_size": 6,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "vllm_importance_sampling_correction": False,  # servers say the same log-probability of all tokens
        "vllm_mode": "server",
        "self_check": False,
        "shuffle_dataset": False,
        **options,
    }
    try:
        trainer = make(MultimodalGRPOTrainer, None, rows, output / "run", load_omni(model), **options)
        engine = trainer.vllm_generation
        counts = {}
        sampled = []
        sample = trainer.sampler

        class Kept(type(sample)):
            def __call__(self, *args, **kwargs):
                ids, logps = super().__call__(*args, **kwargs)
                sampled.append(ids)
                return ids, logps

        trainer.sampler = Kept(sample.engine, sample.profile, sample.explain)
        if trainer.in_flight is not None:
            take = trainer.in_flight.take

            def taken(place):
                asked, answers, seconds = take(place)
                sampled.append([ids for answer in answers for ids, _ in answer.completions])
                return asked, answers, seconds

            trainer.in_flight.take = taken
        counted(engine, "generate", counts)
        counted(engine, "sync_weights", counts)
        trainer.train()
        evaluated = None
        if n_evaluated:
            few = rows.select(range(n_evaluated))
            found = evaluate_trainer(trainer, few, args=EvaluationConfig(batch_size=1, max_completion_length=6))
            evaluated = [row["completions"] for row in found.rows]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    steps = [{k: v for k, v in each.items() if "view" in k or "contrast" in k} for each in trainer.state.log_history]
    return {"sampled": sampled, "moved": counts, "evaluated": evaluated, "views": steps}


if __name__ == "__main__":
    vllm_cpu.install()
    output, model = map(Path, sys.argv[1:3])
    for name, options in json.loads(sys.argv[3]).items():
        result = run(output, model, options)
        rank = torch.distributed.get_rank()
        (output / f"{name}-{rank}.json").write_text(json.dumps(result))
