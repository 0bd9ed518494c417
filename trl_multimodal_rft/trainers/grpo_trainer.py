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
from ..algorithms.entropy import adapted_entropy_coef
from ..algorithms.kl import AdaptiveKLController, FixedKLController, approx_kl
from ..algorithms.losses import LOSSES, LossInputs, LossOutput, Normalizer, entropy_sums, grpo_loss
from ..algorithms.metrics import Window, log_metrics, token_mean
from ..algorithms.shaping import RunningScale
from ..forward.scores import Scores
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
        # What the coefficients of KL divergence and entropy adapt to at the end of the optimizer step
        self._kl_window = Window()
        self._entropy_window = Window()
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
        self._extra_rows = None

    @property
    def kl_coef(self) -> float:
        """Coefficient of the KL divergence now, in the loss or in the rewards."""
        return self._kl_controller.value

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
                log_metrics({"kl": token_mean(kl, mask)}, self.accelerator.gather, self._metrics[mode])
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

    def _loss(self, scores: Scores, inputs: dict[str, Any]) -> LossOutput:
        args, mask = self.args, self._loss_mask(inputs)
        tensors = LossInputs(
            scores.logps,
            old_logps(inputs, scores.logps),
            inputs["advantages"],
            mask,
            weights=self._token_weights(inputs, scores.entropies, mask),
            sampling_logps=inputs.get("sampling_per_token_logps"),
            sampling_ratio=inputs.get("importance_sampling_ratio"),
            ref_logps=inputs["ref_per_token_logps"] if args.beta != 0 and not args.kl_in_reward else None,
            entropies=scores.entropies,
            aux_loss=scores.aux_loss if self.aux_loss_enabled else None,
        )
        output = grpo_loss(
            LOSSES[args.loss_type],
            tensors,
            args.loss_options(),
            self._normalizer(inputs),
            kl_coef=self.kl_coef,
            entropy_coef=self._active_entropy_coef(),
            aux_coef=self.router_aux_loss_coef,
        )
        if self.model.training:
            self._adapt_entropy(tensors)
            self._adapt_kl(scores.logps, mask, inputs)
        if self._extra_scoring_time > 0 and self.accelerator.sync_gradients:
            self._metrics["train" if self.model.training else "eval"]["extra_scoring_time"].append(
                self._extra_scoring_time
            )
            self._extra_scoring_time = 0.0
        return output

    def _normalizer(self, inputs: dict[str, Any]) -> Normalizer:
        tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if self.model.training:  # of the generation batch, where it holds several optimizer steps
            tokens = tokens * self._accumulation() / self.args.steps_per_generation
        return Normalizer(self._accumulation(), self.max_completion_length, tokens)

    def _accumulation(self) -> int:
        return self.current_gradient_accumulation_steps if self.model.training else 1

    def _active_entropy_coef(self) -> float | None:
        """Coefficient of the entropy bonus in this optimizer step; `None` without a bonus."""
        if not self._entropy_bonus_enabled:
            return None
        is_low = not self.use_adaptive_entropy or self._last_world_entropy <= self.args.entropy_target
        return self.entropy_coef if is_low else 0.0

    def _adapt_entropy(self, tensors: LossInputs) -> None:
        """TRL's adaptive coefficient of the entropy bonus, in TRL's attributes, which checkpoints hold."""
        args, is_last = self.args, self.accelerator.sync_gradients
        if self.use_adaptive_entropy:
            self._entropy_window.add(*entropy_sums(tensors))
            if is_last:
                total, count = self._entropy_window.close(self.accelerator.reduce)
                self._last_world_entropy = total / max(count, 1.0)
                self.entropy_coef = adapted_entropy_coef(
                    self.entropy_coef,
                    self._last_world_entropy,
                    target=args.entropy_target,
                    step=args.entropy_coef_delta,
                    smallest=args.entropy_coef_min,
                    largest=args.entropy_coef_max,
                )
        if self._entropy_bonus_enabled and is_last:
            self._metrics["train"]["entropy_coef"].append(self.entropy_coef)

    def _adapt_kl(self, logps: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any]) -> None:
        if self.args.kl_target is None:
            return
        if self._counts_for_kl():
            kl = approx_kl(logps.detach(), inputs["ref_per_token_logps"], mask, self.args.kl_estimator)
            self._kl_window.add(kl.sum(), mask.sum(), len(mask))
        if self.accelerator.sync_gradients:
            sums = self._kl_window.close(self.accelerator.reduce)
            if sums:
                total, n_tokens, n_completions = sums
                estimate = total / max(n_tokens, 1.0)
                self._kl_controller.update(estimate, int(n_completions))
                self._metrics["train"]["kl/estimate"].append(estimate)
            self._metrics["train"]["kl_coef"].append(self.kl_coef)

    def _counts_for_kl(self) -> bool:
        """Whether this micro-batch updates the KL controller (first epoch only)."""
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
