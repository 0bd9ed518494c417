# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""PPO with the interface of the reference system: experience, a buffer, and verbs for each step of the loop."""

import copy
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import skip_first_batches
from accelerate.utils import is_peft_model
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...trainers.ppo_config import MultimodalPPOConfig
from ...trainers.random_state import kept_random_state
from ..models.actor_vl import ActorVL
from ..models.critic import Critic
from .experience import Experience
from .experience_config import ExperienceConfig, check_options
from .experience_maker import NaiveExperienceMaker
from .experience_trainer import ExperienceTrainer, mean, of_all_processes, rollout_logs, std
from .ppo_options import (
    OF_SAMPLING,
    WHOLE_WEIGHTS,
    changed,
    check_average,
    check_rollout,
    check_strategy,
    joined_optimizers,
    rows_of,
)
from .replay_buffer import ReplayBuffer


# Options of the config that those of the experience maker are called like
_OF_EXPERIENCE = (
    "advantage_estimator",
    "audio_overlong",
    "bootstrap_truncated",
    "cpgd_weight",
    "media_rules",
    "norm_level",
    "reward_clip_range",
    "reward_running_scale",
    "soft_overlong_cache",
)


class PPOTrainerVL:
    """
    PPO of models that see, in the steps of the reference system: make experience, put it into a buffer, train on it.

    It holds a [`MultimodalPPOTrainer`], whose loss, optimizer, metrics and checkpoints these steps use. For a run from
    a dataset take that one; this class is for code that handles experience itself, or comes from LightRFT. It runs on
    one process, with DDP and with ZeRO-1 and 2. The critic becomes a part of `actor.model`, so save the policy with
    [`save_model`], which writes both where they belong.

    Args:
        strategy ([`MultimodalPPOConfig`]):
            All options. Those that have an argument here are replaced by it: `beta`, `kl_target`, `kl_horizon`,
            `ptx_coef`, `per_device_train_batch_size`, `epsilon`, `cliprange_value`, `gradient_checkpointing`,
            `num_ppo_epochs`, `max_grad_norm`, `dataloader_pin_memory`, `save_only_model` and `ema_decay`; and
            `temperature` by the actor's. `num_generations` is the number of completions of a prompt. Options of
            sampling go into `generate_kwargs`; those that belong to the rollouts and the loop of
            [`MultimodalPPOTrainer`] are errors.
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
            A copy of the policy, which gets the moving average of the weights when [`fit`] ends. `None` keeps no
            average.
        actor_optim, critic_optim (`torch.optim.Optimizer`, *optional*):
            Optimizers of policy and critic, of the same class, which become one; `None` makes one as `strategy` says.
        actor_scheduler, critic_scheduler (`LambdaLR`, *optional*):
            Their schedules, likewise. While the policy is frozen its schedule waits.
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
        remote_rm_url, reward_fn, reward_fn_label_map, reward_recipe (*optional*):
            Sources of reward and what makes one of several, see
            [`~lightrft.trainer.experience_maker.NaiveExperienceMaker`].
        save_hf_ckpt (`bool`, *optional*, defaults to `False`):
            Whether to write the models beside each checkpoint, in a folder `hf-checkpoint-...` that `save_total_limit`
            leaves alone.
        disable_ds_ckpt (`bool`, *optional*, defaults to `False`):
            Whether checkpoints hold the models alone, so that a run can't go on from them.
        generate_kwargs:
            Options of sampling, such as `max_new_tokens` (defaults to `max_completion_length`), and `gamma` and
            `lambd` (default to those of `strategy`).

    Raises:
        `TypeError`: If `strategy` is no [`MultimodalPPOConfig`].
        `ValueError`: If an option has no effect here or isn't known, if optimizers or schedules can't become one, if
            there is no source of reward, if a critic, a reference or an average doesn't fit, or if the engine shards
            parameters.
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
        check_strategy(strategy, actor, critic)
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
        config = changed(
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
            raise ValueError(WHOLE_WEIGHTS)
        self.strategy, self.actor, self.ema_model = config, actor, ema_model
        known: Any = processor
        self.tokenizer = known.tokenizer if tokenizer is None else tokenizer
        self.generate_kwargs = {
            "max_new_tokens": config.max_completion_length,
            **generate_kwargs,
            "gamma": config.gamma,
            "lambd": config.lam,
        }
        self.save_hf_ckpt = save_hf_ckpt
        self.replay_buffer = ReplayBuffer(buffer_limit, seed=config.seed, cpu_offload=buffer_cpu_offload)
        self.trainer: Any = ExperienceTrainer(
            actor,
            config,
            self.replay_buffer,
            processing_class=self.tokenizer if processor is None else processor,
            optimizers=joined_optimizers(config, critic, actor_optim, critic_optim, actor_scheduler, critic_scheduler),
            value_model=critic,
            ref_model=initial_model.model if has_kl and initial_model is not actor else None,
        )
        config.eval_strategy = strategy.eval_strategy
        if self.trainer.is_fsdp_enabled:
            raise ValueError(WHOLE_WEIGHTS)
        if (
            self.trainer._policy.fallbacks.isolate is not None
            and config.num_generations % micro_rollout_batch_size != 0
        ):
            raise ValueError(
                f"A {actor.config.model_type} mixes media with their padding, so that an experience must hold one "
                f"prompt; set `micro_rollout_batch_size` ({micro_rollout_batch_size}) to `num_generations` "
                f"({config.num_generations}) or a part of it."
            )
        self.critic = self.trainer.critic
        if ema_model is not None:
            check_average(self.trainer.ema._parameters, ema_model)
        if gradient_checkpointing:
            options: Any = config.gradient_checkpointing_kwargs  # a string only before the config has read it
            actor.gradient_checkpointing_enable(options)
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
                n_samples_per_prompt=config.num_generations,
                micro_rollout_batch_size=micro_rollout_batch_size,
                kl_in_reward=bool(config.kl_in_reward),
                ignored_media_columns=config.ignored_media_columns or (),
                progress=not config.disable_tqdm,
                accelerator=self.trainer.accelerator,
                **{name: getattr(config, name) for name in _OF_EXPERIENCE},
            ),
            remote_rm_url=remote_rm_url,
            reward_fn=reward_fn,
            reward_fn_label_map=reward_fn_label_map,
            reward_recipe=reward_recipe,
            processor=processor,
        )
        self.experience_maker.reward_scale = self.trainer._reward_scale  # which checkpoints hold
        self.eval_dataloader: DataLoader | None = None
        self._reported_step = 0

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
        Trains: for each batch of prompts makes experience, trains on it, and logs, evaluates and saves when it is
        time.

        Args:
            args ([`MultimodalPPOConfig`]):
                Length and intervals of the run: `num_train_epochs` (episodes) or `max_steps` (rounded up to whole
                rollouts), `logging_*`, `eval_*`, `save_*` and `resume_from_checkpoint` (a path); usually the
                `strategy`.
            prompts_dataloader (`DataLoader`):
                Batches of prompts for each process. A batch is a list of rows (`prompt`, media columns, `references`,
                `labels` and others for reward functions), or a tuple of lists: prompts, images, references and labels,
                or prompts, images, videos, references and labels. There, the media of a prompt are a list, one, or
                `None`.
            pretrain_dataloader (`DataLoader`, *optional*):
                Supervised rows, see `ptx_dataset` of [`MultimodalPPOTrainer`]; its dataset and batch size are used,
                with `ptx_coef` above 0.
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
        trainer.set_supervised_rows(pretrain_dataloader)
        updates, per_rollout = check_rollout(
            prompts_dataloader, trainer.args, self.replay_buffer.limit, trainer.accelerator.num_processes
        )
        prompts = trainer.accelerator.prepare_data_loader(prompts_dataloader, device_placement=False)
        passes = max(math.ceil(num_update_steps_per_episodes / (updates * len(prompts))), 1)
        rollouts = passes * len(prompts)  # of an episode
        checkpoint = args.resume_from_checkpoint
        if args.max_steps > 0:
            max_steps = math.ceil(args.max_steps / updates) * updates
        else:
            left_out = 0 if checkpoint else consumed_samples // per_rollout
            max_steps = (math.ceil(args.num_train_epochs * rollouts) - left_out) * updates
        trainer.prepare_for(args, max_steps, checkpoint)
        self._reported_step = trainer.state.global_step
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
                logs = {f"rollout_{name}": value for name, value in rollout_logs(experiences).items()}
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

        Groups of completions of a prompt stay together, so that a forward shares the prompt, unless
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
        self.trainer.prepare_without_fit()
        self.trainer.state.global_step = global_steps
        return self.trainer.train_on_buffer()

    def training_step(
        self, experience: Experience, global_steps: int, entropy_mask: torch.Tensor | None = None
    ) -> dict[str, float]:
        """
        Adds the gradient of a micro-batch for policy and critic, in one backward, and makes an optimizer step after
        each `gradient_accumulation_steps`.

        Args:
            experience ([`~lightrft.trainer.experience.Experience`]):
                Micro-batch, padded or packed.
            global_steps (`int`):
                Optimizer steps so far: below `freezing_actor_steps` only the critic moves.
            entropy_mask (`torch.Tensor`, *optional*):
                Weight of each action in the policy loss, `(B, A)`, or a list `(A,)` for packed ones. By default all
                count, or the share of high entropy that `strategy` asks for, in this micro-batch.

        Returns:
            `dict[str, float]`: `policy_loss`, `critic_loss`, `actor_lr`, `critic_lr`, and more of the trainer's
            metrics.

        Raises:
            `ValueError`: If the experience lacks what the update needs, or if there is no critic to train.
            `RuntimeError`: If the micro-batch before began an update of another part.
        """
        return self.trainer.train_on(experience, global_steps, {"policy", "critic"}, entropy_mask)

    def training_step_actor(
        self, experience: Experience, entropy_mask: torch.Tensor | None = None
    ) -> dict[str, float]:
        """For the policy alone, see [`training_step`]. Its optimizer step counts as one, and costs as much."""
        return self.trainer.train_on(experience, self.trainer.state.global_step, {"policy"}, entropy_mask)

    def training_step_critic(self, experience: Experience) -> dict[str, float]:
        """For the critic alone, see [`training_step`]. Its optimizer step counts as one, and costs as much."""
        if self.critic is None:
            raise ValueError(f"`advantage_estimator={self.strategy.advantage_estimator!r}` has no critic to train.")
        return self.trainer.train_on(experience, self.trainer.state.global_step, {"critic"})

    @torch.no_grad()
    def evaluate(
        self, eval_dataloader: Iterable, global_step: int, greedy: bool = True, n_samples_per_prompt: int = 1
    ) -> dict[str, float]:
        """
        Rewards of completions of other prompts. Changes nothing: no weights, no running statistics, no random numbers.

        Args:
            eval_dataloader (`DataLoader`):
                Batches as of the prompts' loader. Processes take turns, so that each prompt counts once.
            global_step (`int`):
                Optimizer steps so far, for the log.
            greedy (`bool`, *optional*, defaults to `True`):
                Whether to take the likeliest tokens, or to sample as in training.
            n_samples_per_prompt (`int`, *optional*, defaults to `1`):
                Completions of each prompt, when sampling.

        Returns:
            `dict[str, float]`: `reward_mean`, `reward_std`, `response_length_mean`, `num_samples`, the means of the
            metrics of `reward_fn`, and with several samples `reward_best_mean`, the mean of the best completion of
            each prompt. What has no reward counts in `num_samples` alone.

        Raises:
            `ValueError`: If several greedy completions are asked for, which would be the same.
        """
        if greedy and n_samples_per_prompt > 1:
            raise ValueError("Greedy completions of a prompt are all the same; set `greedy=False`.")
        accelerator = self.trainer.accelerator
        unwanted = ("gamma", "lambd", *(OF_SAMPLING if greedy else ()))
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
                    known = [each for each in rewards[start : start + n_samples_per_prompt] if not math.isnan(each)]
                    values.setdefault("reward_best", []).append(max(known, default=math.nan))
        values = of_all_processes(values)
        results = {f"{name}_mean": mean(numbers) for name, numbers in values.items()}
        return {**results, "reward_std": std(values["reward"]), "num_samples": len(values["reward"])}

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
        trainer, before = self.trainer, self._reported_step
        trainer.prepare_without_fit()
        self._reported_step = trainer.state.global_step = global_step
        trainer.state.epoch = float(episode)
        trainer.state.compute_steps(args, max(trainer.state.max_steps, 1))
        for name, value in (logs_dict or {}).items():
            trainer.pending_logs.setdefault(name, []).append(value)
        if step_bar is not None and logs_dict and "rollout_reward" in logs_dict:
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

    def _rows(self, batch: list[dict] | tuple) -> list[dict[str, Any]]:
        rows = rows_of(batch, self._columns)
        self.trainer._columns_seen.update(*rows)
        return rows

    def _report(self, args, strategy: str, client_states: dict[str, Any] | None, before: int | None = None) -> None:
        """Logs, evaluates and saves what goes by a strategy, with `"steps"` what is due since the step `before`."""
        trainer = self.trainer
        state, handler = trainer.state, trainer.callback_handler

        def is_due(chosen: str, interval: int) -> bool:
            return chosen == strategy and (before is None or state.global_step // interval > before // interval)

        if is_due(args.logging_strategy, state.logging_steps) or (args.logging_first_step and before == 0):
            means = {name: mean(values) for name, values in trainer.pending_logs.items()}
            trainer.log({re.sub("^rollout_", "rollout/", name): value for name, value in means.items()})
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
