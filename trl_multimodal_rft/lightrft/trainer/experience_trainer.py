# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A PPO trainer that trains on experience, one micro-batch at a time."""

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import DataLoaderShard
from datasets import Dataset
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Subset
from transformers import GenerationConfig, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from ...algorithms.metrics import average
from ...data.rows.batches import EndlessRows
from ...data.rows.features import undecoded
from ...encoding.prompts import EncodedPrompt
from ...rollout.rollout import RewardValues, Rollout, TokenChoice, Values
from ...trainers.base.dataset_checks import warn_of_unread_media
from ...trainers.base.ema import MovingAverage
from ...trainers.base.finite import naming_broken_logits
from ...trainers.checkpoints.files import load_rollout_state
from ...trainers.ppo.config import MultimodalPPOConfig
from ...trainers.ppo.trainer import MultimodalPPOTrainer
from ..models.actor import Actor
from ..models.bare_inputs import bare_prompts, media_names
from .experience import Experience, zero_pad_sequences
from .experience_config import ExperienceConfig
from .experience_maker import NaiveExperienceMaker
from .experience_metrics import buffer_statistics, mean
from .optimizers import TwoOptimizers, TwoSchedulers
from .replay_buffer import ReplayBuffer
from .replay_buffer_utils import BufferItem, column, media_tensors, unpadded_items


WHOLE_WEIGHTS = (
    "Experience is made and scored with whole weights, which FSDP and ZeRO-3 don't keep; use `MultimodalPPOTrainer`, "
    "or DDP, ZeRO-1 or ZeRO-2."
)

_N_ROWS_TO_SEARCH = 16  # supervised rows that are searched for media before training
_ACTIONS = ("should_log", "should_evaluate", "should_save")  # of a `TrainerControl`


@dataclass(frozen=True)
class Rollouts:
    """
    The rollouts of a run. One trains on the experience of a batch of `prompts` of each rank.

    Args:
        prompts (`DataLoader`):
            Batches of prompts for each rank.
        train_on (`Callable`):
            Function that makes experience of a batch, trains on it, logs, evaluates and saves. It takes the batch, the
            state of the loop for checkpoints, and the number of episodes so far.
        end_episode (`Callable`):
            Function that logs, evaluates and saves at the end of an episode, if the trainer's `control` asks for it.
            It takes the state of the loop.
        steps (`int`):
            Number of optimizer steps per rollout.
        n_prompts (`int`):
            Number of prompts per rollout, over all ranks.
        per_episode (`int`):
            Number of rollouts per episode.
        n_rollouts (`int`):
            Number of rollouts of all episodes.
        limit (`int`, *optional*):
            Number of rollouts that the run makes. By default, those of all episodes but the ones skipped at the start.
    """

    prompts: DataLoader
    train_on: Callable[[Any, dict[str, Any], float], None]
    end_episode: Callable[[dict[str, Any]], None]
    steps: int
    n_prompts: int
    per_episode: int
    n_rollouts: int
    limit: int | None = None


class ExperienceTrainer(MultimodalPPOTrainer):
    """
    A [`MultimodalPPOTrainer`] that trains on experience. `train` runs the rollouts of [`run`]. Without a run, the
    caller passes a whole buffer or single micro-batches. An update takes `gradient_accumulation_steps` micro-batches
    and ends with an optimizer step.
    """

    _knows_rows = False  # an engine reserves memory for any number of media, and `run` checks the rows
    _rollouts: Rollouts  # set by `run`

    def __init__(
        self,
        actor: Actor,
        args: MultimodalPPOConfig,
        replay_buffer: ReplayBuffer,
        optimizers: tuple[Optimizer | None, Optimizer | None] = (None, None),
        schedulers: tuple[LRScheduler | None, LRScheduler | None] = (None, None),
        **kwargs,
    ):
        rows = Dataset.from_list([{"prompt": ""}])  # only the constructor needs a dataset
        policy_optimizer, critic_optimizer = optimizers
        policy_scheduler, critic_scheduler = schedulers
        optimizer: Any = policy_optimizer
        scheduler: Any = policy_scheduler
        self._two_optimizers: TwoOptimizers | None = None
        if policy_optimizer is not None and critic_optimizer is not None:
            optimizer = self._two_optimizers = TwoOptimizers(policy_optimizer, critic_optimizer)
        if policy_scheduler is not None and critic_scheduler is not None:
            scheduler = TwoSchedulers(policy_scheduler, critic_scheduler, self._is_updated)
        super().__init__(
            model=actor,  # pyrefly: ignore[bad-argument-type]  see `Actor.model_for`
            reward_funcs=_no_rewards,
            args=args,
            train_dataset=rows,
            ptx_dataset=rows if args.ptx_coef > 0 else None,
            optimizers=(optimizer, scheduler),
            **kwargs,
        )
        if optimizer is not None and self.is_deepspeed_enabled:
            raise ValueError(
                "DeepSpeed makes its own optimizer of the weights that it partitions; drop `actor_optim` and "
                "`critic_optim`, and set `optim`, `learning_rate` and `value_learning_rate` of `strategy`."
            )
        self.actor = actor
        self.replay_buffer = replay_buffer
        self.is_prepared = False  # whether accelerate has prepared models and optimizer
        self.is_first_epoch = True  # whether an update is in its first epoch over the buffer
        self.pending_logs: dict[str, list[float]] = {}
        self.client_states: dict[str, Any] = {}
        self.n_skipped_rollouts = 0  # before the first rollout of the run
        self._update_models: set[str] = set()  # models that the unfinished update trains: "policy", "critic" or both
        self._n_micro_batches = 0  # micro-batches of all updates so far
        self._media_names = media_names(actor.base_model)

    # Hooks of the trainer

    def _prepare_inputs(self, inputs: Rollout) -> Rollout:
        return inputs  # the caller has prepared the micro-batch

    def _counts_for_kl(self):
        """
        Returns whether the KL controller counts this micro-batch. It counts completions once, in the first epoch over
        a buffer, and only if the policy is updated.
        """
        return self._is_updated("policy") and self.is_first_epoch

    def _rollout_state(self) -> dict[str, Any]:
        names = ("client_states", "pending_logs", "n_skipped_rollouts")
        return {**super()._rollout_state(), **{name: getattr(self, name) for name in names}}

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        if "client_states" not in state:
            raise ValueError(
                "The checkpoint is of a `MultimodalPPOTrainer`, whose rollouts differ from those of `PPOTrainerVL`; "
                "resume with the trainer of that run."
            )
        super()._load_rollout_state(state)
        self.client_states |= state["client_states"]
        self.pending_logs = state["pending_logs"]

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        if isinstance(self.lr_scheduler, TwoSchedulers):
            return self.lr_scheduler
        return super().create_scheduler(num_training_steps, optimizer)

    # Before the first step

    def set_supervised_rows(self, dataloader: DataLoader | None) -> None:
        """If `ptx_coef` is above 0, takes the rows of the supervised loss from the dataset of a dataloader."""
        if self.args.ptx_coef == 0:
            self._supervised_rows = None
            return
        self._supervised_rows = _supervised_rows(self.args, dataloader)
        self._ptx_dataset = dataloader and dataloader.dataset

    def prepare_without_fit(self) -> None:
        """Prepares models and optimizer for steps outside of `fit`, once."""
        if self.is_prepared:
            return
        args = self.args
        has_schedule = self.lr_scheduler is not None  # the caller's
        if (
            not has_schedule
            and args.max_steps <= 0
            and {args.lr_scheduler_type, args.value_schedule.lr_scheduler_type} != {"constant"}
        ):
            raise ValueError(
                f"Without `fit`, the schedule {args.lr_scheduler_type!r} has no known length; set `max_steps` in "
                "`strategy`, or `lr_scheduler_type='constant'`."
            )
        if args.ptx_coef > 0:
            raise ValueError("`ptx_coef` needs supervised rows, which only `fit` takes; set it to 0.")
        for callback in (ProgressCallback, DefaultFlowCallback):  # of the loop of `train`
            self.remove_callback(callback)
        max_steps = args.max_steps if args.max_steps > 0 else sys.maxsize
        self._init_training_state(max_steps, 1, math.ceil(args.num_train_epochs), None, None)
        self._prepare_for_training(max_steps, None, None)
        self._tr_loss = torch.tensor(0.0, device=args.device)
        self.model_wrapped.zero_grad()

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader | None, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader | None]:
        prepared = super()._prepare_for_training(max(max_steps, 1), train_dataloader, resume_from_checkpoint)
        self.is_prepared = True
        return prepared

    # The loop of `train`

    def run(self, rollouts: Rollouts, n_consumed: int, resume_from_checkpoint: str | bool | None) -> TrainOutput:
        """
        Trains on rollouts, see [`PPOTrainerVL.fit`]. `n_consumed` is the number of prompts before the first rollout,
        over all ranks, which a checkpoint replaces. `resume_from_checkpoint` is that of
        [`~transformers.Trainer.train`], as is the output.
        """
        self._rollouts = rollouts
        self.client_states = {"consumed_samples": n_consumed}
        self.n_skipped_rollouts = n_consumed // rollouts.n_prompts
        self.train_dataset = rollouts.prompts.dataset
        return self.train(resume_from_checkpoint)

    def _row_readers(self):
        return {}  # rows are asked as the experience maker gets them

    def get_train_dataloader(self):
        return self.accelerator.prepare_data_loader(self._rollouts.prompts, device_placement=False)

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: DataLoader, *other_sizes: int
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """Counts in rollouts and episodes. Without a limit on episodes, the number of steps ends the run."""
        rollouts = self._rollouts
        step_size = self.get_total_train_batch_size(args)
        checkpoint = self._checkpoints.resumed_from
        state = None if checkpoint is None else load_rollout_state(checkpoint, 0)
        if state is not None:
            self.n_skipped_rollouts = state.get("n_skipped_rollouts", 0)
        n_rollouts = rollouts.n_rollouts - self.n_skipped_rollouts if rollouts.limit is None else rollouts.limit
        max_steps = n_rollouts * rollouts.steps
        return (
            sys.maxsize,
            rollouts.steps * rollouts.per_episode,
            len(dataloader) * rollouts.n_prompts,
            max_steps * step_size,
            step_size,
            None,
            max_steps,
        )

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, n_epochs: int, resume_from_checkpoint: str | None, trial: None
    ) -> tuple[int, int]:
        epochs = super()._init_training_state(max_steps, steps_per_epoch, n_epochs, resume_from_checkpoint, trial)
        self.state.num_train_epochs = math.ceil(self.args.num_train_epochs)  # `n_epochs` has no limit
        return epochs

    def _run_epoch(
        self,
        model: nn.Module,
        epoch: int,
        train_dataloader: DataLoaderShard,
        resume_from_checkpoint: str | None = None,
        epochs_trained: int = 0,
        **sizes: float | None,
    ) -> None:
        """Runs the rollouts of an episode, or those that are left of it. Each pass over the prompts has an order."""
        rollouts = self._rollouts
        checkpoint = resume_from_checkpoint if epoch == epochs_trained else None
        n_rollouts = self.client_states["consumed_samples"] // rollouts.n_prompts
        stops = False
        while not stops:
            index_in_pass = n_rollouts % len(train_dataloader)
            train_dataloader.set_epoch(n_rollouts // len(train_dataloader))
            # The order of a pass is drawn as the pass begins. A run that resumes between passes restores the random
            # state before the draw. A run that resumes within a pass restores the state after repeating the draw.
            if index_in_pass == 0:
                self._load_rng_state(checkpoint)
            batches = skip_first_batches(train_dataloader, index_in_pass) if index_in_pass else train_dataloader
            for batch in batches:
                if index_in_pass != 0:
                    self._load_rng_state(checkpoint)
                checkpoint = None
                n_rollouts += 1
                client_states = {**self.client_states, "consumed_samples": n_rollouts * rollouts.n_prompts}
                rollouts.train_on(batch, client_states, n_rollouts / rollouts.per_episode)
                self.client_states = client_states
                control = self.control
                ends_episode = n_rollouts % rollouts.per_episode == 0
                stops = ends_episode or control.should_epoch_stop or control.should_training_stop
                if stops:
                    break
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        rollouts.end_episode(self.client_states)

    # Updates

    def train_on_buffer(self) -> dict[str, float]:
        """
        Trains on the buffer, see [`PPOTrainerVL.ppo_train`]. With micro-batches of 2 samples and 4 accumulation steps,
        a buffer of 16 samples makes 2 optimizer steps per epoch.
        """
        args = self.args
        items = list(self.replay_buffer)
        n_samples = len(items)
        size = args.per_device_train_batch_size
        window = args.gradient_accumulation_steps
        # The completions of a prompt stay together, unless `packing_shuffle` shuffles samples
        group_size = 1 if args.packing_shuffle else args.num_generations
        # An optimizer step takes `window` micro-batches of `size` samples
        if n_samples == 0 or n_samples % (size * window) != 0:
            raise ValueError(
                f"The buffer holds {n_samples} samples on this process, which don't fill whole optimizer steps of "
                f"{window} x {size} (`gradient_accumulation_steps` x `micro_train_batch_size`)."
            )
        self._check_last_update_complete("An update")
        rollout = self._rollout_of(items)
        self._pop_mean_metrics()
        statistics = buffer_statistics(items, rollout)
        # `_rollout_of` took the whole buffer for one micro-batch, so the number of actions is divided by the number of
        # micro-batches. All micro-batches share the quotient, so that all actions of the buffer have the same weight.
        rollout = replace(rollout, num_items_in_batch=rollout.num_items_in_batch / (n_samples // size))
        for epoch in range(args.num_ppo_epochs):
            self.is_first_epoch = epoch == 0
            order = random_order(n_samples, group_size, args.seed + self.state.global_step)
            for start in range(0, n_samples, size * window):
                batch = rollout.select(order[start : start + size * window])
                # Weighs tokens by entropies, if the token filter is on
                micro_batches = self._on_rollout(batch.micro_batches(window))
                for micro_batch in micro_batches:
                    self._train_micro_batch(micro_batch)
        self.is_first_epoch = True
        return statistics | self._pop_mean_metrics()

    def train_on(
        self,
        experience: Experience,
        global_steps: int,
        models: set[str],
        entropy_mask: torch.Tensor | list[torch.Tensor] | None = None,
    ) -> dict[str, float]:
        """Trains on a micro-batch, see [`PPOTrainerVL.training_step`]."""
        self.prepare_without_fit()
        if entropy_mask is not None:
            # The mask stands in the field `action_entropy` until the mask's padding is removed, too
            experience = replace(experience, action_entropy=entropy_mask)
        rollout = self._rollout_of(unpadded_items(experience, self._tokenizer.pad_token_id))
        if self._update_models != models:
            self._check_last_update_complete(f"An update of {' and '.join(sorted(self._update_models))}")
        self._pop_mean_metrics()
        self.state.global_step = global_steps
        rollout = replace(rollout, step=global_steps)
        self._trainable_parts = self._update_models = models
        if entropy_mask is not None:
            # The mask, now without padding
            rollout = replace(rollout, tokens=replace(rollout.tokens, weights=rollout.tokens.entropies))
        else:
            (rollout,) = self._on_rollout([rollout])
        try:
            self._train_micro_batch(rollout)
        finally:
            self._trainable_parts = {"policy", "critic"}
        return self._pop_mean_metrics()

    def _check_last_update_complete(self, name: str) -> None:
        window = self.args.gradient_accumulation_steps
        n = self._n_micro_batches % window
        if n != 0:
            raise RuntimeError(f"{name} is half done, after {n} of {window} micro-batches; pass the others first.")

    def _train_micro_batch(self, micro_batch: Rollout) -> None:
        """Trains on a micro-batch, and ends the update if it is complete, in the order of `Trainer`'s loop."""
        args = self.args
        model = self.model_wrapped
        if self._n_micro_batches % args.gradient_accumulation_steps == 0:
            self._begin_step()
        self._n_micro_batches += 1
        ends_update = self._n_micro_batches % args.gradient_accumulation_steps == 0
        self.accelerator.gradient_state._set_sync_gradients(ends_update)
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        # One rate per parameter group of the optimizer. Without a critic, the first group's rate is logged.
        for is_critic, rate in zip(self._critic_groups or [False], self.lr_scheduler.get_last_lr(), strict=False):
            self._metric_log.add({"critic_lr" if is_critic else "actor_lr": average(rate)}, mode="train")
        with nullcontext() if ends_update or self.is_deepspeed_enabled else self.accelerator.no_sync(model=model):
            self._tr_loss += self.training_step(model, micro_batch, None)
        micro_batch.release_media()
        if not ends_update:
            self.control = self.callback_handler.on_substep_end(args, self.state, self.control)
            return
        if self._two_optimizers is not None:
            self.accelerator.unscale_gradients()
            max_norm = args.max_grad_norm if args.max_grad_norm > 0 else math.inf
            norm, critic_norm = self._two_optimizers.clip_grad_norms(max_norm)
            self._metric_log.add({"critic_grad_norm": average(float(critic_norm))}, mode="train")
            self._get_grad_norm(model, torch.hypot(norm, critic_norm))  # skips the update if it isn't finite
        else:
            norm = self._clip_grad_norm(model) if args.max_grad_norm > 0 else None
            norm = self._get_grad_norm(model, norm)
        self._metric_log.add({"grad_norm": average(float(norm))}, mode="train")
        self.control = self.callback_handler.on_pre_optimizer_step(args, self.state, self.control)
        self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(args, self.state, self.control)
        if not self.accelerator.optimizer_step_was_skipped:
            self.lr_scheduler.step()
        model.zero_grad()
        self.state.global_step += 1
        self.control = self.callback_handler.on_step_end(args, self.state, self.control)

    def _begin_step(self) -> None:
        """Begins an update. What earlier updates of the rollout asked for stays due until its end."""
        due = {name: getattr(self.control, name) for name in _ACTIONS}
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        for name, was_due in due.items():
            setattr(self.control, name, was_due or getattr(self.control, name))

    # Batches

    def _rollout_of(self, items: list[BufferItem]) -> Rollout:
        """Completions are padded on the right."""
        args = self.args
        device = self.actor.device
        pad_on_device = partial(_pad, device=device, pins=args.dataloader_pin_memory and device.type == "cuda")
        has_critic = self.critic is not None
        # Fields of actions, and whether the update needs them
        requirements = {"action_mask": True, "action_log_probs": True, "advantages": True}
        requirements |= {"base_action_log_probs": self.kl_coef != 0, "action_entropy": self._token_filter.is_on}
        requirements |= {"returns": has_critic, "values": has_critic}
        rows_by_field = _action_rows(items, requirements, has_critic)
        matrices = {name: pad_on_device(rows) for name, rows in rows_by_field.items()}
        for index, item in enumerate(items):
            if item.attention_mask is not None and not item.attention_mask.all():
                raise ValueError(f"The `attention_mask` of sample {index} hides tokens between others; remove them.")
        # The media of each sample, by the argument names of the model's forward
        names = self._media_names
        media = map(media_tensors, items)
        media_by_name = ({names.get(field, field): tensor for field, tensor in tensors.items()} for tensors in media)
        inputs = ((item.prompt_ids, tensors, None) for item, tensors in zip(items, media_by_name, strict=True))
        prompts = bare_prompts(self.actor.base_model, inputs)
        self.card_notes.modalities.update(*(prompt.modalities for prompt in prompts))
        actions = [item.sequences[len(item.prompt_ids) :] for item in items]
        mask = matrices["action_mask"].long()
        return Rollout(
            prompts,
            torch.arange(len(prompts), device=device),  # group ids, which losses don't use
            self._tokenizer.pad_token_id,
            completion_ids=pad_on_device(actions, self._tokenizer.pad_token_id),
            completion_mask=pad_on_device([torch.ones_like(ids) for ids in actions]),
            tool_mask=mask,  # masked actions stay in the context
            old_per_token_logps=matrices["action_log_probs"],
            ref_per_token_logps=matrices.get("base_action_log_probs"),
            advantages=matrices["advantages"],
            values=Values(old=matrices.get("values"), returns=matrices.get("returns")),
            # Estimated number of actions of a generation batch: these samples count as one micro-batch, and all others
            # as equally long. `train_on_buffer` corrects the number.
            num_items_in_batch=self.accelerator.reduce(mask.sum().float()) * args.steps_per_generation,
            packed=self.actor.packing_samples,  # as when experience was scored
            rewards=RewardValues(scorable=torch.tensor([item.is_scorable for item in items], device=device).long()),
            tokens=TokenChoice(matrices.get("action_entropy"), weights=torch.ones_like(mask, dtype=torch.float32)),
            step=self.state.global_step,
        )

    # Metrics

    def _pop_mean_metrics(self) -> dict[str, float]:
        """Returns and clears the means of micro-batches' metrics since the last call, by LightRFT's names."""
        status = {name: mean(values) for name, values in self._metrics["train"].items()}  # of TRL
        status |= self._metric_log.pop("train")
        self._metrics["train"].clear()
        status.pop("value_learning_rate", None)  # the same as `critic_lr`
        if "value_loss" in status:
            status["critic_loss"] = status.pop("value_loss")
        if "policy_loss" in status and not self.args.loss.is_mean:
            # The losses of an update's micro-batches add up to the loss of the update: their mean times their number
            status["policy_loss"] *= self.args.gradient_accumulation_steps
        return status

    # Logs and checkpoints

    def log_pending(self) -> None:
        self.control.should_log = False
        if not self.pending_logs:
            return
        self.log({re.sub("^rollout_", "rollout/", name): mean(values) for name, values in self.pending_logs.items()})
        self.pending_logs.clear()

    def save_checkpoint(self, client_states: dict[str, Any], with_models: bool) -> None:
        """Saves a checkpoint and, if `with_models`, the models in a folder that `save_total_limit` doesn't delete."""
        self.client_states = dict(client_states)
        self._save_checkpoint(self.model, trial=None)
        if with_models:
            folder = f"hf-{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self.save_model(str(Path(self.args.output_dir, folder)), _internal_call=True)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    # Experience maker and averaged weights

    def make_experience_maker(self, size: int, **arguments: Any) -> NaiveExperienceMaker:
        """Returns the experience maker of this trainer, with `size` samples per experience."""
        args = self.args
        if self.is_fsdp_enabled:
            raise ValueError(WHOLE_WEIGHTS)
        if self._policy.fallbacks.isolate is not None and args.num_generations % size != 0:
            raise ValueError(
                f"A {self.actor.config.model_type} mixes media with their padding, so an experience must hold a "
                f"single prompt; set `micro_rollout_batch_size` ({size}) to `num_generations` "
                f"({args.num_generations}) or a divisor of it."
            )
        strategy = _options_of_maker(args, size, self.accelerator)
        maker = NaiveExperienceMaker(
            self.actor, self.critic, kl_controller=self._kl_controller, strategy=strategy, **arguments
        )
        for model in maker.reward_models:
            model.to(self.accelerator.device)
        maker.reward_scale = self._reward_scale  # checkpoints hold this scale
        if args.use_vllm:
            maker.sample_with_engine = self._sample_with_engine
        return maker

    @contextmanager
    def checking_policy(self) -> Iterator[None]:
        """Raises `FloatingPointError` if the policy that samples within the context isn't finite. For all ranks."""
        self._scoring.check_weights()
        with naming_broken_logits(self.state.global_step, self.actor.base_model.dtype):
            yield

    def _sample_with_engine(self, prompts: Sequence[EncodedPrompt], config: GenerationConfig) -> list[list[int]]:
        """Samples completions with the engine, which has the weights of the last optimizer step."""
        if isinstance(config.eos_token_id, int):
            config.eos_token_id = [config.eos_token_id]
        ids, _ = self.sampler(self.model_wrapped, prompts, step=self.state.global_step, config=config)
        return ids


def copy_average(average: MovingAverage, policy: Actor, actor: Actor) -> None:
    """Copies the averaged weights of a policy into `actor`. Raises a `ValueError` unless `actor` is a copy of it."""
    if actor.model is policy.model:
        raise ValueError("`ema_model` holds the policy's own weights; pass a copy.")
    weights = actor.model.state_dict()
    averaged = average.state_dict()
    for name, value in averaged.items():
        if name not in weights or weights[name].shape != value.shape:
            raise ValueError(f"`ema_model` must be a copy of the policy, but has no `{name}` {tuple(value.shape)}.")
    actor.model.load_state_dict(averaged, strict=False)


def _supervised_rows(args: MultimodalPPOConfig, dataloader: DataLoader | None) -> EndlessRows:
    """Returns the rows of a dataloader, whose batch size becomes `ptx_batch_size`."""
    if not isinstance(dataloader, DataLoader) or dataloader.batch_size is None:
        raise ValueError(
            f"`ptx_coef` ({args.ptx_coef}) needs a `pretrain_dataloader` with rows and a `batch_size`, got "
            f"{type(dataloader).__name__}; pass the `DataLoader` itself, which the trainer repeats."
        )
    dataset: Any = undecoded(dataloader.dataset)
    first_rows = [dataset[i] for i in range(min(_N_ROWS_TO_SEARCH, len(dataset)))]
    warn_of_unread_media(args, {"pretrain_dataloader": first_rows}, dataset_part="first", supervised=True)
    # `Subset` has `__getitems__`, which reads several rows at once, even if the dataset has no such method
    rows = Subset(dataset, range(len(dataset)))
    args.ptx_batch_size = dataloader.batch_size
    return EndlessRows(rows, args.seed)


def _options_of_maker(args: MultimodalPPOConfig, size: int, accelerator: Accelerator) -> ExperienceConfig:
    # Fields that both configs have get the trainer's values, unless the dictionary below replaces them
    common_fields = [spec.name for spec in fields(ExperienceConfig) if hasattr(args, spec.name)]
    options = {name: getattr(args, name) for name in common_fields} | {
        "n_samples_per_prompt": args.num_generations,
        "micro_rollout_batch_size": size,
        "kl_estimator": "k3" if getattr(args, "use_kl_estimator_k3", False) else "k1",
        "kl_in_reward": args.kl_in_reward,
        "progress": not args.disable_tqdm,
        "accelerator": accelerator,
        "ignored_media_columns": args.ignored_media_columns or (),
        "media_rules": args.rules,
    }
    return ExperienceConfig(**options)


def random_order(n: int, size: int, seed: int) -> list[int]:
    """
    Returns the indices of `n` samples in a random order of groups of `size` samples, such as `[2, 3, 0, 1]` for groups
    of 2.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = [size * i for i in torch.randperm(-(-n // size), generator=generator).tolist()]
    return [*chain.from_iterable(range(start, min(start + size, n)) for start in starts)]


def _pad(rows: list[torch.Tensor], padding: float = 0, *, device: torch.device, pins: bool) -> torch.Tensor:
    values = zero_pad_sequences(rows, "right", padding)
    return values.pin_memory().to(device, non_blocking=True) if pins and values.is_cpu else values.to(device)


def _action_rows(
    items: list[BufferItem], requirements: dict[str, bool], has_critic: bool
) -> dict[str, list[torch.Tensor]]:
    """
    Returns the rows of the fields of actions that samples have, one number per action. Raises a `ValueError` if
    samples lack a field that is required, or have one number for several actions, where the critic learns one per
    action.
    """
    rows_by_field = {}
    for name, is_needed in requirements.items():
        rows = column(items, name)
        if rows is None:
            if is_needed:
                raise ValueError(f"The experience has no `{name}`; make it with this trainer's `experience_maker`.")
            continue
        for index, (row, item) in enumerate(zip(rows, items, strict=True)):
            if has_critic and name in ("values", "returns") and len(row) != item.n_actions:
                raise ValueError(
                    f"`{name}` of sample {index} has one number for {item.n_actions} actions, but the critic learns "
                    "one per action; make the experience with this trainer's `experience_maker`."
                )
        # A sample's single number counts for each of its actions
        rows_by_field[name] = [row.float().expand(item.n_actions) for row, item in zip(rows, items, strict=True)]
    return rows_by_field


def _no_rewards(**kwargs):
    """The trainer's constructor requires a reward function, which training doesn't call."""
    raise RuntimeError("Rewards come from the experience maker; call `PPOTrainerVL.fit`.")
