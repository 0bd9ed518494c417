# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Base of the trainers that sample completions: the constructor, the stages of a rollout, and the update."""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from trl.distributed import DistributedBackend
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import is_async_callable

from ...algorithms.losses import LossOutput
from ...checks.run_checks import Checks
from ...data.rows.batches import Row
from ...data.rows.features import Rows
from ...forward.scores import Scores
from ...models.modes import has_dropout
from ...policy import Live
from ...reporting.card_notes import CardNotes
from ...rewards.calls import distinct_names
from ...rollout.completion_columns import Ends
from ...rollout.environments import Environments, template_for_tools
from ...rollout.estimates import Estimates, lost_by_reward, out_of_range, weighted_sum, with_estimates
from ...rollout.groups import group_exchange
from ...rollout.reward_functions import RewardFunctions
from ...rollout.rollout import Prompted, Rewards, Rollout, TRLInputs
from ...rollout.score import score_with_view
from ...rollout.skipped_forwards import without_gradient
from ...rollout.speech import decoder_of
from ...rollout.turns import ToolLoop
from ..base.configs import stops_of
from ..base.dataset_checks import unchecked_datasets
from ..base.loading import Models
from ..base.optimizer import freeze_and_check
from ..base.preparation import compile_models, disable_dropout, enable_packing, make_forward, prepare_reference
from ..base.signatures import Model, Processor
from ..base.trainer import BaseTrainer
from .constructor_inputs import (
    Inputs,
    around_trl_constructor,
    check_inputs,
    load_for_sampling,
    reward_setup,
    start_loop,
    wrap_reward_models,
)
from .context import Context, attribute_of
from .engine import GenerationParts, make_samplers
from .micro_batches import Batches
from .offload import HostMemory, idle_storages
from .prompt_setup import make_encoder, make_stream, prompt_loader
from .prompting import Prompting
from .rewarding import Rewarding
from .rollout_logs import RolloutLog, log_media_contribution, reward_index
from .sampling import Sampling
from .scoring import Scoring


logger = get_logger(__name__)

# TRL's methods that log what reward functions pass to these arguments
_LOG_METHODS = {"log_extra": "_log_completion_extra", "log_metric": "_log_metric"}


class MultimodalTrainer(BaseTrainer):
    """
    Base of the trainers that sample completions. The arguments, the training loop, the engines and the metrics' names
    are TRL's.

    The calls of an update, in training:

    1. `Trainer.training_step` calls `_prepare_inputs`, which asks the stage
       [`~trainers.sampling.micro_batches.Batches`] for a micro-batch. If the last rollout is used up, that stage calls
       `_new_rollout`, which calls TRL's `_generate_and_score_completions`, which calls `_roll_out`, which calls
       `_run_stages`. This runs the other stages: `Prompting` reads and encodes the rows, `Sampling` samples, and
       `Rewarding` rewards; `_score_rollout` asks `Scoring` for log-probabilities, and `_estimate` sets advantages.
    2. The stage splits the rollout, and `_on_rollout` scores micro-batches that come after its first update.
    3. `compute_loss` calls `_compute_loss`, which calls `_score` for the forward pass, and `_loss`.
    4. `Trainer` runs the backward pass and, after `gradient_accumulation_steps` micro-batches, the optimizer.
    """

    _micro_batch: Rollout | None = None  # set while its loss is computed
    _scores: Scores | None = None  # scores of `_micro_batch`
    _idle_critic: nn.Module | None = None  # the critic, if it can be offloaded during sampling
    _loss_needs_reference = True  # `False` for a trainer whose loss never reads the reference
    _reorders_iterations = False  # whether later iterations over a rollout have another order
    _weighs_advantages = False  # whether ratios to the engine weigh advantages
    # Made when they are first read, also by a subclass whose constructor sets an attribute before it calls this one's
    _live = functools.cached_property(lambda self: Live(type(self).__name__))
    _reward_functions = functools.cached_property(lambda self: RewardFunctions())
    # TRL's attributes that are kept in `_live` and `_reward_functions`
    model = attribute_of("_live", "model")
    model_wrapped = attribute_of("_live", "model_wrapped")
    ref_model = attribute_of("_live", "ref_model")
    critic = attribute_of("_live", "critic")
    state = attribute_of("_live", "state")
    reward_funcs = attribute_of("_reward_functions", "functions")
    reward_func_names = attribute_of("_reward_functions", "names")
    reward_processing_classes = attribute_of("_reward_functions", "processors")
    speech_decoder = attribute_of("_reward_functions", "speech_decoder")
    # Attributes of stages that users and tests read and replace
    sampler = attribute_of("_sampling", "sampler", is_late=True)
    in_flight = attribute_of("_sampling", "in_flight", is_late=True)
    vllm_generation = attribute_of("_sampling", "engine", is_late=True)
    mask_truncated_completions = attribute_of("_sampling", "mask_truncated", is_late=True)
    num_iterations = attribute_of("_batches", "n_iterations", is_late=True)
    # TRL's names of what `_batches` keeps. TRL's `training_step` adds 1 to `_step`
    _step = attribute_of("_batches", "n_trained", is_late=True)
    _buffered_inputs = attribute_of("_batches", "parts", is_late=True)
    # Defaults and types of attributes that TRL sets
    num_generations_eval: Any = 1
    aux_loss_enabled = False
    _knows_rows = True  # whether the datasets hold all prompts of the run
    lr_scheduler: Any

    def __init__(
        self, model: Model, reward_funcs: Any, args: Any, processing_class: Processor | None = None, **kwargs: Any
    ):
        # TRL's order, which determines random numbers: models, rewards, and then TRL's constructor
        inputs = check_inputs(model, reward_funcs, args, processing_class, self._knows_rows, **kwargs)
        set_seed(args.seed)  # as TRL does before it loads a model
        models = load_for_sampling(inputs)
        self.toolbox = Environments(inputs.tools or (), inputs.environment_factory, args.rules)
        rewards = reward_setup(inputs.reward_funcs, inputs.reward_processing_classes, self.toolbox, args)
        with around_trl_constructor(args, models):
            super().__init__(
                model=models.model,
                args=args,
                processing_class=models.processing_class,
                **rewards.for_trl(),
                **inputs.for_trl,
            )
        # With the model and the optimizer that TRL has prepared
        freeze_and_check(self.model, args, self.optimizer)
        disable_dropout(args, self.model, self.ref_model)
        self._set_scoring(models)
        self._set_tools(rewards.environment_funcs)
        self._set_prompts(inputs)
        wrap_reward_models(self._reward_functions, rewards, self.accelerator, self.args, self.chat_template_kwargs)
        self._prepare_before_engine()
        self._make_stages(inputs, models)
        # After the samplers, which read the models: packing and compilation, which change them
        self._policy.fallbacks.packing = enable_packing(self.accelerator, self.model, self.ref_model, args)
        compile_models(self.accelerator, args, self.model, self.ref_model)
        self._finish_setup()
        self._add_log_callbacks()
        self._stream.is_new(self.train_dataset)
        self._prompting.check_held_out({"eval_dataset": self.eval_dataset})

    def _prepare_before_engine(self) -> None:
        """Puts further models on the device, before an engine takes its share of the memory. By default, none."""

    def _set_scoring(self, models: Models) -> None:
        args = self.args
        self._live.report_to = args.report_to
        group_sizes = args.num_generations or 1, self.num_generations_eval
        self._context = Context(args, self.accelerator, self._live, self._metric_log, group_sizes)
        parts = self.accelerator, self.model, self.ref_model
        self._policy = make_forward(*parts, self.processing_class, args)
        self.checks = Checks(self._policy, self.accelerator)
        self._scoring = Scoring(self._context, self._policy, self.checks)
        if models.ref_model is not None:
            reference: Any = prepare_reference(models.ref_model, args, self.accelerator)
            self.ref_model = reference
            self.beta = args.beta  # 0 in TRL's constructor
            if args.sync_ref_model:
                self.add_callback(SyncRefModelCallback(reference, self.accelerator))

    def _set_prompts(self, inputs: Inputs) -> None:
        self.rollout_func = inputs.rollout_func
        self.card_notes = CardNotes()
        self.prompts = make_encoder(
            inputs,
            self.toolbox,
            self._live,
            model=self._unwrapped(self.model),
            processing_class=self.processing_class,
            template_kwargs={"chat_template": self.chat_template, **self.chat_template_kwargs},
        )
        self._stream = make_stream(
            inputs,
            self.toolbox,
            self.accelerator,
            self._live,
            encoder=self.prompts,
            metrics=self._metric_log,
            engine_prompts=lambda: self.vllm_generation.prompts,
        )
        self._prompting = Prompting(
            self._context,
            self.prompts,
            self.toolbox,
            self._stream,
            self.card_notes,
            self._reward_functions,
            encodes_text=self.rollout_func is None,
            unchecked_datasets=unchecked_datasets(inputs.datasets),
        )

    def _set_tools(self, reward_funcs: dict[str, Callable]) -> None:
        self.tools = self.toolbox.tools
        self.environment_factories = self.toolbox.factories or None
        self.environments = None
        self._environment_pool = self.toolbox.pools
        self._env_tools = self.toolbox.tools_by_factory()
        limit = self.args.max_tool_calling_iterations
        self.max_tool_calling_iterations = sys.maxsize if limit is None else limit
        self.chat_template = template_for_tools(self.processing_class) if self.tools else None
        if self.reward_funcs:
            self.reward_func_names[:] = distinct_names(self.reward_func_names)
        for name, reward_func in reward_funcs.items():
            self._add_reward(name, reward_func)
        needs_loop = any(map(is_async_callable, [*self.tools, *self.reward_funcs]))
        if needs_loop and getattr(self, "async_loop", None) is None:
            self.async_loop = start_loop(f"{type(self).__name__}-AsyncLoop")

    def _add_reward(self, name: str, reward_func: Callable) -> None:
        self._reward_functions.add(name, reward_func)
        self.reward_weights = torch.cat([self.reward_weights, torch.ones(1)])

    def _make_stages(self, inputs: Inputs, models: Models) -> None:
        args = self.args
        groups = None
        if args.needs_rewards:
            groups = group_exchange(args, self.accelerator, self.train_dataset, inputs.makes_prompts)
        functions = self._reward_functions
        functions.hold_out(getattr(args, "held_out_rewards", None) or (), getattr(self, "reward_weights", None))
        functions.loop = getattr(self, "async_loop", None)
        functions.logs = {name: getattr(self, method, None) for name, method in _LOG_METHODS.items()}
        self.use_vllm = args.use_vllm
        self.host_memory = HostMemory(args.device) if args.offload_during_generation else None
        generation = GenerationParts(
            self.generation_config,
            self.generation_kwargs,
            DistributedBackend(self.accelerator),
            getattr(self, "continuous_batching_config", None),
        )
        has_rows = inputs.rollout_func is None and self._knows_rows
        stop_ids, stop_texts = stops_of(args)
        ends = Ends([*dict.fromkeys([*self.eos_token_ids, *stop_ids])], stop_texts)
        functions.speech_decoder = decoder_of(args, ends, self._prompting.tokenizer, self.accelerator.device)
        samplers = make_samplers(
            self._context,
            self._prompting,
            self._policy,
            ends.ids,
            generation,
            inputs.sampler,
            revision=models.revision,
            datasets=[self.train_dataset, self.eval_dataset] if has_rows else [],
            host_memory=self.host_memory,
            is_in_train=lambda: self.is_in_train,  # changes during the run
        )
        self._sampling = Sampling(
            self._context,
            self._prompting,
            self._scoring,
            functions,
            ends,
            samplers.sampler,
            samplers.local,
            make_loop=lambda **options: self.tool_loop(**options),
            load_processor=models.load_processor,
            engine=samplers.engine,
            in_flight=samplers.in_flight,
            logit_bias=samplers.logit_bias,
            rollout_func=self.rollout_func and (lambda prompts: self.rollout_func(prompts, self)),
            pad_to_multiple_of=args.pad_to_multiple_of,
            mask_truncated=getattr(args, "mask_truncated_completions", False),
        )
        self._rewarding = Rewarding(self._context, self._prompting, functions)
        self._batches = Batches(
            self._sampling,
            new_rollout=self._new_rollout,
            on_rollout=self._on_rollout,
            groups=groups,
            loss_reads_reference=self._loss_needs_reference,
            n_iterations=getattr(args, "num_iterations", 1),
            shuffles=inputs.rollout_func is not None or args.packing_shuffle,
            reorders=self._reorders_iterations,
        )

    def _add_log_callbacks(self) -> None:
        extra_logs, pending_metrics = (getattr(self, name, {}) for name in ("_pending_extra_logs", "_pending_metrics"))
        handler = self.callback_handler
        main_handler = handler if self.is_world_process_zero() else None
        log = RolloutLog(self._rewarding, self._logs, extra_logs, pending_metrics, main_handler)
        for callback in log.callbacks(handler, getattr(self, "commit_scheduler", None)):
            self.add_callback(callback)
        self._rollout_log = log
        self.log_completions = False  # `RolloutLog` takes the place of TRL's tables, which hold no audio or video

    def offloading(self) -> AbstractContextManager[None]:
        """Returns a context in which `offload_during_generation` keeps on the host what sampling doesn't need."""
        if self.host_memory is None:
            return nullcontext()
        # A `rollout_func` may use these models, so they then stay on the device
        models: Any = () if self.rollout_func is not None else [self.ref_model, self.ema, self._idle_critic]
        return self.host_memory.offloading(idle_storages(self.model, self.optimizer, *models))

    # Rows and prompts

    def _read_row(self, row: Row) -> list:
        return self._prompting.read_row(row)

    def _train_loader(self) -> DataLoader:
        parts = self.accelerator, self.shuffle_dataset, self._batches.n_calls
        return prompt_loader(self._stream, self.train_dataset, self.args, *parts)

    def check_eval_dataset(self, dataset: Rows, reward_funcs: Sequence[Any]) -> None:
        """Checks a dataset that wasn't passed to the constructor, as the constructor checks its `eval_dataset`."""
        if self._stream.is_new(dataset):
            self._prompting.check_new({"eval_dataset": dataset}, () if self.rollout_func is not None else reward_funcs)

    def _eval_loader(self, dataset: Any, is_argument: bool) -> DataLoader:
        if is_argument:
            self.check_eval_dataset(dataset, self.reward_funcs)
        return self._stream.eval_loader(dataset, self.num_generations_eval, self._get_eval_sampler, shuffle=True)

    # Rollout

    def _generate_and_score_completions(self, inputs: Sequence[Any]) -> Any:
        return self._roll_out(inputs).for_loss()

    def _roll_out(self, inputs: Sequence[Any]) -> Rollout:
        return self._batches.exchanged(self._run_stages(inputs), self._roll_out_extra)

    def _run_stages(self, inputs: Sequence[Any]) -> Rollout:
        """Runs the stages of a rollout, each of which returns a value. The first one reads the rows."""
        self._scoring.check_weights()
        prompted = self._prompt(inputs)
        with self.offloading():
            rollout = self._sampling(prompted)
        rollout = self._score_rollout(rollout)
        self._sampling.check_engine(rollout)
        rollout = self._rewarding.with_sounds(rollout)
        rewards = self._reward(rollout)
        rollout = self._rewarding.without_failed(rollout)
        rollout = self._estimate(rollout, rewards)
        log_media_contribution(self._prompting, self._scoring, rollout, self._batches.n_calls)
        return rollout

    def _roll_out_extra(self, n: int) -> Rollout:
        return self._run_stages(self._stream.draw(n))

    def _prompt(self, inputs: Sequence[Any]) -> Prompted:
        prompted = self._prompting(inputs)
        self.environments = prompted.source.environments
        self._sampling.check_prompts(prompted)
        return prompted

    def tool_loop(self, **options) -> ToolLoop:
        """Returns a loop of tool calls with the limits of training, unless `options` sets other limits."""
        limits = {"max_length": self.max_completion_length, "max_turns": self.max_tool_calling_iterations}
        return self._sampling.tool_loop(**{**limits, **options})

    def _score_rollout(self, rollout: Rollout) -> Rollout:
        """Returns it with log-probabilities of policy and reference, if they are needed before the update."""
        raise NotImplementedError

    def _estimate(self, rollout: Rollout, rewards: Rewards) -> Rollout:
        """Returns it with advantages, by `_shape_rewards` and then `_compare_rewards`, and marks of groups."""
        group_ids = self.accelerator.gather(rollout.group_ids)
        totals = weighted_sum(rewards.per_func, self.reward_weights, rewards.bonus)
        shaped = self._shape_rewards(totals)
        estimates = self._compare_rewards(rollout, rewards, totals, shaped, group_ids)
        causes = lost_by_reward(estimates, totals, shaped, group_ids, self.args.compares_groups)
        outside = None
        if self.args.dynamic_sampling_range is not None:
            outside = out_of_range(self._bounded_rewards(rewards, totals), group_ids, self.args.dynamic_sampling_range)
        rollout = with_estimates(rollout, estimates, causes, outside, self.accelerator)
        self._rollout_log.measure_difficulty(rollout, rewards.per_func)
        self._rollout_log.add(rollout, rewards.logged, totals, estimates)
        return rollout

    def _bounded_rewards(self, rewards: Rewards, totals: torch.Tensor) -> torch.Tensor:
        """Returns the rewards of all ranks' completions that `dynamic_sampling_range` bounds, `(N,)`."""
        name = self.args.dynamic_sampling_reward
        return totals if name is None else rewards.per_func[:, reward_index(name, self.reward_func_names)]

    def _shape_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """Scales and clips the rewards of all ranks' completions, `(N,)`."""
        raise NotImplementedError

    def _compare_rewards(
        self,
        rollout: Rollout,
        rewards: Rewards,
        totals: torch.Tensor,
        shaped: torch.Tensor,
        group_ids: torch.Tensor,
    ) -> Estimates:
        """
        Returns advantages, and which groups have signal, from the rewards of all ranks' completions, and their sums
        before and after shaping. All tensors are `(N,)`.
        """
        raise NotImplementedError

    def _reward(self, rollout: Rollout) -> Rewards:
        rewards = self._rewarding(rollout)
        if self.args.contrast_view is not None:
            return replace(rewards, bonus=self._rewarding.bonus_of_contrast(rollout, rewards.per_func))
        return rewards

    # Checkpoints

    def _invalidate_engine(self) -> None:
        self.sampler.invalidate_weights()

    def _rollout_state(self) -> dict[str, Any]:
        return {
            **super()._rollout_state(),
            "batches": self._batch_settings(),
            **self._batches.state_dict(),
            "in_flight": self.in_flight and self.in_flight.state_dict(),
        }

    def _batch_settings(self) -> dict[str, Any]:
        names = ["per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"]
        sizes = {name: getattr(self.args, name) for name in [*names, "num_generations", "num_iterations"]}
        return {**sizes, "num_processes": self.accelerator.num_processes, "reference": self.args.beta != 0}

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        super()._load_rollout_state(state)
        settings = self._batch_settings()
        if state["batches"] != settings:
            logger.warning(
                f"The settings of batches have changed from {state['batches']} to {settings}, so the run continues "
                "with new completions."
            )
            return
        self._batches.load_state_dict(state)
        if self.in_flight is not None and state["in_flight"] and not self.args.ignore_data_skip:
            self._stream.restore_batches(state["in_flight"]["rows"])
            self.in_flight.load_state_dict(state["in_flight"])

    # Update

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Returns the next micro-batch, see [`Batches.next`], or in evaluation the rollout of the rows `inputs`."""
        if not self.model.training:
            return self._generate_and_score_completions(inputs)
        micro_batch = self._batches.next(inputs)
        self._on_micro_batch()
        return micro_batch

    def _new_rollout(self, inputs: Any) -> Rollout:
        """Returns the rollout of rows for updates, with marks of the completions that updates needn't forward."""
        rollout: Any = self._generate_and_score_completions(inputs)
        # Updates skip completions without a gradient, unless this could change the result. With dropout, a smaller
        # forward would draw other random numbers
        if self._uses_every_score or _overrides_loss(type(self)) or has_dropout(self.model):
            return rollout
        return replace(rollout, tokens=replace(rollout.tokens, without_gradient=without_gradient(rollout)))

    @property
    def _uses_every_score(self) -> bool:
        """`True` if completions with advantages of 0 affect the loss, or the choice of the tokens in the loss."""
        return True

    def _on_rollout(self, micro_batches: list[Rollout]) -> list[Rollout]:
        """Returns the micro-batches of a new rollout, with the scores that must come before its first update."""
        return self._batches.with_off_policy_scores(micro_batches)

    def _on_micro_batch(self) -> None:
        """Is called before each micro-batch in training. By default, does nothing."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Returns the loss of a micro-batch. `max_tokens_per_microbatch` may split its forward and backward pass."""
        if return_outputs:
            raise ValueError(f"The {type(self).__name__} does not support returning outputs")
        self._loss_weight = None if self.model.training else self._weight(inputs)
        self._micro_batch = inputs
        self._scores = None
        try:
            loss = self._compute_loss(model, TRLInputs(inputs, self._weighs_advantages))
            deferred = None if self._scores is None else self._scores.deferred
        finally:
            self._micro_batch = self._scores = None
        if deferred is None:
            return loss
        # `training_step` divides the loss of the last part by this number, and the earlier parts need the same divisor
        divisor = 1 if self.loss_is_scaled_for_ga else self.current_gradient_accumulation_steps
        return self._backward_by_parts(model, loss, deferred, divisor)

    def _compute_loss(self, model: nn.Module, inputs: TRLInputs) -> torch.Tensor:
        """
        Computes the loss of a micro-batch from its scores, and records the metrics of the trainer's algorithm.

        A subclass may override this method as in TRL, since `_get_per_token_logps_and_entropies` scores with media.
        """
        rollout = inputs.rollout
        loss, metrics = self._loss(self._score(model, rollout, rows=rollout.rows_to_score), rollout)
        self._metric_log.add(metrics)
        return loss

    def _loss(self, scores: Scores, inputs: Rollout) -> LossOutput:
        """Computes the scalar loss and the metrics of a micro-batch from its scores."""
        raise NotImplementedError

    def _weight(self, inputs: Rollout) -> torch.Tensor | float:
        """Returns the number of completions, or of tokens, over which the loss of a micro-batch is a mean."""
        return inputs.n_counted

    def _score(self, model: nn.Module, rollout: Rollout, **options) -> Scores:
        """
        Returns a micro-batch's scores with gradients. On-policy, [`Batches.settle`] keeps their log-probabilities as
        the old ones, which the loss reads.
        """
        self._scores = score_with_view(self._policy, model, rollout, compute_aux_loss=self.aux_loss_enabled, **options)
        self._batches.settle(rollout, self._scores.logps)
        return self._scores

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        """Returns scores of the micro-batch with its media, for a user's `_compute_loss` that calls TRL's hook."""
        if self._micro_batch is None:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        scores = self._score(model, self._micro_batch)
        return scores.logps, scores.entropies, scores.aux_loss


def _overrides_loss(trainer_class: type) -> bool:
    """Returns whether a subclass outside this package defines a loss, which may have a gradient on any token."""
    package = __name__.partition(".")[0]
    # Classes of the MRO before this package's trainer
    subclasses = itertools.takewhile(lambda cls: cls.__module__.partition(".")[0] != package, trainer_class.__mro__)
    return any({"_loss", "_compute_loss"} & vars(cls).keys() for cls in subclasses)
