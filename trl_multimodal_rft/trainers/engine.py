# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What samples for a trainer, with its arguments."""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import nn
from transformers import AutoProcessor, GenerationConfig, PreTrainedTokenizerBase
from trl.distributed import DistributedBackend
from trl.extras.profiling import profiling_context
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
from ..rollout.samplers import Sampler, TransformersSampler, VLLMSampler
from .asynchronous import probe_engine
from .checkpoint_files import checkpoints, step_of
from .finite import naming_broken_logits
from .offload import storages, weights
from .run import Run
from .setup import media_limits, sampling_changes, suppress_placeholders


logger = get_logger(__name__)


def logit_bias(args: Any, placeholders: set[int]) -> dict[int, float]:
    """What the engine adds to logits: a sampled placeholder would stand for media that don't exist."""
    given = (args.generation_kwargs or {}).get("logit_bias", {})
    return dict.fromkeys(placeholders, -100.0) | {int(i): float(value) for i, value in given.items()}


def make_engine(
    args: Any,
    model: Any,
    accelerator: Accelerator,
    processing_class: Any,
    *,
    bias: dict[int, float],
    ends: Sequence[int],
    revision: str | None,
    media_limits: dict[str, int],
    while_sampling: Callable[[], AbstractContextManager],
) -> MultimodalVLLMGeneration:
    """The engine, with the arguments that TRL gives it, and the most media of a prompt; the user's arguments win."""
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
    return MultimodalVLLMGeneration(
        model=model,
        accelerator=accelerator,
        processing_class=processing_class,
        mode=args.vllm_mode,
        structured_outputs_regex=args.vllm_structured_outputs_regex,
        server_base_urls=args.vllm_server_base_urls,
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
        while_sampling=while_sampling,
    )


@contextmanager
def ready_to_generate(
    run: Run, wrapped: Callable[[], nn.Module], backend: DistributedBackend, generation_kwargs: dict[str, Any]
) -> Iterator[Any]:
    """The policy without what `wrapped` gives around it, ready to generate."""
    args, model = run.args, wrapped()
    with (
        unwrap_model_for_generation(
            model,
            run.accelerator,
            gather_deepspeed3_params=args.ds3_gather_for_generation,
            generation_kwargs=generation_kwargs,
            gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
        ) as unwrapped_model,
        torch.no_grad(),
        backend.summon_full_params(model, recurse=False),
        naming_broken_logits(run.step, run.policy.unwrapped(run.model()).dtype),
    ):
        yield unwrapped_model


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
    *,
    corrects: bool,
    ends: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    logit_bias: dict[int, float],
    flight: InFlight | None,
    is_custom: bool,
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
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its names for tokens.
        logit_bias (`dict[int, float]`):
            What it adds to logits.
        flight ([`~rollout.in_flight.InFlight`], *optional*):
            Requests of completions ahead.
        is_custom (`bool`):
            Whether a function of the user makes rollouts.
    """
    if sampler.samples_policy or not run.is_training:
        return
    _check_logps(run, rollout, corrects)
    check, has_tools = run.checks.self_check, bool(run.toolbox.tools)
    if check is not None and not is_custom and not has_tools:
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
        dtype, is_old = sampler.dtype or own, rollout.versions is not None
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
    if rollout.from_view is not None:  # which are left out by us
        mask = mask & ~rollout.from_view[:, None]
    n_missing, n = sum_over_ranks(run.accelerator, [float((sampled.isnan() & mask).sum()), float(mask.sum())])
    run.metrics.add({"sampling/no_logp_frac": n_missing / max(n, 1)})
    text = f"What samples gave no log-probability of {n_missing:.0f} of {n:.0f} tokens, which are neither corrected"
    is_first, checks.has_looked = not checks.has_looked, True
    if is_first and n_missing == n > 0 and corrects:
        raise RuntimeError(f"{text} nor checked; set `vllm_importance_sampling_correction=False` to train anyway.")
    if n_missing and not checks.has_warned:
        checks.has_warned = True
        logger.warning(f"{text} nor checked; `sampling/no_logp_frac` logs their share.")


def make_samplers(
    trainer: Any, given: Sampler | None, placeholders: set[int], revision: str | None
) -> tuple[TransformersSampler, Sampler]:
    """That of transformers, and the one to use: what is given, or vLLM, as the trainer's config says."""
    args, profile = trainer.args, functools.partial(profiling_context, trainer)
    trainer._logit_bias = logit_bias(args, placeholders) if args.use_vllm else {}
    if given is not None and (args.use_vllm or not isinstance(given, Sampler)):
        raise ValueError(
            f"`sampler` is a {type(given).__name__}, and `use_vllm` is {args.use_vllm}; pass a `Sampler`, without "
            "`use_vllm`."
        )
    own = TransformersSampler(
        trainer._policy,
        trainer.accelerator,
        trainer.generation_config,
        trainer.eos_token_ids,
        getattr(trainer.processing_class, "tokenizer", trainer.processing_class).pad_token_id,
        functools.partial(
            ready_to_generate, trainer._run, lambda: trainer.model_wrapped, trainer._dist, trainer.generation_kwargs
        ),
        profile,
        getattr(trainer, "continuous_batching_config", None),
        torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
    )
    if not args.use_vllm:
        suppress_placeholders(trainer, placeholders)
        return own, own if given is None else given
    limits: dict[str, int] = {}
    n_tool_media = args.max_tool_media if trainer.tools else 0
    if trainer.rollout_func is None and not trainer.toolbox and n_tool_media is not None:
        found = media_limits(args, trainer.train_dataset, trainer.eval_dataset)
        limits = {kind: most + n_tool_media for kind, most in found.items()}

    def without_model() -> AbstractContextManager[None]:
        memory = trainer.host_memory
        return nullcontext() if memory is None else memory.holding(storages(weights(trainer.model)))

    trainer.vllm_generation = make_engine(
        args,
        trainer.model,
        trainer.accelerator,
        trainer.processing_class,
        bias=trainer._logit_bias,
        ends=trainer.eos_token_ids,
        revision=revision,
        media_limits=limits,
        while_sampling=without_model,
    )
    if trainer.tools:
        logger.info("vLLM continues conversations with tools from its prefix cache, if it has one.")
    if args.max_staleness > 0:
        engine = trainer.vllm_generation
        # An adapter of which servers get a new version keeps its name for requests in flight
        trainer.in_flight = InFlight(
            engine.ask,
            args.max_staleness,
            args.vllm_server_timeout,
            changes_weights=engine.adapter_alone is None,
            settings=engine.sampling,
        )

    def explained() -> AbstractContextManager[Any]:
        step = trainer.state.global_step
        return naming_checkpoint(args.output_dir, step) if trainer.is_in_train else nullcontext()

    return own, VLLMSampler(trainer.vllm_generation, profile, explained)


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
