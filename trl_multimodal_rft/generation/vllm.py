# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sampling with vLLM: what TRL's engine lacks to take media, and to know a model's weights by name."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from transformers import ProcessorMixin
from transformers.core_model_loading import revert_weight_conversion
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration, empty_cache
from trl.import_utils import is_vllm_available

from ..data.columns import MediaError
from ..encoding.prompts import DecodedPrompt, EncodedPrompt
from .vllm_server import check_server, forget_media, joined, server_completions, server_features, server_renderer


if is_vllm_available():
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

# What processors assume of videos whose rate isn't known, in frames per second
_ASSUMED_FPS = 24


class Completion(NamedTuple):
    """What an engine samples: token ids, and the log-probability of each, `None` where it has none."""

    ids: list[int]
    logps: list[float | None]


class _Request(NamedTuple):
    """A prompt as the engine takes it, the ids that it must make of it, and how many completions are wanted."""

    prompt: dict[str, Any]
    ids: list[int]
    count: int


class MultimodalVLLMGeneration(VLLMGeneration):
    """
    TRL's engine for prompts with media, which are processed once for all completions that follow each other.

    Args:
        engine_kwargs (`dict[str, Any]`, *optional*):
            Arguments for `vllm.LLM` beside TRL's, over which they win. A server has its own.
        kwargs:
            Arguments of [`~trl.generation.vllm_generation.VLLMGeneration`].
    """

    def __init__(self, engine_kwargs: dict[str, Any] | None = None, **kwargs):
        self._engine_kwargs = engine_kwargs or {}
        super().__init__(**kwargs)

    def _init_vllm(self):
        with _with_arguments(self._engine_kwargs), _processors_unchecked():
            super()._init_vllm()
        self._renderer: Any
        if self.mode == "server":
            found: list[Any] = [None]
            if self.accelerator.is_main_process:
                found = [self.vllm_client.get_server_info()]
                check_server(self.vllm_client, found[0], self.model.config, self._trainer_dtype())
            broadcast_object_list(found, from_process=0)
            self._renderer = server_renderer(found[0], self.model.name_or_path, self.trust_remote_code)
        else:
            self._renderer = self.llm.renderer

    def _trainer_dtype(self) -> torch.dtype:
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return mixed.get(self.accelerator.mixed_precision, self.model.dtype)

    # Samples

    def generate(
        self,
        prompts: Sequence[list[int] | EncodedPrompt],
        images: Sequence[list | None] | None = None,
        num_generations: int = 1,
        profiler=None,
        **sampling,
    ) -> tuple:
        """
        Samples a completion of each prompt.

        Args:
            prompts (`Sequence[list[int]]` or `Sequence[EncodedPrompt]`):
                Each completion's prompt. Those of a group follow each other, and hold the same object.
            images (`Sequence[list]`, *optional*):
                Images of prompts that are given as token ids, with placeholders that aren't expanded.
            num_generations (`int`, *optional*, defaults to `1`):
                As for TRL's method. Groups are told by the prompts.
            profiler (`ContextManager`, *optional*):
                Context in which the engine samples.
            sampling:
                Sampling parameters, where they aren't those of training.

        Returns:
            `tuple`: Prompt ids, completion ids, log-probabilities and their token ids, as TRL's method returns them.

        Raises:
            [`MediaError`]: If the engine makes other tokens of a prompt than the processing class.
        """
        requests = self._requests(prompts, images)
        # Asleep, the engine has forgotten its weights
        if self.mode == "colocate" and self.enable_sleep_mode and self._llm_weights_sleeping:
            self.sync_weights()
        ask = self._ask_server if self.mode == "server" else self._ask_engine
        completions = ask(requests, sampling, profiler or nullcontext())
        return (
            [request.ids for request in requests for _ in range(request.count)],
            [completion.ids for completion in completions],
            [[[logp] for logp in completion.logps] for completion in completions],
            [[[token] for token in completion.ids] for completion in completions],
        )

    def _requests(self, prompts, images) -> list[_Request]:
        requests: list[_Request] = []
        last = None
        for index, prompt in enumerate(prompts):
            own_images = images[index] if images is not None else None
            if last is not None and prompt is last and not own_images:
                requests[-1] = requests[-1]._replace(count=requests[-1].count + 1)
                continue
            last = prompt
            ids = prompt.input_ids.tolist() if isinstance(prompt, EncodedPrompt) else list(prompt)
            taken: dict[str, Any] = {"prompt_token_ids": ids}
            if isinstance(prompt, EncodedPrompt) and prompt.decoded is not None:
                taken = self._with_media(prompt.decoded)
            elif own_images:
                taken["multi_modal_data"] = {"image": own_images}
            requests.append(_Request(taken, ids, 1))
        return requests

    def _with_media(self, prompt: DecodedPrompt) -> dict[str, Any]:
        media: dict[str, Any] = dict(prompt.media)
        processor: Any = self.processing_class
        options: dict[str, Any] = {kind: dict(value) for kind, value in prompt.processor_kwargs.items()}
        if "video" in media:
            videos = options["videos_kwargs"]
            assumed = {"fps": _ASSUMED_FPS}
            known = [
                {**assumed, **{name: value for name, value in each.items() if value is not None}}
                for each in videos.pop("video_metadata")[0]
            ]
            # Where vLLM keeps what it is told beside the frames, processors may not be told twice
            if getattr(self._renderer.get_mm_processor().data_parser, "video_needs_metadata", False):
                del videos["do_sample_frames"]
                options["do_sample_frames"] = False
                known = [{**each, "do_sample_frames": False} for each in known]
                media["video"] = list(zip(media["video"], known, strict=True))
            else:
                videos["video_metadata"] = [known]
        return {
            "prompt_token_ids": prompt.token_ids(processor),
            "multi_modal_data": media,
            "mm_processor_kwargs": {name: value for name, value in options.items() if value != {}},
        }

    def _sampling(self) -> dict[str, Any]:
        return {
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0 if self.min_p is None else self.min_p,
            "max_tokens": self.max_completion_length,
            "logprobs": self.logprobs,
        }

    def _ask_engine(self, requests: list[_Request], sampling: dict[str, Any], profiler) -> list[Completion]:
        options = {**self._sampling(), **self.generation_kwargs, **sampling}
        structured = options.get("structured_outputs")
        if self.structured_outputs_regex is not None:
            structured = {"regex": self.structured_outputs_regex}
        if isinstance(structured, dict):
            options["structured_outputs"] = StructuredOutputsParams(**structured)
        first, asked = 0, requests
        if self.tensor_parallel_size > 1:
            gathered: list[Any] = [None] * self.tensor_parallel_size
            torch.distributed.all_gather_object(gathered, requests, group=self.tp_group)
            rank = torch.distributed.get_rank(group=self.tp_group)
            first, asked = sum(map(len, gathered[:rank])), [each for part in gathered for each in part]
            if is_peft_model(self.model):
                # What the update still communicates must not meet what the engine does (huggingface/trl#3671)
                torch.distributed.barrier(device_ids=[self.accelerator.local_process_index])
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        with profiler, _processors_unchecked():
            outputs = self.llm.generate(
                [request.prompt for request in asked],
                sampling_params=[SamplingParams(**{**options, "n": request.count}) for request in asked],
                use_tqdm=False,
            )
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True
        completions = []
        for request, output in zip(requests, outputs[first:], strict=False):
            _check_ids(request.ids, output.prompt_token_ids)
            for each in output.outputs:
                logps = [entry[token].logprob for token, entry in zip(each.token_ids, each.logprobs, strict=True)]
                logps = [None if math.isnan(logp) else logp for logp in logps]
                completions.append(Completion(list(each.token_ids), logps))
        return completions

    def _ask_server(self, requests: list[_Request], sampling: dict[str, Any], profiler) -> list[Completion]:
        gathered = gather_object([(request.ids, self._features(request), request.count) for request in requests])
        wanted = sum(request.count for request in requests)
        counts = gather_object([wanted])
        payload: list[Any] = [None]
        if self.accelerator.is_main_process:
            with profiler:
                completions = server_completions(
                    self.vllm_client,
                    joined(gathered),
                    structured_outputs_regex=self.structured_outputs_regex,
                    generation_kwargs={**self.generation_kwargs, **sampling},
                    **self._sampling(),
                )
            payload = [completions]
        broadcast_object_list(payload, from_process=0)
        first = sum(counts[: self.accelerator.process_index])
        return [Completion(*each) for each in payload[0][first : first + wanted]]

    def _features(self, request: _Request) -> dict[str, Any] | None:
        if "multi_modal_data" not in request.prompt:
            return None
        with _processors_unchecked():
            [rendered] = self._renderer.render_cmpl([request.prompt])
        _check_ids(request.ids, rendered["prompt_token_ids"])
        return server_features(rendered)

    # Weights

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        # vLLM knows the names of checkpoints, which aren't always those of the model in memory
        model: Any = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if is_peft_model(model) else model
        for name, parameter in super()._iter_named_params():
            yield from revert_weight_conversion(model, {name: parameter}).items()

    def sync_weights(self):
        """
        Gives the engine the model's weights, and makes it forget what it computed with others.

        Raises:
            `RuntimeError`: If the engine, in colocate mode, leaves out weights.
        """
        if self.mode == "server":
            super().sync_weights()
            if self.accelerator.is_main_process:
                forget_media(self.vllm_client)
            return
        if self.enable_sleep_mode:
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        model = self.llm.llm_engine.model_executor.driver_worker.model_runner.model
        # vLLM says which weights it took, and drops others without a word
        left_out = [name for name, weight in self._iter_named_params() if not model.load_weights([(name, weight)])]
        if left_out:
            raise RuntimeError(
                f"vLLM's {type(model).__name__} has no place for {len(left_out)} weights of the model, such as "
                f"'{left_out[0]}', so it would sample from another model; set `use_vllm=False`."
            )
        self.llm.reset_prefix_cache()
        # What encoders made is kept by the medium alone (huggingface/trl#7198)
        self.llm.llm_engine.reset_encoder_cache()


def _check_ids(expected: list[int], found: Sequence[int]) -> None:
    if list(found) != expected:
        raise MediaError(
            f"vLLM made {len(found)} tokens of a prompt that has {len(expected)} here, so what it samples would be "
            "scored after another prompt: its processor and `processing_class` don't agree. Load both from the folder "
            "of the model, or set `use_vllm=False`."
        )


@contextmanager
def _with_arguments(engine_kwargs: dict[str, Any]):
    """TRL's constructor of the engine takes no further arguments."""
    engine: Any = getattr(vllm_generation, "LLM", None)
    vllm_generation.LLM = lambda **kwargs: engine(**{**kwargs, **engine_kwargs})
    try:
        yield
    finally:
        vllm_generation.LLM = engine


@contextmanager
def _processors_unchecked():
    """vLLM calls processors on placeholders of videos without the videos, which transformers refuses since 5.23."""
    checked = ProcessorMixin.validate_inputs
    ProcessorMixin.validate_inputs = lambda self, *args, **kwargs: None
    try:
        yield
    finally:
        ProcessorMixin.validate_inputs = checked
