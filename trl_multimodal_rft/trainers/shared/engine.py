# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Samplers that a trainer's config describes, checks of their samples, and turns after tool calls."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig
from trl.distributed import DistributedBackend
from trl.models import unwrap_model_for_generation

from ...checks.self_check import RunSettings
from ...encoding.processors import Processor
from ...encoding.prompts import EncodedPrompt
from ...engines.decoding import up_to_first_end
from ...engines.in_flight import InFlight
from ...engines.samplers import Sampler, Samples, TransformersSampler, VLLMSampler
from ...engines.transformers import Branches, sample_completions
from ...engines.vllm import MultimodalVLLMGeneration, ends_of_text
from ...engines.vllm_adapters import EngineAdapter
from ...engines.vllm_in_process import InProcess
from ...engines.vllm_servers import Servers
from ...forward.scores import split_lengths
from ...models.quantization import is_4bit
from ...models.wrapped import computing_dtype, unwrapped
from ...policy import Fallbacks
from ...rollout.ranks import any_rank, sum_over_ranks
from ...rollout.rollout import Rollout
from ...rollout.turns import LIMITS, ToolLoop, ToolOutcome, Trajectory, run_turns
from ..checkpoints.files import checkpoints, step_of
from .arguments import mapping
from .asynchronous import probe_engine
from .configs import SamplingConfig
from .finite import naming_broken_logits
from .offload import HostMemory, storages, weights
from .run import Run
from .setup import media_limits, sampling_changes


logger = get_logger(__name__)

# Arguments of the engine whose options in the config have the prefix `vllm_`
_ENGINE_OPTIONS = ("mode", "structured_outputs_regex", "server_base_url", "server_host", "server_port", "group_port")
_ENGINE_OPTIONS += ("server_timeout", "tensor_parallel_size", "gpu_memory_utilization", "max_model_length")
_ENGINE_OPTIONS += ("enable_sleep_mode", "model_impl")
# Arguments of the engine whose options have no prefix
_SAMPLING_OPTIONS = ("repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_completion_length")
_SAMPLING_OPTIONS += ("trust_remote_code",)


def logit_bias(args: SamplingConfig, placeholders: set[int]) -> dict[int, float]:
    """Returns the engine's logit biases by token id. They ban placeholders, which would stand for missing media."""
    biases = mapping(args.generation_kwargs).get("logit_bias", {})
    # -100 is the lowest bias that vLLM takes
    return dict.fromkeys(placeholders, -100.0) | {int(i): float(value) for i, value in biases.items()}


def make_engine(
    run: Run,
    bias: dict[int, float],
    revision: str | None,
    max_media: dict[str, int],
    host_memory: HostMemory | None,
) -> InProcess | Servers:
    """Makes the vLLM engine with TRL's arguments. The user's limits on media per prompt win over `max_media`."""
    args = run.args
    accelerator = run.accelerator
    model: Any = run.model
    # Arguments of sampling
    json_bias = {str(i): value for i, value in bias.items()}  # JSON has no integers as keys
    options = args.generation_kwargs or {}
    stops = {} if options.get("ignore_eos") else ends_of_text(run.completions.ends)
    if args.vllm_structured_outputs_regex is not None or "structured_outputs" in options:
        stops.pop("ignore_eos", None)  # a grammar ends with the model folder's end of text, which vLLM must heed
    # Only stop strings need texts. vLLM would detokenize the token of each log-probability, which is slow, and fails
    # for ids beyond the vocabulary
    generation_kwargs = {
        "detokenize": "stop" in options,
        **options,
        **stops,
        "logit_bias": json_bias if args.vllm_mode == "server" else bias,
    }
    # Way to send weights: merged, or as an adapter
    in_4bit = is_peft_model(model) and is_4bit(model)
    is_unmerged = (args.vllm_engine_kwargs or {}).get("enable_lora", in_4bit)
    # Without an `EngineAdapter`, TRL would merge the LoRA adapter into 4-bit weights, and round the result to 4 bits
    adapter = None
    if is_unmerged or in_4bit:
        adapter = EngineAdapter(model, accelerator, is_unmerged, versions=args.max_staleness + 1)
    dtype = computing_dtype(accelerator, unwrapped(accelerator, model))
    # Defaults of vLLM's arguments, which `vllm_engine_kwargs` overrides
    engine_kwargs: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "revision": revision}
    if args.vllm_mode != "server":
        # Each prompt is sent once, so a cache of media is of no use
        engine_kwargs |= {"mm_processor_cache_gb": 0, "limit_mm_per_prompt": max_media}
        if (args.vllm_engine_kwargs or {}).get("speculative_config"):
            engine_kwargs["disable_log_stats"] = False  # the statistics hold acceptance lengths

    def without_weights() -> AbstractContextManager[None]:
        """Returns a context that moves the policy's weights to the host, with `offload_during_generation`."""
        return nullcontext() if host_memory is None else host_memory.offloading(storages(weights(model)))

    arguments = {
        "model": model,
        "accelerator": accelerator,
        "processing_class": run.prompts.processor,
        "max_num_seqs": args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
        **{name: getattr(args, f"vllm_{name}") for name in _ENGINE_OPTIONS},
        **{name: getattr(args, name) for name in _SAMPLING_OPTIONS},
        "generation_kwargs": generation_kwargs,
        "engine_kwargs": {**engine_kwargs, **(args.vllm_engine_kwargs or {})},
        "adapter": adapter,
        "while_sampling": without_weights,
    }
    if args.vllm_mode != "server":
        return InProcess(**arguments)
    return Servers(
        **arguments,
        placeholders=bias.keys() - {int(i) for i in options.get("logit_bias", ())},
        adapter_folder=os.path.join(args.output_dir, "_vllm_adapter"),  # pushes to the Hub leave out `_*`
        max_staleness=args.max_staleness,
    )


def transformers_sampler(
    run: Run,
    config: GenerationConfig,
    kwargs: dict[str, Any],
    backend: DistributedBackend,
    continuous_batching: ContinuousBatchingConfig | None,
    placeholders: set[int],
) -> TransformersSampler:
    """Returns the transformers sampler, with the config, the arguments and the backend of TRL's constructor."""
    args = run.args
    if placeholders and not args.use_vllm:  # a sampled placeholder would stand for media that don't exist
        config.suppress_tokens = sorted(placeholders | set(config.suppress_tokens or []))
        kwargs["suppress_tokens"] = config.suppress_tokens
        # Training doesn't discourage tokens that are never sampled, so the saved model must suppress them, too
        run.prompts.model.generation_config.suppress_tokens = config.suppress_tokens

    @contextmanager
    def ready_to_generate() -> Iterator[nn.Module]:
        model = run.live.model_wrapped
        with (
            unwrap_model_for_generation(
                model,
                run.accelerator,
                gather_deepspeed3_params=args.ds3_gather_for_generation,
                generation_kwargs=kwargs,
                gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
            ) as unwrapped_model,
            torch.no_grad(),
            backend.summon_full_params(model, recurse=False),
            naming_broken_logits(run.step, run.policy.unwrapped(run.model).dtype),
        ):
            yield unwrapped_model

    return TransformersSampler(
        run.policy,
        run.accelerator,
        config,
        run.completions.ends,
        run.tokenizer.pad_token_id,
        ready_to_generate,
        run.live.profile,
        continuous_batching,
        torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,  # dtype for continuous batching
    )


@dataclass(frozen=True)
class Sampling:
    """What samples completions."""

    sampler: Sampler
    local: TransformersSampler  # of the self-check, and the sampler itself without another one
    engine: InProcess | Servers | None = None
    in_flight: InFlight | None = None  # requests for later batches
    logit_bias: dict[int, float] = field(default_factory=dict)  # of the engine, by token id


def make_sampling(
    run: Run,
    local: TransformersSampler,
    sampler: Sampler | None,
    placeholders: set[int],
    *,
    revision: str | None,
    datasets: Iterable[Any],
    host_memory: HostMemory | None,
    is_in_train: Callable[[], bool],
) -> Sampling:
    """Returns the user's `sampler`, or the sampler of the config with its engine. `revision` is the model's."""
    args = run.args
    if not args.use_vllm:
        return Sampling(local if sampler is None else sampler, local)
    bias = logit_bias(args, placeholders)
    engine_sampler = vllm_sampler(run, bias, revision, datasets, host_memory, is_in_train)
    engine: Any = engine_sampler.engine
    return Sampling(engine_sampler, local, engine, requests_in_flight(args, engine), bias)


def sample_prompts(run: Run, sampler: Sampler, rollout: Rollout, branches: Branches | None) -> Samples:
    """Samples the completions of a rollout."""
    return sampler(run.live.model_wrapped, rollout.prompts, step=run.step, branches=branches)


def check_prompts(run: Run, rollout: Rollout, settings: Callable[[], RunSettings]) -> None:
    """Runs the self-check on the first prompts of a run, and on the first prompts with a new modality."""
    messages = rollout.source.messages
    if run.args.special_tokens_in_text == "strip":  # the check encodes the messages, and must get the stripped ones
        rows = zip(messages, rollout.source.row_indices, strict=True)
        messages = [run.prompts.checked_prompt(prompt, row) for prompt, row in rows]
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
    """Logs how often tools were called over all ranks. Raises `RuntimeError` if all calls of the first batch fail."""
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


def vllm_sampler(
    run: Run,
    bias: dict[int, float],
    revision: str | None,
    datasets: Iterable[Any],
    host_memory: HostMemory | None,
    is_in_train: Callable[[], bool],
) -> VLLMSampler:
    """Returns the vLLM sampler. Its engine reserves memory for the largest number of media in a prompt."""
    n_tool_media = run.args.max_tool_media if run.toolbox.tools else 0
    limits = {}
    if (
        not run.toolbox.factories and n_tool_media is not None
    ):  # environments and unlimited tools add any number of media
        limits = {modality: n + n_tool_media for modality, n in media_limits(run.args, *datasets).items()}
    engine = make_engine(run, bias, revision, limits, host_memory)

    def explain() -> AbstractContextManager[None]:
        """Returns a context that adds a note about resuming to errors of training, but not of evaluation."""
        return naming_checkpoint(run.args.output_dir, run.step) if is_in_train() else nullcontext()

    return VLLMSampler(engine, run.live.profile, explain)


def requests_in_flight(args: SamplingConfig, engine: MultimodalVLLMGeneration) -> InFlight | None:
    """Returns the store of the engine's requests for later batches, or `None` without `max_staleness`."""
    if args.max_staleness == 0:
        return None
    assert isinstance(engine, Servers)  # the config checks `vllm_mode`
    return InFlight(
        engine.ask,
        args.max_staleness,
        args.vllm_server_timeout,
        # New weights of the model also change requests in flight. New adapters don't, since servers keep each version
        # of an adapter under its own name
        changes_weights=engine.unmerged_adapter is None,
        settings=engine.sampling,
    )


@contextmanager
def naming_checkpoint(output_dir: str, step: int) -> Iterator[None]:
    """Adds a note about resuming to errors within the context."""
    try:
        yield
    except Exception as error:
        saved = [path for path in checkpoints(output_dir) if step_of(path) <= step]
        remedy = "No checkpoint was saved to resume from; lower `save_steps`."
        if saved:
            remedy = f"Resume with `train(resume_from_checkpoint={str(saved[-1])!r})`."
        error.add_note(f"Sampling with vLLM failed after step {step} of training. {remedy}")
        raise
