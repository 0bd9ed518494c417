# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Everything that is called in vLLM, by names and signatures, for versions and builds that don't run here."""

import ast
import inspect
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
import torch
import vllm
from transformers import GenerationConfig
from trl.generation import vllm_client
from vllm import LLM, SamplingParams
from vllm.config import ModelConfig, MultiModalConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import mm_input, tokens_input
from vllm.logprobs import Logprob
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.models.utils import WeightsMapper
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing import BaseMultiModalProcessor, BaseProcessingInfo
from vllm.renderers import renderer_from_config
from vllm.renderers.base import BaseRenderer
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from trl_multimodal_rft.engines.vllm import sampling_parameters
from trl_multimodal_rft.engines.vllm_client import _MEDIA_KEYS, _MODEL_KEYS, server_features
from trl_multimodal_rft.engines.vllm_versions import mm_serde


protocol = import_module(f"{mm_serde.__package__}.protocol")


@pytest.fixture(autouse=True)
def engines_gone():
    """No engine has run."""


CALLS = [
    (LLM.sleep, "level"),
    (LLM.wake_up, "tags"),
    (LLM.reset_prefix_cache, ""),
    (LLMEngine.add_request, "request_id prompt params lora_request"),
    (LLMEngine.has_unfinished_requests, ""),
    (LLMEngine.step, ""),
    (LLMEngine.add_lora, "lora_request"),
    (LLMEngine.remove_lora, "lora_id"),
    (LLMEngine.list_loras, ""),
    (LLMEngine.reset_encoder_cache, ""),
    (LoRAModelManager.get_adapter, "adapter_id"),
    (WeightsMapper.apply_list, "values"),
    (GPUModelRunner.reload_weights, "weights_path weights_iterator"),
    (BaseRenderer.render_cmpl, "prompts"),
    (BaseRenderer.get_mm_processor, ""),
    (MultiModalDataParser.__init__, "video_needs_metadata"),
    (renderer_from_config, "config"),
    (EngineArgs.create_engine_config, ""),
    (EngineArgs, "model revision trust_remote_code dtype mm_processor_cache_gb limit_mm_per_prompt"),
    (EngineArgs, " ".join(_MODEL_KEYS)),
    (EngineArgs, "enable_lora max_lora_rank max_loras enable_tower_connector_lora quantization"),
    # TRL's
    (EngineArgs, "tensor_parallel_size gpu_memory_utilization max_num_seqs enable_sleep_mode seed"),
    (EngineArgs, "distributed_executor_backend max_num_batched_tokens logprobs_mode"),
]


@pytest.mark.parametrize(("function", "arguments"), CALLS)
def test_functions_take_these_arguments(function, arguments):
    assert set(arguments.split()) <= inspect.signature(function).parameters.keys()


def test_attributes_exist():
    for owner, names in (
        (BaseRenderer, ("mm_processor", "model_config")),
        (BaseMultiModalProcessor, ("info", "data_parser")),
        (BaseProcessingInfo, ("allowed_mm_limits", "supported_mm_limits")),
        (LoRAModelManager, ("modules",)),
        (WorkerLoRAManager, ("_adapter_manager",)),
        (LLM, ("renderer", "llm_engine")),
        (LLMEngine, ("model_executor",)),
        (GPUModelRunner, ("lora_manager", "model")),
    ):
        source = "".join(inspect.getsource(each) for each in owner.__mro__ if each.__module__.startswith("vllm."))
        for name in names:
            assert hasattr(owner, name) or f"self.{name}" in source, f"{owner.__name__}.{name}"


def test_settings_of_a_server_are_arguments_of_an_engine():
    arguments = {each.name for each in fields(EngineArgs)}
    assert {each.name for each in fields(MultiModalConfig)} & {*_MEDIA_KEYS} <= arguments
    assert {"dtype", "logprobs_mode", "multimodal_config", "model", "revision", "trust_remote_code", *_MODEL_KEYS} <= {
        each.name for each in fields(ModelConfig)
    }


def test_sampling_parameters():
    config = GenerationConfig(
        max_new_tokens=5, eos_token_id=[1, 2], suppress_tokens=[7], do_sample=True, temperature=0.5, top_p=0.9, top_k=3
    )
    options = {"n": 2, "seed": 1, "logprobs": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    options["structured_outputs"] = StructuredOutputsParams(regex="a")
    params = SamplingParams(**sampling_parameters(config), **options, output_kind=RequestOutputKind.FINAL_ONLY)
    assert params.logit_bias == {7: -100.0} and (params.n, params.max_tokens) == (2, 5)


def test_inputs_of_an_engine():
    assert tokens_input([1, 2])["prompt_token_ids"] == [1, 2]
    item = MultiModalKwargsItem.dummy()
    place = PlaceholderRange(offset=1, length=2)
    items = MultiModalKwargsItems({"image": [item]})
    prompt = mm_input([1, 2, 3], items, {"image": ["a"]}, {"image": [place]})
    assert prompt["mm_kwargs"]["image"] == [item] and prompt["prompt_token_ids"] == [1, 2, 3]
    assert prompt["mm_hashes"] == {"image": ["a"]} and prompt["mm_placeholders"] == {"image": [place]}
    assert place.is_embed is None
    request = LoRARequest("policy-1", 1, "folder")
    assert (request.lora_name, request.lora_int_id, request.lora_path) == ("policy-1", 1, "folder")


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # the decoded one
def test_requests_to_a_server():
    item = MultiModalKwargsItem.dummy(4)
    place = PlaceholderRange(offset=1, length=2)
    media = {"mm_kwargs": {"image": [item]}, "mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [place]}}
    sampling = {"n": 2, "max_tokens": 5, "logit_bias": {"7": -100.0}, "detokenize": False, "output_kind": 2}
    body = {"model": "m", "token_ids": [1, 2, 3], "features": server_features(media), "sampling_params": sampling}
    request = protocol.GenerateRequest.model_validate(body)
    assert request.sampling_params.logit_bias == {7: -100.0} and request.token_ids == [1, 2, 3]
    assert request.features.mm_hashes == {"image": ["a"]}
    assert request.features.mm_placeholders["image"][0].model_dump() == {"offset": 1, "length": 2}
    sent = mm_serde.decode_mm_kwargs_item(request.features.kwargs_data["image"][0])
    torch.testing.assert_close(sent.get_data(), item.get_data())
    ahead = protocol.GenerateRequest.model_validate({**body, "model": None, "cache_salt": "3"})
    assert (ahead.model, ahead.cache_salt) == (None, "3")
    assert "keep" in get_args(import_module("vllm.v1.engine").PauseMode)


def test_answers_of_a_server():
    serving = import_module(f"{mm_serde.__package__}.serving")
    answer = serving.ServingTokens._create_tokens_logprobs(None, token_ids=[5], top_logprobs=[{5: Logprob(-0.5, 1)}])
    assert [each["logprob"] for each in answer.model_dump()["content"]] == [-0.5]


@cache
def routes() -> dict[str, str]:
    """Returns the method of each address of vLLM's servers, as their sources declare them."""
    found = {}
    for path in Path(vllm.__file__).parent.joinpath("entrypoints").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") in ("get", "post") and call.args:
                address = getattr(call.args[0], "value", None)
                if isinstance(address, str) and address.startswith("/"):
                    found[address] = call.func.attr
    return found


def test_addresses_of_a_server():
    ours = ["/inference/v1/generate", "/reset_encoder_cache", "/collective_rpc", "/pause", "/resume"]
    ours += ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
    of_trl = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    posts = dict.fromkeys([*ours, *of_trl, "/reset_prefix_cache"], "post")
    gets = dict.fromkeys(("/version", "/server_info", "/get_world_size", "/health"), "get")
    assert (posts | gets).items() <= routes().items()
    lora = import_module("vllm.entrypoints.serve.lora.protocol")
    assert {"lora_name", "lora_path"} <= lora.LoadLoRAAdapterRequest.model_fields.keys()
    assert "lora_name" in lora.UnloadLoRAAdapterRequest.model_fields


def test_servers_say_when_they_were_started():
    assert "instance_id" in {each.name for each in fields(VllmConfig)}
    assert 'self.instance_id = f"{time.time_ns()}"' in inspect.getsource(VllmConfig.__post_init__)
    lines = inspect.getsource(import_module("uvicorn").Config.__init__)
    assert "date_header: bool = True" in lines


def test_flags_of_a_server():
    """As the documentation says, and as TRL's client expects of a version."""
    takes_flag = any(
        "enable_scale_out: bool" in path.read_text()
        for path in Path(vllm.__file__).parent.joinpath("entrypoints").rglob("cli_args.py")
    )
    assert takes_flag == vllm_client.is_vllm_available(min_version="0.30.0")
    assert {"logprobs_mode", "max_logprobs", "weight_transfer_config"} <= {each.name for each in fields(EngineArgs)}


def test_weights_are_sent():
    """By the functions of vLLM that TRL calls, where this version has them."""
    if not vllm_client._HAS_STATEFUL_TRAINER_ENGINE:
        engine = vllm_client.NCCLWeightTransferEngine
        assert "init_info" in inspect.signature(engine.trainer_init).parameters
        assert {"iterator", "trainer_args"} <= inspect.signature(engine.trainer_send_weights).parameters.keys()
        assert {"group", "packed"} <= inspect.signature(vllm_client.NCCLTrainerSendWeightsArgs).parameters.keys()
        return
    assert "init_info" in inspect.signature(vllm_client.open_trainer_endpoint).parameters
    sent = inspect.signature(vllm_client.packed_nccl_broadcast_producer).parameters
    assert {"iterator", "group", "src", "post_iter_func"} <= sent.keys()
    info = import_module("vllm.distributed.weight_transfer.nccl_engine").NCCLWeightTransferUpdateInfo
    assert {"names", "dtype_names", "shapes"} <= {each.name for each in fields(info)}
