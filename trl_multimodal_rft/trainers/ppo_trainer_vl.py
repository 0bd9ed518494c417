# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""PPO with the interface of the reference system: experience, a buffer, and verbs for each step of the loop."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import skip_first_batches
from accelerate.utils import is_peft_model
from datasets import Dataset
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerState
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..actors import ActorVL, Critic
from ..actors.inputs import bare_prompt
from ..algorithms.entropy import high_entropy_mask
from ..algorithms.losses import explained_variance
from ..media.encoding import EncodedPrompt
from ..media.tensors import check_media
from ..packing.forward import left_pad
from ..replay import BufferItem, ReplayBuffer, remove_padding_in_sequences, split_experience_batch
from ..replay.replay_buffer_utils import media_tensors
from ..rollout.experience import Experience, Samples
from ..rollout.experience_maker import MEDIA_FIELDS, ExperienceConfig, NaiveExperienceMaker
from .checkpoint import load_rollout_state
from .fetch import EndlessRows
from .ppo_config import MultimodalPPOConfig
from .ppo_trainer import MultimodalPPOTrainer


# Metrics that the reference system calls otherwise
_NAMES = {"value_loss": "critic_loss", "value_learning_rate": "critic_lr"}

# Fields of a sample that an update needs, per token, and what the trainer calls them
_TOKEN_FIELDS = {
    "action_log_probs": "old_per_token_logps",
    "base_action_log_probs": "ref_per_token_logps",
    "advantages": "advantages",
    "returns": "returns",
    "values": "old_values",
}


class PPOTrainerVL:
    """
    PPO of models that see, in the steps of the reference system: make experience, put it into a buffer, train on it.

    It holds a [`MultimodalPPOTrainer`], whose loss, optimizer, metrics and checkpoints these steps use. For a run from a
    dataset take that one; this class is for code that handles experience itself, or comes from LightRFT. It runs on one
    process, with DDP and with ZeRO-1 and 2.

    Args:
        strategy ([`MultimodalPPOConfig`]):
            All options. Those that have an argument here are replaced by it: `beta`, `kl_target`, `kl_horizon`, `ptx_coef`,
            `per_device_train_batch_size`, `epsilon`, `cliprange_value`, `gradient_checkpointing`, `num_ppo_epochs`,
            `max_grad_norm`, `dataloader_pin_memory` and `save_only_model`; and `ema_decay`, with an `ema_model`.
            `num_generations` is the number of responses to a prompt.
        actor ([`~actors.ActorVL`]):
            Policy.
        critic ([`~actors.Critic`], *optional*):
            Value model; `None` for estimators without, or for a copy of the policy with `"gae"`.
        reward_model (`torch.nn.Module` or `list`, *optional*):
            Reward models, called as `reward_model(sequences, attention_mask, **media)`, which return `(B,)`.
        initial_model ([`~actors.ActorVL`], *optional*):
            Reference of the KL divergence. `None` takes the policy without its adapter if it has one, else there is no
            KL divergence.
        ema_model ([`~actors.ActorVL`], *optional*):
            Gets the moving average of the policy's weights when [`fit`] ends, and switches it on.
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
            Responses over which the coefficient adapts.
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
            The policy's tokenizer, padding on the left; that of the processor by default.
        processor ([`~transformers.ProcessorMixin`], *optional*):
            The policy's processor. Without it prompts are text.
        prompt_max_len (`int`, *optional*, defaults to `128`):
            Most tokens of a prompt, those of its media included. Longer text loses its beginning; a longer prompt with
            media is an error.
        dataloader_pin_memory (`bool`, *optional*, defaults to `True`):
            Whether data loaders pin memory.
        remote_rm_url (`str` or `list[str]`, *optional*):
            Reward servers, see [`~rollout.experience_maker.NaiveExperienceMaker`].
        reward_fn (`Callable`, *optional*):
            Combines rewards, or is one, see there.
        reward_fn_label_map (`dict`, *optional*):
            Names of the sources of reward, see there.
        reward_recipe (`dict`, *optional*):
            Which sources count for which label, see there.
        save_hf_ckpt (`bool`, *optional*, defaults to `False`):
            Whether to write the policy beside each checkpoint, in a folder of its own that isn't rotated away.
        disable_ds_ckpt (`bool`, *optional*, defaults to `False`):
            Whether checkpoints hold the models alone, so that a run can't go on from them.
        generate_kwargs:
            Options of sampling, such as `max_new_tokens` (defaults to `max_completion_length`), and `gamma` and `lambd`
            (default to those of `strategy`).

    Raises:
        `TypeError`: If `strategy` is no [`MultimodalPPOConfig`].
        `ValueError`: If optimizers or schedules can't become one, if there is no source of reward, if a critic is there
            without use, or if the engine shards parameters.
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
        if not isinstance(strategy, MultimodalPPOConfig):
            raise TypeError(f"`strategy` must be a MultimodalPPOConfig, got {type(strategy).__name__}.")
        if initial_model is None and is_peft_model(actor.model) and init_kl_coef > 0:
            initial_model = actor
        has_kl = initial_model is not None and init_kl_coef > 0
        config = replace(
            strategy,
            generation_batch_size=None,  # follows from the others
            # Whole groups for any size of a micro-batch, as the trainer has it; experience comes in other batches
            steps_per_generation=strategy.num_generations * strategy.gradient_accumulation_steps,
            beta=init_kl_coef if has_kl else 0.0,
            kl_estimator=strategy.kl_estimator if has_kl else None,
            kl_in_reward=strategy.kl_in_reward if has_kl else None,
            kl_target=(kl_target or None) if has_kl else None,
            kl_horizon=kl_horizon,
            ptx_coef=ptx_coef,
            per_device_train_batch_size=micro_train_batch_size,
            epsilon=eps_clip,
            cliprange_value=value_clip,
            gradient_checkpointing=gradient_checkpointing,
            num_ppo_epochs=max_epochs,
            num_iterations=max_epochs,
            max_grad_norm=max_norm,
            dataloader_pin_memory=dataloader_pin_memory,
            ema_decay=None if ema_model is None else ema_beta,
            save_only_model=disable_ds_ckpt,
            temperature=actor.temperature,
            gamma=generate_kwargs.pop("gamma", strategy.gamma),
            lam=generate_kwargs.pop("lambd", strategy.lam),
        )
        self.strategy, self.actor, self.ema_model = config, actor, ema_model
        self.tokenizer = tokenizer if tokenizer is not None else processor.tokenizer
        self.generate_kwargs = {"max_new_tokens": config.max_completion_length, **generate_kwargs}
        self.save_hf_ckpt = save_hf_ckpt
        if critic is None and config.advantage_estimator == "gae" and critic_optim is not None:
            raise ValueError("`critic_optim` was passed, but no `critic` whose weights it could hold.")

        self.ptx_coef, config.ptx_coef = config.ptx_coef, 0.0  # `fit` has the rows
        self.trainer = _ExperienceTrainer(
            model=actor,
            reward_funcs=_rewards_of_the_maker,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": ""}]),  # `fit` has the prompts
            processing_class=processor if processor is not None else self.tokenizer,
            optimizers=_joined(actor_optim, critic_optim, actor_scheduler, critic_scheduler, config),
            value_model=critic,
            ref_model=initial_model.model if has_kl and initial_model is not actor else None,
        )
        self.trainer.remove_callback(ProgressCallback)
        if self.trainer.is_fsdp_enabled or config.deepspeed_plugin and config.deepspeed_plugin.zero_stage == 3:
            raise ValueError(
                "Experience is made and scored with whole weights, which FSDP and ZeRO-3 don't keep; take "
                "`MultimodalPPOTrainer`, or DDP, ZeRO-1 or ZeRO-2."
            )
        self.critic = self.trainer.critic
        if gradient_checkpointing:
            actor.gradient_checkpointing_enable(config.gradient_checkpointing_kwargs)
        if config.shared_trunk:
            raise ValueError("`shared_trunk` has no critic to make experience with; use `MultimodalPPOTrainer`.")
        self.experience_maker = NaiveExperienceMaker(
            actor,
            self.critic,
            reward_model,
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
        self._n_micro_batches = 0  # since the last optimizer step
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
        Trains: for each batch of prompts makes experience, trains on it, and logs, evaluates and saves when it is time.

        Args:
            args ([`MultimodalPPOConfig`]):
                Length and intervals of the run: `num_train_epochs` (episodes) or `max_steps`, `logging_*`, `eval_*`,
                `save_*` and `resume_from_checkpoint` (a path); usually the `strategy`.
            prompts_dataloader (`DataLoader`):
                Batches of prompts for each process. A batch is a list of rows (`prompt`, media columns, `references`,
                `labels` and others for reward functions), or a tuple of lists: prompts, images, references and labels,
                or prompts, images, videos, references and labels.
            pretrain_dataloader (`DataLoader`, *optional*):
                Supervised rows, see `ptx_dataset` of [`MultimodalPPOTrainer`]; its dataset and batch size are used, with
                `ptx_coef` above 0.
            eval_dataloader (`DataLoader`, *optional*):
                Batches as of `prompts_dataloader`, for [`evaluate`].
            consumed_samples (`int`, *optional*, defaults to `0`):
                Prompts, over all processes, to leave out in the beginning. Resuming knows them by itself.
            num_update_steps_per_episodes (`int`, *optional*, defaults to `1`):
                Optimizer steps of an episode at least. It goes through the prompts as often as that takes.

        Raises:
            `ValueError`: If the samples of a rollout don't fill whole optimizer steps, or if there are no supervised rows
                for `ptx_coef`.
        """
        trainer = self.trainer
        prompts = trainer.accelerator.prepare_data_loader(prompts_dataloader, device_placement=False)
        self.eval_dataloader = eval_dataloader
        updates = self._updates_of(len(prompts_dataloader.dataset), prompts_dataloader)
        passes = max(math.ceil(num_update_steps_per_episodes / (updates * len(prompts))), 1)
        rollouts = passes * len(prompts)  # of an episode
        max_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * rollouts) * updates
        if self.ptx_coef > 0:
            if pretrain_dataloader is None:
                raise ValueError(f"`ptx_coef` ({self.ptx_coef}) needs the rows of a `pretrain_dataloader`.")
            trainer._supervised = EndlessRows(pretrain_dataloader.dataset, trainer.args.seed)
            trainer.args.per_device_ptx_batch_size = pretrain_dataloader.batch_size
            trainer.args.ptx_coef = self.ptx_coef
        consumed = self._prepare(max_steps, args) or consumed_samples
        per_rollout = prompts_dataloader.batch_size * trainer.accelerator.num_processes
        rollout = consumed // per_rollout

        trainer.control = trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
        bar = tqdm(total=max_steps, initial=trainer.state.global_step, disable=trainer.args.disable_tqdm)
        while trainer.state.global_step < max_steps:
            place = rollout % len(prompts)
            prompts.set_epoch(rollout // len(prompts))
            for batch in skip_first_batches(prompts, place) if place else prompts:
                episode, rollout = rollout // rollouts, rollout + 1
                experiences = self.experience_maker.make_experience_list(
                    self._rows(batch), gamma=self.strategy.gamma, lambd=self.strategy.lam, **self.generate_kwargs
                )
                for experience in experiences:
                    self.replay_buffer.append(experience)
                logs = {f"rollout_{name}": value for name, value in self._of_rollout(experiences).items()}
                logs |= self.ppo_train(trainer.state.global_step)
                self.replay_buffer.clear()
                bar.update(trainer.state.global_step - bar.n)
                consumed = {"consumed_samples": rollout * per_rollout}
                self.save_logs_and_checkpoints(args, trainer.state.global_step, bar, logs, consumed, episode)
                if rollout % rollouts == 0:
                    self._at_episode_end(args, consumed)
                if trainer.state.global_step >= max_steps:
                    break
        bar.close()
        trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        if self.ema_model is not None:
            with trainer.ema_weights(), trainer._policy_alone():
                self.ema_model.model.load_state_dict(self.actor.model.state_dict())

    def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
        """
        Trains on the buffer for `max_epochs`, each time in another order.

        Args:
            global_steps (`int`, *optional*, defaults to `0`):
                Optimizer steps so far.

        Returns:
            `dict[str, float]`: Means over the updates (`policy_loss`, `critic_loss`, `actor_lr`, `critic_lr`, `kl`,
            `ptx_loss`, `explained_variance`, `entropy` and others of the trainer) and statistics of the buffer: `values`,
            and mean, std, min and max of `returns`, `advantages`, `step_reward` and `response_length`.

        Raises:
            `ValueError`: If the buffer doesn't fill whole optimizer steps.
        """
        trainer, n = self.trainer, len(self.replay_buffer)
        self._prepare(trainer.args.max_steps)
        trainer.state.global_step = global_steps
        size, window = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
        if n == 0 or n % (size * window) != 0:
            raise ValueError(
                f"The buffer holds {n} samples on this process, which don't fill whole optimizer steps of "
                f"{window} x {size} (`gradient_accumulation_steps` x `micro_train_batch_size`)."
            )
        trainer._metrics["train"].clear()
        statistics = self._statistics(self.replay_buffer[:])
        tokens = sum(int(item.action_mask.sum()) for item in self.replay_buffer[:])
        n_tokens = trainer.accelerator.reduce(torch.tensor(float(tokens), device=self.actor.device)).item()
        # The trainer's counts belong to so many micro-batches
        n_tokens *= trainer.args.steps_per_generation / (n // size)
        for _ in range(self.strategy.num_ppo_epochs):
            batches = list(
                self.replay_buffer.batches(batch_size=size, packing_samples=True, pad_token_id=trainer.pad_id)
            )
            for start in range(0, len(batches), window):
                part = batches[start : start + window]
                for experience, mask in zip(part, self._entropy_masks(part), strict=True):
                    self._step(experience, mask, n_tokens)
        return statistics | self._status()

    def training_step(
        self, experience: Experience, global_steps: int, entropy_mask: torch.Tensor | None = None
    ) -> dict[str, float]:
        """
        Adds the gradient of a micro-batch for policy and critic, in one backward, and makes an optimizer step after each
        `gradient_accumulation_steps`.

        Args:
            experience ([`~rollout.experience.Experience`]):
                Micro-batch, padded or packed.
            global_steps (`int`):
                Optimizer steps so far: below `freezing_actor_steps` only the critic moves.
            entropy_mask (`torch.Tensor`, *optional*):
                Weight of each action in the policy loss, `(B, A)`. By default all count, or the share of high entropy that
                `strategy` asks for, in this micro-batch.

        Returns:
            `dict[str, float]`: `policy_loss`, `critic_loss`, `actor_lr`, `critic_lr`, and more of the trainer's metrics.
        """
        return self._one_step(experience, global_steps, entropy_mask, {"policy", "critic"})

    def training_step_actor(
        self, experience: Experience, entropy_mask: torch.Tensor | None = None
    ) -> dict[str, float]:
        """
        Like [`training_step`] for the policy alone.

        Args:
            experience ([`~rollout.experience.Experience`]):
                Micro-batch.
            entropy_mask (`torch.Tensor`, *optional*):
                Weight of each action in the policy loss, `(B, A)`.

        Returns:
            `dict[str, float]`: Metrics.
        """
        return self._one_step(experience, self.trainer.state.global_step, entropy_mask, {"policy"})

    def training_step_critic(self, experience: Experience) -> dict[str, float]:
        """
        Like [`training_step`] for the critic alone.

        Args:
            experience ([`~rollout.experience.Experience`]):
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
        Rewards of responses to other prompts. Changes nothing: no weights, no running statistics, no random numbers.

        Args:
            eval_dataloader (`DataLoader`):
                Batches as of the prompts' loader. Processes take turns, so that each prompt counts once.
            global_step (`int`):
                Optimizer steps so far, for the log.
            greedy (`bool`, *optional*, defaults to `True`):
                Whether to take the likeliest tokens, or to sample as in training.
            n_samples_per_prompt (`int`, *optional*, defaults to `1`):
                Responses to each prompt, when sampling.

        Returns:
            `dict[str, float]`: `reward_mean`, `reward_std`, `response_length_mean`, `num_samples`, the means of the metrics
            of `reward_fn`, and with several samples `reward_best_mean`, the mean of the best response to each prompt.

        Raises:
            `ValueError`: If several greedy responses are asked for, which would be the same.
        """
        if greedy and n_samples_per_prompt > 1:
            raise ValueError("Greedy responses to a prompt are all the same; set `greedy=False`.")
        accelerator, device = self.trainer.accelerator, self.actor.device
        maker = copy.copy(self.experience_maker)
        maker.strategy = replace(
            maker.strategy, advantage_estimator="reinforce", n_samples_per_prompt=n_samples_per_prompt, progress=False
        )
        options = {**self.generate_kwargs, "do_sample": not greedy}
        sums: dict[str, torch.Tensor] = {}

        def add(name: str, values: torch.Tensor) -> None:
            values = values[~values.isnan()].double()
            sums[name] = sums.get(name, 0) + torch.stack(
                [values.sum(), values.square().sum(), values.new_tensor(len(values))]
            )

        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self.strategy.seed + accelerator.process_index)
            for index, batch in enumerate(eval_dataloader):
                if index % accelerator.num_processes != accelerator.process_index:
                    continue
                parts = [(samples, *maker._rewards(samples)) for samples in self._samples(maker, batch, options)]
                rewards = torch.cat([rewards for _, rewards, _ in parts])
                add("reward", rewards)
                if n_samples_per_prompt > 1:
                    add("reward_best", rewards.view(-1, n_samples_per_prompt).nan_to_num(-math.inf).amax(1))
                for samples, _, metrics in parts:
                    add("response_length", samples.response_length.cpu())
                    for name, values in metrics.items():
                        add(name, torch.as_tensor(values, dtype=torch.float64).flatten().cpu())
        names = sorted({name for each in _gather_names(list(sums), accelerator) for name in each})
        results = {}
        for name in names:
            own = sums.get(name, torch.zeros(3, dtype=torch.float64))
            total, squares, count = accelerator.reduce(own.float().to(device)).tolist()
            mean = total / max(count, 1)
            results[f"{name}_mean"] = mean
            if name == "reward":
                results["reward_std"] = math.sqrt(max(squares / max(count, 1) - mean**2, 0))
                results["num_samples"] = count
        return results

    def save_logs_and_checkpoints(
        self,
        args: MultimodalPPOConfig,
        global_step: int,
        step_bar: tqdm | None,
        logs_dict: dict[str, float] | None = None,
        client_states: dict[str, Any] | None = None,
        episode: int = 0,
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
                Metrics. Those that begin with `rollout_` are logged below `rollout/`.
            client_states (`dict`, *optional*):
                Numbers and strings to go into the checkpoint.
            episode (`int`, *optional*, defaults to `0`):
                Current episode.
        """
        trainer, logs = self.trainer, dict(logs_dict or {})
        before, self._reported_step = self._reported_step, global_step
        state = trainer.state
        state.epoch = float(episode)

        def is_due(strategy, interval: int) -> bool:
            return strategy == "steps" and global_step // interval > before // interval

        if step_bar is not None and "rollout_reward" in logs:
            step_bar.set_postfix(reward=f"{logs['rollout_reward']:.3f}")
        if is_due(args.logging_strategy, state.logging_steps):
            trainer.log({_namespaced(name): value for name, value in logs.items()})
        if is_due(args.eval_strategy, state.eval_steps):
            self._evaluate_and_log(global_step)
        if is_due(args.save_strategy, state.save_steps):
            self._save_checkpoint(client_states)

    # Rollout

    def _rows(self, batch: list[dict] | tuple) -> list[dict[str, Any]]:
        """Rows of a batch, whose tuples are those of the reference system."""
        if isinstance(batch, list) and (not batch or isinstance(batch[0], dict)):
            return batch
        media = next((names for names in self._columns if len(names) + 3 == len(batch)), None)
        if media is None:
            lengths = " or ".join(str(len(names) + 3) for names in self._columns)
            raise ValueError(f"A batch of prompts is a list of rows or a tuple of {lengths} lists, got {len(batch)}.")
        rows = []
        for prompt, *values, reference, label in zip(*batch, strict=True):
            row = {"prompt": prompt, "references": reference, "labels": label}
            for name, value in zip(media, values, strict=True):
                if value is not None:
                    row[name] = list(value) if isinstance(value, (list, tuple)) else [value]
            rows.append(row)
        return rows

    def _samples(self, maker: NaiveExperienceMaker, batch, options: dict[str, Any]) -> list[Samples]:
        return maker.generate_samples(self._rows(batch), **options)

    def _updates_of(self, n_prompts: int, dataloader: DataLoader) -> int:
        """Optimizer steps on the experience of a batch of prompts."""
        args, n_processes = self.trainer.args, self.trainer.accelerator.num_processes
        n_samples = dataloader.batch_size * args.num_generations
        step = args.per_device_train_batch_size * args.gradient_accumulation_steps
        if n_samples % step != 0:
            raise ValueError(
                f"A batch of {dataloader.batch_size} prompts gives {n_samples} samples, which don't fill whole optimizer "
                f"steps of {step} (`micro_train_batch_size` x `gradient_accumulation_steps`)."
            )
        if n_prompts % (dataloader.batch_size * n_processes) != 0 and not dataloader.drop_last:
            raise ValueError(
                f"The last of the batches of {dataloader.batch_size} prompts on {n_processes} processes would not be full, "
                f"with {n_prompts} prompts; set `drop_last=True`."
            )
        return n_samples // step * args.num_ppo_epochs

    def _of_rollout(self, experiences: list[Experience]) -> dict[str, float]:
        """Means over the samples of all processes."""
        names = {"reward", "response_length", "kl", "truncated", "return", "soft_overlong_punishment"}
        infos = [experience.info for experience in experiences]
        values = {name: torch.cat([info[name] for info in infos]) for name in names if name in infos[0]}
        for name in infos[0].get("reward_metrics", {}):
            values[name] = torch.cat([torch.as_tensor(info["reward_metrics"][name]).flatten() for info in infos])
        means = {}
        for name in sorted(values):
            gathered = self.trainer.accelerator.gather(values[name].float().to(self.actor.device))
            means[name] = gathered.nanmean().item()
            if name == "reward":
                known = gathered[~gathered.isnan()]
                means["reward_std"] = known.std(correction=0).item() if len(known) else 0.0
        return means

    # Updates

    def _prepare(self, max_steps: int, args: MultimodalPPOConfig | None = None) -> int | None:
        """Hands models and optimizer to the engine, once; gives the consumed prompts of a checkpoint to resume from."""
        trainer = self.trainer
        if trainer.is_prepared:
            return None
        checkpoint = None if args is None else args.resume_from_checkpoint
        trainer.state.compute_steps(trainer.args if args is None else args, max_steps)
        if checkpoint is not None and trainer._is_whole:
            trainer._load_from_checkpoint(checkpoint)
        trainer._prepare_for_training(max(max_steps, 1), None, checkpoint)
        trainer.is_prepared = True
        trainer.model_wrapped.zero_grad()
        if checkpoint is None:
            trainer.state.init_training_references(trainer, max_steps, 1, None)
            return None
        trainer.state = TrainerState.load_from_json(str(Path(checkpoint, "trainer_state.json")))
        trainer.state.compute_steps(args, max_steps)
        trainer.state.init_training_references(trainer, max_steps, 1, None)
        trainer._load_rng_state(checkpoint)
        self._reported_step = trainer.state.global_step
        state = load_rollout_state(checkpoint, trainer.accelerator.process_index)
        return None if state is None else state["client_states"].get("consumed_samples")

    def _one_step(self, experience, global_steps, entropy_mask, trained) -> dict[str, float]:
        trainer = self.trainer
        self._prepare(trainer.args.max_steps)
        trainer._metrics["train"].clear()
        trainer.state.global_step = global_steps
        trainer._trained = trained
        if entropy_mask is None:
            (entropy_mask,) = self._entropy_masks([experience])
        try:
            self._step(experience, entropy_mask)
        finally:
            trainer._trained = {"policy", "critic"}
        return self._status()

    def _step(self, experience: Experience, entropy_mask, n_tokens: float | None = None) -> None:
        """What a step of `Trainer`'s loop does with a micro-batch."""
        trainer = self.trainer
        args, model = trainer.args, trainer.model_wrapped
        self._n_micro_batches += 1
        ends = self._n_micro_batches % args.gradient_accumulation_steps == 0
        trainer.accelerator.gradient_state._set_sync_gradients(ends)
        trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        batch = self._batch(experience, entropy_mask, n_tokens)
        syncs = ends or trainer.is_deepspeed_enabled
        with nullcontext() if syncs else trainer.accelerator.no_sync(model=model):
            trainer.training_step(model, batch, None)
        if not ends:
            return
        norm = trainer._clip_grad_norm(model) if args.max_grad_norm > 0 else None
        norm = trainer._get_grad_norm(model, norm)
        trainer._metrics["train"]["grad_norm"].append(float(norm))
        trainer.callback_handler.on_pre_optimizer_step(args, trainer.state, trainer.control)
        trainer.optimizer.step()
        rates = trainer.lr_scheduler.get_last_lr()
        policy = trainer._critic_groups.index(False) if self.critic is not None else 0
        trainer._metrics["train"]["actor_lr"].append(rates[policy])
        if not trainer.accelerator.optimizer_step_was_skipped:
            trainer.lr_scheduler.step()
        model.zero_grad()
        trainer.state.global_step += 1
        trainer.callback_handler.on_step_end(args, trainer.state, trainer.control)

    def _batch(self, experience: Experience, entropy_mask, n_tokens: float | None) -> dict[str, Any]:
        """The micro-batch as the trainer takes it: prompts, and completions padded on the right."""
        trainer, device = self.trainer, self.actor.device
        items = split_experience_batch(experience)
        masks = None if entropy_mask is None else list(entropy_mask)
        if isinstance(experience.sequences, torch.Tensor):
            if masks is not None:
                masks = [mask[item.action_mask.bool()] for mask, item in zip(masks, items, strict=True)]
            items = remove_padding_in_sequences(items)
        prompts: list[EncodedPrompt] = []
        for item in items:
            prompts.append(self._prompt(item, prompts))

        def padded(name: str) -> torch.Tensor:
            return pad_sequence([getattr(item, name) for item in items], batch_first=True).to(device)

        mask = padded("action_mask").long()
        actions = [item.sequences[len(item.sequences) - len(item.action_mask) :] for item in items]
        steps = trainer.args.steps_per_generation
        if n_tokens is None:
            n_tokens = trainer.accelerator.reduce(mask.sum().float()).item() * steps
        ids = left_pad(prompts, trainer.pad_id)
        batch = {
            "prompt_ids": ids["input_ids"].to(device),
            "prompt_mask": ids["attention_mask"].to(device),
            "completion_ids": pad_sequence(actions, batch_first=True, padding_value=trainer.pad_id).to(device),
            "completion_mask": pad_sequence([torch.ones_like(each) for each in actions], batch_first=True).to(device),
            "tool_mask": mask,  # an action that doesn't count is seen all the same
            "num_items_in_batch": torch.tensor(n_tokens, device=device),
            "encoded_prompts": prompts,
            "packed": [trainer._can_pack] * len(items),
        }
        rewards = torch.stack([torch.as_tensor(item.info["reward"]) for item in items])
        batch["scorable"] = (~rewards.isnan()).long().to(device)
        for field, name in _TOKEN_FIELDS.items():
            if getattr(items[0], field) is not None:
                batch[name] = padded(field)
        if masks is not None:
            batch["high_entropy_weights"] = pad_sequence(masks, batch_first=True).to(device)
        return batch

    def _prompt(self, item: BufferItem, others: list[EncodedPrompt]) -> EncodedPrompt:
        """The prompt of a sample; the same object as an equal one, so that a forward shares it."""
        model = self.actor.base_model
        accepted = inspect.signature(type(model).forward).parameters
        names = {field: name for name, field in MEDIA_FIELDS.items() if name in accepted}
        media = {names.get(field, field): tensor.cpu() for field, tensor in media_tensors(item).items()}
        ids = item.sequences[: len(item.sequences) - len(item.action_mask)].cpu()
        for other in others:
            same_ids = torch.equal(other.input_ids, ids) and other.media.keys() == media.keys()
            if same_ids and all(torch.equal(other.media[name], value) for name, value in media.items()):
                return other
        check_media(model, [ids], media)
        return bare_prompt(model, ids, media)

    def _entropy_masks(self, experiences: list[Experience]) -> list[list[torch.Tensor] | torch.Tensor | None]:
        """Weights of the actions of some micro-batches, among which those of high entropy are chosen."""
        args = self.strategy
        if args.top_entropy_quantile == 1:
            return [None] * len(experiences)
        if args.entropy_scope == "micro_batch" and len(experiences) > 1:
            return [mask for experience in experiences for mask in self._entropy_masks([experience])]
        options = {"ratio": args.top_entropy_quantile, "renormalize": args.entropy_renormalize}
        entropies = [row for experience in experiences for row in experience.action_entropy]
        masks = [row for experience in experiences for row in experience.action_mask]
        entropies, mask = (pad_sequence(rows, batch_first=True).to(self.actor.device) for rows in (entropies, masks))
        gather, mask = self.trainer._gather_rows, mask.long()
        if args.entropy_scope == "sequence":
            weights = high_entropy_mask(entropies, mask, scope="sequence", **options)
        else:
            first = self.trainer.accelerator.process_index * len(mask)
            weights = high_entropy_mask(gather(entropies), gather(mask), **options)[first : first + len(mask)]
        rows = iter(weights)
        return [
            [next(rows)[: len(row)] for row in experience.action_mask]
            if isinstance(experience.sequences, list)
            else torch.stack([next(rows)[: experience.action_mask.size(1)] for _ in experience.action_mask])
            for experience in experiences
        ]

    # Logs

    def _status(self) -> dict[str, float]:
        """Means of the trainer's metrics since the last time, by the names of the reference system."""
        metrics = self.trainer._metrics["train"]
        status = {}
        for name, values in metrics.items():
            known = [value for value in values if not math.isnan(value)]
            status[_NAMES.get(name, name)] = sum(known) / len(known) if known else math.nan
        metrics.clear()
        return status

    def _statistics(self, items: list[BufferItem]) -> dict[str, float]:
        """Of the buffers of all processes."""
        accelerator, device = self.trainer.accelerator, self.actor.device

        def everyone(values: list[torch.Tensor]) -> torch.Tensor:
            values = torch.cat(values).float().to(device)
            values = accelerator.pad_across_processes(values, pad_index=math.nan)
            values = accelerator.gather(values)
            return values[~values.isnan()]

        valid = [item.action_mask.bool() for item in items]

        def actions(field: str) -> torch.Tensor:
            return everyone([getattr(item, field)[mask] for item, mask in zip(items, valid, strict=True)])

        columns = {
            "step_reward": everyone([torch.as_tensor(item.info["reward"]).view(1) for item in items]),
            "response_length": everyone([mask.sum().view(1) for mask in valid]),
            "advantages": actions("advantages"),
            "returns": actions("returns"),
        }
        statistics = {}
        for name, values in columns.items():
            for kind in ("mean", "std", "min", "max") if len(values) else ():
                value = values.std(correction=0) if kind == "std" else getattr(values, kind)()
                statistics[f"{name}_{kind}"] = value.item()
        if items[0].kl is not None:
            statistics["kl"] = actions("kl").mean().item()
        if self.critic is not None:
            values, returns = actions("values"), columns["returns"]
            statistics["values"] = values.mean().item()
            statistics["explained_variance"] = explained_variance(values, returns, torch.ones_like(values)).item()
        return statistics

    def _evaluate_and_log(self, global_step: int) -> None:
        if self.eval_dataloader is None:
            raise ValueError("`eval_strategy` asks for an evaluation, but `fit` got no `eval_dataloader`.")
        results = self.evaluate(self.eval_dataloader, global_step)
        self.trainer.log({f"eval_{name}": value for name, value in results.items()})

    def _save_checkpoint(self, client_states: dict[str, Any] | None) -> None:
        trainer = self.trainer
        trainer.client_states = dict(client_states or {})
        trainer._save_checkpoint(trainer.model, trial=None)
        if self.save_hf_ckpt:
            folder = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}-hf"
            trainer.save_model(str(Path(trainer.args.output_dir, folder)), _internal_call=True)

    def _at_episode_end(self, args: MultimodalPPOConfig, client_states: dict[str, Any]) -> None:
        if args.eval_strategy == "epoch":
            self._evaluate_and_log(self.trainer.state.global_step)
        if args.save_strategy == "epoch":
            self._save_checkpoint(client_states)


class _ExperienceTrainer(MultimodalPPOTrainer):
    """Takes batches that are made of experience, and keeps with them what a checkpoint needs to go on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.is_prepared = False  # whether the engine has models and optimizer
        self.client_states: dict[str, Any] = {}
        self.replay_buffer: ReplayBuffer | None = None

    @property
    def pad_id(self) -> int:
        return self._tokenizer.pad_token_id

    def _prepare_inputs(self, inputs):
        return inputs

    def _rollout_state(self) -> dict[str, Any]:
        buffer = self.replay_buffer.state_dict()
        return {**super()._rollout_state(), "client_states": self.client_states, "experience": buffer}

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        super()._load_rollout_state(state)
        self.replay_buffer.load_state_dict(state["experience"])


def _rewards_of_the_maker(**kwargs):
    """Stands for the reward functions that the trainer doesn't run."""
    raise RuntimeError("Rewards come from the experience maker; call `fit`.")


def _joined(actor_optim, critic_optim, actor_scheduler, critic_scheduler, config) -> tuple:
    """One optimizer and one schedule of those of policy and critic."""
    has_critic = config.advantage_estimator == "gae"
    optimizers = [actor_optim, critic_optim] if has_critic else [actor_optim]
    schedulers = [actor_scheduler, critic_scheduler] if has_critic else [actor_scheduler]
    if not has_critic and (critic_optim is not None or critic_scheduler is not None):
        raise ValueError(
            f"`critic_optim` or `critic_scheduler` was passed, but `advantage_estimator={config.advantage_estimator!r}` has "
            "no critic."
        )
    if all(each is None for each in optimizers + schedulers):
        return None, None
    if any(each is None for each in optimizers):
        raise ValueError(
            "One optimizer trains policy and critic: pass both `actor_optim` and `critic_optim`, or none."
        )
    if len({type(each) for each in optimizers}) > 1:
        names = " and ".join(type(each).__name__ for each in optimizers)
        raise ValueError(f"One optimizer trains policy and critic, so both must be of one class, got {names}.")
    optimizer = type(actor_optim)([dict(group) for each in optimizers for group in each.param_groups])
    if all(each is None for each in schedulers):
        return optimizer, None
    for each in schedulers:
        if not isinstance(each, LambdaLR):
            raise ValueError(
                f"Pass a `LambdaLR` for each optimizer, such as `transformers.get_scheduler` gives, got "
                f"{type(each).__name__}."
            )
    n_frozen = config.freezing_actor_steps

    def thawed(factor):
        return lambda step: 0.0 if step < n_frozen else factor(step - n_frozen)

    factors = [thawed(factor) for factor in actor_scheduler.lr_lambdas]
    return optimizer, LambdaLR(optimizer, factors + [f for each in schedulers[1:] for f in each.lr_lambdas])


def _namespaced(name: str) -> str:
    return f"rollout/{name.removeprefix('rollout_')}" if name.startswith("rollout_") else name


def _gather_names(names: list[str], accelerator) -> list[list[str]]:
    if accelerator.num_processes == 1:
        return [names]
    gathered: list = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(gathered, names)
    return gathered
