# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Compares every family's samples from vLLM with the model's forward pass, before and after a change of all weights.

`make vllm-families` prints the table of all families, which `docs/vllm.md` sums up.
"""

import os

import pytest
import torch
from helpers.chats import RATE
from helpers.engine_runs import RecordedOmni, make
from helpers.families import FAMILIES
from helpers.omni import save_released
from helpers.trainer_utils import saved, text_rows, with_media

from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import encode_prompt
from trl_multimodal_rft.engines.vllm_in_process import InProcess


pytestmark = pytest.mark.slow
OMNI = {"qwen2_5_omni", "qwen3_omni_moe"}  # vLLM loads released models, not thinkers
OFTEN = ["qwen2_audio", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni", "idefics3", "internvl"]
# vLLM's linear attention takes minutes per token on the CPU
NEVER = ["qwen3_5"]
REST = [name for name in FAMILIES if name not in OFTEN + NEVER] if "ALL_FAMILIES" in os.environ else []
# Table entries of families that vLLM can't sample exactly
KNOWN = {
    # vLLM imports a name that transformers 5.23 removed
    "llava": "failed to be inspected",
    "llava_onevision": "failed to be inspected",
    "paligemma": "PixtralRotaryEmbedding",
    # Experts after a reload, by vLLM's build for CPUs: numbers, no error
    "qwen3_vl_moe": "{'1 image': [",
    "qwen3_omni_moe": "{'1 audio': [",
    # vLLM removed these, or uses another format
    "phi4_multimodal": "not supported anymore",
    "voxtral": "Mistral's own",
    "internvl": "vLLM expands video placeholders differently",
    # Changes of the tiny models: biases that vLLM adds by the config, and missing entries of tokenizers and configs
    "glm4v": "has no place for",
    "gemma3": "failed to be inspected",
    "gemma3n": "KeyError",
    "gemma4": "default_output_length",
    "granite_speech": "Unrecognized feature extractor",
}


def trainer_of(name: str, tmp_path) -> RecordedOmni:
    folder = str(saved(name))
    if name in OMNI:
        released = str(tmp_path / "released")
        save_released(name, folder, released)
        folder = released
    rows = with_media(text_rows(), "prompt", [None] * 8)  # vLLM can't count these media
    options = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 8, "self_check": False}
    engine = {"max_model_len": 1024, "max_num_seqs": 8}
    return make(RecordedOmni, name, rows, tmp_path, {"model": folder}, engine, **options)


def kinds(chat) -> str:
    counts = [block["type"] for block in chat[0]["content"] if block["type"] != "text"]
    return " + ".join(f"{counts.count(kind)} {kind}" for kind in dict.fromkeys(counts)) or "text"


def difference(trainer, chat) -> float:
    """Returns the largest difference of log-probabilities, over two completions of a chat."""
    for block in chat[0]["content"]:
        if block["type"] == "audio":
            block["sampling_rate"] = RATE
    [row] = rows_to_messages([{"prompt": chat}])
    model = trainer._unwrapped(trainer.model)
    processor = trainer.processing_class
    prompt = encode_prompt(row["prompt"], processor, model, keep_decoded=True, use_engine_positions=True)
    trainer.sampler(trainer.model, [prompt] * 2, step=trainer.state.global_step)
    return trainer.differences[-1]


def change_weights(trainer) -> None:
    """Changes every weight, also those that are 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in trainer._unwrapped(trainer.model).parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise * (0.1 * weight.abs().mean() + 0.01))
    trainer.state.global_step += 1


def measured(name: str, tmp_path) -> dict[str, str | list[float]]:
    """Returns, by the prompt's media, the differences before and after a change of all weights, or the failure."""
    try:
        trainer = trainer_of(name, tmp_path)
    except Exception as error:
        return {"": f"can't start: {shown(error)}"}
    results: dict[str, str | list[float]] = {}
    for update in range(2):
        if update:
            change_weights(trainer)
        for chat in FAMILIES[name].prompts():
            place = kinds(chat)
            if isinstance(results.get(place), str):
                continue
            try:
                worst = difference(trainer, chat)
            except Exception as error:
                results[place] = shown(error)
                if isinstance(error, RuntimeError):
                    return results
                continue
            before = results.setdefault(place, [0.0] * 2)
            before[update] = max(before[update], worst)
    return results


def shown(error: BaseException) -> str:
    """Returns the innermost cause in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


@pytest.mark.parametrize("name", [*OFTEN, *REST])
def test_samples_as_the_model_does(name, tmp_path):
    results = measured(name, tmp_path)
    for place, result in results.items():
        cell = result if isinstance(result, str) else f"{result[0]:.0e}, {result[1]:.0e}"
        print(f"| {name} | {place} | {cell} |")
    wrong = {place: result for place, result in results.items() if isinstance(result, str) or max(result) > 1e-4}
    if name in KNOWN:
        assert wrong and KNOWN[name] in str(wrong)
    else:
        assert not wrong


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_omni_moe"])
def test_experts_of_the_checkpoint(name, tmp_path, monkeypatch):
    """As loaded from what is saved; after a reload, vLLM's build for CPUs computes them wrongly."""
    monkeypatch.setattr(InProcess, "_load_weights", lambda self: None)
    trainer = trainer_of(name, tmp_path)
    first, *_ = FAMILIES[name].prompts()
    assert difference(trainer, first) < 1e-5
