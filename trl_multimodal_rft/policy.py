# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""How prompts and completions go through a policy, its reference and its critic."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl.models import unwrap_model_for_generation
from trl.models.utils import _ForwardRedirection

from .encoding.prompts import EncodedPrompt, all_placeholder_ids
from .families import MODALITIES, family_of
from .forward.attention import attention_obstacle
from .forward.layout import packed_length, split_by_tokens, split_samples
from .forward.processes import Processes, unreached_parameters
from .forward.scores import Scores, load_balancing_loss
from .forward.scoring import completion_scores, completion_values
from .forward.token_budget import DeferredParts
from .generation.transformers import Branches, generate_in_parts
from .models.critic import Critic, ValueHead
from .models.wrapped import is_unsharded, unwrapped


# A packed row must have this share of the padded batch's tokens at most: the time saved follows the tokens saved, and
# below that it is lost in the noise (measured on a CPU, see `benchmarks/`).
_WORTH_PACKING = 0.9

# Layers whose window moves over the completion alone, which only `generate` tells from the prompt
_REFERENCE_LAYERS = "reference_sliding_attention"

# Prompts, completions `(B, C)` and their mask `(B, C)`
Completions = tuple[Sequence[EncodedPrompt], torch.Tensor, torch.Tensor]


def training_obstacle(model: PreTrainedModel, processor: Any, max_completion_length: int | None = None) -> str | None:
    """
    Why completions of a model can't be trained on at all.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Unwrapped model.
        processor ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`]):
            What encodes prompts.
        max_completion_length (`int`, *optional*):
            Tokens that a completion has at most.

    Returns:
        `str` or `None`: The reason, or `None` when they can.
    """
    if (refused := family_of(model).refused) is not None:
        return refused
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, so no completion follows its prompt in one row"
    kinds = [kind for kind in MODALITIES if kind in model.input_modalities]
    if kinds and isinstance(processor, ProcessorMixin) and not all_placeholder_ids(model, processor):
        return (
            f"neither its config nor {type(processor).__name__} names a token that stands for {' or '.join(kinds)}, "
            "by which a prompt is known to hold its media"
        )
    if (obstacle := attention_obstacle(model)) is not None:
        return obstacle
    config = model.config.get_text_config(decoder=True)
    if _REFERENCE_LAYERS in (getattr(config, "layer_types", None) or ()):
        longest = config.sliding_window + 1
        if max_completion_length is None or max_completion_length > longest:
            return (
                f"it writes with the last {config.sliding_window} tokens of a completion in view, and its forward "
                f"views all of them; set `max_completion_length` to {longest} at most"
            )
    return None


@dataclass
class Fallbacks:
    """
    What is done where a model can't do everything exactly in the fastest way. The self-check finds what is needed.

    Args:
        packing (`bool`, *optional*, defaults to `True`):
            Whether prompts are forwarded once for all their completions.
        isolate (`str`, *optional*):
            Which prompts get forwards of their own, see [`~forward.scoring.completion_scores`].
        logits_from_model (`bool`, *optional*, defaults to `False`):
            Whether log-probabilities are taken from the model's own logits instead of TRL's fused head.
        shared_prefill (`bool`, *optional*, defaults to `True`):
            Whether prompts are prefilled once for all their completions.
    """

    packing: bool = True
    isolate: Literal["media", "prompt"] | None = None
    logits_from_model: bool = False
    shared_prefill: bool = True


@dataclass
class PolicyForward:
    """
    Scores and samples completions, packed or padded, with what engines and families need done.

    Args:
        accelerator ([`~accelerate.Accelerator`], *optional*):
            What prepared the models, if anything did.
        processor ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            The models' processor, which several processes need.
        fallbacks ([`Fallbacks`], *optional*):
            What is done for the family.
        temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of TRL's fused head, for models of which it doesn't know the logits.
        max_tokens (`int`, *optional*):
            Tokens in one forward with a gradient at most. Larger batches are scored in parts, see
            [`~forward.token_budget.DeferredParts`].
    """

    accelerator: Accelerator | None = None
    processor: ProcessorMixin | PreTrainedTokenizerBase | None = None
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    temperature: float = 1.0
    max_tokens: int | None = None

    def __post_init__(self):
        self.processes = Processes(self.accelerator, self.processor)
        self._unreached: list[nn.Parameter] | None = None  # weights to train that no forward uses

    def unwrapped(self, model: nn.Module) -> PreTrainedModel:
        """
        The model within its wrappers.

        Args:
            model (`torch.nn.Module`):
                Model, as prepared by the accelerator.

        Returns:
            [`~transformers.PreTrainedModel`]: The model that transformers loaded.
        """
        return unwrapped(self.accelerator, model)

    def worth_packing(self, prompts: Sequence[EncodedPrompt], lengths: Sequence[int], size: int) -> bool:
        """
        Whether packed rows are possible, and enough shorter than padded ones to be faster.

        Args:
            prompts (`Sequence[EncodedPrompt]`):
                Each completion's prompt.
            lengths (`Sequence[int]`):
                Length of each completion.
            size (`int`):
                Completions in one forward, which share prompts among themselves at most.

        Returns:
            `bool`: Whether to pack.
        """
        padded = len(lengths) * (max(map(len, prompts)) + max(lengths))
        slices = [slice(start, start + size) for start in range(0, len(lengths), size)]
        packed = sum(packed_length(prompts[part], lengths[part]) for part in slices)
        return self.fallbacks.packing and packed <= _WORTH_PACKING * padded

    # Scores

    def score(
        self,
        model: nn.Module,
        prompts: Sequence[EncodedPrompt],
        completion_ids: torch.Tensor,
        completion_mask: torch.Tensor,
        *,
        packed: bool,
        fallbacks: Fallbacks | None = None,
        compute_aux_loss: bool = False,
        critic: Critic | ValueHead | None = None,
        supervised: Completions | None = None,
        logit_bias: dict[int, float] | None = None,
        whole: bool = False,
    ) -> Scores:
        """
        Scores of completions, differentiable where gradients are on.

        Args:
            model (`torch.nn.Module`):
                Model to call, as prepared by the accelerator, with TRL's fused LM head.
            prompts (`Sequence[EncodedPrompt]`):
                Each completion's prompt, length `B`; completions of a group hold the same object.
            completion_ids (`torch.Tensor`):
                Right-padded completions, shape `(B, C)`.
            completion_mask (`torch.Tensor`):
                1 on completion tokens, shape `(B, C)`.
            packed (`bool`):
                Whether each prompt and its media are forwarded once for all its completions.
            fallbacks ([`Fallbacks`], *optional*):
                What is done for the family, where it isn't what is always done.
            compute_aux_loss (`bool`, *optional*, defaults to `False`):
                Whether to compute the load-balancing loss of a mixture of experts.
            critic ([`~models.Critic`] or [`~models.ValueHead`], *optional*):
                What gives values of the states, in the same forward of the wrapper; a head does on the model itself.
            supervised (`tuple`, *optional*):
                Prompts, supervised completions and their mask, whose log-probabilities come from the same forward of
                the wrapper.
            logit_bias (`dict[int, float]`, *optional*):
                What an engine adds to the logits of tokens before it samples. Log-probabilities then come from the
                model's own logits.
            whole (`bool`, *optional*, defaults to `False`):
                Whether `prompts` are whole sequences, see [`~forward.scoring.completion_scores`].

        Returns:
            [`~forward.scores.Scores`]: The scores. With more tokens than `max_tokens`, gradients come from
            [`~forward.token_budget.backward_by_parts`] with its `deferred`.
        """
        fallbacks = self.fallbacks if fallbacks is None else fallbacks
        parts, n_parts = [], 1
        if self.max_tokens is not None and torch.is_grad_enabled():
            lengths = [0] * len(prompts) if whole else completion_mask.sum(1).tolist()
            if compute_aux_loss and packed:  # whose rows hold the last tokens, too
                lengths = [length + 1 if length else 0 for length in lengths]
            parts = split_by_tokens(prompts, lengths, self.max_tokens, packed)
            n_parts = len(parts)
            if self.accelerator is not None:
                n_parts = int(self.accelerator.gather(torch.tensor([n_parts], device=completion_ids.device)).max())

        def score(index: int, part: list[int]) -> Scores:
            own = [prompts[i] for i in part], completion_ids[part], completion_mask[part]
            own_supervised = supervised if index == 0 else None
            return self._score_part(
                model, own, packed, whole, fallbacks, compute_aux_loss, critic, own_supervised, logit_bias
            )

        if n_parts == 1:
            scores = score(0, list(range(len(prompts))))  # a part has an order of its own
        else:
            scores = DeferredParts(score, parts, n_parts, completion_ids.device).joined()
        if compute_aux_loss:
            scores.aux_loss = load_balancing_loss(scores.router)
        return scores

    def values(
        self,
        model: nn.Module,
        critic: Critic | ValueHead,
        prompts: Sequence[EncodedPrompt],
        completion_ids: torch.Tensor,
        completion_mask: torch.Tensor,
        *,
        packed: bool,
    ) -> torch.Tensor:
        """
        Values of the states before each completion token.

        Args:
            model (`torch.nn.Module`):
                What the accelerator prepared, which holds the critic.
            critic ([`~models.Critic`] or [`~models.ValueHead`]):
                Its critic.
            prompts (`Sequence[EncodedPrompt]`):
                See [`score`].
            completion_ids (`torch.Tensor`):
                See [`score`].
            completion_mask (`torch.Tensor`):
                See [`score`].
            packed (`bool`):
                See [`score`].

        Returns:
            `torch.Tensor`: Values, shape `(B, C)`, 0 where the mask is 0.
        """
        n = len(prompts)
        completions = self._with_dummies(model, (prompts, completion_ids, completion_mask))
        options = self._forwards(completions, packed, self.fallbacks)
        policy = self.unwrapped(model)

        def values(call) -> torch.Tensor:
            if isinstance(critic, ValueHead):
                return completion_scores(call, policy, *completions, value_head=critic, **options).values
            return completion_values(critic, critic.model, *completions, **options)

        with self._autocast():
            return self._as_one_forward(model, values)[:n]

    def _score_part(
        self,
        model,
        completions: Completions,
        packed,
        whole,
        fallbacks,
        compute_aux_loss,
        critic,
        supervised,
        logit_bias,
    ) -> Scores:
        """Scores of what fits into the token budget."""
        n, policy = len(completions[0]), self.unwrapped(model)
        completions = self._with_dummies(model, completions)
        options = self._forwards(completions, packed, fallbacks)
        logits_from_model = fallbacks.logits_from_model or logit_bias is not None
        head = {"logits_temperature": self.temperature if logits_from_model else None, "logit_bias": logit_bias}
        own_head = critic if isinstance(critic, ValueHead) else None
        own_critic = None if own_head is not None else critic
        if supervised is not None:
            others = self._with_dummies(model, supervised, beside_others=True)
            others_options = self._forwards(others, False, fallbacks)
        _gather_head(policy)

        def score(call) -> dict[str, Any]:
            results = completion_scores(
                call,
                policy,
                *completions,
                output_router_logits=compute_aux_loss,
                value_head=own_head,
                whole=whole,
                **options,
                **head,
            ).tensors()
            if own_critic is not None:
                results["values"] = completion_values(own_critic, own_critic.model, *completions, **options)
            if supervised is not None:
                likelihoods = completion_scores(call, policy, *others, **others_options, **head).logps
                results["supervised"] = likelihoods[: len(supervised[0])]
            return results

        with self._autocast():
            # DDP looks for unused parameters in its last forward alone, so it must see all parts as one
            is_ddp = isinstance(model, DistributedDataParallel)
            several = own_critic is not None or supervised is not None or (fallbacks.isolate is not None and is_ddp)
            tensors = self._as_one_forward(model, score) if several else score(model)
        if is_ddp and torch.is_grad_enabled() and not model.find_unused_parameters:
            tensors["logps"] = tensors["logps"] + self._touch_unreached(model, list(tensors.values()))
        return Scores(**tensors).rows(slice(n))  # without companions

    def _forwards(self, completions: Completions, packed: bool, fallbacks: Fallbacks) -> dict:
        """How completions are split over forwards."""
        n_forwards = self.processes.n_forwards(completions[0], fallbacks.isolate)
        return {"packed": packed, "isolate": fallbacks.isolate, "min_forwards": n_forwards}

    def _with_dummies(self, model, completions: Completions, beside_others: bool = False) -> Completions:
        """Adds companions without a completion, which the others don't see, see [`Processes.companions`]."""
        prompts, completion_ids, completion_mask = completions
        dummies = self.processes.dummies(model, prompts, beside_others)
        if not dummies:
            return completions
        padding = (0, 0, 0, len(dummies))
        ids, mask = (nn.functional.pad(each, padding) for each in (completion_ids, completion_mask))
        return [*prompts, *dummies], ids, mask

    def _as_one_forward(self, model, function: Callable):
        """Calls a function of a model's forward within the forward of its wrapper, as engines need it."""
        module = model if self.accelerator is None else self.accelerator.unwrap_model(model)
        return _ForwardRedirection()(model, module, lambda: function(module.forward))

    def _autocast(self) -> AbstractContextManager:
        return nullcontext() if self.accelerator is None else self.accelerator.autocast()

    def _touch_unreached(self, model, tensors) -> torch.Tensor | int:
        """A zero that depends on the weights that no forward uses, which DDP would wait for."""
        if self._unreached is None:
            self._unreached = unreached_parameters(model, tensors)
        return sum(0 * parameter.flatten()[0] for parameter in self._unreached)

    # Samples

    def sample(
        self,
        model: nn.Module,
        prompts: Sequence[EncodedPrompt],
        generation_config: GenerationConfig,
        pad_token_id: int,
        *,
        shared_prefill: bool | None = None,
        generating: Callable[[], AbstractContextManager[nn.Module]] | None = None,
        branches: Branches | None = None,
    ) -> Any:
        """
        Samples a completion of each prompt, with transformers.

        Args:
            model (`torch.nn.Module`):
                Model, as prepared by the accelerator.
            prompts (`Sequence[EncodedPrompt]`):
                Each completion's prompt, length `B`; completions of a group hold the same object.
            generation_config ([`~transformers.GenerationConfig`]):
                How to sample.
            pad_token_id (`int`):
                Id written on padding.
            shared_prefill (`bool`, *optional*):
                Whether each prompt is prefilled once. By default as the fallbacks say.
            generating (`Callable`, *optional*):
                Gives a context with the model ready to generate. By default TRL's.
            branches ([`~generation.transformers.Branches`], *optional*):
                What to go on with from its cache, and where to keep what is sampled. Where processes wait for each
                other's forwards, prompts are prefilled again.

        Returns:
            `torch.Tensor`: Completions, shape `(B, N)`, or what
            [`~generation.transformers.generate_in_parts`] returns.
        """
        fallbacks = self.fallbacks
        shared_prefill = fallbacks.shared_prefill if shared_prefill is None else shared_prefill
        with torch.no_grad():  # nothing waits for gradients here
            dummies = self.processes.dummies(model, prompts)
            parts = split_samples(prompts, fallbacks.isolate)
            ready: Any = nullcontext(model)
            if generating is not None:
                ready = generating()
            elif self.accelerator is not None:
                ready = unwrap_model_for_generation(model, self.accelerator)
            counted = self.accelerator is not None and not is_unsharded(self.accelerator)
            if branches is not None and (counted or fallbacks.isolate is not None):
                why = "processes wait for each other's forwards" if counted else "completions are sampled in parts"
                branches.obstacle, branches = why, None
            surplus = self.processes.n_forwards(prompts, fallbacks.isolate, dummies) - len(parts)
            with ready as own:
                return generate_in_parts(
                    own,
                    self.unwrapped(own),
                    prompts,
                    parts,
                    generation_config,
                    pad_token_id,
                    self.unwrapped(own).device if self.accelerator is None else self.accelerator.device,
                    surplus=surplus,
                    shared_prefill=shared_prefill,
                    dummies=dummies,
                    branches=branches,
                )


def _gather_head(policy: PreTrainedModel) -> None:
    """
    TRL's fused head reads the weight of a module that never runs. What FSDP2 gathers itself gets a gradient that isn't
    reduced: each process would train its rows of the head on its own completions alone.
    """
    head = policy.get_output_embeddings()
    if isinstance(head, FSDPModule) and torch.is_grad_enabled():
        head.unshard()
