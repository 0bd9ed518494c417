# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the DPO trainer."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from trl import DPOConfig

from ...views.view_options import RejectedView, view_option
from ..base.config_options import UNUSED_IN_READING, Unused, help_from_docstring
from ..base.conflicts import Conflicts, check_conflicts, conflicts_of_noise, conflicts_of_reference
from ..base.multimodal_config import MediaArguments


# Options of TRL that this trainer doesn't use
_UNUSED_OPTIONS = {
    **UNUSED_IN_READING,
    "label_smoothing_factor": Unused((0.0,), "DPO's own option is `label_smoothing`"),
}


def _conflicts_of_view(args: Any) -> Conflicts:
    """Returns conflicts of the settings of `rejected_view`."""
    settings = args.rejected_view_settings
    view = settings.view
    if view is None:
        return []
    return [
        (
            settings.conditional_coef == settings.anchor_coef == 0,
            "`rejected_view` has no effect with `conditional_coef=0` and `anchor_coef=0`; raise one of them.",
        ),
        (
            args.ld_alpha is not None,
            "`ld_alpha` compares the lengths of two completions, but a pair of `rejected_view` has only one; remove "
            "one of these options.",
        ),
        (
            args.precompute_ref_log_probs and view.type.needs_other,
            f"`precompute_ref_log_probs=True` scores views of a row before the run, but {view.type.name!r} takes "
            "media from other rows of the micro-batch; set it to `False`, or choose another `rejected_view`.",
        ),
    ]


@help_from_docstring
@dataclass
class MultimodalDPOConfig(MediaArguments, DPOConfig):
    r"""
    Configuration class for the [`MultimodalDPOTrainer`].

    Holds every argument of [`~trl.DPOConfig`] and of [`MediaArguments`]. TRL's arguments about the preparation of
    datasets and about padding have no effect here, and cause a warning if they are set.

    Parameters:
        remove_unused_columns (`bool`, *optional*, defaults to `False`):
            Whether to remove from the rows the columns that the trainer doesn't use.
        max_length (`int`, *optional*, defaults to `1024`):
            Maximum number of tokens of a prompt and a completion of text together. Longer ones are cut by
            `truncation_mode`, as in [`~trl.DPOConfig`]. With `"keep_start"`, rows whose prompt leaves no token for a
            completion are dropped. Rows with media are never cut or dropped; the metrics `rows/cut` and
            `rows/longer_with_media` count both. `None` takes rows as they are.
        packing (`str`, *optional*, defaults to `"prefix"`):
            `"prefix"` forwards a prompt and its media once for both completions, `"padded"` forwards one row per
            completion. Both give the same loss and gradient. Models that don't support `"prefix"` fall back to
            `"padded"`, with a message.
        self_check (`bool`, *optional*, defaults to `True`):
            Whether to measure, on the first batch and before the first update, that padded and packed rows have the
            same log-probabilities as in the model's own forward of a prompt with one completion, and that
            log-probabilities depend on the media.
        rejected_view (`str`, *optional*):
            View of the media under which the chosen completion counts as rejected, such as `"crop(scale=0.4)"`, see
            [mDPO](https://huggingface.co/papers/2406.11839) and `docs/preference.md`. The loss then also prefers the
            chosen completion with the media to the same completion under the view. Further settings, as in
            `"crop(scale=0.4, conditional_coef=0.5)"`, are `conditional_coef` (1.0), the coefficient of this
            preference, and `anchor_coef` (1.0), the coefficient of a term that keeps rewards of chosen completions
            above `anchor` (0.0). A row without media for the view has neither term.
        media_contribution_steps (`int`, *optional*, defaults to `10`):
            Number of optimizer steps between measurements of the metric `media/contribution`: how far the
            log-probabilities of chosen completions move, in nats per token, when sounds of their prompts become
            silent, and images and videos grey. A measurement takes two forward passes of two completions. The metric
            is a moving average, in which the latest measurement weighs 0.3. Evaluations measure it once. 0 measures
            nothing.

    Raises:
        ValueError: If arguments are out of range, contradict each other or have no effect. The message names them and
            the remedy.
    """

    remove_unused_columns: bool | None = False
    max_length: Annotated[int | None, "[2, inf]"] = 1024
    packing: Literal["prefix", "padded"] = "prefix"
    self_check: bool = True
    rejected_view: str | None = None
    media_contribution_steps: Annotated[int, "[0, inf]"] = 10

    _unused = _UNUSED_OPTIONS
    _conflicts = (conflicts_of_noise, conflicts_of_reference, _conflicts_of_view)

    def __post_init__(self):
        super().__post_init__()
        check_conflicts(self)

    @property
    def rejected_view_settings(self) -> RejectedView:
        """Settings of `rejected_view`, with the view under which chosen completions count as rejected."""
        return view_option(RejectedView, "rejected_view", self.rejected_view)
