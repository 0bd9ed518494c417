# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A folder that lacks weights, or holds others, is refused at every door; what a folder may lack loads."""

import argparse
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers.trainer_utils import TRAINERS, load, make_trainer, saved, text_rows
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from trl_multimodal_rft.cli import chat
from trl_multimodal_rft.models import Critic
from trl_multimodal_rft.models.pretrained import load_trained
from trl_multimodal_rft.models.reward_model import as_reward_model
from trl_multimodal_rft.rewards import RewardModel
from trl_multimodal_rft.scripts import evaluate, filter
from trl_multimodal_rft.scripts.arguments import parse


FAMILY = "gemma3"  # whose LM head is tied
WEIGHTS, ADAPTER, PT = "model.safetensors", "adapter_model.safetensors", {"format": "pt"}
TALK = [[{"role": role, "content": "Is it?"}] for role in ("user", "assistant", "assistant")]
PAIRS = Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), TALK, strict=True))] * 4)


def change(folder, keep, path=WEIGHTS) -> str:
    """Keeps some weights in a folder."""
    weights = enumerate(load_file(Path(folder, path)).items())
    save_file({name: value for i, (name, value) in weights if keep(i, name)}, Path(folder, path), PT)
    return str(folder)


@pytest.fixture
def policy(tmp_path) -> str:
    shutil.copytree(saved(FAMILY), tmp_path / "policy")
    return str(tmp_path / "policy")


@pytest.fixture
def judge(policy, tmp_path) -> str:
    """A reward model."""
    shutil.copytree(policy, tmp_path / "judge")
    as_reward_model(load(FAMILY)[0]).save_pretrained(tmp_path / "judge")
    return str(tmp_path / "judge")


def right(completions, **kwargs):
    return [1.0] * len(completions)


DOORS = ["grpo model", "ppo model", "sft model", "dpo model", "reward model", "distillation teacher_model"]
DOORS += ["grpo reference", "rloo reference", "dpo reference", "ppo value_model", "evaluate", "filter", "chat"]
JUDGES = ["grpo reward_funcs", "reward model", "ppo value_model", "RewardModel"]


def enter(door: str, folder: str):
    """Loads a folder by a trainer's argument, or as the reference of a whole model, or by a command."""
    name, _, argument = door.partition(" ")
    if name == "RewardModel":
        return RewardModel.from_pretrained(folder)
    if name == "chat":
        options = {"base": None, "dtype": "auto", "trust_remote_code": False}
        return chat.load(argparse.Namespace(model_name_or_path=folder, **options))
    if name in ("evaluate", "filter"):
        script, options = (evaluate, []) if name == "evaluate" else (filter, ["--by=accuracy", "--output_dir=kept"])
        text_rows(4).to_parquet(Path(folder).with_suffix(".parquet"))
        options += [f"--model_name_or_path={folder}", f"--dataset_name={folder}.parquet"]
        return script.main(*parse(script.ARGUMENTS, [*options, "--reward_funcs=test_missing_weights.right"]))
    objects = {"reward_funcs": right} if name in ("grpo", "rloo", "ppo") else {}
    if argument == "reference":
        objects["model"], objects["processing_class"] = load(FAMILY)
        objects["model"].config._name_or_path = folder
    else:
        objects[argument] = folder
    options = {"beta": 0.1} if name in ("grpo", "rloo", "ppo", "dpo") else {}
    rows = PAIRS if name in ("dpo", "reward") else text_rows()
    return make_trainer(TRAINERS[name], FAMILY, rows, "out", reward=None, objects=objects, **options)


@pytest.mark.parametrize("door", DOORS)
def test_a_model_without_some_weights_is_refused(door, policy):
    change(policy, lambda i, name: i % 2)
    match = r"policy' lacks weights of Gemma3ForC\w+, .* random: '.*' and \d+ more; name a folder"
    with pytest.raises(ValueError, match=match):
        enter(door, policy)


@pytest.mark.parametrize("door", JUDGES)
def test_a_reward_model_without_its_score_or_with_other_weights_is_refused(door, judge, policy):
    whole = load_file(Path(judge, WEIGHTS))
    with pytest.raises(ValueError, match="lacks weights of Gemma3ForSequenceC.*: 'score.weight'; name a folder"):
        enter(door, change(judge, lambda i, name: "score" not in name))
    renamed = {name if "score" in name else f"x.{name}": value for name, value in whole.items()}
    save_file(renamed, Path(judge, WEIGHTS), PT)
    with pytest.raises(ValueError, match=r"lacks weights .* and \d+ more"):
        enter(door, judge)
    save_file({**whole, "score.weight": whole["score.weight"].repeat(2, 1)}, Path(judge, WEIGHTS), PT)
    with pytest.raises(ValueError, match=r"'score.weight' of shape \[2, \d+\], .* name a model with `num_labels=1`"):
        enter(door, judge)
    if door == "grpo reward_funcs":
        with pytest.raises(ValueError, match="policy' lacks weights of Gemma3ForSequenceC.*'score.weight'"):
            enter(door, policy)


@pytest.mark.parametrize("door", [*DOORS, "grpo reward_funcs"])
def test_damaged_weights_are_named(door, policy, judge):
    folder = Path(judge if "reward_funcs" in door else policy)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000])
    with pytest.raises(OSError, match="can't be loaded: 'model.safetensors' is damaged or missing .* copy it again"):
        enter(door, str(folder))


def test_an_adapter_without_some_weights_is_refused(tmp_path):
    get_peft_model(load(FAMILY)[0], LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    assert load_trained(str(tmp_path))
    change(tmp_path, lambda i, name: i, path=ADAPTER)
    with pytest.raises(ValueError, match="The adapter '.*' lacks weights, .*lora_A"):
        load_trained(str(tmp_path))
    (tmp_path / ADAPTER).write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(OSError, match=f"'{ADAPTER}' is damaged or missing"):
        load_trained(str(tmp_path))


def test_a_shard_that_is_missing_or_damaged_is_named(tmp_path):
    model, processor = load(FAMILY)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    processor.save_pretrained(tmp_path)
    assert load_trained(str(tmp_path))
    second = sorted(tmp_path.glob("*.safetensors"))[1]
    second.unlink()
    with pytest.raises(OSError, match=f"'{second.name}' is damaged or missing"):
        load_trained(str(tmp_path))
    (tmp_path / f"{WEIGHTS}.index.json").write_text('{"weight_map": ')
    with pytest.raises(OSError, match=f"'{WEIGHTS}.index.json' is damaged or missing"):
        load_trained(str(tmp_path))


def test_heads_that_are_made_anew_may_be_missing(policy, tmp_path):
    """Those of a critic and of a new reward model; a tied head and buffers are in no folder."""
    model = load("qwen2_5_vl")[0]
    critic = Critic(model)
    critic.save_pretrained(tmp_path / "critic")  # without an LM head that is not tied
    loaded = Critic.from_pretrained(tmp_path / "critic", type(model), dtype=torch.float32)
    assert all(map(torch.equal, critic.state_dict().values(), loaded.state_dict().values()))
    with pytest.raises(ValueError, match="lacks weights"):
        Critic.from_pretrained(change(tmp_path / "critic", lambda i, name: i), type(model))
    assert "lm_head.weight" not in load_file(Path(policy, WEIGHTS))
    assert enter("reward model", policy).model.score is not None
