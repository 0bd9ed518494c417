# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""PPO with the interface of the reference system: experience, a buffer, and verbs for each step of the loop."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from accelerate import skip_first_batches
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset, Subset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerState
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..algorithms.losses import LOSSES, explained_variance
from ..data.fetch import EndlessRows
from ..encoding.prompts import EncodedPrompt
from ..forward.scoring import left_pad
from ..models.wrapped import is_whole
from ..trainers.ppo_config import MultimodalPPOConfig
from ..trainers.ppo_trainer import MultimodalPPOTrainer
from ..trainers.random_state import kept_random_state
from .actor_vl import ActorVL
from .bare_inputs import bare_inputs, bare_prompt
from .critic import Critic
from .experience import Experience
from .experience_config import ExperienceConfig, check_options
from .experience_maker import NaiveExperienceMaker
from .experience_media import MEDIA_FIELDS, media_tensors
from .replay_buffer import ReplayBuffer
from .replay_buffer_utils import BufferItem, remove_padding_in_sequences, split_experience_batch


# Options of the config that belong to the rollouts and the loop of `MultimodalPPOTrainer`
_OF_THE_TRAINER = (
    "cache_implementation",
    "chat_template_kwargs",
    "dynamic_sampling",
    "entropy_source",
    "eval_delay",
    "eval_on_start",
    "generation_kwargs",
    "load_best_model_at_end",
    "log_completions",
    "mask_truncated_completions",
    "min_p",
    "multi_objective_aggregation",
    "repetition_penalty",
    "replay_buffer_size",
    "reward_weights",
    "scale_rewards",
    "shared_trunk",
    "sync_ref_model",
    "top_k",
    "top_p",
    "use_transformers_continuous_batching",
    "use_vllm",
)

_WHOLE = (
    "Experience is made and scored with whole weights, which FSDP and ZeRO-3 don't keep; take `MultimodalPPOTrainer`, or "
    "DDP, ZeRO-1 or ZeRO-2."
)

# Metrics that are means over the actions of a micro-batch, and over those that have a reward
_OF_ACTIONS = (
    "approx_kl",
    "clip_ratio/high_mean",
    "clip_ratio/low_mean",
    "clip_ratio/region_mean",
    "entropy",
    "kl",
    "ratio/mean",
)
_OF_REWARDED_ACTIONS = ("value_clip_ratio", "value_loss")

# What the experience maker knows about a sample
_LOGGED = ("reward", "return", "soft_overlong_punishment", "response_length", "truncated", "kl")

# Options of generation that only sampling has
_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


class PPOTrainerVL:
    """
    PPO of models that see, in the steps of the reference system: make experience, put it into a buffer, train on it.

    It holds a [`MultimodalPPOTrainer`], whose loss, optimizer, metrics and checkpoints these steps use. For a run from a
    dataset take that one; this class is for code that handles experience itself, or comes from LightRFT. It runs on one
    process, with DDP and with ZeRO-1 and 2. The critic becomes a part of `actor.model`, so save the policy with
    [`save_model`], which writes both where they belong.

    Args:
        strategy ([`MultimodalPPOConfig`]):
            All options. Those that have an argument here are replaced by it: `beta`, `kl_target`, `kl_horizon`, `ptx_coef`,
            `per_device_train_batch_size`, `epsilon`, `cliprange_value`, `gradient_checkpointing`, `num_ppo_epochs`,
            `max_grad_norm`, `dataloader_pin_memory`, `save_only_model` and `ema_decay`; and `temperature` by the actor's.
            `num_generations` is the number of completions to a prompt. Options of sampling go into `generate_kwargs`; those
            that belong to the rollouts and the loop of [`MultimodalPPOTrainer`] are errors.
        actor ([`~lightrft.ActorVL`]):
            Policy. With `packing_samples`, forwards share a prompt and its media among its completions.
        critic ([`~models.Critic`], *optional*):
            Value model; `None` for estimators without, or for a copy of the policy with `"gae"`.
        reward_model (`torch.nn.Module` or `list`, *optional*):
            Reward models, called as `reward_model(sequences, attention_mask, **media)`, which return `(B,)`.
        initial_model ([`~lightrft.ActorVL`], *optional*):
            Reference of the KL divergence. `None` takes the policy without its adapter if it has one, else there is no
            KL divergence.
        ema_model ([`~lightrft.ActorVL`], *optional*):
            A copy of the policy, which gets the moving average of the weights when [`fit`] ends. `None` keeps no average.
        actor_optim (`torch.optim.Optimizer`, *optional*):
            Optimizer of the policy; `None` makes one as `strategy` says.
        critic_optim (`torch.optim.Optimizer`, *optional*):
            Optimizer of the critic, of the same class. Both become one.
        actor_scheduler (`LambdaLR`, *optional*):
            Schedule of `actor_optim`; `None` makes one as `strategy` says. While the policy is frozen it waits.
        critic_scheduler (`LambdaLR`, *optional*):
            Schedule of `critic_optim`.
        ema_beta (`float`, *optional*, defaults to `0.992`):
            Decay of the moving average.
        init_kl_coef (`float`, *optional*, defaults to `0.001`):
            Coefficient of the KL divergence.
        kl_target (`float`, *optional*):
            KL divergence per token, in nats, that an adaptive coefficient holds.
        kl_horizon (`int`, *optional*, defaults to `10000`):
            Completions over which the coefficient adapts.
        ptx_coef (`float`, *optional*, defaults to `0`):
            Weight of the supervised loss; 0 leaves the supervised rows alone.
        micro_train_batch_size (`int`, *optional*, defaults to `8`):
            Samples of a forward in training, per device.
        buffer_limit (`int`, *optional*, defaults to `0`):
            Samples that the buffer keeps at most, the newest; 0 keeps all.
        buffer_cpu_offload (`bool`, *optional*, defaults to `True`):
            Whether the buffer is on the CPU.
        eps_clip (`float`, *optional*, defaults to `0.2`):
            Clip range of the policy loss.
        value_clip (`float`, *optional*, defaults to `0.2`):
            Clip range of the value loss.
        micro_rollout_batch_size (`int`, *optional*, defaults to `8`):
            Samples that are generated and scored at once, per device.
        gradient_checkpointing (`bool`, *optional*, defaults to `False`):
            Whether activations are computed again in the backward pass.
        max_epochs (`int`, *optional*, defaults to `1`):
            Number of times the buffer is trained on.
        max_norm (`float`, *optional*, defaults to `1.0`):
            Gradient norm of policy and critic together to clip to.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The policy's tokenizer; that of the processor by default.
        processor ([`~transformers.ProcessorMixin`], *optional*):
            The policy's processor. Without it prompts are text.
        prompt_max_len (`int`, *optional*, defaults to `128`):
            Most tokens of a prompt, those of its media included. Longer text loses its beginning; a longer prompt with
            media is an error.
        dataloader_pin_memory (`bool`, *optional*, defaults to `True`):
            Whether what an update needs is pinned on its way from the CPU to a GPU.
        remote_rm_url (`str` or `list[str]`, *optional*):
            Reward servers, see [`~lightrft.experience_maker.NaiveExperienceMaker`].
        reward_fn (`Callable`, *optional*):
            Combines rewards, or is one, see there.
        reward_fn_label_map (`dict`, *optional*):
            Names of the sources of reward, see there.
        reward_recipe (`dict`, *optional*):
            Which sources count for which label, see there.
        save_hf_ckpt (`bool`, *optional*, defaults to `False`):
            Whether to write the models beside each checkpoint, in a folder `hf-checkpoint-...` that `save_total_limit`
            leaves alone.
        disable_ds_ckpt (`bool`, *optional*, defaults to `False`):
            Whether checkpoints hold the models alone, so that a run can't go on from them.
        generate_kwargs:
            Options of sampling, such as `max_new_tokens` (defaults to `max_completion_length`), and `gamma` and `lambd`
            (default to those of `strategy`).

    Raises:
        `TypeError`: If `strategy` is no [`MultimodalPPOConfig`].
        `ValueError`: If an option has no effect here or isn't known, if optimizers or schedules can't become one, if there
            is no source of reward, if a critic, a reference or an average doesn't fit, or if the engine shards parameters.
    """

    # What a batch of tuples holds after the prompts, without and with videos
    _columns = (("images",), ("images", "videos"))

    def __init__(
        self,
        strategy: MultimodalPPOConfig,
        actor: ActorVL,
        critic: Critic | None,
        reward_model: nn.Module | list[nn.Module] | None,
        initial_model: ActorVL | None,
        ema_model: ActorVL | None,
        actor_optim: torch.optim.Optimizer | None,
        critic_optim: torch.optim.Optimizer | None,
        actor_scheduler: LambdaLR | None,
        critic_scheduler: LambdaLR | None,
        ema_beta: float = 0.992,
        init_kl_coef: float = 0.001,
        kl_target: float | None = None,
        kl_horizon: int = 10000,
        ptx_coef: float = 0,
        micro_train_batch_size: int = 8,
        buffer_limit: int = 0,
        buffer_cpu_offload: bool = True,
        eps_clip: float = 0.2,
        value_clip: float = 0.2,
        micro_rollout_batch_size: int = 8,
        gradient_checkpointing: bool = False,
        max_epochs: int = 1,
        max_norm: float = 1.0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: ProcessorMixin | None = None,
        prompt_max_len: int = 128,
        dataloader_pin_memory: bool = True,
        remote_rm_url: str | list[str] | None = None,
        reward_fn: Callable | None = None,
        reward_fn_label_map: dict[str, int] | None = None,
        reward_recipe: dict | None = None,
        save_hf_ckpt: bool = False,
        disable_ds_ckpt: bool = False,
        **generate_kwargs,
    ):
        _check_strategy(strategy, actor, critic)
        if micro_train_batch_size < 1:
            raise ValueError(f"`micro_train_batch_size` must be at least 1, got {micro_train_batch_size}.")
        if tokenizer is None and processor is None:
            raise ValueError("Pass the policy's `processor`, or its `tokenizer` if prompts are text.")
        if initial_model is None and is_peft_model(actor.model):
            initial_model = actor
        has_kl = initial_model is not None and init_kl_coef > 0
        if init_kl_coef < 0:
            raise ValueError(f"`init_kl_coef` must be at least 0, got {init_kl_coef}.")
        if kl_target and not has_kl:
            raise ValueError("`kl_target` needs an `initial_model` to diverge from, and an `init_kl_coef` above 0.")
        gamma, lam = generate_kwargs.pop("gamma", strategy.gamma), generate_kwargs.pop("lambd", strategy.lam)
        check_options(generate_kwargs)
        config = _changed(
            strategy,
            generation_batch_size=None,  # follows from the others
            # Whole groups for any size of a micro-batch, as the trainer has it; experience comes in other batches
            steps_per_generation=strategy.num_generations * strategy.gradient_accumulation_steps,
            eval_strategy="no",  # for the trainer, which has no rows to evaluate on
            data_seed=strategy.seed if strategy.data_seed is None else strategy.data_seed,
            max_completion_length=generate_kwargs.get("max_new_tokens", strategy.max_completion_length),
            temperature=actor.temperature,
            beta=init_kl_coef if has_kl else 0.0,
            kl_estimator=strategy.kl_estimator if has_kl else None,
            kl_in_reward=strategy.kl_in_reward if has_kl else None,
            kl_target=kl_target or None,
            kl_horizon=kl_horizon,
            ptx_coef=ptx_coef,
            per_device_train_batch_size=micro_train_batch_size,
            epsilon=eps_clip,
            cliprange_value=value_clip,
            gradient_checkpointing=gradient_checkpointing,
            activation_checkpointing=gradient_checkpointing,  # its other name
            num_ppo_epochs=max_epochs,
            num_iterations=max_epochs,
            max_grad_norm=max_norm,
            dataloader_pin_memory=dataloader_pin_memory,
            ema_decay=None if ema_model is None else ema_beta,
            save_only_model=disable_ds_ckpt,
            gamma=gamma,
            lam=lam,
        )
        if config.deepspeed_plugin is not None and config.deepspeed_plugin.zero_stage == 3:
            raise ValueError(_WHOLE)
        self.strategy, self.actor, self.ema_model = config, actor, ema_model
        self.tokenizer = processor.tokenizer if tokenizer is None else tokenizer
        self.generate_kwargs = {
            "max_new_tokens": config.max_completion_length,
            **generate_kwargs,
            "gamma": config.gamma,
            "lambd": config.lam,
        }
        self.save_hf_ckpt = save_hf_ckpt
        rows = Dataset.from_list([{"prompt": ""}])  # in the place of those that `fit` takes
        self.trainer = _ExperienceTrainer(
            model=actor,
            reward_funcs=_rewards_of_the_maker,
            args=config,
            train_dataset=rows,
            processing_class=self.tokenizer if processor is None else processor,
            optimizers=_joined(critic, actor_optim, critic_optim, actor_scheduler, critic_scheduler, config),
            value_model=critic,
            ref_model=initial_model.model if has_kl and initial_model is not actor else None,
            ptx_dataset=rows if ptx_coef > 0 else None,
        )
        config.eval_strategy = strategy.eval_strategy
        self.trainer.remove_callback(ProgressCallback)
        if self.trainer.is_fsdp_enabled:
            raise ValueError(_WHOLE)
        if self.trainer._policy.remedies.apart is not None and config.num_generations % micro_rollout_batch_size != 0:
            raise ValueError(
                f"A {actor.config.model_type} mixes media with their padding, so that an experience must hold one prompt; set "
                f"`micro_rollout_batch_size` ({micro_rollout_batch_size}) to `num_generations` ({config.num_generations}) or a "
                "part of it."
            )
        self.critic = self.trainer.critic
        if ema_model is not None:
            _check_average(self.trainer, ema_model)
        if gradient_checkpointing:
            actor.gradient_checkpointing_enable(config.gradient_checkpointing_kwargs)
        reward_models = reward_model if isinstance(reward_model, list) else [reward_model] if reward_model else []
        self.experience_maker = NaiveExperienceMaker(
            actor,
            self.critic,
            [model.to(self.trainer.accelerator.device) for model in reward_models],
            initial_model if has_kl else None,
            self.tokenizer,
            prompt_max_len,
            self.trainer._kl_controller,
            ExperienceConfig(
                advantage_estimator=config.advantage_estimator,
                n_samples_per_prompt=config.num_generations,
                micro_rollout_batch_size=micro_rollout_batch_size,
                norm_level=config.norm_level,
                cpgd_weight=config.cpgd_weight,
                kl_in_reward=bool(config.kl_in_reward),
                soft_overlong_cache=config.soft_overlong_cache,
                reward_running_scale=config.reward_running_scale,
                reward_clip_range=config.reward_clip_range,
                bootstrap_truncated=config.bootstrap_truncated,
                audio_overlong=config.audio_overlong,
                progress=not config.disable_tqdm,
                accelerator=self.trainer.accelerator,
            ),
            remote_rm_url=remote_rm_url,
            reward_fn=reward_fn,
            reward_fn_label_map=reward_fn_label_map,
            reward_recipe=reward_recipe,
            processor=processor,
        )
        self.experience_maker.reward_scale = self.trainer._reward_scale  # which checkpoints hold
        self.replay_buffer = ReplayBuffer(buffer_limit, seed=config.seed, cpu_offload=buffer_cpu_offload)
        self.trainer.replay_buffer = self.replay_buffer
        self.eval_dataloader: DataLoader | None = None
        self._n_micro_batches = 0
        self._counts: list[
            list[float]
        ] = []  # actions, and those with a reward, of the micro-batches that metrics are about
        self._reported_step = 0
        accepted = inspect.signature(type(actor.base_model).forward).parameters
        self._media_names = {field: name for name, field in MEDIA_FIELDS.items() if name in accepted}

    # The loop

    def fit(
        self,
        args: MultimodalPPOConfig,
        prompts_dataloader: DataLoader,
        pretrain_dataloader: DataLoader | None,
        eval_dataloader: DataLoader | None = None,
        consumed_samples: int = 0,
        num_update_steps_per_episodes: int = 1,
    ) -> None:
        """
        Trains: for each batch of prompts makes experience, trains on it, and logs, evaluates and saves when it is time.

        Args:
            args ([`MultimodalPPOConfig`]):
                Length and intervals of the run: `num_train_epochs` (episodes) or `max_steps` (rounded up to whole
                rollouts), `logging_*`, `eval_*`, `save_*` and `resume_from_checkpoint` (a path); usually the `strategy`.
            prompts_dataloader (`DataLoader`):
                Batches of prompts for each process. A batch is a list of rows (`prompt`, media columns, `references`,
                `labels` and others for reward functions), or a tuple of lists: prompts, images, references and labels,
                or prompts, images, videos, references and labels. There, the media of a prompt are a list, one, or `None`.
            pretrain_dataloader (`DataLoader`, *optional*):
                Supervised rows, see `ptx_dataset` of [`MultimodalPPOTrainer`]; its dataset and batch size are used, with
                `ptx_coef` above 0.
            eval_dataloader (`DataLoader`, *optional*):
                Batches as of `prompts_dataloader`, for [`evaluate`].
            consumed_samples (`int`, *optional*, defaults to `0`):
                Prompts, over all processes, to leave out in the beginning. A checkpoint to resume from knows its own.
            num_update_steps_per_episodes (`int`, *optional*, defaults to `1`):
                Optimizer steps of an episode at least. It goes through the prompts as often as that takes.

        Raises:
            `ValueError`: If the samples of a rollout don't fill whole optimizer steps, if the prompts don't fill whole
                batches, or if there are no rows to evaluate on, or none for `ptx_coef`.
            `RuntimeError`: If there have been updates before, which the schedules would not know of.
        """
        trainer = self.trainer
        if trainer.is_prepared:
            raise RuntimeError("There have been updates already, which the schedules belong to; `fit` a new trainer.")
        if args.eval_strategy != "no" and eval_dataloader is None:
            raise ValueError("`eval_strategy` asks for evaluations, so pass an `eval_dataloader`.")
        if args.save_strategy == "best":
            raise ValueError("`save_strategy='best'` isn't there; save 'steps' or 'epoch'.")
        self.eval_dataloader = eval_dataloader
        self._set_supervised_rows(pretrain_dataloader)
        updates, per_rollout = self._rollout_sizes(prompts_dataloader)
        prompts = trainer.accelerator.prepare_data_loader(prompts_dataloader, device_placement=False)
        passes = max(math.ceil(num_update_steps_per_episodes / (updates * len(prompts))), 1)
        rollouts = passes * len(prompts)  # of an episode
        checkpoint = args.resume_from_checkpoint
        if args.max_steps > 0:
            max_steps = math.ceil(args.max_steps / updates) * updates
        else:
            left_out = 0 if checkpoint else consumed_samples // per_rollout
            max_steps = (math.ceil(args.num_train_epochs * rollouts) - left_out) * updates
        self._begin(args, max_steps, checkpoint)
        rollout = trainer.client_states.get("consumed_samples", consumed_samples) // per_rollout

        trainer.control = trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
        hidden = trainer.args.disable_tqdm or not trainer.is_world_process_zero()
        bar = tqdm(total=max_steps, initial=trainer.state.global_step, disable=hidden)
        while trainer.state.global_step < max_steps and not trainer.control.should_training_stop:
            place = rollout % len(prompts)
            prompts.set_epoch(rollout // len(prompts))
            # A pass that begins takes random numbers for its order, one that goes on has taken them before
            if place == 0:
                trainer._load_rng_state(checkpoint)
            for batch in skip_first_batches(prompts, place) if place else prompts:
                if place != 0:
                    trainer._load_rng_state(checkpoint)
                checkpoint = None
                experiences = self.experience_maker.make_experience_list(self._rows(batch), **self.generate_kwargs)
                for experience in experiences:
                    self.replay_buffer.append(experience)
                logs = {f"rollout_{name}": value for name, value in self._rollout_logs(experiences).items()}
                logs |= self.ppo_train(trainer.state.global_step)
                self.replay_buffer.clear()
                rollout += 1
                bar.update(trainer.state.global_step - bar.n)
                consumed, step = {"consumed_samples": rollout * per_rollout}, trainer.state.global_step
                self.save_logs_and_checkpoints(args, step, bar, logs, consumed, rollout / rollouts)
                if rollout % rollouts == 0:
                    self._report(args, "epoch", consumed)
                if step >= max_steps or trainer.control.should_training_stop:
                    break
        bar.close()
        trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        if self.ema_model is not None:
            averages = dict(self.ema_model.model.named_parameters())
            with torch.no_grad(), trainer.ema_weights():
                for name, parameter in trainer.ema._parameters.items():
                    averages[name].copy_(parameter)

    def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
        """
        Trains on the buffer for `max_epochs`, each time in another order.

        Groups of completions to a prompt stay together, so that a forward shares the prompt, unless
        `keep_groups_together=False`.

        Args:
            global_steps (`int`, *optional*, defaults to `0`):
                Optimizer steps so far.

        Returns:
            `dict[str, float]`: Means over the updates (`policy_loss`, `critic_loss`, `actor_lr`, `critic_lr`, `kl`,
            `ptx_loss`, `entropy` and others of the trainer) and statistics of the buffers of all processes: `values`,
            `explained_variance`, and mean, std, min and max of `returns`, `advantages`, `step_reward` and
            `response_length`.

        Raises:
            `ValueError`: If the buffer doesn't fill whole optimizer steps.
        """
        self._prepare()
        trainer, items = self.trainer, self.replay_buffer[:]
        args, n = trainer.args, len(items)
        trainer.state.global_step = global_steps
        size, window = args.per_device_train_batch_size, args.gradient_accumulation_steps
        if n == 0 or n % (size * window) != 0:
            raise ValueError(
                f"The buffer holds {n} samples on this process, which don't fill whole optimizer steps of "
                f"{window} x {size} (`gradient_accumulation_steps` x `micro_train_batch_size`)."
            )
        if self._n_micro_batches % window != 0:
            raise RuntimeError(
                f"An update is half done, after {self._n_micro_batches % window} of {window} micro-batches; give it the others."
            )
        _check_samples(items, "action_mask", *self._fields)
        self._clear_metrics()
        statistics = self._statistics(items)
        n_tokens = trainer.accelerator.reduce(_n_actions(items).to(self.actor.device)).item() / (n // size)
        for epoch in range(args.num_ppo_epochs):
            trainer.is_first_epoch = epoch == 0
            order = self._shuffled(items)
            for start in range(0, n, size * window):
                part = order[start : start + size * window]
                weights = self._entropy_weights(part)
                for first in range(0, len(part), size):
                    micro = slice(first, first + size)
                    self._step(part[micro], weights and weights[micro], n_tokens)
        trainer.is_first_epoch = True
        return statistics | self._status()

    def training_step(
        self, experience: Experience, global_steps: int, entropy_mask: torch.Tensor | None = None
    ) -> dict[str, float]:
        """
        Adds the gradient of a micro-batch for policy and critic, in one backward, and makes an optimizer step after each
        `gradient_accumulation_steps`.

        Args:
            experience ([`~lightrft.experience.Experience`]):
                Micro-batch, padded or packed.
            global_steps (`int`):
                Optimizer steps so far: below `freezing_actor_steps` only the critic moves.
            entropy_mask (`torch.Tensor`, *optional*):
                Weight of each action in the policy loss, `(B, A)`, or a list `(A,)` for packed ones. By default all count,
                or the share of high entropy that `strategy` asks for, in this micro-batch.

        Returns:
            `dict[str, float]`: `policy_loss`, `critic_loss`, `actor_lr`, `critic_lr`, and more of the trainer's metrics.

        Raises:
            `ValueError`: If the experience lacks what the update needs.
            `RuntimeError`: If the micro-batch before began an update of another part.
        """
        return self._one_step(experience, global_steps, entropy_mask, {"policy", "critic"})

    def training_step_actor(
        self, experience: Experience, entropy_mask: torch.Tensor | None = None
    ) -> dict[str, float]:
        """
        Like [`training_step`] for the policy alone. Its optimizer step counts as one, and costs as much.

        Args:
            experience ([`~lightrft.experience.Experience`]):
                Micro-batch.
            entropy_mask (`torch.Tensor`, *optional*):
                Weight of each action in the policy loss, `(B, A)`.

        Returns:
            `dict[str, float]`: Metrics.
        """
        return self._one_step(experience, self.trainer.state.global_step, entropy_mask, {"policy"})

    def training_step_critic(self, experience: Experience) -> dict[str, float]:
        """
        Like [`training_step`] for the critic alone. Its optimizer step counts as one, and costs as much.

        Args:
            experience ([`~lightrft.experience.Experience`]):
                Micro-batch.

        Returns:
            `dict[str, float]`: Metrics.

        Raises:
            `ValueError`: If there is no critic.
        """
        if self.critic is None:
            raise ValueError(f"`advantage_estimator={self.strategy.advantage_estimator!r}` has no critic to train.")
        return self._one_step(experience, self.trainer.state.global_step, None, {"critic"})

    @torch.no_grad()
    def evaluate(
        self, eval_dataloader: Iterable, global_step: int, greedy: bool = True, n_samples_per_prompt: int = 1
    ) -> dict[str, float]:
        """
        Rewards of completions to other prompts. Changes nothing: no weights, no running statistics, no random numbers.

        Args:
            eval_dataloader (`DataLoader`):
                Batches as of the prompts' loader. Processes take turns, so that each prompt counts once.
            global_step (`int`):
                Optimizer steps so far, for the log.
            greedy (`bool`, *optional*, defaults to `True`):
                Whether to take the likeliest tokens, or to sample as in training.
            n_samples_per_prompt (`int`, *optional*, defaults to `1`):
                Completions to each prompt, when sampling.

        Returns:
            `dict[str, float]`: `reward_mean`, `reward_std`, `response_length_mean`, `num_samples`, the means of the metrics
            of `reward_fn`, and with several samples `reward_best_mean`, the mean of the best completion to each prompt.
            What has no reward counts in `num_samples` alone.

        Raises:
            `ValueError`: If several greedy completions are asked for, which would be the same.
        """
        if greedy and n_samples_per_prompt > 1:
            raise ValueError("Greedy completions to a prompt are all the same; set `greedy=False`.")
        accelerator = self.trainer.accelerator
        unwanted = ("gamma", "lambd", *(_OF_SAMPLING if greedy else ()))
        options = {name: value for name, value in self.generate_kwargs.items() if name not in unwanted}
        if greedy:
            options["do_sample"] = False
        maker = copy.copy(self.experience_maker)
        maker.strategy = replace(
            maker.strategy, advantage_estimator="reinforce", n_samples_per_prompt=n_samples_per_prompt, progress=False
        )
        values: dict[str, list[float]] = {"reward": [], "response_length": []}
        with kept_random_state():
            torch.manual_seed(self.strategy.seed + accelerator.process_index)
            for index, batch in enumerate(eval_dataloader):
                if index % accelerator.num_processes != accelerator.process_index:
                    continue
                rewards: list[float] = []
                for samples in maker.generate_samples(self._rows(batch), **options):
                    scored, metrics = maker.rewards(samples)
                    rewards += scored.tolist()
                    values["response_length"] += samples.response_length.tolist()
                    for name, numbers in metrics.items():
                        values.setdefault(name, []).extend(torch.as_tensor(numbers).flatten().tolist())
                values["reward"] += rewards
                for start in range(0, len(rewards) if n_samples_per_prompt > 1 else 0, n_samples_per_prompt):
                    known = _known(rewards[start : start + n_samples_per_prompt])
                    values.setdefault("reward_best", []).append(max(known, default=math.nan))
        values = _of_all_processes(values)
        results = {f"{name}_mean": _mean(numbers) for name, numbers in values.items()}
        return {**results, "reward_std": _std(values["reward"]), "num_samples": len(values["reward"])}

    def save_logs_and_checkpoints(
        self,
        args: MultimodalPPOConfig,
        global_step: int,
        step_bar: tqdm | None,
        logs_dict: dict[str, float] | None = None,
        client_states: dict[str, Any] | None = None,
        episode: float = 0,
    ) -> None:
        """
        Logs, evaluates and saves, each if one of its intervals has ended since the last call.

        Args:
            args ([`MultimodalPPOConfig`]):
                Intervals in optimizer steps: `logging_*`, `eval_*`, `save_*`.
            global_step (`int`):
                Optimizer steps so far.
            step_bar (`tqdm`, *optional*):
                Progress bar that shows the reward.
            logs_dict (`dict[str, float]`, *optional*):
                Metrics. Their means over the interval are logged, those that begin with `rollout_` below `rollout/`.
            client_states (`dict`, *optional*):
                Numbers and strings to go into the checkpoint.
            episode (`float`, *optional*, defaults to `0`):
                Episodes so far, which the log has as `epoch`.
        """
        self._prepare()
        trainer, before = self.trainer, self._reported_step
        self._reported_step = trainer.state.global_step = global_step
        trainer.state.epoch = float(episode)
        trainer.state.compute_steps(args, max(trainer.state.max_steps, 1))
        for name, value in (logs_dict or {}).items():
            trainer.pending_logs.setdefault(name, []).append(value)
        if step_bar is not None and "rollout_reward" in (logs_dict or {}):
            step_bar.set_postfix(reward=f"{logs_dict['rollout_reward']:.3f}")
        self._report(args, "steps", client_states, before)

    def save_model(self, output_dir: str | None = None) -> None:
        """
        Saves the policy, as a plain model with its processor, the critic in the folder `critic`, and the policy with
        averaged weights, if there are any, in `ema`.

        Args:
            output_dir (`str`, *optional*):
                Where to. Defaults to the `output_dir` of `strategy`.
        """
        self.trainer.save_model(output_dir)

    # Rollout

    def _rows(self, batch: list[dict] | tuple) -> list[dict[str, Any]]:
        """Rows of a batch, whose tuples are those of the reference system."""
        if all(isinstance(row, dict) for row in batch):
            self.trainer._columns_seen.update(*batch)
            return list(batch)
        media = next((names for names in self._columns if len(names) + 3 == len(batch)), None)
        if media is None or any(isinstance(column, (str, dict)) for column in batch):
            lengths = " or ".join(str(len(names) + 3) for names in self._columns)
            raise ValueError(
                f"A batch of prompts is a list of rows, which are dictionaries, or a tuple of {lengths} lists, got {len(batch)} "
                f"of {type(batch[0]).__name__}."
            )
        rows = []
        for prompt, *values, reference, label in zip(*batch, strict=True):
            row = {"prompt": prompt, "references": reference, "labels": label}
            for name, value in zip(media, values, strict=True):
                if value is not None:
                    row[name] = value if isinstance(value, list) else [value]
            rows.append(row)
        self.trainer._columns_seen.update(*rows)
        return rows

    def _rollout_sizes(self, dataloader: DataLoader) -> tuple[int, int]:
        """Optimizer steps on the experience of a batch of prompts, and prompts of all processes in it."""
        args, n_processes = self.trainer.args, self.trainer.accelerator.num_processes
        if dataloader.batch_size is None or isinstance(dataloader.dataset, IterableDataset):
            raise ValueError("`prompts_dataloader` must have a `batch_size`, and a dataset whose length is known.")
        per_rollout, n_prompts = dataloader.batch_size * n_processes, len(dataloader.sampler)
        if n_prompts < per_rollout or (n_prompts % per_rollout != 0 and not dataloader.drop_last):
            raise ValueError(
                f"{n_prompts} prompts don't fill whole batches of {dataloader.batch_size} on {n_processes} processes; set "
                "another `batch_size`, or `drop_last=True` if there are enough for one."
            )
        n_samples = dataloader.batch_size * args.num_generations
        if self.replay_buffer.limit > 0:
            n_samples = min(n_samples, self.replay_buffer.limit)
        step = args.per_device_train_batch_size * args.gradient_accumulation_steps
        if n_samples % step != 0:
            raise ValueError(
                f"A batch of {dataloader.batch_size} prompts leaves {n_samples} samples in the buffer, which don't fill whole "
                f"optimizer steps of {step} (`micro_train_batch_size` x `gradient_accumulation_steps`)."
            )
        return n_samples // step * args.num_ppo_epochs, per_rollout

    def _rollout_logs(self, experiences: list[Experience]) -> dict[str, float]:
        """Means over the samples of all processes."""
        values: dict[str, list[float]] = {}
        for info in (experience.info for experience in experiences):
            logged = {name: info[name] for name in _LOGGED if name in info} | info.get("reward_metrics", {})
            if "raw_reward" in info:
                logged |= {"reward": info["raw_reward"], "shaped_reward": info["reward"]}
            for name, numbers in logged.items():
                values.setdefault(name, []).extend(torch.as_tensor(numbers).flatten().tolist())
        values = _of_all_processes(values)
        return {name: _mean(numbers) for name, numbers in values.items()} | {"reward_std": _std(values["reward"])}

    # Updates

    def _set_supervised_rows(self, dataloader: DataLoader | None) -> None:
        args = self.trainer.args
        if args.ptx_coef == 0:
            return
        if dataloader is None or dataloader.batch_size is None:
            raise ValueError(
                f"`ptx_coef` ({args.ptx_coef}) needs a `pretrain_dataloader` with rows and a `batch_size`."
            )
        # A subset reads several rows at once of any dataset
        rows = Subset(dataloader.dataset, range(len(dataloader.dataset)))
        self.trainer._supervised = EndlessRows(rows, args.seed)
        args.per_device_ptx_batch_size = dataloader.batch_size

    def _prepare(self) -> None:
        """Before steps that `fit` doesn't make."""
        trainer = self.trainer
        if trainer.is_prepared:
            return
        args = trainer.args
        schedules = [args.lr_scheduler_type, args.value_lr_scheduler_type or args.lr_scheduler_type]
        endless = trainer.lr_scheduler is not None or all(schedule == "constant" for schedule in schedules)
        if args.max_steps <= 0 and not endless:
            raise ValueError(
                f"Without `fit` nobody knows how long the schedule {args.lr_scheduler_type!r} is; set `max_steps` in "
                "`strategy`, or `lr_scheduler_type='constant'`."
            )
        if args.ptx_coef > 0:
            raise ValueError("`ptx_coef` needs supervised rows, which only `fit` takes; set it to 0.")
        self._begin(args, args.max_steps, None)

    def _begin(self, args: MultimodalPPOConfig, max_steps: int, checkpoint: str | None) -> None:
        """Hands models and optimizer to the engine, once, with what a checkpoint holds."""
        trainer = self.trainer
        trainer.state.compute_steps(args, max_steps)
        if checkpoint is not None and is_whole(trainer.accelerator):
            trainer._load_from_checkpoint(checkpoint)
        trainer._prepare_for_training(max(max_steps, 1), None, checkpoint)
        trainer.is_prepared = True
        trainer.model_wrapped.zero_grad()
        if checkpoint is not None:
            trainer.state = TrainerState.load_from_json(str(Path(checkpoint, "trainer_state.json")))
            trainer.state.compute_steps(args, max_steps)
            self._reported_step = trainer.state.global_step
        trainer.state.init_training_references(trainer, max_steps, math.ceil(args.num_train_epochs), None)

    def _shuffled(self, items: list[BufferItem]) -> list[BufferItem]:
        """In an order that depends on the step, groups as a whole."""
        args, step = self.trainer.args, self.trainer.state.global_step
        size = args.num_generations if args.keep_groups_together else 1
        groups = [items[start : start + size] for start in range(0, len(items), size)]
        generator = torch.Generator().manual_seed(args.seed + step)
        return [item for i in torch.randperm(len(groups), generator=generator).tolist() for item in groups[i]]

    def _one_step(self, experience, global_steps, entropy_mask, trained) -> dict[str, float]:
        self._prepare()
        trainer = self.trainer
        items, weights = _samples(experience, entropy_mask, trainer.pad_id)
        _check_samples(items, "action_mask", *self._fields)
        window = trainer.args.gradient_accumulation_steps
        if self._n_micro_batches % window != 0 and trainer.half_done != trained:
            raise RuntimeError(
                f"An update of {' and '.join(sorted(trainer.half_done))} is half done, after {self._n_micro_batches % window} of "
                f"{window} micro-batches; give it the others first."
            )
        self._clear_metrics()
        trainer.state.global_step = global_steps
        trainer._trained = trainer.half_done = trained
        try:
            self._step(items, self._entropy_weights(items) if weights is None else weights)
        finally:
            trainer._trained = {"policy", "critic"}
        return self._status()

    def _step(
        self, items: list[BufferItem], weights: list[torch.Tensor] | None, n_tokens: float | None = None
    ) -> None:
        """
        What a step of `Trainer`'s loop does with a micro-batch.

        Actions weigh the same in all micro-batches that are given their mean number `n_tokens` in a micro-batch of all
        processes.
        """
        trainer = self.trainer
        args, model = trainer.args, trainer.model_wrapped
        batch = self._batch(items, weights, n_tokens)
        self._n_micro_batches += 1
        ends = self._n_micro_batches % args.gradient_accumulation_steps == 0
        trainer.accelerator.gradient_state._set_sync_gradients(ends)
        trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        metrics = trainer._metrics["train"]
        for is_critic, rate in zip(
            trainer._critic_groups or [False], trainer.lr_scheduler.get_last_lr(), strict=False
        ):
            metrics["critic_lr" if is_critic else "actor_lr"].append(rate)
        syncs = ends or trainer.is_deepspeed_enabled
        with nullcontext() if syncs else trainer.accelerator.no_sync(model=model):
            trainer.training_step(model, batch, None)
        if not ends:
            return
        norm = trainer._clip_grad_norm(model) if args.max_grad_norm > 0 else None
        metrics["grad_norm"].append(float(trainer._get_grad_norm(model, norm)))
        trainer.callback_handler.on_pre_optimizer_step(args, trainer.state, trainer.control)
        trainer.optimizer.step()
        if not trainer.accelerator.optimizer_step_was_skipped:
            trainer.lr_scheduler.step()
        model.zero_grad()
        trainer.state.global_step += 1
        trainer.callback_handler.on_step_end(args, trainer.state, trainer.control)

    @property
    def _fields(self) -> dict[str, str]:
        """What an update needs for each action, and what the trainer calls it."""
        fields = {"action_log_probs": "old_per_token_logps", "advantages": "advantages"}
        if self.trainer.kl_coef != 0:
            fields["base_action_log_probs"] = "ref_per_token_logps"
        if self.critic is not None:
            fields |= {"returns": "returns", "values": "old_values"}
        return fields

    def _batch(
        self, items: list[BufferItem], weights: list[torch.Tensor] | None, n_tokens: float | None
    ) -> dict[str, Any]:
        """The micro-batch as the trainer takes it: prompts, and completions padded on the right."""
        trainer, device = self.trainer, self.actor.device
        pins = trainer.args.dataloader_pin_memory and device.type == "cuda"

        def placed(rows: list[torch.Tensor], padding: float = 0) -> torch.Tensor:
            values = pad_sequence(rows, batch_first=True, padding_value=padding)
            return values.pin_memory().to(device, non_blocking=True) if pins and values.is_cpu else values.to(device)

        prompts: list[EncodedPrompt] = []
        for item in items:
            prompts.append(self._prompt(item, prompts))
        trainer._kinds_seen.update(*(prompt.modalities for prompt in prompts))
        actions = [item.sequences[len(item.sequences) - len(item.action_mask) :] for item in items]
        mask = placed([item.action_mask.long() for item in items])
        scorable = torch.tensor([_is_scorable(item) for item in items], device=device).long()
        counts = torch.stack([mask.sum(), (mask * scorable[:, None]).sum()]).float()
        self._counts.append(trainer.accelerator.reduce(counts).tolist())
        n_tokens = self._counts[-1][0] if n_tokens is None else n_tokens
        ids = left_pad(prompts, trainer.pad_id)
        batch = {
            "prompt_ids": ids["input_ids"].to(device),
            "prompt_mask": ids["attention_mask"].to(device),
            "completion_ids": placed(actions, trainer.pad_id),
            "completion_mask": placed([torch.ones_like(each) for each in actions]),
            "tool_mask": mask,  # an action that doesn't count is seen all the same
            # Of a generation batch, as the trainer counts them
            "num_items_in_batch": torch.tensor(n_tokens * trainer.args.steps_per_generation, device=device),
            "encoded_prompts": prompts,
            "packed": [trainer._policy.remedies.can_pack and self.actor.packing_samples]
            * len(items),  # as in the rollout
            "scorable": scorable,
        }
        for field, name in self._fields.items():
            batch[name] = placed([getattr(item, field).float() for item in items])
        ones = torch.ones_like(mask, dtype=torch.float32)
        batch["high_entropy_weights"] = ones if weights is None else placed([row.float() for row in weights])
        return batch

    def _prompt(self, item: BufferItem, others: list[EncodedPrompt]) -> EncodedPrompt:
        """The prompt of a sample; the same object as an equal one, so that a forward shares it."""
        names, model = self._media_names, self.actor.base_model
        media = {names.get(field, field): tensor.cpu() for field, tensor in media_tensors(item).items()}
        ids = item.sequences[: len(item.sequences) - len(item.action_mask)].cpu()
        for other in others:
            same_ids = torch.equal(other.input_ids, ids) and other.media.keys() == media.keys()
            if same_ids and all(torch.equal(other.media[name], value) for name, value in media.items()):
                return other
        bare_inputs(model, ids[None], media, 0)  # which checks them
        return bare_prompt(model, ids, media)

    def _entropy_weights(self, items: list[BufferItem]) -> list[torch.Tensor] | None:
        """Weights of the actions of an update, among which those of high entropy are chosen; `None` counts all."""
        args, device = self.trainer.args, self.actor.device
        if args.top_entropy_quantile == 1:
            return None
        _check_samples(items, "action_entropy")
        size = args.per_device_train_batch_size if args.entropy_scope == "micro_batch" else len(items)
        weights = []
        for part in (items[start : start + size] for start in range(0, len(items), size)):
            columns = ([item.action_entropy for item in part], [item.action_mask.long() for item in part])
            entropies, mask = (pad_sequence(rows, batch_first=True).to(device) for rows in columns)
            chosen = self.trainer._high_entropy_weights(entropies, mask).cpu()
            weights += [row[: len(item.action_mask)] for row, item in zip(chosen, part, strict=True)]
        return weights

    # Logs

    def _status(self) -> dict[str, float]:
        """Means of the trainer's metrics since the last time, by the names of the reference system."""
        metrics, status = self.trainer._metrics["train"], {}
        weights = dict.fromkeys(_OF_ACTIONS, 0) | dict.fromkeys(_OF_REWARDED_ACTIONS, 1)
        for name, values in metrics.items():
            if name in weights:
                mean = _weighted_mean(values, [count[weights[name]] for count in self._counts])
            else:
                mean = _mean(values)
            status["critic_loss" if name == "value_loss" else name] = mean
        self._clear_metrics()
        status.pop("value_learning_rate", None)  # which is `critic_lr`
        if "policy_loss" in status and not LOSSES[self.strategy.loss_type].is_mean:
            # Each micro-batch has its part of an update's
            status["policy_loss"] *= self.strategy.gradient_accumulation_steps
        return status

    def _clear_metrics(self) -> None:
        self.trainer._metrics["train"].clear()
        self._counts.clear()

    def _statistics(self, items: list[BufferItem]) -> dict[str, float]:
        """Of the buffers of all processes. What has no reward has neither advantage nor return."""
        accelerator, device = self.trainer.accelerator, self.actor.device

        def everyone(values: list[torch.Tensor]) -> torch.Tensor:
            values = torch.cat(values).float().to(device)
            values = accelerator.gather(accelerator.pad_across_processes(values, pad_index=math.nan))
            return values[~values.isnan()]

        def actions(field: str) -> torch.Tensor:
            return everyone([getattr(i, field)[i.action_mask.bool() & _is_scorable(i)] for i in items])

        columns = {
            "step_reward": everyone([torch.tensor([_reward(item)]) for item in items]),
            "response_length": everyone([item.action_mask.sum().view(1) for item in items]),
            "advantages": actions("advantages"),
            "returns": actions("returns"),
        }
        statistics = {}
        for name, values in columns.items():
            for kind in ("mean", "std", "min", "max") if len(values) else ():
                value = values.std(correction=0) if kind == "std" else getattr(values, kind)()
                statistics[f"{name}_{kind}"] = value.item()
        if items[0].kl is not None:
            statistics["kl"] = everyone([item.kl[item.action_mask.bool()] for item in items]).mean().item()
        if self.critic is not None:
            values, returns = actions("values"), columns["returns"]
            statistics["values"] = values.mean().item()
            statistics["explained_variance"] = explained_variance(values, returns, torch.ones_like(values)).item()
        return statistics

    def _report(self, args, strategy: str, client_states: dict[str, Any] | None, before: int | None = None) -> None:
        """Logs, evaluates and saves what goes by a strategy, with `"steps"` what is due since the step `before`."""
        trainer = self.trainer
        state, handler = trainer.state, trainer.callback_handler

        def is_due(chosen: str, interval: int) -> bool:
            return chosen == strategy and (before is None or state.global_step // interval > before // interval)

        if is_due(args.logging_strategy, state.logging_steps) or (args.logging_first_step and before == 0):
            trainer.log({_logged_name(name): _mean(values) for name, values in trainer.pending_logs.items()})
            trainer.pending_logs.clear()
        if is_due(args.eval_strategy, state.eval_steps):
            if self.eval_dataloader is None:
                raise ValueError("`eval_strategy` asks for an evaluation, but `fit` got no `eval_dataloader`.")
            results = self.evaluate(self.eval_dataloader, state.global_step)
            results = {f"eval_{name}": value for name, value in results.items()}
            trainer.log(results)
            trainer.control = handler.on_evaluate(trainer.args, state, trainer.control, results)
        if is_due(args.save_strategy, state.save_steps):
            trainer.client_states = dict(client_states or {})
            trainer._save_checkpoint(trainer.model, trial=None)
            if self.save_hf_ckpt:
                folder = f"hf-{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
                trainer.save_model(str(Path(trainer.args.output_dir, folder)), _internal_call=True)
            trainer.control = handler.on_save(trainer.args, state, trainer.control)


class _ExperienceTrainer(MultimodalPPOTrainer):
    """Takes batches that are made of experience, and keeps with them what a checkpoint needs to go on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.top_entropy_quantile = 0.0  # the samples come with weights of their tokens, for which TRL asks below 1
        self.is_prepared = False  # whether the engine has models and optimizer
        self.half_done: set[str] = set()  # what an update that has begun changes
        self.is_first_epoch = True  # on the samples at hand
        self.replay_buffer: ReplayBuffer | None = None
        self.pending_logs: dict[str, list[float]] = {}
        self.client_states: dict[str, Any] = {}

    @property
    def pad_id(self) -> int:
        return self._tokenizer.pad_token_id

    def _prepare_inputs(self, inputs):
        return inputs

    def _counts_for_kl(self):
        return self._trains("policy") and self.is_first_epoch

    def _rollout_state(self) -> dict[str, Any]:
        own = {"client_states": self.client_states, "pending_logs": self.pending_logs}
        return {**super()._rollout_state(), **own, "experience": self.replay_buffer.state_dict()}

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        super()._load_rollout_state(state)
        self.client_states, self.pending_logs = state["client_states"], state["pending_logs"]
        self.replay_buffer.load_state_dict(state["experience"])


def _rewards_of_the_maker(**kwargs):
    """Stands for the reward functions that the trainer doesn't run."""
    raise RuntimeError("Rewards come from the experience maker; call `fit`.")


# Checks of arguments


def _check_strategy(strategy: MultimodalPPOConfig, actor: ActorVL, critic: Critic | None) -> None:
    if not isinstance(strategy, MultimodalPPOConfig):
        raise TypeError(f"`strategy` must be a MultimodalPPOConfig, got {type(strategy).__name__}.")
    if critic is not None and strategy.advantage_estimator != "gae":
        raise ValueError(
            f"`critic` was passed, which `advantage_estimator={strategy.advantage_estimator!r}` has no use for; change one of "
            "them."
        )
    defaults = {field.name: field.default for field in fields(strategy)}
    for name in _OF_THE_TRAINER:
        if getattr(strategy, name) != defaults[name]:
            hint = f"; pass `{name}` to the trainer itself" if name in _OF_SAMPLING else ""
            raise ValueError(
                f"`{name}` of `strategy` has no effect in these steps{hint or ', only in `MultimodalPPOTrainer`'}; remove it."
            )
    if strategy.top_entropy_quantile < 1 and actor.high_entropy_token_ratio == 0:
        raise ValueError(
            f"`top_entropy_quantile` ({strategy.top_entropy_quantile}) goes by the entropies of the rollouts; make the actor "
            f"with `high_entropy_token_ratio={strategy.top_entropy_quantile}`."
        )


def _changed(strategy: MultimodalPPOConfig, **options) -> MultimodalPPOConfig:
    """A copy with other options. Unlike `dataclasses.replace`, it doesn't set up devices and processes again."""
    config = copy.copy(strategy)
    vars(config).update(options)
    config.__post_init__()
    return config


def _check_average(trainer: MultimodalPPOTrainer, ema_model: ActorVL) -> None:
    averages, own = dict(ema_model.model.named_parameters()), trainer.ema._parameters
    for name, parameter in own.items():
        if name not in averages or averages[name].shape != parameter.shape:
            raise ValueError(
                f"`ema_model` must be a copy of the policy, but has no `{name}` {tuple(parameter.shape)}."
            )
        if averages[name] is parameter:
            raise ValueError("`ema_model` holds the policy's own weights; pass a copy.")


def _joined(critic, actor_optim, critic_optim, actor_scheduler, critic_scheduler, config) -> tuple:
    """One optimizer and one schedule of those of policy and critic."""
    optimizers, schedulers = {"actor_optim": actor_optim}, {"actor_scheduler": actor_scheduler}
    if config.advantage_estimator == "gae":
        optimizers["critic_optim"], schedulers["critic_scheduler"] = critic_optim, critic_scheduler
    elif critic_optim is not None or critic_scheduler is not None:
        raise ValueError(
            f"`critic_optim` or `critic_scheduler` was passed, but `advantage_estimator={config.advantage_estimator!r}` has "
            "no critic."
        )
    if critic is None and critic_optim is not None:
        raise ValueError("`critic_optim` was passed, but no `critic` whose weights it could hold.")
    given = {name for name, each in (optimizers | schedulers).items() if each is not None}
    if not given:
        return None, None
    if not given >= optimizers.keys():
        raise ValueError(f"One optimizer trains all: with {sorted(given)} pass {sorted(optimizers)}, or none.")
    classes = {type(each) for each in optimizers.values()}
    if len(classes) > 1:
        names = sorted(each.__name__ for each in classes)
        raise ValueError(f"One optimizer trains policy and critic, so both must be of one class, got {names}.")
    optimizer = classes.pop()([dict(group) for each in optimizers.values() for group in each.param_groups])
    for each in optimizers.values():
        optimizer.state.update(each.state)
    if not given & schedulers.keys():
        return optimizer, None
    for name, each in schedulers.items():
        if not isinstance(each, LambdaLR):
            raise ValueError(
                f"`{name}` must be a `LambdaLR`, such as `transformers.get_scheduler` gives, got {type(each).__name__}."
            )
    n_frozen = config.freezing_actor_steps

    def thawed(factor):
        return lambda step: 0.0 if step < n_frozen else factor(step - n_frozen)

    factors = [thawed(factor) for factor in actor_scheduler.lr_lambdas]
    if "critic_scheduler" in schedulers:
        factors += critic_scheduler.lr_lambdas
    return optimizer, LambdaLR(optimizer, factors)


# Samples


def _samples(experience: Experience, entropy_mask, pad_id: int) -> tuple[list[BufferItem], list[torch.Tensor] | None]:
    """The samples of a micro-batch without padding, and the weights of their actions."""
    items = split_experience_batch(experience)
    if entropy_mask is not None:
        # A field that is cut like the others
        items = [replace(item, action_entropy=row) for item, row in zip(items, entropy_mask, strict=True)]
    if not isinstance(experience.sequences, list):
        items = remove_padding_in_sequences(items, pad_id)
    return items, None if entropy_mask is None else [item.action_entropy for item in items]


def _check_samples(items: list[BufferItem], *names: str) -> None:
    for name in names:
        if any(getattr(item, name) is None for item in items):
            raise ValueError(f"The experience has no `{name}`; make it with this trainer's `experience_maker`.")
    for index, item in enumerate(items):
        if item.attention_mask is not None and not item.attention_mask.all():
            raise ValueError(f"The `attention_mask` of sample {index} hides tokens between others; leave them out.")


def _reward(item: BufferItem) -> float:
    return float((item.info or {}).get("reward", math.nan))


def _is_scorable(item: BufferItem) -> bool:
    """Whether a reward, if one is known, is a number."""
    return "reward" not in (item.info or {}) or not math.isnan(_reward(item))


def _n_actions(items: list[BufferItem]) -> torch.Tensor:
    return torch.stack([item.action_mask.sum() for item in items]).sum().float()


# Numbers


def _of_all_processes(values: dict[str, list[float]]) -> dict[str, list[float]]:
    """Lists of all processes, joined; each may have names of its own."""
    gathered = gather_object([values])
    names = sorted({name for each in gathered for name in each})
    return {name: [number for each in gathered for number in each.get(name, [])] for name in names}


def _known(numbers: list[float]) -> list[float]:
    return [number for number in numbers if not math.isnan(number)]


def _mean(numbers: list[float]) -> float:
    return fmean(_known(numbers)) if _known(numbers) else math.nan


def _weighted_mean(numbers: list[float], weights: list[float]) -> float:
    total = sum(number * weight for number, weight in zip(numbers, weights, strict=True) if weight > 0)
    return total / sum(weights) if sum(weights) > 0 else math.nan


def _std(numbers: list[float]) -> float:
    return pstdev(_known(numbers)) if _known(numbers) else math.nan


def _logged_name(name: str) -> str:
    return f"rollout/{name.removeprefix('rollout_')}" if name.startswith("rollout_") else name
