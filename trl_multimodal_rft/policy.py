# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scoring of completions by a policy, its reference and its critic: alike on all ranks, with fallbacks."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import torch
from accelerate import Accelerator, PartialState
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerState
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.extras.profiling import ProfilingContext
from trl.models.utils import _ForwardRedirection

from .encoding.dummies import dummy_prompt
from .encoding.prompts import EncodedPrompt, all_placeholder_ids
from .families import family_of
from .forward.attention import attention_obstacle
from .forward.encoders import leaves_of_graph
from .forward.layout import States, packed_length
from .forward.logprobs import Forward, completion_rewards, completion_scores, completion_values, prompt_states
from .forward.masks import trees_of
from .forward.partition import split_by_tokens
from .forward.prompt_groups import split_samples
from .forward.scores import DeferredParts, ScoreRequest, Scores, context_rows, load_balancing_loss, split_lengths
from .forward.split_groups import KeptPrompt, chunk_ends, keeps_states
from .forward.trees import count_tokens
from .modalities import ENCODER_OF, MODALITIES
from .models.critic import Critic, ValueHead
from .models.parts import CRITIC, TOWERS, find_towers, named_parts
from .models.wrapped import is_unsharded, unwrapped


# Completions are packed if packed rows have at most this share of the tokens of padded rows. Smaller savings make no
# measurable difference on a CPU, see `benchmarks/`.
_WORTH_PACKING = 0.9

# Type of layers whose sliding window counts only completion tokens. `generate` applies the window, but `forward`
# doesn't, as it doesn't know where the completion starts.
_COMPLETION_WINDOW = "reference_sliding_attention"


# Prompts, completions `(B, C)` and their mask `(B, C)`
Completions = tuple[Sequence[EncodedPrompt], torch.Tensor, torch.Tensor]


def training_obstacle(
    model: PreTrainedModel,
    processor: ProcessorMixin | PreTrainedTokenizerBase | None,
    max_completion_length: int | None = None,
) -> str | None:
    """
    Returns the reason why a model can't be trained on completions of up to `max_completion_length` tokens (`None`: any
    number), or `None` if it can be trained.
    """
    obstacle = family_of(model).training_obstacle
    if obstacle is not None:
        return obstacle
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, so no completion follows its prompt in one row"
    modalities = [modality for modality in MODALITIES if modality in model.input_modalities]
    if modalities and isinstance(processor, ProcessorMixin) and not all_placeholder_ids(model, processor):
        return (
            f"neither its config nor {type(processor).__name__} names a token that stands for "
            f"{' or '.join(modalities)}, so it can't be checked that a prompt holds its media"
        )
    obstacle = attention_obstacle(model)
    if obstacle is not None:
        return obstacle
    config = model.config.get_text_config(decoder=True)
    if _COMPLETION_WINDOW in (getattr(config, "layer_types", None) or ()):
        max_length = config.sliding_window + 1  # the last token is only predicted, so the window need not hold it
        if max_completion_length is None or max_completion_length > max_length:
            return (
                f"generate() attends to a sliding window of {config.sliding_window} completion tokens, forward() to "
                f"all; set `max_completion_length` to at most {max_length}"
            )
    return None


@dataclass
class Fallbacks:
    """
    Choices between fast paths and slower fallbacks, for scoring and sampling. The defaults are the fast paths. If a
    fast path isn't exact for a model, the self-check selects the fallback.
    """

    packing: bool = True  # whether prompts are forwarded once for all their completions
    isolate: Literal["media", "prompt"] | None = None  # prompts that need separate forwards, see `ScoreRequest`
    logits_from_model: bool = False  # whether the model's logits are used instead of the fused head
    shared_prefill: bool = True  # whether prompts are prefilled once for all their completions
    graph: bool = True  # whether decoding steps run as a CUDA graph, on devices that support it


@dataclass
class Live:
    """
    A trainer's current models and state, which the training loop may replace at any time. The trainer's attributes
    `model`, `ref_model` and so on are properties that read and set these fields.
    """

    trainer_name: str  # name of the trainer's class, a prefix in logs of profiled blocks
    report_to: list[str] = field(default_factory=list)  # trackers that log the durations of profiled blocks
    model: nn.Module = field(init=False)  # the policy without the wrappers of DDP or DeepSpeed, but with FSDP's
    model_wrapped: nn.Module = field(init=False)  # the policy with the wrappers of DDP, FSDP or DeepSpeed
    # `None` if there is no reference, or if the reference is the policy with its adapter disabled
    ref_model: nn.Module | None = None
    critic: Critic | ValueHead | None = None
    state: TrainerState = field(default_factory=TrainerState)

    def profile(self, name: str) -> AbstractContextManager:
        """Returns a context that logs the duration of its block, as TRL does."""
        is_main = PartialState().is_main_process
        step = self.state.global_step
        return ProfilingContext(f"{self.trainer_name}.{name}", self.report_to, is_main, step)

    def feature_dtype(self) -> torch.dtype | None:
        """Returns the dtype for features: that of policy, reference and critic, or `None` if their dtypes differ."""
        models = self.model, self.ref_model, getattr(self.critic, "model", None)
        weights = [filter(torch.is_floating_point, model.parameters()) for model in models if model is not None]
        dtypes = {next(model_weights).dtype for model_weights in weights}  # a model's first weight stands for all
        return dtypes.pop() if len(dtypes) == 1 else None


class Processes:
    """
    Keeps collectives alike on all ranks: chooses the number of forwards that a rank runs, and the dummy prompts that
    it adds. Dummy prompts make encoders run on ranks whose prompts don't need the encoders.

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
        Returns dummy prompts of the modalities that collectives need and this rank's prompts lack, as all ranks gather
        and reduce the same encoders, and for text whose loss would have no gradient. `with_other_batch`, another batch
        in the same backward pass has its own, so that only sharded weights need more.
        """
        if self.accelerator is None:
            return []
        present = modalities_of(prompts)
        needed = set()
        if self.accelerator.num_processes == 1:
            pass
        elif not is_unsharded(self.accelerator):
            # Every rank gathers the weights of the encoders that any rank uses
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
            present = _encoders(present)  # as `needed` has encoders, and videos share the encoder of images
        # If the language model and the critic are frozen, the loss of a batch of text alone would have no gradient
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
        Returns dummy prompts of the modalities that `prompts` have and the `selected` prompts lack, so that the same
        encoders run. Returns a dummy prompt of text if no prompt is selected and no prompt has media.
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
        n_forwards = int(self.accelerator.gather(torch.tensor([len(parts)], device=device)).max())
        if not is_unsharded(self.accelerator):
            modalities_by_forward = [modalities_of([*(prompts[i] for i in part), *dummies]) for part in parts]
            # Surplus forwards repeat the last part
            modalities_by_forward += modalities_by_forward[-1:] * (n_forwards - len(modalities_by_forward))
            # Shape `(1, forwards, modalities)`
            has_modality = torch.tensor(
                [[[modality in present for modality in MODALITIES] for present in modalities_by_forward]],
                device=device,
            )
            gathered = self.accelerator.gather(has_modality)
            if (gathered != gathered[0]).any():
                raise ValueError(
                    "Ranks hold different modalities, but this model needs separate forward passes, which would "
                    "deadlock the collectives of FSDP or DeepSpeed. Use DDP, or batches of one modality."
                )
        return n_forwards

    def _dummy(self, modality: str | None, model: nn.Module) -> EncodedPrompt:
        if modality not in self._dummies:
            processor = cast(ProcessorMixin, self.processor)  # callers that need dummy prompts pass it
            self._dummies[modality] = dummy_prompt(modality, processor, unwrapped(self.accelerator, model))
        return self._dummies[modality]

    def _encoders_to_train(self, model: nn.Module) -> set[str]:
        """Returns the [`trained_encoders`] at the first call with this model, as wrappers ignore later freezing."""
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
    """
    Raises a `RuntimeError` if a launcher started several processes, but Accelerate runs each of them alone. The
    message ends with `consequence`, which may have the field `{launched}` for the number of processes.
    """
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched > 1 and num_processes == 1:
        raise RuntimeError(
            f"`WORLD_SIZE` is {launched}, but Accelerate runs this process alone, as it does without a GPU"
            + consequence.format(launched=launched)
        )


def modalities_of(prompts: Iterable[EncodedPrompt]) -> set[str]:
    """Returns the modalities of prompts."""
    return set().union(*(prompt.modalities for prompt in prompts))


def trained_encoders(module: nn.Module, policy: PreTrainedModel) -> set[str]:
    """Returns the modalities whose media go through trained weights before they reach the language model."""
    modalities = {modality for modality in TOWERS if modality in policy.input_modalities}
    trained = set()
    for model in module.modules():  # finds the policy, and a critic, which has the policy's class
        if type(model) is not type(policy):
            continue
        encoders = {modality: model.get_submodule(name) for modality, name in find_towers(model).items()}
        inner_parameters = set(model.get_decoder().parameters())
        for encoder in encoders.values():
            inner_parameters.update(encoder.parameters())
        # Trained weights outside encoders and decoder, such as a projector's, may belong to any modality
        if any(p.requires_grad and p not in inner_parameters for p in model.base_model.parameters()):
            return modalities
        trained |= {
            modality for modality, encoder in encoders.items() if any(p.requires_grad for p in encoder.parameters())
        }
    return trained


def _encoders(modalities: set[str]) -> set[str]:
    return {ENCODER_OF[modality] for modality in modalities}


@dataclass
class PolicyForward:
    """Computes scores of completions, in packed or padded rows, on one process or with DDP, FSDP or DeepSpeed."""

    accelerator: Accelerator | None = None  # the accelerator that prepared the models, if any
    processor: ProcessorMixin | PreTrainedTokenizerBase | None = None  # encodes dummy prompts
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    temperature: float = 1.0  # for logits from the model; the fused head has a temperature of its own
    extra_outputs: tuple[str, ...] = ()  # additional outputs computed from the model's logits, such as `is_top1`
    max_tokens: int | None = None  # token budget of one forward; larger batches are scored in parts

    def __post_init__(self):
        self.processes = Processes(self.accelerator, self.processor)
        self._unreached: list[nn.Parameter] | None = None  # trained weights that no forward uses

    def unwrapped(self, model: nn.Module) -> PreTrainedModel:
        """Returns the model without the wrappers of DDP, FSDP or DeepSpeed, and of its adapter."""
        return unwrapped(self.accelerator, model)

    def worth_packing(
        self, prompts: Sequence[EncodedPrompt], lengths: Sequence[int], size: int, model: PreTrainedModel | None = None
    ) -> bool:
        """
        Returns whether packing is enabled, and packed rows of `size` completions save enough tokens over padded rows.
        With a `model`, common starts of different prompts count once.
        """
        if not self.fallbacks.packing:
            return False
        prompts, lengths = split_lengths(prompts, lengths)
        n_padded = len(lengths) * (max(map(len, prompts)) + max(lengths))
        slices = [slice(start, start + size) for start in range(0, len(lengths), size)]
        n_packed = sum(packed_length(prompts[part], lengths[part]) for part in slices)
        # Common starts of prompts take time to find, so they are only looked for if they can decide
        if n_packed > _WORTH_PACKING * n_padded and model is not None:
            n_packed = sum(lengths) + sum(self.n_prompt_tokens(model, prompts[part], lengths[part]) for part in slices)
        return n_packed <= _WORTH_PACKING * n_padded

    def n_prompt_tokens(self, model: PreTrainedModel, prompts: Sequence[EncodedPrompt], lengths: Sequence[int]) -> int:
        """Returns the number of prompt tokens in packed rows that hold completions of these `lengths`."""
        prompts, lengths = split_lengths(prompts, lengths)
        parts = [range(len(prompts))]
        if self.max_tokens is not None:
            parts = split_by_tokens(prompts, lengths, self.max_tokens)
            if self._keeps_prompts(model):  # if a group is split over parts, only its first part forwards the prompt
                chunks = chunk_ends(prompts, parts)
                parts = [part for i, part in enumerate(parts) if chunks.get(i, (True, True))[0]]
        # Batch indices of the completions of each forward
        forwards = []
        for part in parts:
            splits = split_samples([prompts[i] for i in part], self.fallbacks.isolate)
            forwards += [[part[i] for i in rows] for rows in splits]
        return sum(
            count_tokens(trees_of(model, [prompts[i] for i in rows], [lengths[i] for i in rows])) for rows in forwards
        )

    # Scores

    def score(self, model: nn.Module, request: ScoreRequest, fallbacks: Fallbacks | None = None) -> Scores:
        """
        Returns the requested scores of completions, `(B, C)`, with gradients if they are enabled.

        `model` is the policy or the reference with the fused head, as the accelerator prepared it. `fallbacks` are
        `self.fallbacks` by default, and rows are packed only if they allow it. Log-probabilities come from the
        fused head. With `fallbacks.logits_from_model`, or with a `logit_bias` of the request, they come from the
        model's logits. Callers leave the request's fields `isolate`, `min_forwards`, `logits_temperature`,
        `extra_outputs` and `states` at their defaults, as this method chooses them.

        A batch with more tokens than `max_tokens` is scored in parts. The caller must then run the backward pass by
        [`~forward.token_budget.backward_by_parts`] with the scores' `deferred`. A group with more tokens than
        `max_tokens` is split into chunks of completions. Chunks share one forward of their prompt if the model allows
        it, see [`~forward.split_groups.KeptPrompt`]. Otherwise each chunk forwards the prompt again.

        Completions outside the request's `rows` aren't forwarded. With `max_tokens`, padded rows of completions
        without tokens aren't forwarded, either. If only such completions have media of a modality, a dummy prompt
        stands for these media, so that all ranks run the same encoders. If the context of a completion was rewritten,
        one row per context is forwarded.
        """
        fallbacks = self.fallbacks if fallbacks is None else fallbacks
        request = _with_packing(request, fallbacks)
        contexts = context_rows(request.prompts, request.ids.size(1))
        request = request if contexts is None else request.by_context(contexts)
        prompts = request.prompts
        n = len(request)
        rows = request.rows
        # To read lengths waits for the device, so they are only read to split a batch into parts
        lengths = None if self.max_tokens is None else request.mask.sum(1).tolist()
        # Leaves out padded rows without completion tokens, which would cost as much as others
        needs_all = request.packed or request.whole or request.compute_aux_loss
        if rows is None and lengths is not None and not needs_all:
            nonempty = [i for i, length in enumerate(lengths) if length]
            rows = nonempty if len(nonempty) < n else None
        if rows is not None:
            selected = request.select(rows)
            dummies = self.processes.dummies_for_unselected(model, prompts, selected.prompts)
            request = selected.with_dummies(dummies)
            lengths = None if lengths is None else [*(lengths[i] for i in rows), *([0] * len(dummies))]
        if lengths is not None and (request.whole or (request.compute_aux_loss and request.packed)):
            # Whole sequences are prompts that no tokens follow. For the auxiliary loss, packed rows also hold the last
            # token of each completion.
            lengths = [0 if request.whole else length + (length > 0) for length in lengths]

        def score(index: int, part: ScoreRequest) -> Scores:
            # Supervised completions are scored once, with the first part
            part = part if index == 0 else replace(part, supervised=None)
            return self._score_part(model, part, fallbacks)

        # The models that compute states of prompts for split groups
        models = [request.critic.model] if isinstance(request.critic, Critic) else []
        models += [self.unwrapped(model)] * request.needs_policy
        # The auxiliary loss needs statistics of prompts
        keep_states = request.packed and not request.compute_aux_loss
        scores = self._in_parts(score, model, models, request, lengths, keep_states)
        if request.compute_aux_loss:
            scores.aux_loss = load_balancing_loss(scores.router)
        scores = scores if rows is None else scores.scatter_rows(rows, n)
        return scores if contexts is None else scores.map_rows(contexts.join)

    def _in_parts(
        self,
        score: Callable[[int, ScoreRequest], Scores],
        model: nn.Module,
        models: Sequence[PreTrainedModel],
        request: ScoreRequest,
        lengths: list[int] | None,
        keep_states: bool,
    ) -> Scores:
        """
        Returns scores of completions. With the `lengths` of the completions, the batch is scored in parts of at most
        `max_tokens` tokens. `score` takes the index and the request of a part. With `keep_states`, the unwrapped
        `models` forward the prompt of a split group once, and `states` of the requests for its chunks hold the result.
        """
        prompts = request.prompts
        device = request.ids.device
        if self.max_tokens is None or lengths is None:
            return score(0, request)
        parts = split_by_tokens(prompts, lengths, self.max_tokens, request.packed)
        # Maps the indices in `parts` of chunks of split groups to `(is_first, is_last)` in the group
        chunks = chunk_ends(prompts, parts)
        n_parts = len(parts)
        if self.accelerator is not None:
            # With gradients or sharded weights, a forward runs collectives, so all ranks need the same number of parts
            if torch.is_grad_enabled() or not is_unsharded(self.accelerator):
                n_parts = int(self.accelerator.gather(torch.tensor([n_parts], device=device)).max())
        if n_parts == 1:
            return score(0, request)  # not `parts[0]`, which may have another order than the batch
        kept_prompts: dict[EncodedPrompt, KeptPrompt] = {}
        keeps_prompts = keep_states and all(map(self._keeps_prompts, models))
        kept_chunks = chunks if keeps_prompts else ()
        for index in kept_chunks:
            prompt = prompts[parts[index][0]].shared
            # The forward of a kept prompt has no dummy prompts, so a prompt that needs some isn't kept
            if prompt not in kept_prompts and not self.processes.dummies(model, [prompt]):
                kept_prompts[prompt] = KeptPrompt(functools.partial(self._states, models, prompt, device))

        def score_part(index: int, part: list[int]) -> Scores:
            kept_prompt = kept_prompts.get(prompts[part[0]].shared) if index in chunks else None
            states = None if kept_prompt is None else kept_prompt.states(*chunks[index])
            return score(index, replace(request.select(part), states=states))

        if torch.is_grad_enabled():
            return DeferredParts(score_part, parts, n_parts, device).joined()
        # Surplus forwards repeat the last part
        scores = [score_part(i, part) for i, part in enumerate(parts + parts[-1:] * (n_parts - len(parts)))]
        return Scores.join(scores[: len(parts)], parts)

    def _keeps_prompts(self, model: PreTrainedModel) -> bool:
        """Returns whether chunks of a group share one forward of their prompt. Sharded weights don't allow it."""
        return keeps_states(model) and (self.accelerator is None or is_unsharded(self.accelerator))

    def _states(self, models: Sequence[PreTrainedModel], prompt: EncodedPrompt, device: torch.device) -> States:
        with self.autocast():
            return prompt_states(models, prompt, device)

    def rewards(
        self,
        model: nn.Module,
        completions: Completions,
        *,
        packed: bool = True,
        fallbacks: Fallbacks | None = None,
    ) -> Scores:
        """
        Returns the rewards of completions by a reward model, as `values` `(B, 1)`, with gradients if they are enabled.
        See [`~forward.logprobs.completion_rewards`].
        """
        fallbacks = self.fallbacks if fallbacks is None else fallbacks
        reward_model = self.unwrapped(model)
        request = ScoreRequest(*completions, packed=packed)
        request = _with_packing(request, fallbacks)

        def score(index: int, part: ScoreRequest) -> Scores:
            n = len(part)
            part = self._with_isolation(self._with_dummies(model, part), fallbacks)

            def rewards(call: Forward) -> dict[str, torch.Tensor]:
                return {"values": completion_rewards(call, reward_model, part)}

            with self.autocast():
                tensors = self._as_one_forward(model, rewards)
            return Scores(**self._reach_unused(model, tensors, part.states)).rows(slice(n))

        lengths = None if self.max_tokens is None else request.mask.sum(1).tolist()
        return self._in_parts(score, model, [reward_model], request, lengths, keep_states=request.packed)

    def _score_part(self, model: nn.Module, request: ScoreRequest, fallbacks: Fallbacks) -> Scores:
        n = len(request)
        policy = self.unwrapped(model)
        critic = request.critic
        needs_policy = request.needs_policy
        # DDP and FSDP hook the outputs of the wrapper's forward, and scores must pass these hooks. Log-probabilities
        # are such outputs already. Hidden states, values and divergences are computed after that forward, so requests
        # for them run as one forward of the wrapper.
        in_one_forward = request.hidden or not request.logps or request.target is not None
        logits_from_model = fallbacks.logits_from_model or request.logit_bias is not None
        temperature = self.temperature if logits_from_model else None
        # Without the fused head, the value head gets its hidden states from the forward that computes the logits, so
        # log-probabilities are computed even if they weren't requested
        logps = request.logps or (logits_from_model and isinstance(critic, ValueHead))
        fields = {"logits_temperature": temperature, "extra_outputs": self.extra_outputs}
        supervised = n_supervised = None
        if request.supervised is not None:
            n_supervised = len(request.supervised)
            supervised = self._with_dummies(model, request.supervised, with_other_batch=True)
            supervised = replace(self._with_isolation(supervised, fallbacks), logit_bias=request.logit_bias, **fields)
        request = self._with_isolation(self._with_dummies(model, request), fallbacks)
        request = replace(request, logps=logps and request.target is None, **fields)
        if needs_policy:
            _gather_head(policy)

        def score(call: Forward) -> dict[str, torch.Tensor]:
            results = completion_scores(call, policy, request).tensors() if needs_policy else {}
            if isinstance(critic, Critic):
                results["values"] = completion_values(critic, critic.model, request)
            if supervised is not None:
                results["supervised"] = completion_scores(call, policy, supervised).logps[:n_supervised]  # no dummies
            return results

        with self.autocast():
            # DDP looks for unused parameters in its last forward alone, so one forward of DDP must contain all
            # forwards
            splits_forward = fallbacks.isolate is not None and isinstance(model, DistributedDataParallel)
            in_one_forward |= isinstance(critic, Critic) or supervised is not None or splits_forward
            tensors = self._as_one_forward(model, score) if in_one_forward else score(model)
        return Scores(**self._reach_unused(model, tensors, request.states)).rows(slice(n))  # without dummy prompts

    def _reach_unused(
        self, model: nn.Module, tensors: dict[str, torch.Tensor], states: States | None
    ) -> dict[str, torch.Tensor]:
        """
        Adds to a score the trained weights that no forward uses, times 0. DDP would wait for their gradients
        otherwise.
        """
        # Only the last chunk of a split group reaches the encoders, and gradients are synchronized at that chunk
        reaches_encoders = states is None or self.accelerator is None or self.accelerator.sync_gradients
        is_ddp = isinstance(model, DistributedDataParallel)
        if is_ddp and reaches_encoders and torch.is_grad_enabled() and not model.find_unused_parameters:
            score_name = next(key for key in ("logps", "divergences", "values") if key in tensors)
            if self._unreached is None:
                self._unreached = unreached_parameters(model, list(tensors.values()))
            zero = sum(0 * parameter.flatten()[0] for parameter in self._unreached)
            return {**tensors, score_name: tensors[score_name] + zero}
        return tensors

    def _with_isolation(self, request: ScoreRequest, fallbacks: Fallbacks) -> ScoreRequest:
        n_forwards = self.processes.n_forwards(request.prompts, fallbacks.isolate)
        return replace(request, isolate=fallbacks.isolate, min_forwards=n_forwards)

    def _with_dummies(self, model: nn.Module, request: ScoreRequest, with_other_batch: bool = False) -> ScoreRequest:
        return request.with_dummies(self.processes.dummies(model, request.prompts, with_other_batch))

    def _as_one_forward(
        self, model: nn.Module, function: Callable[[Forward], dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Calls `function` with the model's forward, within one forward of the wrapper, so that its hooks run once."""
        module = model if self.accelerator is None else self.accelerator.unwrap_model(model)
        return _ForwardRedirection()(model, module, lambda: function(module.forward))

    def autocast(self) -> AbstractContextManager:
        """Returns the accelerator's context for mixed precision."""
        return nullcontext() if self.accelerator is None else self.accelerator.autocast()


def _with_packing(request: ScoreRequest, fallbacks: Fallbacks) -> ScoreRequest:
    """Returns the request, and the one for supervised completions, padded if the fallbacks pad rows."""
    if request.supervised is not None:
        request = replace(request, supervised=_with_packing(request.supervised, fallbacks))
    return replace(request, packed=request.packed and fallbacks.packing)


def _gather_head(policy: PreTrainedModel) -> None:
    """
    Gathers the weight of the LM head for TRL's fused head, which reads the weight without a forward of the module. If
    the fused head gathered the weight itself, FSDP wouldn't reduce the gradient, and each rank would train its shard
    of the weight on its own completions alone.
    """
    head = policy.get_output_embeddings()
    if isinstance(head, FSDPModule) and torch.is_grad_enabled():
        head.unshard()


def unreached_parameters(module: nn.Module, outputs: Iterable[torch.Tensor]) -> list[nn.Parameter]:
    """
    Returns trained parameters that outputs don't depend on, such as parameters of an encoder's last layers if the
    model reads the output of an earlier layer. The list is empty if reentrant checkpointing hides the graph.
    """
    reached = leaves_of_graph([*outputs])
    return [] if None in reached else [p for p in module.parameters() if p.requires_grad and p not in reached]
