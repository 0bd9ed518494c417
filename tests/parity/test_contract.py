# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The parts of TRL, transformers and torch that this package depends on. A failure names the change of a release."""

import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from functools import cache
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name

import guard
import house
import pytest
import torch
from guard import Upstream, names, trl_of
from helpers.folders import ROOT, TESTS
from helpers.processes import PATIENCE
from helpers.trainer_utils import length_and_sum, load, text_rows
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from transformers import Trainer, TrainingArguments, masking_utils
from trl import (
    DistillationTrainer,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTTrainer,
)
from trl.trainer.utils import RepeatSampler

import trl_multimodal_rft
from trl_multimodal_rft import (
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
    MultimodalRLOOConfig,
    MultimodalRLOOTrainer,
)
from trl_multimodal_rft.cli import COMMANDS, LAUNCHED, main
from trl_multimodal_rft.cli.commands import script_of
from trl_multimodal_rft.trainers.base.trainer import BaseTrainer
from trl_multimodal_rft.trainers.sampling.micro_batches import Batches
from trl_multimodal_rft.trainers.sampling.prompting import Prompting
from trl_multimodal_rft.trainers.sampling.rewarding import Rewarding
from trl_multimodal_rft.trainers.sampling.sampling import Sampling
from trl_multimodal_rft.trainers.sampling.scoring import Scoring
from trl_multimodal_rft.versions import (
    ALL_OVERRIDDEN,
    ATTRIBUTES,
    CACHE_NAMES,
    CALLED,
    OVERRIDDEN,
    PACKAGE,
    UNTESTED,
    WARNED,
    bounds,
    cache_name,
    check_versions,
    compare_with_tested,
    installed_versions,
    unfit_packages,
)


@pytest.mark.parametrize("algorithm", "DPO Distillation GRPO KTO RLOO Reward SFT".split())
def test_arguments_have_the_positions_that_trl_gives_them(algorithm):
    theirs, ours = (
        list(inspect.signature(resolve_name(path)).parameters)
        for path in (f"trl:{algorithm}Trainer", f"trl_multimodal_rft:Multimodal{algorithm}Trainer")
    )
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize("path", ALL_OVERRIDDEN)
def test_overridden_method_has_these_parameters(path):
    expected = ALL_OVERRIDDEN[path]
    assert list(inspect.signature(resolve_name(path)).parameters) == expected.split()


@pytest.mark.parametrize("path", CALLED)
def test_called_function_takes_these_parameters(path):
    found = inspect.signature(resolve_name(path)).parameters.keys()
    missing = [name for name in CALLED[path].replace("/", "").split() if found.isdisjoint(name.split("|"))]
    assert not missing, f"{path} takes no {', '.join(sorted(missing))}"


# Parameters of TRL's functions that the package doesn't pass. A new one may change what the call should say
UNPASSED = {
    "trl.models.utils:_ForwardRedirection.__call__": "args kwargs",
    "trl.extras.profiling:ProfilingContext": "metric_prefix",
    "trl.trainer.utils:selective_log_softmax_and_entropy": "row_mask",
    # The trainer here passes all that it is given
    "trl.trainer.sft_trainer:SFTTrainer.__init__": (
        "compute_loss_func compute_metrics preprocess_logits_for_metrics formatting_func"
    ),
}


@pytest.mark.parametrize("path", [path for path in CALLED if path.startswith("trl")])
def test_called_function_of_trl_has_no_further_parameters(path):
    passed = {name for names in CALLED[path].replace("/", "").split() for name in names.split("|")}
    found = inspect.signature(resolve_name(path)).parameters.keys() - passed - {"self"}
    assert found == set(UNPASSED.get(path, "").split())


# Parameters of TRL's constructors that a trainer doesn't take: PPO's critic scores completions of one turn
UNTAKEN = {"PPO": {"tools", "rollout_func", "environment_factory"}}


@pytest.mark.parametrize("name", house.trainers())
def test_constructors_override_and_take_the_parameters_of_trls(name):
    theirs, ours = (
        inspect.signature(each.__init__).parameters
        for each in (trl_of(house.trainers()[name]), house.trainers()[name])
    )
    assert theirs.keys() - ours.keys() == UNTAKEN.get(name, set())


@pytest.mark.parametrize("name", house.trainers())
def test_private_names_of_trl_are_in_the_contract(name):
    """TRL's classes assign or define each of them, as `guard.py` looks for no others."""
    attributes, methods = guard.private_names(guard.INSTALLED, name)
    path = f"{trl_of(house.trainers()[name]).__module__}:{trl_of(house.trainers()[name]).__name__}."
    listed = set(ATTRIBUTES[path].split())
    shared = [other for other in house.trainers() if trl_of(house.trainers()[other]) is trl_of(house.trainers()[name])]
    used = set().union(*(guard.private_names(guard.INSTALLED, other)[0] for other in shared))
    assert attributes <= listed == used
    assert methods <= names(CALLED) | names(OVERRIDDEN[name])


def test_private_functions_of_trl_are_in_the_contract():
    assert guard.private_imports() <= {path.removesuffix(".__call__") for path in CALLED}


@pytest.mark.parametrize("name", house.trainers())
def test_every_override_is_in_the_contract(name):
    trainer = house.trainers()[name]
    classes = [base for base in trainer.__mro__ if base.__module__.startswith("trl_multimodal_rft")]
    overridden = {
        name
        for base in classes
        for name, value in vars(base).items()
        if inspect.isfunction(value) and not hasattr(object, name) and hasattr(trl_of(trainer), name)
    }
    assert overridden == names(OVERRIDDEN[name])


@pytest.mark.parametrize("name", house.trainers())
def test_every_trainer_has_its_config_command_card_and_tests(name):
    """A new trainer adds them to the registries, from which all other lists are made."""
    trainer = house.trainers()[name]
    command = name.lower()
    assert issubclass(house.exported("Config")[name], TrainingArguments)
    assert command in LAUNCHED and script_of(command).prefix == f"Multimodal{name}"
    assert trainer._name and "trl-multimodal-rft" in vars(trainer)["_tag_names"]
    known = house.modules()
    tests = [path for path in TESTS.rglob("test_*.py") if trainer.__module__ in house.imports(path, known)]
    assert any(command in path.stem for path in tests)


TRAINERS = [
    (MultimodalGRPOTrainer, GRPOTrainer, GRPOConfig, MultimodalGRPOConfig),
    (MultimodalRLOOTrainer, RLOOTrainer, RLOOConfig, MultimodalRLOOConfig),
]


@pytest.mark.parametrize(("ours", "trl", "config", "our_config"), TRAINERS, ids=["grpo", "rloo"])
def test_trainer_has_the_attributes_that_are_read(ours, trl, config, our_config, tmp_path):
    """Finds reads of `self.<name>` and `self.args.<name>` without assignments, on TRL's trainer and on the config."""
    own_classes = [each for each in ours.__mro__ if each.__module__.startswith("trl_multimodal_rft")]
    source = "".join(map(inspect.getsource, own_classes))
    read = set(re.findall(r"\bself\.(\w+)", source))
    own = set(re.findall(r"self\.(\w+)(?=(?:: [^=\n]+|(?:, self\.\w+)*) = )", source))
    own -= {"_buffered_inputs", "_step", "beta"}
    own |= set().union(*map(vars, own_classes))
    model, processor = load("qwen2_5_vl")
    args = config(str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    trainer = trl(model, length_and_sum, args, text_rows(), processing_class=processor)
    # Exist only after training starts, or with their options or async functions
    later = {"current_gradient_accumulation_steps", "_initial_global_step", "async_loop"}
    later |= {"commit_scheduler", "entropy_coef", "_last_world_entropy"}
    # Exist only in GRPO, or assigned by functions of `trainers/`
    later |= {"vllm_generation", "chat_template", "max_tool_calling_iterations", "tools"}
    missing = {name for name in read - own - later if not hasattr(trainer, name)}
    assert not missing
    arguments = set(
        re.findall(
            r"\bargs\.(\w+)",
            source + "".join(map(inspect.getsource, (Prompting, Sampling, Scoring, Rewarding, Batches))),
        )
    )
    assert {"steps_per_generation", "self_check"} <= arguments
    missing = {name for name in arguments if not hasattr(our_config(str(tmp_path), use_cpu=True, bf16=False), name)}
    assert not missing


def test_a_checkpoint_is_made_of_nothing_else():
    """`BaseTrainer._save_checkpoint` replaces the methods of transformers and TRL."""

    def used(function) -> set[str]:
        return set(re.findall(r"self\.(\w+)", inspect.getsource(function)))

    written = {
        "model",
        "save_model",
        "_save_optimizer_and_scheduler",
        "_save_scaler",
        "_save_rng_state",
        "store_flos",
        "state",
    }
    pushed = {"_get_output_dir", "_push_from_checkpoint", "callback_handler", "control", "args", "hp_search_backend"}
    assert used(Trainer._save_checkpoint) == written | pushed
    entropy = {"use_adaptive_entropy", "entropy_coef", "_last_world_entropy", "_get_output_dir", "state"}
    for trl in (GRPOTrainer, RLOOTrainer, SFTTrainer, DPOTrainer, RewardTrainer, DistillationTrainer):
        assert used(trl._save_checkpoint) - {"args", "create_model_card"} <= entropy, trl


def test_what_begins_with_an_underscore_is_not_published():
    for push in (Trainer.push_to_hub, Trainer._push_from_checkpoint):
        assert 'ignore_patterns=["_*", f"{PREFIX_CHECKPOINT_DIR}-*"]' in inspect.getsource(push)


def test_torch_can_tie_a_process_to_its_parent():
    assert callable(resolve_name("torch.multiprocessing:_prctl_pr_set_pdeathsig"))


def test_accumulation_steps_are_set_when_training_starts():
    assert "self.current_gradient_accumulation_steps = " in inspect.getsource(Trainer._run_epoch)


@pytest.mark.parametrize("name", house.trainers())
def test_trl_builds_on_the_methods_that_are_overridden(name):
    """TRL calls each overridden method. Otherwise the override would have no effect."""
    source = inspect.getsource(inspect.getmodule(trl_of(house.trainers()[name]))) + inspect.getsource(Trainer)
    for method in names(OVERRIDDEN[name]) - {"train"}:  # users call these
        assert re.search(rf"self\.{method}\b(?! =)", source), f"nothing calls {method}"


# Options that only replaced code of TRL reads, see `guard.py`


ENCODING = "the package encodes prompts and completions with media itself, in `encoding/`"
LOADING = "rows are read, sharded and ordered by `rollout/stream.py`"
TOOLS = "TRL's attribute of tools and environments; those arguments are read by `rollout/environments.py`"
LOSS = "the loss is the package's; TRL's runs with `compute_loss_func` and prompt learning alone"
PUSH = "`BaseTrainer._save_checkpoint` writes and pushes checkpoints"
# Names that replaced code of TRL reads, and that the package doesn't read, with the reason
UNREAD = {
    "_is_vlm": ENCODING,
    "_is_vision_dataset": ENCODING,
    "_image_pad_token_id": ENCODING,
    "_video_pad_token_id": ENCODING,
    "_tokenizer": ENCODING,
    "model_kwarg_keys": ENCODING,
    "chat_template": ENCODING,
    "_eval_dataloaders": LOADING,
    "_signature_columns": LOADING,
    "_train_batch_size": LOADING,
    "train_batch_size": LOADING,
    "process_index": LOADING,
    "data_collator": LOADING,
    "length_column_name": "strategies that order rows by length raise an error",
    "dataloader_pin_memory": "nothing is pinned, as with `False`; a default of `True` can't be told from a choice",
    "use_transformers_continuous_batching": "TRL's constructor makes `continuous_batching_config`, which is read",
    "_async_tool_dicts": TOOLS,
    "_sync_tool_dicts": TOOLS,
    "_tool_dict": TOOLS,
    "_standalone_tools": TOOLS,
    "_env_tools": TOOLS,
    "_environment_pool": TOOLS,
    "environment_factories": TOOLS,
    "environments": TOOLS,
    "_batch_environments": TOOLS,
    "_multi_environment": TOOLS,
    "_entropy_window_stats": "sums of an optimizer step, which `algorithms/entropy.py` keeps",
    "_forward_redirection": "the hidden states of the teacher come from `forward/`",
    "_dist": "`trainers/sampling/engine.py` makes its own",
    "_last_loaded_step": "the engine knows which weights it has",
    "is_deepspeed_enabled": "the package prepares the teacher itself, as a reference",
    "is_fsdp_enabled": "the package scores the reference's log-probabilities itself",
    "hp_search_backend": PUSH,
    "parallel_mode": PUSH,
    "_tp_size": "tensor parallelism is an error",
    "hf_deepspeed_config": "tensor parallelism is an error",
    "label_smoother": LOSS,
    "model_accepts_loss_kwargs": LOSS,
}


@cache
def unread(name: str, upstream: Upstream = guard.INSTALLED) -> dict[str, str]:
    return guard.unread(guard.Replaced(upstream, name))


@pytest.mark.parametrize("name", house.trainers())
def test_no_option_is_swallowed_with_the_code_that_reads_it(name):
    """An option that acts only in code of TRL that a trainer replaces would be accepted, and do nothing."""
    swallowed = {each: method for each, method in unread(name).items() if each not in UNREAD}
    assert not swallowed, (
        "read them, refuse them in `trainers/base/config_options.py`, or add them to UNREAD, with the reason"
    )


def test_no_exception_is_left_over():
    assert set().union(*map(unread, house.trainers())) == UNREAD.keys()


def line(code: str, level: int = 1) -> str:
    return "    " * level + code + "\n"


ADVANTAGES = line("advantages = rewards - mean_grouped_rewards", 3)
SET_BY_TRL = line("self.scale_rewards = args.scale_rewards", 2)
TO_ENGINE = line("generation_kwargs=args.generation_kwargs,", 4)
TO_COLLATOR = line("processor=processing_class,", 5)
CHUNKED = line("# Chunked JSD path: project the teacher/student hidden states", 2)[:-1]
LOADER = line("def get_train_dataloader(self):")
LOSS_OF_KTO = line("def compute_loss(")[:-1]
HELPER = "\n\ndef _gained(rewards, args):\n    return rewards * getattr(args, 'gain', 0) + _more(args)\n"
HELPER += "\n\ndef _more(options):\n    return options.more\n"
NEW = (
    line("def get_eval_dataloader(self, eval_dataset=None):")
    + line("self.new()\n", 2)
    + line("def new(self):")
    + line("given = self.args", 2)
)
NEW += line("given.gain\n", 2)
IN_ROLLOUT = "_generate_and_score_completions"
PLANTS = {
    "in the replaced method": ("GRPO", {ADVANTAGES: line("self.args.gain", 3)}, "", {"gain": IN_ROLLOUT}),
    "under a common name": ("PPO", {ADVANTAGES: line("self.args.scale", 3)}, "", {"scale": IN_ROLLOUT}),
    "by functions that get the config": (
        "GRPO",
        {ADVANTAGES: line("_gained(rewards, self.args)", 3)},
        HELPER,
        {"gain": IN_ROLLOUT, "more": IN_ROLLOUT},
    ),
    "by an attribute of the constructor": (
        "GRPO",
        {ADVANTAGES: line("self.gain", 3), SET_BY_TRL: line("self.gain = args.length_gain", 2)},
        "",
        {"length_gain": IN_ROLLOUT},
    ),
    "by the engine": ("RLOO", {TO_ENGINE: line("gain=args.gain,", 4)}, "", {"gain": "__init__"}),
    "by the collator": ("DPO", {TO_COLLATOR: line("gain=args.gain,", 5)}, "", {"gain": "__init__"}),
    "in the loss": ("Distillation", {CHUNKED: line("self.args.gain", 2)}, "", {"gain": "_compute_loss"}),
    "in a method that only a replaced one calls": ("GRPO", {LOADER: NEW}, "", {"gain": "new"}),
    "in a method that runs": ("KTO", {LOSS_OF_KTO: line("def more(self):") + line("self.args.gain\n", 2)}, "", {}),
}


@pytest.mark.parametrize(("name", "added", "below", "expected"), PLANTS.values(), ids=PLANTS)
def test_one_more_swallowed_option_of_trl_is_found(name, added, below, expected):
    """Plants code in a copy of TRL's trainer, before texts of it, and below it."""
    module = trl_of(house.trainers()[name]).__module__
    text = guard.text_of(module)
    for before, code in added.items():
        assert before in text
        text = text.replace(before, code + before, 1)
    found = unread(name, Upstream({module: text + below}))
    assert {each: method for each, method in found.items() if each not in UNREAD} == expected


def test_sampler_draws_one_order_an_epoch():
    """A resumed run draws the orders of earlier epochs again."""
    one, other = (RepeatSampler(range(7), 2, batch_size=3, repeat_count=2, seed=3) for _ in range(2))
    orders = [list(one) for _ in range(3)]
    for _ in range(2):
        torch.randperm(other.num_samples, generator=other.generator)
    assert list(other) == orders[2] != orders[0]


def test_families_still_have_their_own_rules():
    """The package takes these rules from the model. The general rule would be silently wrong."""
    for name, rule in {
        "gemma3": "create_masks_for_generate",
        "paligemma": "create_masks_for_generate",
        "qwen2_5_vl": "_prepare_position_ids_for_generation",
    }.items():
        model_class = type(load(name)[0])
        assert any(
            rule in vars(base) for base in model_class.__mro__ if base.__module__.startswith("transformers.models")
        )


def state(folder: Path, monkeypatch=None, **packages) -> None:
    """Has packages state other versions, in new processes or, given `monkeypatch`, in this one."""
    for name, number in packages.items():
        info = folder / f"{name}-{number}.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    if monkeypatch is not None:
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv(WARNED, "")  # restored afterwards
        check_versions.cache_clear()


def imported(tmp_path, **packages) -> str:
    """Imports a trainer in a new process, in which packages say other versions, and returns what it prints."""
    state(tmp_path, **packages)
    code = "import gc, os, sys; gc.disable()\nfrom trl_multimodal_rft import MultimodalGRPOTrainer\n"
    code += "print('imported', *sys.modules, flush=True); os._exit(0)"  # clearing all modules takes seconds
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=PATIENCE)
    return run.stdout + run.stderr


@pytest.mark.slow
def test_a_newer_version_is_warned_of_once(tmp_path):
    said = imported(tmp_path, trl="1.99.0", transformers="5.99.0.dev0")
    tested = f"(transformers{bounds()['transformers']}, trl{bounds()['trl']})"
    expected = f"UserWarning: transformers 5.99.0.dev0, trl 1.99.0: newer than {PACKAGE} was tested with {tested}."
    assert said.count(expected) == 1 and "imported" in said
    # What other trainers and single options need is imported with them
    assert "trl_multimodal_rft.trainers.grpo.trainer" in said
    late = {"trl_multimodal_rft.lightrft", "trl_multimodal_rft.extras.judge", "packaging.specifiers"}
    late |= {f"trl_multimodal_rft.trainers.{name}.trainer" for name in ("ppo", "rloo", "distillation", "supervised")}
    assert not late & {*said.split()}


def warnings_of_check() -> list[str]:
    check_versions.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_versions()
    return [str(each.message) for each in caught]


def test_the_processes_that_a_process_starts_do_not_warn_again(tmp_path, monkeypatch):
    state(tmp_path, monkeypatch, accelerate="1.16.0rc1", torch="2.16.0+cu140", datasets="5.2.9", peft="0.21.0")
    monkeypatch.setenv("RANK", "1")
    assert warnings_of_check() == []
    monkeypatch.setenv("RANK", "0")
    (said,) = warnings_of_check()
    tested = f"(accelerate{bounds()['accelerate']}, torch{bounds()['torch']})"
    assert said == f"accelerate 1.16.0rc1, torch 2.16.0+cu140: newer than {PACKAGE} was tested with {tested}."
    assert warnings_of_check() == [] and os.environ[WARNED].endswith("torch 2.16.0+cu140")  # as a child finds it
    state(tmp_path, monkeypatch, trl="1.17.0")
    assert len(warnings_of_check()) == 1  # another environment


def test_a_newer_version_is_refused_where_a_call_would_fail(tmp_path, monkeypatch):
    """Positions may have other names; what is passed by name, or called or overridden by its name, may not."""
    monkeypatch.setattr("trl.trainer.utils.nanmin", lambda values: values)
    monkeypatch.setattr("trl.trainer.utils.nanstd", lambda values, **others: values)
    check_versions.cache_clear()
    check_versions()  # looks at parts of newer versions alone
    monkeypatch.setattr("trl.trainer.utils.use_adapter", lambda model: model)
    monkeypatch.delattr("trl.trainer.utils.nanmax")
    monkeypatch.delattr(Trainer, "_init_training_state")
    attributes = {
        path: f"{names} _gone" if path.endswith("RLOOTrainer.") else names for path, names in ATTRIBUTES.items()
    }
    monkeypatch.setattr("trl_multimodal_rft.versions.ATTRIBUTES", attributes)
    state(tmp_path, monkeypatch, trl="1.99.0")
    with pytest.raises(ImportError) as raised:
        check_versions()
    error = str(raised.value)
    number = version("transformers")
    lost = "`adapter_name` of `trl.trainer.utils.use_adapter`, `trl.trainer.utils.nanmax`, "
    lost += "`dim` of `trl.trainer.utils.nanstd`, `keepdim` of `trl.trainer.utils.nanstd`"
    assert f"trl 1.99.0 lacks {lost}" in error
    assert "`trl.trainer.rloo_trainer.RLOOTrainer._gone`" in error
    assert f"transformers {number} lacks `transformers.Trainer._init_training_state`; " in error
    pins = f'"transformers{bounds()["transformers"]}" "trl{bounds()["trl"]}"'
    assert error.endswith(f"was tested with other versions: run `pip install {pins}`, or update {PACKAGE}.")


@pytest.mark.parametrize("name", [*CACHE_NAMES, "mems"])
def test_a_cache_has_one_of_its_names(name, tmp_path, monkeypatch):
    names = ["config", "inputs_embeds", "attention_mask", name, "position_ids"]
    signature = inspect.Signature([inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in names])
    monkeypatch.setattr(masking_utils.create_masks_for_generate, "__signature__", signature, raising=False)
    state(tmp_path, monkeypatch, transformers="5.99.0")
    check_versions.cache_clear()
    if name not in CACHE_NAMES:
        with pytest.raises(ImportError, match=r"lacks `cache\|past_key_values` of"):
            check_versions()
        return
    check_versions()
    assert cache_name.__wrapped__() == name


def test_a_newer_version_whose_imports_fail_lacks_nothing(tmp_path, monkeypatch):
    """It names the cause, rather than each part of the contract."""
    state(tmp_path, monkeypatch, trl="1.99.0")
    cause = RuntimeError("operator torchvision::nms does not exist")

    def fails(path):
        raise ModuleNotFoundError(f"Could not import module '{path}'. Are its requirements there?") from cause

    monkeypatch.setattr(pkgutil, "resolve_name", fails)
    with pytest.raises(ModuleNotFoundError, match="Could not import") as raised:
        check_versions()
    assert f"don't fit together: {cause}. It has torch" in unfit_packages(raised.value)


@pytest.mark.parametrize(("package", "number"), [("torch", "2.10.0+cu128"), ("peft", "0.18.1"), ("datasets", "4.8")])
def test_an_older_version_is_an_error_with_the_remedy(package, number, tmp_path, monkeypatch, capsys):
    state(tmp_path, monkeypatch, **{package: number}, trl="1.99.0")
    with pytest.raises(ImportError) as raised:
        trl_multimodal_rft.MultimodalGRPOTrainer  # noqa: B018
    pins = f'"{package}{bounds()[package]}" "trl{bounds()["trl"]}"'
    said = str(raised.value)
    assert said.startswith(f"{package} {number} is too old. {PACKAGE} ") and pins in said
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="1"):
            main([name, "--help"])
        assert capsys.readouterr().err == f"trl-multimodal-rft {name}: error: {said}\n"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("5.15.9", -1),
        ("5.16", 0),
        ("5.16.0.dev0", 0),
        ("5.24.9+cpu", 0),
        ("5.25.0rc1", 1),
        ("5.25", 1),
        ("5.100", 1),
        ("4.99", -1),
    ],
)
def test_versions_are_compared_by_their_releases(found, expected):
    assert compare_with_tested(found, ">=5.16,<5.25") == expected


def bounds_in(requirements) -> dict[str, str]:
    """Bounds of each requirement that has both ends, or whose newer versions are warned of."""
    found = {}
    for each in map(Requirement, requirements):
        ends = {end.operator: end.version for end in each.specifier}
        if each.name in UNTESTED:
            assert ends.keys() == {">="}
            ends["<"] = UNTESTED[each.name]
        if ends.keys() == {">=", "<"}:
            assert found.setdefault(each.name, f">={ends['>=']},<{ends['<']}") == f">={ends['>=']},<{ends['<']}"
    return found


def test_pip_resolves_what_the_package_accepts(tmp_path, monkeypatch):
    """The bounds of pyproject.toml are those of the wheel, of an editable install, and of this environment."""
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["project"]
    expected = bounds_in(
        [*project["dependencies"], *(line for each in project["optional-dependencies"].values() for line in each)]
    )
    contract = {path.split(".")[0].split(":")[0] for path in (*CALLED, *ALL_OVERRIDDEN)}
    assert contract | {"torch", "vllm"} == {*expected}
    assert bounds() == expected, "run `pip install -e .` again, as `make` does"
    assert all(
        SpecifierSet(expected[name]).contains(each, True) for name, each in installed_versions(expected).items()
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "trl_multimodal_rft").mkdir()
    code = "import sys; from setuptools import build_meta as build\n"
    code += "for kind in sys.argv[1:]: getattr(build, f'prepare_metadata_for_build_{kind}')(kind)"
    kinds = ["wheel", "editable"]
    for kind in kinds:
        (tmp_path / kind).mkdir()
    subprocess.run([sys.executable, "-c", code, *kinds], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    infos = [path for kind in kinds for path in (tmp_path / kind).glob("*-info")]
    assert {path.suffix for path in infos} == {".dist-info", ".egg-info"}  # the second is that of a source folder
    for number, path in enumerate(infos):
        folder = tmp_path / str(number)
        folder.mkdir()
        path.rename(folder / path.name)
        with monkeypatch.context() as context:
            context.setattr(sys, "path", [str(folder)])
            assert bounds.__wrapped__() == expected


def test_checkpoints_need_what_they_declare():
    """`BaseTrainer` reads attributes that it declares, or that transformers' `Trainer` or TRL's controller has."""
    names = set(re.findall(r"self\.(\w+)", inspect.getsource(BaseTrainer)))
    names -= {*vars(BaseTrainer.__base__), *BaseTrainer.__base__.__annotations__}
    theirs = {*dir(Trainer), *re.findall(r"self\.(\w+)", inspect.getsource(Trainer))}
    of_trl = {"entropy_coef", "_last_world_entropy", "_get_grad_norm"}
    assert names - {*vars(BaseTrainer), *BaseTrainer.__annotations__} - theirs <= of_trl
