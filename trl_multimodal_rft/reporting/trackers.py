# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks of the trackers in `report_to`, without importing them."""

import importlib.util
from collections.abc import Sequence

from ..spelling import did_you_mean


# Modules of which a tracker needs one. Those without any depend on more than a module, and are checked when they start
_MODULES: dict[str, tuple[str, ...]] = {
    "clearml": ("clearml",),
    "codecarbon": ("codecarbon",),
    "comet_ml": ("comet_ml",),
    "dagshub": ("dagshub",),
    "dvclive": ("dvclive",),
    "flyte": ("flytekit",),
    "mlflow": ("mlflow",),
    "neptune": ("neptune",),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
    "azure_ml": (),
    "kubeflow": (),
}


def check_trackers(report_to: str | Sequence[str] | None) -> None:
    """Raises a `ValueError` for the name of a tracker that doesn't exist, or whose package isn't installed."""
    names = [report_to] if isinstance(report_to, str) else report_to or ()
    for name in names:
        if name in ("all", "none"):
            continue
        if name not in _MODULES:
            near = did_you_mean(name, _MODULES) or f" Name one of {', '.join(_MODULES)}."
            raise ValueError(f"`report_to` names {name!r}, which is no tracker.{near}")
        modules = _MODULES[name]
        if modules and not any(importlib.util.find_spec(module) for module in modules):
            raise ValueError(
                f"`report_to` names {name!r}, which isn't installed: `pip install {modules[0]}`, or leave it out."
            )
