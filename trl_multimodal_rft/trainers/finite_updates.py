# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Updates and weights that aren't finite."""

import math
from contextlib import contextmanager

import torch
from torch import nn

from ..models.trainer_mixin import TrainerMixin
from .checkpoint import local_part


class FiniteMixin(TrainerMixin):
    """Lets a trainer skip updates that aren't finite, and refuse to save weights that aren't."""

    _n_skipped = 0  # successive updates
    _checked_step: int | None = None  # the latest whose weights were looked at before sampling

    def _get_grad_norm(self, model, grad_norm=None):
        """Leaves out an update whose gradient isn't finite."""
        norm = super()._get_grad_norm(model, grad_norm)
        # The same on all processes, which hold the same gradient. DeepSpeed may have no norm, or -1.
        skipped = norm is not None and not (math.isfinite(norm) and norm >= 0)
        scaler = self.accelerator.scaler
        if skipped and self.accelerator.mixed_precision == "fp16" and (scaler is None or scaler.get_scale() > 1):
            skipped = False  # the scale of the loss is why; it is lowered, and the step left out, by the scaler
        elif skipped:
            self._skip_update()
        else:
            self._n_skipped = 0
        self._metrics["train"]["skipped_updates"].append(float(skipped))
        return norm

    def _skip_update(self) -> None:
        step = self.state.global_step
        if self.is_deepspeed_enabled:
            if not self.accelerator.optimizer_step_was_skipped:
                raise FloatingPointError(
                    f"DeepSpeed made step {step + 1} with a gradient that isn't finite. Go on from a checkpoint, with "
                    "ZeRO-1, 2 or 3, which leave out such steps."
                )
            self.optimizer.optimizer.overflow = False  # so that the schedule goes on, as without DeepSpeed
        self._n_skipped += 1
        if self._n_skipped > self.args.max_skipped_updates:
            raise FloatingPointError(
                f"The gradient of {self._n_skipped} updates in a row isn't finite. Look for what changed before step "
                f"{step - self._n_skipped + 2}; a lower `learning_rate` or `max_grad_norm` may help."
            )
        self.optimizer.zero_grad()  # a step without gradients changes neither weights nor the optimizer

    def _check_weights(self, folder: str | None) -> None:
        """Refuses to save what can't be trained or used any more. All processes have to call this."""
        self._refuse_broken(f"the model isn't saved in {folder or self.args.output_dir!r}; what is saved there stays")

    def _check_policy(self) -> None:
        """Refuses to sample from weights that aren't finite, once for each update. All processes have to call this."""
        if self._checked_step != self.state.global_step:
            self._refuse_broken("no completions can be sampled")
            self._checked_step = self.state.global_step

    @torch.no_grad()
    def _refuse_broken(self, consequence: str) -> None:
        trained = {name: local_part(p) for name, p in self.model.named_parameters() if p.requires_grad}
        trained = {name: value for name, value in trained.items() if value.numel() > 0}
        # The largest weight isn't finite if one isn't
        largest = nn.utils.get_total_norm(trained.values(), math.inf)
        if self._any_process(not largest.isfinite().item()):
            broken = [name for name, value in trained.items() if not value.isfinite().all()]
            raise FloatingPointError(
                f"Weights aren't finite after step "
                f"{self.state.global_step}{f', such as {broken[0]!r}' if broken else ''}, so {consequence}. Go on "
                "from an earlier checkpoint, with a lower `learning_rate` or `max_grad_norm`."
            )

    @contextmanager
    def _naming_broken_logits(self):
        """Names the step and the remedy where torch can't sample from logits."""
        try:
            yield
        except RuntimeError as error:
            if "probability tensor contains" not in str(error):
                raise
            raise FloatingPointError(
                f"Logits aren't finite after step {self.state.global_step}, so no completions can be sampled, "
                "although the trained weights are finite. Frozen weights aren't, or activations overflow "
                f"{self.model.dtype}: load the model with `model_init_kwargs={{'dtype': 'bfloat16'}}` or 'float32', "
                "and set `bf16=True` instead of `fp16=True`."
            ) from error

    def _any_process(self, condition: bool) -> bool:
        return bool(self.accelerator.gather(torch.tensor([condition], device=self.accelerator.device)).any())
