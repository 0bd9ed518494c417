# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The strategy of LightRFT's scripts: a config, with the methods that these scripts call."""

import math
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from accelerate import PartialState
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler
from transformers import PreTrainedTokenizerBase, SchedulerType, get_scheduler
from transformers.utils import cached_file

from ..encoding.processors import load_processor
from ..models.critic import policy_alone
from ..models.parts import freeze
from ..trainers.base.argument_checks import mapping
from ..trainers.ppo.config import MultimodalPPOConfig, ValueSchedule
from .models.actor import Actor
from .models.critic import Critic


Model = TypeVar("Model")  # a model, or a model with its optimizer and schedule
Side = tuple[nn.Module | None, Optimizer | None, LRScheduler | None]  # a model, its optimizer and its schedule


@dataclass
class Strategy(MultimodalPPOConfig):
    """
    The options of a run, and what LightRFT's scripts ask of their strategy. [`PPOTrainerVL`] prepares models, makes
    the engine that samples, and saves checkpoints, so methods for these return what they get.

    Args:
        use_kl_estimator_k3 (`bool`, *optional*, defaults to `False`):
            Whether the KL divergence in the reward is estimated by k3, instead of k1.
        no_advantage_std_norm (`bool`, *optional*, defaults to `False`):
            Whether advantages are shifted, but not scaled, over the batch.
        kwargs:
            Fields of [`MultimodalPPOConfig`].
    """

    use_kl_estimator_k3: bool = False
    no_advantage_std_norm: bool = False

    # No fields, since `get_strategy` sets them after the config is made
    _args: ClassVar[Namespace] = Namespace()
    _unasked: ClassVar[dict[str, Any]] = {}

    @property
    def args(self) -> Namespace:
        """The command line, as it was passed to [`~lightrft.strategy.get_strategy`]."""
        return self._args

    @property
    def config(self) -> "Strategy":
        """The options themselves."""
        return self

    @property
    def unasked(self) -> dict[str, Any]:
        """Fields that [`~lightrft.strategy.get_strategy`] set though the command line has no option for them."""
        return self._unasked

    def remember(self, args: Namespace, unasked: dict[str, Any]) -> None:
        """Sets the command line, and the fields for which it has no option."""
        vars(self).update(_args=args, _unasked=unasked)

    # Processes

    def get_rank(self) -> int:
        """Returns the index of this process."""
        return self.process_index

    def is_rank_0(self) -> bool:
        """Returns whether this is the main process."""
        return self.process_index == 0

    def print(self, *values: Any) -> None:
        """Prints on the main process."""
        if self.is_rank_0():
            print(*values)  # noqa: T201

    def report_memory(self, prefix: str = "") -> None:
        """Prints the memory of the main process's GPU, if there is one."""
        if torch.cuda.is_available():
            used = torch.cuda.memory_allocated() / 2**30
            free, total = torch.cuda.mem_get_info()
            self.print(f"{prefix}: {used:.1f} GiB of tensors, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")

    # Models

    def init_model_context(self, meta_init: bool = False) -> AbstractContextManager:
        """Returns a context that changes nothing: models are loaded as transformers loads them."""
        return nullcontext()

    def get_ds_train_config(self, is_actor: bool) -> None:
        """Returns `None`: accelerate has the configuration of DeepSpeed, from its `--config_file`."""

    def get_ds_eval_config(self, offload: bool = False) -> None:
        """Returns `None`, see [`get_ds_train_config`]."""

    def prepare(self, *models: Model, is_rlhf: bool = False) -> Model | list[Model]:
        """Returns the model, or a list of several: the trainer prepares them."""
        return models[0] if len(models) == 1 else [*models]

    def prepare_model(self, model: Model, is_training: bool = False, shard_size: int = -1) -> Model:
        """Returns the model, which the trainer prepares."""
        return model

    def offload_model(self, model: nn.Module | None, empty_cache: bool = True) -> None:
        """Does nothing: models stay where they are."""

    def setup_inference_engine(self, args: Namespace, engine_type: str = "vllm", actor: Actor | None = None) -> None:
        """Does nothing: with `use_vllm`, which `engine_type` sets, the trainer makes the engine."""

    def prepare_models_and_optimizers(
        self,
        actor: Actor,
        critic: Critic | None,
        reward_models: nn.Module | list[nn.Module] | None,
        initial_model: Actor | None,
        args: Namespace,
        max_steps: int,
    ) -> tuple[Side, Side, Any, Actor | None]:
        """
        Makes optimizers and schedules for the trained weights of actor and critic, after `freeze` has frozen its
        parts.

        Args:
            actor, critic, reward_models, initial_model:
                Models, which are returned as they are. Without a `critic`, its place holds `None`.
            args (`argparse.Namespace`):
                Ignored, since the strategy has these options.
            max_steps (`int`):
                Number of optimizer steps of the run, over which the schedules go.

        Returns:
            `tuple`: The actor with its optimizer and schedule, the critic with these, the reward models, and the
            reference. Under DeepSpeed, which needs optimizers of its own, the trainer makes these, and both optimizers
            and schedules are `None`.
        """
        no_optimizer = (None, None)
        if self.deepspeed_plugin is not None:
            return (actor, *no_optimizer), (critic, *no_optimizer), reward_models, initial_model
        freeze(actor.model, self.freeze)
        schedule = ValueSchedule(self.learning_rate, SchedulerType(self.lr_scheduler_type).value, self.warmup_steps)
        actor_side = (actor, *self._optimizer_of(actor.model, schedule, max_steps))
        critic_side = (None, *no_optimizer)
        if critic is not None:
            critic_side = (critic, *self._optimizer_of(critic, self.value_schedule, max_steps))
        return actor_side, critic_side, reward_models, initial_model

    def _optimizer_of(
        self, model: nn.Module, schedule: ValueSchedule, max_steps: int
    ) -> tuple[Optimizer, LRScheduler]:
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        # Norms and biases have one dimension, and no weight decay
        groups = [
            {"params": [weight for weight in trained if weight.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [weight for weight in trained if weight.ndim <= 1], "weight_decay": 0.0},
        ]
        betas = (self.adam_beta1, self.adam_beta2)
        optimizer = AdamW(
            [group for group in groups if group["params"]], lr=schedule.rate, betas=betas, eps=self.adam_epsilon
        )
        warmup = schedule.warmup_steps
        scheduler = get_scheduler(
            schedule.lr_scheduler_type,
            optimizer,
            num_warmup_steps=math.ceil(max_steps * warmup) if warmup < 1 else int(warmup),
            num_training_steps=max_steps,
            scheduler_specific_kwargs=mapping(self.lr_scheduler_kwargs),
        )
        return optimizer, scheduler

    # Data

    def setup_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable | None = None,
        drop_last: bool = True,
        sampler: Sampler | None = None,
        consumed_samples: int = 0,
    ) -> DataLoader:
        """
        Returns a loader of the whole dataset, which [`PPOTrainerVL.fit`] shards among the processes. It shuffles by
        `seed`.

        Args:
            dataset (`torch.utils.data.Dataset`):
                Rows, or what `collate_fn` takes.
            batch_size (`int`):
                Size of a batch of one process.
            pin_memory, shuffle, collate_fn, drop_last, sampler (*optional*):
                Arguments of `DataLoader`.
            consumed_samples (`int`, *optional*, defaults to `0`):
                Has to be 0: `fit` skips the rows that were consumed.

        Returns:
            `torch.utils.data.DataLoader`: The loader.

        Raises:
            `ValueError`: If `consumed_samples` isn't 0.
        """
        if consumed_samples != 0:
            raise ValueError(f"`consumed_samples={consumed_samples}` is an argument of `fit`; pass it there.")
        if sampler is None and shuffle:
            rows: Any = dataset  # with a length
            sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(self.seed))
        return DataLoader(
            dataset,
            batch_size=batch_size,
            pin_memory=pin_memory and torch.cuda.is_available(),
            collate_fn=collate_fn,
            drop_last=drop_last,
            sampler=sampler,
        )

    # Saving

    def save_model(
        self, model: Actor | Critic | nn.Module, tokenizer: PreTrainedTokenizerBase | None, output_dir: str, **kwargs
    ) -> None:
        """
        Saves a model with its tokenizer, and with the processor of the checkpoint that it was loaded from, if any.

        Args:
            model ([`~lightrft.Actor`] or [`~lightrft.Critic`] or `torch.nn.Module`):
                Model. Of a policy, the critic isn't saved.
            tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
                Tokenizer.
            output_dir (`str`):
                Target folder.
            kwargs:
                Arguments of the model's `save_pretrained`.
        """
        if self.is_rank_0():
            module: Any = policy_alone(model.model) if isinstance(model, Actor) else model
            module.save_pretrained(output_dir, **kwargs)
            source = model.config.name_or_path if isinstance(model, Actor) else ""
            if source and _has_processor(source):
                load_processor(source).save_pretrained(output_dir)
            if tokenizer is not None:
                tokenizer.save_pretrained(output_dir)
        PartialState().wait_for_everyone()

    def save_ckpt(self, *args: nn.Module | str, **kwargs: float | str | dict[str, Any] | None) -> None:
        """Raises a `NotImplementedError`: [`PPOTrainerVL.fit`] saves checkpoints, by `save_steps`."""
        raise NotImplementedError(
            "A checkpoint holds policy, critic, optimizers and states of a run together; set `save_steps`, by which "
            "`fit` saves them in `save_path`."
        )

    def load_ckpt(self, *args: nn.Module | str, **kwargs: Optimizer | LRScheduler | str | None) -> None:
        """Raises a `NotImplementedError`: [`PPOTrainerVL.fit`] resumes, by `load_checkpoint`."""
        raise NotImplementedError(
            "A checkpoint holds policy, critic, optimizers and states of a run together; set `load_checkpoint`, by "
            "which `fit` resumes from the last one in `save_path`."
        )


def _has_processor(name: str) -> bool:
    """Returns whether a folder or repository has a processor beside its tokenizer."""
    files = ("processor_config.json", "preprocessor_config.json")
    return any(cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in files)
