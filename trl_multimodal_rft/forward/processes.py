# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Forwards that all ranks must run alike, as DDP, FSDP and DeepSpeed run collectives in them."""

import os
from collections.abc import Iterable, Sequence
from typing import Literal, cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.integrations import is_deepspeed_zero3_enabled

from ..encoding.dummies import dummy_prompt
from ..encoding.prompts import EncodedPrompt
from ..families import MODALITIES
from ..models.parts import CRITIC, find_towers, named_parts
from ..models.wrapped import is_unsharded, unwrapped
from .features import leaves_of_graph
from .layout import split_samples


class Processes:
    """
    Returns what a rank must run so that collectives are alike on all ranks: a number of forwards, and dummy prompts,
    which make encoders run on ranks whose prompts don't need the encoders.

    Without an `accelerator`, there is one process. The model's `processor` encodes the dummy prompts.
    """

    def __init__(
        self, accelerator: Accelerator | None, processor: ProcessorMixin | PreTrainedTokenizerBase | None = None
    ):
        self.accelerator = accelerator
        self.processor = processor
        self._dummies: dict[str | None, EncodedPrompt] = {}  # by modality, `None` for text
        # A wrapped model, its trained encoders, and whether its language model or critic is trained
        self._trained: tuple[nn.Module, set[str], bool] | None = None
        self._used_encoders: set[str] = set()  # modalities whose encoders got a gradient on any rank

    def dummies(
        self, model: nn.Module, prompts: Sequence[EncodedPrompt], with_other_batch: bool = False
    ) -> list[EncodedPrompt]:
        """
        Returns dummy prompts of the modalities that collectives need and this rank's prompts lack.

        All ranks must gather the sharded weights, and reduce the gradients, of the same encoders. If the language
        model is frozen, a batch of text alone gets dummy prompts, too, since it would have no gradient.

        With `with_other_batch`, this rank runs another batch before the same backward pass. The other batch, with its
        dummy prompts, already reaches all trained encoders. So DDP and a frozen language model need no further dummy
        prompts, but sharded weights do.
        """
        if self.accelerator is None:
            return []
        present, needed = modalities_of(prompts), set()
        if self.accelerator.num_processes == 1:
            pass
        elif not is_unsharded(self.accelerator):
            presence = torch.tensor([[modality in present for modality in MODALITIES]], device=self.accelerator.device)
            on_any_rank = self.accelerator.gather(presence).any(0).tolist()
            needed = {modality for modality, is_present in zip(MODALITIES, on_any_rank, strict=True) if is_present}
            if torch.is_grad_enabled() and is_deepspeed_zero3_enabled():
                # If an encoder gets no gradient, ZeRO-3 uses the gradient of an earlier step again
                encoders = _encoders(needed)
                self._used_encoders |= encoders
                needed |= (self._used_encoders - encoders) & self._encoders_to_train(model)
        elif torch.is_grad_enabled() and isinstance(model, DistributedDataParallel) and not with_other_batch:
            # With `find_unused_parameters`, DDP needs no dummy prompts. It accepts weights that the last forward
            # doesn't use, and also reduces gradients of weights that only an earlier forward has used.
            needed = set() if model.find_unused_parameters else self._encoders_to_train(model)
            present = _encoders(present)
        if (
            torch.is_grad_enabled()
            and not (present | needed or with_other_batch)
            and not self._trained_parts(model)[2]
        ):
            needed = self._encoders_to_train(model)
        return [self._dummy(modality, model) for modality in sorted(needed - present)]

    def dummies_for_unselected(
        self, model: nn.Module, prompts: Sequence[EncodedPrompt], selected: Sequence[EncodedPrompt]
    ) -> list[EncodedPrompt]:
        """
        Returns dummy prompts of the modalities that `prompts` have and the `selected` prompts lack. Returns a dummy
        prompt of text if no prompt is selected and no prompt has media.
        """
        modalities: list[str | None] = [*sorted(modalities_of(prompts) - modalities_of(selected))]
        return [self._dummy(modality, model) for modality in modalities or ([] if selected else [None])]

    def n_forwards(
        self,
        prompts: Sequence[EncodedPrompt],
        isolate: Literal["media", "prompt"] | None,
        dummies: Sequence[EncodedPrompt] = (),
    ) -> int:
        """
        Returns the number of forwards that all ranks must run: the largest number that a rank needs. Raises a
        `ValueError` if sharded encoders would run only on some ranks.
        """
        parts = split_samples(prompts, isolate)
        if isolate is None or self.accelerator is None or self.accelerator.num_processes == 1:
            return len(parts)
        if is_unsharded(self.accelerator) and not torch.is_grad_enabled():  # such forwards run no collectives
            return len(parts)
        device = self.accelerator.device
        count = int(self.accelerator.gather(torch.tensor([len(parts)], device=device)).max())
        if not is_unsharded(self.accelerator):
            modalities = [modalities_of([*(prompts[i] for i in part), *dummies]) for part in parts]
            modalities += modalities[-1:] * (count - len(modalities))
            forwards = torch.tensor(
                [[[modality in present for modality in MODALITIES] for present in modalities]], device=device
            )
            gathered = self.accelerator.gather(forwards)
            if (gathered != gathered[0]).any():
                raise ValueError(
                    "Ranks hold different modalities, but this model needs separate forward passes, which would "
                    "deadlock the collectives of FSDP or DeepSpeed. Use DDP, or batches of one modality."
                )
        return count

    def _dummy(self, modality: str | None, model: nn.Module) -> EncodedPrompt:
        if modality not in self._dummies:
            processor = cast(ProcessorMixin, self.processor)  # callers that need dummy prompts pass it
            self._dummies[modality] = dummy_prompt(modality, processor, unwrapped(self.accelerator, model))
        return self._dummies[modality]

    def _encoders_to_train(self, model: nn.Module) -> set[str]:
        """Returns the [`trained_encoders`] at the first call with a wrapped model: wrappers ignore later changes."""
        return self._trained_parts(model)[1]

    def _trained_parts(self, model: nn.Module) -> tuple[nn.Module, set[str], bool]:
        if self._trained is None or self._trained[0] is not model:
            module = model if self.accelerator is None else self.accelerator.unwrap_model(model)
            trains_text = any(
                p.requires_grad for _, part, p in named_parts(module) if part in ("language_model", CRITIC)
            )
            self._trained = model, trained_encoders(module, unwrapped(self.accelerator, model)), trains_text
        return self._trained


def check_one_run(num_processes: int, consequence: str) -> None:
    """Raises an error if a launcher started several processes that Accelerate would silently run independently."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched > 1 and num_processes == 1:
        raise RuntimeError(
            f"`WORLD_SIZE` is {launched}, but Accelerate runs this process alone, as it does where it finds no GPU"
            + consequence.format(launched=launched)
        )


def modalities_of(prompts: Iterable[EncodedPrompt]) -> set[str]:
    """Returns the modalities of prompts."""
    return set().union(*(prompt.modalities for prompt in prompts))


def trained_encoders(module: nn.Module, policy: PreTrainedModel) -> set[str]:
    """Returns the modalities whose media go through trained weights before they reach the language model."""
    modalities = {modality for modality in ("image", "audio") if modality in policy.input_modalities}
    trained = set()
    for model in module.modules():
        if type(model) is not type(policy):
            continue
        encoders = {modality: model.get_submodule(name) for modality, name in find_towers(model).items()}
        inner_parameters = {p for part in (model.get_decoder(), *encoders.values()) for p in part.parameters()}
        # Trained weights outside encoders and decoder, such as a projector's, may belong to any modality
        if any(p.requires_grad and p not in inner_parameters for p in model.base_model.parameters()):
            return modalities
        trained |= {
            modality for modality, encoder in encoders.items() if any(p.requires_grad for p in encoder.parameters())
        }
    return trained


def unreached_parameters(module: nn.Module, outputs: Iterable[torch.Tensor]) -> list[nn.Parameter]:
    """
    Returns trained parameters that outputs don't depend on, such as parameters of an encoder's last layers if the
    model reads the output of an earlier layer. The list is empty if reentrant checkpointing hides the graph.
    """
    reached = leaves_of_graph([*outputs])
    return [] if None in reached else [p for p in module.parameters() if p.requires_grad and p not in reached]


def _encoders(modalities: set[str]) -> set[str]:
    """Returns the encoders of modalities: images and videos share one, `image`."""
    return {"image" if modality == "video" else modality for modality in modalities}
