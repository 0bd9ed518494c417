# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).

"""
GRPO and its relatives: other advantages, losses and KL terms, token filtering, resampling and replay.

In shapes, `N` is the number of completions on all ranks, `B` that of a micro-batch, and `C` that of token columns.
"""

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel, TrainerCallback
from trl import GRPOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.grpo_trainer import EnvironmentFactory, RewardFunc, RolloutFunc

from ...algorithms.advantages import estimate_advantages
from ...algorithms.entropy import adapted_entropy_coef
from ...algorithms.kl import AdaptiveKLController, FixedKLController, approx_kl
from ...algorithms.losses import LossInputs, LossOutput, Normalizer, entropy_sums, grpo_loss
from ...algorithms.metrics import MicroBatchSums, average, nan_mean, token_mean
from ...algorithms.shaping import RunningScale, shape_rewards
from ...engines.samplers import Sampler
from ...forward.scores import Scores
from ...rollout.estimates import Estimates, has_signal, is_std_zero, normalize_then_sum, signal_of_steps
from ...rollout.ranks import gather_rows
from ...rollout.rollout import Rewards, Rollout
from ...rollout.token_filter import TokenFilter
from ..base.setup import resolve_config
from ..base.signatures import Adapter, EvalRows, Model, Optimizers, Processor, Rows, arguments_of
from ..sampling.rollout_logs import reward_index
from ..sampling.trainer import MultimodalTrainer
from .config import MultimodalGRPOConfig
from .loss_views import dependency_head_rule, measure_dependency, weighed_by_dependency, with_view, with_view_term
from .steps import gather_steps


class MultimodalGRPOTrainer(MultimodalTrainer, GRPOTrainer):
    """
    Trainer for Group Relative Policy Optimization (GRPO) of models that see and hear, see
    [DeepSeekMath](https://huggingface.co/papers/2402.03300).

    Extends [`~trl.GRPOTrainer`] by audio and video. Losses, metrics and options are TRL's, and the config adds more.
    The media of a prompt are decoded, encoded, prefilled and forwarded once for all its completions.

    Example:

    ```python
    from datasets import load_dataset
    from trl_multimodal_rft import MultimodalGRPOTrainer
    from trl_multimodal_rft.rewards import accuracy_reward

    dataset = load_dataset("path/to/spoken-questions", split="train")  # columns: prompt, audio, solution

    trainer = MultimodalGRPOTrainer(
        model="Qwen/Qwen2-Audio-7B-Instruct",
        reward_funcs=accuracy_reward,
        train_dataset=dataset,
    )
    trainer.train()
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to train, as for [`~trl.GRPOTrainer`].
        reward_funcs (`RewardFunc` or `list[RewardFunc]`, *optional*):
            Reward functions, as for [`~trl.GRPOTrainer`], or their names on the command line, such as
            `"accuracy_reward"`. Functions receive the media columns of the dataset as they are. A reward of `NaN`
            raises an error; return `None` where a reward doesn't apply.
        args ([`MultimodalGRPOConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Dataset with a `prompt` column, conversational or text. Media come in the columns `image` or `images`,
            `audio` or `audios`, `video` or `videos`, or in the messages; `None` marks a row without media. Every other
            column is passed to the reward functions.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or `dict` of them, *optional*):
            Dataset to use for evaluation, with the same columns.
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's processor, or a tokenizer for text. If `None`, it is loaded from the model's name.
        reward_processing_classes ([`~transformers.ProcessorMixin`] or `list`, *optional*):
            Processing classes of reward models, as for [`~trl.GRPOTrainer`]. A reward model gets media through its
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
            Tools, as for [`~trl.GRPOTrainer`]. They may return images, sounds and videos in content blocks.
        rollout_func (`RolloutFunc`, *optional*):
            Custom rollout, as for [`~trl.GRPOTrainer`]. Prompts hold their media; completions are text.
        environment_factory (`EnvironmentFactory` or `dict[str, EnvironmentFactory]`, *optional*):
            Environments, as for [`~trl.GRPOTrainer`]. They are reset with their row, media included, and may return
            media as tools do.
        ref_model ([`~transformers.PreTrainedModel`], *optional*):
            Reference of the KL divergence, by default the model that the policy's name loads. Pass it if the policy
            has no name, or if another model is the reference.
        sampler ([`~engines.samplers.Sampler`], *optional*):
            Sampler of completions, in place of transformers and vLLM.

    Raises:
        `TypeError`: If `args` is a config of TRL's own.
        `ValueError`: If the processing class pads audio on the wrong side, if the model has no name by which to load
            its processor, its reference or vLLM's weights, or if dynamic sampling or replay can't exchange groups.
    """

    _tag_names = ["trl", "grpo", "trl-multimodal-rft"]
    _config_class = MultimodalGRPOConfig

    def __init__(
        self,
        model: Model,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: MultimodalGRPOConfig | None = None,
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
        ref_model: PreTrainedModel | None = None,
        sampler: Sampler | None = None,
    ):
        args = resolve_config(self._config_class, args, model)
        if ref_model is not None and args.cast_lm_head_to_fp32:
            raise ValueError(
                "`cast_lm_head_to_fp32` casts only the head of a reference that the trainer loads itself; drop "
                "`ref_model`."
            )
        super().__init__(**arguments_of(locals()))

        if args.soft_overlong_cache is not None:
            penalty = get_soft_overlong_punishment(args.max_completion_length, args.soft_overlong_cache)
            self._add_reward("soft_overlong_punishment", penalty)
        self._estimator = args.estimator
        self._policy_loss = args.loss
        self._kl_in_reward = args.kl_in_reward
        self._reward_scale = RunningScale()
        if args.kl_target is None:
            self._kl_controller = FixedKLController(args.beta)
        else:
            self._kl_controller = AdaptiveKLController(args.beta, args.kl_target, args.kl_horizon)
        # Sums over the micro-batches of an optimizer step, by which the coefficients of the KL divergence and of the
        # entropy bonus adapt after the step
        self._kl_sums = MicroBatchSums()
        self._entropy_sums = MicroBatchSums()
        gather = functools.partial(gather_rows, self.accelerator)
        self._token_filter: Any = TokenFilter(args, gather, self.accelerator.process_index)
        # Scale and soft cap of the LM head, to compute divergences; else `None`
        self._head_rule = (
            dependency_head_rule(self._unwrapped(self.model)) if args.loss_view_settings.measures_divergence else None
        )
        self._extra_scoring_time = 0.0  # seconds of scores that TRL doesn't compute, since the last optimizer step
        reward_index(args.dynamic_sampling_reward, self.reward_func_names)  # raises if there is no such name

    @property
    def kl_coef(self) -> float:
        """Current coefficient of the KL divergence, in the loss or in the rewards."""
        return self._kl_controller.value

    # Rollout

    def _roll_out(self, inputs: Sequence[Any]) -> Rollout:
        rollout = super()._roll_out(inputs)
        # The dependency of a token on media is how much its distribution changes under the view
        return rollout if rollout.view.dependency is None else weighed_by_dependency(self._context, rollout)

    def _score_rollout(self, rollout: Rollout) -> Rollout:
        args = self.args
        scores_early = self._batches.groups is not None or self._measures_dependency
        if args.loss_view is not None and self.model.training:
            rollout = with_view(self._prompting, rollout)
        # Advantages, groups that are kept for later updates, and the dependency on media need scores now
        if (scores_early and self.model.training) or args.advantages_read_logps:
            rollout = self._with_old_scores(rollout)
        if args.beta != 0:
            rollout = replace(rollout, ref_per_token_logps=self._scoring.by_reference(rollout).logps)
        return rollout

    def _with_old_scores(self, rollout: Rollout) -> Rollout:
        """Returns a rollout, or a part of it, with log-probabilities, and maybe entropies and dependency on media."""
        # TRL scores a rollout, too, if an update isn't on its last rollout alone, or is corrected for an engine
        trl_scores = self.args.gradient_accumulation_steps % self._batches.n_calls != 0
        is_extra = not (trl_scores or self._sampling.corrects_for_engine(rollout))
        lacks_dependency = self._measures_dependency and rollout.view.prompts and rollout.view.dependency is None
        with self._timing_extra_scoring() if is_extra else nullcontext():
            if lacks_dependency:
                scores, rollout = measure_dependency(self._scoring, rollout, self._head_rule)
            else:
                scores = self._scoring.score(self.model, rollout)
        tokens = rollout.tokens
        if self._filters_by_rollout_entropy and self.model.training:
            tokens = replace(tokens, entropies=scores.entropies)
        return replace(rollout, old_per_token_logps=scores.logps, tokens=tokens)

    @property
    def _filters_by_rollout_entropy(self) -> bool:
        return self.args.top_entropy_quantile < 1 and self.args.entropy_settings.policy == "rollout"

    @property
    def _measures_dependency(self) -> bool:
        return self.args.loss_view is not None and self.args.loss_view_settings.measures_dependency

    def _reward(self, rollout: Rollout) -> Rewards:
        rewards = super()._reward(rollout)
        if self.args.soft_overlong_cache is not None:
            # The last column is the length penalty. A completion without another reward gets no penalty, either
            per_func = rewards.per_func.clone()
            per_func[per_func[:, :-1].isnan().all(dim=1), -1] = torch.nan
            return replace(rewards, per_func=per_func)
        return rewards

    def _estimate(self, rollout: Rollout, rewards: Rewards) -> Rollout:
        rollout = super()._estimate(rollout, rewards)
        if self._kl_in_reward:
            logps = rollout.old_per_token_logps, rollout.ref_per_token_logps
            kl = approx_kl(*logps, rollout.loss_mask, "k1")
            self._metric_log.add({"kl": token_mean(kl, rollout.loss_mask)})
        return rollout

    def _shape_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        args = self.args
        if args.reward_running_scale and self.model.training:
            self._reward_scale.update(rewards)
        scale = self._reward_scale if args.reward_running_scale else None
        shaped = shape_rewards(rewards, scale, args.reward_clip_range)
        if args.reward_running_scale or args.reward_clip_range is not None:
            self._metric_log.add({"shaped_reward": nan_mean(shaped, is_of_all_ranks=True)})
        return shaped

    def _compare_rewards(
        self,
        rollout: Rollout,
        rewards: Rewards,
        totals: torch.Tensor,
        shaped: torch.Tensor,
        group_ids: torch.Tensor,
    ) -> Estimates:
        if self.args.multi_objective_aggregation == "normalize_then_sum":
            return normalize_then_sum(rewards.per_func, self.reward_weights, group_ids, self._context.group_size)
        advantages = self._estimate_advantages(rollout, rewards, shaped, group_ids)
        if self._estimator.step_input:
            return signal_of_steps(advantages, totals, group_ids)
        return self._estimates(advantages, totals, shaped, group_ids)

    def _estimates(
        self, advantages: torch.Tensor, totals: torch.Tensor, shaped: torch.Tensor, group_ids: torch.Tensor
    ) -> Estimates:
        """Returns advantages with the flags of groups, whose rewards differ if there is something to learn."""
        is_constant = is_std_zero(totals, self._context.group_size, self.args.scale_rewards)
        return Estimates(advantages, has_signal(shaped, group_ids), is_constant)

    def _estimate_advantages(
        self, rollout: Rollout, rewards: Rewards, shaped: torch.Tensor, group_ids: torch.Tensor
    ) -> torch.Tensor:
        """Returns `(N,)` or `(N, C)`."""
        args = self.args
        needs_logps = args.advantages_read_logps
        ref_logps = rollout.ref_per_token_logps
        advantages = estimate_advantages(
            args.advantage_estimator if callable(args.advantage_estimator) else self._estimator,
            rewards=shaped,
            rewards_per_func=rewards.per_func,
            group_ids=group_ids,
            mask=gather_rows(self.accelerator, rollout.loss_mask),
            old_logps=gather_rows(self.accelerator, rollout.old_per_token_logps) if needs_logps else None,
            ref_logps=gather_rows(self.accelerator, ref_logps) if needs_logps and ref_logps is not None else None,
            kl_coef=self.kl_coef if self._kl_in_reward else 0.0,
            scale=args.scale_rewards,
            steps=gather_steps(
                rollout,
                rewards,
                self._estimator,
                self.reward_weights,
                has_tools=bool(self.tools),
                is_first_batch=rollout.step == 0 and self.model.training,
            ),
        )
        per_completion = self._policy_loss.per_completion or args.importance_sampling_level == "sequence"
        if callable(args.advantage_estimator) and advantages.dim() == 2 and per_completion:
            option = "loss_type" if self._policy_loss.per_completion else "importance_sampling_level"
            raise ValueError(
                f"`{option}={getattr(args, option)!r}` takes one advantage per completion; let the advantage "
                "estimator return (N,)."
            )
        return advantages

    @contextmanager
    def _timing_extra_scoring(self):
        """Adds the duration of the context, in which scores are computed that TRL doesn't compute."""
        start = time.perf_counter()
        yield
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._extra_scoring_time += time.perf_counter() - start

    # High-entropy tokens

    def _on_rollout(self, micro_batches: list[Rollout]) -> list[Rollout]:
        """
        Returns the micro-batches of a new rollout, with weights of tokens if entropies under the sampling policy
        choose them. Those after the first update are scored now. Tokens compete within windows of micro-batches, such
        as 0 and 1, then 2 and 3.
        """
        if not self._filters_by_rollout_entropy:
            return super()._on_rollout(micro_batches)
        window = self._token_filter.window or 1  # `None` if tokens compete within their sequence
        # If tokens of several micro-batches compete, all micro-batches must be scored now. Otherwise, on-policy
        # micro-batches get their entropies from the forward of their update
        first_to_score = 0 if window > 1 else self._batches.n_on_policy
        scored = micro_batches[:first_to_score]
        for part in micro_batches[first_to_score:]:
            scored.append(self._with_old_scores(part) if part.tokens.entropies is None else part)
        for start in range(0, len(scored), window):
            parts = scored[start : start + window]
            if start >= first_to_score or parts[0].tokens.entropies is not None:
                self._token_filter.set_weights(parts, [part.tokens.entropies for part in parts])
        return super()._on_rollout(scored)

    def _on_micro_batch(self) -> None:
        """
        Before an optimizer step, sets the weights of its tokens if the current policy's entropies choose among all
        tokens of the step.
        """
        settings = self.args.entropy_settings
        if not self._token_filter.is_on or (settings.policy, settings.scope) != ("current", "batch"):
            return
        window = self._token_filter.window
        batches = self._batches
        if batches.n_trained % window == 0:  # the first micro-batch of the step
            start = batches.n_trained % self.args.steps_per_generation
            parts = (batches.parts or [])[start : start + window]
            with self._timing_extra_scoring():
                entropies = [self._scoring.score(self.model, part).entropies for part in parts]
            self._token_filter.set_weights(parts, entropies)

    def _token_weights(self, rollout: Rollout, entropies: torch.Tensor) -> torch.Tensor | float:
        """Returns weights `(B, C)`, or 1 for all tokens."""
        if rollout.tokens.weights is not None or not self._token_filter.is_on:
            return 1.0 if rollout.tokens.weights is None else rollout.tokens.weights
        if self._token_filter.is_as_in_trl:  # TRL's method takes the share of tokens to leave out
            return self.get_high_entropy_mask(entropies, rollout.loss_mask, 1 - self.args.top_entropy_quantile)
        weights = self._token_filter.weights(entropies, rollout.loss_mask)
        if self._filters_by_rollout_entropy:
            self._token_filter.keep(rollout, weights)  # for further iterations
        return weights

    # Loss

    def _loss(self, scores: Scores, inputs: Rollout) -> LossOutput:
        args = self.args
        mask = inputs.loss_mask
        tensors = LossInputs(
            scores.logps,
            inputs.old_per_token_logps,
            inputs.advantages,
            mask,
            weights=self._token_weights(inputs, scores.entropies),
            sampling_logps=inputs.sampling_per_token_logps,
            sampling_ratio=inputs.importance_sampling_ratio,
            ref_logps=inputs.ref_per_token_logps if args.beta != 0 and not self._kl_in_reward else None,
            entropies=scores.entropies,
            aux_loss=scores.aux_loss if self.aux_loss_enabled else None,
            scored=inputs.scored_mask,
            causes=inputs.rewards.causes,
            n_sampled=inputs.n_sampled,
        )
        output = grpo_loss(
            self._policy_loss,
            tensors,
            args.loss_options(),
            self._normalizer(inputs),
            kl_coef=self.kl_coef,
            entropy_coef=self._active_entropy_coef(),
            aux_coef=self.router_aux_loss_coef,
        )
        if self.model.training:
            if args.loss_view_settings.has_term:
                output = with_view_term(output, scores, inputs, args, self._normalizer(inputs))
            self._adapt_entropy(tensors)
            self._adapt_kl(scores.logps, mask, inputs)
        if self._extra_scoring_time > 0 and self.accelerator.sync_gradients:
            self._metric_log.add({"extra_scoring_time": average(self._extra_scoring_time)})
            self._extra_scoring_time = 0.0
        return output

    def _weight(self, inputs: Rollout) -> torch.Tensor | float:
        return self._policy_loss.weight(inputs.loss_mask[: inputs.n_counted], self._normalizer(inputs))

    @property
    def _uses_every_score(self) -> bool:
        args = self.args
        # Tokens of completions that aren't forwarded couldn't compete for the highest entropies
        tokens_compete = args.top_entropy_quantile < 1 and args.entropy_settings.scope != "sequence"
        has_view_term = args.loss_view is not None and args.loss_view_settings.has_term
        has_terms = args.beta != 0 or self._entropy_bonus_enabled or self.aux_loss_enabled or has_view_term
        return has_terms or tokens_compete or not self._policy_loss.needs_advantage

    def _normalizer(self, inputs: Rollout) -> Normalizer:
        length = self.max_completion_length
        if not self.model.training:  # tokens of this rank, by which the log weighs the loss
            return Normalizer(1, length, inputs.loss_mask.sum().clamp(min=1))
        # `num_items_in_batch` counts a generation batch of all ranks, which may hold several optimizer steps
        n_tokens = inputs.num_items_in_batch.clamp(min=1) / self.accelerator.num_processes
        n_steps = self._n_accumulation_steps()
        return Normalizer(n_steps, length, n_tokens * n_steps / self.args.steps_per_generation)

    def _n_accumulation_steps(self) -> int:
        return self.current_gradient_accumulation_steps if self.model.training else 1

    def _active_entropy_coef(self) -> float | None:
        if not self._entropy_bonus_enabled:
            return None
        is_low = not self.use_adaptive_entropy or self._last_world_entropy <= self.args.entropy_target
        return self.entropy_coef if is_low else 0.0

    def _adapt_entropy(self, tensors: LossInputs) -> None:
        """Adapts the coefficient of the entropy bonus as TRL does, in TRL's attributes, which checkpoints store."""
        args = self.args
        ends_step = self.accelerator.sync_gradients
        if self.use_adaptive_entropy:
            self._entropy_sums.add(*entropy_sums(tensors))
            if ends_step:
                total, count = self._entropy_sums.pop(self.accelerator.reduce)
                self._last_world_entropy = total / max(count, 1.0)
                self.entropy_coef = adapted_entropy_coef(
                    self.entropy_coef,
                    self._last_world_entropy,
                    target=args.entropy_target,
                    step=args.entropy_coef_delta,
                    min_coef=args.entropy_coef_min,
                    max_coef=args.entropy_coef_max,
                )
        if self._entropy_bonus_enabled and ends_step:
            self._metric_log.add({"entropy_coef": average(self.entropy_coef)}, mode="train")

    def _adapt_kl(self, logps: torch.Tensor, mask: torch.Tensor, inputs: Rollout) -> None:
        """
        Adds a micro-batch to the estimate of the KL divergence. After the last micro-batch of an optimizer step,
        adapts the coefficient.
        """
        if self.args.kl_target is None:
            return
        if self._counts_for_kl():
            kl = approx_kl(logps.detach(), inputs.ref_per_token_logps, mask, self.args.kl_estimator)
            self._kl_sums.add(kl.sum(), mask.sum(), len(mask))
        if self.accelerator.sync_gradients:
            sums = self._kl_sums.pop(self.accelerator.reduce)
            if sums:  # empty in later iterations on the same rollout
                total, n_tokens, n_completions = sums
                estimate = total / max(n_tokens, 1.0)
                self._kl_controller.update(estimate, int(n_completions))
                self._metric_log.add({"kl/estimate": average(estimate)}, mode="train")
            self._metric_log.add({"kl_coef": average(self.kl_coef)}, mode="train")

    def _counts_for_kl(self) -> bool:
        """KL divergences are measured in the first iteration on a rollout."""
        return self._batches.is_first_iteration

    # Checkpoints

    def _batch_settings(self) -> dict[str, Any]:
        args = self.args
        settings = self.args.loss_view_settings
        # The view, and whether the dependency on media is measured by entropies
        view = {} if settings.view is None else {"view": [settings.view.spelling, settings.temperature is not None]}
        return {
            **super()._batch_settings(),
            "advantage_estimator": args.to_dict()["advantage_estimator"],
            "entropies": args.entropy_settings.policy if args.top_entropy_quantile < 1 else None,
            **view,
        }

    def _rollout_state(self) -> dict[str, Any]:
        return {
            **super()._rollout_state(),
            "kl_controller": self._kl_controller.state_dict(),
            "reward_scale": self._reward_scale.state_dict(),
        }

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        super()._load_rollout_state(state)
        # A run without an adaptive coefficient ignores the controller's state in the checkpoint
        if self.args.kl_target is not None:
            self._kl_controller.load_state_dict(state["kl_controller"])
        self._reward_scale.load_state_dict(state["reward_scale"])
