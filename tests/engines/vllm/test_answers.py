# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Servers whose answers aren't what was asked for, come late or never, or are lost; with and without staleness."""

import json
import os
import signal
import threading
import time
from itertools import product

import pytest
import requests
from helpers.fake_server import LENGTH, fake_servers
from helpers.resumed_runs import Recording as TrainedOn
from helpers.resumed_runs import checkpoint, same_weights
from helpers.spoiled import GENERATE, KINDS, PLACEHOLDER, proxy_of, second
from helpers.trainer_utils import Recording, image_rows, saved
from peft import LoraConfig
from test_asynchronous import make
from transformers import TrainerCallback
from weights import trainer_of

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.engines import vllm_requests
from trl_multimodal_rft.engines.in_flight import request_keys
from trl_multimodal_rft.engines.vllm_client import ServerClient


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def engines_gone(monkeypatch):
    """No engine is in this process. Waits are short."""
    monkeypatch.setattr(vllm_requests, "_FIRST_WAIT", 0.01)


class Recorded(Recording, TrainedOn, MultimodalGRPOTrainer):
    pass


SEEDED = {"max_steps": 3, "generation_kwargs": {"seed": 1}}


@pytest.fixture(scope="module")
def proxy(omni):
    with fake_servers(omni, [0]) as servers, proxy_of(servers[0].url) as proxy:
        yield proxy


class Asked:
    """Asks a server for the completions of four rows, as a trainer does."""

    def __init__(self, omni, folder, proxy, k):
        self.trainer = make(omni, folder, [proxy], Recorded, max_staleness=k, **SEEDED)
        self.k = k
        self.proxy = proxy
        self.place = 0
        self.engine = self.trainer.vllm_generation
        self.engine._placeholders = {PLACEHOLDER}
        rows = [row for row, _ in product(self.trainer.train_dataset, range(4))]
        self.prompts = self.trainer._prompting.collect(self.trainer._stream.without_prompts(rows)).prompts

    def __call__(self) -> list:
        if self.k == 0:
            return self.engine.sample(self.engine.requests(self.prompts))
        numbers = [i // 4 for i in range(16)]
        flight = self.trainer.in_flight
        self.place += 1
        keys = request_keys(self.prompts, numbers, range(16), 0, 1)
        prompts = zip(keys, self.engine.requests(self.prompts), strict=True)
        asked = {key: each.for_server()._replace(seed=key[2]) for key, each in prompts}
        flight.max_staleness = self.place  # one salt
        flight.ask(self.place, None, numbers, asked, {}, views=None, probes=[])
        _, answers, _ = flight.take(self.place)
        self.engine.check_restarts()
        return [each for answer in answers for each in answer.completions]


@pytest.fixture(scope="module", params=[0, 2])
def ask(request, omni, tmp_path_factory, proxy):
    asked = Asked(omni, tmp_path_factory.mktemp("asked"), proxy, request.param)
    asked.straight = asked()
    assert len({tuple(ids) for ids, _ in asked.straight}) == 16
    return asked


@pytest.fixture
def spoil(proxy):
    def spoil(name, count=1):
        proxy.change = KINDS[name].change
        proxy.n_spoiled = count

    proxy.reset()
    yield spoil
    requests.post(f"{proxy.target}/resume")
    proxy.over.set()
    n_asked = -1
    while n_asked != proxy.asked[GENERATE]:  # requests of a run that has ended may still come
        n_asked = proxy.asked[GENERATE]
        time.sleep(0.1)
    proxy.reset()
    proxy.over = threading.Event()


@pytest.mark.parametrize("name", KINDS)
def test_every_answer_is_checked(ask, proxy, spoil, name, monkeypatch):
    """What isn't what was asked for is asked again, and the result is the same, or an error says what and of whom."""
    outcome, says = KINDS[name][1:]
    if "0.3 s" in says:
        monkeypatch.setattr(ask.engine, "server_timeout", 0.3 / (1 + ask.k))
    spoil(name)
    start = time.monotonic()
    if outcome == "ends":
        with pytest.raises(RuntimeError) as error:
            ask()
        assert f"{proxy.url} didn't answer {GENERATE} (" in str(error.value) and says in str(error.value)
        assert time.monotonic() - start < 5
        while proxy.asked[GENERATE] < 4:  # the others come later
            time.sleep(0.01)
        return
    found = ask()
    wrong = set()
    assert proxy.asked[GENERATE] == 4 + (outcome == "again")
    assert [ids for ids, _ in found] == [ids for ids, _ in ask.straight]
    for (_, before), (_, after) in zip(ask.straight, found, strict=True):
        wrong |= {b for a, b in zip(before, after, strict=True) if a != b}
    assert wrong == (set() if outcome == "again" or name == "another order" else {None})


def test_tokens_behind_an_end_of_text(ask, proxy, spoil):
    ask()
    spoil("500")
    proxy.change = second(json.loads(proxy.body)["sampling_params"]["stop_token_ids"][0])
    assert [ids for ids, _ in ask()] == [ids for ids, _ in ask.straight] and proxy.asked[GENERATE] == 9


def test_ends_of_text_are_sent(ask, proxy, spoil):
    ask()
    sent = json.loads(proxy.body)["sampling_params"]
    assert (sent["stop_token_ids"], sent["ignore_eos"]) == (ask.trainer.eos_token_ids, True)


@pytest.fixture(scope="module", params=[0, 2])
def straight(request, omni, tmp_path_factory, proxy):
    """Returns a run without faults."""
    proxy.reset()
    folder = tmp_path_factory.mktemp("straight")
    trainer = make(omni, folder, [proxy], Recorded, max_staleness=request.param, **SEEDED)
    trainer.train()
    return trainer


def again(straight, omni, folder, proxy, **options):
    """Returns a trainer for the same run."""
    return make(omni, folder, [proxy], Recorded, **{"max_staleness": straight.args.max_staleness, **SEEDED, **options})


@pytest.mark.parametrize("name", ["too few logprobs", "too many tokens", "a choice more", "another order"])
def test_a_wrong_answer_changes_no_run(straight, omni, proxy, spoil, tmp_path, name):
    spoil(name)
    trainer = again(straight, omni, tmp_path, proxy)
    trainer.train()
    assert proxy.n_spoiled == 0 and proxy.asked[GENERATE] == 6 + (KINDS[name].outcome == "again") + 1
    assert trainer.trained_on == straight.trained_on and same_weights(trainer, straight)


def test_wrong_answers_end_the_run(straight, omni, proxy, spoil, tmp_path):
    """The error has the address and what came from it."""
    trainer = again(straight, omni, tmp_path, proxy, vllm_server_timeout=0.5)
    spoil("html", count=1000)
    message = (
        rf"{proxy.url} didn't answer {GENERATE} \(it holds no completions: '<html>busy</html>'\). It was asked \d"
    )
    with pytest.raises(RuntimeError, match=message) as error:
        trainer.train()
    assert any("Sampling with vLLM failed after step 0" in note for note in error.value.__notes__)


def test_tokens_without_a_log_probability_are_counted(straight, omni, proxy, spoil, tmp_path, caplog):
    trainer = again(straight, omni, tmp_path / "some", proxy)
    spoil("NaN logprobs")
    trainer.train()
    shares = [entry["sampling/no_logp_frac"] for entry in trainer.state.log_history[:-1]]
    assert sorted(shares) == [0, 0, 0.5]
    [warning] = [each.message for each in caplog.records if "gave no log-probability of" in each.message]
    assert "24 of 48 tokens" in warning
    # All of a first batch
    trainer = again(straight, omni, tmp_path / "all", proxy)
    spoil("NaN logprobs", count=1000)
    message = "no log-probability of 48 of 48 tokens.*`vllm_importance_sampling_correction=False"
    with pytest.raises(RuntimeError, match=message):
        trainer.train()
    assert not trainer.micro_batches
    given = {"vllm_importance_sampling_correction": False, "max_steps": 1}
    trainer = again(straight, omni, tmp_path / "uncorrected", proxy, **given)
    trainer.train()
    assert trainer.state.log_history[0]["sampling/no_logp_frac"] == 1


SYNC = ["/pause", "/reset_encoder_cache", "/collective_rpc", "/reset_prefix_cache", "/resume"]


@pytest.mark.parametrize("path", SYNC)
def test_every_call_of_a_sync_has_a_time_out(ask, proxy, spoil, path, monkeypatch):
    """The error names the call, also where those that come after it fail, too."""
    if ask.k == 0 and path in ("/pause", "/resume"):
        return
    for each in ask.engine.vllm_client.clients:
        monkeypatch.setattr(each, "timeout", 0.3)
    monkeypatch.setattr(ask.engine, "server_timeout", 0.3)
    proxy.hang = {path}
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"{proxy.url} didn't answer {path}[^ ]* \(no complete answer in 0.3 s"):
        ask.engine.sync_weights()
    assert time.monotonic() - start < 3
    proxy.hang = set()
    proxy.fail = {path, "/resume"}
    with pytest.raises(RuntimeError, match=rf"didn't answer {path}[^ ]* \(status 500: 'broken'"):
        ask.engine.sync_weights()


def test_a_server_that_is_away_at_a_sync_is_waited_for(ask, proxy, spoil):
    for path in SYNC[: -1 if ask.k == 0 else None]:
        if path != "/collective_rpc":  # of which a part may have come
            proxy.drops[path] = 2
    ask.engine.sync_weights()
    assert ask.k == 0 or not any(proxy.drops.values())


def test_a_server_that_speculates(omni, tmp_path, proxy, spoil, monkeypatch):
    """What vLLM refuses then is an error at the start. A run goes on without the metrics of a server that has none."""
    info = ServerClient.get_server_info
    speculative = {"speculative_config": {"method": "ngram"}}
    monkeypatch.setattr(ServerClient, "get_server_info", lambda self: {**info(self), **speculative})
    with pytest.raises(ValueError, match="doesn't support `min_p` with `speculative_config`"):
        make(omni, tmp_path, [proxy], Recorded, min_p=0.1)
    trainer = make(omni, tmp_path, [proxy], Recorded, max_staleness=0, **SEEDED)
    trainer.train()
    assert proxy.asked["/metrics"] == 3
    assert not any("sampling/acceptance_length" in entry for entry in trainer.state.log_history)


def test_time_out_at_the_start(omni, tmp_path, proxy, spoil):
    proxy.hang = {"/health"}
    with pytest.raises(RuntimeError, match=rf"{proxy.url} didn't answer /health \(no complete answer in 0.3 s\)"):
        make(omni, tmp_path, [proxy], Recorded, vllm_server_timeout=0.3)


def test_interrupt(ask, proxy, spoil):
    """Ctrl-C doesn't wait for a server."""
    proxy.hang = {GENERATE}
    start = time.monotonic()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ask()
    assert time.monotonic() - start < 3
    if ask.k:
        ask.trainer.in_flight.clear()


# Adapters

LOAD = "/v1/load_lora_adapter"


@pytest.mark.parametrize("k", [0, 2])
def test_adapters_come_back(tmp_path, k):
    """A server that is away at a sync is waited for, and one that was started again gets the adapter again."""
    folder = saved("qwen2_5_vl")
    lora = LoraConfig(r=8, target_modules=["q_proj"])
    options = {"vllm_mode": "server", "vllm_engine_kwargs": {"enable_lora": True}, "max_staleness": k}
    options |= {"save_strategy": "no", "max_completion_length": LENGTH, **SEEDED}
    runs = []
    for fails in (False, True):
        with fake_servers(folder, [0]) as servers, proxy_of(servers[0].url) as proxy:
            given = {"trainer_class": Recorded, "vllm_server_base_url": proxy.url, **options}
            trainer = trainer_of(folder, image_rows, tmp_path / str(fails), lora, **given)
            if fails:
                proxy.drops[LOAD] = 2
                servers[0].fault("die", after=3, seconds=0.5)
            trainer.train()
            loaded = [body["lora_name"] for path, body in servers[0].posts if path == LOAD]
            assert len(set(loaded)) == 3 and (k == 2 or (len(loaded) > 3) == fails)
            runs.append(trainer)
    assert runs[0].trained_on == runs[1].trained_on and same_weights(*runs)


# Resuming with other settings


class Waits(TrainerCallback):
    """Lets checkpoints find all answers."""

    def __init__(self, trainer):
        self.flight = trainer.in_flight

    def on_step_end(self, args, state, control, **kwargs):
        for asked in self.flight._pending.values():
            for answer in asked.answers.values():
                answer.result()


# What changes, and how many of the four answers of a checkpoint are asked for again
SETTINGS = {
    "same": ({}, 0),
    "max_staleness": ({"max_staleness": 1}, 4),
    "max_completion_length": ({"max_completion_length": 3}, 4),
    "temperature": ({"temperature": 0.5}, 4),
    "budget": ({"max_pixels": 28 * 56}, 2),  # of images and videos
}


@pytest.fixture(scope="module")
def saving(omni, tmp_path_factory, proxy):
    proxy.reset()
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}
    trainer = make(omni, tmp_path_factory.mktemp("saving"), [proxy], Recorded, **options)
    trainer.add_callback(Waits(trainer))
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_of_other_settings_are_asked_for_again(omni, tmp_path, proxy, saving, spoil, name, caplog):
    options, n_again = SETTINGS[name]
    resumed = make(omni, tmp_path, [proxy], Recorded, **{"max_steps": 5, **options})
    resumed.train(resume_from_checkpoint=checkpoint(saving, 2))
    assert proxy.asked[GENERATE] == 1 + 2 + n_again  # one without a body
    [*warnings] = [each.message for each in caplog.records if "answers of the checkpoint are of other" in each.message]
    assert len(warnings) == (2 if n_again else 0)
    rollouts = [draw.batch for draw in resumed.draws]
    assert max(len(ids) for rollout in rollouts for ids in rollout.source.ids) == resumed.max_completion_length
    ages = [
        place - rollout.source.flight.versions[:, 0].min().item() for place, rollout in enumerate(rollouts, start=2)
    ]
    assert max(ages) == (2 if n_again < 4 else 1 if name == "max_staleness" else 2)
