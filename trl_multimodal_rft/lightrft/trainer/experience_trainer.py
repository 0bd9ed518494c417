# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The PPO trainer on experience, one micro-batch at a time."""

import inspect
import math
import re
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Subset
from transformers import TrainerState
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...algorithms.critic import explained_variance
from ...data.features import undecoded
from ...data.rows import EndlessRows
from ...encoding.prompts import EncodedPrompt
from ...models.wrapped import is_unsharded
from ...rollout import groups
from ...rollout.rollout import Rollout
from ...trainers.ppo_config import MultimodalPPOConfig
from ...trainers.ppo_trainer import MultimodalPPOTrainer
from ..models.actor import Actor
from ..models.bare_inputs import bare_inputs, bare_prompt
from ..models.critic import Critic
from . import replay_buffer
from .experience import Experience
from .experience_maker import NaiveExperienceMaker
from .experience_media import MEDIA_FIELDS, media_tensors
from .replay_buffer import ReplayBuffer
from .replay_buffer_utils import BufferItem, remove_padding_in_sequences, split_experience_batch


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

# Entries of `info` that are logged
_LOGGED = ("reward", "return", "soft_overlong_punishment", "response_length", "truncated", "kl")


class ExperienceTrainer(MultimodalPPOTrainer):
    """
    [`MultimodalPPOTrainer`] on experience. The caller has the loop, since a step may come from a single micro-batch;
    checkpoints hold the buffer, too.
    """

    _saved_classes = (*groups.SAVED_CLASSES, *replay_buffer.SAVED_CLASSES)

    def __init__(self, actor: Actor, args: MultimodalPPOConfig, replay_buffer: ReplayBuffer, **kwargs):
        rows = Dataset.from_list([{"prompt": ""}])  # for the constructor alone
        super().__init__(
            model=actor,  # pyrefly: ignore[bad-argument-type]  see `Actor.model_for`
            reward_funcs=_no_rewards,
            args=args,
            train_dataset=rows,
            ptx_dataset=rows if args.ptx_coef > 0 else None,
            **kwargs,
        )
        self.remove_callback(ProgressCallback)
        self.actor = actor
        self.replay_buffer = replay_buffer
        self.is_prepared = False  # whether the engine has models and optimizer
        self.is_first_epoch = True  # on these samples
        self.pending_logs: dict[str, list[float]] = {}
        self.client_states: dict[str, Any] = {}
        self._half_done: set[str] = set()  # parts that an unfinished update trains
        self._n_micro_batches = 0
        # Actions, and those with a reward, of the micro-batches in the metrics
        self._action_counts: list[list[float]] = []
        accepted = inspect.signature(type(actor.base_model).forward).parameters
        self._media_names = {field: name for name, field in MEDIA_FIELDS.items() if name in accepted}

    # Hooks of the trainer

    def _make_critic(self, value_model):
        return Critic.of(super()._make_critic(value_model))

    def _prepare_inputs(self, inputs):
        return inputs

    def _counts_for_kl(self):
        return self._trains("policy") and self.is_first_epoch

    def _rollout_state(self) -> dict[str, Any]:
        return {
            **super()._rollout_state(),
            "client_states": self.client_states,
            "pending_logs": self.pending_logs,
            "experience": self.replay_buffer.state_dict(),
        }

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        super()._load_rollout_state(state)
        self.client_states, self.pending_logs = state["client_states"], state["pending_logs"]
        self.replay_buffer.load_state_dict(state["experience"])

    # Before the first step

    def set_supervised_rows(self, dataloader: DataLoader | None) -> None:
        """Sets the supervised rows, if their loss has a weight."""
        args = self.args
        if args.ptx_coef == 0:
            return
        if dataloader is None or dataloader.batch_size is None:
            raise ValueError(
                f"`ptx_coef` ({args.ptx_coef}) needs a `pretrain_dataloader` with rows and a `batch_size`."
            )
        # A subset reads several rows at once of any dataset
        dataset: Any = undecoded(dataloader.dataset)
        rows = Subset(dataset, range(len(dataset)))
        self._supervised = EndlessRows(rows, args.seed)
        args.per_device_ptx_batch_size = dataloader.batch_size

    def prepare_without_fit(self) -> None:
        """Prepares for steps outside of `fit`, once."""
        if self.is_prepared:
            return
        args = self.args
        schedules = [args.lr_scheduler_type, args.value_lr_scheduler_type or args.lr_scheduler_type]
        endless = self.lr_scheduler is not None or all(schedule == "constant" for schedule in schedules)
        if args.max_steps <= 0 and not endless:
            raise ValueError(
                f"Without `fit`, the schedule {args.lr_scheduler_type!r} has no known length; set `max_steps` in "
                "`strategy`, or `lr_scheduler_type='constant'`."
            )
        if args.ptx_coef > 0:
            raise ValueError("`ptx_coef` needs supervised rows, which only `fit` takes; set it to 0.")
        self.prepare_for(args, args.max_steps, None)

    def prepare_for(self, args: MultimodalPPOConfig, max_steps: int, checkpoint: str | None) -> None:
        """Hands models and optimizer to the engine, once, with the state of a checkpoint."""
        self.state.compute_steps(args, max_steps)
        if checkpoint is not None and is_unsharded(self.accelerator):
            self._load_from_checkpoint(checkpoint)
        self._prepare_for_training(max(max_steps, 1), None, checkpoint)
        if checkpoint is not None:
            self._load_state(Path(checkpoint))
        self.is_prepared = True
        self.model_wrapped.zero_grad()
        if checkpoint is not None:
            self.state = TrainerState.load_from_json(str(Path(checkpoint, "trainer_state.json")))
            self.state.compute_steps(args, max_steps)
        self.state.init_training_references(self, max_steps, math.ceil(args.num_train_epochs), None)

    # Updates

    def train_on_buffer(self) -> dict[str, float]:
        """Trains on the buffer, see [`PPOTrainerVL.ppo_train`]."""
        args, items = self.args, self.replay_buffer[:]
        n, size, window = len(items), args.per_device_train_batch_size, args.gradient_accumulation_steps
        if n == 0 or n % (size * window) != 0:
            raise ValueError(
                f"The buffer holds {n} samples on this process, which don't fill whole optimizer steps of "
                f"{window} x {size} (`gradient_accumulation_steps` x `micro_train_batch_size`)."
            )
        self._check_update_begins("An update")
        check_samples(items, "action_mask", *self._action_fields)
        self._clear_metrics()
        statistics = self._buffer_statistics(items)
        n_actions = torch.stack([item.action_mask.sum() for item in items]).sum().float().to(self.actor.device)
        n_tokens = self.accelerator.reduce(n_actions).item() / (n // size)
        for epoch in range(args.num_ppo_epochs):
            self.is_first_epoch = epoch == 0
            order = self._shuffled(items)
            for start in range(0, n, size * window):
                part = order[start : start + size * window]
                weights = self._weights_by_entropy(part)
                for first in range(0, len(part), size):
                    micro = slice(first, first + size)
                    self._train_micro_batch(part[micro], weights and weights[micro], n_tokens)
        self.is_first_epoch = True
        return statistics | self._mean_metrics()

    def train_on(
        self,
        experience: Experience,
        global_steps: int,
        trained: set[str],
        entropy_mask: torch.Tensor | list[torch.Tensor] | None = None,
    ) -> dict[str, float]:
        """Trains on a micro-batch, see [`PPOTrainerVL.training_step`]."""
        self.prepare_without_fit()
        items = split_experience_batch(experience)
        if entropy_mask is not None:
            # In a field whose padding is removed, too
            items = [replace(item, action_entropy=row) for item, row in zip(items, entropy_mask, strict=True)]
        if not isinstance(experience.sequences, list):
            items = remove_padding_in_sequences(items, self._pad_token)
        weights = None if entropy_mask is None else [item.action_entropy for item in items]
        check_samples(items, "action_mask", *self._action_fields)
        if self._half_done != trained:
            self._check_update_begins(f"An update of {' and '.join(sorted(self._half_done))}")
        self._clear_metrics()
        self.state.global_step = global_steps
        self._trained = self._half_done = trained
        try:
            self._train_micro_batch(items, self._weights_by_entropy(items) if weights is None else weights)
        finally:
            self._trained = {"policy", "critic"}
        return self._mean_metrics()

    def _check_update_begins(self, name: str) -> None:
        window = self.args.gradient_accumulation_steps
        if n := self._n_micro_batches % window:
            raise RuntimeError(f"{name} is half done, after {n} of {window} micro-batches; pass the others first.")

    def _train_micro_batch(
        self, items: list[BufferItem], weights: list[torch.Tensor] | None, n_tokens: float | None = None
    ) -> None:
        """
        Trains on a micro-batch as a step of `Trainer`'s loop does. Given `n_tokens`, the mean number of actions in a
        micro-batch of all ranks, actions weigh the same in all of them.
        """
        args, model, metrics = self.args, self.model_wrapped, self._metrics["train"]
        batch = self._inputs_of(items, weights, n_tokens)
        self._n_micro_batches += 1
        ends = self._n_micro_batches % args.gradient_accumulation_steps == 0
        self.accelerator.gradient_state._set_sync_gradients(ends)
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        rates = self.lr_scheduler.get_last_lr()
        for is_critic, rate in zip(self._critic_groups or [False], rates, strict=False):
            metrics["critic_lr" if is_critic else "actor_lr"].append(rate)
        syncs = ends or self.is_deepspeed_enabled
        with nullcontext() if syncs else self.accelerator.no_sync(model=model):
            self.training_step(model, batch, None)
        if not ends:
            return
        norm = self._clip_grad_norm(model) if args.max_grad_norm > 0 else None
        metrics["grad_norm"].append(float(self._get_grad_norm(model, norm)))
        self.callback_handler.on_pre_optimizer_step(args, self.state, self.control)
        self.optimizer.step()
        if not self.accelerator.optimizer_step_was_skipped:
            self.lr_scheduler.step()
        model.zero_grad()
        self.state.global_step += 1
        self.callback_handler.on_step_end(args, self.state, self.control)

    def _shuffled(self, items: list[BufferItem]) -> list[BufferItem]:
        """Groups, or samples, in an order that depends on the step."""
        size = self.args.num_generations if self.args.keep_groups_together else 1
        groups = [items[start : start + size] for start in range(0, len(items), size)]
        generator = torch.Generator().manual_seed(self.args.seed + self.state.global_step)
        return [item for i in torch.randperm(len(groups), generator=generator).tolist() for item in groups[i]]

    def _weights_by_entropy(self, items: list[BufferItem]) -> list[torch.Tensor] | None:
        """Weights of the actions of an update by their entropies; `None` counts all."""
        args, device = self.args, self.actor.device
        if args.top_entropy_quantile == 1:
            return None
        check_samples(items, "action_entropy")
        size = args.per_device_train_batch_size if args.entropy_scope == "micro_batch" else len(items)
        weights = []
        for part in (items[start : start + size] for start in range(0, len(items), size)):
            columns = ([item.action_entropy for item in part], [item.action_mask.long() for item in part])
            entropies, mask = (pad_sequence(rows, batch_first=True).to(device) for rows in columns)
            chosen = self._token_filter.weights(entropies, mask).cpu()
            weights += [row[: len(item.action_mask)] for row, item in zip(chosen, part, strict=True)]
        return weights

    # Batches

    @property
    def _pad_token(self) -> int:
        return self._tokenizer.pad_token_id

    @property
    def _action_fields(self) -> dict[str, str]:
        """Fields of actions that an update needs, and their names in a rollout."""
        fields = {"action_log_probs": "old_per_token_logps", "advantages": "advantages"}
        if self.kl_coef != 0:
            fields["base_action_log_probs"] = "ref_per_token_logps"
        if self.critic is not None:
            fields |= {"returns": "returns", "values": "old_values"}
        return fields

    def _inputs_of(
        self, items: list[BufferItem], weights: list[torch.Tensor] | None, n_tokens: float | None
    ) -> Rollout:
        """The micro-batch as a rollout: prompts, and completions padded on the right."""
        device = self.actor.device
        pins = self.args.dataloader_pin_memory and device.type == "cuda"

        def placed(rows: list[torch.Tensor], padding: float = 0) -> torch.Tensor:
            values = pad_sequence(rows, batch_first=True, padding_value=padding)
            return values.pin_memory().to(device, non_blocking=True) if pins and values.is_cpu else values.to(device)

        prompts: list[EncodedPrompt] = []
        for item in items:
            prompts.append(self._prompt_of(item, prompts))
        self.card_notes.modalities.update(*(prompt.modalities for prompt in prompts))
        actions = [item.sequences[len(item.sequences) - len(item.action_mask) :] for item in items]
        mask = placed([item.action_mask.long() for item in items])
        scorable = torch.tensor([_is_scorable(item) for item in items], device=device).long()
        counts = torch.stack([mask.sum(), (mask * scorable[:, None]).sum()]).float()
        self._action_counts.append(self.accelerator.reduce(counts).tolist())
        n_tokens = self._action_counts[-1][0] if n_tokens is None else n_tokens
        ones = torch.ones_like(mask, dtype=torch.float32)
        rollout = Rollout(
            prompts,
            torch.arange(len(prompts), device=device),  # a loss compares no groups
            self._pad_token,
            completion_ids=placed(actions, self._pad_token),
            completion_mask=placed([torch.ones_like(each) for each in actions]),
            tool_mask=mask,  # masked actions stay in the context
            # Of a generation batch, as in the trainer
            num_items_in_batch=torch.tensor(n_tokens * self.args.steps_per_generation, device=device),
            packed=self._policy.fallbacks.packing and self.actor.packing_samples,  # as in the rollout
            scorable=scorable,
            token_weights=ones if weights is None else placed([row.float() for row in weights]),
            step=self.state.global_step,
        )
        for field, name in self._action_fields.items():
            rollout[name] = placed([getattr(item, field).float() for item in items])
        return rollout

    def _prompt_of(self, item: BufferItem, others: list[EncodedPrompt]) -> EncodedPrompt:
        """The prompt of a sample; equal ones are the same object, so that a forward shares them."""
        names, model = self._media_names, self.actor.base_model
        media = {names.get(field, field): tensor.cpu() for field, tensor in media_tensors(item).items()}
        ids = item.sequences[: len(item.sequences) - len(item.action_mask)].cpu()
        for other in others:
            same_ids = torch.equal(other.input_ids, ids) and other.media.keys() == media.keys()
            if same_ids and all(torch.equal(other.media[name], value) for name, value in media.items()):
                return other
        bare_inputs(model, ids[None], media, 0)  # which checks them
        return bare_prompt(model, ids, media)

    # Metrics

    def _mean_metrics(self) -> dict[str, float]:
        """Means of the metrics since the last call, by the names of LightRFT."""
        self._unread_metrics.read()
        status = {}
        weights = dict.fromkeys(_OF_ACTIONS, 0) | dict.fromkeys(_OF_REWARDED_ACTIONS, 1)
        for name, values in self._metrics["train"].items():
            if name in weights:
                value = mean(values, [count[weights[name]] for count in self._action_counts])
            else:
                value = mean(values)
            status["critic_loss" if name == "value_loss" else name] = value
        self._clear_metrics()
        status.pop("value_learning_rate", None)  # which is `critic_lr`
        if "policy_loss" in status and not self.args.loss.is_mean:
            # Which is that of an update, split over its micro-batches
            status["policy_loss"] *= self.args.gradient_accumulation_steps
        return status

    def _clear_metrics(self) -> None:
        self._unread_metrics.read()
        self._metrics["train"].clear()
        self._action_counts.clear()

    def _buffer_statistics(self, items: list[BufferItem]) -> dict[str, float]:
        """Statistics of the buffers of all ranks. Samples without a reward have neither advantage nor return."""

        def everyone(values: list[torch.Tensor]) -> torch.Tensor:
            local = torch.cat(values).float().to(self.actor.device)
            gathered = self.accelerator.gather(self.accelerator.pad_across_processes(local, pad_index=math.nan))
            return gathered[~gathered.isnan()]

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

    # Logs and checkpoints

    def log_pending(self) -> None:
        """Logs the means of the pending metrics."""
        means = {name: mean(values) for name, values in self.pending_logs.items()}
        self.log({re.sub("^rollout_", "rollout/", name): value for name, value in means.items()})
        self.pending_logs.clear()

    def save_checkpoint(self, client_states: dict[str, Any], with_models: bool) -> None:
        """Saves a checkpoint, and models in a folder that isn't rotated away if wanted."""
        self.client_states = dict(client_states)
        self._save_checkpoint(self.model, trial=None)
        if with_models:
            folder = f"hf-{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self.save_model(str(Path(self.args.output_dir, folder)), _internal_call=True)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    @torch.no_grad()
    def copy_average_to(self, actor: Actor) -> None:
        """Copies the averaged weights into another actor."""
        averages = dict(actor.model.named_parameters())
        with self.ema_weights():
            for name, parameter in self.ema._parameters.items():
                averages[name].copy_(parameter)


def _no_rewards(**kwargs):
    """For the constructor alone."""
    raise RuntimeError("Rewards come from the experience maker; call `fit`.")


def check_samples(items: list[BufferItem], *names: str) -> None:
    """Checks that samples have the fields that an update needs."""
    for name in names:
        if any(getattr(item, name) is None for item in items):
            raise ValueError(f"The experience has no `{name}`; make it with this trainer's `experience_maker`.")
    for index, item in enumerate(items):
        if item.attention_mask is not None and not item.attention_mask.all():
            raise ValueError(f"The `attention_mask` of sample {index} hides tokens between others; remove them.")


def _reward(item: BufferItem) -> float:
    return float((item.info or {}).get("reward", math.nan))


def _is_scorable(item: BufferItem) -> bool:
    """Whether the reward, if known, is a number."""
    return "reward" not in (item.info or {}) or not math.isnan(_reward(item))


# Metrics of samples of all ranks


def of_all_ranks(values: dict[str, list[float]]) -> dict[str, list[float]]:
    """Joins lists of all ranks, whose names may differ."""
    gathered = gather_object([values])
    names = sorted({name for each in gathered for name in each})
    return {name: [number for each in gathered for number in each.get(name, [])] for name in names}


def mean(numbers: list[float], weights: list[float] | None = None) -> float:
    """Mean of the known numbers (not `NaN`); with weights, of those whose weight isn't 0."""
    values = torch.tensor(numbers, dtype=torch.float64)
    if weights is None:
        return values.nanmean().item()
    counts = torch.tensor(weights, dtype=torch.float64)
    return (torch.where(counts > 0, values * counts, 0).sum() / counts.sum()).item()


def std(numbers: list[float]) -> float:
    """Standard deviation of the population of known numbers."""
    values = torch.tensor(numbers, dtype=torch.float64)
    return (values - values.nanmean()).square().nanmean().sqrt().item()


def rollout_logs(experiences: list[Experience]) -> dict[str, float]:
    """Means over the samples of all ranks."""
    values: dict[str, list[float]] = {}
    for info in (experience.info for experience in experiences):
        logged = {name: info[name] for name in _LOGGED if name in info} | info.get("reward_metrics", {})
        if "raw_reward" in info:
            logged |= {"reward": info["raw_reward"], "shaped_reward": info["reward"]}
        for name, numbers in logged.items():
            values.setdefault(name, []).extend(torch.as_tensor(numbers).flatten().tolist())
    values = of_all_ranks(values)
    return {name: mean(numbers) for name, numbers in values.items()} | {"reward_std": std(values["reward"])}


def evaluation_logs(
    maker: NaiveExperienceMaker, batches: Iterable[list[dict[str, Any]]], options: dict[str, Any]
) -> dict[str, float]:
    """Means over completions of all ranks' batches of rows, see [`PPOTrainerVL.evaluate`]."""
    n = maker.strategy.n_samples_per_prompt
    values: dict[str, list[float]] = {"reward": [], "response_length": []}
    for rows in batches:
        rewards: list[float] = []
        for samples in maker.generate_samples(rows, **options):
            scored, metrics = maker.rewards(samples)
            rewards += scored.tolist()
            values["response_length"] += samples.response_length.tolist()
            for name, numbers in metrics.items():
                values.setdefault(name, []).extend(torch.as_tensor(numbers).flatten().tolist())
        values["reward"] += rewards
        for start in range(0, len(rewards) if n > 1 else 0, n):
            known = [each for each in rewards[start : start + n] if not math.isnan(each)]
            values.setdefault("reward_best", []).append(max(known, default=math.nan))
    values = of_all_ranks(values)
    results = {f"{name}_mean": mean(numbers) for name, numbers in values.items()}
    return {**results, "reward_std": std(values["reward"]), "num_samples": len(values["reward"])}
