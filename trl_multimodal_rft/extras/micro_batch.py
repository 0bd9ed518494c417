# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The memory of a micro-batch, measured on torch's device `meta`, whose tensors have shapes alone."""

import argparse
import inspect
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import PyTree, tree_leaves, tree_map_only
from transformers import AttentionInterface, PreTrainedModel
from transformers.initialization import no_init_weights

from ..data.reading.decoding import require_module
from ..encoding.media import budgeted_size
from ..models.modes import checkpoint_activations
from ..models.parts import count_parts, freeze, freeze_backbone
from ..models.pretrained import read_config
from ..trainers.base.config_options import as_names
from ..versions import cache_name
from ..views.view_options import LossView, view_option


_TILE = 32768  # number of logits per token that are in memory at once
# Errors of models whose forward needs values, or takes other inputs
_FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_FUSED = "fused_on_meta"  # name of an implementation of attention


@dataclass
class Usage:
    """Result of [`measure`]: sizes of a model, and bytes of a micro-batch on one GPU."""

    trained: int  # number of trained weights, without a separate critic
    frozen: int  # number of frozen weights, without a separate critic
    in_4_bits: int  # number of frozen weights of linear layers, stored in 4 bits
    critic: int  # number of trained weights of a separate critic
    frozen_critic: int  # number of frozen weights of a separate critic
    modules: dict[str, tuple[int, int]]  # numbers of all and of trained weights, by part such as the vision tower
    layer: int  # number of weights of the largest layer
    embeddings_and_head: int  # number of weights of token embeddings and LM head; tied weights count once
    tokens: int  # tokens of the largest forward
    activations: int  # maximum bytes in use by a micro-batch, without weights and gradients
    cache: list[tuple[float, int | None]]  # per layer: bytes of keys and values per token, sliding window
    left_out: str | None = None  # why the media encoders aren't counted


class Watch(TorchDispatchMode):
    """
    Mode that counts the bytes of live storages, `now` and at the `peak`. Only storages that were created within the
    context count. Storages of the tensors in `baseline` never count.
    """

    def __init__(self, baseline: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.now = self.peak = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in baseline}  # bytes by the storage's address

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
    ) -> PyTree:
        inputs = _tensors((args, kwargs))
        devices = {tensor.device.type for tensor in inputs}
        if devices == {"cpu", "meta"}:  # grids and lengths of media have values, on the CPU
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        result = func(*args, **(kwargs or {}))
        input_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in _tensors(result):  # a view, or an operation in place, returns the storage of an input
            storage = tensor.untyped_storage()
            if storage._cdata not in input_storages and storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._count_freed, storage._cdata)
        return result

    def _count_freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _tensors(values: PyTree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class _FusedAttention(torch.autograd.Function):
    """Attention that keeps what a fused kernel keeps."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class _FusedHead(torch.autograd.Function):
    """An LM head that keeps states alone. A tile of the logits exists at a time."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(states, weight)
        return states.new_empty(len(states), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        tile = states.new_empty(len(states), min(len(weight), _TILE))
        of_states = torch.empty_like(states, dtype=torch.float32)
        of_weight = torch.empty_like(weight, dtype=torch.float32) if weight.requires_grad else None
        return of_states.to(tile.dtype), None if of_weight is None else of_weight.to(tile.dtype)


def _build(args: argparse.Namespace) -> PreTrainedModel:
    """Returns a model in training mode, without weights, in the dtype in which it computes."""
    config, model_class = read_config(args.model_name_or_path)
    AttentionInterface.register(
        _FUSED,
        lambda module, query, key, value, *_, **__: (_FusedAttention.apply(query, key, value).transpose(1, 2), None),
    )
    dtype = torch.bfloat16 if args.bf16 else getattr(torch, args.dtype)
    with torch.device("meta"), no_init_weights():
        model = model_class._from_config(config, dtype=dtype, attn_implementation=_FUSED)
    model.tie_weights()
    model.train()
    if args.gradient_checkpointing and model.supports_gradient_checkpointing:
        checkpoint_activations(model, {"use_reentrant": False, "preserve_rng_state": False})
    return model


def measure(args: argparse.Namespace) -> Usage:
    """Measures the memory of a micro-batch's forward and backward pass, on tensors that have shapes alone."""
    base = _build(args)
    for option, modality in (("images", "image"), ("audio_seconds", "audio")):
        if getattr(args, option) and modality not in base.input_modalities:
            raise ValueError(
                f"`--{option}` has no effect on {type(base).__name__}, which takes only "
                f"{' and '.join(base.input_modalities)}; leave it out."
            )
    head = base.get_output_embeddings()
    linear_layers = [layer for layer in base.modules() if isinstance(layer, nn.Linear) and layer is not head]
    n_linear = sum(layer.weight.numel() for layer in linear_layers) if args.load_in_4bit else 0
    layers = [layer for layer in base.modules() if type(layer).__name__ in set(base._no_split_modules or [])]
    embeddings_and_head = {module.weight for module in (base.get_input_embeddings(), head) if module is not None}
    counts = {
        "layer": max((sum(weight.numel() for weight in layer.parameters()) for layer in layers), default=0),
        "embeddings_and_head": sum(weight.numel() for weight in embeddings_and_head),
    }
    model: nn.Module = base
    if args.use_peft:
        peft = require_module("peft", "peft")
        names = args.lora_target_modules or "all-linear"
        # PEFT reads a single name as a pattern
        targets = names[0] if isinstance(names, list) and len(names) == 1 else names
        modules = {"target_modules": targets, "modules_to_save": args.lora_modules_to_save}
        with torch.device("meta"):
            model = peft.get_peft_model(base, peft.LoraConfig(r=args.lora_r, lora_alpha=2 * args.lora_r, **modules))
        model.to(base.dtype)
    freeze(model, as_names(args.freeze))
    critic = _build(args) if args.trainer == "ppo" and not args.shared_trunk else None
    if critic is not None:
        freeze_backbone(critic, as_names(args.freeze))
    networks = [base] if critic is None else [base, critic]
    n_prompts, n_completions = _largest_forward(args)
    left_out = None
    try:
        cache = _cache_of_layers(base)
        try:
            activations = _measure_micro_batch(args, networks, n_prompts, n_completions, has_media=True)
        except _FAILURES as error:
            left_out = _first_line(error)
            activations = _measure_micro_batch(args, networks, n_prompts, n_completions, has_media=False)
    except _FAILURES as error:
        raise ValueError(f"{args.model_name_or_path} doesn't run without weights: {_first_line(error)}.") from error
    return Usage(
        trained=_count_weights(model, trained=True),
        frozen=_count_weights(model, trained=False),
        in_4_bits=n_linear,
        critic=_count_weights(critic, trained=True),
        frozen_critic=_count_weights(critic, trained=False),
        modules=count_parts(model),
        tokens=n_prompts * args.prompt_tokens + n_completions * args.completion_tokens,
        activations=activations,
        cache=cache,
        left_out=left_out,
        **counts,
    )


def _first_line(error: Exception) -> str:
    """An error such as a bare `NotImplementedError` has no text, and its type stands for it."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _count_weights(model: nn.Module | None, trained: bool) -> int:
    weights = () if model is None else model.parameters()
    return sum(weight.numel() for weight in weights if weight.requires_grad == trained)


def _largest_forward(args: argparse.Namespace) -> tuple[int, int]:
    """Returns the numbers of prompts and completions of the largest forward, within `max_tokens_per_microbatch`."""
    is_shared = args.packing == "prefix" and args.trainer != "sft"
    group = args.num_generations if is_shared else 1
    views = 2 if view_option(LossView, "loss_view", args.loss_view).has_gradient else 1
    n = args.per_device_train_batch_size * views
    budget = args.max_tokens_per_microbatch
    while n > 1 and budget is not None and -(-n // group) * args.prompt_tokens + n * args.completion_tokens > budget:
        n -= 1
    return -(-n // group), n


def _measure_micro_batch(
    args: argparse.Namespace, networks: list[PreTrainedModel], n_prompts: int, n_completions: int, has_media: bool
) -> int:
    """Returns the peak bytes of a forward and backward pass, which scores all completions in one row."""
    n_scored = n_completions * args.completion_tokens
    baseline: list[torch.Tensor] = []  # counted in `memory`
    for network in networks:
        baseline += [*network.parameters(), *network.buffers()]
        for parameter in network.parameters():
            if parameter.requires_grad:  # the gradient exists from the second micro-batch on
                parameter.grad = torch.empty_like(parameter)
                baseline.append(parameter.grad)
    with Watch(baseline) as watch:
        loss = torch.zeros((), device=networks[0].device)
        for network in networks:
            if has_media:
                loss = loss + sum(tensor.float().mean() for tensor in _media_features(args, network, n_prompts))
            ids = torch.zeros(1, n_prompts * args.prompt_tokens + n_scored, dtype=torch.long, device=network.device)
            states = network.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0, -n_scored:]
            head = network.get_output_embeddings() if network is networks[0] else None
            loss = loss + (states.float() if head is None else _FusedHead.apply(states, head.weight)).mean()
            del states
        loss.backward()
    return watch.peak


def _media_features(args: argparse.Namespace, model: PreTrainedModel, n_prompts: int) -> list[torch.Tensor]:
    features = []
    for modality in model.input_modalities:
        inputs = _media_inputs(args, model, modality, n_prompts)
        if inputs:
            features += _tensors(dict(getattr(model, f"get_{modality}_features")(**inputs)))
    return features


def _media_inputs(
    args: argparse.Namespace, model: PreTrainedModel, modality: str, n_prompts: int
) -> dict[str, torch.Tensor]:
    """
    Returns inputs of an encoder as its config has them: patches with grids as Qwen's, square pictures, or frames of a
    spectrogram. Raises an error, for which the encoders are left out, if the config doesn't say what it takes.
    """
    is_visual = "image" in model.input_modalities
    seconds = (0.0 if is_visual else 30.0) if args.audio_seconds is None else args.audio_seconds
    n = n_prompts * {"image": 1 if args.images is None else args.images, "audio": int(seconds > 0)}.get(modality, 0)
    if not n:
        return {}
    names = inspect.signature(getattr(model, f"get_{modality}_features")).parameters
    if modality == "audio":
        frames = int(100 * seconds)
        inputs = {
            "input_features": torch.empty(n, model.config.audio_config.num_mel_bins, frames, device=model.device)
        }
        inputs |= {name: torch.ones(n, frames, dtype=torch.long) for name in names if name.endswith("mask")}
        return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    vision = model.config.vision_config
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    if "image_grid_thw" not in names:
        size = vision.image_size
        sides = size if isinstance(size, (list, tuple)) else (size, size)
        return {"pixel_values": torch.empty(n, channels, *sides, device=model.device, dtype=model.dtype)}
    limits = {name: getattr(args, name) for name in ("min_pixels", "max_pixels") if getattr(args, name) is not None}
    edge, _ = budgeted_size(args.image_size, args.image_size, limits)
    # Patches along an image's edge, a multiple of the merge size
    side = max(round(edge / (vision.patch_size * vision.spatial_merge_size)), 1) * vision.spatial_merge_size
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "pixel_values": torch.empty(n * side * side, width, device=model.device, dtype=model.dtype),
        "image_grid_thw": torch.tensor([[1, side, side]] * n),
    }


def _cache_of_layers(model: PreTrainedModel) -> list[tuple[float, int | None]]:
    """Returns the bytes per token and the sliding window of each layer's KV cache, measured on 16 tokens."""
    model.eval()
    ids = torch.empty(1, 16, dtype=torch.long, device=model.device)
    cache = model.get_decoder()(input_ids=ids, use_cache=True)[cache_name()]
    model.train()
    return [
        ((layer.keys.nbytes + layer.values.nbytes) / layer.keys.shape[-2], getattr(layer, "sliding_window", None))
        for layer in cache.layers
        if getattr(layer, "keys", None) is not None
    ]
