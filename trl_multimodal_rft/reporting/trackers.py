# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks of the trackers in `report_to`, without importing them."""

import importlib.util
import json
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


def tracker_names(report_to: str | Sequence[str] | None) -> Sequence[str]:
    """Returns the names in `report_to`: a name, a list, or a list in JSON, in which commands pass one from a file."""
    if isinstance(report_to, str):
        return json.loads(report_to) if report_to.startswith("[") else [report_to]
    return report_to or ()


def check_trackers(report_to: str | Sequence[str] | None) -> None:
    """Raises a `ValueError` for the name of a tracker that doesn't exist, or whose package isn't installed."""
    for name in tracker_names(report_to):
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
