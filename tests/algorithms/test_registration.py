# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Properties of what users register are checked by their annotations; words and numbers of inherited options, too."""

import math

import pytest

from trl_multimodal_rft import MultimodalDPOConfig, MultimodalGRPOConfig, MultimodalKTOConfig, MultimodalSFTConfig
from trl_multimodal_rft.algorithms import estimators, loss_types
from trl_multimodal_rft.algorithms.advantages import is_constant
from trl_multimodal_rft.algorithms.estimators import as_estimator, estimator
from trl_multimodal_rft.algorithms.losses import policy_loss
from trl_multimodal_rft.views import views
from trl_multimodal_rft.views.views import view


QUIET = {"use_cpu": True, "bf16": False, "report_to": "none"}


def own(medium=None, rng=None, *, ratio=0.5):
    """A function of the user."""


@pytest.mark.parametrize(
    ("decorator", "properties", "message"),
    [
        (policy_loss, {"mode": "seq-mean-tokens-mean"}, "`mode` of 'own' must be one of .*Did you mean `seq-mean-to"),
        (policy_loss, {"mode": "seq_mean_token_mean"}, "`mode` of 'own' must be one of"),
        (policy_loss, {"denominator": "completion"}, "`denominator` of 'own' must be one of .*`completions`"),
        (policy_loss, {"per_completion": "yes"}, "`per_completion` of 'own' must be `True` or `False`"),
        (policy_loss, {"sequence_levels": True}, "has no setting 'sequence_levels', .*Did you mean `sequence_level`"),
        (estimator, {"needs": "groups"}, "`needs` of 'own' must be one of 'group', 'critic'"),
        (estimator, {"default_kl_estimator": "k9"}, "`default_kl_estimator` of 'own' must be one of"),
        (estimator, {"step_input": "step"}, "`step_input` of 'own' must be one of"),
        (estimator, {"alias": 3}, "`alias` of 'own' can't be 3"),
        (view, {"modalities": ("images",)}, "`modalities` of 'own' must be one of .*Did you mean `image`"),
        (view, {"modalities": "audio"}, "`modalities` of 'own' must be one of"),
        (view, {"strength": "ratios"}, "`strength` of 'own' must be one of .*Did you mean `ratio`"),
        (view, {"needs_other": 2}, "`needs_other` of 'own' must be `True` or `False`"),
    ],
)
def test_properties(decorator, properties, message):
    with pytest.raises(ValueError, match=message):
        decorator("own", **properties)(own)
    assert "own" not in {*estimators.ESTIMATORS, *loss_types.LOSSES, *views.VIEWS}


@pytest.mark.parametrize(
    ("config_class", "name", "values"),
    [
        (MultimodalGRPOConfig, "scale_rewards", ["groupx", "Group", "", 0.5]),
        (MultimodalGRPOConfig, "multi_objective_aggregation", ["sum_then_normalise"]),
        (MultimodalGRPOConfig, "vllm_mode", ["colocated"]),
        (MultimodalGRPOConfig, "vespo_k_pos", [-1.0, math.nan]),
        (MultimodalGRPOConfig, "entropy_coef", [math.nan, math.inf, "0.1"]),
        (MultimodalSFTConfig, "truncation_mode", ["keep_startx", "left"]),
        (MultimodalSFTConfig, "packing_strategy", ["ffd"]),
        (MultimodalSFTConfig, "train_sampling_strategy", ["shuffled"]),
        (MultimodalDPOConfig, "truncation_mode", ["keep-end"]),
        (MultimodalDPOConfig, "label_smoothing", [-0.1, 1.5, math.nan]),
        (MultimodalDPOConfig, "ld_alpha", [2.0, -1, math.nan]),
        (MultimodalDPOConfig, "discopop_tau", [0.0, math.nan]),
        (MultimodalKTOConfig, "desirable_weight", [-1.0, math.nan, math.inf]),
        (MultimodalKTOConfig, "undesirable_weight", ["1"]),
    ],
)
def test_words_and_numbers_of_inherited_options(config_class, name, values, tmp_path):
    config_class(str(tmp_path), **QUIET)
    for value in values:
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            config_class(str(tmp_path), **QUIET, **{name: value})


@pytest.mark.parametrize("value", [True, False, "batch"])
def test_values_that_TRL_converts_stay(value, tmp_path):
    MultimodalGRPOConfig(str(tmp_path), **QUIET, scale_rewards=value)


def test_estimators_that_are_constant(tmp_path):
    assert [name for name in estimators.ESTIMATORS if is_constant(as_estimator(name), 4)] == ["pass_at_k"]
    assert not [name for name in estimators.ESTIMATORS if is_constant(as_estimator(name), 8)]
    options = {**QUIET, "per_device_train_batch_size": 4, "num_generations": 4}
    with pytest.raises(ValueError, match="gives each of 4 completions of a prompt the advantage 0, whatever"):
        MultimodalGRPOConfig(str(tmp_path), **options, advantage_estimator="pass_at_k")
    MultimodalGRPOConfig(str(tmp_path), **options, advantage_estimator="pass_at_k(k=3)")
