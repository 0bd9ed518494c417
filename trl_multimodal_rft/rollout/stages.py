# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Stages of a rollout: encoding rows as prompts, with or without a view, adding completions, and scoring them.

In shapes, `N` is the number of completions, and `C` the number of columns for tokens of completions.
"""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel
from trl.trainer.utils import nanmax, nanmin

from ..algorithms.metrics import Metric
from ..data.reading.refs import MediaError, MediaRef, iter_refs
from ..encoding.conversations import Contexts, Conversation
from ..encoding.join import same_prompt
from ..encoding.prompts import EncodedPrompt
from ..forward.divergence import Target, head_of
from ..forward.head import HeadRule
from ..forward.scores import ScoreRequest, Scores
from ..forward.trees import share_media
from ..models.critic import Critic, ValueHead
from ..policy import PolicyForward
from ..views.views import View
from .environments import Environments
from .ranks import sum_over_ranks
from .rollout import Rollout, Source, require
from .stream import EncodedRow, PromptEncoder


def collect(
    rows: Sequence[EncodedRow],
    encoder: PromptEncoder,
    toolbox: Environments,
    *,
    encodes_text: bool,
    group_size: int,
    pad_token_id: int,
    accelerator: Accelerator,
    views: Mapping[int, View] | None = None,
) -> Rollout:
    """
    Returns a rollout of `rows`, one row per completion, with environments and encoded prompts.

    A batch with media is always encoded. A batch of text is encoded only if `encodes_text`: without it, the user's
    `rollout_func` tokenizes the text. `views`, by row index, has the views under which prompts are encoded.
    """
    dataset_rows, row_indices = [row.row for row in rows], [row.row_index for row in rows]
    source = Source(dataset_rows, row_indices, [row.messages for row in rows], failures=[None] * len(rows))
    source.tools = [toolbox.tools_by_name] * len(rows)
    dataset_messages = source.messages
    if toolbox.factories:
        source.environments, source.messages, source.failures = toolbox.reset_all(
            source.messages, dataset_rows, row_indices, encoder.checked_observation
        )
        source.tools = [*map(toolbox.tools_in, source.environments)]
    source.whole_groups = accelerator.num_processes == 1 or len(rows) % group_size == 0
    # Groups are counted over all ranks, since a group may straddle ranks. For example, with groups of 2 and 3 rows per
    # rank, rank 0 has the ids 0, 0, 1, and rank 1 has 1, 2, 2
    group_ids = (torch.arange(len(rows)) + accelerator.process_index * len(rows)) // group_size
    prompts, messages = [], source.messages
    if encodes_text or any(next(iter_refs(prompt), None) is not None for prompt in messages):
        for i, row in enumerate(rows):
            same_group = i > 0 and group_ids[i] == group_ids[i - 1]
            if row.prompt is not None:
                prompts.append(row.prompt)
            elif same_group and same_prompt(messages[i], messages[i - 1]):
                prompts.append(prompts[-1])
            else:
                view = None if views is None else views[row.row_index]
                encode = functools.partial(encoder.encode, row=row.row_index, view=view, **source.template_tools(i))
                try:
                    prompts.append(encode(messages[i]))
                except MediaError as error:
                    # If the messages are the row's own, the row is at fault. If the row has none, no prompt is left
                    if messages[i] is dataset_messages[i] or dataset_messages[i] is None:
                        raise
                    # The environment's observation can't be encoded. The trajectory ends, with the row's own prompt
                    source.failures[i], messages[i] = error, dataset_messages[i]
                    prompts.append(encode(messages[i]))
    share_media(prompts)
    return Rollout(prompts, group_ids.to(accelerator.device), pad_token_id, source=source)


def view_prompts(rollout: Rollout, view: View, encoder: PromptEncoder) -> list[EncodedPrompt]:
    """
    Returns the prompts of a rollout's completions, encoded under a view. Completions of one prompt share the new
    prompt. If the view replaces no media of a prompt, the prompt stays the same object. Media that tools returned stay
    as they are. Random numbers depend on the view's seed and the row index.
    """
    new_prompts_by_id: dict[int, EncodedPrompt] = {}  # by `id` of the prompt without the view

    def under_view(index: int, prompt: EncodedPrompt, batch_messages: list[list[dict[str, Any]]]) -> EncodedPrompt:
        """Returns a prompt, with the messages `batch_messages[index]`, under the view."""
        if isinstance(prompt, Contexts):  # the first context is the prompt, and later contexts replaced it
            contexts = zip(prompt.prompts, [batch_messages[index], *rollout.source.contexts[index]], strict=True)
            # Passes the messages of the whole batch, because a view may take media of another row
            new_prompts = [
                under_view(index, context, [*batch_messages[:index], messages, *batch_messages[index + 1 :]])
                for context, messages in contexts
            ]
            is_unchanged = all(
                context is new_prompt for context, new_prompt in zip(prompt.prompts, new_prompts, strict=True)
            )
            return prompt if is_unchanged else Contexts.of(new_prompts, prompt.ends)
        if isinstance(prompt, Conversation):
            return with_new_start(prompt, under_view(index, prompt.prompt, batch_messages))
        if not any(view.applies_to(modality) for modality in prompt.modalities):
            return prompt
        if id(prompt) not in new_prompts_by_id:
            new_prompts_by_id[id(prompt)] = encoder.encode(
                batch_messages[index],
                rollout.source.row_indices[index],
                view_of_row(view, batch_messages, rollout.source.row_indices, index),
                sampled=True,  # a context may hold turns that the policy sampled
                **rollout.source.template_tools(index),
            )
        return new_prompts_by_id[id(prompt)]

    prompts = [under_view(index, prompt, rollout.source.messages) for index, prompt in enumerate(rollout.prompts)]
    share_media(prompts)
    return prompts


def with_new_start(prompt: EncodedPrompt, start: EncodedPrompt) -> EncodedPrompt:
    """
    Replaces the prompt of a [`Conversation`] by `start`, and keeps the tool results. Returns `start` itself for any
    other prompt. `start` must have as many tokens as the prompt that it replaces.
    """
    if not isinstance(prompt, Conversation):
        return start
    if start is prompt.prompt:
        return prompt
    return replace(prompt, prompt=start, media=start.media, mask_cache={}, on_device={})


def view_of_row(view: View, messages: Sequence[Any], row_indices: Sequence[int], index: int) -> View:
    """
    Returns the view, seeded for the row at `index` in the batch. A view that needs media of another row gets the media
    of the next row that has other media of the same modalities. If the batch has no such row, the view gets no media.
    In a batch of 4 rows, the rows after row 2 are 3, 0 and 1.
    """
    view = view.seeded(*view.seed, row_indices[index])
    if not view.type.needs_other:
        return view
    media = _media_to_replace(view, messages[index])
    for distance in range(1, len(messages)):
        others = _media_to_replace(view, messages[(index + distance) % len(messages)])
        if {ref.modality for ref in others} >= {ref.modality for ref in media} and not same_prompt(others, media):
            return view.with_others(others)
    return view


def _media_to_replace(view: View, messages: Any) -> list[MediaRef]:
    return [ref for ref in iter_refs(messages) if view.applies_to(ref.modality)]


# Keys in the output of `rollout_func` that aren't columns for reward functions
_ROLLOUT_KEYS = ("prompt_ids", "completion_ids", "logprobs", "env_mask")


def right_pad(rows: Sequence[Sequence], value: float, multiple: int | None = None) -> torch.Tensor:
    """Returns lists of numbers as a tensor `(N, C)`, padded on the right, with `C` a multiple of `multiple`."""
    width = max([1, *map(len, rows)])  # a batch without tokens gets one column, which masks exclude
    width += -width % (multiple or 1)  # rounds up
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def take_custom_rollout(rollout: Rollout, output: dict[str, Any], placeholders: Collection[int]) -> tuple:
    """
    Returns the ids, log-probabilities and mask of sampled tokens in the output of `rollout_func`. Adds the output's
    other columns to the rollout, and the output's prompts if the rollout has none. Raises `ValueError` if a key is
    missing, a prompt with media was tokenized differently, or placeholders were sampled.
    """
    if missing := sorted({"prompt_ids", "completion_ids", "logprobs"} - output.keys()):
        raise ValueError(f"`rollout_func` returned a dictionary without the keys {missing}; add them.")
    rollout.source.extra = {name: value for name, value in output.items() if name not in _ROLLOUT_KEYS}
    if rollout.prompts:
        rows = zip(rollout.prompts, output["prompt_ids"], output["completion_ids"], strict=True)
        for i, (prompt, prompt_ids, completion_ids) in enumerate(rows):
            if list(prompt_ids) != prompt.input_ids.tolist():
                raise ValueError(
                    f"`rollout_func` returned {len(prompt_ids)} `prompt_ids` for completion {i}, which differ from "
                    f"the {len(prompt)} ids of its prompt by the processor, placeholders included; return the ids of "
                    "`trainer.processing_class.apply_chat_template(..., tokenize=True, return_dict=True)`."
                )
            if not set(placeholders).isdisjoint(completion_ids):
                raise ValueError(
                    f"`rollout_func` returned placeholders of media in `completion_ids` of completion {i}, but not "
                    "the media; use `tools` or `environment_factory` to show media to the model."
                )
    else:
        ids_by_prompt = [torch.tensor(row, dtype=torch.long) for row in output["prompt_ids"]]
        rollout.prompts = [EncodedPrompt(ids, {}, {}, torch.arange(len(ids))[None]) for ids in ids_by_prompt]
    return output["completion_ids"], output["logprobs"], output.get("env_mask")


def add_completions(
    rollout: Rollout,
    ids: list[list[int]],
    logps: list[list[float | None]] | None,
    tool_mask: list[list[int]] | None,
    *,
    ended: list[bool],
    pad_to_multiple_of: int | None,
    mask_truncated: bool,
    accelerator: Accelerator,
) -> tuple[dict[str, float], int]:
    """
    Adds completions, their masks and their log-probabilities to a rollout. `tool_mask` is 0 on results of tools, and
    `None` without tools. `ended` is false for completions that were cut off. With `mask_truncated`, the loss
    leaves such completions out. Returns TRL's metrics of lengths, and the number of prompt and sampled tokens, both
    over all ranks.
    """
    device, pad_token_id = accelerator.device, rollout.pad_token_id
    rollout.source.ids, rollout.source.ended = ids, ended
    rollout.completion_ids = right_pad(ids, pad_token_id, pad_to_multiple_of).to(device)
    mask = right_pad([[1] * len(row) for row in ids], 0, pad_to_multiple_of)
    has_ended = torch.tensor(ended)
    # Numbers of sampled tokens
    lengths = torch.tensor([*map(len, ids)] if tool_mask is None else [*map(sum, tool_mask)])
    if tool_mask is not None:  # padding may be 1, since `completion_mask` excludes it
        rollout.tool_mask = right_pad(tool_mask, 1, pad_to_multiple_of).to(device)
    if logps is not None:
        rows = [[torch.nan if logp is None else logp for logp in row] for row in logps]
        rollout.sampling_per_token_logps = right_pad(rows, 0.0, pad_to_multiple_of).to(device)
    if mask_truncated:
        mask = mask * has_ended[:, None]
        if rollout.tool_mask is not None:
            rollout.tool_mask = rollout.tool_mask * has_ended[:, None].to(device)
    rollout.completion_mask = mask.to(device)
    prompt_lengths = torch.tensor([sum(map(len, prompt.contexts)) for prompt in rollout.prompts])
    n_loss_tokens = rollout.loss_mask.sum(1).cpu()
    table = torch.stack([prompt_lengths, lengths, has_ended.long(), n_loss_tokens], dim=1).to(device)
    prompt_lengths, lengths, has_ended, n_loss_tokens = accelerator.gather(table).cpu().unbind(1)
    rollout.num_items_in_batch = n_loss_tokens.sum().to(device)
    metrics = {"completions/clipped_ratio": 1 - has_ended.float().mean().item()}
    terminated = lengths[has_ended == 1]
    for infix, values in (("", lengths), ("terminated_", terminated if len(terminated) else torch.zeros(1))):
        for name in ("mean", "min", "max"):
            metrics[f"completions/{name}_{infix}length"] = getattr(values.float(), name)().item()
    return metrics, int(prompt_lengths.sum() + lengths.sum())


def score_in_batches(policy: PolicyForward, model: nn.Module, rollout: Rollout, size: int) -> Scores:
    """Returns the scores of a rollout, or of a part of it, in forwards of `size` completions."""
    (prompts, ids, mask), ranges = rollout.completions, rollout.parts(size)
    slices = [slice(indices.start, indices.stop) for indices in ranges]  # slices copy no tensor, unlike `select`
    requests = [ScoreRequest(prompts[rows], ids[rows], mask[rows], rollout.packed) for rows in slices]
    parts = [policy.score(model, request) for request in requests]
    return parts[0] if len(parts) == 1 else Scores.join(parts, ranges)


def score_with_view(
    policy: PolicyForward, model: nn.Module, rollout: Rollout, *, rows: Sequence[int] | None = None, **options: Any
) -> Scores:
    """
    Returns the scores of a micro-batch. If its prompts have views, the field `view` holds the scores of the same
    completions given the prompts under the view.

    One forward computes the scores without and under the view, as wrappers such as DDP require. For 4 completions, its
    rows 0 to 3 have the plain prompts, and its rows 4 to 7 the prompts under the view. If the view replaces only media
    of completions 1 and 3, only the rows 0 to 3, 5 and 7 are forwarded, and the view's scores of completions 0 and 2
    are the plain ones. `rows` are the batch indices of the completions to forward, by default all. `options` are
    further fields of the [`~forward.scores.ScoreRequest`].
    """
    (prompts, ids, mask), views, n, packed = rollout.completions, rollout.view.prompts, len(rollout), rollout.packed
    if views:
        replaces = require(rollout.view.replaces)
        scored_rows = [*(range(n) if rows is None else rows), *(n + i for i in replaces.nonzero()[:, 0].tolist())]
        scored_rows = None if len(scored_rows) == 2 * n else scored_rows  # `None` forwards all rows
        doubled_completions = [*prompts, *views], torch.cat([ids, ids]), torch.cat([mask, mask])
        scores = policy.score(model, ScoreRequest(*doubled_completions, packed, rows=scored_rows, **options))
        plain, view_scores = scores.rows(slice(n)), scores.rows(slice(n, None))
        is_replaced = replaces[:, None]
        plain.view = Scores(
            logps=torch.where(is_replaced, view_scores.logps, plain.logps),
            entropies=torch.where(is_replaced, view_scores.entropies, plain.entropies),
        )
        plain.deferred = scores.deferred
    else:
        plain = policy.score(model, ScoreRequest(prompts, ids, mask, packed, rows=rows, **options))
    if rows is not None and rollout.old_per_token_logps is not None:
        # The old log-probabilities, so that rows that aren't forwarded get a ratio of policy to old policy of 1
        plain.logps = torch.where(rollout.scored_mask.any(1)[:, None], plain.logps, rollout.old_per_token_logps)
    return plain


def score_dependency(
    policy: PolicyForward, model: nn.Module, rule: HeadRule, rollout: Rollout, size: int
) -> tuple[Scores, torch.Tensor]:
    """
    Returns the scores of a rollout, and the dependency of its tokens on the media that the view replaces, `(N, C)`.

    The dependency is the KL divergence between a token's distributions without and under the view. It is 0 where the
    view replaces nothing. Forwards have `size` completions.
    """
    ranges = rollout.parts(size)
    part_scores, dependencies = [], []
    for part in map(rollout.select, ranges):
        prompts, ids, mask = part.completions
        plain = policy.score(model, ScoreRequest(prompts, ids, mask, packed=part.packed, hidden=True))
        head, target_mask = head_of(policy.unwrapped(model), rule), mask * require(part.view.replaces)[:, None]
        target = Target(target_mask, rule, beta=0.0, temperature=policy.temperature, hidden=plain.hidden, head=head)
        scores = policy.score(model, ScoreRequest(part.view.prompts, ids, mask, packed=part.packed, target=target))
        dependencies.append(scores.divergences)
        plain.hidden = None  # frees its memory before the next part
        part_scores.append(plain)
    return Scores.join(part_scores, ranges), torch.cat(dependencies)


def score_values(
    policy: PolicyForward,
    model: nn.Module,
    critic: Critic | ValueHead,
    rollout: Rollout,
    size: int,
    is_cut: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the value of the state before each completion token, and the value of the state after each completion
    that was cut off (`is_cut`), or 0 for other completions. Forwards have `size` completions.

    For a completion of 2 tokens that was cut off, the critic scores 3 states: before each token, and after the last.

    Shapes: `is_cut` `(N,)`; returns `(N, C)` and `(N,)`.
    """
    prompts, ids, mask = rollout.completions
    lengths, extended_mask = mask.sum(1, keepdim=True), mask
    if is_cut is not None:
        # The state after the last token is the state before a further token, whose id doesn't matter
        ids, extended_mask = (
            F.pad(ids, (0, 1)),
            F.pad(mask, (0, 1)).scatter_add(1, lengths, is_cut[:, None].to(mask.dtype)),
        )
    parts = [slice(start, start + size) for start in range(0, len(ids), size)]
    options = {"packed": rollout.packed, "critic": critic, "logps": False}
    scores = [
        policy.score(model, ScoreRequest(prompts[part], ids[part], extended_mask[part], **options)) for part in parts
    ]
    values = torch.cat([part_scores.values for part_scores in scores])
    bootstrap = torch.zeros(len(ids), device=ids.device)
    if is_cut is not None:
        bootstrap = torch.where(is_cut, values.gather(1, lengths)[:, 0], 0)
    return torch.where(mask.bool(), values[:, : mask.size(1)], 0), bootstrap


def engine_ratios(
    logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    mask: torch.Tensor,
    mode: str = "sequence_mask",
    smallest: float | None = None,
    largest: float | None = None,
) -> torch.Tensor:
    """
    Returns importance ratios of the policy to the engine, bounded as TRL's `vllm_importance_sampling_mode` says: modes
    with `truncate` set ratios out of bounds to the bound, and modes with `mask` set them to 0.

    Shapes: `logps`, `sampling_logps` (NaN where the engine returned none), `mask` `(N, C)`; returns `(N, C)`, or
    `(N, 1)` for sequence-level modes.
    """
    differences = ((logps - sampling_logps) * mask).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        differences = differences.sum(dim=1, keepdim=True)
    ratios = differences.exp()
    if mode.endswith("truncate"):
        return ratios.clamp(min=smallest, max=largest)
    low, high = -math.inf if smallest is None else smallest, math.inf if largest is None else largest
    return ratios.masked_fill((ratios < low) | (ratios > high), 0.0)


def rollout_ratios(rollout: Rollout, args: Any) -> torch.Tensor:
    """Returns importance ratios of the policy to the engine that sampled a rollout, `(N, C)` or `(N, 1)`."""
    return engine_ratios(
        require(rollout.old_per_token_logps),
        require(rollout.sampling_per_token_logps),
        rollout.scored_mask,
        args.vllm_importance_sampling_mode,
        args.vllm_importance_sampling_clip_min,
        args.vllm_importance_sampling_clip_max,
    )


def engine_metrics(parts: Sequence[Rollout], args: Any) -> dict[str, Metric]:
    """Returns TRL's metrics of differences between policy and engine, and of their ratios, over parts of a rollout."""
    scored_parts = [part if part.rows_to_score is None else part.select(part.rows_to_score) for part in parts]
    logps = torch.cat([require(part.old_per_token_logps) for part in scored_parts])
    engine_logps = torch.cat([require(part.sampling_per_token_logps) for part in scored_parts])
    mask = torch.cat([part.loss_mask for part in scored_parts])
    ratios = torch.cat([rollout_ratios(part, args) for part in scored_parts])
    difference = (logps - engine_logps).abs()[mask.bool() & ~engine_logps.isnan()]
    # Sequence-level modes have one ratio per completion
    loss_ratios = ratios[mask.bool()] if ratios.shape == mask.shape else ratios.flatten()
    difference, loss_ratios = (  # 0 on a rank without values
        tensor if tensor.numel() else tensor.new_zeros(1) for tensor in (difference, loss_ratios)
    )
    prefix = "sampling/importance_sampling_ratio"
    low, high = args.vllm_importance_sampling_clip_min or 0.0, args.vllm_importance_sampling_clip_max or math.inf
    values = {  # by metric: this rank's value, and the function that combines the ranks' values
        "sampling/sampling_logp_difference/mean": (difference.mean(), torch.mean),
        "sampling/sampling_logp_difference/max": (difference.max(), torch.max),
        f"{prefix}/min": (loss_ratios.min(), nanmin),
        f"{prefix}/mean": (loss_ratios.mean(), torch.nanmean),
        f"{prefix}/max": (loss_ratios.max(), nanmax),
    }
    if args.max_staleness > 0:
        # Ratios out of bounds were set to the bound or to 0, so ratios strictly between the bounds were kept
        kept_share = ((loss_ratios > low) & (loss_ratios < high)).float().mean()
        values |= {"sampling/importance_sampling_ratio/kept_frac": (kept_share, torch.mean)}
    return {name: Metric(value.reshape(1), combine) for name, (value, combine) in values.items()}


def n_on_policy(args: Any, steps_per_rollout: int) -> int:
    """
    Returns the number of on-policy micro-batches of a rollout, which are those before the first update.
    `steps_per_rollout` is `steps_per_generation` times the number of iterations over a rollout. With
    `steps_per_generation=4` and `gradient_accumulation_steps=2`, the first update comes after 2 micro-batches.
    """
    steps, accumulation = args.steps_per_generation, args.gradient_accumulation_steps
    if accumulation % steps_per_rollout == 0:  # no update before the rollout is used up
        return steps
    # If neither `accumulation` nor `steps_per_rollout` divides the other, an update may span two rollouts. Then no
    # micro-batch counts as on-policy.
    return min(steps, accumulation) if steps_per_rollout % accumulation == 0 else 0


def without_gradient(rollout: Rollout) -> list[bool]:
    """Returns whether completions have a policy gradient of exactly 0, as in a group with equal rewards."""
    advantages = require(rollout.advantages)
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    return (~((advantages != 0) & rollout.loss_mask.bool()).any(1)).tolist()


def packing_metrics(
    policy: PolicyForward, model: PreTrainedModel, micro_batches: Sequence[Rollout]
) -> dict[str, float]:
    """
    Returns two shares over all ranks: prompt tokens that aren't forwarded because completions share a prompt, and
    completions that aren't forwarded because they have no gradient.
    """
    # Prompt tokens of a micro-batch, if each completion had its own copy of the prompt
    n_unshared = [
        sum(len(context) for prompt in part.prompts for context in prompt.contexts) for part in micro_batches
    ]
    n_forwarded = [
        policy.n_prompt_tokens(model, part.prompts, part.completion_mask.sum(1).tolist()) if part.packed else n_tokens
        for part, n_tokens in zip(micro_batches, n_unshared, strict=True)
    ]
    n_skipped = sum(sum(part.tokens.without_gradient) for part in micro_batches)
    counts = [sum(n_forwarded), sum(n_unshared), n_skipped, sum(map(len, micro_batches))]
    n_forwarded, n_unshared, n_skipped, n_completions = sum_over_ranks(policy.accelerator, counts)
    return {"packing/shared_frac": 1 - n_forwarded / n_unshared, "packing/skipped_frac": n_skipped / n_completions}
