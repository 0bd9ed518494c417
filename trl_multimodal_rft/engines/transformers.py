# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sampling with transformers, with each prompt and its media prefilled once for all its completions."""

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.utils import ModelOutput
from trl.models import unwrap_model_for_generation

from ..encoding.processors import tokenizer_of
from ..encoding.prompts import EncodedPrompt
from ..families import family_of
from ..forward.attention import takes_layouts
from ..forward.encoders import encode_once, frozen_features, media_inputs
from ..forward.masks import KV_CACHE, linear_masks, trees_of, windows_as_forwarded
from ..forward.prompt_groups import group_by_prompt, left_pad, split_samples
from ..forward.shared_cache import ROOM, CompletionLayer, share_prompts
from ..models.parts import kept_adapter_state
from ..models.wrapped import is_unsharded, replaced
from ..policy import Fallbacks, PolicyForward
from .token_loop import GraphedStep, TokenStep, decode, runner_on, supports_decode, up_to_first_end


# Cache layers without keys; older versions of transformers lack the second class
_KEYLESS_LAYERS = {LinearAttentionLayer, getattr(cache_utils, "DummyLayer", LinearAttentionLayer)}

# Common prefixes are prefilled first if that reduces the tokens to forward to at most this share. The prefixes cost a
# further forward, which a smaller saving might not repay
_MAX_PREFILL_SHARE = 0.9

# A cache of tokens before prompts' suffixes, its mask `(B, N)`, and the suffixes, a row each
Past = tuple[DynamicCache, torch.Tensor, list[EncodedPrompt]]

# Completions in a cache, by batch index: the row in the cache, the prompt, and the sampled tokens that the cache holds
Rows = dict[int, tuple[int, EncodedPrompt, list[int]]]


@dataclass
class Branches:
    """
    Holder of the KV cache of completions, from which their next turns continue after tool results.

    [`generate_completions`] stores the cache, and takes it out for the next turn.
    """

    # Per prompt of the next turn: the batch index of the completion that the prompt continues, and the tool results
    # after the completion (`None` if the context was rewritten). In the first turn, `continuations` is `None`.
    continuations: list[tuple[int, EncodedPrompt | None]] | None = None
    obstacle: str | None = None  # reason why the latest prompts were prefilled, and didn't continue from the cache

    # The cache, the mask `(B, N)` of its tokens, and the rows of completions in it
    _stored: tuple[DynamicCache, torch.Tensor, Rows] | None = field(default=None, init=False)

    def keep(
        self,
        cache: DynamicCache,
        mask: torch.Tensor,
        prompts: Sequence[EncodedPrompt],
        completion_ids: torch.Tensor,
        eos_token_ids: Sequence[int],
    ) -> None:
        """Stores the cache of prompts and completions `(B, N)`, with the prompts' attention mask `(B, P)`."""
        # The cache lacks the last token
        cached_mask = up_to_first_end(completion_ids, eos_token_ids)[:, :-1]
        indices = range(len(prompts)) if self.continuations is None else [index for index, _ in self.continuations]
        rows = {
            index: (row, prompt, ids[:n])
            for row, (index, prompt, ids, n) in enumerate(
                zip(indices, prompts, completion_ids.tolist(), cached_mask.sum(1).tolist(), strict=True)
            )
        }
        self._stored = cache, torch.cat([mask, cached_mask.to(mask)], dim=1), rows

    def take(self, model: PreTrainedModel, prompts: Sequence[EncodedPrompt]) -> Past | None:
        """
        Removes the cache, and returns it with its mask and the suffixes of prompts still to be prefilled. `None` if it
        can't be used; from the second turn on, `obstacle` then has the reason.
        """
        stored = self._stored
        self._stored = None
        if self.continuations is None:
            return None
        if stored is None:
            self.obstacle = "no cache was kept, as `generate` used a cache of its own"
            return None
        cache, mask, stored_rows = stored
        self.obstacle = self._branch_obstacle(model, stored_rows, prompts)
        if self.obstacle is not None:
            return None
        suffixes = []
        rows = []
        for prompt, (parent_index, results) in zip(prompts, self.continuations, strict=True):
            row, previous_prompt, ids = stored_rows[parent_index]
            n = len(previous_prompt) + len(ids)  # number of tokens in the cache
            suffixes.append(replace(prompt.part(slice(n, None)), media=results.media if results else {}))
            rows.append(row)
        cache.layers = [
            layer.join_prompts() if isinstance(layer, CompletionLayer) else layer for layer in cache.layers
        ]
        index = torch.tensor(rows, device=mask.device)
        cache.reorder_cache(cast(torch.LongTensor, index))
        return cache, mask[index], suffixes

    def _branch_obstacle(self, model: PreTrainedModel, rows: Rows, prompts: Sequence[EncodedPrompt]) -> str | None:
        """Returns the reason why the cache doesn't hold the prompts' first tokens, or `None` if it does."""
        for prompt, (parent_index, results) in zip(prompts, self.continuations or (), strict=True):
            if results is None:
                return "contexts were rewritten"
            if parent_index not in rows:
                return "the cache lacks the completion, as only other completions were continued after it"
            _, previous_prompt, ids = rows[parent_index]
            cached_ids = torch.cat([previous_prompt.input_ids, torch.tensor(ids, dtype=torch.long)])
            positions = torch.cat([previous_prompt.position_ids, previous_prompt.positions_after(len(ids))], dim=-1)
            n = len(cached_ids)
            if not torch.equal(prompt.input_ids[:n], cached_ids):
                return "the prompt doesn't begin with the tokens in the cache"
            prompt_positions = prompt.position_ids[..., :n]
            if not torch.equal(prompt_positions, positions.expand_as(prompt_positions)):
                return "results of tools change the positions of earlier tokens"
            if any(mask is not None for mask in linear_masks(model, prompt, 0).values()):
                return "tokens of the prompt don't attend to all earlier tokens, or attend to later ones"
        return None


class Prefilled(NamedTuple):
    """Prompts in a cache, from which completions are sampled."""

    cache: DynamicCache
    mask: torch.Tensor  # of the tokens in the cache, `(B, N)`
    logits: torch.Tensor  # after each row, `(B, V)`
    rows: list[int]  # for each completion, the row of its prompt


@dataclass(frozen=True)
class PromptForwards:
    """Forwards of a model over prompts: `prefill`, and `generate`."""

    model: nn.Module  # ready to generate
    unwrapped_model: PreTrainedModel
    pad_token_id: int
    device: torch.device

    def batch(self, rows: Sequence[EncodedPrompt]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Returns the left-padded per-token tensors of prompts, and their media."""
        padded = left_pad(rows, self.pad_token_id)
        tensors = {**padded.pop("fields"), **padded}
        media = media_inputs(rows, self.unwrapped_model, self.device)
        return {name: value.to(self.device) for name, value in tensors.items()}, media

    def prefill(self, prompts: Sequence[EncodedPrompt], rows: list[int], past: Past | None = None) -> Prefilled:
        """Prefills prompts, or the suffixes in `past`. `rows` has the row of each completion's prompt."""
        forwarded = prompts if past is None else past[2]
        with frozen_features(self.unwrapped_model, forwarded):
            batch, media = self.batch(forwarded)
            mask = batch.pop("attention_mask")
            if past is None:
                cache = DynamicCache(config=windows_as_forwarded(self.unwrapped_model))
            else:
                cache = past[0]
                mask = torch.cat([past[1], mask], dim=1)
            # The model's own forward, not its backbone's: under FSDP2 only the root gathers its parameters
            inputs = self.unwrapped_model.prepare_inputs_for_generation(
                batch.pop("input_ids"),
                attention_mask=mask,
                use_cache=True,
                is_first_iteration=True,
                **{KV_CACHE: cache, **batch, **media},
            )
            return Prefilled(cache, mask, self.model(**{**inputs, "logits_to_keep": 1}).logits[:, -1], rows)

    def generate(self, inputs: dict[str, Any], config: GenerationConfig, n: int) -> torch.Tensor | ModelOutput:
        """Returns `generate`'s output. A tensor is cut to the ids after the prompts, and to the first `n` rows."""
        # `generate` takes options that are `None` from the model's generation config. Without the replacement, a
        # `min_p` or repetition penalty of the checkpoint would change the distribution of sampled tokens.
        with replaced(self.unwrapped_model, generation_config=config):
            generate = cast(Callable[..., torch.Tensor | ModelOutput], self.model.generate)
            output = generate(**inputs, generation_config=config)
        return output if isinstance(output, ModelOutput) else output[:n, inputs["input_ids"].size(1) :]


def generate_completions(
    model: nn.Module,
    unwrapped_model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    generation_config: GenerationConfig,
    pad_token_id: int,
    device: torch.device,
    *,
    shared_prefill: bool = True,
    ranks_in_step: bool = False,
    dummies: Sequence[EncodedPrompt] = (),
    branches: Branches | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    runner: TokenStep | None = None,
    casts_weights_once: bool = False,
) -> Any:
    """
    Generates a completion of each prompt, equal to the result of `generate` on repeated prompts.

    The model's own forward prefills each unique prompt once, and [`~engines.token_loop.decode`] samples completions.
    For example, the prompts A, A, B and B are prefilled as the rows A and B, and sampled from the rows 0, 0, 1 and 1.
    An earlier forward prefills common prefixes of prompts ([`~forward.trees.Node`]) if that saves tokens, unless ranks
    need each other's forwards (`ranks_in_step`). Without `shared_prefill`, or if the model or the options don't allow
    `decode`, `generate` gets each prompt once per completion.

    `dummies` are further prompts in the forwards, so that ranks run encoders equally often. If `branches` holds a
    cache, sampling continues from it, and the new cache replaces it. The `tokenizer` is needed for `stop_strings`.
    `runner` runs decoding steps. With `casts_weights_once`, autocast casts each weight once for all tokens.

    Returns ids after the prompts, `(B, N)`; or, with `return_dict_in_generate`, the whole output of `generate`. That
    output ends with rows of the dummies if `generate` got repeated prompts.
    """
    forwards = PromptForwards(model, unwrapped_model, pad_token_id, device)
    options = {"ranks_in_step": ranks_in_step, "runner": runner, "casts_weights_once": casts_weights_once}
    config, room = _decode_config(unwrapped_model, generation_config, device, runner, ranks_in_step)
    if not (shared_prefill and supports_decode(unwrapped_model, config)):
        if branches is not None:
            branches.obstacle = "`generate` uses a cache of its own"
        return _generate_from_repeated(forwards, prompts, dummies, generation_config, tokenizer)
    obstacle = _cache_obstacle(unwrapped_model)
    prefilled = None
    if branches is not None:
        branches.obstacle = obstacle
        if obstacle is None:
            prefilled = _prefill_after(forwards, prompts, branches)
    if prefilled is None:  # there is no cache to continue from
        prefilled = _prefill_unique(forwards, prompts, dummies, obstacle is None and not ranks_in_step)
    kept_in = branches if obstacle is None else None
    return _decode_prefilled(forwards, prefilled, prompts, config, room, options, kept_in)


def _decode_config(
    model: PreTrainedModel,
    config: GenerationConfig,
    device: torch.device,
    runner: TokenStep | None,
    ranks_in_step: bool,
) -> tuple[GenerationConfig, int]:
    """
    Returns the config with which `decode` runs, and the number of tokens of each completion for which a cache with
    static shapes has room, 0 if shapes are dynamic.
    """
    # Without compilation, `decode` replaces `generate` with a static cache
    has_static_cache = config.cache_implementation == "static" and (config.disable_compile or device.type == "cpu")
    if not (has_static_cache or isinstance(runner, GraphedStep)) or not shares_prompts(model):
        return config, 0
    config = copy.copy(config)
    if has_static_cache:
        config.cache_implementation = None
    # Shapes are dynamic if ranks wait for each other, as the forwards of a waiting rank could exceed any room
    return config, 0 if ranks_in_step else min(ROOM, config.max_new_tokens or ROOM)


def _generate_from_repeated(
    forwards: PromptForwards,
    prompts: Sequence[EncodedPrompt],
    dummies: Sequence[EncodedPrompt],
    config: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase | None,
) -> torch.Tensor | ModelOutput:
    model = forwards.unwrapped_model
    rows = [*prompts, *dummies]
    batch, media = forwards.batch(rows)
    del batch["position_ids"]
    inputs: dict[str, Any] = {**batch, **media}
    if config.stop_strings:
        inputs["tokenizer"] = tokenizer
    cache_config = windows_as_forwarded(model)
    takes_cache = config.cache_implementation is None and config.use_cache is not False
    if takes_cache and cache_config is not model.config:
        inputs[KV_CACHE] = DynamicCache(config=cache_config)  # the default drops tokens outside of a window
    with frozen_features(model, rows):
        return forwards.generate(inputs, config, len(prompts))


def _prefill_unique(
    forwards: PromptForwards,
    prompts: Sequence[EncodedPrompt],
    dummies: Sequence[EncodedPrompt],
    shares_prefixes: bool,
) -> Prefilled:
    """Prefills each unique prompt once, and the dummies; with `shares_prefixes`, common prefixes first."""
    unique_prompts = [*group_by_prompt(prompts), *dummies]
    past = _prefill_prefixes(forwards, unique_prompts) if shares_prefixes else None
    return forwards.prefill(unique_prompts, [unique_prompts.index(prompt) for prompt in prompts], past)


def _prefill_after(forwards: PromptForwards, prompts: Sequence[EncodedPrompt], branches: Branches) -> Prefilled | None:
    """Prefills what follows the tokens in the cache of `branches`, a row per prompt; `None` without a cache."""
    past = branches.take(forwards.unwrapped_model, prompts)
    return None if past is None else forwards.prefill(prompts, [*range(len(prompts))], past)


def _decode_prefilled(
    forwards: PromptForwards,
    prefilled: Prefilled,
    prompts: Sequence[EncodedPrompt],
    config: GenerationConfig,
    room: int,
    options: dict[str, Any],
    branches: Branches | None = None,
) -> torch.Tensor | ModelOutput:
    model = forwards.unwrapped_model
    cache, mask, logits, rows = prefilled
    shares_cache = shares_prompts(model)
    index = torch.tensor(rows, device=forwards.device)
    n_per_prompt, remainder = divmod(len(rows), len(logits))
    # Completions share their prompt's row if the model allows it and prompts have equally many completions, in order.
    # Otherwise each completion gets a row of its own
    if not shares_cache or remainder or rows != [i // n_per_prompt for i in range(len(rows))]:
        cache.reorder_cache(cast(torch.LongTensor, index))
        mask = mask[index]
        logits = logits[index]
        index = torch.arange(len(rows), device=forwards.device)
    layout = share_prompts(cache, mask, len(rows), room) if shares_cache else None
    mask = mask[index]
    loop = functools.partial(decode, logits=logits[index], layout=layout, keeps_cache=branches is not None, **options)
    batch = left_pad(prompts, forwards.pad_token_id)
    inputs = {
        "input_ids": batch["input_ids"].to(forwards.device),
        "position_ids": batch["position_ids"].to(forwards.device),
        "attention_mask": mask,
        KV_CACHE: cache,
        "custom_generate": loop,
    }
    output = forwards.generate(inputs, config, len(rows))
    if branches is not None:
        sequences = output["sequences"] if isinstance(output, ModelOutput) else output
        end_ids = config.eos_token_id
        # The last `N` columns. The cache holds the prompts' `mask.size(1)` tokens and `N - 1` sampled tokens
        completion_ids = sequences[:, mask.size(1) - cache.get_seq_length() - 1 :]
        branches.keep(cache, mask, prompts, completion_ids, end_ids if isinstance(end_ids, list) else [end_ids])
    return output


def _prefill_prefixes(forwards: PromptForwards, prompts: Sequence[EncodedPrompt]) -> Past | None:
    """
    Prefills the common prefixes of prompts. Returns a cache with a row per prompt, its mask, and the suffixes of
    prompts, or `None` if that would save few tokens, or if a prefix could end within media.
    """
    trees = trees_of(forwards.unwrapped_model, prompts, [0] * len(prompts))
    if len(trees) == len(prompts):  # no two prompts have a common prefix
        return None
    prefixes = []
    suffixes = {}
    prefix_index = {}
    for index, tree in enumerate(trees):
        # A suffix keeps at least the prompt's last token, whose logits sampling needs
        n = min(tree.stop, *(len(prompt) - 1 for prompt in tree.leaves))
        spans = [prompt.media_span or (0, len(prompt)) for prompt in tree.leaves if prompt.media]
        if n < 1 or any(start < n < end for start, end in spans):
            return None
        prefixes.append(tree.prompt.part(slice(n)))
        for prompt in tree.leaves:
            suffixes[prompt] = prompt.part(slice(n, None))
            prefix_index[prompt] = index
    # Rows are padded to the longest one of their forward
    n_forwarded = sum(len(rows) * max(map(len, rows)) for rows in (prefixes, suffixes.values()))
    if n_forwarded > _MAX_PREFILL_SHARE * len(prompts) * max(map(len, prompts)):
        return None
    order = torch.tensor([prefix_index[prompt] for prompt in prompts], device=forwards.device)
    prefilled = forwards.prefill(prefixes, [])
    prefilled.cache.reorder_cache(cast(torch.LongTensor, order))
    return prefilled.cache, prefilled.mask[order], [suffixes[prompt] for prompt in prompts]


def shares_prompts(model: PreTrainedModel) -> bool:
    """Returns whether a cache can hold a prompt's keys and values once for all its completions."""
    layers = {type(layer) for layer in DynamicCache(config=windows_as_forwarded(model)).layers}
    supported = {DynamicLayer, DynamicSlidingWindowLayer}
    # Chunked attention has the cache layers of a sliding window, but another mask
    has_chunks = getattr(model.config.get_text_config(decoder=True), "attention_chunk_size", None)
    return set() < layers - _KEYLESS_LAYERS <= supported and not has_chunks and takes_layouts(model)


def without_router_logits(model: PreTrainedModel) -> AbstractContextManager[None]:
    """
    Turns off `output_router_logits` within the context. Otherwise `generate` would compute a load-balancing loss for
    each token, which raises an error on padded prompts.
    """
    return replaced(model.config.get_text_config(decoder=True), output_router_logits=False)


def _cache_obstacle(model: PreTrainedModel) -> str | None:
    """Returns the reason why a cache can't be continued, or `None`. [`Branches.take`] finds further reasons."""
    if {type(layer) for layer in DynamicCache(config=windows_as_forwarded(model)).layers} != {DynamicLayer}:
        return "layers keep windows or carry states, whose caches have no mask for padding"
    family = family_of(model)
    depends_on_batch = family.isolate is not None or family.adds_blank_media
    return "features of media depend on other media of the batch" if depends_on_batch else None


def trim_after_eos(completion_ids: torch.Tensor, eos_token_ids: Sequence[int]) -> list[list[int]]:
    """Returns the ids of completions `(B, N)` up to their first end-of-sequence token."""
    lengths = up_to_first_end(completion_ids, eos_token_ids).sum(1).tolist()
    return [ids[:length] for ids, length in zip(completion_ids.tolist(), lengths, strict=True)]


def sample_completions(
    policy: PolicyForward,
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

    The `fallbacks`, by default the policy's, say whether prompts are prefilled once or for each completion, and
    whether decoding steps run as a CUDA graph. If the steps can't be captured, `fallbacks.graph` becomes
    `False`. `generating` returns a context with the model ready to generate, by default TRL's context. `branches` hold
    the cache to continue from. The cache isn't used if weights are sharded, or if completions are sampled in parts.

    Returns completions `(B, N)`, or the result of [`generate_completions`] if a single call samples all completions.
    """
    fallbacks = fallbacks or policy.fallbacks
    isolate = fallbacks.isolate
    shared_prefill = fallbacks.shared_prefill
    if getattr(policy.unwrapped(model), "_hf_peft_config_loaded", False):
        # Granite Speech's `generate` enables the adapter for all prompts of a call if it has sounds, else for none. So
        # each call gets one prompt
        isolate = "prompt"
        shared_prefill = False
    with torch.no_grad():  # with gradients, there would be more dummies
        dummies = policy.processes.dummies(model, prompts)
        parts = split_samples(prompts, isolate)
        generation_context: AbstractContextManager[nn.Module] = nullcontext(model)
        if generating is not None:
            generation_context = generating()
        elif policy.accelerator is not None:
            generation_context = unwrap_model_for_generation(model, policy.accelerator)
        is_sharded = policy.accelerator is not None and not is_unsharded(policy.accelerator)
        if branches is not None and (is_sharded or isolate is not None):
            obstacle = "ranks wait for each other's forwards" if is_sharded else "completions are sampled in parts"
            branches.obstacle = obstacle
            branches = None
        # Forwards by which another rank exceeds this one
        n_surplus = policy.processes.n_forwards(prompts, isolate, dummies) - len(parts)
        uses_autocast = policy.accelerator is not None and policy.accelerator.mixed_precision in ("bf16", "fp16")
        with generation_context as generating_model, kept_adapter_state(generating_model):
            unwrapped_model = policy.unwrapped(generating_model)
            device = unwrapped_model.device if policy.accelerator is None else policy.accelerator.device
            if branches is None or branches.continuations is None:  # otherwise the cache holds the media
                with policy.autocast():
                    encode_once(unwrapped_model, [*prompts, *dummies], device)
            outputs = []
            runner = runner_on(device) if fallbacks.graph else TokenStep()
            # An adapter's model generates by its base model, whose forward has no context of its own
            with without_router_logits(unwrapped_model), policy.autocast():
                # Repeats the last part until all ranks have equally many forwards. Drops the repeated outputs
                for part in [*parts, *[parts[-1]] * n_surplus]:
                    output = generate_completions(
                        generating_model,
                        unwrapped_model,
                        [prompts[i] for i in part],
                        generation_config,
                        pad_token_id,
                        device,
                        shared_prefill=shared_prefill,
                        ranks_in_step=is_sharded,
                        dummies=dummies,
                        branches=branches,
                        tokenizer=None if policy.processor is None else tokenizer_of(policy.processor),
                        runner=runner,
                        casts_weights_once=uses_autocast and not is_sharded,
                    )
                    outputs.append(output)
                    runner.reset()
    fallbacks.graph &= runner.obstacle is None
    if len(parts) == 1:
        return outputs[0]
    outputs = outputs[: len(parts)]
    max_length = max(output.size(1) for output in outputs)
    padded = [F.pad(output, (0, max_length - output.size(1)), value=pad_token_id) for output in outputs]
    # `parts` hold indices of prompts, by which completions return to the order of prompts
    return torch.cat(padded)[torch.tensor(sum(parts, []), device=device).argsort()]
