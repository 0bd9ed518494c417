# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sampling in each rollout: completions are sampled, continued after tool calls, and compared with the policy."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import GenerationConfig

from ...checks.self_check import RunSettings
from ...data.rows.features import restore_media
from ...encoding.processors import Processor
from ...encoding.prompts import EncodedPrompt, all_placeholder_ids
from ...engines.decoding import up_to_first_end
from ...engines.in_flight import InFlight
from ...engines.samplers import Sampler, Samples, TransformersSampler
from ...engines.transformers import Branches, sample_completions
from ...engines.vllm_servers import Servers
from ...forward.scores import split_lengths
from ...models.wrapped import computing_dtype
from ...policy import Fallbacks
from ...rollout.completions import take_custom_rollout
from ...rollout.ranks import any_rank, sum_over_ranks
from ...rollout.rollout import Rollout
from ...rollout.turns import LIMITS, ToolLoop, ToolOutcome, Trajectory, completions_without_tools, run_turns
from .asynchronous import AsynchronousSampling, probe_engine
from .configs import sampling_changes
from .rollout_views import sample_with_views
from .run import Run


logger = get_logger(__name__)


def sample_rollout(
    run: Run,
    sampler: Sampler,
    rollout: Rollout,
    *,
    rollout_func: Callable[..., dict[str, Any]] | None,
    flight: InFlight | None,
    engine: Servers | None,
    make_loop: Callable[..., ToolLoop],
    pad_to_multiple_of: int | None,
    mask_truncated: bool,
) -> None:
    """
    Samples the completions of a rollout, and adds them to it. All ranks must call this.

    `rollout_func` gets the prompts, `flight` holds the requests for later batches of `engine`, and `make_loop` makes
    the loop of tool calls.
    """
    branches = Branches() if run.toolbox.tools else None
    mask = None
    if rollout_func is not None:
        sampler.load_weights(run.step)
        # As in TRL, the function gets prompts that hold their media
        output = rollout_func(restore_media(rollout.source.messages))
        placeholders = all_placeholder_ids(run.prompts.model, run.prompts.processor)
        ids, logps, mask = take_custom_rollout(rollout, output, placeholders)
    elif flight is None or rollout.source.batch_index is None:  # no index: evaluation, or extra prompts
        sample = sample_with_views if run.samples_views else sample_prompts
        ids, logps = sample(run, sampler, rollout, branches)
    else:
        assert engine is not None  # its servers have the requests in flight
        ids, logps = AsynchronousSampling(run, flight, engine)(sampler, rollout, rollout.source.batch_index)
    if branches is not None:
        outcome = continue_after_tools(run, sampler, rollout, (ids, logps), branches, make_loop)
        ids, logps, mask = outcome.add_to(rollout)
        run.notes.modalities.update(*(prompt.modalities for prompt in rollout.prompts))
    else:
        rollout.source.completions = completions_without_tools(rollout, ids, run.prompts.processor)
        for prompt in rollout.prompts:
            prompt.decoded = ()  # the sampler has read the decoded media
    run.look_for_media(rollout)
    run.complete(rollout, ids, logps, mask, pad_to_multiple_of=pad_to_multiple_of, mask_truncated=mask_truncated)
    run.metrics.add(sampler.metrics())


def sample_prompts(run: Run, sampler: Sampler, rollout: Rollout, branches: Branches | None) -> Samples:
    """Samples the completions of a rollout."""
    return sampler(run.live.model_wrapped, rollout.prompts, step=run.step, branches=branches)


def continue_after_tools(
    run: Run,
    sampler: Sampler,
    rollout: Rollout,
    samples: Samples,
    branches: Branches,
    make_loop: Callable[..., ToolLoop],
) -> ToolOutcome:
    """Calls tools and samples further turns, until no completion ends with a call. All ranks must call this."""

    def sample(prompts: list[EncodedPrompt], max_lengths: list[int]) -> Samples:
        return sampler(run.live.model_wrapped, prompts, step=run.step, room=max_lengths, branches=branches)

    loop = make_loop(complete=sample, branches=branches)
    trajectories = run_turns(rollout, *samples, loop)
    for trajectory in trajectories:
        for prompt in (trajectory.prompt, *trajectory.closed_contexts):
            for part in prompt.parts:
                part.decoded = ()  # no later turn needs decoded media
    outcome = ToolOutcome.of(loop.encoder.model, trajectories)
    if sampler.samples_policy and any(len(turns) > 1 for turns in outcome.turns):
        obstacle = branches.obstacle
        mode = f"prefills the conversation again: {obstacle}" if obstacle else "continues from its cache"
        if mode != run.notices.mode_after_tools:
            logger.info(f"After results of tools, generation {mode}.")
            run.notices.mode_after_tools = mode
    if run.is_training:
        # Each context with the tokens that were sampled after it
        contexts, lengths = split_lengths(outcome.prompts, list(map(len, outcome.ids)))
        tokens = chain.from_iterable(outcome.ids)
        run.checks.on_tool_media(run.model, contexts, [[*islice(tokens, n)] for n in lengths], sampler.is_engine)
    _log_calls(run, trajectories)
    return outcome


def _log_calls(run: Run, trajectories: Sequence[Trajectory]) -> None:
    """Raises `RuntimeError` if all calls of the first batch fail on all ranks."""
    counts = sum((trajectory.counts for trajectory in trajectories), Counter())
    local_counts = [*(counts[name] for name in (*LIMITS, "calls", "failures", "unparsed")), len(trajectories)]
    *ends, calls, failures, unparsed, n_completions = sum_over_ranks(run.accelerator, local_counts)
    if run.is_training and calls and not run.notices.checked_calls:
        run.notices.checked_calls = True
        faults = list(chain.from_iterable(trajectory.faults for trajectory in trajectories))
        [n_faults] = sum_over_ranks(run.accelerator, [len(faults)])
        if n_faults == calls:
            first_fault = faults[0] if faults else "it is on another rank"
            raise RuntimeError(
                f"All {calls:.0f} calls of tools in the first batch failed. The first failure: {first_fault}; correct "
                "the tool, or let it raise a `ValueError` if the model's arguments are the cause."
            )
    run.metrics.add({f"tools/ended_by_{name}": end / n_completions for name, end in zip(LIMITS, ends, strict=True)})
    failure_rate = failures / calls if calls else 0.0
    run.metrics.add({"tools/call_frequency": calls / n_completions, "tools/failure_frequency": failure_rate})
    run.metrics.add({"tools/unparsed_frequency": unparsed / n_completions})


def check_prompts(
    run: Run,
    sampler: Sampler,
    rollout: Rollout,
    local_sampler: TransformersSampler,
    load_processor: Callable[[], Processor],
) -> None:
    """
    Runs the self-check on the first prompts of a run, and on the first prompts with a new modality. `local_sampler`
    and `load_processor` are those of [`self_check_settings`].
    """
    messages = rollout.source.messages
    if run.args.special_tokens_in_text == "strip":  # the check encodes the messages, and must get the stripped ones
        rows = zip(messages, rollout.source.row_indices, strict=True)
        messages = [run.prompts.checked_prompt(prompt, row) for prompt, row in rows]
    settings = partial(self_check_settings, run, sampler, local_sampler, load_processor)
    run.checks.on_prompts(run.model, messages, rollout.prompts, settings)


def self_check_settings(
    run: Run, sampler: Sampler, local_sampler: TransformersSampler, load_processor: Callable[[], Processor]
) -> RunSettings:
    """Returns the run's settings for the self-check. `load_processor` loads the processor as transformers does."""

    def sample(prompts: Sequence[EncodedPrompt], config: GenerationConfig, fallbacks: Fallbacks) -> torch.Tensor:
        options: dict[str, Any] = {"fallbacks": fallbacks, "generating": local_sampler.generating}
        return sample_completions(
            run.policy, run.live.model_wrapped, prompts, config, local_sampler.pad_token_id, **options
        )

    return RunSettings(
        load_processor=load_processor,
        template_kwargs=run.prompts.template_kwargs,
        generation_config=local_sampler.config,
        eos_token_ids=run.completions.ends,
        sample=sample if sampler.samples_policy and local_sampler.continuous_batching is None else None,
        samples_rollouts=sampler.samples_policy,
        generating=local_sampler.generating,
        changes=sampling_changes(run.args),
        audio_overlong=run.args.audio_overlong,
        has_engine_positions=sampler.is_engine,
    )


def check_sampler(
    run: Run,
    sampler: Sampler,
    rollout: Rollout,
    *,
    corrects_for_engine: bool,
    logit_bias: dict[int, float],
    flight: InFlight | None,
) -> None:
    """
    Compares the log-probabilities of an engine with the policy's, if a check is due. `logit_bias` are the engine's
    biases, and `flight` holds requests for later batches.

    Raises `RuntimeError` if completions continue after an end of text. With `corrects_for_engine`, also raises it if
    completions lack log-probabilities.
    """
    if sampler.samples_policy or not run.is_training:
        return
    _check_logps(run, rollout, corrects_for_engine)
    check = run.checks.self_check
    has_tools = bool(run.toolbox.tools)
    if check is not None and run.completions.encodes_text and not has_tools:
        after_end = rollout.completion_mask.bool() & ~up_to_first_end(rollout.completion_ids, run.completions.ends)
        if any_rank(run.accelerator, bool(after_end.any())):
            ends = run.tokenizer.convert_ids_to_tokens([*run.completions.ends])
            raise RuntimeError(
                f"self-check: completions go on after an end of text, {ends}. Let the sampler stop there (with vLLM, "
                "remove `ignore_eos` from `generation_kwargs`), or set `self_check=False` to train anyway."
            )
    if sampling_changes(run.args):  # the sampler's distribution isn't the policy's
        return
    if check is not None and rollout.sampling_per_token_logps is not None:
        policy_dtype = computing_dtype(run.accelerator, run.policy.unwrapped(run.model))
        dtype = sampler.dtype or policy_dtype
        is_asynchronous = rollout.source.flight is not None
        # Older weights sampled the rollout, so newly sampled probes are compared in its place
        if flight is not None and is_asynchronous and flight.probes:
            probe = probe_engine(run, flight, len(rollout))
            run.checks.on_engine(run.model, run.step, probe, dtype, logit_bias, False)
        # Turns after results of tools are always sampled by the newest weights
        if not is_asynchronous or has_tools:
            run.checks.on_engine(run.model, run.step, rollout, dtype, logit_bias, has_tools)


def _check_logps(run: Run, rollout: Rollout, corrects_for_engine: bool) -> None:
    """
    Logs the share of tokens without a log-probability of the sampler, and warns once. With `corrects_for_engine`,
    raises `RuntimeError` if no token of the first batch has a log-probability.
    """
    checks = run.checks
    sampling_logps = rollout.sampling_per_token_logps
    mask = rollout.loss_mask.bool()
    if sampling_logps is None:
        return
    if rollout.source.from_view is not None:  # completions sampled from a view have no log-probabilities on purpose
        mask = mask & ~rollout.source.from_view[:, None]
    n_missing, n = sum_over_ranks(run.accelerator, [float((sampling_logps.isnan() & mask).sum()), float(mask.sum())])
    run.metrics.add({"sampling/no_logp_frac": n_missing / max(n, 1)})
    text = f"The sampler gave no log-probability of {n_missing:.0f} of {n:.0f} tokens, which are neither corrected"
    is_first = not checks.has_checked_logps
    checks.has_checked_logps = True
    if is_first and n_missing == n > 0 and corrects_for_engine:
        raise RuntimeError(f"{text} nor checked; set `vllm_importance_sampling_correction=False` to train anyway.")
    if n_missing and not checks.has_warned_of_logps:
        checks.has_warned_of_logps = True
        logger.warning(f"{text} nor checked; `sampling/no_logp_frac` logs their share.")
