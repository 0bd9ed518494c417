# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""LightRFT's command lines, and the strategy as the object that its scripts ask."""

import ast
import logging
import os
import re
import subprocess
from argparse import ArgumentParser, Namespace
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from helpers.lightrft_options import COMMAND_LINE, CRITIC_FREE, EXAMPLES, SHARED, strategy_of
from helpers.trainer_utils import load, moved, saved
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoProcessor, AutoTokenizer, get_scheduler

from trl_multimodal_rft import MultimodalPPOConfig
from trl_multimodal_rft.lightrft import ActorVL
from trl_multimodal_rft.lightrft.models.critic_vl import CriticVL
from trl_multimodal_rft.lightrft.option_types import TYPES
from trl_multimodal_rft.lightrft.strategy import RULES, get_strategy
from trl_multimodal_rft.lightrft.strategy_object import Strategy
from trl_multimodal_rft.lightrft.utils import add_arguments, ensure_video_input_available


pytestmark = pytest.mark.gate


def check_example(args, name, monkeypatch, caplog):
    """The command line makes a strategy of a launch, with one line about what the launcher decides."""
    n_processes = 1 if "r1_aqa" in name else 8
    monkeypatch.setenv("WORLD_SIZE", str(n_processes))
    args.bf16 = False  # the CPU of the tests has none
    with caplog.at_level(logging.WARNING, "trl_multimodal_rft.lightrft"):
        strategy = get_strategy(args)
    steps = args.train_batch_size // args.micro_train_batch_size // n_processes
    assert (strategy.use_vllm, strategy.gradient_accumulation_steps) == (True, steps)
    assert strategy.args is args and strategy.report_to == (["wandb"] if args.use_wandb else [])
    lines = [record.getMessage() for record in caplog.records if "lightrft" in record.name]
    (launch,) = [line for line in lines if "`accelerate launch` decides" in line]
    assert "`fsdp=True`" in launch and "`zero_stage=3`" in launch
    assert ("vLLM samples" in "".join(lines)) == (args.engine_type == "sglang")
    assert not [line for line in lines if "mixed_mm_data" in line or "print_replay" in line or "flash_attn" in line]


@pytest.mark.parametrize("name", EXAMPLES)
def test_command_lines_of_examples(name, monkeypatch, caplog):
    args = Namespace(**{**COMMAND_LINE, **SHARED, **EXAMPLES[name]})
    if args.advantage_estimator != "gae":
        args.critic_pretrain = None
    check_example(args, name, monkeypatch, caplog)


@pytest.mark.skipif("LIGHTRFT" not in os.environ, reason="the environment variable names a checkout of LightRFT")
@pytest.mark.parametrize("name", EXAMPLES)
def test_scripts_of_a_checkout(name, tmp_path, monkeypatch, caplog):
    """The parsers and shell scripts of a checkout, `LIGHTRFT=folder`, which the command lines above come from."""
    checkout = Path(os.environ["LIGHTRFT"])
    before, _, after = (checkout / "examples" / name).read_text().partition("torchrun")
    # A function in place of the launcher prints its arguments; nothing else of the script may act
    lines = [line for line in before.splitlines() if not line.strip().startswith(("mkdir", "set -x"))]
    command = after.partition("2>&1")[0].rstrip().removesuffix("\\")
    script = "\n".join(["torchrun() { printf '%s\\0' \"$@\"; }", *lines, f"torchrun {command}"])
    result = subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True)
    words = result.stdout.split("\0")[:-1]
    start = next(index for index, word in enumerate(words) if word.endswith(".py"))
    tree = ast.parse((checkout / words[start]).read_text())
    (main,) = [node for node in tree.body if isinstance(node, ast.If)]
    calls = [node for node in main.body if isinstance(node, (ast.Assign, ast.Expr)) and "parser" in ast.unparse(node)]
    own = [node for node in calls if "parse_args" not in ast.unparse(node)]
    source = ast.unparse(ast.Module(own, []))
    namespace = {"add_arguments": add_arguments}
    exec(f"import argparse\nfrom datetime import datetime\n{source}", namespace)
    args = namespace["parser"].parse_args(words[start + 1 :])
    if args.advantage_estimator != "gae":
        args.critic_pretrain = None
    check_example(args, name, monkeypatch, caplog)


def test_shared_options_of_scripts():
    """`add_arguments` has the names and defaults of the command line."""
    parser = ArgumentParser()
    add_arguments(parser)
    args = vars(parser.parse_args([]))
    assert len(args) == 15 and args == {name: COMMAND_LINE[name] for name in args}
    assert parser.parse_args(["--disable_engine_sleep"]).enable_engine_sleep is False
    assert parser.parse_args(["--fsdp", "--engine_tp_size", "4"]).engine_tp_size == 4
    parser.format_help()
    ensure_video_input_available()


# Types, ranges and lines of the log


def test_each_option_has_a_type():
    assert TYPES.keys() == RULES.keys()


FLAGS = [name for name, annotation in TYPES.items() if annotation is bool]


@pytest.mark.parametrize("name", FLAGS)
def test_texts_are_no_switches(name):
    for text in ("False", "none", "no", "True", "off"):
        with pytest.raises(ValueError, match=f"`({name}|{RULES[name].meaning.strip('`')})` must be `True` or `False`"):
            strategy_of(**{name: text})


@pytest.mark.parametrize(
    "options, error",
    [
        ({"lr_warmup_ratio": 2.0}, "`lr_warmup_ratio` must be at least 0 and below 1, got 2.0"),
        ({"lr_warmup_ratio": 1.0}, "`lr_warmup_ratio` must be at least 0 and below 1"),
        ({"lr_warmup_ratio": -0.1}, "`lr_warmup_ratio` must be at least 0"),
        ({"gamma": 1.01}, "`gamma` must be between 0 and 1"),
        ({"lambd": "0.9"}, "`lambd` must be a number, got the text '0.9'"),
        ({"ema_beta": 1.0, "enable_ema": True}, "`ema_beta` must be above 0 and below 1"),
        ({"engine_mem_util": 60}, "`engine_mem_util` must be above 0 and at most 1"),
        ({"high_entropy_token_ratio": 20}, "`high_entropy_token_ratio` must be between 0 and 1"),
        ({"high_entropy_token_ratio": "none"}, "`high_entropy_token_ratio` must be a number"),
        ({"train_batch_size": 8.5}, "`train_batch_size` must be a whole number"),
        ({"rollout_batch_size": "all"}, "`rollout_batch_size` must be a number"),
        ({"eval_steps": -2, "eval_data": "rows"}, "`eval_steps` must be at least -1"),
        ({"zero_stage": "3"}, "`zero_stage` must be a number"),
        ({"actor_learning_rate": -1e-6}, "`actor_learning_rate` must be at least 0"),
        ({"save_steps": "never"}, "`save_steps` must be a number"),
        ({"dynamic_sampling": "False"}, "`dynamic_sampling` must be `True`, `False` or a name, got the text 'False'"),
        ({"freeze_prefix": "true"}, "`freeze_prefix` must be `True`, `False` or a name"),
        ({"use_wandb": "None"}, "`use_wandb` must be `True`, `False` or a name"),
        ({"use_tensorboard": "off"}, "`use_tensorboard` must be `True`, `False` or a name"),
    ],
)
def test_types_and_ranges(options, error):
    with pytest.raises(ValueError, match=error):
        strategy_of(**options)


@pytest.mark.parametrize(
    "options, lines",
    [
        ({}, []),
        ({"zero_stage": 2, "zpg": 1, "sp_size": 1, "engine_type": "vllm", "mixed_mm_data": True}, []),
        ({"fused_linear_logprob": True, "chunk_size": 64, "packing_samples": True, "lambd": 0.5}, []),
        ({"zpg": 8, "meta_init": True, "sp_size": 2}, ["`zpg=8`, `sp_size=2`, `meta_init=True`: .* decides"]),
        ({"grad_accum_dtype": "fp32", "no_shard_vit": True}, ["`grad_accum_dtype='fp32'`, `no_shard_vit=True`: "]),
        ({"engine_type": "sglang"}, ["`engine_type='sglang'`: vLLM samples"]),
        ({"log_dir": "logs", "mark_high_entropy_tokens": True}, ["`log_completions` of `MultimodalPPOTrainer`"]),
        ({"max_ckpt_mem": 100, "ckpt_path_local": "x"}, ["checkpoints are in `save_path`, at most `max_ckpt_num`"]),
        ({"rm_engine_cudagraph": True, "fsdp": True}, ["`fsdp=True`: ", "set `remote_rm_url`"]),
    ],
)
def test_lines_in_the_log(options, lines, caplog):
    """What trains the same is silent, or one line for options of one remedy."""
    with caplog.at_level(logging.WARNING, "trl_multimodal_rft.lightrft"):
        strategy_of(**options)
    found = [record.getMessage() for record in caplog.records if "lightrft" in record.name]
    assert len(found) == len(lines)
    for line, pattern in zip(found, lines, strict=True):
        assert re.search(pattern, line) and "\n" not in line


# The object


def test_a_strategy_is_a_config(tmp_path, capsys):
    args = Namespace(**{**CRITIC_FREE, "save_path": str(tmp_path), "seed": 5})
    strategy = get_strategy(args)
    assert isinstance(strategy, MultimodalPPOConfig) and strategy.config is strategy and strategy.args is args
    assert (strategy.is_rank_0(), strategy.get_rank(), strategy.world_size) == (True, 0, 1)
    strategy.print("a", 1)
    assert capsys.readouterr().out == "a 1\n"
    strategy.report_memory("after loading")
    with strategy.init_model_context(meta_init=True):
        assert torch.empty(1).device.type == "cpu"
    assert strategy.get_ds_train_config(is_actor=True) is strategy.get_ds_eval_config(offload=True) is None
    model = torch.nn.Linear(1, 1)
    assert strategy.prepare(model, is_rlhf=True) is strategy.prepare_model(model, shard_size=8) is model
    assert strategy.prepare(model, (model, None)) == [model, (model, None)]
    assert (
        strategy.offload_model(model) is strategy.setup_inference_engine(args, engine_type="vllm", actor=None) is None
    )
    for method, remedy in ((strategy.save_ckpt, "set `save_steps`"), (strategy.load_ckpt, "set `load_checkpoint`")):
        with pytest.raises(NotImplementedError, match=remedy) as caught:
            method(model, "folder", tag="x")
        assert "\n" not in str(caught.value)
    # Configs are copied, saved and printed
    assert deepcopy(strategy).args.seed == 5 and "_args" not in strategy.to_dict()
    assert Strategy(str(tmp_path)).args == Namespace() and "save_path" not in str(strategy)


def test_loaders_shuffle_by_seed():
    strategy = strategy_of(seed=3)
    arguments = {"pin_memory": True, "collate_fn": list}
    first, again, other = (
        list(each.setup_dataloader(range(10), 3, shuffle=True, **arguments))
        for each in (strategy, strategy, strategy_of(seed=4))
    )
    assert first == again != other and [len(batch) for batch in first] == [3, 3, 3]
    in_order = strategy.setup_dataloader(range(10), 3, True, False, list, drop_last=False)
    assert list(in_order) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    sampler = torch.utils.data.SequentialSampler(range(4))
    assert list(strategy.setup_dataloader(range(4), 2, collate_fn=list, sampler=sampler)) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="`consumed_samples=8` is an argument of `fit`"):
        strategy.setup_dataloader(range(4), 2, consumed_samples=8)


@pytest.mark.parametrize("estimator", ["gae", "rloo"])
def test_optimizers_and_schedules(estimator):
    options = {"actor_learning_rate": 1e-3, "critic_learning_rate": 1e-2, "adam_betas": (0.8, 0.9), "l2": 0.1}
    options |= {"lr_warmup_ratio": 0.25, "freeze_prefix": True, "advantage_estimator": estimator}
    strategy = strategy_of(**options)
    actor = ActorVL(load("qwen2_5_vl")[0], bf16=False)
    critic = CriticVL(load("qwen2_5_vl")[0], bf16=False) if estimator == "gae" else None
    reference = ActorVL(load("qwen2_5_vl")[0], bf16=False)
    sides = strategy.prepare_models_and_optimizers(actor, critic, ["rewards"], reference, strategy.args, 8)
    (own, optimizer, schedule), (own_critic, *critic_side), rewards, initial = sides
    assert own is actor and own_critic is critic and rewards == ["rewards"] and initial is reference
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    trained = {id(weight) for name, weight in actor.model.named_parameters() if "visual" not in name}
    assert held == trained
    (matrices, vectors) = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.AdamW) and matrices["betas"] == (0.8, 0.9)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {weight.ndim for weight in vectors["params"]} == {1} and min(w.ndim for w in matrices["params"]) > 1
    assert (critic_side == [None, None]) == (critic is None)
    pairs = [(1e-3, optimizer, schedule)] + ([(1e-2, *critic_side)] if critic else [])
    for rate, each, scheduler in pairs:
        expected = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
        cosine = get_scheduler("cosine_with_min_lr", expected, 2, 8, scheduler_specific_kwargs={"min_lr": rate / 10})
        for _ in range(8):
            assert_close(scheduler.get_last_lr()[0], cosine.get_last_lr()[0])
            each.step()
            expected.step()
            scheduler.step()
            cosine.step()
        assert_close(scheduler.get_last_lr()[0], rate / 10)


def test_deepspeed_makes_its_own_optimizers():
    strategy = strategy_of()
    strategy.deepspeed_plugin = "a plugin"
    assert strategy.prepare_models_and_optimizers("a", None, [], None, None, 8) == (
        ("a", None, None),
        (None, None, None),
        [],
        None,
    )


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_saved_models(tmp_path, lora_rank):
    """The policy is saved without its critic, with tokenizer and processor; a critic by itself."""
    path = saved("qwen2_5_vl")
    strategy = strategy_of()
    actor = ActorVL(path, bf16=False, lora_rank=lora_rank)
    critic = CriticVL(path, bf16=False)
    with torch.no_grad():
        critic.head.weight.fill_(0.5)
    actor.model.critic = critic  # as the trainer does
    strategy.save_model(actor, AutoTokenizer.from_pretrained(path), str(tmp_path / "actor"))
    strategy.save_model(critic, AutoTokenizer.from_pretrained(path), str(tmp_path / "critic"))
    assert type(AutoProcessor.from_pretrained(tmp_path / "actor")) is type(load("qwen2_5_vl")[1])
    for file in (tmp_path / "actor").glob("*.safetensors"):
        assert not [name for name in load_file(file) if "critic" in name]
    loaded = CriticVL(str(tmp_path / "critic"), bf16=False)
    assert_close(dict(loaded.named_parameters()), dict(critic.named_parameters()))
    if lora_rank == 0:
        again = ActorVL(str(tmp_path / "actor"), bf16=False)
        policy = {name: value for name, value in actor.model.named_parameters() if not name.startswith("critic.")}
        assert_close(dict(again.model.named_parameters()), policy)
    else:
        assert (tmp_path / "actor" / "adapter_model.safetensors").exists()


def test_critics_load_and_adopt():
    path = saved("qwen2_5_vl")
    critic = CriticVL(
        path,
        use_flash_attention_2=False,
        bf16=True,
        load_in_4bit=False,
        lora_rank=0,
        lora_alpha=16,
        target_modules="all-linear",
        lora_dropout=0,
        normalize_reward=False,
        ds_config=None,
        init_value_head=True,
        value_head_prefix="score",
    )
    assert critic.model.dtype == torch.bfloat16 and not critic.head.weight.any()
    model = moved("qwen2_5_vl")["model"]
    adopted = CriticVL(model)
    assert adopted.model is model and model.dtype == torch.float32
    critic.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert any(getattr(module, "gradient_checkpointing", False) for module in critic.modules())
    critic.gradient_checkpointing_disable()
    assert not any(getattr(module, "gradient_checkpointing", False) for module in critic.modules())
    for options in ({"lora_rank": 4}, {"load_in_4bit": True}):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}=.*` isn't supported for a critic"):
            CriticVL(path, **options)


def test_keywords_of_actors():
    """All keywords of LightRFT's scripts, with the defaults of its command line."""
    names = "load_in_4bit lora_rank lora_alpha target_modules lora_dropout packing_samples disable_logprobs_flashattn"
    names += " fused_linear_logprob high_entropy_token_ratio chunk_size"
    options = {name: COMMAND_LINE[name] for name in names.split()}
    plain = ActorVL(saved("qwen2_5_vl"), False, False, ds_config=None, **options)
    assert not [name for name, _ in plain.model.named_parameters() if "lora" in name]
    options |= {"fused_linear_logprob": True, "disable_logprobs_flashattn": True, "lora_rank": 2}
    adapted = []
    for modules in ("all-linear", ["all-linear"], None):
        actor = ActorVL(load("qwen2_5_vl")[0], bf16=False, **{**options, "target_modules": modules})
        adapted.append({name for name, _ in actor.model.named_parameters() if "lora" in name})
    assert adapted[0] == adapted[1] == adapted[2] != set()
