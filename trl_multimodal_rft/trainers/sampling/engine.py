# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The samplers of a run, made at the end of a constructor: transformers, or vLLM in the process or on servers."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig
from trl.distributed import DistributedBackend
from trl.models import unwrap_model_for_generation

from ...credentials import revealed
from ...encoding.prompts import all_placeholder_ids
from ...engines.in_flight import InFlight
from ...engines.samplers import Sampler, TransformersSampler, VLLMSampler
from ...engines.vllm import MultimodalVLLMGeneration, ends_of_text
from ...engines.vllm_adapters import EngineAdapter
from ...engines.vllm_in_process import InProcess
from ...engines.vllm_servers import Servers
from ...models.quantization import is_4bit
from ...models.wrapped import computing_dtype, unwrapped
from ...policy import PolicyForward
from ...rollout.speech import speech_codes
from ..base.argument_checks import mapping
from ..base.configs import SamplingConfig
from ..base.dataset_checks import media_limits
from ..base.finite import naming_broken_logits
from ..base.setup import warn_of_unused_recommendations
from ..checkpoints.files import checkpoints, step_of
from .context import Context
from .offload import HostMemory, storages, weights
from .prompting import Prompting


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


def allowed_ids(args: SamplingConfig, prompting: Prompting, ends: Sequence[int]) -> set[int] | None:
    """Returns the tokens that `sample_only` leaves, or `None` if it isn't set."""
    if getattr(args, "sample_only", None) is None:
        return None
    return {*speech_codes(getattr(args, "speech_tokens", None), prompting.tokenizer), *ends}


def make_engine(
    context: Context,
    prompting: Prompting,
    ends: Sequence[int],
    bias: dict[int, float],
    allowed: set[int] | None,
    revision: str | None,
    max_media: dict[str, int],
    host_memory: HostMemory | None,
) -> InProcess | Servers:
    """
    Makes the vLLM engine with TRL's arguments. It samples the tokens `allowed` alone, if there are such. The user's
    limits on media per prompt win over `max_media`.
    """
    args = context.args
    accelerator = context.accelerator
    model: Any = context.model
    options = args.generation_kwargs or {}
    banned = bias.keys() - {int(i) for i in options.get("logit_bias", ())}
    limits: dict[str, Any] = {}
    if allowed is not None:  # vLLM takes an entry of each request per biased token, and there may be very many
        limits["allowed_token_ids"] = sorted(allowed)
        bias = {i: value for i, value in bias.items() if i not in banned}
    json_bias = {str(i): value for i, value in bias.items()}  # JSON has no integers as keys
    stops = {} if options.get("ignore_eos") else ends_of_text(ends)
    if args.vllm_structured_outputs_regex is not None or "structured_outputs" in options:
        stops.pop("ignore_eos", None)  # a grammar ends with the model folder's end of text, which vLLM must heed
    # Only stop strings need texts. vLLM would detokenize the token of each log-probability, which is slow, and fails
    # for ids beyond the vocabulary
    generation_kwargs = {
        "detokenize": "stop" in options,
        **options,
        **stops,
        **limits,
        "logit_bias": json_bias if args.vllm_mode == "server" else bias,
    }
    in_4bit = is_peft_model(model) and is_4bit(model)
    is_unmerged = mapping(args.vllm_engine_kwargs).get("enable_lora", in_4bit)
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
        if mapping(args.vllm_engine_kwargs).get("speculative_config"):
            engine_kwargs["disable_log_stats"] = False  # the statistics hold acceptance lengths

    def without_weights() -> AbstractContextManager[None]:
        return nullcontext() if host_memory is None else host_memory.offloading(storages(weights(model)))

    arguments = {
        "model": model,
        "accelerator": accelerator,
        "processing_class": prompting.encoder.processor,
        "max_num_seqs": args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
        **{name: revealed(getattr(args, f"vllm_{name}")) for name in _ENGINE_OPTIONS},
        **{name: getattr(args, name) for name in _SAMPLING_OPTIONS},
        "generation_kwargs": generation_kwargs,
        "engine_kwargs": {**engine_kwargs, **mapping(args.vllm_engine_kwargs)},
        "adapter": adapter,
        "while_sampling": without_weights,
    }
    if args.vllm_mode != "server":
        return InProcess(**arguments)
    return Servers(
        **arguments,
        placeholders=banned,
        adapter_folder=os.path.join(args.output_dir, "_vllm_adapter"),  # pushes to the Hub leave out `_*`
        max_staleness=args.max_staleness,
    )


@dataclass(frozen=True)
class GenerationParts:
    """What TRL's constructor makes to sample with transformers."""

    config: GenerationConfig
    kwargs: dict[str, Any]
    backend: DistributedBackend
    continuous_batching: ContinuousBatchingConfig | None


def transformers_sampler(
    context: Context,
    prompting: Prompting,
    policy: PolicyForward,
    ends: Sequence[int],
    generation: GenerationParts,
    placeholders: set[int],
) -> TransformersSampler:
    """Returns the sampler with transformers, which never samples `placeholders` of media."""
    args = context.args
    config = generation.config
    kwargs = generation.kwargs
    if placeholders and not args.use_vllm:  # a sampled placeholder would stand for media that don't exist
        config.suppress_tokens = sorted(placeholders | set(config.suppress_tokens or []))
        kwargs["suppress_tokens"] = config.suppress_tokens
        # Training doesn't discourage tokens that are never sampled, so the saved model must suppress them, too
        prompting.encoder.model.generation_config.suppress_tokens = config.suppress_tokens

    @contextmanager
    def ready_to_generate() -> Iterator[nn.Module]:
        model = context.live.model_wrapped
        with (
            unwrap_model_for_generation(
                model,
                context.accelerator,
                gather_deepspeed3_params=args.ds3_gather_for_generation,
                generation_kwargs=kwargs,
                gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
            ) as unwrapped_model,
            torch.no_grad(),
            generation.backend.summon_full_params(model, recurse=False),
            naming_broken_logits(context.step, policy.unwrapped(context.model).dtype),
        ):
            yield unwrapped_model

    return TransformersSampler(
        policy,
        context.accelerator,
        config,
        ends,
        prompting.tokenizer.pad_token_id,
        ready_to_generate,
        context.live.profile,
        generation.continuous_batching,
        torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,  # dtype for continuous batching
    )


@dataclass(frozen=True)
class Samplers:
    """What samples completions."""

    sampler: Sampler
    local: TransformersSampler  # of the self-check, and the sampler itself without another one
    engine: InProcess | Servers | None = None
    in_flight: InFlight | None = None  # requests for later batches
    logit_bias: dict[int, float] = field(default_factory=dict)  # of the engine, by token id


def make_samplers(
    context: Context,
    prompting: Prompting,
    policy: PolicyForward,
    ends: Sequence[int],
    generation: GenerationParts,
    sampler: Sampler | None,
    *,
    revision: str | None,
    datasets: Iterable[Any],
    host_memory: HostMemory | None,
    is_in_train: Callable[[], bool],
) -> Samplers:
    """Returns the user's `sampler`, or the sampler of the config with its engine. `revision` is the model's."""
    args = context.args
    warn_of_unused_recommendations(prompting.encoder.model.generation_config, generation.config)
    banned = all_placeholder_ids(prompting.encoder.model, prompting.encoder.processor)
    allowed = allowed_ids(args, prompting, ends)
    if allowed is not None:
        banned |= {*range(prompting.encoder.model.config.get_text_config().vocab_size)} - allowed
    local = transformers_sampler(context, prompting, policy, ends, generation, banned)
    if not args.use_vllm:
        return Samplers(local if sampler is None else sampler, local)
    bias = logit_bias(args, banned)
    parts = revision, datasets, host_memory, is_in_train
    engine_sampler = vllm_sampler(context, prompting, ends, bias, allowed, *parts)
    engine: Any = engine_sampler.engine
    return Samplers(engine_sampler, local, engine, requests_in_flight(args, engine), bias)


def vllm_sampler(
    context: Context,
    prompting: Prompting,
    ends: Sequence[int],
    bias: dict[int, float],
    allowed: set[int] | None,
    revision: str | None,
    datasets: Iterable[Any],
    host_memory: HostMemory | None,
    is_in_train: Callable[[], bool],
) -> VLLMSampler:
    """Returns the vLLM sampler. Its engine reserves memory for the largest number of media in a prompt."""
    n_tool_media = context.args.max_tool_media if prompting.toolbox.tools else 0
    limits = {}
    # Environments and unlimited tools add any number of media
    if not prompting.toolbox.factories and n_tool_media is not None:
        limits = {modality: n + n_tool_media for modality, n in media_limits(context.args, *datasets).items()}
    engine = make_engine(context, prompting, ends, bias, allowed, revision, limits, host_memory)

    def explain() -> AbstractContextManager[None]:
        return naming_checkpoint(context.args.output_dir, context.step) if is_in_train() else nullcontext()

    return VLLMSampler(engine, context.live.profile, explain)


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
