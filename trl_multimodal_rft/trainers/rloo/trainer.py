# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Trainer for REINFORCE Leave-One-Out (RLOO) with media."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import BitsAndBytesConfig, TrainerCallback
from trl import RLOOTrainer
from trl.trainer.grpo_trainer import EnvironmentFactory, RolloutFunc
from trl.trainer.rloo_trainer import RewardFunc

from ...algorithms.losses import LossInputs, LossOptions, LossOutput, rloo_loss
from ...algorithms.metrics import scored_mean, token_mean, weighted_mean
from ...algorithms.signal import CAUSES
from ...engines.samplers import Sampler
from ...forward.scores import Scores
from ...rollout.estimates import Estimates, has_signal, is_std_zero, leave_one_out
from ...rollout.rollout import Rewards, Rollout
from ..base.setup import resolve_config
from ..base.signatures import Adapter, EvalRows, Model, Optimizers, Processor, Rows, arguments_of
from ..sampling.rollout_logs import reward_index
from ..sampling.trainer import MultimodalTrainer
from .config import MultimodalRLOOConfig


class MultimodalRLOOTrainer(MultimodalTrainer, RLOOTrainer):
    """
    Trainer for REINFORCE Leave-One-Out (RLOO) of models that see and hear, see
    [Back to Basics](https://huggingface.co/papers/2402.14740).

    Extends [`~trl.RLOOTrainer`] by audio and video. Loss, metrics and options are TRL's. The media of a prompt are
    decoded, encoded, prefilled and forwarded once for all its completions. Importance ratios weight completions from
    vLLM, as in TRL's GRPO.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to train, as for [`~trl.RLOOTrainer`].
        reward_funcs (`RewardFunc` or `list[RewardFunc]`):
            Reward functions, as for [`MultimodalGRPOTrainer`].
        args ([`MultimodalRLOOConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Dataset with the columns that [`MultimodalGRPOTrainer`] takes.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or `dict` of them, *optional*):
            Dataset to use for evaluation, with the same columns.
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's processor, or a tokenizer for text. If `None`, it is loaded from the model's name.
        reward_processing_classes ([`~transformers.ProcessorMixin`] or `list`, *optional*):
            Processing classes of reward models, as for [`~trl.RLOOTrainer`]. A reward model gets media through its
            processor (see [`~rewards.RewardModel`]), by default the processor in the reward model's folder. With a
            tokenizer, rows with media raise an error.
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            Callbacks to customize the training loop.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler to use.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Quantization of a model given by name.
        peft_config ([`~peft.PeftConfig`], *optional*):
            PEFT configuration used to wrap the model.
        tools (`list[Callable]`, *optional*):
            Tools, as for [`MultimodalGRPOTrainer`].
        rollout_func (`RolloutFunc`, *optional*):
            Custom rollout, as for [`MultimodalGRPOTrainer`].
        environment_factory (`EnvironmentFactory` or `dict[str, EnvironmentFactory]`, *optional*):
            Environments, as for [`MultimodalGRPOTrainer`].
        sampler ([`~engines.samplers.Sampler`], *optional*):
            Sampler of completions, as for [`MultimodalGRPOTrainer`].

    Raises:
        `TypeError`: If `args` is a config of TRL's own.
        `ValueError`: If the processing class pads audio on the wrong side, or if `model` has no name by which to load
            its processor, its reference or vLLM's weights.
    """

    _tag_names = ["trl", "rloo", "trl-multimodal-rft"]
    _loss_needs_reference = False
    _weighs_advantages = True

    def __init__(
        self,
        model: Model,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: MultimodalRLOOConfig | None = None,
        train_dataset: Rows = None,
        eval_dataset: EvalRows = None,
        processing_class: Processor | None = None,
        reward_processing_classes: Processor | list | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: Adapter = None,
        tools: list[Callable] | None = None,
        rollout_func: RolloutFunc | None = None,
        environment_factory: EnvironmentFactory | dict[str, EnvironmentFactory] | None = None,
        sampler: Sampler | None = None,
    ):
        args = resolve_config(MultimodalRLOOConfig, args, model)
        super().__init__(**arguments_of(locals()))
        reward_index(args.dynamic_sampling_reward, self.reward_func_names)  # raises for an unknown name

    # Rollout

    def _score_rollout(self, rollout: Rollout) -> Rollout:
        exchanges_groups = self._batches.groups is not None and self.model.training
        # Scores before the update enter the KL penalty in the reward, and the ratios of groups that are replayed later
        if self.beta != 0 or exchanges_groups:
            rollout = replace(rollout, old_per_token_logps=self._scoring.score(self.model, rollout).logps)
        if self.beta != 0:
            rollout = replace(rollout, ref_per_token_logps=self._scoring.by_reference(rollout).logps)
        return rollout

    def _shape_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        return rewards if self.reward_clip_range is None else rewards.clamp(*self.reward_clip_range)

    def _compare_rewards(
        self,
        rollout: Rollout,
        rewards: Rewards,
        totals: torch.Tensor,
        shaped: torch.Tensor,
        group_ids: torch.Tensor,
    ) -> Estimates:
        penalized = shaped if self.beta == 0 else shaped - self.beta * self._divergence(rollout)
        advantages = leave_one_out(penalized, group_ids, self.normalize_advantages)
        return Estimates(advantages, has_signal(shaped, group_ids), is_std_zero(penalized, self._context.group_size))

    def _divergence(self, rollout: Rollout) -> torch.Tensor:
        """Returns `(N,)` of all ranks, and logs the mean per token."""
        mask = rollout.loss_mask
        kl = (rollout.old_per_token_logps - rollout.ref_per_token_logps) * mask
        self._metric_log.add({"kl": token_mean(kl, mask)})
        return self.accelerator.gather(kl.sum(1))

    def _batch_settings(self) -> dict[str, Any]:
        args = self.args
        settings = super()._batch_settings()
        if args.vllm_importance_sampling_correction and not self.sampler.samples_policy:
            settings["engine_ratios"] = "in the loss"  # older checkpoints have them in the advantages
        return settings

    # Update

    @property
    def _uses_every_score(self) -> bool:
        return self.aux_loss_enabled  # the router's auxiliary loss also counts completions with advantages of 0

    def _loss(self, scores: Scores, inputs: Rollout) -> LossOutput:
        mask = inputs.loss_mask
        causes = inputs.rewards.causes
        ratios = inputs.importance_sampling_ratio
        if ratios is not None and causes is not None:  # a rollout of an older checkpoint has no causes
            causes = torch.where((ratios[:, 0] == 0) & (causes < 0), CAUSES.index("engine_ratios"), causes)
        loss, metrics = rloo_loss(
            LossInputs(
                scores.logps,
                inputs.old_logps,
                # The loss is proportional to the advantages, so weights of advantages are weights of the loss
                inputs.weighted_advantages,
                mask,
                causes=causes,
                n_sampled=inputs.n_sampled,
            ),
            LossOptions(self.epsilon_low, self.epsilon_high),
        )
        if self.aux_loss_enabled:  # `Trainer` divides by the accumulation steps
            loss = loss + self.router_aux_loss_coef * scores.aux_loss
            metrics["aux_loss"] = weighted_mean(scores.aux_loss, len(inputs))
        metrics["entropy"] = scored_mean(scores.entropies, inputs.scored_mask)
        return LossOutput(loss, metrics)
