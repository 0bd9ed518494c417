# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Short trainings whose updates, logs, checkpoints and random states must not change.

`golden.json` holds their baseline. An intended change of results rewrites it, and documents the reason:

```bash
python tests/golden/test_golden.py --write [names]
```
"""

import json
import random
import sys
import tempfile
import zlib
from collections import defaultdict
from functools import partial
from pathlib import Path


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import conftest  # noqa: F401

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers.chats import image
from helpers.marks import slow_but
from helpers.tools import call, shows, talking
from helpers.trainer_utils import (
    CONFIGS,
    PLAIN,
    TRAINERS,
    audio_rows,
    image_rows,
    load,
    text_rows,
    video_rows,
    with_media,
)
from peft import LoraConfig

from trl_multimodal_rft.engines.vllm import MultimodalVLLMGeneration


STORED = Path(__file__).with_name("golden.json")
RELATIVE = 1e-5
ABSOLUTE = 1e-6

FAMILY = {
    "text": "qwen2_5_vl",
    "image": "qwen2_5_vl",
    "audio": "qwen2_audio",
    "video": "qwen2_5_omni",
    "mixed": "qwen2_5_omni",
    "tool": "qwen2_5_vl",
    "pointwise": "gemma3",
}
ANSWERS = ["It is a cat.", "There are two of them, I think.", "No", "A bird sings, and then another one answers."]


def mixed_rows() -> Dataset:
    """Returns an image and a sound, a sound, an image, or neither."""
    sounds, images = ([row[kind] for row in ROWS[kind]()] for kind in ("audio", "image"))
    rows = with_media(text_rows(), "audio", [sounds[i] if i % 4 < 2 else None for i in range(8)])
    transform = rows.format["format_kwargs"]["transform"]
    shown = [images[i] if i % 2 == 0 else None for i in range(8)]
    return rows.with_transform(lambda batch: {**transform(batch), "image": [shown[i] for i in batch["index"]]})


ROWS = {
    "text": text_rows,
    "image": image_rows,
    "audio": audio_rows,
    "video": video_rows,
    "mixed": mixed_rows,
    "tool": image_rows,
    "pointwise": image_rows,
}

COMMON = {
    **PLAIN,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.03,
    "save_strategy": "steps",
    "save_steps": 2,
}
ROLLOUT = {"num_generations": 4, "max_completion_length": 8}
PADDED = {"packing": "padded"}
TOOL = {"self_check": False, "learning_rate": 0.3, "max_completion_length": 400, "max_tool_calling_iterations": 2}
ENGINE = {"use_vllm": True, "vllm_mode": "colocate", "self_check": False}
LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}

# Trainer, rows, options
RUNS = {
    "grpo text": ("grpo", "text", {}),
    "grpo text padded": ("grpo", "text", PADDED),
    "grpo audio": ("grpo", "audio", {}),
    "grpo audio padded": ("grpo", "audio", {**PADDED, "media_prefetch": 0}),
    "grpo image": ("grpo", "image", {"log_completions": True}),
    "grpo image padded": ("grpo", "image", {**PADDED, "self_check": False}),
    "grpo image tool": ("grpo", "tool", TOOL),
    "grpo image tool padded": ("grpo", "tool", {**TOOL, **PADDED}),
    "grpo video": ("grpo", "video", {}),
    "grpo mixed": ("grpo", "mixed", {"loss_type": "grpo", "beta": 0.1}),
    "grpo pointwise": ("grpo", "pointwise", {"max_tokens_per_microbatch": 60}),
    "grpo dynamic sampling, replay": (
        "grpo",
        "audio",
        {
            **{"dynamic_sampling": 2, "replay_buffer_size": 4},
            **{"steps_per_generation": 2, "max_steps": 3, "save_steps": 3},
        },
    ),
    "grpo token filter": ("grpo", "image", {"top_entropy_quantile": 0.5, "entropy_coef": 0.1}),
    "grpo token filter of a batch": (
        "grpo",
        "image",
        {"top_entropy_quantile": 0.4, "entropy_source": "current(renormalize=True)", "num_iterations": 2},
    ),
    "grpo kl in reward": (
        "grpo",
        "audio",
        {"advantage_estimator": "reinforce", "beta": 0.1, "kl_target": 0.05, "kl_horizon": 50, "max_steps": 3},
    ),
    "grpo normalize_then_sum": (
        "grpo",
        "image",
        {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5], "scale_rewards": "batch"},
    ),
    "grpo reused": (
        "grpo",
        "image",
        {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 4, "save_steps": 3, "optim": "adamw_torch"},
    ),
    "grpo own loss": ("grpo", "image", {"loss_type": "cpgd", "advantage_estimator": "cpgd", "num_iterations": 2}),
    "grpo sequence level": (
        "grpo",
        "image",
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "num_iterations": 2, "delta": 1.5},
    ),
    "grpo reference, adapter": (
        "grpo",
        "image",
        {"beta": 0.1, "objects": LORA, "gradient_checkpointing": True, "learning_rate": 0.3},
    ),
    "grpo synchronised reference": (
        "grpo",
        "audio",
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 3},
    ),
    "grpo truncated masked": (
        "grpo",
        "image",
        {"mask_truncated_completions": True, "soft_overlong_cache": 4, "scale_rewards": "none"},
    ),
    "grpo evaluation": (
        "grpo",
        "image",
        {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2},
    ),
    "grpo engine": ("grpo", "image", {**ENGINE, "num_iterations": 2}),
    "grpo engine padded": ("grpo", "audio", {**ENGINE, **PADDED, "vllm_importance_sampling_mode": "sequence_mask"}),
    "rloo text": ("rloo", "text", {}),
    "rloo audio": ("rloo", "audio", {"beta": 0.1, "max_steps": 3}),
    "rloo image padded": ("rloo", "image", {**PADDED, "num_iterations": 2, "normalize_advantages": True}),
    "rloo image tool": ("rloo", "tool", {**TOOL, "learning_rate": 0.003}),
    "rloo engine": ("rloo", "image", {**ENGINE, "vllm_importance_sampling_correction": True}),
    "ppo text": ("ppo", "text", {"advantage_estimator": "gae(lam=0.9, gamma=0.95)"}),
    "ppo audio": ("ppo", "audio", {"beta": 0.1, "bootstrap_truncated": True, "ema_decay": 0.9}),
    "ppo image padded": ("ppo", "image", {**PADDED, "value_learning_rate": 0.01, "freezing_actor_steps": 1}),
    "ppo shared trunk, supervised": (
        "ppo",
        "image",
        # Adam divides by the size of a gradient: at 0.03 the second update would show how a CPU rounds
        {"shared_trunk": True, "ptx_coef": 0.5, "optim": "adamw_torch", "learning_rate": 0.001},
    ),
    "ppo engine": ("ppo", "image", ENGINE),
    "ppo group baseline": ("ppo", "image", {"advantage_estimator": "reinforce_baseline", "num_ppo_epochs": 1}),
    "sft text": ("sft", "text", {"packing": True, "max_length": None}),  # which doesn't pack the dataset
    "sft text padded": ("sft", "text", {"packing": False}),
    "sft audio": ("sft", "audio", {"packing": True}),
    "sft audio padded": ("sft", "audio", {"packing": False, "gradient_checkpointing": True}),
    "sft image": ("sft", "image", {"packing": True, "loss_type": "dft"}),
    "sft image padded": ("sft", "image", {"packing": False, "eval_strategy": "steps", "eval_steps": 1}),
}


def length_and_sum(completion_ids, **kwargs) -> list[float]:
    return [len(ids) % 5 + 0.1 * (sum(ids) % 7) for ids in completion_ids]


def last_token(completion_ids, **kwargs) -> list[float | None]:
    """Returns `None` for some completions."""
    return [None if ids[0] % 5 == 0 else float(ids[-2 if len(ids) > 1 else -1] % 3) for ids in completion_ids]


def often_equal(completion_ids, prompts, **kwargs) -> list[float]:
    """Returns the same reward for all completions of every other prompt."""
    numbers = [int(prompt[-1]["content"][-1]["text"].split()[-1]) for prompt in prompts]
    return [
        1.0 if number % 2 else reward for number, reward in zip(numbers, length_and_sum(completion_ids), strict=True)
    ]


# Completions: from the model with forced ends, from a script with tool calls, or from an engine


def ends_early(generate, eos: int, *args, **inputs):
    """`generate` of a model with forced ends."""
    output = generate(*args, **inputs)
    if not isinstance(output, torch.Tensor):  # called by the self-check
        return output
    start = inputs["input_ids"].size(1)
    for row, length in enumerate(torch.randint(1, 12, (len(output),)).tolist()):
        if start + length < output.size(1):
            output[row, start + length :] = eos
    return output


def calls_a_tool(tokenizer, *args, input_ids, **inputs):
    """`generate` of a model that calls a tool in every other first turn, and otherwise answers."""
    end = tokenizer.eos_token_id
    rows = []
    for row, ids in enumerate(input_ids):
        turns = tokenizer.decode(ids).count("<tool_call>")
        answer = tokenizer.decode(torch.randint(60, 260, (3 + row % 3,)).tolist())
        says = call(number=turns) if turns < row % 2 + (row == 5) else answer.encode("ascii", "ignore").decode()
        rows.append([*tokenizer(says)["input_ids"], end])
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[tokenizer.pad_token_id] * (width - len(row))] for row in rows])
    return torch.cat([input_ids, ids], dim=1)


class Engine(MultimodalVLLMGeneration):
    """An engine that invents tokens and log-probabilities."""

    def _init_vllm(self):
        self.n_synced = 0

    def sync_weights(self):
        self.n_synced += 1

    def requests(self, prompts, **kwargs):
        return prompts

    def sample(self, prompts, *args):
        completions = []
        for place, prompt in enumerate(prompts):
            generator = np.random.default_rng([self.n_synced, place, int(prompt.input_ids.sum())])
            n = int(generator.integers(2, 9))
            ids = [*generator.integers(60, 260, n - 1).tolist(), self.processing_class.tokenizer.eos_token_id]
            completions.append((ids, [-float(logp) for logp in generator.uniform(4.5, 6.5, n)]))
        return completions


def supervised(kind: str):
    rows = ROWS[kind]()
    transform = rows.format["format_kwargs"].get("transform") or (lambda batch: batch)
    rows = rows if "index" in rows.column_names else rows.add_column("index", range(len(rows)))

    def answered(batch):
        batch = transform(batch)
        return {**batch, "completion": [[{"role": "assistant", "content": ANSWERS[i % 4]}] for i in batch["index"]]}

    return rows.with_transform(answered)


def make_trainer(name: str, folder: str, monkeypatch):
    trainer, kind, options = RUNS[name]
    options = dict(options)
    trainer_class = TRAINERS[trainer]
    config_class = CONFIGS[trainer]
    objects = dict(options.pop("objects", {}))
    if kind == "tool":
        objects |= talking(FAMILY[kind])
        objects["tools"] = [shows([image(56, 84, 3), {"type": "text", "text": "Here"}], [image(56, 56, 4)])]
        objects["model"].generate = partial(calls_a_tool, objects["processing_class"].tokenizer)
    else:
        objects["model"], objects["processing_class"] = load(FAMILY[kind])
        eos = objects["processing_class"].tokenizer.eos_token_id
        objects["model"].generate = partial(ends_early, objects["model"].generate, eos)
    if options.get("use_vllm"):
        for method in ("_init_vllm", "sync_weights", "requests", "sample"):
            monkeypatch.setattr(MultimodalVLLMGeneration, method, vars(Engine)[method])
    if trainer == "sft":
        objects |= {"train_dataset": supervised(kind), "eval_dataset": supervised(kind).select(range(3))}
        return trainer_class(args=config_class(folder, **{**COMMON, **options}), **objects)
    objects["reward_funcs"] = [length_and_sum]
    if "multi_objective_aggregation" in options:
        objects["reward_funcs"] = [length_and_sum, last_token]
    if "dynamic_sampling" in options:
        objects["reward_funcs"] = [often_equal]
    objects["train_dataset"] = ROWS[kind]()
    if "eval_strategy" in options:
        objects["eval_dataset"] = ROWS[kind](2)
    if "ptx_coef" in options:
        objects["ptx_dataset"] = supervised(kind).select(range(3))
    return trainer_class(args=config_class(folder, **{**COMMON, **ROLLOUT, **options}), **objects)


# The stored results of a run


def projected(update: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Returns the norm of each group of parameters, and its product with a fixed random unit vector."""
    squares = defaultdict(float)
    products = defaultdict(float)
    lengths = defaultdict(float)
    for name, value in update.items():
        parts = [part for part in name.removeprefix("policy.").split(".") if not part.isdigit()]
        group = ".".join(parts[:3])
        generator = torch.Generator().manual_seed(zlib.crc32(name.removeprefix("policy.").encode()))
        direction = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        squares[group] += value.double().square().sum().item()
        products[group] += (value.double() * direction).sum().item()
        lengths[group] += direction.square().sum().item()
    return {group: [squares[group] ** 0.5, products[group] / lengths[group] ** 0.5] for group in squares}


def without_times(entry: dict) -> dict:
    return {key: value for key, value in entry.items() if not any(t in key for t in ("time", "runtime", "per_second"))}


def train(name: str) -> dict:
    """Runs an entry of the table."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        trainer = make_trainer(name, folder, monkeypatch)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        checkpoints = sorted(Path(folder).glob("checkpoint-*"))
        files = [str(path.relative_to(folder)) for root in checkpoints for path in root.rglob("*") if path.is_file()]
    update = {name: p.detach() - before[name] for name, p in trainer.model.named_parameters() if p.requires_grad}
    return {
        "update": projected(update),
        "history": [without_times(entry) for entry in trainer.state.log_history],
        "files": sorted(files),
        "random": [torch.rand(()).item(), float(np.random.rand()), random.random()],
    }


def differences(stored, now, path: str = "", scale: float = 0.0) -> list[str]:
    """Returns the differences of two results. A projection has the tolerance of its norm."""
    if isinstance(stored, dict) and isinstance(now, dict):
        changed = [f"{path} has no {key}" for key in stored.keys() - now.keys()]
        changed += [f"{path} has {key}, which is new" for key in now.keys() - stored.keys()]
        return changed + [
            each for key in stored if key in now for each in differences(stored[key], now[key], f"{path}/{key}")
        ]
    if isinstance(stored, list) and isinstance(now, list):
        if len(stored) != len(now) or isinstance(stored[0], str):
            return [] if stored == now else [f"{path}: {stored} became {now}"]
        norm = abs(stored[0]) if isinstance(stored[0], float) and path.startswith("/update") else 0.0
        return [
            each
            for i, (a, b) in enumerate(zip(stored, now, strict=True))
            for each in differences(a, b, f"{path}[{i}]", norm)
        ]
    if isinstance(stored, float) or isinstance(now, float):
        close = abs(stored - now) <= RELATIVE * max(abs(stored), scale) + ABSOLUTE or (stored != stored and now != now)
        return [] if close else [f"{path}: {stored} became {now}"]
    return [] if stored == now else [f"{path}: {stored} became {now}"]


def stored_runs() -> dict[str, dict]:
    return json.loads(STORED.read_text())


# Whose paths others have, too
SLOW = {name for name in RUNS if name.endswith(("padded", "text"))} - {"grpo text", "ppo image padded"}
SLOW |= {"grpo audio", "grpo pointwise", "grpo sequence level", "rloo image tool", "sft audio", "rloo engine"}
SLOW |= {"grpo normalize_then_sum", "grpo evaluation", "grpo synchronised reference", "grpo engine padded"}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("name", slow_but(RUNS, *(RUNS.keys() - SLOW)))
def test_nothing_moved(name):
    changed = differences(stored_runs()[name], train(name))
    assert not changed, "\n".join(changed)


def test_every_run_makes_another_update():
    updates = [json.dumps(run["update"]) for run in stored_runs().values()]
    assert len(set(updates)) == len(updates) == len(RUNS)


def _write(names: list[str]) -> None:
    runs = stored_runs() if STORED.exists() and names else {}
    for name in names or RUNS:
        runs[name] = train(name)
    lines = [f"{json.dumps(name)}: {json.dumps(runs[name])}" for name in RUNS if name in runs]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    assert sys.argv[1] == "--write", __doc__
    _write(sys.argv[2:])
