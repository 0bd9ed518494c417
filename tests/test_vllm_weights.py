# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Names and values of the weights that vLLM is given, for all families. No engine is needed."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from helpers.families import FAMILIES, SPECIAL
from helpers.trainer_utils import saved
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_by_name import OMNI, whole_omni
from torch import nn

from trl_multimodal_rft.generation.vllm import MultimodalVLLMGeneration
from trl_multimodal_rft.models.pretrained import load_model


FAMILY_NAMES = [*FAMILIES, *SPECIAL]


class WithoutEngine(MultimodalVLLMGeneration):
    def _init_vllm(self):
        pass


def load(family):
    return type({**FAMILIES, **SPECIAL}[family].build()[0]).from_pretrained(saved(family))


def synced(model) -> dict[str, torch.Tensor]:
    """What a sync gives, each weight once."""
    generation = WithoutEngine(model=model, accelerator=Accelerator(cpu=True), processing_class=None)
    weights = {}
    for name, weight in generation._iter_named_params():
        assert name not in weights
        weights[name] = weight.clone()
    return weights


def assert_stored(weights, folder, buffers=()):
    """All weights of the folder, but for those that no update changes."""
    stored = {name: weight for path in folder.glob("*.safetensors") for name, weight in load_file(path).items()}
    assert weights.keys() <= stored.keys(), weights.keys() - stored.keys()
    left = sum(stored[name].numel() for name in stored.keys() - weights.keys())
    assert left == sum(buffer.numel() for buffer in buffers)
    for name, weight in weights.items():
        assert torch.equal(weight, stored[name]), name


def buffers(model) -> list[torch.Tensor]:
    """What isn't trained, but saved."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [value for name, value in model.state_dict().items() if name not in parameters]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_weights_are_those_of_the_checkpoint(family, tmp_path):
    """As it is loaded from, and as it is saved to."""
    model = load(family)
    weights = synced(model)
    assert_stored(weights, saved(family), buffers(model))
    model.save_pretrained(tmp_path)
    assert_stored(weights, tmp_path, buffers(model))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_merged_weights_are_those_of_the_checkpoint(family, tmp_path):
    model = load(family)
    untrained = buffers(model)
    layers = [name for name, module in model.named_modules() if type(module) is nn.Linear and "lm_head" not in name]
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=layers, init_lora_weights=False))
    before = {name: weight.clone() for name, weight in synced(load(family)).items()}
    weights = synced(peft)
    assert sum(not torch.equal(weight, before[name]) for name, weight in weights.items()) >= 10
    peft.merge_and_unload().save_pretrained(tmp_path)
    assert_stored(weights, tmp_path, untrained)


@pytest.mark.parametrize("family", [OMNI, "qwen3_omni_moe"])
def test_weights_of_a_thinker_are_those_of_the_whole_model(family, tmp_path):
    folder, _ = whole_omni(family)
    weights = synced(load_model(folder, dtype="float32", device_map=None))
    stored = load_file(Path(folder, "model.safetensors"))
    assert weights.keys() == {name for name in stored if name.startswith("thinker.")}
    assert all(torch.equal(weight, stored[name]) for name, weight in weights.items())
