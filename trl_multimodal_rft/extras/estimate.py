# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft estimate`: whether a training run fits into the memory of its GPUs."""

import argparse
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..cli.parsers import OPTIMIZERS, SHARDS
from ..data.reading.decoding import require_module
from ..data.reading.refs import MediaError
from ..encoding.prompts import EncodedPrompt
from ..engines.transformers import shares_prompts
from ..forward.attention import install_prefix_attention
from ..forward.decoding import SHORT_PROMPT
from ..forward.head import add_fused_head
from ..forward.logprobs import completion_scores, completion_values, prompt_states
from ..forward.masks import sharing_obstacle
from ..forward.partition import split_by_tokens
from ..forward.prompts import group_by_prompt
from ..forward.scores import ScoreRequest
from ..forward.split_groups import chunk_ends, keeps_states
from ..models.critic import Critic, ValueHead
from ..models.modes import checkpoint_activations
from ..models.parts import count_parts, freeze, freeze_backbone
from ..models.pretrained import read_config
from ..reporting.console import parts_lines
from ..trainers.base.arguments import as_names
from ..versions import cache_name
from ..views.options import LossView, view_option
from .fake_run import FakeFloats, Watch, convertible_modules, kernels_of_gpus
from .synthetic import EncoderInputs, encoder_outputs, synthetic_prompt


GIB = 2**30
# Share of a GPU's memory for a run; CUDA, NCCL and fragmentation take the remaining memory
USABLE = 0.9
# Errors of models on fake tensors. Those of torch, such as `DataDependentOutputException`, are `RuntimeError`s.
_FAILURES = (AttributeError, RuntimeError, TypeError)
# bitsandbytes stores half a byte per weight, a byte per 64 weights and a float per 64 * 256 weights
BYTES_IN_4_BITS = 1 / 2 + 1 / 64 + 4 / (64 * 256)


@dataclass
class Usage:
    """Result of [`measure`]: sizes of a model, and memory and operations of a micro-batch on one GPU."""

    trained: int  # number of trained weights, without a separate critic
    frozen: int  # number of frozen weights, without a separate critic
    in_4_bits: int  # number of frozen weights of linear layers, stored in 4 bits
    tensors: int  # number of trained tensors
    modules: dict[str, tuple[int, int]]  # numbers of all and of trained weights, by part such as the vision tower
    critic: int  # number of trained weights of a separate critic
    frozen_critic: int  # number of frozen weights of a separate critic
    layer: int  # number of weights of the largest layer
    embeddings_and_head: int  # number of weights of token embeddings and LM head; tied weights count once
    held: int  # bytes of activations at the start of the backward pass
    peak: int  # maximum bytes in use by a micro-batch, without weights and gradients
    cache: list[tuple[float, int | None]]  # per layer: bytes of keys and values per token, sliding window
    sharing: int  # number of completions that share the keys and values of a prompt when sampled
    decoder: int  # number of weights of the decoder and of the LM head
    vocabulary: int  # vocabulary size of the LM head
    prompt_tokens: int
    tokens: int  # tokens of the largest forward
    n_forwards: int  # number of forwards of a micro-batch, which `max_tokens_per_microbatch` may split
    operations: float  # floating-point operations of a micro-batch, the reference's forward included


def target_modules(args: argparse.Namespace) -> str | list[str]:
    """Returns the layers that get adapters. A single name is a string, which PEFT may read as a pattern."""
    names = args.lora_target_modules or "all-linear"
    return names[0] if isinstance(names, list) and len(names) == 1 else names


def _is_sharded(args: argparse.Namespace) -> bool:
    """With `bf16`, DeepSpeed and FSDP compute in bfloat16 without autocast."""
    return args.strategy.startswith(("zero", "fsdp"))


def _build(args: argparse.Namespace, config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """Returns a model in training mode, with uninitialized weights in the dtype that they have in forwards."""
    dtype = torch.bfloat16 if _is_sharded(args) and args.bf16 else getattr(torch, args.dtype)
    with no_init_weights(), convertible_modules():
        model = model_class._from_config(config, dtype=dtype)
    model.tie_weights()
    model.train()
    if args.gradient_checkpointing and model.supports_gradient_checkpointing:
        # Fake tensors need no random state for dropout
        checkpoint_activations(model, {"use_reentrant": False, "preserve_rng_state": False})
    return model


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        # Copies of whole layers (`modules_to_save`) access data pointers, but need no data
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        # Torch reads the gradient of a real tensor before it converts the tensor to a fake one
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield


@_without_warnings()
def measure(args: argparse.Namespace) -> Usage:
    """Measures the memory and operations of a micro-batch's forward and backward pass on fake tensors."""
    config, model_class = read_config(args.model_name_or_path)
    # The sizes are taken before adapters change the models
    mode = FakeFloats()
    with mode:
        base = _build(args, config, model_class)
        critic = Critic(_build(args, config, model_class)) if args.trainer == "ppo" and not args.shared_trunk else None
        head = ValueHead(config.get_text_config().hidden_size) if args.trainer == "ppo" and args.shared_trunk else None
    packed = args.packing == "prefix" and not sharing_obstacle(base)
    for network in (base, None if critic is None else critic.model):
        if packed and network is not None:
            install_prefix_attention(network)
    logits_from_model = not add_fused_head(base, outputs=("log_probs", "entropy"))
    lm_head = base.get_output_embeddings()
    linear_layers = [layer for layer in base.modules() if isinstance(layer, torch.nn.Linear) and layer is not lm_head]
    n_linear_weights = sum(layer.weight.numel() for layer in linear_layers) if args.use_peft else 0
    layers = [layer for layer in base.modules() if type(layer).__name__ in set(base._no_split_modules or [])]
    largest_layer = max((sum(weight.numel() for weight in layer.parameters()) for layer in layers), default=0)
    # A set, in which tied weights count once
    embeddings_and_head = {module.weight for module in (base.get_input_embeddings(), lm_head) if module is not None}
    model = base
    if args.use_peft:
        peft = require_module("peft", "peft")
        with mode, convertible_modules():
            modules = {"target_modules": target_modules(args), "modules_to_save": args.lora_modules_to_save}
            model = peft.get_peft_model(base, peft.LoraConfig(r=args.lora_r, lora_alpha=2 * args.lora_r, **modules))
            for parameter in model.parameters():
                if parameter.requires_grad and (args.load_in_4bit or _is_sharded(args)):
                    parameter.data = parameter.data.to(base.dtype)
    freeze(model, as_names(args.freeze))
    if critic is not None:
        freeze_backbone(critic.model, as_names(args.freeze))
    # A micro-batch. With 4 completions, 2 prompts and 2 views, `unique` is p0 p1 p2 p3, and `prompts` has an entry per
    # completion and view: p0 p0 p1 p1 for one view, then p2 p2 p3 p3 for the other.
    prompt, encoder_inputs = synthetic_prompt(base, args)
    group_size = 1 if args.trainer == "sft" else min(args.num_generations, args.per_device_train_batch_size)
    n_prompts = -(-args.per_device_train_batch_size // group_size)
    n_views = 2 if view_option(LossView, "loss_view", args.loss_view).has_gradient else 1
    # Packed rows share the common start of prompts. Shifted position ids keep these equal prompts apart.
    unique = [
        replace(prompt, position_ids=prompt.position_ids + i, media_span=None) for i in range(n_views * n_prompts)
    ]
    completions = range(args.per_device_train_batch_size)
    prompts = []
    for view in range(n_views):
        prompts += [unique[view * n_prompts + i // group_size] for i in completions]
    lengths = [args.completion_tokens] * len(prompts)
    budget = args.max_tokens_per_microbatch
    forwards = [list(range(len(prompts)))] if budget is None else split_by_tokens(prompts, lengths, budget, packed)
    # Batch indices of each forward's completions are in `forwards`; only the largest forward is measured
    largest_index = max(range(len(forwards)), key=lambda i: len(forwards[i]))
    largest = [prompts[i] for i in forwards[largest_index]]
    # If the token budget splits a group into several forwards (chunks), the prompt is forwarded first, alone, and the
    # chunks share its keys and values
    is_chunk = largest_index in chunk_ends(prompts, forwards)
    prompt_first = is_chunk and packed and not _is_sharded(args) and keeps_states(base)
    held, peak, forward_ops, update_ops, prompt_ops = _measure_micro_batch(
        args, mode, (model, critic, head), base, largest, packed, logits_from_model, encoder_inputs, prompt_first
    )
    # `scale`: operations of all forwards, divided by those of the measured forward. Operations grow with the number of
    # completions, except those of a prompt's own forward (`prompt_ops`; 0 without `prompt_first`), which count once
    # per unique prompt.
    scale = prompt_ops / forward_ops * len(unique) + (1 - prompt_ops / forward_ops) * len(prompts) / len(largest)
    # Forwards without gradients: those before the backward passes if a micro-batch has several forwards, and the
    # reference's
    n_extra_forwards = (len(forwards) > 1) + (args.beta > 0)
    prompts_of_largest = group_by_prompt(largest) if packed else largest
    return Usage(
        trained=_count_weights(model, trained=True),
        frozen=_count_weights(model, trained=False),
        in_4_bits=n_linear_weights if args.load_in_4bit else 0,
        tensors=sum(weight.requires_grad for weight in model.parameters()),
        modules=count_parts(model),
        critic=_count_weights(critic and critic.model, trained=True),
        frozen_critic=_count_weights(critic and critic.model, trained=False),
        layer=largest_layer,
        embeddings_and_head=sum(weight.numel() for weight in embeddings_and_head),
        held=held,
        peak=peak,
        cache=_cache_of_layers(args, mode, base),
        sharing=min(_n_completions(args), args.num_generations) if shares_prompts(base) else 1,
        decoder=sum(
            weight.numel()
            for weight in {*base.get_decoder().parameters(), *([] if lm_head is None else [lm_head.weight])}
        ),
        vocabulary=0 if lm_head is None else len(lm_head.weight),
        prompt_tokens=len(prompt),
        tokens=sum(map(len, prompts_of_largest)) + len(largest) * args.completion_tokens,
        n_forwards=len(forwards),
        operations=scale * (update_ops + n_extra_forwards * forward_ops),
    )


def _count_weights(model: nn.Module | None, trained: bool) -> int:
    weights = () if model is None else model.parameters()
    return sum(weight.numel() for weight in weights if weight.requires_grad == trained)


def _measure_micro_batch(
    args: argparse.Namespace,
    mode: FakeFloats,
    modules: tuple[nn.Module, Critic | None, ValueHead | None],
    base: PreTrainedModel,
    prompts: list[EncodedPrompt],
    packed: bool,
    logits_from_model: bool,
    encoder_inputs: EncoderInputs,
    prompt_first: bool,
) -> tuple[int, int, int, int, int]:
    """
    Measures one forward and backward pass. Returns the bytes in use at the start of the backward pass and at the peak,
    and three numbers of operations: of the forward pass, of the forward and backward pass, and of the prompt alone.
    With `prompt_first`, the prompt is forwarded first, and all chunks of its completions share its states. Otherwise,
    the operations of the prompt aren't counted separately, and are 0.
    """
    ids = torch.zeros(len(prompts), args.completion_tokens, dtype=torch.long)
    mask = torch.ones_like(ids)
    model, critic, head = modules
    autocasts = args.bf16 and not _is_sharded(args)
    with mode, kernels_of_gpus() if args.device == "cuda" else nullcontext():
        baseline: list[torch.Tensor] = []  # not counted here: `memory` adds weights and gradients
        for module in [module for module in modules if module is not None]:
            for parameter in module.parameters():
                if parameter.requires_grad:  # the gradient exists from the second micro-batch on
                    parameter.grad = torch.empty_like(parameter)
                    baseline.append(parameter.grad)
            baseline += [*module.parameters(), *module.buffers()]
        with Watch(baseline) as watch:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                states = None
                state_gradients = []
                if prompt_first:
                    models = [base] if critic is None else [base, critic.model]
                    states = prompt_states(models, prompts[0], ids.device)
                    # The states' gradients, which are summed over the chunks, take memory, too
                    all_states = chain.from_iterable(states.values())
                    state_gradients = [torch.empty_like(state, dtype=torch.float32) for state in all_states]
                prompt_ops = watch.operations
                temperature = 1.0 if logits_from_model else None
                request = ScoreRequest(prompts, ids, mask, packed, states=states)
                policy_request = replace(request, critic=head, logits_temperature=temperature)
                scores = completion_scores(model, base, policy_request)
                # Any loss of all outputs takes the same memory
                loss = scores.logps.mean() + sum(
                    out.float().mean() for out in encoder_outputs(base, encoder_inputs, len(prompts))
                )
                if critic is not None:
                    loss = loss + completion_values(critic, critic.model, request).mean()
                if scores.values is not None:
                    loss = loss + scores.values.mean()
            held = watch.now
            forward_ops = watch.operations
            loss.backward()
            del state_gradients
        return held, watch.peak, forward_ops, watch.operations, prompt_ops


def _cache_of_layers(
    args: argparse.Namespace, mode: FakeFloats, model: PreTrainedModel
) -> list[tuple[float, int | None]]:
    """Returns the bytes per token and the sliding window of each layer's KV cache, measured on 16 tokens."""
    model.eval()
    with mode, torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=args.bf16 and not _is_sharded(args)):
        ids = torch.zeros(1, 16, dtype=torch.long)
        cache = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True)[cache_name()]
    return [
        ((layer.keys.nbytes + layer.values.nbytes) / layer.keys.shape[-2], getattr(layer, "sliding_window", None))
        for layer in cache.layers
        if getattr(layer, "keys", None) is not None
    ]


def _cache_bytes(usage: Usage, n_tokens: int) -> float:
    """Layers with a sliding window keep only the window's tokens."""
    return sum(size * min(n_tokens, window or n_tokens) for size, window in usage.cache)


def _n_completions(args: argparse.Namespace) -> int:
    return args.per_device_train_batch_size * args.steps_per_generation


def memory(args: argparse.Namespace, usage: Usage) -> dict[str, float]:
    """Returns bytes by name: a GPU's memory by purpose, its peaks during update and generation, and host memory."""
    # Weights, gradients and optimizer state. A width is the number of bytes of one weight.
    loaded_width = 4 if args.dtype == "float32" else 2
    adapter_width = 2 if args.load_in_4bit else 4
    trained = usage.trained
    frozen = usage.frozen
    weights, gradients, optimizer = _states(
        args, trained, frozen, adapter_width if args.use_peft else loaded_width, loaded_width
    )
    weights -= usage.in_4_bits * (loaded_width - BYTES_IN_4_BITS)
    if OPTIMIZERS[args.optim][0] and not _is_sharded(args):
        optimizer += 4 * usage.tensors  # AdamW has a step counter for each tensor
    # Of the critic: bytes of weights, gradients and optimizer state
    critic_states = _states(args, usage.critic, usage.frozen_critic, loaded_width, loaded_width)
    critic = sum(critic_states)
    shards_weights = SHARDS[args.strategy][0]
    reference = 0.0
    if args.beta > 0 and not args.use_peft:  # with adapters, the reference is the base model
        width = 2 if args.strategy.startswith("zero") else loaded_width
        reference = (trained + frozen) * width / (args.gpus if shards_weights else 1)
    # Buckets of gradients, and weights that sharded runs gather. DeepSpeed and FSDP2 use 2 bytes per weight; 5e8 and
    # 1e9 weights are DeepSpeed's defaults.
    buckets = gathered = gathered_to_sample = 0.0
    if args.strategy == "ddp":
        buckets = gradients
    elif args.strategy.startswith("zero"):
        buckets = 2 * min(trained, 5e8)  # `reduce_bucket_size`
    if args.strategy == "fsdp2":  # two layers, the gradient of one layer, the embeddings and the head
        gathered = gathered_to_sample = 2 * (3 * usage.layer + usage.embeddings_and_head)
    elif args.strategy == "zero3":
        gathered = 2 * min(trained + frozen, 1e9)  # `stage3_max_live_parameters`
        # `ds3_gather_for_generation`
        gathered_to_sample = 2 * (trained + frozen + usage.critic + usage.frozen_critic)
    # Sampling. Completions share the keys and values of a long prompt.
    n_prompt = usage.prompt_tokens
    if usage.sharing > 1 and n_prompt > SHORT_PROMPT:
        kv_bytes = _cache_bytes(usage, n_prompt) / usage.sharing + _cache_bytes(usage, args.completion_tokens)
    else:
        kv_bytes = _cache_bytes(usage, n_prompt + args.completion_tokens)
    cache = _n_completions(args) * kv_bytes
    decoding_graph = cast_weights = vllm = 0.0
    if args.device == "cuda" and not _is_sharded(args):
        # The CUDA graph of a decoding step holds the logits of a token in bfloat16 and in float32
        decoding_graph = 6.0 * _n_completions(args) * usage.vocabulary
        # Under autocast, sampling keeps copies of float32 weights in bfloat16
        cast_weights = 2.0 * usage.decoder if args.bf16 and args.dtype == "float32" and not args.load_in_4bit else 0.0
    if args.use_vllm:
        cache = decoding_graph = cast_weights = gathered_to_sample = 0.0
        vllm = args.vllm_gpu_memory_utilization * args.gpu_memory * GIB if args.vllm_mode == "colocate" else 0.0
    # Peaks during update and generation
    states = weights + gradients + optimizer + critic + reference + buckets
    vllm_during_update = 0.0 if args.vllm_enable_sleep_mode else vllm
    update = states + gathered + usage.peak + vllm_during_update
    if reference and args.strategy == "fsdp2":  # the reference is one FSDP unit, gathered as a whole
        update = max(update, states + 2 * (trained + frozen) + vllm_during_update)
    if args.trainer == "sft":
        cache = decoding_graph = cast_weights = gathered_to_sample = generation = 0.0
    else:
        generation = states + gathered_to_sample + cache + decoding_graph + vllm
        # Cast weights that would fill more than half of the free memory aren't kept, see `weights_cast_once`
        if cast_weights > (args.gpu_memory * GIB - generation) / 2:
            cast_weights = 0.0
        generation += cast_weights
    # Memory that moves to the host while the GPU samples
    host = 0.0
    if args.offload_during_generation and generation and not (args.use_vllm and args.vllm_mode == "server"):
        host = gradients + optimizer + reference + sum(critic_states[1:])
        if vllm:
            # vLLM receives the weights while the trainer still holds its own. A vLLM that sleeps has woken only its
            # weights by then. The peak is during this transfer, or later, when vLLM samples alone.
            vllm_at_sync = (
                2 * (trained + frozen) / args.vllm_tensor_parallel_size if args.vllm_enable_sleep_mode else vllm
            )
            host += weights + critic_states[0]
            generation = max(states - host + vllm, states - host + weights + vllm_at_sync)
        else:
            host += critic_states[0] if args.strategy in ("single", "ddp") else 0.0
            generation -= host
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "reference": reference,
        "critic": critic,
        "buckets": buckets,
        "gathered weights": gathered,
        "activations": usage.held,
        "logits and backward": usage.peak - usage.held,
        "KV cache": cache,
        "graph of a token": decoding_graph,
        "cast weights": cast_weights,
        "gathered to sample": gathered_to_sample,
        "vLLM": vllm,
        "update": update,
        "generation": generation,
        "peak": max(update, generation),
        "host": host,
    }


def _states(
    args: argparse.Namespace, trained: int, frozen: int, trained_width: int, frozen_width: int
) -> tuple[float, ...]:
    """Returns a GPU's bytes of weights, gradients and optimizer state. A width is the bytes of one weight."""
    # Bytes of optimizer state per trained weight, or per byte of the trained weights if `per_byte`
    factor, per_byte = OPTIMIZERS[args.optim]
    if args.strategy == "fsdp2":  # accelerate casts trained weights to float32
        trained_width = 4
    state_width = factor * (trained_width if per_byte else 1)
    sizes = trained_width * trained + frozen_width * frozen, trained_width * trained, state_width * trained
    # DeepSpeed computes in half precision, and its optimizer has a float32 copy of the trained weights
    if args.strategy.startswith("zero"):
        sizes = 2 * (trained + frozen), 2 * trained, (4 + factor * (4 if per_byte else 1)) * trained
    shards = SHARDS[args.strategy]
    return tuple(size / (args.gpus if sharded else 1) for size, sharded in zip(sizes, shards, strict=True))


def advice(args: argparse.Namespace, usage: Usage, sizes: dict[str, float]) -> str:
    """Returns the change to try first for a run that doesn't fit."""
    states = sum(sizes[name] for name in ("weights", "gradients", "optimizer", "reference", "critic", "buckets"))
    peaks_in_generation = sizes["generation"] > sizes["update"]
    offloading_args = argparse.Namespace(**{**vars(args), "offload_during_generation": True})
    if peaks_in_generation and memory(offloading_args, usage)["peak"] <= USABLE * args.gpu_memory * GIB:
        return "`--offload_during_generation`"
    if peaks_in_generation and sizes["vLLM"]:
        return "a smaller `--vllm_gpu_memory_utilization`, or separate GPUs with `--vllm_mode server`"
    if peaks_in_generation and max(sizes["KV cache"], sizes["gathered to sample"]) > states:
        if sizes["KV cache"] > sizes["gathered to sample"]:
            return "a smaller `--per_device_train_batch_size` or `--steps_per_generation`: fewer completions at once"
        return "`--use_vllm` or `ds3_gather_for_generation=False`: ZeRO-3 gathers all weights to sample"
    if not peaks_in_generation and usage.peak > states:
        if not args.gradient_checkpointing:
            return "`--gradient_checkpointing`"
        if args.packing == "padded":
            return "`--packing prefix`, which forwards each prompt once"
        n_completions = (usage.tokens - usage.prompt_tokens) // args.completion_tokens
        if n_completions > 1:
            budget = usage.prompt_tokens + n_completions // 2 * args.completion_tokens
            return f"`--max_tokens_per_microbatch {budget}`"
        return "a smaller `--per_device_train_batch_size`, or shorter completions"
    if not peaks_in_generation and sizes["vLLM"] and not args.vllm_enable_sleep_mode:
        return "`--vllm_enable_sleep_mode`"
    if sizes["critic"] > sizes["weights"]:
        return "`--shared_trunk`, which makes the critic a head on the policy"
    if args.gpus > 1 and args.strategy in ("single", "ddp", "zero1"):
        return "`--strategy fsdp2`, which shards weights, gradients and optimizer"
    if not args.use_peft:
        return "`--use_peft` (LoRA), or more GPUs with `--strategy fsdp2`"
    return "`--load_in_4bit` (QLoRA)" if not args.load_in_4bit else "a smaller model, or GPUs with more memory"


def estimate(args: argparse.Namespace) -> dict:
    """Measures a run, and returns its [`verdict`], with a `note` if media encoders are left out."""
    if args.load_in_4bit and not args.use_peft:
        raise ValueError("`--load_in_4bit` freezes the model; add `--use_peft` to train adapters.")
    if args.strategy == "single" and args.gpus > 1:
        raise ValueError(f"`--strategy single` uses one GPU; for {args.gpus} GPUs, choose `ddp`, `fsdp2` or another.")
    usage, note = measure_with_note(args)
    result = verdict(args, usage)
    return {**result, "note": note} if note else result


def verdict(args: argparse.Namespace, usage: Usage) -> dict:
    """Returns whether a run fits, with its memory by purpose and, if it doesn't fit, advice."""
    sizes = memory(args, usage)
    result = {"fits": sizes["peak"] <= USABLE * args.gpu_memory * GIB, "memory": sizes, "measured": vars(usage)}
    if not result["fits"]:
        result["advice"] = advice(args, usage, sizes)
    if sizes["vLLM"]:
        # Tensor parallelism splits weights in half precision, and keys and values
        weights = 2 * (usage.trained + usage.frozen) / args.vllm_tensor_parallel_size
        kv_bytes = _cache_bytes(usage, usage.prompt_tokens + args.completion_tokens)
        result["vllm_completions"] = int((sizes["vLLM"] - weights) * args.vllm_tensor_parallel_size / kv_bytes)
        if result["vllm_completions"] < 1:
            result["fits"] = False
            result["advice"] = (
                "a larger `--vllm_gpu_memory_utilization`: vLLM's share doesn't hold its weights and a completion"
            )
    return result


def measure_with_note(args: argparse.Namespace) -> tuple[Usage, str | None]:
    """
    Measures a run. If its media encoders don't run on fake tensors, measures the run without media and returns a note,
    or raises a `ValueError` if `args` ask for images or audio.
    """
    try:
        return measure(args), None
    except (*_FAILURES, MediaError) as error:
        reason = _first_line(error)
        if args.images is not None or args.audio_seconds is not None:
            raise ValueError(
                f"{args.model_name_or_path} doesn't run on fake tensors with media ({reason}); leave out `--images` "
                "and `--audio_seconds` for an estimate without media encoders."
            ) from error
    try:
        text_only = measure(argparse.Namespace(**{**vars(args), "images": 0, "audio_seconds": 0.0}))
    except _FAILURES as error:
        raise ValueError(f"{args.model_name_or_path} doesn't run on fake tensors: {_first_line(error)}") from error
    return text_only, f"The estimate excludes media encoders: {reason}."


def _first_line(error: Exception) -> str:
    """An error such as a bare `NotImplementedError` has no text, and its type stands for it."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def run(args: argparse.Namespace) -> None:
    result = estimate(args)
    if args.json:
        print(json.dumps(result))
        return
    usage = result["measured"]
    sizes = result["memory"]
    print(f"{args.model_name_or_path}, {args.strategy} on {args.gpus} x {args.gpu_memory:g} GiB: GiB on each GPU")
    for name, size in sizes.items():
        if name != "host" and size > 0 or name in ("update", "generation"):
            print(f"  {name:20} {size / GIB:8.1f}")
    print(
        f"{(usage['trained'] + usage['frozen']) / 1e9:.2f} B weights, of which "
        f"{usage['trained'] / 1e9:.2f} B are trained. {args.per_device_train_batch_size} completions of "
        f"{args.completion_tokens:,} tokens to prompts of {usage['prompt_tokens']:,}; {usage['n_forwards']} "
        f"forward(s) of up to {usage['tokens']:,} tokens; {usage['operations'] / 1e15:.2f} PFLOP a micro-batch."
    )
    print(*parts_lines(usage["modules"]), sep="\n")
    if sizes["host"]:
        print(f"While a GPU samples, {sizes['host'] / GIB:.1f} GiB of the above wait in the host's memory.")
    if "vllm_completions" in result:
        print(f"vLLM's share holds the keys and values of {max(result['vllm_completions'], 0)} completions at once.")
    if "note" in result:
        print(result["note"])
    usable = f"{USABLE:.0%} of {args.gpu_memory:g} GiB"
    print(
        f"Fits into {usable}." if result["fits"] else f"Doesn't fit into {usable}. Change first: {result['advice']}."
    )
