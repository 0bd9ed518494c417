# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What all trainers that sample completions share: construction on TRL's, the stages of a rollout, micro-batches."""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from datasets import IterableDataset
from torch import nn
from transformers import PreTrainedModel
from trl.extras.profiling import profiling_context
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import is_async_callable, use_adapter

from ..algorithms.losses import LossOutput
from ..algorithms.metrics import PendingMetrics
from ..checks.run_checks import Checks
from ..data.rows.batches import BatchShape, repeat_order
from ..data.rows.columns import MEDIA_COLUMNS
from ..data.rows.features import restore_media
from ..encoding.prompts import all_placeholder_ids
from ..forward.scores import Scores
from ..forward.token_budget import backward_by_parts
from ..generation.transformers import Branches
from ..models.modes import has_dropout
from ..models.parts import same_weights_trained
from ..models.quantization import keep_differentiable
from ..models.wrapped import is_unsharded, unwrapped
from ..policy import PolicyForward
from ..reporting.model_card import CardNotes
from ..rewards.checks import distinct_names
from ..rewards.named import as_reward_funcs
from ..rollout.collect import complete, take_custom_rollout
from ..rollout.environments import Environments, rows_for_environments, template_for_tools
from ..rollout.prompt_encoder import PromptEncoder
from ..rollout.ranks import arranged, rank_metrics
from ..rollout.rollout import Rollout, TRLInputs
from ..rollout.samplers import Sampler, VLLMSampler
from ..rollout.score import (
    engine_metrics,
    n_on_policy,
    packing_metrics,
    rollout_ratios,
    score_in_batches,
    score_with_view,
    without_gradient,
)
from ..rollout.stream import EncodedRow, RowStream, named_dataset, warn_of_positions
from ..rollout.turns import ToolLoop, without_tools
from .arguments import check_arguments
from .asynchronous import AheadSampling, row_encoder
from .checkpoints import CheckpointMixin
from .engine import (
    Generation,
    check_own_sampler,
    check_prompts,
    check_sampler,
    check_settings,
    logit_bias,
    make_engine,
    naming_checkpoint,
    prompt_limits,
    requests_in_flight,
    suppress_placeholders,
    transformers_sampler,
)
from .offload import HostMemory, idle_storages
from .optimizer import choose_what_trains
from .rollout_logs import ReadMetrics, RolloutLog, equal_rewards_hint, media_callback, media_log
from .run import MetricLog, Rewarding, Run
from .setup import (
    around_trl_constructor,
    check_deepspeed_steps,
    check_first_rows,
    check_launch,
    enable_packing,
    feature_dtype,
    first_fallbacks,
    has_unread_rows,
    ignore_deprecated_names,
    load_parts,
    modalities,
    prepare_reference,
    reward_sources,
    start_loop,
    warn_of_truncation,
    warn_of_unread,
    warn_of_unused_recommendations,
    with_media_reader,
)
from .tool_turns import ToolTurns
from .views import bonus_of_contrast, sample_with_views


logger = get_logger(__name__)


class MultimodalTrainer(CheckpointMixin):
    """
    Base of the trainers that sample completions. Constructor, config, loop, engines and names of metrics are TRL's;
    rollout and loss are functions of a [`~rollout.rollout.Rollout`].
    """

    _micro_batch: Rollout | None = None  # while its loss is computed
    _scores: Scores | None = None  # of it
    _warned_of_positions = False
    _idle_critic: nn.Module | None = None  # a critic that sampling doesn't touch
    # Attributes of TRL's trainers, whose types TRL leaves open
    processing_class: Any
    reward_funcs: Any = ()
    reward_processing_classes: Any = ()
    chat_template_kwargs: Any
    num_generations_eval: Any = 1
    aux_loss_enabled = mask_truncated_completions = False
    max_completion_length: Any
    lr_scheduler: Any
    _logit_bias: dict[int, float]

    def __init__(
        self, model, reward_funcs, args, processing_class=None, quantization_config=None, ref_model=None, **kwargs
    ):
        ignore_deprecated_names()
        check_arguments(reward_funcs, args=args, processing_class=processing_class, ref_model=ref_model, **kwargs)
        check_launch(args, model)
        check_deepspeed_steps(args)
        reward_funcs = None if reward_funcs is None else as_reward_funcs(reward_funcs)
        warn_of_truncation(args)
        tools, factory = kwargs.pop("tools", None), kwargs.pop("environment_factory", None)
        rollout_func, sampler = kwargs.pop("rollout_func", None), kwargs.pop("sampler", None)
        if factory is None:  # environments read what columns they like
            given = {name: kwargs.get(name) for name in ("train_dataset", "eval_dataset")}
            warn_of_unread(args, given, modalities(model, args))
        if kwargs.get("train_dataset") is None:
            kwargs["train_dataset"] = rows_for_environments(factory, args)
        set_seed(args.seed)  # as TRL does before it loads a model
        loaded = load_parts(
            model,
            args,
            processing_class,
            quantization_config=quantization_config,
            ref_model=ref_model,
            peft_config=kwargs.get("peft_config"),
            datasets=[kwargs.get(name) for name in ("train_dataset", "eval_dataset")],
            uses_tools=bool(tools) or factory is not None,
        )
        self.toolbox = Environments(tools or (), factory, args.rules)
        processors = kwargs.pop("reward_processing_classes", None)
        sources = reward_sources(reward_funcs, processors, self.toolbox, needed=args.needs_rewards)

        self.card_notes = CardNotes()
        # Datasets whose rows are looked at when the first ones come
        self._unseen = {name for name in ("train_dataset", "eval_dataset") if has_unread_rows(kwargs.get(name))}
        placeholders = all_placeholder_ids(loaded.model, loaded.processing_class)
        with around_trl_constructor(args, loaded, placeholders):
            super().__init__(
                model=loaded.model,
                args=args,
                processing_class=loaded.processing_class,
                **sources.for_trl(),
                quantization_config=quantization_config,
                **kwargs,
            )
        choose_what_trains(self.model, args, self.optimizer)
        self._processor_source = loaded.processor_source
        self._policy = PolicyForward(
            self.accelerator,
            self.processing_class,
            fallbacks=first_fallbacks(self.accelerator, self.model, self.ref_model, args),
            temperature=self.temperature,
            max_tokens=args.max_tokens_per_microbatch,
        )
        self.checks = Checks(self._policy, self.accelerator)
        self.rollout_func, self.tools = rollout_func, self.toolbox.tools
        self._set_tools(sources.of_environments)
        self.prompts = PromptEncoder(
            self._unwrapped(self.model),
            self.processing_class,
            {"chat_template": self.chat_template, **self.chat_template_kwargs, "tools": self.tools or None},
            args.audio_overlong,
            args.rules,
            args.ignored_media_columns or (),
            args.special_tokens_in_text,
            keep_decoded=args.keeps_decoded,
            for_engine=args.use_vllm if sampler is None else sampler.is_engine,
            feature_dtype=lambda: feature_dtype(
                self.prompts.model, self.ref_model, getattr(self.critic, "model", None)
            ),
        )
        ahead = args.max_staleness > 0 and not self.tools  # further turns continue from decoded media
        encode = row_encoder(self.prompts, lambda: self.vllm_generation.prompts) if ahead else self.prompts.encode_row
        self._stream = RowStream(
            args,
            self.accelerator,
            encode=None if self.toolbox or rollout_func is not None else encode,
            messages=self.prompts.messages,
            encode_teachers=self.prompts.encode_teachers if args.teacher_columns else None,
            columns=["prompt", *args.teacher_columns, *MEDIA_COLUMNS] if args.remove_unused_columns else None,
            metrics=self._metrics,
            state=lambda: self.state,
        )
        if loaded.ref_model is not None:
            self.beta, self.ref_model = args.beta, prepare_reference(loaded.ref_model, args, self.accelerator)
            if args.sync_ref_model:
                self.add_callback(SyncRefModelCallback(self.ref_model, self.accelerator))
        self.reward_func_names = distinct_names(self.reward_func_names)
        self._run = self._make_run()
        for i, given in enumerate(zip(sources.processors, sources.by_name, strict=True)):
            self.reward_funcs[i] = with_media_reader(self._run, self.reward_funcs[i], *given)
        warn_of_unused_recommendations(self._unwrapped(self.model).generation_config, self.generation_config)
        self.use_vllm = args.use_vllm
        self.host_memory = HostMemory(args.device) if args.offload_during_generation else None
        self._make_samplers(sampler, placeholders, loaded.revision)
        keep_differentiable(self.model)
        self._policy.fallbacks.packing = enable_packing(self.accelerator, self.model, self.ref_model, args)
        self._add_checkpoint_callbacks()
        self._add_log_callbacks()

    def _make_run(self) -> Run:
        args, loop = self.args, getattr(self, "async_loop", None)

        def functions():
            return self.reward_func_names, self.reward_funcs, self.reward_processing_classes

        names = {"log_extra": "_log_completion_extra", "log_metric": "_log_metric"}
        logs = {argument: getattr(self, name, None) for argument, name in names.items()}
        how = lambda: self.state, logs, loop, functools.partial(profiling_context, self)
        rewarding = Rewarding(functions, self.chat_template_kwargs, args.rules, *how)
        log = MetricLog(self._metrics, lambda: self.model.training)
        parts = self._policy, self.prompts, self.toolbox, self._stream, self.checks, log, rewarding
        now, sizes = (lambda: self.model, lambda: self.state), (args.num_generations, self.num_generations_eval)
        return Run(args, self.accelerator, *parts, *now, sizes, encodes_text=self.rollout_func is None)

    def _unwrapped(self, model: nn.Module) -> PreTrainedModel:
        return unwrapped(self.accelerator, model)

    def _set_tools(self, reward_funcs: dict[str, Callable]) -> None:
        """Sets what TRL's GRPO trainer has for tools and environments, and adds the latter's rewards."""
        self.environment_factories, self.environments = self.toolbox.factories or None, None
        limit = self.args.max_tool_calling_iterations
        self.max_tool_calling_iterations = sys.maxsize if limit is None else limit
        self.chat_template = template_for_tools(self.processing_class) if self.tools else None
        for name, reward_func in reward_funcs.items():
            self.reward_funcs.append(reward_func)
            self.reward_func_names.append(name)
            self.reward_processing_classes.append(None)
            self.reward_weights = torch.cat([self.reward_weights, torch.ones(1)])
        is_async = any(map(is_async_callable, [*self.tools, *self.reward_funcs]))
        if is_async and getattr(self, "async_loop", None) is None:
            self.async_loop = start_loop(f"{type(self).__name__}-AsyncLoop")

    def _make_samplers(self, sampler: Sampler | None, placeholders: set[int], revision: str | None) -> None:
        """Sets the sampler of transformers, and the one to use: the user's, or vLLM's, as the config says."""
        args, run, profile = self.args, self._run, functools.partial(profiling_context, self)
        check_own_sampler(sampler, args.use_vllm)
        self._tool_turns = ToolTurns(run)
        parts = self.generation_config, self.generation_kwargs, self.eos_token_ids, self._dist, profile
        batching = getattr(self, "continuous_batching_config", None)
        generation = Generation(*parts, batching, lambda: self.model_wrapped)
        self._own_sampler = transformers_sampler(run, generation)
        self._logit_bias = logit_bias(args, placeholders) if args.use_vllm else {}
        if not args.use_vllm:
            suppress_placeholders(run.prompts.model, generation, placeholders)
            self.sampler = self._own_sampler if sampler is None else sampler
            return
        datasets = [] if self.rollout_func is not None else [self.train_dataset, self.eval_dataset]
        more = self._logit_bias, revision, prompt_limits(run, datasets), lambda: self.host_memory
        self.vllm_generation = make_engine(run, generation, *more)
        self.in_flight = requests_in_flight(args, self.vllm_generation)
        self.sampler = VLLMSampler(
            self.vllm_generation,
            profile,
            explain=lambda: naming_checkpoint(args.output_dir, run.step) if self.is_in_train else nullcontext(),
        )

    def _add_log_callbacks(self) -> None:
        """Adds the callbacks that read metrics, log completions, and hint at equal rewards."""
        callbacks = self.callback_handler if self.is_world_process_zero() else None
        pending = [getattr(self, name, {}) for name in ("_pending_extra_logs", "_pending_metrics")]
        hint = equal_rewards_hint(self._run)
        self._unread_metrics, self._media_log = PendingMetrics(), media_log(self._run)
        self._rollout_log = RolloutLog(self._run, self._logs, pending[0], pending[1], self._media_log, hint, callbacks)
        for callback in filter(None, (ReadMetrics(self._unread_metrics), hint)):
            self.add_callback(callback)
        if self._media_log is not None:
            self.log_completions = False  # TRL's tables hold no audio or video
            parts = self.callback_handler, self._logs, self.card_notes, getattr(self, "commit_scheduler", None)
            self.add_callback(media_callback(self._run, self._media_log, *parts))

    def offloading(self) -> AbstractContextManager[None]:
        """With `offload_during_generation`, the device has no memory of what sampling doesn't need."""
        if self.host_memory is None:
            return nullcontext()
        # A function of the user may use these
        others: Any = () if self.rollout_func is not None else [self.ref_model, self.ema, self._idle_critic]
        return self.host_memory.holding(idle_storages(self.model, self.optimizer, *others))

    def _check_sampler(self, rollout: Rollout) -> None:
        known = self._corrects(rollout), self.eos_token_ids, self._logit_bias, self.in_flight
        check_sampler(self._run, self.sampler, rollout, *known)

    # Rows and prompts

    def get_train_dataloader(self):
        """A loader of rows with encoded prompts, by generation batches."""
        args, dataset = self.args, self.train_dataset
        if isinstance(dataset, IterableDataset) and self.shuffle_dataset:
            dataset = dataset.shuffle(seed=args.seed)
        ranks = self.accelerator.num_processes, self.accelerator.process_index
        size = args.generation_batch_size // ranks[0]
        shape = BatchShape(size, args.num_generations, self._steps_per_rollout, *ranks)
        order = functools.partial(repeat_order, seed=args.seed) if self.shuffle_dataset else None
        return self._stream.train_loader(dataset, shape, args.media_prefetch, order)

    def get_eval_dataloader(self, eval_dataset=None):
        dataset = named_dataset(self.eval_dataset, eval_dataset)
        return self._stream.eval_loader(dataset, self.num_generations_eval, self._get_eval_sampler, shuffle=True)

    @property
    def _steps_per_rollout(self) -> int:
        """Micro-batches between one generation batch and the next."""
        return self.args.steps_per_generation * self.num_iterations

    # Rollout

    def _generate_and_score_completions(self, inputs: Sequence[Any]) -> Any:
        return self._roll_out(inputs).for_loss()

    def _roll_out(self, inputs: Sequence[Any]) -> Rollout:
        """Completions of rows with their advantages, by the stages below in their order."""
        raise NotImplementedError

    def _collect(self, inputs: Sequence[Any]) -> Rollout:
        """Rows, environments and encoded prompts."""
        rows = list(inputs) if isinstance(inputs[0], EncodedRow) else self._stream.without_prompts(inputs)
        check_first_rows(self._run, [row.stored for row in rows], self._unseen)
        rollout = self._run.collect(rows)
        self.environments = rollout.source.environments
        rollout.source.batch_index = getattr(inputs, "batch_index", None) if self.model.training else None
        rollout.step = self.state.global_step
        prompts, source = rollout.prompts, rollout.source
        self.card_notes.add(source.rows[0], source.messages, (prompt.modalities for prompt in prompts))
        if prompts and not self._warned_of_positions:  # else `rollout_func` makes them
            self._warned_of_positions = warn_of_positions(prompts, source.row_indices, self.prompts.model)
        if self.args.self_check and self.model.training and prompts:
            parts = self._run, self.sampler, self._own_sampler, lambda: self.model_wrapped
            check_prompts(self._run, rollout, functools.partial(check_settings, *parts, self._processor_source))
        return rollout

    def _sample(self, rollout: Rollout) -> None:
        """Completions, with the turns in which tools are called."""
        branches: Any = Branches() if self.tools else None
        if self.rollout_func is not None:
            ids, logps, tool_mask = self._custom_rollout(rollout)
        elif self.in_flight is None or rollout.source.batch_index is None:
            samples = sample_with_views(self._run, self.sampler, self.model_wrapped, rollout, branches)
            (ids, logps), tool_mask = samples, None
        else:
            engine: Any = self.vllm_generation
            ahead = AheadSampling(self._run, self.in_flight, engine)
            (ids, logps), tool_mask = ahead(self.sampler, rollout, rollout.source.batch_index), None
        if self.tools:
            samples = self.sampler, self.model_wrapped, rollout, ids, logps, branches
            ids, logps, tool_mask = self._tool_turns(*samples, self.tool_loop)
            self.card_notes.modalities.update(*(prompt.modalities for prompt in rollout.prompts))
        else:
            rollout.source.completions = without_tools(rollout, ids, self.processing_class, self.toolbox)
            for prompt in rollout.prompts:
                prompt.decoded = ()  # the engine has processed it

        metrics, n_tokens = complete(
            rollout,
            ids,
            logps,
            tool_mask,
            ends=self.eos_token_ids,
            pad_to_multiple_of=self.pad_to_multiple_of,  # pyrefly: ignore[bad-argument-type]
            mask_truncated=self.mask_truncated_completions,
            accelerator=self.accelerator,
        )
        if self.model.training:
            self.state.num_input_tokens_seen += n_tokens
        self._run.metrics.now["num_tokens"] = [self.state.num_input_tokens_seen]
        self._run.metrics.add(metrics | self.sampler.metrics())
        # Once, so that old, reference and current log-probabilities agree
        lengths, size = rollout.completion_mask.sum(1).tolist(), self.args.per_device_train_batch_size
        rollout.packed = self._policy.worth_packing(rollout.prompts, lengths, size, self._unwrapped(self.model))

    def tool_loop(self, tools: Sequence[dict[str, Callable]], **options) -> ToolLoop:
        """Calls tools as in training, unless the options say otherwise."""
        most = {"max_length": self.max_completion_length, "max_turns": self.max_tool_calling_iterations}
        options = {**most, "ends": self.eos_token_ids, "loop": getattr(self, "async_loop", None), **options}
        template = {"chat_template": self.chat_template, **self.chat_template_kwargs}
        return self._run.tool_loop(self.sampler, tools, template, **options)

    def _custom_rollout(self, rollout: Rollout):
        """What the user's `rollout_func` samples, as TRL calls it, with prompts that hold their media."""
        self.sampler.load_weights(self.state.global_step)
        output = self.rollout_func(restore_media(rollout.source.messages), self)
        placeholders = all_placeholder_ids(self._unwrapped(self.model), self.processing_class)
        return take_custom_rollout(rollout, output, placeholders)

    @torch.no_grad()
    def _score_rollout(self, model: nn.Module, rollout: Rollout) -> Scores:
        """Scores of a rollout, or of a part of it, without gradients."""
        args = self.args
        size = args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size
        with disable_gradient_checkpointing(self.model, args.gradient_checkpointing_kwargs):
            return score_in_batches(self._policy, model, rollout, size)

    def _score_reference(self, rollout: Rollout) -> Scores:
        if self.ref_model is not None:
            return self._score_rollout(self.ref_model, rollout)
        model: Any = self.accelerator.unwrap_model(self.model)
        with same_weights_trained(model), use_adapter(model, "ref" if "ref" in model.peft_config else None):
            return self._score_rollout(self.model, rollout)

    def _reward(self, rollout: Rollout) -> None:
        rewards = self._run.rewarding(rollout)
        rollout.rewards.per_func = self.accelerator.gather(rewards.to(self.accelerator.device))
        rollout.rewards.bonus = bonus_of_contrast(self._run, rollout)

    # Checkpoints

    def _rollout_state(self) -> dict[str, Any]:
        return {**super()._rollout_state(), "in_flight": self.in_flight and self.in_flight.state_dict()}

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        super()._load_rollout_state(state)
        is_same = state["batches"] == self._batches() and not self.args.ignore_data_skip
        if self.in_flight is not None and is_same and state.get("in_flight"):
            self._stream.restore_batches(state["in_flight"]["rows"])
            self.in_flight.load_state_dict(state["in_flight"])

    # Update

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A micro-batch; a new rollout when the last one is used up."""
        if not self.model.training:
            return self._generate_and_score_completions(inputs)
        steps = self.args.steps_per_generation
        place = self._step % (steps * self.num_iterations)
        if place == 0 or self._buffered_inputs is None:
            for part in self._buffered_inputs or ():
                part.release()
            rollout: Any = self._generate_and_score_completions(inputs)
            if not (self._uses_every_score or _has_own_loss(type(self)) or has_dropout(self.model)):
                rollout.tokens.without_gradient = without_gradient(rollout)
            if self.rollout_func is not None or not self.args.keep_groups_together:
                rollout = rollout.select(torch.randperm(len(rollout)).tolist())  # as TRL shuffles
            else:
                # Engines refuse some mixtures of media that must be forwarded alone, which a move could make
                may_move = self._policy.fallbacks.isolate is None or is_unsharded(self.accelerator)
                rollout, metrics = arranged(rollout, self.args, self.accelerator, may_move)
                self._run.metrics.add(metrics)
            self._buffered_inputs = rollout.micro_batches(steps)
            parts = self._buffered_inputs
            metrics = rank_metrics(parts, self.accelerator)
            self._run.metrics.add(metrics | packing_metrics(self._policy, self.prompts.model, parts))
            self._on_rollout(parts)
        self._on_micro_batch(self._buffered_inputs, place)
        return self._buffered_inputs[self._step % steps]

    @property
    def _uses_every_score(self) -> bool:
        """Whether completions without an advantage count in the loss, or in what is chosen for it."""
        return True

    def _on_rollout(self, micro_batches: list[Rollout]) -> None:
        """Scores the new micro-batches that the policy will have moved away from when they are trained on."""
        for part in micro_batches[self._n_on_policy :]:
            if part.old_per_token_logps is None:
                part.old_per_token_logps = self._score_rollout(self.model, part).logps
        if self._corrects(micro_batches[0]) and self._n_on_policy == 0:
            self._log_engine(micro_batches)

    @property
    def _n_on_policy(self) -> int:
        return n_on_policy(self.args, self._steps_per_rollout)

    def _on_micro_batch(self, micro_batches: list[Rollout], place: int) -> None:
        """What a trainer changes before the micro-batch at a place among those of all epochs over a rollout."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The loss of a micro-batch by `_compute_loss`, whose forward may be split by `max_tokens_per_microbatch`."""
        if return_outputs:
            raise ValueError(f"The {type(self).__name__} does not support returning outputs")
        self._micro_batch, self._scores = inputs, None
        try:
            loss = self._compute_loss(model, TRLInputs(inputs))
            parts = None if self._scores is None else self._scores.deferred
        finally:
            self._micro_batch = self._scores = None
        if parts is None:
            return loss
        n_parts = float(len(parts.parts))
        self._run.metrics.add({"token_budget/parts": n_parts, "token_budget/extra_time": parts.seconds})
        # `training_step` divides what it gets here
        divisor = 1 if self.loss_is_scaled_for_ga else self.current_gradient_accumulation_steps
        return backward_by_parts(self.accelerator, model, loss, parts, divisor)

    def _compute_loss(self, model: nn.Module, inputs: TRLInputs) -> torch.Tensor:
        """
        The loss of a micro-batch: its scores, then the loss and the metrics of the trainer's algorithm.

        A subclass may replace it in TRL's way: `_get_per_token_logps_and_entropies` scores with media.
        """
        rollout = inputs.rollout
        loss, metrics = self._loss(self._score(model, rollout, rows=rollout.rows_to_score), rollout)
        self._unread_metrics.add(metrics, self.accelerator.gather, self._run.metrics.now)
        return loss

    def _loss(self, scores: Scores, inputs: Rollout) -> LossOutput:
        """The loss of a micro-batch, a scalar, and its metrics, from its scores."""
        raise NotImplementedError

    def _score(self, model: nn.Module, rollout: Rollout, **options) -> Scores:
        """Scores of a micro-batch, with gradients. Where no update came between, they are those of sampling, too."""
        self._scores = score_with_view(self._policy, model, rollout, compute_aux_loss=self.aux_loss_enabled, **options)
        if rollout.old_per_token_logps is None:
            rollout.old_per_token_logps = self._scores.logps.detach()
        if self._corrects(rollout) and rollout.importance_sampling_ratio is None:
            rollout.importance_sampling_ratio = rollout_ratios(rollout, self.args)
            if not self.model.training:
                self._log_engine([rollout])
            elif self._step % self._steps_per_rollout == self._n_on_policy - 1:  # now all have their old scores
                self._log_engine(self._buffered_inputs or ())
        return self._scores

    def _corrects(self, rollout: Rollout) -> bool:
        takes = self.rollout_func is None or not self.sampler.samples_policy
        return takes and rollout.sampling_per_token_logps is not None and self.args.vllm_importance_sampling_correction

    def _log_engine(self, parts: Sequence[Rollout]) -> None:
        self._unread_metrics.add(engine_metrics(parts, self.args), self.accelerator.gather, self._run.metrics.now)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        """Scores of the micro-batch, media included, for a `_compute_loss` of the user that calls TRL's hook."""
        if self._micro_batch is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        scores = self._score(model, self._micro_batch)
        return scores.logps, scores.entropies, scores.aux_loss


def _has_own_loss(trainer_class: type) -> bool:
    """Whether the loss is that of a subclass outside this package, which may have a gradient on every token."""
    package = __name__.partition(".")[0]
    outside = itertools.takewhile(lambda each: each.__module__.partition(".")[0] != package, trainer_class.__mro__)
    return any(name in vars(each) for each in outside for name in ("_loss", "_compute_loss"))
