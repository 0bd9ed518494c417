# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Per-token log-probabilities, entropies and other scores of completions, in packed or in padded rows."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput
from trl.trainer.utils import FusedCausalLMOutput

from ..encoding.dummies import DummyPrompt
from ..encoding.join import continued_field
from ..encoding.prompts import EncodedPrompt
from ..families import family_of
from ..models.critic import ValueHead
from ..models.wrapped import hidden_states
from .attention import decoder_inputs
from .divergence import divergences, head_of
from .encoders import encode_once, frozen_features, media_inputs
from .head import run_backbone, scores_of_logits
from .layout import PrefixLayout, States, pack
from .masks import linear_masks, trees_of
from .prompt_groups import group_by_prompt, left_pad, split_samples, with_equal_dims
from .scores import ScoreRequest, Scores, router_statistics
from .split_groups import without_prompt


# A model to call, or its forward
Forward = Callable[..., ModelOutput]


@contextmanager
def _prepare_forward(
    model: PreTrainedModel, batch: "_Batch", *, encodes_media: bool = True, **kwargs: bool
) -> Iterator[list[ModelOutput]]:
    """
    Prepares an unwrapped model for the forward of a batch, and yields a list that collects the text decoder's outputs.
    Only arguments of the decoder are overridden, and the outer model merges media as usual, so no family is special.
    """
    if encodes_media:
        encode_once(model, batch.parts, batch.labels.device)
    outputs: list[ModelOutput] = []

    def collect(module: nn.Module, args: tuple, output: ModelOutput) -> ModelOutput | None:
        outputs.append(output)
        if not kwargs:
            return None
        # Some outer models, such as LLaVA since transformers 5.24, accept no router logits from their decoder
        return type(output)(**{name: value for name, value in output.items() if name != "router_logits"})

    with (
        decoder_inputs(model, **batch.decoder_arguments, **kwargs),
        model.get_decoder().register_forward_hook(collect),
        frozen_features(model, batch.parts),
    ):
        yield outputs


def completion_scores(model: Forward, unwrapped_model: PreTrainedModel, request: ScoreRequest) -> Scores:
    """
    Computes the requested scores of completions, packed or padded.

    Args:
        model, unwrapped_model (`torch.nn.Module`, [`~transformers.PreTrainedModel`]):
            Model to call, as prepared by the accelerator, with [`~forward.head.add_fused_head`] and, for packed rows,
            [`install_prefix_attention`] applied; and the same model without wrappers.
        request ([`~forward.scores.ScoreRequest`]):
            Completions, and the scores to compute. Only a [`~models.ValueHead`] computes values here.
            `compute_aux_loss` requests router statistics. `rows` and `supervised` aren't read.

    Returns:
        [`~forward.scores.Scores`]: the requested scores, such as `logps` and, if the head computes them, `entropies`,
        shape `(B, C)`, and `hidden`, `(B, C, H)`, 0 where the mask is 0.

    Raises:
        `ValueError`: If a model has no router logits to return.
    """
    config = unwrapped_model.get_decoder().config
    # Only the decoder is asked for router logits. With them, the outer model or TRL's head would compute a loss in
    # which a shared prompt counts once, not once per completion.
    outer_options = {"output_router_logits": False} if getattr(config, "output_router_logits", False) else {}

    def score(part: ScoreRequest) -> Scores:
        batch = _batch(unwrapped_model, part)
        temperature = part.logits_temperature
        target = part.target
        inputs = {**batch.inputs, **outer_options}
        router = {"output_router_logits": True} if part.compute_aux_loss else {}
        encodes_media = not part.whole  # whole sequences run once, so a cache would save nothing
        with (
            _prepare_forward(unwrapped_model, batch, encodes_media=encodes_media, **router) as decoder_outputs,
            hidden_states(unwrapped_model, instead_of_logits=temperature is None) as head_inputs,
        ):
            if not part.logps:  # without labels, the fused head returns hidden states, and scores come from these
                model(**inputs, fused_lm_head=True)
                outputs = FusedCausalLMOutput()
            elif temperature is None:  # by the fused head
                label_options = {} if batch.label_index is None else {"label_index": batch.label_index}
                output = model(**inputs, shift_labels=batch.labels, fused_lm_head=True, **label_options)
                outputs = cast(FusedCausalLMOutput, output)
            else:
                options = temperature, part.logit_bias or {}, part.extra_outputs
                outputs = _scores_from_logits(model, unwrapped_model, inputs, batch, *options)
        top1 = None if outputs.is_top1 is None else outputs.is_top1.float()
        computed = {"logps": outputs.log_probs, "entropies": outputs.entropy, "top1": top1}
        computed |= {"mean_logits": outputs.mean_logits, "log_sum_sq_probs": outputs.log_sum_sq_probs}
        results = {name: batch.by_completion(values) for name, values in computed.items() if values is not None}
        if isinstance(part.critic, ValueHead):
            results["values"] = batch.by_completion(part.critic(head_inputs[0]))
        if part.hidden:
            results["hidden"] = batch.by_completion(head_inputs[0])
        if part.compute_aux_loss:
            results["router"] = _batch_router_statistics(unwrapped_model, decoder_outputs[0], batch)
        if target is not None:
            head = head_of(unwrapped_model, target.student_rule)
            results["divergences"], entropies = divergences(batch.by_completion(head_inputs[0]), head, target)
            results.setdefault("entropies", entropies)
        return Scores(**results)

    return _in_parts(score, request)


def completion_values(
    critic: Callable[..., torch.Tensor], unwrapped_model: PreTrainedModel, request: ScoreRequest
) -> torch.Tensor:
    """
    Computes the critic's value of the state before each completion token, `(B, C)`, 0 where the mask is 0, and no
    other scores. `critic` is a [`~models.Critic`], or a function like its forward.
    """

    def score(part: ScoreRequest) -> Scores:
        batch = _batch(unwrapped_model, part)
        with _prepare_forward(unwrapped_model, batch):
            ids = batch.inputs.pop("input_ids")
            return Scores(values=batch.select_completions(critic(ids, **batch.inputs)))

    return _in_parts(score, replace(request, compute_aux_loss=False)).values


def completion_rewards(model: Forward, unwrapped_model: PreTrainedModel, request: ScoreRequest) -> torch.Tensor:
    """
    Computes scores of a reward model, in float32 or float64, `(B, 1)`, at a completion's last token that isn't
    padding, as transformers' sequence classifiers do. `unwrapped_model` is as [`~models.reward_model.as_reward_model`]
    returns it.
    """
    # `ends` `(B, 1)`: the index after the last scored token, 0 without one
    is_scored = request.mask.bool() & (request.ids != unwrapped_model.config.get_text_config().pad_token_id)
    next_index = torch.arange(1, is_scored.size(1) + 1, device=is_scored.device)
    ends = (is_scored * next_index).amax(1, keepdim=True) if is_scored.size(1) else is_scored.sum(1, keepdim=True)
    # `completion_values` returns values before tokens. One more token adds the value after the last token.
    mask = F.pad(request.mask, (0, 1)).scatter(1, request.mask.sum(1, keepdim=True), 1)

    def score_tokens(input_ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        scores: list[torch.Tensor] = []
        head = unwrapped_model.get_submodule("score")
        with head.register_forward_hook(lambda module, args, output: scores.append(output)):
            model(input_ids=input_ids, use_cache=False, **inputs)
        return scores[-1][..., 0].to(torch.promote_types(scores[-1].dtype, torch.float32))

    request = replace(request, ids=F.pad(request.ids, (0, 1)), mask=mask)
    return completion_values(score_tokens, unwrapped_model, request).gather(1, ends)


def prompt_states(models: Iterable[PreTrainedModel], prompt: EncodedPrompt, device: torch.device) -> States:
    """Computes keys and values of a prompt in each attention layer of unwrapped models that run packed rows."""
    no_ids = torch.zeros(1, 0, dtype=torch.long, device=device)
    all_states = {}
    for model in models:
        batch = _packed_batch(model, [prompt], no_ids, no_ids)
        states = {}
        cast(PrefixLayout, batch.decoder_arguments["prefix_layout"]).states = states
        with _prepare_forward(model, batch):
            last_states = run_backbone(model, model.forward, (), {**batch.inputs, "use_cache": False})
        # An empty sum is 0. It makes a key depend on the last hidden states, so that all weights get a gradient.
        layer, (key, value) = next(iter(states.items()))
        all_states |= {**states, layer: (key + last_states[..., :0].sum().to(key), value)}
    return all_states


def _batch_router_statistics(model: PreTrainedModel, decoder_output: ModelOutput, batch: "_Batch") -> torch.Tensor:
    router_logits = decoder_output.get("router_logits")
    if not router_logits:
        raise ValueError(
            f"{type(model).__name__} returns no router logits, so that it has no load-balancing loss; set "
            "`router_aux_loss_coef=0`"
        )
    return router_statistics(router_logits, model.get_decoder().config.num_experts_per_tok, batch.row_counts())


def _in_parts(score: Callable[[ScoreRequest], Scores], request: ScoreRequest) -> Scores:
    """With `isolate`, runs at least `min_forwards` forwards."""
    if request.isolate is None:
        return score(request)
    parts = split_samples(request.prompts, request.isolate)
    n_surplus = max(request.min_forwards - len(parts), 0)
    results = [score(request.select(part)) for part in parts + parts[-1:] * n_surplus]
    joined = Scores.join(results[: len(parts)], parts)
    # Surplus forwards repeat the last part. With weight 0, they are added to one of the scores, so that they take part
    # in the backward pass, and all ranks run equal collectives.
    name, tensor = next(iter(joined.tensors().items()))
    zero = 0.0 * sum(result.tensors()[name].sum() for result in results[len(parts) :])
    setattr(joined, name, tensor + zero)
    return joined


def _scores_from_logits(
    model: Forward,
    unwrapped_model: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor | bool],
    batch: "_Batch",
    temperature: float,
    bias: dict[int, float],
    extra_outputs: Collection[str],
) -> FusedCausalLMOutput:
    """Computes the output of TRL's fused head with `shift_labels`, from the model's logits at scored positions."""
    skips_logits = takes_logits_to_keep(unwrapped_model)
    positions = batch.scored_positions()
    logits = model(**inputs, use_cache=False, **({"logits_to_keep": positions} if skips_logits else {}))["logits"]
    logits = (logits if skips_logits else logits[:, positions]).float()
    labels = batch.labels[:, positions]
    if bias:
        bias_by_token = logits.new_zeros(logits.size(-1))
        bias_by_token[list(bias)] = logits.new_tensor(list(bias.values()))
        logits = logits + bias_by_token
    logps, entropies = scores_of_logits(logits, labels.clamp(min=0), temperature)
    computed = {"log_probs": logps, "entropy": entropies}
    if "is_top1" in extra_outputs:
        computed["is_top1"] = logits.argmax(-1) == labels
    if "mean_logits" in extra_outputs:
        computed["mean_logits"] = logits.detach().mean(-1) / temperature
    if "log_sum_sq_probs" in extra_outputs:
        computed["log_sum_sq_probs"] = (2 * (logits.detach() / temperature).log_softmax(-1)).logsumexp(-1)
    is_scored = labels != -100
    return FusedCausalLMOutput(
        **{name: batch.at_all_positions(torch.where(is_scored, values, 0)) for name, values in computed.items()}
    )


def takes_logits_to_keep(model: PreTrainedModel) -> bool:
    """Returns whether a model's forward can compute logits of some positions alone."""
    return "logits_to_keep" in inspect.signature(type(model).forward).parameters


@dataclass
class _Batch:
    """
    The inputs of one forward, `(1, T)` for a packed row and `(B, S)` for `B` padded rows, and the positions of
    completions `(B, C)` in its outputs.
    """

    parts: Sequence[EncodedPrompt]  # prompts and later turns whose media the inputs hold, in order
    inputs: dict[str, torch.Tensor]
    decoder_arguments: Mapping[str, torch.Tensor | PrefixLayout]  # arguments that override the text decoder's inputs
    labels: torch.Tensor  # the next token at scored positions, else -100
    scored_positions: Callable[[], torch.Tensor]  # returns the positions with a label in any row
    # Returns how many padded rows would hold each token, `(B, S)` or `(1, T)`; rows of dummy prompts don't count
    row_counts: Callable[[], torch.Tensor]
    select_completions: Callable[[torch.Tensor], torch.Tensor]  # selects `(B, C, ...)` from values at all positions
    label_index: torch.Tensor | None = None  # positions of labels in a packed row, known without a host sync

    def by_completion(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values `(B, C, ...)` of completions, from values at all positions or at scored positions alone."""
        return self.select_completions(self.at_all_positions(values))

    def at_all_positions(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values at all positions. If `values` are only of scored positions, other positions are 0."""
        if values.shape[:2] == self.labels.shape:
            return values
        return values.new_zeros(*self.labels.shape, *values.shape[2:]).index_copy(1, self.scored_positions(), values)


def _batch(model: PreTrainedModel, request: ScoreRequest) -> _Batch:
    prompts = request.prompts
    ids = request.ids
    mask = request.mask
    if request.whole:
        ids = ids[:, :0]
        mask = mask[:, :0]
    if request.packed:
        options = {"with_last": request.compute_aux_loss, "states": request.states}
        batch = _packed_batch(model, prompts, ids, mask, **options)
    else:
        batch = _padded_batch(model, prompts, ids, mask)
    return _label_sequences(batch, request) if request.whole else batch


def _label_sequences(batch: _Batch, request: ScoreRequest) -> _Batch:
    """Returns a batch of whole sequences (`ScoreRequest.whole`) with the next tokens at scored positions as labels."""
    prompts = request.prompts
    next_ids = request.ids
    mask = request.mask
    is_scored = mask.bool()
    device = mask.device
    # Position of each sequence's first token: a packed row joins sequences, and padded rows are padded on the left
    if request.packed:
        unique_prompts = list(group_by_prompt(prompts))
        ends = dict(zip(unique_prompts, accumulate(map(len, unique_prompts)), strict=True))
        first_positions = torch.tensor([ends[prompt.shared] - len(prompt) for prompt in prompts], device=device)
        rows = torch.zeros_like(first_positions)[:, None]
    else:
        first_positions = torch.tensor([batch.labels.size(1) - len(prompt) for prompt in prompts], device=device)
        rows = torch.arange(len(prompts), device=device)[:, None]
    positions = torch.where(is_scored, first_positions[:, None] + torch.arange(mask.size(1), device=device), 0)
    batch.labels[rows.expand_as(positions)[is_scored], positions[is_scored]] = next_ids[is_scored]
    return replace(
        batch,
        label_index=None,
        scored_positions=lambda: (batch.labels != -100).any(0).nonzero()[:, 0],
        select_completions=lambda values: _masked(values[rows, positions], is_scored),
    )


def _packed_batch(
    model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    completion_ids: torch.Tensor,
    completion_mask: torch.Tensor,
    with_last: bool = False,
    states: States | None = None,
) -> _Batch:
    """
    Returns a batch of one packed row. The row holds each prompt with its media once, and each common start of prompts
    once. Every token attends to the same tokens as in a padded row. Sharing prompts in RL is an idea of
    [Prefix Grouper](https://huggingface.co/papers/2506.05433).
    """
    # One copy of both tensors, so that the host waits once
    ids, mask = torch.stack([completion_ids, completion_mask.to(completion_ids.dtype)]).cpu()
    lengths = mask.sum(1).tolist()
    groups = group_by_prompt(prompts)
    masks = [linear_masks(model, prompt, max(lengths)) for prompt in groups]
    fill = family_of(model).token_field_fill
    # Whole sequences have no completions, but labels on their prompts. So their common starts aren't merged.
    trees = trees_of(model, prompts, lengths) if completion_ids.size(1) else None
    device = completion_ids.device
    row = pack(prompts, ids, mask, masks, fill, with_last=with_last, trees=trees, device=device)
    row = row if states is None else without_prompt(row, states)
    inputs = {
        "input_ids": row.input_ids,
        "attention_mask": torch.ones_like(row.input_ids),
        "position_ids": row.position_ids,
        **media_inputs(row.parts, model, device),
        **row.token_fields,
    }

    def row_counts() -> torch.Tensor:
        # A prompt's token is in a padded row per completion, and a completion's token in one
        rows_per_token = torch.ones_like(row.input_ids)
        for start, length, parent, _ in row.layout.segments:
            if start in row.nodes:
                sizes = (len(groups[leaf]) for leaf in row.nodes[start].leaves if not isinstance(leaf, DummyPrompt))
                rows_per_token[0, start : start + length] = sum(sizes)
            if start != parent:
                rows_per_token[0, start] = 0  # a copy of the last token of its parent
        return rows_per_token

    return _Batch(
        row.parts,
        inputs,
        {
            "prefix_layout": row.layout,
            "position_ids": row.position_ids,
            **_token_positions(model, row.layout.positions),
        },
        row.shift_labels,
        lambda: row.label_index,
        row_counts,
        lambda values: _masked(values[0][row.score_index], completion_mask.bool()),
        row.label_index,
    )


def _padded_batch(
    model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    completion_ids: torch.Tensor,
    completion_mask: torch.Tensor,
) -> _Batch:
    device = completion_ids.device
    n_new = completion_ids.size(1)  # `C`
    batch = left_pad(prompts, model.config.get_text_config().pad_token_id or 0)
    if family_of(model).pads_with_first_token:
        first_ids = torch.stack([prompt.input_ids[0] for prompt in prompts])[:, None]
        batch["input_ids"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], first_ids)
    completion_positions = with_equal_dims([prompt.positions_after(n_new) for prompt in prompts])
    fields = {name: continued_field(model, name, value, n_new) for name, value in batch["fields"].items()}
    # Later turns with media have token fields of their own, from the first completion token on
    for index, prompt in enumerate(prompts):
        for part in prompt.parts[1:]:
            for name, value in part.token_fields.items():
                fields[name][index, -n_new:][: len(value)] = value[:n_new]
    parts = [*chain.from_iterable(prompt.parts for prompt in prompts)]
    inputs = {
        "input_ids": torch.cat([batch["input_ids"].to(device), completion_ids], dim=1),
        "attention_mask": torch.cat([batch["attention_mask"].to(device), completion_mask], dim=1),
        "position_ids": torch.cat([batch["position_ids"], torch.cat(completion_positions, dim=-2)], dim=-1).to(device),
        **media_inputs(parts, model, device),
        **{name: value.to(device) for name, value in fields.items()},
    }
    # A position predicts the next token. The span starts at the prompt's last token, and ends before the row's last.
    predicting_span = slice(-n_new - 1, -1)
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[:, predicting_span] = completion_ids.masked_fill(completion_mask == 0, -100)
    return _Batch(
        parts,
        inputs,
        _token_positions(model, (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)),
        labels,
        lambda: torch.arange(labels.size(1), device=device)[predicting_span],
        lambda: (
            inputs["attention_mask"]
            * torch.tensor([[not isinstance(prompt, DummyPrompt)] for prompt in prompts], device=device)
        ),
        lambda values: _masked(values[:, predicting_span], completion_mask.bool()),
    )


def _masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.view(*mask.shape, *[1] * (values.dim() - 2)), values, 0.0)


def _token_positions(model: PreTrainedModel, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    return {} if family_of(model).query_scale is None else {"token_positions": positions}
