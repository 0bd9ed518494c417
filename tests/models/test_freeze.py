# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Frozen parts stay bit for bit, other parts train as TRL trains them, and each part has its own learning rate."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from families_report.tiny_models import CHANGES, tiny_config, tiny_model
from helpers.families import ALL_FAMILIES
from helpers.resumed_runs import same_weights
from helpers.trainer_utils import (
    CONFIGS,
    PLAIN,
    TRAINERS,
    Gradients,
    InjectedOurs,
    InjectedPPO,
    InjectedTRL,
    assert_equal,
    audio_rows,
    image_rows,
    load,
    make_trainer,
    moved,
    relative_difference,
    run,
    saved,
    text_rows,
)
from peft import LoraConfig, get_peft_model
from transformers.models.auto import modeling_auto

from trl_multimodal_rft import CompactLogCallback, MultimodalGRPOTrainer
from trl_multimodal_rft.cli.check import without_weights
from trl_multimodal_rft.models.parts import PARTS, count_parts, freeze, named_parts


pytestmark = pytest.mark.gate


FAMILY = "qwen2_5_vl"
MAPPINGS = (
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}


def by_part(model) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, part, _ in named_parts(model):
        found.setdefault(part, []).append(name)
    return found


def parts_of_update(result) -> dict[str, dict[str, torch.Tensor]]:
    parts = {name: part for name, part, _ in named_parts(result.trainer.model)}
    updates: dict[str, dict[str, torch.Tensor]] = {part: {} for part in parts.values()}
    for name, value in result.update.items():
        updates[parts[name.removeprefix("base_model.model.")]][name] = value
    return updates


def moves(result) -> set[str]:
    """Returns the parts in which a weight changed by a bit."""
    return {part for part, update in parts_of_update(result).items() if any(map(torch.any, update.values()))}


# Parts of all families

# What is between an encoder and the language model. `None` is for families without such a module
PROJECTORS = {
    **dict.fromkeys(["qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_deep", "qwen3_5_moe"], "model.visual.merger"),
    **dict.fromkeys(["qwen3_vl", "qwen3_vl_moe"], r"model.visual.(merger|deepstack_merger_list)"),
    **dict.fromkeys(["glm4v", "glm4v_moe", "glm46v"], r"model.visual.(merger|downsample)"),
    **dict.fromkeys(["gemma3n", "gemma4"], "model.embed_(vision|audio)"),
    **dict.fromkeys(["idefics2", "idefics3", "smolvlm"], "model.connector"),
    **dict.fromkeys(["granite_speech", "granite_speech_scaled"], "model.projector"),
    **dict.fromkeys(["llava_next_granite", "llava_onevision"], "model.(multi_modal_projector|image_newline)"),
    **dict.fromkeys(["chameleon", "inkling", "apertus1p5"]),
    **dict.fromkeys(["hy_v4_vl", "inkling2_loop"], "model.vision_tower.(patch_)?merger"),
    "qwen2_5_omni": r"(model.)?(visual.merger|audio_tower.proj)",
    "qwen3_omni_moe": r"(model.)?(visual.merger(_list)?|audio_tower.proj[12])",
    "phi4_multimodal": r"model.embed_tokens_extend.(image_embed.(?!img_processor)|audio_embed.(?!encoder)).*",
    "deepseek_vl": "model.aligner",
    "deepseek_vl_hybrid": "model.(aligner|high_res_vision_(alpha|neck|proj))",
    "kimi_k25": "model.mm_projector",
    "llama4": "multi_modal_projector",
    "ovis2": "model.visual_embeddings_table",
    "minicpmv4_6": "model.merger",
    "ernie4_5_vl_moe": "model.resampler_model",
}
UNNAMED = ("chameleon", "inkling")
TOWERS = {"image": "vision_tower", "audio": "audio_tower"}


# Modules and weights between encoders and the language model, in any family; what merges within an encoder isn't
BETWEEN = (
    r"(.*\.)?((patch_|deepstack_)?merger(_list)?|connector|(multi_modal_|mm_)?projector|aligner|.*newline|.*_extensor)"
)


def test_separators_between_patches_are_in_the_projector():
    hunyuan = tiny_model(transformers.HunYuanVLForConditionalGeneration)
    phi = ALL_FAMILIES["phi4_multimodal"].build()[0]
    for model, pattern in ((hunyuan, "vision_tower.patch_merger"), (phi, "img_feature_extensor")):
        freeze(model, ["projector"])
        found = {name: parameter.requires_grad for name, parameter in model.named_parameters() if pattern in name}
        assert found and not any(found.values())
        assert any(parameter.requires_grad for name, part, parameter in named_parts(model) if part == "vision_tower")


@pytest.mark.slow
def test_what_is_between_encoders_and_the_language_model_in_all_of_transformers():
    names = {name for mapping in MAPPINGS for name in mapping.values()} - {"PI0ForConditionalGeneration"}
    found = set()
    for model_class in (getattr(transformers, name, None) for name in sorted(names)):
        try:
            config = model_class.config_class()
            config = tiny_config(config, CHANGES.get(config.model_type, {}))
            model = without_weights(config, model_class)
            parts = {name: part for name, part, _ in named_parts(model)}
        except Exception:  # a family that its default config doesn't build
            continue
        if config.is_encoder_decoder or "image" not in model.input_modalities:
            continue
        found.add(config.model_type)
        between = {name for name in parts if re.fullmatch(rf"{BETWEEN}(\..*)?", name)}
        assert {parts[name] for name in between} <= {"projector"}, (config.model_type, between)
    assert len(found) > 60


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_every_parameter_is_in_one_part(name):
    model, _ = ALL_FAMILIES[name].build()
    found = [(name, parameter) for name, _, parameter in named_parts(model)]
    assert [(name, id(p)) for name, p in found] == [(name, id(p)) for name, p in model.named_parameters()]
    parts = by_part(model)
    projector = PROJECTORS.get(name, "model.multi_modal_projector")
    # Older transformers don't name all kinds
    kinds = {*model.input_modalities, *ALL_FAMILIES[name].modalities, *(["image"] if name in UNNAMED else [])}
    towers = {TOWERS[kind] for kind in kinds if kind in TOWERS}
    assert parts.keys() == {"language_model", *(["projector"] if projector else []), *towers} <= {*PARTS}
    for each in parts.get("projector", ()):
        assert re.fullmatch(rf"{projector}(\..*)?", each)
    assert not [
        each for each in parts["language_model"] if re.search("(vision|audio)(?!_moe)|visual|speech|image", each)
    ]

    # Text reaches nothing else
    ids = torch.arange(20, 30)[None]
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    logits.float().logsumexp(-1).sum().backward()
    reached = {part for _, part, parameter in named_parts(model) if parameter.grad is not None}
    assert "language_model" in reached and not reached & {*TOWERS.values()}


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_what_trains_is_the_complement_of_what_is_frozen(name):
    model, _ = ALL_FAMILIES[name].build()
    parts = by_part(model)
    before = {name for name, p in model.named_parameters() if p.requires_grad}
    for part in [part for part in PARTS if part in parts and len(parts) > 1]:
        model.requires_grad_(True)
        for each, parameter in model.named_parameters():
            parameter.requires_grad_(each in before)
        freeze(model, [part])
        assert {each for each, p in model.named_parameters() if p.requires_grad} == before - {*parts[part]}
    for part in {*PARTS} - {*parts}:
        held = ", ".join(part for part in PARTS if part in parts)
        with pytest.raises(ValueError, match=f"names the part '{part}', which .* lacks; it has {held}."):
            freeze(model, [part])


def test_tied_embeddings_are_of_the_language_model_once():
    model, _ = load("gemma3")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    sizes = count_parts(model)
    assert sum(total for total, _ in sizes.values()) == sum(p.numel() for p in model.parameters())
    freeze(model, ["language_model"])
    assert not model.lm_head.weight.requires_grad


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["audio_tower"],
            r"`freeze` names the part 'audio_tower', which Qwen2_5_VLForConditionalGeneration lacks; it ",
        ),
        (["vision"], r"names 'vision', which is no part .* such as 'model.visual.*Did you mean"),
        (["model.visual.blocks.9"], "matches no name of a parameter of Qwen2_5_VL"),
        (
            [*PARTS[:1], *PARTS[2:]],
            r"`freeze` \(vision_tower, projector, language_model\) leaves nothing of the model",
        ),
        (["*"], r"leaves nothing of the model to train; name fewer"),
    ],
)
def test_what_cannot_be_frozen(keys, message):
    with pytest.raises(ValueError, match=message):
        freeze(load(FAMILY)[0], keys)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("lm_head", r"lm_head\.weight"),
        ("model.visual", r"model\.visual\..*"),
        ("model.visual.blocks.[0-0]", r"model\.visual\.blocks\.0\..*"),
        ("*.merger", r"model\.visual\.merger\..*"),
        ("*.bias", r".*\.bias"),
        ("model.language_model.embed_tokens.weight", r"model\.language_model\.embed_tokens\.weight"),
    ],
)
@pytest.mark.parametrize("adapted", [False, True])
def test_patterns(pattern, expected, adapted):
    """Names are those of the model without adapter."""
    model, _ = load(FAMILY)
    names = {name for name, _ in model.named_parameters()}
    if adapted:
        model = get_peft_model(model, LoraConfig(**LORA))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    freeze(model, [pattern])
    frozen = {name for name, _, parameter in named_parts(model) if not parameter.requires_grad}
    if not adapted:
        assert frozen == {name for name in names if re.fullmatch(expected, name)} != set()
    else:
        assert {re.sub(r"\.base_layer", "", name) for name in frozen} >= {
            name for name in names if re.fullmatch(expected, name)
        }
        assert all(re.fullmatch(expected, name.replace(".base_layer", "")) for name in frozen)


# Updates


def frozen_by_hand(keys, family=FAMILY):
    """Returns a policy, moved off its reference, in which the modules of parts are frozen without this package."""
    objects = moved(family)
    model = objects["model"].model
    modules = {"language_model": [model.language_model, objects["model"].lm_head]}
    if family == FAMILY:
        modules |= {
            "vision_tower": [model.visual.patch_embed, model.visual.blocks],
            "projector": [model.visual.merger],
        }
    else:
        modules |= {"audio_tower": [model.audio_tower], "projector": [model.multi_modal_projector]}
    for module in [module for key in keys for module in modules[key]]:
        module.requires_grad_(False)
    return objects


@pytest.mark.parametrize("keys", [["vision_tower"], ["projector", "language_model"], ["vision_tower", "projector"]])
def test_updates_are_those_of_trl_with_weights_frozen_by_hand(keys):
    options = {"beta": 0.1, "max_grad_norm": 0.5, "optim": "adamw_torch", "adam_epsilon": 1e-3, "weight_decay": 0.1}
    theirs = run(InjectedTRL, FAMILY, image_rows(), objects=frozen_by_hand(keys), **options)
    ours = run(InjectedOurs, FAMILY, image_rows(), objects=moved(FAMILY), freeze=keys, **options)
    assert_equal(theirs, ours)
    assert moves(ours) == {"vision_tower", "projector", "language_model"} - {*keys}


@pytest.mark.parametrize(
    "options",
    [
        {"freeze": "audio_tower"},
        {"freeze": "audio_tower,projector", "gradient_checkpointing": True},
        {
            "freeze": ["language_model"],
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
    ],
)
def test_frozen_parts_with_sound(options):
    result = run(InjectedOurs, "qwen2_audio", audio_rows(), **options)
    keys = options["freeze"] if isinstance(options["freeze"], list) else options["freeze"].split(",")
    assert moves(result) == {"audio_tower", "projector", "language_model"} - {*keys}
    by_hand = frozen_by_hand(keys, "qwen2_audio")
    by_hand["model"].load_state_dict(load("qwen2_audio")[0].state_dict())
    expected = run(InjectedOurs, "qwen2_audio", audio_rows(), objects=by_hand)
    assert relative_difference(expected.update, result.update) < 1e-5


def test_reentrant_checkpointing_trains_what_follows_frozen_embeddings():
    patterns = ["model.audio_tower.conv*", "*.embed_positions", "*.embed_tokens", "projector"]
    options = {"freeze": patterns, "gradient_checkpointing": True}
    plain, reentrant = (
        run(InjectedOurs, "qwen2_audio", audio_rows(), **options, gradient_checkpointing_kwargs={"use_reentrant": r})
        for r in (False, True)
    )
    assert moves(plain) == {"audio_tower", "language_model"}
    assert relative_difference(plain.update, reentrant.update) < 1e-5


@pytest.mark.parametrize("packing", ["prefix", "padded"])
def test_text_alone_while_the_language_model_is_frozen(packing, tmp_path):
    """Nothing is trained by it, and it doesn't change what the images of other micro-batches train."""
    pictures = image_rows()
    mixed = [{**row, "image": None} if i % 2 else row for i, row in enumerate(pictures)]
    options = {"freeze": "language_model", "packing": packing, "gradient_accumulation_steps": 2}
    options |= {"per_device_train_batch_size": 4, "max_steps": 1}
    text = run(InjectedOurs, FAMILY, text_rows(), **options)
    assert moves(text) == set()
    both = run(InjectedOurs, FAMILY, Dataset.from_list(mixed), **options)
    assert moves(both) == {"vision_tower", "projector"}


@pytest.mark.parametrize("frozen_by", [None, "option", "hand"])
def test_running_statistics_of_a_frozen_tower_stay(frozen_by, tmp_path):
    """Granite Speech's encoder has batch norms. It is frozen by the option, or after the trainer's construction."""
    model, processor = ALL_FAMILIES["granite_speech"].build()
    options = {"disable_dropout": False, "freeze": ["audio_tower"] if frozen_by == "option" else None, "max_steps": 1}
    options["objects"] = {"model": model, "processing_class": processor}
    trainer = make_trainer(InjectedOurs, "granite_speech", audio_rows(), tmp_path, **options)
    if frozen_by == "hand":
        trainer.model.model.encoder.requires_grad_(False)
    before = {name: buffer.clone() for name, buffer in trainer.model.named_buffers() if "running" in name}
    trainer.train()
    after = dict(trainer.model.named_buffers())
    stay = all(torch.equal(value, after[name]) for name, value in before.items())
    assert before and stay == (frozen_by is not None)


def test_adapters_of_encoders_keep_their_dropout(tmp_path):
    adapter = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.3)
    model, processor = load("qwen2_audio")
    objects = {"model": get_peft_model(model, adapter), "processing_class": processor}
    trainer = make_trainer(InjectedOurs, "", audio_rows(), tmp_path, objects=objects, disable_dropout=None)
    layers = [layer for name, layer in trainer.model.named_modules() if name.endswith("lora_dropout.default")]
    assert len(layers) > 2 and {layer.p for layer in layers} == {0.3}


# Learning rates

RATES = {"vision_tower": 0.002, "*.merger": 0.05, "lm_head": 0.03}


def key_of(name: str) -> str | None:
    if "visual.merger" in name:
        return "*.merger"
    return "vision_tower" if "visual" in name else "lm_head" if name == "lm_head.weight" else None


def test_update_of_each_part_is_its_rate_times_the_gradient():
    gradients = Gradients()
    options = {"objects": {"callbacks": [gradients]}, "max_steps": 1, "learning_rates": RATES}
    ours = run(InjectedOurs, FAMILY, image_rows(), **options)
    before = load(FAMILY)[0].state_dict()
    for name, parameter in ours.trainer.model.named_parameters():
        rate = RATES.get(key_of(name), PLAIN["learning_rate"])
        assert torch.equal(parameter, before[name].add(gradients.seen[0][name], alpha=-rate))
    assert ours.history[0]["learning_rate"] == PLAIN["learning_rate"]


def test_schedule_and_weight_decay_of_each_part():
    """A plain loop over the same gradients, with torch's AdamW and the factors of a linear schedule."""
    options = {"optim": "adamw_torch", "adam_epsilon": 1e-3, "weight_decay": 0.1, "lr_scheduler_type": "linear"}
    options |= {"max_steps": 3, "learning_rates": RATES, "freeze": "model.visual.patch_embed"}
    gradients = Gradients()
    ours = run(InjectedOurs, FAMILY, image_rows(), objects={"callbacks": [gradients]}, **options)
    model, _ = load(FAMILY)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    decayed = InjectedTRL.get_decay_parameter_names(None, model)
    for name, parameter in model.named_parameters():
        if "patch_embed" in name:
            continue
        optimizer = torch.optim.AdamW(
            [parameter],
            lr=RATES.get(key_of(name), PLAIN["learning_rate"]),
            eps=1e-3,
            weight_decay=0.1 * (name in decayed),
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (3 - step) / 3)
        for gradient in gradients.seen:
            parameter.grad = gradient[name]
            optimizer.step()
            scheduler.step()
    expected = {name: p.detach() - start[name] for name, p in model.named_parameters()}
    assert relative_difference(expected, ours.update) < 1e-5
    rates = {group["initial_lr"] for group in ours.trainer.optimizer.param_groups}
    assert rates == {*RATES.values(), PLAIN["learning_rate"]}
    assert not any(ours.update["model.visual.patch_embed.proj.weight"].flatten())


def test_patterns_win_over_parts_and_the_first_over_others(tmp_path):
    rates = {"language_model": 0.1, "model.language_model.layers.0": 0.2, "model.language_model.layers": 0.3}
    trainer = make_trainer(InjectedOurs, FAMILY, text_rows(), tmp_path, learning_rates=rates)
    trainer.create_optimizer()
    found = {id(p): group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    for name, part, parameter in named_parts(trainer.model):
        expected = 0.1 if part == "language_model" else PLAIN["learning_rate"]
        if ".layers." in name and part == "language_model":
            expected = 0.2 if ".layers.0." in name else 0.3
        assert found[id(parameter)] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rates": {"audio_tower": 1e-5}}, "`learning_rates` names the part 'audio_tower', which .* lacks"),
        (
            {"learning_rates": {"projector": 1e-5}, "freeze": "projector"},
            "has a rate for 'projector', but no weight is trained",
        ),
        ({"learning_rates": {"model.visual": 1e-5, "vision_tower": 1e-6}}, "has a rate for 'vision_tower', but no"),
        (
            {
                "learning_rates": {"vision_tower": 1e-6},
                "objects": {"peft_config": LoraConfig(target_modules=["q_proj"])},
            },
            "has a rate for 'vision_tower', but no weight is trained",
        ),
    ],
)
def test_rates_without_effect(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_trainer(MultimodalGRPOTrainer, FAMILY, text_rows(), tmp_path, **options)


def test_rates_need_an_optimizer_that_the_trainer_makes(tmp_path):
    model, processor = load(FAMILY)
    own = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    objects = {"model": model, "processing_class": processor, "optimizers": own}
    with pytest.raises(ValueError, match="`learning_rates` are for the trainer's own optimizer; drop them"):
        make_trainer(MultimodalGRPOTrainer, FAMILY, text_rows(), tmp_path, objects=objects, learning_rates=RATES)
    frozen = run(InjectedOurs, FAMILY, image_rows(), objects=objects, freeze="vision_tower")
    assert moves(frozen) == {"projector", "language_model"}


# Options


@pytest.mark.parametrize("kind", CONFIGS)
def test_forms_of_the_options(kind):
    def make(**options):
        return CONFIGS[kind]("unused", use_cpu=True, bf16=False, **options)

    for given in ("vision_tower, projector", ["vision_tower,projector"], ["vision_tower", "projector"]):
        assert make(freeze=given).freeze == ["vision_tower", "projector"]
    assert make(freeze="").freeze is None is make(freeze=[]).freeze
    for given in ('{"vision_tower": 2e-6}', {"vision_tower": 2e-6}, {"vision_tower": "2e-6"}):
        assert make(learning_rates=given).learning_rates == {"vision_tower": 2e-6}
    for wrong in ("2e-6", {"vision_tower": "fast"}, ["vision_tower"]):
        with pytest.raises(ValueError, match="`learning_rates` must be a dictionary of numbers"):
            make(learning_rates=wrong)
    with pytest.raises(ValueError, match=r"`learning_rates\['projector'\]` must be above 0, got 0.0; `freeze` keeps"):
        make(learning_rates={"projector": 0})


# Adapters


def test_adapters_of_a_frozen_part_stay():
    """The reference switches adapters off, after which PEFT makes all of them trainable."""
    objects = {"peft_config": LoraConfig(**LORA)}
    ours = run(InjectedOurs, FAMILY, image_rows(), objects=objects, freeze="vision_tower,projector", beta=0.1)
    assert moves(ours) == {"language_model"}
    layers = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"  # what `all-linear` finds there
    model = ours.trainer.model
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(re.match(layers, name) for name in trained)
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name not in trained)


def test_rates_of_adapters():
    objects = {"peft_config": LoraConfig(**LORA)}
    base = run(InjectedOurs, FAMILY, image_rows(), objects=objects, max_steps=1)
    ours = run(InjectedOurs, FAMILY, image_rows(), objects=objects, max_steps=1, learning_rates={"vision_tower": 0.1})
    for part, update in parts_of_update(ours).items():
        expected = parts_of_update(base)[part]
        factor = 10 if part == "vision_tower" else 1
        for name, value in update.items():
            torch.testing.assert_close(value, factor * expected[name], rtol=1e-3, atol=1e-6)


# Other trainers


@pytest.mark.parametrize("shared_trunk", [False, True])
def test_critic(shared_trunk):
    """A separate critic's backbone is frozen like the policy; its head trains, and both at the critic's rate."""
    options = {"freeze": "vision_tower", "learning_rates": {"projector": 0.05}, "shared_trunk": shared_trunk}
    options |= {"lr_scheduler_type": "linear", "value_learning_rate": 0.02, "value_lr_scheduler_type": "constant"}
    result = run(InjectedPPO, FAMILY, image_rows(), num_ppo_epochs=1, **options)
    model = result.trainer.model
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    tower = r"(critic\.model\.)?model\.visual\.(?!merger).*"
    assert frozen == {name for name, _ in model.named_parameters() if re.fullmatch(tower, name)}
    moved = {name for name, update in result.update.items() if update.any()}
    assert not moved & frozen and "critic.head.weight" in moved if not shared_trunk else "critic.weight" in moved
    rates = {(group["part"], group["initial_lr"]) for group in result.trainer.optimizer.param_groups}
    assert rates == {("policy", 0.01), ("policy", 0.05), ("critic", 0.02)}
    last = {(group["part"], group["initial_lr"]): group["lr"] for group in result.trainer.optimizer.param_groups}
    assert last == {("policy", 0.01): 0.0, ("policy", 0.05): 0.0, ("critic", 0.02): 0.02}
    assert result.history[0]["learning_rate"] == 0.01


def supervised(folder, **options):
    rows = image_rows().map(lambda row: {"completion": [{"role": "assistant", "content": "It is a bird."}]})
    options = {"reward": None, "per_device_train_batch_size": 4, **options}
    return make_trainer(TRAINERS["sft"], FAMILY, rows, folder, objects={"model": str(saved(FAMILY))}, **options)


def test_supervised(tmp_path):
    trainer = supervised(tmp_path, freeze="language_model", learning_rates={"projector": 0.05}, max_steps=1)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    gradients = Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    for name, part, parameter in named_parts(trainer.model):
        if part == "language_model":
            assert torch.equal(parameter, before[name]) and gradients.seen[0][name] is None
        else:
            rate = 0.05 if part == "projector" else PLAIN["learning_rate"]
            torch.testing.assert_close(parameter, before[name] - rate * gradients.seen[0][name])
    # As the model's own loss has it, for weights frozen by hand
    parts = named_parts(trainer.model)
    assert {part for name, part, p in parts if not torch.equal(p, before[name])} == {"vision_tower", "projector"}


# Resuming, and what is shown

RUN = {"freeze": ["vision_tower"], "learning_rates": {"projector": 0.05}, "optim": "adamw_torch", "max_steps": 4}
RUN |= {"lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 2, "adam_epsilon": 1e-3}


@pytest.mark.parametrize("adapted", [False, True])
def test_resumed_run_is_the_same(tmp_path, adapted):
    def make(folder, **options):
        objects = {"peft_config": LoraConfig(**LORA)} if adapted else None
        return make_trainer(InjectedOurs, FAMILY, image_rows(), folder, objects=objects, **{**RUN, **options})

    straight = make(tmp_path / "straight")
    resumed = make(tmp_path / "resumed")
    straight.train()
    folder = tmp_path / "straight" / "checkpoint-2"
    resumed.train(resume_from_checkpoint=str(folder))
    assert same_weights(straight.model, resumed.model)
    trained = [{name for name, p in each.model.named_parameters() if p.requires_grad} for each in (straight, resumed)]
    assert trained[0] == trained[1] and not any("visual.blocks" in name for name in trained[0])
    for name, value in (("freeze", None), ("freeze", ["projector"]), ("learning_rates", {"projector": 0.5})):
        options = {name: value, **({} if value or name == "freeze" else {"learning_rates": None})}
        if value == ["projector"]:
            options["learning_rates"] = None
        with pytest.raises(ValueError, match=rf"checkpoint-2 was saved with `{name}=.*this run has `{name}=.*new run"):
            make(tmp_path / "other", **options).train(resume_from_checkpoint=str(folder))
    for path in Path(folder).glob("trained_parts.json"):
        path.unlink()
    with pytest.raises(ValueError, match="isn't whole"):
        make(tmp_path / "other").train(resume_from_checkpoint=str(folder))


def test_table_is_printed_once(tmp_path, capsys):
    run(InjectedOurs, FAMILY, image_rows(), freeze="vision_tower", learning_rates={"*.merger.mlp": 1e-5}, max_steps=1)
    assert capsys.readouterr().out.count("total") == 1
    trainer = make_trainer(InjectedOurs, FAMILY, text_rows(), tmp_path, max_pixels=7840, video_fps=2.0, **RUN)
    trainer.remove_callback(CompactLogCallback)
    trainer.create_optimizer()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["vision_tower", "58.8", "k", "frozen"] in lines
    assert ["projector", "24.8", "k", "trained", "at", "0.05"] in lines
    assert ["language_model", "110", "k", "trained", "at", "0.01"] in lines
    assert ["total", "193", "k", "134", "k", "trained"] in lines
    trainer.create_model_card()
    card = Path(tmp_path, "README.md").read_text()
    assert "Frozen: `vision_tower`" in card.replace("**", "") and "`projector` 0.05" in card
    assert "`max_pixels=7840`, `video_fps=2.0`" in card
