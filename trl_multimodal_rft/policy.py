# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""How prompts and completions go through a policy, its reference and its critic."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl.models import unwrap_model_for_generation
from trl.models.utils import _ForwardRedirection

from .encoding.processors import tokenizer_of
from .encoding.prompts import EncodedPrompt, all_placeholder_ids
from .families import MODALITIES, family_of
from .forward.attention import attention_obstacle
from .forward.contexts import by_context, context_rows
from .forward.divergence import Target
from .forward.inputs import encode_once
from .forward.layout import CompletionBatch, States, split_samples
from .forward.logprobs import Forward, completion_rewards, completion_scores, completion_values, prompt_states
from .forward.masks import trees_of
from .forward.partition import packed_length, split_by_tokens
from .forward.processes import Processes, unreached_parameters
from .forward.scores import DeferredParts, Scores, load_balancing_loss
from .forward.split_groups import KeptPrompt, chunk_ends, keeps_states
from .forward.trees import count_tokens
from .generation.graphs import TokenStep, step_on
from .generation.transformers import Branches, generate_completions, without_router_logits
from .models.critic import Critic, ValueHead
from .models.parts import same_adapters
from .models.wrapped import is_unsharded, unwrapped


# A packed row may have at most this share of the padded tokens: saving less makes no measurable difference (on a CPU,
# see `benchmarks/`)
_WORTH_PACKING = 0.9

# Layers whose window covers the completion alone, which only `generate` distinguishes from the prompt
_REFERENCE_LAYERS = "reference_sliding_attention"


# Prompts, completions `(B, C)` and their mask `(B, C)`
Completions = tuple[Sequence[EncodedPrompt], torch.Tensor, torch.Tensor]


def training_obstacle(
    model: PreTrainedModel,
    processor: ProcessorMixin | PreTrainedTokenizerBase | None,
    max_completion_length: int | None = None,
) -> str | None:
    """Why completions of a model, of that many tokens at most, can't be trained on; `None` if they can."""
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
                f"generate() attends to a sliding window of {config.sliding_window} completion tokens, forward() to "
                f"all; set `max_completion_length` to at most {longest}"
            )
    return None


@dataclass
class Fallbacks:
    """
    How exact scores and samples are computed where the fastest way isn't exact. The self-check finds what is needed.
    """

    packing: bool = True  # prompts are forwarded once for all their completions
    isolate: Literal["media", "prompt"] | None = None  # which prompts get a separate forward, see `completion_scores`
    logits_from_model: bool = False  # log-probabilities come from the model's logits instead of the fused head
    shared_prefill: bool = True  # prompts are prefilled once for all their completions
    graph: bool = True  # tokens are sampled from a graph of the device, if it has any


@dataclass
class PolicyForward:
    """Scores and samples completions, packed or padded, with all that engines and families need."""

    accelerator: Accelerator | None = None  # that prepared the models, if any
    processor: ProcessorMixin | PreTrainedTokenizerBase | None = None  # of the models; several processes need it
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    temperature: float = 1.0  # of the fused head, for models without one, as the next
    extra_outputs: tuple[str, ...] = ()  # besides log-probabilities and entropies
    max_tokens: int | None = None  # in one forward; larger batches are scored in parts

    def __post_init__(self):
        self.processes = Processes(self.accelerator, self.processor)
        self._unreached: list[nn.Parameter] | None = None  # trained weights that no forward uses

    def unwrapped(self, model: nn.Module) -> PreTrainedModel:
        """The model within wrappers of engine and adapter."""
        return unwrapped(self.accelerator, model)

    def worth_packing(
        self, prompts: Sequence[EncodedPrompt], lengths: Sequence[int], size: int, model: PreTrainedModel | None = None
    ) -> bool:
        """
        Whether packed rows are possible, and enough shorter than padded ones, for `size` completions per forward. With
        the `model`, prompts that start alike may share more.
        """
        if not self.fallbacks.packing:
            return False
        prompts, lengths = by_context(prompts, lengths)
        padded = len(lengths) * (max(map(len, prompts)) + max(lengths))
        slices = [slice(start, start + size) for start in range(0, len(lengths), size)]
        packed = sum(packed_length(prompts[part], lengths[part]) for part in slices)
        if packed > _WORTH_PACKING * padded and model is not None:
            packed = sum(lengths) + sum(self.n_prompt_tokens(model, prompts[part], lengths[part]) for part in slices)
        return packed <= _WORTH_PACKING * padded

    def n_prompt_tokens(self, model: PreTrainedModel, prompts: Sequence[EncodedPrompt], lengths: Sequence[int]) -> int:
        """Prompt tokens of the packed rows of completions, given their lengths."""
        prompts, lengths = by_context(prompts, lengths)
        bins = [range(len(prompts))]
        if self.max_tokens is not None:
            bins = split_by_tokens(prompts, lengths, self.max_tokens)
        if self._keeps_prompts(model):  # which chunks of a group have in common
            ends = chunk_ends(prompts, bins)
            bins = [own for i, own in enumerate(bins) if ends.get(i, (True, True))[0]]
        parts = [
            [own[i] for i in part]
            for own in bins
            for part in split_samples([prompts[j] for j in own], self.fallbacks.isolate)
        ]
        return sum(
            count_tokens(trees_of(model, [prompts[i] for i in part], [lengths[i] for i in part])) for part in parts
        )

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
        hidden: bool = False,
        logps: bool = True,
        target: Target | None = None,
        rows: Sequence[int] | None = None,
    ) -> Scores:
        """
        Scores of completions, differentiable where gradients are enabled.

        `model` is as the accelerator prepared it, with the fused head; completions of a group share one object in
        `prompts`. Log-probabilities come from the model's logits where the `fallbacks` say so or an engine's
        `logit_bias` is given. A `critic` adds values, `compute_aux_loss` the load-balancing loss of a mixture of
        experts, `supervised` completions their log-probabilities, `hidden` the states that the LM head gets,
        `(B, C, H)`, all in the same forward of the wrapper. `logps=False` leaves out log-probabilities and entropies;
        for values alone, a separate `critic` needs no forward of the policy. With a `target`, the scores are
        divergences from it and entropies instead, and no log-probabilities. With `whole`, `prompts` are whole
        sequences, see [`~forward.logprobs.completion_scores`]. With more tokens than `max_tokens`, gradients come from
        [`~forward.token_budget.backward_by_parts`] with the `deferred` of the scores; the completions of a larger
        group are forwarded in chunks behind their prompt, see [`~forward.split_groups.KeptPrompt`], or, where that
        isn't possible, each chunk with its prompt. Where only some `rows` matter, or have tokens in padded parts, the
        others aren't forwarded, and their scores are 0; dummy prompts take the place of their media. A completion
        whose context was rewritten is forwarded as a row for each context.

        Shapes: `completion_ids` and `completion_mask`, padded on the right, `(B, C)`; returns scores `(B, C)`.
        """
        fallbacks = self.fallbacks if fallbacks is None else fallbacks
        contexts = context_rows(prompts, completion_ids.size(1))
        if contexts is not None:
            prompts, target = contexts.prompts, None if target is None else target.map(contexts.cut)
            completion_ids, completion_mask = contexts.cut(completion_ids), contexts.cut(completion_mask)
            rows = None if rows is None else contexts.rows_of({*rows})
        completions, n = CompletionBatch(prompts, completion_ids, completion_mask), len(prompts)
        # What the parts depend on; reading it makes the host wait
        lengths = None if self.max_tokens is None else completion_mask.sum(1).tolist()
        if rows is None and lengths is not None and not (packed or whole or compute_aux_loss):
            scored = [i for i, length in enumerate(lengths) if length]
            rows = scored if len(scored) < n else None  # padded, those without tokens are as long as others
        if rows is not None:
            chosen = completions.rows(rows)
            dummies = self.processes.dummies_for_rest(model, prompts, chosen.prompts)
            completions = chosen.padded(dummies)
            target = None if target is None else target.rows(rows).padded(len(dummies))
            lengths = None if lengths is None else [*(lengths[i] for i in rows), *([0] * len(dummies))]
        if lengths is not None and (whole or (compute_aux_loss and packed)):
            # Whole sequences have no completions; rows for the auxiliary loss have the last tokens, too
            lengths = [0 if whole else length + (length > 0) for length in lengths]

        needs_policy = logps or hidden or target is not None or not isinstance(critic, Critic)

        def score(index: int, part: list[int], states: States | None) -> Scores:
            return self._score_part(
                model,
                completions.rows(part),
                fallbacks,
                critic,
                CompletionBatch(*supervised) if supervised is not None and index == 0 else None,
                logit_bias,
                None if target is None else target.rows(part),
                states,
                packed=packed,
                whole=whole,
                compute_aux_loss=compute_aux_loss,
                hidden=hidden,
                logps=logps,
                needs_policy=needs_policy,
            )

        models = [critic.model] if isinstance(critic, Critic) else []
        models += [self.unwrapped(model)] * needs_policy
        keeps = packed and not compute_aux_loss  # whose statistics include the prompt
        scores = self._in_parts(score, model, models, completions, lengths, packed, keeps)
        if compute_aux_loss:
            scores.aux_loss = load_balancing_loss(scores.router)
        scores = scores if rows is None else scores.spread(rows, n)
        return scores if contexts is None else scores.rearranged(contexts.joined)

    def _in_parts(
        self,
        score: Callable[[int, list[int], States | None], Scores],
        model: nn.Module,
        models: Sequence[PreTrainedModel],
        completions: CompletionBatch,
        lengths: list[int] | None,
        packed: bool,
        keeps: bool,
    ) -> Scores:
        """
        Scores of completions, in parts of at most `max_tokens` where their `lengths` are given. `score` takes the
        number of a part, its rows, and, if the part `keeps` its prompt, the states of this in the unwrapped `models`.
        """
        prompts, device = completions.prompts, completions.ids.device
        every = list(range(len(prompts)))
        if self.max_tokens is None or lengths is None:
            return score(0, every, None)
        parts = split_by_tokens(prompts, lengths, self.max_tokens, packed)
        ends, n_parts = chunk_ends(prompts, parts), len(parts)
        if self.accelerator is not None:
            if torch.is_grad_enabled() or not is_unsharded(self.accelerator):  # else there are no collectives
                n_parts = int(self.accelerator.gather(torch.tensor([n_parts], device=device)).max())
        if n_parts == 1:
            return score(0, every, None)  # in their order, which a part may change
        kept: dict[EncodedPrompt, KeptPrompt] = {}
        for index in ends if keeps and all(map(self._keeps_prompts, models)) else ():
            prompt = prompts[parts[index][0]].shared
            if prompt not in kept and not self.processes.dummies(model, [prompt]):
                kept[prompt] = KeptPrompt(functools.partial(self._states, models, prompt, device))

        def part_score(index: int, part: list[int]) -> Scores:
            own = kept.get(prompts[part[0]].shared) if index in ends else None
            return score(index, part, None if own is None else own.states(*ends[index]))

        if torch.is_grad_enabled():
            return DeferredParts(part_score, parts, n_parts, device).joined()
        scores = [part_score(i, part) for i, part in enumerate(parts + parts[-1:] * (n_parts - len(parts)))]
        return Scores.join(scores[: len(parts)], parts)

    def _keeps_prompts(self, model: PreTrainedModel) -> bool:
        """Whether a group that is split has its prompt forwarded once. Engines count forwards, so theirs repeat it."""
        return keeps_states(model) and (self.accelerator is None or is_unsharded(self.accelerator))

    def _states(self, models: Sequence[PreTrainedModel], prompt: EncodedPrompt, device: torch.device) -> States:
        with self._autocast():
            return prompt_states(models, prompt, device)

    def rewards(
        self, model: nn.Module, completions: Completions, *, packed: bool, fallbacks: Fallbacks | None = None
    ) -> Scores:
        """
        The scores that a reward model gives completions, as `values` `(B, 1)`, differentiable where gradients are
        enabled; see [`~forward.logprobs.completion_rewards`].
        """
        policy, batch = self.unwrapped(model), CompletionBatch(*completions)
        fallbacks = self.fallbacks if fallbacks is None else fallbacks

        def part(index: int, rows: list[int], states: States | None) -> Scores:
            chosen = self._with_dummies(model, batch.rows(rows))
            options = self._forwards(chosen, packed, fallbacks, states)

            def rewards(call: Forward) -> dict[str, torch.Tensor]:
                return {"values": completion_rewards(call, policy, *chosen, **options)}

            with self._autocast():
                tensors = self._as_one_forward(model, rewards)
            return Scores(**self._reaching_all(model, tensors, states)).rows(slice(len(rows)))

        lengths = None if self.max_tokens is None else batch.mask.sum(1).tolist()
        return self._in_parts(part, model, [policy], batch, lengths, packed, keeps=packed)

    def _score_part(
        self,
        model: nn.Module,
        completions: CompletionBatch,
        fallbacks: Fallbacks,
        critic: Critic | ValueHead | None,
        supervised: CompletionBatch | None,
        logit_bias: dict[int, float] | None,
        target: Target | None,
        states: States | None,
        *,
        packed: bool,
        whole: bool,
        compute_aux_loss: bool,
        hidden: bool,
        logps: bool,
        needs_policy: bool,
    ) -> Scores:
        """Scores of what fits into the token budget."""
        n, policy = len(completions[0]), self.unwrapped(model)
        completions = self._with_dummies(model, completions)
        options = self._forwards(completions, packed, fallbacks, states)
        logits_from_model = fallbacks.logits_from_model or logit_bias is not None
        temperature = self.temperature if logits_from_model else None
        head = {"logits_temperature": temperature, "logit_bias": logit_bias, "extra_outputs": self.extra_outputs}
        value_head, critic = (critic, None) if isinstance(critic, ValueHead) else (None, critic)
        if supervised is not None:
            others = self._with_dummies(model, supervised, with_others=True)
            others_options = self._forwards(others, False, fallbacks)
        if needs_policy:
            _gather_head(policy)

        def score(call: Forward) -> dict[str, torch.Tensor]:
            results = {}
            if needs_policy:
                results = completion_scores(
                    call,
                    policy,
                    *completions,
                    output_router_logits=compute_aux_loss,
                    value_head=value_head,
                    whole=whole,
                    hidden=hidden,
                    # The states of a model without a fused head come with its logits
                    logps=target is None and (logps or (logits_from_model and value_head is not None)),
                    target=None if target is None else target.padded(len(completions[0]) - n),
                    **options,
                    **head,
                ).tensors()
            if critic is not None:
                results["values"] = completion_values(critic, critic.model, *completions, **options)
            if supervised is not None:
                likelihoods = completion_scores(call, policy, *others, **others_options, **head).logps
                results["supervised"] = likelihoods[: len(supervised[0])]
            return results

        with self._autocast():
            # DDP looks for unused parameters in its last forward alone, so all parts must be in one
            is_ddp = isinstance(model, DistributedDataParallel)
            several = critic is not None or supervised is not None or (fallbacks.isolate is not None and is_ddp)
            several = several or hidden or not logps or target is not None  # which engines must find in the outputs
            tensors = self._as_one_forward(model, score) if several else score(model)
        return Scores(**self._reaching_all(model, tensors, states)).rows(slice(n))  # without dummy prompts

    def _reaching_all(
        self, model: nn.Module, tensors: dict[str, torch.Tensor], states: States | None
    ) -> dict[str, torch.Tensor]:
        """Adds a zero that depends on weights that no forward uses, for whose gradients DDP would wait."""
        # Chunks of a group, but for the last, don't reach what is before the language model
        reaches = states is None or self.accelerator is None or self.accelerator.sync_gradients
        is_ddp = isinstance(model, DistributedDataParallel)
        if is_ddp and reaches and torch.is_grad_enabled() and not model.find_unused_parameters:
            name = next(each for each in ("logps", "divergences", "values") if each in tensors)
            if self._unreached is None:
                self._unreached = unreached_parameters(model, list(tensors.values()))
            zero = sum(0 * parameter.flatten()[0] for parameter in self._unreached)
            return {**tensors, name: tensors[name] + zero}
        return tensors

    def _forwards(
        self, completions: CompletionBatch, packed: bool, fallbacks: Fallbacks, states: States | None = None
    ) -> dict:
        """How completions are split over forwards, and the states of their prompt if it isn't forwarded with them."""
        n_forwards = self.processes.n_forwards(completions[0], fallbacks.isolate)
        return {"packed": packed, "isolate": fallbacks.isolate, "min_forwards": n_forwards, "states": states}

    def _with_dummies(
        self, model: nn.Module, completions: CompletionBatch, with_others: bool = False
    ) -> CompletionBatch:
        """Adds dummy prompts without a completion, which don't affect the others, see [`Processes.dummies`]."""
        dummies = self.processes.dummies(model, completions.prompts, with_others)
        return completions.padded(dummies) if dummies else completions

    def _as_one_forward(
        self, model: nn.Module, function: Callable[[Forward], dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Calls a function of a model's forward within the forward of its wrapper, as engines need it."""
        module = model if self.accelerator is None else self.accelerator.unwrap_model(model)
        return _ForwardRedirection()(model, module, lambda: function(module.forward))

    def _autocast(self) -> AbstractContextManager:
        return nullcontext() if self.accelerator is None else self.accelerator.autocast()

    # Samples

    def sample(
        self,
        model: nn.Module,
        prompts: Sequence[EncodedPrompt],
        generation_config: GenerationConfig,
        pad_token_id: int,
        *,
        fallbacks: Fallbacks | None = None,
        generating: Callable[[], AbstractContextManager[nn.Module]] | None = None,
        branches: Branches | None = None,
    ) -> Any:
        """
        Samples a completion of each prompt with transformers.

        Prompts are prefilled once, or for each completion, and a graph of the device runs the step of a token, as the
        `fallbacks` say, by default the policy's. There, a graph that can't be captured is turned off.
        `generating` returns a context with the model ready to generate, by default TRL's. `branches` hold the cache to
        continue from, if ranks needn't wait for each other's forwards.

        Returns completions `(B, N)`; where all are sampled at once, what
        [`~generation.transformers.generate_completions`] returns.
        """
        fallbacks, isolate = fallbacks or self.fallbacks, self.fallbacks.isolate
        shared_prefill = fallbacks.shared_prefill
        if getattr(self.unwrapped(model), "_hf_peft_config_loaded", False):
            isolate, shared_prefill = "prompt", False  # Granite Speech uses the adapter where `generate` gets sounds
        with torch.no_grad():  # so that no rank waits for gradients
            dummies = self.processes.dummies(model, prompts)
            parts = split_samples(prompts, isolate)
            ready: AbstractContextManager[nn.Module] = nullcontext(model)
            if generating is not None:
                ready = generating()
            elif self.accelerator is not None:
                ready = unwrap_model_for_generation(model, self.accelerator)
            is_sharded = self.accelerator is not None and not is_unsharded(self.accelerator)
            if branches is not None and (is_sharded or isolate is not None):
                why = "ranks wait for each other's forwards" if is_sharded else "completions are sampled in parts"
                branches.obstacle, branches = why, None
            surplus = self.processes.n_forwards(prompts, isolate, dummies) - len(parts)
            is_cast = self.accelerator is not None and self.accelerator.mixed_precision in ("bf16", "fp16")
            with ready as generating_model, same_adapters(generating_model):
                unwrapped_model = self.unwrapped(generating_model)
                device = unwrapped_model.device if self.accelerator is None else self.accelerator.device
                if branches is None or branches.continuations is None:  # else the cache holds what the media gave
                    with self._autocast():
                        encode_once(unwrapped_model, [*prompts, *dummies], device)
                outputs, runs = [], step_on(device) if fallbacks.graph else TokenStep()
                with without_router_logits(unwrapped_model):
                    for part in [*parts, *[parts[-1]] * surplus]:  # other ranks have more
                        output = generate_completions(
                            generating_model,
                            unwrapped_model,
                            [prompts[i] for i in part],
                            generation_config,
                            pad_token_id,
                            device,
                            shared_prefill=shared_prefill,
                            in_step=is_sharded,
                            dummies=dummies,
                            branches=branches,
                            tokenizer=None if self.processor is None else tokenizer_of(self.processor),
                            runs=runs,
                            casts_once=is_cast and not is_sharded,
                        )
                        outputs.append(output)
                        runs.reset()
        fallbacks.graph &= runs.obstacle is None
        if len(parts) == 1:
            return outputs[0]
        outputs = outputs[: len(parts)]
        longest = max(output.size(1) for output in outputs)
        padded = [F.pad(output, (0, longest - output.size(1)), value=pad_token_id) for output in outputs]
        return torch.cat(padded)[torch.tensor(sum(parts, []), device=device).argsort()]


def _gather_head(policy: PreTrainedModel) -> None:
    """
    TRL's fused head reads the weight of a module that never runs. If FSDP2 gathered it, its gradient wouldn't be
    reduced: each rank would train its rows of the head on its completions alone.
    """
    head = policy.get_output_embeddings()
    if isinstance(head, FSDPModule) and torch.is_grad_enabled():
        head.unshard()
