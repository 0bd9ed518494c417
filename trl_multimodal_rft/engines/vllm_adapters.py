# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""LoRA adapters in vLLM, on top of weights that aren't trained."""

import json
import shutil
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers.utils import is_peft_available
from trl.distributed import DistributedBackend

from ..models.quantization import is_4bit
from ..models.wrapped import unwrapped
from .vllm_requests import answer_of, refusal, until_answered
from .vllm_weights import checkpoint_layer


if is_peft_available():
    from peft import LoraConfig, PeftConfig, PeftModel
    from peft.tuners.lora import LoraLayer, ParamWrapper
    from peft.utils.integrations import dequantize_bnb_weight

_LOAD = "/v1/load_lora_adapter"
_UNLOAD = "/v1/unload_lora_adapter"
# Option that merges an adapter into the weights
MERGED = "`vllm_engine_kwargs={'enable_lora': False}`"
# LoRA ranks that vLLM supports
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class EngineAdapter:
    """
    LoRA adapter of a policy, for vLLM. If `is_unmerged`, the engine has the base weights, and gets up to `versions` of
    the adapter separately; otherwise weights with it merged in, only for 4-bit weights, which are dequantized in both
    cases.
    """

    def __init__(self, model: "PeftModel", accelerator: Accelerator, is_unmerged: bool = True, versions: int = 1):
        self._dist = DistributedBackend(accelerator)
        self._base = base = unwrapped(accelerator, model)
        self.is_unmerged = is_unmerged
        self.versions = versions
        self.is_4bit = is_4bit(base)
        if not is_peft_model(model):
            raise ValueError(
                "`enable_lora` of `vllm_engine_kwargs` needs an adapter; pass `peft_config`, or remove `enable_lora`."
            )
        if self._dist.is_fsdp:
            raise self._error("the adapter is sharded by FSDP", "train with DeepSpeed or DDP")
        if len(model.active_adapters) > 1:
            raise self._error(
                f"several adapters are active ({', '.join(model.active_adapters)})", "activate only one adapter"
            )
        [self._name] = model.active_adapters
        self._check_config(model.peft_config[self._name])
        self._layers: dict[str, Any] = {}  # adapted layers by their names in the checkpoint
        for name, layer in base.named_modules():
            if isinstance(layer, LoraLayer) and self._name in layer.r:
                checkpoint_name = checkpoint_layer(base, name) if self._is_supported(layer) else None
                if checkpoint_name is None:
                    layer_type = type(layer.get_base_layer()).__name__
                    raise self._error(
                        f"it doesn't support the adapter of the layer '{name}' ({layer_type})",
                        "leave it out of `target_modules`",
                    )
                self._layers[checkpoint_name] = layer
        adapter_ids = {*map(id, chain.from_iterable(self._weight_pairs()))}
        trained_names = [
            name for name, weight in base.named_parameters() if weight.requires_grad and id(weight) not in adapter_ids
        ]
        if trained_names:
            raise self._error(
                f"other weights are trained, too, such as '{trained_names[0]}'", "freeze all weights but the adapter's"
            )

    def _is_supported(self, layer: "LoraLayer") -> bool:
        wraps_linear = isinstance(layer.get_base_layer(), nn.Linear) and not isinstance(layer, ParamWrapper)
        return wraps_linear and self._name not in layer.lora_variant and not layer.lora_bias[self._name]

    def _weight_pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Returns `lora_A` `(rank, in_features)` and `lora_B` `(out_features, rank)` of each layer."""
        return [(layer.lora_A[self._name].weight, layer.lora_B[self._name].weight) for layer in self._layers.values()]

    def _check_config(self, config: "PeftConfig") -> None:
        if getattr(config.peft_type, "value", config.peft_type) != "LORA":
            raise self._error(f"`peft_config` is a {type(config).__name__}", "pass a `LoraConfig`")
        for option in ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias"):
            value = getattr(config, option)
            if value:
                raise self._error(f"its config has `{option}={value!r}`", "remove this option")
        bias = cast("LoraConfig", config).bias
        if bias != "none":
            raise self._error(f"its config has `bias={bias!r}`", "remove this option")

    def _error(self, reason: str, remedy: str) -> ValueError:
        merged = f"{MERGED}, which merges it into the weights at each sync"
        alternative = "`use_vllm=False`" if self.is_4bit else merged
        return ValueError(f"vLLM can't take the adapter: {reason}; {remedy}, or set {alternative}.")

    @property
    def engine_kwargs(self) -> dict[str, Any]:
        """Arguments that the engine must be started with."""
        # The adapter was trained on dequantized 4-bit weights. The engine gets these, and must not quantize them again
        unquantized = {"quantization": None} if self.is_4bit else {}
        if not self.is_unmerged:
            return unquantized
        rank = max(layer.r[self._name] for layer in self._layers.values())
        if rank > _LORA_RANKS[-1]:
            raise self._error(f"its rank is {rank}", f"lower it to {_LORA_RANKS[-1]}")
        options = {"enable_lora": True, "max_lora_rank": min(r for r in _LORA_RANKS if r >= rank)}
        options["max_loras"] = self.versions
        decoder = {id(module) for module in self._base.get_decoder().modules()}
        head = self._base.get_output_embeddings()
        if any(
            id(adapted_layer) not in decoder and adapted_layer is not head for adapted_layer in self._layers.values()
        ):
            options["enable_tower_connector_lora"] = True
        return {**options, **unquantized}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields weights for the engine: base weights if `is_unmerged`, else weights with the adapter merged in."""
        adapted_layers = {id(layer.get_base_layer().weight): layer for layer in self._layers.values()}
        for name, parameter in self._base.named_parameters():
            if "lora_" in name:
                continue
            with self._dist.gather_params([parameter]):
                weight = parameter.data
                if type(parameter).__name__ == "Params4bit":
                    weight = dequantize_bnb_weight(parameter)
                if not self.is_unmerged and id(parameter) in adapted_layers:
                    weight = weight + adapted_layers[id(parameter)].get_delta_weight(self._name).to(weight)
                yield name.replace("base_layer.", ""), weight

    def write(self, folder: str | Path | None) -> None:
        """Writes the adapter in vLLM's format, if there is a `folder`. With ZeRO-3 all ranks must call this."""
        tensors = {}
        with self._dist.gather_params([*chain.from_iterable(self._weight_pairs())]):
            if folder is None:
                return
            # `down` is `lora_A`, and `up` is `lora_B`
            for (name, layer), (down, up) in zip(self._layers.items(), self._weight_pairs(), strict=True):
                # The saved `lora_B` includes its layer's scale, since vLLM has one scale for all layers:
                # `lora_alpha / r`, which is 1 in the config below
                scaled = up.data * layer.scaling[self._name]
                tensors[f"base_model.model.{name}.lora_A.weight"] = down.data.cpu().contiguous()
                tensors[f"base_model.model.{name}.lora_B.weight"] = scaled.cpu().contiguous()
        rank = max(layer.r[self._name] for layer in self._layers.values())
        targets = sorted({name.rpartition(".")[2] for name in self._layers})
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
        Path(folder, "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, Path(folder, "adapter_model.safetensors"))

    def replace_on_servers(self, clients: Sequence[Any], folder: Path, old_folders: Sequence[Path]) -> None:
        """Loads the adapter in `folder` into servers. Unloads adapters in `old_folders`, and deletes their files."""
        for client in clients:
            try:
                arguments = client.base_url, folder, client.timeout
                problem = until_answered(
                    lambda _, arguments=arguments: load_adapter(*arguments), client.timeout, client.warn
                )
            except RuntimeError as error:
                problem = str(error)
            if problem is not None:
                flags = [
                    f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
                    for name, value in self.engine_kwargs.items()
                    if value is not None
                ]
                raise RuntimeError(
                    f"{problem} Start the server with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True` and "
                    f"`{' '.join(flags)}`, so that it can read '{folder}', or set {MERGED}."
                )
            for old_folder in old_folders:
                unloaded = client.answer(_UNLOAD, {"lora_name": old_folder.name})
                if unloaded.status not in (200, 404):  # a restarted server doesn't know the adapter
                    raise refusal(unloaded, client.base_url, _UNLOAD)
        for old_folder in old_folders:
            shutil.rmtree(old_folder)


def load_adapter(url: str, folder: Path, seconds: float) -> str | None:
    """
    Loads an adapter into a server, unless the server has it. Returns the reason of a failure, else `None`.
    Raises a [`RequestLost`] if the server doesn't answer.
    """
    answer = answer_of(url, _LOAD, {"lora_name": folder.name, "lora_path": str(folder)}, seconds=seconds)
    is_loaded = answer.status == 200 or b"already been loaded" in answer.body
    return None if is_loaded else str(refusal(answer, url, _LOAD))
