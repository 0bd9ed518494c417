# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A folder that lacks weights, or holds others, is refused at every door; what a folder may lack loads."""

import argparse
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers.trainer_utils import TRAINERS, load, make_trainer, saved
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor
from transformers.integrations import deepspeed

from trl_multimodal_rft.cli.arguments import parse
from trl_multimodal_rft.extras import chat, evaluate, filter
from trl_multimodal_rft.models import Critic
from trl_multimodal_rft.models.pretrained import load_frozen, load_trained
from trl_multimodal_rft.models.reward_model import as_reward_model
from trl_multimodal_rft.rewards import RewardModel


FAMILY = "gemma3"  # whose LM head is tied, and so in no folder
WEIGHTS = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
QUESTION, ANSWER = ([{"role": role, "content": "Is it a zebra?"}] for role in ("user", "assistant"))
OTHER = [{**ANSWER[0], "content": "It is a cat."}]
ROWS = Dataset.from_list([{"prompt": QUESTION, "chosen": ANSWER, "rejected": OTHER, "completion": ANSWER}] * 8)

DOORS = ["grpo model", "ppo model", "sft model", "dpo model", "reward model", "distillation teacher_model"]
DOORS += ["grpo reference", "rloo reference", "dpo reference", "ppo value_model", "evaluate", "filter", "chat"]
JUDGES = ["grpo reward_funcs", "reward model", "ppo value_model", "RewardModel"]


def right(completions, **kwargs):
    return [1.0] * len(completions)


def enter(door: str, folder: Path):
    """Loads a folder by a trainer's argument, or as the reference of a whole model, or by a command."""
    name, _, argument = door.partition(" ")
    if name == "RewardModel":
        return RewardModel.from_pretrained(str(folder))
    if name == "chat":
        options = {"base": None, "dtype": "auto", "trust_remote_code": False}
        return chat.load(argparse.Namespace(model_name_or_path=str(folder), **options))
    if name in ("evaluate", "filter"):
        if name == "evaluate":
            script = evaluate
            options = []
        else:
            script = filter
            options = ["--by=accuracy", "--output_dir=kept"]
        ROWS.to_parquet(f"{folder}.parquet")
        options += [f"--model_name_or_path={folder}", f"--dataset_name={folder}.parquet"]
        return script.main(*parse(script.ARGUMENTS, [*options, f"--reward_funcs={__name__}.right"]))
    objects = {"reward_funcs": right} if name in ("grpo", "rloo", "ppo") else {}
    if argument == "reference":
        objects["model"], objects["processing_class"] = load(FAMILY)
        objects["model"].config._name_or_path = str(folder)
    else:
        objects[argument] = str(folder)
    options = {"beta": 0.1} if name in ("grpo", "rloo", "ppo", "dpo") else {}
    return make_trainer(TRAINERS[name], FAMILY, ROWS, "out", reward=None, objects=objects, **options)


@pytest.fixture
def folders(tmp_path) -> dict[str, Path]:
    """A policy and a reward model."""
    for name in ("policy", "judge"):
        shutil.copytree(saved(FAMILY), tmp_path / name)
    as_reward_model(load(FAMILY)[0]).save_pretrained(tmp_path / "judge")
    return {name: tmp_path / name for name in ("policy", "judge")}


def refused(door, folder, match, weights=None, error=ValueError):
    if weights is not None:
        save_file(weights, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(error, match=match):
        enter(door, folder)


@pytest.mark.parametrize("door", DOORS)
def test_a_model_without_some_weights_is_refused(door, folders):
    folder = folders["policy"]
    half = dict([*load_file(folder / WEIGHTS).items()][::2])
    refused(door, folder, r"policy' lacks weights of Gemma3ForC\w+, .* random .\d+: .*, \.\.\..; name a folder", half)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000])
    if "reference" not in door:  # whose folder is the policy's
        refused(door, folder, "can't be loaded: 'model.safetensors' is damaged .* copy it again", error=OSError)


@pytest.mark.parametrize("door", JUDGES)
def test_a_reward_model_without_its_score_or_with_other_weights_is_refused(door, folders):
    folder = folders["judge"]
    kind = "lacks weights of Gemma3ForSequenceC"
    whole = load_file(folder / WEIGHTS)
    score = {"score.weight": whole.pop("score.weight")}
    refused(door, folder, rf"{kind}.*random \(1: score.weight\); name a", whole)
    refused(door, folder, rf"{kind}.*random \(\d\d: ", {f"x.{name}": value for name, value in whole.items()} | score)
    double = {**whole, "score.weight": score["score.weight"].repeat(2, 1)}
    refused(door, folder, r"'score.weight' of shape \[2, \d+\], .* name a model with `num_labels=1`", double)
    (folder / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1")
    refused(door, folder, "'model.safetensors' is damaged", error=OSError)
    if door == "grpo reward_funcs":
        refused(door, folders["policy"], "policy' is a .* writes text and scores nothing; ask it as a judge")


def test_an_adapter_or_an_index_of_shards_without_its_weights_is_refused(tmp_path):
    model, processor = load(FAMILY)
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    processor.save_pretrained(tmp_path / "shards")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / ADAPTER
    index = tmp_path / "shards" / f"{WEIGHTS}.index.json"
    assert load_trained(str(path.parent)) and load_trained(str(index.parent))
    save_file(dict([*load_file(path).items()][1:]), path, {"format": "pt"})
    index.write_text('{"weight_map": ')
    with pytest.raises(ValueError, match="lacks weights of an adapter, .*lora_A"):
        load_trained(str(path.parent))
    with pytest.raises(OSError, match="index.json' is damaged"):
        load_trained(str(index.parent))
    path.unlink()
    with pytest.raises(OSError, match="adapter' can't be loaded: the folder has no adapter_model.safetensors; copy"):
        load_trained(str(path.parent))
    (path.parent / "adapter_config.json").write_text("{")
    with pytest.raises(OSError, match=r"adapter' can't be loaded: 'adapter_config.json' is damaged \(Expecting"):
        load_trained(str(path.parent))


def test_heads_that_are_made_anew_may_be_missing(folders, tmp_path):
    """Those of a critic, whose LM head isn't tied here, and of a new reward model."""
    critic = Critic(load("qwen2_5_vl")[0])
    critic.save_pretrained(tmp_path / "critic")
    loaded = Critic.from_pretrained(tmp_path / "critic", type(critic.model), dtype=torch.float32)
    assert all(map(torch.equal, critic.state_dict().values(), loaded.state_dict().values()))
    assert enter("reward model", folders["policy"]).model.score is not None


@pytest.mark.parametrize("door", ["grpo model", "sft model", "dpo model", "reward model", "evaluate", "RewardModel"])
def test_tokens_without_an_embedding_are_named(door, folders):
    folder = folders["judge" if door == "RewardModel" else "policy"]
    processor = AutoProcessor.from_pretrained(folder)
    processor.tokenizer.add_tokens(["zebra"])
    processor.save_pretrained(folder)
    with pytest.raises(
        ValueError, match=r"(row \d|a prompt) has token ids from \d+ to \d+, and the model has 0 to \d+;"
    ):
        entered = enter(door, folder)
        entered([QUESTION], [ANSWER]) if door == "RewardModel" else entered.train()


def test_frozen_models_are_loaded_whole_under_zero3():
    """ZeRO-3 shards what transformers loads while its config is set."""

    class Frozen(torch.nn.Linear):
        @classmethod
        def from_pretrained(cls, name, trust_remote_code):
            assert not deepspeed.is_deepspeed_zero3_enabled() and not trust_remote_code
            return cls(1, 1)

    config = deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    try:
        model = load_frozen(Frozen, "codec", torch.device("cpu"))
        assert config.is_zero3() and deepspeed.is_deepspeed_zero3_enabled()
    finally:
        deepspeed.unset_hf_deepspeed_config()
    assert not model.training and not model.weight.requires_grad
