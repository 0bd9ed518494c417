# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The options of the PPO config: refusals and accepted values; `test_ppo.py` and others test their effects."""

import json
import re

import pytest
import torch
from helpers.ppo_runs import FAMILY, Ours
from helpers.trainer_utils import make_trainer, text_rows
from trl import TrlParser

from trl_multimodal_rft import MultimodalPPOConfig
from trl_multimodal_rft.trainers.grpo.config import KLTarget
from trl_multimodal_rft.trainers.ppo.config import SupervisedLoss, ValueLoss, ValueSchedule


def config(**options):
    return MultimodalPPOConfig("out", use_cpu=True, bf16=False, report_to=[], **options)


def function(rewards, **_):
    return rewards


WITHOUT = {"advantage_estimator": "rloo"}


@pytest.mark.parametrize(
    "options, message",
    [
        *(
            (
                {"advantage_estimator": f"gae({name}={value})"},
                f"`{name}` of 'gae' must be between 0 and 1, got {value}",
            )
            for name in ("gamma", "lam")
            for value in (-0.1, 1.1)
        ),
        ({"advantage_estimator": "gae(bootstrap=True)"}, "'gae' has no setting 'bootstrap', only ['gamma', 'lam']"),
        *(
            ({name: value}, f"`{name}` must be above 0, got {value}")
            for name in ("vf_coef", "value_learning_rate")
            for value in (0.0, -1.0)
        ),
        *(
            ({name: value}, f"`{name}` must be at least {least}, got {value}")
            for name, least, value in (
                ("freezing_actor_steps", 0, -1),
                ("num_ppo_epochs", 1, 0),
                ("ptx_coef", 0, -0.1),
            )
        ),
        ({"vf_coef": None}, "`vf_coef` must be above 0, got None"),
        ({"vf_coef": "0.1(cliprange=0)"}, "`cliprange` of 'vf_coef' must be above 0, got 0"),
        ({"vf_coef": "high"}, "`vf_coef` must be a number, such as 0.1, also with settings behind it, got 'high'"),
        ({"ptx_coef": "0.1(batch_size=0)"}, "`batch_size` of 'ptx_coef' must be at least 1, got 0"),
        ({"ptx_coef": "0.1(batch_size=1e999)"}, "`batch_size` of 'ptx_coef' must be at least 1 and finite, got inf"),
        ({"value_learning_rate": "0.1(warmup_steps=1e999)"}, "of 'value_learning_rate' must be at least 0 and finite"),
        ({"ptx_coef": "0.1(batch_size=1.5)"}, "`batch_size` of 'ptx_coef' must be a whole number, got 1.5"),
        ({"vf_coef": "0.1(cliprange=0.5, cliprange=0.5)"}, "can't be read (it sets `cliprange` twice; remove one)"),
        ({"vf_coef": "0.1(cliprange=[0.5])"}, "`cliprange` of 'vf_coef' must be a number, got [0.5]"),
        ({"vf_coef": "0.1(cliprange=)"}, "`vf_coef='0.1(cliprange=)'` can't be read"),
        (
            {"value_learning_rate": "0.1(lr_scheduler_type=5)"},
            "`lr_scheduler_type` of 'value_learning_rate' can't be 5",
        ),
        ({"ptx_coef": "0.1(size=1)"}, "'ptx_coef' has no setting 'size', only ['batch_size']"),
        (
            {"value_learning_rate": "0.1(warmup_steps=-0.5)"},
            "`warmup_steps` of 'value_learning_rate' must be at least 0, got -0.5",
        ),
        (
            {"value_learning_rate": "0.1(lr_scheduler_type='other')"},
            "`lr_scheduler_type` of `value_learning_rate` must be one of 'linear', 'cosine'",
        ),
        *(
            ({"ema_decay": value}, f"`ema_decay` must be above 0 and below 1, got {value}")
            for value in (0.0, 1.0, -1.0)
        ),
        ({"ptx_coef": 0.1, "temperature": 0.7}, "set `temperature=1`, got 0.7"),
        *(
            (
                {**WITHOUT, name: value},
                f"`{name}` is about the critic, which `advantage_estimator='rloo'` doesn't have",
            )
            for name, value in (
                ("bootstrap_truncated", True),
                ("shared_trunk", True),
                ("value_learning_rate", 0.1),
                ("freezing_actor_steps", 1),
            )
        ),
        (
            {"advantage_estimator": function, "shared_trunk": True},
            "which `advantage_estimator='function'` doesn't have",
        ),
        ({"num_iterations": 2}, "`num_iterations` (2) is called `num_ppo_epochs` here"),
        ({"importance_sampling_level": "sequence"}, "`importance_sampling_level='sequence'` takes one advantage per"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(**options)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, {"advantage_estimator": "gae", "num_ppo_epochs": 4, "num_iterations": 4}),
        ({"num_ppo_epochs": 1}, {"num_iterations": 1}),
        ({"num_ppo_epochs": 3, "num_iterations": 3}, {"num_iterations": 3}),
        ({"num_generations": 1}, {"num_generations": 1}),
        ({"beta": 0.1}, {"kl_estimator": "k1", "kl_in_reward": True}),
        ({"beta": 0.1, "kl_estimator": "k3"}, {"kl_estimator": "k3", "kl_in_reward": False}),
        ({"advantage_estimator": "gae(gamma=0, lam=1)"}, {"advantage_estimator": "gae(gamma=0, lam=1)"}),
        ({}, {"value_loss": ValueLoss(0.1, 0.2), "value_schedule": ValueSchedule(1e-6, "linear", 0)}),
        ({"vf_coef": "1e-3(cliprange=None)"}, {"value_loss": ValueLoss(1e-3, None)}),
        (
            {"value_learning_rate": "5e-6(warmup_steps=0.1)", "lr_scheduler_type": "constant", "warmup_steps": 3},
            {"value_schedule": ValueSchedule(5e-6, "constant", 0.1)},
        ),
        (
            {"value_learning_rate": "0.1(lr_scheduler_type='cosine')", "warmup_steps": 3},
            {"value_schedule": ValueSchedule(0.1, "cosine", 3)},
        ),
        ({"ptx_coef": "0.5(batch_size=3)"}, {"ptx": SupervisedLoss(0.5, 3)}),
        ({"beta": 0.1, "kl_target": "0.05(horizon=50)"}, {"kl_control": KLTarget(0.05, 50)}),
        ({"advantage_estimator": "reinforce++", "num_generations": 1}, {"advantage_estimator": "reinforce"}),
        ({"advantage_estimator": function}, {}),
        ({"ema_decay": 0.992, "ptx_coef": 0.1}, {}),
    ],
)
def test_config_accepts(options, expected):
    args = config(**options)
    assert {name: getattr(args, name) for name in expected} == expected


def test_hints_of_options_that_are_settings_now():
    for removed, hint in {
        "per_device_ptx_batch_size": "use `ptx_coef` with a setting, such as '0.1(batch_size=2)'",
        "value_lr_scheduler_type": "use `value_learning_rate` with a setting",
        "kl_horizon": "use `kl_target` with a setting, such as '0.05(horizon=50)'",
        "keep_groups_together": "use `packing` with a setting: 'prefix(shuffle=True)'",
        "cliprange_value": "use `vf_coef` with a setting",
        "vllm_sync_adapter": "use `vllm_engine_kwargs`",
    }.items():
        with pytest.raises(TypeError, match=rf"'{removed}'. It was removed: {re.escape(hint)}"):
            MultimodalPPOConfig("out", **{removed: 1})


def test_config_from_the_command_line():
    given = {
        "advantage_estimator": "gae(lam=0.9)",
        "bootstrap_truncated": True,
        "vf_coef": "0.5(cliprange=0.3)",
        "value_learning_rate": 1e-5,
        "freezing_actor_steps": 5,
        "num_ppo_epochs": 2,
        "ema_decay": 0.99,
        "ptx_coef": "0.2(batch_size=2)",
        "num_generations": 1,
    }
    line = "--output_dir out --use_cpu true --bf16 false " + " ".join(
        f"--{name} {each}" for name, each in given.items()
    )
    (args,) = TrlParser(MultimodalPPOConfig).parse_args_and_config(line.split())
    expected = {**given, "num_iterations": 2}
    assert {name: getattr(args, name) for name in expected} == expected
    line = "--output_dir out --use_cpu true --bf16 false --shared_trunk true"
    (args,) = TrlParser(MultimodalPPOConfig).parse_args_and_config(line.split())
    assert args.shared_trunk and args.value_loss == ValueLoss(0.1, 0.2) and args.value_learning_rate is None
    (args,) = TrlParser(MultimodalPPOConfig).parse_args_and_config([*line.split(), "--vf_coef", "0.1(cliprange=None)"])
    assert args.value_loss.cliprange is None


def test_config_is_saved_and_left_alone(tmp_path):
    trainer = make_trainer(
        Ours, FAMILY, text_rows(), tmp_path, self_check=False, max_steps=1, save_strategy="steps", save_steps=1
    )
    before = trainer.args.to_dict()
    trainer.train()
    assert trainer.args.to_dict() == before
    saved = torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert saved.to_dict() == before
    assert json.loads(trainer.args.to_json_string())["advantage_estimator"] == "gae"


def test_schedule_that_follows_a_metric_is_refused(tmp_path):
    options = {"value_learning_rate": "0.1(lr_scheduler_type='reduce_lr_on_plateau')", "max_steps": 1}
    with pytest.raises(ValueError, match="The schedule 'reduce_lr_on_plateau' follows a metric"):
        make_trainer(Ours, FAMILY, text_rows(), tmp_path, **options).train()
