# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Encoders without trained weights cost no graph and run once per medium; media are encoded and moved once."""

import functools
import pickle
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from helpers.completions import random_completions
from helpers.encoding import build_encoded
from helpers.families import ALL_FAMILIES, ONE_OF_EACH_KIND
from helpers.grpo_runs import FAMILY, TWO
from helpers.marks import by_turns
from helpers.synthetic import build, of
from helpers.trainer_utils import (
    TRAINERS,
    Injected,
    audio_rows,
    clip_rows,
    image_rows,
    largest_difference,
    load,
    norm,
    relative_difference,
    run,
    text_rows,
    video_rows,
)
from peft import LoraConfig, get_peft_model
from torch import nn

from trl_multimodal_rft.checks.targets import with_other_media
from trl_multimodal_rft.encoding import prompt_encoder
from trl_multimodal_rft.encoding import prompts as encoded_prompts
from trl_multimodal_rft.engines import transformers as generation
from trl_multimodal_rft.families import Family, family_of
from trl_multimodal_rft.forward import encoders, logprobs
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.head import add_fused_head
from trl_multimodal_rft.forward.masks import sharing_obstacle
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.models.modes import fix_encoders
from trl_multimodal_rft.models.parts import find_tower, freeze, named_parts
from trl_multimodal_rft.rollout import row_pass


FROZEN = {"freeze": ["vision_tower", "projector"]}
ADAPTER = LoraConfig(r=4, target_modules=r".*language_model.*\.[qv]_proj", init_lora_weights=False)


def switch_off(monkeypatch) -> None:
    """Encoders run as they do in transformers."""
    for module in (logprobs, generation):
        monkeypatch.setattr(module, "encode_once", lambda *args: None)
        monkeypatch.setattr(module, "frozen_features", lambda *args: nullcontext())


def count_forwards(module: nn.Module, seen) -> None:
    """Calls `seen` with each forward's features, its output, and whether it made a graph."""
    forward = module.forward

    @functools.wraps(forward)
    def counting(*args, **kwargs):
        output = forward(*args, **kwargs)
        tensors = [each for each in encoders._tensors(output) if each.is_floating_point()]
        seen(encoders._first_input(args, kwargs), any(each.requires_grad for each in tensors))
        return output

    module.forward = counting


# All families


def of_media(model, prompts):
    """Scores, and their gradients."""
    ids, mask = random_completions(len(prompts), vocab=(50, 100))
    packed = sharing_obstacle(model) is None
    isolate = family_of(model).isolate
    model.zero_grad()
    scores = logprobs.completion_scores(model, model, ScoreRequest(prompts, ids, mask, packed=packed, isolate=isolate))
    scores.logps.sum().backward()
    return scores.logps.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Codes of images, and features within the language model
_WITHOUT_MODULES = ("chameleon", "phi4_multimodal")
# A part of theirs has no entry in `feature_dims`, so it runs in each forward
_NOT_JOINED = ("ovis2", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "llama4", "lfm2_vl")


TOWERS = ["vision_tower", "audio_tower"]


FROZEN_PARTS = [[*TOWERS, "projector"], TOWERS]


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        pytest.param(name, frozen, id=f"{name}-{len(frozen)}", marks=[pytest.mark.slow] * (not is_kind or j > 0))
        for i, name in enumerate(name for name in ALL_FAMILIES if name != "chameleon")
        for is_kind in [name in ONE_OF_EACH_KIND]  # the others have one selection, by turns
        for j, frozen in enumerate(FROZEN_PARTS if is_kind else FROZEN_PARTS[i % 2 :][:1])
    ],
)
def test_features_that_were_kept_change_nothing(name, frozen, monkeypatch):
    model, _, prompts = build_encoded(name)
    assert_kept_features_change_nothing(model, prompts, frozen, monkeypatch, has_modules=name not in _WITHOUT_MODULES)


# Families without processors in the tests, by a modality of theirs
_SYNTHETIC = dict.fromkeys(("moss_transcribe_diarize", "qwen3_asr", "fun_asr_nano"), "audio")
_SYNTHETIC |= dict.fromkeys(
    (
        *("aria", "cohere_compass", "cosmos3_edge", "cosmos3_omni", "deepseek_ocr2", "dots3_note", "fast_vlm"),
        *("glm5_next", "glm_ocr", "got_ocr2", "granite4_vision", "granite_docling", "hunyuan_vl", "inkling2"),
        *("hyperclovax_vision_v2", "janus", "lfm3_vl", "lighton_ocr", "llava_next_video", "minicpm_ocr"),
        *("minicpmv4_7", "minimax_m3_vl", "mistral_large4", "mllama", "molmo2", "muse_glimmer", "muse_spark"),
        *("paddleocr_vl", "qianfan_ocr", "qwen4_exp", "step3p7", "unlimited_ocr", "video_llama_3", "video_llava"),
        "vipllava",
    ),
    "image",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", _SYNTHETIC)
def test_features_of_more_families_that_were_kept_change_nothing(name, monkeypatch):
    model, prompts = build(name, of(_SYNTHETIC[name])[:2])
    if name == "muse_glimmer":  # whose gradients in float32 differ by 1.5e-5 by rounding alone
        model.double()
        for prompt in prompts:
            floats = {key: value.double() for key, value in prompt.media.items() if value.is_floating_point()}
            prompt.media.update(floats)
    assert_kept_features_change_nothing(model, prompts, FROZEN_PARTS[0], monkeypatch)


def assert_kept_features_change_nothing(model, prompts, frozen, monkeypatch, *, has_modules=True):
    name = model.config.model_type
    fix_encoders(model)
    for _, part, parameter in named_parts(model):
        parameter.requires_grad_(part not in frozen)
    add_fused_head(model, outputs=("log_probs",))
    if sharing_obstacle(model) is None:
        install_prefix_attention(model)
    modules = encoders.frozen_modules(model)
    counts = Counter()
    for module in modules:
        count_forwards(module, lambda given, has_graph: counts.update(n=1, graphs=has_graph))
    # Two media of each kind, so that a forward joins features of each kind
    others = [with_other_media(prompt, kind, None) for prompt in prompts for kind in prompt.modalities]
    prompts = [*prompts, *others]
    with monkeypatch.context() as patch:
        switch_off(patch)
        plain, expected = of_media(model, prompts)
    for forward in range(3):
        counts.clear()
        logps, gradients = of_media(model, prompts)
        assert (logps - plain).abs().max() <= 1e-5
        assert gradients.keys() == expected.keys()
        largest = max(gradient.abs().max() for gradient in expected.values())
        assert max((gradients[each] - expected[each]).abs().max() for each in expected) <= 1e-5 * largest
        assert counts["graphs"] == 0 or forward == 0  # where the first shows what is read
    assert bool(modules) == has_modules
    if name not in (*_NOT_JOINED, "gemma3n"):  # which embeds tokens with its projectors
        assert counts["n"] == 0


def test_a_family_without_dimensions_encodes_anew(monkeypatch):
    model, prompts = frozen_model()
    prompts = [prompt for prompt in prompts if {*prompt.modalities} == {"image"}]
    seen = Counter()
    count_forwards(model.model.visual, lambda given, has_graph: seen.update(forwards=1, graphs=has_graph))
    model.enable_input_require_grads()
    logps, gradients = of_media(model, prompts)
    assert seen.pop("forwards") == len(prompts) > 1
    for prompt in prompts:
        prompt.on_device.clear()
    monkeypatch.setattr(encoders, "family_of", lambda model: Family())
    for n_forwards in (1, 2):
        again, same_gradients = of_media(model, prompts)
        assert again.allclose(logps, atol=1e-5) and gradients.keys() == same_gradients.keys()
        assert seen == {"forwards": n_forwards, "graphs": 0}
    assert not any(key[0] is model for prompt in prompts for key in prompt.on_device)


def test_a_module_runs_on_other_inputs_than_those_of_the_prompts():
    model, prompts = frozen_model()
    prompts = [prompt for prompt in prompts if {*prompt.modalities} == {"image"}]
    of_media(model, prompts)
    inputs = encoders.media_inputs(prompts[:1], model, torch.device("cpu"))
    expected = model.model.get_image_features(**inputs).pooler_output
    with encoders.frozen_features(model, prompts):
        found = model.model.get_image_features(**inputs).pooler_output
    assert len(prompts) > 1 and torch.cat([*found]).equal(torch.cat([*expected]))


# Updates

REAL = {"max_completion_length": 6, "learning_rate": 0.03}


class Counting:
    """Counts the media that encoders see, by generation batch, and forwards in updates."""

    def __init__(self, *args, **kwargs):
        self.batches = []
        self.in_update = Counter()
        self.rollouts = []
        self.updates = False
        super().__init__(*args, **kwargs)
        self.roll_out = self._generate_and_score_completions
        self._generate_and_score_completions = self.counting
        self.models = [self._unwrapped(self.model)]
        if getattr(self, "ref_model", None) is not None:
            self.models.append(self._unwrapped(self.ref_model))
        for model in self.models:
            for kind in {"image", "audio"} & {*model.input_modalities}:
                encoder = model.get_submodule(find_tower(model, kind))
                layers = next(each for each in encoder.modules() if isinstance(each, nn.ModuleList))
                count_forwards(layers[0], functools.partial(self.saw, model))

    def saw(self, model, given, has_graph):
        name = "policy" if model is self.models[0] else "reference"
        self.batches[-1][name] += given.numel()
        self.in_update.update(forwards=self.updates, graphs=has_graph)

    def counting(self, inputs):
        self.batches.append(Counter())
        rollout = self.roll_out(inputs)
        self.rollouts.append(rollout)
        return rollout

    def compute_loss(self, *args, **kwargs):
        self.updates = self.model.training
        try:
            return super().compute_loss(*args, **kwargs)
        finally:
            self.updates = False


@functools.cache
def trainer_class(kind: str, *, samples: bool = False):
    bases = (Counting, *([] if samples else [Injected]), TRAINERS[kind])
    return type("Counted", bases, {})


def both(monkeypatch, kind, family, rows, *, samples=False, objects=None, **options):
    """Runs of the plain path and as shipped."""
    results = []
    for plain in (True, False):
        with monkeypatch.context() as patch:
            if plain:
                switch_off(patch)
            given = None if objects is None else objects()
            results.append(run(trainer_class(kind, samples=samples), family, rows, objects=given, **options))
    return results


def assert_same(plain, ours) -> None:
    assert norm(plain.update) > 1e-3
    assert relative_difference(plain.update, ours.update) <= 2e-6
    difference, name = largest_difference(plain.history, ours.history)
    assert difference <= 1e-5, name


@pytest.mark.parametrize(
    ("kind", "family", "rows", "options"),
    [
        ("grpo", "qwen2_audio", audio_rows, {"freeze": ["audio_tower"], "beta": 0.1}),
        ("grpo", FAMILY, video_rows, {"freeze": ["vision_tower"], "beta": 0.1, "sync_ref_model": True}),
        ("grpo", "qwen3_vl", image_rows, {"freeze": ["vision_tower"], "gradient_checkpointing": True}),
        ("grpo", FAMILY, image_rows, {**FROZEN, "loss_type": "gmpo", "num_iterations": 2}),
        ("grpo", FAMILY, image_rows, {**FROZEN, "dynamic_sampling": 4, "replay_buffer_size": 2}),
        ("grpo", FAMILY, text_rows, FROZEN),
        ("rloo", FAMILY, image_rows, {**FROZEN, "beta": 0.1, "num_iterations": 2}),
        ("ppo", FAMILY, image_rows, {**FROZEN, "beta": 0.1}),
        ("ppo", "qwen2_audio", audio_rows, {"freeze": ["audio_tower"], "num_ppo_epochs": 2}),
    ],
)
def test_updates(kind, family, rows, options, monkeypatch):
    plain, ours = both(monkeypatch, kind, family, rows(), **TWO, **options)
    assert_same(plain, ours)
    assert ours.trainer.in_update["graphs"] == 0


def frozen_adapter(family, wrapped, **settings):
    """A model with an adapter that isn't 0 in all its parts."""
    model, processor = load(family)
    torch.manual_seed(0)
    config = LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **settings})
    if not wrapped:
        return {"model": model, "processing_class": processor, "peft_config": config}
    model = get_peft_model(model, config)
    for name, weight in model.named_parameters():
        if "modules_to_save" in name:
            weight.data += 0.1 * torch.randn_like(weight)
    return {"model": model, "processing_class": processor}


SAVED = {"target_modules": ["q_proj"], "modules_to_save": ["merger"]}


ADAPTERS = [
    ("grpo", FAMILY, (False, {}), {"beta": 0.1, "num_iterations": 2}),
    ("grpo", FAMILY, (True, {}), {"beta": 0.1}),
    ("rloo", "qwen2_audio", (False, {}), {"beta": 0.1}),
    ("distillation", FAMILY, (True, {}), {"self_teacher": "base"}),
    ("distillation", FAMILY, (True, SAVED), {"self_teacher": "base"}),
]


@pytest.mark.parametrize(("kind", "family", "objects", "options", "packing"), by_turns(ADAPTERS, ["prefix", "padded"]))
def test_reference_and_teacher_see_without_a_frozen_adapter(kind, family, objects, options, packing, monkeypatch):
    rows = (audio_rows if family == "qwen2_audio" else image_rows)(4)
    tower = "audio_tower" if family == "qwen2_audio" else "vision_tower"
    given = {**TWO, **options, "freeze": [tower, "projector"], "packing": packing}
    if kind == "distillation":
        own = [{"role": "user", "content": "It is red. What is it?"}]
        rows = rows.add_column("teacher_prompt", [own if i % 2 else None for i in range(len(rows))])
        given |= {"reward": None}
    make = functools.partial(frozen_adapter, family, objects[0], **objects[1])
    plain, ours = both(monkeypatch, kind, family, rows, objects=make, **given)
    assert norm(plain.update) > 1e-4 and relative_difference(plain.update, ours.update) <= 1e-5
    difference, name = largest_difference(plain.history, ours.history)
    assert difference <= 1e-5, name


def adapted(checkpointing=True):
    model, processor = load(FAMILY)
    return {"model": model, "processing_class": processor, "peft_config": ADAPTER}


@pytest.mark.parametrize("adapter", [False, True])
def test_an_encoder_sees_each_medium_once_per_generation_batch(adapter, monkeypatch):
    """Sampling, the reference, two iterations over two steps, with gradient checkpointing."""
    options = {**REAL, "beta": 0.1, "num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
    options |= {"per_device_train_batch_size": 4, "max_steps": 4, "gradient_checkpointing": True}
    options |= {} if adapter else FROZEN
    rows = image_rows()
    objects = adapted if adapter else None
    plain, ours = both(monkeypatch, "grpo", FAMILY, rows, samples=True, objects=objects, **options)
    assert_same(plain, ours)
    before, after = (result.trainer for result in (plain, ours))
    assert (before.in_update["forwards"] > 0, after.in_update["forwards"]) == (True, 0)
    assert before.in_update["graphs"] > 0 and after.in_update["graphs"] == 0  # hooks for checkpointing made one
    width = load(FAMILY)[0].config.vision_config.hidden_size
    once = [
        width * sum(prompt.media["pixel_values"].size(0) for prompt in {id(p): p for p in rollout.prompts}.values())
        for rollout in after.rollouts
    ]
    assert len(once) == 2 and [each["policy"] for each in after.batches] == once
    if not adapter:
        assert [each["reference"] for each in after.batches] == once
    # Sampling and each iteration, and the reference that shares the encoder
    assert [each["policy"] for each in before.batches] == [(4 if adapter else 3) * each for each in once]


def test_an_encoder_sees_a_clip_of_several_questions_once(monkeypatch):
    options = {**REAL, **FROZEN, "num_iterations": 2, "per_device_train_batch_size": 16, "shuffle_dataset": False}
    rows = clip_rows()
    plain, ours = both(monkeypatch, "grpo", FAMILY, rows, samples=True, max_steps=4, **options)
    assert_same(plain, ours)
    width = load(FAMILY)[0].config.vision_config.hidden_size
    (rollout,) = {id(each): each for each in ours.trainer.rollouts[1:]}.values()
    clips = {id(prompt.on_device): prompt.media["pixel_values_videos"].size(0) for prompt in rollout.prompts}
    assert len(clips) == 1 and len(set(map(id, rollout.prompts))) == 4
    assert ours.trainer.batches[0]["policy"] == ours.trainer.batches[1]["policy"] == width * sum(clips.values())


# What is kept, and for how long


def test_media_move_to_the_device_once_per_generation_batch(monkeypatch):
    """Also those of an encoder that is trained, for its forwards with gradients."""
    moved = []
    to_device = encoders.to_device
    monkeypatch.setattr(encoders, "to_device", lambda value, device: moved.append(value) or to_device(value, device))
    options = {**REAL, "beta": 0.1, "num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
    options |= {"per_device_train_batch_size": 4, "max_steps": 4}
    trainer = run(trainer_class("grpo", samples=True), FAMILY, image_rows(), **options).trainer
    prompts = {id(prompt): prompt for rollout in trainer.rollouts for prompt in rollout.prompts}.values()
    counts = Counter(map(id, moved))
    assert len(prompts) == 4
    assert {counts[id(value)] for prompt in prompts for value in prompt.media.values()} == {1}


def test_nothing_is_kept_of_used_rollouts():
    options = {**TWO, **FROZEN, "max_steps": 2, "replay_buffer_size": 4, "dynamic_sampling": 4}
    trainer = run(trainer_class("grpo"), FAMILY, image_rows(), **options).trainer
    first, last = trainer.rollouts
    assert all(prompt.on_device for prompt in last.prompts) and not any(prompt.on_device for prompt in first.prompts)
    assert len(trainer._batches.groups.replay) == 4
    kept = [prompt for group in trainer._batches.groups.replay._groups for prompt in group.prompts]
    copies = {id(each): each for each in last.with_copied_prompts(on_device=False).prompts}.values()
    assert len(copies) > 1 and len({id(each.on_device) for each in copies}) == len(copies)
    assert len({id(each.mask_cache) for each in copies}) == len(copies)
    assert not any(prompt.on_device for prompt in kept if prompt not in last.prompts)
    assert not pickle.loads(pickle.dumps(last.prompts[0])).on_device


def frozen_model():
    model, _, prompts = build_encoded(FAMILY)
    freeze(model, ["vision_tower", "projector"])
    install_prefix_attention(model)
    add_fused_head(model, outputs=("log_probs",))
    return model, [prompt for prompt in prompts if "image" in prompt.modalities]


def test_features_are_those_of_the_media_and_of_the_weights():
    model, prompts = frozen_model()
    other = with_other_media(prompts[0], "image", prompts[1])
    logps, _ = of_media(model, prompts[:1])
    assert (of_media(model, [other])[0] - logps).abs().max() > 1e-3
    assert of_media(model, prompts[:1])[0].equal(logps)

    def moved_by(distance):
        with torch.no_grad():
            model.model.visual.merger.mlp[2].weight.add_(distance)
        return (of_media(model, prompts[:1])[0] - logps).abs().max()

    model.model.visual.requires_grad_(True)
    assert moved_by(0.1) > 1e-3  # trained weights are never read from what was kept
    model.model.visual.requires_grad_(False)
    of_media(model, prompts[1:2])
    key = next(key for key in prompts[0].on_device if key[0] is model)
    assert key in prompts[1].on_device


def test_encoders_with_dropout_or_sharded_weights_run_each_time(monkeypatch):
    model, prompts = frozen_model()
    seen = Counter()
    count_forwards(model.model.visual, lambda given, has_graph: seen.update(forwards=1, graphs=has_graph))
    model.enable_input_require_grads()
    with monkeypatch.context() as patch:
        patch.setattr(encoders, "is_sharded", lambda model: True)
        of_media(model, prompts[:1])
        of_media(model, prompts[:1])
    assert seen == {"forwards": 2, "graphs": 0}
    model.model.visual.blocks[0].attn.attention_dropout = 0.1
    of_media(model, prompts[:1])
    of_media(model, prompts[:1])
    assert seen == {"forwards": 4, "graphs": 0}


def test_forwards_without_kept_features_follow_those_with(monkeypatch):
    """As of a trainer on a frozen model that was evaluated before."""
    model, prompts = frozen_model()
    logps, _ = of_media(model, prompts)
    assert len(prompts) > 1
    monkeypatch.setattr("trl_multimodal_rft.forward.encoders.encode_frozen", lambda *args: None)
    for prompt in prompts:
        prompt.on_device.clear()
    assert of_media(model, prompts)[0].allclose(logps, atol=1e-5)


@pytest.mark.parametrize("rows", [image_rows, text_rows])
def test_rows_become_messages_once(rows, monkeypatch):
    placed = Counter()
    rendered = Counter()
    to_messages = prompt_encoder.rows_to_messages

    def counting(rows, *args):
        placed.update(row.row_index for row in rows)
        return to_messages(rows, *args)

    monkeypatch.setattr(prompt_encoder, "rows_to_messages", counting)
    monkeypatch.setattr(row_pass._Part, "rows", lambda part: iter(()))  # which reads all rows, too
    walked = Counter()
    iter_refs = encoded_prompts.iter_refs

    def walking(messages):
        yield from iter_refs(messages)
        walked.update(whole=1)

    monkeypatch.setattr(encoded_prompts, "iter_refs", walking)
    model, processor = load(FAMILY)
    render = processor.apply_chat_template
    processor.apply_chat_template = lambda chat, **options: rendered.update(n=1) or render(chat, **options)
    objects = {"model": model, "processing_class": processor}
    trainer = run(trainer_class("grpo"), FAMILY, rows(), objects=objects, max_steps=2).trainer
    assert trainer.batches and len(placed) == 4 and set(placed.values()) == {1}
    assert walked["whole"] == 4
    assert rendered["n"] == 4 + 3  # three texts tell the marks of the template
