# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Preparation of models for scores: fused heads, packed rows, dropout, compilation, and references."""

from typing import Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.models import prepare_deepspeed, prepare_fsdp

from ...families import family_of
from ...forward.attention import install_prefix_attention
from ...forward.encoders import install_encoder_attention
from ...forward.head import add_fused_head, head_rule
from ...forward.masks import sharing_obstacle
from ...models.modes import turn_off_dropout
from ...models.wrapped import unwrapped
from ...policy import Fallbacks, PolicyForward
from ...views.view_options import LossView
from .argument_checks import mapping
from .configs import SamplingConfig, TrainerConfig
from .signatures import Processor


logger = get_logger(__name__)


def make_forward(
    accelerator: Accelerator,
    policy: nn.Module,
    trl_reference: nn.Module | None,
    processing_class: Processor,
    args: SamplingConfig,
) -> PolicyForward:
    """Prepares the heads of the policy and of a reference that TRL has loaded, and returns the policy's forward."""
    return PolicyForward(
        accelerator,
        processing_class,
        fallbacks=first_fallbacks(accelerator, policy, trl_reference, args),
        temperature=args.temperature,
        max_tokens=args.max_tokens_per_microbatch,
    )


def first_fallbacks(
    accelerator: Accelerator, policy: nn.Module, reference: nn.Module | None, args: SamplingConfig
) -> Fallbacks:
    """Adds fused heads to the policy and to TRL's reference. Returns the fallbacks that hold until the self-check."""
    model = unwrapped(accelerator, policy)
    head_options = {
        "temperature": args.temperature,
        "cast_lm_head_to_fp32": getattr(args, "cast_lm_head_to_fp32", False),
        "rule": head_rule(model),
    }
    if reference is not None:
        add_fused_head(unwrapped(accelerator, reference), outputs=_reference_outputs(args), **head_options)
    has_head = add_fused_head(model, outputs=("log_probs", "entropy"), **head_options)
    if not has_head:
        logger.warning(
            f"{model.config.model_type}: TRL's fused head doesn't support this model's computations around the LM "
            "head, so log-probabilities are computed from the model's logits, which takes more memory."
        )
    # `disable_compile` also turns off CUDA graphs of decoding steps
    allows_graph = not mapping(args.generation_kwargs).get("disable_compile")
    return Fallbacks(
        packing=False, isolate=family_of(model).isolate, logits_from_model=not has_head, graph=allows_graph
    )


def _reference_outputs(args: SamplingConfig) -> tuple[str, ...]:
    """Returns the outputs of a reference's head, with entropies if they are compared with the policy's."""
    compares_entropies = getattr(args, "loss_view_settings", LossView()).temperature is not None
    return ("log_probs", "entropy") if compares_entropies else ("log_probs",)


def enable_packing(
    accelerator: Accelerator, policy: nn.Module, reference: nn.Module | None, args: SamplingConfig
) -> bool:
    """Prepares models for packed rows, and returns whether the config asks for packing and all models support it."""
    models = [unwrapped(accelerator, model) for model in (policy, reference) if model is not None]
    for model in models:
        install_encoder_attention(model)
    obstacle = next(filter(None, map(sharing_obstacle, models)), None)
    packs = args.packing == "prefix"
    if packs and obstacle:
        logger.warning_once(f"Completions are scored in padded rows (`packing='padded'`): {obstacle}.")
    if not packs or obstacle:
        return False
    for model in models:
        install_prefix_attention(model)
    batch_size = args.per_device_train_batch_size
    group_size = args.num_generations or 1
    if batch_size % group_size != 0:
        logger.warning_once(
            f"`per_device_train_batch_size` ({batch_size}) holds no whole groups of `num_generations` ({group_size}), "
            "so part of each prompt is forwarded more than once (see the metric `packing/shared_frac`). Make it a "
            f"multiple of {group_size}."
        )
    return True


def disable_dropout(args: TrainerConfig, *models: nn.Module | None) -> None:
    """Turns off all dropout of models with `disable_dropout=True`, an option that SFT lacks, as in TRL."""
    if getattr(args, "disable_dropout", False):
        for model in filter(None, models):
            turn_off_dropout(model)


def prepare_reference(
    ref_model: PreTrainedModel, args: SamplingConfig, accelerator: Accelerator
) -> nn.Module | FSDPModule:
    """Prepares a reference for the accelerator, in the same way as TRL prepares the references that it loads."""
    disable_dropout(args, ref_model)
    add_fused_head(ref_model, temperature=args.temperature, outputs=_reference_outputs(args))
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        return prepare_deepspeed(ref_model, accelerator)
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        return prepare_fsdp(ref_model, accelerator)
    return accelerator.prepare_model(ref_model, evaluation_mode=True)


def compile_options(backend: str | None, mode: str | None) -> dict[str, Any] | None:
    """
    Returns arguments of `torch.compile` for a backend and a mode, or `None` without a backend. Backend and mode
    default to the options of `accelerate launch`. Raises a `ValueError` for a backend that accelerate doesn't know.
    """
    backends = [name.lower() for name in DynamoBackend.list()]
    if backend is not None and backend.lower() not in backends:
        raise ValueError(f"`torch_compile_backend` is one of {', '.join(backends)}, not {backend!r}.")
    plugin = TorchDynamoPlugin(backend=backend, mode=mode)
    return None if plugin.backend == DynamoBackend.NO else {**plugin.to_kwargs(), "fullgraph": False, "dynamic": True}


def compile_models(accelerator: Accelerator, args: TrainerConfig, *models: nn.Module | None) -> None:
    """Compiles the layers of models with `torch_compile=True`, see [`~forward.compiled.compile_layers`]."""
    compile_kwargs = compile_options(args.torch_compile_backend, args.torch_compile_mode)
    if compile_kwargs is None:
        return
    if is_deepspeed_zero3_enabled():
        raise ValueError(
            "`torch_compile=True` compiles whole layers, but ZeRO-3 gathers weights inside of them; use "
            "`fsdp2.yaml`, which gathers weights before a layer, or ZeRO-2."
        )
    from ...forward.compiled import compile_layers  # imported here, because few runs need it

    for model in models:
        if model is None:
            continue
        try:
            compile_layers(unwrapped(accelerator, model), compile_kwargs, logger.warning_once)
        except RuntimeError as error:
            raise ValueError(f"`torch_compile_mode` {args.torch_compile_mode!r}: {error}.") from error
