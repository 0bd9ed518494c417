# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A vLLM server in a separate process: refused servers, and scores of the policy that the server samples from."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import requests
import talking
import torch
import transformers as hf
import vllm
from helpers import engine_runs
from helpers.chats import image, video
from helpers.engine_runs import RecordedOmni
from helpers.marks import slow_but
from helpers.omni import OMNI
from helpers.samplers import Remembers
from helpers.tools import with_turns_of_tools
from helpers.trainer_utils import load, saved, sound, video_rows
from omni import load_omni, omni_rows
from serving import FLAGS
from trl.scripts import vllm_serve
from vllm.multimodal.inputs import PlaceholderRange

from trl_multimodal_rft import MultimodalDistillationTrainer, MultimodalGRPOConfig
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import encode_prompt
from trl_multimodal_rft.engines.vllm_client import (
    ServerClient,
    ServerGroup,
    check_server_settings,
    server_completions,
    server_features,
    server_renderer,
)
from trl_multimodal_rft.engines.vllm_prompts import EnginePrompts, processors_unchecked
from trl_multimodal_rft.engines.vllm_requests import at_once
from trl_multimodal_rft.printable import Foreign


def make(server, omni, tmp_path, rows=None, **options):
    options = {"vllm_mode": "server", "vllm_server_base_url": server, **options}
    # The model is an instance, and the engine runs in the server
    rows = omni_rows() if rows is None else rows
    return engine_runs.make(RecordedOmni, OMNI, rows, tmp_path, load_omni(omni), **options)


def rows_with_a_crop():
    """Returns rows of which the teacher sees another image in the last one."""
    crops = [None, None, None, [image(28, 56, 5)["image"]]]
    rows = omni_rows()
    transform = rows.format["format_kwargs"]["transform"]
    return rows.with_transform(
        lambda batch: {**transform(batch), "teacher_images": [crops[i] for i in batch["index"]]}
    )


ALONE = {"teacher_view": "blank", "num_generations": 1, "per_device_train_batch_size": 4}
CROP = {"rows": rows_with_a_crop, "beta": 0.5}


@pytest.mark.parametrize("options", slow_but([{"beta": 0.5}, ALONE, CROP], {"beta": 0.5}))
def test_teacher_on_the_server_is_the_one_here(server, omni, tmp_path, options):
    """Distills from the served model and from the same one in this process, which say the same of each completion."""
    make(server, omni, tmp_path).vllm_generation.sync_weights()  # of other tests, the server has what they trained
    options = dict(options)
    make_rows = options.pop("rows", omni_rows)
    found = []
    for local in (True, False):
        objects = {**load_omni(omni), "reward_funcs": None}
        with torch.no_grad():
            for parameter in objects["model"].lm_head.parameters():
                parameter *= 0.5
        objects["teacher_model"] = load_omni(omni)["model"] if local else None
        given = {"loss_top_k": 4, "max_steps": 1, "learning_rate": 0.0, "use_vllm": False, "num_generations": 2}
        given |= {"vllm_engine_kwargs": None, "seed": 3, "self_check": False, **options}
        given |= {} if local else {"teacher_model_server_url": server}
        trainer = engine_runs.make(MultimodalDistillationTrainer, OMNI, make_rows(), tmp_path, objects, **given)
        trainer.train()
        found.append([trainer.state.log_history[0][name] for name in ("loss", "grad_norm")])
    assert min(found[0]) > 1e-3 and found[1] == pytest.approx(found[0], rel=1e-3)


@pytest.mark.slow
def test_a_teacher_on_the_server_among_several(server, omni, tmp_path):
    """Rows choose the served model or one in this process. The served one says what it says here, of its rows only."""
    make(server, omni, tmp_path).vllm_generation.sync_weights()
    rows = omni_rows()
    transform = rows.format["format_kwargs"]["transform"]
    chosen = ["served", "near", None, "served"]
    rows = rows.with_transform(
        lambda batch: {**transform(batch), "teacher_id": [chosen[i % 4] for i in batch["index"]]}
    )
    found = []
    for is_local in (True, False):
        near = load_omni(omni)["model"]
        objects = {**load_omni(omni), "reward_funcs": None, "teacher_models": {"near": near}}
        with torch.no_grad():
            near.lm_head.weight *= 0.8
            objects["model"].lm_head.weight *= 0.5
        given = {"loss_top_k": 4, "max_steps": 1, "learning_rate": 0.0, "use_vllm": False, "num_generations": 2}
        given |= {"vllm_engine_kwargs": None, "seed": 3, "self_check": False, "beta": 0.5}
        if is_local:
            objects["teacher_models"]["served"] = load_omni(omni)["model"]
        else:
            given["teacher_models"] = {"served": server}
        trainer = engine_runs.make(MultimodalDistillationTrainer, OMNI, rows, tmp_path, objects, **given)
        trainer.train()
        names = ("loss", "grad_norm", "teacher/served/divergence", "teacher/near/divergence")
        found.append([trainer.state.log_history[0][name] for name in names])
    assert min(found[0]) > 1e-4 and found[1] == pytest.approx(found[0], rel=1e-3)


@pytest.fixture
def client(server):
    return ServerClient(server, 20.0)


@pytest.mark.parametrize("options", slow_but([{}, {"rollout_view": "blank(fraction=0.5)"}], {}))
def test_what_is_sampled_is_what_is_scored(server, omni, tmp_path, options):
    """
    After updates of all weights, for a sound, text alone, several media in one prompt, and an image; also where a half
    of each group sees blank media.
    """
    trainer = make(server, omni, tmp_path, per_device_train_batch_size=16, **options)
    encoded = [len(prompt) for prompt, _, _ in trainer_draw(trainer)]
    assert len(set(encoded)) == 4 and len(encoded) == 16
    trainer.train()
    assert max(trainer.differences) < 1e-5 and len(trainer.differences) == 4
    assert ("view/reward" in trainer.state.log_history[0]) == bool(options)
    assert trainer.vllm_generation._counters()["vllm:generation_tokens"] > 0


def test_tools_show_media(server, omni, tmp_path):
    """Covers all kinds, in conversations of 0 to 3 turns, before and after an update."""
    objects = load_omni(omni)
    with_turns_of_tools(objects["processing_class"])
    media = [
        [image(56, 84), {"type": "audio", "audio": sound(0.5)}],
        [video(4, 56, 56), {"type": "text", "text": "Is there a cat?"}],
        [{"type": "audio", "audio": sound(0.3, 1)}, image(56, 56, 1)],
    ]
    options = {"vllm_mode": "server", "vllm_server_base_url": server, "vllm_engine_kwargs": None}
    trainer = talking.make(talking.TalkingGRPO, objects, video_rows(), media, tmp_path, **options)
    trainer.train()
    check = trainer.checks.self_check
    assert len(trainer.largest) == 2 and max(trainer.largest) <= 1e-4
    assert all(each[1] <= 1e-4 for each in (check.engine, check.engine_updated, check.engine_conversation))
    assert trainer.state.log_history[0]["tools/call_frequency"] == 10 / 8


def trainer_draw(trainer):
    rows = [row for row, _ in product(trainer.train_dataset, range(4))]
    trainer._generate_and_score_completions(rows)
    return trainer.draws[-1]


@pytest.mark.parametrize("part", slow_but(["audio_tower", "visual"], "visual"))
def test_server_forgets_what_encoders_made(server, omni, tmp_path, part):
    """The server encodes the same media again after each update."""
    trainer = make(server, omni, tmp_path, self_check=False)
    trainer_draw(trainer)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if part in name:
                parameter += 0.05 * torch.randn_like(parameter)
    trainer.sampler.invalidate_weights()
    trainer_draw(trainer)
    assert max(trainer.differences) < 1e-5


def metric(server, name) -> float:
    lines = requests.get(f"{server}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}"))


def wait_for_tokens(server, n_requests, answer):
    """Waits until all requests run and each has sampled tokens, or the answer is there."""
    while metric(server, "num_requests_running") < n_requests and not answer.done():
        time.sleep(0.01)
    first = metric(server, "generation_tokens_total")
    while metric(server, "generation_tokens_total") < first + 4 * n_requests and not answer.done():
        time.sleep(0.01)


def test_requests_in_flight_go_on_with_new_weights(server, omni, tmp_path, monkeypatch):
    """A pause keeps them, and what they sample afterwards follows from all they have, as the new weights see it."""
    trainer = make(server, omni, tmp_path, self_check=False)
    trainer.sampler = Remembers(trainer)
    drawn = []
    engine = trainer.vllm_generation
    client = trainer.vllm_generation.vllm_client
    make_requests = engine.requests
    monkeypatch.setattr(
        engine, "requests", lambda *args, **options: drawn.extend(make_requests(*args, **options)) or drawn
    )
    trainer_draw(trainer)
    [(prompts, _, _)] = trainer.sampler.calls
    asked = [each._replace(max_tokens=200).for_server() for each in drawn]
    with ThreadPoolExecutor(1) as pool:
        options = {**engine.sampling, "stop_token_ids": []}
        given = {"timeout": 60.0, "vocab_size": 10**6}
        for _ in range(10):  # on a busy machine, requests may be done before the pause
            answer = pool.submit(at_once, lambda each: server_completions(server, None, each, options, **given), asked)
            wait_for_tokens(server, len(asked), answer)
            client._post(f"{server}/pause?mode=keep")
            time.sleep(0.5)
            if not answer.done():
                break
            client._post(f"{server}/resume")
        old = copy.deepcopy(trainer.model)
        new = trainer.model
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        engine.sync_weights()
        client._post(f"{server}/reset_prefix_cache?reset_running_requests=true")
        client._post(f"{server}/resume")
        completions = [each for group in answer.result() for each in group]
    n_old = []
    for prompt, (ids, logps) in zip(prompts, completions, strict=True):
        differences = []
        for trainer.model in (old, new):
            differences.append((trainer._own_logps(prompt, torch.tensor(ids)) - torch.tensor(logps)).abs() > 1e-4)
        n_old.append(int((~differences[0]).cumprod(0).sum()))
        assert not differences[1][n_old[-1] :].any()
    assert len(n_old) == 16 and 0 < min(n_old) and max(n_old) < 200


def test_server_that_does_not_forget(server):
    group = ServerGroup([server], 1234, 1.0)
    group.clients[0].base_url += "/nowhere"
    with pytest.raises(RuntimeError, match=rf"server at {server}/nowhere didn't answer /reset_encoder_cache \(404: "):
        group.reset_encoder_caches()


def test_processor_that_makes_other_tokens(server, omni, tmp_path):
    trainer = make(server, omni, tmp_path, self_check=False)
    render = trainer.vllm_generation.prompts.renderer.render_cmpl

    def with_one_more(prompts):
        return [{**each, "prompt_token_ids": [*each["prompt_token_ids"], 5]} for each in render(prompts)]

    trainer.vllm_generation.prompts.renderer.render_cmpl = with_one_more
    with pytest.raises(MediaError, match="vLLM's processor and `processing_class` don't agree"):
        trainer_draw(trainer)


# Servers that the trainer refuses


def changed(info, **settings):
    return {**info, "model_config": {**info["model_config"], **settings}}


def test_refused_servers(client, omni, tmp_path):
    info = client.get_server_info()
    config = hf.AutoConfig.from_pretrained(omni)
    assert isinstance(info["model_config"]["model"], Foreign) and "trust_remote_code" not in info["model_config"]
    check_server_settings(client, info, config.thinker_config, "float32")
    with pytest.raises(ValueError, match="computes in float32, and the trainer in bfloat16.*`--dtype bfloat16`"):
        check_server_settings(client, info, config, "bfloat16")
    with pytest.raises(ValueError, match="returns raw_logprobs.*`--logprobs-mode processed_logprobs`"):
        check_server_settings(client, changed(info, logprobs_mode="raw_logprobs"), config, "float32")
    config.thinker_config.text_config.num_hidden_layers += 1
    with pytest.raises(ValueError, match="another model than the trainer's: `num_hidden_layers` is 2, not 3"):
        check_server_settings(client, info, config, "float32")
    # A path on another machine
    check_server_settings(client, changed(info, model=Foreign("/not/here")), config, "float32")


class Answers:
    """A server that supports only a part of the requests."""

    base_url = "http://elsewhere:8000"

    def __init__(self, version=vllm.__version__, status=404):
        self.call = lambda path, method: {"version": version}
        self.answer = lambda path, body: SimpleNamespace(status=status)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (Answers(), "http://elsewhere:8000 takes no features of media; start it with `--enable-scale-out`"),
        (Answers("0.23.0"), f"runs vLLM 0.23.0 and the trainer {vllm.__version__}.*same version for both"),
    ],
)
def test_refused_answers(answers, message):
    info = {"model_config": {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs"}}
    with pytest.raises(ValueError, match=message):
        check_server_settings(answers, info, hf.Qwen2Config(), "float32")


def test_trls_command_starts_a_server_as_it_must_be():
    with patch("os.execve") as execute, pytest.warns(FutureWarning, match="it now only runs vLLM's own server"):
        vllm_serve.main(vllm_serve.ScriptArguments(model="model", dtype="float32"))
    command, environment = execute.call_args.args[1:]
    assert set(command) >= {*FLAGS[FLAGS.index("--logprobs-mode") :]}
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"


def test_engine_kwargs_are_the_servers(tmp_path):
    options = {"use_vllm": True, "vllm_mode": "server", "vllm_engine_kwargs": {"dtype": "float32"}}
    with pytest.raises(ValueError, match=r"`vllm_engine_kwargs` \(dtype\) are for the trainer's own engine"):
        MultimodalGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **options)


# Requests


def test_settings_are_the_servers(client, omni):
    media = {**client.get_server_info()["model_config"]["multimodal_config"], "limit_per_prompt": {"image": 3}}
    media["mm_processor_kwargs"] = {"min_pixels": 3136}
    info = changed(client.get_server_info(), max_model_len=300, dtype="torch.bfloat16", multimodal_config=media)
    renderer = server_renderer(info, str(omni), None, False)
    config = renderer.model_config
    assert (config.max_model_len, config.dtype) == (300, torch.bfloat16)
    assert config.multimodal_config.mm_processor_kwargs == {"min_pixels": 3136}
    assert renderer.mm_processor.info.allowed_mm_limits["image"] == 3


def test_video_with_text_between_its_parts_is_refused(client):
    """Qwen3-VL writes a time before each frame, and HTTP has no field that marks the frame's tokens."""
    folder = saved("qwen3_vl")
    renderer = server_renderer(client.get_server_info(), str(folder), None, False)
    model, processor = load("qwen3_vl")
    prompts = EnginePrompts(renderer, processor, "server")
    rows = rows_to_messages(list(video_rows(1)), (), [])
    decoded = encode_prompt(rows[0]["prompt"], processor, model, keep_decoded=True).decoded[0][1]
    with processors_unchecked():
        [rendered] = renderer.render_cmpl([prompts.with_media(decoded, 0)])
    with pytest.raises(MediaError, match="text among the placeholders of one video.*`vllm_mode='colocate'`"):
        server_features(rendered)


def test_tokens_around_a_medium_are_left_out():
    """One run of embeddings needs no such field."""
    inside = torch.tensor([False, True, True, False])
    place = PlaceholderRange(offset=3, length=4, is_embed=inside)
    rendered = {"mm_kwargs": {"audio": []}, "mm_hashes": {"audio": ["a"]}, "mm_placeholders": {"audio": [place]}}
    assert server_features(rendered)["mm_placeholders"] == {"audio": [{"offset": 4, "length": 2}]}
