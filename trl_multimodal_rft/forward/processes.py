# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Forwards that processes must run alike, because their engine makes them wait for each other."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from ..encoding.dummies import dummy_prompt
from ..encoding.prompts import EncodedPrompt
from ..families import MODALITIES
from ..models.towers import find_tower
from ..models.wrapped import is_unsharded, unwrapped
from .layout import split_samples


class Processes:
    """
    Gives each process the forwards, and the media, that the others have.

    Args:
        accelerator ([`~accelerate.Accelerator`], *optional*):
            The processes. By default there is one.
        processor ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's processor, which several processes need.
    """

    def __init__(self, accelerator: Accelerator | None, processor: Any = None):
        self.accelerator = accelerator
        self.processor = processor
        self._companions: dict[str, EncodedPrompt] = {}
        self._trained: tuple[nn.Module, set[str]] | None = None  # a wrapped model and its encoders to train
        self._used: set[str] = set()  # kinds whose encoders got a gradient on any process

    def dummies(
        self, model: nn.Module, prompts: Sequence[EncodedPrompt], beside_others: bool = False
    ) -> list[EncodedPrompt]:
        """
        Prompts with media of the kinds that this process lacks, where processes wait for each other's encoders:
        sharded weights are gathered, and gradients reduced, on all of them alike.
        """
        if self.accelerator is None or self.accelerator.num_processes == 1:
            return []
        own = kinds_of(prompts)
        if not is_unsharded(self.accelerator):
            held = torch.tensor([[kind in own for kind in MODALITIES]], device=self.accelerator.device)
            everyone = self.accelerator.gather(held).any(0).tolist()
            needed = {kind for kind, any_has in zip(MODALITIES, everyone, strict=True) if any_has}
            if torch.is_grad_enabled() and is_deepspeed_zero3_enabled():
                # It takes a gradient of the past where an encoder gets none
                encoders = _encoders(needed)
                self._used |= encoders
                needed |= (self._used - encoders) & self._encoders_to_train(model)
        elif torch.is_grad_enabled() and isinstance(model, DistributedDataParallel) and not beside_others:
            # Where it looks for weights without a gradient, it also reduces those that only an earlier forward used
            needed = set() if model.find_unused_parameters else self._encoders_to_train(model)
            own = _encoders(own)
        else:
            return []
        return [self._dummy(kind, model) for kind in sorted(needed - own)]

    def n_forwards(
        self,
        prompts: Sequence[EncodedPrompt],
        isolate: Literal["media", "prompt"] | None,
        dummies: Sequence[EncodedPrompt] = (),
    ) -> int:
        """Number of forwards on the rank that has most."""
        parts = split_samples(prompts, isolate)
        if isolate is None or self.accelerator is None or self.accelerator.num_processes == 1:
            return len(parts)
        if is_unsharded(self.accelerator) and not torch.is_grad_enabled():  # nobody waits
            return len(parts)
        device = self.accelerator.device
        count = int(self.accelerator.gather(torch.tensor([len(parts)], device=device)).max())
        if not is_unsharded(self.accelerator):
            kinds = [kinds_of([*(prompts[i] for i in part), *dummies]) for part in parts]
            kinds += kinds[-1:] * (count - len(kinds))
            forwards = torch.tensor([[[kind in each for kind in MODALITIES] for each in kinds]], device=device)
            everyone = self.accelerator.gather(forwards)
            if (everyone != everyone[0]).any():
                raise ValueError(
                    "Processes hold media of different kinds, and this model takes prompts apart, so that their "
                    "forwards would wait for each other forever under FSDP or DeepSpeed. Use DDP, or batches of "
                    "one kind."
                )
        return count

    def _dummy(self, kind: str, model: nn.Module) -> EncodedPrompt:
        if kind not in self._companions:
            self._companions[kind] = dummy_prompt(kind, self.processor, unwrapped(self.accelerator, model))
        return self._companions[kind]

    def _encoders_to_train(self, model: nn.Module) -> set[str]:
        """Kinds whose media reach weights to train before the language model does, when an engine wraps the model."""
        # It decides then, too, which gradients it waits for
        if self._trained is None or self._trained[0] is not model:
            own = model if self.accelerator is None else self.accelerator.unwrap_model(model)
            self._trained = model, trained_encoders(own, unwrapped(self.accelerator, model))
        return self._trained[1]


def refuse_separate_runs(num_processes: int, consequence: str) -> None:
    """Refuses to go on alone where a launcher started several processes, which Accelerate doesn't."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched > 1 and num_processes == 1:
        raise RuntimeError(
            f"`WORLD_SIZE` is {launched}, but Accelerate runs this process alone, as it does where it finds no GPU"
            + consequence.format(launched=launched)
        )


def kinds_of(prompts: Iterable[EncodedPrompt]) -> set[str]:
    """Kinds of media in prompts."""
    return set().union(*(prompt.modalities for prompt in prompts))


def trained_encoders(module: nn.Module, policy: PreTrainedModel) -> set[str]:
    """Kinds whose media reach weights to train before the language model does."""
    kinds = {kind for kind in ("image", "audio") if kind in policy.input_modalities}
    trained = set()
    for model in module.modules():
        if type(model) is not type(policy):
            continue
        encoders = {kind: model.get_submodule(find_tower(model, kind)) for kind in kinds}
        known = {p for part in (model.get_decoder(), *encoders.values()) for p in part.parameters()}
        # What lies between encoders and decoder may be any kind's
        if any(p.requires_grad and p not in known for p in model.base_model.parameters()):
            return kinds
        trained |= {kind for kind, each in encoders.items() if any(p.requires_grad for p in each.parameters())}
    return trained


def unreached_parameters(module: nn.Module, outputs: Iterable[torch.Tensor]) -> list[nn.Parameter]:
    """
    Parameters to train that outputs don't depend on, such as layers behind the one whose features are taken. None
    where reentrant checkpointing hides it.
    """
    seen, reached = set(), set()
    nodes = [output.grad_fn for output in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return []
        seen.add(node)
        if hasattr(node, "variable"):  # it accumulates a parameter's gradient
            reached.add(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return [p for p in module.parameters() if p.requires_grad and p not in reached]


def _encoders(kinds: set[str]) -> set[str]:
    """One encoder sees images and videos."""
    return {"image" if kind == "video" else kind for kind in kinds}
