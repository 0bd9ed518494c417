# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What samples for a trainer, with its arguments."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import nn
from transformers import AutoProcessor, GenerationConfig, PreTrainedModel
from trl.distributed import DistributedBackend
from trl.models import unwrap_model_for_generation

from ..algorithms.completions import up_to_first_end
from ..checks.self_check import RunSettings
from ..encoding.prompts import EncodedPrompt
from ..generation.vllm import MultimodalVLLMGeneration, ends_of_text
from ..generation.vllm_adapters import EngineAdapter
from ..models.quantization import is_4bit
from ..models.wrapped import computing_dtype, unwrapped
from ..rollout.in_flight import InFlight
from ..rollout.ranks import any_rank, sum_over_ranks
from ..rollout.rollout import Rollout
from ..rollout.samplers import Sampler, TransformersSampler
from .asynchronous import probe_engine
from .checkpoint_files import checkpoints, step_of
from .configs import SamplingConfig, mapping
from .finite import naming_broken_logits
from .offload import HostMemory, storages, weights
from .run import Run
from .setup import media_limits, sampling_changes


logger = get_logger(__name__)


def logit_bias(args: SamplingConfig, placeholders: set[int]) -> dict[int, float]:
    """What the engine adds to logits: a sampled placeholder would stand for media that don't exist."""
    given = mapping(args.generation_kwargs).get("logit_bias", {})
    return dict.fromkeys(placeholders, -100.0) | {int(i): float(value) for i, value in given.items()}


@dataclass
class Generation:
    """What TRL's constructor makes for generation, and what is called around it."""

    config: GenerationConfig
    kwargs: dict[str, Any]
    ends: Sequence[int]  # tokens that end a text
    backend: DistributedBackend
    profile: Callable[[str], AbstractContextManager]
    continuous_batching: Any  # config of transformers
    wrapped: Callable[[], nn.Module]  # the policy in wrappers of engines


def make_engine(
    run: Run,
    generation: Generation,
    bias: dict[int, float],
    revision: str | None,
    media_limits: dict[str, int],
    host_memory: Callable[[], HostMemory | None],
) -> MultimodalVLLMGeneration:
    """The engine, with the arguments that TRL gives it, and the most media of a prompt; the user's arguments win."""
    args, accelerator, ends = run.args, run.accelerator, generation.ends
    model: Any = run.model()
    named = {str(i): value for i, value in bias.items()}  # as JSON has it
    given = args.generation_kwargs or {}
    stops = {} if given.get("ignore_eos") else ends_of_text([*ends, *(given.get("stop_token_ids") or ())])
    if args.vllm_structured_outputs_regex is not None or "structured_outputs" in given:
        stops.pop("ignore_eos", None)  # grammars end by what the folder says
    # Each log-probability is detokenized otherwise, which takes time, and fails beyond the vocabulary
    generation_kwargs = {
        "detokenize": "stop" in given,
        **given,
        **stops,
        "logit_bias": named if args.vllm_mode == "server" else bias,
    }
    in_4bit = is_peft_model(model) and is_4bit(model)
    adapter_only = in_4bit if args.vllm_sync_adapter is None else args.vllm_sync_adapter
    # TRL would round to 4 bits what it merges
    adapter = None
    if adapter_only or in_4bit:
        adapter = EngineAdapter(model, accelerator, adapter_only, versions=args.max_staleness + 1)
    dtype = computing_dtype(accelerator, unwrapped(accelerator, model))
    engine_kwargs: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "revision": revision}
    if args.vllm_mode != "server":
        engine_kwargs |= {"mm_processor_cache_gb": 0, "limit_mm_per_prompt": media_limits}  # each prompt comes once
        if (args.vllm_engine_kwargs or {}).get("speculative_config"):
            engine_kwargs["disable_log_stats"] = False  # which have the lengths of acceptance

    def without_weights() -> AbstractContextManager[None]:
        memory = host_memory()
        return nullcontext() if memory is None else memory.holding(storages(weights(model)))

    return MultimodalVLLMGeneration(
        model=model,
        accelerator=accelerator,
        processing_class=run.prompts.processor,
        mode=args.vllm_mode,
        structured_outputs_regex=args.vllm_structured_outputs_regex,
        server_base_url=args.vllm_server_base_url,
        server_host=args.vllm_server_host,
        server_port=args.vllm_server_port,
        group_port=args.vllm_group_port,
        server_timeout=args.vllm_server_timeout,
        tensor_parallel_size=args.vllm_tensor_parallel_size,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        max_model_length=args.vllm_max_model_length,
        max_num_seqs=args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
        enable_sleep_mode=args.vllm_enable_sleep_mode,
        model_impl=args.vllm_model_impl,
        trust_remote_code=args.trust_remote_code,
        repetition_penalty=args.repetition_penalty,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        max_completion_length=args.max_completion_length,
        generation_kwargs=generation_kwargs,
        engine_kwargs={**engine_kwargs, **(args.vllm_engine_kwargs or {})},
        adapter=adapter,
        max_staleness=args.max_staleness,
        placeholders=bias.keys() - {int(i) for i in given.get("logit_bias", ())},
        adapter_folder=os.path.join(args.output_dir, "_vllm_adapter"),  # which pushes leave out
        while_sampling=without_weights,
    )


@contextmanager
def ready_to_generate(run: Run, generation: Generation) -> Iterator[Any]:
    """The policy without what engines give around it, ready to generate."""
    args, model = run.args, generation.wrapped()
    with (
        unwrap_model_for_generation(
            model,
            run.accelerator,
            gather_deepspeed3_params=args.ds3_gather_for_generation,
            generation_kwargs=generation.kwargs,
            gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
        ) as unwrapped_model,
        torch.no_grad(),
        generation.backend.summon_full_params(model, recurse=False),
        naming_broken_logits(run.step, run.policy.unwrapped(run.model()).dtype),
    ):
        yield unwrapped_model


def check_prompts(run: Run, rollout: Rollout, settings: Callable[[], RunSettings]) -> None:
    """Runs the self-check on the first prompts of a run, and on the first with other media."""
    messages = rollout.source.messages
    if run.args.special_tokens_in_text == "strip":  # the check encodes the messages again
        rows = zip(messages, rollout.source.row_indices, strict=True)
        messages = [run.prompts.checked(each, number) for each, number in rows]
    run.checks.on_prompts(run.model(), messages, rollout.prompts, settings)


def check_settings(
    run: Run,
    sampler: Sampler,
    own: TransformersSampler,
    wrapped: Callable[[], nn.Module],
    processor_source: dict[str, Any] | None,
) -> RunSettings:
    """
    What the self-check compares the policy with: a processor, from its source as transformers loads it, and samples of
    transformers.
    """

    def load_processor() -> Any:
        return run.prompts.processor if processor_source is None else AutoProcessor.from_pretrained(**processor_source)

    def sample(prompts: Sequence[EncodedPrompt], config: GenerationConfig, shared_prefill: bool) -> Any:
        return run.policy.sample(
            wrapped(),
            prompts,
            config,
            own.pad_token_id,
            shared_prefill=shared_prefill,
            generating=own.generating,
        )

    return RunSettings(
        load_processor=load_processor,
        template_kwargs=run.prompts.template_kwargs,
        generation_config=own.config,
        eos_token_ids=own.eos_token_ids,
        sample=sample if sampler.samples_policy and own.continuous_batching is None else None,
        samples_rollouts=sampler.samples_policy,
        generating=own.generating,
        changes=sampling_changes(run.args),
        audio_overlong=run.args.audio_overlong,
        engine_positions=sampler.is_engine,
    )


def check_sampler(
    run: Run,
    sampler: Sampler,
    rollout: Rollout,
    corrects: bool,
    ends: Sequence[int],
    logit_bias: dict[int, float],
    flight: InFlight | None,
) -> None:
    """
    Compares what sampled, if it isn't the policy itself, with the policy, where that is due.

    Args:
        run ([`Run`]):
            What trains.
        sampler ([`~rollout.samplers.Sampler`]):
            What sampled.
        rollout ([`~rollout.rollout.Rollout`]):
            Its completions.
        corrects (`bool`):
            Whether its log-probabilities weigh completions.
        ends (`Sequence[int]`):
            Tokens that end a text.
        logit_bias (`dict[int, float]`):
            What it adds to logits.
        flight ([`~rollout.in_flight.InFlight`], *optional*):
            Requests of completions ahead.
    """
    if sampler.samples_policy or not run.is_training:
        return
    _check_logps(run, rollout, corrects)
    check, has_tools = run.checks.self_check, bool(run.toolbox.tools)
    tokenizer = getattr(run.prompts.processor, "tokenizer", run.prompts.processor)
    if check is not None and run.encodes_text and not has_tools:
        after = rollout.completion_mask.bool() & ~up_to_first_end(rollout.completion_ids, ends)
        if any_rank(run.accelerator, bool(after.any())):
            raise RuntimeError(
                f"self-check: completions go on after an end of text, {tokenizer.convert_ids_to_tokens([*ends])}. Let "
                "what samples stop there (vLLM: no `ignore_eos` in `generation_kwargs`), or set `self_check=False` to "
                "train anyway."
            )
    if sampling_changes(run.args):  # which make another distribution than the policy's
        return
    if check is not None and rollout.sampling_per_token_logps is not None:
        own = computing_dtype(run.accelerator, run.policy.unwrapped(run.model()))
        dtype, is_old = sampler.dtype or own, rollout.source.flight is not None
        if flight is not None and is_old and flight.probes:  # its completions are older than the policy
            pad: Any = tokenizer.pad_token_id
            probe = probe_engine(flight, run.accelerator, len(rollout), ends=ends, pad_token_id=pad)
            run.checks.on_engine(run.model(), run.step, probe, dtype, logit_bias, False)
        if not is_old or has_tools:  # whose later turns aren't
            run.checks.on_engine(run.model(), run.step, rollout, dtype, logit_bias, has_tools)


def _check_logps(run: Run, rollout: Rollout, corrects: bool) -> None:
    """
    Logs the share of tokens that came without a log-probability, and says so once. Raises a `RuntimeError` if all of
    the first batch did, where they should weigh completions.
    """
    checks, sampled, mask = run.checks, rollout.sampling_per_token_logps, rollout.loss_mask.bool()
    if sampled is None:
        return
    if rollout.source.from_view is not None:  # which are left out by us
        mask = mask & ~rollout.source.from_view[:, None]
    n_missing, n = sum_over_ranks(run.accelerator, [float((sampled.isnan() & mask).sum()), float(mask.sum())])
    run.metrics.add({"sampling/no_logp_frac": n_missing / max(n, 1)})
    text = f"What samples gave no log-probability of {n_missing:.0f} of {n:.0f} tokens, which are neither corrected"
    is_first, checks.has_looked = not checks.has_looked, True
    if is_first and n_missing == n > 0 and corrects:
        raise RuntimeError(f"{text} nor checked; set `vllm_importance_sampling_correction=False` to train anyway.")
    if n_missing and not checks.has_warned:
        checks.has_warned = True
        logger.warning(f"{text} nor checked; `sampling/no_logp_frac` logs their share.")


def suppress_placeholders(model: PreTrainedModel, generation: Generation, placeholders: set[int]) -> None:
    """Keeps transformers from sampling placeholders, which would stand for media that don't exist."""
    if placeholders:
        suppressed = sorted(placeholders | set(generation.config.suppress_tokens or []))
        generation.config.suppress_tokens = generation.kwargs["suppress_tokens"] = suppressed
        # Never sampled, they are never discouraged either, so the saved model must suppress them, too
        model.generation_config.suppress_tokens = suppressed


def transformers_sampler(run: Run, generation: Generation) -> TransformersSampler:
    args, processor = run.args, run.prompts.processor
    return TransformersSampler(
        run.policy,
        run.accelerator,
        generation.config,
        generation.ends,
        getattr(processor, "tokenizer", processor).pad_token_id,
        partial(ready_to_generate, run, generation),
        generation.profile,
        generation.continuous_batching,
        torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
    )


def check_own_sampler(sampler: Sampler | None, use_vllm: bool) -> None:
    """Refuses a `sampler` of the user that is none, or that vLLM would replace."""
    if sampler is not None and (use_vllm or not isinstance(sampler, Sampler)):
        raise ValueError(
            f"`sampler` is a {type(sampler).__name__}, and `use_vllm` is {use_vllm}; pass a `Sampler`, without "
            "`use_vllm`."
        )


def prompt_limits(run: Run, datasets: Iterable[Any]) -> dict[str, int]:
    """The most media of a prompt of datasets, with those of tools; empty if it isn't known."""
    n_tool_media = run.args.max_tool_media if run.toolbox.tools else 0
    if run.toolbox or n_tool_media is None:
        return {}
    return {modality: most + n_tool_media for modality, most in media_limits(run.args, *datasets).items()}


def requests_in_flight(args: SamplingConfig, engine: MultimodalVLLMGeneration) -> InFlight | None:
    if args.max_staleness == 0:
        return None
    return InFlight(
        engine.ask,
        args.max_staleness,
        args.vllm_server_timeout,
        # An adapter of which servers get a new version keeps its name for requests in flight
        changes_weights=engine.adapter_alone is None,
        settings=engine.sampling,
    )


@contextmanager
def naming_checkpoint(output_dir: str, step: int) -> Iterator[None]:
    """Errors within the context get a note on how to resume."""
    try:
        yield
    except Exception as error:
        saved = [path for path in checkpoints(output_dir) if step_of(path) <= step]
        remedy = "No checkpoint was saved to resume from; lower `save_steps`."
        if saved:
            remedy = f"Resume with `train(resume_from_checkpoint={str(saved[-1])!r})`."
        error.add_note(f"Sampling with vLLM failed after step {step} of training. {remedy}")
        raise
