# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The options of the GRPO config: refusals, accepted values, serialization, and additions."""

import copy
import dataclasses
import functools
import json
import re

import house
import pytest
import torch
from datasets import IterableDataset
from helpers.grpo_runs import CANONICAL, FAMILY, TWO, check_advantages, dataset, ours, rough, whitened
from helpers.trainer_utils import InjectedOurs, keys, length_and_sum, load, make_trainer, norm, relative_difference

from trl_multimodal_rft import (
    MultimodalDPOConfig,
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
    MultimodalPPOConfig,
    MultimodalRLOOConfig,
    MultimodalSFTConfig,
)
from trl_multimodal_rft.algorithms.advantages import ALIASES, ESTIMATORS, describe_estimators
from trl_multimodal_rft.algorithms.advantages import estimator as listed
from trl_multimodal_rft.algorithms.losses import LOSSES, LossOutput, importance_ratios, policy_loss
from trl_multimodal_rft.rollout import groups
from trl_multimodal_rft.trainers.base import multimodal_config, setup
from trl_multimodal_rft.views.views import VIEWS, view


def config(**options):
    return MultimodalGRPOConfig("out", use_cpu=True, bf16=False, report_to=[], **options)


def function(rewards, **_):
    return rewards


def only_rewards(rewards, mask):
    return rewards


def needs_more(rewards, completions, **_):
    return rewards


def positional(rewards, rewards_per_func, group_ids, mask, old_logps, ref_logps):
    return rewards


KL = {"beta": 0.1}
STEPS = {"advantage_estimator": "gigpo"}
SUM = {"multi_objective_aggregation": "normalize_then_sum"}
SINGLE = {"num_generations": 1, "advantage_estimator": "reinforce"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"advantage_estimator": "ppo"}, "`advantage_estimator` must be one of 'group_norm', 'rloo'"),
        ({"loss_type": "x"}, "`loss_type` must be one of 'grpo', 'bnpo', 'dr_grpo', 'dapo', 'luspo', 'cispo', 'sapo'"),
        ({"loss_type": "DR-GRPO"}, "got 'DR-GRPO'. Did you mean `dr_grpo`?"),
        ({"loss_type": "GSPO"}, "There is no `loss_type='GSPO'`. Instead, set `importance_sampling_level='sequence'`"),
        ({"loss_type": "ppo"}, "Instead, set `loss_type='grpo'`"),
        ({"loss_type": "rloo"}, "Instead, set `advantage_estimator='rloo'`."),
        ({"advantage_estimator": "group-norm"}, "got 'group-norm'. Did you mean `group_norm`?"),
        ({"importance_sampling_level": "group"}, "`importance_sampling_level` must be one of 'token', 'sequence'"),
        ({"importance_sampling_level": None}, "must be one of 'token', 'sequence', got None."),
        *(({"advantage_estimator": f}, "as keyword arguments (") for f in (only_rewards, needs_more)),
        (
            {"advantage_estimator": only_rewards},
            "The advantage estimator 'only_rewards' (rewards, mask) can't be called",
        ),
        (
            {"advantage_estimator": "gae"},
            "a critic, and this trainer has none. Use `MultimodalPPOTrainer`",
        ),
        *(
            ({"advantage_estimator": name, "num_generations": 1}, f"={CANONICAL.get(name, name)!r}` compares the")
            for name in ("group_norm", "grpo", "rloo", "reinforce++_baseline", "cpgd", "dr_grpo")
        ),
        ({"entropy_source": "other"}, "`entropy_source` must be one of 'rollout', 'current', got 'other'"),
        ({"entropy_source": "rollout(scope='other')"}, "`scope` of 'entropy_source' must be one of 'batch', 'sequ"),
        (
            {"entropy_source": "rollout(scoop='batch')"},
            "has no setting 'scoop', only ['scope', 'renormalize', 'rounding']. Did",
        ),
        ({"entropy_source": "rollout(renormalize='no')"}, "`renormalize` of 'entropy_source' must be `True` or `Fal"),
        *(
            ({"advantage_estimator": f"{name}({setting}='other')"}, f"`{setting}` of {name!r} must be one of")
            for name, setting in (("reinforce_baseline", "norm_level"), ("cpgd", "weight"))
        ),
        ({"advantage_estimator": "cpgd(wieght='std')"}, "'cpgd' has no setting 'wieght', only ['weight']"),
        ({"advantage_estimator": "reinforce(kl_coef=0.1)"}, "'reinforce' has no setting 'kl_coef', only []"),
        *(({"top_entropy_quantile": value}, "`top_entropy_quantile` must be above 0") for value in (0.0, -0.1, 1.1)),
        (
            {"top_entropy_quantile": 0.5, "gradient_accumulation_steps": 2, "steps_per_generation": 3},
            "The scope 'batch' of `entropy_source` needs the whole batch of an optimizer step",
        ),
        *(
            ({"soft_overlong_cache": n, "max_completion_length": 8}, f"`soft_overlong_cache` ({n})")
            for n in (0, -1, 9)
        ),
        *(({"reward_clip_range": value}, "with min < max") for value in ([1.0, 1.0], [1.0, -1.0])),
        *(
            ({"scale_rewards": scale, "advantage_estimator": "rloo"}, f"`scale_rewards={scale!r}` applies to")
            for scale in ("batch", "none")
        ),
        ({"scale_rewards": "none", "advantage_estimator": function}, "`scale_rewards='none'` applies to"),
        *(
            ({**SUM, **options}, "`multi_objective_aggregation='normalize_then_sum'` normalizes the")
            for options in (
                {"advantage_estimator": "rloo"},
                {"reward_running_scale": True},
                {"reward_clip_range": [0.0, 1.0]},
                {**KL, "kl_estimator": "k1"},
            )
        ),
        ({"kl_estimator": "k2"}, "`kl_estimator` has no effect without `beta`"),
        ({"kl_target": 0.1}, "`kl_target` has no effect without `beta`"),
        ({**KL, "kl_estimator": "k1", "advantage_estimator": function}, "remove `kl_estimator='k1'`"),
        ({**KL, "kl_estimator": "k4"}, "`kl_estimator` must be one of 'k1', 'k2', 'k3'"),
        *(({**KL, "kl_target": value}, "`kl_target` must be above 0") for value in (0.0, -1.0)),
        ({**KL, "kl_target": 0.1, "kl_horizon": 0}, "`kl_horizon` must be above 0"),
        ({**KL, "kl_target": "low"}, "`kl_target` must be a number, got the text 'low'"),
        *(
            ({**KL, "advantage_estimator": "reinforce", name: value}, f"`{name}={value!r}` takes one advantage per")
            for name, value in (("importance_sampling_level", "sequence"), ("loss_type", "gmpo"))
        ),
        ({"advantage_estimator": "reinforce", "loss_type": "gmpo"}, "`loss_type='gmpo'` takes one advantage per"),
        (
            {"loss_type": "gmpo", "entropy_source": "rollout(renormalize=True)"},
            "`renormalize` of `entropy_source` has no effect with",
        ),
        ({"loss_type": "cpgd(drift_coef=-1.0)"}, "`drift_coef` of 'cpgd' must be at least 0, got -1.0"),
        ({"loss_type": "cpgd(drift_coef=1e999)"}, "`drift_coef` of 'cpgd' must be at least 0 and finite, got inf"),
        ({"loss_type": "cpgd(drift_clamp=0.0)"}, "`drift_clamp` of 'cpgd' must be above 0, got 0.0"),
        ({"loss_type": "cpgd(drift_coef=True)"}, "`drift_coef` of 'cpgd' must be a number, got True"),
        ({"advantage_estimator": "cpgd(weight=std)"}, "(`std` is no value; quote it, as in 'std')"),
        ({"loss_type": "cpgd(drift_clamp='2')"}, "`drift_clamp` of 'cpgd' must be a number, got the text '2'"),
        *(
            (
                {name: f"{value}({setting}, {setting})"},
                f"`{name}={f'{value}({setting}, {setting})'!r}` can't be read (it sets ",
            )
            for name, value, setting in (
                ("loss_type", "cpgd", "drift_coef=0.1"),
                ("advantage_estimator", "cpgd", "weight='std'"),
                ("loss_view", "blank", "kl_coef=0.1"),
                ("rollout_view", "mask_patches", "ratio=0.1"),
                ("entropy_source", "rollout", "scope='batch'"),
            )
        ),
        ({**KL, "kl_target": 0.1, "kl_horizon": 2.5}, "`kl_horizon` must be a whole number, got 2.5"),
        ({**KL, "kl_horizon": 5}, "`kl_horizon` has no effect without `kl_target`"),
        ({"packing": "prefix(shuffle=True)"}, "`packing` must be one of 'prefix', 'padded', got 'prefix(shuffle=T"),
        ({"packing_shuffle": [True]}, "`packing_shuffle` must be `True` or `False`, got [True]"),
        ({"entropy_source": "rollout(renormalize=)"}, "`entropy_source='rollout(renormalize=)'` can't be read"),
        *(
            (
                {"entropy_source": f"rollout(renormalize={value})"},
                f"`renormalize` of 'entropy_source' must be `True` or `False`, got {value}",
            )
            for value in ("[True]", "1", "0.0", "(True,)", "b'yes'")
        ),
        (
            {"entropy_source": "rollout(renormalize=None)"},
            "`renormalize` of 'entropy_source' can't be None; the default is False",
        ),
        ({"entropy_source": "rollout(scope=None)"}, "`scope` of 'entropy_source' can't be None"),
        ({"entropy_source": "rollout(scope=['batch'])"}, "`scope` of 'entropy_source' must be one of 'batch'"),
        *(
            ({"loss_view": f"blank(kl_coef={value})"}, f"`kl_coef` of `loss_view` must be a number, got {value}")
            for value in ("[0.1]", "2j", "{'a': 1}")
        ),
        *(
            ({"loss_view": f"blank(entropy_coefs={value})"}, "`entropy_coefs` of `loss_view` must be a list of finite")
            for value in ("0.1", "[True, 0.1]", "[1e999, 0.1]", "[[0.1], 0.1]", "'ab'")
        ),
        (
            {"loss_view": "mask_patches(ratio=[0.5], kl_coef=0.1)"},
            "`ratio` of 'loss_view' must be a number, got [0.5]",
        ),
        *(
            ({"rollout_view": f"{view}({name}=1)"}, f"has no setting {name!r}: the view {view!r} has ")
            for view, name in (("blank", "media"), ("mask_patches", "rng"), ("other_row", "other"))
        ),
        ({"rollout_view": "mask_patches(patch_size=7.5)"}, "`patch_size` of 'rollout_view' must be a whole number"),
        ({"rollout_view": "mask_patches(schedule=5)"}, "`schedule` of `rollout_view` can't be 5"),
        ({"dynamic_sampling": 4, "dynamic_sampling_range": 0.5}, "`dynamic_sampling_range` must be a list of finite"),
        *(
            ({name: value}, f"`{name}={value!r}` can't be read; write a name as text")
            for name, value in (
                ("loss_type", None),
                ("loss_view", 5),
                ("rollout_view", ["blank"]),
                ("contrast_view", True),
            )
        ),
        *(
            ({name: value}, f"`{name}` must be a dictionary, got {value!r}")
            for name, value in (
                ("model_init_kwargs", [1]),
                ("gradient_checkpointing_kwargs", True),
                ("chat_template_kwargs", 5),
                ("media_rules", [["max_audio_seconds", 5]]),
                ("vllm_engine_kwargs", 1.5),
            )
        ),
        *(
            ({name: text}, problem)
            for name in ("model_init_kwargs", "chat_template_kwargs", "learning_rates", "generation_kwargs")
            for text, problem in (
                ('{"a": 1, "a": 2}', f"`{name}` must be a dictionary, in JSON such as"),
                ('{"a": {"b": 1, "b": 1}}', "(it sets `b` twice; remove one)"),
                ('{"a": 1e999}', "(`1e999` is no finite number)"),
            )
        ),
        ({"learning_rates": {"vision_tower": True}}, "`learning_rates['vision_tower']` must be above 0"),
        ({"learning_rate": [1e-5]}, "`learning_rate` must be a number, got [1e-05]"),
        ({"num_generations": 2.5}, "`num_generations` must be a whole number, got 2.5"),
        *(
            ({"chat_template_kwargs": {name: True}}, f"`chat_template_kwargs` has {name!r}, which the trainer sets")
            for name in ("tokenize", "tools", "add_generation_prompt")
        ),
        ({"loss_type": "dapo(drift_coef=0.1)"}, "'dapo' has no setting 'drift_coef', only []"),
        ({"loss_type": "cpgd", "epsilon": 1.0}, "`epsilon` (1.0) must be below 1"),
        ({"reward_clip_range": [0.0, 1.0, 2.0]}, "`reward_clip_range` must be (min, max)"),
        ({"warmup_steps": float("nan")}, "`warmup_steps` must be at least 0 and finite, got nan"),
        ({"neftune_noise_alpha": -1.0}, "`neftune_noise_alpha` must be at least 0, got -1.0"),
        ({"eval_accumulation_steps": 0}, "`eval_accumulation_steps` must be at least 1, got 0"),
        ({"log_level": "errorx"}, "`log_level` must be one of"),
        *(
            (
                {"pad_to_multiple_of": value},
                f"`pad_to_multiple_of` must be a whole number above 0, 'auto' or `None`, got {value!r}",
            )
            for value in (0, -1, "autox", True)
        ),
        *(
            ({"loss_type": name, "importance_sampling_level": "sequence"}, f"`loss_type={name!r}` clips the ratios of")
            for name in ("cpgd", "gmpo", "dual_clip")
        ),
        *(
            ({"loss_type": "dual_clip", **options}, "bounds the ratio beyond the clip range")
            for options in ({"delta": 1.2}, {"delta": 1.25, "epsilon_high": 0.28}, {"epsilon_high": 2.0})
        ),
        *(({"loss_type": name, "delta": 3.0}, "`delta` has no effect with") for name in ("cpgd", "gmpo")),
        *(
            (
                {"loss_type": "gmpo", "use_vllm": True, "vllm_importance_sampling_mode": f"token_{kind}"},
                "`loss_type='gmpo'` needs the importance ratios of completions",
            )
            for kind in ("mask", "truncate")
        ),
        (
            {"loss_type": "vespo", "use_vllm": True},
            "`loss_type='vespo'` needs the importance ratios of tokens",
        ),
        ({"dynamic_sampling": True}, "`dynamic_sampling` must be a number, got True"),
        ({"replay_buffer_size": -1}, "`replay_buffer_size` must be at least 0, got -1"),
        *(
            (
                {"dynamic_sampling": 4, "dynamic_sampling_range": bounds},
                "`dynamic_sampling_range` must be (min, max)",
            )
            for bounds in ([0.9, 0.1], [0.5], [0.5, 0.5])
        ),
        ({"dynamic_sampling_range": [0.1, 0.9]}, "no effect without `dynamic_sampling` or `replay_buffer_size`"),
        ({"dynamic_sampling_reward": "one"}, "no effect without `dynamic_sampling_range` or `difficulty_sampling"),
        ({"difficulty_sampling": True, "shuffle_dataset": False}, "`shuffle_dataset=False` keeps the dataset's"),
        ({**SINGLE, "dynamic_sampling": 4}, "`dynamic_sampling` selects prompts whose"),
        ({"balance_ranks": True, "packing_shuffle": True}, "`balance_ranks` moves whole groups between"),
        ({**SINGLE, "replay_buffer_size": 2}, "`replay_buffer_size` selects prompts whose"),
        ({**STEPS, "reward_running_scale": True}, "reads rewards of steps. `reward_running_scale`, `reward_cl"),
        ({**STEPS, **KL, "kl_estimator": "k1"}, "reads rewards of steps. "),
        *(
            ({**STEPS, **option}, "gives one per token. Use another estimator")
            for option in ({"importance_sampling_level": "sequence"}, {"loss_type": "gmpo"})
        ),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(**options)


@pytest.mark.parametrize("name", ["dynamic_sampling", "replay_buffer_size", "balance_ranks"])
def test_config_refuses_groups_across_processes(name, monkeypatch):
    monkeypatch.setattr(MultimodalGRPOConfig, "world_size", 2)
    batch = {"per_device_train_batch_size": 12, "num_generations": 8}
    config(**batch)
    with pytest.raises(ValueError, match=rf"`{name}` exchanges whole groups of each process.*\(12\).*\(8\)"):
        config(**batch, **{name: 1})


def test_config_of_rloo_corrects_for_vllm_as_that_of_grpo():
    options = {"output_dir": "out", "use_cpu": True, "bf16": False}
    names = [name for name in MultimodalRLOOConfig.__dataclass_fields__ if name.startswith("vllm_importance_sampling")]
    rloo = MultimodalRLOOConfig(**options)
    grpo = MultimodalGRPOConfig(**options)
    assert len(names) == 4 and all(getattr(rloo, name) == getattr(grpo, name) for name in names)
    MultimodalRLOOConfig(**options, vllm_importance_sampling_mode="sequence_truncate")
    for refused, message in (
        ({"mode": "token_mask"}, "must be one of 'sequence_mask', 'sequence_truncate', got 'token_mask'"),
        ({"clip_min": 3.0}, r"clip_min` \(3.0\) must be below"),
        ({"mode": "sequence_truncate", "clip_max": None}, "needs a bound"),
    ):
        named = {f"vllm_importance_sampling_{name}": value for name, value in refused.items()}
        with pytest.raises(ValueError, match=message):
            MultimodalRLOOConfig(**options, **named)


@pytest.mark.parametrize("config_class", [MultimodalGRPOConfig, MultimodalRLOOConfig])
def test_truncated_sampling_is_logged_where_vllm_is_corrected_for(config_class, monkeypatch):
    warned = []
    monkeypatch.setattr(setup.logger, "warning", warned.append)
    cut = {"top_p": 0.9, "generation_kwargs": {"min_p": 0.1}}
    for options in (
        {"use_vllm": True},
        cut,
        {**cut, "use_vllm": True, "vllm_importance_sampling_correction": False},
        {**cut, "use_vllm": True},
    ):
        assert not warned
        setup.warn_of_excluded_tokens(config_class("out", use_cpu=True, bf16=False, **options))
    assert len(warned) == 1 and "With `top_p=0.9` and `min_p=0.1`, vLLM's log-prob" in warned[0]


def test_config_of_rloo_refuses_estimators():
    with pytest.raises(ValueError, match="remove `advantage_estimator`, or use `MultimodalGRPOTrainer`"):
        MultimodalRLOOConfig("out", use_cpu=True, bf16=False, advantage_estimator="rloo")


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"advantage_estimator": "grpo"}, {"advantage_estimator": "group_norm", "kl_in_reward": False}),
        ({"advantage_estimator": "reinforce++"}, {"advantage_estimator": "reinforce"}),
        ({**KL}, {"kl_estimator": "k3", "kl_in_reward": False}),
        ({**KL, "advantage_estimator": "reinforce++_baseline"}, {"kl_estimator": "k2", "kl_in_reward": False}),
        ({**KL, "advantage_estimator": "reinforce"}, {"kl_estimator": "k1", "kl_in_reward": True}),
        ({**KL, "advantage_estimator": "rloo"}, {"kl_estimator": "k1", "kl_in_reward": True}),
        ({**KL, "advantage_estimator": "rloo", "kl_estimator": "k3"}, {"kl_in_reward": False}),
        ({**KL, "kl_estimator": "k1"}, {"kl_in_reward": True}),
        ({**KL, "advantage_estimator": function}, {"kl_in_reward": False, "kl_estimator": "k3"}),
        ({**KL, "advantage_estimator": "rloo", "importance_sampling_level": "sequence"}, {}),
        ({**KL, "advantage_estimator": "rloo", "loss_type": "gmpo"}, {}),
        ({"advantage_estimator": function, "num_generations": 1}, {"num_generations": 1}),
        ({"advantage_estimator": positional}, {"advantage_estimator": positional}),
        ({"advantage_estimator": functools.partial(needs_more, completions=None)}, {}),
        (SINGLE, {"num_generations": 1, "num_generations_eval": 1}),
        ({**SINGLE, "num_generations_eval": 4}, {"num_generations_eval": 4}),
        ({**SINGLE, "eval_strategy": "steps", "per_device_eval_batch_size": 3}, {"num_generations_eval": 1}),
        ({"loss_type": "dual_clip"}, {"delta": 3.0}),
        ({"loss_type": "dual_clip", "delta": 1.5}, {"delta": 1.5}),
        ({"loss_type": "gmpo", "use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"}, {}),
        ({"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_mask"}, {}),
        ({"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_correction": False}, {}),
        ({"delta": 1.1}, {"delta": 1.1}),
        (SUM, {}),
        ({"soft_overlong_cache": 8, "max_completion_length": 8}, {}),
        ({"top_entropy_quantile": 1.0, "gradient_accumulation_steps": 2, "steps_per_generation": 3}, {}),
        (
            {
                "top_entropy_quantile": 0.5,
                "gradient_accumulation_steps": 2,
                "steps_per_generation": 3,
                "num_generations": 3,
                "per_device_train_batch_size": 1,
                "entropy_source": "rollout(scope='micro_batch')",
            },
            {},
        ),
        ({"dynamic_sampling": 4, "replay_buffer_size": 1}, {}),
    ],
)
def test_config_accepts(options, expected):
    args = config(**options)
    assert {name: getattr(args, name) for name in expected} == expected


POLICY_GRADIENTS = [MultimodalGRPOConfig, MultimodalRLOOConfig, MultimodalPPOConfig]


@pytest.mark.parametrize("config_class", [*POLICY_GRADIENTS, MultimodalDPOConfig, MultimodalSFTConfig])
def test_the_best_checkpoint_of_a_policy_gradient_has_the_highest_reward(config_class, caplog):
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "use_cpu": True, "bf16": False}
    args = config_class("out", **options)
    by_reward = config_class in POLICY_GRADIENTS
    expected = ("reward", True) if by_reward else ("loss", False)
    assert (args.metric_for_best_model, args.greater_is_better) == expected
    assert ("the highest `eval_reward`" in caplog.text) == by_reward
    assert config_class("out", **options, metric_for_best_model="loss").greater_is_better is False
    if by_reward:
        with pytest.raises(ValueError, match="learning rate follows the metric of `load_best"):
            config_class("out", **options, lr_scheduler_type="reduce_lr_on_plateau")


@pytest.mark.parametrize("config_class", POLICY_GRADIENTS)
def test_precision_is_what_the_device_has(config_class, monkeypatch, caplog):
    """The default works without a GPU, unlike TRL's."""
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: False)
    monkeypatch.setattr(multimodal_config, "is_torch_bf16_gpu_available", lambda: False)
    assert not config_class("out").bf16
    assert "`bf16` is set to `False`: the run uses float32" in caplog.text
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        config_class("out")
    assert "the launch has `mixed_precision='bf16'`, which the run uses" in caplog.text
    assert "float32." in caplog.text and "the run uses float32" not in caplog.text
    caplog.clear()
    with pytest.raises(ValueError, match="none is here; leave `bf16` out to train in float32"):
        config_class("out", bf16=True)
    assert config_class("out", use_cpu=True).bf16 and not config_class("out", bf16=False).bf16
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr(multimodal_config, "is_torch_bf16_gpu_available", lambda: True)
    assert config_class("out").bf16
    assert not caplog.text


def test_single_completions_train_with_reinforce():
    result = ours(
        num_generations=1,
        advantage_estimator="reinforce",
        reward=rough,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=3,
        objects={"eval_dataset": dataset().select(range(3))},
        **TWO,
    )
    assert norm(result.update) > 0.01
    moments = result.trainer.micro_batches
    assert len({prompt for moment in moments[:2] for prompt, _ in keys(moment.batch)}) == 8
    for drawn in result.trainer.draws:
        part = [m for m in moments if (m.step, m.training) == (drawn.step, drawn.training)]
        check_advantages(part, drawn, whitened)


STREAM = IterableDataset.from_generator(lambda: iter([{"prompt": "Is there a bird?"}]))


def rollout(prompts, trainer):
    raise AssertionError("never called")


@pytest.mark.parametrize(
    "options, arguments, message",
    [
        ({"dynamic_sampling": 4}, {"rollout_func": rollout}, "set both options to 0, or leave these arguments out"),
        ({"replay_buffer_size": 1}, {"rollout_func": rollout}, "`replay_buffer_size` exchange groups of the dataset"),
        (
            {"dynamic_sampling": 4},
            {"train_dataset": STREAM},
            "`dynamic_sampling` draws prompts in another order, which an iterable dataset doesn't allow; pass a `Data",
        ),
        ({"difficulty_sampling": True}, {"train_dataset": STREAM}, "`difficulty_sampling` draws prompts in another"),
        (
            {"difficulty_sampling": True, "dynamic_sampling_reward": "accuracy"},
            {},
            "`dynamic_sampling_reward` is 'accuracy', but the reward functions are 'length_and_sum'; name one of them",
        ),
    ],
)
def test_trainer_refuses(options, arguments, message, tmp_path):
    model, processor = load(FAMILY)
    arguments = {"train_dataset": dataset(), "processing_class": processor, **arguments}
    args = config(**options, max_steps=1)
    args.output_dir = str(tmp_path)
    with pytest.raises(ValueError, match=message):
        MultimodalGRPOTrainer(model, length_and_sum, args, **arguments)


def test_config_with_a_function_is_saved_by_its_name(tmp_path):
    def half(rewards, **_):
        return rewards / 2

    for estimator, name in ((half, "half"), (lambda rewards, **_: rewards, "<lambda>"), ("grpo", "group_norm")):
        folder = tmp_path / name.strip("<>")
        trainer = make_trainer(
            InjectedOurs,
            FAMILY,
            dataset(),
            folder,
            advantage_estimator=estimator,
            self_check=False,
            max_steps=1,
            save_strategy="steps",
            save_steps=1,
        )
        trainer.train()
        saved = torch.load(folder / "checkpoint-1" / "training_args.bin", weights_only=False)
        assert saved.advantage_estimator == trainer.args.to_dict()["advantage_estimator"] == name
        assert json.loads(trainer.args.to_json_string())["advantage_estimator"] == name
        if callable(estimator):
            assert trainer.args.advantage_estimator is estimator


def test_copies_of_a_config_keep_the_function():
    args = config(advantage_estimator=function)
    for copied in (copy.copy(args), copy.deepcopy(args)):
        assert copied is not args
        assert copied.__dict__.keys() == args.__dict__.keys()
        assert copied.advantage_estimator is function


def test_reward_processing_classes_of_the_user_are_left_alone(tmp_path):
    classes = [None]
    for _ in range(2):
        make_trainer(
            InjectedOurs,
            FAMILY,
            dataset(),
            tmp_path,
            soft_overlong_cache=4,
            objects={"reward_processing_classes": classes},
        )
    assert classes == [None]


def test_replayed_groups_have_a_largest_age(monkeypatch):
    options = {"replay_buffer_size": 4, "shuffle_dataset": False, "max_steps": 3, **TWO}
    faithful = ours(InjectedOurs, reward=rough, **options)
    monkeypatch.setattr(groups, "REPLAY_MAX_AGE", 1)
    forgetful = ours(InjectedOurs, reward=rough, **options)
    assert relative_difference(faithful.update, forgetful.update) > 1e-4


def test_help_names_what_is_listed():
    """The help has each estimator and each loss, with its alias and its paper."""
    (option,) = [each for each in dataclasses.fields(MultimodalGRPOConfig) if each.name == "advantage_estimator"]
    with_critic = {each.name: each for each in dataclasses.fields(MultimodalPPOConfig)}["advantage_estimator"]
    for name, own in ESTIMATORS.items():
        for text in (option.metadata["help"], with_critic.metadata["help"]):
            named = f"{name!r} or {own.alias!r}" if own.alias else repr(name)
            found = f"{named} ({own.paper.title})" in text
            assert found == (own.needs != "critic" or text == with_critic.metadata["help"])
    of_losses = {each.name: each for each in dataclasses.fields(MultimodalGRPOConfig)}["loss_type"].metadata["help"]
    for name, loss in LOSSES.items():
        assert (repr(name) if loss.paper is None else f"{name!r} ({loss.paper.title})") in of_losses


@pytest.mark.parametrize(
    ("register", "table", "names"),
    [
        (policy_loss, LOSSES, {"name": "dapo"}),
        (listed, ESTIMATORS, {"name": "rloo"}),
        (listed, ESTIMATORS, {"name": "grpo"}),  # an alias
        (listed, ESTIMATORS, {"name": "my own", "alias": "gae"}),
        (listed, ALIASES, {"name": "my own", "alias": "reinforce++"}),
        (view, VIEWS, {"name": "mask_patches"}),
    ],
)
def test_a_name_is_registered_once(register, table, names):
    before = dict(table)

    def own(inputs, options):
        return None

    with pytest.raises(
        ValueError, match=re.escape(f"got the name {[*names.values()][-1]!r}, which is registered already")
    ):
        register(**names)(own)
    assert table == before


def test_estimator_and_loss_are_added_in_one_place(monkeypatch):
    """A single listing makes them available as options and trains with them."""
    for known in (ESTIMATORS, LOSSES):
        monkeypatch.setitem(known, "mine", None)
        del known["mine"]  # so that what is listed below is taken back
    monkeypatch.setitem(ALIASES, "my own", None)
    del ALIASES["my own"]

    @listed("mine", alias="my own", needs="group", default_kl_estimator="k2")
    def twice(rewards, group_ids):
        return 2 * ESTIMATORS["dr_grpo"].function(rewards, group_ids)

    @policy_loss("mine", denominator="completions", mode="seq-mean-token-sum")
    def unclipped(inputs, options):
        return LossOutput(-importance_ratios(inputs, options) * inputs.advantages[:, None], {})

    args = config(advantage_estimator="my own", loss_type="mine", beta=0.1)
    assert (args.advantage_estimator, args.kl_in_reward, args.kl_estimator) == ("mine", False, "k2")
    assert "'mine' or 'my own'" in describe_estimators("group")
    with pytest.raises(ValueError, match="`advantage_estimator='mine'` compares the completions"):
        config(advantage_estimator="mine", num_generations=1)
    options = {**TWO, "beta": 0.0, "scale_rewards": "group"}
    # `rloo` with two completions is twice `dr_grpo`, and TRL's `luspo` doesn't clip before the first update
    one = ours(advantage_estimator="mine", loss_type="mine", num_generations=2, max_steps=1, **options)
    same = ours(advantage_estimator="rloo", loss_type="luspo", num_generations=2, max_steps=1, **options)
    assert norm(one.update) > 1e-3 and relative_difference(one.update, same.update) <= 1e-5


@pytest.mark.parametrize("name", house.exported("Config"))
def test_ddp_does_not_search_for_weights_that_the_loss_does_not_reach(name, tmp_path):
    """There are none, so that it would only warn; `distributed/test_mixed_batches.py` trains both ways."""
    config_class = house.exported("Config")[name]
    options = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    assert config_class(str(tmp_path), **options).ddp_find_unused_parameters is False
    assert config_class(str(tmp_path), **options, ddp_find_unused_parameters=True).ddp_find_unused_parameters


@pytest.mark.parametrize("name", house.exported("Config"))
def test_options_of_loaders_that_do_nothing_here_warn_once(name, tmp_path, caplog):
    config_class = house.exported("Config")[name]
    options = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    config_class(str(tmp_path), **options, dataloader_multiprocessing_context="fork")
    assert "dataloader_" not in caplog.text
    given = {
        "dataloader_in_order": False,
        "dataloader_multiprocessing_context": "spawn",
        "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 4,
    }
    config = config_class(str(tmp_path), **options, **given)
    for option, value in given.items():
        assert caplog.text.count(f"`{option}={value!r}` has no effect here") == 1
        # So that a copy of the config doesn't warn again
        assert getattr(config, option) == config_class.__dataclass_fields__[option].default


@pytest.mark.parametrize("bounds", [(3.0, 1.0), (float("nan"), 1.0), (1.0,)])
def test_config_of_rloo_refuses_bounds_of_rewards_in_no_order(bounds):
    with pytest.raises(ValueError, match=r"`reward_clip_range` must be \(min, max\) with min < max"):
        MultimodalRLOOConfig("out", use_cpu=True, bf16=False, reward_clip_range=bounds)
