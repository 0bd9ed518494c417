# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Schedule of a run's checks, and the fallbacks that follow from their results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import nn

from ..encoding.prompts import EncodedPrompt
from ..families import input_modalities
from ..modalities import MODALITIES
from ..policy import Fallbacks, PolicyForward, modalities_of
from ..progress import print_above_bars
from ..rollout.ranks import any_rank
from ..rollout.rollout import Rollout
from .engine_check import EngineCheck
from .self_check import RunSettings, SelfCheck, check_conversation, run_self_check


logger = get_logger(__name__)

_WEIGHT = 0.3  # of the latest measurement in the moving average of the contribution of media


class Checks:
    """
    Checks of a run's policy and engine.

    The policy is checked on the first prompts, on new modalities and on media of tools. Fallbacks that a check finds
    necessary go into the policy. The main process of each node prints results.
    """

    def __init__(self, policy: PolicyForward, accelerator: Accelerator):
        self.policy = policy
        self.accelerator = accelerator
        self.self_check: SelfCheck | None = None
        self.has_checked_logps = False  # whether sampled tokens were checked to have log-probabilities
        self.has_warned_of_logps = False  # whether the run has warned of sampled tokens without a log-probability
        self._engine_check: EngineCheck | None = None
        self._contributions: dict[str, float] = {}  # moving averages of the contribution of media, by metric

    def on_prompts(
        self,
        model: nn.Module,
        messages: Sequence[Any],
        prompts: list[EncodedPrompt],
        settings: Callable[[], RunSettings],
    ) -> None:
        """
        Runs the self-check on the first prompts, and again on the first prompts with an unmeasured modality. The
        prompts were encoded from `messages`. If the check runs, `settings` returns the settings of the run.
        """
        self._check_new_modalities(
            model,
            prompts,
            lambda media_effects: run_self_check(self.policy, model, prompts, messages, settings(), media_effects),
        )

    def on_rows(self, check: Callable[..., SelfCheck], model: nn.Module, rows: Sequence[EncodedPrompt]) -> None:
        """Runs `check`, of [`~checks.sequence_check`], on the first rows, and again on rows with a new modality."""
        self._check_new_modalities(model, rows, lambda media_effects: check(self.policy, model, rows))

    def _check_new_modalities(
        self, model: nn.Module, prompts: Sequence[EncodedPrompt], measure: Callable[[dict[str, float]], SelfCheck]
    ) -> None:
        check = self.self_check
        if check is not None:
            # Modalities that the model takes, and whose effect isn't measured yet
            new_modalities = {modality for modality in MODALITIES if modality not in check.media}
            new_modalities &= set(input_modalities(self.policy.unwrapped(model)))
            if not new_modalities or not any_rank(self.accelerator, bool(modalities_of(prompts) & new_modalities)):
                return
        media_effects = {} if check is None else check.media
        self.self_check = measure(media_effects)
        self.self_check.media = {**media_effects, **self.self_check.media}
        self.policy.fallbacks = self.self_check.fallbacks
        self._show()

    def on_tool_media(
        self, model: nn.Module, prompts: list[EncodedPrompt], ids: list[list[int]], has_engine_positions: bool
    ) -> None:
        """
        Measures the first completion with media that a tool returned. `ids` holds each completion's token ids, and
        `has_engine_positions` tells whether the sampling engine computed the prompts' positions.
        """
        check = self.self_check
        if check is None or check.conversation is not None:  # no self-check, or measured already
            return
        result = check_conversation(self.policy, model, prompts, ids, has_engine_positions)
        if result is not None:
            check.conversation, self.policy.fallbacks = result
            check.fallbacks = self.policy.fallbacks
            self._show()

    def on_engine(
        self,
        model: nn.Module,
        step: int,
        rollout: Rollout,
        dtype: torch.dtype,
        logit_bias: dict[int, float],
        has_tools: bool,
    ) -> None:
        """
        Compares an engine with the policy on the first rollout, after updates (`step` counts them), and, if the
        run `has_tools`, after media of tools. `dtype` and `logit_bias`, by token, are the engine's.
        """
        check = self.self_check
        assert check is not None
        if self._engine_check is None or self._engine_check.check is not check:
            self._engine_check = EngineCheck(self.policy, check, dtype, logit_bias)
        batch = rollout.completions, rollout.loss_mask, rollout.sampling_per_token_logps
        is_new = self._engine_check.run(model, step, *batch)
        if has_tools:
            is_new = self._engine_check.run_after_tools(model, *batch) or is_new
        if is_new:
            self._show()

    def smoothed(self, contributions: Mapping[str, float]) -> dict[str, float]:
        """Returns moving averages of [`~checks.media_contribution.media_contribution`], which measures few prompts."""
        for name, value in contributions.items():
            average = self._contributions.get(name, value)
            self._contributions[name] = average + _WEIGHT * (value - average)
        return {name: self._contributions[name] for name in contributions}

    def state_dict(self) -> dict[str, Any]:
        """Returns the results of the self-check, the fallbacks that followed from them, and moving averages."""
        check = self.self_check
        return {
            "self_check": None if check is None else asdict(check),
            "fallbacks": asdict(self.policy.fallbacks),
            "contributions": self._contributions,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The options of this run may forbid decoding graphs that the saved run allowed
        allows_graph = self.policy.fallbacks.graph
        self.policy.fallbacks = Fallbacks(**state["fallbacks"])
        self.policy.fallbacks.graph &= allows_graph
        self._contributions = dict(state.get("contributions", {}))  # earlier checkpoints have none
        if state["self_check"] is not None:
            fields: dict[str, Any] = {**state["self_check"], "fallbacks": self.policy.fallbacks}
            self.self_check = SelfCheck(**fields)

    def _show(self) -> None:
        logger.info(str(self.self_check))
        if self.accelerator.is_local_main_process:
            print_above_bars(str(self.self_check))
