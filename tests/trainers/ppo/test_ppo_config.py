# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The options of the PPO config: refusals and accepted values; `test_ppo.py` and others test their effects."""

import json
import math
import re
from itertools import product

import pytest
import torch
from helpers.ppo_runs import FAMILY, Ours
from helpers.trainer_utils import make_trainer, text_rows
from transformers import SchedulerType
from trl import TrlParser

from trl_multimodal_rft import MultimodalPPOConfig
from trl_multimodal_rft.trainers.ppo.config import ValueSchedule


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
            for name, value in product(("gamma", "lam"), (-0.1, 1.1))
        ),
        ({"advantage_estimator": "gae(bootstrap=True)"}, "'gae' has no setting 'bootstrap', only ['gamma', 'lam']"),
        *(
            ({name: value}, f"`{name}` must be above 0, got {value}")
            for name, value in product(("vf_coef", "cliprange_value", "value_learning_rate"), (0.0, -1.0))
        ),
        *(
            ({name: value}, f"`{name}` must be at least {least}, got {value}")
            for name, least, value in (
                ("freezing_actor_steps", 0, -1),
                ("num_ppo_epochs", 1, 0),
                ("ptx_coef", 0, -0.1),
                ("value_warmup_steps", 0, -0.5),
            )
        ),
        ({"vf_coef": None}, "`vf_coef` must be above 0, got None"),
        ({"vf_coef": "0.1(cliprange=0.5)"}, "`vf_coef` must be a number, got the text '0.1(cliprange=0.5)'"),
        ({"cliprange_value": [0.5]}, "`cliprange_value` must be a number, got [0.5]"),
        ({"ptx_coef": 0.1, "ptx_batch_size": 0}, "`ptx_batch_size` must be at least 1, got 0"),
        ({"ptx_coef": 0.1, "ptx_batch_size": math.inf}, "`ptx_batch_size` must be at least 1 and finite, got inf"),
        ({"ptx_coef": 0.1, "ptx_batch_size": 1.5}, "`ptx_batch_size` must be a whole number, got 1.5"),
        ({"ptx_batch_size": 2}, "`ptx_batch_size` has no effect without `ptx_coef`"),
        ({"value_warmup_steps": math.inf}, "`value_warmup_steps` must be at least 0 and finite"),
        *(
            ({"value_lr_scheduler_type": value}, "`value_lr_scheduler_type` must be one of 'linear', 'cosine'")
            for value in (5, "other")
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
                ("vf_coef", 0.5),
                ("cliprange_value", None),
                ("value_learning_rate", 0.1),
                ("value_lr_scheduler_type", "cosine"),
                ("value_warmup_steps", 0),
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
        ({}, {"vf_coef": 0.1, "cliprange_value": 0.2, "value_schedule": ValueSchedule(1e-6, "linear", 0)}),
        ({"cliprange_value": None}, {"cliprange_value": None}),
        (
            {"value_learning_rate": 5e-6, "value_warmup_steps": 0, "lr_scheduler_type": "constant", "warmup_steps": 3},
            {"value_schedule": ValueSchedule(5e-6, "constant", 0)},
        ),
        (
            {"value_learning_rate": 0.1, "value_lr_scheduler_type": "cosine", "warmup_steps": 3},
            {"value_schedule": ValueSchedule(0.1, "cosine", 3)},
        ),
        (
            {"value_lr_scheduler_type": SchedulerType.COSINE, "value_warmup_steps": 0.1},
            {"value_schedule": ValueSchedule(1e-6, "cosine", 0.1)},
        ),
        ({"advantage_estimator": "reinforce++", "num_generations": 1}, {"advantage_estimator": "reinforce"}),
        ({"advantage_estimator": function}, {}),
        ({"ema_decay": 0.992, "ptx_coef": 0.1}, {}),
    ],
)
def test_config_accepts(options, expected):
    args = config(**options)
    assert {name: getattr(args, name) for name in expected} == expected


def test_config_from_the_command_line():
    given = {
        "advantage_estimator": "gae(lam=0.9)",
        "bootstrap_truncated": True,
        "vf_coef": 0.5,
        "cliprange_value": 0.3,
        "value_learning_rate": 1e-5,
        "value_lr_scheduler_type": "cosine",
        "value_warmup_steps": 0.1,
        "freezing_actor_steps": 5,
        "num_ppo_epochs": 2,
        "ema_decay": 0.99,
        "ptx_coef": 0.2,
        "ptx_batch_size": 2,
        "beta": 0.1,
        "kl_target": 0.05,
        "kl_horizon": 50,
        "packing_shuffle": True,
        "on_media_error": "skip",
        "max_skipped_rows": 5,
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
    assert args.shared_trunk and args.cliprange_value == 0.2 and args.value_learning_rate is None


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
    options = {"value_lr_scheduler_type": "reduce_lr_on_plateau", "max_steps": 1}
    with pytest.raises(ValueError, match="The schedule 'reduce_lr_on_plateau' follows a metric"):
        make_trainer(Ours, FAMILY, text_rows(), tmp_path, **options).train()
