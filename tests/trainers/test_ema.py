# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The average of the weights: its values, its context, and the saved files."""

import tempfile
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from helpers.trainer_utils import Injected, audio_rows, image_rows, load, make_trainer
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoProcessor

from trl_multimodal_rft import MultimodalPPOTrainer
from trl_multimodal_rft.trainers.base.ema import MovingAverage


DECAY = 0.8
OPTIONS = {"ema_decay": DECAY, "max_steps": 3, "num_ppo_epochs": 1, "learning_rate": 0.1, "self_check": False}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


class Watched(Injected, MultimodalPPOTrainer):
    """Records the policy's weights before the first update and after each one."""

    def train(self, *args, **kwargs):
        self.seen = [policy_weights(self)]
        return super().train(*args, **kwargs)

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:  # after each step
            self.seen.append(policy_weights(self))
        super().log(logs, *args, **kwargs)


def policy_weights(trainer) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad and not name.startswith("critic.")
    }


def average_of(seen: list[dict], decay: float = DECAY) -> dict[str, torch.Tensor]:
    """Computes the average number by number in float64."""
    average = {name: value.double() for name, value in seen[0].items()}
    for weights in seen[1:]:
        for name, value in weights.items():
            average[name] = decay * average[name] + (1 - decay) * value.double()
    return average


def assert_close(actual: dict, expected: dict, tolerance: float = 1e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert (value - expected[name]).abs().max() <= tolerance, name


@pytest.fixture(scope="module")
def trained():
    """Returns trainers after three updates, by their trained parts."""
    cases = {
        "audio": ("qwen2_audio", audio_rows, {}),
        "shared trunk": ("qwen2_5_vl", image_rows, {"shared_trunk": True}),
        "tied": ("gemma3", image_rows, {}),
        "adapter": ("qwen2_audio", audio_rows, {"objects": {"peft_config": LORA}}),
        "frozen": ("qwen2_audio", audio_rows, {"freezing_actor_steps": 2}),
        "without a critic": ("qwen2_audio", audio_rows, {"advantage_estimator": "rloo"}),
    }
    trainers = {}
    with tempfile.TemporaryDirectory() as folder:

        def train(name: str):
            if name not in trainers:
                family, rows, options = cases[name]
                trainers[name] = make_trainer(Watched, family, rows(), f"{folder}/{name}", **OPTIONS, **options)
                trainers[name].train()
            return trainers[name]

        yield train


# The average


def test_average_of_a_few_numbers():
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    average = MovingAverage({"weight": parameter}, 0.9)
    expected = [1.0, -2.0]
    for step in range(1, 5):
        parameter.data += step
        average.update()
        expected = [0.9 * a + 0.1 * p for a, p in zip(expected, parameter.tolist(), strict=True)]
        assert average._average["weight"].tolist() == pytest.approx(expected, rel=1e-6)


def test_weights_in_bf16_are_averaged_in_float32():
    """Updates of a hundredth of bf16's resolution near 1 accumulate, where an average in bf16 would stay constant."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    average = MovingAverage({"weight": parameter}, 0.999)
    parameter.data += 2**-7
    in_bf16 = torch.ones(3, dtype=torch.bfloat16)
    for _ in range(50):
        average.update()
        in_bf16.lerp_(parameter.data, 1 - 0.999)
    value = average._average["weight"]
    assert value.dtype == torch.float32
    assert value.tolist() == pytest.approx([1 + 2**-7 * (1 - 0.999**50)] * 3, rel=1e-6)
    assert in_bf16.tolist() == [1, 1, 1]
    with average.averaged_weights():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.data, value.bfloat16())
    assert torch.equal(parameter.data, torch.full((3,), 1 + 2**-7, dtype=torch.bfloat16))


def test_average_of_float16_is_saved_and_read_as_it_is(tmp_path):
    parameters = {"a": nn.Parameter(torch.rand(4, 3).half()), "b": nn.Parameter(torch.rand(2, 5).T)}
    average = MovingAverage(parameters, 0.7)
    for parameter in parameters.values():
        parameter.data *= 1.1
    average.update()
    accelerator = Accelerator(cpu=True)
    average.save(tmp_path, accelerator, writes=True)
    other = MovingAverage({name: nn.Parameter(torch.zeros_like(p)) for name, p in parameters.items()}, 0.7)
    other.load(tmp_path, accelerator)
    for name, value in average._average.items():
        assert torch.equal(value, other._average[name]), name
    average.save(tmp_path / "none", accelerator, writes=False)
    with pytest.raises(ValueError, match="none has no average of the weights"):
        other.load(tmp_path / "none", accelerator)


# In the trainer


@pytest.mark.parametrize("name", ["audio", "shared trunk", "tied", "adapter", "frozen", "without a critic"])
def test_average_is_that_of_the_weights_after_each_update(name, trained):
    trainer = trained(name)
    assert len(trainer.seen) == 4
    expected = average_of(trainer.seen)
    assert_close(trainer.ema._average, expected)
    last = trainer.seen[-1]
    assert max((expected[n] - last[n]).abs().max() for n in last) > 1e-3


@pytest.mark.parametrize("name", ["audio", "tied", "adapter"])
def test_weights_are_back_bit_for_bit(name, trained):
    trainer = trained(name)
    before = {n: value.clone() for n, value in trainer.model.state_dict().items()}
    with trainer.ema_weights():
        inside = {n: value.clone() for n, value in trainer.model.state_dict().items()}
        assert all(torch.equal(policy_weights(trainer)[n], value) for n, value in trainer.ema._average.items())
    after = trainer.model.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)
    changed = {n for n in before if not torch.equal(before[n], inside[n])}
    assert changed and not any(n.startswith("critic.") for n in changed)
    with pytest.raises(KeyError, match="out of the context"), trainer.ema_weights():
        raise KeyError("out of the context")
    assert all(torch.equal(before[n], value) for n, value in trainer.model.state_dict().items())


# Saved files


@pytest.mark.parametrize("name", ["audio", "shared trunk", "tied"])
def test_folder_of_the_average_is_a_model(name, trained, tmp_path):
    trainer = trained(name)
    trainer.save_model(str(tmp_path))
    model_class = type(trainer.model)
    average = dict(model_class.from_pretrained(tmp_path / "ema").named_parameters())
    assert average.keys() == trainer.ema._average.keys()
    assert all(torch.equal(value, average[n]) for n, value in trainer.ema._average.items())
    policy = dict(model_class.from_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(value, policy[n]) for n, value in trainer.seen[-1].items())
    AutoProcessor.from_pretrained(tmp_path / "ema")
    assert (tmp_path / "critic").is_dir() and not (tmp_path / "ema" / "critic").exists()
    if name == "tied":
        model = model_class.from_pretrained(tmp_path / "ema")
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_folder_of_the_average_of_an_adapter(trained, tmp_path):
    trainer = trained("adapter")
    trainer.save_model(str(tmp_path))
    model, _ = load("qwen2_audio")
    loaded = PeftModel.from_pretrained(model, tmp_path / "ema", is_trainable=True)
    adapters = {n: p for n, p in loaded.named_parameters() if "lora_" in n}
    assert adapters.keys() == trainer.ema._average.keys()
    assert all(torch.equal(value, adapters[n]) for n, value in trainer.ema._average.items())
    saved = [load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "ema")]
    assert saved[0].keys() == saved[1].keys()
    assert any(not torch.equal(saved[0][n], saved[1][n]) for n in saved[0])


def test_no_average_without_a_decay(tmp_path):
    trainer = make_trainer(Watched, "qwen2_audio", audio_rows(), tmp_path)
    with pytest.raises(ValueError, match="There is no average of the weights; set `ema_decay`"):
        trainer.ema_weights().__enter__()
    trainer.save_model(str(tmp_path / "saved"))
    assert not Path(tmp_path, "saved", "ema").exists()
