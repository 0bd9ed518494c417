# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Options of TRL and of PEFT that act as their names say, or are refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from helpers.families import ALL_FAMILIES
from helpers.trainer_utils import load
from peft import (
    BOFTConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import nn
from transformers import AutoProcessor

import trl_multimodal_rft
from trl_multimodal_rft.models.modes import fix_encoders, has_dropout, turn_off_dropout
from trl_multimodal_rft.models.parts import check_base_is_kept


FAMILY = "qwen2_5_vl"
OPTIONS = {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "max_steps": 1, "logging_steps": 1}
PROMPTS = [{"prompt": f"What is it? {number}", "number": number} for number in range(12)]
PAIRS = [{"prompt": f"What is it? {number}", "chosen": "A cat is here", "rejected": "A dog"} for number in range(4)]
COMPLETIONS = [
    {"prompt": row["prompt"], "completion": row["chosen"], "label": bool(number % 2)}
    for number, row in enumerate(PAIRS)
]
ROWS = {"DPO": PAIRS, "Reward": PAIRS, "KTO": COMPLETIONS, "SFT": COMPLETIONS}
SAMPLING = {"num_generations": 4, "max_completion_length": 4, "per_device_train_batch_size": 4}
PPO = {**SAMPLING, "num_generations": 1, "advantage_estimator": "gae"}


def length(completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]


def make(name: str, model: str, folder: Path, rows: list | None = None, objects: dict | None = None, **options):
    arguments = dict(objects or {})
    if name in ("GRPO", "RLOO", "PPO"):
        arguments.setdefault("reward_funcs", length)
        options = {**(PPO if name == "PPO" else SAMPLING), **options}
    elif name == "Distillation":
        arguments["teacher_model"] = model
        options = {"max_completion_length": 4, "per_device_train_batch_size": 4, **options}
    config = getattr(trl_multimodal_rft, f"Multimodal{name}Config")
    dataset = Dataset.from_list(rows or ROWS.get(name, PROMPTS))
    trainer = getattr(trl_multimodal_rft, f"Multimodal{name}Trainer")
    return trainer(model, args=config(str(folder), **{**OPTIONS, **options}), train_dataset=dataset, **arguments)


@pytest.mark.parametrize(
    "config",
    [
        LoHaConfig(target_modules=["q_proj"], rank_dropout=0.5),
        LoKrConfig(target_modules=["q_proj"], module_dropout=0.5),
        BOFTConfig(target_modules=["q_proj"], boft_block_size=4, boft_dropout=0.5),
        LoraConfig(target_modules=["q_proj"], lora_dropout=0.5),
    ],
    ids=lambda config: type(config).__name__,
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of BOFT's kernels for CUDA
def test_dropout_of_adapters_is_turned_off(config):
    policy = get_peft_model(load(FAMILY)[0], config)
    assert has_dropout(policy)
    turn_off_dropout(policy)
    assert not has_dropout(policy)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(ALL_FAMILIES[FAMILY].save(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def dropping_model(tmp_path_factory) -> str:
    """A model with dropout in attention, which is no module."""
    folder = tmp_path_factory.mktemp("dropping")
    path = Path(ALL_FAMILIES[FAMILY].save(folder), "config.json")
    config = json.loads(path.read_text())
    config["text_config"]["attention_dropout"] = 0.5
    path.write_text(json.dumps(config))
    return str(path.parent)


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "PPO", "Distillation", "DPO", "KTO", "Reward"])
def test_dropout_is_turned_off_whole(name, dropping_model, tmp_path):
    options = {} if name in ("Reward", "Distillation", "DPO", "KTO") else {"beta": 0.1}
    for option in (False, True):
        trainer = make(name, dropping_model, tmp_path, disable_dropout=option, **options)
        parts = [trainer.model, getattr(trainer, "ref_model", None), getattr(trainer, "critic", None)]
        parts = [part for part in parts if part is not None]
        assert [has_dropout(part) for part in parts] == [not option] * len(parts)


def test_a_policy_without_dropout_starts_at_its_reference(dropping_model, tmp_path):
    trainer = make("DPO", dropping_model, tmp_path)  # whose default is True
    trainer.train()
    assert trainer.state.log_history[0]["rewards/chosen"] == 0.0
    trainer = make("GRPO", dropping_model, tmp_path, beta=0.1, disable_dropout=True)
    trainer.train()
    assert abs(trainer.state.log_history[0]["kl"]) < 1e-6


def order(model: str, folder: Path, name: str, **options) -> list[int]:
    numbers = []

    def reward(completion_ids, number, **columns):
        numbers.extend(number)
        return length(completion_ids)

    batch = {"per_device_train_batch_size": 12, "num_generations": 1 if name == "PPO" else 2}
    make(name, model, folder, objects={"reward_funcs": reward}, **batch, **options).train()
    return numbers


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "PPO"])
def test_data_seed_orders_rows(name, model, tmp_path):
    first, other_seed, other_data_seed = (
        order(model, tmp_path, name, seed=seed, data_seed=data_seed) for seed, data_seed in ((3, 7), (4, 7), (3, 8))
    )
    assert first == other_seed != other_data_seed
    assert order(model, tmp_path, name, seed=7) == first


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}@{% endif %}"
    "{{ m.content if m.content is string else m.content[0].text }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: @{% endif %}"
).replace("@", "{% if thinks is defined and not thinks %}<think></think>{% endif %}")


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "PPO", "Distillation"])
def test_prompts_are_sampled_as_rows_ask_or_refused(name, model, tmp_path):
    processor = AutoProcessor.from_pretrained(model)
    processor.chat_template = processor.tokenizer.chat_template = TEMPLATE
    objects = {"processing_class": processor}
    rows = [{"prompt": [{"role": "user", "content": "What is it?"}], "chat_template_kwargs": {"thinks": False}}] * 4
    rows = [{**row, "unread": number} for number, row in enumerate(rows)]
    with pytest.raises(ValueError, match=r"row 0, column 'chat_template_kwargs': .*\{'thinks': False\}"):
        make(name, model, tmp_path, rows, objects).train()
    if name != "Distillation":
        make(name, model, tmp_path, rows, objects, chat_template_kwargs={"thinks": False}).train()
    # The same prompt: of names that the template doesn't read, of its default, in JSON, of a text
    for value in ({"unread_by_the_template": 1, "thinks": None}, {"thinks": True}, '{"thinks": true}', None):
        others = [{**row, "chat_template_kwargs": value} for row in rows]
        make(name, model, tmp_path, others, objects).train()
    others = [{"prompt": "What is it?", "chat_template_kwargs": {"thinks": False}, "unread": n} for n in range(4)]
    make(name, model, tmp_path, others, objects).train()
    for value, problem in (("thinks", "is no JSON"), ("[1]", "is no dictionary")):
        others = [{**row, "chat_template_kwargs": value} for row in rows]
        with pytest.raises(ValueError, match=f"row 0, column 'chat_template_kwargs': .* {problem}"):
            make(name, model, tmp_path, others, objects).train()


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "PPO", "Distillation"])
@pytest.mark.parametrize("option", ["train_sampling_strategy", "neftune_noise_alpha"])
def test_options_that_sampling_lacks_are_refused(name, option, model, tmp_path):
    value = {"train_sampling_strategy": "group_by_length", "neftune_noise_alpha": 5.0}[option]
    with pytest.raises(ValueError, match=f"{option}.* has no effect here"):
        make(name, model, tmp_path, **{option: value})


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "PPO", "Distillation", "DPO", "KTO", "Reward"])
@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_prompt_learning_is_named(name, config, model, tmp_path):
    task_type = "SEQ_CLS" if name == "Reward" else "CAUSAL_LM"
    objects = {"peft_config": config(task_type=task_type, num_virtual_tokens=2)}
    with pytest.raises(ValueError, match=f"{config.__name__} is prompt learning, which .* such as LoRA, or train"):
        make(name, model, tmp_path, objects=objects)


BIASED = {
    "all": LoraConfig(target_modules=["q_proj"], bias="all"),
    "lora_only": LoraConfig(target_modules=["q_proj"], bias="lora_only"),
    "oft_only": OFTConfig(target_modules=["q_proj"], oft_block_size=4, bias="oft_only"),
}


@pytest.mark.parametrize("bias", BIASED)
@pytest.mark.parametrize("name", ["GRPO", "DPO", "KTO"])
def test_biases_of_the_base_are_no_adapter(name, bias, model, tmp_path):
    options = {"beta": 0.05} if name == "GRPO" else {}
    with pytest.raises(ValueError, match=f"`bias='{bias}'` trains biases of the base model"):
        make(name, model, tmp_path, objects={"peft_config": BIASED[bias]}, **options)
    if name == "GRPO":  # without a reference, nothing needs the base
        make(name, model, tmp_path, objects={"peft_config": BIASED[bias]}, beta=0.0)


def test_weights_that_are_unfrozen_beside_an_adapter_are_named():
    policy = get_peft_model(load(FAMILY)[0], LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    check_base_is_kept(policy, None, "the reference", "stop")
    layer = next(module for module in policy.modules() if isinstance(module, nn.LayerNorm | nn.Embedding))
    layer.requires_grad_(True)
    with pytest.raises(ValueError, match=r"1 weights of the base model are trainable .* such as '.*weight'"):
        check_base_is_kept(policy, None, "the reference", "stop")
    (name,) = (name for name, module in policy.get_base_model().named_modules() if module is layer)
    check_base_is_kept(policy, None, "the reference", "stop", [name])  # frozen before the first update


def test_adapters_that_are_off_change_nothing():
    policy = get_peft_model(load(FAMILY)[0], LoraConfig(target_modules=["q_proj"]))
    policy.add_adapter("other", LoraConfig(target_modules=["q_proj"], bias="lora_only"))
    policy.set_adapter("default")
    check_base_is_kept(policy, None, "the reference", "stop")
    policy.set_adapter("other")
    with pytest.raises(ValueError, match="`bias='lora_only'`"):
        check_base_is_kept(policy, None, "the reference", "stop")


def test_a_model_without_an_adapter_is_its_own_base():
    model = nn.Linear(2, 2)
    check_base_is_kept(model, SimpleNamespace(bias=True, init_lora_weights=True), "the reference", "stop")
    assert torch.is_tensor(model.weight)


@pytest.mark.parametrize(
    "config",
    [LoHaConfig(target_modules=["qkv"], rank_dropout=0.5), LoraConfig(target_modules=["qkv"], lora_dropout=0.5)],
    ids=lambda config: type(config).__name__,
)
def test_encoders_without_dropout_keep_that_of_their_adapters(config):
    policy = get_peft_model(load(FAMILY)[0], config)
    fix_encoders(policy.get_base_model())
    assert has_dropout(policy)
