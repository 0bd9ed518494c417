# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Several servers: who asks which, what the processes move, and what all servers get."""

import re

import pytest
import torch
import vllm_cpu
from helpers.engine_runs import make
from helpers.fake_server import fake_servers
from helpers.omni import OMNI
from omni import load_omni, omni_rows
from serving import train
from trl.generation import vllm_client

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.engines.vllm_client import ServerGroup


pytestmark = pytest.mark.slow


BOTH = {"ACCELERATE_USE_CPU": "true"}  # otherwise accelerate starts runs of one process each
SEEDED = {"generation_kwargs": {"seed": 100}}
VIEWS = {"rollout_view": "blank", "contrast_view": "blank", "dynamic_sampling": 2}
VIEWS["per_device_train_batch_size"] = 4


def joined(ranks, name="sampled"):
    """Returns the completions of each call, of all ranks in their order."""
    return [[ids for part in parts for ids in part] for parts in zip(*(rank[name] for rank in ranks), strict=True)]


def test_each_process_asks_its_own_server(omni, tmp_path):
    """
    Two and four processes, with one server and with two. Of three groups of four, some straddle processes; an
    evaluation has rows for some of the processes alone.
    """
    found = {}
    for processes in (2, 4):
        folder = tmp_path / str(processes)
        folder.mkdir()
        with fake_servers(omni, [0, 1]) as servers, fake_servers(omni, [0, 1]) as failing:
            one = servers[0].url
            urls = [each.url for each in servers]
            failing[1].fault("drop", after=1, count=10**9)
            split = {**SEEDED, "per_device_train_batch_size": 12 // processes, "n_evaluated": 3}
            runs = {
                "one": {**split, "vllm_server_base_url": one},
                "two": {**split, "vllm_server_base_url": ",".join(urls)},
                "more": {**SEEDED, "vllm_server_base_url": ",".join(urls)},
                "ahead": {**split, "n_evaluated": 0, "vllm_server_base_url": ",".join(urls), "max_staleness": 1},
            }
            if processes == 2:
                broken = ",".join(each.url for each in failing)
                runs["views"] = {**VIEWS, "vllm_server_base_url": ",".join(urls)}
                runs["gone"] = {"vllm_server_base_url": broken, "vllm_server_timeout": 5.0}
            found[processes] = train(omni, folder, processes, runs, "servers_worker.py", **BOTH)
            # Both have the same weights after each step
            weights = [[body for path, body in each.posts if path == "/collective_rpc"] for each in servers]
            n_others = len(found[processes]["one"][0]["moved"]["sync_weights"])
            assert weights[0][n_others:] == weights[1] and len(set(weights[1])) > 3
        if processes == 2:
            [line] = {rank["error"] for rank in found[2]["gone"]}
            assert re.match(rf"RuntimeError: Process 1: The vLLM server at {failing[1].url} didn't answer /", line)
            assert any(name.startswith("contrast/") for each in found[2]["views"][0]["views"] for name in each)
    two = found[2]
    four = found[4]
    # Neither the number of servers nor that of processes changes what is sampled
    samples = joined(two["one"])
    assert len(samples[0]) == 12 and len({tuple(ids) for ids in samples[0]}) == 12
    for each in (two["two"], four["one"], four["two"]):
        assert joined(each)[:2] == samples[:2]
        assert each[0]["evaluated"] == two["one"][0]["evaluated"] != [None] * 3
    assert joined(two["ahead"]) == joined(four["ahead"]) != samples
    # Process 0 moves as many bytes with four processes as with two, each of six rows
    moved = [each["more"][0]["moved"] for each in found.values()]
    assert moved[0]["generate"][0] == moved[1]["generate"][0]  # later steps have other rows
    assert moved[0]["sync_weights"] == moved[1]["sync_weights"]
    assert all(collectives < 100 < requests for collectives, requests in moved[0]["generate"])


@pytest.fixture
def nccl(monkeypatch):
    """Replaces process 0's end of NCCL. Returns what it was opened with, and the weights that it sent."""
    opened = []
    sent = []
    for name, method in vllm_cpu.BY_NCCL.items():
        monkeypatch.setattr(vllm_client.VLLMClient, name, method)

    def send(iterator, **options):
        sent.extend(iterator)

    if vllm_client._HAS_STATEFUL_TRAINER_ENGINE:
        monkeypatch.setattr(vllm_client, "open_trainer_endpoint", opened.append)
        monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", send)
    else:
        engine = vllm_client.NCCLWeightTransferEngine
        monkeypatch.setattr(engine, "trainer_init", opened.append)
        monkeypatch.setattr(engine, "trainer_send_weights", send)
    return opened, sent


def test_all_servers_join_one_broadcast(omni, nccl, monkeypatch):
    opened, sent = nccl
    with fake_servers(omni, [3, 4], world_size=2) as servers:
        group = ServerGroup([each.url for each in servers], 1234, 1.0)
        group.init_communicator("cuda")
        weights = [("a", torch.ones(2, 3)), ("b", torch.zeros(4))]
        group.update_named_params([("a", "float32", [2, 3]), ("b", "float32", [4])], iter(weights))
        group.reset_prefix_cache()
        group.reset_encoder_caches()
        group.communicator = None
        posts = [each.posts for each in servers]
    paths = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    for each, first in zip(posts, (1, 3), strict=True):
        assert [path for path, _ in each] == [*paths, "/reset_prefix_cache", "/reset_encoder_cache"]
        start = each[0][1]["init_info"]
        update = each[2][1]["update_info"]
        assert (start["rank_offset"], start["world_size"], start["master_port"]) == (first, 5, 1234)
        assert update["names"] == ["a", "b"] and update["shapes"] == [[2, 3], [4]]
    assert sent == weights
    assert [(each["rank_offset"], each["world_size"]) for each in opened] == [(1, 5)]


def test_refused_servers(omni, tmp_path):
    options = {"vllm_mode": "server"}
    options["vllm_server_base_url"] = "http://a:8000,http://b:8000"
    with pytest.raises(ValueError, match="has 2 servers for 1 processes, and each process uses only one"):
        make(MultimodalGRPOTrainer, OMNI, omni_rows(), tmp_path, load_omni(omni), **options)
    with fake_servers(omni, [0, 0]) as servers:
        with pytest.raises(
            ValueError, match=r"have the seeds \[0, 0\].*draw the same random numbers.*a different `--seed`"
        ):
            ServerGroup([each.url for each in servers], 1234, 1.0)
