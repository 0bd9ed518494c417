# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Decoding loop over a KV cache of prompts, in place of the loop of `generate`, and CUDA graphs of its steps."""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    masking_utils,
)
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMode,
    LogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from ..families import family_of
from ..forward import kernels
from ..forward.attention import decoder_inputs
from ..forward.masks import KV_CACHE, POINTWISE_LAYERS
from ..forward.shared_cache import Decoding, set_lengths


logger = logging.getLogger(__name__)

# Number of tokens between two checks for the end of all completions. A check synchronizes the host with the device.
_TOKENS_PER_CHECK = {"cuda": 16, "xpu": 16}

# Options with which `generate` does more than draw a token from the last logits, and the values that turn them off
_NEUTRAL_VALUES = {
    **dict.fromkeys(("max_time", "stop_strings", "watermarking_config", "prefill_chunk_size"), (None,)),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "token_healing"), (None, False)),
    **dict.fromkeys(("guidance_scale", "num_return_sequences"), (None, 1)),
    **{"cache_implementation": (None, "hybrid"), "use_cache": (None, True)},
}

# Graphs of failed captures, kept alive because torch's allocator goes on calling their stream filters
_FAILED_GRAPHS: list[torch.cuda.CUDAGraph] = []


class TokenStep:
    """Runner of decoding steps. A step is a function without arguments that reads and writes fixed buffers."""

    obstacle: str | None = None  # reason why the step isn't captured

    def __call__(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Runs a step. Returns its output, which the next step may overwrite."""
        return step()

    def reset(self) -> None:
        """Forgets the captured step. Call this when buffers of the step have moved or changed their shapes."""


class GraphedStep(TokenStep):
    """
    Runner that captures a decoding step, and replays it. The first step after a [`reset`] runs eagerly, since the
    first call of kernels compiles and tunes them. If the capture fails, all steps do, and `obstacle` has the reason.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._has_run = False
        self._output: torch.Tensor | None = None

    def __call__(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self.obstacle is not None or not self._has_run:
            self._has_run = True
            return step()
        if self._output is None:
            try:
                self._output = self.capture(step)
            except Exception as error:  # of the driver, of torch, or of a step that synchronizes
                self.obstacle = next(iter(str(error).splitlines()), "") or type(error).__name__
                _warn_of_obstacle(self.obstacle)
                torch.clear_autocast_cache()  # a capture doesn't run casts, so casts that it cached have no values
                return step()
        self.replay()
        return self._output

    def reset(self) -> None:
        self._has_run = False
        self._output = None

    def capture(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Records a step without running it, and returns its output."""
        raise NotImplementedError

    def replay(self) -> None:
        """Runs the captured step."""
        raise NotImplementedError


@functools.cache
def _warn_of_obstacle(obstacle: str) -> None:
    logger.warning(f"Tokens are sampled without a graph of the device: {obstacle}")


class CudaStep(GraphedStep):
    """Runner of decoding steps as a [CUDA graph](https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs)."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._graph: torch.cuda.CUDAGraph | None = None  # graph of the last capture, which keeps the pool alive
        self._pool: torch.cuda.MemPool | None = None  # memory pool of all captures

    def capture(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        try:
            self._graph, output = _capture_step(step, self._pool, self.device)
        except BaseException:
            _recover_device(self._pool, self.device)
            self._pool = None
            raise
        return output

    def replay(self) -> None:
        if self._graph is not None:
            self._graph.replay()


def _capture_step(
    step: Callable[[], torch.Tensor], pool: torch.cuda.MemPool, device: torch.device
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """
    Captures a step, and returns its graph and output. Unlike [`torch.cuda.graph`], this function doesn't empty the
    cache of torch's allocator, and other threads may allocate meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=cast("torch.cuda._POOL_HANDLE", pool.id), capture_error_mode="thread_local")
        try:
            output = step()
        except BaseException:
            _FAILED_GRAPHS.append(graph)
            with suppress(RuntimeError):  # the second error only repeats that the capture failed
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph, output


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """
    Returns the stream of all captures. The first matrix product on a stream allocates a workspace of cuBLAS, 33 MiB on
    Hopper. This function multiplies matrices before any capture, so that no graph's memory pool holds the workspace.
    """
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        matrix = torch.zeros(16, 16, dtype=torch.float16, device=device)
        torch.addmm(matrix[0], matrix, matrix)
        matrix @ matrix
    return stream


def _recover_device(pool: torch.cuda.MemPool, device: torch.device) -> None:
    """
    Restores a device after a failed capture. Otherwise the allocator would go on allocating from the pool, and the
    random generator would raise errors until a capture succeeds. So this function also makes a capture that succeeds.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    torch._C._cuda_endAllocateToPool(index, pool.id)
    value = torch.zeros(1, device=device)
    _capture_step(lambda: value.add_(1), torch.cuda.MemPool(), device)


# Runners that capture steps, by type of device
STEPS: dict[str, type[GraphedStep]] = {"cuda": CudaStep}


def runner_on(device: torch.device) -> TokenStep:
    """Returns the runner of decoding steps for a device."""
    return STEPS[device.type](device) if device.type in STEPS else TokenStep()


@contextmanager
def weights_cast_once(model: PreTrainedModel) -> Iterator[None]:
    """
    Makes autocast cast each weight of the decoder and the head only once within the context, as it otherwise forgets
    casts and casts frozen weights for each operation. Only without gradients; no effect without float32 weights, or if
    the casts would fill more than half of the free memory.
    """
    head = model.get_output_embeddings()
    parameters = [*model.get_decoder().parameters()]
    parameters += [] if head is None else head.parameters()
    weights = {weight for weight in parameters if weight.dtype == torch.float32}
    frozen = [weight for weight in weights if not weight.requires_grad and weight.is_leaf]
    if not weights or 2 * sum(weight.numel() for weight in weights) > _free_bytes(model.device) / 2:
        yield
        return
    # Autocast forgets casts at the end of its outermost context. After this increment, a forward's context is nested
    torch.autocast_increment_nesting()
    try:
        for weight in frozen:  # autocast keeps casts only of leaves that require gradients
            weight.requires_grad_(True)
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def _free_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def supports_decode(model: PreTrainedModel, config: GenerationConfig) -> bool:
    """Returns whether [`decode`], with a cache of prompts, gives the same output as `generate` with these options."""
    has_neutral_options = all(getattr(config, name, None) in values for name, values in _NEUTRAL_VALUES.items())
    is_sampling_or_greedy = config.get_generation_mode() in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)
    inherits_generate = getattr(model.generate, "__module__", "").startswith("transformers.")
    layer_types = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    has_known_layers = layer_types <= {*masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, *POINTWISE_LAYERS}
    # `decode` passes no media on. Models need media if their `generate` has a required argument, which is then one of
    # media, or if they have token masks, which refer to media
    _, *parameters = inspect.signature(cast(type[GenerationMixin], type(model)).generate).parameters.values()
    named_options = (option for option in parameters if option.kind is option.POSITIONAL_OR_KEYWORD)
    needs_media = any(option.default is option.empty for option in named_options) or bool(family_of(model).token_masks)
    return has_neutral_options and is_sampling_or_greedy and inherits_generate and has_known_layers and not needs_media


def up_to_first_end(completions: torch.Tensor, eos_token_ids: Sequence[int]) -> torch.Tensor:
    """Returns the mask `(B, N)` of completions up to their first end-of-sequence token, inclusive."""
    end_ids = torch.tensor(eos_token_ids, dtype=completions.dtype, device=completions.device)
    is_eos = torch.isin(completions, end_ids).long()
    return is_eos.cumsum(1) - is_eos == 0  # no earlier token is an end


def decode(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    logits: torch.Tensor,
    layout: Decoding | None = None,
    keeps_cache: bool = False,
    ranks_in_step: bool = False,
    runner: TokenStep | None = None,
    casts_weights_once: bool = False,
    **inputs: torch.Tensor | Cache | bool | int | None,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """
    Samples completions of prompts that a cache holds, as `custom_generate` of transformers' `generate`.

    A seed gives the same tokens, and the same final state of the random generator, as in `generate`. Once at least
    half of every prompt's completions in the batch have ended, ended completions leave the batch, unless logits,
    scores or the cache are requested.

    On a GPU, the loop checks for ends after every 16 tokens, unless `ranks_in_step`. For example, if two completions
    end after 5 and 7 tokens, the check drops the last 9 of 16 columns, and restores the random generator's state after
    7 tokens.

    Args:
        model, logits_processor, stopping_criteria, generation_config, inputs:
            Arguments as `generate` prepares them. The only criteria in use are end-of-sequence tokens and the length,
            see [`supports_decode`].
        input_ids, logits (`torch.LongTensor`, `torch.Tensor`):
            Left-padded prompts, shape `(B, P)`, and the logits after them, shape `(B, V)`.
        layout ([`~forward.shared_cache.Decoding`], *optional*):
            Layout of a cache in which completions share their prompts.
        keeps_cache (`bool`, *optional*):
            Whether the caller needs the cache afterwards. It then holds all tokens except the last.
        ranks_in_step (`bool`, *optional*):
            Whether ranks need each other's forwards. If so, all ranks run forwards until the completions of all ranks
            have ended.
        runner ([`~engines.token_loop.TokenStep`], *optional*):
            Runner of decoding steps, used if the layout's `room` keeps shapes static.
        casts_weights_once (`bool`, *optional*):
            Whether autocast casts weights once, see [`~engines.token_loop.weights_cast_once`].

    Returns:
        `torch.Tensor`: Prompts and completions, `(B, P + N)`, or, with `return_dict_in_generate`, a
        [`~transformers.generation.GenerateDecoderOnlyOutput`] with them.
    """
    loop = TokenLoop(
        model,
        input_ids,
        logits,
        logits_processor,
        stopping_criteria,
        generation_config,
        inputs,
        layout,
        TokenStep() if runner is None or layout is None or not layout.room else runner,
        keeps_cache,
        1 if ranks_in_step else _TOKENS_PER_CHECK.get(input_ids.device.type, 1),
    )
    with (
        nullcontext() if layout is None else decoder_inputs(model, prefix_layout=layout),
        kernels.without_cudnn(),
        getattr(model, "_optimize_model_for_decode", nullcontext)(),
        weights_cast_once(model) if casts_weights_once else nullcontext(),
    ):
        while True:
            loop.sample()
            if loop.is_check_due():
                loop.end()
                if loop.is_finished():
                    break
                if ranks_in_step:  # joins the last loop below, in which other ranks may already be
                    _max_over_ranks(loop.n_left, input_ids.device)
                loop.drop_ended()
            loop.grow()
            loop.run()
        # All completions of this rank have ended, but other ranks may still need its forwards
        while ranks_in_step and _max_over_ranks(0, input_ids.device):
            loop.forward()
    return loop.finish()


class TokenLoop:
    """
    Samples completions token by token, see [`decode`]. Columns of `ids` `(B, stop)`: prompts end at `start`, sampled
    tokens at `n`, those checked for ends at `n_checked`. `rows` are the completions still in the batch (`None`: all),
    `n_left` the most of a prompt that haven't ended.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
        inputs: dict[str, torch.Tensor | Cache | bool | int | None],
        layout: Decoding | None,
        runner: TokenStep,
        keeps_cache: bool,
        interval: int,
    ):
        device = input_ids.device
        self.model = model
        self.config = config
        self.layout = layout
        self.runner = runner
        self.keeps_cache = keeps_cache
        self.interval = interval  # tokens between checks for ends
        self.cache = cast(Cache, inputs[KV_CACHE])
        self.start = self.n = self.n_checked = input_ids.size(1)
        self.stop = cast(int, stopping_criteria.max_length)
        ends = (criterion.eos_token_id for criterion in stopping_criteria if hasattr(criterion, "eos_token_id"))
        self.end_ids = next((end_ids.to(device) for end_ids in ends), None)
        self.pad_id = config.pad_token_id
        if self.pad_id is None and self.end_ids is not None:
            self.pad_id = int(self.end_ids[0])
        # Logits and scores of sampled tokens, if requested
        names = [name for name in ("logits", "scores") if getattr(config, f"output_{name}")]
        self.records = {name: list[torch.Tensor]() for name in names}
        self.ids = F.pad(input_ids, (0, self.stop - self.n))
        # A layout has masks of its own. Without a layout, `mask` already has a 1 for each token to sample
        mask = None if layout is not None else inputs.get("attention_mask")
        self.mask = None if mask is None else F.pad(cast(torch.Tensor, mask), (0, self.stop - self.n), value=1)
        self.step_inputs = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=1, **{**inputs, "attention_mask": None}
        )
        self.step_inputs["position_ids"] = _last_positions(self.step_inputs, self.cache)
        self.step_inputs["input_ids"] = self.step_inputs["input_ids"].clone()
        self.has_ended = torch.zeros(len(self.ids), dtype=torch.bool, device=device)
        self.rows: torch.Tensor | None = None
        self.n_left = len(self.ids)
        self.n_prompts = 1 if layout is None else layout.n_prompts
        self.logits = logits.float()
        self.random_states = _RandomStates(device)
        self.processors = [_as_sum(processor, input_ids, self.logits) for processor in logits_processor]

    def sample(self) -> None:
        """Samples a token of each completion by the logits."""
        scores = self.logits
        prefix = self.ids[:, : self.n]
        for processor in self.processors:  # `LogitsProcessorList` would inspect all signatures for each token
            scores = processor(prefix, scores)
        for name, values in self.records.items():
            values.append((self.logits if name == "logits" else scores).clone())
        token = self.ids[:, self.n : self.n + 1]  # a view, so the sampled tokens are written into `ids`
        if self.config.do_sample:
            torch.multinomial(scores.softmax(-1), 1, out=token)
        else:
            torch.argmax(scores, -1, keepdim=True, out=token)
        self.n += 1
        self.random_states.add()

    def is_check_due(self) -> bool:
        return self.n == self.stop or (self.n - self.start) % self.interval == 0

    def is_finished(self) -> bool:
        return self.n_left == 0 or self.n == self.stop

    def end(self) -> None:
        """Finds the completions that have ended. If all have, takes back the tokens after the last end."""
        if self.end_ids is not None:
            _pad_after_ends(self.ids[:, self.n_checked : self.n], self.has_ended, self.end_ids, self.pad_id)
            # The maximum over prompts, as each prompt keeps an equal number of completions in the batch
            self.n_left = int((~self.has_ended).view(self.n_prompts, -1).sum(1).max())
            if self.n_left == 0:
                sampled_ids = self.ids[:, self.start : self.n]
                n_surplus = sampled_ids.size(1) - int(up_to_first_end(sampled_ids, self.end_ids.tolist()).sum(1).max())
                self.random_states.restore(n_surplus)
                self.n -= n_surplus
                if self.keeps_cache:
                    self.cache.crop(-n_surplus)
        self.n_checked = self.n
        self.random_states.clear()

    def drop_ended(self) -> None:
        """Drops completions that have ended from the batch, if at least half have and nothing of them is needed."""
        is_needed = self.keeps_cache or self.records
        if is_needed or 2 * self.n_left * self.n_prompts > len(self.step_inputs["input_ids"]):
            return
        # `index` selects from the completions still in the batch, `rows` from all completions
        has_ended = self.has_ended if self.rows is None else self.has_ended[self.rows]
        index = _first_false(has_ended.view(self.n_prompts, -1), self.n_left)
        self.rows = index if self.rows is None else self.rows[index]
        _select_rows(self.cache, self.layout, index)
        self.step_inputs["position_ids"] = self.step_inputs["position_ids"].index_select(-2, index)
        self.step_inputs["input_ids"] = self.step_inputs["input_ids"][: len(index)]
        self.mask = None if self.mask is None else self.mask[index]
        self.runner.reset()

    def grow(self) -> None:
        """Makes room for further tokens in a cache of static shapes, if it is full."""
        if self.layout is not None and 0 < self.layout.room < self.n - self.start:
            self.layout.grow(self.cache, min(2 * self.layout.room, self.stop - self.start))
            self.runner.reset()

    def run(self) -> None:
        """Computes the logits after the last token."""
        token = self.ids[:, self.n - 1 : self.n]
        self.step_inputs["input_ids"].copy_(token if self.rows is None else token[self.rows])
        # The slice counts from the end, because the mask is longer than `ids` if prefixes and suffixes of prompts
        # were prefilled, and padded, separately
        self.step_inputs["attention_mask"] = None if self.mask is None else self.mask[:, : self.n - self.stop]
        logits = self.runner(self.forward)
        if self.rows is not None:
            all_logits = logits.new_zeros(len(self.ids), logits.size(-1))
            logits = all_logits.index_copy_(0, self.rows, logits)
        self.logits = logits

    def forward(self) -> torch.Tensor:
        """Advances the positions of `step_inputs` in place. Returns the logits `(B, V)` after its tokens `(B, 1)`."""
        self.step_inputs["position_ids"].add_(1)
        if self.layout is not None:
            self.layout.advance()
        return self.model(**self.step_inputs, return_dict=True).logits[:, -1].float()

    def finish(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Returns the output of [`decode`]."""
        if self.layout is not None and self.layout.room:
            set_lengths(self.cache, self.n - self.start - 1)  # the cache lacks the last token
        if not self.config.return_dict_in_generate:
            return self.ids[:, : self.n]
        output = GenerateDecoderOnlyOutput(cast(torch.LongTensor, self.ids[:, : self.n]))
        output[KV_CACHE] = self.cache
        for name, values in self.records.items():
            output[name] = tuple(values[: self.n - self.start])
        return output


class _RandomStates:
    """States of a device's random generator after each token that wasn't checked for ends."""

    def __init__(self, device: torch.device):
        self._module = torch if device.type == "cpu" else torch.get_device_module(device)
        self._device_args = () if device.type == "cpu" else (device,)
        self._states: list[torch.Tensor] = []

    def add(self) -> None:
        self._states.append(self._module.get_rng_state(*self._device_args))

    def restore(self, n_later: int) -> None:
        """Restores the state before the last `n_later` tokens."""
        self._module.set_rng_state(self._states[-1 - n_later], *self._device_args)

    def clear(self) -> None:
        self._states = []


def _last_positions(step: dict[str, torch.Tensor | None], cache: Cache) -> torch.Tensor:
    """Returns the last tokens' position ids, or the last index of the cache if the model takes no position ids."""
    positions = step["position_ids"]
    ids = cast(torch.Tensor, step["input_ids"])
    return ids.new_full(ids.shape, cache.get_seq_length() - 1) if positions is None else positions.clone()


def _pad_after_ends(tokens: torch.Tensor, finished: torch.Tensor, ends: torch.Tensor, pad: int | None) -> None:
    """
    Pads tokens `(B, K)` after end-of-sequence tokens, and in rows where `finished` `(B,)` is set. Sets `finished` in
    rows with such a token.
    """
    is_end = torch.isin(tokens, ends)
    tokens.masked_fill_(finished[:, None] | (is_end.cumsum(1) > is_end), cast(int, pad))
    finished |= is_end.any(1)


def _first_false(values: torch.Tensor, n: int) -> torch.Tensor:
    """
    Returns flat indices `(rows * n,)` of `n` entries per row: first the false entries, then true entries. For the rows
    [[True, False, False], [True, True, False]] and `n = 2`, the indices are [1, 2, 5, 3].
    """
    starts = torch.arange(len(values), device=values.device)[:, None] * values.size(1)
    return (values.byte().argsort(dim=1, stable=True)[:, :n] + starts).flatten()


def _select_rows(cache: Cache, layout: Decoding | None, index: torch.Tensor) -> None:
    cache.reorder_cache(cast(torch.LongTensor, index))
    if layout is not None and layout.mask is not None:
        layout.mask = layout.mask[index]


def _max_over_ranks(number: int, device: torch.device) -> int:
    maximum = torch.tensor(number, device=device)
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return int(maximum)


def _as_sum(
    process: LogitsProcessor, input_ids: torch.LongTensor, logits: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns a processor. In place of one that suppresses fixed tokens, returns an addition with the same effect."""
    if type(process) is not SuppressTokensLogitsProcessor:
        return process
    bias = process(input_ids, cast(torch.FloatTensor, torch.zeros_like(logits[:1])))
    return lambda _, scores: scores + bias
