# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A folder in the layout of released checkpoints, with files of older versions of transformers, trains by name like the
instances of its model and processor.

`FUZZ_N` sets the number of layouts; `FUZZ_SEED` runs a single one.
"""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from helpers.families import ALL_FAMILIES, encode
from helpers.trainer_utils import (
    audio_rows,
    checkpoint,
    image_rows,
    load,
    make_trainer,
    norm,
    relative_difference,
    saved,
    update_of,
    video_rows,
)
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.models.pretrained import load_trained


SEEDS = [int(os.environ["FUZZ_SEED"])] if "FUZZ_SEED" in os.environ else range(int(os.environ.get("FUZZ_N", 18)))
TRAINERS = [MultimodalGRPOTrainer, MultimodalRLOOTrainer, MultimodalPPOTrainer]
ROWS = {
    "qwen2_5_vl": [image_rows, video_rows],
    "qwen2_5_omni": [image_rows, audio_rows],  # its settings for videos differ from those for images
    "qwen2_audio": [audio_rows],
    "gemma3": [image_rows],
    "llava": [image_rows],
}
OTHER_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
# Recommendations of releases for chats, which training ignores
RECOMMENDED = {"do_sample": True, "temperature": 0.3, "top_k": 5, "top_p": 0.5, "min_p": 0.15}
RECOMMENDED |= {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
CHOICES = {
    "template": ["jinja", "json", "json and tokenizer"],
    "processor": ["joined", "legacy", "legacy, no class"],
    "video": ["own file", "in the image file"],
    "tokens": ["plain", "lists", "slow"],
    "generation": ["ends", "recommended", "missing"],
    "weights": ["one file", "shards"],
    "config": ["new", "old"],
}


def edit(path: Path, **changes) -> None:
    """Changes a JSON file; `None` removes an entry."""
    settings = json.loads(path.read_text()) if path.exists() else {}
    settings = {name: value for name, value in {**settings, **changes}.items() if value is not None}
    path.write_text(json.dumps(settings))


def lay_out(family: str, folder: Path, generator: random.Random) -> dict[str, str]:
    """Writes a family's model and processor in a random layout, and returns the choices."""
    shutil.copytree(checkpoint(family), folder)
    chosen = {name: generator.choice(values) for name, values in CHOICES.items()}
    template = (folder / "chat_template.jinja").read_text()
    if chosen["template"] != "jinja":
        (folder / "chat_template.jinja").unlink()
        edit(folder / "chat_template.json", chat_template=template)
    if chosen["template"] == "json and tokenizer":
        edit(folder / "tokenizer_config.json", chat_template=OTHER_TEMPLATE)
    if chosen["processor"] != "joined":
        split_processor(folder, chosen)
    if chosen["tokens"] != "plain":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        named = {name: tokenizer.special_tokens_map[name] for name in ("eos_token", "pad_token")}
        listed = {str(i): token.__getstate__() for i, token in tokenizer.added_tokens_decoder.items()}
        edit(folder / "added_tokens.json", **tokenizer.get_added_vocab())
        edit(folder / "special_tokens_map.json", **named, additional_special_tokens=[*tokenizer.get_added_vocab()])
        fast = {"tokenizer_class": "PreTrainedTokenizerFast", "backend": None, "added_tokens_decoder": listed}
        edit(folder / "tokenizer_config.json", **fast)
    if chosen["tokens"] == "slow":
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        edit(folder / "vocab.json", **model["vocab"])
        merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    if chosen["generation"] == "recommended":
        edit(folder / "generation_config.json", **RECOMMENDED)
    if chosen["generation"] == "missing":
        (folder / "generation_config.json").unlink()
    if chosen["weights"] == "shards":
        (folder / "model.safetensors").unlink()
        load(family)[0].save_pretrained(folder / "weights", max_shard_size="200KB")
        for path in (folder / "weights").glob("model*.*"):
            path.rename(folder / path.name)
        shutil.rmtree(folder / "weights")
        assert (folder / "model.safetensors.index.json").exists()
    if chosen["config"] == "old":
        edit(folder / "config.json", torch_dtype="float32", dtype=None, transformers_version="4.41.2")
    return chosen


def split_processor(folder: Path, chosen: dict[str, str]) -> None:
    """Writes the processor files of transformers before version 5."""
    settings = json.loads((folder / "processor_config.json").read_text())
    parts = [settings.pop(name, {}) for name in ("feature_extractor", "image_processor")]
    video = settings.pop("video_processor", None)
    named = {} if chosen["processor"] == "legacy, no class" else {"processor_class": settings["processor_class"]}
    edit(folder / "preprocessor_config.json", **parts[0], **parts[1], **named)
    if video is not None and chosen["video"] == "own file":
        edit(folder / "video_preprocessor_config.json", **video)
    (folder / "processor_config.json").unlink()
    if set(settings) > {"processor_class"}:
        edit(folder / "processor_config.json", **settings)


def given(family: str):
    """Returns the baseline: the model from its class, with the folder's weights, and its processor."""
    model = ALL_FAMILIES[family].build()[0]
    model.config._name_or_path = str(saved(family))  # TRL loads a reference from there
    return model, load(family)[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_trains_by_name_as_by_object(seed, tmp_path):
    generator = random.Random(seed)
    family = generator.choice([*ROWS])
    trainer_class = generator.choice(TRAINERS)
    rows = generator.choice(ROWS[family])(4)
    chosen = lay_out(family, tmp_path / "released", generator)
    (model, processor) = given(family)
    released = str(tmp_path / "released")
    by_name = {"model": released}
    by_object = {"model": model, "processing_class": processor}
    if trainer_class is MultimodalPPOTrainer and generator.random() < 0.5:
        by_name["value_model"] = released
        by_object["value_model"] = given(family)[0]
    options = {"max_steps": 1, "beta": generator.choice([0.0, 0.1]), "self_check": False, "learning_rate": 0.1}
    try:
        moved, expected = (
            update_of(make_trainer(trainer_class, family, rows, tmp_path, objects=objects, **options))
            for objects in (by_name, by_object)
        )
        assert norm(expected) > 0.01
        assert relative_difference(expected, moved) <= 1e-6
    except Exception as error:
        error.add_note(f"{trainer_class.__name__}, {family}, {rows.column_names}: {chosen}")
        again = f"FUZZ_SEED={seed} .venv/bin/python -m pytest tests/models/test_released_layouts.py -m slow -k trains"
        error.add_note(f"again: {again}")
        raise


@pytest.mark.slow
@pytest.mark.parametrize("family", ROWS)
def test_an_adapter_of_a_released_folder(family, tmp_path):
    """The adapter loads onto the model by name, with or without the processor."""
    generator = random.Random(family)
    chosen = lay_out(family, tmp_path / "released", generator)
    model, processor = given(family)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.eval().save_pretrained(tmp_path / "adapter")
    edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(tmp_path / "released"))
    if generator.random() < 0.5:
        processor.save_pretrained(tmp_path / "adapter")
    again, own = load_trained(str(tmp_path / "adapter"), dtype="float32")
    chat = ALL_FAMILIES[family].prompts()[0]
    expected = adapted(**encode(processor, chat)).logits
    assert torch.equal(again(**encode(own, chat)).logits, expected), chosen
    with adapted.disable_adapter():
        plain = adapted(**encode(processor, chat)).logits
    assert not torch.allclose(plain, expected, atol=1e-3)
