# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""LightRFT's `get_strategy`, which converts command-line options to a [`MultimodalPPOConfig`]."""

from argparse import Namespace
from typing import Any

from ..algorithms.advantages import as_estimator
from ..spelling import join_settings
from ..trainers.ppo_config import MultimodalPPOConfig


# Fields of the config by LightRFT's command-line options. Actors, the trainer and `PPOTrainerVL.fit` take options of
# models, sampling and the loop as arguments instead.
OPTIONS = {
    "save_path": "output_dir",
    "num_episodes": "num_train_epochs",
    "n_samples_per_prompt": "num_generations",
    "micro_train_batch_size": "per_device_train_batch_size",
    "max_epochs": "num_ppo_epochs",
    "actor_learning_rate": "learning_rate",
    "critic_learning_rate": "value_learning_rate",
    "l2": "weight_decay",
    "max_norm": "max_grad_norm",
    "eps_clip": "epsilon",
    "init_kl_coef": "beta",
    **{name: name for name in ("kl_target", "ptx_coef", "seed", "bf16", "gradient_checkpointing", "logging_steps")},
}


def get_strategy(args: Namespace) -> MultimodalPPOConfig:
    """
    Converts the options of a LightRFT command line to the config of a run.

    Args:
        args (`argparse.Namespace`):
            Options by LightRFT's names: the keys of `OPTIONS`, `value_clip`, `advantage_estimator` with `gamma` and
            `lambd`, `use_kl_loss` (KL divergence in the loss), and `use_kl_estimator_k3`. Other options, and options
            that are `None`, are ignored. Pass options of DeepSpeed and FSDP to `accelerate launch`.

    Returns:
        [`MultimodalPPOConfig`]: The config, to pass as `strategy` to the PPO trainers.

    Raises:
        `ValueError`: If options contradict each other, or if the config doesn't allow them.
    """
    options: dict[str, Any] = {name: value for name, value in vars(args).items() if value is not None}
    fields = {OPTIONS[name]: value for name, value in options.items() if name in OPTIONS}
    if "value_clip" in options:
        fields["vf_coef"] = join_settings(str(MultimodalPPOConfig.vf_coef), {"cliprange": options["value_clip"]})
    if "advantage_estimator" in options:
        # LightRFT's options by settings of the estimator
        discount_options = {"gamma": "gamma", "lam": "lambd"} if options["advantage_estimator"] == "gae" else {}
        settings = {name: float(options[option]) for name, option in discount_options.items() if option in options}
        fields["advantage_estimator"] = join_settings(options["advantage_estimator"], settings)
    uses_k3 = options.get("use_kl_estimator_k3")
    if options.get("use_kl_loss"):
        estimator = fields.get("advantage_estimator", "gae")
        fields["kl_estimator"] = "k3" if uses_k3 else as_estimator(estimator).default_kl_estimator
    elif uses_k3:
        raise ValueError("`use_kl_estimator_k3` in the reward gives a biased gradient; pass `use_kl_loss`, too.")
    return MultimodalPPOConfig(**fields)
