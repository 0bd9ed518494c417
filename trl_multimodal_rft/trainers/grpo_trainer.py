# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).

"""GRPO and its relatives: other advantages, losses and KL terms, token filtering, resampling and replay."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.grpo_trainer import EnvironmentFactory, RewardFunc, RolloutFunc
from trl.trainer.utils import use_adapter

from ..algorithms.advantages import estimate_advantages, group_statistics
from ..algorithms.kl import AdaptiveKLController, FixedKLController, approx_kl
from ..algorithms.losses import LOSSES, log_ratios
from ..algorithms.shaping import RunningScale
from ..forward.scores import Scores
from ..reporting.pending_metrics import PendingMetrics
from ..rewards.checks import distinct_names
from .group_exchange import GroupExchangeMixin
from .groups import GroupBuffer
from .grpo_config import MultimodalGRPOConfig
from .multimodal import MultimodalMixin
from .setup import resolve_config
from .token_filter import TokenFilterMixin


if TYPE_CHECKING:
    from collections.abc import Callable

    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig


class MultimodalGRPOTrainer(GroupExchangeMixin, TokenFilterMixin, MultimodalMixin, GRPOTrainer):
    """
    Trainer for Group Relative Policy Optimization (GRPO) of models that see and hear, see
    [DeepSeekMath](https://huggingface.co/papers/2402.03300).

    [`~trl.GRPOTrainer`] with audio and video beside images: losses, metrics and options are TRL's own, and the config
    adds some. Each prompt's media is decoded, encoded, prefilled and forwarded once for all its completions.

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
            Reward functions, as for [`~trl.GRPOTrainer`], also by the names that the command takes, such as
            `"accuracy_reward"`. Functions receive the media columns of the dataset as they are. A reward of `NaN`
            raises; return `None` where a reward doesn't apply.
        args ([`MultimodalGRPOConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Dataset with a `prompt` column, conversational or text. Media come in the columns `image` or `images`,
            `audio` or `audios`, `video` or `videos`, or in the messages; `None` marks a row without. Every other
            column is passed to the reward functions.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or `dict` of them, *optional*):
            Dataset to use for evaluation, with the same columns.
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's processor, or a tokenizer for text. If `None`, it is loaded from the model's name.
        reward_processing_classes ([`~transformers.ProcessorMixin`] or `list`, *optional*):
            Processing classes of reward models, as for [`~trl.GRPOTrainer`]. A reward model gets media through its
            processor (see [`~rewards.RewardModel`]), by default the one of its name; with a tokenizer, rows with media
            raise.
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
            Environments, as for [`~trl.GRPOTrainer`]. They are reset with their row, media and all, and may show media
            as tools do.
        ref_model ([`~transformers.PreTrainedModel`], *optional*):
            Reference of the KL divergence, where it isn't what the policy's name loads, or the policy has none.

    Raises:
        `TypeError`: If `args` is a config of TRL's own.
        `ValueError`: If the processing class pads audio on the wrong side, if something is to be loaded by the
            name of a model that has none, or if groups are to be exchanged that can't be.
    """

    _tag_names = ["trl", "grpo", "trl-multimodal-rft"]
    _sampling_logps_expected = _tool_mask_expected = True
    _config_class = MultimodalGRPOConfig

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: MultimodalGRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | DatasetDict
        | IterableDatasetDict
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | ProcessorMixin | list | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: "BitsAndBytesConfig | None" = None,
        peft_config: "PeftConfig | None" = None,
        tools: "list[Callable] | None" = None,
        rollout_func: RolloutFunc | None = None,
        environment_factory: EnvironmentFactory | dict[str, EnvironmentFactory] | None = None,
        ref_model: PreTrainedModel | None = None,
    ):
        args = resolve_config(self._config_class, args, model)
        if ref_model is not None and args.cast_lm_head_to_fp32:
            raise ValueError("`cast_lm_head_to_fp32` casts the head of a reference that is loaded; drop `ref_model`.")
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
            ref_model=ref_model,
        )

        if args.soft_overlong_cache is not None:
            penalty = get_soft_overlong_punishment(args.max_completion_length, args.soft_overlong_cache)
            self.reward_funcs = [*self.reward_funcs, penalty]
            self.reward_processing_classes = [*self.reward_processing_classes, None]
            self.reward_func_names = distinct_names([*self.reward_func_names, "soft_overlong_punishment"])
            self.reward_weights = torch.cat([self.reward_weights, torch.ones(1)])
        self._reward_scale = RunningScale()
        if args.kl_target is None:
            self._kl_controller = FixedKLController(args.beta)
        else:
            self._kl_controller = AdaptiveKLController(args.beta, args.kl_target, args.kl_horizon)
        # TRL's loss has its own KL term, which is k3; all others are ours, and TRL's is then 0
        self._has_own_kl = args.beta != 0 and (
            args.kl_in_reward or args.kl_estimator != "k3" or LOSSES[args.loss_type].is_own
        )
        self._set_kl_coef()
        self._pending = PendingMetrics(self.accelerator)  # metrics of the micro-batch
        self._kl_window = []  # what the controller gets at the end of the optimizer step
        self._exchanges_groups = args.dynamic_sampling or args.replay_buffer_size > 0
        if self._exchanges_groups and (rollout_func is not None or environment_factory is not None):
            raise ValueError(
                "`dynamic_sampling` and `replay_buffer_size` exchange groups of prompts from the dataset, which "
                "`rollout_func` and `environment_factory` make themselves; use one or the other."
            )
        if args.dynamic_sampling and isinstance(train_dataset, IterableDataset):
            raise ValueError(
                "`dynamic_sampling` draws prompts in an order of its own, which an iterable dataset doesn't allow; "
                "pass a `Dataset`."
            )
        self._replay = GroupBuffer(
            args.replay_buffer_size, args.replay_max_age, args.seed + self.accelerator.process_index
        )
        # Groups with signal that the last batch had no room for. While one process lacks groups all draw, so that
        # another's surplus could grow and grow old without a limit.
        self._surplus = GroupBuffer(
            args.per_device_train_batch_size * args.steps_per_generation // args.num_generations
        )
        self._extra_scoring_time = 0.0  # seconds since the last optimizer step
        self._n_extra_prompts = 0  # drawn by dynamic sampling, over all processes

    @property
    def kl_coef(self) -> float:
        """Coefficient of the KL divergence now, in the loss or in the rewards."""
        return self._kl_controller.value

    def _set_kl_coef(self) -> None:
        self.beta = 0.0 if self._has_own_kl else self.kl_coef

    # Rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = self._draw(inputs)
        if self.model.training and self._exchanges_groups:
            output = self._exchange_groups(output)
        return output

    def _draw(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Samples, scores and rewards completions, with the advantages that the config asks for."""
        output, batch = self._roll_out(inputs)
        args, training = self.args, self.model.training
        need_old = callable(args.advantage_estimator) or args.kl_in_reward or (training and self._exchanges_groups)
        need_entropies = training and args.top_entropy_quantile < 1 and args.entropy_source == "rollout"
        # TRL scores with the sampling policy first, if at all
        old: Any = batch.scores[0] if "old_per_token_logps" in output else None
        if (need_old and old is None) or (need_entropies and (old is None or old.entropies is None)):
            old = self._score_rollout(self.model, output, extra=True)
        if need_old:
            output.setdefault("old_per_token_logps", old.logps)
        if need_entropies:
            output["rollout_entropies"] = old.entropies
        if self._has_own_kl:
            output["ref_per_token_logps"] = self._score_reference(output)
        self._set_advantages(output, batch.rewards_per_func)
        return output

    def _calculate_rewards(self, *args):
        rewards = super()._calculate_rewards(*args)
        if self.args.soft_overlong_cache is not None:
            # The last column is the length penalty, which alone doesn't make a completion scorable
            rewards[rewards[:, :-1].isnan().all(dim=1), -1] = torch.nan
        return rewards

    @torch.no_grad()
    def _score_rollout(self, model, inputs: dict[str, Any], extra: bool = False) -> Scores:
        """Scores of a generation batch, or of a part of it; those that TRL doesn't compute are `extra`."""
        start = time.perf_counter()
        args, completion_ids = self.args, inputs["completion_ids"]
        with (
            disable_gradient_checkpointing(self.model, args.gradient_checkpointing_kwargs),
            self._batch_of(inputs) as batch,
        ):
            self._get_per_token_logps_and_entropies(
                model,
                torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                completion_ids.size(1),
                batch_size=args.per_device_train_batch_size
                if self.model.training
                else args.per_device_eval_batch_size,
                compute_entropy=True,
            )
        if extra:
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            self._extra_scoring_time += time.perf_counter() - start
        return batch.scores[-1]

    def _set_advantages(self, output: dict[str, Any], per_func: torch.Tensor) -> None:
        """Replaces TRL's advantages, and marks groups with signal where they are exchanged."""
        args, mode = self.args, "train" if self.model.training else "eval"
        rewards = (per_func * self.reward_weights.to(per_func.device)).nansum(dim=1)
        rewards[per_func.isnan().all(dim=1)] = torch.nan
        if args.reward_running_scale:
            if self.model.training:
                self._reward_scale.update(rewards)
            rewards = rewards / self._reward_scale.std
        if args.reward_clip_range is not None:
            rewards = rewards.clamp(*args.reward_clip_range)
        if args.reward_running_scale or args.reward_clip_range is not None:
            self._metrics[mode]["shaped_reward"].append(rewards.nanmean().item())
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        group_ids = torch.arange(len(rewards), device=rewards.device) // group_size

        local = len(output["completion_ids"])
        rows = slice(self.accelerator.process_index * local, (self.accelerator.process_index + 1) * local)
        if args.multi_objective_aggregation == "normalize_then_sum":
            # TRL's own, but where no reward function tells the completions of a group apart
            statistics = [group_statistics(column, group_ids) for column in per_func.T]
            live = torch.stack([each.live[each.index] for each in statistics]).any(0).to(rewards.device)
            output["advantages"] = torch.where(live[rows], output["advantages"], 0)
            self._log_advantages(self.accelerator.gather(output["advantages"]))
        else:
            mask = self._loss_mask(output)
            n_tokens = mask.size(1)
            advantages = self._estimate_advantages(output, rewards, per_func, group_ids, mask)
            per_completion = LOSSES[args.loss_type].per_completion or args.importance_sampling_level == "sequence"
            if callable(args.advantage_estimator) and advantages.dim() == 2 and per_completion:
                option = "loss_type" if LOSSES[args.loss_type].per_completion else "importance_sampling_level"
                raise ValueError(
                    f"`{option}={getattr(args, option)!r}` takes one advantage per completion; let the advantage "
                    "estimator return (N,)."
                )
            output["advantages"] = advantages[rows] if advantages.dim() == 1 else advantages[rows, :n_tokens]
            self._log_advantages(advantages)
            live = group_statistics(rewards, group_ids)
            live = live.live[live.index].to(rewards.device)
            if args.kl_in_reward:
                kl = approx_kl(output["old_per_token_logps"], output["ref_per_token_logps"], mask, "k1")
                self._pending.add_token_mean(self._metrics[mode]["kl"].append, kl, mask)
                self._pending.gather()
        if self.model.training and self._exchanges_groups:
            output["live"] = live[rows]

    def _estimate_advantages(
        self,
        output: dict[str, Any],
        rewards: torch.Tensor,
        per_func: torch.Tensor,
        group_ids: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Advantages of all processes' completions from their shaped rewards; the mask is that of this process's."""
        args = self.args
        ref_logps = output.get("ref_per_token_logps")
        need_logps = callable(args.advantage_estimator) or args.kl_in_reward
        return estimate_advantages(
            args.advantage_estimator,
            rewards=rewards,
            rewards_per_func=per_func,
            group_ids=group_ids,
            mask=self._gather_rows(mask),
            old_logps=self._gather_rows(output["old_per_token_logps"]) if need_logps else None,
            ref_logps=self._gather_rows(ref_logps) if need_logps and ref_logps is not None else None,
            kl_coef=self.kl_coef if args.kl_in_reward else 0.0,
            scale=args.scale_rewards,
            norm_level=args.norm_level,
            weight=args.cpgd_weight,
        )

    def _log_advantages(self, advantages: torch.Tensor) -> None:
        """Puts what is trained on into the table of completions, per token as their mean."""
        logged = self._logs["advantages"]
        values = advantages if advantages.dim() == 1 else advantages.mean(dim=1)
        for _ in range(min(len(values), len(logged))):
            logged.pop()
        logged.extend(values.tolist())

    def _gather_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Rows of all processes, padded on the right."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(values.contiguous(), dim=1))

    def _score_reference(self, inputs: dict[str, Any], extra: bool = False) -> torch.Tensor:
        if self.ref_model is not None:
            return self._score_rollout(self.ref_model, inputs, extra).logps
        model = self.accelerator.unwrap_model(self.model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self._score_rollout(self.model, inputs, extra).logps

    # Loss

    def compute_loss(self, *args, **kwargs):
        self._pending.clear()
        loss = super().compute_loss(*args, **kwargs)
        self._pending.gather()
        return loss

    def _compute_loss(self, model, inputs):
        """
        The loss of a micro-batch: its scores, then TRL's own code for TRL's loss types, ours for ours.

        TRL's code asks for scores and for high-entropy tokens, and gets those of `self._batch`.
        """
        with self._batch_of(inputs) as batch:
            args, own = self.args, LOSSES[self.args.loss_type].is_own
            mask = self._loss_mask(inputs)
            scores = batch.current = self._score(model, inputs)
            batch.token_weights = self._token_weights(inputs, scores.entropies, mask)
            if own:
                loss = self._own_loss(scores, mask, inputs)
            else:
                batch.hands_out_current = True
                loss = super()._compute_loss(model, inputs)
                batch.hands_out_current = False
            if self._has_own_kl and not args.kl_in_reward and not own:
                kl_loss = self._kl_loss(scores.logps, mask, inputs)
                self._log_policy_loss(kl_loss, beside_trl=True)
                loss = loss + kl_loss
            if args.kl_target is not None and self.model.training:
                self._adapt_kl(scores.logps, mask, inputs)
            if self._extra_scoring_time > 0 and self.accelerator.sync_gradients:
                self._own_metrics["extra_scoring_time"].append(self._extra_scoring_time)
                self._extra_scoring_time = 0.0
            return loss

    def _own_loss(self, scores: Scores, mask: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """A loss type that TRL doesn't have, with the terms of those it has: KL, entropy bonus, balancing."""
        loss = self._policy_loss(scores.logps, mask, inputs)
        if self._has_own_kl and not self.args.kl_in_reward:
            loss = loss + self._kl_loss(scores.logps, mask, inputs)
        if self._entropy_bonus_enabled:
            self._log_policy_loss(loss)
            loss = loss - self._entropy_bonus(scores.entropies, mask)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * scores.aux_loss / self._accumulation()
            self._pending.add(self._own_metrics["aux_loss"].append, scores.aux_loss, torch.mean)
        self._pending.add_token_mean(self._own_metrics["entropy"].append, scores.entropies, mask)
        return loss

    def _score(self, model, inputs: dict[str, Any]) -> Scores:
        """Scores of a micro-batch, with gradients."""
        completion_ids = inputs["completion_ids"]
        self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            completion_ids.size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
        )
        return self._batch.scores[-1]

    def _policy_loss(self, logps: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """A policy loss that TRL doesn't have, and its metrics."""
        loss_type, options = LOSSES[self.args.loss_type], self.args.loss_options()
        advantages, old = inputs["advantages"], old_logps(inputs, logps)
        correction = inputs.get("importance_sampling_ratio", 1.0)
        if self.off_policy_mask_threshold is not None:
            correction = correction * self.get_off_policy_mask(
                advantages=advantages[:, None] if advantages.dim() == 1 else advantages,
                per_token_logps=logps,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", old),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
        weights = 1.0 if self._batch.token_weights is None else self._batch.token_weights
        per_token = loss_type(logps, old, advantages, mask, options, weights=weights, correction=correction)

        metrics = self._own_metrics
        low, high = loss_type.clipped(log_ratios(logps, old, mask), advantages, options)
        for name, clipped in (("low", low), ("high", high), ("region", low | high)):
            self._pending.add_token_mean(metrics[f"clip_ratio/{name}_mean"].append, clipped.float(), mask)
        for name, clipped, largest in (("low_min", low, False), ("high_max", high, True)):
            per_completion = (clipped * mask).sum(1) / mask.sum(1)
            self._pending.add_extreme(metrics[f"clip_ratio/{name}"].append, per_completion, largest)
        return self._aggregate(per_token, mask, inputs)

    def _kl_loss(self, logps: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """The KL term where it isn't TRL's own."""
        args = self.args
        kl = approx_kl(logps, inputs["ref_per_token_logps"], mask, args.kl_estimator)
        # That of GMPO is plain, as in TRL's trainer for it
        is_corrected = args.use_bias_correction_kl and not LOSSES[args.loss_type].per_completion
        if args.kl_estimator == "k3" and is_corrected:
            kl = kl * log_ratios(logps, old_logps(inputs, logps), mask).exp()
        self._pending.add_token_mean(self._own_metrics["kl"].append, kl, mask)
        return self.kl_coef * self._aggregate(kl, mask, inputs)

    def _entropy_bonus(self, entropies: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The mean entropy of the tokens that are trained on times its coefficient, which may adapt as TRL's does."""
        args, training, weights = self.args, self.model.training, self._batch.token_weights
        weights = mask if weights is None else mask * weights
        sums = torch.stack([(entropies * weights).sum(), weights.sum()])
        active = not self.use_adaptive_entropy or self._last_world_entropy <= args.entropy_target
        coef = self.entropy_coef if active else 0.0
        if training and self.use_adaptive_entropy:
            window = sums.detach()
            self._entropy_window_stats = window + (
                0 if self._entropy_window_stats is None else self._entropy_window_stats
            )
            if self.accelerator.sync_gradients:
                total, count = self.accelerator.reduce(self._entropy_window_stats, reduction="sum").tolist()
                self._entropy_window_stats, self._last_world_entropy = None, total / max(count, 1.0)
                step = (
                    args.entropy_coef_delta
                    if self._last_world_entropy <= args.entropy_target
                    else -args.entropy_coef_delta
                )
                self.entropy_coef = min(max(self.entropy_coef + step, args.entropy_coef_min), args.entropy_coef_max)
        if training and self.accelerator.sync_gradients:
            self._metrics["train"]["entropy_coef"].append(self.entropy_coef)
        return coef * sums[0] / sums[1].clamp(min=1.0) / self._accumulation()

    def _log_policy_loss(self, loss: torch.Tensor, beside_trl: bool = False) -> None:
        """The metric `policy_loss`, which TRL has with an entropy bonus; or what comes to TRL's."""
        if not self._entropy_bonus_enabled:
            return
        # Like TRL, before the division by accumulation steps where the loss type has it
        scale = self._accumulation() if LOSSES[self.args.loss_type].is_mean else 1
        logged = self._own_metrics["policy_loss"]
        take = (lambda mean: logged.append(logged.pop() + mean)) if beside_trl else logged.append
        self._pending.add(take, scale * loss, torch.mean)

    @property
    def _own_metrics(self) -> dict[str, list[float]]:
        return self._metrics["train" if self.model.training else "eval"]

    def _aggregate(self, values, mask, inputs) -> torch.Tensor:
        """Averages over tokens and completions with the denominators that TRL gives the loss type."""
        tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if self.model.training:  # of the generation batch, where it holds several optimizer steps
            tokens = tokens * self._accumulation() / self.args.steps_per_generation
        return LOSSES[self.args.loss_type].average(
            values,
            mask,
            accumulation=self._accumulation(),
            length_limit=self.max_completion_length,
            batch_tokens=tokens,
        )

    def _accumulation(self) -> int:
        return self.current_gradient_accumulation_steps if self.model.training else 1

    def _adapt_kl(self, logps, mask, inputs) -> None:
        if self._counts_for_kl():
            kl = approx_kl(logps.detach(), inputs["ref_per_token_logps"], mask, self.args.kl_estimator)
            self._kl_window.append(torch.stack([kl.sum(), mask.sum().float(), mask.new_tensor(len(mask)).float()]))
        if self.accelerator.sync_gradients:
            if self._kl_window:
                window = self.accelerator.reduce(torch.stack(self._kl_window).sum(0), reduction="sum")
                total, n_tokens, n_completions = window.tolist()
                estimate = total / max(n_tokens, 1.0)
                self._kl_controller.update(estimate, int(n_completions))
                self._metrics["train"]["kl/estimate"].append(estimate)
                self._set_kl_coef()
                self._kl_window.clear()
            self._metrics["train"]["kl_coef"].append(self.kl_coef)

    def _counts_for_kl(self) -> bool:
        """Whether the controller hears of the completions at hand, which it does in their first epoch."""
        steps = self.args.steps_per_generation
        return self._step % (steps * self.num_iterations) < steps

    # Checkpoints

    def _batches(self) -> dict[str, Any]:
        args = self.args
        filtered = args.top_entropy_quantile < 1
        return {
            **super()._batches(),
            "advantage_estimator": args.to_dict()["advantage_estimator"],
            "entropies": args.entropy_source if filtered else None,
        }

    def _rollout_state(self) -> dict[str, Any]:
        return {
            **super()._rollout_state(),
            "kl_controller": self._kl_controller.state_dict(),
            "reward_scale": self._reward_scale.state_dict(),
            "replay": self._replay.state_dict(),
            "surplus": self._surplus.state_dict(),
            "n_extra_prompts": self._n_extra_prompts,
        }

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        super()._load_rollout_state(state)
        # What the run no longer asks for stays in the checkpoint
        if self.args.kl_target is not None:
            self._kl_controller.load_state_dict(state["kl_controller"])
            self._set_kl_coef()
        self._reward_scale.load_state_dict(state["reward_scale"])
        if state["batches"] == self._batches():
            if self.args.replay_buffer_size > 0:
                self._replay.load_state_dict(state["replay"])
            if self.args.dynamic_sampling:
                self._surplus.load_state_dict(state["surplus"])
        self._n_extra_prompts = state["n_extra_prompts"]


def old_logps(inputs: dict[str, Any], logps: torch.Tensor) -> torch.Tensor:
    """
    Log-probabilities under the policy that sampled, which is the current one in the first update.

    Shapes: `logps` `(B, C)`; returns `(B, C)`.
    """
    given = inputs.get("old_per_token_logps")
    return logps.detach() if given is None else given
