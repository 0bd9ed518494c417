# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The parts of TRL, transformers and torch that this package depends on. A failure names the change of a release."""

import inspect
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from helpers.processes import PATIENCE
from helpers.trainer_utils import length_and_sum, load, text_rows
from packaging.specifiers import SpecifierSet
from transformers import Trainer, masking_utils
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

from trl_multimodal_rft import (
    MultimodalDistillationTrainer,
    MultimodalDPOTrainer,
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
    MultimodalPPOTrainer,
    MultimodalRewardTrainer,
    MultimodalRLOOConfig,
    MultimodalRLOOTrainer,
    MultimodalSFTTrainer,
    versions,
)
from trl_multimodal_rft.trainers.checkpoints import CheckpointMixin
from trl_multimodal_rft.versions import (
    ALL_OVERRIDDEN,
    CACHE_NAMES,
    CALLED,
    OVERRIDDEN,
    TESTED,
    check_versions,
)


ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", ALL_OVERRIDDEN)
def test_overridden_method_has_these_parameters(path):
    expected = ALL_OVERRIDDEN[path]
    assert list(inspect.signature(resolve_name(path)).parameters) == expected.split()


@pytest.mark.parametrize("path", CALLED)
def test_called_function_takes_these_parameters(path):
    found = inspect.signature(resolve_name(path)).parameters.keys()
    missing = [name for name in CALLED[path].split() if found.isdisjoint(name.split("|"))]
    assert not missing, f"{path} takes no {', '.join(sorted(missing))}"


def names(paths) -> set[str]:
    return {path.split(".")[-1] for path in paths}


CONTRACTS = [
    (MultimodalGRPOTrainer, GRPOTrainer, OVERRIDDEN["GRPO"]),
    (MultimodalRLOOTrainer, RLOOTrainer, OVERRIDDEN["RLOO"]),
    (MultimodalPPOTrainer, GRPOTrainer, OVERRIDDEN["PPO"]),
    (MultimodalSFTTrainer, SFTTrainer, OVERRIDDEN["SFT"]),
    (MultimodalDPOTrainer, DPOTrainer, OVERRIDDEN["DPO"]),
    (MultimodalRewardTrainer, RewardTrainer, OVERRIDDEN["Reward"]),
    (MultimodalDistillationTrainer, DistillationTrainer, OVERRIDDEN["Distillation"]),
]


@pytest.mark.parametrize(("trainer", "trl", "contract"), CONTRACTS)
def test_every_override_is_in_the_contract(trainer, trl, contract):
    own = [base for base in trainer.__mro__ if base.__module__.startswith("trl_multimodal_rft")]
    overridden = {
        name
        for base in own
        for name, value in vars(base).items()
        if inspect.isfunction(value) and name != "__init__" and hasattr(trl, name)
    }
    assert overridden == names(contract)


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
    later |= {"_logit_bias", "vllm_generation", "chat_template", "max_tool_calling_iterations", "tools"}
    missing = {name for name in read - own - later if not hasattr(trainer, name)}
    assert not missing
    arguments = set(re.findall(r"\bargs\.(\w+)", source))
    assert {"steps_per_generation", "self_check"} <= arguments
    missing = {name for name in arguments if not hasattr(our_config(str(tmp_path), use_cpu=True, bf16=False), name)}
    assert not missing


def test_a_checkpoint_is_made_of_nothing_else():
    """`CheckpointMixin._save_checkpoint` replaces the methods of transformers and TRL."""

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


@pytest.mark.parametrize(("trl", "contract"), [contract[1:] for contract in CONTRACTS])
def test_trl_builds_on_the_methods_that_are_overridden(trl, contract):
    """TRL calls each overridden method. Otherwise the override would have no effect."""
    source = inspect.getsource(inspect.getmodule(trl)) + inspect.getsource(Trainer)
    for name in names(contract) - {"train"}:  # users call these
        assert re.search(rf"self\.{name}\b(?! =)", source), f"nothing calls {name}"


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


def imported(tmp_path, **versions) -> str:
    """Imports a trainer in a new process, in which packages say other versions, and returns what it prints."""
    for name, number in versions.items():
        folder = tmp_path / f"{name}-{number}.dist-info"
        folder.mkdir()
        folder.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    code = "from trl_multimodal_rft import MultimodalGRPOTrainer\nimport sys; print('imported', *sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=PATIENCE)
    return run.stdout + run.stderr


@pytest.mark.slow
def test_a_newer_version_is_warned_of_once(tmp_path):
    said = imported(tmp_path, trl="1.99.0", transformers="5.99.0.dev0")
    tested = f"(trl{TESTED['trl']}, transformers{TESTED['transformers']})"
    expected = (
        f"UserWarning: trl 1.99.0, transformers 5.99.0.dev0: newer than trl-multimodal-rft was tested with {tested}."
    )
    assert said.count(expected) == 1 and "imported" in said
    # What other trainers and single options need is imported with them
    assert "trl_multimodal_rft.trainers.grpo_trainer" in said and said.count(" trl_multimodal_rft.") <= 157
    late = {"trl_multimodal_rft.lightrft", "trl_multimodal_rft.rewards.judge", "packaging.specifiers"}
    assert not late & {*said.split()}


def test_a_newer_version_without_what_is_used_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr("trl.trainer.utils.nanstd", lambda tensor: tensor)
    check_versions()  # looks at parts of newer versions alone
    monkeypatch.delattr("trl.trainer.utils.nanmin")
    monkeypatch.delattr(Trainer, "_init_training_state")
    monkeypatch.setattr(versions, "version", lambda name: "1.99.0" if name == "trl" else version(name))
    with pytest.raises(ImportError) as raised:
        check_versions()
    error = str(raised.value)
    assert error.startswith("trl 1.99.0 lacks `trl.trainer.utils.nanmin`, `dim` of `trl.trainer.utils.nanstd`, `keepd")
    assert f"; transformers {version('transformers')} lacks `transformers.Trainer._init_training_state`. " in error
    assert f'run `pip install "trl{TESTED["trl"]}" "transformers{TESTED["transformers"]}"`, or update it' in error


@pytest.mark.parametrize("name", [*CACHE_NAMES, "mems"])
def test_a_cache_has_one_of_its_names(name, monkeypatch):
    names = ["config", "inputs_embeds", "attention_mask", name, "position_ids"]
    signature = inspect.Signature([inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in names])
    monkeypatch.setattr(masking_utils.create_masks_for_generate, "__signature__", signature, raising=False)
    assert ("`cache|past_key_values` of" in str(versions.missing_parts())) == (name not in CACHE_NAMES)
    assert name not in CACHE_NAMES or versions.cache_name.__wrapped__() == name


def test_an_older_version_is_an_error_with_the_remedy(tmp_path):
    said = imported(tmp_path, torch="2.10.0+cu128")
    assert (
        "ImportError: torch 2.10.0+cu128 is too old. " in said
        and f'run `pip install "torch{TESTED["torch"]}"`' in said
    )


def test_the_package_installs_beside_what_is_tested():
    required = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["project"]["dependencies"]
    floors = {name: tested.split(",")[0] for name, tested in TESTED.items()}
    assert {f"trl{floors['trl']}", f"torch{floors['torch']}", f"transformers{floors['transformers']},<6"} < {*required}
    assert all(SpecifierSet(tested).contains(version(name), True) for name, tested in TESTED.items())


def test_checkpoints_need_what_they_declare():
    """`CheckpointMixin` reads attributes that it declares, or that transformers' `Trainer` or TRL's controller has."""
    names = set(re.findall(r"self\.(\w+)", inspect.getsource(CheckpointMixin)))
    theirs = {*dir(Trainer), *re.findall(r"self\.(\w+)", inspect.getsource(Trainer))}
    of_trl = {"entropy_coef", "_last_world_entropy", "_get_grad_norm"}
    assert names - {*vars(CheckpointMixin), *CheckpointMixin.__annotations__} - theirs <= of_trl
