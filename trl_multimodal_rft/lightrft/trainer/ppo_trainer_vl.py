# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""PPO with the interface of LightRFT: experience, a buffer, and a method for each step of the loop."""

import copy
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerControl, TrainerState
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import IntervalStrategy

from ...models.modes import kept_random_state
from ...models.parts import check_base_is_kept
from ...trainers.ppo.config import MultimodalPPOConfig
from ..models.actor import ActorVL
from ..models.critic import Critic
from ..strategy import OPTIONS, convert_command_line
from ..strategy_object import Strategy
from .experience import Experience
from .experience_metrics import evaluation_logs, rollout_logs
from .experience_trainer import ExperienceTrainer, copy_average
from .optimizers import check_optimizers
from .ppo_arguments import remember_passed, resolve_arguments, take_keywords
from .ppo_options import SAMPLING_OPTIONS, config_of, media_columns_of, rollouts_of, rows_of
from .replay_buffer import ReplayBuffer


# Fields of the config that `fit` takes from its argument
_RUN_FIELDS = """
num_train_epochs max_steps logging_strategy logging_steps logging_first_step eval_strategy eval_steps
save_strategy save_steps resume_from_checkpoint
""".split()


class PPOTrainerVL:
    """
    PPO of vision-language models in the steps of LightRFT: make experience, put it into a buffer, train on it.

    The steps use the loss, optimizer, metrics and checkpoints of a [`MultimodalPPOTrainer`]. Prefer that trainer for a
    run from a dataset. The steps run on one process, with DDP, and with ZeRO-1 and ZeRO-2. The critic becomes part of
    `actor.model`, so save the policy with [`save_model`], which separates policy and critic. See
    [`NaiveExperienceMaker`] for the arguments of models, tokenizer, processor and sources of reward.

    Args:
        strategy ([`MultimodalPPOConfig`]):
            All options, maybe the [`~lightrft.strategy_object.Strategy`] of a command line. A value that is set here
            or passed below wins over defaults, and a contradiction is an error; the temperature is the actor's. With
            `use_vllm`, the engine samples, colocated or as a server, with the weights of the last optimizer step, and
            the policy scores what it sampled. `num_generations` is the number of completions of a prompt. Options of
            sampling go into `generate_kwargs`. Options that affect only the rollouts and the loop of
            [`MultimodalPPOTrainer`] raise an error. The KL divergence is in the rewards of tokens, see
            [`NaiveExperienceMaker.make_experience_list`], unless `kl_estimator` is `"k2"` or `"k3"`.
        actor ([`~lightrft.ActorVL`]):
            Policy. With `packing_samples`, forwards share a prompt and its media among its completions.
        critic ([`~models.Critic`], *optional*):
            Value model. For `"gae"`, `None` makes a critic from a copy of the policy. Other estimators need `None`.
        initial_model ([`~lightrft.ActorVL`], *optional*):
            Reference of the KL divergence. `None` means the policy without its adapter, or, if the policy has no
            adapter, no KL divergence.
        ema_model ([`~lightrft.ActorVL`], *optional*):
            A copy of the policy, which gets the moving average of the weights at the end of [`fit`]. With `None`,
            [`save_model`] saves an average, if `strategy` has an `ema_decay`.
        actor_optim, critic_optim, actor_scheduler, critic_scheduler (*optional*):
            Optimizers of the trained weights of `actor` and `critic`, and their schedules, which step with each update
            of their model. Each side's gradient is clipped to `max_norm`, and the value loss has the weight 1. `None`
            for all four makes one optimizer of both, with the rates and schedules of `strategy`; its gradients are
            clipped by their common norm, and the value loss has the weight `vf_coef`.
        ema_beta, init_kl_coef, ptx_coef (`float`, *optional*, default to `0.992`, `0.001` and `0`):
            Decay of the moving average, and weights of the KL divergence and of the supervised loss. With a
            `ptx_coef` of 0, supervised rows are ignored.
        kl_target, kl_horizon (`float` and `int`, *optional*, default to `None` and `10000`):
            Divergence per token, in nats, that an adaptive coefficient holds, and number of completions in which the
            coefficient changes by about 20 % at most. `None` keeps the coefficient constant.
        micro_train_batch_size, micro_rollout_batch_size (`int`, *optional*, defaults to `8`):
            Number of samples per device in a training forward, and number of samples that are sampled and scored at
            once.
        buffer_limit, buffer_cpu_offload (*optional*, default to `0` and `True`):
            See [`ReplayBuffer`].
        eps_clip, value_clip (`float`, *optional*, defaults to `0.2`):
            Clip ranges of the policy loss and of the value loss.
        gradient_checkpointing (`bool`, *optional*, defaults to `False`):
            Whether the backward pass recomputes activations.
        max_epochs, max_norm (*optional*, default to `1` and `1.0`):
            Passes over the buffer, and largest gradient norm.
        dataloader_pin_memory (`bool`, *optional*, defaults to `True`):
            Whether the tensors of an update are pinned before they move from the CPU to a GPU.
        save_hf_ckpt, disable_ds_ckpt (`bool`, *optional*, defaults to `False`):
            `save_hf_ckpt` also saves the models with each checkpoint, in a folder `hf-checkpoint-...` that
            `save_total_limit` doesn't delete. `disable_ds_ckpt` saves only the models in checkpoints, so that no run
            can resume from them.
        generate_kwargs:
            Options of sampling, such as `max_new_tokens` (defaults to `max_completion_length`), `gamma` and `lambd`
            (default to `gamma` and `lam` of the strategy's estimator), and options of LightRFT's command line.

    Raises:
        `TypeError`: If `strategy` is no [`MultimodalPPOConfig`].
        `ValueError`: If an option is unknown, has no effect here or contradicts `strategy`, if optimizers or schedules
            don't fit the models, if there is no source of reward, if `critic`, `initial_model` or `ema_model` doesn't
            fit, or if parameters are sharded.
    """

    # Names of the media lists in a batch that is a tuple; by default those of the actor's modality
    _possible_media_columns: Sequence[tuple[str, ...]] | None = None
    passed: set[str]  # names of the arguments that were passed

    @remember_passed
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
        actor_scheduler: LRScheduler | None,
        critic_scheduler: LRScheduler | None,
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
        arguments = locals()
        if not isinstance(strategy, MultimodalPPOConfig):
            raise TypeError(f"`strategy` must be a MultimodalPPOConfig, got {type(strategy).__name__}.")
        values = resolve_arguments(strategy, arguments, self.passed)
        strategy, generate_kwargs = take_keywords(strategy, generate_kwargs)
        if tokenizer is None and processor is None:
            raise ValueError("Pass the policy's `processor`, or its `tokenizer` if prompts are text.")
        if critic is None and actor_optim is not None and strategy.estimator.name == "gae":
            raise ValueError(
                "`actor_optim` doesn't train the critic that 'gae' makes from the policy; pass a `critic` and its "
                "`critic_optim`, or no optimizers."
            )
        check_optimizers(actor, critic, actor_optim, critic_optim, actor_scheduler, critic_scheduler)
        if initial_model is None and is_peft_model(actor.model):
            initial_model = actor
        options = _options_of_config(strategy, values, ema_model, critic_optim)
        config = config_of(strategy, actor, critic, initial_model, generate_kwargs, options)
        self.strategy = config
        self.actor = actor
        self.ema_model = ema_model
        reference = initial_model if config.beta > 0 else None
        if reference is actor:
            check_base_is_kept(actor.model, None, "the reference of `init_kl_coef`", "pass `initial_model`")
        self.tokenizer: Any = getattr(processor, "tokenizer", None) if tokenizer is None else tokenizer
        self.generate_kwargs = {"max_new_tokens": config.max_completion_length, **generate_kwargs}
        self.save_hf_ckpt = values.save_hf_ckpt
        self.replay_buffer = ReplayBuffer(
            values.micro_train_batch_size, values.buffer_limit, values.buffer_cpu_offload
        )
        self.trainer = ExperienceTrainer(
            actor,
            config,
            self.replay_buffer,
            processing_class=self.tokenizer if processor is None else processor,
            value_model=critic,
            ref_model=None if reference is None or reference is actor else reference.model,
            optimizers=(actor_optim, critic_optim),
            schedulers=(actor_scheduler, critic_scheduler),
        )
        config.eval_strategy = strategy.eval_strategy  # `config_of` set "no" for the constructor of the trainer
        self.critic = self.trainer.critic
        if ema_model is not None:
            copy_average(self.trainer.ema, actor, ema_model)
        if values.gradient_checkpointing:
            checkpointing_kwargs: Any = config.gradient_checkpointing_kwargs  # a dict; the config has parsed a string
            actor.gradient_checkpointing_enable(checkpointing_kwargs)
        self.experience_maker = self.trainer.make_experience_maker(
            values.micro_rollout_batch_size,
            reward_model=reward_model,
            initial_model=reference,
            tokenizer=self.tokenizer,
            prompt_max_len=values.prompt_max_len,
            remote_rm_url=values.remote_rm_url,
            reward_fn=reward_fn,
            reward_fn_label_map=reward_fn_label_map,
            reward_recipe=reward_recipe,
            processor=processor,
        )
        self.eval_dataloader: DataLoader | None = None
        self._last_step = 0

    # The loop

    def fit(
        self,
        args: MultimodalPPOConfig | Namespace,
        prompts_dataloader: DataLoader,
        pretrain_dataloader: DataLoader | None,
        eval_dataloader: DataLoader | None = None,
        consumed_samples: int = 0,
        num_update_steps_per_episodes: int = 1,
    ) -> None:
        """
        Trains: makes experience of a batch of prompts, trains on the experience, logs, evaluates and saves, in a loop.

        A rollout is the experience of one batch on every rank. An episode consists of one or more passes over all
        prompts: 16 batches in two passes make an episode of 32 rollouts. The loop runs within `train` of
        [`MultimodalPPOTrainer`], which checks the checkpoint that the run resumes from, locks the output folder, and
        ends with a log of the run's speed and, if the run saves, with a checkpoint. Intervals count optimizer steps.
        What is due within a rollout is done at the end of the rollout.

        Args:
            args ([`MultimodalPPOConfig`] or `argparse.Namespace`):
                Length and intervals of the run, usually the `strategy` or LightRFT's command line:
                `num_train_epochs` (episodes) or `max_steps` (rounded up to whole rollouts), `logging_*`, `eval_*`,
                `save_*` and `resume_from_checkpoint` (a path, or `True` for the newest whole checkpoint).
            prompts_dataloader (`DataLoader`):
                Batches of prompts for each rank. A batch is a list of rows (`prompt`, media columns, `references`,
                `labels` and others for reward functions), or a tuple of lists: prompts, images, maybe videos,
                references and labels. In a tuple, the media of a prompt are a list, a single item, or `None`.
            pretrain_dataloader (`DataLoader`, *optional*):
                Supervised rows, if `ptx_coef` is above 0. Only the dataset, see `ptx_dataset` of
                [`MultimodalPPOTrainer`], and the batch size of the dataloader are used.
            eval_dataloader (`DataLoader`, *optional*):
                Batches like those of `prompts_dataloader`, for [`evaluate`]. Without an `eval_strategy`, they are
                evaluated after each episode.
            consumed_samples (`int`, *optional*, defaults to `0`):
                Number of prompts, over all ranks, to skip at the start. A resumed run takes it from the checkpoint.
            num_update_steps_per_episodes (`int`, *optional*, defaults to `1`):
                Number of optimizer steps per episode. An episode repeats the prompts as often as they fit into it, and
                passes over them once at least.

        Raises:
            `ValueError`: If the samples of a rollout don't fill whole optimizer steps, if the prompts don't fill whole
                batches, if rows are missing for evaluation or `ptx_coef`, or if no checkpoint is whole.
            `RuntimeError`: If the trainer has made updates before, or if another run trains in the output folder.
            `KeyboardInterrupt`: At Ctrl-C, SIGTERM or SIGHUP, after a checkpoint at the end of the rollout.
        """
        trainer = self.trainer
        if trainer.is_prepared:
            raise RuntimeError("There have been updates already, so schedules can't start; `fit` a new trainer.")
        run = self._take_run(args)
        if eval_dataloader is not None and run.eval_strategy == IntervalStrategy.NO:
            run.eval_strategy = IntervalStrategy.EPOCH
        if run.eval_strategy != IntervalStrategy.NO and eval_dataloader is None:
            raise ValueError("`eval_strategy` needs prompts to evaluate on; pass an `eval_dataloader`.")
        if run.save_strategy == "best":
            raise ValueError("`save_strategy='best'` isn't supported; save 'steps' or 'epoch'.")
        self.eval_dataloader = eval_dataloader
        if pretrain_dataloader is None and isinstance(run, Strategy):
            run.ptx_coef = 0.0  # LightRFT's command line has a coefficient even without supervised rows
        trainer.set_supervised_rows(pretrain_dataloader)
        rollouts = rollouts_of(
            prompts_dataloader,
            run,
            self.replay_buffer.limit,
            trainer.accelerator.num_processes,
            num_update_steps_per_episodes,
            train_on=self._train_on_prompts,
            end_episode=self._log_evaluate_save,
        )
        n_prompts = rollouts.n_rollouts * rollouts.n_prompts
        if not 0 <= consumed_samples < n_prompts:
            raise ValueError(
                f"`consumed_samples` ({consumed_samples}) must be at least 0, and less than the run's {n_prompts} "
                "prompts."
            )
        trainer.run(rollouts, consumed_samples, run.resume_from_checkpoint)
        if self.ema_model is not None:
            copy_average(trainer.ema, self.actor, self.ema_model)

    def _take_run(self, args: MultimodalPPOConfig | Namespace) -> MultimodalPPOConfig:
        """Returns the trainer's config, which takes length and intervals of the run from `args`."""
        config = self.strategy
        if not isinstance(args, Namespace):
            vars(config).update({name: getattr(args, name) for name in _RUN_FIELDS})
        elif not isinstance(config, Strategy) or args is not config.args:  # not the strategy's command line
            fields = convert_command_line(args).fields
            vars(config).update({name: fields[name] for name in _RUN_FIELDS if name in fields})
        return config

    def _train_on_prompts(self, batch: list[dict] | tuple, client_states: dict[str, Any], episode: float) -> None:
        """Makes experience of a batch of prompts, trains on the experience, and runs the actions that are due."""
        trainer = self.trainer
        rows = self._rows(batch)
        with trainer.checking_policy():
            experiences = self.experience_maker.make_experience_list(rows, **self.generate_kwargs)
        for experience in experiences:
            self.replay_buffer.append(experience)
        logs = {f"rollout_{name}": value for name, value in rollout_logs(experiences).items()}
        logs |= self.ppo_train(trainer.state.global_step)
        self.replay_buffer.clear()
        self.save_logs_and_checkpoints(self.strategy, trainer.state.global_step, None, logs, client_states, episode)

    def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
        """
        Trains on the buffer for `max_epochs` epochs, each in a new random order.

        The completions of a prompt stay together, so that they share the prompt in a forward. With
        `packing_shuffle=True`, single completions are shuffled.

        Args:
            global_steps (`int`, *optional*, defaults to `0`):
                Optimizer steps so far.

        Returns:
            `dict[str, float]`: Means over the updates (`policy_loss`, `critic_loss`, `actor_lr`, `critic_lr`, `kl`,
            `ptx_loss`, `entropy` and others of the trainer) and statistics of the buffers of all ranks: `values`,
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
        Adds the gradient of a micro-batch for policy and critic, in one backward pass, and makes an optimizer step
        after every `gradient_accumulation_steps` micro-batches.

        Args:
            experience ([`~lightrft.trainer.experience.Experience`]):
                Micro-batch, padded or packed.
            global_steps (`int`):
                Optimizer steps so far: below `freezing_actor_steps`, only the critic is trained.
            entropy_mask (`torch.Tensor`, *optional*):
                Weight of each action in the policy loss, `(B, A)`, or a list of `(A,)` for packed experience. By
                default, the strategy's `top_entropy_quantile` chooses the actions of this micro-batch that count.

        Returns:
            `dict[str, float]`: `policy_loss`, `critic_loss`, `actor_lr`, `critic_lr`, and others of the trainer's
            metrics.

        Raises:
            `ValueError`: If the experience doesn't have the fields of the update, or if there is no critic to train.
            `RuntimeError`: If an unfinished update trains other models, such as the critic alone.
        """
        return self.trainer.train_on(experience, global_steps, {"policy", "critic"}, entropy_mask)

    def training_step_actor(
        self, experience: Experience, entropy_mask: torch.Tensor | None = None
    ) -> dict[str, float]:
        """Trains the policy alone, see [`training_step`]. The step counts, and costs, as much as training both."""
        return self.trainer.train_on(experience, self.trainer.state.global_step, {"policy"}, entropy_mask)

    def training_step_critic(self, experience: Experience) -> dict[str, float]:
        """Trains the critic alone, see [`training_step`]. The step counts, and costs, as much as training both."""
        if self.critic is None:
            raise ValueError(f"`advantage_estimator={self.strategy.advantage_estimator!r}` has no critic to train.")
        return self.trainer.train_on(experience, self.trainer.state.global_step, {"critic"})

    @torch.no_grad()
    def evaluate(self, eval_dataloader: Iterable, global_step: int) -> dict[str, float]:
        """
        Evaluates greedy completions of held-out prompts. Ranks evaluate different batches, so that each prompt counts
        once. Weights, running statistics and random states stay unchanged.

        Args:
            eval_dataloader (`Iterable`):
                The same batches on all ranks, see [`fit`].
            global_step (`int`):
                Ignored.

        Returns:
            `dict[str, float]`: `reward_mean`, `reward_std`, `response_length_mean`, `num_samples` and the means of the
            metrics of `reward_fn`. Unscorable completions count in `num_samples` alone.
        """
        accelerator = self.trainer.accelerator
        ignored = ("gamma", "lambd", *SAMPLING_OPTIONS)
        options = {name: value for name, value in self.generate_kwargs.items() if name not in ignored}
        maker = copy.copy(self.experience_maker)
        maker.strategy = replace(
            maker.strategy, advantage_estimator="reinforce", n_samples_per_prompt=1, bootstrap_truncated=False
        )
        with kept_random_state():
            own_batches: Iterable = islice(eval_dataloader, accelerator.process_index, None, accelerator.num_processes)
            surplus = []
            if self.trainer.args.use_vllm and accelerator.num_processes > 1:
                # Ranks share engines, so a rank without a batch in the last round samples another's for nothing
                batches = list(eval_dataloader)
                own_batches = batches[accelerator.process_index :: accelerator.num_processes]
                if len(own_batches) < math.ceil(len(batches) / accelerator.num_processes):
                    surplus = batches[-1:]
            options["do_sample"] = False
            return evaluation_logs(maker, map(self._rows, own_batches), options, map(self._rows, surplus))

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
        Runs each action (log, evaluate, save) whose interval has ended since the last call.

        Args:
            args ([`MultimodalPPOConfig`]):
                Intervals in optimizer steps: `logging_*`, `eval_*` and `save_*`.
            global_step (`int`):
                Optimizer steps so far.
            step_bar (`tqdm`, *optional*):
                Progress bar that shows the reward.
            logs_dict (`dict[str, float]`, *optional*):
                Metrics. Their means over the interval are logged, `rollout_<name>` as `rollout/<name>`.
            client_states (`dict`, *optional*):
                Numbers and strings for the checkpoint.
            episode (`float`, *optional*, defaults to `0`):
                Episodes so far, the log's `epoch`.
        """
        trainer = self.trainer
        trainer.prepare_without_fit()
        state = trainer.state
        state.epoch = float(episode)
        if not trainer.is_in_train:  # no update has asked the callbacks about the steps of this loop
            _ask_about_steps(args, state, trainer.control, self._last_step, global_step)
            self._last_step = global_step
        for name, value in (logs_dict or {}).items():
            trainer.pending_logs.setdefault(name, []).append(value)
        if step_bar is not None and logs_dict and "rollout_reward" in logs_dict:
            step_bar.set_postfix(reward=f"{logs_dict['rollout_reward']:.3f}")
        self._log_evaluate_save(client_states or {})

    def save_model(self, output_dir: str | None = None) -> None:
        """
        Saves the policy as a plain model with its processor. The critic goes to the folder `critic`, and a policy with
        averaged weights, if any, to `ema`.

        Args:
            output_dir (`str`, *optional*):
                Target folder. Defaults to the `output_dir` of `strategy`.
        """
        self.trainer.save_model(output_dir)

    def _rows(self, batch: list[dict] | tuple) -> list[dict[str, Any]]:
        rows = rows_of(batch, self._possible_media_columns or media_columns_of(self.actor))
        self.trainer.card_notes.columns.update(*rows)
        return rows

    def _log_evaluate_save(self, client_states: dict[str, Any]) -> None:
        """Runs the actions (log, evaluate, save) that the trainer's `control` asks for."""
        trainer = self.trainer
        if trainer.control.should_log:
            trainer.log_pending()
        if trainer.control.should_evaluate:
            if self.eval_dataloader is None:
                raise ValueError("`eval_strategy` needs prompts to evaluate on, but `fit` got no `eval_dataloader`.")
            results = self.evaluate(self.eval_dataloader, trainer.state.global_step)
            results = {f"eval_{name}": value for name, value in results.items()}
            trainer.log(results)
            handler = trainer.callback_handler
            trainer.control = handler.on_evaluate(trainer.args, trainer.state, trainer.control, results)
            trainer._determine_best_metric(results, None)
        if trainer.control.should_save:
            trainer.save_checkpoint(client_states, self.save_hf_ckpt)


class PPOTrainerAL(PPOTrainerVL):
    """
    PPO of audio-language models in the steps of LightRFT, see [`PPOTrainerVL`].

    Arguments are those of [`PPOTrainerVL`], with [`~lightrft.ActorAL`] as actors. Batches of prompts are lists of
    rows, or tuples of lists: prompts, audios, references and labels.
    """

    _possible_media_columns = (("audios",),)


def _ask_about_steps(
    args: MultimodalPPOConfig, state: TrainerState, control: TrainerControl, last_step: int, step: int
) -> None:
    """Sets the actions of `control` whose interval has ended since `last_step`, by transformers' callback."""
    flow = DefaultFlowCallback()
    state.compute_steps(args, max(args.max_steps, 1))
    for state.global_step in range(last_step + 1, step + 1):
        flow.on_step_end(args, state, control)


def _options_of_config(
    strategy: MultimodalPPOConfig,
    values: SimpleNamespace,
    ema_model: ActorVL | None,
    critic_optim: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    """Returns fields of the config by the arguments of the trainer, see [`resolve_arguments`]."""
    keeps_average = ema_model is not None or strategy.ema_decay is not None
    # An optimizer of its own makes the weight of the value loss 1
    own_value_weight = {} if critic_optim is None else {"vf_coef": 1.0}
    value_clip = {"cliprange_value": values.value_clip} if strategy.estimator.needs == "critic" else {}
    horizon = {"kl_horizon": values.kl_horizon} if values.kl_target else {}
    return {
        **{field: getattr(values, name) for name, field in OPTIONS.items() if hasattr(values, name)},
        "kl_target": values.kl_target or None,
        **horizon,
        **own_value_weight,
        **value_clip,
        "dataloader_pin_memory": values.dataloader_pin_memory,
        "ema_decay": values.ema_beta if keeps_average else None,
        "save_only_model": values.disable_ds_ckpt,
    }
