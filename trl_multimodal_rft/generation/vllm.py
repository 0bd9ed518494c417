# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sampling with vLLM: what TRL's engine lacks to take media, and to know a model's weights by name."""

import math
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from transformers import ProcessorMixin
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration, empty_cache
from trl.import_utils import is_vllm_available

from ..data.columns import MediaError
from ..encoding.prompts import DecodedPrompt, EncodedPrompt
from ..models.wrapped import unwrapped
from .vllm_adapters import EngineAdapter
from .vllm_weights import checkpoint_weights


if is_vllm_available():
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.lora.request import LoRARequest
    from vllm.renderers import renderer_from_config
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
            Arguments for `vllm.LLM` beside TRL's, over which they win. In server mode, those of the server that decide
            how media are processed.
        adapter ([`EngineAdapter`], *optional*):
            Adapter, if TRL isn't to merge it into the weights.
        adapter_folder (`str`, *optional*):
            Folder through which a server gets the adapter, which it must see under the same path.
        kwargs:
            Arguments of [`~trl.generation.vllm_generation.VLLMGeneration`].
    """

    def __init__(
        self,
        engine_kwargs: dict[str, Any] | None = None,
        adapter: EngineAdapter | None = None,
        adapter_folder: str | None = None,
        **kwargs,
    ):
        self._engine_kwargs = engine_kwargs or {}
        self._adapter = adapter
        self._adapter_folder = adapter_folder
        self._adapter_request: Any = None  # what the engine samples with, after the first sync
        super().__init__(**kwargs)

    def _init_vllm(self):
        if self._fills_beside_adapter and self.mode == "colocate" and not hasattr(BaseLayerWithLoRA, "load_weights"):
            raise ValueError(
                "vLLM takes weights beside an adapter from 0.28 on, as 4 bits and `vllm_enable_sleep_mode=True` need; "
                "install it, or set `vllm_sync_adapter=False`."
            )
        try:
            own = self._adapter.engine_kwargs if self._adapter else {}
            with _with_arguments({**own, **self._engine_kwargs}), _processors_unchecked():
                super()._init_vllm()
        except ValueError as error:
            if "does not support LoRA" in str(error):
                raise ValueError(
                    f"{error} Set `vllm_sync_adapter=False`, which merges the adapter into the weights."
                ) from error
            raise
        if self.mode == "server":
            args = EngineArgs(
                model=self.model.name_or_path,
                trust_remote_code=self.trust_remote_code,
                **self._engine_kwargs,
            )
            self._renderer: Any = renderer_from_config(args.create_engine_config())
        else:
            self._renderer = self.llm.renderer

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

    def _sampling(self, sampling: dict[str, Any]) -> dict[str, Any]:
        return {
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0 if self.min_p is None else self.min_p,
            "max_tokens": self.max_completion_length,
            "logprobs": self.logprobs,
            **sampling,
        }

    def _ask_engine(self, requests: list[_Request], sampling: dict[str, Any], profiler) -> list[Completion]:
        options = {**self._sampling({}), **self.generation_kwargs, **sampling}
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
                lora_request=self._adapter_request,
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
        # The server takes ids and what its processor makes of media, which is made here
        rendered = [self._features(request) if "multi_modal_data" in request.prompt else None for request in requests]
        own = [(request.ids, features, request.count) for request, features in zip(requests, rendered, strict=True)]
        gathered = gather_object(own)
        counts = gather_object([sum(request.count for request in requests)])
        payload: list[Any] = [None]
        if self.accelerator.is_main_process:
            with profiler:
                payload = [self._completions_of(_joined(gathered), sampling)]
        broadcast_object_list(payload, from_process=0)
        first = sum(counts[: self.accelerator.process_index])
        return payload[0][first:][: counts[self.accelerator.process_index]]

    def _completions_of(self, asked: list[tuple], sampling: dict[str, Any]) -> list[Completion]:
        completions: list[list[Completion]] = [[] for _ in asked]
        for count in {count for _, _, count in asked}:
            places = [place for place, each in enumerate(asked) if each[2] == count]
            features = [asked[place][1] for place in places]
            output = self.vllm_client.generate(
                [asked[place][0] for place in places],
                features=features if any(features) else None,
                n=count,
                structured_outputs_regex=self.structured_outputs_regex,
                generation_kwargs=self.generation_kwargs,
                **self._sampling(sampling),
            )
            sampled = zip(output["completion_ids"], output["logprobs"], output["logprob_token_ids"], strict=True)
            for index, (ids, logps, tokens) in enumerate(sampled):
                own = [of[at.index(token)] for token, of, at in zip(ids, logps, tokens, strict=True)]
                completions[places[index // count]].append(Completion(ids, own))
        return [completion for each in completions for completion in each]

    def _features(self, request: _Request) -> dict[str, Any]:
        with _processors_unchecked():
            [prompt] = self._renderer.render_cmpl([request.prompt])
        _check_ids(request.ids, prompt["prompt_token_ids"])
        return {
            "mm_hashes": dict(prompt["mm_hashes"]),
            "mm_placeholders": {
                kind: [_range(place, kind) for place in places] for kind, places in prompt["mm_placeholders"].items()
            },
            "kwargs_data": {
                kind: [encode_mm_kwargs_item(item) for item in items] for kind, items in prompt["mm_kwargs"].items()
            },
        }

    # Weights

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights = super()._iter_named_params() if self._adapter is None else self._adapter.weights()
        # vLLM knows the names of checkpoints, which aren't always those of the model in memory
        return checkpoint_weights(unwrapped(self.accelerator, self.model), weights)

    @property
    def _fills_beside_adapter(self) -> bool:
        """Whether an engine needs weights that aren't trained, too: what 4 bits stand for, and what it forgets."""
        adapter = self._adapter
        return adapter is not None and adapter.alone and (adapter.is_4bit or self.enable_sleep_mode)

    def sync_weights(self):
        """
        Gives the engine the model's weights, or its adapter, and makes it forget what it computed with others.

        Raises:
            `RuntimeError`: If the engine, in colocate mode, leaves out weights.
        """
        adapter = self._adapter if self._adapter and self._adapter.alone else None
        is_first = self._adapter_request is None
        gives_weights = adapter is None or self._fills_beside_adapter and (is_first or self.enable_sleep_mode)
        if self.mode == "server":
            if gives_weights:
                super().sync_weights()
            if adapter is not None:
                self._load_adapter_by_server(adapter)
            if self.accelerator.is_main_process:
                client = self.vllm_client
                client.session.post(f"{client.base_url}/reset_encoder_cache").raise_for_status()
            return
        if self.enable_sleep_mode:
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        if gives_weights:
            self._load_weights()
        if adapter is not None:
            self._load_adapter(adapter)
        self.llm.reset_prefix_cache()
        # What encoders made is kept by the medium alone (huggingface/trl#7198)
        self.llm.llm_engine.reset_encoder_cache()

    def _load_weights(self) -> None:
        model = self._runner.model
        # vLLM says which weights it took, and drops others without a word
        left_out = [name for name, weight in self._iter_named_params() if not model.load_weights([(name, weight)])]
        if left_out:
            raise RuntimeError(
                f"vLLM's {type(model).__name__} has no place for {len(left_out)} weights of the model, such as "
                f"'{left_out[0]}', so it would sample from another model; set `use_vllm=False`."
            )

    def _load_adapter(self, adapter: EngineAdapter) -> None:
        engine, last = self.llm.llm_engine, self._adapter_request
        with tempfile.TemporaryDirectory() as folder:
            adapter.write(folder)
            number = 1 if last is None else last.lora_int_id + 1
            request = LoRARequest(f"policy-{number}", number, folder)
            if last is not None:
                engine.remove_lora(last.lora_int_id)
            engine.add_lora(request)
        self._adapter_request = request
        # vLLM drops what is for layers that it doesn't find, or adapts
        manager: Any = self._runner.lora_manager._adapter_manager
        left_out = sorted(manager.get_adapter(number).loras.keys() - manager.modules.keys())
        if left_out:
            raise RuntimeError(
                f"vLLM's {type(self._runner.model).__name__} has no place for the adapter of {len(left_out)} layers, "
                f"such as '{left_out[0]}', so it would sample from another model; leave them out of `target_modules`, "
                "or set `vllm_sync_adapter=False`, which merges the adapter into the weights at each sync."
            )

    @property
    def _runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.model_runner

    def _load_adapter_by_server(self, adapter: EngineAdapter) -> None:
        # Other runs may have left theirs
        name = f"policy-{uuid.uuid4().hex}"
        folder = Path(self._adapter_folder or "", name).absolute()
        is_main = self.accelerator.is_main_process
        if is_main:
            folder.mkdir(parents=True)
        adapter.write(folder if is_main else None)
        last, self._adapter_request = self._adapter_request, LoRARequest(name, 1, str(folder))
        if is_main:
            adapter.replace_on_server(self.vllm_client, folder, last and Path(last.lora_path))


def _check_ids(expected: list[int], found: Sequence[int]) -> None:
    if list(found) != expected:
        raise MediaError(
            f"vLLM made {len(found)} tokens of a prompt that has {len(expected)} here, so what it samples would be "
            "scored after another prompt: its processor and `processing_class` don't agree. Load both from the folder "
            "of the model, or set `use_vllm=False`."
        )


def _joined(asked: list[tuple]) -> list[tuple]:
    """Requests of all processes, those of a group that several processes share as one."""
    joined: list[tuple] = []
    for ids, features, count in asked:
        hashes = features and features["mm_hashes"]
        if joined and joined[-1][0] == ids and (joined[-1][1] and joined[-1][1]["mm_hashes"]) == hashes:
            joined[-1] = (*joined[-1][:2], joined[-1][2] + count)
        else:
            joined.append((ids, features, count))
    return joined


def _range(place, kind: str) -> dict[str, int]:
    """Where a medium's embeddings go, for the server, which can't be told of text between them."""
    offset, length = place.offset, place.length
    if place.is_embed is not None:
        first, last = place.is_embed.nonzero().flatten()[[0, -1]].tolist()
        if not place.is_embed[first : last + 1].all():
            raise MediaError(
                f"vLLM's server can't place {kind} whose placeholders have text between them, as this model's have; "
                "set `vllm_mode='colocate'`."
            )
        offset, length = offset + first, last - first + 1
    return {"offset": offset, "length": length}


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
