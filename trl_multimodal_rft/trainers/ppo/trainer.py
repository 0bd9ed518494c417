# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Proximal policy optimization (PPO), with policy and critic in one module and one backward."""

import copy
import json
import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel, is_peft_model
from datasets import Dataset
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    BitsAndBytesConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.grpo_trainer import RewardFunc
from trl.trainer.utils import get_config_model_id

from ...algorithms.advantages import gae
from ...algorithms.critic import critic_metrics, ptx_loss, value_loss
from ...algorithms.losses import LossInputs, LossOutput, ratio_metrics
from ...algorithms.metrics import average
from ...algorithms.returns import token_rewards, whiten
from ...data.rows.batches import EndlessRows
from ...data.rows.fingerprint import fingerprint
from ...encoding.supervised import SupervisedEncoder
from ...engines.samplers import Sampler
from ...forward.attention import install_prefix_attention
from ...forward.masks import sharing_obstacle
from ...forward.scores import ScoreRequest, Scores
from ...models.critic import Critic, ValueHead, add_critic, other_family_error, policy_alone
from ...models.modes import checkpoint_activations, fix_encoders
from ...models.parts import freeze_as_built, freeze_backbone
from ...models.wrapped import is_unsharded
from ...reporting.events import EventPart
from ...reporting.model_card import in_code
from ...rollout.estimates import Estimates
from ...rollout.ranks import gather_rows, local_rows
from ...rollout.rollout import Rewards, Rollout, Values
from ...rollout.score import score_values
from ..base.argument_checks import check_arguments
from ..base.dataset_checks import warn_of_unread_media
from ..base.ema import MovingAverage
from ..base.optimizer import freeze_parts, mark_group_parts, two_schedules
from ..base.preparation import compile_models, disable_dropout
from ..base.setup import resolve_config
from ..base.signatures import Adapter, EvalRows, Model, Optimizers, Processor, Rows, arguments_of
from ..checkpoints.files import whole_state_dict
from ..grpo.trainer import MultimodalGRPOTrainer
from .config import MultimodalPPOConfig


# Folders in addition to the policy's files
_CRITIC = "critic"  # in checkpoints and in the final model
_AVERAGE = "ema"  # in the final model


class MultimodalPPOTrainer(MultimodalGRPOTrainer):
    """
    Trainer for Proximal Policy Optimization (PPO) of models that see and hear, see
    [Proximal Policy Optimization Algorithms](https://huggingface.co/papers/1707.06347).

    [`MultimodalGRPOTrainer`] with a critic: advantages come from [GAE](https://huggingface.co/papers/1506.02438)
    instead of a comparison of a prompt's completions, so one completion per prompt is enough. The critic forwards each
    prompt and its media once for all its completions, as the policy does. The critic is a submodule of the policy, so
    that one backward computes the gradients of both. One optimizer trains both, with separate learning rates and
    schedules.
    The critic is saved with the policy, in the folder `critic`. Without this folder, the policy is a plain Hugging
    Face model.

    Example:

    ```python
    from datasets import load_dataset
    from trl_multimodal_rft import MultimodalPPOTrainer
    from trl_multimodal_rft.rewards import accuracy_reward

    dataset = load_dataset("path/to/spoken-questions", split="train")  # columns: prompt, audio, solution

    trainer = MultimodalPPOTrainer(
        model="Qwen/Qwen2-Audio-7B-Instruct",
        reward_funcs=accuracy_reward,
        train_dataset=dataset,
    )
    trainer.train()
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Policy to train, as for [`~trl.GRPOTrainer`].
        reward_funcs (`RewardFunc` or `list[RewardFunc]`):
            Reward functions and reward models, as for [`MultimodalGRPOTrainer`].
        args ([`MultimodalPPOConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Dataset with a `prompt` column and media, as for [`MultimodalGRPOTrainer`].
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or `dict` of them, *optional*):
            Dataset to use for evaluation, with the same columns.
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's processor, or a tokenizer for text. If `None`, it is loaded from the model's name.
        reward_processing_classes (`list`, *optional*):
            Processing classes of reward models, as for [`MultimodalGRPOTrainer`].
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            Callbacks to customize the training loop.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler to use. An optimizer must hold the critic's weights in separate groups, so pass
            the critic as `value_model`.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Quantization of a policy given by name.
        peft_config ([`~peft.PeftConfig`], *optional*):
            PEFT configuration used to wrap the policy. The critic isn't wrapped: all of it is trained, or only a head
            with `shared_trunk`.
        value_model (`str` or [`~transformers.PreTrainedModel`] or [`~models.Critic`], *optional*):
            Model of the policy's family that becomes the critic: a critic, a reward model or a backbone, or its name.
            If `None`, the critic is a copy of the policy, or a head on it with `shared_trunk`.
        ref_model ([`~transformers.PreTrainedModel`], *optional*):
            Reference of the KL divergence, as for [`MultimodalGRPOTrainer`].
        ptx_dataset ([`~datasets.Dataset`], *optional*):
            Dataset for the supervised loss with `ptx_coef`: `prompt` and `completion`, or `messages`, and media
            columns.
        sampler ([`~engines.samplers.Sampler`], *optional*):
            Sampler of completions, as for [`MultimodalGRPOTrainer`].

    Raises:
        `TypeError`: If `args` is a config of TRL's own or of another trainer.
        `ValueError`: If a critic is passed that isn't used or isn't of the policy's family, if the policy can't be
            copied, if there is a supervised dataset without `ptx_coef` or the other way round, if `ptx_coef` is used
            with reentrant checkpointing under DDP or DeepSpeed, or `ema_decay` with ZeRO-3.
    """

    _tag_names = ["trl", "ppo", "trl-multimodal-rft"]
    _name = "PPO"
    _config_class = MultimodalPPOConfig
    _paper = {
        "title": "Proximal Policy Optimization Algorithms",
        "id": "1707.06347",
        "citation": textwrap.dedent("""\
            @article{schulman2017proximal,
                title   = {{Proximal Policy Optimization Algorithms}},
                author  = {John Schulman and Filip Wolski and Prafulla Dhariwal and Alec Radford and Oleg Klimov},
                year    = 2017,
                eprint  = {arXiv:1707.06347},
            }"""),
    }
    _folders_of_model = (_CRITIC,)
    _critic_groups: tuple[bool, ...] = ()  # whether each parameter group of the optimizer is the critic's
    _trainable_parts: frozenset[str] | set[str] = frozenset({"policy", "critic"})  # parts that updates can change

    def __init__(
        self,
        model: Model,
        reward_funcs: RewardFunc | list[RewardFunc],
        args: MultimodalPPOConfig | None = None,
        train_dataset: Rows = None,
        eval_dataset: EvalRows = None,
        processing_class: Processor | None = None,
        reward_processing_classes: Processor | list | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: Adapter = None,
        value_model: str | PreTrainedModel | Critic | None = None,
        ref_model: PreTrainedModel | None = None,
        ptx_dataset: Dataset | None = None,
        sampler: Sampler | None = None,
    ):
        args = resolve_config(self._config_class, args, model)
        arguments = arguments_of(locals(), "value_model", "ptx_dataset")
        check_arguments(value_model=value_model, ptx_dataset=ptx_dataset)
        if value_model is not None and (args.estimator.name != "gae" or args.shared_trunk):
            option = "shared_trunk=True" if args.shared_trunk else f"advantage_estimator={args.advantage_estimator!r}"
            raise ValueError(f"`value_model` was passed, which `{option}` doesn't use; change one of them.")
        if (ptx_dataset is not None) != (args.ptx_coef > 0):
            remedy = "pass `ptx_dataset`" if ptx_dataset is None else "set `ptx_coef` above 0"
            raise ValueError(f"`ptx_dataset` and `ptx_coef` ({args.ptx_coef}) go together; {remedy}.")
        if self._knows_rows:
            warn_of_unread_media(args, {"ptx_dataset": ptx_dataset}, supervised=True)
        super().__init__(**arguments)
        checkpointing_kwargs: Any = args.gradient_checkpointing_kwargs or {}
        is_reentrant = checkpointing_kwargs.get("use_reentrant") and args.gradient_checkpointing
        # DDP and DeepSpeed reduce the gradient of a weight once per backward
        reduces_once = self.is_deepspeed_enabled or (self.accelerator.num_processes > 1 and not self.is_fsdp_enabled)
        if args.ptx_coef > 0 and is_reentrant and reduces_once:
            raise ValueError(
                "`ptx_coef` adds a second forward to each backward. Reentrant checkpointing computes the gradients of "
                "both forwards separately, but DDP and DeepSpeed take a weight's gradient only once per backward. Set "
                "`gradient_checkpointing_kwargs={'use_reentrant': False}`. For an adapter under ZeRO-3, TRL sets "
                "`use_reentrant` to True, so set `gradient_checkpointing=False`."
            )
        if args.ema_decay is not None:
            self.ema = MovingAverage.of(self.model, args.ema_decay, "ema_decay")
        if args.estimator.name == "gae":
            self.critic = self._make_critic(value_model)
            disable_dropout(args, self.critic)
            if args.disable_dropout is None and isinstance(self.critic, Critic):
                fix_encoders(self.critic.model)
            if self.place_model_on_device:
                self.critic.to(args.device)
            # The critic isn't idle if FSDP or ZeRO-3 gathers it with the policy, or if continuous batching casts it
            casts_critic = not self.use_vllm and getattr(self, "continuous_batching_config", None) is not None
            self._idle_critic = self.critic if is_unsharded(self.accelerator) and not casts_critic else None
            # After TRL's constructor, which would put the adapter into the critic, too
            add_critic(self.model, self.critic)
            if self.use_vllm:
                self.vllm_generation.model = policy_alone(self.model)
            if args.gradient_checkpointing and is_peft_model(self.model) and not args.shared_trunk:
                # PEFT switches gradient checkpointing on in the model that it wraps, which lacks the critic
                checkpoint_activations(self.critic.model, args.gradient_checkpointing_kwargs)
        self._ptx_dataset = ptx_dataset
        self._supervised_rows = None if ptx_dataset is None else EndlessRows(ptx_dataset, args.seed)
        for callback in [
            handler for handler in self.callback_handler.callbacks if type(handler) is SyncRefModelCallback
        ]:
            self.remove_callback(callback)
            self.add_callback(_SyncWithoutCritic(self.ref_model, self.accelerator))
        if self.ema is not None:
            self.add_callback(self.ema)

    def _make_critic(self, value_model: str | PreTrainedModel | Critic | None) -> Any:
        policy = self._unwrapped(self.model)
        if self.args.shared_trunk:
            return ValueHead(policy.config.get_text_config().hidden_size)
        if isinstance(value_model, Critic):
            critic = value_model
        elif isinstance(value_model, str):
            critic = Critic.from_pretrained(value_model, type(policy), dtype=policy.dtype)
        elif value_model is not None:
            critic = Critic.from_model(value_model, type(policy))
        elif is_deepspeed_zero3_enabled():
            # Sharded weights can't be copied, so the critic is loaded by the policy's name
            critic = Critic.from_pretrained(get_config_model_id(policy.config), type(policy), dtype=policy.dtype)
        elif getattr(policy, "is_quantized", False):
            raise ValueError(
                "A copy of a quantized policy can't be trained as its critic; set `shared_trunk=True` or pass a "
                "`value_model`."
            )
        else:
            policy_copy = copy.deepcopy(self.model)
            if is_peft_model(policy_copy):
                policy_copy = policy_copy.unload().requires_grad_()  # PEFT froze all weights but its own
                freeze_as_built(policy_copy)
            critic = Critic(policy_copy)
        freeze_backbone(critic.model, self.args.freeze)
        if not sharing_obstacle(critic.model):
            install_prefix_attention(critic.model)
        compile_models(self.accelerator, self.args, critic.model)
        critic_vocab_size, policy_vocab_size = (
            model.config.get_text_config().vocab_size for model in (critic.model, policy)
        )
        if type(critic.model) is not type(policy) or critic_vocab_size != policy_vocab_size:
            class_names = (type(critic.model).__name__, type(policy).__name__)
            raise other_family_error(
                f"{class_names[0]} with {critic_vocab_size} tokens", f"{class_names[1]} with {policy_vocab_size}"
            )
        return critic

    # Rollout

    def _compare_rewards(
        self,
        rollout: Rollout,
        rewards: Rewards,
        totals: torch.Tensor,
        shaped: torch.Tensor,
        group_ids: torch.Tensor,
    ) -> Estimates:
        """Returns GAE's estimates, with the critic's values and returns, or without a critic those of GRPO."""
        if self.critic is None:
            return super()._compare_rewards(rollout, rewards, totals, shaped, group_ids)
        values, bootstrap = self._score_values(rollout)
        local_rewards = local_rows(self.accelerator, shaped, len(rollout))
        rewards_per_token = self._token_rewards(rollout, local_rewards)
        advantages, returns = gae(
            rewards_per_token, values, rollout.loss_mask, bootstrap=bootstrap, **self._estimator.settings
        )
        scorable = (~local_rewards.isnan()).long()
        local_tensors = values, returns, advantages, rollout.loss_mask * scorable[:, None]
        all_values, all_returns, advantages, mask = (gather_rows(self.accelerator, tensor) for tensor in local_tensors)
        self._metric_log.add(critic_metrics(all_values, all_returns, advantages, mask))
        estimates = self._estimates(whiten(advantages, mask), totals, shaped, group_ids)
        return estimates._replace(values=Values(values, returns), scorable=scorable)

    def _token_rewards(self, rollout: Rollout, rewards: torch.Tensor) -> torch.Tensor:
        """Returns `(B, C)` with the KL penalty, from `(B,)`."""
        logps = rollout.old_per_token_logps, rollout.ref_per_token_logps
        coef = self.kl_coef if self._kl_in_reward else 0.0
        return token_rewards(rewards, rollout.loss_mask, *logps, kl_coef=coef)

    @torch.no_grad()
    def _score_values(self, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns values of states before each completion token, `(B, C)`, and after truncated completions, `(B,)`."""
        assert self.critic is not None
        args = self.args
        mask = rollout.completion_mask
        is_cut = mask.any(1) & ~torch.tensor(rollout.source.ended, device=mask.device)
        size = args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size
        with disable_gradient_checkpointing(self.model, args.gradient_checkpointing_kwargs):
            return score_values(
                self._policy, self.model, self.critic, rollout, size, is_cut if args.bootstrap_truncated else None
            )

    # Update

    _ptx_batch: ScoreRequest | None = None  # supervised rows of the micro-batch
    _reorders_iterations = True

    def _loss(self, scores: Scores, inputs: Rollout) -> LossOutput:
        policy_output = super()._loss(scores, inputs)
        if not self.model.training:
            return policy_output
        args = self.args
        mask = inputs.loss_mask
        loss_type = self._policy_loss
        loss_inputs = LossInputs(scores.logps, inputs.old_per_token_logps, inputs.advantages, mask)
        mean_loss = loss_type.mean(policy_output.loss, mask, self._normalizer(inputs))
        metrics = {"policy_loss": mean_loss, **policy_output.metrics, **ratio_metrics(loss_inputs)}
        loss = self._loss_if_updated("policy", policy_output.loss, scores.logps)
        if self.critic is not None:
            mask = mask * inputs.rewards.scorable[:, None]
            targets = inputs.values.old, inputs.values.returns
            value_output = value_loss(scores.values, *targets, mask, args.cliprange_value)
            mean = loss_type.average(value_output.loss, mask, self._normalizer(inputs))
            loss = loss + args.vf_coef * self._loss_if_updated("critic", mean, scores.values)
            metrics |= value_output.metrics
        if scores.supervised is not None and self._ptx_batch is not None:
            ptx_output = ptx_loss(scores.supervised, self._ptx_batch.mask)
            mean = ptx_output.loss / self._n_accumulation_steps()
            loss = loss + args.ptx_coef * self._loss_if_updated("policy", mean, scores.supervised)
            metrics |= ptx_output.metrics
        if self.accelerator.sync_gradients:
            if self.kl_coef != 0 and args.kl_target is None:
                self._metric_log.add({"kl_coef": average(self.kl_coef)}, mode="train")
            if self.critic is not None:
                learning_rate = self.lr_scheduler.get_last_lr()[self._critic_groups.index(True)]
                self._metric_log.add({"value_learning_rate": average(learning_rate)}, mode="train")
        return LossOutput(loss, metrics)

    @property
    def _uses_every_score(self) -> bool:
        return True  # the value loss and metrics of ratios need all scores

    def _score(self, model: nn.Module, rollout: Rollout, **options) -> Scores:
        """One call of the wrapped model scores policy, critic and supervised completions."""
        if self.model.training:
            self._ptx_batch = self._supervised_batch()
            options |= {"critic": self.critic, "supervised": self._ptx_batch}
        return super()._score(model, rollout, **options)

    def _counts_for_kl(self):
        return self._is_updated("policy") and super()._counts_for_kl()

    # Supervised rows

    def _supervised_batch(self) -> ScoreRequest | None:
        """
        Returns this rank's supervised rows for a micro-batch, in an endless shuffled order of all ranks, or `None`
        without `ptx_dataset`.
        """
        if self._supervised_rows is None:
            return None
        n = self.args.ptx_batch_size
        start = (self._step * self.accelerator.num_processes + self.accelerator.process_index) * n
        encoder = self._supervised_encoder()
        prompts, ids, mask = encoder.encode_pairs(self._supervised_rows.at(start, n), self.eos_token_ids)
        device = self.accelerator.device
        return ScoreRequest(prompts, ids.to(device), mask.to(device), packed=False)

    def _supervised_encoder(self) -> SupervisedEncoder:
        return SupervisedEncoder(
            self.processing_class,
            self._unwrapped(self.model),
            template_kwargs={"chat_template": self.chat_template, **self.chat_template_kwargs},
            audio_overlong=self.args.audio_overlong,
            ignored_media_columns=self.args.ignored_media_columns or (),
            media_rules=self.args.rules,
            special_tokens_in_text=self.args.special_tokens_in_text,
        )

    def _row_readers(self):
        encoder = self._supervised_encoder()
        return {
            **super()._row_readers(),
            "ptx_dataset": (self._ptx_dataset, lambda row: encoder.read(row, "split")),
        }

    def _fingerprints(self):
        if self._ptx_dataset is None:
            return super()._fingerprints()
        return {**super()._fingerprints(), "ptx_dataset": fingerprint(self._ptx_dataset, self.args.rules.media_dir)}

    def _batch_settings(self) -> dict[str, Any]:
        return {**super()._batch_settings(), "bootstrap_truncated": self.args.bootstrap_truncated}

    # Optimizer

    def _group_parameters(self, is_new_optimizer: bool) -> None:
        if self.critic is None:
            super()._group_parameters(is_new_optimizer)
        elif not self._critic_groups:
            self._critic_groups = mark_group_parts(
                self.model, self.optimizer, self.critic, self.args, is_new_optimizer
            )
            freeze_parts(self.optimizer, lambda: self._trainable_parts, self._is_updated)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        if self.critic is None:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = two_schedules(self.args, optimizer, self._critic_groups, num_training_steps)
            self._created_lr_scheduler = True
        if not isinstance(self.lr_scheduler, LambdaLR):  # the user or DeepSpeed made it
            raise ValueError(
                f"A {type(self.lr_scheduler).__name__} can't give policy and critic different schedules; remove the "
                "`scheduler` of the DeepSpeed config, or pass a `LambdaLR`."
            )
        return self.lr_scheduler

    def _is_updated(self, part: str) -> bool:
        is_frozen = part == "policy" and self.state.global_step < self.args.freezing_actor_steps
        return part in self._trainable_parts and not is_frozen

    def _loss_if_updated(self, part: str, loss: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """
        Returns the loss of a part if this update trains the part. Otherwise returns 0 with gradients of 0 for the
        part's `scores`, since DDP and DeepSpeed wait for the gradients of all weights.
        """
        return loss if self._is_updated(part) else (0 * scores.nan_to_num()).sum()

    # Critic and average in checkpoints

    @contextmanager
    def ema_weights(self):
        """
        Gives the policy its averaged weights within the context, for evaluation or to save them.

        Raises:
            `ValueError`: If there is no average.
        """
        if self.ema is None:
            raise ValueError("There is no average of the weights; set `ema_decay`.")
        self.ema.follow(self.model)
        with self.ema.averaged_weights():
            yield

    def _save_parts(self, folder: Path, in_checkpoint: bool) -> None:
        if self.critic is not None:
            state = whole_state_dict(self.accelerator, self.critic, self.args.should_save)
            if self.args.should_save:
                self.critic.save_pretrained(folder / _CRITIC, state)
        if self.ema is not None and not in_checkpoint:
            with self.ema_weights():
                Trainer.save_model(self, str(folder / _AVERAGE), _internal_call=True)

    def _load_parts(self, folder: Path) -> None:
        if self.critic is None:
            return
        if not (folder / _CRITIC).is_dir() or not self.critic.load(folder / _CRITIC):
            raise ValueError(f"{folder} has no critic; resume from a checkpoint of PPO with one.")

    def _published_folders(self, model_class: str, repository: str) -> list[tuple[str, str]]:
        folders = []
        if self.args.shared_trunk and self.critic is not None:
            folders.append((_CRITIC, "the critic, which is a head on the policy's last hidden states"))
        elif self.critic is not None:
            name = json.dumps(repository, ensure_ascii=False)
            load_call = (
                f'trl_multimodal_rft.models.Critic.from_pretrained({name}, {model_class}, subfolder="{_CRITIC}")'
            )
            folders.append((_CRITIC, f"the critic, {in_code(load_call)}"))
        if self.ema is not None:
            folders.append((_AVERAGE, f'the average of the policy\'s weights, loaded with `subfolder="{_AVERAGE}"`'))
        return folders


class _SyncWithoutCritic(SyncRefModelCallback):
    """TRL's callback that moves the reference towards the policy, without the critic, a submodule of the policy."""

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: EventPart,
    ):
        super().on_step_end(args, state, control, model=policy_alone(extract_model_from_parallel(model)), **kwargs)
