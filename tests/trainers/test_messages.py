# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Errors in a constructor's arguments give one line with the remedy, before a model loads."""

import itertools
import json
import os
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import Dataset, DatasetDict
from helpers.chats import chat, text, video
from helpers.families import ALL_FAMILIES
from helpers.marks import OUTSIDE
from helpers.trainer_utils import CONFIGS, TRAINERS, image_rows, length_and_sum, load, saved
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.utils.data import TensorDataset

from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.data.rows.load import load_rows
from trl_multimodal_rft.encoding.processors import load_processor
from trl_multimodal_rft.encoding.prompts import encode_prompt
from trl_multimodal_rft.models.parts import check_base_is_kept
from trl_multimodal_rft.models.pretrained import load_trained
from trl_multimodal_rft.models.reward_model import load_reward_model
from trl_multimodal_rft.reporting import trackers


SAMPLED = ("grpo", "rloo", "ppo")
KINDS = (*SAMPLED, "sft", "dpo", "reward")
RUN = {"use_cpu": True, "bf16": False, "report_to": []}


def config(kind, folder="out", **options):
    return CONFIGS[kind](str(folder), **{**RUN, **options})


@pytest.fixture(scope="module")
def rows():
    return image_rows(2)


@pytest.fixture
def refused(tmp_path, rows):
    """Returns the error of a trainer's constructor, which must not load a model first."""

    def says(kind, error, **arguments):
        given = {"model": str(saved("qwen2_5_vl")), "train_dataset": rows, "args": config(kind, tmp_path / "out")}
        given |= {"reward_funcs": length_and_sum} if kind in SAMPLED else {}
        with pytest.MonkeyPatch.context() as patch, pytest.raises(error) as caught:
            patch.setattr(hf.PreTrainedModel, "from_pretrained", lambda *args, **kwargs: pytest.fail("was loaded"))
            TRAINERS[kind](**{**given, **arguments})
        message = str(caught.value)
        assert "\n" not in message
        return message

    return says


# Configs


WRONG = [
    ({"learning_rate": "1e-5"}, "`learning_rate` must be a number, got the text '1e-5'; write it without quotes."),
    ({"use_cpu": "true"}, "`use_cpu` must be `True` or `False`, got the text 'true'"),
    ({"learning_rate": -1e-5}, "`learning_rate` must be at least 0, got -1e-05; the default is"),
    ({"learning_rate": float("inf")}, "`learning_rate` must be at least 0 and finite, got inf"),
    ({"weight_decay": float("nan")}, "`weight_decay` must be at least 0, got nan"),
    ({"adam_beta2": 1.0}, "`adam_beta2` must be at least 0 and below 1, got 1.0; the default is 0.999."),
    ({"per_device_train_batch_size": 0}, "`per_device_train_batch_size` must be at least 1, got 0"),
    (
        {"max_tokens_per_microbatch": 0},
        "`max_tokens_per_microbatch` must be at least 1, got 0; the default is",
    ),
    (
        {"on_media_error": "skip", "max_skipped_rows": 1e999},
        "`max_skipped_rows` must be at least 0 and finite, got inf",
    ),
    (
        {"max_skipped_rows": 5},
        "`max_skipped_rows` has no effect without `on_media_error='skip'`; set `on_media_error='skip'` or remove",
    ),
    ({"model_init_kwargs": {"dtype": "bf16"}}, "has the dtype 'bf16', which torch doesn't have. Did you mean 'bfloat"),
    ({"model_init_kwargs": '{"dtype": "double64"}'}, "has the dtype 'double64', which torch doesn't have. Write"),
    (
        {"model_init_kwargs": "dtype=bfloat16"},
        '`model_init_kwargs` must be a dictionary, in JSON such as \'{"option": 1',
    ),
    ({"model_init_kwargs": ' {"dtype": "float16x"}'}, "`model_init_kwargs` has the dtype 'float16x', which torch doe"),
    ({"lr_scheduler_kwargs": '{"a": }'}, "got the text '{\"a\": }' (Expecting value: "),
    ({"gradient_checkpointing_kwargs": "off"}, "`gradient_checkpointing_kwargs` must be a dictionary, in JSON such"),
    ({"media_rules": "[1]"}, "`media_rules` must be a dictionary, in JSON such as"),
    ({"fsdp_config": "{1}"}, "`fsdp_config` must be a dictionary, in JSON such as"),
    ({"fp16": True, "bf16": None}, "`fp16=True` needs a GPU, and this run is on the CPU; set `fp16=False`."),
]
WRONG_WHERE_SAMPLED = [
    ({"temperature": 0}, "`temperature` must be above 0, got 0; set a low temperature such as 0.1, since compl"),
    ({"temperature": None}, "`temperature` must be above 0, got None; "),
    ({"top_p": 2}, "`top_p` must be above 0 and at most 1, got 2; 1 samples from all tokens."),
    ({"top_k": -2}, "`top_k` must be at least -1, got -2; 0 samples from all tokens."),
    ({"min_p": 1.5}, "`min_p` must be between 0 and 1, got 1.5; the default is None."),
    ({"epsilon": -0.1}, "`epsilon` must be at least 0, got -0.1; the default is 0.2."),
    ({"epsilon_high": -0.1}, "`epsilon_high` must be at least 0, got -0.1"),
    ({"beta": -0.1}, "`beta` must be at least 0, got -0.1; the default is 0.0"),
    ({"max_completion_length": 0}, "`max_completion_length` must be at least 1, got 0"),
    ({"num_generations": None}, "got None"),
    ({"vllm_gpu_memory_utilization": 1.1}, "must be above 0 and at most 1, got 1.1"),
    ({"generation_kwargs": {"top_pp": 1}}, "`generation_kwargs` has 'top_pp', which is no option of"),
    ({"generation_kwargs": '{"topp": 1}'}, "remove it. Did you mean `top_p`?"),
    ({"generation_kwargs": {"top_p": 2}}, "`generation_kwargs['top_p']` must be above 0 and at most 1, got 2"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_no_config_takes(kind):
    for options, message in WRONG + WRONG_WHERE_SAMPLED * (kind in SAMPLED):
        with pytest.raises(ValueError, match=re.escape(message)):
            config(kind, **options)
    if kind in SAMPLED:
        with pytest.raises(ValueError, match="`num_generations` must be at least [12], got 0"):
            config(kind, num_generations=0)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_that_reach_no_layer(kind, tmp_path, rows):
    rows = rows.map(lambda _: {"completion": "A.", "chosen": "A.", "rejected": "B."}) if kind not in SAMPLED else rows
    objects = {"reward_funcs": length_and_sum} if kind in SAMPLED else {}
    with pytest.raises(
        ValueError, match=r"\['query'\] of `peft_config` name no layer of .* named qkv, .*q_proj, k_proj"
    ):
        TRAINERS[kind](
            str(saved("qwen2_5_vl")),
            train_dataset=rows,
            args=config(kind, tmp_path),
            peft_config=LoraConfig(target_modules=["query"]),
            **objects,
        )


def starts_from_base(kind, tmp_path, start, wrapped=False, ref_model=None, **options):
    """Returns a trainer of an adapter whose start PEFT takes out of the base model."""
    columns = {"dpo": {"chosen": "A.", "rejected": "B."}, "kto": {"completion": "A.", "label": True}}
    objects = {"reward_funcs": length_and_sum} if kind in SAMPLED else {}
    rows = image_rows(2).map(lambda _: columns.get(kind, {}))
    (model, processor) = load("qwen2_5_vl")
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=start)
    adapter = {"model": get_peft_model(model, lora)} if wrapped else {"model": model, "peft_config": lora}
    objects |= adapter | ({} if ref_model is None else {"ref_model": ref_model})
    return TRAINERS[kind](
        train_dataset=rows, args=config(kind, tmp_path, **options), processing_class=processor, **objects
    )


@pytest.mark.parametrize(
    ("kind", "start", "options", "role"),
    [
        ("grpo", "pissa", {"beta": 0.1}, "the reference of `beta=0.1`; .* or set `beta=0`"),
        ("rloo", "olora", {}, "the reference of `beta=0.05`"),
        ("ppo", "pissa_niter_2", {"beta": 0.1, "wrapped": True}, r"the reference of `beta=0.1`; .* \(merge a trained"),
        ("dpo", "OLoRA", {}, "the reference; .* or pass `ref_model`"),
        ("dpo", "pissa", {"wrapped": True}, "the reference"),
        ("kto", "pissa", {}, "the reference"),
        ("distillation", "olora", {"self_teacher": "base", "teacher_view": "blank"}, "the teacher of `self_teacher="),
    ],
)
def test_a_reference_that_is_not_the_adapters_start(kind, start, options, role, tmp_path):
    with pytest.raises(
        ValueError, match=f"`init_lora_weights='{start}'` moves .* without its adapter can't be {role}"
    ):
        starts_from_base(kind, tmp_path, start, **options)


@pytest.mark.parametrize("start", ["corda", "loftq", "lora_ga"])
def test_starts_that_need_preparation(start):
    with pytest.raises(ValueError, match=f"`init_lora_weights={start!r}` moves a part of the base"):
        check_base_is_kept(torch.nn.Linear(1, 1), SimpleNamespace(init_lora_weights=start), "the reference", "stop")


def test_adapters_whose_base_is_no_reference(tmp_path):
    assert starts_from_base("grpo", tmp_path, "pissa").beta == 0
    assert starts_from_base("grpo", tmp_path, "gaussian", beta=0.1).beta == 0.1
    reference = load("qwen2_5_vl")[0]
    assert starts_from_base("dpo", tmp_path, "pissa", ref_model=reference).ref_model is not None


def test_values_of_trl_that_mean_nothing_is_left_out():
    """They aren't out of range."""
    for options in (
        {"top_k": -1},
        {"top_k": None},
        {"top_p": None},
        {"min_p": 0.0},
        {"epsilon_high": 5.0},
        {"vllm_importance_sampling_clip_max": None, "vllm_importance_sampling_mode": "sequence_mask"},
        {"generation_kwargs": {"typical_p": 0.9, "stop_strings": ["."]}},
        {"use_vllm": True, "generation_kwargs": {"detokenize": True}},  # an option of vLLM
        {"learning_rate": 0},
    ):
        assert config("grpo", **options)
    assert config("ppo", num_generations=1).num_generations == 1


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_batches_without_whole_groups(kind):
    """The message has the given arguments, and values that work."""
    rule = "must be a multiple of `num_generations=8`, so that prompts keep all their completions."
    for options, size, remedy in [
        (
            {"per_device_train_batch_size": 1},
            "`per_device_train_batch_size=1` x `gradient_accumulation_steps=1`",
            "`per_device_train_batch_size=8` or `gradient_accumulation_steps=8`",
        ),
        (
            {"per_device_train_batch_size": 2, "steps_per_generation": 3},
            "`per_device_train_batch_size=2` x `steps_per_generation=3`",
            "`per_device_train_batch_size=8` or `steps_per_generation=4` or `num_generations=6`",
        ),
        ({"generation_batch_size": 12}, "`generation_batch_size=12`", "`generation_batch_size=16`"),
        (
            {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
            "`per_device_eval_batch_size=4`",
            "`per_device_eval_batch_size=8`",
        ),
    ]:
        options = {"num_generations": 8, **options}
        with pytest.raises(ValueError) as caught:
            config(kind, **options)
        assert str(caught.value) == f"{size} {rule} Set {remedy}."
        for name, value in re.findall(r"`(\w+)=(\d+)`", remedy):
            assert config(kind, **{**options, name: int(value)})


def test_batches_of_processes_without_whole_groups(monkeypatch):
    monkeypatch.setattr(CONFIGS["grpo"], "world_size", 2)
    message = r"`gradient_accumulation_steps=1` x 2 processes must .* Set `per_device_train_batch_size=4` or "
    message += "`gradient_accumulation_steps=4` or `num_generations=6`"
    with pytest.raises(ValueError, match=message):
        config("grpo", per_device_train_batch_size=3, num_generations=8)


# Keyword arguments


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_keyword_arguments(kind, refused):
    for name, hint in {
        "max_prompt_length": " It was removed: remove long prompts from the dataset",
        "evaluation_strategy": " It was removed: use `eval_strategy`.",
        "learning_rte": " Did you mean `learning_rate`?",
        "n": " Use `num_generations`." if kind in SAMPLED else "",
        "system_prompt": " Put a message of the role 'system' at the start of `prompt`",
        "xyz": "",
    }.items():
        with pytest.raises(TypeError) as caught:
            config(kind, **{name: 1})
        start = f"{CONFIGS[kind].__name__} got an unexpected keyword argument '{name}'."
        assert str(caught.value).startswith(start + hint) and (hint or str(caught.value) == start)
    for name, hint in {"max_completion_length": " Use `max_length`, for", "num_generations": " Leave it out"}.items():
        with nullcontext() if kind in SAMPLED else pytest.raises(TypeError, match=f"'{name}'.{hint}"):
            config(kind, **{name: 8})
    hints = {
        "tokenizer": "It was removed: use `processing_class`.",
        "processor": "It was removed: use `processing_class`.",
        "train_datset": "Did you mean `train_dataset`?",
    }
    extra = {}
    if kind in SAMPLED:
        extra["data_collator"] = "The trainer encodes and joins the rows itself."
        extra["reward_function"] = "mean `reward_funcs`?"
        extra["compute_metrics"] = "GenerationEvalCallback(trainer))`."
    for name, hint in {**hints, **extra}.items():
        message = refused(kind, TypeError, **{name: None})
        assert message.startswith(f"{TRAINERS[kind].__name__} got an unexpected keyword argument '{name}'.")
        assert message.endswith(hint)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_that_cannot_be_meant(kind, refused, tmp_path, caplog, monkeypatch):
    model = str(saved("qwen2_5_vl"))
    names = {"report_to": ["none", "tensorbord"]}
    with pytest.raises(ValueError, match="`report_to` names 'tensorbord', which is no tracker. Did you mean `tensorb"):
        config(kind, **names)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ValueError, match="names 'tensorboard', which isn't installed: `pip install tensorboard`, or"):
        config(kind, report_to="tensorboard")
    assert config(kind, report_to='["none"]').report_to == []  # as a command passes the list of a file
    for folder in (model, f"{model}/../{Path(model).name}", Path(model)):
        message = refused(kind, ValueError, args=config(kind, folder))
        assert message.endswith("the run would overwrite; name another folder.")
    loaded = load("qwen2_5_vl")[0]
    loaded.config._name_or_path = model  # loaded by the user
    assert "would overwrite" in refused(kind, ValueError, model=loaded, args=config(kind, model))
    config(kind, num_train_epochs=0, max_steps=1, learning_rate=1.0)
    assert not caplog.records
    config(kind, num_train_epochs=0, learning_rate=1e3)
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0].startswith("`num_train_epochs=0` trains nothing") and "`learning_rate=1000` is far" in texts[1]


def reads_solutions(completions, solution, **kwargs):
    return [0.0] * len(completions)


@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.parametrize(
    "reward", ["accuracy_reward", pytest.param("box_iou_reward(iou_threshold=0.5)", marks=OUTSIDE), reads_solutions]
)
def test_columns_that_are_removed_before_a_reward_reads_them(kind, reward, refused, tmp_path, rows):
    args = config(kind, tmp_path / "out", remove_unused_columns=True)
    rows = rows.add_column("solution", ["a"] * len(rows))
    message = refused(kind, ValueError, reward_funcs=[reward], args=args, train_dataset=rows)
    assert message.startswith("`remove_unused_columns=True` removes 'solution', which ")


def test_a_model_that_writes_is_no_reward(tmp_path, rows):
    """Also one that names a judge; its message isn't a list of all configs."""
    message = "is a Qwen2_5_VLForConditionalGeneration, which writes text and scores nothing; ask it as a judge by `Ju"
    with pytest.raises(ValueError, match=message):
        TRAINERS["grpo"](str(saved("qwen2_5_vl")), str(saved("qwen2_5_vl")), config("grpo", tmp_path), rows)
    with pytest.raises(ValueError, match="no reward function 'acuracy_reward'. Did you mean `accuracy_reward`?"):
        TRAINERS["grpo"](str(saved("qwen2_5_vl")), "acuracy_reward", config("grpo", tmp_path), rows)


def test_nothing_to_resume_from_and_no_rows(tmp_path, rows):
    rows = rows.map(lambda row: {"completion": "A cat."})
    trainer = TRAINERS["sft"](str(saved("qwen2_5_vl")), config("sft", tmp_path), train_dataset=rows)
    with pytest.raises(
        ValueError, match="There is no checkpoint in .* to resume from; leave `resume_from_checkpoint`"
    ):
        trainer.train(resume_from_checkpoint=True)
    for name in ("adapter_config.json", "model.safetensors"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("{}")
        rows[0]["image"].save(folder / "training_curves.png")
        with pytest.raises(ValueError, match="it is the folder of a model or an adapter, which has no rows"):
            load_rows(str(folder), None, "train", streaming=False)


def test_a_missing_package_of_attention_has_its_remedy(tmp_path, rows):
    args = config("grpo", tmp_path, model_init_kwargs={"attn_implementation": "flash_attention_2"})
    with pytest.raises(ImportError, match="flash-attn.*, or leave `attn_implementation` out, as packed rows need"):
        TRAINERS["grpo"](str(saved("qwen2_5_vl")), length_and_sum, args, rows)


def test_constructor_of_a_subclass_takes_its_own_arguments(tmp_path, rows):
    class Mine(TRAINERS["sft"]):
        def __init__(self, *args, **kwargs):
            self.mine = kwargs.pop("mine")
            super().__init__(*args, **kwargs)

    rows = rows.map(lambda row: {"completion": "A cat."})
    args = config("sft", tmp_path)
    assert Mine(str(saved("qwen2_5_vl")), args, train_dataset=rows, mine=3).mine == 3
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        Mine(str(saved("qwen2_5_vl")), args, train_dataset=rows, mine=3, tokenizer=None)


# Trainers


class Reward:
    def __call__(self, **kwargs):
        return [0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_of_another_type(kind, refused, rows):
    splits = DatasetDict(train=rows, test=rows)
    for name, value, message in [
        ("model", hf.Qwen2_5_VLForConditionalGeneration, "ForConditionalGeneration.from_pretrained(...)`."),
        ("model", Path("models"), "`model` is a PosixPath; pass a name or a folder as a string, or a model."),
        ("model", None, "`model` is a NoneType; pass a name or a folder"),
        ("processing_class", hf.AutoProcessor, "`processing_class` is the class AutoProcessor; pass an instance"),
        ("args", CONFIGS[kind], f"`args` is the class {CONFIGS[kind].__name__}; pass an instance, such as `Multi"),
        ("train_dataset", splits, "DatasetDict with the splits 'train', 'test'; pass one of them, such as `dataset["),
        ("train_dataset", rows.to_list(), "`Dataset` or `IterableDataset`, got a list; pass `Dataset.from_list("),
        ("eval_dataset", [{}], "`eval_dataset` must be a `Dataset` or `IterableDataset`, got a list; pass `Dataset."),
        ("eval_dataset", {"a": [{}]}, "`eval_dataset['a']` must be a `Dataset`"),
        (
            "train_dataset",
            {"prompt": np.array(["A cat?"])},
            "got a dict of columns; pass `Dataset.from_dict(columns)`.",
        ),
        ("train_dataset", {"train": [{"prompt": "A cat?"}]}, "got a dict with the splits 'train'; pass one of them"),
        ("train_dataset", TensorDataset(), "got a TensorDataset; pass `Dataset.from_generator(rows)` with a f"),
        ("train_dataset", (row for row in rows), "got a generator; pass `Dataset.from_generator(rows)`"),
        ("train_dataset", map(dict, rows), "got a map; pass `Dataset.from_list(list(rows))`."),
        ("train_dataset", "rows", "`Dataset` or `IterableDataset`, got a str; pass `train_dataset=load_dataset"),
    ]:
        assert message in refused(kind, TypeError, **{name: value})
    for value, message in [
        ([Reward], "`reward_funcs[0]` is the class Reward; pass an instance, such as `Reward(...)`."),
        (Reward, "`reward_funcs` is the class Reward; pass an instance"),
        ((length_and_sum,), "`reward_funcs` is of type tuple; pass a function, a model"),
        ([3], "`reward_funcs[0]` is of type int; pass a function, a model, or the name of a reward model."),
    ]:
        if kind in SAMPLED:
            assert refused(kind, TypeError, reward_funcs=value).startswith(message)


def test_references_that_are_no_models(refused):
    for value, remedy in (("models/a", "pass a loaded model, or leave "), (config("dpo"), "pass it as `args`.")):
        message = f"`ref_model` is of type {type(value).__name__}; {remedy}"
        assert all(message in refused(kind, TypeError, ref_model=value) for kind in ("dpo", "grpo", "ppo"))


@pytest.mark.parametrize("kind", KINDS)
def test_streams_without_an_end_and_options_without_tools(kind, refused, rows):
    message = refused(kind, ValueError, train_dataset=rows.to_iterable_dataset())
    assert message == "`train_dataset` is a stream, whose end isn't known; set `max_steps`."
    for option in ("max_context_media", "max_tool_media") if kind in SAMPLED else ():
        assert f"`{option}` has no effect without" in refused(kind, ValueError, args=config(kind, **{option: 1}))
        with pytest.raises(ValueError, match="`max_context_media` must be at least 1, got 0"):
            config(kind, max_context_media=0)


@pytest.mark.parametrize("kind", KINDS)
def test_config_of_another_trainer_and_a_folder_that_is_a_file(kind, refused, tmp_path):
    for other in CONFIGS.keys() - {kind}:
        message = refused(kind, TypeError, args=config(other, tmp_path))
        assert message.startswith(f"`args` is a {CONFIGS[other].__name__}; use {CONFIGS[kind].__name__}, which")
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "run"):
        message = refused(kind, OSError, args=config(kind, folder))
        assert message.startswith(f"`output_dir={str(folder)!r}` can't be written to (")


@pytest.mark.parametrize("kind", KINDS)
def test_model_that_is_not_there(kind, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("audio", "no-weights", "no-processor"):
        shutil.copytree(saved("qwen2_5_vl"), f"models/{name}")
    os.remove("models/no-weights/model.safetensors")
    shutil.copytree("models/no-weights", "models/shards")
    os.mkdir("models/shards/pytorch_model_fsdp_0")
    shutil.copytree("models/audio", "models/run/checkpoint-20")
    adapter = Path("models", "adapter", "adapter_config.json")
    adapter.parent.mkdir()
    adapter.write_text("{}")
    for name, message in {
        "models/audioo": f"The model 'models/audioo' can't be loaded. There is no such folder in '{tmp_path}'. "
        f"'{tmp_path}/models' has 'audio'. On the Hub: We",
        "models/run/x": "The model 'models/run/x' can't be loaded: there is no such folder. ",
        "modls/audio": f"There is no such folder in '{tmp_path}'. '{tmp_path}' has 'models'. On the Hub: We",
        "someone/model": f"The model 'someone/model' can't be loaded. There is no such folder in '{tmp_path}'.",
        "./x/y": "'.' has no 'x'.",
        "~/x": "`~` isn't expanded; write",
        "models/no-weights": "'models/no-weights' can't be loaded: the folder has no weights (*.safetensors); name a",
        "models/shards": "the folder has no weights (*.safetensors); it holds shards; run `accelerate merge-weights "
        "models/shards/pytorch_model_fsdp_0 models/shards`.",
        "models/run": "the folder has no config.json; it holds 'checkpoint-20'; name one, such as "
        "'models/run/checkpoint-20'.",
        "models/adapter": "the folder has no config.json; it holds an adapter; pass its base model, wrapped by",
        "models/audio/config.json": "The model 'models/audio/config.json' is a file; name the folder that holds it.",
    }.items():
        assert message.replace("'.'", repr(str(tmp_path))) in refused(kind, OSError, model=name), name


def test_model_without_its_processor(tmp_path, rows):
    folder = tmp_path / "model"
    shutil.copytree(saved("qwen2_5_vl"), folder)
    for path in folder.iterdir():
        if not path.name.startswith(("model", "config")):
            path.unlink()
    message = r"The processor of '.*/model' can't be loaded: the folder has none of processor_"
    with pytest.raises(OSError, match=message):
        TRAINERS["grpo"](str(folder), length_and_sum, config("grpo", tmp_path), train_dataset=rows)
    load("qwen2_5_vl")[1].tokenizer.save_pretrained(folder)
    with pytest.raises(
        OSError, match=r"has none of processor_config.json, preprocessor_config.json. Save the base model's"
    ):
        TRAINERS["grpo"](str(folder), length_and_sum, config("grpo", tmp_path), train_dataset=rows)


def test_the_template_of_a_tokenizers_config(tmp_path):
    shutil.copytree(saved("qwen2_5_vl"), tmp_path / "model")
    template = (tmp_path / "model" / "chat_template.jinja").rename(tmp_path / "template").read_text()
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    assert load_processor(str(tmp_path / "model")).chat_template == template


def test_errors_of_a_tokenizer_stay(tmp_path):
    """A model of text alone needs no other file of a processor."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=64)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(Exception) as raised:  # of tokenizers, whose kind differs between versions
        load_processor(str(tmp_path))
    assert "preprocessor_config" not in str(raised.value)


def test_model_without_its_head(refused):
    models = hf.AutoModel.from_pretrained(saved("qwen2_5_vl")), load_reward_model(saved("qwen2_5_vl"))
    message = " has no LM head; pass the model's name or folder, or load it as Qwen2_5_VLForConditionalGeneration."
    for kind, model in itertools.product(("grpo", "sft", "dpo"), models):
        assert type(model).__name__ + message in refused(kind, ValueError, model=model)


def test_a_classifier_is_no_policy(tmp_path, refused):
    load_reward_model(saved("qwen2_5_vl")).save_pretrained(tmp_path / "model")
    message = "a Qwen2_5_VLForSequenceClassification, which scores and writes no text; na"
    assert message in refused("grpo", ValueError, model=str(tmp_path / "model"))


def test_videos_of_different_lengths():
    model, processor = ALL_FAMILIES["internvl"].build()
    prompt = chat(video(4, 56, 56, seed=1), video(6, 56, 56, seed=2), text("Compare."))
    [row] = rows_to_messages([{"prompt": prompt}])
    with pytest.raises(ValueError, match=r"same number of frames, got \[4, 6\]; set `nframes` in their blocks, or"):
        encode_prompt(row["prompt"], processor, model)


def test_adapter_without_a_base(tmp_path):
    LoraConfig().save_pretrained(tmp_path)
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        ValueError, match="The adapter .* names no base model; set `base_model_name_or_path` in its config."
    ):
        load_trained(str(tmp_path))


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_row_beyond_the_positions_of_the_model(kind, tmp_path, rows, caplog):
    """The warning names the row once. Training uses all rows."""
    model, processor = load("qwen2_5_vl")
    model.config.get_text_config().max_position_embeddings = 30
    prompts = ["A cat?", "A dog? " * 40, "A dog? " * 50, "A bird?"]
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts])
    options = {"max_steps": 2, "per_device_train_batch_size": 4, "self_check": False, "num_generations": 2}
    options |= {"gradient_accumulation_steps": 2, "shuffle_dataset": False, "max_completion_length": 4}
    arguments = {"reward_funcs": length_and_sum}
    if kind == "sft":
        rows = rows.map(lambda row: {"completion": [{"role": "assistant", "content": "A cat."}]})
        options = {"max_steps": 1, "per_device_train_batch_size": 4}
        arguments = {}
    args = config(kind, tmp_path, **options)
    trainer = TRAINERS[kind](model, args=args, train_dataset=rows, processing_class=processor, **arguments)
    trainer.train()
    (warning,) = [each.message for each in caplog.records if "max_position_embeddings" in each.message]
    number, taken = re.search(r"Row (\d) takes (\d+) positions, more than the 30 that", warning).groups()
    assert number in "12" and int(taken) > 100


# Packages


def test_packages_of_a_model_that_are_missing(tmp_path, monkeypatch):
    """Covers an adapter, a processor whose parts need torchvision, and sound for a processor that needs WAV."""
    Path(tmp_path, "adapter_config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=re.escape('`pip install "trl-multimodal-rft[peft]"`')):
        load_trained(str(tmp_path))

    def needs_torchvision(*args, **kwargs):
        hf.utils.requires_backends(hf.Qwen2VLVideoProcessor, ["torchvision"])

    monkeypatch.setattr(hf.utils.import_utils, "is_torchvision_available", lambda: False)
    monkeypatch.setitem(hf.utils.import_utils.BACKENDS_MAPPING, "torchvision", (lambda: False, "no {0}: torchvision"))
    monkeypatch.setattr(hf.Qwen2VLVideoProcessor, "from_pretrained", needs_torchvision)
    with pytest.raises(ImportError, match=re.escape('needs torchvision: `pip install "trl-multimodal-rft[image]"`')):
        load_processor(str(saved("qwen2_5_vl")))
