# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""LightRFT's function for the strategy of a run, which is a config in this package."""

from argparse import Namespace
from typing import Any

from ..algorithms.advantages import as_estimator
from ..spelling import spelled
from ..trainers.ppo_config import MultimodalPPOConfig


# Options of LightRFT's command lines, and their names in the config. Models, sampling and the loop take their options
# as arguments.
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
    Makes the config of a run from the options of one of LightRFT's command lines.

    Options of engines, sharding and batches of processes are ignored, since `accelerate launch` chooses them.

    Args:
        args (`argparse.Namespace`):
            Options by LightRFT's names, see `OPTIONS`; `advantage_estimator` with `gamma` and `lambd`,
            `use_kl_loss` for a KL divergence in the loss, and `use_kl_estimator_k3`. Others, and `None`, are ignored.

    Returns:
        [`MultimodalPPOConfig`]: The strategy of the PPO trainers.

    Raises:
        `ValueError`: If options contradict each other, as for the config itself.
    """
    arguments: dict[str, Any] = {name: value for name, value in vars(args).items() if value is not None}
    options = {OPTIONS[name]: value for name, value in arguments.items() if name in OPTIONS}
    if "value_clip" in arguments:
        options["vf_coef"] = spelled(str(MultimodalPPOConfig.vf_coef), {"cliprange": arguments["value_clip"]})
    if "advantage_estimator" in arguments:
        discounts = {"gamma": "gamma", "lam": "lambd"} if arguments["advantage_estimator"] == "gae" else {}
        settings = {name: float(arguments[option]) for name, option in discounts.items() if option in arguments}
        options["advantage_estimator"] = spelled(arguments["advantage_estimator"], settings)
    uses_k3 = arguments.get("use_kl_estimator_k3")
    if arguments.get("use_kl_loss"):
        estimator = options.get("advantage_estimator", "gae")
        options["kl_estimator"] = "k3" if uses_k3 else as_estimator(estimator).kl_in_loss
    elif uses_k3:
        raise ValueError("`use_kl_estimator_k3` in the reward gives a biased gradient; pass `use_kl_loss`, too.")
    return MultimodalPPOConfig(**options)
