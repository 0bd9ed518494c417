# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Predicts the memory of a training step on each GPU, and its floating-point operations, from the config of a model.

```bash
python benchmarks/memory_model.py --check                                # predictions against tiny runs, on the CPU
python benchmarks/memory_model.py                                        # Qwen2.5-VL 3B, 7B, 32B on 1, 8 and 64 GPUs
python benchmarks/memory_model.py --model 7b --strategy fsdp2 --gpus 8   # where the bytes of one setting go
python benchmarks/memory_model.py --model path/to/model --lora all-linear
```

Parameters are counted on the model itself, built on the meta device. Activations are a sum over what layers keep for
their backward pass, of widths that are read off their modules, for any transformers model whose layers are attention
and a dense MLP. `docs/scaling.md` explains the terms.

`--check` trains tiny Qwen2.5-VL and Qwen2-Audio models with the trainers of this package and compares. Measured is what
lives: a dispatch mode sees every storage that an update makes, and when it is freed. **Nothing was measured on a GPU**;
what runs there alone (kernels for sequences of variable length, Triton, shards) is predicted from the code.
"""

import argparse
import json
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import policy_update
import torch
import transformers
import trl.trainer.utils
from datasets import Dataset
from measuring import hardware, versions
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer, MultimodalPPOConfig, MultimodalPPOTrainer
from trl_multimodal_rft.forward.layout import (
    MASK_ALIGNMENT,
    MASK_ENTRIES,
    group_by_prompt,
    packed_length,
    split_by_tokens,
)
from trl_multimodal_rft.generation.transformers import generate_completions
from trl_multimodal_rft.models.towers import find_tower


GIB, MIB = 2**30, 2**20

# https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct/blob/main/config.json, and those of 7B and 32B. Vocabulary, hidden and
# MLP width, layers, heads and key heads of the decoder; MLP width of the vision tower; whether the embeddings are tied
SIZES = {
    "3b": ((151936, 2048, 11008, 36, 16, 2), 3420, True),
    "7b": ((152064, 3584, 18944, 28, 28, 4), 3420, False),
    "32b": ((152064, 5120, 27648, 64, 40, 8), 3456, False),
}


def published_config(size: str) -> Qwen2_5_VLConfig:
    """
    Config of a published Qwen2.5-VL.

    Args:
        size (`str`):
            `"3b"`, `"7b"` or `"32b"`.

    Returns:
        [`~transformers.Qwen2_5_VLConfig`]: The config.
    """
    text, vision_mlp, tied = SIZES[size]
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return Qwen2_5_VLConfig(
        text_config=dict(zip((*names, "num_key_value_heads"), text, strict=True)),
        vision_config={
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": vision_mlp,
            "num_heads": 16,
            "out_hidden_size": text[1],
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        tie_word_embeddings=tied,
    )


def meta_model(config: PreTrainedConfig, model_class: type[PreTrainedModel], lora: str | None = None) -> nn.Module:
    """
    A model without its numbers.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            Config of the model.
        model_class (`type`):
            Its class.
        lora (`str`, *optional*):
            Linear layers with an adapter, see [`lora_config`]. All else is then frozen.

    Returns:
        `torch.nn.Module`: The model on the meta device.
    """
    with torch.device("meta"):
        model = model_class(config)
        model.tie_weights()
        return model if lora is None else get_peft_model(model, lora_config(model, lora))


def lora_config(model: nn.Module, targets: str, rank: int = 16) -> LoraConfig:
    """
    Adapters.

    Args:
        model (`torch.nn.Module`):
            The model.
        targets (`str`):
            Ends of the names of the linear layers, with commas between them, or `"all-linear"`.
        rank (`int`, *optional*, defaults to `16`):
            Their rank.

    Returns:
        [`~peft.LoraConfig`]: The config.
    """
    names = targets if targets == "all-linear" else targets.split(",")
    return LoraConfig(r=rank, target_modules=names)


# Widths


@dataclass(frozen=True)
class Linear:
    """
    A linear layer.

    Args:
        inputs (`int`):
            Width of its input.
        outputs (`int`):
            Width of its output.
        trained (`bool`):
            Whether its weight gets a gradient.
        rank (`int`):
            Rank of its LoRA adapter, 0 without one.
    """

    inputs: int
    outputs: int
    trained: bool
    rank: int


@dataclass(frozen=True)
class Convolution:
    """
    A convolution.

    Args:
        inputs (`int`):
            Channels of its input.
        kernel (`int`):
            Positions of the input that make one of the output.
        stride (`int`):
            Positions of the input for each of the output.
        outputs (`int`):
            Channels of its output.
        trained (`bool`):
            Whether its weight gets a gradient.
    """

    inputs: int
    kernel: int
    stride: int
    outputs: int
    trained: bool


@dataclass(frozen=True)
class Stack:
    """
    The layers of a decoder or an encoder, which are all alike, and what is around them.

    Args:
        n_layers (`int`):
            Number of layers.
        parameters (`int`):
            Parameters of a layer.
        hidden (`int`), query (`int`), key (`int`), mlp (`int`):
            Widths of the residual stream, of queries and keys over all heads, and inside the MLP.
        head_dim (`int`):
            Width of a head.
        gated (`bool`):
            Whether the MLP has a gate.
        fused (`bool`):
            Whether one product makes query, key and value.
        layer_norm (`bool`):
            Whether norms are layer norms, rather than the root mean square.
        norms (`tuple[tuple[int, bool]]`):
            Width of each norm of a layer, and whether its weight is trained.
        roles (`dict[str, list[Linear]]`):
            Linear layers of a layer: `"qkv"`, `"attended"` (which reads the output of the attention), `"into_mlp"` and
            `"out_of_mlp"`.
        outside (`tuple[Linear]`):
            Linear layers beside the layers, such as those that project features.
        convolutions (`tuple[Convolution]`):
            Convolutions that media pass before the layers.
        trained (`bool`):
            Whether anything here is trained.
        rotary (`bool`):
            Whether positions are rotations.
        window (`tuple[int, int] | None`):
            Positions of a window of attention, and how many layers look beyond theirs.
    """

    n_layers: int
    parameters: int
    hidden: int
    query: int
    key: int
    mlp: int
    head_dim: int
    gated: bool
    fused: bool
    layer_norm: bool
    norms: tuple[tuple[int, bool], ...]
    roles: dict[str, list[Linear]]
    outside: tuple[Linear, ...] = ()
    convolutions: tuple[Convolution, ...] = ()
    trained: bool = True
    rotary: bool = False
    window: tuple[int, int] | None = None

    @property
    def linears(self) -> list[Linear]:
        """All linear layers of a layer."""
        return [linear for linears in self.roles.values() for linear in linears]


@dataclass(frozen=True)
class Anatomy:
    """
    What the memory of a model depends on.

    Args:
        decoder ([`Stack`]):
            The text decoder.
        encoders (`dict[str, Stack]`):
            Encoders by modality, `"image"` (videos, too) and `"audio"`.
        head (`Linear`):
            The LM head.
        tied (`bool`):
            Whether the head's weight is that of the embeddings.
        n_parameters (`int`), n_trained (`int`):
            Parameters, and those that are trained. A shared weight counts once.
        n_tensors (`int`), n_trained_tensors (`int`):
            Number of those tensors.
        n_quantized (`int`), n_quantized_tensors (`int`):
            Weights that bitsandbytes holds in 4 bits, and their tensors: those of linear layers but the head.
    """

    decoder: Stack
    encoders: dict[str, Stack]
    head: Linear
    tied: bool
    n_parameters: int
    n_trained: int
    n_tensors: int
    n_trained_tensors: int
    n_quantized: int
    n_quantized_tensors: int

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained, and the rest is frozen."""
        return any(linear.rank for stack in self.stacks for linear in stack.linears)

    @property
    def stacks(self) -> list[Stack]:
        """Decoder and encoders."""
        return [self.decoder, *self.encoders.values()]


def anatomy(model: nn.Module) -> Anatomy:
    """
    Reads the widths off a model.

    Args:
        model (`torch.nn.Module`):
            A transformers model, with LoRA adapters or without, on any device.

    Returns:
        [`Anatomy`]: The widths.

    Raises:
        `ValueError`: If its layers aren't attention and one MLP.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    decoder, head = base.get_decoder(), base.get_output_embeddings()
    towers = {
        kind: base.get_submodule(find_tower(base, kind))
        for kind in ("image", "audio")
        if kind in base.input_modalities
    }
    encoders = {kind: _read_stack(tower) for kind, tower in towers.items()}
    # What projects features stands beside decoder and encoders in many families
    inside = {id(module) for part in (decoder, *towers.values()) for module in part.modules()}
    beside = [(n, m) for n, m in base.named_modules() if id(m) not in inside and m is not head]
    projections = tuple(_linear(module) for _, module in _linears(beside))
    if projections:
        kind = next(iter(encoders))
        encoders[kind] = replace(encoders[kind], outside=(*encoders[kind].outside, *projections))
    windows = base.config.vision_config if "image" in encoders and hasattr(base.config, "vision_config") else None
    if windows is not None and hasattr(windows, "fullatt_block_indexes"):
        window = (windows.window_size // windows.patch_size) ** 2
        encoders["image"] = replace(encoders["image"], window=(window, len(windows.fullatt_block_indexes)))
    parameters = list(model.parameters())
    quantized = [m for _, m in _linears(base.named_modules()) if m is not head]
    return Anatomy(
        decoder=_read_stack(decoder),
        encoders=encoders,
        head=Linear(head.in_features, head.out_features, head.weight.requires_grad, 0),
        tied=head.weight is base.get_input_embeddings().weight,
        n_parameters=sum(p.numel() for p in parameters),
        n_trained=sum(p.numel() for p in parameters if p.requires_grad),
        n_tensors=len(parameters),
        n_trained_tensors=sum(p.requires_grad for p in parameters),
        n_quantized=sum(m.in_features * m.out_features for m in quantized),
        n_quantized_tensors=len(quantized),
    )


def _linears(named) -> list[tuple[str, nn.Module]]:
    """Linear layers, with an adapter or without; not those inside adapters."""
    found = []
    for name, module in named:
        if isinstance(module, LoraLayer) or isinstance(module, nn.Linear) and not _in_adapter(name):
            found.append((name, module))
    return found


def _in_adapter(name: str) -> bool:
    return "base_layer" in name or "lora_" in name


def _linear(module: nn.Module) -> Linear:
    adapted = isinstance(module, LoraLayer)
    return Linear(
        module.in_features, module.out_features, module.weight.requires_grad, module.r["default"] if adapted else 0
    )


def _read_stack(module: nn.Module) -> Stack:
    lists = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    prefix, layers = max(lists, key=lambda item: len(item[1]), default=("", [module]))
    layer = layers[0]
    linears = [(name, _linear(part)) for name, part in _linears(layer.named_modules())]
    attention = [linear for name, linear in linears if "att" in name.rpartition(".")[0]]
    mlp = [linear for name, linear in linears if "att" not in name.rpartition(".")[0]]
    experts = any(isinstance(part, nn.ModuleList) for part in layer.modules())
    if not attention or not mlp or experts or any(p.dim() > 2 for p in layer.parameters()):
        raise ValueError(
            f"Layers of {type(module).__name__} aren't attention with one MLP, so their activations can't be predicted."
        )
    *readers, output = attention
    *into, out = mlp
    fused = len(readers) == 1
    query, key = (output.inputs,) * 2 if fused else (max(r.outputs for r in readers), min(r.outputs for r in readers))
    norms = [(name, part) for name, part in layer.named_modules() if "Norm" in type(part).__name__]
    per_head = {"q_norm": query, "k_norm": key, "v_norm": key}
    around = [(name, part) for name, part in module.named_modules() if not f"{name}.".startswith(f"{prefix}.")]
    convolutions = [part for _, part in around if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    return Stack(
        n_layers=len(layers),
        parameters=sum(p.numel() for p in layer.parameters()),
        hidden=out.outputs,
        query=query,
        key=key,
        mlp=out.inputs,
        gated=sum(linear.outputs for linear in into) == 2 * out.inputs,
        fused=fused,
        layer_norm=isinstance(norms[0][1], nn.LayerNorm),
        norms=tuple(
            (per_head.get(name.rpartition(".")[2], out.outputs), any(p.requires_grad for p in part.parameters()))
            for name, part in norms
        ),
        head_dim=next(part.head_dim for part in layer.modules() if hasattr(part, "head_dim")),
        roles={"qkv": readers, "attended": [output], "into_mlp": into, "out_of_mlp": [out]},
        outside=tuple(_linear(part) for _, part in _linears(around)),
        convolutions=tuple(
            Convolution(
                part.in_channels,
                int(np.prod(part.kernel_size)),
                int(np.prod(part.stride)),
                part.out_channels,
                part.weight.requires_grad,
            )
            for part in convolutions
        ),
        trained=any(p.requires_grad for p in module.parameters()),
        rotary=any("RotaryEmbedding" in type(part).__name__ for part in module.modules()),
    )


# Settings


@dataclass(frozen=True)
class Precision:
    """
    Bytes of a number: of weights as loaded, in matrix products, of what a norm multiplies its weight with, in the residual
    stream, and of LoRA adapters. Where weights have more than products, autocast makes copies of them and of inputs.
    """

    weight: int
    compute: int
    normalized: int
    stream: int
    adapter: int = 4

    @property
    def casts(self) -> bool:
        """Whether each linear layer casts its input and its weight for itself."""
        return self.weight > self.compute


PRECISIONS = {
    "float32": Precision(4, 4, 4, 4),
    "bfloat16": Precision(2, 2, 2, 2),
    "mixed": Precision(4, 2, 4, 4),
}


@dataclass(frozen=True, eq=False)
class Prompt:
    """
    A prompt and its medium.

    Args:
        tokens (`int`):
            Its tokens, those that stand for the medium included.
        media_tokens (`int`, *optional*, defaults to `0`):
            Tokens that stand for the medium.
        positions (`int`, *optional*, defaults to `0`):
            Positions of the encoder: patches of an image or a video, or half the mel frames of an audio.
        modality (`str`, *optional*, defaults to `"image"`):
            `"image"`, which videos are too, or `"audio"`.
    """

    tokens: int
    media_tokens: int = 0
    positions: int = 0
    modality: str = "image"

    def __len__(self):
        return self.tokens


@dataclass(frozen=True)
class Setup:
    """
    How a model is trained.

    Args:
        prompts (`list[Prompt]`):
            Prompt of each completion of a micro-batch, the same object in a group.
        lengths (`list[int]`):
            Tokens of each completion.
        precision (`str`, *optional*, defaults to `"bfloat16"`):
            Weights as loaded: `"bfloat16"`, `"mixed"` (float32, with products in bfloat16) or `"float32"`.
        packed (`bool`, *optional*, defaults to `True`):
            Whether completions share their prompt, or have padded rows.
        checkpointing (`bool`, *optional*, defaults to `True`):
            Whether layers are computed again in the backward pass.
        max_tokens (`int`, *optional*):
            `max_tokens_per_microbatch`.
        strategy (`str`, *optional*, defaults to `"single"`):
            `"single"`, `"ddp"`, `"zero1"`, `"zero2"`, `"zero3"` or `"fsdp2"`.
        gpus (`int`, *optional*, defaults to `1`):
            Number of GPUs, over which the strategy shards.
        reference (`bool`, *optional*, defaults to `False`):
            Whether a reference model scores, too (`beta` above 0). With LoRA it is the policy without its adapters.
        critic (`str`, *optional*):
            PPO's critic: `"copy"` of the policy, or `"shared_trunk"`.
        quantized (`bool`, *optional*, defaults to `False`):
            Whether the frozen linear layers are held in 4 bits (QLoRA).
        cuda (`bool`, *optional*, defaults to `True`):
            Whether it runs on a GPU; else as in `--check`. There, packed rows are taken to be plainly causal.
        tile (`int`, *optional*):
            Columns of the vocabulary that the LM head takes at once, TRL's own number by default.
    """

    prompts: list[Prompt]
    lengths: list[int]
    precision: str = "bfloat16"
    packed: bool = True
    checkpointing: bool = True
    max_tokens: int | None = None
    strategy: str = "single"
    gpus: int = 1
    reference: bool = False
    critic: str | None = None
    quantized: bool = False
    cuda: bool = True
    tile: int = trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE

    @property
    def numbers(self) -> Precision:
        """Bytes in forward and backward; engines that shard compute in bfloat16 whatever was loaded."""
        numbers = PRECISIONS["bfloat16" if self.strategy in SHARDED else self.precision]
        # TRL makes adapters of QLoRA bfloat16
        return replace(numbers, adapter=2) if self.quantized or self.strategy in SHARDED else numbers

    def parts(self) -> list["Setup"]:
        """What is forwarded at once: all of it, or as `max_tokens_per_microbatch` splits it."""
        if self.max_tokens is None:
            return [self]
        rows = split_by_tokens(self.prompts, self.lengths, self.max_tokens, self.packed)
        return [
            replace(
                self, prompts=[self.prompts[i] for i in part], lengths=[self.lengths[i] for i in part], max_tokens=None
            )
            for part in rows
        ]

    @property
    def tokens(self) -> int:
        """Tokens that a forward takes, padding included."""
        if self.packed:
            return packed_length(self.prompts, self.lengths)
        return len(self.prompts) * (max(map(len, self.prompts)) + max(self.lengths))

    @property
    def scored(self) -> int:
        """Tokens that the LM head projects: completions, or without Triton nearly all."""
        if self.cuda:
            return sum(self.lengths)
        return self.tokens if self.packed else self.tokens - len(self.prompts)

    def media(self) -> list[Prompt]:
        """What the encoders take."""
        return list(group_by_prompt(self.prompts)) if self.packed else self.prompts


# What each strategy divides by the number of GPUs: weights, gradients, states of the optimizer
SHARDED = {
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
    "fsdp2": (True, True, True),
}
STRATEGIES = ("single", "ddp", *SHARDED)


# Activations


@dataclass(frozen=True)
class Attended:
    """
    What an attention keeps, in positions: queries (and outputs), keys and values at their own width, and those repeated for
    all query heads; numbers of masks of each layer, and of masks for all; whether outputs are copied to where rows have
    them. Beside it the pairs of query and key.
    """

    queries: int
    keys: int = 0
    wide_keys: int = 0
    masks: int = 0
    shared_masks: int = 0
    copied: bool = False
    pairs: int = 0


def decoder_attention(setup: Setup) -> Attended:
    """
    Of one forward of the decoder.

    Args:
        setup ([`Setup`]):
            Setting without a token budget.

    Returns:
        [`Attended`]: The positions.
    """
    groups, n, longest = group_by_prompt(setup.prompts), len(setup.lengths), max(setup.lengths)
    width = max(map(len, groups))
    if not setup.packed:
        length = width + longest
        return Attended(queries=n * length, wide_keys=n * length, masks=n * length**2, pairs=n * length**2)
    if setup.cuda:  # a kernel for sequences of unequal length: keys are gathered for each completion, its prompt's too
        seen = [len(prompt) - 1 + length for prompt, length in zip(setup.prompts, setup.lengths, strict=True)]
        return Attended(
            queries=setup.tokens,
            keys=sum(map(len, groups)) + sum(seen),
            pairs=sum(len(p) ** 2 for p in groups) + sum(map(int.__mul__, setup.lengths, seen)),
        )
    seen = width - 1 + longest
    # One mask for all, in aligned rows, but of short prompts of unequal length one for each completion
    alone = len({len(prompt) for prompt in groups}) == 1 or n * longest * seen > MASK_ENTRIES
    return Attended(
        queries=len(groups) * width + n * longest,
        keys=len(groups) * width,
        wide_keys=n * seen,
        shared_masks=(1 if alone else n) * longest * -(-seen // MASK_ALIGNMENT) * MASK_ALIGNMENT,
        copied=True,
        pairs=len(groups) * width**2 + n * longest * seen,
    )


def encoder_attention(stack: Stack, media: Sequence[Prompt]) -> Attended:
    """
    Of one forward of an encoder. Each medium is attended by itself.

    Args:
        stack ([`Stack`]):
            The encoder.
        media (`Sequence[Prompt]`):
            Prompts whose media it takes.

    Returns:
        [`Attended`]: The positions.
    """
    positions = sum(prompt.positions for prompt in media)
    pairs = sum(prompt.positions**2 for prompt in media)
    masks = pairs if any(prompt.modality == "audio" for prompt in media) else 0  # which hide the padding of audio
    if stack.window is not None:  # the average over layers
        size, n_full = stack.window
        pairs = (n_full * pairs + (stack.n_layers - n_full) * positions * size) // stack.n_layers
    return Attended(queries=positions, keys=positions, masks=masks, copied=True, pairs=pairs)


def kept_inputs(linears: Sequence[Linear], numbers: Precision) -> int:
    """Bytes per token of what several linear layers read, and of what their adapters hold."""
    readers = [linear for linear in linears if linear.trained or linear.rank]
    copies = sum(numbers.casts or (linear.rank > 0 and numbers.adapter > numbers.compute) for linear in readers)
    copies = max(copies, min(len(readers), 1))
    return numbers.compute * (copies * linears[0].inputs + sum(linear.rank for linear in readers))


def kept_norm(width: int, trained: bool, layer_norm: bool, numbers: Precision) -> int:
    """Bytes per token of a norm: its input, of an RMS norm in float32, and there what the weight is multiplied with."""
    return width * (numbers.stream if layer_norm else 4 + numbers.normalized * trained)


def layer_bytes(stack: Stack, tokens: int, attended: Attended, numbers: Precision) -> int:
    """
    What a layer keeps for its backward pass.

    Args:
        stack ([`Stack`]):
            Widths of the layer.
        tokens (`int`):
            Tokens or positions that it takes.
        attended ([`Attended`]):
            Positions of its attention.
        numbers ([`Precision`]):
            Bytes of numbers.

    Returns:
        `int`: Bytes.
    """
    per_token = sum(kept_norm(width, trained, stack.layer_norm, numbers) for width, trained in stack.norms)
    per_token += sum(kept_inputs(stack.roles[role], numbers) for role in ("qkv", "into_mlp", "out_of_mlp"))
    if attended.copied:
        per_token += kept_inputs(stack.roles["attended"], numbers)
    # Before the activation; with a gate also after it, and the other factor
    per_token += numbers.compute * stack.mlp * (3 if stack.gated else 1)
    # Where one product makes query, key and value, the value is a view, which keeps all three beside the rotated two
    key_and_value = stack.key + (3 * stack.query if stack.fused else stack.key)
    attention = 2 * attended.queries * stack.query + attended.keys * key_and_value
    attention += 2 * attended.wide_keys * stack.query + attended.masks
    log_sums = 4 * attended.queries * (stack.query // stack.head_dim)
    return tokens * per_token + numbers.compute * attention + log_sums


def beside_layers(stack: Stack, media: Sequence[Prompt], numbers: Precision) -> int:
    """
    What an encoder keeps outside its layers: inputs of convolutions, the last norm, projections.

    Args:
        stack ([`Stack`]):
            The encoder.
        media (`Sequence[Prompt]`):
            Prompts whose media it takes.
        numbers ([`Precision`]):
            Bytes of numbers.

    Returns:
        `int`: Bytes.
    """
    outputs = sum(prompt.positions for prompt in media)
    tokens = sum(prompt.media_tokens for prompt in media)
    total = outputs * kept_norm(stack.hidden, stack.trained, stack.layer_norm, numbers)
    for each in reversed(stack.convolutions):
        total += numbers.compute * outputs * each.inputs * each.stride * each.trained
        if len(stack.convolutions) > 1:  # with an activation after each
            total += numbers.compute * outputs * each.outputs
        outputs *= each.stride
    total += tokens * sum(kept_inputs([linear], numbers) for linear in stack.outside)
    return total + numbers.compute * tokens * sum(linear.outputs for linear in stack.outside[:-1])


@dataclass(frozen=True)
class Activations:
    """
    Bytes of activations: `held` where the backward pass starts, of which `head` are the LM head's, and what comes on top:
    `in_forward` before that, `in_head` in the backward pass of the head and `in_layer` in that of the largest layer.
    """

    held: int
    head: int
    in_forward: int
    in_head: int
    in_layer: int

    @property
    def peak(self) -> int:
        """The most that lives at once."""
        return max(self.held + max(self.in_forward, self.in_head), self.held - self.head + self.in_layer)


def activations(body: Anatomy, setup: Setup) -> Activations:
    """
    Of the part of a micro-batch that takes most.

    Args:
        body ([`Anatomy`]):
            Widths of the model.
        setup ([`Setup`]):
            Setting.

    Returns:
        [`Activations`]: The bytes.
    """
    return max((_activations(body, part) for part in setup.parts()), key=lambda each: each.peak)


def _activations(body: Anatomy, setup: Setup) -> Activations:
    numbers, tokens = setup.numbers, setup.tokens
    held, in_layer = _trunk(body, setup)
    width, scored = body.head.inputs, setup.scored
    # Hidden states as the head reads them; labels, normalizers and entropies
    head = scored * (width * (numbers.stream if numbers.casts else numbers.compute) + 24)
    casts = 0
    if numbers.casts:
        # Of weights, until their gradient is computed; of layers that are computed again, until the end of the forward
        casts = 2 * sum(stack.n_layers * sum(map(_size, stack.linears)) for stack in body.stacks)
        held += 2 * sum(sum(map(_size, stack.outside)) for stack in body.stacks)
    if setup.critic == "copy":
        of_critic = _trunk(_whole(body), setup)
        held += of_critic[0] + 4 * tokens * width
        in_layer = max(in_layer, of_critic[1])
        casts *= 2
    elif setup.critic == "shared_trunk" and numbers.compute == 2:
        held += 4 * tokens * width  # its head reads float32
    rows, columns = min(scored, TOKEN_CHUNK_SIZE), min(body.head.outputs, setup.tile)
    tile = numbers.compute * rows * setup.tile + (2 * columns * width if numbers.casts else 0)
    in_forward, in_head = tile + media_bytes(body, setup), tile + 4 * scored * width
    if setup.checkpointing:
        in_forward += casts
    else:
        held += casts
    if body.head.trained:  # a gradient in float32, and in the dtype of the weight if that is another
        in_head += _size(body.head) * (4 if numbers.weight == 4 else 6)
    if not setup.cuda:  # without Triton, statistics and gradient of the logits take several tensors
        in_forward += 3 * 4 * rows * columns
        in_head += int((7.25 + (numbers.compute == 2)) * 4 * rows * columns)
    return Activations(held + head, head, in_forward, in_head, in_layer)


def _size(linear: Linear) -> int:
    return linear.inputs * linear.outputs


def media_bytes(body: Anatomy, setup: Setup) -> int:
    """
    Of pixels and mel frames. While the encoder that takes them is trained they are a part of what it keeps.

    Args:
        body ([`Anatomy`]):
            Widths of the model.
        setup ([`Setup`]):
            Setting.

    Returns:
        `int`: Bytes.
    """
    total = 0
    for prompt in setup.media():
        if prompt.positions:
            convolutions = body.encoders[prompt.modality].convolutions
            total += prompt.positions * convolutions[0].inputs * int(np.prod([each.stride for each in convolutions]))
    return total * setup.numbers.weight


def _whole(body: Anatomy) -> Anatomy:
    """The same model without adapters, trained."""

    def unfrozen(stack: Stack) -> Stack:
        roles = {
            role: [replace(each, trained=True, rank=0) for each in linears] for role, linears in stack.roles.items()
        }
        outside = tuple(replace(each, trained=True, rank=0) for each in stack.outside)
        convolutions = tuple(replace(each, trained=True) for each in stack.convolutions)
        norms = tuple((width, True) for width, _ in stack.norms)
        return replace(stack, roles=roles, outside=outside, convolutions=convolutions, norms=norms, trained=True)

    n = body.n_parameters - (body.n_trained if body.adapted else 0)
    encoders = {kind: unfrozen(stack) for kind, stack in body.encoders.items()}
    n_tensors = body.n_tensors - (body.n_trained_tensors if body.adapted else 0)
    return replace(
        body,
        decoder=unfrozen(body.decoder),
        encoders=encoders,
        n_parameters=n,
        n_trained=n,
        n_tensors=n_tensors,
        n_trained_tensors=n_tensors,
    )


def _trunk(body: Anatomy, setup: Setup) -> tuple[int, int]:
    """Bytes that decoder and encoders hold, and what comes on top in the backward pass of a layer."""
    numbers, decoder = setup.numbers, body.decoder
    media = setup.media()
    passes = [(decoder, setup.tokens, decoder_attention(setup))]
    held = 0
    for kind, stack in body.encoders.items():
        own = [prompt for prompt in media if prompt.positions and prompt.modality == kind]
        if own and _reached(body, stack, setup):
            passes.append((stack, sum(prompt.positions for prompt in own), encoder_attention(stack, own)))
            held += beside_layers(stack, own, numbers)
    held += setup.tokens * kept_norm(decoder.hidden, decoder.norms[0][1], decoder.layer_norm, numbers)
    in_layer = 0
    for stack, count, attended in passes:
        layer = layer_bytes(stack, count, attended, numbers)
        held += attended.shared_masks * numbers.compute
        if stack.rotary:
            held += 2 * count * stack.head_dim * numbers.stream  # cosines and sines
        if setup.checkpointing and body.adapted:
            held += count * stack.hidden * numbers.stream  # features that are leaves of the graph
        # Gradients on their way through the MLP, and a weight that was in 4 bits
        gradients = numbers.compute * count * (stack.mlp * (2 if stack.gated else 1) + stack.hidden)
        gradients += 2 * max(map(_size, stack.linears)) if setup.quantized else 0
        if setup.checkpointing:
            held += stack.n_layers * count * stack.hidden * numbers.stream
            casts = 2 * sum(map(_size, stack.linears)) if numbers.casts else 0
            in_layer = max(in_layer, layer + gradients + casts)
        else:
            held += stack.n_layers * layer
            in_layer = max(in_layer, gradients)
    return held, in_layer


def _reached(body: Anatomy, stack: Stack, setup: Setup) -> bool:
    """
    Whether a gradient passes an encoder. With LoRA and checkpointing PEFT makes its first features require one, so that it
    does also where nothing is trained.
    """
    return stack.trained or setup.checkpointing and body.adapted


# Memory


def predict(body: Anatomy, setup: Setup) -> dict[str, float]:
    """
    Memory of each GPU.

    Args:
        body ([`Anatomy`]):
            Widths of the model.
        setup ([`Setup`]):
            Setting.

    Returns:
        `dict[str, float]`: Bytes. `weights`, `gradients`, `optimizer`, `critic`, `reference` and `buffers` are always there;
        an update adds `gathered` weights and `activations`, up to `update`; `generation` adds the `cache` and weights that
        are `gathered to sample`, or to score with the reference. `peak` is the larger of the two.
    """
    trained, frozen = body.n_trained, body.n_parameters - body.n_trained
    weights, gradients, optimizer = _states(trained, frozen, body.n_trained_tensors, setup, body.adapted)
    if setup.quantized:
        # bitsandbytes: half a byte, for 64 of them a byte and for 256 * 64 of them a float, and for each tensor two tables
        weights += body.n_quantized * (1 / 2 + 1 / 64 + 4 / (64 * 256) - PRECISIONS["bfloat16"].weight)
        weights += body.n_quantized_tensors * (4 * 16 + 4 * 256 + 4)
    critic = _critic_states(body, setup)
    reference = _reference(body, setup)
    buffers = gathered = gathered_to_sample = 0.0
    if setup.strategy == "ddp":
        buffers = gradients + critic[1]  # buckets
    elif setup.strategy.startswith("zero"):
        buffers = 2 * min(trained, 5e8)  # `reduce_bucket_size`
    if setup.strategy == "fsdp2":
        # A layer and the next, and the gradient of one; the embeddings and the head
        layer = max(stack.parameters for stack in body.stacks)
        gathered = 2 * (3 * layer + (1 if body.tied else 2) * _size(body.head))
        gathered_to_sample = gathered
    elif setup.strategy == "zero3":
        gathered = 2 * min(body.n_parameters, 1e9)  # `stage3_max_live_parameters`
        n_critic = _whole(body).n_parameters if setup.critic == "copy" else 0
        gathered_to_sample = 2 * (body.n_parameters + n_critic)  # `ds3_gather_for_generation`
    states = weights + gradients + optimizer + sum(critic) + reference + buffers
    kept = activations(body, setup).peak
    cache = cache_bytes(body, setup)
    generation = gathered_to_sample + cache
    if reference and setup.strategy == "fsdp2":
        generation = max(generation, 2 * body.n_parameters)  # which TRL shards as one, and gathers as one to score
    result = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "critic": sum(critic),
        "reference": reference,
        "buffers": buffers,
        "gathered": gathered,
        "activations": kept,
        "update": states + gathered + kept,
        "cache": cache,
        "gathered to sample": gathered_to_sample,
        "generation": states + generation,
    }
    return {**result, "peak": max(result["update"], result["generation"])}


def _states(
    trained: int, frozen: int, n_tensors: int, setup: Setup, adapted: bool = False
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and states of AdamW."""
    loaded = PRECISIONS[setup.precision].weight
    if setup.strategy.startswith("zero"):  # DeepSpeed: a copy of what is trained in float32 belongs to the optimizer
        sizes = 2 * (trained + frozen), 2 * trained, 12 * trained
    elif setup.strategy == "fsdp2":  # accelerate makes what is trained float32
        sizes = 4 * trained + loaded * frozen, 4 * trained, 8 * trained
    else:
        own = setup.numbers.adapter if adapted else loaded
        sizes = own * trained + loaded * frozen, own * trained, 2 * own * trained + 4 * n_tensors
    shards = SHARDED.get(setup.strategy, (False,) * 3)
    return tuple(size / (setup.gpus if sharded else 1) for size, sharded in zip(sizes, shards, strict=True))


def _reference(body: Anatomy, setup: Setup) -> float:
    """Bytes of the reference model's weights."""
    if not setup.reference or body.adapted:
        return 0.0
    number = 2 if setup.strategy.startswith("zero") else PRECISIONS[setup.precision].weight
    sharded = setup.strategy in ("zero3", "fsdp2")
    return body.n_parameters * number / (setup.gpus if sharded else 1)


def _critic_states(body: Anatomy, setup: Setup) -> tuple[float, float, float]:
    """Bytes of weights, gradients and states of AdamW of a critic."""
    if setup.critic is None:
        return 0, 0, 0
    trunk = (0, 0, 0)
    if setup.critic == "copy":
        whole = _whole(body)
        head = 0 if body.tied else _size(body.head)  # which a critic hasn't
        trunk = _states(whole.n_parameters - head, 0, whole.n_tensors - (head > 0), setup)
    value_head = 4 * (body.head.inputs + 1)
    return tuple(a + b for a, b in zip(trunk, (value_head, value_head, 2 * value_head + 2 * 4), strict=True))


def cache_bytes(body: Anatomy, setup: Setup) -> int:
    """
    Of keys and values of all completions at the end of their generation, each with its prompt, padded.

    Args:
        body ([`Anatomy`]):
            Widths of the model.
        setup ([`Setup`]):
            Setting.

    Returns:
        `int`: Bytes.
    """
    positions = len(setup.prompts) * (max(map(len, setup.prompts)) + max(setup.lengths) - 1)
    # The cache has the dtype of the keys, and where cosines are float32 these are, too
    return 2 * body.decoder.n_layers * positions * body.decoder.key * setup.numbers.stream


# Operations


def operations(body: Anatomy, setup: Setup) -> dict[str, float]:
    """
    Floating-point operations of a micro-batch, without generation.

    Args:
        body ([`Anatomy`]):
            Widths of the model.
        setup ([`Setup`]):
            Setting.

    Returns:
        `dict[str, float]`: Those of a `forward`, and of the whole `update`.
    """
    totals = dict.fromkeys(("forward", "update"), 0.0)
    parts = setup.parts()
    for part in parts:
        trunks = [_trunk_operations(body, part)]
        if setup.critic == "copy":
            trunks.append(_trunk_operations(_whole(body), part))
        head = 2 * part.scored * _size(body.head)
        totals["forward"] += sum(forward for forward, _ in trunks) + head
        # The head computes its logits again, then the gradients of hidden states and weight
        totals["update"] += sum(update for _, update in trunks) + head * (3 + body.head.trained)
    if len(parts) > 1:
        totals["update"] += totals["forward"]
    if setup.reference:
        totals["update"] += totals["forward"]
    return totals


def _trunk_operations(body: Anatomy, setup: Setup) -> tuple[float, float]:
    """Of decoder and encoders: of a forward, and of forward and backward."""
    forward = update = 0.0
    passes = [(body.decoder, setup.tokens, decoder_attention(setup), True)]
    for kind, stack in body.encoders.items():
        own = [prompt for prompt in setup.media() if prompt.positions and prompt.modality == kind]
        outputs = sum(prompt.positions for prompt in own)
        reached = _reached(body, stack, setup)
        passes.append((stack, outputs, encoder_attention(stack, own), reached))
        tokens = sum(prompt.media_tokens for prompt in own)
        beside = 2 * tokens * sum(map(_size, stack.outside))
        for each in reversed(stack.convolutions):
            beside += 2 * outputs * each.inputs * each.kernel * each.outputs
            outputs *= each.stride
        forward += beside
        update += beside * (3 if stack.trained else 1 + reached)
    for stack, count, attended, reached in passes:
        products = 2 * count * sum(map(_size, stack.linears))
        of_trained = 2 * count * sum(_size(linear) for linear in stack.linears if linear.trained)
        adapters = 2 * count * sum(linear.rank * (linear.inputs + linear.outputs) for linear in stack.linears)
        attention = 4 * attended.pairs * stack.query
        once = products + adapters + attention
        # Of each product the gradients of input and weight; attention computes its scores again
        backward = reached * (products + of_trained + 2 * adapters + 2.5 * attention)
        forward += stack.n_layers * once
        # A layer isn't computed again to its end, but to the last input that it kept
        out_of_mlp = 2 * count * stack.mlp * stack.hidden
        again = (setup.checkpointing and reached) * (once - out_of_mlp)
        update += stack.n_layers * (once + again + backward)
    return forward, update


# Measurements


class LiveBytes(TorchDispatchMode):
    """
    Bytes of what was made within the context and is still alive, each storage once: `now`, and the `peak`.

    On a GPU this is what `torch.cuda.memory_allocated` and `torch.cuda.max_memory_allocated` add.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {self._key(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and self._key(tensor) not in known | self._sizes.keys():
                storage = tensor.untyped_storage()
                self._sizes[self._key(tensor)] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, self._key(tensor))
        return result

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata


class Watched:
    """
    A trainer that gets completions of 20 to 64 tokens instead of sampling them, and remembers each micro-batch.

    `watch` says of each micro-batch what is watched, `"memory"`, `"operations"` or `"time"`: counting operations keeps
    tensors alive, and both take time. `moments` are the results: the `batch`, the bytes of activations `held` where a backward
    pass starts and at the `peak`, the `operations`, the `seconds` of CPU time, and the bytes of `weights` and `gradients`.
    """

    watch: Sequence[str] = ("operations", "memory")

    def __init__(self, *args, **kwargs):
        self.moments: list[SimpleNamespace] = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        rng = np.random.default_rng(0)
        lengths = rng.integers(policy_update.SHORTEST, policy_update.LONGEST + 1, len(prompt_ids))
        return [rng.integers(50, 200, length).tolist() for length in lengths], None

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        self._live, self._counter = LiveBytes(), _counter()
        self._held, self._start = 0, time.process_time()
        what = self.watch[len(self.moments) % len(self.watch)]
        self._watching.enter_context({"memory": self._live, "operations": self._counter}.get(what, nullcontext()))
        self._batch = inputs
        return inputs

    def training_step(self, *args, **kwargs):
        backward = self.accelerator.backward

        def watched(*inputs, **options):
            self._held = max(self._held, self._live.now)
            return backward(*inputs, **options)

        self.accelerator.backward = watched
        try:
            with ExitStack() as self._watching:
                loss = super().training_step(*args, **kwargs)
                seconds = time.process_time() - self._start
        finally:
            self.accelerator.backward = backward
        self.moments.append(
            SimpleNamespace(
                batch=self._batch,
                held=self._held,
                peak=self._live.peak,
                operations=self._counter.get_total_flops(),
                seconds=seconds,
                weights=sum(map(_bytes, self.model.parameters())),
                gradients=sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None),
            )
        )
        return loss


class WatchedGRPO(Watched, MultimodalGRPOTrainer):
    """GRPO."""


class WatchedPPO(Watched, MultimodalPPOTrainer):
    """PPO."""


def _counter() -> FlopCounterMode:
    """Counts what PyTorch's own list leaves out, too: attention on a CPU, and products that add to a tensor."""

    def attention(query, key, *args, out_shape=None, **kwargs):
        return 4 * int(np.prod(query)) * key[-2]

    def attention_backward(gradient, query, key, *args, out_shape=None, **kwargs):
        return 10 * int(np.prod(query)) * key[-2]

    def added(into, a, b, *args, out_shape=None, **kwargs):
        return 2 * a[0] * a[1] * b[1]

    aten = torch.ops.aten
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: attention,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
            aten.addmm_: added,
        },
    )


@dataclass(frozen=True)
class Case:
    """
    A tiny run to compare with.

    Args:
        options (`dict`, *optional*):
            Arguments of the trainer's config; without any, 2 prompts with 4 completions each are packed.
        modality (`str`, *optional*, defaults to `"image"`):
            What prompts hold, `"image"` or `"audio"`.
        image_size (`tuple[int, int]`, *optional*, defaults to `(280, 140)`):
            Width and height of images in pixels; 28 x 28 make a token.
        precision (`str`, *optional*, defaults to `"float32"`):
            See [`Setup`].
        lora (`str`, *optional*):
            See [`lora_config`].
        quantized (`bool`, *optional*, defaults to `False`):
            See [`Setup`].
        critic (`str`, *optional*):
            See [`Setup`].
    """

    options: dict = field(default_factory=dict)
    modality: str = "image"
    image_size: tuple[int, int] = (280, 140)
    precision: str = "float32"
    lora: str | None = None
    quantized: bool = False
    critic: str | None = None


PADDED, CHECKPOINTING = {"packing": "padded"}, {"gradient_checkpointing": True}
BUDGET, LONG = {"max_tokens_per_microbatch": 400}, {"image_size": (784, 280)}

CASES = {
    "padded": Case(PADDED),
    "packed": Case(),
    "packed, groups of 8": Case({"num_generations": 8}),
    "padded, long prompts": Case(PADDED, **LONG),
    "packed, long prompts": Case(**LONG),
    "padded, checkpointing": Case({**PADDED, **CHECKPOINTING}),
    "packed, checkpointing": Case(CHECKPOINTING),
    "packed, budget": Case(BUDGET),
    "packed, budget, checkpointing": Case({**BUDGET, **CHECKPOINTING}),
    "packed, bfloat16": Case(precision="bfloat16"),
    "packed, mixed": Case(precision="mixed"),
    "packed, mixed, checkpointing": Case(CHECKPOINTING, precision="mixed"),
    "LoRA on q, v": Case(lora="q_proj,v_proj"),
    "LoRA on q, v, checkpointing": Case(CHECKPOINTING, lora="q_proj,v_proj"),
    "LoRA on all, bfloat16": Case(lora="all-linear", precision="bfloat16"),
    "QLoRA on q, v": Case(lora="q_proj,v_proj", quantized=True, precision="bfloat16"),
    "PPO, critic": Case(critic="copy"),
    "PPO, shared trunk": Case(critic="shared_trunk"),
    "audio, padded": Case(PADDED, modality="audio"),
    "audio, packed": Case(modality="audio"),
    "audio, packed, checkpointing": Case(CHECKPOINTING, modality="audio"),
    "audio, packed, mixed": Case(modality="audio", precision="mixed"),
}

# The text decoder of tiny models
DECODER = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def _image_model(size: tuple[int, int]):
    """A Qwen2.5-VL of 4 million parameters, its processor, and rows."""
    processor = policy_update.build_processor()
    preset = policy_update.Preset(
        text={**DECODER, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}},
        vision={
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_heads": 4,
            "out_hidden_size": 256,
            "fullatt_block_indexes": [3],
        },
    )
    rows = policy_update.build_dataset(policy_update.Case(prompts=1, group=1, image_size=size), 4, 0)
    return policy_update.build_model(preset, processor, "cpu", 0), processor, rows


def _audio_model():
    """A Qwen2-Audio of 4 million parameters, its processor, and rows with audio of 4 seconds."""
    question = "What is said in the audio?"
    named = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *named.values()]
    trainer = trainers.BpeTrainer(
        special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([question] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        extra_special_tokens=named,
    )
    template = policy_update.TEMPLATE.replace("'image'", "'audio'").replace(
        "<|vision_start|><|image_pad|><|vision_end|>", "<|audio_bos|><|AUDIO|><|audio_eos|>"
    )
    features = WhisperFeatureExtractor(feature_size=80, chunk_length=6)
    processor = Qwen2AudioProcessor(features, tokenizer, chat_template=template)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "d_model": 128,
            "encoder_layers": 4,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 512,
            "num_mel_bins": 80,
            "max_source_positions": 300,
        },
        text_config={"model_type": "qwen2", "vocab_size": len(tokenizer), **DECODER, **ends},
        audio_token_index=tokenizer.audio_token_id,
    )
    torch.manual_seed(0)
    model = Qwen2AudioForConditionalGeneration(config)
    for key, value in ends.items():
        setattr(model.generation_config, key, value)
    sound = np.random.default_rng(0).standard_normal(4 * 16000).astype(np.float32)
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{question} {i}"}]} for i in range(4)])
    rows = rows.with_transform(
        lambda batch: {**batch, "audio": [{"array": sound, "sampling_rate": 16000} for _ in batch["prompt"]]}
    )
    return model, processor, rows


def build_trainer(case: Case, folder: str) -> Watched:
    """
    The trainer of a case, with a model of 4 million parameters.

    Args:
        case ([`Case`]):
            What to train.
        folder (`str`):
            Where it may write.

    Returns:
        [`Watched`]: The trainer.
    """
    model, processor, rows = _image_model(case.image_size) if case.modality == "image" else _audio_model()
    if case.precision == "bfloat16":
        model = model.to(torch.bfloat16)
    if case.quantized:
        model.to(torch.bfloat16).save_pretrained(folder)
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        model = type(model).from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=quantization, device_map="cpu"
        )
    options = dict(case.options)
    group = options.setdefault("num_generations", 4)
    trainer_class, config_class = WatchedGRPO, MultimodalGRPOConfig
    if case.critic is not None:
        trainer_class, config_class = WatchedPPO, MultimodalPPOConfig
        options |= {"num_ppo_epochs": 1, "shared_trunk": case.critic == "shared_trunk"}
    config = config_class(
        output_dir=folder,
        per_device_train_batch_size=2 * group,
        gradient_accumulation_steps=2,  # in the second micro-batch there are gradients already
        max_steps=1,
        max_completion_length=policy_update.LONGEST,
        use_cpu=True,
        bf16=case.precision != "float32",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        self_check=False,
        **{"gradient_checkpointing": False, **options},
    )
    adapters = {} if case.lora is None else {"peft_config": lora_config(model, case.lora)}
    trainer = trainer_class(model, policy_update.reward, config, rows, processing_class=processor, **adapters)
    trainer.remove_callback(PrinterCallback)
    return trainer


def setup_of(case: Case, trainer: Watched, batch: dict) -> Setup:
    """
    The setting of a micro-batch, for a prediction.

    Args:
        case ([`Case`]):
            What was trained.
        trainer ([`Watched`]):
            The trainer.
        batch (`dict`):
            The micro-batch.

    Returns:
        [`Setup`]: The setting.
    """
    config, prompts = trainer.model.config, {}
    placeholder = config.image_token_id if case.modality == "image" else config.audio_token_id
    for encoded in batch["encoded_prompts"]:
        media = encoded.media
        # Two mel frames make a position
        positions = len(media["pixel_values"]) if case.modality == "image" else media["input_features"].shape[-1] // 2
        media_tokens = int((encoded.input_ids == placeholder).sum())
        prompts[encoded] = Prompt(len(encoded), media_tokens, positions, case.modality)
    return Setup(
        prompts=[prompts[encoded] for encoded in batch["encoded_prompts"]],
        lengths=batch["completion_mask"].sum(1).tolist(),
        precision=case.precision,
        packed=batch["packed"][0],
        checkpointing=trainer.args.gradient_checkpointing,
        max_tokens=trainer.args.max_tokens_per_microbatch,
        critic=case.critic,
        quantized=case.quantized,
        cuda=False,
        tile=trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE,
    )


@contextmanager
def small_tile():
    """
    Within the context, TRL's LM head takes 512 columns of logits at once. Its 32768 are allocated be they there or not, and
    would be most of a tiny model's memory.
    """
    before = trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE
    trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = 512
    try:
        yield
    finally:
        trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = before


def _bytes(parameter: nn.Parameter) -> int:
    """With what bitsandbytes keeps beside a weight in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.nbytes
    beside = [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    return parameter.nbytes + sum(tensor.nbytes for tensor in beside)


def check(case: Case) -> dict[str, tuple[float, float]]:
    """
    Trains a tiny model for a step, and predicts it.

    Args:
        case ([`Case`]):
            What to train.

    Returns:
        `dict[str, tuple[float, float]]`: Predicted and measured: bytes of `weights`, `gradients`, `optimizer`,
        `activations` where the backward pass starts, the `peak` of the update and the `cache` of generation, and
        `operations`.
    """
    with tempfile.TemporaryDirectory() as folder, small_tile():
        trainer = build_trainer(case, folder)
        trainer.train()
        counted, watched = trainer.moments
        setup, counted_setup = (setup_of(case, trainer, moment.batch) for moment in (watched, counted))
    policy = trainer._unwrapped(trainer.model).eval()
    body = anatomy(meta_model(policy.config, type(policy), case.lora))
    states, critics = predict(body, setup), _critic_states(body, setup)
    predicted = activations(body, setup)
    with torch.no_grad():
        output = generate_completions(
            policy,
            policy,
            watched.batch["encoded_prompts"],
            transformers.GenerationConfig(
                max_new_tokens=20, min_new_tokens=20, return_dict_in_generate=True, eos_token_id=0, pad_token_id=0
            ),
            0,
            trainer.accelerator.device,
        )
    keys_and_values = [tensor for layer in output.past_key_values.layers for tensor in (layer.keys, layer.values)]
    optimizer = [value for state in trainer.optimizer.state.values() for value in state.values()]
    result = {
        "weights": (states["weights"] + critics[0], watched.weights),
        "gradients": (states["gradients"] + critics[1], watched.gradients),
        "optimizer": (states["optimizer"] + critics[2], sum(value.nbytes for value in optimizer)),
        "activations": (predicted.held, watched.held),
        "peak": (predicted.peak, watched.peak),
        "cache": (
            cache_bytes(body, replace(setup, lengths=[20] * len(setup.lengths))),
            sum(t.nbytes for t in keys_and_values),
        ),
    }
    if not case.quantized:  # PyTorch counts no products with weights in 4 bits
        result["operations"] = operations(body, counted_setup)["update"], counted.operations
    return result


# Output


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """
    A table.

    Args:
        header (`Sequence[str]`):
            Titles of the columns.
        rows (`Sequence[Sequence[str]]`):
            The cells.

    Returns:
        `str`: The table in Markdown.
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def check_row(name: str, result: dict[str, tuple[float, float]]) -> list[str]:
    """
    A case in words.

    Args:
        name (`str`):
            Its name.
        result (`dict[str, tuple[float, float]]`):
            What [`check`] returned.

    Returns:
        `list[str]`: The cells of its row.
    """
    cells = [name]
    for quantity in ("weights", "gradients", "optimizer", "cache"):
        predicted, measured = result[quantity]
        cells.append("exact" if predicted == measured else f"{predicted / measured - 1:+.2%}")
    for quantity in ("activations", "peak"):
        predicted, measured = result[quantity]
        cells += [f"{predicted / MIB:.1f}", f"{measured / MIB:.1f}", f"{predicted / measured - 1:+.1%}"]
    predicted, measured = result.get("operations", (0, 0))
    cells.append(f"{predicted / measured - 1:+.1%}" if measured else "–")
    return cells


CHECK_HEADER = (
    "run",
    *("weights", "gradients", "optimizer", "KV cache"),
    *("activations, MiB predicted", "measured", "error"),
    *("peak, MiB predicted", "measured", "error"),
    "operations",
)

# Titles of what a size is trained with in the table of predictions, and the arguments of its setting
METHODS = {
    "one GPU, or DDP": {"strategy": "ddp", "precision": "mixed"},
    "ZeRO-1": {"strategy": "zero1"},
    "ZeRO-2": {"strategy": "zero2"},
    "ZeRO-3": {"strategy": "zero3"},
    "FSDP2": {"strategy": "fsdp2", "precision": "mixed"},
    "LoRA, one GPU or DDP": {"strategy": "ddp", "lora": "all-linear"},
    "LoRA, FSDP2": {"strategy": "fsdp2", "lora": "all-linear"},
    "QLoRA, one GPU or DDP": {"strategy": "ddp", "lora": "all-linear", "quantized": True},
}

# Of the memory of a GPU, what a prediction may take: CUDA, NCCL and fragmentation need the rest
USABLE = 0.9


def workload(args: argparse.Namespace, **changes) -> Setup:
    """
    The setting that the command line asks for.

    Args:
        args (`argparse.Namespace`):
            Parsed command line.
        changes:
            Arguments of [`Setup`] that differ.

    Returns:
        [`Setup`]: The setting.
    """
    n_prompts = changes.pop("n_prompts", args.prompts)
    positions = 4 * args.media_tokens if args.positions is None else args.positions
    prompts = [Prompt(args.prompt_tokens, args.media_tokens, positions, args.modality) for _ in range(n_prompts)]
    return Setup(
        **{
            "prompts": [prompt for prompt in prompts for _ in range(args.group)],
            "lengths": [args.completion_tokens] * (n_prompts * args.group),
            "precision": args.precision,
            "packed": args.packing == "prefix",
            "checkpointing": not args.no_checkpointing,
            "max_tokens": args.max_tokens,
            "strategy": args.strategy,
            "gpus": args.gpus,
            "reference": args.reference,
            "critic": args.critic,
            "quantized": args.quantized,
            **changes,
        }
    )


def _body(size: str, lora: str | None = None) -> Anatomy:
    """Of a published size, or of a folder with a config."""
    if size in SIZES:
        return anatomy(meta_model(published_config(size), Qwen2_5_VLForConditionalGeneration, lora))
    config = AutoConfig.from_pretrained(size)
    return anatomy(meta_model(config, getattr(transformers, config.architectures[0]), lora))


def _gib(number: float) -> str:
    return f"{number / GIB:.1f}"


def _fit(number: float) -> str:
    """GiB, and which GPU has them."""
    if number <= USABLE * 80 * GIB:
        return f"**{number / GIB:.0f}**"
    return f"{number / GIB:.0f}" if number <= USABLE * 140 * GIB else f"({number / GIB:.0f})"


def prediction_table(args: argparse.Namespace) -> str:
    """
    Memory of the published sizes on 1, 8 and 64 GPUs.

    Args:
        args (`argparse.Namespace`):
            Parsed command line.

    Returns:
        `str`: The table.
    """
    bodies = {(size, lora): _body(size, lora) for size in SIZES for lora in (None, "all-linear")}
    rows = []
    for size in SIZES:
        for gpus in (1, 8, 64):
            row = [f"{size.upper()}, {gpus}"]
            for options in METHODS.values():
                changes = {"gpus": gpus, "precision": "bfloat16", **options}
                lora = changes.pop("lora", None)
                if gpus == 1:
                    if changes["strategy"] != "ddp":
                        row.append("")
                        continue
                    changes["strategy"] = "single"
                row.append(_fit(predict(bodies[size, lora], workload(args, **changes))["peak"]))
            rows.append(row)
    return markdown(["model, GPUs", *METHODS], rows)


def option_table(args: argparse.Namespace) -> str:
    """
    What options change: 7B on 8 GPUs, 4 prompts in a micro-batch.

    Args:
        args (`argparse.Namespace`):
            Parsed command line.

    Returns:
        `str`: The table.
    """
    budget = args.prompt_tokens + args.group * args.completion_tokens
    base = {"n_prompts": 4, "gpus": 8, "strategy": "fsdp2", "precision": "mixed"}
    settings = {
        "FSDP2, prefix sharing, checkpointing": {},
        "padded rows": {"packed": False},
        "no checkpointing": {"checkpointing": False},
        "padded rows, no checkpointing": {"packed": False, "checkpointing": False},
        f"`max_tokens_per_microbatch={budget}`": {"max_tokens": budget},
        f"`max_tokens_per_microbatch={budget}`, no checkpointing": {"max_tokens": budget, "checkpointing": False},
        "a reference (`beta` above 0)": {"reference": True},
        "PPO, `shared_trunk=True`": {"critic": "shared_trunk"},
        "PPO, a critic of its own": {"critic": "copy"},
        "LoRA on all linear layers": {"lora": "all-linear", "precision": "bfloat16"},
        "LoRA, DDP": {"lora": "all-linear", "precision": "bfloat16", "strategy": "ddp"},
        "QLoRA, DDP": {"lora": "all-linear", "precision": "bfloat16", "strategy": "ddp", "quantized": True},
    }
    rows = []
    for name, changes in settings.items():
        changes = {**base, **changes}
        body = _body("7b", changes.pop("lora", None))
        setup = workload(args, **changes)
        result = predict(body, setup)
        states = ("weights", "gradients", "optimizer", "critic", "reference", "buffers")
        rows.append(
            [
                name,
                _gib(sum(result[part] for part in states)),
                _gib(result["gathered"]),
                _gib(result["activations"]),
                _gib(result["update"]),
                _gib(result["generation"]),
                f"{operations(body, setup)['update'] / 1e15:.1f}",
            ]
        )
    header = ("setting", "states", "gathered", "activations", "update", "generation", "PFLOP of an update")
    return markdown(header, rows)


def operation_table(args: argparse.Namespace) -> str:
    """
    Operations of an update of one micro-batch with padded rows and with a shared prefix.

    Args:
        args (`argparse.Namespace`):
            Parsed command line.

    Returns:
        `str`: The table.
    """
    rows = []
    for size in SIZES:
        body, row, totals = _body(size), [size.upper()], []
        for packed in (False, True):
            setup = workload(args, packed=packed)
            totals.append(operations(body, setup)["update"])
            seconds = totals[-1] / (args.tflops * 1e12 * args.utilisation)
            row += [f"{setup.tokens:,}", f"{totals[-1] / 1e15:.2f}", f"{seconds:.1f}"]
        rows.append([*row, f"**{totals[0] / totals[1]:.1f}x**"])
    titles = [f"{rows_}: {what}" for rows_ in ("padded", "shared") for what in ("tokens", "PFLOP", "seconds")]
    return markdown(["model", *titles, "padded / shared"], rows)


def breakdown(args: argparse.Namespace) -> str:
    """
    Where the bytes of one setting go.

    Args:
        args (`argparse.Namespace`):
            Parsed command line.

    Returns:
        `str`: The table.
    """
    body, setup = _body(args.model, args.lora), workload(args)
    result = predict(body, setup)
    rows = [[name, _gib(number)] for name, number in result.items()]
    kept = activations(body, setup)
    inside = {
        "held where the backward pass starts": kept.held,
        "largest layer, on top": kept.in_layer,
        "LM head, on top": kept.in_head,
        "media": media_bytes(body, setup),
    }
    place = [row[0] for row in rows].index("activations") + 1
    rows[place:place] = [[f"- {name}", _gib(number)] for name, number in inside.items()]
    update = operations(body, setup)["update"]
    rows.append(["PFLOP of an update", f"{update / 1e15:.2f}"])
    rows.append(
        [
            f"seconds at {args.utilisation:.0%} of {args.tflops:g} TFLOP/s",
            f"{update / (args.tflops * 1e12 * args.utilisation):.1f}",
        ]
    )
    parameters = f"{body.n_parameters:,} parameters, {body.n_trained:,} trained"
    return markdown([parameters, "GiB"], rows)


def main(argv: Sequence[str] | None = None) -> dict | None:
    """
    Command line of the model.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments; those of the process by default.

    Returns:
        `dict` or `None`: With `--check`, for each case what [`check`] returns.
    """
    parser = argparse.ArgumentParser(
        description=__doc__.strip().split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with tiny runs on this machine's CPU")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="runs of --check"
    )
    parser.add_argument("--model", help=f"{', '.join(SIZES)} or a folder with a config: show where its bytes go")
    parser.add_argument(
        "--prompt-tokens", type=int, default=1152, help="tokens of a prompt, those of its medium included"
    )
    parser.add_argument("--media-tokens", type=int, default=1024, help="tokens of its medium")
    parser.add_argument(
        "--positions", type=int, help="positions of the encoder, 4 for each of those tokens if not given"
    )
    parser.add_argument("--modality", choices=("image", "audio"), default="image")
    parser.add_argument("--completion-tokens", type=int, default=1024)
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--prompts", type=int, default=1, help="prompts of a micro-batch on each GPU")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--packing", choices=("prefix", "padded"), default="prefix")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--max-tokens", type=int, help="`max_tokens_per_microbatch`")
    parser.add_argument("--strategy", choices=STRATEGIES, default="single")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--lora", help="ends of the names of layers with an adapter, or all-linear")
    parser.add_argument("--quantized", action="store_true", help="frozen layers in 4 bits")
    parser.add_argument("--reference", action="store_true", help="a reference model scores, too")
    parser.add_argument("--critic", choices=("copy", "shared_trunk"), help="of PPO")
    parser.add_argument("--tflops", type=float, default=989, help="of a GPU in bfloat16; an H100's by default")
    parser.add_argument("--utilisation", type=float, default=0.4, help="share of them that is assumed to be reached")
    parser.add_argument("--json", action="store_true", help="print the result of --check as JSON in the last line")
    args = parser.parse_args(argv)
    if args.quantized and args.lora is None:
        parser.error("`--quantized` holds frozen layers in 4 bits; say with `--lora` what is trained")
    if args.check:
        results = {}
        for name in args.cases:
            results[name] = check(CASES[name])
            print(f"{name}: {', '.join(check_row(name, results[name])[1:])}", file=sys.stderr)
        print(markdown(CHECK_HEADER, [check_row(name, result) for name, result in results.items()]))
        if args.json:
            machine = {"hardware": hardware(), "versions": versions("trl", "transformers", "torch", "peft")}
            print(json.dumps({"cases": results, **machine}))
        return results
    print("Prediction, not measured on a GPU\n")
    if args.model is not None:
        print(breakdown(args))
    else:
        for table in (prediction_table, option_table, operation_table):
            print(f"{table(args)}\n")
    return None


if __name__ == "__main__":
    main()
