# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Training on a GPU: half precision, adapters, 4-bit weights, a resumed run, and peak memory."""

import gc

import pytest
import torch
from helpers.devices import GPU, GPU_OR_CPU, NO_STAND_IN
from helpers.four_bits import LORA, NF4, save_wide, trained
from helpers.resumed_runs import REUSED, Recording, checkpoint, logged, same_weights
from helpers.samplers import Wrapped
from helpers.trainer_utils import (
    AS_SHIPPED,
    InjectedOurs,
    InjectedTRL,
    audio_rows,
    image_rows,
    make_trainer,
    norm,
    relative_difference,
    run,
)
from policy_update import PRESETS, Case, build_dataset, build_model, build_processor
from transformers import Qwen2_5_VLProcessor

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.cli import parsers
from trl_multimodal_rft.cli.options import Parser
from trl_multimodal_rft.extras import estimate
from trl_multimodal_rft.extras.micro_batch import Watch
from trl_multimodal_rft.forward import head


@pytest.mark.parametrize("objects", [pytest.param({}, marks=NO_STAND_IN), {"peft_config": LORA}])
def test_equals_trl(objects, device):
    """Runs in float32, with all weights and with an adapter."""
    options = {"use_cpu": device == "cpu", "learning_rate": 1e-1, "objects": objects}
    theirs = run(InjectedTRL, "qwen2_5_vl", image_rows(), **options)
    ours = run(InjectedOurs, "qwen2_5_vl", image_rows(), **options, self_check=False, packing_shuffle=True)
    assert all(ours.trainer.scored_packed) and ours.trainer.accelerator.device.type == device
    if objects:
        moved = [name for name, value in theirs.update.items() if value.any()]
        assert moved and all("lora_" in name for name in moved)
    assert norm(theirs.update) > 0 and relative_difference(theirs.update, ours.update) <= 1e-4


@NO_STAND_IN
@pytest.mark.filterwarnings("ignore")  # of compilers
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)], indirect=True)
def test_compiled_layers_train_as_others(device, tmp_path):
    """Runs in float32; then compiled layers sample."""
    options = {"use_cpu": False, "learning_rate": 1e-1, "self_check": False, "tf32": False}
    plain = run(InjectedOurs, "qwen2_5_vl", image_rows(), **options)
    ours = run(InjectedOurs, "qwen2_5_vl", image_rows(), **options, torch_compile=True)
    assert sum(hasattr(each, "is_compiled") for each in ours.trainer.model.modules()) == 4
    assert norm(plain.update) > 0 and relative_difference(plain.update, ours.update) <= 1e-5
    sampling = {"use_cpu": False, "max_steps": 1, "tf32": False, "torch_compile": True}
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", image_rows(), tmp_path, **sampling, **AS_SHIPPED)
    trainer.train()
    assert trainer.state.log_history[0]["completions/mean_length"] > 0


@NO_STAND_IN
@pytest.mark.parametrize("device", GPU_OR_CPU, indirect=True)
@pytest.mark.parametrize(("family", "rows"), [("qwen2_audio", audio_rows), ("qwen2_5_vl", image_rows)])
def test_weights_in_4_bits(family, rows, device, tmp_path):
    """An adapter trains as on the same weights without quantization."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    model_class = save_wide(family, tmp_path / "model")
    options = {"use_cpu": device == "cpu"}
    _, update, _ = trained(tmp_path / "model", str(tmp_path / "model"), rows, tmp_path / "four", **options)
    full = model_class.from_pretrained(
        tmp_path / "model", quantization_config=NF4, dtype=torch.float32, device_map={"": device}
    )
    _, expected, _ = trained(tmp_path / "model", full.dequantize(), rows, tmp_path / "full", **options)
    assert norm(update) > 0.01 and relative_difference(expected, update) <= 1e-3


class RecordingGRPO(Recording, MultimodalGRPOTrainer):
    pass


@pytest.fixture
def deterministic():
    """Selects kernels with a fixed order of summation, or raises an error that names one without it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("bf16", [pytest.param(False, marks=NO_STAND_IN), True])
def test_resumed_run_is_the_uninterrupted_run(bf16, device, deterministic, tmp_path):
    """Runs are equal bit for bit, with completions sampled on the device."""
    options = {**REUSED, "bf16": bf16, "use_cpu": device == "cpu"}

    def make(folder, **more):
        return make_trainer(RecordingGRPO, "qwen2_5_vl", image_rows(5), folder, **{**options, **more})

    straight = make(tmp_path / "straight")
    straight.train()
    resumed = make(tmp_path / "resumed", save_strategy="no")
    resumed.train(resume_from_checkpoint=checkpoint(straight, 3))
    assert resumed.trained_on == straight.trained_on[3 * REUSED["gradient_accumulation_steps"] :]
    assert same_weights(straight, resumed) and logged(resumed, set()) == logged(straight, set())


class Longest(Wrapped):
    """Each completion has the maximum number of tokens."""

    def __call__(self, model, prompts, **options):
        self.prompt_tokens = len(prompts[0])
        return torch.randint(50, 200, (len(prompts), self.trainer.max_completion_length)).tolist(), None


@NO_STAND_IN
@pytest.mark.xdist_group("3b")  # a GPU holds one of them at a time
@pytest.mark.parametrize("device", GPU_OR_CPU, indirect=True)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_is_what_is_estimated(checkpointing, device, freed, tmp_path, monkeypatch):
    """
    Compares the peak memory of a step with AdamW: on a GPU a model of 3B in bfloat16, elsewhere a tiny one, where the
    test counts live tensors.
    """
    on_gpu = device == "cuda"
    if not on_gpu:  # otherwise the head's tile of the logits dominates a tiny model's memory
        monkeypatch.setattr(head, "_CHUNK_SIZE", 512)
    if on_gpu:
        preset = "3b"
        group = 8
        completion = 512
        side = 448
    else:
        preset = "tiny"
        group = 4
        completion = 48
        side = 112
    processor = build_processor()
    plain = Qwen2_5_VLProcessor(**{name: getattr(processor, name) for name in processor.get_attributes()})
    plain.chat_template = processor.chat_template
    plain.save_pretrained(tmp_path)
    model = build_model(PRESETS[preset], processor, device, 0)
    model.config.save_pretrained(tmp_path)
    rows = build_dataset(Case(2, group, (side // 28, side // 28)), 2, 0)
    args = MultimodalGRPOConfig(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=group,
        num_generations=group,
        max_completion_length=completion,
        max_steps=2,
        optim="adamw_torch_fused",
        gradient_accumulation_steps=2,  # gradients exist during the second backward pass
        gradient_checkpointing=checkpointing,
        self_check=False,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        report_to="none",
        save_strategy="no",
    )

    def reward(completion_ids, **kwargs):
        return [float(sum(ids) % 17) for ids in completion_ids]

    trainer = MultimodalGRPOTrainer(model, reward, args, rows, processing_class=plain)
    trainer.sampler = Longest(trainer)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
        peak = torch.cuda.max_memory_allocated()
    else:
        with Watch(trainer.model.parameters()) as watch:
            trainer.train()
        peak = watch.peak + sum(parameter.nbytes for parameter in trainer.model.parameters())

    parser = Parser("estimate")
    parsers.estimate(parser)
    parsed = parser.parse_args(
        [
            *("--model_name_or_path", str(tmp_path), "--optim", "adamw_torch_fused"),
            *("--dtype", "bfloat16" if on_gpu else "float32", "--bf16" if on_gpu else "--no-bf16"),
            *("--prompt_tokens", str(trainer.sampler.prompt_tokens), "--completion_tokens", str(completion)),
            *("--images", "1", "--image_size", str(side)),
            *("--per_device_train_batch_size", str(group), "--num_generations", str(group)),
            "--gradient_checkpointing" if checkpointing else "--no-gradient_checkpointing",
        ]
    )
    # Masks and copies of packed rows, which aren't predicted, count in a tiny model
    predicted = estimate.memory(parsed, estimate.measure(parsed))["update"]
    assert peak == pytest.approx(predicted, rel=0.1 if on_gpu else 0.35)


class Allocated(Longest):
    """Records bytes that are allocated on the GPU when the model samples."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.allocated = []

    def __call__(self, model, prompts, **options):
        self.allocated.append(torch.cuda.memory_allocated())
        return super().__call__(model, prompts, **options)


@NO_STAND_IN
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)], indirect=True)
def test_states_leave_the_gpu_while_the_model_samples(device, freed, deterministic, tmp_path):
    """Two averages and a reference of the weights, bit for bit."""
    runs = []
    taken = []
    for offload in (False, True):
        gc.collect()
        start = torch.cuda.memory_allocated()
        options = {"use_cpu": False, "optim": "adamw_torch_fused", "beta": 0.1, "max_steps": 3}
        trainer = make_trainer(
            MultimodalGRPOTrainer,
            "qwen2_5_vl",
            image_rows(),
            tmp_path / str(offload),
            sampler=Allocated,
            offload_during_generation=offload,
            **options,
        )
        trainer.train()
        runs.append(trainer)
        taken.append(trainer.sampler.allocated[-1] - start)
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert taken[0] - taken[1] >= 0.98 * 3 * weights  # torch rounds the size of each tensor up
    assert same_weights(*runs)
