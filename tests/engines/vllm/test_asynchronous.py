# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Servers sample ahead of the update: what they are asked, with which weights they answer, and servers that fail."""

import hashlib

import pytest
from helpers import engine_runs
from helpers.chats import image
from helpers.fake_server import LENGTH, digest, fake_servers
from helpers.omni import OMNI
from helpers.resumed_runs import Recording as TrainedOn
from helpers.resumed_runs import same_weights
from helpers.tools import talking
from helpers.trainer_utils import Recording, image_rows, saved
from omni import load_omni, omni_rows
from serving import serve
from talking import TalkingGRPO
from talking import make as make_talking
from weights import OfVersions

from trl_multimodal_rft import MultimodalGRPOTrainer


pytestmark = pytest.mark.slow


# Two groups in a batch, two batches in an epoch
OPTIONS = {
    "max_completion_length": LENGTH,
    "max_steps": 5,
    "self_check": False,
    "vllm_mode": "server",
    "vllm_server_timeout": 20.0,
    "max_staleness": 2,
}


class Hashing(Recording, TrainedOn, MultimodalGRPOTrainer):
    """Records the hashes of media by prompt that servers get."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.hashes = {}
        ask = self.in_flight.ask

        def asked(place, batch, numbers, requests, **more):
            for request in requests.values():
                self.hashes[tuple(request.ids)] = request.rendered and request.rendered["mm_hashes"]
            ask(place, batch, numbers, requests, **more)

        self.in_flight.ask = asked


def make(omni, folder, servers, trainer_class=Hashing, **options):
    urls = [getattr(each, "url", each) for each in servers]
    where = {"vllm_server_base_url": ",".join(urls)}
    given = (trainer_class, OMNI, omni_rows(), folder, load_omni(omni))
    return engine_runs.make(*given, **{**OPTIONS, **where, **options})


@pytest.fixture(scope="module")
def straight(omni, tmp_path_factory):
    """Returns a run without faults, and what its server was posted."""
    with fake_servers(omni, [0], unit=0.05) as servers:
        trainer = make(omni, tmp_path_factory.mktemp("straight"), servers)
        trainer.train()
        assert servers[0].counters["requests"] == 10 and servers[0].counters["torn"] == 0
        return trainer, servers[0].posts


def test_what_servers_are_asked(straight):
    """
    A completion depends on the prompt with its media, and on a seed and a salt by the place of its batch, its row and
    its index there. Servers pause while they get weights.
    """
    trainer, posts = straight
    rollouts = [draw.batch for draw in trainer.draws]
    assert len({tuple(ids) for rollout in rollouts for ids in rollout.source.ids}) == 40
    assert any(trainer.hashes.values()) and not all(trainer.hashes.values())
    for place, rollout in enumerate(rollouts):
        expected = []
        for i, (prompt, row) in enumerate(zip(rollout.prompts, rollout.source.row_indices, strict=True)):
            ids = prompt.input_ids.tolist()
            start = int(hashlib.sha256(f"42 {place} {row}".encode()).hexdigest()[:8], 16)
            drawn = digest([ids, trainer.hashes[tuple(ids)]], start + i, str(max(0, place - 2)))
            expected.append([50 + each % 100 for each in drawn[:LENGTH]])
        assert rollout.source.ids == expected
    sync = ["/pause", "/reset_encoder_cache", "/collective_rpc", "/reset_prefix_cache", "/resume"]
    assert [path for path, _ in posts] == 5 * sync
    assert all(body == {"mode": "keep"} for path, body in posts if path == "/pause")


@pytest.mark.parametrize("kind", ["drop", "error", "slow"])
def test_requests_are_asked_again(omni, tmp_path, straight, kind, caplog):
    """A request without an answer is asked again, by the same seed; one that takes too long, of another server."""
    with fake_servers(omni, [0, 1] if kind == "slow" else [0]) as servers:
        trainer = make(omni, tmp_path, servers, vllm_server_timeout=0.5 if kind == "slow" else 20.0)
        servers[0].fault(kind, after=3, count=1 if kind == "slow" else 3, seconds=60.0)
        trainer.train()
        assert sum(each.counters["requests"] for each in servers) > 10
    assert [each.levelname for each in caplog.records if "It is asked again" in each.message] == ["WARNING"]
    assert trainer.trained_on == straight[0].trained_on and same_weights(trainer, straight[0])


def test_lost_server_ends_the_run(omni, tmp_path):
    with fake_servers(omni, [0]) as servers:
        trainer = make(omni, tmp_path, servers, vllm_server_timeout=1.0)
        servers[0].fault("error", count=1000)
        with pytest.raises(RuntimeError, match=r"500: .* asked 4 times; check the server, or raise"):
            trainer.train()


@pytest.mark.parametrize("k", [0, 2])
def test_server_that_comes_back_has_old_weights(omni, tmp_path, k):
    """What it answers then is never taken for a completion of the trainer's weights."""
    with fake_servers(omni, [0]) as servers:
        trainer = make(omni, tmp_path, servers, MultimodalGRPOTrainer, max_staleness=k)
        servers[0].fault("die", after=5, seconds=1.0)
        with pytest.raises(RuntimeError, match=rf"{servers[0].url} was started again.*resume the run"):
            trainer.train()


def test_servers_share_requests(omni, tmp_path, straight):
    """Requests of a process take turns among servers, and what one doesn't answer another does."""
    with fake_servers(omni, [0, 1]) as servers:
        trainer = make(omni, tmp_path, servers)
        servers[1].fault("drop", after=2)
        trainer.train()
        counters = [each.counters for each in servers]
    assert [each["requests"] for each in counters] == [6, 5]
    assert [each["answers"] for each in counters] == [6, 4]
    assert trainer.trained_on == straight[0].trained_on and same_weights(trainer, straight[0])


def test_real_server_answers_by_the_versions_that_completions_know(server, omni, tmp_path):
    """Also runs the engine check, on the first batch and after an update."""
    trainer = make(omni, tmp_path, [server], OfVersions, self_check=True, max_steps=4, max_completion_length=6)
    trainer.train()
    check = trainer.checks.self_check
    assert check.engine[0] < 1e-4 and check.engine_updated[0] < 1e-4
    found = trainer.differences_by_age()
    assert {age for age, _ in found} >= {0, 1} and max(difference for _, difference in found) < 1e-4


def test_resumed_run_takes_a_real_servers_answers(server, omni, tmp_path):
    """Rows are the same, and so are completions that the checkpoint has."""
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    straight = make(omni, tmp_path / "straight", [server], **options)
    straight.train()
    resumed = make(omni, tmp_path / "resumed", [server], **options)
    loaded = []
    load = resumed.in_flight.load_state_dict
    resumed.in_flight.load_state_dict = lambda state: loaded.append(state) or load(state)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    batches = [draw.batch for draw in resumed.draws]
    assert [each.source.row_indices for each in batches] == [
        draw.batch.source.row_indices for draw in straight.draws[2:]
    ]
    [state] = loaded
    assert state["answers"]
    for (place, row, _, count), (completions, *_) in state["answers"].items():
        rollout = batches[place - 2]
        start = rollout.source.row_indices.index(row)
        assert rollout.source.ids[start : start + count] == [ids for ids, _ in completions]


class TalkingAhead(Recording, TalkingGRPO):
    pass


def test_turns_after_tools_are_by_the_newest_weights(tmp_path):
    """Each first turn is by the weights that its completion claims, of which the first batch has but one."""
    with serve(saved("qwen2_5_vl"), tmp_path) as address:
        options = {"vllm_mode": "server", "vllm_server_base_url": address, "vllm_engine_kwargs": None}
        options |= {"max_staleness": 1, "self_check": False, "max_steps": 3}
        text = {"type": "text", "text": "Is there a cat?"}
        media = [[image(56, 84, 0), text], [text], [image(84, 56, 1), image(56, 56, 2)]]
        trainer = make_talking(TalkingAhead, talking("qwen2_5_vl"), image_rows(), media, tmp_path / "out", **options)
        trainer.train()
    assert len(trainer.differences) == 3
    versions = [draw.batch.source.flight.versions.tolist() for draw in trainer.draws]
    for place, draw in enumerate(trainer.differences):
        for i, difference in enumerate(draw):
            is_sampled = trainer.conversations[8 * place + i][3]
            calls = not is_sampled.all()
            first = is_sampled.tolist().index(False) if calls else len(is_sampled)
            age = place - versions[place][i][0]
            assert age == min(place, 1) and (difference[:first].abs().max() < 1e-4) == (age == 0)
            if calls:
                assert versions[place][i][1] == place and difference[first:].abs().max() < 1e-4
