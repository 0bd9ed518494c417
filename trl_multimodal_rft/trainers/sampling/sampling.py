# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Stage of a rollout that samples completions, continues them after tool calls, and compares sampler and policy."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import GenerationConfig

from ...algorithms.metrics import average, latest, share
from ...checks.self_check import RunSettings
from ...data.rows.features import restore_media
from ...encoding.processors import Processor
from ...encoding.prompts import EncodedPrompt, all_placeholder_ids
from ...engines.in_flight import InFlight
from ...engines.samplers import Sampler, Samples, TransformersSampler
from ...engines.token_loop import up_to_first_end
from ...engines.transformers import Branches, sample_completions
from ...engines.vllm_servers import Servers
from ...forward.scores import split_lengths
from ...models.wrapped import computing_dtype
from ...policy import Fallbacks
from ...rollout.completion_columns import Ends, take_custom_rollout, with_completions
from ...rollout.ranks import any_rank, sum_over_ranks
from ...rollout.reward_functions import RewardFunctions
from ...rollout.rollout import Drawn, Prompted, Rollout
from ...rollout.turns import (
    LIMITS,
    ToolLoop,
    Trajectory,
    drawn_turns,
    prompts_with_results,
    run_turns,
    with_one_turn,
    with_turns,
)
from ..base.configs import sampling_changes
from .asynchronous import AsynchronousSampling, probe_engine
from .context import Context
from .prompting import Prompting
from .rollout_views import prompts_under_views, without_extra
from .scoring import Scoring


logger = get_logger(__name__)


@dataclass
class Sampling:
    """Stage that samples the completions of prompts. All ranks must call it."""

    context: Context
    prompting: Prompting
    scoring: Scoring  # of the policy that is sampled, for its checks and packing
    reward_functions: RewardFunctions  # those that wait reward completions on arrival
    ends: Ends
    sampler: Sampler
    local: TransformersSampler  # of the self-check, and the sampler itself without another one
    make_loop: Callable[..., ToolLoop]  # makes the loop of tool calls
    load_processor: Callable[[], Processor]  # as transformers does
    engine: Servers | Any = None
    in_flight: InFlight | None = None  # requests of `engine` for later batches
    logit_bias: dict[int, float] | None = None  # of the engine, by token id
    rollout_func: Callable[..., dict[str, Any]] | None = None  # gets the prompts
    pad_to_multiple_of: int | None = None
    mask_truncated: bool = False
    checked_calls: bool = False  # whether the first batch with calls of tools was checked
    mode_after_tools: str | None = None  # last logged message about generation after tools

    def __call__(self, prompted: Prompted) -> Rollout:
        """Returns the rollout of prompts."""
        branches = Branches() if self.prompting.toolbox.tools else None
        if self.rollout_func is not None:
            prompted, drawn = self._by_user(prompted)
        elif self.in_flight is None or prompted.source.batch_index is None:  # evaluation, or extra prompts
            drawn = self._draw(prompted, branches)
        else:
            drawn = self._draw_in_flight(prompted, prompted.source.batch_index)
        if branches is not None:
            prompted, drawn = self._after_tools(prompted, drawn, branches)
            self.prompting.notes.modalities.update(*(prompt.modalities for prompt in prompted.prompts))
        else:
            prompted = with_one_turn(prompted, drawn.ids, self.prompting.encoder.processor)
            for prompt in prompted.prompts:
                prompt.decoded = ()  # the sampler has read the decoded media
        self.prompting.look_for_media(prompted)
        rollout = self._rollout(prompted, drawn)
        self.context.metrics.add({name: average(number) for name, number in self.sampler.metrics().items()})
        return rollout

    def _by_user(self, prompted: Prompted) -> tuple[Prompted, Drawn]:
        self.sampler.load_weights(self.context.step)
        # As in TRL, the function gets prompts that hold their media
        output = self.rollout_func(restore_media(prompted.source.messages))
        encoder = self.prompting.encoder
        return take_custom_rollout(prompted, output, all_placeholder_ids(encoder.model, encoder.processor))

    def _draw(self, prompted: Prompted, branches: Branches | None) -> Drawn:
        context = self.context
        if context.args.rollout_view is None and context.args.contrast_view is None:
            return Drawn(*self._sample(prompted.prompts, branches))
        views = prompts_under_views(context, self.prompting.encoder, prompted, context.step)
        # One call, as all ranks must call the sampler equally often
        samples = self._sample(views.prompts(prompted), branches)
        return without_extra(context, self.prompting.encoder, prompted, views, Drawn(*samples))

    def _draw_in_flight(self, prompted: Prompted, batch_index: int) -> Drawn:
        assert self.in_flight is not None and self.engine is not None  # its servers have the requests in flight
        parts = self.context, self.prompting, self.scoring.checks, self.reward_functions
        return AsynchronousSampling(*parts, self.in_flight, self.engine)(self.sampler, prompted, batch_index)

    def _sample(self, prompts: list[EncodedPrompt], branches: Branches | None, **options: Any) -> Samples:
        context = self.context
        return self.sampler(context.live.model_wrapped, prompts, step=context.step, branches=branches, **options)

    def _rollout(self, prompted: Prompted, drawn: Drawn) -> Rollout:
        """Returns the rollout with its tokens. Logs lengths, and decides on packing."""
        context = self.context
        source = replace(prompted.source, flight=drawn.flight, from_view=drawn.from_view, contrast=drawn.contrast)
        rollout, metrics, n_tokens = with_completions(
            replace(prompted, source=source),
            drawn,
            ended=[self.ends.end(ids, self.prompting.tokenizer) for ids in drawn.ids],
            pad_to_multiple_of=self.pad_to_multiple_of,
            mask_truncated=self.mask_truncated,
            accelerator=context.accelerator,
        )
        state = context.live.state
        if context.is_training:
            state.num_input_tokens_seen += n_tokens
        context.metrics.add({"num_tokens": latest(state.num_input_tokens_seen), **metrics})
        # Packing is decided once, so that old, reference and current log-probabilities are computed alike
        lengths = rollout.completion_mask.sum(1).tolist()
        batch_size = context.args.per_device_train_batch_size
        model = self.prompting.encoder.model
        packed = self.scoring.policy.worth_packing(rollout.prompts, lengths, batch_size, model)
        return replace(rollout, packed=packed)

    # Tools

    def tool_loop(self, **options: Any) -> ToolLoop:
        """Returns a loop that calls tools and continues completions. `options` replace or add fields of the loop."""
        args = self.context.args
        loop_fields: dict[str, Any] = {
            "encoder": self.prompting.encoder,
            "max_media": args.max_tool_media,
            "max_context_media": args.max_context_media,
            "end_ids": self.ends.ids,
            "isolate": self.scoring.policy.fallbacks.isolate,
            "engine_length": self.sampler.max_length,
            # If all ranks must call the sampler equally often, a loop goes on while any rank has calls
            "any_rank": functools.partial(any_rank, self.context.accelerator) if self.sampler.is_collective else bool,
            "loop": self.reward_functions.loop,
        }
        return ToolLoop(**{**loop_fields, **options})

    def _after_tools(self, prompted: Prompted, drawn: Drawn, branches: Branches) -> tuple[Prompted, Drawn]:
        """Calls tools and samples further turns, until no completion ends with a call."""
        context = self.context

        def sample(prompts: list[EncodedPrompt], max_lengths: list[int]) -> Samples:
            return self._sample(prompts, branches, room=max_lengths)

        loop = self.make_loop(complete=sample, branches=branches)
        trajectories = run_turns(prompted, drawn.ids, drawn.logps, loop)
        for trajectory in trajectories:
            for prompt in (trajectory.prompt, *trajectory.closed_contexts):
                for part in prompt.parts:
                    part.decoded = ()  # no later turn needs decoded media
        drawn = drawn_turns(prompted, drawn, trajectories)
        prompts = prompts_with_results(loop.encoder.model, trajectories)
        prompted = with_turns(replace(prompted, prompts=prompts), trajectories)
        if self.sampler.samples_policy and any(len(turns) > 1 for turns in prompted.source.turns):
            obstacle = branches.obstacle
            mode = f"prefills the conversation again: {obstacle}" if obstacle else "continues from its cache"
            if mode != self.mode_after_tools:
                logger.info(f"After results of tools, generation {mode}.")
                self.mode_after_tools = mode
        if context.is_training:
            # Each context with the tokens that were sampled after it
            contexts, lengths = split_lengths(prompts, list(map(len, drawn.ids)))
            tokens = chain.from_iterable(drawn.ids)
            ids = [[*islice(tokens, n)] for n in lengths]
            self.scoring.checks.on_tool_media(context.model, contexts, ids, self.sampler.is_engine)
        self._log_calls(trajectories)
        return prompted, drawn

    def _log_calls(self, trajectories: Sequence[Trajectory]) -> None:
        """Raises `RuntimeError` if all calls of the first batch fail on all ranks."""
        accelerator = self.context.accelerator
        metrics = self.context.metrics
        counts = sum((trajectory.counts for trajectory in trajectories), Counter())
        local_counts = [*(counts[name] for name in (*LIMITS, "calls", "failures", "unparsed")), len(trajectories)]
        *ends, calls, failures, unparsed, n_completions = sum_over_ranks(accelerator, local_counts)
        if self.context.is_training and calls and not self.checked_calls:
            self.checked_calls = True
            faults = list(chain.from_iterable(trajectory.faults for trajectory in trajectories))
            [n_faults] = sum_over_ranks(accelerator, [len(faults)])
            if n_faults == calls:
                first_fault = faults[0] if faults else "it is on another rank"
                raise RuntimeError(
                    f"All {calls:.0f} calls of tools in the first batch failed. The first failure: {first_fault}; "
                    "correct the tool, or let it raise a `ValueError` if the model's arguments are the cause."
                )
        shares = {f"ended_by_{name}": (end, n_completions) for name, end in zip(LIMITS, ends, strict=True)}
        shares["call_frequency"] = (calls, n_completions)
        shares["failure_frequency"] = (failures, calls)
        shares["unparsed_frequency"] = (unparsed, n_completions)
        metrics.add({f"tools/{name}": share(*counts, is_of_all_ranks=True) for name, counts in shares.items()})

    # Checks

    def check_prompts(self, prompted: Prompted) -> None:
        """Runs the self-check on the first prompts of a run, and on the first prompts with a new modality."""
        context = self.context
        messages = prompted.source.messages
        if not (context.args.self_check and context.is_training and prompted.prompts):
            return
        # The check encodes the messages, and must get stripped ones
        if context.args.special_tokens_in_text == "strip":
            rows = zip(messages, prompted.source.row_indices, strict=True)
            messages = [self.prompting.encoder.checked_prompt(prompt, row) for prompt, row in rows]
        self.scoring.checks.on_prompts(context.model, messages, prompted.prompts, self.self_check_settings)

    def self_check_settings(self) -> RunSettings:
        """Returns the run's settings for the self-check."""
        context = self.context
        sampler = self.sampler
        local = self.local

        def sample(prompts: Sequence[EncodedPrompt], config: GenerationConfig, fallbacks: Fallbacks) -> torch.Tensor:
            options: dict[str, Any] = {"fallbacks": fallbacks, "generating": local.generating}
            policy = self.scoring.policy
            return sample_completions(
                policy, context.live.model_wrapped, prompts, config, local.pad_token_id, **options
            )

        return RunSettings(
            load_processor=self.load_processor,
            template_kwargs=self.prompting.encoder.template_kwargs,
            generation_config=local.config,
            eos_token_ids=self.ends.ids,
            sample=sample if sampler.samples_policy and local.continuous_batching is None else None,
            samples_rollouts=sampler.samples_policy,
            generating=local.generating,
            changes=sampling_changes(context.args),
            audio_overlong=context.args.audio_overlong,
            has_engine_positions=sampler.is_engine,
        )

    def corrects_for_engine(self, rollout: Rollout) -> bool:
        """Returns whether the loss corrects for the difference between policy and sampler."""
        # As in TRL, log-probabilities of a `rollout_func` count only if the policy isn't the sampler
        uses_logps = self.rollout_func is None or not self.sampler.samples_policy
        has_logps = rollout.sampling_per_token_logps is not None
        return uses_logps and has_logps and self.context.args.vllm_importance_sampling_correction

    def check_engine(self, rollout: Rollout) -> None:
        """
        Compares an engine's log-probabilities with the policy's, if a check is due. Raises `RuntimeError` if
        completions go on after an end of text, or lack log-probabilities that the loss corrects by.
        """
        context = self.context
        sampler = self.sampler
        flight = self.in_flight
        if sampler.samples_policy or not context.is_training:
            return
        self._check_logps(rollout)
        checks = self.scoring.checks
        check = checks.self_check
        has_tools = bool(self.prompting.toolbox.tools)
        if check is not None and self.prompting.encodes_text and not has_tools:
            after_end = rollout.completion_mask.bool() & ~up_to_first_end(rollout.completion_ids, self.ends.ids)
            if any_rank(context.accelerator, bool(after_end.any())):
                ends = self.prompting.tokenizer.convert_ids_to_tokens([*self.ends.ids])
                raise RuntimeError(
                    f"self-check: completions go on after an end of text, {ends}. Let the sampler stop there (with "
                    "vLLM, remove `ignore_eos` from `generation_kwargs`), or set `self_check=False` to train anyway."
                )
        if sampling_changes(context.args):  # the sampler's distribution isn't the policy's
            return
        if check is not None and rollout.sampling_per_token_logps is not None:
            policy_dtype = computing_dtype(context.accelerator, self.scoring.policy.unwrapped(context.model))
            dtype = sampler.dtype or policy_dtype
            bias = self.logit_bias or {}
            is_asynchronous = rollout.source.flight is not None
            # Older weights sampled the rollout, so newly sampled probes are compared in its place
            if flight is not None and is_asynchronous and flight.probes:
                probe = probe_engine(self.prompting, flight, len(rollout))
                checks.on_engine(context.model, context.step, probe, dtype, bias, False)
            # Turns after results of tools are always sampled by the newest weights
            if not is_asynchronous or has_tools:
                checks.on_engine(context.model, context.step, rollout, dtype, bias, has_tools)

    def _check_logps(self, rollout: Rollout) -> None:
        """
        Logs the share of tokens without a log-probability of the sampler, and warns once. If the loss corrects for the
        engine, raises `RuntimeError` if no token of the first batch has a log-probability.
        """
        checks = self.scoring.checks
        sampling_logps = rollout.sampling_per_token_logps
        mask = rollout.loss_mask.bool()
        if sampling_logps is None:
            return
        if rollout.source.from_view is not None:  # completions sampled from a view have none on purpose
            mask = mask & ~rollout.source.from_view[:, None]
        counts = [float((sampling_logps.isnan() & mask).sum()), float(mask.sum())]
        n_missing, n = sum_over_ranks(self.context.accelerator, counts)
        self.context.metrics.add({"sampling/no_logp_frac": share(n_missing, n, is_of_all_ranks=True)})
        text = f"The sampler gave no log-probability of {n_missing:.0f} of {n:.0f} tokens, which are neither corrected"
        is_first = not checks.has_checked_logps
        checks.has_checked_logps = True
        if is_first and n_missing == n > 0 and self.corrects_for_engine(rollout):
            raise RuntimeError(f"{text} nor checked; set `vllm_importance_sampling_correction=False` to train anyway.")
        if n_missing and not checks.has_warned_of_logps:
            checks.has_warned_of_logps = True
            logger.warning(f"{text} nor checked; `sampling/no_logp_frac` logs their share.")
